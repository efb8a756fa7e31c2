// The flags of the chosen run with their sources, and their differences between runs.
import { h, fill, choice, field, shown } from "./elements.js";
import { get } from "./source.js";

export async function showConfig(place, view) {
  const configs = await Promise.all(view.shown.map((i) => get(`config/${i}`)));
  const chosen = { only: "changed", text: "", ...view.params }, own = view.shown.indexOf(view.number);
  const list = h("div"), runs = view.shown.map((i) => view.runs[i]);
  const values = configs.map((sections) => new Map(Object.values(sections).flat().map((row) => [row.flag, row])));
  const isDifferent = (flag) => new Set(values.map((flags) => JSON.stringify(flags.get(flag)?.value ?? null))).size > 1;
  function isShown(row) {
    if (chosen.text && !`${row.flag} ${row.help} ${shown(row.value)}`.toLowerCase().includes(chosen.text.toLowerCase())) return false;
    if (chosen.only === "different") return isDifferent(row.flag);
    return chosen.only === "all" || row.source !== "default" || isDifferent(row.flag);
  }
  function line(row) {
    const others = values.map((flags, i) => [i, flags.get(row.flag)]).filter(([i]) => i !== own && isDifferent(row.flag));
    return h("tr", { class: isDifferent(row.flag) ? "different" : "" },
      h("th", { scope: "row", title: row.help }, row.flag),
      h("td", { class: "wrap" }, shown(row.value), others.map(([i, other]) => h("div", { class: "muted" }, `${runs[i].name}: ${shown(other?.value)}`))),
      h("td", { class: "muted wrap" }, row.source));
  }
  function draw() {
    view.save({ ...chosen, only: chosen.only === "changed" ? "" : chosen.only });
    const parts = Object.entries(configs[own]).map(([section, rows]) => [section, rows.filter(isShown)]).filter(([, rows]) => rows.length);
    fill(list, parts.map(([section, rows]) => h("section", null, h("h2", null, section),
      h("div", { class: "scroll" }, h("table", { class: "config" }, h("tbody", null, rows.map(line)))))),
    parts.length ? null : h("p", { class: "note" }, chosen.only === "different" ? "The flags of these runs are equal." : "No flag matches."));
  }
  const kinds = [["changed", "not default"], ["all", "all flags"]];
  if (runs.length > 1) kinds.push(["different", "different between the runs"]);
  else if (chosen.only === "different") chosen.only = "changed";
  fill(place, h("div", { class: "filters" },
    field("Show", choice(kinds, chosen.only, (value) => { chosen.only = value; draw(); })),
    field("Text", h("input", { type: "search", value: chosen.text, oninput: (event) => { chosen.text = event.target.value; draw(); } }))), list);
  draw();
  return null;
}
