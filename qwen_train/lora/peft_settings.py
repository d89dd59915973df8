"""peft's settings in the header of an adapter's file, checked before peft gets them: they come from other people.

peft matches patterns as regular expressions, allocates what a rank says, and for some settings changes base weights.
Refused: settings of another kind than the tensors are, values of the wrong type, patterns that could take forever to
match, ranks that the tensors do not have, and whatever makes peft compute something else than this adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from peft import PeftConfig
from torch import Tensor

from qwen_cache.errors import TrainError
from qwen_train.lora.names import MAGNITUDE
from qwen_train.lora.types import LOHA, LORA, OFT, PATTERNS, AdapterType, type_of, type_of_names

MOST_MODULES, LONGEST_NAME = 5000, 200
"""Of an adapter; the 20B transformer has about 850 linear layers, with names of at most 52 characters."""
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
"""What a setting may be; every other one must have peft's default."""


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
    """Whether it is a dictionary of these values, by patterns that are matched in bounded time."""
    if not isinstance(value, dict) or len(value) > MOST_MODULES or not all(map(fits, value.values())):
        return False
    expressions = [pattern for pattern in value if not NAME.fullmatch(pattern)]
    return len(expressions) <= MOST_EXPRESSIONS and all(map(_is_bounded, value))


def _is_bounded(pattern: str) -> bool:
    """Whether it is a regular expression, without a repeated group and with few repetitions and groups."""
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
