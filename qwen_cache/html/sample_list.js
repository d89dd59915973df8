// The list of samples of `inspect --html`: search, filters, and PAGE_SIZE samples at a time.
"use strict";
const PAGE_SIZE = 100;
const read = (name) => JSON.parse(document.getElementById(name).textContent);
const overview = read("overview"), { columns, rows } = read("samples");
const samples = rows.map((row) => Object.fromEntries(columns.map((column, i) => [column, row[i]])));
const flags = new Map();
for (const recipe of Object.values(overview.recipes))
  for (const [flag, keys] of Object.entries(recipe.flags))
    for (const key of keys) flags.set(key, [...(flags.get(key) ?? []), flag]);
const groups = Object.values(overview.recipes).flatMap((recipe) => recipe.near_duplicates ?? []);
const groupOf = new Map(groups.flatMap((group, i) => group.map((key) => [key, i])));
const nameOf = new Map(samples.map((sample) => [sample.key, sample.name]));
const byId = (name) => document.getElementById(name);
const sizeOf = (sample) => sample.sizes[0].join("×"), words = (flag) => flag.replaceAll("_", " ");
let matching = samples, first = 0;

function element(kind, text, attributes = {}) {
  const created = Object.assign(document.createElement(kind), attributes);
  if (text) created.textContent = text;
  return created;
}

function image([title, source], [width, height]) {
  const figure = element("figure");
  const image = element("img", "", { loading: "lazy", alt: title, src: source, width, height });
  figure.append(image, element("figcaption", title));
  return figure;
}

function link(key, text) {
  return element("a", text, { href: "#" + key });
}

// The flags of a sample, and of which others it is a near-duplicate.
function reasons(key) {
  const others = (groups[groupOf.get(key)] ?? []).filter((other) => other !== key);
  const named = flags.get(key).filter((flag) => flag !== "near_duplicate").map(words);
  if (others.length) named.push("near-duplicate of ");
  const shown = element("p", named.join(", "), { className: "flag" });
  others.forEach((other, i) => shown.append(i ? ", " : "", link(other, nameOf.get(other))));
  return shown;
}

function heading(group) {
  return element("h3", `Near-duplicates, group ${group + 1} of ${groups.length}`, { className: "group" });
}

function card(sample) {
  const article = element("article", "", { id: sample.key }), images = element("div", "", { className: "images" });
  const [target, ...before] = sample.sizes;
  images.append(...sample.images.map((each, i) => image(each, before[i] ?? target)));
  const controls = sample.sizes.slice(1).map((size) => size.join("×")).join(", ");
  const facts = [sizeOf(sample) + (controls && ` from ${controls}`), `${sample.text_tokens} text tokens`];
  facts.push(`${sample.image_tokens} image tokens`);
  if (sample.to_generate) facts.push(sample.to_generate);
  if (sample.edit_mask_from) facts.push(`edit mask from ${sample.edit_mask_from}`);
  if (Object.keys(overview.recipes).length > 1) facts.push(`recipe ${sample.recipe}`);
  const key = element("p");
  key.append(link(sample.key, sample.key));
  if (sample.images.length) article.append(images);
  article.append(element("h3", sample.name), element("p", sample.prompt, { className: "prompt", dir: "auto" }));
  article.append(element("p", facts.join(" · ")));
  if (flags.has(sample.key)) article.append(reasons(sample.key));
  article.append(key);
  return article;
}

function show(begin) {
  first = begin;
  const grouped = byId("flag").value === "near_duplicate", cards = [];
  let group = -1;
  for (const sample of matching.slice(first, first + PAGE_SIZE)) {
    if (grouped && groupOf.get(sample.key) !== group) cards.push(heading(group = groupOf.get(sample.key)));
    cards.push(card(sample));
  }
  byId("samples-shown").replaceChildren(...cards);
  const last = Math.min(first + PAGE_SIZE, matching.length);
  byId("range").textContent = matching.length ? `${first + 1} to ${last} of ${matching.length}` : "none";
  byId("previous").disabled = first === 0;
  byId("next").disabled = last === matching.length;
}

function turn(pages) {
  show(first + pages * PAGE_SIZE);
  byId("list").scrollIntoView();
}

function filter() {
  const text = byId("search").value.toLowerCase(), size = byId("size").value;
  const flag = byId("flag").value, recipe = byId("recipe").value;
  matching = samples.filter((sample) =>
    (!size || sizeOf(sample) === size) && (!recipe || sample.recipe === recipe) &&
    (!flag || (flags.get(sample.key) ?? []).some((each) => flag === "any" || flag === each)) &&
    (!text || [sample.prompt, sample.name, sample.key].some((each) => each.toLowerCase().includes(text))));
  if (flag === "near_duplicate") matching.sort((a, b) => groupOf.get(a.key) - groupOf.get(b.key));
  show(0);
}

function choices(name, all, options) {
  const select = byId(name);
  select.append(new Option(all, ""), ...options.map(([value, title]) => new Option(title, value)));
  select.hidden = options.length < 2;
}

function follow() {
  const key = location.hash.slice(1), position = () => matching.findIndex((sample) => sample.key === key);
  if (!samples.some((sample) => sample.key === key)) return;
  if (position() < 0) { byId("filters").reset(); filter(); }
  show(position() - (position() % PAGE_SIZE));
  byId(key).classList.add("chosen");
  byId(key).scrollIntoView({ block: "center" });
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
  byId("filters").addEventListener("input", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  byId("previous").addEventListener("click", () => turn(-1));
  byId("next").addEventListener("click", () => turn(1));
  addEventListener("hashchange", follow);
  show(0);
  follow();
}
