// Models: what is on this machine and what fits, the change of the served model, and invitations for machines.

import { callAdmin, loadModel, sentence } from "./admin.js";
import { copyable, h, setText } from "./dom.js";
import { bytes, clockTime, count, rate } from "./format.js";

const HEADS = { complete: "drafts tokens (MTP head)", incomplete: "MTP head incomplete: no drafts", missing: "no MTP head: no drafts" };
const BY_HAND = "mtp-coord token create";

export class ModelsView {
  constructor(root, live) {
    this.live = live;
    this.free = Infinity; // bytes of the disk of downloads
    this.predicted = ""; // the machines for which models were listed
    this.waiting = h("p", { class: "hint", role: "status" }, "Reading the models of this machine…");
    this.disk = h("span", { class: "hint" });
    this.local = h("ul", { class: "models" });
    this.localNote = h("p", { class: "hint", role: "status" });
    this.repo = h("input", { type: "text", name: "repo", required: true, placeholder: "Qwen/Qwen3.5-4B", "aria-label": "Name of a model on Hugging Face" });
    this.hubPanel = h("div", { class: "model-panel", role: "status" });
    this.invitation = h("div", {});
    this.inviteNote = h("p", { class: "hint", role: "status" });
    this.inviteButton = h("button", { hidden: true, onclick: () => this.invite() }, "Create the join command");
    this.byHand = h("div", { hidden: true }, h("p", { class: "hint" }, "Run this beside the coordinator. It prints the line for the new machine, ", h("code", { class: "word" }, "mtp-worker --join TOKEN"), "."), toCopy("Command beside the coordinator", BY_HAND));
    this.fitting = h("ul", { class: "models fitting" });
    this.fittingNote = h("p", { class: "hint", role: "status" });
    this.fittingCard = card("Fits your machines", "fitting-title", this.fittingNote, this.fitting);
    this.fittingCard.hidden = true;
    this.hubCard = card("From Hugging Face", "hub-title",
      h("form", { class: "row search", onsubmit: (event) => { event.preventDefault(); this.load(this.hubPanel, this.repo.value.trim()); } },
        this.repo, h("button", { type: "submit" }, "Download and use")), this.hubPanel);
    const localCard = card("On this machine", "local-title", this.localNote, this.local);
    localCard.firstChild.append(this.disk);
    this.panels = h("div", { class: "panels", hidden: true },
      h("div", { class: "group" }, localCard, this.hubCard),
      card("Add a machine", "add-title", this.inviteNote, h("div", { class: "row" }, this.inviteButton), this.invitation, this.byHand));
    root.append(h("h2", { class: "hidden" }, "Models"), this.waiting, this.panels, this.fittingCard);
  }

  // A card is shown when the cards above it are filled, so that nothing moves.
  async setVisible(visible) {
    if (!visible || this.loading) return; // the list that shows the progress stays
    const invitations = this.checkInvitations();
    await this.refresh();
    this.waiting.hidden = true;
    this.panels.hidden = false;
    await invitations;
    this.listFitting();
  }

  // ---- models

  async refresh() {
    this.hubCard.hidden = !await guarded(this.localNote, async () => {
      const { served, models, free_bytes: free } = await callAdmin("GET", "/v1/cluster/models");
      this.free = free ?? Infinity;
      setText(this.localNote, "");
      setText(this.disk, free === undefined ? "" : `${bytes(free)} free on its disk`);
      this.local.replaceChildren(...models.map((model) => this.localModel(model, model.name === served)));
    });
  }

  localModel(model, served) {
    const facts = model.problem || !model.layers ? [] : [bytes(model.nbytes), `${count(model.layers)} layers`, `up to ${count(model.context)} tokens`, model.quantization || "not quantized", HEADS[model.head]];
    const panel = h("div", { class: "model-panel", role: "status" });
    if (model.problem) showNote(panel, model.problem, true);
    const button = !served && !model.problem && h("button", { "aria-label": `Use: ${model.name}`, onclick: () => this.load(panel, model.name) }, "Use this model");
    return h("li", { class: "model-row" },
      h("div", { class: "line" }, h("b", {}, model.name), served && h("span", { class: "badge" }, "in use"),
        h("span", { class: "actions" }, button)), h("p", { class: "hint" }, facts.join(" · ")), panel);
  }

  async load(panel, name) {
    this.loading = true;
    try {
      await loadModel(name, (report) => panel.replaceChildren(...loadParts(report)));
      showNote(panel, "It is in use now.");
      this.refresh();
    } catch (error) {
      showNote(panel, error.message, true);
    }
    this.loading = false;
  }

  // The models that fit, predicted again when the machines have changed. The card is hidden without one, and where a
  // model cannot be loaded.
  async listFitting() {
    const machines = JSON.stringify(this.live.status?.nodes.map((node) => [node.name, node.chip, node.memory_limit, node.health === "refused"]));
    if (machines === this.predicted && !this.hubCard.hidden) return;
    this.predicted = machines;
    this.fittingCard.hidden = this.hubCard.hidden;
    if (!this.fitting.children.length) setText(this.fittingNote, "Predicting the speeds of published models…");
    const found = this.hubCard.hidden ? NONE : await fittingModels();
    const { models, measured } = found;
    if (found === NONE) this.predicted = "";
    const unsure = measured.length ? ` That of ${measured.join(", ")} follows from a measurement at the start of its worker, which is too low if the machine was busy.` : "";
    setText(this.fittingNote, `Published models, the largest first. The speed of one answer, without and with drafts, is predicted from the chips.${unsure}`);
    this.fitting.replaceChildren(...models.map((model) => this.fittingModel(model)));
    this.fittingCard.hidden = !models.length;
  }

  fittingModel(model) {
    const panel = h("div", { class: "model-panel", role: "status" });
    const facts = [model.download > model.nbytes ? `${bytes(model.nbytes)} in memory, ${bytes(model.download)} to download` : bytes(model.nbytes), `${count(model.context)} tokens of context`, `${rate(model.plain)} → ${rate(model.drafted)} tokens/s`,
      model.machines === 1 ? model.plan : `${model.plan} machines`, model.head === null ? "no MTP head" : `MTP head ${model.head ? "included" : "fetched"}`];
    return h("li", { class: "model-row" }, h("b", { title: model.repo }, model.name, model.best && h("span", { class: "hint" }, " recommended")), facts.map((fact) => h("span", {}, fact)),
      model.download > this.free ? h("span", { class: "hint" }, "the disk is too full") : h("button", { "aria-label": `Download and use: ${model.name}`, onclick: () => this.load(panel, model.repo) }, "Download and use"), panel);
  }

  // ---- machines

  // Tells before the click what an invitation needs.
  async checkInvitations() {
    let problem = "This key may not invite.";
    await guarded(this.inviteNote, async () => {
      problem = (await callAdmin("GET", "/v1/cluster/invitations")).problem;
      setText(this.inviteNote, problem ? `${sentence(problem)}.` : "One command joins one machine, within an hour. It is a secret until it is used.");
    });
    this.inviteButton.hidden = problem !== "";
    this.byHand.hidden = problem === "";
  }

  async invite() {
    this.inviteButton.disabled = true;
    await guarded(this.inviteNote, async () => {
      const { command, expires_at: until } = await callAdmin("POST", "/v1/cluster/invitations", {});
      setText(this.inviteNote, `Run this on the new machine. It admits one machine until ${clockTime(until)}.`);
      this.invitation.replaceChildren(toCopy("Command for the new machine", command));
    });
    this.inviteButton.disabled = false;
  }
}

const NONE = { models: [], measured: [] };

async function fittingModels() {
  try {
    return await callAdmin("GET", "/v1/cluster/recommendations");
  } catch {
    return NONE; // this key may not ask
  }
}

function card(title, id, ...children) {
  return h("section", { class: "card", "aria-labelledby": id }, h("div", { class: "card-head" }, h("h3", { id }, title)), children);
}

function showNote(panel, text, bad = false) {
  panel.replaceChildren(h("p", { class: bad ? "error" : "hint" }, text));
}

function loadParts(report) {
  const part = report.total ? report.done / report.total : null;
  const text = report.phase === "finishing answers" ? `, for at most ${report.answer_seconds} s` : part === null ? "" : `: ${bytes(report.done)} of ${bytes(report.total)}`;
  return [h("p", { class: "hint" }, `${sentence(report.phase)}${text}`), h("progress", { max: 1, value: part, "aria-label": `Loading ${report.model}` })];
}

function toCopy(name, text) {
  return h("div", { class: "invitation" }, copyable(name, text).toReversed());
}

// Runs `work` and returns true. An error becomes the text of `note`.
async function guarded(note, work) {
  try {
    await work();
    note.classList.remove("error");
    return true;
  } catch (error) {
    setText(note, error.message);
    note.classList.add("error");
    return false;
  }
}
