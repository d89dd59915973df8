"""The components of a model, and the sample whose memory is asked for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.hardware import WHOLE, Kind, Placement
from qwen_train.memory.sizes import SampleSize


@dataclass(frozen=True)
class Components:
    """The components of a model, by their config.json files, and the largest sample."""

    configs: Mapping[str, dict[str, Any]]
    """The config.json of `vae`, `text_encoder` and `transformer`."""
    sample: SampleSize
    condition_area: int | None
    """About the pixels of an image for the text encoder; None for those of the VAE."""
    dtype: str = "bfloat16"
    quantization: Kind = "none"
    """The transformer's, on loading."""
    placement: Placement = WHOLE
    """The placement of the text encoder's weights while a cache is built; `predict` has all of them on the device."""

    @property
    def family(self) -> Family:
        return family_of_transformer(self.configs["transformer"])

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Width and height of the target and each control in pixels."""
        return [(PIXELS_PER_TOKEN * w, PIXELS_PER_TOKEN * h) for _, h, w in self.sample.img_shapes]
