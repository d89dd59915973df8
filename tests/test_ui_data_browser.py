"""The Data page in a browser: a hundred thousand rows, and edits by keyboard, mouse and finger."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_cache.sources.detect import read_content

from .support.browser import Late, chromium, new_page
from .support.paths import load_tool
from .support.ui import enter, served
from .support.waiting import wait_until

pytestmark = pytest.mark.slow

alignment: Any = load_tool("bench_alignment")

ROWS = 100_000
HOSTILE = "<img src=x onerror=\"document.title='broken'\"> <b>bold</b> & {{7*7}}"
SIZE = (96, 64)
FILLED = ".data-row:not(.waiting)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def closing(browser: Any) -> Iterator[None]:
    """Pages that stay open would ask a program that has ended, again and again."""
    yield
    for context in browser.contexts:
        context.close()


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    Image.fromarray(small).resize(SIZE, Image.Resampling.BICUBIC).save(path)


def write_source(folder: Path) -> Path:
    for i, name in enumerate("abcdefgh"):
        write_image(folder / f"target_images/{name}.png", i)
        write_image(folder / f"control_images/{name}.png", 100 + i)
        (folder / f"target_images/{name}.txt").write_text(HOSTILE if name == "b" else f"make it {name}\n", "utf-8")
    (folder / "target_images/c.txt").unlink()
    (folder / "target_images/h.png").write_bytes((folder / "target_images/g.png").read_bytes())
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a UI whose source is a table of many rows about few images."""
    folder = tmp_path_factory.mktemp("large")
    for i in range(10):
        write_image(folder / f"{i}.png", i)
    with open(folder / "rows.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["target", "control", "prompt"])
        table.writerows([f"{i % 10}.png", f"{(i + 1) % 10}.png", f"prompt of row {i + 1}"] for i in range(ROWS))
    with served(folder) as address:
        yield address


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_source(tmp_path / "data")
    return tmp_path


@pytest.fixture
def address(project: Path) -> Iterator[str]:
    with served(project) as address:
        yield address


def opened(browser: Any, address: str, query: str = "", **context: Any) -> Any:
    """The page, with its first rows; every error of its scripts fails the test."""
    page = new_page(browser, **context)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    enter(page, address, f"/data?{query}")
    page.wait_for_selector(FILLED)
    page.errors = errors
    return page


def position(page: Any) -> str:
    return str(page.locator("#range").text_content())


def test_a_hundred_thousand_rows(browser: Any, large: str) -> None:
    page = opened(browser, large, "source=rows.csv", viewport={"width": 1280, "height": 900})
    page.wait_for_selector(f"#rows[aria-rowcount='{ROWS}']")
    page.wait_for_selector("text=all rows (100,000)", state="attached")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.reload()
    page.wait_for_selector(FILLED)
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    rows = page.evaluate("performance.now()")
    print(f"\nfirst paint after {paint:.0f} ms, first rows after less than {rows:.0f} ms")
    page.wait_for_selector(f"#rows[aria-rowcount='{ROWS}']")
    assert sum("/api/data/rows" in url for url in requests) <= 3
    assert page.locator(".data-row").count() < 40

    requests.clear()
    page.evaluate(
        """async () => {  // as a bar is dragged
            const rows = document.querySelector("#rows");
            window.frames_ = [];
            for (let i = 0, last = performance.now(); i <= 60; i++) {
                rows.scrollTop = i / 60 * rows.scrollHeight;
                await new Promise(requestAnimationFrame);
                window.frames_.push(performance.now() - last);
                last = performance.now();
            }
        }"""
    )
    page.wait_for_selector(f"{FILLED} >> text=prompt of row {ROWS}")
    frames = sorted(page.evaluate("window.frames_"))
    print(f"frames while scrolling: median {frames[30]:.0f} ms, longest {frames[-1]:.0f} ms")
    assert sum("/api/data/rows" in url for url in requests) <= 70
    assert sum("/api/data/image" in url for url in requests) < 400
    assert page.locator(".data-row").count() < 40
    assert position(page).endswith("100,000 of 100,000 rows")

    page.locator("#rows").focus()
    page.keyboard.press("Home")
    page.wait_for_selector(f"{FILLED} >> text=/prompt of row 1$/")
    page.keyboard.press("End")
    page.wait_for_selector(f"{FILLED}.active >> text=prompt of row {ROWS}")
    page.keyboard.press("PageUp")
    assert page.locator("#rows").get_attribute("aria-activedescendant") != f"row-{ROWS - 1}"
    page.locator("#jump").fill("54321")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{FILLED}.active >> text=prompt of row 54321")
    page.locator("#search").fill("row 77777")
    page.wait_for_selector(f"{FILLED} >> text=prompt of row 77777")
    assert page.locator("#rows").get_attribute("aria-rowcount") == "1"
    assert page.errors == []


def test_a_million_rows(browser: Any, large: str) -> None:
    """More than an element has pixels: every row can be reached, by keys and by small scrolls."""
    page = opened(browser, large, "source=rows.csv", viewport={"width": 1280, "height": 900})
    million = 1_000_000

    def answer(route: Any) -> None:
        start, count = (int(re.search(rf"{name}=(\d+)", route.request.url)[1]) for name in ("start", "count"))  # type: ignore[index]
        row = {"where": "", "version": "", "phrase": "", "left_out": False, "problems": [], "changed": False}
        row |= {"findings": [], "images": []}
        rows = [row | {"row": i, "name": f"n{i}", "prompts": [f"prompt {i}"]} for i in range(start, start + count)]
        body = {"total": million, "start": start, "order": 0, "revision": 1, "rows": rows[: million - start]}
        route.fulfill(content_type="application/json", body=json.dumps(body))

    page.route("**/api/data/rows?**", answer)
    page.locator("#sort").select_option("name")
    page.wait_for_selector(f"#rows[aria-rowcount='{million}']")
    page.locator("#rows").focus()
    page.keyboard.press("End")
    page.wait_for_selector(f"{FILLED}.active >> text=prompt {million - 1}")
    for step in range(1, 40):
        page.keyboard.press("ArrowUp")
        page.wait_for_selector(f"{FILLED}.active >> text=/^prompt {million - 1 - step}$/")
    page.keyboard.press("Home")
    page.wait_for_selector(f"{FILLED}.active >> text=/^prompt 0$/")
    page.evaluate("document.querySelector('#rows').scrollTop = document.querySelector('#rows').scrollHeight / 2")
    page.wait_for_selector(f"{FILLED} >> text=/^prompt (49|50)/")
    page.wait_for_timeout(500)  # the bar is corrected when it rests
    before = int(position(page).split()[0].replace(",", ""))
    page.evaluate("document.querySelector('#rows').scrollTop += 1120")
    wait_until(lambda: int(position(page).split()[0].replace(",", "")) == before + 10)
    assert page.locator(".data-row").count() < 40
    assert page.errors == []


def test_a_prompt_by_keyboard(browser: Any, project: Path, address: str) -> None:
    page = opened(browser, address)
    file = project / "data/target_images/b.txt"
    row = page.locator(FILLED, has_text="<b>bold</b>")
    assert row.locator(".prompt").text_content() == HOSTILE
    assert page.title() != "broken"
    page.locator("#rows").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("#editor textarea:not([readonly])")
    area = page.get_by_label("Prompt", exact=True)
    assert area.input_value() == HOSTILE
    assert page.locator("#editor h2").text_content() == "Row 2: b"
    area.focus()
    page.keyboard.press("End")
    page.keyboard.type(" and <i>more</i>")
    page.wait_for_timeout(4000)  # a poll
    page.route("**/api/data?*", lambda route: None)  # the next one is late
    page.keyboard.press("Alt+ArrowDown")
    page.wait_for_selector("#editor h2 >> text=Row 3: c")
    assert page.get_by_label("Prompt", exact=True).input_value() == ""
    assert "the prompt target_images/c.txt is missing" in page.locator("#editor .notes").text_content()
    page.keyboard.press("Alt+ArrowUp")
    page.wait_for_selector("#editor h2 >> text=Row 2: b")
    assert area.input_value() == HOSTILE + " and <i>more</i>"
    assert file.read_text(encoding="utf-8") == HOSTILE + " and <i>more</i>"  # saved when the row was left
    assert page.evaluate("document.activeElement.id") == "prompt-0"
    page.unroute("**/api/data?*")
    asked: list[str] = []
    answers = iter((False, True))
    page.on("dialog", lambda each: (asked.append(each.message), each.accept() if next(answers) else each.dismiss()))
    page.keyboard.type(" never")
    page.keyboard.press("Escape")  # not discarded
    assert area.input_value().endswith(" never")
    page.keyboard.press("Escape")  # discarded
    page.wait_for_selector("#editor", state="hidden")
    assert asked == ["Discard what you typed in this row? It is not saved."] * 2
    assert page.locator("#unsaved").text_content() == ""
    page.keyboard.press("e")
    page.wait_for_selector("#editor h2 >> text=Row 2: b")
    assert area.input_value() == HOSTILE + " and <i>more</i>"
    assert file.read_text(encoding="utf-8") == HOSTILE + " and <i>more</i>"
    page.keyboard.type("!")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#editor >> text=/^saved$/")
    page.get_by_role("button", name="Undo", exact=True).click()
    wait_until(lambda: file.read_text(encoding="utf-8") == HOSTILE + " and <i>more</i>")
    page.keyboard.press("Escape")  # with nothing to discard
    page.wait_for_selector("#editor", state="hidden")
    assert len(asked) == 2
    assert page.evaluate("document.activeElement.id") == "rows"
    assert page.locator("#unsaved").text_content() == ""

    page.keyboard.press("x")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("x")
    page.wait_for_selector("text=2 rows selected")
    page.keyboard.press("l")
    wait_until(lambda: len(read_content(project / "data", needs_control=True).rows) == 6)
    page.wait_for_selector(".data-row.left-out >> text=left out")
    assert page.errors == []


def test_many_prompts_images_and_captions(
    browser: Any, project: Path, address: str, tiny_model: Callable[[str], Path]
) -> None:
    """A trigger word by keyboard and back, an image turned, and drafts of a model that somebody reads."""
    targets = project / "data/target_images"
    page = opened(browser, address)
    page.wait_for_selector("#replacing")
    page.locator("#rows").focus()
    page.keyboard.press("r")
    page.keyboard.type("sks,")
    page.wait_for_selector("text=8 rows of 8 shown would change.")
    assert page.locator("#replace ins").first.text_content() == "sks, "
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{FILLED} >> text=/^sks, make it a$/")
    assert (targets / "a.txt").read_text(encoding="utf-8") == "sks, make it a\n"
    page.keyboard.press("Escape")
    page.locator("#rows").focus()
    page.keyboard.press("Control+z")
    page.wait_for_selector(f"{FILLED} >> text=/^make it a$/")
    assert not (targets / "c.txt").exists()

    page.keyboard.press("Enter")
    page.get_by_role("button", name="Turn right: target").click()
    page.wait_for_selector("figure[data-role=target] >> text=64×96")
    with Image.open(targets / "a.png") as image:
        assert image.size == SIZE[::-1]
    page.keyboard.press("Escape")

    page.locator("#captioning").click()
    page.wait_for_selector("#problems >> text=no model is named")
    page.get_by_label("Model", exact=True).fill(str(tiny_model("edit-plus")))
    page.get_by_label("Most tokens of a caption").fill("4")
    page.get_by_role("checkbox", name="cpu").check()
    page.wait_for_selector("#caption >> text=1 caption for 8 rows")
    page.wait_for_selector("#caption-start:enabled")
    page.locator("#caption-start").click()
    page.get_by_role("button", name="Read the drafts").click()
    page.wait_for_selector("#rows[aria-rowcount='1']")
    page.wait_for_selector(f"{FILLED} .tag >> text=draft")
    assert (targets / "c.txt").read_text(encoding="utf-8").strip()
    page.locator("#rows").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Keep it as it is").click()
    page.wait_for_selector("#editor >> text=A model wrote this prompt", state="detached")
    page.keyboard.press("Escape")
    page.wait_for_selector("#rows[aria-rowcount='0']")
    assert page.errors == []


def test_two_windows(browser: Any, project: Path, address: str) -> None:
    """The text of another window is shown beside one's own text, and neither is lost."""
    first, second = opened(browser, address), opened(browser, address)
    for page in (first, second):
        page.locator("#rows").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("#editor textarea:not([readonly])")
    mine, theirs = (page.get_by_label("Prompt", exact=True) for page in (first, second))
    mine.fill("mine")
    theirs.fill("theirs")
    theirs.press("Control+Enter")
    second.wait_for_selector("#editor >> text=/^saved$/")
    first.wait_for_selector("text=The file has changed meanwhile")
    assert first.locator(".theirs").text_content() == "theirs"
    assert mine.input_value() == "mine"
    assert (project / "data/target_images/a.txt").read_text(encoding="utf-8") == "theirs\n"
    mine.press("Control+Enter")
    first.wait_for_selector("#editor >> text=/^saved$/")
    assert (project / "data/target_images/a.txt").read_text(encoding="utf-8") == "mine\n"


def test_late_answers_about_rows(browser: Any, project: Path, address: str) -> None:
    """The row that the user sees is the one that is opened and left out, and an old text never comes back."""
    for name in "ef":
        (project / f"data/target_images/{name}.txt").unlink()
    page = opened(browser, address)
    page.wait_for_selector("#replacing")
    area = page.get_by_label("Prompt", exact=True)
    late = Late(page, "**/api/data/row?*")
    page.locator(FILLED).first.click()
    late.wait()
    area.fill("new")
    area.press("Control+Enter")
    page.wait_for_selector("#editor >> text=/^saved$/")
    late.deliver()
    page.wait_for_selector("figure[data-role=target] >> text=96×64")
    assert area.input_value() == "new"

    late = Late(page, "**/api/data/rows?*")
    area.fill("newer")
    area.press("Alt+ArrowDown")
    late.wait()
    page.keyboard.press("Escape")
    page.wait_for_selector("#editor", state="hidden")
    late.deliver()
    page.wait_for_selector(f"{FILLED} >> text=/^newer$/")
    assert page.locator("#editor").is_hidden()

    page.locator("#filter").select_option("no_prompt")
    page.wait_for_selector("#rows[aria-rowcount='3']")
    page.locator(FILLED).first.click()
    page.wait_for_selector("#editor h2 >> text=Row 3: c")
    late = Late(page, "**/api/data/rows?*")
    area.fill("no more")
    page.locator("#editor").get_by_role("button", name="Close").click()
    page.wait_for_selector("#editor", state="hidden")
    late.wait()
    page.locator("#row-1 .name").click()
    late.deliver()
    page.wait_for_selector("#editor h2 >> text=Row 5: e")

    for kind in ("target", "control"):
        (project / f"data/{kind}_images/a.png").unlink()
    (project / "data/target_images/a.txt").unlink()
    page.wait_for_selector("text=all rows (7)", state="attached")
    page.get_by_role("button", name="Leave this row out").click()
    page.wait_for_selector("#errors >> text=this row has changed meanwhile")
    assert len(read_content(project / "data", needs_control=True).rows) + 2 == 7, "two have no prompt"
    assert page.errors == []


def test_late_answers_about_sources(browser: Any, project: Path, address: str) -> None:
    """Nothing of a source is shown, selected or written in another one that was opened meanwhile."""
    write_source(project / "other")
    page = new_page(browser)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: dialog.accept())
    late = Late(page, "**/api/data?source=%2Fetc")
    enter(page, address, "/data?source=/etc")
    late.wait()
    page.fill("#source", "data")
    page.press("#source", "Enter")
    late.deliver()
    page.wait_for_selector(FILLED)
    page.get_by_role("button", name="Find duplicates and outliers").click()
    page.get_by_role("button", name="repeated target 2").click()
    page.wait_for_selector(".card")
    late = Late(page, "**/api/data?source=other")
    page.fill("#source", "other")
    page.press("#source", "Enter")
    late.wait()
    assert page.locator("#groups").is_hidden()
    late.deliver()
    page.wait_for_selector("#replacing")

    page.locator("#filter").select_option("all")
    page.locator(FILLED).first.click()
    page.route("**/api/data/prompt", lambda route: route.abort())
    page.get_by_label("Prompt", exact=True).fill("only here")
    page.locator("#editor").get_by_role("button", name="Close").click()
    page.wait_for_selector("#editor", state="hidden")
    assert page.locator("#unsaved").text_content() == "not saved: a"
    page.unroute("**/api/data/prompt")
    late = Late(page, "**/api/data/positions?*")
    page.locator("#rows").focus()
    page.keyboard.press("Control+a")
    late.wait()
    page.fill("#source", "data")
    page.press("#source", "Enter")
    late.deliver()
    page.wait_for_selector("#undo", state="attached")
    page.wait_for_selector("#replacing")
    assert page.locator("#unsaved").text_content() == page.locator("#selected").text_content() == ""
    page.locator(FILLED).first.click()
    assert page.get_by_label("Prompt", exact=True).input_value() == "make it a"
    assert errors == []


def painted(project: Path) -> Any:
    [file] = (project / "data/control_images").glob("a_mask.png")
    with Image.open(file) as image:
        assert (image.mode, image.size) == ("L", SIZE)
        return np.asarray(image)


def test_a_mask_by_keyboard_and_mouse(browser: Any, project: Path, address: str) -> None:
    grey = np.zeros(SIZE[::-1], np.uint8)
    grey[:8] = 77
    Image.fromarray(grey).save(project / "data/control_images/a_mask.png")
    page = opened(browser, address, viewport={"width": 1100, "height": 800})
    page.locator("#rows").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Edit the mask").press("Enter")
    page.wait_for_selector(".stage:focus")
    page.keyboard.down("Space")
    for _ in range(6):
        page.keyboard.press("ArrowRight")
    page.keyboard.up("Space")
    late = Late(page, "**/api/data/mask?*seen*")
    page.keyboard.press("Control+s")
    page.keyboard.press("Control+s")  # which changes nothing
    late.wait()
    page.keyboard.press("Space")  # over what is painted
    late.deliver()
    page.wait_for_selector(".painter button.primary:enabled")
    page.wait_for_selector(".painter >> text=not saved")
    page.keyboard.press("Control+s")
    page.wait_for_selector(".painter >> text=/^saved$/")
    assert page.locator("#errors").text_content() == ""
    mask = painted(project)
    middle = mask[SIZE[1] // 2]
    assert (mask[:8] == 77).all()
    assert middle[SIZE[0] // 2] == middle[SIZE[0] // 2 + 5] == 255
    assert middle[10] == 0

    box = page.locator(".stage").bounding_box()
    page.mouse.move(box["x"] + 0.1 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"], steps=5)
    page.mouse.up()
    page.get_by_role("button", name="Save the mask").click()
    page.wait_for_selector(".painter >> text=/^saved$/")
    stroke = painted(project)
    assert stroke[SIZE[1] // 2, 12:26].min() == 255
    page.get_by_role("button", name="Undo", exact=True).click()
    page.get_by_role("button", name="Save the mask").click()
    page.wait_for_selector(".painter >> text=/^saved$/")
    wait_until(lambda: np.array_equal(painted(project), mask))
    page.get_by_role("button", name="Invert").click()
    page.get_by_role("button", name="Save the mask").click()
    wait_until(lambda: np.array_equal(painted(project), 255 - mask))
    page.wait_for_selector(".painter >> text=/^saved$/")
    page.keyboard.press("Escape")
    page.wait_for_selector(".shots .overlay")
    assert page.errors == []


def test_a_refused_source_leaves_nothing_of_the_last_one(browser: Any, project: Path, address: str) -> None:
    page = opened(browser, address, "source=data")
    page.locator("#about b", has_text="rows").wait_for()
    page.fill("#source", "/etc")
    page.press("#source", "Enter")
    page.get_by_text("outside the opened folders").wait_for()
    assert page.locator("#about").inner_text() == ""
    assert page.locator("#filter option").all_inner_texts() == ["all rows"]
    assert page.locator(FILLED).count() == 0
    page.fill("#source", "data")
    page.press("#source", "Enter")
    page.locator("#about b", has_text="rows").wait_for()
    page.locator(FILLED).first.wait_for()
    assert page.errors == []


def test_duplicates_side_by_side(browser: Any, project: Path, address: str) -> None:
    page = opened(browser, address)
    page.get_by_role("button", name="Find duplicates and outliers").click()
    page.get_by_role("button", name="repeated target 2").click()
    page.wait_for_selector(".card img[data-state=there]")
    assert page.locator(".card .name").all_text_contents() == ["7: g", "8: h"]
    page.get_by_role("button", name="Leave out h").click()
    page.wait_for_selector(".card >> text=Put back")
    assert "h" not in {row.name for row in read_content(project / "data", needs_control=True).rows}
    assert page.errors == []


def test_a_misaligned_control_is_shown_on_its_target(browser: Any, project: Path, address: str) -> None:
    """From Check to the row, without a model."""
    for name, fault in (("g", "shift 16"), ("h", "aligned")):
        target, control = alignment.planted("coffee.png", (256, 256), fault)
        target.save(project / f"data/target_images/{name}.png")
        control.save(project / f"data/control_images/{name}.png")
    page = opened(browser, address)
    page.get_by_role("button", name="Check", exact=True).click()
    line = page.get_by_role("group", name="measured")
    line.get_by_role("button", name="enlarged target 8").wait_for()
    line.get_by_role("button", name="misaligned control 1").click()
    page.wait_for_selector(".card.with-overlay img[data-state=there] >> nth=2")
    assert page.locator(".card .name").all_text_contents() == ["7: g"]
    assert "px left, compared with its target" in page.locator(".card .measured").inner_text()
    assert page.locator("#about .problem").inner_text() == "1 row with problems", "c has no prompt"
    page.get_by_role("button", name="Open g").click()
    page.wait_for_selector(".on-target img")
    wait_until(lambda: page.locator(".on-target img").evaluate("img => img.naturalWidth") == 512)
    assert "It stops no build." in page.locator("#editor .notes").inner_text()
    assert page.errors == []


def test_files_and_folders_are_dropped(browser: Any, tmp_path: Path) -> None:
    """A folder as the system drops it, files as a page does, and a text, which is refused in words."""
    write_image(tmp_path / "from/photographs/a.png", 1)
    (tmp_path / "from/photographs/a.txt").write_text("make it a")
    (tmp_path / "from/photographs/notes.pdf").write_bytes(b"%PDF")
    write_image(tmp_path / "from/b.png", 2)
    (tmp_path / "project").mkdir()
    with served(tmp_path / "project") as address:
        page = new_page(browser)
        enter(page, address)
        wait_until(lambda: page.locator("#drop").bounding_box() is not None)
        box = page.locator("#drop").bounding_box()
        session = page.context.new_cdp_session(page)
        files = [str(tmp_path / "from/photographs"), str(tmp_path / "from/b.png")]
        for kind in ("dragEnter", "dragOver", "drop"):
            data = {"items": [], "files": files, "dragOperationsMask": 1}
            place = {"x": box["x"] + 20, "y": box["y"] + 20}
            session.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})
            assert page.locator("#drop.over").count() == (kind != "drop")
        page.locator("#chosen-files", has_text="2 targets, 1 prompt").wait_for()
        assert "1 file left out: no image, prompt or table" in page.locator("#chosen-files").inner_text()

        made = page.evaluate_handle("""() => {
            const made = new DataTransfer();
            made.items.add(new File(["make it b"], "b.txt"));
            return made;
        }""")
        page.dispatch_event("#drop", "drop", {"dataTransfer": made})
        page.locator("#chosen-files", has_text="2 targets, 2 prompts").wait_for()
        made = page.evaluate_handle("() => { const m = new DataTransfer(); m.setData('text/plain', 'x'); return m; }")
        page.dispatch_event("#drop", "drop", {"dataTransfer": made})
        page.locator("#errors", has_text="what was dropped is no file").wait_for()
        page.fill("#new-name", "made")
        page.route("**/api/data/new/file?*", lambda route: None)
        with page.expect_request("**/api/data/new/file?*"):
            page.click("#create-source")
        more = {"name": "c.png", "mimeType": "image/png", "buffer": (tmp_path / "from/b.png").read_bytes()}
        page.set_input_files("#choose-files", more)  # for the next folder
        page.unroute("**/api/data/new/file?*")
        page.wait_for_selector(FILLED)
        rows = read_content(tmp_path / "project/made", needs_control=False).rows
        assert sorted(row.prompt for row in rows) == ["make it a", "make it b"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone(browser: Any, address: str, scheme: str) -> None:
    page = opened(browser, address, viewport={"width": 360, "height": 740}, color_scheme=scheme, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.get_by_role("button", name="Find duplicates and outliers").tap()
    page.get_by_role("button", name="repeated target 2").tap()  # whose filter has a long name
    page.wait_for_selector(".card")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator("#filter").select_option("all")
    page.locator(FILLED).first.tap()
    page.wait_for_selector("#editor[open] .shots img")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.get_by_role("button", name="Paint a mask").tap()
    page.locator(".stage").tap(position={"x": 50, "y": 50})
    page.wait_for_selector(".painter >> text=not saved")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
