"""Rows left out are neither rows nor problems, in tables and folders of images; a build drops their samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen_cache import open_cache
from qwen_cache.errors import Problem, SourceError
from qwen_cache.sources.detect import Row, read_content, read_source
from qwen_cache.sources.left_out import changed_list, lines_of

from .support.caches import build, plan
from .support.fake_lanes import FakeLanes

YES = ["true", "TRUE", "1", "yes", " Yes ", "x", "X"]
NO = ["", "false", "False", "0", "no", "NO"]
TARGETS = ["a", "b", "sub/c"]


def read(source: Path) -> tuple[list[Row], list[Problem]]:
    return read_source(source, needs_control=False)


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def images(folder: Path) -> Path:
    """Targets with prompts, beside where left_out.txt is."""
    for name in TARGETS:
        path = folder / "target_images" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.with_suffix(".txt").write_text("red")
    return folder


# ---- a table ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl", "json", "parquet"])
def test_a_column_leaves_rows_out(tmp_path: Path, kind: str) -> None:
    values = [*YES, *NO]
    records = [{"image": f"{i}.png", "prompt": "red", " Left_Out": value} for i, value in enumerate(values)]
    if kind.startswith("json"):
        others = [(True, True), (1, True), (1.0, True), (False, False), (0, False), (None, False)]
        records += [
            {"image": f"{len(values) + i}.png", "prompt": "red", " Left_Out": value}
            for i, (value, _) in enumerate(others)
        ]
        values += ["x" if is_out else "" for _, is_out in others]
        records.append({"image": f"{len(values)}.png", "prompt": "red"})
        values.append("")
    for number in range(len(values)):
        (tmp_path / f"{number}.png").touch()
    path = tmp_path / f"t.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    elif kind == "csv":
        path.write_text("\n".join(["image,prompt, Left_Out", *(",".join(each.values()) for each in records)]))
    else:
        path.write_text(json.dumps(records) if kind == "json" else "\n".join(map(json.dumps, records)))
    rows, problems = read(path)
    assert problems == []
    assert names(rows) == [str(number) for number, value in enumerate(values) if value not in YES]
    assert read_content(path, needs_control=False).left_out == sum(value in YES for value in values)


def test_a_wrong_value_is_a_problem_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    path = tmp_path / "t.csv"
    path.write_text("image,prompt,left_out\na.png,red,maybe\na.png,red,\n")
    rows, [problem] = read(path)
    assert len(rows) == 1
    assert problem == Problem(
        f"{path}:2",
        "'left_out' is 'maybe', expected true, 1, yes, x, or false, 0, no or nothing",
        "correct it, or leave it empty",
    )


def test_a_row_left_out_keeps_its_name_and_hides_its_problems(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    path = tmp_path / "t.csv"
    path.write_text("image,prompt,left_out\na.png,red,x\na.png,blue,\nmissing.png,,x\n,,x\n")
    rows, problems = read(path)
    assert (names(rows), problems) == (["a#2"], [])
    path.write_text("image,prompt,left_out\na.png,,x\na.png,,\na.png,,\n")
    _, [problem] = read(path)
    assert problem.what == "all 2 samples: the prompt is empty", "of the rows that are not left out"


def test_two_such_columns_or_one_in_another_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("image,prompt,left_out,LEFT_OUT\na.png,red,,\n")
    with pytest.raises(SourceError, match="two columns hold the same left_out") as error:
        read(path)
    assert error.value.do == "rename or remove one of them"
    folder = tmp_path / "parts"
    folder.mkdir()
    record = {"image": "a.png", "prompt": "red"}
    pq.write_table(pa.Table.from_pylist([record]), folder / "0.parquet")
    pq.write_table(pa.Table.from_pylist([record | {"left_out": True}]), folder / "1.parquet")
    with pytest.raises(SourceError, match="the columns differ between files"):
        read(folder)


def test_a_source_of_rows_left_out_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("image,prompt,left_out\na.png,red,x\na.png,blue,x\n")
    with pytest.raises(SourceError, match=r"every row of this source is left out \(found 2\)"):
        read(path)


# ---- a folder of images ----------------------------------------------------------------------------------------------


def test_a_list_leaves_targets_out(tmp_path: Path) -> None:
    images(tmp_path)
    (tmp_path / "left_out.txt").write_bytes(b"\xef\xbb\xbf# blurred\r\n\r\n  sub/c \r\na\r\na")
    rows, problems = read(tmp_path)
    assert (names(rows), problems) == (["b"], [])
    assert read_content(tmp_path, needs_control=False).left_out == 2


def test_a_line_that_names_nothing_is_a_problem(tmp_path: Path) -> None:
    images(tmp_path)
    path = tmp_path / "left_out.txt"
    path.write_text('a\nnix\nb.png\n"b\n')
    rows, problems = read(tmp_path)
    assert names(rows) == ["b", "sub/c"]
    assert problems == [
        Problem(f"{path}:2", "there is no target 'nix' to leave out", "correct the name, or remove the line"),
        Problem(f"{path}:3", "there is no target 'b.png' to leave out", "write b, without the extension"),
        Problem(
            f"{path}:4",
            "the double quote is not closed",
            "write the name as a string of JSON, or without double quotes",
        ),
    ]


def test_what_is_missing_from_all_others_is_one_problem(tmp_path: Path) -> None:
    images(tmp_path)
    for name in ("b", "sub/c"):
        (tmp_path / "target_images" / f"{name}.txt").unlink()
    (tmp_path / "left_out.txt").write_text("a\n")
    _, [problem] = read(tmp_path)
    assert problem.what.startswith("none of the 2 targets has a prompt (expected b.txt for b.png, found a.txt")
    (tmp_path / "left_out.txt").write_text("b\nsub/c\n")
    rows, problems = read(tmp_path)
    assert (names(rows), problems) == (["a"], [])


def test_the_list_is_no_prompt_of_a_flat_folder(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").touch()
        (tmp_path / f"{name}.txt").write_text("red")
    (tmp_path / "left_out.txt").write_text("a")
    assert (names(read(tmp_path)[0]), read(tmp_path)[1]) == (["b"], [])
    (tmp_path / "left_out.png").touch()
    with pytest.raises(SourceError, match="both the list of the targets left out and the prompt of 'left_out'"):
        read(tmp_path)


def test_a_list_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "left_out.txt").write_text("a")
    (tmp_path / "metadata.csv").write_text("image,prompt\na.png,red\n")
    with pytest.raises(SourceError, match="only a folder of images has such a list") as error:
        read(tmp_path)
    assert error.value.do == "use a column left_out, and remove the list"
    (tmp_path / "metadata.csv").unlink()
    images(tmp_path)
    (tmp_path / "left_out.txt").write_bytes(b"\xff")
    with pytest.raises(SourceError, match="the list is not UTF-8 text"):
        read(tmp_path)


HOSTILE = ["a", "# b", '"c"', " d ", "e\nf", "g\u2028h", "\udcff", "ä\u0301/ß", "x\r", "\\"]


@pytest.mark.parametrize("text", ["", "# kept\r\nz\r\n", "z", "\n\n# é\n"])
def test_any_name_can_be_listed_and_taken_off_again(text: str) -> None:
    before = [line.name for line in lines_of(text)]
    listed = changed_list(text, HOSTILE, is_left_out=True)
    listed.encode()
    assert listed.startswith(text)
    assert [line.name for line in lines_of(listed)] == before + HOSTILE
    assert changed_list(listed, HOSTILE, is_left_out=True) == listed
    assert changed_list(listed, HOSTILE, is_left_out=False) == (
        text if text.endswith("\n") or not text else f"{text}\n"
    )


# ---- a build ---------------------------------------------------------------------------------------------------------


def test_a_build_drops_what_is_left_out_and_takes_it_in_again(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes]
) -> None:
    model, out, listed = tiny_model("edit-plus"), tmp_path / "shards", pairs / "left_out.txt"
    assert build(pairs, out, model).code == 0
    listed.write_text("cat\ncup\n")
    found = plan(pairs, out, model)
    assert (found["left_out"], found["removed"], found["cached"], found["problems"]) == (2, ["cat", "cup"], 2, [])
    for number in ("1/2", "2/2"):
        result = build(pairs, out, model, "--slice", number)
        assert (result.code, "2 rows of the source left out" in result.stderr) == (0, True)
    assert [row.name for row in open_cache(out).rows()] == ["china", "flower"]
    listed.unlink()
    found = plan(pairs, out, model)
    assert (found["left_out"], found["to_copy"] + found["to_encode"], found["cached"]) == (0, 2, 2)
