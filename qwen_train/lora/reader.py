"""Reading a LoRA file of any tool, with its rank and alpha."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen_cache.errors import TrainError, first_line
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remembered import check_safetensors
from qwen_cache.text import parse_json
from qwen_train.lora.files import (
    COMFYUI_METADATA_KEY,
    LOHA,
    LOKR,
    LORA,
    METADATA_KEY,
    OFT,
    ORIGIN,
    PATTERNS,
    PEFT_CONFIG_NAME,
    PREFIX,
    AdapterType,
    settings_in,
    type_of,
    type_of_names,
)
from qwen_train.lora.names import (
    DOWN,
    MAGNITUDE,
    PEFT_PREFIX,
    UP,
    alpha_of,
    by_module,
    layer_shape,
    lokr_scale,
    peft_names,
    scaled_lokr,
)

# ---- peft settings ---------------------------------------------------------------------------------------------------
# peft's settings in the header of an adapter's file, checked before peft gets them: they come from other people.
#
# peft matches patterns as regular expressions, allocates what a rank says, and for some settings changes base weights.
# Refused: settings of another kind than the tensors are, values of the wrong type, patterns that could take forever to
# match, ranks that the tensors do not have, and whatever makes peft compute something else than this adapter.

MOST_MODULES, LONGEST_NAME = 5000, 200
"""Bounds of an adapter; the 20B transformer has about 850 linear layers, with names of at most 52 characters."""
MOST_EXPRESSIONS, MOST_REPETITIONS = 16, 3
"""Patterns that are more than a name, and repetitions and groups in each: a match then takes milliseconds."""
NAME = re.compile(r"\^?[\w.\\-]+\$?")
"""A pattern without repetitions, groups and sets."""
NOT_NEEDED = ("exclude_modules", "layers_to_transform", "layers_pattern", "auto_mapping", "inference_mode")
"""Settings that say in other words which modules there are, where code is, or whether it is trained."""


def _whole(least: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= least


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _probability(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _names(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(name, str) for name in value))


FITS: dict[str, Callable[[Any], bool]] = {
    "r": _whole(0),
    "oft_block_size": _whole(2),
    "decompose_factor": lambda value: _whole(-1)(value) and value != 0,
    **dict.fromkeys(("alpha", "lora_alpha"), _number),
    "eps": lambda value: _number(value) and value > 0,
    **dict.fromkeys(("lora_dropout", "rank_dropout", "module_dropout"), _probability),
    **dict.fromkeys(("use_rslora", "use_dora", "coft", "use_cayley_neumann", "decompose_both"), _boolean),
    "init_lora_weights": lambda value: value in (True, False, "gaussian"),  # others change the base weights
    "init_weights": lambda value: value in (True, False, "lycoris"),
    "target_modules": _names,
    **dict.fromkeys(("peft_type", "peft_version", "task_type", "revision", "base_model_name_or_path"), _text),
    PATTERNS[0]: lambda value: _is_pattern_of(value, _whole(1)),
    PATTERNS[1]: lambda value: _is_pattern_of(value, _number),
}
"""The values that a setting may have; every other one must have peft's default."""


def check_settings(given: Mapping[str, Any], weights: Mapping[str, Tensor], file: Path) -> dict[str, Any]:
    """The settings of an adapter with these weights under peft's names, its targets as names of modules; TrainError.

    {} for a file without settings.
    """
    if not given:
        return {}
    kind = type_of_names(weights)
    try:
        named = type_of(given)
    except ValueError as error:
        raise TrainError(str(error), where=file) from None
    if named != kind:
        raise TrainError(f"a {kind.title} with the settings of another type", where=file, found=named.peft_type)
    for name in kind.function[: 1 if kind == OFT else 2]:  # peft's default would be another adapter
        if given.get(name) is None:
            what, do = "peft's settings lack one without which the scale is unknown", "use the file that was trained"
            raise TrainError(what, where=file, expected=name, do=do)
    defaults = PeftConfig.from_peft_type(peft_type=kind.peft_type).to_dict()
    settings = {}
    for name, value in given.items():
        if value is None or name in NOT_NEEDED:
            value = defaults.get(name)
        elif not _fits(name, value, defaults):
            what = "this setting of peft is not one that can be read here"
            raise TrainError(what, where=f"{file}: {name}", found=str(value)[:LONGEST_NAME])
        if name in defaults:
            settings[name] = value
    modules = _modules(kind, weights, file)
    if isinstance(settings.get("target_modules"), str):  # a regular expression
        settings["target_modules"] = sorted(modules)
    ranks = _by_name(settings.get(PATTERNS[0]) or {}, modules)
    if kind == LORA and settings.get("use_dora", False) != any(MAGNITUDE in name for name in weights):
        what = "peft's setting use_dora does not belong to the tensors of this LoRA"
        raise TrainError(what, where=file, found=f"use_dora={settings.get('use_dora', False)}")
    for module, rank in modules.items():
        key = "oft_block_size" if kind == OFT else "r"
        expected = ranks.get(module, settings.get(key))
        if kind in (LORA, LOHA, OFT) and rank != expected:
            raise TrainError(
                f"the tensors of this {kind.title} do not belong to its settings",
                where=f"{file}: {module}",
                expected=f"{key} {expected}",
                found=rank,
            )
    return settings


def _fits(name: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    if name in FITS:
        return FITS[name](value)
    return value is False or value in ([], {}) or (name in defaults and value == defaults[name])


def _modules(kind: AdapterType, weights: Mapping[str, Tensor], file: Path) -> dict[str, int | None]:
    """The modules with their ranks, or OFT's block sizes; None where it does not follow from a tensor."""
    ranks: dict[str, int | None] = {}
    for name, tensor in weights.items():
        module, _, rest = name.partition(f".{kind.prefix}")
        ranks.setdefault(module, None)
        if rest in ("A.weight", "w1_b") and kind in (LORA, LOHA):
            ranks[module] = len(tensor)
        elif kind == OFT and tensor.ndim == 2:
            ranks[module] = (1 + math.isqrt(1 + 8 * tensor.shape[1])) // 2
    if len(ranks) > MOST_MODULES or max(map(len, ranks), default=0) > LONGEST_NAME:
        what = (
            f"an adapter of a transformer has at most {MOST_MODULES} modules, with names of {LONGEST_NAME} characters"
        )
        raise TrainError(what, where=file)
    return ranks


def _is_pattern_of(value: Any, fits: Callable[[Any], bool]) -> bool:
    """True if it is a dictionary of these values, by patterns that are matched in bounded time."""
    if not isinstance(value, dict) or len(value) > MOST_MODULES or not all(map(fits, value.values())):
        return False
    expressions = [pattern for pattern in value if not NAME.fullmatch(pattern)]
    return len(expressions) <= MOST_EXPRESSIONS and all(map(_is_bounded, value))


def _is_bounded(pattern: str) -> bool:
    """True if it is a regular expression, without a repeated group and with few repetitions and groups."""
    few = sum(map(pattern.count, "*+?{(")) <= MOST_REPETITIONS and not re.search(r"\)\s*[*+?{]", pattern)
    try:
        return len(pattern) <= LONGEST_NAME and few and bool(re.compile(_whole_name(pattern)))
    except (re.error, OverflowError, RecursionError):
        return False


def _whole_name(pattern: str) -> str:
    """The expression by which peft matches a module's name (peft/utils/other.py, get_pattern_key)."""
    return rf"(.*\.)?({pattern})$"


def _by_name(patterns: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """The value of each module that a pattern matches, by its name; the first pattern counts."""
    compiled = [(re.compile(_whole_name(pattern)), value) for pattern, value in patterns.items()]
    found = {}
    for module in modules:
        own = (value for it, value in compiled if it.match(module))
        if (value := next(iter(own), None)) is not None:
            found[module] = value
    return found


# ---- reader ----------------------------------------------------------------------------------------------------------
# An adapter read from its file: one reader for `export`, `predict`, `train.lora.weights` and `train.assistant_lora`.
#
# peft's settings are in the header of the file, or, if it has the names of peft's own files, in the adapter_config.json
# beside it. Without settings, alphas among the tensors give the scale; a module without an alpha has its rank as alpha.
# Refused: a file that was changed after it was written; tensors that are no floating-point numbers, are not finite, or
# have rank 0; names that no adapter of a transformer has; settings that do not belong to the tensors.

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
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
    for name, tensor in tensors.items():
        where = f"{file}: {name}"
        if tensor.dtype not in FLOATS and not (name.endswith(".alpha") and tensor.dtype in INTEGERS):
            expected = " or ".join(_title(dtype) for dtype in FLOATS)
            what = "the tensors of a LoRA are floating-point numbers"
            raise TrainError(what, where=where, expected=expected, found=_title(tensor.dtype))
        if not tensor.numel():
            raise TrainError("a LoRA of rank 0 changes nothing", where=where, found=f"shape {tuple(tensor.shape)}")
        if count := tensor.numel() - int(tensor.isfinite().sum()):
            what, do = "this LoRA is broken", "take an earlier checkpoint of it, or another file"
            found = f"{count} of {tensor.numel()} numbers NaN or infinite"
            raise TrainError(what, where=where, expected="finite numbers", found=found, do=do)
    origin = given.pop(ORIGIN, {})
    origin = origin if isinstance(origin, dict) else {}
    weights, alphas = peft_names(tensors, file)
    kind, modules = type_of_names(weights), by_module(weights, file)
    if kind == LORA:
        for module, own in modules.items():
            shapes = [tuple(own[name].shape) for name in (DOWN, UP) if name in own]
            if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
                where = f"{file}: {module}.{next(iter(own))}"
                found = f"shapes {shapes[0]} and {shapes[1]}" if len(shapes) == 2 else "none"
                raise TrainError("a matrix has no partner of its rank", where=where, found=found)
        if not weights:
            raise TrainError("not a LoRA: it has no weights", where=file)
        return Lora(weights, check_settings(given, weights, file) or settings_of(weights, alphas), origin)
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


def _title(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
