"""How the pages look, and what works in them: the list of samples (`LISTING`), the numbers of curves (`READOUT`).

Nothing here asks the network for anything, and nothing needs a script but those two. The colours of text have a
contrast of 4.5:1 to what they are on, those of bars and curves one of 3:1, in light and in dark.
"""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; background: Canvas; color: CanvasText;
  --accent: light-dark(#2563eb, #60a5fa); --plain: #8a8a8a; --muted: light-dark(#595959, #adadad);
  --flag: light-dark(#b45309, #fbbf24); --line: #8884; }
.accent { color: var(--accent); } .plain { color: var(--plain); }
.quarter-1 { color: light-dark(#0e7490, #22d3ee); } .quarter-2 { color: light-dark(#4d7c0f, #a3e635); }
.quarter-3 { color: light-dark(#b45309, #fbbf24); } .quarter-4 { color: light-dark(#9333ea, #c084fc); }
body { max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin: 0 0 .5rem; overflow-wrap: anywhere; line-height: 1.2; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
table { border-collapse: collapse; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; }
th { font-weight: normal; color: var(--muted); } .facts th { white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
pre { background: #8881; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
a { color: var(--accent); } p > code { white-space: nowrap; } summary { cursor: pointer; }
dt { margin-top: .6rem; } dd { margin: 0; overflow-wrap: anywhere; }
figure { margin: 0; } figcaption { font-size: 12px; color: var(--muted); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1.5rem 3rem;
  margin-top: 1.5rem; }
.charts figcaption { font-size: 15px; font-weight: bold; color: inherit; margin-bottom: .3rem; }
.bars svg { display: block; width: 100%; max-width: 28rem; font-size: 12px; }
.bars text { fill: currentColor; } .bars rect { fill: var(--accent); }
.curves { display: flex; flex-direction: column; justify-content: space-between; }
.keys { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: 13px; font-weight: normal; color: var(--muted); }
.keys b { font-variant-numeric: tabular-nums; }
.keys i { display: inline-block; width: .9rem; border-top: 3px solid; margin-right: .4rem; vertical-align: middle; }
.plot { display: grid; grid-template-columns: 4rem 1fr; gap: .3rem .5rem; font-size: 12px; line-height: 1;
  color: var(--muted); font-variant-numeric: tabular-nums; }
.plot svg { width: 100%; height: 9rem; overflow: visible; touch-action: pan-y; border: solid var(--line);
  border-width: 0 0 1px 1px; }
.plot div { display: flex; justify-content: space-between; } .plot div :only-child { margin: auto; }
.values { flex-direction: column; align-items: end; } .plot .values :only-child { margin-right: 0; }
.steps { grid-column: 2; }
.plot path, polyline { fill: none; stroke: currentColor; stroke-width: 1.5; vector-effect: non-scaling-stroke;
  stroke-linejoin: round; stroke-linecap: round; } .plot .dot { stroke-width: 7; }
form { display: flex; flex-wrap: wrap; gap: .5rem; } input, select, button { font: inherit; padding: .3rem .5rem; }
select { max-width: 100%; } input { flex: 1 1 15rem; min-width: 0; }
::placeholder { color: var(--muted); opacity: 1; }
.pager { display: flex; gap: 1rem; align-items: center; } [hidden] { display: none !important; }
#samples-shown { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: 1rem; }
article { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; min-width: 0;
  overflow-wrap: anywhere; scroll-margin: 1rem; } article.chosen { outline: 2px solid var(--accent); }
article h3 { margin: 0; font-size: 1rem; } article p { margin: .3rem 0; font-size: 13px; color: var(--muted); }
article .prompt { white-space: pre-wrap; max-height: 9.5rem; overflow: auto; font-size: 15px; color: inherit; }
article .flag { color: var(--flag); } article a { text-decoration: none; }
.pictures { display: flex; gap: .5rem; margin-bottom: .5rem; }
.pictures figure { flex: 1 1 0; min-width: 0; max-width: 12rem; }
.pictures img { width: 100%; height: auto; border-radius: 4px; display: block; }
.drawn { margin-top: 1rem; }
.drawn .pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(clamp(8.5rem, 20%, 20rem), 1fr));
  gap: .8rem; margin: .7rem 0 0; }
.drawn figure { max-width: none; }
@media (max-width: 36rem) {
  table { display: block; overflow-x: auto; } td, th { padding-right: .8rem; }
  .facts, .facts tbody, .facts tr, .facts th, .facts td { display: block; padding-right: 0; }
  .facts th { font-size: 13px; padding-bottom: 0; } .facts td { padding: 0 0 .4rem; }
}
"""

READOUT = """
"use strict";
for (const chart of document.querySelectorAll(".curves")) {
  const plot = chart.querySelector("svg"), rule = chart.querySelector(".rule"), grid = plot.viewBox.baseVal;
  const shown = chart.querySelectorAll(".value"), at = chart.querySelector(".at");
  const curves = [...chart.querySelectorAll("polyline")].map(({ dataset: { steps, values } }) =>
    ({ steps: steps.split(" ").map(Number), values: values.split(" ") }));
  const first = Math.min(...curves.map(({ steps }) => steps[0]));
  const last = Math.max(...curves.map(({ steps }) => steps.at(-1)));

  function nearest(steps, step) {
    return steps.reduce((best, each, i) => Math.abs(each - step) < Math.abs(steps[best] - step) ? i : best, 0);
  }

  function show(wanted) {
    const [{ steps }] = curves, step = wanted === last ? last : steps[nearest(steps, wanted)];
    at.textContent = step.toLocaleString("en");
    curves.forEach(({ steps, values }, i) => { shown[i].textContent = values[nearest(steps, step)]; });
    const part = last > first ? (step - first) / (last - first) : 0.5;
    rule.setAttribute("d", `M${grid.width * part} 0v${grid.height}`);
  }

  function follow({ clientX }) {
    const { left, width } = plot.getBoundingClientRect();
    show(first + ((last - first) * (clientX - left)) / width);
  }

  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerleave", ({ pointerType }) => {
    if (pointerType === "mouse") { show(last); rule.removeAttribute("d"); }
  });
}
"""

LISTING = """
"use strict";
const SHOWN = 100;
const read = (name) => JSON.parse(document.getElementById(name).textContent);
const overview = read("overview"), { columns, rows } = read("samples");
const samples = rows.map((row) => Object.fromEntries(columns.map((column, i) => [column, row[i]])));
const flags = new Map();
for (const recipe of Object.values(overview.recipes))
  for (const [flag, keys] of Object.entries(recipe.flags))
    for (const key of keys) flags.set(key, [...(flags.get(key) ?? []), flag]);
const found = (name) => document.getElementById(name);
const sizeOf = (sample) => sample.sizes[0].join("×"), words = (flag) => flag.replaceAll("_", " ");
let matching = samples, first = 0;

function element(kind, text, attributes = {}) {
  const made = Object.assign(document.createElement(kind), attributes);
  if (text) made.textContent = text;
  return made;
}

function picture([title, place], [width, height]) {
  const figure = element("figure");
  const image = element("img", "", { loading: "lazy", alt: title, src: place, width, height });
  figure.append(image, element("figcaption", title));
  return figure;
}

function card(sample) {
  const made = element("article", "", { id: sample.key }), pictures = element("div", "", { className: "pictures" });
  const [target, ...before] = sample.sizes;
  pictures.append(...sample.pictures.map((each, i) => picture(each, before[i] ?? target)));
  const controls = sample.sizes.slice(1).map((size) => size.join("×")).join(", ");
  const facts = [sizeOf(sample) + (controls && ` from ${controls}`), `${sample.text_tokens} text tokens`];
  facts.push(`${sample.image_tokens} image tokens`);
  if (sample.edit_mask_from) facts.push(`edit mask from ${sample.edit_mask_from}`);
  if (Object.keys(overview.recipes).length > 1) facts.push(`recipe ${sample.recipe}`);
  const link = element("a", "", { href: "#" + sample.key });
  link.append(element("code", sample.key));
  const key = element("p");
  key.append(link);
  if (sample.pictures.length) made.append(pictures);
  made.append(element("h3", sample.name), element("p", sample.prompt, { className: "prompt", dir: "auto" }));
  made.append(element("p", facts.join(" · ")));
  const odd = (flags.get(sample.key) ?? []).map(words).join(", ");
  if (odd) made.append(element("p", odd, { className: "flag" }));
  made.append(key);
  return made;
}

function show(begin) {
  first = begin;
  found("samples-shown").replaceChildren(...matching.slice(first, first + SHOWN).map(card));
  const last = Math.min(first + SHOWN, matching.length);
  found("range").textContent = matching.length ? `${first + 1} to ${last} of ${matching.length}` : "none";
  found("before").disabled = first === 0;
  found("after").disabled = last === matching.length;
}

function filter() {
  const text = found("search").value.toLowerCase(), size = found("size").value;
  const flag = found("flag").value, recipe = found("recipe").value;
  matching = samples.filter((sample) =>
    (!size || sizeOf(sample) === size) && (!recipe || sample.recipe === recipe) &&
    (!flag || (flags.get(sample.key) ?? []).some((each) => flag === "any" || flag === each)) &&
    (!text || [sample.prompt, sample.name, sample.key].some((each) => each.toLowerCase().includes(text))));
  show(0);
}

function choices(name, all, options) {
  const select = found(name);
  select.append(new Option(all, ""), ...options.map(([value, title]) => new Option(title, value)));
  select.hidden = options.length < 2;
}

function follow() {
  const key = location.hash.slice(1), reach = () => matching.findIndex((sample) => sample.key === key);
  if (!samples.some((sample) => sample.key === key)) return;
  if (reach() < 0) { found("filters").reset(); filter(); }
  show(reach() - (reach() % SHOWN));
  found(key).classList.add("chosen");
  found(key).scrollIntoView({ block: "center" });
}

function counted(values, title = (value) => value) {
  const counts = new Map();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]).map(([value, count]) => [value, `${title(value)} (${count})`]);
}

if (samples.length) {
  choices("size", "all sizes", counted(samples.map(sizeOf)));
  const flagged = counted([...flags.values()].flat(), words);
  choices("flag", "flagged or not", [["any", `flagged (${flags.size})`], ...flagged]);
  choices("recipe", "all recipes", counted(samples.map((sample) => sample.recipe)));
  found("filters").addEventListener("input", filter);
  found("filters").addEventListener("submit", (event) => event.preventDefault());
  found("before").addEventListener("click", () => show(first - SHOWN));
  found("after").addEventListener("click", () => show(first + SHOWN));
  addEventListener("hashchange", follow);
  show(0);
  follow();
}
"""
