// Evaluation sets: their results by step, and examples of one evaluation.
import { h, fill, num, choice, field, pager, columns, note } from "./elements.js";
import { get } from "./source.js";
import { listSamples } from "./samples.js";

export async function showEvaluations(place, number, runs) {
  const run = runs[number];
  const names = run.metrics.filter((name) => name.startsWith("eval/"));
  const facts = await get(`sample_facts/${number}`);
  if (!names.length && !facts.sets.length) {
    fill(place, note("This run has no evaluation. Set ", h("code", null, "--eval-prompt-data NAME FILE"), " and ", h("code", null, "--eval-interval N"), "."));
    return null;
  }
  const sets = [...new Set([...facts.sets, ...names.map((name) => name.split("/")[1].split(/-pass@|-truncated_ratio/)[0])])].sort();
  const top = h("div"), examples = h("div", { class: "split" });
  let set = sets[0], step = "", offset = 0, order = "reward", handle = { keys: null };
  async function draw() {
    const own = names.filter((name) => new RegExp(`^eval/${set.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}($|-pass@|-truncated_ratio$|/response_len/mean$)`).test(name));
    const results = await get(`metrics/${number}`, { names: own.join(",") });
    const rows = results.steps.map((s, i) => [s, own.map((name) => (results.columns[name] || [])[i] ?? null)]).filter(([, values]) => values.some((v) => v !== null));
    const table = h("div", { class: "scroll short" }, h("table", null,
      h("thead", null, h("tr", null, columns(["Step", ...own.map((name) => name.slice(5))], [0, ...own.map((_, i) => i + 1)]))),
      h("tbody", null, rows.map(([s, values]) => h("tr", null, h("td", { class: "number" }, String(s)), values.map((v) => h("td", { class: "number" }, num(v))))))));
    fill(top, h("div", { class: "filters" },
      field("Set", choice(sets.map((s) => [s, s]), set, (v) => { set = v; offset = 0; draw(); })),
      field("Examples of step", choice([["", "all"], ...facts.eval_steps.toReversed().map((s) => [s, s])], step, (v) => { step = v; offset = 0; draw(); })),
      field("Order", choice([["reward", "lowest reward"], ["-reward", "highest reward"], ["", "newest step"], ["-length", "longest"]], order, (v) => { order = v; offset = 0; draw(); }))),
    own.length ? table : note("No result yet."));
    if (!facts.sets.includes(set)) {
      fill(examples, note("The samples of evaluations are saved with ", h("code", null, "--save-debug-rollout-data"), " or ", h("code", null, "--dump-details"), "."));
      return;
    }
    handle = await listSamples(examples, number, { set, step, order, offset });
    handle.list.append(pager(handle.page.total, offset, 50, (next) => { offset = next; draw(); }));
  }
  fill(place, top, h("h2", null, "Examples"), examples);
  await draw();
  return { keys: (key) => handle.keys && handle.keys(key) };
}
