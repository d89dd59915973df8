"""The stock transformer ("original") against ours ("custom"): two batches of equal sizes ("split"), and one of all
four samples ("full"), where the smaller images and the texts are padded.

`--model PATH` loads a real checkpoint, 4-bit ones too where its config.json says so; `--dtype` and `--device` say how
and where it runs. One model is in memory at a time. Padding is filled with large numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

Images = list[tuple[int, int, int]]

TEXT_LENGTH, PADDED_TEXT_LENGTH = 77, 96
# Relative. bfloat16 keeps 8 bits, 4e-3 per rounding, and a product's roundings follow from its shape. Four layers come
# to 4e-3 between two batches of the same samples; sixty, if their roundings add up as a random walk, to 1.6e-2.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
GEOMETRIES: dict[str, list[Images]] = {
    "small": [[(1, 4, 4), (1, 4, 4)]] * 2 + [[(1, 8, 8), (1, 8, 8)]] * 2,
    "full": [[(1, 32, 32), (1, 32, 32)]] * 2 + [[(1, 64, 64), (1, 64, 64)]] * 2,
}
SPLIT = (slice(0, 2), slice(2, 4))  # samples of equal size
RANDOM_MODEL = {
    "num_layers": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 14, 14),
}


@dataclass(frozen=True)
class Samples:
    """Four samples of the same text length."""

    shapes: list[Images]
    images: list[Tensor]
    texts: Tensor
    timestep: Tensor

    def batch(self, part: slice, *, padding: float | None = None) -> dict[str, Any]:
        """Arguments for some of the samples; with `padding`, text gets some and a mask, and so do smaller images."""
        images, texts = self.images[part], self.texts[part]
        fill = 0.0 if padding is None else padding
        batch = {
            "hidden_states": torch.nn.utils.rnn.pad_sequence(images, batch_first=True, padding_value=fill),
            "encoder_hidden_states": texts,
            "timestep": self.timestep[part],
            "img_shapes": self.shapes[part],
        }
        if padding is not None:
            extra = (0, 0, 0, PADDED_TEXT_LENGTH - TEXT_LENGTH)
            batch["encoder_hidden_states"] = torch.nn.functional.pad(texts, extra, value=fill)
            valid = torch.arange(PADDED_TEXT_LENGTH, device=texts.device) < TEXT_LENGTH
            batch["encoder_hidden_states_mask"] = valid.expand(len(texts), -1)
        return batch


@dataclass(frozen=True)
class Results:
    """A model and its results; outputs are padded rows, one per sample."""

    parameters: dict[str, tuple[Any, ...]]
    split: list[Tensor]
    split_with_mask: list[Tensor]
    full_with_mask: list[Tensor]
    full_with_other_padding: list[Tensor]


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder to load from: `--model`, else a small transformer with random weights."""
    given = request.config.getoption("--model")
    if given:
        return given / "transformer" if (given / "transformer").is_dir() else given
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**RANDOM_MODEL)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
        elif "norm_" in name:
            torch.nn.init.constant_(parameter, 1.5)  # sharp attention, or mistakes in it would not show
    folder = tmp_path_factory.mktemp("transformer")
    model.save_pretrained(folder)
    return folder


def load(cls: type[QwenImageTransformer2DModel], checkpoint: Path, device: str, dtype: torch.dtype) -> Any:
    model = cls.from_pretrained(checkpoint, torch_dtype=dtype).requires_grad_(False)
    return model if getattr(model, "is_quantized", False) else model.to(device)  # those are where they have to be


def random_samples(shapes: list[Images], model: Any, device: str, dtype: torch.dtype) -> Samples:
    generator = torch.Generator().manual_seed(1)
    images = [
        torch.randn(sum(math.prod(image) for image in images), model.config.in_channels, generator=generator)
        for images in shapes
    ]
    texts = torch.randn(len(shapes), TEXT_LENGTH, model.config.joint_attention_dim, generator=generator)
    timestep = torch.rand(len(shapes), generator=generator)
    return Samples(
        shapes,
        [image.to(device, dtype) for image in images],
        texts.to(device, dtype),
        timestep.to(device, dtype),
    )


def fingerprints(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """Shape, type and a hash of the bytes of each parameter."""
    return {
        name: (tuple(p.shape), p.dtype, xxh3_128_hexdigest(p.detach().cpu().reshape(-1).view(torch.uint8).numpy()))
        for name, p in model.named_parameters()
    }


def run_split(model: Any, samples: Samples, padding: float | None = None) -> list[Tensor]:
    """In two batches. The stock model takes one list of images per sample, as ours does."""
    return [row for part in SPLIT for row in model(**samples.batch(part, padding=padding), return_dict=False)[0].cpu()]


@pytest.fixture(scope="module", params=["small", pytest.param("full", marks=pytest.mark.slow)])
def shapes(request: pytest.FixtureRequest) -> list[Images]:
    return GEOMETRIES[request.param]


@pytest.fixture(scope="module")
def settings(request: pytest.FixtureRequest) -> tuple[str, torch.dtype]:
    return request.config.getoption("--device"), getattr(torch, request.config.getoption("--dtype"))


@pytest.fixture(scope="module")
def tolerance(request: pytest.FixtureRequest) -> float:
    return TOLERANCE[request.config.getoption("--dtype")]


@pytest.fixture(scope="module")
def original(shapes: list[Images], checkpoint: Path, settings: tuple[str, torch.dtype]) -> Results:
    """The stock model, which can run batches of equal sizes."""
    model = load(QwenImageTransformer2DModel, checkpoint, *settings)
    samples = random_samples(shapes, model, *settings)
    with torch.no_grad():
        return Results(fingerprints(model), run_split(model, samples), run_split(model, samples, padding=1e3), [], [])


@pytest.fixture(scope="module", params=["padded", "packed"])
def custom(
    request: pytest.FixtureRequest, shapes: list[Images], checkpoint: Path, settings: tuple[str, torch.dtype]
) -> Results:
    model = load(QwenImageMultiResTransformer2DModel, checkpoint, *settings)
    model.layout = request.param
    samples = random_samples(shapes, model, *settings)
    everything = slice(0, len(shapes))
    with torch.no_grad():
        return Results(
            fingerprints(model),
            run_split(model, samples),
            run_split(model, samples, padding=1e3),
            list(model(**samples.batch(everything, padding=1e3)).sample.cpu()),
            list(model(**samples.batch(everything, padding=-7e2)).sample.cpu()),
        )


# ---- comparisons -----------------------------------------------------------------------------------------------------


def lengths(shapes: list[Images]) -> list[int]:
    return [sum(math.prod(image) for image in images) for images in shapes]


def valid(rows: list[Tensor], shapes: list[Images]) -> list[Tensor]:
    return [row[:length] for row, length in zip(rows, lengths(shapes), strict=True)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative error of the worst sample."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def assert_sound(rows: list[Tensor], expected_lengths: list[int]) -> None:
    """Finite, of the right length, and not one and the same for all samples."""
    assert [len(row) for row in rows] == expected_lengths
    assert all(row.isfinite().all() and row.any() for row in rows)
    assert error(rows[:1], rows[1:2]) > 0.1


class TestQwenTransformerEquivalence:
    def test_model_parameters_equivalence(self, original: Results, custom: Results) -> None:
        assert custom.parameters == original.parameters

    def test_original_model_split_batches(self, original: Results, shapes: list[Images]) -> None:
        assert_sound(original.split, lengths(shapes))

    def test_custom_model_split_batches(self, custom: Results, shapes: list[Images]) -> None:
        assert_sound(custom.split, lengths(shapes))

    def test_equivalence_split_vs_split(self, original: Results, custom: Results, tolerance: float) -> None:
        assert error(custom.split, original.split) < tolerance

    def test_custom_model_split_with_mask(
        self, original: Results, custom: Results, shapes: list[Images], tolerance: float
    ) -> None:
        """Padded texts, which the stock model can mask as long as the images are of one size."""
        assert_sound(custom.split_with_mask, lengths(shapes))
        assert error(custom.split_with_mask, original.split_with_mask) < tolerance

    def test_equivalence_split_with_vs_without_mask(self, custom: Results, tolerance: float) -> None:
        assert error(custom.split_with_mask, custom.split) < tolerance

    def test_custom_model_full_batch_with_mask(self, custom: Results, shapes: list[Images]) -> None:
        assert_sound(custom.full_with_mask, [max(lengths(shapes))] * len(shapes))

    def test_equivalence_split_vs_full(self, custom: Results, shapes: list[Images], tolerance: float) -> None:
        assert error(valid(custom.full_with_mask, shapes), custom.split) < tolerance

    def test_equivalence_original_vs_custom_full(
        self, original: Results, custom: Results, shapes: list[Images], tolerance: float
    ) -> None:
        assert error(valid(custom.full_with_mask, shapes), original.split) < tolerance

    def test_padding_is_masked(self, custom: Results, shapes: list[Images]) -> None:
        """The values in the padding change nothing, and its outputs are zero."""
        for row, other, length in zip(
            custom.full_with_mask, custom.full_with_other_padding, lengths(shapes), strict=True
        ):
            assert torch.equal(row, other)
            assert not row[length:].any()
