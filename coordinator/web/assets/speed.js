// Ten minutes of speed and latency, and the MTP head: acceptance, tokens per window and the choice of depth.

import { timeChart } from "./charts.js";
import { h } from "./dom.js";
import { count, rate, seconds, share } from "./format.js";
import { points } from "./samples.js";

const SPAN = 600;
const SHORTEST = 60;
const REDRAW_MS = 1000;

export class SpeedView {
  constructor(root, live) {
    this.live = live;
    this.drawnAt = 0;
    this.charts = h("div", { class: "charts" });
    this.mtp = h("div", {});
    root.append(
      h("h2", { class: "hidden" }, "Speed"),
      h("section", { class: "card", "aria-labelledby": "history-title" }, h("div", { class: "card-head" }, h("h3", { id: "history-title" }, "Last ten minutes")), this.charts),
      h("section", { class: "card", "aria-labelledby": "mtp-title" }, h("div", { class: "card-head" }, h("h3", { id: "mtp-title" }, "Multi-token prediction")), this.mtp));
  }

  setVisible(visible) {
    if (visible) this.drawnAt = 0;
  }

  update() {
    if (!this.live.status || performance.now() - this.drawnAt < REDRAW_MS) return;
    this.drawnAt = performance.now();
    this.drawCharts();
    this.drawMtp(this.live.status);
  }

  drawCharts() {
    const { history } = this.live;
    const to = history.at(-1)?.[0] ?? this.live.now();
    const age = to - (history[0]?.[0] ?? to);
    const range = { from: to - Math.min(SPAN, Math.max(SHORTEST, age)), to };
    const of = (field) => points(history, field);
    this.charts.replaceChildren(
      timeChart({ ...range, label: "Tokens per second", format: rate, series: [{ name: "now", points: of("tokensPerSecond") }] }),
      timeChart({ ...range, label: "Drafts accepted", format: share, max: 1, series: [{ name: "now", points: of("acceptance") }], empty: "No drafts yet" }),
      timeChart({ ...range, label: "Time to first token", format: seconds, series: [{ name: "median", points: of("first50") }, { name: "95 %", points: of("first95") }], empty: "No requests yet" }),
      timeChart({ ...range, label: "Time between deliveries", format: seconds, series: [{ name: "median", points: of("gap50") }, { name: "95 %", points: of("gap95") }], empty: "No requests yet" }),
      timeChart({ ...range, label: "Requests", format: count, series: [{ name: "running", points: of("running") }, { name: "queued", points: of("waiting") }] }));
  }

  drawMtp(status) {
    const drafted = status.drafted_by_position;
    const accepted = status.accepted_by_position;
    const model = status.architecture;
    const lines = [];
    if (model && !model.has_head) lines.push("This checkpoint has no MTP head: every token takes a full step.");
    else if (status.mtp === "off") lines.push("Drafting is off (--mtp off).");
    else if (!drafted.some(Boolean)) lines.push("No drafts yet. Ask something in the chat.");
    const rows = drafted.map((d, i) => h("tr", {},
      h("th", { scope: "row" }, `Draft ${i + 1}`),
      h("td", { class: "number" }, d ? share(accepted[i] / d) : "–"),
      h("td", {}, h("span", { class: "meter", "aria-hidden": "true" }, h("i", { vars: { "--part": `${d ? (accepted[i] / d) * 100 : 0}%` } }))),
      h("td", { class: "number hint" }, `${count(accepted[i])} of ${count(d)}`)));
    const chosen = (status.mtp_choices ?? []).map(choice);
    this.mtp.replaceChildren(
      h("p", { class: "lead" }, modeLine(status.mtp)),
      ...lines.map((line) => h("p", { class: "hint" }, line)),
      rows.length ? h("table", { class: "plain" }, h("caption", { class: "hidden" }, "Acceptance by position"), h("thead", {}, h("tr", {}, ["Position", "Accepted", "", "Drafts"].map((t, i) => h(t ? "th" : "td", t ? { scope: "col", class: i === 1 || i === 3 ? "number" : "" } : {}, t)))), h("tbody", {}, rows)) : "",
      chosen.length ? h("div", { class: "choices" }, chosen) : "");
  }
}

function modeLine(mode) {
  if (mode === "auto") return "auto: the shape with the most tokens per second is in use. Times of a step are measured; tokens follow from the acceptance.";
  if (mode === "filled") return "filled: one window in flight for each stage.";
  if (mode === "off") return "off";
  return `${mode} drafts in each window.`;
}

// One comparison of `--mtp auto`: its shapes with cost, expected tokens and speed.
function choice(one) {
  const title = `${one.sequences === 1 ? "One answer at a time" : `Up to ${one.sequences} answers together`}${one.fill > 1 ? `, up to ${one.fill} windows in flight` : ""}`;
  const speed = (shape) => (one.plain_speed ? `${shape.measured ? "" : "≤ "}${rate(shape.speed * one.plain_speed)}` : "–");
  return h("div", { class: "choice", tabindex: "0", role: "group", "aria-label": title },
    h("h4", {}, title),
    measured(one),
    h("table", { class: "plain" }, h("caption", { class: "hidden" }, title),
      h("thead", {}, h("tr", {}, ["Shape", "Time of a step", "Tokens a step", "Speed", "Tokens/s an answer"].map((t, i) => h("th", { scope: "col", class: i ? "number" : "" }, t)))),
      h("tbody", {}, one.shapes.map((shape) => h("tr", { class: shape.chosen ? "chosen" : "" },
        h("th", { scope: "row" }, shapeName(shape), shape.chosen && h("span", { class: "badge" }, "in use")),
        h("td", { class: "number" }, `${shape.measured ? "" : "at least "}${shape.cost.toFixed(2)} ×`),
        h("td", { class: "number" }, shape.tokens.toFixed(2)),
        h("td", { class: "number" }, `${shape.measured ? "" : "at most "}${shape.speed.toFixed(2)} ×`),
        h("td", { class: "number" }, speed(shape)))))));
}

// The measured speed without drafts and with the shape in use, in words.
function measured(one) {
  const used = one.shapes.find((shape) => shape.chosen);
  if (!one.plain_speed || !used?.measured) return null;
  const plain = `${rate(one.plain_speed)} tokens/s without drafts`;
  return h("p", { class: "hint" }, used.width === 1 && used.fill === 1 ? `${plain}, which is the fastest now.` : `${plain}, ${rate(used.speed * one.plain_speed)} with them, as measured.`);
}

function shapeName(shape) {
  if (shape.fill > 1) return `Filled, ${shape.width === 1 ? "one token" : `${shape.width} tokens`} a window`;
  return ["No drafts", "1 draft"][shape.width - 1] ?? `${shape.width - 1} drafts`;
}
