// The images that runs have generated: of one run by sample and step, of several the same prompt by run and step.

import { at, element, get, plural, setText, showImage } from "./api.js";
import { onJobs } from "./jobs.js";
import { Compare } from "./train_compare.js";
import { trainsIn, whyNotShown } from "./train_images_why.js";

export class Images {
  constructor() {
    this.answers = new Map();
    this.nodes = new Map();
    this.said = element("span", { class: "muted" });
    this.why = element("span", { class: "muted", role: "status" });
    at("image-tools").replaceChildren(this.said, this.why);
    this.compare = new Compare({ address: (folder, image) => address(folder, image, 0) });
    onJobs((answer) => { this.jobs = answer; this.tell(); });
    const dialog = at("enlarged");
    dialog.querySelector("button").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) { event.preventDefault(); this.enlarge(this.strip, this.index + by); }
    });
  }

  // The images that wait for `qwen-train decode`, and not for the run itself.
  waiting(folder) {
    const { waiting = 0, decoder } = this.answers.get(folder) ?? {};
    return decoder && this.jobs && trainsIn(folder, this.jobs) ? 0 : waiting;
  }

  async look(folders) {
    for (const folder of [...this.answers.keys()]) if (!folders.includes(folder)) this.answers.delete(folder);
    const changed = await Promise.all(folders.map(async (folder) => {
      const answer = await get(`/api/train/images?${new URLSearchParams({ folder, version: this.answers.get(folder)?.version ?? "" })}`);
      if (answer.samples) this.answers.set(folder, answer);
      return Boolean(answer.samples);
    }));
    const layout = folders.join("\n");
    if (changed.some(Boolean) || layout !== this.layout) { this.layout = layout; this.render(folders); }
  }

  render(folders) {
    const runs = folders.filter((folder) => this.answers.has(folder)).map((folder) => ({ folder, ...this.answers.get(folder) }));
    const groups = new Map();
    for (const { folder, samples } of runs) for (const sample of samples) {
      const name = JSON.stringify([sample.name, sample.prompt]);
      groups.set(name, [...(groups.get(name) ?? []), { folder, sample }]);
    }
    const shown = [...groups].sort(([, a], [, b]) => b.length - a.length); // first those that several runs have
    this.compare.show(shown.map(([key, of]) => ({
      key, name: of[0].sample.name, prompt: of[0].sample.prompt,
      of: of.map((each) => ({ ...each, beginsWithLora: this.answers.get(each.folder).begins_with_lora })),
    })));
    const used = new Set();
    const parts = shown.map(([name, of]) => (runs.length === 1 ? this.strips(used, name, of[0]) : this.table(used, name, of)));
    for (const key of [...this.nodes.keys()]) if (!used.has(key)) this.nodes.delete(key);
    const scrolled = new Map([...at("images").querySelectorAll("[data-scroll]")].map((each) =>
      [each.dataset.scroll, each.scrollLeft + each.clientWidth < each.scrollWidth - 8 ? each.scrollLeft : null])); // null: at the end
    const focused = document.activeElement?.closest("#images") ? document.activeElement : null;
    at("images").replaceChildren(...parts);
    for (const each of at("images").querySelectorAll("[data-scroll]")) each.scrollLeft = scrolled.get(each.dataset.scroll) ?? each.scrollWidth;
    focused?.focus({ preventScroll: true });
    setText(this.said, parts.length ? `${plural(parts.length, "sample")}. Click an image to enlarge it; then ← and → show other steps.` : "");
    this.folders = folders;
    this.tell();
  }

  // Say why images of a run are not shown, as far as the jobs are known.
  tell() {
    const shown = (this.folders ?? []).filter((folder) => this.answers.has(folder));
    if (!this.jobs) return;
    const why = shown.map((folder) => [folder, whyNotShown(folder, this.answers.get(folder), this.jobs)]).filter(([, text]) => text);
    setText(this.why, why.map(([folder, text]) => shown.length > 1 ? `${folder}: ${text}` : text).join(" "));
  }

  strips(used, name, { folder, sample }) {
    const many = Math.max(1, ...sample.steps.map(({ images }) => images.length)), given = [
      ...sample.controls.map((image, i) => ({ image, caption: sample.controls.length > 1 ? `control ${i + 1}` : "control", isGiven: true })),
      ...sample.target.map((image) => ({ image, caption: "target", isGiven: true })),
    ];
    const rows = Array.from({ length: many }, (_, i) => [...(i ? [] : given), ...sample.steps.filter(({ images }) => images[i])
      .map(({ step, images }) => ({ image: images[i], caption: words(step) }))].map((each) => ({ ...each, folder, sample })));
    return element("section", { class: "sample" }, element("h4", {}, sample.prompt || sample.name), element("p", { class: "muted" }, sample.name),
      ...rows.map((row, i) => element("div", { class: "strip", "data-scroll": `${folder} ${name} ${i}` },
        ...row.map((each, j) => this.figure(used, each, row, j, sample.titles[i])))));
  }

  figure(used, { image, caption, isGiven, folder, sample }, row, j, title) {
    const guidance = !title || isGiven ? "" : `, ${title}`, key = `${folder} ${image.path} ${image.version}`;
    used.add(key);
    if (!this.nodes.has(key)) this.nodes.set(key, element("figure", { class: isGiven ? "given" : null }, this.button(folder, image, `${sample.prompt || sample.name}, ${caption}${guidance}`),
      element("figcaption", {}, caption + guidance)));
    const figure = this.nodes.get(key);
    figure.querySelector("button").onclick = () => this.enlarge(row, j);
    return figure;
  }

  button(folder, image, alt) {
    const small = showImage(element("img", { alt, width: image.size[0] || null, height: image.size[1] || null, loading: "lazy", decoding: "async" }), address(folder, image, 640));
    small.addEventListener("error", () => small.replaceWith(element("span", { class: "problem" }, `${image.path} cannot be read`)), { once: true });
    return element("button", { type: "button" }, small);
  }

  // The button of an image in a table; it opens its row at `j`.
  cell(used, row, j, scale) {
    const { folder, image, caption } = row[j], key = `${folder} ${image.path} ${image.version} cell`;
    used.add(key);
    if (!this.nodes.has(key)) this.nodes.set(key, this.button(folder, image, `${caption}${scale}`));
    const button = this.nodes.get(key);
    button.onclick = () => this.enlarge(row, j);
    return element("td", {}, button);
  }

  // Rows are runs, columns the target, if any run has it, and steps; of several guidance scales each has a row.
  table(used, name, of) {
    const steps = [...new Set(of.flatMap(({ sample }) => sample.steps.map(({ step }) => step)))].sort((a, b) => a - b), first = of[0].sample;
    const columns = [...of.some(({ sample }) => sample.target.length) ? [TARGET] : [], ...steps];
    const rows = of.flatMap(({ folder, sample }) => Array.from({ length: Math.max(1, ...sample.steps.map(({ images }) => images.length)) }, (_, i) => {
      const row = [
        ...(i ? [] : sample.target.slice(0, 1)).map((image) => ({ step: TARGET, image, caption: `${folder}, target` })),
        ...sample.steps.filter(({ images }) => images[i])
          .map(({ step, images }) => ({ step, image: images[i], caption: `${folder}, ${words(step)}` })),
      ].map((each) => ({ ...each, folder, sample }));
      const scale = sample.titles[i] ? `, ${sample.titles[i]}` : "";
      return element("tr", {}, element("th", { scope: "row" }, folder + scale), ...columns.map((column) => {
        const j = row.findIndex((each) => each.step === column);
        return j < 0 ? element("td", { class: "muted" }, "–") : this.cell(used, row, j, column === TARGET ? "" : scale);
      }));
    }));
    return element("section", { class: "sample" }, element("h4", {}, first.prompt || first.name), element("p", { class: "muted" }, first.name),
      element("div", { class: "by-step", tabindex: "0", role: "region", "aria-label": `Images of ${first.name} by run and step`, "data-scroll": name }, element("table", {},
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Run"), ...columns.map((column) => element("th", { scope: "col" }, words(column))))),
        element("tbody", {}, ...rows))));
  }

  enlarge(strip, index) {
    if (!strip?.[index]) return;
    Object.assign(this, { strip, index });
    const { image, caption, folder, sample } = strip[index], dialog = at("enlarged"), whole = dialog.querySelector("img");
    showImage(whole, address(folder, image, 0));
    whole.alt = `${sample.prompt || sample.name}, ${caption}`;
    at("enlarged-title").textContent = `${sample.prompt || sample.name}: ${caption}`;
    if (!dialog.open) dialog.showModal();
  }
}

const TARGET = "target"; // in place of a step
const words = (step) => step === TARGET ? "Target" : step ? `step ${step.toLocaleString("en")}` : "before training";

const address = (folder, { path, version }, size) => `/api/train/image?${new URLSearchParams({ folder, path, version, ...(size ? { size } : {}) })}`;
