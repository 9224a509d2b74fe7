// Figures and times as a person reads them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= limit) {
      const by = unit === "k" ? 1e3 : limit;
      return `${trim(value / by, value / by < 100 ? 1 : 0)}${unit}`;
    }
  }
  return Math.abs(value) < 10 && value % 1 ? trim(value, 1) : whole.format(value);
}

function trim(value, digits) {
  return value.toFixed(digits).replace(/\.0$/, "");
}

export function rate(value) {
  return value === null || value === undefined ? "–" : `${short(value)}/s`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  if (value < 0.001) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${trim(value, 1)} s`;
  return age(value);
}

export function age(value) {
  if (value === null || value === undefined) return "–";
  const all = Math.max(0, Math.floor(value));
  const parts = [[Math.floor(all / 86400), "d"], [Math.floor(all / 3600) % 24, "h"], [Math.floor(all / 60) % 60, "min"], [all % 60, "s"]];
  while (parts.length > 1 && !parts[0][0]) parts.shift();
  return parts.slice(0, 2).filter(([number], index) => number || !index).map(([number, unit]) => `${number} ${unit}`).join(" ");
}

export function ago(at, now = Date.now() / 1000) {
  return at === null || at === undefined ? "–" : `${age(now - at)} ago`;
}

export function clock(at, exact = false) {
  if (at === null || at === undefined) return "–";
  const date = new Date(at * 1000);
  if (Number.isNaN(date.getTime())) return `${at} s`;
  const pad = (number, digits = 2) => String(number).padStart(digits, "0");
  const time = `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}${exact ? `.${pad(date.getMilliseconds(), 3)}` : ""}`;
  const today = date.toDateString() === new Date().toDateString();
  return today ? time : `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${time}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return "none";
  return value < 1024 ? `${value} B` : value < 1 << 20 ? `${trim(value / 1024, 1)} KB` : `${trim(value / (1 << 20), 1)} MB`;
}

export function counted(number, noun) {
  return `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// Control characters and marks that turn the direction of writing, made visible.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function plain(text) {
  return String(text).replace(HIDDEN, (c) => `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

export function lines(text) {
  return String(text).split("\n").map((line) => plain(line.replace(/\t/g, "    "))).join("\n");
}

export const STATES = {
  "idle": { sign: "○", tone: "calm", word: "idle" },
  "keeping up": { sign: "●", tone: "good", word: "keeping up" },
  "catching up": { sign: "◐", tone: "busy", word: "catching up" },
  "falling behind": { sign: "▲", tone: "warn", word: "falling behind" },
  "stuck": { sign: "■", tone: "bad", word: "stuck" },
  "not running": { sign: "✕", tone: "bad", word: "not running" },
  "starting": { sign: "…", tone: "calm", word: "starting" },
  "unknown": { sign: "?", tone: "warn", word: "unknown" },
};

export const state = (name) => STATES[name] || STATES.unknown;
