// Requests to the REST API, which is one folder above these pages on every server.

const ROOT = new URL("../", document.baseURI);
const TIMEOUT_MS = 20000;
/** Flink names the class of an exception in front of its message. */
const CLASS = /^(?:[\w$]+\.)+[\w$]+: /;

/** How far the server's clock is ahead of this one. */
let ahead = 0;

export function serverNow() {
  return Date.now() + ahead;
}

export class ApiError extends Error {
  constructor(status, lines, needsLogin) {
    super(lines.join("\n"));
    this.status = status;
    this.needsLogin = needsLogin;
  }
}

async function failure(response) {
  let lines = [`The answer was ${response.status}.`];
  try {
    const body = await response.json();
    if (Array.isArray(body.errors)) lines = body.errors.map((text) => String(text).split("\n")[0].replace(CLASS, ""));
    else if (typeof body.detail === "string") lines = [body.detail];
  } catch {
    // not JSON: the message has only the status
  }
  const asks = response.headers.get("www-authenticate") ?? "";
  return new ApiError(response.status, lines, response.status === 401 && asks.includes('realm="ckpt"'));
}

async function answer(path, type) {
  const response = await fetch(new URL(path, ROOT), {
    headers: { Accept: type },
    credentials: "same-origin",
    cache: "no-store",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!response.ok) throw await failure(response);
  return response;
}

/** The text at `path`, such as a log. Throws as `get`. */
export async function getText(path) {
  return (await answer(path, "text/plain")).text();
}

/** The document at `path`. Throws ApiError for an answer that is an error, TypeError when the server does not answer. */
export async function get(path) {
  const document = await (await answer(path, "application/json")).json();
  if (typeof document.now === "number") ahead = document.now - Date.now();
  return document;
}

/** As get, but null where there is no such thing: a Flink cluster has less, a later version may have more. */
export async function getIfAny(path) {
  try {
    return await get(path);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}

/** What `ask` gives for each of these, in their order; at most `limit` are asked for at a time. */
export async function inTurn(items, ask, limit = 8) {
  const found = [];
  let next = 0;
  async function work() {
    while (next < items.length) {
      const index = next++;
      found[index] = await ask(items[index]);
    }
  }
  await Promise.all(Array.from({ length: Math.min(limit, items.length) }, work));
  return found;
}

async function post(name, body) {
  const response = await fetch(new URL(name, document.baseURI), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    credentials: "same-origin",
    body: JSON.stringify(body),
  });
  if (!response.ok) throw await failure(response);
}

export const login = (token) => post("login", { token });
export const logout = () => post("logout", {});

/** Whether there is a `login` to end, and whether the server shows its `processes`. */
export async function session() {
  try {
    return (await getIfAny("web/session")) ?? {};
  } catch {
    return {};
  }
}
