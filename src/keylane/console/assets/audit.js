// Who ordered what, when, why, and the result.

import { get } from "./api.js";
import { h, render } from "./dom.js";
import { clock, count, plain } from "./format.js";
import { cells, command, empty, laneLink, pager, problem, table } from "./widgets.js";

export function auditPage(root, { context, name, query }) {
  let timer = null, closed = false, page = Number(query.get("page")) || 0;
  render(root, empty("Reading the audit …"));

  async function load() {
    clearTimeout(timer);
    let found = null, failed = null;
    try { found = await get(`/api/apps/${name}/audit`, { page }); } catch (error) { failed = error; }
    if (closed) return;
    render(root, failed ? problem(failed) : h("section.card", null, h("h1", null, `Commands given: ${count(found.found)}`),
      found.actions.length ? table(["Time", "Who", "What", "Lane", "Position", "Reason", "Result"], found.actions.map((one) => h("tr", { "data-id": one.id }, cells(
        clock(one.at), plain(one.who), plain(one.cancels ? `cancel ${one.cancels}` : one.do + (one.do === "redrive" ? (one.letters === null ? " all" : ` ${count(one.letters)}`) : "")),
        one.key === null ? "no key" : laneLink(name, one), `${one.partition}@${one.offset ?? "–"}`, plain(one.reason ?? "–"),
        h("td", null, one.answer ? [h("span", { class: `text ${one.answer.ok ? "good" : "bad"}` }, one.answer.ok ? "✓ " : "✕ "), plain(one.answer.result), h("div.small", null, `by ${plain(one.answer.owner)}, ${Math.max(0, one.answer.at - one.at).toFixed(1)} s later`)] : one.waiting ? "… waits to be carried out" : "not carried out"))))) : empty("No command has been given to this app."),
      pager(found.page, found.pages, (next) => { page = next; history.replaceState(null, "", `/apps/${name}/audit${page ? `?page=${page}` : ""}`); load(); }),
      command(`keylane lanes audit ${name} --bootstrap ${context.me.bootstrap}`)));
    timer = setTimeout(load, 3000);
  }

  load();
  return { close() { closed = true; clearTimeout(timer); } };
}
