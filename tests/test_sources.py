"""Sources become rows: exact names, nothing dropped silently, every problem in one run, with what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen_cache.errors import Problem, SourceError
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources import detect as source
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.detect import Row, read_source
from qwen_cache.sources.layouts import (
    CONTROL_FOLDERS,
    PAIRED_CONTROL_FOLDERS,
    PAIRED_TARGET_FOLDERS,
    TARGET_FOLDERS,
)
from qwen_cache.sources.places import File
from qwen_cache.sources.rows import CHOSEN, COLUMNS, GENERIC, LIST_COLUMNS, MAX_TEXT


def fill(folder: Path, files: dict[str, str | bytes] | list[str]) -> Path:
    """Write files below `folder`; a list names images and prompts without caring for their content."""
    for name, content in (files if isinstance(files, dict) else dict.fromkeys(files, "make it red")).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def edit(path: Path) -> tuple[list[Row], list[Problem]]:
    return read_source(path, needs_control=True, marked_phrases=True)


def paths(*images: Any) -> list[Path]:
    """The folder of images that are files of their own."""
    assert all(isinstance(image, File) for image in images)
    return [image.path for image in images]


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    assert problems[0].do
    return problems[0]


def refusal(path: Path, *, needs_control: bool = True) -> str:
    with pytest.raises(SourceError) as caught:
        read_source(path, needs_control=needs_control)
    assert caught.value.where is not None
    assert str(path) in str(caught.value.where)
    return str(caught.value)


# Folders


def test_a_folder_pairs_targets_with_controls_prompts_and_masks(tmp_path: Path) -> None:
    fill(
        tmp_path,
        {
            "target_images/b.png": "",
            "target_images/b.txt": "\ufeff  paint it\nblue \r\n",
            "target_images/a.PNG": "",
            "target_images/a.TXT": "make it red",
            "target_images/sub/a.png": "",
            "target_images/sub/a.txt": "make it green",
            "control_images/a.webp": "",
            "control_images/b.jpg": "",
            "control_images/b_control_2.png": "",
            "control_images/b_control_1.JPEG": "",
            "control_images/b_mask.png": "",
            "control_images/sub/a.tiff": "",
        },
    )
    rows, problems = edit(tmp_path)
    targets, controls = tmp_path / "target_images", tmp_path / "control_images"
    assert problems == []
    assert rows == [
        Row("a", str(targets / "a.PNG"), File(targets / "a.PNG"), (File(controls / "a.webp"),), None, "make it red"),
        Row(
            "b",
            str(targets / "b.png"),
            File(targets / "b.png"),
            (File(controls / "b.jpg"), File(controls / "b_control_1.JPEG"), File(controls / "b_control_2.png")),
            File(controls / "b_mask.png"),
            "paint it\nblue",
        ),
        Row(
            "sub/a",
            str(targets / "sub/a.png"),
            File(targets / "sub/a.png"),
            (File(controls / "sub/a.tiff"),),
            None,
            "make it green",
        ),
    ]


@pytest.mark.parametrize("targets", TARGET_FOLDERS)
@pytest.mark.parametrize("controls", CONTROL_FOLDERS)
def test_every_accepted_folder_name_is_accepted(tmp_path: Path, targets: str, controls: str) -> None:
    rows, problems = edit(fill(tmp_path, [f"{targets}/a.png", f"{targets}/a.txt", f"{controls}/a.png"]))
    assert (names(rows), problems) == (["a"], [])


@pytest.mark.parametrize("targets", PAIRED_TARGET_FOLDERS)
def test_a_pair_of_folders_is_recognised_by_its_names(tmp_path: Path, targets: str) -> None:
    for number, controls in enumerate((*PAIRED_CONTROL_FOLDERS, "Before", "control_images")):
        folder = fill(tmp_path / str(number), [f"{targets}/a.png", f"{targets}/a.txt", f"{controls}/a.png"])
        [row], problems = edit(fill(folder, ["sketches/b.png", "masks/a.png"]))
        assert paths(row.target, *row.controls) == [folder / targets / "a.png", folder / controls / "a.png"]
        assert problems == []


def test_half_a_pair_of_folders_is_any_subfolder(tmp_path: Path) -> None:
    fill(tmp_path / "mixed", ["targets/a.png", "targets/a.txt", "source/a.png"])
    assert paths(*edit(tmp_path / "mixed")[0][0].controls) == [tmp_path / "mixed/source/a.png"]
    fill(tmp_path / "mixed", ["control/a.png"])
    assert paths(*edit(tmp_path / "mixed")[0][0].controls) == [tmp_path / "mixed/control/a.png"]
    tmp_path = tmp_path / "half"
    fill(tmp_path, ["after/a.png", "after/a.txt", "b.png", "b.txt", "cats/c.png", "cats/c.txt"])
    rows, problems = read_source(tmp_path, needs_control=False)
    assert (names(rows), problems) == (["after/a", "b", "cats/c"], [])
    fill(tmp_path, ["before/a.png", "before/a.txt"])
    assert "a text-to-image model takes no controls (expected targets and prompts only, found before)" in refusal(
        tmp_path, needs_control=False
    )
    rows, _ = read_source(tmp_path, needs_control=False, columns=ColumnsConfig(control=[]))
    assert names(rows) == ["after/a", "b", "before/a", "cats/c"]
    fill(tmp_path, ["targets/d.png", "targets/d.txt", "controls/d.png"])
    rows, problems = read_source(tmp_path, needs_control=False, columns=ColumnsConfig(control=[]))
    assert (names(rows), problems) == (["d"], [])


def test_folders_are_named(tmp_path: Path) -> None:
    """Several folders of controls have one control of every target each."""
    fill(tmp_path, [f"{name}/a.png" for name in ("neu", "x/alt", "tiefe", "masken", "control_images")])
    fill(tmp_path, ["texte/a.txt", "neu/a_mask.png", "texte/a_mask.txt", "x/alt/a_mask.png", "tiefe/a_mask.png"])
    columns = ColumnsConfig(target="neu/", control=["x/alt/", "./tiefe"], mask="masken", prompt="texte")
    rows, problems = read_source(tmp_path, needs_control=True, columns=columns)
    found = [[str(path.relative_to(tmp_path)) for path in paths(row.target, *row.controls)] for row in rows]
    assert found == [[f"{folder}/{name}.png" for folder in ("neu", "x/alt", "tiefe")] for name in ("a", "a_mask")]
    assert [row.mask and paths(row.mask)[0] for row in rows] == [tmp_path / "masken/a.png", None]
    assert problems == []
    (tmp_path / "tiefe/a.png").unlink()
    assert only(read_source(tmp_path, needs_control=True, columns=columns)[1]).what == (
        "the control tiefe/a.png (or .jpg, …) is missing, found a.png"
    )
    fill(tmp_path, ["b.png", "b.txt", "x/alt/b.png"])
    columns = ColumnsConfig(target=".", control=["x/alt"])
    rows, problems = read_source(tmp_path, needs_control=True, columns=columns)
    assert ("b", File(tmp_path / "x/alt/b.png")) in [(row.name, *row.controls) for row in rows]
    fill(tmp_path, ["masken/c.png"])
    (row,), problems = draw(tmp_path, columns=ColumnsConfig(control=["control_images", "masken"], prompt="texte"))
    assert only(problems).what == "this belongs to no image of control_images"
    assert paths(*row.controls) == [tmp_path / "control_images/a.png", tmp_path / "masken/a.png"]


NO_FOLDERS = {
    "a typo": (
        {"target": "aftr/"},
        "data.columns.target names the folder 'aftr', which does not exist (found 'after', 'before', 'input')\n"
        "  → did you mean 'after'? --set data.columns.target=after",
    ),
    "outside": ({"target": "../x"}, "names the folder '../x', which does not exist"),
    "twice": (
        {"target": "after", "control": ["after"]},
        "data.columns names the folder 'after' twice, for the target and for the control (expected one role)",
    ),
    "a phrase": ({"phrase": "after"}, "a folder of images has no phrases (found after)"),
    "two candidates": (
        {},
        "the folder has more than one control folder (expected one, found before, input)\n"
        "  → name the right one: --set data.columns.control=before or --set data.columns.control=input",
    ),
}


@pytest.mark.parametrize("case", NO_FOLDERS)
def test_folders_that_are_not_clear_are_refused(tmp_path: Path, case: str) -> None:
    columns, expected = NO_FOLDERS[case]
    fill(tmp_path, ["after/a.png", "after/a.txt", "before/a.png", "input/a.png"])
    with pytest.raises(SourceError) as caught:
        read_source(tmp_path, needs_control=True, columns=ColumnsConfig.model_validate(columns))
    assert str(caught.value).startswith(str(tmp_path))
    assert expected in str(caught.value)


def test_names_are_compared_whole_never_by_prefix(tmp_path: Path) -> None:
    images = ["1", "10", "1.b", "1 (copy)"]
    fill(tmp_path, [f"target_images/{name}.{kind}" for name in images for kind in ("png", "txt")])
    fill(tmp_path, ["control_images/10.png", "control_images/1.b.jpg", "control_images/1 (copy).png"])
    rows, problems = edit(tmp_path)
    assert {row.name: paths(*row.controls)[0].name for row in rows} == {
        "10": "10.png",
        "1.b": "1.b.jpg",
        "1 (copy)": "1 (copy).png",
    }
    problem = only(problems)
    assert problem.where == str(tmp_path / "target_images/1.png")
    assert problem.what == "the control control_images/1.png (or .jpg, …) is missing, found none"


def test_ten_controls_keep_their_numbers_order(tmp_path: Path) -> None:
    fill(tmp_path, ["target_images/a.png", "target_images/a.txt", "control_images/a.png"])
    fill(tmp_path, [f"control_images/a_control_{number}.png" for number in range(1, 11)])
    [row], problems = edit(tmp_path)
    assert [path.stem for path in paths(*row.controls)] == ["a", *(f"a_control_{number}" for number in range(1, 11))]
    assert problems == []


def test_a_target_may_be_called_like_a_mask_or_a_control(tmp_path: Path) -> None:
    for name in ("a", "a_mask", "a_control_1"):
        fill(tmp_path, [f"target_images/{name}.png", f"target_images/{name}.txt", f"control_images/{name}.png"])
    fill(tmp_path, ["control_images/a_mask_mask.png", "control_images/a_control_1_control_1.png"])
    rows, problems = edit(tmp_path)
    assert problems == []
    found = {
        row.name: ([path.stem for path in paths(*row.controls)], row.mask and paths(row.mask)[0].stem) for row in rows
    }
    assert found == {
        "a": (["a"], None),
        "a_mask": (["a_mask"], "a_mask_mask"),
        "a_control_1": (["a_control_1", "a_control_1_control_1"], None),
    }


def test_hidden_files_and_what_is_no_image_are_left_out(tmp_path: Path) -> None:
    fill(tmp_path, ["target_images/a.png", "target_images/a.txt", "control_images/a.png"])
    rubbish = [".DS_Store", "Thumbs.db", "._a.png", "._a.txt", ".trash/b.png", "a.json", ".ipynb_checkpoints/a.png"]
    fill(tmp_path, [f"{folder}/{name}" for folder in ("target_images", "control_images") for name in rubbish])
    rows, problems = edit(tmp_path)
    assert (names(rows), problems) == (["a"], [])


def test_a_linked_subfolder_is_read(tmp_path: Path) -> None:
    fill(tmp_path, ["elsewhere/a.png", "elsewhere/a.txt", "control_images/x/a.png", "target_images/b.png"])
    fill(tmp_path, ["target_images/b.txt", "control_images/b.png"])
    (tmp_path / "target_images/x").symlink_to(tmp_path / "elsewhere")
    rows, problems = edit(tmp_path)
    assert (names(rows), problems) == (["b", "x/a"], [])


@pytest.mark.parametrize("links", [["a"], ["a", "b"]])
def test_links_back_into_the_source_lead_nowhere(tmp_path: Path, links: list[str]) -> None:
    """With two there are more paths than anybody can read."""
    fill(tmp_path, ["target_images/1.png", "target_images/1.txt", "control_images/1.png", "control_images/x/y.txt"])
    for name in links:
        for folder in (tmp_path, tmp_path / "target_images", tmp_path / "control_images/x"):
            (folder / name).symlink_to(folder)
        (tmp_path / f"target_images/up-{name}").symlink_to(tmp_path)
    (tmp_path / "target_images/itself").symlink_to("itself")
    rows, problems = edit(tmp_path)
    assert (names(rows), problems) == (["1"], [])
    fill(tmp_path / "flat", ["1.png", "1.txt"])
    for name in links:
        (tmp_path / "flat" / name).symlink_to(".")
    rows, problems = read_source(tmp_path / "flat", needs_control=False)
    assert (names(rows), problems) == (["1"], [])


def test_a_folder_may_have_two_names(tmp_path: Path) -> None:
    fill(tmp_path, ["cats/1.png", "cats/1.txt"])
    (tmp_path / "again").symlink_to("cats")
    rows, problems = read_source(tmp_path, needs_control=False)
    assert (names(rows), problems) == (["again/1", "cats/1"], [])


def test_links_to_links_to_links_are_refused(tmp_path: Path) -> None:
    """40 folders, each with two links to the next: no loop, and 2⁴⁰ paths to the last."""
    for number in range(40):
        (tmp_path / f"flat/.{number}").mkdir(parents=True)
        for name in ("a", "b"):
            (tmp_path / f"flat/.{number}/{name}").symlink_to(tmp_path / f"flat/.{number + 1}")
    fill(tmp_path, ["flat/.40/1.png", "flat/1.png", "flat/1.txt"])
    (tmp_path / "flat/a").symlink_to(tmp_path / "flat/.0")
    message = refusal(tmp_path / "flat", needs_control=False)
    assert "links lead to this folder by more than 100 paths" in message
    assert "remove the links between folders" in message


SWAPPED = {
    "a pipe": os.mkfifo,
    "a socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.fspath(path)),
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.filterwarnings("ignore:unclosed.*socket")
@pytest.mark.parametrize("kind", SWAPPED)
def test_what_never_ends_is_not_read(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an image was when the source was listed."""
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    fill(tmp_path, [f"{folder}_images/{name}.png" for folder in ("target", "control") for name in "ab"])
    fill(tmp_path, ["target_images/b.txt"])
    SWAPPED[kind](Path("target_images/a.txt"))
    [row], problems = edit(tmp_path)
    assert "a.txt cannot be read: the file cannot be read (found " in only(problems).what
    image = Path("target_images/b.png")
    image.unlink()
    SWAPPED[kind](image)
    with pytest.raises(SourceError, match=r"b\.png: the file cannot be read") as caught:
        row.target.read()
    assert caught.value.found in ("not a regular file", os.strerror(errno.ENXIO))
    assert "does not exist" in edit(tmp_path)[1][-1].what


@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.jsonl"])
def test_a_pipe_is_no_table(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in refusal(tmp_path / name)


def test_text_that_nobody_typed(tmp_path: Path) -> None:
    """NUL, as in UTF-16 without its mark, is a problem; lost characters and [trigger] without a word are counted."""
    captions = {f"lost{i}": "it\ufffds" for i in range(4)} | {"later": "a [trigger] in red", "fine": "red"}
    fill(tmp_path, [f"{name}.png" for name in (*captions, "utf16")])
    for name, caption in captions.items():
        (tmp_path / f"{name}.txt").write_text(caption)
    (tmp_path / "utf16.txt").write_bytes("make it red".encode("utf-16-le"))
    content = source.read_content(tmp_path, needs_control=False, captions=Captions())
    assert sorted(row.name for row in content.rows) == sorted(captions)
    assert "the prompt has NUL characters" in only(content.problems).what
    lost, trigger = content.notices
    assert (lost.count, lost.names, lost.is_fault) == (4, ("lost0", "lost1", "lost2"), True)
    assert (trigger.count, trigger.names, trigger.is_fault) == (1, ("later",), False)
    assert not source.read_content(tmp_path, needs_control=False, captions=Captions("ohwx")).notices[1:]


@pytest.mark.skipif(sys.platform != "linux", reason="names of bytes")
@pytest.mark.parametrize("name", [b"caf\xe9", b"d\xe9/x"])
def test_a_name_that_is_not_utf8_is_a_problem_of_its_file(tmp_path: Path, name: bytes) -> None:
    fill(tmp_path, ["ok.png"])
    (tmp_path / "ok.txt").write_text("red")
    path = os.path.join(os.fsencode(tmp_path), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    for ending, original in ((b".png", "ok.png"), (b".txt", "ok.txt")):
        with open(path + ending, "wb") as file:
            file.write((tmp_path / original).read_bytes())
    rows, problems = read_source(tmp_path, needs_control=False)
    assert [row.name for row in rows] == ["ok"]
    assert r"\udce9" in only(problems).what
    assert only(problems).what.endswith("is not UTF-8 text")
    assert only(problems).do == "rename it"
    str(only(problems)).encode()


def test_a_prompt_of_megabytes_is_a_problem(tmp_path: Path) -> None:
    fill(tmp_path, ["1.png"])
    (tmp_path / "1.txt").write_text("x" * (MAX_TEXT + 1))
    _, problems = read_source(tmp_path, needs_control=False)
    assert f"the file is too large (expected at most {MAX_TEXT} bytes, found {MAX_TEXT + 1})" in only(problems).what


def test_a_file_beyond_memory_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(SourceError, match=r"a\.png: the file is too large .* found 1099511627776"):
        File(tmp_path / "a.png").read()


def test_a_path_too_long_to_be_one_is_a_problem(tmp_path: Path) -> None:
    rows, problems = edit(table(tmp_path, "a.csv", f"image,control,prompt\n{'x' * 5000},b.png,red\n"))
    assert rows == []
    assert only(problems).what == "the name is too long (expected at most 4096 bytes, found 5000)"


BROKEN_FOLDERS = {
    "no prompt": (["-target_images/a.txt"], "target_images/a.txt is missing"),
    "no control": (["-control_images/a.png"], "control_images/a.png (or .jpg, …) is missing, found none"),
    "no first control": (
        ["-control_images/a.png", "control_images/a_control_1.png"],
        "control_images/a.png (or .jpg, …) is missing, found a_control_1.png",
    ),
    "a gap": (
        ["control_images/a_control_1.png", "control_images/a_control_3.png"],
        "control_images/a_control_2.png (or .jpg, …) is missing, found a.png, a_control_1.png, a_control_3.png",
    ),
    "two targets": (["target_images/a.jpg"], "the same name: a.jpg, a.png"),
    "two controls": (["control_images/a.jpg"], "the same name: a.jpg, a.png"),
    "two masks": (["control_images/a_mask.jpg", "control_images/a_mask.png"], "the same name: a_mask.jpg, a_mask.png"),
    "a dangling link": (["@control_images/a_mask.png"], "mask {}/control_images/a_mask.png does not exist"),
}


@pytest.mark.parametrize("case", BROKEN_FOLDERS)
def test_what_is_wrong_with_a_target_is_told_and_the_others_are_kept(tmp_path: Path, case: str) -> None:
    changes, expected = BROKEN_FOLDERS[case]
    for name in "ab":
        fill(tmp_path, [f"target_images/{name}.png", f"target_images/{name}.txt", f"control_images/{name}.png"])
    for change in changes:
        if change.startswith("-"):
            (tmp_path / change[1:]).unlink()
        elif change.startswith("@"):
            (tmp_path / change[1:]).symlink_to(tmp_path / "nowhere.png")
        else:
            fill(tmp_path, [change])
    rows, problems = edit(tmp_path)
    assert names(rows) == ["b"]
    problem = only(problems)
    assert Path(problem.where).parent == tmp_path / "target_images"
    assert Path(problem.where).stem == "a"
    assert expected.format(tmp_path) in problem.what


@pytest.mark.parametrize(
    "stray",
    [
        "target_images/c.txt",
        "control_images/c.png",
        "control_images/c_control_1.png",
        "control_images/c_mask.png",
        "control_images/a_control_0.png",
        "control_images/a_control_01.png",
        "control_images/a_1.png",
        "control_images/sub/a.png",
    ],
)
def test_a_file_without_a_target_is_told(tmp_path: Path, stray: str) -> None:
    fill(tmp_path, ["target_images/a.png", "target_images/a.txt", "control_images/a.png", stray])
    rows, problems = edit(tmp_path)
    assert names(rows) == ["a"]
    assert paths(*rows[0].controls) == [tmp_path / "control_images/a.png"]
    problem = only(problems)
    assert problem.where == str(tmp_path / stray)
    assert problem.what == "this belongs to no target: target_images has no image of that name"


NEAR = {
    "a typo": ("sunest", "sunset"),
    "capitals": ("foo", "Foo"),
    "zeros": ("7", "007"),
    "accents": ("cafe\u0301", "caf\u00e9"),
    "a further control": ("a_contol_1", "a_control_1"),
}


@pytest.mark.parametrize("case", NEAR)
def test_a_file_of_a_similar_name_is_one_problem_with_what_is_missing(tmp_path: Path, case: str) -> None:
    found, meant = NEAR[case]
    fill(tmp_path, ["target_images/good.png", "target_images/good.txt", "control_images/good.png"])
    target = meant.removesuffix("_control_1")
    fill(tmp_path, [f"target_images/{target}.png", f"target_images/{target}.txt", f"control_images/{found}.jpg"])
    if target != meant:
        fill(tmp_path, [f"control_images/{target}.png", f"control_images/{target}_control_2.png"])
    rows, problems = edit(tmp_path)
    assert names(rows) == ["good"]
    problem = only(problems)
    assert problem.where == str(tmp_path / f"target_images/{target}.png")
    assert problem.what == (
        f"the control control_images/{meant}.png (or .jpg, …) is missing; did you mean control_images/{found}.jpg?"
    )
    assert problem.do == "give both files the same name"


def test_a_prompt_of_a_similar_name_is_found_and_another_number_is_not(tmp_path: Path) -> None:
    fill(tmp_path, ["target_images/good.png", "target_images/good.txt", "control_images/good.png"])
    fill(tmp_path, ["target_images/photo_1.png", "target_images/phto_1.txt", "control_images/photo_2.png"])
    _, problems = edit(tmp_path)
    assert [problem.what for problem in problems] == [
        "the control control_images/photo_1.png (or .jpg, …) is missing, found none",
        "the prompt target_images/photo_1.txt is missing; did you mean target_images/phto_1.txt?",
        "this belongs to no target: target_images has no image of that name",
    ]


@pytest.mark.parametrize("kind", ["control", "prompt"])
def test_what_every_target_lacks_is_one_problem(tmp_path: Path, kind: str) -> None:
    fill(tmp_path, [f"after/{i}_after.png" for i in range(9)])
    if kind == "control":
        fill(tmp_path, [f"after/{i}_after.txt" for i in range(9)] + [f"before/{i}_before.png" for i in range(9)])
        expected = (
            "before: none of the 9 targets has a control (expected 0_after.png for 0_after.png, found 0_before.png, "
            "1_before.png, 2_before.png)\n  → give each control the name of its target"
        )
    else:
        fill(tmp_path, [f"before/{i}_after.png" for i in range(9)])
        expected = "after: none of the 9 targets has a prompt (expected 0_after.txt for 0_after.png, found no .txt)"
    rows, problems = edit(tmp_path)
    assert rows == []
    assert str(only(problems)).startswith(f"{tmp_path}/{expected}")


def test_an_image_that_is_not_read_is_named(tmp_path: Path) -> None:
    """And not its prompt called a stray; with a package that reads it, HEIC is an image like others."""
    fill(tmp_path, ["target_images/a.png", "target_images/a.txt", "control_images/a.tga", "target_images/p.psd"])
    fill(tmp_path, ["target_images/b.png", "target_images/b.txt", "control_images/b.HEIC", "target_images/c.CR2"])
    fill(tmp_path, ["target_images/c.txt"])
    rows, problems = edit(tmp_path)
    assert [(row.name, *row.controls) for row in rows] == [("b", File(tmp_path / "control_images/b.HEIC"))]
    assert [(Path(p.where).name, p.what, p.do) for p in problems] == [
        (
            "a.png",
            "the control control_images/a.png (or .jpg, …) is missing; a.tga is there, but TGA is not read",
            "save it as PNG, JPEG or WebP",
        ),
        ("c.CR2", "CR2 is not read", "save it as PNG, JPEG or WebP"),
    ]
    fill(tmp_path / "flat", ["a.tga", "a.txt", "b.psd"])
    assert "flat: there is no image that can be read (expected .png, .jpg," in refusal(
        tmp_path / "flat", needs_control=False
    )
    assert "found PSD, TGA)\n  → save them as PNG, JPEG or WebP" in refusal(tmp_path / "flat", needs_control=False)


def test_every_problem_is_told_in_one_go(tmp_path: Path) -> None:
    fill(tmp_path, ["target_images/a.png", "target_images/b.png", "target_images/b.txt", "control_images/c.png"])
    fill(tmp_path, {"target_images/d.png": "", "target_images/d.txt": b"caf\xe9", "control_images/d.png": ""})
    rows, problems = edit(tmp_path)
    assert rows == []
    told = [(Path(problem.where).name, problem.what) for problem in problems]
    assert [where for where, _ in told] == ["a.png", "a.png", "b.png", "d.png", "c.png"]
    assert "control" in told[0][1]
    assert "prompt" in told[1][1]
    assert "d.txt cannot be read" in told[3][1]


def test_an_empty_prompt_is_a_problem_unless_allowed(tmp_path: Path) -> None:
    fill(tmp_path, {"target_images/a.png": "", "target_images/a.txt": " \n", "control_images/a.png": ""})
    rows, problems = edit(tmp_path)
    assert rows == []
    assert only(problems).what == "the prompt is empty"
    rows, problems = read_source(tmp_path, needs_control=True, allow_empty_prompt=True)
    assert [row.prompt for row in rows] == [""]
    assert problems == []


@pytest.mark.parametrize("folder", ["target_images", "."])
def test_text_to_image_needs_no_controls(tmp_path: Path, folder: str) -> None:
    fill(tmp_path, [f"{folder}/y.png", f"{folder}/y.txt", f"{folder}/x/a_mask.jpg", f"{folder}/x/a_mask.txt"])
    rows, problems = read_source(tmp_path, needs_control=False)
    assert names(rows) == ["x/a_mask", "y"]
    assert [row.controls for row in rows] == [(), ()]
    assert problems == []


def draw(path: Path, **needs: Any) -> tuple[list[Row], list[Problem]]:
    return read_source(path, needs_control=True, needs_target=False, **needs)


@pytest.mark.parametrize("folder", ["", "control_images/"])
def test_to_draw_a_folder_of_controls_is_enough(tmp_path: Path, folder: str) -> None:
    images = ["a.png", "a_control_1.jpg", "a_mask.png", "b_control_1.png", "c/d.png", "c/d_control_1_control_1.png"]
    fill(tmp_path, [folder + name for name in (*images, "c/d_control_1.png", "a.txt", "b_control_1.txt", "c/d.txt")])
    rows, problems = draw(tmp_path)
    controls = {row.name: [str(path.relative_to(tmp_path / folder)) for path in paths(*row.controls)] for row in rows}
    assert controls == {
        "a": ["a.png", "a_control_1.jpg"],
        "b_control_1": ["b_control_1.png"],
        "c/d": ["c/d.png", "c/d_control_1.png"],
    }
    assert all(row.target is None and row.mask is None for row in rows)
    assert "d_control_1_control_1.txt is missing" in only(problems).what
    rows, problems = draw(tmp_path, needs_prompt=False, allow_empty_prompt=True)
    assert names(rows) == ["a", "b_control_1", "c/d", "c/d_control_1_control_1"]
    assert problems == []


def test_to_draw_a_gap_in_the_controls_is_told(tmp_path: Path) -> None:
    fill(tmp_path, ["a.png", "a_control_2.png", "a.txt"])
    assert "a_control_1.png (or .jpg, …) is missing" in only(draw(tmp_path)[1]).what


def test_to_draw_a_table_needs_no_target(tmp_path: Path) -> None:
    fill(tmp_path, {"a.png": b"", "b.png": b"", "t.jsonl": '{"control": ["a.png", "b.png"], "prompt": "x"}\n'})
    (row,), problems = draw(tmp_path / "t.jsonl")
    assert (row.name, paths(*row.controls), row.target) == (
        "a",
        [tmp_path / "a.png", tmp_path / "b.png"],
        None,
    )
    assert problems == []
    assert "no column holds the target" in refusal(tmp_path / "t.jsonl")
    fill(tmp_path, {"t.csv": "target,control,prompt\na.png,b.png,x\n,b.png,y\n"})
    (row,), problems = draw(tmp_path / "t.csv")
    assert paths(row.target) == [tmp_path / "a.png"]
    assert "the target 'target' is empty" in only(problems).what
    fill(tmp_path, {"n.csv": "control\na.png\n"})
    (row,), problems = draw(tmp_path / "n.csv", needs_prompt=False, allow_empty_prompt=True)
    assert (row.name, row.prompt, problems) == ("a", "", [])


def test_text_to_image_refuses_controls(tmp_path: Path) -> None:
    fill(tmp_path, ["target_images/a.png", "target_images/a.txt", "control_images/a.png"])
    assert "takes no controls (expected targets and prompts only, found control_images)" in refusal(
        tmp_path, needs_control=False
    )
    table = fill(tmp_path, {"t.csv": "image,edit_image,prompt\na.png,b.png,red\n"}) / "t.csv"
    assert "takes no controls (expected targets, prompts and masks only, found 'edit_image')" in refusal(
        table, needs_control=False
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], "no target folder, which an editing model needs (expected target_images or training_images"),
        (["a.png", "a.txt"], "found a.png, a.txt"),
        (["target_images/a.png"], "no control folder, which an editing model needs (expected control_images or"),
        (["target_images/a.txt", "control_images/a.png"], "there is no image (expected .png, .jpg"),
        (["target_images/a.png", "target/a.png", "control_images/a.png"], "found target, target_images)"),
        (["metadata.csv", "target_images/a.png"], "more than one way"),
        (["metadata.csv", "metadata.jsonl"], "found metadata.csv, metadata.jsonl)"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, files: list[str], expected: str) -> None:
    assert expected in refusal(fill(tmp_path, files))


NO_CONTROL = "data.allow_no_control=true if"


@pytest.mark.parametrize(
    ("files", "alone", "others"),
    [
        (["t.csv"], ["a"], []),
        (["target_images/a.png", "target_images/a.txt"], ["a"], []),
        (["a.png", "a.txt", "b.png", "b.txt"], ["a", "b"], []),
        (["target/a.png", "target/a.txt", "target/b.png", "target/b.txt", "control/b.png"], ["a"], ["b"]),
    ],
    ids=["a table", "a folder of targets", "a folder of images", "one control of two"],
)
def test_an_editing_model_takes_rows_without_control_where_they_are_meant(
    tmp_path: Path, files: list[str], alone: list[str], others: list[str]
) -> None:
    """Without the setting a control that has no file is a mistake, and so is a source without any."""
    fill(tmp_path, {name: "image,prompt\na.png,red\n" if name == "t.csv" else "red" for name in [*files, "a.png"]})
    source = tmp_path / "t.csv" if files == ["t.csv"] else tmp_path / "two" if files[0] == "a.png" else tmp_path
    if source.name == "two":
        fill(source, files)
        fill(source, {"a.txt": "red", "b.txt": "red"})
    if source == tmp_path:
        (tmp_path / "a.png").unlink()
    rows, problems = read_source(source, needs_control=False, takes_control=True, no_control="allowed")
    assert problems == []
    assert [row.name for row in rows if not row.controls] == alone
    assert [row.name for row in rows if row.controls] == others
    if others:
        _, problems = read_source(source, needs_control=True, no_control="stated")
        assert only(problems).what == "the control control/a.png (or .jpg, …) is missing, found none"
        assert only(problems).do == f"add it, or remove the target, or set {NO_CONTROL} it is meant to have none"
        return
    with pytest.raises(SourceError) as caught:
        read_source(source, needs_control=True, no_control="stated")
    assert str(caught.value).endswith(f"; or set {NO_CONTROL} no image is meant to have one")


def test_rows_without_control_do_not_hide_a_misnamed_or_incomplete_one(tmp_path: Path) -> None:
    targets = [f"target/{name}{end}" for name in ("a_1", "b", "c") for end in (".png", ".txt")]
    fill(tmp_path, [*targets, "control/a_01.png", "control/b_control_1.png", "control/c.png"])
    rows, problems = read_source(tmp_path, needs_control=False, takes_control=True, no_control="allowed")
    assert names(rows) == ["c"]
    assert [problem.what for problem in problems] == [
        "the control control/a_1.png (or .jpg, …) is missing; did you mean control/a_01.png?",
        "the control control/b.png (or .jpg, …) is missing, found b_control_1.png",
    ]
    for path in (tmp_path / "control").iterdir():
        path.unlink()
    fill(tmp_path, ["control/x.png"])
    _, problems = read_source(tmp_path, needs_control=False, takes_control=True, no_control="allowed")
    assert only(problems).what.startswith("none of the 3 targets has a control (expected a_1.png for a_1.png, found x")


def test_an_empty_cell_states_that_a_row_has_no_control(tmp_path: Path) -> None:
    files = {"t.csv": "target,control_0,control_1,prompt\na.png,,,red\na.png,b.png,,red\na.png,,b.png,red\n"}
    source = fill(tmp_path, files | {"a.png": "", "b.png": ""}) / "t.csv"
    rows, problems = read_source(source, needs_control=True, no_control="stated")
    assert [len(row.controls) for row in rows] == [0, 1]
    assert "control 1 is empty, but a later one is" in only(problems).what
    _, problems = read_source(source, needs_control=True)
    assert problems[0].what == "the target has no control"


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, ["a.zip"])
    kinds = "a table (.csv, .tsv, .jsonl, .json, .parquet), a .tar of images, or a folder of image pairs, of .parquet"
    assert f"there is no such source (expected {kinds}" in refusal(tmp_path / "nix")
    assert f"not a source that can be read (expected {kinds}" in refusal(tmp_path / "a.zip")
    for missing in ("nix.csv", "nix.parquet", "nix.tar"):
        assert "does not exist" in refusal(tmp_path / missing)


# Tables


def table(folder: Path, name: str, text: str | bytes) -> Path:
    """A table, and the images that the tests below name."""
    fill(folder, ["t/1.png", "t/10.png", "c/1.png", "c/2.png", "c/3.png", "m/1.png", "r/1.png"])
    return fill(folder, {name: text}) / name


def test_a_csv_of_qwen_image_finetune(tmp_path: Path) -> None:
    text = (
        "\ufeffpath_target,path_control,path_control_1,prompt,path_mask\r\n"
        't/1.png,c/1.png,c/2.png,"Say ""hi"",\r\nthen wave",m/1.png\r\n'
        f'{tmp_path / "t/10.png"}, c/3.png, , "make it red, please",\r\n'
    )
    path = table(tmp_path, "train.csv", text)
    rows, problems = edit(path)
    assert problems == []
    assert rows == [
        Row(
            "t/1",
            f"{path}:2",
            File(tmp_path / "t/1.png"),
            (File(tmp_path / "c/1.png"), File(tmp_path / "c/2.png")),
            File(tmp_path / "m/1.png"),
            'Say "hi",\nthen wave',
        ),
        Row(
            "t/10", f"{path}:4", File(tmp_path / "t/10.png"), (File(tmp_path / "c/3.png"),), None, "make it red, please"
        ),
    ]


SAME_TABLE = {
    "qwen-image-finetune": ("a.csv", "path_target,path_control,path_control_1,prompt\nt/1.png,c/1.png,c/2.png,red\n"),
    "columns in another order": ("a.csv", "control_2,Prompt,control_1,id,Image\nc/2.png ,red ,c/1.png,7,t/1.png \n"),
    "DiffSynth": ("a.json", [{"image": "t/1.png", "prompt": "red", "edit_image": ["c/1.png", "c/2.png"]}]),
    "musubi-tuner": (
        "a.jsonl",
        [{"image_path": "t/1.png", "control_path_0": "c/1.png", "control_path_1": "c/2.png", "caption": "red"}],
    ),
    "imagefolder": ("a.jsonl", [{"file_name": "t/1.png", "text": "red", "control": ["c/1.png", "c/2.png"], "n": 3}]),
    "instruct-pix2pix": (
        "a.csv",
        "input_image,input_image_1,edit_prompt,edited_image\nc/1.png,c/2.png,red,t/1.png\n",
    ),
}


@pytest.mark.parametrize("kind", SAME_TABLE)
def test_tables_of_other_trainers_give_the_same_row(tmp_path: Path, kind: str) -> None:
    name, content = SAME_TABLE[kind]
    if isinstance(content, list):
        content = json.dumps(content) if name == "a.json" else "\n".join(map(json.dumps, content))
    path = table(tmp_path, name, content)
    [row], problems = edit(path)
    assert problems == []
    assert row.where == (f"{path}[0]" if name == "a.json" else f"{path}:{2 if name == 'a.csv' else 1}")
    assert (row.name, row.prompt) == ("t/1", "red")
    assert paths(row.target, *row.controls) == [tmp_path / "t/1.png", tmp_path / "c/1.png", tmp_path / "c/2.png"]


KNOWN = (COLUMNS, GENERIC, {"target": CHOSEN})
ALIASES = [(role, alias) for known in KNOWN for role, aliases in known.items() for alias in aliases]


@pytest.mark.parametrize(("role", "alias"), ALIASES)
def test_every_column_name_is_known_and_documented(tmp_path: Path, role: str, alias: str) -> None:
    columns = {"target": "path_target", "control": "path_control", "mask": "path_mask", "prompt": "prompt"}
    columns |= {name: name for name in ("phrase", "rejected", "positive_prompt", "negative_prompt")} | {role: alias}
    prompt = ["red"] if alias in LIST_COLUMNS else "red"
    values = ["t/1.png", "c/1.png", "m/1.png", prompt, "ed", "r/1.png", "more", "less"]
    path = table(tmp_path, "a.jsonl", json.dumps(dict(zip(columns.values(), values, strict=True))))
    [row], problems = edit(path)
    assert problems == []
    found = paths(row.target, *row.controls, row.mask, row.rejected)
    assert found == [tmp_path / f"{folder}/1.png" for folder in "tcmr"]
    assert (row.prompt, row.phrase, row.slider) == ("red", ((1, 3),), ("more", "less"))
    documented = re.search(rf"^    {role} (.*?)^(    [a-z]|$)", source.__doc__ or "", re.DOTALL | re.MULTILINE)
    assert documented
    assert alias in re.findall(r"\w+", documented[0])


@pytest.mark.parametrize(
    ("prompt", "phrase", "meant", "span"),
    [
        ("make [[the red car]] blue", "", "make the red car blue", [(5, 16)]),
        ("make the red car blue", "red car", "make the red car blue", [(9, 16)]),
        ("[[ red]] car [[blue ]]", "", "red car blue", [(0, 3), (8, 12)]),
        (r"write \[[ on it", "", "write [[ on it", []),
    ],
)
def test_words_that_say_where_the_edit_is(
    tmp_path: Path, prompt: str, phrase: str, meant: str, span: list[tuple[int, int]]
) -> None:
    values = {"target": "t/1.png", "control": "c/1.png", "prompt": prompt, "phrase": phrase}
    [row], problems = edit(table(tmp_path, "a.jsonl", json.dumps(values)))
    assert problems == []
    assert (row.prompt, row.phrase) == (meant, tuple(span))


@pytest.mark.parametrize(
    ("prompt", "phrase", "what"),
    [
        ("make [[the car blue", "", "t/1: [[ without ]]"),
        ("make the car blue", "the bus", "t/1: the phrase 'the bus' is not in the prompt"),
        ("a car beside a car", "a car", "t/1: the phrase 'a car' is in the prompt 2 times"),
        ("make [[the car]] blue", "car", "t/1: words are marked and a phrase is given too"),
    ],
)
def test_words_that_cannot_be_found_are_a_problem_of_their_row(
    tmp_path: Path, prompt: str, phrase: str, what: str
) -> None:
    values = {"target": "t/1.png", "control": "c/1.png", "prompt": prompt, "phrase": phrase}
    rows, [problem] = edit(table(tmp_path, "a.jsonl", json.dumps(values)))
    assert rows == []
    assert what in problem.what


@pytest.mark.parametrize(
    ("written", "there"),
    [
        ("sub\\dog.png", "sub/dog.png"),
        ("C:\\data\\dog.png", "dog.png"),
        ("red%20x.png", "red x.png"),
        ("caf\u00e9.png", "cafe\u0301.png"),
        ("Sub/CAT.PNG", "sub/cat.png"),
        ("cat.jpg", "cat.png"),
        ("photo_1.png", "photo_001.png"),
    ],
)
def test_a_table_that_nearly_names_a_file_is_told_which(tmp_path: Path, written: str, there: str) -> None:
    rows = [{"image": written, "prompt": "red"}, {"image": "other.png", "prompt": "red"}]
    fill(tmp_path, {"t.jsonl": "\n".join(map(json.dumps, rows)), there: "", "unlike.png": ""})
    _, (near, far) = read_source(tmp_path / "t.jsonl", needs_control=False)
    assert near.what.endswith(f"does not exist; did you mean {str(tmp_path / there)!r}?")
    assert far.what.endswith("does not exist")


def test_captions_of_another_ending_are_named(tmp_path: Path) -> None:
    fill(tmp_path, ["a.png", "a.caption", "b.png", "b.caption"])
    problem = only(read_source(tmp_path, needs_control=False)[1])
    assert "found a.caption, b.caption" in problem.what
    assert problem.do == "rename them: a.txt"
    fill(tmp_path, ["c.png"])
    (tmp_path / "b.txt").write_text("red")
    first, second = read_source(tmp_path, needs_control=False)[1]
    assert (first.what, first.do) == ("the prompt a.txt is missing; a.caption is there", "rename it to a.txt")
    assert second.what == "the prompt c.txt is missing"


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.csv", 'image;control;prompt\nt/1.png;c/1.png;"one; two, ""three"""\n', "semicolons"),
        ("b.csv", '"image";"control";"prompt"\n"t/1.png";"c/1.png";"one; two, ""three"""\n', "semicolons"),
        ("c.csv", 'image\tcontrol\tprompt\r\nt/1.png\tc/1.png\t"one; two, ""three"""\r\n', "tabs"),
        ("d.tsv", 'image\tcontrol\tprompt\nt/1.png\tc/1.png\t"one; two, ""three"""\n', ""),
        ("e.csv", 'image,control,prompt\nt/1.png,c/1.png,"one; two, ""three"""\n', ""),
    ],
)
def test_a_csv_may_have_semicolons_or_tabs(tmp_path: Path, name: str, text: str, word: str) -> None:
    path = table(tmp_path, name, text)
    content = source.read_content(path, needs_control=True)
    [row] = content.rows
    assert (row.prompt, len(row.controls), row.where) == ('one; two, "three"', 1, f"{path}:2")
    assert [notice.what for notice in content.notices] == [
        f"rows of a .csv have their cells separated by {word}, not commas"
    ] * bool(word)
    with path.open("a", encoding="utf-8") as file:
        file.write("t/1.png\n")
    assert "has 1 cells, expected 3" in only(edit(path)[1]).what


ADVICE = {
    "a typo": ("target,contol,prompt", {}, 1),
    "two targets": ("edited_image,output_image,control,prompt", {}, 1),
    "one name twice": ("target,prompt,prompt", {}, 0),
    "unknown names": ("bild;vorher;text", {"target": "bild", "control": "vorher", "prompt": "text"}, 1),
    "two controls": ("target,source_img,edit_image,prompt", {}, 2),
    "a name that is not there": ("Edited,before,text", {"target": "Edited"}, 1),
}
"""A first line, the columns that only their owner knows, and the number of controls."""


@pytest.mark.parametrize("case", ADVICE)
def test_the_advice_about_a_table_leads_to_its_rows(tmp_path: Path, case: str) -> None:
    """After at most three of the commands that are printed, without losing a control."""
    names, known, controls = ADVICE[case]
    cells = re.split("[,;]", names)
    row = [f"{name}.png" if i < len(cells) - 1 else "red" for i, name in enumerate(cells)]
    if case == "one name twice":
        row = ["target.png", "red", "red"]
    fill(tmp_path, [f"{name}.png" for name in cells])
    delimiter, columns = names.strip("abcdefghijklmnopqrstuvwxyz_E")[0], dict[str, Any]()
    for _ in range(4):
        path = tmp_path / "t.csv"
        path.write_text(delimiter.join(cells) + "\n" + delimiter.join(row) + "\n", encoding="utf-8")
        try:
            settings = ColumnsConfig(**columns)
            [found], problems = read_source(path, needs_control=controls > 0, takes_control=True, columns=settings)
            break
        except SourceError as error:
            advice = str(error.do)
        options = [each for each in shlex.split(advice.replace(";", " ")) if each.startswith("data.columns.")]
        if options:
            role, _, value = options[-1].removeprefix("data.columns.").partition("=")
            columns[role] = yaml.safe_load(known.get(role, "?") if value == "NAME" else value)
            if columns[role] != "?":
                continue
            del columns[role]
        if renamed := re.search(r"rename it to '(\w+)'", advice):
            cells = [renamed[1] if each == "contol" else each for each in cells]
        else:
            assert advice == "rename or remove one of them"
            cells[-1] = "other"
    assert (len(found.controls), found.prompt, problems) == (controls, "red", [])


PUBLISHED = {
    "InstructPix2Pix": ("original_prompt", "original_image", "edit_prompt", "edited_prompt", "edited_image"),
    "MagicBrush": ("img_id", "turn_index", "source_img", "mask_img", "instruction", "target_img"),
    "HQ-Edit": ("input", "input_image", "edit", "inverse_edit", "output", "output_image"),
    "UltraEdit": ("source_image", "edited_image", "mask_image", "edit_prompt", "source_caption", "target_caption"),
    "OmniEdit": ("omni_edit_id", "task", "src_img", "edited_img", "edited_prompt_list", "width", "sc_score_1"),
    "imagefolder": ("edited_file_name", "original_file_name", "text"),
    "imagefolder, generic": ("output_file_name", "source_file_name", "text"),
    "before and after": ("Before", "After", "caption"),
    "generic": ("input", "output", "instruction"),
    "of unknown origin": ("edited", "original", "text", "source_dataset"),
}
"""Published datasets of edits, as far as known here without the hub, and common names."""
ROLES = {
    "target": ("edited_image", "target_img", "output_image", "edited_img", "edited_file_name", "output_file_name"),
    "control": ("original_image", "source_img", "input_image", "source_image", "src_img", "original_file_name"),
    "prompt": ("edit_prompt", "instruction", "edit", "edited_prompt_list", "text", "caption"),
}
MORE_ROLES = {"target": ("After", "output", "edited"), "control": ("source_file_name", "Before", "input", "original")}


@pytest.mark.parametrize("dataset", PUBLISHED)
def test_columns_of_published_datasets_are_recognised(tmp_path: Path, dataset: str) -> None:
    columns = PUBLISHED[dataset]

    def column(role: str) -> str:
        return next(name for name in (*ROLES[role], *MORE_ROLES.get(role, ())) if name in columns)

    values: dict[str, Any] = dict.fromkeys(columns, "other")
    prompt = column("prompt")
    values |= {column("target"): "t/1.png", column("control"): "c/1.png"}
    values |= {prompt: ["red"] if prompt.endswith("list") else "red"}
    values |= {name: "m/1.png" for name in columns if name.startswith("mask")}
    [row], problems = edit(table(tmp_path, "a.jsonl", json.dumps(values)))
    assert problems == []
    assert (row.name, paths(*row.controls), row.prompt) == ("t/1", [tmp_path / "c/1.png"], "red")
    assert (row.mask is not None) == any("mask" in name for name in columns)


@pytest.mark.parametrize(
    ("columns", "controls"),
    [
        (["image", "source", "text"], 0),  # where the image is from
        (["edited_image", "source", "text"], 1),
        (["image", "before", "text"], 1),
        (["output", "input", "text"], 1),
    ],
)
def test_a_generic_name_is_a_control_where_the_target_is_an_edit(
    tmp_path: Path, columns: list[str], controls: int
) -> None:
    """For a model that takes a control or none: no edit becomes text to image, and no origin a control."""
    other = "c/1.png" if controls else "a museum"
    path = table(tmp_path, "a.csv", f"{','.join(columns)}\nt/1.png,{other},red\n")
    [row], problems = read_source(path, needs_control=False, takes_control=True)
    assert (len(row.controls), problems) == (controls, [])


def test_columns_are_named(tmp_path: Path) -> None:
    columns = ["image", "output_picture", "ref 2", "source_image", "maske", "was", "wo", "control"]
    values = ["c/1.png", "t/1.png", "c/2.png", "c/3.png", "m/1.png", ["red", "make it\r\nblue"], "re", "c/1.png"]
    path = table(tmp_path, "a.jsonl", json.dumps(dict(zip(columns, values, strict=True))))
    named = {"target": "output_picture", "control": ["source_image", "ref 2"], "mask": "maske", "prompt": "was"}
    rows, problems = read_source(path, needs_control=True, columns=ColumnsConfig(**named))  # type: ignore[arg-type]
    assert problems == []
    assert [row.prompt for row in rows] == ["red", "make it\nblue"]
    expected = [tmp_path / name for name in ("t/1.png", "c/3.png", "c/2.png", "m/1.png")]
    assert paths(rows[0].target, *rows[0].controls, rows[0].mask) == expected
    named |= {"control": "source_image", "phrase": "wo"}
    rows, problems = read_source(path, needs_control=True, columns=ColumnsConfig.model_validate(named))
    assert only(problems).what == "t/1#2: the phrase 're' is not in the prompt (found 'make it\\nblue')"
    rows, _ = read_source(
        path, needs_control=False, columns=ColumnsConfig.model_validate(named | {"control": [], "phrase": None})
    )
    assert rows[0].controls == ()


WRONG_COLUMNS = {
    "a typo": (
        {"target": "output_pictrue"},
        "data.columns.target names the column 'output_pictrue', which does not exist (found 'photo', "
        "'output_picture', 'edit 1', 'edit 2 ', 'edit', 'source', 'input', 'prompt')\n"
        "  → did you mean 'output_picture'? --set data.columns.target=output_picture",
    ),
    "capitals": ({"target": "Photo"}, "did you mean 'photo'? --set data.columns.target=photo"),
    "nothing like it": ({"target": "xyz"}, "name one of these columns"),
    "a space at its end": ({"target": "edit  2"}, """did you mean 'edit 2 '? --set 'data.columns.target="edit 2 "'"""),
    "two roles": (
        {"target": "photo", "control": ["photo"]},
        "names the column 'photo' twice, for the target and for the control",
    ),
    "no target": ({}, "no column holds the target (expected path_target or target"),
    "where it might be": ({}, "or name it: --set data.columns.target="),
    "two controls": (
        {"target": "photo"},
        "two columns hold the same control: 'source' and 'input' (expected one)\n  → name the right one: --set "
        "data.columns.control=source or --set data.columns.control=input; or both in their order: "
        """--set 'data.columns.control=["source", "input"]'""",
    ),
}


@pytest.mark.parametrize("case", WRONG_COLUMNS)
def test_columns_that_are_not_clear_are_refused(tmp_path: Path, case: str) -> None:
    columns, expected = WRONG_COLUMNS[case]
    path = table(tmp_path, "a.csv", "photo,output_picture,edit 1,edit 2 ,edit,source,input,prompt\na,b,c,c,d,e,f,g\n")
    with pytest.raises(SourceError) as caught:
        read_source(path, needs_control=True, columns=ColumnsConfig.model_validate(columns))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("files", "options", "expected"),
    [
        (["a.png", "a.txt"], {"split": "train"}, "there is no split 'train' (expected one, found none)"),
        (["a.png", "a.txt"], {"config_name": "x"}, "only a dataset on the hub has configurations (expected hf://"),
        (["t.csv"], {"split": "train"}, "t.csv: a file has no splits (found train)\n  → leave out data.split"),
    ],
)
def test_settings_that_a_source_does_not_have_are_refused(
    tmp_path: Path, files: list[str], options: dict[str, str], expected: str
) -> None:
    fill(tmp_path, files)
    with pytest.raises(SourceError) as caught:
        read_source(tmp_path / files[0] if files[0] == "t.csv" else tmp_path, needs_control=False, **options)  # type: ignore[arg-type]
    assert expected in str(caught.value)


def test_a_folder_stands_for_its_metadata_table(tmp_path: Path) -> None:
    fill(tmp_path, ["images/1.png"])
    path = fill(tmp_path, {"metadata.jsonl": '{"file_name": "images/1.png", "text": "a cat"}\n'}) / "metadata.jsonl"
    rows, problems = read_source(tmp_path, needs_control=False)
    assert problems == []
    assert rows == [Row("images/1", f"{path}:1", File(tmp_path / "images/1.png"), (), None, "a cat")]


@pytest.mark.parametrize("source", ["tables", "tables/metadata.csv", "./tables/metadata.csv"])
def test_paths_in_a_table_begin_at_its_folder_however_the_table_is_named(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ["1.png", "images/2.png", str(tmp_path / "tables/3.png"), (tmp_path / "4.png").as_uri()]
    text = "\n".join(["image,prompt", *(f"{target},red" for target in targets)])
    fill(tmp_path / "tables", {"metadata.csv": text, "1.png": "", "images/2.png": "", "3.png": "", "../4.png": ""})
    monkeypatch.chdir(tmp_path)
    rows, problems = read_source(Path(source), needs_control=False)
    assert problems == []
    absolute = [tmp_path / "tables/3.png", tmp_path / "4.png"]
    assert paths(*(row.target for row in rows)) == [Path("tables/1.png"), Path("tables/images/2.png"), *absolute]


def test_a_json_line_may_hold_a_unicode_line_separator(tmp_path: Path) -> None:
    line = '{"image": "t/1.png", "control": "c/1.png", "prompt": "one\u2028two"}'
    [row], problems = edit(table(tmp_path, "a.jsonl", f"\n{line}\r\n\n"))
    assert row.prompt == "one\u2028two"
    assert row.where.endswith("a.jsonl:2")
    assert problems == []


def test_names_are_unique_and_do_not_depend_on_other_targets(tmp_path: Path) -> None:
    def names_of(targets: list[str]) -> list[str]:
        fill(tmp_path, targets)
        lines = "".join(f"{target},red\n" for target in targets)
        rows, problems = read_source(fill(tmp_path, {"a.csv": "image,prompt\n" + lines}) / "a.csv", needs_control=False)
        assert problems == []
        return names(rows)

    assert names_of(["b.png", "a.png", "b.png", "b.png", "x/b.png"]) == ["b", "a", "b#2", "b#3", "x/b"]
    assert names_of(["b.png", "b.png", "x/b.png"]) == ["b", "b#2", "x/b"]
    awkward = names_of(["a.png", "a.png", "a#2.png", "a.jpg", "../" + tmp_path.name + "/a.png"])
    assert awkward[:2] == ["a", "a#2"]
    assert len(set(awkward)) == 5


def test_the_row_with_a_missing_file_is_named_and_no_later_row_shifts(tmp_path: Path) -> None:
    text = "path_target,path_control,prompt\nt/1.png,c/absent.png,one\nt/10.png,c/2.png,two\n"
    path = table(tmp_path, "a.csv", text)
    rows, problems = edit(path)
    assert [(row.name, row.controls, row.prompt) for row in rows] == [("t/10", (File(tmp_path / "c/2.png"),), "two")]
    problem = only(problems)
    assert problem.where == f"{path}:2"
    assert problem.what == f"the control {tmp_path / 'c/absent.png'} does not exist"
    assert "starts at the table's folder" in problem.do


BROKEN_ROWS = {
    "no target": ("a.csv", ",c/1.png,red,", "the target 'image' is empty"),
    "no control": ("a.csv", "t/1.png,,red,", "the target has no control"),
    "no prompt": ("a.csv", "t/1.png,c/1.png, ,", "the prompt is empty"),
    "missing target": ("a.csv", "absent.png,c/1.png,red,", "absent.png does not exist"),
    "missing mask": ("a.csv", "t/1.png,c/1.png,red,absent.png", "absent.png does not exist"),
    "a folder as target": ("a.csv", "t,c/1.png,red,", "/t does not exist"),
    "prompt where a path belongs": ("a.csv", f"{'long ' * 80},c/1.png,red,", "does not exist"),
    "unquoted comma": ("a.csv", "t/1.png,c/1.png,red, and blue,", "has 5 cells, expected 4"),
    "too few cells": ("a.csv", "t/1.png,c/1.png,red", "has 3 cells, expected 4"),
    "a gap in a list": (
        "a.jsonl",
        {"control": ["c/1.png", None, "c/3.png"]},
        "control 2 is empty, but a later one is c/3",
    ),
    "an empty list": ("a.jsonl", {"control": []}, "the target has no control"),
    "a prompt that is no text": ("a.jsonl", {"prompt": ["red"]}, "'prompt' is ['red'], expected text"),
    "a control that is no text": ("a.jsonl", {"control": 3}, "'control' is 3, expected text"),
    "two targets": ("a.jsonl", {"image": ["t/1.png", "t/10.png"]}, "'image' is ['t/1.png', 't/10.png'], expected text"),
    "half an emoji": ("a.jsonl", {"prompt": "smile \ud83d"}, "'prompt' is 'smile \\ud83d', expected text"),
    "null": ("a.jsonl", {"prompt": None}, "the prompt is empty"),
}


@pytest.mark.parametrize("case", BROKEN_ROWS)
def test_what_is_wrong_with_a_row_is_told_and_the_others_are_kept(tmp_path: Path, case: str) -> None:
    name, broken, expected = BROKEN_ROWS[case]
    if isinstance(broken, dict):
        good = {"image": "t/1.png", "control": "c/1.png", "prompt": "red"}
        text = f"{json.dumps(good)}\n{json.dumps(good | broken)}\n{json.dumps(good)}\n"
        line, kept = 2, 2
    else:
        text = f"image,control,prompt,mask\n{broken}\n\n , , , \nt/10.png,c/1.png,red,\n"
        line, kept = 2, 1
    path = table(tmp_path, name, text)
    rows, problems = edit(path)
    assert len(rows) == kept
    problem = only(problems)
    assert problem.where == f"{path}:{line}"
    assert expected in problem.what


def test_a_gap_in_a_rows_controls_is_told(tmp_path: Path) -> None:
    text = "image,control,control_1,control_2,prompt\nt/1.png,c/1.png,,c/3.png,red\nt/10.png,c/1.png,c/2.png,,red\n"
    rows, problems = edit(table(tmp_path, "a.csv", text))
    assert [len(row.controls) for row in rows] == [2]
    assert only(problems).what == "control 2 is empty, but a later one is c/3.png"


REFUSED_TABLES = {
    "no target": (
        "a.csv",
        "path_taget,control,prompt\na,b,c\n",
        "no column holds the target",
        "'path_taget' to 'path_target'",
    ),
    "no prompt": ("a.csv", "image,control,promt\na,b,c\n", "expected prompt or text or caption", "'promt' to 'prompt'"),
    "no control": ("a.csv", "image,prompt\na,b\n", "no column holds the control", "found 'image', 'prompt'"),
    "typo in a control": (
        "a.csv",
        "image,control,contol_1,prompt\na,b,c,d\n",
        "'contol_1' is unknown",
        "resembles 'control_1'",
    ),
    "typo in a mask": ("a.csv", "image,control,maks,prompt\na,b,c,d\n", "'maks' is unknown", "resembles 'mask'"),
    "another mask": ("a.csv", "image,control,mask_file,prompt\na,b,c,d\n", "'mask_file' is unknown", "rename it"),
    "two masks": ("a.csv", "image,control,mask_1,prompt\na,b,c,d\n", "'mask_1' is unknown", "rename it"),
    "twins": (
        "a.csv",
        "image,target,control,prompt\na,b,c,d\n",
        "the same target: 'image' and 'target'",
        "expected one",
    ),
    "twin controls": (
        "a.csv",
        "image,control,control_0,prompt\na,b,c,d\n",
        "'control' and 'control_0'",
        "expected one",
    ),
    "repeated column": ("a.csv", "image,control,prompt,prompt\na,b,c,d\n", "'prompt' and 'prompt'", "expected one"),
    "gap": (
        "a.csv",
        "image,control,control_2,prompt\na,b,c,d\n",
        "the control columns have a gap",
        "found 'control', 'control_2'",
    ),
    "late start": ("a.csv", "image,control_2,prompt\na,b,d\n", "the control columns have a gap", "found 'control_2'"),
    "header only": ("a.csv", "image,control,prompt\n", "has no rows", "one row per sample"),
    "nothing": ("a.csv", "", "has no rows", "one row per sample"),
    "no lines": ("a.jsonl", "\n", "has no rows", "one row per sample"),
    "empty list": ("a.json", "[]", "has no rows", "one row per sample"),
    "open quote": (
        "a.csv",
        'image,control,prompt\na,b,c\na,b,"c\nd,e,f\n',
        "a.csv:3: the table cannot be read",
        "close",
    ),
    "stray quote": ("a.csv", 'image,control,prompt\na,b,"say" it\n', "a.csv:2: the table cannot be read", "twice"),
    "not UTF-8": ("a.csv", b"image,control,prompt\na,b,ok\na,b,caf\xe9\n", "a.csv:3: the table is not UTF-8", "xe9"),
    "no JSON": ("a.jsonl", '{"image": "a"}\n{"image" "b"}\n', "a.jsonl:2: this is not JSON", "at column 10"),
    "no JSON either": ("a.json", '[\n{"image": "a"},\n{"image" "b"}]', "a.json:3: this is not JSON", "Expecting ':'"),
    "no list": ("a.json", '{"image": "a"}', "this is not a table", "found dict"),
    "deep": ("a.jsonl", "[" * 100_000 + "]" * 100_000, "a.jsonl:1: this is not JSON", "nested more than 100 deep"),
    "deep in a value": (
        "a.json",
        f'[{{"image": {"[" * 200}{"]" * 200}}}]',
        "a.json: this is not JSON",
        "nested more than 100 deep",
    ),
    "a long integer": ("a.jsonl", f'{{"image": {"9" * 5000}}}', "a.jsonl:1: this is not JSON", "4300 digits"),
    "a key twice, and no JSON": ("a.json", '[{"image": 1, "image": 2}, {]', "a.json:1: this is not JSON", "column 29"),
    "a key twice, and no list": ("a.json", '{"image": 1, "image": 2}', "this is not a table", "found dict"),
    "no object": ("a.jsonl", '["a", "b"]\n', "a.jsonl:1: this is not a sample", "found ['a', 'b']"),
}


@pytest.mark.parametrize("case", REFUSED_TABLES)
def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path, case: str) -> None:
    name, text, *expected = REFUSED_TABLES[case]
    message = refusal(table(tmp_path, name, text))
    for part in expected:
        assert part in message


@pytest.mark.parametrize(("name", "frame"), [("a.jsonl", "{}\n{}\n{}"), ("a.json", "[{},\n {}, {} ]\n")])
def test_a_key_that_is_there_twice_is_a_problem_of_its_row(tmp_path: Path, name: str, frame: str) -> None:
    """Treated like two columns of one name: neither value is dropped, and the other rows are used."""
    good = '{"image": "t/1.png", "control": "c/1.png", "prompt": "red"}'
    twice = '{"image": "t/10.png", "control": "c/1.png", "control": "c/2.png", "prompt": "blue"}'
    inside = '{"image": "t/10.png", "control": "c/1.png", "prompt": "blue", "task": {"é": 1, "é": 2}}'
    path = table(tmp_path, name, frame.format(twice, good, inside))
    rows, problems = edit(path)
    assert (names(rows), [row.prompt for row in rows]) == (["t/1"], ["red"])
    places = [f"{path}:1", f"{path}:3"] if name == "a.jsonl" else [f"{path}[0]", f"{path}[2]"]
    assert [(problem.where, problem.what) for problem in problems] == [
        (places[0], 'the key "control" is there twice'),
        (places[1], 'the key "é" is there twice'),
    ]
    assert problems[0].do == 'keep one of them, or write a list: "control": […, …]'
    rows, problems = edit(table(tmp_path, name, frame.format(twice, twice, twice)))
    assert rows == []
    assert only(problems).what == 'all 3 samples: the key "control" is there twice'


def test_other_columns_are_ignored(tmp_path: Path) -> None:
    extra = [
        "id",
        "",
        "score",
        "width",
        "task",
        "image_id",
        "image_url",
        "caption_zh",
        "prompt_id",
        "split",
        "source_id",
    ]
    text = f"image,control,prompt,{','.join(extra)}\nt/1.png,c/1.png,red{',x' * len(extra)}\n"
    rows, problems = edit(table(tmp_path, "a.csv", text))
    assert (names(rows), problems) == (["t/1"], [])


def test_reading_sources_and_images_imports_no_torch() -> None:
    code = (
        "import sys, qwen_cache.sources.detect, qwen_cache.sources.images; "
        "print([name for name in ('torch', 'diffusers', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
