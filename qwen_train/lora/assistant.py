"""The assistant LoRA, `train.assistant_lora`: a second, frozen adapter; and passes without one of the two.

A LoRA for a distilled model is trained with an assistant that undoes the distillation, and used without it. The
assistant is peft's second adapter: base + assistant + ours, each with its own product, as `predict` with both; so it
works on quantised weights, and ours is the difference that is ours alone. It is kept in the dtype of matrix products.
Refused before the model is loaded: DoRA and other types, whose update depends on the other adapter, a LoRA that does
not fit the model, and one on layers that `train.tabulated_modulation` replaces by a table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from torch import nn

from qwen_cache.errors import ConfigError, TrainError, first_line
from qwen_cache.models.encoders import from_config
from qwen_cache.models.folder import read_config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.lora.files import WeightedLora, find_assistant
from qwen_train.lora.names import DOWN, UP
from qwen_train.lora.reader import Lora, read_lora, settings_of
from qwen_train.model.modulation import EMBEDDER, OFF, columns
from qwen_train.model.stock import trained_class

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
            do=OFF,
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


def tuned_layers(transformer: Any) -> list[BaseTunerLayer]:
    """The layers that have an adapter."""
    return [layer for layer in transformer.modules() if isinstance(layer, BaseTunerLayer)]


def assistant_bytes(settings: TrainConfig, dtype: torch.dtype, modules: str = "") -> int:
    """The bytes of `train.assistant_lora` in `dtype`, by the header of its file; 0 without one.

    Of the modules with `modules` in their names.
    """
    if (source := find_assistant(settings)) is None:
        return 0
    try:
        with safe_open(source.file, framework="pt") as file:
            names = [name for name in file.keys() if modules in name]  # noqa: SIM118 (no dict)
            values = sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise TrainError(f"this is not a LoRA file: {first_line(error)}", where=source.file) from None
    return int(values * dtype.itemsize)
