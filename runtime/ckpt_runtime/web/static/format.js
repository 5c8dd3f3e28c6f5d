// Numbers and times as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(count) {
  if (typeof count !== "number" || count < 0) return "–";
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1).replace(".0", "")} ${UNITS[unit]}`;
}

export function duration(milliseconds) {
  if (typeof milliseconds !== "number" || milliseconds < 0) return "–";
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const steps = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = steps.findIndex(([, size]) => seconds >= size);
  const [name, size] = steps[first];
  const whole = Math.floor(seconds / size);
  const rest = steps[first + 1] ? Math.floor((seconds - whole * size) / steps[first + 1][1]) : 0;
  return rest ? `${whole} ${name} ${rest} ${steps[first + 1][0]}` : `${whole} ${name}`;
}

export function percent(share) {
  return typeof share === "number" ? `${Math.round(share * 100)} %` : "–";
}

const two = (number) => String(number).padStart(2, "0");

/** Local time; with its date unless that is today. */
export function clock(timestamp) {
  if (typeof timestamp !== "number" || timestamp <= 0) return "–";
  const at = new Date(timestamp);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  if (at.toDateString() === new Date().toDateString()) return time;
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${time}`;
}

/** Steps for an axis up to `greatest`: at most six, round in the unit's own base. */
export function ticks(greatest, base) {
  if (!(greatest > 0)) return [0, 1];
  let unit = 1;
  if (base === 1024) while (unit * 1024 <= greatest) unit *= 1024;
  else if (base === "time") unit = [86400e3, 3600e3, 60e3, 1e3].find((size) => greatest >= size * 2) ?? 1;
  const raw = greatest / unit / 5;
  const scale = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * scale >= raw) * scale * unit;
  const found = [];
  for (let at = 0; at < greatest + step; at += step) found.push(at);
  return found;
}
