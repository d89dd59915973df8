"""Work on many rows and on images from the Data page: captions, find and replace, turning, renaming, and going back."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_cache.sources.images import open_rgb_file
from qwen_train.ui.jobs import Queue

from .support.ui import SourceRequests, opened

NAMES = ["a", "b", "c"]
SIZE = (64, 48)
Pixels = np.ndarray[Any, Any]


def write_image(path: Path, seed: int, size: tuple[int, int] = SIZE, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path, **options)
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for i, name in enumerate(NAMES):
        write_image(tmp_path / f"data/target_images/{name}.jpg", i)
        write_image(tmp_path / f"data/control_images/{name}.png", 100 + i)
        (tmp_path / f"data/target_images/{name}.txt").write_text(f"a cat, {name}\r\n", encoding="utf-8", newline="")
    with open(tmp_path / "data/rows.csv", "w", newline="", encoding="utf-8") as file:
        rows = [[f"target_images/{name}.jpg", f"control_images/{name}.png", f"a cat, {name}"] for name in NAMES]
        csv.writer(file).writerows([["target", "control", "prompt"], *rows])
    return tmp_path


class Window(SourceRequests):
    """The requests of a window that edits."""

    def rows(self, **view: Any) -> dict[str, Any]:
        self.listed()
        return {row["name"].rpartition("/")[2]: row for row in self.get("/rows", **view)["rows"]}

    def prompts(self) -> list[str]:
        return [row["prompts"][0] for row in self.rows().values()]

    def replace(self, status: int = 200, **form: Any) -> Any:
        """Preview, and write what was shown."""
        form = {"order": self.listed()["order"]} | form
        return self.post("/replace", status, **form, seen=self.post("/replace/preview", **form)["seen"])

    def undo(self, status: int = 200) -> Any:
        return self.post("/undo", status, id=self.listed()["undo"]["id"])


@pytest.fixture(params=["data", "data/rows.csv"], ids=["folder", "table"])
def window(request: pytest.FixtureRequest, project: Path) -> Iterator[Window]:
    if request.param == "data":
        (project / "data/rows.csv").unlink()
    with opened(project) as client:
        yield Window(client, request.param)


def files(project: Path) -> dict[str, bytes]:
    """The content of the source."""
    found = sorted(path for path in (project / "data").rglob("*") if path.is_file())
    return {str(path.relative_to(project / "data")): path.read_bytes() for path in found}


# ---- find and replace ------------------------------------------------------------------------------------------------


def test_a_trigger_word_before_every_prompt_and_back(project: Path, window: Window) -> None:
    before = files(project)
    window.listed()
    word = {"how": "before", "text": "sks,", "order": 0}
    shown = window.post("/replace/preview", **word)
    assert (shown["looked_at"], shown["rows"], shown["empty"]) == (3, 3, 0)
    assert [(each["before"], each["after"]) for each in shown["first"]][1] == ("a cat, b", "sks, a cat, b")
    assert files(project) == before
    assert window.post("/replace", **word, seen=shown["seen"]) == {"rows": 3}
    assert window.prompts() == [f"sks, a cat, {name}" for name in NAMES]
    assert window.replace(how="before", text="sks,") == {"rows": 0}  # all have it
    assert window.get()["undo"]["what"] == "the replacement in 3 rows"
    assert window.undo() == {"undone": "the replacement in 3 rows"}
    assert files(project) == before
    assert window.prompts() == [f"a cat, {name}" for name in NAMES]


def test_of_the_rows_shown_by_text_or_pattern(window: Window) -> None:
    assert window.replace(find="cat", text="dog \\1", search="b") == {"rows": 1}
    assert window.prompts() == ["a cat, a", "a dog \\1, b", "a cat, c"]
    pattern = {"is_pattern": True, "find": r"(\w+) CAT, (?P<name>\w)$", "match_case": False}
    assert window.replace(text=r"\g<name>: \1 cat", **pattern) == {"rows": 2}
    assert window.prompts() == ["a: a cat", "a dog \\1, b", "c: a cat"]
    assert window.replace(find="a", text="one", whole_words=True, rows=[0]) == {"rows": 1}
    assert window.prompts()[0] == "one: one cat"
    assert window.replace(how="after", text=", at night", rows=[1, 2]) == {"rows": 2}
    assert window.prompts()[1:] == ["a dog \\1, b, at night", "c: a cat, at night"]
    assert window.replace(find="\n", text=" ") == {"rows": 0}


@pytest.mark.parametrize("pattern", ["(a|a)*$", "("])
def test_a_pattern_that_is_slow_or_wrong_is_refused(
    project: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_slow = "|" in pattern
    if is_slow:
        monkeypatch.setattr("qwen_train.ui.replacing.SECONDS", 0.25)
    (project / "data/target_images/a.txt").write_text(f"{'a' * 60}!", encoding="utf-8")
    before = files(project)
    with opened(project) as client:
        window = Window(client, "data")
        order, began = window.listed()["order"], time.monotonic()
        answer = window.post("/replace/preview", 422, find=pattern, is_pattern=True, order=order)
        assert answer["where"] == "find"
        assert "took more than 0.25 seconds" in answer["error"] if is_slow else "unterminated" in answer["found"]
        assert time.monotonic() - began < 30
    assert files(project) == before


def test_what_was_not_shown_is_not_replaced(project: Path, window: Window) -> None:
    form = {"find": "cat", "text": "dog", "order": window.listed()["order"]}
    seen = window.post("/replace/preview", **form)["seen"]
    row = window.rows()["b"]
    window.post("/prompt", row=row["row"], seen=row["version"], text="another cat")
    before = files(project)
    assert "since the preview" in window.post("/replace", 409, **form, seen=seen)["error"]
    path = project / ("data/rows.csv" if window.source.endswith("csv") else "data/target_images/c.txt")
    seen = window.post("/replace/preview", **form)["seen"]
    path.write_bytes(path.read_bytes().replace(b"cat, c", b"cat and c"))  # by another program
    before = files(project)
    window.post("/replace", 409, **form, seen=seen)
    assert files(project) == before
    if window.source != "data":  # in a folder, the prompt of another row is another file
        window.undo(409)
        assert files(project) == before


def test_lines_that_move_the_rows_of_a_table(project: Path) -> None:
    with opened(project) as client:
        window = Window(client, "data/rows.csv")
        assert window.replace(is_pattern=True, find=", ", text=r"\n") == {"rows": 3}
        assert window.prompts() == [f"a cat\n{name}" for name in NAMES]
        row = window.rows()["c"]
        window.post("/prompt", row=row["row"], seen=row["version"], text="the last")
        assert window.prompts()[1:] == ["a cat\nb", "the last"]
        window.undo()
        window.undo()
        assert window.prompts() == [f"a cat, {name}" for name in NAMES]


# ---- images ----------------------------------------------------------------------------------------------------------


def turn(window: Window, name: str, role: str, turns: int = 1, status: int = 200) -> Any:
    row = window.rows()[name]
    v = next(image["v"] for image in row["images"] if image["role"] == role)
    body = {"row": row["row"], "seen": row["version"], "role": role, "v": v, "turns": turns}
    return window.post("/rotate", status, **body)


def pixels(path: Path) -> Pixels:
    return np.asarray(open_rgb_file(path))


def test_an_image_is_turned_without_loss(project: Path, window: Window) -> None:
    target, control = project / "data/target_images/b.jpg", project / "data/control_images/b.png"
    before, old = files(project), (pixels(target), pixels(control))
    turn(window, "b", "target")
    turn(window, "b", "control-0", 3)
    assert (pixels(target) == np.rot90(old[0], -1)).all()
    assert (pixels(control) == np.rot90(old[1])).all()
    assert [each["size"] for each in window.get("/row", row=1)["details"]] == [[48, 64], [48, 64]]
    assert window.undo() == {"undone": "turning the control-0 of " + window.rows()["b"]["name"]}
    window.undo()
    assert files(project) == before
    row = window.rows()["b"]
    body = {"row": row["row"], "seen": row["version"], "role": "target", "v": "of another file", "turns": 1}
    window.post("/rotate", 409, **body)
    window.post("/rotate", 422, **{**body, "turns": 4})
    assert files(project) == before


def test_a_mask_turns_with_its_target(project: Path) -> None:
    (project / "data/rows.csv").unlink()
    mask = Image.new("L", SIZE)
    mask.paste(255, (0, 0, 10, 20))
    mask.save(project / "data/control_images/a_mask.png")
    with opened(project) as client:
        turn(Window(client, "data"), "a", "target", 1)
    with Image.open(project / "data/control_images/a_mask.png") as turned:
        assert (np.asarray(turned) == np.rot90(np.asarray(mask), -1)).all()


def test_a_misnamed_file_gets_the_name_that_its_problem_asks_for(project: Path, window: Window) -> None:
    folder = project / "data/control_images"
    (folder / "b.png").rename(folder / "B.PNG")
    old = next(name for name in files(project) if "/B" in name)
    before = files(project)
    row = window.rows()["b"]
    assert "did you mean" in row["problems"][0]["what"]
    offered = window.get("/row", row=row["row"])["renames"]
    new = "b.PNG" if window.source == "data" else "b.png"
    assert offered == [{"old": f"data/{old}", "new": new}]
    body = {"row": row["row"], "seen": row["version"]}
    window.post("/rename", 409, **body, old="data/control_images/a.png")
    (folder / new).write_bytes(b"by another program")
    window.post("/rename", 409, **body, old=offered[0]["old"])
    assert (folder / new).read_bytes() == b"by another program"
    (folder / new).unlink()
    window.post("/rename", **body, old=offered[0]["old"])
    assert files(project) == {name.replace(old, f"control_images/{new}"): data for name, data in before.items()}
    assert window.rows()["b"]["problems"] == []
    window.undo()
    assert files(project) == before


def test_old_versions_are_listed_and_put_back(project: Path, window: Window) -> None:
    is_folder = window.source == "data"
    path = project / ("data/target_images/a.txt" if is_folder else "data/rows.csv")
    texts = [path.read_bytes()]
    for text in ("one", "two"):
        row = window.rows()["a"]
        window.post("/prompt", row=row["row"], seen=row["version"], text=text)
        texts.append(path.read_bytes())
    query = {"row": 0} if is_folder else {}
    [kept] = window.get("/versions", **query)["files"]
    assert (kept["what"], len(kept["versions"])) == ("prompt" if is_folder else "table", 2)
    assert [each.get("text") for each in kept["versions"]] == (["one\n", "a cat, a\n"] if is_folder else [None, None])
    original = kept["versions"][-1]
    assert abs(original["time"] - time.time()) < 1000
    body = {"what": kept["what"], "version": original["version"]} | query
    window.post("/restore", 409, **body, seen="another")
    for wrong in ("../../..", "2026-01-01T00-00-00-1"):
        window.post("/restore", 422, **{**body, "version": wrong}, seen=kept["seen"])
    window.post("/restore", **body, seen=kept["seen"])
    assert path.read_bytes() == texts[0]
    assert window.prompts()[0] == "a cat, a"
    window.undo()
    assert path.read_bytes() == texts[2]


# ---- captions --------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tiny_model: Any) -> str:
    return str(tiny_model("edit-plus"))


def test_captions_become_drafts_to_read(project: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job is not started here; the files are written as the command writes them."""
    monkeypatch.setattr(Queue, "_schedule", lambda self: None)
    (project / "data/rows.csv").unlink()
    targets = project / "data/target_images"
    (targets / "a.txt").unlink()
    with opened(project) as client:
        window = Window(client, "data")
        window.listed()
        asked = window.post("/caption/command", model=model, text_device="cpu", instruction="what is it?")
        line = f"qwen-cache caption data --model {model} --text-device cpu --set 'caption.instruction="
        assert asked["line"].startswith(line)
        assert asked["about"] == {"rows": 3, "missing": 1, "to": "data"}
        job = window.post("/caption/start", model=model, text_device="cpu")
        assert (job["kind"], job["devices"], job["about"]["rows"]) == ("caption", ["cpu"], 1)
        (targets / "a.txt").write_text("a draft\n", encoding="utf-8")
        assert [row["draft"] for row in window.rows().values()] == [True, False, False]
        assert list(window.rows(filter="drafts")) == ["a"]
    with opened(project) as client:  # again
        window = Window(client, "data")
        assert window.listed()["counts"]["drafts"] == 1
        row = window.rows()["a"]
        window.post("/prompt", row=row["row"], seen=row["version"], text="a better one")
        assert window.listed()["counts"]["drafts"] == 0
        form = {"model": model, "replace": True}
        assert window.post("/caption/command", **form)["line"].endswith(f"--model {model} --replace")
        window.post("/caption/start", **form)
        (targets / "new").write_text("another draft\n", encoding="utf-8")
        (targets / "new").replace(targets / "b.txt")
        assert list(window.rows(filter="drafts")) == ["b"]
        [kept] = window.get("/versions", row=1)["files"]
        assert [each["text"] for each in kept["versions"]] == ["a cat, b\n"]
        window.post("/accept", rows=[1], order=window.listed()["order"])
        assert window.listed()["counts"]["drafts"] == 0


def test_captions_that_would_fail_are_refused_before(
    project: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queue, "_schedule", lambda self: None)
    with opened(project) as client:
        window = Window(client, "data/rows.csv")
        window.listed()

        def problem(**form: Any) -> tuple[str, str]:
            [found] = window.post("/caption/command", **form)["problems"]
            return found["key"], found["what"]

        assert problem() == ("model.path", "no model is named")
        assert problem(model="nothing here")[0] == "model.path"
        assert problem(model=model, captioner="no such folder")[0] == "caption.model"
        assert problem(model=model, text_device="-x")[0] == "cache.text_device"
        assert problem(model=model, max_new_tokens=0)[0] == "caption.max_new_tokens"
        assert "every row has a prompt" in window.post("/caption/start", 422, model=model)["error"]
        copy = project / "data/rows-captioned.csv"
        copy.write_text("corrected by somebody", encoding="utf-8")
        assert problem(model=model) == ("data.source", "this table has been written already")
        window.post("/caption/start", model=model, replace=True)
        [kept] = (project / ".qwen-ui/kept").rglob("rows-captioned.csv")
        assert kept.read_text(encoding="utf-8") == "corrected by somebody"
        (project / "data/control_images/a.png").unlink()
        assert problem(model=model, replace=True) == ("data.on_error", "1 problem in the source")
        assert "--on-error skip" in window.post("/caption/command", model=model, replace=True, on_error="skip")["line"]
