// The history's samples by field, as coordinator/status/history.py orders them.

const FIELDS = ["at", "tokensPerSecond", "acceptance", "running", "waiting", "first50", "first95", "gap50", "gap95"];

export function valueOf(sample, field) {
  return sample[FIELDS.indexOf(field)];
}

export function points(history, field) {
  return history.map((sample) => ({ at: sample[0], value: valueOf(sample, field) }));
}

export function latest(history, field) {
  const sample = history.at(-1);
  return sample ? valueOf(sample, field) : null;
}
