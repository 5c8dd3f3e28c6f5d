// A process: the stacks of its threads, the end of its log, and the functions in which the subtasks of a vertex spend their time.

import { get, getText } from "./api.js";
import { h, s, table } from "./dom.js";
import { bytes, clock, percent } from "./format.js";

const SLOW_MS = 15000;
const DRIVER = "driver";
const ROW = 18;
const WIDTH = 1000;

const pathOf = (id) => (id === DRIVER ? "jobmanager" : `taskmanagers/${encodeURIComponent(id)}`);
const nameOf = (id) => (id === DRIVER ? "the driver" : `task manager ${id}`);

function textPage(title, way, text) {
  return {
    title,
    interval: SLOW_MS,
    content: [h("p", { class: "way" }, way), h("h1", null, title), h("pre", { class: "dump", tabindex: 0 }, text || "It is empty.")],
  };
}

const otherView = (id, view, title) => [h("a", { href: "#/" }, "Jobs"), " / ", h("a", { href: `#/processes/${id}/${view}` }, title)];

export async function threadsPage(id) {
  const { threadInfos } = await get(`${pathOf(id)}/thread-dump`);
  const text = threadInfos.map((thread) => thread.stringifiedThreadInfo).join("\n");
  return textPage(`Threads of ${nameOf(id)}`, otherView(id, "log", "Log"), text);
}

export async function logPage(id) {
  return textPage(`Log of ${nameOf(id)}`, otherView(id, "threads", "Threads"), await getText(`${pathOf(id)}/log`));
}

export async function endedLogPage(file) {
  const text = await getText(`jobmanager/logs/${encodeURIComponent(file)}`);
  return textPage(file, [h("a", { href: "#/" }, "Jobs")], text);
}

/** The processes of a session with links to what they do; null where the server shows none, as in Airflow. */
export function processes(managers, logs) {
  if (!managers) return null;
  const links = (id) => [h("a", { href: `#/processes/${id}/threads` }, "Threads"), " · ", h("a", { href: `#/processes/${id}/log` }, "Log")];
  const rows = [["Driver", "–", links(DRIVER)], ...managers.taskmanagers.map((one) => [`Task manager ${one.id}`, one.path, links(one.id)])];
  const ended = (logs?.logs ?? []).filter((log) => log.name.startsWith("worker-"));
  return [
    h("h2", null, "Processes"),
    table("Processes", [["Process", "grow"], ["Address", ""], ["More", ""]], rows, ""),
    ended.length ? [
      h("h2", null, "Logs of workers that ended unexpectedly"),
      table("Ended workers", [["Log", "grow"], ["Ended", ""], ["Size", "number"]], ended.map((log) => [
        h("a", { href: `#/logs/${encodeURIComponent(log.name)}` }, log.name), clock(log.mtime), bytes(log.size),
      ]), ""),
    ] : null,
  ];
}

/** Each function below its caller, as wide as its share of the samples. */
function flames(root) {
  const boxes = [];
  let depth = 0;
  function place(node, from, level) {
    const wide = (node.value / root.value) * WIDTH;
    if (wide < 1) return;
    depth = Math.max(depth, level + 1);
    const text = `${node.name} (${percent(node.value / root.value)})`;
    boxes.push(s(
      "g",
      { class: `flame f${level % 4}` },
      s("title", null, text),
      s("rect", { x: from, y: level * ROW, width: wide, height: ROW - 1 }),
      wide > 60 ? s("text", { x: from + 3, y: level * ROW + 13 }, text.slice(0, Math.floor(wide / 7))) : null,
    ));
    let at = from;
    for (const child of node.children) {
      place(child, at, level + 1);
      at += (child.value / root.value) * WIDTH;
    }
  }
  place(root, 0, 0);
  return s("svg", { class: "flames", viewBox: `0 0 ${WIDTH} ${depth * ROW}`, role: "img", "aria-label": "Flame graph" }, boxes);
}

export async function flameGraphPage(jobId, vertexId) {
  const [vertex, graph] = await Promise.all([
    get(`jobs/${jobId}/vertices/${vertexId}`), get(`jobs/${jobId}/vertices/${vertexId}/flamegraph`),
  ]);
  const title = `Flame graph of ${vertex.name}`;
  return {
    title,
    interval: SLOW_MS,
    content: [
      h("p", { class: "way" }, h("a", { href: "#/" }, "Jobs"), " / ", h("a", { href: `#/jobs/${jobId}/health` }, h("code", { class: "id" }, jobId))),
      h("h1", null, title),
      h("p", { class: "note" }, "The functions on the stacks of the subtasks' threads, sampled for two seconds; each is drawn below its caller."),
      graph.data?.value ? flames(graph.data) : h("p", { class: "empty" }, "None of its subtasks runs."),
    ],
  };
}
