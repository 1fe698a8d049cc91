// Models: what is on this machine, the change of the served model, and invitations for machines.

import { callAdmin, loadModel, sentence } from "./admin.js";
import { copyText, h, setText } from "./dom.js";
import { bytes, clockTime, count } from "./format.js";

const HEADS = { complete: "drafts tokens (MTP head)", incomplete: "MTP head incomplete: no drafts", missing: "no MTP head: no drafts" };
const BY_HAND = "mtp-coord token create\nmtp-worker --listen 0.0.0.0:50505 --join TOKEN";

export class ModelsView {
  constructor(root) {
    this.local = h("ul", { class: "models" });
    this.localNote = h("p", { class: "hint", role: "status" });
    this.repo = h("input", { type: "text", name: "repo", required: true, placeholder: "Qwen/Qwen3.5-4B", "aria-label": "Name of a model on Hugging Face" });
    this.hubPanel = h("div", { class: "model-panel", role: "status" });
    this.invitation = h("div", {});
    this.inviteNote = h("p", { class: "hint", role: "status" });
    this.inviteButton = h("button", { onclick: () => this.invite() }, "Create the join command");
    this.byHand = h("div", { hidden: true }, h("p", { class: "hint" }, "The first command runs beside the coordinator and prints a token. The second runs on the new machine, with this token."), copyable("commands for the new machine", BY_HAND));
    root.append(h("h2", { class: "hidden" }, "Models"),
      card("On this machine", "local-title", this.localNote, this.local),
      (this.hubCard = card("From Hugging Face", "hub-title",
        h("form", { class: "row search", onsubmit: (event) => { event.preventDefault(); this.load(this.hubPanel, this.repo.value.trim()); } },
          this.repo, h("button", { type: "submit" }, "Download and use")), this.hubPanel)),
      card("Add a machine", "add-title", this.inviteNote,
        h("div", { class: "row" }, this.inviteButton), this.invitation, this.byHand));
  }

  setVisible(visible) {
    if (!visible) return;
    this.refresh();
    this.checkInvitations();
  }

  // ---- models

  async refresh() {
    this.hubCard.hidden = !await guarded(this.localNote, async () => {
      const { served, models } = await callAdmin("GET", "/v1/cluster/models");
      setText(this.localNote, "");
      this.local.replaceChildren(...models.map((model) => this.localModel(model, model.name === served)));
    });
  }

  localModel(model, served) {
    const facts = model.problem || !model.layers ? [] : [bytes(model.nbytes), `${count(model.layers)} layers`, `up to ${count(model.context)} tokens`, model.quantization || "not quantized", HEADS[model.head]];
    const panel = h("div", { class: "model-panel", role: "status" });
    if (model.problem) showNote(panel, model.problem, true);
    const button = !served && !model.problem && h("button", { "aria-label": `Use: ${model.name}`, onclick: () => this.load(panel, model.name) }, "Use this model");
    return h("li", { class: "model-row" },
      h("div", { class: "line" }, h("b", {}, model.name), served && h("span", { class: "badge" }, "in use"), h("span", { class: "hint" }, facts.join(" · ")),
        h("span", { class: "actions" }, button)), panel);
  }

  async load(panel, name) {
    try {
      await loadModel(name, (report) => panel.replaceChildren(...loadParts(report)));
      showNote(panel, "It is in use now.");
      this.refresh();
    } catch (error) {
      showNote(panel, error.message, true);
    }
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
      this.invitation.replaceChildren(copyable("command for the new machine", command));
    });
    this.inviteButton.disabled = false;
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

function copyable(name, text) {
  const copy = h("button", { "aria-label": `Copy: ${name}`, onclick: () => copyText(text, copy) }, "Copy");
  return h("div", { class: "invitation" }, h("pre", { tabindex: "0", "aria-label": sentence(name) }, h("code", {}, text)), copy);
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
