"""`qwen-cache build` stores what the stock diffusers pipelines feed to their transformer (see `judge`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from qwen_cache import open_cache
from qwen_cache.encode.text import EncodedText, TextEncoder
from qwen_cache.encode.vae import VaeEncoder
from tests.support.caches import SMALL, build
from tests.support.commands import run
from tests.support.judge import (
    LONG,
    PROMPTS,
    SEVERAL,
    SHAPES,
    TOLERANCE,
    Case,
    Size,
    TinyModel,
    assert_matches_stock,
    assert_same,
    build_cache,
    by_name,
    case,
    relative,
    small_options,
    stock_pipeline,
    transformer_inputs,
    write_source,
)
from tests.support.sources import write_pairs

# ---- against the pipelines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "dtype", "sizes"),
    [
        pytest.param("t2i", "float32", [(640, 427)], marks=pytest.mark.slow),
        pytest.param("edit-plus", "bfloat16", [(640, 427), (427, 640), (451, 300)], marks=pytest.mark.slow),
    ],
)
def test_at_stock_sizes_a_cache_holds_what_the_pipeline_feeds_its_transformer(
    variant: str, dtype: str, sizes: list[Size], tiny_model: TinyModel, tmp_path: Path
) -> None:
    it = case(sizes, "Make it look like late autumn, 像一幅水彩画")
    opened = build_cache(tmp_path, {"it": it}, tiny_model(variant), "--dtype", dtype)
    assert_matches_stock(opened[0], it, tiny_model(variant), variant)


@cache
def sweep(variant: str) -> dict[str, Case]:
    """Shapes, prompts, modes and numbers of controls that the pipeline of `variant` takes."""
    pair = [(150, 100), (100, 150)]
    cases = {name: case(sizes, f"make the {name} one blue") for name, sizes in SHAPES.items()}
    cases |= {name: case(pair, prompt) for name, prompt in PROMPTS.items()}
    cases |= {mode: case(pair, f"from {mode}", mode) for mode in ("L", "P")}
    if variant == "t2i":  # whose prompts end after 512 tokens
        return {name: Case(it.target, (), it.prompt[:400]) for name, it in cases.items()}
    if variant != "edit":
        cases |= {name: case(sizes, LONG) for name, sizes in SEVERAL.items()}
    without = {"text to image": PROMPTS["chinese"], "without a prompt": ""}  # encoded as by QwenImagePipeline
    return cases | {name: Case(cases["odd"].target, (), prompt) for name, prompt in without.items()}


def some(variant: str) -> dict[str, Case]:
    """Samples that differ in as much as possible: an odd size in another mode with another script, the few tokens, the
    most controls, and none with a prompt and without."""
    every = sweep(variant)
    kept = ("minute", "four", "text to image", "without a prompt")
    odd = {"odd": case(SHAPES["odd"], PROMPTS["chinese"], "L")} if variant != "t2i" else {"odd": every["odd"]}
    return odd | {name: every[name] for name in kept if name in every}


@pytest.mark.fast_cases(3)
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("every", [pytest.param(False, id="some"), pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["edit", "edit-plus", "t2i"])
def test_whatever_the_sample_a_cache_holds_what_the_pipeline_feeds_its_transformer(
    variant: str, dtype: str, every: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Prompts in any script and of any length; none to four controls of any shape (traps 11, 12, 14, 17, 19)."""
    cases = sweep(variant) if every else some(variant)
    options = [*small_options(variant), "--dtype", dtype, "--set", "data.allow_empty_prompt=true"]
    samples = by_name(build_cache(tmp_path, cases, tiny_model(variant), *options))
    for name, it in cases.items():
        try:
            assert_matches_stock(samples[name], it, tiny_model(variant), variant)
        except AssertionError as error:
            error.add_note(f"sample {name}")
            raise


@pytest.mark.parametrize("tokens", [512, 513])
def test_a_prompt_that_text_to_image_would_cut_is_refused(tokens: int, tiny_model: TinyModel, tmp_path: Path) -> None:
    pipeline = stock_pipeline(tiny_model("t2i"), "t2i")
    around = len(pipeline.tokenizer(pipeline.prompt_template_encode.format("")).input_ids)
    prompt = "7" * (tokens + pipeline.prompt_template_encode_start_idx - around)  # a digit is a token
    source = write_source(tmp_path / "source", {"it": case([(100, 100)], prompt)})
    options = ["--model", tiny_model("t2i"), "--dtype", "float32", *small_options("t2i")]
    result = run("qwen-cache", "build", source, "--out", tmp_path / "shards", *options)
    assert len(transformer_inputs(pipeline, [], prompt).prompt_embeds) == 512
    if tokens > 512:
        assert result.code == 2
        assert "metadata.jsonl:1: it: the prompt has 513 tokens, the pipeline uses 512" in result.stderr
    else:
        assert_same(
            open_cache(tmp_path / "shards")[0]["prompt_embeds"], transformer_inputs(pipeline, [], prompt).prompt_embeds
        )


# ---- one trap each ---------------------------------------------------------------------------------------------------


def test_values_beyond_float16_are_kept(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 17: a model whose embeddings reach beyond 65504, as those of the trained one do."""
    folder = shutil.copytree(tiny_model("edit-plus"), tmp_path / "model")
    encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder")
    encoder.model.language_model.norm.weight.data *= 2.0**17
    encoder.save_pretrained(folder / "text_encoder")
    usual, sample = (
        build_cache(tmp_path / name, {"it": case([(96, 96)] * 2, "make it blue")}, model, *small_options("edit-plus"))[
            0
        ]
        for name, model in (("usual", tiny_model("edit-plus")), ("far", folder))
    )
    assert sample["prompt_embeds"].dtype == torch.bfloat16
    assert float(sample["prompt_embeds"].abs().max()) > 65504
    for name in ("prompt_embeds", "empty_prompt_embeds"):
        assert torch.equal(sample[name], usual[name] * 2.0**17), "the last norm is multiplied by a power of 2"


def test_the_same_work_is_done_once_and_changes_nothing(tiny_model: TinyModel, tmp_path: Path) -> None:
    """One image under many prompts, not even side by side: bit for bit what each gives alone, in passes of one."""
    cases = {
        f"{prompt[-3:]}-{size[0]}": case([(150, 100), size], prompt)
        for prompt in ("make it red", "make it blue", "")
        for size in ((96, 96), (100, 64))
    }
    calls: dict[str, int] = {}

    def counting(owner: type, method: str) -> Any:
        original = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            calls[method] = calls.get(method, 0) + 1
            return original(*arguments)

        return patch.object(owner, method, call)

    options = ["--dtype", "float32", "--set", "data.allow_empty_prompt=true", *small_options("edit-plus")]
    with counting(VaeEncoder, "encode"), counting(TextEncoder, "read"):
        together = by_name(build_cache(tmp_path / "all", cases, tiny_model("edit-plus"), *options))
    assert calls == {"encode": 3, "read": 2}  # a target and two controls; two controls
    for name in itemgetter(1, 2, 5)([*cases]):  # each prompt and each size, among them the last of all
        alone = build_cache(tmp_path / name, {name: cases[name]}, tiny_model("edit-plus"), *options)[0]
        assert together[name].key == alone.key
        assert together[name].row.meta == alone.row.meta  # with the hash of every tensor
    saved = json.loads(run("qwen-cache", "inspect", tmp_path / "all" / "shards", "--json").stdout)
    assert saved["recipes"]["default"]["saved"]["vae_passes"] == 12 - 3
    assert saved["recipes"]["default"]["saved"]["prefix_passes"] == 6 - 2
    assert "9 VAE runs and 4 prefix runs" in run("qwen-cache", "inspect", tmp_path / "all" / "shards").stdout


def spoiled_latents(results: list[Tensor], value: float) -> list[Tensor]:
    return [latents.index_fill(1, torch.tensor([5]), value) for latents in results]


def spoiled_text(results: list[EncodedText], value: float) -> list[EncodedText]:
    return [replace(text, empty=text.empty * value) for text in results]


@pytest.mark.parametrize(
    ("lane", "spoil", "tensor", "value"),
    [
        pytest.param(VaeEncoder, spoiled_latents, "image_latents", float("inf"), marks=pytest.mark.slow),
        (TextEncoder, spoiled_text, "empty_prompt_embeds", float("nan")),
        pytest.param(VaeEncoder, spoiled_latents, "image_latents", float("nan"), marks=pytest.mark.slow),
        pytest.param(TextEncoder, spoiled_text, "empty_prompt_embeds", float("inf"), marks=pytest.mark.slow),
    ],
)
def test_what_is_not_finite_is_refused_and_nothing_is_committed(
    lane: type,
    spoil: Callable[..., Any],
    tensor: str,
    value: float,
    tiny_model: TinyModel,
    pairs: Path,
    tmp_path: Path,
) -> None:
    """Trap 17: an encoder overflows at one sample; what was encoded before it stays for the next build."""
    out, calls, encode = tmp_path / "shards", [], lane.encode

    def overflow(self: Any, *arguments: Any) -> Any:
        calls.append(arguments)
        result = encode(self, *arguments)
        return spoil(result, value) if len(calls) == (1 if lane is TextEncoder else 4) else result

    with patch.object(lane, "encode", overflow):
        result = build(pairs, out, tiny_model("edit-plus"))
    name = "cat" if lane is TextEncoder else "china"  # the VAE's fourth image, after the cat's three
    assert result.code == 2
    assert f"{name}.png: {tensor} of {name} is not finite (found NaN or Inf)" in result.stderr
    assert "build with --dtype float32, and check the model's weights" in result.stderr
    assert not (out / "cache.json").exists()
    assert not list(out.glob("*.tar"))
    assert build(pairs, out, tiny_model("edit-plus")).code == 0
    assert len(open_cache(out)) == 4


@pytest.mark.parametrize("missing", ["cat.png", "china.png"])
def test_a_missing_control_stops_the_build_and_names_its_row(
    missing: str, tiny_model: TinyModel, pairs: Path, tmp_path: Path
) -> None:
    """Trap 18: no other control, and no other sample's, moves up."""
    (pairs / "control_images" / missing).unlink()
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"))
    assert result.code == 2
    assert (
        f"{pairs / 'target_images' / missing}: the control control_images/{missing} (or .jpg, …) is missing"
        in result.stderr
    )
    assert "nothing will be encoded" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_control_of_a_table_stops_the_build_and_names_its_row(
    index: int, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Trap 18, where the table lists several controls."""
    cases = {"first": case(SEVERAL["two"], "one"), "second": case(SEVERAL["two"], "two")}
    source = write_source(tmp_path / "source", cases)
    (source / f"second-control{index}.png").unlink()
    result = build(source, tmp_path / "shards", tiny_model("edit-plus"))
    assert result.code == 2
    missing = source / f"second-control{index}.png"
    assert f"{source / 'metadata.jsonl'}:2: the control {missing} does not exist" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()


@pytest.mark.slow
def test_without_torchvision_a_build_is_the_same(
    tiny_model: TinyModel, built: Callable[..., Path], tmp_path: Path
) -> None:
    """Trap 25: the images go through PIL, and the recipe says so."""
    program = "import sys; sys.modules['torchvision'] = None; from qwen_cache.cli import main; main()"
    source, out = write_pairs(tmp_path / "data"), tmp_path / "shards"
    arguments = ["build", source, "--out", out, "--model", tiny_model("edit-plus"), *SMALL]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    opened = open_cache(out)
    assert opened.recipe.recipe["image_backend"] == "pil"
    assert opened.identity == open_cache(built("edit-plus")).identity
    for sample in opened:
        for name, tensor in sample.tensors().items():
            if name != "edit_mask":
                assert relative(tensor, open_cache(built("edit-plus"))[sample.key][name]) < TOLERANCE
