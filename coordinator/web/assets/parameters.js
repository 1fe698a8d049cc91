// The settings of the chat, kept in this browser. An empty field leaves the choice to the coordinator.

import { contentOf } from "./attachments.js";
import { h, setText } from "./dom.js";

const NAME = "mtp-parameters";
const FIELDS = [
  ["temperature", "Temperature", "0 takes the likeliest token; higher varies more", { min: 0, max: 2, step: 0.1 }],
  ["max_tokens", "Longest answer", "in tokens; a word has one or two", { min: 1, step: 1 }],
  ["seed", "Seed", "the same seed gives the same answer", { min: 0, step: 1 }],
  ["top_p", "Top p", "tokens up to this total probability", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", "this many of the likeliest tokens", { min: 0, step: 1 }],
  ["min_p", "Min p", "tokens above this part of the likeliest", { min: 0, max: 1, step: 0.05 }],
];

const NAMES = { ...Object.fromEntries(FIELDS), thinking: "Reasoning", system: "Instructions", tools: "Tools" };
const LONG = ["system", "tools"]; // their text is too long for a button

export class Parameters {
  constructor() {
    this.values = load();
    this.button = h("button", { class: "quiet settings", "aria-expanded": "false", "aria-controls": "chat-settings", type: "button", onclick: () => this.setOpen(this.element.hidden) }, "Settings");
    const number = ([name, label, hint, range]) => field(label, hint, h("input", { type: "number", name, placeholder: name === "seed" ? "random" : "default", inputmode: "decimal", value: this.values[name] ?? null, ...range, oninput: (event) => this.set(name, event.target.value === "" ? undefined : event.target.valueAsNumber) }));
    this.system = h("textarea", { rows: 3, name: "system", placeholder: "None", oninput: (event) => this.set("system", event.target.value || undefined) });
    this.system.value = this.values.system ?? "";
    this.thinking = h("select", { name: "thinking", onchange: (event) => this.set("thinking", event.target.value || undefined) },
      h("option", { value: "" }, "as the model does"), h("option", { value: "on" }, "on"), h("option", { value: "off" }, "off"));
    this.thinking.value = this.values.thinking ?? "";
    this.tools = h("textarea", { rows: 3, name: "tools", spellcheck: "false", placeholder: "None, or a JSON list: [{\"type\": \"function\", …}]", oninput: (event) => this.setTools(event.target.value) });
    this.tools.value = this.values.tools ?? "";
    this.setTools(this.tools.value);
    this.element = h("aside", { class: "parameters", id: "chat-settings", "aria-label": "Settings of the chat", hidden: true, onkeydown: (event) => { if (event.key === "Escape") this.setOpen(false); } },
      h("div", { class: "card-head" }, h("h3", {}, "Settings"), h("button", { class: "icon small", "aria-label": "Close the settings", onclick: () => this.setOpen(false) }, "×")),
      field("Instructions", "the system message: how the model shall answer", this.system),
      field("Reasoning", "think before the answer", this.thinking),
      FIELDS.map(number),
      field("Tools", "functions that the model may call", this.tools));
    this.showSummary();
  }

  setOpen(open) {
    this.element.hidden = !open;
    this.button.setAttribute("aria-expanded", String(open));
    (open ? this.system : this.button).focus();
  }

  set(name, value) {
    if (value === undefined || Number.isNaN(value)) delete this.values[name];
    else this.values[name] = value;
    try {
      localStorage.setItem(NAME, JSON.stringify(this.values));
    } catch {
      // The browser keeps nothing: the values last as long as the page.
    }
    this.showSummary();
  }

  setTools(text) {
    this.tools.setCustomValidity(!text.trim() || isList(text) ? "" : "This is not a JSON list of tools.");
    this.set("tools", text.trim() ? text : undefined);
  }

  // False shows what is wrong.
  isValid() {
    if (this.tools.validity.valid) return true;
    this.setOpen(true);
    return this.tools.reportValidity();
  }

  showSummary() {
    const set = Object.entries(this.values).map(([name, value]) => `${NAMES[name] ?? name}${LONG.includes(name) ? "" : ` ${value}`}`.toLowerCase());
    setText(this.button, set.length ? `Settings: ${set.join(", ")}` : "Settings");
  }

  // The request body. A random seed is chosen here, so that the page can show it.
  body(messages) {
    const { system, thinking, tools, ...numbers } = this.values;
    const turns = messages.filter((message) => message.content || message.role === "user").map((message) => ({ role: message.role, content: contentOf(message) }));
    return {
      ...numbers,
      seed: numbers.seed ?? crypto.getRandomValues(new Uint32Array(1))[0],
      messages: system ? [{ role: "system", content: system }, ...turns] : turns,
      ...(tools ? { tools: JSON.parse(tools) } : {}),
      ...(thinking ? { chat_template_kwargs: { enable_thinking: thinking === "on" } } : {}),
    };
  }
}

function field(label, hint, input) {
  return h("label", {}, h("span", {}, label), input, h("span", { class: "hint" }, hint));
}

function isList(text) {
  try {
    return Array.isArray(JSON.parse(text));
  } catch {
    return false;
  }
}

function load() {
  try {
    const values = JSON.parse(localStorage.getItem(NAME) ?? "{}");
    return values && typeof values === "object" ? values : {};
  } catch {
    return {};
  }
}
