"""LoRA in a transformer: adding, loading, and the assistant LoRA."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor, nn

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.models.folder import read_config
from qwen_cache.models.loading import from_config
from qwen_cache.models.quantization import is_quantized
from qwen_cache.settings.sections import TAKES, LoraConfig, TrainConfig
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remembered import sealed
from qwen_train.lora.files import (
    METADATA_KEY,
    ORIGIN,
    PATTERNS,
    PREFIX,
    WeightedLora,
    find_start,
    type_of,
)
from qwen_train.lora.names import DOWN, UP, alpha_of, by_module, rank_of
from qwen_train.lora.reader import Lora, ranks_and_alphas, read_lora, settings_of
from qwen_train.model.combinations import EMBEDDER, NO_TABLE, columns
from qwen_train.model.loading import trained_class
from qwen_train.model.placement import assign

# ---- adapter ---------------------------------------------------------------------------------------------------------
# An adapter by peft on the transformer, and its file: `pytorch_lora_weights.safetensors`, with peft's names.
#
# diffusers' pipelines load a LoRA, and its transformers a LoKr; `files.py` lists the types, and
# docs/howto/generate-and-publish.md who loads which: in diffusers 0.42.1 `QwenImageLoraLoaderMixin.load_lora_weights`
# refuses names without `lora`, and `load_lora_adapter` knows `.lokr_` and nothing else beside LoRA. The metadata holds
# peft's settings, such as type, rank and alpha, which a loader would otherwise have to guess, and a checksum. Refused:
# a file that was changed after it was written, an adapter whose type, shape or scale differs from the settings, and a
# pattern that matches no module, which peft would ignore. Initialisations that change the base weights (PiSSA, OLoRA)
# are not offered: the file would fit no published base.


def add_lora(transformer: Any, config: LoraConfig) -> None:
    """Freeze the transformer and add the adapter, in float32; ConfigError for settings that do not fit."""
    if config.use_dora and is_quantized(transformer):
        raise ConfigError("train.lora.use_dora is for unquantised weights", do="set train.lora.use_dora=false")
    transformer.requires_grad_(False)
    check_targets(transformer, config.target_modules)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Invalid `oft_block_size`")  # peft would train another size
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # refused below
            transformer.add_adapter(peft_config(config))
    except UserWarning:
        raise ConfigError(
            "train.lora.oft_block_size must divide the inputs of every target module",
            found=config.oft_block_size,
            do="set a divisor, such as 32 or 64, or other train.lora.target_modules",
        ) from None
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"train.lora.target_modules: {error}",
            do="name linear layers of the transformer, such as to_q",
        ) from None
    modules = [name for name, layer in transformer.named_modules() if isinstance(layer, BaseTunerLayer)]
    check_patterns(modules, config)
    name_modules(transformer.peft_config["default"], modules)
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


CONFIGS: dict[str, type[peft.PeftConfig]] = {
    "lora": peft.LoraConfig,
    "lokr": peft.LoKrConfig,
    "loha": peft.LoHaConfig,
    "oft": peft.OFTConfig,
}


def peft_config(config: LoraConfig) -> peft.PeftConfig:
    """The settings that this type takes as peft's, by the same names; only rank is `r`, and LoRA alone has
    `lora_alpha`, the others `alpha`."""
    taken = {name: getattr(config, name) for name in TAKES[config.type]}
    if "rank" in taken:
        rank, alpha = taken.pop("rank"), taken.pop("lora_alpha")
        taken |= {"r": rank, "lora_alpha" if config.type == "lora" else "alpha": rank if alpha is None else alpha}
        taken |= {name: dict(taken[name]) for name in ("rank_pattern", "alpha_pattern")}  # peft changes its own
    return CONFIGS[config.type](target_modules=config.target_modules, **taken)


def name_modules(settings: Any, modules: Sequence[str]) -> None:
    """Replace peft's patterns by the modules that they match: of several the first counts, and a file sorts them."""
    if not getattr(settings, "rank_pattern", None) and not getattr(settings, "alpha_pattern", None):
        return
    given = settings.to_dict()
    rank, alpha = given["r"], given.get("lora_alpha", given.get("alpha"))
    ranks, alphas = ({module: of(given, module) for module in modules} for of in (rank_of, alpha_of))
    settings.rank_pattern = {module: value for module, value in ranks.items() if value != rank}
    settings.alpha_pattern = {module: value for module, value in alphas.items() if value != alpha}


def check_patterns(modules: Sequence[str], config: LoraConfig) -> None:
    """Raise ConfigError unless every pattern matches one of the modules that have the adapter."""
    for setting, patterns in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for pattern in patterns:
            if not any(re.match(rf"(.*\.)?({pattern})$", name) for name in modules):  # as peft's get_pattern_key
                raise ConfigError(
                    f"train.lora.{setting} matches no module that has the adapter",
                    found=pattern,
                    do="name modules by the end of their name, such as to_q, or by a regular expression",
                )


def check_targets(transformer: Any, targets: list[str] | str) -> None:
    """Raise ConfigError unless every listed name is a module; peft accepts a list if one of them is."""
    names = [name for name, _ in transformer.named_modules()]
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                "train.lora.target_modules: no such module",
                found=target,
                do="name linear layers of the transformer, such as to_q",
            )


def has_lora(transformer: Any) -> bool:
    return bool(getattr(transformer, "peft_config", None))


def lora_weights(transformer: Any) -> dict[str, Tensor]:
    """The adapter's weights by name; not copies."""
    weights: dict[str, Tensor] = get_peft_model_state_dict(transformer)
    return {name.replace(".base_layer.", "."): weight for name, weight in weights.items()}  # inside of another type's


def write_lora(transformer: Any, weights: Mapping[str, Tensor], path: Path, origin: Mapping[str, Any]) -> None:
    """Write the adapter with these weights, atomically; `origin` names the model and cache it was trained on."""
    settings = transformer.peft_config["default"].to_dict()
    metadata = {f"{PREFIX}.{name}": sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
    text = json.dumps(metadata | ({ORIGIN: dict(origin)} if origin else {}), indent=2, sort_keys=True)
    prefixed = {f"{PREFIX}.{name}": tensor for name, tensor in weights.items()}
    write_durably(path, *sealed(save(prefixed, {METADATA_KEY: text})))


def start_from(transformer: Any, path: Path) -> None:
    """Start from an existing LoRA, a file or its folder; ConfigError or TrainError if it cannot be read."""
    load_lora(transformer, find_start(path))


def load_lora(transformer: Any, path: Path) -> None:
    """Load an adapter into the one added by `add_lora`; TrainError unless modules, shapes and scales are equal."""
    lora = read_lora(path)
    expected, weights = lora_weights(transformer), lora.weights
    trained = by_module(expected, lora.type.title)
    _check_function(lora, transformer.peft_config["default"].to_dict(), trained, path)
    wrong = sorted(
        name
        for name in expected.keys() | weights.keys()
        if name not in expected or name not in weights or expected[name].shape != weights[name].shape
    )
    if wrong:
        raise TrainError(
            f"the {lora.type.title} has other target modules or another rank",
            where=path,
            found=wrong[0],
            do="use the train.lora that it was trained with",
        )
    for name, target in expected.items():
        assign(target, weights[name])


OF_MODULE = {"r": rank_of, "lora_alpha": alpha_of, "alpha": alpha_of}
"""Settings that patterns may change for a module."""


def _check_function(lora: Lora, settings: Mapping[str, Any], trained: Collection[str], path: Path) -> None:
    """Raise TrainError for another type or scale than that of the `trained` modules: unlike wrong shapes, it would
    silently train another function."""
    kind, modules = type_of(settings), [module for module in lora.modules if module in trained]
    if lora.type != kind:
        do = f"set train.lora.type={lora.type.name}"
        raise TrainError(f"not a {kind.title}", where=path, found=f"a {lora.type.title}", do=do)
    # of a LoKr without settings the scale is in its weights
    own = lora.settings or ranks_and_alphas("alpha", {module: rank_of(settings, module) for module in modules}, {})
    own = {**CONFIGS[kind.name]().to_dict(), **own}
    for name in (each for each in kind.function if each not in PATTERNS):
        for module in modules:
            value_of = OF_MODULE.get(name, lambda values, _, name=name: values[name])
            expected, found = value_of(settings, module), value_of(own, module)
            if found != expected:
                alpha = "; a file without an alpha has its rank as alpha" if "alpha" in name else ""
                do = f"use the train.lora that it was trained with{alpha}"
                what, where = f"the {kind.title} has another {name}", f"{path}: {module}"
                raise TrainError(what, where=where, expected=expected, found=found, do=do)


# ---- assistant -------------------------------------------------------------------------------------------------------
# The assistant LoRA, `train.assistant_lora`: a second, frozen adapter; and passes without one of the two.
#
# A LoRA for a distilled model is trained with an assistant that undoes the distillation, and used without it. The
# assistant is peft's second adapter: base + assistant + ours, each with its own product, as `predict` with both; so it
# works on quantised weights, and ours is the difference that is ours alone. It is kept in the dtype of matrix products.
# Refused before the model is loaded: DoRA and other types, whose update depends on the other adapter, a LoRA that does
# not fit the model, and one on layers that `train.tabulated_modulation` replaces by a table.

TRAINED, ASSISTANT = "default", "assistant"
"""peft's names of the two adapters."""


def read_assistant(source: WeightedLora, settings: TrainConfig, folder: Path) -> Lora:
    """The LoRA with its weight in its alphas; TrainError or ConfigError if the transformer in `folder` cannot take it.

    Of the transformer, only config.json is read.
    """
    lora = read_lora(source.file)
    if other := [name for name in lora.weights if not name.endswith((DOWN, UP))]:
        raise TrainError(
            "train.assistant_lora takes a plain LoRA, whose update does not depend on the other adapter",
            where=f"{source.file}: {other[0]}",
            expected=f"{DOWN} and {UP} alone",
        )
    config = read_config(folder / "config.json")
    tabulated = {*columns(config), *EMBEDDER} if settings.tabulated_modulation else set()
    if inside := sorted(tabulated & set(lora.modules)):
        raise ConfigError(
            "train.tabulated_modulation has a table of the base alone, and train.assistant_lora changes it",
            where=source.file,
            found=inside[0],
            do=NO_TABLE,
        )
    _check_fit(lora, config, source.file)
    return Lora(
        lora.weights,
        settings_of(lora.weights, {module: source.weight * lora.alpha(module) for module in lora.modules}),
        lora.origin,
    )


def _check_fit(lora: Lora, config: Mapping[str, Any], file: Path) -> None:
    """Raise TrainError unless every module is a linear layer of a transformer with this config.json, of this shape."""
    with torch.device("meta"):
        transformer = from_config(trained_class(config), config)
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    for module in lora.modules:
        layer, inputs = layers.get(module), lora.weights[f"{module}.{DOWN}"].shape[1]
        outputs = len(lora.weights[f"{module}.{UP}"])
        if layer is None or (layer.in_features, layer.out_features) != (inputs, outputs):
            raise TrainError(
                "train.assistant_lora does not fit this model",
                where=f"{file}: {module}",
                expected=f"a layer of {inputs} inputs and {outputs} outputs",
                found=f"{layer.in_features} inputs and {layer.out_features} outputs" if layer else "no such layer",
            )


def add_assistant(transformer: Any, assistant: Lora, dtype: torch.dtype) -> None:
    """Add the frozen adapter, in `dtype`, to a transformer that has the trained one."""
    trained = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    settings = {name: value for name, value in assistant.settings.items() if name != "peft_type"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second one is intended
        transformer.add_adapter(peft.LoraConfig(**settings), adapter_name=ASSISTANT)
    set_peft_model_state_dict(transformer, dict(assistant.weights), adapter_name=ASSISTANT)
    for name, parameter in transformer.named_parameters():
        if f".{ASSISTANT}." in name:
            parameter.data = parameter.data.to(dtype)
    transformer.requires_grad_(False)  # peft has frozen the first adapter, and not the second
    for parameter in trained:
        parameter.requires_grad_(True)
    for layer in tuned_layers(transformer):
        layer._active_adapter = [TRAINED, ASSISTANT]  # ours first: DoRA scales what was added before it


@contextmanager
def without(transformer: Any, adapter: str) -> Iterator[None]:
    """Leave an adapter out of all passes while entered; nothing happens if there is none of that name.

    Which adapters are active is all that changes. peft's own `set_adapter` and `disable_adapters` would also change
    which parameters are trained.
    """
    layers = tuned_layers(transformer)
    active = [layer.active_adapter for layer in layers]
    for layer in layers:
        layer._active_adapter = [name for name in layer.active_adapters if name != adapter]
    try:
        yield
    finally:
        for layer, names in zip(layers, active, strict=True):
            layer._active_adapter = names


@contextmanager
def at_strength(transformer: Any, adapter: str, strength: float) -> Iterator[None]:
    """Multiply an adapter by `strength` while entered: in all passes, also in those that recompute for a backward."""
    layers = [layer for layer in tuned_layers(transformer) if adapter in layer.scaling] if strength != 1 else []
    usual = [layer.scaling[adapter] for layer in layers]
    for layer, scaling in zip(layers, usual, strict=True):
        layer.scaling[adapter] = strength * scaling
    try:
        yield
    finally:
        for layer, scaling in zip(layers, usual, strict=True):
            layer.scaling[adapter] = scaling


def tuned_layers(transformer: Any) -> list[BaseTunerLayer]:
    """The layers that have an adapter."""
    return [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]
