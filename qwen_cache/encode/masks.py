"""Making edit masks (experimental: with a mask head), and replacing those of cached samples without an encoder.

A cached sample is encoded again only if its mask needs attention that the cache does not hold. A mask head was never
run on the real encoder's attention.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from PIL import Image

from qwen_cache.encode.builder import BuildJob, Encoded
from qwen_cache.encode.plan import PlannedSample, read_again
from qwen_cache.encode.recipe import EditMasks, ReusableSamples, token_coverage
from qwen_cache.errors import QwenCacheError
from qwen_cache.experimental.masks import difference_mask, load_head, predict_mask
from qwen_cache.format.cache import Sample, open_cache
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import PIXELS_PER_TOKEN, TENSORS, TensorSpec
from qwen_cache.sources.images import open_mask, open_rgb
from qwen_cache.sources.sizes import Size, crop_box

MAX_COMPARED_PIXELS = 640 * 640  # `difference_mask` chose its thresholds for images of up to this size
THREADS = min(32, os.cpu_count() or 1)


@dataclass(frozen=True)
class Mask:
    """The edited fraction of each token of a target, in 0..1, and the origin of the mask (`edit_mask_from`)."""

    coverage: Float[torch.Tensor, " S"]
    origin: str


def check_finite(name: str, tensor: torch.Tensor, sample: PlannedSample) -> None:
    """QwenCacheError if a tensor to be stored has NaN or Inf."""
    if not bool(torch.isfinite(tensor).all()):
        raise QwenCacheError(
            f"{name} of {sample.row.name} is not finite",
            where=sample.row.where,
            found="NaN or Inf",
            do="build with --dtype float32, and check the model's weights",
        )


class MaskMaker:
    """Makes edit masks by the settings `masks`. With `crop` images are cut to their centre instead of stretched."""

    def __init__(self, masks: EditMasks, crop: bool, device: torch.device) -> None:
        self.masks, self.crop = masks, crop
        self.head = load_head(masks.head)[0].to(device) if masks.head else None

    def uses_images(self, sample: PlannedSample) -> bool:
        """True if the source's mask or the difference of images may give the mask."""
        can_differ = sample.row.target is not None and bool(sample.row.controls)
        return sample.row.mask is not None or (self.masks.differ and can_differ)

    def of_images(self, sample: PlannedSample, pair: Callable[[], Sequence[Image.Image]]) -> Mask | None:
        """The source's mask; else the difference of `pair`, target and first control, if it locates an edit."""
        path, digest = sample.row.mask, sample.inputs.mask
        if path is not None and digest is not None:
            mask = open_mask(read_again(path, digest), str(path))
            return Mask(torch.from_numpy(token_coverage(mask, sample.sizes[0], self.crop)), "file")
        if not (self.masks.differ and sample.row.controls):
            return None
        (width, height), cell = sample.sizes[0], PIXELS_PER_TOKEN
        images = [cut(image, (width, height), self.crop) for image in pair()]
        while width * height > MAX_COMPARED_PIXELS and cell > 1:
            width, height, cell = width // 2, height // 2, cell // 2
        after, before = (image.resize((width, height), Image.Resampling.LANCZOS) for image in images)
        difference = difference_mask(after, before, cell).mask
        return None if difference is None else Mask(torch.from_numpy(difference).flatten(), "difference")

    def of_attention(self, sample: PlannedSample, attention: Float[torch.Tensor, "C h w"] | None) -> Mask | None:
        """Experimental: never run on the real encoder's attention. The mask head's prediction, if there is a head."""
        if self.head is None or attention is None or sample.row.target is None:
            return None
        width, height = (side // PIXELS_PER_TOKEN for side in sample.sizes[0])
        return Mask(predict_mask(self.head, attention, (height, width)).flatten().cpu(), "head")


def cut(image: Image.Image, size: Size, crop: bool) -> Image.Image:
    """With `crop`, the centre of the image at `size`; else the image as it is, for the VAE's processor to resize."""
    if not crop:
        return image
    return image.resize(size, Image.Resampling.LANCZOS, crop_box(image.size, size))


# ---- new masks for cached samples ------------------------------------------------------------------------------------


class MaskUpdates:
    """Makes new masks for `reusable` samples, of which everything else is kept."""

    def __init__(self, job: BuildJob, reusable: ReusableSamples) -> None:
        self.job, self.reusable = job, reusable
        self.maker = MaskMaker(EditMasks.of(job.config), job.resolution.crop, torch.device("cpu"))
        self.threads = ThreadPoolExecutor(THREADS, "masks")
        self.cache = open_cache(job.folder, recipe=job.recipe_name)

    def close(self) -> None:
        """Drop the work that has not started."""
        self.threads.shutdown(wait=True, cancel_futures=True)

    def submit(self, sample: PlannedSample, row: IndexRow) -> Future[Encoded]:
        """Begin to make the mask of a sample, of which the cache has `row`."""
        return self.threads.submit(self._with_new_mask, sample, self.cache[row.meta.key])

    def _with_new_mask(self, sample: PlannedSample, old: Sample) -> Encoded:
        def pair() -> list[Image.Image]:
            return [open_rgb(read_again(file, digest), str(file)) for file, digest, _ in sample.images[:2]]

        attention = old["attention"] if self.reusable.has_attention(old.row) else None
        mask = self.maker.of_images(sample, pair) or self.maker.of_attention(sample, attention)
        kept = old.row.meta.tensors.keys() - {"edit_mask", *(() if self.maker.masks.keep_attention else ("attention",))}
        specs = {name: replace(old.row.meta.tensors[name], codec=None, compressed_bytes=None) for name in kept}
        data = {name: old.buffer(name) for name in kept}
        if mask is not None:
            check_finite("edit_mask", mask.coverage, sample)
            data["edit_mask"] = mask.coverage.contiguous().view(torch.uint8).numpy().data
            specs["edit_mask"] = TensorSpec("F32", tuple(mask.coverage.shape), content_hash(data["edit_mask"]))
        names = [name for name in TENSORS[self.job.format_version] if name in specs]
        meta = replace(
            old.row.meta,
            recipe=recipe_id(self.job.recipe),
            inputs=sample.inputs,
            tensors={name: specs[name] for name in names},
            phrase=sample.row.phrase,
            edit_mask_from=mask.origin if mask else None,
        )
        return meta, {name: data[name] for name in names}
