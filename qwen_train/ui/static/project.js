// What this browser remembers of the opened folder, under one key: what was chosen last, which all pages share, and what
// each form has besides. A damaged value, and a browser that keeps nothing, are as if nothing had been kept.
//
// A link to another page has what it chooses in its address. It is taken from there once, so that a reload shows what
// was chosen since.

const CHOICES = ["source", "model", "cache", "run", "lora"];
const KEY = `qwen-cache ${document.body.dataset.folder}`;

const kindOf = (value) => Array.isArray(value) ? "list" : value === null ? "null" : typeof value;

function read() {
  try {
    const value = JSON.parse(localStorage.getItem(KEY));
    return kindOf(value) === "object" ? value : {};
  } catch {
    return {};
  }
}

// Other windows may have written since: only what changes is replaced.
function write(changes) {
  try {
    localStorage.setItem(KEY, JSON.stringify({ ...read(), ...changes }));
  } catch { /* the storage is full, or forbidden */ }
}

// A choice; empty if there is none.
export function chosen(name) {
  const value = read()[name];
  return typeof value === "string" ? value : "";
}

// {name: text}; an empty text forgets the choice.
export const choose = (choices) => write(choices);

// What is kept of a form: of the entries those that are of the same kind as in `example`.
export function kept(form, example) {
  const value = read()[`form ${form}`];
  const isGood = ([name, each]) => name in example && kindOf(each) === kindOf(example[name]);
  return Object.fromEntries(Object.entries(kindOf(value) === "object" ? value : {}).filter(isGood));
}

export const keep = (form, value) => write({ [`form ${form}`]: value });

// The address of a page that shows these choices.
export function linkTo(page, choices) {
  return `/${page}?${new URLSearchParams(Object.entries(choices).filter(([, value]) => value))}`;
}

const address = new URL(location.href), asked = CHOICES.filter((name) => address.searchParams.has(name));
if (asked.length) {
  choose(Object.fromEntries(asked.map((name) => [name, address.searchParams.get(name)])));
  for (const name of asked) address.searchParams.delete(name);
  history.replaceState(null, "", address);
}
