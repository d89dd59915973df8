"""decode → VAE ∥ text: the two encoders work at the same time, each on its own devices.

Each copy of an encoder has one thread, which only feeds its device, on a stream of its own; as many threads as there
are cores decode, resize and do the other CPU work. So the slower encoder sets the pace. Images of one shape are encoded
together, and so are prompts about the same number of images, as far as the encoders allow (`micro_batches`). Work goes
to the least loaded copy, which does not change the results. The caller bounds what is in flight. Latents of recent
images are reused, and consecutive samples about the same images share their prefix.
"""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from PIL import Image

from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.encode.masks import Mask, MaskMaker, check_finite, cut
from qwen_cache.encode.micro_batches import Batcher, Lane, Turns
from qwen_cache.encode.plan import PlannedSample, read_again
from qwen_cache.encode.text import EncodedText, Inputs, TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.models.family import QWEN_IMAGE, Family, estimate_tokens
from qwen_cache.sources.images import join_thumbnails, opaque, open_rgb, open_rgba, over_white, thumbnail
from qwen_cache.sources.sizes import Size, calculate_dimensions, img_shapes

DECODE_THREADS = min(32, max(4, os.cpu_count() or 1))
LATENTS_KEPT = 256  # of recent images, which may return: 128 MB at a megapixel in bfloat16
SAMPLES_IN_BATCH = 8  # at most: half of what is in flight, so that one batch is prepared while another is encoded
FROM_SOURCE = EditMasks("file", None, keep_attention=False)
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


FindLatents = Callable[[str, Size], Callable[[], torch.Tensor] | None]
"""For an image file's hash and a size in pixels, a function that reads the latents `[S, 64]`; None to encode them."""


@dataclass(frozen=True)
class EncodedImage:
    """An image at one size: its latents, and its thumbnail if the cache keeps thumbnails."""

    latents: Future[torch.Tensor]
    thumbnail: Future[Image.Image] | None


@dataclass(frozen=True)
class InFlight:
    """A submitted sample, and its number in the order of submission."""

    number: int
    sample: PlannedSample
    images: list[EncodedImage]
    """The target, if there is one, then the controls."""
    text: Future[EncodedText]
    mask: Future[Mask | None] | None
    """The mask from the images alone; None if they cannot give one."""


class Originals:
    """The images of one sample; each file is decoded once, when it is first needed."""

    def __init__(self, sample: PlannedSample, decoders: ThreadPoolExecutor, family: Family) -> None:
        self._open = {"RGB": open_rgb, "RGBA": open_rgba}[family.image_mode]
        self._files = {digest: file for file, digest, _ in reversed(sample.images)}
        self._decoders = decoders
        self._decoded: dict[str, Future[Image.Image]] = {}

    def decoded(self, digest: str) -> Future[Image.Image]:
        if digest not in self._decoded:
            file = self._files[digest]
            self._decoded[digest] = self._decoders.submit(lambda: self._open(read_again(file, digest), str(file)))
        return self._decoded[digest]


class Lanes:
    """Both encoders, each in one or more copies. Leaving the context drops the work that has not started."""

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
        family: Family = QWEN_IMAGE,
    ) -> None:
        self.family = family
        self.keeps_thumbnails = thumbnails
        self.crop, self.masks = crop, MaskMaker(masks, crop, text[0].device)
        self.recipe_id, self.condition_image_size, self.format_version = recipe_id, condition_image_size, format_version
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        turns: dict[torch.device, Turns] = defaultdict(Turns)
        self.vae: Batcher[torch.Tensor, torch.Tensor] = Batcher(
            [Lane(encoder, f"vae-{i}", turns[encoder.device]) for i, encoder in enumerate(vae)], vae[0].batch_pixels
        )
        self.text: Batcher[TextRequest, EncodedText] = Batcher(
            [Lane(encoder, f"text-{i}", turns[encoder.device]) for i, encoder in enumerate(text)], text[0].batch_tokens
        )
        self._pixels, self._text_inputs = vae[0].pixels, text[0].inputs
        self._submitted = 0
        self._recent: OrderedDict[tuple[str, Size], EncodedImage] = OrderedDict()
        self._controls: tuple[tuple[str, Size | None], ...] | None = None
        self._control_inputs: Future[Inputs] = Future()
        """The text encoder's inputs for `_controls`, those of the newest sample."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self.decoders, *(lane.thread for lane in self.every_lane)):
            pool.shutdown(wait=True, cancel_futures=True)

    @property
    def every_lane(self) -> list[Lane[Any, Any]]:
        """The lanes of both encoders."""
        return [*self.vae.lanes, *self.text.lanes]

    def submit(self, sample: PlannedSample, known: FindLatents = lambda digest, size: None) -> InFlight:
        """Begin to encode a sample; `known` has functions that read latents of images in place of encoding them."""
        number, self._submitted = self._submitted, self._submitted + 1
        originals = Originals(sample, self.decoders, self.family)
        images = self._encode_images(number, originals, sample, known)
        text = self._encode_text(number, originals, sample)
        mask = self._make_mask(originals, sample)
        self._send(number + 1 - SAMPLES_IN_BATCH)
        return InFlight(number, sample, images, text, mask)

    def _send(self, number: int) -> None:
        """Send every batch that has work submitted up to `number`."""
        self.vae.send(number)
        self.text.send(number)

    def result(self, work: InFlight) -> tuple[SampleMeta, dict[str, memoryview]]:
        """Wait for both lanes; the sample's metadata and the bytes of its tensors."""
        self._send(work.number)
        latents, text = [each.latents.result() for each in work.images], work.text.result()
        mask = work.mask.result() if work.mask else None
        mask = mask or self.masks.of_attention(work.sample, text.attention)
        whole, targets = self.format_version == 1, 0 if work.sample.row.target is None else 1
        tensors = {
            "image_latents": latents[0] if targets else None,
            "control_latents": torch.cat(latents[targets:]) if latents[targets:] else None,
            "prompt_embeds": torch.cat([text.prefix, text.prompt]),
            "empty_prompt_embeds": torch.cat([text.prefix, text.empty]) if whole else text.empty,
            "edit_mask": mask.coverage if mask else None,
            "attention": text.attention if self.masks.masks.keep_attention else None,
            "thumbnails": _thumbnails_tensor(work.images) if self.keeps_thumbnails else None,
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
            text.image_positions,
        )
        return meta, data

    def _encode_images(
        self, number: int, originals: Originals, sample: PlannedSample, known: FindLatents
    ) -> list[EncodedImage]:
        """Latents of the target and the controls, reused where the same image at the same size was recent."""
        images = []
        for key in [(digest, size) for _, digest, size in sample.images]:
            if key not in self._recent or _has_failed(self._recent[key].latents):
                self._recent[key] = self._encode_image(number, originals, *key, known(*key))
            self._recent.move_to_end(key)
            images.append(self._recent[key])
        while len(self._recent) > LATENTS_KEPT:
            self._recent.popitem(last=False)
        return images

    def _encode_image(
        self, number: int, originals: Originals, digest: str, size: Size, read: Callable[[], torch.Tensor] | None
    ) -> EncodedImage:
        if read is not None and not self.keeps_thumbnails:
            return EncodedImage(self.decoders.submit(read), None)
        image = originals.decoded(digest)

        def fitted() -> Image.Image:
            return cut(image.result(), size, self.crop)

        if read is None:
            pixels = self.decoders.submit(lambda: self._pixels(fitted(), size))
            latents = self.vae.submit(number, pixels, lambda pixels: pixels, cost=size[0] * size[1], kind=size)
        else:
            latents = self.decoders.submit(read)
        (shape,) = img_shapes([size])
        return EncodedImage(
            latents, self.decoders.submit(lambda: thumbnail(fitted(), shape)) if self.keeps_thumbnails else None
        )

    def _encode_text(self, number: int, originals: Originals, sample: PlannedSample) -> Future[EncodedText]:
        """Embeddings of the prompt about the controls, whose inputs consecutive samples share."""
        row, one_image = sample.row, self.family.one_condition_image
        sizes = sample.sizes[1:] if one_image else [None] * len(row.controls)
        controls = tuple(zip(sample.inputs.controls, sizes, strict=True))
        if self._controls != controls or _has_failed(self._control_inputs):
            images = [(originals.decoded(digest), size) for digest, size in controls]
            self._controls, self._control_inputs = controls, self.decoders.submit(self._inputs_for, images)
        pixels = [size[0] * size[1] if size else self.condition_image_size for size in sizes]
        tokens, _ = estimate_tokens(self.family, row.prompt, pixels)

        def request(inputs: Inputs) -> TextRequest:
            return TextRequest(inputs, row.prompt, row.phrase)

        return self.text.submit(number, self._control_inputs, request, cost=tokens, kind=len(controls))

    def _inputs_for(self, images: Sequence[tuple[Future[Image.Image], Size | None]]) -> Inputs:
        return self._text_inputs([self._for_text(image.result(), size) for image, size in images])

    def _for_text(self, image: Image.Image, size: Size | None) -> Image.Image:
        """The text encoder's image: the VAE's if its size is given, else one of the encoder's own size."""
        if size:
            return over_white(cut(image, size, self.crop).resize(size, Image.Resampling.LANCZOS))
        return image.resize(calculate_dimensions(self.condition_image_size, image.size), Image.Resampling.LANCZOS)

    def _make_mask(self, originals: Originals, sample: PlannedSample) -> Future[Mask | None] | None:
        """The mask of the source, or the difference of target and first control; None if neither is wanted."""
        if not self.masks.uses_images(sample):
            return None
        pair = [] if sample.row.mask else [originals.decoded(digest) for _, digest, _ in sample.images[:2]]
        return self.decoders.submit(self.masks.of_images, sample, lambda: [opaque(it.result()) for it in pair])


def _has_failed(work: Future[Any]) -> bool:
    return work.done() and (work.cancelled() or work.exception() is not None)


def _thumbnails_tensor(images: Sequence[EncodedImage]) -> torch.Tensor | None:
    strip = join_thumbnails([each.thumbnail.result() for each in images if each.thumbnail]) if images else None
    return torch.frombuffer(bytearray(strip), dtype=torch.uint8) if strip else None


def described(
    tensors: dict[str, torch.Tensor], sample: PlannedSample
) -> tuple[dict[str, memoryview], dict[str, TensorSpec]]:
    """The bytes of the tensors, and their descriptions; QwenCacheError if one is not finite."""
    data, specs = {}, {}
    for name, tensor in tensors.items():
        check_finite(name, tensor, sample)
        data[name] = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        specs[name] = TensorSpec(_SAFETENSORS_NAME[tensor.dtype], tuple(tensor.shape), content_hash(data[name]))
    return data, specs
