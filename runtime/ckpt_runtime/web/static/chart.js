// Two drawings: bars over checkpoints, and the progress of a checkpoint in each subtask. style.css has the colours.

import { s } from "./dom.js";
import { ticks } from "./format.js";

const HEIGHT = 150;
const TOP = 10;
const BOTTOM = 22;
const LEFT = 62;

export function width(narrowest) {
  return Math.max(narrowest, Math.min(document.getElementById("page").clientWidth - 2, 1100));
}

function axis(steps, y, wide, label) {
  return steps.map((step) => [
    s("line", { class: "grid", x1: LEFT, x2: wide, y1: y(step), y2: y(step) }),
    s("text", { class: "tick", x: LEFT - 6, y: y(step) + 4, "text-anchor": "end" }, label(step)),
  ]);
}

/**
 * Bars over items {id, href, title, kind, value, behind}, oldest first. `behind` is drawn in a paler colour, behind `value`.
 */
export function bars(name, items, base, label, wide) {
  const greatest = Math.max(1, ...items.map((item) => Math.max(item.value, item.behind ?? 0)));
  const steps = ticks(greatest, base);
  const top = steps[steps.length - 1];
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.max(0, value) / top);
  const step = (wide - LEFT) / Math.max(items.length, 8);
  const thick = Math.max(1, Math.min(28, step * 0.7));
  const every = Math.ceil(44 / step);
  const drawn = items.map((item, index) => {
    const x = LEFT + step * index + (step - thick) / 2;
    const bar = (value, kind) => s("rect", {
      class: `bar ${kind}`, x, width: thick, y: Math.min(y(value), HEIGHT - BOTTOM - 1), height: Math.max(1, HEIGHT - BOTTOM - y(value)),
    });
    const number = index % every === 0
      ? s("text", { class: "tick", x: x + thick / 2, y: HEIGHT - 6, "text-anchor": "middle" }, String(item.id))
      : null;
    return s(
      "a",
      { href: item.href, "aria-label": item.title },
      s("title", null, item.title),
      s("rect", { class: "touch", x: LEFT + step * index, width: step, y: 0, height: HEIGHT }),
      item.behind > item.value ? bar(item.behind, `${item.kind} pale`) : null,
      bar(item.value, item.kind),
      number,
    );
  });
  return s(
    "svg",
    { class: "chart", width: wide, height: HEIGHT, viewBox: `0 0 ${wide} ${HEIGHT}`, role: "group", "aria-label": name },
    axis(steps, y, wide, label),
    drawn,
  );
}

const ROW = 18;

/**
 * One line for each of `rows` {label, title, parts: [{kind, from, to}], note}, on one scale of time up to `end`.
 */
export function lanes(name, rows, end, label, wide) {
  const left = 44;
  const steps = ticks(Math.max(1, end), "time");
  const top = Math.max(end, 1) * 1.02;
  const x = (value) => left + (wide - left - 8) * Math.min(1, Math.max(0, value) / top);
  const height = 20 + rows.length * ROW + 4;
  const fitting = steps.filter((step) => step <= top);
  const grid = fitting.map((step, index) => [
    s("line", { class: "grid", x1: x(step), x2: x(step), y1: 16, y2: height }),
    x(step) < wide - 40 || index === 0 ? s("text", { class: "tick", x: x(step), y: 11, "text-anchor": index === 0 ? "start" : "middle" }, label(step)) : null,
  ]);
  const drawn = rows.map((row, index) => {
    const y = 20 + index * ROW;
    return s(
      "g",
      null,
      s("title", null, row.title),
      s("rect", { class: "touch", x: 0, width: wide, y, height: ROW }),
      s("text", { class: "tick", x: left - 8, y: y + 13, "text-anchor": "end" }, row.label),
      row.parts.map((part) => s("rect", {
        class: `part ${part.kind}`, x: x(part.from), y: y + 3, height: ROW - 6, width: Math.max(1, x(part.to) - x(part.from)),
      })),
      row.note ? s("text", { class: "tick", x: left + 4, y: y + 13 }, row.note) : null,
    );
  });
  return s(
    "svg",
    { class: "chart", width: wide, height, viewBox: `0 0 ${wide} ${height}`, role: "img", "aria-label": name },
    grid,
    drawn,
  );
}
