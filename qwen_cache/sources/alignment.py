"""The alignment of a control with its target: by how much one is shifted or zoomed against the other, from the pixels.

It is measured as image registration does it, on the luminance of both at a quarter of a megapixel's sides or less: a
phase correlation proposes shifts, then a shift and a zoom along each axis are fitted to the gradients of blocks (Lucas
and Kanade), robustly, so that the blocks of an edit do not count. Each block is compared after its own mean and
contrast are removed, and without its slow changes: another tone, exposure or noise is no misalignment. A control of
which too little agrees is not the image before the edit: a reference, a drawing, an edit of everything. Imports no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image, ImageFilter

from qwen_cache.format.measured import Alignment, Measured
from qwen_cache.sources.images import open_rgb, over_white
from qwen_cache.sources.rows import Readable
from qwen_cache.sources.sizes import Size, crop_box

Pixels = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LONGEST = 256
"""Pixels of the longer side at which images are compared: enough to find a shift by one pixel of 1024."""
COARSE = 128
"""Pixels of the longer side at which shifts are searched."""
SMALLEST = 32
"""Pixels of a side below which nothing is measured: four blocks."""
BLOCK, SMALL_BLOCK = 16, 8
"""Pixels of a block's side; the small one where a side has fewer than four of the others."""
REACH = 1 / 16
"""The largest shift that is searched, and the largest zoom, relative to the side: beyond, the edit may mean it."""
SQUEEZE = 0.035
"""The largest difference of the zooms of both axes. Sizes of nearly one shape are squeezed by up to 0.03."""
PEAKS = 4
"""Shifts that are tried beside none: with an object over 40 % of the image, the right one is not always the first."""
TAPER = 0.15
"""The fraction of a side that fades out at each end: the image does not repeat beyond its edge."""
NARROW, WIDE = 1, 4
"""Radii in pixels of the two blurs whose difference is compared: noise is narrower, changes of tone are wider."""
NOISE = 2.0
"""Levels of contrast at which a block counts half."""
EDITED = 0.3
"""The mean square that a block leaves, of a contrast of 1, from which it counts as edited."""
AGREES = 0.4
"""The same from which a block is not evidence that two images are one. 2 is left of unrelated blocks."""
SAME_IMAGE, FEWEST = 0.15, 8
"""The least fraction of the contrast that agrees, and the fewest blocks: unrelated photographs have 0.02 and 2."""
CERTAIN = 4
"""Standard errors that a misalignment has at least."""
SEARCHES, FITS = 3, 2
"""Fits at the coarse size and at each finer one; each begins where the last one ended."""
REWEIGHTED = 3
"""Solutions of a fit: each weighs the blocks by what the last one left of them."""


def measure(images: Sequence[Image.Image], sizes: Sequence[Size], *, crop: bool) -> Measured:
    """The measurement of a sample: `images` are its target and controls, `sizes` their pixels for the VAE.

    A control of another size than the target's is not compared. With `crop`, the centre of each image is seen.
    """
    target, size = images[0], sizes[0]
    seen = _luminance(target, size, crop=crop) if size in sizes[1:] else None
    found = [
        None if seen is None or size != other else alignment(seen, _luminance(control, size, crop=crop), size)
        for control, other in zip(images[1:], sizes[1:], strict=True)
    ]
    return Measured(enlargement(target.size, size, crop=crop), tuple(found))


def measure_files(files: Sequence[Readable], sizes: Sequence[Size], *, crop: bool) -> Measured:
    """`measure` for the files of a target and its controls; SourceError if one cannot be decoded."""
    return measure([open_rgb(file.read(), str(file)) for file in files], sizes, crop=crop)


def enlargement(original: Size, size: Size, *, crop: bool) -> float:
    """The factor by which the sides of an image of the size `original` grow, rounded; below 1 it is made smaller."""
    across, down = size[0] / original[0], size[1] / original[1]
    return round(max(across, down) if crop else math.sqrt(across * down), 3)


# ---- registration ----------------------------------------------------------------------------------------------------
# Fractions of the sides: a motion is (x, zoom_x, y, zoom_y), and moves a point at (X, Y) from the centre, in fractions
# too, by x + zoom_x · X and y + zoom_y · Y. What the target has at a point, the control has where that is moved to.


def alignment(target: Image.Image, control: Image.Image, size: Size) -> Alignment | None:
    """How the control is on the target, in pixels of `size`; None if it is not the image before the edit.

    Both are grey images of one size, as `_luminance` gives them.
    """
    pair, pairs = (target, control), list[tuple[Pixels, Pixels]]()
    while True:
        pairs.append((_band(pair[0]), _band(pair[1])))
        width, height = pair[0].size
        if max(width, height) <= COARSE or min(width, height) < 2 * SMALLEST:
            break
        half = (width + 1) // 2, (height + 1) // 2
        pair = pair[0].resize(half, Image.Resampling.BOX), pair[1].resize(half, Image.Resampling.BOX)
    if min(pairs[-1][0].shape) < SMALLEST:
        return None
    fit = _search(*pairs[-1])
    for fine in reversed(pairs[:-1]):
        fit = _Blocks(*fine).fit(fit.motion, FITS)
    return _judged(fit, size)


def _luminance(image: Image.Image, size: Size, *, crop: bool) -> Image.Image:
    """The image in grey, as large as it is compared, of what becomes `size`."""
    scale = min(1.0, LONGEST / max(size))
    width, height = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    box = crop_box(image.size, size) if crop else None
    small = over_white(image).resize((width, height), Image.Resampling.BILINEAR, box, reducing_gap=1.1)
    return small.convert("L")


def _band(image: Image.Image) -> Pixels:
    """The details of an image, `[h, w]`: neither the finest nor the widest."""
    narrow, wide = (np.asarray(image.filter(ImageFilter.BoxBlur(radius)), np.float32) for radius in (NARROW, WIDE))
    return narrow - wide


@dataclass(frozen=True)
class _Fit:
    """A motion, how certain it is, and what agrees with it."""

    motion: Doubles
    """`[4]`, in fractions of the sides."""
    covariance: Doubles
    """`[4, 4]`"""
    share: float
    """The fraction of the contrast that agrees."""
    blocks: float
    """How many blocks agree, each as much as it has contrast."""


NOTHING = _Fit(np.zeros(4), np.zeros((4, 4)), 0.0, 0.0)


def _search(target: Pixels, control: Pixels) -> _Fit:
    """The motion with which most of two small images agrees; none where it is as good as another."""
    height, width = target.shape
    blocks, best = _Blocks(target, control), NOTHING
    for x, y in ((0, 0), *_phase_correlation(target, control)):
        fit = blocks.fit(np.array([x / width, 0.0, y / height, 0.0]), SEARCHES)
        best = fit if fit.blocks > 1.1 * best.blocks else best
        if best.share > 0.5:  # no other motion can have as much
            break
    return best


def _phase_correlation(target: Pixels, control: Pixels) -> Iterator[tuple[int, int]]:
    """The shifts in whole pixels at the highest peaks of the phase correlation, within reach."""
    height, width = target.shape
    window = _taper(height)[:, None] * _taper(width)
    spectrum = np.fft.rfft2(control * window) * np.conj(np.fft.rfft2(target * window))
    strength = np.abs(spectrum)
    if not strength.any():
        return
    surface = np.fft.irfft2(spectrum / (strength + 1e-4 * strength.max()), s=target.shape)
    down, across = (np.arange(-reach, reach + 1) for reach in (math.ceil(REACH * height), math.ceil(REACH * width)))
    sharp = np.pad(surface[np.ix_(down, across)], 1)
    near = np.zeros((len(down), len(across)))
    for i, j in np.ndindex(3, 3):  # a zoom smears a peak
        near += sharp[i : i + len(down), j : j + len(across)]
    for _ in range(PEAKS):
        i, j = np.unravel_index(near.argmax(), near.shape)
        if abs(down[i]) + abs(across[j]) > 1:  # a fit from no shift finds smaller ones
            yield int(across[j]), int(down[i])
        near[max(0, i - 2) : i + 3, max(0, j - 2) : j + 3] = -np.inf


def _taper(length: int) -> Pixels:
    rise = max(1, round(TAPER * length))
    edge = np.sin((np.arange(rise) + 0.5) / rise * np.pi / 2) ** 2
    return np.concatenate([edge, np.ones(length - 2 * rise), edge[::-1]]).astype(np.float32)


class _Blocks:
    """Two images `[h, w]` as blocks: those of the target on a grid, those of the control where a motion puts them."""

    def __init__(self, target: Pixels, control: Pixels) -> None:
        self.sides = np.array(target.shape[::-1])
        self.side = BLOCK if min(target.shape) >= 4 * BLOCK else SMALL_BLOCK
        columns, rows = (self.sides - 2) // self.side
        margin = (self.sides - (columns, rows) * np.array(self.side)) // 2
        grid = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
        self.corners = margin + grid * self.side
        """`[N, 2]`: x and y of the first pixel of each block."""
        centres = (self.corners + self.side / 2) / self.sides - 0.5
        self.across, self.down = (np.stack([np.ones(len(centres)), centres[:, axis]], 1) for axis in (0, 1))
        """`[N, 2]`: the derivatives of each block's place by shift and zoom."""
        framed = self.side + 2  # with a pixel around it, for the gradient
        self._control = sliding_window_view(control, (framed, framed))
        self._target = sliding_window_view(target, (framed, framed))[self.corners[:, 1] - 1, self.corners[:, 0] - 1]

    def fit(self, motion: Doubles, times: int) -> _Fit:
        """The best motion near `motion`; `NOTHING` if too few blocks stay in the image."""
        fit = NOTHING
        for _ in range(times):
            moved = np.stack([self.across @ motion[:2], self.down @ motion[2:]], 1) * self.sides
            whole = np.rint(moved).astype(np.int64)
            begin = self.corners + whole
            inside = np.flatnonzero(((begin >= 1) & (begin + self.side + 1 <= self.sides)).all(1))
            if len(inside) < FEWEST:
                return NOTHING
            control = self._control[begin[inside, 1] - 1, begin[inside, 0] - 1]
            sums, trust = _block_sums(self._target[inside], control)
            step, fit = _solved(
                sums,
                trust,
                (moved - whole)[inside],
                self.across[inside] * self.sides[0],
                self.down[inside] * self.sides[1],
            )
            motion = motion + step
            fit = _Fit(motion, fit.covariance, fit.share, fit.blocks)
        return fit


def _block_sums(target: Pixels, control: Pixels) -> tuple[Doubles, Doubles]:
    """The means over each block of the products that a fit needs, `[6, N]`, and how far its contrast exceeds noise.

    `target` and `control` are blocks with a pixel around them. They are compared at a mean of 0 and a contrast of 1;
    the gradient is that of both, so that neither's blur or noise favours a direction.
    """
    count = len(target)
    inner = [each[:, 1:-1, 1:-1].reshape(count, -1) for each in (target, control)]
    inner = [each - each.mean(1, keepdims=True) for each in inner]
    contrasts = [np.sqrt(np.einsum("ij,ij->i", each, each) / each.shape[1] + 1e-6) for each in inner]
    both = target / contrasts[0][:, None, None] + control / contrasts[1][:, None, None]
    across = (both[:, 1:-1, 2:] - both[:, 1:-1, :-2]).reshape(count, -1) / 4
    down = (both[:, 2:, 1:-1] - both[:, :-2, 1:-1]).reshape(count, -1) / 4
    error = inner[0] / contrasts[0][:, None] - inner[1] / contrasts[1][:, None]
    pairs = ((across, across), (across, down), (down, down), (across, error), (down, error), (error, error))
    sums = np.stack([np.einsum("ij,ij->i", a, b) for a, b in pairs]) / error.shape[1]
    least = np.square(np.minimum(*contrasts))
    return sums.astype(np.float64), (least / (least + NOISE**2)).astype(np.float64)


def _solved(sums: Doubles, trust: Doubles, offset: Doubles, across: Doubles, down: Doubles) -> tuple[Doubles, _Fit]:
    """The step to the motion that leaves the least of the blocks, edited ones aside, and how good it is.

    `offset` `[N, 2]` is what the blocks, which are at whole pixels, lack of the motion; `across` and `down` `[N, 2]`
    are the derivatives of their places in pixels.
    """
    xx, xy, yy, xe, ye, ee = sums
    step, (x, y) = np.zeros(4), offset.T
    for i in range(REWEIGHTED + 1):
        left = ee - 2 * (x * xe + y * ye) + x * x * xx + 2 * x * y * xy + y * y * yy
        if i == REWEIGHTED:
            break
        weight = trust**2 / np.square(1 + np.square(left / EDITED))  # Geman and McClure's
        pulls = np.hstack([
            (weight * (xe - x * xx - y * xy))[:, None] * across,
            (weight * (ye - x * xy - y * yy))[:, None] * down,
        ])  # fmt: skip
        mixed = (across * (weight * xy)[:, None]).T @ down
        normal = np.block([
            [(across * (weight * xx)[:, None]).T @ across, mixed],
            [mixed.T, (down * (weight * yy)[:, None]).T @ down],
        ])  # fmt: skip
        normal += np.diag(1e-3 * np.diag(normal) + 1e-9)  # an image of stripes says nothing along them
        change = np.linalg.solve(normal, pulls.sum(0))
        step, x, y = step + change, x + across @ change[:2], y + down @ change[2:]
    inverse, agrees = np.linalg.inv(normal), trust * (left < AGREES)
    covariance = inverse @ (pulls.T @ pulls) @ inverse
    return step, _Fit(step, covariance, float(agrees.sum() / max(trust.sum(), 1e-9)), float(agrees.sum()))


def _judged(fit: _Fit, size: Size) -> Alignment | None:
    """The result of a fit of images of `size`; None if it does not show that one was made from the other.

    A misalignment that is not certain is none.
    """
    x, zoom_x, y, zoom_y = fit.motion.tolist()
    is_far = max(map(abs, (x, zoom_x, y, zoom_y))) > 1.1 * REACH or abs(zoom_x - zoom_y) > SQUEEZE
    if fit.share < SAME_IMAGE or fit.blocks < FEWEST or is_far:
        return None
    found = Alignment((x * size[0], y * size[1]), (zoom_x, zoom_y))
    errors = np.sqrt(np.diag(fit.covariance)).tolist()
    error = Alignment((errors[0] * size[0], errors[2] * size[1]), (errors[1], errors[3]))
    if found.displacement(size) < CERTAIN * error.displacement(size):
        return Alignment((0.0, 0.0), (0.0, 0.0))
    return found.rounded()
