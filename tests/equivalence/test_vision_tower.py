"""The vision tower as an accelerator runs it: patches by a product, one call for windows of one length, no wait.

The judge is the stock tower with the same weights. The new path is called on the CPU, which in a build keeps the stock
one, but for patches in bfloat16; a wait shows on the device `meta`, whose tensors have no values to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.models import encoders
from qwen_cache.models.encoders import batch_windows, load_text_encoder
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from tests.support.judge import TinyModel, assert_same
from tests.support.marks import slow
from tests.support.text_encoder import images

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16)
VARIANTS = ["edit", "qwen-image-21"]
"""Qwen2.5-VL has windows, and attends to whole images in some layers; Qwen3-VL does that in all of them."""
SIZES = {
    "Edit": [(74, 74)],
    "Edit-Plus": [(28, 28)],
    "several": [(28, 28), (20, 36), (28, 28)],
    "ragged": [(6, 50), (38, 2), (2, 2)],
}
"""Patches of each image, rows and columns."""


def tower_of(folder: Any, dtype: torch.dtype, device: torch.device = CPU) -> Any:
    return load_text_encoder(folder / "text_encoder", dtype).model.visual.to(device)


def inputs_for(tower: Any, sizes: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    """Random patches of images of these sizes."""
    patch = 3 * tower.config.temporal_patch_size * tower.config.patch_size**2
    pixels = torch.randn(sum(h * w for h, w in sizes), patch, generator=torch.Generator().manual_seed(1))
    return {"hidden_states": pixels, "grid_thw": torch.tensor([(1, h, w) for h, w in sizes])}


@torch.no_grad()
def features(tower: Any, inputs: dict[str, Tensor]) -> Tensor:
    """`[tokens, D]`: what enters the language model, with all features that enter its layers side by side."""
    output = tower(inputs["hidden_states"].to(tower.dtype), grid_thw=inputs["grid_thw"])
    return torch.cat([output.pooler_output, *(getattr(output, "deepstack_features", None) or [])], dim=-1)


# ---- patches ---------------------------------------------------------------------------------------------------------


def convolutions(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights of every Conv3d that runs from now on."""
    weights: list[Tensor] = []
    stock = nn.Conv3d._conv_forward

    def record(self: nn.Conv3d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weights.append(weight)
        return stock(self, x, weight, bias)

    monkeypatch.setattr(nn.Conv3d, "_conv_forward", record)
    return weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_product_of_patches_is_their_convolution(variant: str, tiny_model: TinyModel) -> None:
    proj = tower_of(tiny_model(variant), torch.bfloat16).patch_embed.proj.double()
    assert (proj.bias is None) == (variant == "edit")
    patches = torch.randn(64, proj.in_channels, *proj.kernel_size, dtype=torch.float64)
    patches = patches.bfloat16().double()  # so that all dtypes get the same
    exact = nn.Conv3d.forward(proj, patches)
    for dtype in (torch.float64, *FLOATS):
        proj, patches = proj.to(dtype), patches.to(dtype)
        product, convolution = proj.product(patches), nn.Conv3d.forward(proj, patches)
        assert product.shape == convolution.shape
        assert_same(product.flatten(1), convolution.flatten(1), exact.flatten(1))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("device", "dtype", "convolves"),
    [("cpu", torch.float32, True), ("cpu", torch.bfloat16, False), *(("meta", each, False) for each in FLOATS)],
)
def test_patches_are_convolved_in_float32_on_a_cpu_alone(
    device: str,
    dtype: torch.dtype,
    convolves: bool,
    variant: str,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tower = tower_of(tiny_model(variant), dtype, torch.device(device))
    inputs = inputs_for(tower, SIZES["ragged"])
    inputs["hidden_states"] = inputs["hidden_states"].to(device)
    weights = convolutions(monkeypatch)
    if device == "meta":  # as on an accelerator; the stock tower would ask the device for sizes
        batch_windows(tower)
    features(tower, inputs)
    assert len(weights) == convolves


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_float32_a_cpu_keeps_the_bytes_of_the_stock_tower(variant: str, tiny_model: TinyModel) -> None:
    """And its parameters, under the same names."""
    ours, folder = tower_of(tiny_model(variant), torch.float32), tiny_model(variant) / "text_encoder"
    kind = encoders.MODELS[encoders.text_encoder_type(folder)]
    stock = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").model.visual
    inputs = inputs_for(stock, SIZES["ragged"])
    assert torch.equal(features(ours, inputs), features(stock, inputs))
    theirs = stock.state_dict()
    assert list(ours.state_dict()) == list(theirs)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def test_a_build_in_bfloat16_on_the_cpu_multiplies_patches(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the class that encodes; no other layer of it is a Conv3d."""
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    for dtype, count in ((torch.bfloat16, 0), (torch.float32, 1)):
        encoder = TextEncoder(model, CPU, dtype)
        with monkeypatch.context() as patches:
            weights = convolutions(patches)
            encoder.encode_whole(images(2), "make it blue")
        assert len(weights) == count


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sizes", [slow("Edit-Plus"), slow("several"), "ragged", slow("Edit")])
def test_windows_together_give_what_each_gives_alone(variant: str, sizes: str, tiny_model: TinyModel) -> None:
    exact = tower_of(tiny_model(variant), torch.bfloat16).to(torch.float64)
    expected = features(exact, inputs_for(exact, SIZES[sizes]))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tower = tower_of(tiny_model(variant), torch.bfloat16).to(dtype)
        inputs = inputs_for(tower, SIZES[sizes])
        stock = features(tower, inputs)
        batch_windows(tower)
        assert_same(features(tower, inputs), stock, expected)


@pytest.mark.parametrize(("variant", "per_layer"), [("edit", (3, 2)), ("qwen-image-21", (2, 2))])
def test_windows_of_one_length_share_a_call(
    variant: str, per_layer: tuple[int, int], tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three images: 28 patches are three windows and a half. 3 lengths in place of 36 windows, 2 of 3 images."""
    tower = tower_of(tiny_model(variant), torch.float32)
    batch_windows(tower)
    calls = []
    attend = encoders.scaled_dot_product_attention
    monkeypatch.setattr(
        encoders, "scaled_dot_product_attention", lambda *a, **named: calls.append(a) or attend(*a, **named)
    )
    features(tower, inputs_for(tower, [(28, 28), (16, 16), (28, 28)]))
    assert len(calls) == tower.config.depth // 2 * sum(per_layer)  # every other layer attends to whole images


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_host_never_waits_for_the_device(variant: str, tiny_model: TinyModel) -> None:
    meta = torch.device("meta")
    tower = tower_of(tiny_model(variant), torch.float32, meta)
    inputs = inputs_for(tower, SIZES["several"])
    inputs["hidden_states"] = inputs["hidden_states"].to(meta)
    batch_windows(tower)
    assert features(tower, inputs).is_meta


@pytest.mark.parametrize("variant", ["edit-plus", "qwen-image-21"])
def test_an_encoder_on_an_accelerator_uses_it_and_one_on_the_cpu_does_not(
    variant: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings, and the attention on the first image, which hooks capture in the language model."""
    model = open_model(str(tiny_model(variant)), ENCODER_PARTS)
    on_cpu = TextEncoder(model, CPU, torch.float32, attend=True)
    monkeypatch.setattr("qwen_cache.encode.text.is_accelerator", lambda device: True)
    encoder = TextEncoder(model, CPU, torch.float32, attend=True)
    names = [each.model.visual.config._attn_implementation for each in (on_cpu, encoder)]
    assert names == ["sdpa", encoders.ATTENTION]
    assert encoder.model.config.text_config._attn_implementation == "sdpa"
    pair = images(2) if variant == "edit-plus" else [each.resize((128, 96)) for each in images(2)]
    stock, ours = (each.encode([TextRequest(each.inputs(pair), "make it blue", ())])[0] for each in (on_cpu, encoder))
    for name in ("prefix", "prompt", "empty"):
        assert_same(getattr(ours, name), getattr(stock, name))
    assert ours.attention is not None
    torch.testing.assert_close(ours.attention, stock.attention, rtol=2**-9, atol=2**-20)  # stored in float16
    assert_same(encoder.encode_whole(pair, "make it blue")[0], on_cpu.encode_whole(pair, "make it blue")[0])
