"""A sample: metadata, tensors and their rules; encoding and decoding of its members."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.errors import (
    RESTORE_SHARD,
    UPGRADE,
    CodecError,
    DtypeError,
    MemberError,
    PhraseError,
    SampleKeyError,
    ShapeError,
    TensorSetError,
    VersionError,
)
from qwen_cache.format.identity import Inputs, Phrase, Slider, canonical_json, sample_key
from qwen_cache.format.manifest import Fields, check_version
from qwen_cache.format.measured import MEASURED, Measured, parse_measured

# ---- tensor ----------------------------------------------------------------------------------------------------------
# One tensor: its dtype, shape and hash, and how its bytes are stored.

PLANES_ZSTD = "planes-zstd"
"""The codec of compressed tensors, see `codec`."""
MAX_RATIO = 100  # of a tensor to its compressed bytes; bounds the memory that a forged header can request
BYTES_PER_ELEMENT = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype (by safetensors' name), shape and xxh3-128 of a tensor, and how it is stored."""

    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str
    codec: str | None = None
    compressed_bytes: int | None = None

    @property
    def element_size(self) -> int:
        return BYTES_PER_ELEMENT[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        return self.element_size * math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """The number of its bytes in a shard."""
        return self.nbytes if self.compressed_bytes is None else self.compressed_bytes

    def to_json(self) -> dict[str, Any]:
        value = {"dtype": self.dtype, "shape": list(self.shape), "xxh3_128": self.xxh3_128}
        return (
            value if self.codec is None else {**value, "codec": self.codec, "compressed_bytes": self.compressed_bytes}
        )


def check_codec(spec: TensorSpec, where: str) -> None:
    """CodecError for an unknown codec, or a tensor of more than `MAX_RATIO` times its stored bytes."""
    if spec.codec is None:
        return
    if spec.codec != PLANES_ZSTD:
        raise CodecError("unknown codec", where=where, expected=PLANES_ZSTD, found=spec.codec, do=UPGRADE)
    if spec.nbytes > MAX_RATIO * spec.stored_bytes:
        found = f"{spec.stored_bytes} for {spec.nbytes}"
        raise CodecError("too few compressed bytes", where=where, expected=f"at least 1 for {MAX_RATIO}", found=found)


# ---- codec -----------------------------------------------------------------------------------------------------------
# How the bytes of a tensor are stored: as they are, or compressed without loss.
#
# `planes-zstd` splits elements of k bytes into k planes (all first bytes, all second bytes, …) and compresses each
# separately with zstandard; a plane that does not get smaller is stored as it is. In bfloat16, the plane of exponents
# is worth compressing; the plane of mantissas is noise (`tools/bench_compression.py`).
#
#     stored = k lengths (u64, little-endian), then k planes; a plane of the full length is not compressed
#
# Decoding allocates at most twice the size of the tensor, whatever the compressed bytes claim.

LEVEL = 1  # higher levels are slower and no better on these planes


def encode(data: memoryview, width: int) -> bytes:
    """Compress elements of `width` bytes."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    planes = np.frombuffer(data, np.uint8).reshape(-1, width)
    pieces = []
    for i in range(width):
        plane = np.ascontiguousarray(planes[:, i]).tobytes()
        smaller = compressor.compress(plane)
        pieces.append(smaller if len(smaller) < len(plane) else plane)
    return b"".join([*(len(piece).to_bytes(8, "little") for piece in pieces), *pieces])


def decode(stored: memoryview, spec: TensorSpec, where: str) -> memoryview:
    """The bytes of the tensor; without a codec, `stored` itself. CodecError if they do not decode to its size."""
    if spec.codec is None:
        return stored
    import zstandard

    width = spec.element_size
    size = spec.nbytes // width
    lengths = [int.from_bytes(stored[8 * i : 8 * i + 8], "little") for i in range(width)]
    if stored.nbytes != 8 * width + sum(lengths) or any(length > size for length in lengths):
        expected = f"{width} planes of at most {size} bytes"
        raise CodecError("the planes do not fit", where=where, expected=expected, found=lengths)
    planes = list[npt.NDArray[Any]]()
    position = 8 * width
    for length in lengths:
        plane: memoryview | bytes = stored[position : position + length]
        position += length
        try:
            if length != size:
                # zstandard would allocate what the frame claims
                if (claimed := zstandard.frame_content_size(plane)) != size:
                    raise zstandard.ZstdError(f"the frame claims {claimed} bytes, expected {size}")
                plane = zstandard.ZstdDecompressor().decompress(plane, size)
        except zstandard.ZstdError as error:
            raise CodecError(f"a plane cannot be decompressed: {error}", where=where) from None
        if len(plane) != size:
            raise CodecError("a plane has another length", where=where, expected=size, found=len(plane))
        planes.append(np.frombuffer(plane, np.uint8))
    words = planes.pop().astype(f"<u{width}")
    for plane_below in reversed(planes):  # three times as fast as writing every second byte
        words <<= 8
        words |= plane_below
    return words.view(np.uint8).data


# ---- sample ----------------------------------------------------------------------------------------------------------
# One sample: its metadata, its tensors, and the rules that relate their shapes.
#
# Letters: S image tokens of the target, Sc of all controls, L text tokens, D width of the text encoder, C its layers
# times heads. Image sizes are `img_shapes`: `(1, h, w)` in units of 16 pixels, the target first, then each control.
# Format v1 stores them in pixels (`height`, `width`, `height_control`, …); in memory both versions have `img_shapes`.
#
# A sample without target is an image to generate: it has no `image_latents`, and `img_shapes` begins with its size.
# One with a rejected image, which is worse than its target, has the size of it in `rejected_shape`. One with the
# direction of a slider has two further prompts about the same images, in `slider`, and their embeddings.

EMBEDDING_DTYPES = ("BF16", "F32")
LATENT_CHANNELS = 64  # 16 channels of the VAE × a patch of 2×2
PIXELS_PER_TOKEN = 16  # 8× by the VAE, 2× by packing
TENSORS_V1 = ("image_latents", "control_latents", "prompt_embeds", "empty_prompt_embeds")
SLIDER_EMBEDS = ("slider_positive_embeds", "slider_negative_embeds")
TENSORS = {
    1: TENSORS_V1,
    2: ("image_latents", "rejected_latents", *TENSORS_V1[1:], *SLIDER_EMBEDS, "edit_mask", "attention", "thumbnails"),
}
"""The tensors of each format version, in the order of storage."""
WITHOUT_PREFIX = {"empty_prompt_embeds", *SLIDER_EMBEDS}
"""Embeddings that are stored without the `prefix_length` rows that they share with `prompt_embeds`."""
OPTIONAL = {"empty_prompt_embeds", "edit_mask", "attention", "thumbnails"}
UNIT_RANGE = {"edit_mask": "F32", "attention": "F16"}
"""Tensors whose numbers are from 0 to 1, and their dtypes."""
DTYPES = {**UNIT_RANGE, "thumbnails": "U8"}
"""Tensors of a fixed dtype; all others have the dtype of the encoders' outputs."""
MASK_FROM = ("file", "difference", "head")
"""The origins of an edit mask: the source, the difference of target and control, attention."""

ImgShape = tuple[int, int, int]
ImgShapes = tuple[ImgShape, ...]


@dataclass(frozen=True)
class SampleMeta:
    """The metadata of a sample: the member `<key>.json`.

    The embeddings of `WITHOUT_PREFIX` begin with the first `prefix_length` rows of `prompt_embeds`; only the rows after
    them are stored. It is 0 in v1, which stores the empty prompt whole.

    `image_positions` is given where the embeddings hold text alone: for each control the number of rows before it.
    """

    recipe: str
    inputs: Inputs
    prompt: str
    img_shapes: ImgShapes
    prefix_length: int
    tensors: dict[str, TensorSpec]
    phrase: Phrase = ()
    edit_mask_from: str | None = None
    image_positions: tuple[int, ...] = ()
    measured: Measured | None = None
    rejected_shape: ImgShape | None = None
    slider: Slider | None = None

    @cached_property
    def key(self) -> str:
        optional = self.phrase, self.rejected_shape, self.slider
        return sample_key(self.recipe, self.inputs, self.prompt, self.img_shapes, *optional)

    @property
    def stored_shapes(self) -> ImgShapes:
        """The shapes of the images that the sample has: target, unless it is to be generated, controls, rejected."""
        own = self.img_shapes if self.inputs.target else self.img_shapes[1:]
        return (*own, self.rejected_shape) if self.rejected_shape else own

    @property
    def text_length(self) -> int:
        return self.tensors["prompt_embeds"].shape[0]

    def to_bytes(self, format_version: int) -> bytes:
        """The bytes of the JSON member; equal samples give equal bytes."""
        value = {
            "format_version": format_version,
            "key": self.key,
            "recipe": self.recipe,
            "inputs": self.inputs.to_json(),
            "prompt": self.prompt,
            "tensors": {name: spec.to_json() for name, spec in self.tensors.items()},
        }
        if format_version == 1:
            value |= pixel_sizes(self.img_shapes)
        else:
            value |= {"img_shapes": [list(shape) for shape in self.img_shapes], "prefix_length": self.prefix_length}
            value |= {"phrase": [list(span) for span in self.phrase]} if self.phrase else {}
            value |= {"edit_mask_from": self.edit_mask_from} if self.edit_mask_from else {}
            value |= {"image_positions": list(self.image_positions)} if self.image_positions else {}
            value |= {MEASURED: {"must_understand": False, **self.measured.to_json()}} if self.measured else {}
            value |= {"rejected_shape": list(self.rejected_shape)} if self.rejected_shape else {}
            value |= {"slider": self.slider._asdict()} if self.slider else {}
        return canonical_json(value)


def token_count(img_shapes: Sequence[Sequence[int]]) -> int:
    """Σ t·h·w: the image tokens of these images."""
    return sum(math.prod(shape) for shape in img_shapes)


def shared_rows(prompt: memoryview, empty: memoryview, row_bytes: int, *, least: int) -> int:
    """The number of equal rows that both embeddings begin with; the last `least` rows of `empty` never count."""
    length = max(0, min(prompt.nbytes // row_bytes, empty.nbytes // row_bytes - least))
    a, b = (np.frombuffer(data[: length * row_bytes], np.uint8).reshape(length, row_bytes) for data in (prompt, empty))
    differing = np.flatnonzero((a != b).any(axis=1))
    return int(differing[0]) if differing.size else length


def pixel_sizes(img_shapes: ImgShapes) -> dict[str, int]:
    """`img_shapes` as in format v1: `height`, `width`, `height_control`, `width_control`, `height_control_1`, …"""
    sizes: dict[str, int] = {}
    for i, (_, h, w) in enumerate(img_shapes):
        suffix = v1_suffix(i)
        sizes[f"height{suffix}"], sizes[f"width{suffix}"] = h * PIXELS_PER_TOKEN, w * PIXELS_PER_TOKEN
    return sizes


def v1_suffix(i: int) -> str:
    """The suffix of `height` and `width` in format v1 for image `i` (0 is the target)."""
    return "" if i == 0 else "_control" if i == 1 else f"_control_{i - 1}"


def parse_sample(data: bytes | memoryview, where: str, format_version: int | None = None) -> SampleMeta:
    """The metadata in a JSON member; FormatError if it is invalid, or not of `format_version` (None: any known one)."""
    fields = Fields.of_json(data, where, error=MemberError)
    version = check_version(fields.take("format_version", int), where)
    if format_version not in (None, version):
        what = "this sample has another format version than its dataset"
        raise VersionError(what, where=where, expected=format_version, found=version, do=RESTORE_SHARD)
    key, recipe, prompt = fields.hash("key"), fields.hash("recipe"), fields.take("prompt", str)
    images = Fields(fields.take("inputs", dict), f"{where}: inputs", MemberError)
    target = images.hash("target") if version == 1 else images.hash_or_null("target")
    controls, mask = tuple(images.hashes("controls")), images.hash_or_null("mask")
    seed = images.count("seed") if version > 1 and "seed" in images.left else None
    rejected = images.hash("rejected") if version > 1 and "rejected" in images.left else None
    inputs = Inputs(target, controls, mask, seed, rejected)
    images.finish()
    tensors = _parse_tensors(fields.take("tensors", dict), version, f"{where}: tensors")
    prefix_length, phrase, mask_from = 0, Phrase(), None
    positions: tuple[int, ...] = ()
    measured, rejected_shape, slider = None, None, None
    if version == 1:
        img_shapes = _parse_pixel_sizes(fields)
    else:
        img_shapes = _parse_img_shapes(fields.take("img_shapes", list), where)
        prefix_length = fields.count("prefix_length")
        phrase = parse_phrase(fields.take("phrase", list), where) if "phrase" in fields.left else ()
        mask_from = fields.take("edit_mask_from", str) if "edit_mask_from" in fields.left else None
        if "image_positions" in fields.left:
            positions = parse_positions(fields.take("image_positions", list), where)
        if MEASURED in fields.left:
            measured = parse_measured(fields.take(MEASURED, dict), where)
        if "rejected_shape" in fields.left:
            (rejected_shape,) = _parse_img_shapes([fields.take("rejected_shape", list)], where, "rejected_shape")
        if "slider" in fields.left:
            prompts = Fields(fields.take("slider", dict), f"{where}: slider", MemberError)
            slider = Slider(*(prompts.take(name, str) for name in Slider._fields))
            prompts.finish()
    fields.finish()
    meta = SampleMeta(
        recipe,
        inputs,
        prompt,
        img_shapes,
        prefix_length,
        tensors,
        phrase,
        mask_from,
        positions,
        measured,
        rejected_shape,
        slider,
    )
    check_shapes(meta, where)
    if meta.key != key:
        raise SampleKeyError("the key is not the hash of content and recipe", where=where, expected=meta.key, found=key)
    return meta


def check_shapes(meta: SampleMeta, where: str) -> None:
    """FormatError for the first shape that does not follow from `img_shapes` and the text (F12)."""
    tensors = meta.tensors
    _check_sizes(meta, where)
    if meta.inputs.target is None and (meta.inputs.mask or "edit_mask" in tensors):
        raise TensorSetError("a sample without target has an edit mask", where=where, expected="none")
    if meta.inputs.target is None and meta.inputs.rejected:
        raise TensorSetError("a sample without target has a rejected image", where=where, expected="none")
    if not meta.stored_shapes and "thumbnails" in tensors:
        raise TensorSetError("a sample without images has thumbnails", where=where, expected="none")
    needed = {"prompt_embeds"} | ({"image_latents"} if meta.inputs.target else set())
    needed |= {"control_latents"} if len(meta.img_shapes) > 1 else set()
    needed |= {"rejected_latents"} if meta.inputs.rejected else set()
    needed |= {*SLIDER_EMBEDS} if meta.slider else set()
    if missing := needed - tensors.keys():
        raise TensorSetError(f"{', '.join(sorted(missing))} missing", where=where)
    if extra := tensors.keys() - needed - OPTIONAL:
        raise TensorSetError(f"{', '.join(sorted(extra))} not expected here", where=where)
    if len(tensors["prompt_embeds"].shape) != 2:
        raise ShapeError("prompt_embeds must be [L, D]", where=where, found=list(tensors["prompt_embeds"].shape))
    text, width = tensors["prompt_embeds"].shape
    target, controls = token_count(meta.img_shapes[:1]), token_count(meta.img_shapes[1:])
    rows = {name: spec.shape[0] for name, spec in tensors.items() if spec.shape}
    stack, strip = tensors.get("attention"), tensors.get("thumbnails")
    if stack and len(stack.shape) != 3:
        raise ShapeError("attention must be [C, h, w]", where=where, found=list(stack.shape))
    if strip and len(strip.shape) != 1:
        raise ShapeError("thumbnails must be [n]", where=where, found=list(strip.shape))
    expected: dict[str, tuple[int, ...]] = {
        "image_latents": (target, LATENT_CHANNELS),
        "rejected_latents": (token_count([meta.rejected_shape or ()]), LATENT_CHANNELS),
        "control_latents": (controls, LATENT_CHANNELS),
        "prompt_embeds": (text, width),
        **{name: (rows.get(name, 0), width) for name in WITHOUT_PREFIX},
        "edit_mask": (target,),
        "attention": stack.shape if stack else (),
        "thumbnails": strip.shape if strip else (),
    }
    for name, spec in tensors.items():
        if spec.shape != expected[name]:
            sizes = f"img_shapes {[list(shape) for shape in meta.img_shapes]}"
            if name == "rejected_latents":
                sizes = f"rejected_shape {list(meta.rejected_shape or ())}"
            raise ShapeError(
                f"{name} does not fit {sizes} and the text",
                where=where,
                expected=list(expected[name]),
                found=list(spec.shape),
            )
    if meta.prefix_length > text:
        raise ShapeError(
            "prefix_length exceeds prompt_embeds",
            where=where,
            expected=f"at most {text}",
            found=meta.prefix_length,
        )
    check_positions(meta, where)
    if meta.measured and len(meta.measured.controls) != len(meta.img_shapes) - 1:
        what, controls = f"{MEASURED} does not fit the controls", len(meta.img_shapes) - 1
        raise ShapeError(what, where=where, expected=controls, found=len(meta.measured.controls))
    check_phrase(meta.phrase, meta.prompt, where)
    if meta.edit_mask_from not in (MASK_FROM if "edit_mask" in tensors else (None,)):
        allowed = f"one of {', '.join(MASK_FROM)} with an edit_mask, else none"
        raise TensorSetError("edit_mask_from", where=where, expected=allowed, found=meta.edit_mask_from)
    embedding = tensors.get("image_latents", tensors["prompt_embeds"]).dtype
    for name, spec in tensors.items():
        dtype = DTYPES.get(name, embedding if embedding in EMBEDDING_DTYPES else " or ".join(EMBEDDING_DTYPES))
        if spec.dtype != dtype:
            raise DtypeError(f"{name} has a wrong dtype", where=where, expected=dtype, found=spec.dtype)
        check_codec(spec, f"{where}: {name}")


def parse_positions(value: list[Any], where: str) -> tuple[int, ...]:
    """`image_positions` from JSON; MemberError for anything but a list of numbers."""
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise MemberError("image_positions is a list of numbers", where=where, expected="[n, …]", found=value)
    return tuple(value)


def check_positions(meta: SampleMeta, where: str) -> None:
    """ShapeError unless there are no positions, or one for each control, in order and within the shared prefix."""
    positions, controls = meta.image_positions, len(meta.img_shapes) - 1
    in_order = all(a <= b for a, b in zip((0, *positions), (*positions, meta.prefix_length), strict=True))
    if positions and not (len(positions) == controls and in_order):
        raise ShapeError(
            "image_positions does not fit the controls and the text",
            where=where,
            expected=f"{controls} numbers in order, from 0 to prefix_length {meta.prefix_length}",
            found=list(positions),
        )


def parse_phrase(value: list[Any], where: str) -> Phrase:
    """A phrase from JSON, a list of pairs of numbers; MemberError for anything else."""
    pairs = all(isinstance(span, list) and len(span) == 2 for span in value)
    if not pairs or not all(isinstance(i, int) and not isinstance(i, bool) for span in value for i in span):
        raise MemberError("phrase is a list of spans", where=where, expected="[[from, to], …]", found=value)
    return tuple((begin, end) for begin, end in value)


def check_phrase(phrase: Phrase, prompt: str, where: str) -> None:
    """PhraseError unless the spans are within the prompt, non-empty and in order."""
    ends = [0, *(end for _, end in phrase), len(prompt)]
    in_order = all(before <= begin for before, (begin, _) in zip(ends, phrase, strict=False))
    if not in_order or ends[-2] > ends[-1] or not all(begin < end for begin, end in phrase):
        found = [list(span) for span in phrase]
        raise PhraseError("phrase is not within the prompt", where=where, expected=f"0 to {len(prompt)}", found=found)


def _check_sizes(meta: SampleMeta, where: str) -> None:
    """ShapeError for numbers that cannot be sizes, from whichever file."""
    if not meta.img_shapes or not all(t == 1 and is_size(h) and is_size(w) for t, h, w in meta.img_shapes):
        found = [list(shape) for shape in meta.img_shapes]
        raise ShapeError("img_shapes is a list of [1, h, w]", where=where, expected="[[1, h, w], …]", found=found)
    for name, spec in meta.tensors.items():
        if not all(is_size(n) for n in spec.shape):
            raise ShapeError(f"{name} has a size that is not positive", where=where, found=list(spec.shape))
    if len(meta.inputs.controls) != len(meta.img_shapes) - 1:
        what = "img_shapes and inputs have different numbers of images"
        raise ShapeError(what, where=where, expected=1 + len(meta.inputs.controls), found=len(meta.img_shapes))
    if (meta.inputs.rejected is None) != (meta.rejected_shape is None):
        what, expected = "rejected_shape does not fit inputs", "a shape where inputs have a rejected image, else none"
        raise ShapeError(what, where=where, expected=expected, found=meta.rejected_shape)
    if meta.rejected_shape and not (meta.rejected_shape[0] == 1 and all(map(is_size, meta.rejected_shape))):
        raise ShapeError("rejected_shape is [1, h, w]", where=where, found=list(meta.rejected_shape))
    if meta.prefix_length < 0:
        raise ShapeError("prefix_length is negative", where=where, found=meta.prefix_length)


def _parse_tensors(value: dict[str, Any], version: int, where: str) -> dict[str, TensorSpec]:
    names = TENSORS[version]
    if unknown := sorted(value.keys() - set(names)):
        raise TensorSetError("unknown tensor", where=where, expected=", ".join(names), found=unknown[0])
    each = {name: Fields(value[name], f"{where}.{name}", MemberError) for name in names if name in value}
    tensors = {}
    for name, fields in each.items():
        dtype, shape, xxh3 = fields.take("dtype", str), fields.take("shape", list), fields.hash("xxh3_128")
        codec, compressed = None, None
        if version > 1 and "codec" in fields.left:
            codec, compressed = fields.take("codec", str), fields.count("compressed_bytes")
        fields.finish()
        if not all(is_size(n) for n in shape):
            raise ShapeError("a shape is a list of positive integers", where=fields.where, found=shape)
        tensors[name] = TensorSpec(dtype, tuple(shape), xxh3, codec, compressed)
    return tensors


def _parse_img_shapes(value: list[Any], where: str, name: str = "img_shapes") -> ImgShapes:
    good = bool(value) and all(isinstance(s, list) and len(s) == 3 and all(is_size(n) for n in s) for s in value)
    if not good or any(shape[0] != 1 for shape in value):
        raise ShapeError(
            f"{name} is a list of [1, h, w], the target first" if name == "img_shapes" else f"{name} is [1, h, w]",
            where=where,
            expected="[[1, h, w], …]" if name == "img_shapes" else "[1, h, w]",
            found=value if name == "img_shapes" else value[0],
        )
    return tuple((t, h, w) for t, h, w in value)


def _parse_pixel_sizes(fields: Fields) -> ImgShapes:
    shapes: list[tuple[int, int, int]] = []
    while (suffix := v1_suffix(len(shapes))) == "" or f"height{suffix}" in fields.left:
        height, width = fields.count(f"height{suffix}"), fields.count(f"width{suffix}")
        if height % PIXELS_PER_TOKEN or width % PIXELS_PER_TOKEN or not height or not width:
            raise ShapeError(
                f"height{suffix} and width{suffix} must be positive multiples of {PIXELS_PER_TOKEN}",
                where=fields.where,
                found=f"{height}×{width}",
            )
        shapes.append((1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN))
    return tuple(shapes)


def is_size(value: Any) -> bool:
    """A positive number that the index can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
