"""`qwen-train export`: convert a trained adapter for other programs.

    diffusers   <name>.safetensors: peft's names, rank and alpha in its header
    comfyui     <name>.safetensors: ComfyUI's names, rank and alpha in its tensors (`names.py` says which)
    peft        a folder: adapter_model.safetensors and adapter_config.json, for peft.PeftModel.from_pretrained
    merged      a folder: the base model's transformer with the adapter merged into its weights, for from_pretrained

A LoRA can be converted from either file to the other without any loss; `merged` needs as much memory as the model once.
Files of musubi-tuner, ai-toolkit, SimpleTuner and diffusion-pipe are read, too.
Refused: a damaged file, one that is not an adapter of this transformer, a form that its program does not load (DoRA and
OFT for ComfyUI, LoHa and OFT for diffusers), and merging into quantised weights, which would round the adapter away.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME as PEFT_CONFIG_NAME
from peft.utils import SAFETENSORS_WEIGHTS_NAME, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qwen_cache.errors import ConfigError, ModelError, TrainError, first_line
from qwen_cache.models.folder import ModelFolder, check_component, open_model
from qwen_cache.models.loading import explained
from qwen_cache.settings.load import CONFIG_NAME, load_config
from qwen_cache.settings.model import ModelConfig
from qwen_cache.storage.checksums import check_safetensors, sealed, write_checksums
from qwen_cache.storage.durable import make_folder, whole_folder, write_durably
from qwen_train.lora.files import METADATA_KEY, ORIGIN, PREFIX, check_export, find_lora, settings_in
from qwen_train.lora.names import COMFYUI_NAMES, DOWN, UP, comfyui_prefix, peft_names
from qwen_train.lora.peft_settings import check_settings
from qwen_train.lora.tensors import alpha_of, by_module, layer_shape, lokr_scale, rank_of, scaled_lokr
from qwen_train.lora.types import LOHA, LOKR, LORA, OFT, AdapterType, type_of_names
from qwen_train.model.single_file import DTYPES, load_single_file
from qwen_train.model.stock import stock_class

Form = Literal["diffusers", "comfyui", "peft", "merged"]

# Not diffusers' key: its loader would apply the header's alpha on top of each module's alpha.
COMFYUI_METADATA_KEY = "peft_config"


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


def export(source: Path, form: str, out: Path, model: ModelConfig | None = None) -> Path:
    """Write the adapter of `source`, a file or the folder of a run, to `out` in another form, and return its path."""
    if form not in get_args(Form):
        do = "give diffusers for diffusers, comfyui for ComfyUI, peft for peft, or merged for a whole transformer"
        raise ConfigError("unknown format", where="--to", expected=" or ".join(get_args(Form)), found=form, do=do)
    check_export(form, out)
    lora = read_lora(find_lora(source))
    if form == "merged":
        return merge(lora, out, base_model(source, model))
    if form == "peft":
        return write_peft_folder(lora, out)
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
    kind = type_of_names(weights)
    if kind == LORA:
        check_pairs(weights, file)
        return Lora(weights, check_settings(given, weights, file) or settings_of(weights, alphas), origin)
    modules = by_module(weights, file)
    for module, own in modules.items():
        layer_shape(kind, own, f"{file}: {module}")
    if given:
        return Lora(weights, check_settings(given, weights, file), origin)
    return of_another_trainer(kind, modules, alphas, file)


def of_another_trainer(
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
    """peft's settings for a LoRA without them; a module without an alpha is not scaled."""
    ranks = {name.removesuffix(f".{DOWN}"): len(tensor) for name, tensor in weights.items() if name.endswith(DOWN)}
    return {"peft_type": LORA.peft_type, **ranks_and_alphas("lora_alpha", ranks, alphas)}


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


# ---- files -----------------------------------------------------------------------------------------------------------


def diffusers_file(lora: Lora) -> bytes:
    """The file that diffusers' pipelines (LoRA) or transformers (LoKr) load, and that training writes."""
    if lora.type in (LOHA, OFT):
        do = "export it with --to peft, or with --to merged"
        raise TrainError(f"diffusers loads no {lora.type.title}", expected="a LoRA or a LoKr", do=do)
    weights = {f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in lora.weights.items()}
    metadata = {f"{PREFIX}.{name}": value for name, value in lora.settings.items()}
    header = {METADATA_KEY: json.dumps(metadata | _origin(lora), indent=2, sort_keys=True)} if metadata else None
    data: bytes = save(weights, header)  # without settings, diffusers infers those of a LoKr
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
    header = {
        "ss_network_dim": str(lora.settings["r"]),
        "ss_network_alpha": str(lora.settings["lora_alpha"]),
        COMFYUI_METADATA_KEY: json.dumps({**lora.settings, **_origin(lora)}, sort_keys=True),
    }
    data: bytes = save(tensors, header)
    return data


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
    header = {
        "ss_network_dim": str(settings["r"]),
        "ss_network_alpha": str(settings["alpha"]),
        COMFYUI_METADATA_KEY: json.dumps({**settings, **_origin(lora)}, sort_keys=True),
    }
    data: bytes = save(tensors, header if settings else None)
    return data


def write_peft_folder(lora: Lora, out: Path) -> Path:
    """Write the folder that `peft.PeftModel.from_pretrained` takes, for diffusers' transformer as the base model."""
    if not lora.settings:
        what, do = "peft needs the settings of a LoKr, and this file has none", "export it with --to diffusers"
        raise TrainError(what, do=do)
    config = {**lora.settings, "peft_type": lora.type.peft_type, "inference_mode": True}
    weights = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in lora.weights.items()}
    with whole_folder(out) as temporary:
        write_durably(temporary / SAFETENSORS_WEIGHTS_NAME, *sealed(save(weights)))
        write_durably(temporary / PEFT_CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True).encode("utf-8"))
        if out.exists():
            out.rmdir()  # fails if it is no longer empty
    return out


# ---- merged weights --------------------------------------------------------------------------------------------------


def base_model(source: Path, model: ModelConfig | None) -> ModelFolder:
    """The base model of `model`, or of the qwen.yaml beside the LoRA; ModelError if its transformer is quantised."""
    folder = source if source.is_dir() else source.parent
    candidates = [path for path in (folder / CONFIG_NAME, folder.parent / CONFIG_NAME) if path.is_file()]
    if model is None:
        model = load_config(candidates[0]).model if candidates else ModelConfig()
    base = open_model(model.path, ("transformer",), model.revision, transformer=model.transformer)
    if "quantization_config" in base.transformer_config:
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
        return load_single_file(kind, base, DTYPES[file.tensors["proj_out.weight"].dtype])
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
            prefixed = {f"{PREFIX}.{key}": tensor for key, tensor in lora.weights.items()}
            settings = {f"{PREFIX}.{key}": value for key, value in lora.settings.items()} or None
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
