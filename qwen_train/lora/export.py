"""`qwen-train export`: convert a trained adapter for other programs.

    diffusers   <name>.safetensors: peft's names, rank and alpha in its header
    comfyui     <name>.safetensors: ComfyUI's names, rank and alpha in its tensors (`names.py` says which)
    peft        a folder: adapter_model.safetensors and adapter_config.json, for peft.PeftModel.from_pretrained
    merged      a folder: the base model's transformer with the adapter merged into its weights, for from_pretrained

A LoRA can be converted from either file to the other without any loss; `merged` needs as much memory as the model once.
`reader.py` says which files are read.
Refused: layers that no published transformer has, a form that its program does not load (DoRA and OFT for ComfyUI, LoHa
and OFT for diffusers), and merging into quantised weights, which would round the adapter away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save
from torch import nn

from qwen_cache.errors import ConfigError, ModelError, TrainError, first_line
from qwen_cache.models.folder import ModelFolder, check_component, open_model
from qwen_cache.models.loading import explained
from qwen_cache.models.recorded import with_recorded_model
from qwen_cache.models.single_file import QUANTISED
from qwen_cache.models.stored import DTYPES
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ModelConfig
from qwen_cache.storage.files import make_folder, whole_folder, write_durably
from qwen_cache.storage.remembered import sealed, write_checksums
from qwen_train.lora.files import (
    COMFYUI_METADATA_KEY,
    LOHA,
    LORA,
    METADATA_KEY,
    OFT,
    ORIGIN,
    PEFT_CONFIG_NAME,
    PEFT_WEIGHTS_NAME,
    PREFIX,
    check_export,
    find_lora,
)
from qwen_train.lora.names import (
    COMFYUI_NAMES,
    DOWN,
    PEFT_PREFIX,
    UP,
    by_module,
    comfyui_prefix,
    layer_shape,
    rank_of,
    scaled_lokr,
)
from qwen_train.lora.reader import Lora, joined, ranks_and_alphas, read_lora
from qwen_train.model.combinations import STOCK_CLASSES
from qwen_train.model.loading import load_single_file, stock_class
from qwen_train.run import run_of

Form = Literal["diffusers", "comfyui", "peft", "merged"]


def export(source: Path, form: str, out: Path, model: ModelConfig | None = None) -> Path:
    """Write the adapter of `source`, a file or the folder of a run, to `out` in another form, and return its path."""
    if form not in get_args(Form):
        do = "give diffusers for diffusers, comfyui for ComfyUI, peft for peft, or merged for a whole transformer"
        raise ConfigError("unknown format", where="--to", expected=" or ".join(get_args(Form)), found=form, do=do)
    check_export(form, out)
    file = find_lora(source)
    lora = read_lora(file)
    if form == "merged":
        return merge(lora, out, base_model(source, model))
    check_modules(lora, file)
    if form == "peft":
        return write_peft_folder(lora, out)
    write: dict[str, Callable[[Lora], bytes]] = {"diffusers": diffusers_file, "comfyui": comfyui_file}
    data = write[form](lora)
    make_folder(out.parent)
    write_durably(out, *sealed(data))
    return out


@cache
def _linear_layers(kind: str) -> frozenset[str]:
    """The names of the linear layers of a published transformer, by its class in diffusers."""
    import diffusers

    with torch.device("meta"):
        transformer = getattr(diffusers, kind)()  # its defaults are the published sizes
    return frozenset(name for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear))


def check_modules(lora: Lora, file: Path) -> None:
    """Raise TrainError with the first module that is no layer of a published transformer: other programs leave the
    tensors of such a module out without a word."""
    unknown = [[name for name in lora.modules if name not in _linear_layers(kind)] for kind in STOCK_CLASSES]
    if missing := min(unknown, key=len):
        raise TrainError(
            "no linear layer of a Qwen-Image transformer has this name",
            where=f"{file}: {missing[0]}",
            expected="a name such as transformer_blocks.0.attn.to_q",
            do="name a LoRA of Qwen-Image's transformer",
        )


UNPACKED = "int8_convrot"
"""The quantisation of a base whose unpacked weights a LoRA is merged into."""

# ---- files -----------------------------------------------------------------------------------------------------------


def diffusers_file(lora: Lora) -> bytes:
    """The file that diffusers' pipelines (LoRA) or transformers (LoKr) load, and that training writes."""
    if lora.type in (LOHA, OFT):
        do = "export it with --to peft, or with --to merged"
        raise TrainError(f"diffusers loads no {lora.type.title}", expected="a LoRA or a LoKr", do=do)
    weights, settings = lora.prefixed()
    header = {METADATA_KEY: json.dumps(settings | _origin(lora), indent=2, sort_keys=True)} if settings else None
    # without settings, diffusers infers those of a LoKr
    data: bytes = save({name: tensor.contiguous() for name, tensor in weights.items()}, header)
    return data


def _origin(lora: Lora) -> dict[str, Any]:
    return {ORIGIN: dict(lora.origin)} if lora.origin else {}


def comfyui_file(lora: Lora) -> bytes:
    """The file that ComfyUI loads; the header's rank and alpha are for tools that show them.

    ComfyUI scales each module by alpha / rank, and rsLoRA by alpha / sqrt(rank), so rsLoRA's alpha is multiplied by
    sqrt(rank).
    """
    if lora.type != LORA:
        return comfyui_lycoris_file(lora)
    names = {peft: comfyui for comfyui, peft in COMFYUI_NAMES.items() if comfyui != peft}
    tensors, prefix = {}, comfyui_prefix(lora.modules)
    for name, tensor in lora.weights.items():
        module, _, rest = name.partition(".lora_")
        if f"lora_{rest}" not in names:
            raise TrainError(
                "ComfyUI has no counterpart of this tensor",
                where=name,
                do="export it with --to merged" if "magnitude" in rest else None,
            )
        tensors[f"{prefix}{module}.{names[f'lora_{rest}']}"] = tensor.contiguous()
    for module in lora.modules:
        tensors[f"{prefix}{module}.alpha"] = torch.tensor(lora.alpha(module))
    data: bytes = save(tensors, _comfyui_header(lora, lora.settings))
    return data


def _comfyui_header(lora: Lora, settings: Mapping[str, Any]) -> dict[str, str]:
    """The rank and the alpha under the names of kohya's trainers, and peft's settings."""
    return {
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(settings["lora_alpha" if lora.type == LORA else "alpha"]),
        COMFYUI_METADATA_KEY: json.dumps({**settings, **_origin(lora)}, sort_keys=True),
    }


def comfyui_lycoris_file(lora: Lora) -> bytes:
    """A LoKr or LoHa for ComfyUI.

    A LoKr has no alpha: its scale is in its first factor, since ComfyUI's versions differ in what they divide the alpha
    of two whole factors by.
    """
    if lora.type == OFT:
        raise TrainError(
            "ComfyUI's OFT rotates the outputs of a layer, and this one rotates its inputs",
            do="export it with --to merged",
        )
    modules, settings = by_module(lora.weights, lora.type.title), dict(lora.settings)
    prefix = comfyui_prefix(modules)
    if lora.type == LOHA:
        alphas = {f"{module}.alpha": torch.tensor(lora.alpha(module)) for module in modules}
    else:
        alphas = {}
        if settings:
            ranks = {module: rank_of(settings, module) for module in modules}
            scales = {module: lora.alpha(module) / rank for module, rank in ranks.items()}
            modules = {module: scaled_lokr(own, scales[module]) for module, own in modules.items()}
            settings |= ranks_and_alphas("alpha", ranks, {})
    tensors = {f"{prefix}{name}": tensor.contiguous() for name, tensor in {**joined(modules), **alphas}.items()}
    data: bytes = save(tensors, _comfyui_header(lora, settings) if settings else None)
    return data


def write_peft_folder(lora: Lora, out: Path) -> Path:
    """Write the folder that `peft.PeftModel.from_pretrained` takes, for diffusers' transformer as the base model."""
    if not lora.settings:
        what, do = "peft needs the settings of a LoKr, and this file has none", "export it with --to diffusers"
        raise TrainError(what, do=do)
    config = {**lora.settings, "peft_type": lora.type.peft_type, "inference_mode": True}
    weights = {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in lora.weights.items()}
    with whole_folder(out) as temporary:
        write_durably(temporary / PEFT_WEIGHTS_NAME, *sealed(save(weights)))
        write_durably(temporary / PEFT_CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True).encode("utf-8"))
        if out.exists():
            out.rmdir()  # fails if it is no longer empty
    return out


# ---- merged weights --------------------------------------------------------------------------------------------------


def base_model(source: Path, model: ModelConfig | None) -> ModelFolder:
    """The base model of `model`, or the one that the run of the LoRA recorded (`with_recorded_model`).

    ModelError if its transformer is quantised, except for a file in int8: the LoRA is merged into its unpacked weights.
    """
    if model is None:
        run, parts = run_of(source if source.is_dir() else source.parent), ("transformer",)
        model = with_recorded_model(Config(), run, parts, deciding=("revision", "transformer")).model
    file = model.transformer
    base = open_model(model.path, ("transformer",), model.revision, transformer=file, only_here=model.only_here)
    saved = base.transformer_config.get("quantization_config")
    if saved is not None and saved.get("quant_method") != UNPACKED:
        raise ModelError(
            "these weights are quantised: merging would round the LoRA away",
            where=model.transformer or base.component("transformer"),
            do="merge into the unquantised model, with --model",
        )
    return base


def merge(lora: Lora, out: Path, base: ModelFolder) -> Path:
    """Write to `out` the transformer of `base` with the LoRA added to its weights, in their dtype, atomically.

    Modules are changed in place; the folder is written next to `out` and then renamed.
    """
    transformer = load_stored(base)
    add_to_weights(lora, transformer)
    with whole_folder(out) as temporary:
        transformer.save_pretrained(temporary)
        write_checksums(temporary)
        if out.exists():
            out.rmdir()  # fails if it is no longer empty
    return out


def load_stored(base: ModelFolder) -> Any:
    """The stock transformer in the dtype of its weights; ModelError if it cannot be loaded."""
    folder = base.component("transformer")
    kind = stock_class(folder)
    if (file := base.transformer_file) is not None:
        of_output = file.tensors["proj_out.weight"].dtype
        dtype = torch.bfloat16 if of_output in QUANTISED else DTYPES[of_output]
        return load_single_file(kind, base, dtype, unpack=True)
    check_component(folder)
    with explained("the transformer", folder, do=None):
        return kind.from_pretrained(folder, torch_dtype=stored_dtype(folder), use_safetensors=True)


def add_to_weights(lora: Lora, transformer: Any, weight: float = 1.0) -> None:
    """Merge the adapter into the stock transformer's weights, by peft's own arithmetic; no adapter remains."""
    shapes = {name.removesuffix(".weight"): tuple(value.shape) for name, value in transformer.named_parameters()}
    check_fit(lora, shapes, "")
    attach(lora, transformer, "default")
    for layer in [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]:
        stored = layer.get_base_layer().weight.dtype
        if weight != 1:
            layer.set_scale("default", weight)
        try:
            layer.float().merge(safe_merge=True)  # in bfloat16 peft would round the update before the sum
        except ValueError as error:  # the sum is not finite
            raise TrainError(f"the {lora.type.title} cannot be merged: {error}") from None
        layer.to(stored)
    transformer.unload_lora()


def attach(lora: Lora, transformer: Any, name: str) -> None:
    """Add the adapter to a transformer that it fits, in float32, and make it the active one; TrainError for settings
    that do not belong to its tensors."""
    try:
        if lora.type == LORA or not lora.settings:  # by diffusers' loader, which infers the settings of a LoKr
            prefixed, settings = lora.prefixed()
            transformer.load_lora_adapter(prefixed, prefix=PREFIX, metadata=settings, adapter_name=name)
        else:
            own = {**lora.settings, "peft_type": lora.type.peft_type, "target_modules": lora.modules}
            transformer.add_adapter(PeftConfig.from_peft_type(**own), adapter_name=name)
    except (TypeError, ValueError, re.error) as error:
        raise TrainError(f"this {lora.type.title} cannot be added: {first_line(error)}") from None
    transformer.requires_grad_(False)
    for key, parameter in transformer.named_parameters():
        if f".{lora.type.prefix}" in key:  # the loader has rounded it to the model's dtype
            parameter.data = parameter.data.float()
    expected = {key: tensor.shape for key, tensor in get_peft_model_state_dict(transformer, adapter_name=name).items()}
    found = {key: tensor.shape for key, tensor in lora.weights.items()}
    if wrong := sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)):
        what = f"the tensors of this {lora.type.title} do not belong to its settings"
        shapes = [tuple(each[wrong[0]]) if wrong[0] in each else "none" for each in (expected, found)]
        raise TrainError(what, where=wrong[0], expected=shapes[0], found=shapes[1])
    set_peft_model_state_dict(transformer, dict(lora.weights), adapter_name=name)


def check_fit(lora: Lora, layers: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise TrainError unless every module is a layer with a weight of its shape (outputs, inputs)."""
    tensors, is_lora = by_module(lora.weights, lora.type.title), lora.type == LORA
    for module in lora.modules:
        own = tensors[module]
        outputs, inputs = (len(own[UP]), own[DOWN].shape[1]) if is_lora else layer_shape(lora.type, own, module)
        found = layers.get(module)
        if found is None or len(found) != 2 or found[1] != inputs or outputs not in (None, found[0]):
            rows = "" if outputs is None else f" and {outputs} outputs"
            raise TrainError(
                f"the {lora.type.title} does not fit this model",
                where=f"{where}{module}",
                expected=f"a layer of {inputs} inputs{rows}",
                found="no such layer" if found is None else f"weights {found}",
            )


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the stored weights, by the output projection, which is never quantised or kept in another dtype."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if "proj_out.weight" in names:
                return file.get_tensor("proj_out.weight").dtype  # type: ignore[no-any-return]
    raise ModelError("the transformer's weights are missing", where=folder, expected="proj_out.weight in .safetensors")
