// What became of the prompt groups: counts as a flow, and the list of groups.
import { h, fill, choice, field, pager, columns, note } from "./elements.js";
import { get } from "./source.js";

const SIZE = 100;

function flowBar(flow) {
  const inFlight = Object.entries(flow.in_flight);
  const parts = [...Object.entries(flow.dropped).map(([why, n]) => [`dropped: ${why}`, n, "f3"]), ["trained", flow.trained, "f1"],
    ...inFlight.map(([state, n]) => [`in flight: ${state}`, n, "f0"])].filter(([, n]) => n > 0);
  const widest = Math.max(1, flow.issued);
  return h("div", { class: "flow", role: "list" },
    h("div", { role: "listitem", class: "flowrow" }, h("span", null, "issued"), bar(flow.issued / widest, "f2"), h("b", null, flow.issued.toLocaleString("en-US"))),
    parts.map(([name, count, kind]) => h("div", { role: "listitem", class: "flowrow" },
      h("span", null, name), bar(count / widest, kind), h("b", null, `${count.toLocaleString("en-US")} (${((100 * count) / widest).toFixed(1)} %)`))));
}

function bar(share, kind) {
  const piece = h("i", { class: kind });
  piece.style.width = `${Math.max(share * 100, 0.5)}%`;
  return h("div", { class: "track" }, piece);
}

function verdict(flow) {
  const more = [flow.returned ? `${flow.returned} times a group was returned to the data source` : "",
    flow.resumes ? `${flow.resumes} resumes, which rolled ${flow.rolled_back} events back` : ""].filter(Boolean);
  return [flow.problems.length ? h("div", { class: "diagnosis error" }, h("b", null, "The ledger does not add up:"), h("ul", null, flow.problems.map((p) => h("li", null, p))))
    : h("p", null, "Every group is accounted for."), more.length ? h("p", { class: "muted" }, more.join("; "), ".") : null];
}

export async function showGroups(place, view) {
  const { number } = view, top = h("section"), list = h("section");
  const filters = { state: "", reason: "", group: "", offset: 0, ...view.params };
  async function drawList(flow) {
    const page = await get(`groups/${number}`, filters);
    view.save({ ...filters, offset: filters.offset || "" });
    const set = (name) => (value) => { Object.assign(filters, { [name]: value, offset: 0 }); drawList(flow); };
    const states = ["", "issued", "generated", "returned", "restored", "trained", "dropped"];
    fill(list, h("h2", null, "Groups"), h("div", { class: "filters" },
      field("State", choice(states.map((s) => [s, s || "all"]), filters.state, set("state"))),
      field("Reason", choice([["", "all"], ...Object.keys(flow.dropped).map((r) => [r, r])], filters.reason, set("reason"))),
      field("Group", h("input", { value: filters.group, size: 6, inputMode: "numeric", onchange: (event) => set("group")(event.target.value.trim()) }))),
    h("div", { class: "scroll" }, h("table", { class: "groups" },
      h("thead", null, h("tr", null, columns(["Group", "Epoch", "Row", "Rollout", "State", "Step", "Reason", "Returned"], [0, 1, 2, 3, 5, 7]))),
      h("tbody", null, page.rows.map((g) => h("tr", null,
        h("td", { class: "number" }, h("a", { href: view.link("samples", { group: String(g.group) }) }, String(g.group))),
        [g.epoch, g.row, g.rollout].map((v) => h("td", { class: "number" }, String(v))), h("td", null, h("span", { class: `status ${g.state}` }, g.state)),
        h("td", { class: "number" }, g.step === null ? "" : String(g.step)), h("td", null, g.reason), h("td", { class: "number" }, g.num_returned ? `${g.num_returned}×` : "")))))),
    pager(page.total, Number(filters.offset), SIZE, (offset) => { filters.offset = offset; drawList(flow); }));
  }
  async function draw() {
    const flow = await get(`flow/${number}`);
    if (flow.issued === undefined) {
      fill(top, note("No ledger.jsonl yet: it begins with the first rollout."));
      return null;
    }
    fill(top, h("h2", null, "Prompt groups: dropped, trained, in flight"), flowBar(flow), verdict(flow));
    return flow;
  }
  fill(place, top, list);
  const flow = await draw();
  if (flow) await drawList(flow);
  return { refresh: draw };
}
