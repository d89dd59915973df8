// What `qwen-train plan` predicts: a bar of the memory by part against the GPU's, in words too, and settings that fit.

import { announce, bytes, commandLine, element, plural } from "./api.js";

export class MemoryBar {
  constructor(place, { apply }) {
    Object.assign(this, { place, apply });
    this.state = element("p", { class: "about", role: "status" }, "Predicted from the settings and the sizes in the cache; no weights are loaded.");
    this.content = element("div", {});
    place.replaceChildren(this.state, this.content);
  }

  waiting() { this.state.textContent = "Predicting: this takes some seconds…"; }

  outdated() { if (this.content.childElementCount) this.state.textContent = "The settings have changed since this prediction."; }

  interrupted() { this.state.textContent = "Another window predicts now: predict again."; }

  failed(error) {
    this.state.textContent = "The memory cannot be predicted.";
    this.content.replaceChildren(element("div", { class: "error" }, ...(error.lines ?? [String(error.message ?? error)]).map((line) => element("p", {}, line)),
      error.do ? element("p", {}, `→ ${error.do}`) : null));
  }

  show({ plan, fitting, message, line }) {
    if (!plan) {
      this.failed({ lines: [message] });
      return;
    }
    const { total, ...parts } = plan.memory, capacity = plan.gpu_memory ?? 0, scale = Math.max(total, capacity) || 1;
    const named = Object.entries(parts).map(([name, size], i) => ({ name, size, i })).filter(({ size }) => size > 0);
    const fits = "fits" in plan ? plan.fits : null;
    const verdict = fits === null ? `${bytes(total)} in all; which GPU is not known.`
      : fits ? `Fits: ${bytes(total)} of ${bytes(capacity)}, ${bytes(capacity - total)} left.`
        : `Does not fit: ${bytes(total)}, ${bytes(total - capacity)} more than the GPU's ${bytes(capacity)}.`;
    const bar = element("div", { class: "memory-bar", "aria-hidden": "true" }, ...named.map(({ size, i }) => {
      const part = element("div", { class: `part-${i % 7}` });
      part.style.width = `${100 * size / scale}%`;
      return part;
    }));
    if (capacity) {
      const limit = element("div", { class: "limit" });
      limit.style.left = `calc(${100 * capacity / scale}% - 3px)`;
      bar.append(limit);
    }
    const batch = plan.largest_batch;
    const facts = [
      `Largest batch: ${plural(batch.samples, "sample")}, ${batch.tokens.toLocaleString("en")} tokens.`,
      plan.host_memory ? `Host memory: ${bytes(plan.host_memory)} for what is offloaded, pinned.` : "Host memory: nothing is offloaded.",
      plan.decode ? `With the VAE to decode its images beside it: ${bytes(plan.decode.total)} in all.` : "",
      plan.max_tokens ? `Largest batches that fit: train.max_tokens=${plan.max_tokens.toLocaleString("en")}.` : "",
    ].filter(Boolean);
    this.state.textContent = "";
    this.content.replaceChildren(
      element("p", { class: `verdict ${fits === false ? "problem" : fits ? "ok" : ""}` }, verdict), bar,
      element("ul", { class: "memory-parts", "aria-label": "Memory by part" }, ...named.map(({ name, size, i }) =>
        element("li", {}, element("i", { class: `part-${i % 7}` }), `${name} `, element("b", {}, bytes(size))))),
      ...facts.map((fact) => element("p", { class: "about" }, fact)),
      fits === false ? this.savings(fitting) : "", commandLine(line, "command line of the prediction"));
    announce(verdict);
  }

  savings(fitting) {
    if (!fitting.length) return element("p", { class: "problem" }, "No setting that saves memory makes it fit: choose smaller images, or another GPU.");
    return element("div", {}, element("p", {}, "It would fit with one of these:"), element("div", { class: "row" }, ...fitting.map(({ text, changes }) =>
      element("button", { type: "button", onclick: () => this.apply(changes) }, `Apply ${text}`))));
  }
}
