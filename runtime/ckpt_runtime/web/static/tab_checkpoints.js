// A job's checkpoints: the pending one, durations and sizes, and the history.

import { get, serverNow } from "./api.js";
import { bars, width } from "./chart.js";
import { badge, code, h, s, table, tile } from "./dom.js";
import { bytes, clock, duration } from "./format.js";
import { heldUp } from "./held_up.js";

const FAR = 2 ** 53;

export const address = (jobId, id) => `#/jobs/${jobId}/checkpoints/${id}`;

export function kindOf(item) {
  if (item.is_savepoint) return item.savepointFormat ? `savepoint, ${item.savepointFormat.toLowerCase()}` : "savepoint";
  const aligned = item.checkpoint_type === "UNALIGNED_CHECKPOINT" ? "unaligned" : "";
  return [aligned, item.incremental ? "incremental" : ""].filter(Boolean).join(", ") || "checkpoint";
}

const elapsed = (item) => (item.status === "IN_PROGRESS" ? Math.max(0, serverNow() - item.trigger_timestamp) : item.end_to_end_duration);

/** One that is under way: how far it is, and how long it may still take. */
export function pending(jobId, item) {
  const left = item.deadline_timestamp ? item.deadline_timestamp - serverNow() : null;
  const extended = item.timeout_extension ? `, extended by ${duration(item.timeout_extension)}` : "";
  return h(
    "div",
    { class: "pending" },
    h("p", null, h("a", { href: address(jobId, item.id) }, `${item.is_savepoint ? "Savepoint" : "Checkpoint"} ${item.id}`), " is under way"),
    h("progress", { max: item.num_subtasks, value: item.num_acknowledged_subtasks, "aria-label": "Acknowledged subtasks" }),
    h(
      "p",
      { class: "note" },
      `${item.num_acknowledged_subtasks} of ${item.num_subtasks} subtasks have acknowledged, `,
      `${bytes(item.progress_size ?? item.checkpointed_size)} are stored, `,
      `for ${duration(elapsed(item))}`,
      left === null ? "" : left > 0 ? `; it expires in ${duration(left)}${extended}` : `; it is expiring${extended}`,
    ),
  );
}

function barKind(item) {
  if (item.status === "FAILED") return "bad";
  if (item.status === "IN_PROGRESS") return "busy";
  return item.is_savepoint ? "save" : "good";
}

function drawn(jobId, history) {
  const oldest = [...history].reverse();
  const wide = width(280);
  const about = (item, text) => `${item.is_savepoint ? "Savepoint" : "Checkpoint"} ${item.id}, ${item.status.toLowerCase().replace("_", " ")}: ${text}`;
  const times = oldest.map((item) => ({
    id: item.id, href: address(jobId, item.id), kind: barKind(item), value: elapsed(item), title: about(item, duration(elapsed(item))),
  }));
  const sizes = oldest.map((item) => ({
    id: item.id, href: address(jobId, item.id), kind: barKind(item), value: item.checkpointed_size, behind: item.state_size,
    title: about(item, `${bytes(item.checkpointed_size)} written, ${bytes(item.state_size)} in all`),
  }));
  const legend = (entries) => h("p", { class: "legend" }, entries.map(([kind, text]) => h("span", null, s("svg", { width: 12, height: 12, "aria-hidden": "true" }, s("rect", { class: `bar ${kind}`, width: 12, height: 12 })), text)));
  return [
    h("h2", null, "Durations"),
    bars("Durations of checkpoints", times, "time", duration, wide),
    h("h2", null, "Sizes"),
    bars("Sizes of checkpoints", sizes, 1024, bytes, wide),
    legend([["good", "checkpoint, written"], ["good pale", "in all, with what is reused"], ["save", "savepoint"], ["bad", "failed"], ["busy", "under way"]]),
  ];
}

const COLUMNS = [
  ["Id", "number"], ["Status", ""], ["Kind", "wide"], ["Triggered", ""], ["Took", "number"], ["Written", "number"], ["In all", "number wide"],
  ["Subtasks", "number wide"], ["Result", "grow wide"],
];

function line(jobId, item) {
  return [
    h("a", { href: address(jobId, item.id) }, String(item.id)),
    badge(item.status),
    kindOf(item),
    clock(item.trigger_timestamp),
    duration(elapsed(item)),
    bytes(item.status === "IN_PROGRESS" ? (item.progress_size ?? item.checkpointed_size) : item.checkpointed_size),
    bytes(item.state_size),
    `${item.num_acknowledged_subtasks}/${item.num_subtasks}`,
    item.failure_message ? h("span", { class: "bad" }, item.failure_message) : item.discarded ? "deleted since" : code(item.external_path ?? "", "path"),
  ];
}

function tiles(statistics, settings, health) {
  const { counts, latest } = statistics;
  const age = health?.checkpoints?.["last-completed-age"];
  const every = settings && settings.interval < FAR ? `every ${duration(settings.interval)}` : "only when asked for";
  return h(
    "dl",
    { class: "tiles" },
    tile("Last completed", typeof age === "number" ? `${duration(age)} ago` : latest.completed ? clock(latest.completed.latest_ack_timestamp) : "none", every),
    tile("It took", latest.completed ? duration(latest.completed.end_to_end_duration) : "–", settings ? `at most ${duration(settings.timeout)}` : null),
    tile("It wrote", latest.completed ? bytes(latest.completed.checkpointed_size) : "–", latest.completed ? `${bytes(latest.completed.state_size)} in all` : null),
    tile("Completed", String(counts.completed)),
    tile("Failed", String(counts.failed), null, counts.failed ? "warn" : ""),
  );
}

export async function checkpointsTab(job, health) {
  const [statistics, settings] = await Promise.all([get(`jobs/${job.jid}/checkpoints`), get(`jobs/${job.jid}/checkpoints/config`)]);
  const { history, latest } = statistics;
  const under = history.filter((item) => item.status === "IN_PROGRESS");
  const last = under[0] ?? history.find((item) => item.status !== "IN_PROGRESS");
  const reason = last ? await heldUp(job, last) : null;
  const failed = latest.failed && !(latest.completed && latest.completed.id > latest.failed.id);
  return [
    tiles(statistics, settings, health),
    failed ? h("p", { class: "reason bad" }, `The latest has failed: ${latest.failed.failure_message ?? "no reason is known"}`) : null,
    latest.restored ? h("p", { class: "note" }, "Restored from ", code(latest.restored.external_path ?? `checkpoint ${latest.restored.id}`, "path"), ` at ${clock(latest.restored.restore_timestamp)}`) : null,
    under.map((item) => pending(job.jid, item)),
    reason ? [h("h2", null, `What ${last.status === "IN_PROGRESS" ? "delays" : "delayed"} `, h("a", { href: address(job.jid, last.id) }, `${last.is_savepoint ? "savepoint" : "checkpoint"} ${last.id}`)), reason] : null,
    history.length ? drawn(job.jid, history) : null,
    h("h2", null, "History"),
    table("Checkpoints", COLUMNS, history.map((item) => line(job.jid, item)), "There is no history: none has been taken, or another driver ran the job."),
  ];
}
