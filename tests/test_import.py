"""`qwen-cache import`: caches of other trainers, written here byte for byte as those trainers write them.

The judges: diffusers' own packing, the tensors that went into the files, and the rule of FORMAT.md by which samples
without images are hashed. What a file does not say must be asked for, and what is ambiguous must be refused.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shlex
import sqlite3
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from qwen_cache import open_cache
from qwen_cache.format.identity import canonical_json, content_hash, recipe_id, sample_key
from qwen_cache.trainers import convert
from qwen_cache.trainers.files import ImportedSample

from .support.caches import contents
from .support.commands import Result, run
from .support.crash import Crash, crash_after
from .support.imports import (
    MODEL,
    WIDTH,
    TrainerSample,
    import_,
    imported,
    make,
    md5,
    write_diffusion_pipe,
    write_musubi,
    write_pieces,
    write_qflux,
)
from .support.runs import run_training

TOOLS = ("musubi", "qflux", "diffusion-pipe")


@pytest.fixture
def made() -> list[TrainerSample]:
    """Three samples, two of one size; each has one control of the target's size, as diffusion-pipe wants."""
    return [
        make("a_cat", "make it blue", [(4, 6), (4, 6)], 9, seed=1),
        make("b dog", "变成红色", [(6, 4), (6, 4)], 5, seed=2),
        make("c", "mirror it", [(4, 6), (4, 6)], 7, seed=3),
    ]


# ---- the trainers' writers -------------------------------------------------------------------------------------------


WRITE: dict[str, Callable[[Path, Sequence[TrainerSample]], Path]] = {
    "musubi": write_musubi,
    "qflux": write_qflux,
    "diffusion-pipe": write_diffusion_pipe,
}


def refused(result: Result, *parts: str) -> None:
    assert result.code == 2, result.stdout + result.stderr
    for part in parts:
        assert part in result.stderr, f"{part!r} is not in: {result.stderr}"


# ---- what comes out --------------------------------------------------------------------------------------------------


def check_equal(out: Path, samples: Sequence[TrainerSample], dtype: torch.dtype, prompts: bool, empty: bool) -> None:
    """Every sample exists once, with the tensors that were written."""
    found = {sample["image_latents"].float().sum().item(): sample for sample in open_cache(out)}
    assert len(found) == len(samples)
    for sample in samples:
        stored = found[sample.packed[0].float().sum().item()]
        expected = {"image_latents": sample.packed[0], "prompt_embeds": sample.embeds}
        if len(sample.latents) > 1:
            expected["control_latents"] = torch.cat(sample.packed[1:])
        if empty:
            expected["empty_prompt_embeds"] = sample.empty
        tensors = stored.tensors()
        assert tensors.keys() == expected.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, expected[name].to(dtype)), name
        assert [list(shape) for shape in stored.img_shapes] == sample.shapes
        assert stored.prompt == (sample.prompt if prompts else "")


@pytest.mark.parametrize("tool", TOOLS)
def test_samples_equal_those_that_the_trainer_wrote(tool: str, made: list[TrainerSample], tmp_path: Path) -> None:
    if tool == "qflux":  # it casts all to float16
        made = [replace(s, latents=tuple(z.half() for z in s.latents), embeds=s.embeds.half()) for s in made]
        made = [replace(s, empty=s.empty.half()) for s in made]
    out = imported(tool, WRITE[tool](tmp_path / "theirs", made), tmp_path / "out")
    dtype = torch.float32 if tool == "qflux" else torch.bfloat16
    check_equal(out, made, dtype, prompts=tool != "qflux", empty=tool == "qflux")
    result = run("qwen-cache", "verify", out, "--json")
    assert json.loads(result.stdout)["findings"] == []
    overview = json.loads(run("qwen-cache", "inspect", out, "--json").stdout)["recipes"]["default"]
    assert overview["recipe"] == {
        "imported_from": tool,
        "importer_version": 1,
        "claimed": {"model": MODEL, "pipeline": "QwenImageEditPlusPipeline"},
        "pipeline": "QwenImageEditPlusPipeline",
        "dtype": str(dtype)[6:],
    }
    assert run("qwen-cache", "inspect", out).code == 0


def test_musubi_takes_any_number_of_controls_of_any_size(tmp_path: Path) -> None:
    samples = [
        make("three", "p", [(4, 6), (2, 3), (5, 2), (3, 3)], 5, seed=1),
        make("one", "q", [(2, 2)] * 2, 4, seed=2),
    ]
    out = imported("musubi", write_musubi(tmp_path / "theirs", samples), tmp_path / "out")
    check_equal(out, samples, torch.bfloat16, prompts=True, empty=False)
    three = next(sample for sample in open_cache(out) if sample.prompt == "p")
    parts = [content_hash(part.view(torch.uint8).numpy().tobytes()) for part in samples[0].packed[1:]]
    assert list(three.row.meta.inputs.controls) == parts
    result = import_("musubi", tmp_path / "theirs", tmp_path / "other", model="Qwen/Qwen-Image-Edit")
    refused(result, "1 problem", "QwenImageEditPipeline cannot have made", "expected 1 control", "found 3 controls")


@pytest.mark.parametrize("tool", TOOLS)
def test_text_to_image(tool: str, tmp_path: Path) -> None:
    samples = [make("x", "a cat", [(4, 6)], 5, seed=1), make("y", "a cat", [(4, 6)], 5, seed=2)]
    if tool == "qflux":  # one prompt, one file
        samples[1] = replace(samples[1], embeds=samples[0].embeds, empty=samples[0].empty)
    source = tmp_path / "theirs"
    source = write_musubi(source, samples, "qi") if tool == "musubi" else WRITE[tool](source, samples)
    out = imported(tool, source, tmp_path / "out", model="Qwen/Qwen-Image")
    assert [len(sample.img_shapes) for sample in open_cache(out)] == [1, 1]
    refused(import_(tool, source, tmp_path / "other"), "cannot have made this sample", "expected at least 1 control")


def test_several_captions_of_an_image_are_several_samples(tmp_path: Path) -> None:
    first, second = (make("x", prompt, [(4, 6)] * 2, 5, seed=1) for prompt in ("one", "two"))
    second = replace(second, embeds=second.embeds + 1)
    spec, bucket = [None, "x.png"], tmp_path / "theirs" / "cache_1.500x96x64x1"
    item = {"latents": first.latents[0], "control_latents": first.latents[1], "mask": None}
    write_pieces(bucket / "latents", [{**item, "image_spec": spec, "caption": ["one", "two"]}])
    text = [{"prompt_embeds": s.embeds, "image_spec": spec} for s in (first, second)]
    write_pieces(bucket / "text_embeddings_1", text)
    out = imported("diffusion-pipe", tmp_path / "theirs", tmp_path / "out")
    stored = {sample.prompt: sample["prompt_embeds"] for sample in open_cache(out)}
    assert stored.keys() == {"one", "two"}
    assert torch.equal(stored["one"], first.embeds)
    assert torch.equal(stored["two"], second.embeds)


# ---- what qflux does not store ---------------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("version", "shapes"), [(None, "tensor"), (None, "none"), ("2.0", "json"), ("2.0", "none")])
def test_qflux_sizes_are_read_from_where_each_release_stores_them(
    version: str | None, shapes: str, made: list[TrainerSample], tmp_path: Path
) -> None:
    reference = imported("qflux", write_qflux(tmp_path / "full", made[::2]), tmp_path / "reference")
    source = write_qflux(tmp_path / "theirs", made[::2], version, shapes)
    sizes = ["--image-size", "96x64", "--image-size", "64x64"] if shapes == "none" else []
    out = imported("qflux", source, tmp_path / "out", *sizes)
    assert [s.key for s in open_cache(out)] == [s.key for s in open_cache(reference)]
    for path in [*source.glob("metadata/*.json")]:  # an early v1.0 kept them elsewhere
        path.rename(source / f"{path.stem}_metadata.json")
    again = imported("qflux", source, tmp_path / "again", *sizes)
    assert [s.key for s in open_cache(again)] == [s.key for s in open_cache(reference)]


def test_qflux_unknown_sizes_are_requested(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1], shapes="none")
    refused(import_("qflux", source, tmp_path / "out"), "does not store the sizes", "--image-size 832x576")
    sizes = ["--image-size", "96x64", "--image-size", "64x96"]  # 24 tokens, both
    result = import_("qflux", source, tmp_path / "out", *sizes)
    refused(result, "does not determine", "one choice with 24 tokens, and one of 1 controls with 24", "found 2 and 2")
    result = import_("qflux", source, tmp_path / "out", "--image-size", "96x96")
    refused(result, "does not determine", "found 0 and 0")
    result = import_("qflux", source, tmp_path / "out", "--image-size", "96x65")
    refused(result, "--image-size", "both multiples of 16", "found 96x65")
    assert not (tmp_path / "out").exists()


def test_qflux_finds_the_order_of_several_controls_or_refuses(tmp_path: Path) -> None:
    both = ["--image-size", "96x64", "--image-size", "64x64"]
    same = make("same", "p", [(4, 6), (4, 4), (4, 4)], 5, seed=1)
    out = imported("qflux", write_qflux(tmp_path / "same", [same], shapes="none"), tmp_path / "out", *both)
    assert [list(shape) for shape in open_cache(out)[0].img_shapes] == same.shapes
    mixed = make("mixed", "p", [(4, 6), (4, 6), (4, 4)], 5, seed=1)  # or the other way round
    source = write_qflux(tmp_path / "mixed", [mixed], shapes="none")
    refused(import_("qflux", source, tmp_path / "other", *both), "one of 2 controls with 40", "found 1 and 2")


def test_qflux_prompts_are_found_again_by_their_hash(made: list[TrainerSample], tmp_path: Path) -> None:
    captions = tmp_path / "captions" / "deep"
    captions.mkdir(parents=True)
    for i, sample in enumerate(made[:2]):
        (captions / f"{i}.txt").write_text(f"{sample.prompt}\n", encoding="utf-8")
    source = write_qflux(tmp_path / "theirs", made)
    out = imported("qflux", source, tmp_path / "out", "--captions", tmp_path / "captions")
    assert sorted(s.prompt for s in open_cache(out)) == sorted(["", *(sample.prompt for sample in made[:2])])
    result = import_("qflux", source, tmp_path / "other", "--captions", tmp_path / "nowhere")
    refused(result, str(tmp_path / "nowhere"), "no such folder", "--captions")


# ---- what is ambiguous -----------------------------------------------------------------------------------------------


def test_qflux_embeddings_shared_by_different_controls_are_refused(made: list[TrainerSample], tmp_path: Path) -> None:
    made[2] = replace(made[2], prompt=made[0].prompt)
    source = write_qflux(tmp_path / "theirs", made)
    shared = f"prompt_embeds/{md5(made[0].prompt)}.pt"
    names = [p.name for p in (source / "metadata").glob(f"*{md5(made[0].prompt)}.json")]
    assert len(names) == 2
    result = import_("qflux", source, tmp_path / "out")
    refused(result, shared, "samples with different control images share these embeddings", *names)
    assert not (tmp_path / "out").exists()
    out = imported("qflux", source, tmp_path / "out", "--on-error", "skip")
    assert [s.name for s in open_cache(out)] == [p.stem for p in (source / "metadata").glob(f"*{md5(made[1].prompt)}*")]


def test_qflux_one_control_under_two_targets_may_share_embeddings(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1])
    metadata = next((source / "metadata").glob("*.json"))
    other = json.loads(metadata.read_text()) | {"image_latents": "f" * 32}
    (source / "metadata" / "other.json").write_text(json.dumps(other))
    torch.save(torch.ones(24, 64, dtype=torch.float16), source / "image_latents" / f"{'f' * 32}.pt")
    assert len(open_cache(imported("qflux", source, tmp_path / "out"))) == 2


def test_qflux_latents_shared_under_a_perceptual_hash_are_refused(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1])
    path = next((source / "metadata").glob("*.json"))
    entry = json.loads(path.read_text()) | {"image_latents": "0123456789abcdef"}
    (source / "image_latents" / "0123456789abcdef.pt").write_bytes(
        next((source / "image_latents").glob("*.pt")).read_bytes()
    )
    path.write_text(json.dumps(entry))
    assert len(open_cache(imported("qflux", source, tmp_path / "one"))) == 1
    (source / "metadata" / "other.json").write_text(json.dumps(entry))
    refused(import_("qflux", source, tmp_path / "out"), "0123456789abcdef.pt", "perceptual hash", "other.json")


def test_qflux_trees_without_metadata_are_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs" / "pixel_latent").mkdir(parents=True)
    result = import_("qflux", tmp_path / "theirs", tmp_path / "out")
    refused(result, "does not store which latents belong to which embeddings", "qwen-cache build")


def test_musubi_images_that_share_a_text_file_are_refused(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    first = source / "c_0800x0600_qie.safetensors"
    second = source / "c_1024x0600_qie.safetensors"
    second.write_bytes(first.read_bytes())
    refused(import_("musubi", source, tmp_path / "out"), "c_qie_te.safetensors", "share", first.name, second.name)


# ---- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
def test_equal_files_give_equal_datasets_and_a_second_import_does_nothing(
    tool: str, made: list[TrainerSample], tmp_path: Path
) -> None:
    one = imported(tool, WRITE[tool](tmp_path / "a", made), tmp_path / "one")
    two = imported(tool, WRITE[tool](tmp_path / "b", made), tmp_path / "two")
    assert contents(one) == contents(two)
    before = contents(one)
    result = import_(tool, tmp_path / "a", one, "--json")
    assert json.loads(result.stdout) == {"imported": 0, "samples": 3, "up_to_date": True}
    assert contents(one) == before


def test_any_changed_tensor_shape_or_claim_changes_the_key(tmp_path: Path) -> None:
    sample = make("x", "p", [(4, 6), (2, 4)], 5, seed=1)

    def flip(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1).view(torch.int16)[-1] ^= 1
        return changed

    z = sample.latents
    variants = {
        "the same": (sample, MODEL),
        "target": (replace(sample, latents=(flip(z[0]), z[1])), MODEL),
        "control": (replace(sample, latents=(z[0], flip(z[1]))), MODEL),
        "prompt": (replace(sample, embeds=flip(sample.embeds)), MODEL),
        "text": (replace(sample, prompt="q"), MODEL),
        "claim": (sample, "Qwen/Qwen-Image-Edit-2511"),
    }
    transposed = tuple(p.reshape(w, h, 16, 2, 2).permute(2, 0, 3, 1, 4).reshape(16, 1, 2 * w, 2 * h) for p, (_, h, w) in
                       zip(sample.packed, sample.shapes, strict=True))  # fmt: skip
    variants["sides"] = (replace(sample, latents=transposed), MODEL)  # the same tokens in images of other sides
    keys = {}
    for i, (name, (variant, model)) in enumerate(variants.items()):
        source = write_musubi(tmp_path / str(i), [variant])
        keys[name] = open_cache(imported("musubi", source, tmp_path / f"out-{i}", model=model))[0].key
    assert torch.equal(replace(sample, latents=transposed).packed[0], sample.packed[0])
    assert len(set(keys.values())) == len(variants)
    assert keys["the same"] == open_cache(tmp_path / "out-0")[0].key


def test_the_empty_prompt_is_part_of_the_key_and_its_prefix_is_stored_once(
    made: list[TrainerSample], tmp_path: Path
) -> None:
    out = imported("qflux", write_qflux(tmp_path / "a", made[:1]), tmp_path / "one")
    sample = open_cache(out)[0]
    assert sample.row.meta.prefix_length == 3
    assert sample.row.meta.tensors["empty_prompt_embeds"].shape == (4, WIDTH)
    other = replace(made[0], empty=made[0].empty + 1)
    two = imported("qflux", write_qflux(tmp_path / "b", [other]), tmp_path / "two")
    assert open_cache(two)[0].key != sample.key


def test_only_a_prefix_is_shared_and_a_row_is_always_left(made: list[TrainerSample], tmp_path: Path) -> None:
    gap = made[0].embeds.clone()
    gap[2] += 1  # rows 3, 4, … are equal again
    samples = [replace(made[0], empty=gap), replace(made[1], empty=made[1].embeds)]
    cache = open_cache(imported("qflux", write_qflux(tmp_path / "a", samples), tmp_path / "out"))
    stored = {len(sample["prompt_embeds"]): sample for sample in cache}
    for sample, prefix_length in zip(samples, (2, len(made[1].embeds) - 1), strict=True):
        found = stored[len(sample.embeds)]
        assert found.row.meta.prefix_length == prefix_length
        assert torch.equal(found["empty_prompt_embeds"], sample.empty.half().float())


def test_a_reader_can_check_the_key_from_the_metadata_alone(made: list[TrainerSample], tmp_path: Path) -> None:
    """FORMAT.md, F10: also with another program than the writer."""
    cache = open_cache(imported("qflux", write_qflux(tmp_path / "a", made), tmp_path / "out"))
    for sample in cache:
        meta = sample.row.meta
        specs = {n: {"dtype": s.dtype, "shape": list(s.shape), "xxh3_128": s.xxh3_128} for n, s in meta.tensors.items()}
        shapes = [list(shape) for shape in meta.img_shapes]
        said = {"img_shapes": shapes, "prefix_length": meta.prefix_length, "tensors": specs}
        assert meta.inputs.target == content_hash(canonical_json(said))
        assert sample.key == sample_key(recipe_id(cache.recipe.recipe), meta.inputs, meta.prompt, meta.img_shapes)


def test_repeated_samples_are_kept_once(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", [made[0], replace(made[0], name="copy"), made[1]])
    out = imported("musubi", source, tmp_path / "out")
    assert [row.source_rows for row in open_cache(out).rows()] == [2, 1]


# ---- changes, crashes, memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", TOOLS)
def test_the_last_line_is_the_command_that_trains(tool: str, made: list[TrainerSample], tmp_path: Path) -> None:
    source, out = WRITE[tool](tmp_path / "theirs", made), tmp_path / "an import"
    dropout = [] if tool == "qflux" else ["--set", "train.caption_dropout=0"]
    command = ["qwen-train", "run", str(out), "--model", MODEL]
    for what in ("done", "nothing to do"):
        result = import_(tool, source, out)
        assert what in result.stderr
        assert result.stderr.endswith(f"\ntrain on it with: {shlex.join([*command, *dropout])}\n")
    other = "Qwen/Qwen-Image-Edit-2511"
    beside = import_(tool, source, out, "--set", "cache.recipe=second", model=other)
    words = [*command[:-1], other, "--set", "cache.recipe=second", *dropout]
    assert beside.stderr.endswith(f"\ntrain on it with: {shlex.join(words)}\n")
    without = import_(tool, source, tmp_path / "other", "--set", "train.caption_dropout=0")
    assert without.stderr.endswith(f"run {tmp_path / 'other'} --model {MODEL}\n")


def test_added_and_removed_samples(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made[:2])
    out = imported("musubi", source, tmp_path / "out")
    for path in source.glob("a_cat*"):
        path.unlink()
    write_musubi(source, made[2:])
    plan = json.loads(import_("musubi", source, out, "--dry-run", "--json").stdout)
    assert (plan["to_import"], plan["cached"], plan["removed"]) == (1, 1, 1)
    imported("musubi", source, out)
    check_equal(out, made[1:], torch.bfloat16, prompts=True, empty=False)
    assert run("qwen-cache", "verify", out).code == 0


@pytest.mark.slow
def test_a_crash_anywhere_and_the_same_command_give_the_same_bytes(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    small = ["--set", "cache.shard_size=6000"]
    whole = contents(imported("musubi", source, tmp_path / "whole", *small))
    assert len([name for name in whole if name.endswith(".tar")]) == 3
    crashes = 0
    while crashes < 100:
        out = tmp_path / f"out-{crashes}"
        with pytest.MonkeyPatch.context() as patch:
            crash_after(crashes, patch)
            try:
                result = import_("musubi", source, out, *small)
            except Crash:
                result = None
        if result is not None:
            break
        imported("musubi", source, out, *small)
        assert contents(out) == whole, f"after a crash at step {crashes}"
        crashes += 1
    assert 20 < crashes < 100


def test_memory_does_not_grow_with_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [make(f"s{i:02}", f"p{i}", [(4, 6)] * 2, 5, seed=i) for i in range(12)]
    source = write_musubi(tmp_path / "theirs", samples)
    del samples
    tensors: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def describe(sample: ImportedSample, recipe: str, dtype: torch.dtype) -> Any:
        tensors.extend(weakref.ref(tensor) for tensor in sample.tensors.values())
        alive.append(sum(tensor() is not None for tensor in tensors))
        return original(sample, recipe, dtype)

    original = convert.describe
    monkeypatch.setattr(convert, "describe", describe)
    imported("musubi", source, tmp_path / "out")
    assert len(alive) == 24  # each is read twice
    assert set(alive) == {3}  # those of one sample


def test_a_file_that_changes_between_the_readings_is_refused(
    made: list[TrainerSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    original = convert.run

    def run_later(*arguments: Any) -> Any:
        write_musubi(source, [replace(made[0], embeds=made[0].embeds + 1)])
        return original(*arguments)

    monkeypatch.setattr("qwen_cache.trainers.convert.run", run_later)
    refused(import_("musubi", source, tmp_path / "out"), "a_cat_0800x0600_qie", "changed while it was imported")


def test_dry_run_writes_nothing_and_reports_everything(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    (source / "c_qie_te.safetensors").unlink()
    result = import_("musubi", source, tmp_path / "out", "--dry-run", "--json")
    assert result.code == 0
    plan = json.loads(result.stdout)
    assert not (tmp_path / "out").exists()
    assert [sample["name"] for sample in plan["samples"]] == ["a_cat", "b dog"]
    assert (plan["to_import"], plan["cached"], plan["without_empty_prompt"], plan["without_prompt"]) == (2, 0, 2, 0)
    assert [problem["what"] for problem in plan["problems"]] == ["its text file is missing"]
    out = imported("musubi", source, tmp_path / "out", "--on-error", "skip")
    assert [sample["key"] for sample in plan["samples"]] == [sample.key for sample in open_cache(out)]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "parts"),
    [
        ("someone/finetune", [], ["someone/finetune", "the pipeline of this model is unknown", "--pipeline"]),
        ("someone/finetune", ["--pipeline", "FluxPipeline"], ["no such pipeline", "found FluxPipeline"]),
        (MODEL, ["--pipeline", "QwenImagePipeline"], ["contradict", "expected QwenImageEditPlusPipeline"]),
        ("Qwen/Qwen-Image", [], ["QwenImagePipeline cannot have made", "expected no control", "found 1 control"]),
        (MODEL, ["--image-size", "16x16"], ["--image-size and --captions are for qflux"]),
        (MODEL, ["--set", "cache.format=v1"], ["import writes format v2", "migrate v2 v1"]),
    ],
)
def test_impossible_claims_are_refused(
    model: str, options: list[str], parts: list[str], made: list[TrainerSample], tmp_path: Path
) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    refused(import_("musubi", source, tmp_path / "out", *options, model=model), *parts)


def test_a_model_must_be_claimed(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    result = run("qwen-cache", "import", "musubi", source, "--out", tmp_path / "out")
    refused(result, "needs --model")
    imported("musubi", source, tmp_path / "out", "--pipeline", "QwenImageEditPipeline", model="someone/finetune")
    assert open_cache(tmp_path / "out").recipe.recipe["claimed"] == {
        "model": "someone/finetune",
        "pipeline": "QwenImageEditPipeline",
    }


@pytest.mark.parametrize("tool", TOOLS)
def test_folders_without_such_a_cache_are_refused(tool: str, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "image.png").write_bytes(b"")
    refused(import_(tool, tmp_path / "theirs", tmp_path / "out"), str(tmp_path / "theirs"), "not a cache of")
    refused(import_(tool, tmp_path / "nowhere", tmp_path / "out"), str(tmp_path / "nowhere"), "no such folder")


def test_a_built_cache_is_not_replaced(built: Callable[..., Path], made: list[TrainerSample], tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "out"
    shutil.copytree(built("edit-plus"), out)
    source = write_musubi(tmp_path / "theirs", made)
    before = contents(out)
    refused(import_("musubi", source, out), str(out), "not an import from musubi, and would be replaced")
    assert contents(out) == before
    imported("musubi", source, out, "--set", "cache.recipe=theirs")
    assert len(open_cache(out, recipe="theirs")) == 3
    assert len(open_cache(out, recipe="default")) == 4


class Attack:
    """Pickles as a call that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_pickle_is_run(made: list[TrainerSample], tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickle.loads(pickle.dumps(Attack(mark)))  # it would
    mark.rmdir()
    source = write_qflux(tmp_path / "theirs", made)
    attacked = source / "prompt_embeds" / f"{md5(made[0].prompt)}.pt"
    torch.save(Attack(mark), attacked)
    refused(import_("qflux", source, tmp_path / "out"), str(attacked), "code in a pickle is never run")
    pieces = tmp_path / "pieces" / "cache_1"
    write_pieces(pieces / "latents", [{"latents": Attack(mark), "image_spec": [None, "x"], "caption": ["p"]}])
    write_pieces(pieces / "text_embeddings_1", [{"prompt_embeds": Attack(mark), "image_spec": [None, "x"]}])
    result = import_("diffusion-pipe", tmp_path / "pieces", tmp_path / "out")
    refused(result, "shard_0.bin", "code in a pickle is never run")
    assert not mark.exists()


def damaged_qflux(source: Path, made: list[TrainerSample]) -> Iterator[tuple[str, list[str]]]:
    """Damage three samples in different ways; the message for each."""
    embeds = [source / "prompt_embeds" / f"{md5(sample.prompt)}.pt" for sample in made]
    tensor = torch.load(embeds[0])
    tensor[1, 2] = torch.inf
    torch.save(tensor, embeds[0])
    yield made[0].prompt, ["prompt_embeds has NaN or Inf", "float16 cannot hold", "found torch.float16"]
    embeds[1].unlink()
    yield made[1].prompt, [str(embeds[1]), "a file of this sample is missing"]
    data = embeds[2].read_bytes()
    embeds[2].write_bytes(data[: len(data) // 2])
    yield made[2].prompt, [str(embeds[2]), "cannot be read"]


def test_all_problems_are_listed_at_once(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_qflux(tmp_path / "theirs", made)
    expected = list(damaged_qflux(source, made))
    result = import_("qflux", source, tmp_path / "out")
    refused(result, "3 problems", "nothing was imported", *(part for _, parts in expected for part in parts))
    refused(import_("qflux", source, tmp_path / "out", "--on-error", "skip"), "no usable sample is left")
    assert not (tmp_path / "out").exists()


def change(path: Path, **changes: Any) -> None:
    """Change an entry of a JSON file; None removes it."""
    entry = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in entry.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"version": "3.0"}, ["unknown version", "expected 1.0 or 2.0", "found 3.0"]),
        ({"pooled_prompt_embeds": "0" * 32}, ["another model", "found pooled_prompt_embeds"]),
        (
            {"image_latents": "../../../etc/passwd"},
            ["image_latents is not the name of a file", "found ../../../etc/passwd"],
        ),
        ({"image_latents": None}, ["not the metadata of a sample"]),
        ({"control_latents": None}, ["do not fit the image sizes", "'control_latents': [24, 64]"]),
        ({"img_shapes": [[3, 64, 80], [3, 64, 96]]}, ["do not fit the image sizes", "[20, 64]", "[24, 64]"]),
        ({"img_shapes": [[1, float("inf"), 6]]}, ["img_shapes is not a list of sizes", "found [1, inf, 6]"]),
        ({"img_shapes": [[1, 4, 6], [1, 2]]}, ["img_shapes is not a list of sizes", "found [1, 2]"]),
    ],
)
def test_impossible_qflux_metadata(
    changes: dict[str, Any], parts: list[str], made: list[TrainerSample], tmp_path: Path
) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1])
    path = next((source / "metadata").glob("*.json"))
    change(path, **changes)
    refused(import_("qflux", source, tmp_path / "out"), str(path), *parts)


@pytest.mark.parametrize(
    ("kind", "tensor", "parts"),
    [
        ("prompt_embeds_mask", torch.tensor([1.0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0]), ["ones, then zeros", "found 4"]),
        ("prompt_embeds_mask", torch.ones(5), ["expected 11 entries", "found 5 ones in [5]"]),
        ("prompt_embeds", torch.ones(11, WIDTH, dtype=torch.int64), ["float16, bfloat16 or float32", "torch.int64"]),
        ("prompt_embeds", torch.ones(1, 11, WIDTH), ["expected [L, D]", "found [1, 11, 64]"]),
        ("prompt_embeds", [1, 2], ["expected [L, D]", "found list"]),
        ("prompt_embeds", torch.ones(11, WIDTH, device="meta"), ["found [11, 64] in torch.float32 on meta"]),
        (
            "prompt_embeds",
            torch.ones(1).expand(11, WIDTH),
            ["a tensor is larger than its storage in the file", "expected 2816"],
        ),
        ("image_latents", torch.ones(23, 64), ["do not fit the image sizes", "[24, 64]", "[23, 64]"]),
        (
            "empty_prompt_embeds",
            torch.ones(9, 32),
            ["the embeddings have another width", "expected 64", "found [32, 64]"],
        ),
    ],
)
def test_impossible_qflux_tensors(
    kind: str, tensor: Any, parts: list[str], made: list[TrainerSample], tmp_path: Path
) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1])
    torch.save(tensor, next((source / kind).glob("*.pt")))
    refused(import_("qflux", source, tmp_path / "out"), *parts)


def test_qflux_metadata_that_is_too_deep_or_has_a_key_twice_is_refused(
    made: list[TrainerSample], tmp_path: Path
) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1])
    path = next((source / "metadata").glob("*.json"))
    for text in ("[" * 100_000, '{"img_shapes": ' + "[" * 500 + "]" * 500 + "}"):
        path.write_text(text)
        refused(import_("qflux", source, tmp_path / "out"), f"{path}: not JSON: it is nested more than 100 deep")
    path.write_text('{"img_shapes": [], "img_shapes": [[1, 4, 6]]}')
    refused(import_("qflux", source, tmp_path / "out"), f'{path}: not JSON: the key "img_shapes" is there twice')


@pytest.mark.parametrize(
    ("tool", "pattern"),
    [("musubi", "*_te.safetensors"), ("qflux", "prompt_embeds/*.pt"), ("diffusion-pipe", "metadata.db")],
)
def test_a_pipe_is_not_waited_for(tool: str, pattern: str, made: list[TrainerSample], tmp_path: Path) -> None:
    source = WRITE[tool](tmp_path / "theirs", made[:1])
    path = next(source.rglob(pattern))
    path.unlink()
    os.mkfifo(path)
    refused(import_(tool, source, tmp_path / "out"), "not a regular file")


def test_a_view_in_place_of_a_table_is_refused(made: list[TrainerSample], tmp_path: Path) -> None:
    """A view computes whatever it likes: this one has no end."""
    source = write_diffusion_pipe(tmp_path / "theirs", made[:1])
    index = next(source.glob("*/latents/metadata.db"))
    endless = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT 0 FROM n) SELECT i AS shard, i AS shard_index FROM n"
    with closing(sqlite3.connect(index)) as database:
        database.executescript(f"ALTER TABLE items RENAME TO old; CREATE VIEW items AS {endless}")
    refused(import_("diffusion-pipe", source, tmp_path / "out"), f"{index}: not an index of", "it has no table items")


def test_more_image_sizes_than_can_be_tried_are_refused(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_qflux(tmp_path / "theirs", made[:1], shapes="none")
    path = next((source / "metadata").glob("*.json"))
    name = json.loads(path.read_text())["image_latents"]
    (control,) = (source / "control_latents").glob("*.pt")
    (source / "image_latents" / f"{name}.pt").rename(source / "image_latents" / f"{name[:16]}.pt")
    many = control.rename(control.with_stem("0123456789abcdef" * 15))
    change(path, image_latents=name[:16], control_latents=many.stem)
    sizes = [f"{size}x{size}" for size in range(512, 512 + 16 * 3, 16)]
    options = [part for size in sizes for part in ("--image-size", size)]
    message = "too many image sizes for this many controls (found 3 and 15)"
    refused(import_("qflux", source, tmp_path / "out", *options), message)


def rewrite(path: Path, architecture: str = "qwen_image_edit", **tensors: torch.Tensor | None) -> None:
    """Change tensors of a safetensors file; None removes one."""
    new = {name: tensor for name, tensor in (load_file(path) | tensors).items() if tensor is not None}
    save_file(new, path, {"architecture": architecture})


MUSUBI_LATENT, MUSUBI_CONTROL = "latents_1x8x12_bfloat16", "latents_control_0_1x8x12_bfloat16"
MUSUBI_TEXT = "varlen_vl_embed_bfloat16"


@pytest.mark.parametrize(
    ("file", "changes", "parts"),
    [
        ("latents", {"architecture": "wan"}, ["another model", "expected qwen_image", "found wan"]),
        ("latents", {MUSUBI_LATENT: None}, ["not the tensors that musubi-tuner writes", "found none"]),
        ("latents", {"mask_weights_1x8x8_float16": torch.ones(1)}, ["not the tensors that", "mask_weights_1x8x8"]),
        ("latents", {MUSUBI_CONTROL: None, "latents_control_1_1x2x2_bfloat16": torch.ones(16, 1, 2, 2)}, ["found [1]"]),
        ("latents", {f"latents_control_{'9' * 5000}_1x2x2_bfloat16": torch.ones(1)}, ["not the tensors that", "9999"]),
        ("latents", {MUSUBI_LATENT: torch.ones(16, 3, 8, 12)}, ["not the latents of one image", "[16, 3, 8, 12]"]),
        ("latents", {MUSUBI_LATENT: torch.ones(16, 1, 7, 12)}, ["with even H and W", "found [16, 1, 7, 12]"]),
        ("latents", {MUSUBI_LATENT: torch.ones(16, 8, 12)}, ["expected [C, F, H, W]", "found [16, 8, 12]"]),
        ("text", {MUSUBI_TEXT: torch.ones(5, 64).to(torch.float8_e4m3fn)}, ["torch.float8_e4m3fn"]),
        ("text", {"varlen_vl_embed_float32": torch.ones(5, 64)}, ["expected one varlen_vl_embed", "bfloat16, varlen"]),
        ("text", {MUSUBI_TEXT: torch.full((5, 64), torch.nan)}, ["prompt_embeds has NaN or Inf"]),
    ],
)
def test_impossible_musubi_files(
    file: str, changes: dict[str, Any], parts: list[str], made: list[TrainerSample], tmp_path: Path
) -> None:
    source = write_musubi(tmp_path / "theirs", made[:1])
    path = source / {"latents": "a_cat_0800x0600_qie.safetensors", "text": "a_cat_qie_te.safetensors"}[file]
    rewrite(path, **changes)
    refused(import_("musubi", source, tmp_path / "out"), "1 problem", "a_cat", *parts)


def test_missing_and_invalid_musubi_files(made: list[TrainerSample], tmp_path: Path) -> None:
    source = write_musubi(tmp_path / "theirs", made)
    (source / "a_cat_0800x0600_qie.safetensors").unlink()
    (source / "b dog_qie_te.safetensors").unlink()
    (source / "c_qie_te.safetensors").write_bytes(b"no")
    result = import_("musubi", source, tmp_path / "out")
    refused(result, "3 problems", "a_cat_qie_te.safetensors: its latents are missing", "qwen_image_cache_latents.py")
    refused(result, "b dog_0800x0600_qie.safetensors: its text file is missing", "not a safetensors file")


def test_the_one_cache_of_musubi_inside_a_folder_is_taken(made: list[TrainerSample], tmp_path: Path) -> None:
    """Exports and data sets hold a cache in this way."""
    cache = write_musubi(tmp_path / "set" / "cache", made)
    (tmp_path / "set" / "images").mkdir()
    (tmp_path / "set" / "images" / "a_cat.safetensors").write_bytes(b"no")
    result = import_("musubi", tmp_path / "set", tmp_path / "out")
    assert (result.code, len(open_cache(tmp_path / "out"))) == (0, 3)
    assert result.stderr.startswith(f"{cache} is the one cache in {tmp_path / 'set'}\n")
    write_musubi(tmp_path / "set" / "more", made[:1])
    result = import_("musubi", tmp_path / "set", tmp_path / "other")
    refused(result, "this folder has several caches (expected one, found cache, more)")
    refused(import_("musubi", tmp_path, tmp_path / "other"), "not a cache of musubi-tuner", "or in one folder in it")


def test_a_mixture_of_dtypes_is_stored_in_the_dtype_that_represents_it(
    made: list[TrainerSample], tmp_path: Path
) -> None:
    half = replace(made[1], embeds=made[1].embeds.float())
    source = write_musubi(tmp_path / "theirs", [made[0], half])
    refused(import_("musubi", source, tmp_path / "out"), "would lose digits of prompt_embeds", "--dtype float32")
    out = imported("musubi", source, tmp_path / "out", "--dtype", "float32")
    check_equal(out, [made[0], half], torch.float32, prompts=True, empty=False)


def pieces_of(source: Path, part: str) -> Path:
    return next(source.glob(f"cache_*/{part}"))


def test_impossible_diffusion_pipe_caches(made: list[TrainerSample], tmp_path: Path) -> None:
    def fresh(name: str, **changes: Any) -> Path:
        return write_diffusion_pipe(tmp_path / name, made[::2], **changes)

    out = tmp_path / "out"
    refused(import_("diffusion-pipe", fresh("masked", mask=torch.ones(64, 96)), out), "2 problems", "a loss mask")
    cut = pieces_of(fresh("cut"), "text_embeddings_1") / "shard_0.bin"
    os.truncate(cut, cut.stat().st_size - 100)
    refused(import_("diffusion-pipe", tmp_path / "cut", out), "1 problem", str(cut), "shorter than its index says")
    swapped = fresh("swapped")
    with sqlite3.connect(pieces_of(swapped, "text_embeddings_1") / "metadata.db") as database:
        database.execute("UPDATE items SET shard_index = 1 - shard_index")
    database.close()
    refused(import_("diffusion-pipe", swapped, out), "2 problems", "of different images", "/data/a_cat.png")
    short = fresh("short")
    with sqlite3.connect(pieces_of(short, "text_embeddings_1") / "metadata.db") as database:
        database.execute("DELETE FROM items WHERE shard_index = 1")
    database.close()
    refused(import_("diffusion-pipe", short, out), "its embeddings are missing", "expected 2 pieces", "found 1")
    other = pieces_of(fresh("other"), "latents")
    (other / "metadata.db").write_bytes(b"not a database, and long enough to see that it is none" * 20)
    refused(import_("diffusion-pipe", tmp_path / "other", out), str(other), "not an index of diffusion-pipe")
    pieces_of(fresh("bare"), "text_embeddings_1").rename(tmp_path / "elsewhere")
    refused(import_("diffusion-pipe", tmp_path / "bare", out), "embeddings of one text encoder", "found none")
    assert not out.exists()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tool", TOOLS)
def test_random_damage_is_an_error_or_nothing(tool: str, made: list[TrainerSample], tmp_path: Path) -> None:
    """Never a traceback: `run` lets no other exception pass."""
    source, chance = WRITE[tool](tmp_path / "theirs", made), random.Random(tool)
    files = [path for path in sorted(source.rglob("*")) if path.is_file()]
    problems = 0
    for _ in range(30):
        path = chance.choice(files)
        whole = path.read_bytes()
        damaged, place = bytearray(whole), chance.randrange(len(whole))
        damaged[place : place + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
        path.write_bytes(damaged[: chance.choice([None, place])])
        result = import_(tool, source, tmp_path / "out", "--dry-run", "--json")
        assert result.code == 0, result.stderr
        problems += bool(json.loads(result.stdout)["problems"])
        path.write_bytes(whole)
    assert problems > 10


# ---- training --------------------------------------------------------------------------------------------------------


def train(cache: Path, model: Path, out: Path, caption_dropout: float) -> Result:
    settings = [f"train.output_dir={out}", "train.mixed_precision=no", "train.max_steps=2", "logging.report_to=none"]
    settings += ["train.batch_size=2", f"train.caption_dropout={caption_dropout}"]
    assignments = [part for setting in settings for part in ("--set", setting)]
    try:
        return run_training(cache, "--model", model, *assignments)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tool", TOOLS)
def test_imported_caches_can_be_trained(
    tool: str, made: list[TrainerSample], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The claimed model is a folder, which gives the pipeline."""
    model = tiny_model("edit-plus")
    cache = imported(tool, WRITE[tool](tmp_path / "theirs", made), tmp_path / "shards", model=str(model))
    result = train(cache, model, tmp_path / "run", 0.5 if tool == "qflux" else 0.0)
    assert result.code == 0, result.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    if tool != "qflux":
        result = train(cache, model, tmp_path / "other", 0.1)
        refused(result, str(cache), "caption dropout needs the embeddings of the empty prompt", "3 of 3 samples")
        refused(result, "train.caption_dropout=0.1", "set train.caption_dropout=0")
        assert not (tmp_path / "other").exists()
