// Models: what is on this machine, the change of the served model, and invitations for machines.

import { callAdmin } from "./admin.js";
import { copyText, h, setText } from "./dom.js";
import { bytes, clockTime, count } from "./format.js";

const HEADS = { complete: "MTP head", incomplete: "MTP head incomplete", missing: "no MTP head" };
const POLL_MS = 400;

export class ModelsView {
  constructor(root) {
    this.local = h("ul", { class: "models" });
    this.localNote = h("p", { class: "hint", role: "status" });
    this.repo = h("input", { type: "text", name: "repo", required: true, placeholder: "Qwen/Qwen3.5-4B", "aria-label": "Repo of the hub" });
    this.hubPanel = h("div", { class: "model-panel", role: "status" });
    this.invitation = h("div", { class: "invitation" });
    this.inviteNote = h("p", { class: "hint", role: "status" }, "The line admits one machine within an hour. It is a secret until it is used.");
    root.append(h("h2", { class: "hidden" }, "Models"),
      card("On this machine", "local-title", this.localNote, this.local),
      card("From the hub", "hub-title",
        h("form", { class: "row search", onsubmit: (event) => { event.preventDefault(); this.load(this.hubPanel, this.repo.value.trim()); } },
          this.repo, h("button", { type: "submit" }, "Download and load")), this.hubPanel),
      card("Add a machine", "add-title", this.inviteNote,
        h("div", { class: "row" }, (this.inviteButton = h("button", { onclick: () => this.invite() }, "Create a line"))), this.invitation));
  }

  setVisible(visible) {
    if (visible) this.refresh();
  }

  // ---- models

  async refresh() {
    await guarded(this.localNote, async () => {
      const { served, models } = await callAdmin("GET", "/v1/cluster/models");
      setText(this.localNote, "");
      this.local.replaceChildren(...models.map((model) => this.localModel(model, model.name === served)));
    });
  }

  localModel(model, served) {
    const facts = model.problem || !model.layers ? [] : [bytes(model.nbytes), `${count(model.layers)} layers`, `${count(model.context)} tokens`, model.quantization || "not quantized", HEADS[model.head]];
    const panel = h("div", { class: "model-panel", role: "status" });
    if (model.problem) showNote(panel, model.problem, true);
    const button = !served && !model.problem && h("button", { "aria-label": `Load: ${model.name}`, onclick: () => this.load(panel, model.name) }, "Load");
    return h("li", { class: "model-row" },
      h("div", { class: "line" }, h("b", {}, model.name), served && h("span", { class: "badge" }, "served"), h("span", { class: "hint" }, facts.join(" · ")),
        h("span", { class: "actions" }, button)), panel);
  }

  // Serves another model, downloaded first if needed. Open answers end first; the page's stream ends and comes back
  // with the new model.
  async load(panel, name) {
    try {
      let report = await callAdmin("POST", "/v1/models/load", { model: name });
      while (report.phase !== "ready" && report.phase !== "failed") {
        panel.replaceChildren(...loadParts(report));
        await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
        report = await callAdmin("GET", "/v1/models/load");
      }
      if (report.phase === "failed") throw new Error(sentence(report.error));
      showNote(panel, "It serves.");
      this.refresh();
    } catch (error) {
      showNote(panel, error.message, true);
    }
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

function showNote(panel, text, bad = false) {
  panel.replaceChildren(h("p", { class: bad ? "error" : "hint" }, text));
}

function loadParts(report) {
  const part = report.total ? report.done / report.total : null;
  const text = part === null ? "" : `: ${bytes(report.done)} of ${bytes(report.total)}`;
  return [h("p", { class: "hint" }, `${sentence(report.phase)}${text}`), h("progress", { max: 1, value: part, "aria-label": `Loading ${report.model}` })];
}

// The coordinator's texts begin with a small letter.
function sentence(text) {
  return text[0].toUpperCase() + text.slice(1);
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
