// A job's health: the verdict with its reasons, each vertex, and the failures.

import { get, session } from "./api.js";
import { badge, h, table, tile } from "./dom.js";
import { planGraph, pressuresOf } from "./graph.js";
import { processes } from "./page_process.js";
import { clock, duration, percent } from "./format.js";

const COLUMNS = [["Operators", "grow"], ["State", ""], ["Subtasks", "number"], ["Busy", "number wide"], ["Cannot send", "number"], ["Back-pressure", ""], ["More", ""]];

let shown = false;

/** Whether this server shows its processes: Airflow and Flink clusters do not. */
async function showsProcesses() {
  shown ||= (await session()).processes === true;
  return shown;
}

function vertexLine(jobId, vertex, pressure, linked) {
  return [
    vertex.name, badge(vertex.status), String(vertex.parallelism), pressure ? percent(pressure.busy) : "–", pressure ? percent(pressure.blocked) : "–",
    pressure ? h("span", { class: pressure.level === "high" ? "bad" : "" }, pressure.level) : "–",
    linked ? h("a", { href: `#/jobs/${jobId}/vertices/${vertex.id}/flamegraph` }, "Flame graph") : "",
  ];
}

function failures(exceptions) {
  const entries = exceptions.exceptionHistory?.entries ?? [];
  if (entries.length === 0) return h("p", { class: "empty" }, "No failures.");
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
    pressuresOf(job),
  ]);
  const checkpoints = health?.checkpoints;
  const tiles = health ? h(
    "dl",
    { class: "tiles" },
    tile("Verdict", badge(health.verdict)),
    tile("Completed checkpoints", percent(checkpoints["success-rate"]), `of the last ${checkpoints.ended}`),
    tile("Last completed", typeof checkpoints["last-completed-age"] === "number" ? `${duration(checkpoints["last-completed-age"])} ago` : "none"),
    tile("Restarts", String(health.restarts), null, health.restarts ? "warn" : ""),
    tile("Greatest back-pressure", percent(health.backpressure.ratio), health.backpressure.vertex),
  ) : null;
  return [
    tiles,
    planGraph(job, pressures),
    h("h2", null, "Operators"),
    table("Operators", COLUMNS, job.vertices.map((vertex) => vertexLine(job.jid, vertex, pressures.get(vertex.id), running && linked)), "None."),
    processes(managers, logs),
    h("h2", null, "Failures, newest first"),
    failures(exceptions),
  ];
}
