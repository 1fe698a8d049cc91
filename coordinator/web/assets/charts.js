// Small charts of figures over time, as SVG.

import { s, h } from "./dom.js";
import { clockTime } from "./format.js";

const WIDTH = 600;

// A line without axes. Points are {at, value}; a value of null is a gap.
export function sparkline(points, { from, to, height = 36, max = null }) {
  const top = Math.max(max ?? 0, ...points.map((p) => p.value ?? 0), 1e-9);
  const shape = pathOf(points, from, to, top, height);
  return s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", class: "spark", "aria-hidden": "true" },
    s("path", { d: shape.area, class: "area" }), s("path", { d: shape.line, class: "stroke" }));
}

function pathOf(points, from, to, top, height) {
  const x = (at) => ((at - from) / (to - from)) * WIDTH;
  const y = (value) => height - 1.5 - (value / top) * (height - 3);
  let line = "";
  let area = "";
  let run = [];
  const close = () => {
    if (!run.length) return;
    if (run.length === 1) run.push(run[0]); // a dot
    const d = run.map((p, i) => `${i ? "L" : "M"}${x(p.at).toFixed(1)} ${y(p.value).toFixed(1)}`).join("");
    line += d;
    area += `${d}L${x(run.at(-1).at).toFixed(1)} ${height}L${x(run[0].at).toFixed(1)} ${height}Z`;
    run = [];
  };
  for (const point of points) {
    if (point.value === null || point.value === undefined) close();
    else run.push(point);
  }
  close();
  return { line, area };
}

// A chart with a scale and times. `series` are [{name, points, kind}], `format` turns a value into text.
export function timeChart({ series, from, to, format, label, max = null, height = 120, empty = "No data yet" }) {
  const values = series.flatMap((one) => one.points.map((p) => p.value ?? 0));
  const top = max ?? niceTop(Math.max(...values, 0));
  const drawn = series.some((one) => one.points.some((p) => p.value !== null && p.value !== undefined));
  const lines = series.map((one, i) => {
    const shape = pathOf(one.points, from, to, top, height);
    return [i === 0 && s("path", { d: shape.area, class: "area" }), s("path", { d: shape.line, class: `stroke stroke-${i}` })];
  });
  const grid = [0.25, 0.5, 0.75].map((f) => s("line", { x1: 0, x2: WIDTH, y1: f * height, y2: f * height, class: "grid" }));
  return h("figure", { class: "chart" },
    h("figcaption", {}, h("span", { class: "chart-title" }, label),
      h("span", { class: "legend" }, series.map((one, i) => h("span", { class: `key key-${i}` }, `${one.name} `, h("b", {}, lastOf(one, format)))))),
    h("div", { class: "plot" },
      h("span", { class: "scale upper", "aria-hidden": "true" }, drawn ? format(top) : ""),
      h("span", { class: "scale lower", "aria-hidden": "true" }, drawn ? format(0) : ""),
      s("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, grid, lines.flat()),
      !drawn && h("span", { class: "empty" }, empty)),
    h("div", { class: "times", "aria-hidden": "true" }, h("span", {}, clockTime(from)), h("span", {}, clockTime(to))));
}

function lastOf(one, format) {
  const last = one.points.findLast((p) => p.value !== null && p.value !== undefined);
  return last ? format(last.value) : "–";
}

function niceTop(value) {
  if (value <= 0) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((f) => f * unit).find((top) => top >= value * 1.02) ?? 20 * unit;
}
