"""Experimental: never run on the real encoder's attention. The mask head: a small U-Net that locates a phrase.

Its input is a stack `[C, h, w]`: the attention of the phrase to each cell of the image, for every layer and head of a
frozen encoder (`C` = layers × heads). With the same seed, training on a CPU gives the same head every time. A saved
head is one safetensors file that names the encoder it was trained on; any other file is refused with a `ModelError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, interpolate, pad

from qwen_cache.errors import ModelError
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remembered import check_safetensors, sealed
from qwen_cache.text import parse_json

METADATA_KEY = "qwen_cache.mask_head"
PRIOR = 0.06
"""The usual fraction of edited cells; a head that begins at one half spends hundreds of steps on learning it."""
MAX_MASK_SIDE = 1024  # cells of a mask's longer side
WARM_UP = 0.03  # of the steps
ATTENTION_INPUTS = ("text_encoder", "processor", "template", "picture_template", "condition_image_size")

Sample = tuple[torch.Tensor, torch.Tensor]
"""A stack `[C, h, w]` and its true mask `[H, W]` in 0..1, of any size."""


@dataclass(frozen=True)
class HeadMetadata:
    """What a head was trained on: `encoder` identifies the weights and the way their attention was read."""

    encoder: str


def encoder_of(recipe: dict[str, Any]) -> str:
    """The hash of the entries of a cache's recipe on which attention depends, except the dtype's rounding."""
    inputs = {name: recipe.get(name) for name in ATTENTION_INPUTS}
    quantised = {name: recipe[name] for name in ("text_quantization",) if name in recipe}  # older heads keep their hash
    return content_hash(canonical_json(inputs | quantised))


@dataclass(frozen=True)
class TrainSettings:
    """Defaults for training on 10⁵ phrases; a few hundred pairs need a higher lr."""

    steps: int
    batch_size: int = 8
    lr: float = 1e-4
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    base: int = 64
    size: int = 64
    device: str = "cpu"


class MaskHead(nn.Module):
    """`[N, C, h, w]` to logits `[N, 1, h', w']`, whose longer side is the larger of `size` and the stack's."""

    def __init__(self, channels: int, base: int = 64, size: int = 64) -> None:
        super().__init__()
        self.channels, self.base, self.size = channels, base, size
        widths = [base, 2 * base, 4 * base, 8 * base]
        self.down = nn.ModuleList(map(_convolutions, [channels, *widths[:-1]], widths))
        self.narrow = nn.ModuleList(_layer(wide, narrow, 1) for narrow, wide in pairwise(widths))
        self.up = nn.ModuleList(_convolutions(2 * width, width) for width in widths[:-1])
        self.logits = nn.Conv2d(base, 1, 1)
        nn.init.constant_(self.logits.bias, math.log(PRIOR / (1 - PRIOR)))  # type: ignore[arg-type]  # there is a bias

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        factor = max(1.0, self.size / max(height, width))
        return max(1, round(height * factor)), max(1, round(width * factor))

    def forward(self, stack: torch.Tensor) -> torch.Tensor:
        height, width = self.output_size(*stack.shape[-2:])
        x = interpolate(_normalised(stack), (height, width), mode="bilinear")
        x = pad(x, (0, -width % 8, 0, -height % 8))
        skipped = []
        for stage in self.down[:-1]:
            skipped.append(stage(x))
            x = nn.functional.max_pool2d(skipped[-1], 2)
        x = self.down[-1](x)
        for narrow, stage, skip in reversed(list(zip(self.narrow, self.up, skipped, strict=True))):
            x = stage(torch.cat([skip, narrow(interpolate(x, scale_factor=2, mode="bilinear"))], 1))
        logits: torch.Tensor = self.logits(x)
        return logits[..., :height, :width]


def _layer(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(1, outputs), nn.ReLU())


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(_layer(inputs, outputs, 3), _layer(outputs, outputs, 3))


def _normalised(stack: torch.Tensor) -> torch.Tensor:
    """Each channel divided by its sum: the place of attention counts, not its strength."""
    stack = stack.float()
    return stack / stack.sum((-2, -1), keepdim=True).clamp(min=1e-12)


def mask_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy plus dice loss of logits `[N, 1, ·, ·]`; targets are averaged to their size."""
    target = interpolate(target, logits.shape[-2:], mode="area")
    mask, axes = logits.sigmoid(), (1, 2, 3)
    dice = 1 - (2 * (mask * target).sum(axes) + 1) / (mask.sum(axes) + target.sum(axes) + 1)
    return binary_cross_entropy_with_logits(logits, target) + dice.mean()


def iou(mask: torch.Tensor, target: torch.Tensor) -> float:
    """Intersection over union of two masks of one shape, thresholded at one half; 1 if both are empty."""
    one, other = mask > 0.5, target > 0.5
    union = int((one | other).sum())
    return int((one & other).sum()) / union if union else 1.0


@torch.no_grad()
def predict_mask(head: MaskHead, stack: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """The mask of one stack `[C, h, w]`, in 0..1, on `size` = (rows, columns) cells of the image."""
    if len(stack) != head.channels:
        raise ModelError(
            "this mask head was trained on another encoder",
            expected=f"{head.channels} attention heads",
            found=len(stack),
            do="use the encoder named in the head's file, or train a head for this one",
        )
    mask = head(stack[None].to(head.logits.weight.device)).sigmoid()
    return interpolate(mask, size, mode="bilinear", antialias=True)[0, 0].clamp(0, 1)


def train_head(
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    settings: TrainSettings,
    seed: int,
    report: Callable[[int, float], None],
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> tuple[MaskHead, float]:
    """A head trained on `samples`, and its mean IoU on `held_out`; `report` gets every step and its loss.

    `shapes` are those of the stacks, if they are known without reading them.
    """
    shapes = shapes or [tuple(stack.shape) for stack, _ in samples]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = MaskHead(shapes[0][0], settings.base, settings.size).to(settings.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    batches = _batches(shapes, settings.batch_size, seed)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * _lr_scale(step, settings.steps)
        chosen = [samples[index] for index in next(batches)]
        logits = head(torch.stack([stack for stack, _ in chosen]).to(settings.device))
        size = tuple(logits.shape[-2:])
        targets = torch.cat([interpolate(mask[None, None].float(), size, mode="area") for _, mask in chosen])
        loss = mask_loss(logits, targets.to(settings.device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(head.parameters(), settings.max_grad_norm)
        optimizer.step()
        report(step, loss.item())
    head.eval()
    return head, mean_iou(head, held_out)


def mean_iou(head: MaskHead, samples: Sequence[Sample]) -> float:
    """The mean IoU over `samples`, each on the cells of its own mask."""
    total = 0.0
    for stack, mask in samples:
        rows, columns = mask.shape
        total += iou(predict_mask(head, stack, (rows, columns)).cpu(), mask)
    return total / len(samples)


def _lr_scale(step: int, steps: int) -> float:
    """The factor of the learning rate: linear warm-up, then cosine decay to 0."""
    warm_up = WARM_UP * steps
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def _batches(shapes: Sequence[tuple[int, ...]], batch_size: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of indices of samples of one shape; every sample comes once before any comes twice."""
    random = torch.Generator().manual_seed(seed)
    while True:
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index in torch.randperm(len(shapes), generator=random).tolist():
            by_shape.setdefault(shapes[index], []).append(index)
        batches = [
            indices[start : start + batch_size]
            for indices in by_shape.values()
            for start in range(0, len(indices), batch_size)
        ]
        for position in torch.randperm(len(batches), generator=random).tolist():
            yield batches[position]


def save_head(head: MaskHead, path: Path, metadata: HeadMetadata) -> None:
    """Write one safetensors file, atomically."""
    description = {"version": 1, "channels": head.channels, "base": head.base, "size": head.size, **asdict(metadata)}
    weights = {name: weight.detach().cpu().contiguous() for name, weight in head.state_dict().items()}
    write_durably(path, *sealed(save(weights, {METADATA_KEY: json.dumps(description, sort_keys=True)})))


def load_head(path: Path) -> tuple[MaskHead, HeadMetadata]:
    """The head in `path`, in eval mode, and its metadata; ModelError for any other file."""
    try:
        check_safetensors(path, ModelError)
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
            weights = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as error:
        raise _refusal(path, error) from None
    if text is None:
        raise _refusal(path, "a safetensors file of something else")
    try:
        description = parse_json(text)
        if description.pop("version") != 1:
            raise _refusal(path, "a head of another version")
        if not (isinstance(description["size"], int) and 0 < description["size"] <= MAX_MASK_SIDE):
            raise _refusal(path, f"size {description['size']!r}")
        if not all(bool(torch.isfinite(weight).all()) for weight in weights.values()):
            raise _refusal(path, "weights that are not finite")
        with torch.device("meta"):
            head = MaskHead(description.pop("channels"), description.pop("base"), description.pop("size"))
        head.load_state_dict(weights, assign=True)
        return head.requires_grad_(False).eval(), HeadMetadata(**description)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise _refusal(path, f"metadata that does not fit: {error}") from None


def _refusal(path: Path, found: object) -> ModelError:
    return ModelError(
        "this is not a mask head that can be used",
        where=path,
        expected="a safetensors file as saved after training one",
        found=found,
        do="train a head again, or name another file",
    )
