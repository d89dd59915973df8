// The number of jobs at work, beside the Queue in the navigation of every page.

import { get, plural } from "./api.js";

const badge = document.getElementById("running");

async function count() {
  try {
    const { jobs } = await get("/api/jobs");
    const running = jobs.filter((job) => job.state === "running" || job.state === "stopping").length;
    badge.hidden = !running;
    if (badge.textContent !== String(running)) badge.textContent = running;
    badge.setAttribute("aria-label", `${plural(running, "job")} running`);
  } catch {
    badge.hidden = true; // the page's own requests say why
  }
  setTimeout(count, document.hidden ? 30_000 : 3000);
}

count();
