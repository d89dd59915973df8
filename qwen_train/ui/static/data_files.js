// The files of a row in its dialog: images turned, a misnamed file renamed, and old versions put back.

import { act, announce, bytes, element, get, post } from "./api.js";
import { roleName } from "./data_thumbnails.js";

// Buttons that turn an image; `change(send)` runs an edit and shows the row as it is then.
export function turnButtons(page, value, image, change) {
  const button = (label, text, turns) => {
    const name = `${label}: ${roleName(image.role)}`, made = element("button", { type: "button", title: label, "aria-label": name, "data-repeats": name }, text);
    const body = { source: page.source, row: value.row, seen: value.version, role: image.role, v: image.v, turns };
    const said = `the ${roleName(image.role)} is turned`;
    made.addEventListener("click", () => act(made, () => change(() => post("/api/data/rotate", body), said)));
    return made;
  };
  return [button("Turn left", "↺", 3), button("Turn right", "↻", 1)];
}

// A button for each file that only needs another name.
export function renameButtons(page, value, renames, change) {
  return renames.map(({ old, new: name }) => {
    const made = element("button", { type: "button" }, `Rename ${old.split("/").at(-1)} to ${name}`);
    const body = { source: page.source, row: value.row, seen: value.version, old };
    made.addEventListener("click", () => act(made, () => change(() => post("/api/data/rename", body), `renamed to ${name}`)));
    return made;
  });
}

// The old versions of files, read when they are opened; without `row` those of what all rows share.
export class OldVersions {
  constructor(page, { label = "Old versions", change }) {
    Object.assign(this, { page, change, row: undefined, source: "", asked: 0 });
    this.list = element("div");
    this.element = element("details", { ontoggle: () => this.element.open && act(null, () => this.load()) },
      element("summary", {}, label), this.list);
  }

  take(row) {
    const { source } = this.page;
    if (row === this.row && source === this.source) return this.element.open && act(null, () => this.load()); // it may have been edited
    Object.assign(this, { row, source });
    this.asked += 1;
    this.element.open = false;
    this.list.replaceChildren();
  }

  async load() {
    const asked = (this.asked += 1), { row } = this, query = new URLSearchParams({ source: this.page.source, ...row === undefined ? {} : { row } });
    const { files } = await get(`/api/data/versions?${query}`);
    if (asked !== this.asked) return;  // a newer answer comes
    const parts = files.flatMap((file) => [
      element("h3", {}, `${roleName(file.what)}: ${file.where}`),
      element("ul", { class: "versions" }, ...file.versions.map((each) => this.version(file, each))),
    ]);
    this.list.replaceChildren(...parts.length ? parts : [element("p", { class: "muted" }, "None: nothing was edited here.")]);
  }

  version({ what, seen, where }, { version, time, bytes: size, text, size: sides }) {
    const when = new Date(1000 * time).toLocaleString();
    const back = element("button", { type: "button", "aria-label": `Put back ${where} of ${when}` }, "Put back");
    const body = { source: this.page.source, row: this.row ?? null, what, version, seen };
    back.addEventListener("click", () => act(back, async () => {
      await this.change(() => post("/api/data/restore", body), `the version of ${when} is put back`);
      await this.load();
    }));
    const about = text ?? (sides ? `${sides[0]}×${sides[1]}, ${bytes(size)}` : bytes(size));
    return element("li", {}, element("span", {}, `until ${when}`), element("span", { class: "muted" }, about), back);
  }
}

// Run an edit of files, and wait until the source is listed as it is then.
export async function changeFiles(page, send, said) {
  await send();
  await page.settled();
  page.changed();
  announce(`${said}; Undo takes it back`);
}
