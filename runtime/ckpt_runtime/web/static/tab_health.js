// A job's health: the verdict with its reasons, each vertex, and what has failed.

import { get, getIfAny, session } from "./api.js";
import { badge, h, table, tile } from "./dom.js";
import { processes } from "./page_process.js";
import { clock, duration, percent } from "./format.js";

const COLUMNS = [["Operators", "grow"], ["State", ""], ["Subtasks", "number"], ["Busy", "number wide"], ["Cannot send", "number"], ["Back-pressure", ""], ["", ""]];

let shown = false;

/** Whether this server shows its processes: Airflow and Flink clusters do not. */
async function showsProcesses() {
  shown ||= (await session()).processes === true;
  return shown;
}

function vertexLine(jobId, vertex, pressure, linked) {
  const subtasks = pressure?.subtasks ?? [];
  const greatest = (field) => (subtasks.length ? percent(Math.max(...subtasks.map((item) => item[field] ?? 0))) : "–");
  const level = pressure?.["backpressureLevel"] ?? pressure?.["backpressure-level"];
  return [
    vertex.name, badge(vertex.status), String(vertex.parallelism), greatest("busyRatio"), greatest("ratio"),
    level ? h("span", { class: level === "high" ? "bad" : "" }, level) : "–",
    linked ? h("a", { href: `#/jobs/${jobId}/vertices/${vertex.id}/flamegraph` }, "Flame graph") : "",
  ];
}

function failures(exceptions) {
  const entries = exceptions.exceptionHistory?.entries ?? [];
  if (entries.length === 0) return h("p", { class: "empty" }, "Nothing has failed.");
  return entries.map((entry) => h(
    "details",
    { "data-key": `${entry.timestamp}${entry.exceptionName}` },
    h("summary", null, `${clock(entry.timestamp)} `, h("strong", null, entry.exceptionName), entry.taskName ? ` in ${entry.taskName}` : ""),
    h("pre", { tabindex: 0 }, entry.stacktrace),
  ));
}

export async function healthTab(job, health) {
  const running = job.state === "RUNNING";
  const linked = await showsProcesses();
  const [exceptions, managers, logs, pressures] = await Promise.all([
    get(`jobs/${job.jid}/exceptions`),
    linked ? get("taskmanagers") : null,
    linked ? get("jobmanager/logs") : null,
    Promise.all(job.vertices.map((vertex) => (running ? getIfAny(`jobs/${job.jid}/vertices/${vertex.id}/backpressure`) : null))),
  ]);
  const checkpoints = health?.checkpoints;
  const tiles = health ? h(
    "dl",
    { class: "tiles" },
    tile("Verdict", badge(health.verdict)),
    tile("Checkpoints that completed", percent(checkpoints["success-rate"]), `of the last ${checkpoints.ended}`),
    tile("Last completed", typeof checkpoints["last-completed-age"] === "number" ? `${duration(checkpoints["last-completed-age"])} ago` : "none"),
    tile("Restarts", String(health.restarts), null, health.restarts ? "warn" : ""),
    tile("Greatest back-pressure", percent(health.backpressure.ratio), health.backpressure.vertex),
  ) : null;
  return [
    tiles,
    h("h2", null, "Operators"),
    table("Operators", COLUMNS, job.vertices.map((vertex, index) => vertexLine(job.jid, vertex, pressures[index], running && linked)), "None."),
    processes(managers, logs),
    h("h2", null, "Failures, newest first"),
    failures(exceptions),
  ];
}
