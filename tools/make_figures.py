"""Draw the figures of docs/ from the code's own functions: docs/pairs.svg, memory.svg, noise.svg, batches.svg and
machines.svg.

    python tools/make_figures.py [NAME ...]

Photographs come with the installed scikit-image, as in make_demo_data.py. Figures are 560 px wide, with letters that
can still be read at the width of a phone, on a white ground for light and dark pages.
"""

from __future__ import annotations

import argparse
import base64
import io
from collections.abc import Callable
from html import escape
from pathlib import Path

import numpy as np
import torch
from bench_batches import wide_mixture
from fit_table import GB, TRANSFORMERS, edit
from make_demo_data import coffee_blue_cup, photograph
from PIL import Image

from qwen_cache.batching import BatchPlan
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.flow import Density, NoiseSchedule, interpolate, sample_u
from qwen_train.memory.prediction import predict_memory

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, EDGE, LETTERS = 560, 12, 17
INK, FAINT, GROUND, LIMIT = "#222222", "#d0d0d0", "#ffffff", "#b00020"
COLOURS = ("#33608c", "#e08a1e", "#4f9d69", "#9a9a9a")
GOOD, BAD = "#1b7f3b", LIMIT


class Drawing:
    """An SVG of `WIDTH` pixels and a height, written from top to bottom."""

    def __init__(self, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="Arial, Helvetica, sans-serif" font-size="{LETTERS}">',
            f"<title>{escape(title)}</title>",
        ]
        self.names: dict[str, str] = {}
        self.box(0, 0, WIDTH, height, GROUND)

    def box(self, x: float, y: float, width: float, height: float, fill: str, line: str = "none") -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}" stroke="{line}"/>'
        )

    def text(self, x: float, y: float, words: str, fill: str = INK, anchor: str = "start", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def line(self, points: list[tuple[float, float]], colour: str = INK, width: float = 2, dashes: str = "") -> None:
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>')

    def arrow(self, begin: tuple[float, float], end: tuple[float, float], both: bool = False) -> None:
        self.line([begin, end])
        for (x, y), (from_x, from_y) in ((end, begin), (begin, end))[: 1 + both]:
            length = float(np.hypot(x - from_x, y - from_y))
            along_x, along_y = 8 * (x - from_x) / length, 8 * (y - from_y) / length
            wings = [(x - along_x + side * along_y / 2, y - along_y - side * along_x / 2) for side in (-1, 1)]
            self.line([wings[0], (x, y), wings[1]])

    def image(self, x: float, y: float, width: float, height: float, image: Image.Image) -> None:
        """A photograph, whose bytes are written once however often it is shown."""
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=60)
        data = base64.b64encode(buffer.getvalue()).decode()
        if data not in self.names:
            self.names[data] = f"image{len(self.names)}"
            size = f'width="{width}" height="{height}"'
            href = f"data:image/jpeg;base64,{data}"
            self.parts.append(f'<defs><image id="{self.names[data]}" {size} href="{href}"/></defs>')
        self.parts.append(f'<use href="#{self.names[data]}" x="{x:.1f}" y="{y:.1f}"/>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


# ---- pairs -----------------------------------------------------------------------------------------------------------


def pairs() -> str:
    """One edit of a photograph, good, and with the faults of bad pairs."""
    sample = coffee_blue_cup()
    before, after = sample.controls[0].image.convert("RGB"), sample.target.image.convert("RGB")
    red, green, blue = before.split()
    everywhere = Image.merge("RGB", (blue, green, red))
    frame, moved, near = (0, 0, 510, 340), (90, 60, 600, 400), (120, 20, 420, 220)
    prompt = "“make the cup blue”"
    cells = (
        ("good: the cup alone differs", prompt, (after, frame), GOOD),
        ("bad: shifted", prompt, (after, moved), BAD),
        ("bad: another crop", prompt, (after, near), BAD),
        ("bad: not edited", prompt, (before, frame), BAD),
        ("bad: edited everywhere", prompt, (everywhere, frame), BAD),
        ("bad: prompt of another edit", "“remove the spoon”", (after, frame), BAD),
    )
    side, tall, row = 130, 87, 150
    drawing = Drawing(row * 3 + 4, "Pairs of control and target, good and bad")
    for number, (caption, words, (target, part), colour) in enumerate(cells):
        x, y = EDGE + number % 2 * (WIDTH / 2), EDGE + number // 2 * row
        for place, image, box in ((x, before, frame), (x + side + 4, target, part)):
            drawing.image(place, y, side, tall, image.crop(box).resize((2 * side, 2 * tall)))
        drawing.text(x, y + tall + 20, caption, colour, bold=True)
        drawing.text(x, y + tall + 41, words)
    return drawing.svg()


# ---- memory ----------------------------------------------------------------------------------------------------------

MODEL = "Qwen-Image-Edit-2509"
SETTINGS = ("", "train.offload_blocks=40", "model.quantization=nf4", "train.offload_blocks=60")
PARTS = ("frozen weights", "trained weights, gradients, optimizer", "activations", "reserved by the driver and torch")
CARD, MOST = 24, 50
"""GB: of the line, and at the right edge."""


def memory_by_part(settings: str) -> tuple[int, int, int, int]:
    """The bytes of `PARTS`, for one edit of 1024² with one control."""
    config = load_config(None, ["train.layout=packed", *settings.split()])
    of = predict_memory(TRANSFORMERS[MODEL], config, [edit(MODEL)], "accelerator")
    return of.weights, of.trained + of.gradients + of.optimizer + of.average, of.activations, of.reserved


def memory() -> str:
    top, row = 116, 62
    scale = (WIDTH - 2 * EDGE) / MOST
    bottom = top + row * len(SETTINGS)
    drawing = Drawing(bottom + 30, f"GPU memory of {MODEL} by part, 1024² with one control")
    for number, (part, colour) in enumerate(zip(PARTS, COLOURS, strict=True)):
        drawing.box(EDGE, 10 + 25 * number, 15, 15, colour)
        drawing.text(EDGE + 24, 23 + 25 * number, part)
    for amount in range(0, MOST + 1, 10):
        x = EDGE + scale * amount
        drawing.line([(x, top), (x, bottom)], FAINT, 1)
        anchor = "start" if not amount else "end" if amount == MOST else "middle"
        drawing.text(x, bottom + 20, f"{amount} GB" if amount == MOST else str(amount), anchor=anchor)
    for number, settings in enumerate(SETTINGS):
        y, x = top + row * number, float(EDGE)
        sizes = memory_by_part(settings)
        drawing.text(x + 2, y + 22, settings or "defaults")
        drawing.text(WIDTH - EDGE, y + 22, f"{sum(sizes) / GB:.1f} GB", anchor="end", bold=True)
        for size, colour in zip(sizes, COLOURS, strict=True):
            drawing.box(x, y + 30, scale * size / GB, 24, colour)
            x += scale * size / GB
    x = EDGE + scale * CARD
    drawing.line([(x, top), (x, bottom)], LIMIT, 2, "6 4")
    drawing.text(x + 6, top + 14, f"{CARD} GB", LIMIT)
    return drawing.svg()


# ---- noise -----------------------------------------------------------------------------------------------------------

TOKENS = 64 * 64
"""Tokens of a target of 1024²."""
BINS, SAMPLES = 40, 1_000_000
PIXELS = 150
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


def density(sampling: Density, schedule: NoiseSchedule) -> list[float]:
    """The density of sigma in `BINS` equal parts of [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    sigmas = [schedule.sigma(sample_u(generator, sampling), TOKENS) for _ in range(SAMPLES)]
    counts, _ = np.histogram(sigmas, BINS, (0, 1))
    return [float(count) * BINS / SAMPLES for count in counts]


def noisy(image: Image.Image, sigma: float) -> Image.Image:
    """The image with noise as a latent gets it, but in pixels."""
    pixels = torch.from_numpy(np.asarray(image.convert("RGB"), dtype=np.float32).reshape(1, -1, 3)) / 127.5 - 1
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0))
    is_target = torch.ones(pixels.shape[:2], dtype=torch.bool)
    mixed = interpolate(2 * pixels, noise, torch.tensor([sigma]), is_target) / 2  # latents vary by about 1
    array = ((mixed.reshape(image.height, image.width, 3).clamp(-1, 1) + 1) * 127.5).byte().numpy()
    return Image.fromarray(array)


def noise() -> str:
    own, none = NoiseSchedule(), NoiseSchedule(shift=1, shift_terminal=None)
    curves: tuple[tuple[str, Density, NoiseSchedule, str], ...] = (
        ("logit_normal, the model's shift at 1024² (default)", "logit_normal", own, ""),
        ("logit_normal, shift 1", "logit_normal", none, "2 4"),
        ("uniform, the model's shift at 1024²", "uniform", own, ""),
        ("uniform, shift 1", "uniform", none, "8 4"),
    )
    top, bottom, most = 118, 290, 2.2
    across, up = (WIDTH - 2 * EDGE), (bottom - top) / most
    drawing = Drawing(bottom + 214, "How often each noise level is trained, and a photograph at five of them")
    for number, (name, sampling, schedule, dashes) in enumerate(curves):
        y, colour = 20 + 25 * number, COLOURS[number]
        drawing.line([(EDGE, y - 5), (EDGE + 34, y - 5)], colour, 3, dashes)
        drawing.text(EDGE + 44, y, name)
        heights = density(sampling, schedule)
        points = [(EDGE + across * (i + 0.5) / BINS, bottom - up * height) for i, height in enumerate(heights)]
        drawing.line(points, colour, 3, dashes)
    drawing.line([(EDGE, bottom), (WIDTH - EDGE, bottom)], INK, 1)
    for timestep in range(0, 1001, 250):
        anchor = "start" if not timestep else "end" if timestep == 1000 else "middle"
        drawing.text(
            EDGE + across * timestep / 1000, bottom + 20, str(timestep) if timestep else "timestep 0", anchor=anchor
        )
    side, y = 100, bottom + 66
    drawing.text(EDGE, y - 14, "details are decided here")
    drawing.text(WIDTH - EDGE, y - 14, "the composition here", anchor="end")
    cat = photograph("chelsea.png").crop((90, 10, 370, 290)).resize((PIXELS, PIXELS))
    for number, level in enumerate(LEVELS):
        x = EDGE + number * (across - side) / (len(LEVELS) - 1)
        drawing.image(x, y, side, side, noisy(cat, level))
        drawing.text(x + side / 2, y + side + 22, f"{1000 * level:.0f}", anchor="middle")
    return drawing.svg()


# ---- batches ---------------------------------------------------------------------------------------------------------

ROWS = 8


def padding(lengths: list[int]) -> float:
    """The part of a padded batch that is padding."""
    return 1 - sum(lengths) / (len(lengths) * max(lengths))


def lengths_of_batches(window: int) -> list[list[int]]:
    """The tokens of the samples of some batches of the wide mixture of sizes."""
    tokens = wide_mixture(8192)
    plan = BatchPlan(tokens, TrainConfig(batch_size=ROWS, bucketing_window=window))
    each = tokens.sum(0)
    return [[int(each[plan.sample(i)]) for i in plan.batch(ROWS * number)] for number in range(100)]


def typical(batches: list[list[int]]) -> list[int]:
    """The batch of median padding."""
    return sorted(batches, key=padding)[len(batches) // 2]


def batches() -> str:
    random, similar = typical(lengths_of_batches(1)), typical(lengths_of_batches(TrainConfig().bucketing_window))
    row, gap, top = 16, 3, 34
    block = ROWS * (row + gap)
    full, scale = WIDTH - 2 * EDGE, (WIDTH - 2 * EDGE) / max(random)
    lines = -(-sum(random) // max(random))
    drawing = Drawing(3 * top + 2 * (block + 14) + lines * (row + gap) + 10, "A batch padded, and packed")
    y = 0
    for name, lengths in (("Padded, a random batch", random), ("Padded, samples of similar length", similar)):
        drawing.text(EDGE, y + 24, f"{name}: {100 * padding(lengths):.0f} % is padding")
        wide = full / max(lengths)
        for number, length in enumerate(lengths):
            place = y + top + number * (row + gap)
            drawing.box(EDGE, place, full, row, FAINT)
            drawing.box(EDGE, place, wide * length, row, COLOURS[number % 2])
        y += top + block + 14
    drawing.text(EDGE, y + 24, "Packed, the random batch in one row (wrapped here): 0 %")
    position = 0
    for number, length in enumerate(random):
        left = length
        while left:
            line, begin = divmod(position, max(random))
            part = min(left, max(random) - begin)
            place = y + top + line * (row + gap)
            drawing.box(EDGE + scale * begin, place, scale * part - 1, row, COLOURS[number % 2])
            position, left = position + part, left - part
    return drawing.svg()


# ---- machines --------------------------------------------------------------------------------------------------------


def machines() -> str:
    half, tall = WIDTH / 2, 206
    drawing = Drawing(2 * tall, "Four ways to encode on more GPUs")

    def node(x: float, y: float, words: str, width: float = 70, colour: str = COLOURS[0]) -> None:
        drawing.box(x, y, width, 32, colour)
        drawing.text(x + width / 2, y + 22, words, "#ffffff", "middle")

    def title(column: int, row: int, words: str, command: str) -> tuple[float, float]:
        x, y = EDGE + column * half, row * tall
        drawing.text(x, y + 26, words, bold=True)
        drawing.text(x, y + 48, command)
        return x, y + 62

    orange, green = "#a85f06", "#2f7048"
    x, y = title(0, 0, "One machine", "build")
    drawing.box(x, y, 240, 60, GROUND, INK)
    node(x + 10, y + 14, "VAE, GPU 0", 105)
    node(x + 125, y + 14, "text, GPU 1", 105)
    drawing.arrow((x + 120, y + 60), (x + 120, y + 96))
    node(x + 80, y + 98, "cache", 80, green)

    x, y = title(1, 0, "Jobs, one bucket", "build --slice 2/3 --out s3://…")
    for number in range(3):
        node(x + 84 * number, y + 14, f"job {number + 1}")
        drawing.arrow((x + 84 * number + 35, y + 46), (x + 95 + 24 * number, y + 96))
    node(x + 74, y + 98, "bucket", 90, green)

    x, y = title(0, 1, "Ray", "build --ray auto")
    node(x, y + 44, "you", 50, orange)
    node(x + 194, y + 44, "cache", 66, green)
    for number in range(3):
        place = y + 46 * number - 2
        node(x + 86, place, f"node {number + 1}")
        drawing.arrow((x + 50, y + 50 + 10 * number), (x + 84, place + 16))
        drawing.arrow((x + 156, place + 16), (x + 192, y + 50 + 10 * number))

    x, y = title(1, 1, "A server for a team", "build --at, run --encode-at")
    for number, name in enumerate(("laptop", "laptop", "trainer")):
        place = y + 46 * number - 2
        node(x, place, name, 72, orange)
        drawing.arrow((x + 72, place + 16), (x + 128, y + 50 + 10 * number), both=True)
    node(x + 130, y + 44, "serve, GPU", 100)
    drawing.arrow((x + 180, y + 76), (x + 180, y + 96))
    node(x + 145, y + 98, "cache", 70, green)
    return drawing.svg()


FIGURES: dict[str, Callable[[], str]] = {each.__name__: each for each in (pairs, memory, noise, batches, machines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FIGURES)}; default: all")
    for name in parser.parse_args().names or FIGURES:
        (DOCS / f"{name}.svg").write_text(FIGURES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
