// The LoRA files of a run, to download: that of each checkpoint, and that of the run's end.

import { answered, bytes, element, get, setText } from "./api.js";
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
    this.newest = `${run?.lora?.path} ${run?.checkpoint}`;
    this.load();
  }

  async load() {
    const { newest } = this, isWanted = () => this.node.open && this.node.checkVisibility() && newest === this.newest;
    if (this.asked === newest || !isWanted()) return;
    this.asked = newest;
    const rows = await answered(() => this.rows(), isWanted);
    if (!isWanted()) {
      if (this.asked === newest) this.asked = null;
      return;
    }
    this.list.replaceChildren(...rows);
    setText(this.summary, `LoRA files to download (${rows.length})`);
  }

  async rows() {
    const { loras } = await get(`/api/train/loras?${new URLSearchParams({ folder: this.folder })}`);
    return Promise.all(loras.map((lora) => this.row(lora)));
  }

  async row({ step, bytes: size }) {
    const asked = new URLSearchParams({ folder: this.folder, ...(step === null ? {} : { step }) });
    const href = await signed(`/api/train/lora?${asked}`);
    const name = step === null ? "at its end" : `step ${step.toLocaleString("en")}`;
    return element("li", {}, element("a", { href, download: true, "aria-label": `Download the LoRA of ${this.folder}, ${name}` }, name),
      ` ${bytes(size)}`);
  }
}
