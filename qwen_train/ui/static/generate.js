// The Generate page: the wish of the user as a command.

import { act, ask, at, clearError, element, get, offer, showError, showImage, upload } from "./api.js";
import { CommandForm } from "./command_form.js";
import { deviceSelect } from "./devices.js";
import { AXES } from "./generate_results.js";
import { look } from "./jobs.js";
import { SettingsForm } from "./settings_form.js";

const form = at("wish"), prompt = at("prompt"), model = at("model"), lora = at("lora"), strength = at("strength");
const EXAMPLES = {
  lora_weight: "0,0.5,1,1.5", num_inference_steps: "10,20,40", true_cfg_scale: "1,2,4", seed: "0,1,2,3",
};
const DEVICES = {
  device: "Device", vae_device: "Another one for the VAE", text_device: "Another one for the text encoder",
  transformer_device: "Another one for the transformer",
};
let images = [], choices = { loras: [], images: [] };

// ---- the wish -------------------------------------------------------------------------------------------------------

const settings = new SettingsForm(at("settings"), {
  sections: ["predict"],
  common: ["predict.num_inference_steps", "predict.seed", "predict.negative_prompt", "predict.true_cfg_scale"],
  onchange: changed,
});
const devices = Object.fromEntries(Object.entries(DEVICES).map(([name, title]) =>
  [name, deviceSelect(title, { onchange: changed })]));
const axes = [axisControl("Columns", "choose one"), axisControl("Rows", "no second axis")];
const command = new CommandForm({
  name: "wish", path: "/api/generate/command", body: () => (prompt.value.trim() ? wish() : null), values: kept,
  settings, place: at("command"), buttons: ["start"],
});

function axisControl(title, none) {
  const select = element("select", { "aria-label": `${title}: what varies` },
    ...Object.entries({ "": none, ...AXES }).map(([value, label]) => element("option", { value }, label)));
  const values = element("input", {
    "aria-label": `${title}: its values, separated by commas`, placeholder: "values, separated by commas",
  });
  select.addEventListener("change", () => {
    const steps = choices.loras.find((each) => each.path === lora.value)?.checkpoints ?? [];
    values.value = select.value === "checkpoint" ? steps.join(",") : EXAMPLES[select.value] ?? "";
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
  const chosen = axes.filter(({ select }) => select.value);
  return chosen.map(({ select, values }) => ({ name: select.value, values: values.value }));
}

const wish = () => ({
  model: model.value.trim(), images, prompt: prompt.value, lora: lora.value, strength: Number(strength.value),
  devices: Object.fromEntries(Object.keys(DEVICES).map((name) => [name, devices[name].value])),
  grid: grid(), changes: settings.values,
});

function kept() {
  return { ...wish(), several: several(), axes: axes.map(({ select, values }) => [select.value, values.value]) };
}

function changed() {
  const isVaried = several() === "grid" && grid().some((axis) => axis.name === "lora_weight");
  at("strength-value").textContent = Number(strength.value);
  at("strength-setting").hidden = !lora.value || isVaried;
  at("axes").hidden = several() !== "grid";
  form.elements.several.value = !lora.value && several() === "without" ? "" : several();
  form.querySelector("[value=without]").disabled = !lora.value;
  if (settings.settings) command.changed();
}

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
  images.push(path);
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
  at("from-folder").value = "";
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
for (const control of [lora, ...form.elements.several]) control.addEventListener("change", changed);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  command.act("start", async () => { if (await command.send("/api/generate/start")) await look(); });
});

async function open() {
  choices = await get("/api/generate/choices");
  offer(at("images"), choices.images);
  lora.append(...choices.loras.map(({ path }) => element("option", { value: path }, path)));
  model.placeholder = choices.model;
  const [main, ...others] = Object.values(devices).map(({ node }) => node);
  at("devices").append(main, element("details", {}, element("summary", {}, "Other devices for some parts"), ...others));
  restore(command.kept);
  await settings.load();
  changed();
}

function restore(was) {
  const asked = new URLSearchParams(location.search).get("lora");
  const last = choices.loras.some((each) => each.path === was.lora) ? was.lora : choices.loras[0]?.path ?? "";
  images = (was.images ?? []).filter((path) => typeof path === "string");
  prompt.value = was.prompt ?? "";
  model.value = was.model ?? "";
  lora.value = asked ?? last;
  strength.value = was.strength ?? 1;
  form.elements.several.value = was.several ?? "";
  (was.axes ?? []).forEach(([name, values], i) => { axes[i].select.value = name; axes[i].values.value = values; });
  for (const name of Object.keys(DEVICES)) if (was.devices?.[name]) devices[name].set(was.devices[name]);
  showImages();
}

clearError();
open().catch(showError);
