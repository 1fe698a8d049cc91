// The inside of the cluster: the steps of its machines, and below them the charts of speed and drafting.

import { SpeedView } from "./speed.js";
import { TimelineView } from "./timeline.js";

export class InsideView {
  constructor(root, live) {
    this.timeline = new TimelineView(root, live);
    this.speed = new SpeedView(root, live);
  }

  setVisible(visible) {
    this.timeline.setVisible(visible);
    this.speed.setVisible(visible);
  }

  update() {
    this.speed.update();
  }

  // Draws in the colours of the present scheme.
  redraw() {
    this.timeline.redraw();
  }
}
