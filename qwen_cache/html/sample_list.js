// The list of a page that has all of its samples: every card is there, and filters hide some.
const samples = about.rows.map(named);
let matching = samples;

function show() {
  const inGroups = byId("flag").value === "near_duplicate", cards = [];
  let group = 0;
  for (const sample of matching) {
    if (inGroups && sample.near[0] !== group) cards.push(element("h3", groupTitle(sample), { className: "group" }));
    group = sample.near?.[0];
    cards.push(card(sample));
  }
  byId("samples-shown").replaceChildren(...cards);
  const { length } = matching, all = length === samples.length;
  byId("range").textContent = length ? `${all ? "" : `${length} of `}${plural(samples.length)}` : "none";
}

function filter() {
  matching = samples.filter(wanted());
  if (byId("flag").value === "near_duplicate") matching.sort((a, b) => a.near[0] - b.near[0]);
  show();
}

function follow() {
  const key = location.hash.slice(1);
  if (!samples.some((sample) => sample.key === key)) return;
  if (!matching.some((sample) => sample.key === key)) { byId("filters").reset(); filter(); }
  document.querySelector("article.chosen")?.classList.remove("chosen");
  byId(key).classList.add("chosen");
  byId(key).scrollIntoView({ block: "center" });
}

begin(filter, follow);
show();
follow();
