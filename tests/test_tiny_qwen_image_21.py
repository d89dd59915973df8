"""The tiny Qwen-Image-2.1 of the other tests: real structure, stock loading, weights that react to every input.

What holds for every variant (equal bytes in another process, size, any text, scheduler) is in test_tiny_model.py.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from .support.paths import load_tool
from .support.qwen_image_21 import stock_qwen_image_21

PROMPT = "Make it blue."
TAIL = 13 + 5  # tokens: of the prompt, a byte each, and of what follows it in the template


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("qwen-image-21")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return stock_qwen_image_21(folder)


def gradient_image(width: int, height: int, mode: str = "RGBA") -> Image.Image:
    """A smooth image, different in every corner and channel, partly transparent."""
    upright = Image.linear_gradient("L")
    channels = [upright, upright.transpose(Image.Transpose.ROTATE_90), Image.radial_gradient("L"), upright.rotate(45)]
    return Image.merge("RGBA", [channel.resize((width, height)) for channel in channels]).convert(mode)


def turned(image: Image.Image) -> Image.Image:
    return image.transpose(Image.Transpose.ROTATE_180)


def opaque(image: Image.Image) -> Image.Image:
    return image.convert("RGB").convert("RGBA")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


# ---- the files ------------------------------------------------------------------------------------------------------


def test_equal_seeds_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    make: Any = load_tool("make_tiny_model").make_tiny_model  # type: ignore[attr-defined]
    same, other = (files(make(tmp_path / str(seed), "qwen-image-21", seed)) for seed in (0, 1))
    assert same == files(folder)
    assert {name for name, content in same.items() if content != other[name]} == {
        "text_encoder/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }


def test_folders_and_index_are_those_that_diffusers_writes(folder: Path, pipeline: Any, tmp_path: Path) -> None:
    parts = {"processor", "scheduler", "text_encoder", "transformer", "vae"}
    assert {path.name for path in folder.iterdir()} == parts | {"model_index.json"}  # no tokenizer/
    pipeline.save_pretrained(tmp_path)
    index, stock = (json.loads((it / "model_index.json").read_bytes()) for it in (folder, tmp_path))
    assert index.pop("processor") == ["transformers", "Qwen3VLProcessor"]
    assert stock.pop("processor")[1] == "ImageOnlyQwen3VLProcessor"
    assert stock.pop("_name_or_path") == str(folder)  # where it was loaded from
    assert index == stock
    assert index["sample_sigmas"] is None


def test_a_distilled_model_brings_its_noise_levels(tmp_path: Path) -> None:
    make: Any = load_tool("make_tiny_model").make_tiny_model  # type: ignore[attr-defined]
    pipeline = stock_qwen_image_21(make(tmp_path / "model", "qwen-image-21", sample_sigmas=(1.0, 0.7, 0.3)))
    assert pipeline.config.sample_sigmas == [1.0, 0.7, 0.3]
    pipeline(PROMPT, output_resolution=64, output_type="latent")
    assert pipeline.num_timesteps == 3
    with pytest.raises(ValueError, match="edit-plus has none"):
        make(tmp_path / "other", "edit-plus", sample_sigmas=[1.0])


def test_the_pipeline_drops_exactly_the_system_message(pipeline: Any) -> None:
    tokenizer = pipeline.processor.tokenizer
    system = f"<|im_start|>system\n{pipeline.sys_prompt}<|im_end|>\n"
    message = [{"role": "system", "content": [{"type": "text", "text": pipeline.sys_prompt}]}]
    assert pipeline.processor.apply_chat_template(message) == system
    assert pipeline.processor.apply_chat_template(message, tokenize=True, return_dict=False) == [
        tokenizer.encode(system)
    ]
    assert pipeline._drop_idx == 12  # a token for each word
    for template in (pipeline.prompt_template_t2i, pipeline.prompt_template_ti2i):
        ids = tokenizer(template.format(PROMPT)).input_ids
        assert tokenizer.decode(ids[:12]) == system
        assert tokenizer.decode(ids[12:]) == template.format(PROMPT)[len(system) :]


def test_the_chat_template_takes_text_images_and_an_answer(pipeline: Any) -> None:
    content = [{"type": "image", "image": gradient_image(32, 32, "RGB")}, {"type": "text", "text": "What?"}]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": content}]
    assert pipeline.processor.apply_chat_template(messages, add_generation_prompt=True) == (
        "<|im_start|>system\nLook.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_structure_and_ids_are_those_of_qwen3_vl(pipeline: Any) -> None:
    config, tokenizer = pipeline.text_encoder.config, pipeline.processor.tokenizer
    text, vision = config.text_config, config.vision_config
    real = Qwen3VLVisionConfig()
    for name in ("patch_size", "spatial_merge_size", "temporal_patch_size", "in_channels", "num_position_embeddings"):
        assert getattr(vision, name) == getattr(real, name), name
    assert len(vision.deepstack_visual_indexes) == len(real.deepstack_visual_indexes) < text.num_hidden_layers
    assert max(vision.deepstack_visual_indexes) < vision.depth - 1
    assert vision.out_hidden_size == text.hidden_size == pipeline.transformer.config.context_in_dim
    assert text.num_key_value_heads < text.num_attention_heads
    rope = text.rope_parameters
    assert rope["mrope_interleaved"] is True
    assert [4 * pairs for pairs in rope["mrope_section"]] == [24, 20, 20]
    assert sum(rope["mrope_section"]) == text.head_dim // 2
    for name, token in {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start"}.items():
        assert getattr(config, f"{name}_token_id") == tokenizer.convert_tokens_to_ids(f"<|{token}|>")
    assert config.vision_end_token_id == tokenizer.convert_tokens_to_ids("<|vision_end|>")
    assert len({*tokenizer.all_special_ids}) == 14  # with <|endoftext|>, each an id of its own


def test_images_enter_at_their_own_size_from_32_pixels_on(folder: Path, pipeline: Any) -> None:
    settings = json.loads((folder / "processor" / "preprocessor_config.json").read_bytes())
    assert settings["image_processor_type"] == "Qwen2VLImageProcessorFast"
    assert settings["size"]["longest_edge"] == 4096 * 4096
    for size, grid in {(128, 96): [1, 6, 8], (1024, 1024): [1, 64, 64], (30, 30): [1, 2, 2]}.items():
        images = pipeline.processor.image_processor([gradient_image(*size, "RGB")], return_tensors="pt")
        assert images["image_grid_thw"].tolist() == [grid]
    values = pipeline.processor.image_processor([Image.new("RGB", (32, 32), (255, 0, 255))], return_tensors="pt")
    assert values["pixel_values"].unique().tolist() == [-1, 1]  # mean and deviation are 0.5


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def generate(pipeline: Any, images: Sequence[Image.Image], prompt: str = PROMPT, **options: Any) -> Tensor:
    inputs = {"image": list(images)} if images else {}
    generator = torch.Generator().manual_seed(0)
    settings = {"num_inference_steps": 2, "output_resolution": 128, "output_type": "latent"}
    return pipeline(prompt, generator=generator, **inputs, **(settings | options)).images


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("count", range(4))
def test_the_stock_pipeline_runs(pipeline: Any, count: int, mode: str) -> None:
    images = [gradient_image(*size, mode) for size in ((96, 128), (128, 128), (128, 96))[:count]]
    result = generate(pipeline, images, "把它变成蓝色", width=128, height=96, output_type="pt")
    assert result.shape == (1, 4, 96, 128)
    assert result.isfinite().all()
    assert result.std() > 0.05


def test_a_generated_image_depends_on_prompt_order_and_each_image_alpha_included(pipeline: Any) -> None:
    first, second = gradient_image(128, 96), turned(gradient_image(128, 128))
    result = generate(pipeline, [first, second])
    assert result.std() > 0.3
    others = {
        "prompt": generate(pipeline, [first, second], "Make it glue."),
        "first": generate(pipeline, [turned(first), second]),
        "second": generate(pipeline, [first, turned(second)]),
        "alpha of the first": generate(pipeline, [opaque(first), second]),
        "alpha of the second": generate(pipeline, [first, opaque(second)]),
        "order": generate(pipeline, [second, first], width=128, height=128),
        "number": generate(pipeline, [second]),
    }
    differences = {name: relative(other, result) for name, other in others.items()}
    assert min(differences.values()) > 0.01, differences


# ---- the text encoder -----------------------------------------------------------------------------------------------


@torch.no_grad()
def encode(pipeline: Any, images: Sequence[Image.Image] = (), prompt: str = PROMPT) -> tuple[Tensor, Tensor]:
    """Rows `[L, 64]` that the transformer gets, and which of them are slots of an image."""
    embeds, _, slots = pipeline.encode_prompt(prompt, list(images) or None)
    return embeds[0], slots[0]


def test_a_slot_stands_for_32_pixels(pipeline: Any) -> None:
    assert int(encode(pipeline, [gradient_image(128, 96), gradient_image(64, 32)])[1].sum()) == 12 + 2
    assert not encode(pipeline)[1].any()


def test_hidden_states_notice_each_image_its_alpha_and_the_prompt(pipeline: Any) -> None:
    first, second = gradient_image(128, 96), turned(gradient_image(96, 128))
    states, _ = encode(pipeline, [first, second])
    tail = states[-TAIL:]
    assert 0.5 < states.std() < 4
    for images in ([turned(first), second], [first, turned(second)], [opaque(first), second], [first, opaque(second)]):
        assert relative(encode(pipeline, images)[0][-TAIL:], tail) > 0.02
    assert relative(encode(pipeline, [first, second], "Make it glue.")[0][-TAIL:], tail) > 0.1


@torch.no_grad()
def test_text_before_an_image_does_not_depend_on_it(pipeline: Any) -> None:
    first, second = gradient_image(128, 96), gradient_image(96, 128)
    states, slots = encode(pipeline, [first, second])
    end = int(slots.nonzero()[12])  # the first slot of the second image
    assert torch.equal(encode(pipeline, [first, turned(second)])[0][:end], states[:end])


@torch.no_grad()
def test_the_final_norm_changes_directions(pipeline: Any) -> None:
    """The transformer divides by the length of a row itself: a norm that only did that would not show."""
    states, _ = encode(pipeline, [gradient_image(128, 96)])
    normalised = pipeline.text_encoder.model.language_model.norm(states)
    assert relative(F.rms_norm(normalised, (64,)), F.rms_norm(states, (64,))) > 0.3
    assert relative(normalised, states) > 0.3


@torch.no_grad()
def test_positions_and_deepstack_count(pipeline: Any) -> None:
    encoder = pipeline.text_encoder.model
    text = "<|vision_start|><|image_pad|><|vision_end|>" + PROMPT
    inputs = pipeline.processor(text=[text], images=[gradient_image(160, 96, "RGB")], return_tensors="pt")
    states = encoder(**inputs).last_hidden_state
    grid, types = inputs["image_grid_thw"], inputs["mm_token_type_ids"]
    positions, _ = encoder.get_rope_index(inputs["input_ids"], types, image_grid_thw=grid)
    assert torch.equal(encoder(**inputs, position_ids=positions).last_hidden_state, states)
    for axis in (1, 2):  # height, width
        flat = positions.clone()
        flat[axis] = positions[0]
        assert relative(encoder(**inputs, position_ids=flat).last_hidden_state, states) > 0.05
    for merger in encoder.visual.deepstack_merger_list:
        hook = merger.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
        assert relative(encoder(**inputs).last_hidden_state[:, -len(PROMPT) :], states[:, -len(PROMPT) :]) > 0.03
        hook.remove()


# ---- the VAE --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@torch.no_grad()
def test_the_vae_returns_the_block_averages_through_normalised_latents(folder: Path) -> None:
    vae = AutoencoderKLQwenImage21.from_pretrained(folder / "vae")
    stock = inspect.signature(AutoencoderKLQwenImage21).parameters
    for name in ("z_dim", "latents_mean", "latents_std", "is_residual", "in_channels", "out_channels", "dim_mult"):
        assert vae.config[name] == stock[name].default, name
    pixels = torch.tensor(np.asarray(gradient_image(192, 128))).permute(2, 0, 1)[None, :, None] / 127.5 - 1
    latents = vae.encode(pixels).latent_dist.mode()
    assert latents.shape == (1, 64, 1, 8, 12)
    mean, std = (torch.tensor(it).view(1, 64, 1, 1, 1) for it in (vae.config.latents_mean, vae.config.latents_std))
    normalised = (latents - mean) / std
    assert 0.1 < normalised.std() < 3
    assert normalised.std(dim=(3, 4)).min() > 0.02  # each channel sees the image
    assert normalised.mean(dim=(3, 4)).abs().max() < 3
    averages = F.interpolate(F.avg_pool2d(pixels[:, :, 0], 16), scale_factor=16)

    def errors(latents: Tensor) -> Tensor:
        """The error of each colour."""
        return (vae.decode(latents).sample[:, :, 0] - averages).square().mean(dim=(0, 2, 3)).sqrt()

    assert errors(latents).max() < 0.15
    assert averages.std(dim=(0, 2, 3)).min() > 0.3  # a constant would be further away
    assert errors(normalised).mean() > 0.3  # forgetting mean and deviation shows
    decoded = vae.decode(latents).sample
    for channel in range(64):
        changed = latents.clone()
        changed[:, channel] += 5 * std[:, channel]
        assert relative(vae.decode(changed).sample, decoded) > 1e-3, f"latent channel {channel} is idle"
    for channel in range(4):
        changed = pixels.clone()
        changed[:, channel] *= -1
        assert relative(vae.encode(changed).latent_dist.mode(), latents) > 0.1, f"colour {channel} is idle"
    sample = vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(0))
    assert 0.01 < relative(sample, latents) < 0.5  # and so does taking a sample for the mode


# ---- the transformer ------------------------------------------------------------------------------------------------

SHAPES = ((1, 2, 6), (1, 4, 4), (1, 4, 6))  # two condition images, and the target


def forward(
    transformer: QwenImage21Transformer2DModel,
    images: Tensor,
    text: Tensor,
    timestep: float = 0.5,
    shapes: Sequence[tuple[int, int, int]] = SHAPES,
    before: Sequence[int] = (3, 2),
) -> Tensor:
    """Velocity `[1, 24, 64]` of the target; `before` each condition image stand this many rows of `text`."""
    rows, mask, start = [], [], 0
    for (_, height, width), count in zip(shapes, before, strict=False):
        slots = height * width // 4
        rows += [text[:, start : start + count], torch.zeros(1, slots, text.shape[2])]
        mask += [False] * count + [True] * slots
        start += count
    rows.append(text[:, start:])
    mask += [False] * (text.shape[1] - start) + [True] * (shapes[-1][1] * shapes[-1][2] // 4)
    return transformer(
        images,
        torch.cat(rows, dim=1),
        torch.tensor([timestep]),
        [list(shapes)],
        torch.tensor([mask]),
        return_dict=False,
    )[0][:, -24:]


def inputs_of_the_transformer() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two condition images, a target, text."""
    random = torch.Generator().manual_seed(0)
    first, second, target, text = (torch.randn(1, n, 64, generator=random) for n in (12, 16, 24, 20))
    return first, second, target, text


@torch.no_grad()
def test_the_transformers_output_depends_on_every_input(folder: Path) -> None:
    transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer")
    assert transformer.config.causal_condition is True
    assert [4 * axis for axis in transformer.config.axes_dims_rope] == [16, 56, 56]
    first, second, target, text = inputs_of_the_transformer()
    images, one_word = torch.cat([first, second, target], dim=1), text.clone()
    output = forward(transformer, images, text)
    assert 0.3 < output.std() < 3
    one_word[:, -1] *= -1
    others = {
        "target": (0.3, forward(transformer, torch.cat([first, second, -target], dim=1), text)),
        "first": (0.03, forward(transformer, torch.cat([-first, second, target], dim=1), text)),
        "second": (0.03, forward(transformer, torch.cat([first, -second, target], dim=1), text)),
        "text": (0.05, forward(transformer, images, -text)),
        "one word of twenty": (0.005, forward(transformer, images, one_word)),
        "timestep": (0.05, forward(transformer, images, text, 0.6)),
        "target's shape": (0.02, forward(transformer, images, text, shapes=((1, 2, 6), (1, 4, 4), (1, 6, 4)))),
        "first shape": (0.005, forward(transformer, images, text, shapes=((1, 6, 2), (1, 4, 4), (1, 4, 6)))),
        "places of images": (0.005, forward(transformer, images, text, before=(4, 1))),
        "text between images": (0.005, forward(transformer, images, text, before=(3, 0))),
    }
    differences = {name: relative(other, output) for name, (_, other) in others.items()}
    assert all(differences[name] > least for name, (least, _) in others.items()), differences


@torch.no_grad()
def test_gates_are_open_and_not_saturated(folder: Path) -> None:
    transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer")
    for timestep in (0.0, 0.3, 1.0):
        embedding = transformer.time_text_embed(torch.tensor([timestep]), torch.zeros(1))
        _, gate_1, _, gate_2 = transformer.modulation(embedding).tanh().abs().chunk(4, dim=-1)
        for gate in (gate_1, gate_2):
            assert 0.2 < gate.mean() < 0.8
            assert gate.quantile(0.9) < 0.99


def test_scales_that_are_stored_less_one_are_near_one(folder: Path) -> None:
    transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer")
    weight = transformer.txt_in.text_norm.weight
    assert 0 < weight.abs().max() < 0.5


def test_every_weight_of_the_transformer_matters(folder: Path) -> None:
    transformer = QwenImage21Transformer2DModel.from_pretrained(folder / "transformer")
    *images, text = inputs_of_the_transformer()
    random = torch.Generator().manual_seed(1)
    output = forward(transformer, torch.cat(images, dim=1), text)
    (output * torch.randn(output.shape, generator=random)).sum().backward()
    for name, parameter in transformer.named_parameters():
        assert (parameter.grad != 0).float().mean() > 0.9, name


def test_every_weight_of_the_text_encoder_matters_but_the_last_norm_and_other_words(pipeline: Any) -> None:
    """The pipeline takes the hidden states before the last norm, and never predicts a word."""
    encoder = pipeline.text_encoder
    with torch.enable_grad():
        embeds, _, slots = pipeline.encode_prompt(PROMPT, [gradient_image(128, 96)])
        embeds[0][~slots[0]].square().sum().backward()
    exceptions = ("lm_head.weight", "language_model.norm.weight", "embed_tokens.weight", "visual.pos_embed.weight")
    for name, parameter in encoder.named_parameters():
        if not name.endswith(exceptions):
            assert (parameter.grad != 0).float().mean() > 0.9, name
    encoder.zero_grad(set_to_none=True)
