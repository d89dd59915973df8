// The curves of the chosen runs: of one its raw and smoothed loss and its noise levels, of several one curve each. All
// charts show the same range of steps; of a part of a run, the program is asked for its points.

import { announce, arrange, at, element, get, plural } from "./api.js";
import { keep, kept } from "./project.js";
import { Chart } from "./train_chart.js";

const EXAMPLE = { smoothing: 0, raw: true, log: {} };
const LEVELS = ["0–25 % noise", "25–50 % noise", "50–75 % noise", "75–100 % noise"];
const TITLES = {
  loss: "Loss", validation_loss: "Validation loss", learning_rate: "Learning rate", grad_norm: "Gradient norm, before clipping", tokens_per_second: "Tokens per second",
  samples_per_second: "Samples per second", data_wait: "Waiting for data, % of the time", cache_samples: "Samples in the cache", skipped_batches: "Skipped batches",
  preference_accuracy: "Held-out pairs whose target is preferred, share", preference_margin: "Margin of preference, squared error",
};
const ORDER = ["loss", "validation_loss", "preference_accuracy", "preference_margin", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "data_wait"];
// The weight of the exponential moving average, as in TensorBoard: it averages over about 1 / (1 - weight) logged steps.
const WEIGHTS = [0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.997, 0.998, 0.999, 0.9995, 0.9998, 0.9999];
const REST = 9; // times as long as an answer took: a long run is asked for less often

export class Curves {
  constructor() {
    this.kept = { ...EXAMPLE, smoothing: null, ...kept("curves", EXAMPLE) };
    this.charts = new Map();
    this.answers = new Map();
    this.rests = new Map();
    this.wanted = [];
    this.asked = 0;
    this.range = null; // of all steps: first and last
    this.view = null; // the part that is shown, or all
    this.slider = element("input", { type: "range", min: "0", max: String(WEIGHTS.length - 1), step: "1", "aria-label": "Smoothing", oninput: () =>
      this.smooth(WEIGHTS[this.slider.value]) });
    this.said = element("output", { class: "smoothing" });
    const auto = element("button", { type: "button", onclick: () => this.smooth(null) }, "Automatic");
    const raw = element("input", { type: "checkbox", onchange: () => { this.keep({ raw: raw.checked }); this.render(); } });
    raw.checked = this.kept.raw;
    at("curve-tools").append(element("span", {}, "Smoothing"), this.slider, this.said, auto, element("label", {}, raw, "Loss as logged"),
      element("span", { class: "muted" }, "Point at a chart, or use its arrow keys, for the values at a step."));
    this.makeRange();
  }

  // ---- the range of steps ------------------------------------------------------------------------------------------

  makeRange() {
    const input = (label) => element("input", {
      type: "number", class: "small", min: "0", step: "1", "aria-label": label,
      onchange: () => this.typed(),
    });
    const button = (text, onclick, repeats) => element("button", { type: "button", "data-repeats": repeats, onclick }, text);
    this.from = input("First step of the charts");
    this.to = input("Last step of the charts");
    this.whole = button("Whole run", () => this.show(null, null));
    this.shortest = button("Shortest run", () => this.show(...this.shortestRange));
    const zoom = (factor) => () => {
      if (!this.range) return;
      const [first, last] = this.shown, by = (last - first) * (factor - 1) / 2;
      this.show(first - by, last + by);
    };
    at("range-tools").append(element("span", {}, "Steps"), this.from, element("span", {}, "to"), this.to,
      button("Zoom in", zoom(1 / 2), "in"), button("Zoom out", zoom(2), "out"), this.whole, this.shortest,
      element("span", { class: "muted" }, "Drag across a chart, or press + and − in it; Shift with an arrow moves on, 0 shows all."));
  }

  get shown() { return this.view ?? this.range; }

  typed() {
    const [first, last] = [this.from, this.to].map((each, i) => each.value === "" ? this.range[i] : Number(each.value));
    this.show(Math.min(first, last), Math.max(first, last));
  }

  // Show the steps from `first` to `last` in all charts, as far as there are such; all of them for nulls.
  show(first, last) {
    if (!this.range) return;
    const [low, high] = this.range;
    let view = null;
    if (first !== null) {
      const width = Math.min(high - low, Math.max(1, Math.round(last - first)));
      const begin = Math.round(Math.min(Math.max(low, first), high - width));
      if (width < high - low) view = [begin, begin + width];
    }
    if (String(view) === String(this.view)) return this.tellRange();
    this.view = view;
    this.render();
    announce(view ? `steps ${view.map((each) => each.toLocaleString("en")).join(" to ")}` : "all steps");
    clearTimeout(this.zoomTimer);
    this.zoomTimer = setTimeout(() => this.again(), 120);
  }

  tellRange() {
    const [first, last] = this.shown ?? [];
    for (const [input, value] of [[this.from, first], [this.to, last]]) {
      if (document.activeElement !== input || this.view) input.value = value ?? "";
      [input.min, input.max] = this.range ?? [0, 0];
    }
    this.whole.disabled = !this.view;
    this.shortest.hidden = !this.shortestRange;
  }

  smooth(weight) {
    this.keep({ smoothing: weight });
    this.tellSmoothing();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.again(), 60);
  }

  // Ask at once, for other points than those that are asked for now.
  again() {
    this.asked += 1;
    this.rests.clear();
    this.look(this.wanted).catch(() => {}); // the next look tries again, and says what is wrong
  }

  // The weight of the average: the chosen one, or that of the longest of the runs, so that they can be compared.
  weight() {
    if (this.kept.smoothing !== null) return this.kept.smoothing;
    const lines = Math.max(0, ...[...this.answers.values()].map((each) => each.series.loss?.count ?? 0));
    return lines ? 1 - 1 / Math.max(20, 0.05 * lines) : null;
  }

  tellSmoothing() {
    const weight = this.weight() ?? 0.95, i = WEIGHTS.findIndex((each) => each >= weight);
    this.slider.value = i < 0 ? WEIGHTS.length - 1 : i;
    const about = weight === 0 ? "none" : `${Number(weight.toFixed(4))}, about ${plural(Math.round(1 / (1 - weight)), "step")}`;
    this.said.textContent = about + (this.kept.smoothing === null ? " (automatic)" : "");
    this.slider.setAttribute("aria-valuetext", about);
  }

  keep(values) {
    Object.assign(this.kept, values);
    keep("curves", this.kept);
  }

  // `runs`: [{folder, style}]. Asks for what has changed, and draws it.
  async look(runs) {
    this.wanted = runs;
    const folders = runs.map(({ folder }) => folder);
    for (const folder of [...this.answers.keys()]) if (!folders.includes(folder)) this.answers.delete(folder);
    if (folders.join("\n") !== this.folders) {
      this.folders = folders.join("\n");
      this.view = null;
    }
    const changed = await Promise.all(runs.map(({ folder }) => this.ask(folder)));
    const layout = runs.map(({ folder, style }) => `${folder} ${style}`).join("\n");
    if (changed.some(Boolean) || layout !== this.layout) { this.layout = layout; this.render(); this.tellSmoothing(); }
  }

  async ask(folder) {
    const began = performance.now(), weight = this.weight(), number = this.asked, asked = { folder, version: this.answers.get(folder)?.version ?? "" };
    if (began < (this.rests.get(folder) ?? 0)) return false;
    if (weight !== null) asked.smoothing = weight;
    if (this.view) [asked.first, asked.last] = this.view;
    const answer = await get(`/api/train/curves?${new URLSearchParams(asked)}`);
    const took = performance.now() - began;
    if (!answer.series || number !== this.asked) return false;
    if (this.answers.has(folder)) this.rests.set(folder, began + took * (1 + REST));
    this.answers.set(folder, answer);
    return true;
  }

  render() {
    const runs = this.wanted.filter(({ folder }) => this.answers.has(folder)).map((each) => ({ ...each, ...this.answers.get(each.folder) }));
    const names = [...new Set(runs.flatMap(({ series }) => Object.keys(series)))].filter((name) => name !== "loss_smoothed");
    const place = (name) => { const i = ORDER.indexOf(name.replace(/_q\d$/, "")); return i < 0 ? ORDER.length : i; };
    names.sort((a, b) => place(a) - place(b));
    const ranges = runs.filter(({ lines }) => lines).map(({ first, last }) => [first, last]);
    this.range = ranges.length ? [Math.min(...ranges.map(([first]) => first)), Math.max(...ranges.map(([, last]) => last))] : null;
    const shortest = ranges.toSorted((a, b) => a[1] - a[0] - (b[1] - b[0]))[0];
    this.shortestRange = shortest && 2 * (shortest[1] - shortest[0]) < this.range[1] - this.range[0] ? shortest : null;
    const range = this.shown;
    const shown = new Set();
    for (const name of names) {
      if (runs.length === 1 && /^validation_loss_q\d$/.test(name) && names.includes("validation_loss")) continue;
      shown.add(name);
      this.chart(name).set(runs.length === 1 ? this.ofOne(name, runs[0]) : this.ofSeveral(name, runs), range);
    }
    for (const name of this.charts.keys()) if (!shown.has(name)) this.charts.delete(name);
    this.tellRange();
    arrange(at("charts"), [...shown].map((name) => this.chart(name).node));
    this.tellUnread(runs);
  }

  tellUnread(runs) {
    const parts = runs.filter(({ damaged, run }) => damaged || (run.incomplete && !run.running)).map(({ folder, damaged, run }) =>
      `${folder}: ${plural(damaged + (run.incomplete && !run.running ? 1 : 0), "line")} of metrics.jsonl cannot be read and ${damaged === 1 ? "is" : "are"} left out`);
    at("unread").textContent = parts.join("; ");
    at("unread").hidden = !parts.length;
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const level = /^validation_loss_q(\d)$/.exec(name);
      const title = TITLES[name] ?? (level ? `Validation loss, ${LEVELS[level[1] - 1] ?? name}` : name.replaceAll("_", " "));
      const about = name === "validation_loss" ? "Of held-out samples, by the share of noise in them: 0 % is clean, 100 % pure noise." : "";
      this.charts.set(name, new Chart({
        id: name, title, about, large: name === "loss", log: Boolean(this.kept.log[name]), onlog: (id, log) => this.keep({ log: { ...this.kept.log, [id]: log } }),
        onrange: (first, last) => this.show(first, last),
        onstep: (step) => { for (const chart of this.charts.values()) chart.showStep(step); },
      }));
    }
    return this.charts.get(name);
  }

  ofOne(name, { series }) {
    if (name === "loss") return [
      ...(this.kept.raw || !series.loss_smoothed ? [{ key: "raw", label: "as logged", style: 0, faint: series.loss.steps.length > 1, ...points(series.loss) }] : []),
      ...(series.loss_smoothed && series.loss.steps.length > 1 ? [{ key: "smoothed", label: "smoothed", style: 0, isSmooth: true, ...points(series.loss_smoothed) }] : []),
    ];
    if (name === "validation_loss") return [
      ...LEVELS.map((label, i) => ({ label, style: i + 1, key: `${name}_q${i + 1}` })).filter(({ key }) => series[key])
        .map((each) => ({ ...each, ...points(series[each.key]) })),
      { key: name, label: "all levels", style: 0, ...points(series[name]) },
    ];
    return [{ key: name, label: TITLES[name] ?? name.replaceAll("_", " "), style: 0, ...points(series[name], name) }];
  }

  ofSeveral(name, runs) {
    const labels = short(runs.map(({ folder }) => folder));
    return runs.flatMap(({ folder, style, series }, i) => {
      if (!series[name]) return [];
      const curve = { key: folder, label: labels[i], style };
      if (name !== "loss" || !series.loss_smoothed) return [{ ...curve, ...points(series[name], name) }];
      const smoothed = { ...curve, isSmooth: true, ...points(series.loss_smoothed) };
      return this.kept.raw ? [{ ...curve, key: `${folder} raw`, label: `${labels[i]}, as logged`, faint: true, ...points(series.loss) }, smoothed] : [smoothed];
    });
  }
}

const points = ({ steps, values, not_finite: notFinite }, name = "") =>
  ({ steps, values: name === "data_wait" ? values.map((each) => each === null ? null : 100 * each) : values, notFinite });

// The last parts of the paths, if they differ.
function short(folders) {
  const last = folders.map((folder) => folder.split("/").at(-1));
  return new Set(last).size === last.length ? last : folders;
}
