// The rows of the list: in the page itself, or in files beside it that are loaded when they are needed.
"use strict";
const KEPT_FILES = 48, KEPT_IMAGES = 16;  // some 50 MB each
const byId = (name) => document.getElementById(name);
const about = JSON.parse(byId("samples").textContent);
const rowFiles = new Map(), imageFiles = new Map(), arrived = new Map();

// Every file calls this. They are scripts because a page that is opened from a disk may load these, and fetch nothing.
function data(name, value) {
  arrived.set(name, value);
}

function load(name, kept = rowFiles, most = KEPT_FILES) {
  const loading = kept.get(name) ?? new Promise((done, failed) => {
    const script = document.createElement("script"), lost = new Error(`${about.folder}/${name}.js cannot be loaded`);
    script.onload = () => {
      script.remove();
      if (arrived.has(name)) done(arrived.get(name)); else failed(lost);
      arrived.delete(name);
    };
    script.onerror = () => { script.remove(); kept.delete(name); failed(lost); };
    script.src = `${about.folder}/${name}.js`;
    document.head.append(script);
  });
  kept.delete(name);
  kept.set(name, loading);
  if (kept.size > most) kept.delete(kept.keys().next().value);
  return loading;
}

function named(row) {
  return Object.fromEntries(about.columns.map((column, i) => [column, row[i]]));
}

async function sampleAt(position) {
  const rows = await load(`rows-${Math.floor(position / about.chunk)}`);
  return named(rows[position % about.chunk]);
}

async function imagesAt(position) {
  const images = await load(`images-${Math.floor(position / about.pack)}`, imageFiles, KEPT_IMAGES);
  return images[position % about.pack];
}

// The position of a sample by its key; -1 where there is none.
async function findKey(key) {
  if (!/^[0-9a-f]{32}$/.test(key)) return -1;
  const [starts, positions] = await load(`keys-${key.slice(0, about.key_digits)}`);
  const rest = key.slice(about.key_digits, about.key_digits + starts[0]?.length);
  const found = positions[starts.indexOf(rest)] ?? -1;
  return found >= 0 && (await sampleAt(found)).key === key ? found : -1;
}

// Calls `use` with the number of each file of a kind, one after another, while it returns true; the next ones load meanwhile.
async function each(kind, files, use) {
  for (const [i, file] of files.entries()) {
    for (const next of files.slice(i + 1, i + 4)) load(`${kind}-${next}`).catch(() => {});
    if (!use(file, await load(`${kind}-${file}`))) return;
  }
}

const numbersTo = (count) => Array.from({ length: Math.ceil(count) }, (_, i) => i);
