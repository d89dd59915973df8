"""Attention alone: forward and backward by each kernel that runs here, at the lengths of training.

FLOPs are two products of every query with every key that it sees, and four for the gradients, as in `flops.py`. The
kernel that `train.attention=auto` would take for few lengths is marked.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from qwen_cache.errors import ConfigError
from qwen_cache.settings.sections import TrainConfig
from qwen_train.model import kernels
from qwen_train.model.joint_row import JointSample
from qwen_train.model.kernels import FLASH, KERNELS, TITLES, Choice, Kernel
from qwen_train.model.segments import Segment, Segments, segments

from .measure import Card, Cases, Row, UnavailableError, forget, peaks, timed

DIM = 128
ROWS: dict[str, tuple[int, list[int]]] = {
    "24 heads, 4,346": (24, [4346]),
    "24 heads, 8,642": (24, [8642]),
    "24 heads, 4,346 and 3,020": (24, [4346, 3020]),
    "32 heads, 4,346": (32, [4346]),
    "32 heads, 8,642": (32, [8642]),
}
"""Heads, and the tokens of each sample, text and images: text to image and an edit at 1024², and a batch of two."""
EDIT_21: dict[str, Any] = {"prefix": ((7, True), (4096, False), (127, True)), "target": 4096, "draws": 1}
"""An edit of Qwen-Image-2.1: text before an image, the image, and text after it, which sees both."""
SMALLER = 64
REPEATS = {"least": 10, "most": 30, "budget": 5.0, "warm_up": 10}


def cases(part: str, card: Card) -> Cases:
    for kernel in KERNELS:
        if reason := obstacle(kernel, card):
            yield TITLES[kernel], partial(refuse, reason)
            continue
        for name, backward in itertools.product([*ROWS, "32 heads, edit of 2.1"], (False, True)):
            title = f"{TITLES[kernel]}, {name}, forward{' and backward' * backward}"
            yield title, partial(measure, name, kernel, card, backward=backward)


def obstacle(kernel: Kernel, card: Card) -> str:
    """Why a run would refuse this kernel, or take another in its place; "" if it takes it."""
    try:
        kernels.refuse_kernel(TrainConfig(attention=kernel), card.device, by_segments=True)
    except ConfigError as error:
        return f"it needs {error.expected}, found {error.found}"
    checked = kernels.checked(Choice(kernel), card.device, 24, DIM)
    return "" if checked.kernel == kernel else checked.reason


def refuse(reason: str) -> Row:
    raise UnavailableError(reason)


def measure(name: str, kernel: Kernel, card: Card, *, backward: bool) -> Row:
    """One call of the operation that the models call, in bfloat16."""
    heads, calls = shape(name, card)
    forget(card)
    of = Segments.of(calls, card.device, kernel)
    queries = sum(segment.length for members in calls for segment in members)
    rows = torch.randn(4, queries, heads, DIM, device=card.device).bfloat16()
    *inputs, gradient = rows.unbind()

    def run() -> None:
        leaves = [x.detach().requires_grad_(backward) for x in inputs]
        output = segments(*leaves, *of)[0]
        if backward:
            torch.autograd.grad(output, leaves, gradient)

    row = timed(run, card, **REPEATS)
    if kernel in kernels._failed:
        raise UnavailableError(f"{TITLES[kernel]} failed at this length")
    needed = (3 if backward else 1) * sum(flop(segment) for members in calls for segment in members) * heads / 1e12
    described = {"shape": name, "kernel": kernel, "backward": backward, "chosen": kernel == by_default(card)}
    return {"tflop": needed, **described, **row, "tflops": needed / row["seconds"], **peaks(card)}


def shape(name: str, card: Card) -> tuple[int, list[list[Segment]]]:
    """The heads, and the calls of the variable-length kernel."""
    smaller = SMALLER if card.small else 1
    if name not in ROWS:
        prefix = tuple((max(1, length // smaller), is_text) for length, is_text in EDIT_21["prefix"])
        sample = JointSample(prefix, EDIT_21["target"] // smaller, EDIT_21["draws"])
        return 2 if card.small else 32, [[segment] for segment in sample.segments]
    heads, lengths = ROWS[name]
    ends = list(itertools.accumulate((length // smaller for length in lengths), initial=0))
    return 2 if card.small else heads, [[Segment(span, False, (span,)) for span in itertools.pairwise(ends)]]


def flop(segment: Segment) -> float:
    """Floating-point operations of a head, forward; of its own keys, a row of text sees half on average."""
    hidden = segment.length * (segment.length - 1) / 2 if segment.is_text else 0
    return 4 * DIM * (segment.length * segment.key_length - hidden)


def by_default(card: Card) -> Kernel:
    """The kernel of `train.attention=auto` for samples of one length."""
    capability = kernels.capability_of(card.device)
    return kernels.choose_kernel("auto", capability, 1, kernels.SAMPLES_PER_LENGTH).kernel if capability else FLASH


def kernel_of(settings: TrainConfig, heads: int, card: Card) -> Kernel:
    """The kernel that a run with few lengths takes."""
    chosen = by_default(card) if settings.attention == "auto" else settings.attention
    return kernels.checked(Choice(chosen), card.device, heads, DIM).kernel
