"""Several caches as one: what training needs of a `Cache`, over the samples of all in turn, each with its weight.

They may differ in resolution, format and compression. Refused are caches for different pipelines, of different
encoders, or stored in different dtypes: which samples share a batch must not change what they are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

from qwen_cache.config import CacheConfig, WeightedCache
from qwen_cache.format.cache import Cache, Sample, open_cache
from qwen_cache.format.errors import ConfigError
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe

COLUMNS = ("key", "target", "text_length", "image_latents", "control_latents", "empty_prompt_embeds")
"""Of the index, what all formats have alike and training asks of all samples at once."""
SAME = ("pipeline", "vae", "text_encoder", "processor", "template", "picture_template", "positions")
"""What recipes must agree in, where both have it: an imported cache says less of how it was made."""


class Mixture:
    """The samples of `caches`, those of the first, then those of the second, and so on."""

    def __init__(self, caches: Sequence[Cache], weights: Sequence[float]) -> None:
        for other in caches:
            _check_alike(caches[0], other)
        self.caches, self.weights = tuple(caches), tuple(weights)
        self.ends = list(accumulate(map(len, caches)))
        self.table = pa.concat_tables([cache.table.select(COLUMNS) for cache in caches])
        parts = [[cache.identity, weight] for cache, weight in zip(caches, weights, strict=True)]
        self.recipe = Recipe(caches[0].recipe.recipe, len(self), content_hash(canonical_json(parts)))

    @property
    def folder(self) -> str:
        """Where all of it lies, in words."""
        return " and ".join(str(cache.folder) for cache in self.caches)

    @property
    def identity(self) -> str:
        """The hash of all identities and weights in order."""
        return self.recipe.identity

    @property
    def prompt_embeds_width(self) -> int:
        return self.caches[0].prompt_embeds_width

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, position: int) -> Sample:
        cache, place = self._locate(position)
        return cache[place]

    def row(self, position: int) -> IndexRow:
        cache, place = self._locate(position)
        return cache.row(place)

    def prefetch(self, positions: Iterable[int]) -> None:
        places = defaultdict(list)
        for cache, place in map(self._locate, positions):
            places[cache].append(place)
        for cache, each in places.items():
            cache.prefetch(each)

    def stop_prefetch(self) -> None:
        for cache in self.caches:
            cache.stop_prefetch()

    def _locate(self, position: int) -> tuple[Cache, int]:
        if not 0 <= position < len(self):
            raise IndexError(f"sample {position} of {len(self)}")
        which = bisect_right(self.ends, position)
        return self.caches[which], position - (self.ends[which] - len(self.caches[which]))


def open_mixture(parts: Sequence[WeightedCache], config: CacheConfig) -> Mixture:
    """The caches of train.caches; ConfigError where they do not go together."""
    caches = [
        open_cache(
            part.path,
            recipe=part.recipe,
            local_copies=config.local_copies,
            local_copies_size=config.local_copies_size,
        )
        for part in parts
    ]
    for cache in caches:
        if not len(cache):
            do = "run `qwen-cache build`, or leave it out of train.caches"
            raise ConfigError("the cache has no samples", where=cache.folder, do=do)
    return Mixture(caches, [part.weight for part in parts])


def _check_alike(first: Cache, other: Cache) -> None:
    a, b = _about(first), _about(other)
    for what in a:
        if what in b and a[what] != b[what]:
            raise ConfigError(
                f"these caches cannot be trained together: they differ in {what}",
                expected=f"{a[what]}, as in {first.folder}",
                found=f"{b[what]} in {other.folder}",
                do="build both with the same model and cache.dtype, or leave one out of train.caches",
            )


def _about(cache: Cache) -> dict[str, Any]:
    recipe, stored = cache.recipe.recipe, cache.row(0).meta.tensors
    about = {name: recipe[name] for name in SAME if name in recipe}
    for name in ("image_latents", "prompt_embeds"):
        about |= {f"the dtype of {name}": stored[name].dtype, f"the width of {name}": stored[name].shape[1]}
    return about
