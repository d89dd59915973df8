"""The measurements of rows for the Data page: targets that are scaled up, and controls misaligned with their targets.

They are those of `build`, at the size that is trained, remembered by the files of a row. They are findings and no
problems: a build takes these rows. A row whose images cannot be measured counts as not measured.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from qwen_cache.errors import SourceError
from qwen_cache.extras import __version__
from qwen_cache.format.measured import ALIGN, ENLARGE, ENLARGED, MISALIGNED, Alignment, Measured, parse_measured, times
from qwen_cache.sources.alignment import measure_files
from qwen_cache.sources.detect import Entry
from qwen_cache.sources.images import open_rgb
from qwen_cache.sources.rows import Readable
from qwen_cache.sources.sizes import Resolution, Size, SourceImage, crop_box, sizes_of
from qwen_cache.storage.remembered import RememberedFiles
from qwen_train.ui.workspace import ROOM, decoded

FINDINGS = {
    "misaligned_control": "a control that is shifted or zoomed against its target",
    "enlarged_target": "a target that is smaller than the size that is trained, and scaled up",
    "not_measured": "not measured: an image that cannot be read or sized, or a check by an older version",
}
ADVICE = {"misaligned_control": ALIGN, "enlarged_target": ENLARGE}
OVERLAY = 512
"""Pixels of the longer side of an overlay."""


class NotRememberedError(Exception):
    """The images would have to be read."""


@dataclass(frozen=True)
class MeasuredRow:
    """The measurement of a row."""

    measured: Measured
    original: Size
    size: Size
    """The size of the target as it is trained."""
    crop: bool

    @property
    def pairs(self) -> int:
        """The number of controls that are the image before the edit."""
        return sum(each is not None for each in self.measured.controls)

    @property
    def misaligned(self) -> dict[int, Alignment]:
        """The misaligned controls by their positions."""
        found = enumerate(self.measured.controls)
        return {i: each for i, each in found if each and each.displacement(self.size) >= MISALIGNED}

    @property
    def is_enlarged(self) -> bool:
        return self.measured.enlarged >= ENLARGED

    def notes(self) -> Iterator[tuple[str, str, int | None]]:
        """Finding, sentence, and the position of the control with an overlay."""
        several = len(self.measured.controls) > 1
        for i, found in self.misaligned.items():
            name = f"control {i + 1}" if several else "the control"
            yield "misaligned_control", f"{name} is {found}, compared with its target", i
        if self.is_enlarged:
            (w0, h0), (w, h) = self.original, self.size
            yield (
                "enlarged_target",
                f"the target is scaled up {times(self.measured.enlarged)}: {w0}×{h0} to {w}×{h}",
                None,
            )


class Measuring:
    """A function that measures rows, and remembers it; thread-safe."""

    def __init__(self, resolution: Resolution, store: Path, *, reads: bool) -> None:
        """Without `reads`, only what is remembered is known."""
        self._resolution, self._reads = resolution, reads
        self._memory = RememberedFiles(f"measured, qwen-cache {__version__}, Pillow {PIL.__version__}", store)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Keep what is measured inside the block."""
        with self._memory.saved():
            yield

    def measure(self, images: Sequence[tuple[Readable, Size]]) -> MeasuredRow | None:
        """The measurement of a target and its controls, with their sizes; None if there can be none."""
        files, crop = [image for image, _ in images], self._resolution.crop
        try:
            *_, sizes = sizes_of([SourceImage(str(image), size) for image, size in images], self._resolution)
        except SourceError:
            return None

        def read() -> bytes:
            if not self._reads:
                raise NotRememberedError
            with ROOM.taken(sum(math.prod(size) for _, size in images)):
                return json.dumps(measure_files(files, sizes, crop=crop).to_json()).encode()

        names = "\0".join(map(str, files))
        every = [file for image in files for file in getattr(image, "files", ())]
        with suppress(SourceError, NotRememberedError):
            known = json.loads(self._memory.read(f"{sizes} {crop}", names, every, read))
            return MeasuredRow(parse_measured(known, names), images[0][1], sizes[0], crop)
        return None


class MeasuredRows:
    """The rows of a source with findings, and those that were not measured, by their places."""

    def __init__(self) -> None:
        self._found: dict[str, MeasuredRow] = {}
        self._unmeasured: set[str] = set()
        self.targets = self.measured = self.pairs = 0

    def take(self, entry: Entry, row: MeasuredRow | None) -> None:
        """Take note of a row that was looked at."""
        if entry.target is None:
            return
        self.targets += 1
        if row is None:
            self._unmeasured.add(entry.where)
            return
        self.measured, self.pairs = self.measured + 1, self.pairs + row.pairs
        if row.misaligned or row.is_enlarged:
            self._found[entry.where] = row

    def of(self, entry: Entry) -> MeasuredRow | None:
        """The measurement of a row that has findings."""
        return self._found.get(entry.where)

    def flags(self, entries: Sequence[Entry]) -> Mapping[str, Sequence[int]]:
        """The rows of each finding that are not left out, the worst first."""
        rows = [(i, entry.where) for i, entry in enumerate(entries) if not entry.is_left_out]
        found = [(i, self._found[where]) for i, where in rows if where in self._found]
        misaligned = [(max(each.displacement(row.size) for each in row.misaligned.values()), i)
                      for i, row in found if row.misaligned]  # fmt: skip
        enlarged = [(row.measured.enlarged, i) for i, row in found if row.is_enlarged]
        worst = {"misaligned_control": misaligned, "enlarged_target": enlarged}
        flags = {name: [i for _, i in sorted(each, key=lambda pair: -pair[0])] for name, each in worst.items()}
        return flags | {"not_measured": [i for i, where in rows if where in self._unmeasured]}

    def to_json(self) -> dict[str, Any]:
        return {"targets": self.targets, "measured": self.measured, "pairs": self.pairs}


def overlay_of(target: Readable, control: Readable, row: MeasuredRow, position: int) -> bytes:
    """A JPEG of a misaligned control on its target, as `inspect` shows it; SourceError if one cannot be decoded."""
    from qwen_cache.inspect.flags import onion_skin

    scale = min(1.0, OVERLAY / max(row.size))
    width, height = max(1, round(row.size[0] * scale)), max(1, round(row.size[1] * scale))

    def small(image: Readable) -> Image.Image:
        with decoded(image.read(), str(image), open_rgb) as pixels:
            box = crop_box(pixels.size, row.size) if row.crop else None
            return pixels.resize((width, height), Image.Resampling.BILINEAR, box, reducing_gap=2)

    buffer = io.BytesIO()
    onion_skin(small(target), small(control), row.misaligned[position], row.size).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
