"""Quantised text encoders: errors within what their bits allow, in the recipe, and refused where they cannot work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qwen_cache.encode.text import EncodedText, TextEncoder, TextRequest
from qwen_cache.errors import ConfigError, DeviceError
from qwen_cache.experimental.masks import encoder_of
from qwen_cache.models import quantization
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.models.hardware import Kind, Placement
from qwen_cache.models.quantization import Nf4Linear, QuantizedLinear, check_quantization, quantize
from qwen_cache.settings.load import load_config
from qwen_train.data.samples import open_mixture

from .support.caches import build, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes
from .support.judge import assert_same
from .support.marks import slow
from .support.text_encoder import images

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("int8", "fp8", "nf4")
SETTING = "cache.text_quantization"
PROMPTS = ("make it blue", "remove the tower and every person in front of it")
HALF_GAP = (1 - 0.6961928) / 2
"""Half the largest gap between the 16 numbers of nf4, which are in -1..1 (Dettmers et al., QLoRA, appendix E)."""


def allowed(kind: Kind, weight: Tensor) -> Tensor:
    """The largest error of each number: half a step of its format."""
    if kind == "nf4":
        blocks = weight.flatten().split(64)  # the last one is shorter
        largest = torch.cat([block.abs().max().expand(len(block)) for block in blocks]).view_as(weight)
        return HALF_GAP * largest
    largest = weight.abs().amax(1, keepdim=True)
    if kind == "int8":
        return largest / 127 / 2
    return torch.maximum(weight.abs() * 2**-4, largest / 448 * 2**-10)  # three bits of mantissa, down to 2^-9


def unpacked(layer: nn.Module, width: int) -> Tensor:
    """The weight that a layer multiplies by."""
    with torch.inference_mode():
        result: Tensor = layer(torch.eye(width)) - layer.bias
    return result.t()


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_is_the_nearest_number_of_its_format(
    kind: Kind, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 96 numbers: a block of nf4 ends within a row. The last piece is smaller than the others."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(96, 150), nn.ReLU()).requires_grad_(False)
    weight = layers[0].weight.clone()
    if pieces:
        monkeypatch.setattr(quantization, "PIECE", 64 * 96)
    quantize(layers, kind, CPU)
    assert type(layers[0]) is (Nf4Linear if kind == "nf4" else QuantizedLinear)
    found = unpacked(layers[0], 96)
    # The product with the identity, and the subtracted bias, round a few times in float32.
    assert ((found - weight).abs() <= allowed(kind, weight) * (1 + 1e-3) + 2**-22).all()
    assert not torch.equal(found, weight)
    monkeypatch.setattr(quantization, "PIECE", 1 << 24)
    whole = nn.Sequential(nn.Linear(96, 150)).requires_grad_(False)
    whole[0].weight, whole[0].bias = nn.Parameter(weight, requires_grad=False), layers[0].bias
    quantize(whole, kind, CPU)
    torch.testing.assert_close(unpacked(whole[0], 96), found, rtol=0, atol=2**-22)


# ---- embeddings ------------------------------------------------------------------------------------------------------


@pytest.fixture
def encode(tiny_model: Callable[[str], Path]) -> Callable[..., tuple[TextEncoder, EncodedText]]:
    def encoded(variant: str, kind: Kind) -> tuple[TextEncoder, EncodedText]:
        model = open_model(str(tiny_model(variant)), ENCODER_PARTS)
        encoder = TextEncoder(model, CPU, torch.float32, attend=True, placement=Placement(kind))
        photograph = [image.resize((128, 96)) for image in images(1)]
        return encoder, encoder.encode([TextRequest(encoder.inputs(photograph), PROMPTS[0], ())])[0]

    return encoded


def weight_error(found: TextEncoder, exact: TextEncoder) -> float:
    """The largest relative error of a matrix in the language model."""
    errors = []
    for (name, layer), (_, other) in zip(
        found.model.language_model.layers.named_modules(),
        exact.model.language_model.layers.named_modules(),
        strict=True,
    ):
        if isinstance(other, nn.Linear):
            assert type(layer) in (QuantizedLinear, Nf4Linear), name
            eye = torch.eye(other.in_features)
            with torch.inference_mode():
                a, b = layer(eye), other(eye)
                bias = 0 if other.bias is None else other.bias
            errors.append(float((a - b).norm() / (b - bias).norm()))
    return max(errors)


@pytest.mark.parametrize("variant", ["edit-plus", slow("qwen-image-21")])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_err_as_their_weights_do(variant: str, kind: Kind, encode: Callable[..., Any]) -> None:
    """Errors of the seven matrices of each layer are independent, so that of the result grows with their root."""
    exact, expected = encode(variant, "none")
    encoder, found = encode(variant, kind)
    matrices = 7 * len(encoder.model.language_model.layers)
    bound = weight_error(encoder, exact) * matrices**0.5
    for name in ("prefix", "prompt", "empty", "attention"):
        ours, theirs = getattr(found, name).double(), getattr(expected, name).double()
        error = float((ours - theirs).norm() / theirs.norm())
        assert 0 < error <= bound, (name, error, bound)
    towers = [dict(each.model.visual.named_parameters()) for each in (encoder, exact)]
    assert all(torch.equal(weight, towers[1][name]) for name, weight in towers[0].items()), "it is not quantised"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_does_not_depend_on_its_batch(kind: Kind, tiny_model: Callable[[str], Path]) -> None:
    """Only weights are quantised, so the rest of a batch changes no more than the order of sums."""
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    alone, together = (
        TextEncoder(model, CPU, torch.float32, tokens, placement=Placement(kind)) for tokens in (1, 10_000)
    )
    requests = [TextRequest(alone.inputs(images(i + 1)), prompt, ()) for i, prompt in enumerate(PROMPTS)]
    for request, found in zip(requests, together.encode(requests), strict=True):
        (expected,) = alone.encode([request])
        for name in ("prefix", "prompt", "empty"):
            assert_same(getattr(found, name), getattr(expected, name))


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_it_is_part_of_the_recipe(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes]
) -> None:
    out, model, int8 = tmp_path / "shards", tiny_model("edit-plus"), ("--set", f"{SETTING}=int8")
    assert build(pairs, out, model).code == 0
    assert "text_quantization" not in fast[0].job.recipe, "older caches keep their keys"
    planned = plan(pairs, out, model, *int8)
    assert planned["to_encode"] == 4
    assert planned["reasons"] == {"recipe: text_quantization unset → int8": 4}
    refused(build(pairs, out, model, *int8), "because the recipe changed: text_quantization unset → int8")
    small = (*int8, "--set", "cache.recipe=small")
    built = build(pairs, out, model, *small)
    assert built.code == 0
    assert "(QwenImageEditPlusPipeline, float32, text encoder in int8)" in built.stderr
    assert fast[1].job.recipe == fast[0].job.recipe | {"text_quantization": "int8"}
    offload = ("--set", "cache.text_offload=true")
    for options in ((), small, offload, (*small, *offload)):
        assert plan(pairs, out, model, *options)["cached"] == 4
    assert "QwenImageEditPlusPipeline, float32, text encoder in int8" in run("qwen-cache", "inspect", out).stdout
    heads = [encoder_of(lanes.job.recipe) for lanes in fast]
    assert heads[0] != heads[1], "a mask head is for the attention that it was trained on"


def test_quantised_embeddings_are_not_trained_together_with_others(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes]
) -> None:
    caches = [tmp_path / "whole", tmp_path / "small"]
    for out, kind in zip(caches, ("none", "int8"), strict=True):
        assert build(pairs, out, tiny_model("edit-plus"), "--set", f"{SETTING}={kind}").code == 0
    settings = load_config(None, [f"train.caches=[{{path: {caches[0]}}}, {{path: {caches[1]}}}]"])
    with pytest.raises(ConfigError) as error:
        open_mixture(settings.train.caches, settings.cache)
    assert error.value.what == "these caches cannot be trained together: they differ in text_quantization"
    assert (error.value.expected, error.value.found) == (f"none, as in {caches[0]}", f"int8 in {caches[1]}")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "module"), [("nf4", "bitsandbytes.functional")])
def test_a_missing_package(kind: Kind, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as error:
        check_quantization(kind, SETTING, CPU)
    assert error.value.what == f"{SETTING}={kind}: import of {module} halted; None in sys.modules"
    assert "[quantization]" in str(error.value.do)


def test_a_device_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as fp8 on MPS."""

    def convert(*_: object, **__: object) -> None:
        raise TypeError("Trying to convert Float8_e4m3fn to the MPS backend\nbut it does not have support")

    monkeypatch.setattr(quantization, "quantize", convert)
    with pytest.raises(DeviceError) as error:
        check_quantization("fp8", SETTING, CPU)
    assert str(error.value) == (
        f"{SETTING}=fp8: cpu cannot compute with such weights (found Trying to convert Float8_e4m3fn to the MPS "
        f"backend)\n  → choose another {SETTING}"
    )


def test_a_build_asks_before_it_reads_anything(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--set", f"{SETTING}=nf4")
    refused(result, f"{SETTING}=nf4: import of bitsandbytes.functional halted", "[quantization]")
    assert not (tmp_path / "shards").exists()
