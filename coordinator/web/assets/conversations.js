// Conversations, kept in this browser only.

const NAME = "mtp-conversations";
const MOST = 50;

export class Conversations {
  constructor() {
    this.list = load();
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

  remove(id) {
    this.list = this.list.filter((one) => one.id !== id);
    this.save();
  }

  // Drops the oldest conversations when the browser has no room for all.
  save() {
    const kept = this.list.filter((one) => one.messages.length);
    while (kept.length) {
      try {
        localStorage.setItem(NAME, JSON.stringify(kept));
        return;
      } catch {
        kept.pop();
      }
    }
    localStorage.removeItem(NAME);
  }
}

function load() {
  try {
    const list = JSON.parse(localStorage.getItem(NAME) ?? "[]");
    return Array.isArray(list) ? list.filter((one) => Array.isArray(one.messages)) : [];
  } catch {
    return [];
  }
}
