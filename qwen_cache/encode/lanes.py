"""decode → VAE ∥ text: the two encoders at work on their own devices, at the same time.

One thread for each encoder and a few that decode, so that the slower encoder decides the time. What is in flight is
bounded by whoever submits: a sample is decoded when it is submitted, and held until its result is taken.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from PIL import Image

from qwen_cache.encode.images import open_mask, open_rgb
from qwen_cache.encode.plan import Planned, read_again
from qwen_cache.encode.sizes import calculate_dimensions
from qwen_cache.encode.text import EncodedText, TextEncoder
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.errors import QwenCacheError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta, TensorSpec

DECODE_THREADS = 4
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class Pictures:
    """A decoded sample: target and controls, for the VAE and for the text encoder."""

    for_vae: tuple[Image.Image, ...]
    for_text: tuple[Image.Image, ...]
    mask: torch.Tensor | None


@dataclass(frozen=True)
class InFlight:
    """A submitted sample."""

    sample: Planned
    pictures: Future[Pictures]
    latents: Future[list[torch.Tensor]]
    text: Future[EncodedText]


class Lanes:
    """Both encoders. Leaving the context drops what has not begun."""

    def __init__(
        self, vae: VaeEncoder, text: TextEncoder, recipe_id: str, condition_image_size: int, format_version: int
    ) -> None:
        self.vae, self.text = vae, text
        self.recipe_id, self.condition_image_size, self.format_version = recipe_id, condition_image_size, format_version
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self.vae_lane, self.text_lane = ThreadPoolExecutor(1, "vae"), ThreadPoolExecutor(1, "text")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self.decoders, self.vae_lane, self.text_lane):
            pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, sample: Planned) -> InFlight:
        pictures = self.decoders.submit(self._decode, sample)
        latents = self.vae_lane.submit(lambda: self._encode_pictures(sample, pictures.result()))
        text = self.text_lane.submit(lambda: self.text.encode(pictures.result().for_text, [sample.row.prompt, ""]))
        return InFlight(sample, pictures, latents, text)

    def result(self, work: InFlight) -> tuple[SampleMeta, dict[str, memoryview]]:
        """Wait for both lanes; the sample's metadata and the bytes of its tensors."""
        latents, text, mask = work.latents.result(), work.text.result(), work.pictures.result().mask
        whole = self.format_version == 1
        tensors = {
            "image_latents": latents[0],
            "control_latents": torch.cat(latents[1:]) if latents[1:] else None,
            "prompt_embeds": text.first,
            "empty_prompt_embeds": text.whole(1) if whole else text.others[0],
            "edit_mask": None if whole else mask,
        }
        return self._describe(
            work.sample, {n: t for n, t in tensors.items() if t is not None}, 0 if whole else text.prefix_length
        )

    def _describe(
        self, sample: Planned, tensors: dict[str, torch.Tensor], prefix_length: int
    ) -> tuple[SampleMeta, dict[str, memoryview]]:
        data, specs = {}, {}
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise QwenCacheError(
                    f"{name} of {sample.row.name} is not finite",
                    where=sample.row.where,
                    found="NaN or Inf",
                    do="build with --dtype float32, and check the model's weights",
                )
            data[name] = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            specs[name] = TensorSpec(_SAFETENSORS_NAME[tensor.dtype], tuple(tensor.shape), content_hash(data[name]))
        meta = SampleMeta(self.recipe_id, sample.inputs, sample.row.prompt, sample.img_shapes, prefix_length, specs)
        return meta, data

    def _decode(self, sample: Planned) -> Pictures:
        row, inputs = sample.row, sample.inputs
        paths = zip([row.target, *row.controls], [inputs.target, *inputs.controls], strict=True)
        pictures = tuple(open_rgb(read_again(path, expected), str(path)) for path, expected in paths)
        mask = None
        if row.mask and inputs.mask:
            mask = mask_tokens(open_mask(read_again(row.mask, inputs.mask), str(row.mask)), sample.sizes[0])
        return Pictures(pictures, tuple(self._for_text(picture) for picture in pictures[1:]), mask)

    def _for_text(self, picture: Image.Image) -> Image.Image:
        size = calculate_dimensions(self.condition_image_size, picture.size)
        return picture.resize(size, Image.Resampling.LANCZOS)

    def _encode_pictures(self, sample: Planned, pictures: Pictures) -> list[torch.Tensor]:
        return [self.vae.encode(p, size) for p, size in zip(pictures.for_vae, sample.sizes, strict=True)]


def mask_tokens(mask: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """`[S]` float32 in 0..1: the share of each 16×16-pixel token of a target of `size` that is edited."""
    width, height = size
    cells = mask.resize((width // PIXELS_PER_TOKEN, height // PIXELS_PER_TOKEN), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(cells, dtype=np.float32).reshape(-1) / 255.0)
