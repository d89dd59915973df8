"""The components of a model on tensors without data, whose memory `inference/memory.py` remembers.

The real modules run: the VAE's encoder and decoder, the text encoder on one sample, the transformer for one step.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from qwen_cache.encode.components import Component, TextWork
from qwen_cache.encode.simulated import (
    encoding,
    image_token_count,
    in_dtype,
    largest_layer,
    text_lane,
    vae_lane,
    vae_on_meta,
)
from qwen_cache.encode.vae import TILE, decode_in_tiles, for_single_frames, latent_space
from qwen_cache.format.sample import token_count
from qwen_cache.models.devices import bytes_of, peak_of, torch_dtype
from qwen_cache.models.hardware import WHOLE, Placement
from qwen_cache.models.loading import from_config
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.data.batches import in_order
from qwen_train.inference.components import Components
from qwen_train.memory.step import frozen_bytes
from qwen_train.model.loading import trained_class
from qwen_train.weights import quantize_blocks


class Passes:
    """The passes of the components, each on the largest sample."""

    def __init__(self, of: Components) -> None:
        self.configs, self.sample, self.family, self.sizes = of.configs, of.sample, of.family, of.sizes
        self.condition_area, self.quantization, self.placement = of.condition_area, of.quantization, of.placement
        self.dtype = torch_dtype(of.dtype)

    # ---- what `build` runs ----

    @property
    def vae_lane(self) -> Component:
        """The VAE's encoder as `build` runs it, on the largest image."""
        return vae_lane(json.dumps(self.configs["vae"]), max(self.sizes, key=math.prod), self.dtype)

    @property
    def text_lane(self) -> Component:
        """The text encoder as `build` runs it: images, then prompts."""
        return self._text(self.placement, in_one_pass=False)

    def _text(self, placement: Placement, *, in_one_pass: bool) -> Component:
        """The text encoder; one family stores the tokens of images, the other leaves them out."""
        config, images = self.configs["text_encoder"], self.sizes[1:]
        if self.condition_area:
            images = [calculate_dimensions(self.condition_area, size) for size in images]
        tokens = self.sample.text_tokens - (0 if self.family.text_rows_only else image_token_count(config, images))
        work = TextWork(tuple(images), max(1, tokens), in_one_pass)
        partial = not in_one_pass and placement != WHOLE
        return text_lane(json.dumps(config), work, self.dtype, placement, partial=partial)

    # ---- what `predict` runs ----

    @property
    def text_encoder(self) -> Component:
        """The text encoder without its `lm_head`, on images and prompt in one pass."""
        return self._text(Placement(loaded_quantised=self.placement.loaded_quantised), in_one_pass=True)

    @property
    def vae(self) -> Component:
        """The stock VAE: encoding the largest image, and decoding the target."""
        vae = vae_on_meta(self.configs["vae"], self.dtype)
        encoded = encoding(vae, max(self.sizes, key=math.prod), self.dtype) if self.sizes[1:] else 0
        decoding = peak_of(lambda: vae.decode(self._target(vae), return_dict=False), vae)
        return Component(bytes_of(vae), max(encoded, decoding), largest_layer(vae))

    @property
    def decoder(self) -> Component:
        """The stock VAE, decoding the target: whole, and in tiles as it does where that does not fit."""
        vae, tiled = vae_on_meta(self.configs["vae"], self.dtype), None
        weights = bytes_of(vae)
        whole = peak_of(lambda: vae.decode(self._target(vae), return_dict=False), vae)
        if (vae.config.get("patch_size") or 1) == 1:
            for_single_frames(vae)
            tiled = peak_of(lambda: decode_in_tiles(vae, self._target(vae), TILE), vae)
        return Component(weights, whole, in_tiles=tiled)

    def _target(self, vae: Any) -> Tensor:
        """The latents of the target as the VAE takes them."""
        tokens = self._empty(1, token_count(self.sample.img_shapes[:1]), self.configs["transformer"]["in_channels"])
        return latent_space(vae).unpack(tokens, self.sizes[0])

    @property
    def transformer(self) -> Component:
        """One step for one image; with guidance its two halves run one after the other."""
        config, family, sample = self.configs["transformer"], self.family, self.sample
        with torch.device("meta"):
            model = in_dtype(from_config(trained_class(config), config), self.dtype)
        extra = {"image_positions": [sample.image_positions]} if family.text_rows_only else {}

        def run() -> object:
            return model(
                hidden_states=self._empty(1, token_count(sample.img_shapes), config["in_channels"]),
                encoder_hidden_states=self._empty(1, sample.text_tokens, config[family.text_width_key]),
                timestep=self._empty(1),
                img_shapes=[in_order(sample.img_shapes, family)],
                return_dict=False,
                **extra,
            )

        quantize_blocks(model, self.quantization, torch.device("meta"), offloaded=False)
        weights, unpacked = frozen_bytes(model.requires_grad_(False), config)
        return Component(weights, peak_of(run, model) + unpacked, largest_layer(model))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")
