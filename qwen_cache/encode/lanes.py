"""Encoders side by side: micro-batches on each device, smaller ones where its memory is too small; results in order."""

from __future__ import annotations

import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Condition
from typing import Any, Generic, Protocol, TypeVar

import torch
from PIL import Image

from qwen_cache.encode.builder import Encoded, FindLatents, LaneState, RunningEncoders
from qwen_cache.encode.masks import Mask, MaskMaker, check_finite, cut
from qwen_cache.encode.plan import PlannedSample, read_again
from qwen_cache.encode.recipe import EditMasks
from qwen_cache.encode.text import EncodedText, Inputs, TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.errors import DeviceError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.measured import Measured
from qwen_cache.format.sample import SLIDER_EMBEDS, SampleMeta, TensorSpec
from qwen_cache.models.devices import device_module, new_stream, on_stream, reports_memory
from qwen_cache.models.family import QWEN_IMAGE, Family, estimate_tokens
from qwen_cache.sources.alignment import measure
from qwen_cache.sources.images import join_thumbnails, opaque, open_rgb, open_rgba, over_white, thumbnail
from qwen_cache.sources.sizes import Size, calculate_dimensions, img_shapes

# ---- micro batches ---------------------------------------------------------------------------------------------------
# Micro-batches of one kind of work for the copies of an encoder, each on its own device.
#
# The work items and their order decide what makes a batch; timing never does. The memory of a GPU decides how many
# items it takes at once: the first item runs by itself and is measured, and after an out-of-memory error the limit is
# half of what failed. Lanes on one device work at the same time, each on a stream of its own; work to be measured, and
# an item that did not fit, wait until they have the device alone. An item that does not fit then is an error.

Item = TypeVar("Item")
Result = TypeVar("Result")
Takes = TypeVar("Takes", contravariant=True)
Gives = TypeVar("Gives", covariant=True)
MEMORY_FRACTION = 0.8  # of the free memory, for the predicted peak of a batch: other shapes run other kernels


class Encoder(Protocol[Takes, Gives]):
    """The interface of an encoder that a lane uses."""

    device: torch.device

    def encode(self, items: Sequence[Takes], /) -> Sequence[Gives]: ...

    def encode_beside(self, items: Sequence[Takes], /) -> Sequence[Gives]:
        """The same beside another lane on the device, whose work may be why something does not fit: no other way to
        compute it is taken then."""
        return self.encode(items)


@dataclass(frozen=True)
class WorkItem(Generic[Item, Result]):
    """The inputs to wait for, the encoder's item to make of them, its cost, and where the result goes."""

    inputs: Future[Any]
    make: Callable[[Any], Item]
    cost: int
    result: Future[Result] = field(default_factory=Future)


@dataclass
class Batch(Generic[Item, Result]):
    """Work items to encode together; the first one was submitted as number `first`."""

    first: int
    items: list[WorkItem[Item, Result]] = field(default_factory=list)
    cost: int = 0


class MemoryBudget:
    """The cost that fits into a device's memory at once, in the unit of the work items. Only GPUs are measured."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_measured = device, reports_memory(device)
        self.limit = 0.0 if self.is_measured else float("inf")
        self._bytes_per_unit, self._largest = 1e-9, 0

    def take(self, costs: Sequence[int]) -> int:
        """How many of `costs`, from the first on, fit together; at least one."""
        return max(1, sum(total <= self.limit for total in accumulate(costs)))

    def is_largest(self, cost: int) -> bool:
        """True if work of this cost is to be measured: any that is larger than all before."""
        return self.is_measured and cost > self._largest

    @contextmanager
    def measuring(self, cost: int, lanes: int = 1) -> Iterator[None]:
        """Set the limit from the peak memory of work of this cost; other use of the device counts as part of it.

        Lanes that share the device get equal parts of what is free.
        """
        if not self.is_measured:
            yield
            return
        counters = device_module(self.device)
        counters.reset_peak_memory_stats(self.device)
        before = counters.memory_allocated(self.device)
        yield
        used = counters.max_memory_allocated(self.device) - before
        cached = counters.memory_reserved(self.device) - counters.memory_allocated(self.device)
        free = counters.mem_get_info(self.device)[0] + cached
        self._bytes_per_unit = max(self._bytes_per_unit, used / cost)
        self.limit = MEMORY_FRACTION * free / lanes / self._bytes_per_unit
        self._largest = max(self._largest, cost)

    def ran_out(self, cost: int) -> None:
        """Halve the limit after work of this cost ran out of memory."""
        self._bytes_per_unit *= 2
        self.limit = cost / 2


class Turns:
    """A readers-writer lock of the lanes of one device: their work shares the device, or has it alone."""

    def __init__(self) -> None:
        self.lanes = 0
        self._changed = Condition()
        self._shared, self._alone = 0, False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._shared += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nothing begins from now on; what has begun ends first."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alone)
            self._alone = True
            self._changed.wait_for(lambda: not self._shared)
        try:
            yield
        finally:
            with self._changed:
                self._alone = False
                self._changed.notify_all()


class Lane(Generic[Item, Result]):
    """One copy of an encoder, and the thread that feeds it; lanes of one device have their `turns` in common."""

    def __init__(self, encoder: Encoder[Item, Result], name: str, turns: Turns | None = None) -> None:
        self.encoder, self.thread, self.memory = encoder, ThreadPoolExecutor(1, name), MemoryBudget(encoder.device)
        self.turns, self._stream = turns or Turns(), new_stream(encoder.device)
        self.turns.lanes += 1
        self.name = name
        self.batches = self.done = 0
        """Batches that were encoded, and work items that are finished."""
        self._sent = 0
        self._began, self._busy = time.monotonic(), 0.0

    @property
    def load(self) -> int:
        """The number of its work items that are not finished."""
        return self._sent - self.done

    @property
    def state(self) -> LaneState:
        busy = self._busy / max(time.monotonic() - self._began, 1e-6)
        return LaneState(self.name, str(self.encoder.device), self.done, busy, self.batches)

    def send(self, batch: Batch[Item, Result]) -> None:
        def end(work: Future[None]) -> None:
            self.done += len(batch.items)
            for item in batch.items:
                if work.cancelled():
                    item.result.cancel()
                elif not item.result.done():
                    item.result.set_exception(work.exception())

        self._sent += len(batch.items)
        self.thread.submit(self._encode, batch.items).add_done_callback(end)

    def _encode(self, batch: Sequence[WorkItem[Item, Result]]) -> None:
        items = [item for item in batch if _is_ready(item)]
        while items:
            some = items[: self.memory.take([item.cost for item in items])]
            try:
                results = self._try([item.make(item.inputs.result()) for item in some], sum(item.cost for item in some))
            except Exception as error:
                if len(some) > 1:
                    raise
                some[0].result.set_exception(error)  # the others of the batch may fit
                items = items[1:]
                continue
            self.batches += 1
            if results is not None:
                for item, result in zip(some, results, strict=True):
                    item.result.set_result(result)
                items = items[len(some) :]

    def _try(self, items: Sequence[Item], cost: int) -> Sequence[Result] | None:
        """The results; None if the device ran out of memory and fewer items must be tried.

        What did not fit beside the work of another lane is tried once more without it.
        """
        begins_alone = self.turns.lanes == 1 or self.memory.is_largest(cost)
        for alone in [True] if begins_alone else [False, True]:
            try:
                return self._results(items, cost, alone=alone)
            except torch.OutOfMemoryError as error:  # what it refers to is freed before the next attempt
                found = str(error).splitlines()[0]
        if len(items) > 1:
            self.memory.ran_out(cost)
            return None
        raise DeviceError(
            "a device has too little memory for one sample",
            found=found,
            do="close what else uses it, name another with --vae-device or --text-device, set cache.text_offload=true, "
            "or lower data.vae_image_size; encoded samples are kept",
        )

    def _results(self, items: Sequence[Item], cost: int, *, alone: bool) -> Sequence[Result]:
        """The encoder's results, which it returns on the host: then nothing of this stream is under way."""
        measured = self.memory.measuring(cost, self.turns.lanes) if alone else nullcontext()
        with self.turns.alone() if alone else self.turns.shared(), on_stream(self._stream), measured:
            begin, is_beside = time.monotonic(), not alone and self.memory.is_measured
            try:
                return self.encoder.encode_beside(items) if is_beside else self.encoder.encode(items)
            finally:
                self._busy += time.monotonic() - begin


def _is_ready(item: WorkItem[Any, Any]) -> bool:
    """Wait for the inputs of an item; False if they failed, and then their error is its result."""
    if error := item.inputs.exception():
        item.result.set_exception(error)
    return error is None


class Batcher(Generic[Item, Result]):
    """Groups work items of one kind into batches that cost up to `limit`; each batch goes to the least loaded lane.

    An item with the same inputs as the item before it goes to the same lane. A batch waits until it is full, or until
    `send` says that it may wait no longer.
    """

    def __init__(self, lanes: Sequence[Lane[Item, Result]], limit: int) -> None:
        self.lanes, self.limit = lanes, limit
        self._growing: dict[Hashable, Batch[Item, Result]] = {}
        self._last: tuple[Future[Any] | None, Lane[Item, Result]] = (None, lanes[0])

    def submit(
        self, number: int, inputs: Future[Any], make: Callable[[Any], Item], *, kind: Hashable, cost: int
    ) -> Future[Result]:
        """The result of the work item with this number of submission. Items of one `kind` are batched together."""
        growing = self._growing.get(kind)
        if growing and growing.cost + cost > self.limit:
            self._send(kind)
        batch = self._growing.setdefault(kind, Batch(number))
        item: WorkItem[Item, Result] = WorkItem(inputs, make, cost)
        batch.items.append(item)
        batch.cost += cost
        if batch.cost >= self.limit:
            self._send(kind)
        return item.result

    def send(self, number: int) -> None:
        """Send every batch that has an item submitted up to `number`."""
        for kind in [kind for kind, batch in self._growing.items() if batch.first <= number]:
            self._send(kind)

    def _send(self, kind: Hashable) -> None:
        batch = self._growing.pop(kind)
        last_inputs, lane = self._last
        if batch.items[0].inputs is not last_inputs:
            lane = min(self.lanes, key=lambda lane: lane.load)
        lane.send(batch)
        self._last = batch.items[-1].inputs, lane


# ---- lanes -----------------------------------------------------------------------------------------------------------
# decode → VAE ∥ text: the two encoders work at the same time, each on its own devices.
#
# Each copy of an encoder has one thread, which only feeds its device, on a stream of its own; as many threads as there
# are cores decode, resize and do the other CPU work. So the slower encoder sets the pace. Images of one shape are
# encoded together, and so are prompts about the same number of images, as far as the encoders allow (`micro_batches`).
# Work goes to the least loaded copy, which does not change the results. The caller bounds what is in flight. Latents of
# recent images are reused, and consecutive samples about the same images share their prefix.

DECODE_THREADS = min(32, max(4, os.cpu_count() or 1))
LATENTS_KEPT = 256  # of recent images, which may return: 128 MB at a megapixel in bfloat16
SAMPLES_IN_BATCH = 8  # at most: half of what is in flight, so that one batch is prepared while another is encoded
FROM_SOURCE = EditMasks("file", None, keep_attention=False)
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.uint8: "U8"}


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
    """The target, if there is one, then the controls, then the rejected image, if there is one."""
    text: Future[EncodedText]
    mask: Future[Mask | None] | None
    """The mask from the images alone; None if they cannot give one."""
    measured: Future[Measured] | None


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


class Lanes(RunningEncoders):
    """Both encoders, each in one or more copies."""

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
        self._lanes: list[Lane[Any, Any]] = [*self.vae.lanes, *self.text.lanes]
        self._pixels, self._text_inputs = vae[0].pixels, text[0].inputs
        self._submitted = 0
        self._recent: OrderedDict[tuple[str, Size], EncodedImage] = OrderedDict()
        self._controls: tuple[tuple[str, Size | None], ...] | None = None
        self._control_inputs: Future[Inputs] = Future()
        """The text encoder's inputs for `_controls`, those of the newest sample."""

    def close(self) -> None:
        for pool in (self.decoders, *(lane.thread for lane in self._lanes)):
            pool.shutdown(wait=True, cancel_futures=True)

    def states(self) -> list[LaneState]:
        return [lane.state for lane in self._lanes]

    def submit(self, sample: PlannedSample, known: FindLatents | None = None) -> InFlight:
        number, self._submitted = self._submitted, self._submitted + 1
        originals = Originals(sample, self.decoders, self.family)
        images = self._encode_images(number, originals, sample, known)
        text = self._encode_text(number, originals, sample)
        mask, measured = self._make_mask(originals, sample), self._measure(originals, sample)
        self._send(number + 1 - SAMPLES_IN_BATCH)
        return InFlight(number, sample, images, text, mask, measured)

    def _send(self, number: int) -> None:
        """Send every batch that has work submitted up to `number`."""
        self.vae.send(number)
        self.text.send(number)

    def result(self, work: InFlight) -> Encoded:
        self._send(work.number)
        latents, text = [each.latents.result() for each in work.images], work.text.result()
        mask = work.mask.result() if work.mask else None
        mask = mask or self.masks.of_attention(work.sample, text.attention)
        whole, row = self.format_version == 1, work.sample.row
        target = None if row.target is None else latents.pop(0)
        rejected = None if row.rejected is None else latents.pop()
        tensors = {
            "image_latents": target,
            "rejected_latents": rejected,
            "control_latents": torch.cat(latents) if latents else None,
            "prompt_embeds": torch.cat([text.prefix, text.prompt]),
            "empty_prompt_embeds": torch.cat([text.prefix, text.empty]) if whole else text.empty,
            **dict(zip(SLIDER_EMBEDS, text.further, strict=False)),
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
            work.measured.result() if work.measured else None,
            work.sample.rejected_shape,
            row.slider,
        )
        return meta, data

    def _encode_images(
        self, number: int, originals: Originals, sample: PlannedSample, known: FindLatents | None
    ) -> list[EncodedImage]:
        """Latents of the images of a sample, reused where the same image at the same size was recent."""
        images = []
        for key in [(digest, size) for _, digest, size in sample.images]:
            if key not in self._recent or _has_failed(self._recent[key].latents):
                self._recent[key] = self._encode_image(number, originals, *key, known(*key) if known else None)
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
        """Embeddings of the prompts about the controls, whose inputs consecutive samples share."""
        row, one_image = sample.row, self.family.one_condition_image
        sizes = sample.sizes[1:] if one_image else [None] * len(row.controls)
        controls = tuple(zip(sample.inputs.controls, sizes, strict=True))
        if self._controls != controls or _has_failed(self._control_inputs):
            images = [(originals.decoded(digest), size) for digest, size in controls]
            self._controls, self._control_inputs = controls, self.decoders.submit(self._inputs_for, images)
        pixels = [size[0] * size[1] if size else self.condition_image_size for size in sizes]
        further = row.slider or ()
        tokens, _ = estimate_tokens(self.family, row.prompt, pixels)
        tokens += sum(estimate_tokens(self.family, prompt, [])[0] for prompt in further)

        def request(inputs: Inputs) -> TextRequest:
            return TextRequest(inputs, row.prompt, row.phrase, tuple(further))

        return self.text.submit(number, self._control_inputs, request, cost=tokens, kind=len(controls))

    def _inputs_for(self, images: Sequence[tuple[Future[Image.Image], Size | None]]) -> Inputs:
        """The text encoder's inputs: images at the size of the VAE's where it is given, else of the encoder's own."""
        fitted = []
        for image, size in images:
            if size:
                at_size = cut(image.result(), size, self.crop).resize(size, Image.Resampling.LANCZOS)
                fitted.append(over_white(at_size))
            else:
                own = calculate_dimensions(self.condition_image_size, image.result().size)
                fitted.append(image.result().resize(own, Image.Resampling.LANCZOS))
        return self._text_inputs(fitted)

    def _make_mask(self, originals: Originals, sample: PlannedSample) -> Future[Mask | None] | None:
        """The mask of the source, or the difference of target and first control; None if neither is wanted."""
        if not self.masks.uses_images(sample):
            return None
        pair = [] if sample.row.mask else [originals.decoded(digest) for _, digest, _ in sample.images[:2]]
        return self.decoders.submit(self.masks.of_images, sample, lambda: [opaque(it.result()) for it in pair])

    def _measure(self, originals: Originals, sample: PlannedSample) -> Future[Measured] | None:
        """The measurement of a sample's images; None where the format has no place for it, or there is no target."""
        if sample.row.target is None or self.format_version == 1:
            return None
        images = [originals.decoded(digest) for _, digest, _ in sample.images[: len(sample.sizes)]]
        return self.decoders.submit(lambda: measure([it.result() for it in images], sample.sizes, crop=self.crop))


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
