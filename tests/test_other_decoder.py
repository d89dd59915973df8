"""Another VAE's decoder makes the images of `predict`, `decode` and a run, and nothing else of that VAE is used.

The judge is the stock pipeline with that decoder in its own VAE.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen_cache.encode.vae import check_decoder, load_vae, load_vaes
from qwen_cache.errors import ModelError
from qwen_cache.models.folder import open_model, open_vae

from .support.commands import refused, run
from .support.judge import stock_image, stock_pipeline
from .support.photographs import photograph
from .support.runs import IMAGES, Trainer

CPU = torch.device("cpu")
TinyModel = Callable[[str], Path]
LEAVE_OUT = "→ name a VAE with the encoder of the model's, or leave --vae and model.vae out"


@pytest.fixture
def other(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """The VAE of the model with another decoder, and an encoder that would show."""
    folder = Path(shutil.copytree(tiny_model("edit-plus") / "vae", tmp_path / "other"))
    file = folder / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for name in ("decoder.conv_in.weight", "post_quant_conv.weight"):
        tensors[name] = tensors[name].flip(0).contiguous()
    for name in ("encoder.conv_in.weight", "quant_conv.weight"):
        tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file)
    return folder


def configure(vae: Path, **values: Any) -> Path:
    config = json.loads((vae / "config.json").read_text(encoding="utf-8"))
    config = {name: value for name, value in {**config, **values}.items() if value is not None}
    (vae / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return vae / "config.json"


def judge(model: Path, other: Path) -> Any:
    """The stock pipeline with the other decoder."""
    pipeline = stock_pipeline.__wrapped__(model, "edit-plus")  # not the one that other tests share
    theirs = AutoencoderKLQwenImage.from_pretrained(other)
    pipeline.vae.decoder, pipeline.vae.post_quant_conv = theirs.decoder, theirs.post_quant_conv
    return pipeline


# ---- commands --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_areas")
def test_predict_encodes_with_the_model_s_vae_and_decodes_with_the_other(
    other: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    model, image = tiny_model("edit-plus"), tmp_path / "china.png"
    photograph("china.jpg").resize((96, 128)).save(image)
    size = ("--height", "128", "--width", "96", "--set", "predict.dtype=float32", "--num-inference-steps", "2")
    arguments = ("--model", model, "--image", image, "--prompt", "make it blue", *size)
    images = []
    for name, options in (("plain", ()), ("other", ("--vae", other))):
        result = run("qwen-train", "predict", *arguments, "--out", tmp_path / f"{name}.png", *options)
        assert result.code == 0, result.stderr
        images.append(np.asarray(Image.open(tmp_path / f"{name}.png")))
    expected = judge(model, other)(
        image=[Image.open(image)],
        prompt="make it blue",
        true_cfg_scale=1.0,
        num_inference_steps=2,
        height=128,
        width=96,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    assert np.array_equal(images[1], np.asarray(expected))
    assert not np.array_equal(*images)


def test_a_run_and_decode_show_its_images_with_the_other_decoder(train: Trainer, other: Path) -> None:
    """The run's setting is that of `decode` too; a model that has the VAE can be named in its place."""
    decoding = {**IMAGES, "train.max_steps": 1, "validation.vae_device": "cpu", "validation.num_images": 1}
    out = train(settings=decoding, model__vae=str(other))
    made = {path: np.asarray(Image.open(path)) for path in sorted(out.rglob("*.png"))}
    assert made
    pipeline = judge(train.model, other)
    path = next(path for path in made if path.parent.name == "step-1")
    latents, (h, w) = load_file(path.with_suffix(".safetensors"))["latents"], shape_of(path)
    assert np.array_equal(made[path], stock_image(pipeline, latents, h, w))
    refused(run("qwen-train", "decode", out), f"give --model {train.model} --vae {other}, as in {out / 'qwen.yaml'}")
    for vae in (other, other.parent):
        for each in made:
            each.unlink()
        if vae == other.parent:
            other.rename(other.with_name("vae"))
        assert run("qwen-train", "decode", out, "--vae", vae).code == 0
        assert all(np.array_equal(np.asarray(Image.open(each)), image) for each, image in made.items())
    for each in made:
        each.unlink()
    assert run("qwen-train", "decode", out, "--vae", train.model).code == 0
    assert not np.array_equal(np.asarray(Image.open(path)), made[path])


def shape_of(png: Path) -> tuple[int, int]:
    """The rows and columns of tokens of an image."""
    with Image.open(png) as image:
        return image.height // 16, image.width // 16


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_a_vae_of_other_latents_is_refused_before_a_run_trains_or_an_image_is_made(
    train: Trainer, other: Path, tmp_path: Path
) -> None:
    mean = json.loads((other / "config.json").read_text(encoding="utf-8"))["latents_mean"]
    config = configure(other, latents_mean=[*mean[:3], 0.5, *mean[4:]])
    what = "this VAE decodes other latents than the model's: they differ in latents_mean[3]"
    message = f"error: {config}: {what} (expected {mean[3]}, found 0.5)\n  {LEAVE_OUT}\n"
    run_settings = {**IMAGES, "validation.vae_device": "cpu"}
    refused(train.try_(settings=run_settings, model__vae=str(other)), message)
    assert not list(train.folder.rglob("*.png"))
    refused(train.try_("--vae", str(other)), "--vae is for images, and this run decodes none")
    latents = tmp_path / "latents"
    latents.mkdir()
    save_file({"latents": torch.zeros(6, 64)}, latents / "a.safetensors", {"img_shapes": "[[1, 2, 3]]"})
    refused(run("qwen-train", "decode", latents, "--model", train.model, "--vae", other), message)
    arguments = ("--model", train.model, "--prompt", "x", "--out", tmp_path / "out.png")
    refused(run("qwen-train", "predict", *arguments, "--vae", other), message)


def test_std_and_channels_are_compared_and_missing_values_are_the_library_s(other: Path, tiny_model: TinyModel) -> None:
    def opened(vae: Path) -> Any:
        return open_model(str(tiny_model("edit-plus")), ("vae",), vae=str(vae))

    check_decoder(opened(other))
    configure(other, latents_mean=None, latents_std=None)  # those of the class, which the tiny model has
    check_decoder(opened(other))
    config = configure(other, latents_std=[2.0] * 16)
    with pytest.raises(ModelError) as raised:
        load_vae(opened(other), CPU, torch.float32)
    what = "this VAE decodes other latents than the model's: they differ in latents_std[0]"
    assert str(raised.value) == f"{config}: {what} (expected 2.8184, found 2.0)\n  {LEAVE_OUT}"
    vae_21 = tiny_model("qwen-image-21") / "vae"
    with pytest.raises(ModelError) as raised:
        load_vaes(opened(vae_21), torch.float32)
    what = "this VAE decodes other latents than the model's: they differ in the number of latent channels"
    assert str(raised.value) == f"{vae_21 / 'config.json'}: {what} (expected 16, found 64)\n  {LEAVE_OUT}"


def test_a_folder_without_a_vae_is_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    do = "name the folder of a VAE as diffusers saves it, or that of a model with one"
    with pytest.raises(ModelError) as raised:
        open_vae(str(tmp_path))
    assert str(raised.value) == f"{tmp_path}: there is no VAE here (expected config.json)\n  → {do}"
    assert open_vae(str(tiny_model("edit-plus"))) == tiny_model("edit-plus") / "vae"
    refused(run("qwen-train", "decode", tmp_path, "--vae", tmp_path / "nowhere"), "no latents here")
    missing = open_model(str(tiny_model("edit-plus")), ("transformer",), vae=str(tmp_path / "nowhere"))
    assert missing.other_vae is None  # nothing is decoded
