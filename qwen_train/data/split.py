"""Which samples are never trained: those of which the hash of the target image says so.

It says the same when the dataset grows, in whatever order, and when it is built anew for another resolution or model.
All samples of one target are on the same side: another size or instruction of an image that is trained shows nothing.
Refused is a share that leaves nothing to validate, or nothing to train.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from qwen_cache.batching.epoch import IntArray
from qwen_cache.errors import ConfigError


def split(targets: Sequence[str], share: float, setting: str = "train.validation_split") -> tuple[IntArray, IntArray]:
    """The positions of the samples to train and of those to validate, by the content hashes of their targets.

    `setting` is the share's name in an error.
    """
    hashes = (xxhash.xxh3_64_intdigest(target.encode("ascii")) for target in targets)
    validated = np.fromiter((digest < share * 2**64 for digest in hashes), bool, len(targets))
    training, validation = np.flatnonzero(~validated), np.flatnonzero(validated)
    for which, left in (("train", training), ("validate", validation)):
        if not len(left):
            raise ConfigError(
                f"{setting} leaves nothing to {which}",
                found=f"{share} of {len(set(targets))} different targets",
                do=f"{'lower' if which == 'train' else 'raise'} {setting}",
            )
    return training, validation
