// The prompts of images that are generated during training: text, control images in their order, and a seed.

import { announce, element, get, plural } from "./api.js";

export class Prompts {
  // `value`: validation.prompts as qwen.yaml has it. `encode(button)` encodes them into the validation cache.
  constructor(place, { value, count, onchange, encode }) {
    Object.assign(this, { place, count, onchange });
    this.images = element("datalist", { id: "prompt-images" });
    this.list = element("div", {});
    this.add = element("button", { type: "button", onclick: () => { this.append({ prompt: "" }).querySelector("textarea").focus(); this.changed(); } }, "Add a prompt");
    this.encode = element("button", { type: "button", onclick: (event) => encode(event.target) }, "Encode these prompts now");
    this.place.replaceChildren(this.images, this.list, element("div", { class: "row" }, this.add, this.encode));
    for (const each of value ?? []) this.append(typeof each === "string" ? { prompt: each } : each);
    this.tell();
    get("/api/train/controls").then(({ images }) => this.images.replaceChildren(...images.map((name) => element("option", { value: name })))).catch(() => {});
  }

  // As qwen.yaml has them: without what is not given.
  get value() { return [...this.list.children].map((row) => row.read()); }

  tell() {
    this.count.textContent = plural(this.list.children.length, "prompt");
    this.encode.hidden = !this.list.children.length;
  }

  changed() { this.tell(); this.onchange(); }

  append({ prompt, control = [], seed = null, width = null, height = null }) {
    const controls = element("ul", { class: "controls" }), number = this.list.children.length + 1;
    const text = element("textarea", { rows: "2", oninput: () => this.changed() });
    text.value = prompt;
    const seedInput = element("input", { class: "small", type: "number", min: "0", step: "1", value: seed, oninput: () => this.changed() });
    const image = element("input", { type: "text", list: "prompt-images", placeholder: "path of an image", "aria-label": `Control image to add to prompt ${number}` });
    const addImage = () => {
      if (!image.value.trim()) { image.focus(); return; }
      controls.append(this.control(image.value.trim()));
      image.value = "";
      image.focus();
      this.changed();
    };
    image.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); addImage(); } });
    for (const name of typeof control === "string" ? [control] : control) controls.append(this.control(name));
    const row = element("fieldset", { class: "prompt" }, element("legend", {}, `Prompt ${number}`),
      element("label", {}, "Prompt", text), element("div", {}, element("strong", {}, "Control images"), controls),
      element("div", { class: "row" }, image, element("button", { type: "button", onclick: addImage }, "Add this image")),
      element("div", { class: "row" }, element("label", {}, "Seed", seedInput),
        element("button", { type: "button", class: "quiet", onclick: () => { row.remove(); this.add.focus(); announce("prompt removed"); this.renumber(); this.changed(); } }, "Remove this prompt")));
    row.read = () => ({
      prompt: text.value, control: [...controls.children].map((each) => each.dataset.name), seed: seedInput.value === "" ? null : Number(seedInput.value), width, height,
    });
    this.list.append(row);
    return row;
  }

  renumber() {
    [...this.list.children].forEach((row, i) => { row.querySelector("legend").textContent = `Prompt ${i + 1}`; });
  }

  control(name) {
    const item = element("li", { "data-name": name }, name, element("button", {
      type: "button", class: "quiet", "aria-label": `Remove control image ${name}`,
      onclick: () => { const next = item.closest("fieldset").querySelector("input[list]"); item.remove(); next.focus(); this.changed(); },
    }, "Remove"));
    return item;
  }
}
