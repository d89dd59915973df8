"""Scores of a run's steps: losses of held-out samples, and distances between validation images, target and control.

They are computed from the files in the run's folder, without torch, a model or a GPU; a likeness only where
`best --likeness` has measured it by a model. Images are compared as the VAE's latents, which are stored: of the
difference of two images, at three scales, the *colour* is its root mean square, with each channel in units of its
standard deviation over the run's targets and controls, and the *edges* are the same of its spatial gradients. 0 is the
same image; two unrelated ones are about √2 apart. Files that cannot be read are skipped.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize

from qwen_cache.errors import QwenCacheError, TrainError
from qwen_cache.format.cache import NUMPY_DTYPES
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.family import PIPELINES, QWEN_IMAGE, family_of
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remembered import check_safetensors
from qwen_cache.terminal import plural
from qwen_cache.text import parse_json, plain
from qwen_train.run import (
    EDIT_MASK,
    LEVELS,
    LIKENESS_NAME,
    PAIR_LOSSES,
    RUN_FACTS_NAME,
    SAMPLE_LOSSES,
    STEP,
    TRAINED,
    VALIDATION,
)

SCALES = (1, 2, 4)
"""Sides of the averaged squares, in latents."""
PREFERENCE, LOSS = "preference loss", "validation loss"
TARGET, LIKENESS = "distance to target", "likeness to target"
LIKENESS_TO_ALL = "likeness to the mean of the training targets"
DRIFT, SEEDS = "difference from no LoRA", "difference between seeds"
JUDGES = (PREFERENCE, LOSS, TARGET, LIKENESS)
"""The scores that say how good a step is. That of pairs comes first: it is what `train.dpo` learns, often at the cost
of the loss. Of the others the loss does: it has more samples, and a distance to one target is less for a blurred image
than for a sharp one that differs. Likeness to targets that were trained does not say it."""
HIGHER = (LIKENESS, LIKENESS_TO_ALL)
"""The scores of which more is better."""
LARGEST = 1e100  # squares must not overflow
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError),
    *(SafetensorError, QwenCacheError),
)

Image = NDArray[np.float32]
"""`[c, h, w]`: latents."""
Weights = NDArray[np.float32]
"""`[h, w]`: of each latent in a mean."""


@dataclass(frozen=True)
class Score:
    """A measure of steps on the same units; less is closer, or a lower loss, except of `HIGHER`."""

    name: str
    of: str
    """A unit in words: held-out sample, image, …"""
    steps: tuple[int, ...]
    values: NDArray[np.float64]
    """`[steps, units]`"""

    @property
    def means(self) -> dict[int, float]:
        return dict(zip(self.steps, self.values.mean(axis=1).tolist(), strict=True))

    @property
    def losses(self) -> NDArray[np.float64]:
        """`[steps, units]`: the values, or of `HIGHER` their negatives, so that less is better."""
        return -self.values if self.name in HIGHER else self.values

    @property
    def best(self) -> int:
        """The step with the best mean."""
        return self.steps[int(self.losses.mean(axis=1).argmin())]

    @property
    def units(self) -> int:
        return len(self.values[0])

    def among(self, steps: Iterable[int]) -> Score:
        """The score of those of its steps that are in `steps`."""
        rows = [i for i, step in enumerate(self.steps) if step in set(steps)]
        return Score(self.name, self.of, tuple(self.steps[i] for i in rows), self.values[rows])


@dataclass
class Scores:
    """The scores of a run, those in `JUDGES` first, and the files that could not be read."""

    scores: list[Score]
    unread: list[Path] = field(default_factory=list)
    trained: bool = False
    """True if there are images of trained samples: their targets say nothing about other images."""
    likeness: str = ""
    """A sentence on the scores of likeness; empty without them."""


def read_scores(folder: Path) -> Scores:
    """The scores of the run in `folder`; maybe none."""
    found = Scores([])
    tables: dict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(dict)
    for name, of, place in ((PREFERENCE, "held-out pair", PAIR_LOSSES), (LOSS, "held-out sample", SAMPLE_LOSSES)):
        for step, path in _steps(folder / VALIDATION / place, ".json"):
            try:
                losses = {key: _mean(levels) for key, levels in parse_json(read_file(path)).items()}
            except (*UNREADABLE, AttributeError):
                found.unread.append(path)
            else:
                tables[name, of][step] = losses
    with np.errstate(all="ignore"):  # a model that diverged generates infinities
        for step, name, of, values in _image_scores(folder, found):
            tables[name, of][step] = values
    order = {name: i for i, name in enumerate(JUDGES)}
    for name, of in sorted(tables, key=lambda key: order.get(key[0], len(order))):
        if score := _score(name, of, tables[name, of]):
            found.scores.append(score)
    return found


def _mean(levels: Any) -> float:
    """The loss of a sample; ValueError or OverflowError unless there is one for each quarter."""
    is_list = isinstance(levels, list) and len(levels) == LEVELS
    if not is_list or any(type(each) not in (int, float) or each < 0 for each in levels):
        raise ValueError(f"not {LEVELS} losses")
    return sum(map(float, levels)) / LEVELS


def _score(name: str, of: str, table: Mapping[int, Mapping[str, float]]) -> Score | None:
    """The score of units that all its steps have; without any, of those of the newest step."""
    finite = {step: {unit for unit, value in row.items() if abs(value) <= LARGEST} for step, row in table.items()}
    finite = {step: units for step, units in finite.items() if units}
    if not finite:
        return None
    units = sorted(set.intersection(*finite.values()) or finite[max(finite)])
    steps = tuple(sorted(step for step, has in finite.items() if has.issuperset(units)))
    return Score(name, of, steps, np.array([[table[step][unit] for unit in units] for step in steps]))


def _steps(folder: Path, suffix: str = "") -> list[tuple[int, Path]]:
    """The folders or files of steps, in their order."""
    matches = [(STEP.fullmatch(path.name.removesuffix(suffix)), path) for path in folder.glob(f"step-*{suffix}")]
    return sorted((int(match[1]), path) for match, path in matches if match)


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Latents:
    """The images of a file, and what it says of them."""

    images: list[Image]
    words: dict[str, str]
    edit_mask: Weights | None
    file_hash: str

    @property
    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(b"".join(image.tobytes() for image in self.images))


def _image_scores(folder: Path, found: Scores) -> Iterator[tuple[int, str, str, dict[str, float]]]:
    """Step, name and unit of each score of images, and its values by key."""
    patch = _patch(folder)

    def read(place: Path) -> dict[str, Latents]:
        files = {}
        for path in sorted(place.glob("*.safetensors")):
            try:
                file = read_latents(path, patch)
            except UNREADABLE:
                found.unread.append(path)
            else:
                if "lora_weight" not in file.words:  # images that are meant to differ from the target
                    files[path.stem] = file
        return files

    steps = _steps(folder / VALIDATION)
    if not steps:
        return
    targets, controls = read(folder / VALIDATION / "target"), read(folder / VALIDATION / "controls")
    before = read(steps[0][1]) if steps[0][0] == 0 else {}
    found.trained = any(TRAINED in target.words for target in targets.values())
    references = [*targets.values(), *controls.values()] or list(read(steps[0][1]).values())
    if not references:
        return
    distance = Distance([image for file in references for image in file.images])
    likeness = _likeness(folder / VALIDATION / LIKENESS_NAME, found)
    for step, place in steps:
        images, table = read(place) if step else before, defaultdict[str, dict[str, float]](dict)
        for key, file in images.items():
            for name, value in _scores_of(file, distance, *(each.get(key) for each in (targets, controls, before))):
                table[name][key] = value
            for name, value in likeness.get((f"{place.name}/{key}", file.file_hash), {}).items():
                table[name][key] = value
        for name, values in table.items():
            yield step, name, "image", values
        if seeds := _between_seeds(distance, images, controls):
            yield step, SEEDS, "prompt", seeds


def _scores_of(
    file: Latents, distance: Distance, target: Latents | None, control: Latents | None, before: Latents | None
) -> Iterator[tuple[str, float]]:
    """The scores of the images of one sample, each the mean over its values of the guidance."""
    mask = target.edit_mask if target else None
    if target and TRAINED not in target.words:
        if whole := distance.of_each(file.images, target.images[0]):
            yield TARGET, sum(whole) / 2
            yield "colour, to target", whole[0]
            yield "edges, to target", whole[1]
        if mask is not None and (inside := distance.of_each(file.images, target.images[0], mask)):
            yield "colour inside the mask, to target", inside[0]
            yield "edges inside the mask, to target", inside[1]
    if control and mask is not None and (outside := distance.of_each(file.images, control.images[0], 1 - mask)):
        yield "colour outside the mask, to control", outside[0]
        yield "edges outside the mask, to control", outside[1]
    pairs = zip(file.images, before.images if before else [], strict=False)
    if drift := [sum(distance(*pair)) / 2 for pair in pairs if _fit(*pair)]:
        yield DRIFT, float(np.mean(drift))


def _likeness(path: Path, found: Scores) -> dict[tuple[str, str], dict[str, float]]:
    """The scores of `best --likeness` by image and hash of its latents, so that those of other images do not count."""
    names = {"target": LIKENESS, "training": LIKENESS_TO_ALL}
    try:
        if not path.exists():
            return {}
        about = parse_json(read_file(path))
        likeness = {
            (image, entry["latents"]): {name: _similarity(entry[key]) for key, name in names.items() if key in entry}
            for image, entry in about["images"].items()
        }
        model, targets = plain(str(about["model"])), int(about["training_targets"])
    except (*UNREADABLE, AttributeError):
        found.unread.append(path)
        return {}
    scored = {name for scores in likeness.values() for name in scores}
    to = [f"the mean of {plural(targets, 'training target')}"] * (LIKENESS_TO_ALL in scored)
    to = ["its held-out target"] * (LIKENESS in scored) + to
    found.likeness = (
        f"Likeness is the cosine similarity of an image, embedded by {model}, to {' or else to '.join(to)}."
    )
    if LIKENESS_TO_ALL in scored:
        found.likeness += " A LoRA that overfits comes closer to that mean too, so it decides nothing."
    return likeness


def _similarity(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1 + 1e-5:
        raise ValueError("not a cosine similarity")
    return float(value)


def _between_seeds(
    distance: Distance, images: Mapping[str, Latents], controls: Mapping[str, Latents]
) -> dict[str, float]:
    """The mean distance between the images of a prompt and its controls from several seeds."""
    similar: dict[tuple[str, str], list[Latents]] = defaultdict(list)
    for key, file in images.items():
        similar[file.words.get("prompt", ""), controls[key].digest if key in controls else ""].append(file)
    found = {}
    for group, files in similar.items():
        pairs = [pair for a, b in combinations(files, 2) for pair in zip(a.images, b.images, strict=False)]
        if apart := [sum(distance(*pair)) / 2 for pair in pairs if _fit(*pair)]:
            found["\0".join(group)] = float(np.mean(apart))
    return found


def _fit(a: Image, b: Image) -> bool:
    return a.shape == b.shape


class Distance:
    """Colour and edges of differences, in units in which each channel of `references` has variance 1 at each scale."""

    def __init__(self, references: Sequence[Image]) -> None:
        self.units: dict[int, tuple[Image, Image]] = {}
        for scale in SCALES:
            pooled = [it for image in references if (it := _pooled(image, scale)) is not None]
            if pooled:
                centred = [it - it.mean(axis=(1, 2), keepdims=True) for it in pooled]
                self.units[scale] = _deviations(centred), _deviations([edge for it in pooled for edge in _edges(it)])

    def of_each(self, images: Iterable[Image], other: Image, weights: Weights | None = None) -> list[float]:
        """Mean colour and edges over images, to one of the same size; [] if none has it, or all weights are 0."""
        if weights is not None and (not weights.sum() or weights.shape != other.shape[1:]):
            return []
        apart = [self(image, other, weights) for image in images if _fit(image, other)]
        return np.mean(apart, axis=0).tolist() if apart else []

    def __call__(self, a: Image, b: Image, weights: Weights | None = None) -> tuple[float, float]:
        """Colour and edges of `a - b`: averages and gradients are linear, so that the difference suffices."""
        difference, weights = a - b, np.ones(a.shape[1:], np.float32) if weights is None else weights
        colours, edges = list[float](), list[float]()
        for scale, (unit, edge_unit) in self.units.items():
            pooled, weight = _pooled(difference, scale), _pooled(weights[None], scale)
            if pooled is None or weight is None or not weight.sum():
                continue
            colours.append(_mean_square(pooled / unit, weight[0]))
            at = zip(_edges(pooled), _edge_weights(weight[0]), strict=True)
            edges += [_mean_square(edge / edge_unit, each) for edge, each in at if each.sum()]
        return _root_mean(colours), _root_mean(edges)


def _pooled(image: Image, scale: int) -> Image | None:
    """The means of squares of `scale`×`scale`, without what is left at the borders; None if nothing else is there."""
    channels, h, w = (image.shape[0], *(side // scale for side in image.shape[1:]))
    if h < 2 or w < 2:
        return None
    means: Image = image[:, : h * scale, : w * scale].reshape(channels, h, scale, w, scale).mean(axis=(2, 4))
    return means


def _edges(image: Image) -> tuple[Image, Image]:
    """The gradients along both sides."""
    return np.diff(image, axis=1), np.diff(image, axis=2)


def _edge_weights(weights: Weights) -> tuple[Weights, Weights]:
    """A gradient counts as the lesser of the two latents that it is between."""
    return np.minimum(weights[1:], weights[:-1]), np.minimum(weights[:, 1:], weights[:, :-1])


def _deviations(images: Sequence[Image]) -> Image:
    """`[c, 1, 1]`: the root mean square of each channel; 1 for a channel that is 0."""
    square = np.mean([np.square(image).mean(axis=(1, 2)) for image in images], axis=0)
    return np.sqrt(np.where(square > 0, square, 1)).astype(np.float32)[:, None, None]


def _root_mean(squares: Sequence[float]) -> float:
    return math.sqrt(sum(squares) / len(squares)) if squares else 0.0


def _mean_square(values: Image, weights: Weights) -> float:
    return float((np.square(values).mean(axis=0) * weights).sum() / weights.sum())


# ---- files -----------------------------------------------------------------------------------------------------------


def read_latents(path: Path, patch: int) -> Latents:
    """The images of a file of latents, tokens of `patch`×`patch`; raises one of `UNREADABLE`."""
    check_safetensors(path, TrainError)
    data = read_file(path)
    tensors = {name: _array(value) for name, value in deserialize(data)}  # type: ignore[no-untyped-call]
    words = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    shapes, tokens = json.loads(words["img_shapes"]), tensors["latents"]
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    if ends[-1] != len(tokens) or tokens.shape[1:] != (LATENT_CHANNELS,):
        raise ValueError(f"{tokens.shape} is not the shape of latents of {shapes}")
    parts = [tokens[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    images = [_unpacked(part, h, w, patch) for part, (_, h, w) in zip(parts, shapes, strict=True)]
    mask = tensors.get(EDIT_MASK)
    _, h, w = shapes[0]
    edit_mask = None if mask is None else mask.reshape(h, w).repeat(patch, 0).repeat(patch, 1)
    return Latents(images, words, edit_mask, xxhash.xxh3_64_hexdigest(data))


def _array(tensor: Mapping[str, Any]) -> NDArray[np.float32]:
    return np.frombuffer(tensor["data"], NUMPY_DTYPES[tensor["dtype"]]).reshape(tensor["shape"]).astype(np.float32)


def _unpacked(tokens: NDArray[np.float32], h: int, w: int, patch: int) -> Image:
    """`[c, patch·h, patch·w]`; within a token the order is channel, row, column."""
    channels = tokens.shape[1] // patch**2
    patches = tokens.reshape(h, w, channels, patch, patch).transpose(2, 0, 3, 1, 4)
    return patches.reshape(channels, h * patch, w * patch)


def _patch(folder: Path) -> int:
    """The side of a token in latents, by the run's pipeline."""
    try:
        name = str(parse_json(read_file(folder / RUN_FACTS_NAME))["pipeline"]).partition(" and ")[0]
    except (*UNREADABLE, AttributeError):
        name = ""
    family = family_of(name) if name in PIPELINES else QWEN_IMAGE
    return math.isqrt(LATENT_CHANNELS // family.latent_channels)
