"""The transformer's weights: how they are loaded, what of them is trained, and how that is saved and read again.

`train.method: lora` freezes the base, which may be quantised, and trains an adapter in float32. `full` trains every
weight, held in float32 for updates smaller than bfloat16 can tell; with mixed_precision bf16 the products are computed
in bfloat16, as in diffusers' trainers, and the result is saved so. Refused: full training of quantised weights.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.settings.train import TrainConfig
from qwen_train.lora.adapter import WEIGHTS_NAME, add_lora, has_lora, load_lora, lora_weights, write_lora
from qwen_train.model.modulation import TabulatedTransformer2DModel, check_settings
from qwen_train.model.offload import check_settings as check_offload
from qwen_train.model.sharding import assign, whole
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

FOLDER = "transformer"  # where all weights are saved, as in a pipeline's folder
FILE_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"
MAX_SHARD_SIZE = "10GB"  # as save_pretrained
KEPT_WHOLE = ["img_in", "txt_in", "time_text_embed", "norm_out", "proj_out"]
"""Not quantised: half a percent of the weights, through which everything goes."""
UNREACHED = ("attn.add_q_proj.", "attn.norm_added_q.", "attn.to_add_out.", "txt_mlp.")
"""Of the last block: the text that they compute is used by nothing."""


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_transformer(model: ModelFolder, config: Config) -> Any:
    """The transformer of the model, as it is to be trained, but for a LoRA and the table of its modulation.

    For FSDP2 its weights are as they are stored, so that all processes of a machine map the same bytes; `wrap` makes
    them float32 part by part, where they are trained.
    """
    folder, settings, kind = model.part("transformer"), config.train, config.model.quantization
    if settings.method == "full":
        _refuse_quantised(folder, kind)
    if settings.offload_blocks:
        check_offload(config, json.loads((folder / "config.json").read_text(encoding="utf-8")))
    trained = _stored_dtype(folder) if settings.fsdp else torch.float32
    dtype = trained if settings.method == "full" else compute_dtype(settings)
    quantised = quantization_options(folder, kind, dtype)
    model_class = QwenImageMultiResTransformer2DModel
    if settings.tabulated_modulation:
        check_settings(settings, json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model_class = TabulatedTransformer2DModel
    try:
        transformer, info = model_class.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True, output_loading_info=True, **quantised
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise ModelError(f"the transformer cannot be loaded: {error}", where=folder) from None
    if info["missing_keys"]:
        raise ModelError(
            "weights are missing",
            where=folder,
            found=sorted(info["missing_keys"])[0],
            do="download this part again",
        )
    return transformer


def _stored_dtype(folder: Path) -> torch.dtype:
    """bfloat16 where all weights are; else float32, which holds what any dtype does."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            if any(weights.get_slice(name).get_dtype() != "BF16" for name in weights.keys()):  # noqa: SIM118 (no dict)
                return torch.float32
    return torch.bfloat16


def check_cache(cache: Any, model: ModelFolder, config: Mapping[str, Any]) -> None:
    """Refuse a cache that a transformer of that config.json cannot have been meant for."""
    if not len(cache):
        raise TrainError("the cache has no samples", where=cache.folder, do="run `qwen-cache build`")
    pipeline = cache.recipe.recipe.get("pipeline")
    if pipeline != model.pipeline:
        raise ModelError(
            "the cache was made for another kind of model",
            where=cache.folder,
            expected=model.pipeline,
            found=pipeline,
            do="train the model that it was made for, or build a cache for this one",
        )
    if (width := cache.prompt_embeds_width) != config["joint_attention_dim"]:
        raise ModelError(
            "the cache's prompt embeddings do not fit the transformer",
            where=cache.folder,
            expected=f"width {config['joint_attention_dim']}",
            found=f"width {width}",
            do="build the cache with the text encoder of this model",
        )
    if (channels := config["in_channels"]) != LATENT_CHANNELS:
        raise ModelError(
            "the transformer does not take the latents of a cache",
            where=model.part("transformer"),
            expected=f"in_channels {LATENT_CHANNELS}",
            found=f"in_channels {channels}",
            do="train a Qwen-Image or Qwen-Image-Edit transformer",
        )


def prepare_for_training(transformer: Any, settings: TrainConfig) -> Any:
    """The transformer, in the layout and with the checkpointing, the LoRA and the frozen weights of the settings."""
    transformer.layout = settings.layout
    if settings.gradient_checkpointing:
        checkpoint_blocks(transformer, int(settings.gradient_checkpointing))
    if settings.method == "lora":
        add_lora(transformer, settings.lora)
    freeze_unreached(transformer)
    return transformer.train()


def compute_dtype(settings: TrainConfig) -> torch.dtype:
    """What products are computed in."""
    return torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float32


def checkpoint_blocks(transformer: Any, every: int) -> None:
    """Recompute every n-th block in the backward pass, in place of keeping its activations."""
    recomputed = set(list(transformer.transformer_blocks)[::every])

    def run(block: torch.nn.Module, *arguments: Any) -> Any:
        return checkpoint(block, *arguments, use_reentrant=False) if block in recomputed else block(*arguments)

    transformer.enable_gradient_checkpointing(run)


def freeze_unreached(transformer: Any) -> None:
    """Train nothing that gets no gradient: DDP would wait for it, and weight decay would wear it away."""
    for name, parameter in transformer.transformer_blocks[-1].named_parameters():
        if name.startswith(UNREACHED):
            parameter.requires_grad_(False)


def trainable(transformer: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def quantization_options(folder: Path, kind: str, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` takes for `model.quantization`; ConfigError where the folder is quantised already."""
    if kind == "none":
        return {}
    if saved := _saved_quantization(folder):
        raise ConfigError(
            f"model.quantization={kind} is for weights that are not quantised yet",
            where=folder,
            found=f"quant_method {saved.get('quant_method')} in config.json",
            do="set model.quantization=none: the folder is loaded as it was saved",
        )
    return {"quantization_config": _quantization_config(kind, dtype)}


def _saved_quantization(folder: Path) -> dict[str, Any] | None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config.get("quantization_config")


def _quantization_config(kind: str, dtype: torch.dtype) -> Any:
    """diffusers' setting for that kind of weights."""
    import diffusers

    try:
        if kind == "nf4":
            return diffusers.BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
                llm_int8_skip_modules=KEPT_WHOLE,
            )
        name = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}[kind]
        weights = getattr(importlib.import_module("torchao.quantization"), name)()
        return diffusers.TorchAoConfig(weights, modules_to_not_convert=KEPT_WHOLE)
    except ImportError as error:
        raise ConfigError(f"model.quantization={kind}: {error}", do="pip install 'qwen-cache[quantization]'") from None


def _refuse_quantised(folder: Path, kind: str) -> None:
    saved = _saved_quantization(folder)
    if kind == "none" and saved is None:
        return
    raise ConfigError(
        "train.method=full cannot train quantised weights",
        where=folder if saved else None,
        found=f"quant_method {saved.get('quant_method')} in config.json" if saved else f"model.quantization={kind}",
        do="set train.method=lora" + ("" if saved else ", or model.quantization=none"),
    )


# ---- saving what was trained -----------------------------------------------------------------------------------------


def trained_weights(transformer: Any) -> dict[str, Tensor]:
    """What is saved of it: the adapter if there is one, else all weights."""
    return lora_weights(transformer) if has_lora(transformer) else transformer.state_dict()


def gather_weights(transformer: Any, *, keep: bool) -> dict[str, Tensor]:
    """A copy of `trained_weights`, whole and on the CPU, in the processes that `keep` it; all have to take part."""
    gathered = {}
    for name, tensor in trained_weights(transformer).items():
        value = whole(tensor)
        if keep:
            gathered[name] = value.to("cpu", copy=True).contiguous()
    return gathered


def weights_path(transformer: Any, folder: Path, suffix: str = "") -> Path:
    """Where they are saved: a file for a LoRA, else a folder that `from_pretrained` loads."""
    stem, dot, ending = WEIGHTS_NAME.partition(".")
    return folder / (f"{stem}{suffix}{dot}{ending}" if has_lora(transformer) else f"{FOLDER}{suffix}")


def write_weights(transformer: Any, weights: Mapping[str, Tensor], path: Path, origin: Mapping[str, Any]) -> None:
    """Write what was gathered. A file has its name when it is whole; a folder is for the caller to sync and name."""
    if has_lora(transformer):
        write_lora(transformer, weights, path, origin)
        return
    path.mkdir(exist_ok=True)
    transformer.save_config(path)
    save_torch_state_dict(dict(weights), path, filename_pattern=FILE_PATTERN, max_shard_size=MAX_SHARD_SIZE)


def read_weights(transformer: Any, path: Path) -> None:
    """Put what `write_weights` wrote into the transformer."""
    if has_lora(transformer):
        load_lora(transformer, path)
        return
    targets = trained_weights(transformer)
    missing = set(targets)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(set(tensors.keys()) & missing):
                assign(targets[name], tensors.get_tensor(name))
                missing.discard(name)
    if missing:
        raise TrainError("weights are missing", where=path, found=min(missing))
