// A row in a dialog: its images side by side, its prompts and its mask. Text is saved when the row is left, but by
// Escape, which discards it. Where saving fails it is kept in `page.drafts` by the row's name, until it is saved or taken back.

import { act, announce, ask, element, get, post, showImage, upload } from "./api.js";
import { OldVersions, changeFiles, renameButtons, turnButtons } from "./data_files.js";
import { MaskPainter, inflated } from "./data_mask.js";
import { imageAddress, roleName } from "./data_thumbnails.js";

export class RowEditor {
  // `page` has `source`, `list`, `drafts`, `isEditable`, `whyNot`, `labels`, `leaveOut(rows, is, order)`, `changed()`,
  // `settled()`.
  constructor(dialog, page) {
    Object.assign(this, { dialog, page, value: null, index: 0, painter: null, opacity: 0.5 });
    Object.assign(this, { asked: 0, closed: 0, stepping: Promise.resolve() });
    const button = (label, title, action, repeats) => element("button", { type: "button", title, "data-repeats": repeats, onclick: action }, label);
    this.title = element("h2", { id: "editor-title", tabindex: "-1" });
    this.before = button("← Previous", "Alt+↑", () => this.step(-1), "previous");
    this.after = button("Next →", "Alt+↓", () => this.step(1), "next");
    this.end = button("Close", "saves what you typed; Escape does not", () => this.close());
    this.shots = element("div", { class: "shots" });
    this.side = element("div", { class: "side" });
    this.body = element("div", { class: "editor-body" }, this.shots, this.side);
    this.notes = element("div", { class: "notes" });
    this.prompts = element("div", { class: "prompts" });
    this.leave = element("button", { type: "button", onclick: () => act(this.leave, () => this.toggle()) });
    this.where = element("p", { class: "about" });
    this.change = (send, said) => changeFiles(page, send, said).finally(() => this.refresh());
    this.versions = new OldVersions(page, { change: this.change });
    this.offers = element("div", { class: "row" });
    const leaving = element("div", { class: "row" }, this.leave);
    this.side.append(this.notes, this.offers, this.prompts, leaving, this.versions.element, this.where);
    this.painting = element("div", { class: "painting", hidden: true });
    this.messages = element("div", { role: "alert" });
    dialog.replaceChildren(
      element("header", {}, this.title, element("div", { class: "row" }, this.before, this.after, this.end)),
      this.messages, this.body, this.painting);
    dialog.addEventListener("keydown", (event) => this.keyed(event));
    dialog.addEventListener("cancel", (event) => { event.preventDefault(); this.cancel(); });
    dialog.addEventListener("close", () => {
      this.value = null;
      this.closed += 1;
      this.asked += 1;
      this.shots.replaceChildren();
      page.list.place.focus({ preventScroll: true });
    });
  }

  get isOpen() { return this.dialog.open; }
  get isUnsaved() { return Boolean(this.painter?.isChanged); }

  // With `isWriting`, the prompt has the focus.
  async open(index, isWriting = false) {
    const asked = (this.asked += 1), value = await this.page.list.row(index);
    if (!value || asked !== this.asked) return;  // another row is wanted, or none any more
    this.index = index;
    const shown = this.show(value);
    if (isWriting) this.fields[0]?.focus();
    await shown;
  }

  // Save what was written; false if a prompt could not be, and stays as it is.
  async saved() {
    for (const field of this.fields ?? []) {
      if (field.isConflict) { announce("the file has changed meanwhile: choose a text, or save yours"); return false; }
      if (!await field.save()) return false;
    }
    return true;
  }

  // The same row, after it has become known whether the source can be edited.
  renew() {
    this.shots.key = this.notes.json = "";
    this.take(this.value, false);
  }

  // Another row, from wherever it is.
  async show(value) {
    if (this.painter && !this.closePainter()) return;
    const isSame = this.value?.name === value.name;
    this.messages.replaceChildren();
    if (!isSame) this.shots.replaceChildren();
    this.take(value, isSame);
    if (!this.dialog.open) this.dialog.showModal();
    if (!isSame) { this.body.scrollTop = 0; this.title.focus(); }
    await this.refresh();
  }

  // One step after the other; none of them once the dialog is closed.
  step(by) {
    const isWriting = document.activeElement?.matches(".prompts textarea"), { closed } = this;
    this.stepping = this.stepping.then(() => act(null, async () => {
      if (closed !== this.closed || !await this.saved()) return;
      const { list } = this.page, there = await list.row(this.index), isThere = there?.name === this.value?.name;
      if (closed !== this.closed) return;
      const index = isThere || by < 0 ? this.index + by : this.index;  // of a filtered list, the row may be missing
      if (index < 0 || index >= list.total) { announce(by < 0 ? "this is the first row" : "this is the last row"); return; }
      list.activate(index);
      await this.open(index, isWriting);
    }));
  }

  // Show the row as it is now; texts that are being edited stay.
  take(value, isSame = true) {
    this.value = value;
    const { page } = this, count = page.list.total;
    this.title.textContent = `Row ${(value.row + 1).toLocaleString("en")}: ${value.name}`;
    this.before.disabled = this.index <= 0;
    this.after.disabled = this.index >= count - 1;
    this.leave.textContent = value.left_out ? "Put this row back" : "Leave this row out";
    this.leave.disabled = !page.isEditable;
    this.where.textContent = value.where;
    this.versions.take(value.row);
    this.versions.element.hidden = !page.isEditable;
    this.takeNotes(value);
    this.takePrompts(value, isSame);
    this.takeImages(value);
  }

  takeNotes(value) {
    const notes = value.problems.map((problem) => element("div", { class: "error" },
      element("p", { class: "problem" }, problem.what), element("p", {}, `→ ${problem.do}`)));
    if (value.left_out) notes.push(element("p", { class: "note" }, "This row is left out: build does not see it."));
    if (value.draft) {
      const keep = element("button", { type: "button", onclick: () => act(keep, () => this.keepDraft(this.value)) }, "Keep it as it is");
      notes.push(element("div", { class: "note" }, element("p", {}, "A model wrote this prompt. Correct it, or"), keep));
    }
    if (value.changed) notes.push(element("p", { class: "note" }, "Changed since the last check. Check again to see what is left."));
    if (!this.page.isEditable && this.page.whyNot) {
      notes.push(element("p", { class: "note" }, `${this.page.whyNot.what}. → ${this.page.whyNot.do}`));
    }
    const measured = value.measured.map((each) => each.finding);
    for (const finding of value.findings.filter((each) => !measured.includes(each))) {
      notes.push(element("p", { class: "note" }, `Found: ${this.page.labels[finding] ?? finding}.`));
    }
    for (const each of value.measured) notes.push(this.measuredNote(value, each));
    const json = JSON.stringify([...notes.map((note) => note.textContent), ...value.measured]);
    if (this.notes.json !== json) this.notes.replaceChildren(...notes);
    this.notes.json = json;
  }

  // A finding in the images, with the overlay of a control on its target.
  measuredNote(value, { what, do: advice, overlay }) {
    const note = element("div", { class: "note" },
      element("p", {}, `Found: ${what}. It stops no build.`), element("p", {}, `→ ${advice}`));
    if (!overlay) return note;
    const alt = `${roleName(overlay.role)} in red on the target in cyan, with arrows from the target to the control`;
    const address = imageAddress(this.page.source, value.row, overlay.role, "overlay", overlay.v);
    const img = showImage(element("img", { alt }), address);
    note.append(element("figure", { class: "on-target" }, img,
      element("figcaption", { class: "about" },
        "Target in cyan, control in red, grey where they agree; the arrows are longer than the shift.")));
    return note;
  }

  // ---- prompts -------------------------------------------------------------------------------------------------------

  takePrompts(value, isSame) {
    if (!isSame || this.fields?.length !== value.prompts.length) {
      this.fields = value.prompts.map((_, caption) => this.field(value, caption));
      this.prompts.replaceChildren(...this.fields.map((field) => field.element));
    }
    this.fields.forEach((field, caption) => field.take(value.prompts[caption]));
  }

  field(value, caption) {
    const { drafts, isEditable } = this.page, { name } = value, several = value.prompts.length > 1;
    const id = `prompt-${caption}`, label = several ? `Caption ${caption + 1} of ${value.prompts.length}` : "Prompt";
    const area = element("textarea", { id, rows: several ? 3 : 6, spellcheck: "true", readonly: !isEditable });
    const save = element("button", { type: "button", class: "primary", title: "Ctrl+Enter", disabled: true }, "Save");
    const back = element("button", { type: "button", class: "quiet", hidden: true }, "Undo");
    const state = element("span", { class: "muted", role: "status" }), theirs = element("div");
    const made = { base: "", element: element("div", { class: "field" }, element("label", { for: id }, label), area, theirs,
      isEditable ? element("div", { class: "row" }, save, back, state) : null) };
    const own = () => drafts.get(name)?.get(caption);
    const update = () => {
      const isChanged = area.value !== made.base;
      if (isChanged) {
        if (!drafts.has(name)) drafts.set(name, new Map());
        drafts.get(name).set(caption, area.value);
      } else if (drafts.get(name)?.delete(caption) && !drafts.get(name).size) drafts.delete(name);
      back.hidden = !isChanged && made.before === undefined;
      save.disabled = !isChanged;
      state.textContent = isChanged ? "not saved" : made.isSaved ? "saved" : "";
      this.page.draftsChanged();
    };
    made.take = (text) => {
      const draft = own(), isFirst = made.seen === undefined;
      if (!isFirst && text !== made.base && draft !== undefined && draft !== text) this.conflict(theirs, area, text, update);
      made.seen = made.base = text;
      if (draft === undefined || draft === text) { if (area.value !== text) area.value = text; }
      else if (area.value !== draft) area.value = draft;
      update();
    };
    Object.defineProperty(made, "isConflict", { get: () => theirs.childElementCount > 0 });
    Object.defineProperty(made, "isChanged", { get: () => area.value !== made.base });
    made.discard = () => { area.value = made.base; theirs.replaceChildren(); update(); };
    made.focus = () => { area.focus(); area.setSelectionRange(area.value.length, area.value.length); };
    // True if nothing is left to save. One at a time: a second one, as the row is left, needs the version after the first.
    made.save = async () => {
      while (made.saving) await made.saving;
      made.saving = write().finally(() => { made.saving = null; });
      return made.saving;
    };
    const write = () => area.value === made.base || area.readOnly ? Promise.resolve(true) : act(save, async () => {
      const text = area.value, old = made.base;
      await this.write((version) => post("/api/data/prompt", { source: this.page.source, row: value.row, seen: version, caption, text }),
        (fresh) => fresh.prompts[caption] === made.base);
      made.isSaved = true;
      made.before = old;
      theirs.replaceChildren();
      made.base = this.value?.prompts[caption] ?? text;
      if (area.value === text) area.value = made.base;
      update();
      announce("the prompt is saved");
      return area.value === made.base;
    }).finally(update);
    area.addEventListener("input", update);
    area.addEventListener("keydown", (event) => {
      if (!(event.ctrlKey || event.metaKey) || (event.key !== "Enter" && event.key !== "s")) return;
      event.preventDefault();
      made.save();
    });
    save.addEventListener("click", made.save);
    back.addEventListener("click", () => {  // of what is not saved; else of what was saved here last
      const isSaved = area.value === made.base, text = isSaved ? made.before : made.base;
      made.before = isSaved ? undefined : made.before;
      area.value = text;
      theirs.replaceChildren();
      update();
      area.focus();
      if (isSaved) made.save().then(() => { made.before = undefined; update(); });
    });
    return made;
  }

  conflict(place, area, text, update) {
    place.replaceChildren(element("div", { class: "error" },
      element("p", {}, "The file has changed meanwhile. It says:"), element("p", { class: "theirs" }, text || "(nothing)"),
      element("div", { class: "row" },
        element("button", { type: "button", onclick: () => { area.value = text; place.replaceChildren(); update(); area.focus(); } }, "Take this text"),
        element("span", { class: "about" }, "Save writes yours over it."))));
  }

  // Write with the version that was seen. If another row's edit or a new listing changed only the version, write again.
  async write(send, isUnchanged) {
    const { value, page } = this;
    try {
      return this.accept(value, await send(value.version));
    } catch (error) {
      if (error.status !== 409) throw error;
      await page.settled();
      const fresh = await get(`/api/data/row?${new URLSearchParams({ source: page.source, row: value.row })}`);
      if (fresh.name !== value.name) throw error;
      const isRepeated = isUnchanged(fresh);
      if (this.value?.name === value.name) this.take(fresh);
      if (!isRepeated) throw error;
      return this.accept(value, await send(fresh.version));
    }
  }

  accept(value, answer) {
    if (this.value?.name === value.name) this.take({ ...answer.row });
    this.page.changed();
    return answer;
  }

  async keepDraft(value) {
    await post("/api/data/accept", { source: this.page.source, rows: [value.row], order: value.order });
    this.page.changed();
    await this.refresh();
    announce("kept");
  }

  async toggle() {
    const { row, left_out: isLeftOut, order } = this.value;
    await this.page.leaveOut([row], !isLeftOut, order);
    await this.refresh();
  }

  // The row as it is now on disk; asked for again if it was shown otherwise while the answer was on its way.
  async refresh() {
    for (let { value } = this; value;) {
      const fresh = await get(`/api/data/row?${new URLSearchParams({ source: this.page.source, row: value.row })}`);
      if (this.value?.name !== value.name || fresh.name !== value.name) return;
      if (this.value === value) { this.take(fresh); this.tell(fresh); return; }
      ({ value } = this);
    }
  }

  // ---- images --------------------------------------------------------------------------------------------------------

  takeImages(value) {
    const key = JSON.stringify([value.name, value.version, value.images, this.page.isEditable]);
    if (this.shots.key === key && this.shots.childElementCount) return;
    this.shots.key = key;
    const mask = value.images.find((image) => image.role === "mask");
    const shown = value.images.filter((image) => image.role !== "mask");
    this.shots.replaceChildren(...shown.map((image) => this.shot(value, image, mask)));
    if (!shown.length) this.shots.append(element("p", { class: "muted" }, "This row has no image."));
  }

  shot(value, image, mask) {
    const { page } = this, isTarget = image.role === "target";
    const name = roleName(image.role);
    const img = showImage(element("img", { alt: `${name} of ${value.name}` }), imageAddress(page.source, value.row, image.role, "whole", image.v));
    const enlarge = element("button", { type: "button", class: "quiet", "aria-pressed": "false", "aria-label": `Enlarge the ${name}` }, "Enlarge");
    const caption = element("figcaption", {}, element("b", {}, name), element("span", { class: "size" }), enlarge);
    const place = element("div", { class: "image" }, img);
    for (const each of [enlarge, img]) {
      each.addEventListener("click", () => enlarge.setAttribute("aria-pressed", figure.classList.toggle("large")));
    }
    img.addEventListener("error", () => get(img.dataset.path).catch((error) => {
      if (error.status) place.replaceChildren(element("div", { class: "error" }, ...error.lines.map((line) => element("p", {}, line)),
        error.do ? element("p", {}, `→ ${error.do}`) : null));
    }), { once: true });
    const figure = element("figure", { "data-role": image.role }, caption, place);
    if (page.isEditable) caption.append(...turnButtons(page, value, image, this.change));
    if (!isTarget) return figure;
    if (mask) {
      const over = showImage(element("img", { class: "overlay", alt: "its mask" }), imageAddress(page.source, value.row, "mask", "overlay", mask.v));
      over.addEventListener("error", () => over.remove(), { once: true });
      over.style.opacity = this.opacity;
      place.append(over);
      caption.append(element("label", {}, "Mask", element("input", {
        type: "range", min: 0, max: 1, step: 0.05, value: this.opacity, "aria-label": "Opacity of the mask",
        oninput: (event) => { this.opacity = Number(event.target.value); over.style.opacity = this.opacity; },
      })));
    }
    if (page.isEditable) {
      const paint = element("button", { type: "button", onclick: () => act(paint, () => this.paint()) }, mask ? "Edit the mask" : "Paint a mask");
      caption.append(paint);
    }
    return figure;
  }

  // The sizes of the images, and where they are. They are arranged so that they are as large as possible.
  tell({ details, renames }) {
    this.offers.replaceChildren(...this.page.isEditable ? renameButtons(this.page, this.value, renames, this.change) : []);
    const ratios = details.filter(({ role, size }) => size && role !== "mask").map(({ size: [width, height] }) => width / height);
    this.shots.style.setProperty("--columns", columnsFor(ratios, this.shots.clientWidth, this.shots.clientHeight));
    for (const each of details) {
      const place = this.shots.querySelector(`figure[data-role="${each.role}"] .size`);
      if (place) { place.textContent = each.size ? ` ${each.size[0]}×${each.size[1]}` : ""; place.title = each.where; }
    }
  }

  // ---- the mask ------------------------------------------------------------------------------------------------------

  async paint() {
    const { value, page } = this, query = new URLSearchParams({ source: page.source, row: value.row });
    const response = await ask(`/api/data/mask?${query}`);
    const about = JSON.parse(response.headers.get("X-About"));
    const values = await inflated(new Uint8Array(await response.arrayBuffer()));
    if (this.value !== value && this.value?.name !== value.name) return;
    let seen = about.seen;
    this.painter = new MaskPainter({
      width: about.width, height: about.height, values,
      backgrounds: value.images.filter((image) => image.role !== "mask")
        .map((image) => ({ label: roleName(image.role), address: imageAddress(page.source, value.row, image.role, "whole", image.v) })),
      onsave: async (data) => {
        const send = (version) => upload(`/api/data/mask?${query}&${new URLSearchParams({ seen: version, seen_mask: seen })}`, data);
        seen = (await this.write(send, () => true)).seen;
        announce("the mask is saved");
      },
      onclose: () => this.closePainter(),
    });
    this.painting.replaceChildren(this.painter.element);
    this.painting.hidden = false;
    this.body.hidden = true;
    this.before.hidden = this.after.hidden = this.end.hidden = true;
    this.painter.fit();
    this.painter.stage.focus();
    if (about.scaled) announce("the mask was scaled to the size of the target");
  }

  // Back to the images; false if the user stays.
  closePainter() {
    if (!this.painter.mayClose()) return false;
    this.painter.close();
    this.painter = null;
    this.painting.hidden = true;
    this.body.hidden = this.before.hidden = this.after.hidden = this.end.hidden = false;
    this.shots.querySelector("button")?.focus();
    return true;
  }

  // ---- the dialog ----------------------------------------------------------------------------------------------------

  async close() {
    if (this.painter) this.closePainter();
    else if (await this.saved() || confirm("The prompt could not be saved. Close anyway? This page keeps the text.")) this.dialog.close();
  }

  // Close without saving, by Escape: what was typed is discarded if the user says so; what is being saved is waited for.
  async cancel() {
    if (this.painter) { this.closePainter(); return; }
    await Promise.all(this.fields.map((field) => field.saving));
    const typed = this.fields.filter((field) => field.isChanged);
    if (typed.length && !confirm("Discard what you typed in this row? It is not saved.")) return;
    for (const field of typed) field.discard();
    this.dialog.close();
  }

  keyed(event) {
    if (event.key === "Escape" && !event.isComposing) { // before the browser, which asks only once and then closes
      event.preventDefault();
      this.cancel();
      return;
    }
    if (this.painter) return;
    const isField = event.target.closest("textarea, input, select");
    const by = { ArrowDown: 1, ArrowUp: -1, ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const isStep = by && (event.altKey ? /Up|Down/.test(event.key) : !isField && /Left|Right/.test(event.key) && !event.ctrlKey && !event.metaKey);
    if (!isStep) return;
    event.preventDefault();
    this.step(by);
  }
}

const CAPTION = 56;  // pixels below and above an image

// How many images of these aspect ratios stand beside each other in a box, if they are to be large.
function columnsFor(ratios, width, height) {
  const sizeIn = (columns) => {
    const each = width / columns, rows = Math.ceil(ratios.length / columns), tall = Math.max(height / rows - CAPTION, 1);
    return Math.min(...ratios.map((ratio) => Math.min(each, tall * ratio) / Math.sqrt(ratio)));
  };
  const choices = ratios.map((_, i) => i + 1).reverse();
  return choices.reduce((best, columns) => sizeIn(columns) > 1.15 * sizeIn(best) ? columns : best, choices[0] ?? 1);
}
