"""The joint rows of Qwen-Image-2.1: prefix parts, draws, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from qwen_cache.errors import TrainError
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_cache.models.devices import to_device
from qwen_train.model.attention import ModulationRows, Runs
from qwen_train.model.kernels import FLASH, Kernel
from qwen_train.model.segments import Segment, Segments, Span


@dataclass(frozen=True)
class JointSample:
    """The tokens of one sample, in the order of the row."""

    prefix: tuple[tuple[int, bool], ...]  # lengths, and whether they are of text
    target: int
    draws: int
    padding: int = 0

    @property
    def prefix_length(self) -> int:
        return sum(length for length, _ in self.prefix)

    @property
    def draw_tokens(self) -> int:
        """The tokens of all draws."""
        return self.draws * self.target

    @property
    def length(self) -> int:
        return self.prefix_length + self.draw_tokens + self.padding

    @cached_property
    def segments(self) -> list[Segment]:
        """The segments: of the prefix, then the draws, then padding."""
        ends = list(itertools.accumulate(length for length, _ in self.prefix))
        prefix = [
            Segment((end - length, end), is_text, ((0, end),))
            for end, (length, is_text) in zip(ends, self.prefix, strict=True)
        ]
        padding = Segment((self.length - self.padding, self.length), False, ())
        return [*prefix, *self.draw_segments, *([padding] if self.padding else [])]

    @cached_property
    def draw_segments(self) -> list[Segment]:
        begins = range(self.prefix_length, self.prefix_length + self.draw_tokens, self.target)
        spans = [(begin, begin + self.target) for begin in begins]
        before = (0, self.prefix_length)
        first = Segment(spans[0], False, ((0, spans[0][1]),))
        return [first, *(Segment(span, False, (before, span) if before[1] else (span,)) for span in spans[1:])]


def interleaved(images: ImgShapes, positions: Sequence[int], text_length: int) -> tuple[tuple[int, bool], ...]:
    """The prefix of a sample: its text, with each condition image after as many text rows as `positions` says."""
    bounds = [0, *positions, text_length]
    texts = [end - begin for begin, end in itertools.pairwise(bounds)]
    runs = [(texts[0], True)]
    for image, text in zip(images[:-1], texts[1:], strict=True):
        runs += [(math.prod(image), False), (text, True)]
    return tuple((length, is_text) for length, is_text in runs if length)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse_other_tokens(samples: Sequence[ImgShapes], draws: int, image_length: int) -> None:
    """Raise TrainError unless the longest sample fills `hidden_states`: else an image or a draw is missing."""
    counts = [token_count(images[:-1]) + draws * math.prod(images[-1]) for images in samples]
    if max(counts) != image_length:
        longest = counts.index(max(counts))
        raise TrainError(
            f"img_shapes, timestep and hidden_states disagree: the longest sample has the images "
            f"{list(samples[longest])}, the target last, with {draws} noise draws",
            where="hidden_states",
            expected=f"{max(counts)} image tokens",
            found=f"{image_length}",
            do="give every condition image, then the target once per column of timestep",
        )


def positions_per_sample(
    image_positions: Sequence[Sequence[int]] | None, samples: Sequence[ImgShapes], text_lengths: Sequence[int]
) -> list[list[int]]:
    """The checked positions of each sample's condition images; None is for batches without them."""
    if image_positions is None:
        image_positions = [()] * len(samples)
        if any(len(images) > 1 for images in samples):
            raise _misfit("there are condition images, so their positions are needed", "one list per sample", "None")
    if len(image_positions) != len(samples):
        raise _misfit(
            "one list of positions per sample is needed",
            f"{len(samples)} samples, as in hidden_states",
            f"{len(image_positions)}",
        )
    for i, (positions, images, text) in enumerate(zip(image_positions, samples, text_lengths, strict=True)):
        if len(positions) != len(images) - 1:
            raise _misfit(f"sample {i} needs one per condition image", f"{len(images) - 1}", f"{list(positions)}")
        if list(positions) != sorted(positions) or any(not 0 <= position <= text for position in positions):
            raise _misfit(
                f"sample {i} has images outside its text or out of order",
                f"numbers of text rows before each image, from 0 to {text}, none less than the one before",
                f"{list(positions)}",
            )
    return [list(positions) for positions in image_positions]


def _misfit(problem: str, expected: str, found: str) -> TrainError:
    return TrainError(
        problem,
        where="image_positions",
        expected=expected,
        found=found,
        do="give, per sample, the number of text rows before each condition image",
    )


# ---- calls of the variable-length kernel -----------------------------------------------------------------------------


@dataclass(frozen=True)
class VarlenCall:
    """Segments that one call of the kernel takes, with the bounds of their queries and keys on the device."""

    places: list[int]  # among all segments
    keys: list[tuple[int, Span]]  # samples, and tokens of them
    is_text: bool
    lengths: list[int]
    longest: tuple[int, int]
    bounds: tuple[Int[Tensor, " n+1"], Int[Tensor, " n+1"]]
    all_keys: bool
    """True if the keys are the whole row."""

    @classmethod
    def of(
        cls, segments: Sequence[tuple[int, int, Segment]], row_lengths: Sequence[int], device: torch.device
    ) -> VarlenCall:
        """From each segment with its place and its sample."""
        places, _, members = zip(*segments, strict=True)
        lengths = [segment.length for segment in members]
        key_lengths = [sum(end - begin for begin, end in segment.keys) for segment in members]
        keys = [(i, span) for _, i, segment in segments for span in segment.keys]
        bounds = [to_device(torch.tensor([0, *n]).cumsum(0).int(), device) for n in (lengths, key_lengths)]
        return cls(
            places=list(places),
            keys=keys,
            is_text=members[0].is_text,
            lengths=lengths,
            longest=(max(lengths), max(key_lengths)),
            bounds=(bounds[0], bounds[1]),
            all_keys=keys == [(i, (0, length)) for i, length in enumerate(row_lengths)],
        )


# ---- the row ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class JointRow:
    """The row of a batch. Indices are on the device; with `only_draws`, queries are the draws' tokens only."""

    samples: list[JointSample]
    text_from: Int[Tensor, " T"]  # in the flattened `[B * L]`
    text_to: Int[Tensor, " T"]  # in the row
    image_from: Int[Tensor, " N"]  # in the flattened `[B * S]`, with the draws
    image_to: Int[Tensor, " N"]
    draws_from: Int[Tensor, " Q"]  # of the draws alone, in the flattened `[B * S]`
    draws_to: Int[Tensor, " Q"]
    rows: ModulationRows  # row i·K + k of the timestep embedding for draw k of sample i, row B·K (t = 0) elsewhere
    draw_rows: ModulationRows
    block_mask: Any = None  # for the backend "flex"; and for the last block
    draws_block_mask: Any = None
    only_draws: bool = False
    attention: Segments | None = None  # of the queries, for compiled blocks and kernels but flash; for the last block
    draws_attention: Segments | None = None
    kernel: Kernel = FLASH

    @classmethod
    def of(
        cls,
        prefixes: Sequence[tuple[tuple[int, bool], ...]],
        targets: Sequence[int],
        draws: int,
        text_valid: Bool[Tensor, "B L"],
        image_length: int,
        device: torch.device,
        *,
        padded: bool,
        kernel: Kernel = FLASH,
    ) -> JointRow:
        """From the prefix and the target's tokens of each sample, `draws` for all."""
        samples = [JointSample(prefix, target, draws) for prefix, target in zip(prefixes, targets, strict=True)]
        if padded:
            longest = max(sample.length for sample in samples)
            samples = [JointSample(s.prefix, s.target, s.draws, longest - s.length) for s in samples]
        places: dict[str, list[Tensor]] = {"text": [], "image": [], "image_from": [], "draws": [], "draws_from": []}
        for i, (begin, sample) in enumerate(zip(offsets(samples), samples, strict=True)):
            for segment in sample.segments:
                if segment.keys:
                    span = torch.arange(begin + segment.span[0], begin + segment.span[1])
                    places["text" if segment.is_text else "image"].append(span)
            conditions = sum(length for length, is_text in sample.prefix if not is_text)
            tokens = torch.arange(i * image_length, i * image_length + conditions + sample.draw_tokens)
            places["image_from"].append(tokens)
            places["draws_from"].append(tokens[conditions:])
            places["draws"].append(begin + sample.prefix_length + torch.arange(sample.draw_tokens))
        at = {name: to_device(torch.cat([torch.arange(0), *spans]), device) for name, spans in places.items()}
        text_from = to_device(text_valid.flatten().nonzero()[:, 0], device)
        indices = (text_from, at["text"], at["image_from"], at["image"], at["draws_from"], at["draws"])
        rows, of_draws = (ModulationRows.of(make(samples), device) for make in (modulation_runs, draw_runs))
        row = cls(samples, *indices, rows, of_draws, kernel=kernel)
        of_last = replace(row, only_draws=True)
        return replace(row, attention=row.as_tensors(), draws_attention=of_last.as_tensors())

    @property
    def length(self) -> int:
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        return [sample.length for sample in self.samples]

    @cached_property
    def segments(self) -> list[list[Segment]]:
        """The segments of each sample whose queries are asked."""
        return [sample.draw_segments if self.only_draws else sample.segments for sample in self.samples]

    @property
    def query_lengths(self) -> list[int]:
        """The tokens of each sample that ask."""
        return [sample.draw_tokens if self.only_draws else sample.length for sample in self.samples]

    @cached_property
    def segment_lengths(self) -> list[int]:
        return [segment.length for segments in self.segments for segment in segments]

    @property
    def groups(self) -> list[list[tuple[int, int, Segment]]]:
        """The segments of each call of the kernel, with their place among all segments and their sample.

        Texts at the begin of a sample together, draws together, and each segment between alone: the keys that such a
        segment shares with others are a slice, which needs no copy.
        """
        placed = [(i, segment) for i, segments in enumerate(self.segments) for segment in segments]
        groups: dict[object, list[tuple[int, int, Segment]]] = {}
        for place, (i, segment) in enumerate(placed):
            if segment.keys:
                is_draw = segment.span[0] >= self.samples[i].prefix_length
                group = "draws" if is_draw else "texts" if segment.is_text and not segment.span[0] else place
                groups.setdefault(group, []).append((place, i, segment))
        return list(groups.values())

    @cached_property
    def varlen_calls(self) -> list[VarlenCall]:
        return [VarlenCall.of(group, self.lengths, self.text_to.device) for group in self.groups]

    def as_tensors(self) -> Segments:
        """The calls of the kernel for compiled blocks."""
        begins = list(offsets(self.samples))
        ends = list(itertools.accumulate(self.segment_lengths))
        calls = [
            [
                Segment((ends[place] - segment.length, ends[place]), segment.is_text, segment.moved(begins[i]).keys)
                for place, i, segment in group
            ]
            for group in self.groups
        ]
        return Segments.of(calls, self.text_to.device, self.kernel)

    @cached_property
    def text_masks(self) -> dict[Span, Bool[Tensor, "1 1 n keys"]]:
        """For text after an image, by its span: the keys before each row and its own."""
        spans = {s.span for segments in self.segments for s in segments if s.is_text and s.span[0]}
        options: dict[str, Any] = {"dtype": torch.bool, "device": self.text_to.device}
        return {(begin, end): torch.ones(end - begin, end, **options).tril_(begin)[None, None] for begin, end in spans}


def offsets(samples: Sequence[JointSample]) -> Iterator[int]:
    """The position in the row at which each sample begins."""
    return itertools.accumulate((sample.length for sample in samples[:-1]), initial=0)


def draw_runs(samples: Sequence[JointSample]) -> Runs:
    return [(s.target, i * s.draws + k) for i, s in enumerate(samples) for k in range(s.draws)]


def modulation_runs(samples: Sequence[JointSample]) -> Runs:
    """The runs of the whole row; neighbours with one timestep are one run."""
    draws = iter(draw_runs(samples))
    zero, runs = sum(sample.draws for sample in samples), []
    for sample in samples:
        runs += [(sample.prefix_length, zero), *itertools.islice(draws, sample.draws), (sample.padding, zero)]
    neighbours = itertools.groupby((run for run in runs if run[0]), key=lambda run: run[1])
    return [(sum(length for length, _ in group), row) for row, group in neighbours]
