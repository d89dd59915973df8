// The start of every page: the folder that is opened, as soon as this tab has the token; then the scripts of the page.

import { answered, get } from "./api.js";

const { name, path } = await answered(() => get("/api/folder"));
document.title = document.title.replace(" · ", () => ` · ${name} · `);
document.querySelector(".folder").textContent = name;
document.body.dataset.folder = path;
await Promise.all([import(`./${document.body.dataset.page}.js`), import("./jobs.js")]);
