// The frame of the page: runs, tabs, keyboard, theme, and the stream of changes.
import { h, fill, note } from "./elements.js";
import { get, follow, isExport, exported } from "./source.js";
import { showOverview } from "./overview.js";
import { showSamples } from "./samples.js";
import { showEvaluations } from "./evaluations.js";
import { showGroups } from "./groups.js";
import { showTimeline } from "./timeline.js";
import { showConfig } from "./config.js";

const VIEWS = [
  ["overview", "Overview", showOverview],
  ["samples", "Samples", showSamples],
  ["evaluations", "Evaluations", showEvaluations],
  ["groups", "Groups", showGroups],
  ["timeline", "Timeline", showTimeline],
  ["config", "Configuration", showConfig],
];
const HELP = [
  ["1 – 6", "switch the view"], ["r", "next run"], ["/", "go to the filters"], ["j, k", "next, previous sample"],
  ["Esc", "close"], ["t", "light or dark"], ["?", "this list"],
];
const state = { runs: [], run: 0, view: "overview", refresh: null, keys: null, isLost: false };

function stateMark(run) {
  const step = run.num_rollout ? `step ${run.last_step} of ${run.num_rollout}` : `step ${run.last_step}`;
  return h("span", { class: `state ${run.state}` }, `${run.state}, ${step}`);
}

function drawHead() {
  const chips = state.runs.map((run, i) => h("button", {
    class: "chip", title: run.folder, "aria-pressed": String(i === state.run), onclick: () => chooseRun(i),
  }, h("i", { class: `swatch c${i % 8}` }), run.name, " ", stateMark(run)));
  fill(document.getElementById("head"),
    h("h1", null, "furlong"),
    h("div", { class: "runs", role: "group", "aria-label": "Runs" }, chips),
    h("div", { class: "tools" },
      isExport ? h("span", { class: "muted" }, `exported ${exported.time}`) : null,
      state.isLost ? h("span", { class: "lost", role: "status" }, "not connected: furlong view has ended") : null,
      h("button", { title: "Light or dark (t)", onclick: changeTheme }, "Theme"),
      h("button", { title: "Keyboard (?)", onclick: showHelp }, "Keys")));
}

function drawTabs() {
  fill(document.getElementById("tabs"), VIEWS.map(([key, title]) =>
    h("a", { href: `#${key}`, "aria-current": key === state.view ? "page" : null }, title)));
}

function chooseRun(number) {
  state.run = number;
  drawHead();
  draw();
}

async function draw() {
  const place = h("div");  // a new one: a view that is still loading cannot overwrite the next one
  fill(document.getElementById("view"), place);
  const [, title, show] = VIEWS.find(([key]) => key === state.view);
  document.title = `${title} · ${state.runs[state.run].name} · furlong`;
  state.refresh = state.keys = null;
  const turn = (state.turn = (state.turn || 0) + 1);
  try {
    const handle = await show(place, state.run, state.runs, parametersOfHash());
    if (turn === state.turn && handle) {
      state.refresh = handle.refresh || null;
      state.keys = handle.keys || null;
    }
  } catch (error) {
    console.error(error);
    fill(place, note(error.message));
  }
}

function parametersOfHash() {
  return Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] || ""));
}

function readHash() {
  const key = location.hash.slice(1).split("?")[0];
  const run = Number(parametersOfHash().run);
  if (Number.isInteger(run) && run >= 0 && run < state.runs.length) state.run = run;
  state.view = VIEWS.some(([known]) => known === key) ? key : "overview";
  drawHead();
  drawTabs();
  draw();
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
  const view = VIEWS[Number(event.key) - 1];
  if (view) location.hash = view[0];
  else if (event.key === "t") changeTheme();
  else if (event.key === "?") showHelp();
  else if (event.key === "r" && state.runs.length > 1) chooseRun((state.run + 1) % state.runs.length);
  else if (event.key === "/") {
    const first = document.querySelector("main input, main select");
    if (!first) return;
    first.focus();
  } else if (!(state.keys && state.keys(event.key))) return;
  event.preventDefault();
}

async function onChange() {
  state.runs = await get("runs");
  drawHead();
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
  let isFirst = true;
  follow(() => {
    if (!isFirst) onChange().catch((error) => console.warn(error));
    isFirst = false;
  }, (isLost) => {
    if (isLost !== state.isLost) { state.isLost = isLost; drawHead(); }
  });
}

begin().catch((error) => {
  console.error(error);
  fill(document.getElementById("view"), note(error.message));
});
