// A new folder from files that are dropped or chosen. The program checks them all before the first one is sent, and the
// folder is there when the last one has come.

import { act, ApiError, announce, at, bytes, element, plural, post, setText, upload } from "./api.js";

const IMAGE = /\.(png|jpe?g|jpe|jfif|webp|bmp|tiff?|avif|gif|hei[cf]|hif|jxl|apng|p[pgbn]m)$/i;
const OTHER = /\.(txt|csv|tsv|jsonl|json)$/i;
const AT_ONCE = 3;  // files that are sent

let files = [];  // {path, role, file}

// `open(source)` is called when the folder is there.
export function startUploads(open) {
  const place = at("drop");
  for (const name of ["dragover", "dragenter"]) {
    place.addEventListener(name, (event) => { event.preventDefault(); place.classList.add("over"); });
  }
  place.addEventListener("dragleave", () => place.classList.remove("over"));
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    place.classList.remove("over");
    const items = [...event.dataTransfer.items].filter(({ kind }) => kind === "file"), found = items.map(dropped);
    act(null, async () => {
      if (!found.length) throw new ApiError(0, { error: "what was dropped is no file", do: "drop files or a folder of this machine" });
      add((await Promise.all(found)).flat());
    });
  });
  for (const id of ["choose-files", "choose-folder"]) {
    at(id).addEventListener("change", (event) => {
      add([...event.target.files].map((file) => ({ path: file.webkitRelativePath || file.name, file })));
      event.target.value = "";
    });
  }
  at("choose-files-button").addEventListener("click", () => at("choose-files").click());
  at("choose-folder-button").addEventListener("click", () => at("choose-folder").click());
  at("forget-files").addEventListener("click", () => { files = []; show(); });
  at("new-source").addEventListener("submit", (event) => {
    event.preventDefault();
    act(event.submitter, () => send(open));
  });
  show();
}

// The files of an item that was dropped: those below a folder, or the file itself. An item is there during the event alone.
function dropped(item) {
  const entry = item.webkitGetAsEntry?.(), file = item.getAsFile();
  return entry ? below(entry) : Promise.resolve([{ path: file.name, file }]);
}

// The files of an entry, with their paths in its folder.
async function below(entry, start = "") {
  const path = start + entry.name;
  if (entry.isFile) return [{ path, file: await new Promise((done, failed) => entry.file(done, failed)) }];
  const reader = entry.createReader(), found = [];
  for (;;) {  // a browser gives a hundred at a time
    const some = await new Promise((done, failed) => reader.readEntries(done, failed));
    if (!some.length) break;
    found.push(...some);
  }
  return (await Promise.all(found.map((each) => below(each, `${path}/`)))).flat();
}

function add(more) {
  const role = at("role").value, isTaken = ({ path }) => IMAGE.test(path) || OTHER.test(path);
  const taken = more.filter((each) => isTaken(each) && !each.path.split("/").some((part) => part.startsWith(".")));
  files.push(...taken.map((each) => ({ ...each, role })));
  const left = more.length - taken.length;
  show(left ? `${plural(left, "file")} left out: no image, prompt or table` : "");
  announce(at("chosen-files").textContent);
}

function show(note = "") {
  const of = (role) => files.filter((each) => each.role === role && IMAGE.test(each.path)).length;
  const names = { target: "target", control: "control", mask: "edit mask", sorted: "image in its folder" };
  const parts = Object.entries(names).filter(([role]) => of(role)).map(([role, name]) =>
    `${plural(of(role), name).replace("image in its folders", "images in their folders")}`);
  const prompts = files.filter(({ path }) => /\.txt$/i.test(path)).length;
  const others = files.filter(({ path }) => OTHER.test(path)).length - prompts;
  if (prompts) parts.push(plural(prompts, "prompt"));
  if (others) parts.push(plural(others, "table"));
  const size = files.reduce((sum, { file }) => sum + file.size, 0);
  const about = files.length ? `${parts.join(", ")}: ${bytes(size)}` : "nothing added yet";
  setText(at("chosen-files"), [about, note].filter(Boolean).join("; "));
  at("create-source").disabled = at("forget-files").hidden = !files.length;
}

async function send(open) {
  const sent = [...files], name = at("new-name").value.trim(), progress = at("upload-progress");
  const told = sent.map(({ path, role, file }) => ({ path, role, size: file.size }));
  const { id } = await post("/api/data/new", { name, files: told });
  let next = 0, done = 0, failed = null;
  progress.replaceChildren(element("progress", { max: sent.length, value: 0, "aria-label": "files sent" }), element("span", {}));
  const one = async () => {
    while (next < sent.length && !failed) {
      const number = next++;
      try {
        await upload(`/api/data/new/file?${new URLSearchParams({ id, number })}`, sent[number].file);
      } catch (error) { failed ??= error; }
      done += 1;
      progress.firstChild.value = done;
      setText(progress.lastChild, `${done.toLocaleString("en")} of ${plural(sent.length, "file")}`);
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, one));
  const query = new URLSearchParams({ id });
  try {
    if (failed) throw failed;
    const { source } = await post(`/api/data/new/finish?${query}`);
    files = files.filter((each) => !sent.includes(each));  // without those that were added meanwhile
    show();
    announce(`${source} is there`);
    if (!at("folder").hidden) await open(source);  // unless the user has opened another one
  } catch (error) {
    await post(`/api/data/new/end?${query}`).catch(() => {});
    throw error;
  } finally {
    progress.replaceChildren();
  }
}
