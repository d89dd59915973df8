"""Whatever the images come in, they give the same keys: the judge is the build of the folder of pairs.

The files are written by those who define them: `datasets`, pyarrow, webdataset, fsspec.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import socket
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image

from qwen_cache.encode.plan import read_again
from qwen_cache.errors import Problem, QwenCacheError, SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources import arrow
from qwen_cache.sources.detect import Row, expand, read_content, read_source
from qwen_cache.sources.places import TableFolder, parent
from qwen_cache.storage.remote import Url, location

from .support.caches import build
from .support.commands import refused, run
from .support.server import BUCKET
from .support.sources import write_pairs

Sample = dict[str, Any]
IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})


@pytest.fixture(autouse=True)
def empty_memory() -> Iterator[None]:
    files = fsspec.filesystem("memory")
    yield
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "data")


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """The same pairs as bytes, found by hand."""

    def sample(name: str, controls: list[str], mask: str | None) -> Sample:
        return {
            "name": name,
            "target": folder / "target_images" / f"{name}.png",
            "controls": [folder / "control_images" / f"{control}.png" for control in controls],
            "mask": folder / "control_images" / f"{mask}.png" if mask else None,
            "prompt": (folder / "target_images" / f"{name}.txt").read_text(encoding="utf-8"),
        }

    return [
        sample("cat", ["cat", "cat_control_1"], None),
        sample("china", ["china"], None),
        sample("cup", ["cup"], "cup_mask"),
        sample("flower", ["flower"], None),
    ]


def upload(folder: Path) -> str:
    """A copy of a folder in a bucket."""
    files = fsspec.filesystem("s3")
    for path in folder.rglob("*"):
        if path.is_file():
            files.pipe_file(f"{BUCKET}/{folder.name}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{folder.name}"


# Each writes the samples in its own way and returns what is given to `build`.


def as_table(samples: list[Sample], out: Path) -> str:
    lines = []
    for sample in samples:
        files = {"image": [sample["target"]], "control": sample["controls"]}
        files |= {"mask": [sample["mask"]]} if sample["mask"] else {}
        row: Sample = {"prompt": sample["prompt"]}
        for role, paths in files.items():
            row[role] = [f"images/{sample['name']}/{role}{i}.png" for i in range(len(paths))]
            for path, name in zip(paths, row[role], strict=True):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes(path.read_bytes())
        lines.append(json.dumps(row | {role: row[role][0] for role in files if role != "control"}))
    (out / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return str(out)


def as_remote_table(samples: list[Sample], out: Path) -> str:
    return upload(Path(as_table(samples, out))) + "/metadata.jsonl"


def as_remote_pairs(samples: list[Sample], out: Path) -> str:
    return upload(samples[0]["target"].parents[1]) + "/"


def structs(samples: list[Sample]) -> Sample:
    """Columns as the hub stores them."""

    def image(path: Path | None) -> Sample | None:
        return {"bytes": path.read_bytes(), "path": path.name} if path else None

    return {
        "edited_image": [image(sample["target"]) for sample in samples],
        "input_image": [image(sample["controls"][0]) for sample in samples],
        "input_image_1": [image([*sample["controls"], None][1]) for sample in samples],
        "mask": [image(sample["mask"]) for sample in samples],
        "edit_prompt": [sample["prompt"] for sample in samples],
    }


def made_by_datasets(samples: list[Sample]) -> Any:
    columns = structs(samples)
    kinds = {name: datasets.Image() for name in columns} | {"edit_prompt": datasets.Value("string")}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def as_saved(samples: list[Sample], out: Path) -> str:
    made_by_datasets(samples).save_to_disk(out / "saved", num_shards=2)
    return str(out / "saved")


def as_hub_parquet(samples: list[Sample], out: Path) -> str:
    for i, rows in enumerate((samples[:3], samples[3:])):
        made_by_datasets(rows).to_parquet(out / f"train-0000{i}-of-00002.parquet")
    return str(out)


def as_parquet_of_lists(samples: list[Sample], out: Path) -> str:
    columns = structs(samples)
    controls = [
        [each for each in pair if each] for pair in zip(columns["input_image"], columns["input_image_1"], strict=True)
    ]
    table = pa.table(
        {
            "image": pa.array(columns["edited_image"], IMAGE),
            "control_images": pa.array(controls, pa.list_(IMAGE)),
            "mask": pa.array(columns["mask"], IMAGE),
            "prompt": columns["edit_prompt"],
        }
    )
    pq.write_table(table, out / "all.parquet", row_group_size=3)
    return str(out / "all.parquet")


def as_plain_parquet(samples: list[Sample], out: Path) -> str:
    columns = {
        name: [each and each["bytes"] for each in values]
        for name, values in structs(samples).items()
        if name != "edit_prompt"
    }
    pq.write_table(pa.table(columns | {"prompt": [sample["prompt"] for sample in samples]}), out / "all.parquet")
    return str(out / "all.parquet")


def as_remote_parquet(samples: list[Sample], out: Path) -> str:
    as_hub_parquet(samples, out)
    return upload(out)


def as_tars(samples: list[Sample], out: Path) -> str:
    for i, rows in enumerate((samples[:1], samples[1:])):
        with webdataset.TarWriter(str(out / f"set-{i:03}.tar")) as writer:
            for sample in rows:
                members: Sample = {"__key__": sample["name"], "png": sample["target"].read_bytes()}
                members |= {
                    f"control_{n}.png" if n else "control.png": p.read_bytes() for n, p in enumerate(sample["controls"])
                }
                members |= {"mask.png": sample["mask"].read_bytes()} if sample["mask"] else {}
                text = {"json": {"caption": sample["prompt"], "n": 1}} if i else {"txt": sample["prompt"]}
                writer.write(members | text)
    return str(out)


def as_tar_pattern(samples: list[Sample], out: Path) -> str:
    return as_tars(samples, out) + "/set-{000..001}.tar"


def as_remote_tars(samples: list[Sample], out: Path) -> str:
    as_tars(samples, out)
    return upload(out)


KINDS: list[Callable[[list[Sample], Path], str]] = [
    *(as_table, as_remote_table, as_remote_pairs),
    *(as_saved, as_hub_parquet, as_parquet_of_lists, as_plain_parquet, as_remote_parquet),
    *(as_tars, as_tar_pattern, as_remote_tars),
]


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def planned(source: str, out: Path, model: Path) -> Sample:
    result = build(source, out, model, "--dry-run", "--json")  # type: ignore[arg-type]
    assert result.code == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def keys(folder: Path, tiny_model: Callable[[str], Path]) -> list[str]:
    """The keys of the samples of the folder."""
    plan = planned(str(folder), folder.parent / "out", tiny_model("edit-plus"))
    return [sample["key"] for sample in plan["samples"]]


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("write", KINDS)
def test_every_kind_gives_the_keys_of_the_folder(
    write: Callable[..., str], samples: list[Sample], keys: list[str], tmp_path: Path, model: Path
) -> None:
    (tmp_path / tmp_path.name).mkdir()
    source = write(samples, tmp_path / tmp_path.name)
    plan = planned(source, tmp_path / "out", model)
    assert plan["problems"] == []
    assert [sample["key"] for sample in plan["samples"]] == keys
    assert len({sample["name"] for sample in plan["samples"]}) == 4
    assert len({sample["key"] for sample in plan["samples"]}) == 4


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("write", [as_remote_table, as_saved, as_hub_parquet, as_remote_tars])
def test_a_build_of_every_kind_is_the_build_of_the_folder(
    write: Callable[..., str], samples: list[Sample], tmp_path: Path, model: Path, built: Callable[..., Path]
) -> None:
    """With the real encoders: every image is read again in the lanes. The same shards, and nothing to do after."""
    (tmp_path / tmp_path.name).mkdir()
    source, out = write(samples, tmp_path / tmp_path.name), tmp_path / "out"
    result = build(source, out, model)  # type: ignore[arg-type]
    assert result.code == 0, result.stderr
    assert {p.name for p in out.glob("*.tar")} == {p.name for p in built("edit-plus").glob("*.tar")}
    assert run("qwen-cache", "verify", out).code == 0
    again = build(source, out, model)  # type: ignore[arg-type]
    assert "nothing to do" in again.stderr


@pytest.mark.fast_cases(5)
@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize("write", KINDS)
def test_rows_of_every_kind_can_be_sent_to_another_process(
    write: Callable[..., str], samples: list[Sample], tmp_path: Path
) -> None:
    """A cluster needs this; a file is opened there once, for all of its images."""
    (tmp_path / tmp_path.name).mkdir()
    source = write(samples, tmp_path / tmp_path.name)
    rows, _ = read_source(location(source), needs_control=True, allow_empty_prompt=False)
    sent = [pickle.loads(pickle.dumps(row)) for row in rows]
    for here, there in zip(rows, sent, strict=True):
        assert there.name == here.name
        assert str(there.target) == str(here.target)
        assert [each.read() for each in (there.target, *there.controls)] == [
            each.read() for each in (here.target, *here.controls)
        ]
    tables = {id(row.target.table) for row in sent if hasattr(row.target, "table")}
    assert len(tables) <= len({str(row.target).partition("[")[0] for row in rows})


# ---- what is wrong, and what it is called ----------------------------------------------------------------------------


def png(colour: int = 0, size: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), (colour % 256, colour // 256, 0)).save(file, "PNG")
    return file.getvalue()


def make_images(source: Path | Url, *, allow_empty_prompt: bool = False) -> tuple[list[Row], list[Problem]]:
    """A row as a text-to-image model takes it."""
    return read_source(source, needs_control=False, allow_empty_prompt=allow_empty_prompt)


def refusal(source: Path | str) -> str:
    with pytest.raises(SourceError) as caught:
        make_images(location(source))
    return str(caught.value)


def tar(path: Path, members: dict[str, bytes | str], *entries: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
        for info in entries:
            file.addfile(info)
    return path


def test_each_caption_of_a_list_is_a_sample_about_the_same_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.jsonl").write_text('{"image": "a.png", "prompts": ["one", " two ", "three"]}\n' * 2)
    (tmp_path / "a.json").write_text('[{"image": "a.png", "captions": ["one", "two", "three"]}]')
    pq.write_table(pa.table({"image": ["a.png"], "prompts": [["one", "two", "three"]]}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"image": ["a.png"], "captions": [["one", "two", "three"]]}).save_to_disk(tmp_path / "s")
    (tmp_path / "s" / "a.png").write_bytes(png())
    tar(tmp_path / "a.tar", {"a.png": png(), "a.json": '{"prompts": ["one", "two", "three"]}'})
    for name in ("a.jsonl", "a.json", "a.parquet", "s", "a.tar"):
        rows, problems = make_images(tmp_path / name)
        assert problems == []
        assert [row.prompt for row in rows[:3]] == ["one", "two", "three"]
        assert [row.name for row in rows] == ["a", *(f"a#{i}" for i in range(2, len(rows) + 1))]
        assert len({row.target for row in rows}) == 1
        assert rows[0].target.read() == png()


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], "the prompt 'prompts' is [], expected a list of texts"),
        (None, "the prompt 'prompts' is None, expected a list of texts"),
        ("one", "the prompt 'prompts' is 'one', expected a list of texts"),
        (["one", " "], "prompt 2 of 2 is empty"),
        (["one", None], "prompt 2 of 2 is empty"),
        (["one", 2], "the prompt 'prompts' is 2, expected text"),
        ([""], "the prompt is empty"),
    ],
)
def test_a_list_of_captions_that_is_none_is_told(tmp_path: Path, prompts: Any, expected: str) -> None:
    (tmp_path / "a.png").write_bytes(png())
    good = json.dumps({"image": "a.png", "prompts": ["red"]})
    path = tmp_path / "a.jsonl"
    path.write_text(f"{good}\n{json.dumps({'image': 'a.png', 'prompts': prompts})}\n{good}\n")
    rows, problems = make_images(path)
    assert [row.prompt for row in rows] == ["red", "red"]
    assert [(problem.where, problem.what) for problem in problems] == [(f"{path}:2", expected)]
    _, problems = make_images(path, allow_empty_prompt=True)
    assert bool(problems) == ("empty" not in expected)


def test_an_empty_list_is_a_problem_even_where_prompts_may_be_empty(tmp_path: Path) -> None:
    """Else its row would be lost without a word."""
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.jsonl").write_text('{"image": "a.png", "prompts": []}')
    rows, problems = make_images(tmp_path / "a.jsonl", allow_empty_prompt=True)
    assert (rows, len(problems)) == ([], 1)


def link(name: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


BROKEN_TARS: dict[str, tuple[dict[str, bytes | str], list[tarfile.TarInfo], str, str]] = {
    "escapes": ({"../b.png": png()}, [], "../b.png", "the name leads out of the tar"),
    "escapes below": ({"x/../../b.png": png()}, [], "x/../../b.png", "the name leads out of the tar"),
    "absolute": ({"/b.png": png()}, [], "/b.png", "the name leads out of the tar"),
    "a link": ({"b.txt": "red"}, [link("b.png")], "b.png", "this is not a plain file"),
    "a hard link": ({"b.txt": "red"}, [link("b.png", tarfile.LNKTYPE)], "b.png", "this is not a plain file"),
    "a pipe": ({"b.txt": "red"}, [link("b.png", tarfile.FIFOTYPE)], "b.png", "this is not a plain file"),
    "two targets": ({"b.png": png(), "b.jpg": png(), "b.txt": "red"}, [], "b.jpg", "two for the target of b"),
    "two names of one": ({"b.png": png(), "b.target.png": png()}, [], "b.target.png", "two for the target of b"),
    "two prompts": (
        {"b.png": png(), "b.txt": "red", "b.caption.txt": "blue"},
        [],
        "b.caption.txt",
        "two for the prompt",
    ),
    "no target": ({"b.txt": "red"}, [], "b", "there is no b.target.png (or b.png, …)"),
    "no prompt": ({"b.png": png()}, [], "b", "there is no b.txt or b.json"),
    "an empty prompt": ({"b.png": png(), "b.txt": " \n"}, [], "b", "the prompt is empty"),
    "Latin-1": ({"b.png": png(), "b.txt": b"caf\xe9"}, [], "b", "the prompt in .txt cannot be read: 'utf-8' codec"),
    "no JSON": ({"b.png": png(), "b.json": "{"}, [], "b", "the prompt in .json cannot be read: Expecting property"),
    "JSON with a key twice": (
        {"b.png": png(), "b.json": '{"text": "1", "text": "2"}'},
        [],
        "b",
        'the prompt in .json cannot be read: the key "text" is there twice',
    ),
    "JSON without": ({"b.png": png(), "b.json": '{"n": 1}'}, [], "b", "found none"),
    "JSON with two": ({"b.png": png(), "b.json": '{"text": "1", "prompt": "2"}'}, [], "b", "found text, prompt"),
    "JSON of another kind": ({"b.png": png(), "b.json": '{"text": 1}'}, [], "b", "is 1, expected text"),
    "a novel": ({"b.png": png(), "b.txt": "x" * 2_000_000}, [], "b", "2000000 bytes are too long for a prompt"),
}


@pytest.mark.parametrize("case", BROKEN_TARS)
def test_what_is_wrong_in_a_tar_is_told_by_tar_and_member(tmp_path: Path, case: str) -> None:
    members, entries, member, expected = BROKEN_TARS[case]
    good = {
        "a.png": png(),
        "a.txt": "red",
        "a.json": "{",
        "c.PNG": png(),
        "c.txt": "blue",
        "._d.png": b"",
        "README": "",
        "a.cls": "1",
    }
    path = tar(tmp_path / "t.tar", good | members, *entries)
    rows, problems = make_images(path)
    assert [(row.name, row.prompt) for row in rows] == [("a", "red"), ("c", "blue")]
    assert [problem.where for problem in problems] == [f"{path}:{member}"]
    assert expected in problems[0].what
    assert problems[0].do


def test_a_key_goes_up_to_the_first_dot_of_the_base_name(tmp_path: Path) -> None:
    members = {"v1.0/a.b.target.png": png(), "./v1.0/c.edited_image.jpg": png(1), "v1.0/c.source_image.webp": png(2)}
    members |= {"v1.0/c.mask.png": png(3)}
    rows, problems = read_source(
        tar(tmp_path / "t.tar", members | {"v1.0/c.edit_prompt.txt": b"red"}), needs_control=True
    )
    [row] = rows
    assert (row.name, row.target.read(), row.controls[0].read()) == ("v1.0/c", png(1), png(2))
    assert row.mask
    assert row.mask.read() == png(3)
    assert str(row.target) == f"{tmp_path}/t.tar:./v1.0/c.edited_image.jpg"
    assert [problem.where for problem in problems] == [f"{tmp_path}/t.tar:v1.0/a"]


def test_members_of_a_tar_that_have_no_role_are_counted(tmp_path: Path) -> None:
    """A key ends at the first dot, as for stock webdataset, so p.v2.png is a part of p."""
    members: dict[str, bytes | str] = {"p.png": png(), "p.txt": "one", "p.json": "{}"}
    members |= {"p.v2.png": png(1), "p.v2.txt": "two", "p.v3.png": png(2), "p.cls": "3"}
    content = read_content(location(str(tar(tmp_path / "t.tar", members))), needs_control=False)
    assert [(row.name, row.prompt) for row in content.rows] == [("p", "one")]
    [notice] = content.notices
    assert (notice.count, notice.names) == (4, ("p.v2.txt", "p.cls", "p.v2.png"))
    assert str(notice).startswith("4 members of the tars have no role: p.v2.txt, p.cls, p.v2.png, …\n  → ")


def test_a_tar_with_a_misspelt_or_missing_control_is_told(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", {"a.png": png(), "a.contorl.png": png(), "a.txt": "red"})
    assert "'contorl' is unknown, and resembles 'control'" in refusal(path)
    path = tar(tmp_path / "t.tar", {"a.png": png(), "a.txt": "x", "b.png": png(), "b.txt": "y", "b.control.png": png()})
    rows, [problem] = read_source(path, needs_control=True)
    assert [row.name for row in rows] == ["b"]
    assert problem == Problem(f"{path}:a", "the target has no control", "add one, or remove the target")
    _, [problem] = read_source(path, needs_control=True, no_control="stated")
    do = "add it, or set data.allow_no_control=true if it is meant to have none"
    assert problem == Problem(f"{path}:a", "there is no a.control.png", do)
    rows, problems = read_source(path, needs_control=False, takes_control=True, no_control="allowed")
    assert ([len(row.controls) for row in rows], problems) == ([0, 1], [])


PARTS = {
    "by their names": ({"input.jpg": 2, "output.jpg": 1}, {}),
    "before and after": ({"before.jpg": 2, "After.png": 1}, {}),
    "named with extension": ({"jpg": 2, "edited_v2.jpg": 1}, {"target": "edited_v2.jpg", "control": "jpg"}),
    "named without": (
        {"a.jpg": 2, "target.jpg": 9, "b.webp": 1, "m.png": 3},
        {"target": "B", "control": ["a"], "mask": "m"},
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_tars_have_any_name(tmp_path: Path, case: str) -> None:
    parts, columns = PARTS[case]
    members = {f"{key}.{part}": png(colour) for key in "xy" for part, colour in parts.items()}
    path = tar(tmp_path / "t.tar", members | {"x.txt": "red", "y.json": '{"caption": "blue"}'})
    rows, problems = read_source(path, needs_control=True, columns=ColumnsConfig(**columns))
    assert problems == []
    assert [(row.name, row.prompt) for row in rows] == [("x", "red"), ("y", "blue")]
    assert {(row.target.read(), *(each.read() for each in row.controls)) for row in rows} == {(png(1), png(2))}
    assert all((row.mask is not None) == ("mask" in columns) for row in rows)


def test_the_prompt_of_a_tar_has_any_name(tmp_path: Path) -> None:
    images: dict[str, bytes | str] = {"x.png": png(1), "x.txt": "no", "x.json": '{"edit_v2": ["red", "blue"], "n": 1}'}
    path = tar(tmp_path / "t.tar", images | {"x.long.txt": "green"})
    for name, prompts in {"edit_v2": ["red", "blue"], "long": ["green"], "long.txt": ["green"], "txt": ["no"]}.items():
        rows, problems = read_source(path, needs_control=False, columns=ColumnsConfig(prompt=name))
        assert ([row.prompt for row in rows], problems) == (prompts, [])
    _, [problem] = read_source(path, needs_control=False, columns=ColumnsConfig(prompt="edit_v3"))
    assert problem.what == "the prompt in .json cannot be read: expected one of edit_v3, found none of edit_v2, n"


@pytest.mark.parametrize(
    ("columns", "parts", "expected"),
    [
        ({}, ["x.jpg", "json"], "no part holds the target or the control (expected path_target or"),
        ({}, ["x.jpg", "json"], "or original, found 'x.jpg', 'json')\n  → add it, or name the right part: --set"),
        ({}, ["jpg", "json"], "no part holds the control (expected path_control or"),
        ({}, ["jpg", "control.jpg"], "no part holds the prompt (expected KEY.txt or KEY.json, found jpg, control.jpg)"),
        ({}, ["v1.jpg", "v1.txt"], "found v1.jpg, v1.txt)\n  → what follows the first dot of a name is its part"),
        (
            {"target": "outputs"},
            ["input.jpg", "output.jpg", "txt"],
            "data.columns.target names the part 'outputs', which does not exist (found 'input.jpg', 'output.jpg', "
            "'txt', 'input', 'output')\n  → did you mean 'output'? --set data.columns.target=output",
        ),
        (
            {},
            ["input.jpg", "source.jpg", "jpg", "txt"],
            "two parts hold the same control: 'input' and 'source' (expected one)\n  → name the right one: --set "
            "data.columns.control=input or --set data.columns.control=source; or both in their order: "
            """--set 'data.columns.control=["input", "source"]'""",
        ),
        ({"phrase": "cls"}, ["jpg", "txt"], "a tar has no part for the phrase (found data.columns.phrase=cls)"),
    ],
)
def test_what_every_sample_of_a_tar_lacks_is_one_error(
    tmp_path: Path, columns: dict[str, Any], parts: list[str], expected: str
) -> None:
    content = {"txt": "red", "json": '{"text": "red"}'}
    members = {f"{key}.{part}": content.get(part) or png() for key in "abcde" for part in parts}
    with pytest.raises(SourceError) as caught:
        read_source(tar(tmp_path / "t.tar", members), needs_control=True, columns=ColumnsConfig(**columns))
    assert expected in str(caught.value)


def test_what_every_row_lacks_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("image,control,prompt\n" + "a.png,,red\n" * 5)
    (tmp_path / "a.png").write_bytes(png())
    rows, [problem] = read_source(tmp_path / "t.csv", needs_control=True)
    assert rows == []
    assert problem.where == str(tmp_path / "t.csv")
    assert problem.what == "all 5 samples: the target has no control"
    members = {f"{key}.{part}": "{}" if part == "json" else png() for key in "abc" for part in ("png", "json")}
    rows, [problem] = make_images(tar(tmp_path / "t.tar", members))
    assert problem.what.startswith("all 3 samples: the prompt in .json cannot be read: expected one of")
    pq.write_table(pa.table({"image": cells(None, None), "text": ["x", "y"]}), tmp_path / "t.parquet")
    assert make_images(tmp_path / "t.parquet")[1][0].what == "all 2 samples: the target 'image' is empty"


def test_the_names_of_folders_do_not_enter_the_keys(
    folder: Path, samples: list[Sample], tmp_path: Path, model: Path
) -> None:
    reference = planned(str(folder), tmp_path / "out", model)
    renamed = shutil.copytree(folder, tmp_path / "data")
    (renamed / "target_images").rename(renamed / "neu")
    (renamed / "control_images").rename(renamed / "alt")
    for options in (("--targets", "neu/", "--controls", "alt"), ()):
        result = build(renamed, tmp_path / "out", model, "--dry-run", "--json", *options)
        assert [each["key"] for each in json.loads(result.stdout)["samples"]] == [
            each["key"] for each in reference["samples"]
        ]
    (renamed / "alt").rename(tmp_path / "alt")
    result = build(renamed, tmp_path / "out", model, "--dry-run")
    refused(result, "no target folder", "or name their folder: --set data.columns.target=FOLDER")


def test_columns_of_images_have_any_name(tmp_path: Path) -> None:
    """In Parquet and in what `datasets` saves; other columns of images are not read."""
    kinds = {name: datasets.Image() for name in ("kept", "a", "b", "m")} | {"q": datasets.Value("string")}
    rows_of = {"kept": [png(1)] * 3, "a": [png(2)] * 3, "b": [png(3)] * 3, "m": [png(4)] * 3, "q": ["x", "y", "z"]}
    table = datasets.Dataset.from_dict(rows_of, features=datasets.Features(kinds))
    table.to_parquet(tmp_path / "t.parquet")
    table.save_to_disk(tmp_path / "saved")
    columns = ColumnsConfig(target="kept", control=["b", "a"], prompt="q")
    for path in (tmp_path / "t.parquet", tmp_path / "saved"):
        rows, problems = read_source(path, needs_control=True, columns=columns)
        assert problems == []
        for row in pickle.loads(pickle.dumps(rows)):
            assert [row.target.read(), *(each.read() for each in row.controls)] == [png(1), png(3), png(2)]
        assert [row.prompt for row in rows] == ["x", "y", "z"]
    assert rows[0].target.table.images == ("kept", "b", "a")


def test_a_tar_that_is_damaged_is_refused_and_loses_no_row_in_silence(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", {f"{i}.{kind}": png(i) for i in range(3) for kind in ("png", "txt")})
    whole = path.read_bytes()
    for cut in (100, 512 + 20, 1024, 1024 * 3 + 100):  # in a header, in a member, between two members
        path.write_bytes(whole[:cut])
        assert "the tar is damaged or incomplete" in refusal(path)
    path.write_bytes(whole[:2048] + b"\xff" + whole[2049:])
    assert "at byte 2048 there is neither a member nor the end" in refusal(path)
    path.write_bytes(b"\x1f\x8b" + whole)
    assert "pack it again, without compression" in refusal(path)
    path.write_bytes(whole[1024 * 6 :])
    assert "there is no sample in the tar" in refusal(path)


def test_caches_are_no_source(built: Callable[..., Path], tmp_path: Path) -> None:
    cache = built("edit-plus")
    assert "this is a cache, not a source" in refusal(cache)
    assert "holds no images" in refusal(next(cache.glob("*.tar")))
    for path in cache.glob("*.tar"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "holds no images" in refusal(tmp_path)


def cells(*values: Any) -> Any:
    return pa.array(
        [None if v is None else v if isinstance(v, dict) else {"bytes": v, "path": None} for v in values], IMAGE
    )


def test_a_cell_without_bytes_is_the_file_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x/a.png").write_bytes(png(1))
    images = cells({"bytes": None, "path": "x/a.png"}, png(2), {"bytes": png(3), "path": "x/a.png"}, None, {})
    pq.write_table(pa.table({"image": images, "text": list("abcde")}), tmp_path / "t.parquet")
    rows, problems = make_images(tmp_path / "t.parquet")
    assert [row.name for row in rows] == ["x/a", "t/1", "x/a#2", "t/4"]
    assert [row.target.read() for row in rows[:3]] == [png(1), png(2), png(3)]
    with pytest.raises(SourceError, match=r"t\.parquet\[4\]\.image: the cell has neither bytes nor a path"):
        rows[3].target.read()
    assert [(p.where, p.what) for p in problems] == [(f"{tmp_path}/t.parquet[3]", "the target 'image' is empty")]


def test_an_image_that_cannot_be_read_is_a_problem_of_its_row(tmp_path: Path, model: Path) -> None:
    """The plan names table, row and column, or tar and member, whatever the images come in."""
    columns = {"image": cells(png(1, 64), b"GIF8", {}), "control": cells(*[png(2, 64)] * 3), "prompt": list("abc")}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    result = build(tmp_path / "t.parquet", tmp_path / "out", model, "--dry-run", "--json")
    [damaged, empty] = json.loads(result.stdout)["problems"]
    assert damaged["where"] == f"{tmp_path}/t.parquet[1]"
    assert damaged["what"].startswith(f"{tmp_path}/t.parquet[1].image: ")
    assert empty["what"] == f"{tmp_path}/t.parquet[2].image: the cell has neither bytes nor a path"
    members = {"a.png": png(1, 64), "a.control.png": b"GIF8", "a.txt": "red"}
    result = build(tar(tmp_path / "t.tar", members), tmp_path / "out", model, "--dry-run", "--json")
    [damaged] = json.loads(result.stdout)["problems"]
    assert damaged["where"] == f"{tmp_path}/t.tar:a"
    assert damaged["what"].startswith(f"{tmp_path}/t.tar:a.control.png: ")


def test_an_image_that_changed_since_the_plan_is_refused(tmp_path: Path) -> None:
    path = tar(tmp_path / "t.tar", {"a.png": png(1), "a.txt": "red"})
    [row], _ = make_images(path)
    digest = content_hash(row.target.read())
    assert read_again(row.target, digest) == png(1)
    tar(path, {"a.png": png(2), "a.txt": "red"})
    with pytest.raises(SourceError, match=r"t\.tar:a\.png: the file changed while the cache was being built"):
        read_again(row.target, digest)
    path.write_bytes(path.read_bytes()[:550])
    with pytest.raises(SourceError, match=r"t\.tar: the file is shorter than it was"):
        row.target.read()


def test_parquet_is_read_by_many_threads_in_any_order_and_few_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    plain = arrow._Group.row

    def watched(group: Any, row: int) -> Any:
        found = plain(group, row)
        kept.append(len(group.kept))
        return found

    monkeypatch.setattr(arrow._Group, "row", watched)
    count = 300
    table = pa.table({"image": cells(*map(png, range(count))), "text": ["x"] * count})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=120)
    rows, _ = make_images(tmp_path / "t.parquet")
    assert kept == []  # nothing is read before the plan asks
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(lambda row: row.target.read(), rows)) == [png(i) for i in range(count)]
    for i in (299, 0, 250, 119, 120, 5):
        assert rows[i].target.read() == png(i)
    assert max(kept) <= arrow.KEPT_ROWS


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("plain", [False, True])
def test_a_row_group_is_streamed_and_never_held(tmp_path: Path, plain: bool) -> None:
    """Rows are read as far as pages allow: a page is decoded as a whole."""
    count, size = 160, 1 << 18
    contents = [os.urandom(size) for _ in range(count)]
    table = pa.table({"image": pa.array(contents) if plain else cells(*contents), "text": ["x"] * count})
    pq.write_table(
        table,
        tmp_path / "t.parquet",
        row_group_size=count,
        write_batch_size=1,
        use_dictionary=False,
        data_page_size=2 * size,
    )
    del table
    before, peak = pa.total_allocated_bytes(), 0
    rows, _ = make_images(tmp_path / "t.parquet")
    for row, content in zip(rows, contents, strict=True):
        assert row.target.read() == content
        peak = max(peak, pa.total_allocated_bytes() - before)
    assert peak < (arrow.KEPT_ROWS + 10) * size < count * size / 3


def test_a_damaged_table_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": cells(*map(png, range(9))), "text": ["x"] * 9}), tmp_path / "t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[: len(whole) // 2])
    assert "the file is damaged or incomplete" in refusal(tmp_path / "t.parquet")
    (tmp_path / "t.parquet").write_bytes(b"")
    assert "the file is damaged or incomplete" in refusal(tmp_path / "t.parquet")
    datasets.Dataset.from_dict({"image": ["a.png"], "text": ["red"]}).save_to_disk(tmp_path / "saved")
    [path] = (tmp_path / "saved").glob("*.arrow")
    path.write_bytes(path.read_bytes()[:200])
    assert "the file is damaged or incomplete" in refusal(tmp_path / "saved")
    path.unlink()
    assert "the file does not exist" in refusal(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "../t.arrow"}]}')
    assert "a file leads out of the folder" in refusal(tmp_path / "saved")
    (tmp_path / "saved/state.json").write_text("{}")
    assert "this is not what `datasets` saves" in refusal(tmp_path / "saved")


def test_several_splits_and_files_that_differ_are_refused(tmp_path: Path) -> None:
    one = datasets.Dataset.from_dict({"image": ["a.png"], "text": ["red"]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(tmp_path / "saved")
    message = refusal(tmp_path / "saved")
    assert "the source holds several splits (expected one, found test, train)" in message
    assert "choose one: --set data.split=test or --set data.split=train" in message
    (tmp_path / "saved/train/a.png").write_bytes(png())
    assert [row.name for row in make_images(tmp_path / "saved/train")[0]] == ["a"]
    for name in ("train-00000-of-00001", "test-00000-of-00001"):
        one.to_parquet(tmp_path / f"{name}.parquet")
    assert "the source holds several splits (expected one, found test, train)" in refusal(tmp_path)
    for source, name in ((tmp_path / "saved", "a"), (tmp_path, "a")):
        rows, problems = read_source(source, needs_control=False, split="train")
        assert [row.name for row in rows] == ([name] if source != tmp_path else [])
        assert problems == [] or problems[0].what == f"the target {tmp_path}/a.png does not exist"
        with pytest.raises(SourceError, match=r"there is no split 'val' \(expected one, found test, train\)"):
            read_source(source, needs_control=False, split="val")
    one.rename_column("text", "prompt").to_parquet(tmp_path / "test-00000-of-00001.parquet")
    message = refusal(tmp_path / "{train,test}-00000-of-00001.parquet")
    assert "test-00000-of-00001.parquet: the columns differ between files (expected 'text' as in" in message
    pq.write_table(
        pa.table({"image": pa.array([], pa.string()), "text": pa.array([], pa.string())}), tmp_path / "e.parquet"
    )
    assert "the table has no rows" in refusal(tmp_path / "e.parquet")


def test_a_folder_of_two_kinds_is_refused(tmp_path: Path) -> None:
    tar(tmp_path / "t.tar", {"a.png": png(), "a.txt": "red"})
    (tmp_path / "metadata.csv").write_text("image,text\na.png,red\n")
    message = refusal(tmp_path)
    assert "can be read in more than one way" in message
    assert "found metadata.csv, t.tar" in message


def test_braces_that_stand_for_more_files_than_anybody_has_are_refused(tmp_path: Path) -> None:
    for pattern in ("{0..999999999}.tar", "{1..999}{1..999}.parquet"):
        message = refusal(tmp_path / pattern)
        assert f"{tmp_path / pattern}: the braces stand for too many files (expected at most 100000)" in message


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{a,b}-{0..1}.tar", ["a-0.tar", "a-1.tar", "b-0.tar", "b-1.tar"]),
        ("a.tar", ["a.tar"]),
        ("a{b}.tar", ["a{b}.tar"]),
    ],
)
def test_braces_stand_for_names_as_in_a_shell(pattern: str, names: list[str], tmp_path: Path) -> None:
    assert list(expand(pattern)) == names
    for name in names[:-1]:
        tar(tmp_path / name, {f"{name[0]}.png": png(), f"{name[0]}.txt": "red"})
    assert f"{names[-1]}: the file does not exist" in refusal(tmp_path / pattern)


# ---- remote sources --------------------------------------------------------------------------------------------------


def put(files: dict[str, bytes | str]) -> None:
    for name, content in files.items():
        fsspec.filesystem("memory").pipe_file(
            f"/bucket/{name}", content.encode() if isinstance(content, str) else content
        )


def remote_table(*names: str) -> Url:
    put({"data/t.jsonl": "\n".join(json.dumps({"image": name, "text": "x"}) for name in names)})
    return Url("memory://bucket/data/t.jsonl")


def test_a_remote_table_names_files_of_its_own_server(tmp_path: Path) -> None:
    put({"data/a.png": png(1), "other/b.png": png(2), "else/c.png": png(3), "d.png": png(4)})
    inside = ["a.png", "../other/./b.png", "memory://bucket/else/c.png", "../../../../../d.png"]
    rows, problems = make_images(remote_table(*inside))
    assert problems == []
    assert [row.target.read() for row in rows] == [png(1), png(2), png(3), png(4)]
    assert [row.name for row in rows] == ["a", "../other/b", "bucket/else/c", "../../../../../d"]


def test_a_remote_table_names_nothing_of_this_machine_and_of_other_servers(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    fsspec.filesystem("memory").pipe_file("/bucket2/a.png", png())
    here, chain, elsewhere = "a file of this machine", "a chain of addresses", "another server than its own"
    refused = {
        f"{tmp_path}/a.png": here,
        f"file://{tmp_path}/a.png": here,
        f"local://{tmp_path}/a.png": here,
        f"file:{tmp_path}/a.png": here,
        "C:\\a.png": here,
        "\\\\server\\share\\a.png": here,
        **{f"{cache}::file://{tmp_path}/a.png": chain for cache in ("simplecache", "blockcache", "filecache")},
        "zip://a.png::memory://bucket/a.zip": chain,
        "a::b/c.png": chain,
        "memory://bucket2/a.png": elsewhere,
        "memory://bucket@bucket2/a.png": elsewhere,
        "memory://bucket/../bucket2/a.png": elsewhere,
        "memory://bucket/%2e%2e/bucket2/a.png": elsewhere,
        "https://169.254.169.254/latest/meta-data": elsewhere,
        "github://me:repository@main/a.png": elsewhere,
    }
    rows, problems = make_images(remote_table(*refused))
    assert rows == []
    for (name, why), problem in zip(refused.items(), problems, strict=True):
        assert problem.what.endswith(f"a remote table names {why}: {name}")
    assert (
        problems[-1].do
        == "if you trust the table, allow it: --set 'data.allow_urls=[\"github://me:repository@main/\"]'"
    )


def test_a_table_in_a_remote_archive_names_files_of_the_archive() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("set/images/a.png", png(1))
        archive.writestr("set/metadata.csv", "file_name,text\nimages/a.png,red\n../../images/./a.png,red\n/a.png,red\n")
    put({"a.zip": buffer.getvalue()})
    rows, problems = make_images(location("zip://set::memory://bucket/a.zip"))
    assert [row.target.read() for row in rows] == [png(1), png(1)]
    assert [problem.where for problem in problems] == ["zip://set::memory://bucket/a.zip/metadata.csv:4"]


def test_data_allow_urls_lets_a_remote_table_name_more(tmp_path: Path, model: Path) -> None:
    fsspec.filesystem("memory").pipe({"/bucket2/pub/a.png": png(1, 64), "/bucket2/public.png": png(2, 64)})
    refused = ["memory://bucket2/public.png", "memory://bucket2/pub/../public.png", "memory://bucket2/b.png"]
    table = remote_table("memory://bucket2/pub/a.png", *refused)
    rows, problems = read_source(table, needs_control=False, allow_urls=["memory://bucket2/pub"])
    assert [row.target.read() for row in rows] == [png(1, 64)]
    assert [problem.where for problem in problems] == [f"{table}:{line}" for line in (2, 3, 4)]
    _, problems = read_source(
        remote_table("https://a.png", "file:/a.png"), needs_control=False, allow_urls=["https://", "file://"]
    )
    assert [problem.what.partition(" names ")[2].partition(":")[0] for problem in problems] == [
        "another server than its own",
        "a file of this machine",
    ]
    pairs = "image,control,prompt\nmemory://bucket2/pub/a.png,memory://bucket2/public.png,red\n"
    put({"data/t.csv": pairs})
    allowed = 'data.allow_urls=["memory://"]'
    result = build("memory://bucket/data/t.csv", tmp_path / "o", model, "--dry-run", "--json", "--set", allowed)  # type: ignore[arg-type]
    assert json.loads(result.stdout)["problems"] == []


def test_a_remote_parquet_names_files_of_its_own_server_only(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    cells = [{"bytes": None, "path": path} for path in (f"{tmp_path}/a.png", "b.png")]
    pq.write_table(pa.table({"image": pa.array(cells, IMAGE), "text": ["x", "y"]}), tmp_path / "t.parquet")
    put({"t.parquet": (tmp_path / "t.parquet").read_bytes(), "b.png": png(2)})
    rows, _ = make_images(Url("memory://bucket/t.parquet"))
    assert rows[1].target.read() == png(2)
    with pytest.raises(SourceError, match="a remote table names a file of this machine"):
        rows[0].target.read()


@pytest.mark.parametrize(
    ("table", "named", "fine"),
    [
        ("hf://datasets/me/edits@1/data/t.jsonl", "hf://datasets/me/edits@1/b.png", True),
        ("hf://datasets/me/edits@1/data/t.jsonl", "hf://datasets/me/private/b.png", False),
        ("hf://me/model/t.jsonl", "hf://me/model/b.png", True),
        ("hf://me/model/t.jsonl", "hf://me/other/b.png", False),
    ],
)
def test_a_table_on_the_hub_names_files_of_its_own_repository(table: str, named: str, fine: bool) -> None:
    """A private one of whoever builds is at the same host."""
    folder = TableFolder(parent(location(table)))
    assert (
        str(folder.file("../../../../../b.png"))
        == named.rpartition("/")[0].replace("private", "edits@1").replace("other", "model") + "/b.png"
    )
    if fine:
        assert str(folder.file(named)) == named
    else:
        with pytest.raises(SourceError, match="names another server than its own"):
            folder.file(named)


def test_a_pickle_in_arrow_metadata_is_never_opened(tmp_path: Path) -> None:
    """CVE-2023-47248: an extension type of Python's, which pyarrow unpickled before 14.0.1."""

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "run"),))

    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Evil())}
    schema = pa.schema([pa.field("image", pa.string(), metadata=metadata), pa.field("text", pa.string())])
    pq.write_table(pa.table([["a.png"], ["x"]], schema=schema), tmp_path / "a.parquet")
    (tmp_path / "a.png").write_bytes(png())
    make_images(tmp_path / "a.parquet")
    (tmp_path / "saved").mkdir()
    with pa.ipc.new_stream(tmp_path / "saved/data.arrow", schema) as file:
        file.write_table(pa.table([["../a.png"], ["x"]], schema=schema))
    (tmp_path / "saved/state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    make_images(tmp_path / "saved")
    assert not (tmp_path / "run").exists()


def test_a_name_of_a_megabyte_in_a_tar_is_not_shown(tmp_path: Path) -> None:
    message = refusal(tar(tmp_path / "a.tar", {"x" * 1_000_000: "", "a.png": png()}))
    assert "x…: the name is too long (expected at most 4096 bytes, found 1000000)" in message
    assert len(message) < 500


def test_a_local_table_may_name_images_behind_urls(tmp_path: Path) -> None:
    put({"c.png": png(3)})
    (tmp_path / "d.png").write_bytes(png(4))
    lines = ["image_path,text", "memory://bucket/c.png,red", f"file://{tmp_path}/d.png,red", "git://x/a.png,red"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    rows, problems = make_images(tmp_path / "t.csv")
    assert [row.target.read() for row in rows] == [png(3), png(4)]
    assert rows[0].name == "bucket/c"
    assert [problem.what for problem in problems] == ["git:// is not supported (found git://x/a.png)"]


def test_a_missing_remote_image_is_a_problem_of_its_row(tmp_path: Path, model: Path) -> None:
    put({"data/t.csv": "image,control,prompt\na.png,missing.png,red\n", "data/a.png": png(1, 64)})
    result = build("memory://bucket/data/t.csv", tmp_path / "out", model, "--dry-run", "--json")  # type: ignore[arg-type]
    [problem] = json.loads(result.stdout)["problems"]
    assert problem["where"] == "memory://bucket/data/t.csv:2"
    assert problem["what"] == "memory://bucket/data/missing.png: the file does not exist"


def test_postscript_in_a_png_is_a_problem_of_its_row(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "started"
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    Image.init()  # Pillow knows the parser of PostScript now
    write_pairs(tmp_path / "data")
    image = tmp_path / "data/target_images/china.png"
    image.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    for options in (("--dry-run", "--json"), ()):
        result = build(tmp_path / "data", tmp_path / "out", model, *options)
        said = result.stdout + result.stderr
        assert said.count(str(image)) == 1
        assert "this is not an image in a supported format" in said
        assert "found PostScript" in said
        assert not mark.exists()


def test_a_server_that_lists_nothing_may_have_a_table_and_a_missing_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_cache.storage.remote.FIRST_WAIT", 0)
    put({"data/a.png": png(), "data/metadata.csv": "file_name,text\na.png,red\n"})
    with monkeypatch.context() as patch:
        patch.setattr(type(fsspec.filesystem("memory")), "find", lambda *_, **__: {})
        [row], problems = make_images(Url("memory://bucket/data"))
    assert (row.target.read(), problems) == (png(), [])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(QwenCacheError, match=r"/data/: listing failed 5 times \(found ClientConn") as caught:
            make_images(Url(f"http://127.0.0.1:{unused.getsockname()[1]}/data/"))
    assert not isinstance(caught.value, SourceError)


@pytest.mark.usefixtures("s3")
def test_what_a_url_does_not_hold_is_refused(tmp_path: Path) -> None:
    assert "there is no such folder, or the server does not list it" in refusal("memory://bucket/nowhere/")
    assert "memory://bucket/nowhere.csv: the file does not exist" in refusal("memory://bucket/nowhere.csv")
    put({"cache/cache.json": "{}", "pairs/target_images/.hidden.png": png(), "pairs/target_images/a.txt": ""})
    assert "this is a cache" in refusal("memory://bucket/cache")
    assert "memory://bucket/pairs/target_images: there is no image" in refusal("memory://bucket/pairs")
    datasets.Dataset.from_dict({"image": ["a.png"], "text": ["red"]}).save_to_disk(tmp_path / "saved")
    assert "must be local" in refusal(upload(tmp_path / "saved"))
