// The Build page: a form that is a command line, its plan, and the jobs that build, verify and inspect.

import { act, announce, clearError, commandLine, element, get, keptAs, poll, post, showError } from "./api.js";
import { isActive, JobCards, setText } from "./build_jobs.js";
import { showPlan } from "./build_plan.js";
import { deviceList, deviceSelect } from "./devices.js";
import { keepAt, keptAt } from "./kept.js";
import { SettingsForm } from "./settings_form.js";
import { signed } from "./token.js";

const at = (id) => document.getElementById(id);
const KEEP = keptAs("build"), PAUSE = 300; // milliseconds without a key, before the command is asked for
const FIELDS = { source: "data.source", model: "model.path", cache: "cache.path", format: "cache.format" };
const OWN = [...Object.values(FIELDS), "cache.vae_device", "cache.text_device", "cache.reuse"];
const COMMON = [
  "data.vae_image_size", "data.resolution", "data.resize_mode", "data.on_error", "data.edit_mask", "data.trigger_word",
  "cache.dtype", "cache.text_quantization", "cache.text_offload", "cache.thumbnails",
];

let base, line = "", timer, asked = 0, planned = null, jobs = [], shownMeasure = "";
const devices = {};
const BUTTONS = ["plan", "measure", "start"];

// Whether a button has nothing to do: there is no command, or it would measure a server.
const isUseless = (name) => !line || (name === "measure" && form().at !== "");

const settings = new SettingsForm(at("settings"), { sections: ["data", "cache", "model"], common: COMMON, without: OWN, onchange: changed });

// ---- the form ----------------------------------------------------------------------------------------------------

const mode = () => at("build").elements.mode.value;

function form() {
  return {
    ...Object.fromEntries(Object.keys(FIELDS).map((name) => [name, at(name).value.trim()])),
    vae_device: devices.vae.value, text_device: devices.text.value, at: at("server").value.trim(),
    reuse: at("reuse").value.split(",").map((each) => each.trim()).filter(Boolean),
    mode: mode(), watch: Number(at("watch").value), rehash: at("rehash").checked, changes: settings.values,
  };
}

// What differs from qwen.yaml is kept in this browser.
function keep() {
  const { changes, ...now } = form();
  const values = Object.entries(now).filter(([name, value]) => JSON.stringify(value) !== JSON.stringify(base[name]));
  keepAt(KEEP, Object.fromEntries(values));
}

function fill(values) {
  for (const name of Object.keys(FIELDS)) at(name).value = values[name] ?? "";
  devices.vae.set(values.vae_device);
  devices.text.set(values.text_device);
  at("server").value = values.at;
  at("reuse").value = values.reuse.join(", ");
  at("watch").value = values.watch;
  at("rehash").checked = values.rehash;
  at(`mode-${values.mode}`).checked = true;
}

function showMode() {
  at("watch-setting").hidden = mode() !== "watch";
  at("rehash-setting").hidden = mode() === "watch";
  at("own-devices").hidden = at("model").disabled = Boolean(at("server").value.trim());
}

function changed() {
  if (!base) return;
  showMode();
  keep();
  clearTimeout(timer);
  timer = setTimeout(() => ask().catch(showError), PAUSE);
}

// ---- the command -------------------------------------------------------------------------------------------------

async function ask() {
  const number = (asked += 1);
  const answer = await post("/api/build/command", form());
  if (number !== asked) return; // a newer question
  if (answer.line !== line || !at("command").firstChild) {
    line = answer.line;
    at("command").replaceChildren(line ? commandLine(line) : element("p", { class: "muted" }, "No command yet: see below what is missing."));
  }
  showProblems(answer.problems);
  for (const name of BUTTONS) at(name).disabled = isUseless(name);
  showOutdated();
}

function showProblems(problems) {
  const texts = {};
  for (const each of problems) texts[each.key] ??= text(each);
  for (const [key, id] of Object.entries({ ...swapped(FIELDS), "cache.reuse": "reuse", watch: "watch", at: "server" })) {
    const note = at(`${id}-problem`);
    note.textContent = texts[key] ?? "";
    note.hidden = !(key in texts);
    if (key in texts) at(id).setAttribute("aria-invalid", "true");
    else at(id).removeAttribute("aria-invalid");
  }
  settings.showProblems(Object.fromEntries(Object.entries(texts).filter(([key]) => !OWN.includes(key))));
  const lines = problems.map((each) => [each.key, text(each)].filter(Boolean).join(": "));
  const list = at("problems");
  if (list.dataset.shown === lines.join("\n")) return;
  list.dataset.shown = lines.join("\n");
  list.hidden = !lines.length;
  list.replaceChildren(...(lines.length ? [element("ul", {}, ...lines.map((each) => element("li", {}, each)))] : []));
}

const swapped = (value) => Object.fromEntries(Object.entries(value).map(([name, key]) => [key, name]));

const text = (problem) => [problem.what, problem.expected && `expected ${problem.expected}`, problem.found && `found ${problem.found}`,
  problem.do && `→ ${problem.do}`].filter(Boolean).join(", ").replace(", →", " →");

// The command of the form as it is now, before a button uses it.
async function settled() {
  clearTimeout(timer);
  await ask();
  return form();
}

// ---- the plan ----------------------------------------------------------------------------------------------------

// `made`: when it was made, in seconds, to compare with the builds since.
function show(answer, made) {
  planned = { line: answer.line, made };
  showPlan(at("plan-result"), answer);
  at("plan-place").hidden = false;
  showOutdated();
}

function showOutdated() {
  if (!planned) return;
  const isOther = planned.line !== line;
  const isOld = jobs.some((job) => job.kind === "build" && job.started > planned.made);
  const words = isOther ? "Outdated: the form has changed since. Plan again." : isOld ? "Outdated: a build has run since. Plan again." : "";
  at("plan-place").classList.toggle("outdated", Boolean(words));
  setText(at("plan-outdated"), words);
  at("plan-outdated").hidden = !words;
}

async function plan() {
  const given = await settled();
  if (!line) return;
  announce("planning");
  at("plan").textContent = "Planning…";
  try {
    const answer = await post("/api/build/plan", given);
    show(answer, answer.made);
    announce("planned");
    at("plan-title").focus();
  } finally {
    at("plan").textContent = "Plan";
  }
}

async function start(name) {
  const given = await settled();
  if (!line) return;
  const job = await post(`/api/build/${name}`, given);
  announce(`${job.title}: ${job.state}`);
  await look();
  document.querySelector(`[data-job="${job.id}"]`)?.scrollIntoView({ block: "nearest" });
}

// The result of the newest measuring is the plan, once.
async function showMeasured(job) {
  if (!job || job.state !== "done" && job.state !== "failed" || shownMeasure === job.id) return;
  shownMeasure = job.id;
  const answer = await get(`/api/build/measured/${job.id}`);
  if (answer.plan && (!planned || planned.made < job.started)) show(answer, job.started);
}

// ---- jobs --------------------------------------------------------------------------------------------------------

const cards = new JobCards(at("jobs"), { onchange: () => now(), links: buildLinks });
const cacheCards = new JobCards(at("cache-jobs"), { onchange: () => now(), again: "Again", links: cacheLinks });

function buildLinks(job, card) {
  if (job.state !== "done" || card.extra.firstChild || job.kind !== "build") return;
  const go = element("button", { type: "button", onclick: () => act(go, () => begin("look", job.about.cache)) }, "Look at the cache");
  card.extra.append(element("div", { class: "row" }, go, element("a", { href: "/train" }, "Train from it")));
}

async function cacheLinks(job, card) {
  if (job.kind === "inspect" && job.state === "done" && job.is_own && !card.extra.firstChild) { // no page that came with the folder
    const link = element("a", { target: "_blank", rel: "noopener" }, `Open the page about ${job.about.cache}`);
    card.extra.append(element("p", {}, link));
    link.href = await signed(`/written/inspect/${job.about.page}`);
  }
  if (job.kind === "verify" && ["done", "failed"].includes(job.state) && !card.extra.firstChild) {
    card.extra.append(element("p", {}, "…"));
    const { document: result } = await get(`/api/jobs/${job.id}/result`);
    card.extra.replaceChildren(...verified(result));
  }
}

function verified(result) {
  if (!result) return [];
  if (result.ok) return [element("p", { class: "ok" }, "All checksums match.")];
  return [element("p", { class: "problem" }, `Faults: ${result.findings.length}. A build with --repair encodes damaged samples again.`),
    element("ul", { class: "listed" }, ...result.findings.slice(0, 100).map((each) => element("li", {}, Object.values(each).filter((part) => typeof part === "string").join(": "))))];
}

// The active jobs of these kinds, and the newest that has ended of each kind.
function shown(kinds) {
  const mine = jobs.filter((job) => kinds.includes(job.kind));
  const newest = kinds.map((kind) => mine.filter((job) => job.kind === kind && !isActive(job)).sort((a, b) => b.created - a.created)[0]);
  return mine.filter((job) => isActive(job) || newest.includes(job)).sort((a, b) => b.created - a.created);
}

async function look() {
  const answer = await get("/api/jobs");
  jobs = answer.jobs;
  const builds = shown(["build", "measure"]);
  cards.show(builds, jobs, answer.paused);
  at("no-jobs").hidden = builds.length > 0;
  const active = builds.filter(isActive);
  at("active").hidden = !active.length;
  setText(at("active-title"), active.map((job) => `${job.title}: ${job.state}`).join(", "));
  cacheCards.show(shown(["inspect", "verify"]), jobs, answer.paused);
  await showMeasured(jobs.filter((job) => job.kind === "measure").sort((a, b) => b.created - a.created)[0]);
  showOutdated();
}

async function begin(name, cache) {
  const job = await post(`/api/build/${name}`, { cache });
  announce(`${job.title}: ${job.state}`);
  await look();
  document.querySelector(`[data-job="${job.id}"]`)?.scrollIntoView({ block: "nearest" });
}

// ---- the beginning -----------------------------------------------------------------------------------------------

let now = () => {};

async function open() {
  const { values, models, caches } = await get("/api/build");
  base = {
    ...Object.fromEntries(Object.entries(FIELDS).map(([name, key]) => [name, values[key] ?? ""])),
    vae_device: values["cache.vae_device"], text_device: values["cache.text_device"], reuse: values["cache.reuse"],
    at: "", mode: "new", watch: 10, rehash: false,
  };
  at("models").replaceChildren(...models.map((name) => element("option", { value: name })));
  at("caches").replaceChildren(...caches.map((name) => element("option", { value: name })));
  devices.vae = deviceSelect("VAE", { several: true, about: "Encodes the images. With several devices, each encodes other samples.", onchange: changed });
  devices.text = deviceSelect("Text encoder", { several: true, about: "Encodes prompts. Jobs with auto wait for all others; name devices to run beside them.", onchange: changed });
  at("device-list").append(deviceList());
  at("device-choices").append(devices.vae.node, devices.text.node);
  const given = new URLSearchParams(location.search).get("source");
  fill({ ...base, ...keptAt(KEEP), ...(given ? { source: given } : {}) });
  at("looked").value = at("cache").value;
  await settings.load();
  showMode();
  at("build").addEventListener("submit", (event) => event.preventDefault());
  for (const kind of ["input", "change"]) {
    at("build").addEventListener(kind, (event) => {
      if (event.target.id === "cache") at("looked").value = event.target.value;
      if (event.target.dataset.key || event.target.name === "mode" || event.target.id === "rehash") changed();
    });
  }
  for (const [name, action] of [["plan", plan], ["measure", () => start("measure")], ["start", () => start("start")]]) {
    at(name).addEventListener("click", () => act(at(name), action).then(() => { at(name).disabled = isUseless(name); }));
  }
  for (const name of ["look", "verify"]) at(name).addEventListener("click", () => act(at(name), () => begin(name, at("looked").value)));
  await ask();
  now = poll(look);
}

open().then(clearError, showError);
