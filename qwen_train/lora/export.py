"""`qwen-train export`: convert a trained LoRA for other programs.

    diffusers   <name>.safetensors: peft's names, rank and alpha in its header
    comfyui     <name>.safetensors: ComfyUI's names, rank and alpha in its tensors (`names.py` says which)
    merged      a folder: the base model's transformer with the LoRA added to its weights, for from_pretrained

Either file can be converted to the other without any loss; `merged` needs as much memory as the model once. Files of
musubi-tuner, ai-toolkit and diffusion-pipe are read, too.
Refused: a damaged file, one that is not a LoRA of this transformer, DoRA for ComfyUI, and merging into quantised
weights, which would round the LoRA away.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.models.folder import check_component, open_model, read_config
from qwen_cache.settings.load import CONFIG_NAME, load_config
from qwen_cache.settings.model import ModelConfig
from qwen_cache.storage.checksums import check_safetensors, sealed, write_checksums
from qwen_cache.storage.durable import make_folder, whole_folder, write_durably
from qwen_train.lora.adapter import METADATA_KEY, ORIGIN, PREFIX, settings_in
from qwen_train.lora.files import check_export, find_lora
from qwen_train.lora.names import COMFYUI_NAMES, DOWN, UP, comfyui_prefix, peft_names
from qwen_train.model.stock import stock_class

Form = Literal["diffusers", "comfyui", "merged"]

# Not diffusers' key: its loader would apply the header's alpha on top of each module's alpha.
COMFYUI_METADATA_KEY = "peft_config"


@dataclass(frozen=True)
class Lora:
    """A LoRA under peft's names: `weights` without a prefix, `settings` as in `peft.LoraConfig`, and `origin`, the
    model and cache recorded in its file (`lora/adapter.py`), empty for a file of another trainer."""

    weights: Mapping[str, Tensor]
    settings: Mapping[str, Any]
    origin: Mapping[str, Any]

    @property
    def modules(self) -> list[str]:
        return [name.removesuffix(f".{DOWN}") for name in self.weights if name.endswith(DOWN)]

    def alpha(self, module: str) -> float:
        """The module's alpha: the scale of the product of its two matrices, times their rank."""
        patterns = self.settings.get("alpha_pattern") or {}
        alpha = float(patterns.get(get_pattern_key(patterns, module), self.settings["lora_alpha"]))
        rank = len(self.weights[f"{module}.{DOWN}"])
        return alpha * math.sqrt(rank) if self.settings.get("use_rslora") else alpha


def export(source: Path, form: str, out: Path, model: ModelConfig | None = None) -> Path:
    """Write the LoRA of `source`, a file or the folder of a run, to `out` in another form, and return its path."""
    if form not in get_args(Form):
        do = "give diffusers for diffusers, comfyui for ComfyUI, or merged for a whole transformer"
        raise ConfigError("unknown format", where="--to", expected=" or ".join(get_args(Form)), found=form, do=do)
    check_export(form, out)
    lora = read_lora(find_lora(source))
    if form == "merged":
        return merge(lora, out, transformer_folder(source, model))
    write: dict[str, Callable[[Lora], bytes]] = {"diffusers": diffusers_file, "comfyui": comfyui_file}
    data = write[form](lora)
    make_folder(out.parent)
    write_durably(out, *sealed(data))
    return out


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_lora(file: Path) -> Lora:
    """Read a LoRA with diffusers' or ComfyUI's names; settings missing in its header follow from its tensors."""
    try:
        check_safetensors(file, TrainError)
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in sorted(opened.keys())}
            header = opened.metadata() or {}
        if METADATA_KEY in header:
            given = {name.removeprefix(f"{PREFIX}."): value for name, value in settings_in(header).items()}
        else:
            given = settings_in(header, COMFYUI_METADATA_KEY)
        origin = given.pop(ORIGIN, {})
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        raise TrainError(f"this is not a LoRA file: {error}", where=file) from None
    weights, alphas = peft_names(tensors, file)
    check_pairs(weights, file)
    return Lora(weights, given or settings_of(weights, alphas), origin)


def check_pairs(weights: Mapping[str, Tensor], file: Path) -> None:
    """Raise TrainError if a module lacks one of its two matrices, or their ranks differ."""
    for name, tensor in weights.items():
        for one, other, axis in ((DOWN, UP, 0), (UP, DOWN, 1)):
            partner = weights.get(f"{name.removesuffix(one)}{other}")
            if name.endswith(one) and (partner is None or tensor.shape[axis] != partner.shape[1 - axis]):
                found = "none" if partner is None else f"shapes {tuple(tensor.shape)} and {tuple(partner.shape)}"
                raise TrainError("a matrix has no partner of its rank", where=f"{file}: {name}", found=found)
    if not any(name.endswith(DOWN) for name in weights):
        raise TrainError("not a LoRA: it has no weights", where=file)


def settings_of(weights: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, Any]:
    """peft's settings for a file without them; a module without an alpha is not scaled."""
    ranks = {name.removesuffix(f".{DOWN}"): len(tensor) for name, tensor in weights.items() if name.endswith(DOWN)}
    alphas = {module: alphas.get(module, float(rank)) for module, rank in ranks.items()}
    rank, alpha = (Counter(values).most_common(1)[0][0] for values in (ranks.values(), alphas.values()))
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {module: value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {module: value for module, value in alphas.items() if value != alpha},
        "target_modules": sorted(ranks),
    }


# ---- files -----------------------------------------------------------------------------------------------------------


def diffusers_file(lora: Lora) -> bytes:
    """The file that diffusers' pipelines load, and that training writes."""
    weights = {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in lora.weights.items()}
    metadata = {f"{PREFIX}.{name}": value for name, value in lora.settings.items()} | _origin(lora)
    data: bytes = save(weights, {METADATA_KEY: json.dumps(metadata, indent=2, sort_keys=True)})
    return data


def _origin(lora: Lora) -> dict[str, Any]:
    return {ORIGIN: dict(lora.origin)} if lora.origin else {}


def comfyui_file(lora: Lora) -> bytes:
    """The file that ComfyUI loads; the header's rank and alpha are for tools that show them.

    ComfyUI scales each module by alpha / rank, and rsLoRA by alpha / sqrt(rank), so rsLoRA's alpha is multiplied by
    sqrt(rank).
    """
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
    header = {
        "ss_network_dim": str(lora.settings["r"]),
        "ss_network_alpha": str(lora.settings["lora_alpha"]),
        COMFYUI_METADATA_KEY: json.dumps({**lora.settings, **_origin(lora)}, sort_keys=True),
    }
    data: bytes = save(tensors, header)
    return data


# ---- merged weights --------------------------------------------------------------------------------------------------


def transformer_folder(source: Path, model: ModelConfig | None) -> Path:
    """The base model's transformer: that of `model`, or of the qwen.yaml beside the LoRA."""
    folder = source if source.is_dir() else source.parent
    candidates = [path for path in (folder / CONFIG_NAME, folder.parent / CONFIG_NAME) if path.is_file()]
    if model is None:
        model = load_config(candidates[0]).model if candidates else ModelConfig()
    path = open_model(model.path, ("transformer",), model.revision).component("transformer")
    if "quantization_config" in read_config(path / "config.json"):
        raise ModelError(
            "these weights are quantised: merging would round the LoRA away",
            where=path,
            do="merge into the unquantised model, with --model",
        )
    return path


def merge(lora: Lora, out: Path, base: Path) -> Path:
    """Write to `out` the transformer of `base` with the LoRA added to its weights, in their dtype, atomically.

    Modules are changed in place; the folder is written next to `out` and then renamed.
    """
    check_component(base)
    kind = stock_class(base)
    try:
        transformer = kind.from_pretrained(base, torch_dtype=stored_dtype(base), use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the transformer cannot be loaded: {error}", where=base) from None
    add_to_weights(lora, transformer)
    with whole_folder(out) as temporary:
        transformer.save_pretrained(temporary)
        write_checksums(temporary)
        if out.exists():
            out.rmdir()  # fails if it is no longer empty
    return out


def add_to_weights(lora: Lora, transformer: Any) -> None:
    """Add the LoRA to the stock transformer's weights, by peft's own arithmetic; no adapter remains."""
    shapes = {name.removesuffix(".weight"): weight.shape for name, weight in transformer.named_parameters()}
    for module in lora.modules:
        down, up = lora.weights[f"{module}.{DOWN}"], lora.weights[f"{module}.{UP}"]
        if shapes.get(module) != (len(up), down.shape[1]):
            raise TrainError(
                "the LoRA does not fit this model",
                where=module,
                expected=f"a layer of {down.shape[1]} inputs and {len(up)} outputs",
                found=f"weights {tuple(shapes[module])}" if module in shapes else "no such layer",
            )
    prefixed = {f"{PREFIX}.{name}": tensor for name, tensor in lora.weights.items()}
    settings = {f"{PREFIX}.{name}": value for name, value in lora.settings.items()}
    transformer.load_lora_adapter(prefixed, prefix=PREFIX, metadata=settings, adapter_name="default")
    for name, parameter in transformer.named_parameters():
        if ".lora_" in name:  # the loader has rounded it to the model's dtype
            parameter.data = parameter.data.float()
    set_peft_model_state_dict(transformer, dict(lora.weights))
    for layer in [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]:
        stored = layer.get_base_layer().weight.dtype
        try:
            layer.float().merge(safe_merge=True)  # in bfloat16 peft would round the update before the sum
        except ValueError as error:  # the sum is not finite
            raise TrainError(f"the LoRA cannot be merged: {error}") from None
        layer.to(stored)
    transformer.unload_lora()


def stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the stored weights, by the output projection, which is never quantised or kept in another dtype."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if "proj_out.weight" in names:
                return file.get_tensor("proj_out.weight").dtype  # type: ignore[no-any-return]
    raise ModelError("the transformer's weights are missing", where=folder, expected="proj_out.weight in .safetensors")
