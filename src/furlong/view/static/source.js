// Where the data comes from: the server, or the JSON inside an exported page.

const embedded = document.getElementById("embedded");
const data = embedded ? JSON.parse(embedded.textContent) : null;
export const isExport = data !== null;
export const exported = data;

/** Return the answer to `path`, such as "metrics/0", with query parameters. Throws an Error with the server's message. */
export async function get(path, parameters = {}) {
  const given = Object.entries(parameters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  if (isExport) return fromExport(path, Object.fromEntries(given));
  const query = new URLSearchParams(given).toString();
  const reply = await fetch(`api/${path}${query ? "?" + query : ""}`);
  if (reply.ok) return reply.json();
  const text = await reply.text();
  let message = text;
  try { message = JSON.parse(text).error; } catch { /* not JSON: the text is the message */ }
  throw new Error(message || `the server answered ${reply.status}`);
}

/** Call `react` with [[steps, events, state], ...] of the runs whenever one changes, and `lost` when the server is gone. */
export function follow(react, lost) {
  if (isExport) return;
  const stream = new EventSource("api/changes");
  stream.onmessage = (event) => react(JSON.parse(event.data));
  stream.onerror = () => lost(stream.readyState !== EventSource.OPEN);
  stream.onopen = () => lost(false);
}

function fromExport(path, parameters) {
  const [kind, number] = path.split("/");
  if (kind === "runs") return data.runs;
  const run = data.answers[number];
  if (kind === "samples") return samplesOf(run, parameters);
  if (kind === "sample") return run.sample[`${parameters.file}:${parameters.pos}`];
  if (kind === "groups") return groupsOf(run, parameters);
  return run[kind];
}

const ORDERS = {
  "": (a, b) => b.step - a.step || a.grp - b.grp || a.pos - b.pos,
  reward: (a, b) => a.reward - b.reward,
  "-reward": (a, b) => b.reward - a.reward,
  "-length": (a, b) => b.response_len - a.response_len,
  logp: (a, b) => a.mean_logp - b.mean_logp,
};

function samplesOf(run, p) {
  const is = (name, value) => p[name] === undefined || String(p[name]) === String(value);
  const text = (p.text || "").toLowerCase();
  const rows = run.samples.rows.filter((row) =>
    (p.set ? row.is_eval && row.name === p.set : !row.is_eval) && is("step", row.step) && is("status", row.status)
    && is("group", row.grp) && is("index", row.idx)
    && (p.reward_min === undefined || row.reward >= Number(p.reward_min))
    && (p.reward_max === undefined || row.reward <= Number(p.reward_max))
    && (!text || (row.prompt + "\n" + row.response).toLowerCase().includes(text)));
  rows.sort(ORDERS[p.order || ""]);
  const offset = Number(p.offset || 0);
  return { total: rows.length, rows: rows.slice(offset, offset + 50) };
}

function groupsOf(run, p) {
  const rows = run.groups.rows.filter((row) =>
    (!p.state || row.state === p.state) && (!p.reason || row.reason === p.reason)
    && (p.group === undefined || String(row.group) === String(p.group)));
  const offset = Number(p.offset || 0);
  return { total: rows.length, rows: rows.slice(offset, offset + 100) };
}
