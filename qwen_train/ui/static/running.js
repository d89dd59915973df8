// The number of jobs at work, and whether the queue is paused, beside the Queue in the navigation of every page.

import { get, plural, poll } from "./api.js";

const badge = document.getElementById("running");

function show(running, isPaused) {
  const words = [running || !isPaused ? String(running) : "", isPaused ? "paused" : ""].filter(Boolean).join(", ");
  badge.hidden = !running && !isPaused;
  if (badge.textContent !== words) badge.textContent = words;
  badge.setAttribute("aria-label", `${plural(running, "job")} running${isPaused ? ", the queue is paused" : ""}`);
}

poll(async () => {
  try {
    const { jobs, paused } = await get("/api/jobs");
    show(jobs.filter((job) => job.state === "running" || job.state === "stopping").length, paused);
  } catch {
    show(0, false);
  }
}, 3000);
