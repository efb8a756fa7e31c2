// The flags of the chosen run with their sources, and their differences between runs.
import { h, fill, choice, field, shown } from "./elements.js";
import { get } from "./source.js";

const view = { only: "changed", text: "" };

export async function showConfig(place, number, runs) {
  const configs = await Promise.all(runs.map((_, i) => get(`config/${i}`)));
  const list = h("div");
  const values = configs.map((sections) => new Map(Object.values(sections).flat().map((row) => [row.flag, row])));
  const isDifferent = (flag) => new Set(values.map((flags) => JSON.stringify(flags.get(flag)?.value ?? null))).size > 1;
  function isShown(row) {
    if (view.text && !`${row.flag} ${row.help} ${shown(row.value)}`.toLowerCase().includes(view.text.toLowerCase())) return false;
    if (view.only === "different") return isDifferent(row.flag);
    return view.only === "all" || row.source !== "default" || isDifferent(row.flag);
  }
  function line(row) {
    const others = values.map((flags, i) => [i, flags.get(row.flag)]).filter(([i]) => runs.length > 1 && i !== number && isDifferent(row.flag));
    return h("tr", { class: isDifferent(row.flag) ? "different" : "" },
      h("th", { scope: "row", title: row.help }, row.flag),
      h("td", { class: "wrap" }, shown(row.value), others.map(([i, other]) => h("div", { class: "muted" }, `${runs[i].name}: ${shown(other?.value)}`))),
      h("td", { class: "muted wrap" }, row.source));
  }
  function draw() {
    const parts = Object.entries(configs[number]).map(([section, rows]) => [section, rows.filter(isShown)]).filter(([, rows]) => rows.length);
    fill(list, parts.map(([section, rows]) => h("section", null, h("h2", null, section),
      h("div", { class: "scroll" }, h("table", { class: "config" }, h("tbody", null, rows.map(line)))))),
    parts.length ? null : h("p", { class: "note" }, view.only === "different" ? "The flags of these runs are equal." : "No flag matches."));
  }
  const kinds = [["changed", "not default"], ["all", "all flags"]];
  if (runs.length > 1) kinds.push(["different", "different between the runs"]);
  else if (view.only === "different") view.only = "changed";
  fill(place, h("div", { class: "filters" },
    field("Show", choice(kinds, view.only, (value) => { view.only = value; draw(); })),
    field("Text", h("input", { type: "search", value: view.text, oninput: (event) => { view.text = event.target.value; draw(); } }))), list);
  draw();
  return null;
}
