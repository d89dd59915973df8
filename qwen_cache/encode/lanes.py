"""decode → VAE ∥ text: the two encoders at work on their own devices, at the same time.

One thread for each encoder and a few that decode, so that the slower encoder decides the time. What is in flight is
bounded by whoever submits: a sample is decoded when it is submitted, and held until its result is taken. A picture that
was just encoded is not encoded again, and samples about the same pictures, one after the other, share their prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch
from PIL import Image

from qwen_cache.encode.images import open_mask, open_rgb
from qwen_cache.encode.plan import Planned, read_again
from qwen_cache.encode.sizes import Size, calculate_dimensions
from qwen_cache.encode.text import Prefix, TextEncoder
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.errors import QwenCacheError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta, TensorSpec

DECODE_THREADS = 4
LATENTS_KEPT = 256  # of pictures that may come again: 128 MB at a megapixel in bfloat16
_SAFETENSORS_NAME = {torch.bfloat16: "BF16", torch.float32: "F32"}


@dataclass(frozen=True)
class EncodedText:
    """`prefix` (`[P, D]`) begins the embeddings of both prompts, of which the others are the rest."""

    prefix: torch.Tensor
    prompt: torch.Tensor
    empty: torch.Tensor


@dataclass(frozen=True)
class InFlight:
    """A submitted sample."""

    sample: Planned
    latents: list[Future[torch.Tensor]]
    text: Future[EncodedText]
    mask: Future[torch.Tensor] | None


class Lanes:
    """Both encoders. Leaving the context drops what has not begun."""

    def __init__(
        self, vae: VaeEncoder, text: TextEncoder, recipe_id: str, condition_image_size: int, format_version: int
    ) -> None:
        self.vae, self.text = vae, text
        self.recipe_id, self.condition_image_size, self.format_version = recipe_id, condition_image_size, format_version
        self.decoders = ThreadPoolExecutor(DECODE_THREADS, "decode")
        self.vae_lane, self.text_lane = ThreadPoolExecutor(1, "vae"), ThreadPoolExecutor(1, "text")
        self._known: OrderedDict[tuple[str, Size], Future[torch.Tensor]] = OrderedDict()
        self._about: tuple[str, ...] | None = None
        self._shared: Future[tuple[Prefix, torch.Tensor]]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pool in (self.decoders, self.vae_lane, self.text_lane):
            pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, sample: Planned) -> InFlight:
        row, inputs = sample.row, sample.inputs
        decoded: dict[str, Future[Image.Image]] = {}

        def picture(path: Path, digest: str) -> Future[Image.Image]:
            if digest not in decoded:
                decoded[digest] = self.decoders.submit(lambda: open_rgb(read_again(path, digest), str(path)))
            return decoded[digest]

        paths, digests = [row.target, *row.controls], [inputs.target, *inputs.controls]
        latents = []
        for path, digest, size in zip(paths, digests, sample.sizes, strict=True):
            if (digest, size) not in self._known:
                self._known[digest, size] = self._encode_picture(picture(path, digest), size)
            self._known.move_to_end((digest, size))
            latents.append(self._known[digest, size])
        while len(self._known) > LATENTS_KEPT:
            self._known.popitem(last=False)
        if self._about != inputs.controls:
            self._about = inputs.controls
            self._shared = self._read([picture(*each) for each in zip(row.controls, inputs.controls, strict=True)])
        mask = self.decoders.submit(self._mask, sample) if row.mask else None
        return InFlight(sample, latents, self._embed(self._shared, row.prompt), mask)

    def result(self, work: InFlight) -> tuple[SampleMeta, dict[str, memoryview]]:
        """Wait for both lanes; the sample's metadata and the bytes of its tensors."""
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

    def _encode_picture(self, picture: Future[Image.Image], size: Size) -> Future[torch.Tensor]:
        return self.vae_lane.submit(lambda: self.vae.encode(picture.result(), size))

    def _read(self, pictures: Sequence[Future[Image.Image]]) -> Future[tuple[Prefix, torch.Tensor]]:
        """The prefix of these pictures, and their empty prompt."""
        seen = [self.decoders.submit(self._for_text, picture) for picture in pictures]

        def read() -> tuple[Prefix, torch.Tensor]:
            prefix = self.text.read([picture.result() for picture in seen])
            return prefix, self.text.embed(prefix, "")

        return self.text_lane.submit(read)

    def _embed(self, shared: Future[tuple[Prefix, torch.Tensor]], prompt: str) -> Future[EncodedText]:
        def embed() -> EncodedText:
            prefix, empty = shared.result()
            return EncodedText(prefix.embeds, self.text.embed(prefix, prompt), empty)

        return self.text_lane.submit(embed)

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
        return mask_tokens(open_mask(read_again(path, digest), str(path)), sample.sizes[0])

    def _for_text(self, decoded: Future[Image.Image]) -> Image.Image:
        picture = decoded.result()  # its decoder was submitted before this one, so it is not waited for in a circle
        size = calculate_dimensions(self.condition_image_size, picture.size)
        return picture.resize(size, Image.Resampling.LANCZOS)


def mask_tokens(mask: Image.Image, size: tuple[int, int]) -> torch.Tensor:
    """`[S]` float32 in 0..1: the share of each 16×16-pixel token of a target of `size` that is edited."""
    width, height = size
    cells = mask.resize((width // PIXELS_PER_TOKEN, height // PIXELS_PER_TOKEN), Image.Resampling.BOX)
    return torch.from_numpy(np.asarray(cells, dtype=np.float32).reshape(-1) / 255.0)
