// The jobs of the folder, which one poll asks for on behalf of all parts of a page; and how many of them are at work,
// beside the Queue in the navigation.

import { at, get, plural, poll, setText } from "./api.js";

const listeners = [];

export const isActive = (job) => job.state === "running" || job.state === "stopping";
export const isEnded = (job) => !isActive(job) && job.state !== "queued" && job.state !== "held";
export const newestFirst = (jobs) => jobs.toSorted((a, b) => b.created - a.created);

// Call `listener` with {jobs, held, paused, gpus, problem} at each look; the next look waits for what it does. The jobs
// are those that are active, then those that are queued, in their order, then those that have ended. Held are those from
// elsewhere that the user has not run.
export function onJobs(listener) {
  listeners.push(listener);
  look();
}

// Look now: who waits for it finds the page as the jobs are. The number alone is looked at less often.
export const look = poll(async () => {
  try {
    const answer = await get("/api/jobs");
    showNumber(answer);
    await Promise.all(listeners.map((listener) => listener(answer)));
  } catch (error) {
    if (error.status === 0) showNumber({ jobs: [], paused: false });
    throw error;
  }
}, () => (listeners.length ? 1000 : 3000));

function showNumber({ jobs, paused }) {
  const badge = at("running"), running = jobs.filter(isActive).length;
  badge.hidden = !running && !paused;
  setText(badge, [running || !paused ? String(running) : "", paused ? "paused" : ""].filter(Boolean).join(", "));
  badge.setAttribute("aria-label", `${plural(running, "job")} running${paused ? ", the queue is paused" : ""}`);
}
