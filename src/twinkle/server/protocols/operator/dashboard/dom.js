// Builds elements from data. Texts become text nodes only, so that a tenant's text is never interpreted as markup.

const shown = new WeakMap(); // element → the data that it shows, as JSON
const SVG = "http://www.w3.org/2000/svg";

export function el(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), properties, children);
}

// Properties become attributes, except listeners ("onclick") and values that only a property can set ("value").
function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "disabled" || name === "hidden") element[name] = value;
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// columns: [title, function from a row to its cell]; a cell is text or an element.
export function table(name, columns, rows, empty) {
  if (rows.length === 0) return el("p", { class: "empty", id: name }, empty);
  const head = el("tr", {}, ...columns.map(([title]) => el("th", { scope: "col" }, title)));
  const body = rows.map((row) => el("tr", {}, ...columns.map(([, cell]) => el("td", {}, cell(row)))));
  return el("div", { class: "scroll" }, el("table", { id: name }, el("thead", {}, head), el("tbody", {}, ...body)));
}

// Buttons for the next and previous page of a list. `page` is {offset, limit, total_count} of the page shown.
export function pager(page, turn) {
  const last = Math.min(page.offset + page.limit, page.total_count);
  if (page.offset === 0 && last === page.total_count) return null;
  const button = (title, offset, disabled) => el("button", { type: "button", disabled, onclick: () => turn(offset) }, title);
  return el(
    "p",
    { class: "pager" },
    button("Newer", Math.max(0, page.offset - page.limit), page.offset === 0),
    `${page.offset + 1} to ${last} of ${page.total_count}`,
    button("Older", page.offset + page.limit, last >= page.total_count),
  );
}

// Shows `parts` only if the data has changed: elements must not be replaced while a user is about to click them.
export function showOnce(place, data, parts) {
  const text = JSON.stringify(data);
  if (shown.get(place) === text) return;
  shown.set(place, text);
  place.replaceChildren(...parts().filter((part) => part !== null));
}

export const when = (seconds) => new Date(seconds * 1000).toLocaleString();

// What a run trains: an adapter of some rank, or all parameters of the model (train_mode: full).
export const rank = (run) => (run.lora_rank === null ? "all parameters" : String(run.lora_rank));

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${unit === 0 ? bytes : bytes.toFixed(1)} ${units[unit]}`;
}

export function number(value) {
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (magnitude >= 1e6 || magnitude < 1e-3) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}
