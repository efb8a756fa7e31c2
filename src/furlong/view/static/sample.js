// One sample: conversation, tokens in color, its group, and the turns of an agent as a tree.
import { h, fill, num, choice, field, shown, note, problem } from "./elements.js";
import { get } from "./source.js";

const LOG_PROB = [-4, 0], DIFFERENCE = [-0.1, 0.1];
const FACTS = {
  engine: ["log-prob of the engine", "sequential", ...LOG_PROB],
  probability: ["probability", "sequential", 0, 1],
  trainer: ["log-prob of the trainer", "sequential", ...LOG_PROB],
  difference: ["trainer - engine", "signed", ...DIFFERENCE],
  advantage: ["advantage", "scaled"],
  entropy: ["entropy", "sequential", 4, 0],
  mask: ["loss mask", "sequential", 1, 0],
  version: ["weight version", "cycle"],
  teacher: ["log-prob of the teacher", "sequential", ...LOG_PROB],
};
const NAMED = ["rollout_log_probs", "teacher_log_probs", "token_versions", "train_log_probs", "train_entropy", "entropy",
  "advantages", "returns", "loss_weights"];  // columns that FACTS shows, or that say the same
let chosen = "engine";

/** The values by response token that this sample has: {key: [label, kind, low, high, values]}. */
function tokenFacts(sample) {
  const { tokens, batch } = sample, columns = (batch && batch.columns) || {};
  const trainer = columns.train_log_probs || columns.old_log_probs, { engine } = tokens;
  const values = {
    engine, trainer, mask: tokens.mask, teacher: tokens.teacher, advantage: columns.advantages,
    probability: engine && engine.map((v) => (v === null ? null : Math.exp(v))),
    difference: engine && trainer && trainer.map((v, i) => (v === null || engine[i] === null ? null : v - engine[i])),
    entropy: columns.train_entropy || columns.entropy,
    version: tokens.versions.length ? tokens.versions : null,
  };
  const facts = {};
  for (const [key, [label, kind, low, high]] of Object.entries(FACTS)) {
    if (values[key]) facts[key] = kind === "scaled" ? scaled(label, values[key]) : [label, kind, low, high, values[key]];
  }
  for (const [name, column] of Object.entries(columns)) {
    if (!NAMED.includes(name)) facts[name] = scaled(name.replaceAll("_", " "), column);
  }
  return facts;
}

/** A fact whose colors span the values of this sample. */
function scaled(label, values) {
  const size = values.reduce((most, v) => Math.max(most, Math.abs(v ?? 0)), 1e-9);
  return [label, "signed", -size, size, values];
}

/** The background of a token: the stronger, the further from normal; signed values have two hues. */
function background([, kind, low, high], value) {
  if (value === null || value === undefined) return "";
  if (kind === "cycle") return value < 0 ? "" : `hsl(${(value * 67) % 360} 70% 50% / 0.28)`;
  const share = Math.min(1, Math.max(0, (value - low) / (high - low)));
  if (kind === "signed") {
    const side = share * 2 - 1;
    return `hsl(${side < 0 ? 12 : 170} 80% 45% / ${(Math.abs(side) * 0.45).toFixed(3)})`;
  }
  return `hsl(12 85% 50% / ${((1 - share) * 0.55).toFixed(3)})`;
}

/** What the colors of a fact mean. */
function legend([label, kind, low, high]) {
  if (kind === "cycle") return `Color: ${label}, one hue each`;
  if (kind === "signed") return `Color: ${label}, red below 0, green above, darkest at ±${num(high)}`;
  return `Color: ${label}, from ${num(high)} (none) to ${num(low)} (darkest)`;
}

function visible(piece) {
  return piece.replaceAll("\n", "⏎\n").replaceAll("\t", "→\t");
}

function drawTokens(place, sample, facts, line) {
  const { tokens } = sample;
  const fact = facts[chosen] || Object.values(facts)[0];
  const spans = tokens.ids.map((id, i) => {
    const at = i - tokens.num_prompt;
    const piece = tokens.pieces ? tokens.pieces[i] : `${id} `;
    const span = h("span", { class: at < 0 ? "token prompt" : "token" }, visible(piece));
    if (at >= 0 && fact) span.style.backgroundColor = background(fact, fact[4][at]);
    if (at >= 0 && tokens.mask[at] === 0) span.classList.add("masked");
    span.dataset.at = String(i);
    return span;
  });
  const explain = (event) => {
    const i = Number(event.target.dataset.at);
    if (Number.isNaN(i)) return;
    const at = i - tokens.num_prompt;
    const values = at < 0 ? ["prompt"] : Object.values(facts).map(([label, , , , list]) => `${label} ${num(list[at])}`);
    line.textContent = `token ${i}, id ${tokens.ids[i]}: ${values.join(" · ")}`;
  };
  fill(place, h("div", { class: "tokens", onmouseover: explain, onclick: explain }, spans),
    fact ? h("p", { class: "muted" }, `${legend(fact)}.`) : null,
    tokens.num_cut ? note(`${tokens.num_cut} more tokens are not shown.`) : null);
}

function tokenSection(sample) {
  const facts = tokenFacts(sample), place = h("div"), line = h("p", { class: "muted tokenline" }, "Hover over or tap a token for its values.");
  if (!facts[chosen]) chosen = Object.keys(facts)[0] || "engine";
  const options = Object.entries(facts).map(([key, [label]]) => [key, label]);
  const draw = () => drawTokens(place, sample, facts, line);
  draw();
  return h("section", null, h("h3", null, "Tokens"),
    h("div", { class: "filters" }, options.length ? field("Color", choice(options, chosen, (key) => { chosen = key; draw(); })) : null),
    place, line,
    sample.tokens.pieces ? null : note("Token ids are shown: the model's folder has no tokenizer.json here."),
    advantageNote(sample));
}

function advantageNote(sample) {
  const { batch, is_eval: isEval } = sample;
  if (isEval) return null;
  if (batch.problem) return note(batch.problem);
  if (batch.normalized_reward !== undefined) {
    return h("p", null, "Normalized reward, the advantage of every token before KL and other terms: ", h("b", null, num(batch.normalized_reward)));
  }
  return note("Normalized rewards and the columns of the training batch need ", h("code", null, "--dump-details DIR"), ".");
}

function message(m) {
  const entries = Object.entries(m.more || {});
  return h("div", { class: `message ${["user", "assistant", "system", "tool"].includes(m.role) ? m.role : "other"}` },
    h("span", { class: "role" }, m.role), h("div", { class: "text" }, m.content),
    entries.map(([name, value]) => h("pre", null, `${name}: ${shown(value)}`)));
}

/** The conversations of an episode as a tree: a common beginning once, then a branch for each leaf. */
function tree(leaves, current) {
  const root = { children: [] };
  for (const leaf of leaves) {
    let node = root;
    for (const m of leaf.messages) {
      const key = JSON.stringify(m);
      let child = node.children.find((each) => each.key === key);
      if (!child) node.children.push((child = { key, message: m, children: [], isCurrent: false }));
      child.isCurrent ||= leaf.pos === current || leaves.length === 1;
      node = child;
    }
  }
  const draw = (node) => {
    const parts = node.message ? [message(node.message)] : [];
    if (node.children.length === 1) return [...parts, ...draw(node.children[0])];
    return [...parts, ...node.children.map((child, i) =>
      h("details", { class: "branch", open: child.isCurrent || i === node.children.length - 1 },
        h("summary", null, `branch ${i + 1} of ${node.children.length}`), draw(child)))];
  };
  return h("div", { class: "conversation" }, draw(root));
}

function conversation(sample, pos) {
  const title = sample.leaves.length > 1 ? `Conversation (${sample.leaves.length} leaves of one episode)` : "Conversation";
  return h("section", null, h("h3", null, title),
    sample.leaves.length ? tree(sample.leaves, pos) : h("div", { class: "conversation" }, sample.turns.map(message)),
    sample.label ? h("p", { class: "text" }, h("b", null, "Label: "), sample.label) : null);
}

function group(sample, pos, open) {
  const rewards = sample.members.map((m) => m.reward).filter((r) => r !== null);
  const mean = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  return h("section", null, h("h3", null, `Group ${sample.group}`, h("span", { class: "muted" }, ` mean reward ${num(mean)}`)),
    h("div", { class: "members" }, sample.members.map((m) => h("button", {
      class: `member ${m.status}`, "aria-pressed": String(m.pos === pos), title: `${m.status}, ${m.response_len} tokens`, onclick: () => open(m.pos),
    }, num(m.reward)))));
}

/** Show one sample of a dump in an element; `onOpen` gets its place, also that of another one of its group. */
export async function showSample(place, number, file, pos, onOpen) {
  let sample;
  try {
    sample = await get(`sample/${number}`, { file, pos });
  } catch (error) {
    fill(place, problem(error));
    return;
  }
  if (onOpen) onOpen({ file, pos });
  if (!sample) {
    fill(place, note("This exported file does not contain that sample."));
    return;
  }
  const facts = [["Step", sample.step], ["Sample", sample.index], ["Reward", typeof sample.reward === "number" ? num(sample.reward) : shown(sample.reward)], ["Status", sample.status],
    ["Epoch, row", `${sample.epoch}, ${sample.row}`], ["Tokens", `${sample.tokens.num_prompt} + ${sample.tokens.mask.length}`]];
  fill(place, h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, String(value))))),
    sample.outcome && sample.outcome.reason ? note(`${sample.outcome.kind} in ${sample.outcome.stage}: ${sample.outcome.reason}`) : null,
    group(sample, pos, (other) => showSample(place, number, file, other, onOpen)),
    conversation(sample, pos), tokenSection(sample),
    Object.keys(sample.metadata).length ? h("details", null, h("summary", null, "Metadata"), h("pre", null, JSON.stringify(sample.metadata, null, 1))) : null);
}
