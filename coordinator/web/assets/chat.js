// The chat: conversations at the side, answers with their figures, the composer.

import { Attachments, picture } from "./attachments.js";
import { saveAll, saveJson, saveMarkdown } from "./chat_files.js";
import { callAdmin, loadModel, sentence, whyNoAdmin } from "./admin.js";
import { figuresOf, rateSoFar, streamAnswer } from "./completion.js";
import { Conversations } from "./conversations.js";
import { copyText, h, setText } from "./dom.js";
import { count, rate, seconds, share } from "./format.js";
import { renderMarkdown } from "./markdown.js";
import { Parameters } from "./parameters.js";

const FRAME_MS = 80; // a stream is drawn at most this often
const TITLE = 48;
const LONGEST_TITLE = 200;
const TINT = "mtp-tint";
const LOST = "The connection to the coordinator was lost."; // instead of the browser's own words
const CLOSED = "The page was closed before the answer ended.";
const FULL = "The browser has no room for all chats. It forgets the oldest when this page is closed. Save them.";
const WAITS = "This question is sent when the answer ends, or at once with Stop. Edit it to keep it here.";
const LEAVING = ["pagehide", "visibilitychange"]; // a phone may end a hidden page without the first one
const EXAMPLES = ["What does the function os.path.join do?", "Write a Python function that reverses a list.", "Explain in three sentences what a cache is.", "Give me five names for a small bakery."];

export class ChatView {
  constructor(root, live) {
    this.live = live;
    this.conversations = new Conversations(() => this.adopt());
    this.current = this.conversations.list[0] ?? this.conversations.create();
    this.shown = this.current.saved;
    this.parameters = new Parameters();
    this.tint = h("input", { type: "checkbox", name: "tint", onchange: () => this.setTint() });
    this.tint.checked = localStorage.getItem(TINT) === "on";
    this.running = null;
    this.waiting = null; // the conversation whose next question is in the field, entered during an answer
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search chats", oninput: () => this.drawList() });
    this.list = h("ul", { class: "conversations" });
    this.title = h("h3", {});
    const action = (text, name, run) => h("button", { class: "quiet", "aria-label": name, onclick: () => run(this.current) }, text);
    this.head = h("div", { class: "thread-head" }, this.title, action("Rename", "Rename this chat", () => this.rename()),
      action("Markdown", "Save this chat as Markdown", saveMarkdown), action("JSON", "Save this chat as JSON", saveJson));
    this.messages = h("div", { class: "messages", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.announcement = h("p", { class: "hidden", role: "status" });
    this.input = h("textarea", { id: "chat-input", rows: 1, placeholder: "Ask anything", "aria-label": "Message", enterkeyhint: "send", onkeydown: (event) => this.onKey(event), oninput: () => { this.wait(null); this.fitInput(); } });
    this.send = h("button", { class: "primary", type: "submit" }, "Send");
    this.model = h("select", { name: "model", "aria-label": "Model", onchange: () => this.changeModel() });
    this.modelNote = h("p", { class: "hint", role: "status" });
    this.attachments = new Attachments((problem) => setText(this.modelNote, problem), () => this.current.messages.reduce((sum, { images }) => sum + (images?.length ?? 0), 0));
    this.sidebar = h("aside", { class: "sidebar", "aria-label": "Conversations" },
      h("button", { class: "wide", onclick: () => this.startNew() }, "New chat"), this.search, this.list,
      (this.storage = h("p", { class: "hint", role: "status" })),
      h("button", { class: "quiet", "aria-label": "Save all chats as JSON", onclick: () => saveAll(this.kept()) }, "Save all"));
    root.append(
      h("h2", { class: "hidden" }, "Chat"),
      h("div", { class: "chat" }, this.sidebar,
        h("div", { class: "thread" }, this.head, this.messages, this.announcement,
          h("form", { class: "composer", novalidate: true, onsubmit: (event) => { event.preventDefault(); if (this.running) this.stop(); else this.submit(); } },
            this.modelNote, this.attachments.strip, this.attachments.file, h("div", { class: "options" }, this.model, this.attachments.button, this.parameters.button, h("label", { class: "check" }, this.tint, "Show drafts")), h("div", { class: "compose-row" }, this.input, this.send))),
        this.parameters.element));
    this.attachments.listen(root);
    this.drawList();
    this.drawMessages();
  }

  update() {
    const { model, architecture } = this.live.status;
    // A lost connection leaves no status, and takes no images away.
    if (architecture) this.attachments.setAllowed(architecture.vision_bytes ? architecture.max_images : 0);
    if (model === this.served) return;
    this.served = model;
    this.listModels();
  }

  // The served model, and those that a key with the scope admin may load instead.
  async listModels() {
    const { served } = this;
    const show = (names) => this.model.replaceChildren(...names.map((name) => h("option", { value: name }, name)));
    show([served]);
    try {
      const others = (await callAdmin("GET", "/v1/models")).data.filter((one) => !one.loaded).map((one) => one.id);
      const problem = others.length ? await whyNoAdmin() : "";
      this.model.title = problem && `For another model: ${problem}`;
      if (!problem && served === this.served) show([served, ...others]);
    } catch {
      // This key may not list models: the served one remains.
    }
  }

  async changeModel() {
    const name = this.model.value;
    const question = `Use ${name} instead of ${this.served}, for all users? Open answers have a minute to end; later ones are cut off.`;
    if (name === this.served || !confirm(question)) {
      this.model.value = this.served;
      return;
    }
    this.model.disabled = true;
    try {
      await loadModel(name, ({ phase, done, total }) => setText(this.modelNote, `${sentence(phase)}${total ? ` ${share(done / total)}` : ""}`));
      setText(this.modelNote, "");
    } catch (error) {
      setText(this.modelNote, error.message);
      this.model.value = this.served;
    }
    this.model.disabled = false;
  }

  setVisible(visible) {
    if (visible && matchMedia("(pointer: fine)").matches) this.input.focus({ preventScroll: true });
    if (visible) this.scrollDown();
  }

  // ---- conversations

  startNew() {
    this.stop();
    if (this.current.messages.length || !this.conversations.find(this.current.id)) this.current = this.conversations.create();
    this.drawList();
    this.drawMessages();
    this.input.focus();
  }

  open(id) {
    this.stop();
    this.current = this.conversations.find(id) ?? this.conversations.create();
    this.drawList();
    this.drawMessages();
  }

  remove(id) {
    this.conversations.remove(id);
    if (this.current.id === id) this.open(this.conversations.list[0]?.id);
    else this.drawList();
  }

  // Shows what another tab has stored. A running answer, and a question that is edited, stay as they are.
  adopt() {
    if (!this.running && !this.conversations.find(this.current.id)) this.open(this.conversations.list[0]?.id);
    this.drawList();
    if (!this.running && this.current.saved !== this.shown) this.drawMessages();
  }

  // The conversations with a question.
  kept() {
    return this.conversations.list.filter((one) => one.messages.length);
  }

  // Shows the conversations whose title or texts contain what is searched.
  drawList() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.kept().filter((one) => [one.title, ...one.messages.map(({ content }) => content)].some((text) => text.toLowerCase().includes(wanted)));
    this.list.replaceChildren(...found.map((one) => h("li", { class: one === this.current ? "current" : "" },
      h("button", { class: "title", title: one.title, "aria-current": one === this.current ? "true" : null, onclick: () => this.open(one.id) }, one.title),
      h("button", { class: "icon small", "aria-label": `Delete: ${one.title}`, onclick: () => this.remove(one.id) }, "×"))));
    if (wanted && !found.length) this.list.append(h("li", { class: "hint" }, "No chat has this text."));
    this.drawHead();
  }

  drawHead() {
    setText(this.storage, this.conversations.isFull ? FULL : "Conversations stay in this browser.");
    this.storage.classList.toggle("error", this.conversations.isFull);
    const { title, messages } = this.current;
    this.head.hidden = !messages.length;
    setText(this.title, messages.length ? title : "");
  }

  // Replaces the title by a field, until Enter, Escape or another place has the focus.
  rename() {
    const conversation = this.current;
    const input = h("input", { value: conversation.title, maxlength: LONGEST_TITLE, "aria-label": "Title of this chat" });
    const end = (event) => {
      if (event.key && (event.isComposing || !["Enter", "Escape"].includes(event.key))) return;
      input.removeEventListener("blur", end); // which the next line causes
      input.replaceWith(this.title);
      const title = input.value.trim();
      if (event.key === "Escape" || !title || title === conversation.title) return;
      this.conversations.rename(conversation, title);
      this.drawHead();
      const row = this.list.querySelector(".current"); // the others stay, because one of them may be clicked just now
      if (row && conversation === this.current) setText(row.firstChild, title);
    };
    input.addEventListener("keydown", end);
    input.addEventListener("blur", end);
    this.title.replaceWith(input);
    input.select();
  }

  drawMessages() {
    const { messages } = this.current;
    this.shown = this.current.saved;
    if (!messages.length) {
      this.messages.replaceChildren(h("div", { class: "welcome" }, h("h3", {}, "Ask the cluster something"),
        h("p", { class: "hint" }, "Each answer shows how long you waited for its first token, its speed, and how many drafted tokens were right."),
        h("div", { class: "examples" }, EXAMPLES.map((text) => h("button", { onclick: () => this.say(text) }, text)))));
      return;
    }
    this.messages.replaceChildren(...messages.map((message, i) => this.draw(message, i === messages.length - 1)));
    this.scrollDown();
  }

  draw(message, last) {
    if (message.role === "user") return this.drawQuestion(message);
    const parts = new AnswerElement(message, false, this.tint.checked);
    if (last && !this.running) parts.addActions(() => this.regenerate());
    return parts.element;
  }

  drawQuestion(message) {
    const element = h("article", { class: "message user" }, h("h3", { class: "hidden" }, "You"),
      message.images?.length && h("div", { class: "attachments" }, message.images.map(picture)), h("div", { class: "bubble" }, message.content),
      h("div", { class: "actions" }, h("button", { class: "quiet", "aria-label": "Edit this message", onclick: () => this.edit(message, element) }, "Edit")));
    return element;
  }

  // Replaces a question by a field. Sending it drops all that follows the question.
  edit(message, element) {
    if (this.running) return;
    const input = h("textarea", { "aria-label": "Edited message", rows: Math.min(8, message.content.split("\n").length + 1) });
    input.value = message.content;
    const cancel = () => { element.replaceWith(this.drawQuestion(message)); };
    const send = () => {
      const content = input.value.trim();
      if (!content || this.running || !this.parameters.isValid()) return;
      const { messages } = this.current;
      messages.length = messages.indexOf(message);
      this.say(content, message.images);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") cancel();
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      send();
    });
    element.classList.add("editing");
    element.replaceChildren(h("h3", { class: "hidden" }, "You"), input,
      h("div", { class: "actions" }, h("button", { class: "quiet", onclick: cancel }, "Cancel"), h("button", { class: "primary", onclick: send }, "Send again")));
    input.focus();
  }

  scrollDown() {
    this.messages.scrollTop = this.messages.scrollHeight;
  }

  // Tinted answers are plain text, one element for each token, because Markdown has no place for tokens.
  setTint() {
    localStorage.setItem(TINT, this.tint.checked ? "on" : "off");
    if (this.running) this.streaming.tint = this.tint.checked;
    else this.drawMessages();
  }

  // ---- answers

  onKey(event) {
    if (event.key === "Escape") this.stop();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.submit();
  }

  wait(conversation) {
    if (conversation === this.waiting) return;
    this.waiting = conversation;
    setText(this.modelNote, conversation ? WAITS : "");
  }

  fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 220)}px`;
  }

  // Sends the question in the field. During an answer it waits there, so that the answer goes on.
  submit() {
    const content = this.input.value.trim();
    if (!content || !this.parameters.isValid()) return;
    if (this.running) {
      this.wait(this.current);
      return;
    }
    this.input.value = "";
    this.fitInput();
    this.say(content, this.attachments.take());
  }

  // Sends a question of the user, with the URLs of its images.
  say(content, images = []) {
    if (this.running || !this.parameters.isValid()) return;
    const { messages } = this.current;
    if (!messages.length && !this.current.titled) this.current.title = content.length > TITLE ? `${content.slice(0, TITLE)}…` : content;
    messages.push({ role: "user", content, ...(images.length ? { images } : {}) });
    this.answer();
  }

  regenerate() {
    if (this.running || this.current.messages.at(-1)?.role !== "assistant" || !this.parameters.isValid()) return;
    this.current.messages.pop();
    this.answer();
  }

  stop() {
    this.running?.abort();
  }

  async answer() {
    const conversation = this.current;
    const abort = (this.running = new AbortController());
    const body = this.parameters.body(conversation.messages);
    const message = { role: "assistant", content: "", reasoning: "", calls: [], seed: body.seed, figures: null, error: null };
    conversation.messages.push(message);
    this.conversations.held = conversation;
    let left = false;
    const keep = (event) => { // what has arrived, for a page that is opened again
      message.error = CLOSED;
      this.conversations.save(conversation);
      message.error = null;
      left = event?.type === "pagehide";
    };
    keep();
    for (const type of LEAVING) addEventListener(type, keep);
    setText(this.send, "Stop");
    this.drawList();
    this.drawMessages();
    const parts = new AnswerElement(message, true, this.tint.checked);
    this.streaming = parts;
    this.messages.lastChild.replaceWith(parts.element);
    this.scrollDown();
    let partial = null;
    const redraw = throttle(() => { parts.update(message, partial); this.follow(); });
    try {
      const answer = await streamAnswer(body, abort.signal, (now) => {
        partial = now;
        copyAnswer(message, now);
        redraw();
      });
      message.figures = figuresOf(answer);
      setText(this.announcement, `Answer complete: ${count(message.figures.tokens ?? 0)} tokens.`);
    } catch (error) {
      if (partial) message.figures = figuresOf(partial);
      message.error = abort.signal.aborted ? "Stopped." : left ? CLOSED : error instanceof TypeError ? LOST : sentence(error.message);
      setText(this.announcement, message.error);
    }
    for (const type of LEAVING) removeEventListener(type, keep);
    this.running = null;
    setText(this.send, "Send");
    this.conversations.save(conversation);
    this.drawHead();
    this.conversations.held = null;
    this.shown = this.current.saved;
    if (!this.conversations.find(this.current.id)) this.open(this.conversations.list[0]?.id); // another tab removed it
    else if (conversation === this.current) this.finishDrawing(message);
    else this.drawMessages(); // its last answer can be regenerated now
    const asked = this.waiting;
    this.wait(null);
    // After an error the question stays in the field, and in another conversation too.
    if (asked && asked === this.current && asked === conversation && (!message.error || message.error === "Stopped.")) this.submit();
  }

  finishDrawing(message) {
    const near = this.nearEnd();
    if (this.current.messages.at(-1) === message) this.messages.lastChild.replaceWith(this.draw(message, true));
    else this.drawMessages();
    if (near) this.scrollDown();
  }

  nearEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.messages;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  follow() {
    if (this.nearEnd()) this.scrollDown();
  }
}

function copyAnswer(message, answer) {
  message.content = answer.content;
  message.reasoning = answer.reasoning;
  message.calls = answer.calls;
  message.pieces = answer.pieces;
}

// The elements of one answer. `update` draws what has arrived.
class AnswerElement {
  constructor(message, streaming = false, tint = false) {
    this.tint = tint;
    this.tokens = h("p", { class: "tokens", hidden: true });
    this.legend = h("p", { class: "layer-legend", hidden: true }, h("span", {}, h("i", { class: "token drafted" }, "draft"), "drafted ahead and accepted"), h("span", {}, h("i", { class: "token" }, "token"), "chosen by the model"));
    this.text = h("div", { class: "markdown" });
    this.thinking = h("div", { class: "markdown" });
    this.thinkingTitle = h("summary", {}, "Reasoning");
    this.reasoning = h("details", { class: "reasoning", hidden: true }, this.thinkingTitle, this.thinking);
    this.calls = h("div", { class: "calls" });
    this.figures = h("p", { class: "answer-figures" });
    this.actions = h("span", { class: "actions" });
    this.element = h("article", { class: `message assistant${streaming ? " streaming" : ""}` }, h("h3", { class: "hidden" }, "Answer"),
      this.reasoning, this.text, this.tokens, this.legend, this.calls, h("div", { class: "answer-foot" }, this.figures, this.actions));
    this.message = message;
    this.update(message, null);
    if (!streaming && message.content) this.addCopy();
  }

  update(message, partial) {
    this.reasoning.hidden = !message.reasoning;
    renderMarkdown(this.thinking, message.reasoning ?? "");
    const tinted = this.tint && Boolean(message.pieces?.length);
    this.tokens.hidden = this.legend.hidden = !tinted;
    this.text.hidden = tinted;
    if (tinted) this.drawTokens(message.pieces);
    else renderMarkdown(this.text, message.content);
    if (partial) setText(this.thinkingTitle, message.content ? "Reasoning" : "Reasoning…");
    this.calls.replaceChildren(...(message.calls ?? []).map((call) => h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, `Tool call: ${call.name}`)), h("pre", { tabindex: "0" }, h("code", {}, call.arguments)))));
    this.figures.replaceChildren(...figureParts(message, partial));
  }

  // Pieces only grow, so the elements that exist stay.
  drawTokens(pieces) {
    const last = this.tokens.children.length - 1;
    if (last >= 0) setText(this.tokens.children[last], pieces[last][1]);
    for (let i = last + 1; i < pieces.length; i += 1) this.tokens.append(h("span", { class: pieces[i][0] === "d" ? "token drafted" : "token" }, pieces[i][1]));
  }

  addCopy() {
    const button = h("button", { class: "quiet", onclick: () => copyText(this.message.content, button) }, "Copy");
    this.actions.append(button);
  }

  addActions(regenerate) {
    this.actions.append(h("button", { class: "quiet", onclick: regenerate }, "Regenerate"));
  }
}

function figureParts(message, partial) {
  const parts = [];
  if (partial && partial.first === null) {
    const { prompt } = partial;
    parts.push(prompt ? `reading the prompt: ${count(prompt[0])} of ${count(prompt[1])} tokens` : "waiting for the first token");
  }
  const figures = message.figures;
  const running = partial && !figures ? rateSoFar(partial) : null;
  if (running !== null) parts.push(`${rate(running)} tokens/s`);
  if (figures) {
    if (figures.firstToken !== null) parts.push(`first token ${seconds(figures.firstToken)}`);
    if (figures.rate !== null) parts.push(`${rate(figures.rate)} tokens/s`);
    if (figures.tokens !== null) parts.push(`${count(figures.tokens)} tokens`);
    if (figures.drafts) parts.push(`${share(figures.drafts[0] / figures.drafts[1])} of ${count(figures.drafts[1])} drafts kept`);
    if (figures.cached) parts.push(`${count(figures.cached)} of ${count(figures.prompt)} prompt tokens known from before`);
    if (message.seed !== undefined) parts.push(`seed ${message.seed}`);
    if (figures.finish === "length") parts.push("ended at the longest answer that was set");
  }
  const shown = parts.map((part, i) => [i ? h("span", { class: "sep" }, " · ") : "", h("span", {}, part)]).flat();
  if (message.error) shown.push(h("span", { class: message.error === "Stopped." ? "" : "error" }, `${shown.length ? " · " : ""}${message.error}`));
  return shown;
}

function throttle(draw) {
  let timer = null;
  return () => { timer ??= setTimeout(() => { timer = null; draw(); }, FRAME_MS); };
}
