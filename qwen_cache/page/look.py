"""What the page looks like, and how its list of samples works. Neither asks the network for anything."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; --bar: #2563eb; --line: #8884; }
@media (prefers-color-scheme: dark) { :root { --bar: #60a5fa; } }
body { max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: .5rem; overflow-wrap: anywhere; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; } th { font-weight: normal; opacity: .7; white-space: nowrap; }
td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; } td { overflow-wrap: anywhere; }
pre { background: #8881; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere; }
a { color: var(--bar); } p > code { white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); gap: 1.5rem 3rem;
  margin-top: 1.5rem; }
figure { margin: 0; } .charts figcaption { font-weight: bold; margin-bottom: .3rem; }
svg { width: 100%; font-size: 12px; } svg text { fill: currentColor; } svg rect { fill: var(--bar); }
dt { margin-top: .6rem; } dd { margin: 0; }
form { display: flex; flex-wrap: wrap; gap: .5rem; } input, select, button { font: inherit; padding: .3rem .5rem; }
select { max-width: 100%; } input { flex: 1 1 15rem; min-width: 0; }
.pager { display: flex; gap: 1rem; align-items: center; } [hidden] { display: none !important; }
#samples-shown { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(22rem, 100%), 1fr)); gap: 1rem; }
article { border: 1px solid var(--line); border-radius: 6px; padding: .7rem .9rem; min-width: 0;
  overflow-wrap: anywhere; } article.chosen { outline: 2px solid var(--bar); }
article h3 { margin: 0; font-size: 1rem; } article p { margin: .3rem 0; font-size: 13px; opacity: .8; }
article .prompt { white-space: pre-wrap; max-height: 9.5rem; overflow: auto; font-size: 15px; opacity: 1; }
article .flag { color: #b45309; opacity: 1; } article a { text-decoration: none; }
@media (prefers-color-scheme: dark) { article .flag { color: #fbbf24; } }
.pictures { display: flex; gap: .5rem; margin-bottom: .5rem; }
.pictures figure { flex: 1 1 0; min-width: 0; max-width: 12rem; }
.pictures img { width: 100%; border-radius: 4px; display: block; }
.pictures figcaption { font-size: 12px; opacity: .7; }
"""

SCRIPT = """
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

function picture([title, place]) {
  const figure = element("figure");
  figure.append(element("img", "", { loading: "lazy", alt: title, src: place }), element("figcaption", title));
  return figure;
}

function card(sample) {
  const made = element("article", "", { id: sample.key }), pictures = element("div", "", { className: "pictures" });
  pictures.append(...sample.pictures.map(picture));
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
