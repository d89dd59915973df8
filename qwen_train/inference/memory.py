"""The memory of encoding and of generating images, predicted from the components' config.json files.

The real modules run once on tensors without data: the VAE's encoder and decoder, the text encoder on one sample, the
transformer for one step. `build` takes what is free beyond that for larger batches. Not predicted: a LoRA's weights,
and a table in place of the modulation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from qwen_cache.encode.latents import latent_space, supported_vae
from qwen_cache.encode.single_frame import for_single_frames
from qwen_cache.errors import ModelError
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.folder import read_config
from qwen_cache.models.live_bytes import bytes_of, peak_of
from qwen_cache.models.text_encoder import MODELS, known_type
from qwen_cache.models.vision_tower import batch_windows
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.data.batches import in_order
from qwen_train.memory.plan import Workload, config_path
from qwen_train.memory.predict import (
    FRAGMENTATION,
    RESERVED,
    Quantization,
    SampleSize,
    frozen_bytes,
    quantization_of,
)
from qwen_train.model.stock import trained_class

CHANNELS = {"RGB": 3, "RGBA": 4}


@dataclass(frozen=True)
class Component:
    """Bytes on the device of one component."""

    weights: int
    activations: int
    """The peak of one pass."""
    largest_layer: int = 0
    """The weights of its largest layer, which offloading layer by layer keeps on the device."""

    @property
    def total(self) -> int:
        return self.weights + self.activations


@dataclass(frozen=True)
class Components:
    """The components of a model, by their config.json files, and the largest sample."""

    configs: Mapping[str, dict[str, Any]]
    """Of `vae`, `text_encoder` and `transformer`."""
    sample: SampleSize
    condition_area: int | None
    """About the pixels of an image for the text encoder; None for those of the VAE."""
    dtype: torch.dtype = torch.bfloat16
    quantization: Quantization | None = None
    """The transformer's, on loading."""

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
        return self._encoding(for_single_frames(self._vae()))

    @cached_property
    def text_encoder(self) -> Component:
        """The text encoder without its `lm_head`: images, then all tokens, with their keys and values."""
        config = self.configs["text_encoder"]
        kind = MODELS[known_type(config.get("model_type"))]
        with torch.device("meta"):
            model = self._in_dtype(kind(kind.config_class.from_dict(config)).model)
        grids = self._grids(model.visual)
        tokens = self.sample.text_tokens + (sum(map(_merged, grids)) if self.family.text_rows_only else 0)

        def run() -> object:
            cache = DynamicCache()
            if grids:
                patch = model.visual.config
                width = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
                patches = sum(h * w for h, w in grids)
                pixels = torch.empty(patches, width, device="meta")  # the processor's float32
                model.visual(pixels.to(self.dtype), grid_thw=torch.tensor([[1, h, w] for h, w in grids]))
            embeds = self._empty(1, tokens, model.language_model.config.hidden_size)
            positions = torch.empty(3, 1, tokens, dtype=torch.long, device="meta")
            return model.language_model(
                inputs_embeds=embeds, position_ids=positions, past_key_values=cache, use_cache=True
            )

        return Component(bytes_of(model), peak_of(run, model), _largest_layer(model))

    def _grids(self, tower: Any) -> list[tuple[int, int]]:
        """Rows and columns of patches of each condition image."""
        batch_windows(tower)
        unit = tower.config.patch_size * tower.spatial_merge_size
        images = [
            calculate_dimensions(self.condition_area, size) if self.condition_area else size for size in self.sizes[1:]
        ]
        rounded = [[tower.spatial_merge_size * max(1, round(side / unit)) for side in image] for image in images]
        return [(height, width) for width, height in rounded]

    # ---- what `predict` runs ----

    @cached_property
    def vae(self) -> Component:
        """The stock VAE: encoding the largest image, and decoding the target."""
        vae = self._vae()
        encoding = self._encoding(vae) if self.sizes[1:] else Component(0, 0)
        latents = self._empty(1, token_count(self.sample.img_shapes[:1]), self.configs["transformer"]["in_channels"])
        unpacked = latent_space(vae).unpack(latents, self.sizes[0])
        decoding = peak_of(lambda: vae.decode(unpacked, return_dict=False), vae)
        return Component(bytes_of(vae), max(encoding.activations, decoding), _largest_layer(vae))

    @cached_property
    def transformer(self) -> Component:
        """One step for one image; with guidance its two halves run one after the other."""
        config, family, sample = self.configs["transformer"], self.family, self.sample
        with torch.device("meta"):
            model = self._in_dtype(trained_class(config).from_config(config))
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

        weights, unpacked = frozen_bytes(model.requires_grad_(False), self.quantization)
        return Component(weights, peak_of(run, model) + unpacked, _largest_layer(model))

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

    # ---- parts on "meta" ----

    def _vae(self) -> Any:
        config = self.configs["vae"]
        kind = supported_vae(config.get("_class_name"), "vae/config.json")
        with torch.device("meta"):
            return self._in_dtype(kind.from_config(config))

    def _in_dtype(self, model: Any) -> Any:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(self.dtype)
        return model

    def _encoding(self, vae: Any) -> Component:
        space, (width, height) = latent_space(vae), max(self.sizes, key=math.prod)
        pixels = self._empty(1, CHANNELS[space.mode], 1, height, width)
        return Component(bytes_of(vae), peak_of(lambda: space.encode(vae, pixels), vae))

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def memory_beside_training(settings: Config, workload: Workload) -> dict[str, dict[str, int]]:
    """What `build` and `predict` need for the largest sample of the cache, in bytes on one device, for `plan`.

    `build` by lane and for both on one device, `predict` by `--offload`. {} where only the transformer is at hand.
    Raises ModelError for an encoder that is not supported, or whose config.json cannot be read.
    """
    paths: dict[str, Path] = {}
    with suppress(ModelError):  # of the hub, offline
        paths = {part: config_path(settings.model, part) for part in ("vae", "text_encoder")}
    if not paths or not all(path.is_file() for path in paths.values()):
        return {}
    configs = {"transformer": workload.transformer, **{part: read_config(path) for part, path in paths.items()}}
    recipe = workload.recipe
    area, kind = recipe.get("condition_image_size"), quantization_of(workload.transformer, settings)
    encoding = Components(configs, workload.sample, area, torch_dtype(recipe.get("dtype", "bfloat16")))
    generating = Components(configs, workload.sample, area, torch_dtype(settings.predict.dtype), kind)
    lanes = {"vae": encoding.vae_lane.total, "text_encoder": encoding.text_encoder.total}
    lanes["one_device"] = sum(lanes.values())
    both = {"build": lanes, "predict": generating.generating()}
    return {name: {part: with_reserve(size) for part, size in parts.items()} for name, parts in both.items()}


def _merged(grid: tuple[int, int]) -> int:
    """The tokens of an image: the encoders merge 2×2 patches."""
    return grid[0] * grid[1] // 4


def _largest_layer(model: nn.Module) -> int:
    own = (sum(p.numel() * p.element_size() for p in module.parameters(recurse=False)) for module in model.modules())
    return max(own)


def with_reserve(size: int) -> int:
    """With the device's own memory, as `qwen_train.memory.predict` estimates it."""
    return RESERVED + int((1 + FRAGMENTATION) * size)
