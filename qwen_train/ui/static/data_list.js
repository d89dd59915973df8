// A list of any number of rows of equal height, of which only those near the window exist as elements.
// The scrolled element has at most MOST pixels: in a longer list a pixel of the bar stands for several of the list, except
// near both ends. A scroll by less than JUMP windows moves rows by as many pixels; afterwards the bar is corrected.
// The focus stays on the list, and `aria-activedescendant` names the active row: rows may come and go.

import { element } from "./api.js";

const MOST = 8e6;  // pixels: Firefox shows no element of more than 17.8 million, Chromium of 33.5 million
const END = 1e6;  // pixels at both ends
const JUMP = 2, NEAR = 400, REST = 200;  // windows, pixels, ms
const PAGE = 50, PAGES = 400;  // rows of a request; pages that are kept

export class RowList {
  // `load(start, count, signal)` gives `{total, rows}`; `make()` an element with `fill(row)` and `empty()`.
  constructor(place, { load, make, onopen, onactive, onrange, onkey, onerror }) {
    Object.assign(this, { place, load, make, onopen, onactive, onrange, onkey, onerror });
    this.space = element("div", { class: "space", role: "rowgroup" });
    place.replaceChildren(this.space);
    this.total = 0;
    this.active = 0;
    this.shown = new Map();  // elements by index
    this.pages = new Map();  // rows, or a promise of them, by number of the page
    this.shift = this.last = this.filledAt = 0;
    place.addEventListener("scroll", () => this.scrolled(), { passive: true });
    place.addEventListener("keydown", (event) => this.keyed(event));
    new ResizeObserver(() => this.measure()).observe(place);
    this.measure();
  }

  // ---- the position --------------------------------------------------------------------------------------------------

  // From pixels of the bar to pixels of the list, and back; both without those of one window.
  toList(pixels) { return convert(pixels, this.extent, this.longest); }
  toBar(pixels) { return convert(pixels, this.longest, this.extent); }

  measure() {
    const top = this.top;
    this.height = parseFloat(getComputedStyle(this.place).getPropertyValue("--row-height")) || 100;
    this.window = this.place.clientHeight;
    const whole = this.total * this.height, first = this.first;
    this.space.style.height = `${Math.min(whole, MOST)}px`;
    this.longest = Math.max(0, whole - this.window);
    this.extent = Math.max(0, Math.min(whole, MOST) - this.window);
    this.moveTo(this.measured === this.height ? top : first * this.height);
    this.measured = this.height;
    this.place.setAttribute("aria-rowcount", this.total);
  }

  get top() { return this.last + this.shift; }
  get first() { return this.measured ? Math.floor(this.top / this.measured) : 0; }
  get rowsOfWindow() { return Math.max(1, Math.floor(this.window / this.height)); }

  // Scrolls until the list shows its pixel `v` at the top.
  moveTo(v) {
    const to = Math.min(Math.max(v, 0), this.longest);
    this.place.scrollTop = this.last = Math.round(this.toBar(to));
    this.shift = to - this.last;
    this.draw();
  }

  scrolled() {
    const bar = this.place.scrollTop;
    if (bar === this.last) return;
    if (Math.abs(bar - this.last) > JUMP * this.window) this.shift = this.toList(bar) - bar;
    else if ((bar <= 0 && this.shift > 0) || (bar >= this.extent && bar + this.shift < this.longest - 1)) {
      return this.moveTo(this.last + this.shift + (bar - this.last));
    }
    this.last = bar;
    this.draw();
    clearTimeout(this.resting);
    this.resting = setTimeout(() => { if (Math.abs(this.toBar(this.top) - this.last) > 1) this.moveTo(this.top); }, REST);
  }

  // ---- the elements --------------------------------------------------------------------------------------------------

  draw() {
    const begin = Math.max(0, Math.floor((this.top - NEAR) / this.height));
    const end = Math.min(this.total, Math.ceil((this.top + this.window + NEAR) / this.height));
    const free = [];
    for (const [index, each] of this.shown) {
      if (index >= begin && index < end) continue;
      this.shown.delete(index);
      free.push(each);
    }
    for (let index = begin; index < end; index++) {
      let each = this.shown.get(index);
      if (!each) {
        each = free.pop() ?? this.add();
        this.shown.set(index, each);
        each.empty();
        each.id = `row-${index}`;
        each.setAttribute("aria-rowindex", index + 1);
        each.index = index;
        this.mark(each);
      }
      each.style.transform = `translateY(${index * this.height - this.shift}px)`;
    }
    for (const each of free) { each.empty(); each.remove(); }
    this.onrange?.(Math.min(this.total, Math.max(1, Math.floor(this.top / this.height) + 1)),
      Math.min(this.total, Math.ceil((this.top + this.window) / this.height)), this.total);
    clearTimeout(this.filling);
    const isFar = Math.abs(this.last - this.filledAt) > this.window;  // not while the bar is dragged
    this.filling = setTimeout(() => this.fill(begin, end), isFar ? 50 : 0);
  }

  add() {
    const each = this.make();
    each.addEventListener("click", () => this.activate(each.index, false));
    this.space.append(each);
    return each;
  }

  mark(each) {
    const isActive = each.index === this.active;
    each.classList.toggle("active", isActive);
    if (isActive) this.place.setAttribute("aria-activedescendant", each.id);
  }

  fill(begin, end) {
    this.filledAt = this.last;
    const needed = new Set();
    const stop = Math.max(end, 1);  // a list that was empty may have rows now
    for (let page = Math.floor(begin / PAGE); page * PAGE < stop; page++) needed.add(page);
    for (const [number, page] of this.pages) {
      if (page.stop && !needed.has(number)) { page.stop.abort(); this.pages.delete(number); }
    }
    for (const number of needed) {
      const page = this.page(number);
      if (page.rows) this.show(number, page.rows);
      else page.promise.then((rows) => this.show(number, rows), () => {});
    }
  }

  show(number, rows) {
    for (const [index, each] of this.shown) {
      const row = Math.floor(index / PAGE) === number ? rows[index % PAGE] : null;
      if (row) each.fill(row);
    }
  }

  page(number) {
    if (this.pages.has(number)) return this.pages.get(number);
    const stop = new AbortController(), page = { stop };
    page.promise = this.load(number * PAGE, PAGE, stop.signal).then(({ rows, total }) => {
      if (this.pages.get(number) !== page) return [];
      Object.assign(page, { rows, stop: null });
      if (total !== this.total) this.resize(total);
      return rows;
    });
    page.promise.catch((error) => {
      if (this.pages.get(number) === page) this.pages.delete(number);
      if (error.name !== "AbortError") this.onerror(error);
    });
    this.pages.set(number, page);
    for (const old of this.pages.keys()) {
      if (this.pages.size <= PAGES) break;
      if (!this.pages.get(old).stop) this.pages.delete(old);
    }
    return page;
  }

  // ---- what others call ----------------------------------------------------------------------------------------------

  // Another number of rows.
  resize(total) {
    if (total === this.total) return;
    this.total = total;
    this.active = Math.min(this.active, Math.max(0, total - 1));
    for (const [number, page] of this.pages) {
      if (page.rows && page.rows.length < Math.min(PAGE, total - number * PAGE)) this.pages.delete(number);
    }
    this.measure();
  }

  // Other rows, from the beginning.
  renew() {
    for (const page of this.pages.values()) page.stop?.abort();
    this.pages.clear();
    for (const each of this.shown.values()) each.empty();
    this.active = 0;
    this.shift = this.last = 0;
    this.place.scrollTop = 0;
    for (const each of this.shown.values()) this.mark(each);
    this.draw();
  }

  // The same rows, which may have changed: what is shown stays until the answer is there.
  refresh() {
    for (const page of this.pages.values()) page.stop?.abort();
    this.pages.clear();
    this.draw();
  }

  // The row at an index, undefined beyond the end; asked for again if a refresh has dropped what was asked.
  async row(index) {
    while (index >= 0 && index < this.total) {
      const page = this.page(Math.floor(index / PAGE));
      if (page.rows) return page.rows[index % PAGE];
      await page.promise.catch((error) => { if (error.name !== "AbortError") throw error; });
    }
    return undefined;
  }

  // The row that the user sees at an index, if one is shown there yet.
  seen(index) { return this.shown.get(index)?.value; }

  elements() { return this.shown.values(); }

  activate(index, isScrolled = true) {
    if (!this.total) return;
    this.active = Math.min(Math.max(index, 0), this.total - 1);
    const begin = this.active * this.height;
    if (isScrolled && begin < this.top) this.moveTo(begin);
    else if (isScrolled && begin + this.height > this.top + this.window) this.moveTo(begin + this.height - this.window);
    for (const each of this.shown.values()) this.mark(each);
    this.onactive?.(this.active);
  }

  keyed(event) {
    if (event.target !== this.place || event.altKey) return;
    const isPlain = !event.ctrlKey && !event.metaKey;
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: this.rowsOfWindow, PageUp: -this.rowsOfWindow }[event.key];
    if (step && isPlain) this.activate(this.active + step);
    else if (event.key === "Home") this.activate(0);
    else if (event.key === "End") this.activate(this.total - 1);
    else if (event.key === "Enter" && isPlain && this.total) this.onopen(this.active);
    else if (!this.onkey(event, this.active, step)) return;
    event.preventDefault();
  }
}

function convert(from, most, other) {
  if (most === other || from <= END) return Math.min(from, other);
  if (from >= most - END) return other - (most - from);
  return END + (from - END) * (other - 2 * END) / (most - 2 * END);
}
