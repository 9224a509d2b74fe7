// The lane wall: every busy lane as a cell at its key's slot, a band for each task, coloured by state. Cells flash when
// their state changes, and fade. Drawn into an image of one pixel per cell, so that 60 frames a second cost little.

import { get } from "./api.js";
import { h, render } from "./dom.js";
import { count } from "./format.js";
import { problem } from "./widgets.js";

const SLOTS = 65536;
const COLUMNS = 512;
const ROWS = SLOTS / COLUMNS;
const POLL_MS = 1000;
const FADE_MS = 900;
// Okabe and Ito's colours; the order says what hides what when two lanes share a cell.
const LOOKS = {
  idle: { colour: [120, 140, 160], rank: 0, word: "finished, results on their way" },
  ready: { colour: [86, 180, 233], rank: 1, word: "ready" },
  running: { colour: [0, 158, 115], rank: 2, word: "running" },
  returning: { colour: [160, 160, 60], rank: 3, word: "being read again" },
  waiting: { colour: [0, 114, 178], rank: 4, word: "waiting for a breaker" },
  retrying: { colour: [230, 159, 0], rank: 5, word: "retrying" },
  stopped: { colour: [213, 94, 0], rank: 6, word: "stopped" },
};

export function wallOf(root, name) {
  let closed = false, timer = null, failed = null, only = null, frames = 0, since = performance.now(), perSecond = 0;
  let states = [], tasks = [], total = 0;
  const bands = new Map();
  const canvas = h("canvas.wall", { role: "img", "aria-label": "lane wall", tabindex: "0" });
  const legend = h("div.legend"), says = h("div"), hint = h("span.small");
  render(root, h("section.card", null, h("div.chartbar", null, h("h2", null, "Lane wall"), h("span.small", null, "a cell for each slot of keys, a band for each task"), hint, legend), says, canvas));
  const pen = canvas.getContext("2d");

  async function poll() {
    clearTimeout(timer);
    if (closed) return;
    if (!document.hidden) {
      try {
        take(await get(`/api/apps/${name}/wall`));
        failed = null;
      } catch (error) { failed = error; }
      if (closed) return;
      render(says, failed ? problem(failed) : null);
    }
    timer = setTimeout(poll, POLL_MS);
  }

  function take(found) {
    states = found.states;
    tasks = found.tasks;
    total = 0;
    const counts = new Array(states.length).fill(0);
    const seen = new Set();
    for (const one of tasks) {
      seen.add(one.task);
      const text = atob(one.lanes);
      const band = bands.get(one.task) || bands.set(one.task, { cells: new Uint8Array(SLOTS), changed: new Float64Array(SLOTS).fill(-1e9), at: 0 }).get(one.task);
      if (band.at === one.at) { for (let i = 2; i < text.length; i += 3) counts[text.charCodeAt(i)] += 1; total += text.length / 3; continue; }
      band.at = one.at;
      const fresh = new Uint8Array(SLOTS);
      for (let i = 0; i + 2 < text.length; i += 3) {
        const slot = text.charCodeAt(i) | (text.charCodeAt(i + 1) << 8), state = text.charCodeAt(i + 2);
        counts[state] += 1;
        if (fresh[slot] === 0 || LOOKS[states[state]].rank > LOOKS[states[fresh[slot] - 1]].rank) fresh[slot] = state + 1;
      }
      total += text.length / 3;
      const now = performance.now();
      for (let slot = 0; slot < SLOTS; slot += 1) if (fresh[slot] !== band.cells[slot]) band.changed[slot] = now;
      band.cells = fresh;
    }
    for (const task of [...bands.keys()]) if (!seen.has(task)) bands.delete(task);
    render(hint, tasks.length ? `${count(total)} lanes have messages` : "waiting for the tasks: they send their lanes only while somebody looks");
    render(legend, states.map((state, index) => h("button.statekey", { type: "button", "aria-pressed": only === index ? "true" : "false", title: "Show only these", on: { click: () => { only = only === index ? null : index; } } },
      h("i.box", { css: { background: `rgb(${LOOKS[state].colour})` } }), ` ${LOOKS[state].word} `, h("b", null, count(counts[index])))));
    canvas.setAttribute("aria-label", `lane wall: ${states.map((state, index) => `${count(counts[index])} ${LOOKS[state].word}`).join(", ")}`);
  }

  const image = document.createElement("canvas");

  function frame(now) {
    if (closed) return;
    frames += 1;
    if (now - since > 1000) { perSecond = Math.round((frames * 1000) / (now - since)); canvas.dataset.fps = perSecond; canvas.dataset.lanes = total; frames = 0; since = now; }
    const shown = [...bands.entries()].sort((a, b) => a[0] - b[0]);
    const number = Math.max(1, shown.length);
    const deep = Math.max(8, Math.floor(ROWS / number)), gap = number > 1 ? 2 : 0;
    const tall = number * deep + (number - 1) * gap;
    if (image.width !== COLUMNS || image.height !== tall) { image.width = COLUMNS; image.height = tall; }
    const inner = image.getContext("2d");
    const pixels = inner.createImageData(COLUMNS, tall);
    const data = new Uint32Array(pixels.data.buffer);
    const dark = getComputedStyle(document.body).color.match(/\d+/g)[0] > 128;
    const ground = dark ? 0xff342a1f : 0xfff5f2ee;
    const packed = states.map((state) => { const [r, g, b] = LOOKS[state].colour; return 0xff000000 | (b << 16) | (g << 8) | r; });
    shown.forEach(([, band], place) => {
      const top = place * (deep + gap);
      data.fill(ground, top * COLUMNS, (top + deep) * COLUMNS);
      for (let slot = 0; slot < SLOTS; slot += 1) {
        const cell = band.cells[slot];
        const fresh = now - band.changed[slot];
        if (cell === 0 && fresh > FADE_MS) continue;
        if (only !== null && cell !== only + 1) continue;
        const at = (top + Math.floor(((slot / COLUMNS) | 0) * deep / ROWS)) * COLUMNS + (slot % COLUMNS);
        if (cell !== 0) {
          const under = data[at];
          if (under === ground || fresh < FADE_MS / 2) data[at] = packed[cell - 1];
        } else if (data[at] === ground) data[at] = dark ? 0xff564838 : 0xffd8d0c8;
      }
    });
    if (!shown.length) data.fill(ground);
    inner.putImageData(pixels, 0, 0);
    const ratio = devicePixelRatio || 1, width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    pen.imageSmoothingEnabled = false;
    pen.drawImage(image, 0, 0, width, height);
    requestAnimationFrame(frame);
  }

  canvas.onpointermove = (event) => {
    const box = canvas.getBoundingClientRect();
    const shown = [...bands.entries()].sort((a, b) => a[0] - b[0]);
    if (!shown.length) return;
    const band = Math.min(shown.length - 1, Math.floor(((event.clientY - box.top) / box.height) * shown.length));
    const within = ((event.clientY - box.top) / box.height) * shown.length - band;
    const slot = Math.min(ROWS - 1, Math.floor(within * ROWS)) * COLUMNS + Math.min(COLUMNS - 1, Math.floor(((event.clientX - box.left) / box.width) * COLUMNS));
    const cell = shown[band][1].cells[slot];
    canvas.title = `task ${shown[band][0]}, about slot ${slot}: ${cell ? LOOKS[states[cell - 1]].word : "no lane with messages"}`;
  };

  poll();
  requestAnimationFrame(frame);
  return { close() { closed = true; clearTimeout(timer); } };
}
