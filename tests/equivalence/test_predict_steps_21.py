"""Qwen-Image-2.1: `predict` is the stock pipeline step by step, bit for bit, with the KV cache and without.

As in test_predict_steps.py, of the 20B family: both pipelines are called with the same arguments, and all that goes
from part to part is compared, here with the keys and values that stay between steps. Only prompts in a batch are equal
up to rounding, which stock encodes in one pass and we one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import numpy as np
import pytest
import torch
from PIL import Image

from qwen_cache.encode.vae import VaeThatFits
from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import PredictConfig
from qwen_train.inference import pipeline as pipelines
from qwen_train.inference.pipeline import Devices, PromptEncoder, encode_prompts, load_pipeline
from tests.support.both_pipelines import CPU, PARTS, Both, assert_equal, copied, our_pipeline
from tests.support.judge import TOLERANCE, TinyModel, image, relative
from tests.support.marks import slow
from tests.support.paths import load_tool
from tests.support.qwen_image_21 import stock_pipeline_21, transparent

RESOLUTION = 96
PROMPT = {"prompt": "make it 黑白", "output_resolution": RESOLUTION}
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
FLOAT32 = PredictConfig(dtype="float32")
Make = Callable[..., Both]


def images(count: int) -> list[Any]:
    """With transparency, without, and as an array."""
    return [
        transparent("china.jpg", (160, 107)),
        image("chelsea.png", (60, 120)),
        np.asarray(transparent("coffee.png", (97, 130))),
    ][:count]


@pytest.fixture
def both(tiny_model: TinyModel) -> Make:
    """Both pipelines with images; float32 when nothing else is said."""

    def make(count: int, dtype: torch.dtype = torch.float32) -> Both:
        folder = tiny_model("qwen-image-21")
        return Both(our_pipeline(folder, dtype), stock_pipeline_21(folder, dtype), images(count))

    return make


def thorough(fast: Callable[..., bool], *values: Sequence[Any]) -> list[Any]:
    """Every combination; those that are not `fast` are twins of one that is."""
    return [pytest.param(*each, marks=[] if fast(*each) else pytest.mark.slow) for each in product(*values)]


# ---- every step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "kept", "guidance", "dtype"),
    thorough(
        lambda count, kept, guidance, dtype: guidance and (dtype == torch.float32 or (count, kept) == (2, True)),
        range(4),
        [True, False],
        [{}, GUIDED],
        [torch.float32, torch.bfloat16],
    ),
)
def test_all_that_goes_from_part_to_part_is_equal(
    count: int, kept: bool, guidance: dict[str, Any], dtype: torch.dtype, both: Make
) -> None:
    ours, stock = both(count, dtype).trace(**PROMPT, **guidance, use_kv_cache=kept)
    assert_equal(ours, stock)
    per_step = ["forward"] * (2 if guidance else 1) + ["step"]
    expected = ["encode"] * count + ["prepare_latents", "set_timesteps", *per_step, *per_step, "decode"]
    assert [call[0] for call in stock[:-1]] == expected  # nothing went by unseen
    modes = [call[1]["kv_cache_mode"] for call in stock[:-1] if call[0] == "forward"]
    half = len(modes) // 2
    assert modes == (["extract"] * half + ["cached"] * half if kept else [None] * len(modes))


@pytest.mark.fast_cases(9)
@pytest.mark.parametrize("count", [2, 0])
@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": ""},
        {"num_images_per_prompt": 2, **GUIDED},
        {"sigmas": [1.0, 0.7, 0.4]},
        {"latents": torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1))},
        {"height": 32, "width": 90},
        {"height": None, "width": None, "output_resolution": 64},
        {"attention_kwargs": {}, "negative_prompt": "", "true_cfg_scale": 1.0},
        {"num_images_per_prompt": 2, "seeds": [4, 5]},
    ],
    ids=["empty prompt", "two images", "sigmas", "latents", "odd size", "own size", "no guidance", "generators"],
)
def test_every_argument_means_what_it_means_in_stock(arguments: dict[str, Any], count: int, both: Make) -> None:
    assert_equal(*both(count).trace(**PROMPT | arguments))


def test_the_kept_keys_and_values_are_those_of_every_step(both: Make) -> None:
    """So that both settings are compared with one function; in half precision they round differently."""
    pipelines = both(2)
    kept, computed = (
        pipelines.call(**PROMPT, **GUIDED, num_inference_steps=4, use_kv_cache=each, output_type="latent")[0].images
        for each in (True, False)
    )
    assert relative(kept, computed) < TOLERANCE
    assert relative(kept, pipelines.call(**PROMPT, num_inference_steps=4, output_type="latent")[0].images) > 1e-2


@pytest.mark.parametrize("output_type", ["pil", slow("np"), slow("pt"), "latent"])
def test_every_form_of_the_result(output_type: str, both: Make) -> None:
    pipelines = both(2)
    ours, stock = pipelines.call(**PROMPT, output_type=output_type)
    assert_equal(ours.images, stock.images)
    alone, stock_alone = pipelines.call(**PROMPT, output_type=output_type, return_dict=False)
    assert_equal(alone, stock_alone)
    assert_equal(alone[0], stock.images)
    if output_type == "pil":
        assert ours.images[0].mode == "RGBA"
        assert len(set(ours.images[0].getchannel("A").tobytes())) > 1


def test_a_callback_sees_every_step_and_may_change_it(both: Make) -> None:
    seen: dict[Any, list[Any]] = {}

    def halve(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.setdefault(pipeline, []).append(copied([step, timestep, tensors]))
        return {"latents": tensors["latents"] / 2}

    pipelines = both(1)
    names = ["latents", "prompt_embeds"]
    ours, stock = pipelines.call(**PROMPT, callback_on_step_end=halve, callback_on_step_end_tensor_inputs=names)
    assert_equal(seen[pipelines.ours], seen[pipelines.stock])
    assert len(seen[pipelines.ours]) == 2
    assert_equal(ours.images, stock.images)


def test_a_distilled_model_is_sampled_at_its_own_levels(tmp_path: Path) -> None:
    """And at others if they are given; like stock, the pipeline itself ignores the number of steps."""
    tool: Any = load_tool("make_tiny_model")
    folder = tool.make_tiny_model(tmp_path / "model", "qwen-image-21", sample_sigmas=[1.0, 0.8, 0.3])
    pipelines = Both(our_pipeline.__wrapped__(folder, torch.float32), stock_pipeline_21.__wrapped__(folder), images(1))
    for given, steps in (({}, 3), ({"num_inference_steps": 5}, 3), ({"sigmas": [1.0, 0.5]}, 2)):
        ours, stock = pipelines.trace(**PROMPT, **given)
        assert_equal(ours, stock)
        assert sum(call[0] == "step" for call in ours[:-1]) == steps


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 2])
def test_two_prompts_at_once_share_the_images(count: int, both: Make) -> None:
    """With stock's own embeddings all is equal to the bit, padding, masks and slots included."""
    pipelines = both(count)
    prompts = ["a cat", "make the second one 黑白, and keep all of its reflections where they are"]
    ours, stock = pipelines.trace(prompt=prompts, output_resolution=RESOLUTION)
    calls = [next(call[1] for call in trace[:-1] if call[0] == "forward") for trace in (ours, stock)]
    for name in ("encoder_hidden_states_mask", "img_mask", "img_shapes"):
        assert_equal(*(call[name] for call in calls))
    embeds, masks = ([call[name] for call in calls] for name in ("encoder_hidden_states", "encoder_hidden_states_mask"))
    assert not masks[0].all()
    valid = masks[0].bool()
    assert relative(embeds[0][valid], embeds[1][valid]) < TOLERANCE
    assert not embeds[0][~valid].any()
    with patch.object(pipelines.ours, "prompt_encoder", StockEmbeddings(pipelines.stock)):
        assert_equal(*pipelines.trace(prompt=prompts, output_resolution=RESOLUTION))


class StockEmbeddings:
    """Takes the place of our text encoder."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def embed(self, prompts: list[str], images: list[Image.Image]) -> Any:
        return self.stock._get_qwen_prompt_embeds(prompts, images or None)

    def leave(self) -> None: ...


@pytest.mark.parametrize("count", [0, slow(1), 3])
def test_prompts_encoded_before_give_the_same_images(count: int, both: Make, tiny_model: TinyModel) -> None:
    """Prompts are encoded as by `predict`, which frees the text encoder: from the originals, none in the pipeline."""
    pipelines = both(count)
    model = open_model(str(tiny_model("qwen-image-21")), PARTS)
    originals = [image if isinstance(image, Image.Image) else Image.fromarray(image) for image in pipelines.images]
    embeds = encode_prompts(
        model,
        [image.convert("RGBA") for image in originals],
        PROMPT["prompt"],  # type: ignore[arg-type]
        "blurry",
        CPU,
        torch.float32,
        area=RESOLUTION**2,
    )
    given = {"output_resolution": RESOLUTION, "num_inference_steps": 2, "true_cfg_scale": 3.0}
    given |= {"image": pipelines.images} if count else {}
    with patch("qwen_train.inference.pipeline.TextEncoder", side_effect=AssertionError("loaded")):
        fresh = our_pipeline.__wrapped__(tiny_model("qwen-image-21"), torch.float32)
        ours = fresh(**embeds, **given, generator=torch.Generator().manual_seed(3)).images
        again = fresh(**embeds, **given, generator=torch.Generator().manual_seed(3)).images
    stock = pipelines.stock(**PROMPT | GUIDED | given, generator=torch.Generator().manual_seed(3)).images
    assert_equal(ours, stock)
    assert_equal(again, stock)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {**PROMPT, "prompt_embeds": torch.zeros(1, 3, 64)},
        {"prompt_embeds": torch.zeros(1, 3, 64)},
        {**PROMPT, "callback_on_step_end_tensor_inputs": ["noise"]},
        {**PROMPT, "image": [[Image.new("RGB", (64, 64))]]},
    ],
    ids=["no prompt", "both", "embeddings of unknown rows", "unknown tensor", "nested images"],
)
def test_what_stock_refuses_is_refused_in_its_words(arguments: dict[str, Any], both: Make) -> None:
    pipelines, errors = both(1), []
    for pipeline in (pipelines.ours, pipelines.stock):
        with pytest.raises(ValueError, match=r"prompt|callback|image") as error:
            pipeline(**{"image": pipelines.images[0], **arguments})
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("offload", ["model", "sequential"])
def test_offloaded_all_is_equal(offload: Any, both: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU takes the accelerator's place: the hooks are the same, and what is not where it should be raises."""
    monkeypatch.setattr(pipelines, "check_offload", lambda *arguments: None)
    monkeypatch.setattr(PromptEncoder, "_offloads", True)
    for name in ("cpu_offload", "cpu_offload_with_hook"):  # diffusers says cpu:0, where torch says cpu
        hook = getattr(accelerate, name)
        monkeypatch.setattr(accelerate, name, lambda model, device, f=hook, **named: f(model, "cpu", **named))
    resident = both(2)
    ours = load_pipeline(resident.ours.prompt_encoder.model, PredictConfig(dtype="float32", offload=offload), CPU)
    offloaded = Both(ours, resident.stock, resident.images)
    for _ in range(2):  # after a call the hooks are taken off and put on once more
        assert_equal(*(result.images for result in offloaded.call(**PROMPT, **GUIDED)))
        parts = (ours.transformer, ours.prompt_encoder._encoder.model, ours.vae)
        away = [next(part.parameters()).is_meta for part in parts]
        assert away == ([True, True, False] if offload == "sequential" else [False] * 3)


def test_tensors_go_to_the_device_of_the_part_that_takes_them(tiny_model: TinyModel) -> None:
    """Another device, as far as a machine without one has it: `meta`, where nothing can be mixed with the CPU."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    model = open_model(str(tiny_model("qwen-image-21")), PARTS)
    pixels = torch.zeros(1, 4, 1, 32, 32)
    pipeline = load_pipeline(model, FLOAT32, Devices(meta, cpu, cpu))
    assert pipeline.vae.encode(pixels).latent_dist.mode().device == meta
    assert pipeline.vae.decode(torch.zeros(1, 64, 1, 2, 2)).sample.device == meta
    pipeline = load_pipeline(model, FLOAT32, Devices(cpu, cpu, meta))
    assert pipeline._encode_vae_image(pixels, None).device == meta
    encoded = pipeline._get_qwen_prompt_embeds("a fox", [Image.new("RGBA", (64, 64))])
    assert [tensor.device for tensor in encoded] == [meta] * 3


def test_an_image_too_large_for_the_device_is_encoded_and_decoded_in_tiles(
    both: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines = both(1)
    whole, _ = pipelines.call(**PROMPT, output_type="np")
    vae = pipelines.ours.vae.vae

    def no_memory(*arguments: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(VaeThatFits, "__init__", lambda self, it: self.__dict__.update(vae=it, tile=32))
    with patch.object(vae, "encode", no_memory), patch.object(vae, "decode", no_memory):
        tiled = pipelines.ours(
            **PROMPT,
            image=pipelines.images[0],
            num_inference_steps=2,
            height=64,
            width=96,
            output_type="np",
            generator=torch.Generator().manual_seed(3),
        )
    assert np.abs(tiled.images - whole.images).max() < 1e-3
