// The start of every page: the folder that is opened, as soon as this tab has the token; then the scripts of the page.

import { clearError, get, showError } from "./api.js";

async function openedFolder() {
  for (;;) {
    try {
      return await get("/api/folder");
    } catch (error) {
      showError(error);
      await new Promise((done) => setTimeout(done, 1000));
    }
  }
}

const { name, path } = await openedFolder();
clearError();
document.title = document.title.replace(" · ", () => ` · ${name} · `);
document.querySelector(".folder").textContent = name;
document.body.dataset.folder = path;
await Promise.all([import(`./${document.body.dataset.page}.js`), import("./jobs.js")]);
