// A plan of a build, as `build --dry-run --json` gives it: what is to encode and why, what it costs, what is refused.

import { bytes, commandLine, element, plural, time } from "./api.js";

const number = (count) => count.toLocaleString("en");

// The nodes that show the answer of the plan's route.
export function showPlan(place, { plan, message, source }) {
  if (!plan) {
    place.replaceChildren(element("p", { class: "problem" }, "This cannot be planned."), element("pre", {}, message || "no reason was given"));
    return;
  }
  place.replaceChildren(...parts(plan, source));
  if (plan.validation) place.append(element("h3", {}, "The cache of validation images"), ...parts(plan.validation));
}

function parts(plan, source = null) {
  const shown = [why(plan), sizes(plan), disk(plan), memory(plan), problems(plan, source)].filter((each) => each.length);
  return [...refused(plan), facts(plan), element("div", { class: "plan-parts" }, ...shown.map((each) => element("div", {}, ...each))), ...samples(plan)];
}

const hasWork = (plan) => plan.to_encode + plan.to_copy + plan.kept + plan.new_masks + plan.lengths.removed > 0;

function facts(plan) {
  const counts = [
    ["to encode", plan.to_encode], ["cached", plan.cached], ["to copy", plan.to_copy], ["kept from an interrupted build", plan.kept],
    ["with only a new mask", plan.new_masks], ["of which only the text is encoded", plan.text_only], ["removed from the source", plan.lengths.removed],
    ["left out in the source", plan.left_out], ["rows that repeat another", plan.repeated], ["damaged shards", plan.damaged_shards?.length],
  ].filter(([label, count]) => count || label === "to encode" || label === "cached");
  const cells = counts.map(([label, count]) => element("li", {}, element("b", {}, number(count ?? 0)), label));
  if (plan.seconds) cells.push(element("li", {}, element("b", {}, plan.seconds < 1 ? "under 1 s" : time(plan.seconds)), "estimated, without loading the encoders"));
  const nothing = hasWork(plan) || plan.refused?.length ? null : element("p", { class: "ok" }, "Nothing to do: the cache already holds this source.");
  return element("div", {}, nothing, element("ul", { class: "facts-grid" }, ...cells));
}

function refused(plan) {
  return (plan.refused ?? []).map((each) => element("div", { class: "error" },
    element("p", {}, `This build would be refused: ${each.what}`), each.do ? element("p", { class: "do" }, `→ ${each.do}`) : null,
    ...(each.commands ?? []).map((line, at) => commandLine(line.replace(" --dry-run --json", "").replace(" --measure", ""), `way ${at + 1}`))));
}

function why(plan) {
  const reasons = Object.entries(plan.reasons ?? {});
  return reasons.length ? [element("h3", {}, "Why"), bars(reasons)] : [];
}

function sizes(plan) {
  const sorted = [...(plan.target_sizes ?? [])].sort((a, b) => b.samples - a.samples);
  if (!sorted.length) return [];
  const more = plan.lengths.target_sizes - sorted.length;
  const shown = sorted.slice(0, 12), left = sorted.length - shown.length + more;
  return [element("h3", {}, "Target sizes"), bars(shown.map((size) => [`${size.width} × ${size.height}`, size.samples])),
    left > 0 ? element("p", { class: "muted" }, `and ${plural(left, "other size")}`) : null].filter(Boolean);
}

// A bar for each [label, count]. Text says the same as every bar.
function bars(rows) {
  const most = Math.max(...rows.map(([, count]) => count));
  return element("div", { class: "chart" }, ...rows.flatMap(([label, count]) =>
    [element("span", {}, label), bar(count / most), element("span", {}, number(count))]));
}

// A bar of a share; without one, if that is not known.
function bar(share, isOver = false) {
  if (share === null) return element("span");
  const part = element("i", { class: isOver ? "over" : null });
  part.style.width = `${Math.min(100, 100 * share)}%`;
  return element("div", { class: "track", "aria-hidden": "true" }, part);
}

function disk(plan) {
  if (!plan.bytes_to_write) return [];
  const { bytes_to_write: needed, bytes_free: free } = plan;
  const text = free === null ? `${bytes(needed)} to write, free space unknown` : `${bytes(needed)} to write, ${bytes(free)} free`;
  return [element("h3", {}, "Disk"), element("div", { class: "chart wide" },
    element("span", {}, "cache"), bar(free === null ? null : needed / Math.max(free, 1), free !== null && needed > free), element("span", {}, text))];
}

function memory(plan) {
  if (!plan.memory?.length) return [];
  const rows = plan.memory.flatMap((each) => {
    const isOver = each.fits === false;
    const text = [
      `${bytes(each.needed)} needed` + (each.capacity ? ` of ${bytes(each.capacity)}` : ""),
      each.host ? `${bytes(each.host)} of weights wait in host memory` : "",
      isOver ? "this may not fit" + each.savings.map(({ set, needed }) => `; ${set} needs ${bytes(needed)}`).join("") : "",
    ].filter(Boolean).join(", ");
    return [element("span", {}, each.device), bar(each.capacity ? each.needed / each.capacity : null, isOver), element("span", { class: isOver ? "problem" : null }, text)];
  });
  return [element("h3", {}, "Memory"), element("div", { class: "chart wide" }, ...rows)];
}

function problems(plan, source) {
  const count = plan.lengths.problems;
  if (!count) return [];
  const rest = count - plan.problems.length;
  return [element("h3", {}, `Unusable samples: ${number(count)}`),
    source && element("p", {}, element("a", { href: `/data?${new URLSearchParams({ source, filter: "problems" })}` }, "See them on the Data page")),
    element("details", {}, element("summary", {}, "List"), element("ul", { class: "listed" },
      ...plan.problems.map((each) => element("li", {}, `${each.where}: ${each.what}`, each.do ? element("span", { class: "muted" }, ` → ${each.do}`) : null)),
      rest > 0 ? element("li", {}, `and ${number(rest)} more`) : null))].filter(Boolean);
}

function samples(plan) {
  const count = plan.lengths.samples;
  if (!count) return [];
  const rest = count - plan.samples.length;
  return [element("details", {}, element("summary", {}, `Samples with work (${number(count)})`), element("ul", { class: "listed" },
    ...plan.samples.map((each) => element("li", {}, `${each.name}: ${each.work}, ${each.reasons.join(", ")}`)),
    rest > 0 ? element("li", {}, `and ${number(rest)} more`) : null))];
}
