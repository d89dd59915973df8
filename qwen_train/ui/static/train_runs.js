// The runs of the folder: a list, and what those that are chosen have written, one alone or several side by side.

import { announce, element, get, poll } from "./api.js";
import { Curves } from "./train_curves.js";
import { Images } from "./train_images.js";
import { RunPanel } from "./train_panel.js";

const LOOK = 1000; // ms
const REST = 10; // times as long as the last list took: a folder of thousands of folders is looked at less often
const EVERY = 3; // looks between two lists of runs; the jobs are asked for at each
const MOST = 8; // runs that are compared: as many as there are styles of curves
const at = (id) => document.getElementById(id);

export class Runs {
  constructor() {
    Object.assign(this, { runs: [], jobs: [], styles: new Map(), panels: new Map(), looks: 0, logAt: new Map() });
    this.curves = new Curves();
    this.images = new Images();
    this.chosen = this.ofAddress();
    window.addEventListener("hashchange", () => { this.chosen = this.ofAddress(); this.render(); this.now?.(); });
  }

  begin() { this.now = poll(() => this.look(), LOOK); }

  ofAddress() { return new URLSearchParams(location.hash.slice(1)).getAll("run").slice(0, MOST); }

  // Show these runs, and keep them in the address, so that a reload shows the same.
  show(folders, focus = false) {
    this.chosen = folders.slice(0, MOST);
    const address = new URLSearchParams(this.chosen.map((folder) => ["run", folder]));
    history.replaceState(null, "", `#${address}`);
    this.render();
    this.looks = 0;
    this.now?.();
    if (focus) { const title = at("view-title"); title.tabIndex = -1; title.focus(); }
  }

  async look() {
    const { jobs, paused } = await get("/api/jobs");
    this.isPaused = paused;
    this.jobs = jobs.filter((job) => job.kind === "train" || job.about?.decoded);
    const hasEnded = this.active !== undefined && this.active !== this.activeNow();
    this.active = this.activeNow();
    const began = performance.now();
    if ((this.looks % EVERY === 0 && began >= (this.rest ?? 0)) || hasEnded || !this.looks) {
      this.runs = (await get("/api/train/runs")).runs;
      this.rest = began + (performance.now() - began) * REST;
    }
    this.looks += 1;
    if (!this.wasLooked) {
      this.wasLooked = true;
      const active = this.jobs.find((job) => job.kind === "train" && isActive(job)), running = this.runs.find((run) => run.running);
      this.onactive?.(Boolean(active) || this.runs.length > 0);
      if (!this.chosen.length) {
        const first = active?.about.output_dir ?? running?.folder ?? this.runs[0]?.folder;
        if (first) this.show([first]);
      }
    }
    this.render();
    await this.lookAtChosen();
  }

  activeNow() { return this.jobs.filter(isActive).map((job) => `${job.id} ${job.state}`).join(); }

  async lookAtChosen() {
    const found = this.chosen.filter((folder) => this.runs.some((run) => run.folder === folder));
    await this.curves.look(found.map((folder) => ({ folder, style: this.styleOf(folder) })));
    if (this.looks % EVERY === 1 || this.lastChosen !== found.join("\n")) {
      await this.images.look(found);
      if (this.lastChosen !== found.join("\n")) await this.lookAtDifferences(found);
      this.lastChosen = found.join("\n");
    }
    await this.lookAtLog();
  }

  async lookAtDifferences(found) {
    at("differences-part").hidden = found.length < 2;
    if (found.length < 2) return;
    const { runs, rows } = await get(`/api/train/differences?${new URLSearchParams(found.map((folder) => ["folder", folder]))}`);
    at("differences").replaceChildren(rows.length ? element("div", { class: "differences", tabindex: "0", role: "region", "aria-label": "Table of settings" },
      element("table", {}, element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Setting"), ...runs.map((run) => element("th", { scope: "col" }, run)))),
        element("tbody", {}, ...rows.map(({ key, values }) => element("tr", {}, element("th", { scope: "row" }, key),
          ...values.map((value) => element("td", {}, value ?? "(not set)")))))))
      : element("p", { class: "muted" }, "All settings are equal, except the output folder."));
  }

  jobsOf(folder) {
    return this.jobs.filter((job) => job.kind === "train" && job.about?.output_dir === folder).sort((a, b) => b.created - a.created);
  }

  // The log of the newest job of a single run: what was added since the last look.
  async lookAtLog() {
    const job = this.chosen.length === 1 ? this.jobsOf(this.chosen[0])[0] : undefined, log = at("log");
    at("log-part").hidden = !job;
    if (!job) return;
    if (this.logOf !== job.id) { this.logOf = job.id; this.logNext = -1; log.textContent = ""; }
    else if (!isActive(job) && this.logEnded === job.id) return;
    const { text, next, skipped } = await get(`/api/jobs/${job.id}/output?since=${this.logNext}`);
    if (this.logOf !== job.id) return;
    const isAtEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
    if (skipped) log.textContent = `… ${skipped.toLocaleString("en")} bytes before\n`;
    if (text) log.append(text);
    this.logNext = next;
    this.logEnded = isActive(job) ? null : job.id;
    if (isAtEnd && text) log.scrollTop = log.scrollHeight;
  }

  // ---- the list and the panels, updated in place -----------------------------------------------------------------

  styleOf(folder) {
    if (!this.styles.has(folder)) {
      const used = new Set(this.chosen.map((each) => this.styles.get(each)));
      let style = 0;
      while (used.has(style)) style += 1;
      this.styles.set(folder, style);
    }
    return this.styles.get(folder);
  }

  render() {
    for (const folder of [...this.styles.keys()]) if (!this.chosen.includes(folder)) this.styles.delete(folder);
    for (const folder of this.chosen) this.styleOf(folder);
    const waiting = this.jobs.filter((job) => job.kind === "train" && isActive(job) && !this.runs.some((run) => run.folder === job.about.output_dir));
    const rows = [...waiting.map((job) => ({ folder: job.about.output_dir, step: 0 })), ...this.runs];
    at("no-runs").hidden = rows.length > 0 || !this.wasLooked;
    document.querySelector(".runs").hidden = !rows.length;
    const body = at("runs"), old = new Map([...body.children].map((row) => [row.dataset.folder, row]));
    rows.forEach((run, i) => {
      const row = old.get(run.folder) ?? this.row(run.folder);
      old.delete(run.folder);
      this.fill(row, run);
      if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    });
    for (const row of old.values()) row.remove();
    this.renderView();
  }

  row(folder) {
    const box = element("input", { type: "checkbox", "aria-label": `Show ${folder}`, onchange: () => {
      if (box.checked && this.chosen.length >= MOST) { box.checked = false; announce(`at most ${MOST} runs are compared`); return; }
      this.show(box.checked ? [...this.chosen, folder] : this.chosen.filter((each) => each !== folder));
    } });
    const only = element("button", { type: "button", class: "quiet", title: "Show this run alone", onclick: () => this.show([folder]) }, folder);
    return element("tr", { "data-folder": folder }, element("td", {}, element("label", {}, box, element("span", { class: "swatch" }))),
      element("td", {}, only), element("td", {}), element("td", { class: "number" }), element("td", { class: "number" }), element("td", {}));
  }

  fill(row, run) {
    const isChosen = this.chosen.includes(run.folder), [show, , state, step, loss, date] = row.children, job = this.jobsOf(run.folder)[0];
    show.querySelector("input").checked = isChosen;
    swatch(show.querySelector(".swatch"), isChosen && this.chosen.length > 1 ? this.styleOf(run.folder) : null);
    say(state, stateOf(run, job, this.isPaused));
    say(step, run.max_steps ? `${run.step.toLocaleString("en")} of ${run.max_steps.toLocaleString("en")}` : run.step ? String(run.step) : "–");
    say(loss, run.loss === null || run.loss === undefined ? "–" : run.loss.toPrecision(4));
    say(date, run.time ? new Date(run.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "–");
  }

  renderView() {
    const chosen = this.chosen.filter((folder) => this.runs.some((run) => run.folder === folder) || this.jobsOf(folder).length);
    at("view").hidden = !chosen.length;
    if (!chosen.length) return;
    say(at("view-title"), chosen.length === 1 ? `Run ${chosen[0]}` : `${chosen.length} runs compared`);
    for (const [folder, panel] of this.panels) if (!chosen.includes(folder)) { panel.node.remove(); this.panels.delete(folder); }
    chosen.forEach((folder, i) => {
      if (!this.panels.has(folder)) this.panels.set(folder, new RunPanel(folder, () => { this.looks = 0; this.now(); }));
      const panel = this.panels.get(folder), run = this.runs.find((each) => each.folder === folder);
      panel.update({ run, job: this.jobsOf(folder)[0], decoding: this.jobs.find((job) => job.about?.decoded === folder && isActive(job)),
        waiting: this.images.waiting(folder), isAlone: chosen.length === 1, state: stateOf(run ?? { step: 0 }, this.jobsOf(folder)[0], this.isPaused) });
      if (at("jobs").children[i] !== panel.node) at("jobs").insertBefore(panel.node, at("jobs").children[i] ?? null);
    });
  }
}

const isActive = (job) => ["queued", "running", "stopping"].includes(job.state);

function stateOf(run, job, isPaused) {
  if (job && isActive(job)) return { queued: `waits in the queue${isPaused ? ", which is paused" : ""}`, running: "running", stopping: "stopping" }[job.state];
  if (run.running) return "running, started elsewhere";
  if (job?.state === "failed") return "failed";
  if (run.max_steps && run.step >= run.max_steps) return "done";
  if (job?.state === "stopped") return `stopped after step ${run.step.toLocaleString("en")}`;
  return `ended at step ${run.step.toLocaleString("en")}`;
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function swatch(place, style) {
  const wanted = style === null ? "" : `curve style-${style}`;
  if (place.dataset.style === wanted) return;
  place.dataset.style = wanted;
  place.replaceChildren();
  if (!wanted) return;
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), path = document.createElementNS(ns, "path");
  svg.setAttribute("class", `curve-sample ${wanted}`);
  svg.setAttribute("viewBox", "0 0 28 10");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", "M1 5H27");
  svg.append(path);
  place.append(svg);
}
