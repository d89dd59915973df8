"""`predict` draws with the stock pipeline, step by step: all that goes from part to part is equal, bit for bit.

Both pipelines are called with the same arguments, while spies write down what enters and leaves the VAE, the
transformer and the scheduler. Exact on any one machine, in float32 and in bfloat16, because it is the same modules on
the same shapes; but for prompts in a batch, which stock encodes in one pass and we one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import pytest
import torch
from accelerate.hooks import CpuOffload
from PIL import Image

from qwen_cache.encode.text import TextEncoder
from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import PredictConfig
from qwen_train.inference import pipeline as drawing
from qwen_train.inference.pipeline import Devices, PromptEncoder, load_loras, load_pipeline
from qwen_train.lora.export import export
from qwen_train.lora.files import WeightedLora
from qwen_train.training.publish import POSITIONS
from tests.support.both_pipelines import CPU, PARTS, Both, assert_equal, copied, our_pipeline
from tests.support.judge import TOLERANCE, image, relative, stock_pipeline
from tests.support.paths import load_tool

TinyModel = Callable[[str], Path]
IMAGES = [("china.jpg", (160, 107)), ("chelsea.png", (60, 120)), ("coffee.png", (97, 130))]
EDITS = [("edit", 1), ("edit-plus", 1), ("edit-plus", 2), ("edit-plus", 3), ("edit-2511", 2)]
FROM_TEXT = [("t2i", 0), ("edit-2511", 0), ("edit", 0), ("edit-plus", 0)]
ONE_FAST = [("edit-plus", 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("t2i", 0), ("edit", 1)))]
FLOAT32 = PredictConfig(dtype="float32")
PROMPT = {"prompt": "make it 黑白"}
GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}


# ---- both pipelines --------------------------------------------------------------------------------------------------


@pytest.fixture
def both(tiny_model: TinyModel, small_areas: None) -> Callable[..., Both]:
    """Both pipelines of a variant, with images; float32 when nothing else is said.

    Without images those of text to image, with the components of the variant.
    """

    def make(variant: str, count: int, dtype: torch.dtype = torch.float32) -> Both:
        folder = tiny_model(variant)
        images = [image(name, size) for name, size in IMAGES[:count]]
        ours = our_pipeline(folder, dtype)
        if not images:
            return Both(ours.without_images, stock_pipeline(folder, "t2i", dtype))
        return Both(ours, stock_pipeline(folder, variant, dtype), images)

    return make


# ---- every step ------------------------------------------------------------------------------------------------------


def thorough(fast: Callable[..., bool], *values: Sequence[Any]) -> list[Any]:
    """Every combination; those that are not `fast` are twins of one that is."""
    return [pytest.param(*each, marks=[] if fast(*each) else pytest.mark.slow) for each in product(*values)]


@pytest.mark.parametrize(
    ("which", "guidance", "dtype"),
    thorough(
        lambda which, guidance, dtype: (
            guidance and which not in FROM_TEXT[2:] and (dtype == torch.float32 or which == ("edit-plus", 2))
        ),
        EDITS + FROM_TEXT,
        [{}, GUIDED],
        [torch.float32, torch.bfloat16],
    ),
)
def test_all_that_goes_from_part_to_part_is_equal(
    which: tuple[str, int], guidance: dict[str, Any], dtype: torch.dtype, both: Callable[..., Both]
) -> None:
    (_, count) = which
    ours, stock = both(*which, dtype).trace(**PROMPT, **guidance)
    assert_equal(ours, stock)
    per_step = ["forward"] * (2 if guidance else 1) + ["step"]
    expected = ["encode"] * count + ["prepare_latents", "set_timesteps", *per_step, *per_step, "decode"]
    assert [call[0] for call in stock[:-1]] == expected  # nothing went by unseen


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": ""},
        {**PROMPT, "num_images_per_prompt": 2, **GUIDED},
        {**PROMPT, "sigmas": [1.0, 0.7, 0.4]},
        {**PROMPT, "latents": torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(1))},
        {**PROMPT, "height": 32, "width": 40},
        {**PROMPT, "guidance_scale": 2.0, "attention_kwargs": {}},
        {**PROMPT, "negative_prompt": "", "true_cfg_scale": 1.0},
        {**PROMPT, "max_sequence_length": 3},
    ],
    ids=["empty prompt", "two images", "sigmas", "latents", "32 pixels", "guidance", "no guidance", "cut"],
)
@pytest.mark.parametrize(("variant", "count"), ONE_FAST)
def test_every_argument_means_what_it_means_in_stock(
    variant: str, count: int, arguments: dict[str, Any], both: Callable[..., Both]
) -> None:
    assert_equal(*both(variant, count).trace(**arguments))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["edit", "edit-plus"])
def test_a_sliver_of_32_pixels_at_the_pipelines_own_sizes(variant: str, tiny_model: TinyModel) -> None:
    """1:20, which becomes 224×4608."""
    folder = tiny_model(variant)
    pipelines = Both(our_pipeline(folder, torch.float32), stock_pipeline(folder, variant))
    assert_equal(*pipelines.trace(**PROMPT, image=image("china.jpg", (32, 640)), num_inference_steps=2))


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
@pytest.mark.parametrize(("variant", "count"), ONE_FAST)
def test_every_form_of_the_result(variant: str, count: int, output_type: str, both: Callable[..., Both]) -> None:
    """Alone; other tests have images and latents by name."""
    ours, stock = both(variant, count).call(**PROMPT, output_type=output_type, return_dict=False)
    assert_equal(ours, stock)


def test_a_callback_sees_every_step_and_may_change_it(both: Callable[..., Both]) -> None:
    seen: dict[Any, list[Any]] = {}

    def halve(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.setdefault(pipeline, []).append(copied([step, timestep, tensors]))
        return {"latents": tensors["latents"] / 2}

    pipelines = both("edit-plus", 1)
    names = ["latents", "prompt_embeds"]
    ours, stock = pipelines.call(**PROMPT, callback_on_step_end=halve, callback_on_step_end_tensor_inputs=names)
    assert_equal(seen[pipelines.ours], seen[pipelines.stock])
    assert len(seen[pipelines.ours]) == 2
    assert_equal(ours.images, stock.images)


# ---- LoRAs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "count"), ONE_FAST)
def test_a_lora_does_in_stock_diffusers_what_it_does_here(
    variant: str, count: int, tiny_model: TinyModel, small_areas: None, tmp_path: Path
) -> None:
    """From both files, with the lines of the model card: without them the prompts of an editing model are others."""
    folder = tiny_model(variant)
    write_random_lora: Any = load_tool("bench_parity").write_random_lora
    lora = write_random_lora(folder, tmp_path / "run") / "pytorch_lora_weights.safetensors"
    ours, stock = our_pipeline.__wrapped__(folder, torch.float32), stock_pipeline.__wrapped__
    pipelines = Both(ours, stock(folder, variant, corrected=False), [image(*each) for each in IMAGES[:count]])
    arguments = {**PROMPT, **GUIDED, "output_type": "latent"}
    without = pipelines.call_one(ours, **arguments)
    load_loras(ours, [WeightedLora(lora, 1.0)])
    with_lora = pipelines.call_one(ours, **arguments)
    assert relative(with_lora.images, without.images) > 0.01
    for number, file in enumerate((lora, export(lora, "comfyui", tmp_path / "comfyui.safetensors"))):
        pipelines.stock.load_lora_weights(str(file.parent), weight_name=file.name)
        if count and not number:
            of_other_prompts = pipelines.call_one(pipelines.stock, **arguments)
            assert relative(with_lora.images, of_other_prompts.images) > 0.01
            exec(POSITIONS, {"pipe": pipelines.stock})
        assert_equal(with_lora.images, pipelines.call_one(pipelines.stock, **arguments).images)
        pipelines.stock.unload_lora_weights()


# ---- prompts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "count"), [("t2i", 0), ("edit", 1)])
def test_two_prompts_at_once(variant: str, count: int, both: Callable[..., Both]) -> None:
    """Edit takes an image for each. With stock's own embeddings all is equal to the bit, padding and mask included."""
    pipelines = both(variant, count)
    prompts = ["a cat", "make the second one 黑白, and keep all of its reflections where they are"]
    two = [image("china.jpg", (96, 96)), image("chelsea.png", (96, 96))]
    controls = {"image": two} if variant == "edit" else {}
    ours, stock = pipelines.trace(**controls, prompt=prompts)
    calls = [next(call[1] for call in trace[:-1] if call[0] == "forward") for trace in (ours, stock)]
    embeds, masks = ([call[name] for call in calls] for name in ("encoder_hidden_states", "encoder_hidden_states_mask"))
    assert_equal(masks[0], masks[1])
    assert not masks[0].all()
    valid = masks[0].bool()
    assert relative(embeds[0][valid], embeds[1][valid]) < TOLERANCE
    assert not embeds[0][~valid].any()
    given = {"prompt_embeds": embeds[1], "prompt_embeds_mask": masks[1]}
    assert_equal(*pipelines.trace(**controls, **given))


def test_given_embeddings_load_no_encoder(tiny_model: TinyModel, small_areas: None) -> None:
    folder = tiny_model("edit")
    fresh = our_pipeline.__wrapped__(folder, torch.float32)
    pipelines = Both(fresh, stock_pipeline(folder, "edit"), [image("china.jpg", (96, 96))])
    embeds = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(1))
    names = ("prompt_embeds", "negative_prompt_embeds")
    with patch("qwen_train.inference.pipeline.TextEncoder", side_effect=AssertionError("loaded")):
        assert_equal(*pipelines.trace(**dict.fromkeys(names, embeds), true_cfg_scale=2.0))
        with pytest.raises(AssertionError, match="loaded"):
            pipelines.call(**PROMPT)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {**PROMPT, "prompt_embeds": torch.zeros(1, 3, 64)},
        {**PROMPT, "max_sequence_length": 1025},
        {**PROMPT, "callback_on_step_end_tensor_inputs": ["noise"]},
        {"prompt": 3},
    ],
)
def test_what_stock_refuses_is_refused_in_its_words(arguments: dict[str, Any], both: Callable[..., Both]) -> None:
    pipelines = both("edit-plus", 1)
    errors = []
    for pipeline in (pipelines.ours, pipelines.stock):
        with pytest.raises(ValueError, match=r"prompt|max_sequence_length") as error:
            pipeline(image=pipelines.images[0], **arguments)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


# ---- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["model", "sequential"])
@pytest.mark.parametrize(("variant", "count"), [("t2i", 0), ("edit-plus", 2), ("edit-plus", 0)])
def test_offloaded_all_is_equal(
    variant: str, count: int, offload: Any, both: Callable[..., Both], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU takes the accelerator's place: the hooks are the same, and what is not where it should be raises."""
    monkeypatch.setattr(drawing, "check_offload", lambda *arguments: None)
    monkeypatch.setattr(PromptEncoder, "_offloads", True)
    brought: list[str] = []
    for name in ("cpu_offload", "cpu_offload_with_hook"):  # diffusers says cpu:0, where torch says cpu
        stock_hook = getattr(accelerate, name)

        def hook_to_cpu(model: Any, device: Any, f: Any = stock_hook, **named: Any) -> Any:
            brought.append("hooked")
            return f(model, "cpu", **named)

        monkeypatch.setattr(accelerate, name, hook_to_cpu)
    bring, leave = CpuOffload.pre_forward, PromptEncoder.leave

    def pre_forward(hook: CpuOffload, module: Any, *args: Any, **kwargs: Any) -> Any:
        brought.extend({type(module).__name__} - set(brought[-1:]))
        return bring(hook, module, *args, **kwargs)

    monkeypatch.setattr(CpuOffload, "pre_forward", pre_forward)
    monkeypatch.setattr(PromptEncoder, "leave", lambda encoder: brought.append("no encoder") or leave(encoder))
    pipelines = both(variant, count)
    ours = load_pipeline(pipelines.ours.prompt_encoder.model, PredictConfig(dtype="float32", offload=offload), CPU)
    ours = ours if count else ours.without_images
    offloaded = Both(ours, pipelines.stock, pipelines.images)
    turns = [*["PlacedVae"] * (count > 0), "QwenImageTransformer2DModel", "PlacedVae", "hooked", "hooked"]
    for _ in range(2):  # after a call the hooks are taken off and put on once more
        brought.clear()
        assert_equal(*(result.images for result in offloaded.call(**PROMPT, **GUIDED)))
        assert brought == ["no encoder", *(turns if offload == "model" else [])]
        parts = (ours.transformer, ours.prompt_encoder._encoder.model, ours.vae)
        away = [next(part.parameters()).is_meta for part in parts]
        assert away == ([True, True, False] if offload == "sequential" else [False] * 3)


def test_tensors_go_to_the_device_of_the_part_that_takes_them(tiny_model: TinyModel) -> None:
    """Another device, as far as a machine without one has it: `meta`, where nothing can be mixed with the CPU."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    image = Image.new("RGB", (56, 56))
    for variant, pixels in (("t2i", torch.zeros(1, 3, 1, 32, 32)), ("edit", torch.zeros(1, 3, 1, 32, 32))):
        pipeline = load_pipeline(open_model(str(tiny_model(variant)), PARTS), FLOAT32, Devices(meta, cpu, cpu))
        assert pipeline.vae.encode(pixels).latent_dist.mode().device == meta
        assert pipeline.vae.decode(torch.zeros(1, 16, 1, 4, 4)).sample.device == meta
    pipeline = load_pipeline(open_model(str(tiny_model("edit")), PARTS), FLOAT32, Devices(cpu, cpu, meta))
    assert pipeline._encode_vae_image(pixels, None).device == meta
    assert [tensor.device for tensor in pipeline._get_qwen_prompt_embeds("a fox", image)] == [meta, meta]


@pytest.mark.slow
def test_the_encoder_comes_with_the_first_prompt_and_goes_when_it_is_freed(both: Callable[..., Both]) -> None:
    pipelines = both("edit", 1)
    with patch("qwen_train.inference.pipeline.TextEncoder", side_effect=TextEncoder) as loading:
        pipelines.ours.prompt_encoder.free()
        assert loading.call_count == 0
        for loaded in (1, 2):
            for _ in range(2):
                assert_equal(*(result.images for result in pipelines.call(**PROMPT)))
                assert loading.call_count == loaded
            encoder = weakref.ref(pipelines.ours.prompt_encoder._encoder.model)
            pipelines.ours.prompt_encoder.free()
            assert encoder() is None
