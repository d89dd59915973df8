// Find and replace over the rows that are shown, or selected: a preview after each change, then the whole at once.

import { act, announce, element, plural, post } from "./api.js";

const PAUSE = 400; // ms after a change until the preview

export class ReplacePanel {
  // `page` has `source`, `order`, `view`, `selected`, `isEditable`, `changed()`.
  constructor(place, page) {
    Object.assign(this, { place, page, asked: 0, seen: null });
    const option = (value, label) => element("option", { value }, label);
    const check = (label, checked = false) => element("input", { type: "checkbox", checked, "aria-label": label });
    const labelled = (label, input) => element("label", {}, input, label);
    this.how = element("select", { id: "replace-how" }, option("before", "Add before each prompt"),
      option("after", "Add after each prompt"), option("replace", "Find and replace"));
    this.find = element("input", { id: "replace-find", type: "text", autocomplete: "off", spellcheck: "false" });
    this.text = element("input", { id: "replace-text", type: "text", autocomplete: "off", spellcheck: "false" });
    this.boxes = {
      match_case: check("Match case", true), whole_words: check("Whole words"), is_pattern: check("Regular expression"),
      skip: check("Not where it is already", true),
    };
    const { match_case: matchCase, whole_words: whole, is_pattern: pattern, skip } = this.boxes;
    this.ofFind = element("div", { class: "row" }, labelled("Match case", matchCase), labelled("Whole words", whole),
      labelled("Regular expression", pattern));
    this.ofAdd = element("div", { class: "row" }, labelled("Not where it is already", skip));
    this.textLabel = element("label", { for: "replace-text" });
    this.findField = element("div", { class: "setting" }, element("label", { for: "replace-find" }, "Find"), this.find);
    this.said = element("p", { role: "status" });
    this.problem = element("p", { class: "problem", role: "status", hidden: true });
    this.bar = element("progress", { "aria-label": "replacing", hidden: true });
    this.list = element("ul", { class: "changes", tabindex: "0", "aria-label": "Preview" });
    this.go = element("button", { type: "submit", class: "primary", disabled: true }, "Replace");
    const close = element("button", { type: "button", onclick: () => this.show(false) }, "Close");
    this.form = element("form", {},
      element("h2", { id: "replace-title", tabindex: "-1" }, "Change many prompts"),
      element("div", { class: "settings" },
        element("div", { class: "setting" }, element("label", { for: "replace-how" }, "What to do"), this.how),
        this.findField,
        element("div", { class: "setting" }, this.textLabel, this.text)),
      this.ofFind, this.ofAdd, this.said, this.problem, this.list, this.bar,
      element("div", { class: "row" }, this.go, close));
    place.replaceChildren(this.form);
    this.form.addEventListener("input", () => this.changed());  // not `change`: Enter in a field fires it, and submits
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.write(); });
    place.addEventListener("keydown", (event) => { if (event.key === "Escape") this.show(false); });
    this.arrange();
  }

  // Open or close; `button` has the focus again.
  show(is = this.place.hidden, button = this.button) {
    this.button = button;
    this.place.hidden = !is;
    button?.setAttribute("aria-expanded", is);
    if (!is) { button?.focus(); return; }
    this.changed();
    this.text.focus();
  }

  arrange() {
    const isFind = this.how.value === "replace";
    this.findField.hidden = this.ofFind.hidden = !isFind;
    this.ofAdd.hidden = isFind;
    this.boxes.whole_words.disabled = this.boxes.is_pattern.checked;
    this.textLabel.textContent = isFind ? "Replace with" : "Text, such as a trigger word";
  }

  body() {
    const { page } = this, { filter, search } = page.view;
    const boxes = Object.fromEntries(Object.entries(this.boxes).map(([name, box]) => [name, box.checked]));
    return {
      source: page.source, order: page.order, filter, search, rows: page.selected.size ? [...page.selected] : null,
      how: this.how.value, find: this.find.value, text: this.text.value, ...boxes,
    };
  }

  // The form, the view, the selection or the rows are others now.
  changed() {
    if (this.place.hidden) return;
    this.arrange();
    this.asked += 1;
    this.seen = null;
    this.go.disabled = true;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.preview(), PAUSE);
  }

  async preview() {
    const number = (this.asked += 1), body = this.body(), { how } = body;
    const isEmpty = how === "replace" ? !body.find : !body.text.trim();
    this.problem.hidden = true;
    if (isEmpty) {
      const of = body.rows ? "the selected rows" : "the rows shown", what = how === "replace" ? "what to find" : "what to add";
      this.said.textContent = `For ${of}. Write ${what}.`;
      this.list.replaceChildren();
      return;
    }
    try {
      const found = await post("/api/data/replace/preview", body);
      if (number !== this.asked) return;
      this.tell(found, body);
    } catch (error) {
      if (number !== this.asked) return;
      this.list.replaceChildren();
      this.said.textContent = "";
      const lines = [...error.lines ?? [error.message], error.do ? `→ ${error.do}` : ""];
      this.problem.textContent = lines.filter(Boolean).join("\n");
      this.problem.hidden = false;
    }
  }

  tell(found, body) {
    const { rows, looked_at: all, empty, first } = found, of = body.rows ? "selected" : "shown";
    this.said.textContent = [
      `${plural(rows, "row")} of ${all.toLocaleString("en")} ${of} would change.`,
      empty ? `${plural(empty, "prompt")} would be empty.` : "", rows > first.length ? `The first ${first.length}:` : "",
    ].filter(Boolean).join(" ");
    this.list.replaceChildren(...first.map(change));
    this.seen = found.seen;
    this.go.textContent = rows ? `Change ${plural(rows, "row")}` : "Change";
    this.go.disabled = !rows;
  }

  async write() {
    const { seen } = this;
    if (!seen || this.go.disabled) return;
    this.bar.hidden = false;
    this.said.textContent = "Writing…";
    await act(this.go, async () => {
      const { rows } = await post("/api/data/replace", { ...this.body(), seen });
      announce(`${plural(rows, "row")} changed; Undo takes it back`);
    });
    this.bar.hidden = true;
    this.page.changed();
    this.changed();
  }
}

// A prompt before and after, with what differs marked.
function change({ name, before, after }) {
  let begin = 0, end = 0;
  const least = Math.min(before.length, after.length);
  while (begin < least && before[begin] === after[begin]) begin += 1;
  while (end < least - begin && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const part = (tag, text) => {
    const last = text.length - end;
    return text ? [text.slice(0, begin), element(tag, {}, text.slice(begin, last)), text.slice(last)] : ["(no prompt)"];
  };
  return element("li", {}, element("b", {}, name), element("p", {}, ...part("del", before)), element("p", {}, ...part("ins", after)));
}
