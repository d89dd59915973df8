"""Flags of unusual samples: columns as numbers, tensors, images, near-duplicates, flags."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from io import BytesIO
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from PIL import Image, ImageDraw

from qwen_cache.errors import IndexFileError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.measured import MISALIGNED, Alignment, findings
from qwen_cache.format.sample import BYTES_PER_ELEMENT, PIXELS_PER_TOKEN
from qwen_cache.settings.load import Config
from qwen_cache.sources.images import cut_thumbnails, is_transparent, over_white
from qwen_cache.storage.remote import Location
from qwen_cache.terminal import counting

# ---- columns ---------------------------------------------------------------------------------------------------------
# The columns of an index as NumPy arrays, a batch of rows at a time, so that no sample becomes a Python object.
#
# `inspect` counts with these. They are not checked against each other, as `Cache.row` and `verify` do; a value that is
# missing or of the wrong form is an IndexFileError.

ROWS = 1 << 16
"""Rows of a batch: some 50 MB of arrays, and enough that the time for Python's part does not matter."""
HASH_DIGITS = 32
ELEMENT_SIZES = np.array(list(BYTES_PER_ELEMENT.values()))
NIBBLES = np.full(256, 255, np.uint8)
NIBBLES[list(b"0123456789abcdef")] = range(16)

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Digests = npt.NDArray[np.uint64]
"""`[N, 2]`: hashes of 128 bits."""


@dataclass(frozen=True)
class Images:
    """The images of N samples, one after another: of each the target, or the image to generate, then its controls."""

    counts: Integers
    """`[N]`: the images of each sample, 1 or more."""
    shapes: Integers
    """`[M, 3]`: 1, height and width of each image in tokens."""

    @property
    def first(self) -> Integers:
        """`[N]`: the position of each sample's first image."""
        first: Integers = np.cumsum(self.counts) - self.counts
        return first

    @property
    def tokens(self) -> Integers:
        """`[N]`: the image tokens of each sample."""
        tokens: Integers = np.add.reduceat(self.shapes.prod(1), self.first) if len(self.counts) else self.counts
        return tokens


@dataclass(frozen=True)
class Tensors:
    """One tensor of the samples that have it."""

    shapes: pa.Array
    """A list for each."""
    element_sizes: Integers
    nbytes: Integers
    stored_bytes: Integers


def batches(table: pa.Table, columns: Sequence[str], rows: int = ROWS) -> Iterator[pa.RecordBatch]:
    """Consecutive rows of these columns, as far as the table has them."""
    names = [name for name in columns if name in table.column_names]
    yield from table.select(names).to_batches(max_chunksize=rows)


@contextmanager
def reading(folder: Location) -> Iterator[None]:
    """Errors in the columns of a cache's index as IndexFileErrors."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise IndexFileError(f"a column of the index cannot be read: {error}", where=folder / INDEX_NAME) from None


def integers(column: pa.Array) -> Integers:
    """A column of integers; ValueError where one is missing."""
    if column.null_count:
        raise ValueError("a number is null")
    values: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def images(batch: pa.RecordBatch) -> Images:
    """The images of a batch with the columns of sizes, of either format version."""
    if "img_shapes" not in batch.schema.names:
        return _images_in_pixels(batch)
    listed = batch["img_shapes"]
    counts, shapes = integers(pc.list_value_length(listed)), listed.flatten()
    sides = integers(pc.list_value_length(shapes))
    if (counts < 1).any() or (sides != 3).any():
        raise ValueError("img_shapes is not a list of [1, h, w]")
    return Images(counts, integers(shapes.flatten()).reshape(-1, 3))


def _images_in_pixels(batch: pa.RecordBatch) -> Images:
    counts = 1 + integers(pc.list_value_length(batch["height_control"]))
    if (counts != 1 + integers(pc.list_value_length(batch["width_control"]))).any():
        raise ValueError("height_control and width_control have different lengths")
    shapes = np.ones((int(counts.sum()), 3), np.int64)
    found = Images(counts, shapes)
    is_control = np.ones(len(shapes), bool)
    is_control[found.first] = False
    for axis, side in ((1, "height"), (2, "width")):
        shapes[found.first, axis] = integers(batch[side])
        shapes[is_control, axis] = integers(batch[f"{side}_control"].flatten())
    if (shapes[:, 1:] % PIXELS_PER_TOKEN).any():
        raise ValueError(f"sides must be multiples of {PIXELS_PER_TOKEN}")
    shapes[:, 1:] //= PIXELS_PER_TOKEN
    return found


def tensors(column: pa.Array) -> Tensors:
    """The tensors of a column, without the rows that have none."""
    column = column.filter(column.is_valid())
    shapes, dtypes = pc.struct_field(column, "shape"), pc.struct_field(column, "dtype")
    known = integers(pc.index_in(dtypes, value_set=pa.array(list(BYTES_PER_ELEMENT))))
    sizes = ELEMENT_SIZES[known]
    counts, values = integers(pc.list_value_length(shapes)), integers(shapes.flatten())
    nbytes, some = sizes.copy(), counts > 0  # the product of an empty shape is 1
    if some.any():
        nbytes[some] *= np.multiply.reduceat(values, (np.cumsum(counts) - counts)[some])
    codecs, lengths = pc.struct_field(column, "codec"), integers(pc.struct_field(column, "length"))
    compressed = codecs.is_valid().to_numpy(zero_copy_only=False)
    return Tensors(shapes, sizes, nbytes, np.where(compressed, lengths, nbytes))


def digests(column: pa.Array) -> Digests:
    """The hashes of a column of text without nulls."""
    column = column.cast(pa.string())
    if column.null_count or (len(column) and pc.any(pc.not_equal(pc.binary_length(column), HASH_DIGITS)).as_py()):
        raise ValueError("a hash is not an xxh3-128")
    if not len(column):
        return np.empty((0, 2), np.uint64)
    begin = np.frombuffer(column.buffers()[1], np.int32)[column.offset]
    text = np.frombuffer(column.buffers()[2], np.uint8)[begin : begin + HASH_DIGITS * len(column)]
    digits = NIBBLES[text].reshape(len(column), HASH_DIGITS)
    if digits.max() > 15:
        raise ValueError("a hash is not an xxh3-128")
    found: Digests = (digits[:, ::2] << 4 | digits[:, 1::2]).view(">u8").astype(np.uint64)
    return found


def distinct(rows: npt.NDArray[np.uint64]) -> int:
    """The number of distinct rows of `[N, k]`."""
    if not len(rows):
        return 0
    ordered = rows[np.lexsort(rows.T)]
    return 1 + int((ordered[1:] != ordered[:-1]).any(axis=1).sum())


def count_into(tally: Counter[int], values: Integers) -> None:
    """Add how often each value occurs."""
    found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        tally[value] += count


def take(cache: Cache, column: str, positions: Sequence[int] | Integers) -> list[Any]:
    """The values of a column at these positions, in their order."""
    chunks, wanted = cache.table[column].chunks, np.asarray(positions, np.int64)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    of_chunk = np.searchsorted(ends, wanted, side="right")
    taken: list[Any] = [None] * len(wanted)
    for i in np.unique(of_chunk).tolist():
        where = np.flatnonzero(of_chunk == i)
        within = wanted[where] - (ends[i] - len(chunks[i]))
        for place, value in zip(where.tolist(), chunks[i].take(pa.array(within)).to_pylist(), strict=True):
            taken[place] = value
    return taken


# ---- tensors ---------------------------------------------------------------------------------------------------------
# The numbers of stored tensors and their statistics, without torch, so that `inspect` starts fast.

Singles = npt.NDArray[np.float32]


def numbers(sample: Sample, name: str) -> Singles:
    """A stored tensor in float32, which holds every number of every dtype of the format."""
    return sample.stored_numpy(name).astype(np.float32)


def rms(values: Singles) -> float:
    """The root of the mean square; 0 for an empty tensor."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean())) if values.size else 0.0


def peak(values: Singles) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return float(np.abs(values).max()) if values.size else 0.0


def statistics(values: Singles) -> dict[str, float]:
    """Minimum, maximum and mean; empty for an empty tensor, such as an empty prompt that is all prefix."""
    if not values.size:
        return {}
    return {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean(dtype=np.float64))}


# ---- images ----------------------------------------------------------------------------------------------------------
# Images of cached samples for the page: thumbnails from the cache (`stored_images`), or decoded by the VAE.
#
# Only decoding (`decoded_images`) needs torch and a model.

THUMBNAIL = 256  # pixels of the longer side
QUALITY = 85
RED, OPACITY = (255, 0, 0), 0.5
ARROW, ARROWS_AT = 0.12, (0.2, 0.5, 0.8)
"""The length of the longest arrow of a misaligned control, and where arrows are, as fractions of the image."""


class TitledImage(NamedTuple):
    """An image file for the page."""

    title: str
    data: bytes
    kind: Literal["jpeg", "webp"]


ImageSource = Callable[[Sample], Sequence[TitledImage]]
"""Makes the images of a sample; an empty list where the sample has none."""


def no_images(sample: Sample) -> list[TitledImage]:
    """The images of a page without images."""
    return []


def data_url(image: TitledImage) -> str:
    """The image as a URL that contains it."""
    return f"data:image/{image.kind};base64,{b64encode(image.data).decode('ascii')}"


def stored_images(sample: Sample) -> list[TitledImage]:
    """The images of a sample from its thumbnails."""
    return titled_images(sample, stored_thumbnails(sample)) if "thumbnails" in sample else []


def stored_thumbnails(sample: Sample) -> list[Image.Image]:
    """The thumbnails of a sample that has them, the target first if there is one."""
    return cut_thumbnails(sample.buffer("thumbnails"), sample.row.meta.stored_shapes, sample.key)


def decoded_images(settings: Config, device: str) -> ImageSource:
    """An image source that decodes latents with the VAE of `settings.model`."""

    from qwen_cache.encode.vae import decode_images, load_vae
    from qwen_cache.models.devices import choose_device, torch_dtype
    from qwen_cache.models.folder import open_model

    vae_device = choose_device(device, "--vae-device")
    folder = open_model(settings.model.path, ("vae",), settings.model.revision, vae=settings.model.vae)
    vae = load_vae(folder, vae_device, torch_dtype(settings.predict.dtype))

    def decode(sample: Sample) -> list[TitledImage]:
        shapes = sample.img_shapes
        images = decode_images(vae, sample["image_latents"], shapes[:1]) if "image_latents" in sample else []
        images += decode_images(vae, sample["control_latents"], shapes[1:]) if shapes[1:] else []
        worse = sample.rejected_shape
        images += decode_images(vae, sample["rejected_latents"], [worse]) if worse else []
        return titled_images(sample, images)

    return decode


def titled_images(sample: Sample, images: Sequence[Image.Image]) -> list[TitledImage]:
    """Files of the controls and, where they are, of target, rejected image and edit mask; `images` are target,
    controls, rejected image."""
    targets = images[:1] if "image_latents" in sample else []
    controls = images[len(targets) : len(targets) + len(sample.img_shapes) - 1]
    shown = [(f"control {i}" if controls[1:] else "control", each) for i, each in enumerate(controls, 1)]
    shown += [("target", target) for target in targets]
    shown += [("rejected", image) for image in images[len(targets) + len(controls) :]]
    measured = sample.row.meta.measured
    for i, (control, found) in enumerate(
        zip(controls, measured.controls if measured and targets else (), strict=False), 1
    ):
        height, width = (PIXELS_PER_TOKEN * side for side in sample.img_shapes[0][1:])
        if found and found.displacement((width, height)) >= MISALIGNED:
            shown.append((f"control {i} on target: {found}", onion_skin(targets[0], control, found, (width, height))))
    if "edit_mask" in sample:
        mask = numbers(sample, "edit_mask").reshape(sample.img_shapes[0][1:])
        shown.append(("edit mask", overlaid(targets[0], mask)))
    return [TitledImage(title, *_encoded(image)) for title, image in shown]


def overlaid(image: Image.Image, mask: npt.NDArray[np.float32]) -> Image.Image:
    """The image in grey with a mask [h, w] in red over it; each cell is the square that the loss masks.

    White is behind what is transparent.
    """
    opacity = Image.fromarray((255 * OPACITY * mask).astype(np.uint8)).resize(image.size, Image.Resampling.NEAREST)
    shown = over_white(image).convert("L").convert("RGB")  # so that only the mask is red
    shown.paste(RED, (0, 0), opacity)
    return shown


def onion_skin(target: Image.Image, control: Image.Image, found: Alignment, size: tuple[int, int]) -> Image.Image:
    """The target in cyan and its control in red, grey where they agree, with arrows from where the target has a point
    to where the control has it; the arrows are longer than that, and the longest is `ARROW` of the width.

    `size` is the width and height of the target, whose pixels `found` counts.
    """
    below, above = (over_white(each).convert("L") for each in (target, control.resize(target.size)))
    shown = Image.merge("RGB", (above, below, below))
    places = [(x, y) for x in ARROWS_AT for y in ARROWS_AT]
    (shift_x, shift_y), (zoom_x, zoom_y) = found.shift, found.zoom
    moves = [(shift_x + zoom_x * (x - 0.5) * size[0], shift_y + zoom_y * (y - 0.5) * size[1]) for x, y in places]
    longer = ARROW * target.width / max(max(map(abs, move)) for move in moves)
    pen = ImageDraw.Draw(shown)
    for (x, y), (right, down) in zip(places, moves, strict=True):
        begin = x * target.width, y * target.height
        end = begin[0] + longer * right, begin[1] + longer * down
        pen.line([begin, end], RED, width=2)
        pen.circle(begin, 2, RED)
    return shown


def _encoded(image: Image.Image) -> tuple[bytes, Literal["jpeg", "webp"]]:
    """A JPEG, or a WebP if the image is transparent anywhere."""
    kind: Literal["jpeg", "webp"] = "webp" if is_transparent(image) else "jpeg"
    small = image.copy() if kind == "webp" else image.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    data = BytesIO()
    small.save(data, kind, quality=QUALITY)
    return data.getvalue(), kind


# ---- duplicates ------------------------------------------------------------------------------------------------------
# Near-duplicate images, found by their thumbnails: the same image after scaling, compression, dimming or a small crop.
#
# Two images are near-duplicates when their edges are in the same places with the same relative strength, and their
# colours are the same relative to their contrast. Scaling, compression, less light or contrast, and a crop by 1 %
# hardly change either; one of the two may be grey. Horizontal and vertical edges are compared separately, because lines
# of text differ in only one of them. Plain images and smooth gradients have no near-duplicates. Every image is compared
# with every other, as matrix products: the time grows with the square of their number, and never depends on their
# content.

SIDE, COLOUR_SIDE = 12, 6  # finer: a crop moves the edges; coarser: all text is the same
MIN_EDGES = 0.5  # grey levels between neighbours, on average: below, noise decides
MIN_COLOUR = 4  # levels from grey: below, the image counts as grey
MIN_CORRELATION = 0.95  # of edges: photographs keep more after those changes; two views of a scene have 0.6
MAX_COLOUR_DISTANCE = 0.35  # relative to the stronger colours: an overexposed sky loses about as much
BLOCK_ROWS, BLOCK_COLUMNS = 128, 2048  # of the matrix of comparisons: a block stays in the processor's cache

Signature = npt.NDArray[np.uint8]
"""`[12, 12, 3]`: a thumbnail in YCbCr, at the size at which images are compared."""
Signatures = npt.NDArray[np.uint8]
"""`[N, 12, 12, 3]`"""


def thumbnail_signature(image: Image.Image) -> Signature:
    """The signature of an image, which `near_duplicates` compares; white is behind what is transparent."""
    return np.asarray(over_white(image).convert("YCbCr").resize((SIDE, SIDE), Image.Resampling.BOX))


@dataclass(frozen=True)
class Features:
    """The features of `N` images that have edges."""

    position: npt.NDArray[np.intp]
    """`[N]`: the position of each image among all signatures."""
    across: Singles
    """`[N, 132]`: differences from left to right, as vectors of length 1."""
    down: Singles
    """`[N, 132]`: differences from top to bottom, as vectors of length 1."""
    colours: Singles
    """`[N, 72]`: colours in units of the contrast; 0 for a grey image."""

    def subset(self, which: slice | Bools) -> Features:
        return Features(*(getattr(self, field.name)[which] for field in fields(self)))

    def matches(self, others: Features) -> Bools:
        """`[N, M]`: which pairs are near-duplicates; a test is skipped where the one before leaves no pair."""
        matches: Bools = self.across @ others.across.T >= MIN_CORRELATION
        if matches.any():
            matches &= self.down @ others.down.T >= MIN_CORRELATION
        if matches.any():
            matches &= _same_colours(self.colours, others.colours)
        return matches


def near_duplicates(
    signatures: Signatures | Sequence[Signature], advance: Callable[[int], None] = lambda _: None
) -> list[list[int]]:
    """Groups of positions: every image of a group matches its first. `advance` receives counts of compared images."""
    if not len(signatures):
        return []
    rest, groups = _features(np.asarray(signatures)), []
    advance(len(signatures) - len(rest.position))
    while left := len(rest.position):
        block, starts = rest.subset(slice(BLOCK_ROWS)), range(0, left, BLOCK_COLUMNS)
        matches = np.concatenate([block.matches(rest.subset(slice(i, i + BLOCK_COLUMNS))) for i in starts], axis=1)
        ungrouped = np.ones(left, bool)
        for i in np.flatnonzero(matches.sum(1) > 1):
            group = matches[i] & ungrouped
            group[:i] = False
            if ungrouped[i] and group.sum() > 1:
                ungrouped &= ~group
                groups.append(rest.position[group].tolist())
        rest, ungrouped = rest.subset(slice(BLOCK_ROWS, None)), ungrouped[BLOCK_ROWS:]
        rest = rest if ungrouped.all() else rest.subset(ungrouped)
        advance(left - len(rest.position))
    return groups


def _same_colours(these: Singles, those: Singles) -> Bools:
    """`[N, M]`: which pairs have the same colours, or a grey image."""
    length, others = np.square(these).sum(1)[:, None], np.square(those).sum(1)
    least = np.maximum(length, others)
    least *= -(MAX_COLOUR_DISTANCE**2)
    least += length
    least += others
    close: Bools = 2 * these @ those.T >= least
    close |= (length == 0) | (others == 0)
    return close


def _features(signatures: Signatures) -> Features:
    """The features of all images that have edges."""
    starts = range(0, len(signatures), BLOCK_COLUMNS)
    blocks = [_block_features(start, signatures[start : start + BLOCK_COLUMNS]) for start in starts]
    return Features(*(np.concatenate([getattr(block, field.name) for block in blocks]) for field in fields(Features)))


def _block_features(start: int, signatures: Signatures) -> Features:
    """The features of signatures `[N, 12, 12, 3]`; `start` is the position of the first."""
    images: Singles = signatures.astype(np.float32)
    ramp = np.linspace(-1, 1, SIDE)
    even = _unit(np.stack([np.ones(SIDE * SIDE), np.tile(ramp, SIDE), np.repeat(ramp, SIDE)]).astype(np.float32))
    grey: Singles = images[..., 0].reshape(len(signatures), -1)
    grey -= grey @ even.T @ even  # without brightness and linear gradients
    rough: Singles = grey.reshape(-1, SIDE, SIDE)
    across = (rough[:, :, 1:] - rough[:, :, :-1]).reshape(len(signatures), -1)
    down = (rough[:, 1:] - rough[:, :-1]).reshape(len(signatures), -1)
    has_edges = np.minimum(np.square(across).mean(1), np.square(down).mean(1)) >= MIN_EDGES**2
    each = SIDE // COLOUR_SIDE  # the mean colours of squares: [N, 12, 12, 2] to [N, 72]
    squares = (images[..., 1:] - 128).reshape(len(signatures), COLOUR_SIDE, each, COLOUR_SIDE, each, 2)
    colours: Singles = squares.mean(axis=(2, 4)).reshape(len(signatures), -1)
    colours[np.abs(colours).max(1) < MIN_COLOUR] = 0
    colours /= np.maximum(rough.std(axis=(1, 2)), 1)[:, None]
    return Features(start + np.arange(len(signatures)), _unit(across), _unit(down), colours).subset(has_edges)


def _unit(vectors: Singles) -> Singles:
    lengths = np.sqrt(np.square(vectors).sum(1, keepdims=True))
    unit: Singles = vectors / np.maximum(lengths, np.float32(1e-6))
    return unit


# ---- flags -----------------------------------------------------------------------------------------------------------
# Samples to check by hand, by the reason: positions, each once per flag, in the order of the index.
#
# `index_flags` reads columns of the index and opens no shard; `scan_flags` reads every tensor, one sample at a time. A
# flag is a question, not a fault, and never an error. There is no flag for NaN or Inf, because no cache holds them.

FLAGS = {
    "repeated_target": "The same target under several prompts.",
    "identity_pair": "A control that is identical to the target: nothing is edited.",
    "frequent_prompt": "A prompt that more than a tenth of all samples share.",
    "misaligned_control": "A control that is shifted or zoomed against its target, by half a pixel or more.",
    "enlarged_target": "A target that is smaller than the size that is trained, and scaled up.",
    "long_prompt": "A prompt of more than 2000 bytes, some 500 tokens: the stock pipelines truncate at 512.",
    "empty_mask": "An edit mask that masks nothing.",
    "full_mask": "An edit mask over more than nine tenths of the image.",
    "extreme_numbers": "Latents or embeddings much larger or smaller than those of the others.",
    "near_duplicate": "A target that is nearly the same image as others: each resembles the first of its group.",
    "doubtful_mask": "An edit mask that hardly overlaps the mask head's.",
}
FREQUENT = 0.1
MIN_REPEATS = 10  # samples with a prompt: a tenth of a small dataset is too few
LONG_PROMPT = 2000  # bytes of UTF-8: closer to the number of tokens than characters, in Chinese too
FULL = 0.9
MEASURED = ("image_latents", "control_latents", "prompt_embeds")
MIN_SAMPLES = 20  # fewer do not show what is usual
MAX_DEVIATIONS = 8  # one in 10¹⁵ samples of a normal distribution exceeds it
MAX_PEAK_RATIO = 8  # to the median peak: larger values are on the way to Inf
MIN_DEVIATION = 0.01  # relative to the median: values that hardly differ are all usual

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Flagged:
    """The flagged samples of a recipe, by their positions in the index."""

    flags: Mapping[str, Integers]
    """Ascending; those of `near_duplicate` group by group."""
    groups: Sequence[Integers] = ()
    """Near-duplicates: all targets of a group resemble that of the first."""

    def with_flag(self, flag: str, positions: Integers) -> Flagged:
        return replace(self, flags={**self.flags, flag: positions})

    def bits(self, samples: int) -> npt.NDArray[np.uint16]:
        """`[N]`: the flags of each sample, as bits in the order of `FLAGS`."""
        bits = np.zeros(samples, np.uint16)
        for flag, positions in self.flags.items():
            bits[positions] |= np.uint16(1 << list(FLAGS).index(flag))
        return bits


# ---- of the index ----------------------------------------------------------------------------------------------------


def index_flags(cache: Cache) -> dict[str, Integers]:
    """Flags of the samples of a recipe that need no tensors."""
    with reading(cache.folder):
        frequent = pa.array(sorted(frequent_prompts(cache.table)), pa.string())
        columns: dict[str, list[Bools]] = {"identity_pair": [], "frequent_prompt": [], "long_prompt": []}
        for batch in batches(cache.table, ("target", "controls", "prompt")):
            prompts = batch["prompt"].cast(pa.string())
            columns["identity_pair"].append(_has_target_among_controls(batch))
            columns["frequent_prompt"].append(_bools(pc.is_in(prompts, value_set=frequent)))
            columns["long_prompt"].append(_bools(pc.greater(pc.binary_length(prompts), LONG_PROMPT)))
        positions = {flag: np.flatnonzero(np.concatenate([np.zeros(0, bool), *each])) for flag, each in columns.items()}
        found = {"repeated_target": repeated_targets(cache.table)} | positions
        if (measured := findings(cache.table)).measured:
            found |= {"misaligned_control": np.unique(measured.misaligned)}
            found |= {"enlarged_target": np.sort(measured.enlarged)}
        return found


def _bools(column: pa.Array) -> Bools:
    values: Bools = column.to_numpy(zero_copy_only=False).astype(bool)
    return values


def _has_target_among_controls(batch: pa.RecordBatch) -> Bools:
    """`[N]`: true for samples of which a control has the content of the target."""
    controls, target = batch["controls"], batch["target"].cast(pa.string())
    of_sample = np.repeat(np.arange(len(batch)), integers(pc.list_value_length(controls)))
    equal = pc.equal(controls.flatten().cast(pa.string()), target.take(pa.array(of_sample)))
    found = np.zeros(len(batch), bool)
    found[of_sample[_bools(pc.fill_null(equal, fill_value=False))]] = True
    return found


def frequent_prompts(table: pa.Table) -> set[str]:
    """Prompts that occur often; none where all samples have the same one, which is intended.

    A prompt of more than a tenth of all samples is one of more than a tenth of some batch: only these are counted.
    """
    candidates: set[str] = set()
    prompts = [batch["prompt"].cast(pa.string()) for batch in batches(table, ("prompt",))]
    for column in prompts:
        counts = pc.value_counts(column)
        often = counts.filter(pc.greater(counts.field("counts"), int(FREQUENT * len(column))))
        candidates.update(often.field("values").to_pylist())
    counted, listed = Counter[str](), pa.array(sorted(candidates), pa.string())
    for column in prompts:
        counts = pc.value_counts(column.filter(pc.is_in(column, value_set=listed)))
        counted.update(dict(zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)))
    often_enough = {prompt for prompt, count in counted.items() if count >= MIN_REPEATS}
    limit, samples = FREQUENT * table.num_rows, table.num_rows
    return {prompt for prompt in often_enough if limit < counted[prompt] < samples}


def repeated_targets(table: pa.Table) -> Integers:
    """The positions of samples whose target has another prompt in another sample."""
    order, begins, sizes = by_target(table)
    several = np.repeat(sizes > 1, sizes)
    order, begins, sizes = order[several], begins[several], sizes[sizes > 1]
    if not len(order):
        return order
    wanted = np.zeros(table.num_rows, bool)
    wanted[order] = True
    # Prompts are compared by xxh3-128, the equality that keys of samples rely on too.
    parts, begin = [np.empty((0, 2), np.uint64)], 0
    for batch in batches(table, ("prompt",)):
        chosen = batch["prompt"].filter(pa.array(wanted[begin : begin + len(batch)])).cast(pa.binary())
        data = b"".join(xxhash.xxh3_128_digest(text) for text in chosen.to_pylist())
        parts.append(np.frombuffer(data, ">u8").reshape(-1, 2).astype(np.uint64))
        begin += len(batch)
    prompts = np.concatenate(parts)[np.searchsorted(np.flatnonzero(wanted), order)]
    first = np.repeat(prompts[begins], sizes, axis=0)
    differs = np.logical_or.reduceat((prompts != first).any(axis=1), np.flatnonzero(begins))
    return np.sort(order[np.repeat(differs, sizes)])


def by_target(table: pa.Table) -> tuple[Integers, Bools, Integers]:
    """The positions of the samples with a target, those of equal targets side by side, in the order of the index.

    Also which of them are the first of their target, and the number of samples of each target.
    """
    parts, there = [np.empty((0, 2), np.uint64)], [np.zeros(0, bool)]
    for batch in batches(table, ("target",)):
        there.append(_bools(batch["target"].is_valid()))
        parts.append(digests(batch["target"].drop_null()))
    hashes, positions = np.concatenate(parts), np.flatnonzero(np.concatenate(there))
    order = np.lexsort(hashes.T)  # stable
    hashes, begins = hashes[order], np.ones(len(order), bool)
    begins[1:] = (hashes[1:] != hashes[:-1]).any(axis=1)
    sizes = np.diff(np.append(np.flatnonzero(begins), len(order)))
    return positions[order], begins, sizes


# ---- of the tensors --------------------------------------------------------------------------------------------------


def scan_flags(cache: Cache) -> Flagged:
    """Flags that need tensors, and the groups of near-duplicates.

    `near_duplicate` has all groups one after another, and is there only if the cache has thumbnails.
    """
    with reading(cache.folder):
        order, begins, sizes = by_target(cache.table)
        shown = _first_with_thumbnails(cache.table, order, sizes)
    signatures = np.empty((len(shown), SIDE, SIDE, 3), np.uint8)
    with counting(f"reading {cache.recipe_name}", len(cache)) as advance:
        flags = _tensor_flags(cache, shown, signatures, advance)
    if not len(shown):
        return Flagged(flags)
    with counting("comparing images", len(shown)) as advance:
        similar = near_duplicates(signatures, advance)
    target_of, first = np.empty(len(cache), np.int64), np.flatnonzero(begins)
    target_of[order] = np.repeat(np.arange(len(sizes)), sizes)
    groups = []
    for group in similar:
        targets = target_of[shown[group]]
        groups.append(np.concatenate([order[first[t] : first[t] + sizes[t]] for t in targets]))
    return Flagged({**flags, "near_duplicate": np.concatenate([np.zeros(0, np.int64), *groups])}, groups)


def _first_with_thumbnails(table: pa.Table, order: Integers, sizes: Integers) -> Integers:
    """The first position of each target that has a thumbnail, ascending."""
    if "thumbnails" not in table.column_names:
        return np.zeros(0, np.int64)
    stored = [_bools(batch["thumbnails"].is_valid()) for batch in batches(table, ("thumbnails",))]
    is_stored = np.concatenate([np.zeros(0, bool), *stored])[order]
    _, first = np.unique(np.repeat(np.arange(len(sizes)), sizes)[is_stored], return_index=True)
    return np.sort(order[is_stored][first])


def _tensor_flags(
    cache: Cache, shown: Integers, signatures: Signatures, advance: Callable[[int], None]
) -> dict[str, Integers]:
    """Flags of masks and numbers; fills `signatures` with those of the targets at the positions `shown`."""
    empty, full, odd = (np.zeros(len(cache), bool) for _ in range(3))
    levels, peaks = ({name: np.full(len(cache), np.nan) for name in MEASURED} for _ in range(2))
    filled = 0
    for i, sample in enumerate(cache):
        if filled < len(shown) and shown[filled] == i:
            signatures[filled] = thumbnail_signature(stored_thumbnails(sample)[0])
            filled += 1
        if "edit_mask" in sample:
            mask = numbers(sample, "edit_mask")
            empty[i], full[i] = not mask.any(), mask.mean() > FULL
        for name in sample.row.meta.tensors.keys() & set(MEASURED):
            values = numbers(sample, name)
            levels[name][i], peaks[name][i] = rms(values), peak(values)
        advance(1)
    for each in levels.values():
        odd |= outliers(each)
    for each in peaks.values():
        odd |= spikes(each)
    return {
        flag: np.flatnonzero(which)
        for flag, which in {"empty_mask": empty, "full_mask": full, "extreme_numbers": odd}.items()
    }


def outliers(values: Doubles) -> Bools:
    """Which values are further than `MAX_DEVIATIONS` robust standard deviations from the median; none of a few values.

    NaN stands for a sample without the tensor.
    """
    if np.count_nonzero(~np.isnan(values)) < MIN_SAMPLES:
        return np.zeros(len(values), bool)
    median = np.nanmedian(values)
    distance = np.abs(values - median)
    deviation = max(1.4826 * float(np.nanmedian(distance)), MIN_DEVIATION * float(median))
    far: Bools = distance > MAX_DEVIATIONS * deviation
    return far


def spikes(values: Doubles) -> Bools:
    """Which values are above `MAX_PEAK_RATIO` times the median; none of a few values. NaN as in `outliers`."""
    if np.count_nonzero(~np.isnan(values)) < MIN_SAMPLES:
        return np.zeros(len(values), bool)
    high: Bools = values > MAX_PEAK_RATIO * float(np.nanmedian(values))
    return high
