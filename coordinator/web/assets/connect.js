// Copyable commands and settings: agents that one command starts, then other clients.

import { callAdmin } from "./admin.js";
import { copyable, h } from "./dom.js";
import { storedKey } from "./key.js";

const ASSUMED = ["http://127.0.0.1:8080", "http://localhost:8080"]; // the server of commands without --url
const PHONE = "(max-width: 720px)"; // as in the styles: agents are then a list that folds

export class ConnectView {
  constructor(root, live) {
    this.live = live;
    this.drawn = "";
    this.agents = h("div", { class: "agents" });
    this.blocks = h("div", { class: "blocks" });
    root.append(h("h2", { class: "hidden" }, "Connect"),
      (this.agentsGroup = group("Agents", "agents-title", "One command starts an agent with the settings of this server. Its own settings stay as they are.", this.agents)),
      group("Other clients", "clients-title", "", this.blocks));
  }

  setVisible(visible) {
    if (visible && this.agentsGroup.hidden) this.drawn = ""; // the coordinator may know its clients now
  }

  update() {
    const model = this.live.status?.model;
    if (!model || model === this.drawn) return;
    this.drawn = model;
    this.draw(model);
  }

  // Without an answer of the coordinator the blocks that need none remain.
  async draw(model) {
    const known = ownBlocks(model).map(block);
    this.agentsGroup.hidden = true;
    this.blocks.replaceChildren(...known);
    try {
      const { agents, clients } = await callAdmin("GET", "/v1/cluster/connect");
      if (model !== this.drawn) return;
      this.agentsGroup.hidden = false;
      this.agents.replaceChildren(...agents.map(agentCard));
      this.blocks.replaceChildren(...known, ...clients.map((one) => block({ ...one, text: withKey(one.text) })));
    } catch {
      // This key may not read the cluster, or no model serves.
    }
  }
}

// The options with which a command finds the server at `origin`. The key of this page is not shown.
export function serverOptions(origin = location.origin) {
  return `${ASSUMED.includes(origin) ? "" : ` --url ${origin}`}${storedKey() ? " --api-key YOUR_KEY" : ""}`;
}

function ownKey() {
  return storedKey() ? "YOUR_KEY" : "any";
}

// The coordinator does not know whether this page has a key.
function withKey(text) {
  return text.replaceAll("YOUR_KEY", ownKey());
}

function ownBlocks(model) {
  const base = `${location.origin}/v1`;
  const key = ownKey();
  return [
    { title: "Any OpenAI client", hint: "Set these two variables. If the client insists on a key, type anything.", text: `export OPENAI_BASE_URL=${base}\nexport OPENAI_API_KEY=${key}` },
    { title: "Terminal", hint: "The state of the cluster, without a browser.", text: `mtp-coord status${serverOptions()}` },
    { title: "Python", hint: "With the openai package.", text: `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${key}")\nanswer = client.chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)` },
    { title: "curl", hint: "Streams the answer, without the reasoning before it.", text: `curl -N ${base}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -d '{"model": "${model}", "reasoning_effort": "none", "stream": true,\n       "messages": [{"role": "user", "content": "Hello"}]}'` },
  ];
}

function group(title, id, hint, content) {
  return h("section", { class: "group", "aria-labelledby": id }, h("div", { class: "card-head" }, h("h3", { id }, title), h("span", { class: "hint" }, hint)), content);
}

function agentCard({ name, title, install, text }) {
  const command = `mtp-coord launch ${name}${serverOptions()}`;
  const [copyCommand, shown] = copyable(`command for ${title}`, command);
  shown.classList.add("command");
  shown.replaceChildren(h("code", {}, command.split(" ").flatMap((word, i) => [i > 0 && " ", h("span", { class: "word" }, word)])));
  const [copySettings, settings] = copyable(`settings of ${title}`, withKey(text));
  const rest = [shown, h("p", { class: "hint" }, "Install: ", h("code", {}, install)),
    h("details", {}, h("summary", {}, "Settings", h("span", { class: "hidden" }, ` of ${title}`)), h("div", { class: "row" }, copySettings), settings)];
  const folds = matchMedia(PHONE).matches;
  return h("article", { class: "card", "aria-label": title }, folds
    ? h("details", {}, h("summary", {}, h("h4", {}, title)), h("div", { class: "row" }, copyCommand), rest)
    : [h("div", { class: "card-head" }, h("h4", {}, title), copyCommand), ...rest]);
}

function block({ title, hint, text }) {
  const [copy, code] = copyable(title, text);
  return h("article", { class: "card", "aria-label": title }, h("div", { class: "card-head" }, h("h4", {}, title), copy), h("p", { class: "hint" }, hint), code);
}
