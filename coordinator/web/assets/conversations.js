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

  // When the browser has no room for all, leaves out images first, the oldest ones before others, and then the oldest conversations.
  save() {
    let kept = this.list.filter((one) => one.messages.length);
    let pictured = kept.filter((one) => one.messages.some(({ images }) => images)).length;
    while (kept.length) {
      try {
        localStorage.setItem(NAME, JSON.stringify(kept));
        return;
      } catch {
        if (pictured) kept = withoutImages(kept, --pictured);
        else kept.pop();
      }
    }
    localStorage.removeItem(NAME);
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
    return Array.isArray(list) ? list.filter((one) => Array.isArray(one.messages)) : [];
  } catch {
    return [];
  }
}
