"""Write schemas/examples: valid datasets, and for each rule of FORMAT.md datasets that break it.

    python tools/make_examples.py

`valid` and `invalid` hold manifests and sample metadata as JSON, and whole caches of a few kilobytes. Names of
invalid examples start with all rules that they break (`F2-version-3.cache.v2.json`, `F6+F16-swapped-shards/`); all
other hashes and counts are recomputed and correct. The test suite checks parser, schemas, `verify` and readers with all
of them. Equal code gives equal bytes, except index.parquet, which contains pyarrow's version.
"""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qwen_cache.format.directory import STAGING
from qwen_cache.format.identity import Inputs, Slider, content_hash, dataset_identity, recipe_id
from qwen_cache.format.index import INDEX_NAME, index_schema
from qwen_cache.format.manifest import CHECKSUM, MANIFEST_NAME, IndexFile, Manifest, Recipe, Shard, with_checksum
from qwen_cache.format.measured import Alignment, Measured
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import PLANES_ZSTD, SampleMeta, TensorSpec, token_count
from qwen_cache.format.shard import END_OF_ARCHIVE
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update

EXAMPLES = Path(__file__).parents[1] / "schemas" / "examples"
DTYPES = {"float32": "F32", "float16": "F16", "uint8": "U8"}
"""Dtypes of the format by numpy's names; BF16 is stored as uint16, because numpy has no bfloat16."""
RECIPE = {"encoder_version": 1, "pipeline": "QwenImageEditPlusPipeline", "dtype": "bfloat16"}
TEXT_ALONE_RECIPE = {
    "encoder_version": 1,
    "pipeline": "QwenImage21Pipeline",
    "dtype": "bfloat16",
    "family": "Qwen-Image-2.1",
    "license": "qwen-research",
    "text_rows_only": True,
}


def digest(text: str) -> str:
    return content_hash(text.encode())


def manifest(format_version: int, samples: int) -> dict[str, Any]:
    keys = [digest(f"sample {i}") for i in range(samples)]
    shards = (Shard(f"{digest('shard')}.tar", samples, 10240),) if samples else ()
    made = Manifest(
        format_version,
        {"default": Recipe(RECIPE, samples, dataset_identity(keys))},
        IndexFile(samples, 4096, digest("index")),
        shards,
        {"qwen-cache": "0.1.0"},
    )
    return json.loads(made.to_bytes())


def without_checksum(value: dict[str, Any]) -> dict[str, Any]:
    return {name: item for name, item in value.items() if name != CHECKSUM}


def sample(
    format_version: int,
    controls: int,
    mask: str | None = None,
    attention: bool = False,
    thumbnails: bool = False,
    positions: tuple[int, ...] = (),
    target: str | None = digest("target"),
    seed: int | None = None,
    measured: Measured | None = None,
    rejected: bool = False,
    slider: bool = False,
) -> dict[str, Any]:
    """The metadata of a sample; one without `target` is an image to generate."""
    shapes = ((1, 4, 6), *((1, 2, 3 + i) for i in range(controls)))
    tensors = {"image_latents": (24, 64), "control_latents": (sum(h * w for _, h, w in shapes[1:]), 64)}
    tensors |= {"prompt_embeds": (30, 3584), "empty_prompt_embeds": (5 if format_version == 2 else 27, 3584)}
    if not controls:
        del tensors["control_latents"]
    if target is None:
        del tensors["image_latents"]
    if rejected:
        tensors = {"image_latents": (24, 64), "rejected_latents": (35, 64), **tensors}
    if slider:
        tensors |= {"slider_positive_embeds": (9, 3584), "slider_negative_embeds": (10, 3584)}
    specs = {name: TensorSpec("BF16", shape, digest(name)) for name, shape in tensors.items()}
    if mask:
        specs["edit_mask"] = TensorSpec("F32", (24,), digest("edit_mask"))
    if attention:
        specs["attention"] = TensorSpec("F16", (784, 14, 14), digest("attention"))
    if thumbnails:
        specs["thumbnails"] = TensorSpec("U8", (3000,), digest("thumbnails"))
    file = digest("mask") if mask == "file" else None
    worse = digest("rejected") if rejected else None
    inputs = Inputs(target, tuple(digest(f"control {i}") for i in range(controls)), file, seed, worse)
    prefix = 22 if format_version == 2 and controls else 0
    phrase = ((8, 10),) if attention else ()
    of_text = prefix, specs, phrase, mask, positions
    rejected_shape = (1, 5, 7) if rejected else None
    direction = Slider("make it 黑白, more", "make it 黑白, less") if slider else None
    of_images = measured, rejected_shape, direction
    meta = SampleMeta(digest("recipe"), inputs, "make it 黑白", shapes, *of_text, *of_images)
    return json.loads(meta.to_bytes(format_version))


def broken(value: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    value = copy.deepcopy(value)
    change(value)
    return value


def rename_shard(value: dict[str, Any]) -> None:
    value["shards"][0]["name"] = "../" + value["shards"][0]["name"]


CACHE, SAMPLE = manifest(2, 3), sample(2, 1, mask="file")
ATTENTION = sample(2, 1, mask="file", attention=True)
THUMBNAILS = sample(2, 1, thumbnails=True)
TEXT_ALONE = sample(2, 2, positions=(7, 15))
TO_GENERATE = sample(2, 1, target=None, seed=7)
MEASURED = sample(2, 2, measured=Measured(1.5, (Alignment((4.0, -0.5), (0.01, 0.01)), None)))
REJECTED = sample(2, 1, rejected=True)
SLIDER = sample(2, 1, slider=True)
VALID = {
    "empty.cache.v1.json": without_checksum(manifest(1, 0)),
    "small.cache.v1.json": without_checksum(manifest(1, 3)),
    "checksum.cache.v1.json": manifest(1, 3),
    "empty.cache.v2.json": manifest(2, 0),
    "small.cache.v2.json": CACHE,
    "ignorable-key.cache.v2.json": {**CACHE, "x-notes": {"must_understand": False, "text": "made on a Tuesday"}},
    "edit.sample.v1.json": sample(1, 1),
    "three-controls.sample.v1.json": sample(1, 3),
    "edit.sample.v2.json": SAMPLE,
    "attention.sample.v2.json": ATTENTION,
    "mask-by-difference.sample.v2.json": sample(2, 1, mask="difference"),
    "thumbnails.sample.v2.json": THUMBNAILS,
    "three-controls.sample.v2.json": sample(2, 3),
    "text-to-image.sample.v2.json": sample(2, 0),
    "text-alone.sample.v2.json": TEXT_ALONE,
    "to-generate.sample.v2.json": TO_GENERATE,
    "measured.sample.v2.json": MEASURED,
    "to-generate-from-text.sample.v2.json": sample(2, 0, target=None),
    "rejected.sample.v2.json": REJECTED,
    "rejected-of-text-to-image.sample.v2.json": sample(2, 0, rejected=True),
    "slider.sample.v2.json": SLIDER,
    "slider-to-generate-from-text.sample.v2.json": sample(2, 0, target=None, slider=True),
}
INVALID = {
    "F1-another-format.cache.v2.json": broken(CACHE, lambda v: v.update(format="webdataset")),
    "F1-no-shards.cache.v2.json": broken(CACHE, lambda v: v.pop("shards")),
    "F1-no-checksum.cache.v2.json": without_checksum(CACHE),
    "F1-negative-count.cache.v2.json": broken(CACHE, lambda v: v["index"].update(bytes=-1)),
    "F1-hash-too-short.cache.v2.json": broken(CACHE, lambda v: v["index"].update(xxh3_128="abc")),
    "F2-version-3.cache.v2.json": broken(CACHE, lambda v: v.update(format_version=3)),
    "F2-version-3.sample.v2.json": broken(SAMPLE, lambda v: v.update(format_version=3)),
    "F3-unknown-key.cache.v2.json": {**CACHE, "compression": "zstd"},
    "F3-key-that-must-be-understood.cache.v2.json": {**CACHE, "compression": {"must_understand": True}},
    "F19-phrase-outside-the-prompt.sample.v2.json": broken(ATTENTION, lambda v: v.update(phrase=[[8, 11]])),
    "F19-phrase-backwards.sample.v2.json": broken(ATTENTION, lambda v: v.update(phrase=[[4, 6], [5, 7]])),
    "F9-phrase-of-one-number.sample.v2.json": broken(ATTENTION, lambda v: v.update(phrase=[[4]])),
    "F10-phrase-changed.sample.v2.json": broken(ATTENTION, lambda v: v.update(phrase=[[8, 9]])),
    "F11-mask-from-nowhere.sample.v2.json": broken(SAMPLE, lambda v: v.pop("edit_mask_from")),
    "F11-origin-without-mask.sample.v2.json": broken(sample(2, 3), lambda v: v.update(edit_mask_from="file")),
    "F11-mask-from-elsewhere.sample.v2.json": broken(SAMPLE, lambda v: v.update(edit_mask_from="guess")),
    "F12-attention-without-grid.sample.v2.json": broken(
        ATTENTION, lambda v: v["tensors"]["attention"].update(shape=[784, 196])
    ),
    "F13-attention-in-bf16.sample.v2.json": broken(ATTENTION, lambda v: v["tensors"]["attention"].update(dtype="BF16")),
    "F12-thumbnails-as-pixels.sample.v2.json": broken(
        THUMBNAILS, lambda v: v["tensors"]["thumbnails"].update(shape=[100, 30])
    ),
    "F13-thumbnails-in-f16.sample.v2.json": broken(
        THUMBNAILS, lambda v: v["tensors"]["thumbnails"].update(dtype="F16")
    ),
    "F9-position-is-text.sample.v2.json": broken(TEXT_ALONE, lambda v: v.update(image_positions=[7, "15"])),
    "F12-position-beyond-the-prefix.sample.v2.json": broken(TEXT_ALONE, lambda v: v.update(image_positions=[7, 23])),
    "F12-positions-backwards.sample.v2.json": broken(TEXT_ALONE, lambda v: v.update(image_positions=[15, 7])),
    "F12-position-of-one-control.sample.v2.json": broken(TEXT_ALONE, lambda v: v.update(image_positions=[7])),
    "F9-shift-of-one-number.sample.v2.json": broken(
        MEASURED, lambda v: v["measured"]["controls"][0].update(shift=[4.0])
    ),
    "F12-measured-of-one-control.sample.v2.json": broken(MEASURED, lambda v: v["measured"]["controls"].pop()),
    "F9-seed-is-text.sample.v2.json": broken(TO_GENERATE, lambda v: v["inputs"].update(seed="7")),
    "F9-seed-is-negative.sample.v2.json": broken(TO_GENERATE, lambda v: v["inputs"].update(seed=-1)),
    "F10-seed-changed.sample.v2.json": broken(TO_GENERATE, lambda v: v["inputs"].update(seed=8)),
    "F11-latents-of-no-target.sample.v2.json": broken(
        TO_GENERATE, lambda v: v["tensors"].update(image_latents=SAMPLE["tensors"]["image_latents"])
    ),
    "F11-mask-of-no-target.sample.v2.json": broken(
        TO_GENERATE,
        lambda v: (v["tensors"].update(edit_mask=SAMPLE["tensors"]["edit_mask"]), v.update(edit_mask_from="file")),
    ),
    "F11-mask-file-of-no-target.sample.v2.json": broken(
        TO_GENERATE, lambda v: v["inputs"].update(mask=SAMPLE["inputs"]["mask"])
    ),
    "F11-thumbnails-of-no-image.sample.v2.json": broken(
        sample(2, 0, target=None), lambda v: v["tensors"].update(thumbnails=THUMBNAILS["tensors"]["thumbnails"])
    ),
    "F9-no-target-in-v1.sample.v1.json": broken(sample(1, 1), lambda v: v["inputs"].update(target=None)),
    "F3-seed-in-v1.sample.v1.json": broken(sample(1, 1), lambda v: v["inputs"].update(seed=7)),
    "F3-rejected-in-v1.sample.v1.json": broken(
        sample(1, 1), lambda v: v["inputs"].update(rejected=REJECTED["inputs"]["rejected"])
    ),
    "F9-rejected-is-not-a-hash.sample.v2.json": broken(REJECTED, lambda v: v["inputs"].update(rejected=None)),
    "F10-rejected-changed.sample.v2.json": broken(
        REJECTED, lambda v: v["inputs"].update(rejected=REJECTED["inputs"]["target"])
    ),
    "F11-no-rejected-latents.sample.v2.json": broken(REJECTED, lambda v: v["tensors"].pop("rejected_latents")),
    "F11-rejected-latents-of-no-image.sample.v2.json": broken(
        SAMPLE, lambda v: v["tensors"].update(rejected_latents=REJECTED["tensors"]["rejected_latents"])
    ),
    "F11-rejected-latents-in-v1.sample.v1.json": broken(
        sample(1, 1), lambda v: v["tensors"].update(rejected_latents=REJECTED["tensors"]["rejected_latents"])
    ),
    "F11-rejected-of-no-target.sample.v2.json": broken(
        REJECTED, lambda v: (v["inputs"].update(target=None), v["tensors"].pop("image_latents"))
    ),
    "F12-no-rejected-shape.sample.v2.json": broken(REJECTED, lambda v: v.pop("rejected_shape")),
    "F12-rejected-shape-of-no-image.sample.v2.json": broken(SAMPLE, lambda v: v.update(rejected_shape=[1, 5, 7])),
    "F12-rejected-of-another-size.sample.v2.json": broken(REJECTED, lambda v: v.update(rejected_shape=[1, 5, 6])),
    "F12-rejected-of-two-frames.sample.v2.json": broken(REJECTED, lambda v: v.update(rejected_shape=[5, 1, 7])),
    "F13-rejected-in-float32.sample.v2.json": broken(
        REJECTED, lambda v: v["tensors"]["rejected_latents"].update(dtype="F32")
    ),
    "F3-slider-in-v1.sample.v1.json": broken(sample(1, 1), lambda v: v.update(slider=SLIDER["slider"])),
    "F9-slider-without-negative.sample.v2.json": broken(SLIDER, lambda v: v["slider"].pop("negative")),
    "F10-slider-changed.sample.v2.json": broken(SLIDER, lambda v: v["slider"].update(negative="make it red")),
    "F11-no-slider-embeds.sample.v2.json": broken(SLIDER, lambda v: v["tensors"].pop("slider_negative_embeds")),
    "F11-slider-embeds-of-no-slider.sample.v2.json": broken(SLIDER, lambda v: v.pop("slider")),
    "F11-slider-embeds-in-v1.sample.v1.json": broken(
        sample(1, 1), lambda v: v["tensors"].update(slider_positive_embeds=SLIDER["tensors"]["slider_positive_embeds"])
    ),
    "F12-slider-embeds-of-another-width.sample.v2.json": broken(
        SLIDER, lambda v: v["tensors"]["slider_positive_embeds"].update(shape=[9, 64])
    ),
    "F13-slider-embeds-in-float32.sample.v2.json": broken(
        SLIDER, lambda v: v["tensors"]["slider_negative_embeds"].update(dtype="F32")
    ),
    "F3-unknown-key.sample.v2.json": {**SAMPLE, "caption_language": "en"},
    "F4-counts-disagree.cache.v2.json": broken(CACHE, lambda v: v["index"].update(samples=4)),
    "F4-shard-twice.cache.v2.json": broken(
        CACHE,
        lambda v: (
            v["shards"].append(v["shards"][0]),
            v["index"].update(samples=6),
            v["recipes"]["default"].update(samples=6),
        ),
    ),
    "F5-recipe-changed.cache.v2.json": broken(
        CACHE, lambda v: v["recipes"]["default"]["recipe"].update(dtype="float32")
    ),
    "F6-path-out-of-the-directory.cache.v2.json": broken(CACHE, rename_shard),
    "F6-name-is-not-the-hash.cache.v2.json": broken(CACHE, lambda v: v["shards"][0].update(xxh3_128=digest("another"))),
    "F21-recipe-renamed.cache.v1.json": with_checksum(manifest(1, 3)).replace(b'"default"', b'"Default"'),
    "F21-recipe-renamed.cache.v2.json": with_checksum(CACHE).replace(b'"default"', b'"Default"'),
    "F21-white-space-changed.cache.v2.json": with_checksum(CACHE) + b"\n",
    "F9-no-prompt.sample.v2.json": broken(SAMPLE, lambda v: v.pop("prompt")),
    "F9-prompt-is-a-number.sample.v2.json": broken(SAMPLE, lambda v: v.update(prompt=7)),
    "F9-mask-is-not-a-hash.sample.v2.json": broken(SAMPLE, lambda v: v["inputs"].update(mask="mask.png")),
    "F10-prompt-changed.sample.v2.json": broken(SAMPLE, lambda v: v.update(prompt="make it red")),
    "F11-no-image-latents.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"].pop("image_latents")),
    "F11-no-control-latents.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"].pop("control_latents")),
    "F11-unknown-tensor.sample.v2.json": broken(
        SAMPLE, lambda v: v["tensors"].update(depth=v["tensors"]["image_latents"])
    ),
    "F11-mask-in-v1.sample.v1.json": broken(
        sample(1, 1), lambda v: v["tensors"].update(edit_mask=SAMPLE["tensors"]["edit_mask"])
    ),
    "F12-sides-swapped-in-number.sample.v2.json": broken(SAMPLE, lambda v: v.update(img_shapes=[[1, 4, 7], [1, 2, 3]])),
    "F12-two-frames.sample.v2.json": broken(SAMPLE, lambda v: v.update(img_shapes=[[2, 4, 3], [1, 2, 3]])),
    "F12-no-size.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["image_latents"].update(shape=[0, 64])),
    "F12-prefix-too-long.sample.v2.json": broken(SAMPLE, lambda v: v.update(prefix_length=31)),
    "F12-not-a-multiple-of-16.sample.v1.json": broken(sample(1, 1), lambda v: v.update(height=65)),
    "F11-thumbnails-in-v1.sample.v1.json": broken(
        sample(1, 1), lambda v: v["tensors"].update(thumbnails=THUMBNAILS["tensors"]["thumbnails"])
    ),
    "F13-half-precision.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["prompt_embeds"].update(dtype="F16")),
    "F13-mixed.sample.v2.json": broken(SAMPLE, lambda v: v["tensors"]["prompt_embeds"].update(dtype="F32")),
}


# ---- whole caches ----------------------------------------------------------------------------------------------------

Array = np.ndarray[Any, np.dtype[Any]]
WIDTH = 8  # of prompt embeddings


@dataclass(frozen=True)
class ExampleSample:
    """A sample of an example: its arrays (bfloat16 as uint16), and the stored bytes."""

    name: str
    meta: SampleMeta
    arrays: dict[str, Array]
    stored: dict[str, bytes]


def numbers(seed: str, shape: tuple[int, ...]) -> Array:
    """Pseudo-random finite bfloat16 of both signs, 0.5 to 2 in size, as uint16."""
    words = np.frombuffer(b"".join(bytes.fromhex(digest(f"{seed} {i}")) for i in range(np.prod(shape) // 8)), np.uint16)
    return (words & 0x80FF | 0x3F00).reshape(shape)


def make(
    name: str,
    prompt: str,
    *sizes: tuple[int, int],
    rows: tuple[int, int | None] = (7, 3),
    prefix: int = 0,
    mask: bool = False,
    attention: tuple[int, int, int] | None = None,
    thumbnails: Callable[[int, int], bytes] | None = None,
    positions: tuple[int, ...] = (),
    to_generate: bool = False,
    seed: int | None = None,
    recipe: dict[str, Any] = RECIPE,
    measured: Measured | None = None,
    rejected: tuple[int, int] | None = None,
    slider: Slider | None = None,
) -> ExampleSample:
    """A sample with images of these sizes (h, w), the target first; `rows` of the prompt and the empty prompt."""
    shapes = tuple((1, h, w) for h, w in sizes)
    shape_of: dict[str, tuple[int, ...]] = {} if to_generate else {"image_latents": (token_count(shapes[:1]), 64)}
    rejected_shape = (1, *rejected) if rejected else None
    shape_of |= {"rejected_latents": (token_count([rejected_shape]), 64)} if rejected_shape else {}
    shape_of |= {"control_latents": (token_count(shapes[1:]), 64)} if len(shapes) > 1 else {}
    shape_of |= {"prompt_embeds": (rows[0], WIDTH)}
    shape_of |= {"empty_prompt_embeds": (rows[1], WIDTH)} if rows[1] else {}
    shape_of |= {"slider_positive_embeds": (4, WIDTH), "slider_negative_embeds": (5, WIDTH)} if slider else {}
    arrays = {each: numbers(f"{name} {each}", shape) for each, shape in shape_of.items()}
    if mask:
        arrays["edit_mask"] = np.linspace(0, 1, token_count(shapes[:1]), dtype=np.float32)
    if attention:
        arrays["attention"] = np.linspace(0, 1, math.prod(attention), dtype=np.float16).reshape(attention)
    if thumbnails:  # at the full size of these small images
        stored = [*(sizes[1:] if to_generate else sizes), *([rejected] if rejected else [])]
        width, height = sum(16 * w for _, w in stored), max(16 * h for h, _ in stored)
        arrays["thumbnails"] = np.frombuffer(thumbnails(width, height), np.uint8)
    controls = tuple(digest(f"{name} control {i}") for i in range(len(sizes) - 1))
    target = None if to_generate else digest(f"{name} target")
    worse = digest(f"{name} rejected") if rejected else None
    inputs = Inputs(target, controls, digest(f"{name} mask") if mask else None, seed, worse)
    of_text = prefix, {}, (), "file" if mask else None, positions
    of_images = measured, rejected_shape, slider
    meta = SampleMeta(recipe_id(recipe), inputs, prompt, shapes, *of_text, *of_images)
    return with_arrays(ExampleSample(name, meta, {}, {}), arrays)


def with_arrays(made: ExampleSample, arrays: dict[str, Array]) -> ExampleSample:
    """The sample with these tensors instead of its own, uncompressed."""
    stored = {name: array.tobytes() for name, array in arrays.items()}
    specs = {
        name: TensorSpec(DTYPES.get(array.dtype.name, "BF16"), array.shape, content_hash(stored[name]))
        for name, array in arrays.items()
    }
    return ExampleSample(made.name, replace(made.meta, tensors=specs), arrays, stored)


def with_stored(made: ExampleSample, name: str, data: bytes, **spec: Any) -> ExampleSample:
    """The sample with other bytes and another specification for one tensor."""
    changed = replace(made.meta.tensors[name], **spec)
    meta = replace(made.meta, tensors={**made.meta.tensors, name: changed})
    return replace(made, meta=meta, stored={**made.stored, name: data})


def compressed(made: ExampleSample, name: str) -> ExampleSample:
    """The sample with one tensor in planes-zstd; its frames are written by hand, as versions of zstandard differ."""
    positive = made.arrays[name] & 0x7FFF  # all numbers have the same high byte
    made = with_arrays(made, {**made.arrays, name: positive})
    data = planes(positive.astype("<u2").tobytes()[::2], frame(positive.size, [(positive.size, 0x3F)]))
    return with_stored(made, name, data, codec=PLANES_ZSTD, compressed_bytes=len(data))


def planes(*pieces: bytes) -> bytes:
    return b"".join([*(len(piece).to_bytes(8, "little") for piece in pieces), *pieces])


def frame(claimed: int, runs: Sequence[tuple[int, int]]) -> bytes:
    """A zstandard frame (RFC 8878) that claims to hold `claimed` bytes, and holds runs of (length, byte)."""
    blocks = [(length << 3 | 0b010 | (i == len(runs) - 1), value) for i, (length, value) in enumerate(runs)]
    header = 0xFD2FB528.to_bytes(4, "little") + b"\xe0" + claimed.to_bytes(8, "little")
    return header + b"".join(head.to_bytes(3, "little") + bytes([value]) for head, value in blocks)


def grey_jpeg(width: int, height: int) -> bytes:
    """A plain grey JPEG (ISO/IEC 10918-1), written by hand, because the bytes of encoders differ.

    Three components, each with all coefficients 0; the only codes are "no difference" and "end of block", one bit each.
    """
    components = b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    only_code = bytes([1, *bytes(15), 0])  # one code of one bit, for 0
    segments = [
        (0xDB, bytes([0, *[1] * 64])),
        (0xC0, bytes([8, *height.to_bytes(2, "big"), *width.to_bytes(2, "big"), 3]) + components),
        (0xC4, bytes([0x00]) + only_code),
        (0xC4, bytes([0x10]) + only_code),
        (0xDA, bytes([3, 1, 0, 2, 0, 3, 0, 0, 63, 0])),
    ]
    bits = 6 * -(-width // 8) * -(-height // 8)
    last = bytes([0xFF >> bits % 8]) if bits % 8 else b""
    headers = b"".join(bytes([0xFF, kind, *(2 + len(body)).to_bytes(2, "big")]) + body for kind, body in segments)
    return b"\xff\xd8" + headers + bytes(bits // 8) + last + b"\xff\xd9"


def grey_webp(width: int, height: int) -> bytes:
    """A plain grey WebP of one opacity (RFC 9649), written by hand as `grey_jpeg`: extended format, lossless data.

    Each of its five prefix codes has one symbol, of no bits, so pixels have none.
    """
    colour = [(0b101, 3), (128, 8)]  # a simple code of one symbol of 8 bits: green, red and blue
    fields = [(width - 1, 14), (height - 1, 14), (1, 1), (0, 3), (0, 3), *colour * 3, (0b101, 3), (64, 8), (0b0001, 4)]
    bits = "".join(f"{value:0{length}b}"[::-1] for value, length in fields)
    stream = b"\x2f" + int(bits[::-1], 2).to_bytes(-(-len(bits) // 8), "little")
    canvas = bytes([0x10, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = b"".join(
        name + len(body).to_bytes(4, "little") + body + bytes(len(body) % 2)
        for name, body in ((b"VP8X", canvas), (b"VP8L", stream))
    )
    return b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WEBP" + chunks


def write_cache(
    folder: Path,
    format_version: int,
    samples: Iterable[ExampleSample],
    shard_size: int,
    recipe: dict[str, Any] = RECIPE,
) -> None:
    """Write `samples` as a build does, from staging to commit."""
    by_key = {each.meta.key: each for each in samples}
    listed = [ListedSample(each.name, key) for key, each in by_key.items()]
    update = plan_update(folder, Existing.empty(format_version), format_version, listed)
    staging = open_staging(update, "example", shard_size)
    for each in by_key.values():
        staging.add(each.meta, {name: memoryview(data) for name, data in each.stored.items()})
    commit_update(update, staging, {"default": recipe}, {"qwen-cache": "0.1.0"})
    (folder / STAGING).rmdir()


TOGETHER = "put them into one \u0070icture"  # released examples keep their bytes; escaped for tools/check_words.py
CACHE_V1 = [
    make("edit", "make it 黑白", (2, 3), (3, 2)),
    make("three controls", TOGETHER, (2, 2), (1, 2), (2, 1), (1, 1)),
    make("imported", "no empty prompt is known", (1, 2), (1, 1), rows=(5, None)),
]
CACHE_V2 = [
    compressed(make("edit", "make it 黑白", (2, 3), (3, 2), prefix=4, mask=True), "image_latents"),
    make("three controls", TOGETHER, (2, 2), (1, 2), (2, 1), (1, 1), prefix=7, attention=(4, 2, 1)),
    make("no control", "a cat", (1, 3), thumbnails=grey_jpeg),
    make("imported", "no empty prompt is known", (1, 2), (1, 1), rows=(5, None), thumbnails=grey_jpeg),
    make("transparent", "a logo", (2, 1), thumbnails=grey_webp),
    make("text alone", "the cat of the first on the second", (2, 2), (1, 2), (2, 1), prefix=5, positions=(2, 4)),
]
TO_GENERATE_V2 = [
    make("night", "make it night", (2, 3), (3, 2), prefix=4, thumbnails=grey_jpeg, to_generate=True, seed=7),
    make("night", "make it night", (2, 3), (3, 2), prefix=4, thumbnails=grey_jpeg, to_generate=True, seed=8),
    make("three controls", TOGETHER, (2, 2), (1, 2), (2, 1), (1, 1), prefix=7, to_generate=True),
    make("words alone", "a cat", (1, 3), to_generate=True, seed=0),
]
MEASURED_V2 = [
    make(
        "shifted",
        "make it night",
        (2, 3),
        (2, 3),
        prefix=4,
        measured=Measured(0.5, (Alignment((4.0, 0.0), (0.0, 0.0)),)),
    ),
    make("reference", TOGETHER, (2, 2), (2, 2), (1, 2), prefix=7, measured=Measured(2.0, (None, None))),
    make("older", "make it day", (1, 1), (1, 1), prefix=2),
    make("no control", "a cat", (1, 3), measured=Measured(1.0, ())),
]
REJECTED_V2 = [
    make("edit", "make it night", (2, 3), (3, 2), prefix=4, thumbnails=grey_jpeg, rejected=(3, 2)),
    make("no control", "a cat", (1, 3), rejected=(1, 3)),
    compressed(make("mask", TOGETHER, (2, 2), (1, 2), prefix=3, mask=True, rejected=(2, 2)), "rejected_latents"),
    make("no rejected image", "make it day", (1, 1), (1, 1), prefix=2),
]
OLDER = Slider("an old face", "a young face")
SLIDER_V2 = [
    make("edit", "a face", (2, 3), (3, 2), prefix=4, thumbnails=grey_jpeg, slider=OLDER),
    make("words alone", "a face", (1, 3), to_generate=True, seed=0, slider=OLDER),
    compressed(make("target", "a face", (1, 3), slider=OLDER), "slider_positive_embeds"),
    make("no slider", "make it day", (1, 1), (1, 1), prefix=2),
]
VALID_CACHES = {
    "cache.v1": (1, CACHE_V1),
    "cache.v2": (2, CACHE_V2),
    "measured.v2": (2, MEASURED_V2),
    "rejected.v2": (2, REJECTED_V2),
    "slider.v2": (2, SLIDER_V2),
    "to-generate.v2": (2, TO_GENERATE_V2),
}
SHARD_SIZE = 8000  # two samples


# ---- invalid caches -------------------------------------------------------------------------------------------------

EDIT = make("edit", "make it night", (1, 1), (1, 2), prefix=2, mask=True)
PLAIN = make("plain", "a cat", (1, 2))
"""The samples of invalid caches, unless a fault needs another: each in its own shard, EDIT in the first."""

Row = dict[str, Any]


def forge(
    folder: Path,
    *,
    shard: Callable[[bytes], bytes] = lambda data: data,
    rows: Callable[[list[Row]], Any] = lambda _: None,
    index: Callable[[pa.Table], pa.Table] = lambda table: table,
    manifest: Callable[[dict[str, Any]], Any] = lambda _: None,
) -> None:
    """Change the first shard, the rows of the index, its table, the manifest; update the hashes after each change.

    The index is written without optional parts of Parquet, which halves its size.
    """
    value = json.loads((folder / MANIFEST_NAME).read_bytes())
    records = pq.read_table(folder / INDEX_NAME).to_pylist()
    old = value["shards"][0]
    data = shard((folder / old["name"]).read_bytes())
    (folder / old["name"]).unlink()
    new = Shard(f"{content_hash(data)}.tar", old["samples"], len(data))
    (folder / new.name).write_bytes(data)
    value["shards"][0] = new.to_json()
    for record in records:
        record["shard"] = new.name if record["shard"] == old["name"] else record["shard"]
    rows(records)
    value["recipes"]["default"]["identity"] = dataset_identity(record["key"] for record in records)
    sink = io.BytesIO()
    table = index(pa.Table.from_pylist(records, index_schema(value["format_version"])))
    pq.write_table(table, sink, compression="zstd", write_statistics=False, use_dictionary=False, store_schema=False)
    (folder / INDEX_NAME).write_bytes(sink.getvalue())
    size, hashed = sink.tell(), content_hash(sink.getvalue())
    value["index"] = IndexFile(value["index"]["samples"], size, hashed).to_json()
    manifest(value)
    (folder / MANIFEST_NAME).write_bytes(with_checksum(value))


def damage(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the first shard and update no hash."""
    path = folder / first_shard(folder)
    path.write_bytes(change(path.read_bytes()))


def first_shard(folder: Path) -> str:
    return str(json.loads((folder / MANIFEST_NAME).read_bytes())["shards"][0]["name"])


def sign_index(folder: Path, data: bytes) -> None:
    """Replace index.parquet by `data`, with its hash in the manifest."""
    (folder / INDEX_NAME).write_bytes(data)
    forged = {"bytes": len(data), "xxh3_128": content_hash(data)}
    value = json.loads((folder / MANIFEST_NAME).read_bytes())
    value["index"] |= forged
    (folder / MANIFEST_NAME).write_bytes(with_checksum(value))


def members(data: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The members of a shard, read by stock tarfile."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return [(info, tar.extractfile(info).read()) for info in tar.getmembers()]  # type: ignore[union-attr]


def archive(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """The tar of these members, with the sizes of their bytes."""
    pieces = []
    for info, data in entries:
        info.size = len(data)
        pieces += [info.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)]
    return b"".join([*pieces, END_OF_ARCHIVE])


def insert_member(folder: Path, name: str, **attributes: Any) -> None:
    """Insert an empty first member, and shift the offsets in the index."""
    info = tarfile.TarInfo(name)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    header = info.tobuf(tarfile.USTAR_FORMAT)
    forge(folder, shard=lambda data: header + data, rows=lambda rows: move(rows[0], len(header)))


def with_metadata(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Change the text of the first .json member."""

    def changed(data: bytes) -> bytes:
        (info, text), *others = members(data)
        return archive([(info, change(text)), *others])

    return changed


def with_header(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    """Change the JSON of the first .safetensors header, and its stated length to match."""

    def changed(data: bytes) -> bytes:
        first, (info, member), *others = members(data)
        end = 8 + int.from_bytes(member[:8], "little")
        text = change(member[8:end])
        return archive([first, (info, len(text).to_bytes(8, "little") + text + member[end:]), *others])

    return changed


def overwrite(find: bytes, new: bytes, offset: int = 0) -> Callable[[bytes], bytes]:
    """Write `new` at `offset` bytes after the start of the first `find`."""

    def changed(data: bytes) -> bytes:
        begin = data.index(find) + offset
        return data[:begin] + new + data[begin + len(new) :]

    return changed


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def move(record: Row, distance: int) -> None:
    """Shift the offsets of a sample and its tensors in the index."""
    for entry in (record, *(value for value in record.values() if isinstance(value, dict))):
        entry["offset"] += distance


def link_to_the_manifest(folder: Path) -> None:
    path = folder / first_shard(folder)
    path.unlink()
    path.symlink_to(MANIFEST_NAME)


def swap_shards(folder: Path) -> None:
    one, two = sorted(folder.glob("*.tar"))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


def stray_shard(folder: Path) -> None:
    (folder / f"{content_hash(END_OF_ARCHIVE)}.tar").write_bytes(END_OF_ARCHIVE)


def with_codec(data: bytes, **spec: Any) -> ExampleSample:
    """EDIT with these bytes as its compressed image_latents, bfloat16 `[1, 64]`."""
    return with_stored(EDIT, "image_latents", data, codec=PLANES_ZSTD, compressed_bytes=len(data), **spec)


def with_number(name: str, value: float) -> ExampleSample:
    """EDIT with this value as the third number of a tensor, or the last of a shorter one."""
    array = EDIT.arrays[name].copy()
    word = np.float32(value) if array.dtype == np.float32 else np.float32(value).view(np.uint32) >> 16
    array.reshape(-1)[min(2, array.size - 1)] = word
    return with_arrays(EDIT, {**EDIT.arrays, name: array})


RAW = EDIT.stored["image_latents"][::2]  # the plane of 64 mantissas
INVALID_SAMPLES: dict[str, ExampleSample] = {
    "F14-another-hash": with_stored(
        EDIT, "prompt_embeds", EDIT.stored["prompt_embeds"], xxh3_128=digest("other bytes")
    ),
    "F15-nan-in-bf16": with_number("prompt_embeds", float("nan")),
    "F15-inf-in-bf16": with_number("image_latents", float("-inf")),
    "F15-nan-in-f32": with_number("edit_mask", float("nan")),
    "F15-inf-in-f32": with_number("edit_mask", float("inf")),
    "F18-frame-claims-a-terabyte": with_codec(planes(RAW, frame(1 << 40, [(64, 0x3F)]))),
    "F18-frame-expands-beyond-its-claim": with_codec(planes(RAW, frame(64, [(1 << 17, 0x3F)] * 10))),
    "F18-frame-is-shorter-than-its-claim": with_codec(planes(RAW, frame(64, [(63, 0x3F)]))),
    "F18-no-frame": with_codec(planes(RAW, b"not a frame")),
    "F18-plane-of-2-to-63-bytes": with_codec((1 << 63).to_bytes(8, "little") * 2 + RAW),
    "F18-planes-end-early": with_codec(planes(RAW, RAW)[:-1]),
    "F18-shorter-than-the-lengths": with_codec(bytes(9)),
    "F20-thumbnails-are-a-png": with_arrays(
        EDIT, {**EDIT.arrays, "thumbnails": np.frombuffer(b"\x89PNG\r\n\x1a\n", np.uint8)}
    ),
    "F20-thumbnails-are-a-torn-webp": with_arrays(
        EDIT, {**EDIT.arrays, "thumbnails": np.frombuffer(grey_webp(48, 32)[:-2], np.uint8)}
    ),
    "F5+F18-too-few-bytes": with_codec(b"\0"),
    "F5+F18-unknown-codec": with_stored(EDIT, "image_latents", RAW, codec="lzma", compressed_bytes=len(RAW)),
}
"""Samples instead of EDIT. F5 too if the index row cannot be read: it then belongs to no recipe."""

INVALID_CACHES: dict[str, Callable[[Path], Any]] = {
    "F5-another-order": lambda folder: forge(
        folder,
        rows=list.reverse,
        manifest=lambda v: v["recipes"]["default"].update(
            identity=dataset_identity([EDIT.meta.key, PLAIN.meta.key]),
        ),
    ),
    "F6-missing-shard": lambda folder: (folder / first_shard(folder)).unlink(),
    "F6-truncated-shard": lambda folder: damage(folder, lambda data: data[: len(data) // 2]),
    "F6-bytes-appended": lambda folder: damage(folder, lambda data: data + bytes(512)),
    "F6+F16-swapped-shards": swap_shards,
    "F6-link-to-another-file": link_to_the_manifest,
    "F6-flipped-bit-in-padding": lambda folder: damage(folder, lambda data: flip(data, len(data) - 1025)),
    "F6+F8-flipped-bit-in-a-tar-header": lambda folder: damage(folder, lambda data: flip(data, 100)),
    "F6+F14-flipped-bit-in-a-tensor": lambda folder: damage(
        folder, lambda data: flip(data, data.index(EDIT.stored["prompt_embeds"]))
    ),
    "F6+F16-row-outside-the-directory": lambda folder: forge(
        folder, rows=lambda rows: rows[0].update(shard=f"../{rows[0]['shard']}")
    ),
    "F7-another-hash": lambda folder: (folder / INDEX_NAME).write_bytes((folder / INDEX_NAME).read_bytes() + b"\0"),
    "F7-not-parquet": lambda folder: sign_index(folder, b"PAR1" + bytes(64) + b"PAR1"),
    "F7-column-missing": lambda folder: forge(folder, index=lambda table: table.drop_columns(["mask"])),
    "F7-column-too-many": lambda folder: forge(
        folder, index=lambda table: table.append_column("width", table["text_length"])
    ),
    "F7-column-of-another-type": lambda folder: forge(
        folder, index=lambda table: table.set_column(0, "key", table["key"].cast(pa.binary()))
    ),
    "F7+F5+F16-null-in-a-list": lambda folder: forge(
        folder, rows=lambda rows: rows[0].update(img_shapes=[[1, 1, 1], [1, None, 2]])
    ),
    "F7+F5+F16-null-offset": lambda folder: forge(folder, rows=lambda rows: rows[0].update(offset=None)),
    "F7+F5+F16-text-length": lambda folder: forge(folder, rows=lambda rows: rows[0].update(text_length=8)),
    "F7+F5+F16-tensor-outside-its-sample": lambda folder: forge(
        folder, rows=lambda rows: rows[0].update(offset=rows[0]["offset"] + 4096)
    ),
    "F8-member-outside-the-directory": lambda folder: insert_member(folder, "../../x"),
    "F8-symbolic-link": lambda folder: insert_member(
        folder, f"{EDIT.meta.key}.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"
    ),
    "F8-hard-link": lambda folder: insert_member(
        folder, f"{EDIT.meta.key}.json", type=tarfile.LNKTYPE, linkname="cache.json"
    ),
    "F8-no-end": lambda folder: forge(folder, shard=lambda data: data[: -len(END_OF_ARCHIVE)]),
    "F8-bytes-after-the-end": lambda folder: forge(folder, shard=lambda data: data + bytes(512)),
    "F8-tensors-first": lambda folder: forge(folder, shard=lambda data: archive(members(data)[::-1])),
    "F8-tensors-missing": lambda folder: forge(folder, shard=lambda data: archive(members(data)[:1])),
    "F9-metadata-without-prompt": lambda folder: forge(folder, shard=overwrite(b'"prompt":', b'"prmopt":')),
    "F9-key-given-twice": lambda folder: forge(
        folder, shard=with_metadata(lambda text: text.replace(b'"recipe"', b'"prompt":"a cat","recipe"'))
    ),
    "F9-header-claims-2-to-60-bytes": lambda folder: forge(
        folder, shard=overwrite(b'{"image_latents"', (1 << 60).to_bytes(8, "little"), -8)
    ),
    "F9-header-of-another-shape": lambda folder: forge(
        folder, shard=with_header(lambda text: text.replace(b"[1,64]", b"[64,1]"))
    ),
    "F9-header-is-not-json": lambda folder: forge(folder, shard=overwrite(b'{"image_latents"', b"[")),
    "F9-header-with-metadata": lambda folder: forge(
        folder, shard=with_header(lambda text: text.replace(b"{", b'{"__metadata__":{"a":"b"},', 1))
    ),
    "F10+F16-key-twice": lambda folder: forge(folder, rows=lambda rows: rows.__setitem__(1, rows[0])),
    "F16-another-place": lambda folder: forge(folder, rows=lambda rows: move(rows[0], 512)),
    "F16-another-prefix": lambda folder: forge(folder, rows=lambda rows: rows[0].update(prefix_length=1)),
    "F17-stray-shard": stray_shard,
}
"""Changes of a cache of EDIT and PLAIN. F16 with another rule: the sample's row or bytes cannot be read, so that index
and shard disagree too."""


def write_invalid_cache(folder: Path, name: str, whole: Path | None = None) -> None:
    """Change a copy of the cache `whole`, which `write_whole` has written, or one of its own."""
    if whole and name in INVALID_CACHES:
        shutil.copytree(whole, folder)
    else:
        write_whole(folder, INVALID_SAMPLES.get(name, EDIT))
    INVALID_CACHES.get(name, lambda _: None)(folder)


def write_whole(folder: Path, first: ExampleSample = EDIT) -> None:
    write_cache(folder, 2, [first, PLAIN], shard_size=1)
    forge(folder)  # shrinks the index


def example_bytes(value: dict[str, Any]) -> bytes:
    """The file of a manifest, with a new checksum if it has one, or of a sample's metadata."""
    if CHECKSUM in value:
        return with_checksum(value)
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def write_examples(out: Path) -> None:
    """Write all examples; replaces the folder."""
    shutil.rmtree(out, ignore_errors=True)
    for folder, examples in (("valid", VALID), ("invalid", INVALID)):
        (out / folder).mkdir(parents=True)
        for name, value in examples.items():
            (out / folder / name).write_bytes(value if isinstance(value, bytes) else example_bytes(value))
    for name, (format_version, samples) in VALID_CACHES.items():
        write_cache(out / "valid" / name, format_version, samples, SHARD_SIZE)
    with TemporaryDirectory() as folder:
        write_whole(whole := Path(folder) / "whole")
        for name in (*INVALID_CACHES, *INVALID_SAMPLES):
            write_invalid_cache(out / "invalid" / name, name, whole)


if __name__ == "__main__":
    write_examples(EXAMPLES)
