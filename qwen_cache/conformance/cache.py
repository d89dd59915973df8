"""The promises of an embedding cache: what is trained belongs to the images and the prompt as they are now.

A cache adapter is a function `adapter(rows, folder) -> samples` that encodes rows with the trainer's own code and the
model of its choice, keeps its cache in `folder`, and returns for each row, in order, `image_latents`,
`control_latents`, `prompt_embeds` and, if it has them, `empty_prompt_embeds`: tensors without padding, of any shape.
That of a text-to-image model ignores controls and returns no `control_latents`; that of a model with one control fails
for two.
It is called several times with the same folder, and with changed files. Encoders and sizes may be small: values are
compared with those of other rows and of other calls (with a reference in `qwen_cache.conformance.values` alone).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

Samples = Sequence[Mapping[str, Tensor]]
SIZE = (160, 128)
CONTROLS = "control_latents"
NO_CONTROLS = "the adapter returns no control_latents"
NO_EMPTY_PROMPT = "the adapter returns no empty_prompt_embeds"
WORDS = 700
"""The words of a long prompt: more than the 512 tokens at which trainers have cut the instruction off."""
FEW_WORDS = 100
"""The words of one for text to image, whose pipeline uses 512 tokens; a tiny tokenizer has four for a word."""


@dataclass(frozen=True)
class Row:
    """An edit to encode: files of images, and the instruction."""

    name: str
    prompt: str
    target: Path
    controls: tuple[Path, ...]


Adapter = Callable[[Sequence[Row], Path], Samples]


class Workplace:
    """Images, and folders for caches, below a new folder."""

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.folder, self.adapter, self._caches = folder, adapter, 0

    def image(self, name: str, seed: int, *, detail: bool = False) -> Path:
        """A smooth random image under this name, with another detail if asked; an earlier one is replaced."""
        path = self.folder / "images" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        coarse = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8))
        pixels = np.array(coarse.resize(SIZE, Image.Resampling.BICUBIC))
        pixels[40:48, 40:48] = 255 - pixels[40:48, 40:48] if detail else pixels[40:48, 40:48]
        Image.fromarray(pixels).save(path, compress_level=1)
        return path

    def row(self, name: str, seed: int, prompt: str = "make it red", controls: int = 1) -> Row:
        """A row whose images are random and its own."""
        files = [self.image(f"{name}-control-{i}" if i else f"{name}-control", seed + 100 + i) for i in range(controls)]
        return Row(name, prompt, self.image(name, seed), tuple(files))

    def cache(self) -> Path:
        """A new folder for a cache."""
        self._caches += 1
        folder = self.folder / f"cache-{self._caches}"
        folder.mkdir()
        return folder

    def encode(self, *rows: Row, cache: Path | None = None) -> Samples:
        """The samples of the rows; by default in a new cache."""
        samples = self.adapter(rows, cache or self.cache())
        assert len(samples) == len(rows), f"{len(samples)} samples of {len(rows)} rows"
        return samples


def differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor], *names: str) -> bool:
    """True if any of these tensors differ by more than rounding."""
    return any(a[name].shape != b[name].shape or not _close(a[name], b[name]) for name in names)


def assert_same(found: Samples, expected: Samples, what: str) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        for name in ("image_latents", *([CONTROLS] if {CONTROLS} & {*a, *b} else []), "prompt_embeds"):
            assert not differ(a, b, name), f"{what}: {name} of row {i}"


def need_controls(sample: Mapping[str, Tensor]) -> None:
    """Skip what is about controls for an adapter of a text-to-image model."""
    if CONTROLS not in sample:
        pytest.skip(NO_CONTROLS)


def _close(a: Tensor, b: Tensor) -> bool:
    """Within the rounding of bfloat16 and of other batches."""
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= 0.02 * torch.maximum(a.norm(), b.norm()))


# ---- the promises ----------------------------------------------------------------------------------------------------


def same_twice(place: Workplace) -> None:
    """Two caches of the same rows are the same: latents are the mode of the posterior, not a sample of it."""
    rows = [place.row("a", 1), place.row("b", 2)]
    assert_same(place.encode(*rows), place.encode(*rows), "encoded again")


def own_embeddings(place: Workplace) -> None:
    """Rows with one prompt and other controls have other embeddings."""
    a, b = place.encode(place.row("a", 1), place.row("b", 2))
    need_controls(a)
    assert differ(a, b, "prompt_embeds"), "two rows share prompt_embeds, and differ in their controls"


def own_empty_prompt(place: Workplace) -> None:
    """The empty prompt is about the row's own images too."""
    a, b = place.encode(place.row("a", 1), place.row("b", 2))
    need_controls(a)
    if "empty_prompt_embeds" not in a:
        pytest.skip(NO_EMPTY_PROMPT)
    assert differ(a, b, "empty_prompt_embeds"), "two rows share empty_prompt_embeds, and differ in their controls"


def similar_images(place: Workplace) -> None:
    """Near-duplicates are not the same: a target may differ from another, or from its control, in a detail."""
    row, other = place.row("a", 1), place.row("b", 1)
    place.image("b", 1, detail=True)
    a, b = place.encode(row, other)
    assert bool((a["image_latents"].double() != b["image_latents"].double()).any()), "two targets share their latents"


def whole_prompt(place: Workplace) -> None:
    """The end of a long instruction is there."""
    row = place.row("a", 1)
    takes_controls = CONTROLS in place.encode(row)[0]
    words = " ".join(["really"] * (WORDS if takes_controls else FEW_WORDS))
    a, b = place.encode(replace(row, prompt=f"{words} red"), replace(row, name="b", prompt=f"{words} enormous"))
    rows = min(len(a["prompt_embeds"]), len(b["prompt_embeds"]), 8)
    tail, other = ({"tail": each["prompt_embeds"][-rows:]} for each in (a, b))
    assert a["prompt_embeds"].shape != b["prompt_embeds"].shape or differ(tail, other, "tail"), "the last word is lost"


def order_of_controls(place: Workplace) -> None:
    """The first control is the first, in latents and embeddings."""
    need_controls(place.encode(place.row("a", 1))[0])
    row = place.row("a", 1, controls=2)
    try:
        place.encode(row)
    except Exception as error:  # noqa: BLE001 (an adapter fails with its own errors)
        pytest.skip(f"the adapter takes no second control: {error}")
    a, b = place.encode(row, replace(row, name="b", controls=row.controls[::-1]))
    assert differ(a, b, "control_latents"), "exchanged controls have the same latents"
    assert differ(a, b, "prompt_embeds"), "exchanged controls have the same embeddings"


def names_with_one_prefix(place: Workplace) -> None:
    """1.png does not get the controls of 10.png and 11.png."""
    rows, alone = list[Row](), list[Mapping[str, Tensor]]()
    for name in ("1", "10", "11"):
        rows.append(place.row(name, 10 + int(name)))
        alone += place.encode(rows[-1])  # before there are images of the next one
    assert_same(place.encode(*rows), alone, "together and alone")


def changed_images(place: Workplace) -> None:
    """Other images under the same names are encoded again."""
    row, cache = place.row("a", 1), place.cache()
    place.encode(row, cache=cache)
    for path, seed in ((row.target, 7), *zip(row.controls, range(8, 20), strict=False)):
        place.image(path.stem, seed)
    assert_same(place.encode(row, cache=cache), place.encode(row), "after a change of the images")


def changed_prompt(place: Workplace) -> None:
    """Another prompt for the same images is encoded again."""
    row, cache = place.row("a", 1), place.cache()
    place.encode(row, cache=cache)
    changed = replace(row, prompt="remove the sky")
    assert_same(place.encode(changed, cache=cache), place.encode(changed), "after a change of the prompt")


def missing_control(place: Workplace) -> None:
    """A missing image is an error, not a row less or the image of a neighbour."""
    rows = [place.row(name, seed) for seed, name in enumerate("abc")]
    need_controls(place.encode(*rows)[0])  # what fails here is another fault
    rows[1].controls[0].unlink()
    try:
        place.encode(*rows)
    except Exception:  # noqa: BLE001 (any error will do)
        return
    raise AssertionError("a row without its control was encoded")


PROMISES: dict[str, Callable[[Workplace], None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        same_twice,
        own_embeddings,
        own_empty_prompt,
        similar_images,
        whole_prompt,
        order_of_controls,
        names_with_one_prefix,
        changed_images,
        changed_prompt,
        missing_control,
    )
}
