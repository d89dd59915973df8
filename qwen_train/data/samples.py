"""The samples of a run: those of one or more caches, or of a source that is encoded on demand. Imports no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, combinations
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.batching import (
    IntArray,
    MixturePart,
    index_target_tokens,
    index_token_counts,
    tensor_rows,
)
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache, Sample, open_configured
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.format.index import INDEX_NAME, REJECTED_LATENTS, SLIDER, IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.format.rows import Words, hash_words, taken
from qwen_cache.models.family import same_inputs
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import (
    CacheConfig,
    WeightedCache,
)
from qwen_train.run import ToEncode

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
            if have_equal_latents(a, b, one, other):
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


def have_equal_latents(a: Mapping[str, Any], b: Mapping[str, Any], *caches: Cache) -> bool:
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
