// The live state of the cluster over /v1/events. `fetch` is used because EventSource sends no API key.

import { authorization, storedKey } from "./key.js";
import { TabGroup } from "./tab_group.js";

const RETRY_MS = [500, 1000, 2000, 4000, 8000];
const SILENCE_MS = 25000; // the server sends a comment every ten seconds
const HIDDEN_MS = 5000; // a hidden page closes its stream: nobody looks at it
const TAB = Math.random().toString(36).slice(2); // the name of this tab among its group
const SHARED_FRAMES = 500; // as many as the coordinator sends to a new page
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
    this.onVisibility();
    for (;;) {
      await this.visible();
      const membership = (this.membership = new AbortController());
      let status = 0;
      try {
        status = await this.follow(membership.signal);
      } catch {
        // This tab was hidden, or another tab leads.
      }
      membership.abort(); // ends a stream that another tab has replaced
      if (status === 401 || status === 403) {
        this.setConnection("locked");
        await askForKey(status === 403);
      } else if (!this.released) {
        await this.pause();
      }
    }
  }

  onVisibility() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => { this.released = true; this.membership?.abort(); this.wake?.(); }, HIDDEN_MS);
      return;
    }
    this.released = false;
    this.show?.();
    this.wake?.(); // a page that comes back does not wait for the next attempt
  }

  visible() {
    return this.released ? new Promise((resolve) => { this.show = resolve; }) : undefined;
  }

  pause() {
    const wait = RETRY_MS[Math.min(this.attempts, RETRY_MS.length - 1)];
    this.attempts += 1;
    return new Promise((resolve) => { this.wake = resolve; setTimeout(resolve, wait); });
  }

  // ---- the tabs of this browser

  // Shows what the leading tab posts, and leads when this tab is next. Resolves with the HTTP status of a refusal.
  async follow(signal) {
    const group = await TabGroup.join(storedKey(), (message) => this.receive(message));
    if (!group) return this.keepReading(signal);
    this.group = group;
    group.post({ ask: TAB });
    try {
      return await group.lead(() => { this.leading = true; return this.keepReading(signal); }, signal);
    } finally {
      this.leading = false;
      this.group = null;
      group.close();
    }
  }

  receive({ ask, to, block, connection }) {
    if (this.leading) {
      if (ask && this.status) this.group.post({ to: ask, block: this.snapshot(), connection: this.connection });
      return;
    }
    if (to && to !== TAB) return;
    if (block) this.handle(block);
    if (connection) this.setConnection(connection);
  }

  // The state of this tab, for a tab that opens now.
  snapshot() {
    const data = { time: this.now(), status: this.status, events: this.events, history: this.history, frames: this.frames.slice(-SHARED_FRAMES), open_requests: this.openRequests, ended_requests: this.endedRequests };
    return `event: snapshot\ndata: ${JSON.stringify(data)}`;
  }

  // ---- the stream

  // Reads until the coordinator refuses, and resolves with the HTTP status. Connects again after other ends.
  async keepReading(signal) {
    for (;;) {
      let status = 0;
      try {
        status = await this.read(signal);
      } catch {
        // The coordinator is gone, or the network is: try again.
      }
      if (signal.aborted || status === 401 || status === 403) return status;
      this.setConnection("reconnecting");
      await this.pause();
    }
  }

  async read(signal) {
    const abort = new AbortController();
    signal.addEventListener("abort", () => abort.abort());
    if (signal.aborted) return 0;
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
        for (const block of blocks) {
          this.group?.post({ block });
          this.handle(block);
        }
      }
    } finally {
      clearTimeout(timer);
    }
  }

  handle(block) {
    if (block.startsWith(":")) return;
    if (!this.status && !block.startsWith("event: snapshot")) return; // a tab that waits for the leader's state
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
    if (this.leading) this.group.post({ connection });
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
