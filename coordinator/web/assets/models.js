// Models: what is on this machine, what the hub offers, what fits this cluster, downloads, and invitations for machines.

import { callAdmin } from "./admin.js";
import { copyText, h, s, setText } from "./dom.js";
import { bytes, clockTime, count, rate, share } from "./format.js";

const HEADS = { complete: "MTP head", incomplete: "MTP head incomplete", missing: "no MTP head" };
const POLL_MS = 400;

export class ModelsView {
  constructor(root, live) {
    this.live = live;
    this.drawn = "";
    this.running = 0;
    this.local = h("ul", { class: "models" });
    this.localNote = h("p", { class: "hint", role: "status" });
    this.found = h("ul", { class: "models" });
    this.foundNote = h("p", { class: "hint", role: "status" }, "Qwen3.5, Qwen3.6 and Qwen3.8 come first: their checkpoints have an MTP head.");
    this.query = h("input", { type: "search", name: "search", placeholder: "Name of a model, such as Qwen3.5-4B", "aria-label": "Search the hub" });
    this.jobs = h("ul", { class: "jobs" });
    this.jobsCard = card("Downloads", "jobs-title", this.jobs);
    this.invitation = h("div", { class: "invitation" });
    this.inviteNote = h("p", { class: "hint", role: "status" }, "The line admits one machine within an hour. It is a secret until it is used.");
    root.append(h("h2", { class: "hidden" }, "Models"), this.jobsCard,
      card("On this machine", "local-title", this.localNote, this.local),
      card("On the hub", "hub-title",
        h("form", { class: "row search", onsubmit: (event) => { event.preventDefault(); this.search(); } }, this.query, h("button", { type: "submit" }, "Search")),
        this.foundNote, this.found),
      card("Add a machine", "add-title", this.inviteNote,
        h("div", { class: "row" }, (this.inviteButton = h("button", { onclick: () => this.invite() }, "Create a line"))), this.invitation));
    this.jobsCard.hidden = true;
  }

  setVisible(visible) {
    if (visible) this.refresh();
  }

  update() {
    const jobs = this.live.status?.jobs ?? [];
    const text = JSON.stringify(jobs);
    if (text === this.drawn) return;
    this.drawn = text;
    this.jobsCard.hidden = !jobs.length;
    this.jobs.replaceChildren(...jobs.toReversed().map((job) => this.job(job)));
    const running = jobs.filter((job) => job.state === "running").length;
    if (running < this.running) this.refresh(); // a download has ended: there may be a new model
    this.running = running;
  }

  // ---- models

  async refresh() {
    await guarded(this.localNote, async () => {
      const { served, models } = await callAdmin("GET", "/v1/cluster/models");
      this.names = models.map((model) => model.name);
      setText(this.localNote, "");
      this.local.replaceChildren(...models.map((model) => this.localModel(model, model.name === served)));
    });
  }

  localModel(model, served) {
    const facts = model.problem ? [] : [bytes(model.nbytes), `${count(model.layers)} layers`, `${count(model.context)} tokens`, model.quantization || "not quantized", HEADS[model.head]];
    const entry = modelEntry(model.name, facts, served && "served");
    if (model.problem) entry.note(model.problem, true);
    else {
      if (!served) entry.action("Load", () => this.load(entry, model.name));
      entry.action("Fit", () => this.fit(entry, model.name));
    }
    return entry.element;
  }

  async search() {
    setText(this.foundNote, "Searching the hub.");
    await guarded(this.foundNote, async () => {
      const { models } = await callAdmin("GET", `/v1/cluster/hub?search=${encodeURIComponent(this.query.value)}`);
      setText(this.foundNote, models.length ? "" : "The hub has no model with this name.");
      this.found.replaceChildren(...models.map((model) => this.hubModel(model)));
    });
  }

  hubModel(model) {
    const entry = modelEntry(model.name, [`${count(model.downloads)} downloads a month`, model.mlx ? "for MLX" : "as published"]);
    entry.action("Fit", () => this.fit(entry, model.name));
    entry.action("Download", () => this.download(entry, model.name));
    return entry.element;
  }

  async fit(entry, name) {
    entry.note("Reading the headers.");
    try {
      const { model, fit } = await callAdmin("GET", `/v1/cluster/fit?model=${encodeURIComponent(name)}`);
      entry.panel.replaceChildren(...fitParts(model, fit));
    } catch (error) {
      entry.note(error.message, true);
    }
  }

  // Serves another model. Open answers end first; the page's stream ends and comes back with the new model.
  async load(entry, name) {
    try {
      let report = await callAdmin("POST", "/v1/models/load", { model: name });
      while (report.phase !== "ready" && report.phase !== "failed") {
        entry.panel.replaceChildren(...loadParts(report));
        await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
        report = await callAdmin("GET", "/v1/models/load");
      }
      if (report.phase === "failed") throw new Error(sentence(report.error));
      entry.note("It serves.");
      this.refresh();
    } catch (error) {
      entry.note(error.message, true);
    }
  }

  // ---- downloads

  async download(entry, model) {
    try {
      await callAdmin("POST", "/v1/cluster/jobs", { model });
      entry.note("Started. The progress is above.");
    } catch (error) {
      entry.note(error.message, true);
    }
  }

  job(job) {
    const running = job.state === "running";
    const part = job.total ? job.done / job.total : null;
    const title = `Download: ${job.model}`;
    const state = running ? (part === null ? "starting" : `${bytes(job.done)} of ${bytes(job.total)}, ${share(part)}`) : job.state;
    return h("li", { "data-state": job.state },
      h("div", { class: "line" }, h("b", {}, title), h("span", { class: "hint" }, state),
        running && h("button", { class: "quiet", "aria-label": `Cancel: ${title}`, onclick: () => this.cancel(job.number) }, "Cancel")),
      running && h("progress", { max: 1, value: part, "aria-label": title }),
      job.detail && h("p", { class: job.state === "failed" ? "error" : "hint" }, job.detail));
  }

  cancel(number) {
    return guarded(this.localNote, () => callAdmin("DELETE", `/v1/cluster/jobs/${number}`));
  }

  // ---- machines

  async invite() {
    this.inviteButton.disabled = true;
    await guarded(this.inviteNote, async () => {
      const { command, expires_at: until } = await callAdmin("POST", "/v1/cluster/invitations", {});
      setText(this.inviteNote, `Run this on the new machine. It admits one machine until ${clockTime(until)}.`);
      const copy = h("button", { "aria-label": "Copy: line for the new machine", onclick: () => copyText(command, copy) }, "Copy");
      this.invitation.replaceChildren(h("pre", { tabindex: "0", "aria-label": "Line for the new machine" }, h("code", {}, command)), copy);
    });
    this.inviteButton.disabled = false;
  }
}

function card(title, id, ...children) {
  return h("section", { class: "card", "aria-labelledby": id }, h("div", { class: "card-head" }, h("h3", { id }, title)), children);
}

// One row of a list of models: its facts, its actions, and a panel for what an action shows.
function modelEntry(name, facts, badge) {
  const actions = h("span", { class: "actions" });
  const panel = h("div", { class: "model-panel", role: "status" });
  const element = h("li", { class: "model-row" },
    h("div", { class: "line" }, h("b", {}, name), badge && h("span", { class: "badge" }, badge), h("span", { class: "hint" }, facts.join(" · ")), actions), panel);
  return {
    element,
    panel,
    action: (label, run) => actions.append(h("button", { "aria-label": `${label}: ${name}`, onclick: run }, label)),
    note: (text, bad = false) => panel.replaceChildren(h("p", { class: bad ? "error" : "hint" }, text)),
  };
}

function loadParts(report) {
  const part = report.total ? report.done / report.total : null;
  const text = part === null ? "" : `: ${bytes(report.done)} of ${bytes(report.total)}`;
  const note = report.note ? [h("p", { class: "hint" }, sentence(report.note))] : [];
  return [h("p", { class: "hint" }, `${sentence(report.phase)}${text}`), ...note, h("progress", { max: 1, value: part, "aria-label": `Loading ${report.model}` })];
}

// The coordinator's notes begin with a small letter.
function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
}

function fitParts(model, fit) {
  if (fit.problem) return [h("p", { class: "error" }, `It does not fit this cluster: ${fit.problem}`)];
  const machines = fit.stages.map((stage) => `${stage.node}: layers ${stage.layers}, ${bytes(stage.weight_bytes)}`);
  return [
    h("p", {}, `Fits with up to ${count(fit.context)} of ${count(model.context)} tokens of context. By the measured memory speed, one answer without drafts has about ${rate(fit.tokens_per_second)} tokens/s. ${model.head === "complete" ? "Its MTP head is complete." : "It has no complete MTP head, so nothing is drafted."}`),
    h("p", { class: "hint" }, fit.contexts.map(([tokens, fits]) => `${count(tokens)} tokens: ${fits ? "fits" : "does not fit"}`).join(" · ")),
    h("p", { class: "hint" }, machines.join(" · ")),
  ];
}

// Runs `work`; an error becomes the text of `note`.
async function guarded(note, work) {
  try {
    await work();
    note.classList.remove("error");
  } catch (error) {
    setText(note, error.message);
    note.classList.add("error");
  }
}
