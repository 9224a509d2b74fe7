// Lanes of an app: a search by key, and those that have stopped.

import { get } from "./api.js";
import { h, render } from "./dom.js";
import { ago, clock, count, plain } from "./format.js";
import { wallOf } from "./wall.js";
import { cells, command, empty, jobs, laneBar, laneLink, pager, problem, table } from "./widgets.js";

const SIGNS = { blocked: ["■", "bad"], parked: ["▣", "purple"], skipping: ["→", "busy"] };

export function laneState(name) {
  const [sign, tone] = SIGNS[name] || ["●", "calm"];
  return h("span", { class: `pill ${tone}` }, h("span.sign", { "aria-hidden": "true" }, sign), name || "a command waits");
}

export function lanesPage(root, { context, name, query }) {
  let found = null, failed = null, timer = null, closed = false, lanes = null, doing = null;
  const now = { q: query.get("q") || "", state: query.get("state") || "", page: Number(query.get("page")) || 0 };
  const search = h("div"), list = h("div"), wall = h("div");
  const key = h("input", { type: "search", id: "key", placeholder: "A key, or hex:… for bytes", autocomplete: "off", spellcheck: "false", maxlength: "2000" });
  render(search, h("form.find", { role: "search", on: { submit: (event) => { event.preventDefault(); if (key.value) context.navigate(`/apps/${name}/lane?key=${encodeURIComponent(key.value)}`); } } },
    h("label", { for: "key" }, "Find the lane of a key"), key, h("button", { class: "primary" }, "Open the lane")));
  const filter = h("input", { type: "text", "aria-label": "Filter the stopped lanes", placeholder: "filter: part of a key", value: now.q, on: { change: (event) => go({ q: event.target.value, page: 0 }) } });
  const states = h("select", { "aria-label": "State", on: { change: (event) => go({ state: event.target.value, page: 0 }) } },
    ["", "blocked", "parked", "skipping"].map((one) => h("option", { value: one, selected: one === now.state }, one || "all states")));
  render(root, h("h1.sr", null, `Lanes of ${plain(name)}`), h("section.card", null, search, h("div.summary")), wall,
    h("section.card", null, h("div.chartbar", null, h("h2", null, "Stopped lanes"), filter, states), list, command(`keylane lanes list ${name} --bootstrap ${context.me.bootstrap}`)), h("div.jobs"));

  function go(change) {
    Object.assign(now, change);
    const given = Object.entries(now).filter(([, value]) => value);
    history.replaceState(null, "", `/apps/${name}/lanes${given.length ? `?${new URLSearchParams(given)}` : ""}`);
    load();
  }

  async function load() {
    clearTimeout(timer);
    try { found = await get(`/api/apps/${name}/lanes`, now); failed = null; } catch (error) { failed = error; }
    if (closed) return;
    draw();
    timer = setTimeout(load, 2000);
  }

  function draw() {
    if (failed) { render(list, problem(failed)); return; }
    if (!found) return;
    render(list, h("p.small", { role: "status" }, found.all ? `${plain(found.totals)}${found.found === found.all ? "" : `; ${count(found.found)} match`}` : ""),
      found.lanes.length ? table(["Lane", "State", "Position", "Since", "Stage", "Cause"], found.lanes.map((lane) => h("tr", { "data-id": `${lane.partition}/${lane.key ?? lane.position}` }, cells(
        laneLink(name, lane), laneState(lane.state), lane.position, h("td", { title: clock(lane.since) }, ago(lane.since)), plain(lane.stage ?? "–"), plain(lane.error ? `${lane.error.split(".").pop()}: ${lane.message}` : "–").slice(0, 200)))))
        : empty(found.all ? "No stopped lane matches." : "No lane has stopped."),
      pager(found.page, found.pages, (page) => go({ page })));
  }

  const picture = wallOf(wall, name);
  load();
  return {
    update(event, data) {
      if (event !== "app" || data.error) return;
      if (JSON.stringify(data.facts.lanes) !== lanes) {
        lanes = JSON.stringify(data.facts.lanes);
        render(root.querySelector(".summary"), laneBar(data.facts.lanes));
      }
      if (JSON.stringify(data.jobs) !== doing) {
        doing = JSON.stringify(data.jobs);
        render(root.lastElementChild, jobs(data.jobs));
      }
    },
    close() { closed = true; clearTimeout(timer); picture.close(); },
  };
}
