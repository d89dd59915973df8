"""Refusals of samples that a run cannot train with its model and settings, and notes on what is unusual. No torch.

Refused: a cache without samples, with inputs that the transformer does not take or of another width, samples without
target, caption dropout where samples lack the empty prompt, and several noise draws where nothing can be computed
once for all. Edits and text to image go with either transformer of a family; `unusual_controls` says where that is
not what it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from qwen_cache.batching import tensor_rows
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.family import QWEN_IMAGE_21, SUPPORTED, Family, family_of_recipe, same_inputs
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.recorded import PARTS, differing_encoder, recorded_model, same_model
from qwen_cache.settings.sections import SliderConfig, TrainConfig
from qwen_cache.terminal import console, plural
from qwen_cache.text import plain
from qwen_train.data.samples import Mixture, Samples

LONGEST_SIDE = 2048
"""Tokens: more than the side of an image that can be trained has."""
NAMED = 10


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


def check_objective(config: TrainConfig) -> None:
    """ConfigError for settings that `train.dpo` or `train.slider` cannot be combined with."""
    dpo, slider = config.dpo.beta is not None, config.slider.direction
    if not dpo and not slider:
        return
    name = "train.dpo" if dpo else "train.slider"
    by_prompts = slider == "prompts"
    excluded = {
        "train.slider": (dpo and slider, "a sample is learnt in one way"),
        "train.method=full": (config.method == "full", "both need the model with its LoRA switched off or reversed"),
        "teacher: true in train.caches": (
            any(entry.teacher for entry in config.caches),
            "a sample learns from the teacher or from its other image or prompts",
        ),
        "train.follow=true": (config.follow, "a later commit may have samples without these"),
        f"train.noise_draws={config.noise_draws}": (config.noise_draws > 1, "a sample has one noise level"),
        f"train.loss_type={config.loss_type}": (dpo and config.loss_type != "mse", "it compares squared errors"),
        f"train.loss_reduction={config.loss_reduction}": (
            config.loss_reduction != "per_sample" and not by_prompts,
            "a pair counts once, whatever the sizes of its images",
        ),
        f"train.edit_mask_weight={config.edit_mask_weight:g}": (
            config.edit_mask_weight != 1 and not by_prompts,
            "the mask is that of the target alone",
        ),
        "train.lora.type=oft": (slider and config.lora.type == "oft", "a rotation has no strength"),
        "train.lora.use_dora": (
            slider and config.lora.type == "lora" and config.lora.use_dora,
            "the magnitude of a DoRA has no sign",
        ),
    }
    for setting, (given, reason) in excluded.items():
        if given:
            raise ConfigError(
                f"{name} and {setting} exclude each other: {reason}",
                found=f"{name}.{f'beta={config.dpo.beta:g}' if dpo else f'direction={slider}'} and {setting}",
                do="leave one of them out",
            )


def check_counterparts(cache: Samples, config: TrainConfig) -> None:
    """ConfigError where `train.dpo` or `train.slider` lacks rejected images or prompts of a direction."""
    dpo, slider = config.dpo.beta is not None, config.slider.direction
    name = "train.dpo" if dpo else f"train.slider.direction={slider}"
    if not dpo and not slider:
        return
    if not cache.has_index:
        raise ConfigError(
            f"{name} needs the index of a cache, which a run that encodes does not have",
            do="build a cache: `qwen-cache build`",
        )
    what, where = "rejected image", "a rejected image each (data.columns.rejected)"
    lacking = int((cache.rejected_tokens() == 0).sum())
    if slider == "prompts":
        what, where = "positive and negative prompt", "both prompts (data.positive_prompt and data.negative_prompt)"
        lacking = cache.without_direction()
    if lacking:
        raise ConfigError(
            f"{name} learns from the {what} of each sample, and samples have none",
            where=cache.folder,
            found=f"{lacking} of {plural(len(cache), 'sample')} without {what}",
            do=f"build the cache from rows with {where}, or leave {name.partition('=')[0]} out",
        )


def check_targets(cache: Samples, config: TrainConfig) -> bool:
    """True if the samples have targets; ConfigError for samples without, unless they are all those of a slider."""
    without = cache.column("target").null_count if cache.has_index else 0
    if not without:
        if config.slider.num_inference_steps != SliderConfig().num_inference_steps:
            raise ConfigError(
                "train.slider.num_inference_steps is for samples without target, and all have one",
                where=cache.folder,
                found=f"train.slider.num_inference_steps={config.slider.num_inference_steps}",
                do="leave it out",
            )
        return True
    found = f"{without} of {len(cache)} samples without target"
    if config.slider.direction != "prompts":
        raise ConfigError(
            "samples without target cannot be trained: they are images to generate, for validation",
            where=cache.folder,
            found=found,
            do="train a cache that `qwen-cache build` made from targets, and name this one as validation.cache",
        )
    if without < len(cache):
        what, do = "a slider is trained on targets or on generated images", "train one cache of each kind"
        raise ConfigError(what, where=cache.folder, found=found, do=do)
    if config.validation_split:
        raise ConfigError(
            "train.validation_split holds out targets, and the samples have none",
            where=cache.folder,
            found=f"train.validation_split={config.validation_split}",
            do="set train.validation_split=0; prompts for validation are validation.prompts",
        )
    for setting in ("min_timestep", "max_timestep"):
        if (bound := getattr(config, setting)) != TrainConfig.model_fields[setting].default:
            raise ConfigError(
                f"train.{setting} bounds sampled noise levels, and samples without target have those of a generation",
                where=cache.folder,
                found=f"train.{setting}={bound:g} and {found}",
                do=f"leave train.{setting} out, or build the cache from rows with targets",
            )
    return False


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


def check_encoders(
    samples: Samples | None,
    model: ModelFolder,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    read: bool = True,
) -> None:
    """ModelError for a cache of other encoders than those in the model's folder, as far as they are there.

    The folder's text encoder is not compared with a single file that encoded the cache. A note names the model that a
    cache was built with, if it has another name: transformers share encoders. Unless `read` is true, only what was
    hashed before is compared.
    """
    for cache in samples.caches if isinstance(samples, Mixture) else ():
        recipe, recorded = cache.recipe.recipe, recorded_model(cache.folder)
        if not same_inputs(recipe.get("pipeline"), model.pipeline):
            continue  # which is refused for that
        if model.text_encoder is None and "text_encoder" in recorded:
            recipe = {name: value for name, value in recipe.items() if name != "text_encoder"}
        built_with = recorded.get("path", model.name)
        if part := differing_encoder(model, recipe, cache.manifest.vae_encoders, on_bytes, read=read):
            raise ModelError(
                f"the cache was built with another {PARTS[part]} than this model has",
                where=cache.folder,
                expected=f"that of {built_with}" if built_with != model.name else f"{recipe[part]}, as in cache.json",
                found=f"that in {model.path}",
                do="train the model that the cache was built with, or build a cache with this one",
            )
        if not same_model(built_with, model.name):
            text = f"note: {cache.folder} was built with {built_with}, and {model.name} is trained"
            console().print(plain(text), markup=False, highlight=False)


def unusual_controls(model: ModelFolder, with_controls: int, samples: int) -> str | None:
    """A note on an unusual number of samples with controls for a model, in one line; None if nothing is."""
    if with_controls and not model.takes_controls:
        these = f"{with_controls} of {plural(samples, 'sample')}"
        return f"note: there are control images in {these}, but {model.pipeline} is for text to image alone"
    if model.needs_controls and not with_controls:
        return f"note: no sample has a control image, but {model.pipeline} is for editing"
    return None


def unused_parts(samples: Samples, config: TrainConfig) -> Iterator[str]:
    """Notes of a line each on rejected images and directions of sliders that are encoded and not trained."""
    if not samples.has_index:
        return
    rejected = 0 if config.trains_rejected else int((samples.rejected_tokens() > 0).sum())
    directions = 0 if config.slider.direction == "prompts" else len(samples) - samples.without_direction()
    for count, what, setting in (
        (rejected, "a rejected image", "train.dpo.beta"),
        (directions, "the direction of a slider", "train.slider.direction=prompts"),
    ):
        if count:
            these = f"{count} of {plural(len(samples), 'sample')}"
            yield f"note: {these} have {what}, which is not trained: to learn from it, set {setting}"


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
