// The Queue page: all jobs in three lists, and the pause.

import { act, announce, at, element, get, post, setText } from "./api.js";
import { JobCards } from "./job_card.js";
import { isActive, isEnded, look, onJobs } from "./jobs.js";

const FEW = 20; // ended jobs that are shown at first
let answer = { jobs: [], paused: false }, waiting = [], showsAll = false;

const cards = new JobCards({
  tag: "li",
  offers: (job) => job.can.flatMap((name) => name === "move" ? ["up", "down"] : [name]),
  blocked: (job) => [job === waiting[0] && "up", job === waiting.at(-1) && "down"],
  extra: showResult,
});

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
  const { jobs, paused } = answer, ended = jobs.filter(isEnded);
  at("is-paused").hidden = !paused;
  setText(at("pause"), paused ? "Resume the queue" : "Pause the queue");
  waiting = jobs.filter((job) => job.state === "queued");
  const lists = { active: jobs.filter(isActive), queued: waiting, ended: showsAll ? ended : ended.slice(0, FEW) };
  for (const [name, shown] of Object.entries(lists)) at(`no-${name}`).hidden = shown.length > 0;
  at("more").hidden = showsAll || ended.length <= FEW;
  return cards.show(Object.entries(lists).map(([name, shown]) => [at(name), shown]), answer);
}

at("pause").addEventListener("click", () => act(null, async () => {
  const { paused } = await post(`/api/queue/${answer.paused ? "resume" : "pause"}`);
  announce(paused ? "The queue is paused" : "The queue continues");
  await look();
}));
at("more").addEventListener("click", () => { showsAll = true; show(); at("ended-title").focus(); });
onJobs((given) => { answer = given; return show(); });
