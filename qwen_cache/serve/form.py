"""A row in the multipart form of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData

from qwen_cache.errors import FormatError
from qwen_cache.format.identity import Phrase
from qwen_cache.format.sample import parse_phrase
from qwen_cache.sources.images import upright_size
from qwen_cache.sources.rows import MAX_CONTROLS, MAX_TEXT, Row, limits_exceeded
from qwen_cache.text import parse_json
from qwen_cache.web import RefusedError

MAX_IMAGES = MAX_CONTROLS + 2  # with a target and a mask
TEXTS = ("prompt", "name", "generate", "seed", "width", "height", "phrase")
IMAGES = ("target", "control", "mask")
LIMITS = {"max_files": MAX_IMAGES, "max_fields": len(TEXTS) + MAX_IMAGES, "max_part_size": MAX_TEXT}
"""Of a form, whose images may be files, or text that says where they are."""
BYTES = "latin-1"
"""The charset in which a form is read, so that no byte of it is changed before it is decoded here."""


@dataclass(frozen=True)
class Uploaded:
    """An image that a client sent."""

    data: bytes
    label: str

    def read(self) -> bytes:
        return self.data

    def __str__(self) -> str:
        return self.label


Fetch = Callable[[str, str, int], Awaitable[Uploaded]]
"""Reads the image of a field at an address, of at most this many bytes."""


def content_type_for_bytes(content_type: str) -> str:
    """The header for reading a form as `BYTES`; RefusedError unless it is a form in UTF-8.

    The client must not choose the codec: Python has some that take minutes, and some that raise.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise RefusedError(415, "the body is no multipart form", "send multipart/form-data, as `curl -F` does")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise RefusedError(415, f"the charset of the form is {charset[:100]!r}", "send UTF-8")
    return f"{content_type}; charset={BYTES}"


async def read_row(form: FormData, fetch: Fetch, most: int) -> tuple[Row, int]:
    """The row in a form that was read as `BYTES`, and the bytes of its images; RefusedError unless it is one row.

    Images that the form names by their addresses have at most `most` bytes together.
    """
    if unknown := sorted(set(form) - {*TEXTS, *IMAGES}):
        raise RefusedError(422, f"there is no field {unknown[0]!r}", f"send {', '.join((*TEXTS, *IMAGES))}")
    images: dict[str, list[Uploaded]] = {name: [] for name in IMAGES}
    for name, value in form.multi_items():
        if name in images and isinstance(value, str):
            images[name].append(fetched := await fetch(name, _decoded(name, value), most))
            most -= len(fetched.data)
        elif name in images:
            images[name].append(Uploaded(await value.read(), name))  # type: ignore[union-attr]
    for name in ("target", "mask"):
        if len(images[name]) > 1:
            raise RefusedError(422, f"the form has {len(images[name])} images named {name}", "send one")
    texts = {name: _text(name, form.getlist(name)) for name in TEXTS}
    target, mask = (next(iter(images[name]), None) for name in ("target", "mask"))
    prompt = texts["prompt"]
    if prompt is None:
        raise RefusedError(422, "the form has no prompt", "send the field prompt")
    row = Row(
        texts["name"] or "",
        "the request",
        target,
        tuple(images["control"]),
        mask,
        prompt,
        _phrase(texts["phrase"]),
        _number("seed", texts["seed"]),
        _size(texts["width"], texts["height"]),
    )
    generates = texts["generate"] not in (None, "0")
    if generates == (target is not None) or (generates and mask is not None):
        what = "an image to generate has no target and no mask" if generates else "the form has no target"
        raise RefusedError(422, what, "send a target, or for an image to generate the field generate=1")
    for what, do in limits_exceeded(row).values():
        raise RefusedError(422, what, do)
    return row, sum(len(image.data) for some in images.values() for image in some)


def check_pixels(row: Row, most: int) -> None:
    """RefusedError for an image of more pixels; SourceError for one whose header cannot be read."""
    for image in (row.target, *row.controls, row.mask):
        if image is not None:
            width, height = upright_size(image.read(), str(image))
            if width * height > most:
                raise RefusedError(413, f"{image} has {width}×{height} pixels", f"send images of at most {most} pixels")


def _text(name: str, values: list[Any]) -> str | None:
    if len(values) > 1 or not all(isinstance(value, str) for value in values):
        raise RefusedError(422, f"{name} is not one text", "send it once, as text")
    return _decoded(name, values[0]) if values else None


def _decoded(name: str, text: str) -> str:
    try:
        return text.encode(BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedError(422, f"{name} is not UTF-8 text", "send UTF-8") from None


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RefusedError(422, f"{name} is no number", "send digits alone")
    return int(text)


def _size(width: str | None, height: str | None) -> tuple[int, int] | None:
    sides = _number("width", width), _number("height", height)
    if sides == (None, None):
        return None
    if None in sides or 0 in sides:
        raise RefusedError(422, "width and height belong together", "send both, or neither")
    return sides  # type: ignore[return-value]


def _phrase(text: str | None) -> Phrase:
    """The spans in JSON, which may lie outside of the prompt."""
    try:
        spans = [] if text is None else parse_json(text)
        if isinstance(spans, list):
            return parse_phrase(spans, "phrase")
        raise ValueError
    except (ValueError, FormatError):
        do = "send spans of characters, such as [[5, 12]]"
        raise RefusedError(422, "phrase is no list of spans", do) from None
