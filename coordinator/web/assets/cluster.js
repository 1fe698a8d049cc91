// The cluster: key figures, the pipeline over the model's layers, its machines, idle workers and events.

import { sparkline } from "./charts.js";
import { h, setText } from "./dom.js";
import { bytes, clockTime, count, plural, rate, seconds, share } from "./format.js";
import { latest, points } from "./samples.js";

const SPARK_SECONDS = 120;
const REQUESTS = 12;
const OUTCOMES = { stop: "done", length: "done, at the length limit", tool_calls: "done, with a tool call" };

export class ClusterView {
  constructor(root, live) {
    this.live = live;
    this.drawn = {};
    this.figures = h("div", { class: "figures" });
    this.strip = h("div", { class: "strip" });
    this.machines = h("ol", { class: "machines" });
    this.others = h("div", { class: "others" });
    this.events = h("ol", { class: "events" });
    this.requests = h("tbody", {});
    root.append(
      h("h2", { class: "hidden" }, "Cluster"),
      this.figures,
      h("section", { class: "card", "aria-labelledby": "pipeline-title" },
        h("div", { class: "card-head" }, h("h3", { id: "pipeline-title" }, "Pipeline"), (this.plan = h("span", { class: "hint" }))),
        h("p", { class: "hint" }, "Each token passes these machines in order. Each machine holds a part of the model's layers."),
        (this.rounding = h("p", { class: "hint", hidden: true })),
        this.strip, layerLegend(), this.machines),
      (this.othersCard = h("section", { class: "card", "aria-labelledby": "others-title", hidden: true },
        h("div", { class: "card-head" }, h("h3", { id: "others-title" }, "Machines that are not used")), this.others)),
      (this.requestsCard = h("section", { class: "card", "aria-labelledby": "requests-title", hidden: true },
        h("div", { class: "card-head" }, h("h3", { id: "requests-title" }, "Requests")),
        h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "List of requests" }, h("table", { class: "plain requests" }, h("thead", {}, h("tr", {}, ["Began", "Kind", "Prompt tokens", "Answer tokens", "First token after", "Time", "State"].map((text, i) => h("th", { scope: "col", class: i > 1 && i < 6 ? "number" : "" }, text)))), this.requests)))),
      h("section", { class: "card", "aria-labelledby": "events-title" },
        h("div", { class: "card-head" }, h("h3", { id: "events-title" }, "Events")), this.events));
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
    this.draw("requests", [this.live.openRequests, this.live.openRequests.length && Math.floor(this.live.now()), this.live.endedRequests.at(-1)?.number ?? 0], () => this.drawRequests());
    this.draw("events", this.live.events.at(-1) ?? null, () => this.drawEvents());
    setText(this.plan, planLine(status, stages));
    setText(this.rounding, status.rounding && `${status.rounding[0].toUpperCase()}${status.rounding.slice(1)}.`);
    this.rounding.hidden = !status.rounding;
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
    const recent = (field) => points(history.slice(-SPARK_SECONDS), field);
    const [accepted, drafted] = [status.accepted_by_position, status.drafted_by_position].map((counts) => counts.reduce((a, b) => a + b, 0));
    const kv = status.kv_limit ? status.kv_tokens / status.kv_limit : 0;
    this.draw("figures", [history.at(-1), status.tokens_per_second, status.running, status.waiting, status.kv_tokens, status.ready], () => this.figures.replaceChildren(
      figure("Tokens per second", rate(status.tokens_per_second), "in the last 10 s", sparkline(recent("tokensPerSecond"), range)),
      figure("Drafts accepted", drafted ? share(accepted / drafted) : "–", drafted ? `${count(accepted)} of ${count(drafted)}` : DRAFTING[status.mtp] ?? `drafting: ${status.mtp} a step`, sparkline(recent("acceptance"), { ...range, max: 1 })),
      figure("Wait for the first token", seconds(latest(history, "first50")), `95 % below ${seconds(latest(history, "first95"))}`, sparkline(recent("first50"), range)),
      figure("Requests", count(status.running), `${limit(status.running_limit)}${count(status.waiting)} queued`, meter(status.running_limit ? status.running / status.running_limit : 0)),
      figure("Memory for conversations", share(kv), `${count(status.kv_tokens)} of ${status.kv_limit === null ? "–" : count(status.kv_limit)} tokens (K/V)`, meter(kv))));
  }

  drawOthers(others, status) {
    this.othersCard.hidden = !others.length;
    this.others.replaceChildren(...others.map((node) => h("div", { class: "other" },
      h("i", { class: "dot", "data-health": node.health }), h("b", {}, node.name),
      h("span", { class: "hint" }, [node.address, node.chip, node.bytes_per_second && `${bytes(node.bytes_per_second)}/s of memory`].filter(Boolean).join(" · ")),
      h("span", { class: "why" }, whyUnused(node)))));
  }

  drawRequests() {
    const rows = [...this.live.openRequests.toReversed(), ...this.live.endedRequests.toReversed()].slice(0, REQUESTS);
    this.requestsCard.hidden = !rows.length;
    this.requests.replaceChildren(...rows.map((one) => h("tr", {},
      h("td", {}, clockTime(one.began_at)), h("td", {}, one.endpoint),
      h("td", { class: "number" }, one.prompt_tokens ? count(one.prompt_tokens) : "–"), h("td", { class: "number" }, count(one.tokens)),
      h("td", { class: "number" }, seconds(one.first_token)), h("td", { class: "number" }, seconds(one.seconds ?? Math.max(0, this.live.now() - one.began_at))),
      h("td", {}, (OUTCOMES[one.outcome] ?? one.outcome) || (one.tokens ? "answering" : "waiting")))));
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

function planLine(status, stages) {
  const parts = [`plan ${status.epoch}`];
  if (stages.length) parts.push(plural(stages.length, "stage"));
  const model = status.architecture;
  if (model) {
    parts.push(plural(model.layers.length, "layer"), `${count(model.context)} tokens of context`);
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
  return h("p", { class: "layer-legend", "aria-hidden": "true" },
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
      bounds && h("span", { class: "badge warn", title: "The other machines wait for this one" }, "longest step")),
    h("p", { class: "hint" }, [node.chip, node.bytes_per_second && `${bytes(node.bytes_per_second)}/s of memory`, node.address ?? "in the coordinator", node.pinned && `pinned to ${node.pinned}`].filter(Boolean).join(" · ")),
    node.health === "loading" ? loading(node) : stageTime(node, longest),
    memory(node),
    machineFacts(node),
    h("p", { class: "hint wire" }, [
      next ? `to ${next.name}` : node.address && "to the coordinator",
      node.link_ms !== null && `${node.link_ms.toFixed(2)} ms a hop`,
      node.link_bytes_per_second && `${bytes(node.link_bytes_per_second)}/s possible`,
      node.bytes_out > 0 && `${bytes(node.bytes_in + node.bytes_out)} in all`,
      node.failure_count && plural(node.failure_count, "recent failure"),
    ].filter(Boolean).join(" · ")));
}

function machineFacts(node) {
  const facts = [
    node.ready_at !== null && `here since ${clockTime(node.ready_at)}`,
    node.layers && `layers: ${node.layers.split(";")[0]}`,
    node.version,
  ].filter(Boolean);
  return facts.length ? h("p", { class: "hint facts" }, facts.join(" · ")) : null;
}

function stageTime(node, longest) {
  return h("div", { class: "stage-time" },
    h("div", { class: "line" }, h("span", { title: "The time that this machine needs for its part of one step" }, "Step"), h("b", {}, node.stage_ms === null ? "–" : `${node.stage_ms.toFixed(node.stage_ms < 10 ? 2 : 1)} ms`),
      node.busy !== null && h("span", { class: "hint" }, `computed ${share(node.busy)} of the last 10 s`)),
    h("span", { class: "meter", "aria-hidden": "true" }, h("i", { vars: { "--part": `${((node.stage_ms ?? 0) / longest) * 100}%` } })));
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
