"""What training needs of samples, whichever way they come: `Samples`; and where a run gets them from."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import pyarrow as pa

from qwen_cache.batching.epoch import IntArray, Part
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample, open_configured
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.settings.load import Config
from qwen_train.data.mixture import Mixture, open_mixture
from qwen_train.data.on_the_fly import OnTheFlySamples


@runtime_checkable
class Samples(Protocol):
    """`N` samples by position: of caches (`Mixture`), or encoded as they are needed (`OnTheFlySamples`).

    Another source of samples needs these members and no more.
    """

    has_index: bool
    """Whether `row` and `table` can be read before a sample is."""
    recipe: Recipe

    @property
    def folder(self) -> object:
        """Where they come from, for messages."""

    @property
    def identity(self) -> str:
        """The hash of all keys in order, and of their weights: a resumed run must share it."""

    @property
    def prompt_embeds_width(self) -> int:
        """The width of the text encoder."""

    def column(self, name: str) -> pa.ChunkedArray:
        """`[N]`: a column of the index, such as `key` or `target`; ConfigError without an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> Sample: ...

    def name(self, position: int) -> str:
        """What the source calls the sample."""

    def row(self, position: int) -> IndexRow:
        """What the index says of the sample; ConfigError without an index."""

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""

    def target_tokens(self) -> IntArray:
        """`[N]`: image tokens of the target; ConfigError without an index."""

    def edit_masks(self) -> int:
        """How many samples have an edit mask; ConfigError without an index."""

    def parts(self, training: IntArray) -> Sequence[Part]:
        """The samples at the positions `training`, by how often they come in an epoch."""

    def prefetch(self, positions: Iterable[int]) -> None:
        """Begin to fetch or to encode these samples, and return at once."""

    def stop_prefetch(self) -> None:
        """Give up what `prefetch` has asked for."""


def open_samples(config: Config, encode_from: str | None = None) -> Samples:
    """The cache or caches; or the source `encode_from`, of which another process encodes samples as they are needed."""
    if encode_from is None:
        return (
            open_mixture(config.train.caches, config.cache)
            if config.train.caches
            else Mixture.of(open_configured(config.cache))
        )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        do = "build a cache: `qwen-cache build`"
        raise ConfigError("--encode-on-the-fly is for one training process", found=os.environ["WORLD_SIZE"], do=do)
    return OnTheFlySamples(config, encode_from)
