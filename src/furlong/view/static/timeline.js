// Boxes over time: phases of steps, and the spans of --trace. Drawn on a canvas, so that thousands stay fluid.
import { h, fill, num, field, note, problem } from "./elements.js";
import { get } from "./source.js";

const ROW = 22, LABEL = 150, TOP = 24;

function rowsOf(track) {
  const ends = [];
  const boxes = track.boxes.map(([start, seconds, name]) => {
    let row = ends.findIndex((end) => end <= start + 1e-9);
    if (row < 0) row = ends.length < 12 ? ends.length : 11;
    ends[row] = Math.max(ends[row] || 0, start + seconds);
    return { start, seconds, name, row };
  });
  return { name: track.name, boxes, height: Math.max(1, ends.length) * ROW };
}

function hue(name) {
  let sum = 0;
  for (const c of name.split(" (")[0].replace(/\d+/g, "")) sum = (sum * 31 + c.codePointAt(0)) % 360;
  return sum;
}

class Lanes {
  constructor(data, line) {
    this.tracks = data.tracks.map(rowsOf);
    this.line = line;
    this.full = [0, Math.max(0.001, ...data.tracks.flatMap((t) => t.boxes.map(([start, seconds]) => start + seconds)))];
    this.range = [...this.full];
    this.canvas = h("canvas", { class: "lanes", tabIndex: 0, role: "img", "aria-label": "Timeline; arrow keys move, + and - zoom" });
    this.canvas.addEventListener("wheel", (event) => { if (event.ctrlKey || event.shiftKey) { event.preventDefault(); this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event)); } }, { passive: false });
    this.canvas.addEventListener("mousemove", (event) => this.explain(event));
    this.canvas.addEventListener("click", (event) => this.explain(event));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  get labelWidth() { return this.canvas.clientWidth < 600 ? 0 : LABEL; }
  get width() { return this.canvas.clientWidth - this.labelWidth; }
  x(time) { return this.labelWidth + ((time - this.range[0]) / (this.range[1] - this.range[0])) * this.width; }
  at(event) { return this.range[0] + ((event.offsetX - this.labelWidth) / this.width) * (this.range[1] - this.range[0]); }

  zoom(factor, center = (this.range[0] + this.range[1]) / 2) {
    this.range = [center - (center - this.range[0]) * factor, center + (this.range[1] - center) * factor];
    if (this.range[1] - this.range[0] > (this.full[1] - this.full[0]) * 1.2) this.range = [...this.full];
    this.draw();
  }

  move(share) {
    const by = share * (this.range[1] - this.range[0]);
    this.range = [this.range[0] + by, this.range[1] + by];
    this.draw();
  }

  key(event) {
    const actions = { "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1.4), ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2) };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  draw() {
    const style = getComputedStyle(document.documentElement), ratio = devicePixelRatio || 1;
    const extra = this.labelWidth ? 0 : 15;
    const height = TOP + this.tracks.reduce((sum, t) => sum + t.height + 8 + extra, 0);
    this.canvas.style.height = `${height}px`;
    this.canvas.width = this.canvas.clientWidth * ratio;
    this.canvas.height = height * ratio;
    const pen = this.canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui";
    this.drawAxis(pen, style, height);
    const isDark = style.getPropertyValue("--scheme").trim() === "dark";
    let y = TOP;
    for (const track of this.tracks) {
      if (!this.labelWidth) { pen.fillStyle = style.getPropertyValue("--muted"); pen.fillText(track.name, 2, y + 11); y += extra; }
      track.top = y;
      for (const box of track.boxes) this.drawBox(pen, box, y, isDark);
      if (this.labelWidth) {
        pen.fillStyle = style.getPropertyValue("--surface");
        pen.fillRect(0, y - 4, this.labelWidth - 4, track.height + 8);
        pen.fillStyle = style.getPropertyValue("--text");
        pen.fillText(track.name, 4, y + 15, this.labelWidth - 12);
      }
      y += track.height + 8;
    }
  }

  drawAxis(pen, style, height) {
    const span = this.range[1] - this.range[0], raw = span / Math.max(2, this.width / 110), size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= raw);
    for (let t = Math.ceil(this.range[0] / step) * step; t <= this.range[1]; t += step) {
      pen.fillStyle = style.getPropertyValue("--line");
      pen.fillRect(this.x(t), TOP - 8, 1, height);
      pen.fillStyle = style.getPropertyValue("--muted");
      const text = `${Number(t.toPrecision(6))} s`;
      pen.fillText(text, Math.min(this.x(t) + 3, this.canvas.clientWidth - pen.measureText(text).width - 2), 12);
    }
  }

  drawBox(pen, box, y, isDark) {
    const left = Math.max(this.x(box.start), this.labelWidth), right = this.x(box.start + box.seconds);
    if (right < this.labelWidth || left > this.canvas.clientWidth) return;
    pen.fillStyle = `hsl(${hue(box.name)} 45% ${isDark ? 32 : 78}%)`;
    pen.fillRect(left, y + box.row * ROW, Math.max(right - left, 1), ROW - 3);
    if (right - left > 40) {
      pen.save();
      pen.beginPath();
      pen.rect(left, y + box.row * ROW, right - left - 2, ROW);
      pen.clip();
      pen.fillStyle = isDark ? "#fff" : "#111";
      pen.fillText(box.name, left + 4, y + box.row * ROW + 14);
      pen.restore();
    }
  }

  explain(event) {
    const time = this.at(event);
    for (const track of this.tracks) {
      const row = Math.floor((event.offsetY - track.top) / ROW);
      if (row < 0 || row * ROW >= track.height) continue;
      const box = track.boxes.find((b) => b.row === row && b.start <= time && time <= b.start + b.seconds);
      this.line.textContent = box ? `${track.name}: ${box.name}, ${num(box.seconds)} s from ${num(box.start)} s` : track.name;
      return;
    }
  }
}

export async function showTimeline(place, view) {
  const { number } = view;
  const top = h("div"), body = h("div"), line = h("p", { class: "muted tokenline" }, "Hover over or tap a box for details.");
  async function draw(first, last) {
    const data = await get(`timeline/${number}`, { first, last });
    if (first !== "") view.save({ first, last });
    if (!data.tracks.length) {
      fill(top);
      fill(body, note("No step has been recorded yet."));
      return;
    }
    const [low, high] = data.steps, size = data.range[1] - data.range[0] + 1;
    const go = (start, end) => draw(Math.max(low, start), Math.min(high, end)).catch((error) => fill(body, problem(error)));
    const typed = (label, value, react) => field(label, h("input", { type: "number", value, min: low, max: high, onchange: (event) => react(Number(event.target.value)) }));
    const lanes = new Lanes(data, line);
    fill(top, h("div", { class: "filters" },
      typed("Steps from", data.range[0], (value) => go(value, data.range[1])), typed("to", data.range[1], (value) => go(data.range[0], value)),
      h("button", { onclick: () => go(data.range[0] - size, data.range[0] - 1), disabled: data.range[0] <= low }, "Earlier"),
      h("button", { onclick: () => go(data.range[1] + 1, data.range[1] + size), disabled: data.range[1] >= high }, "Later"),
      h("button", { onclick: () => lanes.zoom(0.7), title: "+, or Shift+scroll" }, "Zoom in"), h("button", { onclick: () => lanes.zoom(1.4), title: "-, or Shift+scroll" }, "Zoom out")));
    fill(body, lanes.canvas, line,
      data.num_cut ? note(`${data.num_cut} shorter spans are not shown; choose fewer steps.`) : null,
      data.traced ? null : note("These boxes are from the metrics and events. With ", h("code", null, "--trace"), " the page also shows the work of every process, thread and request."));
  }
  fill(place, top, body);
  await draw(view.params.first ?? "", view.params.last ?? "");
  return null;
}
