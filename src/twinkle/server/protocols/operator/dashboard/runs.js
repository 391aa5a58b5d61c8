// The list of runs, and the curves of the selected run, updated while it trains.

import { json, part, whoami } from "./api.js";
import { chart } from "./chart.js";
import { el, pager, rank, showOnce, table, when } from "./dom.js";

const FIRST = ["loss", "reward", "learning_rate", "grad_norm", "tokens"];

export function runs(place, [selected], report) {
  const list = el("section", { id: "run-list" });
  const detail = el("section", { id: "run-detail" });
  place.append(list, detail);
  const curves = selected === undefined ? null : new Curves(selected, detail);
  let offset = 0;

  async function refresh() {
    const found = await json(`api/v1/twinkle/adapters?limit=50&offset=${offset}`);
    const empty = found.adapters.length === 0 ? noRuns(await whoami()) : "";
    showOnce(list, [found, empty], () => [
      el("h2", {}, "Runs"),
      table("runs", COLUMNS, found.adapters, empty),
      pager(found.cursor, (to) => {
        offset = to;
        refresh().catch(report);
      }),
    ]);
    if (curves !== null) await curves.refresh();
    else if (found.adapters.length > 0) showOnce(detail, "none", () => [el("p", { class: "empty" }, "Select a run.")]);
  }
  return { refresh };
}

// Explains an empty list. On an open server a mistyped key is another tenant, whose list is empty, too.
function noRuns(who) {
  const tenant = who.tenant ?? who.tenant_id;
  if (who.auth_mode !== "open") return `No runs yet of tenant ${tenant}.`;
  const others = who.other_runs === 0 ? "" : ` Other keys have ${who.other_runs} ${who.other_runs === 1 ? "run" : "runs"} here: if one is yours, choose Forget key and enter the key that your script uses.`;
  return `No runs yet of tenant ${tenant}. This server is open: it accepts any key, and each key is a tenant of its own.${others}`;
}

const COLUMNS = [
  ["Name", (run) => run.name],
  ["Run", (run) => el("a", { href: `#runs/${part(run.training_run_id)}` }, run.training_run_id)],
  ["Base model", (run) => run.base_model],
  ["Rank", rank],
  ["Where", (run) => el("span", { class: `badge ${run.where}` }, run.where)],
  ["Last request", (run) => when(run.last_request_at)],
];

class Curves {
  constructor(runId, place) {
    this.path = `api/v1/twinkle/training_runs/${part(runId)}`;
    this.place = place;
    this.since = 0;
    this.asking = false;
    this.series = new Map(); // "server loss" → {name, source, points}
    this.about = el("div");
    this.charts = el("div", { class: "charts", id: "charts" });
    place.append(el("h2", {}, runId), this.about, this.charts);
  }

  async refresh() {
    if (this.asking) return; // two requests at once would add points twice
    this.asking = true;
    await this.ask().finally(() => {
      this.asking = false;
    });
  }

  async ask() {
    const run = await json(this.path);
    showOnce(this.about, run, () => [about(run)]);
    let answer;
    do {
      answer = await json(`${this.path}/metrics?since=${this.since}`);
      answer.points.forEach((point) => this.add(point));
      this.since = answer.next;
    } while (answer.more);
    const shown = [...this.series.values()].sort(byImportance);
    showOnce(this.charts, [this.since], () => shown.map((each) => chart(each.name, each.points, each.source)));
    if (shown.length === 0) this.charts.replaceChildren(el("p", { class: "empty" }, "No optimizer steps yet."));
  }

  add({ source, step, values }) {
    for (const [name, value] of Object.entries(values)) {
      const id = `${source} ${name}`;
      if (!this.series.has(id)) this.series.set(id, { name, source, points: [] });
      const { points } = this.series.get(id);
      points.push([step, value]);
      // Clients may log steps in any order, but the line must go from left to right.
      if (points.length > 1 && points[points.length - 2][0] > step) points.sort(([a], [b]) => a - b);
    }
  }
}

function byImportance(a, b) {
  const rank = ({ name }) => (FIRST.includes(name) ? FIRST.indexOf(name) : 1.5); // other curves follow the reward
  return rank(a) - rank(b) || a.name.localeCompare(b.name) || b.source.localeCompare(a.source);
}

function about(run) {
  const facts = [["Base model", run.base_model], ["LoRA rank", rank(run)], ...Object.entries(run.user_metadata ?? {})];
  return el("dl", {}, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]));
}
