// Requests to the server's public API with the user's key. The key is stored only in this tab's sessionStorage.

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

// Returns the response; throws an ApiError if the request failed. `path` is relative to the server's root.
export async function request(path, { method = "GET", body, signal } = {}) {
  // With the second header, a server in auth.mode open accepts any key, on the routes of every protocol.
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

// Returns who the key is to this server: tenant, key, auth_mode, and how many runs other tenants of an open server have.
export const whoami = () => json("api/v1/twinkle/whoami");

async function reason(response) {
  const text = await response.text();
  try {
    const content = JSON.parse(text);
    return content.detail ?? content.error?.message ?? text;
  } catch {
    return text.slice(0, 500) || `The server answered ${response.status}.`;
  }
}

// Yields the parsed JSON body of each server-sent event of a response, and { comment } for a comment, which says why the
// request waits.
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
      if (block.startsWith(": ")) {
        yield { comment: block.slice(2) };
        continue;
      }
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
