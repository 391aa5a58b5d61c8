// A line chart over steps, as SVG, with the value at the pointer.

import { el, number, svg } from "./dom.js";

const WIDTH = 460;
const HEIGHT = 200;
const LEFT = 54;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 24;

// points: [step, value], sorted by step. `kind`, "server" or "client", sets the colour.
export function chart(title, points, kind) {
  const latest = points[points.length - 1];
  const readout = el("output", {}, text(latest));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title} by step` });
  const scale = scales(points);
  for (const tick of ticks(scale.low, scale.high, 4)) {
    const y = scale.y(tick);
    picture.append(svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    picture.append(svg("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(scale.first, scale.last, 5).filter(Number.isInteger)) {
    picture.append(svg("text", { class: "tick", x: scale.x(tick), y: HEIGHT - 6, "text-anchor": "middle" }, String(tick)));
  }
  const line = points.map(([step, value]) => `${scale.x(step).toFixed(1)},${scale.y(value).toFixed(1)}`).join(" ");
  picture.append(svg("polyline", { class: "line", points: line }));
  const dot = svg("circle", { class: "dot", r: 3.5, cx: scale.x(latest[0]), cy: scale.y(latest[1]) });
  picture.append(dot);
  const pointAt = (point) => {
    dot.setAttribute("cx", scale.x(point[0]));
    dot.setAttribute("cy", scale.y(point[1]));
    readout.textContent = text(point);
  };
  picture.addEventListener("pointermove", (event) => pointAt(nearest(points, scale, event, picture)));
  picture.addEventListener("pointerleave", () => pointAt(latest));
  const by = kind === "client" ? el("span", { class: "by" }, "logged by the client") : null;
  return el(
    "figure",
    { class: `chart ${kind}`, "data-name": title, "data-points": points.length },
    el("figcaption", {}, el("strong", {}, title), by, readout),
    picture,
  );
}

const text = ([step, value]) => `${number(value)} at step ${step}`;

function scales(points) {
  const values = points.map(([, value]) => value);
  let low = values.reduce((a, b) => Math.min(a, b));
  let high = values.reduce((a, b) => Math.max(a, b));
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  low = low >= 0 && low < margin ? 0 : low - margin;
  high += margin;
  const first = points[0][0];
  const last = Math.max(points[points.length - 1][0], first + 1);
  const x = (step) => LEFT + ((step - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  return { low, high, first, last, x, y };
}

// Returns about `count` round numbers between `low` and `high`.
function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const first = Math.ceil(low / step);
  const found = Array.from({ length: 2 * count }, (_, n) => Number(((first + n) * step).toPrecision(12)));
  return found.filter((tick) => tick <= high);
}

function nearest(points, scale, event, picture) {
  const box = picture.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * WIDTH;
  return points.reduce((best, each) => (Math.abs(scale.x(each[0]) - x) < Math.abs(scale.x(best[0]) - x) ? each : best));
}
