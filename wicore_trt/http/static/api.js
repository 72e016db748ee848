// Requests to the server that gave this page: the key, errors, events. Knows nothing of what is shown.
// The key is kept in sessionStorage alone: it ends with the tab.

const KEY = "wicore-key";
let memory = "";  // where storage is off

export function key() {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return memory; }
}

export function setKey(value) {
  memory = value;
  try { value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY); } catch { /* kept in memory */ }
}

export class ApiError extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.authorization = `Bearer ${key()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  let message = `The server answered ${answer.status}.`;
  try { message = (await answer.json()).error.message || message; } catch { /* no body of ours */ }
  throw new ApiError(answer.status, message, Number(answer.headers.get("retry-after")) || 0);
}

export async function get(path) {
  return (await call(path, { signal: AbortSignal.timeout(10000) })).json();
}

// The data of each event of a streamed answer. A stream that breaks, or ends without [DONE], throws.
export async function* events(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const answer = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let kind = "", data = "";
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data === "[DONE]") return;
      if (kind === "error") throw new ApiError(500, JSON.parse(data).error.message);
      if (data) yield JSON.parse(data);
    }
  }
}
