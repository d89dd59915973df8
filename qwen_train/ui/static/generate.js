// The Generate page: the wish of the user as a command, and the images that it has written.

import { act, announce, ask, clearError, commandLine, element, get, keptAs, poll, post, showError, showImage, upload } from "./api.js";
import { deviceSelect } from "./devices.js";
import { keepAt, keptAt } from "./kept.js";
import { SettingsForm } from "./settings_form.js";

const at = (id) => document.getElementById(id);
const form = at("wish"), prompt = at("prompt"), model = at("model"), lora = at("lora"), strength = at("strength");
const WISH = keptAs("wish");
const AXES = {
  "": "no second axis", lora_weight: "strength of the LoRA", checkpoint: "training step", num_inference_steps: "inference steps",
  true_cfg_scale: "guidance", seed: "seed",
};
const EXAMPLES = { lora_weight: "0,0.5,1,1.5", num_inference_steps: "10,20,40", true_cfg_scale: "1,2,4", seed: "0,1,2,3" };
const SHARED = ["device", "vae_device", "text_device", "transformer_device"];
let images = [], choices = { loras: [], images: [] };

// ---- the wish ----------------------------------------------------------------------------------------------------

const settings = new SettingsForm(at("settings"), {
  sections: ["predict"],
  common: ["predict.num_inference_steps", "predict.seed", "predict.negative_prompt", "predict.true_cfg_scale"],
  onchange: changed,
});
const titles = ["Device", "Another one for the VAE", "Another one for the text encoder", "Another one for the transformer"];
const devices = Object.fromEntries(SHARED.map((name, i) =>
  [name, deviceSelect(titles[i], { onchange: changed })]));
const axes = [axisControl("Columns"), axisControl("Rows")];

function axisControl(title) {
  const select = element("select", { "aria-label": `${title}: what varies` },
    ...Object.entries(AXES).map(([value, label]) => element("option", { value }, value ? label : title === "Rows" ? label : "choose one")));
  const values = element("input", { "aria-label": `${title}: its values, separated by commas`, placeholder: "values, separated by commas" });
  select.addEventListener("change", () => {
    values.value = select.value === "checkpoint" ? (ofLora()?.checkpoints ?? []).join(",") : EXAMPLES[select.value] ?? "";
    changed();
  });
  values.addEventListener("input", changed);
  at("axes").append(element("div", { class: "axis" }, select, values));
  return { select, values };
}

const ofLora = () => choices.loras.find((each) => each.path === lora.value);
const several = () => form.elements.several.value;

function grid() {
  if (several() === "without") return [{ name: "lora_weight", values: `0,${Number(strength.value)}` }];
  if (several() === "") return [];
  return axes.filter(({ select }) => select.value).map(({ select, values }) => ({ name: select.value, values: values.value }));
}

const wish = () => ({
  model: model.value.trim(), images, prompt: prompt.value, lora: lora.value, strength: Number(strength.value), grid: grid(),
  devices: Object.fromEntries(SHARED.map((name) => [name, devices[name].value])), changes: settings.values,
});

function show() {
  at("strength-value").textContent = Number(strength.value);
  at("strength-setting").hidden = !lora.value || grid().some((axis) => axis.name === "lora_weight" && several() === "grid");
  at("axes").hidden = several() !== "grid";
  form.elements.several.value = !lora.value && several() === "without" ? "" : several();
  form.querySelector("[value=without]").disabled = !lora.value;
}

let waiting, asked = 0;

function changed() {
  show();
  keepAt(WISH, { ...wish(), several: several(), axes: axes.map(({ select, values }) => [select.value, values.value]) });
  clearTimeout(waiting);
  waiting = setTimeout(showCommand, 250);
}

async function showCommand() {
  const question = (asked += 1);
  at("start").disabled = !prompt.value.trim();
  if (at("start").disabled) { at("command").replaceChildren(); return; }
  try {
    const { line } = await post("/api/generate/command", wish());
    if (question === asked) { at("command").replaceChildren(commandLine(line)); at("start").disabled = false; }
  } catch (error) {
    if (question !== asked) return;
    at("command").replaceChildren(element("p", { class: "problem" }, [...(error.lines ?? [error.message]), error.do && `→ ${error.do}`].filter(Boolean).join("\n")));
    at("start").disabled = true;
  }
}

const preview = (path) => `/api/generate/preview?path=${encodeURIComponent(path)}`;

function showImages() {
  at("chosen").replaceChildren(...images.map((path, i) => element("li", {},
    showImage(element("img", { alt: `control ${i + 1}` }), preview(path)), path,
    element("button", { type: "button", class: "quiet", "aria-label": `Remove ${path}`, onclick: () => { images.splice(i, 1); showImages(); changed(); at("from-folder").focus(); } }, "Remove"))));
}

function addImage(path) {
  images.push(path);
  showImages();
  changed();
}

at("add").addEventListener("click", () => act(at("add"), async () => {
  const path = at("from-folder").value.trim();
  if (!path) return;
  await ask(preview(path)).catch((error) => { throw Object.assign(error, { do: "name an image of the folder, or upload one" }); });
  addImage(path);
  at("from-folder").value = "";
}));
at("from-folder").addEventListener("keydown", (event) => {
  if (event.key === "Enter") { event.preventDefault(); at("add").click(); }
});
at("upload").addEventListener("change", () => act(at("upload"), async () => {
  for (const file of at("upload").files) addImage((await upload("/api/generate/upload", file)).path);
  at("upload").value = "";
}));
form.addEventListener("dragover", (event) => event.preventDefault());
form.addEventListener("drop", (event) => {
  event.preventDefault();
  act(null, async () => {
    for (const file of event.dataTransfer.files) addImage((await upload("/api/generate/upload", file)).path);
  });
});
for (const control of [prompt, model, strength]) control.addEventListener("input", changed);
lora.addEventListener("change", changed);
for (const radio of form.elements.several) radio.addEventListener("change", changed);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  act(at("start"), async () => {
    await post("/api/generate/start", wish());
    announce("in the queue");
    look();
  });
});

async function open() {
  choices = await get("/api/generate/choices");
  at("images").replaceChildren(...choices.images.map((path) => element("option", { value: path })));
  lora.append(...choices.loras.map(({ path }) => element("option", { value: path }, path)));
  model.placeholder = choices.model;
  await settings.load();
  at("devices").append(devices.device.node, element("details", {}, element("summary", {}, "Other devices for some parts"),
    ...SHARED.slice(1).map((name) => devices[name].node)));
  restore(keptAt(WISH));
  const from = new URLSearchParams(location.search);
  if (from.has("lora")) lora.value = from.get("lora");
  changed();
}

function restore(kept) {
  images = (kept.images ?? []).filter((path) => typeof path === "string");
  prompt.value = kept.prompt ?? "";
  model.value = kept.model ?? "";
  lora.value = choices.loras.some((each) => each.path === kept.lora) ? kept.lora : choices.loras[0]?.path ?? "";
  strength.value = kept.strength ?? 1;
  form.elements.several.value = kept.several ?? "";
  (kept.axes ?? []).forEach(([name, values], i) => { axes[i].select.value = name; axes[i].values.value = values; });
  for (const name of SHARED) if (kept.devices?.[name]) devices[name].set(kept.devices[name]);
  showImages();
}

// ---- the results -------------------------------------------------------------------------------------------------

const shown = new Map();

function describe(job) {
  const about = job.about, parts = [];
  if (about.lora) parts.push(about.grid.some((axis) => axis.name === "lora_weight") ? about.lora : `${about.lora} at ${about.strength}`);
  else parts.push("without a LoRA");
  if (about.images.length) parts.push(about.images.join(", "));
  return parts.join(" · ");
}

const caption = (values) => Object.entries(values).map(([name, value]) => `${AXES[name] ?? name} ${value}`).join(", ");

function view(image, prompt) {
  at("viewer-title").textContent = caption(image.values) || prompt;
  at("viewed").replaceChildren(showImage(element("img", { alt: `${prompt} ${caption(image.values)}` }), image.url));
  at("viewer").showModal();
}

// The images of a strength each, as one image with a slider.
function flip(job) {
  const image = element("img", { alt: job.about.prompt });
  const label = element("output", {});
  const slider = element("input", {
    type: "range", min: 0, max: job.images.length - 1, step: 1, value: job.images.length - 1, "aria-label": "Strength of the LoRA",
    oninput: () => { choose(Number(slider.value)); },
  });
  function choose(i) {
    showImage(image, job.images[i].url);
    label.textContent = `strength ${job.images[i].values.lora_weight}`;
    slider.setAttribute("aria-valuetext", label.textContent);
  }
  choose(job.images.length - 1);
  return element("div", { class: "flip" }, image, slider, label);
}

function strip(job) {
  const columns = job.about.grid.length === 2 ? job.about.grid[0].values.split(",").length : 0;
  const made = element("div", { class: columns ? "strip two" : "strip" }, ...job.images.map((image) => element("figure", {},
    element("button", { type: "button", onclick: () => view(image, job.about.prompt) },
      showImage(element("img", { alt: caption(image.values) || job.about.prompt, loading: "lazy" }), image.url)),
    element("figcaption", {}, caption(image.values)))));
  if (columns) made.style.gridTemplateColumns = `repeat(${columns}, minmax(7rem, 1fr))`;
  return made;
}

class Result {
  constructor(job) {
    this.images = element("div", {});
    this.state = element("p", { class: "muted" });
    this.bar = element("progress", { hidden: true, "aria-label": "progress" });
    this.problem = element("p", { class: "problem", hidden: true });
    this.stop = element("button", { type: "button", onclick: () => act(this.stop, () => this.end(job.id).then(look)) }, "Stop");
    this.node = element("article", { class: "panel result", "data-state": "" },
      element("h3", {}, job.about.prompt), element("p", { class: "muted" }, describe(job)), this.state, this.bar, this.problem, this.images,
      element("div", { class: "row" }, this.stop), element("details", {}, element("summary", {}, "Command"), commandLine(job.line)));
  }

  async end(id) {
    const { state } = this.node.dataset;
    if (state !== "queued") return post(`/api/jobs/${id}/stop`, { seen: state });
    await post(`/api/jobs/${id}/remove`);
    this.node.remove();
    shown.delete(id);
  }

  update(job) {
    const progress = job.progress;
    this.node.dataset.state = job.state;
    this.state.textContent = job.state + (progress && job.state === "running" ? `, ${progress.what} ${progress.text}` : "");
    this.bar.hidden = job.state !== "running";
    if (progress?.total) { this.bar.max = progress.total; this.bar.value = progress.done; } else this.bar.removeAttribute("value");
    this.problem.textContent = job.problem;
    this.problem.hidden = !job.problem;
    this.stop.hidden = !job.can.includes("stop") && job.state !== "queued";
    this.stop.textContent = job.state === "queued" ? "Remove from the queue" : "Stop";
    const urls = job.images.map((image) => image.url).join() + job.state;
    if (urls === this.urls) return;
    this.urls = urls;
    const varies = job.about.grid.length === 1 && job.about.grid[0].name === "lora_weight";
    this.images.replaceChildren(...(varies && job.images.length > 1 && job.state !== "running" ? [flip(job)] : []), strip(job));
    if (job.state === "done") announce(`done: ${job.about.prompt}`);
  }
}

const look = poll(async () => {
  const jobs = await get("/api/generate/results");
  at("nothing").hidden = jobs.length > 0;
  for (const job of jobs.toReversed()) {
    if (!shown.has(job.id)) {
      shown.set(job.id, new Result(job));
      at("results").prepend(shown.get(job.id).node);
    }
    shown.get(job.id).update(job);
  }
  for (const [id, result] of shown) {
    if (!jobs.some((job) => job.id === id)) { result.node.remove(); shown.delete(id); }
  }
}, 1000);

clearError();
open().catch(showError);
