"""LoRAs of a pipeline: read by the stock loader, each with a weight; as adapters, or merged into the base weights.

A LoKr, LoHa or OFT, which the stock pipelines do not load, is added by peft, in float32.
Refused before anything large is loaded: a damaged LoRA, one of another base (the error names the first key that does
not fit), a matrix without its partner, a weight for an OFT, which has no scale, several types at once without merging,
and merging into quantised weights, which would round the LoRA away. Pickles are never opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qwen_cache.console import console
from qwen_cache.errors import ConfigError, TrainError, first_line
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import from_config
from qwen_cache.plain_text import plain
from qwen_cache.storage.checksums import check_safetensors
from qwen_train.lora.export import add_to_weights, attach, check_fit, check_pairs, read_lora
from qwen_train.lora.files import ORIGIN, PREFIX, WeightedLora, origin_of
from qwen_train.lora.names import only_export_reads
from qwen_train.lora.peft_settings import check_settings
from qwen_train.lora.types import LORA, OFT, AdapterType, check_base, type_of_names
from qwen_train.model.modulation import TabulatedTransformer2DModel
from qwen_train.model.stock import stock_class

CONVERT = "convert it with `qwen-train export FILE --to diffusers`"
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
    layers = {name: layer for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
    _check_types(loras, merge)
    for lora in loras:
        check_base(_type(lora.file), quantization, config, lora.file, UNPACKED)
        _check_fit(lora.file, layers)
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
                state, settings = _read(lora.file)
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


def _check_fit(file: Path, layers: dict[str, Any]) -> None:
    """Raise TrainError with the first key that fits no layer, by name or shape."""
    if _type(file) != LORA:
        shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
        check_fit(read_lora(file), shapes, f"{file}: ")
        return
    try:
        check_safetensors(file, TrainError)
        state, _ = _read(file)
    except UNREADABLE as error:
        raise TrainError(f"this is not a LoRA file: {first_line(error)}", where=file) from None
    do = CONVERT if only_export_reads(_names(file)) else None
    weights = {}
    for key, tensor in state.items():
        name = key.removeprefix(f"{PREFIX}.")
        module, _, rest = name.partition(".lora_")
        layer, where = layers.get(module), f"{file}: {key}"
        what = "the LoRA does not fit this model"
        if layer is None or name == key or not rest:
            expected = f"{PREFIX}.<linear layer>.lora_A or lora_B"
            raise TrainError(what, where=where, expected=expected, found="no such layer", do=do)
        down = rest.startswith("A.")
        if tensor.shape[-1 if down else 0] != (layer.in_features if down else layer.out_features):
            expected = f"({'r' if down else layer.out_features}, {layer.in_features if down else 'r'})"
            raise TrainError(what, where=where, expected=expected, found=tuple(tensor.shape))
        weights[name] = tensor
    check_pairs(weights, file)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """A LoRA's tensors and peft's settings, as the stock loader reads them, with the settings checked."""
    # of the mixin that the pipelines of all models share
    state, header = QwenImagePipeline.lora_state_dict(
        str(file.parent), weight_name=file.name, use_safetensors=True, return_lora_metadata=True
    )
    if not header:
        return state, None
    given = {name.removeprefix(f"{PREFIX}."): value for name, value in header.items() if name != ORIGIN}
    weights = {name.removeprefix(f"{PREFIX}."): tensor for name, tensor in state.items()}
    settings = check_settings(given, weights, file)
    return state, {f"{PREFIX}.{name}": value for name, value in settings.items()}


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="np") as opened:
        return list(opened.keys())
