"""Another processor, imitated: `pytest -p tests.other_kernels` runs the tests as on one whose kernels go by shape.

Every matrix product, convolution and attention gets an error of a few units in the last digit, which depends on the
shapes of its operands and on nothing else; in bfloat16 before the result is rounded. So equal calls give equal bits,
and the same numbers in another shape do not: what AMX, ARM or a GPU do, on a machine that has none of them. Only this
process is such a machine: tests that compare with a process of their own, bit for bit, are not for it.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import torch
from torch import Tensor

UNITS = 2.0  # of the last digit of a row's values: as far as two orders of a sum of some hundred terms are apart
UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
OPERATIONS = (
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"),
    *(f"_scaled_dot_product_flash_attention_for_cpu{backward}" for backward in ("", "_backward")),
)
LIBRARY = torch.library.Library("aten", "IMPL")


def pytest_configure() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in OPERATIONS:
            LIBRARY.impl(name, imitation(name), "CPU", with_keyset=True, allow_override=True)


def imitation(name: str) -> Any:
    """In place of the kernel of `name`: that kernel in float32 or float64, then the error, then the rounding."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in args if isinstance(each, Tensor)]
        low = any(each.dtype == torch.bfloat16 for each in tensors)
        seed = zlib.crc32(repr((name, low, [tuple(each.shape) for each in tensors])).encode())
        found = kernel.call_boxed(keyset, *map(widened, args), **{key: widened(each) for key, each in kwargs.items()})
        if not isinstance(found, tuple | list):
            return with_error(found, seed, low)
        logsumexp = 1 if name == "_scaled_dot_product_flash_attention_for_cpu" else None  # always float32
        return tuple(each if i == logsumexp else with_error(each, seed + i, low) for i, each in enumerate(found))

    return call


def widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def with_error(value: Any, seed: int, low: bool) -> Any:
    """Errors as large as the rows' values are on average; what is zero stays so, because it was a sum of zeros."""
    if not isinstance(value, Tensor) or value.dtype not in UNIT:
        return value
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)
    size = value.square().mean(-1, keepdim=True).sqrt() if value.ndim else value
    made = torch.where(value == 0, value, value + UNITS * UNIT[value.dtype] * noise * size)
    return made.bfloat16() if low else made
