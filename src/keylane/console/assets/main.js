// The frame of the page: addresses, the stream of news, theme and keyboard.

import { Stream, get } from "./api.js";
import { help } from "./dialogs.js";
import { h, link, render } from "./dom.js";
import { age } from "./format.js";
import { problem } from "./widgets.js";
import { overviewPage } from "./overview.js";
import { appPage } from "./app.js";
import { lanesPage } from "./lanes.js";
import { lanePage } from "./lane.js";
import { causesPage, lettersPage } from "./letters.js";
import { letterPage } from "./letter.js";
import { auditPage } from "./audit.js";
import { picturesPage } from "./pictures.js";
import { racePage } from "./race.js";

const ROUTES = [
  [/^\/$/, overviewPage, null],
  [/^\/race$/, racePage, null],
  [/^\/apps\/([^/]+)$/, appPage, "summary"],
  [/^\/apps\/([^/]+)\/lanes$/, lanesPage, "lanes"],
  [/^\/apps\/([^/]+)\/lane$/, lanePage, "lanes"],
  [/^\/apps\/([^/]+)\/letters$/, causesPage, "letters"],
  [/^\/apps\/([^/]+)\/letters\/list$/, lettersPage, "letters"],
  [/^\/apps\/([^/]+)\/letters\/(\d+)\/(\d+)$/, letterPage, "letters"],
  [/^\/apps\/([^/]+)\/pictures$/, picturesPage, "pictures"],
  [/^\/apps\/([^/]+)\/audit$/, auditPage, "audit"],
];
const TABS = [["summary", "", "Summary"], ["lanes", "/lanes", "Lanes"], ["letters", "/letters", "Dead letters"], ["pictures", "/pictures", "Pictures"], ["audit", "/audit", "Audit"]];
const SHORTCUTS = [
  ["/", "search for a lane, or filter"], ["j, k", "next and previous row"], ["Enter", "open the row"], ["o", "overview"],
  ["1 – 5", "summary, lanes, dead letters, pictures, audit of an app"], ["t", "light or dark"], ["?", "this list"],
];
const QUIET_SECONDS = 5;

export const context = { me: null, overview: null, app: null, name: null, navigate, stream: null };
let page = null;
let routed = null;

const main = document.getElementById("main");
const top = document.getElementById("top");

const stream = new Stream((name, data) => {
  context[name] = data;
  if (name === "app" && data.app !== context.name) return;
  page?.update?.(name, data);
  frame();
}, () => frame());
context.stream = stream;

export function navigate(to, replace = false) {
  if (to !== location.pathname + location.search) history[replace ? "replaceState" : "pushState"](null, "", to);
  route();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
}

function route() {
  const found = ROUTES.map(([pattern, make, tab]) => [location.pathname.match(pattern), make, tab]).find(([match]) => match);
  page?.close?.();
  page = null;
  render(main);
  if (!found) {
    render(main, h("section.card", null, h("h1", null, "No such page"), link("/", null, "Overview")));
    return;
  }
  const [match, make, tab] = found;
  const name = match[1] ? decodeURIComponent(match[1]) : null;
  if (name !== context.name) context.app = null;
  context.name = name;
  routed = { tab, name };
  document.title = name ? `${name} · Keylane` : "Keylane";
  stream.follow({ ...(name ? { app: name } : {}) });
  page = make(main, { context, name, match, query: new URLSearchParams(location.search) });
  if (context.overview) page.update?.("overview", context.overview);
  if (context.app && name) page.update?.("app", context.app);
  frame();
}

function frame() {
  if (!context.me) return;
  const quiet = stream.last ? (Date.now() - stream.last) / 1000 : 0;
  const silent = quiet > QUIET_SECONDS;
  const { name, tab } = routed || {};
  render(top,
    h("div.bar", null,
      link("/", { class: "logo", "aria-label": "Keylane, overview" }, h("span.mark", { "aria-hidden": "true" }, h("i"), h("i"), h("i")), "Keylane"),
      name ? h("span.crumb", null, "/ ", link(`/apps/${name}`, null, name)) : h("span.crumb", null, context.me.bootstrap),
      h("span.space"),
      context.me.race ? link("/race", null, "Race") : null,
      h("span", { class: `live ${silent ? "bad" : "good"}`, role: "status" }, silent ? `✕ no data for ${age(quiet)}` : "● live"),
      h("span.badge", { title: context.me.actions ? "this console was started with --allow-actions" : "start it with --allow-actions to release, skip and redrive" }, context.me.actions ? "actions allowed" : "read-only"),
      h("button.icon", { type: "button", title: "Light or dark (t)", "aria-label": "Light or dark", on: { click: theme } }, "◐"),
      h("button.icon", { type: "button", title: "Keyboard (?)", "aria-label": "Keyboard shortcuts", on: { click: () => help(SHORTCUTS) } }, "?")),
    silent ? h("div.banner", { role: "alert" }, `No data for ${age(quiet)}: the figures below are old. The page connects again by itself.`) : null,
    context.overview?.error ? h("div.banner", { role: "alert" }, `The broker does not answer: ${context.overview.error}`) : null,
    name ? h("nav.tabs", { "aria-label": "Pages of the app" }, TABS.map(([id, path, label]) =>
      link(`/apps/${name}${path}`, { "aria-current": id === tab ? "page" : null }, label))) : null);
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("keylane-theme", root.dataset.theme); } catch { /* storage is off */ }
}

document.addEventListener("click", (event) => {
  const to = event.target.closest?.("a[href]");
  if (!to || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey || to.target || to.hasAttribute("download")) return;
  const url = new URL(to.href);
  if (url.origin !== location.origin || url.pathname.startsWith("/api/") || to.getAttribute("href").startsWith("#")) return;
  event.preventDefault();
  navigate(url.pathname + url.search);
});

document.addEventListener("keydown", (event) => {
  if (event.metaKey || event.ctrlKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.target.matches?.("input, textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const rows = [...main.querySelectorAll("a.row")];
  const at = rows.indexOf(document.activeElement);
  if (event.key === "j") rows[Math.min(rows.length - 1, at + 1)]?.focus();
  else if (event.key === "k") rows[Math.max(0, at - 1)]?.focus();
  else if (event.key === "/") main.querySelector("input[type=search]")?.focus();
  else if (event.key === "o") navigate("/");
  else if (event.key === "t") theme();
  else if (event.key === "?") help(SHORTCUTS);
  else if (context.name && TABS[Number(event.key) - 1]) navigate(`/apps/${context.name}${TABS[Number(event.key) - 1][1]}`);
  else return;
  event.preventDefault();
});

addEventListener("popstate", route);
setInterval(frame, 1000);

async function start() {
  try {
    context.me = await get("/api/me");
  } catch (error) {
    render(main, h("section.card.login", null, h("h1", null, "Keylane console"),
      error.status === 401 ? h("p", null, "This browser has no session. Open the link that ", h("code", null, "keylane console"), " printed on its terminal. Each link works once; after it was used, a new one is printed.") : problem(error),
      h("p", null, link(location.pathname + location.search, { target: "_self" }, "Try again"))));
    if (error.status !== 401) setTimeout(start, 2000);
    return;
  }
  route();
}

start();
