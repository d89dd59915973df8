"""decode → VAE ∥ text: the two encoders at work on their own devices, at the same time.

One thread for each copy of an encoder, which does nothing but feed its device, and as many as there are cores for
decoding, resizing and whatever else the CPU does; so the slower encoder decides the time. Images of one shape are
encoded together, and so are texts about equally many images, as far as the encoders allow (`batching`). Work goes to
the copy that has the least of it, which changes nothing in the result. What is in flight is bounded by whoever submits.
An image that was just encoded is not encoded again, and samples about the same images, one after the other, share
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

import torch
from PIL import Image

from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.encode.masks import Mask, MaskMaker, check_finite, cut
from qwen_cache.encode.micro_batches import Batcher, Lane
from qwen_cache.encode.plan import Planned, read_again
from qwen_cache.encode.text import Asked, EncodedText, TextEncoder
from qwen_cache.encode.thumbnails import join_thumbnails, thumbnail
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.tensor import TensorSpec
from qwen_cache.models.template import estimate_tokens
from qwen_cache.sources.detect import Readable, Row
from qwen_cache.sources.images import open_rgb
from qwen_cache.sources.sizes import Size, calculate_dimensions, img_shapes

DECODE_THREADS = min(32, max(4, os.cpu_count() or 1))
LATENTS_KEPT = 256  # of images that may come again: 128 MB at a megapixel in bfloat16
SAMPLES_IN_BATCH = 8  # at most: half of what a build has in flight, so that one batch is made while another is encoded
TextInputs = dict[str, torch.Tensor]
FROM_SOURCE = EditMasks("file", None, keep_attention=False)
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Seen:
    """An image at one size: its latents, and how people are shown it, where that is kept."""

    latents: Future[torch.Tensor]
    thumbnail: Future[Image.Image] | None


@dataclass(frozen=True)
class InFlight:
    """A submitted sample, and its place in the order of submission."""

    number: int
    sample: Planned
    pictures: list[Seen]
    text: Future[EncodedText]
    mask: Future[Mask | None] | None
    """As the images say it."""


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
        masks: EditMasks = FROM_SOURCE,
        thumbnails: bool = False,
    ) -> None:
        self.keeps_thumbnails = thumbnails
        self.crop, self.masks = crop, MaskMaker(masks, crop, text[0].device)
        self.recipe_id, self.condition_image_size, self.format_version = recipe_id, condition_image_size, format_version
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self.vae: Batcher[torch.Tensor, torch.Tensor] = Batcher(
            [Lane(encoder, f"vae-{i}") for i, encoder in enumerate(vae)], vae[0].batch_pixels
        )
        self.text: Batcher[Asked, EncodedText] = Batcher(
            [Lane(encoder, f"text-{i}") for i, encoder in enumerate(text)], text[0].batch_tokens
        )
        self._pixels, self._text_inputs = vae[0].pixels, text[0].inputs
        self._submitted = 0
        self._known: OrderedDict[tuple[str, Size], Seen] = OrderedDict()
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

        def image(path: Readable, digest: str) -> Future[Image.Image]:
            if digest not in decoded:
                decoded[digest] = self.decoders.submit(lambda: open_rgb(read_again(path, digest), str(path)))
            return decoded[digest]

        paths, digests = [row.target, *row.controls], [inputs.target, *inputs.controls]
        seen = []
        for path, digest, size in zip(paths, digests, sample.sizes, strict=True):
            if (digest, size) not in self._known:
                self._known[digest, size] = self._encode_image(number, image(path, digest), size)
            self._known.move_to_end((digest, size))
            seen.append(self._known[digest, size])
        while len(self._known) > LATENTS_KEPT:
            self._known.popitem(last=False)
        if self._about is None or self._about[0] != inputs.controls:
            self._about = inputs.controls, self._read([image(*each) for each in zip(paths, digests, strict=True)][1:])
        text = self._encode_text(number, row)
        mask = None
        if self.masks.is_seen(sample):
            pair = [] if row.mask else [image(*each) for each in zip(paths[:2], digests[:2], strict=True)]
            mask = self.decoders.submit(self.masks.of_images, sample, lambda: [it.result() for it in pair])
        self._send(number + 1 - SAMPLES_IN_BATCH)
        return InFlight(number, sample, seen, text, mask)

    def _send(self, number: int) -> None:
        """Let nothing that was submitted up to `number` wait for more."""
        self.vae.send(number)
        self.text.send(number)

    def result(self, work: InFlight) -> tuple[SampleMeta, dict[str, memoryview]]:
        """Wait for both lanes; the sample's metadata and the bytes of its tensors."""
        self._send(work.number)
        latents, text = [each.latents.result() for each in work.pictures], work.text.result()
        mask = work.mask.result() if work.mask else None
        mask = mask or self.masks.of_attention(work.sample, text.attention)
        whole = self.format_version == 1
        tensors = {
            "image_latents": latents[0],
            "control_latents": torch.cat(latents[1:]) if latents[1:] else None,
            "prompt_embeds": torch.cat([text.prefix, text.prompt]),
            "empty_prompt_embeds": torch.cat([text.prefix, text.empty]) if whole else text.empty,
            "edit_mask": mask.shares if mask else None,
            "attention": text.attention if self.masks.masks.keep_attention else None,
            "thumbnails": _joined(work.pictures) if self.keeps_thumbnails else None,
        }
        data, specs = described({name: t for name, t in tensors.items() if t is not None}, work.sample)
        meta = SampleMeta(
            self.recipe_id,
            work.sample.inputs,
            work.sample.row.prompt,
            work.sample.img_shapes,
            0 if whole else len(text.prefix),
            specs,
            work.sample.row.phrase,
            mask.origin if mask else None,
        )
        return meta, data

    def _encode_image(self, number: int, image: Future[Image.Image], size: Size) -> Seen:
        def fitted() -> Image.Image:
            return cut(image.result(), size, self.crop)

        pixels = self.decoders.submit(lambda: self._pixels(fitted(), size))
        latents = self.vae.submit(number, pixels, lambda pixels: pixels, cost=size[0] * size[1], kind=size)
        (shape,) = img_shapes([size])
        return Seen(
            latents, self.decoders.submit(lambda: thumbnail(fitted(), shape)) if self.keeps_thumbnails else None
        )

    def _read(self, pictures: Sequence[Future[Image.Image]]) -> Future[TextInputs]:
        return self.decoders.submit(lambda: self._text_inputs([self._for_text(p.result()) for p in pictures]))

    def _encode_text(self, number: int, row: Row) -> Future[EncodedText]:
        assert self._about is not None
        digests, about = self._about
        tokens = estimate_tokens(row.prompt, len(digests), self.condition_image_size)

        def asked(inputs: TextInputs) -> Asked:
            return inputs, row.prompt, row.phrase

        return self.text.submit(number, about, asked, cost=tokens, kind=len(digests))

    def _for_text(self, image: Image.Image) -> Image.Image:
        size = calculate_dimensions(self.condition_image_size, image.size)
        return image.resize(size, Image.Resampling.LANCZOS)


def _joined(pictures: Sequence[Seen]) -> torch.Tensor | None:
    jpeg = join_thumbnails([each.thumbnail.result() for each in pictures if each.thumbnail])
    return torch.frombuffer(bytearray(jpeg), dtype=torch.uint8) if jpeg else None


def described(tensors: dict[str, torch.Tensor], sample: Planned) -> tuple[dict[str, memoryview], dict[str, TensorSpec]]:
    """The bytes of tensors, and what they are; QwenCacheError where one is not finite."""
    data, specs = {}, {}
    for name, tensor in tensors.items():
        check_finite(name, tensor, sample)
        data[name] = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        specs[name] = TensorSpec(_SAFETENSORS_NAME[tensor.dtype], tuple(tensor.shape), content_hash(data[name]))
    return data, specs
