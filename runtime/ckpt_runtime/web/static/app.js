// The frame around the pages: which one is shown, how often it is refreshed, and what happens when the session does not answer.

import { ApiError, logout, session } from "./api.js";
import { h } from "./dom.js";
import { clock } from "./format.js";
import { loginForm } from "./login.js";
import { checkpointPage } from "./page_checkpoint.js";
import { jobPage } from "./page_job.js";
import { jobsPage } from "./page_jobs.js";
import { endedLogPage, flameGraphPage, logPage, threadsPage } from "./page_process.js";
import { savepointsPage } from "./page_savepoints.js";

const INTERVAL_MS = 3000;
const SLOWEST_MS = 20000;
const ID = "([0-9a-fA-F]{32})";
const ONE_ID = new RegExp(`^${ID}$`);
const ROUTES = [
  [/^\/?$/, jobsPage],
  [/^\/savepoints$/, savepointsPage],
  [new RegExp(`^/jobs/${ID}(?:/(checkpoints|savepoints|configuration|health))?$`), jobPage],
  [new RegExp(`^/jobs/${ID}/checkpoints/([0-9]{1,19})$`), checkpointPage],
  [new RegExp(`^/jobs/${ID}/vertices/${ID}/flamegraph$`), flameGraphPage],
  [/^\/processes\/([\w.-]+)\/threads$/, threadsPage],
  [/^\/processes\/([\w.-]+)\/log$/, logPage],
  [/^\/logs\/([\w.-]+)$/, endedLogPage],
];

const bar = document.getElementById("bar");
const main = document.getElementById("page");
const notice = document.getElementById("notice");
const foot = document.getElementById("foot");
const logoutButton = document.getElementById("logout");

let timer = 0;
let round = 0;
let failures = 0;
let lastAnswer = 0;
let shown = "";
let pace = INTERVAL_MS;
let pressed = false;

function route() {
  const path = location.hash.slice(1) || "/";
  for (const [pattern, page] of ROUTES) {
    const found = pattern.exec(path);
    if (found) return { path, load: () => page(...found.slice(1).map((part) => (ONE_ID.test(part) ? part.toLowerCase() : part))) };
  }
  const nothing = { title: "Not found", content: [h("h1", null, "There is no such page"), h("a", { href: "#/" }, "All jobs")] };
  return { path, load: async () => nothing };
}

function say(text, kind) {
  notice.hidden = !text;
  notice.className = kind ?? "";
  if (notice.textContent !== text) notice.textContent = text;
}

/** Keeps what a reader has opened, and where the keyboard is. */
function replace(content) {
  const open = new Set([...main.querySelectorAll("details[open]")].map((details) => details.dataset.key));
  const focused = main.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  main.replaceChildren(...content);
  for (const details of main.querySelectorAll("details")) details.open ||= open.has(details.dataset.key);
  if (focused) [...main.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
}

/** A reader who selects text to copy it does not want it replaced. */
function isSelecting() {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && main.contains(selection.anchorNode);
}

/** A link that is replaced between press and release is not clicked. */
main.addEventListener("pointerdown", () => { pressed = true; });
for (const end of ["pointerup", "pointercancel", "contextmenu", "blur"]) addEventListener(end, () => { pressed = false; });

function markPlace(path) {
  for (const link of bar.querySelectorAll("nav a")) {
    const here = link.hash === "#/savepoints" ? path === "/savepoints" : path !== "/savepoints";
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  const mine = ++round;
  const { path, load } = route();
  if (path !== shown) main.setAttribute("aria-busy", "true");
  try {
    const page = await load();
    if (mine !== round) return;
    failures = 0;
    pace = page.interval ?? INTERVAL_MS;
    lastAnswer = Date.now();
    say("");
    if (path !== shown || !(pressed || isSelecting())) replace(page.content);
    document.title = `${page.title} · ckpt`;
    foot.textContent = `As of ${clock(lastAnswer)}`;
    if (path !== shown) {
      scrollTo(0, 0);
      if (shown) main.focus({ preventScroll: true });
    }
    shown = path;
    main.dataset.path = path;
    markPlace(path);
  } catch (error) {
    if (mine !== round) return;
    if (failed(error)) return;
  } finally {
    if (mine === round) main.removeAttribute("aria-busy");
  }
  timer = setTimeout(refresh, Math.min(pace * 2 ** Math.min(failures, 3), SLOWEST_MS));
}

/** True when asking again would not help. */
function failed(error) {
  if (error instanceof ApiError && error.needsLogin) {
    say("");
    shown = "";
    logoutButton.hidden = true;
    replace([loginForm(() => { showSession(); refresh(); })]);
    return true;
  }
  failures += 1;
  if (error instanceof ApiError) {
    say(error.message, "bad");
    if (error.status === 404) {
      replace([h("h1", null, "Not found"), h("p", null, error.message), h("a", { href: "#/" }, "All jobs")]);
      shown = "";
    }
  } else {
    const since = lastAnswer ? ` The page shows the data of ${clock(lastAnswer)}.` : "";
    say(`The session does not answer.${since} Trying again.`, "bad");
  }
  return false;
}

async function showSession() {
  const { login } = await session();
  logoutButton.hidden = login !== true;
}

logoutButton.addEventListener("click", async () => {
  try {
    await logout();
  } catch {
    say("The session does not answer: you are still logged in.", "bad");
    return;
  }
  refresh();
});
addEventListener("hashchange", () => { failures = 0; refresh(); });
document.addEventListener("visibilitychange", refresh);
let resized = 0;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(refresh, 200); });
refresh();
showSession();
