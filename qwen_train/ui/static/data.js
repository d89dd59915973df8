// The Data page: a source, its rows, and what to do about them. Rows, dialog and groups are modules of their own.

import { act, announce, answered, commandLine, element, get, plural, poll, post, showError, time } from "./api.js";
import { CaptionPanel } from "./data_caption.js";
import { RowEditor } from "./data_editor.js";
import { OldVersions, changeFiles } from "./data_files.js";
import { GroupView } from "./data_groups.js";
import { RowList } from "./data_list.js";
import { ReplacePanel } from "./data_replace.js";
import { makeRow } from "./data_row.js";
import { showFound } from "./data_start.js";
import { startUploads } from "./data_upload.js";
import { choose, chosen, kept, linkTo } from "./project.js";
import { keptChanges } from "./settings_form.js";

const byId = (id) => document.getElementById(id);
const BASIC = ["kept", "problems", "left_out", "no_mask", "no_control", "no_prompt", "drafts"];
const QUICK = 300, SLOW = 3000;  // ms between two looks: while something runs, and else
const OF_BUILD = { vae_device: "", text_device: "", at: "", format: "", reuse: [] };  // what Check takes of that form
const FEW = 2;  // problems of no row that are shown at once

const address = new URLSearchParams(location.search);
const view = { filter: address.get("filter") ?? "all", search: address.get("search") ?? "", sort: address.get("sort") ?? "source" };
const drafts = new Map();  // by source: rows of two sources may have one name
let summary = null, lastSelected = null, comparing = false, lookAgain = () => {};

const query = (more = {}) => new URLSearchParams({ source: page.source, ...view, ...more });

// What rows, dialog and groups share.
const page = {
  source: "",
  view,
  get order() { return summary?.order ?? 0; },
  filterBy,
  selected: new Set(),
  get drafts() {
    if (!drafts.has(page.source)) drafts.set(page.source, new Map());
    return drafts.get(page.source);
  },
  labels: {},
  advice: {},
  groups: [],
  isEditable: false,
  whyNot: null,
  open: (index) => { list.activate(index, false); act(null, () => openAt(index)); },
  openRow: async (value) => {
    const { index } = await get(`/api/data/place?${query({ row: value.row })}`);
    if (index !== null) list.activate(index);
    editor.index = index ?? 0;
    await act(null, () => editor.show(value));
  },
  select,
  leaveOut,
  changed: () => { list.refresh(); lookAgain(); },  // what was loaded before a change is never shown after it
  // The column of images is as wide as that of the row with most of them so far, so that texts begin below each other.
  widen: (images) => {
    if (images <= page.widest) return;
    page.widest = images;
    list.place.style.setProperty("--images", images);
  },
  widest: 0,
  draftsChanged: () => { showDrafts(); for (const row of list.elements()) if (row.value) row.fill(row.value); },
  settled,
};

const list = page.list = new RowList(byId("rows"), {
  load: (start, count, signal) => !page.source ? Promise.resolve({ rows: [], total: 0 }) : get(`/api/data/rows?${query({ start, count })}`, { signal }),
  make: () => makeRow(page),
  onopen: (index) => page.open(index),
  onrange: (first, last, total) => {
    byId("range").textContent = total ? `${first.toLocaleString("en")} to ${last.toLocaleString("en")} of ${plural(total, "row")}` : "no rows";
  },
  onkey: keyed,
  onerror: showError,
});
const editor = new RowEditor(byId("editor"), page);
const groups = new GroupView(byId("groups"), page);
const replacing = new ReplacePanel(byId("replace"), page);
const captions = new CaptionPanel(byId("caption"), byId("caption-jobs"), page);
const versions = new OldVersions(page, { label: "Old versions of the whole list", change: (send, said) => changeFiles(page, send, said) });
byId("versions").append(versions.element);

// ---- the source ------------------------------------------------------------------------------------------------------

async function open(source) {
  page.source = byId("source").value = source;
  summary = null;
  page.isEditable = false;  // until that is known
  page.selected.clear();
  page.widest = 0;
  for (const panel of [replacing, captions]) if (!panel.place.hidden) panel.show(false);
  if (comparing) compare(false);
  versions.take(undefined);
  showSelection();
  showDrafts();
  list.renew();
  remember();
  showPlaces();
  if (source) await lookAgain();
  else showNothing();
}

function remember() {
  const shown = new URLSearchParams(Object.entries({ source: page.source, ...view })
    .filter(([key, value]) => value && value !== { filter: "all", sort: "source" }[key]));
  history.replaceState(null, "", `?${shown}`);
}

async function look() {
  if (!page.source) return;
  const { source } = page, fresh = await get(`/api/data?${new URLSearchParams({ source })}`).catch((error) => {
    if (source !== page.source) return null;
    if (error.status === 403 || error.status === 422) {  // as long as nothing else is opened
      page.source = "";
      showNothing();
      showPlaces();
    }
    throw error;
  });
  if (source !== page.source) return;
  const old = summary, wasEditable = page.isEditable;
  summary = fresh;
  Object.assign(page, { labels: fresh.labels, advice: fresh.advice, groups: fresh.groups, isEditable: fresh.editable, whyNot: fresh.not_editable });
  if (old && old.order !== fresh.order) { page.selected.clear(); showSelection(); list.renew(); }
  else if (!old || old.revision !== fresh.revision || old.listed !== fresh.listed || old.editable !== fresh.editable) {
    if (fresh.state === "listing" && old) list.resize(view.filter === "all" && !view.search ? fresh.listed : list.total);
    else list.refresh();
    if (old && old.revision !== fresh.revision) {
      replacing.changed();
      if (editor.isOpen && !editor.isUnsaved) editor.refresh().catch(showError);
      if (comparing) groups.refresh().catch(showError);
    }
  }
  if (editor.isOpen && !editor.isUnsaved && wasEditable !== page.isEditable) editor.renew();
  if (fresh.state === "ready" && chosen("source") !== source) choose({ source });
  showSummary();
  const isRunning = fresh.listing || fresh.check?.state === "running" || fresh.scan?.state === "running";
  clearTimeout(look.timer);
  if (isRunning && !document.hidden) look.timer = setTimeout(() => lookAgain(), QUICK);
}

// Until no listing is under way.
async function settled() {
  for (;;) {
    const { listing } = await get(`/api/data?${new URLSearchParams({ source: page.source })}`);
    if (!listing) return;
    await new Promise((resolve) => setTimeout(resolve, QUICK));
  }
}

// What is in the folder, as long as no source is open; and the way from an open one to its build.
function showPlaces() {
  const { source } = page;
  byId("opened").hidden = !source;
  byId("folder").hidden = Boolean(source);
  byId("build-this").hidden = !source;
  byId("build-this").href = linkTo("build", { source });
}

// No source is open: neither rows nor facts of another one.
function showNothing() {
  summary = null;
  list.resize(0);
  for (const id of ["about", "general"]) replace(byId(id), []);
  byId("task").hidden = byId("compare").hidden = true;
  byId("task").key = "";
  byId("filter").replaceChildren(element("option", { value: "all" }, "all rows"));
  byId("check").disabled = byId("scan").disabled = true;
  if (comparing) compare(false);
}

function showSummary() {
  const { state, listed, counts, error, check, scan, not_editable: whyNot, general, general_count: all } = summary;
  const facts = [];
  if (state === "listing") facts.push(element("span", {}, `reading the source: ${plural(listed, "row")} so far`));
  else if (state === "ready") {
    facts.push(element("b", {}, plural(listed, "row")));
    facts.push(element("span", { class: counts.problems ? "problem" : "ok" }, counts.problems ? `${plural(counts.problems, "row")} with problems` : "no problems known"));
    if (counts.left_out) facts.push(element("span", {}, `${counts.left_out.toLocaleString("en")} left out`));
    if (!check) facts.push(element("span", { class: "muted" }, "not checked: Check reads all images, with or without a model"));
    if (whyNot) facts.push(element("span", { class: "problem", title: `${whyNot.what}\n→ ${whyNot.do}` }, `can be looked at, not edited: ${whyNot.what} → ${whyNot.do}`));
  }
  replace(byId("about"), facts);
  replace(byId("general"), [
    ...error ? [problemBox({ ...error, where: error.where })] : [],
    ...all ? [element("details", { open: all <= FEW },
      element("summary", {}, `${plural(all, "problem")} that belong${all === 1 ? "s" : ""} to no row`),
      ...general.map(problemBox), all > general.length ? element("p", {}, `and ${all - general.length} more`) : null)] : [],
  ]);
  showTask(check, scan);
  showFilters();
  const { undo } = summary;
  byId("undo").hidden = !undo;
  if (undo) byId("undo").textContent = `Undo ${undo.what}`;
  for (const id of ["replacing", "captioning", "versions"]) byId(id).hidden = !page.isEditable;
  byId("check").disabled = state !== "ready" || check?.state === "running";
  byId("scan").disabled = state !== "ready" || scan?.state === "running";
}

const problemBox = ({ where, what, do: doIt }) => element("div", { class: "error" },
  element("p", { class: "problem" }, what), where ? element("p", { class: "detail" }, where) : null, doIt ? element("p", {}, `→ ${doIt}`) : null);

// Other nodes only where something has changed: what is read aloud or focused stays.
function replace(place, nodes) {
  const key = nodes.map((node) => node.outerHTML).join("");
  if (place.key === key) return;
  place.key = key;
  place.replaceChildren(...nodes);
}

const stopButton = (path) => element("button", { type: "button", onclick: (event) => act(event.target, async () => {
  await post(path, { source: page.source });
  lookAgain();
}) }, "Stop");

function showTask(check, scan) {
  const parts = [];
  if (check) {
    const count = `${check.done.toLocaleString("en")} of ${check.total.toLocaleString("en")}`;
    const left = check.unseen ? `; ${plural(check.unseen, "row")} not yet: check again` : "";
    const done = check.kept ? "checked before" : `checked in ${time(check.seconds)}`;
    const texts = { running: check.reads ? `checking, every image is read: ${count}` : "checking: the build is planned",
      done: `${[done, check.summary].filter(Boolean).join(": ")}${left}`, failed: "the check failed", stopped: "the check was stopped" };
    parts.push(element("div", { class: "task-line" },
      check.state === "running" ? element("progress", { "aria-label": "check", max: check.total || 1, value: check.reads ? check.done : null }) : null,
      element("span", { class: check.state === "failed" ? "problem" : "muted" }, texts[check.state]),
      check.state === "running" ? stopButton("/api/data/check/stop") : null));
    if (check.message) parts.push(element("pre", { class: "log", tabindex: "0", "aria-label": "what the check says" }, check.message));
    if (check.line && (check.state !== "done" || check.message)) parts.push(commandLine(check.line));
    if (check.state === "done" && check.measured.targets) parts.push(measuredLine(check));
  }
  if (scan) {
    const left = scan.total ? `${scan.done.toLocaleString("en")} of ${scan.total.toLocaleString("en")}` : "";
    const found = Object.entries(scan.found).filter(([, count]) => count);
    parts.push(element("div", { class: "task-line" },
      scan.state === "running" ? element("progress", { max: scan.total || 1, value: scan.done, "aria-label": scan.what }) : null,
      element("span", { class: scan.state === "failed" ? "problem" : "muted" },
        { running: `${scan.what}: ${left}`, done: found.length ? "found:" : "no duplicates or outliers", stopped: "stopped before the end", failed: scan.error }[scan.state]),
      scan.state === "running" ? stopButton("/api/data/scan/stop") : null,
      ...scan.state === "done" ? found.map(findingButton) : []));
  }
  const key = JSON.stringify([check && [check.state, check.message, check.summary, check.unseen, check.done, check.found], scan && [scan.state, scan.what]]);
  const place = byId("task");
  place.hidden = !parts.length;
  if (place.key === key && scan?.state === "running") {  // only the numbers move
    const progress = place.querySelector(`progress[aria-label="${scan.what}"]`);
    if (progress) { progress.max = scan.total || 1; progress.value = scan.done; progress.nextElementSibling.textContent = parts.at(-1).children[1].textContent; }
  } else if (place.key !== key) {
    place.replaceChildren(...parts);
    place.key = key;
  }
}

const findingButton = ([name, count]) => element("button", {
  type: "button", class: "quiet", title: page.labels[name], onclick: () => filterBy(name),
}, `${name.replaceAll("_", " ")} ${count.toLocaleString("en")}`);

// What was measured of the images: it may hurt a LoRA, and stops no build.
function measuredLine({ found, measured: { measured, targets, pairs } }) {
  const rows = Object.entries(found).filter(([, count]) => count), hurts = rows.some(([name]) => name !== "not_measured");
  const counts = `${plural(measured, "target")} measured, ${plural(pairs, "control")} compared`;
  const text = !measured ? "images not measured: check again" :
    hurts ? `${counts}; this may hurt a LoRA, and stops no build:` : `${counts}: none scaled up or misaligned`;
  return element("div", { class: "task-line", "aria-label": "measured", role: "group" },
    element("span", { class: "muted" }, text), ...measured || targets ? rows.map(findingButton) : []);
}

// The number of rows of each finding of the scan and of the check.
const foundRows = () => ({ ...summary.scan?.found, ...summary.check?.found });

function showFilters() {
  const select = byId("filter"), { counts, labels, scan } = summary, rows = foundRows();
  const option = (name) => [name, `${labels[name]} (${(counts[name] ?? rows[name] ?? 0).toLocaleString("en")})`];
  const found = Object.entries(rows).filter(([, count]) => count).map(([name]) => name);
  const wanted = [["all", summary.state === "ready" ? `all rows (${summary.listed.toLocaleString("en")})` : "all rows"], ...BASIC.map(option), ...found.map(option)];
  if (view.filter !== "all" && !wanted.some(([name]) => name === view.filter)) wanted.push([view.filter, labels[view.filter] ?? view.filter]);
  const known = [...select.options].map((each) => each.value);
  if (JSON.stringify(known) !== JSON.stringify(wanted.map(([name]) => name))) {
    select.replaceChildren(...wanted.map(([name]) => element("option", { value: name })));
  }
  wanted.forEach(([, label], i) => { if (select.options[i].textContent !== label) select.options[i].textContent = label; });
  select.value = view.filter;
  for (const each of byId("sort").options) if (/est$/.test(each.value) && /largest|smallest/.test(each.value)) each.disabled = scan?.state !== "done";
  byId("compare").hidden = !found.includes(view.filter);
  if (byId("compare").hidden && comparing) compare(false);
}

// ---- the view --------------------------------------------------------------------------------------------------------

function filterBy(filter) {
  view.filter = filter;
  renew();
  showFilters();
  compare(summary.groups.includes(filter) || (filter in foundRows()));
}

function renew() {
  remember();
  replacing.changed();
  lastSelected = null;
  list.renew();
  if (comparing) act(null, () => groups.show(view.filter));
}

function compare(is) {
  comparing = is;
  byId("compare").setAttribute("aria-pressed", is);
  byId("rows").hidden = byId("keys").hidden = byId("selection").hidden = is;
  byId("groups").hidden = !is;
  if (is) act(null, () => groups.show(view.filter));
  else { groups.clear(); list.measure(); }
}

let typing;
byId("open").addEventListener("submit", (event) => {
  event.preventDefault();
  act(event.submitter, () => open(byId("source").value.trim()));
});
byId("filter").addEventListener("change", (event) => { view.filter = event.target.value; renew(); showFilters(); });
byId("sort").addEventListener("change", (event) => { view.sort = event.target.value; renew(); });
byId("search").addEventListener("input", (event) => {
  clearTimeout(typing);
  typing = setTimeout(() => { view.search = event.target.value.trim(); renew(); }, 200);
});
byId("jump").addEventListener("change", (event) => act(null, async () => {
  const row = Number(event.target.value) - 1;
  if (!Number.isInteger(row) || row < 0) return;
  const { index } = await get(`/api/data/place?${query({ row })}`);
  if (index === null) { announce("that row is not among those shown"); event.target.setCustomValidity("not among the rows shown"); event.target.reportValidity(); return; }
  list.activate(index);
  list.place.focus();
}));
byId("jump").addEventListener("input", (event) => event.target.setCustomValidity(""));
byId("compare").addEventListener("click", () => compare(!comparing));
byId("check").addEventListener("click", (event) => act(event.target, async () => {
  const shared = { model: chosen("model"), cache: chosen("cache") };
  const form = { ...kept("build", OF_BUILD), ...shared, changes: keptChanges("build") }; // of the Build page
  await post("/api/data/check", { source: page.source, form });
  lookAgain();
}));
byId("scan").addEventListener("click", (event) => act(event.target, async () => {
  await post("/api/data/scan", { source: page.source });
  lookAgain();
}));

function keyed(event, active, step) {
  const isPlain = !event.ctrlKey && !event.metaKey;
  if ((event.key === "x" || event.key === " ") && isPlain) select(active, event.shiftKey);
  else if (event.key === "a" && !isPlain) act(null, selectAll);
  else if (event.key === "l" && isPlain) toggleLeftOut(active);
  else if (event.key === "e" && isPlain) act(null, () => openAt(active, true));
  else if (event.key === "r" && isPlain && page.isEditable) toggle(replacing, captions, byId("replacing"));
  else if (event.key === "z" && !isPlain && !event.shiftKey) undoLast();
  else if (event.key === "/" && isPlain) byId("search").focus();
  else if (event.key === "Escape" && page.selected.size) selectNone();
  else return Boolean(step);
  return true;
}

// ---- selecting and leaving out ---------------------------------------------------------------------------------------

// The row that the user sees at an index, if the list that is being read has another one there by now.
async function moved(index) {
  const seen = list.seen(index), now = await list.row(index);
  return seen && seen.name !== now?.name ? seen : null;
}

const rowAt = async (index) => await moved(index) ?? list.row(index);

async function openAt(index, isWriting = false) {
  const seen = await moved(index);
  await (seen ? page.openRow(seen) : editor.open(index, isWriting));
}

// The rows of the view in their order; null if the page shows others by then.
async function positions() {
  const asked = String(query()), { rows, order } = await get(`/api/data/positions?${asked}`);
  return asked === String(query()) && order === page.order ? rows : null;
}

async function select(index, isRange = false) {
  const first = isRange ? lastSelected : null, row = await rowAt(index), rows = first === null ? [] : await positions();
  if (!row || !rows || row.order !== page.order) return;
  if (first !== null) rows.slice(Math.min(first, index), Math.max(first, index) + 1).forEach((each) => page.selected.add(each));
  else if (!page.selected.delete(row.row)) page.selected.add(row.row);
  lastSelected = index;
  showSelection();
}

async function selectAll() {
  const rows = await positions();
  if (!rows) return;
  page.selected = new Set(rows);
  showSelection();
}

function selectNone() {
  page.selected.clear();
  showSelection();
  list.place.focus();
}

function showSelection() {
  const count = page.selected.size;
  byId("selected").textContent = count ? `${plural(count, "row")} selected` : "";
  byId("select-none").hidden = !count;
  replacing.changed();
  byId("leave-out").hidden = byId("put-back").hidden = !count || !page.isEditable;
  for (const row of list.elements()) row.mark();
}

function showDrafts() {
  const names = [...page.drafts.keys()];
  byId("unsaved").textContent = names.length ? `not saved: ${names.slice(0, 3).join(", ")}${names.length > 3 ? ` and ${names.length - 3} more` : ""}` : "";
}

// `order`: that of the source in which these are the numbers of the rows.
async function leaveOut(rows, isLeftOut, order) {
  try {
    await post("/api/data/left-out", { source: page.source, rows, order, left_out: isLeftOut });
    announce(`${plural(rows.length, "row")} ${isLeftOut ? "left out" : "put back"}`);
  } catch (error) {
    showError(error);
  }
  await lookAgain();
}

const leaveOutSelected = (isLeftOut) => leaveOut([...page.selected], isLeftOut, page.order);

async function toggleLeftOut(active) {
  const row = await rowAt(active);
  if (!row || !page.isEditable) return;
  await (page.selected.size ? leaveOutSelected(!row.left_out) : leaveOut([row.row], !row.left_out, row.order));
}

async function undoLast() {
  const undo = summary?.undo;
  if (!undo) { announce("there is nothing to undo"); return; }
  await act(byId("undo"), async () => {
    const { undone } = await post("/api/data/undo", { source: page.source, id: undo.id });
    announce(`undone: ${undone}`);
  });
  await lookAgain();
}

byId("undo").addEventListener("click", undoLast);
byId("replacing").addEventListener("click", () => toggle(replacing, captions, byId("replacing")));
byId("captioning").addEventListener("click", () => toggle(captions, replacing, byId("captioning")));

// Open one panel and close the other, or close it.
function toggle(panel, other, button) {
  if (!other.place.hidden) other.show(false);
  return act(null, () => panel.show(panel.place.hidden, button));
}

byId("select-all").addEventListener("click", (event) => act(event.target, selectAll));
byId("select-none").addEventListener("click", selectNone);
byId("leave-out").addEventListener("click", (event) => act(event.target, () => leaveOutSelected(true)));
byId("put-back").addEventListener("click", (event) => act(event.target, () => leaveOutSelected(false)));
addEventListener("beforeunload", (event) => {
  if ([...drafts.values()].some(({ size }) => size) || editor.isUnsaved) event.preventDefault();
});

// ---- the beginning ---------------------------------------------------------------------------------------------------

byId("search").value = view.search;
byId("sort").value = view.sort;
lookAgain = poll(look, () => SLOW);
const last = chosen("source");
if (last) open(last).catch(showError);
startUploads(open);
answered(() => get("/api/data/sources")).then(async (found) => {
  if (!last && !page.source) {
    if (byId("source").value) showPlaces();  // the user is typing another one
    else await open(found.default);
  }
  await showFound(found, open);
}).catch(showError);
addEventListener("thumbnail-broken", () => { clearTimeout(look.broken); look.broken = setTimeout(() => lookAgain(), QUICK); });
