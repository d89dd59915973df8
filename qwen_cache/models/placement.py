"""Where the weights of a text encoder are, and in how many bits: all on its device, quantised, or offloaded.

Quantised are the linear layers of the language model, which hold nine tenths of the weights. The vision tower, norms
and biases are not: they are small, and errors in an image's features reach every token. With either setting, an
accelerator holds no table of token embeddings, whose rows are looked up on the host, and only two blocks of the vision
tower at a time; with `offload` also only two layers of the language model. Where weights wait changes no result:
the same kernels compute with the same numbers. On the CPU all weights are in host memory anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding

from qwen_cache.models.devices import is_accelerator, to_device
from qwen_cache.models.offload import WaitingBlocks, in_a_circle, set_parameters
from qwen_cache.models.quantized_linear import Kind, quantize

SETTING = "cache.text_quantization"


@dataclass(frozen=True)
class Placement:
    """The settings `cache.text_quantization` and `cache.text_offload`."""

    quantization: Kind = "none"
    offload: bool = False

    def is_partial(self, device: torch.device) -> bool:
        """Whether some weights wait in host memory."""
        return is_accelerator(device) and (self.offload or self.quantization != "none")


WHOLE = Placement()
"""All weights as they were loaded, on one device."""


def place(model: Any, device: torch.device, placement: Placement = WHOLE) -> Any:
    """Move a loaded Qwen2.5-VL or Qwen3-VL, without its `lm_head`, to its device, in place."""
    layers = _quantized_layers(model, device, placement)
    if not placement.is_partial(device):
        for _ in layers:
            pass
        return model.to(device)
    waiting = [WaitingBlocks(model.visual.blocks, device)]
    if placement.offload:
        waiting.append(WaitingBlocks(layers, device))
    else:
        for layer in layers:
            layer.to(device)
    table = model.language_model.embed_tokens
    weight = table.weight
    set_parameters([(table, "weight")], [None])  # so that model.to does not move it
    model.to(device)
    set_parameters([(table, "weight")], [weight])
    table.__class__, table.sent_to = HostEmbedding, device
    for stack in waiting:
        stack.attach(in_a_circle)
    return model


def _quantized_layers(model: Any, device: torch.device, placement: Placement) -> Iterator[nn.Module]:
    """The layers of the language model; each is quantised when it is asked for."""
    for layer in model.language_model.layers:
        if placement.quantization != "none":
            quantize(layer, placement.quantization, SETTING, device)
        yield layer


class HostEmbedding(nn.Embedding):
    """A table of embeddings in host memory; the rows are sent to the device of the model."""

    sent_to: torch.device

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return to_device(embedding(ids.cpu(), self.weight), self.sent_to)
