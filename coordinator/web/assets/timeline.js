// The pipeline as it runs: a lane for each machine, a block for each frame, gaps as gaps.

import { h, saveFile, setText } from "./dom.js";
import { count, plural, seconds, share } from "./format.js";
import { authorization } from "./key.js";
import { traceOf } from "./trace.js";

const KINDS = { p: ["prompt", "part of a prompt"], d: ["decode", "one token"], w: ["window", "a token and its drafts"], s: ["speculative", "sent early, on unchecked drafts"], i: ["wasted", "rejected"] };
const HINT = "A block is one step of a machine, a gap is a time in which it waited. Point at a block for its figures.";
const DELAY = 2; // seconds behind the present, so that frames arrive before their place is drawn
const SHORTEST = 0.05;
const LONGEST = 20;
const DRAW_MS = 50;
const TRACE_SECONDS = 20;
const LANE = 46;
const GAP = 12;
const AXIS = 22;

// A frame of the stream, as coordinator/web/live_feed.py writes it.
export function parseFrame(row) {
  const [number, kind, rows, wasted, sent, flight, ...times] = row;
  const stages = [];
  for (let i = 0; i < times.length; i += 2) stages.push({ start: sent + times[i] / 1000, length: times[i + 1] / 1000 });
  return { number, kind, rows, wasted, sent, flight: flight / 1000, stages };
}

export class TimelineView {
  constructor(root, live) {
    this.live = live;
    this.visible = false;
    this.pausedAt = null;
    this.span = 3;
    this.canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", "aria-label": "Timeline of steps", onpointermove: (e) => this.point(e), onpointerleave: () => this.pointAt(null), onwheel: (e) => this.onWheel(e), onkeydown: (e) => this.onKey(e) });
    this.pause = h("button", { onclick: () => this.togglePause() }, "Pause");
    this.spanText = h("span", { class: "hint number" });
    this.detail = h("p", { class: "hint detail" }, HINT);
    this.summary = h("ul", { class: "shares" });
    root.append(h("h2", { class: "hidden" }, "Timeline"),
      h("section", { class: "card", "aria-label": "Steps of the machines" },
        h("div", { class: "card-head" }, h("h3", {}, "Steps of the machines"),
          h("div", { class: "controls" }, this.spanText,
            h("button", { "aria-label": "Show less time", onclick: () => this.zoom(0.5) }, "+"),
            h("button", { "aria-label": "Show more time", onclick: () => this.zoom(2) }, "−"),
            this.pause, (this.exportButton = h("button", { onclick: () => this.export() }, "Export")))),
        this.canvas, this.detail,
        h("p", { class: "layer-legend" }, Object.entries(KINDS).map(([, [name, text]]) => h("span", {}, h("i", { class: `block ${name}` }), text)))),
      h("section", { class: "card", "aria-label": "Share of time computed" }, h("div", { class: "card-head" }, h("h3", {}, "Share of time computed"), h("span", { class: "hint" }, "in the time shown")), this.summary));
    new ResizeObserver(() => this.redraw()).observe(this.canvas);
  }

  setVisible(visible) {
    this.visible = visible;
    if (visible) this.loop();
  }

  loop() {
    if (!this.visible || this.timer) return;
    this.timer = setTimeout(() => requestAnimationFrame(() => {
      this.timer = null;
      if (this.pausedAt === null && !document.hidden) this.redraw();
      this.loop();
    }), DRAW_MS);
  }

  // ---- controls

  togglePause() {
    if (this.pausedAt === null) {
      this.pausedAt = this.live.now() - DELAY;
      this.kept = this.live.frames.slice();
    } else {
      this.pausedAt = null;
    }
    setText(this.pause, this.pausedAt === null ? "Pause" : "Resume");
    this.redraw();
  }

  zoom(factor) {
    this.span = Math.min(LONGEST, Math.max(SHORTEST, this.span * factor));
    this.redraw();
  }

  pan(part) {
    if (this.pausedAt === null) this.togglePause();
    this.pausedAt += part * this.span;
    this.redraw();
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) < Math.abs(event.deltaY)) return;
    event.preventDefault();
    if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY > 0 ? 1.25 : 0.8);
    else this.pan(event.deltaX / this.canvas.clientWidth);
  }

  onKey(event) {
    const actions = { ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), " ": () => this.togglePause() };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  // The exact trace of all processes where the coordinator has one; else the frames that this page has.
  async export() {
    this.exportButton.disabled = true;
    let trace = null;
    try {
      const response = await fetch(`/trace?seconds=${TRACE_SECONDS}`, { headers: authorization() });
      if (response.ok && this.pausedAt === null) trace = (await response.json()).trace;
    } catch {
      // The coordinator does not answer: the page's own frames remain.
    }
    trace ??= traceOf(this.frames().map(parseFrame), this.lanes());
    saveFile("mtp-cluster-trace.json", "application/json", JSON.stringify(trace));
    this.exportButton.disabled = false;
  }

  // ---- drawing

  frames() {
    return this.pausedAt === null ? this.live.frames : this.kept;
  }

  lanes() {
    return (this.live.status?.nodes ?? []).filter((node) => node.span).map((node) => node.name);
  }

  redraw() {
    if (!this.visible || !this.canvas.clientWidth) return;
    const end = this.pausedAt ?? this.live.now() - DELAY;
    const start = end - this.span;
    const shown = [];
    const all = this.frames();
    for (let i = all.length - 1; i >= 0; i -= 1) {
      const sent = all[i][4];
      if (sent > end) continue;
      if (sent + all[i][5] / 1000 < start) break;
      shown.push(parseFrame(all[i]));
    }
    this.shown = { frames: shown.reverse(), start, end };
    this.paint();
    this.drawShares();
    setText(this.spanText, `${seconds(this.span)} shown`);
  }

  paint() {
    const { canvas } = this;
    const { frames, start, end } = this.shown;
    const names = this.lanes();
    const lanes = Math.max(1, names.length);
    const width = canvas.clientWidth;
    const height = AXIS + lanes * (LANE + GAP);
    const ratio = devicePixelRatio;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const draw = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const colours = palette(canvas);
    draw.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw.clearRect(0, 0, width, height);
    draw.font = `11px ${style.fontFamily}`;
    const x = (at) => ((at - start) / (end - start)) * width;
    this.paintAxis(draw, width, height, colours, x);
    for (let lane = 0; lane < lanes; lane += 1) {
      const top = AXIS + lane * (LANE + GAP);
      draw.fillStyle = colours.lane;
      draw.fillRect(0, top, width, LANE);
    }
    for (const frame of frames) {
      frame.stages.forEach((stage, lane) => {
        if (lane >= lanes) return;
        this.paintBlock(draw, colours, frame, x(stage.start), x(stage.start + stage.length), AXIS + lane * (LANE + GAP));
      });
    }
    draw.fillStyle = colours.text;
    draw.textBaseline = "top";
    names.forEach((name, lane) => {
      const top = AXIS + lane * (LANE + GAP);
      const text = name.slice(0, 40);
      draw.globalAlpha = 0.82;
      draw.fillStyle = colours.card;
      draw.fillRect(4, top + 4, draw.measureText(text).width + 10, 17);
      draw.globalAlpha = 1;
      draw.fillStyle = colours.text;
      draw.fillText(text, 9, top + 7);
    });
    if (!frames.length) {
      draw.fillStyle = colours.muted;
      draw.textAlign = "center";
      draw.fillText("Nothing computed. Ask something in the chat.", width / 2, AXIS + LANE / 2 - 6);
      draw.textAlign = "left";
    }
  }

  paintAxis(draw, width, height, colours, x) {
    const { start, end } = this.shown;
    const step = niceStep((end - start) / Math.max(2, width / 110));
    draw.textBaseline = "top";
    draw.lineWidth = 1;
    for (let at = Math.ceil(start / step) * step; at < end; at += step) {
      const px = Math.round(x(at)) + 0.5;
      draw.strokeStyle = colours.line;
      draw.beginPath();
      draw.moveTo(px, 16);
      draw.lineTo(px, height);
      draw.stroke();
      draw.fillStyle = colours.muted;
      const label = step < 1 ? `${(at % 60).toFixed(step < 0.01 ? 3 : step < 0.1 ? 2 : 1)} s` : `${Math.round(at % 60)} s`;
      draw.fillText(label, Math.min(px + 3, width - 38), 2);
    }
  }

  paintBlock(draw, colours, frame, left, right, top) {
    const width = Math.max(right - left, 0.7);
    const inset = width > 4 ? 0.5 : 0;
    const part = frame.kind === "i" ? 1 : frame.wasted / Math.max(1, frame.rows);
    const bad = Math.round(LANE * part);
    draw.fillStyle = colours[KINDS[frame.kind][0]];
    draw.fillRect(left, top + bad, width - inset, LANE - bad);
    if (bad) {
      draw.fillStyle = colours.wasted;
      draw.fillRect(left, top, width - inset, bad);
    }
  }

  drawShares() {
    const { frames, start, end } = this.shown;
    const now = performance.now();
    if (this.sharesAt && now - this.sharesAt < 500 && this.pausedAt === null) return;
    this.sharesAt = now;
    const names = this.lanes();
    const parts = names.map((_, lane) => {
      let busy = 0;
      let until = start; // a machine begins a step before it has finished the one before: time counts once
      for (const stage of frames.map((frame) => frame.stages[lane]).filter(Boolean).sort((a, b) => a.start - b.start)) {
        busy += Math.max(0, Math.min(end, stage.start + stage.length) - Math.max(until, stage.start));
        until = Math.max(until, stage.start + stage.length);
      }
      return busy / (end - start);
    });
    this.summary.replaceChildren(...names.map((name, lane) => h("li", {}, h("span", {}, name), h("span", { class: "meter", "aria-hidden": "true" }, h("i", { vars: { "--part": `${parts[lane] * 100}%` } })), h("b", { class: "number" }, share(parts[lane])))));
    const rows = frames.reduce((sum, frame) => sum + frame.rows, 0);
    const wasted = frames.reduce((sum, frame) => sum + frame.wasted, 0);
    this.canvas.setAttribute("aria-label", `Timeline: ${count(frames.length)} steps, ${count(rows)} tokens, ${count(wasted)} of them rejected, in ${seconds(this.span)}`);
  }

  // ---- pointing

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.pointAt({ x: event.clientX - box.left, y: event.clientY - box.top });
  }

  pointAt(place) {
    if (!place || !this.shown) {
      setText(this.detail, HINT);
      return;
    }
    const { frames, start, end } = this.shown;
    const at = start + (place.x / this.canvas.clientWidth) * (end - start);
    const lane = Math.floor((place.y - AXIS) / (LANE + GAP));
    const found = frames.find((frame) => frame.stages[lane] && at >= frame.stages[lane].start && at <= frame.stages[lane].start + frame.stages[lane].length);
    if (!found) {
      setText(this.detail, lane >= 0 && lane < this.lanes().length ? "This machine waits." : HINT);
      return;
    }
    const wasted = found.wasted ? `, ${count(found.wasted)} rejected` : "";
    setText(this.detail, `Step ${count(found.number)}: ${KINDS[found.kind][1]}, ${plural(found.rows, "token")}${wasted}, ${seconds(found.stages[lane].length)} here, ${seconds(found.flight)} through all machines`);
  }
}

function palette(element) {
  // Resolved through a probe, because a canvas does not understand light-dark().
  const probe = element.parentElement;
  const read = (name) => {
    probe.style.setProperty("outline-color", `var(${name})`);
    const value = getComputedStyle(probe).outlineColor;
    probe.style.removeProperty("outline-color");
    return value;
  };
  return { prompt: read("--muted"), decode: read("--accent-mid"), window: read("--accent"), speculative: read("--speculative"), wasted: read("--reject"), lane: read("--raised"), text: read("--text"), muted: read("--muted"), line: read("--line"), card: read("--card") };
}

function niceStep(raw) {
  const unit = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].map((f) => f * unit).find((step) => step >= raw);
}
