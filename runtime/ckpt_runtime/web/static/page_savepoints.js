// Savepoints: those of the session's catalogue if it knows a directory, otherwise those in the histories of jobs.

import { ApiError, get, getIfAny, inTurn } from "./api.js";
import { badge, code, h, table } from "./dom.js";
import { bytes, clock, duration } from "./format.js";
import { address } from "./tab_checkpoints.js";

/** Looking into the catalogue reads storage. */
const INTERVAL_MS = 15000;
const NO_CATALOGUE = new Set([400, 404]);

const CATALOGUE = [
  ["Taken", ""], ["Job", "grow"], ["By", "wide"], ["Size", "number"], ["Format", "wide"], ["Verified", ""], ["Drilled", ""], ["Where it is", "grow wide"],
];
const COLUMNS = [["Taken", ""], ["Job", ""], ["Took", "number wide"], ["Size", "number"], ["Format", "wide"], ["Where it is", "grow"]];

async function catalogue(query) {
  try {
    const found = await get(`savepoints/known${query}`);
    return found.directories.length || found.unread.length ? found : null;
  } catch (error) {
    if (error instanceof ApiError && NO_CATALOGUE.has(error.status)) return null;
    throw error;
  }
}

function mark(found) {
  if (!found) return "–";
  return h("span", { title: found.detail || null }, badge(found.passed ? "passed" : "FAILED"), h("small", { class: "line" }, clock(found.timestamp)));
}

const when = (item) => item["completion-timestamp"] ?? item["trigger-timestamp"] ?? 0;

function catalogued(item) {
  const job = item["job-id"] ? h("a", { href: `#/jobs/${encodeURIComponent(item["job-id"])}` }, item["job-name"] ?? item["job-id"]) : "–";
  return [
    clock(when(item)),
    [job, item.problem ? h("span", { class: "bad line" }, item.problem) : null],
    item["taken-by"] ?? "–",
    bytes(item.size),
    (item.format ?? "").toLowerCase(),
    mark(item.verified),
    mark(item.drilled),
    code(item.location, "path"),
  ];
}

function line(job, item) {
  return [
    clock(item.latest_ack_timestamp > 0 ? item.latest_ack_timestamp : item.trigger_timestamp),
    h("a", { href: address(job.jid, item.id) }, job.name),
    duration(item.end_to_end_duration),
    bytes(item.state_size),
    (item.savepointFormat ?? "").toLowerCase(),
    [code(item.external_path ?? "", "path"), item.discarded ? " (deleted since)" : ""],
  ];
}

function completed(statistics) {
  const found = new Map(statistics.history.filter((item) => item.is_savepoint && item.status === "COMPLETED").map((item) => [item.id, item]));
  const latest = statistics.latest.savepoint;
  if (latest && !found.has(latest.id)) found.set(latest.id, latest);
  return [...found.values()];
}

async function ofJobs(jobs) {
  const histories = await inTurn(jobs, (job) => getIfAny(`jobs/${job.jid}/checkpoints`));
  const found = histories.flatMap((statistics, index) => (statistics ? completed(statistics).map((item) => [jobs[index], item]) : []));
  return found.sort(([, one], [, other]) => other.trigger_timestamp - one.trigger_timestamp);
}

async function listed(query, jobs) {
  const found = await catalogue(query);
  if (found) {
    return [
      found.unread.map(({ directory, problem }) => h("p", { class: "reason bad" }, code(directory, "path"), `: ${problem}`)),
      table("Savepoints", CATALOGUE, found.savepoints.map(catalogued), "The catalogue is empty."),
      h("p", { class: "note" }, "Those below ", found.directories.flatMap((directory, index) => [index ? ", " : "", code(directory, "path")])),
    ].flat();
  }
  return [
    table("Savepoints", COLUMNS, (await ofJobs(await jobs())).map(([job, item]) => line(job, item)), "No savepoint is known."),
    h("p", { class: "note" }, "These are the savepoints in the histories of jobs; earlier ones are in the directories that they were written to."),
  ];
}

export async function savepointsTab(job) {
  return listed(`?job=${encodeURIComponent(job.jid)}`, async () => [job]);
}

export async function savepointsPage() {
  const content = await listed("", async () => (await get("jobs/overview")).jobs);
  return { title: "Savepoints", interval: INTERVAL_MS, content: [h("h1", null, "Savepoints"), ...content] };
}
