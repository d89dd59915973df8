// A form of settings: each with its description, its value in qwen.yaml and its default. Only what differs from
// qwen.yaml is a change; changes are kept in this browser for the opened folder.

import { answered, at, element, get, setText } from "./api.js";
import { keep, kept } from "./project.js";
import { hasValue, inputOf, limits, read, show, shown } from "./setting_input.js";

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
    const sections = new URLSearchParams({ sections: this.sections.join(",") });
    const settings = await answered(() => get(`/api/settings?${sections}`));
    this.settings = settings.filter((each) => !this.without.includes(each.key));
    this.changes = Object.fromEntries(Object.entries(this.changes).filter(([key]) => this.setting(key)));
    this.draw();
  }

  // All settings with their values as they are now.
  draw() {
    const first = this.common.map((key) => this.setting(key)).filter(Boolean);
    const others = this.settings.filter((each) => !this.common.includes(each.key));
    const search = element("input", {
      type: "search", "aria-label": "Search all settings", placeholder: "search all settings",
      oninput: () => this.search(search.value),
    });
    this.others = element("div", {}, ...[...new Set(others.map((each) => each.section))].map((section) => this.part(section, others)));
    this.place.replaceChildren(
      element("div", { class: "settings" }, ...first.map((each) => this.row(each))),
      element("details", {}, element("summary", {}, `All other settings (${others.length})`), search, this.others));
  }

  // What a command gets.
  get values() { return { ...this.changes }; }

  setting(key) { return this.settings?.find((each) => each.key === key); }
  // Change these settings and no others; returns those that this form does not have.
  replace(changes) {
    const known = ({ key }) => key in changes;
    this.changes = Object.fromEntries(this.settings.filter(known).map(({ key }) => [key, changes[key]]));
    keep(`${this.page} settings`, { changes: this.changes });
    this.draw();
    return Object.keys(changes).filter((key) => !(key in this.changes));
  }

  // The value of a setting as it is now.
  value(key) { return key in this.changes ? this.changes[key] : this.setting(key)?.value; }

  // What is wrong with settings, as {key: text}, each at its own; those of other forms are not shown.
  showProblems(problems) {
    for (const { key } of this.settings) showProblem(at(`setting-${key}`), problems[key]);
  }

  // The title of a setting, with its name in qwen.yaml.
  title(key) {
    const setting = this.setting(key);
    return setting ? `${setting.title} (${key})` : key;
  }

  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of this.others.querySelectorAll(".setting")) {
      row.hidden = !words.every((word) => row.dataset.search.includes(word));
    }
    for (const part of this.others.children) part.hidden = !part.querySelector(".setting:not([hidden])");
  }

  // The settings of one section, below its title.
  part(section, settings) {
    const rows = settings.filter((each) => each.section === section).map((each) => this.row(each));
    return element("section", { "aria-label": section }, element("h4", {}, section), element("div", { class: "settings" }, ...rows));
  }

  set(key, value) {
    const setting = this.setting(key);
    if (JSON.stringify(value) === JSON.stringify(setting.value)) delete this.changes[key];
    else this.changes[key] = value;
    keep(`${this.page} settings`, { changes: this.changes });
    this.onchange(key);
  }

  row(setting) {
    const id = `setting-${setting.key}`, value = this.value(setting.key);
    const input = inputOf(setting, value, id);
    const back = element("button", {
      type: "button", class: "quiet", "aria-label": `Undo the change of ${setting.title}`,
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
      if (input.value === "") show(input, setting, this.value(setting.key)); // emptied: as by default
      back.hidden = !(setting.key in this.changes);
    });
    const notes = [limits(setting), hasValue(setting.default) && `default: ${shown(setting, setting.default)}`].filter(Boolean);
    const searched = [setting.key, setting.title, setting.description, ...setting.other_names].join(" ").toLowerCase();
    return element("div", { class: "setting", "data-search": searched },
      element("label", { for: id }, setting.title, " ", element("small", { class: "key" }, setting.key)), input, back,
      element("p", { id: `${id}-problem`, class: "problem", hidden: true }),
      element("p", { id: `${id}-about`, class: "about" }, ...withCode(setting.description),
        notes.length ? ` (${notes.join("; ")})` : ""));
  }
}

// A text whose `parts in back-ticks` are code.
const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? element("code", {}, part) : part));
