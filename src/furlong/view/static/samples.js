// The list of samples with filters, and one sample beside it.
import { h, fill, num, choice, field, pager, columns, note, problem } from "./elements.js";
import { get, isExport } from "./source.js";
import { showSample } from "./sample.js";

const PAGE = 50, MANY_STEPS = 300;  // more steps are typed, not chosen from a list

/** What to do when a run has no samples to show; null if it has some. */
export function missing(facts, state) {
  if (facts.steps.length) return null;
  if (!facts.generates) {
    return note("This run trains on demonstrations and generates no samples. Those of its evaluations (", h("code", null, "--eval-prompt-data NAME FILE"), ") are in the view Evaluations.");
  }
  if (!facts.saves_samples) {
    return note("This run does not save its samples. Leave out ", h("code", null, "--keep-samples 0"), " to keep the newest, or start a run with ",
      h("code", null, "--dump-details DIR"), " to keep all of them with their advantages.");
  }
  if (/\{rollout_id\}.*\//.test(facts.where)) {
    return note("No samples at ", h("code", null, facts.where), ": the page reads one folder. Put {rollout_id} into the name of the file.");
  }
  return note(facts.num_waiting ? "The samples are being indexed." : [
    "No samples at ", h("code", null, facts.where), state === "running" ? ". The first file appears after the first rollout. " : ": the run ended before its first rollout, or they were moved or deleted. ",
    facts.where.startsWith("/") ? null : "The path is relative: start furlong view in the folder in which the run was started."],
    facts.problems.map((text) => h("span", { class: "block" }, text)));
}

function controls(facts, filters, change) {
  const set = (name) => (value) => change({ ...filters, [name]: value, offset: 0 });
  const typed = (name, label, more) => field(label, h("input", {
    value: filters[name] ?? "", size: 6, ...more, onchange: (event) => set(name)(event.target.value.trim()),
  }));
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    facts.steps.length > MANY_STEPS
      ? typed("step", "Step", { inputMode: "numeric", placeholder: `${facts.steps[0]}–${facts.steps.at(-1)}` })
      : field("Step", choice([["", "all"], ...facts.steps.toReversed().map((step) => [step, step])], filters.step ?? "", set("step"))),
    field("Status", choice([["", "all"], ...facts.statuses.map((s) => [s, s])], filters.status ?? "", set("status"))),
    typed("reward_min", "Reward from", { inputMode: "decimal" }), typed("reward_max", "to", { inputMode: "decimal" }),
    typed("group", "Group", { inputMode: "numeric" }),
    typed("text", "Text", { type: "search", size: 16, title: "In the first 2,000 characters of prompt or response" }),
    field("Order", choice([["", "newest step"], ["reward", "lowest reward"], ["-reward", "highest reward"], ["-length", "longest"], ["logp", "least likely"]],
      filters.order ?? "", set("order"))));
}

function row(sample, isOpen, open) {
  return h("tr", {
    class: isOpen ? "open" : "", tabIndex: 0, onclick: open,
    onkeydown: (event) => { if (event.key === "Enter") open(); },
  },
  h("td", { class: "number" }, String(sample.step)), h("td", { class: "number" }, String(sample.grp)),
  h("td", { class: "number" }, num(sample.reward)), h("td", null, h("span", { class: `status ${sample.status}` }, sample.status)),
  h("td", { class: "number" }, String(sample.response_len)),
  h("td", { class: "cut", title: sample.asked }, sample.asked), h("td", { class: "cut", title: sample.response }, sample.response));
}

/** A list of samples with one beside it: that of `place` {file, pos}, or the first. `onOpen` gets the place of an opened one. */
export async function listSamples(place, number, filters, opened, onOpen, kept = "") {
  const page = await get(`samples/${number}`, filters);
  const list = h("div", { class: "list" }), detail = h("article", { class: "detail", "aria-live": "polite" });
  let at = -1;
  const body = h("tbody");
  async function open(i) {
    if (i < 0 || i >= page.rows.length) return;
    at = i;
    [...body.children].forEach((element, k) => element.classList.toggle("open", k === i));
    body.children[i].scrollIntoView({ block: "nearest" });
    await showSample(detail, number, page.rows[i].file, page.rows[i].pos, onOpen);
  }
  page.rows.forEach((sample, i) => body.append(row(sample, false, () => open(i))));
  fill(list, h("div", { class: "scroll" }, h("table", { class: "samples" },
    h("thead", null, h("tr", null, columns(["Step", "Group", "Reward", "Status", "Tokens", "Last user message", "Response"], [0, 1, 2, 4]))), body)));
  fill(place, list, detail);
  const listed = page.rows.findIndex((each) => each.file === opened.file && String(each.pos) === String(opened.pos));
  if (opened.file && listed < 0) await showSample(detail, number, opened.file, Number(opened.pos), onOpen);
  else if (page.rows.length) await open(Math.max(listed, 0));
  else fill(detail, note("No sample matches these filters. ", kept));
  return { page, list, keys: (key) => { if (key !== "j" && key !== "k") return false; open(at + (key === "j" ? 1 : -1)); return true; } };
}

export async function showSamples(place, view) {
  const { number } = view;
  const facts = await get(`sample_facts/${number}`);
  const absent = missing(facts, view.runs[number].state);
  if (absent) {
    fill(place, absent);
    return { refresh: () => showSamples(place, view) };
  }
  const { file, pos, ...given } = view.params;
  let filters = { offset: 0, ...given }, handle = { keys: null };
  const kept = facts.is_newest ? `Only those of steps ${facts.steps[0]} to ${facts.steps.at(-1)} are kept (--keep-samples).` : "";
  const top = h("div"), both = h("div", { class: "split" });
  async function change(next, opened = {}) {
    filters = next;
    view.save({ ...filters, offset: filters.offset || "", ...opened });
    fill(top, controls(facts, filters, change),
      facts.num_waiting ? note(`${facts.num_waiting} files are not indexed yet.`) : null,
      facts.problems.map((text) => note(text)),
      facts.is_newest ? h("p", { class: "muted" }, "The newest rollouts of the run. ", h("code", null, "--dump-details DIR"), " keeps all, with advantages.") : null,
      isExport ? note("This file contains some of the run's samples.") : null);
    try {
      handle = await listSamples(both, number, filters, opened, (sample) => view.save({ ...filters, offset: filters.offset || "", ...sample }), kept);
      handle.list.append(pager(handle.page.total, Number(filters.offset) || 0, PAGE, (offset) => change({ ...filters, offset })));
    } catch (error) {
      fill(both, problem(error));
    }
  }
  fill(place, top, both);
  await change(filters, { file, pos });
  return { keys: (key) => handle.keys && handle.keys(key) };
}
