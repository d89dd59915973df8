// What a page keeps in this browser. A damaged value, and a browser that keeps nothing, are as if nothing had been kept.

// The object that is kept under a key; {} if there is none.
export function keptAt(key) {
  try {
    const value = JSON.parse(localStorage.getItem(key));
    return value && typeof value === "object" && !Array.isArray(value) ? value : {};
  } catch {
    return {};
  }
}

export function keepAt(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch { /* the storage is full, or forbidden */ }
}
