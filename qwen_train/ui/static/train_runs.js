// The runs of the folder: a list, and what those that are chosen have written, one alone or several side by side.

import { announce, arrange, at, element, get, setText } from "./api.js";
import { left, Output, queued } from "./job_card.js";
import { isActive, isEnded, look, newestFirst, onJobs } from "./jobs.js";
import { choose, chosen } from "./project.js";
import { Curves } from "./train_curves.js";
import { Images } from "./train_images.js";
import { RunPanel } from "./train_panel.js";

const REST = 10; // times as long as the last list took: a folder of thousands of folders is looked at less often
const EVERY = 3; // looks between two lists of runs; the jobs are asked for at each
const MOST = 8; // runs that are compared: as many as there are styles of curves

export class Runs {
  constructor() {
    Object.assign(this, { runs: [], jobs: [], styles: new Map(), panels: new Map(), rows: new Map(), looks: 0, notes: 0 });
    this.curves = new Curves();
    this.images = new Images();
    this.chosen = this.ofAddress();
    this.remember();
    at("find-run").addEventListener("input", () => this.render());
    window.addEventListener("hashchange", () => { this.chosen = this.ofAddress(); this.render(); look(); });
  }

  begin() { onJobs((answer) => this.look(answer)); }

  ofAddress() { return new URLSearchParams(location.hash.slice(1)).getAll("run").slice(0, MOST); }

  // Show these runs, and keep them in the address, so that a reload shows the same.
  show(folders, focus = false) {
    this.chosen = folders.slice(0, MOST);
    this.remember();
    const address = new URLSearchParams(this.chosen.map((folder) => ["run", folder]));
    history.replaceState(null, "", `#${address}`);
    this.render();
    this.looks = 0;
    look();
    if (focus) at("view-title").focus();
  }

  // Generate then has the newest LoRA of another run.
  remember() {
    const [run] = this.chosen;
    if (run && run !== chosen("run")) choose({ run, lora: "" });
  }

  async look(answer) {
    this.answer = answer;
    this.jobs = answer.jobs.filter((job) => job.kind === "train" || job.about?.decoded);
    const hasEnded = this.active !== undefined && this.active !== this.activeNow();
    this.active = this.activeNow();
    const began = performance.now();
    if ((this.looks % EVERY === 0 && began >= (this.rest ?? 0)) || hasEnded || !this.looks) {
      let notes, runs;
      do {
        ({ notes } = this);
        ({ runs } = await get("/api/train/runs"));
      } while (notes !== this.notes); // a note was saved meanwhile, which this list may not have
      this.runs = runs;
      this.rest = began + (performance.now() - began) * REST;
    }
    this.looks += 1;
    if (!this.wasLooked) {
      this.wasLooked = true;
      const active = this.jobs.find((job) => job.kind === "train" && !isEnded(job));
      const running = this.runs.find((run) => run.running);
      this.onfirst?.(Boolean(active) || this.runs.length > 0);
      if (!this.chosen.length) {
        const folders = [active?.about.output_dir, running?.folder, ...this.runs.map(({ folder }) => folder)].filter(Boolean);
        const first = folders.find((folder) => folder === chosen("run")) ?? folders[0];
        if (first) this.show([first]);
      }
    }
    this.render();
    await this.lookAtChosen();
  }

  activeNow() { return this.jobs.filter((job) => !isEnded(job)).map((job) => `${job.id} ${job.state}`).join(); }

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
    const asked = new URLSearchParams(found.map((folder) => ["folder", folder]));
    const { runs, rows } = await get(`/api/train/differences?${asked}`);
    const heads = ["Setting", ...runs].map((text) => element("th", { scope: "col" }, text));
    const row = ({ key, values }) => element("tr", {}, element("th", { scope: "row" }, key),
      ...values.map((value) => element("td", {}, value ?? "(not set)")));
    const table = element("table", {},
      element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows.map(row)));
    const region = { class: "differences", tabindex: "0", role: "region", "aria-label": "Table of settings" };
    const none = element("p", { class: "muted" }, "All settings are equal, except the output folder.");
    at("differences").replaceChildren(rows.length ? element("div", region, table) : none);
  }

  jobsOf(folder) {
    return newestFirst(this.jobs.filter((job) => job.kind === "train" && job.about?.output_dir === folder));
  }

  // The log of the newest job of a single run.
  async lookAtLog() {
    const [job] = this.chosen.length === 1 ? this.jobsOf(this.chosen[0]) : [];
    at("log-part").hidden = !job;
    if (!job) return;
    if (this.logOf !== job.id) {
      this.logOf = job.id;
      this.output = new Output({ id: "log", "aria-label": "Lines of the log" });
      at("log").replaceWith(this.output.log);
    }
    await this.output.read(job);
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
    const folders = new Set(this.runs.map(({ folder }) => folder));
    const begun = this.jobs.filter((job) => job.kind === "train" && !isEnded(job)).map((job) => job.about.output_dir);
    const without = begun.filter((folder) => !folders.has(folder)); // no run yet
    const runs = [...without.map((folder) => ({ folder, step: 0 })), ...this.runs];
    at("no-runs").hidden = runs.length > 0 || !this.wasLooked;
    document.querySelector(".runs").hidden = !runs.length;
    at("find-part").hidden = !runs.length;
    const found = runs.filter((run) => this.isFound(run)), typed = at("find-run").value.trim();
    setText(at("found-runs"), typed ? `${found.length} of ${runs.length}` : "");
    arrange(at("runs"), found.map((run) => this.fill(this.rowOf(run.folder), run)));
    this.renderView();
  }

  // True if a run has every word that is searched for in its name, note, model or state.
  isFound(run) {
    const text = [run.folder, run.note, run.model, this.stateOf(run.folder, run)].join(" ").toLowerCase();
    return at("find-run").value.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  rowOf(folder) {
    if (this.rows.has(folder)) return this.rows.get(folder);
    const box = element("input", { type: "checkbox", "aria-label": `Show ${folder}`, onchange: () => {
      const others = this.chosen.filter((each) => each !== folder);
      if (box.checked && others.length >= MOST) {
        box.checked = false;
        announce(`at most ${MOST} runs are compared`);
      } else this.show(box.checked ? [...others, folder] : others);
    } });
    const only = element("button", {
      type: "button", class: "quiet", title: "Show this run alone", onclick: () => this.show([folder]),
    }, folder);
    const row = element("tr", { "data-folder": folder },
      element("td", {}, element("label", {}, box, element("span", { class: "swatch" }))),
      element("td", {}, only, element("p", { class: "run-note", hidden: true })),
      element("td"), element("td", { class: "number" }), element("td", { class: "number" }), element("td"));
    this.rows.set(folder, row);
    return row;
  }

  fill(row, run) {
    const isChosen = this.chosen.includes(run.folder), [show, name, state, step, loss, date] = row.children;
    const [job] = this.jobsOf(run.folder), still = job && isActive(job) ? left({ ...job.progress }) : "";
    const ended = run.time && new Date(run.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    show.querySelector("input").checked = isChosen;
    swatch(show.querySelector(".swatch"), isChosen && this.chosen.length > 1 ? this.styleOf(run.folder) : null);
    setText(state, [this.stateOf(run.folder, run), still].filter(Boolean).join(", "));
    setText(name.lastChild, run.note ?? "");
    name.lastChild.hidden = !run.note;
    const last = run.max_steps ? ` of ${number(run.max_steps)}` : "";
    setText(step, run.step || last ? number(run.step) + last : "–");
    setText(loss, run.loss?.toPrecision(4) ?? "–");
    setText(date, ended || "–");
    return row;
  }

  renderView() {
    const runOf = (folder) => this.runs.find((run) => run.folder === folder);
    const chosen = this.chosen.filter((folder) => runOf(folder) || this.jobsOf(folder).length);
    at("view").hidden = !chosen.length;
    if (!chosen.length) return;
    setText(at("view-title"), chosen.length === 1 ? `Run ${chosen[0]}` : `${chosen.length} runs compared`);
    for (const folder of this.panels.keys()) if (!chosen.includes(folder)) this.panels.delete(folder);
    arrange(at("jobs"), chosen.map((folder) => {
      if (!this.panels.has(folder)) this.panels.set(folder, this.panelOf(folder));
      const panel = this.panels.get(folder), run = runOf(folder), [job] = this.jobsOf(folder);
      panel.update({
        run, job, decoding: this.jobs.some((each) => each.about?.decoded === folder && !isEnded(each)),
        waiting: this.images.waiting(folder), isAlone: chosen.length === 1, state: this.stateOf(folder, run),
      });
      return panel.node;
    }));
  }

  panelOf(folder) {
    const onnote = (note) => {
      this.notes += 1;
      for (const run of this.runs) if (run.folder === folder) run.note = note;
      this.render();
    };
    return new RunPanel(folder, { onclone: () => this.onclone(folder), onnote });
  }

  // The state of a run in words; one without a job was started elsewhere, and one without a run has only its job.
  stateOf(folder, run = { step: 0 }) {
    const [job] = this.jobsOf(folder);
    if (job?.state === "queued") return queued(job, this.answer);
    if (job && isActive(job)) return job.state;
    if (run.running) return "running, started elsewhere";
    if (job?.state === "failed") return "failed";
    if (run.max_steps && run.step >= run.max_steps) return "done";
    return `${job?.state === "stopped" ? "stopped after" : "ended at"} step ${number(run.step)}`;
  }
}

const number = (value) => value.toLocaleString("en");

function swatch(place, style) {
  const wanted = style === null ? "" : `curve style-${style}`;
  if (place.dataset.style === wanted) return;
  place.dataset.style = wanted;
  place.replaceChildren();
  if (!wanted) return;
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  const path = document.createElementNS(ns, "path");
  svg.setAttribute("class", `curve-sample ${wanted}`);
  svg.setAttribute("viewBox", "0 0 28 10");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", "M1 5H27");
  svg.append(path);
  place.append(svg);
}
