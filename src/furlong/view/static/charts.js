// Line charts of metrics over steps, with one line for each run.
import { h, num } from "./elements.js";

const sync = window.uPlot.sync("steps");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Join the columns of several runs on a common axis of steps: [steps, values of run 0, ...]. */
export function joined(parts) {
  const steps = [...new Set(parts.flatMap((part) => part.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, i) => [step, i]));
  const lines = parts.map((part) => {
    const line = new Array(steps.length).fill(null);
    part.steps.forEach((step, i) => { line[place.get(step)] = part.values[i]; });
    return line;
  });
  return [steps, ...lines];
}

/** Exponential moving average that skips missing values; `weight` of the past is between 0 and 1. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return mean;
  });
}

/** The range of the y-axis: with a margin, and not empty if all values are equal. */
function yRange(plot, low, high) {
  if (low === null || low === undefined) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  return window.uPlot.rangeNum(low, high, 0.1, true);
}

/** A chart in a figure. lines: [{label, place}], where `place` is the number of its color. */
export class Chart {
  constructor(title, help, lines) {
    this.lines = lines;
    this.value = h("span", { class: "value" });
    this.plotPlace = h("div", { class: "plot", role: "img", "aria-label": `${title} over steps` });
    this.element = h("figure", { class: "chart" },
      h("figcaption", { title: help || title }, h("span", null, title), this.value), this.plotPlace);
    this.plot = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.plotPlace);
  }

  resize() {
    if (this.plot && this.plotPlace.clientWidth) this.plot.setSize({ width: this.plotPlace.clientWidth, height: 150 });
  }

  set(data) {
    const last = data.slice(1).map((line) => line.findLast((value) => value !== null && value !== undefined));
    this.value.textContent = last.map(num).join(" / ");
    if (this.plot) {
      this.plot.setData(data);
      return;
    }
    this.plot = new window.uPlot(this.options(), data, this.plotPlace);
    this.resize();
  }

  options() {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width: Math.max(this.plotPlace.clientWidth, 200), height: 150, legend: { show: false },
      cursor: { sync: { key: sync.key }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.showAt(plot)] },
      scales: { x: { time: false }, y: { range: yRange } },
      axes: [
        { ...axis, size: 24, gap: 2 },
        { ...axis, size: 52, values: (_, ticks) => ticks.map(num) },
      ],
      series: [{}, ...this.lines.map((line) => ({
        label: line.label, stroke: color(`--c${line.place % 8}`), width: 1.6, spanGaps: true,
        points: { show: (plot) => plot.data[0].length < 40, size: 4 },
      }))],
    };
  }

  showAt(plot) {
    const at = plot.cursor.idx;
    if (at === null || at === undefined) {
      this.value.textContent = plot.data.slice(1).map((line) => num(line.findLast((v) => v !== null && v !== undefined))).join(" / ");
      return;
    }
    this.value.textContent = `step ${plot.data[0][at]}: ${plot.data.slice(1).map((line) => num(line[at])).join(" / ")}`;
  }

  close() {
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }
}
