// The pipeline's frames over time.

import { h } from "./dom.js";

export class TimelineView {
  constructor(root, live) {
    this.live = live;
    root.append(h("h2", { class: "hidden" }, "Timeline"), h("p", { class: "hint" }, "No frames yet."));
  }
}
