"""A measurement of a sample's images: how far the target was enlarged, and how the controls lie on it.

It is stored beside the sample for people, and nothing depends on it: keys, tensors and training are the same without
it. `findings` lists what may hurt: enlarged targets, and controls that are shifted or zoomed against their target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import MemberError, Notice

MEASURED = "measured"
"""The key in a sample's metadata, and the column of the index."""
MISALIGNED = 0.5
"""Pixels of the target from which a control is listed: the root mean square over the image."""
ENLARGED = 1.05
"""The factor from which a target is listed: the rounding of sides to 32 pixels gives less."""
LEAST_ZOOM, LEAST_SHIFT, SQUEEZE = 0.001, 0.1, 0.002
"""Zooms, shifts in pixels, and differences of the zooms of both axes that are not worth a word."""
ALIGN = "align them, or leave these rows out: a model learns to move what it should keep"
ENLARGE = "use larger images, a smaller data.vae_image_size, or data.upscale=false: a model learns their blur"
"""Advice for misaligned controls and for enlarged targets."""
NAMED, FEW = 3, 100
"""Samples that a line names, of the first controls."""
PIXELS = 16  # of a token's side

Integers = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Alignment:
    """The place of a control that is the image before the edit, seen from its target."""

    shift: tuple[float, float]
    """To the right and down, in pixels of the target for the VAE."""
    zoom: tuple[float, float]
    """How much wider and higher what it shows is: 0.01 is 1 %."""

    def displacement(self, size: tuple[float, float]) -> float:
        """How far it is off, in pixels: the root mean square over an image of width and height `size`."""
        (x, y), (zoom_x, zoom_y), (width, height) = self.shift, self.zoom, size
        return math.sqrt(x * x + y * y + ((zoom_x * width) ** 2 + (zoom_y * height) ** 2) / 12)

    def rounded(self) -> Alignment:
        """To a hundredth of a pixel and of a percent, as it is stored."""
        (x, y), (zoom_x, zoom_y) = self.shift, self.zoom
        return Alignment((round(x, 2) + 0.0, round(y, 2) + 0.0), (round(zoom_x, 4) + 0.0, round(zoom_y, 4) + 0.0))

    def __str__(self) -> str:
        """`4 px right, 2.5 px up, 1 % larger`."""
        (x, y), (across, down) = self.shift, self.zoom
        parts = [f"{abs(x):.3g} px {'right' if x > 0 else 'left'}"] if abs(x) >= LEAST_SHIFT else []
        parts += [f"{abs(y):.3g} px {'down' if y > 0 else 'up'}"] if abs(y) >= LEAST_SHIFT else []
        is_even = abs(across - down) < SQUEEZE
        zooms = [("", (across + down) / 2)] if is_even else [(" across", across), (" down", down)]
        for axis, zoom in zooms:
            word = "larger" if zoom > 0 else "smaller"
            parts += [f"{abs(100 * zoom):.2g} % {word}{axis}"] if abs(zoom) >= LEAST_ZOOM else []
        return ", ".join(parts) or "aligned"


@dataclass(frozen=True)
class Measured:
    """The measurement of one sample."""

    enlarged: float
    """The factor by which the sides of the target's file were scaled."""
    controls: tuple[Alignment | None, ...]
    """For each control; None where it is not the image before the edit, or shows too little to tell."""

    def to_json(self) -> dict[str, Any]:
        controls = [each and {"shift": list(each.shift), "zoom": list(each.zoom)} for each in self.controls]
        return {"enlarged": self.enlarged, "controls": controls}


def parse_measured(value: dict[str, Any], where: str) -> Measured:
    """`measured` from the metadata, or from a row of the index; MemberError for anything else than it may be."""

    def numbers(pair: Any) -> tuple[float, float]:
        across, down = pair
        if not all(type(each) in (int, float) and math.isfinite(each) for each in (across, down)):
            raise ValueError
        return float(across), float(down)

    try:
        enlarged, _ = numbers((value["enlarged"], 0))
        controls = [
            None if each is None else Alignment(numbers(each["shift"]), numbers(each["zoom"]))
            for each in value["controls"]
        ]
        if enlarged <= 0:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        expected = '{"enlarged": …, "controls": [{"shift": [x, y], "zoom": [x, y]} or null, …]}'
        raise MemberError(f"{MEASURED} is not a measurement", where=where, expected=expected, found=value) from None
    return Measured(enlarged, tuple(controls))


# ---- findings --------------------------------------------------------------------------------------------------------
# What may hurt, of the rows of an index, read as columns. Samples are named by their positions, the worst first.

ROWS = 1 << 16  # of a batch
MEASURED_TYPE = pa.struct(
    [
        ("enlarged", pa.float64()),
        ("controls", pa.list_(pa.struct([("shift", pa.list_(pa.float64())), ("zoom", pa.list_(pa.float64()))]))),
    ]
)
"""The type of the column."""
SHAPES = pa.list_(pa.list_(pa.int32()))
READ = ("target", "img_shapes", MEASURED)


@dataclass(frozen=True)
class Findings:
    """The findings of some samples."""

    samples: int
    """Samples with a target."""
    measured: int
    """The samples of these that were measured."""
    pairs: int
    """Controls that are the image before the edit."""
    enlarged: Integers
    """`[M]`: the positions of samples with an enlarged target, the most enlarged first."""
    factors: Doubles
    """`[M]`: how often the sides fit."""
    misaligned: Integers
    """`[K]`: the positions of samples with a misaligned control, the worst first; an entry for each control."""
    controls: Integers
    """`[K]`: the number of the control, from 1."""
    alignments: Doubles
    """`[K, 4]`: its shift, then its zoom."""
    pixels: Doubles
    """`[K]`: how far it is off, in pixels of the target."""

    def alignment(self, i: int) -> Alignment:
        """The alignment of entry `i` of `misaligned`."""
        x, y, zoom_x, zoom_y = self.alignments[i].tolist()
        return Alignment((x, y), (zoom_x, zoom_y))

    def notices(self, names: Callable[[Integers], Sequence[str]]) -> list[Notice]:
        """Lines for people; `names` gives those of the samples at some positions."""

        def first(positions: Integers) -> tuple[str, ...]:
            return tuple(names(np.array(list(dict.fromkeys(positions[:FEW].tolist()))[:NAMED], np.int64)))

        notices = []
        if len(self.misaligned):
            what = f"controls are shifted or zoomed against their targets, by up to {self.pixels[0]:.3g} px"
            notices.append(Notice(what, first(self.misaligned), ALIGN, len(self.misaligned)))
        if len(self.enlarged):
            what = f"targets are scaled up to the size that is trained, by up to {times(self.factors[0])}"
            notices.append(Notice(what, first(self.enlarged), ENLARGE, len(self.enlarged)))
        return notices

    def to_json(self, names: Callable[[Integers], Sequence[str]]) -> dict[str, Any]:
        """Everything that was found, as a JSON value."""
        pairs = zip(names(self.misaligned), self.controls.tolist(), self.alignments.tolist(), self.pixels, strict=True)
        return {
            "samples": self.samples,
            "measured": self.measured,
            "pairs": self.pairs,
            "misaligned": [
                {"name": name, "control": number, "shift": each[:2], "zoom": each[2:], "pixels": round(float(off), 2)}
                for name, number, each, off in pairs
            ],
            "enlarged": [
                {"name": name, "factor": factor}
                for name, factor in zip(names(self.enlarged), self.factors.tolist(), strict=True)
            ],
        }


def times(factor: float) -> str:
    """`1.5×`, `1,020×`."""
    return f"{factor:,.0f}×" if factor >= 100 else f"{factor:.3g}×"


def findings(table: pa.Table) -> Findings:
    """The findings of the rows of an index, or of any table with the columns `READ`; ValueError for other values."""
    samples = measured = pairs = begin = 0
    enlarged, controls = [np.zeros((0, 2))], [np.zeros((0, 7))]
    for batch in table.select([name for name in READ if name in table.column_names]).to_batches(ROWS):
        samples += len(batch) - batch["target"].null_count
        if MEASURED in batch.schema.names:
            there = np.flatnonzero(batch[MEASURED].is_valid().to_numpy(zero_copy_only=False))
            column = batch[MEASURED].take(pa.array(there))
            factors = pc.struct_field(column, "enlarged").to_numpy(zero_copy_only=False)
            enlarged.append(np.column_stack([begin + there, factors])[factors >= ENLARGED])
            found = _pairs(pc.struct_field(column, "controls"), batch["img_shapes"].take(pa.array(there)))
            measured, pairs = measured + len(there), pairs + len(found)
            found = found[found[:, 6] >= MISALIGNED]
            found[:, 0] = begin + there[found[:, 0].astype(np.int64)]
            controls.append(found)
        begin += len(batch)
    most, worst = np.concatenate(enlarged), np.concatenate(controls)
    most, worst = most[np.argsort(-most[:, 1], kind="stable")], worst[np.argsort(-worst[:, 6], kind="stable")]
    positions, numbers = worst[:, 0].astype(np.int64), worst[:, 1].astype(np.int64)
    of_target = most[:, 0].astype(np.int64), most[:, 1]
    return Findings(samples, measured, pairs, *of_target, positions, numbers, worst[:, 2:6], worst[:, 6])


def _pairs(controls: pa.Array, shapes: pa.Array) -> Doubles:
    """`[K, 7]`: row, number, shift, zoom and displacement of each control that has an alignment."""
    counts, every = pc.list_value_length(controls).to_numpy(zero_copy_only=False), controls.flatten()
    is_pair = every.is_valid().to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(counts)), counts)[is_pair]
    numbers = (np.arange(len(every)) - np.repeat(np.cumsum(counts) - counts, counts))[is_pair] + 1
    every = every.filter(pa.array(is_pair))
    shifts, zooms = (_twos(pc.struct_field(every, name), pa.float64()) for name in ("shift", "zoom"))
    targets = pc.list_element(shapes, 0)
    sides = PIXELS * _twos(pc.list_slice(targets, 1, 3), pa.int32())[rows][:, ::-1]
    off = np.sqrt(np.square(shifts).sum(1) + np.square(zooms * sides).sum(1) / 12)
    return np.column_stack([rows, numbers, shifts, zooms, off])


def _twos(column: pa.Array, kind: pa.DataType) -> Doubles:
    """`[N, 2]`: a column of lists of two numbers."""
    if column.null_count or (len(column) and pc.any(pc.not_equal(pc.list_value_length(column), 2)).as_py()):
        raise ValueError(f"{MEASURED} is not of pairs of numbers")
    values: Doubles = column.flatten().cast(kind).to_numpy(zero_copy_only=False).astype(np.float64).reshape(-1, 2)
    return values


def table_of_measured(samples: Iterable[tuple[Measured | None, Sequence[Sequence[int]]]]) -> pa.Table:
    """A table for `findings`: what was measured of samples with a target, and their `img_shapes`."""
    rows = [
        {"target": "", "img_shapes": [list(shape) for shape in shapes], MEASURED: each and each.to_json()}
        for each, shapes in samples
    ]
    return pa.Table.from_pylist(
        rows, pa.schema([("target", pa.string()), ("img_shapes", SHAPES), (MEASURED, MEASURED_TYPE)])
    )
