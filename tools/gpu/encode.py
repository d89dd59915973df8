"""Samples per second of both encoders with random weights of the real size, against the FLOPs that they need.

The lanes are those of `qwen-cache build`: the VAE on images of 1024², and the text encoder on one image of 384² (as for
Edit-2509) or 1024² (as for Edit) with a prompt and the empty prompt. Once one at a time, once in the batches of a GPU.
Decoding images and writing shards are not part of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import bench_build
import torch
from bench_train import ENCODER_BYTES
from make_tiny_model import make_tiny_model

from qwen_cache.encode.preflight import TEXT_BATCH_TOKENS, VAE_BATCH_PIXELS
from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.models.folder import open_model

from .measure import Card, Cases, Row, UnavailableError, forget, peaks, timed

ROOM = 2e9  # bytes for the activations of one image at a time
SMALL_SIDE = 112


def cases(part: str, card: Card) -> Cases:
    with tempfile.TemporaryDirectory() as folder:
        encoders = Encoders(card, Path(folder))
        for batch in (False, True):
            how = "in batches" if batch else "one at a time"
            yield f"VAE, 1024², {how}", lambda b=batch: encoders.images(b)
        for side in (384, 1024):
            for batch in (False, True):
                how = "in batches" if batch else "one at a time"
                yield f"text encoder, one image of {side}², {how}", lambda s=side, b=batch: encoders.texts(s, b)


class Encoders:
    """Both encoders, made on first use; the tiny model's folder has the tokenizer."""

    def __init__(self, card: Card, folder: Path) -> None:
        self.card, self.folder = card, folder
        self.size = bench_build.SIZES["tiny" if card.small else "real"]

    @cached_property
    def model(self) -> Any:
        return open_model(str(make_tiny_model(self.folder / "model", "edit-plus")), ("vae", "text_encoder"))

    @cached_property
    def modules(self) -> Any:
        needed = ENCODER_BYTES + ROOM
        if not self.card.small and self.card.memory < needed:
            raise UnavailableError(f"the encoders take {needed / 1e9:.0f} GB, {self.card.memory / 1e9:.1f} GB are free")
        return bench_build.make_modules(self.size, self.model, self.card.device, torch.bfloat16)

    def images(self, batch: bool) -> Row:
        """Images of a sample and of its control are equal work: an image is half a sample."""
        forget(self.card)
        side = SMALL_SIDE if self.card.small else 1024
        with bench_build.loaded_from(self.modules):
            limit = VAE_BATCH_PIXELS if batch else 1
            vae = VaeEncoder(self.model, self.card.device, torch.bfloat16, limit)
        count = max(1, limit // 1024**2)
        pixels = [vae.pixels(bench_build.make_image(side, i), (side, side)) for i in range(count)]
        return self.rate(lambda: vae.encode(pixels), count)

    def texts(self, side: int, batch: bool) -> Row:
        """Each request is a new image, so that no prefix is reused."""
        forget(self.card)
        side = SMALL_SIDE if self.card.small else side
        with bench_build.loaded_from(self.modules):
            limit = TEXT_BATCH_TOKENS if batch else 1
            text = TextEncoder(self.model, self.card.device, torch.bfloat16, limit)
        inputs = text.inputs([bench_build.make_image(side, 0)])
        tokens = inputs["input_ids"].shape[1]
        count = max(1, limit // tokens)

        def encode() -> None:
            text.encode([TextRequest(dict(inputs), bench_build.PROMPT, ()) for _ in range(count)])

        return {"tokens": tokens, **self.rate(encode, count)}

    def rate(self, encode: Callable[[], object], count: int) -> Row:
        """Rate of `encode`, which encodes `count` items."""
        flops = bench_build.count_flops(encode)["all"]
        row = timed(encode, self.card, budget=15)
        rates = {"per_second": count / row["seconds"], "tflops": flops / row["seconds"] / 1e12}
        return {"together": count, "tflop": flops / count / 1e12, **row, **rates, **peaks(self.card)}
