// The input of a setting by its kind: how its value is shown, and what is read from it. What cannot be read stays text:
// the command's own check says what is wrong with it.

import { element } from "./api.js";

const GB = 1e9, NUMBER = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i, SIZE = /^([\d.]+)\s*GB$/i, SQUARE = /^(\d+)\s*(?:²|\^2)$/, SIDES = /^(\d+)\s*[x×]\s*(\d+)$/i;

const joined = (value, each) => [].concat(value ?? []).map(each).join(", ");
const parts = (text) => text.split(",").map((each) => each.trim()).filter(Boolean);
const number = (text) => (NUMBER.test(text) ? Number(text) : text);

const size = (text) => (SIZE.test(text) ? Math.round(SIZE.exec(text)[1] * GB) : number(text));

function area(text) {
  const [, side] = SQUARE.exec(text) ?? [], [, width, height] = SIDES.exec(text) ?? [];
  return side ? side ** 2 : width ? width * height : number(text);
}

function sides(text) {
  const [, width, height] = SIDES.exec(text) ?? [];
  return width ? [Number(width), Number(height)] : text;
}

const one = (values) => (values.length === 1 ? values[0] : values);
const squared = (value) => (Number.isInteger(Math.sqrt(value)) ? `${Math.sqrt(value)}²` : String(value));

// By kind: the text of a value, the value of a text that is not empty, and the keyboard of a phone.
const KINDS = {
  integer: { text: String, read: number, inputmode: "numeric" },
  number: { text: String, read: number, inputmode: "decimal" },
  bytes: { text: (value) => (typeof value === "number" && value % GB === 0 ? `${value / GB} GB` : String(value)), read: size },
  area: { text: (value) => joined(value, squared), read: (text) => one(parts(text).map(area)), hint: "such as 1024² or 1024×768" },
  sizes: {
    text: (value) => joined(value, (each) => (Array.isArray(each) ? each.join("×") : each)),
    read: (text) => parts(text).map(sides), hint: "such as 1024×1024, 1328×800",
  },
  numbers: { text: (value) => joined(value, String), read: (text) => parts(text).map(number), hint: "with commas between" },
  list: { text: (value) => joined(value, String), read: parts, hint: "with commas between" },
  text: { text: (value) => (typeof value === "string" ? value : JSON.stringify(value)), read: (text) => text },
};
KINDS.yaml = { ...KINDS.text, read: (text) => json(text) };

const kindOf = (setting) => KINDS[setting.kind] ?? KINDS.text;

function json(text) {
  try { return JSON.parse(text); } catch { return text; }
}

export const hasValue = (value) => value !== null && value !== undefined && value !== "";

// A value as text, as a form shows it.
export function shown(setting, value) {
  if (setting.kind === "flag") return value ? "on" : "off";
  return hasValue(value) ? kindOf(setting).text(value) : "";
}

// The limits of a number in words; empty without any.
export function limits({ kind, bounds }) {
  const { ge, gt, le, lt, multiple_of: step } = bounds, whole = kind === "integer";
  const least = ge ?? (whole && gt !== undefined ? gt + 1 : undefined), isSmall = (limit) => limit < 1e6;
  return [
    least !== undefined && `at least ${least}`, least === undefined && gt !== undefined && `above ${gt}`,
    isSmall(le) && `at most ${le}`, isSmall(lt) && `below ${lt}`, step && `a multiple of ${step}`,
  ].filter(Boolean).join(", ");
}

export function inputOf(setting, value, id) {
  const shared = { id, "aria-describedby": `${id}-about ${id}-problem` };
  let made;
  if (setting.kind === "choice") {
    const choices = setting.value === null || setting.default === null ? ["", ...setting.choices] : setting.choices;
    const options = choices.map((choice) => element("option", { value: choice }, choice || "(none)"));
    made = element("select", shared, ...options);
  } else if (setting.kind === "flag") made = element("input", { ...shared, type: "checkbox" });
  else {
    const { inputmode = "text", hint } = kindOf(setting);
    made = element("input", { ...shared, type: "text", inputmode, placeholder: hint, autocomplete: "off", spellcheck: "false" });
  }
  show(made, setting, value);
  return made;
}

export function show(input, setting, value) {
  if (setting.kind === "flag") input.checked = Boolean(value);
  else input.value = hasValue(value) ? (setting.kind === "choice" ? String(value) : shown(setting, value)) : "";
}

export function read(input, setting) {
  if (setting.kind === "flag") return input.checked;
  const given = input.value.trim();
  if (setting.kind === "choice" && ["true", "false"].includes(given)) return given === "true";
  if (given === "") return setting.default ?? null;
  return /^[[{]/.test(given) ? json(given) : kindOf(setting).read(given);
}
