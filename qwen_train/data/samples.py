"""Samples of several caches: mixture, held-out split, plan of an epoch, samples for validation. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from qwen_cache.batching import (
    BEGIN,
    BatchPlan,
    Begin,
    IntArray,
    MixturePart,
    index_target_tokens,
    index_token_counts,
    pair_tokens,
    row_tokens,
    tensor_rows,
)
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.format.cache import Cache, Sample, open_configured
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.format.index import INDEX_NAME, REJECTED_LATENTS, SLIDER, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Recipe
from qwen_cache.format.rows import Words, hash_words, taken
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.family import QWEN_IMAGE_21, SUPPORTED, Family, family_of_recipe, same_inputs
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.recorded import PARTS, differing_encoder, recorded_model, same_model, with_recorded_model
from qwen_cache.settings.load import CONFIG_NAME, MAX_BYTES, Config, parse_yaml
from qwen_cache.settings.sections import (
    NO_CACHE,
    CacheConfig,
    SliderConfig,
    TrainConfig,
    ValidationConfig,
    ValidationPrompt,
    WeightedCache,
)
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.terminal import console, plural
from qwen_cache.text import plain
from qwen_train.run import GENERATE, ToEncode

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


# ---- mixture ---------------------------------------------------------------------------------------------------------
# One or more weighted caches as the samples of a run, concatenated.
#
# The caches may differ in resolution, format and compression, and text to image goes with edits of the same family.
# Caches of different encoders, in different dtypes or for different editing pipelines are refused: sharing a batch must
# not change a sample.

COLUMNS = ("key", "target", "text_length", "image_latents", "control_latents", "empty_prompt_embeds")
"""Index columns that all formats have, and that training reads of all samples at once."""
ENCODERS = ("vae", "text_encoder")
MUST_MATCH = ("pipeline", *ENCODERS, "processor", "template", "picture_template", "positions")
"""Recipe entries that must be equal where both recipes have them; an imported cache records fewer. Between text to
image and edits, which have templates of their own, only `ENCODERS`."""


class Mixture:
    """The samples of `caches`, one cache after the other; ConfigError if the caches do not fit together."""

    has_index = True

    def __init__(self, caches: Sequence[Cache], entries: Sequence[WeightedCache]) -> None:
        for cache in caches:
            if not len(cache):
                do = "run `qwen-cache build`" + (", or remove it from train.caches" if len(caches) > 1 else "")
                raise ConfigError("the cache has no samples", where=cache.folder, do=do)
        for one, other in combinations(caches, 2):
            names = entries_to_match(one.recipe.recipe, other.recipe.recipe)
            a, b = _compared_properties(one, names), _compared_properties(other, names)
            if _have_equal_latents(a, b, one, other):
                del a["vae"]
            for what in a:
                if what in b and a[what] != b[what]:
                    raise ConfigError(
                        f"these caches cannot be trained together: they differ in {what}",
                        expected=f"{a[what]}, as in {one.folder}",
                        found=f"{b[what]} in {other.folder}",
                        do="build both with the same model, cache.dtype and cache.text_quantization, or remove one "
                        "from train.caches",
                    )
        self.caches, self.entries = tuple(caches), tuple(entries)
        self.ends = list(accumulate(map(len, caches)))
        self.table = pa.concat_tables([cache.table.select(COLUMNS) for cache in caches])
        weighted = [[cache.identity, *_trained_as(entry)] for cache, entry in zip(caches, entries, strict=True)]
        is_one = len(caches) == 1 and weighted[0][1:] == [1.0]
        identity = caches[0].identity if is_one else content_hash(canonical_json(weighted))
        self.pipelines: tuple[str, ...] = tuple(
            dict.fromkeys(str(cache.recipe.recipe.get("pipeline")) for cache in caches)
        )
        edits = next((cache for cache in caches if "condition_image_size" in cache.recipe.recipe), caches[0])
        self.recipe = Recipe(edits.recipe.recipe, len(self), identity)

    @classmethod
    def of(cls, cache: Cache) -> Mixture:
        """A single cache; the identity is the cache's."""
        return cls([cache], [WeightedCache(path=str(cache.folder))])

    @property
    def folder(self) -> str:
        """The folders of all caches, as text."""
        return " and ".join(str(cache.folder) for cache in self.caches)

    @property
    def identity(self) -> str:
        """The hash of all identities, weights and roles in order."""
        return self.recipe.identity

    @property
    def lasting_identity(self) -> str:
        """The hash of all recipes, format versions, weights and roles in order: it stays while the caches grow."""
        each = [
            [cache.recipe.id, cache.format_version, *_trained_as(entry)]
            for cache, entry in zip(self.caches, self.entries, strict=True)
        ]
        return content_hash(canonical_json(each))

    @property
    def prompt_embeds_width(self) -> int:
        return self.caches[0].prompt_embeds_width

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, position: int) -> Sample:
        cache, local_position = self._locate(position)
        return cache[local_position]

    def row(self, position: int) -> IndexRow:
        cache, local_position = self._locate(position)
        return cache.row(local_position)

    def column(self, name: str) -> pa.ChunkedArray:
        """`[N]`: one of `COLUMNS`."""
        return self.table[name]

    def name(self, position: int) -> str:
        return self.row(position).name

    def of_cache(self, position: int) -> WeightedCache:
        return self.entries[self._which(position)]

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""
        each = [index_token_counts(cache.table, cache.folder / INDEX_NAME) for cache in self.caches]
        return np.concatenate(each, axis=1)

    def target_tokens(self) -> IntArray:
        """`[N]`: image tokens of the target, or of the image to generate."""
        return np.concatenate([index_target_tokens(cache.table, cache.folder / INDEX_NAME) for cache in self.caches])

    def rejected_tokens(self) -> IntArray:
        """`[N]`: image tokens of the rejected image; 0 where a sample has none."""
        each = [
            tensor_rows(cache.table[REJECTED_LATENTS], cache.folder / INDEX_NAME)
            if REJECTED_LATENTS in cache.table.column_names
            else np.zeros(len(cache), np.int64)
            for cache in self.caches
        ]
        return np.concatenate(each)

    def without_direction(self) -> int:
        """The number of samples without the two prompts of a slider."""
        tables = [cache.table for cache in self.caches]
        return sum(t[SLIDER[0]].null_count if SLIDER[0] in t.column_names else len(t) for t in tables)

    def edit_masks(self) -> int:
        """The number of samples with an edit mask; v1 has none."""
        tables = [cache.table for cache in self.caches]
        return sum(len(t) - t["edit_mask"].null_count for t in tables if "edit_mask" in t.column_names)

    def parts(self, training: IntArray, *, one_caption: bool = False) -> list[MixturePart]:
        """The samples at the positions `training`, by cache, each part with the weight of its cache."""
        each = np.split(training, np.searchsorted(training, self.ends[:-1]))
        begins = [end - len(cache) for end, cache in zip(self.ends, self.caches, strict=True)]
        return [
            _by_image(cache, samples - begin, begin, entry.weight)
            if one_caption
            else MixturePart(samples, entry.weight)
            for cache, samples, begin, entry in zip(self.caches, each, begins, self.entries, strict=True)
        ]

    def prefetch(self, positions: Iterable[int]) -> None:
        by_cache = defaultdict(list)
        for cache, local_position in map(self._locate, positions):
            by_cache[cache].append(local_position)
        for cache, local_positions in by_cache.items():
            cache.prefetch(local_positions)

    def stop_prefetch(self) -> None:
        for cache in self.caches:
            cache.stop_prefetch()

    def _locate(self, position: int) -> tuple[Cache, int]:
        which = self._which(position)
        return self.caches[which], position - (self.ends[which] - len(self.caches[which]))

    def _which(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        return bisect_right(self.ends, position)


def _by_image(cache: Cache, rows: IntArray, begin: int, weight: float) -> MixturePart:
    """The samples in these rows of a cache, those of the same images as alternatives; the first row has the position
    `begin`. The number of image tokens tells sizes of one image apart, which are no alternatives."""
    where = cache.folder / INDEX_NAME
    table = taken(cache.table.select(["target", "controls", "source_rows"]), rows)
    tokens = index_token_counts(cache.table, where)[0][rows].astype(np.uint64)
    image = _numbered(np.column_stack([tokens, hash_words(table["target"], where), _of_each(table["controls"], where)]))
    times = table["source_rows"].to_numpy()
    order = np.argsort(image, kind="stable")
    counts = np.bincount(image, times).astype(np.int64)
    return MixturePart(np.repeat(begin + rows[order], times[order]), weight, np.cumsum(counts) - counts)


def _of_each(lists: pa.ChunkedArray, where: object) -> Words:
    """`[N, …]`: the hashes of each list as numbers, zeros where it is shorter than the longest, and its length."""
    words, lengths = hash_words(pc.list_flatten(lists), where), pc.list_value_length(lists).to_numpy()
    matrix: Words = np.zeros((len(lists), lengths.max(initial=0), 2), np.uint64)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = words
    return np.column_stack([matrix.reshape(len(lists), 2 * matrix.shape[1]), lengths.astype(np.uint64)])


def _numbered(values: Words) -> IntArray:
    """`[N]`: equal rows of `values` get equal numbers, from 0 on in the order in which they come first."""
    order = np.lexsort(values.T)  # keeps the order of equal ones
    in_order = values[order]
    is_first = np.ones(len(values), bool)
    is_first[1:] = (in_order[1:] != in_order[:-1]).any(axis=1)
    firsts = order[is_first]
    numbers: IntArray = np.empty(len(values), np.int64)
    numbers[order] = np.argsort(np.argsort(firsts))[np.cumsum(is_first) - 1]
    return numbers


def open_mixture(parts: Sequence[WeightedCache], config: CacheConfig) -> Mixture:
    """The caches of train.caches; ConfigError if they do not fit together."""
    caches = [open_configured(config.model_copy(update={"recipe": part.recipe}), part.path) for part in parts]
    return Mixture(caches, parts)


def _trained_as(entry: WeightedCache) -> list[float | bool]:
    """The settings of how the samples of a cache are trained: its weight, then what differs from the defaults."""
    return [entry.weight, *([entry.teacher, entry.loss_weight] if entry.teacher or entry.loss_weight != 1 else [])]


def _have_equal_latents(a: Mapping[str, Any], b: Mapping[str, Any], *caches: Cache) -> bool:
    """True if the VAEs of two recipes are known to differ in their decoders alone."""
    known = {vae: encoder for cache in caches for vae, encoder in cache.manifest.vae_encoders.items()}
    of_both = [known.get(str(recipe.get("vae"))) for recipe in (a, b)]
    return of_both[0] is not None and of_both[0] == of_both[1]


def entries_to_match(recipe: Mapping[str, Any], other: Mapping[str, Any]) -> Sequence[str]:
    """The settings of `MUST_MATCH` that two recipes must share where both have them."""
    pipelines = [each.get("pipeline") for each in (recipe, other)]
    return ENCODERS if pipelines[0] != pipelines[1] and same_inputs(*pipelines) else MUST_MATCH


def _compared_properties(cache: Cache, names: Sequence[str]) -> dict[str, Any]:
    recipe, stored = cache.recipe.recipe, cache.row(0).meta.tensors
    properties = {name: recipe[name] for name in names if name in recipe}
    properties["text_quantization"] = recipe.get("text_quantization", "none")
    for name in (each for each in ("image_latents", "prompt_embeds") if each in stored):
        properties |= {f"the dtype of {name}": stored[name].dtype, f"the width of {name}": stored[name].shape[1]}
    return properties


# ---- samples ---------------------------------------------------------------------------------------------------------
# `Samples`, the interface of a run's data source, and `open_samples`, which opens the configured one.


@runtime_checkable
class Samples(Protocol):
    """`N` samples by position: of caches (`Mixture`), or encoded on demand (`ServedSamples`).

    A new data source needs exactly these members.
    """

    has_index: bool
    """True if `row` and `column` are available without reading samples."""
    recipe: Recipe
    """The recipe; of several caches that of one with edits, if any is."""
    pipelines: tuple[str, ...]
    """The pipelines that the samples were encoded for, each once."""

    @property
    def folder(self) -> object:
        """The origin of the samples, for messages."""

    @property
    def identity(self) -> str:
        """The hash of all keys in order and of their weights; a resumed run must share it."""

    @property
    def prompt_embeds_width(self) -> int:
        """The width of the text encoder."""

    def column(self, name: str) -> pa.ChunkedArray:
        """`[N]`: a column of the index, such as `key` or `target`; ConfigError without an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Sample: ...

    def name(self, position: int) -> str:
        """The sample's name in the source."""

    def of_cache(self, position: int) -> WeightedCache:
        """The entry of `train.caches` that has the sample; with its defaults if there are none."""

    def row(self, position: int) -> IndexRow:
        """The sample's row in the index; ConfigError without an index."""

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""

    def target_tokens(self) -> IntArray:
        """`[N]`: image tokens of the target, or of the image to generate."""

    def rejected_tokens(self) -> IntArray:
        """`[N]`: image tokens of the rejected image; 0 where a sample has none."""

    def without_direction(self) -> int:
        """The number of samples without the two prompts of a slider; ConfigError without an index."""

    def edit_masks(self) -> int:
        """The number of samples with an edit mask; ConfigError without an index."""

    def parts(self, training: IntArray, *, one_caption: bool = False) -> Sequence[MixturePart]:
        """The samples at the positions `training`, grouped by their frequency in an epoch.

        With `one_caption`, which needs an index, samples that differ in their prompt alone are alternatives.
        """

    def prefetch(self, positions: Iterable[int]) -> None:
        """Begin to fetch or to encode these samples, and return at once."""

    def stop_prefetch(self) -> None:
        """Cancel the requests of `prefetch`."""


def open_samples(config: Config, to_encode: ToEncode | None = None) -> Samples:
    """The cache or caches of `config`; or those of a source, encoded on demand by a server."""
    if to_encode is None:
        return (
            open_mixture(config.train.caches, config.cache)
            if config.train.caches
            else Mixture.of(open_configured(config.cache))
        )
    from qwen_train.data.served import ServedSamples  # its client is an extra

    return ServedSamples(config, to_encode)


# ---- planning --------------------------------------------------------------------------------------------------------
# What will be trained: held-out samples and the plan of the batches, from the index only and without torch.
#
# Refused: a cache without samples, with inputs that the transformer does not take or of another width, samples without
# target, caption dropout where samples lack the empty prompt, and several noise draws where nothing can be computed
# once for all. Edits and text to image go with either transformer of a family; `unusual_controls` says where that is
# not what it was made for.

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
        if config.dpo.beta is not None:
            rejected = counts + np.stack([cache.rejected_tokens() - cache.target_tokens(), np.zeros_like(counts[0])])
            tokens = pair_tokens(tokens, row_tokens(rejected, joint=joint), config)
        elif config.slider.direction == "images":  # one of the two at a time
            rejected = counts + np.stack([cache.rejected_tokens() - cache.target_tokens(), np.zeros_like(counts[0])])
            tokens = np.maximum(tokens, row_tokens(rejected, joint=joint))
        one_caption = config.captions == "one"
        if one_caption and not cache.has_index:
            what = "train.captions=one needs the index of a cache, which a run that encodes does not have"
            raise ConfigError(what, do="build a cache: `qwen-cache build`")
        parts = cache.parts(training, one_caption=one_caption)
        plan = BatchPlan(tokens, config, cache.name, parts, loss_tokens, begin)
        return cls(training, validation, family, plan, has_targets)


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


# ---- validation cache ------------------------------------------------------------------------------------------------
# The cache whose samples are generated during training: opened and checked by its index alone, without torch.
#
# Refused: a cache of another pipeline, VAE or text encoder than the cache in training, one of other prompts than the
# settings have, prompts that are in no cache, guidance where its samples lack the empty prompt, strengths of what has
# none, and a device for decoding where no images are generated.


def open_validation_cache(config: Config, to_encode: ToEncode | None = None) -> Mixture | None:
    """The cache of `validation.cache`, or the one inside `cache.path` if that is what the run trains on; None without.

    Raises ConfigError if its prompts are not those of the settings or were never encoded, and for
    `validation.vae_device` if no images are generated; and the errors of `open_cache` and of `validation_strengths`.
    """
    settings, path = config.validation, config.validation_cache
    at = f" --at {to_encode.at}" if to_encode and to_encode.at else ""
    build = f"`qwen-cache build --only-validation{at}`"
    is_given, may_be_inside = settings.cache is not None, to_encode is None and not config.train.caches
    if path != NO_CACHE and (is_given or (may_be_inside and (location(path) / MANIFEST_NAME).is_file())):
        cache = Mixture.of(open_configured(config.cache, path))
        _check_prompts(settings, path, build)
        validation_strengths(config)
        return cache
    if not is_given and (settings.prompts or settings.source):
        set_cache = "" if may_be_inside else f", and set validation.cache={path}"
        raise ConfigError(
            "the images to generate are not in a cache",
            where=path if may_be_inside else None,
            found="validation.prompts" if settings.prompts else f"validation.source={settings.source}",
            do=f"encode them with {build}{set_cache}; or set validation.cache=none",
        )
    if settings.vae_device and not settings.num_images:
        raise ConfigError(
            "validation.vae_device decodes images, and this run generates none",
            found=f"validation.vae_device={settings.vae_device}",
            do=f"{GENERATE}; or remove validation.vae_device",
        )
    if settings.num_images:
        validation_strengths(config)
    return None


def validation_strengths(config: Config) -> tuple[float, ...]:
    """The strengths of the LoRA in validation images; ConfigError beside several scales, or of what has none."""
    settings, train = config.validation, config.train
    usual = (-2.0, -1.0, 0.0, 1.0, 2.0) if train.slider.direction else (1.0,)
    strengths = tuple(settings.lora_weight or usual)
    if len(strengths) > 1 and len(settings.true_cfg_scale) > 1:
        raise ConfigError(
            "validation images vary over scales or over strengths",
            found=f"validation.true_cfg_scale={settings.true_cfg_scale} and lora_weight {list(strengths)}",
            do="give one value of one of them, such as validation.lora_weight=1",
        )
    kind = train.lora.type
    reasons = {
        "train.method=full": train.method == "full",
        "train.lora.type=oft": kind == "oft",
        "train.lora.use_dora": kind == "lora" and train.lora.use_dora,
    }
    for setting, given in reasons.items():
        if given and strengths != (1.0,):
            raise ConfigError(
                f"validation.lora_weight and {setting} exclude each other: it can only be switched on and off",
                found=setting,
                do="leave validation.lora_weight out",
            )
    return strengths


def _check_prompts(settings: ValidationConfig, path: str, build: str) -> None:
    """ConfigError if the settings that the cache was built with, as far as it has them, name other images to generate.

    A cache that `validation.cache` names, without prompts beside it, is taken as it is; so is a source that was given
    to `build` alone.
    """
    file = location(path) / CONFIG_NAME
    if not file.is_file():
        return
    data = file.read_bytes(MAX_BYTES) if is_remote(file) else read_file(file, MAX_BYTES)
    saved = parse_yaml(data.decode("utf-8", "replace"), file)
    built = saved.get("validation") if isinstance(saved, dict) else None
    if not isinstance(built, dict):
        return
    if (settings.prompts or settings.cache is None) and (was := _prompts(built.get("prompts"))) != settings.prompts:
        name, expected, found = "prompts", _counted(settings.prompts), _counted(was)
    elif settings.source is not None and built.get("source") != settings.source:
        name, expected, found = "source", settings.source, str(built.get("source"))
    else:
        return
    empty = "[]" if name == "prompts" else "null"
    also = f" and validation.{name}={empty}" if getattr(settings, name) else ""
    first = f"run {build}, or " if settings.prompts or settings.source else ""
    raise ConfigError(
        f"the validation cache was built from another validation.{name}",
        where=file,
        expected=expected,
        found=found,
        do=f"{first}set validation.cache={path}{also} to generate what it has, or validation.cache=none",
    )


def _prompts(written: object) -> list[ValidationPrompt]:
    """The prompts that a settings file has; without those that this version cannot read."""
    prompts = []
    for each in written if isinstance(written, list) else []:
        with suppress(ValueError):
            prompts.append(ValidationPrompt.model_validate(each))
    return prompts


def _counted(prompts: Sequence[ValidationPrompt]) -> str:
    """How many prompts, and what they are."""
    return ": ".join(filter(None, (plural(len(prompts), "prompt"), "; ".join(it.prompt for it in prompts))))


def check_validation_cache(cache: Mixture, samples: Samples, settings: ValidationConfig) -> None:
    """ConfigError or TrainError for a cache that was encoded differently than `samples`, or that lacks something."""
    ours, theirs = cache.recipe.recipe, samples.recipe.recipe
    caches = (*cache.caches, *(samples.caches if isinstance(samples, Mixture) else ()))
    equal = {"vae"} if _have_equal_latents(ours, theirs, *caches) else set[str]()
    for entry in (name for name in entries_to_match(ours, theirs) if name not in equal):
        if entry in ours and entry in theirs and ours[entry] != theirs[entry]:
            raise ConfigError(
                f"the validation cache does not fit the cache in training: they differ in {entry}",
                where=cache.folder,
                expected=f"{theirs[entry]}, as in {samples.folder}",
                found=ours[entry],
                do="build both with the same model, or name another one in validation.cache",
            )
    missing, scale = cache.column("empty_prompt_embeds").null_count, max(settings.true_cfg_scale)
    if missing and scale > 1:
        found = f"{missing} of {len(cache)} samples without them, validation.true_cfg_scale={scale}"
        raise no_empty_prompt("guidance", cache.folder, found, "validation.true_cfg_scale=1")
