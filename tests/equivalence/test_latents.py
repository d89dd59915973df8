"""The latents of Qwen-Image-2.1: bit for bit those of the stock pipeline, in both directions.

The judge is the stock pipeline itself, with a transformer that changes nothing: what it makes of images and latents.
Of the 20B models, test_encode_vae.py has the same.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
)
from PIL import Image
from torch import Tensor, nn

from qwen_cache.encode.vae import (
    LATENT_SPACES,
    VaeEncoder,
    VaeThatFits,
    decode_images,
    decode_latents,
    latent_space,
    load_vae,
    vae_class,
)
from qwen_cache.errors import ModelError
from qwen_cache.models.folder import ModelFolder
from tests.support.photographs import photograph
from tests.support.vae import random_vae, random_vae_21

CPU = torch.device("cpu")
SIZES = [(32, 32), (160, 96), (96, 160), (32, 416), (416, 32)]  # width, height
DTYPES = [torch.float32, torch.bfloat16]


class ChangesNothing(nn.Module):
    """A transformer whose velocity is zero, so that the pipeline decodes the latents that it is given."""

    device, transformer_blocks = CPU, ()
    config = SimpleNamespace(in_channels=64, causal_condition=False)

    def cache_context(self, _: str) -> Any:
        return nullcontext()

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor]:
        return (torch.zeros_like(hidden_states),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tmp_path_factory.mktemp("model")
    random_vae_21().save_pretrained(folder / "vae")
    return ModelFolder("a model", folder, "QwenImageEditPipeline")


@cache
def stock_pipeline(folder: ModelFolder, dtype: torch.dtype) -> Any:
    vae = AutoencoderKLQwenImage21.from_pretrained(folder.component("vae"), torch_dtype=dtype)
    pipeline = QwenImage21Pipeline(FlowMatchEulerDiscreteScheduler(), vae, None, MagicMock(), ChangesNothing())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


our_encoder, our_vae = cache(VaeEncoder), cache(load_vae)


def transparent(size: tuple[int, int]) -> Image.Image:
    """A photograph with every opacity in it."""
    image = photograph("china.jpg").resize(size).convert("RGBA")
    alpha = np.random.default_rng(1).integers(0, 256, size[::-1], dtype=np.uint8)
    image.putalpha(Image.fromarray(alpha))
    return image


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_latents_are_those_of_the_pipeline(size: tuple[int, int], dtype: torch.dtype, folder: ModelFolder) -> None:
    """From an original of another size, with all four channels; in a batch each is what it is alone."""
    stock, ours, original = stock_pipeline(folder, dtype), our_encoder(folder, CPU, dtype), transparent((333, 217))
    pixels = stock.image_processor.preprocess(original, width=size[0], height=size[1]).unsqueeze(2)
    with torch.no_grad():
        _, expected = stock.prepare_latents([pixels], 1, 64, 32, 32, dtype, CPU, None)
    mine = ours.pixels(original, size)
    assert torch.equal(mine, pixels.to(dtype))
    (latents,) = ours.encode([mine])
    assert (latents.shape, latents.dtype) == ((size[0] * size[1] // 256, 64), dtype)
    assert latents.is_contiguous()
    assert torch.equal(latents, expected[0])
    opaque = original.copy()
    opaque.putalpha(255)
    assert not torch.equal(ours.encode([ours.pixels(opaque, size)])[0], latents)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_images_are_those_of_the_pipeline(size: tuple[int, int], dtype: torch.dtype, folder: ModelFolder) -> None:
    width, height = size
    latents = torch.randn(1, width * height // 256, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    embeds = {"prompt_embeds": torch.zeros(1, 4, 8, dtype=dtype)}
    options = {"height": height, "width": width, "num_inference_steps": 2}
    (stock,) = stock_pipeline(folder, dtype)(latents=latents.clone(), **embeds, **options).images
    ours = decode_latents(our_vae(folder, CPU, dtype), latents, size)
    assert (ours.mode, ours.size) == ("RGBA", size) == (stock.mode, stock.size)
    assert ours.tobytes() == stock.tobytes()
    assert len(set(ours.getchannel("A").tobytes())) > 1


def test_several_images_are_decoded_one_by_one(folder: ModelFolder) -> None:
    vae, shapes = our_vae(folder, CPU, torch.float32), [(1, 2, 3), (1, 4, 2)]
    latents = torch.randn(14, 64, generator=torch.Generator().manual_seed(4))
    first, second = decode_images(vae, latents, shapes)
    assert (first.size, second.size) == ((48, 32), (32, 64))
    assert second.tobytes() == decode_latents(vae, latents[None, 6:], (32, 64)).tobytes()


@pytest.mark.parametrize(("make", "channels"), [(random_vae, 16), (random_vae_21, 64)])
def test_unpacking_is_the_inverse_of_packing(make: Any, channels: int) -> None:
    """Every number in its place, also where height and width differ."""
    space = latent_space(make(base_dim=4))
    patch = space.patch
    z = torch.arange(2.0 * channels * 3 * patch * 5 * patch).view(2, channels, 1, 3 * patch, 5 * patch)
    packed = space.pack(z)
    assert packed.shape == (2, 15, 64)
    assert torch.equal(space.unpack(packed, (80, 48)), z)


def test_the_space_is_that_of_the_wrapped_vae() -> None:
    vae = random_vae_21()
    assert (
        latent_space(VaeThatFits(SimpleNamespace(vae=vae)))
        is latent_space(vae)
        is not latent_space(random_vae(base_dim=4))
    )


def test_an_image_of_another_mode_is_refused(folder: ModelFolder) -> None:
    """The VAE would read no alpha at all, or three channels as four."""
    encoder = our_encoder(folder, CPU, torch.float32)
    with pytest.raises(ValueError, match="encodes RGBA images, found RGB"):
        encoder.pixels(transparent((64, 64)).convert("RGB"), (32, 32))


# ---- which VAE -------------------------------------------------------------------------------------------------------


def of_config(folder: Path, text: str) -> ModelFolder:
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(text)
    return ModelFolder("a model", folder, "QwenImageEditPipeline")


@pytest.mark.parametrize("kind", LATENT_SPACES)
def test_the_class_is_in_the_config(kind: type[Any], tmp_path: Path) -> None:
    assert vae_class(of_config(tmp_path, json.dumps({"_class_name": kind.__name__}))) is kind
    assert set(LATENT_SPACES) == {AutoencoderKLQwenImage, AutoencoderKLQwenImage21}


def test_another_vae_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        vae_class(of_config(tmp_path, '{"_class_name": "AutoencoderKLWan"}'))
    assert error.value.where == tmp_path / "vae" / "config.json"
    assert error.value.expected == "AutoencoderKLQwenImage or AutoencoderKLQwenImage21"
    assert error.value.found == "AutoencoderKLWan"


@pytest.mark.parametrize("text", ["", "{}", "[]", '"AutoencoderKLQwenImage"', '{"_class_name": ["x"]}'])
def test_a_config_without_a_class_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        vae_class(of_config(tmp_path, text))
    with pytest.raises(ModelError, match=r"cannot be read: .*No such file"):
        vae_class(ModelFolder("a model", tmp_path / "nowhere", "QwenImageEditPipeline"))
