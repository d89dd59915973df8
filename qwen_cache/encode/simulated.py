"""The passes of the encoders on tensors without data, whose memory `encode/memory.py` remembers.

The real modules run: the VAE on the largest image, whole and in tiles, the text encoder on the longest prompt and its
images.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from qwen_cache.encode.components import Component, TextWork, grid_of
from qwen_cache.encode.text import select_rows
from qwen_cache.encode.vae import VaeThatFits, encoder_parts, for_single_frames, latent_space, supported_vae
from qwen_cache.models.devices import ALIGNMENT, LiveBytes, bytes_of, course_of, peak_of
from qwen_cache.models.encoders import MODELS, batch_windows, model_config
from qwen_cache.models.hardware import ON_DEVICE, WHOLE, Placement, piece_sizes
from qwen_cache.models.loading import explained, from_config
from qwen_cache.models.quantization import quantize
from qwen_cache.sources.sizes import Size

CHANNELS = {"RGB": 3, "RGBA": 4}
TEXT_ENCODER = "text_encoder/config.json"
FRAME = 80  # tokens before the last image: the system message, 64 in the 20B family, and what names the images
TOKENS = 64, 128, 256
"""The lengths of the prompts that are measured."""
ASKED = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""The lengths for which pieces are kept."""
ROWS = 2  # prompts after the images in one pass: that of the sample and the empty one


# ---- the VAE ---------------------------------------------------------------------------------------------------------


def vae_on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The stock VAE with this config.json, without data."""
    kind = supported_vae(config.get("_class_name"), "vae/config.json")
    with torch.device("meta"):
        return in_dtype(from_config(kind, config, "vae/config.json"), dtype)


def encoding(vae: Any, image: Size, dtype: torch.dtype) -> int:
    """The peak of encoding an image of these pixels."""
    space, (width, height) = latent_space(vae), image
    pixels = torch.empty(1, CHANNELS[space.mode], 1, height, width, dtype=dtype, device="meta")
    return peak_of(lambda: space.encode(vae, pixels), vae.vae if isinstance(vae, VaeThatFits) else vae)


@functools.cache
def vae_lane(config: str, image: Size | None, dtype: torch.dtype) -> Component:
    """The VAE's encoder as `build` runs it, on the largest image, if there is any. `config` is the JSON text."""
    vae = for_single_frames(vae_on_meta(json.loads(config), dtype))
    weights, tiled = sum(map(bytes_of, encoder_parts(vae))), None
    if image is None:
        return Component(weights, 0)
    if (vae.config.get("patch_size") or 1) == 1:
        tiled = encoding(VaeThatFits(vae, always_tiles=True), image, dtype)
    return Component(weights, encoding(vae, image, dtype), in_tiles=tiled)


# ---- the text encoder ------------------------------------------------------------------------------------------------


@functools.cache
def text_lane(
    config: str, work: TextWork, dtype: torch.dtype, placement: Placement = WHOLE, *, partial: bool = False
) -> Component:
    """The text encoder without its `lm_head`, with the keys and values of a pass. `config` is the JSON text; of a
    single file, that of its own `config`.

    `partial` says whether weights wait in host memory: `placement.is_partial` of the device.
    """
    model, component = _placed(config, dtype, placement, partial=partial)
    return replace(component, activations=peak_of(_passes(model, work, dtype), model))


def text_pieces(
    config: str, work: TextWork, dtype: torch.dtype, placement: Placement, *, partial: bool
) -> tuple[Component, list[list[float]]]:
    """`text_lane` for any number of tokens of the prompt: without activations, whose pieces are the coefficients of
    polynomials. There are none if a longer prompt takes other tensors.

    Every tensor is linear in these tokens, or a mask, which is quadratic; so the live bytes at each moment are a
    polynomial, and the peak is the largest.
    """
    model, component = _placed(config, dtype, placement, partial=partial)
    courses = [course_of(_passes(model, replace(work, tokens=tokens), dtype), model) for tokens in TOKENS]
    if len(set(map(len, courses))) > 1:
        return component, []
    moments = np.linalg.solve(np.vander(TOKENS).astype(float), np.array(courses, float)).round(6)
    of_peak = (np.vander(ASKED, len(TOKENS)) @ moments).argmax(axis=1)
    return component, np.unique(moments.T[of_peak], axis=0).tolist()


def _placed(config: str, dtype: torch.dtype, placement: Placement, *, partial: bool) -> tuple[Any, Component]:
    """The text encoder, and its bytes without activations."""
    values, quantization, skip = json.loads(config), placement.quantization, ()
    if placement.loaded_quantised:
        quantization, skip = "int8", values["quantization_config"]["modules_to_not_convert"]
    settings = model_config(values, TEXT_ENCODER)
    kind = MODELS[settings.model_type]
    with torch.device("meta"), explained(kind.__name__, TEXT_ENCODER):
        model = in_dtype(kind(settings).model, dtype)
    batch_windows(model.visual)
    weights, host = bytes_of(model), 0
    weights -= sum(map(bytes_of, model.language_model.layers))
    if quantization != "none":
        with LiveBytes(()):  # which computes the layouts of one layer, and knows those of the others
            quantize(model.language_model.layers, quantization, torch.device("meta"), skip=skip)
    layers = [_layer_bytes(layer) for layer in model.language_model.layers]
    weights += sum(layers)
    largest = largest_layer(model)
    if partial:
        table = bytes_of(model.language_model.embed_tokens)
        stacks = [[_layer_bytes(block) for block in model.visual.blocks], *([layers] if placement.offload else [])]
        weights += sum(min(ON_DEVICE, len(stack)) * max(stack) - sum(stack) for stack in stacks) - table
        host = table + sum(sum(piece_sizes(size)) for stack in stacks for size in stack)
    return model, Component(weights, 0, largest, host=host)


def _passes(model: Any, work: TextWork, dtype: torch.dtype) -> Any:
    """The passes that the text encoder makes for a sample."""
    tower, language_model = model.visual, model.language_model
    width = language_model.config.hidden_size

    def tokens(rows: int, count: int, past: DynamicCache | None) -> None:
        language_model(
            inputs_embeds=torch.empty(rows, count, width, dtype=dtype, device="meta"),
            position_ids=torch.empty(3, rows, count, dtype=torch.long, device="meta"),
            past_key_values=past,
            use_cache=past is not None,
        )

    def run() -> None:
        grids = [grid_of(tower.config.to_dict(), image) for image in work.images]
        count = sum(h * w for h, w in grids) // tower.spatial_merge_size**2
        past = DynamicCache()
        if grids:
            vision = tower.config
            features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            pixels = torch.empty(sum(h * w for h, w in grids), features, device="meta")  # the processor's float32
            tower(pixels.to(dtype), grid_thw=torch.tensor([[1, h, w] for h, w in grids]))
        if work.in_one_pass:
            tokens(1, count + work.tokens, past)
        elif grids:
            tokens(1, FRAME + count, past)
            tokens(ROWS, work.tokens, select_rows(past, [0] * ROWS))
        else:
            tokens(ROWS, FRAME + work.tokens, None)

    return run


def image_token_count(config: Mapping[str, Any], images: Sequence[Size]) -> int:
    """The tokens of images of these pixels, by the text encoder's config.json."""
    vision = model_config(config, TEXT_ENCODER).vision_config.to_dict()
    return sum(h * w // vision["spatial_merge_size"] ** 2 for h, w in (grid_of(vision, image) for image in images))


def _layer_bytes(layer: nn.Module) -> int:
    """The bytes of a layer's parameters, as they are aligned in the memory for an offloaded one."""
    sizes = (parameter.numel() * parameter.element_size() for parameter in layer.parameters())
    return sum(math.ceil(size / ALIGNMENT) * ALIGNMENT for size in sizes)


def largest_layer(model: nn.Module) -> int:
    """The bytes of the largest layer's own parameters."""
    own = (sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)) for module in model.modules())
    return max(own)


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model with all numbers in `dtype`."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model
