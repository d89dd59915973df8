"""Samples to check by hand, by the reason: `{flag: keys}`, each key once per flag, in the order of the index.

`index_flags` opens no shard; `scan_flags` reads every tensor. A flag is a question, not a fault, and never an error.
There is no flag for NaN or Inf, because no cache holds them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from qwen_cache.console import counting
from qwen_cache.format.cache import Cache
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta
from qwen_cache.inspect.duplicates import Signature, near_duplicates, thumbnail_signature
from qwen_cache.inspect.images import stored_thumbnails
from qwen_cache.inspect.tensors import numbers, peak, rms

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


def index_flags(rows: Sequence[IndexRow]) -> dict[str, list[str]]:
    """Flags of the samples of a recipe that need no tensors."""
    metas = [row.meta for row in rows]
    prompts: defaultdict[str, set[str]] = defaultdict(set)
    for meta in metas:
        if meta.inputs.target:
            prompts[meta.inputs.target].add(meta.prompt)
    frequent = frequent_prompts(Counter(meta.prompt for meta in metas))
    tests: dict[str, Callable[[SampleMeta], bool]] = {
        "repeated_target": lambda meta: len(prompts.get(meta.inputs.target or "", ())) > 1,
        "identity_pair": lambda meta: meta.inputs.target in meta.inputs.controls,
        "frequent_prompt": lambda meta: meta.prompt in frequent,
        "long_prompt": lambda meta: len(meta.prompt.encode("utf-8")) > LONG_PROMPT,
    }
    return {flag: [meta.key for meta in metas if test(meta)] for flag, test in tests.items()}


def frequent_prompts(prompts: Counter[str]) -> set[str]:
    """Prompts that occur often; none where all samples have the same one, which is intended."""
    limit = FREQUENT * prompts.total()
    often = {prompt for prompt, count in prompts.items() if count > limit and count >= MIN_REPEATS}
    return often if len(prompts) > 1 else set()


def scan_flags(cache: Cache, rows: Sequence[IndexRow]) -> tuple[dict[str, list[str]], list[list[str]]]:
    """Flags that need tensors, and the groups of near-duplicates.

    `near_duplicate` has the keys of all groups, and is there only if the cache has thumbnails. All targets of a group
    are near-duplicates of the first one.
    """
    signatures: dict[str, Signature] = {}
    with counting(f"reading {cache.recipe_name}", len(cache)) as advance:
        flags = _tensor_flags(cache, rows, signatures, advance)
    if not signatures:
        return flags, []
    with counting("comparing images", len(signatures)) as advance:
        groups = _near_duplicates(rows, signatures, advance)
    return flags | {"near_duplicate": [key for group in groups for key in group]}, groups


def _tensor_flags(
    cache: Cache, rows: Sequence[IndexRow], signatures: dict[str, Signature], advance: Callable[[int], None]
) -> dict[str, list[str]]:
    """Flags of masks and numbers; fills `signatures` with that of each target, by its hash."""
    flags: dict[str, list[str]] = {"empty_mask": [], "full_mask": []}
    levels: defaultdict[str, dict[str, float]] = defaultdict(dict)
    peaks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in cache:
        target = sample.row.meta.inputs.target
        if target and "thumbnails" in sample and target not in signatures:
            signatures[target] = thumbnail_signature(stored_thumbnails(sample)[0])
        if "edit_mask" in sample:
            mask = numbers(sample, "edit_mask")
            flags["empty_mask"] += [] if mask.any() else [sample.key]
            flags["full_mask"] += [sample.key] if mask.mean() > FULL else []
        for name in sample.row.meta.tensors.keys() & set(MEASURED):
            values = numbers(sample, name)
            levels[name][sample.key], peaks[name][sample.key] = rms(values), peak(values)
        advance(1)
    odd = {key for each in levels.values() for key in outliers(each.keys(), list(each.values()))}
    odd |= {key for each in peaks.values() for key in spikes(each.keys(), list(each.values()))}
    flags["extreme_numbers"] = [row.meta.key for row in rows if row.meta.key in odd]
    return flags


def _near_duplicates(
    rows: Sequence[IndexRow], signatures: Mapping[str, Signature], advance: Callable[[int], None]
) -> list[list[str]]:
    """Groups of the keys of samples whose targets are near-duplicates in different files."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.meta.inputs.target:
            keys[row.meta.inputs.target].append(row.meta.key)
    targets, groups = list(signatures), near_duplicates(list(signatures.values()), advance)
    return [[key for i in group for key in keys[targets[i]]] for group in groups]


def outliers(keys: Iterable[str], values: Sequence[float]) -> set[str]:
    """Keys of values further than `MAX_DEVIATIONS` robust standard deviations from the median; none of a few values."""
    if len(values) < MIN_SAMPLES:
        return set()
    median = np.median(values)
    distance = np.abs(np.asarray(values) - median)
    deviation = max(1.4826 * float(np.median(distance)), MIN_DEVIATION * float(median))
    return {key for key, far in zip(keys, distance > MAX_DEVIATIONS * deviation, strict=True) if far}


def spikes(keys: Iterable[str], values: Sequence[float]) -> set[str]:
    """Keys of values above `MAX_PEAK_RATIO` times the median; none of a few values."""
    if len(values) < MIN_SAMPLES:
        return set()
    limit = MAX_PEAK_RATIO * float(np.median(values))
    return {key for key, value in zip(keys, values, strict=True) if value > limit}
