// The tabs of one browser share one event stream, because a browser opens at most six connections to a host. The tab
// that holds the lock leads: it reads the stream and posts its events to the others.

const SILENCE_MS = 40000; // a leader posts at least every 25 seconds, unless a dialog or a debugger stops it

export class TabGroup {
  // `receive` gets the messages of the other tabs. Tabs with the same API key are in one group.
  static async join(key, receive) {
    if (!navigator.locks || !crypto.subtle) return null; // HTTP from another machine: each tab has its own stream
    const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(key)));
    return new TabGroup(`mtp-live-${[...digest.slice(0, 16)].join("-")}`, receive);
  }

  constructor(name, receive) {
    this.name = name;
    this.channel = new BroadcastChannel(name);
    this.channel.onmessage = (event) => { this.onSign?.(); receive(event.data); };
  }

  post(message) {
    this.channel.postMessage(message);
  }

  close() {
    this.channel.close();
  }

  // Runs `work` when this tab leads, and resolves with its result. Rejects when `signal` ends the wait, or when another
  // tab takes the lead after a silence of this one.
  async lead(work, signal) {
    const waiting = new AbortController();
    signal.addEventListener("abort", () => waiting.abort());
    if (signal.aborted) waiting.abort();
    let timer = null;
    this.onSign = () => { clearTimeout(timer); timer = setTimeout(() => waiting.abort("silence"), SILENCE_MS); };
    this.onSign();
    const start = () => { this.onSign = null; clearTimeout(timer); return work(); };
    try {
      return await navigator.locks.request(this.name, { signal: waiting.signal }, start);
    } catch (error) {
      if (error !== "silence") throw error;
      return await navigator.locks.request(this.name, { steal: true }, start);
    } finally {
      this.onSign = null;
      clearTimeout(timer);
    }
  }
}
