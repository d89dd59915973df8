"""Never run on the real encoder: a head that predicts masks, masks from differences, and their comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, interpolate, max_pool2d, pad

from qwen_cache.errors import ModelError, QwenCacheError
from qwen_cache.format.cache import Cache
from qwen_cache.format.cache import Sample as CachedSample
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remembered import check_safetensors, sealed
from qwen_cache.text import parse_json

# ---- head ------------------------------------------------------------------------------------------------------------
# Experimental: never run on the real encoder's attention. The mask head: a small U-Net that locates a phrase.
#
# Its input is a stack `[C, h, w]`: the attention of the phrase to each cell of the image, for every layer and head of a
# frozen encoder (`C` = layers × heads). With the same seed, training on a CPU gives the same head every time. A saved
# head is one safetensors file that names the encoder it was trained on; any other file is refused with a `ModelError`.

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
    """The origin of a head: `encoder` identifies the weights and the way their attention was read."""

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
        stack = stack.float()  # each channel is divided by its sum: the place of attention counts, not its strength
        stack = stack / stack.sum((-2, -1), keepdim=True).clamp(min=1e-12)
        x = interpolate(stack, (height, width), mode="bilinear")
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
    warm_up = WARM_UP * settings.steps
    for step in range(settings.steps):
        scale = (step + 1) / (warm_up + 1)  # linear warm-up, then cosine decay to 0
        if step >= warm_up:
            scale = 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (settings.steps - warm_up)))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * scale
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


# ---- difference ------------------------------------------------------------------------------------------------------
# The place of an edit from a training pair alone: the difference of the target and its control.
#
# A change of tone over the whole image, compression, noise and a shift by one pixel do not count as edits. Without a
# place to point at, because the images are the same or the edit is everywhere, the mask is None with a reason. Refuses
# a target whose sides are not multiples of the cell. A blur of the whole image, or a shift by more than one pixel, does
# count as a change of textured areas.

FLOOR = 8 / 255
"""Smaller changes are never edits: JPEG at quality 85 and a shift left less on every photograph we tried."""
NOISE_TOLERANCE = 0.6
"""Added to the floor per standard deviation of the pair's noise; white noise of 25/255 leaves about half of that."""
SLACK = 0.15
"""The fraction of the local contrast that compression may change."""
MAX_AREA = 0.7
"""A larger fraction of the image counts as a global edit: the rest is too small to fit the change of tone."""
EXPLAINED = 0.25
"""If a free change of tone leaves less than this fraction of the changed area, it may explain the edit."""
STRONG = 24 / 255
"""The mean change of colour from which such an edit is local; residues of a change of tone are weaker."""
SPREAD = 1.5
"""After gain and offset, a local edit leaves at most this many times its area; a change of tone leaves more."""
TONE_CHANGED = 8 / 255
"""The mean change of colour from which a pair that differs only in tone is global instead of identical."""

BLOCK = 8  # pixels of a side; tones are fitted to the mean colours of blocks, so that a shift by one matters little
EDIT_LIKE = 10 / 255  # a block with this error has 1/4 of the weight in the fit; with three times the error, 1/100
STIFF, LOOSE = torch.full((3, 10), 1e-3), torch.full((3, 10), 1e-6)
"""Ridges towards "no change" on the curves of each channel: STIFF keeps unseen colours, LOOSE fits any change."""
GAIN_AND_OFFSET = torch.where(torch.eye(3, 10).roll(1, 1) + torch.eye(1, 10) > 0, 1e-6, 1e6)
"""A ridge that allows only the gain and offset of each channel."""


@dataclass(frozen=True)
class Difference:
    """The result of a comparison: a mask, or the reason why there is none."""

    mask: np.ndarray | None
    """The edited fraction of each cell, `[H / cell, W / cell]`, float32 in 0..1."""
    reason: str | None
    """None with a mask; else "identical" (no difference) or "global" (the whole image differs)."""


def difference_mask(target: Image.Image, control: Image.Image, cell: int = 16) -> Difference:
    """A mask of where `target` (H×W pixels) differs from `control`, the image before the edit.

    Images of any mode are compared in RGB, the control scaled to the target's size. `cell` is the side of a mask cell
    in pixels. Raises ValueError unless H and W are multiples of `cell`.
    """
    if target.width % cell or target.height % cell:
        raise ValueError(f"the target's sides must be multiples of {cell}, found {target.width}×{target.height}")
    after, before = _pixels(target), _pixels(control.resize(target.size, Image.Resampling.LANCZOS))
    toned = _with_tone_of(after, before, STIFF)
    floor = FLOOR + NOISE_TOLERANCE * _noise(after - toned)
    change = _change(after, toned)
    edited = _cells(change > max(floor, _otsu(change)), cell)
    area = _area(edited)
    if not area:
        tone = float((toned - before).abs().mean())
        return Difference(None, "global" if tone > TONE_CHANGED else "identical")
    strength = float(change[change > floor].mean())
    everywhere = _area(_cells(change > floor, cell)) > MAX_AREA
    if everywhere or _is_a_tone(after, before, area, strength, floor, cell):
        return Difference(None, "global")
    beside_an_edit = max_pool2d((edited > 0.5).float()[None], 3, 1, 1)[0]  # elsewhere, a partly changed cell is a speck
    return Difference((edited * beside_an_edit).numpy(), None)


def _is_a_tone(
    after: torch.Tensor, before: torch.Tensor, area: float, strength: float, floor: float, cell: int
) -> bool:
    """True if a change of tone explains the residue of the stiff fit better than an edit.

    The loose fit also explains a recoloured object, if nothing else in the image has its colour.
    """

    def residual_area(ridge: torch.Tensor) -> float:
        return _area(_cells(_change(after, _with_tone_of(after, before, ridge)) > floor, cell)) / area

    if residual_area(LOOSE) >= EXPLAINED:
        return False
    return strength < STRONG or not EXPLAINED <= residual_area(GAIN_AND_OFFSET) <= SPREAD


def _pixels(image: Image.Image) -> torch.Tensor:
    """`[3, H, W]` in 0..1."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255


def _cells(changed: torch.Tensor, cell: int) -> torch.Tensor:
    return avg_pool2d(changed.float()[None], cell)[0]


def _area(cells: torch.Tensor) -> float:
    """The fraction of the cells that are mostly changed."""
    return float((cells > 0.5).float().mean())


def _box(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """The mean over a square around each pixel of `[C, H, W]`."""
    return avg_pool2d(pad(pixels[None], (side // 2,) * 4, mode="replicate"), side, 1)[0]


def _range(pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The minimum and the maximum over each pixel and its neighbours."""
    padded = pad(pixels[None], (1,) * 4, mode="replicate")
    return -max_pool2d(-padded, 3, 1)[0], max_pool2d(padded, 3, 1)[0]


def _change(after: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The distance of each colour from the range of the other image around that pixel: `[H, W]`."""
    after, before = _box(after, 3), _box(before, 3)
    (low, high), (low_before, high_before) = _range(after), _range(before)
    appeared = (after - high_before).clamp(min=0) + (low_before - after).clamp(min=0)
    vanished = (before - high).clamp(min=0) + (low - before).clamp(min=0)
    contrast = torch.maximum(high - low, high_before - low_before).norm(dim=0)
    change = torch.maximum(appeared, vanished).norm(dim=0) - SLACK * contrast
    return _box(change.clamp(min=0)[None], 7)[0]


def _noise(difference: torch.Tensor) -> float:
    """The standard deviation of a pair's pixel noise, measured in calm areas, which are not edited."""
    fine = avg_pool2d((difference - _box(difference, 3)).square().mean(0)[None], BLOCK)[0].flatten()
    calm = fine.kthvalue(1 + len(fine) // 3).values
    return float((calm * 9 / 8).sqrt())  # the mean of nine pixels removes a ninth of white noise


def _otsu(change: torch.Tensor) -> float:
    """Otsu's threshold of the logarithm, so that edits of different strength form one class."""
    values = torch.log1p(change / (2 / 255)).flatten()
    low, high = float(values.min()), float(values.max())
    count = torch.histc(values, 256, low, high)
    edges = torch.linspace(low, high, 257)
    below, mass = count.cumsum(0), (count * (edges[1:] + edges[:-1]) / 2).cumsum(0)
    between = (mass[-1] * below - mass * below[-1]).square() / (below * (below[-1] - below)).clamp(min=1)
    return float(edges[1:][between.argmax()].expm1() * 2 / 255)


def _curves(colours: torch.Tensor) -> torch.Tensor:
    """The basis functions of a change of tone: `[3, …]` to `[10, …]`."""
    return torch.cat([torch.ones_like(colours[:1]), colours, colours.square(), colours.sqrt()])


def _with_tone_of(after: torch.Tensor, before: torch.Tensor, ridge: torch.Tensor) -> torch.Tensor:
    """`before` after the change of tone to `after` that fits most of the image."""
    fit = _Fit(after, before, ridge)
    everything = fit.solve(fit.unchanged, torch.ones_like(fit.targets[0]))
    starts = (everything, fit.trimmed(everything), fit.trimmed(fit.unchanged))
    weights = min(map(fit.reweighted, starts), key=lambda weights: float((1 - fit.likeness(weights)).mean()))
    return (weights.float() @ _curves(before).flatten(1)).view_as(before).clamp(0, 1)


class _Fit:
    """Robust least squares from the curves of the control's blocks to the target's, which an edit must not distort."""

    def __init__(self, after: torch.Tensor, before: torch.Tensor, ridge: torch.Tensor) -> None:
        self.targets = avg_pool2d(after[None], BLOCK)[0].flatten(1).double()
        self.curves = _curves(avg_pool2d(before[None], BLOCK)[0].flatten(1).double())
        self.darkest = -max_pool2d(-after[None], BLOCK)[0].flatten(1)
        self.lightest = max_pool2d(after[None], BLOCK)[0].flatten(1)
        self.unchanged = torch.eye(3, 10, dtype=torch.float64).roll(1, 1)
        self.ridge = ridge.double().diag_embed()

    def predicted(self, weights: torch.Tensor) -> torch.Tensor:
        return weights @ self.curves

    def error(self, weights: torch.Tensor) -> torch.Tensor:
        return (self.targets - self.predicted(weights).clamp(0, 1)).square().sum(0)

    def likeness(self, weights: torch.Tensor) -> torch.Tensor:
        """From 1, no difference, to 0, an edit of any strength."""
        return 1 / (1 + self.error(weights) / EDIT_LIKE**2)

    def solve(self, last: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
        """The next weights; blocks clipped to black or white count only if the last weights miss the clipping."""
        predicted = self.predicted(last)
        clipped = ((self.lightest > 0.98) & (predicted >= self.targets)) | (
            (self.darkest < 0.02) & (predicted <= self.targets)
        )
        rows = []
        for target, row, used, ridge in zip(self.targets, self.unchanged, ~clipped, self.ridge, strict=True):
            weighted = self.curves * importance * used / len(target)
            step = torch.linalg.solve(weighted @ self.curves.T + ridge, weighted @ (target - row @ self.curves))
            rows.append(row + step)
        return torch.stack(rows)

    def trimmed(self, weights: torch.Tensor) -> torch.Tensor:
        """Least trimmed squares: fitted to the best-fitting half of the blocks."""
        for _ in range(15):
            error = self.error(weights)
            weights = self.solve(weights, (error <= error.median()).double())
        return weights

    def reweighted(self, weights: torch.Tensor) -> torch.Tensor:
        """Geman and McClure's weights: every block that is not edited counts."""
        for _ in range(15):
            weights = self.solve(weights, self.likeness(weights).square())
        return weights


# ---- cached ----------------------------------------------------------------------------------------------------------
# Experimental: never run on the real encoder's attention. A cache as training data of a mask head.
#
# Samples with attention and a mask, and the disagreements of those masks with a head. Masks that a head predicted are
# left out: they are neither training data nor ground truth.


@dataclass(frozen=True)
class MaskedSamples(Sequence[Sample]):
    """Samples of a cache for a head: attention `[C, h, w]` and mask `[H, W]`, each read on access."""

    cache: Cache
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> MaskedSamples: ...
    def __getitem__(self, i: int | slice) -> Sample | MaskedSamples:
        if isinstance(i, slice):
            return MaskedSamples(self.cache, self.positions[i])
        return self.cache[self.positions[i]]["attention"], self.mask(i)

    def mask(self, i: int) -> torch.Tensor:
        """The mask `[H, W]` alone."""
        return mask_of(self.cache[self.positions[i]])

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the attention, from the index."""
        return [self.cache.row(position).meta.tensors["attention"].shape for position in self.positions]


def masked_positions(cache: Cache) -> list[int]:
    """The positions of the samples with attention and a mask that is not from a head."""
    if cache.format_version == 1:
        return []
    attention, origin = (cache.table[name] for name in ("attention", "edit_mask_from"))
    rows = zip(attention.is_valid().to_pylist(), origin.to_pylist(), strict=True)
    return [i for i, (is_there, made_by) in enumerate(rows) if is_there and made_by not in (None, "head")]


def no_masked_samples(cache: Cache) -> QwenCacheError:
    """The reason why a cache has no such samples, as an error to raise."""
    what = "no sample of this cache has both attention and a mask that is not from a head"
    do = "run `qwen-cache build` again with --edit-mask diff --set cache.store_attention=true"
    if cache.format_version == 1:
        what, do = "format v1 has neither attention nor masks", f"{do} --format v2, and another --out"
    elif not any(cache.table["attention"].is_valid().to_pylist()):
        what = "no sample of this cache has attention"
    elif not any(cache.table["edit_mask"].is_valid().to_pylist()):
        what = "no sample of this cache has a mask"
    return QwenCacheError(what, where=cache.folder, do=do)


# ---- where head and mask disagree ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """The IoU of a sample's mask and the head's prediction, and the fraction of the cells that each covers."""

    sample: CachedSample
    iou: float
    area: float
    head_area: float

    @property
    def origin(self) -> str:
        """The origin of the sample's mask."""
        return str(self.sample.row.meta.edit_mask_from)

    def to_json(self) -> dict[str, Any]:
        """The JSON value of `inspect --json`."""
        sample = self.sample
        description = {"name": sample.name, "key": sample.key, "prompt": sample.prompt, "edit_mask_from": self.origin}
        return description | {"iou": self.iou, "area": self.area, "head_area": self.head_area}


def disagreements(cache: Cache, head: MaskHead) -> Iterator[Disagreement]:
    """Disagreements of all masked samples, in the order of the cache."""
    for position in masked_positions(cache):
        sample = cache[position]
        mask, predicted = mask_of(sample), head_mask_of(head, sample)
        yield Disagreement(sample, iou(predicted, mask), _share(mask), _share(predicted))


def mask_of(sample: CachedSample) -> torch.Tensor:
    """The cached mask, `[H, W]`."""
    _, height, width = sample.img_shapes[0]
    return sample["edit_mask"].view(height, width)


def head_mask_of(head: MaskHead, sample: CachedSample) -> torch.Tensor:
    """The head's prediction from a sample's attention, `[H, W]` on the cells of its mask."""
    _, height, width = sample.img_shapes[0]
    return predict_mask(head, sample["attention"], (height, width)).cpu()


def _share(mask: torch.Tensor) -> float:
    return float((mask > 0.5).float().mean())
