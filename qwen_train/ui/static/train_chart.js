// A chart of curves over steps, as SVG: numbers on both axes, a legend that hides curves, values at the pointer or by
// the keyboard. Only points of the data are shown, joined by straight lines that break where a value is not finite.
// A range of steps is chosen by dragging across, by the wheel, or by the keyboard.

import { element } from "./api.js";

const NS = "http://www.w3.org/2000/svg";
const NOISY = 400; // points of a curve from which its line is thin
const MARKED = 60; // points of a curve up to which each has a mark of its own
const STYLES = 8;
const DRAGGED = 8; // pixels from which a pointer has chosen a range
const FACTOR = 1.6; // of one zoom by the keyboard
const PAN = 0.25; // of the range
const PAD = { top: 10, bottom: 24, left: 58, right: 12 };

function svg(tag, properties = {}, ...children) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(properties)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children.filter(Boolean));
  return made;
}

// `0.0312`, `1.2e-5`, `12,400`: four significant digits.
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1000 && size < 1e9) return Math.round(value).toLocaleString("en");
  if (size < 1e-3 || size >= 1e9) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// About `count` round numbers from `low` to `high`.
export function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i += 1) made.push(Number((i * step).toPrecision(12)));
  return made;
}

// Round numbers for a logarithmic axis: 1, 2 and 5 of each decade, or whole decades of many; few decades get more.
export function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return ticks(low, high, count).filter((each) => each > 0);
  const every = decades < count / 3 ? [1, 2, 5] : [1], skip = Math.max(1, Math.ceil(decades / count)), made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    if (power % skip === 0) for (const each of every) {
      const value = Number((each * 10 ** power).toPrecision(12));
      if (value >= low * 0.999 && value <= high * 1.001) made.push(value);
    }
  return made;
}

const tickText = (value) => {
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size < 1e-3) return value.toExponential().replace("e+", "e");
  return String(value);
};

// The index of the step in `steps` (ascending) that is nearest to `step`.
export function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}

let count = 0;

export class Chart {
  // `onstep` is told of the step at the pointer, null without one, and `onrange` of the first and last step that are
  // wanted, nulls for all, so that several charts show the same.
  constructor({ id, title, about = "", log = false, onstep = () => {}, onlog = () => {}, onrange = () => {}, large = false }) {
    Object.assign(this, { title, onstep, onrange, large, log, curves: [], hidden: new Set(), step: null, range: null });
    const name = this.name = `chart-${(count += 1)}`;
    this.box = element("input", { type: "checkbox", onchange: () => { this.log = this.box.checked; onlog(id, this.log); this.render(); } });
    this.box.checked = log;
    this.at = element("span", { class: "at" });
    this.legend = element("ul", { class: "legend", "aria-label": `${title}: curves` });
    this.note = element("p", { class: "about chart-note", hidden: true });
    this.plot = element("div", {
      class: "chart-plot", tabindex: "0", role: "slider", "aria-labelledby": name, "aria-valuemin": "0", "aria-valuemax": "0", "aria-valuenow": "0",
      onpointermove: (event) => this.moved(event), onpointerdown: (event) => this.began(event),
      onpointerleave: () => this.onstep(null),
      onpointerup: (event) => this.ended(event), onpointercancel: () => this.drop(), ondblclick: () => this.onrange(null, null),
      onkeydown: (event) => this.pressed(event), onblur: () => this.onstep(null),
    });
    this.plot.addEventListener("wheel", (event) => this.wheeled(event), { passive: false });
    this.node = element("figure", { class: large ? "chart large" : "chart" },
      element("figcaption", {}, element("span", { id: name, class: "chart-title" }, title), this.at,
        element("label", { class: "log-scale" }, this.box, "log")),
      about ? element("p", { class: "about" }, about) : null, this.plot, this.legend, this.note);
    new ResizeObserver(() => { if (this.plot.clientWidth !== this.width) this.render(); }).observe(this.plot);
  }

  // `curves`: [{key, label, style, faint, steps, values}], values null where not finite. `range`: first and last step.
  set(curves, range) {
    this.curves = curves.filter((each) => each.steps.length).map((each) => ({ ...each, isNoisy: !each.isSmooth && each.steps.length > NOISY }));
    this.range = range;
    this.node.hidden = !this.curves.length;
    this.renderLegend();
    this.render();
  }

  get visible() { return this.curves.filter((each) => !this.hidden.has(each.key)); }

  renderLegend() {
    const old = new Map([...this.legend.children].map((row) => [row.dataset.key, row]));
    this.curves.forEach((curve, i) => {
      const row = old.get(curve.key) ?? this.legendRow(curve);
      old.delete(curve.key);
      row.querySelector(".name").textContent = curve.label;
      row.querySelector("svg").setAttribute("class", lineClass(curve));
      if (this.legend.children[i] !== row) this.legend.insertBefore(row, this.legend.children[i] ?? null);
    });
    for (const row of old.values()) row.remove();
  }

  legendRow(curve) {
    const sample = svg("svg", { viewBox: "0 0 28 10", "aria-hidden": "true" }, svg("path", { d: "M1 5H27" }));
    const button = element("button", { type: "button", "aria-pressed": "true", title: "Hide or show this curve", onclick: () => {
      if (this.hidden.has(curve.key)) this.hidden.delete(curve.key); else this.hidden.add(curve.key);
      button.setAttribute("aria-pressed", String(!this.hidden.has(curve.key)));
      this.render();
    } }, sample, element("span", { class: "name" }, curve.label));
    return element("li", { "data-key": curve.key }, button, element("b", { class: "value" }));
  }

  scales() {
    const shown = this.visible, values = [];
    this.left = 0; // points that a logarithmic axis has no place for
    const [first, last] = this.range ?? [Math.min(...shown.map((c) => c.steps[0])), Math.max(...shown.map((c) => c.steps.at(-1)))];
    for (const { steps, values: all } of shown) for (const [i, value] of all.entries()) {
      if (value === null || steps[i] < first || steps[i] > last) continue;
      if (this.log && value <= 0) this.left += 1; else values.push(value);
    }
    let low = Infinity, high = -Infinity;
    for (const value of values) { if (value < low) low = value; if (value > high) high = value; }
    if (low > high) [low, high] = this.log ? [1, 10] : [0, 1];
    if (this.log) {
      if (low === high) { low /= 2; high *= 2; }
      const pad = (high / low) ** 0.04;
      low /= pad; high *= pad;
    } else {
      if (low === high) { const by = Math.abs(low) / 2 || 1; low -= by; high += by; }
      const pad = (high - low) * 0.05, isAbove = low >= 0;
      low -= pad; high += pad;
      if (isAbove && low < 0) low = 0;
    }
    const { width, height } = this, right = width - this.right, bottom = height - PAD.bottom;
    const span = last > first ? last - first : 1;
    this.x = (step) => PAD.left + (right - PAD.left) * (last > first ? (step - first) / span : 0.5);
    this.stepAt = (x) => first + span * (x - PAD.left) / Math.max(1, right - PAD.left);
    const place = this.log ? Math.log : (value) => value, bottomValue = place(low), topValue = place(high);
    this.y = (value) => bottom - (bottom - PAD.top) * (place(value) - bottomValue) / (topValue - bottomValue);
    return { low, high, first, last, right, bottom };
  }

  render() {
    this.width = this.plot.clientWidth;
    if (!this.width || !this.curves.length) return;
    this.height = this.large ? Math.max(220, Math.min(380, this.width * 0.36)) : 190;
    const labelled = this.visible.filter((curve) => !curve.faint && curve.label && this.curves.length > 1);
    const longest = Math.max(0, ...labelled.map((curve) => curve.label.length));
    this.right = this.width >= 520 && labelled.length ? Math.min(200, 18 + longest * 7) : PAD.right;
    const { low, high, first, last, right, bottom } = this.scales();
    const grid = svg("g", { class: "grid" }), lines = svg("g", { "clip-path": `url(#${this.name}-clip)` });
    const clip = svg("clipPath", { id: `${this.name}-clip` },
      svg("rect", { x: PAD.left - 3, y: 0, width: Math.max(0, right - PAD.left + 6), height: bottom + 3 }));
    for (const tick of (this.log ? logTicks : ticks)(low, high, Math.floor((bottom - PAD.top) / 38))) {
      const y = this.y(tick);
      grid.append(svg("path", { d: `M${PAD.left} ${y.toFixed(1)}H${right}` }), label(PAD.left - 6, y + 4, tickText(tick), "end"));
    }
    for (const tick of ticks(first, last, Math.floor((right - PAD.left) / 80)).filter(Number.isInteger)) {
      const x = this.x(tick);
      grid.append(svg("path", { d: `M${x.toFixed(1)} ${bottom}v4` }), label(x, bottom + 17, tickText(tick), "middle"));
    }
    grid.append(svg("path", { class: "axis", d: `M${PAD.left} ${PAD.top}V${bottom}H${right}` }));
    for (const curve of [...this.visible].sort((a, b) => Boolean(b.faint) - Boolean(a.faint))) lines.append(this.line(curve, bottom));
    const names = svg("g", {}, ...(this.right > PAD.right ? this.endLabels(labelled, right, bottom) : []));
    this.cursor = svg("g", { class: "cursor" });
    this.chosen = svg("rect", { class: "chosen", y: PAD.top, height: bottom - PAD.top, width: 0 });
    const size = { width: this.width, height: this.height, "aria-hidden": "true" };
    this.plot.replaceChildren(svg("svg", size, clip, grid, lines, names, this.chosen, this.cursor));
    Object.assign(this, { first, last });
    this.plot.setAttribute("aria-valuemin", first);
    this.plot.setAttribute("aria-valuemax", last);
    const left = this.left ? `${this.left} ${this.left === 1 ? "value has" : "values have"} no place on a log scale: zero or below. ` : "";
    const bad = this.curves.filter((each) => !each.faint).reduce((sum, each) => sum + (each.notFinite ?? 0), 0);
    this.note.textContent = left + (bad ? `× ${bad} ${bad === 1 ? "value is" : "values are"} not finite.` : "");
    this.note.hidden = !this.note.textContent;
    this.showStep(this.step);
  }

  // The line, broken at values that are not finite (a cross at the bottom); few points are marked each.
  line(curve, bottom) {
    const group = svg("g", { class: lineClass(curve) }), finite = curve.values.filter((each) => each !== null).length;
    let path = "", isOpen = false;
    curve.steps.forEach((step, i) => {
      const value = curve.values[i];
      if (value === null || (this.log && value <= 0)) {
        if (value === null && !curve.faint) group.append(cross(this.x(step), bottom - 5));
        isOpen = false;
        return;
      }
      const x = this.x(step).toFixed(1), y = this.y(value).toFixed(1);
      const isAlone = !isOpen && (i + 1 >= curve.steps.length || curve.values[i + 1] === null);
      path += `${isOpen ? "L" : "M"}${x} ${y}`;
      if (finite <= MARKED || isAlone) group.append(svg("circle", { cx: x, cy: y, r: finite <= MARKED && !curve.faint ? 2.6 : 1.8 }));
      isOpen = true;
    });
    group.prepend(svg("path", { d: path || "M0 0" }));
    return group;
  }

  // The names of curves at their ends, moved apart where they would cover each other.
  endLabels(curves, right, bottom) {
    const places = [];
    for (const curve of curves) {
      const isDrawn = (value, at) => value !== null && (!this.log || value > 0) && this.isInside(curve.steps[at]);
      const i = curve.values.findLastIndex(isDrawn);
      if (i >= 0) places.push({ curve, x: this.x(curve.steps[i]), y: this.y(curve.values[i]) });
    }
    places.sort((a, b) => a.y - b.y);
    places.forEach((each, i) => { each.at = Math.max(each.y, i ? places[i - 1].at + 14 : PAD.top + 4); });
    for (let i = places.length - 1, limit = bottom - 2; i >= 0; i -= 1) { places[i].at = Math.min(places[i].at, limit); limit = places[i].at - 14; }
    return places.map(({ curve, at, x }) => {
      const text = label(Math.min(right, x) + 8, at + 4, curve.label.length > 28 ? `${curve.label.slice(0, 27)}…` : curve.label, "start");
      text.setAttribute("class", `end-label style-${curve.style % STYLES}`);
      return text;
    });
  }

  isInside(step) { return !this.range || (step >= this.range[0] && step <= this.range[1]); }

  // All steps that are shown, ascending.
  get steps() {
    return [...new Set(this.visible.flatMap((curve) => curve.steps))].filter((step) => this.isInside(step)).sort((a, b) => a - b);
  }

  // ---- the range ---------------------------------------------------------------------------------------------------

  xOf(event) { return event.clientX - this.plot.getBoundingClientRect().left; }

  // A finger scrolls the page, and reads values; it zooms by the buttons.
  began(event) {
    this.pointed(event);
    if (event.pointerType === "touch" || event.button) return;
    this.from = this.xOf(event);
    this.plot.setPointerCapture(event.pointerId);
  }

  moved(event) {
    this.pointed(event);
    if (this.from === undefined || !this.chosen) return;
    const [low, high] = [this.from, this.xOf(event)].sort((a, b) => a - b);
    this.chosen.setAttribute("x", low);
    this.chosen.setAttribute("width", high - low);
  }

  ended(event) {
    const { from } = this, to = this.xOf(event);
    this.drop();
    if (from === undefined || Math.abs(to - from) < DRAGGED) return;
    const [low, high] = [from, to].sort((a, b) => a - b);
    this.onrange(this.stepAt(low), this.stepAt(high));
  }

  drop() {
    this.from = undefined;
    this.chosen?.setAttribute("width", 0);
  }

  // The page scrolls, unless the chart has the focus, or Ctrl is held, as a pinch on a touchpad has it.
  wheeled(event) {
    if (!this.curves.length || (!event.ctrlKey && document.activeElement !== this.plot)) return;
    event.preventDefault();
    const by = event.deltaMode === 1 ? 30 : 1, along = event.shiftKey ? event.deltaY : event.deltaX;
    if (along) this.pan(Math.sign(along) * PAN / 2);
    else this.zoom(1.002 ** (event.deltaY * by), this.stepAt(this.xOf(event)));
  }

  // Show `factor` times as many steps; the one at `around` stays where it is.
  zoom(factor, around = this.step ?? (this.first + this.last) / 2) {
    this.onrange(around - (around - this.first) * factor, around + (this.last - around) * factor);
  }

  pan(part) {
    const by = (this.last - this.first) * part;
    this.onrange(this.first + by, this.last + by);
  }

  // ---- values at a step --------------------------------------------------------------------------------------------

  pointed(event) {
    const steps = this.steps;
    if (steps.length) this.onstep(steps[nearest(steps, this.stepAt(this.xOf(event)))]);
  }

  pressed(event) {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key], steps = this.steps;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [zoomed] = [["+", 1 / FACTOR], ["=", 1 / FACTOR], ["-", FACTOR], ["_", FACTOR]].filter(([key]) => key === event.key);
    if (zoomed || event.key === "0" || (event.shiftKey && /^Arrow(Left|Right)$/.test(event.key))) {
      event.preventDefault();
      if (zoomed) this.zoom(zoomed[1]);
      else if (event.key === "0") this.onrange(null, null);
      else this.pan(by < 0 ? -PAN : PAN);
      return;
    }
    if (!steps.length) return;
    const now = this.step === null ? steps.length - 1 : nearest(steps, this.step);
    if (event.key === "Escape") this.onstep(null);
    else if (event.key === "Home") this.onstep(steps[0]);
    else if (event.key === "End") this.onstep(steps.at(-1));
    else if (by) this.onstep(steps[Math.max(0, Math.min(steps.length - 1, now + (this.step === null ? 0 : by)))]);
    else return;
    event.preventDefault();
  }

  // The values at a step: of each curve its nearest point, with its own step where that is another one.
  showStep(asked) {
    const step = asked === null || this.isInside(asked) ? asked : null; // the range was moved since
    this.step = step;
    if (!this.cursor || !this.curves.length) return;
    this.cursor.replaceChildren();
    this.at.textContent = step === null ? "" : `step ${step.toLocaleString("en")}`;
    if (step !== null) this.cursor.append(svg("path", { d: `M${this.x(step).toFixed(1)} ${PAD.top}V${this.height - PAD.bottom}` }));
    const spoken = [];
    for (const curve of this.curves) {
      const i = nearest(curve.steps, step ?? this.last), value = curve.values[i];
      const away = step !== null && curve.steps[i] !== step ? ` (at ${curve.steps[i].toLocaleString("en")})` : "";
      const text = (value === null ? "not finite" : number(value)) + away;
      const row = [...this.legend.children].find((each) => each.dataset.key === curve.key);
      row.querySelector(".value").textContent = text;
      if (this.hidden.has(curve.key)) continue;
      spoken.push(`${curve.label || this.title} ${text}`);
      if (step !== null && value !== null && (!this.log || value > 0))
        this.cursor.append(svg("circle", { class: lineClass(curve), cx: this.x(curve.steps[i]).toFixed(1), cy: this.y(value).toFixed(1), r: 4 }));
    }
    const at = step ?? this.steps.at(-1) ?? 0;
    this.plot.setAttribute("aria-valuenow", at);
    this.plot.setAttribute("aria-valuetext", `step ${at}: ${spoken.join(", ")}`);
  }
}

const lineClass = (curve) =>
  `curve style-${curve.style % STYLES}${curve.faint ? " faint" : ""}${curve.isNoisy ? " noisy" : ""}`;

function label(x, y, text, anchor) {
  const made = svg("text", { x: x.toFixed(1), y: y.toFixed(1), "text-anchor": anchor });
  made.textContent = text;
  return made;
}

const cross = (x, y) => svg("path", { class: "cross", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` });
