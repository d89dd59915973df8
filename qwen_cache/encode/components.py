"""The bytes of the encoders on a device, and the work that decides them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_cache.models.hardware import with_reserve
from qwen_cache.sources.sizes import Size


@dataclass(frozen=True)
class Component:
    """Bytes on the device of one component."""

    weights: int
    activations: int
    """The peak of one pass."""
    largest_layer: int = 0
    """The weights of its largest layer, which offloading layer by layer keeps on the device."""
    in_tiles: int | None = None
    """The peak of one pass if the image runs in tiles; None if that is impossible."""
    host: int = 0
    """Bytes in host memory of weights that come to the device when they compute, or never do."""

    @property
    def total(self) -> int:
        return self.weights + self.activations

    @property
    def least(self) -> int:
        """The activations of a pass that takes as little memory as possible."""
        return self.activations if self.in_tiles is None else min(self.activations, self.in_tiles)


@dataclass(frozen=True)
class DeviceMemory:
    """The memory that a build needs on one device, by encoder (`vae`, `text_encoder`)."""

    encoders: Mapping[str, Component]
    has_reserve: bool
    """True if the device's own memory is counted: not on the CPU, where images never run in tiles."""

    @property
    def weights(self) -> int:
        return sum(each.weights for each in self.encoders.values())

    @property
    def at_once(self) -> int:
        """With whole images, and both encoders at work at once."""
        return self._with_reserve(self.weights + sum(each.activations for each in self.encoders.values()))

    @property
    def least(self) -> int:
        """With images in tiles, and encoders that take turns."""
        return self._with_reserve(self.tensors) if self.has_reserve else self.at_once

    @property
    def tensors(self) -> int:
        """`least` without the device's own memory, which is estimated."""
        return self.weights + max(each.least for each in self.encoders.values())

    def _with_reserve(self, size: int) -> int:
        return with_reserve(size) if self.has_reserve else size


@dataclass(frozen=True)
class TextWork:
    """A prompt about some images, for the text encoder."""

    images: tuple[Size, ...]
    """In pixels for the text encoder."""
    tokens: int
    """Tokens of the prompt, without those of the images; in one pass, of everything else."""
    in_one_pass: bool = False
    """True for one pass, as `predict` encodes it, and not first the images and then the prompts."""


def grid_of(vision: Mapping[str, Any], image: Size) -> tuple[int, int]:
    """Rows and columns of patches of an image, by the configuration of the vision tower."""
    merge = int(vision["spatial_merge_size"])
    width, height = (merge * max(1, round(side / (vision["patch_size"] * merge))) for side in image)
    return height, width
