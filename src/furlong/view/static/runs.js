// The list of runs: what each reached, and which ones the charts show.
import { h, fill, num, field } from "./elements.js";

const MOST = 8;  // in the charts

/** Time in the reader's zone, to the minute. */
function when(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString("sv-SE").slice(0, 16) : "";
}

export async function showRuns(place, view) {
  const chosen = new Set(view.shown);
  const body = h("tbody"), compare = h("a", { class: "button" });
  const metrics = [...new Set(view.runs.flatMap((run) => Object.keys(run.last)))].toSorted();
  const values = {  // of the columns, by title; those of numbers are largest first
    Run: (run) => run.name, State: (run) => run.state, Step: (run) => run.last_step,
    ...Object.fromEntries(metrics.map((name) => [name, (run) => run.last[name] ?? -Infinity])),
    Algorithm: (run) => run.algorithm || "", Model: (run) => run.model, Started: (run) => run.started ?? 0,
  };
  const clear = h("button", { onclick: () => { chosen.clear(); draw(view.runs); } }, "Clear");
  const order = { title: "Started", sign: -1 };
  const search = h("input", { type: "search", placeholder: "all", oninput: () => draw(view.runs) });
  function picked() {
    return { shown: [...chosen], run: chosen.has(view.number) ? view.number : [...chosen][0] ?? view.number };
  }
  function drawLink() {
    compare.hidden = clear.disabled = chosen.size === 0;
    compare.textContent = `Compare ${chosen.size} of at most ${MOST}`;
    compare.href = view.link("overview", {}, picked());
  }
  function row(run, i) {
    const box = h("input", {
      type: "checkbox", checked: chosen.has(i), "aria-label": `Show ${run.name} in the charts`, disabled: !chosen.has(i) && chosen.size >= MOST,
      onchange: () => {
        if (box.checked) chosen.add(i); else chosen.delete(i);
        if (chosen.size) history.replaceState(null, "", view.link("runs", {}, picked()));
        draw(view.runs);
      },
    });
    return h("tr", null, h("td", null, box),
      h("th", { scope: "row", title: run.folder }, h("a", { href: view.link("overview", {}, { run: i, shown: [i] }) }, run.name)),
      h("td", null, h("span", { class: `state ${run.state}` }, run.state)),
      h("td", { class: "number" }, run.num_rollout ? `${run.last_step} of ${run.num_rollout}` : String(run.last_step)),
      metrics.map((name) => h("td", { class: "number" }, num(run.last[name]))),
      h("td", null, run.algorithm || ""), h("td", null, run.model), h("td", { class: "nowrap" }, when(run.started)));
  }
  function isNumber(title) {
    return title === "Step" || title === "Started" || metrics.includes(title);
  }
  function sortBy(title) {
    order.sign = order.title === title ? -order.sign : isNumber(title) ? -1 : 1;
    order.title = title;
    draw(view.runs);
  }
  const heads = Object.keys(values).map((title) => {
    const button = h("button", { class: "sort", onclick: () => sortBy(title) });
    return { title, button, cell: h("th", { scope: "col", class: isNumber(title) && title !== "Started" ? "number" : null }, button) };
  });
  function draw(runs) {
    const words = search.value.toLowerCase().split(/\s+/), value = values[order.title];
    const found = runs.map((run, i) => [run, i]).filter(([run]) => words.every((word) => `${run.name} ${run.algorithm} ${run.model} ${run.state}`.toLowerCase().includes(word)));
    if (value) found.sort(([a], [b]) => order.sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0));
    for (const { title, button, cell } of heads) {
      const isChosen = order.title === title;
      button.textContent = title + (isChosen ? (order.sign > 0 ? " ▲" : " ▼") : "");
      cell.ariaSort = isChosen ? (order.sign > 0 ? "ascending" : "descending") : "none";
    }
    fill(body, found.map(([run, i]) => row(run, i)));
    drawLink();
  }
  fill(place, h("div", { class: "pager" }, compare, clear, field("Find", search), h("span", { class: "muted" }, "Values are the last ones. A name opens that run alone.")),
    h("div", { class: "scroll" }, h("table", { class: "wide" }, h("thead", null, h("tr", null, h("th"), heads.map((head) => head.cell))), body)));
  draw(view.runs);
  return { refresh: draw };
}
