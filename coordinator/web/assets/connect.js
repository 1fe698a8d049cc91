// Copyable settings for clients.

import { copyText, h } from "./dom.js";
import { storedKey } from "./key.js";

export class ConnectView {
  constructor(root, live) {
    this.live = live;
    this.drawn = "";
    this.blocks = h("div", { class: "blocks" });
    root.append(h("h2", { class: "hidden" }, "Connect"), this.blocks);
  }

  update() {
    const model = this.live.status?.model;
    if (!model || model === this.drawn) return;
    this.drawn = model;
    const base = `${location.origin}/v1`;
    const key = storedKey() ? "YOUR_KEY" : "any";
    this.blocks.replaceChildren(
      block("Any OpenAI client", "Set these two variables. If the client insists on a key, type anything.", `export OPENAI_BASE_URL=${base}\nexport OPENAI_API_KEY=${key}`),
      block("Python", "With the openai package.", `from openai import OpenAI\n\nclient = OpenAI(base_url="${base}", api_key="${key}")\nanswer = client.chat.completions.create(\n    model="${model}",\n    messages=[{"role": "user", "content": "Hello"}],\n)\nprint(answer.choices[0].message.content)`),
      block("curl", "Streams the answer, without the reasoning before it.", `curl -N ${base}/chat/completions \\\n  -H 'Content-Type: application/json' \\\n  -d '{"model": "${model}", "reasoning_effort": "none", "stream": true,\n       "messages": [{"role": "user", "content": "Hello"}]}'`),
      block("Terminal", "The state of the cluster, without a browser.", `mtp-coord status --url ${location.origin}`));
  }
}

function block(title, text, code) {
  const button = h("button", { "aria-label": `Copy: ${title}`, onclick: () => copyText(code, button) }, "Copy");
  return h("section", { class: "card", "aria-label": title }, h("div", { class: "card-head" }, h("h3", {}, title), button), h("p", { class: "hint" }, text), h("pre", { tabindex: "0", "aria-label": `${title}: text to copy` }, h("code", {}, code)));
}
