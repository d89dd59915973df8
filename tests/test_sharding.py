"""Weights in parts (FSDP2): trained like whole ones, and gathered whole, in one order that every process keeps.

The judge is one model that takes the mean gradient of both batches. tests/test_distributed.py runs real processes.
"""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from qwen_cache.settings.sections import TrainConfig
from qwen_train.model.placement import wrap
from qwen_train.training import checkpoint
from qwen_train.weights import gather_weights

from .support.ranks import in_two_threads


class Model(nn.Module):
    """Blocks, and a layer outside of them; widths that two processes cannot share evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(nn.Linear(7, 7, dtype=dtype) for _ in range(2))
        self.out = nn.Linear(7, 3, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = x + block(x)
        output: Tensor = self.out(x)
        return output.float()


def batch(rank: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(rank))


def trained(rank: int, mixed_precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """What rank 0 alone keeps: the weights after two steps, the optimizer's tensors; and the last gradients, whole."""
    accelerator: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"), mixed_precision=mixed_precision)
    accelerator.prepare_model = lambda model, **_: model
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32  # as autocast would have it
    model = wrap(accelerator, Model(torch.bfloat16), TrainConfig(fsdp=True, method="full"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(rank).to(dtype)).square().mean().backward()
        optimizer.step()
    tensors: dict[str, Tensor] | None = None if rank else {}
    checkpoint._flatten(optimizer.state_dict(), "optimizer", tensors)
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return gather_weights(model, keep=not rank), tensors or {}, gradients


def test_weights_in_parts_are_trained_and_gathered_as_whole_ones() -> None:
    whole = Model(torch.bfloat16).float()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([whole(batch(rank)).square().mean() for rank in range(2)]).mean().backward()
        optimizer.step()
    expected: dict[str, Tensor] = {}
    checkpoint._flatten(deepcopy(optimizer.state_dict()), "optimizer", expected)
    (weights, tensors, _), (others_weights, others_tensors, _) = in_two_threads(lambda rank: trained(rank, "no"))
    assert [*weights] == [*whole.state_dict()]
    torch.testing.assert_close(weights, dict(whole.state_dict()))
    torch.testing.assert_close(tensors, expected)
    assert not others_weights
    assert not others_tensors


def test_gradients_of_products_in_bfloat16_are_summed_in_float32() -> None:
    (weights, _, gradients), (_, _, others) = in_two_threads(lambda rank: trained(rank, "bf16"))
    assert {tensor.dtype for tensor in (*weights.values(), *gradients)} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)
