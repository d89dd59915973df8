"""An edit changes one value of a source and no other byte, keeps the old file, and is refused for a row that changed.

The judges are Python's own csv and json, and a new listing of the source.
"""

from __future__ import annotations

import csv
import io
import json
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from qwen_cache.errors import SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources import old_files as old_versions
from qwen_cache.sources.detect import Entry, SourceSettings, list_source
from qwen_cache.sources.editing import Editor, open_editor
from qwen_cache.sources.old_files import ChangedError
from qwen_cache.sources.rows import MAX_TEXT
from qwen_cache.storage.files import locked
from qwen_cache.storage.remote import location

SETTINGS: SourceSettings = {
    "needs_control": False,
    "takes_control": True,
    "no_control": "allowed",
    "marked_phrases": True,
}
SIZE = (24, 16)


def png(size: tuple[int, int] = SIZE, mode: str = "L", grey: int = 255) -> bytes:
    data = io.BytesIO()
    Image.new(mode, size, grey if mode == "L" else (grey,) * 3).save(data, "PNG")
    return data.getvalue()


def entries(source: Path, **more: Any) -> list[Entry]:
    return list(list_source(source, **{**SETTINGS, **more}).entries)  # type: ignore[typeddict-item]


def editor(source: Path, **more: Any) -> Editor:
    """An editor that keeps old files beside the source."""
    return open_editor(source, kept(source), **{**SETTINGS, **more})  # type: ignore[typeddict-item]


def kept(source: Path) -> Path:
    return source.parent / f"{source.name} kept"


def old_files(source: Path) -> list[tuple[str, bytes]]:
    """The kept files, in order, without the times."""
    files = sorted(path for path in kept(source).rglob("*") if path.is_file())
    return [("/".join(path.relative_to(kept(source)).parts[1:]), path.read_bytes()) for path in files]


def check(source: Path, before: Sequence[Entry], edited: Sequence[Entry], **more: Any) -> None:
    """The source, listed again, has the edited rows as they were returned, and the others as they were."""
    expected = {entry.name: entry for entry in before} | {entry.name: entry for entry in edited}
    assert entries(source, **more) == list(expected.values())


def table(folder: Path, name: str, data: bytes | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for image in ("a.png", "b.png", "c.png"):
        (folder / image).write_bytes(png(mode="RGB"))
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    return folder / name


def images(folder: Path, controls: bool = True) -> Path:
    for name in ("a", "b", "b_mask", "sub/c"):
        for role in ("target_images", "control_images")[: 1 + controls]:
            path = folder / role / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(mode="RGB"))
        (folder / "target_images" / f"{name}.txt").write_text(f"{name} in red\n")
    return folder


TEXTS = [
    "blue",
    "",
    "  with [[marks]] and white space \t",
    "two\nlines, \"quotes\", 'others' and a comma",
    "ends with a backslash \\",
    "\u2028 肖像 🙂 \u0301 \x07",
    '"',
    "x" * 5000,
    "null",
    '{"a": 1}',
    "=1+1",
    "\ufeff",
]


# ---- CSV -------------------------------------------------------------------------------------------------------------

HEADER = "id, image ,prompt,other\r\n"
CSV = {
    "plain": "id,image,prompt,other\n1,a.png,red,\n2,b.png,green,1.0\n3,c.png,blue,x\n",
    "excel": f'{HEADER}1,a.png,"red, ""very""",\r\n"2","b.png","green","1.0"\r\n\r\n3,c.png,"two\nlines",x',
    "semicolons": "id;image;prompt;other\n1;a.png;red;\n2;b.png;green;1,0\n3;c.png;blue;x\n",
    "spaces": '"id","image","prompt","other"\n 1 ,"a.png", red ,""\n2, "b.png","green",\n"3","c.png",,\n',
}


def cells(path: Path, delimiter: str = ",") -> list[list[str]]:
    text = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    return [row for row in csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=True) if row]


@pytest.mark.parametrize("mark", [b"", BOM_UTF8], ids=["no mark", "BOM"])
@pytest.mark.parametrize("kind", CSV)
def test_a_prompt_in_csv(tmp_path: Path, kind: str, mark: bytes) -> None:
    delimiter = ";" if kind == "semicolons" else ","
    for number, text in enumerate([*TEXTS, "one; two"]):
        path = table(tmp_path / str(number), "t.csv", mark + CSV[kind].encode())
        before, data, read = entries(path), path.read_bytes(), cells(path, delimiter)
        edited = editor(path).set_prompt(before[1], text)
        read[2][2] = text
        assert cells(path, delimiter) == read
        start = data.index(b"b.png")
        start += data[start:].index(delimiter.encode()) + 1
        end = data.index(b"green") + 5 + (kind in ("excel", "spaces"))
        assert path.read_bytes().startswith(data[:start])
        assert path.read_bytes().endswith(data[end:])
        assert edited.prompts == (text.strip(),)
        if "\n" not in text:
            check(path, before, [edited])
        assert old_files(path) == [("t.csv", data)]


def test_a_prompt_of_more_lines_moves_the_rows_below(tmp_path: Path) -> None:
    path = table(tmp_path / "t", "t.csv", CSV["plain"])
    before, edits = entries(path), editor(path)
    first = edits.set_prompt(before[0], "purple")
    assert not edits.others_changed
    first = edits.set_prompt(first, "two\nlines")
    assert edits.others_changed
    with pytest.raises(ChangedError):
        edits.set_prompt(before[1], "lost")
    now = entries(path)
    assert now[0] == first
    assert [entry.where for entry in now] == [f"{path}:{line}" for line in (2, 4, 5)]
    edits.set_prompt(now[1], "found")
    assert [row[2] for row in cells(path)] == ["prompt", "two\nlines", "found", "blue"]


def test_lines_of_a_cell_end_as_before(tmp_path: Path) -> None:
    path = table(tmp_path / "t", "t.csv", 'image,prompt\r\na.png,"two\r\nlines"\r\nb.png,one\r\n')
    edits = editor(path)
    for entry in entries(path):
        assert edits.set_prompt(entry, "a\nb").prompts == ("a\nb",)
    assert path.read_bytes() == b'image,prompt\r\na.png,"a\r\nb"\r\nb.png,"a\nb"\r\n'


@pytest.mark.parametrize("kind", CSV)
def test_a_column_is_added_to_csv_once(tmp_path: Path, kind: str) -> None:
    delimiter = ";" if kind == "semicolons" else ","
    path = table(tmp_path / "t", "t.csv", CSV[kind] + ("" if kind == "excel" else f"too{delimiter}short\n"))
    before, read, edits = entries(path), cells(path, delimiter), editor(path)
    edited = edits.set_left_out([before[2], before[0]], True)
    assert [entry.is_left_out for entry in edited] == [True, True]
    expected = [[*row, {0: "left_out", 1: "true", 3: "true"}.get(i, "")] for i, row in enumerate(read)]
    assert cells(path, delimiter) == expected
    check(path, before, edited)
    again = edits.set_left_out([edited[1]], False)
    expected[1][4] = ""
    assert cells(path, delimiter) == expected
    check(path, before, [edited[0], *again])
    assert again == [before[0]]
    data = path.read_bytes()
    assert edits.set_left_out([before[1]], False) == [before[1]]
    assert path.read_bytes() == data
    assert len(old_files(path)) == 2


# ---- JSON ------------------------------------------------------------------------------------------------------------

RECORDS = [
    '{"image": "a.png", "prompt":"red","n":1.50, "big": 12345678901234567890123}',
    ' { "image" :"b.png" , "prompt" : "green" , "other": {"prompt": "not this", "list": [1, 2e3]} }  ',
    '{"prompt": "\\u0062lue", "image": "c.png"}',
]
JSON = {
    "t.jsonl": "\r\n".join(RECORDS),
    "t.json": "[\n " + ",\n ".join(RECORDS) + "\n]\n",
    "lines.jsonl": "\n\n".join(RECORDS) + "\n\n",
    "indented.json": json.dumps([json.loads(each) for each in RECORDS], indent=2),
    "compact.json": json.dumps([json.loads(each) for each in RECORDS], separators=(",", ":")),
}


def values(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    return (
        json.loads(text) if path.suffix == ".json" else [json.loads(each) for each in text.split("\n") if each.strip()]
    )


@pytest.mark.parametrize("mark", [b"", BOM_UTF8], ids=["no mark", "BOM"])
@pytest.mark.parametrize("name", JSON)
def test_a_prompt_in_json(tmp_path: Path, name: str, mark: bytes) -> None:
    for number, text in enumerate(TEXTS):
        path = table(tmp_path / str(number), name, mark + JSON[name].encode())
        before, data, read = entries(path), path.read_bytes(), values(path)
        edited = editor(path).set_prompt(before[1], text)
        read[1]["prompt"] = text
        assert values(path) == read
        begin, end = data.index(b'"green"'), data.index(b'"green"') + 7
        assert path.read_bytes().startswith(data[:begin])
        assert path.read_bytes().endswith(data[end:])
        assert edited.prompts == (text.strip(),)
        check(path, before, [edited])
        assert old_files(path) == [(name, data)]


@pytest.mark.parametrize(
    ("old", "new"),
    [("red", "é 🙂"), (r"\u00e9", r"\u00e9 \ud83d\ude42"), (r"\u00e9 é", "é 🙂")],
    ids=["", "escapes", "both"],
)
def test_letters_are_escaped_as_in_the_rest_of_a_table(tmp_path: Path, old: str, new: str) -> None:
    path = table(tmp_path / "t", "t.jsonl", f'{{"image": "a.png", "prompt": "{old}"}}\n{{"image": "b.png"}}\n')
    editor(path).set_prompt(entries(path)[1], "é 🙂")
    assert path.read_text(encoding="utf-8").endswith(f'\n{{"image": "b.png", "prompt": "{new}"}}\n')


@pytest.mark.parametrize("name", JSON)
def test_rows_left_out_in_json(tmp_path: Path, name: str) -> None:
    path = table(tmp_path / "t", name, JSON[name])
    before, data, read, edits = entries(path), path.read_bytes(), values(path), editor(path)
    edited = edits.set_left_out(before[:2], True)
    expected = [read[0] | {"left_out": True}, read[1] | {"left_out": True}, read[2]]
    assert values(path) == expected
    check(path, before, edited)
    assert path.read_bytes().endswith(data[data.rindex(b"{") :])
    back = edits.set_left_out(edited[:1], False)
    expected[0]["left_out"] = False
    assert values(path) == expected
    check(path, before, [*back, edited[1]])


def test_one_of_several_captions(tmp_path: Path) -> None:
    records = [
        {"image": "a.png", "prompts": ["red", "[[green]]", "blue"]},
        {"image": "a.png", "prompts": ["red"]},
        {"image": "b.png", "prompts": "no list"},
    ]
    path = table(tmp_path / "t", "t.jsonl", "\n".join(map(json.dumps, records)))
    before, edits = entries(path), editor(path)
    edited = edits.set_prompt(before[0], "second", 1)
    assert (edited.names, edited.prompts) == (("a", "a#2", "a#3"), ("red", "second", "blue"))
    other = edits.set_prompt(before[1], "[[open")
    assert (other.names, "a#4: [[ without ]]" in other.problems[0].what) == (("a#4",), True)
    check(path, before, [edited, other])
    assert values(path)[0]["prompts"] == ["red", "second", "blue"]
    for entry, caption in ((edited, 3), (edited, -1), (before[2], 0)):
        with pytest.raises(SourceError, match=f"the column 'prompts' has no caption {caption + 1}"):
            edits.set_prompt(entry, "x", caption)
    path = table(tmp_path / "one", "t.json", '[{"image": "a.png", "prompt": "red"}]')
    with pytest.raises(SourceError, match="this row has one caption"):
        editor(path).set_prompt(entries(path)[0], "x", 1)


def test_a_prompt_where_the_table_has_none(tmp_path: Path) -> None:
    path = table(tmp_path / "t", "t.jsonl", '{"image": "a.png"}\n{"image": "b.png", "prompt": null}\n{}\n')
    before, edits = entries(path), editor(path)
    edited = [edits.set_prompt(entry, f"{i}") for i, entry in enumerate(before)]
    assert values(path) == [{"image": "a.png", "prompt": "0"}, {"image": "b.png", "prompt": "1"}, {"prompt": "2"}]
    check(path, before[:2], edited)
    path = table(tmp_path / "other", "t.csv", "image,words\na.png,red\n")
    options = {"columns": ColumnsConfig(target="image", prompt="words")}
    edits = editor(path, **options)
    assert edits.set_prompt(entries(path, **options)[0], "blue").prompts == ("blue",)
    assert path.read_text() == "image,words\na.png,blue\n"


# ---- folders of images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old", [b"a in red", BOM_UTF8 + b" a in\r\nred \r\n", b"", None], ids=["plain", "BOM", "", "none"]
)
def test_a_prompt_of_a_folder(tmp_path: Path, old: bytes | None) -> None:
    for number, text in enumerate(TEXTS):
        source = images(tmp_path / str(number))
        path = source / "target_images" / "sub" / "c.txt"
        path.unlink()
        if old is not None:
            path = path.with_suffix(".TXT")
            path.write_bytes(old)
        before = entries(source)
        others = {each: each.read_bytes() for each in source.rglob("*") if each.is_file() and each != path}
        edits = editor(source)
        edited = edits.set_prompt(before[3], text)
        data = path.read_bytes()
        assert data.startswith(BOM_UTF8) == (old or b"").startswith(BOM_UTF8) or text == "\ufeff"
        assert data.decode("utf-8-sig").replace("\r\n", "\n").strip() == text.strip()
        assert (b"\r\n" in data) == (b"\r\n" in (old or b""))
        check(source, before, [edited])
        assert {each: each.read_bytes() for each in source.rglob("*") if each.is_file() and each != path} == others
        assert old_files(source) == ([] if old in (None, data) else [("target_images/sub/c.TXT", old)])
        assert edits.others_changed == bool(before[3].problems or edited.problems)


def test_targets_left_out_of_a_folder(tmp_path: Path) -> None:
    source = images(tmp_path / "s")
    for name in ("# d", ' "e'):
        (source / "target_images" / f"{name}.png").write_bytes(png())
    before, edits = entries(source), editor(source)
    edited = edits.set_left_out([*before[:2], before[4]], True)
    assert [entry.is_left_out for entry in edited] == [True] * 3
    check(source, before, edited)
    back = edits.set_left_out(edited[:1], False)
    assert (back, edits.others_changed) == ([before[0]], True)
    path = source / "left_out.txt"
    path.write_bytes(BOM_UTF8 + b"# mine\r\n" + path.read_bytes().replace(b"\n", b"\r\n"))
    edits.set_left_out(edited[1:], False)
    assert path.read_bytes() == BOM_UTF8 + b"# mine\r\n"
    assert entries(source) == before
    many = edits.set_left_out(before, True)
    assert entries(source) == many
    assert len(old_files(source)) == 3


def test_the_first_prompt_of_a_folder_changes_the_problem_of_all(tmp_path: Path) -> None:
    source = tmp_path / "s"
    source.mkdir()
    for name in ("a", "b", "b_2"):
        (source / f"{name}.png").write_bytes(png())
    before, edits = entries(source), editor(source)
    edited = edits.set_prompt(before[1], "blue")
    assert edits.others_changed
    now = entries(source)
    assert (now[1], [len(entry.problems) for entry in now]) == (edited, [1, 0, 1])
    assert edits.set_prompt(before[2], "red") == entries(source)[2], "only its problem had changed"


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_masks_of_a_folder(tmp_path: Path) -> None:
    source = images(tmp_path / "s")
    before, edits = entries(source), editor(source)
    edited = edits.set_mask(before[3], png(), None)
    path = source / "control_images" / "sub" / "c_mask.png"
    assert (str(edited.mask), path.read_bytes()) == (str(path), png())
    check(source, before, [edited])
    again = edits.set_mask(edited, png(grey=128), content_hash(png()))
    assert (again, path.read_bytes()) == (edited, png(grey=128))
    jpeg = source / "control_images" / "a_mask.webp"
    Image.new("L", SIZE, 255).save(jpeg)
    data, entry = jpeg.read_bytes(), entries(source)[0]
    edited = edits.set_mask(entry, png(), content_hash(data))
    assert (jpeg.exists(), str(edited.mask)) == (False, str(jpeg.with_suffix(".png")))
    assert old_files(source) == [
        ("control_images/sub/c_mask.png", png()),
        ("control_images/a_mask.webp", data),
    ]
    with pytest.raises(SourceError, match="the mask would be the control of another target, b_mask"):
        edits.set_mask(before[1], png(), None)
    bare = images(tmp_path / "bare", controls=False)
    with pytest.raises(SourceError, match="this source has no place for masks"):
        editor(bare).set_mask(entries(bare)[0], png(), None)
    (bare / "masks").mkdir()
    options = {"columns": ColumnsConfig(mask="masks")}
    edited = editor(bare, **options).set_mask(entries(bare, **options)[3], png(), None)
    assert str(edited.mask) == str(bare / "masks" / "sub" / "c.png")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_masks_of_a_table(tmp_path: Path, name: str) -> None:
    records = [("a.png", ""), ("b.png", "m.png"), ("b.png", "m.png"), ("c.png", "own.png"), ("c.png", "c.png")]
    if name == "t.csv":
        text = "image,prompt,mask\n" + "".join(f"{image},red,{mask}\n" for image, mask in records)
    else:
        text = "".join(json.dumps({"image": image, "prompt": "red", "mask": mask}) + "\n" for image, mask in records)
    path = table(tmp_path / "t", name, text)
    for mask in ("m.png", "own.png", "a_mask.png"):
        (path.parent / mask).write_bytes(png(grey=200))
    seen, target = content_hash(png(grey=200)), content_hash((path.parent / "c.png").read_bytes())
    before, edits = entries(path), editor(path)
    hashes = [None, seen, seen, seen, target]
    edited = [edits.set_mask(entry, png(), each) for entry, each in zip(before, hashes, strict=True)]
    names = ["a_mask_2.png", "b_mask.png", "m.png", "own.png", "c_mask.png"]
    assert [Path(str(entry.mask)).name for entry in edited] == names
    assert all((path.parent / each).read_bytes() == png() for each in names)
    assert (path.parent / "a_mask.png").read_bytes() == png(grey=200), "it is no mask of the table"
    check(path, before, edited)
    path = table(tmp_path / "new", name, text.replace("mask", "other"))
    edited = [editor(path).set_mask(entries(path)[0], png(), None)]
    assert (edited[0].mask, entries(path)[0]) == (entries(path)[0].mask, edited[0])


def test_of_many_copies_the_original_and_the_newest_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_versions, "LARGE_COPY", 10)
    path = table(tmp_path / "rows", "rows.csv", "target,control,prompt\na.png,b.png,0\n")
    monkeypatch.setattr(old_versions, "MOST_COPIES", 3 * path.stat().st_size)
    for number in range(1, 7):
        editor(path).set_prompt(entries(path)[0], str(number))
    assert [text.splitlines()[-1][-1:] for _, text in old_files(path)] == [b"0", b"4", b"5"]
    monkeypatch.setattr(old_versions, "MOST_COPIES", 0)
    editor(path).set_prompt(entries(path)[0], "7")
    assert [text.splitlines()[-1][-1:] for _, text in old_files(path)] == [b"0", b"6"]
    assert len(list(kept(path).iterdir())) == 2


def refused_mask(source: Path, data: bytes, seen: str | None = None) -> SourceError:
    with pytest.raises(SourceError) as error:
        editor(source).set_mask(entries(source)[0], data, seen)
    assert not kept(source).exists()
    return error.value


def test_what_is_no_mask_is_refused(tmp_path: Path) -> None:
    source = images(tmp_path / "s")
    error = refused_mask(source, png((16, 24)))
    assert str(error).endswith(
        "the mask has another size than its target (expected 24×16, found 16×24)\n  → make it as large as the target"
    )
    assert error.where == str(source / "target_images" / "a.png")
    assert "the mask is not a PNG" in str(refused_mask(source, b"GIF89a"))
    assert "damaged or incomplete" in str(refused_mask(source, png()[:-20]))
    assert isinstance(refused_mask(source, png(), content_hash(b"")), ChangedError)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.json", "folder"])
def test_a_row_that_changed_is_not_edited(tmp_path: Path, name: str) -> None:
    texts = {"t.csv": CSV["plain"], "t.jsonl": JSON["t.jsonl"], "t.json": JSON["t.json"]}
    source = images(tmp_path / "s") if name == "folder" else table(tmp_path / "s", name, texts[name])
    before = entries(source)
    editor(source).set_prompt(before[0], "theirs")
    ours = editor(source)
    for edit in (
        lambda: ours.set_prompt(before[0], "ours"),
        lambda: ours.set_left_out([before[1], before[0]], True),
        lambda: ours.set_mask(before[0], png(), None),
    ):
        with pytest.raises(ChangedError) as error:
            edit()
        assert str(error.value) == (
            f"{before[0].where}: this row was changed meanwhile\n  → reload the source, and repeat the edit"
        )
    now = entries(source)
    assert now[0].prompts == ("theirs",)
    assert now[1:] == before[1:]
    assert ours.set_prompt(before[1], "ours").prompts == ("ours",), "another row of the same file"
    assert entries(source)[0].prompts == ("theirs",)


def test_of_edits_at_the_same_time_none_is_lost(tmp_path: Path) -> None:
    path = table(tmp_path / "s", "t.csv", "image,prompt\n" + "".join(f"a.png,{i}\n" for i in range(12)))
    listed = entries(path)
    refused: list[int] = []

    def edit(thread: int) -> None:
        mine = editor(path)
        for number, entry in enumerate(listed):
            try:
                mine.set_prompt(entry, f"{number} by {thread}")
            except ChangedError:
                refused.append(number)

    threads = [threading.Thread(target=edit, args=[each]) for each in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(refused) == sorted([*range(12)] * 2)
    assert [row[1].split(" by ")[0] for row in cells(path)[1:]] == [str(i) for i in range(12)]
    assert len(old_files(path)) == len(dict.fromkeys(old_files(path))) == 12


def test_an_editor_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_cache.sources.old_files.PATIENCE", 0)
    source = images(tmp_path / "s")
    entry = entries(source)[0]
    with (
        locked(source / ".edit.lock", remove=True),
        pytest.raises(SourceError, match=r"process .* is editing this source"),
    ):
        editor(source).set_prompt(entry, "x")
    assert editor(source).set_prompt(entry, "x").prompts == ("x",)
    assert not list(source.glob(".*"))


def link_folder(source: Path, outside: Path) -> None:
    (source / "target_images").rename(outside / "targets")
    (source / "target_images").symlink_to(outside / "targets")


def link_file(source: Path, outside: Path) -> None:
    path = source / "target_images" / "a.txt"
    path.rename(outside / "a.txt")
    path.symlink_to(outside / "a.txt")


def protect(source: Path, outside: Path) -> None:
    (source / "target_images" / "a.txt").chmod(0o444)


def double(source: Path, outside: Path) -> None:
    (source / "target_images" / "a.TXT").write_text("a in red\n")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (link_folder, "this is outside the source's folder"),
        (link_file, "this is a link, which is not written through"),
        (protect, "this file is read-only"),
        (double, "several files are this prompt"),
    ],
)
def test_what_must_not_be_written_is_refused(tmp_path: Path, change: Callable[[Path, Path], None], what: str) -> None:
    source, outside = images(tmp_path / "s"), tmp_path / "outside"
    outside.mkdir()
    change(source, outside)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(SourceError, match=what) as error:
        editor(source).set_prompt(entries(source)[0], "x")
    assert error.value.where
    assert error.value.do
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_table_that_is_a_link_is_not_replaced(tmp_path: Path) -> None:
    path = table(tmp_path / "s", "t.csv", CSV["plain"])
    linked = path.with_name("link.csv")
    linked.symlink_to(path)
    with pytest.raises(SourceError, match="this is a link"):
        editor(linked).set_prompt(entries(linked)[0], "x")
    assert path.read_text() == CSV["plain"]


@pytest.mark.parametrize("name", ["folder", "t.csv"])
def test_what_is_no_prompt_is_refused(tmp_path: Path, name: str) -> None:
    source = images(tmp_path / "s") if name == "folder" else table(tmp_path / "s", name, CSV["plain"])
    entry = entries(source)[0]
    with pytest.raises(SourceError, match=r"the prompt is not text \(found '\\ud83d'\)"):
        editor(source).set_prompt(entry, "half \ud83d")
    with pytest.raises(SourceError, match="the prompt is too long"):
        editor(source).set_prompt(entry, "x" * (MAX_TEXT + 1))
    with pytest.raises(SourceError, match="one caption"):
        editor(source).set_prompt(entry, "x", 1)
    assert entries(source)[0] == entry


@pytest.mark.parametrize(
    "source", ["t.tar", "t.parquet", "saved", "tars", "s3://bucket/t.csv", "hf://datasets/a/b", "nix"]
)
def test_other_sources_cannot_be_edited(tmp_path: Path, source: str) -> None:
    for name in ("t.tar", "t.parquet", "saved/state.json", "tars/0.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    place = location(source) if "://" in source else tmp_path / source
    with pytest.raises(SourceError, match="this source cannot be edited") as error:
        open_editor(place, tmp_path / "kept", **SETTINGS)
    assert error.value.do == "write a table of its images first"
    assert str(error.value.where) == str(place)


def test_the_rights_of_a_file_stay(tmp_path: Path) -> None:
    path = table(tmp_path / "s", "metadata.csv", CSV["plain"])
    path.chmod(0o640)
    before = entries(path.parent)
    edited = editor(path.parent).set_prompt(before[0], "x")
    check(path.parent, before, [edited])
    with suppress(NotImplementedError):
        assert path.stat().st_mode & 0o777 == 0o640
