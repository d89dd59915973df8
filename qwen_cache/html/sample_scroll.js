// Scrolling through any number of samples: cards of equal height, of which only those near the window exist.
// An element has at most MOST pixels, so in a longer list a pixel of the scrollbar stands for several of the list, except
// near both ends. A scroll by less than JUMP windows moves the cards by as many pixels; afterwards the bar is corrected.
const MOST = 8e6;  // pixels: Firefox shows no element of more than 17.8 million, Chromium of 33.5 million
const END = 1e6;  // pixels at both ends
const JUMP = 2, NEAR = 600, REST = 200;  // windows, pixels, ms
const space = byId("space"), shownCards = byId("samples-shown");
const shown = new Map();  // cards by their index
let columns = 1, height = 1, longest = 0, extent = 0, shift = 0, last = 0, filledAt = 0, chosen = -1, resting, filling;

// From pixels of the bar to pixels of the list, and back; both without those of one window.
const toList = (s) => convert(s, extent, longest);
const toBar = (v) => convert(v, longest, extent);
function convert(from, most, other) {
  if (most === other || from <= END) return Math.min(from, other);
  if (from >= most - END) return other - (most - from);
  return END + (from - END) * (other - 2 * END) / (most - 2 * END);
}

function measure() {
  const style = getComputedStyle(shownCards), gap = parseFloat(style.rowGap);
  columns = style.gridTemplateColumns.split(" ").length;
  height = parseFloat(style.gridAutoRows) + gap;
  const whole = Math.ceil(count() / columns) * height;
  space.style.height = `${Math.min(whole, MOST)}px`;
  longest = Math.max(0, whole - innerHeight);
  extent = Math.max(0, Math.min(whole, MOST) - innerHeight);
}

// Another list, or another width of the window: everything is placed again.
function renew(first = 0) {
  for (const each of shown.values()) each.remove();
  shown.clear();
  measure();
  shift = 0;
  if (first || space.getBoundingClientRect().top < 0) moveTo(Math.floor(first / columns) * height);
  place();
}

const barPosition = () => Math.min(Math.max(-space.getBoundingClientRect().top, 0), extent);

// Scrolls until the list shows its pixel `v` at the top of the window.
function moveTo(v) {
  const position = toBar(Math.min(Math.max(v, 0), longest));
  scrollTo(0, scrollY + space.getBoundingClientRect().top + position);
  last = barPosition();
  shift = Math.min(Math.max(v, 0), longest) - last;
}

function goTo(index) {
  chosen = positionAt(index);
  moveTo((Math.floor(index / columns) + 0.5) * height - innerHeight / 2);
  for (const each of shown.values()) each.classList.remove("chosen");
  shown.get(index)?.classList.add("chosen");
  place();
}
function scrolled() {
  const bar = barPosition();
  if (Math.abs(bar - last) > JUMP * innerHeight) shift = toList(bar) - bar;
  else if ((bar <= 0 && shift > 0) || (bar >= extent && bar + shift < longest)) return moveTo(last + shift);
  last = bar;
  place();
  clearTimeout(resting);
  resting = setTimeout(() => { if (Math.abs(toBar(last + shift) - last) > 1) moveTo(last + shift); place(); }, REST);
}

function place() {
  const top = last + shift, begin = Math.max(0, Math.floor((top - NEAR) / height));
  const first = begin * columns, end = Math.min(count(), Math.ceil((top + innerHeight + NEAR) / height) * columns);
  shownCards.style.top = `${begin * height - shift}px`;
  for (const [index, each] of shown) if (index < first || index >= end) { each.remove(); shown.delete(index); }
  let before = null;
  for (let index = end - 1; index >= first; index--) {
    if (!shown.has(index)) {
      shown.set(index, element("article", "", { className: "waiting" }));
      shownCards.insertBefore(shown.get(index), before);
    }
    before = shown.get(index);
  }
  const onScreen = Math.max(0, Math.floor(top / height)) * columns;
  const lastOnScreen = Math.min(count(), Math.max(1, Math.ceil((top + innerHeight) / height)) * columns);
  byId("range").textContent = count() ? `${grouped(onScreen + 1)} to ${grouped(lastOnScreen)} of ${grouped(count())}` : "none";
  clearTimeout(filling);
  filling = setTimeout(fill, Math.abs(last - filledAt) > JUMP * innerHeight ? 60 : 0);  // not while the bar is dragged
}

function fill() {
  filledAt = last;
  for (const [index, waiting] of shown) {
    if (!waiting.classList.contains("waiting") || waiting.loading) continue;
    waiting.loading = true;
    const position = positionAt(index);
    sampleAt(position).then((sample) => {
      if (shown.get(index) !== waiting) return;
      const filled = card(sample);
      if (byId("flag").value === "near_duplicate" && sample.near) {
        filled.prepend(element("p", groupTitle(sample), { className: "flag" }));
      }
      if (position === chosen) filled.classList.add("chosen");
      waiting.replaceWith(filled);
      shown.set(index, filled);
      if (sample.images.length) return imagesAt(position).then((sources) => {
        filled.querySelectorAll("img").forEach((img, i) => { img.src = sources[i]; });
      });
    }).catch((error) => { waiting.loading = false; failed(error); });
  }
}

byId("list").classList.add("files");
byId("list").classList.toggle("with-images", about.has_images);
addEventListener("scroll", scrolled, { passive: true });
addEventListener("resize", () => renew(Math.floor((last + shift) / height) * columns));
