"""The memory of the largest batch by part, whether it fits, and which settings would make it fit.

Only the model's config.json is read, locally or from the hub. What a setting saves is predicted in the same way.
Imports torch only for what is not remembered.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from qwen_cache.batching import SUMMARISED, BatchPlan
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.format.sample import token_count
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.folder import check_name, read_config
from qwen_cache.models.single_file import open_single_file
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ModelConfig, TrainConfig
from qwen_cache.terminal import human_bytes
from qwen_train.data.planned import Planned
from qwen_train.data.samples import Samples, open_samples
from qwen_train.data.validation_cache import open_validation_cache
from qwen_train.memory.choice import COMPILE, Candidate, Choice, Machine, Open, candidates, choose
from qwen_train.memory.cost import card_of
from qwen_train.memory.prediction import (
    ACCELERATOR,
    FRAGMENTATION,
    SAFE,
    block_bytes,
    changed,
    predict_host_memory,
    predict_memory,
)
from qwen_train.memory.sizes import SampleSize, tokens_of
from qwen_train.model.combinations import chooses_blocks, class_name, may_compile, with_layout

FEWEST = -1
"""Placeholder for the smallest number of blocks that fits."""
SAVINGS: tuple[dict[str, Any], ...] = (
    {"train.gradient_checkpointing": True},
    {"train.gradient_checkpointing": True, "train.tabulated_modulation": True},
    {"train.gradient_checkpointing": True, "model.quantization": "int8_convrot"},
    {"train.gradient_checkpointing": True, "train.offload_blocks": FEWEST},
    {"train.gradient_checkpointing": True, "model.quantization": "nf4"},
)
"""Settings that save memory, those that cost the least time and precision first."""
LINEAR_FROM = 2048  # tokens: from here on a batch takes more memory than any optimizer's update of a LoRA


@dataclass(frozen=True)
class Workload:
    """The subject of a plan: a transformer, and the largest batch and sample of the cache that it is trained on."""

    transformer: dict[str, Any]
    """Its config.json."""
    recipe: dict[str, Any]
    """The recipe of the cache."""
    batch: list[SampleSize]
    sample: SampleSize
    image: SampleSize | None = None
    """The largest sample of the validation cache, if there is one."""

    @classmethod
    def of(cls, settings: Config, samples: Samples | None = None) -> Workload:
        """The workload of `samples`, or of the cache in the settings; ModelError for a cache of another family."""
        settings = with_layout(settings, ACCELERATOR)
        transformer = transformer_config(settings.model)
        samples = samples or open_samples(settings)
        planned = Planned.of(samples, settings.train)
        check_family(samples, planned.family, transformer)
        image = largest_image(open_validation_cache(settings))
        return cls(transformer, samples.recipe.recipe, *largest_batch(samples, settings.train, planned), image)


def plan(settings: Config, workload: Workload, capacity: int | None, gpus: int = 1) -> dict[str, Any]:
    """The report of `qwen-train plan`, as a JSON value: the largest batch, its memory by part, what fits.

    With train.memory=auto it is about what a run chooses on a GPU with this capacity, with train.fsdp about each of the
    GPUs.
    """
    settings = with_layout(settings, ACCELERATOR)
    chosen, is_possible = None, True
    if settings.train.memory == "auto" and capacity is not None:
        choice = chosen_by_run(settings, workload, capacity)
        chosen, is_possible = (choice.best[0], True) if choice.best else (choice.nearest, False)
        given, settings = settings, changed(settings, chosen.settings)
    transformer, batch, largest = workload.transformer, workload.batch, workload.sample
    family, image = family_of_transformer(transformer), workload.image
    choices = []
    if chooses_blocks(settings.train):
        choices = by_recomputed_blocks(settings, workload, capacity)
    memory = predict_memory(transformer, settings, batch, image=image, processes=gpus)
    whole = predict_memory(transformer, settings, batch, image=image)  # which the first process gathers to save it
    host = predict_host_memory(transformer, settings, batch, whole)
    report: dict[str, Any] = {
        "largest_batch": {
            "samples": len(batch) // settings.train.rows_per_sample,
            "tokens": tokens_of(batch, settings.train, family),
        },
        "largest_sample": tokens_of([largest] * settings.train.rows_per_sample, settings.train, family),
        "memory": {**asdict(memory), "total": memory.total},
        "host_memory": host.offloaded,
        "host": {**asdict(host), "total": host.total},
    } | ({"recomputed_blocks": choices} if choices else {})
    report |= {"gpus": gpus} if settings.train.fsdp and gpus > 1 else {}
    if chosen:
        report["chosen"] = {"words": chosen.words(given), "total": chosen.memory, "recomputed": chosen.recomputed}
    if capacity is None:
        return report
    most = most_tokens(transformer, settings, largest, capacity, gpus)
    report |= {"gpu_memory": capacity, "fits": is_possible and memory.total <= capacity, "max_tokens": most}
    if report["fits"]:
        return report
    return {**report, "do": savings(transformer, settings, batch, most, capacity, image, gpus)}


def by_recomputed_blocks(settings: Config, workload: Workload, capacity: int | None) -> list[dict[str, Any]]:
    """Memory, and time relative to all blocks recomputed, for each quarter of the blocks and for as many as a run with
    train.gradient_checkpointing=auto recomputes on a GPU with this capacity."""
    layers, size = int(workload.transformer["num_layers"]), float("inf") if capacity is None else capacity
    machine = Machine(card_of(None, size), SAFE * size)
    compiles = may_compile(settings.train) if settings.train.compile == "auto" else settings.train.compile
    settings = changed(settings, {COMPILE: compiles})
    found = list(candidates(workload.transformer, settings, workload.batch, machine, Open({}), workload.image))
    choice = choose(found, settings, machine)
    counts = {layers * quarter // 4 for quarter in range(5)}
    counts |= set() if capacity is None else {(choice.best[0] if choice.best else choice.nearest).recomputed}
    by_count = {each.recomputed: each for each in found if not each.keeps_attention}
    return [
        {
            "blocks": count,
            "memory": by_count[count].memory,
            "time": round(by_count[count].seconds / by_count[layers].seconds, 3),
        }
        for count in sorted(counts)
    ]


def chosen_by_run(settings: Config, workload: Workload, capacity: int) -> Choice:
    """The choice of a run with train.memory=auto."""
    machine, given = Machine(card_of(None, capacity), capacity), settings.train.compile
    compiles = ((True, False) if may_compile(settings.train) else (False,)) if given == "auto" else (given,)
    left_open = Open.of_run(settings, machine, compiles)
    found = candidates(workload.transformer, settings, workload.batch, machine, left_open, workload.image)
    return choose(list(found), settings, machine)


SHOWN = 3
"""The candidates of `plan --fit`: the fastest, and the two next best."""


def fit(settings: Config, workload: Workload, machine: Machine) -> dict[str, Any]:
    """The fastest settings that fit, one of each kind, as a JSON value; the nearest where none does.

    The fastest that leaves the result the same is always one of them, if there is any.
    """
    settings, transformer = with_layout(settings, ACCELERATOR), workload.transformer
    left_open = Open.of_plan(settings, machine, transformer)
    found = list(candidates(transformer, settings, workload.batch, machine, left_open, workload.image))
    memory = predict_memory(transformer, settings, workload.batch)
    host = predict_host_memory(transformer, settings, workload.batch, memory)
    of_program = host.total - host.offloaded
    left = None if machine.host_memory is None else machine.host_memory - of_program
    choice = choose(found, settings, replace(machine, host_memory=left))
    shown = choice.best[:SHOWN]
    exact = [each for each in choice.best if each.is_exact(settings)]
    shown += exact[:1] if not any(each in shown for each in exact) else []

    def row(each: Candidate) -> dict[str, Any]:
        return {
            "settings": each.changes(settings),
            "words": each.words(settings),
            "memory": each.memory,
            "host_memory": each.host_memory * machine.gpus,
            "recomputed_blocks": each.recomputed,
            "seconds": round(each.seconds, 3),
            "same_result": each.is_exact(settings),
        }

    return {
        "card": machine.card,
        "gpus": machine.gpus,
        "gpu_memory": int(machine.memory),
        "host_memory": None if machine.host_memory is None else int(machine.host_memory * machine.gpus),
        "host_of_program": of_program * machine.gpus,
        "blocks": int(transformer["num_layers"]),
        "choices": [row(each) for each in shown],
        "nearest": None if choice.best else row(choice.nearest),
    }


def most_tokens(
    transformer: dict[str, Any], settings: Config, largest: SampleSize, capacity: int, gpus: int = 1
) -> int | None:
    """The largest train.max_tokens that fits, for copies of the largest sample; None if that sample alone does not fit.

    Memory is linear in tokens, except in the smallest batches, where the optimizer's update takes more.
    """
    alone = [largest] * settings.train.rows_per_sample
    if predict_memory(transformer, settings, alone, processes=gpus).total > capacity:
        return None
    tokens = tokens_of(alone, settings.train, family_of_transformer(transformer))
    count = math.ceil(LINEAR_FROM / tokens)
    one, two = (predict_memory(transformer, settings, alone * n, processes=gpus).total for n in (count, 2 * count))
    return max(tokens, math.floor(count * tokens * (1 + (capacity - one) / (two - one))))


def savings(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    most: int | None,
    capacity: int,
    image: SampleSize | None = None,
    gpus: int = 1,
) -> list[str]:
    """Alternative settings under which the batch fits, as text; a smaller batch comes first, if that is possible."""
    fitting = [f"train.max_tokens={most}"] if most and len(batch) > settings.train.rows_per_sample else []
    for changes in SAVINGS:
        lossy = "model.quantization" in changes
        if lossy and (settings.train.method == "full" or "quantization_config" in transformer):
            continue
        with suppress(ConfigError, ModelError):  # not possible with these settings or this model
            if changes.get("train.offload_blocks") == FEWEST:
                changes = {**changes, "train.offload_blocks": fewest_blocks(transformer, settings, batch, capacity)}
            other = changed(settings, changes)
            if other == settings:
                continue
            total = predict_memory(transformer, other, batch, image=image, processes=gpus).total
            if total > capacity:
                continue
            words = " ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())
            fitting.append(f"{words} ({human_bytes(total)})".replace('"', ""))
    return fitting


def fewest_blocks(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], capacity: int) -> int:
    """The smallest train.offload_blocks under which the batch fits; all blocks if it never does."""
    changes = {"train.gradient_checkpointing": True, "train.offload_blocks": transformer["num_layers"]}
    every = changed(settings, changes)
    left = capacity - predict_memory(transformer, every, batch).total
    stay = max(0, left) / (1 + FRAGMENTATION) // block_bytes(transformer, every)
    return int(max(transformer["num_layers"] - stay, 1))


def transformer_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the model's transformer, with the quantisation of a single file; ModelError if it is not one that
    is trained."""
    path = config_path(model, "transformer")
    config = read_config(path)
    class_name(config, path)
    return config if model.transformer is None else open_single_file(model.transformer, config).config(config)


def config_path(model: ModelConfig, component: str) -> Path:
    """config.json of a component; from the hub, only that file is downloaded, and none of a recorded model."""
    name = check_name(model.path)
    if Path(name).is_dir():
        return Path(name) / component / "config.json"

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        only_here, revision = model.only_here, model.revision
        found = hf_hub_download(name, "config.json", subfolder=component, revision=revision, local_files_only=only_here)
        return Path(found)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        what, do = "no such folder here, and none on the hub", str(error).splitlines()[0]
        raise ModelError(what, where=name, do=do) from None


def check_family(samples: Samples, family: Family, transformer: dict[str, Any]) -> None:
    """ModelError for a cache of another family of models."""
    if family.transformer != transformer["_class_name"]:
        raise ModelError(
            "the cache was built for another model",
            where=samples.folder,
            expected=family_of_transformer(transformer).name,
            found=family.name,
            do="name the model that it was built for, with --model",
        )


# ---- the batches of a run -------------------------------------------------------------------------------------------


class Batched(Protocol):
    """The batches of samples."""

    @property
    def family(self) -> Family: ...
    @property
    def plan(self) -> BatchPlan: ...


def largest_batch(cache: Samples, settings: TrainConfig, batches: Batched) -> tuple[list[SampleSize], SampleSize]:
    """The rows of the batch, and the row, with the most tokens in the first epoch."""
    if not len(cache):
        raise TrainError("the cache has no samples", where=cache.folder, do="run `qwen-cache build`")

    def sizes(positions: Sequence[int]) -> list[SampleSize]:
        found = []
        for row in (cache.row(batches.plan.sample(position)).meta for position in positions):
            without_target = row.inputs.target is None
            found.append(SampleSize(row.img_shapes, row.text_length, row.image_positions, without_target))
            if settings.trains_rejected and row.rejected_shape:
                rejected = found[-1]._replace(img_shapes=(row.rejected_shape, *row.img_shapes[1:]))
                if settings.dpo.beta is not None:
                    found.append(rejected)
                elif token_count(rejected.img_shapes) > token_count(row.img_shapes):
                    found[-1] = rejected
        return found

    def tokens(batch: Sequence[SampleSize]) -> int:
        return tokens_of(batch, settings, batches.family)

    consumed, most, largest = 0, sizes([0]), sizes([0])[0]
    while consumed < min(batches.plan.in_epoch, SUMMARISED):
        positions = batches.plan.batch(consumed)
        consumed += len(positions)
        batch = sizes(positions)
        most = max(most, batch, key=tokens)
        largest = max(largest, *batch, key=lambda sample: tokens([sample]))
    return most, largest


def largest_image(cache: Samples | None) -> SampleSize | None:
    """The sample of a validation cache with the most tokens; None without a cache.

    Held-out samples, which are generated alone and without gradients, take less than a batch of such samples.
    """
    rows = [cache.row(i).meta for i in range(len(cache))] if cache is not None else []
    sizes = [SampleSize(row.img_shapes, row.text_length, row.image_positions) for row in rows]
    return max(sizes, key=lambda size: token_count(size.img_shapes) + size.text_tokens, default=None)
