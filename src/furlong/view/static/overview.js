// Curves of all runs, what the monitors said about the chosen one, and its events.
import { h, fill, num, choice, field, note } from "./elements.js";
import { get } from "./source.js";
import { Chart, joined, smoothed } from "./charts.js";

const CHARTS = [
  ["rollout/raw_reward", "Reward", "Mean reward of the samples, before normalization"],
  ["eval", "", ""],
  ["rollout/response_len/mean", "Response length", "Tokens per response"],
  ["rollout/truncated_ratio", "Truncated", "Fraction of responses cut off by the length limit"],
  ["rollout/zero_std_frac", "Groups without signal", "Fraction of groups whose samples all have the same reward"],
  ["train/entropy_loss", "Entropy", "Nats per token"],
  ["train/ppo_kl", "KL in the rollout", "Mean of -log rho: how far the policy moved within the rollout"],
  ["train/kl_loss", "KL to the reference", "Estimate of the KL divergence to the reference model"],
  ["train/train_rollout_logprob_abs_diff", "Engine mismatch", "Mean absolute difference between the log-probs of trainer and engine"],
  ["train/grad_norm", "Gradient norm", "Before clipping"],
  ["train/loss", "Loss", "Near 0 with one step per rollout, also when the model learns: watch the reward"],
  ["rollout/staleness/max", "Staleness", "Rollouts between the weights that sampled a token and those that train on it"],
  ["perf/tokens_per_gpu_per_sec", "Tokens per second", "Response tokens per second and GPU"],
  ["perf/step_time", "Step time (s)", "Duration of the whole step"],
  ["perf/rollout_time", "Rollout time (s)", "Duration of the rollout"],
  ["perf/train_time", "Training time (s)", "Log-prob passes and optimizer steps"],
  ["perf/wait_time_ratio", "Waiting for rollouts", "Fraction of the step for which training waited"],
  ["perf/host_memory_frac", "Host memory", "Fraction of the host's memory in use"],
  ["memory/trainer_peak_frac", "GPU memory", "Largest fraction of the GPU that the trainer used"],
];
const PHASES = [
  ["perf/train_wait_time", "waiting for the rollout"], ["perf/train_time", "training"],
  ["perf/update_weights_time", "weight update"], ["perf/eval_time", "evaluation"],
];
const options = { smoothing: 0, metric: "" };

function isEvalMean(name) {
  return /^eval\/[^/]+$/.test(name) && name !== "eval/step" && !name.endsWith("-truncated_ratio") && !name.includes("-pass@");
}

function chosenCharts(runs) {
  const known = new Set(runs.flatMap((run) => run.metrics));
  const evaluated = [...known].filter(isEvalMean).sort().map((name) => [name, name, "Mean reward of the evaluation set"]);
  const charts = CHARTS.flatMap((chart) => (chart[0] === "eval" ? evaluated : known.has(chart[0]) ? [chart] : []));
  if (options.metric && known.has(options.metric)) charts.unshift([options.metric, options.metric, ""]);
  return charts;
}

/** The columns of a run with those of its new steps. */
function appended(old, more) {
  const empty = (part) => new Array(part.steps.length).fill(null);
  const names = new Set([...Object.keys(old.columns), ...Object.keys(more.columns)]);
  const columns = [...names].map((name) => [name, (old.columns[name] || empty(old)).concat(more.columns[name] || empty(more))]);
  return { steps: old.steps.concat(more.steps), columns: Object.fromEntries(columns) };
}

class Curves {
  constructor(runs) {
    this.parts = runs.map(() => ({ steps: [], columns: {} }));
    this.place = h("div", { class: "charts" });
    this.charts = new Map();
    this.build(runs);
  }

  build(runs) {
    for (const chart of this.charts.values()) chart.close();
    this.charts.clear();
    this.names = chosenCharts(runs);
    const lines = runs.map((run, i) => ({ label: run.name, place: i }));
    for (const [name, title, help] of this.names) this.charts.set(name, new Chart(title, help, lines));
    fill(this.place, this.names.length ? [...this.charts.values()].map((chart) => chart.element)
      : note("No step has been recorded yet. The first curve appears after the first step."));
  }

  async load(runs) {
    const names = chosenCharts(runs).map(([name]) => name);
    const isNew = names.join() !== this.names.map(([name]) => name).join();
    if (isNew) this.build(runs);
    const wanted = [...new Set([...names, ...PHASES.map(([name]) => name)])].join(",");
    this.parts = await Promise.all(runs.map(async (run, i) => {
      const last = isNew || !this.parts[i] ? -1 : this.parts[i].steps.at(-1) ?? -1;
      if (run.last_step < last || last < 0) return get(`metrics/${i}`, { names: wanted });
      return run.last_step === last ? this.parts[i] : appended(this.parts[i], await get(`metrics/${i}`, { names: wanted, after: last }));
    }));
    this.draw();
  }

  draw() {
    for (const [name, chart] of this.charts) {
      const parts = this.parts.map((part) => {
        const values = part.columns[name];
        return values ? { steps: part.steps, values: smoothed(values, options.smoothing) } : { steps: [], values: [] };
      });
      chart.set(joined(parts));
    }
  }
}

function phases(part) {
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
  return h("section", null, h("h2", null, "A step, on average over the last 20"), bar,
    h("ul", { class: "legend" }, sums.map(([title, seconds, i]) => h("li", null, h("i", { class: `f${i}` }), `${title} ${num(seconds)} s`))));
}

function diagnosisCard(d) {
  const steps = d.steps.length ? `, step ${d.steps.slice(0, 5).join(", ")}${d.count > 5 ? " …" : ""}` : "";
  return h("details", { class: `diagnosis ${d.severity}`, open: d.severity === "error" },
    h("summary", null, h("b", null, d.id), ` ${d.severity}`, h("span", { class: "muted" }, ` ${d.count}×${steps}`), h("br"), d.finding),
    h("p", null, h("b", null, "Likely cause: "), d.cause), d.remedy ? h("p", null, h("b", null, "Fix: "), d.remedy) : null,
    d.title ? h("p", { class: "muted" }, `${d.title}. Checked: ${d.checked}`) : null);
}

function eventLine(event) {
  const { time, event: name, ...facts } = event;
  const when = time ? new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
  const text = Object.entries(facts).filter(([, v]) => v !== null).map(([k, v]) => `${k} ${typeof v === "string" ? v : JSON.stringify(v)}`).join(", ");
  return h("tr", null, h("td", { class: "nowrap" }, when), h("td", null, name), h("td", { class: "wrap" }, text));
}

function findingsSection(found) {
  return [
    h("h2", null, "Diagnoses"),
    found.diagnoses.length ? found.diagnoses.map(diagnosisCard) : note("None. The monitors reported nothing about this run."),
    h("details", null, h("summary", null, `Events (${found.events.length})`),
      h("div", { class: "scroll" }, h("table", null, h("tbody", null, [...found.events].reverse().map(eventLine))))),
  ];
}

export async function showOverview(place, number, runs) {
  const curves = new Curves(runs);
  const phasePlace = h("div"), findings = h("section");
  const names = [...new Set(runs.flatMap((run) => run.metrics))].sort();
  const controls = h("div", { class: "filters" },
    field("Smoothing", choice([[0, "none"], [0.6, "some"], [0.9, "strong"]], options.smoothing, (v) => { options.smoothing = Number(v); curves.draw(); })),
    field("Show also", choice([["", "–"], ...names.map((n) => [n, n])], options.metric, (v) => { options.metric = v; load(runs); })));
  async function load(now) {
    const [, found] = await Promise.all([curves.load(now), get(`findings/${number}`)]);
    fill(phasePlace, phases(curves.parts[number]));
    const opened = new Set([...findings.querySelectorAll("details[open] summary b")].map((b) => b.textContent));
    fill(findings, findingsSection(found));
    for (const card of findings.querySelectorAll("details.diagnosis")) {
      if (opened.has(card.querySelector("b").textContent)) card.open = true;
    }
  }
  fill(place, controls, curves.place, phasePlace, findings);
  await load(runs);
  return { refresh: load };
}
