"""A row may hold the direction of a slider: two further prompts for its images, encoded as prompts are, kept by every
command, and refused where they have no place. A row without one is as before."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from qwen_cache import open_cache, webdataset
from qwen_cache.errors import SourceError
from qwen_cache.format.identity import Slider
from qwen_cache.service.client import Client
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.detect import Content, read_content, reading
from qwen_cache.torch import CacheBatches, CacheDataset

from .support.caches import SMALL, build, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes
from .support.judge import assert_same, by_name, image, stock_pipeline, transformer_inputs
from .support.serving import png, running, service_job

TinyModel = Callable[[str], Path]
EMBEDS = ("slider_positive_embeds", "slider_negative_embeds")
CONTROLS = {"edit": [("flower.jpg", (100, 150)), ("china.jpg", (150, 100))], "alone": [], "none": []}
ROWS = {
    "edit": ("a face", "an old face, with wrinkles", "a young face"),
    "alone": ("a dog", "an old dog", "a very young dog"),
    "none": ("a tree", None, None),
}
"""The prompts of each row; `edit` has two controls, `none` no direction."""


def write_rows(folder: Path, rows: dict[str, tuple[str | None, ...]], *, target: bool = True) -> Path:
    """A table of rows and their images."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for name, prompts in rows.items():
        record: dict[str, Any] = {"target": f"{name}.png"} if target else {"seed": 3, "width": 96, "height": 128}
        image("coffee.png", (128, 128)).save(folder / f"{name}.png")
        for i, each in enumerate(CONTROLS[name.partition(" ")[0]]):
            image(*each).save(folder / f"{name} control {i}.png")
            record.setdefault("control", []).append(f"{name} control {i}.png")
        texts = zip(("prompt", "positive_prompt", "negative_prompt"), prompts, strict=False)
        records.append(record | {role: text for role, text in texts if text is not None})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("sliders") / "source", ROWS)


@pytest.fixture(scope="module")
def cache(source: Path, model: Path) -> Path:
    result = build(source, source.parent / "shards", model)
    assert result.code == 0, result.stderr
    return source.parent / "shards"


# ---- the cache -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_areas")
def test_the_prompts_are_encoded_as_a_prompt_is(cache: Path, model: Path, tmp_path: Path) -> None:
    """The same as by the stock pipeline, and by a build whose prompt each of them is."""
    samples = by_name(open_cache(cache))
    assert {name: sample.slider for name, sample in samples.items()} == {
        name: Slider(more, less) if more and less else None for name, (_, more, less) in ROWS.items()
    }
    pipeline, controls = stock_pipeline(model, "edit-plus"), [image(*each) for each in CONTROLS["edit"]]
    directed = {name: prompts for name, prompts in ROWS.items() if name != "none"}
    rows = {f"{name} {i}": (prompts[i],) for name, prompts in directed.items() for i, _ in enumerate(EMBEDS, 1)}
    built = build(write_rows(tmp_path / "own", rows), tmp_path / "shards", model)
    assert built.code == 0, built.stderr
    own = by_name(open_cache(tmp_path / "shards"))
    for i, embeds in enumerate(EMBEDS, 1):
        for name in directed:
            assert_same(samples[name][embeds], own[f"{name} {i}"]["prompt_embeds"])
        assert_same(
            samples["edit"][embeds], transformer_inputs(pipeline, controls, ROWS["edit"][i] or "").prompt_embeds
        )
        assert embeds not in samples["none"]


def test_qwen_image_21_has_them_too(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Its embeddings lack the rows of image tokens; their positions hold for all prompts."""
    more = build(write_rows(tmp_path / "a", {"edit": ROWS["edit"]}), tmp_path / "more", tiny_model("qwen-image-21"))
    rows = {"edit": ROWS["edit"][1:2]}
    own = build(write_rows(tmp_path / "b", rows), tmp_path / "own", tiny_model("qwen-image-21"))
    assert (more.code, own.code) == (0, 0), more.stderr
    (sample,), (expected,) = open_cache(tmp_path / "more"), open_cache(tmp_path / "own")
    assert_same(sample[EMBEDS[0]], expected["prompt_embeds"])
    assert sample.row.meta.image_positions == expected.row.meta.image_positions != ()


def test_every_reader_gives_them_with_the_prefix_that_is_stored_once(cache: Path) -> None:
    samples = {sample.key: sample for sample in open_cache(cache)}
    edit = by_name(open_cache(cache))["edit"]
    prefix = edit.row.meta.prefix_length
    assert prefix > 20
    for item in (*CacheDataset(cache), *webdataset.open(cache)):
        sample = samples[item["key"]]
        for name in EMBEDS:
            assert (name in item) == (name in sample) == (sample.slider is not None)
            if name in sample:
                whole = sample[name]
                shared = sample.row.meta.prefix_length
                assert len(whole) == sample.shape(name)[0] + shared
                assert torch.equal(whole[:shared], sample["prompt_embeds"][:shared])
                assert torch.equal(item[name], whole)
                assert torch.equal(torch.from_numpy(sample.numpy(name).copy()), whole)
                copied = torch.empty_like(whole)
                sample.copy_into(name, copied)
                assert torch.equal(copied, whole)
    assert not any("slider" in name for batch in CacheBatches(cache, epochs=1) for name in batch)


def test_rows_without_one_keep_their_keys(cache: Path, model: Path, tmp_path: Path) -> None:
    """So do their bytes, and the columns of an index without any; each of the two prompts is part of the key."""
    without = write_rows(tmp_path / "without", {name: prompts[:1] for name, prompts in ROWS.items()})
    planned = plan(without, cache, model)
    assert (planned["cached"], planned["to_encode"], planned["text_only"]) == (1, 2, 2)
    assert planned["reasons"] == {"slider": 2}
    for place in (1, 2):
        edit = [*ROWS["edit"]]
        edit[place] = "another face"
        changed = plan(write_rows(tmp_path / f"{place}", {**ROWS, "edit": tuple(edit)}), cache, model)
        assert (changed["cached"], changed["reasons"]) == (2, {"slider": 1})
    only = tmp_path / "only"
    assert run("qwen-cache", "merge", cache, "--select", "none", "--out", only).code == 0
    names = {"slider_positive", "slider_negative", *EMBEDS}
    assert not names & set(open_cache(only).table.column_names)
    assert names <= set(open_cache(cache).table.column_names)
    assert b"slider" not in open_cache(only)[0].row.meta.to_bytes(2)


def test_merge_compresses_them_and_verify_encodes_them_again(
    cache: Path, source: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert run("qwen-cache", "merge", cache, "--out", out, "--compression", "zstd").code == 0
    for one, other in zip(open_cache(cache), open_cache(out), strict=True):
        assert (one.key, one.slider) == (other.key, other.slider)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.tensors().items())
    again = run("qwen-cache", "verify", out, "--re-encode", "3", "--source", source, "--model", model)
    assert again.code == 0, again.stderr
    row = by_name(open_cache(out))["edit"].row
    path, place = out / row.shard, row.entry.tensor_offsets()[EMBEDS[1]] + 40
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)
    result = run("qwen-cache", "verify", out, "--json")
    assert result.code == 1
    assert any("slider_negative_embeds of " in finding["what"] for finding in json.loads(result.stdout)["findings"])


def test_inspect_shows_the_prompts(cache: Path, tmp_path: Path) -> None:
    assert "3, 0 with an edit mask, 2 with the direction of a slider" in run("qwen-cache", "inspect", cache).stdout
    shown = " ".join(run("qwen-cache", "inspect", cache, "--sample", "edit").stdout.split())
    assert "positive an old face, with wrinkles negative a young face" in shown
    described = json.loads(run("qwen-cache", "inspect", cache, "--sample", "edit", "--json").stdout)
    assert described["slider"] == {"positive": ROWS["edit"][1], "negative": ROWS["edit"][2]}
    page = tmp_path / "page.html"
    assert run("qwen-cache", "inspect", cache, "--html", page).code == 0
    rows = json.loads(page.read_text(encoding="utf-8").split('id="samples">')[1].split("</script>")[0])
    found = [dict(zip(rows["columns"], values, strict=True)) for values in rows["rows"]]
    assert {row["name"]: row["slider"] for row in found} == {
        name: [more, less] if more else None for name, (_, more, less) in ROWS.items()
    }


def test_they_are_refused_where_they_have_no_place(cache: Path, source: Path, model: Path, tmp_path: Path) -> None:
    refused(run("qwen-cache", "migrate", "v2", "v1", cache, "--out", tmp_path / "v1"), "directions of sliders", "edit")
    found = "2 rows, such as edit"
    refused(
        build(source, tmp_path / "v1", model, "--format", "v1"), "format v1 cannot hold directions of sliders", found
    )
    export = "qwen-cache", "export", cache, "--to", "musubi", "--out", tmp_path / "musubi"
    refused(run(*export), "musubi-tuner cannot hold slider_negative_embeds", "--leave-out slider_positive_embeds")
    left_out = [word for name in (*EMBEDS, "empty_prompt_embeds") for word in ("--leave-out", name)]
    assert run(*export, *left_out).code == 0


# ---- prompts alone ---------------------------------------------------------------------------------------------------


def test_a_table_of_directions_needs_no_target(source: Path, model: Path, tmp_path: Path) -> None:
    """Its rows are images to generate, with the controls, seed and size that it gives."""
    rows = {name: prompts for name, prompts in ROWS.items() if name != "none"}
    table = write_rows(tmp_path / "prompts", rows, target=False) / "metadata.jsonl"
    result = build(table, tmp_path / "shards", model)
    assert result.code == 0, result.stderr
    samples = {sample.prompt: sample for sample in open_cache(tmp_path / "shards")}
    edit, alone = samples["a face"], samples["a dog"]
    assert [sample.row.meta.inputs.target for sample in (edit, alone)] == [None, None]
    assert [(sample.seed, sample.img_shapes[0]) for sample in (edit, alone)] == [(3, (1, 8, 6))] * 2
    assert edit.slider == Slider(*rows["edit"][1:])  # type: ignore[arg-type]
    assert len(edit.img_shapes) == 3
    assert set(alone.tensors()) == {"prompt_embeds", "empty_prompt_embeds", *EMBEDS}
    of_source = "--source", table, "--model", model
    again = run("qwen-cache", "verify", tmp_path / "shards", "--re-encode", "2", *of_source)
    assert again.code == 0, again.stderr
    areas = SMALL[:-2]  # the dtype is that of the recipe
    compared = run("qwen-cache", "inspect", tmp_path / "shards", "--json", "--source", table, *areas)
    assert json.loads(compared.stdout)["state"] == "complete", compared.stderr
    refused(run("qwen-cache", "init", table, "--model", model), "init looks at the sizes of targets", "without init")
    table.write_text('{"prompt": "a", "positive_prompt": "b", "negative_prompt": "c", "width": 90, "height": 64}')
    odd = build(table, tmp_path / "odd", model, "--set", "data.allow_no_control=true")
    refused(odd, "90×64 cannot be generated: sides are multiples of 16 pixels")


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.csv"])
def test_prompts_need_no_columns_if_the_settings_give_the_direction(
    name: str, tiny_model: TinyModel, tmp_path: Path, fast: list[FakeLanes]
) -> None:
    """`{prompt}` is the prompt as it is encoded: trigger word, prefix and suffix included."""
    (tmp_path / name).write_text("a face\na dog\n" if name.endswith(".txt") else "prompt\na face\na dog\n")
    direction = {"positive_prompt": '"{prompt}, [trigger]"', "negative_prompt": '"a {young} face"'}
    settings = direction | {"trigger_word": "ohwx", "prompt_suffix": '", x"'}
    options = [word for key, value in settings.items() for word in ("--set", f"data.{key}={value}")]
    result = build(tmp_path / name, tmp_path / "shards", tiny_model("t2i"), *options)
    assert result.code == 0, result.stderr
    assert [(sample.prompt, sample.slider) for sample in open_cache(tmp_path / "shards")] == [
        (f"ohwx a {what}, x", (f"ohwx a {what}, x, ohwx", "a {young} face")) for what in ("face", "dog")
    ]


# ---- sources ---------------------------------------------------------------------------------------------------------


def read(source: Path, **settings: Any) -> Content:
    data = DataConfig.model_validate({"allow_no_control": True, **settings})
    return read_content(source, **reading(data) | {"captions": Captions.of(data)})


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def test_every_kind_of_source_gives_the_same_direction(tmp_path: Path) -> None:
    prompts = {"prompt": "a", "positive_prompt": "an old\na", "negative_prompt": "a young a"}
    (tmp_path / "1.png").write_bytes(png(1))
    record = {"target": "1.png", **prompts}
    (tmp_path / "a.json").write_text(json.dumps([record]))
    (tmp_path / "a.csv").write_text('target,prompt,more,less\n1.png,a,"an old\r\na",a young a \n')
    pq.write_table(pa.table({name: [value] for name, value in record.items()}), tmp_path / "a.parquet")
    texts = {f"k.{role}.txt": text.encode() for role, text in prompts.items() if role != "prompt"}
    write_tar(tmp_path / "text.tar", {"k.png": png(1), "k.txt": b"a", **texts})
    write_tar(tmp_path / "json.tar", {"k.png": png(1), "k.json": json.dumps(prompts).encode()})
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(1))
    (folder / "a.txt").write_text("a")
    named = {"columns": {"positive_prompt": "more", "negative_prompt": "less"}}
    given = {"positive_prompt": "an old\n{prompt}", "negative_prompt": "a young {prompt}"}
    sources: dict[str, dict[str, Any]] = {name: {} for name in ("a.json", "a.parquet", "text.tar", "json.tar")}
    for name, settings in {**sources, "a.csv": named, "folder": given}.items():
        content = read(tmp_path / name, **settings)
        assert content.problems == []
        assert [row.slider for row in content.rows] == [Slider("an old\na", "a young a")], name
    own = read(tmp_path / "a.json", positive_prompt="x", negative_prompt="y", prompt_prefix="photo of")
    assert own.rows[0].slider == Slider("photo of an old\na", "photo of a young a")
    ignored = {"columns": {"positive_prompt": [], "negative_prompt": []}}
    for name in ("a.json", "text.tar", "json.tar"):
        assert [row.slider for row in read(tmp_path / name, **ignored).rows] == [None]


PROBLEMS = {
    "target,positive_prompt,prompt\n1.png,b,a\n": (
        "one column of a slider's direction is there, and the other one is missing (expected positive_prompt and "
        "negative_prompt, found 'positive_prompt') → add 'negative_prompt', or name it: "
        "--set data.columns.negative_prompt=NAME; or ignore the column: --set 'data.columns.positive_prompt=[]'"
    ),
    "target,negative_prompt,prompt\n1.png,b,a\n": "found 'negative_prompt') → add 'positive_prompt'",
    "positive_prompt,prompt\nb,a\n": "one column of a slider's direction is there",
    "target,positive_prompt,negative_prompt,prompt\n1.png,b,,a\n1.png,b,c,a\n": (
        "a.csv:2: there is a positive prompt, and no negative prompt → add the negative prompt, or leave out both"
    ),
    "target,positive_prompt,negative_prompt,prompt\n1.png,b,b,a\n": "the positive and the negative prompt are the same",
    "target,positive_prompt,negative_prompt,prompt\n1.png,b,<|image_pad|>,a\n": "<|image_pad|>",
    f"target,positive_prompt,negative_prompt,prompt\n1.png,{'b' * 70_000},{'c' * 70_000},a\n": (
        "the prompt and those of the slider's direction have 140001 bytes, expected at most 131072"
    ),
    "photo,positive_prompt,negative_prompt,prompt\n1.png,b,c,a\n": "no column holds the target",
}


@pytest.mark.parametrize("text", PROBLEMS, ids=lambda text: text[:60])
def test_what_is_no_direction_is_a_problem(
    text: str, tiny_model: TinyModel, tmp_path: Path, fast: list[FakeLanes]
) -> None:
    (tmp_path / "1.png").write_bytes(png(1))
    (tmp_path / "a.csv").write_text(text)
    result = build(tmp_path / "a.csv", tmp_path / "shards", tiny_model("t2i"), "--dry-run")
    assert result.code == 2
    assert PROBLEMS[text] in " ".join(result.stderr.split())


def test_one_setting_alone_and_a_folder_with_columns_are_refused(pairs: Path, model: Path, tmp_path: Path) -> None:
    alone = build(pairs, tmp_path / "shards", model, "--set", "data.positive_prompt=old")
    refused(alone, "the direction of a slider has two prompts, which differ", "found data.positive_prompt=old")
    unquoted = build(pairs, tmp_path / "shards", model, "--set", "data.positive_prompt={prompt}, old")
    refused(unquoted, "put it in quotes: --set 'data.positive_prompt=\"{prompt}, old\"'")
    named = build(pairs, tmp_path / "shards", model, "--set", "data.columns.positive_prompt=old")
    refused(named, "a folder of images has no positive_prompt", "set data.positive_prompt and data.negative_prompt")


def test_a_server_takes_them(source: Path, model: Path, tmp_path: Path, fast: list[FakeLanes]) -> None:
    with running(service_job(model, tmp_path / "pool")) as url, Client(url, patience=600) as client:
        sample = client.encode("a face", png(1), slider=("an old face", "a young face"))
        assert sample.slider == Slider("an old face", "a young face")
        assert EMBEDS[0] in sample
        alone = {"prompt": "a face", "negative_prompt": "a young face"}
        with pytest.raises(SourceError, match="there is a negative prompt, and no positive prompt"):
            client.send(alone, [("target", png(1))])
        assert build(source, tmp_path / "here", model).code == 0
        result = run("qwen-cache", "build", source, "--at", url, "--out", tmp_path / "there")
        assert result.code == 0, result.stderr
    here, there = (open_cache(tmp_path / name) for name in ("here", "there"))
    assert [sample.key for sample in here] == [sample.key for sample in there]
    assert here.table.column_names == there.table.column_names
