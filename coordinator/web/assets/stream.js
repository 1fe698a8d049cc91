// The live state of the cluster over /v1/events. `fetch` is used because EventSource sends no API key.

import { authorization } from "./key.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const SILENCE_MS = 25000; // the server sends a comment every ten seconds
const HIDDEN_MS = 5000; // a hidden page lets its connection go: browsers allow six to a host
const HISTORY = 600;
const EVENTS = 100;
const FRAMES = 6000;
const ENDED = 50;

export class LiveState extends EventTarget {
  constructor() {
    super();
    this.status = null;
    this.events = [];
    this.history = [];
    this.frames = [];
    this.openRequests = [];
    this.endedRequests = [];
    this.clockOffset = 0;
    this.connection = "connecting";
    this.attempts = 0;
  }

  // Runs for as long as the page is open.
  async run(askForKey) {
    document.addEventListener("visibilitychange", () => this.onVisibility());
    for (;;) {
      await this.visible();
      let status = 0;
      try {
        status = await this.read();
      } catch {
        // The coordinator is gone, or the network is: try again.
      }
      if (status === 401 || status === 403) {
        this.setConnection("locked");
        await askForKey(status === 403);
        continue;
      }
      if (this.released) continue;
      this.setConnection("reconnecting");
      const wait = RETRY_MS[Math.min(this.attempts, RETRY_MS.length - 1)];
      this.attempts += 1;
      await new Promise((resolve) => { this.wake = resolve; setTimeout(resolve, wait); });
    }
  }

  onVisibility() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => { this.released = true; this.abort?.abort(); }, HIDDEN_MS);
      return;
    }
    this.released = false;
    this.show?.();
    this.wake?.(); // a page that comes back does not wait for the next attempt
  }

  visible() {
    return this.released ? new Promise((resolve) => { this.show = resolve; }) : undefined;
  }

  async read() {
    const abort = (this.abort = new AbortController());
    let timer = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await fetch("/v1/events", { headers: authorization(), signal: abort.signal, cache: "no-store" });
      if (!response.ok) return response.status;
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return 0;
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        text += value;
        const blocks = text.split("\n\n");
        text = blocks.pop();
        for (const block of blocks) this.handle(block);
      }
    } finally {
      clearTimeout(timer);
    }
  }

  handle(block) {
    if (block.startsWith(":")) return;
    const lines = block.split("\n");
    const name = lines[0].slice("event: ".length);
    const data = JSON.parse(lines[1].slice("data: ".length));
    if (name === "snapshot") {
      this.clockOffset = data.time - Date.now() / 1000;
      this.status = data.status;
      this.events = data.events;
      this.history = data.history;
      this.frames = [];
      this.endedRequests = [];
      this.attempts = 0;
      this.setConnection("live");
    } else {
      Object.assign(this.status, data.status ?? {});
      append(this.events, data.events, EVENTS);
      append(this.history, data.history, HISTORY);
    }
    append(this.frames, data.frames, FRAMES);
    this.openRequests = data.open_requests ?? this.openRequests;
    const known = new Set(this.endedRequests.map((one) => one.number)); // a snapshot may precede the delta that has it
    append(this.endedRequests, data.ended_requests?.filter((one) => !known.has(one.number)), ENDED);
    this.dispatchEvent(new CustomEvent("change", { detail: { kind: name, data } }));
  }

  setConnection(connection) {
    if (this.connection === connection) return;
    this.connection = connection;
    this.dispatchEvent(new Event("connection"));
  }

  // Seconds since 1970 on the coordinator's clock.
  now() {
    return Date.now() / 1000 + this.clockOffset;
  }
}

function append(list, more, most) {
  if (!more) return;
  list.push(...more);
  if (list.length > most) list.splice(0, list.length - most);
}
