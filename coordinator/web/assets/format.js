// Numbers as people read them.

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[unit]}`;
}

export function count(value) {
  return Math.round(value).toLocaleString("en-US");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.00005) return value > 0 ? "under 0.1 ms" : "0 s";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(Math.round(value) / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(value) % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`;
}

export function rate(value) {
  return value >= 100 ? count(value) : value.toFixed(1);
}

export function clockTime(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
