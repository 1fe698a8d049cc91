// Frames as a Chrome trace, which Perfetto opens (ui.perfetto.dev).

const NAMES = { p: "prompt", d: "decode", w: "window", s: "speculative", i: "invalidated" };

export function traceOf(frames, machines) {
  const events = machines.map((name, i) => ({ ph: "M", name: "thread_name", pid: 1, tid: i + 1, args: { name } }));
  events.push({ ph: "M", name: "process_name", pid: 1, args: { name: "mtp-cluster" } });
  for (const frame of frames) {
    frame.stages.forEach((stage, i) => events.push({
      ph: "X",
      name: NAMES[frame.kind],
      cat: "frame",
      pid: 1,
      tid: i + 1,
      ts: Math.round(stage.start * 1e6),
      dur: Math.round(stage.length * 1e6),
      args: { frame: frame.number, rows: frame.rows, rejected: frame.wasted },
    }));
  }
  return { displayTimeUnit: "ms", traceEvents: events };
}
