// Selects the view, asks for the API key, and polls the server.

import { ApiError, json, key, whoami } from "./api.js";
import { checkpoints } from "./checkpoints.js";
import { adapters, sessions } from "./overview.js";
import { playground } from "./playground.js";
import { runs } from "./runs.js";

// A view fills an element and returns {refresh}, optionally with `every` (milliseconds) and a `leave` callback.
const VIEWS = { runs, adapters, sessions, checkpoints, playground };
const EVERY = 2_000;
const SLOWEST = 15_000;

const byId = (id) => document.getElementById(id);
let current = null; // {refresh, every, leave}
let timer = null;
let failures = 0;

// Shows who the key is to this server: its tenant by name or id, and whether the server checks keys at all.
async function showWho() {
  const who = byId("who");
  const known = await whoami();
  const tenant = known.tenant ?? known.tenant_id;
  const isOpen = known.auth_mode === "open";
  who.textContent = isOpen ? `${tenant} · open server` : `${tenant} · key ${known.key_name || known.key_id || "by token"}`;
  const how = isOpen
    ? "This server accepts any key, and each key is a tenant of its own."
    : `You are this tenant by the key ${known.key_id}.`;
  who.title = `Tenant ${known.tenant_id}. ${how} This page shows only what belongs to this tenant. A key never makes you an operator: operators use the commands of twinkle-server on the server's machine.`;
  who.hidden = false;
}

function show() {
  current?.leave?.();
  current = null;
  clearTimeout(timer);
  const known = key.get() !== null;
  byId("key-form").hidden = known;
  byId("views").hidden = !known;
  byId("forget-key").hidden = !known;
  byId("who").hidden = true;
  byId("view").replaceChildren();
  if (!known) {
    byId("key").focus();
    return;
  }
  const [name, ...path] = location.hash.slice(1).split("/").map(decodeURIComponent);
  const chosen = Object.hasOwn(VIEWS, name) ? name : "runs";
  for (const link of byId("views").children) link.classList.toggle("chosen", link.hash === `#${chosen}`);
  showWho().catch(report);
  const view = VIEWS[chosen](byId("view"), path, report);
  current = view;
  failures = 0;
  poll(view);
}

// Requests run one at a time: more slowly while they fail, and not at all while the tab is hidden.
async function poll(view) {
  clearTimeout(timer);
  try {
    await view.refresh();
    if (view === current) forgive();
  } catch (error) {
    if (view === current) report(error);
  }
  if (view !== current || document.hidden) return;
  timer = setTimeout(() => poll(view), Math.min((view.every ?? EVERY) * 2 ** failures, SLOWEST));
}

function report(error) {
  if (!(error instanceof ApiError)) console.error(error);
  failures += 1;
  if (error.status === 401) {
    key.forget();
    show();
  }
  const problem = byId("problem");
  problem.textContent = error.message;
  problem.hidden = false;
}

function forgive() {
  failures = 0;
  byId("problem").hidden = true;
}

byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key").value = "";
  try {
    await json("api/v1/get_server_capabilities");
    forgive();
    show();
  } catch (error) {
    key.forget();
    report(error);
  }
});

byId("forget-key").addEventListener("click", () => {
  key.forget();
  forgive();
  show();
});

window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && current !== null) poll(current);
});
show();
