"""The place of an edit from a training pair alone: the difference of the target and its control.

A change of tone over the whole image, compression, noise and a shift by one pixel do not count as edits. Without a
place to point at, because the images are the same or the edit is everywhere, the mask is None with a reason. Refuses a
target whose sides are not multiples of the cell. A blur of the whole image, or a shift by more than one pixel, does
count as a change of textured areas.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import avg_pool2d, max_pool2d, pad

FLOOR = 8 / 255
"""Smaller changes are never edits: JPEG at quality 85 and a shift left less on every photograph we tried."""
NOISE_TOLERANCE = 0.6
"""Added to the floor per standard deviation of the pair's noise; white noise of 25/255 leaves about half of that."""
SLACK = 0.15
"""The fraction of the local contrast that compression may change."""
MAX_AREA = 0.7
"""A larger fraction of the image counts as a global edit: the rest is too small to fit the change of tone."""
EXPLAINED = 0.25
"""If a free change of tone leaves less than this fraction of the changed area, it may explain the edit."""
STRONG = 24 / 255
"""The mean change of colour from which such an edit is local; residues of a change of tone are weaker."""
SPREAD = 1.5
"""After gain and offset, a local edit leaves at most this many times its area; a change of tone leaves more."""
TONE_CHANGED = 8 / 255
"""The mean change of colour from which a pair that differs only in tone is global instead of identical."""

BLOCK = 8  # pixels of a side; tones are fitted to the mean colours of blocks, so that a shift by one matters little
EDIT_LIKE = 10 / 255  # a block with this error has 1/4 of the weight in the fit; with three times the error, 1/100
STIFF, LOOSE = torch.full((3, 10), 1e-3), torch.full((3, 10), 1e-6)
"""Ridges towards "no change" on the curves of each channel: STIFF keeps unseen colours, LOOSE fits any change."""
GAIN_AND_OFFSET = torch.where(torch.eye(3, 10).roll(1, 1) + torch.eye(1, 10) > 0, 1e-6, 1e6)
"""A ridge that allows only the gain and offset of each channel."""


@dataclass(frozen=True)
class Difference:
    """The result of a comparison: a mask, or the reason why there is none."""

    mask: np.ndarray | None
    """The edited fraction of each cell, `[H / cell, W / cell]`, float32 in 0..1."""
    reason: str | None
    """None with a mask; else "identical" (no difference) or "global" (the whole image differs)."""


def difference_mask(target: Image.Image, control: Image.Image, cell: int = 16) -> Difference:
    """Where `target` (H×W pixels) differs from `control`, the image before the edit.

    Images of any mode are compared in RGB, the control scaled to the target's size. `cell` is the side of a mask cell
    in pixels. Raises ValueError unless H and W are multiples of `cell`.
    """
    if target.width % cell or target.height % cell:
        raise ValueError(f"the target's sides must be multiples of {cell}, found {target.width}×{target.height}")
    after, before = _pixels(target), _pixels(control.resize(target.size, Image.Resampling.LANCZOS))
    toned = _with_tone_of(after, before, STIFF)
    floor = FLOOR + NOISE_TOLERANCE * _noise(after - toned)
    change = _change(after, toned)
    edited = _cells(change > max(floor, _otsu(change)), cell)
    area = _area(edited)
    if not area:
        tone = float((toned - before).abs().mean())
        return Difference(None, "global" if tone > TONE_CHANGED else "identical")
    strength = float(change[change > floor].mean())
    everywhere = _area(_cells(change > floor, cell)) > MAX_AREA
    if everywhere or _is_a_tone(after, before, area, strength, floor, cell):
        return Difference(None, "global")
    beside_an_edit = max_pool2d((edited > 0.5).float()[None], 3, 1, 1)[0]  # elsewhere, a partly changed cell is a speck
    return Difference((edited * beside_an_edit).numpy(), None)


def _is_a_tone(
    after: torch.Tensor, before: torch.Tensor, area: float, strength: float, floor: float, cell: int
) -> bool:
    """Whether a change of tone explains the residue of the stiff fit better than an edit.

    The loose fit also explains a recoloured object, if nothing else in the image has its colour.
    """

    def residual_area(ridge: torch.Tensor) -> float:
        return _area(_cells(_change(after, _with_tone_of(after, before, ridge)) > floor, cell)) / area

    if residual_area(LOOSE) >= EXPLAINED:
        return False
    return strength < STRONG or not EXPLAINED <= residual_area(GAIN_AND_OFFSET) <= SPREAD


def _pixels(image: Image.Image) -> torch.Tensor:
    """`[3, H, W]` in 0..1."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def _cells(changed: torch.Tensor, cell: int) -> torch.Tensor:
    return avg_pool2d(changed.float()[None], cell)[0]


def _area(cells: torch.Tensor) -> float:
    """The fraction of the cells that are mostly changed."""
    return float((cells > 0.5).float().mean())


def _box(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """The mean over a square around each pixel of `[C, H, W]`."""
    return avg_pool2d(pad(pixels[None], (side // 2,) * 4, mode="replicate"), side, 1)[0]


def _range(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and the maximum over each pixel and its neighbours."""
    padded = pad(pixels[None], (1,) * 4, mode="replicate")
    return -max_pool2d(-padded, 3, 1)[0], max_pool2d(padded, 3, 1)[0]


def _change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The distance of each colour from the range of the other image around that pixel: `[H, W]`."""
    after, before = _box(after, 3), _box(before, 3)
    (low, high), (low_before, high_before) = _range(after), _range(before)
    appeared = (after - high_before).clamp(min=0) + (low_before - after).clamp(min=0)
    vanished = (before - high).clamp(min=0) + (low - before).clamp(min=0)
    contrast = torch.maximum(high - low, high_before - low_before).norm(dim=0)
    change = torch.maximum(appeared, vanished).norm(dim=0) - SLACK * contrast
    return _box(change.clamp(min=0)[None], 7)[0]


def _noise(difference: torch.Tensor) -> float:
    """The standard deviation of a pair's pixel noise, measured in calm areas, which are not edited."""
    fine = avg_pool2d((difference - _box(difference, 3)).square().mean(0)[None], BLOCK)[0].flatten()
    calm = fine.kthvalue(1 + len(fine) // 3).values
    return float((calm * 9 / 8).sqrt())  # the mean of nine pixels removes a ninth of white noise


def _otsu(change: torch.Tensor) -> float:
    """Otsu's threshold of the logarithm, so that edits of different strength form one class."""
    values = torch.log1p(change / (2 / 255)).flatten()
    low, high = float(values.min()), float(values.max())
    count = torch.histc(values, 256, low, high)
    edges = torch.linspace(low, high, 257)
    below, mass = count.cumsum(0), (count * (edges[1:] + edges[:-1]) / 2).cumsum(0)
    between = (mass[-1] * below - mass * below[-1]).square() / (below * (below[-1] - below)).clamp(min=1)
    return float(edges[1:][between.argmax()].expm1() * 2 / 255)


def _curves(colours: torch.Tensor) -> torch.Tensor:
    """The basis functions of a change of tone: `[3, …]` to `[10, …]`."""
    return torch.cat([torch.ones_like(colours[:1]), colours, colours.square(), colours.sqrt()])


def _with_tone_of(after: torch.Tensor, before: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """`before` after the change of tone to `after` that fits most of the image."""
    fit = _Fit(after, before, ridge)
    everything = fit.solve(fit.unchanged, torch.ones_like(fit.targets[0]))
    starts = (everything, fit.trimmed(everything), fit.trimmed(fit.unchanged))
    weights = min(map(fit.reweighted, starts), key=lambda weights: float((1 - fit.likeness(weights)).mean()))
    return (weights.float() @ _curves(before).flatten(1)).view_as(before).clamp(0, 1)


class _Fit:
    """Robust least squares from the curves of the control's blocks to the target's, which an edit must not distort."""

    def __init__(self, after: torch.Tensor, before: torch.Tensor, ridge: torch.Tensor) -> None:
        self.targets = avg_pool2d(after[None], BLOCK)[0].flatten(1).double()
        self.curves = _curves(avg_pool2d(before[None], BLOCK)[0].flatten(1).double())
        self.darkest = -max_pool2d(-after[None], BLOCK)[0].flatten(1)
        self.lightest = max_pool2d(after[None], BLOCK)[0].flatten(1)
        self.unchanged = torch.eye(3, 10, dtype=torch.float64).roll(1, 1)
        self.ridge = ridge.double().diag_embed()

    def predicted(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.curves

    def error(self, weights: torch.Tensor) -> torch.Tensor:
        return (self.targets - self.predicted(weights).clamp(0, 1)).square().sum(0)

    def likeness(self, weights: torch.Tensor) -> torch.Tensor:
        """From 1, no difference, to 0, an edit of any strength."""
        return 1 / (1 + self.error(weights) / EDIT_LIKE**2)

    def solve(self, last: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The next weights; blocks clipped to black or white count only if the last weights miss the clipping."""
        predicted = self.predicted(last)
        clipped = ((self.lightest > 0.98) & (predicted >= self.targets)) | (
            (self.darkest < 0.02) & (predicted <= self.targets)
        )
        rows = []
        for target, row, used, ridge in zip(self.targets, self.unchanged, ~clipped, self.ridge, strict=True):
            weighted = self.curves * importance * used / len(target)
            step = torch.linalg.solve(weighted @ self.curves.T + ridge, weighted @ (target - row @ self.curves))
            rows.append(row + step)
        return torch.stack(rows)

    def trimmed(self, weights: torch.Tensor) -> torch.Tensor:
        """Least trimmed squares: fitted to the best-fitting half of the blocks."""
        for _ in range(15):
            error = self.error(weights)
            weights = self.solve(weights, (error <= error.median()).double())
        return weights

    def reweighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Geman and McClure's weights: every block that is not edited counts."""
        for _ in range(15):
            weights = self.solve(weights, self.likeness(weights).square())
        return weights
