// The requests: whose they are, how far each prompt and answer is, and a button that stops one.

import { callAdmin, whyNoAdmin } from "./admin.js";
import { h, setText } from "./dom.js";
import { clockTime, count, plural, rate, seconds } from "./format.js";

const ROWS = 12; // more only where more requests are open
const LEAST_SECONDS = 0.2; // tokens that arrive together would show an absurd speed
const OUTCOMES = { stop: "done", length: "done, at the length limit", tool_calls: "done, with a tool call", cancelled: "stopped" };

export class RequestsTable {
  constructor(live) {
    this.live = live;
    this.rows = new Map(); // rows stay while they are shown, so that a button keeps its place and its focus
    this.mayStop = null; // null until the coordinator was asked
    this.body = h("tbody", {});
    this.note = h("p", { class: "error", role: "status" });
    this.element = h("section", { class: "card", "aria-labelledby": "requests-title", hidden: true },
      h("div", { class: "card-head" }, h("h3", { id: "requests-title" }, "Requests")), this.note,
      h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "List of requests" },
        h("table", { class: "plain requests" }, h("thead", {}, h("tr", {}, ["Client", "Prompt", "Answer", "State"].map((text) => h("th", { scope: "col" }, text)))), this.body)));
    live.addEventListener("change", ({ detail }) => { if (detail.kind === "snapshot") this.mayStop = null; });
  }

  update() {
    const { openRequests, endedRequests } = this.live;
    const shown = [...openRequests.toReversed(), ...endedRequests.toReversed().slice(0, Math.max(0, ROWS - openRequests.length))];
    const found = new Map(shown.map((one) => [`${one.began_at}/${one.number}/${one.outcome}`, one]));
    this.element.hidden = !shown.length;
    for (const [key, row] of this.rows) {
      if (found.has(key)) continue;
      row.element.remove();
      this.rows.delete(key);
    }
    [...found].forEach(([key, one], i) => {
      if (!this.rows.has(key)) {
        this.rows.set(key, new RequestRow((stopped) => this.stop(stopped)));
        this.body.insertBefore(this.rows.get(key).element, this.body.children[i] ?? null);
      }
      this.rows.get(key).update(one, this.live.now(), this.mayStop);
    });
    if (openRequests.length && this.mayStop === null) this.checkAccess();
  }

  async checkAccess() {
    this.mayStop = false;
    this.mayStop = await whyNoAdmin() === "";
  }

  async stop(one) {
    if (!confirm(`Stop the request of ${one.client || "an unknown program"}, since ${clockTime(one.began_at)}? Its client gets an error.`)) return false;
    setText(this.note, "");
    try {
      await callAdmin("POST", `/v1/cluster/requests/${encodeURIComponent(one.id)}/stop`, {});
      return true;
    } catch (error) {
      setText(this.note, error.message);
      return false;
    }
  }
}

class RequestRow {
  // `stop(request)` resolves with true if the request ends.
  constructor(stop) {
    const two = () => [h("span", {}), h("span", { class: "hint" })];
    [this.client, this.prompt, this.answer, this.state] = [two(), two(), two(), two()];
    this.progress = h("progress", { "aria-label": "Prompt tokens read" });
    this.button = h("button", { class: "small", hidden: true, onclick: async () => {
      this.button.disabled = true;
      this.button.disabled = await stop(this.request);
    } }, "Stop");
    this.element = h("tr", {}, h("th", { scope: "row" }, this.client), h("td", { class: "prompt" }, this.prompt, this.progress), h("td", { class: "answer" }, this.answer),
      h("td", { class: "state" }, this.button, this.state));
  }

  update(one, now, mayStop) {
    this.request = one;
    const open = !one.outcome;
    const reads = open && !one.tokens && one.prompt_done < one.prompt_tokens;
    const speed = speedOf(one, now);
    show(this.client, one.client || "unknown program", `${one.endpoint.replace("_", " ")} · ${clockTime(one.began_at)}`);
    show(this.prompt, one.prompt_tokens ? plural(one.prompt_tokens, "token") : "–", reads && one.prompt_done ? `${count(one.prompt_done)} read` : one.first_token === null ? "" : `waited ${seconds(one.first_token)}`);
    this.progress.hidden = !open;
    this.progress.classList.toggle("read", !reads); // keeps its place, so that rows do not move
    this.progress.max = Math.max(1, one.prompt_tokens);
    this.progress.value = one.prompt_done;
    show(this.answer, plural(one.tokens, "token"), speed === null ? "" : `${rate(speed)} tokens/s`);
    const waits = one.prompt_done ? "reading" : "waiting";
    show(this.state, open ? (one.tokens ? "answering" : waits) : OUTCOMES[one.outcome] ?? one.outcome, seconds(one.seconds ?? Math.max(0, now - one.began_at)));
    this.button.hidden = !(open && mayStop && one.id);
    this.button.setAttribute("aria-label", `Stop: ${one.client}, ${clockTime(one.began_at)}`);
  }
}

function show([first, second], text, hint) {
  setText(first, text);
  setText(second, hint);
}

// Tokens a second after the first one; null before it, and for too short a time.
function speedOf({ tokens, first_token: first, seconds: whole, began_at: began }, now) {
  const span = first === null ? 0 : (whole ?? now - began) - first;
  return tokens > 1 && span >= LEAST_SECONDS ? (tokens - 1) / span : null;
}
