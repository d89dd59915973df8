// The curves of the chosen runs: of one its raw and smoothed loss and its noise levels, of several one curve each.

import { arrange, at, element, get, plural } from "./api.js";
import { keep, kept } from "./project.js";
import { Chart } from "./train_chart.js";

const EXAMPLE = { smoothing: 0, raw: true, log: {} };
const LEVELS = ["0–25 % noise", "25–50 % noise", "50–75 % noise", "75–100 % noise"];
const TITLES = {
  loss: "Loss", validation_loss: "Validation loss", learning_rate: "Learning rate", grad_norm: "Gradient norm, before clipping", tokens_per_second: "Tokens per second",
  samples_per_second: "Samples per second", data_wait: "Waiting for data, % of the time", cache_samples: "Samples in the cache", skipped_batches: "Skipped batches",
};
const ORDER = ["loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second", "data_wait"];
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
    this.slider = element("input", { type: "range", min: "0", max: String(WEIGHTS.length - 1), step: "1", "aria-label": "Smoothing", oninput: () =>
      this.smooth(WEIGHTS[this.slider.value]) });
    this.said = element("output", { class: "smoothing" });
    const auto = element("button", { type: "button", onclick: () => this.smooth(null) }, "Automatic");
    const raw = element("input", { type: "checkbox", onchange: () => { this.keep({ raw: raw.checked }); this.render(); } });
    raw.checked = this.kept.raw;
    at("curve-tools").append(element("span", {}, "Smoothing"), this.slider, this.said, auto, element("label", {}, raw, "Loss as logged"),
      element("span", { class: "muted" }, "Point at a chart, or use its arrow keys, for the values at a step."));
  }

  smooth(weight) {
    this.keep({ smoothing: weight });
    this.tellSmoothing();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => { this.rests.clear(); this.look(this.wanted).catch(() => {}); }, 60);
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
    const changed = await Promise.all(runs.map(({ folder }) => this.ask(folder)));
    const layout = runs.map(({ folder, style }) => `${folder} ${style}`).join("\n");
    if (changed.some(Boolean) || layout !== this.layout) { this.layout = layout; this.render(); this.tellSmoothing(); }
  }

  async ask(folder) {
    const began = performance.now(), weight = this.weight(), asked = { folder, version: this.answers.get(folder)?.version ?? "" };
    if (began < (this.rests.get(folder) ?? 0)) return false;
    const answer = await get(`/api/train/curves?${new URLSearchParams(weight === null ? asked : { ...asked, smoothing: weight })}`);
    const took = performance.now() - began;
    if (!answer.series) return false;
    if (this.answers.has(folder)) this.rests.set(folder, began + took * (1 + REST));
    this.answers.set(folder, answer);
    return true;
  }

  render() {
    const runs = this.wanted.filter(({ folder }) => this.answers.has(folder)).map((each) => ({ ...each, ...this.answers.get(each.folder) }));
    const names = [...new Set(runs.flatMap(({ series }) => Object.keys(series)))].filter((name) => name !== "loss_smoothed");
    const place = (name) => { const i = ORDER.indexOf(name.replace(/_q\d$/, "")); return i < 0 ? ORDER.length : i; };
    names.sort((a, b) => place(a) - place(b));
    const all = runs.flatMap(({ series }) => Object.values(series)).filter(({ steps }) => steps.length);
    const range = all.length ? [Math.min(...all.map(({ steps }) => steps[0])), Math.max(...all.map(({ steps }) => steps.at(-1)))] : null;
    const shown = new Set();
    for (const name of names) {
      if (runs.length === 1 && /^validation_loss_q\d$/.test(name) && names.includes("validation_loss")) continue;
      shown.add(name);
      this.chart(name).set(runs.length === 1 ? this.ofOne(name, runs[0]) : this.ofSeveral(name, runs), range);
    }
    for (const name of this.charts.keys()) if (!shown.has(name)) this.charts.delete(name);
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
