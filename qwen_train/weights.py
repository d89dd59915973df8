"""The transformer's weights: loaded, prepared for training, saved and restored.

`train.method: lora` freezes the base, which may be quantised, and trains an adapter in float32. `full` trains every
weight in float32, since bfloat16 would round small updates away; with mixed_precision bf16, products are computed and
the result is saved in bfloat16, as in diffusers' trainers. With train.stochastic_rounding the weights stay in
bfloat16, and the optimizer rounds updates at random. Full training of quantised weights is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.models.devices import full_float32, is_accelerator
from qwen_cache.models.folder import ModelFolder, check_component, read_config
from qwen_cache.models.hardware import Kind
from qwen_cache.models.loading import explained
from qwen_cache.models.quantization import check_quantization, quantize
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.lora.adapter import add_lora, has_lora, load_lora, lora_weights, write_lora
from qwen_train.lora.files import WEIGHTS_NAME
from qwen_train.model.combinations import check_offload, check_tabulation
from qwen_train.model.loading import (
    TabulatedTransformer2DModel,
    load_single_file,
    trained_class,
)
from qwen_train.model.placement import assign, full_tensor, replace_layers
from qwen_train.model.saved_tensors import OffloadedInputs, saving

CPU = torch.device("cpu")
FOLDER = "transformer"  # of a full training's result, as in a pipeline's folder
FILE_PATTERN = "diffusion_pytorch_model{suffix}.safetensors"
MAX_SHARD_SIZE = "10GB"  # as save_pretrained
TORCH = "2.13"
"""The oldest torch that is known to shard integers; 2.10 takes them for weights to train."""
FEW_ROWS = ("img_mod", "txt_mod")
"""The layers inside the blocks of the 20B family that have a row for each sample, and no token."""


# ---- loading ---------------------------------------------------------------------------------------------------------


def load_transformer(model: ModelFolder, config: Config, device: torch.device = CPU, *, in_parts: bool = False) -> Any:
    """The model's transformer for training on `device`, still without its LoRA and its modulation table.

    Raises ModelError if it is damaged or cannot be loaded, ConfigError for settings that it cannot take. Weights that
    are trained keep their stored dtype, so that all processes of a machine map the same bytes; `wrap` converts them to
    float32, on the device or, for FSDP2, block by block. `in_parts` leaves quantisation to it too. What computes in
    float32 does so without TF32, in the whole process.
    """
    settings, kind, saved = config.train, config.model.quantization, model.transformer_config
    where = model.component("transformer") if model.transformer is None else Path(model.transformer)
    quantised = saved.get("quantization_config")
    if settings.method == "full" and (kind != "none" or quantised is not None):
        raise ConfigError(
            "train.method=full cannot train quantised weights",
            where=where if quantised else None,
            found=f"quant_method {quantised.get('quant_method')} in config.json"
            if quantised
            else f"model.quantization={kind}",
            do="set train.method=lora" + ("" if quantised else ", or model.quantization=none"),
        )
    check_offload(config, saved)
    if in_parts and (kind != "none" or quantised) and TorchVersion(torch.__version__) < TORCH:
        what, do = "train.fsdp shards quantised weights with a newer torch", "update torch, or set train.fsdp=false"
        raise ConfigError(what, expected=f"{TORCH} or newer", found=torch.__version__, do=do)
    as_stored = settings.method == "full" and not settings.stochastic_rounding
    dtype = _stored_dtype(model) if as_stored else compute_dtype(settings)
    model_class = trained_class(saved, where)
    if settings.tabulated_modulation:
        check_tabulation(settings, saved)
        model_class = TabulatedTransformer2DModel
    check_quantization(kind, "model.quantization", device)
    if model.transformer is None:
        transformer = _load_folder(model_class, model, dtype, kind, device)
    else:
        transformer = load_file(model_class, model, dtype, kind, settings.quantized_backward)
    offloaded = settings.offload_blocks > 0
    quantize_blocks(transformer, kind, device, settings.quantized_backward, offloaded=offloaded, later=in_parts)
    if compute_dtype(settings) == torch.float32:
        full_float32()
    return transformer


def _load_folder(
    model_class: type[Any], model: ModelFolder, dtype: torch.dtype, kind: Kind, device: torch.device
) -> Any:
    """The transformer of the model's folder."""
    folder = model.component("transformer")
    check_component(folder)
    options = folder_options(folder, kind, device)
    with explained("the transformer", folder, do=None):
        transformer, info = model_class.from_pretrained(
            folder, torch_dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    if info["missing_keys"]:
        raise ModelError(
            "weights are missing",
            where=folder,
            found=sorted(info["missing_keys"])[0],
            do="download this component again",
        )
    return transformer


def load_file(
    model_class: type[Any], model: ModelFolder, dtype: torch.dtype, kind: Kind, backward_in_8_bits: bool = True
) -> Any:
    """The transformer of the model's single file; ConfigError if it is quantised already, and `kind` is not none."""
    file = model.transformer_file
    assert file is not None
    if kind != "none" and file.quantization:
        raise ConfigError(
            f"model.quantization={kind} is for weights that are not quantised yet",
            where=file.path,
            found=f"{file.quantization} weights",
            do="set model.quantization=none: the file is loaded as it was saved",
        )
    return load_single_file(model_class, model, dtype, few_rows=FEW_ROWS, backward_in_8_bits=backward_in_8_bits)


def quantize_blocks(
    transformer: Any,
    kind: Kind,
    device: torch.device,
    backward_in_8_bits: bool = True,
    *,
    offloaded: bool,
    skip: Sequence[str] = (),
    later: bool = False,
) -> None:
    """Quantise the linear layers of a loaded transformer's blocks on `device`, where they stay unless `offloaded`.

    Its weights are mapped files until then, so host memory never holds them all. What is outside the blocks is about a
    percent of the weights, through which every token passes. `skip` names layers of every block to leave.
    """
    if kind != "none":
        options: dict[str, Any] = {"few_rows": FEW_ROWS, "skip": skip, "backward_in_8_bits": backward_in_8_bits}
        quantize(transformer.transformer_blocks, kind, device, **options, to=CPU if offloaded else None, later=later)


def _stored_dtype(model: ModelFolder) -> torch.dtype:
    """bfloat16 if all weights are; else float32, which represents every other dtype exactly."""
    if model.transformer_file is not None:
        dtypes = {tensor.dtype for tensor in model.transformer_file.tensors.values()}
        return torch.bfloat16 if dtypes == {"BF16"} else torch.float32
    for file in model.component("transformer").glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            if any(weights.get_slice(name).get_dtype() != "BF16" for name in weights.keys()):  # noqa: SIM118 (no dict)
                return torch.float32
    return torch.bfloat16


def prepare_for_training(transformer: Any, settings: TrainConfig) -> Any:
    """Apply the settings: layout, layers, checkpointing, LoRA, frozen weights; the transformer in training mode."""
    transformer.layout = "padded" if settings.layout == "auto" else settings.layout
    if settings.method == "lora":
        transformer.requires_grad_(False)
    replace_layers(transformer)
    checkpoint_blocks(
        transformer, recomputed_blocks(settings.gradient_checkpointing, len(transformer.transformer_blocks))
    )
    if settings.method == "lora":
        add_lora(transformer, settings.lora)
    freeze_unreached(transformer)
    transformer.offloaded_inputs = OffloadedInputs() if settings.offload_activations else None
    return transformer.train()


def compute_dtype(settings: TrainConfig) -> torch.dtype:
    """The dtype of matrix products."""
    return torch.bfloat16 if settings.mixed_precision == "bf16" else torch.float32


def recomputed_blocks(setting: str | int, layers: int) -> range:
    """The blocks of `train.gradient_checkpointing`: all, none or every n-th one; for "auto" all."""
    every = 1 if setting == "auto" else int(setting)
    return range(0, layers, every) if every else range(0)


def checkpoint_blocks(transformer: Any, indices: Iterable[int]) -> None:
    """Gradient checkpointing of these blocks: recompute them in the backward pass."""
    blocks = list(transformer.transformer_blocks)
    recomputed = {blocks[i] for i in indices}
    transformer.recomputed_blocks = recomputed
    if transformer.is_compiled:  # a compiled block looks there
        return

    def run(block: torch.nn.Module, *arguments: Any) -> Any:
        with saving(transformer, block, arguments):
            return checkpoint(block, *arguments, use_reentrant=False) if block in recomputed else block(*arguments)

    transformer.enable_gradient_checkpointing(run)


def freeze_unreached(transformer: Any) -> None:
    """Freeze parameters that get no gradient: DDP would wait for it, and weight decay would shrink them."""
    for name, parameter in transformer.transformer_blocks[-1].named_parameters():
        if name.startswith(transformer.UNREACHED):
            parameter.requires_grad_(False)


def trainable(transformer: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in transformer.parameters() if parameter.requires_grad]


def folder_options(folder: Path, kind: Kind, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a folder; ConfigError if it is already quantised, and `kind` is not none.

    bitsandbytes unpacks saved weights on an accelerator only, and by default on the first one.
    """
    saved = read_config(folder / "config.json").get("quantization_config")
    if kind == "none":
        by_bitsandbytes = saved is not None and saved.get("quant_method") == "bitsandbytes"
        return {"device_map": {"": device}} if by_bitsandbytes and is_accelerator(device) else {}
    if saved:
        raise ConfigError(
            f"model.quantization={kind} is for weights that are not quantised yet",
            where=folder,
            found=f"quant_method {saved.get('quant_method')} in config.json",
            do="set model.quantization=none: the folder is loaded as it was saved",
        )
    return {}


# ---- saving trained weights ------------------------------------------------------------------------------------------


def trained_weights(transformer: Any) -> dict[str, Tensor]:
    """The adapter's weights if there is one, else all weights; not copies."""
    return lora_weights(transformer) if has_lora(transformer) else transformer.state_dict()


def gather_weights(transformer: Any, *, keep: bool) -> dict[str, Tensor]:
    """A copy of `trained_weights`, unsharded and on the CPU; {} without `keep`. Every process takes part."""
    gathered = {}
    for name, tensor in trained_weights(transformer).items():
        value = full_tensor(tensor)
        if keep:
            gathered[name] = value.to("cpu", copy=True).contiguous()
    return gathered


def weights_path(transformer: Any, folder: Path, suffix: str = "") -> Path:
    """The path of trained weights: a file for a LoRA, else a folder that `from_pretrained` loads."""
    stem, dot, ending = WEIGHTS_NAME.partition(".")
    return folder / (f"{stem}{suffix}{dot}{ending}" if has_lora(transformer) else f"{FOLDER}{suffix}")


def write_weights(transformer: Any, weights: Mapping[str, Tensor], path: Path, origin: Mapping[str, Any]) -> None:
    """Write gathered weights: a LoRA file atomically; a folder must be synced and renamed by the caller."""
    if has_lora(transformer):
        write_lora(transformer, weights, path, origin)
        return
    path.mkdir(exist_ok=True)
    transformer.save_config(path)
    save_torch_state_dict(dict(weights), path, filename_pattern=FILE_PATTERN, max_shard_size=MAX_SHARD_SIZE)


def read_weights(transformer: Any, path: Path) -> None:
    """Load weights written by `write_weights` into the transformer; TrainError if any are missing."""
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
