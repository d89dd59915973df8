"""`qwen-train decode` makes of latents what the stock pipeline makes of them, each once, and names what it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save, save_file

from qwen_cache import open_cache
from qwen_cache.storage.remembered import sealed

from .support.commands import refused, run
from .support.judge import stock_image, stock_pipeline
from .support.runs import IMAGES, Trainer


def test_images_are_the_stock_pipelines_bit_for_bit(train: Trainer) -> None:
    """Generated images, and for comparison the cached target and controls."""
    out = train(settings=IMAGES, train__max_steps=1)
    result = run("qwen-train", "decode", out)
    assert result.code == 0, result.stderr
    folder, cache, decoded = out / "validation", open_cache(train.cache), 0
    for file in sorted(folder.rglob("*.safetensors")):
        sample, latents = cache[file.stem], load_file(file)["latents"]
        shapes = sample.img_shapes[1:] if file.parent.name == "controls" else sample.img_shapes[:1]
        for i, (_, h, w) in enumerate(shapes):
            part, latents = latents[: h * w], latents[h * w :]
            png = file.with_name(f"{file.stem}{f'-{i + 1}' if i else ''}.png")
            expected = stock_image(stock_pipeline(train.model, "edit-plus"), part, h, w)
            assert np.array_equal(np.asarray(Image.open(png)), expected), png
            decoded += 1
        assert not len(latents)
    assert decoded == len(list(folder.rglob("*.png"))) == 2 * 3 + 3  # one of the two samples has a second control
    assert f"{decoded} new images in {out / 'validation'}" in result.stderr


@pytest.mark.slow
def test_what_is_there_is_not_made_again(train: Trainer) -> None:
    out = train(settings=IMAGES)
    assert run("qwen-train", "decode", out).code == 0
    pngs = sorted(out.rglob("*.png"))
    kept, removed = pngs[0], pngs[-1]
    expected = removed.read_bytes()
    removed.unlink()
    kept.write_bytes(b"mine")
    result = run("qwen-train", "decode", out, "--json")
    assert json.loads(result.stdout) == {"folder": str(out), "images": [str(removed)]}
    assert removed.read_bytes() == expected
    assert kept.read_bytes() == b"mine"
    assert f"{kept.name} cannot be read" in (out / "report.html").read_text(encoding="utf-8")
    assert not [path.name for path in out.rglob(".*")]


@pytest.mark.slow
def test_a_folder_of_latents_and_another_model_can_be_named(train: Trainer) -> None:
    out = train(settings=IMAGES)
    step = out / "validation" / "step-1"
    refused(run("qwen-train", "decode", step), "no model is named", "--model")
    result = run("qwen-train", "decode", step, "--model", train.model, "--vae-device", "cpu")
    assert result.code == 0, result.stderr
    assert {path.parent for path in out.rglob("*.png")} == {step}


@pytest.mark.parametrize("damage", ["cut off", "without shapes", "of other shapes", "of odd shapes", "changed"])
def test_files_that_are_no_latents_of_a_run_are_named(train: Trainer, damage: str) -> None:
    path = train.folder / "latents" / "a.safetensors"
    path.parent.mkdir()
    shapes = {"img_shapes": json.dumps([[1, 2, 3]])}
    save_file({"latents": torch.zeros(6 if damage != "of other shapes" else 7, 64)}, path, shapes)
    if damage == "without shapes":
        save_file({"latents": torch.zeros(6, 64)}, path)
    if damage == "of odd shapes":
        save_file({"latents": torch.zeros(6, 64)}, path, {"img_shapes": "[6]"})
    if damage == "cut off":
        path.write_bytes(path.read_bytes()[:100])
    if damage == "changed":
        data = b"".join(sealed(save({"latents": torch.zeros(6, 64)}, shapes)))
        path.write_bytes(data[:-1] + b"\1")
    result = run("qwen-train", "decode", path.parent, "--model", train.model)
    messages = {
        "of other shapes": "the number of latents does not fit the images",
        "changed": "this file was changed after it was written (expected xxh3-128 ",
    }
    refused(result, str(path), messages.get(damage, "not the latents of a run"))
    assert "remove" not in result.stderr, "it may be anything"


def test_a_run_without_images_says_so_and_its_weights_are_left_alone(train: Trainer) -> None:
    out = train(train__max_steps=1)
    result = run("qwen-train", "decode", out)
    refused(
        result,
        f"{out}: this run generated no images",
        "set validation.prompts and build the cache, or set validation.num_images",
    )
    assert ".safetensors" not in result.stderr


@pytest.mark.slow
def test_one_file_of_latents_can_be_named(train: Trainer) -> None:
    out = train(settings=IMAGES)
    file = sorted((out / "validation" / "step-2").glob("*.safetensors"))[0]
    result = run("qwen-train", "decode", file, "--model", train.model)
    assert result.code == 0, result.stderr
    assert list(out.rglob("*.png")) == [file.with_suffix(".png")]


def test_a_folder_without_latents_is_refused(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    result = run("qwen-train", "decode", tmp_path, "--model", tiny_model("edit-plus"))
    refused(result, f"{tmp_path}: no latents here", "validation.num_images")


@pytest.mark.parametrize("program", ["decode", "report"])
def test_the_default_folder_need_not_exist(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("qwen-train", program)
    refused(result, "out: no latents here" if program == "decode" else "out: no run here")
