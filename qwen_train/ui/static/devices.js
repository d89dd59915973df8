// The devices of this machine: controls that choose among them, and a list of them with their memory.

import { act, announce, answered, arrange, bytes, element, get, plural, post } from "./api.js";

const CPU = { name: "cpu", title: "CPU", memory: null, free: null };
const listeners = [];
let known = null, asked = null;

// {devices: [{name, title, memory, free, bf16}], problem, do}. The first look takes seconds; its answer is kept.
export function loadDevices() {
  asked ??= answered(() => get("/api/devices")).then(tell);
  return asked;
}

export async function lookAgain() {
  const found = await post("/api/devices/again");
  asked = Promise.resolve(found);
  announce(plural(found.devices.length, "device"));
  return tell(found);
}

function tell(found) {
  known = found;
  for (const listener of listeners) listener(found);
  return found;
}

// Call `listener` with the devices: at once if they are known, and whenever they were looked for.
export function onDevices(listener) {
  listeners.push(listener);
  if (known) listener(known);
}

export const describeDevice = (device) =>
  [device.title === device.name || device.name === "cpu" ? device.name : `${device.name}: ${device.title}`,
    device.memory ? bytes(device.memory) : null].filter(Boolean).join(", ");

// The list of devices, what is wrong with them, and a button that looks again.
export function deviceList() {
  const list = element("ul", { class: "devices" }), problem = element("p", { class: "about" }, "Looking for devices…");
  onDevices((found) => {
    list.replaceChildren(...found.devices.map((device) => element("li", {},
      element("strong", {}, device.name), device.name === "cpu" ? "" : ` ${device.title}`,
      device.memory ? element("span", { class: "muted" }, ` ${bytes(device.memory)}` +
        (device.free === null ? "" : `, ${bytes(device.free)} free`)) : null)));
    problem.textContent = [found.problem, found.do && `→ ${found.do}`].filter(Boolean).join(" ");
    problem.hidden = !problem.textContent;
  });
  const again = element("button", { type: "button", onclick: () => act(again, lookAgain) }, "Look again");
  loadDevices();
  return element("div", {}, list, problem, again);
}

// A control that chooses a device, or `several`: {node, value, set(value)}. `value` is as commands take it: "auto",
// "cuda:0" or "cuda:0,cuda:1". A value that names no known device stays a choice. `onchange` gets each new value.
export function deviceSelect(label, { allowAuto = true, several = false, value = allowAuto ? "auto" : "", about = "", onchange = () => {} } = {}) {
  return (several ? manyDevices : oneDevice)(label, { allowAuto, value, about, onchange });
}

let count = 0;

function oneDevice(label, { allowAuto, value, about, onchange }) {
  const id = `device-${(count += 1)}`;
  const select = element("select", { id, "aria-describedby": about ? `${id}-about` : null, onchange: () => onchange(select.value) });
  const node = element("div", { class: "setting" }, element("label", { for: id }, label), select,
    about ? element("p", { id: `${id}-about`, class: "about" }, about) : null);

  function fill(devices, chosen) {
    select.replaceChildren(...choices(devices, allowAuto, [chosen]).map((each) =>
      element("option", { value: each.name, selected: each.name === chosen }, each.text)));
  }

  let wanted = value; // until the devices are known, which decides the first one without `auto`
  const control = {
    node,
    get value() { return select.value; },
    set(chosen) { wanted = chosen; fill(known?.devices ?? [CPU], chosen); },
  };
  select.addEventListener("change", () => { wanted = select.value; });
  control.set(value);
  onDevices((found) => {
    const before = select.value;
    fill(found.devices, wanted || (found.devices[0]?.name ?? "cpu"));
    if (select.value !== before) onchange(select.value);
  });
  loadDevices();
  return control;
}

function manyDevices(label, { allowAuto, value, about, onchange }) {
  const id = `device-${(count += 1)}`;
  const boxes = element("div", { class: "row" });
  const node = element("fieldset", { class: "device-choice", "aria-describedby": about ? `${id}-about` : null },
    element("legend", {}, label), boxes, about ? element("p", { id: `${id}-about`, class: "about" }, about) : null);
  let chosen = split(value);

  const text = () => chosen.length ? chosen.join(",") : allowAuto ? "auto" : "";

  function choose(name, isOn) {
    if (name === "auto") chosen = isOn || !chosen.length ? ["auto"] : chosen;
    else chosen = [...chosen.filter((each) => each !== name && each !== "auto"), ...(isOn ? [name] : [])];
    if (allowAuto && !chosen.length) chosen = ["auto"];
    mark();
    onchange(text());
  }

  function mark() {
    for (const box of boxes.querySelectorAll("input")) box.checked = chosen.includes(box.value);
  }

  // Boxes that exist stay, so that none loses the focus.
  function fill(devices) {
    const wanted = choices(devices, allowAuto, chosen);
    const old = new Map([...boxes.children].map((row) => [row.dataset.name, row]));
    const rows = wanted.map((each) => {
      const row = old.get(each.name) ?? element("label", { "data-name": each.name },
        element("input", { type: "checkbox", value: each.name, onchange: (event) => choose(each.name, event.target.checked) }),
        element("span", {}));
      row.lastChild.textContent = each.text;
      return row;
    });
    arrange(boxes, rows);
    mark();
  }

  fill([CPU]);
  onDevices((found) => fill(found.devices));
  loadDevices();
  return { node, get value() { return text(); }, set(given) { chosen = split(given); fill(known?.devices ?? [CPU]); } };
}

const split = (value) => String(value ?? "").split(",").map((each) => each.trim()).filter(Boolean);

// The choices: auto, the devices, and what else is chosen.
function choices(devices, allowAuto, chosen) {
  const listed = devices.map((device) => ({ name: device.name, text: describeDevice(device) }));
  const auto = allowAuto ? [{ name: "auto", text: "auto (chosen by the command)" }] : [];
  const all = [...auto, ...listed];
  const others = chosen.filter((name) => name && !all.some((each) => each.name === name));
  return [...all, ...others.map((name) => ({ name, text: known ? `${name} (not found here)` : name }))];
}
