// Cards of jobs on the Build page: state, progress, a bar for each lane, output, and what can be done with the job.

import { act, commandLine, element, get, post, time } from "./api.js";

const WORDS = {
  queued: "queued", running: "running", stopping: "stopping: it finishes what it encodes, and keeps it",
  done: "done", failed: "failed", stopped: "stopped: what is encoded is kept", lost: "lost: it ended without saying how",
};
const KEPT = 64_000; // characters of output that a card shows
export const isActive = (job) => ["queued", "running", "stopping"].includes(job.state);

// Keeps a card for each of the jobs in `place`, in their order; `links(job, card)` adds what a page knows besides. `all`
// are the jobs of the queue, which a job may wait for.
export class JobCards {
  constructor(place, { heading = "h3", again = "Resume", onchange, links = () => {} }) {
    Object.assign(this, { place, heading, again, onchange, links, cards: new Map() });
  }

  show(jobs, all, isPaused) {
    for (const [id, card] of this.cards) {
      if (!jobs.some((job) => job.id === id)) { card.node.remove(); this.cards.delete(id); }
    }
    jobs.forEach((job, at) => {
      const card = this.cards.get(job.id) ?? this.add(job);
      if (this.place.children[at] !== card.node) this.place.insertBefore(card.node, this.place.children[at] ?? null);
      card.update(job, all, isPaused);
    });
  }

  add(job) {
    const card = new Card(job, this);
    this.cards.set(job.id, card);
    return card;
  }
}

class Card {
  constructor(job, cards) {
    this.cards = cards;
    this.state = element("p", { class: "state" });
    this.bar = element("progress", { "aria-label": `Progress of ${job.title}` });
    this.text = element("p", { class: "muted" });
    this.lanes = element("ul", { class: "lanes" });
    this.summary = element("p", { class: "summary" });
    this.error = element("pre", { hidden: true });
    this.buttons = element("div", { class: "row" });
    this.extra = element("div");
    this.log = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `Output of ${job.title}, ${job.id}` });
    this.details = element("details", { ontoggle: () => this.read().catch(() => {}) }, element("summary", {}, "Output"), this.log);
    this.next = 0;
    this.made = new Map();
    this.node = element("article", { class: "panel job", "data-job": job.id },
      element(cards.heading, {}, job.title), this.state, this.bar, this.text, this.lanes, this.summary, this.error, this.extra,
      this.buttons, element("details", {}, element("summary", {}, "Command"), commandLine(job.line, `command line of ${job.title}, ${job.id}`)), this.details);
  }

  update(job, all, isPaused) {
    setText(this.state, state(job, all, isPaused));
    this.state.className = `state${job.state === "failed" || job.state === "lost" ? " problem" : job.state === "done" ? " ok" : ""}`;
    this.progress(job);
    this.error.hidden = !job.error;
    setText(this.error, job.error ?? "");
    if (job.state === "failed" && isActive({ state: this.seen })) this.details.open = true; // it says what to fix
    this.offer(job);
    this.cards.links(job, this);
    if (this.details.open || this.wantsSummary(job)) this.read().catch(() => {});
  }

  progress(job) {
    const now = isActive(job) && job.state !== "queued" ? job.progress : null;
    this.bar.hidden = !now;
    this.text.hidden = !now;
    this.lanes.hidden = !now?.lanes?.length;
    if (!now) return;
    if (now.total) { this.bar.max = now.total; this.bar.value = now.done; } else this.bar.removeAttribute("value");
    const left = now.left ? `, ${time(now.left)} left` : "";
    setText(this.text, `${now.what} ${(now.text ?? "").split("\n")[0]}${left}`);
    const rows = now.lanes ?? [];
    while (this.lanes.children.length > rows.length) this.lanes.lastChild.remove();
    rows.forEach((lane, at) => showLane(this.lanes.children[at] ?? this.lanes.appendChild(newLane()), lane));
  }

  offer(job) {
    this.seen = job.state;
    const wanted = [];
    if (job.can.includes("stop")) wanted.push(["stop", job.state === "stopping" ? "Stop now" : "Stop", ""]);
    if (job.can.includes("kill") && job.state === "stopping") wanted.push(["kill", "End it by force", "danger"]);
    if (job.can.includes("again") && ["stopped", "failed", "lost"].includes(job.state)) wanted.push(["again", job.state === "failed" ? "Run again" : this.cards.again, "primary"]);
    if (job.can.includes("remove") && job.state === "queued") wanted.push(["remove", "Remove from the queue", ""]);
    for (const [name, button] of this.made) {
      if (!wanted.some(([each]) => each === name)) { button.remove(); this.made.delete(name); }
    }
    for (const [name, label, kind] of wanted) {
      let button = this.made.get(name);
      if (!button) {
        button = element("button", { type: "button", class: kind, onclick: () => act(button, async () => { await post(`/api/jobs/${job.id}/${name}`, name === "stop" ? { seen: this.seen } : {}); this.cards.onchange(); }) });
        this.made.set(name, button);
        this.buttons.append(button);
      }
      setText(button, label);
    }
  }

  wantsSummary(job) {
    return ["done", "stopped"].includes(job.state) && job.kind === "build" && !this.summary.textContent && this.tries !== 3;
  }

  // The output since the last look, and the summary of a build at its end.
  async read() {
    if (this.reading) return;
    this.reading = true;
    this.tries = (this.tries ?? 0) + 1;
    try {
      const output = await get(`/api/jobs/${this.node.dataset.job}/output?since=${this.next}`);
      this.next = output.next;
      if (!output.text) return;
      const isAtEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 4;
      this.log.textContent = (this.log.textContent + output.text).slice(-KEPT);
      if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
      setText(this.summary, summary(this.log.textContent));
    } finally {
      this.reading = false;
    }
  }
}

// The lines of a build that say what it did; the newest ones, if it builds again and again.
function summary(output) {
  const said = output.split("\n").filter((line) => /^(done in |nothing to do: |.* holds \d|.* finished and kept;)/.test(line));
  return said.slice(-4).join("\n");
}

function state(job, all, isPaused) {
  if (job.kind === "verify" && job.code === 1) return "faults found";
  const word = WORDS[job.state] ?? job.state;
  if (job.state === "queued") {
    if (isPaused) return "queued: the queue is paused, see the Queue page";
    const others = all.filter((other) => other.id !== job.id && other.devices.length && isActive(other) && (other.state !== "queued" || other.created < job.created));
    return others.length ? `queued behind ${others.map((other) => other.title).join(", ")}` : word;
  }
  const seconds = (job.ended ?? Date.now() / 1000) - (job.started ?? job.created);
  const code = job.state === "failed" && job.code !== null ? ` with code ${job.code}` : "";
  const named = job.devices.filter((name) => name !== "auto");
  const devices = named.length ? ` on ${named.join(", ")}` : "";
  return `${word}${code}${devices}, ${time(Math.max(0, seconds))}`;
}

const newLane = () => element("li", {}, element("span"), element("progress", { max: "1" }), element("span", { class: "muted" }));

function showLane(row, lane) {
  const [name, bar, text] = row.children;
  const done = lane.done === undefined ? "" : `${lane.done} ${lane.name.startsWith("vae") ? "images" : "prompts"} done, `;
  setText(name, lane.device ? `${lane.name} on ${lane.device}` : lane.name);
  bar.hidden = lane.busy === undefined;
  bar.value = lane.busy ?? 0;
  bar.setAttribute("aria-label", `${lane.name}: busy share`);
  setText(text, lane.busy === undefined ? `${lane.samples_per_second.toFixed(2)} samples/s` : `${done}${Math.round(100 * lane.busy)} % busy`);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
