"""The tiny models of the other tests: real structure, stock loading, weights that react to every input.

What only Qwen-Image-2.1 has is in test_tiny_qwen_image_21.py.
"""

from __future__ import annotations

import inspect
import sys
import unicodedata
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLProcessor
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

from .support import processes
from .support.paths import load_tool

TOOL = Path(__file__).parent.parent / "tools" / "make_tiny_model.py"
PREFIX_LENGTHS = {"edit": 64, "edit-plus": 64, "edit-2511": 64, "t2i": 34}
VARIANTS = [*PREFIX_LENGTHS, "qwen-image-21"]


class ImageOnlyProcessor(Qwen2VLProcessor):
    """Transformers' processor without its video half, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


@pytest.fixture(scope="module")
def make_tiny_model():
    return load_tool("make_tiny_model").make_tiny_model


@pytest.fixture(scope="module")
def models(make_tiny_model, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {variant: make_tiny_model(root / variant, variant) for variant in VARIANTS}


@pytest.fixture(scope="module")
def text_encoder(models) -> Qwen2_5_VLForConditionalGeneration:
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(models["edit"] / "text_encoder").eval()


@pytest.fixture(scope="module")
def processor(models) -> ImageOnlyProcessor:
    return ImageOnlyProcessor.from_pretrained(models["edit"] / "processor")


def load_pipeline(folder: Path) -> DiffusionPipeline:
    processor = (
        {"processor": ImageOnlyProcessor.from_pretrained(folder / "processor")}
        if (folder / "processor").exists()
        else {}
    )
    return DiffusionPipeline.from_pretrained(folder, **processor)


def gradient_image(width: int, height: int) -> Image.Image:
    """A smooth image, different in every corner, so that mirroring, cropping or swapping sides changes it."""
    red = Image.linear_gradient("L").resize((width, height))
    green = Image.linear_gradient("L").transpose(Image.Transpose.ROTATE_90).resize((width, height))
    blue = Image.radial_gradient("L").resize((width, height))
    return Image.merge("RGB", (red, green, blue))


def pixels(image: Image.Image) -> torch.Tensor:
    """`[1, 3, 1, H, W]` in -1..1, the VAE's input."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width, 3)
    return (values.permute(2, 0, 1)[None, :, None] / 127.5) - 1


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["edit-2511", "qwen-image-21"])
def test_equal_seeds_give_equal_bytes_in_another_process_too(models, make_tiny_model, tmp_path, variant):
    command = [sys.executable, TOOL, tmp_path / "again", "--variant", variant, "--seed", "0"]
    processes.run(command, check=True, capture_output=True)
    assert files(tmp_path / "again") == files(models[variant])
    other = files(make_tiny_model(tmp_path / "other", variant, seed=1))
    assert {name for name, content in files(tmp_path / "again").items() if content != other[name]} == {
        "text_encoder/model.safetensors",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_a_few_megabytes(models, variant):
    assert sum(map(len, files(models[variant]).values())) < 8e6


@pytest.mark.parametrize(("variant", "length"), PREFIX_LENGTHS.items())
def test_the_pipeline_drops_exactly_the_template_before_the_user(models, variant, length):
    pipeline = load_pipeline(models[variant])
    assert pipeline.prompt_template_encode_start_idx == length
    ids = pipeline.tokenizer(pipeline.prompt_template_encode.format("Make it blue.")).input_ids
    assert pipeline.tokenizer.decode(ids[:length]).endswith("<|im_start|>user\n")
    kept = pipeline.tokenizer.decode(ids[length:])
    vision = "<|vision_start|><|image_pad|><|vision_end|>" if variant == "edit" else ""
    assert kept == vision + "Make it blue.<|im_end|>\n<|im_start|>assistant\n"


@cache
def tokenizer_of(folder):
    return Qwen2Tokenizer.from_pretrained(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("folder", ["edit/tokenizer", "qwen-image-21/processor"])
@given(text=st.text())
def test_the_tokenizer_takes_any_text(models, folder, text):
    tokenizer = tokenizer_of(models["edit"].parent / folder)
    assert tokenizer.decode(tokenizer(text).input_ids) == unicodedata.normalize("NFC", text)


@pytest.mark.fast_cases(2)
@torch.no_grad()
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("variant", PREFIX_LENGTHS)
def test_the_stock_pipeline_runs(models, variant):
    pipeline = load_pipeline(models[variant])
    pipeline.set_progress_bar_config(disable=True)
    controls = {"edit": gradient_image(96, 64), "t2i": None}.get(
        variant, [gradient_image(96, 64), gradient_image(64, 96)]
    )
    inputs = {} if controls is None else {"image": controls}
    result = pipeline(
        prompt="把它变成蓝色",
        negative_prompt=" ",
        num_inference_steps=2,
        width=96,
        height=64,
        output_type="pt",
        **inputs,
    ).images
    assert result.shape == (1, 3, 64, 96)
    assert result.isfinite().all()
    assert result.std() > 0.05
    assert type(pipeline).__name__ == {"edit": "QwenImageEditPipeline", "t2i": "QwenImagePipeline"}.get(
        variant, "QwenImageEditPlusPipeline"
    )


def test_structure_and_ids_are_those_of_qwen2_5_vl(models, text_encoder):
    config, real = text_encoder.config, Qwen2_5_VLVisionConfig()
    for name in ("patch_size", "spatial_merge_size", "temporal_patch_size", "window_size", "in_channels"):
        assert getattr(config.vision_config, name) == getattr(real, name), name
    assert 0 < len(config.vision_config.fullatt_block_indexes) < config.vision_config.depth
    assert config.text_config.num_key_value_heads < config.text_config.num_attention_heads
    head = config.text_config.hidden_size // config.text_config.num_attention_heads
    assert sum(config.text_config.rope_parameters["mrope_section"]) == head // 2
    tokenizer = Qwen2Tokenizer.from_pretrained(models["edit"] / "tokenizer")
    for name, token in {"image": "image_pad", "video": "video_pad"}.items():
        assert getattr(config, f"{name}_token_id") == tokenizer.convert_tokens_to_ids(f"<|{token}|>")
    for name in ("vision_start", "vision_end"):
        assert getattr(config, f"{name}_token_id") == tokenizer.convert_tokens_to_ids(f"<|{name}|>")
    assert len({*tokenizer.all_special_ids}) == 14  # with <|endoftext|>, each an id of its own
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize("variant", ["edit", "qwen-image-21"])
def test_the_scheduler_ends_where_qwen_image_ends(models, variant):
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(models[variant] / "scheduler")
    # At 1024², 4096 tokens: the shift is on the line from 0.5 at 256 tokens to 0.9 at 8192.
    mu = 0.5 + (0.9 - 0.5) * (4096 - 256) / (8192 - 256)
    settings = scheduler.config
    slope = (settings.max_shift - settings.base_shift) / (settings.max_image_seq_len - settings.base_image_seq_len)
    assert settings.base_shift + slope * (4096 - settings.base_image_seq_len) == pytest.approx(mu)
    scheduler.set_timesteps(50, mu=mu)
    sigmas = scheduler.sigmas[:-1]
    assert sigmas[0] == pytest.approx(1.0)
    assert sigmas[-1] == pytest.approx(0.02)
    assert scheduler.config.num_train_timesteps == 1000


@torch.no_grad()
def encode(text_encoder, processor, image, prompt, *, mm_token_type_ids=True) -> torch.Tensor:
    """Last hidden states [L, 64] of one image and one prompt, as the Edit template puts them."""
    text = f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{prompt}<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[text], images=[image], return_tensors="pt")
    if not mm_token_type_ids:
        del inputs["mm_token_type_ids"]
    return text_encoder.model(**inputs).last_hidden_state[0]


def test_hidden_states_are_of_order_one_and_notice_image_prompt_and_positions(text_encoder, processor):
    image = gradient_image(448, 308)
    states = encode(text_encoder, processor, image, "Make it blue.")
    tail = states[-12:]  # the prompt and what follows it
    assert 0.5 < states.std() < 2
    assert relative(encode(text_encoder, processor, image, "Make it glue.")[-12:], tail) > 0.1
    assert (
        relative(
            encode(text_encoder, processor, image.transpose(Image.Transpose.ROTATE_180), "Make it blue.")[-12:], tail
        )
        > 0.03
    )
    assert relative(encode(text_encoder, processor, image, "Make it blue.", mm_token_type_ids=False), states) > 0.2


@torch.no_grad()
def test_each_axis_of_the_positions_counts(text_encoder, processor):
    text = "<|vision_start|><|image_pad|><|vision_end|>Make it blue."
    inputs = processor(text=[text], images=[gradient_image(448, 308)], return_tensors="pt")
    states = text_encoder.model(**inputs).last_hidden_state
    grid, types = inputs["image_grid_thw"], inputs.pop("mm_token_type_ids")
    positions, _ = text_encoder.model.get_rope_index(inputs["input_ids"], types, image_grid_thw=grid)
    assert torch.equal(text_encoder.model(**inputs, position_ids=positions).last_hidden_state, states)
    for axis in (1, 2):  # height, width
        flat = positions.clone()
        flat[axis] = positions[0]
        assert relative(text_encoder.model(**inputs, position_ids=flat).last_hidden_state, states) > 0.05


def test_the_image_enters_at_the_checkpoints_pixel_limits(processor):
    """The class defaults would shrink 1024² images to 35×35 tokens."""
    assert processor(text=["<|image_pad|>"], images=[gradient_image(1024, 1024)])["image_grid_thw"].tolist() == [
        [1, 74, 74]
    ]
    assert processor(text=["<|image_pad|>"], images=[gradient_image(384, 384)])["image_grid_thw"].tolist() == [
        [1, 28, 28]
    ]
    assert processor(text=["<|image_pad|>"], images=[gradient_image(30, 30)])["image_grid_thw"].tolist() == [[1, 4, 4]]


@torch.no_grad()
def test_windowed_and_full_attention_differ_in_the_vision_tower(models, processor):
    tower = Qwen2_5_VLForConditionalGeneration.from_pretrained(models["edit"] / "text_encoder").model.visual
    inputs = processor(text=["<|image_pad|>"], images=[gradient_image(448, 308)], return_tensors="pt")
    mixed = tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output
    for blocks in ([], range(tower.config.depth)):  # windows everywhere, then nowhere
        tower.fullatt_block_indexes = list(blocks)
        assert relative(tower(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output, mixed) > 0.1


@torch.no_grad()
def test_the_vae_returns_the_block_averages_through_normalised_latents(models):
    vae = AutoencoderKLQwenImage.from_pretrained(models["edit"] / "vae")
    image = pixels(gradient_image(96, 64))
    latents = vae.encode(image).latent_dist.mode()
    assert latents.shape == (1, 16, 1, 8, 12)
    stock = inspect.signature(AutoencoderKLQwenImage).parameters
    assert vae.config.latents_mean == stock["latents_mean"].default
    assert vae.config.latents_std == stock["latents_std"].default
    mean, std = (torch.tensor(it).view(1, 16, 1, 1, 1) for it in (vae.config.latents_mean, vae.config.latents_std))
    normalised = (latents - mean) / std
    assert 0.1 < normalised.std() < 3
    assert normalised.std(dim=(3, 4)).min() > 0.02  # each channel sees the image
    assert normalised.mean(dim=(3, 4)).abs().max() < 3
    averages = torch.nn.functional.interpolate(torch.nn.functional.avg_pool2d(image[:, :, 0], 8), scale_factor=8)

    def error(latents: torch.Tensor) -> float:
        return float((vae.decode(latents).sample[:, :, 0] - averages).square().mean().sqrt())

    assert error(latents) < 0.15
    assert error(normalised) > 0.4  # forgetting mean and deviation shows
    decoded = vae.decode(latents).sample
    for channel in range(16):
        changed = latents.clone()
        changed[:, channel] += 5 * std[:, channel]
        assert relative(vae.decode(changed).sample, decoded) > 1e-3, f"latent channel {channel} is idle"
    sample = vae.encode(image).latent_dist.sample(torch.Generator().manual_seed(0))
    assert 0.01 < relative(sample, latents) < 0.5  # and so does taking a sample for the mode


@torch.no_grad()
@pytest.mark.parametrize("variant", ["edit", "edit-2511"])
def test_the_transformers_output_depends_on_every_input(models, variant):
    transformer = QwenImageTransformer2DModel.from_pretrained(models[variant] / "transformer")
    random = torch.Generator().manual_seed(0)
    target, control, text, other = (torch.randn(1, n, 64, generator=random) for n in (24, 16, 20, 24))

    def run(target=target, control=control, text=text, timestep=0.5, shapes=((1, 4, 6), (1, 4, 4))) -> torch.Tensor:
        hidden_states = torch.cat([target, control], dim=1)
        timestep = torch.tensor([timestep])
        return transformer(
            hidden_states, encoder_hidden_states=text, timestep=timestep, img_shapes=[list(shapes)], return_dict=False
        )[0][:, :24]

    output = run()
    assert 0.3 < output.std() < 3
    assert relative(run(target=other), output) > 0.3
    assert relative(run(control=other[:, :16]), output) > 0.05
    assert relative(run(text=other[:, :20]), output) > 0.05
    assert relative(run(text=torch.cat([text[:, :-1], other[:, :1]], dim=1)), output) > 0.005  # one word of twenty
    assert relative(run(timestep=0.6), output) > 0.05
    assert relative(run(shapes=((1, 6, 4), (1, 4, 4))), output) > 0.02
    assert relative(run(shapes=((1, 4, 6), (1, 8, 2))), output) > 0.02


@torch.no_grad()
def test_only_2511_gives_the_controls_a_timestep_of_zero(models):
    for variant, zero_cond_t in (("edit", False), ("edit-plus", False), ("edit-2511", True), ("t2i", False)):
        assert (
            QwenImageTransformer2DModel.from_pretrained(models[variant] / "transformer").config.zero_cond_t
            is zero_cond_t
        )
