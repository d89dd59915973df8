// The list of a page with its samples in files: filters and search read the files one after another.
const TYPING = 250;  // ms of silence after which a search begins
let matching = null;  // positions; null for all samples
let run = 0, stopped = false, timer;

const count = () => (matching ? matching.length : about.count);
const positionAt = (index) => (matching ? matching[index] : index);

function report(text, running) {
  byId("found").textContent = text;
  byId("stop").hidden = !running;
}

function failed(error) {
  report(`${error.message}: keep the folder beside this page; if it was written again, reload it`, false);
}

function integers(base64, Kind) {
  return new Kind(Uint8Array.from(atob(base64), (each) => each.charCodeAt(0)).buffer);
}

// The positions of samples with a size, a flag and a recipe: from small files with these alone.
async function byKind(size, flag, recipe, goOn) {
  if (!size && !flag && !recipe) return null;
  const found = [], names = about.flag_names;
  await each("kinds", numbersTo(about.count / about.section), (section, { kinds, codes }) => {
    const matches = kinds.map(([ofSize, ofRecipe, bits, hasImages]) =>
      (!size || about.sizes[ofSize][0] === size) && (!recipe || about.recipes[ofRecipe][0] === recipe) &&
      matchesFlag(names.filter((_, i) => bits >> i & 1), hasImages, flag));
    integers(codes, Uint16Array).forEach((code, i) => { if (matches[code]) found.push(section * about.section + i); });
    return goOn(found, (section + 1) * about.section, "filtering");
  });
  return found;
}

async function byText(text, among, goOn) {
  if (!text) return among;
  const found = [], { chunk } = about;
  const [prompt, name, key] = ["prompt", "name", "key"].map((column) => about.columns.indexOf(column));
  const files = among ? [...new Set(among.map((each) => Math.floor(each / chunk)))] : numbersTo(about.count / chunk);
  let next = 0;
  await each("rows", files, (file, rows) => {
    const end = file * chunk + rows.length, candidates = [];
    if (among) while (next < among.length && among[next] < end) candidates.push(among[next++]);
    else for (let i = file * chunk; i < end; i++) candidates.push(i);
    for (const position of candidates) {
      const row = rows[position % chunk];
      if (matchesText({ prompt: row[prompt], name: row[name], key: row[key] }, text)) found.push(position);
    }
    return goOn(found, end, "searching");
  });
  return found;
}

// Near-duplicates in the order of their groups.
async function inGroups(positions) {
  const some = new Set(positions), ordered = [];
  await each("near", numbersTo(about.near / about.section), (_, all) => {
    for (const position of all) if (some.has(position)) ordered.push(position);
    return true;
  });
  return ordered;
}

async function search() {
  const mine = ++run, text = byId("search").value.toLowerCase(), flag = byId("flag").value;
  let shown = performance.now(), end = 0;
  stopped = false;
  const goOn = (found, done, doing) => {
    if (mine !== run) return false;
    end = Math.min(done, about.count);
    if (performance.now() - shown > 200) {
      shown = performance.now();
      report(`${doing}: ${Math.floor(100 * end / about.count)} %, ${grouped(found.length)} found`, true);
    }
    return !stopped;
  };
  const among = await byKind(byId("size").value, flag, byId("recipe").value, goOn);
  const found = stopped ? among : await byText(text, among, goOn);
  const ordered = flag === "near_duplicate" ? await inGroups(found) : found;
  if (mine !== run) return;
  matching = ordered;
  const until = stopped ? `: stopped after ${plural(end)} of ${grouped(about.count)}` : "";
  report(found ? `${grouped(found.length)} found${until}` : "", false);
  renew();
}

function filter(event) {
  clearTimeout(timer);
  run += 1;
  timer = setTimeout(() => search().catch(failed), event?.target.id === "search" ? TYPING : 0);
}

async function follow() {
  const position = await findKey(location.hash.slice(1));
  if (position < 0) return;
  let index = matching ? matching.indexOf(position) : position;
  if (index < 0) {
    byId("filters").reset();
    await search();
    index = position;
  }
  goTo(index);
}

byId("stop").addEventListener("click", () => { stopped = true; });
byId("jump").hidden = false;
byId("jump").max = about.count;
byId("jump").addEventListener("change", () => { if (byId("jump").value && count()) goTo(byId("jump").value - 1); });
begin((event) => { if (event.target.id !== "jump") filter(event); }, () => follow().catch(failed));
renew();
follow().catch(failed);
