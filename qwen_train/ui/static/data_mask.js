// A brush for masks, at the target's own resolution: one byte a pixel, 255 where the target was edited.
// Grey values stay where nothing is painted. What is shown is a canvas in one colour over the image; the values
// themselves never come from a canvas, since browsers may change what they read from one.

import { act, announce, element, showImage } from "./api.js";

const MOST_SHOWN = 16e6;  // pixels of a canvas: the limit of phones
const MOST_UNDO = 3e8;  // bytes of what can be undone
const COLOUR = [255, 0, 80];
const SIZES = [1, 400];  // diameters, in pixels of an image of 1024

export class MaskPainter {
  // `values` is a byte for each of `width` × `height` pixels; `backgrounds` are {label, address} to paint over.
  constructor({ width, height, values, backgrounds, onsave, onclose }) {
    Object.assign(this, { width, height, values, onsave, onclose });
    this.old = values.slice();  // as it was before the present stroke
    this.undone = [];
    this.done = [];
    this.isChanged = false;
    this.changes = 0;
    this.scale = Math.max(1, Math.ceil(Math.sqrt(width * height / MOST_SHOWN)));
    this.unit = Math.max(width, height) / 1024;
    this.size = 60;
    this.tool = "paint";
    this.zoom = 1;
    this.x = width / 2;
    this.y = height / 2;
    this.build(backgrounds);
    this.show(0, 0, width, height);
    this.fits = new ResizeObserver(() => this.fit());
    this.fits.observe(this.frame);
    this.fit();
  }

  // ---- the elements --------------------------------------------------------------------------------------------------

  build(backgrounds) {
    this.canvas = element("canvas", { width: Math.ceil(this.width / this.scale), height: Math.ceil(this.height / this.scale), "aria-hidden": "true" });
    this.context = this.canvas.getContext("2d");
    this.image = showImage(element("img", { alt: "", draggable: "false" }), backgrounds.at(-1).address);
    this.cursor = element("div", { class: "cursor", "aria-hidden": "true" });
    this.stage = element("div", {
      class: "stage", tabindex: "0", role: "application", "aria-describedby": "mask-keys",
      "aria-label": "Mask: arrow keys move the brush, Space paints",
      onpointerdown: (event) => this.pressed(event), onpointermove: (event) => this.moved(event),
      onpointerup: (event) => this.released(event), onpointercancel: (event) => this.released(event),
      onpointerleave: () => { this.cursor.hidden = document.activeElement !== this.stage; },
      oncontextmenu: (event) => event.preventDefault(),
      onkeydown: (event) => this.keyed(event), onkeyup: (event) => { if (event.key === " " && this.isHeld) { this.isHeld = false; this.end(); } },
      onfocus: () => { this.cursor.hidden = false; this.place(); }, onblur: () => { if (this.isHeld || this.isDown) { this.isHeld = this.isDown = false; this.end(); } },
    }, this.image, this.canvas, this.cursor);
    this.frame = element("div", { class: "frame" }, this.stage);
    const button = (label, action, more = {}) => element("button", { type: "button", onclick: action, ...more }, label);
    const range = (label, min, max, value, step, action) => element("label", {}, label,
      element("input", { type: "range", min, max, step, value, oninput: (event) => action(Number(event.target.value)) }));
    this.tools = new Map([["paint", "Paint"], ["erase", "Erase"], ["move", "Move"]].map(([tool, label]) =>
      [tool, button(label, () => this.choose(tool), { "aria-pressed": String(tool === "paint") })]));
    const size = range("Brush", ...SIZES, this.size, 1, (value) => this.resize(value));
    this.sizeInput = size.querySelector("input");
    this.undoButton = button("Undo", () => this.undo(), { disabled: true, "data-repeats": "undo" });
    this.redoButton = button("Redo", () => this.redo(), { disabled: true, "data-repeats": "redo" });
    this.saveButton = button("Save the mask", () => act(this.saveButton, () => this.save()), { class: "primary" });
    this.state = element("span", { class: "muted", role: "status" });
    const choice = element("select", { onchange: (event) => { showImage(this.image, event.target.value); } },
      ...backgrounds.map(({ label, address }, i) => element("option", { value: address, selected: i === backgrounds.length - 1 }, label)));
    this.element = element("div", { class: "painter" },
      element("div", { class: "row", role: "group", "aria-label": "Brush" }, ...this.tools.values(), size,
        range("Zoom", 1, 8, 1, 0.25, (value) => { this.zoom = value; this.fit(); }),
        range("Opacity of the mask", 0, 1, 0.6, 0.05, (value) => { this.canvas.style.opacity = value; }),
        element("label", {}, "over the", choice)),
      this.frame,
      element("div", { class: "row", role: "group", "aria-label": "Whole mask" }, this.undoButton, this.redoButton,
        button("Fill", () => this.all(() => 255, "filled")), button("Clear", () => this.all(() => 0, "cleared")),
        button("Invert", () => this.all((value) => 255 - value, "inverted")),
        element("span", { class: "grows" }), this.state, button("Back to the row", () => this.onclose()), this.saveButton),
      element("p", { id: "mask-keys", class: "about" }, "White is where the target was edited; it is shown in colour. Keys on the image: ",
        ...["arrows move (with Shift by one pixel)", "Space paints", "[ ] size", "e paints or erases", "Ctrl+Z undoes"]
          .flatMap((text, i) => [i ? " · " : "", text])));
    this.canvas.style.opacity = 0.6;
    this.cursor.hidden = true;
  }

  choose(tool) {
    this.tool = tool;
    for (const [name, each] of this.tools) each.setAttribute("aria-pressed", name === tool);
    this.stage.classList.toggle("moves", tool === "move");
    announce(tool);
  }

  resize(size) {
    this.size = Math.min(Math.max(Math.round(size), SIZES[0]), SIZES[1]);
    this.sizeInput.value = this.size;
    this.place();
  }

  get radius() { return Math.max(0.5, this.size * this.unit / 2); }

  fit() {
    const { clientWidth, clientHeight } = this.frame;
    if (!clientWidth) return;
    const whole = Math.min(clientWidth / this.width, Math.max(clientHeight, 100) / this.height);
    this.pixel = whole * this.zoom;  // pixels of the screen for one of the image
    this.stage.style.width = `${this.width * this.pixel}px`;
    this.stage.style.height = `${this.height * this.pixel}px`;
    this.place();
  }

  // Where the brush is, as a circle.
  place() {
    if (!this.pixel) return;
    const diameter = 2 * this.radius * this.pixel;
    this.cursor.style.width = this.cursor.style.height = `${diameter}px`;
    this.cursor.style.transform = `translate(${this.x * this.pixel - diameter / 2}px, ${this.y * this.pixel - diameter / 2}px)`;
  }

  // Show the values of a rectangle.
  show(left, top, right, bottom) {
    const { scale, context, values, width, height } = this;
    const x0 = Math.floor(left / scale), y0 = Math.floor(top / scale);
    const columns = Math.ceil(right / scale) - x0, rows = Math.ceil(bottom / scale) - y0;
    if (columns <= 0 || rows <= 0) return;
    const shown = context.createImageData(columns, rows), words = new Uint32Array(shown.data.buffer);
    const colour = COLOUR[0] | COLOUR[1] << 8 | COLOUR[2] << 16;
    for (let y = 0, i = 0; y < rows; y++) {
      const start = Math.min((y0 + y) * scale, height - 1) * width;
      for (let x = 0; x < columns; x++, i++) words[i] = colour | values[start + Math.min((x0 + x) * scale, width - 1)] << 24;
    }
    context.putImageData(shown, x0, y0);
  }

  // ---- strokes -------------------------------------------------------------------------------------------------------

  at(event) {
    const box = this.stage.getBoundingClientRect();
    return [(event.clientX - box.left) / this.pixel, (event.clientY - box.top) / this.pixel];
  }

  pressed(event) {
    if (!event.isPrimary || this.isDown) return;
    this.stage.setPointerCapture(event.pointerId);
    this.isDown = true;
    if (this.tool === "move") { this.grip = [event.clientX, event.clientY]; return; }
    event.preventDefault();
    this.stage.focus({ preventScroll: true });
    [this.x, this.y] = this.at(event);
    this.begin(event.button === 2 || (event.buttons & 32) !== 0);
  }

  moved(event) {
    if (!event.isPrimary) return;
    if (this.tool === "move") {
      if (!this.isDown) return;
      this.frame.scrollBy(this.grip[0] - event.clientX, this.grip[1] - event.clientY);
      this.grip = [event.clientX, event.clientY];
      return;
    }
    this.cursor.hidden = false;
    const events = this.isDown ? event.getCoalescedEvents?.() ?? [] : [];
    for (const each of events.length ? events : [event]) this.moveTo(...this.at(each));
  }

  released(event) {
    if (!event.isPrimary || !this.isDown) return;
    this.isDown = false;
    if (this.tool !== "move") this.end();
  }

  moveTo(x, y) {
    const from = [this.x, this.y];
    [this.x, this.y] = [x, y];
    if (this.stroke) this.line(...from, x, y);
    this.place();
  }

  begin(erases = false) {
    this.stroke = { erases: erases || this.tool === "erase", box: [this.width, this.height, 0, 0] };
    this.line(this.x, this.y, this.x, this.y);
  }

  // Paint what is within the brush's radius of a line; the edge is half a pixel soft.
  line(ax, ay, bx, by) {
    const { width, height, values, radius, stroke } = this;
    const left = Math.max(0, Math.floor(Math.min(ax, bx) - radius - 1)), right = Math.min(width, Math.ceil(Math.max(ax, bx) + radius + 1));
    const top = Math.max(0, Math.floor(Math.min(ay, by) - radius - 1)), bottom = Math.min(height, Math.ceil(Math.max(ay, by) + radius + 1));
    if (left >= right || top >= bottom) return;
    const dx = bx - ax, dy = by - ay, length = dx * dx + dy * dy || 1;
    for (let y = top; y < bottom; y++) {
      for (let x = left; x < right; x++) {
        const px = x + 0.5 - ax, py = y + 0.5 - ay, along = Math.min(Math.max((px * dx + py * dy) / length, 0), 1);
        const distance = Math.hypot(px - along * dx, py - along * dy);
        const cover = Math.round(255 * Math.min(Math.max(radius + 0.5 - distance, 0), 1)), i = y * width + x;
        if (stroke.erases) { if (values[i] > 255 - cover) values[i] = 255 - cover; } else if (values[i] < cover) values[i] = cover;
      }
    }
    const box = stroke.box;
    stroke.box = [Math.min(box[0], left), Math.min(box[1], top), Math.max(box[2], right), Math.max(box[3], bottom)];
    this.show(left, top, right, bottom);
  }

  end() {
    if (!this.stroke) return;
    const box = this.stroke.box;
    this.stroke = null;
    this.remember(box);
  }

  all(change, word) {
    this.end();
    const { values } = this;
    for (let i = 0; i < values.length; i++) values[i] = change(values[i]);
    this.remember([0, 0, this.width, this.height]);
    this.show(0, 0, this.width, this.height);
    announce(`the mask is ${word}`);
  }

  // ---- undo ----------------------------------------------------------------------------------------------------------

  // What the rectangle was before becomes the newest that can be undone.
  remember(box) {
    if (box[0] >= box[2] || box[1] >= box[3]) return;
    this.done.push({ box, data: this.cut(this.old, box) });
    this.paste(this.old, box, this.cut(this.values, box));
    this.undone = [];
    let held = this.done.reduce((sum, each) => sum + each.data.length, 0);
    while (held > MOST_UNDO && this.done.length > 1) held -= this.done.shift().data.length;
    this.changed(true);
  }

  cut(from, [left, top, right, bottom]) {
    const data = new Uint8Array((right - left) * (bottom - top));
    for (let y = top, i = 0; y < bottom; y++, i += right - left) data.set(from.subarray(y * this.width + left, y * this.width + right), i);
    return data;
  }

  paste(to, [left, top, right, bottom], data) {
    for (let y = top, i = 0; y < bottom; y++, i += right - left) to.set(data.subarray(i, i + right - left), y * this.width + left);
  }

  swap(from, to, word) {
    this.end();
    const step = from.pop();
    if (!step) return;
    to.push({ box: step.box, data: this.cut(this.values, step.box) });
    this.paste(this.values, step.box, step.data);
    this.paste(this.old, step.box, step.data);
    this.show(...step.box);
    this.changed(true);
    announce(word);
  }

  undo() { this.swap(this.done, this.undone, "undone"); }
  redo() { this.swap(this.undone, this.done, "done again"); }

  changed(is) {
    this.isChanged = is;
    this.changes += 1;
    this.undoButton.disabled = !this.done.length;
    this.redoButton.disabled = !this.undone.length;
    this.state.textContent = is ? "not saved" : "saved";
  }

  // ---- keys ----------------------------------------------------------------------------------------------------------

  keyed(event) {
    const step = event.shiftKey ? 1 : Math.max(1, this.radius / 2), isCommand = event.ctrlKey || event.metaKey;
    const by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
    if (by && !event.altKey) {
      this.moveTo(Math.min(Math.max(this.x + by[0], 0), this.width), Math.min(Math.max(this.y + by[1], 0), this.height));
      this.cursor.scrollIntoView({ block: "nearest", inline: "nearest" });
    } else if (event.key === " ") {
      if (!event.repeat && !this.stroke) { this.isHeld = true; this.begin(); }
    } else if (event.key === "[") this.resize(this.size / 1.2 - 1);
    else if (event.key === "]") this.resize(this.size * 1.2 + 1);
    else if (event.key.toLowerCase() === "z" && isCommand) { if (event.shiftKey) this.redo(); else this.undo(); }
    else if (event.key.toLowerCase() === "y" && isCommand) this.redo();
    else if ((event.key === "s" || event.key === "Enter") && isCommand) act(this.saveButton, () => this.save());
    else if (event.key === "e" && !isCommand) this.choose(this.tool === "erase" ? "paint" : "erase");
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  // ---- the end -------------------------------------------------------------------------------------------------------

  async save() {
    this.end();
    const { changes } = this;
    await this.onsave(await deflated(this.values));
    if (changes === this.changes) this.changed(false);  // else something was painted meanwhile, which is not saved
  }

  // Whether nothing is lost; asks if something would be.
  mayClose() { return !this.isChanged || confirm("The mask is not saved. Leave without saving it?"); }

  close() { this.fits.disconnect(); this.element.remove(); }
}

async function through(stream, data) {
  return new Uint8Array(await new Response(new Blob([data]).stream().pipeThrough(stream)).arrayBuffer());
}

const deflated = (values) => through(new CompressionStream("deflate"), values);
export const inflated = (data) => through(new DecompressionStream("deflate"), data);
