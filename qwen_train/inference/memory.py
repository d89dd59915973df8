"""The memory of encoding, generating and decoding images, predicted from the components' config.json files.

What each component takes for the largest sample is measured once without data (`simulated.py`), and remembered. `build`
takes what is free beyond that for larger batches. Not predicted: a LoRA's weights, and a table in place of the
modulation. Imports torch only to measure.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

from qwen_cache.encode.components import Component
from qwen_cache.encode.memory import component
from qwen_cache.errors import ModelError
from qwen_cache.format.sample import token_count
from qwen_cache.models.folder import read_config
from qwen_cache.models.hardware import Placement, with_reserve
from qwen_cache.models.single_file import open_text_encoder
from qwen_cache.settings.load import Config
from qwen_cache.storage.measured import digest_of_code
from qwen_train.inference.components import Components
from qwen_train.memory.plan import Workload, config_path
from qwen_train.memory.prediction import FRAGMENTATION, RESERVED, predict_memory
from qwen_train.model.combinations import kind_of

CODE = ("inference/simulated.py", "memory/step.py", "data/batches.py", "weights.py", "model/*.py")
"""Our own modules that a measured pass runs, beside those of `encode/memory.py`."""
READ = {
    "vae_lane": ("vae",),
    "text_lane": ("text_encoder",),
    "text_encoder": ("text_encoder",),
    "vae": ("vae", "transformer"),
    "decoder": ("vae", "transformer"),
    "transformer": ("transformer",),
}
"""The config.json files that each measurement depends on."""


def measured(of: Components, name: str) -> Component:
    """The component of this name in `READ`, as `simulated.Passes` measures it, or remembered."""

    def measure() -> Component:
        from qwen_train.inference.simulated import Passes

        found: Component = getattr(Passes(of), name)
        return found

    key = {
        "what": f"plan: {name}",
        "configs": {part: of.configs[part] for part in READ[name]},
        "family": of.family.name,
        "sample": of.sample,
        "area": of.condition_area,
        "dtype": of.dtype,
        "quantization": of.quantization if name == "transformer" else None,
        "placement": astuple(of.placement) if "text" in name else None,
        "further code": _code(),
    }
    return component(key, measure)


def building(of: Components) -> dict[str, int]:
    """The peak of `build` by lane, and for both on one device."""
    lanes = {"vae": measured(of, "vae_lane").total, "text_encoder": measured(of, "text_lane").total}
    return lanes | {"one_device": sum(lanes.values())}


def generating(of: Components) -> dict[str, int]:
    """The peak of `predict` on one device, by `--offload`. Prompts are encoded before the transformer is loaded."""
    text, vae, transformer = (measured(of, each) for each in ("text_encoder", "vae", "transformer"))
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


@functools.cache
def _code() -> str:
    folder = Path(__file__).parents[1]
    return digest_of_code([path for pattern in CODE for path in sorted(folder.glob(pattern))])


def memory_beside_training(settings: Config, workload: Workload) -> dict[str, dict[str, int]]:
    """The bytes that `build` and `predict` need on one device for the largest sample of the cache, for `plan`.

    `build` by lane and for both on one device, `predict` by `--offload`. {} where only the transformer is at hand.
    Raises ModelError for an encoder that is not supported, or whose config.json cannot be read.
    """
    configs = _configs(settings, workload, "vae", "text_encoder")
    if not configs:
        return {}
    is_quantised = False
    if settings.model.text_encoder is not None:
        own = configs["text_encoder"]
        file = open_text_encoder(settings.model.text_encoder, own)
        configs["text_encoder"], is_quantised = file.config(own), file.quantization is not None
    recipe = workload.recipe
    area, kind = recipe.get("condition_image_size"), kind_of(workload.transformer, settings)
    placement = Placement(recipe.get("text_quantization", "none"), settings.cache.text_offload, is_quantised)
    build = Components(configs, workload.sample, area, recipe.get("dtype", "bfloat16"), placement=placement)
    predict = Components(configs, workload.sample, area, settings.predict.dtype, kind, placement)
    both = {"build": building(build), "predict": generating(predict)}
    return {name: {part: with_reserve(size) for part, size in parts.items()} for name, parts in both.items()}


def decoding_in_training(settings: Config, workload: Workload, capacity: int | None) -> dict[str, dict[str, Any]]:
    """The bytes of a run that decodes its images on the device that trains, for `plan`: {"decode": …}.

    `weights` are the VAE's, which stay on the device; `image` is the peak of a decode, in tiles where a whole one is
    not within `capacity`; `total` is the largest of a training step and a decode, with all that stays. {} where the
    VAE's config.json is not at hand.
    """
    configs = _configs(settings, workload, "vae")
    if not configs:
        return {}
    sizes = [size for size in (workload.sample, workload.image) if size is not None]
    largest = max(sizes, key=lambda size: token_count(size.img_shapes[:1]))
    vae = measured(Components(configs, largest, None, settings.predict.dtype), "decoder")
    memory = predict_memory(workload.transformer, settings, workload.batch, image=workload.image)
    stays = memory.weights + memory.trained + memory.optimizer + memory.average + vae.weights

    def total(image: int) -> int:
        between_steps = RESERVED + (1 + FRAGMENTATION) * (stays + image)
        return int(max(memory.total + (1 + FRAGMENTATION) * vae.weights, between_steps))

    image = vae.activations if capacity is None or total(vae.activations) <= capacity else vae.least
    fits = {} if capacity is None else {"fits": total(image) <= capacity}
    return {"decode": {"weights": vae.weights, "image": image, "total": total(image), **fits}}


def _configs(settings: Config, workload: Workload, *parts: str) -> dict[str, dict[str, Any]]:
    """The config.json of the transformer and of these parts; {} if one is not at hand."""
    paths: dict[str, Path] = {}
    with suppress(ModelError):  # of the hub, offline
        paths = {part: config_path(settings.model, part) for part in parts}
    if not paths or not all(path.is_file() for path in paths.values()):
        return {}
    return {"transformer": workload.transformer, **{part: read_config(path) for part, path in paths.items()}}
