// The Generate page: the wish of the user as a command.

import { act, ask, at, element, get, newest, offer, showError, showImage, upload } from "./api.js";
import { CommandForm } from "./command_form.js";
import { deviceSelect } from "./devices.js";
import { AXES } from "./generate_results.js";
import { isActive, look, onJobs } from "./jobs.js";
import { chosen, kept } from "./project.js";
import { SettingsForm } from "./settings_form.js";

const form = at("wish"), prompt = at("prompt"), model = at("model"), lora = at("lora"), strength = at("strength");
const typed = at("lora-path"), OTHER = "/"; // the choice of a LoRA by its path
const EXAMPLE = { images: [], prompt: "", model: "", of: "", none: true, strength: 1, several: "", axes: [], devices: {} };
const MOST_VALUES = 20; // of an axis
const EXAMPLES = {
  lora_weight: "0,0.5,1,1.5", num_inference_steps: "10,20,40", true_cfg_scale: "1,2,4", seed: "0,1,2,3",
};
const DEVICES = {
  device: "Device", vae_device: "Another one for the VAE", text_device: "Another one for the text encoder",
  transformer_device: "Another one for the transformer",
};
let images = [], found = { loras: [], images: [], models: [], model: null };
let savedBefore = null; // the runs of the last look, with their newest checkpoints

// ---- the wish -------------------------------------------------------------------------------------------------------

const settings = new SettingsForm(at("settings"), {
  sections: ["predict", "model"],
  common: ["predict.num_inference_steps", "predict.seed", "predict.negative_prompt", "predict.true_cfg_scale"],
  without: ["model.path"], onchange: changed,
});
const devices = Object.fromEntries(Object.entries(DEVICES).map(([name, title]) =>
  [name, deviceSelect(title, { onchange: changed })]));
const axes = [axisControl("columns", "Columns", "choose one"), axisControl("rows", "Rows", "no second axis")];
const command = new CommandForm({
  name: "generate", path: "/api/generate/command", body: () => (prompt.value.trim() ? wish() : null), choices,
  values: others, settings, place: at("command"), buttons: ["start"],
  fields: { prompt: "prompt", images: "from-folder", lora: "lora", "model.path": "model", grid: "columns" },
});

function axisControl(id, title, none) {
  const select = element("select", { id, "aria-label": `${title}: what varies`, "aria-describedby": `${id}-problem` },
    ...Object.entries({ "": none, ...AXES }).map(([value, label]) => element("option", { value }, label)));
  const values = element("input", {
    "aria-label": `${title}: its values, separated by commas`, placeholder: "values, separated by commas",
  });
  select.addEventListener("change", () => {
    const steps = known()?.checkpoints ?? [];
    values.value = select.value === "checkpoint" ? steps.slice(-MOST_VALUES).join(",") : EXAMPLES[select.value] ?? "";
    changed();
  });
  values.addEventListener("input", changed);
  at("axes").append(element("div", { class: "axis" }, select, values));
  return { select, values };
}

const several = () => form.elements.several.value;

function grid() {
  if (several() === "without") return [{ name: "lora_weight", values: `0,${Number(strength.value)}` }];
  if (several() === "") return [];
  const varied = axes.filter(({ select }) => select.value);
  return varied.map(({ select, values }) => ({ name: select.value, values: values.value }));
}

const wish = () => ({
  model: model.value.trim(), images, prompt: prompt.value, lora: loraPath(), strength: Number(strength.value),
  devices: Object.fromEntries(Object.keys(DEVICES).map((name) => [name, devices[name].value])),
  grid: grid(), changes: settings.values,
});

// The model is that of the run, and kept with the LoRA, or else the one that all pages have.
function choices() {
  const name = model.value.trim(), { run, model: ofRun } = known() ?? {};
  const shared = ofRun ? {} : { model: name === found.model ? "" : name };
  return { lora: loraPath(), ...(run ? { run } : {}), ...shared };
}

function others() {
  const { lora: of, grid: _, changes: __, ...rest } = wish();
  const none = lora.value === "" && found.loras.length > 0;
  return { ...rest, of, none, several: several(), axes: axes.map(({ select, values }) => [select.value, values.value]) };
}

function changed() {
  const isNone = !loraPath();
  const isVaried = several() === "grid" && grid().some((axis) => axis.name === "lora_weight");
  at("strength-value").textContent = Number(strength.value);
  at("strength-setting").hidden = isNone || isVaried;
  typed.hidden = lora.value !== OTHER;
  at("model-about").textContent = known()?.model ? `The run ${known().run} was trained on ${known().model}.` : "";
  at("axes").hidden = several() !== "grid";
  form.elements.several.value = isNone && several() === "without" ? "" : several();
  form.querySelector("[value=without]").disabled = isNone;
  if (settings.settings) command.changed();
}

// ---- the LoRA -------------------------------------------------------------------------------------------------------

const loraPath = () => (lora.value === OTHER ? typed.value.trim() : lora.value);

// What is known of the chosen LoRA.
const known = () => found.loras.find(({ path }) => path === loraPath());

const when = (step) => step === null ? "at its end" : `step ${step.toLocaleString("en")}`;
const title = ({ path, run, step }) => run ? `${run}, ${when(step)}` : path;

function showLoras() {
  const options = [["", "none"], ...found.loras.map((each) => [each.path, title(each)]), [OTHER, "another, by its path"]];
  if (lora.dataset.shown === JSON.stringify(options)) return;
  const was = lora.value;
  lora.dataset.shown = JSON.stringify(options);
  lora.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  chooseLora(was);
}

// Choose a LoRA by its path, among those that were found or by typing it.
function chooseLora(path) {
  lora.value = path;
  if (lora.value === path) return;
  lora.value = OTHER;
  typed.value = path;
}

function loraChanged() {
  model.value = known()?.model ?? chosen("model");
  changed();
}

const lookForLoras = newest(() => get("/api/generate/choices"), (answer) => {
  found = answer;
  offer(at("images"), found.images);
  offer(at("models"), found.models);
  model.placeholder = found.model ?? "a diffusers folder, or a repository on the hub";
  showLoras();
});

// ---- control images -------------------------------------------------------------------------------------------------

const preview = (path) => `/api/generate/preview?${new URLSearchParams({ path })}`;

function showImages() {
  at("chosen").replaceChildren(...images.map((path, i) => {
    const remove = () => { images.splice(i, 1); showImages(); changed(); at("from-folder").focus(); };
    return element("li", {}, showImage(element("img", { alt: `control ${i + 1}` }), preview(path)), path,
      element("button", { type: "button", class: "quiet", "aria-label": `Remove ${path}`, onclick: remove }, "Remove"));
  }));
}

function addImage(path) {
  if (!images.includes(path)) images.push(path);
  showImages();
  changed();
}

async function uploadAll(files) {
  for (const file of files) addImage((await upload("/api/generate/upload", file)).path);
}

at("add").addEventListener("click", () => act(at("add"), async () => {
  const path = at("from-folder").value.trim(), remedy = "name an image of the folder, or upload one";
  if (!path) return;
  await ask(preview(path)).catch((error) => { throw Object.assign(error, { do: remedy }); });
  addImage(path);
  if (at("from-folder").value.trim() === path) at("from-folder").value = ""; // else the user has written on
}));
at("from-folder").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); at("add").click(); }
});
at("upload").addEventListener("change", () => act(at("upload"), async () => {
  await uploadAll(at("upload").files);
  at("upload").value = "";
}));
form.addEventListener("dragover", (event) => event.preventDefault());
form.addEventListener("drop", (event) => {
  event.preventDefault();
  act(null, () => uploadAll(event.dataTransfer.files));
});

// ---- the beginning --------------------------------------------------------------------------------------------------

for (const control of [prompt, model, strength]) control.addEventListener("input", changed);
for (const control of form.elements.several) control.addEventListener("change", changed);
lora.addEventListener("change", loraChanged);
typed.addEventListener("input", loraChanged);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  command.act("start", async () => { if (await command.send("/api/generate/start")) await look(); });
});

async function open() {
  const was = kept("generate", EXAMPLE);
  restore(was); // before the answer: what is typed meanwhile stays
  await lookForLoras();
  restoreLora(was);
  const [main, ...others] = Object.values(devices).map(({ node }) => node);
  at("devices").append(main, element("details", {}, element("summary", {}, "Other devices for some parts"), ...others));
  await settings.load();
  changed();
  // Runs write new checkpoints while this page is open: each is offered as soon as a look at the jobs knows of it.
  onJobs(async ({ jobs }) => {
    if (document.hidden) return;
    const runs = jobs.filter((job) => job.kind === "train");
    const saved = runs.map((job) => `${job.id} ${job.state} ${job.checkpoint ?? ""}`).join();
    const isNew = savedBefore !== null && savedBefore !== saved;
    savedBefore = saved;
    if (isNew) lookForLoras();
  });
}

function restore(was) {
  images = (was.images ?? []).filter((path) => typeof path === "string");
  prompt.value ||= was.prompt ?? "";
  strength.value = was.strength ?? 1;
  form.elements.several.value = was.several ?? "";
  (was.axes ?? []).filter(Array.isArray).slice(0, axes.length).forEach(([name, values], i) => {
    axes[i].select.value = name;
    axes[i].values.value = values;
  });
  for (const name of Object.keys(DEVICES)) if (typeof was.devices?.[name] === "string") devices[name].set(was.devices[name]);
  showImages();
}

function restoreLora(was) {
  const last = chosen("lora"), run = chosen("run"), isThere = found.loras.some(({ path }) => path === last);
  const isRemoved = !isThere && last.startsWith(`${run}/checkpoint-`); // by its run, which keeps the newest ones
  const newest = found.loras.find((each) => each.run && each.run === run) ?? found.loras[0];
  chooseLora((!isRemoved && last) || (was.none ? "" : newest?.path ?? ""));
  const ofRun = known()?.model;
  model.value ||= ofRun ? (was.of === loraPath() && was.model) || ofRun : chosen("model");
}

open().catch(showError);
