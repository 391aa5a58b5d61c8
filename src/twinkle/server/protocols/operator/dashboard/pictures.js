// The pictures that go with the next prompt: chosen as files, dropped on the form, or pasted.

import { el } from "./dom.js";

const TYPES = ["image/png", "image/jpeg"]; // what the server reads

export class Pictures {
  // `form`: where pictures can be dropped and pasted.
  constructor(form) {
    this.chosen = []; // data URIs
    this.list = el("div", { id: "pictures" });
    const types = { accept: TYPES.join(","), multiple: "", hidden: true };
    const input = el("input", { id: "picture", type: "file", ...types });
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = ""; // so that the same file can be chosen again
    });
    this.button = el("button", { id: "add-picture", type: "button", onclick: () => input.click() }, "Add picture");
    this.hint = el("span", { id: "picture-hint" });
    this.place = [input, this.button, this.hint];
    this.say();
    form.addEventListener("dragover", (event) => {
      event.preventDefault();
      form.classList.add("dropping");
    });
    form.addEventListener("dragleave", () => form.classList.remove("dropping"));
    form.addEventListener("drop", (event) => {
      event.preventDefault(); // or the browser would leave the page for the picture
      form.classList.remove("dropping");
      this.add(event.dataTransfer.files);
    });
    form.addEventListener("paste", (event) => {
      if (event.clipboardData.files.length === 0) return; // text
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    this.say();
    for (const file of [...files]) {
      if (TYPES.includes(file.type)) this.chosen.push(await dataUri(file));
      else this.say(`${file.name} is ${file.type || "of an unknown type"}; pictures are PNG or JPEG files`);
    }
    this.show();
  }

  // Shows why a file is no picture; without `problem`, how pictures are added.
  say(problem = null) {
    this.hint.textContent = problem ?? "or drop or paste PNG or JPEG files";
    this.hint.classList.toggle("problem", problem !== null);
  }

  // Returns the pictures, and forgets them: the conversation has them from now on.
  take() {
    this.say();
    const taken = this.chosen;
    this.chosen = [];
    this.show();
    return taken;
  }

  show() {
    const each = (uri, number) =>
      el("span", {}, shown(uri), el("button", { type: "button", title: "Remove", onclick: () => this.remove(number) }, "×"));
    this.list.replaceChildren(...this.chosen.map(each));
  }

  remove(number) {
    this.chosen.splice(number, 1);
    this.show();
  }
}

export const shown = (uri) => el("img", { src: uri, alt: "picture" });

function dataUri(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}
