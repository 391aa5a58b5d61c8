// Sends the same prompt to the base model and to a checkpoint or live run, and shows both conversations side by side.

import { events, json, part, request } from "./api.js";
import { el, showOnce } from "./dom.js";
import { Pictures, shown } from "./pictures.js";

export function playground(place, [wanted], report) {
  const models = el("select", { id: "model" });
  const prompt = el("textarea", { id: "prompt", rows: 3, placeholder: "Say something", required: "" });
  const temperature = el("input", { id: "temperature", type: "number", min: 0, max: 2, step: 0.1, value: "0.7" });
  const tokens = el("input", { id: "max-tokens", type: "number", min: 1, max: 4096, value: "128" });
  const send = el("button", { id: "send", type: "submit" }, "Send");
  const stop = el("button", { id: "stop", type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const clear = el("button", { id: "clear", type: "button", onclick: () => columns.forEach((column) => column.clear()) }, "Clear");
  const columns = [new Conversation("base", "Base model"), new Conversation("tuned", "Checkpoint")];
  let running = null;

  const form = el(
    "form",
    { id: "chat" },
    el("label", {}, "Checkpoint or run", models),
    el("label", {}, "Temperature", temperature),
    el("label", {}, "Max tokens", tokens),
    el("label", { class: "wide" }, "Prompt", prompt),
  );
  const pictures = new Pictures(form);
  form.append(pictures.list, el("p", { class: "actions" }, send, stop, clear, ...pictures.place));
  place.append(el("h2", {}, "Playground"), form, el("div", { class: "columns" }, ...columns.map((each) => each.place)));

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const options = {
      temperature: Number(temperature.value),
      max_tokens: Number(tokens.value),
      signal: running.signal,
    };
    const text = prompt.value;
    const seen = pictures.take();
    await Promise.all(columns.map((column) => column.ask(text, seen, options)));
    send.disabled = false;
    stop.disabled = true;
  });

  models.addEventListener("change", () => choose().catch(report));

  async function choose() {
    const chosen = models.selectedOptions[0];
    columns.forEach((column) => column.clear());
    columns[1].model = chosen?.value ?? null;
    const run = chosen === undefined ? null : await json(`api/v1/twinkle/training_runs/${part(chosen.dataset.run)}`);
    columns[0].model = run?.base_model ?? (await json("api/v1/get_server_capabilities")).supported_models[0]?.model_name ?? null;
    columns.forEach((column) => column.name());
  }

  async function load() {
    const [saved, live] = await Promise.all([
      json("api/v1/checkpoints?limit=1000"),
      json("api/v1/twinkle/adapters?limit=1000"),
    ]);
    const options = [
      ...saved.checkpoints
        .filter((each) => each.checkpoint_type !== "external")
        .map((each) => [each.tinker_path, each.tinker_path.replace("tinker://", "").split("/")[0], each.tinker_path]),
      ...live.adapters
        .filter((run) => ["device", "host", "disk"].includes(run.where))
        .map((run) => [run.training_run_id, run.training_run_id, `${run.training_run_id} (current weights)`]),
    ];
    const before = models.value || wanted;
    showOnce(models, options, () =>
      options.map(([value, run, title]) => el("option", { value, "data-run": run }, title)),
    );
    if (options.some(([value]) => value === before)) models.value = before;
    if (columns[1].model !== (models.value || null) || columns[0].model === null) await choose();
  }

  return { refresh: load, every: 15_000, leave: () => running?.abort() };
}

class Conversation {
  constructor(id, title) {
    this.title = title;
    this.model = null;
    this.messages = [];
    this.heading = el("h3", {}, title);
    this.texts = el("div", { class: "texts" });
    this.place = el("section", { class: "conversation", id }, this.heading, this.texts);
  }

  name() {
    this.heading.replaceChildren(this.title, " ", el("code", {}, this.model ?? "none"));
  }

  clear() {
    this.messages = [];
    this.texts.replaceChildren();
  }

  async ask(text, pictures, { signal, ...options }) {
    if (this.model === null) return;
    const before = this.messages.length;
    this.messages.push({ role: "user", content: content(text, pictures) });
    const answer = el("p", { class: "assistant" });
    this.texts.append(el("p", { class: "user" }, ...pictures.map(shown), text), answer);
    const body = { model: this.model, messages: this.messages, stream: true, ...options };
    let said = "";
    try {
      for await (const event of events(await request("v1/chat/completions", { method: "POST", body, signal }))) {
        if (event.comment) {
          answer.replaceChildren(el("em", {}, event.comment));
          continue;
        }
        if (event.error) throw new Error(event.error.message);
        said += event.choices[0]?.delta.content ?? "";
        answer.textContent = said;
      }
      answer.classList.add("done");
    } catch (error) {
      const stopped = error.name === "AbortError";
      answer.classList.add(stopped ? "stopped" : "failed");
      if (!stopped) answer.append(el("em", {}, ` ${error.message}`));
      if (!stopped && said === "") {
        this.messages.length = before; // what the server refused is not sent again with the next prompt
        return;
      }
    }
    this.messages.push({ role: "assistant", content: said });
  }
}

// What OpenAI's protocol has as the content of a message.
function content(text, pictures) {
  if (pictures.length === 0) return text;
  return [...pictures.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text }];
}
