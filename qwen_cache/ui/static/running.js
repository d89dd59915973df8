// The number of jobs at work, and whether the queue is paused, beside the Queue in the navigation of every page.

import { get, plural } from "./api.js";

const badge = document.getElementById("running");

async function count() {
  try {
    const { jobs, paused } = await get("/api/jobs");
    const running = jobs.filter((job) => job.state === "running" || job.state === "stopping").length;
    const words = [running || !paused ? String(running) : "", paused ? "paused" : ""].filter(Boolean).join(", ");
    badge.hidden = !running && !paused;
    if (badge.textContent !== words) badge.textContent = words;
    badge.setAttribute("aria-label", `${plural(running, "job")} running${paused ? ", the queue is paused" : ""}`);
  } catch {
    badge.hidden = true; // the page's own requests say why
  }
  setTimeout(count, document.hidden ? 30_000 : 3000);
}

count();
