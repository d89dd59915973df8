// The Queue page: a card for each job, kept while it changes, so that focus and open parts stay as they are.

import { act, announce, commandLine, element, get, plural, poll, post, time } from "./api.js";

const WORDS = {
  queued: "waits for its turn", running: "running", stopping: "stopping: it saves, then ends", done: "done",
  failed: "failed", stopped: "stopped", lost: "lost: it was killed, or the machine was switched off",
};
const ACTIONS = { // by what a job says it can: the label, the class, and what it does
  up: ["Up", "", (id) => post(`/api/jobs/${id}/move`, { by: -1 })],
  down: ["Down", "", (id) => post(`/api/jobs/${id}/move`, { by: 1 })],
  save: ["Save now", "", (id) => post(`/api/jobs/${id}/save`)],
  stop: ["Stop", "", (id, seen) => post(`/api/jobs/${id}/stop`, { seen })],
  kill: ["Kill", "danger", (id) => confirm("Kill it? What it has not saved is lost.") && post(`/api/jobs/${id}/kill`)],
  again: ["Run again", "", (id) => post(`/api/jobs/${id}/again`)],
  remove: ["Remove", "", (id) => post(`/api/jobs/${id}/remove`)],
};
const KEPT = 200_000; // characters of output that a card keeps
const FEW = 20; // ended jobs that are shown at first
const at = (id) => document.getElementById(id);
const cards = new Map();
let isPaused = false, showsAll = false, isFirst = true;

const isActive = (job) => job.state === "running" || job.state === "stopping";

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

class Card {
  constructor(job) {
    this.id = job.id;
    this.actions = new Map();
    this.title = element("h3", { tabindex: "-1" }, job.title);
    this.state = element("p", {});
    this.bar = element("progress", { "aria-label": `progress of ${job.title}` });
    this.text = element("p", { class: "muted" });
    this.error = element("pre", { hidden: true });
    this.buttons = element("div", { class: "row", role: "group", "aria-label": `actions for ${job.title}` });
    this.log = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `output of ${job.title}` });
    this.output = element("details", { ontoggle: () => this.read() }, element("summary", {}, "Output"), this.log);
    this.said = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `result of ${job.title}` });
    this.result = element("details", { hidden: true, ontoggle: () => this.readResult() }, element("summary", {}, "Result"), this.said);
    this.next = 0;
    this.node = element("li", { class: "panel job", "data-job": job.id }, this.title, this.state, this.bar, this.text, this.error,
      this.buttons, element("details", {}, element("summary", {}, "Command"), commandLine(job.line, `command line of ${job.title}`)), this.output, this.result);
  }

  // `canMove`: whether it can go up and down, by the names of the buttons.
  update(job, canMove) {
    if (this.job && this.job.state !== job.state) announce(`${job.title}: ${WORDS[job.state]}`);
    this.job = job;
    setText(this.state, stateText(job));
    this.state.className = ["failed", "lost"].includes(job.state) ? "problem" : job.state === "done" ? "ok" : "";
    this.showProgress(isActive(job) ? job.progress : null);
    this.error.hidden = !job.error;
    setText(this.error, job.error ?? "");
    this.result.hidden = isActive(job) || job.state === "queued";
    this.offer(job.can.flatMap((name) => name === "move" ? ["up", "down"] : [name]));
    const stop = this.actions.get("stop"), label = job.state === "stopping" ? "Stop now" : "Stop";
    if (stop) { setText(stop, label); stop.setAttribute("aria-label", `${label}: ${job.title}`); }
    for (const name of ["up", "down"]) this.actions.get(name)?.setAttribute("aria-disabled", !canMove[name]); // it keeps the focus
    this.read();
  }

  showProgress(now) {
    this.bar.hidden = this.text.hidden = !now;
    if (!now) return;
    if (now.total) Object.assign(this.bar, { max: now.total, value: now.done });
    else this.bar.removeAttribute("value");
    const left = now.left ? `, ${time(now.left)} left` : "";
    const lanes = now.lanes.map((lane) => `\n${laneText(lane)}`).join("");
    setText(this.text, `${now.what} ${now.text}${left}${lanes}`);
  }

  offer(names) {
    for (const [name, button] of this.actions) {
      if (!names.includes(name)) { button.remove(); this.actions.delete(name); }
    }
    for (const name of names.filter((each) => !this.actions.has(each))) {
      const [label, kind, action] = ACTIONS[name];
      const button = element("button", { type: "button", class: kind, "aria-label": `${label}: ${this.job.title}`,
        onclick: () => button.getAttribute("aria-disabled") === "true" || act(null, async () => { await action(this.id, this.job.state); await look(); }) }, label);
      this.actions.set(name, button);
      this.buttons.append(button);
    }
  }

  // The output since the last look; the view follows its end, unless the user has scrolled up.
  async read() {
    if (!this.output.open || this.reading) return;
    this.reading = true;
    try {
      const { text, next, skipped } = await get(`/api/jobs/${this.id}/output?since=${this.next}`);
      this.next = next;
      if (!text) return;
      const follows = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
      const before = skipped ? `… ${plural(skipped, "byte")} left out …\n` : this.log.textContent;
      this.log.textContent = (before + text).slice(-KEPT);
      if (follows) this.log.scrollTop = this.log.scrollHeight;
    } catch { // the next look tries again, and says what is wrong
    } finally {
      this.reading = false;
    }
  }

  async readResult() {
    if (!this.result.open || this.said.textContent) return;
    await act(null, async () => {
      const { document: found, text } = await get(`/api/jobs/${this.id}/result`);
      this.said.textContent = text ?? JSON.stringify(found, null, 1);
      if (!this.said.textContent) this.said.textContent = "It printed nothing.";
    });
  }
}

function stateText(job) {
  const parts = [job.state === "queued" && isPaused ? "waits: the queue is paused" : WORDS[job.state]];
  if (job.state === "failed" && job.code !== null) parts[0] += ` with code ${job.code}`;
  parts.push(job.kind);
  if (job.devices.length) parts.push(`on ${job.devices.join(", ")}`);
  if (job.started) parts.push(time(Math.max(0, (job.ended ?? Date.now() / 1000) - job.started)));
  if (job.ended) parts.push(`ended ${new Date(1000 * job.ended).toLocaleString()}`);
  return parts.join(" · ");
}

function laneText(lane) {
  if (lane.busy === undefined) return `${lane.name}: ${lane.samples_per_second.toFixed(2)} samples/s`;
  return `${lane.name} on ${lane.device}: ${lane.done} done, ${Math.round(100 * lane.busy)} % busy`;
}

// Puts the cards of these jobs into a list, in their order.
function fill(name, jobs) {
  const place = at(name);
  jobs.forEach((job, i) => {
    const { node } = cards.get(job.id);
    if (place.children[i] !== node) place.insertBefore(node, place.children[i] ?? null);
  });
  while (place.children.length > jobs.length) place.lastChild.remove();
  at(`no-${name}`).hidden = jobs.length > 0;
}

function show({ paused, jobs }) {
  isPaused = paused;
  at("is-paused").hidden = !paused;
  setText(at("pause"), paused ? "Resume the queue" : "Pause the queue");
  const focused = document.activeElement, of = focused?.closest?.("[data-job]"), list = of?.parentElement;
  const queued = jobs.filter((job) => job.state === "queued");
  for (const job of jobs) {
    if (!cards.has(job.id)) {
      cards.set(job.id, new Card(job));
      if (!isFirst) announce(`${job.title}: ${WORDS[job.state]}`);
    }
    cards.get(job.id).update(job, { up: job !== queued[0], down: job !== queued.at(-1) });
  }
  for (const id of cards.keys()) {
    if (!jobs.some((job) => job.id === id)) cards.delete(id);
  }
  const ended = jobs.filter((job) => !isActive(job) && job.state !== "queued");
  fill("active", jobs.filter(isActive));
  fill("queued", queued);
  fill("ended", showsAll ? ended : ended.slice(0, FEW));
  at("more").hidden = showsAll || ended.length <= FEW;
  isFirst = false;
  if (of && document.activeElement !== focused) keepFocus(focused, of, list);
}

// An element that was moved has lost the focus; one that is missing leaves it to its card, or to the heading of the list.
function keepFocus(focused, of, list) {
  if (focused.isConnected) focused.focus();
  else if (of.isConnected) of.querySelector("h3").focus();
  else at(`${list.id}-title`).focus();
}

const look = async () => show(await get("/api/jobs"));

at("pause").addEventListener("click", () => act(null, async () => {
  const { paused } = await post(`/api/queue/${isPaused ? "resume" : "pause"}`);
  announce(paused ? "The queue is paused" : "The queue continues");
  await look();
}));
at("more").addEventListener("click", () => { showsAll = true; look().then(() => at("ended-title").focus()); });
poll(look);
