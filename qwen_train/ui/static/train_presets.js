// Presets: settings to begin with. The chosen one says what it would change, and only then changes it.

import { announce, element, get, newest } from "./api.js";
import { shown } from "./setting_input.js";

export class Presets {
  // `settings`: the SettingsForm. `apply(changes)` sets them in it.
  constructor(place, { settings, apply }) {
    Object.assign(this, { settings, apply, found: [], before: {}, applied: {} });
    this.select = element("select", { id: "preset", "aria-describedby": "preset-about", onchange: () => this.show() });
    this.about = element("div", { id: "preset-about" });
    this.use = element("button", { type: "button", onclick: () => this.change() });
    this.undo = element("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.takeBack() }, "Undo");
    place.replaceChildren(element("div", { class: "row" }, element("label", {}, "Presets", this.select), this.use, this.undo), this.about);
    // Those for a model.
    this.load = newest((model) => get(`/api/train/presets?${new URLSearchParams({ model })}`), (found) => this.take(found));
  }

  take(found) {
    this.found = found;
    const groups = [...new Set(this.found.map(({ group }) => group))], kept = this.select.value;
    const options = (group) => this.found.filter((each) => each.group === group)
      .map(({ name }) => element("option", { value: name }, name));
    this.select.replaceChildren(element("option", { value: "" }, "none"),
      ...groups.map((group) => element("optgroup", { label: group }, ...options(group))));
    this.select.value = this.chosen(kept) ? kept : "";
    this.show();
  }

  chosen(name = this.select.value) { return this.found.find((each) => each.name === name); }

  // The settings of the chosen preset that are other ones now.
  get changes() {
    const isOther = ({ key, value }) => JSON.stringify(this.settings.value(key)) !== JSON.stringify(value);
    return (this.chosen()?.settings ?? []).filter(isOther);
  }

  show() {
    const preset = this.chosen(), { changes } = this;
    this.use.hidden = !changes.length;
    this.use.textContent = changes.length === 1 ? "Change this setting" : `Change these ${changes.length} settings`;
    const lines = changes.map(({ key, title, value }) => element("li", {}, `${title}: ${this.text(key, this.settings.value(key))} → `,
      element("b", {}, this.text(key, value)), " ", element("small", { class: "key" }, key)));
    this.about.replaceChildren(...(preset ? [element("p", { class: "about" }, preset.about),
      lines.length ? element("ul", {}, ...lines) : element("p", { class: "about" }, "The settings are those of this preset.")] : []));
  }

  text(key, value) { return shown(this.settings.setting(key), value) || "not set"; }

  change() {
    const { changes } = this, preset = this.chosen();
    const applied = Object.fromEntries(changes.map(({ key, value }) => [key, value]));
    const before = Object.fromEntries(changes.map(({ key }) => [key, this.settings.value(key)]));
    this.before = { ...before, ...this.before }; // of several presets, what was before the first one
    Object.assign(this.applied, applied);
    this.apply(applied);
    this.undo.hidden = false;
    this.undo.setAttribute("aria-label", "Undo the presets");
    this.undo.focus();
    announce(`preset ${preset.name}: ${changes.length} settings changed`);
  }

  // Settings that were changed since are left as they are.
  takeBack() {
    const isAsApplied = ([key]) => JSON.stringify(this.settings.value(key)) === JSON.stringify(this.applied[key]);
    this.apply(Object.fromEntries(Object.entries(this.before).filter(isAsApplied)));
    this.forget();
    this.select.focus();
    announce("the settings are as before the presets, but for those that you changed since");
  }

  // The form was filled again: nothing to undo.
  forget() {
    Object.assign(this, { before: {}, applied: {} });
    this.undo.hidden = true;
  }
}
