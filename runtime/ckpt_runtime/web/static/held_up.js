// The parts of a subtask's time in a checkpoint, and the part that delayed the whole checkpoint.

import { ApiError, get } from "./api.js";
import { h } from "./dom.js";
import { duration } from "./format.js";

export const PARTS = [
  ["wait", "the barrier is on its way"], ["align", "waiting for other inputs"], ["sync", "freezing the state"],
  ["async", "writing it"], ["rest", "the rest until acknowledged"],
];
/** What helps, by the part that took longest. */
const ADVICE = {
  wait: "Rows before the barrier are processed first. The page Health shows where the back-pressure begins; unaligned checkpoints overtake it.",
  align: "One of its inputs is slower than the others. Unaligned checkpoints do not wait for it.",
  sync: "It processes no rows during this. The state backend rocksdb with incremental checkpoints freezes less.",
  async: "The storage is slow, or the state is large. Incremental checkpoints write less.",
  rest: "It was acknowledged late: its process, or the driver, was busy.",
};
/** Shorter checkpoints need no advice. */
const LONG_MS = 1000;
const PATCH = "The DAG ckpt_patch, or ckpt patch-checkpoint-config, changes the settings of the running job.";

/** A subtask's time in parts, from the trigger on. What it did not measure counts as the rest. */
export function partsOf(subtask) {
  const steps = [
    ["wait", subtask.start_delay], ["align", subtask.alignment.duration], ["sync", subtask.checkpoint.sync], ["async", subtask.checkpoint.async],
  ];
  const end = subtask.end_to_end_duration;
  const parts = [];
  let at = 0;
  for (const [kind, length] of steps) {
    const to = Math.min(end, at + Math.max(0, length));
    if (to > at) parts.push({ kind, from: at, to });
    at = to;
  }
  if (end > at) parts.push({ kind: "rest", from: at, to: end });
  return parts;
}

/** The slowest of the subtasks that have acknowledged, and the others. */
function slowest(vertices) {
  const subtasks = vertices.flatMap(({ vertex, details }) => details.subtasks.map((item) => ({ vertex, item })));
  const done = subtasks.filter(({ item }) => item.className === "completed");
  const missing = subtasks.filter(({ item }) => item.className !== "completed");
  return { last: done.sort((one, other) => other.item.end_to_end_duration - one.item.end_to_end_duration)[0], missing };
}

function named(missing) {
  const byVertex = new Map();
  for (const { vertex, item } of missing) byVertex.set(vertex.name, [...(byVertex.get(vertex.name) ?? []), item.index]);
  return [...byVertex].map(([name, indexes]) => `${indexes.length === 1 ? "subtask" : "subtasks"} ${indexes.slice(0, 5).join(", ")}${indexes.length > 5 ? " and others" : ""} of ${name}`).join("; ");
}

/** The cause of a checkpoint's delay, as a sentence with a remedy; null if nothing is known of its subtasks. */
export async function heldUp(job, item) {
  try {
    const { tasks } = await get(`jobs/${job.jid}/checkpoints/details/${item.id}`);
    const known = job.vertices.filter((vertex) => tasks[vertex.id]);
    const open = known.filter((vertex) => tasks[vertex.id].num_acknowledged_subtasks < tasks[vertex.id].num_subtasks);
    const longest = [...known].sort((one, other) => tasks[other.id].end_to_end_duration - tasks[one.id].end_to_end_duration)[0];
    const wanted = item.status === "COMPLETED" ? [longest].filter(Boolean) : open;
    const vertices = await Promise.all(wanted.map(async (vertex) => ({ vertex, details: await get(`jobs/${job.jid}/checkpoints/details/${item.id}/subtasks/${vertex.id}`) })));
    const { last, missing } = slowest(vertices);
    if (item.status !== "COMPLETED") return missing.length ? h("p", { class: "reason" }, `${item.status === "FAILED" ? "It waited" : "It waits"} for ${named(missing)}.`) : null;
    if (!last) return null;
    return completedBy(last);
  } catch (error) {
    if (error instanceof ApiError) return null; // it has left the history in the meantime
    throw error;
  }
}

function completedBy({ vertex, item }) {
  const total = item.end_to_end_duration;
  const parts = partsOf(item).sort((one, other) => other.to - other.from - (one.to - one.from));
  if (parts.length === 0 || total < LONG_MS) return h("p", { class: "note" }, `Slowest was subtask ${item.index} of ${vertex.name}, with ${duration(total)}.`);
  const { kind, from, to } = parts[0];
  const [, words] = PARTS.find(([name]) => name === kind);
  return h("p", { class: "reason" }, "Held up by ", h("strong", null, `subtask ${item.index} of ${vertex.name}`), `: ${duration(to - from)} of ${duration(total)} were for “${words}”. ${ADVICE[kind]} ${kind === "rest" ? "" : PATCH}`);
}
