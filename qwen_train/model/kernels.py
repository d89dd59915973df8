"""Kernels of attention: forward and backward of one call, and the choice of one for a run on CUDA.

Autograd does not reach into the operation of `segments.py`, so backward kernels are called by name. All kernels mean
the same by their output and log-sum-exp, so one that fails is replaced by torch's flash attention in the middle of a
step, with one line. A kernel that cannot run with these settings, or on this device, is refused if it was asked for.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qwen_cache.errors import ConfigError, first_line
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.terminal import console, plural
from qwen_cache.text import plain

aten = torch.ops.aten

Kernel = Literal["flash", "cudnn", "fa3"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
FLASH: Kernel = "flash"
TITLES: dict[Kernel, str] = {"flash": "flash", "cudnn": "cuDNN", "fa3": "FlashAttention-3"}
FA3 = "flash_attn_interface"
"""The package of FlashAttention-3: the folder hopper of flash-attention."""


# ---- one call --------------------------------------------------------------------------------------------------------
# Queries, keys and values are `[n, heads, dim]`, the log-sum-exp is `[heads, n]`.


class Extent(NamedTuple):
    """The sequences of one call."""

    bounds: Tensor
    """`[2, sequences + 1]`, int32 on the device: of their queries and of their keys."""
    longest: tuple[int, int]
    """The most queries, and the most keys, of a sequence."""
    is_causal: bool
    """True if a query sees the keys up to itself, the last query all of them."""


def forward(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, on CUDA."""
    if kernel not in _failed:
        try:
            return FORWARD[kernel](query, key, value, extent)
        except FAILURES as error:
            _give_up(kernel, error)
    return _flash(query, key, value, extent)


def backward(kernel: Kernel, inputs: Sequence[Tensor], extent: Extent) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value on CUDA, from the gradient of the output, query, key, value, output and
    log-sum-exp."""
    is_random = kernel == "cudnn" and torch.are_deterministic_algorithms_enabled()  # it adds in any order
    if kernel not in _failed and not is_random:
        try:
            return BACKWARD[kernel](*inputs, extent)
        except FAILURES as error:
            _give_up(kernel, error)
    return _flash_backward(*inputs, extent)


_failed: set[Kernel] = set()
"""The kernels that have failed in this process."""
FAILURES = (RuntimeError, TypeError, ImportError, AttributeError)
"""The errors of a kernel that torch lacks or that refuses its inputs, and of another version of a package."""


def _give_up(kernel: Kernel, error: Exception) -> None:
    """Use flash attention in place of this kernel from now on, and say so; raise what is not the kernel's fault."""
    if kernel == FLASH or isinstance(error, torch.OutOfMemoryError):
        raise error
    _failed.add(kernel)
    line = f"attention by {TITLES[kernel]} failed ({first_line(error)}): flash attention from here on"
    console().print(plain(line), markup=False)


def _flash(query: Tensor, key: Tensor, value: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    output, lse, *_ = aten._flash_attention_forward(
        query, key, value, *extent.bounds, *extent.longest, 0.0, extent.is_causal, False, **_window(extent)
    )
    return output, lse


def _flash_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, extent = inputs
    random = torch.zeros(2, dtype=torch.uint64, device=tensors[0].device)  # of dropout, of which there is none
    of_query, of_key, of_value = aten._flash_attention_backward(
        *tensors, *extent.bounds, *extent.longest, 0.0, extent.is_causal, random, random[:0], **_window(extent)
    )
    return of_query, of_key, of_value


def _window(extent: Extent) -> dict[str, int]:
    """The keys that a query sees, for flash attention.

    "Causal" is aligned to the bottom right, the last query with the last key, where queries are fewer than keys:
    flash-attention does so since 2.1 (its README, "Change behavior of causal flag"), and torch relies on it for
    `CausalVariant.LOWER_RIGHT` (torch/nn/attention/bias.py).
    """
    return {"window_size_left": -1, "window_size_right": 0 if extent.is_causal else -1}


def _cudnn(query: Tensor, key: Tensor, value: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """One sequence. Its causal mask is aligned to the first key: it takes no causal call with fewer queries than keys.

    It returns an output with the strides of the query, and a log-sum-exp `[1, heads, n, 1]`.
    """
    by_head = (_by_head(x.contiguous()) for x in (query, key, value))
    output, lse, *_ = aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, extent.is_causal)
    return output[0].transpose(0, 1).contiguous(), lse[0, ..., 0].contiguous()


def _cudnn_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, lse, extent = inputs
    by_head = [_by_head(x.contiguous()) for x in tensors]
    random = torch.empty((), dtype=torch.int64, device=lse.device)  # of dropout, which is not read
    gradients = aten._scaled_dot_product_cudnn_attention_backward(
        *by_head, lse[None, ..., None], random, random, None, None, None, *extent.longest, 0.0, extent.is_causal
    )
    of_query, of_key, of_value = (x[0].transpose(0, 1).contiguous() for x in gradients)
    return of_query, of_key, of_value


def _fa3(query: Tensor, key: Tensor, value: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """By the package's own functions: torch's `activate_flash_attention_impl` would change every other call too.

    Causal is aligned to the last key, as in flash attention.
    """
    output, lse, *_ = importlib.import_module(FA3)._flash_attn_forward(
        query,
        key,
        value,
        cu_seqlens_q=extent.bounds[0],
        cu_seqlens_k=extent.bounds[1],
        max_seqlen_q=extent.longest[0],
        max_seqlen_k=extent.longest[1],
        softmax_scale=1 / math.sqrt(query.shape[-1]),
        causal=extent.is_causal,
    )
    return output, lse


def _fa3_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments by their place, in which the package's versions agree; their names differ."""
    *tensors, extent = inputs
    of_query, of_key, of_value = (torch.empty_like(x) for x in tensors[1:4])
    importlib.import_module(FA3)._flash_attn_backward(
        *tensors,
        *extent.bounds,
        None,  # the lengths that are used of longer sequences
        None,
        *extent.longest,
        of_query,
        of_key,
        of_value,
        1 / math.sqrt(of_query.shape[-1]),
        extent.is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return of_query, of_key, of_value


FORWARD: dict[Kernel, Callable[..., tuple[Tensor, Tensor]]] = {"flash": _flash, "cudnn": _cudnn, "fa3": _fa3}
BACKWARD: dict[Kernel, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    "flash": _flash_backward,
    "cudnn": _cudnn_backward,
    "fa3": _fa3_backward,
}


def forward_on_cpu(query: Tensor, key: Tensor, value: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of one sequence, by the kernel of scaled_dot_product_attention on the CPU."""
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        _by_head(query), _by_head(key), _by_head(value), **_mask(extent, query)
    )
    return output[0].transpose(0, 1).contiguous(), lse[0].contiguous()


def backward_on_cpu(inputs: Sequence[Tensor], extent: Extent) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from the inputs of `backward`."""
    *tensors, lse = inputs
    mask = _mask(extent, tensors[1])
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *map(_by_head, tensors), lse[None], 0.0, mask.pop("is_causal"), **mask
    )
    of_query, of_key, of_value = (x[0].transpose(0, 1).contiguous() for x in gradients)
    return of_query, of_key, of_value


def _mask(extent: Extent, query: Tensor) -> dict[str, Any]:
    """The keys that a query sees, for the CPU's kernel, whose `is_causal` is aligned to the first key."""
    queries, keys = extent.longest
    if not extent.is_causal or queries == keys:
        return {"is_causal": extent.is_causal}
    hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
    mask = query.new_zeros(1, 1, queries, keys).masked_fill_(hidden, -math.inf)
    return {"is_causal": False, "attn_mask": mask}


def _by_head(x: Tensor) -> Tensor:
    """`[1, heads, n, dim]`."""
    return x.transpose(0, 1)[None]


# ---- the choice ------------------------------------------------------------------------------------------------------

CUDNN_IS_FASTER = (9, 10)
"""Major compute capabilities. On an H100 cuDNN took 6.3 ms for 8,544 tokens of 24 heads, flash attention 10.0 ms. On
8.x and 12.0 it is as fast or slower (huggingface/transformers#48163); on 10.x faster (sgl-project/sglang#33655)."""
SAMPLES_PER_LENGTH = 16
"""cuDNN prepares each pair of lengths, for 0.1 to 0.5 s on an H100, and saves 0.06 s for a sample of 4,346 tokens in 60
blocks: after eight samples of a length it has paid, and after twice as many it is worth it."""
PROBED = (1100, 1379)
"""Queries and keys of the call that is compared, no multiples of a power of two."""
AS_NEAR = 0.02
"""The largest relative distance from flash attention. Both round to bfloat16, whose unit is 0.004."""


class Choice(NamedTuple):
    """The kernel of a run, and why."""

    kernel: Kernel
    reason: str = ""

    def __str__(self) -> str:
        return TITLES[self.kernel] + (f": {self.reason}" if self.reason else "")


def choose_kernel(
    setting: Kernel | Literal["auto"], capability: tuple[int, int], lengths: int, samples: float
) -> Choice:
    """The kernel of `train.attention` on CUDA, for a process that trains these numbers of samples and lengths."""
    if setting != "auto":
        return Choice(setting)
    if capability[0] not in CUDNN_IS_FASTER:
        return Choice(FLASH)
    described = f"{plural(round(samples), 'sample')} of {plural(lengths, 'length')}"
    if samples < SAMPLES_PER_LENGTH * lengths:
        return Choice(FLASH, f"{described} are too few for cuDNN, which prepares each length")
    return Choice("cudnn", described)


def refuse_kernel(settings: TrainConfig, device: torch.device, *, by_segments: bool) -> None:
    """Raise ConfigError if the kernel of `train.attention` cannot run here.

    `by_segments` is true for rows that are computed segment by segment: packed ones, and all of Qwen-Image-2.1.
    """
    if settings.attention in ("auto", "flash"):
        return
    capability, needs = capability_of(device), "9.0 (H100, H200)" if settings.attention == "fa3" else "8.0 or newer"
    found = "no CUDA GPU" if capability is None else "compute capability {}.{}".format(*capability)
    suits = capability is not None and (capability == (9, 0) if settings.attention == "fa3" else capability >= (8, 0))
    obstacles = {
        (f"a CUDA GPU of compute capability {needs}", found): not suits,
        ("train.mixed_precision=bf16", f"{settings.mixed_precision}"): settings.mixed_precision != "bf16",
        ("train.layout=packed", "padded"): not by_segments,
        (f"the package {FA3}, from the folder hopper of flash-attention", "not installed"): (
            settings.attention == "fa3" and find_spec(FA3) is None
        ),
    }
    for (expected, have), applies in obstacles.items():
        if applies:
            what = f"train.attention={settings.attention} cannot run"
            raise ConfigError(what, expected=expected, found=have, do="set train.attention=auto")


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None for another one."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_cuda else None


def checked(choice: Choice, device: torch.device, heads: int, dim: int) -> Choice:
    """The choice, or flash attention if this kernel fails on the device or gives other values.

    With TORCH_CUDNN_SDPA_AVOID_RECOMPILE=1 cuDNN's does: it expects a log-sum-exp of other strides (torch's MHA.cpp).
    """
    if choice.kernel == FLASH:
        return choice
    try:
        far = distance_from_flash(choice.kernel, device, heads, dim)
    except FAILURES as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        return Choice(FLASH, f"{TITLES[choice.kernel]} failed: {first_line(error)}")
    if not far < AS_NEAR:
        return Choice(FLASH, f"{TITLES[choice.kernel]} gave other values, {far:.1%} away")
    return choice


def distance_from_flash(kernel: Kernel, device: torch.device, heads: int, dim: int) -> float:
    """The largest relative distance of output and gradients from flash attention's, for one call in bfloat16."""
    random = torch.Generator(device).manual_seed(0)
    queries, keys = PROBED
    query, key, value, gradient = (
        torch.randn(length, heads, dim, generator=random, device=device, dtype=torch.bfloat16)
        for length in (queries, keys, keys, queries)
    )
    bounds = torch.tensor([[0, length] for length in PROBED], dtype=torch.int32, device=device)
    extent = Extent(bounds, PROBED, is_causal=False)
    results = []
    for each in (kernel, FLASH):
        output, lse = FORWARD[each](query, key, value, extent)
        results.append((output, *BACKWARD[each](gradient, query, key, value, output, lse, extent)))
    distances = [(ours.float() - its.float()).norm() / its.float().norm() for ours, its in zip(*results, strict=True)]
    return float(torch.stack(distances).max())
