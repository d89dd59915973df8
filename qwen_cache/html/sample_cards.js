// The card of a sample.
const sizeOf = (sample) => sample.sizes[0].join("×"), words = (flag) => flag.replaceAll("_", " ");
const grouped = (count) => count.toLocaleString("en");

function element(kind, text, attributes = {}) {
  const created = Object.assign(document.createElement(kind), attributes);
  if (text) created.textContent = text;
  return created;
}

function image([title, source], [width, height]) {
  const figure = element("figure");
  const image = element("img", "", { loading: "lazy", alt: title, width, height });
  if (source) image.src = source;
  figure.append(image, element("figcaption", title));
  return figure;
}

function link(key, text) {
  return element("a", text, { href: "#" + key });
}

// The flags of a sample, and of which others it is a near-duplicate.
function reasons({ flags, near }) {
  const named = flags.filter((flag) => flag !== "near_duplicate" || !near).map(words);
  if (near) named.push("near-duplicate of ");
  const shown = element("p", named.join(", "), { className: "flag" });
  near?.[1].forEach(([key, name], i) => shown.append(i ? ", " : "", link(key, name)));
  if (near?.[2]) shown.append(` and ${grouped(near[2])} more`);
  return shown;
}

function groupTitle({ near }) {
  return `Near-duplicates, group ${grouped(near[0])} of ${grouped(about.groups)}`;
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
  if (about.recipes.length > 1) facts.push(`recipe ${sample.recipe}`);
  const key = element("p", "", { className: "key" });
  key.append(link(sample.key, sample.key));
  if (sample.images.length) article.append(images);
  article.append(element("h3", sample.name), element("p", sample.prompt, { className: "prompt", dir: "auto" }));
  for (const [i, prompt] of (sample.slider ?? []).entries()) {
    article.append(element("p", `${["positive", "negative"][i]}: ${prompt}`, { className: "prompt", dir: "auto" }));
  }
  article.append(element("p", facts.join(" · "), { className: "about" }));
  if (sample.flags.length) article.append(reasons(sample));
  article.append(key);
  return article;
}
