"""Transformers of the real sizes with random weights, made on the device block by block: no file, no download.

A block is filled, quantised and, if it will be offloaded, moved to the host before the next one is made, so a card
needs no more memory than for training. Quantised layers are those that `qwen-train run` makes while loading.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from bench_memory import transformer_config
from tiny_model_parts import make_scheduler
from torch import Tensor, nn

from qwen_cache.errors import QwenCacheError
from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.models.quantization import check_quantization, quantize
from qwen_cache.settings.load import Config
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import columns
from qwen_train.model.compilation import compile_blocks
from qwen_train.model.loading import Table, TabulatedTransformer2DModel, trained_class
from qwen_train.model.placement import offload_blocks, offloaded_indices
from qwen_train.weights import FEW_ROWS, compute_dtype, prepare_for_training

from .attention import kernel_of
from .measure import Card, UnavailableError

FAMILIES = {"20b": QWEN_IMAGE, "2.1": QWEN_IMAGE_21}
REAL: dict[str, dict[str, Any]] = {
    "20b": transformer_config(60, 24, 128, 3584, out_channels=16),
    "2.1": transformer_config(32, 32, 128, 4096, family=QWEN_IMAGE_21),
}
"""The configurations of the published transformers."""
SMALL: dict[str, dict[str, Any]] = {
    name: {**config, **transformer_config(8, 2, 32, 64, family=FAMILIES[name])} for name, config in REAL.items()
}
TEXT = {"20b": 352, "2.1": 134}
"""Text tokens of an edit with one control: of Edit-2509 and of Qwen-Image-2.1, as on the how-to pages."""
PIPELINE = "QwenImageEditPlusPipeline"
BIAS_STD = 0.02


def config_of(family: str, card: Card, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a family's transformer, with fewer blocks if `layers` says so."""
    config = (SMALL if card.small else REAL)[family]
    return config if layers is None else {**config, "num_layers": layers}


def edit(family: str, card: Card, *images: tuple[int, int], text: int | None = None) -> SampleSize:
    """An edit whose images (target first) have these sides in pixels."""
    patch = 256 if card.small else 16
    shapes = tuple((1, max(2, height // patch), max(2, width // patch)) for height, width in images)
    length = (text or TEXT[family]) // (16 if card.small else 1)
    positions = tuple(min(7, length) for _ in images[1:]) if FAMILIES[family].text_rows_only else ()
    return SampleSize(shapes, length, positions)


# ---- weights ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def random_weights(
    config: dict[str, Any], settings: Config, card: Card, *, kind: Any = None, on_host: bool = False
) -> Any:
    """The transformer as `load_transformer` returns it, on the device; blocks that will be offloaded on the host.

    `kind` is a class in place of the trained one; `on_host` moves all weights to the host.
    """
    train, quantization = settings.train, settings.model.quantization
    kind = kind or (TabulatedTransformer2DModel if train.tabulated_modulation else trained_class(config))
    with init_empty_weights():
        model = kind.from_config(config)
    dtype = torch.float32 if train.method == "full" else compute_dtype(train)
    torch.manual_seed(0)
    count = len(model.transformer_blocks)
    try:
        check_quantization(quantization, "model.quantization", card.device)
    except QwenCacheError as error:
        raise UnavailableError(str(error)) from None
    moved = range(count) if on_host else offloaded_indices(count, train.offload_blocks)
    for i, block in enumerate(model.transformer_blocks):
        fill(block, card.device, dtype)
        if quantization != "none":
            options = {"few_rows": FEW_ROWS, "backward_in_8_bits": train.quantized_backward}
            quantize(block, quantization, card.device, **options)
        if i in moved:
            block.to("cpu")
    fill(model, torch.device("cpu") if on_host else card.device, dtype)
    return model


def fill(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Random values for all parameters that have none: the scale of a signal is kept from layer to layer."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                owner._parameters[name] = nn.Parameter(random_values(parameter, name, device, dtype))


def random_values(like: Tensor, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    values = torch.empty(like.shape, device=device, dtype=dtype)
    if like.ndim > 1:
        return values.normal_(std=1 / math.sqrt(like[0].numel()))
    return values.fill_(1) if name == "weight" else values.normal_(std=BIAS_STD)


# ---- ready to train --------------------------------------------------------------------------------------------------


def for_training(config: dict[str, Any], settings: Config, card: Card, sigma: Tensor) -> Any:
    """The transformer as `qwen-train run` trains it; a table of its modulation has the noise levels `sigma`."""
    model = prepare_for_training(random_weights(config, settings, card), settings.train)
    model.attention_kernel = kernel_of(settings.train, config["num_attention_heads"], card)
    if settings.train.compile is True:  # not "auto": each step says what it measures
        compile_blocks(model)
        model.keeps_attention = not (settings.train.offload_blocks or settings.train.offload_activations)
    if settings.train.tabulated_modulation:
        model.time_text_embed.tables = [random_table(config, sigma)]
    if settings.train.offload_blocks:
        return offload_blocks(model, settings.train.offload_blocks, card.device)
    return model.to(card.device)


def random_table(config: dict[str, Any], sigma: Tensor) -> Table:
    """Small random rows, one for each noise level."""
    bits = sigma.detach().cpu().bfloat16().flatten().view(torch.int16).tolist()
    width = max(part.stop for part in columns(config).values())
    rows = torch.randn(len(bits), width).mul_(BIAS_STD).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return Table(rows, {value: i for i, value in enumerate(bits)})


def meta_bytes(config: dict[str, Any]) -> int:
    """The bytes of a transformer's weights in bfloat16."""
    with init_empty_weights():
        model = trained_class(config).from_config(config)
    return sum(2 * parameter.numel() for parameter in model.parameters())


# ---- folders ---------------------------------------------------------------------------------------------------------


def write_folder(path: Path, configs: dict[str, dict[str, Any]]) -> ModelFolder:
    """A model's folder without weights: the config.json of the given components, and a scheduler."""
    for name, config in configs.items():
        (path / name).mkdir(parents=True, exist_ok=True)
        (path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "model_index.json").write_text(json.dumps({"_class_name": PIPELINE}), encoding="utf-8")
    make_scheduler().save_pretrained(path / "scheduler")
    return open_model(str(path), (*configs, "scheduler"))
