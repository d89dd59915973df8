"""The validation split: the hash of a sample's target image decides whether it is held out.

The split is stable when the dataset grows, in any order, and when it is rebuilt for another resolution or model. All
samples of one target are on the same side: validating on another size or instruction of a trained image shows nothing.
A fraction that leaves nothing to validate or nothing to train is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import xxhash

from qwen_cache.batching import IntArray
from qwen_cache.errors import ConfigError


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
