// The sampling parameters of the chat, kept in this browser. An empty field leaves the choice to the coordinator.

import { h, setText } from "./dom.js";

const NAME = "mtp-parameters";
const FIELDS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { min: 0, step: 1 }],
];

const TEXTS = { system: "system message", tools: "tools" };

export class Parameters {
  constructor() {
    this.values = load();
    this.summary = h("summary", {}, "Parameters");
    this.inputs = FIELDS.map(([name, label, range]) => h("label", {}, h("span", {}, label),
      h("input", { type: "number", name, placeholder: name === "seed" ? "random" : "default", inputmode: "decimal", value: this.values[name] ?? null, ...range, oninput: (event) => this.set(name, event.target.value === "" ? undefined : event.target.valueAsNumber) })));
    this.system = h("textarea", { rows: 2, name: "system", placeholder: "None", oninput: (event) => this.set("system", event.target.value || undefined) });
    this.system.value = this.values.system ?? "";
    this.thinking = h("select", { name: "thinking", onchange: (event) => this.set("thinking", event.target.value || undefined) },
      h("option", { value: "" }, "default"), h("option", { value: "on" }, "on"), h("option", { value: "off" }, "off"));
    this.thinking.value = this.values.thinking ?? "";
    this.tools = h("textarea", { rows: 3, name: "tools", spellcheck: "false", placeholder: "None. A JSON list, as the API takes it: [{\"type\": \"function\", …}]", oninput: (event) => this.setTools(event.target.value) });
    this.tools.value = this.values.tools ?? "";
    this.setTools(this.tools.value);
    this.element = h("details", { class: "parameters" }, this.summary,
      h("div", { class: "fields" }, this.inputs, h("label", {}, h("span", {}, "Reasoning"), this.thinking), h("label", { class: "wide" }, h("span", {}, "System message"), this.system), h("label", { class: "wide" }, h("span", {}, "Tools"), this.tools)));
    this.showSummary();
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
    this.element.open = true;
    return this.tools.reportValidity();
  }

  showSummary() {
    const set = Object.entries(this.values).map(([name, value]) => (TEXTS[name] ?? `${name.replace("_", " ")} ${value}`));
    setText(this.summary, set.length ? `Parameters: ${set.join(", ")}` : "Parameters");
  }

  // The request body. A random seed is chosen here, so that the page can show it.
  body(messages) {
    const { system, thinking, tools, ...numbers } = this.values;
    const turns = messages.filter((message) => message.content || message.role === "user").map(({ role, content }) => ({ role, content }));
    return {
      ...numbers,
      seed: numbers.seed ?? crypto.getRandomValues(new Uint32Array(1))[0],
      messages: system ? [{ role: "system", content: system }, ...turns] : turns,
      ...(tools ? { tools: JSON.parse(tools) } : {}),
      ...(thinking ? { chat_template_kwargs: { enable_thinking: thinking === "on" } } : {}),
    };
  }
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
