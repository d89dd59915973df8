"""Images of a validation cache during training: which, when, by which weights, and where they are shown."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen_cache import open_cache
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.settings.load import load_config, parse_yaml
from qwen_cache.settings.sections import ValidationConfig
from qwen_train import train as training
from qwen_train.data.samples import Mixture
from qwen_train.data.validation_cache import check_validation_cache, open_validation_cache
from qwen_train.run import ToEncode
from qwen_train.training import watch

from .support.caches import SMALL as SMALL_BUILD
from .support.commands import refused, run
from .support.judge import stock_pipeline
from .support.paths import ROOT
from .support.photographs import photograph
from .support.runs import LORA, SMALL, Trainer, outcome, send

IMAGES = {**SMALL, "validation.images_every_steps": 2, "validation.num_inference_steps": 2, "predict.dtype": "float32"}


STEP_0 = "validation/step-0"


@pytest.fixture(scope="module")
def to_generate(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of two images to generate: one with a seed and two controls, one without a seed."""
    folder = tmp_path_factory.mktemp("validation")
    for name, photo, size in (("china", "china.jpg", (160, 107)), ("cat", "chelsea.png", (120, 120))):
        photograph(photo).resize(size).save(folder / f"{name}.png")
    prompts = [
        {"prompt": "at night", "control": [f"{folder}/cat.png", f"{folder}/china.png"], "seed": 7},
        {"prompt": "as a drawing", "control": f"{folder}/china.png"},
    ]
    options = ["--only-validation", "--set", f"validation.prompts={json.dumps(prompts)}", *SMALL_BUILD]
    built = run("qwen-cache", "build", "--out", folder / "shards", "--model", tiny_model("edit-plus"), *options)
    assert built.code == 0, built.stderr
    return folder / "shards" / "validation"


def latents(out: Path) -> dict[str, bytes]:
    """The generated files of a run by their names."""
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.glob("validation/step-*/*"))}


@pytest.mark.slow
def test_every_sample_is_generated_before_training_every_n_steps_and_after_the_last(train: Trainer) -> None:
    """Without held-out samples, from the same noise with and without guidance; training is not touched."""
    expected = train(out="without")
    settings = {**IMAGES, "validation.cache": str(train.cache)}
    result = train.try_(settings=settings, validation__true_cfg_scale=[1, 4], train__checkpointing_steps=3)
    out, cache = train.folder / "out", open_cache(train.cache)
    when = "before training, every 2 steps and after the last"
    assert f"images   {2 * len(cache)} images at true_cfg_scale 1 and 4, {when}" in result.stderr
    assert outcome(out)[LORA] == outcome(expected)[LORA]
    steps = {path.name: sorted(file.stem for file in path.iterdir()) for path in (out / "validation").glob("step-*")}
    assert steps == dict.fromkeys(("step-0", "step-2", "step-3"), sorted(sample.key for sample in cache))
    unguided = train(settings=settings, out="unguided") / "validation" / "step-0"
    for sample in cache:
        file = out / "validation" / "step-0" / f"{sample.key}.safetensors"
        plain, guided = load_file(file)["latents"].chunk(2)
        assert torch.equal(plain, load_file(unguided / file.name)["latents"])
        assert not torch.allclose(plain, guided, atol=0.01)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        assert json.loads(metadata["true_cfg_scale"]) == [1, 4]
        assert json.loads(metadata["img_shapes"]) == [list(sample.img_shapes[0])] * 2


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_gives_the_same_images(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**IMAGES, "validation.cache": str(train.cache), "optimizer.learning_rate": 0.01}
    expected = latents(train(settings=settings, train__max_steps=4, out="whole"))
    with monkeypatch.context() as patch:
        send(patch, signal.SIGINT, in_batch=1)
        stopped = train.try_(settings=settings, train__max_steps=4)
    assert stopped.code == 130, stopped.stderr
    assert latents(train.folder / "out").keys() == {name for name in expected if "step-4" not in name}
    assert latents(train("--resume", settings=settings, train__max_steps=4)) == expected


@pytest.mark.slow
def test_the_average_generates_if_there_is_one(train: Trainer) -> None:
    """Its images are those of a run that starts from the average, before its first step."""
    settings = {**IMAGES, "validation.cache": str(train.cache), "optimizer.learning_rate": 0.1}
    out = train(settings=settings, train__ema_decay=0.9, train__max_steps=2)
    average = out / LORA.replace(".safetensors", "_ema.safetensors")
    for weights, is_equal in ((average, True), (out / LORA, False)):
        started = train(settings=settings, train__max_steps=1, train__lora__weights=str(weights), out=weights.stem)
        equal = []
        for sample in open_cache(train.cache):
            files = [folder / f"{sample.key}.safetensors" for folder in (started / STEP_0, out / "validation/step-2")]
            equal.append(torch.equal(*(load_file(file)["latents"] for file in files)))
        assert equal == [is_equal] * len(open_cache(train.cache))


def test_images_without_targets_are_those_of_the_stock_pipeline(
    train: Trainer, to_generate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the sample's own seed, as the pipeline draws it; beside them their controls, and no target."""
    out = train(settings=IMAGES, validation__cache=str(to_generate), train__max_steps=1)
    assert {path.name for path in (out / "validation").iterdir()} == {"step-0", "step-1", "controls"}
    sample, other = open_cache(to_generate)
    assert (sample.seed, other.seed, len(sample.img_shapes)) == (7, None, 3)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 16384)
    _, h, w = sample.img_shapes[0]
    embeds = sample["prompt_embeds"][None].clone()
    with torch.no_grad():
        expected = stock_pipeline(train.model, "edit-plus")(
            image=[photograph("chelsea.png").resize((120, 120)), photograph("china.jpg").resize((160, 107))],
            prompt_embeds=embeds,
            prompt_embeds_mask=torch.ones(embeds.shape[:2], dtype=torch.long),
            generator=torch.Generator().manual_seed(7),
            true_cfg_scale=1.0,
            num_inference_steps=2,
            height=16 * h,
            width=16 * w,
            output_type="latent",
        ).images[0]
    found = load_file(out / STEP_0 / f"{sample.key}.safetensors")["latents"]
    assert float((found - expected).norm() / expected.norm()) < 1e-4


# ---- which cache -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_cache_inside_the_cache_is_the_default(train: Trainer) -> None:
    inside = train.folder / "shards"
    shutil.copytree(train.cache, inside)
    shutil.copytree(train.cache, inside / "validation")
    train.cache = inside
    assert latents(train(settings=IMAGES, train__max_steps=1))
    assert not latents(train(settings=IMAGES, train__max_steps=1, validation__cache="none", out="none"))


def test_a_cache_of_another_model_is_refused(train: Trainer) -> None:
    other = ROOT / "schemas" / "examples" / "valid" / "to-generate.v2"
    refused(train.try_(settings=IMAGES, validation__cache=str(other)), f"{other}: the cache", "found width")
    nowhere = train.folder / "nowhere"
    refused(train.try_(settings=IMAGES, validation__cache=str(nowhere)), str(nowhere))
    assert not (train.folder / "out").exists()


def test_a_cache_of_another_encoder_is_refused(train: Trainer) -> None:
    cache = Mixture.of(open_cache(train.cache))
    recipe = {**cache.recipe.recipe, "vae": "another"}
    samples: Any = SimpleNamespace(folder="shards", recipe=SimpleNamespace(recipe=recipe))
    with pytest.raises(ConfigError) as error:
        check_validation_cache(cache, samples, ValidationConfig())
    assert str(error.value) == (
        f"{train.cache}: the validation cache does not fit the cache in training: they differ in vae (expected "
        f"another, as in shards, found {cache.recipe.recipe['vae']})\n"
        "  → build both with the same model, or name another one in validation.cache"
    )


def test_images_of_other_prompts_than_those_of_the_settings_are_never_shown(train: Trainer, to_generate: Path) -> None:
    """Prompts that were changed, added or removed since the build, and those that were never encoded."""
    cache, saved = to_generate.parent, to_generate / "qwen.yaml"
    prompts = parse_yaml(saved.read_text())["validation"]["prompts"]
    build, none = "`qwen-cache build --only-validation`", "validation.cache=none"

    def check(to_encode: ToEncode | None = None, path: Path = cache, **validation: Any) -> Mixture | None:
        given = [f"validation.{name}={json.dumps(value)}" for name, value in validation.items()]
        return open_validation_cache(load_config(None, given, cache__path=str(path)), to_encode)

    def message(**validation: Any) -> str:
        with pytest.raises(ConfigError) as error:
            check(**validation)
        return str(error.value)

    built = f"{saved}: the validation cache was built from another validation."
    as_it_is = f"set validation.cache={to_generate}"
    assert message(prompts=["at dawn"]) == (
        f"{built}prompts (expected 1 prompt: at dawn, found 2 prompts: at night; as a drawing)\n"
        f"  → run {build}, or {as_it_is} and validation.prompts=[] to generate what it has, or {none}"
    )
    assert message() == (
        f"{built}prompts (expected 0 prompts, found 2 prompts: at night; as a drawing)\n"
        f"  → {as_it_is} to generate what it has, or {none}"
    )
    assert "another validation.prompts" in message(prompts=[{**prompts[0], "seed": 8}, prompts[1]])
    assert "another validation.prompts" in message(prompts=["at dawn"], cache=str(to_generate))
    assert f"{built}source (expected new.csv, found None)" in message(prompts=prompts, source="new.csv")
    for given in ({"prompts": prompts}, {"cache": str(to_generate)}):
        assert len(check(**given) or ()) == 2
    assert check(prompts=["at dawn"], cache="none") is None
    nowhere = train.folder / "nowhere"
    assert message(path=nowhere, prompts=["at dawn"]) == (
        f"{nowhere}/validation: the images to generate are not in a cache (found validation.prompts)\n"
        f"  → encode them with {build}; or set {none}"
    )
    for at, option in ((None, ""), ("http://there:8077", " --at http://there:8077")):
        told = f"`qwen-cache build --only-validation{option}`, and set validation.cache={to_generate}; or"
        assert told in message(to_encode=ToEncode("data", at), source="new.csv")


def test_guidance_without_the_empty_prompt_is_refused(train: Trainer) -> None:
    cache = Mixture.of(open_cache(train.cache))
    column = cache.table.schema.get_field_index("empty_prompt_embeds")
    cache.table = cache.table.set_column(column, "empty_prompt_embeds", pa.nulls(4, cache.table.schema[column].type))
    check_validation_cache(cache, cache, ValidationConfig())
    with pytest.raises(TrainError, match=r"4 of 4 samples without them, validation.true_cfg_scale=4.0") as error:
        check_validation_cache(cache, cache, ValidationConfig(true_cfg_scale=[1, 4]))
    assert "set validation.true_cfg_scale=1, or run `qwen-cache build` on the images" in str(error.value)


# ---- decoding in the run ---------------------------------------------------------------------------------------------


def logged(folder: Path) -> dict[tuple[str, int], bytes]:
    """The images in TensorBoard's files of a folder, by tag and step."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()
    images = [(tag, image) for tag in events.Tags()["images"] for image in events.Images(tag)]
    return {(tag, image.step): image.encoded_image_string for tag, image in images}


def pixels(png: bytes | Path) -> np.ndarray:  # type: ignore[type-arg]
    return np.asarray(Image.open(BytesIO(png) if isinstance(png, bytes) else png))


@pytest.mark.slow
def test_a_run_can_decode_on_a_device_of_its_own(train: Trainer) -> None:
    """The PNGs are those of `decode`; TensorBoard has each at its step, under the name of its sample."""
    settings = {**IMAGES, "validation.cache": str(train.cache), "validation.vae_device": "cpu", "train.max_steps": 1}
    out = train(settings=settings, validation__true_cfg_scale=[1, 3], logging__report_to="tensorboard")
    found = {path.relative_to(out): path.read_bytes() for path in out.rglob("*.png")}
    samples = list(open_cache(train.cache))
    assert len(found) == 2 * 2 * len(samples) + len(samples) + sum(len(sample.img_shapes) - 1 for sample in samples)
    for path in found:
        (out / path).unlink()
    assert run("qwen-train", "decode", out).code == 0
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*.png")} == found
    expected = {
        (f"images/{sample.name}, true_cfg_scale {scale}", step): out / f"validation/step-{step}/{sample.key}{end}.png"
        for sample in samples
        for scale, end in ((1, ""), (3, "-2"))
        for step in (0, 1)
    }
    images = logged(out / "logs")
    assert images.keys() == expected.keys()
    for tag, path in expected.items():
        assert np.array_equal(pixels(images[tag]), pixels(path)), tag
    # killed after step 2, and resumed after step 1: no image is lost there
    settings |= {"train.max_steps": 2, "train.checkpointing_steps": 1}
    train("--resume", settings=settings, logging__report_to="tensorboard", validation__true_cfg_scale=[1, 3])
    shutil.rmtree(out / "checkpoint-2")
    before = logged(out / "logs")
    assert {step for _, step in before} == {0, 1, 2}
    train("--resume", settings=settings, logging__report_to="tensorboard", validation__true_cfg_scale=[1, 3])
    assert logged(out / "logs") == before


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"validation.vae_device": "cpu"},
            (
                "validation.vae_device decodes images, and this run generates none (found validation.vae_device=cpu)",
                "set validation.prompts and build the cache, or set validation.num_images; or remove validation.",
            ),
        ),
        (
            {"validation.vae_device": "cuda:7", "validation.num_images": 1, "train.validation_split": 0.6},
            ("validation.vae_device: no such device on this machine", "found cuda:7"),
        ),
    ],
)
def test_decoding_that_cannot_be_is_refused(train: Trainer, settings: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(train.try_(settings={**IMAGES, **settings}), *parts)
    assert not (train.folder / "out").exists()


def test_a_device_without_room_for_the_vae_leaves_decoding_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And does not end the run; where the CPU runs out of memory, it does."""

    @dataclass(frozen=True)
    class Decoder:
        device: torch.device

    devices = list[str]()

    def show(folder: Path, decoder: Decoder, trackers: object) -> None:
        devices.append(decoder.device.type)
        if decoder.device.type != "cpu" or len(devices) > 3:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(watch, "show_new_images", show)
    p: Any = SimpleNamespace(
        out=Path(), decoder=Decoder(torch.device("meta")), accelerator=SimpleNamespace(trackers=[])
    )
    training.decode_images(p)
    training.decode_images(p)
    assert devices == ["meta", "cpu", "cpu"]
    assert "meta has too little memory to decode images" in capsys.readouterr().err
    with pytest.raises(torch.OutOfMemoryError):
        training.decode_images(p)


def test_without_a_vae_it_is_refused_beforehand(train: Trainer) -> None:
    """And without validation.vae_device the model needs none."""
    model = train.folder / "model"
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    train.model, settings = model, {**IMAGES, "validation.cache": str(train.cache)}
    refused(train.try_(settings=settings, validation__vae_device="cpu"), str(model), "vae")
    assert train.try_(settings=settings, train__max_steps=1).code == 0
