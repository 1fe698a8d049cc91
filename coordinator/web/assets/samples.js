// The history's samples by field, as coordinator/status/history.py orders them.

const FIELDS = ["at", "tokensPerSecond", "acceptance", "running", "waiting", "first50", "first95", "gap50", "gap95"];

export function points(history, field) {
  const index = FIELDS.indexOf(field);
  return history.map((sample) => ({ at: sample[0], value: sample[index] }));
}

export function latest(history, field) {
  const sample = history.at(-1);
  return sample ? sample[FIELDS.indexOf(field)] : null;
}

// Mean over the last `count` samples that have a value.
export function recentMean(history, field, count) {
  const index = FIELDS.indexOf(field);
  const values = history.slice(-count).map((sample) => sample[index]).filter((value) => value !== null);
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}
