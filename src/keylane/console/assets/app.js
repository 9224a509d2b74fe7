// One app: health, live charts, tasks, stages and hot keys.

import { get } from "./api.js";
import { barChart, heatMap, lineChart } from "./charts.js";
import { h, link, render } from "./dom.js";
import { age, ago, clock, count, plain, rate, seconds, short } from "./format.js";
import { cells, command, empty, figure, jobs, laneBar, num, pill, problem, table } from "./widgets.js";

const TONES = { ok: "good", retry: "warn", dead: "bad", parked: "purple", skipped: "busy", duplicate: "sky", ignored: "calm", stale: "calm" };

export function appPage(root, { context, name, query }) {
  let span = query.get("span") || "5m";
  let series = null, failed = null, timer = null, closed = false;
  const head = h("div"), charts = h("div"), rest = h("div");
  render(root, head, charts, rest);

  async function load() {
    clearTimeout(timer);
    try {
      series = await get(`/api/apps/${name}/history`, { span });
      failed = null;
    } catch (error) { failed = error; }
    if (closed) return;
    draw();
    timer = setTimeout(load, span === "5m" ? 2000 : 5000);
  }

  function choose(next) {
    span = next;
    context.navigate(`/apps/${name}?span=${span}`, true);
  }

  function draw() {
    const chooser = h("div.chooser", { role: "group", "aria-label": "Span of time" }, context.me.spans.map((one) =>
      h("button", { type: "button", "aria-pressed": one === span ? "true" : "false", on: { click: () => choose(one) } }, one)));
    if (failed) { render(charts, chooser, problem(failed)); return; }
    if (!series) { render(charts, chooser, empty("Reading the history …")); return; }
    const { times, marks } = series;
    const partitions = Object.entries(series.lag);
    const outcomes = Object.entries(series.outcomes);
    render(charts, h("div.chartbar", null, h("h2", null, "Charts"), chooser,
      h("span.small", null, "marks: e epoch, R restart, T takeover; since the console started, and 15 minutes before")),
    h("div.charts", null,
      lineChart({ title: "Throughput", note: "messages per second", times, marks, format: rate, area: true, series: [{ name: "done", tone: "good", values: series.out }, { name: "in", tone: "sky", values: series.in }] }),
      lineChart({ title: "Latency", note: "from a message's timestamp until it is done", times, marks, format: seconds, series: [{ name: "p50", tone: "purple", values: series.latency.p50 }, { name: "p99", tone: "warn", values: series.latency.p99 }] }),
      heatMap({ title: "Latency, all messages", note: "stronger colour: more messages", times, marks, format: count, rows: series.latency.buckets.map((bucket, index) => ({ name: seconds(0.0005 * 2 ** (bucket / 2)), values: series.latency.counts[index] })) }),
      partitions.length > 6
        ? heatMap({ title: "Lag by partition", note: "stronger colour: more", times, marks, rows: partitions.map(([p, values]) => ({ name: `p${p}`, values })) })
        : lineChart({ title: "Lag by partition", note: "messages not done", times, marks, series: partitions.map(([p, values], index) => ({ name: `p${p}`, tone: ["warn", "sky", "good", "purple", "bad", "busy"][index % 6], values })) }),
      lineChart({ title: "Retries", note: "per second", times, marks, format: rate, series: [{ name: "retries", tone: "warn", values: series.retries }] }),
      barChart({ title: "Outcomes", note: "how messages ended", times, marks, series: outcomes.map(([one, values]) => ({ name: one, tone: TONES[one] || "calm", values })) })));
  }

  load();
  return {
    update(event, data) {
      if (event !== "app") return;
      if (data.error) { render(head, problem(data.error)); return; }
      const facts = data.facts;
      render(head, h("div.head.big", null, h("h1", null, plain(name)), pill(facts.state), h("p.sentence", null, plain(facts.sentence))),
        facts.why?.length ? h("ul.why", null, facts.why.map((why) => h("li", null, plain(why)))) : null,
        facts.lag === undefined ? null : h("section.card.figures", { "aria-label": "Figures" },
          figure("in", rate(facts.rate_in)), figure("done", rate(facts.rate_out)), figure("p50", seconds(facts.p50)), figure("p99", seconds(facts.p99)),
          figure("lag", short(facts.lag), facts.lag ? facts.catch_up === null ? "it does not shrink" : `caught up in ${age(Math.max(1, facts.catch_up))}` : "nothing waits"),
          figure("retries", rate(facts.retry_rate)), figure("dead letters today", count(facts.dead_today)),
          h("div.figure.wide", null, h("div.label", null, "lanes"), laneBar(facts.lanes))),
        command(`keylane lag ${name} --watch --bootstrap ${context.me.bootstrap}`),
        jobs(data.jobs));
      if (!data.partitions) { render(rest); return; }
      render(rest,
        h("section.card", null, h("h2", null, "Partitions"), table(["Partition", "State", "#Lag", "#In", "#Done", "#Held", "Oldest not done", "Why"],
          data.partitions.map((one) => h("tr", { "data-id": `p${one.partition}` }, cells(one.partition, pill(one.state), num(short(one.lag)), num(rate(one.rate_in)), num(rate(one.rate_out)), num(short(one.held)),
            one.oldest ? [`${one.oldest.offset} `, one.oldest.key === null ? null : link(`/apps/${name}/lane?key=${encodeURIComponent(one.oldest.key)}`, null, plain(one.oldest.key).slice(0, 60)), one.oldest.age_seconds === null ? null : `, ${age(one.oldest.age_seconds)} old`] : "–",
            plain(one.why[0] || "")))))),
        h("section.card", null, h("h2", null, "Tasks"), data.tasks.length ? table(["Task", "Owner", "#Epoch", "#Done in it", "#Held", "#Of", "Lanes", "Partitions"],
          data.tasks.map((one) => h("tr", { "data-id": `t${one.task}` }, cells(one.task, plain(one.owner), num(one.epoch), num(count(one.done)), num(count(one.held)), num(count(one.capacity)), laneBar(one.lanes), one.partitions.join(", "))))) : empty("No task runs.")),
        h("div.pair", null,
          h("section.card", null, h("h2", null, "Hot keys"), data.hot.length ? table(["Key", "Partition", "#Share", "#Waiting"], data.hot.map((one) => h("tr", null, cells(link(`/apps/${name}/lane?key=${encodeURIComponent(one.key)}`, { class: "row" }, plain(one.key).slice(0, 80)), one.partition, num(`${(one.share * 100).toFixed(1)} %`), num(count(one.waiting)))))) : empty("No key has more than its share.")),
          h("section.card", null, h("h2", null, "Stages with a breaker"), Object.keys(data.breakers).length ? table(["Stage", "Breaker, by task"], Object.entries(data.breakers).map(([stage, states]) => h("tr", null, cells(plain(stage), Object.entries(states).map(([one, number]) => h("span", { class: `pill ${one === "closed" ? "good" : "bad"}` }, `${one === "closed" ? "●" : "▲"} ${one.replace("_", " ")} × ${number}`)))))) : empty("No stage has a breaker."),
            data.run ? h("p.small", null, `run ${plain(data.run)}, order by ${plain(data.order)}, epoch ${count(data.plan?.epoch)} planned ${data.plan ? `${ago(data.plan.at)} (${clock(data.plan.at)})` : ""}`) : null)));
    },
    close() { closed = true; clearTimeout(timer); },
  };
}
