"""decode → VAE ∥ text: the two encoders at work on their own devices, at the same time.

One thread for each copy of an encoder, which does nothing but feed its device, and as many as there are cores for
decoding, resizing and whatever else the CPU does; so the slower encoder decides the time. Pictures of one shape are
encoded together, and so are texts about equally many pictures, as far as the encoders allow (`batching`). Work goes to
the copy that has the least of it, which changes nothing in the result. What is in flight is bounded by whoever submits.
A picture that was just encoded is not encoded again, and samples about the same pictures, one after the other, share
their prefix.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from qwen_cache.encode.batching import Batcher, Lane
from qwen_cache.encode.images import open_mask, open_rgb
from qwen_cache.encode.plan import Planned, read_again
from qwen_cache.encode.sizes import Size, calculate_dimensions, crop_box
from qwen_cache.encode.source import Readable
from qwen_cache.encode.template import estimate_tokens
from qwen_cache.encode.text import EncodedText, TextEncoder
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.errors import QwenCacheError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta, TensorSpec

DECODE_THREADS = min(32, max(4, os.cpu_count() or 1))
LATENTS_KEPT = 256  # of pictures that may come again: 128 MB at a megapixel in bfloat16
SAMPLES_IN_BATCH = 8  # at most: half of what a build has in flight, so that one batch is made while another is encoded
TextInputs = dict[str, torch.Tensor]
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class InFlight:
    """A submitted sample, and its place in the order of submission."""

    number: int
    sample: Planned
    latents: list[Future[torch.Tensor]]
    text: Future[EncodedText]
    mask: Future[torch.Tensor] | None


class Lanes:
    """Both encoders, each in one copy or more. Leaving the context drops what has not begun."""

    def __init__(
        self,
        vae: Sequence[VaeEncoder],
        text: Sequence[TextEncoder],
        recipe_id: str,
        condition_image_size: int,
        format_version: int,
        crop: bool = False,
    ) -> None:
        self.crop = crop
        self.recipe_id, self.condition_image_size, self.format_version = recipe_id, condition_image_size, format_version
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self.vae: Batcher[torch.Tensor, torch.Tensor] = Batcher(
            [Lane(encoder, f"vae-{i}") for i, encoder in enumerate(vae)], vae[0].batch_pixels
        )
        self.text: Batcher[tuple[TextInputs, str], EncodedText] = Batcher(
            [Lane(encoder, f"text-{i}") for i, encoder in enumerate(text)], text[0].batch_tokens
        )
        self._pixels, self._text_inputs = vae[0].pixels, text[0].inputs
        self._submitted = 0
        self._known: OrderedDict[tuple[str, Size], Future[torch.Tensor]] = OrderedDict()
        self._about: tuple[tuple[str, ...], Future[TextInputs]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lanes: list[Lane[Any, Any]] = [*self.vae.lanes, *self.text.lanes]
        for pool in (self.decoders, *(lane.thread for lane in lanes)):
            pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, sample: Planned) -> InFlight:
        row, inputs = sample.row, sample.inputs
        number, self._submitted = self._submitted, self._submitted + 1
        decoded: dict[str, Future[Image.Image]] = {}

        def picture(path: Readable, digest: str) -> Future[Image.Image]:
            if digest not in decoded:
                decoded[digest] = self.decoders.submit(lambda: open_rgb(read_again(path, digest), str(path)))
            return decoded[digest]

        paths, digests = [row.target, *row.controls], [inputs.target, *inputs.controls]
        latents = []
        for path, digest, size in zip(paths, digests, sample.sizes, strict=True):
            if (digest, size) not in self._known:
                self._known[digest, size] = self._encode_picture(number, picture(path, digest), size)
            self._known.move_to_end((digest, size))
            latents.append(self._known[digest, size])
        while len(self._known) > LATENTS_KEPT:
            self._known.popitem(last=False)
        if self._about is None or self._about[0] != inputs.controls:
            self._about = inputs.controls, self._read([picture(*each) for each in zip(paths, digests, strict=True)][1:])
        text = self._encode_text(number, row.prompt)
        mask = self.decoders.submit(self._mask, sample) if row.mask else None
        self._send(number + 1 - SAMPLES_IN_BATCH)
        return InFlight(number, sample, latents, text, mask)

    def _send(self, number: int) -> None:
        """Let nothing that was submitted up to `number` wait for more."""
        self.vae.send(number)
        self.text.send(number)

    def result(self, work: InFlight) -> tuple[SampleMeta, dict[str, memoryview]]:
        """Wait for both lanes; the sample's metadata and the bytes of its tensors."""
        self._send(work.number)
        latents, text = [each.result() for each in work.latents], work.text.result()
        whole = self.format_version == 1
        tensors = {
            "image_latents": latents[0],
            "control_latents": torch.cat(latents[1:]) if latents[1:] else None,
            "prompt_embeds": torch.cat([text.prefix, text.prompt]),
            "empty_prompt_embeds": torch.cat([text.prefix, text.empty]) if whole else text.empty,
            "edit_mask": work.mask.result() if work.mask else None,
        }
        return self._describe(
            work.sample, {n: t for n, t in tensors.items() if t is not None}, 0 if whole else len(text.prefix)
        )

    def _encode_picture(self, number: int, picture: Future[Image.Image], size: Size) -> Future[torch.Tensor]:
        pixels = self.decoders.submit(lambda: self._pixels(self._cut(picture.result(), size), size))
        return self.vae.submit(number, pixels, lambda pixels: pixels, cost=size[0] * size[1], kind=size)

    def _cut(self, picture: Image.Image, size: Size) -> Image.Image:
        """The picture, or where that was asked for its middle at that size, not to be resized again."""
        if not self.crop:
            return picture
        return picture.resize(size, Image.Resampling.LANCZOS, crop_box(picture.size, size))

    def _read(self, pictures: Sequence[Future[Image.Image]]) -> Future[TextInputs]:
        return self.decoders.submit(lambda: self._text_inputs([self._for_text(p.result()) for p in pictures]))

    def _encode_text(self, number: int, prompt: str) -> Future[EncodedText]:
        assert self._about is not None
        digests, about = self._about
        tokens = estimate_tokens(prompt, len(digests), self.condition_image_size)
        return self.text.submit(number, about, lambda inputs: (inputs, prompt), cost=tokens, kind=len(digests))

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

    def _mask(self, sample: Planned) -> torch.Tensor:
        path, digest = sample.row.mask, sample.inputs.mask
        assert path is not None
        assert digest is not None
        return mask_tokens(open_mask(read_again(path, digest), str(path)), sample.sizes[0], self.crop)

    def _for_text(self, picture: Image.Image) -> Image.Image:
        size = calculate_dimensions(self.condition_image_size, picture.size)
        return picture.resize(size, Image.Resampling.LANCZOS)


def mask_tokens(mask: Image.Image, size: Size, crop: bool = False) -> torch.Tensor:
    """`[S]` float32 in 0..1: the share of each 16×16-pixel token of a target of `size` that is edited."""
    tokens = size[0] // PIXELS_PER_TOKEN, size[1] // PIXELS_PER_TOKEN
    cells = mask.resize(tokens, Image.Resampling.BOX, crop_box(mask.size, size) if crop else None)
    return torch.from_numpy(np.asarray(cells, dtype=np.float32).reshape(-1) / 255.0)
