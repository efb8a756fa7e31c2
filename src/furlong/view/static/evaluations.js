// Evaluation sets: their results by step, and examples of one evaluation.
import { h, fill, num, choice, field, pager, columns, note } from "./elements.js";
import { get } from "./source.js";
import { listSamples } from "./samples.js";

export async function showEvaluations(place, view) {
  const { number } = view, run = view.runs[number];
  const names = run.metrics.filter((name) => name.startsWith("eval/"));
  const facts = await get(`sample_facts/${number}`);
  if (!names.length && !facts.sets.length) {
    fill(place, note("This run has no evaluation. Set ", h("code", null, "--eval-prompt-data NAME FILE"), " and ", h("code", null, "--eval-interval N"), "."));
    return null;
  }
  const sets = [...new Set([...facts.sets, ...names.map((name) => name.split("/")[1].split(/-pass@|-truncated_ratio/)[0])])].toSorted();
  const top = h("div"), examples = h("div", { class: "split" });
  const { file, pos, ...given } = view.params;
  const chosen = { set: sets[0], step: "", offset: 0, order: "reward", ...given };
  if (!sets.includes(chosen.set)) [chosen.set] = sets;
  let handle = { keys: null };
  const save = (sample) => view.save({
    ...chosen, offset: chosen.offset || "", order: chosen.order === "reward" ? "" : chosen.order, set: sets.length > 1 ? chosen.set : "", ...sample,
  });
  const change = (name) => (value) => { Object.assign(chosen, { offset: 0, [name]: value }); draw(); };
  async function draw(opened = {}) {
    const { set, step, order } = chosen, offset = Number(chosen.offset);
    save({});
    const own = names.filter((name) => new RegExp(`^eval/${set.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}($|-pass@|-truncated_ratio$|/response_len/mean$)`).test(name));
    const results = await get(`metrics/${number}`, { names: own.join(",") });
    const rows = results.steps.map((s, i) => [s, own.map((name) => (results.columns[name] || [])[i] ?? null)]).filter(([, values]) => values.some((v) => v !== null));
    const table = h("div", { class: "scroll short" }, h("table", null,
      h("thead", null, h("tr", null, columns(["Step", ...own.map((name) => name.slice(6 + set.length) || "mean reward")], [0, ...own.map((_, i) => i + 1)]))),
      h("tbody", null, rows.map(([s, values]) => h("tr", null, h("td", { class: "number" }, String(s)), values.map((v) => h("td", { class: "number" }, num(v))))))));
    fill(top, h("div", { class: "filters" },
      field("Set", choice(sets.map((s) => [s, s]), set, change("set"))),
      field("Examples of step", choice([["", "all"], ...facts.eval_steps.toReversed().map((s) => [s, s])], step, change("step"))),
      field("Order", choice([["reward", "lowest reward"], ["-reward", "highest reward"], ["", "newest step"], ["-length", "longest"]], order, change("order")))),
    own.length ? table : note("No result yet."));
    if (!facts.sets.includes(set)) {
      fill(examples, note("No samples of this set are saved: ", h("code", null, "--keep-samples"), " keeps those of the newest evaluations, ", h("code", null, "--dump-details"), " all."));
      return;
    }
    handle = await listSamples(examples, number, { set, step, order, offset }, opened, save);
    handle.list.append(pager(handle.page.total, offset, 50, change("offset")));
  }
  fill(place, top, h("h2", null, "Examples"), examples);
  await draw({ file, pos });
  return { keys: (key) => handle.keys && handle.keys(key) };
}
