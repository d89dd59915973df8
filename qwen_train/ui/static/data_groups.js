// Rows that a scan found, side by side: those of a group together, with a button to leave each out.

import { act, element, get, plural } from "./api.js";
import { drop, imageAddress, roleName, thumbnail, want } from "./data_thumbnails.js";

const COUNT = 20;  // groups of a request

export class GroupView {
  // `page` as for rows.
  constructor(place, page) {
    Object.assign(this, { place, page, finding: "", cards: [], shown: 0, total: 0, asked: 0 });
    this.list = element("div", { class: "group-list" });
    this.title = element("p", { class: "muted", role: "status" });
    this.more = element("button", { type: "button", onclick: () => act(this.more, () => this.load()) }, "Show more");
    place.append(this.title, this.list, this.more);
    this.watcher = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) if (isIntersecting) target.reveal(); else target.conceal();
    }, { rootMargin: "300px" });
  }

  async show(finding) {
    this.finding = finding;
    this.clear();
    await this.load();
  }

  clear() {
    for (const card of this.cards) { this.watcher.unobserve(card); card.conceal(); }
    this.cards = [];
    this.shown = 0;
    this.asked += 1;
    this.list.replaceChildren();
  }

  query(start, count) {
    return `/api/data/groups?${new URLSearchParams({ source: this.page.source, finding: this.finding, start, count })}`;
  }

  async load() {
    const { finding, asked } = this, start = this.shown;
    const { groups, total } = await get(this.query(start, COUNT));
    if (asked !== this.asked || start !== this.shown) return;  // other groups are shown by now
    this.shown += groups.length;
    this.total = total;
    for (const group of groups) this.list.append(this.group(group));
    const isGrouped = this.page.groups.includes(finding);
    const advice = this.page.advice[finding] ? ` → ${this.page.advice[finding]}` : "";
    this.title.textContent = `${isGrouped ? plural(total, "group") : plural(total, "row")}: ${this.page.labels[finding]}${advice}`;
    this.more.hidden = this.shown >= total;
  }

  group({ size, rows }) {
    const cards = rows.map((row) => this.card(row));
    this.cards.push(...cards);
    return element("div", { class: "group-of-rows", role: "group", "aria-label": rows.map((row) => row.name).slice(0, 3).join(", ") },
      ...cards, size > rows.length ? element("p", { class: "muted" }, `and ${plural(size - rows.length, "row")} more`) : null);
  }

  card(first) {
    const { page } = this, showsAll = !this.page.groups.includes(this.finding);
    const images = element("div", { class: "pair" }), name = element("p", { class: "name" }), prompt = element("p", { class: "prompt" });
    const notes = element("p", { class: "measured", hidden: true });
    const state = element("span", { class: "tag", hidden: true }, "left out");
    const open = element("button", { type: "button" }, "Open"), leave = element("button", { type: "button" });
    const card = element("figure", { class: "card" }, images,
      element("figcaption", {}, name, notes, prompt, element("div", { class: "row" }, open, leave, state)));
    open.addEventListener("click", () => page.openRow(card.value));
    leave.addEventListener("click", () => act(leave, () => page.leaveOut([card.value.row], !card.value.left_out, card.value.order)));
    card.fill = (value) => {
      card.value = value;
      name.textContent = `${(value.row + 1).toLocaleString("en")}: ${value.name}`;
      prompt.textContent = value.prompts[0] || "(no prompt)";
      card.classList.toggle("left-out", value.left_out);
      state.hidden = !value.left_out;
      leave.textContent = value.left_out ? "Put back" : "Leave out";
      leave.setAttribute("aria-label", `${leave.textContent} ${value.name}`);
      open.setAttribute("aria-label", `Open ${value.name}`);
      leave.hidden = !page.isEditable;
      const measured = value.measured.filter((note) => note.finding === this.finding);
      notes.textContent = measured.map((note) => note.what).join("; ");
      notes.hidden = !measured.length;
      const overlays = measured.map((note) => note.overlay).filter(Boolean);
      const shown = [
        ...value.images.filter(({ role }) => showsAll || role === "target").map((image) => ({ ...image, label: roleName(image.role) })),
        ...overlays.map((each) => ({ ...each, size: "overlay", label: `${roleName(each.role)} on target` })),
      ];
      card.classList.toggle("with-overlay", overlays.length > 0);
      const key = JSON.stringify(shown);
      if (images.key !== key) {
        card.conceal();
        images.key = key;
        images.replaceChildren(...shown.map((image) => {
          const img = thumbnail();
          img.alt = `${image.label} of ${value.name}`;
          img.image = image;
          return element("div", {}, img, showsAll ? element("span", { class: "about" }, image.label) : null);
        }));
        if (card.isNear) card.reveal();
      }
    };
    card.reveal = () => {
      card.isNear = true;
      for (const img of images.querySelectorAll("img")) {
        want(img, imageAddress(page.source, card.value.row, img.image.role, img.image.size ?? "thumbnail", img.image.v));
      }
    };
    card.conceal = () => {
      card.isNear = false;
      for (const img of images.querySelectorAll("img")) if (!img.dataset.state) drop(img);
    };
    card.fill(first);
    this.watcher.observe(card);
    return card;
  }

  // The same rows as they are now, in place.
  async refresh() {
    const rows = new Map(), { asked } = this;
    for (let start = 0; start < this.shown; start += COUNT) {
      const { groups } = await get(this.query(start, COUNT));
      if (asked !== this.asked) return;
      for (const row of groups.flatMap((group) => group.rows)) rows.set(row.name, row);
    }
    for (const card of this.cards) if (rows.has(card.value.name)) card.fill(rows.get(card.value.name));
  }
}
