"""Samples to check by hand, by the reason: positions, each once per flag, in the order of the index.

`index_flags` reads columns of the index and opens no shard; `scan_flags` reads every tensor, one sample at a time. A
flag is a question, not a fault, and never an error. There is no flag for NaN or Inf, because no cache holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from qwen_cache.format.cache import Cache
from qwen_cache.inspect.columns import Bools, Digests, Integers, batches, digests, integers, reading
from qwen_cache.inspect.duplicates import SIDE, Signatures, near_duplicates, thumbnail_signature
from qwen_cache.inspect.images import stored_thumbnails
from qwen_cache.inspect.tensors import numbers, peak, rms
from qwen_cache.terminal import counting

FLAGS = {
    "repeated_target": "The same target under several prompts.",
    "identity_pair": "A control that is identical to the target: nothing is edited.",
    "frequent_prompt": "A prompt that more than a tenth of all samples share.",
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

Floats = npt.NDArray[np.float64]


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
        found: dict[str, list[Bools]] = {"identity_pair": [], "frequent_prompt": [], "long_prompt": []}
        for batch in batches(cache.table, ("target", "controls", "prompt")):
            prompts = batch["prompt"].cast(pa.string())
            found["identity_pair"].append(_has_target_among_controls(batch))
            found["frequent_prompt"].append(_bools(pc.is_in(prompts, value_set=frequent)))
            found["long_prompt"].append(_bools(pc.greater(pc.binary_length(prompts), LONG_PROMPT)))
        positions = {flag: np.flatnonzero(np.concatenate([np.zeros(0, bool), *each])) for flag, each in found.items()}
        return {"repeated_target": repeated_targets(cache.table)} | positions


def _bools(column: pa.Array) -> Bools:
    values: Bools = column.to_numpy(zero_copy_only=False).astype(bool)
    return values


def _has_target_among_controls(batch: pa.RecordBatch) -> Bools:
    """Whether a control of each sample has the content of its target."""
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
    prompts = _hashes_of_prompts(table, wanted)[np.searchsorted(np.flatnonzero(wanted), order)]
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


def _hashes_of_prompts(table: pa.Table, wanted: Bools) -> Digests:
    """xxh3-128 of the prompts of the wanted rows: the equality that keys of samples rely on too."""
    parts, begin = [np.empty((0, 2), np.uint64)], 0
    for batch in batches(table, ("prompt",)):
        chosen = batch["prompt"].filter(pa.array(wanted[begin : begin + len(batch)])).cast(pa.binary())
        data = b"".join(xxhash.xxh3_128_digest(text) for text in chosen.to_pylist())
        parts.append(np.frombuffer(data, ">u8").reshape(-1, 2).astype(np.uint64))
        begin += len(batch)
    return np.concatenate(parts)


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


def outliers(values: Floats) -> Bools:
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


def spikes(values: Floats) -> Bools:
    """Which values are above `MAX_PEAK_RATIO` times the median; none of a few values. NaN as in `outliers`."""
    if np.count_nonzero(~np.isnan(values)) < MIN_SAMPLES:
        return np.zeros(len(values), bool)
    high: Bools = values > MAX_PEAK_RATIO * float(np.nanmedian(values))
    return high
