// Images while a run trains, asked for in plain words: how often, of which samples, and where they are decoded. Without a
// choice of the user's: four times in a short run, two of the samples, or the prompts of qwen.yaml if there are any,
// decoded on the device that trains where its memory is enough, and on the CPU elsewhere. What qwen.yaml says stays.

import { bytes, element, plural, setText } from "./api.js";
import { onDevices } from "./devices.js";

const EVERY = "validation.images_every_steps", OWN = "validation.num_images", DECODER = "validation.vae_device";
const CACHE = "validation.cache", SOURCE = "validation.source", NO_CACHE = "none";
export const SHOWN = [EVERY, OWN, DECODER]; // what this part asks for
export const ASKED = [...SHOWN, CACHE, SOURCE]; // what it knows of qwen.yaml
export const FIELDS = { [EVERY]: "show-every", [OWN]: "show-own", [DECODER]: "show-decoder" };
const TIMES = 4; // that images are made in a short run
const COUNT = 2; // samples
const LATER = "later", CPU = "cpu", AUTO = "auto"; // the last one until the devices are known

export class ShowImages {
  // `base`: settings by their keys, with value and default. `value`: what the user chose before. `about()`: what else
  // the form has, {steps, split, prompts, devices}.
  constructor(place, { base, value, about, onchange }) {
    Object.assign(this, { base, about, onchange, plan: null });
    const { every, own, count, prompts, decoder } = value ?? {};
    this.chosen = {
      every: Number.isInteger(every) ? every : null, own: typeof own === "boolean" ? own : null,
      count: Number.isInteger(count) && count > 0 ? count : null,
      prompts: prompts !== false, decoder: typeof decoder === "string" ? decoder : "",
    };
    this.every = this.control("input", EVERY, { type: "number", min: "1", step: "1", class: "small", inputmode: "numeric" },
      () => { this.chosen.every = Number(this.every.value) || null; });
    this.own = this.control("input", OWN, { type: "checkbox" }, () => { this.chosen.own = this.own.checked; });
    this.prompts = element("input", { id: "show-prompts", type: "checkbox" });
    this.prompts.addEventListener("change", () => { this.chosen.prompts = this.prompts.checked; this.changed(); });
    this.promptsText = element("span");
    this.decoder = this.control("select", DECODER, { "aria-describedby": "show-why show-decoder-problem" },
      () => { this.chosen.decoder = this.decoder.value; });
    this.why = element("p", { id: "show-why", class: "about", role: "status" });
    const problem = (id) => element("p", { id: `${id}-problem`, class: "problem", hidden: true });
    place.replaceChildren(
      element("div", { class: "row" }, element("label", {}, "Show images every ", this.every, " steps of"),
        element("label", {}, this.own, this.ownText = element("span")),
        element("label", {}, this.prompts, this.promptsText)),
      element("div", { class: "row" }, element("label", {}, "Decode them ", this.decoder)),
      ...Object.values(FIELDS).map(problem), this.why);
    onDevices((found) => { this.machine = found.devices; this.tell(); });
    this.tell();
  }

  control(tag, key, properties, read) {
    const made = element(tag, { id: FIELDS[key], "aria-describedby": `${FIELDS[key]}-problem`, ...properties });
    made.addEventListener("change", () => { read(); this.changed(); });
    return made;
  }

  get value() { return this.chosen; }

  of(key) { return this.base[key].value; }

  get count() { return this.chosen.count ?? (this.of(OWN) || COUNT); }

  // True if qwen.yaml or the form names images to generate from prompts.
  get hasPrompts() {
    const { prompts } = this.about(), cache = this.of(CACHE);
    return cache !== NO_CACHE && Boolean(prompts || this.of(SOURCE) || cache);
  }

  get wantsPrompts() { return this.hasPrompts && this.chosen.prompts; }

  get wantsOwn() { return this.chosen.own ?? (this.of(OWN) > 0 || !this.hasPrompts); }

  get wantsAny() { return this.wantsOwn || this.wantsPrompts; }

  get steps() {
    if (this.chosen.every) return this.chosen.every;
    const { value, default: usual } = this.base[EVERY];
    return value === usual ? Math.min(usual, Math.max(1, Math.round((Number(this.about().steps) || usual) / TIMES))) : value;
  }

  get training() { return this.about().devices[0] ?? AUTO; }

  // True if images do not fit beside the run on the device that trains; null if that is not known.
  get isTooMuch() { return this.plan?.decode && "fits" in this.plan.decode ? !this.plan.decode.fits : null; }

  // The device that decodes; null: none, while the run trains.
  get device() {
    const { decoder } = this.chosen;
    if (!this.wantsAny || decoder === LATER) return null;
    if (decoder) return decoder;
    return this.of(DECODER) ?? (this.isTooMuch ? CPU : this.training);
  }

  get isDecidedByMemory() { return this.training !== CPU && this.device !== null && !this.chosen.decoder && !this.of(DECODER); }

  // What differs from qwen.yaml.
  get changes() {
    const wanted = { [OWN]: this.wantsOwn ? this.count : 0, [DECODER]: this.device };
    if (this.wantsAny) wanted[EVERY] = this.steps;
    if (this.hasPrompts && !this.wantsPrompts) wanted[CACHE] = NO_CACHE;
    return Object.fromEntries(Object.entries(wanted).filter(([key, value]) => value !== this.of(key)));
  }

  // Choose what a run had, whose settings differ from qwen.yaml in these changes. What this part would choose by itself
  // stays its own choice, which follows the other settings.
  fill(changes) {
    const value = (key) => (key in changes ? changes[key] : this.of(key)), count = value(OWN);
    this.chosen = { every: null, own: count > 0, count: count || null, prompts: value(CACHE) !== NO_CACHE, decoder: "" };
    if (value(EVERY) !== this.steps) this.chosen.every = value(EVERY);
    if (![CPU, this.training].includes(value(DECODER))) this.chosen.decoder = value(DECODER) ?? LATER;
    this.decoder.dataset.shown = "";
    this.tell();
  }

  // Take what `qwen-train plan` answered, or null while that is not known; the command line may change with it.
  planned(plan) {
    const before = this.device;
    this.plan = plan;
    this.tell();
    if (this.device !== before) this.onchange();
  }

  changed() {
    this.tell();
    this.onchange();
  }

  tell() {
    if (document.activeElement !== this.every) this.every.value = this.steps;
    this.own.checked = this.wantsOwn;
    setText(this.ownText, `${this.count} of my samples, beside their targets`);
    this.prompts.checked = this.wantsPrompts;
    this.prompts.disabled = !this.hasPrompts;
    const { prompts } = this.about();
    const given = prompts ? `${plural(prompts, "prompt")}, below` : "the prompts of qwen.yaml";
    setText(this.promptsText, this.hasPrompts ? given : "prompts: add some below");
    this.every.disabled = this.decoder.disabled = !this.wantsAny;
    this.offer();
    const areTrained = this.wantsOwn && !Number(this.about().split);
    setText(this.why, this.reason + (areTrained ? " The samples are also trained; train.validation_split holds some out." : ""));
  }

  offer() {
    const here = (this.machine ?? []).map(({ name }) => name), { decoder } = this.chosen;
    const names = [...new Set([...here, CPU, decoder, this.of(DECODER)])].filter((name) => name && name !== LATER);
    const each = names.map((name) => [name, `on ${name}, in the run`]);
    const choices = [["", "where there is room"], ...each, [LATER, "later: keep latents"]];
    if (this.decoder.dataset.shown === JSON.stringify(choices)) return;
    this.decoder.dataset.shown = JSON.stringify(choices);
    this.decoder.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
    this.decoder.value = this.chosen.decoder;
  }

  // In a sentence where the images are decoded, why there, and what else there is to do.
  get reason() {
    const { device, training, isTooMuch } = this, decode = this.plan?.decode, capacity = this.plan?.gpu_memory;
    if (!this.wantsAny) return "The run makes no images: only its curves show what it learns.";
    if (device === null) {
      return "The images are kept as latents: Decode images, at the run, shows them at any time, also while it trains.";
    }
    const waits = "training waits for each image. To lose no time, keep latents and decode them later.";
    const room = decode && capacity && `${bytes(decode.total)} of ${bytes(capacity)}`;
    if (training === CPU && device === CPU) return `The run trains on the CPU, so it decodes there: ${waits}`;
    if (device === CPU && isTooMuch && !this.chosen.decoder) {
      return `${training} has no room to decode beside the run (${room}), so the run decodes on the CPU: ${waits}`;
    }
    if (device === CPU) return `The run decodes on the CPU: ${waits}`;
    if (device !== training) return `The run decodes on ${device}, and training waits for each image.`;
    if (isTooMuch === false) return `The run decodes on ${training}: there is room for that (with the VAE ${room}).`;
    const otherwise = "where its memory is not enough, the run decodes on the CPU from then on.";
    if (training === AUTO) return `The run decodes on the device that trains; ${otherwise}`;
    if (isTooMuch) return `${training} has no room to decode beside the run (${room}): ${otherwise}`;
    return `The run decodes on ${training}. Predict the memory says whether there is room; ${otherwise}`;
  }
}
