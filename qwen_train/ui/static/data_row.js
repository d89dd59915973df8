// A row of the list: made once, filled again and again as the list scrolls.

import { element } from "./api.js";
import { drop, imageAddress, roleName, thumbnail, want } from "./data_thumbnails.js";

const MOST = 4;  // images of a row that are shown

// `page` has `source`, `selected`, `drafts`, `labels`, `isEditable`, `open(index)`, `select(index, isRange)`,
// `leaveOut(rows, is, order)`, `widen(images)`.
export function makeRow(page) {
  const box = element("input", { type: "checkbox", tabindex: "-1" });
  const number = element("span", { class: "number" });
  const images = Array.from({ length: MOST }, () => {
    const img = thumbnail(), label = element("figcaption");
    return { img, label, figure: element("figure", { hidden: true }, img, label) };
  });
  const more = element("span", { class: "more", hidden: true });
  const name = element("span", { class: "name" }), tags = element("span", { class: "tags" });
  const prompt = element("p", { class: "prompt" }), problem = element("p", { class: "problem" });
  const edit = element("button", { type: "button", tabindex: "-1" }, "Edit");
  const leave = element("button", { type: "button", tabindex: "-1" });
  const cell = (className, ...children) => element("div", { class: className, role: "gridcell" }, ...children);
  const row = element("div", { role: "row", class: "data-row" },
    cell("choose", box, number),
    cell("thumbnails", ...images.map((each) => each.figure), more),
    cell("text", element("p", { class: "head" }, name, tags), prompt, problem),
    cell("actions", edit, leave));

  box.addEventListener("click", (event) => { event.stopPropagation(); page.select(row.index, event.shiftKey); });
  edit.addEventListener("click", (event) => { event.stopPropagation(); page.open(row.index); });
  leave.addEventListener("click", (event) => { event.stopPropagation(); if (row.value) page.leaveOut([row.value.row], !row.value.left_out, row.value.order); });
  row.addEventListener("click", (event) => { if (!event.target.closest(".choose, .actions") && row.value) page.open(row.index); });

  row.empty = () => {
    row.value = row.json = null;
    row.classList.add("waiting");
    row.classList.remove("left-out", "has-problem");
    for (const { img, figure } of images) { drop(img); figure.hidden = true; }
    more.hidden = true;
    number.textContent = name.textContent = prompt.textContent = problem.textContent = "";
    tags.replaceChildren();
    leave.textContent = "Leave out";
    box.checked = false;
    row.removeAttribute("aria-label");
  };

  row.mark = () => {
    if (!row.value) return;
    const isSelected = page.selected.has(row.value.row);
    box.checked = isSelected;
    row.setAttribute("aria-selected", isSelected);
    row.classList.toggle("selected", isSelected);
  };

  row.fill = (value) => {
    const json = JSON.stringify([value, page.isEditable, page.drafts.has(value.name)]);
    row.value = value;
    row.mark();
    if (json === row.json) return;
    row.json = json;
    row.classList.remove("waiting");
    row.classList.toggle("left-out", value.left_out);
    row.classList.toggle("has-problem", value.problems.length > 0);
    number.textContent = (value.row + 1).toLocaleString("en");
    name.textContent = value.name;
    name.title = value.where;
    const [first, ...others] = value.prompts;
    prompt.textContent = (first || "(no prompt)") + (others.length ? `  (and ${others.length} more)` : "");
    const [what] = value.problems;
    const further = value.problems.length > 1 ? ` (and ${value.problems.length - 1} more)` : "";
    problem.textContent = what ? `⚠ ${what.what}${further} → ${what.do}` : "";
    problem.title = what ? `${what.what}\n→ ${what.do}` : "";
    tags.replaceChildren(...[
      value.left_out ? "left out" : null,
      value.draft ? "draft" : null,
      page.drafts.has(value.name) ? "not saved" : null,
      value.changed ? "changed since the check" : null,
      ...value.findings.map((finding) => finding.replaceAll("_", " ")),
    ].filter(Boolean).map((text) => element("span", { class: "tag" }, text)));
    box.setAttribute("aria-label", `Select ${value.name}`);
    edit.textContent = page.isEditable ? "Edit" : "Look";
    edit.setAttribute("aria-label", `${edit.textContent} ${value.name}`);
    leave.textContent = value.left_out ? "Put back" : "Leave out";
    leave.setAttribute("aria-label", `${leave.textContent} ${value.name}`);
    leave.hidden = !page.isEditable;
    images.forEach(({ img, label, figure }, i) => {
      const image = value.images[i];
      figure.hidden = !image;
      if (!image) { drop(img); return; }
      label.textContent = roleName(image.role);
      img.alt = roleName(image.role);
      want(img, imageAddress(page.source, value.row, image.role, "thumbnail", image.v));
    });
    page.widen(Math.min(value.images.length, MOST));
    more.hidden = value.images.length <= MOST;
    more.textContent = `+${value.images.length - MOST}`;
    row.setAttribute("aria-label", [`row ${value.row + 1}`, value.name, value.left_out ? "left out" : "", prompt.textContent,
      what ? `problem: ${what.what}` : ""].filter(Boolean).join(", "));
  };
  return row;
}
