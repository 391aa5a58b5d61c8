// Lists checkpoints. Downloads them as tar files and deletes them after a confirmation.

import { json, part, request } from "./api.js";
import { el, pager, showOnce, size, table } from "./dom.js";

export function checkpoints(place, _path, report) {
  const list = el("section", { id: "checkpoint-list" });
  place.append(list);
  let offset = 0;

  async function refresh() {
    const found = await json(`api/v1/checkpoints?limit=50&offset=${offset}`);
    showOnce(list, found, () => [
      el("h2", {}, "Checkpoints"),
      table("checkpoints", columns, found.checkpoints, "No checkpoints yet."),
      pager(found.cursor, (to) => {
        offset = to;
        refresh().catch(report);
      }),
    ]);
  }

  const columns = [
    ["Address", (each) => el("code", {}, each.tinker_path)],
    ["For", (each) => each.checkpoint_type],
    ["Saved", (each) => new Date(each.time).toLocaleString()],
    ["Expires", (each) => (each.expires_at === null ? "never" : new Date(each.expires_at).toLocaleString())],
    ["Size", (each) => size(each.size_bytes)],
    ["", (each) => actions(each)],
  ];

  function actions(each) {
    const [run, kind, name] = each.tinker_path.replace("tinker://", "").split("/").map(part);
    const act = (work) => async (event) => {
      event.target.disabled = true;
      await work().catch(report);
      event.target.disabled = false;
    };
    const remove = async () => {
      if (!(await confirmed(`Delete ${each.tinker_path}? This cannot be undone.`))) return;
      await request(`api/v1/training_runs/${run}/checkpoints/${kind}/${name}`, { method: "DELETE" });
      await refresh();
    };
    const playground = `#playground/${part(each.tinker_path)}`;
    return el(
      "span",
      { class: "actions" },
      el("a", { href: playground }, "Chat"),
      el("button", { type: "button", onclick: act(() => download(`${run}/${kind}/${name}`)) }, "Download"),
      el("button", { type: "button", class: "danger", onclick: act(remove) }, "Delete"),
    );
  }
  return { refresh };
}

// A link cannot carry the key, so the script fetches the file as a blob and saves it under the server's file name.
async function download(address) {
  const response = await request(`api/v1/twinkle/checkpoints/${address}/archive`);
  const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition"))[1];
  const url = URL.createObjectURL(await response.blob());
  const link = el("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

function confirmed(question) {
  const answer = (value) => () => dialog.close(value);
  const dialog = el(
    "dialog",
    {},
    el("p", {}, question),
    el(
      "p",
      { class: "actions" },
      el("button", { type: "button", onclick: answer("no") }, "Keep"),
      el("button", { type: "button", class: "danger", onclick: answer("yes") }, "Delete"),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
  });
}
