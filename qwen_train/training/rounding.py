"""Weights in bfloat16 that an optimizer of torchao updates in float32: rounded up or down at random, in proportion.

The draw of an element is a hash of the seed, the step, the number of its tensor and its position in the whole tensor.
So it is the same in every process that has the element, whole or in parts, and after a resume; no random state is kept.
"""

from __future__ import annotations

from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

LOW = 0xFFFF
"""The bits of a float32 that bfloat16 lacks."""
MASK = 0xFFFFFFFF
MIXING = ((16, 0x21F0AAAD), (15, 0x735A2D97), (15, 1))
"""Shifts and factors of a hash of 32 bits that is a permutation (Wellons, hash-prospector). A product with a factor
below 2**31 has less than 63 bits."""


def with_rounding(kind: type[torch.optim.Optimizer], seed: int) -> type[torch.optim.Optimizer]:
    """An AdamW of torchao whose updates are rounded so."""
    return type(f"Rounded{kind.__name__.lstrip('_')}", (Rounding, kind), {"seed": seed})


class Rounding:
    """The update of all weights; the rest is torchao's."""

    seed: int
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Any]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        update = torch.compile(_update, fullgraph=True, dynamic=False)
        parameters = [(group, parameter) for group in self.param_groups for parameter in group["params"]]
        with torch._dynamo.utils.disable_cache_limit():  # as many as there are shapes
            for number, (group, parameter) in enumerate(parameters):
                if parameter.grad is None:
                    continue
                state = self.state[parameter] or self._first_state(group, parameter)
                state["step"] += 1
                keys = keys_of(self.seed, int(state["step"]), number)
                place = torch.tensor([first_position(parameter), *keys], device=parameter.device)
                weight, gradient = _local(parameter.detach()), _local(parameter.grad)
                moments = {name: _local(value) for name, value in state.items() if name != "step"}
                settings = (group["lr"], *group["betas"], group["weight_decay"], group["eps"])
                update(weight, gradient, state["step"], moments, settings, place)

    def _first_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        new: Any = self._new_buffer  # type: ignore[attr-defined]
        state |= {"step": torch.tensor(0.0), "exp_avg": new(parameter, True), "exp_avg_sq": new(parameter, False)}
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = new(parameter, False)
        return state


def _local(tensor: Tensor) -> Tensor:
    """The part of this process."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _update(
    weight: Tensor,
    gradient: Tensor,
    step: Tensor,
    moments: dict[str, Tensor],
    settings: tuple[Any, ...],
    place: Tensor,
) -> None:
    """Update a weight and its moments, in place."""
    from torchao.optim.adam import single_param_adam

    exact, is_adamw, rounds = weight.float(), True, False
    of_state = moments["exp_avg"], moments["exp_avg_sq"], moments.get("max_exp_avg_sq")
    single_param_adam(exact, gradient, step, *of_state, *settings, is_adamw, rounds)
    weight.copy_(rounded(exact, draws(weight, place)))


# ---- draws -----------------------------------------------------------------------------------------------------------


def keys_of(seed: int, step: int, number: int) -> tuple[int, int]:
    """Two keys of 32 bits for the draws of a tensor in a step."""
    digest = xxhash.xxh3_64_intdigest(f"{seed} {step} {number}".encode())
    return digest >> 32, digest & MASK


def first_position(weight: Tensor) -> int:
    """The position in the whole tensor of the first element of this process, which has rows of it."""
    if not isinstance(weight, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    row = weight.shape[1:].numel() if weight.ndim else 1
    return offset[0] * row


def draws(weight: Tensor, place: Tensor) -> Tensor:
    """A number of 16 bits for each element, as int32; `place` has the position of the first one, and the keys."""
    first, *keys = place.unbind()
    numbers = torch.arange(weight.numel(), device=weight.device).view(weight.shape) + first
    for key in keys:
        numbers = _mixed(numbers ^ key)
    return (numbers & LOW).int()


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in MIXING:
        numbers = ((numbers ^ (numbers >> shift)) * factor) & MASK
    return numbers


def rounded(exact: Tensor, draws: Tensor) -> Tensor:
    """Float32 numbers in bfloat16: away from zero with a probability of the bits that are cut off, over 2**16."""
    bits = (exact.view(torch.int32) + draws) & ~LOW
    return torch.where(exact.isfinite(), bits.view(torch.float32), exact).bfloat16()
