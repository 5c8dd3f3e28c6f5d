// One checkpoint: when the barrier arrived at each subtask, and how each spent the time until it acknowledged.

import { get, getIfAny, serverNow } from "./api.js";
import { lanes, width } from "./chart.js";
import { badge, code, h, s, table, tile } from "./dom.js";
import { bytes, clock, duration } from "./format.js";
import { heldUp, PARTS, partsOf } from "./held_up.js";
import { jobHead } from "./page_job.js";
import { kindOf, pending } from "./tab_checkpoints.js";

const MOST_ROWS = 200;
function row(subtask, checkpoint) {
  const label = String(subtask.index);
  if (subtask.className !== "completed") {
    const running = checkpoint.status === "IN_PROGRESS";
    return { label, order: Infinity, title: `Subtask ${label}: ${running ? "not acknowledged yet" : "never acknowledged"}`, parts: [], note: running ? "not yet" : "never" };
  }
  const parts = partsOf(subtask);
  const shares = parts.map((part) => `${PARTS.find(([kind]) => kind === part.kind)[1]} ${duration(part.to - part.from)}`).join(", ");
  return {
    label, parts, order: subtask.end_to_end_duration,
    title: `Subtask ${label}: ${duration(subtask.end_to_end_duration)} in all${shares ? `: ${shares}` : ""}; ${bytes(subtask.checkpointed_size)}${subtask.unaligned_checkpoint ? ", unaligned" : ""}${subtask.aborted ? ", aborted" : ""}`,
  };
}

const COLUMNS = [
  ["Subtask", "number"], ["Took", "number"], ["Barrier arrived after", "number"], ["Alignment", "number"], ["Sync", "number"], ["Async", "number"],
  ["Written", "number"], ["In-flight data", "number"],
];

function figures(subtasks) {
  return subtasks.filter((item) => item.className === "completed").map((item) => [
    String(item.index), duration(item.end_to_end_duration), duration(item.start_delay), duration(item.alignment.duration),
    duration(item.checkpoint.sync), duration(item.checkpoint.async), bytes(item.checkpointed_size), bytes(item.alignment.persisted),
  ]);
}

function section(vertex, details, checkpoint, end, wide) {
  const rows = details.subtasks.map((subtask) => row(subtask, checkpoint));
  const slowest = [...rows].sort((one, other) => other.order - one.order).slice(0, MOST_ROWS);
  const shown = rows.length > MOST_ROWS ? slowest : rows;
  const acknowledged = `${details.num_acknowledged_subtasks} of ${details.num_subtasks}`;
  return h(
    "section",
    { class: "vertex" },
    h("h2", null, vertex.name),
    h("p", { class: "note" }, `${acknowledged} subtasks, ${duration(details.end_to_end_duration)}, ${bytes(details.checkpointed_size)} written`, rows.length > MOST_ROWS ? `; the ${MOST_ROWS} slowest are drawn` : ""),
    lanes(`Subtasks of ${vertex.name}`, shown, end, duration, wide),
    h("details", { "data-key": vertex.id }, h("summary", null, "Figures"), table(`Figures of ${vertex.name}`, COLUMNS, figures(details.subtasks), "No subtask has acknowledged it.")),
  );
}

function head(checkpoint) {
  return h(
    "dl",
    { class: "tiles" },
    tile("Status", badge(checkpoint.status), kindOf(checkpoint)),
    tile("Triggered", clock(checkpoint.trigger_timestamp)),
    tile("Took", duration(checkpoint.status === "IN_PROGRESS" ? serverNow() - checkpoint.trigger_timestamp : checkpoint.end_to_end_duration)),
    tile("Written", bytes(checkpoint.checkpointed_size), `${bytes(checkpoint.state_size)} in all`),
    tile("In-flight data", bytes(checkpoint.persisted_data)),
  );
}

/** A checkpoint that the history no longer has, or never had: what the job still says of it. */
async function forgotten(job, health, id) {
  const { history, latest, counts } = await get(`jobs/${job.jid}/checkpoints`);
  const number = Number(id);
  const known = [latest.completed, latest.savepoint, latest.failed, latest.restored].find((item) => item?.id === number);
  const newest = Math.max(0, ...history.map((item) => item.id));
  const began = number <= newest;
  return {
    title: `${job.name}: checkpoint ${id}`,
    content: [
      ...jobHead(job, health, "checkpoints"),
      h("h2", { class: "large" }, `Checkpoint ${id}`),
      h("p", { class: "note" }, began
        ? `The history has the latest ${history.length} of ${counts.total} checkpoints, and this one is older. The option web.checkpoints.history of the session says how many it keeps.`
        : "The job has not begun a checkpoint with this number."),
      known?.external_path ? h("p", { class: "note" }, code(known.external_path, "path"), known.discarded ? " (deleted since)" : "") : null,
      h("p", null, h("a", { href: `#/jobs/${job.jid}/checkpoints` }, "All checkpoints in the history")),
    ].filter(Boolean),
  };
}

export async function checkpointPage(jobId, id) {
  const [job, health, checkpoint] = await Promise.all([
    get(`jobs/${jobId}`), getIfAny(`jobs/${jobId}/health`), getIfAny(`jobs/${jobId}/checkpoints/details/${id}`),
  ]);
  if (checkpoint === null) return forgotten(job, health, id);
  const vertices = job.vertices.filter((vertex) => checkpoint.tasks[vertex.id]);
  const details = await Promise.all(vertices.map((vertex) => get(`jobs/${jobId}/checkpoints/details/${id}/subtasks/${vertex.id}`)));
  const running = checkpoint.status === "IN_PROGRESS";
  const reason = await heldUp(job, checkpoint);
  const end = Math.max(running ? serverNow() - checkpoint.trigger_timestamp : 0, checkpoint.end_to_end_duration, ...details.flatMap((vertex) => vertex.subtasks.map((item) => item.end_to_end_duration ?? 0)));
  const wide = width(280);
  const name = `${checkpoint.is_savepoint ? "Savepoint" : "Checkpoint"} ${checkpoint.id}`;
  const legend = PARTS.map(([kind, text]) => h("span", null, s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { class: `part ${kind}`, width: 12, height: 12 })), text));
  return {
    title: `${job.name}: ${name.toLowerCase()}`,
    content: [
      ...jobHead(job, health, "checkpoints"),
      h("h2", { class: "large" }, name),
      head(checkpoint),
      running ? pending(jobId, checkpoint) : null,
      reason,
      checkpoint.failure_message ? h("p", { class: "reason bad" }, `It failed at ${clock(checkpoint.failure_timestamp)}: ${checkpoint.failure_message}`) : null,
      checkpoint.external_path ? h("p", { class: "note" }, code(checkpoint.external_path, "path"), checkpoint.discarded ? " (deleted since)" : "") : null,
      h("p", { class: "legend" }, legend),
      vertices.map((vertex, index) => section(vertex, details[index], checkpoint, end, wide)),
    ].flat().filter(Boolean),
  };
}
