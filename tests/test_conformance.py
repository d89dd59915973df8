"""`qwen_cache.conformance`: our model and loader keep every promise; stock diffusers and planted faults do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.conformance import cache as caches
from qwen_cache.conformance import loader, model
from qwen_cache.format.identity import content_hash
from qwen_train import conformance
from qwen_train.model import transformer

from .support.caches import build
from .support.paths import ROOT
from .support.transformer_mutants import MASK_MUTANTS, ROPE_MUTANTS
from .support.waiting import HANG


def broken(promises: dict[str, Callable[..., None]], *arguments: Any) -> set[str]:
    """The promises that do not hold."""
    found = set()
    for name, promise in promises.items():
        try:
            promise(*arguments)
        except Exception:  # noqa: BLE001 (of the forward too, such as a mask that does not fit)
            found.add(name)
    return found


# ---- the model -------------------------------------------------------------------------------------------------------


def stock(model: Any) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Stock diffusers on the padded batch, with the mask of the text."""

    def forward(batch: dict[str, Any], *, masked: bool = True) -> torch.Tensor:
        velocity: torch.Tensor = model(
            hidden_states=batch["latents"],
            encoder_hidden_states=batch["prompt_embeds"],
            encoder_hidden_states_mask=batch["prompt_embeds_mask"] if masked else None,
            timestep=batch["sigma"],
            img_shapes=batch["img_shapes"],
            return_dict=False,
        )[0]
        return velocity

    return forward


def mask_lost(model: Any) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Ours, but with gradient checkpointing all tokens count as valid."""
    forward, is_checkpointed = conformance.padded(model), model.gradient_checkpointing

    def without_mask(batch: dict[str, Any]) -> torch.Tensor:
        if is_checkpointed:
            batch["prompt_embeds_mask"] = torch.ones_like(batch["prompt_embeds_mask"])
        return forward(batch)

    return without_mask


@pytest.mark.parametrize("layout", [conformance.padded, conformance.packed])
def test_our_model_keeps_every_promise(layout: model.Adapter) -> None:
    assert broken(model.PROMISES, layout) == set()


def test_stock_diffusers_is_right_for_equal_sizes_alone() -> None:
    mixed = {"image padding", "swapped sides", "larger control", "control counts"}
    assert broken(model.PROMISES, stock) == mixed | {"padding content", "gradient checkpointing", "zero cond t"}


def test_a_mask_that_checkpointing_loses_breaks_one_promise() -> None:
    assert broken(model.PROMISES, mask_lost) == {"gradient checkpointing"}


NOTICED = {
    "text start shared": "image padding",
    "text start from the target": "larger control",
    "no frame index": "one sample",
    "height and width swapped": "no control",
    "RoPE of the first sample": "swapped sides",
    "real text offset": "text padding",
    "image padding attended": "image padding",
    "text padding attended": "text padding",
    "control images modulated as targets": "zero cond t",
    "neighbour's target length": "zero cond t",
}
"""The promise that each fault breaks; some break others too."""


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("fault", NOTICED)
def test_a_planted_fault_breaks_its_promise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replacement = "rotary_embeddings", ROPE_MUTANTS.get(fault, (None, None))[1]
    if fault in MASK_MUTANTS:
        _, name, replacement = MASK_MUTANTS[fault]
    monkeypatch.setattr(transformer, name, replacement)
    with pytest.raises(AssertionError, match="is off by"):
        model.PROMISES[NOTICED[fault]](conformance.padded)


# ---- the loader ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader.write_cache(tmp_path_factory.mktemp("conformance") / "shards")


Change = Callable[[list[dict[str, Any]]], Iterable[dict[str, Any]]]


def all_but_the_last(batches: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    return batches[:-1]


def prompts_by_their_text(batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One tensor for each prompt: that of the last sample with it."""
    by_text = {batch["prompts"][0]: batch["prompt_embeds"] for batch in batches}
    for batch in batches:
        embeds = by_text[batch["prompts"][0]]
        mask = torch.ones(embeds.shape[:2], dtype=torch.bool)
        yield {**batch, "prompt_embeds": embeds, "prompt_embeds_mask": mask}


def controls_exchanged(batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        (target, *controls) = batch["img_shapes"][0]
        parts = list(torch.split(batch["latents"][0], [h * w for _, h, w in (target, *controls)]))
        yield {
            **batch,
            "latents": torch.cat([parts[0], *parts[:0:-1]])[None],
            "img_shapes": [[target, *controls[::-1]]],
        }


def in_float16(batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return ({**batch, "prompt_embeds": batch["prompt_embeds"].half()} for batch in batches)


def mask_too_short(batches: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        batch["prompt_embeds_mask"][:, -1] = False
        yield batch


FAULTS: dict[str, tuple[Change, set[str]]] = {
    "last batch dropped": (all_but_the_last, {"each sample once"}),
    "embeddings by prompt": (prompts_by_their_text, {"own prompt", "own empty prompt"}),
    "controls exchanged": (controls_exchanged, {"own images"}),
    "float16": (in_float16, {"no float16", "own prompt"}),
    "mask too short": (mask_too_short, {"own prompt", "own empty prompt"}),
}


def test_our_loader_keeps_every_promise(cache: Path) -> None:
    assert broken(loader.PROMISES, conformance.batches, cache) == set()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_loader_breaks_its_promises(fault: str, cache: Path) -> None:
    change, expected = FAULTS[fault]

    def adapter(folder: Path, caption_dropout: float) -> Iterable[dict[str, Any]]:
        from qwen_cache.torch import CacheBatches

        return change(list(CacheBatches(folder, caption_dropout=caption_dropout, epochs=1)))

    assert broken(loader.PROMISES, adapter, cache) == expected


def test_hashes_that_nobody_checks_and_dropout_that_is_ignored_are_noticed(cache: Path) -> None:
    def unchecked(folder: Path, caption_dropout: float) -> Iterable[dict[str, Any]]:
        return []

    def without_dropout(folder: Path, caption_dropout: float) -> Iterable[dict[str, Any]]:
        return conformance.batches(folder, 0.0)

    assert "damage is noticed" in broken(loader.PROMISES, unchecked, cache)
    assert broken(loader.PROMISES, without_dropout, cache) == {"own empty prompt"}


# ---- the cache -------------------------------------------------------------------------------------------------------


class Trainer:
    """A trainer whose encoders are hashes, with one fault; tensors are kept by a key, in memory and by folder."""

    def __init__(self, fault: str = "") -> None:
        self.fault, self.kept, self.calls = fault, dict[tuple[object, ...], torch.Tensor](), 0

    def __call__(self, rows: Sequence[caches.Row], folder: Path) -> list[dict[str, torch.Tensor]]:
        self.calls += 1
        if self.fault == "missing skipped":
            rows = [row if all(path.exists() for path in row.controls) else rows[0] for row in rows]
        return [self.sample(row, folder) for row in rows]

    def sample(self, row: caches.Row, folder: Path) -> dict[str, torch.Tensor]:
        controls = sorted(row.controls) if self.fault == "controls sorted" else list(row.controls)
        if self.fault == "prefix of the name":
            controls = sorted(row.target.parent.glob(f"{row.name}*-control.png"))
        images = "".join(map(self.content, controls))
        words = row.prompt.split()[: 512 if self.fault == "cut at 512" else None]
        keys = {
            "image_latents": self.content(row.target),
            "control_latents": images,
            "prompt_embeds": " ".join(words) + ("" if self.fault == "by prompt" else images),
            "empty_prompt_embeds": "" if self.fault == "one empty prompt" else images,
        }
        stale = {"by name": row.name, "by image": (row.name, self.content(row.target), images)}
        found = {}
        for name, key in keys.items():
            place = (folder, name, stale.get(self.fault, key))
            found[name] = self.kept.setdefault(place, self.encoded(name, key))
        return found

    def content(self, path: Path) -> str:
        """The identity of an image."""
        with Image.open(path) as image:
            small = image.resize((4, 4)).point(lambda value: value // 64)
            return str((small if self.fault == "thumbnail hash" else image).tobytes())

    def encoded(self, name: str, key: str) -> torch.Tensor:
        seed = int(content_hash(f"{name}{key}".encode())[:12], 16) + (self.calls if self.fault == "sampled" else 0)
        return torch.randn(24, 16, generator=torch.Generator().manual_seed(seed))


CACHE_FAULTS = {
    "sampled": {"same twice", "names with one prefix", "changed images", "changed prompt"},
    "by prompt": {"own embeddings", "order of controls"},
    "one empty prompt": {"own empty prompt"},
    "thumbnail hash": {"similar images"},
    "cut at 512": {"whole prompt"},
    "controls sorted": {"order of controls"},
    "prefix of the name": {"names with one prefix", "missing control"},
    "by name": {"changed images", "changed prompt"},
    "by image": {"changed prompt"},
    "missing skipped": {"missing control"},
}


def test_an_exact_cache_keeps_every_promise(tmp_path: Path) -> None:
    assert broken(caches.PROMISES, caches.Workplace(tmp_path / "work", Trainer())) == set()


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("fault", CACHE_FAULTS)
def test_a_fault_of_a_cache_breaks_its_promises(fault: str, tmp_path: Path) -> None:
    found = {
        name
        for name, promise in caches.PROMISES.items()
        if broken({name: promise}, caches.Workplace(tmp_path / name, Trainer(fault)))
    }
    assert found == CACHE_FAULTS[fault]


@pytest.mark.slow
def test_build_keeps_every_promise(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """With the tiny model, from a table of the rows."""

    def encode(rows: Sequence[caches.Row], folder: Path) -> list[Any]:
        table = folder / "rows.jsonl"
        lines = [
            {"id": row.name, "target": str(row.target), "control": [*map(str, row.controls)], "prompt": row.prompt}
            for row in rows
        ]
        table.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
        result = build(table, folder / "shards", tiny_model("edit-plus"))
        assert result.code == 0, result.stderr
        samples = {
            (s.prompt, s.row.meta.inputs.target, s.row.meta.inputs.controls): s for s in open_cache(folder / "shards")
        }
        return [samples[row.prompt, *_inputs(row)].tensors() for row in rows]

    assert broken(caches.PROMISES, caches.Workplace(tmp_path / "work", encode)) == set()


def _inputs(row: caches.Row) -> tuple[str, tuple[str, ...]]:
    target, *controls = (content_hash(path.read_bytes()) for path in (row.target, *row.controls))
    return target, tuple(controls)


# ---- as a user runs it -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_suite_prints_which_promises_hold(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--pyargs", "qwen_cache.conformance", "-p", "no:cacheprovider"]
    adapters = ["--model-adapter", "tests.test_conformance:stock"]
    done = subprocess.run(
        [*command, *adapters],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.partition("= conformance =")[2].splitlines()[1 : 1 + len(model.PROMISES)]
    table = {line[:24].strip(): line[24:].split()[0] for line in lines}
    assert table["one sample"] == "holds"
    assert table["swapped sides"] == "BROKEN"
    assert table.keys() == model.PROMISES.keys()
    assert f"{len(loader.PROMISES) + len(caches.PROMISES)} skipped" in done.stdout
