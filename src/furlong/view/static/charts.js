// Line charts of metrics, with one line for each run.
import { h, num, swatch, download, csv } from "./elements.js";

const sync = window.uPlot.sync("steps");
const HEIGHT = 190;
const WHOLE = [1, 10, 100, 1000, 10_000, 100_000].flatMap((n) => [n, 2 * n, 5 * n]);  // between steps on the axis
const DASHES = [[], [], [], [], [7, 3], [7, 3], [2, 3], [2, 3]];  // by slot, with the color; as in app.css

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Join the columns of several runs on a common x-axis: [x, values of run 0, ...]. parts: [{x, values}]. */
export function joined(parts) {
  const all = [...new Set(parts.flatMap((part) => part.x))].toSorted((a, b) => a - b);
  const place = new Map(all.map((x, i) => [x, i]));
  const lines = parts.map((part) => {
    const line = Array.from({ length: all.length }, () => null);
    part.x.forEach((x, i) => { line[place.get(x)] = part.values[i] ?? null; });
    return line;
  });
  return [all, ...lines];
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

function logRange(plot, low, high) {
  if (!(low > 0)) return [0.1, 1];
  const margin = low === high ? 2 : 1.15;
  const [start] = window.uPlot.rangeLog(low === high ? low / margin : low, high * margin, 10, false);
  return [start, high * margin];  // from a start with more than one digit, uPlot may fail to make ticks
}

/** Of the ticks of a logarithmic axis over more than three decades, the powers of ten. */
function decades(ticks) {
  if (!(ticks.at(-1) > 1000 * ticks[0])) return ticks;
  return ticks.map((v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6 ? v : null));
}

/** The last measured value. */
export function last(line) {
  return line.findLast((value) => value !== null && value !== undefined);
}

/** A chart in a figure. about: {name, title, help, unit}; lines: [{label, slot}]; axes: {x, isLog}, with the title of x. */
export class Chart {
  constructor(about, lines, axes) {
    Object.assign(this, { about, lines, axes });
    this.values = lines.map(() => h("span"));
    this.at = h("span", { class: "muted" });
    this.plotPlace = h("div", { class: "plot", role: "img", "aria-label": `${about.title}, by ${axes.x}` });
    this.element = h("figure", { class: "chart" },
      h("figcaption", { title: about.help || about.name }, h("span", { class: "title" }, about.title),
        h("span", { class: "save" },
          h("button", { title: "Save the values as CSV", onclick: () => this.saveCsv() }, "CSV"),
          h("button", { title: "Save the chart as a picture", onclick: () => this.savePicture() }, "PNG"))),
      h("div", { class: "value" }, this.at, lines.map((line, i) => h("span", { class: "entry", title: line.label },
        swatch(line.slot), lines.length > 1 ? [h("span", { class: "name" }, line.label), " "] : null, this.values[i]))),
      this.plotPlace);
    this.plot = null;
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.plotPlace);
  }

  resize() {
    if (this.plot && this.plotPlace.clientWidth) this.plot.setSize({ width: this.plotPlace.clientWidth, height: HEIGHT });
  }

  set(data) {
    this.data = data;
    const drawn = this.axes.isLog ? [data[0], ...data.slice(1).map((line) => line.map((v) => (v > 0 ? v : null)))] : data;
    if (this.plot) this.plot.setData(drawn);
    else {
      this.plot = new window.uPlot(this.options(), drawn, this.plotPlace);
      this.resize();
    }
    this.showAt(this.plot);
  }

  options() {
    const axis = {
      stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui",
      labelFont: "11px system-ui", labelSize: 15, labelGap: 0,
    };
    return {
      width: Math.max(this.plotPlace.clientWidth, 200), height: HEIGHT, legend: { show: false },
      cursor: { sync: { key: sync.key }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: { setCursor: [(plot) => this.showAt(plot)] },
      scales: { x: { time: false }, y: this.axes.isLog ? { distr: 3, range: logRange } : { range: yRange } },
      axes: [
        { ...axis, size: 26, gap: 6, label: this.axes.x, incrs: this.axes.x === "step" ? WHOLE : null },
        { ...axis, size: 50, label: this.about.unit || null,
          grid: this.axes.isLog ? { ...axis.grid, filter: (_, ticks) => decades(ticks) } : axis.grid,
          values: (_, ticks) => ticks.map((v) => (v === null ? "" : num(v))) },
      ],
      series: [{}, ...this.lines.map((line) => ({
        label: line.label, stroke: color(`--c${line.slot}`), width: 1.8, spanGaps: true, dash: DASHES[line.slot],
        points: { show: (plot, i) => plot.data[i].filter((v) => v !== null).length < 40, size: 4 },
      }))],
    };
  }

  showAt(plot) {
    const i = plot.cursor.idx;
    const isAt = i !== null && i !== undefined;
    this.at.textContent = isAt ? `${this.axes.x} ${num(this.data[0][i])}` : "";
    this.data.slice(1).forEach((line, k) => { this.values[k].textContent = num(isAt ? line[i] : last(line)); });
  }

  saveCsv() {
    const titles = [this.axes.x, ...this.lines.map((line) => line.label)];
    download(`${this.about.name}.csv`, csv([titles, ...this.data[0].map((x, i) => [x, ...this.data.slice(1).map((line) => line[i])])]));
  }

  async savePicture() {
    this.plot.setSize({ width: 900, height: 420 });
    await new Promise(requestAnimationFrame);
    const source = this.plot.ctx.canvas, ratio = devicePixelRatio || 1, row = 17, width = source.width / ratio;
    const top = 30, rows = this.lines.length > 1 ? this.lines.length : 0;
    const picture = h("canvas", { width: source.width, height: source.height + (top + rows * row + 8) * ratio });
    const pen = picture.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = color("--surface");
    pen.fillRect(0, 0, width, picture.height / ratio);
    pen.fillStyle = color("--text");
    pen.font = "600 14px system-ui";
    pen.fillText(this.about.title, 10, 20, width - 20);
    pen.drawImage(source, 0, top, width, source.height / ratio);
    pen.font = "12px system-ui";
    this.lines.slice(0, rows).forEach((line, i) => {
      const y = top + source.height / ratio + (i + 0.5) * row;
      pen.strokeStyle = color(`--c${line.slot}`);
      pen.lineWidth = 2;
      pen.setLineDash(DASHES[line.slot]);
      pen.beginPath();
      pen.moveTo(12, y);
      pen.lineTo(40, y);
      pen.stroke();
      pen.fillText(line.label, 48, y + 4, width - 56);
    });
    picture.toBlob((blob) => download(`${this.about.name}.png`, blob));
    this.resize();
  }

  close() {
    this.observer.disconnect();
    if (this.plot) this.plot.destroy();
    this.plot = null;
  }
}
