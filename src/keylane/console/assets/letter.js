// One dead letter: error, attempts, traceback, and, when asked for, its contents.

import { get } from "./api.js";
import { h, link, render } from "./dom.js";
import { bytes, clock, count, lines, plain } from "./format.js";
import { redrive } from "./letters.js";
import { cells, command, empty, jobs, laneLink, problem, table } from "./widgets.js";

export function letterPage(root, { context, name, match }) {
  const [, , partition, offset] = match;
  const api = `/api/apps/${name}/letters/${partition}/${offset}`;
  let facts = null, failed = null, view = null;
  const body = h("div"), below = h("div");
  render(root, body, below);
  render(body, empty("Reading the dead letter …"));

  async function load(contents) {
    try { facts = await get(api, contents ? { contents: 1 } : {}); failed = null; } catch (error) { failed = error; }
    if (contents && facts?.contents) view = facts.contents.text === null ? "hex" : parsed(facts.contents.text) === undefined ? "text" : "json";
    draw();
  }

  async function again() {
    try { if (await redrive(name, context, { positions: [`${partition}@${offset}`] })) load(Boolean(view)); } catch (error) { failed = error; draw(); }
  }

  function value() {
    if (facts.size === null) return h("p", null, "None: the message is a tombstone.");
    if (!facts.contents) {
      return h("p", null, `${bytes(facts.size)}, hidden. `, h("button", { type: "button", id: "show", on: { click: () => load(true) } }, "Show the contents"));
    }
    const views = facts.contents.text === null ? ["hex"] : parsed(facts.contents.text) === undefined ? ["text", "hex"] : ["json", "text", "hex"];
    return [h("div.chooser", { role: "group", "aria-label": "Form of the value" }, views.map((one) => h("button", { type: "button", "aria-pressed": view === one ? "true" : "false", on: { click: () => { view = one; draw(); } } }, one.toUpperCase().replace("TEXT", "Text").replace("HEX", "Hex")))),
      h("pre", { tabindex: "0", id: "value" }, view === "hex" ? dump(facts.contents.hex) : view === "json" ? lines(JSON.stringify(parsed(facts.contents.text), null, 2)) : lines(facts.contents.text)),
      facts.contents.cut || (view === "hex" && facts.contents.hex_cut) ? h("p.small", null, `Only the beginning is shown, of ${bytes(facts.size)}.`) : null,
      h("p", null, h("a", { href: `${api}/raw`, download: `letter-${partition}-${offset}.bin` }, "Download the value, byte for byte"))];
  }

  function draw() {
    if (failed) { render(body, problem(failed)); return; }
    render(body,
      h("div.head.big", null, h("h1", null, `Dead letter ${partition}@${offset}`), h("span.small", null, facts.kind ? `${facts.kind}${facts.redriven ? ", redriven" : ""}` : "unreadable"),
        facts.readable && !facts.redriven && facts.kind !== "archived" ? h("button", { type: "button", class: "primary", on: { click: again } }, "Redrive …") : null),
      h("section.card", null, h("dl.facts", null,
        row("error", facts.error ? [h("b", null, plain(facts.error)), facts.message ? `: ${plain(facts.message)}` : ""] : plain(facts.reason ?? "unknown: it was parked behind the message that failed")),
        facts.stage ? row("stage", `${plain(facts.stage)}, after ${count(facts.attempts)} attempts, at ${clock(facts.failed_at)}`) : null,
        row("lane", facts.key === null ? "no key" : laneLink(name, { key: facts.key })),
        facts.source ? row("message", `${plain(facts.source)}${facts.timestamp === null ? "" : `, written ${clock(facts.timestamp / 1000)}`}`) : null,
        facts.app ? row("app", plain(`${facts.app} ${facts.app_version ?? ""}`)) : null,
        facts.redrives ? row("redriven", `${count(facts.redrives)} times before`) : null,
        facts.foreign ? row("no redrive", plain(facts.foreign)) : null)),
      facts.failures?.length ? h("section.card", null, h("h2", null, "Attempts"), table(["Time", "Stage", "Attempt", "Error"], facts.failures.map((one) => h("tr", null, cells(h("td.mono", null, clock(one.at, true)), plain(one.stage), one.attempt, plain(one.error)))))) : null,
      facts.traceback ? h("section.card", null, h("h2", null, "Traceback"), h("pre", { tabindex: "0" }, lines(facts.traceback))) : null,
      h("section.card", null, h("h2", null, "Value"), value()),
      h("section.card", null, h("h2", null, "Headers"), facts.headers.length ? table(["Name", "Value"], facts.headers.map((one) => h("tr", null, cells(plain(one.name), h("td.mono", null, one.value === null ? (facts.contents ? "–" : "hidden") : plain(one.value)))))) : empty("None.")),
      command(facts.cli), link(`/apps/${name}/letters`, null, "All dead letters"));
  }

  load(false);
  return { update(event, data) { if (event === "app" && !data.error) render(below, jobs(data.jobs)); } };
}

function row(name, value) {
  return [h("dt", null, name), h("dd", null, value)];
}

function parsed(text) {
  try {
    const found = JSON.parse(text);
    return typeof found === "object" && found !== null ? found : undefined;
  } catch { return undefined; }
}

function dump(hex) {
  const rows = [];
  for (let at = 0; at < hex.length; at += 32) {
    const pairs = hex.slice(at, at + 32).match(/../g) || [];
    const seen = pairs.map((pair) => { const code = parseInt(pair, 16); return code >= 32 && code < 127 ? String.fromCharCode(code) : "."; }).join("");
    rows.push(`${(at / 2).toString(16).padStart(6, "0")}  ${pairs.join(" ").padEnd(47)}  ${seen}`);
  }
  return rows.join("\n");
}
