// Parts that several pages share.

import { h, link } from "./dom.js";
import { age, count, plain, state } from "./format.js";

export function pill(name) {
  const { sign, tone, word } = state(name);
  return h("span", { class: `pill ${tone}` }, h("span.sign", { "aria-hidden": "true" }, sign), word);
}

export function figure(label, value, note, extra) {
  return h("div.figure", null, h("div.label", null, label), h("div.value", null, value), note ? h("div.small", null, note) : null, extra);
}

export const LANE_STATES = [
  ["running", "good", "●"], ["ready", "sky", "◦"], ["retrying", "warn", "↻"], ["waiting", "busy", "◔"], ["blocked", "bad", "■"], ["parked", "purple", "▣"],
];

export function laneBar(lanes) {
  if (!lanes) return null;
  const shown = LANE_STATES.filter(([name]) => lanes[name]);
  const total = shown.reduce((sum, [name]) => sum + lanes[name], 0);
  return h("div.lanebar", null,
    h("div.strip", { role: "img", "aria-label": shown.map(([name]) => `${count(lanes[name])} ${name}`).join(", ") || "no lane is busy" },
      shown.map(([name, tone]) => h("i", { class: `box ${tone}`, css: { "flex-grow": Math.max(lanes[name], total / 40) } }))),
    h("div.small", null, shown.length ? shown.map(([name, tone, sign]) => h("span.lanekey", null, h("span", { class: `text ${tone}`, "aria-hidden": "true" }, sign), ` ${count(lanes[name])} ${name} `)) : "no lane is busy"));
}

export function command(text) {
  return h("div.cli", null, h("code", null, plain(text)),
    h("button.copy", { type: "button", title: "Copy the command", on: { click: (event) => copy(event.currentTarget, text) } }, "Copy"));
}

function copy(button, text) {
  navigator.clipboard?.writeText(text).then(() => {
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }, () => { button.textContent = "Select it by hand"; });
}

export function problem(error) {
  return h("div.problem", { role: "alert" }, h("b", null, "This did not work. "), plain(error.message || error));
}

export function empty(text) {
  return h("p.empty", null, text);
}

export function key(text) {
  return text === null || text === undefined ? h("i.nokey", null, "no key") : h("span.lanename", { title: plain(text).slice(0, 500) }, plain(text).slice(0, 120));
}

export function laneLink(app, lane) {
  const where = lane.key === null ? `at=${lane.position || `${lane.partition}@${lane.offset}`}` : `key=${encodeURIComponent(lane.key)}`;
  return link(`/apps/${app}/lane?${where}`, { class: "row" }, key(lane.key));
}

export function pager(page, pages, go, more = page + 1 < pages) {
  if (!page && !more) return null;
  return h("nav.pager", { "aria-label": "pages" },
    h("button", { type: "button", disabled: page === 0, on: { click: () => go(page - 1) } }, "← Newer"),
    h("span", null, pages ? `page ${page + 1} of ${count(pages)}` : `page ${page + 1}`),
    h("button", { type: "button", disabled: !more, on: { click: () => go(page + 1) } }, "Older →"));
}

export function table(headings, rows, caption) {
  return h("div.scroll", null, h("table", null, caption ? h("caption", null, caption) : null,
    h("thead", null, h("tr", null, headings.map((name) => h("th", { scope: "col", class: name.startsWith("#") ? "num" : null }, name.replace(/^#/, ""))))),
    h("tbody", null, rows)));
}

export function cells(...values) {
  return values.map((value) => (value instanceof Node && value.nodeName === "TD" ? value : h("td", null, value)));
}

export const num = (value) => h("td.num", null, value);

export function jobs(list) {
  if (!list || !list.length) return null;
  return h("section.card", { "aria-label": "Actions of this console" }, h("h2", null, "Actions"),
    h("ul.jobs", null, list.map((job) => h("li", { "data-id": job.id },
      h("span", { class: `text ${job.ended ? (job.ok ? "good" : job.ok === false ? "bad" : "warn") : "busy"}` }, job.ended ? (job.ok ? "✓" : job.ok === false ? "✕" : "…") : "◐"), " ",
      h("b", null, plain(job.what)), ", by ", plain(job.who), `: “${plain(job.reason)}”`,
      job.do === "redrive" && !job.ended ? h("progress", { max: Math.max(1, job.letters), value: job.redriven }) : null,
      h("div.small", { role: "status" }, job.ended ? plain(job.outcome) || "done" : job.do === "redrive" ? `${count(job.redriven)} of ${count(job.letters)} dead letters, ${count(job.answered)} of ${count(job.total)} lanes` : `waiting for the app, ${age(Date.now() / 1000 - job.began)}`),
      job.failures.length ? h("details", null, h("summary", null, `${count(job.failures.length)} lanes where some messages failed`), h("ul", null, job.failures.map((one) => h("li", null, plain(one))))) : null))));
}
