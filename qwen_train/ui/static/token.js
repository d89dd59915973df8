// The token of the program, which every request needs. It comes once, in the fragment of the address that the program
// opens or prints: no server and no other page sees it there. This tab keeps it in sessionStorage. A tab without one asks
// the other tabs of this program, then the user. Never a cookie: a browser sends those to every port of this machine.

const KEPT = "qwen-cache token";
const PATIENCE = 300; // ms that other tabs have to answer
const QUESTION = { asks: true };
const tabs = new BroadcastChannel(KEPT); // those of the same host and port
const dialog = document.getElementById("token"), form = dialog.querySelector("form"), problem = document.getElementById("token-problem");
const waiting = [], refused = new Set();
let token = sessionStorage.getItem(KEPT), entering = fromAddress();

// The token, as soon as this tab has one.
export async function currentToken() {
  await entering;
  return token ?? new Promise((done) => { waiting.push(done); ask(); });
}

// The program refuses this token: it was started again.
export function forget(old) {
  refused.add(old);
  if (token !== old) return;
  token = null;
  sessionStorage.removeItem(KEPT);
}

// A path with the key that opens it, for what the browser asks for by itself: images, and pages that commands have written.
export async function signed(path) {
  const { pathname, search } = new URL(path, location.origin), address = pathname + search, text = new TextEncoder();
  const key = await crypto.subtle.importKey("raw", text.encode(await currentToken()), { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const signature = new Uint8Array(await crypto.subtle.sign("HMAC", key, text.encode(address)));
  return `/signed/${Array.from(signature, (byte) => byte.toString(16).padStart(2, "0")).join("")}${address}`;
}

function take(given) {
  token = given;
  sessionStorage.setItem(KEPT, given);
  dialog.close();
  for (const done of waiting.splice(0)) done(given);
}

function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return enter(given);
}

// Exchange what an address has, perhaps for one use, for the token.
async function enter(given) {
  const headers = { Authorization: `Bearer ${encodeURIComponent(given)}` };
  const answer = await fetch("/api/token", { method: "POST", headers }).catch(() => null);
  if (!answer?.ok) {
    problem.textContent = answer ? "The token of that address is used up, or of an earlier start of the program." : "The program does not answer.";
    return;
  }
  problem.textContent = "";
  take((await answer.json()).token);
  tabs.postMessage({ token });
}

function ask() {
  tabs.postMessage(QUESTION);
  setTimeout(() => { if (!token && !dialog.open) dialog.showModal(); }, PATIENCE);
}

tabs.addEventListener("message", ({ data }) => {
  if (data.asks) { if (token) tabs.postMessage({ token }); }
  else if (!token && !refused.has(data.token)) take(data.token);
});
window.addEventListener("hashchange", () => { entering = fromAddress(); }); // the address was opened in this tab
dialog.addEventListener("close", () => { if (!token) dialog.showModal(); });
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const typed = form.elements.address.value.trim();
  entering = enter(typed.split("token=").at(-1));
});
