// Two images of one sample under a slider: of two steps, of two runs, or one beside the target or a control. The slider
// is moved by the pointer on the images, or by the keyboard like every slider.

import { arrange, at, element, setText, showImage } from "./api.js";
import { keep, kept } from "./project.js";

const EXAMPLE = { open: false, sample: "", left: "", right: "" };

export class Compare {
  // `address(folder, image)` is the path of an image.
  constructor({ address }) {
    Object.assign(this, { address, groups: [], chosen: { ...EXAMPLE, ...kept("compare", EXAMPLE) } });
    const choice = (name) => element("select", { onchange: (event) => this.choose({ [name]: event.target.value }) });
    [this.sample, this.leftSelect, this.rightSelect] = ["sample", "left", "right"].map(choice);
    this.sample.addEventListener("change", () => this.choose({ left: "", right: "" }));
    const swap = element("button", { type: "button", "data-repeats": "swap", onclick: () => this.swap() }, "Swap");
    this.right = element("img", { draggable: "false" });
    this.left = element("img", { draggable: "false" });
    this.edge = element("div", { class: "edge", "aria-hidden": "true" });
    this.view = element("div", {
      class: "compare-view", onpointerdown: (event) => this.grab(event),
      onpointermove: (event) => { if (event.buttons) this.follow(event); },
    }, this.right, this.left, this.edge);
    this.slider = element("input", {
      type: "range", min: "0", max: "100", step: "1", value: "50", "aria-label": "Part of the left image",
      oninput: () => this.move(),
    });
    this.captions = [element("span"), element("span")];
    this.note = element("p", { class: "about", hidden: true });
    this.figure = element("figure", { class: "compare-figure" }, this.view, this.slider,
      element("figcaption", {}, ...this.captions));
    const labelled = (text, select) => element("label", {}, text, select);
    at("compare").replaceChildren(
      element("div", { class: "row compare-choices" }, labelled("Sample ", this.sample), labelled("Left ", this.leftSelect),
        labelled("Right ", this.rightSelect), swap),
      this.figure, this.note);
    this.part = at("compare-part");
    this.part.open = this.chosen.open;
    this.part.addEventListener("toggle", () => { this.choose({ open: this.part.open }); });
  }

  // `groups`: [{name, prompt, of: [{folder, sample, beginsWithLora}]}], each of one prompt.
  show(groups) {
    this.groups = groups.map((group) => ({ ...group, images: imagesOf(group) })).filter(({ images }) => images.length > 1);
    this.part.hidden = !this.groups.length;
    this.render();
  }

  choose(values) {
    Object.assign(this.chosen, values);
    keep("compare", this.chosen);
    this.render();
  }

  swap() { this.choose({ left: this.rightSelect.value, right: this.leftSelect.value }); }

  render() {
    if (!this.groups.length) return;
    const group = this.groups.find(({ key }) => key === this.chosen.sample) ?? this.groups[0], { images } = group;
    const of = (key, other) => images.find((image) => image.key === key) ?? other;
    const [first, last] = usual(images), left = of(this.chosen.left, first), right = of(this.chosen.right, last);
    fill(this.sample, this.groups.map(({ key, prompt, name }) => [key, prompt || name]), group.key);
    for (const [select, image] of [[this.leftSelect, left], [this.rightSelect, right]]) {
      fill(select, images.map(({ key, label }) => [key, label]), image.key);
    }
    if (!this.part.open) return; // a closed part loads nothing
    for (const [img, image] of [[this.left, left], [this.right, right]]) {
      const path = this.address(image.folder, image.image);
      if (img.dataset.path !== path) showImage(img, path);
      img.alt = `${group.prompt || group.name}: ${image.label}`;
    }
    setText(this.captions[0], left.label);
    setText(this.captions[1], right.label);
    const [width, height] = right.image.size, sizes = [left, right].map(({ image }) => image.size.join(" × "));
    if (width && height) {
      this.view.style.aspectRatio = `${width} / ${height}`;
      this.figure.style.maxWidth = `calc(78vh * ${width / height})`;
    }
    setText(this.note, `The left image has ${sizes[0]} pixels, the right one ${sizes[1]}: they are shown at one size.`);
    this.note.hidden = sizes[0] === sizes[1];
    this.names = [left.label, right.label];
    this.move();
  }

  move() {
    const part = Number(this.slider.value);
    this.left.style.clipPath = `inset(0 ${100 - part}% 0 0)`;
    this.right.style.clipPath = `inset(0 0 0 ${part}%)`;
    this.edge.style.left = `${part}%`;
    this.slider.setAttribute("aria-valuetext", `${part} % ${this.names?.[0]}, ${100 - part} % ${this.names?.[1]}`);
  }

  grab(event) {
    if (event.button) return;
    this.view.setPointerCapture(event.pointerId);
    this.follow(event);
  }

  follow(event) {
    const { left, width } = this.view.getBoundingClientRect();
    this.slider.value = Math.round(100 * (event.clientX - left) / width);
    this.move();
  }
}

// The images of a sample: of each run by step, then the target and the controls of the first run that has them.
function imagesOf({ of }) {
  const several = of.length > 1, made = [];
  for (const { folder, sample, beginsWithLora } of of) for (const { step, images } of sample.steps) {
    images.forEach((image, i) => made.push({ folder, image, step, row: i, label: [
      several && folder, step ? `step ${step.toLocaleString("en")}` : `before training${beginsWithLora ? "" : ", without the LoRA"}`,
      images.length > 1 && (sample.titles[i] || `image ${i + 1}`),
    ].filter(Boolean).join(", ") }));
  }
  const given = (name) => of.find(({ sample }) => sample[name].length);
  for (const [name, text] of [["target", "target"], ["controls", "control"]]) {
    const run = given(name), images = run?.sample[name] ?? [];
    images.forEach((image, i) => made.push({
      folder: run.folder, image, label: images.length > 1 ? `${text} ${i + 1}` : text,
    }));
  }
  return made.map((each) => ({ ...each, key: `${each.folder} ${each.image.path}` }));
}

// Of one run its first and newest step; of several the same step of the first two, the newest that both have.
function usual(images) {
  const steps = images.filter(({ step, row }) => step !== undefined && row === 0);
  const folders = [...new Set(steps.map(({ folder }) => folder))];
  const [one, two] = folders.map((folder) => steps.filter((each) => each.folder === folder));
  if (two) {
    const both = two.findLast(({ step }) => one.some((each) => each.step === step));
    return both ? [one.find(({ step }) => step === both.step), both] : [one.at(-1), two.at(-1)];
  }
  if (one?.length > 1) return [one[0], one.at(-1)];
  return [one?.[0] ?? images[0], images.find((each) => each !== one?.[0]) ?? images[1]];
}

// Make these the options of a select; those that are there stay, and so does an open list.
function fill(select, options, value) {
  const old = new Map([...select.options].map((option) => [option.value, option]));
  arrange(select, options.map(([key, text]) => {
    const option = old.get(key) ?? element("option", { value: key });
    setText(option, text.length > 80 ? `${text.slice(0, 79)}…` : text);
    return option;
  }));
  select.value = value;
}
