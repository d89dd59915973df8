// The user's note on a run, which is kept in the folder of the run and searched in the list of runs.

import { act, announce, element, post } from "./api.js";

export class Note {
  // `onsave(text)` is told of the note that is kept.
  constructor(folder, { onsave }) {
    Object.assign(this, { folder, onsave, seen: "", isSaving: false });
    this.text = element("textarea", {
      rows: "2", maxlength: "4000", "aria-label": `Note on ${folder}`, placeholder: "A note on this run",
      oninput: () => this.tell(),
      onkeydown: (event) => { if (event.key === "Enter" && event.ctrlKey) this.save(); },
    });
    this.button = element("button", { type: "button", onclick: () => this.save() }, "Save the note");
    this.node = element("div", { class: "note" }, this.text, this.button);
    this.tell();
  }

  get isChanged() { return this.text.value.trim() !== this.seen; }

  tell() { this.button.setAttribute("aria-disabled", !this.isChanged); }

  // The note as the list of runs has it; what the user has typed stays.
  update(note) {
    if (note === this.seen || this.isChanged) return;
    this.seen = note;
    this.text.value = note;
    this.tell();
  }

  save() {
    if (!this.isChanged || this.isSaving) return;
    this.isSaving = true;
    act(null, async () => {
      const text = this.text.value;
      const { note } = await post("/api/train/note", { folder: this.folder, text, seen: this.seen });
      this.seen = note;
      if (this.text.value === text) this.text.value = note; // else the user has written on
      this.tell();
      announce("the note is saved");
      this.onsave(note);
    }).finally(() => { this.isSaving = false; });
  }
}
