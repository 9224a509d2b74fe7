// All apps of the broker: one sentence of health each, and the figures behind it.

import { spark } from "./charts.js";
import { h, link, render } from "./dom.js";
import { age, count, plain, rate, seconds, short } from "./format.js";
import { empty, figure, laneBar, pill } from "./widgets.js";

const WORST = ["stuck", "not running", "unknown", "falling behind", "catching up", "starting", "keeping up", "idle"];

export function overviewPage(root) {
  render(root, empty("Reading the apps of the broker …"));
  return {
    update(name, data) {
      if (name !== "overview") return;
      const apps = [...data.apps].sort((a, b) => WORST.indexOf(a.state) - WORST.indexOf(b.state) || a.app.localeCompare(b.app));
      const counts = WORST.map((state) => [state, apps.filter((one) => one.state === state).length]).filter(([, number]) => number);
      render(root,
        h("h1.sr", null, "Overview"),
        h("p.tally", null, apps.length ? counts.map(([state, number]) => h("span", null, pill(state), ` × ${number} `)) : null),
        apps.length ? h("div.apps", null, apps.map(card)) : empty("No app has topics on this broker yet. An app is listed once it has run: keylane run MODULE:APP"),
        data.left_out.length ? h("p.small", null, `Not watched, because there are too many: ${plain(data.left_out.join(", "))}. Name apps on the command line to choose.`) : null);
    },
  };
}

function card(app) {
  const old = Date.now() / 1000 - app.at;
  const figures = app.lag === undefined ? null : h("div.figures", null,
    figure("in", rate(app.rate_in), null, spark(app.spark.in, "sky", "messages in, last two minutes")),
    figure("out", rate(app.rate_out), null, spark(app.spark.out, "good", "messages done, last two minutes")),
    figure("p50", seconds(app.p50), `p99 ${seconds(app.p99)}`, spark(app.spark.p99, "purple", "p99, last two minutes")),
    figure("lag", short(app.lag), app.lag ? app.catch_up === null ? "it does not shrink" : `caught up in ${age(Math.max(1, app.catch_up))}` : "nothing waits", spark(app.spark.lag, "warn", "lag, last two minutes")),
    figure("dead letters today", count(app.dead_today), null, app.dead_today ? link(`/apps/${app.app}/letters`, null, "look at them") : null),
    h("div.figure.wide", null, h("div.label", null, `lanes, ${app.tasks === 1 ? "1 task" : `${count(app.tasks)} tasks`}`), laneBar(app.lanes)));
  return h("article.card.app", { "data-id": app.app, class: `tone-${app.state.replace(" ", "-")}` },
    h("div.head", null, link(`/apps/${app.app}`, { class: "row name" }, plain(app.app)), pill(app.state), app.source ? h("span.small", null, `reads ${plain(app.source)}`) : null,
      old > 5 ? h("span.small.text.bad", null, `figures are ${age(old)} old`) : null),
    h("p.sentence", null, plain(app.sentence)), figures);
}
