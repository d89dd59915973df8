"""An adapter read from its file: one reader for `export`, `predict`, `train.lora.weights` and `train.assistant_lora`.

peft's settings are in the header of the file, or, if it has the names of peft's own files, in the adapter_config.json
beside it. Without settings, alphas among the tensors give the scale; a module without an alpha has its rank as alpha.
Refused: a file that was changed after it was written; tensors that are no floating-point numbers, are not finite, or
have rank 0; names that no adapter of a transformer has; settings that do not belong to the tensors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_cache.errors import TrainError, first_line
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remembered import check_safetensors
from qwen_cache.text import parse_json
from qwen_train.lora.files import COMFYUI_METADATA_KEY, METADATA_KEY, ORIGIN, PEFT_CONFIG_NAME, PREFIX, settings_in
from qwen_train.lora.names import DOWN, MAGNITUDE, PEFT_PREFIX, UP, peft_names
from qwen_train.lora.peft_settings import check_settings
from qwen_train.lora.tensors import alpha_of, by_module, layer_shape, lokr_scale, scaled_lokr
from qwen_train.lora.types import LOHA, LOKR, LORA, OFT, AdapterType, type_of_names

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""Some trainers write an alpha as a whole number."""
LARGEST_CONFIG = 10_000_000
"""Bytes of an adapter_config.json that are read; with an own rank for every module it has 100 kB."""


@dataclass(frozen=True)
class Lora:
    """An adapter under peft's names: `weights` without a prefix, `settings` as in peft's config, and `origin`, the
    model and cache recorded in its file (`lora/adapter.py`), empty for a file of another trainer.

    A LoKr of another trainer has no settings: its scale is in its weights."""

    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    origin: Mapping[str, Any]

    @property
    def type(self) -> AdapterType:
        return type_of_names(self.weights)

    @property
    def modules(self) -> list[str]:
        if self.type != LORA:
            return list(by_module(self.weights, self.type.title))
        return [name.removesuffix(f".{DOWN}") for name in self.weights if name.endswith(DOWN)]

    def alpha(self, module: str) -> float:
        """The module's alpha: its scale times its rank."""
        alpha = alpha_of(self.settings, module)
        if not self.settings.get("use_rslora"):
            return alpha
        return alpha * math.sqrt(len(self.weights[f"{module}.{DOWN}"]))

    def prefixed(self) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The tensors and the settings as diffusers' loaders take them; None for a LoKr without settings."""
        weights = {f"{PREFIX}.{name}": tensor for name, tensor in self.weights.items()}
        return weights, {f"{PREFIX}.{name}": value for name, value in self.settings.items()} or None


def read_lora(file: Path) -> Lora:
    """Read an adapter of this project or of another trainer; TrainError."""
    try:
        check_safetensors(file, TrainError)
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
            header = opened.metadata() or {}
        given = _settings(header, tensors, file)
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        raise TrainError(f"this is not a LoRA file: {first_line(error)}", where=file) from None
    _check_numbers(tensors, file)
    origin = given.pop(ORIGIN, {})
    origin = origin if isinstance(origin, dict) else {}
    weights, alphas = peft_names(tensors, file)
    kind = type_of_names(weights)
    if kind == LORA:
        _check_pairs(weights, file)
        return Lora(weights, check_settings(given, weights, file) or settings_of(weights, alphas), origin)
    modules = by_module(weights, file)
    for module, own in modules.items():
        layer_shape(kind, own, f"{file}: {module}")
    if given:
        return Lora(weights, check_settings(given, weights, file), origin)
    return _of_another_trainer(kind, modules, alphas, file)


def _settings(header: Mapping[str, str], names: Iterable[str], file: Path) -> dict[str, Any]:
    """peft's settings; {} for a file without them, and TrainError for peft's own file if its settings are missing."""
    if METADATA_KEY in header:
        return {name.removeprefix(f"{PREFIX}."): value for name, value in settings_in(header).items()}
    if COMFYUI_METADATA_KEY in header:
        return settings_in(header, COMFYUI_METADATA_KEY)
    if not any(name.startswith(PEFT_PREFIX) for name in names) or any(name.endswith(".alpha") for name in names):
        return {}
    config = file.parent / PEFT_CONFIG_NAME
    if not config.is_file():
        what = f"a file with peft's names has its alpha in {PEFT_CONFIG_NAME}, and there is none beside it"
        raise TrainError(what, where=file, do=f"put the {PEFT_CONFIG_NAME} that was written with it into its folder")
    try:
        settings = parse_json(read_file(config, LARGEST_CONFIG))
        return {"peft_type": LORA.peft_type, **settings}
    except (OSError, ValueError, TypeError) as error:
        raise TrainError(f"these are not peft's settings: {first_line(error)}", where=config) from None


def _check_numbers(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise TrainError for a tensor that no adapter can have, by its name."""
    for name, tensor in tensors.items():
        where = f"{file}: {name}"
        if tensor.dtype not in FLOATS and not (name.endswith(".alpha") and tensor.dtype in WHOLE):
            expected = " or ".join(_title(dtype) for dtype in FLOATS)
            what = "the tensors of a LoRA are floating-point numbers"
            raise TrainError(what, where=where, expected=expected, found=_title(tensor.dtype))
        if not tensor.numel():
            raise TrainError("a LoRA of rank 0 changes nothing", where=where, found=f"shape {tuple(tensor.shape)}")
        if count := tensor.numel() - int(tensor.isfinite().sum()):
            what, do = "this LoRA is broken", "take an earlier checkpoint of it, or another file"
            found = f"{count} of {tensor.numel()} numbers NaN or infinite"
            raise TrainError(what, where=where, expected="finite numbers", found=found, do=do)


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_pairs(weights: Mapping[str, Tensor], file: Path) -> None:
    """Raise TrainError if a module lacks one of its two matrices, or their ranks differ."""
    for module, own in by_module(weights, file).items():
        shapes = [tuple(own[name].shape) for name in (DOWN, UP) if name in own]
        if [len(shape) for shape in shapes] == [2, 2] and shapes[0][0] == shapes[1][1]:
            continue
        where = f"{file}: {module}.{next(iter(own))}"
        found = f"shapes {shapes[0]} and {shapes[1]}" if len(shapes) == 2 else "none"
        raise TrainError("a matrix has no partner of its rank", where=where, found=found)
    if not weights:
        raise TrainError("not a LoRA: it has no weights", where=file)


def _of_another_trainer(
    kind: AdapterType, modules: Mapping[str, Mapping[str, Tensor]], alphas: Mapping[str, float], file: Path
) -> Lora:
    """A LoKr or LoHa whose file has no settings of peft; a module without an alpha is not scaled."""
    if kind == OFT:
        what, do = "an OFT without peft's settings, which rotates other sides of the weights", "use it where it is from"
        raise TrainError(what, where=file, do=do)
    if kind == LOKR:
        scales = {module: lokr_scale(tensors, alphas.get(module)) for module, tensors in modules.items()}
        own = {module: scaled_lokr(tensors, scales[module]) for module, tensors in modules.items()}
        return Lora(joined(own), {}, {})
    ranks = {module: len(tensors["hada_w1_b"]) for module, tensors in modules.items()}
    return Lora(joined(modules), {"peft_type": LOHA.peft_type, **ranks_and_alphas("alpha", ranks, alphas)}, {})


def joined(modules: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{module}.{name}": tensor for module, own in modules.items() for name, tensor in own.items()}


def settings_of(weights: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, Any]:
    """peft's settings for a LoRA without them; a module without an alpha is not scaled."""
    ranks = {name.removesuffix(f".{DOWN}"): len(tensor) for name, tensor in weights.items() if name.endswith(DOWN)}
    dora = {"use_dora": True} if any(name.endswith(MAGNITUDE) for name in weights) else {}
    return {"peft_type": LORA.peft_type, **ranks_and_alphas("lora_alpha", ranks, alphas), **dora}


def ranks_and_alphas(name: str, ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, Any]:
    """The part of peft's settings that says ranks, alphas (under this `name`) and target modules."""
    alphas = {module: alphas.get(module, float(rank)) for module, rank in ranks.items()}
    rank, alpha = (Counter(values).most_common(1)[0][0] for values in (ranks.values(), alphas.values()))
    return {
        "r": rank,
        name: alpha,
        "rank_pattern": {module: value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "target_modules": sorted(ranks),
    }
