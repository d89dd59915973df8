"""Both pages in a real Chromium: search, filters and charts work, and all text is legible, on a phone too.

No page may write to the console or request anything but itself and its files; `opened` checks that in every test.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.format.cache import Sample
from qwen_cache.inspect import page
from qwen_cache.inspect import page as document
from qwen_cache.inspect.flags import Flagged, TitledImage
from qwen_cache.inspect.page import write_page
from qwen_cache.inspect.summary import Survey, survey

from .support.browser import chromium, new_page
from .support.commands import run
from .support.large_caches import write_large
from .support.pages import HOSTILE, CacheSample, Page, write
from .support.runs import IMAGES, Trainer
from .support.waiting import wait_until

pytestmark = pytest.mark.slow

PHONE, DESK = 390, 1600
GENERATED = ("before training", "after step 1", "after step 2")
LONG = "unbroken" * 40
Built = Callable[..., Path]
UNREADABLE = r"""
() => {
  const parse = (colour) => {
    const [r, g, b, a = 1] = colour.match(/^rgba?\(([^)]*)\)$/)[1].split(/[, /]+/).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((value, i) => a * value + (1 - a) * below[i]);
  const luminance = (colour) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = colour.map((value) => linear(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const ancestors = (element) => (element ? [...ancestors(element.parentElement), element] : []);
  const painted = (element) => parse(getComputedStyle(element).backgroundColor);
  const background = (element) =>
    ancestors(element).reduce((below, each) => over(painted(each), below), [255, 0, 255]);
  const opacity = (element) => ancestors(element).reduce((all, each) => all * getComputedStyle(each).opacity, 1);
  const ratio = (element, colour) => {
    const [r, g, b, a] = parse(colour), below = background(element);
    return contrast(over([r, g, b, a * opacity(element)], below), below);
  };

  const unreadable = [];
  let checked = 0;
  const judge = (element, what, colour, least) => {
    checked += 1;
    const contrast = ratio(element, colour);
    if (contrast < least) unreadable.push(`${what}: contrast ${contrast.toFixed(2)}`);
  };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, style = getComputedStyle(element), range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), text = node.textContent.trim().slice(0, 40);
    if (!text || !box.width || element.closest(":disabled, option, script")) continue;
    const svg = element.closest("svg"), scale = svg ? svg.getScreenCTM().d : 1;
    judge(element, text, svg ? style.fill : style.color, 4.5);
    if (parseFloat(style.fontSize) * scale < 11) unreadable.push(`${text}: too small`);
    if (element.closest(".scores")) continue; // a table that scrolls in its box
    if (box.left < 0 || box.right > innerWidth) unreadable.push(`${text}: outside, ${box.left} to ${box.right}`);
  }
  for (const control of document.querySelectorAll("input, select"))
    if (control.getClientRects().length) judge(control, control.id, getComputedStyle(control).color, 4.5);
  for (const input of document.querySelectorAll("input"))
    judge(input, input.placeholder, getComputedStyle(input, "::placeholder").color, 4.5);
  for (const bar of document.querySelectorAll("rect")) judge(bar, "bar", getComputedStyle(bar).fill, 3);
  for (const line of document.querySelectorAll("polyline"))
    judge(line, line.getAttribute("class"), getComputedStyle(line).stroke, 3);
  return { checked, unreadable };
}
"""
"""Lists every text, bar and curve that is hard to see, with the reason; contrast as in WCAG 2.2."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium, started once."""
    with chromium() as browser:
        yield browser


def is_on_screen(element: Any, height: int = 900) -> bool:
    box = element.bounding_box()
    return bool(box and box["y"] > -1 and box["y"] + box["height"] <= height)


@contextmanager
def opened(browser: Any, path: Path, anchor: str = "", width: int = DESK, **options: Any) -> Iterator[Any]:
    shown = new_page(browser, viewport={"width": width, "height": 900}, **options)
    console: list[str] = []
    requests: set[str] = set()
    shown.on("console", lambda message: console.append(message.text))
    shown.on("pageerror", lambda error: console.append(str(error)))
    shown.on("dialog", lambda dialog: (console.append(dialog.message), dialog.dismiss()))
    shown.on("request", lambda request: requests.add(request.url.partition("#")[0]))
    try:
        shown.goto(path.as_uri() + anchor)
        yield shown
        assert console == []
        files = path.with_name(f"{path.stem}_files").as_uri()
        assert {url for url in requests if not url.startswith(("data:", f"{files}/"))} == {path.as_uri()}
    finally:
        shown.context.close()


# ---- pages -----------------------------------------------------------------------------------------------------------


def jpeg(colour: str) -> bytes:
    data = BytesIO()
    Image.new("RGB", (64, 48), colour).save(data, "JPEG")
    return data.getvalue()


SAMPLES = [
    CacheSample(
        f"photo-{i}",
        f"Turn the sky of {i} to GOLD" if i % 10 == 7 else LONG * {8: 8, 9: 8, 99: 1}.get(i, 0) or f"Edit number {i}.",
        target="same" if 3 <= i < 9 and i % 3 else f"{i}",
        cells=(6, 4) if i % 5 == 0 else (4, 6),
        recipe="other" if i % 3 == 0 else "default",
    )
    for i in range(250)
]
"""A cache of two sizes, two recipes and two flags."""
PICTURED = 5


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory: pytest.TempPathFactory) -> Survey:
    return survey(write(tmp_path_factory.mktemp("many") / LONG[:60], SAMPLES))


def coloured(_: Sample) -> list[TitledImage]:
    return [TitledImage("control", jpeg("teal"), "jpeg"), TitledImage("target", jpeg("olive"), "jpeg")]


@pytest.fixture(scope="module")
def many(surveyed: Survey, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All in one file."""
    path = tmp_path_factory.mktemp("many") / "inspect.html"
    write_page(path, surveyed, coloured, PICTURED)
    return path


@pytest.fixture(scope="module")
def split(surveyed: Survey, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its samples in files."""
    path = tmp_path_factory.mktemp("split") / "inspect #1.html"
    write_split(path, surveyed, coloured, PICTURED)
    return path


def write_split(path: Path, *arguments: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document, "ONE_FILE", 0)
        for name, samples in (("CHUNK", 32), ("PACK", 4), ("SECTION", 64), ("BUCKET", 4)):
            patch.setattr(page, name, samples)
        write_page(path, *arguments)


@pytest.fixture(scope="module")
def report(built: Built, tiny_model: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a real run with decoded images; its log is extended, so that there is a mean over steps too."""
    train = Trainer(built("edit-plus"), tiny_model("edit-plus"), tmp_path_factory.mktemp("run"))
    out = train(settings=IMAGES, validation__validation_steps=1, validation__true_cfg_scale=[1, 4])
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [json.loads(line) for line in lines]
    for step in range(3, 301):
        line = {**logged[step % 2], "step": step, "loss": 2 / step, "tokens_per_second": 1000.0 * step}
        logged.append({name: value for name, value in line.items() if "validation" not in name or step % 10 == 0})
    (out / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in logged), encoding="utf-8")
    for command in ("decode", "report"):
        result = run("qwen-train", command, out)
        assert result.code == 0, result.stderr
    return out / "report.html"


# ---- the list of samples ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The content of the list at one moment: the samples in the window with their images, and what the bar says."""

    settled: bool
    """True if no card waits for its file, no filter for another one, and no text to be typed."""
    keys: list[str]
    titles: list[str]
    pictured: list[bool]
    range: str
    found: str


def look(shown: Any) -> Look:
    """In one call: between two calls the page may show something else."""
    return Look(
        **shown.evaluate("""() => {
          const cards = [...document.querySelectorAll("article")], byId = (id) => document.getElementById(id);
          const images = [...document.images].every((each) => each.src);
          return {
            settled: images && !document.querySelector(".waiting") && byId("stop").hidden,
            keys: cards.map((card) => card.id),
            titles: cards.map((card) => card.querySelector("h3")?.textContent),
            pictured: cards.map((card) => !!card.querySelector("img")),
            range: byId("range").textContent,
            found: byId("found").textContent,
          };
        }""")
    )


def settled(shown: Any, test: Callable[[Look], object] = lambda _: True) -> Look:
    """The content of the list as soon as it waits for nothing, shows a sample and passes the test."""
    last: list[Look] = []

    def passes() -> bool:
        last[:] = [now := look(shown)]
        return bool(now.settled and now.keys and test(now))

    wait_until(passes)
    return last[0]


def rows(path: Path) -> list[dict[str, Any]]:
    """The samples of a page, as test_page.py compares them with the index."""
    return Page(path).samples


def expected(path: Path, test: Callable[[dict[str, Any]], bool]) -> list[str]:
    return [row["key"] for row in rows(path) if test(row)]


def wait_for_list(shown: Any, path: Path, matches: list[str]) -> None:
    """Wait for exactly these samples; of a page with files, for those of them that are near the window."""
    if not matches or Page(path).folder is None:
        wait_until(lambda: look(shown).keys == matches)
    else:
        count = f" of {len(matches):,}"
        settled(shown, lambda now: now.range.endswith(count) and now.keys == matches[: len(now.keys)])


def test_the_page_of_a_built_cache(browser: Any, built: Built, tmp_path: Path) -> None:
    path, cache = tmp_path / "inspect.html", open_cache(built("edit-plus"))
    assert run("qwen-cache", "inspect", cache.folder, "--html", path).code == 0
    with opened(browser, path) as shown:
        assert look(shown).keys == [each.key for each in cache]
        for each in cache:
            card = shown.locator(f"[id='{each.key}']")
            assert card.locator("h3").inner_text() == each.name
            assert card.locator(".prompt").inner_text() == each.prompt
        sizes = Counter(f"{16 * w}×{16 * h}" for _, h, w in (each.img_shapes[0] for each in cache))
        options = shown.get_by_label("Resolution").locator("option").all_inner_texts()
        assert sorted(options[1:]) == sorted(f"{size} ({count})" for size, count in sizes.items())


FORMS = ("many", "split")
"""The fixtures with a page of one file and with one that has its samples in files."""


@pytest.fixture
def either(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize("either", FORMS, indirect=True)
@pytest.mark.parametrize("text", ["to gold", "PHOTO-17", "key", "nothing like it"])
def test_search(browser: Any, either: Path, text: str) -> None:
    """In prompts, names and keys, ignoring case, while typing."""
    text = rows(either)[42]["key"][5:20] if text == "key" else text
    matches = expected(either, lambda row: any(text.lower() in row[name].lower() for name in ("prompt", "name", "key")))
    with opened(browser, either) as shown:
        shown.get_by_label("Search").press_sequentially(text)
        wait_for_list(shown, either, matches)
        if either.name == "inspect.html":
            assert shown.locator("#range").inner_text() == (f"{len(matches)} of 250 samples" if matches else "none")


@pytest.mark.parametrize("either", FORMS, indirect=True)
def test_filters(browser: Any, either: Path) -> None:
    with opened(browser, either) as shown:
        for label, value, test in (
            ("Resolution", "64×96", lambda row: row["sizes"][0] == [64, 96]),
            ("Flags", "any", lambda row: row["flags"]),
            ("Flags", "long_prompt", lambda row: row["name"] in ("photo-8", "photo-9")),
            ("Flags", "images", lambda row: row["images"]),
            ("Recipe", "other", lambda row: row["recipe"] == "other"),
        ):
            shown.get_by_label(label).select_option(value)
            wait_for_list(shown, either, expected(either, test))
            shown.get_by_label(label).select_option("")
        shown.get_by_label("Resolution").select_option("64×96")
        shown.get_by_label("Recipe").select_option("other")
        shown.get_by_label("Search").fill("number 3")
        wait_for_list(shown, either, expected(either, lambda row: row["name"] == "photo-30"))
        shown.get_by_label("Search").fill("gold")
        wait_for_list(shown, either, [])
        shown.evaluate("document.getElementById('filters').reset()")
        shown.get_by_label("Search").fill("photo-1")
        wait_for_list(shown, either, expected(either, lambda row: row["name"].startswith("photo-1")))


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_sample_of_the_files_can_be_scrolled_to(browser: Any, split: Path, width: int) -> None:
    """In order, each with its images; the bar is as long as the list, and neither jumps."""
    all_rows, seen = rows(split), dict[str, bool]()
    with opened(browser, split, width=width) as shown:
        height = shown.evaluate("document.documentElement.scrollHeight")
        for _ in range(1000):
            now = settled(shown)
            found = now.keys
            first = next(i for i, row in enumerate(all_rows) if row["key"] == found[0])
            assert found == [row["key"] for row in all_rows[first : first + len(found)]]
            seen |= dict(zip(found, now.pictured, strict=True))
            if found[-1] == all_rows[-1]["key"]:
                break
            shown.mouse.wheel(0, 700)
            shown.wait_for_timeout(100)
        assert seen == {row["key"]: bool(row["images"]) for row in all_rows}
        assert shown.evaluate("document.documentElement.scrollHeight") == height
        shown.get_by_label("Go to number").fill("123")
        shown.keyboard.press("Enter")
        settled(shown, lambda now: all_rows[122]["key"] in now.keys)
        wait_until(partial(is_on_screen, shown.locator(f"[id='{all_rows[122]['key']}']")))


def test_a_page_without_its_files_says_so(browser: Any, surveyed: Survey, tmp_path: Path) -> None:
    path = tmp_path / "inspect.html"
    write_split(path, surveyed)
    shutil.rmtree(tmp_path / "inspect_files")
    shown = new_page(browser)
    shown.goto(path.as_uri())
    wait_until(lambda: "cannot be loaded" in shown.locator("#found").inner_text())
    assert (
        shown.locator("#found")
        .inner_text()
        .endswith("rows-0.js cannot be loaded: keep the folder beside this page; if it was written again, reload it")
    )
    shown.context.close()


@pytest.mark.parametrize("either", FORMS, indirect=True)
def test_a_key_in_the_address(browser: Any, either: Path) -> None:
    """Its card is shown and marked, anywhere in the list, even if a filter hides it."""

    def marked(shown: Any, key: str) -> None:
        card = shown.locator(f"article.chosen[id='{key}']")
        wait_until(lambda: (box := card.bounding_box()) and 0 <= box["y"] < 900)

    far, near = rows(either)[234]["key"], expected(either, lambda row: row["name"] == "photo-8")[0]
    with opened(browser, either, f"#{far}") as shown:
        marked(shown, far)
        shown.get_by_label("Search").fill("nothing like it")
        wait_for_list(shown, either, [])
        shown.locator(f"a[href='#{near}']").first.click()
        marked(shown, near)
        assert shown.get_by_label("Search").input_value() == ""
        shown.get_by_label("Search").fill("nothing like it")
        wait_for_list(shown, either, [])
        shown.evaluate(f"location.hash = '{far}'")
        marked(shown, far)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_hostile_source_is_text(browser: Any, tmp_path: Path, in_files: bool) -> None:
    hostile = HOSTILE + "<img src=x onerror=alert(2)><b onmouseover=alert(3)>"
    path, cache = (
        tmp_path / "inspect.html",
        write(tmp_path / "<img src=x onerror=alert(4)>", [CacheSample(hostile, hostile)]),
    )
    (write_split if in_files else write_page)(path, survey(cache))
    with opened(browser, path) as shown:
        shown.wait_for_selector("h3")
        assert shown.locator("article h3").text_content() == hostile
        assert shown.locator("article .prompt").text_content() == hostile
        assert shown.locator("h1").text_content() == cache.name
        assert shown.locator("img, b, script[src]").count() == 0


@pytest.mark.parametrize("over_http", [False, True])
def test_a_hundred_thousand_samples(browser: Any, tmp_path: Path, over_http: bool) -> None:
    """The page opens, scrolls to its end and is searched; from a disk and from a server."""
    path, count = tmp_path / "inspect.html", 100_000
    write_page(path, survey(write_large(tmp_path / "shards", count)))
    names = [f"photo-{i}" for i in range(count)]

    with opened(browser, path) if not over_http else served(browser, path) as shown:
        settled(shown, lambda now: now.titles == names[: len(now.titles)])
        shown.evaluate("scrollTo(0, byId('space').offsetHeight)")
        settled(shown, lambda now: now.titles == names[-len(now.titles) :])
        shown.evaluate("scrollTo(0, byId('space').offsetHeight / 2)")
        middle = settled(shown, lambda now: any(49_000 < int(title[6:]) < 51_000 for title in now.titles))
        top = int(middle.titles[0][6:])
        shown.mouse.wheel(0, -1200)
        settled(shown, lambda now: 0 < top - int(now.titles[0][6:]) < 60)
        shown.get_by_label("Search").fill("number 98765.")
        settled(shown, lambda now: now.titles == ["photo-98765"])
        shown.get_by_label("Search").fill("number")
        settled(shown, lambda now: now.found == "100,000 found")
        shown.get_by_label("Flags").select_option("repeated_target")
        settled(shown, lambda now: now.found == "2,000 found" and now.titles[0] == "photo-98")


@contextmanager
def served(browser: Any, path: Path) -> Iterator[Any]:
    """The page, opened from a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=path.parent)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        shown = new_page(browser, viewport={"width": DESK, "height": 900})
        errors: list[str] = []
        shown.on("console", lambda message: errors.append(message.text))
        shown.goto(f"http://127.0.0.1:{server.server_port}/{path.name}")
        yield shown
        assert errors == []
        shown.context.close()
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """A server like that of `python -m http.server`, without its log; it has no icon for the browser either."""

    def log_message(self, *_: object) -> None:
        pass

    def send_error(self, code: int, *rest: Any) -> None:
        self.send_response(204 if self.path == "/favicon.ico" else code)
        self.end_headers()


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_begins_with_samples_and_the_search_stays(browser: Any, many: Path, width: int) -> None:
    with opened(browser, many, width=width) as shown:
        search = shown.get_by_label("Search")
        assert is_on_screen(search)
        assert is_on_screen(shown.locator("article h3").first)
        for name in ("Flags", "Details"):
            heading = shown.get_by_role("heading", name=name, exact=True)
            assert heading.bounding_box()["y"] > shown.locator("article").last.bounding_box()["y"]
            shown.get_by_role("link", name=name, exact=True).click()
            wait_until(partial(is_on_screen, heading))
            shown.evaluate("scrollTo(0, 0)")
        shown.locator("article").last.scroll_into_view_if_needed()
        assert is_on_screen(search)


@pytest.mark.parametrize("write_form", [write_page, write_split])
def test_near_duplicates_are_in_their_groups(
    browser: Any, surveyed: Survey, tmp_path: Path, write_form: Callable[..., None]
) -> None:
    """Apart in the list; under their flag side by side, each group named, each with links to its others."""
    groups = [np.array([30, 150, 160]), np.array([29, 100])]
    recipe = surveyed.recipes["default"]
    near = Flagged({**recipe.flagged.flags, "near_duplicate": np.concatenate(groups)}, groups)
    path = tmp_path / "inspect.html"
    write_form(path, replace(surveyed, recipes=surveyed.recipes | {"default": replace(recipe, flagged=near)}))
    ids, names = ([row[name] for row in rows(path)] for name in ("key", "name"))
    ordered = [ids[i] for group in groups for i in group]
    titles = ["Near-duplicates, group 1 of 2", "Near-duplicates, group 2 of 2"]
    with opened(browser, path) as shown:
        shown.get_by_label("Flags").select_option("near_duplicate")
        wait_for_list(shown, path, ordered)
        if write_form is write_page:
            shown_ids = "all => all.map(each => each.id || each.textContent)"
            found = shown.eval_on_selector_all("#samples-shown > *", shown_ids)
            assert found == [titles[0], *ordered[:3], titles[1], *ordered[3:]]
        else:
            found = shown.eval_on_selector_all("article .flag:first-child", "all => all.map(each => each.textContent)")
            assert found == [titles[0]] * 3 + [titles[1]] * 2
        links = shown.locator("article").first.locator(".flag").last
        assert links.inner_text() == f"near-duplicate of {names[150]}, {names[160]}"
        lines = shown.locator("dd").all_inner_texts()
        for group in groups:
            assert ", ".join(names[i] for i in group) in lines
        links.get_by_role("link", name=names[150]).click()
        wait_until(lambda: shown.locator("article.chosen h3").all_inner_texts() == [names[150]])
        shown.get_by_label("Flags").select_option("")
        wait_for_list(shown, path, ids)


# ---- the report ------------------------------------------------------------------------------------------------------


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize("touch", [False, True])
def test_the_numbers_under_the_pointer_are_those_of_the_metrics(browser: Any, report: Path, touch: bool) -> None:
    """Before and after, those of the last step; on a phone a tap stays."""
    logged = (report.parent / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = {line["step"]: line for line in map(json.loads, logged)}
    with opened(browser, report, width=PHONE if touch else DESK, has_touch=touch) as shown:
        for name in ("tokens_per_second", "validation_loss", "loss"):
            title = "validation loss by noise level" if "valid" in name else name.replace("_", " ")
            chart = shown.locator("figure.curves", has=shown.get_by_role("img", name=title, exact=True))
            plot, value, at = chart.locator("svg"), chart.locator(".value").first, chart.locator(".at")
            assert number(at.inner_text()) == 300
            assert number(value.inner_text()) == pytest.approx(lines[300][name], rel=1e-3)
            plot.scroll_into_view_if_needed()
            box = plot.bounding_box()
            for fraction in (0.01, 0.4, 0.99):
                (shown.touchscreen.tap if touch else shown.mouse.move)(
                    box["x"] + fraction * box["width"], box["y"] + 40
                )
                step = int(number(at.inner_text()))
                assert step == pytest.approx(1 + fraction * 299, abs=10 if "valid" in name else 1.5)
                assert number(value.inner_text()) == pytest.approx(lines[step][name], rel=1e-3)
                assert chart.locator(".rule").get_attribute("d")
            if not touch:
                shown.mouse.move(0, 0)
                assert (number(at.inner_text()), chart.locator(".rule").get_attribute("d")) == (300, None)


def test_images_of_a_sample_are_in_strips(browser: Any, report: Path) -> None:
    """Its steps one below the other for each guidance."""
    with opened(browser, report) as shown:
        for card in shown.locator("article").all():
            strips = card.locator(".images").all()
            boxes = [[image.bounding_box() for image in strip.locator("img").all()] for strip in strips]
            captions = [strip.locator("figcaption").all_inner_texts() for strip in strips]
            assert captions[0] in (["control", "target"], ["control 1", "control 2", "target"])
            assert captions[1:] == [[*GENERATED]] * 2
            assert card.locator("h4").all_inner_texts() == ["true_cfg_scale 1", "true_cfg_scale 4"]
            assert all(len({box["y"] for box in strip}) == 1 for strip in boxes)
            assert all(box["width"] > 100 for strip in boxes for box in strip)
            assert [box["x"] for box in boxes[1]] == [box["x"] for box in boxes[2]]
        assert shown.locator("article").count() == 2


# ---- legibility ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["many", "report"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_everything_can_be_read(
    browser: Any, name: str, width: int, scheme: str, request: pytest.FixtureRequest
) -> None:
    """All text has enough contrast and size and is inside the window; nothing is wider than the window."""
    with opened(browser, request.getfixturevalue(name), width=width, color_scheme=scheme) as shown:
        shown.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        sides = shown.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sides[0] <= sides[1] == width
        if name == "many":
            assert LONG in shown.locator("article .prompt").all_inner_texts()
        result = shown.evaluate(UNREADABLE)
        assert result["checked"] > 100
        assert result["unreadable"] == []
