// The page: views by tab, the colour scheme, and the lines that every view shows.

import { byId, setText } from "./dom.js";
import { askForKey } from "./key.js";
import { LiveState } from "./stream.js";
import { ChatView } from "./chat.js";
import { ClusterView } from "./cluster.js";
import { ConnectView } from "./connect.js";
import { InsideView } from "./inside.js";
import { ModelsView } from "./models.js";

const NAMES = ["cluster", "chat", "inside", "models", "connect"];
const FORMER = { timeline: "inside", speed: "inside" }; // links to views that are parts of another one now
const live = new LiveState();
const views = {
  cluster: new ClusterView(byId("view-cluster"), live),
  chat: new ChatView(byId("view-chat"), live),
  inside: new InsideView(byId("view-inside"), live),
  models: new ModelsView(byId("view-models"), live),
  connect: new ConnectView(byId("view-connect"), live),
};
let shown = "";

function show(wanted, focus = false) {
  const name = NAMES.includes(wanted) ? wanted : FORMER[wanted] ?? "cluster";
  if (location.hash.slice(1) !== name) history.replaceState(null, "", `#${name}`);
  if (name === shown) return;
  shown = name;
  document.body.dataset.view = name;
  for (const other of NAMES) {
    const tab = byId(`tab-${other}`);
    const selected = other === name;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
    byId(`view-${other}`).hidden = !selected;
    if (selected && focus) tab.focus();
    views[other].setVisible?.(selected);
  }
  update();
}

function startTabs() {
  const tabs = byId("tabs");
  tabs.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) show(tab.id.slice("tab-".length));
  });
  tabs.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const at = NAMES.indexOf(shown);
    let to = null;
    if (event.key in steps) to = (at + steps[event.key] + NAMES.length) % NAMES.length;
    if (event.key === "Home") to = 0;
    if (event.key === "End") to = NAMES.length - 1;
    if (to === null) return;
    event.preventDefault();
    show(NAMES[to], true);
  });
  addEventListener("hashchange", () => show(location.hash.slice(1)));
}

const THEMES = { auto: ["◐", "automatic"], light: ["☀", "light"], dark: ["☾", "dark"] };

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = byId("theme");
  const [sign, name] = THEMES[theme];
  button.textContent = sign;
  button.title = `Colour scheme: ${name}`;
  button.setAttribute("aria-label", button.title);
  views.inside.redraw();
}

function startTheme() {
  const names = Object.keys(THEMES);
  let theme = localStorage.getItem("mtp-theme") ?? "auto";
  if (!names.includes(theme)) theme = "auto";
  setTheme(theme);
  byId("theme").addEventListener("click", () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    localStorage.setItem("mtp-theme", theme);
    setTheme(theme);
  });
}

const CONNECTIONS = {
  connecting: "connecting",
  live: "live",
  reconnecting: "reconnecting",
  locked: "locked",
};

function updateConnection() {
  byId("link").dataset.state = live.connection;
  setText(byId("link-text"), CONNECTIONS[live.connection]);
  document.body.dataset.connection = live.connection;
  updateNow();
}

function updateNow() {
  const status = live.status;
  // The step is the headline. The problems behind it are smaller, because they are errors of other programs.
  const [step, cause = ""] = status ? split(status.activity) : ["Connecting to the coordinator"];
  let text = step;
  let state = !status ? "wait" : status.ready ? (status.running ? "busy" : "ready") : "wait";
  if (live.connection === "reconnecting") {
    text = "The coordinator does not answer. Trying again.";
    state = "bad";
  }
  if (live.connection === "locked") text = "The coordinator needs an API key.";
  byId("now").dataset.state = state;
  setText(byId("now-text"), text);
  setText(byId("now-cause"), text === step ? cause : "");
}

function split(activity) {
  const [, step, cause] = /^(.*?)(?:; |, but )(.*)$/.exec(activity) ?? [];
  return step ? [step, cause] : [activity];
}

function update() {
  if (!live.status) return;
  setText(byId("model"), live.status.model);
  document.title = live.status.ready && live.status.running
    ? `${live.status.tokens_per_second.toFixed(0)} tokens/s · mtp-cluster` : "mtp-cluster";
  updateNow();
  views[shown].update?.();
}

let pending = false;
live.addEventListener("change", () => {
  if (pending || document.hidden) return;
  pending = true;
  requestAnimationFrame(() => { pending = false; update(); });
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) update(); });
live.addEventListener("connection", updateConnection);

startTabs();
startTheme();
show(location.hash.slice(1) || "cluster");
updateConnection();
live.run(askForKey);
