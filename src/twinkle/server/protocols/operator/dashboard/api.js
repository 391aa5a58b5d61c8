// The same API as everyone's, with the user's key, which lives in this tab's sessionStorage and nowhere else.

const ROOT = new URL("../", import.meta.url);
const KEY = "twinkle-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const part = encodeURIComponent;

// The response, of a request that succeeded. `path` is relative to the server's root.
export async function request(path, { method = "GET", body, signal } = {}) {
  // The second header says that any key will do where the server issues none, on routes of every protocol.
  const headers = { "X-API-Key": key.get(), "Twinkle-Authorization": `Bearer ${key.get()}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const content = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(new URL(path, ROOT), { method, headers, body: content, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

export async function json(path, options) {
  return (await request(path, options)).json();
}

async function reason(response) {
  const text = await response.text();
  try {
    const content = JSON.parse(text);
    return content.detail ?? content.error?.message ?? text;
  } catch {
    return text.slice(0, 500) || `The server answered ${response.status}.`;
  }
}

// A response of server-sent events, one parsed JSON body at a time.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
