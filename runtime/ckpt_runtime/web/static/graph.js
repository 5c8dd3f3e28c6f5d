// A job's plan as a drawing from its sources to its sinks, coloured by back-pressure, with the vertex where that begins.

import { getIfAny } from "./api.js";
import { h, s } from "./dom.js";
import { percent } from "./format.js";

const WIDE = 190;
const HIGH = 58;
const GAP_X = 48;
const GAP_Y = 16;
const LETTERS = 26;
/** From this share of its time on, a subtask that cannot send is held up; Flink calls it low, and from one half on high. */
const HELD_UP = 0.1;
const HIGHLY = 0.5;
const LEVELS = { ok: "good", low: "warn", high: "bad" };

/** Busy and blocked shares of each vertex that runs, by its id: those of its worst subtask. */
export async function pressuresOf(job) {
  if (job.state !== "RUNNING") return new Map();
  const answers = await Promise.all(job.vertices.map((vertex) => getIfAny(`jobs/${job.jid}/vertices/${vertex.id}/backpressure`)));
  return new Map(job.vertices.map((vertex, index) => [vertex.id, summed(answers[index])]));
}

function summed(pressure) {
  const subtasks = pressure?.subtasks ?? [];
  if (subtasks.length === 0) return null;
  const greatest = (field) => Math.max(...subtasks.map((item) => item[field] ?? 0));
  const blocked = greatest("ratio");
  return { blocked, busy: greatest("busyRatio"), level: blocked > HIGHLY ? "high" : blocked > HELD_UP ? "low" : "ok" };
}

/** The vertices that hold up those before them: they can send, what they get from cannot, and they are busy. */
export function bottlenecks(nodes, pressures) {
  const isBlocked = (id) => pressures.get(id)?.level === "high";
  const busy = (node) => pressures.get(node.id).busy;
  const behind = nodes.filter((node) => !isBlocked(node.id) && pressures.get(node.id) && (node.inputs ?? []).some((input) => isBlocked(input.id)));
  const found = behind.filter((node) => busy(node) > HIGHLY);
  return found.length ? found : behind.sort((one, other) => busy(other) - busy(one)).slice(0, 1);
}

/** For each vertex its column, one to the right of the last of its inputs, and its row in that column. */
function places(nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const columns = new Map();
  function column(id) {
    if (!columns.has(id)) {
      columns.set(id, 0); // a plan has no cycles, but a server may be wrong
      const before = (byId.get(id).inputs ?? []).filter((input) => byId.has(input.id)).map((input) => column(input.id) + 1);
      columns.set(id, Math.max(0, ...before));
    }
    return columns.get(id);
  }
  const heights = [];
  const found = new Map();
  for (const node of [...nodes].reverse()) {
    const at = column(node.id);
    heights[at] ??= 0;
    found.set(node.id, { x: at * (WIDE + GAP_X), y: heights[at] * (HIGH + GAP_Y) });
    heights[at] += 1;
  }
  return { found, wide: heights.length * (WIDE + GAP_X) - GAP_X, high: Math.max(...heights) * (HIGH + GAP_Y) - GAP_Y };
}

function edge(from, to, ship) {
  const [x1, y1, x2, y2] = [from.x + WIDE, from.y + HIGH / 2, to.x, to.y + HIGH / 2];
  const middle = (x1 + x2) / 2;
  return s("path", { class: "edge", d: `M ${x1} ${y1} C ${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` }, s("title", null, ship ?? ""));
}

const short = (text) => (text.length > LETTERS ? `${text.slice(0, LETTERS - 1)}…` : text);

function box(node, place, pressure, isCause) {
  const figures = pressure ? `busy ${percent(pressure.busy)}, blocked ${percent(pressure.blocked)}` : `${node.parallelism} subtasks`;
  const about = `${node.description}, ${node.parallelism} subtasks${pressure ? `, busy ${percent(pressure.busy)}, cannot send ${percent(pressure.blocked)} of the time` : ""}${isCause ? ": it slows down the vertices before it" : ""}`;
  return s(
    "g",
    { class: `node ${LEVELS[pressure?.level] ?? "calm"} ${isCause ? "cause" : ""}`, transform: `translate(${place.x} ${place.y})` },
    s("title", null, about),
    s("rect", { width: WIDE, height: HIGH, rx: 6 }),
    s("text", { x: 10, y: 23, class: "title" }, short(node.description)),
    s("text", { x: 10, y: 43 }, figures),
  );
}

/** The drawing with a sentence about where the back-pressure begins; null for a job without a plan. */
export function planGraph(job, pressures) {
  const nodes = job.plan?.nodes ?? [];
  if (nodes.length === 0) return null;
  const causes = bottlenecks(nodes, pressures);
  const { found, wide, high } = places(nodes);
  const edges = nodes.flatMap((node) => (node.inputs ?? []).filter((input) => found.has(input.id)).map((input) => edge(found.get(input.id), found.get(node.id), input.ship_strategy)));
  const boxes = nodes.map((node) => box(node, found.get(node.id), pressures.get(node.id), causes.includes(node)));
  const legend = [["good", "sends freely"], ["warn", "blocked from 10 % of its time on"], ["bad", "blocked from 50 % on"]];
  return [
    h("h2", null, "Plan"),
    causes.map((node) => h("p", { class: "reason" }, "The back-pressure begins at ", h("strong", null, node.description), `: it is busy ${percent(pressures.get(node.id).busy)} of its time, and the vertices before it cannot send. Increase its parallelism, or reduce its work.`)),
    h(
      "div",
      { class: "scroll plan", tabindex: 0, role: "region", "aria-label": "Plan of the job" },
      s("svg", { width: wide + 4, height: high + 4, viewBox: `-2 -2 ${wide + 4} ${high + 4}`, role: "img", "aria-label": `Plan with ${nodes.length} vertices` }, edges, boxes),
    ),
    pressures.size ? h("p", { class: "legend" }, legend.map(([kind, text]) => h("span", null, s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("g", { class: `node ${kind}` }, s("rect", { width: 12, height: 12 }))), text))) : null,
  ];
}
