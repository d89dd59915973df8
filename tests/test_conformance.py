"""`qwen_cache.conformance`: our model and loader keep every promise; stock diffusers and planted faults do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.conformance import cache as caches
from qwen_cache.conformance import loader, model, step, values
from qwen_cache.format.identity import content_hash
from qwen_train import conformance
from qwen_train.model import transformer

from .support import processes
from .support.caches import SMALL
from .support.commands import run
from .support.paths import ROOT
from .support.transformer_mutants import MASK_MUTANTS, ROPE_MUTANTS
from .support.waiting import HANG


def broken(promises: dict[str, Callable[..., None]], *arguments: Any) -> set[str]:
    """The promises that do not hold."""
    found = set()
    for name, promise in promises.items():
        try:
            with suppress(pytest.skip.Exception):  # nothing to check
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


# ---- the step --------------------------------------------------------------------------------------------------------


def faulty_step(fault: str, model: Any) -> step.Step:
    """A step of a padded batch, with one fault."""
    forward = conformance.padded(model)

    def take(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        clean, shapes = batch["latents"], batch["img_shapes"]
        tokens, targets = ([sum(h * w for _, h, w in s[:n]) for s in shapes] for n in (None, 1))
        is_target = torch.arange(clean.shape[1]) < torch.tensor(targets)[:, None]
        sigma, noise = torch.rand(len(clean)), torch.randn(clean.shape)
        if fault == "one level for the batch":
            sigma[:] = sigma[0].item()
        if fault == "one noise for the batch":
            noise[:] = noise[0].clone()
        noised = torch.ones_like(is_target) if fault == "controls noised" else is_target
        level = sigma[:, None, None]
        latents = torch.where(noised[..., None], (1 - level) * clean + level * noise, clean)
        told = sigma / 1000 if fault == "level divided twice" else sigma
        velocity = forward({**batch, "latents": latents, "sigma": told})
        difference = velocity - (clean - noise if fault == "data minus noise" else noise - clean)
        last = {"padding in the loss": [max(targets)] * len(clean), "controls in the loss": tokens}.get(fault, targets)
        loss = torch.stack([rows[:end].square().mean() for rows, end in zip(difference, last, strict=True)])
        return {"noise": noise, "sigma": 1000 * sigma if fault == "level in thousands" else sigma, "loss": loss}

    return take


STEP_FAULTS: dict[str, set[str]] = {
    "": set(),
    "one level for the batch": {"own noise"},
    "one noise for the batch": {"own noise"},
    "controls noised": {"own loss", "loss without padding"},
    "level divided twice": {"own loss", "loss without padding"},
    "data minus noise": {"own loss", "loss without padding"},
    "padding in the loss": {"loss without padding"},
    "controls in the loss": {"own loss", "loss without padding"},
    "level in thousands": set(step.PROMISES),
}


def test_our_step_keeps_every_promise() -> None:
    assert broken(step.PROMISES, conformance.step) == set()


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("fault", STEP_FAULTS)
def test_a_fault_of_a_step_breaks_its_promises(fault: str) -> None:
    assert broken(step.PROMISES, partial(faulty_step, fault)) == STEP_FAULTS[fault]


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


def built(model: Path, options: Sequence[str], rows: Sequence[caches.Row], folder: Path) -> list[Any]:
    """The samples that `qwen-cache build` makes of a table of the rows."""
    table = folder / "rows.jsonl"
    lines = [
        {"id": row.name, "target": str(row.target), "prompt": row.prompt}
        | ({"control": [*map(str, row.controls)]} if row.controls else {})
        for row in rows
    ]
    table.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    result = run("qwen-cache", "build", table, "--out", folder / "shards", "--model", model, *options)
    assert result.code == 0, result.stderr
    samples = {
        (s.prompt, s.row.meta.inputs.target, s.row.meta.inputs.controls): s for s in open_cache(folder / "shards")
    }
    return [samples[row.prompt, *_inputs(row)].tensors() for row in rows]


def _inputs(row: caches.Row) -> tuple[str, tuple[str, ...]]:
    target, *controls = (content_hash(path.read_bytes()) for path in (row.target, *row.controls))
    return target, tuple(controls)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["t2i", "edit", "edit-plus"])
def test_build_keeps_every_promise(variant: str, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Each check that a model with fewer controls skips says why."""
    model, unchecked = tiny_model(variant), dict[str, str]()

    def encode(rows: Sequence[caches.Row], folder: Path) -> list[Any]:
        rows = [replace(row, controls=()) for row in rows] if variant == "t2i" else rows
        return built(model, SMALL, rows, folder)

    place = caches.Workplace(tmp_path / "work", encode)
    for name, promise in caches.PROMISES.items():
        try:
            promise(place)
        except pytest.skip.Exception as skipped:
            unchecked[name] = str(skipped)
    of_controls = ("own embeddings", "own empty prompt", "order of controls", "missing control")
    assert unchecked.keys() == {"t2i": {*of_controls}, "edit": {"order of controls"}, "edit-plus": set()}[variant]
    assert all("control" in why for why in unchecked.values())


# ---- the values of a cache -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["t2i", "edit", "edit-plus"])
def test_build_has_the_values_of_stock_diffusers(
    variant: str, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """In bfloat16, the default; other values break the promise about them."""
    model = tiny_model(variant)
    compared = values.compare(caches.Workplace(tmp_path / "work", partial(built, model, [])), model)
    assert broken(values.PROMISES, compared) == set()
    if variant == "edit-plus":
        for fault, name, changed in faulty_values(compared, model):
            found = values.Compared({**compared.found, name: changed}, compared.expected)
            assert broken(values.PROMISES, found) == {PROMISE_OF[name]}, fault


PROMISE_OF = {
    "image_latents": "stock latents",
    "control_latents": "stock control latents",
    "prompt_embeds": "stock embeddings",
    "empty_prompt_embeds": "stock empty prompt",
}


def faulty_values(compared: values.Compared, model: Path) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The name of a fault, the tensor that has it, and its values."""
    right = compared.expected[1]
    config = json.loads((model / "vae" / "config.json").read_text(encoding="utf-8"))
    mean, std = (torch.tensor(config[f"latents_{name}"]).repeat_interleave(4) for name in ("mean", "std"))
    yield "not normalised", "image_latents", right["image_latents"] * std + mean
    yield "normalised twice", "image_latents", (right["image_latents"] - mean) / std
    (width, height), rows = (side // 16 for side in values.SIZES[1]), right["control_latents"]
    turned = rows[: height * width].view(height, width, 64).transpose(0, 1).reshape(-1, 64)
    yield "height and width exchanged", "control_latents", torch.cat([turned, rows[height * width :]])
    yield "one control", "control_latents", rows[: height * width]
    yield "the template kept", "prompt_embeds", torch.cat([right["prompt_embeds"][:30], right["prompt_embeds"]])
    yield "zeros", "empty_prompt_embeds", torch.zeros_like(right["empty_prompt_embeds"])
    pipeline = values.stock_pipeline(model, "QwenImageEditPlusPipeline")
    scale = pipeline.image_processor.resize

    def plain(image: Any, height: int, width: int, **options: Any) -> Any:
        return image.resize((width, height), Image.Resampling.NEAREST)

    def twice(image: Any, height: int, width: int, **options: Any) -> Any:
        return scale(scale(image, height // 2, width // 2), height, width)

    for resize in (plain, twice):
        pipeline.image_processor.resize = resize
        scaled = values.transformer_inputs(pipeline, values.row_images()[1:])
        yield f"controls scaled {resize.__name__}", "prompt_embeds", scaled["prompt_embeds"]


# ---- as a user runs it -----------------------------------------------------------------------------------------------


MINE = """
import torch

def without_empty_prompt(rows, folder):
    return [dict.fromkeys(["image_latents", "control_latents", "prompt_embeds"], torch.ones(4, 64)) for _ in rows]

def broken(rows, folder):
    raise ImportError("\\nno torchvision")
"""


@pytest.mark.slow
def test_what_cannot_be_checked_does_not_hold(tmp_path: Path) -> None:
    """Without an empty prompt, without encoders that work, with an adapter that is not there."""
    (tmp_path / "mine.py").write_text(MINE)
    suite = [sys.executable, "-m", "pytest", "--pyargs", "qwen_cache.conformance", "-p", "no:cacheprovider"]

    def printed(*options: str, code: int = 1) -> str:
        command = [*suite, "-k", "empty or missing", *options]
        done = processes.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code
        return done.stdout + done.stderr

    found = printed("--cache-adapter", "mine:without_empty_prompt")
    assert "own empty prompt        not checked the adapter returns no empty_prompt_embeds" in found
    found = printed("--cache-adapter", "mine:broken")
    assert "missing control         BROKEN      ImportError: no torchvision" in found
    assert "nothing was checked: give one of --model-adapter" in printed(code=0)
    assert printed("--cache-adapter", "mine:nope", code=4).count("mine:nope") == 1


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
    skipped = [step.PROMISES, loader.PROMISES, caches.PROMISES, values.PROMISES]
    assert f"{sum(map(len, skipped))} skipped" in done.stdout
