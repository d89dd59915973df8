"""Inputs of text encoders, and the outputs of the stock one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor, nn

from .judge import PHOTOGRAPHS, Size, image

SIZES: list[Size] = [(128, 96), (84, 140), (112, 112), (160, 64)]


def images(count: int) -> list[Image.Image]:
    """Photographs at sizes for the text encoder, all different."""
    return [image(name, size) for name, size in zip(PHOTOGRAPHS, SIZES[:count], strict=False)]


@torch.no_grad()
def stock_embeds(pipeline: Any, controls: list[Image.Image], prompt: str) -> Tensor:
    """`[L, D]`: one prompt by itself, from the first token on."""
    arguments = {"image": controls if len(controls) > 1 else controls[0]} if controls else {}
    embeds, mask = pipeline.encode_prompt(prompt, **arguments)
    assert mask is None
    return embeds[0]


@contextmanager
def recording(model: type[nn.Module]) -> Iterator[list[dict[str, Any]]]:
    """The named arguments of every call of a `model`, ours or stock."""
    calls: list[dict[str, Any]] = []
    forward = model.forward
    signature = inspect.signature(forward)

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(signature.bind(self, *args, **kwargs).arguments)
        return forward(self, *args, **kwargs)

    with patch.object(model, "forward", record):
        yield calls
