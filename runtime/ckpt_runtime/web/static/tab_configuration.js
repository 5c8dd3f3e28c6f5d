// A job's configuration: the effective values, and the origin of each.

import { get } from "./api.js";
import { code, h, table } from "./dom.js";
import { clock } from "./format.js";

const ORIGINS = {
  override: "override of checkpoint settings", change: "changed while it ran", submission: "given at submission",
  pipeline: "set by the pipeline", cluster: "the cluster's", default: "default",
};
const COLUMNS = [["Option", "grow"], ["Value", "grow"], ["Origin", ""]];

function line(option) {
  return [
    code(option.key),
    option.value === null || option.value === "" ? h("span", { class: "none" }, "not set") : code(option.value, "path"),
    ORIGINS[option.origin] ?? option.origin,
  ];
}

function changes(configuration) {
  const known = configuration.changes ?? [];
  if (known.length === 0) return null;
  const columns = [["Version", "number"], ["When", ""], ["By", ""], ["Options", "grow"]];
  const rows = [...known].reverse().map((change) => [
    String(change.version), clock(change.timestamp), change.by, change.options.map((key) => code(key, "line")),
  ]);
  return [h("h2", null, "Changes"), table("Changes", columns, rows, "")];
}

export async function configurationTab(job) {
  const configuration = await get(`jobs/${job.jid}/config`);
  const given = Object.entries(configuration.configuration ?? {}).map(([key, value]) => ({ key, value, origin: "submission" }));
  const effective = configuration.effective ?? given;
  const own = effective.filter((option) => option.origin !== "default");
  const rest = effective.filter((option) => option.origin === "default");
  const waits = configuration.version !== configuration["running-version"];
  return [
    h("p", { class: "note" }, configuration.version ? `Version ${configuration.version}` : "", waits ? `; the tasks still run with version ${configuration["running-version"]}` : ""),
    table("Options that are set", COLUMNS, own.map(line), "None is set."),
    rest.length ? h("details", { "data-key": "defaults" }, h("summary", null, `${rest.length} options have their default`), table("Defaults", COLUMNS, rest.map(line), "")) : null,
    changes(configuration),
  ];
}
