// Requests to the program, errors on the page, and small helpers that every page uses.

import { currentToken, forget, signed } from "./token.js";

const AGAIN = 1000; // ms until what has failed is asked again

export class ApiError extends Error {
  constructor(status, answer) {
    super(answer.error ?? `the program answered ${status}`);
    Object.assign(this, { status, where: answer.where, expected: answer.expected, found: answer.found, do: answer.do });
    this.others = (answer.others ?? []).map((each) => new ApiError(status, each)); // of the same form
  }

  // The message with what the error says besides, on lines of its own.
  get lines() {
    const parts = [["where", this.where], ["expected", this.expected], ["found", this.found]];
    return [this.message, ...parts.filter(([, value]) => value).map(([name, value]) => `${name}: ${value}`)];
  }
}

// The answer to a request, which carries the token: sent as soon as this tab has one, and again if the program has
// another.
export async function ask(path, options = {}) {
  for (;;) {
    const token = await currentToken(), headers = { ...options.headers, Authorization: `Bearer ${token}` };
    const response = await send(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status !== 401) throw new ApiError(response.status, (await json(response)) ?? {});
    forget(token);
  }
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { error: "the program does not answer", do: "start `qwen-cache ui` again" });
  }
}

async function json(response) {
  const text = await response.text();
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

async function request(path, options) {
  const response = await ask(path, options), value = await json(response);
  if (value === undefined) throw new ApiError(response.status, {});
  return value;
}

export const get = (path, options = {}) => request(path, options);

const sent = (type, path, body, options) =>
  request(path, { method: "POST", headers: { "Content-Type": type }, body, ...options });

export const post = (path, body = {}, options = {}) => sent("application/json", path, JSON.stringify(body), options);

export const upload = (path, blob, options = {}) => sent("application/octet-stream", path, blob, options);

// Show the image at a path of the program; returns its element.
export function showImage(img, path) {
  img.dataset.path = path;
  signed(path).then((address) => { if (img.dataset.path === path) img.src = address; });
  return img;
}

// An element. Properties that start with `on` are listeners, others are attributes; true is an empty attribute, and
// null, undefined and false leave one out. Children are elements or text, never markup.
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export const at = (id) => document.getElementById(id);

// Set a text, unless it is there already: what is selected in it stays.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Make these the children of `place`, in this order. Those that are in their places stay untouched, and keep the focus.
export function arrange(place, nodes) {
  for (const old of [...place.children]) if (!nodes.includes(old)) old.remove();
  nodes.forEach((node, i) => { if (place.children[i] !== node) place.insertBefore(node, place.children[i] ?? null); });
}

// Make these the suggestions of a list.
export const offer = (list, values) =>
  list.replaceChildren(...values.map((value) => element("option", { value })));

// What a screen reader says, without moving the focus.
export function announce(text) {
  at("announcements").textContent = text;
}

// Show an error in place of another one; returns its element, which stays if it says the same.
export function showError(error) {
  if (error.name === "AbortError") return null;
  const lines = error.lines ?? [String(error.message ?? error)], before = at("errors").firstElementChild;
  const made = element("div", { class: "error" },
    element("p", {}, lines[0]),
    ...lines.slice(1).map((line) => element("p", { class: "detail" }, line)),
    error.do ? element("p", { class: "do" }, `→ ${error.do}`) : null,
    element("button", { type: "button", onclick: clearError }, "Dismiss"));
  if (before?.isEqualNode(made)) return before;
  at("errors").replaceChildren(made);
  return made;
}

export function clearError() {
  at("errors").replaceChildren();
}

// A double click is one click, and a key that is held down is pressed once: more of them would hit what the first one has
// brought. Buttons that one presses quickly name in `data-repeats` what they repeat.
let repeated; // by quick clicks at one place

addEventListener("click", (event) => {
  const pressed = event.target.closest("button") ?? event.target, { repeats } = pressed.dataset;
  if (event.detail < 2) repeated = repeats;
  else if (pressed.matches("button, dialog") && (!repeats || repeats !== repeated)) drop(event);
}, true);

addEventListener("keydown", (event) => {
  if (event.repeat && event.key === "Enter" && event.target.matches("button:not([data-repeats]), input")) drop(event);
}, true);

function drop(event) {
  event.preventDefault();
  event.stopImmediatePropagation();
}

// Run an action of the user; its error is shown, and the control is disabled meanwhile: a second click or key does nothing.
export async function act(control, action) {
  if (control?.disabled) return undefined;
  clearError();
  if (control) control.disabled = true;
  try {
    return await action();
  } catch (error) {
    showError(error);
  } finally {
    if (control) control.disabled = false;
  }
}

// The answer of `ask`, which is asked until it succeeds; its error is shown as long as it fails. Undefined once the answer
// is not wanted any more.
export async function answered(ask, isWanted = () => true) {
  let shown = null;
  try {
    while (isWanted()) {
      try {
        return await ask();
      } catch (error) {
        if (isWanted()) shown = showError(error) ?? shown;
        await new Promise((done) => setTimeout(done, AGAIN));
      }
    }
    return undefined;
  } finally {
    shown?.remove();
  }
}

// A function that asks until it is answered, and hands over the answer: `take(answer, ...given)`. A newer call takes the
// place of the older ones.
export function newest(ask, take) {
  let last = 0;
  return async (...given) => {
    const number = (last += 1), isWanted = () => number === last, answer = await answered(() => ask(...given), isWanted);
    if (isWanted()) take(answer, ...given);
  };
}

// Call `look` now and after every pause, which is longer while the page is hidden. The returned function lets it look
// now, or after the look under way; its promise ends with that look, whose error is shown.
export function poll(look, pause = () => 1000) {
  let timer, next = null, last = Promise.resolve(), shown = null;
  async function once() {
    next = null;
    clearTimeout(timer);
    try {
      await look();
      shown?.remove();
    } catch (error) {
      shown = showError(error) ?? shown;
    }
    clearTimeout(timer);
    timer = setTimeout(now, document.hidden ? 10 * pause() : pause());
  }
  const now = () => next ??= last = last.then(once);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) now(); });
  now();
  return now;
}

export async function copyText(text) {
  await navigator.clipboard.writeText(text);
  announce("copied");
}

// Characters that a page would not show, or that reorder what is around them.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;
const visible = (text) => text.replace(HIDDEN, (found) => `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

// A line that is broken between words alone: a browser also breaks one after a hyphen.
const words = (line) => visible(line).split(/(\s+)/).map((part, i) => i % 2 ? part : element("span", {}, part));

// Let the browser save a text as a file.
export function saveText(name, text) {
  const href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  element("a", { href, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}

// A command line with a button that copies it; `label` tells it from others on the page.
export function commandLine(line, label = "command line") {
  return element("div", { class: "command" },
    element("code", { tabindex: "0", role: "region", "aria-label": label }, ...words(line)),
    element("button", { type: "button", onclick: (event) => act(event.target, () => copyText(line)) }, "Copy"));
}

const UNITS = ["B", "kB", "MB", "GB", "TB"];

// `1.9 GB`, in powers of ten as disks are sold.
export function bytes(count) {
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) { count /= 1000; unit += 1; }
  return `${unit === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${UNITS[unit]}`;
}

// `42 s`, `3 min 10 s`, `2 h 05 min`.
export function time(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60), pad = (value) => String(value).padStart(2, "0");
  if (minutes < 60) return `${minutes} min ${pad(Math.floor(seconds % 60))} s`;
  return `${Math.floor(minutes / 60)} h ${pad(minutes % 60)} min`;
}

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
