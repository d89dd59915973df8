// The form of a new run: its own fields, the settings of qwen.yaml, prompts, the memory bar, and the command line.

import { act, announce, answered, at, element, get, offer, plural, post, showError } from "./api.js";
import { CommandForm } from "./command_form.js";
import { deviceSelect, onDevices } from "./devices.js";
import { chosen, kept } from "./project.js";
import { SettingsForm } from "./settings_form.js";
import { MemoryBar } from "./train_memory.js";
import { Presets } from "./train_presets.js";
import { Prompts } from "./train_prompts.js";
import { ASKED, FIELDS, SHOWN, ShowImages } from "./train_show.js";

const PLACES = ["cache.path", "model.path", "train.output_dir"];
const PROMPTS = "validation.prompts";
const OWN = [...PLACES, PROMPTS, ...SHOWN];
const SECTIONS = ["train", "optimizer", "lr_scheduler", "validation", "logging", "model"];
const COMMON = [
  "train.max_steps", "optimizer.learning_rate", "train.lora.rank", "train.lora.lora_alpha", "train.batch_size",
  "train.max_tokens", "optimizer.name", "lr_scheduler.name", "lr_scheduler.warmup_steps",
  "train.memory", "train.gradient_checkpointing", "train.offload_blocks", "model.quantization", "train.mixed_precision",
  "train.checkpointing_steps", "train.caption_dropout", "train.validation_split", "validation.validation_steps",
  "validation.num_inference_steps",
];
const SHARED = { cache: "cache.path", model: "model.path" };
const EXAMPLE = { devices: "", planAlways: true, gpuMemory: "", prompts: [], show: {} };
const PLAN_PAUSE = 1500; // ms after a change until the memory is predicted, which takes seconds of the processor

export class TrainForm {
  constructor({ onstart }) {
    this.settings = new SettingsForm(at("settings"), {
      sections: SECTIONS, common: COMMON, without: OWN, onchange: () => this.changed(),
    });
    this.form = new CommandForm({
      name: "train", path: "/api/train/command", body: () => this.body, choices: () => this.choices,
      values: () => this.values,
      settings: this.settings, fields: { ...Object.fromEntries(PLACES.map((key) => [key, `own-${key}`])), ...FIELDS },
      place: at("line"), label: "command line of the new run", buttons: ["start"],
      onanswer: (problems) => {
        if (problems.some(({ key }) => key.startsWith(PROMPTS))) at("prompts-part").open = true;
      },
    });
    this.kept = kept("train", EXAMPLE);
    this.fills = 0;
    this.chosenDevices = this.kept.devices; // by the user
    this.presets = new Presets(at("presets"), { settings: this.settings, apply: (changes) => this.apply(changes) });
    this.memory = new MemoryBar(at("memory"), { apply: (changes) => this.apply(changes) });
    this.devices = deviceSelect("Devices", {
      allowAuto: false, several: true, value: this.chosenDevices ?? "",
      onchange: (value) => { this.chosenDevices = value; this.changed(); },
      about: "On several GPUs one process trains on each, and they share the gradients; batch sizes are per GPU.",
    });
    at("devices").append(this.devices.node);
    at("plan-always").checked = Boolean(this.kept.planAlways);
    at("gpu-memory").value = this.kept.gpuMemory ?? "";
    for (const id of ["plan-always", "gpu-memory"]) at(id).addEventListener("change", () => this.changed());
    at("plan").addEventListener("click", () => act(at("plan"), () => this.plan()));
    at("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.form.act("start", () => this.start(onstart));
    });
    at("new-run").addEventListener("toggle", () => { if (at("new-run").open) this.refresh(); });
    onDevices((found) => this.found(found));
  }

  async load() {
    const paths = [`/api/settings?sections=${[...new Set([...OWN, ...ASKED])].join(",")}`, "/api/train/places"];
    const [own, places] = await Promise.all(paths.map((path) => answered(() => get(path))));
    this.base = Object.fromEntries(own.map((each) => [each.key, each.value]));
    const about = Object.fromEntries(own.map((each) => [each.key, each.description]));
    const make = (key, title, value, offered) => field(key, title, about[key], value || (this.base[key] ?? ""), offered);
    this.fields = {
      "cache.path": make("cache.path", "Cache", chosen("cache") || usual(own, places.caches), places.caches),
      "model.path": make("model.path", "Model", chosen("model"), places.models),
      "train.output_dir": make("train.output_dir", "Output folder", places.out, []),
    };
    this.proposed = places.out;
    at("own").replaceChildren(...Object.values(this.fields).map((each) => each.node));
    for (const { input } of Object.values(this.fields)) input.addEventListener("input", () => this.changed());
    const isPrompt = (each) => typeof each?.prompt === "string" && Array.isArray(each.control);
    this.showPrompts(this.kept.prompts?.filter(isPrompt) ?? this.base[PROMPTS]);
    await this.settings.load();
    const model = this.fields["model.path"].input;
    model.addEventListener("change", () => this.presets.load(model.value.trim()));
    this.presets.load(model.value.trim());
    this.show = new ShowImages(at("show"), {
      base: Object.fromEntries(own.map((each) => [each.key, each])), value: this.kept.show,
      about: () => ({
        steps: this.settings.value("train.max_steps"), split: this.settings.value("train.validation_split"),
        prompts: this.prompts.value.length, devices: this.chosen,
      }),
      onchange: () => this.form.changed(),
    });
    this.changed();
  }

  showPrompts(value) {
    this.prompts = new Prompts(at("prompts"), {
      value, count: at("prompts-count"), onchange: () => this.changed(),
      encode: (button) => act(button, () => this.encode()),
    });
  }

  // A new run with the settings of another one: what is left out, or has no field here, is said.
  async fillFrom(folder) {
    const number = (this.fills += 1);
    const { changes, devices, left_out: leftOut } = await get(`/api/train/settings?${new URLSearchParams({ folder })}`);
    if (number !== this.fills) return; // another run was chosen
    for (const key of PLACES) this.fields[key].input.value = changes[key] ?? this.base[key] ?? "";
    this.isNamed = true; // the output folder
    this.showPrompts(changes[PROMPTS] ?? this.base[PROMPTS]);
    if (devices.length) {
      this.chosenDevices = devices.join(",");
      this.devices.set(this.chosenDevices);
    }
    const others = this.settings.replace(changes).filter((key) => !OWN.includes(key));
    this.show.fill(changes);
    this.presets.forget();
    this.presets.load(this.fields["model.path"].input.value.trim());
    const value = (each) => typeof each === "string" ? each : JSON.stringify(each);
    at("filled").replaceChildren(...[
      `This form has the settings of ${folder}, where they differ from qwen.yaml, and a new output folder.`,
      leftOut.length && "Left out, since they import code, fetch files or send data; set them yourself if you want them: "
        + `${leftOut.map((each) => `${each.key} = ${value(each.value)}`).join("; ")}.`,
      others.length && "Without a field here; set them in qwen.yaml: "
        + `${others.map((key) => `${key} = ${value(changes[key])}`).join("; ")}.`,
    ].filter(Boolean).map((text) => element("p", {}, text)));
    at("filled").hidden = false;
    at("new-run").open = true;
    this.changed();
    this.fields["train.output_dir"].input.focus();
  }

  // Look again for caches, and for a free name of the output folder while nobody has typed one.
  async refresh() {
    if (!this.fields) return;
    const places = await get("/api/train/places").catch(() => null);
    if (!places) return;
    offer(this.fields["cache.path"].list, places.caches);
    offer(this.fields["model.path"].list, places.models);
    const out = this.fields["train.output_dir"].input;
    if (!this.isNamed && out.value === this.proposed) { out.value = places.out; this.changed(); }
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

  // What is as in qwen.yaml may change there, and is not kept.
  get choices() {
    const value = (key) => this.fields[key].input.value.trim();
    const given = Object.entries(SHARED).map(([name, key]) => [name, value(key) === this.base[key] ? "" : value(key)]);
    return Object.fromEntries(given);
  }

  get values() {
    return {
      devices: this.chosenDevices, planAlways: at("plan-always").checked, gpuMemory: at("gpu-memory").value,
      prompts: this.isOwnPrompts() ? this.prompts.value : undefined, show: this.show.value,
    };
  }

  // The smallest memory of the chosen GPUs, in bytes; undefined if it is not known.
  get smallest() {
    const sizes = this.chosen.map((name) => name !== "cpu" && this.machine?.find((each) => each.name === name)?.memory);
    return sizes.filter(Boolean).sort((a, b) => a - b)[0];
  }

  get body() {
    const changes = { ...this.settings.values, ...this.show.changes }, { smallest } = this;
    for (const [key, { input }] of Object.entries(this.fields)) {
      const value = input.value.trim();
      if (value && (value !== this.base[key] || key === "train.output_dir")) changes[key] = value;
    }
    if (changes["train.caches"]?.length) delete changes["cache.path"];
    if (this.isOwnPrompts()) changes[PROMPTS] = this.prompts.value;
    at("gpu-memory").placeholder = smallest ? (smallest / 1e9).toFixed(1) : "such as 24";
    const typed = Number(at("gpu-memory").value) * 1e9, memory = typed > 0 ? typed : smallest;
    return {
      changes, devices: this.chosen, has_gpus: Boolean(this.hasGpus), gpu_memory: memory ? Math.floor(memory) : null,
    };
  }

  changed() {
    if (!this.show) return;
    this.presets.show();
    this.show.tell();
    this.form.changed();
    clearTimeout(this.planTimer);
    this.memory.outdated();
    if (!at("new-run").open) return;
    this.planTimer = setTimeout(() => { if (at("plan-always").checked || this.isPlanNeeded()) this.plan(); }, PLAN_PAUSE);
  }

  // True once for each cache, model and device, if the memory decides where images are decoded.
  isPlanNeeded() {
    const { body } = this, of = ["cache.path", "model.path"].map((key) => body.changes[key]);
    const decides = JSON.stringify([...of, body.devices, body.gpu_memory]);
    if (!this.form.line || !body.gpu_memory || !this.show.isDecidedByMemory || decides === this.plannedFor) return false;
    this.plannedFor = decides;
    return true;
  }

  async plan() {
    this.planned?.abort();
    const asked = this.planned = new AbortController();
    this.memory.waiting();
    const { body } = this;
    try {
      const answer = await post("/api/train/plan", body, { signal: asked.signal });
      this.memory.show(answer);
      if (JSON.stringify(body) !== JSON.stringify(this.body)) this.memory.outdated();
      this.show.planned(answer.plan);
    } catch (error) {
      if (asked.signal.aborted) return; // a newer one was asked for
      if (error.status === 409) { this.memory.interrupted(); return; }
      this.memory.failed(error);
      this.show.planned(null);
    }
  }

  apply(changes) {
    for (const [key, value] of Object.entries(changes)) this.settings.set(key, value);
    this.settings.draw();
    this.changed();
    this.plan().catch(showError);
    announce("the settings are applied");
  }

  async encode() {
    const job = await post("/api/train/encode", this.body);
    announce(`${job.title}: in the queue`);
    at("prompts-count").textContent = `${plural(this.prompts.value.length, "prompt")}; encoding is in the queue`;
  }

  async start(onstart) {
    const named = this.fields["train.output_dir"].input.value, job = await this.form.send("/api/train/start");
    if (!job) return;
    at("new-run").open = false;
    Object.assign(this, { proposed: named, isNamed: false }); // until the next look
    at("filled").hidden = true;
    this.presets.forget();
    onstart(job);
  }
}

// The cache to begin with: that of qwen.yaml, or if it names none, the default one if it is there, else one that is.
function usual(settings, caches) {
  const { value, default: named } = settings.find((each) => each.key === "cache.path");
  return value === named && !caches.includes(value) ? caches[0] : value;
}

// A field with suggestions, and a place for what is wrong with it.
function field(key, title, about, value, offered) {
  const id = `own-${key}`, list = element("datalist", { id: `${id}-list` });
  const input = element("input", {
    id, type: "text", value, list: list.id, autocomplete: "off", spellcheck: "false",
    "aria-describedby": `${id}-about ${id}-problem`,
  });
  const found = offered.length ? ` Found here: ${offered.join(", ")}.` : "";
  offer(list, offered);
  const node = element("div", { class: "setting" }, element("label", { for: id }, title), input, list,
    element("p", { id: `${id}-problem`, class: "problem", hidden: true }),
    element("p", { id: `${id}-about`, class: "about" }, about + found));
  return { input, list, node };
}
