"""The samples that a run trains and holds out, the plan of its batches, and its model. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from qwen_cache.batching import BEGIN, BatchPlan, Begin, IntArray, pair_tokens, row_tokens
from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.format.cache import Cache
from qwen_cache.models.family import Family, family_of_recipe
from qwen_cache.models.recorded import recorded_model, same_model, with_recorded_model
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.checks import (
    check_counterparts,
    check_noise_draws,
    check_objective,
    check_targets,
    check_teacher,
    check_text_lengths,
)
from qwen_train.data.samples import Mixture, Samples

# ---- split -----------------------------------------------------------------------------------------------------------
# The validation split: the hash of a sample's target image decides whether it is held out.
#
# The split is stable when the dataset grows, in any order, and when it is rebuilt for another resolution or model. All
# samples of one target are on the same side: validating on another size or instruction of a trained image shows
# nothing. A fraction that leaves nothing to validate or nothing to train is refused.


def split(
    targets: Sequence[str] | pa.ChunkedArray, fraction: float, setting: str = "train.validation_split"
) -> tuple[IntArray, IntArray]:
    """The positions of the trained and of the held-out samples, by the content hashes of their targets.

    About `fraction` of the targets are held out; errors (ConfigError) call it `setting`.
    """
    hashes = (xxhash.xxh3_64_intdigest(target.encode("ascii")) for target in _each(targets))
    held_out = np.fromiter((digest < fraction * 2**64 for digest in hashes), bool, len(targets))
    training, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    for which, left in (("train", training), ("validate", validation)):
        if not len(left):
            raise ConfigError(
                f"{setting} leaves nothing to {which}",
                found=f"{fraction} of {len(set(_each(targets)))} different targets",
                do=f"{'lower' if which == 'train' else 'raise'} {setting}",
            )
    return training, validation


def _each(targets: Sequence[str] | pa.ChunkedArray) -> Iterable[str]:
    """Every hash; those of a column are not all in memory."""
    if not isinstance(targets, pa.ChunkedArray):
        return targets
    return (target for chunk in targets.chunks for target in chunk.to_pylist())


def training_and_validation(samples: Samples, config: TrainConfig) -> tuple[IntArray, IntArray]:
    """The positions of the trained and of the held-out samples; ConfigError without an index to split by."""
    if not config.validation_split or not len(samples):
        return np.arange(len(samples)), np.arange(0)
    if not samples.has_index:
        raise ConfigError(
            "train.validation_split needs the index of a cache, which a run that encodes does not have",
            do="build a cache: `qwen-cache build`",
        )
    return split(samples.column("target"), config.validation_split)


# ---- planning --------------------------------------------------------------------------------------------------------
# What will be trained: held-out samples and the plan of the batches, from the index only and without torch.


@dataclass(frozen=True)
class Planned:
    """The trained and the held-out samples, as positions in the cache, and the batches of the trained ones."""

    training: IntArray
    validation: IntArray
    family: Family
    plan: BatchPlan
    has_targets: bool
    """False for samples of a slider that are images to generate: all of them, or none."""

    @classmethod
    def of(cls, cache: Samples, config: TrainConfig, begin: Begin = BEGIN) -> Planned:
        """The plan from `begin` of a run on; ConfigError or TrainError where nothing can be trained."""
        check_teacher(config)
        check_objective(config)
        check_counterparts(cache, config)
        has_targets = check_targets(cache, config)
        check_text_lengths(cache)
        training, validation = training_and_validation(cache, config)
        family = family_of_recipe(cache.recipe.recipe)
        check_noise_draws(family, config.noise_draws)
        loss_tokens = cache.target_tokens() if config.loss_reduction == "per_token" else None
        counts, joint = cache.token_counts(), family.joint_sequence
        tokens = row_tokens(
            counts,
            joint=joint,
            noise_draws=config.noise_draws,
            target_tokens=cache.target_tokens() if config.noise_draws > 1 else None,
        )
        if config.trains_rejected:
            more = np.stack([cache.rejected_tokens() - cache.target_tokens(), np.zeros_like(counts[0])])
            rejected = row_tokens(counts + more, joint=joint)
            is_pair = config.dpo.beta is not None  # a slider has one of the two at a time
            tokens = pair_tokens(tokens, rejected, config) if is_pair else np.maximum(tokens, rejected)
        one_caption = config.captions == "one"
        if one_caption and not cache.has_index:
            what = "train.captions=one needs the index of a cache, which a run that encodes does not have"
            raise ConfigError(what, do="build a cache: `qwen-cache build`")
        parts = cache.parts(training, one_caption=one_caption)
        plan = BatchPlan(tokens, config, cache.name, parts, loss_tokens, begin)
        return cls(training, validation, family, plan, has_targets)


# ---- the model -------------------------------------------------------------------------------------------------------


def with_model_of_caches(config: Config, samples: Samples | None, components: Sequence[str]) -> Config:
    """`config` with the model that the caches were made with, unless it names one (`with_recorded_model`)."""
    caches = samples.caches if isinstance(samples, Mixture) and config.model.path is None else ()
    named: dict[str, Cache] = {}
    for cache in caches:
        name = recorded_model(cache.folder).get("path")
        if name and not any(same_model(name, other) for other in named):
            named[name] = cache
    if len(named) > 1:
        found = "; ".join(f"{name} by {cache.folder}" for name, cache in named.items())
        raise ModelError("no model is named, and the caches name several", found=found, do="name one with --model")
    for cache in named.values():
        known = (cache.recipe.recipe, cache.manifest.vae_encoders)
        return with_recorded_model(config, cache.folder, components, *known, deciding=("revision", "transformer"))
    return config
