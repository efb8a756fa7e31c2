// The frame of the page: runs, tabs, keyboard, theme, the address, and the stream of changes.
import { h, fill, problem, note, swatch } from "./elements.js";
import { get, follow, isExport, exported } from "./source.js";
import { showOverview } from "./overview.js";
import { showRuns } from "./runs.js";
import { showSamples } from "./samples.js";
import { showEvaluations } from "./evaluations.js";
import { showGroups } from "./groups.js";
import { showTimeline } from "./timeline.js";
import { showConfig } from "./config.js";

const VIEWS = [
  ["runs", "Runs", showRuns],
  ["overview", "Overview", showOverview],
  ["samples", "Samples", showSamples],
  ["evaluations", "Evaluations", showEvaluations],
  ["groups", "Groups", showGroups],
  ["timeline", "Timeline", showTimeline],
  ["config", "Configuration", showConfig],
];  // the number of a view is its key
const MOST_SHOWN = 8;  // runs in the charts: as many as there are colors
const HELP = [
  ["0", "list of runs"], ["1 – 6", "switch the view"], ["r", "next run"], ["/", "go to the filters"], ["j, k", "next, previous sample"],
  ["Esc", "close"], ["t", "light or dark"], ["?", "this list"],
];
// `run` and `shown` are numbers of runs: the one that most views show, and those in the charts. `params` are of the view.
const state = { runs: [], run: 0, shown: [], view: "overview", params: {}, unknown: [], refresh: null, keys: null, isLost: false };

function stateMark(run) {
  const step = run.num_rollout ? `step ${run.last_step} of ${run.num_rollout}` : `step ${run.last_step}`;
  return h("span", { class: `state ${run.state}` }, run.state === "deleted" ? "deleted" : `${run.state}, ${step}`);
}

function drawHead() {
  const chips = state.shown.map((i, slot) => h("button", {
    class: "chip", title: state.runs[i].folder, "aria-pressed": String(i === state.run), onclick: () => go(state.view, { run: i }),
  }, swatch(slot), state.runs[i].name, " ", stateMark(state.runs[i])));
  fill(document.getElementById("head"),
    h("h1", null, "furlong"),
    h("div", { class: "runs", role: "group", "aria-label": "Runs" }, chips),
    h("div", { class: "tools" },
      isExport ? h("span", { class: "muted" }, `exported ${exported.time}`) : null,
      state.isLost ? h("span", { class: "lost", role: "status" }, "not connected: furlong view has ended") : null,
      h("button", { title: "Light or dark (t)", onclick: changeTheme }, "Theme"),
      h("button", { title: "Keyboard (?)", onclick: showHelp }, "Keys")));
  const chosen = chips[state.shown.indexOf(state.run)];  // on a phone, runs scroll sideways
  if (chosen) chosen.parentElement.scrollLeft = Math.max(0, chosen.offsetLeft + chosen.offsetWidth - chosen.parentElement.offsetLeft - chosen.parentElement.clientWidth);
}

function drawTabs() {
  const shown = VIEWS.filter(([key]) => key !== "runs" || state.runs.length > 1);
  fill(document.getElementById("tabs"), shown.map(([key, title]) =>
    h("a", { href: address(key), "aria-current": key === state.view ? "page" : null },
      key === "runs" ? `${title} (${state.runs.length})` : title)));
  const tabs = document.getElementById("tabs"), current = tabs.querySelector("[aria-current]");
  if (current) tabs.scrollLeft = current.offsetLeft - (tabs.clientWidth - current.offsetWidth) / 2;  // on a phone, they scroll
}

/** The runs in the charts if the address names none: all, or of many the newest. */
function defaultShown() {
  const all = state.runs.map((_, i) => i);
  if (all.length > MOST_SHOWN) all.sort((i, k) => (state.runs[k].started ?? 0) - (state.runs[i].started ?? 0));
  return all.slice(0, MOST_SHOWN);
}

/** The address of a view: of the same runs, unless `more` has others. */
function address(view, params = {}, more = {}) {
  const { run, shown } = { run: state.run, shown: state.shown, ...more };
  const words = new URLSearchParams();
  if (state.runs.length > 1) words.append("run", state.runs[run].name);
  if (shown.join() !== defaultShown().join()) for (const i of shown) words.append("runs", state.runs[i].name);
  for (const [name, value] of Object.entries(params)) {
    if (value !== "" && value !== null && value !== undefined) words.append(name, value);
  }
  return words.size ? `#${view}?${words}` : `#${view}`;
}

function go(view, more) {
  location.hash = address(view, {}, more);
}

function readHash() {
  const [key, query] = location.hash.slice(1).split("?");
  const words = new URLSearchParams(query || "");
  const numbers = new Map(state.runs.map((run, i) => [run.name, i]));
  const named = words.getAll("runs").map((name) => numbers.get(name)).filter((i) => i !== undefined);
  state.shown = named.length ? named.slice(0, MOST_SHOWN) : defaultShown();
  state.run = numbers.get(words.get("run")) ?? (state.shown.includes(state.run) ? state.run : state.shown[0]);
  if (!state.shown.includes(state.run)) state.shown = [state.run, ...state.shown].slice(0, MOST_SHOWN);
  state.unknown = [...new Set([...words.getAll("run"), ...words.getAll("runs")])].filter((name) => !numbers.has(name));
  words.delete("run");
  words.delete("runs");
  state.params = Object.fromEntries(words);
  state.view = VIEWS.some(([known]) => known === key) ? key : "overview";
  drawHead();
  drawTabs();
  draw();
}

async function draw() {
  const place = h("div");  // a new one: a view that is still loading cannot overwrite the next one
  const { name } = state.runs[state.run];
  fill(document.getElementById("view"), state.unknown.length ? note(`No run is named ${state.unknown.join(", ")}. This is ${name}.`) : null, place);
  const [key, title, show] = VIEWS.find((each) => each[0] === state.view);
  document.title = `${title} · ${name} · furlong`;
  state.refresh = state.keys = null;
  const turn = (state.turn = (state.turn || 0) + 1);
  const view = {
    number: state.run, runs: state.runs, shown: state.shown, params: state.params, link: address,
    save: (params) => {
      if (turn !== state.turn) return;
      state.params = params;
      history.replaceState(null, "", address(key, params));
    },
  };
  try {
    const handle = await show(place, view);
    if (turn === state.turn && handle) {
      state.refresh = handle.refresh || null;
      state.keys = handle.keys || null;
    }
  } catch (error) {
    fill(place, problem(error));
  }
}

function changeTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("furlong-theme", root.dataset.theme); } catch { /* storage may be off: the choice lasts until a reload */ }
  draw();
}

function showHelp() {
  const dialog = h("dialog", { onclose: () => dialog.remove() },
    h("h2", null, "Keyboard"),
    h("table", null, h("tbody", null, HELP.map(([key, what]) => h("tr", null, h("th", { scope: "row" }, key), h("td", null, what))))),
    h("form", { method: "dialog" }, h("button", null, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const view = VIEWS[Number.parseInt(event.key, 10)];
  if (view && (state.runs.length > 1 || view[0] !== "runs")) go(view[0]);
  else if (event.key === "t") changeTheme();
  else if (event.key === "?") showHelp();
  else if (event.key === "r" && state.shown.length > 1) {
    go(state.view, { run: state.shown[(state.shown.indexOf(state.run) + 1) % state.shown.length] });
  } else if (event.key === "/") {
    const first = document.querySelector("main input, main select");
    if (!first) return;
    first.focus();
  } else if (!(state.keys && state.keys(event.key))) return;
  event.preventDefault();
}

async function onChange() {
  const count = state.runs.length;
  state.runs = await get("runs");
  drawHead();
  if (state.runs.length !== count) drawTabs();
  if (state.refresh) await state.refresh(state.runs);
}

async function begin() {
  try {
    const theme = localStorage.getItem("furlong-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* storage may be off: the system's theme is used */ }
  state.runs = await get("runs");
  readHash();
  addEventListener("hashchange", readHash);
  addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  let isFirst = true;
  follow(() => {
    if (!isFirst) onChange().catch((error) => console.warn(error));
    isFirst = false;
  }, (isLost) => {
    if (isLost !== state.isLost) { state.isLost = isLost; drawHead(); }
  });
}

begin().catch((error) => fill(document.getElementById("view"), problem(error)));
