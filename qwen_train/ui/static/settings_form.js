// A form of settings: each with its description, its value in qwen.yaml and its default. Only what differs from
// qwen.yaml is a change; changes are kept in this browser for the opened folder.

import { at, element, get, setText } from "./api.js";
import { keep, kept } from "./project.js";

// The changes that are kept of the form of a page.
export const keptChanges = (page) => kept(`${page} settings`, { changes: {} }).changes ?? {};

// Show at an input what is wrong with it, if anything; the parts of the page that it is in are opened.
export function showProblem(input, text = "") {
  const note = at(`${input.id}-problem`);
  setText(note, text);
  note.hidden = !text;
  if (!text) return input.removeAttribute("aria-invalid");
  input.setAttribute("aria-invalid", "true");
  for (let part = input.closest("details"); part; part = part.parentElement.closest("details")) part.open = true;
}

export class SettingsForm {
  // `sections`: of qwen.yaml. `common`: the settings that are shown first, in this order; the others are behind a
  // summary, except those in `without`, which the page asks for itself.
  constructor(place, { sections, common, without = [], onchange = () => {} }) {
    Object.assign(this, { place, sections, common, without, onchange, page: document.body.dataset.page });
    this.changes = keptChanges(this.page);
  }

  async load() {
    const settings = await get(`/api/settings?${new URLSearchParams({ sections: this.sections.join(",") })}`);
    this.settings = settings.filter((each) => !this.without.includes(each.key));
    const known = new Map(this.settings.map((each) => [each.key, each]));
    this.changes = Object.fromEntries(Object.entries(this.changes).filter(([key]) => known.has(key)));
    const first = this.common.map((key) => known.get(key)).filter(Boolean);
    const others = this.settings.filter((each) => !this.common.includes(each.key));
    const search = element("input", {
      type: "search", "aria-label": "Search all settings", placeholder: "search all settings",
      oninput: () => this.search(search.value),
    });
    this.others = element("div", { class: "settings" }, ...others.map((each) => this.row(each)));
    this.place.replaceChildren(
      element("div", { class: "settings" }, ...first.map((each) => this.row(each))),
      element("details", {}, element("summary", {}, `All other settings (${others.length})`), search, this.others));
    return this;
  }

  // What a command gets.
  get values() { return { ...this.changes }; }

  // The value of a setting as it is now.
  value(key) {
    return key in this.changes ? this.changes[key] : this.settings.find((each) => each.key === key)?.value;
  }

  // What is wrong with settings, as {key: text}, each at its own; those of other forms are not shown.
  showProblems(problems) {
    for (const { key } of this.settings) showProblem(at(`setting-${key}`), problems[key]);
  }

  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of this.others.children) row.hidden = !words.every((word) => row.dataset.search.includes(word));
  }

  set(key, value) {
    const setting = this.settings.find((each) => each.key === key);
    if (JSON.stringify(value) === JSON.stringify(setting.value)) delete this.changes[key];
    else this.changes[key] = value;
    keep(`${this.page} settings`, { changes: this.changes });
    this.onchange(key);
  }

  row(setting) {
    const id = `setting-${setting.key}`, value = this.value(setting.key);
    const input = control(setting, value, id);
    const back = element("button", {
      type: "button", class: "quiet", "aria-label": `Undo the change of ${setting.key}`,
      hidden: !(setting.key in this.changes),
      onclick: () => {
        show(input, setting, setting.value);
        this.set(setting.key, setting.value);
        back.hidden = true;
        input.focus();
      },
    }, "Undo");
    input.addEventListener("change", () => {
      this.set(setting.key, read(input, setting));
      back.hidden = !(setting.key in this.changes);
    });
    const note = setting.default === null || setting.default === "" ? "" : ` Default: ${text(setting.default)}.`;
    const searched = [setting.key, setting.description, ...setting.other_names].join(" ").toLowerCase();
    return element("div", { class: "setting", "data-search": searched },
      element("label", { for: id }, setting.key), input, back,
      element("p", { id: `${id}-problem`, class: "problem", hidden: true }),
      element("p", { id: `${id}-about`, class: "about" }, setting.description + note));
  }
}

const text = (value) => typeof value === "string" ? value : JSON.stringify(value ?? undefined) ?? "";

function control(setting, value, id) {
  const shared = { id, "aria-describedby": `${id}-about ${id}-problem` };
  let made;
  if (setting.kind === "choice") {
    const choices = setting.value === null || setting.default === null ? ["", ...setting.choices] : setting.choices;
    const options = choices.map((choice) => element("option", { value: choice }, choice || "(none)"));
    made = element("select", shared, ...options);
  } else if (setting.kind === "flag") made = element("input", { ...shared, type: "checkbox" });
  else {
    const inputmode = { integer: "numeric", number: "decimal" }[setting.kind] ?? "text";
    made = element("input", { ...shared, type: "text", inputmode });
  }
  show(made, setting, value);
  return made;
}

function show(input, setting, value) {
  if (setting.kind === "flag") input.checked = Boolean(value);
  else input.value = text(value);
}

// The value of a control. What is no number, list or mapping stays text: the command's own check says what is wrong.
function read(input, setting) {
  if (setting.kind === "flag") return input.checked;
  const given = input.value.trim();
  if (given === "") return setting.kind === "text" && setting.default === "" ? "" : null;
  const isNumber = setting.kind === "integer" || setting.kind === "number";
  if (isNumber) return Number.isFinite(Number(given)) ? Number(given) : given;
  if (setting.kind === "yaml" || /^[[{]/.test(given)) try { return JSON.parse(given); } catch { /* text */ }
  return given;
}
