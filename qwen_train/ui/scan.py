"""A scan of a source's images, and images for the browser."""

from __future__ import annotations

import io
import os
import struct
import sys
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image

from qwen_cache.errors import QwenCacheError, SourceError
from qwen_cache.extras import __version__
from qwen_cache.format.identity import content_hash
from qwen_cache.sources.detect import Entry
from qwen_cache.sources.images import open_mask, open_rgb, upright_size
from qwen_cache.sources.rows import Readable
from qwen_cache.storage.files import replace, unless_in_use
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Location, is_remote
from qwen_train.ui.workspace import decoded

# ---- scan ------------------------------------------------------------------------------------------------------------
# Duplicates and outliers of a source, found in a thread that yields to everything else.
#
# What is learned of an image is remembered by its file in the state folder, so a second scan reads what has changed. A
# finding is a question, not a fault. Near-duplicates are those of `inspect/flags.py`, limits those of
# `inspect/flags.py` where it has one.

FINDINGS = {
    "repeated_target": "the same target in several rows",
    "near_duplicate": "targets that are nearly the same",
    "identity_pair": "a control that is the target: nothing is edited",
    "unreadable": "a target or mask that cannot be decoded, or an image that is missing",
    "tiny": "a target that has to be enlarged to more than four times its area",
    "unusual_size": "a target much larger or smaller than the others",
    "unusual_shape": "a target much wider or taller than the others",
    "frequent_prompt": "a prompt that more than a tenth of all rows share",
    "long_prompt": "a prompt of more than 2000 bytes, some 500 tokens",
    "short_prompt": "a prompt of fewer than 8 bytes",
    "empty_mask": "a mask over less than a thousandth of the image",
    "full_mask": "a mask over more than nine tenths of the image",
}
IN_GROUPS = ("repeated_target", "near_duplicate")
SHORT_PROMPT = 8  # bytes: one short word, or two Chinese characters
EMPTY = 0.001
ENLARGED = 4  # from here on a target is mostly invented pixels
FACTOR = 2  # of shapes, and the square of it of areas: less is usual even where all others are equal
FACTS = struct.Struct("<16sIIf")  # content hash, width, height, mean of a mask
WORKERS = max(1, min(4, (os.cpu_count() or 1) - 1))
AT_ONCE = 64  # rows that are read ahead

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Findings:
    """The findings of a scan: rows by finding, those of groups one group after another."""

    flags: Mapping[str, Sequence[int]]
    groups: Mapping[str, Sequence[Sequence[int]]]
    pixels: Floats
    """Pixels of each target; NaN where it is not known."""
    reasons: Mapping[int, str]
    """Why an image of a row cannot be read."""
    by_row: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """The facts that a scan learns of the images of a row."""

    target: str | None = None
    size: tuple[int, int] = (0, 0)
    signature: bytes = b""
    controls: tuple[str, ...] = ()
    coverage: float | None = None
    reason: str | None = None


class StoppedError(Exception):
    """A listing or a scan is not needed any more."""


class Scan:
    """A scan of the rows of a source, which `start` begins."""

    def __init__(
        self,
        entries: Sequence[Entry],
        readable: Callable[[Entry], Entry],
        store: Path,
        area: int,
        ended: Callable[[], object],
    ) -> None:
        """`readable` gives a row whose images may be read; `area` is what images are enlarged to, in pixels; `ended` is
        called at the end."""
        self.entries, self.readable, self.area, self.store, self._ended = entries, readable, area, store, ended
        self.state, self.what, self.error = "running", "reading images", ""
        self.done, self.total, self.began = 0, len(entries), time.monotonic()
        self.findings: Findings | None = None
        self._stops = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="scan", daemon=True).start()

    def stop(self) -> None:
        self._stops.set()

    def as_json(self) -> dict[str, Any]:
        found = {} if self.findings is None else {name: len(rows) for name, rows in self.findings.flags.items()}
        return {
            "state": self.state,
            "what": self.what,
            "error": self.error,
            "done": self.done,
            "total": self.total,
            "seconds": round(time.monotonic() - self.began, 1),
            "found": found,
        }

    def _run(self) -> None:
        try:
            yield_to_others()
            self.findings = self._findings(self._facts())
            self.state = "done"
        except StoppedError:
            self.state = "stopped"
        except (QwenCacheError, OSError, MemoryError) as error:
            self.state, self.error = "failed", str(error)
        self._ended()

    def _advance(self, count: int) -> None:
        self.done += count
        if self._stops.is_set():
            raise StoppedError

    def _facts(self) -> list[Facts]:
        memory = RememberedFiles(f"scan 1, qwen-cache {__version__}, Pillow {PIL.__version__}", self.store)
        facts: list[Facts] = []
        with ThreadPoolExecutor(WORKERS, "scan", yield_to_others) as pool, memory.saved():
            for begin in range(0, len(self.entries), AT_ONCE):
                chunk = self.entries[begin : begin + AT_ONCE]
                for each in pool.map(lambda entry: facts_of(self.readable(entry), memory), chunk):
                    facts.append(each)
                    self._advance(1)
        return facts

    def _findings(self, facts: Sequence[Facts]) -> Findings:
        of_target: dict[str, list[int]] = defaultdict(list)
        for row, each in enumerate(facts):
            if each.target is not None:
                of_target[each.target].append(row)
        repeated = [group for group in of_target.values() if len(group) > 1]
        groups = {"repeated_target": repeated, "near_duplicate": self._near(facts, of_target)}
        sizes = np.array([each.size for each in facts], np.float64).reshape(-1, 2)
        sizes[sizes == 0] = np.nan
        flags: dict[str, Sequence[int]] = {name: [row for group in groups[name] for row in group] for name in groups}
        flags |= _of_images(facts, sizes, self.area) | _of_prompts(self.entries)
        by_row: dict[int, list[str]] = defaultdict(list)
        for name in FINDINGS:
            for row in flags[name]:
                by_row[row].append(name)
        reasons = {row: each.reason for row, each in enumerate(facts) if each.reason is not None}
        pixels: Floats = sizes.prod(axis=1)
        return Findings(flags, groups, pixels, reasons, by_row)

    def _near(self, facts: Sequence[Facts], firsts: Mapping[str, Sequence[int]]) -> list[list[int]]:
        """Groups of rows whose targets resemble each other, equal ones once each."""
        from qwen_cache.inspect.flags import SIDE, near_duplicates

        shown = [rows[0] for rows in firsts.values() if facts[rows[0]].signature]
        self.what, self.done, self.total = "comparing images", 0, len(shown)
        signatures = np.frombuffer(b"".join(facts[row].signature for row in shown), np.uint8)
        found = near_duplicates(signatures.reshape(-1, SIDE, SIDE, 3), self._advance)
        return [sorted(shown[position] for position in group) for group in found]


def yield_to_others() -> None:
    """Give this thread the processor when nothing else wants it, where the system can."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def facts_of(entry: Entry, memory: RememberedFiles) -> Facts:
    """The facts about a row's images, remembered or read from them."""
    try:
        target = None if entry.target is None else _known(memory, "target", entry.target)
        controls = tuple(_known(memory, "control", control)[0] for control in entry.controls)
        mask = None if entry.mask is None else _known(memory, "mask", entry.mask)
    except QwenCacheError as error:
        return Facts(reason=f"{error.where or entry.where}: {error.fault}")
    coverage = None if mask is None else mask[3]
    if target is None:
        return Facts(controls=controls, coverage=coverage)
    return Facts(target[0], target[1:3], target[4], controls, coverage)


def _known(memory: RememberedFiles, role: str, image: Readable) -> tuple[str, int, int, float, bytes]:
    data = memory.read(role, str(image), getattr(image, "files", ()), lambda: _read(role, image))
    digest, width, height, mean = FACTS.unpack_from(data)
    return digest.hex(), width, height, mean, data[FACTS.size :]


def _read(role: str, image: Readable) -> bytes:
    from qwen_cache.inspect.flags import thumbnail_signature

    data = image.read()
    digest = bytes.fromhex(content_hash(data))
    if role == "control":
        return FACTS.pack(digest, 0, 0, 0)
    if role == "mask":
        with decoded(data, str(image), open_mask) as mask:
            return FACTS.pack(digest, *mask.size, float(np.asarray(mask).mean()) / 255)
    with decoded(data, str(image), open_rgb) as pixels:
        return FACTS.pack(digest, *pixels.size, 0) + thumbnail_signature(pixels).tobytes()


# ---- findings --------------------------------------------------------------------------------------------------------


def _of_images(facts: Sequence[Facts], sizes: Floats, area: int) -> dict[str, Sequence[int]]:
    from qwen_cache.inspect.flags import FULL

    width, height = sizes[:, 0], sizes[:, 1]
    coverage = np.array([np.nan if each.coverage is None else each.coverage for each in facts], np.float64)
    which = {
        "identity_pair": np.array([each.target is not None and each.target in each.controls for each in facts], bool),
        "unreadable": np.array([each.reason is not None for each in facts], bool),
        "tiny": width * height * ENLARGED < area,
        "unusual_size": _far(np.log(width * height), 2 * np.log(FACTOR)),
        "unusual_shape": _far(np.log(width / height), np.log(FACTOR)),
        "empty_mask": coverage < EMPTY,
        "full_mask": coverage > FULL,
    }
    return {name: np.flatnonzero(each).tolist() for name, each in which.items()}


def _far(values: Floats, least: float) -> npt.NDArray[np.bool_]:
    """Which values are far from the median: in robust standard deviations, and at least `least`."""
    from qwen_cache.inspect.flags import MAX_DEVIATIONS, MIN_SAMPLES

    if np.count_nonzero(~np.isnan(values)) < MIN_SAMPLES:
        return np.zeros(len(values), bool)
    distance = np.abs(values - np.nanmedian(values))
    far: npt.NDArray[np.bool_] = distance > max(MAX_DEVIATIONS * 1.4826 * float(np.nanmedian(distance)), least)
    return far


def _of_prompts(entries: Sequence[Entry]) -> dict[str, Sequence[int]]:
    from qwen_cache.inspect.flags import FREQUENT, LONG_PROMPT, MIN_REPEATS

    times = Counter(prompt for entry in entries for prompt in set(entry.prompts) if prompt)
    least = max(MIN_REPEATS, FREQUENT * len(entries))
    often = {prompt for prompt, count in times.items() if least <= count < len(entries)}

    def rows(is_it: Callable[[str], bool]) -> list[int]:
        return [row for row, entry in enumerate(entries) if any(is_it(prompt) for prompt in entry.prompts)]

    return {
        "frequent_prompt": rows(often.__contains__),
        "long_prompt": rows(lambda prompt: len(prompt.encode("utf-8", "replace")) > LONG_PROMPT),
        "short_prompt": rows(lambda prompt: 0 < len(prompt.encode("utf-8", "replace")) < SHORT_PROMPT),
    }


def titled_groups(findings: Findings, name: str) -> Iterator[Sequence[int]]:
    """The rows of a finding, together where they belong together."""
    yield from findings.groups.get(name) or ([row] for row in findings.flags.get(name, ()))


def areas(value: Any) -> Iterable[int]:
    """The areas of `data.vae_image_size`."""
    return value if isinstance(value, list | tuple) else [value or 1024 * 1024]


# ---- row images ------------------------------------------------------------------------------------------------------
# Images of rows for a browser: thumbnails, kept on disk up to a size; whole images; masks as colour and as numbers.
#
# All are decoded by `sources/images.py`, so that what `build` refuses is refused here with the same words. What a
# browser gets is encoded again: upright, 8 bits, without metadata. An image is named by where its bytes are and by the
# times and sizes of those files, so one that has changed has another name.

THUMBNAIL, WHOLE = 288, 4096  # pixels of the longer side: sharp on a screen of twice the density; what phones show
LIMIT = 500_000_000  # bytes of thumbnails on disk: those of some 50,000 images
MASK_COLOUR = (255, 0, 80)
END_OF_JPEG = b"\xff\xd9"


def image_of(entry: Entry, role: str) -> Readable | None:
    """The image of a row by its role: `target`, `mask`, `control-0`, `control-1`, …"""
    if role in ("target", "mask"):
        image: Readable | None = getattr(entry, role)
        return image
    name, _, number = role.partition("-")
    is_there = name == "control" and number.isdecimal() and len(number) < 4 and int(number) < len(entry.controls)
    return entry.controls[int(number)] if is_there else None


def roles_of(entry: Entry) -> list[str]:
    """The roles of a row's images, in the order in which people read an edit."""
    controls = [f"control-{number}" for number in range(len(entry.controls))]
    return [*controls, *(role for role in ("target", "mask") if getattr(entry, role) is not None)]


def version_of(image: Readable) -> str:
    """A name of the bytes of an image that changes with its files; those on servers count as they were listed."""
    files: Sequence[Location] = getattr(image, "files", ())
    states = [str(file) if is_remote(file) else _state(file) for file in files]
    return content_hash(f"{image}\0{states}".encode("utf-8", "surrogateescape"))


def _state(file: Path) -> str:
    with suppress(OSError):
        state = os.stat(file)
        return f"{state.st_mtime_ns} {state.st_size} {state.st_ino}"
    return "missing"


def whole(image: Readable, *, is_mask: bool) -> bytes:
    """A JPEG of an image, or a PNG of a mask, of at most `WHOLE` pixels."""
    with decoded(image.read(), str(image), open_mask if is_mask else open_rgb) as pixels:
        pixels.thumbnail((WHOLE, WHOLE), Image.Resampling.LANCZOS)
    return _encoded(pixels, "PNG") if is_mask else _encoded(pixels, "JPEG", quality=92)


def overlay(image: Readable) -> bytes:
    """A PNG in one colour, which covers as much as the mask is white."""
    with decoded(image.read(), str(image), open_mask) as mask:
        mask.thumbnail((WHOLE // 2, WHOLE // 2), Image.Resampling.BOX)
    coloured = Image.new("RGB", mask.size, MASK_COLOUR)
    coloured.putalpha(mask)
    return _encoded(coloured, "PNG", compress_level=1)


def _encoded(image: Image.Image, form: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


# ---- masks as numbers ------------------------------------------------------------------------------------------------


def mask_values(entry: Entry) -> tuple[tuple[int, int], bytes, str, bool]:
    """Size of the target, the mask's values there, its content hash ("" without a mask), and whether it was scaled."""
    if entry.target is None:
        raise SourceError("the row has no target to mask", where=entry.where, do="choose another row")
    size = upright_size(entry.target.read(), str(entry.target))
    if entry.mask is None:
        return size, bytes(size[0] * size[1]), "", False
    data = entry.mask.read()
    with decoded(data, str(entry.mask), open_mask) as mask:
        fitted = mask if mask.size == size else mask.resize(size, Image.Resampling.BILINEAR)
    return size, fitted.tobytes(), content_hash(data), fitted is not mask


def deflated(values: bytes) -> bytes:
    return zlib.compress(values, 1)


def mask_png(entry: Entry, body: bytes) -> bytes:
    """The PNG of a mask from its deflated values, one byte a pixel; SourceError unless there is one for each pixel."""
    if entry.target is None:
        raise SourceError("the row has no target to mask", where=entry.where, do="choose another row")
    size = upright_size(entry.target.read(), str(entry.target))
    expected = size[0] * size[1]
    try:
        values = zlib.decompressobj().decompress(body, expected + 1)
    except zlib.error as error:
        raise SourceError("the mask was damaged on its way", where=entry.where, found=error, do="save again") from None
    if len(values) != expected:
        what, do = "the mask does not have the target's size", "open the row again: its image has changed"
        raise SourceError(what, where=entry.where, expected=f"{expected} values", found=len(values), do=do)
    return _encoded(Image.fromarray(np.frombuffer(values, np.uint8).reshape(size[1], size[0])), "PNG")


# ---- thumbnails ------------------------------------------------------------------------------------------------------


class Thumbnails:
    """JPEGs of small images in a folder, the oldest removed first."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._lock = Lock()
        self._written = limit  # unknown: the first thumbnail counts them

    def get(self, image: Readable, *, is_mask: bool) -> bytes:
        """The thumbnail of an image; SourceError if it cannot be decoded."""
        name = content_hash(f"{version_of(image)} {is_mask} {THUMBNAIL}".encode())
        path = self.folder / name[:2] / f"{name}.jpg"
        with suppress(OSError):
            data = path.read_bytes()
            if data.endswith(END_OF_JPEG):  # else the power failed while it was written
                return data
        with decoded(image.read(), str(image), open_mask if is_mask else open_rgb) as pixels:
            pixels.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX, reducing_gap=2)
        data = _encoded(pixels, "JPEG", quality=80)
        with suppress(OSError):  # a full disk only costs time
            self._keep(path, data)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{get_ident()}.tmp")
        temporary.write_bytes(data)
        replace(temporary, path)
        with self._lock:
            self._written += len(data)
            if self._written > self.limit // 10:
                self._written = 0
                # Remove the oldest until nine tenths of the limit are left.
                found = [(each.stat(), each) for each in self.folder.glob("*/*")]
                total = sum(state.st_size for state, _ in found)
                for state, old in sorted(found, key=lambda each: each[0].st_mtime_ns):
                    if total <= 0.9 * self.limit:
                        break
                    with unless_in_use():
                        old.unlink(missing_ok=True)
                        total -= state.st_size
