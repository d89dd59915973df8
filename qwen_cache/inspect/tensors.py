"""The numbers of stored tensors and their statistics, without torch, so that `inspect` starts fast."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from qwen_cache.format.cache import Sample

Floats = npt.NDArray[np.float32]


def numbers(sample: Sample, name: str) -> Floats:
    """A stored tensor in float32, which holds every number of every dtype of the format."""
    return sample.stored_numpy(name).astype(np.float32)


def rms(values: Floats) -> float:
    """The root of the mean square; 0 for an empty tensor."""
    return float(np.sqrt(np.square(values, dtype=np.float64).mean())) if values.size else 0.0


def peak(values: Floats) -> float:
    """The largest absolute value; 0 for an empty tensor."""
    return float(np.abs(values).max()) if values.size else 0.0


def statistics(values: Floats) -> dict[str, float]:
    """Minimum, maximum and mean; empty for an empty tensor, such as an empty prompt that is all prefix."""
    if not values.size:
        return {}
    return {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean(dtype=np.float64))}
