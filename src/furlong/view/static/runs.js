// The list of runs: what each reached, and which ones the charts show.
import { h, fill, num, columns } from "./elements.js";

const MOST = 8;  // in the charts

/** Time in the reader's zone, to the minute. */
function when(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("sv-SE").slice(0, 16) : "";
}

export async function showRuns(place, view) {
  const chosen = new Set(view.shown);
  const body = h("tbody"), compare = h("a", { class: "button" });
  const metrics = [...new Set(view.runs.flatMap((run) => Object.keys(run.last)))].toSorted();
  function drawLink() {
    compare.textContent = `Compare ${chosen.size} of at most ${MOST}`;
    compare.href = view.link("overview", {}, { shown: [...chosen], run: chosen.has(view.number) ? view.number : [...chosen][0] ?? view.number });
  }
  function row(run, i) {
    const box = h("input", {
      type: "checkbox", checked: chosen.has(i), "aria-label": `Show ${run.name} in the charts`, disabled: !chosen.has(i) && chosen.size >= MOST,
      onchange: () => { if (box.checked) chosen.add(i); else chosen.delete(i); draw(view.runs); },
    });
    return h("tr", null, h("td", null, box),
      h("th", { scope: "row", title: run.folder }, h("a", { href: view.link("overview", {}, { run: i, shown: [i] }) }, run.name)),
      h("td", null, h("span", { class: `state ${run.state}` }, run.state)),
      h("td", { class: "number" }, run.num_rollout ? `${run.last_step} of ${run.num_rollout}` : String(run.last_step)),
      metrics.map((name) => h("td", { class: "number" }, num(run.last[name]))),
      h("td", null, run.algorithm || ""), h("td", null, run.model), h("td", { class: "nowrap" }, when(run.started)));
  }
  function draw(runs) {
    fill(body, runs.map(row));
    drawLink();
  }
  const titles = ["", "Run", "State", "Step", ...metrics, "Algorithm", "Model", "Started"];
  fill(place, h("p", { class: "pager" }, compare, h("span", { class: "muted" }, "Values are the last ones. A name opens that run alone.")),
    h("div", { class: "scroll" }, h("table", { class: "wide" }, h("thead", null, h("tr", null, columns(titles, [3, ...metrics.map((_, i) => i + 4)]))), body)));
  draw(view.runs);
  return { refresh: draw };
}
