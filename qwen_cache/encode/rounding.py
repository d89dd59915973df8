"""How far two encodings of one sample may be apart, and how far they are.

They are one function on other kernels: sums in another order, fused operations, batches of other shapes. So they differ
by rounding alone, and a bound follows from it. `u` is the unit roundoff: 2^-8 in bfloat16, 2^-24 in float32. A result
that was rounded n times in sequence, independently, is off by about u·√n of its length, and two such results by less
than 2·u·√n. n is 64: two residual additions in each of some 30 layers; the VAEs are less deep.

bfloat16: sums are accumulated in float32, so an operation rounds once. 2·2^-8·√64 = 2^-4.
float32: a sum of k terms rounds k times; k is at most 2^15. 2·2^-24·√(2^15·64) = 2^-12.5. Convolutions by transforms
(Winograd, FFT) round several times as coarsely, hence 2^-10.

That is the bound of the RMS over the rows (tokens) of a tensor. Rows amplify unequally, so one row may be off by four
times as much. The error of a row is relative to its length, or to the median length if the row is shorter: latents of
flat areas are short, and some embeddings before a final norm are a hundred times as long as the others.

What this finds and what not: other images and prompts are off by about 1 in the rows concerned, a missing VAE mean by
0.3. Noise is found from the bound on: 0.1 % in float32; in bfloat16 some 6 %, below which another GPU's rounding looks
the same (1.6 % for the VAE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qwen_cache.format.sample import SampleMeta

RMS_BOUND = {"bfloat16": 2.0**-4, "float32": 2.0**-10}
ONE_ROW = 4
"""The bound of a single row, in bounds of the RMS."""
SOFTMAX = 4
"""Attention: a softmax turns the absolute error of a logit into a relative one, and logits reach 4 and more."""
LEVEL = 1 / 254
"""Masks of the source are resized in integers, whose levels are 1/255: one level in the mean, two anywhere."""
AT_THRESHOLD = 1 / 8
"""Masks that are made: pixels next to a threshold may fall on either side of it."""
NOT_COMPARED = "thumbnails"
"""For people to look at, and no output of an encoder."""
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """A tensor of a sample in the cache, and as it was encoded again."""

    rms: float
    """Over its rows, relative; of a mask absolute."""
    largest: float
    """Of one row; of a mask of one token."""
    rms_bound: float
    largest_bound: float
    is_equal: bool
    """Bit by bit."""

    @property
    def is_within(self) -> bool:
        """Whether rounding explains it."""
        return self.rms <= self.rms_bound and self.largest <= self.largest_bound


def arrays(meta: SampleMeta, data: Mapping[str, memoryview]) -> dict[str, Array]:
    """The tensors of an encoded sample as readers give them: the empty prompt with its shared prefix."""
    found = {
        name: np.frombuffer(data[name], DTYPES[spec.dtype]).reshape(spec.shape)
        for name, spec in meta.tensors.items()
        if name != NOT_COMPARED
    }
    if "empty_prompt_embeds" in found and meta.prefix_length:
        prefix = found["prompt_embeds"][: meta.prefix_length]
        found["empty_prompt_embeds"] = np.concatenate([prefix, found["empty_prompt_embeds"]])
    return found


def difference(name: str, cached: Array, encoded: Array, dtype: str, mask_from: str | None = None) -> Difference:
    """Compare a tensor of equal shape; `dtype` is that of the recipe, `mask_from` the origin of an edit mask."""
    a, b = cached.astype(np.float64), encoded.astype(np.float64)
    if name == "edit_mask":
        errors, bound = np.abs(a - b), (LEVEL, 2 * LEVEL) if mask_from == "file" else (AT_THRESHOLD, 1.0)
    else:
        times = SOFTMAX if name == "attention" else 1
        errors, bound = row_errors(a, b), (times * RMS_BOUND[dtype], ONE_ROW * times * RMS_BOUND[dtype])
    rms, largest = (float(each) for each in (np.sqrt(np.mean(errors**2)), errors.max()))
    is_equal = cached.dtype == encoded.dtype and cached.tobytes() == encoded.tobytes()
    return Difference(_or_infinite(rms), _or_infinite(largest), *bound, is_equal)


def row_errors(a: Array, b: Array) -> Array:
    """The error of each row of `a` [rows, …] against `b`, relative to the row's length or the median length."""
    rows, reference = a.reshape(len(a), -1), b.reshape(len(b), -1)
    lengths = np.linalg.norm(reference, axis=1)
    least = np.median(lengths) or np.finfo(np.float64).tiny
    errors: Array = np.linalg.norm(rows - reference, axis=1) / np.maximum(lengths, least)
    return errors


def _or_infinite(number: float) -> float:
    """NaN is further away than any bound."""
    return math.inf if math.isnan(number) else number
