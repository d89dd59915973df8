"""Which images look alike: told from their thumbnails, whatever was done to the file.

Images look alike when their edges are in the same places, with the same strength beside each other, and their
colours are the same beside their contrast. Scaling, compression, less light or contrast, and a crop of a hundredth
hardly change that; one of the two may be grey. Edges are compared across and down on their own, as lines of text differ
in one of both alone. Images that are plain, or change evenly from side to side, look like nothing. All are compared
with all, as products of matrices: many take long, whatever they show, but nothing that they show takes for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
from PIL import Image

SIDE, COLOUR_SIDE = 12, 6  # finer, and a crop moves edges elsewhere; coarser, and all text is alike
LEAST_EDGES = 0.5  # grey levels from place to place, on average: with less, noise decides
LEAST_COLOUR = 4  # levels from grey: with less an image is taken for a grey one
EDGES_ALIKE = 0.95  # correlation: photographs keep more after those changes, two views of one scene have 0.6
COLOURS_APART = 0.35  # of the stronger ones: a sky that more light makes white loses about as much
ROWS, COLUMNS = 128, 2048  # compared at once: what is made of them stays in the processor's cache

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Look = npt.NDArray[np.uint8]
"""`[12, 12, 3]`: an image in YCbCr, as small as it is compared."""


def look(image: Image.Image) -> Look:
    """What `alike` compares of an image."""
    return np.asarray(image.convert("YCbCr").resize((SIDE, SIDE), Image.Resampling.BOX))


@dataclass(frozen=True)
class Seen:
    """Of many images, by position `N`."""

    position: npt.NDArray[np.intp]
    across: Floats
    """`[N, 132]`: differences from left to right, of length 1."""
    down: Floats
    """`[N, 132]`: and from top to bottom."""
    colours: Floats
    """`[N, 72]`: in units of the contrast; 0 for a grey image."""

    def of(self, which: slice | Bools) -> Seen:
        return Seen(*(getattr(self, field.name)[which] for field in fields(self)))

    def near(self, others: Seen) -> Bools:
        """`[N, M]`: which look alike; each test is made where the one before left some."""
        near: Bools = self.across @ others.across.T >= EDGES_ALIKE
        if near.any():
            near &= self.down @ others.down.T >= EDGES_ALIKE
        if near.any():
            near &= _same_colours(self.colours, others.colours)
        return near


def alike(looks: Sequence[Look], advance: Callable[[int], None] = lambda _: None) -> list[list[int]]:
    """Groups of positions: each looks like the first of its group. `advance` is told of those that are compared."""
    if not looks:
        return []
    rest, groups = _seen(looks), []
    advance(len(looks) - len(rest.position))
    while left := len(rest.position):
        some = rest.of(slice(ROWS))
        near = np.concatenate([some.near(rest.of(slice(i, i + COLUMNS))) for i in range(0, left, COLUMNS)], axis=1)
        free = np.ones(left, bool)
        for i in np.flatnonzero(near.sum(1) > 1):
            group = near[i] & free
            group[:i] = False
            if free[i] and group.sum() > 1:
                free &= ~group
                groups.append(rest.position[group].tolist())
        rest, free = rest.of(slice(ROWS, None)), free[ROWS:]
        rest = rest if free.all() else rest.of(free)
        advance(left - len(rest.position))
    return groups


def _same_colours(these: Floats, those: Floats) -> Bools:
    """`[N, M]`: which have the same, or are grey."""
    length, others = np.square(these).sum(1)[:, None], np.square(those).sum(1)
    least = np.maximum(length, others)
    least *= -(COLOURS_APART**2)
    least += length
    least += others
    close: Bools = 2 * these @ those.T >= least
    close |= (length == 0) | (others == 0)
    return close


def _seen(looks: Sequence[Look]) -> Seen:
    """Of those that have edges."""
    parts = [_seen_of(begin, np.stack(looks[begin : begin + COLUMNS])) for begin in range(0, len(looks), COLUMNS)]
    return Seen(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Seen)))


def _seen_of(begin: int, looks: Look) -> Seen:
    """Of `[N, 12, 12, 3]`, the first of which is at position `begin`."""
    images: Floats = looks.astype(np.float32)
    ramp = np.linspace(-1, 1, SIDE)
    even = _unit(np.stack([np.ones(SIDE * SIDE), np.tile(ramp, SIDE), np.repeat(ramp, SIDE)]).astype(np.float32))
    grey: Floats = images[..., 0].reshape(len(looks), -1)
    grey -= grey @ even.T @ even  # without what changes evenly
    rough: Floats = grey.reshape(-1, SIDE, SIDE)
    across = (rough[:, :, 1:] - rough[:, :, :-1]).reshape(len(looks), -1)
    down = (rough[:, 1:] - rough[:, :-1]).reshape(len(looks), -1)
    has_edges = np.minimum(np.square(across).mean(1), np.square(down).mean(1)) >= LEAST_EDGES**2
    colours = _coarse(images[..., 1:] - 128)
    colours[np.abs(colours).max(1) < LEAST_COLOUR] = 0
    colours /= np.maximum(rough.std(axis=(1, 2)), 1)[:, None]
    return Seen(begin + np.arange(len(looks)), _unit(across), _unit(down), colours).of(has_edges)


def _unit(vectors: Floats) -> Floats:
    lengths = np.sqrt(np.square(vectors).sum(1, keepdims=True))
    of_length_1: Floats = vectors / np.maximum(lengths, np.float32(1e-6))
    return of_length_1


def _coarse(colours: Floats) -> Floats:
    """`[N, 12, 12, 2]` as `[N, 72]`."""
    each = SIDE // COLOUR_SIDE
    squares = colours.reshape(len(colours), COLOUR_SIDE, each, COLOUR_SIDE, each, 2)
    means: Floats = squares.mean(axis=(2, 4))
    return means.reshape(len(colours), -1)
