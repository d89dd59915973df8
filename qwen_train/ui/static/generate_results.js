// What the Generate page has made: a card for each of its jobs, with the images that it has written so far.

import { at, element, get, showImage } from "./api.js";
import { JobCards, offered } from "./job_card.js";
import { isActive, newestFirst, onJobs } from "./jobs.js";

// What a grid can vary, in words.
export const AXES = {
  lora_weight: "strength of the LoRA", checkpoint: "training step", num_inference_steps: "inference steps",
  true_cfg_scale: "guidance", seed: "seed",
};

let images = new Map(), known = ""; // by id of the job; the jobs and states for which they were asked

const cards = new JobCards({
  kind: "result",
  title: (job) => job.about.prompt,
  offers: (job) => offered(job).filter((name) => name !== "again"), // which would write the same images
  extra: showResult,
});

function describe({ about }) {
  const isVaried = about.grid.some((axis) => axis.name === "lora_weight");
  const lora = about.lora ? about.lora + (isVaried ? "" : ` at ${about.strength}`) : "without a LoRA";
  return [lora, about.images.join(", ")].filter(Boolean).join(" · ");
}

const caption = (values) => Object.entries(values).map(([name, value]) => `${AXES[name] ?? name} ${value}`).join(", ");

function view(image, prompt) {
  at("viewer-title").textContent = caption(image.values) || prompt;
  at("viewed").replaceChildren(showImage(element("img", { alt: `${prompt} ${caption(image.values)}` }), image.url));
  at("viewer").showModal();
}

// The images of a strength each, as one image with a slider.
function flip(job, made) {
  const image = element("img", { alt: job.about.prompt }), label = element("output"), last = made.length - 1;
  const slider = element("input", {
    type: "range", min: 0, max: last, step: 1, value: last, "aria-label": "Strength of the LoRA",
    oninput: () => choose(Number(slider.value)),
  });
  function choose(i) {
    showImage(image, made[i].url);
    label.textContent = `strength ${made[i].values.lora_weight}`;
    slider.setAttribute("aria-valuetext", label.textContent);
  }
  choose(last);
  return element("div", { class: "flip" }, image, slider, label);
}

function strip(job, made) {
  const { prompt, grid } = job.about, columns = grid.length === 2 ? grid[0].values.split(",").length : 0;
  const figure = (image) => {
    const small = showImage(element("img", { alt: caption(image.values) || prompt, loading: "lazy" }), image.url);
    return element("figure", {},
      element("button", { type: "button", onclick: () => view(image, prompt) }, small),
      element("figcaption", {}, caption(image.values)));
  };
  const node = element("div", { class: columns ? "strip two" : "strip" }, ...made.map(figure));
  if (columns) node.style.gridTemplateColumns = `repeat(${columns}, minmax(7rem, 1fr))`;
  return node;
}

function showResult(job, card) {
  const made = images.get(job.id) ?? [], version = made.map(({ url }) => url).join() + isActive(job);
  if (version === card.version) return;
  card.version = version;
  const { grid } = job.about, isVaried = grid.length === 1 && grid[0].name === "lora_weight";
  const parts = isVaried && made.length > 1 && !isActive(job) ? [flip(job, made)] : [];
  card.extra.replaceChildren(element("p", { class: "muted" }, describe(job)), ...parts, strip(job, made));
}

// Images are asked for while a job runs, and when one has come or ended.
onJobs(async (answer) => {
  const jobs = newestFirst(answer.jobs.filter((job) => job.kind === "generate"));
  const states = jobs.map(({ id, state }) => `${id} ${state}`).join();
  if (states !== known || jobs.some(isActive)) {
    images = new Map((await get("/api/generate/results")).map((result) => [result.id, result.images]));
    known = states;
  }
  at("nothing").hidden = jobs.length > 0;
  await cards.show([[at("results"), jobs]], answer);
});
