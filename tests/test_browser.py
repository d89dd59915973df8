"""Both pages in a real Chromium: search, filters and charts work, and all text is legible, on a phone too.

No page may write to the console or request anything but itself; `opened` checks that in every test.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.inspect.page import COLUMNS, page
from qwen_cache.inspect.summary import summarise

from .support.browser import chromium
from .support.commands import run
from .support.marks import slow
from .support.pages import HOSTILE, CacheSample, write
from .support.runs import IMAGES, Trainer

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
    return bool(box["y"] >= 0 and box["y"] + box["height"] <= height)


@contextmanager
def opened(browser: Any, path: Path, anchor: str = "", width: int = DESK, **options: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    shown = context.new_page()
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
        assert {url for url in requests if not url.startswith("data:")} == {path.as_uri()}
    finally:
        context.close()


# ---- pages -----------------------------------------------------------------------------------------------------------


def jpeg_url(colour: str) -> str:
    data = BytesIO()
    Image.new("RGB", (64, 48), colour).save(data, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(data.getvalue()).decode()}"


def sample(i: int, **changes: Any) -> list[Any]:
    """A row of the list, as `page.sample_row` makes it."""
    row = {"key": f"{i * 0x9E3779B97F4A7C15 % 2**128:032x}", "name": f"photo-{i}", "prompt": f"Edit number {i}."}
    row |= {"sizes": [[320, 224], [256, 256]], "text_tokens": 20 + i % 7, "image_tokens": 536, "edit_mask_from": None}
    row |= {"recipe": "default", "images": [], "to_generate": False} | changes
    return [row[column] for column in COLUMNS]


@pytest.fixture(scope="module")
def overview(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The overview of a small cache with two recipes; tests combine it with any list of samples."""
    samples = [CacheSample(f"{i}", f"do {i}", target=f"{i % 3}", mask=0.5) for i in range(6)]
    overview = summarise(write(tmp_path_factory.mktemp("overview") / LONG[:60], samples))
    recipe = overview["recipes"]["default"]
    return overview | {"recipes": {"default": recipe, "other": recipe}}


def flagged(overview: dict[str, Any]) -> dict[str, Any]:
    """The overview, with `FLAGGED`."""
    flags = {flag: [row[0] for row in rows] for flag, rows in FLAGGED.items()}
    recipe = overview["recipes"]["default"] | {"flags": flags, "names": {row[0]: row[1] for row in ROWS}}
    return overview | {"recipes": overview["recipes"] | {"default": recipe}}


ROWS = [
    sample(
        i,
        sizes=[[512, 512]] if i % 5 == 0 else [[320, 224], [256, 256]],
        recipe="other" if i % 3 == 0 else "default",
        prompt=f"Turn the sky of {i} to GOLD" if i % 10 == 7 else LONG if i == 99 else f"Edit number {i}.",
        images=[["control", jpeg_url("teal")], ["target", jpeg_url("olive")]] if i % 50 == 1 else [],
        edit_mask_from="file" if i % 4 == 0 else None,
    )
    for i in range(250)
]
FLAGGED = {"repeated_target": ROWS[3:9], "long_prompt": ROWS[8:10]}


@pytest.fixture(scope="module")
def many(overview: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """250 samples of two sizes, two recipes and two flags."""
    path = tmp_path_factory.mktemp("many") / "inspect.html"
    path.write_text(page(flagged(overview), ROWS), encoding="utf-8")
    return path


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


def keys(shown: Any) -> list[str]:
    ids: list[str] = shown.eval_on_selector_all("article", "cards => cards.map(card => card.id)")
    return ids


def expected(test: Callable[[dict[str, Any]], bool]) -> list[str]:
    return [row[0] for row in ROWS if test(dict(zip(COLUMNS, row, strict=True)))]


def test_the_page_of_a_built_cache(browser: Any, built: Built, tmp_path: Path) -> None:
    path, cache = tmp_path / "inspect.html", open_cache(built("edit-plus"))
    assert run("qwen-cache", "inspect", cache.folder, "--html", path).code == 0
    with opened(browser, path) as shown:
        assert keys(shown) == [each.key for each in cache]
        for each in cache:
            card = shown.locator(f"[id='{each.key}']")
            assert card.locator("h3").inner_text() == each.name
            assert card.locator(".prompt").inner_text() == each.prompt
        sizes = Counter(f"{16 * w}×{16 * h}" for _, h, w in (each.img_shapes[0] for each in cache))
        options = shown.get_by_label("Resolution").locator("option").all_inner_texts()
        assert sorted(options[1:]) == sorted(f"{size} ({count})" for size, count in sizes.items())


@pytest.mark.parametrize("text", [slow("to gold"), slow("PHOTO-17"), ROWS[42][0][5:20], slow("nothing like it")])
def test_search(browser: Any, many: Path, text: str) -> None:
    """In prompts, names and keys, ignoring case, while typing."""
    with opened(browser, many) as shown:
        shown.get_by_label("Search").press_sequentially(text)
        matches = expected(lambda row: any(text.lower() in row[name].lower() for name in ("prompt", "name", "key")))
        assert keys(shown) == matches
        assert shown.locator("#range").inner_text() == (f"1 to {len(matches)} of {len(matches)}" if matches else "none")


def test_filters(browser: Any, many: Path) -> None:
    odd = {row[0] for rows in FLAGGED.values() for row in rows}
    with opened(browser, many) as shown:
        for label, value, test in (
            ("Resolution", "512×512", lambda row: row["sizes"][0] == [512, 512]),
            ("Flags", "any", lambda row: row["key"] in odd),
            ("Flags", "long_prompt", lambda row: row["name"] in ("photo-8", "photo-9")),
            ("Recipe", "other", lambda row: row["recipe"] == "other"),
        ):
            shown.get_by_label(label).select_option(value)
            assert keys(shown) == expected(test)[:100], (label, value)
            shown.get_by_label(label).select_option("")
        shown.get_by_label("Resolution").select_option("512×512")
        shown.get_by_label("Recipe").select_option("other")
        shown.get_by_label("Search").fill("number 3")
        assert keys(shown) == [ROWS[30][0]], "the one multiple of 15 that begins with a 3"
        shown.get_by_label("Search").fill("gold")
        assert keys(shown) == []


def test_previous_and_next(browser: Any, many: Path) -> None:
    with opened(browser, many) as shown:
        before, after = (shown.get_by_role("button", name=name) for name in ("Previous", "Next"))
        for button, first, last in ((None, 1, 100), (after, 101, 200), (after, 201, 250), (before, 101, 200)):
            if button:
                button.click()
            assert keys(shown) == [row[0] for row in ROWS[first - 1 : last]]
            assert shown.locator("#range").inner_text() == f"{first} to {last} of 250"
            assert (before.is_disabled(), after.is_disabled()) == (first == 1, last == 250)
        before.click()
        shown.get_by_label("Search").fill("photo-1")
        assert keys(shown) == expected(lambda row: row["name"].startswith("photo-1"))[:100]


def test_a_key_in_the_address(browser: Any, many: Path) -> None:
    """Its card is shown and marked, anywhere in the list, even if a filter hides it."""

    def marked(shown: Any, key: str) -> None:
        card = shown.locator("article.chosen")
        assert card.get_attribute("id") == key
        box = card.bounding_box()
        assert 0 <= box["y"] < 900

    far = ROWS[234][0]
    with opened(browser, many, f"#{far}") as shown:
        marked(shown, far)
        shown.get_by_label("Search").fill("nothing like it")
        assert keys(shown) == []
        shown.locator(f"a[href='#{ROWS[8][0]}']").first.click()
        marked(shown, ROWS[8][0])
        assert shown.get_by_label("Search").input_value() == ""
        shown.get_by_label("Search").fill("nothing like it")
        shown.evaluate(f"location.hash = '{far}'")
        shown.wait_for_selector("article.chosen")
        marked(shown, far)


def test_a_hostile_source_is_text(browser: Any, tmp_path: Path) -> None:
    hostile = HOSTILE + "<img src=x onerror=alert(2)><b onmouseover=alert(3)>"
    path, cache = (
        tmp_path / "inspect.html",
        write(tmp_path / "<img src=x onerror=alert(4)>", [CacheSample(hostile, hostile)]),
    )
    assert run("qwen-cache", "inspect", cache, "--html", path).code == 0
    with opened(browser, path) as shown:
        assert shown.locator("h3").first.text_content() != ""
        assert shown.locator("article h3").text_content() == hostile
        assert shown.locator("article .prompt").text_content() == hostile
        assert shown.locator("h1").text_content() == cache.name
        assert shown.locator("img, b, script[src]").count() == 0


@pytest.mark.slow
def test_a_hundred_thousand_samples(browser: Any, overview: dict[str, Any], tmp_path: Path) -> None:
    rows = [sample(i) for i in range(100_000)]
    path = tmp_path / "inspect.html"
    path.write_text(page(overview, rows), encoding="utf-8")
    with opened(browser, path) as shown:
        assert shown.locator("#range").inner_text() == "1 to 100 of 100000"
        assert len(keys(shown)) == 100
        shown.get_by_label("Search").fill("number 98765.")
        assert keys(shown) == [rows[98765][0]]
        shown.get_by_label("Search").fill("number")
        assert shown.locator("article").count() == 100


@pytest.mark.parametrize("width", [PHONE, slow(DESK)])
def test_the_page_begins_with_samples_and_the_search_stays(browser: Any, many: Path, width: int) -> None:
    with opened(browser, many, width=width) as shown:
        search, following = shown.get_by_label("Search"), shown.get_by_role("button", name="Next")
        assert is_on_screen(search)
        assert is_on_screen(shown.locator("article h3").first)
        for name in ("Flags", "Details"):
            heading = shown.get_by_role("heading", name=name, exact=True)
            assert heading.bounding_box()["y"] > shown.locator("article").last.bounding_box()["y"]
            shown.get_by_role("link", name=name, exact=True).click()
            assert is_on_screen(heading)
            shown.evaluate("scrollTo(0, 0)")
        shown.locator("article").last.scroll_into_view_if_needed()
        assert is_on_screen(search)
        following.click()
        assert is_on_screen(shown.locator("article h3").first)


def test_near_duplicates_are_in_their_groups(browser: Any, overview: dict[str, Any], tmp_path: Path) -> None:
    """Apart in the list; under their flag side by side, each group under a heading, each with links to its others."""
    groups = [[ROWS[i][0] for i in group] for group in ((2, 200, 240), (1, 100))]
    recipe = flagged(overview)["recipes"]["default"]
    flags = recipe["flags"] | {"near_duplicate": [*groups[0], *groups[1]]}
    recipes = {"default": recipe | {"flags": flags, "near_duplicates": groups}}
    path = tmp_path / "inspect.html"
    path.write_text(page(overview | {"recipes": recipes}, ROWS), encoding="utf-8")
    with opened(browser, path) as shown:
        shown.get_by_label("Flags").select_option("near_duplicate")
        shown_ids = "all => all.map(each => each.id || each.textContent)"
        assert shown.eval_on_selector_all("#samples-shown > *", shown_ids) == [
            *("Near-duplicates, group 1 of 2", *groups[0]),
            *("Near-duplicates, group 2 of 2", *groups[1]),
        ]
        assert shown.locator(".flag").first.inner_text() == "near-duplicate of photo-200, photo-240"
        lines = shown.locator("dd").all_inner_texts()
        assert lines[-2:] == ["photo-2, photo-200, photo-240", "photo-1, photo-100"]
        shown.locator(".flag").first.get_by_role("link", name="photo-200").click()
        assert shown.locator("article.chosen h3").inner_text() == "photo-200"
        shown.get_by_label("Flags").select_option("")
        assert keys(shown) == [row[0] for row in ROWS[:100]]


# ---- the report ------------------------------------------------------------------------------------------------------


def number(text: str) -> float:
    return float(text.replace(",", ""))


@pytest.mark.parametrize("touch", [slow(False), True])
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


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("report", "dark", PHONE),
        ("many", "light", DESK),
        *(
            slow(name, scheme, width)
            for name, scheme, width in itertools.product(("many", "report"), ("light", "dark"), (PHONE, DESK))
            if (name, scheme, width) not in (("report", "dark", PHONE), ("many", "light", DESK))
        ),
    ],
)
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
