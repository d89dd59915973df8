"""Which pictures look alike, by difference hashes of their thumbnails.

A hash says, for each place of a small grey picture, whether its neighbour to the right is brighter, and the one below:
128 bits that scaling, compression and less light hardly change (N. Krawetz, "Kind of Like That", 2013). Two
pictures look alike when at most `MOST_BITS` differ. Pictures of one tone have no hash.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image

SIDE = 8
MOST_BITS = 7
FEWEST_TONES = 16  # of 255, from the darkest to the brightest place: with fewer, noise decides
AT_ONCE = 1 << 22  # comparisons

Hash = npt.NDArray[np.uint16]
"""`[8]`: 128 bits in eight parts. Of hashes that differ in seven bits at most, one part is equal."""


def difference_hash(picture: Image.Image) -> Hash | None:
    """None where there is next to nothing to see."""
    grey = picture.convert("L").resize((SIDE + 1, SIDE + 1), Image.Resampling.BOX)
    places = np.asarray(grey, dtype=np.int16)
    if np.ptp(places) < FEWEST_TONES:
        return None
    bits = np.stack([places[:-1, 1:] > places[:-1, :-1], places[1:, :-1] > places[:-1, :-1]])
    return np.packbits(bits).view(np.uint16)


def alike(hashes: Sequence[Hash]) -> list[list[int]]:
    """Groups of positions: each looks like another of its group."""
    if not hashes:
        return []
    group = list(range(len(hashes)))

    def first(i: int) -> int:
        while group[i] != i:
            group[i] = group[group[i]]
            i = group[i]
        return i

    for i, j in _pairs(np.stack(hashes)):
        group[max(first(i), first(j))] = min(first(i), first(j))
    groups: dict[int, list[int]] = {}
    for i in range(len(hashes)):
        groups.setdefault(first(i), []).append(i)
    return [each for each in groups.values() if each[1:]]


def _pairs(hashes: npt.NDArray[np.uint16]) -> Iterator[tuple[int, int]]:
    """Those that look alike, each at least once: compared is only what has a part in common."""
    for part in hashes.T:
        order = np.argsort(part, kind="stable")
        ends = np.flatnonzero(np.diff(part[order])) + 1
        for same in np.split(order, ends):
            rows = max(1, AT_ONCE // len(same))
            for begin in range(0, len(same) if len(same) > 1 else 0, rows):
                some = same[begin : begin + rows]
                bits = np.bitwise_count(hashes[some, None] ^ hashes[same]).sum(-1, dtype=np.uint8)
                for i, j in zip(*np.nonzero(bits <= MOST_BITS), strict=True):
                    if some[i] < same[j]:
                        yield int(some[i]), int(same[j])
