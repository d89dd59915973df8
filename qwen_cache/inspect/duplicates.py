"""Near-duplicate images, found by their thumbnails: the same image after scaling, compression, dimming or a small crop.

Two images are near-duplicates when their edges are in the same places with the same relative strength, and their
colours are the same relative to their contrast. Scaling, compression, less light or contrast, and a crop by 1 % hardly
change either; one of the two may be grey. Horizontal and vertical edges are compared separately, because lines of text
differ in only one of them. Plain images and smooth gradients have no near-duplicates. Every image is compared with
every other, as matrix products: the time grows with the square of their number, and never depends on their content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from PIL import Image

from qwen_cache.sources.images import over_white

SIDE, COLOUR_SIDE = 12, 6  # finer: a crop moves the edges; coarser: all text is the same
MIN_EDGES = 0.5  # grey levels between neighbours, on average: below, noise decides
MIN_COLOUR = 4  # levels from grey: below, the image counts as grey
MIN_CORRELATION = 0.95  # of edges: photographs keep more after those changes; two views of a scene have 0.6
MAX_COLOUR_DISTANCE = 0.35  # relative to the stronger colours: an overexposed sky loses about as much
BLOCK_ROWS, BLOCK_COLUMNS = 128, 2048  # of the matrix of comparisons: a block stays in the processor's cache

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Signature = npt.NDArray[np.uint8]
"""`[12, 12, 3]`: a thumbnail in YCbCr, at the size at which images are compared."""
Signatures = npt.NDArray[np.uint8]
"""`[N, 12, 12, 3]`"""


def thumbnail_signature(image: Image.Image) -> Signature:
    """The signature of an image, which `near_duplicates` compares; white is behind what is transparent."""
    return np.asarray(over_white(image).convert("YCbCr").resize((SIDE, SIDE), Image.Resampling.BOX))


@dataclass(frozen=True)
class Features:
    """The features of `N` images that have edges."""

    position: npt.NDArray[np.intp]
    """`[N]`: the position of each image among all signatures."""
    across: Floats
    """`[N, 132]`: differences from left to right, as vectors of length 1."""
    down: Floats
    """`[N, 132]`: differences from top to bottom, as vectors of length 1."""
    colours: Floats
    """`[N, 72]`: colours in units of the contrast; 0 for a grey image."""

    def subset(self, which: slice | Bools) -> Features:
        return Features(*(getattr(self, field.name)[which] for field in fields(self)))

    def matches(self, others: Features) -> Bools:
        """`[N, M]`: which pairs are near-duplicates; a test is skipped where the one before leaves no pair."""
        matches: Bools = self.across @ others.across.T >= MIN_CORRELATION
        if matches.any():
            matches &= self.down @ others.down.T >= MIN_CORRELATION
        if matches.any():
            matches &= _same_colours(self.colours, others.colours)
        return matches


def near_duplicates(
    signatures: Signatures | Sequence[Signature], advance: Callable[[int], None] = lambda _: None
) -> list[list[int]]:
    """Groups of positions: every image of a group matches its first. `advance` receives counts of compared images."""
    if not len(signatures):
        return []
    rest, groups = _features(np.asarray(signatures)), []
    advance(len(signatures) - len(rest.position))
    while left := len(rest.position):
        block, starts = rest.subset(slice(BLOCK_ROWS)), range(0, left, BLOCK_COLUMNS)
        matches = np.concatenate([block.matches(rest.subset(slice(i, i + BLOCK_COLUMNS))) for i in starts], axis=1)
        ungrouped = np.ones(left, bool)
        for i in np.flatnonzero(matches.sum(1) > 1):
            group = matches[i] & ungrouped
            group[:i] = False
            if ungrouped[i] and group.sum() > 1:
                ungrouped &= ~group
                groups.append(rest.position[group].tolist())
        rest, ungrouped = rest.subset(slice(BLOCK_ROWS, None)), ungrouped[BLOCK_ROWS:]
        rest = rest if ungrouped.all() else rest.subset(ungrouped)
        advance(left - len(rest.position))
    return groups


def _same_colours(these: Floats, those: Floats) -> Bools:
    """`[N, M]`: which pairs have the same colours, or a grey image."""
    length, others = np.square(these).sum(1)[:, None], np.square(those).sum(1)
    least = np.maximum(length, others)
    least *= -(MAX_COLOUR_DISTANCE**2)
    least += length
    least += others
    close: Bools = 2 * these @ those.T >= least
    close |= (length == 0) | (others == 0)
    return close


def _features(signatures: Signatures) -> Features:
    """The features of all images that have edges."""
    starts = range(0, len(signatures), BLOCK_COLUMNS)
    blocks = [_block_features(start, signatures[start : start + BLOCK_COLUMNS]) for start in starts]
    return Features(*(np.concatenate([getattr(block, field.name) for block in blocks]) for field in fields(Features)))


def _block_features(start: int, signatures: Signatures) -> Features:
    """The features of signatures `[N, 12, 12, 3]`; `start` is the position of the first."""
    images: Floats = signatures.astype(np.float32)
    ramp = np.linspace(-1, 1, SIDE)
    even = _unit(np.stack([np.ones(SIDE * SIDE), np.tile(ramp, SIDE), np.repeat(ramp, SIDE)]).astype(np.float32))
    grey: Floats = images[..., 0].reshape(len(signatures), -1)
    grey -= grey @ even.T @ even  # without brightness and linear gradients
    rough: Floats = grey.reshape(-1, SIDE, SIDE)
    across = (rough[:, :, 1:] - rough[:, :, :-1]).reshape(len(signatures), -1)
    down = (rough[:, 1:] - rough[:, :-1]).reshape(len(signatures), -1)
    has_edges = np.minimum(np.square(across).mean(1), np.square(down).mean(1)) >= MIN_EDGES**2
    colours = _coarse(images[..., 1:] - 128)
    colours[np.abs(colours).max(1) < MIN_COLOUR] = 0
    colours /= np.maximum(rough.std(axis=(1, 2)), 1)[:, None]
    return Features(start + np.arange(len(signatures)), _unit(across), _unit(down), colours).subset(has_edges)


def _unit(vectors: Floats) -> Floats:
    lengths = np.sqrt(np.square(vectors).sum(1, keepdims=True))
    unit: Floats = vectors / np.maximum(lengths, np.float32(1e-6))
    return unit


def _coarse(colours: Floats) -> Floats:
    """Mean colours of squares: `[N, 12, 12, 2]` to `[N, 72]`."""
    each = SIDE // COLOUR_SIDE
    squares = colours.reshape(len(colours), COLOUR_SIDE, each, COLOUR_SIDE, each, 2)
    means: Floats = squares.mean(axis=(2, 4))
    return means.reshape(len(colours), -1)
