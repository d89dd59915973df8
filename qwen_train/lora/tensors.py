"""The tensors of an adapter by module: whether they are complete, the layer they fit, and their scale.

    LoRA   lora_A.weight [r, in], lora_B.weight [out, r]
    LoKr   lokr_w1 [a, c] or lokr_w1_a [a, r] and lokr_w1_b [r, c]; lokr_w2 [b, d] likewise: a layer [ab, cd]
    LoHa   hada_w1_a [out, r], hada_w1_b [r, in]; hada_w2_a and hada_w2_b likewise
    OFT    oft_R.weight [in / n, n (n - 1) / 2], the upper triangle of each block of n inputs

Refused: a module that lacks a tensor, and tensors of another rank or of several types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key
from torch import Tensor

from qwen_cache.errors import TrainError
from qwen_train.lora.types import LOHA, OFT, PATTERNS, AdapterType, type_of_names

W1, W2 = ("lokr_w1", "lokr_w1_a", "lokr_w1_b"), ("lokr_w2", "lokr_w2_a", "lokr_w2_b")
HADAMARD, ROTATION = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), "oft_R.weight"
Tensors = Mapping[str, Tensor]
"""Of one module, without its name."""


def by_module(weights: Mapping[str, Tensor], file: Path | str) -> dict[str, dict[str, Tensor]]:
    """The tensors under peft's names by module; TrainError if they belong to several types."""
    kind, modules = type_of_names(weights), dict[str, dict[str, Tensor]]()
    for name, tensor in weights.items():
        module, marker, rest = name.partition(f".{kind.prefix}")
        if not marker:
            what = f"a {kind.title} has only tensors named {kind.prefix}…"
            raise TrainError(what, where=file, found=name)
        modules.setdefault(module, {})[f"{kind.prefix}{rest}"] = tensor
    return modules


def layer_shape(kind: AdapterType, tensors: Tensors, where: str) -> tuple[int | None, int]:
    """Outputs and inputs of the layer that a module of LoKr, LoHa or OFT fits; None: any number of outputs."""
    if kind == OFT:
        rows, elements = _weight(tensors, ROTATION, where).shape
        block = (1 + math.isqrt(1 + 8 * elements)) // 2
        if block * (block - 1) // 2 != elements:
            raise TrainError("not the triangle of a block", where=where, found=f"{elements} elements in a row")
        return None, rows * block
    if kind == LOHA:
        one = _product(tensors, *HADAMARD[:2], where)
        two = _product(tensors, *HADAMARD[2:], where)
        if one != two:
            raise TrainError("both products of a LoHa have the shape of the layer", where=where, found=f"{one}, {two}")
        return one
    (a, c), (b, d) = (_factor(tensors, names, where) for names in (W1, W2))
    return a * b, c * d


def _factor(tensors: Tensors, names: tuple[str, str, str], where: str) -> tuple[int, int]:
    """The shape of a factor of the Kronecker product."""
    whole, left, right = names
    if whole not in tensors:
        return _product(tensors, left, right, where)
    rows, columns = _weight(tensors, whole, where).shape
    return rows, columns


def _product(tensors: Tensors, left: str, right: str, where: str) -> tuple[int, int]:
    one, two = _weight(tensors, left, where), _weight(tensors, right, where)
    if one.shape[1] != len(two):
        found = f"{left} {tuple(one.shape)} and {right} {tuple(two.shape)}"
        raise TrainError("a matrix has no partner of its rank", where=where, found=found)
    return len(one), two.shape[1]


def _weight(tensors: Tensors, name: str, where: str) -> Tensor:
    if name not in tensors or tensors[name].ndim != 2:
        found = f"shape {tuple(tensors[name].shape)}" if name in tensors else "none"
        raise TrainError("a module lacks a matrix", where=where, expected=name, found=found)
    return tensors[name]


def rank_of(settings: Mapping[str, Any], module: str) -> int:
    """The module's rank by peft's settings."""
    return int(_of_module(settings, PATTERNS[0], "r", module))


def alpha_of(settings: Mapping[str, Any], module: str) -> float:
    """The module's alpha by peft's settings."""
    return float(_of_module(settings, PATTERNS[1], "lora_alpha" if "lora_alpha" in settings else "alpha", module))


def _of_module(settings: Mapping[str, Any], pattern: str, default: str, module: str) -> Any:
    patterns = settings.get(pattern) or {}
    return patterns.get(get_pattern_key(patterns, module), settings[default])


def lokr_scale(tensors: Tensors, alpha: float | None) -> float:
    """The scale of another trainer's LoKr: alpha / rank, as LyCORIS has it, or 1 if neither factor is a product."""
    products = [tensors[name] for name in (W2[2], W1[2]) if name in tensors]
    return alpha / len(products[0]) if products and alpha is not None else 1.0


def scaled_lokr(tensors: Tensors, scale: float) -> dict[str, Tensor]:
    """A LoKr's tensors with the scale in its first factor."""
    first = W1[0] if W1[0] in tensors else W1[1]
    return {**tensors, first: tensors[first] * scale} if scale != 1 else dict(tensors)
