// What the monitors reported, curves of the shown runs, their last values, and the events of the chosen one.
import { h, fill, num, prose, choice, field, note, columns, swatch, download, csv } from "./elements.js";
import { get } from "./source.js";
import { Chart, joined, last, smoothed } from "./charts.js";

const CHARTS = [
  ["rollout/raw_reward", "Reward", "Mean reward of the samples, before normalization", "mean reward"],
  ["eval", "", "", ""],
  ["train/nll", "Loss of demonstrations", "Mean negative log-likelihood of the trained tokens", "nats per token"],
  ["rollout/response_len/mean", "Response length", "Tokens per response", "tokens"],
  ["rollout/truncated_ratio", "Truncated", "Fraction of responses cut off by the length limit", "fraction"],
  ["rollout/zero_std_frac", "Groups without signal", "Fraction of groups whose samples all have the same reward", "fraction"],
  ["train/entropy_loss", "Entropy", "Entropy of the model's distribution", "nats per token"],
  ["train/critic-explained_variance", "Explained variance", "Fraction of the variance of returns that the critic predicts: 1 is perfect, 0 as good as a constant", "fraction"],
  ["train/critic-value_loss", "Value loss", "Loss of the critic: how far its values are from the returns", ""],
  ["train/ppo_kl", "KL in the rollout", "Mean of -log rho: how far the policy moved within the rollout", "nats per token"],
  ["train/kl_loss", "KL to the reference", "Estimate of the KL divergence to the reference model", "nats per token"],
  ["train/train_rollout_logprob_abs_diff", "Engine mismatch", "Mean absolute difference between the log-probs of trainer and engine", "nats per token"],
  ["train/grad_norm", "Gradient norm", "Before clipping", ""],
  ["train/loss", "Loss", "In RL near 0 with one step per rollout, also when the model learns: watch the reward", ""],
  ["rollout/staleness/max", "Staleness", "Rollouts between the weights that sampled a token and those that train on it", "rollouts"],
  ["perf/tokens_per_gpu_per_sec", "Generation speed", "Response tokens per second and GPU", "tokens per second"],
  ["perf/step_time", "Step time", "Duration of the whole step", "seconds"],
  ["perf/rollout_time", "Rollout time", "Duration of the rollout", "seconds"],
  ["perf/train_time", "Training time", "Log-prob passes and optimizer steps", "seconds"],
  ["perf/wait_time_ratio", "Waiting for rollouts", "Fraction of the step for which training waited", "fraction"],
  ["perf/host_memory_frac", "Host memory", "Fraction of the host's memory in use", "fraction"],
  ["memory/trainer_peak_frac", "GPU memory", "Largest fraction of the GPU that the trainer used", "fraction"],
].map(([name, title, help, unit]) => ({ name, title, help, unit }));
const PHASES = [
  ["perf/train_wait_time", "waiting for the rollout"], ["perf/train_time", "training"],
  ["perf/update_weights_time", "weight update"], ["perf/eval_time", "evaluation"],
];
const LENGTH = "rollout/response_len/mean", STEP_TIME = "perf/step_time";
const X = { step: "step", tokens: "response tokens", hours: "time of steps" };
const UNITS = [[3600, "hours of steps"], [60, "minutes of steps"], [1, "seconds of steps"]];

function chosenCharts(runs, extra) {
  const known = new Set(runs.flatMap((run) => run.metrics));
  const evaluated = [...new Set(runs.flatMap((run) => Object.keys(run.last)))].filter((name) => name.startsWith("eval/")).toSorted()
    .map((name) => ({ name, title: `Evaluation: ${name.slice(5)}`, help: "Mean reward of the evaluation set", unit: "mean reward" }));
  const charts = CHARTS.flatMap((chart) => (chart.name === "eval" ? evaluated : known.has(chart.name) ? [chart] : []));
  if (extra && known.has(extra)) charts.unshift({ name: extra, title: extra, help: "", unit: "" });
  return charts;
}

/** The columns of a run with those of its new steps. */
function appended(old, more) {
  const empty = (part) => part.steps.map(() => null);
  const names = new Set([...Object.keys(old.columns), ...Object.keys(more.columns)]);
  const merged = [...names].map((name) => [name, (old.columns[name] || empty(old)).concat(more.columns[name] || empty(more))]);
  return { steps: old.steps.concat(more.steps), columns: Object.fromEntries(merged) };
}

/** The unit of time, [seconds, title], of which the longest of the runs lasts at least ten. */
function timeUnit(parts) {
  const longest = Math.max(...parts.map((part) => (part.columns[STEP_TIME] || []).reduce((sum, seconds) => sum + (seconds || 0), 0)));
  return UNITS.find(([seconds]) => longest >= 10 * seconds) || UNITS.at(-1);
}

/** The place of each step of a run on the x-axis: its number, or the sum of tokens or units of time until then. */
function placesOf(part, run, kind, unit) {
  if (kind === "step") return part.steps;
  const per = part.columns[kind === "tokens" ? LENGTH : STEP_TIME] || [];
  const factor = kind === "tokens" ? run.samples_per_step : 1 / unit[0];
  let sum = 0;
  return part.steps.map((_, i) => (sum += (per[i] || 0) * factor));
}

class Curves {
  constructor(shown, options) {
    Object.assign(this, { shown, options });
    this.place = h("div", { class: "charts" });
    this.charts = [];
    this.names = "";
    this.parts = [];
    this.unit = UNITS[0];
  }

  build(runs) {
    for (const chart of this.charts) chart.close();
    const lines = this.shown.map((i, slot) => ({ label: runs[i].name, slot }));
    const axes = { x: this.options.x === "hours" ? this.unit[1] : X[this.options.x], isLog: Boolean(this.options.log) };
    this.charts = chosenCharts(this.shown.map((i) => runs[i]), this.options.metric).map((about) => new Chart(about, lines, axes));
    fill(this.place, this.charts.length ? this.charts.map((chart) => chart.element)
      : note("No step has been recorded yet. The first curve appears after the first step."));
  }

  async load(runs) {
    const names = chosenCharts(this.shown.map((i) => runs[i]), this.options.metric).map((about) => about.name);
    const isNew = names.join() !== this.names;
    const wanted = [...new Set([...names, ...PHASES.map(([name]) => name), LENGTH, STEP_TIME])].join(",");
    this.parts = await Promise.all(this.shown.map(async (i, slot) => {
      const newest = isNew || !this.parts[slot] ? -1 : this.parts[slot].steps.at(-1) ?? -1;
      if (runs[i].last_step < newest || newest < 0) return get(`metrics/${i}`, { names: wanted });
      return runs[i].last_step === newest ? this.parts[slot] : appended(this.parts[slot], await get(`metrics/${i}`, { names: wanted, after: newest }));
    }));
    this.names = names.join();
    const unit = timeUnit(this.parts);
    if (isNew || unit !== this.unit) {
      this.unit = unit;
      this.build(runs);
    }
    this.draw(runs);
  }

  draw(runs) {
    const places = this.shown.map((i, slot) => placesOf(this.parts[slot], runs[i], this.options.x, this.unit));
    for (const chart of this.charts) {
      chart.set(joined(this.parts.map((part, slot) => {
        const values = part.columns[chart.about.name];
        return values ? { x: places[slot], values: smoothed(values, Number(this.options.smoothing)) } : { x: [], values: [] };
      })));
    }
  }

  /** The last values of all charts by run. */
  table(runs) {
    const rows = this.charts.map(({ about }) => [about, this.parts.map((part) => last(part.columns[about.name] || []))]);
    const names = this.shown.map((i) => runs[i].name);
    const save = () => download("last-values.csv", csv([["metric", ...names], ...rows.map(([about, values]) => [about.name, ...values])]));
    return h("section", null, h("h2", null, "Last values ", h("button", { onclick: save }, "CSV")),
      h("div", { class: "scroll" }, h("table", { class: "wide" },
        h("thead", null, h("tr", null, columns(["Metric", ...names], names.map((_, i) => i + 1)))),
        h("tbody", null, h("tr", null, h("th", { scope: "row" }, "Step"), this.parts.map((part) => h("td", { class: "number" }, String(part.steps.at(-1) ?? "–")))),
          rows.map(([about, values]) => h("tr", null, h("th", { scope: "row", title: about.name }, about.title),
            values.map((value) => h("td", { class: "number" }, num(value)))))))));
  }
}

function phases(part) {
  const count = Math.min(20, part.steps.filter((step) => step > 0).length);
  const sums = PHASES.map(([name, title], i) => {
    const values = (part.columns[name] || []).slice(-20).filter((value) => value !== null);
    return [title, values.length ? values.reduce((a, b) => a + b, 0) / values.length : 0, i];
  }).filter(([, seconds]) => seconds > 0);
  const total = sums.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (!total) return null;
  const bar = h("div", { class: "bar", role: "img", "aria-label": "Phases of a step" });
  for (const [title, seconds, i] of sums) {
    const piece = h("span", { class: `f${i}`, title: `${title}: ${num(seconds)} s` });
    piece.style.flexGrow = seconds / total;
    bar.append(piece);
  }
  return h("section", null, h("h2", null, count === 1 ? "The first step" : `A step, on average over the last ${count}`), bar,
    h("ul", { class: "legend" }, sums.map(([title, seconds, i]) => h("li", null, h("i", { class: `f${i}` }), `${title} ${num(seconds)} s`))));
}

function diagnosisCard(d) {
  const steps = d.steps.length ? `, step ${d.steps.slice(0, 5).join(", ")}${d.count > 5 ? " …" : ""}` : "";
  return h("details", { class: `diagnosis ${d.severity}`, open: d.severity === "error" },
    h("summary", null, h("b", null, d.id), ` ${d.severity}`, h("span", { class: "muted" }, ` ${d.count}×${steps}`), h("br"), d.finding),
    h("p", null, h("b", null, "Likely cause: "), prose(d.cause)), d.remedy ? h("p", null, h("b", null, "Fix: "), prose(d.remedy)) : null,
    d.title ? h("p", { class: "muted" }, `${d.title}. Checked: ${d.checked}`) : null);
}

function eventLine(event) {
  const { time, event: name, ...facts } = event;
  const when = time ? new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
  const text = Object.entries(facts).filter(([, v]) => v !== null).map(([k, v]) => `${k} ${typeof v === "string" ? v : JSON.stringify(v)}`).join(", ");
  return h("tr", null, h("td", { class: "nowrap" }, when), h("td", null, name), h("td", { class: "wrap" }, text));
}

/** Why a run failed or was stopped; null if it did not. */
function endCard(run, events) {
  const end = events.findLast((event) => event.event === run.state && event.message);
  if (!end) return null;
  return h("div", { class: `diagnosis text ${run.state === "failed" ? "error" : "warning"}` }, h("b", null, `${run.state}: `), end.error ? `${end.error}: ` : "", end.message);
}

/** The diagnoses of the chosen run, the worst first, and how many the others have. */
function diagnosesOf(view, runs, found) {
  const rank = { error: 0, warning: 1 };
  const own = found.get(view.number).diagnoses.toSorted((a, b) => (rank[a.severity] ?? 2) - (rank[b.severity] ?? 2));
  const others = view.shown.filter((i) => i !== view.number && found.get(i).diagnoses.length);
  const links = others.map((i) => h("a", { href: view.link("overview", view.params, { run: i }) }, swatch(view.shown.indexOf(i)), `${runs[i].name}: ${found.get(i).diagnoses.length}`));
  const more = links.length ? [h("span", { class: "muted" }, "Diagnoses of other runs:"), links] : null;
  if (!own.length) return h("p", { class: "pager" }, h("span", { class: "muted" }, `Diagnoses of ${runs[view.number].name}: none.`), more);
  return [h("h2", null, `Diagnoses of ${runs[view.number].name}`), own.map(diagnosisCard), more ? h("p", { class: "pager" }, more) : null];
}

export async function showOverview(place, view) {
  const options = { smoothing: "0", x: "step", log: "", metric: "", ...view.params };
  if (!X[options.x]) options.x = "step";
  const curves = new Curves(view.shown, options);
  const diagnoses = h("section"), phasePlace = h("div"), table = h("div"), events = h("div");
  const names = [...new Set(view.shown.flatMap((i) => view.runs[i].metrics))].toSorted();
  let runs = view.runs;
  const control = (name, label, choices) => field(label, choice(choices, options[name], (value) => {
    options[name] = value;
    view.save({ ...options, smoothing: Number(options.smoothing) || "", x: options.x === "step" ? "" : options.x });
    curves.names = "";
    load(runs);
  }));
  const controls = h("div", { class: "filters" },
    control("smoothing", "Smoothing", [["0", "none"], ["0.6", "some"], ["0.9", "strong"]]),
    control("x", "x-axis", Object.entries(X)), control("log", "y-axis", [["", "linear"], ["1", "logarithmic"]]),
    control("metric", "Also show", [["", "–"], ...names.map((n) => [n, n])]));
  async function load(now) {
    runs = now;
    const found = new Map();
    await Promise.all([curves.load(now), ...view.shown.map(async (i) => found.set(i, await get(`findings/${i}`)))]);
    const opened = new Set([...diagnoses.querySelectorAll("details[open] summary b")].map((b) => b.textContent));
    fill(diagnoses, endCard(now[view.number], found.get(view.number).events), diagnosesOf(view, now, found));
    for (const card of diagnoses.querySelectorAll("details.diagnosis")) {
      if (opened.has(card.querySelector("b").textContent)) card.open = true;
    }
    fill(table, curves.charts.length ? curves.table(now) : null);
    fill(phasePlace, phases(curves.parts[view.shown.indexOf(view.number)]));
    const all = found.get(view.number).events.toReversed(), isOpen = events.querySelector("details")?.open;
    fill(events, h("details", { open: Boolean(isOpen) }, h("summary", null, `Events (${all.length})`),
      h("div", { class: "scroll" }, h("table", null, h("tbody", null, all.map(eventLine))))));
  }
  fill(place, diagnoses, controls, curves.place, table, phasePlace, events);
  await load(view.runs);
  return { refresh: load };
}
