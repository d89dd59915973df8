"""A look at all images of a source: faults, measurements, duplicates, outliers; and images for the browser."""

from __future__ import annotations

import io
import json
import os
import struct
import sys
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import partial
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
from qwen_cache.sources.places import File
from qwen_cache.sources.rows import Readable
from qwen_cache.sources.sizes import REJECTED_TARGET, Resolution, Size, SourceImage, mask_fault, sizes_of
from qwen_cache.storage.files import replace, unless_in_use
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Location, is_remote
from qwen_train.ui.measured import MeasuredRow, Measuring
from qwen_train.ui.workspace import decoded

# ---- scan ------------------------------------------------------------------------------------------------------------
# All images of a source are decoded, in a thread that yields to everything else: for the faults of each row, and for
# duplicates and outliers.
#
# What is learned of an image is remembered by its file in the state folder, so a second scan reads what has changed,
# and one after a restart nothing. A finding is a question, not a fault. Near-duplicates are those of
# `inspect/flags.py`, limits too where it has one.

FINDINGS = {
    "repeated_target": "the same target in several rows",
    "near_duplicate": "targets that are nearly the same",
    "identity_pair": "a control that is the target: nothing is edited",
    "unreadable": "an image that cannot be decoded, or is missing",
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
FINE, BROKEN = b"\0", b"\1"
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
    by_row: Mapping[int, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    """The facts of an image, or why it has none."""

    image: Readable
    digest: str = ""
    size: Size = (0, 0)
    mean: float = 0
    """For a mask, 0 to 1."""
    signature: bytes = b""
    fault: tuple[str, str] | None = None
    """Its fault, and what to do about it."""


@dataclass(frozen=True)
class Facts:
    """The facts of the images of a row."""

    target: Known | None = None
    controls: tuple[Known, ...] = ()
    mask: Known | None = None
    measured: MeasuredRow | None = None
    rejected: Known | None = None

    @property
    def images(self) -> list[Known]:
        return [each for each in (self.target, *self.controls, self.mask, self.rejected) if each is not None]

    @property
    def is_broken(self) -> bool:
        return any(each.fault for each in self.images)


class UnknownError(Exception):
    """An image would have to be read."""


class StoppedError(Exception):
    """A listing or a scan is not needed any more."""


class Scan:
    """A look at the rows of a source, which `start` begins."""

    def __init__(
        self,
        entries: Sequence[Entry],
        readable: Callable[[Entry], Entry],
        store: Path,
        area: int,
        seen: Callable[[Entry, str, Facts], object],
        ended: Callable[[], object],
        *,
        finds: bool = True,
        measuring: Measuring | None = None,
        reads: bool = True,
    ) -> None:
        """`readable` gives a row whose images may be read; `area` is what images are enlarged to, in pixels. `seen`
        gets each row with the version of its images and their facts; `ended` is called at the end. `finds`: duplicates
        and outliers too. `measuring` measures each row. Without `reads`, rows whose images are not remembered are left
        out, and counted as `unknown`.
        """
        self._seen, self.finds, self._measuring, self._reads, self.unknown = seen, finds, measuring, reads, 0
        self.entries, self.readable, self.area, self.store, self._ended = entries, readable, area, store, ended
        self.state, self.what, self.error = "running", "reading images", ""
        self.done, self.total, self.began, self.seconds = 0, len(entries), time.monotonic(), 0.0
        self.findings: Findings | None = None
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scan", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> None:
        """Until the end of a scan that was started."""
        self._thread.join()

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
            "unknown": self.unknown,
            "found": found,
        }

    def _run(self) -> None:
        try:
            yield_to_others()
            facts = self._facts()
            if self.finds:
                self.findings = self._findings(facts)
            self.seconds = time.monotonic() - self.began
            self.state = "done"
        except StoppedError:
            self.state = "stopped"
        except (QwenCacheError, OSError, MemoryError) as error:
            self.state, self.error = "failed", str(error)
        finally:
            if self.state == "running":
                self.state, self.error = "failed", "an error of this program: see its terminal"
            self._ended()

    def _advance(self, count: int) -> None:
        self.done += count
        if self._stops.is_set():
            raise StoppedError

    def _facts(self) -> list[Facts]:
        memory = RememberedFiles(f"scan 2, qwen-cache {__version__}, Pillow {PIL.__version__}", self.store)
        found: list[Facts] = []

        def look(entry: Entry) -> tuple[str, Facts | None]:
            version = version_of_images(entry)
            with suppress(UnknownError):
                facts = facts_of(self.readable(entry), memory, reads=self._reads)
                return version, self._with_measurement(facts)
            return version, None

        measurements = self._measuring.saved() if self._measuring else nullcontext()
        with ThreadPoolExecutor(WORKERS, "scan", yield_to_others) as pool, memory.saved(), measurements:
            for begin in range(0, len(self.entries), AT_ONCE):
                chunk = self.entries[begin : begin + AT_ONCE]
                for entry, (version, facts) in zip(chunk, pool.map(look, chunk), strict=True):
                    found.append(facts or Facts())
                    if facts is None:
                        self.unknown += 1
                    else:
                        self._seen(entry, version, facts)
                    self._advance(1)
        return found

    def _with_measurement(self, facts: Facts) -> Facts:
        if self._measuring is None or facts.target is None or facts.is_broken:
            return facts
        images = [(each.image, each.size) for each in (facts.target, *facts.controls)]
        return replaced(facts, measured=self._measuring.measure(images))

    def _findings(self, facts: Sequence[Facts]) -> Findings:
        of_target: dict[str, list[int]] = defaultdict(list)
        for row, each in enumerate(facts):
            if each.target is not None and each.target.digest:
                of_target[each.target.digest].append(row)
        repeated = [group for group in of_target.values() if len(group) > 1]
        groups = {"repeated_target": repeated, "near_duplicate": self._near(facts, of_target)}
        sizes = np.array([each.target.size if each.target else (0, 0) for each in facts], np.float64).reshape(-1, 2)
        sizes[sizes == 0] = np.nan
        flags: dict[str, Sequence[int]] = {name: [row for group in groups[name] for row in group] for name in groups}
        flags |= _of_images(facts, sizes, self.area) | _of_prompts(self.entries)
        by_row: dict[int, list[str]] = defaultdict(list)
        for name in FINDINGS:
            for row in flags[name]:
                by_row[row].append(name)
        pixels: Floats = sizes.prod(axis=1)
        return Findings(flags, groups, pixels, by_row)

    def _near(self, facts: Sequence[Facts], firsts: Mapping[str, Sequence[int]]) -> list[list[int]]:
        """Groups of rows whose targets resemble each other, equal ones once each."""
        from qwen_cache.inspect.flags import SIDE, near_duplicates

        of_rows = {rows[0]: target.signature for rows in firsts.values() if (target := facts[rows[0]].target)}
        shown = [row for row, signature in of_rows.items() if signature]
        self.what, self.done, self.total = "comparing images", 0, len(shown)
        signatures = np.frombuffer(b"".join(of_rows[row] for row in shown), np.uint8)
        found = near_duplicates(signatures.reshape(-1, SIDE, SIDE, 3), self._advance)
        return [sorted(shown[position] for position in group) for group in found]


def yield_to_others() -> None:
    """Give this thread the processor when nothing else wants it, where the system can."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def facts_of(entry: Entry, memory: RememberedFiles, *, reads: bool = True) -> Facts:
    """The facts about a row's images, remembered or read; without `reads`, UnknownError in place of reading."""
    known = partial(_known, memory, reads)
    target = None if entry.target is None else known("target", entry.target)
    controls = tuple(known("control", control) for control in entry.controls)
    mask = None if entry.mask is None else known("mask", entry.mask)
    return Facts(target, controls, mask, rejected=None if entry.rejected is None else known("rejected", entry.rejected))


def _known(memory: RememberedFiles, reads: bool, role: str, image: Readable) -> Known:
    def read() -> bytes:
        if not reads:
            raise UnknownError
        return _read(role, image)

    try:
        data = memory.read(role, str(image), getattr(image, "files", ()), read)
    except QwenCacheError as error:  # it may be there the next time
        return Known(image, fault=fault_of(error))
    if data[:1] == BROKEN:
        what, do = json.loads(data[1:])
        return Known(image, fault=(what, do))
    digest, width, height, mean = FACTS.unpack_from(data, 1)
    return Known(image, digest.hex(), (width, height), mean, data[1 + FACTS.size :])


def _read(role: str, image: Readable) -> bytes:
    """The facts of an image as bytes, or its fault."""
    from qwen_cache.inspect.flags import thumbnail_signature

    data = image.read()
    digest = bytes.fromhex(content_hash(data))
    try:
        if role == "mask":
            with decoded(data, str(image), open_mask) as mask:
                return FINE + FACTS.pack(digest, *mask.size, float(np.asarray(mask).mean()) / 255)
        with decoded(data, str(image), open_rgb) as pixels:
            signature = thumbnail_signature(pixels).tobytes() if role == "target" else b""
            return FINE + FACTS.pack(digest, *pixels.size, 0) + signature
    except SourceError as error:
        return BROKEN + json.dumps(fault_of(error)).encode()


def fault_of(error: QwenCacheError) -> tuple[str, str]:
    """The fault of an image, and what to do."""
    return error.fault, error.do or "replace the file, or leave the row out"


def faults_of(facts: Facts, resolution: Resolution) -> Iterator[tuple[Readable, str, str]]:
    """The faults of a row's images that `build` finds for any model: the image, what is wrong, and what to do.

    Nothing about files that are missing: the list of the source says that.
    """
    for each in facts.images:
        path = each.image.local if isinstance(each.image, File) else None
        if each.fault and (path is None or os.path.isfile(path)):
            yield each.image, *each.fault
    originals = [SourceImage(str(each.image), each.size) for each in (facts.target, *facts.controls) if each]
    if facts.is_broken or facts.target is None:
        return
    worse = facts.rejected
    if worse and worse.digest == facts.target.digest:
        yield worse.image, *REJECTED_TARGET
    try:
        sizes_of(originals, resolution, SourceImage(str(worse.image), worse.size) if worse else None)
    except SourceError as error:
        at_fault = next(
            (each.image for each in facts.images if str(each.image) == str(error.where)), facts.target.image
        )
        yield at_fault, *fault_of(error)
    if facts.mask and (fault := mask_fault(facts.mask.size, facts.target.size)):
        yield facts.mask.image, *fault


# ---- findings --------------------------------------------------------------------------------------------------------


def _of_images(facts: Sequence[Facts], sizes: Floats, area: int) -> dict[str, Sequence[int]]:
    from qwen_cache.inspect.flags import FULL

    width, height = sizes[:, 0], sizes[:, 1]
    masks = (each.mask for each in facts)
    coverage = np.array([np.nan if each is None or each.fault else each.mean for each in masks], np.float64)
    which = {
        "identity_pair": np.array([_is_identity(each) for each in facts], bool),
        "unreadable": np.array([each.is_broken for each in facts], bool),
        "tiny": width * height * ENLARGED < area,
        "unusual_size": _far(np.log(width * height), 2 * np.log(FACTOR)),
        "unusual_shape": _far(np.log(width / height), np.log(FACTOR)),
        "empty_mask": coverage < EMPTY,
        "full_mask": coverage > FULL,
    }
    return {name: np.flatnonzero(each).tolist() for name, each in which.items()}


def _is_identity(facts: Facts) -> bool:
    target = facts.target.digest if facts.target else ""
    return bool(target) and any(each.digest == target for each in facts.controls)


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
    """The image of a row by its role: `target`, `rejected`, `mask`, `control-0`, `control-1`, …"""
    if role in ("target", "rejected", "mask"):
        image: Readable | None = getattr(entry, role)
        return image
    name, _, number = role.partition("-")
    is_there = name == "control" and number.isdecimal() and len(number) < 4 and int(number) < len(entry.controls)
    return entry.controls[int(number)] if is_there else None


def roles_of(entry: Entry) -> list[str]:
    """The roles of a row's images, in the order in which people read an edit."""
    controls = [f"control-{number}" for number in range(len(entry.controls))]
    return [*controls, *(role for role in ("target", "rejected", "mask") if getattr(entry, role) is not None)]


def version_of(image: Readable) -> str:
    """A name of the bytes of an image that changes with its files; those on servers count as they were listed."""
    files: Sequence[Location] = getattr(image, "files", ())
    states = [str(file) if is_remote(file) else _state(file) for file in files]
    return content_hash(f"{image}\0{states}".encode("utf-8", "surrogateescape"))


def version_of_images(entry: Entry) -> str:
    """A name of the bytes of all images of a row."""
    return joined_versions([version_of(image) for role in roles_of(entry) if (image := image_of(entry, role))])


def joined_versions(versions: Sequence[str]) -> str:
    return content_hash(" ".join(versions).encode())[:16]


def _state(file: Path) -> str:
    with suppress(OSError):
        state = os.stat(file)
        return f"{state.st_mtime_ns} {state.st_ctime_ns} {state.st_size} {state.st_ino}"
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
