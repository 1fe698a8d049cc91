// The share of time that each machine computed, from its counter of busy seconds.

const WINDOW_SECONDS = 5;

export class BusyMeter {
  constructor() {
    this.readings = new Map();
  }

  record(nodes, now) {
    for (const node of nodes) {
      const key = node.address ?? node.name;
      const list = this.readings.get(key) ?? [];
      if (list.length && node.busy_seconds < list.at(-1).busy) list.length = 0; // the worker was restarted
      if (!list.length || node.busy_seconds !== list.at(-1).busy || now - list.at(-1).at > 1) list.push({ at: now, busy: node.busy_seconds, in: node.bytes_in, out: node.bytes_out });
      while (list.length > 2 && list[0].at < now - WINDOW_SECONDS) list.shift();
      this.readings.set(key, list);
    }
  }

  // Bytes a second of frames, or null before the second reading and while none travel.
  traffic(node) {
    const list = this.readings.get(node.address ?? node.name) ?? [];
    const first = list[0];
    const last = list.at(-1);
    if (list.length < 2 || !node.address || last.at - first.at < 1 || last.in + last.out === first.in + first.out) return null;
    const rate = (name) => Number(((last[name] - first[name]) / (last.at - first.at)).toPrecision(2));
    return { in: rate("in"), out: rate("out") };
  }

  // From 0 to 1, or null before the second reading.
  share(node) {
    const list = this.readings.get(node.address ?? node.name) ?? [];
    if (list.length < 2 || !node.address) return null;
    const first = list[0];
    const last = list.at(-1);
    return last.at - first.at < 1 ? null : Math.round(Math.min(1, (last.busy - first.busy) / (last.at - first.at)) * 100) / 100;
  }
}
