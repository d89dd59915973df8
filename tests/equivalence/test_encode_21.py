"""A cache of Qwen-Image-2.1 holds what the stock pipeline feeds its transformer, as far as the transformer reads it."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from qwen_cache import open_cache
from qwen_cache.encode import text
from qwen_cache.errors import ModelError
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from tests.support.commands import run
from tests.support.judge import (
    PROMPTS,
    SEVERAL,
    Case,
    TinyModel,
    build_cache,
    by_name,
    case,
    image,
    relative,
    write_source,
)
from tests.support.qwen_image_21 import (
    RESOLUTION,
    SMALL_21,
    assert_matches_stock_21,
    stock_pipeline_21,
    transformer_inputs_21,
    transparent,
)

PAIR = [(150, 100), (100, 150)]


@cache
def sweep() -> dict[str, Case]:
    """Text to image, one to four controls of any shape, prompts in any script, any mode."""
    cases = {name: case(PAIR, PROMPTS[name]) for name in ("chinese", "braces", "empty")}
    cases |= {name: case(sizes, f"make it {name}") for name, sizes in SEVERAL.items()}
    cases |= {"text to image": case([(333, 517)], PROMPTS["long"]), "nothing": case([(640, 100)], "")}
    cases["one space"] = case(PAIR[:1], " ")
    cases["alpha"] = Case(
        transparent("coffee.png", (150, 100)),
        (
            transparent("china.jpg", (100, 150)),
            image("flower.jpg", (90, 200)),
            transparent("china.jpg", (80, 80), "LA"),
        ),
        "cut it out",
    )
    return cases


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_whatever_the_sample_a_cache_holds_what_the_pipeline_feeds_its_transformer(
    dtype: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tiny_model("qwen-image-21")
    options = [*SMALL_21, "--dtype", dtype, "--set", "data.allow_empty_prompt=true"]
    samples = by_name(build_cache(tmp_path, sweep(), folder, *options))
    for name, it in sweep().items():
        try:
            assert_matches_stock_21(samples[name], it, folder)
        except AssertionError as error:
            error.add_note(f"sample {name}")
            raise


def test_several_samples_in_one_pass_are_what_each_is_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Batches as on a GPU: prompts of different lengths, images of different sizes, padded on the right."""
    cases = {name: it for name, it in sweep().items() if name in ("chinese", "two", "text to image", "one space")}
    cases |= {
        "other two": case([(107, 160), (160, 107), (60, 300)], "make it two"),
        "square": case([(90, 90)] * 2, "x"),
    }
    batches = ["--set", "cache.text_batch_tokens=100000", "--set", "cache.vae_batch_pixels=1000000"]
    options = [*SMALL_21, "--dtype", "float32", *batches, "--set", "data.allow_empty_prompt=true"]
    for name, sample in by_name(build_cache(tmp_path, cases, tiny_model("qwen-image-21"), *options)).items():
        assert_matches_stock_21(sample, cases[name], tiny_model("qwen-image-21"))


def test_prompts_about_the_same_images_share_one_prefix(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, passes = text.TextEncoder.read, []
    monkeypatch.setattr(text.TextEncoder, "read", lambda self, inputs: passes.append(len(inputs)) or read(self, inputs))
    cases = {f"prompt {i}": case(PAIR, f"make it {i}") for i in range(3)}
    samples = by_name(build_cache(tmp_path, cases, tiny_model("qwen-image-21"), *SMALL_21, "--dtype", "float32"))
    assert passes == [1]
    shared = samples["prompt 0"].row.meta.prefix_length
    assert shared > 0
    for name, it in cases.items():
        assert_matches_stock_21(samples[name], it, tiny_model("qwen-image-21"))
        assert torch.equal(samples[name]["prompt_embeds"][:shared], samples["prompt 0"]["prompt_embeds"][:shared])


def test_the_final_norm_would_change_the_embeddings(tiny_model: TinyModel) -> None:
    """Trap 35: so a test of the embeddings sees which state was taken."""
    pipeline = stock_pipeline_21(tiny_model("qwen-image-21"))
    before = transformer_inputs_21(pipeline, [], "a cat").prompt_embeds
    after = pipeline.text_encoder.model.language_model.norm(before).detach()
    assert relative(nn.functional.normalize(after), nn.functional.normalize(before)) > 0.1


def test_another_transformers_that_normalises_elsewhere_is_refused(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(str(tiny_model("qwen-image-21")), ENCODER_PARTS)
    stock = text.load_text_encoder

    def load(*given: Any) -> Any:
        encoder = stock(*given)
        decoder, forward = encoder.model.language_model, encoder.model.language_model.forward

        def normalised(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            output.last_hidden_state = nn.functional.normalize(output.last_hidden_state)
            return output

        decoder.forward = normalised
        return encoder

    monkeypatch.setattr(text, "load_text_encoder", load)
    with pytest.raises(
        ModelError, match=r"the hidden state before the final norm cannot be taken.*\n?.*transformers 5"
    ):
        text.TextEncoder(model, torch.device("cpu"), torch.float32)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "data.condition_image_size=12544"], "Qwen-Image-2.1 has no data.condition_image_size"),
        (["--format", "v1"], "format v1 cannot hold a cache of Qwen-Image-2.1"),
    ],
)
def test_settings_of_the_other_family_are_refused(
    options: list[str], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    source = write_source(tmp_path / "source", {"it": case(PAIR, "make it blue")})
    arguments = ["--out", tmp_path / "shards", "--model", tiny_model("qwen-image-21"), *options]
    result = run("qwen-cache", "build", source, *arguments)
    assert result.code == 2
    assert message in result.stderr


def test_images_that_the_encoder_would_resize_again_are_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The published processor enlarges images below 65536 pixels; their tokens would no longer fit the latents."""
    folder = shutil.copytree(tiny_model("qwen-image-21"), tmp_path / "model")
    file = folder / "processor" / "preprocessor_config.json"
    file.write_text(file.read_text(encoding="utf-8").replace("1024", "65536"), encoding="utf-8")
    source = write_source(tmp_path / "source", {"it": case(PAIR, "make it blue")})
    result = run("qwen-cache", "build", source, "--out", tmp_path / "shards", "--model", folder, *SMALL_21)
    assert result.code == 2
    assert "the text encoder's processor would resize the image" in result.stderr
    assert "raise data.vae_image_size" in result.stderr


# ---- what a sample takes ---------------------------------------------------------------------------------------------


def test_a_sample_at_the_real_sizes_takes_less_than_1_7_megabytes(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Computed by the plan, for an edit at 1024² with one control, at the width of the real encoder (4096)."""
    folder = shutil.copytree(tiny_model("qwen-image-21"), tmp_path / "model")
    file = folder / "text_encoder" / "config.json"
    config = file.read_text(encoding="utf-8").replace('hidden_size": 64', 'hidden_size": 4096')  # and what vision gives
    file.write_text(config, encoding="utf-8")
    prompt = (
        "Replace the cup on the left by a glass of water, and keep the light, the shadows and everything else. " * 2
    )
    source = write_source(tmp_path / "source", {"it": case([(512, 512), (512, 512)], prompt)})
    result = run("qwen-cache", "build", source, "--out", tmp_path / "shards", "--model", folder, "--dry-run", "--json")
    assert result.code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["image_tokens"] == 2 * 64 * 64
    assert 1_048_576 < plan["bytes"] <= 1_700_000


def test_the_recipe_names_family_and_licence(tiny_model: TinyModel, tmp_path: Path) -> None:
    options = [*SMALL_21, "--dtype", "float32"]
    build_cache(tmp_path, {"it": case(PAIR[:1], "a cat")}, tiny_model("qwen-image-21"), *options)
    recipe = open_cache(tmp_path / "shards").recipe.recipe
    assert (recipe["family"], recipe["license"]) == ("Qwen-Image-2.1", "qwen-research")
    assert recipe["vae_image_size"] == RESOLUTION**2
    shown = run("qwen-cache", "inspect", tmp_path / "shards").stdout
    assert "Qwen-Image-2.1, licence qwen-research" in shown


def test_new_masks_keep_everything_else_of_a_sample(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Edits get a mask and attention, text to image has neither; then only the masks are made again."""
    cases = {"edit": case([(150, 100), (150, 100)], "make it blue"), "t2i": case(PAIR[:1], "a cat")}
    options = [*SMALL_21, "--dtype", "float32", "--set", "cache.store_attention=true"]
    folder = tiny_model("qwen-image-21")
    before = by_name(build_cache(tmp_path, cases, folder, *options, "--edit-mask", "diff"))
    assert before["edit"]["attention"].shape == (16, *(side // 2 for side in before["edit"].img_shapes[1][1:]))
    assert "attention" not in before["t2i"]
    arguments = ["--out", tmp_path / "shards", "--model", folder, *options, "--edit-mask", "none"]
    result = run("qwen-cache", "build", tmp_path / "source", *arguments)
    assert "2 samples with only a new mask" in result.stderr
    after = by_name(open_cache(tmp_path / "shards"))
    for name, sample in after.items():
        assert sample.row.meta.image_positions == before[name].row.meta.image_positions
        assert_matches_stock_21(sample, cases[name], folder)
