"""What will be trained: held-out samples and the plan of the batches, from the index only and without torch.

Refused: a cache without samples, with inputs that the transformer does not take or of another width, samples without
target, caption dropout where samples lack the empty prompt, and several noise draws where nothing can be computed once
for all. Edits and text to image go with either transformer of a family; `unusual_controls` says where that is not what
it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_cache.batching import BEGIN, BatchPlan, Begin, IntArray, row_tokens, tensor_rows
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.family import QWEN_IMAGE_21, SUPPORTED, Family, family_of_recipe, same_inputs
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.terminal import plural
from qwen_train.data.samples import Samples
from qwen_train.data.split import split

LONGEST_SIDE = 2048
"""Tokens: more than the side of an image that can be trained has."""
NAMED = 10


@dataclass(frozen=True)
class Planned:
    """The trained and the held-out samples, as positions in the cache, and the batches of the trained ones."""

    training: IntArray
    validation: IntArray
    family: Family
    plan: BatchPlan

    @classmethod
    def of(cls, cache: Samples, config: TrainConfig, begin: Begin = BEGIN) -> Planned:
        """The plan from `begin` of a run on; ConfigError or TrainError where nothing can be trained."""
        check_teacher(config)
        check_targets(cache)
        check_text_lengths(cache)
        training, validation = training_and_validation(cache, config)
        family = family_of_recipe(cache.recipe.recipe)
        check_noise_draws(family, config.noise_draws)
        loss_tokens = cache.target_tokens() if config.loss_reduction == "per_token" else None
        tokens = row_tokens(
            cache.token_counts(),
            joint=family.joint_sequence,
            noise_draws=config.noise_draws,
            target_tokens=cache.target_tokens() if config.noise_draws > 1 else None,
        )
        one_caption = config.captions == "one"
        if one_caption and not cache.has_index:
            what = "train.captions=one needs the index of a cache, which a run that encodes does not have"
            raise ConfigError(what, do="build a cache: `qwen-cache build`")
        parts = cache.parts(training, one_caption=one_caption)
        plan = BatchPlan(tokens, config, cache.name, parts, loss_tokens, begin)
        return cls(training, validation, family, plan)


def check_text_lengths(samples: Samples) -> None:
    """TrainError, with the first of them, for texts that are longer than the RoPE table beside their images.

    Nothing is found without an index: whoever encodes refuses them.
    """
    if not samples.has_index:
        return
    family = family_of_recipe(samples.recipe.recipe)
    text = samples.column("text_length").fill_null(0).to_numpy().astype(np.int64)
    controls = tensor_rows(samples.column("control_latents"), samples.folder)
    beside = controls if family.joint_sequence else LONGEST_SIDE // 2
    found = []
    for position in np.flatnonzero(text + beside >= family.rope_positions):  # no side has more tokens than its image
        row = samples.row(int(position))
        if row.meta.text_length > (limit := family.longest_text(row.meta.img_shapes)):
            found.append(f"{samples.name(int(position))} ({row.meta.text_length}, at most {limit})")
    if not found:
        return
    some = ", ".join(found[:NAMED]) + (f", and {len(found) - NAMED} more" if found[NAMED:] else "")
    raise TrainError(
        f"{plural(len(found), 'text')} longer than the RoPE table beside the images",
        where=samples.folder,
        found=f"tokens of {some}",
        do="run the same `qwen-cache build` with --on-error skip: it leaves them out and encodes nothing",
    )


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


def check_teacher(config: TrainConfig) -> None:
    """ConfigError where no teacher is left, or nothing but the teacher."""
    taught = [entry.path for entry in config.caches if entry.teacher]
    if taught and config.method == "full":
        raise ConfigError(
            "the teacher of train.caches is the model with its LoRA switched off, and full training has none",
            where=taught[0],
            found="teacher: true and train.method=full",
            do="set train.method=lora, or remove teacher",
        )
    if taught and len(taught) == len(config.caches):
        raise ConfigError(
            "every cache of train.caches has teacher: true, so the LoRA would learn to change nothing",
            where=", ".join(taught),
            do="add the cache to learn from, or remove teacher from it",
        )


def check_targets(cache: Samples) -> None:
    """ConfigError for samples without target."""
    if cache.has_index and (without := cache.column("target").null_count):
        raise ConfigError(
            "samples without target cannot be trained: they are images to generate, for validation",
            where=cache.folder,
            found=f"{without} of {len(cache)} samples without target",
            do="train a cache that `qwen-cache build` made from targets, and name this one as validation.cache",
        )


def check_noise_draws(family: Family, noise_draws: int) -> None:
    """ConfigError for several draws where nothing can be computed once for all of them."""
    if noise_draws > 1 and not family.joint_sequence:
        raise ConfigError(
            f"train.noise_draws is for {QWEN_IMAGE_21.name}: in {family.name} text and control images attend to the "
            "noisy target, so nothing can be computed once for several draws",
            found=f"train.noise_draws={noise_draws}",
            do="set train.noise_draws=1",
        )


def check_cache(cache: Samples, model: ModelFolder, config: Mapping[str, Any]) -> None:
    """Raise TrainError or ModelError for a cache that does not fit a transformer with this config.json."""
    if not len(cache):
        raise TrainError("the cache has no samples", where=cache.folder, do="run `qwen-cache build`")
    for pipeline in cache.pipelines:
        if same_inputs(pipeline, model.pipeline):
            continue
        raise ModelError(
            "the cache was built for another pipeline",
            where=cache.folder,
            expected=model.pipeline,
            found=pipeline,
            do="train the model that it was built for, or build a cache for this one",
        )
    key = model.family.text_width_key
    if (width := cache.prompt_embeds_width) != config.get(
        key, width
    ):  # another class has no width: refused when loaded
        raise ModelError(
            "the cache's prompt embeddings do not fit the transformer",
            where=cache.folder,
            expected=f"width {config[key]}",
            found=f"width {width}",
            do="build the cache with the text encoder of this model",
        )
    if (channels := config["in_channels"]) != LATENT_CHANNELS:
        raise ModelError(
            "the transformer does not take the latents of a cache",
            where=model.component("transformer"),
            expected=f"in_channels {LATENT_CHANNELS}",
            found=f"in_channels {channels}",
            do=f"train one of {SUPPORTED}",
        )


def unusual_controls(model: ModelFolder, with_controls: int, samples: int) -> str | None:
    """What is unusual about this number of samples with controls for a model, in one line; None if nothing is."""
    if with_controls and not model.takes_controls:
        these = f"{with_controls} of {plural(samples, 'sample')}"
        return f"note: there are control images in {these}, but {model.pipeline} is for text to image alone"
    if model.needs_controls and not with_controls:
        return f"note: no sample has a control image, but {model.pipeline} is for editing"
    return None


def check_empty_prompts(cache: Samples, caption_dropout: float) -> None:
    """Refuse caption dropout where samples lack the empty prompt; an imported cache may lack it."""
    missing = cache.column("empty_prompt_embeds").null_count
    if caption_dropout and missing:
        found = f"{missing} of {len(cache)} samples without them, train.caption_dropout={caption_dropout}"
        raise no_empty_prompt("caption dropout", cache.folder, found, "train.caption_dropout=0")


def no_empty_prompt(what: str, where: object, found: str, setting: str) -> TrainError:
    """The error of what needs the empty prompt; `setting` turns it off."""
    return TrainError(
        f"{what} needs the embeddings of the empty prompt, which this cache lacks",
        where=where,
        found=found,
        do=f"set {setting}, or run `qwen-cache build` on the images",
    )
