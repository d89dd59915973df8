// The LoRA files of a run, to download: that of each checkpoint, and that of the run's end.

import { bytes, element, get, setText, showError } from "./api.js";
import { signed } from "./token.js";

export class Loras {
  constructor(folder) {
    this.folder = folder;
    this.list = element("ul", { class: "loras" });
    this.summary = element("summary", {}, "LoRA files to download");
    this.node = element("details", { hidden: true, ontoggle: () => this.load() }, this.summary, this.list);
  }

  // `run`: as the list of runs has it. The files are asked for while they are shown, and when there is a newer one.
  update(run) {
    this.node.hidden = !run?.lora;
    const newest = `${run?.lora?.path} ${run?.checkpoint}`;
    if (newest === this.newest) return;
    this.newest = newest;
    this.shown = null;
    this.load();
  }

  async load() {
    if (!this.node.open || this.node.hidden || this.shown === this.newest) return;
    this.shown = this.newest;
    try {
      const { loras } = await get(`/api/train/loras?${new URLSearchParams({ folder: this.folder })}`);
      this.list.replaceChildren(...await Promise.all(loras.map((lora) => this.row(lora))));
      setText(this.summary, `LoRA files to download (${loras.length})`);
    } catch (error) {
      this.shown = null;
      showError(error);
    }
  }

  async row({ step, bytes: size }) {
    const asked = new URLSearchParams({ folder: this.folder, ...(step === null ? {} : { step }) });
    const href = await signed(`/api/train/lora?${asked}`);
    const name = step === null ? "at its end" : `step ${step.toLocaleString("en")}`;
    return element("li", {}, element("a", { href, download: true, "aria-label": `Download the LoRA of ${this.folder}, ${name}` }, name),
      ` ${bytes(size)}`);
  }
}
