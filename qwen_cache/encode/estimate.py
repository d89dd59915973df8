"""What a build will write: tokens and bytes of its samples, estimated before anything is encoded, and the free space.

Latents are exact; text is estimated from the number of characters. Headers, thumbnails and attention are not counted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.compute as pc

from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.plan import BuildPlan, PlannedSample
from qwen_cache.format.remote import STAGED
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.format.update import Update
from qwen_cache.models.family import estimate_tokens
from qwen_cache.sources.sizes import img_shapes
from qwen_cache.storage.files import cache_home
from qwen_cache.storage.remote import Url
from qwen_cache.terminal import human_bytes

TEMPLATE = 1000  # tokens around the prompt and 32 images: more than any template has
OTHER = 32_000_000  # bytes of header, thumbnails and attention: more than an image of 10 megapixels needs
COMPRESSED = 0.7  # of the bytes, with zstd: settings/sections.py


@dataclass(frozen=True)
class Estimate:
    """The size of encoded samples: tokens of latents and of prompt embeddings, and their bytes."""

    image_tokens: int
    text_tokens: int
    bytes: int

    @property
    def tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    def __str__(self) -> str:
        tokens = f"{self.image_tokens:,} image tokens, {self.text_tokens:,} text tokens"
        return f"{tokens}, {human_bytes(self.bytes)}"


def estimate(samples: Sequence[PlannedSample], job: BuildJob) -> Estimate:
    """An estimate of the size of `samples` once they are encoded."""
    image = sum(token_count(img_shapes([size for _, _, size in sample.images])) for sample in samples)
    family = job.model.family
    text = sum(estimate_tokens(family, s.row.prompt, job.encoder_pixels(s))[1] for s in samples)
    elements = image * LATENT_CHANNELS + text * job.model.text_width
    size = elements * (2 if job.recipe["dtype"] == "bfloat16" else 4)
    return Estimate(image, text, round(size * (COMPRESSED if job.config.cache.compression == "zstd" else 1)))


def most_bytes(sample: PlannedSample, job: BuildJob) -> int:
    """More bytes than the encoded sample can have: each byte of the prompt is a token, and the text is stored twice."""
    image, width = token_count(sample.img_shapes), job.model.text_width
    seen = sum(math.ceil(pixels / job.model.family.pixels_per_text_token) for pixels in job.encoder_pixels(sample))
    text = TEMPLATE + len(sample.row.prompt.encode()) + 2 * seen  # sides are rounded, maybe up
    numbers = image * (LATENT_CHANNELS + 2) + 2 * text * width  # an edit mask has up to 2 for each token
    return OTHER + numbers * (2 if job.recipe["dtype"] == "bfloat16" else 4)


def bytes_to_write(job: BuildJob, plan: BuildPlan, update: Update) -> int:
    """About how many bytes the build adds to the disk. Replaced shards stay there until `gc`.

    Samples that an interrupted build has finished are on the disk already; samples of replaced shards are linked.
    """
    made = {sample.key for sample in plan.to_encode} | plan.new_masks
    written = estimate([sample for sample in plan.samples if sample.key in made], job).bytes
    written += sum(copies.bytes for copies in plan.reused.values())
    return written + (pc.sum(update.moved.column("length")).as_py() or 0)


def disk_bytes(job: BuildJob, plan: BuildPlan, update: Update) -> int:
    """About how many bytes the build needs on a disk of this machine: for object storage, a few shards at a time."""
    needed = bytes_to_write(job, plan, update)
    if not isinstance(job.folder, Url):
        return needed
    largest = max((estimate([sample], job).bytes for sample in plan.to_encode), default=0)
    return min(needed, STAGED * max(int(job.config.cache.shard_size), largest))


def free_bytes(folder: Path | Url) -> int | None:
    """The free space for files in `folder`, which need not exist; None if the system does not report it.

    For object storage, that of the user's cache folder, where shards wait for their upload.
    """
    folder = cache_home() if isinstance(folder, Url) else folder
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    with suppress(OSError):
        usage = shutil.disk_usage(there)
        return usage.free if usage.total > 0 else None  # some network file systems report zeros
    return None
