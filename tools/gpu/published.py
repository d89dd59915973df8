"""Training steps of other trainers' published figures, with the same settings, by the name of who published them.

Listed are figures of these models whose resolution and kind of weights are given. What they leave open, such as the
length of the text, is assumed; their gigabytes are what they say, which may be all that a process took from the card.
The steps of VeOmni, DiffSynth-Studio and Fizgig include the encoders; ours has its embeddings from a cache. Blocks
are compiled where a compiler is found, as `qwen-train run` does by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from qwen_train.model.compilation import has_compiler

from .measure import SIMULATED, Card, Cases, Row
from .steps import COMPILED, FP8, INT8, Images, Step, measure


@dataclass(frozen=True)
class Figure:
    """A published figure: by whom and where, on which card, the seconds of a step, and gigabytes."""

    by: str
    card: str
    seconds: float | None = None
    gigabytes: float | None = None


@dataclass(frozen=True)
class Comparison:
    """A step, and what was published for these settings."""

    step: Step
    figures: Sequence[Figure]
    is_compiled: bool = True


SIMPLETUNER = "SimpleTuner, SEGMENTED_CHECKPOINTING.md at bc8e6ab"
SIMPLETUNER_21 = "SimpleTuner, examples of Qwen-Image-2.1"
VEOMNI, QFLUX = "VeOmni, documentation", "qflux, README"
MUSUBI = "musubi-tuner, docs/qwen_image.md"
DIFFSYNTH, FIZGIG = "DiffSynth-Studio #1704, a user", "Fizgig, documentation"
H100, L40S, A100, A800, RTX_5090 = "H100", "L40S", "A100", "A800", "RTX 5090"
ANY_CARD = "no card named"
TEXT = 250
"""Text tokens of an image's description: an assumption."""
EAGER = "train.compile=false"
NOTHING_RECOMPUTED = "train.gradient_checkpointing=false"


def of_text(name: str, side: int, *settings: str, family: str = "20b") -> Step:
    """Text to image, one sample."""
    return Step(name, settings, (((side, side),),), family, TEXT)


def square(side: int) -> Images:
    """An edit with one control."""
    return (side, side), (side, side)


COMPARISONS = [
    Comparison(
        of_text("Qwen-Image, 1024²", 1024),
        [
            Figure(SIMPLETUNER, H100, 1.202, 41.0),
            Figure(SIMPLETUNER, L40S, 3.377, 41.0),
            Figure(MUSUBI, ANY_CARD, None, 42),
        ],
    ),
    Comparison(
        of_text("Qwen-Image, 1024², eager", 1024, EAGER),
        [Figure(SIMPLETUNER, H100, 1.202, 41.0), Figure(SIMPLETUNER, L40S, 3.377, 41.0)],
        is_compiled=False,
    ),
    Comparison(
        of_text("Qwen-Image-2.1, 1024²", 1024, family="2.1"),
        [Figure(VEOMNI, A800, 1.51, 33.1)],
    ),
    Comparison(
        Step("Qwen-Image-2.1, edit, 1024²", samples=(square(1024),), family="2.1"),
        [Figure(DIFFSYNTH, H100, 26.5, 38)],
    ),
    Comparison(
        of_text("Qwen-Image, 1024², fp8", 1024, FP8),
        [
            Figure(f"{SIMPLETUNER}, fp8-torchao", H100, 3.088, 25.3),
            Figure(f"{SIMPLETUNER}, fp8-torchao", L40S, 6.172, 25.3),
            Figure(f"{MUSUBI}, fp8", ANY_CARD, None, 30),
        ],
    ),
    Comparison(
        of_text("Qwen-Image, 1024², int8", 1024, INT8),
        [Figure(f"{SIMPLETUNER}, int8-sdnq", H100, 2.640, 24.1)],
    ),
    Comparison(
        of_text("Qwen-Image, 1024², int8, nothing recomputed", 1024, INT8, NOTHING_RECOMPUTED),
        [Figure(f"{SIMPLETUNER}, int8-sdnq", H100, 1.675, 63.5)],
    ),
    Comparison(
        Step("Qwen-Image-Edit-2509, 832 × 576, two samples", samples=(((832, 576), (832, 576)),) * 2),
        [Figure(QFLUX, A100, 3.8, 43)],
    ),
    Comparison(
        of_text("Qwen-Image-2.1, 512²", 512, family="2.1"),
        [Figure(VEOMNI, A800, 0.52, 31.4), Figure(SIMPLETUNER_21, L40S, None, 20.1)],
    ),
    Comparison(
        of_text("Qwen-Image-2.1, 1536²", 1536, family="2.1"),
        [Figure(VEOMNI, A800, 3.94, 36.0)],
    ),
    Comparison(
        of_text("Qwen-Image-2.1, 2048²", 2048, family="2.1"),
        [Figure(VEOMNI, A800, 7.95, 40.0)],
    ),
    Comparison(
        Step("Qwen-Image-2.1, edit, 768²", samples=(square(768),), family="2.1"),
        [Figure(f"{FIZGIG}, from minutes in all", RTX_5090, 2)],
    ),
    Comparison(
        of_text("Qwen-Image, 1024², fp8, 16 blocks offloaded", 1024, FP8, "train.offload_blocks=16"),
        [Figure(f"{MUSUBI}, fp8, 16 blocks swapped", ANY_CARD, None, 24)],
        is_compiled=False,
    ),
    Comparison(
        of_text("Qwen-Image, 1024², fp8, 45 blocks offloaded", 1024, FP8, "train.offload_blocks=45"),
        [Figure(f"{MUSUBI}, fp8, 45 blocks swapped", ANY_CARD, None, 12)],
        is_compiled=False,
    ),
]
"""In order of worth."""


def cases(part: str, card: Card) -> Cases:
    for each in COMPARISONS:
        yield each.step.name, partial(compare, each, card)


def compare(comparison: Comparison, card: Card) -> Row:
    """Our row, with the published figures, and how many times as fast as each on the same card ours is."""
    step = comparison.step
    if comparison.is_compiled and card.device.type != SIMULATED and has_compiler():
        step = replace(step, settings=(*step.settings, COMPILED))
    row = measure(step, card)
    return {**row, "published": [against(figure, row["seconds_whole"], card) for figure in comparison.figures]}


def against(figure: Figure, seconds: float, card: Card) -> dict[str, str | float | None]:
    """A figure, and how many times as fast ours is if it is of the same card."""
    times = figure.seconds / seconds if figure.seconds and figure.card in card.name else None
    return {**asdict(figure), "times_as_fast": times}
