// Thumbnails of rows: few requests at a time, the latest first, and none for what has been scrolled past.

import { element, showImage } from "./api.js";

const AT_ONCE = 4;  // of the six requests that a browser makes to one program: rows must not wait for images
const waiting = new Set(), loading = new Set();

export const roleName = (role) => role.startsWith("control-") ? `control${role === "control-0" ? "" : ` ${Number(role.slice(8)) + 1}`}` : role;

export const imageAddress = (source, row, role, size, v = "") =>
  `/api/data/image?${new URLSearchParams({ source, row, role, size, v })}`;

// An image that is loaded when its turn comes; `drop` cancels it.
export function thumbnail() {
  const img = element("img", { alt: "", decoding: "async", draggable: "false" });
  img.addEventListener("load", () => ended(img, "there"));
  img.addEventListener("error", () => ended(img, "broken"));
  return img;
}

export function want(img, address) {
  if (img.dataset.path === address) return;
  drop(img);
  img.dataset.path = address;
  waiting.add(img);
  next();
}

export function drop(img) {
  waiting.delete(img);
  loading.delete(img);
  img.removeAttribute("src");
  delete img.dataset.path;
  delete img.dataset.state;
  next();
}

function ended(img, state) {
  if (!loading.delete(img)) return;
  img.dataset.state = state;
  if (state === "broken") dispatchEvent(new Event("thumbnail-broken"));  // the program knows the reason now
  next();
}

function next() {
  while (loading.size < AT_ONCE && waiting.size) {
    const img = [...waiting].at(-1);
    waiting.delete(img);
    loading.add(img);
    showImage(img, img.dataset.path);
  }
}
