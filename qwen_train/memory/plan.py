"""The memory of the largest batch by part, whether it fits, and which settings would make it fit.

Only the model's config.json is read, locally or from the hub. What a setting saves is predicted in the same way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.models.devices import FRAGMENTATION
from qwen_cache.models.family import family_of_transformer
from qwen_cache.models.folder import check_name, read_config
from qwen_cache.models.single_file import open_single_file
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ModelConfig
from qwen_cache.terminal import human_bytes
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Samples, open_samples
from qwen_train.data.validation_cache import open_validation_cache
from qwen_train.flow import NoiseSchedule
from qwen_train.memory.predict import (
    ACCELERATOR,
    SampleSize,
    block_bytes,
    host_bytes,
    largest_batch,
    largest_image,
    predict_memory,
    tokens_of,
)
from qwen_train.model.stock import trained_class
from qwen_train.weights import with_layout

FEWEST = -1
"""Placeholder for the smallest number of blocks that fits."""
SAVINGS: tuple[dict[str, Any], ...] = (
    {"train.gradient_checkpointing": True},
    {"train.gradient_checkpointing": True, "train.tabulated_modulation": True},
    {"train.gradient_checkpointing": True, "model.quantization": "fp8"},
    {"train.gradient_checkpointing": True, "train.offload_blocks": FEWEST},
    {"train.gradient_checkpointing": True, "model.quantization": "nf4"},
)
"""Settings that save memory, those that cost the least time and precision first."""
LINEAR_FROM = 2048  # tokens: from here on a batch takes more memory than any optimizer's update of a LoRA


@dataclass(frozen=True)
class Workload:
    """What is planned for: a transformer, and the largest batch and sample of the cache that it is trained on."""

    transformer: dict[str, Any]
    """Its config.json."""
    recipe: dict[str, Any]
    """Of the cache."""
    batch: list[SampleSize]
    sample: SampleSize
    image: SampleSize | None = None
    """The largest sample of the validation cache, if there is one."""

    @classmethod
    def of(cls, settings: Config, samples: Samples | None = None) -> Workload:
        """Of `samples`, or of the cache in the settings; ModelError for a cache of another family."""
        settings = with_layout(settings, ACCELERATOR)
        transformer = transformer_config(settings.model)
        batches = Batches(samples or open_samples(settings), settings.train, NoiseSchedule())
        check_family(batches, transformer)
        image = largest_image(open_validation_cache(settings))
        return cls(transformer, batches.cache.recipe.recipe, *largest_batch(batches), image)


def plan(settings: Config, workload: Workload, capacity: int | None) -> dict[str, Any]:
    """What `qwen-train plan` reports of training, as a JSON value: the largest batch, its memory by part, what fits."""
    settings = with_layout(settings, ACCELERATOR)
    transformer, batch, largest = workload.transformer, workload.batch, workload.sample
    family, image = family_of_transformer(transformer), workload.image
    memory = predict_memory(transformer, settings, batch, image=image)
    report: dict[str, Any] = {
        "largest_batch": {"samples": len(batch), "tokens": tokens_of(batch, settings.train, family)},
        "largest_sample": tokens_of([largest], settings.train, family),
        "memory": {**asdict(memory), "total": memory.total},
        "host_memory": host_bytes(transformer, settings),
    }
    if capacity is None:
        return report
    most = most_tokens(transformer, settings, largest, capacity)
    report |= {"gpu_memory": capacity, "fits": memory.total <= capacity, "max_tokens": most}
    return report if report["fits"] else {**report, "do": savings(transformer, settings, batch, most, capacity, image)}


def most_tokens(transformer: dict[str, Any], settings: Config, largest: SampleSize, capacity: int) -> int | None:
    """The largest train.max_tokens that fits, for copies of the largest sample; None if that sample alone does not fit.

    Memory is linear in tokens, except in the smallest batches, where the optimizer's update takes more.
    """
    if predict_memory(transformer, settings, [largest]).total > capacity:
        return None
    tokens = tokens_of([largest], settings.train, family_of_transformer(transformer))
    count = math.ceil(LINEAR_FROM / tokens)
    one, two = (predict_memory(transformer, settings, [largest] * n).total for n in (count, 2 * count))
    return max(tokens, math.floor(count * tokens * (1 + (capacity - one) / (two - one))))


def savings(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    most: int | None,
    capacity: int,
    image: SampleSize | None = None,
) -> list[str]:
    """Alternative settings under which the batch fits, as text; a smaller batch comes first, if that is possible."""
    fitting = [f"train.max_tokens={most}"] if most and len(batch) > 1 else []
    for changes in SAVINGS:
        lossy = "model.quantization" in changes
        if lossy and (settings.train.method == "full" or "quantization_config" in transformer):
            continue
        with suppress(ConfigError, ModelError):  # not possible with these settings or this model
            if changes.get("train.offload_blocks") == FEWEST:
                changes = {**changes, "train.offload_blocks": fewest_blocks(transformer, settings, batch, capacity)}
            changed = _changed(settings, changes)
            total = predict_memory(transformer, changed, batch, image=image).total
            if changed == settings or total > capacity:
                continue
            words = " ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())
            fitting.append(f"{words} ({human_bytes(total)})".replace('"', ""))
    return fitting


def fewest_blocks(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], capacity: int) -> int:
    """The smallest train.offload_blocks under which the batch fits; all blocks if it never does."""
    changes = {"train.gradient_checkpointing": True, "train.offload_blocks": transformer["num_layers"]}
    every = _changed(settings, changes)
    left = capacity - predict_memory(transformer, every, batch).total
    stay = max(0, left) / (1 + FRAGMENTATION) // block_bytes(transformer, every)
    return int(max(transformer["num_layers"] - stay, 1))


def _changed(settings: Config, changes: dict[str, Any]) -> Config:
    for name, value in changes.items():
        section, key = name.split(".")
        settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update={key: value})})
    return settings


def transformer_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the model's transformer, with the quantisation of a single file; ModelError if it is not one that
    is trained."""
    path = config_path(model, "transformer")
    config = read_config(path)
    trained_class(config, path)
    return config if model.transformer is None else open_single_file(model.transformer, config).config(config)


def config_path(model: ModelConfig, component: str) -> Path:
    """config.json of a component; from the hub, only that file is downloaded."""
    name = check_name(model.path)
    if Path(name).is_dir():
        return Path(name) / component / "config.json"
    return _download(name, component, model.revision)


def check_family(batches: Batches, transformer: dict[str, Any]) -> None:
    """ModelError for a cache of another family of models."""
    if batches.family.transformer != transformer["_class_name"]:
        raise ModelError(
            "the cache was built for another model",
            where=batches.cache.folder,
            expected=family_of_transformer(transformer).name,
            found=batches.family.name,
            do="name the model that it was built for, with --model",
        )


def _download(name: str, component: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", subfolder=component, revision=revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            "no such folder here, and none on the hub", where=name, do=str(error).splitlines()[0]
        ) from None
