"""`predict` draws what the stock pipeline draws, with the prompt encoded as in training, and with what was trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from .conftest import photograph, run
from .equivalence.judge import stock_pipeline

TinyModel = Callable[[str], Path]
SIZE = ("--set", "predict.height=128", "--set", "predict.width=96", "--set", "predict.dtype=float32", "--steps", "2")


@pytest.fixture
def pictures(tmp_path: Path) -> list[Path]:
    """Two small photographs; the pipelines make a megapixel of each."""
    paths = []
    for name, size in (("china.jpg", (96, 128)), ("chelsea.png", (120, 90))):
        paths.append(tmp_path / f"{name}.png")
        photograph(name).resize(size).save(paths[-1])
    return paths


def predict(model: Path, out: Path, *options: str | Path) -> np.ndarray:  # type: ignore[type-arg]
    result = run("qwen-train", "predict", "--model", model, "--out", out, *SIZE, *options)
    assert result.code == 0, result.stderr
    return np.asarray(Image.open(out))


@pytest.mark.parametrize(("variant", "count"), [("t2i", 0), ("edit", 1), ("edit-plus", 2)])
def test_the_picture_is_the_stock_pipelines_bit_for_bit(
    variant: str, count: int, pictures: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    model, images = tiny_model(variant), [Image.open(path).convert("RGB") for path in pictures[:count]]
    guided = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    arguments: dict[str, Any] = {"image": images[0] if count == 1 else images} if images else {}
    expected = stock_pipeline(model, variant)(
        **arguments,
        prompt="make it 黑白",
        **guided,
        num_inference_steps=2,
        height=128,
        width=96,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    options = [option for path in pictures[:count] for option in ("--image", path)]
    found = predict(
        model,
        tmp_path / "out.png",
        *("--prompt", "make it 黑白", "--seed", "5", *options),
        *("--set", "predict.negative_prompt=blurry", "--set", "predict.true_cfg_scale=3.0"),
    )
    assert np.array_equal(found, np.asarray(expected))


def test_a_trained_lora_changes_the_picture_as_it_does_in_the_stock_pipeline(
    pictures: list[Path], tmp_path: Path, tiny_model: TinyModel, built: Callable[..., Path]
) -> None:
    model, out = tiny_model("edit-plus"), tmp_path / "run"
    settings = [
        "train.mixed_precision=no",
        "train.max_steps=4",
        f"train.output_dir={out}",
        "optimizer.learning_rate=0.01",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    assert run("qwen-train", "run", built("edit-plus"), "--model", model, *options).code == 0
    drawing = ["--prompt", "mirror it", "--image", pictures[0]]
    plain = predict(model, tmp_path / "plain.png", *drawing)
    trained = predict(model, tmp_path / "trained.png", *drawing, "--lora", out)
    same = predict(model, tmp_path / "same.png", *drawing, "--lora", out / "pytorch_lora_weights.safetensors")
    assert np.array_equal(trained, same)
    assert np.abs(trained.astype(int) - plain).max() > 8
    pipeline = stock_pipeline.__wrapped__(model, "edit-plus")  # not the one that other tests share
    pipeline.load_lora_weights(out)
    expected = pipeline(
        image=[Image.open(pictures[0]).convert("RGB")],
        prompt="mirror it",
        true_cfg_scale=1.0,
        num_inference_steps=2,
        height=128,
        width=96,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    assert np.array_equal(trained, np.asarray(expected))


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_with_a_quantised_transformer_the_picture_is_nearly_the_same(
    pictures: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    """As qwen.yaml says for training, so that what fits there fits here."""
    options = ("--prompt", "x", "--image", pictures[0])
    plain = predict(tiny_model("edit-plus"), tmp_path / "plain.png", *options).astype(int)
    eight = ("--set", "model.quantization=int8")
    found = predict(tiny_model("edit-plus"), tmp_path / "eight.png", *options, *eight).astype(int)
    assert 0 < np.abs(found - plain).mean() < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "nowhere.png"], "nowhere.png: cannot be read: No such file or directory"),
        ([], "QwenImageEditPlusPipeline edits a picture"),
        (["--image", "{picture}", "--lora", "nowhere"], "nowhere: no LoRA here"),
        (["--image", "{picture}", "--lora", "{pickle}"], "a .safetensors file"),
        (["--image", "{picture}", "--transformer-device", "cuda:3"], "--transformer-device: no such device"),
        (["--image", "{picture}", "--steps", "1"], "one step is too few for this model's scheduler"),
        (["--image", "{picture}", "--set", "predict.step=3"], "known here: dtype, height, negative_prompt"),
    ],
)
def test_what_cannot_be_done_says_so(
    options: list[str], message: str, pictures: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    (tmp_path / "pytorch_lora_weights.bin").write_bytes(b"a pickle, as far as anybody knows")
    names = {"picture": pictures[0], "pickle": tmp_path / "pytorch_lora_weights.bin"}
    given = [option.format(**names) for option in options]
    out = tmp_path / "out.png"
    result = run("qwen-train", "predict", "--prompt", "x", "--model", tiny_model("edit-plus"), "--out", out, *given)
    assert result.code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_a_picture_too_many_for_the_pipeline(pictures: list[Path], tmp_path: Path, tiny_model: TinyModel) -> None:
    two = [option for path in pictures for option in ("--image", path)]
    out = tmp_path / "out.png"
    result = run("qwen-train", "predict", "--prompt", "x", "--model", tiny_model("edit"), "--out", out, *two)
    assert result.code == 2
    assert "QwenImageEditPipeline takes 1 picture (found 2)" in result.stderr


def test_a_lora_of_another_model_is_refused(pictures: list[Path], tmp_path: Path, tiny_model: TinyModel) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "other.safetensors"
    save_file({"unet.down_blocks.0.attn.to_q.lora_A.weight": torch.zeros(4, 8)}, path)
    model = tiny_model("edit-plus")
    arguments = [
        "--prompt",
        "x",
        "--model",
        model,
        "--image",
        pictures[0],
        "--lora",
        path,
        "--out",
        tmp_path / "out.png",
    ]
    result = run("qwen-train", "predict", *arguments)
    assert result.code == 2
    assert "the LoRA does not fit this model" in result.stderr
