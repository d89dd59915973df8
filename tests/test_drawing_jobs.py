"""Many images in one go: nothing is drawn twice, nothing of others is overwritten, and a kill costs one image."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_cache.errors import QwenCacheError
from qwen_cache.settings.data import DataConfig
from qwen_cache.sources.places import File
from qwen_train.inference.jobs import Done, Job, images_of, jobs_of, jobs_of_prompts, run_jobs

from .support.caches import contents
from .support.crash import Crash, crash_after
from .support.photographs import photograph

ABOUT = {"model": "tiny", "seed": 3, "true_cfg_scale": 4.0, "lora": None}


@dataclass
class Drawing:
    """Stands for the model: what it draws follows from prompt and images, and it counts what it was asked."""

    out: Path
    drawn: list[str] = field(default_factory=list)
    dies_at: str | None = None

    def __call__(self, job: Job) -> Image.Image:
        if job.name == self.dies_at:
            raise Crash
        self.drawn.append(job.name)
        image = images_of(job)[0] if job.controls else Image.new("RGB", (16, 16))
        return image.rotate(len(job.prompt))

    def run(self, jobs: list[Job], about: Mapping[str, Any] = ABOUT) -> tuple[Done, list[str]]:
        """What became of the jobs, and which were drawn."""
        self.drawn = []
        return run_jobs(jobs, self, self.out, about), self.drawn


@pytest.fixture
def drawing(tmp_path: Path) -> Drawing:
    return Drawing(tmp_path / "out")


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("china.jpg", "flower.jpg")]
    for path in paths:
        photograph(path.name).resize((40, 30)).save(path, quality=95)
    return paths


@pytest.fixture
def jobs(images: list[Path]) -> list[Job]:
    return [Job(name, (File(images[0]),), f"turn it {name}") for name in ("a", "b", "folder/c", "folder/d#2")]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(QwenCacheError) as error:
        action()
    return str(error.value)


# ---- what is written, and what is not again --------------------------------------------------------------------------


def test_each_image_is_written_as_it_was_drawn(drawing: Drawing, jobs: list[Job]) -> None:
    done, drawn = drawing.run(jobs)
    names = ["a", "b", "folder/c", "folder/d#2"]
    assert drawn == names
    assert done == Done([drawing.out / f"{name}.png" for name in names], [], [])
    for job, path in zip(jobs, done.written, strict=True):
        with Image.open(path) as found:
            assert found.format == "PNG"
            assert np.array_equal(np.asarray(found), np.asarray(drawing(job)))


def test_nothing_is_drawn_again(drawing: Drawing, jobs: list[Job]) -> None:
    first, _ = drawing.run(jobs)
    before = contents(drawing.out)
    again, drawn = drawing.run(jobs)
    assert drawn == []
    assert again == Done([], first.written, [])
    assert contents(drawing.out) == before


def test_a_run_that_was_killed_goes_on_where_it_was(drawing: Drawing, jobs: list[Job], tmp_path: Path) -> None:
    expected = Drawing(tmp_path / "whole")
    expected.run(jobs)
    drawing.dies_at = "folder/c"
    with pytest.raises(Crash):
        drawing.run(jobs)
    drawing.dies_at = None
    done, drawn = drawing.run(jobs)
    assert drawn == ["folder/c", "folder/d#2"]
    assert done.skipped == [drawing.out / "a.png", drawing.out / "b.png"]
    assert contents(drawing.out) == contents(expected.out)


def test_a_kill_while_writing_leaves_no_half_image(drawing: Drawing, jobs: list[Job], tmp_path: Path) -> None:
    """At each of the operations that change what is on disk."""
    expected = Drawing(tmp_path / "whole")
    expected.run(jobs)
    for count in range(1, 3 * len(jobs)):
        drawing.out = tmp_path / f"killed at {count}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_after(count, monkeypatch)
            with pytest.raises(Crash):
                drawing.run(jobs)
        for path in drawing.out.rglob("*.png"):
            assert path.read_bytes() == (expected.out / path.relative_to(drawing.out)).read_bytes()
        drawing.run(jobs)
        assert contents(drawing.out) == contents(expected.out)


@pytest.mark.parametrize("change", ["prompt", "image", "order", "setting", "settings"])
def test_what_decides_an_image_draws_it_anew_and_no_other(change: str, drawing: Drawing, images: list[Path]) -> None:
    one, two = (File(path) for path in images)
    jobs = [Job("a", (one, two), "x"), Job("b", (two,), "x"), Job("c", (), "y")]
    drawing.run(jobs)
    about = dict(ABOUT)
    if change == "prompt":
        jobs[0] = replace(jobs[0], prompt="x.")
    elif change == "image":
        photograph("chelsea.png").resize((40, 30)).save(images[0])
    elif change == "order":
        jobs[0] = replace(jobs[0], controls=(two, one))
    else:
        about |= {"seed": 4} if change == "setting" else {"sigmas": [1.0, 0.5]}
    done, drawn = drawing.run(jobs, about)
    assert drawn == (["a"] if "setting" not in change else ["a", "b", "c"])
    assert [path.stem for path in done.written] == drawn
    assert drawing.run(jobs, about)[1] == []


def test_neither_the_target_nor_the_order_of_settings_decides(drawing: Drawing, jobs: list[Job]) -> None:
    drawing.run(jobs)
    others = [replace(job, target=job.controls[0]) for job in jobs]
    assert drawing.run(others, dict(reversed(ABOUT.items())))[1] == []


@pytest.mark.parametrize("damage", ["cut off", "nearly whole", "another byte"])
def test_a_damaged_image_of_ours_is_drawn_anew(damage: str, drawing: Drawing, jobs: list[Job]) -> None:
    drawing.run(jobs)
    path = drawing.out / "b.png"
    whole = path.read_bytes()
    half = len(whole) // 2
    parts = {
        "cut off": whole[:half],
        "nearly whole": whole[:-16],
        "another byte": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
    }
    path.write_bytes(parts[damage])
    assert drawing.run(jobs)[1] == ["b"]
    assert path.read_bytes() == whole


# ---- what is in the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", ["png", "jpeg", "text", "empty", "folder", "link"])
def test_what_was_not_made_here_is_refused_before_anything_is_drawn(
    foreign: str, drawing: Drawing, jobs: list[Job], images: list[Path]
) -> None:
    path = drawing.out / "folder" / "c.png"
    path.parent.mkdir(parents=True)
    if foreign in ("png", "jpeg"):
        photograph("china.jpg").save(path, foreign)
    elif foreign == "folder":
        path.mkdir()
    elif foreign == "link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(b"mine" if foreign == "text" else b"")
    before = contents(drawing.out)
    message = refusal(lambda: drawing.run(jobs))
    assert message.startswith(f"{path}: there is a file that `qwen-train` did not draw")
    assert "move it, or name another --out" in message
    assert drawing.drawn == []
    assert contents(drawing.out) == before
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "..", ".", "", "a//b", "a/", "./a", "a\\..\\b", "a\0b"]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, drawing: Drawing, jobs: list[Job]) -> None:
    message = refusal(lambda: drawing.run([*jobs, replace(jobs[0], name=name)]))
    assert message.startswith(f"{name!r}: this name does not stay in the folder of the images")
    assert drawing.drawn == []
    assert not drawing.out.exists()


def test_a_name_too_long_for_a_file_is_refused(drawing: Drawing, jobs: list[Job]) -> None:
    drawing.run([replace(jobs[0], name="x" * 240)])
    assert "too long for a file" in refusal(lambda: drawing.run([replace(jobs[0], name="é" * 121)]))


@pytest.mark.parametrize("names", [("a", "a"), ("Folder/a", "folder/A")])
def test_names_of_one_file_are_refused(names: tuple[str, str], drawing: Drawing, jobs: list[Job]) -> None:
    message = refusal(lambda: drawing.run([replace(jobs[0], name=name) for name in names]))
    assert f"two images would have the same file (found {names[0]} and {names[1]})" in message
    assert drawing.drawn == []


def test_a_file_in_the_way_of_a_folder_is_refused(drawing: Drawing, jobs: list[Job]) -> None:
    clash = [replace(jobs[0], name="a"), replace(jobs[0], name="a.png/b")]
    assert f"{drawing.out / 'a.png'}: a file is in the way of a folder" in refusal(lambda: drawing.run(clash))
    drawing.out.mkdir()
    (drawing.out / "folder").write_bytes(b"mine")
    assert f"{drawing.out / 'folder'}: a file is in the way of a folder" in refusal(lambda: drawing.run(jobs))
    drawing.out = drawing.out / "folder"
    assert f"{drawing.out}: a file is in the way of a folder" in refusal(lambda: drawing.run(jobs))
    assert drawing.drawn == []


# ---- images that cannot be read ------------------------------------------------------------------------------------


def test_images_that_cannot_be_read_are_reported_and_the_others_drawn(
    drawing: Drawing, jobs: list[Job], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    missing = replace(jobs[1], controls=(File(tmp_path / "gone.png"),))
    done, _ = drawing.run([jobs[0], missing, replace(jobs[2], controls=(File(broken),)), jobs[3]])
    assert [path.stem for path in done.written] == ["a", "d#2"]
    assert [(problem.where, problem.what.split(" (")[0]) for problem in done.failed] == [
        (f"b: {tmp_path / 'gone.png'}", "the file does not exist"),
        (f"folder/c: {broken}", "this is not an image that Pillow can read"),
    ]
    assert drawing.run(jobs)[1] == ["b", "folder/c"]


def test_other_errors_stop_everything(drawing: Drawing, jobs: list[Job]) -> None:
    """Such as too little memory, which the next image would not have either."""
    with pytest.raises(MemoryError):
        run_jobs(jobs, lambda job: (_ for _ in ()).throw(MemoryError), drawing.out, ABOUT)


# ---- where jobs come from --------------------------------------------------------------------------------------------


def test_jobs_of_a_folder_of_pairs(pairs: Path) -> None:
    jobs, problems = jobs_of(str(pairs), DataConfig(), needs_control=True)
    assert problems == []
    assert [(job.name, len(job.controls)) for job in jobs] == [("cat", 2), ("china", 1), ("cup", 1), ("flower", 1)]
    cat = jobs[0]
    assert cat.prompt == "mirror the cat, 然后 keep the second image's light"
    assert cat.controls[1].read() == (pairs / "control_images" / "cat_control_1.png").read_bytes()
    assert cat.target is not None
    assert cat.target.read() == (pairs / "target_images" / "cat.png").read_bytes()
    assert [image.size for image in images_of(cat)] == [(120, 120), (160, 107)]


def test_without_a_target_there_is_none_to_compare_with(pairs: Path) -> None:
    shutil.rmtree(pairs / "target_images")
    jobs, problems = jobs_of(str(pairs), DataConfig(), needs_control=True, prompts=["x"])
    assert [(job.name, len(job.controls), job.target) for job in jobs] == [
        ("cat", 2, None),
        ("china", 1, None),
        ("cup", 1, None),
        ("flower", 1, None),
    ]
    assert problems == []


def test_jobs_of_a_table_name_the_rows_that_cannot_be_used(pairs: Path, drawing: Drawing) -> None:
    rows = [
        {"target": f"target_images/{name}.png", "control": f"control_images/{name}.png", "prompt": prompt}
        for name, prompt in (("cat", "x"), ("cat", "y"), ("nowhere", "z"), ("cup", ""))
    ]
    table = pairs / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    jobs, problems = jobs_of(str(table), DataConfig(), needs_control=True)
    assert [job.name for job in jobs] == ["target_images/cat", "target_images/cat#2"]
    assert {problem.where.rpartition(":")[2] for problem in problems} == {"3", "4"}
    allowed, _ = jobs_of(str(table), DataConfig(allow_empty_prompt=True), needs_control=True)
    assert len(allowed) == 3
    assert [path.name for path in drawing.run(jobs)[0].written] == ["cat.png", "cat#2.png"]


def test_several_prompts_about_the_same_images(images: list[Path], drawing: Drawing) -> None:
    jobs = jobs_of_prompts("out", images, ["one", "two", "one"])
    assert [job.name for job in jobs] == ["out-1", "out-2", "out-3"]
    assert [job.prompt for job in jobs] == ["one", "two", "one"]
    assert all([image.read() for image in job.controls] == [p.read_bytes() for p in images] for job in jobs)
    assert len(drawing.run(jobs)[0].written) == 3
    assert [job.name for job in jobs_of_prompts("out", images, ["one"])] == ["out"]
