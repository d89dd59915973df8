"""LoRAs of a pipeline: added by the stock loader, each with a weight; as adapters, or merged into the base weights.

A LoKr, LoHa or OFT, which the stock pipelines do not load, is added by peft, in float32.
Refused before anything large is loaded: a file that `lora/reader.py` refuses, a LoRA of another base (the error names
the first layer that does not fit), a weight for an OFT, which has no scale, several types at once without merging, and
merging into quantised weights, which would round the LoRA away. Pickles are never opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from qwen_cache.errors import ConfigError, TrainError, first_line
from qwen_cache.models.encoders import from_config
from qwen_cache.models.folder import ModelFolder
from qwen_cache.terminal import console
from qwen_cache.text import plain
from qwen_train.lora.export import add_to_weights, attach, check_fit
from qwen_train.lora.files import WeightedLora, origin_of
from qwen_train.lora.reader import read_lora
from qwen_train.lora.types import LORA, OFT, AdapterType, check_base, type_of_names
from qwen_train.model.modulation import TabulatedTransformer2DModel
from qwen_train.model.stock import stock_class

UNPACKED = "generate with the unquantised model, or with model.quantization=int8 or fp8"
UNREADABLE = (ValueError, RuntimeError, KeyError, OSError, SafetensorError)


def check_loras(
    model: ModelFolder, loras: Sequence[WeightedLora], merge: bool, quantization: str, *, tabulated: bool = False
) -> None:
    """Raise an error unless every LoRA fits this model's transformer; of the model, only config.json is read."""
    if not loras:
        if merge:
            raise ConfigError("there is nothing to merge", found="--merge", do="name a LoRA with --lora")
        return
    folder = model.component("transformer")
    kind = TabulatedTransformer2DModel if tabulated else stock_class(folder)
    config = model.transformer_config
    if merge and (quantization != "none" or "quantization_config" in config):
        do = "generate without --merge, or merge into the unquantised model: `qwen-train export --to merged`"
        raise ConfigError("a LoRA merged into quantised weights would be rounded away", found="--merge", do=do)
    with torch.device("meta"):
        transformer = from_config(kind, config)
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    _check_types(loras, merge)
    for lora in loras:
        check_base(_type(lora.file), quantization, config, lora.file, UNPACKED)
        check_fit(read_lora(lora.file), layers, f"{lora.file}: ")
        origin = origin_of(lora.file)
        if origin.get("pipeline", model.pipeline) != model.pipeline:
            base = f"{origin.get('model')} ({origin['pipeline']})"
            what = (
                f"trained on {base}, but used with {model.pipeline}: expect images that differ from those in training"
            )
            text = f"warning: {plain(lora.file)}: {plain(what)}"
            console().print(text, style="yellow", markup=False)


def load_loras(pipeline: Any, loras: Sequence[WeightedLora], merge: bool = False) -> None:
    """Load the LoRAs with the stock loader, other types by peft, and merge them if `merge`."""
    names = _adapter_names(loras)
    if any(_type(lora.file) != LORA for lora in loras):
        _load_by_peft(pipeline, dict(zip(names, loras, strict=True)), merge)
        return
    for name, lora in zip(names, loras, strict=True):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are intended
                state, settings = read_lora(lora.file).prefixed()
                pipeline.load_lora_into_transformer(
                    state, pipeline.transformer, adapter_name=name, metadata=settings, _pipeline=pipeline
                )
        except UNREADABLE as error:
            raise TrainError(f"the LoRA cannot be loaded: {first_line(error)}", where=lora.file) from None
    if loras:
        set_weights(pipeline, loras)
    if merge:
        pipeline.fuse_lora(adapter_names=names)
        pipeline.unload_lora_weights()


def set_weights(pipeline: Any, loras: Sequence[WeightedLora]) -> None:
    """Give the LoRAs that `load_loras` has loaded, and not merged, other weights; none is an OFT."""
    pipeline.set_adapters(_adapter_names(loras), [lora.weight for lora in loras])


def _adapter_names(loras: Sequence[WeightedLora]) -> list[str]:
    return [f"lora_{number}" for number in range(1, len(loras) + 1)]


def _load_by_peft(pipeline: Any, loras: dict[str, WeightedLora], merge: bool) -> None:
    """Add adapters of one type, or merge adapters of any type one after the other."""
    for name, lora in loras.items():
        try:
            if merge:
                add_to_weights(read_lora(lora.file), pipeline.transformer, lora.weight)
            else:
                attach(read_lora(lora.file), pipeline.transformer, name)
        except UNREADABLE as error:
            raise TrainError(f"the LoRA cannot be loaded: {first_line(error)}", where=lora.file) from None
    if merge:
        return
    if _type(next(iter(loras.values())).file) == OFT:
        pipeline.transformer.set_adapter(list(loras))
    else:
        set_weights(pipeline, list(loras.values()))


def _check_types(loras: Sequence[WeightedLora], merge: bool) -> None:
    """Raise ConfigError for types that cannot be combined, or that cannot be weighted."""
    kinds = {lora.file: _type(lora.file) for lora in loras}
    if len(titles := sorted({kind.title for kind in kinds.values()})) > 1 and not merge:
        do = "add --merge, which merges one after the other"
        raise ConfigError("adapters of several types need --merge", found=", ".join(titles), do=do)
    for lora in loras:
        if kinds[lora.file] == OFT and lora.weight != 1:
            raise ConfigError("an OFT has no scale", where=lora.file, expected="weight 1", found=lora.weight)


def _type(file: Path) -> AdapterType:
    """LoRA for what cannot be read, too: reading says why."""
    try:
        return type_of_names(_names(file))
    except UNREADABLE:
        return LORA


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="np") as opened:
        return list(opened.keys())
