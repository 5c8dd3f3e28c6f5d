// All jobs of the session, those that need attention first.

import { get, getIfAny, inTurn, serverNow } from "./api.js";
import { badge, h, table, tile } from "./dom.js";
import { clock, duration, percent } from "./format.js";

const ENDED = new Set(["FINISHED", "CANCELED", "FAILED"]);
const ORDER = { UNHEALTHY: 0, DEGRADED: 2, HEALTHY: 4 };

/** A job that has failed needs attention until a later job has its name. */
function rank(job, isReplaced) {
  if (job.state === "FAILED") return isReplaced(job) ? 5 : 1;
  if (ENDED.has(job.state)) return 5;
  return ORDER[job.health?.verdict] ?? 3;
}

/** A restore drill has the name of its job, and replaces nothing. */
function replaced(jobs) {
  const latest = new Map();
  for (const job of jobs) if (!job.drill) latest.set(job.name, Math.max(latest.get(job.name) ?? 0, job["start-time"]));
  return (job) => job["start-time"] < (latest.get(job.name) ?? 0);
}

function line(job) {
  const ended = ENDED.has(job.state);
  const checkpoints = job.health?.checkpoints;
  const age = checkpoints?.["last-completed-age"];
  const health = job.health;
  return [
    [h("a", { class: "name", href: `#/jobs/${job.jid}` }, job.name), h("code", { class: "id" }, job.jid)],
    badge(job.state),
    health ? [ended ? null : badge(health.verdict), (health.reasons ?? []).map((text) => h("small", { class: "reason" }, text))] : "–",
    ended || age === undefined || age === null ? "–" : `${duration(age)} ago`,
    ended || !checkpoints ? "–" : percent(checkpoints["success-rate"]),
    clock(job["start-time"]),
    duration(ended ? job.duration : serverNow() - job["start-time"]),
  ];
}

const COLUMNS = [
  ["Job", "grow"], ["State", ""], ["Health", ""], ["Last checkpoint", "number"], ["Successful", "number wide"],
  ["Started", "wide"], ["For", "number wide"],
];

export async function jobsPage() {
  const [overview, { jobs }] = await Promise.all([get("overview"), get("jobs/overview")]);
  const isReplaced = replaced(jobs);
  const judged = jobs.filter((job) => !ENDED.has(job.state) || (job.state === "FAILED" && !isReplaced(job)));
  await inTurn(judged, async (job) => { job.health = await getIfAny(`jobs/${job.jid}/health`); });
  jobs.sort((one, other) => rank(one, isReplaced) - rank(other, isReplaced) || other["start-time"] - one["start-time"]);
  const failed = overview["jobs-failed"];
  return {
    title: "Jobs",
    content: [
      h("h1", null, "Jobs"),
      h(
        "dl",
        { class: "tiles" },
        tile("Running", String(overview["jobs-running"])),
        tile("Failed", String(failed), null, failed ? "bad" : ""),
        tile("Finished, canceled", String(overview["jobs-finished"] + overview["jobs-cancelled"])),
        tile("Free slots", `${overview["slots-available"]} of ${overview["slots-total"]}`),
        tile("Version", overview["ckpt-version"] ?? overview["flink-version"]),
      ),
      table("Jobs", COLUMNS, jobs.map(line), "No job has been submitted to this session."),
    ],
  };
}
