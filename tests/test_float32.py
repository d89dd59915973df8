"""A promise of float32 holds on a GPU too, whatever torch's defaults and the environment say.

The switches are asked as kernels ask them, by backend and operation. No GPU is needed: they are there without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache.encode.vae import load_vae
from qwen_cache.models.devices import full_float32
from qwen_cache.models.encoders import load_text_encoder
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import load_config
from qwen_train.weights import load_transformer

CPU = torch.device("cpu")
ENVIRONMENTS = {
    "default": lambda: None,
    "older switches": lambda: torch.set_float32_matmul_precision("medium"),
    "newer switch": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


def precisions() -> list[str]:
    """The precision of float32 convolutions and matrix products on CUDA, and of matrix products by oneDNN."""
    backends: Any = torch.backends
    return [each.fp32_precision for each in (backends.cudnn.conv, backends.cuda.matmul, backends.mkldnn.matmul)]


@pytest.fixture(autouse=True)
def as_torch_starts() -> Iterator[None]:
    def reset() -> None:
        torch.backends.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True

    reset()
    yield
    reset()


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_switch_is_off(environment: str) -> None:
    ENVIRONMENTS[environment]()
    assert "tf32" in precisions()  # otherwise this test shows nothing
    full_float32()
    assert precisions() == ["ieee"] * 3
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)  # no RuntimeError


@pytest.mark.parametrize("part", ["the VAE", "the text encoder", "the transformer in training"])
def test_the_first_part_in_float32_turns_them_off(part: str, tiny_model: Callable[[str], Path]) -> None:
    """VAE and text encoder as `build`, `predict` and `decode` load them."""
    model = open_model(str(tiny_model("edit")), ("vae", "text_encoder", "transformer"))

    def load(dtype: torch.dtype) -> None:
        if part == "the VAE":
            load_vae(model, CPU, dtype)
        elif part == "the text encoder":
            load_text_encoder(model.component("text_encoder"), dtype)
        else:
            precision = "no" if dtype == torch.float32 else "bf16"
            load_transformer(model, load_config(None, [f"train.mixed_precision={precision}"]))

    load(torch.bfloat16)
    assert torch.backends.cudnn.allow_tf32
    load(torch.float32)
    assert precisions() == ["ieee"] * 3
