// The first screen of Data: what is in the folder, as cards.

import { act, at, element, get, plural, showImage } from "./api.js";
import { linkTo } from "./project.js";

const WITH_IMAGES = 12, OVERVIEWS = 12;  // cards that get thumbnails, and sources that are looked at

const preview = (path) => `/api/generate/preview?${new URLSearchParams({ path })}`;

// `found` is the answer of /api/data/sources; `open(source)` opens one here.
export async function showFound({ sources, caches, runs }, open) {
  at("sources").replaceChildren(...sources.map(({ source }) => element("option", { value: source })));
  const cards = sources.map((each, i) => sourceCard(each, i < WITH_IMAGES, open));
  const others = [
    ...caches.map((cache) => card(link("train", { cache }, cache), "a cache: train from it")),
    ...runs.map(({ folder, step }) => card(link("train", { run: folder }, `run ${folder}`), `step ${step.toLocaleString("en")}`)),
  ];
  at("found").replaceChildren(...cards.map(({ node }) => node), ...others);
  at("none-found").hidden = cards.length + others.length > 0;
  for (const { source, facts } of cards.slice(0, OVERVIEWS)) {
    const about = await get(`/api/data/overview?${new URLSearchParams({ source })}`).catch((error) => ({ error: error.message }));
    if (about.error) facts.append(element("span", { class: "problem" }, ` · ${about.error}`));
    else if (about.problems) facts.append(element("span", { class: "problem" }, ` · ${plural(about.problems, "problem")}`));
    else if (about.rows !== null) facts.append(" · no problems known");
  }
}

const link = (page, choices, text) => element("a", { href: linkTo(page, choices) }, text);

function card(title, facts, ...images) {
  return element("li", { class: "found-card" }, images.length ? element("div", { class: "found-images" }, ...images) : null,
    element("p", { class: "found-name" }, title), element("p", { class: "about" }, facts));
}

function sourceCard({ source, images, more, first }, hasImages, open) {
  const href = linkTo("data", { source }), opens = (event) => { event.preventDefault(); act(null, () => open(source)); };
  const count = images ? `${more ? "more than " : ""}${plural(images, "image")}` : "a table or tars";
  const facts = element("span", {}, count);
  const shown = (hasImages ? first : []).map((path) => showImage(element("img", { alt: "", loading: "lazy" }), preview(path)));
  for (const img of shown) img.addEventListener("error", () => img.remove(), { once: true });
  return { source, facts, node: card(element("a", { href, onclick: opens }, source), facts, ...shown) };
}
