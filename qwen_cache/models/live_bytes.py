"""Memory without data: the live bytes of tensors on torch's device "meta", counted while real modules run on it.

Attention counts as a kernel that keeps no logits, which every device chooses for these sizes. What a device needs for
itself is estimated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RESERVED = 800_000_000  # CUDA context and libraries: 0.4 to 0.8 GB as published for recent GPUs
FRAGMENTATION = 0.03  # of the rest is unusable in the caching allocator; a conservative guess


def with_reserve(size: int) -> int:
    """`size` bytes with the device's own memory."""
    return RESERVED + int((1 + FRAGMENTATION) * size)


def bytes_of(module: nn.Module) -> int:
    """The bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def peak_of(run: Callable[[], object], *known: nn.Module) -> int:
    """The peak bytes that `run` allocates on "meta", without gradients, besides the weights of the modules `known`."""
    weights = [tensor for module in known for tensor in (*module.parameters(), *module.buffers())]
    with torch.inference_mode(), LiveBytes(weights) as live, FlashAttention():
        run()
    return int(live.peak)


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of tensors created on "meta" while entered, and their peak."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self.sizes:
            return
        self.sizes[storage._cdata] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata)

    def _free(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


class FlashAttention(TorchFunctionMode):
    """`flash_attention` in place of torch's function, which would choose no kernel on "meta"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = flash_attention if function is F.scaled_dot_product_attention else function
        return chosen(*args, **(kwargs or {}))


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Attention that saves queries, keys, values, the output and one number per row, like every kernel that SDPA
    chooses for these sizes; on "meta" SDPA would choose none of them."""
    mask = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, attn_mask=mask)[0]
    return output
