// Making elements. Text always becomes a text node: no code of these pages parses markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

/** An HTML element: h("p", {class: "note"}, "text", otherElement, [more]). */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function s(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** A table inside a box that scrolls sideways. A column is [title, class]; a row is a list of cells. */
export function table(caption, columns, rows, empty) {
  if (rows.length === 0) return h("p", { class: "empty" }, empty);
  const heads = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const lines = rows.map((cells) => h("tr", null, cells.map((cell, index) => h("td", { class: columns[index][1] }, cell))));
  return h(
    "div",
    { class: "scroll" },
    h("table", { "aria-label": caption }, h("thead", null, h("tr", null, heads)), h("tbody", null, lines)),
  );
}

/** A figure with its name under it. */
export function tile(name, value, note, kind) {
  return h(
    "div",
    { class: `tile ${kind ?? ""}` },
    h("dt", null, name),
    h("dd", null, value, note ? h("small", null, note) : null),
  );
}

const KINDS = {
  RUNNING: "good", HEALTHY: "good", COMPLETED: "good", passed: "good", FINISHED: "calm", CANCELED: "calm", IN_PROGRESS: "busy",
  DEGRADED: "warn", UNHEALTHY: "bad", FAILED: "bad", FAILING: "bad", RESTARTING: "warn", SUSPENDED: "warn",
};

/** A state in words and colour. */
export function badge(state) {
  const text = String(state);
  return h("span", { class: `badge ${KINDS[text] ?? "calm"}` }, text.replaceAll("_", " ").toLowerCase());
}

/** A key or a path in fixed width, which breaks where its parts end. */
export function code(text, kind) {
  const parts = String(text).split(/(?<=[./])(?=[^./])/);
  return h("code", { class: kind ?? null }, parts.map((part, index) => (index === 0 ? part : [h("wbr"), part])));
}
