// Dead letters: by cause, with their trend, and as a list; and the redrive of what a filter shows.

import { get, post } from "./api.js";
import { spark } from "./charts.js";
import { act } from "./dialogs.js";
import { h, link, render } from "./dom.js";
import { bytes, clock, count, counted, plain } from "./format.js";
import { cells, command, empty, jobs, key, laneLink, num, pager, problem, table } from "./widgets.js";

const KINDS = { dead: "its lane continued", archived: "its lane is blocked at it", parked: "its lane is parked" };
const SPANS = [["", "any time"], ["3600", "the last hour"], ["86400", "the last day"], ["604800", "the last week"]];

function readFilter(query) {
  const found = {};
  for (const name of ["key", "stage", "error", "kind", "since", "until", "cause", "redriven", "page"]) found[name] = query.get(name) || "";
  return found;
}

function address(name, path, filter) {
  const given = Object.entries(filter).filter(([, value]) => value !== "" && value !== null && value !== undefined && value !== 0);
  return `/apps/${name}/letters${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

function filterForm(context, name, filter, path, known) {
  const go = (change) => context.navigate(address(name, path, { ...filter, page: "", cause: "cause" in change ? change.cause : filter.cause, ...change }));
  const choose = (label, field, options) => h("label", null, label, " ", h("select", { on: { change: (event) => go({ [field]: event.target.value }) } },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(filter[field]) }, plain(text).slice(0, 80)))));
  const since = SPANS.map(([span, text]) => [span && String(Math.floor(Date.now() / 1000 - Number(span))), text]);
  if (filter.since) since.push([filter.since, `since ${clock(Number(filter.since))}`]);
  return h("form.filter", { role: "search", on: { submit: (event) => { event.preventDefault(); go({ key: event.target.elements.key.value }); } } },
    h("label", null, "Key ", h("input", { type: "search", name: "key", value: filter.key, placeholder: "exact key", maxlength: "2000" })),
    choose("Stage", "stage", [["", "all"], ...known.stages.map((one) => [one, one])]),
    choose("Error", "error", [["", "all"], ...known.errors.map((one) => [one, one.split(".").pop()])]),
    choose("Kind", "kind", [["", "all"], ...Object.keys(KINDS).map((one) => [one, one])]),
    choose("Failed", "since", since),
    h("label", null, h("input", { type: "checkbox", checked: filter.redriven === "1", on: { change: (event) => go({ redriven: event.target.checked ? "1" : "" }) } }), " redriven ones too"),
    Object.entries(filter).some(([field, value]) => value && field !== "page") ? link(address(name, path, {}), null, "clear") : null);
}

function reading(found) {
  return found.refreshing ? h("p.small", { role: "status" }, h("progress", { max: Math.max(1, found.to_read), value: found.read }), ` reading: ${count(found.read)} of about ${count(found.to_read)}`) : null;
}

// Ask for a dry run, show it, and carry it out when there is a reason.
export async function redrive(name, context, wanted) {
  const plan = await post(`/api/apps/${name}/redrive/plan`, wanted);
  const left = Object.entries(plan.left_out).filter(([, number]) => number);
  const sample = h("div.sample", null,
    h("p", null, h("b", null, `${counted(plan.letters, "dead letter")} of ${counted(plan.lanes, "lane")} would be redriven.`), plan.parked ? ` ${counted(plan.parked, "lane")} of them parked: they run whole.` : "",
      left.length ? ` Left out: ${left.map(([why, number]) => `${count(number)} ${why}`).join(", ")}.` : ""),
    plan.sample.length ? h("div.short", null, table(["Lane", "#Letters", "Source, in this order"], plan.sample.map((one) => h("tr", null, cells(key(one.key), num(count(one.letters)), one.order.join(" ")))))) : null,
    plan.lanes > plan.sample.length ? h("p.small", null, `${count(plan.lanes - plan.sample.length)} more lanes.`) : null);
  if (!context.me.actions || !plan.letters) {
    return act({ title: "Dry run", text: plan.letters ? "This console is read-only: the command line carries it out." : "Nothing would be redriven.", cli: plan.cli, button: "Close", body: sample, run: async () => null });
  }
  return act({ title: "Redrive: dry run", text: `${plan.what}. Each lane's run again in the order of their messages, before anything newer in the lane. Those that fail again become dead letters again.`,
    cli: plan.cli, button: `Redrive ${counted(plan.letters, "dead letter")}`, body: sample, run: (reason) => post(`/api/apps/${name}/redrive`, { plan: plan.plan, reason }) });
}

function wantedOf(filter) {
  const { page, redriven, ...wanted } = filter;
  return Object.fromEntries(Object.entries(wanted).filter(([, value]) => value !== ""));
}

function lettersBase(root, { context, name, query }, path, address_, draw) {
  const filter = readFilter(query);
  let failed = null, timer = null, closed = false, doing = null, shown = "";
  const says = h("div"), form = h("div"), body = h("div"), below = h("div");
  let known = { stages: [], errors: [] };
  render(root, says, h("section.card", null, form), body, below);
  render(body, empty("Reading the dead letters …"));

  async function load() {
    clearTimeout(timer);
    let found = null;
    try {
      found = await get(`/api/apps/${name}/${address_}`, filter);
      failed = null;
      if (found.stages) known = found;
    } catch (error) { failed = error; }
    if (closed) return;
    render(says, failed ? problem(failed) : reading(found));
    const next = JSON.stringify([known.stages, known.errors]);
    if (next !== shown) { shown = next; render(form, filterForm(context, name, filter, path, known)); }
    if (found) render(body, draw(found, filter, start));
    timer = setTimeout(load, found?.refreshing ? 700 : 4000);
  }

  async function start(wanted) {
    try { if (await redrive(name, context, wanted)) load(); } catch (error) { failed = error; render(says, problem(error)); }
  }

  if (address_ === "letters") get(`/api/apps/${name}/causes`, {}).then((found) => { known = found; }, () => {}).finally(load);
  else load();
  return {
    update(event, data) {
      if (event !== "app" || data.error) return;
      const now = JSON.stringify(data.jobs);
      if (now === doing) return;
      doing = now;
      render(below, jobs(data.jobs));
    },
    close() { closed = true; clearTimeout(timer); },
  };
}

export function causesPage(root, page) {
  const { context, name } = page;
  return lettersBase(root, page, "", "causes", (found, filter, start) => h("section.card", null,
    h("div.chartbar", null, h("h1", null, found.letters ? `${counted(found.letters, "dead letter")} of ${counted(found.lanes, "lane")}` : "No dead letters"),
      found.letters ? h("button", { type: "button", class: "primary", on: { click: () => start(wantedOf(filter)) } }, "Redrive all of these …") : null,
      found.letters ? link(address(name, "/list", filter), null, "List them") : null),
    found.redriven ? h("p.small", null, `${count(found.redriven)} were redriven and are not counted.`) : null,
    found.causes.length ? table(["#Letters", "#Lanes", "Cause", "Stage", "Last day", "First", "Last", ""], found.causes.map((one) => h("tr", { "data-id": `c${one.id}` }, cells(
      num(count(one.count)), num(count(one.lanes)),
      h("td.cause", null, link(address(name, "/list", { ...filter, cause: one.id }), { class: "row" }, one.error === null ? "unknown: not recorded" : plain(one.error.split(".").pop())), h("div.small", null, plain(one.message ?? "").slice(0, 300)), one.behind ? h("div.small", null, `${count(one.behind)} parked behind one that failed`) : null),
      plain(one.stage ?? "–"), spark(one.trend, "bad", `by hour of the last day: ${one.trend.join(", ")}`), clock(one.first), clock(one.last),
      h("button", { type: "button", on: { click: () => start({ ...wantedOf(filter), cause: String(one.id) }) } }, "Redrive …"))))) : null,
    found.more_causes ? h("p.small", null, "More causes exist; the filter finds them.") : null,
    found.unreadable ? h("details", null, h("summary", null, `${counted(found.unreadable, "record")} of the topic could not be read as dead letters of this app`), h("ul", null, found.unreadable_examples.map((one) => h("li", null, `${one.position}: ${plain(one.reason)}`)))) : null,
    command(`keylane dlq list ${name} --bootstrap ${context.me.bootstrap}`)));
}

export function lettersPage(root, page) {
  const { context, name } = page;
  return lettersBase(root, page, "/list", "letters", (found, filter, start) => h("section.card", null,
    h("div.chartbar", null, h("h1", null, "Dead letters"), filter.cause ? h("span.small", null, `of cause ${filter.cause}`) : null,
      found.letters.length ? h("button", { type: "button", class: "primary", on: { click: () => start(wantedOf(filter)) } }, "Redrive all of these …") : null, link(address(name, "", { ...filter, cause: "", page: "" }), null, "By cause")),
    found.letters.length ? table(["Letter", "Key", "Failed", "Kind", "Stage", "Cause", "#Attempts", "#Size"], found.letters.map((one) => h("tr", { "data-id": `${one.partition}@${one.offset}` }, cells(
      link(`/apps/${name}/letters/${one.partition}/${one.offset}`, { class: "row" }, `${one.partition}@${one.offset}`),
      one.key === null ? key(null) : laneLink(name, one), h("td", { title: one.source }, clock(one.at)), one.redriven ? `${one.kind}, redriven` : one.kind, plain(one.stage ?? "–"),
      h("td.cause", null, plain(`${(one.error ?? "unknown").split(".").pop()}${one.message ? `: ${one.message}` : ""}`).slice(0, 200)), num(one.attempts), num(bytes(one.size)))))) : empty("No dead letter matches."),
    pager(found.page, 0, (number) => context.navigate(address(name, "/list", { ...filter, page: number || "" })), found.more),
    command(`keylane dlq list ${name} --letters --bootstrap ${context.me.bootstrap}`)));
}
