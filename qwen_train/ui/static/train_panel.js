// One run: its state and progress, and what can be done with it, with what each button does in words.

import { act, announce, commandLine, element, post, time } from "./api.js";
import { signed } from "./token.js";

const say = (node, text) => { if (node.textContent !== text) node.textContent = text; };

export class RunPanel {
  constructor(folder, again) {
    Object.assign(this, { folder, again });
    this.title = element("p", { class: "job-title" });
    this.bar = element("progress", { "aria-label": `Progress of ${folder}`, hidden: true });
    this.text = element("p", { class: "muted" });
    this.error = element("div", { class: "error", hidden: true }, element("p", {}));
    this.line = element("div", {});
    this.steps = element("input", { type: "number", min: "1", step: "1", class: "small", "aria-label": "Up to step" });
    this.actions = element("dl", {});
    this.buttons = {
      save: this.action("Save now", "Saves a checkpoint after the current step; training continues.", () => this.job_("save")),
      stop: this.action("Stop", "Finishes the step, saves a checkpoint and ends. The run can be resumed.", () => this.job_("stop")),
      kill: this.action("Kill", "Ends at once. Steps since the newest checkpoint are lost.", () => this.job_("kill"), "danger"),
      remove: this.action("Remove from the queue", "The run does not start.", () => this.job_("remove")),
      resume: this.action("Resume", "", () => this.resume()),
      decode: this.action("Decode images", "", () => this.decode()),
    };
    this.until = element("label", { class: "row" }, "up to step ", this.steps);
    this.buttons.resume.about.after(this.until);
    this.report = element("p", { hidden: true }, element("a", { target: "_blank", rel: "noreferrer" }, "Report of this run"),
      " (one page with curves, settings and images, written at each checkpoint)");
    this.node = element("section", { class: "job", "aria-label": `Run ${folder}` }, this.title, this.bar, this.text, this.error, this.line, this.actions, this.report);
  }

  action(name, about, run, kind = "") {
    const button = element("button", { type: "button", class: kind || null, onclick: () => act(button, async () => { await run(); this.again(); }) }, name);
    const made = { button, about: element("span", {}, about), dt: element("dt", {}, button), dd: element("dd", {}) };
    made.dd.append(made.about);
    this.actions.append(made.dt, made.dd);
    return made;
  }

  async job_(what) {
    await post(`/api/jobs/${this.job.id}/${what}`, what === "stop" ? { seen: this.job.state } : {});
    announce({ save: "a checkpoint is saved after this step", stop: "the run saves and ends", kill: "the run is ended", remove: "removed" }[what]);
  }

  async resume() {
    const typed = Number(this.steps.value), changes = typed && typed !== this.run.max_steps ? { "train.max_steps": typed } : {};
    await post("/api/train/resume", { folder: this.folder, changes });
    announce("the run continues; it is in the queue");
  }

  async decode() {
    await post("/api/train/decode", { folder: this.folder });
    announce("the images are decoded; it is in the queue");
  }

  update({ run, job, decoding, waiting, isAlone, state }) {
    Object.assign(this, { run, job });
    const can = job?.can ?? [], progress = job?.state === "running" || job?.state === "stopping" ? job.progress : null;
    say(this.title, `${isAlone ? "" : `${this.folder}: `}${state}${run?.running && !can.includes("stop") ? "; stop it where it was started" : ""}`);
    this.bar.hidden = !progress?.total;
    if (progress?.total) { this.bar.max = progress.total; this.bar.value = progress.done; }
    say(this.text, progress ? [progress.what && `${progress.what}: ${progress.text}`, progress.left !== null && progress.left !== undefined
      ? `about ${time(progress.left)} left` : "", run?.checkpoint ? `newest checkpoint: step ${run.checkpoint.toLocaleString("en")}` : ""].filter(Boolean).join("\n") : this.facts());
    const error = job?.state === "failed" || job?.state === "lost" ? job.error || "the run has ended without a message" : "";
    this.error.hidden = !error || !isAlone;
    say(this.error.firstChild, error);
    if (isAlone && job && this.shownLine !== job.line) { this.shownLine = job.line; this.line.replaceChildren(commandLine(job.line, `command line of ${this.folder}`)); }
    this.line.hidden = !isAlone || !job;
    this.showActions(can, decoding, waiting);
    const link = this.report.querySelector("a");
    this.report.hidden = !run?.report;
    if (run?.report) signed(run.report).then((address) => { if (link.getAttribute("href") !== address) link.setAttribute("href", address); });
  }

  facts() {
    const { run } = this;
    if (!run) return "";
    return [run.model && `model ${run.model}`, run.seconds && `trained for ${time(run.seconds)}`,
      run.checkpoint ? `newest checkpoint: step ${run.checkpoint.toLocaleString("en")}` : "no checkpoint"].filter(Boolean).join(", ");
  }

  showActions(can, decoding, waiting) {
    const { run, job } = this, isActive = job && ["queued", "running", "stopping"].includes(job.state);
    this.show("save", can.includes("save"));
    this.show("stop", can.includes("stop"), job?.state === "stopping" ? ["Stop without saving", "Ends without the checkpoint of the last steps."]
      : ["Stop", "Finishes the step, saves a checkpoint and ends. The run can be resumed."]);
    this.show("kill", can.includes("kill") && job.state === "stopping");
    this.show("remove", job?.state === "queued" && can.includes("remove"));
    const isResumable = Boolean(run?.checkpoint) && !isActive && !run.running, isFinished = isResumable && run.step >= run.max_steps;
    this.show("resume", isResumable, ["Resume", isResumable ? `Continues after step ${run.checkpoint.toLocaleString("en")}, on the same devices and with the run's own settings,` : ""]);
    if (isResumable && document.activeElement !== this.steps && this.wasFor !== `${run.checkpoint} ${run.max_steps}`) {
      this.wasFor = `${run.checkpoint} ${run.max_steps}`;
      this.steps.value = isFinished ? run.max_steps * 2 : run.max_steps;
    }
    this.show("decode", waiting > 0 && !decoding, ["Decode images", `${waiting} ${waiting === 1 ? "image is" : "images are"} stored as latents; the VAE makes PNGs of them.`]);
  }

  show(name, isShown, [title, about] = []) {
    const { button, dt, dd, about: place } = this.buttons[name];
    dt.hidden = dd.hidden = !isShown;
    if (title) { say(button, title); say(place, about); }
  }
}
