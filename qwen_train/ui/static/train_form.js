// The form of a new run: its own fields, the settings of qwen.yaml, prompts, the memory bar, and the command line.

import { act, announce, commandLine, element, get, keptAs, plural, post } from "./api.js";
import { deviceSelect, onDevices } from "./devices.js";
import { keepAt, keptAt } from "./kept.js";
import { SettingsForm } from "./settings_form.js";
import { MemoryBar } from "./train_memory.js";
import { Prompts } from "./train_prompts.js";

const KEEP = keptAs("train");
const OWN = ["cache.path", "model.path", "train.output_dir"];
const PROMPTS = "validation.prompts";
const SECTIONS = ["train", "optimizer", "lr_scheduler", "validation", "logging", "model"];
const COMMON = [
  "train.max_steps", "optimizer.learning_rate", "train.lora.rank", "train.lora.lora_alpha", "train.batch_size", "train.max_tokens",
  "optimizer.name", "lr_scheduler.name", "lr_scheduler.warmup_steps", "train.gradient_checkpointing", "train.offload_blocks", "model.quantization",
  "train.mixed_precision", "train.checkpointing_steps", "train.caption_dropout", "train.validation_split", "validation.validation_steps",
  "validation.num_images", "validation.images_every_steps", "validation.num_inference_steps", "validation.vae_device",
];
const PAUSE = 350; // ms after a change until the command line is asked for
const PLAN_PAUSE = 1500; // a plan takes seconds of the processor

const at = (id) => document.getElementById(id);

export class TrainForm {
  constructor({ onstart }) {
    this.onstart = onstart;
    this.kept = keptAt(KEEP);
    this.settings = new SettingsForm(at("settings"), {
      sections: SECTIONS, common: COMMON, without: [...OWN, PROMPTS], onchange: () => this.changed(),
    });
    this.memory = new MemoryBar(at("memory"), { apply: (changes) => this.apply(changes) });
    this.devices = deviceSelect("Devices", {
      allowAuto: false, several: true, value: this.kept.devices ?? "", onchange: (value) => { this.keep({ devices: value }); this.changed(); },
      about: "On several GPUs one process trains on each, and they share the gradients; batch sizes are per GPU.",
    });
    at("devices").append(this.devices.node);
    at("plan-always").checked = Boolean(this.kept.planAlways);
    at("plan-always").addEventListener("change", () => { this.keep({ planAlways: at("plan-always").checked }); this.changed(); });
    at("gpu-memory").value = this.kept.gpuMemory ?? "";
    at("gpu-memory").addEventListener("change", () => { this.keep({ gpuMemory: at("gpu-memory").value }); this.changed(); });
    at("plan").addEventListener("click", () => act(at("plan"), () => this.plan()));
    at("form").addEventListener("submit", (event) => { event.preventDefault(); this.start(); });
    at("new-run").addEventListener("toggle", () => { if (at("new-run").open) this.refresh(); });
    onDevices((found) => this.found(found));
  }

  keep(values) {
    Object.assign(this.kept, values);
    keepAt(KEEP, this.kept);
  }

  openUnless(isActive) {
    if (!this.wasOpened) at("new-run").open = !isActive;
    this.wasOpened = true;
  }

  async load() {
    const [own, places] = await Promise.all([get(`/api/settings?sections=${[...OWN, PROMPTS].join(",")}`), get("/api/train/places")]);
    this.base = Object.fromEntries(own.map((each) => [each.key, each.value]));
    const descriptions = Object.fromEntries(own.map((each) => [each.key, each.description]));
    this.fields = {
      "cache.path": field("cache.path", "Cache", descriptions["cache.path"], this.kept.cache ?? this.base["cache.path"], places.caches),
      "model.path": field("model.path", "Model", descriptions["model.path"], this.kept.model ?? this.base["model.path"] ?? "", places.models),
      "train.output_dir": field("train.output_dir", "Output folder", descriptions["train.output_dir"], places.out, []),
    };
    at("own").replaceChildren(...Object.values(this.fields).map((each) => each.node));
    const kept = { "cache.path": "cache", "model.path": "model" };
    for (const [key, { input }] of Object.entries(this.fields)) input.addEventListener("input", () => {
      if (kept[key]) this.keep({ [kept[key]]: input.value });
      this.changed();
    });
    this.prompts = new Prompts(at("prompts"), {
      value: this.kept.prompts ?? this.base[PROMPTS], count: at("prompts-count"),
      onchange: () => { this.keep({ prompts: this.isOwnPrompts() ? this.prompts.value : undefined }); this.changed(); },
      encode: (button) => act(button, () => this.encode()),
    });
    await this.settings.load();
    this.changed();
  }

  // Look again for caches, and for a free name of the output folder while nobody has typed one.
  async refresh() {
    if (!this.fields) return;
    const places = await get("/api/train/places").catch(() => null);
    if (!places) return;
    this.fields["cache.path"].offer(places.caches);
    this.fields["model.path"].offer(places.models);
    const out = this.fields["train.output_dir"].input;
    if (out.value === this.proposed || !this.proposed) { out.value = places.out; this.changed(); }
    this.proposed = places.out;
  }

  found({ devices }) {
    this.machine = devices;
    this.hasGpus = devices.some((each) => each.name.startsWith("cuda"));
    if (!this.devices.value) this.devices.set(devices[0].name);
    this.changed();
  }

  get chosen() { return this.devices.value.split(",").filter(Boolean); }

  isOwnPrompts() { return JSON.stringify(this.prompts.value) !== JSON.stringify(this.base[PROMPTS]); }

  get body() {
    const changes = this.settings.values, own = Object.entries(this.fields).map(([key, { input }]) => [key, input.value.trim()]);
    for (const [key, value] of own) if (value && (value !== this.base[key] || key === "train.output_dir")) changes[key] = value;
    if (changes["train.caches"]?.length) delete changes["cache.path"];
    if (this.isOwnPrompts()) changes[PROMPTS] = this.prompts.value;
    const smallest = Math.min(...this.chosen.map((name) => this.machine?.find((each) => each.name === name && name !== "cpu")?.memory ?? Infinity));
    const typed = Number(at("gpu-memory").value) * 1e9;
    const memory = typed || (Number.isFinite(smallest) ? smallest : 0);
    at("gpu-memory").placeholder = Number.isFinite(smallest) ? (smallest / 1e9).toFixed(1) : "such as 24";
    return { changes, devices: this.chosen, has_gpus: Boolean(this.hasGpus), gpu_memory: memory ? Math.floor(memory) : null };
  }

  changed() {
    if (!this.fields || !this.settings.settings) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.check(), PAUSE);
    clearTimeout(this.planTimer);
    this.memory.outdated();
    if (at("plan-always").checked && at("new-run").open) this.planTimer = setTimeout(() => this.plan().catch(() => {}), PLAN_PAUSE);
  }

  // Ask for the command line; an error is shown at its setting.
  async check() {
    this.asked?.abort();
    this.asked = new AbortController();
    try {
      const { line } = await post("/api/train/command", this.body, { signal: this.asked.signal });
      this.showProblem(null);
      at("line").replaceChildren(commandLine(line, "command line of the new run"));
    } catch (error) {
      if (error.name !== "AbortError") this.showProblem(error);
    }
  }

  showProblem(error) {
    const problems = {}, place = at("form-problem");
    if (error) {
      const found = [error.expected && `expected: ${error.expected}`, error.found && `found: ${error.found}`, error.do && `→ ${error.do}`];
      problems[error.where ?? ""] = [error.message, ...found].filter(Boolean).join("\n");
      at("line").replaceChildren();
    }
    const key = Object.keys(this.fields).find((each) => each in problems);
    for (const [name, each] of Object.entries(this.fields)) each.problem(problems[name] ?? "");
    const part = error?.where?.startsWith(`${PROMPTS}`) || error?.where === PROMPTS;
    if (part) at("prompts-part").open = true;
    const left = this.settings.showProblems(Object.fromEntries(Object.entries(problems).filter(([name]) => name !== key)));
    const text = Object.entries(left).map(([name, problem]) => [name, problem].filter(Boolean).join(": ")).join("\n");
    place.textContent = text;
    place.hidden = !text;
    at("start").disabled = Boolean(error);
  }

  async plan() {
    this.planned?.abort();
    const asked = this.planned = new AbortController();
    this.memory.waiting();
    try {
      const answer = await post("/api/train/plan", this.body, { signal: asked.signal });
      this.memory.show(answer);
    } catch (error) {
      if (asked.signal.aborted || error.status === 409) return; // a newer one was asked for
      this.memory.failed(error);
    }
  }

  apply(changes) {
    for (const [key, value] of Object.entries(changes)) this.settings.set(key, value);
    this.settings.load().then(() => { this.changed(); this.plan(); });
    announce("the settings are applied");
  }

  async encode() {
    const job = await post("/api/train/encode", this.body);
    announce(`${job.title}: in the queue`);
    at("prompts-count").textContent = `${plural(this.prompts.value.length, "prompt")}; encoding is in the queue`;
  }

  async start() {
    await act(at("start"), async () => {
      const job = await post("/api/train/start", this.body);
      announce(`${job.title}: in the queue`);
      at("new-run").open = false;
      this.proposed = null;
      this.onstart(job);
    });
  }
}

// A field with suggestions, and a place for what is wrong with it.
function field(key, title, about, value, offered) {
  const id = `own-${key}`, list = element("datalist", { id: `${id}-list` });
  const input = element("input", {
    id, type: "text", value, list: `${id}-list`, autocomplete: "off", spellcheck: "false", "aria-describedby": `${id}-about ${id}-problem`,
  });
  const problem = element("p", { id: `${id}-problem`, class: "problem", hidden: true });
  const offer = (names) => list.replaceChildren(...(names ?? []).map((name) => element("option", { value: name })));
  offer(offered);
  return {
    input, offer,
    node: element("div", { class: "setting" }, element("label", { for: id }, title), input, list, problem,
      element("p", { id: `${id}-about`, class: "about" }, about + (offered?.length ? ` Found here: ${offered.join(", ")}.` : ""))),
    problem(text) {
      problem.textContent = text;
      problem.hidden = !text;
      if (text) input.setAttribute("aria-invalid", "true"); else input.removeAttribute("aria-invalid");
    },
  };
}
