// The views of adapters (with the queue) and of sessions.

import { json, part } from "./api.js";
import { el, number, pager, rank, showOnce, table, when } from "./dom.js";

const WHERE = {
  device: "in a slot on the device",
  host: "in the server's main memory",
  disk: "on disk until its next request",
  nowhere: "being created",
  parked: "parked as a checkpoint",
  failed: "could not be created",
};

export function adapters(place, _path, report) {
  const queue = el("section", { id: "queue" });
  const list = el("section", { id: "adapter-list" });
  place.append(queue, list);
  let offset = 0;

  async function refresh() {
    const [found, status] = await Promise.all([
      json(`api/v1/twinkle/adapters?limit=50&offset=${offset}`),
      json("api/v1/status"),
    ]);
    showOnce(queue, [status.models, found.queues], () => [
      el("h2", {}, "Queue"),
      ...Object.keys(found.queues).map((name) => model(name, found.queues[name], status.models[name])),
    ]);
    showOnce(list, found, () => [
      el("h2", {}, "Adapters"),
      table("adapters", ADAPTERS, found.adapters, "No adapters yet."),
      pager(found.cursor, (to) => {
        offset = to;
        refresh().catch(report);
      }),
    ]);
  }
  return { refresh };
}

// All numbers except the tenant's own are over all tenants. An unreachable model has an empty `status` or none.
function model(name, queue, status = {}) {
  const tiles = [
    ["your waiting ops", String(queue.own)],
    ["all waiting ops", String(queue.all)],
    ["your samples: queued / running", `${queue.queued_samples} / ${queue.running_samples}`],
    ["all samples: queued / running", known(status.queued_samples, (queued) => `${queued} / ${status.waiting_samples - queued}`)],
    ["oldest queued sample", known(status.oldest_sample_wait, (seconds) => `${seconds} s`)],
    ["trained by", known(status.mesh, String)],
    ["merge ratio", known(status.merge_ratio, number)],
    ["adapters of all tenants", known(status.adapters, String)],
    ["tokens trained", known(status.trained_tokens, (value) => value.toLocaleString())],
    ["tokens per second", known(status.training_tokens_per_second, number)],
  ];
  return el(
    "div",
    { class: "model" },
    el("h3", {}, name),
    el("dl", { class: "tiles" }, ...tiles.flatMap(([title, value]) => [el("div", {}, el("dt", {}, title), el("dd", {}, value))])),
  );
}

const known = (value, shown) => (value === undefined || value === null ? "–" : shown(value));

const ADAPTERS = [
  ["Name", (run) => run.name],
  ["Run", (run) => el("a", { href: `#runs/${part(run.training_run_id)}` }, run.training_run_id)],
  ["Where", (run) => el("span", { class: `badge ${run.where}`, title: WHERE[run.where] }, run.where)],
  ["", (run) => run.note ?? WHERE[run.where]],
  ["Waiting ops", (run) => String(run.queued_ops)],
  ["Rank", rank],
  ["Protocol", (run) => run.protocol],
];

export function sessions(place, _path, report) {
  const list = el("section", { id: "session-list" });
  place.append(list);
  let offset = 0;

  async function refresh() {
    const found = await json(`api/v1/twinkle/sessions?limit=50&offset=${offset}`);
    showOnce(list, found, () => [
      el("h2", {}, "Sessions"),
      table("sessions", SESSIONS, found.sessions, "No sessions yet."),
      pager(found.cursor, (to) => {
        offset = to;
        refresh().catch(report);
      }),
    ]);
  }
  return { refresh };
}

const SESSIONS = [
  ["Session", (session) => el("code", {}, session.session_id)],
  ["Name", (session) => session.display_name ?? ""],
  ["State", (session) => el("span", { class: `badge ${session.state}` }, session.state)],
  ["Created", (session) => when(session.created_at)],
  ["Last seen", (session) => when(session.last_seen)],
  ["Client", (session) => session.sdk_version],
  ["Runs", (session) => String(session.training_run_ids.length)],
  ["Samplers", (session) => String(session.sampler_ids.length)],
  ["Tags", (session) => session.tags.join(", ")],
];
