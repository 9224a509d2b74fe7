// Charts as SVG: lines, bars, sparklines and heat maps. Lines differ by dash too, never by colour alone.

import { h } from "./dom.js";
import { clock, short } from "./format.js";

const DASHES = ["", "6 3", "2 3", "8 3 2 3"];
const WIDTH = 640;

export function spark(values, tone, label, width = 120, height = 30) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(1e-9, ...known);
  const step = width / Math.max(1, values.length - 1);
  const parts = [];
  let open = false;
  values.forEach((value, index) => {
    if (value === null) { open = false; return; }
    parts.push(`${open ? "L" : "M"}${(index * step).toFixed(1)} ${(height - 2 - (value / top) * (height - 4)).toFixed(1)}`);
    open = true;
  });
  return h("svg.spark", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    h("path", { d: parts.join(""), class: `line ${tone}` }));
}

function scale(top) {
  if (!(top > 0)) return { top: 1, ticks: [0, 1] };
  const power = 10 ** Math.floor(Math.log10(top));
  const unit = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => top / one <= 4) || 10 * power;
  const ticks = [];
  for (let at = 0; at < top + unit * 0.999; at += unit) ticks.push(at);
  return { top: ticks[ticks.length - 1], ticks };
}

function timeTicks(times, left, right, y) {
  const found = [];
  const every = Math.max(1, Math.floor(times.length / 5));
  for (let index = 0; index < times.length; index += every) {
    const x = left + (index / Math.max(1, times.length - 1)) * (right - left);
    if (x > right - 24) break;
    found.push(h("text.tick", { x, y, "text-anchor": index ? "middle" : "start" }, clock(times[index]).slice(-8, -3)));
  }
  return found;
}

function drawMarks(marks, times, left, right, top, bottom) {
  const span = times[times.length - 1] - times[0] || 1;
  return (marks || []).map((mark) => {
    const x = left + ((mark.at - times[0]) / span) * (right - left);
    if (x < left || x > right) return null;
    const sign = { epoch: "e", restart: "R", takeover: "T" }[mark.kind] || "?";
    return h("g", { class: `mark ${mark.kind}` },
      h("line", { x1: x, x2: x, y1: top, y2: bottom }),
      h("text", { x: x + 2, y: top + 8 }, sign),
      h("title", null, `${clock(mark.at)} ${mark.what}`));
  });
}

// `series`: [{ name, tone, values }]. `format` shows a value.
export function lineChart({ title, note, times, series, marks, format = short, height = 170, area = false }) {
  const left = 48, right = WIDTH - 8, top = 10, bottom = height - 22;
  const all = series.flatMap((one) => one.values).filter((value) => value !== null && value !== undefined);
  const { top: most, ticks } = scale(Math.max(0, ...all));
  const x = (index) => left + (index / Math.max(1, times.length - 1)) * (right - left);
  const y = (value) => bottom - (value / most) * (bottom - top);
  const drawn = [];
  series.forEach((one, number) => {
    const parts = [];
    let open = false, begin = 0, end = 0;
    one.values.forEach((value, index) => {
      if (value === null || value === undefined) { open = false; return; }
      if (!open && !parts.length) begin = x(index);
      parts.push(`${open ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
      open = true;
      end = x(index);
    });
    if (area && number === 0 && parts.length > 1) {
      drawn.push(h("path", { class: `fill ${one.tone}`, d: `${parts.join("").replaceAll("M", "L").replace("L", "M")}L${end.toFixed(1)} ${bottom}L${begin.toFixed(1)} ${bottom}Z` }));
    }
    drawn.push(h("path", { class: `line ${one.tone}`, d: parts.join(""), "stroke-dasharray": DASHES[number % DASHES.length] || null }));
  });
  const legend = series.map((one, number) => {
    const last = [...one.values].reverse().find((value) => value !== null && value !== undefined);
    return h("span.key", null,
      h("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" }, h("path", { d: "M0 4H24", class: `line ${one.tone}`, "stroke-dasharray": DASHES[number % DASHES.length] || null })),
      one.name, " ", h("b", null, last === undefined ? "–" : format(last)));
  });
  const cursor = h("g.cursor", { visibility: "hidden" }, h("line", { y1: top, y2: bottom }), h("text", { y: top + 2 }));
  const svg = h("svg.chart", {
    viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": `${title}: ${legend.map((one) => one.textContent).join(", ")}`,
    on: {
      pointermove: (event) => {
        const box = event.currentTarget.getBoundingClientRect();
        const cursor = event.currentTarget.querySelector(".cursor");
        const at = ((event.clientX - box.left) / box.width) * WIDTH;
        const index = Math.round(((at - left) / (right - left)) * (times.length - 1));
        if (index < 0 || index >= times.length) return;
        cursor.setAttribute("visibility", "visible");
        const [rule, text] = cursor.children;
        rule.setAttribute("x1", x(index));
        rule.setAttribute("x2", x(index));
        const says = series.map((one) => `${one.name} ${one.values[index] === null || one.values[index] === undefined ? "–" : format(one.values[index])}`);
        text.textContent = `${clock(times[index])}  ${says.join("  ")}`;
        text.setAttribute("x", Math.min(Math.max(x(index), left + 90), right - 120));
        text.setAttribute("text-anchor", "middle");
      },
      pointerleave: (event) => event.currentTarget.querySelector(".cursor").setAttribute("visibility", "hidden"),
    },
  },
  ticks.map((value) => [h("line.grid", { x1: left, x2: right, y1: y(value), y2: y(value) }), h("text.tick", { x: left - 6, y: y(value) + 3, "text-anchor": "end" }, format(value))]),
  timeTicks(times, left, right, height - 6), drawMarks(marks, times, left, right, top, bottom), drawn, cursor);
  return figure(title, note, legend, svg);
}

export function barChart({ title, note, times, series, marks, height = 170 }) {
  const left = 48, right = WIDTH - 8, top = 10, bottom = height - 22;
  const sums = times.map((_, index) => series.reduce((sum, one) => sum + (one.values[index] || 0), 0));
  const { top: most, ticks } = scale(Math.max(0, ...sums));
  const width = (right - left) / times.length;
  const y = (value) => bottom - (value / most) * (bottom - top);
  const drawn = times.map((at, index) => {
    let below = 0;
    return series.map((one) => {
      const value = one.values[index] || 0;
      if (!value) return null;
      const made = h("rect", { class: `bar ${one.tone}`, x: left + index * width, width: Math.max(0.8, width - 0.8), y: y(below + value), height: y(below) - y(below + value) },
        h("title", null, `${clock(at)} ${one.name} ${short(value)}`));
      below += value;
      return made;
    });
  });
  const legend = series.map((one) => h("span.key", null, h("i", { class: `box ${one.tone}` }), one.name, " ", h("b", null, short(one.values.reduce((a, b) => a + (b || 0), 0)))));
  return figure(title, note, legend, h("svg.chart", { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": title },
    ticks.map((value) => [h("line.grid", { x1: left, x2: right, y1: y(value), y2: y(value) }), h("text.tick", { x: left - 6, y: y(value) + 3, "text-anchor": "end" }, short(value))]),
    timeTicks(times, left, right, height - 6), drawMarks(marks, times, left, right, top, bottom), drawn));
}

// `rows`: [{ name, values }], the first at the bottom. Empty cells are not drawn.
export function heatMap({ title, note, times, rows, marks, format = short, height }) {
  const left = 58, right = WIDTH - 8, top = 6;
  const tall = height || Math.max(60, Math.min(200, rows.length * 14 + 30));
  const bottom = tall - 22;
  const most = Math.max(1, ...rows.flatMap((row) => row.values.map((value) => value || 0)));
  const width = (right - left) / times.length, deep = (bottom - top) / Math.max(1, rows.length);
  const cells = rows.map((row, number) => row.values.map((value, index) => {
    if (!value) return null;
    const level = Math.ceil((Math.log1p(value) / Math.log1p(most)) * 8);
    return h("rect", { class: `heat h${level}`, x: left + index * width, width: width + 0.3, y: bottom - (number + 1) * deep, height: Math.max(1, deep - 0.6) },
      h("title", null, `${clock(times[index])} ${row.name}: ${format(value)}`));
  }));
  const every = Math.max(1, Math.ceil(rows.length / 8));
  const labels = rows.map((row, number) => (number % every ? null : h("text.tick", { x: left - 6, y: bottom - number * deep - deep / 2 + 3, "text-anchor": "end" }, row.name)));
  return figure(title, note, [], h("svg.chart", { viewBox: `0 0 ${WIDTH} ${tall}`, role: "img", "aria-label": title },
    h("rect.plot", { x: left, y: top, width: right - left, height: bottom - top }), cells, labels,
    timeTicks(times, left, right, tall - 6), drawMarks(marks, times, left, right, top, bottom)));
}

function figure(title, note, legend, drawn) {
  return h("figure.card.chartbox", null,
    h("figcaption", null, h("span.title", null, title), note ? h("span.note", null, note) : null, h("span.legend", null, legend)), drawn);
}
