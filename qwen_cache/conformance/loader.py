"""The promises of a loader: batches of a cache are its samples, each once, nothing exchanged, rounded or shortened.

A loader adapter is a function `adapter(folder, caption_dropout) -> batches` that returns the batches of one epoch over
the cache in `folder`, in any order, as dictionaries like those of `qwen_cache.conformance.model`: `latents`
`[B, N, 64]`, `img_shapes`, `prompt_embeds` `[B, L, D]` and `prompt_embeds_mask` `[B, L]` (None: all rows are valid).
With `caption_dropout=1.0` every prompt is the empty one.

The cache has random tensors in bfloat16: images of several sizes, no, one and two controls, prompts that several
samples share, and values that float16 cannot hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_cache.extras import __version__
from qwen_cache.format import directory
from qwen_cache.format.cache import Sample, open_cache
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.manifest import DEFAULT_RECIPE
from qwen_cache.format.rows import ListedSample, ListedSamples
from qwen_cache.format.update import Existing, carry_out, open_staging, plan_update
from qwen_cache.trainers.convert import describe
from qwen_cache.trainers.files import ImportedSample

Adapter = Callable[[Path, float], Iterable[Mapping[str, Any]]]
WIDTH = 64
RECIPE = {"imported_from": "conformance", "pipeline": "QwenImageEditPlusPipeline", "dtype": "bfloat16"}
SIZES = (
    ((4, 6), (4, 6)),
    ((4, 6), (6, 4)),
    ((6, 4), (4, 6), (3, 5)),
    ((8, 10), (2, 2)),
    ((5, 5),),
)
PROMPTS = ("make it red", "make it red, and somewhat larger than it was", "remove the sky")
LARGE = 1e5
"""More than float16 holds."""


@dataclass(frozen=True)
class Row:
    """An unpadded row of a batch."""

    latents: Tensor
    img_shapes: list[tuple[int, ...]]
    prompt_embeds: Tensor


def write_cache(folder: Path) -> Path:
    """A small valid cache."""
    samples = [_random(i) for i in range(2 * len(SIZES) + 1)]
    described = [describe(sample, recipe_id(RECIPE), torch.bfloat16) for sample in samples]
    listed = ListedSamples.of(ListedSample(f"sample {i}", meta.key, 1) for i, (meta, _) in enumerate(described))
    by_key = {meta.key: (meta, data) for meta, data in described}
    with directory.writing(folder):
        update = plan_update(folder, Existing.empty(2), 2, listed)
        staging = open_staging(update, recipe_id(RECIPE), 1 << 30)
        written_by = {"qwen-cache": __version__}
        recipes = {DEFAULT_RECIPE: RECIPE}
        carry_out(update, staging, lambda key: staging.add(*by_key[key]), recipes, written_by, lambda _: None)
    return folder


def _random(number: int) -> ImportedSample:
    generator = torch.Generator().manual_seed(number)
    target, *controls = SIZES[number % len(SIZES)]
    prompt = PROMPTS[number % len(PROMPTS)]

    def tensor(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).bfloat16()

    prefix, own, empty = (
        tensor(3 + sum(h * w for h, w in controls), WIDTH),
        tensor(len(prompt), WIDTH),
        tensor(2, WIDTH),
    )
    own[0, 0] = LARGE
    tensors = {
        "image_latents": tensor(target[0] * target[1], 64),
        "prompt_embeds": torch.cat([prefix, own]),
        "empty_prompt_embeds": torch.cat([prefix, empty]),
    }
    if controls:
        tensors["control_latents"] = tensor(sum(h * w for h, w in controls), 64)
    return ImportedSample(prompt, tuple((1, h, w) for h, w in (target, *controls)), tensors)


def rows_of(batches: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The samples of the batches, without padding."""
    rows = []
    for batch in batches:
        mask = batch["prompt_embeds_mask"]
        for i, img_shapes in enumerate(batch["img_shapes"]):
            shapes = [tuple(int(side) for side in shape) for shape in img_shapes]
            tokens = sum(h * w for _, h, w in shapes)
            embeds = batch["prompt_embeds"][i]
            rows.append(Row(batch["latents"][i, :tokens], shapes, embeds if mask is None else embeds[mask[i].bool()]))
    return rows


def matched(rows: list[Row], folder: Path) -> list[tuple[Row, Sample]]:
    """Each row with the sample that has its target; AssertionError if there is none."""
    samples = list(open_cache(folder))
    pairs = []
    for row in rows:
        tokens = row.img_shapes[0][1] * row.img_shapes[0][2]
        found = [s for s in samples if torch.equal(s["image_latents"].float(), row.latents[:tokens].float())]
        assert len(found) == 1, f"the target of a row is that of {len(found)} samples of the cache, not of one"
        pairs.append((row, found[0]))
    return pairs


# ---- the promises ----------------------------------------------------------------------------------------------------


def each_sample_once(adapter: Adapter, folder: Path) -> None:
    """An epoch has every sample of the cache once, whatever its size and number of controls."""
    found = sorted(sample.name for _, sample in matched(rows_of(adapter(folder, 0.0)), folder))
    assert found == sorted(sample.name for sample in open_cache(folder))


def own_images(adapter: Adapter, folder: Path) -> None:
    """Each row has the sizes of its sample, and the controls after the target, in their order."""
    for row, sample in matched(rows_of(adapter(folder, 0.0)), folder):
        assert row.img_shapes == [tuple(shape) for shape in sample.img_shapes], sample.name
        names = ["image_latents", *(["control_latents"] if "control_latents" in sample else [])]
        expected = torch.cat([sample[name] for name in names])
        assert torch.equal(row.latents.float(), expected.float()), f"the latents of {sample.name}"


def own_prompt(adapter: Adapter, folder: Path) -> None:
    """Embeddings depend on the images: samples with one prompt have different ones. The mask keeps all of their rows,
    and no others."""
    for row, sample in matched(rows_of(adapter(folder, 0.0)), folder):
        expected = sample["prompt_embeds"]
        assert row.prompt_embeds.shape == expected.shape, f"the rows of prompt_embeds of {sample.name}"
        same = torch.equal(row.prompt_embeds.float()[:, 1:], expected.float()[:, 1:])
        assert same, f"prompt_embeds of {sample.name}"


def no_float16(adapter: Adapter, folder: Path) -> None:
    """Qwen2.5-VL's activations exceed 65504, the largest number of float16."""
    for row, sample in matched(rows_of(adapter(folder, 0.0)), folder):
        assert row.prompt_embeds.abs().max() == sample["prompt_embeds"].abs().max(), sample.name


def own_empty_prompt(adapter: Adapter, folder: Path) -> None:
    """A dropped caption is the empty prompt about the sample's own images, not zeros or one for all."""
    for row, sample in matched(rows_of(adapter(folder, 1.0)), folder):
        expected = sample["empty_prompt_embeds"]
        assert torch.equal(row.prompt_embeds.float(), expected.float()), f"the empty prompt of {sample.name}"


def damage_is_noticed(adapter: Adapter, folder: Path) -> None:
    """A changed bit of a tensor is an error, not an epoch of other values."""
    (shard,) = folder.glob("*.tar")
    row = open_cache(folder)[0].row
    place, whole = row.entry.data + 1, bytearray(shard.read_bytes())
    whole[place] ^= 1
    changed = shard.with_suffix(".changed")
    changed.write_bytes(whole)
    whole[place] ^= 1
    changed.replace(shard)
    try:
        for _ in adapter(folder, 0.0):
            pass
    except Exception:  # noqa: BLE001 (any error will do)
        return
    finally:
        changed.write_bytes(whole)
        changed.replace(shard)
    raise AssertionError("a changed bit was loaded without an error")


PROMISES: dict[str, Callable[[Adapter, Path], None]] = {
    check.__name__.replace("_", " "): check
    for check in (each_sample_once, own_images, own_prompt, no_float16, own_empty_prompt, damage_is_noticed)
}
