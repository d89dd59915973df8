"""`Samples`, the interface of a run's data source, and `open_samples`, which opens the configured one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import pyarrow as pa

from qwen_cache.batching import IntArray, MixturePart
from qwen_cache.format.cache import Sample, open_configured
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import WeightedCache
from qwen_train.data.mixture import Mixture, open_mixture
from qwen_train.run_settings import ToEncode


@runtime_checkable
class Samples(Protocol):
    """`N` samples by position: of caches (`Mixture`), or encoded on demand (`ServedSamples`).

    A new data source needs exactly these members.
    """

    has_index: bool
    """Whether `row` and `column` are available without reading samples."""
    recipe: Recipe
    """Of several caches, that of one with edits, if any is."""
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
        """`[N]`: image tokens of the target."""

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
