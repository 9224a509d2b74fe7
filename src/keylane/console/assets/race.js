// The race: the same messages through three apps that differ in their order alone. Drawn a moment late, because a
// message's start is known when it has finished.

import { get, post } from "./api.js";
import { h, render } from "./dom.js";
import { count, plain, rate } from "./format.js";
import { problem } from "./widgets.js";

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7d00", "#7a6fb0"];
const LATE_SECONDS = 0.7;
const POLL_MS = 150;
const WORKERS = 12;
const WORDS = {
  none: ["No order", "whoever is free takes the next message"],
  global: ["One lane", "one message after another, in the whole app"],
  key: ["A lane per key", "in order inside a key, keys at the same time"],
};

export function racePage(root) {
  let closed = false, failed = null, shift = 0, facts = null;
  const tracks = new Map();
  const says = h("div"), boxes = h("div.race"), moral = h("div");
  render(root, h("div.head.big", null, h("h1", null, "The race: the same messages, three orderings"), h("button", { type: "button", class: "primary", id: "again", on: { click: start } }, "Start the race")),
    h("p.small", null, "Real Kafka, real Spark, three apps. Colour and number name the message's key; a message that was overtaken inside its key is marked !"), says, boxes, moral);

  async function start() {
    try { await post("/api/race/start", {}); } catch (error) { failed = error; }
  }

  function box(order) {
    const [title, what] = WORDS[order];
    const strip = h("canvas", { role: "img" }), workers = h("canvas", { role: "img" }), trace = h("canvas", { role: "img" });
    const badge = h("span.badge.speed"), done = h("span.small"), verdict = h("p.verdict");
    boxes.append(h("section.card.track", { "data-order": order }, h("div.head", null, h("h2", null, title), h("span.small", null, what), h("span.space"), done, badge),
      h("div.label", null, "finished, the newest at the right"), trace, h("div.label", null, "waiting, the next at the left"), strip, h("div.label", null, "in the handler"), workers, verdict));
    return { order, strip, workers, trace, badge, done, verdict, finishes: [], facts: null };
  }

  async function poll() {
    if (closed) return;
    try {
      const known = Object.fromEntries([...tracks.values()].map((one) => [one.order, one.finishes.length]));
      const found = await get("/api/race", { round: facts?.round ?? 0, ...known });
      failed = null;
      shift = found.now - Date.now() / 1000;
      if (facts && found.round !== facts.round) for (const one of tracks.values()) one.finishes = [];
      facts = found;
      for (const one of found.tracks) {
        const track = tracks.get(one.order) || tracks.set(one.order, box(one.order)).get(one.order);
        if (one.from === track.finishes.length) track.finishes.push(...one.finishes);
        track.facts = one;
      }
    } catch (error) { failed = error; }
    setTimeout(poll, POLL_MS);
  }

  function frame() {
    if (closed) return;
    render(says, failed ? problem(failed) : null);
    if (facts) {
      const now = Date.now() / 1000 + shift - LATE_SECONDS;
      let over = facts.tracks.length > 0;
      for (const track of tracks.values()) over = draw(track, facts, now) && over;
      const button = root.querySelector("#again");
      button.disabled = facts.waiting || (facts.tracks.length > 0 && !over);
      button.textContent = facts.round ? (over ? "Race again" : "Running …") : "Start the race";
      render(moral, over ? h("section.card.moral", { id: "over" }, h("h2", null, "The figures"), h("p", null, [...tracks.values()].map((one) => `${WORDS[one.order][0]}: ${one.facts.seconds.toFixed(1)} s, ${rate(one.facts.per_second)}, ${count(one.facts.overtaken_in_key)} overtaken inside their key`).join(" · "))) : null);
    }
    requestAnimationFrame(frame);
  }

  poll();
  requestAnimationFrame(frame);
  return { close() { closed = true; } };
}

function surface(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  pen.font = "600 10px system-ui, sans-serif";
  return [pen, width];
}

function chip(pen, x, y, width, height, key, text, mark) {
  pen.fillStyle = COLOURS[key % COLOURS.length];
  pen.beginPath();
  pen.roundRect(x, y, width, height, 3);
  pen.fill();
  if (mark) {
    pen.strokeStyle = getComputedStyle(document.body).color;
    pen.lineWidth = 2;
    pen.stroke();
  }
  pen.fillStyle = [1, 5].includes(key % COLOURS.length) ? "#102030" : "#ffffff";
  pen.fillText(text, x + width / 2, y + height / 2 + 0.5);
}

function draw(track, race, now) {
  const done = [], busy = [], seen = new Set();
  for (const [number, key, late, started, finished] of track.finishes) {
    if (finished <= now) done.push([number, key, late]);
    else if (started <= now) busy.push([number, key, started]);
    else continue;
    seen.add(number);
  }
  const { facts } = track;
  const over = done.length >= facts.messages;
  let [pen, width] = surface(track.trace, 26);
  const fits = Math.floor(width / 30);
  done.slice(-fits).forEach(([number, key, late], index) => chip(pen, index * 30, 3, 28, 20, key, `${late ? "!" : ""}${number}`, late));
  [pen, width] = surface(track.strip, 20);
  const room = Math.floor(width / 13);
  for (let number = 0, at = 0; number < race.messages && at < room; number += 1) {
    if (seen.has(number)) continue;
    chip(pen, at * 13, 2, 12, 16, number % race.keys, String(number % race.keys));
    at += 1;
  }
  [pen, width] = surface(track.workers, 26);
  const boxes = Math.min(WORKERS, Math.floor(width / 46) - 1);
  busy.sort((a, b) => a[2] - b[2]);
  for (let index = 0; index < boxes; index += 1) {
    const one = busy[index];
    if (one) chip(pen, index * 46, 3, 42, 20, one[1], `${one[0]}`);
    else {
      pen.strokeStyle = "#8090a0";
      pen.lineWidth = 1;
      pen.setLineDash([2, 2]);
      pen.strokeRect(index * 46 + 0.5, 3.5, 41, 19);
      pen.setLineDash([]);
      pen.fillStyle = "#8090a0";
      pen.fillText("idle", index * 46 + 21, 13);
    }
  }
  if (busy.length > boxes) {
    pen.fillStyle = getComputedStyle(document.body).color;
    pen.textAlign = "left";
    pen.fillText(`+ ${busy.length - boxes}`, boxes * 46 + 4, 13);
  }
  const late = done.filter((one) => one[2]).length;
  track.badge.textContent = done.length ? rate(facts.per_second) : "–";
  track.done.textContent = `${count(done.length)} of ${count(facts.messages)}`;
  const kept = track.order === "none" ? `${count(late)} messages were overtaken inside their key` : late ? `${count(late)} OVERTAKEN INSIDE THEIR KEY` : "every key in order";
  track.verdict.textContent = `${over ? `Done in ${facts.seconds.toFixed(1)} s: ` : ""}${plain(kept)}`;
  track.verdict.className = `verdict text ${track.order === "none" || late ? "warn" : "good"}`;
  track.trace.setAttribute("aria-label", `finished: ${done.slice(-20).map((one) => one[0]).join(" ")}`);
  track.strip.setAttribute("aria-label", `${count(facts.messages - done.length - busy.length)} waiting`);
  track.workers.setAttribute("aria-label", `${count(busy.length)} in the handler`);
  track.badge.parentElement.parentElement.dataset.trace = done.map((one) => one[0]).join(" ");
  return over;
}
