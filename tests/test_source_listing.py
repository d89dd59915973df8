"""A listing has every row as it stands in the source, and exactly the rows and problems that `read_source` reports."""

from __future__ import annotations

import json
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from qwen_cache.errors import Problem
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.detect import Listing, list_source, read_source


def listed(source: Path) -> Listing:
    return list_source(source, needs_control=False, takes_control=True, no_control="stated")


def folder(path: Path) -> Path:
    """A row without fault, one left out, a missing control, a misnamed prompt, and files of no target."""
    for name in ("good", "out", "bare", "horizon"):
        (path / "target_images").mkdir(parents=True, exist_ok=True)
        (path / "target_images" / f"{name}.png").touch()
        prompt = "horizno" if name == "horizon" else name
        (path / "target_images" / f"{prompt}.txt").write_text(f" [[{name}]] \r\nred\n")
    (path / "control_images").mkdir()
    for name in ("good", "horizon", "good_mask", "good_control_1", "stray"):
        (path / "control_images" / f"{name}.png").touch()
    (path / "left_out.txt").write_text("out\nnix\n")
    return path


def unprompted(path: Path) -> Path:
    """Images alone: one problem for all."""
    path.mkdir(parents=True)
    for name in ("a", "b", "left_out"):
        (path / f"{name}.png").touch()
    return path


def table(path: Path) -> Path:
    """Several captions, a phrase that is not there, an empty target, an image that is not there, a row left out."""
    path.mkdir(parents=True)
    (path / "a.png").touch()
    records = [
        {"image": "a.png", "prompts": ["[[red]]", "blue"]},
        {"image": "a.png", "prompts": ["green", ""], "phrase": "nix"},
        {"image": "", "prompts": ["lost"]},
        {"image": "b.png", "prompts": "no list", "left_out": 2},
        {"image": "b.png", "prompts": "no list", "left_out": 1},
    ]
    (path / "t.jsonl").write_text("\n".join(map(json.dumps, records)))
    return path / "t.jsonl"


def uncut(path: Path) -> Path:
    """A row with a cell too many; in all others the same is wrong."""
    path.mkdir(parents=True)
    (path / "t.csv").write_text("image,prompt\n,red\n,blue\n")
    return path / "t.csv"


def tar(path: Path) -> Path:
    path.mkdir(parents=True)
    with tarfile.open(path / "t.tar", "w") as archive:
        for name in ("a.png", "a.txt", "b.png"):
            member = tarfile.TarInfo(name)
            member.size = 3
            archive.addfile(member, BytesIO(b"red"))
    return path / "t.tar"


@pytest.mark.parametrize("make", [folder, unprompted, table, uncut, tar])
def test_a_listing_has_the_rows_and_problems_of_the_source(tmp_path: Path, make: object) -> None:
    source = make(tmp_path / "s")  # type: ignore[operator]
    rows, problems = read_source(source, needs_control=False, takes_control=True, no_control="stated")
    listing = listed(source)
    usable = [entry for entry in listing.entries if not entry.problems and not entry.is_left_out]
    assert [row.name for row in rows] == [name for entry in usable for name in entry.names]
    assert [(row.where, row.target, row.controls, row.mask) for row in rows] == [
        (entry.where, entry.target, entry.controls, entry.mask) for entry in usable for _ in entry.names
    ]
    assert list(listing.problems) == problems
    own = {problem for entry in listing.entries for problem in entry.problems}
    assert set(problems) <= own | set(listing.other_problems)
    assert not own & set(listing.other_problems)
    assert all(problem.where == entry.where for entry in usable for problem in entry.problems)
    assert len({entry.where for entry in listing.entries}) == len(listing.entries)


def test_entries_are_as_in_the_source(tmp_path: Path) -> None:
    listing = listed(folder(tmp_path / "f"))
    bare, good, horizon, out = listing.entries
    assert (good.name, good.prompts, good.problems) == ("good", ("[[good]] \nred",), ())
    assert [str(image).rpartition("/")[2] for image in (*good.controls, good.mask)] == [
        *("good.png", "good_control_1.png", "good_mask.png")
    ]
    assert (out.is_left_out, out.problems, out.prompts) == (True, (), ("[[out]] \nred",))
    assert (bare.is_left_out, [problem.what for problem in bare.problems]) == (
        False,
        ["the control control_images/bare.png (or .jpg, …) is missing, found none"],
    )
    assert "did you mean target_images/horizno.txt?" in horizon.problems[0].what
    assert horizon.prompts == ("",)
    assert listing.left_out == 1
    assert [problem.where.rpartition("/")[2] for problem in listing.other_problems] == ["left_out.txt:2", "stray.png"]


def test_rows_of_a_table_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    path = table(tmp_path / "t")
    first, wrong, lost, doubtful, out = listed(path).entries
    assert (first.names, first.prompts, first.problems) == (("a", "a#2"), ("[[red]]", "blue"), ())
    assert (wrong.names, wrong.prompts, wrong.phrase) == (("a#3", "a#4"), ("green", ""), "nix")
    assert [problem.what.partition(" (")[0] for problem in wrong.problems] == [
        "a#3: the phrase 'nix' is not in the prompt",
        "prompt 2 of 2 is empty",
    ]
    assert (lost.prompts, lost.target) == (("lost",), None)
    assert lost.problems == (Problem(f"{path}:3", "the target 'image' is empty", "name an image, or remove the row"),)
    assert (doubtful.is_left_out, len(doubtful.problems)) == (False, 3)
    assert (out.is_left_out, out.problems) == (True, ())


def test_what_all_rows_share_is_one_problem_that_no_entry_has(tmp_path: Path) -> None:
    listing = listed(uncut(tmp_path / "t"))
    assert [problem.what for problem in listing.other_problems] == ["all 2 samples: the target 'image' is empty"]
    assert [len(entry.problems) for entry in listing.entries] == [1, 1]
    listing = listed(unprompted(tmp_path / "u"))
    [problem] = listing.problems
    assert problem.what.startswith("none of the 3 targets has a prompt")
    assert [entry.problems for entry in listing.entries] == [(problem,)] * 3


def test_prompts_are_those_before_any_trigger_word(tmp_path: Path) -> None:
    captions = Captions(trigger_word="sks", prefix="a photo of")
    first = list_source(table(tmp_path / "t"), needs_control=False, captions=captions).entries[0]
    assert first.prompts == ("[[red]]", "blue")
