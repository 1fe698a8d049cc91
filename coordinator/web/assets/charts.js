// Charts of figures over time, as SVG: gaps are bridged, and the values at the pointer are shown.

import { h, s, setText } from "./dom.js";
import { clockTime } from "./format.js";

const WIDTH = 600;
const HEIGHT = 120;
const PAD = 4; // room for the stroke of a value at the top or at the bottom
const JOINED_SECONDS = 3; // values further apart are joined by a dashed line

// A line without axes. Points are {at, value}; a value of null is a gap.
export function sparkline(points, { from, to, height = 36, max = null }) {
  const top = Math.max(max ?? 0, ...points.map((p) => p.value ?? 0), 1e-9);
  return s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" },
    drawn(points, (at) => ((at - from) / (to - from)) * WIDTH, (value) => toHeight(value, top, height), height, 0));
}

function toHeight(value, top, height) {
  return PAD + (1 - Math.min(1, value / top)) * (height - 2 * PAD);
}

// The paths of one series: lines, a dashed bridge over each gap, and a dot for each value without neighbours.
function drawn(points, x, y, height, number) {
  const runs = [];
  for (const point of points) {
    if (point.value === null || point.value === undefined) continue;
    const run = runs.at(-1);
    if (run && point.at - run.at(-1).at <= JOINED_SECONDS) run.push(point);
    else runs.push([point]);
  }
  const place = (p) => `${x(p.at).toFixed(1)} ${y(p.value).toFixed(1)}`;
  const line = (run) => `M${run.map(place).join("L")}`;
  const path = (name, d) => d && s("path", { d, class: `${name} stroke-${number}` });
  return [
    number === 0 && path("area", runs.map((run) => `${line(run)}V${height}H${x(run[0].at).toFixed(1)}Z`).join("")),
    path("stroke bridge", runs.slice(1).map((run, i) => line([runs[i].at(-1), run[0]])).join("")),
    path("stroke", runs.filter((run) => run.length > 1).map(line).join("")),
    path("stroke dots", runs.filter((run) => run.length === 1).map((run) => `M${place(run[0])}h0`).join("")),
  ].filter(Boolean);
}

// A chart with a scale, times and a reading under the pointer, which the arrow keys move too. `series` are
// [name, field], and `valueOf(sample, field)` reads a sample. `format` turns a value into text.
export class TimeChart {
  constructor({ label, series, format, valueOf, max = null, whole = false, empty = "No data yet" }) {
    Object.assign(this, { label, series, format, valueOf, max, whole });
    this.history = [];
    this.pointed = null; // the time of the sample under the pointer
    this.values = series.map(() => h("b", {}, "–"));
    this.ticks = ["", "", ""].map(() => h("span", {}));
    this.begin = h("span", {});
    this.end = h("span", {});
    this.empty = h("span", { class: "empty" }, empty);
    this.drawing = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" });
    this.reading = h("span", { class: "reading", hidden: true, "aria-hidden": "true" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "slider", "aria-label": `${label}: time`, "aria-valuemin": 0, "aria-valuemax": 0, "aria-valuenow": 0, "aria-valuetext": empty,
      onpointermove: (event) => this.pointAt(event.clientX), onpointerdown: (event) => this.pointAt(event.clientX), onpointerleave: () => this.point(null), onkeydown: (event) => this.onKey(event), onblur: () => this.point(null) },
    this.drawing, this.empty, this.reading);
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "chart-title" }, label),
        h("span", { class: "legend" }, series.map(([name], i) => h("span", { class: `key key-${i}` }, `${name} `, this.values[i])))),
      h("div", { class: "scale", "aria-hidden": "true" }, this.ticks), this.plot,
      h("div", { class: "times", "aria-hidden": "true" }, this.begin, this.end));
  }

  update(history, from, to) {
    Object.assign(this, { history, from, to });
    const points = this.series.map(([, field]) => history.map((sample) => ({ at: sample[0], value: this.valueOf(sample, field) })));
    const values = points.flat().map((p) => p.value).filter((value) => value !== null);
    const top = this.max ?? niceTop(Math.max(...values, 0), this.whole);
    const x = (at) => ((at - from) / (to - from)) * WIDTH;
    const y = (value) => toHeight(value, top, HEIGHT);
    const grid = (values.length ? [0, 0.5, 1] : []).map((part) => s("line", { x1: 0, x2: WIDTH, y1: y(part * top), y2: y(part * top), class: "grid" }));
    this.drawing.replaceChildren(...grid, ...points.flatMap((one, i) => drawn(one, x, y, HEIGHT, i)));
    this.empty.hidden = values.length > 0;
    [1, 0.5, 0].forEach((part, i) => setText(this.ticks[i], values.length ? this.tick(part * top) : ""));
    setText(this.begin, clockTime(from));
    setText(this.end, clockTime(to));
    points.forEach((one, i) => setText(this.values[i], this.text(one.findLast((p) => p.value !== null)?.value)));
    this.plot.setAttribute("aria-valuemax", Math.max(0, history.length - 1));
    this.read();
  }

  text(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }

  tick(value) {
    return value === 0 ? "0" : this.format(value).replace(/\.0+(?=\D|$)/, "");
  }

  // ---- the reading

  pointAt(clientX) {
    const box = this.plot.getBoundingClientRect();
    this.point(this.from + ((clientX - box.left) / box.width) * (this.to - this.from));
  }

  point(at) {
    this.pointed = at;
    this.read();
  }

  // The index of the sample next to the pointer; the newest one without a pointer.
  index() {
    const { history, pointed } = this;
    if (pointed === null) return history.length - 1;
    return history.reduce((best, sample, i) => (Math.abs(sample[0] - pointed) < Math.abs(history[best][0] - pointed) ? i : best), 0);
  }

  onKey(event) {
    const at = this.index();
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - 30, PageUp: at + 30, Home: 0, End: this.history.length - 1 }[event.key];
    if (to === undefined || !this.history.length) return;
    event.preventDefault();
    this.point(this.history[Math.max(0, Math.min(this.history.length - 1, to))][0]);
  }

  read() {
    const sample = this.history[this.index()];
    this.reading.hidden = this.pointed === null || !sample;
    if (!sample) return;
    const text = [clockTime(sample[0]), ...this.series.map(([name, field]) => `${name} ${this.text(this.valueOf(sample, field))}`)].join(" · ");
    setText(this.reading, text);
    const part = (sample[0] - this.from) / (this.to - this.from);
    this.plot.style.setProperty("--at", `${part * 100}%`);
    this.plot.style.setProperty("--back", `${part * -100}%`);
    this.plot.classList.toggle("pointed", !this.reading.hidden);
    this.plot.setAttribute("aria-valuenow", this.index());
    this.plot.setAttribute("aria-valuetext", text);
  }
}

// A round number above `value` whose half is round too.
function niceTop(value, whole) {
  const least = Math.max(value || 1, whole ? 2 : 0);
  const unit = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 4, 6, 8, 10].map((factor) => factor * unit).find((top) => top >= least * 0.999);
}
