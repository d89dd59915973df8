"""The tensors of an adapter, and their names in files of diffusers, ComfyUI and other trainers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key
from torch import Tensor

from qwen_cache.errors import TrainError
from qwen_train.lora.files import LOHA, OFT, PATTERNS, PREFIX, TYPES, AdapterType, type_of_names

# ---- tensors ---------------------------------------------------------------------------------------------------------
# The tensors of an adapter by module: whether they are complete, the layer they fit, and their scale.
#
#     LoRA   lora_A.weight [r, in], lora_B.weight [out, r]
#     LoKr   lokr_w1 [a, c] or lokr_w1_a [a, r] and lokr_w1_b [r, c]; lokr_w2 [b, d] likewise: a layer [ab, cd]
#     LoHa   hada_w1_a [out, r], hada_w1_b [r, in]; hada_w2_a and hada_w2_b likewise
#     OFT    oft_R.weight [in / n, n (n - 1) / 2], the upper triangle of each block of n inputs
#
# Refused: a module that lacks a tensor, and tensors of another rank or of several types.

W1, W2 = ("lokr_w1", "lokr_w1_a", "lokr_w1_b"), ("lokr_w2", "lokr_w2_a", "lokr_w2_b")
HADAMARD, ROTATION = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), "oft_R.weight"
Tensors = Mapping[str, Tensor]
"""The tensors of one module, without its name."""


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


# ---- names -----------------------------------------------------------------------------------------------------------
# The names that a LoRA's tensors have in files. In memory they are peft's, with the modules of diffusers.
#
#     diffusers   transformer.<module>.lora_A.weight, .lora_B.weight
#     ComfyUI     diffusion_model.<module>.lora_down.weight, .lora_up.weight, .alpha
#     musubi      lora_unet_<module, with _ for .>.lora_down.weight, .lora_up.weight, .alpha
#     peft        base_model.model.<module>.lora_A.weight, .lora_B.weight
#
# A LoKr and a LoHa have the names of LyCORIS after the module in all of them, which are peft's: lokr_w1, hada_w1_a and
# so on. SimpleTuner writes `lycoris_` and the module with _ for a dot. DiffSynth-Studio keeps peft's
# name of the adapter: `lora_A.default.weight`.
#
# ComfyUI's modules are diffusers', except in Qwen-Image-2.1: there it keeps `img_mlp.gate_layer` and `img_mlp.proj` as
# one layer, `img_mlp.gate_up`, the rows of the gate first. It finds the halves under names without a prefix or with
# `transformer.`, but not with `diffusion_model.`, so a LoRA that has such a half is written without a prefix. That is
# exact at its own rank, and diffusers' loader takes it, too. ai-toolkit and diffusion-pipe train the fused layer; it is
# read as its two halves, which is exact, since both have its `lora_A`.
#
# Read in sources, not run in ComfyUI: Comfy-Org/ComfyUI 17358c8f (comfy/lora.py, `model_lora_keys_unet`), 08f68f09
# (comfy/ldm/qwen_image21/model.py) and 6f98b150 (comfy/weight_adapter/lora.py); ostris/ai-toolkit 07abdbed
# (…/qwen_image_2/qwen_image_2.py); tdrussell/diffusion-pipe 334106c2 (models/qwen_image21.py); kohya-ss/musubi-tuner
# 960b2011 (networks/lora_qwen_image_21.py). ComfyUI's commit a125cd8 (2025-10) has no Qwen-Image-2.1.
#
# Of a LoKr with two whole factors ComfyUI at 179c2d35 ignores alpha, and at 839df9f2 divides it by a quotient of their
# heights (comfy/weight_adapter/lokr.py), so an export has the scale in W1 and no alpha. Its OFT (oft.py at 3684cff3;
# loha.py was read at 17adbb5c), like LyCORIS' Diag-OFT (f49d30d6), rotates the outputs of a layer, and peft's its
# inputs: neither can express the other. musubi-tuner's networks/lokr.py at 2a1eac8b divides the alpha of such a LoKr by
# the larger side of W2; under its names it is refused.

COMFYUI_PREFIX = "diffusion_model"
MUSUBI_PREFIX = "lora_unet_"
UNDERSCORED_PREFIXES = (MUSUBI_PREFIX, "lycoris_")
PEFT_PREFIX = "base_model.model."
TEXT_ENCODERS = ("lora_te", "text_encoder", "text_model", "lycoris_te")
"""The beginnings of the names of a text encoder's tensors, in the files of several trainers."""
DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
COMFYUI_NAMES = {"lora_down.weight": DOWN, "lora_up.weight": UP, DOWN: DOWN, UP: UP}
FUSED = {".img_mlp.gate_up": (".img_mlp.gate_layer", ".img_mlp.proj")}
"""ComfyUI's fused layers of Qwen-Image-2.1: diffusers' layers, in the order of their rows."""
HALVES = tuple(half for halves in FUSED.values() for half in halves)
UNDERSCORED = (
    *("to_q", "to_k", "to_v", "to_out", "to_add_out", "add_q_proj", "add_k_proj", "add_v_proj"),
    *("img_mlp", "txt_mlp", "img_mod", "txt_mod", "gate_layer", "gate_up", "transformer_blocks"),
    *("img_in", "txt_in", "in_layer", "out_layer", "norm_out", "proj_out"),
    *("time_text_embed", "timestep_embedder", "linear_1", "linear_2"),
)
"""The parts of module names that have an underscore of their own, in both models."""
WHOLE = "lokr_w2"
"""The second factor of a LoKr as one matrix."""
KINDS = frozenset((DOWN, UP, MAGNITUDE, *W1, *W2, *HADAMARD, ROTATION))
"""The tensors of a module, of all types."""
MARKER = re.compile("|".join(rf"\.(?={each.prefix})" for each in TYPES.values()))
"""The dot between a module and a tensor of its adapter."""
PART = re.compile("|".join(sorted(UNDERSCORED, key=len, reverse=True)) + r"|[^_]+")


def comfyui_prefix(modules: Iterable[str]) -> str:
    """The prefix of the modules of a LoRA in ComfyUI's form; see above."""
    return "" if any(module.endswith(HALVES) for module in modules) else f"{COMFYUI_PREFIX}."


def peft_names(tensors: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights under peft's names, and each module's alpha if the file has one; TrainError for other names."""
    weights, alphas = dict[str, Tensor](), dict[str, float]()
    for name, tensor in tensors.items():
        if name.startswith(TEXT_ENCODERS):
            raise TrainError(
                "this LoRA is of the text encoder, too, which stays as it is here",
                where=file,
                found=name,
                do="use it with the program that it is from, or remove the text encoder's tensors, which changes what "
                "it does",
            )
        bare = dotted(name.removeprefix(PEFT_PREFIX).removeprefix(f"{PREFIX}.").removeprefix(f"{COMFYUI_PREFIX}."))
        module, *rest = MARKER.split(bare, maxsplit=1)
        kind = rest[0].replace(".default", "") if rest else ""
        kind = COMFYUI_NAMES.get(kind, kind)
        if bare.endswith(".alpha") and tensor.numel() == 1:
            alphas |= dict.fromkeys(halves(bare.removesuffix(".alpha")), float(tensor))
            continue
        if kind not in KINDS:
            raise TrainError(
                "not a LoRA of a Qwen-Image transformer",
                where=file,
                expected=f"{PREFIX}.… or {COMFYUI_PREFIX}.… with lora_A and lora_B, lora_down and lora_up, lokr_… or "
                "hada_…",
                found=name,
            )
        if kind == WHOLE and name.startswith(MUSUBI_PREFIX):
            raise TrainError(
                "a LoKr of whole factors, of which trainers with these names differ in the scale",
                where=file,
                found=name,
                do="merge it with the program that it was trained with",
            )
        for half, part in split(module, kind, tensor, file).items():
            if f"{half}.{kind}" in weights:
                raise TrainError("two tensors of the file have the same place", where=file, found=name)
            weights[f"{half}.{kind}"] = part
    return weights, alphas


def dotted(name: str) -> str:
    """A name of musubi-tuner or SimpleTuner with the dots of its module; other names as they are."""
    for prefix in UNDERSCORED_PREFIXES:
        if name.startswith(prefix):
            module, dot, rest = name.removeprefix(prefix).partition(".")
            return ".".join(PART.findall(module)) + dot + rest
    return name


def halves(module: str) -> tuple[str, ...]:
    """diffusers' layers of a fused layer, in the order of its rows; any other module is its own."""
    for fused, parts in FUSED.items():
        if module.endswith(fused):
            return tuple(module.removesuffix(fused) + part for part in parts)
    return (module,)


def split(module: str, kind: str, tensor: Tensor, file: Path) -> dict[str, Tensor]:
    """A tensor by module: `lora_A` of a fused layer belongs to each half, its other tensors are cut by rows."""
    layers = halves(module)
    if len(layers) == 1:
        return {module: tensor}
    if not kind.startswith("lora_"):
        what = f"a layer that {len(layers)} of diffusers' layers share: only a LoRA can be split"
        raise TrainError(what, where=f"{file}: {module}.{kind}")
    if kind == DOWN:
        return {layer: tensor.clone() for layer in layers}  # safetensors stores no memory twice
    if len(tensor) % len(layers):
        raise TrainError(
            f"a fused layer has {len(layers)} halves of equal height",
            where=f"{file}: {module}.{kind}",
            found=f"{len(tensor)} rows",
        )
    return {layer: part.clone() for layer, part in zip(layers, tensor.chunk(len(layers)), strict=True)}
