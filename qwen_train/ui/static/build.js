// The Build page: a form that is a command line, its plan, and the jobs that build, verify and inspect.

import { act, announce, answered, at, element, get, offer, post, setText, showError } from "./api.js";
import { showPlan } from "./build_plan.js";
import { CommandForm } from "./command_form.js";
import { deviceList, deviceSelect } from "./devices.js";
import { JobCards } from "./job_card.js";
import { isEnded, look, newestFirst, onJobs } from "./jobs.js";
import { chosen, kept, linkTo } from "./project.js";
import { SettingsForm } from "./settings_form.js";
import { signed } from "./token.js";

const FIELDS = { source: "data.source", model: "model.path", cache: "cache.path", format: "cache.format" };
const SHARED = ["source", "model", "cache"];
const OWN = [...Object.values(FIELDS), "cache.vae_device", "cache.text_device", "cache.reuse"];
const COMMON = [
  "data.vae_image_size", "data.resolution", "data.resize_mode", "data.on_error", "data.edit_mask", "data.trigger_word",
  "cache.dtype", "cache.text_quantization", "cache.text_offload", "cache.thumbnails",
];

// The form until it is filled.
const EMPTY = { source: "", model: "", cache: "", format: "v2", reuse: [], at: "", mode: "new", watch: 10, rehash: false };

let base, planned = null, jobs = [], shownMeasure = "";
const devices = {};
const swapped = (value) => Object.fromEntries(Object.entries(value).map(([name, key]) => [key, name]));

const settings = new SettingsForm(at("settings"), {
  sections: ["data", "cache", "model"], common: COMMON, without: OWN, onchange: changed,
});
const form = new CommandForm({
  name: "build", path: "/api/build/command", body: values, choices, values: others, settings, place: at("command"),
  fields: { ...swapped(FIELDS), "cache.reuse": "reuse", watch: "watch", at: "server" },
  buttons: ["plan", "measure", "start"],
  isUseless: (name) => name === "measure" && values().at !== "", // it would measure a server
  onanswer: showOutdated,
});

// ---- the form -------------------------------------------------------------------------------------------------------

const mode = () => at("build").elements.mode.value;

function values() {
  return {
    ...Object.fromEntries(Object.keys(FIELDS).map((name) => [name, at(name).value.trim()])),
    vae_device: devices.vae.value, text_device: devices.text.value, at: at("server").value.trim(),
    reuse: at("reuse").value.split(",").map((each) => each.trim()).filter(Boolean),
    mode: mode(), watch: Number(at("watch").value), rehash: at("rehash").checked, changes: settings.values,
  };
}

// What is as in qwen.yaml may change there, and is not kept.
function choices() {
  const now = values();
  return Object.fromEntries(SHARED.map((name) => [name, now[name] === base[name] ? "" : now[name]]));
}

function others() {
  const { changes, ...now } = values();
  const isOther = ([name, value]) => !SHARED.includes(name) && JSON.stringify(value) !== JSON.stringify(base[name]);
  return Object.fromEntries(Object.entries(now).filter(isOther));
}

// What the user has chosen in the form before it is filled.
function typed() {
  const isOther = ([name, value]) => name in EMPTY && JSON.stringify(value) !== JSON.stringify(EMPTY[name]);
  return Object.fromEntries(Object.entries(values()).filter(isOther));
}

function fill(given) {
  for (const name of Object.keys(FIELDS)) at(name).value = given[name] ?? "";
  devices.vae.set(given.vae_device);
  devices.text.set(given.text_device);
  at("server").value = given.at;
  at("reuse").value = given.reuse.join(", ");
  at("watch").value = given.watch;
  at("rehash").checked = given.rehash;
  (at(`mode-${given.mode}`) ?? at("mode-new")).checked = true;
}

function showMode() {
  at("watch-setting").hidden = mode() !== "watch";
  at("rehash-setting").hidden = mode() === "watch";
  at("own-devices").hidden = at("model").disabled = Boolean(at("server").value.trim());
}

function changed() {
  if (!settings.settings) return;
  showMode();
  form.changed();
}

// ---- the plan -------------------------------------------------------------------------------------------------------

// `made`: when it was made, in seconds, to compare with the builds since.
function show(answer, made) {
  planned = { line: answer.line, made };
  showPlan(at("plan-result"), answer);
  at("plan-place").hidden = false;
  showOutdated();
}

function showOutdated() {
  if (!planned) return;
  const isOther = planned.line !== form.line;
  const isOld = jobs.some((job) => job.kind === "build" && job.started > planned.made);
  const why = isOther ? "the form has changed since" : isOld ? "a build has run since" : "";
  at("plan-place").classList.toggle("outdated", Boolean(why));
  setText(at("plan-outdated"), why && `Outdated: ${why}. Plan again.`);
  at("plan-outdated").hidden = !why;
}

async function plan() {
  announce("planning");
  at("plan").textContent = "Planning…";
  try {
    const answer = await form.send("/api/build/plan");
    if (!answer) return;
    show(answer, answer.made);
    announce("planned");
    at("plan-title").focus();
  } finally {
    at("plan").textContent = "Plan";
  }
}

// The result of the newest measuring is the plan, once.
async function showMeasured(job) {
  if (!job || !["done", "failed"].includes(job.state) || shownMeasure === job.id) return;
  const answer = await get(`/api/build/measured/${job.id}`);
  shownMeasure = job.id;
  if (answer.plan && (!planned || planned.made < job.started)) show(answer, job.started);
}

// ---- jobs -----------------------------------------------------------------------------------------------------------

const cards = new JobCards({ extra: showBuilt });
const cacheCards = new JobCards({ extra: showFound });

// What a build says that it did, and what comes next.
async function showBuilt(job, card) {
  if (job.kind !== "build" || !["done", "stopped"].includes(job.state)) return;
  if (!card.extra.firstChild) {
    const { cache, model } = job.about, go = element("button", { type: "button" }, "Look at the cache");
    go.addEventListener("click", () => begin(go, "look", cache));
    const next = element("div", { class: "row" }, go, element("a", { href: linkTo("train", { cache, model }) }, "Train from it"));
    card.extra.append(element("p"), ...(job.state === "done" ? [next] : []));
  }
  await card.output.read(job);
  setText(card.extra.firstChild, summaryOf(card.output.log.textContent));
}

// The lines of a build that say what it did; the newest ones, if it builds again and again.
function summaryOf(output) {
  const isSaid = (line) => /^(done in |nothing to do: |.* holds \d|.* finished and kept;)/.test(line);
  return output.split("\n").filter(isSaid).slice(-4).join("\n");
}

// What was found about a cache; a page that came with the folder is not opened.
async function showFound(job, card) {
  if (!isEnded(job) || card.isFilled) return;
  if (job.kind === "inspect" && job.state === "done" && job.is_own) {
    const href = await signed(`/written/inspect/${job.about.page}`);
    card.extra.append(element("p", {}, element("a", { href, target: "_blank", rel: "noopener" }, `Open the page about ${job.about.cache}`)));
  }
  if (job.kind === "verify" && ["done", "failed"].includes(job.state)) {
    const { document: result } = await get(`/api/jobs/${job.id}/result`);
    card.extra.append(...verified(result));
  }
  card.isFilled = true;
}

function verified(result) {
  if (!result) return [];
  if (result.ok) return [element("p", { class: "ok" }, "All checksums match.")];
  const { findings } = result, repair = "A build with --repair encodes damaged samples again.";
  const line = (each) => Object.values(each).filter((part) => typeof part === "string").join(": ");
  return [
    element("p", { class: "problem" }, `Faults: ${findings.length}. ${repair}`),
    element("ul", { class: "listed" }, ...findings.slice(0, 100).map((each) => element("li", {}, line(each)))),
  ];
}

// The jobs of these kinds that have not ended, and the newest that has ended of each kind.
function shown(kinds) {
  const mine = newestFirst(jobs.filter((job) => kinds.includes(job.kind)));
  const newest = kinds.map((kind) => mine.find((job) => job.kind === kind && isEnded(job)));
  return mine.filter((job) => !isEnded(job) || newest.includes(job));
}

async function showJobs(answer) {
  jobs = answer.jobs;
  const builds = shown(["build", "measure"]), active = builds.filter((job) => !isEnded(job));
  at("no-jobs").hidden = builds.length > 0;
  at("active").hidden = !active.length;
  setText(at("active-title"), active.map((job) => `${job.title}: ${job.state}`).join(", "));
  await Promise.all([
    cards.show([[at("jobs"), builds]], answer),
    cacheCards.show([[at("cache-jobs"), shown(["inspect", "verify"])]], answer),
    showMeasured(newestFirst(jobs.filter((job) => job.kind === "measure"))[0]),
  ]);
  showOutdated();
}

// Show the card of a new job.
async function reveal(job) {
  await look();
  for (const each of [cards, cacheCards]) each.reveal(job);
}

async function start(name) {
  const job = await form.send(`/api/build/${name}`);
  if (job) await reveal(job);
}

const begin = (button, name, cache) => act(button, async () => reveal(await post(`/api/build/${name}`, { cache })));

// ---- the beginning --------------------------------------------------------------------------------------------------

const deviceChoice = (title, about) => deviceSelect(title, { several: true, about, onchange: changed });

async function open() {
  const { values: found, sources, models, caches } = await answered(() => get("/api/build"));
  const own = Object.fromEntries(Object.entries(FIELDS).map(([name, key]) => [name, found[key] ?? ""]));
  offer(at("sources"), sources);
  offer(at("models"), models);
  offer(at("caches"), caches);
  devices.vae = deviceChoice("VAE", "Encodes the images. With several devices, each encodes other samples.");
  devices.text = deviceChoice(
    "Text encoder", "Encodes prompts. Jobs with auto wait for all others; name devices to run beside them.");
  at("device-list").append(deviceList());
  at("device-choices").append(devices.vae.node, devices.text.node);
  base = {
    ...EMPTY, ...own, vae_device: found["cache.vae_device"], text_device: found["cache.text_device"],
    reuse: found["cache.reuse"],
  };
  const shared = Object.fromEntries(SHARED.map((name) => [name, chosen(name) || base[name]]));
  fill({ ...base, ...kept("build", base), ...shared, ...typed() });
  at("looked").value ||= at("cache").value;
  await settings.load();
  changed();
  await form.ask();
  onJobs(showJobs);
}

at("build").addEventListener("submit", (event) => event.preventDefault());
for (const kind of ["input", "change"]) {
  at("build").addEventListener(kind, ({ target }) => {
    if (target.id === "cache") at("looked").value = target.value;
    if (target.dataset.key || target.name === "mode" || target.id === "rehash") changed();
  });
}
for (const [name, action] of [["plan", plan], ["measure", () => start("measure")], ["start", () => start("start")]]) {
  at(name).addEventListener("click", () => form.act(name, action));
}
for (const name of ["look", "verify"]) {
  at(name).addEventListener("click", () => begin(at(name), name, at("looked").value));
}
open().catch(showError);
