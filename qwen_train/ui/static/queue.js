// The Queue page: the GPUs, all jobs in four lists, the pause, and jobs from files.

import { act, ApiError, announce, at, element, get, post, setText } from "./api.js";
import { showGpus } from "./gpus.js";
import { JobCards } from "./job_card.js";
import { isActive, isEnded, look, onJobs } from "./jobs.js";

const FEW = 20; // ended jobs that are shown at first
let answer = { jobs: [], held: [], paused: false, gpus: [], problem: "" }, waiting = [], showsAll = false;

const cards = new JobCards({
  tag: "li",
  offers: (job) => [...job.can.flatMap((name) => name === "move" ? ["up", "down"] : [name]), "export"],
  blocked: (job) => [job === waiting[0] && "up", job === waiting.at(-1) && "down"],
  extra: (job, card) => job.state === "held" ? showPaths(job, card) : showResult(job, card),
});

// The command of a job from elsewhere, and the paths in it, which may be others on this machine.
function showPaths(job, card) {
  const text = ({ path, is_here: isHere }) =>
    `${path}: ${isHere === null ? "an address" : isHere ? "is here" : "is not here"}`;
  const lines = job.paths.map(text), shown = lines.join("\n");
  if (card.shownPaths === shown) return;
  if (card.shownPaths === undefined) for (const part of card.node.querySelectorAll("details")) part.open = !part.querySelector(".log");
  card.shownPaths = shown;
  card.extra.replaceChildren(...(lines.length ? [
    element("p", {}, "Paths in the command:"), element("ul", { class: "paths" }, ...lines.map((line) => element("li", {}, line))),
  ] : []));
}

// What a job has printed on stdout, once it has ended.
function showResult(job, card) {
  if (!isEnded(job) || card.result) return;
  const said = element("pre", { class: "log", tabindex: "0", role: "region", "aria-label": `result of ${job.title}` });
  const read = () => act(null, async () => {
    if (said.textContent) return;
    const { document: found, text } = await get(`/api/jobs/${job.id}/result`);
    said.textContent = (text ?? JSON.stringify(found, null, 1)) || "It printed nothing.";
  });
  card.result = element("details", { ontoggle: read }, element("summary", {}, "Result"), said);
  card.node.append(card.result);
}

function show() {
  const { jobs, held, paused } = answer, ended = jobs.filter(isEnded);
  at("is-paused").hidden = !paused;
  setText(at("pause"), paused ? "Resume the queue" : "Pause the queue");
  waiting = jobs.filter((job) => job.state === "queued");
  const lists = { held, active: jobs.filter(isActive), queued: waiting, ended: showsAll ? ended : ended.slice(0, FEW) };
  at("held-part").hidden = !held.length;
  for (const name of ["active", "queued", "ended"]) at(`no-${name}`).hidden = lists[name].length > 0;
  showGpus(answer);
  at("more").hidden = showsAll || ended.length <= FEW;
  return cards.show(Object.entries(lists).map(([name, shown]) => [at(name), shown]), answer);
}

at("pause").addEventListener("click", () => act(null, async () => {
  const { paused } = await post(`/api/queue/${answer.paused ? "resume" : "pause"}`);
  announce(paused ? "The queue is paused" : "The queue continues");
  await look();
}));
at("more").addEventListener("click", () => { showsAll = true; show(); at("ended-title").focus(); });
at("import").addEventListener("change", (event) => act(at("import"), async () => {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  const job = await post("/api/jobs/import", await jobIn(file));
  await look();
  announce(`${job.title}: read its command, and press Run`);
  cards.reveal(job);
  cards.focus(job);
}));

// The JSON of a file; the program checks what is in it.
async function jobIn(file) {
  try {
    if (file.size <= 1e7) return JSON.parse(await file.text());
  } catch { /* no JSON */ }
  throw new ApiError(0, { error: `${file.name} is no file of a job`, do: "choose one that Export has saved" });
}
onJobs((given) => { answer = given; return show(); });
