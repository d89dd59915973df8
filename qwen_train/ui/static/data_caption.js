// Captions by a model: a form that is the command line of `caption`, its jobs, and what to do with the drafts.

import { act, announce, at, element, get, offer, plural, setText } from "./api.js";
import { CommandForm } from "./command_form.js";
import { deviceSelect } from "./devices.js";
import { JobCards } from "./job_card.js";
import { isActive, isEnded, look, newestFirst, onJobs } from "./jobs.js";
import { chosen, kept, linkTo } from "./project.js";

const OWN = {
  captioner: "", instruction: "", edit_instruction: "", max_new_tokens: "", text_device: "auto", replace: false, skip: false,
};
const FIELDS = {
  "model.path": "caption-model", "caption.model": "caption-captioner", "caption.instruction": "caption-instruction",
  "caption.edit_instruction": "caption-edit", "caption.max_new_tokens": "caption-tokens",
};

export class CaptionPanel {
  // `page` has `source`, `filterBy(name)`, `changed()`.
  constructor(place, jobs, page) {
    Object.assign(this, { place, page });
    this.cards = new JobCards({ extra: (job, card) => this.tellOf(job, card) });
    onJobs((answer) => this.showJobs(jobs, answer));
  }

  async show(is = this.place.hidden, button = this.button) {
    this.button = button;
    this.place.hidden = !is;
    button?.setAttribute("aria-expanded", is);
    if (!is) { button?.focus(); return; }
    if (!this.form) await this.make();
    await this.form.ask();
    at("caption-title").focus();
  }

  async make() {
    const { values, models } = await get("/api/data/caption"), own = { ...OWN, ...kept("caption", OWN) };
    const text = (id, label, about, made) => {
      for (const [name, value] of Object.entries({ id, autocomplete: "off", spellcheck: "false" })) made.setAttribute(name, value);
      made.setAttribute("aria-describedby", `${id}-about ${id}-problem`);
      return element("div", { class: "setting" }, element("label", { for: id }, label), made,
        element("p", { id: `${id}-problem`, class: "problem", hidden: true }), element("p", { id: `${id}-about`, class: "about" }, about));
    };
    const input = (value, more = {}) => element("input", { type: "text", value, ...more });
    const area = (value, placeholder) => element("textarea", { rows: 4, placeholder }, value);
    const radio = (id, label, checked) =>
      element("label", {}, element("input", { type: "radio", name: "caption-rows", id, checked }), label);
    this.device = deviceSelect("Device", {
      several: true, value: own.text_device, about: "With several, the model is loaded on each.", onchange: () => this.changed(),
    });
    this.about = element("p", { role: "status" });
    const line = element("div"), grey = "Empty: the question in grey.";
    const start = element("button", { id: "caption-start", type: "submit", class: "primary", disabled: true }, "Write captions");
    const form = element("form", { novalidate: true },
      element("h2", { id: "caption-title", tabindex: "-1" }, "Write captions with a model"),
      element("fieldset", {}, element("legend", {}, "Which rows"), element("div", { class: "row" },
        radio("caption-missing", "rows without a prompt", !own.replace),
        radio("caption-all", "all rows, also over prompts (--replace)", own.replace))),
      element("div", { class: "settings" },
        text("caption-model", "Model", "Its text encoder writes: a diffusers folder, or a repository on the hub.",
          input(chosen("model") || values.model || "", { list: "caption-models" })),
        text("caption-captioner", "Another captioner (--captioner)", "A larger Qwen2.5-VL or Qwen3-VL; empty: the model's text encoder.",
          input(own.captioner)),
        this.device.node,
        text("caption-tokens", "Most tokens of a caption", `Empty: ${values.max_new_tokens}.`,
          input(own.max_new_tokens, { inputmode: "numeric" }))),
      element("details", { open: Boolean(own.instruction || own.edit_instruction) }, element("summary", {}, "What the model is asked"),
        element("div", { class: "settings" },
          text("caption-edit", "About controls and target", grey, area(own.edit_instruction, values.edit_instruction)),
          text("caption-instruction", "About an image without controls", grey, area(own.instruction, values.instruction)))),
      element("label", { class: "row" }, element("input", { type: "checkbox", id: "caption-skip", checked: own.skip }),
        "Leave rows with problems out of it"),
      element("datalist", { id: "caption-models" }), this.about, line,
      element("div", { id: "problems", class: "problem", role: "status", hidden: true }),
      element("div", { class: "row" }, start, element("button", { type: "button", onclick: () => this.show(false) }, "Close")));
    this.place.replaceChildren(form);
    offer(at("caption-models"), models);
    this.form = new CommandForm({
      name: "caption", path: "/api/data/caption/command", body: () => this.page.source ? this.body() : null,
      choices: () => ({ model: at("caption-model").value.trim() }), values: () => this.own(), settings: { showProblems() {} },
      place: line, label: "command line of the captions", fields: FIELDS, buttons: ["caption-start"],
      isUseless: () => this.count === 0, onanswer: () => this.tell(),
    });
    const ask = this.form.ask.bind(this.form);
    this.form.ask = async () => { setText(this.about, "reading the source…"); this.count = null; await ask(); };
    form.addEventListener("input", () => this.changed());
    form.addEventListener("submit", (event) => { event.preventDefault(); this.start(); });
    form.addEventListener("keydown", (event) => { if (event.key === "Escape") this.show(false); });
  }

  own() {
    const value = (id) => at(id).value.trim();
    return {
      captioner: value("caption-captioner"), instruction: value("caption-instruction"), edit_instruction: value("caption-edit"),
      max_new_tokens: value("caption-tokens"), text_device: this.device.value,
      replace: at("caption-all").checked, skip: at("caption-skip").checked,
    };
  }

  body() {
    const { skip, max_new_tokens: tokens, ...own } = this.own(), model = at("caption-model").value.trim();
    return { source: this.page.source, model, ...own, max_new_tokens: tokens ? Number(tokens) || 0 : null, on_error: skip ? "skip" : "" };
  }

  changed() { this.form?.changed(); }

  // What the command would do, in words.
  tell() {
    const found = this.form.answer?.about;
    if (!found) { setText(this.about, ""); return; }
    this.count = found.missing;
    const copies = found.to !== this.page.source ? ` into ${found.to}, a copy of the table` : ", a text file beside each image";
    const all = at("caption-all").checked && found.missing ? " The prompts that they have are kept as old versions." : "";
    setText(this.about, found.missing
      ? `${plural(found.missing, "caption")} for ${plural(found.rows, "row")}${copies}.${all}` : "Every row has a prompt.");
    this.form.enable();
  }

  start() {
    return this.form.act("caption-start", async () => {
      const job = await this.form.send("/api/data/caption/start");
      if (!job) return;
      announce("the captions are queued");
      await look();
      this.cards.reveal(job);
      this.page.changed();
    });
  }

  async showJobs(place, answer) {
    const { source } = this.page;
    const isMine = ({ kind, about }) => kind === "caption" && [about.source, about.to].includes(source);
    const mine = newestFirst(answer.jobs.filter(isMine));
    const shown = source ? mine.filter((job, i) => !isEnded(job) || i === 0) : [];
    place.hidden = !shown.length;
    await this.cards.show([[place, shown]], answer);
    if (this.active && !mine.some(isActive)) this.page.changed();
    this.active = mine.some(isActive);
  }

  // The way from a job to its drafts.
  tellOf(job, card) {
    if (!isEnded(job) || card.isTold) return;
    card.isTold = true;
    const isHere = job.about.to === this.page.source;
    const go = isHere
      ? element("button", { type: "button", onclick: () => this.page.filterBy("drafts") }, "Read the drafts")
      : element("a", { href: linkTo("data", { source: job.about.to }) }, `Open ${job.about.to}`);
    if (isHere || job.state === "done") card.extra.append(element("div", { class: "row" }, go));
  }
}
