// One run: its state and progress, and what can be done with it, with what each button does in words.

import { announce, commandLine, element, post, setText, time } from "./api.js";
import { ACTIONS, Actions, Progress } from "./job_card.js";
import { isEnded } from "./jobs.js";
import { linkTo } from "./project.js";
import { signed } from "./token.js";
import { Loras } from "./train_loras.js";
import { Note } from "./train_note.js";

export class RunPanel {
  // `onclone` is called for a new run with the settings of this one, `onnote(text)` when its note is saved.
  constructor(folder, { onclone, onnote }) {
    this.folder = folder;
    this.note = new Note(folder, { onsave: onnote });
    this.loras = new Loras(folder);
    this.title = element("p", { class: "job-title" });
    this.progress = new Progress(folder);
    this.facts = element("p", { class: "muted" });
    this.error = element("div", { class: "error", hidden: true }, element("p"));
    this.line = element("div");
    this.steps = element("input", { type: "number", min: "1", step: "1", class: "small", "aria-label": "Up to step" });
    this.until = element("label", { class: "row" }, "up to step ", this.steps);
    this.actions = new Actions(folder, {
      table: {
        ...ACTIONS,
        resume: { label: () => "Resume", run: () => this.resume() },
        decode: { label: () => "Decode images", run: () => this.decode() },
        try: { label: () => "Try this LoRA", run: () => location.assign(linkTo("generate", { run: this.folder, lora: this.run.lora.path })) },
        clone: { label: () => "New run with these settings", run: onclone },
      },
      about: (name) => this.about(name),
    });
    this.actions.row("resume").said.after(this.until);
    this.report = element("a", { target: "_blank", rel: "noreferrer" }, "Report of this run");
    this.reportPart = element("p", { hidden: true }, this.report,
      " (one page with curves, settings and images, written at each checkpoint)");
    this.node = element("section", { class: "job", "aria-label": `Run ${folder}` }, this.title, ...this.progress.nodes,
      this.facts, this.note.node, this.error, this.line, this.actions.place, this.loras.node, this.reportPart);
  }

  about(name) {
    const { run, job, waiting } = this;
    return {
      save: "Saves a checkpoint after the current step, which Generate then offers; training continues. It counts among those that are kept (train.checkpoints_total_limit).",
      sample: job?.can.includes("sample") ? "Generates the images after the current step; training continues." : NO_IMAGES,
      stop: job?.state === "stopping" ? "Ends without the checkpoint of the last steps."
        : "Finishes the step, saves a checkpoint and ends. The run can be resumed.",
      kill: "Ends at once. Steps since the newest checkpoint are lost.",
      remove: "The run does not start.",
      resume: this.isFinished
        ? `The run has reached ${step(run.max_steps)}, its last one. Trains on, to twice as many unless you change it:`
        : `Continues after ${step(run?.checkpoint)}, on the same devices and with the run's own settings,`,
      clone: "Fills the form above with this run's settings, and a new output folder.",
      try: `Opens Generate with the LoRA ${run?.lora?.step ? `of ${step(run.lora.step)}` : "of its end"}, and the model of this run.`,
      decode: `${waiting} ${waiting === 1 ? "image is" : "images are"} stored as latents; the VAE makes PNGs of them` +
        `${run?.running ? ", on the CPU while the run trains" : ""}.`,
    }[name];
  }

  async resume() {
    const typed = Number(this.steps.value), isOther = typed && typed !== this.run.max_steps;
    await post("/api/train/resume", { folder: this.folder, changes: isOther ? { "train.max_steps": typed } : {} });
  }

  async decode() {
    const { about } = await post("/api/train/decode", { folder: this.folder });
    announce(about.device === "cpu" ? "the images are decoded on the CPU" : "the images are decoded");
  }

  update({ run, job, decoding, waiting, isAlone, state }) {
    if (this.state && this.state !== state) announce(`${this.folder}: ${state}`);
    Object.assign(this, { run, job, waiting, state });
    const can = job?.can ?? [], isElsewhere = run?.running && !can.includes("stop");
    const name = isAlone ? "" : `${this.folder}: `, remedy = isElsewhere ? "; stop it where it was started" : "";
    setText(this.title, name + state + remedy);
    this.progress.show(job);
    this.note.node.hidden = !run?.time || !isAlone;
    this.note.update(run?.note ?? "");
    this.loras.update(isAlone ? run : null);
    setText(this.facts, run ? factsOf(run) : "");
    const isBroken = ["failed", "lost"].includes(job?.state);
    this.error.hidden = !isBroken || !isAlone;
    setText(this.error.firstChild, isBroken ? job.error || "the run has ended without a message" : "");
    if (job && this.shownLine !== job.line) {
      this.shownLine = job.line;
      this.line.replaceChildren(commandLine(job.line, `command line of ${this.folder}`));
    }
    this.line.hidden = !isAlone || !job;
    this.offer(can, decoding);
    this.reportPart.hidden = !run?.report;
    if (run?.report) signed(run.report).then((address) => {
      if (this.report.getAttribute("href") !== address) this.report.setAttribute("href", address);
    });
  }

  offer(can, decoding) {
    const { run, job, waiting } = this, isWaiting = job && !isEnded(job);
    const isResumable = run?.checkpoint && !isWaiting && !run.running;
    this.isFinished = Boolean(run?.max_steps) && run.step >= run.max_steps;
    const was = isResumable && `${run.checkpoint} ${run.max_steps}`;
    if (isResumable && document.activeElement !== this.steps && this.wasFor !== was) {
      this.wasFor = was;
      this.steps.value = this.isFinished ? run.max_steps * 2 : run.max_steps;
    }
    const offered = can.includes("save") ? [...can, "sample"] : can; // a run without images says why it has none
    const names = isWaiting ? ["save", "sample", "stop", "kill", "remove"].filter((name) => offered.includes(name)) : [];
    const waits = waiting > 0 && !decoding;
    const more = [isResumable && "resume", run?.lora && "try", run?.time && "clone", waits && "decode"].filter(Boolean);
    this.actions.offer([...names, ...more], job, can.includes("sample") ? [] : ["sample"]);
  }
}

const NO_IMAGES = "This run has no images to generate: neither prompts nor samples to show. Choose some for the next run.";

const step = (number) => `step ${(number ?? 0).toLocaleString("en")}`;

const factsOf = ({ model, seconds, checkpoint }) => [
  model && `model ${model}`, seconds && `trained for ${time(seconds)}`,
  checkpoint ? `newest checkpoint: ${step(checkpoint)}` : "no checkpoint",
].filter(Boolean).join(", ");
