"""Many images in one run: none is generated twice, no other file is overwritten, and a kill costs one image."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_cache.errors import ConfigError, Problem, QwenCacheError
from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.places import File
from qwen_train.inference.images import (
    GenerateJob,
    Work,
    control_images,
    output_paths,
    prompt_jobs,
    recorded_hash,
    save_images,
    source_jobs,
)

from .support.caches import contents
from .support.crash import Crash, crash_after
from .support.photographs import photograph

EDIT, BOTH = (ModelFolder("it", Path("it"), name) for name in ("QwenImageEditPlusPipeline", "QwenImage21Pipeline"))
ABOUT = {"model": "tiny", "seed": 3, "true_cfg_scale": 4.0, "lora": None}


@dataclass
class Generation:
    """Stands for the model: what it draws follows from prompt and images, and it counts what it was asked."""

    out: Path
    generated: list[str] = field(default_factory=list)
    dies_at: str | None = None

    def __call__(self, job: GenerateJob) -> Image.Image:
        if job.name == self.dies_at:
            raise Crash
        self.generated.append(job.name)
        image = control_images(job, QWEN_IMAGE)[0] if job.controls else Image.new("RGB", (16, 16))
        return image.rotate(len(job.prompt))

    def run(self, jobs: Sequence[GenerateJob], inputs: Mapping[str, Any] = ABOUT) -> tuple[Work, list[str]]:
        """The jobs carried out, and the names of those generated."""
        self.generated = []
        work = Work(jobs, output_paths(jobs, self.out), lambda job: inputs)
        work.run(self)
        return work, self.generated


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    return Generation(tmp_path / "out")


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("china.jpg", "flower.jpg")]
    for path in paths:
        photograph(path.name).resize((40, 30)).save(path, quality=95)
    return paths


@pytest.fixture
def jobs(images: list[Path]) -> list[GenerateJob]:
    return [GenerateJob(name, (File(images[0]),), f"turn it {name}") for name in ("a", "b", "folder/c", "folder/d#2")]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(QwenCacheError) as error:
        action()
    return str(error.value)


# ---- what is written, and what is not again --------------------------------------------------------------------------


def test_each_image_is_written_as_it_was_generated(generation: Generation, jobs: list[GenerateJob]) -> None:
    done, generated = generation.run(jobs)
    names = ["a", "b", "folder/c", "folder/d#2"]
    assert generated == names
    assert (done.skipped, done.failed) == ([], [])
    assert done.written == [generation.out / f"{name}.png" for name in names]
    for job, path in zip(jobs, done.written, strict=True):
        with Image.open(path) as found:
            assert found.format == "PNG"
            assert np.array_equal(np.asarray(found), np.asarray(generation(job)))


def test_nothing_is_generated_again(generation: Generation, jobs: list[GenerateJob]) -> None:
    first, _ = generation.run(jobs)
    before = contents(generation.out)
    again, generated = generation.run(jobs)
    assert generated == []
    assert (again.written, again.skipped, again.failed) == ([], first.written, [])
    assert contents(generation.out) == before


def test_a_killed_run_continues_where_it_stopped(
    generation: Generation, jobs: list[GenerateJob], tmp_path: Path
) -> None:
    expected = Generation(tmp_path / "whole")
    expected.run(jobs)
    generation.dies_at = "folder/c"
    with pytest.raises(Crash):
        generation.run(jobs)
    generation.dies_at = None
    done, generated = generation.run(jobs)
    assert generated == ["folder/c", "folder/d#2"]
    assert done.skipped == [generation.out / "a.png", generation.out / "b.png"]
    assert contents(generation.out) == contents(expected.out)


def test_a_kill_while_writing_leaves_no_half_image(
    generation: Generation, jobs: list[GenerateJob], tmp_path: Path
) -> None:
    """At each of the operations that change what is on disk."""
    expected = Generation(tmp_path / "whole")
    expected.run(jobs)
    for count in range(1, 3 * len(jobs)):
        generation.out = tmp_path / f"killed at {count}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            crash_after(count, monkeypatch)
            with pytest.raises(Crash):
                generation.run(jobs)
        for path in generation.out.rglob("*.png"):
            assert path.read_bytes() == (expected.out / path.relative_to(generation.out)).read_bytes()
        generation.run(jobs)
        assert contents(generation.out) == contents(expected.out)


@pytest.mark.parametrize("change", ["prompt", "image", "order", "setting", "settings"])
def test_a_changed_input_generates_its_image_again_and_no_other(
    change: str, generation: Generation, images: list[Path]
) -> None:
    one, two = (File(path) for path in images)
    jobs = [GenerateJob("a", (one, two), "x"), GenerateJob("b", (two,), "x"), GenerateJob("c", (), "y")]
    generation.run(jobs)
    inputs = dict(ABOUT)
    if change == "prompt":
        jobs[0] = replace(jobs[0], prompt="x.")
    elif change == "image":
        photograph("chelsea.png").resize((40, 30)).save(images[0])
    elif change == "order":
        jobs[0] = replace(jobs[0], controls=(two, one))
    else:
        inputs |= {"seed": 4} if change == "setting" else {"sigmas": [1.0, 0.5]}
    done, generated = generation.run(jobs, inputs)
    assert generated == (["a"] if "setting" not in change else ["a", "b", "c"])
    assert [path.stem for path in done.written] == generated
    assert generation.run(jobs, inputs)[1] == []


def test_neither_the_target_nor_the_order_of_settings_decides(generation: Generation, jobs: list[GenerateJob]) -> None:
    generation.run(jobs)
    others = [replace(job, target=job.controls[0]) for job in jobs]
    assert generation.run(others, dict(reversed(ABOUT.items())))[1] == []


@pytest.mark.parametrize("damage", ["cut off", "nearly whole", "another byte"])
def test_a_damaged_image_is_generated_again(damage: str, generation: Generation, jobs: list[GenerateJob]) -> None:
    generation.run(jobs)
    path = generation.out / "b.png"
    whole = path.read_bytes()
    half = len(whole) // 2
    parts = {
        "cut off": whole[:half],
        "nearly whole": whole[:-16],
        "another byte": whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :],
    }
    path.write_bytes(parts[damage])
    assert generation.run(jobs)[1] == ["b"]
    assert path.read_bytes() == whole


def test_no_changed_byte_of_an_image_passes_for_the_image(tmp_path: Path) -> None:
    """A PNG has a checksum for each chunk; only the empty last one, length and checksum, is not looked at."""
    path = tmp_path / "a.png"
    save_images([photograph("china.jpg").resize((12, 8))], path, "ab" * 16)
    whole, same = path.read_bytes(), 0
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
        with suppress(ConfigError):  # it does not look like one of ours
            same += recorded_hash(path) is not None
    assert same == 8


# ---- what is in the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", ["png", "jpeg", "text", "empty", "folder", "link"])
def test_what_was_not_made_here_is_refused_before_anything_is_generated(
    foreign: str, generation: Generation, jobs: list[GenerateJob], images: list[Path]
) -> None:
    path = generation.out / "folder" / "c.png"
    path.parent.mkdir(parents=True)
    if foreign in ("png", "jpeg"):
        photograph("china.jpg").save(path, foreign)
    elif foreign == "folder":
        path.mkdir()
    elif foreign == "link":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(b"mine" if foreign == "text" else b"")
    before = contents(generation.out)
    message = refusal(lambda: generation.run(jobs))
    assert message.startswith(f"{path}: this file was not generated by `qwen-train`")
    assert "move it, or name another --out" in message
    assert generation.generated == []
    assert contents(generation.out) == before
    assert os.path.lexists(path)


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "..", ".", "", "a//b", "a/", "./a", "a\\..\\b", "a\0b"]
)
def test_a_name_that_leads_elsewhere_is_refused(name: str, generation: Generation, jobs: list[GenerateJob]) -> None:
    message = refusal(lambda: generation.run([*jobs, replace(jobs[0], name=name)]))
    assert message.startswith(f"{name!r}: this name leads out of the output folder")
    assert generation.generated == []
    assert not generation.out.exists()


def test_a_name_too_long_for_a_file_is_refused(generation: Generation, jobs: list[GenerateJob]) -> None:
    generation.run([replace(jobs[0], name="x" * 240)])
    assert "too long for a file" in refusal(lambda: generation.run([replace(jobs[0], name="é" * 121)]))


@pytest.mark.parametrize("names", [("a", "a"), ("Folder/a", "folder/A")])
def test_names_of_one_file_are_refused(names: tuple[str, str], generation: Generation, jobs: list[GenerateJob]) -> None:
    message = refusal(lambda: generation.run([replace(jobs[0], name=name) for name in names]))
    assert f"two images would have the same path (found {names[0]} and {names[1]})" in message
    assert generation.generated == []


def test_a_file_in_the_way_of_a_folder_is_refused(generation: Generation, jobs: list[GenerateJob]) -> None:
    clash = [replace(jobs[0], name="a"), replace(jobs[0], name="a.png/b")]
    assert f"{generation.out / 'a.png'}: a file is in the way of a folder" in refusal(lambda: generation.run(clash))
    generation.out.mkdir()
    (generation.out / "folder").write_bytes(b"mine")
    assert f"{generation.out / 'folder'}: a file is in the way of a folder" in refusal(lambda: generation.run(jobs))
    generation.out = generation.out / "folder"
    assert f"{generation.out}: a file is in the way of a folder" in refusal(lambda: generation.run(jobs))
    assert generation.generated == []


# ---- images that cannot be read ------------------------------------------------------------------------------------


def test_images_that_cannot_be_read_are_reported_and_the_others_generated(
    generation: Generation, jobs: list[GenerateJob], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    missing = replace(jobs[1], controls=(File(tmp_path / "missing.png"),))
    done, _ = generation.run([jobs[0], missing, replace(jobs[2], controls=(File(broken),)), jobs[3]])
    assert [path.stem for path in done.written] == ["a", "d#2"]
    assert [(problem.where, problem.what.split(" (")[0]) for problem in done.failed] == [
        (f"b: {tmp_path / 'missing.png'}", "the file does not exist"),
        (f"folder/c: {broken}", "this is not an image in a supported format"),
    ]
    assert generation.run(jobs)[1] == ["b", "folder/c"]


def test_other_errors_stop_everything(generation: Generation, jobs: list[GenerateJob]) -> None:
    """Such as too little memory, which the next image would not have either."""
    work = Work(jobs, output_paths(jobs, generation.out), lambda job: ABOUT)
    with pytest.raises(MemoryError):
        work.run(lambda job: (_ for _ in ()).throw(MemoryError))


# ---- where jobs come from --------------------------------------------------------------------------------------------


def test_jobs_of_a_folder_of_pairs(pairs: Path) -> None:
    jobs, problems = source_jobs(str(pairs), DataConfig(), EDIT)
    assert problems == []
    assert [(job.name, len(job.controls)) for job in jobs] == [("cat", 2), ("china", 1), ("cup", 1), ("flower", 1)]
    cat = jobs[0]
    assert cat.prompt == "mirror the cat, 然后 keep the second image's light"
    assert cat.controls[1].read() == (pairs / "control_images" / "cat_control_1.png").read_bytes()
    assert cat.target is not None
    assert cat.target.read() == (pairs / "target_images" / "cat.png").read_bytes()
    assert [image.size for image in control_images(cat, QWEN_IMAGE)] == [(120, 120), (160, 107)]


def test_without_a_target_there_is_none_to_compare_with(pairs: Path) -> None:
    shutil.rmtree(pairs / "target_images")
    jobs, problems = source_jobs(str(pairs), DataConfig(), EDIT, ["x"])
    assert [(job.name, len(job.controls), job.target) for job in jobs] == [
        ("cat", 2, None),
        ("china", 1, None),
        ("cup", 1, None),
        ("flower", 1, None),
    ]
    assert problems == []


def test_jobs_of_a_table_name_the_rows_that_cannot_be_used(pairs: Path, generation: Generation) -> None:
    rows = [
        {"target": f"target_images/{name}.png", "control": f"control_images/{name}.png", "prompt": prompt}
        for name, prompt in (("cat", "x"), ("cat", "y"), ("nowhere", "z"), ("cup", ""))
    ]
    table = pairs / "rows.jsonl"
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    jobs, problems = source_jobs(str(table), DataConfig(), EDIT)
    assert [job.name for job in jobs] == ["target_images/cat", "target_images/cat#2"]
    assert {problem.where.rpartition(":")[2] for problem in problems} == {"3", "4"}
    allowed, _ = source_jobs(str(table), DataConfig(allow_empty_prompt=True), EDIT)
    assert len(allowed) == 3
    assert [path.name for path in generation.run(jobs)[0].written] == ["cat.png", "cat#2.png"]


def test_a_model_that_takes_images_or_none_takes_all_kinds_of_rows(pairs: Path, tmp_path: Path) -> None:
    """From a table in any mixture; from folders as their names say, or as --prompt does."""
    rows = [
        {"target": "target_images/cat.png", "control": "control_images/cat.png", "prompt": "x"},
        {"target": "target_images/cup.png", "prompt": "y"},
    ]
    (pairs / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (pairs / "test.csv").write_text("control,prompt\ncontrol_images/cat.png,x\n", encoding="utf-8")

    def found(source: Path, *prompts: str) -> list[tuple[str, int, bool]]:
        jobs, problems = source_jobs(str(source), DataConfig(), BOTH, prompts)
        assert problems == []
        return [(job.name, len(job.controls), job.target is not None) for job in jobs]

    assert found(pairs / "rows.jsonl") == [("target_images/cat", 1, True), ("target_images/cup", 0, True)]
    assert found(pairs / "test.csv") == [("control_images/cat", 1, False)]
    targets = pairs / "target_images"
    assert found(targets) == [(name, 0, True) for name in ("cat", "china", "cup", "flower")]
    assert found(targets, "mirror it") == [(name, 1, False) for name in ("cat", "china", "cup", "flower")]
    assert [count for _, count, _ in found(pairs)] == [2, 1, 1, 1]
    for path in targets.glob("*.txt"):
        shutil.copy(path, pairs / "control_images")
    shutil.rmtree(targets)
    assert found(pairs) == [("cat", 2, False), *((name, 1, False) for name in ("china", "cup", "flower"))]
    (tmp_path / "prompts.csv").write_text("prompt\nx\n", encoding="utf-8")
    with pytest.raises(QwenCacheError, match="no column holds the target"):
        found(tmp_path / "prompts.csv")


def test_an_editing_model_takes_the_rows_without_controls_that_build_takes(pairs: Path) -> None:
    """Allowed if a cell of a table is empty, or by the setting; not with --prompt, nor what may be a mistake."""
    targets, control = pairs / "target_images", pairs / "control_images" / "flower.png"
    allowed = DataConfig(allow_no_control=True)
    table = pairs / "rows.csv"
    rows = ["target,control,prompt", "target_images/cat.png,control_images/cat.png,x", "target_images/cup.png,,y"]
    table.write_text("\n".join(rows), encoding="utf-8")
    prompts_alone = pairs / "targets.csv"
    prompts_alone.write_text("target,prompt\ntarget_images/cup.png,y\n", encoding="utf-8")

    def found(source: Path, data: DataConfig, *prompts: str) -> tuple[dict[str, int], list[Problem]]:
        jobs, problems = source_jobs(str(source), data, EDIT, prompts)
        return {job.name: len(job.controls) for job in jobs}, problems

    both = {"target_images/cat": 1, "target_images/cup": 0}
    assert found(table, DataConfig()) == (both, [])
    refused = Problem(f"{table}:3", "the target has no control", "add one, or remove the target")
    assert found(table, allowed, "z") == ({"target_images/cat": 1}, [refused])
    assert "no column holds the control" in refusal(lambda: found(prompts_alone, DataConfig()))
    assert found(prompts_alone, allowed) == ({"target_images/cup": 0}, [])
    control.unlink()
    expected = {"cat": 2, "china": 1, "cup": 1}
    what = "the control control_images/flower.png (or .jpg, …) is missing, found none"
    do = "add it, or remove the target, or set data.allow_no_control=true if it is meant to have none"
    assert found(pairs, DataConfig()) == (expected, [Problem(str(targets / "flower.png"), what, do)])
    assert found(pairs, allowed) == (expected | {"flower": 0}, [])
    alone = dict.fromkeys((*expected, "flower"), 1)
    assert found(targets, allowed) == found(targets, DataConfig()) == (alone, []), "a folder of images to edit"
    shutil.rmtree(control.parent)
    assert "no control folder, which an editing model needs" in refusal(lambda: found(pairs, DataConfig()))
    assert found(pairs, allowed) == (dict.fromkeys(alone, 0), [])
    assert "no control folder" in refusal(lambda: found(pairs, allowed, "z"))


def test_control_images_keep_their_transparency_for_a_model_that_has_it(tmp_path: Path) -> None:
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    image.save(tmp_path / "it.png")
    job = GenerateJob("it", (File(tmp_path / "it.png"),), "x")
    (kept,), (white,) = (control_images(job, family) for family in (QWEN_IMAGE_21, QWEN_IMAGE))
    assert (kept.mode, kept.getpixel((0, 0))) == ("RGBA", (10, 20, 30, 0))
    assert (white.mode, white.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_several_prompts_about_the_same_images(images: list[Path], generation: Generation) -> None:
    jobs = prompt_jobs("out", images, ["one", "two", "one"])
    assert [job.name for job in jobs] == ["out-1", "out-2", "out-3"]
    assert [job.prompt for job in jobs] == ["one", "two", "one"]
    assert all([image.read() for image in job.controls] == [p.read_bytes() for p in images] for job in jobs)
    done, generated = generation.run(jobs)
    assert len(done.written) == 3
    assert generated == ["out-1", "out-2"]  # the third is a copy of the first
    assert len({path.read_bytes() for path in done.written}) == 2
    assert [job.name for job in prompt_jobs("out", images, ["one"])] == ["out"]
