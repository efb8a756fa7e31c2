// Elements and formats. Text is always set as text, never as HTML: responses may contain anything.

/** Make an element: attributes and `on...` handlers from `options`, then children (nodes or text). */
export function h(tag, options, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

/** A number with about four significant digits; "–" if it was not measured. */
export function num(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

/** A JSON value for reading. */
export function shown(value) {
  if (value === null || value === undefined) return "not set";
  return typeof value === "string" ? value || "\"\"" : JSON.stringify(value);
}

/** Text in which words between backticks are code. */
export function prose(text) {
  return text.split(/`([^`\n]+)`/).map((part, i) => (i % 2 ? h("code", null, part) : part));
}

/** A labelled input or select. */
export function field(label, input) {
  return h("label", { class: "field" }, h("span", null, label), input);
}

/** A select with options [value, text]. */
export function choice(options, value, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(h("option", { value: key, selected: String(key) === String(value) }, text));
  return select;
}

/** Buttons that turn pages of `size` rows. */
export function pager(total, offset, size, go) {
  if (total <= size) return h("p", { class: "muted" }, `${total.toLocaleString("en-US")} in total`);
  const last = Math.min(offset + size, total);
  return h("div", { class: "pager" },
    h("button", { disabled: offset === 0, onclick: () => go(Math.max(0, offset - size)) }, "Previous"),
    h("span", null, `${offset + 1}–${last} of ${total.toLocaleString("en-US")}`),
    h("button", { disabled: last >= total, onclick: () => go(offset + size) }, "Next"));
}

/** Heads of table columns; those whose numbers are in `numeric` are aligned right. */
export function columns(titles, numeric) {
  return titles.map((title, i) => h("th", { scope: "col", class: numeric.includes(i) ? "number" : null }, title));
}

/** The mark of a run in the charts: the color and dashes of its line. */
export function swatch(slot) {
  return h("i", { class: `swatch c${slot}` });
}

/** Save text or a Blob as a file of the reader. */
export function download(name, content) {
  const link = h("a", { download: name.replaceAll(/[^\w.-]+/g, "_"), href: URL.createObjectURL(content instanceof Blob ? content : new Blob([content])) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Rows of values as CSV; what was not measured is empty. */
export function csv(rows) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  return rows.map((row) => `${row.map(cell).join(",")}\n`).join("");
}

/** An error that kept a view from being shown, also on the console. */
export function problem(error) {
  console.error(error);
  return h("p", { class: "note problem", role: "alert" }, error.message);
}

/** A message about something that is not there, with what to do. */
export function note(...children) {
  return h("p", { class: "note" }, ...children);
}
