// One lane: what it does, the attempts of its head, its backlog, and what can be done.

import { get, post } from "./api.js";
import { act } from "./dialogs.js";
import { h, link, render } from "./dom.js";
import { ago, bytes, clock, count, counted, lines, plain } from "./format.js";
import { laneState } from "./lanes.js";
import { cells, command, empty, jobs, num, problem, table } from "./widgets.js";

const MEANS = {
  blocked: "It waits at a message that failed for good, until an operator acts. Everything behind it waits too; other lanes do not.",
  parked: "The message that failed for good, and all behind it, went to the dead letters. A redrive runs them in order, and the lane continues.",
  skipping: "An operator skipped the message. The lane continues as soon as that is committed.",
};

export function lanePage(root, { context, name, query }) {
  let facts = null, failed = null, timer = null, closed = false, doing = null;
  const where = query.get("key") === null ? { at: query.get("at") } : { key: query.get("key") };
  const body = h("div"), below = h("div");
  render(root, body, below);
  render(body, empty("Reading the lane …"));

  async function load() {
    clearTimeout(timer);
    try { facts = await get(`/api/apps/${name}/lane`, where); failed = null; } catch (error) { failed = error; }
    if (closed) return;
    draw();
    timer = setTimeout(load, 2000);
  }

  async function move(what) {
    const words = {
      release: { title: "Release the lane", button: "Release", text: "The message runs again, with all its attempts. Fix the cause first, or the lane blocks again." },
      skip: { title: "Skip the message", button: "Skip", danger: true, text: "The message becomes a dead letter, and the lane continues after it, without it." },
    }[what];
    const cli = facts.next.find((one) => one.includes(` ${what} `)) || `keylane lanes ${what} ${name}`;
    const done = await act({ ...words, cli, run: (reason) => post(`/api/apps/${name}/lane/${what}`, { partition: facts.partition, offset: facts.offset, key: facts.key, reason }) });
    if (done) load();
  }

  async function redrive() {
    const plan = await post(`/api/apps/${name}/redrive/plan`, { lane: facts.key }).catch((error) => { failed = error; draw(); return null; });
    if (!plan) return;
    const done = await act({ title: "Redrive the lane", button: "Redrive", cli: plan.cli, text: `${counted(plan.letters, "dead letter")} of the lane run again, in order, and the lane continues.`,
      run: (reason) => post(`/api/apps/${name}/redrive`, { plan: plan.plan, reason }) });
    if (done) load();
  }

  function draw() {
    if (failed) { render(body, problem(failed)); return; }
    const kind = facts.since === null ? null : facts.blocked ? "blocked" : facts.state.startsWith("parked") ? "parked" : facts.state.startsWith("being") ? "skipping" : null;
    const allowed = context.me.actions;
    const why = allowed ? null : "This console is read-only. The command line does the same.";
    render(body,
      h("div.head.big", null, h("h1", null, "Lane ", h("span.lanename", null, facts.key === null ? `of the message without a key at ${facts.position}` : plain(facts.key).slice(0, 300))), kind ? laneState(kind) : h("span.pill.calm", null, plain(facts.state))),
      kind ? h("p.sentence", null, MEANS[kind]) : h("p.sentence", null, facts.state === "retrying" ? "Its head has failed and is tried again; everything behind it waits." : `This lane is ${plain(facts.state)}.`),
      h("section.card", null, h("h2", null, "What it does"), h("dl.facts", null,
        row("state", plain(facts.state)),
        row("partition", [`${facts.partition}`, facts.slot === null ? "" : `, slot ${count(facts.slot)} of 65,536`]),
        row("task", facts.owner ? `${facts.owner.task}, run by ${plain(facts.owner.owner)}` : "none that runs now"),
        facts.since ? row("stopped", `${clock(facts.since)}, ${ago(facts.since)}, at ${facts.position}`) : null,
        facts.error ? row("error", [h("b", null, plain(facts.error)), facts.message ? `: ${plain(facts.message)}` : ""]) : null,
        facts.stage ? row("stage", `${plain(facts.stage)}, after ${counted(facts.attempts, "attempt")}`) : null,
        facts.why ? row("why", plain(facts.why)) : null,
        facts.retry ? row("retry", `offset ${facts.retry.offset} failed in stage ${plain(facts.retry.stage)} since ${clock(facts.retry.since)}; next is attempt ${facts.retry.attempt}, not before ${clock(facts.retry.due, true)}`) : null,
        facts.hot ? row("hot", `${(facts.hot.share * 100).toFixed(1)} % of its task's messages, ${count(facts.hot.waiting)} waiting`) : null,
        facts.commands.map((one) => row("command", `${plain(one.do)}, by ${plain(one.who)} at ${clock(one.at)}: waits to be carried out`)))),
      facts.blocked ? h("section.card.actions", null, h("h2", null, "What to do"),
        choice("Release", "when the cause is fixed: the message runs again, with all its attempts", facts.next[0], () => move("release"), allowed, why, "primary"),
        choice("Skip", "gives up the message: it becomes a dead letter, and the lane continues after it", facts.next[1], () => move("skip"), allowed, why, "danger")) : null,
      kind === "parked" && facts.key !== null ? h("section.card.actions", null, h("h2", null, "What to do"),
        choice("Redrive", "when the cause is fixed: its messages run in order, and the lane continues", facts.next[1], redrive, allowed, why, "primary"),
        link(`/apps/${name}/letters/list?key=${encodeURIComponent(facts.key)}`, null, "Its dead letters")) : null,
      facts.failures.length ? h("section.card", { id: "attempts" }, h("h2", null, "Attempts of its head"), table(["No.", "Time", "Stage", "Attempt", "Error"], facts.failures.map((one, index) => h("tr", null, cells(index + 1, h("td.mono", null, clock(one.at, true)), plain(one.stage), one.attempt, plain(one.error)))))) : null,
      facts.traceback ? h("section.card", null, h("h2", null, "Traceback"), h("pre", { tabindex: "0" }, lines(facts.traceback))) : null,
      facts.backlog ? h("section.card", null, h("h2", null, "Backlog"), h("p.small", null,
        `${counted(facts.backlog.count, "message")} of this key from offset ${facts.backlog.from} on${facts.backlog.complete ? "" : `, searched up to offset ${facts.backlog.searched}; there is more log behind it`}${facts.since ? "" : ". Some of them may be done: the partition's offset waits for other lanes too"}.`),
        facts.backlog.first.length ? table(["Offset", "Written", "#Size", ""], facts.backlog.first.map((one) => h("tr", null, cells(one.offset, clock(one.at), num(bytes(one.size)), one.offset === facts.offset ? "the head" : facts.retry?.offset === one.offset ? "is tried again" : "")))) : null) : null,
      h("section.card", null, h("h2", null, "Commands given"), facts.audit.length ? table(["Time", "Who", "What", "Reason", "Result"], [...facts.audit].reverse().map((one) => h("tr", null, cells(clock(one.at), plain(one.who), plain(one.do), plain(one.reason ?? "–"), one.answer ? plain(one.answer.result) : one.waiting ? "waits" : "not carried out")))) : empty("None."),
        command(`keylane lanes show ${name} ${facts.key === null ? `--at ${facts.position}` : shell(facts.key)} --bootstrap ${context.me.bootstrap}`)));
  }

  load();
  return {
    update(event, data) {
      if (event !== "app" || data.error) return;
      const shown = JSON.stringify(data.jobs);
      if (shown === doing) return;
      doing = shown;
      render(below, jobs(data.jobs));
      load();
    },
    close() { closed = true; clearTimeout(timer); },
  };
}

function row(name, value) {
  return [h("dt", null, name), h("dd", null, value)];
}

export function shell(text) {
  return /^[\w@%+=:,./][\w@%+=:,./-]*$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function choice(label, what, cli, run, allowed, why, tone) {
  return h("div.choice", null, h("button", { type: "button", class: tone, disabled: !allowed, title: why, on: { click: run } }, label), h("div", null, h("p", null, what, why ? h("span.small", null, ` ${why}`) : null), command(cli)));
}
