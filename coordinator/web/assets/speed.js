// Ten minutes of speed and latency, and the MTP head: acceptance by position and the mode.

import { TimeChart } from "./charts.js";
import { h } from "./dom.js";
import { count, rate, seconds, share } from "./format.js";
import { valueOf } from "./samples.js";

const RANGES = [[60, "1 min"], [180, "3 min"], [600, "10 min"]];
const RANGE = "mtp-range";
const REDRAW_MS = 1000;
const DRAFTS = "The MTP head, a small part of the model, drafts the next tokens. The model checks them all in one step, so each accepted draft saves a step. Answers stay the same.";

export class SpeedView {
  constructor(root, live) {
    this.live = live;
    this.drawnAt = 0;
    const stored = Number(localStorage.getItem(RANGE));
    this.span = RANGES.some(([span]) => span === stored) ? stored : 600;
    const chart = (options) => new TimeChart({ valueOf, ...options });
    this.charts = [
      chart({ label: "Tokens per second", format: rate, series: [["tokens/s", "tokensPerSecond"]] }),
      chart({ label: "Drafts accepted", format: share, max: 1, series: [["accepted", "acceptance"]], empty: "No drafts yet" }),
      chart({ label: "Requests", format: count, whole: true, series: [["answering", "running"], ["waiting", "waiting"]] }),
      chart({ label: "Wait for the first token", format: seconds, series: [["median", "first50"], ["95 % below", "first95"]], empty: "No requests yet" }),
      chart({ label: "Time between pieces of text", format: seconds, series: [["median", "gap50"], ["95 % below", "gap95"]], empty: "No requests yet" }),
    ];
    this.ranges = RANGES.map(([span, name]) => h("button", { "aria-pressed": String(span === this.span), onclick: () => this.setSpan(span) }, name));
    this.mtp = h("div", {});
    root.append(
      h("h2", { class: "hidden" }, "Speed"),
      h("section", { class: "card", "aria-labelledby": "history-title" }, h("div", { class: "card-head" }, h("h3", { id: "history-title" }, "Over time"), h("div", { class: "ranges", role: "group", "aria-label": "Time shown" }, this.ranges)),
        h("div", { class: "charts" }, this.charts.map((one) => one.element))),
      h("section", { class: "card", "aria-labelledby": "mtp-title" }, h("div", { class: "card-head" }, h("h3", { id: "mtp-title" }, "Drafting (multi-token prediction)")), this.mtp));
  }

  setVisible(visible) {
    if (visible) this.drawnAt = 0;
  }

  setSpan(span) {
    this.span = span;
    localStorage.setItem(RANGE, span);
    RANGES.forEach(([other], i) => this.ranges[i].setAttribute("aria-pressed", String(other === span)));
    this.drawnAt = 0;
    this.update();
  }

  update() {
    if (!this.live.status || performance.now() - this.drawnAt < REDRAW_MS) return;
    this.drawnAt = performance.now();
    this.drawCharts();
    this.drawMtp(this.live.status);
  }

  drawCharts() {
    const to = this.live.history.at(-1)?.[0] ?? this.live.now();
    const history = this.live.history.filter((sample) => sample[0] >= to - this.span);
    const age = to - (history[0]?.[0] ?? to);
    const from = to - Math.min(this.span, Math.max(RANGES[0][0], age));
    for (const chart of this.charts) chart.update(history, from, to);
  }

  drawMtp(status) {
    const drafted = status.drafted_by_position;
    const accepted = status.accepted_by_position;
    const model = status.architecture;
    const lines = [];
    if (model && !model.has_head) lines.push("This model has no MTP head: every token takes a full step.");
    else if (status.mtp === "off") lines.push("Drafting is off (--mtp off).");
    else if (!drafted.some(Boolean)) lines.push("No drafts yet. Ask something in the chat.");
    const rows = drafted.map((d, i) => h("tr", {},
      h("th", { scope: "row" }, `Draft ${i + 1}`),
      h("td", { class: "number" }, d ? share(accepted[i] / d) : "–"),
      h("td", {}, h("span", { class: "meter", "aria-hidden": "true" }, h("i", { vars: { "--part": `${d ? (accepted[i] / d) * 100 : 0}%` } }))),
      h("td", { class: "number hint" }, `${count(accepted[i])} of ${count(d)}`)));
    this.mtp.replaceChildren(
      h("p", { class: "hint lead" }, DRAFTS), h("p", { class: "lead" }, modeLine(status.mtp)),
      status.ngram_drafted ? h("p", { class: "hint" }, `Drafts from the text: ${share(status.ngram_accepted / status.ngram_drafted)} of ${count(status.ngram_drafted)} accepted.`) : "",
      ...lines.map((line) => h("p", { class: "hint" }, line)),
      rows.length ? h("table", { class: "plain" }, h("caption", { class: "hidden" }, "Drafts accepted, by position"), h("thead", {}, h("tr", {}, ["Position", "Accepted", "", "Drafts"].map((t, i) => h(t ? "th" : "td", t ? { scope: "col", class: i === 1 || i === 3 ? "number" : "" } : {}, t)))), h("tbody", {}, rows)) : "");
  }
}

function modeLine(mode) {
  if (mode === "auto") return "auto: the number of drafts that gives the most tokens per second is in use.";
  if (mode === "filled") return "filled: every machine works on its own step of the answer at the same time.";
  if (mode === "off") return "off: no drafts";
  return `${mode} ${mode === "1" ? "draft" : "drafts"} in each step.`;
}
