"""Promises of a validation cache: prompts with controls or without, encoded as the same rows of the cache, by the
same encoders; it is planned, continued, inspected and refused like any cache, and never trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as stock_edit_plus

from qwen_cache import open_cache
from qwen_cache.format.cache import Sample
from qwen_cache.format.verify import verify_cache
from qwen_cache.sources.sizes import Resolution, SourceImage, sizes_to_generate

from .support.caches import build, contents, plan
from .support.commands import refused, run
from .support.crash import Crash, crash_after
from .support.fake_lanes import FakeLanes
from .support.marks import slow
from .support.photographs import photograph
from .support.sources import write_mixed

NAMES = ("cat", "china", "cup", "flower")


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture
def controls(pairs: Path, tmp_path: Path) -> Path:
    """The controls of the pairs with their prompts, without targets."""
    folder = tmp_path / "validation"
    shutil.copytree(pairs / "control_images", folder)
    for prompt in (pairs / "target_images").glob("*.txt"):
        shutil.copy(prompt, folder)
    return folder


def to_set(**settings: Any) -> list[str]:
    """Options for settings of the section `validation`."""
    return [it for name, value in settings.items() for it in ("--set", f"validation.{name}={json.dumps(value)}")]


def by_name(folder: Path) -> dict[str, Sample]:
    return {sample.name: sample for sample in open_cache(folder)}


# ---- what is stored --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["edit-plus", slow("qwen-image-21"), slow("t2i")])
def test_tensors_are_those_of_the_same_rows_with_targets(
    variant: str, pairs: Path, controls: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """With the real encoders, bit for bit, built in one run and alone."""
    source, model = pairs, tiny_model(variant)
    if variant == "qwen-image-21":  # a table has rows without control too
        source = write_mixed(tmp_path / "mixed")
        rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        controls = source.with_name("validation.jsonl")
        without = [{name: value for name, value in row.items() if name not in ("target", "mask")} for row in rows]
        controls.write_text("".join(json.dumps(row) + "\n" for row in without), encoding="utf-8")
    if variant == "t2i":
        shutil.rmtree(pairs / "control_images")
        controls = tmp_path / "prompts.txt"
        prompts = [(pairs / "target_images" / f"{name}.txt").read_text(encoding="utf-8") for name in NAMES]
        controls.write_text("\n\n".join(prompts), encoding="utf-8")
    out, alone = tmp_path / "shards", tmp_path / "alone"
    assert build(source, out, model, "--validation", str(controls)).code == 0
    if variant != "edit-plus":  # with fakes the other tests show it in less time
        assert build(source, alone, model, "--validation", str(controls), "--only-validation").code == 0
        assert contents(out / "validation") == contents(alone / "validation")
        assert not (alone / "cache.json").exists()
    assert verify_cache(out) == verify_cache(out / "validation") == []
    with_targets, to_generate = (list(open_cache(folder)) for folder in (out, out / "validation"))
    contents_of_rows = {(sample.prompt, sample.row.meta.inputs.controls) for sample in with_targets}
    assert len(to_generate) == len(contents_of_rows)
    for sample in to_generate:
        assert "image_latents" not in sample
        (same, *_) = [
            each
            for each in with_targets
            if (each.prompt, each.row.meta.inputs.controls) == (sample.prompt, sample.row.meta.inputs.controls)
        ]
        assert sample.row.meta.recipe == same.row.meta.recipe
        for name in sample.row.meta.tensors.keys() - {"thumbnails"}:
            assert torch.equal(sample[name], same[name]), (sample.name, name)
        left = {"image_latents", "thumbnails", "edit_mask"}
        assert same.row.meta.tensors.keys() - sample.row.meta.tensors.keys() <= left
        assert sample.row.meta.image_positions == same.row.meta.image_positions


@pytest.mark.usefixtures("fast")
def test_every_kind_of_source_gives_the_same_keys(controls: Path, tmp_path: Path, model: Path) -> None:
    rows = [{"control": f"{name}.png", "prompt": f"paint {name}", "seed": i} for i, name in enumerate(NAMES)]
    rows[0] |= {"width": 96, "height": 160}
    (controls / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ["control", "prompt", "seed", "width", "height"]
    table = "\n".join(map(",".join, [columns, *([str(row.get(it, "")) for it in columns] for row in rows)]))
    (controls / "rows.csv").write_text(table)
    written = [{**row, "control": str(controls / str(row["control"]))} for row in rows]
    keys = []
    for name, options in (
        ("jsonl", to_set(source=str(controls / "rows.jsonl"))),
        ("csv", to_set(source=str(controls / "rows.csv"))),
        ("yaml", to_set(prompts=written)),
    ):
        assert build(tmp_path, tmp_path / name, model, *options, "--only-validation").code == 0
        samples = list(open_cache(tmp_path / name / "validation"))
        assert [sample.seed for sample in samples] == [0, 1, 2, 3]
        assert samples[0].img_shapes[0] == (1, 10, 6)
        keys.append([sample.key for sample in samples])
    assert keys[0] == keys[1] == keys[2]
    assert [sample.name for sample in samples] == ["prompt-1", "prompt-2", "prompt-3", "prompt-4"]


@pytest.mark.usefixtures("fast")
def test_the_trigger_word_is_in_prompts_where_they_name_it(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """A source is read as for training, with prefix and trigger word; a prompt of the settings is as it is typed."""
    (tmp_path / "prompts.txt").write_text("a cat\n[trigger] on a chair\n")
    options = to_set(source=str(tmp_path / "prompts.txt"), prompts=["a dog", "[trigger] at night"])
    options += ["--set", "data.trigger_word=sks", "--set", "data.prompt_prefix=a photo,", "--only-validation"]
    assert build(tmp_path, tmp_path / "shards", tiny_model("t2i"), *options).code == 0
    prompts = [sample.prompt for sample in by_name(tmp_path / "shards" / "validation").values()]
    assert prompts == ["a photo, sks a cat", "a photo, sks on a chair", "a dog", "sks at night"]


@pytest.mark.usefixtures("fast")
def test_seeds_and_sizes_are_other_samples_and_targets_are_kept(pairs: Path, tmp_path: Path, model: Path) -> None:
    control = str(pairs / "control_images" / "china.png")
    row = {"prompt": "make it night", "control": control}
    prompts = [row, {**row, "seed": 7}, {**row, "seed": 8}, {**row, "width": 96, "height": 64}, row]
    assert build(pairs, tmp_path / "shards", model, *to_set(source=str(pairs), prompts=prompts)).code == 0
    found = by_name(tmp_path / "shards" / "validation")
    assert list(found) == [*NAMES, "prompt-1", "prompt-2", "prompt-3", "prompt-4"]  # equal content is stored once
    assert found["prompt-1"].row.source_rows == 2
    assert [found[f"prompt-{i}"].seed for i in (1, 2, 3, 4)] == [None, 7, 8, None]
    assert len({sample.key for sample in found.values()}) == 8
    assert ["image_latents" in sample for sample in found.values()] == [True] * 4 + [False] * 4
    cached = {sample.key for sample in open_cache(tmp_path / "shards")}
    assert {found["cat"].key, found["china"].key} < cached
    assert found["cup"].key not in cached  # its mask is not read: nothing is trained on it


@pytest.mark.usefixtures("fast")
def test_an_edit_model_generates_from_text_alone_where_a_row_says_so(
    controls: Path, tmp_path: Path, model: Path
) -> None:
    """Lines of a text file, prompts of the settings, empty cells of a table; a missing column is a mistake."""
    (tmp_path / "prompts.txt").write_text("a cat\n\n  [[a dog]] on a beach\r\n", encoding="utf-8")
    options = to_set(source=str(tmp_path / "prompts.txt"), prompts=["a bird"])
    assert build(tmp_path, tmp_path / "shards", model, *options, "--only-validation").code == 0
    found = by_name(tmp_path / "shards" / "validation")
    assert {name: sample.prompt for name, sample in found.items()} == {
        "prompts/1": "a cat",
        "prompts/3": "[[a dog]] on a beach",
        "prompt-1": "a bird",
    }
    assert {sample.img_shapes for sample in found.values()} == {((1, 8, 8),)}
    assert {tuple(sample.row.meta.tensors) for sample in found.values()} == {("prompt_embeds", "empty_prompt_embeds")}
    (controls / "t.csv").write_text("control,prompt\ncat.png,x\n,y\n")
    assert (
        build(tmp_path, tmp_path / "t", model, "--validation", str(controls / "t.csv"), "--only-validation").code == 0
    )
    assert list(by_name(tmp_path / "t" / "validation")) == ["cat", "t/3"]
    (controls / "none.csv").write_text("prompt\nx\n")
    result = build(tmp_path, tmp_path / "n", model, "--validation", str(controls / "none.csv"), "--only-validation")
    assert (result.code, "no column holds the control" in result.stderr) == (2, True)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_an_image_to_generate_has_the_size_that_the_stock_pipelines_choose() -> None:
    for controls in ([(640, 480)], [(333, 777)], [(640, 480), (1920, 700)], [(100, 100), (90, 101), (3000, 2000)]):
        images = [SourceImage(f"{i}.png", size) for i, size in enumerate(controls)]
        width, height = controls[-1]
        stock = stock_edit_plus.calculate_dimensions(1024 * 1024, width / height)
        sizes = sizes_to_generate(images, None, Resolution())
        assert sizes[0] == stock
        each = [stock_edit_plus.calculate_dimensions(stock_edit_plus.VAE_IMAGE_SIZE, w / h) for w, h in controls]
        assert sizes[1:] == tuple(each)
        assert sizes_to_generate(images, (1328, 1024), Resolution())[0] == (1328, 1024)
    assert sizes_to_generate([], None, Resolution()) == ((1024, 1024),)  # default_sample_size × vae_scale_factor
    assert sizes_to_generate([], (640, 352), Resolution()) == ((640, 352),)


def test_sizes_follow_the_settings_of_the_cache() -> None:
    control = [SourceImage("a.png", (1000, 500))]
    two = Resolution(areas=(128 * 128, 256 * 256), all=True)
    assert sizes_to_generate(control, None, two) == ((352, 192), (352, 192))  # one of them: the largest that it fills
    assert sizes_to_generate([], None, two) == ((256, 256),)
    fixed = Resolution(areas=(), fixed=((512, 768), (768, 512), (1024, 512), (512, 256)))
    assert sizes_to_generate(control, None, fixed) == ((512, 256), (512, 256))
    assert sizes_to_generate([], None, fixed) == ((768, 512),)
    small = Resolution(upscale=False)
    assert sizes_to_generate([SourceImage("a.png", (130, 70))], None, small) == ((128, 64), (128, 64))


# ---- plans, stops, damage --------------------------------------------------------------------------------------------


def test_it_is_planned_and_built_beside_the_cache_with_one_loading(
    pairs: Path, controls: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out, options = tmp_path / "shards", ["--validation", str(controls)]
    before = plan(pairs, out, model)
    found = plan(pairs, out, model, *options)
    ours = found.pop("validation")
    assert found == before | {"bytes_free": found["bytes_free"]}
    assert (ours["to_encode"], ours["removed"], len(ours["samples"])) == (4, [], 4)
    assert ours["image_tokens"] < found["image_tokens"]
    assert not out.exists()
    result = build(pairs, out, model, *options, "--json")
    assert result.code == 0
    made = json.loads(result.stdout)
    assert made["encoded"] == made["validation"]["encoded"] == 4
    assert f"{out}/validation: images to generate, for validation" in result.stderr
    assert [lanes.encoded for lanes in fast] == [[*NAMES, *NAMES]]
    assert (out / "qwen.yaml").read_bytes() == (out / "validation" / "qwen.yaml").read_bytes()
    again = build(pairs, out, model, *options)
    assert f"nothing to do: {out}/validation already holds this source" in again.stderr
    (controls / "cup.txt").write_text("another prompt")
    (controls / "flower.png").unlink()
    (controls / "flower.txt").unlink()
    ours = plan(pairs, out, model, *options)["validation"]
    assert [(it["name"], it["reasons"]) for it in ours["samples"]] == [("cup", ["prompt"])]
    assert ours["removed"] == ["flower"]
    assert build(pairs, out, model, *options, "--dry-run", "--check").code == 1
    cache = contents(out)
    assert build(pairs, out, model, *options).code == 0
    assert [lanes.encoded for lanes in fast[1:]] == [["cup"]]
    after = contents(out)
    outside = {name for name in cache if not name.startswith("validation")}
    assert {name: after[name] for name in outside} == {name: cache[name] for name in outside}
    assert list(by_name(out / "validation")) == ["cat", "china", "cup"]
    assert build(pairs, out, model).code == 0  # without its settings it stays as it is
    assert list(by_name(out / "validation")) == ["cat", "china", "cup"]


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("after", [30, slow(3), slow(12), slow(20), slow(40), slow(55)])
def test_a_build_that_dies_anywhere_continues_to_the_same_bytes(
    after: int, pairs: Path, controls: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--validation", str(controls)]
    assert build(pairs, tmp_path / "whole", model, *options).code == 0
    out = tmp_path / "shards"
    with monkeypatch.context() as patch:
        crash_after(after, patch)
        with pytest.raises(Crash):
            build(pairs, out, model, *options)
    assert build(pairs, out, model, *options).code == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_repair_encodes_its_damaged_samples(
    pairs: Path, controls: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out, options = tmp_path / "shards", ["--validation", str(controls)]
    assert build(pairs, out, model, *options).code == 0
    before, sample = contents(out), by_name(out / "validation")["china"]
    shard = out / "validation" / sample.row.shard
    data = bytearray(shard.read_bytes())
    data[sample.row.entry.tensor_offsets()["prompt_embeds"]] ^= 1
    shard.write_bytes(data)
    assert build(pairs, out, model, *options, "--repair").code == 0
    assert [lanes.encoded for lanes in fast[1:]] == [["china"]]
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_with_slices_only_the_first_builds_it(pairs: Path, controls: Path, tmp_path: Path, model: Path) -> None:
    for number in (1, 2):
        options = ["--validation", str(controls), "--slice", f"{number}/2"]
        assert build(pairs, tmp_path / str(number), model, *options).code == 0
    assert (tmp_path / "1" / "validation" / "cache.json").is_file()
    assert not (tmp_path / "2" / "validation").exists()
    merged = run("qwen-cache", "merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "all")
    assert merged.code == 0
    assert [sample.name for sample in open_cache(tmp_path / "all")] == list(NAMES)
    elsewhere = to_set(source=str(controls), cache=str(tmp_path / "elsewhere"))
    assert build(pairs, tmp_path / "all", model, *elsewhere, "--only-validation").code == 0
    assert contents(tmp_path / "elsewhere") == contents(tmp_path / "1" / "validation")
    assert not (tmp_path / "all" / "validation").exists()


# ---- what people see -------------------------------------------------------------------------------------------------


def test_inspect_says_that_they_are_to_be_generated(controls: Path, tmp_path: Path, model: Path) -> None:
    """With thumbnails of the controls alone; one sample has none."""
    prompts = [{"prompt": "make it night", "control": str(controls / "cat.png"), "seed": 7}]
    out = tmp_path / "shards" / "validation"
    assert build(tmp_path, tmp_path / "shards", model, *to_set(prompts=prompts), "--only-validation").code == 0
    page = tmp_path / "page.html"
    result = run("qwen-cache", "inspect", out, "--scan", "--html", page)
    assert result.code == 0
    assert "1, 0 with an edit mask, 1 to generate: without target" in run("qwen-cache", "inspect", out).stdout
    text = page.read_text(encoding="utf-8")
    rows = json.loads(text.split('id="samples">')[1].split("</script>")[0])
    (row,) = (dict(zip(rows["columns"], values, strict=True)) for values in rows["rows"])
    assert row["to_generate"] == "to generate, seed 7"
    assert [title for title, _ in row["images"]] == ["control"]
    shown = run("qwen-cache", "inspect", out, "--sample", "prompt-1").stdout
    assert "to generate" in shown
    assert "seed" in shown
    refused(
        run("qwen-cache", "inspect", out, "--source", controls),
        f"{out}: inspect does not compare images to generate with their source",
        "`qwen-cache build --only-validation --dry-run`",
    )
    refused(
        run("qwen-cache", "migrate", "v2", "v1", out, "--out", tmp_path / "v1"),
        "format v1 has no edit masks, attention, seeds, rejected images, directions of sliders or images to generate, "
        "but this cache does (found prompt-1)",
    )
    strip = by_name(out)["prompt-1"].numpy("thumbnails")
    assert (strip.dtype, bytes(strip[:3])) == (np.uint8, b"\xff\xd8\xff")


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("command", ["plan", slow("run")])
def test_it_is_not_trained(command: str, controls: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards" / "validation"
    assert build(tmp_path, tmp_path / "shards", model, "--validation", str(controls), "--only-validation").code == 0
    refused(
        run("qwen-train", command, out, "--model", model),
        f"{out}: samples without target cannot be trained: they are images to generate, for validation",
        "(found 4 of 4 samples without target)",
        "name this one as validation.cache",
    )


PROBLEMS: list[tuple[Any, str]] = [
    ({"prompt": "", "control": "cat.png"}, "the prompt is empty"),
    ({"prompt": "x", "control": "lost.png"}, "lost.png does not exist"),
    ({"prompt": "x", "control": "cat.png", "width": 64}, "the height is missing"),
    (
        {"prompt": "x", "control": "cat.png", "width": 72, "height": 64},
        "72×64 cannot be generated: sides are",
    ),
    ({"prompt": "x", "control": "cat.png", "width": "wide", "height": 64}, "'wide', expected a whole number from 1"),
    ({"prompt": "x", "control": "cat.png", "seed": -1}, "the seed 'seed' is -1, expected a whole number from 0"),
    ({"prompt": "x", "control": "cat.png", "seed": 1 << 63}, "expected a whole number from 0 to 9223372036854775807"),
    ({"prompt": "x", "control": "cat.png", "seed": True}, "the seed 'seed' is True"),
]


def test_problems_are_listed_before_anything_is_encoded(
    pairs: Path, controls: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    rows = [row for row, _ in PROBLEMS] + [{"prompt": "good", "control": "cat.png"}]
    (controls / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["--validation", str(controls / "rows.jsonl")]
    result = build(pairs, tmp_path / "shards", model, *options)
    assert result.code == 2
    dry = json.loads(build(pairs, tmp_path / "shards", model, *options, "--dry-run", "--json").stdout)
    assert (dry["problems"], len(dry["validation"]["refused"])) == ([], 1)
    found = dry["validation"]["problems"]
    by_line = {int(problem["where"].rpartition(":")[2]): problem["what"] for problem in found}
    assert by_line.keys() == set(range(1, len(PROBLEMS) + 1))
    for number, (_, what) in enumerate(PROBLEMS, 1):
        assert what in by_line[number]
    assert "nothing will be encoded until these are fixed (found 8 problems)" in result.stderr
    assert not fast
    assert build(pairs, tmp_path / "shards", model, *options, "--on-error", "skip").code == 0
    assert [sample.prompt for sample in open_cache(tmp_path / "shards" / "validation")] == ["good"]


REFUSALS: list[tuple[Sequence[str], str]] = [
    (["--only-validation"], "there is nothing to build for validation (found no source and no prompts)"),
    (["--validation", "CONTROLS", "--format", "v1"], "format v1 cannot hold images to generate"),
    (["--validation", "CONTROLS", *to_set(cache="none")], "no validation cache is wanted, but it has rows"),
    (["--validation", "CONTROLS", *to_set(cache="OUT")], "the validation cache would replace the cache"),
    (
        ["--validation", "CONTROLS", *to_set(cache="CONTROLS")],
        "the validation cache would be among the images that it is made from",
    ),
    (
        ["--validation", "CONTROLS", *to_set(cache="https://host/validation")],
        "https://host/validation: caches are not written there",
    ),
    (to_set(prompts=[{"control": "a.png"}]), "validation.prompts"),
    (to_set(prompts=[{"prompt": "x", "contol": "a.png"}]), "validation.prompts"),
    (["--validation", "lost.txt"], "lost.txt: the file does not exist"),
]


@pytest.mark.parametrize(("options", "what"), REFUSALS, ids=[what[:40] for _, what in REFUSALS])
def test_refusals(options: Sequence[str], what: str, pairs: Path, controls: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards"
    given = [each.replace("CONTROLS", str(controls)).replace("OUT", str(out)) for each in options]
    result = build(pairs, out, model, *given)
    assert result.code == 2
    assert what in result.stderr
    assert not out.exists()


@pytest.mark.usefixtures("fast")
def test_a_text_to_image_model_takes_prompts_alone(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    photograph("china.jpg").resize((64, 64)).save(tmp_path / "china.png")
    prompts = ["a cat", {"prompt": "make it night", "control": str(tmp_path / "china.png")}]
    result = build(tmp_path, tmp_path / "shards", tiny_model("t2i"), *to_set(prompts=prompts), "--only-validation")
    assert result.code == 2
    assert "validation.prompts[1]" in result.stderr
    assert "takes 0 control images, found 1" in result.stderr
