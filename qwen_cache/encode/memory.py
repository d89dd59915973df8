"""The memory of the encoders on each device, predicted from their config.json files before anything is loaded.

What a pass takes is measured once without data (`simulated.py`), and remembered for the same configuration and work.
`build` takes what is free beyond that for larger batches. Computed, not measured, is what the driver takes. Not
predicted: a mask head. Imports torch only to measure.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

from qwen_cache import encode, models
from qwen_cache.encode.components import Component, TextWork
from qwen_cache.models.hardware import WHOLE, Placement
from qwen_cache.sources.sizes import Size
from qwen_cache.storage.measured import digest_of_code, measured, versions

LIBRARIES = ("torch", "diffusers", "transformers")
CODE = {
    encode: ("simulated", "text", "vae"),
    models: ("devices", "encoders", "loading", "quantization", "single_file", "stored"),
}
"""Our own modules that a measured pass runs."""


@functools.cache
def vae_memory(config: str, image: Size | None, dtype: str) -> Component:
    """`vae_lane`, remembered; the dtype by its name."""

    def measure() -> Component:
        from qwen_cache.encode.simulated import vae_lane
        from qwen_cache.models.devices import torch_dtype

        return vae_lane(config, image, torch_dtype(dtype))

    return component({"what": "the VAE's lane", "config": json.loads(config), "image": image, "dtype": dtype}, measure)


@functools.cache
def text_memory(
    config: str, work: TextWork, dtype: str, placement: Placement = WHOLE, *, partial: bool = False
) -> Component:
    """`text_lane`, remembered for any number of tokens; the dtype by its name."""

    def measure() -> dict[str, Any]:
        from qwen_cache.encode.simulated import text_pieces
        from qwen_cache.models.devices import torch_dtype

        found, pieces = text_pieces(config, work, torch_dtype(dtype), placement, partial=partial)
        return {"component": asdict(found), "pieces": pieces}

    def measure_whole() -> Component:
        from qwen_cache.encode.simulated import text_lane
        from qwen_cache.models.devices import torch_dtype

        return text_lane(config, work, torch_dtype(dtype), placement, partial=partial)

    of_any_length = {"images": work.images, "in one pass": work.in_one_pass}
    key = {"what": "the text encoder's lane", "config": json.loads(config), "dtype": dtype, "partial": partial}
    key |= {"placement": astuple(placement)}
    found = _remembered(key | of_any_length, measure)
    if not found["pieces"]:
        return component(key | {"work": astuple(work)}, measure_whole)
    peak = max(a * work.tokens**2 + b * work.tokens + c for a, b, c in found["pieces"])
    return replace(Component(**found["component"]), activations=round(peak))


def component(key: dict[str, Any], measure: Callable[[], Component]) -> Component:
    """The component that `measure` returns, or returned for this key with the same libraries and code."""
    return Component(**_remembered(key, lambda: asdict(measure())))


def _remembered(key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return dict(measured({**key, "versions": versions(LIBRARIES), "code": _code()}, measure))


@functools.cache
def _code() -> str:
    """The hash of our own modules in `CODE`."""
    folders = {Path(package.__path__[0]): names for package, names in CODE.items()}
    return digest_of_code([folder / f"{name}.py" for folder, names in folders.items() for name in names])
