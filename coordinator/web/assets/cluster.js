// The cluster: key figures, the pipeline over the model's layers, its machines, idle workers and events.

import { sparkline } from "./charts.js";
import { h, setText } from "./dom.js";
import { bytes, clockTime, count, plural, rate, seconds, share } from "./format.js";
import { RequestsTable } from "./requests.js";
import { latest, points } from "./samples.js";

const SPARK_SECONDS = 120;
const DETAILED = "mtp-details";

export class ClusterView {
  constructor(root, live) {
    this.root = root;
    this.live = live;
    this.drawn = {};
    this.figures = h("div", { class: "figures" });
    this.strip = h("div", { class: "strip" });
    this.machines = h("ol", { class: "machines" });
    this.others = h("div", { class: "others" });
    this.events = h("ol", { class: "events" });
    this.requests = new RequestsTable(live);
    this.details = h("button", { class: "small", onclick: () => this.setDetailed(!this.root.classList.contains("detailed")) }, "Details");
    root.append(
      h("h2", { class: "hidden" }, "Cluster"),
      this.figures,
      h("section", { class: "card", "aria-labelledby": "pipeline-title" },
        h("div", { class: "card-head" }, h("h3", { id: "pipeline-title" }, "Pipeline"), this.details),
        h("p", { class: "hint" }, "Each token passes these machines in order. Each machine holds a part of the model's layers."),
        (this.model = h("p", { class: "hint" })), (this.plan = h("p", { class: "hint technical" })), this.strip, layerLegend(), this.machines),
      (this.othersCard = h("section", { class: "card", "aria-labelledby": "others-title", hidden: true },
        h("div", { class: "card-head" }, h("h3", { id: "others-title" }, "Machines that are not used")), this.others)),
      this.requests.element,
      h("section", { class: "card", "aria-labelledby": "events-title" },
        h("div", { class: "card-head" }, h("h3", { id: "events-title" }, "Events")), this.events));
    this.setDetailed(localStorage.getItem(DETAILED) === "on");
  }

  // Shows or hides the figures for which one needs to know how the cluster works.
  setDetailed(detailed) {
    this.root.classList.toggle("detailed", detailed);
    this.details.setAttribute("aria-expanded", String(detailed));
    localStorage.setItem(DETAILED, detailed ? "on" : "off");
  }

  update() {
    const status = this.live.status;
    if (!status) return;
    this.drawFigures(status);
    const stages = status.nodes.filter((node) => node.span);
    const others = status.nodes.filter((node) => !node.span);
    this.draw("strip", [status.architecture, stages.map((n) => [n.name, n.span, n.health])], () => drawStrip(this.strip, status, stages));
    this.draw("machines", [stages.map((node) => ({ ...node, bytes_in: 0, bytes_out: 0 }))], () => this.machines.replaceChildren(...stages.map((node, i) => machine(node, i, stages))));
    this.draw("others", others, () => this.drawOthers(others, status));
    this.requests.update();
    this.draw("events", this.live.events.at(-1) ?? null, () => this.drawEvents());
    setText(this.model, modelLine(status, stages));
    setText(this.plan, planLine(status, stages));
  }

  // Calls `change` when `key` differs from the last time: unchanged parts keep their elements.
  draw(name, key, change) {
    const text = JSON.stringify(key);
    if (this.drawn[name] === text) return;
    this.drawn[name] = text;
    change();
  }

  drawFigures(status) {
    const { history } = this.live;
    const to = history.at(-1)?.[0] ?? 0;
    const age = to - (history[0]?.[0] ?? to);
    const range = { from: to - Math.min(SPARK_SECONDS, Math.max(SPARK_SECONDS / 4, age)), to };
    const recent = (field) => points(history.filter(([at]) => at >= range.from), field);
    const [accepted, drafted] = [status.accepted_by_position, status.drafted_by_position].map((counts) => counts.reduce((a, b) => a + b, 0));
    const kv = status.kv_limit ? status.kv_tokens / status.kv_limit : 0;
    this.draw("figures", [history.at(-1), status.tokens_per_second, status.running, status.waiting, status.kv_tokens, status.ready], () => this.figures.replaceChildren(
      figure("Tokens per second", rate(status.tokens_per_second), "in the last 10 s", sparkline(recent("tokensPerSecond"), range)),
      figure("Drafts accepted", drafted ? share(accepted / drafted) : "–", drafted ? `${count(accepted)} of ${count(drafted)}` : DRAFTING[status.mtp] ?? `drafting: ${status.mtp} a step`, sparkline(recent("acceptance"), { ...range, max: 1 })),
      figure("Wait for the first token", seconds(latest(history, "first50")), `95 % below ${seconds(latest(history, "first95"))}`, sparkline(recent("first50"), range)),
      figure("Requests", count(status.running), `${limit(status.running_limit)}${count(status.waiting)} queued`, meter(status.running_limit ? status.running / status.running_limit : 0)),
      figure("Memory for conversations", share(kv), `${count(status.kv_tokens)} of ${status.kv_limit === null ? "–" : count(status.kv_limit)} tokens`, meter(kv))));
  }

  drawOthers(others, status) {
    this.othersCard.hidden = !others.length;
    this.others.replaceChildren(...others.map((node) => h("div", { class: "other" },
      h("i", { class: "dot", "data-health": node.health }), h("b", {}, node.name),
      h("span", { class: "hint" }, [node.address, node.chip].filter(Boolean).join(" · ")),
      h("span", { class: "why" }, whyUnused(node)))));
  }

  drawEvents() {
    const events = this.live.events.slice(-30).reverse();
    if (!events.length) {
      this.events.replaceChildren(h("li", { class: "hint" }, "Nothing has happened since this page was first opened."));
      return;
    }
    this.events.replaceChildren(...events.map((event) => h("li", { "data-kind": event.kind },
      h("time", {}, clockTime(event.at)), h("span", {}, event.text),
      event.seconds !== null && h("span", { class: "hint" }, `after ${seconds(event.seconds)}`))));
  }
}

const DRAFTING = { off: "drafting is off", auto: "drafting: automatic", filled: "drafting: filled" };

function limit(value) {
  return value === null ? "" : `of ${count(value)} · `;
}

function planLine({ epoch, architecture: model }, stages) {
  return [`plan ${epoch}`, stages.length && plural(stages.length, "stage"), model && plural(model.layers.length, "layer")].filter(Boolean).join(" · ");
}

function modelLine({ architecture: model }, stages) {
  const parts = stages.length ? [plural(stages.length, "machine")] : [];
  if (model) {
    parts.push(`${count(model.context)} tokens of context`);
    if (model.weight_bytes) parts.push(bytes(model.weight_bytes));
    if (model.quantization) parts.push(model.quantization);
    if (model.vision_bytes) parts.push("reads images");
  }
  return parts.join(" · ");
}

function figure(name, value, note, graphic = null) {
  return h("div", { class: "figure" }, h("span", { class: "name" }, name), h("span", { class: "value" }, value), h("span", { class: "note" }, note), graphic);
}

function meter(part) {
  return h("span", { class: "meter", "aria-hidden": "true" }, h("i", { vars: { "--part": `${Math.min(100, part * 100)}%` } }));
}

function layerLegend() {
  return h("p", { class: "layer-legend technical", "aria-hidden": "true" },
    h("span", {}, h("i", { class: "layer g" }), "GDN layer (linear attention)"), h("span", {}, h("i", { class: "layer a" }), "attention layer"), h("span", {}, h("i", { class: "layer head" }), "MTP head (drafts the next tokens)"));
}

// ---- the strip

function drawStrip(strip, status, stages) {
  const model = status.architecture;
  if (!model) {
    strip.replaceChildren();
    return;
  }
  const groups = stages.length ? stages.map((node) => ({ node, ...range(node.span) })) : [{ node: null, start: 0, end: model.layers.length }];
  strip.replaceChildren(...groups.map((group, i) => {
    const cells = [...model.layers.slice(group.start, group.end)].map((kind, k) => h("i", { class: `layer ${kind}`, title: `Layer ${group.start + k}: ${kind === "g" ? "GDN" : "attention"}` }));
    const last = i === groups.length - 1;
    if (last && model.has_head) cells.push(h("i", { class: "layer head", title: "MTP head" }));
    const name = group.node ? `${group.node.name}: layers ${group.start} to ${group.end - 1}` : "No machine holds layers yet";
    return h("div", { class: "span", "data-health": group.node?.health ?? "none", vars: { "--grow": group.end - group.start + (last && model.has_head ? 1 : 0) } },
      h("div", { class: "cells", role: "img", "aria-label": name }, cells),
      h("span", { class: "span-label", "aria-hidden": "true" }, group.node ? group.node.name : "not loaded", " ", group.node && h("span", { class: "hint" }, layersText(group.node.span).replace(/^layers? /, ""))));
  }));
}

function layersText(span) {
  const { start, end } = range(span);
  return end - start === 1 ? `layer ${start}` : `layers ${span}`;
}

function range(span) {
  const [start, end] = span.split("-").map(Number);
  return { start, end: (end ?? start) + 1 };
}

// ---- machines

function machine(node, index, stages) {
  const longest = Math.max(...stages.map((one) => one.stage_ms ?? 0), 1e-9);
  const bounds = stages.length > 1 && node.stage_ms === longest && stages.some((one) => one.busy > 0);
  const next = stages[index + 1];
  return h("li", { class: "machine", "data-health": node.health },
    h("div", { class: "machine-head" },
      h("i", { class: "dot", "data-health": node.health }), h("b", {}, node.name),
      h("span", { class: "badge" }, layersText(node.span)),
      bounds && h("span", { class: "badge warn technical", title: "The other machines wait for this one" }, "longest step")),
    h("p", { class: "hint" }, [node.chip, node.address ?? "in the coordinator", node.failure_count && plural(node.failure_count, "recent failure")].filter(Boolean).join(" · ")),
    node.health === "loading" ? loading(node) : busyTime(node),
    memory(node),
    h("p", { class: "hint facts technical" }, [
      node.stage_ms !== null && `step ${node.stage_ms.toFixed(node.stage_ms < 10 ? 2 : 1)} ms`,
      node.layers && `layers: ${node.layers.split(";")[0]}`,
      node.pinned && `pinned to ${node.pinned}`,
      node.bytes_per_second && `memory read with ${bytes(node.bytes_per_second)}/s`,
      node.ready_at !== null && `here since ${clockTime(node.ready_at)}`,
      node.version,
    ].filter(Boolean).join(" · ")),
    h("p", { class: "hint wire technical" }, [
      next ? `to ${next.name}` : node.address && "to the coordinator",
      node.link_ms !== null && `${node.link_ms.toFixed(2)} ms a hop`,
      node.link_bytes_per_second && `${bytes(node.link_bytes_per_second)}/s possible`,
      node.bytes_out > 0 && `${bytes(node.bytes_in + node.bytes_out)} in all`,
    ].filter(Boolean).join(" · ")));
}

function busyTime(node) {
  return h("div", { class: "stage-time" },
    h("div", { class: "line" }, h("span", {}, "Busy"), h("b", {}, share(node.busy)), h("span", { class: "hint" }, "of the last 10 s")), meter(node.busy ?? 0));
}

function loading(node) {
  const part = node.loaded ?? 0;
  const from = { hub: "from the hub", coordinator: "from the coordinator", disk: "from its disk" }[node.weights_from] ?? "";
  const text = node.load_bytes ? `${bytes(node.loaded_bytes)} of ${bytes(node.load_bytes)} ${from}` : share(part);
  return h("div", { class: "stage-time" },
    h("div", { class: "line" }, h("span", {}, "Loading"), h("b", {}, text)),
    h("progress", { max: 1, value: part, "aria-label": `Loading ${node.name}` }));
}

function memory(node) {
  const limit = node.memory_limit ?? node.memory_used;
  const weights = Math.min(node.weight_bytes, node.memory_used);
  const prefix = Math.min(node.prefix_bytes, node.memory_used - weights);
  const kv = node.memory_used - weights - prefix;
  const free = Math.max(0, limit - node.memory_used);
  const parts = [["weights", weights], ["conversations and work", kv], ["prompts kept", prefix], ["free", free]];
  const width = (value) => `${(value / Math.max(1, limit)) * 100}%`;
  return h("div", { class: "memory" },
    h("div", { class: "line" }, h("span", {}, "Memory"), h("b", {}, bytes(node.memory_used)), h("span", { class: "hint" }, node.memory_limit ? `of ${bytes(node.memory_limit)}` : "")),
    h("span", { class: "stack", "aria-hidden": "true" }, parts.map(([name, value]) => h("i", { class: `mem-${name[0].toLowerCase()}`, vars: { "--part": width(value) } }))),
    h("ul", { class: "mem-legend" }, parts.map(([name, value]) => h("li", { class: `mem-${name[0].toLowerCase()}` }, `${name} ${bytes(value)}`))));
}

const WHY = {
  idle: "Ready. It can be used.",
  draining: "It asked to leave.",
  refused: "It cannot serve this model.",
  loading: "It loads.",
  ready: "",
};

function whyUnused(node) {
  const detail = node.detail ? `${node.detail[0].toUpperCase()}${node.detail.slice(1)}` : "";
  return node.health === "lost" ? `Lost${node.detail && `: ${node.detail}`}. Start mtp-worker on it again.` : detail || WHY[node.health];
}
