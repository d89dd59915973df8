// A job on a page: its state in words, its progress and the time that is left, its output, what can be done with it, and
// a card of all that. Cards stay while their jobs change, with the focus, scrolled output and open parts; changed states are announced.

import { act, announce, arrange, at, commandLine, element, get, plural, post, saveText, setText, time } from "./api.js";
import { isActive, isEnded, look } from "./jobs.js";

const WORDS = {
  held: "from elsewhere: it starts when you have read its command and press Run",
  queued: "queued", running: "running", stopping: "stopping: it saves, then ends", done: "done", failed: "failed",
  stopped: "stopped", lost: "lost: it was killed, or the machine was switched off",
};
const OF_BUILDS = {
  stopping: "stopping: it finishes what it encodes, and keeps it", stopped: "stopped: what is encoded is kept",
};
const KEPT = 200_000; // characters of output that a page keeps
const NAMED = 2; // jobs that another waits for
const STALE = 60; // seconds after which nobody knows whether a job still makes progress

// ---- words ----------------------------------------------------------------------------------------------------------

function words(job) {
  if (job.kind === "verify" && job.code === 1) return "faults found";
  if (job.state === "failed" && job.code !== null) return `failed with code ${job.code}`;
  return (job.kind === "build" && OF_BUILDS[job.state]) || WORDS[job.state];
}

// A queued job, with what it waits for.
export function queued(job, { paused }) {
  const isHere = document.body.dataset.page === "queue", before = job.waits_for ?? [];
  if (paused) return `queued: the queue is paused${isHere ? "" : ", see the Queue page"}`;
  if (!before.length) return WORDS.queued;
  const more = before.length > NAMED ? `, and for ${plural(before.length - NAMED, "other job")}` : "";
  const ofAny = before.some(({ devices }) => !devices.length) ? ": one that names no device may use any" : "";
  return `waits for ${before.slice(0, NAMED).map(cause).join(", and for ")}${more}${ofAny}`;
}

// One without common devices may use any of them, such as a job on `auto`.
function cause({ title, is_active: isRunning, devices }) {
  if (!devices.length) return `the end of “${title}”`;
  return `${devices.join(" and ")}, which “${title}” ${isRunning ? "uses" : "gets first"}`;
}

// The time that an active job has left, as far as its rate is known; empty where there is nothing to wait for.
export function left({ total, done, left: seconds, age = 0 } = {}) {
  if (!total || done >= total || seconds === undefined) return "";
  if (seconds === null || age > STALE) return "time left not known";
  if (seconds < 60) return "less than 1 min left";
  return `about ${seconds < 3600 ? `${Math.round(seconds / 60)} min` : time(seconds)} left`;
}

function stateText(job, answer) {
  const devices = job.devices.filter((name) => name !== "auto");
  return [
    job.state === "queued" ? queued(job, answer) : words(job),
    devices.length && !job.waits_for?.length && `on ${devices.join(", ")}`,
    job.started && time(Math.max(0, (job.ended ?? Date.now() / 1000) - job.started)),
    job.ended && `ended ${new Date(1000 * job.ended).toLocaleString()}`,
  ].filter(Boolean).join(", ");
}

// ---- parts of a card ------------------------------------------------------------------------------------------------

// A bar, a line and the lanes of an active job.
export class Progress {
  constructor(of) {
    this.bar = element("progress", { "aria-label": `Progress of ${of}` });
    this.text = element("p", { class: "muted" });
    this.lanes = element("ul", { class: "lanes" });
    this.nodes = [this.bar, this.text, this.lanes];
  }

  show(job) {
    const isShown = Boolean(job && isActive(job)), now = (isShown && job.progress) || {}, lanes = now.lanes ?? [];
    this.bar.hidden = !isShown;
    if (now.total) Object.assign(this.bar, { max: now.total, value: now.done });
    else this.bar.removeAttribute("value");
    const [first, ...others] = String(now.text ?? "").split("\n");
    const doing = [now.what, first].filter(Boolean).join(/^\d/.test(first) ? " " : ": "); // such as encoding 3/4
    const line = [doing, left(now)].filter(Boolean).join(", ");
    setText(this.text, [line, ...(lanes.length ? [] : others)].join("\n"));
    this.text.hidden = !line;
    arrange(this.lanes, lanes.map((lane, i) => showLane(this.lanes.children[i] ?? newLane(), lane)));
    this.lanes.hidden = !lanes.length;
  }
}

const newLane = () =>
  element("li", {}, element("span"), element("progress", { max: "1" }), element("span", { class: "muted" }));

function showLane(row, lane) {
  const [name, bar, text] = row.children, isKnown = lane.busy !== undefined;
  const noun = lane.name.startsWith("vae") ? "images" : "prompts";
  const done = lane.done === undefined ? "" : `${lane.done} ${noun} done, `;
  setText(name, lane.device ? `${lane.name} on ${lane.device}` : lane.name);
  bar.hidden = !isKnown;
  bar.value = lane.busy ?? 0;
  bar.setAttribute("aria-label", `${lane.name}: busy share`);
  if (isKnown) setText(text, `${done}${Math.round(100 * lane.busy)} % busy`);
  else setText(text, `${lane.samples_per_second.toFixed(2)} samples/s`);
  return row;
}

// What a job has printed, in `log`. The view follows its end, unless the user has scrolled up.
export class Output {
  constructor(properties) {
    this.log = element("pre", { class: "log", tabindex: "0", role: "region", ...properties });
    this.next = 0;
  }

  // Add what is new.
  async read(job) {
    if (this.isReading || this.isWhole) return;
    this.isReading = true;
    try {
      const { log } = this, { text, next, skipped } = await get(`/api/jobs/${job.id}/output?since=${this.next}`);
      this.next = next;
      this.isWhole = isEnded(job);
      if (!text) return;
      const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
      const before = skipped ? `… ${plural(skipped, "byte")} left out …\n` : log.textContent;
      log.textContent = (before + text).slice(-KEPT);
      if (follows) log.scrollTop = log.scrollHeight;
    } catch { // the next look tries again, and says what is wrong
    } finally {
      this.isReading = false;
    }
  }
}

const send = (path, body = () => ({})) => (job) => post(`/api/jobs/${job.id}/${path}`, body(job));
const seen = (job) => ({ seen: job.state });
const kill = (job) => confirm("Kill it? What it has not saved is lost.") && send("kill")(job);
const save = (job) => send("save")(job).then(() => announce("a checkpoint is saved after this step"));
const sample = (job) => send("sample")(job).then(() => announce("images are generated after this step"));
const exported = async (job) => {
  const content = await get(`/api/jobs/${job.id}/export`);
  saveText(`${job.title.replace(/[^\p{L}\p{N}._-]+/gu, "-")}.job.json`, JSON.stringify(content, null, 1));
  announce("the job is saved as a file");
};
const isCut = (job) => job.kind === "build" && ["stopped", "lost"].includes(job.state);

// By what a job says it can: the button, and what it does.
export const ACTIONS = {
  up: { label: () => "Up", run: send("move", () => ({ by: -1 })), isRepeated: true },
  down: { label: () => "Down", run: send("move", () => ({ by: 1 })), isRepeated: true },
  save: { label: () => "Save now", run: save },
  sample: { label: () => "Sample now", run: sample },
  stop: { label: ({ state }) => state === "stopping" ? "Stop without saving" : "Stop", run: send("stop", seen) },
  kill: { label: () => "Kill", run: kill, kind: "danger" },
  again: { label: (job) => isCut(job) ? "Resume" : "Run again", run: send("again") },
  run: { label: () => "Run", run: send("run") },
  export: { label: () => "Export", run: exported },
  remove: { label: () => "Remove", run: send("remove") },
};

// Buttons for a job. `about(name)` says in words what an action does.
export class Actions {
  constructor(of, { table = ACTIONS, about } = {}) {
    Object.assign(this, { of, table, about, made: new Map() });
    const group = { class: "row", role: "group", "aria-label": `actions for ${of}` };
    this.place = about ? element("dl") : element("div", group);
  }

  // Offer these. One that is `blocked` does nothing, and keeps the focus.
  offer(names, job, blocked = []) {
    this.job = job;
    arrange(this.place, names.map((name) => this.row(name).node));
    for (const name of names) {
      const { button, said } = this.row(name), label = this.table[name].label(job);
      setText(button, label);
      button.setAttribute("aria-label", `${label}: ${this.of}`);
      button.setAttribute("aria-disabled", blocked.includes(name));
      if (said) setText(said, this.about(name));
    }
  }

  row(name) {
    if (!this.made.has(name)) {
      const { kind, isRepeated } = this.table[name];
      const repeats = isRepeated && `${name} ${this.job.id}`;
      const button = element("button", { type: "button", class: kind, "data-repeats": repeats, onclick: () => this.run(name, button) });
      const said = this.about && element("span");
      const node = said ? element("div", {}, element("dt", {}, button), element("dd", {}, said)) : button;
      this.made.set(name, { node, button, said });
    }
    return this.made.get(name);
  }

  run(name, button) {
    if (this.isRunning || button.getAttribute("aria-disabled") === "true") return;
    this.isRunning = true;
    act(null, () => this.table[name].run(this.job)).finally(() => { this.isRunning = false; look(); });
  }
}

// ---- cards ----------------------------------------------------------------------------------------------------------

// What all pages offer; only the Queue page moves jobs and removes those that have ended.
export const offered = (job) => job.can.filter((name) => name !== "move" && (name !== "remove" || !isEnded(job)));

class JobCard {
  constructor(job, { tag = "article", kind = "", title = () => job.title }) {
    const of = `${job.title}, ${job.id}`;
    this.title = element("h3", { tabindex: "-1" }, title(job));
    this.state = element("p");
    this.progress = new Progress(job.title);
    this.error = element("pre", { hidden: true });
    this.extra = element("div");
    this.actions = new Actions(job.title);
    this.output = new Output({ "aria-label": `Output of ${of}` });
    this.opened = element("details", { ontoggle: () => this.opened.open && this.output.read(this.job) },
      element("summary", {}, "Output"), this.output.log);
    const line = commandLine(job.line, `command line of ${of}`);
    this.node = element(tag, { class: `panel job ${kind}`.trim(), "data-job": job.id },
      this.title, this.state, ...this.progress.nodes, this.error, this.extra, this.actions.place,
      element("details", {}, element("summary", {}, "Command"), line), this.opened);
  }

  update(job, answer, { offers = offered, blocked = () => [], extra = () => {} }) {
    const before = this.job;
    this.job = job;
    this.node.dataset.state = job.state;
    setText(this.state, stateText(job, answer));
    this.state.className = `state ${{ failed: "problem", lost: "problem", done: "ok" }[job.state] ?? ""}`.trim();
    this.progress.show(job);
    setText(this.error, job.error ?? "");
    this.error.hidden = !job.error;
    this.actions.offer(offers(job), job, blocked(job));
    if (before && before.state !== job.state) {
      this.announce();
      if (job.state === "failed") this.opened.open = true; // it says what to fix
    }
    if (this.opened.open) this.output.read(job);
    return extra(job, this);
  }

  announce() { announce(`${this.job.title}: ${words(this.job)}`); }
}

// The cards of a page. Of the options, `offers(job)` are names of actions and `blocked(job)` those that do nothing now;
// `extra(job, card)` fills `card.extra` with what only this page shows.
export class JobCards {
  constructor(options = {}) {
    Object.assign(this, { options, cards: new Map(), isFirst: true });
  }

  // Show, in each of the [place, jobs], these jobs of an answer, in their order.
  async show(lists, answer) {
    const focused = document.activeElement, of = focused?.closest?.("[data-job]"), list = of?.parentElement;
    const updates = [], shown = new Set();
    for (const [place, jobs] of lists) {
      arrange(place, jobs.map((job) => {
        const isNew = !this.cards.has(job.id);
        if (isNew) this.cards.set(job.id, new JobCard(job, this.options));
        const card = this.cards.get(job.id);
        updates.push(card.update(job, answer, this.options));
        if (isNew && !this.isFirst && !isEnded(job)) card.announce();
        shown.add(job.id);
        return card.node;
      }));
    }
    for (const id of this.cards.keys()) if (!shown.has(id)) this.cards.delete(id);
    this.isFirst = false;
    if (of && document.activeElement !== focused) keepFocus(focused, of, list);
    await Promise.all(updates);
  }

  focus(job) { this.cards.get(job.id)?.title.focus(); }

  // Bring the card of a job into view.
  reveal(job) { this.cards.get(job.id)?.node.scrollIntoView({ block: "nearest" }); }
}

// An element that was moved has lost the focus; one that is missing leaves it to its card, or to the list's heading.
function keepFocus(focused, of, list) {
  if (focused.isConnected) focused.focus();
  else if (of.isConnected) of.querySelector("h3").focus();
  else at(`${list.id}-title`)?.focus();
}
