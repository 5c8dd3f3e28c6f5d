// One job: its header, and the tab below it.

import { get, getIfAny, serverNow } from "./api.js";
import { badge, h } from "./dom.js";
import { clock, duration } from "./format.js";
import { checkpointsTab } from "./tab_checkpoints.js";
import { configurationTab } from "./tab_configuration.js";
import { healthTab } from "./tab_health.js";
import { savepointsTab } from "./page_savepoints.js";

const TABS = {
  checkpoints: ["Checkpoints", checkpointsTab],
  savepoints: ["Savepoints", savepointsTab],
  configuration: ["Configuration", configurationTab],
  health: ["Health", healthTab],
};

export const ENDED = new Set(["FINISHED", "CANCELED", "FAILED"]);

export function jobHead(job, health, tab) {
  const ended = ENDED.has(job.state);
  const running = ended ? job.duration : serverNow() - job["start-time"];
  const tabs = Object.entries(TABS).map(([name, [title]]) =>
    h("a", { href: `#/jobs/${job.jid}/${name}`, "aria-current": name === tab ? "page" : null }, title));
  return [
    h("p", { class: "way" }, h("a", { href: "#/" }, "Jobs"), " / ", h("code", { class: "id" }, job.jid)),
    h("h1", null, job.name, " ", badge(job.state), " ", health && !ended ? badge(health.verdict) : null),
    h(
      "p",
      { class: "note" },
      `Since ${clock(job["start-time"])}, for ${duration(running)}`,
      health?.restarts ? `, restarted ${health.restarts === 1 ? "once" : `${health.restarts} times`}` : "",
    ),
    health && !ended ? (health.reasons ?? []).map((reason) => h("p", { class: "reason" }, reason)) : null,
    h("nav", { class: "tabs", "aria-label": "About this job" }, tabs),
  ].flat().filter(Boolean);
}

export async function jobPage(jobId, tab = "checkpoints") {
  const [job, health] = await Promise.all([get(`jobs/${jobId}`), getIfAny(`jobs/${jobId}/health`)]);
  const [title, load] = TABS[tab];
  return {
    title: `${job.name}: ${title.toLowerCase()}`,
    interval: tab === "savepoints" ? 15000 : undefined,
    content: [...jobHead(job, health, tab), h("section", null, await load(job, health))],
  };
}
