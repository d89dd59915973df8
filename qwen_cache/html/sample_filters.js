// The filters of the list, and the test of a sample that follows from them.
const plural = (count) => `${grouped(count)} ${count === 1 ? "sample" : "samples"}`;

function matchesText(sample, text) {
  return [sample.prompt, sample.name, sample.key].some((each) => each.toLowerCase().includes(text));
}

function matchesFlag(flags, hasImages, flag) {
  return !flag || (flag === "any" ? flags.length > 0 : flag === "images" ? hasImages : flags.includes(flag));
}

function wanted() {
  const text = byId("search").value.toLowerCase(), size = byId("size").value;
  const flag = byId("flag").value, recipe = byId("recipe").value;
  return (sample) => (!size || sizeOf(sample) === size) && (!recipe || sample.recipe === recipe) &&
    matchesFlag(sample.flags, sample.images.length > 0, flag) && (!text || matchesText(sample, text));
}

function choices(name, all, options, title = (value) => value) {
  const select = byId(name), named = options.map(([value, count]) => new Option(`${title(value)} (${grouped(count)})`, value));
  select.append(new Option(all, ""), ...named);
  select.hidden = options.length < 2;
}

function begin(filter, follow) {
  const special = { any: "flagged", images: "with images" };
  choices("size", "all sizes", about.sizes);
  choices("flag", "flagged or not", about.flags, (flag) => special[flag] ?? words(flag));
  choices("recipe", "all recipes", about.recipes);
  byId("filters").addEventListener("input", filter);
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", follow);
}
