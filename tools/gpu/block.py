"""A layer and a block alone: the patch embedding of both vision towers, and a block of each family, eager and compiled.

The patch embedding is a convolution in transformers, and a matrix product here: on some cards the convolution takes
seconds. A block is the first of two, with a LoRA of rank 16, on the packed row of one sample; nothing is recomputed.
Its backward pass computes the gradients of the LoRA and of both rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from bench_graph import arguments_of_block
from bench_memory import random_batch
from torch import nn
from torch.utils._pytree import tree_leaves

from qwen_cache.models.encoders import PatchEmbedding
from qwen_cache.settings.load import load_config
from qwen_train.model.combinations import with_layout
from qwen_train.training.loss import compute_loss
from qwen_train.weights import compute_dtype, trainable

from . import flops, models
from .measure import Card, Cases, Row, forget, peaks, timed
from .steps import SQUARE, check

TOWERS = {"Qwen2.5-VL": (1280, 14, 74), "Qwen3-VL": (1152, 16, 64)}
"""Width, side of a patch in pixels, and patches along each side of an image of a megapixel."""
CHANNELS, FRAMES = 3, 2
BLOCKS = {"Qwen-Image": "20b", "Qwen-Image-2.1": "2.1"}
WAYS = {
    "eager": ("train.compile=false",),
    "compiled": ("train.compile=true",),
    "compiled, int8_convrot": ("train.compile=true", "model.quantization=int8_convrot"),
    "compiled, fp8_w8a8": ("train.compile=true", "model.quantization=fp8_w8a8"),
}
"""How a block computes, and the settings for it."""
ROWS = {"20b": 2, "2.1": 1}
"""The rows of tokens that a block takes: image and text, or both in one."""
REPEATS = {"least": 10, "most": 30, "budget": 5.0, "warm_up": 5}


def cases(part: str, card: Card) -> Cases:
    for tower in TOWERS:
        for how in (nn.Conv3d, PatchEmbedding):
            name = "convolution" if how is nn.Conv3d else "product"
            yield f"patch embedding of {tower}, {name}", partial(patch_embedding, how, tower, card)
    for name, family in BLOCKS.items():
        for ways, settings in WAYS.items():
            for backward in (False, True):
                title = f"block of {name}, {ways}, forward{' and backward' * backward}"
                yield title, partial(block, family, card, settings, backward=backward)


@torch.no_grad()
def patch_embedding(how: type[nn.Conv3d], tower: str, card: Card) -> Row:
    """All patches of one image in bfloat16."""
    forget(card)
    width, side, count = (8, 4, 2) if card.small else TOWERS[tower]
    kernel = (FRAMES, side, side)
    layer = how(CHANNELS, width, kernel, kernel, bias=False, device=card.device, dtype=torch.bfloat16)
    patches = torch.randn(count**2, CHANNELS, *kernel, device=card.device).bfloat16()
    needed = 2 * patches.numel() * width / 1e12
    row = timed(lambda: layer(patches), card, **REPEATS)
    return {"tflop": needed, **row, "tflops": needed / row["seconds"], **peaks(card)}


def block(family: str, card: Card, ways: Sequence[str], *, backward: bool) -> Row:
    """The first of two blocks, on the row of an edit at 1024² with one control."""
    forget(card)
    chosen = ["train.gradient_checkpointing=false", *ways]
    settings = with_layout(load_config(None, chosen), card.device)
    check(settings, card)
    config, sample = models.config_of(family, card, 2), models.edit(family, card, *SQUARE)
    needed = flops.of_block(config, settings, sample, backward=backward) / 1e12
    dtype, rows = compute_dtype(settings.train), ROWS[family]
    data = random_batch(config, settings, [sample]).to(card.device, dtype)
    model = models.for_training(config, settings, card, data.sigma)
    autocast = torch.autocast(card.device.type, dtype)
    with autocast:
        arguments = arguments_of_block(model, lambda: compute_loss(model, data), rows)
    first = model.transformer_blocks[0]
    inputs = [*arguments[:rows], *trainable(first)]

    def run() -> None:
        with autocast:
            outputs = tree_leaves(first.forward(*arguments))
        if backward:
            torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs])

    row = timed(run, card, **REPEATS)
    return {"tflop": needed, **row, "tflops": needed / row["seconds"], **peaks(card)}
