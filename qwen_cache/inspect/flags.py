"""Samples that someone should look at, by what is odd about them: `{flag: keys}`, each key once, in their order.

`index_flags` opens no shard; `scan_flags` reads every tensor. A flag is a question, not a fault: nothing is refused.
Numbers that are NaN or Inf are none of them, as no cache holds any.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from qwen_cache.console import counting
from qwen_cache.format.cache import Cache
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta
from qwen_cache.inspect.duplicates import Look, alike, look
from qwen_cache.inspect.images import stored_images
from qwen_cache.inspect.tensors import numbers, peak, rms

FLAGS = {
    "repeated_target": "The same target under several prompts.",
    "identity_pair": "A control that is the target itself: nothing is edited.",
    "frequent_prompt": "A prompt that more than a tenth of all samples have, beside others.",
    "long_prompt": "A prompt of more than 2000 bytes, some 500 tokens: the stock pipelines cut off what exceeds 512.",
    "empty_mask": "An edit mask that masks nothing.",
    "full_mask": "An edit mask over more than nine tenths of the image.",
    "extreme_numbers": "Latents or embeddings much larger or smaller than those of the others.",
    "near_duplicate": "A target that looks like another file's; those alike stand side by side.",
    "doubtful_mask": "An edit mask that hardly lies where the mask head says.",
}
FREQUENT = 0.1
AT_LEAST = 10  # samples with a prompt: in a small set a tenth is nothing
LONG_PROMPT = 2000  # bytes in UTF-8, which follow the count of tokens better than characters do, Chinese ones too
FULL = 0.9
MEASURED = ("image_latents", "control_latents", "prompt_embeds")
ENOUGH = 20  # samples, to say what is usual
SPREADS = 8  # of a normal distribution, one in 10¹⁵ lies that far away
LARGEST_PEAK = 8  # times the usual largest number of a tensor: on the way to Inf
LEAST_SPREAD = 0.01  # of the median: numbers that hardly differ are all usual


def index_flags(rows: Sequence[IndexRow]) -> dict[str, list[str]]:
    """What the index alone says of the samples of a recipe."""
    metas = [row.meta for row in rows]
    prompts: defaultdict[str, set[str]] = defaultdict(set)
    for meta in metas:
        prompts[meta.inputs.target].add(meta.prompt)
    often = frequent(Counter(meta.prompt for meta in metas))
    tests: dict[str, Callable[[SampleMeta], bool]] = {
        "repeated_target": lambda meta: len(prompts[meta.inputs.target]) > 1,
        "identity_pair": lambda meta: meta.inputs.target in meta.inputs.controls,
        "frequent_prompt": lambda meta: meta.prompt in often,
        "long_prompt": lambda meta: len(meta.prompt.encode("utf-8")) > LONG_PROMPT,
    }
    return {flag: [meta.key for meta in metas if test(meta)] for flag, test in tests.items()}


def frequent(prompts: Counter[str]) -> set[str]:
    """Those that occur often; where there is only one, it is meant so."""
    most = FREQUENT * prompts.total()
    often = {prompt for prompt, count in prompts.items() if count > most and count >= AT_LEAST}
    return often if len(prompts) > 1 else set()


def scan_flags(cache: Cache, rows: Sequence[IndexRow]) -> dict[str, list[str]]:
    """What the tensors say, of duplicates nothing without thumbnails."""
    looks: dict[str, Look] = {}
    with counting(f"reading {cache.recipe_name}", len(cache)) as advance:
        found = _odd(cache, rows, looks, advance)
    if not looks:
        return found
    with counting("comparing images", len(looks)) as advance:
        return found | {"near_duplicate": _near_duplicates(rows, looks, advance)}


def _odd(
    cache: Cache, rows: Sequence[IndexRow], looks: dict[str, Look], advance: Callable[[int], None]
) -> dict[str, list[str]]:
    """What the tensors of each sample say; into `looks` goes what each target looks like."""
    found: dict[str, list[str]] = {"empty_mask": [], "full_mask": []}
    sizes: defaultdict[str, dict[str, float]] = defaultdict(dict)
    peaks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in cache:
        target = sample.row.meta.inputs.target
        if "thumbnails" in sample.row.meta.tensors and target not in looks:
            looks[target] = look(stored_images(sample)[0])
        if "edit_mask" in sample.row.meta.tensors:
            mask = numbers(sample, "edit_mask")
            found["empty_mask"] += [] if mask.any() else [sample.key]
            found["full_mask"] += [sample.key] if mask.mean() > FULL else []
        for name in sample.row.meta.tensors.keys() & set(MEASURED):
            values = numbers(sample, name)
            sizes[name][sample.key], peaks[name][sample.key] = rms(values), peak(values)
        advance(1)
    odd = {key for each in sizes.values() for key in outliers(each.keys(), list(each.values()))}
    odd |= {key for each in peaks.values() for key in spikes(each.keys(), list(each.values()))}
    found["extreme_numbers"] = [row.meta.key for row in rows if row.meta.key in odd]
    return found


def _near_duplicates(rows: Sequence[IndexRow], looks: Mapping[str, Look], advance: Callable[[int], None]) -> list[str]:
    """The keys, group by group, of samples whose targets are different files that look alike."""
    keys: defaultdict[str, list[str]] = defaultdict(list)
    for row in rows:
        keys[row.meta.inputs.target].append(row.meta.key)
    targets = list(looks)
    return [key for group in alike(list(looks.values()), advance) for i in group for key in keys[targets[i]]]


def outliers(keys: Iterable[str], values: Sequence[float]) -> set[str]:
    """Those further from the median than `SPREADS` robust standard deviations; none of a few."""
    if len(values) < ENOUGH:
        return set()
    middle = np.median(values)
    distance = np.abs(np.asarray(values) - middle)
    spread = max(1.4826 * float(np.median(distance)), LEAST_SPREAD * float(middle))
    return {key for key, far in zip(keys, distance > SPREADS * spread, strict=True) if far}


def spikes(keys: Iterable[str], values: Sequence[float]) -> set[str]:
    """Those much larger than the median; none of a few."""
    if len(values) < ENOUGH:
        return set()
    most = LARGEST_PEAK * float(np.median(values))
    return {key for key, value in zip(keys, values, strict=True) if value > most}
