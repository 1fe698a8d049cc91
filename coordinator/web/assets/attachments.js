// Images for the next question: by file, drop or paste, made small enough for this browser's storage.

import { h } from "./dom.js";

const LONGEST = 1280; // pixels of the longer side: about 1,200 tokens
const QUALITY = 0.85;
const MOST = 8;

export class Attachments {
  // `onProblem(text)` shows what is wrong with a file. `earlier()` is the number of images of earlier questions.
  constructor(onProblem, earlier) {
    this.urls = [];
    this.onProblem = onProblem;
    this.earlier = earlier;
    this.file = h("input", { type: "file", accept: "image/*", multiple: true, hidden: true, "aria-label": "Images", onchange: () => { this.add(this.file.files); this.file.value = ""; } });
    this.button = h("button", { type: "button", class: "quiet", title: "Or drop an image here, or paste one", onclick: () => this.file.click() }, "Add image");
    this.strip = h("div", { class: "attachments" });
    this.setAllowed(0);
  }

  // Allows this number of images in a conversation.
  setAllowed(allowed) {
    this.allowed = allowed;
    this.button.hidden = !allowed;
  }

  // Takes files from drops and pastes over `element`.
  listen(element) {
    element.addEventListener("dragover", (event) => { if (this.allowed) event.preventDefault(); });
    for (const [type, data] of [["drop", "dataTransfer"], ["paste", "clipboardData"]]) {
      element.addEventListener(type, (event) => {
        const files = [...(event[data]?.files ?? [])];
        if (!this.allowed || !files.length) return;
        event.preventDefault();
        this.add(files);
      });
    }
  }

  async add(files) {
    for (const file of files) {
      const url = await shrunk(file).catch(() => null);
      const problem = url ? this.problem() : `${file.name || "The file"} is no image that this browser reads.`;
      this.onProblem(problem);
      if (problem) continue;
      this.urls.push(url);
      this.draw();
    }
  }

  // Why one more image has no place, or an empty text.
  problem() {
    if (this.urls.length >= MOST) return `At most ${MOST} images.`;
    return this.urls.length + this.earlier() < this.allowed ? "" : `At most ${this.allowed} images in a conversation. Start a new one.`;
  }

  draw() {
    this.strip.replaceChildren(...this.urls.map((url, i) => h("figure", {}, picture(url),
      h("button", { type: "button", class: "icon small", "aria-label": `Remove image ${i + 1}`, onclick: () => { this.urls.splice(i, 1); this.draw(); } }, "×"))));
  }

  // Returns the images and forgets them.
  take() {
    const taken = this.urls;
    this.urls = [];
    this.draw();
    return taken;
  }
}

export function picture(url) {
  return h("img", { src: url, alt: "An image of this question" });
}

// The content of a message for the API.
export function contentOf({ content, images }) {
  if (!images?.length) return content;
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}
