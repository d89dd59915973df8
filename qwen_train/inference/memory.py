"""The memory of encoding and of generating images, predicted from the components' config.json files.

The real modules run once on tensors without data: the VAE's encoder and decoder, the text encoder on one sample, the
transformer for one step. `build` takes what is free beyond that for larger batches. Not predicted: a LoRA's weights,
and a table in place of the modulation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_cache.encode.memory import (
    Component,
    TextWork,
    encoding,
    image_token_count,
    in_dtype,
    largest_layer,
    text_lane,
    vae_lane,
    vae_on_meta,
)
from qwen_cache.encode.vae import latent_space
from qwen_cache.errors import ModelError
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.models.devices import WHOLE, Placement, bytes_of, peak_of, torch_dtype, with_reserve
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.folder import read_config
from qwen_cache.models.loading import from_config
from qwen_cache.models.quantization import Kind
from qwen_cache.models.single_file import open_text_encoder
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.data.batches import in_order
from qwen_train.memory import SampleSize, Workload, config_path, frozen_bytes, kind_of
from qwen_train.model.loading import trained_class
from qwen_train.weights import quantize_blocks


@dataclass(frozen=True)
class Components:
    """The components of a model, by their config.json files, and the largest sample."""

    configs: Mapping[str, dict[str, Any]]
    """The devices of `vae`, `text_encoder` and `transformer`."""
    sample: SampleSize
    condition_area: int | None
    """About the pixels of an image for the text encoder; None for those of the VAE."""
    dtype: torch.dtype = torch.bfloat16
    quantization: Kind = "none"
    """The transformer's, on loading."""
    placement: Placement = WHOLE
    """The placement of the text encoder's weights while a cache is built; `predict` has all of them on the device."""

    @property
    def family(self) -> Family:
        return family_of_transformer(self.configs["transformer"])

    @cached_property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of the target and each control in pixels."""
        return [(PIXELS_PER_TOKEN * w, PIXELS_PER_TOKEN * h) for _, h, w in self.sample.img_shapes]

    # ---- what `build` runs ----

    @cached_property
    def vae_lane(self) -> Component:
        """The VAE's encoder as `build` runs it, on the largest image."""
        return vae_lane(json.dumps(self.configs["vae"]), max(self.sizes, key=math.prod), self.dtype)

    @cached_property
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

    @cached_property
    def text_encoder(self) -> Component:
        """The text encoder without its `lm_head`, on images and prompt in one pass."""
        return self._text(Placement(loaded_quantised=self.placement.loaded_quantised), in_one_pass=True)

    @cached_property
    def vae(self) -> Component:
        """The stock VAE: encoding the largest image, and decoding the target."""
        vae = vae_on_meta(self.configs["vae"], self.dtype)
        encoded = encoding(vae, max(self.sizes, key=math.prod), self.dtype) if self.sizes[1:] else 0
        latents = self._empty(1, token_count(self.sample.img_shapes[:1]), self.configs["transformer"]["in_channels"])
        unpacked = latent_space(vae).unpack(latents, self.sizes[0])
        decoding = peak_of(lambda: vae.decode(unpacked, return_dict=False), vae)
        return Component(bytes_of(vae), max(encoded, decoding), largest_layer(vae))

    @cached_property
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

    def generating(self) -> dict[str, int]:
        """The peak of `predict` on one device, by `--offload`. Prompts are encoded before the transformer is loaded."""
        text, vae, transformer = self.text_encoder, self.vae, self.transformer
        kept = transformer.weights + vae.weights + max(transformer.activations, vae.activations)
        by_layer = max(
            text.largest_layer + text.activations,
            vae.weights + max(transformer.largest_layer + transformer.activations, vae.activations),
        )
        return {
            "none": max(text.total, kept),
            "model": max(text.total, transformer.total, vae.total),
            "sequential": by_layer,
        }

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def memory_beside_training(settings: Config, workload: Workload) -> dict[str, dict[str, int]]:
    """The bytes that `build` and `predict` need on one device for the largest sample of the cache, for `plan`.

    `build` by lane and for both on one device, `predict` by `--offload`. {} where only the transformer is at hand.
    Raises ModelError for an encoder that is not supported, or whose config.json cannot be read.
    """
    paths: dict[str, Path] = {}
    with suppress(ModelError):  # of the hub, offline
        paths = {part: config_path(settings.model, part) for part in ("vae", "text_encoder")}
    if not paths or not all(path.is_file() for path in paths.values()):
        return {}
    configs = {"transformer": workload.transformer, **{part: read_config(path) for part, path in paths.items()}}
    is_quantised = False
    if settings.model.text_encoder is not None:
        own = configs["text_encoder"]
        file = open_text_encoder(settings.model.text_encoder, own)
        configs["text_encoder"], is_quantised = file.config(own), file.quantization is not None
    recipe = workload.recipe
    area, kind = recipe.get("condition_image_size"), kind_of(workload.transformer, settings)
    placement = Placement(recipe.get("text_quantization", "none"), settings.cache.text_offload, is_quantised)
    dtype = torch_dtype(recipe.get("dtype", "bfloat16"))
    building = Components(configs, workload.sample, area, dtype, placement=placement)
    generating = Components(configs, workload.sample, area, torch_dtype(settings.predict.dtype), kind, placement)
    lanes = {"vae": building.vae_lane.total, "text_encoder": building.text_lane.total}
    lanes["one_device"] = sum(lanes.values())
    both = {"build": lanes, "predict": generating.generating()}
    return {name: {part: with_reserve(size) for part, size in parts.items()} for name, parts in both.items()}
