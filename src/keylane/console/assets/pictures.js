// Pictures from live data: the ring with its owners, and each partition's watermark.

import { h, render } from "./dom.js";
import { count, plain, short } from "./format.js";
import { empty, table } from "./widgets.js";

const TONES = ["sky", "warn", "good", "purple", "bad", "busy", "yellow", "calm"];
const SLOTS = 65536;

function arc(cx, cy, inner, outer, from, to) {
  const point = (radius, share) => [cx + radius * Math.sin(share * 2 * Math.PI), cy - radius * Math.cos(share * 2 * Math.PI)];
  const end = Math.min(to, from + 0.99999), big = end - from > 0.5 ? 1 : 0;
  const [a, b, c, d] = [point(outer, from), point(outer, end), point(inner, end), point(inner, from)];
  return `M${a}A${outer} ${outer} 0 ${big} 1 ${b}L${c}A${inner} ${inner} 0 ${big} 0 ${d}Z`;
}

function parse(text) {
  const [partition, slots] = text.split(":");
  const [first, last] = slots ? slots.split("-").map(Number) : [0, SLOTS - 1];
  return { partition: Number(partition), first, last };
}

export function ring(data) {
  const tasks = data.plan.tasks.map((ranges) => ranges.map(parse));
  const partitions = [...new Set(tasks.flat().map((one) => one.partition))].sort((a, b) => a - b).slice(0, 12);
  const size = 420, middle = size / 2, outer = 190, deep = Math.min(34, 130 / Math.max(1, partitions.length));
  const leaving = (data.claims || []).filter((one) => one.leaving);
  const rings = partitions.map((partition, row) => {
    const [far, near] = [outer - row * deep, outer - (row + 1) * deep + 2];
    return [tasks.flatMap((ranges, task) => ranges.filter((one) => one.partition === partition).map((one) =>
      h("path", { class: `arc ${TONES[task % TONES.length]}`, d: arc(middle, middle, near, far, one.first / SLOTS, (one.last + 1) / SLOTS) }, h("title", null, `partition ${partition}, slots ${one.first} to ${one.last}: task ${task}`)))),
    tasks.flatMap((ranges, task) => ranges.filter((one) => one.partition === partition && one.last - one.first > SLOTS / 24).map((one) => {
      const angle = ((one.first + one.last) / 2 / SLOTS) * 2 * Math.PI, radius = (far + near) / 2;
      return h("text.owner", { x: middle + radius * Math.sin(angle), y: middle - radius * Math.cos(angle) + 4, "text-anchor": "middle" }, task);
    })),
    leaving.filter((one) => one.partition === partition).map((one) => h("path", { class: "arc drain", d: arc(middle, middle, near, far, one.first / SLOTS, (one.last + 1) / SLOTS) }, h("title", null, `${plain(one.who)} drains slots ${one.first} to ${one.last} of partition ${partition}`))),
    h("text.tick", { x: middle + 3, y: middle - far + 11 }, `p${partition}`)];
  });
  return h("figure.card.chartbox", null, h("figcaption", null, h("span.title", null, "The ring"), h("span.note", null, "65,536 slots of keys, a circle for each partition, coloured and numbered by task")),
    h("svg.ring", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `${data.plan.tasks.length} tasks share ${partitions.length} partitions` }, rings,
      h("text.centre", { x: middle, y: middle - 4, "text-anchor": "middle" }, count(data.plan.tasks.length)), h("text.tick", { x: middle, y: middle + 14, "text-anchor": "middle" }, data.plan.tasks.length === 1 ? "task" : "tasks")),
    h("ul.legendlist", null, tasks.map((ranges, task) => h("li", null, h("i", { class: `box ${TONES[task % TONES.length]}` }), ` task ${task}: `, ranges.slice(0, 12).map((one) => (one.last - one.first === SLOTS - 1 ? `p${one.partition}` : `p${one.partition} slots ${one.first}–${one.last}`)).join(", "), ranges.length > 12 ? " …" : "")),
      leaving.map((one) => h("li", null, h("i.box.drain"), ` draining: ${plain(one.who)} finishes slots ${one.first}–${one.last} of p${one.partition} before it gives them up`))));
}

function strip(one) {
  const from = one.begin, to = Math.max(one.end, from + 1), width = 600;
  const window_ = Math.max(20, Math.min(to - from, Math.max(200, (to - one.reached) * 2)));
  const first = Math.max(from, to - window_);
  const x = (offset) => ((Math.max(first, offset) - first) / (to - first)) * width;
  const read = one.position === null ? one.reached : Math.max(one.position, one.reached);
  const committed = one.committed ?? from;
  return h("tr", { "data-id": `w${one.partition}` }, h("td.tight", null, `p${one.partition}`), h("td", null, h("svg.watermark", { viewBox: `0 0 ${width} 34`, preserveAspectRatio: "none", role: "img", "aria-label": `partition ${one.partition}: done below ${one.reached}, read below ${read}, end ${one.end}` },
    h("rect.done", { x: 0, y: 6, width: Math.max(0, x(one.reached)), height: 16 }, h("title", null, `done: every offset below ${one.reached}`)),
    h("rect.read", { x: x(one.reached), y: 6, width: Math.max(0, x(read) - x(one.reached)), height: 16 }, h("title", null, `read, not all done: offsets ${one.reached} to ${read}`)),
    h("rect.unread", { x: x(read), y: 6, width: Math.max(0, width - x(read)), height: 16 }, h("title", null, `not read yet: offsets ${read} to ${one.end}`)),
    h("line.wm", { x1: x(committed), x2: x(committed), y1: 0, y2: 28 }, h("title", null, `committed offset ${committed}`))), single(one, committed)),
  h("td.num", null, count(committed)), h("td.num", null, count(one.reached)), h("td.num", null, count(one.end)), h("td.num", null, short(one.lag)));
}

// The first offsets from the committed one on: done (filled, ✓) or not (hollow, ✗).
function single(one, committed) {
  if (one.cells === null) return h("div.small", null, "the single offsets are in the state topic");
  if (!one.cells) return null;
  return h("div.cells", { role: "img", "aria-label": `from offset ${committed}: ${one.cells.replaceAll("d", "done ").replaceAll("p", "waiting ")}` },
    [...one.cells].map((cell, index) => h("i", { class: cell === "d" ? "cell d" : "cell p", title: `offset ${committed + index}: ${cell === "d" ? "done" : "not done"}` }, cell === "d" ? "✓" : "✗")));
}

export function picturesPage(root) {
  render(root, empty("Waiting for the app's figures …"));
  return {
    update(event, data) {
      if (event !== "app") return;
      if (data.error || !data.partitions) { render(root, empty(plain(data.error || data.facts?.sentence || "no figures"))); return; }
      render(root, h("h1.sr", null, "Pictures"), h("div.pair.wide", null,
        data.plan ? ring(data) : empty("No epoch was planned yet."),
        h("section.card", null, h("h2", null, "Watermarks"), h("p.small", null, "Everything left of the line is committed: a restart begins there. ", h("i.box.good"), " done  ", h("i.box.busy"), " read, not done  ", h("i.box.none"), " not read yet. Below a strip: the first offsets from the committed one on, ✓ done, ✗ not done. The ✓ are not run again after a restart."),
          table(["", "Offsets", "#Committed", "#Done below", "#End", "#Lag"], data.partitions.map(strip)))));
    },
  };
}
