"""Everything that goes to an encoder on an accelerator comes from pinned memory, so that the host does not wait.

The CPU takes the accelerator's place. To pin is to copy with the same strides, which an expanded tensor does not allow.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qwen_cache.encode import text, vae
from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.models import devices
from qwen_cache.models.folder import ENCODER_PARTS, ModelFolder, open_model

from .support.photographs import photograph
from .support.text_encoder import images

CPU = torch.device("cpu")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The pinned tensors, which keep their addresses."""
    kept: list[Tensor] = []

    def pin(tensor: Tensor) -> Tensor:
        if any(tensor.data_ptr() == each.data_ptr() for each in kept):
            return tensor
        kept.append(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor))
        return kept[-1]

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    for module in (devices, text, vae):
        monkeypatch.setattr(module, "has_streams", lambda device: True)
    return kept


@pytest.fixture
def model(tiny_model: Any) -> ModelFolder:
    return open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)


def is_pinned(tensor: Tensor, pinned: list[Tensor]) -> bool:
    return any(tensor.data_ptr() == each.data_ptr() for each in pinned)


def test_inputs_of_the_text_encoder(model: ModelFolder, pinned: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets of images of different lengths, so that there are masks; pixels are joined on the device."""
    encoder = TextEncoder(model, CPU, torch.float32)
    calls: list[dict[str, Tensor]] = []
    encoder.model.register_forward_pre_hook(
        lambda module, args, named: calls.append({k: v for k, v in named.items() if isinstance(v, Tensor)}),
        with_kwargs=True,
    )
    joined: list[Tensor] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors, *a, **named: joined.extend(tensors) or cat(tensors, *a, **named))
    encoder.encode([TextRequest(encoder.inputs(images(count)), "make it blue", ()) for count in (1, 2)])
    assert [set(call) for call in calls] == [
        {"input_ids", "mm_token_type_ids", "image_grid_thw", "position_ids", "pixel_values"},
        *[{"input_ids", "position_ids", "attention_mask"}] * (len(calls) - 1),
    ]
    for call in calls:
        for name, tensor in call.items():
            assert is_pinned(tensor, pinned) == (name not in ("image_grid_thw", "pixel_values")), name
    width = calls[0]["pixel_values"].shape[1]
    pieces = [each for each in joined if each.ndim == 2 and each.shape[1] == width]
    assert len(pieces) == 2
    assert all(is_pinned(each, pinned) for each in pieces)


def test_pixels_of_the_vae(model: ModelFolder, pinned: list[Tensor]) -> None:
    encoder = VaeEncoder(model, CPU, torch.float32)
    pixels = encoder.pixels(photograph("chelsea.png"), (64, 64))
    assert is_pinned(pixels, pinned)
    count = len(pinned)
    encoder.encode([pixels])
    assert len(pinned) == count  # not once more
