"""The Data page's requests: what is listed, what is refused, and edits that land in the source's own files."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from starlette.testclient import TestClient

from qwen_cache.errors import OutdatedError, QwenCacheError
from qwen_cache.service.http import open_socket
from qwen_cache.sources import editing, pairs
from qwen_cache.sources.detect import drafts_of, needs_of, read_content
from qwen_cache.sources.images import open_mask, open_rgb
from qwen_cache.sources.places import File
from qwen_cache.sources.rows import Draft
from qwen_train.ui import measured, scan, search, workspace
from qwen_train.ui import scan as row_images
from qwen_train.ui.data import routes_of
from qwen_train.ui.job import Command
from qwen_train.ui.jobs import Checked, Queue
from qwen_train.ui.scan import Thumbnails
from qwen_train.ui.workspace import Room, Workspace

from .support.paths import load_tool
from .support.ui import SourceRequests, opened
from .support.waiting import HANG, wait_until
from .support.written_runs import write_run

alignment: Any = load_tool("bench_alignment")

HOSTILE = '<img src=x onerror="alert(1)"> & <script>alert(2)</script> \u202e "make it" {{7*7}}'
NAMES = ["a", "b", "c", "d"]
SIZE = (64, 48)


def write_image(path: Path, seed: int, size: tuple[int, int] = SIZE) -> None:
    """A smooth image that no other seed resembles."""
    path.parent.mkdir(parents=True, exist_ok=True)
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(path)


def write_source(folder: Path) -> Path:
    """Four pairs; `b` has no prompt, `c` a hostile one."""
    for i, name in enumerate(NAMES):
        write_image(folder / f"target_images/{name}.png", i)
        write_image(folder / f"control_images/{name}.png", 100 + i)
        (folder / f"target_images/{name}.txt").write_text(f"make it {name}\n", encoding="utf-8")
    (folder / "target_images/b.txt").unlink()
    (folder / "target_images/c.txt").write_text(HOSTILE, encoding="utf-8")
    write_image(folder / "control_images/stray.png", 7)
    return folder


def bomb() -> bytes:
    """A PNG of a hundred bytes with 3.6 billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(100))), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@dataclass
class FakeChecks:
    """Checks that answer what a test says."""

    document: Any = None
    fails: QwenCacheError | None = None
    commands: list[Command] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)

    def end(self, key: str) -> None:
        self.ended.append(key)

    def check(self, command: Command, key: str = "") -> Checked:
        assert key
        self.commands.append(command)
        if self.fails:
            raise self.fails
        return Checked(2 if self.document else 1, self.document, "error: qwen.yaml: no such setting")


class Page(SourceRequests):
    """The requests of one window with a source."""

    def rows(self, **view: Any) -> list[Any]:
        self.listed()
        return self.get("/rows", **view)["rows"]

    def names(self, **view: Any) -> list[str]:
        return [row["name"] for row in self.rows(**view)]

    def row(self, name: str) -> Any:
        return next(row for row in self.rows() if row["name"] == name)

    def prompt(self, row: Any, text: str, status: int = 200) -> Any:
        return self.post("/prompt", status, row=row["row"], seen=row["version"], text=text)

    def leave_out(self, rows: list[Any], is_left_out: bool, status: int = 200, order: int | None = None) -> Any:
        order = self.get()["order"] if order is None else order
        return self.post("/left-out", status, rows=[row["row"] for row in rows], order=order, left_out=is_left_out)

    def mask(self, row: Any) -> tuple[np.ndarray[Any, Any], Any]:
        answer = self.get("/mask", row=row["row"])
        about = json.loads(answer.headers["x-about"])
        values = np.frombuffer(zlib.decompress(answer.content), np.uint8)
        return values.reshape(about["height"], about["width"]), about

    def save_mask(self, row: Any, values: Any, seen_mask: str, status: int = 200) -> Any:
        query = {"source": self.source, "row": row["row"], "seen": row["version"], "seen_mask": seen_mask}
        body = zlib.compress(np.ascontiguousarray(values).tobytes())
        headers = {"Content-Type": "application/octet-stream"}
        answer = self.client.post("/api/data/mask", params=query, content=body, headers=headers)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    write_source(tmp_path / "project/data")
    return tmp_path / "project"


@pytest.fixture
def page(project: Path) -> Iterator[Page]:
    with opened(project) as client:
        yield Page(client)


def with_checks(project: Path, checks: Any) -> Page:
    app = FastAPI()
    app.include_router(routes_of(Workspace.open(project), Queue(project), checks))
    return Page(TestClient(app))


def read(project: Path) -> dict[str, str]:
    """The prompts that a build reads, by name."""
    content = read_content(project / "data", needs_control=True)
    return {row.name: row.prompt for row in content.rows}


def test_every_row_with_its_problems(page: Page) -> None:
    summary = page.listed()
    assert (summary["state"], summary["listed"], summary["editable"]) == ("ready", 4, True)
    assert summary["counts"] == {
        "problems": 1, "left_out": 0, "kept": 4, "no_mask": 4, "no_control": 0, "no_prompt": 1,
        "drafts": 0,
    }  # fmt: skip
    [stray] = summary["general"]
    assert stray["where"] == "data/control_images/stray.png"
    assert "belongs to no target" in stray["what"]
    assert stray["do"]
    b, c = page.row("b"), page.row("c")
    assert [problem["what"] for problem in b["problems"]] == ["the prompt target_images/b.txt is missing"]
    assert b["problems"][0]["do"].startswith("write it")
    assert b["where"] == "data/target_images/b.png"
    assert (c["prompts"], c["problems"]) == ([HOSTILE], [])
    assert [image["role"] for image in c["images"]] == ["control-0", "target"]
    details = page.get("/row", row=c["row"])["details"]
    assert [(each["size"], each["where"]) for each in details] == [
        ([*SIZE], "data/control_images/c.png"),
        ([*SIZE], "data/target_images/c.png"),
    ]


def test_a_rejected_image_is_shown_after_its_target(project: Path) -> None:
    write_image(project / "data/rejected/c.png", 200)
    with opened(project) as client:
        page = Page(client)
        c, d = page.row("c"), page.row("d")
        assert [[image["role"] for image in row["images"]] for row in (c, d)] == [
            ["control-0", "target", "rejected"],
            ["control-0", "target"],
        ]
        query = {"source": "data", "row": c["row"], "role": "rejected", "size": "whole"}
        assert page.client.get("/api/data/image", params=query).headers["content-type"] == "image/jpeg"
        assert page.get("/row", row=c["row"])["details"][-1]["where"] == "data/rejected/c.png"


def test_a_table_of_directions_of_a_slider_is_shown_and_edited(tmp_path: Path) -> None:
    """Its rows have no image."""
    table, rest = tmp_path / "data/metadata.csv", ",an old face,a young face\na dog,an old dog,\n"
    table.parent.mkdir()
    table.write_text(f"prompt,positive_prompt,negative_prompt\na face{rest}", encoding="utf-8")
    with opened(tmp_path) as client:
        page = Page(client)
        whole, half = page.rows()
        assert (whole["prompts"], whole["images"], whole["problems"]) == (["a face"], [], [])
        assert [each["what"] for each in half["problems"]] == ["there is a positive prompt, and no negative prompt"]
        page.prompt(whole, "a nose")
    assert table.read_text(encoding="utf-8") == f"prompt,positive_prompt,negative_prompt\na nose{rest}"


def test_a_rejected_image_that_is_its_target_is_a_problem_before_a_build(project: Path) -> None:
    shutil.copytree(project / "data/target_images", project / "data/rejected", ignore=shutil.ignore_patterns("*.txt"))
    with opened(project) as client:
        page = Page(client)
        page.listed()
        page.post("/check")
        wait_until(lambda: page.get()["check"]["state"] != "running")
        (problem,) = page.row("c")["problems"]
        assert problem["what"] == "data/rejected/c.png: the rejected image is the target"


def test_views(page: Page) -> None:
    assert page.names() == NAMES
    assert page.names(start=1, count=2) == ["b", "c"]
    assert page.names(filter="problems") == page.names(filter="no_prompt") == ["b"]
    assert page.names(search="MAKE it") == ["a", "c", "d"]
    assert page.names(search="it alert(2)") == ["c"]
    assert page.names(sort="longest") == ["c", "a", "d", "b"]
    assert page.names(sort="shortest")[0] == "b"
    assert page.get("/positions", search="make")["rows"] == [0, 2, 3]
    assert page.get("/place", row=2, search="make") == {"index": 1}
    assert page.get("/place", row=1, search="make") == {"index": None}
    assert page.get("/rows", start=9)["rows"] == []
    for wrong in ({"start": -1}, {"count": 10_000}, {"sort": "x"}):
        page.get("/rows", 422, **wrong)


def test_sources_outside_the_folder_are_refused(project: Path, page: Page, tmp_path: Path) -> None:
    write_source(tmp_path / "other")
    (project / "link").symlink_to(tmp_path / "other")
    for source in ("/etc", "../other", str(tmp_path / "other"), "link", "data/../../other", "file:///etc", "a\0b"):
        outside = Page(page.client, source)
        assert "outside" in (error := outside.get(status=403)["error"]) or "no path" in error
        outside.get("/rows", 403)
        outside.get("/image", 403, row=0)
        outside.post("/prompt", 403, row=0, seen="", text="x")
        outside.post("/check", 403)
    missing = Page(page.client, "nowhere").listed()
    assert missing["state"] == "failed"
    assert missing["error"]["what"].startswith("there is no such source")


def test_sources_are_offered_from_opened_folders_alone(project: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "table.csv").write_text("image,prompt\n", encoding="utf-8")
    (project / "linked").symlink_to(other)
    for allowed, is_offered in ((), False), ((other,), True):
        with opened(project, *allowed) as client:
            offered = [each["source"] for each in client.get("/api/data/sources").json()["sources"]]
            assert (f"{other}/table.csv" in offered) == is_offered
            assert not any("linked" in each for each in offered)


def test_what_is_in_a_folder_is_offered_at_first(tmp_path: Path) -> None:
    """Sources of any names with their images, caches and runs; a source that nobody has named is not opened."""
    write_source(tmp_path / "edits")
    for name in ("pairs/before/a.png", "pairs/after/a.png", "cats/1.png", "dogs/2.png", "deep/inside/one/3.png"):
        write_image(tmp_path / name, 1)
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/0.tar").write_bytes(b"")
    (tmp_path / "settings.json").write_text("{}", encoding="utf-8")
    (tmp_path / "list.json").write_text("[{}]", encoding="utf-8")
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards/cache.json").write_text("{}", encoding="utf-8")
    write_run(tmp_path / "out", steps=5)
    with opened(tmp_path) as client:
        found = client.get("/api/data/sources").json()
        images = sum(1 for path in (tmp_path / "edits").rglob("*") if path.suffix in (".png", ".jpg"))
        expected = {"cats": 1, "deep/inside/one": 1, "dogs": 1, "edits": images, "list.json": 0, "pairs": 2, "tars": 0}
        assert {each["source"]: each["images"] for each in found["sources"]} == expected
        assert found["sources"][3]["first"] == [f"edits/target_images/{name}.png" for name in NAMES]
        about = client.get("/api/data/overview", params={"source": "edits"}).json()
        assert about == {"rows": 4, "problems": 2, "error": None}, "no prompt, and a control of no target"
        assert (found["default"], found["caches"]) == ("", ["shards"])
        assert [(run["folder"], run["step"]) for run in found["runs"]] == [("out", 5)]
        (tmp_path / "qwen.yaml").write_text("data: {source: named}", encoding="utf-8")
        assert client.get("/api/data/sources").json()["default"] == "named"


def test_photographs_become_a_folder_that_build_reads(project: Path, page: Page) -> None:
    image, mask = (project / f"data/{name}.png" for name in ("target_images/a", "mask"))
    Image.new("L", SIZE, 255).save(mask)
    data = {"a.png": image.read_bytes(), "a.txt": "make it ä".encode(), "m.png": mask.read_bytes()}
    coming = [("target", "a.png"), ("target", "a.txt"), ("control", "a.png"), ("mask", "a.png")]

    def begin(status: int = 200, name: str = "new", files: list[tuple[str, str]] = coming, size: int = 100) -> Any:
        told = [{"role": role, "path": path, "size": size} for role, path in files]
        return page.post("/new", status, name=name, files=told)

    def send(id: str, number: int, content: bytes, status: int = 200) -> None:
        query = {"id": id, "number": number}
        headers = {"Content-Type": "application/octet-stream"}
        answer = page.client.post("/api/data/new/file", params=query, content=content, headers=headers)
        assert answer.status_code == status, answer.text

    def finish(id: str, status: int = 200) -> Any:
        answer = page.client.post("/api/data/new/finish", params={"id": id})
        assert answer.status_code == status, answer.text
        return answer.json()

    id = begin()["id"]
    for number, (role, path) in enumerate(coming):
        finish(id, 409)
        assert not (project / "new").exists()
        send(id, number, data["m.png" if role == "mask" else path])
    assert finish(id) == {"source": "new", "files": 4}
    [row], problems = read_content(project / "new", needs_control=True).rows, page.client.get("/api/data?source=new")
    assert (row.prompt, row.mask is not None, len(row.controls)) == ("make it ä", True, 1)
    assert problems.status_code == 200

    begin(409)
    assert "is there already" in begin(409)["error"]
    for name in ("", "..", "a/b", ".qwen-ui", "x" * 300):
        begin(422, name)
    for path in ("../a.png", "a.exe", ".a.png", "a\n.png", "a/../../b.png", "/etc/a.png", "a:b.png"):
        begin(422, "other", [("sorted", path)])
    begin(422, "other", [("target", "a.png"), ("target", "b/A.png")])
    begin(422, "other", [("target", "a.txt")])
    begin(422, "other", [("target", f"{i}.png") for i in range(20_001)])
    begin(422, "other", size=1 << 40)
    other = begin(name="other", files=[("sorted", "dropped/t.csv"), ("target", "dropped/i/a.png")])["id"]
    send(other, 1, b"no image", 422)
    send(other, 0, b"\xff\xfe", 422)
    send(other, 7, b"", 404)
    send(other, 0, b"image,prompt\ni/a.png,red\n")
    send(other, 1, data["a.png"])
    (project / "other").mkdir()
    assert "is there already" in finish(other, 409)["error"], "made meanwhile"
    (project / "other").rmdir()
    assert finish(other)["source"] == "other/t.csv"
    page.client.post("/api/data/new/end", params={"id": begin(name="third")["id"]})
    assert not list((project / ".qwen-ui/incoming").iterdir())
    assert not (project / "third").exists()


def test_images_that_a_table_names_outside_the_folder_are_not_shown(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "photographs"
    write_image(outside / "a.png", 1)
    write_image(project / "b.png", 2)
    (project / "link.png").symlink_to(outside / "a.png")
    rows = [f"{outside}/a.png,b.png,red", f"b.png,{outside}/a.png,blue", "b.png,link.png,green"]
    (project / "table.csv").write_text("\n".join(["target,control,prompt", *rows]), encoding="utf-8")
    for allowed, status in ((), 422), ((outside,), 200):
        with opened(project, *allowed) as client:
            page = Page(client, "table.csv")
            assert page.listed()["listed"] == 3
            for row, role in (0, "target"), (1, "control-0"), (2, "control-0"):
                for size in ("thumbnail", "whole"):
                    answer = page.get("/image", status, row=row, role=role, size=size)
                    assert allowed or answer["error"] == "this image is outside the opened folders"
                details = {each["role"]: each for each in page.get("/row", row=row)["details"]}
                assert bool(details[role]["error"]) == (not allowed)


@pytest.mark.parametrize("link", ["target_images/a.txt", "control_images/more", "metadata.csv", "notes.txt"])
def test_a_source_with_a_link_out_of_the_folder_is_not_listed(project: Path, tmp_path: Path, link: str) -> None:
    outside = tmp_path / "other/a.csv"
    outside.parent.mkdir()
    outside.write_text("target,control,prompt\ntarget_images/a.png,control_images/a.png,secret\n", encoding="utf-8")
    (project / "data" / link).unlink(missing_ok=True)
    (project / "data" / link).symlink_to(outside.parent if "more" in link else outside)
    (project / "data/again").symlink_to(project / "data")  # round and round
    with opened(project) as client:
        summary = Page(client).listed()
        assert (summary["state"], summary["error"]["where"]) == ("failed", f"data/{link}")
        assert summary["error"]["what"] == "this link leads out of the opened folders"
        assert Page(client).get("/rows")["rows"] == []
    with opened(project, outside.parent) as client:
        assert "this link" not in str(Page(client).listed()["error"])


def test_images_are_those_of_rows_alone(project: Path, page: Page) -> None:
    page.listed()
    for wrong in ({"row": 99}, {"role": "mask"}, {"role": "control-1"}, {"role": "names"}, {"role": "../a.png"}):
        page.get("/image", 404, **{"row": 0, **wrong})
    page.get("/image", 422, row=0, size="huge")
    for bad, text in (
        (b"%!PS-Adobe-3.0 EPSF", "not an image in a supported format"),
        (bomb(), "too large to decode"),
        (b"secret", "not an image in a supported format"),
    ):
        (project / "data/target_images/a.png").write_bytes(bad)
        for size in ("thumbnail", "whole"):
            answer = page.get("/image", 422, row=0, size=size)
            assert text in answer["error"]
            assert "secret" not in str(answer)


def test_thumbnails(project: Path, page: Page) -> None:
    write_image(project / "data/target_images/a.png", 1, (800, 400))
    page.listed()
    first = page.row("a")["images"][1]
    answer = page.get("/image", row=0, v=first["v"])
    assert Image.open(BytesIO(answer.content)).size == (288, 144)
    assert answer.headers["content-type"] == "image/jpeg"
    assert "immutable" in answer.headers["cache-control"]
    assert "immutable" not in page.get("/image", row=0, v="another").headers["cache-control"]
    again = page.client.get(
        "/api/data/image", params={"source": "data", "row": 0}, headers={"If-None-Match": answer.headers["etag"]}
    )
    assert (again.status_code, again.content) == (304, b"")
    whole = page.get("/image", row=0, size="whole")
    assert Image.open(BytesIO(whole.content)).size == (800, 400)
    write_image(project / "data/target_images/a.png", 2, (400, 400))
    assert Image.open(BytesIO(page.get("/image", row=0).content)).size == (288, 288)
    assert page.row("a")["images"][1]["v"] != first["v"]


def test_thumbnails_on_disk_are_bounded(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Bytes:
        seed: int
        reads: list[int] = field(default_factory=list)

        def __str__(self) -> str:
            return f"image {self.seed}"

        def read(self) -> bytes:
            self.reads.append(1)
            buffer = BytesIO()
            noise = np.random.default_rng(self.seed).integers(0, 256, (64, 64, 3), np.uint8)
            Image.fromarray(noise).save(buffer, "PNG")
            return buffer.getvalue()

    thumbnails, images = Thumbnails(tmp_path, 50_000), [Bytes(seed) for seed in range(40)]
    data = [thumbnails.get(image, is_mask=False) for image in images]
    kept = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert sum(map(len, data)) > 100_000
    assert 0 < kept <= 55_000
    assert thumbnails.get(images[-1], is_mask=False) == data[-1]
    assert images[-1].reads == [1]
    [path] = [path for path in tmp_path.glob("*/*") if path.read_bytes() == data[-1]]
    path.write_bytes(b"")  # the power failed
    assert thumbnails.get(images[-1], is_mask=False) == data[-1]


def test_images_that_are_decoded_at_once_have_limited_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that is larger than all of it has it alone."""
    room = Room(10)
    with ThreadPoolExecutor(1) as pool, ExitStack() as entered:
        with room.taken(6):
            waiting = pool.submit(entered.enter_context, room.taken(5))
            wait_until(room._turn.locked)
            assert not waiting.done()
        waiting.result()
        assert room.used == 5
    write_image(tmp_path / "a.png", 1)
    image, taken = File(tmp_path / "a.png"), list[int]()
    monkeypatch.setattr(workspace, "ROOM", room := Room(10))
    monkeypatch.setattr(row_images, "open_rgb", lambda *data: taken.append(room.used) or open_rgb(*data))
    monkeypatch.setattr(row_images, "open_mask", lambda *data: taken.append(room.used) or open_mask(*data))
    Thumbnails(tmp_path).get(image, is_mask=False)
    for is_mask in (True, False):
        row_images.whole(image, is_mask=is_mask)
    row_images.overlay(image)
    assert taken == [10] * 4
    assert room.used == 0


def test_a_prompt_lands_in_its_file(project: Path, page: Page) -> None:
    answer = page.prompt(page.row("c"), "a\nb <b>")
    assert answer["row"]["prompts"] == ["a\nb <b>"]
    assert (project / "data/target_images/c.txt").read_text(encoding="utf-8") == "a\nb <b>"
    assert read(project)["c"] == "a\nb <b>"
    kept = [path.read_text(encoding="utf-8") for path in (project / ".qwen-ui/kept").rglob("*.txt")]
    assert kept == [HOSTILE]
    assert page.prompt(page.row("b"), "now it has one")["row"]["problems"] == []
    assert page.listed()["counts"]["problems"] == 0
    assert read(project).keys() == {*NAMES}


def test_two_windows(project: Path, page: Page) -> None:
    """The second of two edits that began from the same text is refused, and sees the first."""
    other = Page(page.client)
    mine, theirs = page.row("a"), other.row("a")
    other.prompt(theirs, "theirs")
    assert "changed meanwhile" in page.prompt(mine, "mine", 409)["error"]
    assert page.row("a")["prompts"] == ["theirs"]
    page.prompt(page.row("a"), "mine, knowingly")
    assert read(project)["a"] == "mine, knowingly"


def test_a_file_that_another_program_changed(project: Path, page: Page) -> None:
    row = page.row("a")
    (project / "data/target_images/a.txt").write_text("by an editor", encoding="utf-8")
    assert "changed meanwhile" in page.prompt(row, "mine", 409)["error"]
    assert (project / "data/target_images/a.txt").read_text(encoding="utf-8") == "by an editor"
    wait_until(lambda: page.row("a")["prompts"] == ["by an editor"])
    order = page.get()["order"]
    write_image(project / "data/target_images/new.png", 9)
    wait_until(lambda: "new" in page.names())
    assert page.get()["order"] > order
    assert "changed meanwhile" in page.leave_out([row], True, 409, order)["error"]


def test_edits_of_many_threads_all_land(project: Path, page: Page) -> None:
    rows, begins = page.rows(), threading.Barrier(len(NAMES))

    def edit(row: Any) -> None:
        begins.wait(HANG)
        page.prompt(row, f"by thread {row['name']}")

    threads = [threading.Thread(target=edit, args=(row,)) for row in rows]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(project) == {name: f"by thread {name}" for name in NAMES}
    assert [row["prompts"] for row in page.rows()] == [[f"by thread {name}"] for name in NAMES]


def test_rows_left_out_and_put_back(project: Path, page: Page) -> None:
    chosen = [page.row("b"), page.row("d")]
    page.leave_out(chosen, True)
    assert page.names(filter="left_out") == ["b", "d"]
    assert page.names(filter="kept") == ["a", "c"]
    assert page.listed()["counts"]["problems"] == 0
    assert read(project).keys() == {"a", "c"}
    page.leave_out([page.row("d")], False)
    assert read(project).keys() == {"a", "c", "d"}
    page.leave_out([{"row": 77}], True, 404)


def test_large_sources_are_looked_at_no_more_than_needed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted instead of timed: entries of folders for the lists of every page, files opened to leave rows out."""
    entries, files, rows = list[str](), list[str](), 300
    (project / "many").mkdir()
    for i in range(rows):
        os.link(project / "data/target_images/a.png", project / f"many/{i:03}.png")
        (project / f"many/{i:03}.txt").write_text(str(i))
    (project / "t.csv").write_text("target,prompt\n" + "".join(f"many/000.png,{i}\n" for i in range(rows)))
    scan_folder, open_file, read_row = os.scandir, os.open, editing.read_row

    @contextmanager
    def scandir(path: Any = ".") -> Iterator[Iterator[os.DirEntry[str]]]:
        with scan_folder(path) as found:
            yield (entries.append(each.name) or each for each in found)

    monkeypatch.setattr(search, "MOST_ENTRIES", 50)
    with opened(project) as client:
        for route in ("data/sources", "build", "train/places", "train/controls", "train/runs", "generate/choices"):
            with monkeypatch.context() as patch:
                patch.setattr(search.os, "scandir", scandir)
                assert client.get(f"/api/{route}").status_code == 200
            assert 50 < len(entries) <= 51 + 25, route  # of the folder of many, and those of the others
            entries.clear()

        page, table = Page(client, "many"), Page(client, "t.csv")
        page.listed(), table.listed()

        def counted(path: Any, *rest: Any, **more: Any) -> int:
            files.append(str(path))
            return open_file(path, *rest, **more)

        monkeypatch.setattr(os, "open", counted)
        page.leave_out([{"row": row} for row in range(rows)], True)
        prompts = [each for each in files if each.endswith(".txt") and not each.endswith("left_out.txt")]
        assert len(prompts) == len({*prompts}) <= rows
        monkeypatch.setattr(editing, "read_row", lambda *_: pytest.fail("no row of an unchanged table is read again"))
        table.leave_out([{"row": row} for row in range(rows)], True)
        assert table.get()["counts"]["left_out"] == page.get()["counts"]["left_out"] == rows
        monkeypatch.setattr(editing, "read_row", read_row)
        (project / "t.csv").write_text((project / "t.csv").read_text().replace(",7,true", ",seven,true"))
        table.leave_out([{"row": 7}], False, 409, order=0)


def test_the_first_rows_wait_for_few_prompts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read = project / "data", list[object]()
    for i in range(500):
        os.link(folder / "target_images/a.png", folder / f"target_images/x{i:03}.png")
        (folder / f"target_images/x{i:03}.txt").write_text(str(i))
    monkeypatch.setattr(pairs, "PROMPTS", 2)
    read_bytes = pairs.read_bytes
    monkeypatch.setattr(pairs, "read_bytes", lambda path, *rest: (read.append(path), read_bytes(path, *rest))[1])
    drafts = drafts_of(folder, needs_of(needs_control=False, takes_control=True, no_control="allowed"))
    first = next(each for each in drafts if isinstance(each, Draft))
    assert first.samples[0].name == "a"
    assert 0 < len(read) <= 2 * pairs.AHEAD
    assert len(list(drafts)) >= 500
    assert len(read) > 500


def test_a_mask_painted_and_painted_again(project: Path, page: Page) -> None:
    values, about = page.mask(page.row("a"))
    assert (values.shape, values.any(), about["seen"], about["scaled"]) == (SIZE[::-1], False, "", False)
    painted = np.arange(values.size, dtype=np.uint32).astype(np.uint8).reshape(values.shape)
    answer = page.save_mask(page.row("a"), painted, "")
    [file] = (project / "data").rglob("*_mask.png")
    with Image.open(file) as image:
        assert (image.mode, image.size, image.format) == ("L", SIZE, "PNG")
        assert np.array_equal(np.asarray(image), painted)
    assert [image["role"] for image in answer["row"]["images"]] == ["control-0", "target", "mask"]
    again, about = page.mask(answer["row"])
    assert np.array_equal(again, painted)
    assert about["seen"] == answer["seen"] != ""
    assert page.listed()["counts"]["no_mask"] == 3

    inverted = page.save_mask(page.row("a"), 255 - painted, about["seen"])
    assert "changed meanwhile" in page.save_mask(page.row("a"), painted, about["seen"], 409)["error"]
    rows = read_content(project / "data", needs_control=True).rows
    mask = next(row.mask for row in rows if row.name == "a")
    assert mask is not None
    assert np.array_equal(np.asarray(open_mask(mask.read(), "")), 255 - painted)
    assert inverted["seen"] == page.mask(page.row("a"))[1]["seen"]
    overlay = page.get("/image", row=0, role="mask", size="overlay").content
    assert np.array_equal(np.asarray(Image.open(BytesIO(overlay)))[..., 3], 255 - painted)


def test_masks_that_do_not_fit_are_refused(page: Page) -> None:
    row = page.row("a")
    for wrong in (np.zeros(10, np.uint8), np.zeros(SIZE[0] * SIZE[1] + 1, np.uint8), np.zeros(1 << 24, np.uint8)):
        assert "size" in page.save_mask(row, wrong, "", 422)["error"]
    query = {"source": "data", "row": 0, "seen": row["version"]}
    headers = {"Content-Type": "application/octet-stream"}
    answer = page.client.post("/api/data/mask", params=query, content=b"no zlib", headers=headers)
    assert (answer.status_code, answer.json()["error"]) == (422, "the mask was damaged on its way")
    page.get("/image", 422, row=0, size="overlay")


def test_a_table(project: Path, page: Page) -> None:
    lines = [f"data/target_images/{name}.png,data/control_images/{name}.png,make {name}" for name in NAMES]
    (project / "rows.csv").write_text("\n".join(["target,control,prompt", *lines, ""]), encoding="utf-8")
    table = Page(page.client, "rows.csv")
    assert len(table.rows()) == 4
    row = table.rows()[1]
    table.prompt(row, 'a "new" one, with a comma')
    table.leave_out([table.rows()[3]], True)
    content = read_content(project / "rows.csv", needs_control=True)
    assert [row.prompt for row in content.rows] == ["make a", 'a "new" one, with a comma', "make c"]
    assert content.left_out == 1
    found = page.get("/sources")
    assert ("rows.csv", 0) in [(each["source"], each["images"]) for each in found["sources"]]
    assert found["default"] == "data"


def test_a_source_that_can_only_be_looked_at(project: Path, page: Page) -> None:
    import tarfile

    with tarfile.open(project / "rows.tar", "w") as tar:
        for path in sorted((project / "data/target_images").iterdir()):
            tar.add(path, path.name)
    tars = Page(page.client, "rows.tar")
    summary = tars.listed()
    assert (summary["state"], summary["editable"]) == ("ready", False)
    assert "cannot be edited" in summary["not_editable"]["what"]
    assert summary["not_editable"]["do"]
    row = tars.row("a")
    assert Image.open(BytesIO(tars.get("/image", row=row["row"]).content)).size == SIZE
    before = (project / "rows.tar").read_bytes()
    tars.prompt(row, "x", 422)
    tars.leave_out([row], True, 422)
    assert (project / "rows.tar").read_bytes() == before


def test_problems_of_a_check_stand_at_their_rows(project: Path) -> None:
    def found(*problems: dict[str, str]) -> dict[str, Any]:
        return {"problems": [*problems], "to_encode": 3, "cached": 1, "refused": [{"what": "1 problem"}]}

    damaged = {"where": "data/target_images/a.png", "what": "the image is damaged", "do": "copy it again"}
    general = {"where": "data", "what": "all 4 samples: too small", "do": "enlarge them"}
    checks = FakeChecks(found(damaged, general))
    page = with_checks(project, checks)
    page.listed()

    def checked() -> Any:
        page.post("/check", form={"model": "Qwen/Qwen-Image-Edit", "source": "elsewhere", "mode": "watch"})
        wait_until(lambda: page.get()["check"]["state"] != "running")
        return page.get()["check"]

    assert (checked()["state"], checked()["summary"]) == ("done", "3 to encode, 1 in the cache")
    assert checks.commands[0].arguments == ("build", "--model", "Qwen/Qwen-Image-Edit", "--dry-run", "--json")
    assert page.names(filter="problems") == ["a", "b"]
    assert page.row("a")["problems"] == [damaged]
    assert page.row("a")["where"] == damaged["where"]
    assert {"all 4 samples: too small"} < {each["what"] for each in page.get()["general"]}

    page.prompt(page.row("a"), "another prompt")
    assert (page.row("a")["problems"], page.row("a")["changed"]) == ([], True)
    checks.document = found()
    checked()
    assert page.names(filter="problems") == ["b"]
    assert not page.row("a")["changed"]

    checks.document = None
    assert (checked()["state"], checked()["message"]) == ("failed", "error: qwen.yaml: no such setting")
    checks.fails = OutdatedError("a newer check has taken the place of this one")
    assert checked()["state"] == "stopped"
    page.post("/check/stop")
    assert len(checks.ended) >= 1


def test_a_check_without_a_model_is_kept_over_a_restart(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken images and masks of another shape stand at their rows, as long as their files are the same."""
    monkeypatch.setattr("qwen_cache.storage.remembered.is_settled", lambda *_: True)  # as after two seconds
    data = project / "data"
    (data / "control_images/a.png").write_bytes(b"<!doctype html><html>not found</html>")
    Image.new("L", (64, 64), 255).save(data / "control_images/d_mask.png")
    write_image(data / "target_images/wide.png", 9, (3000, 4))
    write_image(data / "control_images/wide.png", 19)
    (data / "target_images/wide.txt").write_text("make it wide")

    def told(page: Page) -> dict[str, str]:
        return {row["name"]: " ".join(each["what"] for each in row["problems"]) for row in page.rows(filter="problems")}

    def checked(page: Page) -> Any:
        wait_until(lambda: (page.listed()["check"] or {"state": "running"})["state"] != "running")
        return page.get()["check"]

    with opened(project) as client:
        page = Page(client)
        assert "a" not in told(page)
        assert page.client.get("/api/data/image", params={"source": "data", "row": 0, "role": "control-0"}).is_error
        assert "control_images/a.png: this is not an image" in told(page)["a"], "a thumbnail that fails says why"
        page.post("/check")
        assert checked(page)["state"] == "done"
        assert "no model is named" in checked(page)["summary"]
        found = told(page)
        assert sorted(found) == ["a", "b", "d", "wide"]
        assert "d_mask.png: the mask is 64×64, its target 64×48" in found["d"]
        assert "too elongated" in found["wide"]
        assert scanned(page)["unreadable"] == [["a"], ["wide"]], "a control counts"
        broken = (data / "control_images/a.png").read_bytes()
        write_image(data / "control_images/a.png", 1)
        page.post("/reload")
        assert "a" not in told(page), "another file"
        (data / "control_images/a.png").write_bytes(broken)
        page.post("/check")
        checked(page)
    monkeypatch.setattr(scan, "_read", lambda *_: pytest.fail("nothing is read again"))
    with opened(project) as client:
        page = Page(client)
        assert (checked(page)["kept"], checked(page)["unseen"], page.get()["scan"]["found"]["unreadable"]) == (
            True,
            0,
            2,
        )
        assert told(page) == found
    write_image(data / "control_images/a.png", 1)
    with opened(project) as client:
        page = Page(client)
        assert checked(page)["unseen"] == 1, "a changed file was not looked at"
        assert told(page) == {name: what for name, what in found.items() if name != "a"}
    (project / "qwen.yaml").write_text("data: {upscale: false}")
    with opened(project) as client:
        page = Page(client)
        assert page.listed()["check"] is None, "other settings"


def test_the_problems_of_a_planned_build_are_kept_until_a_row_changes(project: Path) -> None:
    long = {"where": "data/target_images/a.png", "what": "the text is too long", "do": "shorten it"}
    form = {"model": "Qwen/Qwen-Image-Edit"}

    def listed() -> Page:
        page = with_checks(project, FakeChecks({"problems": [long]}))
        page.listed()
        return page

    def is_checked(page: Page) -> bool:
        return (page.get()["check"] or {"state": "running"})["state"] != "running"

    page = listed()
    page.post("/check", form=form)
    wait_until(lambda: is_checked(page))
    kept = project / ".qwen-ui/checks"
    wait_until(lambda: kept.is_dir() and any(kept.iterdir()))
    again = listed()
    wait_until(lambda: is_checked(again))
    assert again.row("a")["problems"] == [long]
    (project / "data/target_images/d.txt").write_text("another prompt")
    changed = listed()
    wait_until(lambda: is_checked(changed))
    assert changed.row("a")["problems"] == []


def test_a_check_measures_what_may_hurt_a_lora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings are no problems: with the overlay of a misaligned control, over a restart, until the files change."""
    monkeypatch.setattr("qwen_cache.storage.remembered.is_settled", lambda *_: True)  # as after two seconds
    project, size = tmp_path / "project", (256, 256)
    (project / "data").mkdir(parents=True)
    (project / "qwen.yaml").write_text("data: {vae_image_size: 65536}")
    pairs = {fault: alignment.planted("coffee.png", size, fault) for fault in ("aligned", "shift 4", "shift 16")}
    pairs |= {"small": (pairs["aligned"][0].resize((128, 128)), pairs["aligned"][1].resize((128, 128)))}
    pairs |= {"broken": pairs["aligned"]}
    for i, (name, images) in enumerate(pairs.items()):
        for role, image in zip(("target_images", "control_images"), images, strict=True):
            (project / "data" / role).mkdir(exist_ok=True)
            image.putpixel((0, 0), (i, 0, 0))
            image.save(project / f"data/{role}/{name}.png")
        (project / f"data/target_images/{name}.txt").write_text("recolour it")
    control = project / "data/control_images/shift 16.png"
    (project / "data/control_images/broken.png").write_bytes(b"no image")

    def checked(page: Page) -> Any:
        wait_until(lambda: (page.listed()["check"] or {"state": "running"})["state"] != "running")
        return page.get()["check"]

    found = {"misaligned_control": 2, "enlarged_target": 1, "not_measured": 1}
    with opened(project) as client:
        page = Page(client)
        page.listed()
        page.post("/check")
        assert checked(page)["found"] == found
        assert checked(page)["measured"] == {"targets": 5, "measured": 4, "pairs": 4}
        assert page.names(filter="problems") == ["broken"], "a finding is no problem"
        assert page.names(filter="misaligned_control") == ["shift 16", "shift 4"], "the worst first"
        worst, other = (page.row(name) for name in ("shift 16", "small"))
        (note,) = worst["measured"]
        assert re.fullmatch(r"the control is 1[56]\S* px left, compared with its target", note["what"])
        assert "align them" in note["do"]
        assert other["measured"][0]["what"] == "the target is scaled up 2×: 128×128 to 256×256"
        (group, _) = page.get("/groups", finding="misaligned_control")["groups"]
        assert [row["name"] for row in group["rows"]] == ["shift 16"]
        query = {"row": worst["row"], "size": "overlay", **note["overlay"]}
        answer = page.get("/image", **query)
        shown = np.asarray(Image.open(BytesIO(answer.content)).convert("RGB"), np.int16)
        assert shown.shape == (256, 256, 3)
        assert "immutable" in answer.headers["cache-control"]
        below, above = (Image.open(project / f"data/{role}/shift 16.png").convert("L").crop((0, 0, 256, 60))
                        for role in ("target_images", "control_images"))  # fmt: skip
        assert np.abs(shown[:60, :, 0] - np.asarray(above, np.int16)).mean() < 12, "the control is red"
        assert np.abs(shown[:60, :, 2] - np.asarray(below, np.int16)).mean() < 12, "the target is cyan"
        page.get("/image", 422, **query | {"row": other["row"], "role": "control-0"})
        page.leave_out([worst], True)
        assert page.names(filter="misaligned_control") == ["shift 4"], "what is left out hurts nobody"
        page.leave_out([page.row("shift 16")], False)
    monkeypatch.setattr(measured, "measure_files", lambda *_, **__: pytest.fail("nothing is measured again"))
    with opened(project) as client:
        page = Page(client)
        assert (checked(page)["kept"], checked(page)["found"]) == (True, found)
        control.write_bytes((project / "data/target_images/shift 16.png").read_bytes())
        page.post("/reload")
        page.listed()
        assert (page.row("shift 16")["changed"], page.row("shift 16")["measured"]) == (True, [])
    for store in (project / ".qwen-ui/measured").iterdir():
        store.unlink()
    with opened(project) as client:
        page = Page(client)
        assert checked(page)["found"]["not_measured"] == 4, "as of a check by an older version"


def scanned(page: Page) -> dict[str, list[list[str]]]:
    """The findings of a scan: the groups of names by finding."""
    page.listed()
    page.post("/scan")
    wait_until(lambda: page.get()["scan"]["state"] != "running")
    summary = page.get()["scan"]
    assert summary["state"] == "done", summary["error"]
    found = [name for name, count in summary["found"].items() if count]
    return {
        name: [[row["name"] for row in group["rows"]] for group in page.get("/groups", finding=name)["groups"]]
        for name in found
    }


def test_duplicates_and_outliers(project: Path, page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    data = project / "data"
    for i in range(20):
        write_image(data / f"target_images/many{i:02}.png", 200 + i)
        write_image(data / f"control_images/many{i:02}.png", 300 + i)
        (data / f"target_images/many{i:02}.txt").write_text("the same" if i < 11 else f"prompt {i}", encoding="utf-8")
    for name, size in (("near", (40, 30)), ("huge", (256, 192)), ("wide", (192, 16))):
        write_image(data / f"target_images/{name}.png", {"near": 0, "huge": 400, "wide": 401}[name], size)
        write_image(data / f"control_images/{name}.png", 500 + len(name))
        (data / f"target_images/{name}.txt").write_text("x" if name == "huge" else "long " * 500, encoding="utf-8")
    for name in ("copy", "same"):
        (data / f"target_images/{name}.png").write_bytes((data / "target_images/d.png").read_bytes())
        (data / f"target_images/{name}.txt").write_text(f"prompt of {name}", encoding="utf-8")
        write_image(data / f"control_images/{name}.png", 600 + len(name))
    (data / "control_images/same.png").write_bytes((data / "target_images/d.png").read_bytes())
    Image.new("L", SIZE, 255).save(data / "control_images/a_mask.png")
    Image.new("L", SIZE, 0).save(data / "control_images/c_mask.png")
    (data / "target_images/many00.png").write_bytes(b"no image")
    monkeypatch.setattr("qwen_cache.storage.remembered.is_settled", lambda *_: True)  # as after two seconds
    found = scanned(page)
    assert found["repeated_target"] == [["copy", "d", "same"]]
    assert found["near_duplicate"] == [["a", "near"]]
    assert found["identity_pair"] == [["same"]]
    assert found["unreadable"] == [["many00"]]
    assert found["unusual_size"] == [["huge"]]
    assert found["unusual_shape"] == [["wide"]]
    assert found["frequent_prompt"] == [[f"many{i:02}"] for i in range(11)]
    assert found["long_prompt"] == [["near"], ["wide"]]
    assert found["short_prompt"] == [["huge"]]
    assert (found["full_mask"], found["empty_mask"]) == ([["a"]], [["c"]])
    assert page.get()["scan"]["found"]["tiny"] == 28
    assert page.names(filter="repeated_target", sort="source") == ["copy", "d", "same"]
    assert page.names(sort="largest")[0] == "huge"
    assert "identity_pair" in page.row("same")["findings"]
    assert "not an image" in page.row("many00")["problems"][0]["what"]

    reads: list[str] = []
    real = scan._read
    monkeypatch.setattr(scan, "_read", lambda role, image: reads.append(str(image)) or real(role, image))
    os.utime(data / "target_images/b.png", ns=(1, 1))
    assert scanned(page) == found
    remembered = {path for path in reads if not path.endswith(("many00.png", "b.png"))}
    assert str(data / "target_images/b.png") in reads
    assert not remembered


def test_a_scan_can_be_stopped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    page.listed()
    page.post("/scan/stop", 409)
    begun, goes_on = threading.Event(), threading.Event()
    real: Callable[..., Any] = scan.facts_of

    def slow(*arguments: Any, **more: Any) -> Any:
        begun.set()
        assert goes_on.wait(HANG)
        return real(*arguments, **more)

    monkeypatch.setattr(scan, "facts_of", slow)
    assert page.post("/scan")["state"] == "running"
    assert begun.wait(HANG)
    page.post("/scan/stop")
    goes_on.set()
    wait_until(lambda: page.get()["scan"]["state"] != "running")
    assert page.get()["scan"]["state"] == "stopped"
    assert page.get("/groups", finding="tiny") == {"total": 0, "order": 0, "groups": []}


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """The headers and the body of an answer are two writes: the second is sent at once."""
    with open_socket("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
