// The GPUs beside the queue: how much of their memory is in use, how busy they are, and with which jobs.

import { arrange, at, bytes, element, setText } from "./api.js";
import { loadDevices, onDevices } from "./devices.js";
import { isActive } from "./jobs.js";

let names = new Map(), rows = new Map();

onDevices(({ devices }) => { names = new Map(devices.map(({ uuid, name }) => [uuid, name])); });

// Nothing is shown where the driver cannot be asked. The names that commands take are known after seconds.
export function showGpus({ gpus, problem, jobs }) {
  at("gpus-part").hidden = !gpus.length && !problem;
  setText(at("gpus-problem"), problem);
  if (gpus.length) loadDevices().catch(() => {});
  const sorted = gpus.toSorted((a, b) => nameOf(a).localeCompare(nameOf(b), "en", { numeric: true }));
  rows = new Map(sorted.map((gpu) => [gpu.uuid, fill(rows.get(gpu.uuid) ?? newRow(), gpu, jobs)]));
  arrange(at("gpus"), [...rows.values()]);
}

const nameOf = ({ uuid, title }) => names.get(uuid) ?? title;

const newRow = () => element("li", {}, element("strong"), element("progress", { max: "1" }), element("span", { class: "muted" }));

function fill(row, gpu, jobs) {
  const { uuid, title, total, used, busy } = gpu, [head, bar, text] = row.children, name = names.get(uuid);
  const at_work = jobs.filter((job) => isActive(job) && job.devices.includes(name)).map((job) => job.title);
  setText(head, name ? `${name} ${title}` : title);
  bar.hidden = !total;
  bar.value = total ? used / total : 0;
  bar.setAttribute("aria-label", `Memory of ${nameOf(gpu)}`);
  setText(text, [
    total ? `${bytes(used)} of ${bytes(total)}` : "memory not known", busy === null ? "load not known" : `${busy} % busy`,
    at_work.length && `with ${at_work.map((each) => `“${each}”`).join(", ")}`,
  ].filter(Boolean).join(", "));
  return row;
}
