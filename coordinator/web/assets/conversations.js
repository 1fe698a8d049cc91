// Conversations, kept in this browser only. Its tabs share them.

const NAME = "mtp-conversations";
const MOST = 50;
const MOST_REMOVED = 500; // ids of removed conversations, which a tab that is still open must not store again

export class Conversations {
  // Calls `changed()` after another tab has stored something. `held`, one that is being answered, takes no other version.
  constructor(changed = () => {}) {
    this.list = [];
    this.removed = new Map();
    this.held = null;
    this.isFull = false; // the browser had no room for all at the last save
    this.merge();
    addEventListener("storage", ({ key }) => {
      if (key !== NAME) return;
      this.merge();
      changed();
    });
  }

  create() {
    const conversation = { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New chat", at: Date.now(), messages: [] };
    this.list.unshift(conversation);
    this.list.length = Math.min(this.list.length, MOST);
    return conversation;
  }

  find(id) {
    return this.list.find((one) => one.id === id) ?? null;
  }

  rename(conversation, title) {
    Object.assign(conversation, { title, titled: Date.now() });
    this.save();
  }

  remove(id) {
    this.removed.set(id, Date.now());
    this.save();
  }

  // Takes what is stored: of each conversation the version that was saved last and the newest title, and every removal.
  merge() {
    const stored = load();
    for (const { id, removed } of stored) if (removed) this.removed.set(id, removed);
    for (const one of stored.filter(({ messages }) => messages)) {
      const own = this.find(one.id);
      if (!own) {
        this.list.push(one);
        continue;
      }
      const { title, titled } = own;
      const renamed = (one.titled ?? 0) - (titled ?? 0); // above 0 by another tab, below 0 by this one
      if (own !== this.held && (one.saved ?? 0) > (own.saved ?? 0)) Object.assign(own, one, renamed < 0 && { title, titled });
      else if (renamed > 0) Object.assign(own, { title: one.title, titled: one.titled });
    }
    this.list = this.list.filter(({ id }) => !this.removed.has(id)).sort((a, b) => (b.at ?? 0) - (a.at ?? 0)).slice(0, MOST);
  }

  // Stores all conversations, of which this tab has changed `one`. When the browser has no room for all, leaves out images first, the oldest
  // ones before others, and then the oldest conversations.
  save(one = null) {
    if (one) one.saved = Date.now();
    this.merge();
    const removed = [...this.removed].slice(-MOST_REMOVED).map(([id, at]) => ({ id, removed: at }));
    let kept = this.list.filter(({ messages }) => messages.length);
    let pictured = kept.filter(({ messages }) => messages.some(({ images }) => images)).length;
    this.isFull = false;
    for (;;) {
      try {
        localStorage.setItem(NAME, JSON.stringify([...kept, ...removed]));
        return;
      } catch {
        this.isFull = true;
        if (pictured) kept = withoutImages(kept, --pictured);
        else if (kept.length) kept.pop();
        else return localStorage.removeItem(NAME);
      }
    }
  }
}

// The conversations, in which only the first `count` with images keep them.
function withoutImages(conversations, count) {
  return conversations.map((one) => {
    if (!one.messages.some(({ images }) => images) || count-- > 0) return one;
    return { ...one, messages: one.messages.map(({ images, ...rest }) => rest) };
  });
}

function load() {
  try {
    const list = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(list) ? list.filter((one) => one?.id && (one.removed || Array.isArray(one.messages))) : [];
  } catch {
    return [];
  }
}
