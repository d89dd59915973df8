"""`predict` draws what the stock pipeline draws, with the prompt encoded as in training, and with what was trained.

What goes from part to part on the way is compared in equivalence/test_predict_steps.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file

from qwen_cache.encode import vae
from qwen_cache.encode.text import TextEncoder
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.rows import MAX_TEXT
from qwen_train.inference import generator
from qwen_train.inference import pipeline as pipelines
from qwen_train.inference.images import grid_cells, parse_axes
from qwen_train.inference.pipeline import Devices, load_pipeline
from qwen_train.lora.files import WEIGHTS_NAME, WeightedLora, find_assistant, parse_lora

from .support.commands import Result, run
from .support.judge import stock_pipeline
from .support.marks import slow
from .support.photographs import photograph
from .support.runs import run_training

pytestmark = pytest.mark.usefixtures("small_areas")  # test_predict_steps.py has the pipelines' own sizes
CPU = torch.device("cpu")
FLOAT32 = PredictConfig(dtype="float32")
PARTS = ("vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler")
TinyModel = Callable[[str], Path]
WITHOUT_IMAGE = "note: without --image, QwenImageEdit{}Pipeline generates from text alone"
SIZE = (
    "--set",
    "predict.height=128",
    "--set",
    "predict.width=96",
    "--set",
    "predict.dtype=float32",
    "--num-inference-steps",
    "2",
)


@pytest.fixture
def image_files(tmp_path: Path) -> list[Path]:
    """Two small photographs; the pipelines make a megapixel of each."""
    paths = []
    for name, size in (("china.jpg", (96, 128)), ("chelsea.png", (120, 90))):
        paths.append(tmp_path / f"{name}.png")
        photograph(name).resize(size).save(paths[-1])
    return paths


def predict(model: Path, out: Path, *options: str | Path, note: str = "") -> np.ndarray:  # type: ignore[type-arg]
    result = run("qwen-train", "predict", "--model", model, "--out", out, *SIZE, *options)
    assert result.code == 0, result.stderr
    assert [line for line in result.stderr.splitlines() if line.startswith("note: ")] == ([note] if note else [])
    return np.asarray(Image.open(out))


@pytest.mark.parametrize(
    ("variant", "count"),
    [("edit", 1), ("edit-plus", 2), ("edit-plus", 0), slow("edit", 0), slow("edit-2511", 0), slow("t2i", 0)],
)
def test_the_image_is_the_stock_pipelines_bit_for_bit(
    variant: str, count: int, image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    """Without an image, that of Qwen-Image's pipeline, also with the components of an editing model."""
    model, images = tiny_model(variant), [Image.open(path).convert("RGB") for path in image_files[:count]]
    guided = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    arguments: dict[str, Any] = {"image": images[0] if count == 1 else images} if images else {}
    expected = stock_pipeline(model, variant if count else "t2i")(
        **arguments,
        prompt="make it 黑白",
        **guided,
        num_inference_steps=2,
        height=128,
        width=96,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    options = [option for path in image_files[:count] for option in ("--image", path)]
    found = predict(
        model,
        tmp_path / "out.png",
        *("--prompt", "make it 黑白", "--seed", "5", *options),
        *("--set", "predict.negative_prompt=blurry", "--set", "predict.true_cfg_scale=3.0"),
        note="" if count or variant == "t2i" else WITHOUT_IMAGE.format("" if variant == "edit" else "Plus"),
    )
    assert np.array_equal(found, np.asarray(expected))


def test_a_trained_lora_changes_the_image_as_it_does_in_the_stock_pipeline(
    image_files: list[Path], tmp_path: Path, tiny_model: TinyModel, built: Callable[..., Path]
) -> None:
    model, out = tiny_model("edit-plus"), tmp_path / "run"
    settings = [
        "train.mixed_precision=no",
        "train.max_steps=4",
        f"train.output_dir={out}",
        "optimizer.learning_rate=0.01",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    assert run_training(built("edit-plus"), "--model", model, *options).code == 0
    drawing = ["--prompt", "mirror it", "--image", image_files[0]]
    plain = predict(model, tmp_path / "plain.png", *drawing)
    trained = predict(model, tmp_path / "trained.png", *drawing, "--lora", out)
    same = predict(model, tmp_path / "same.png", *drawing, "--lora", out / "pytorch_lora_weights.safetensors")
    assert np.array_equal(trained, same)
    assert np.abs(trained.astype(int) - plain).max() > 8
    pipeline = stock_pipeline.__wrapped__(model, "edit-plus")  # not the one that other tests share
    pipeline.load_lora_weights(out)
    expected = pipeline(
        image=[Image.open(image_files[0]).convert("RGB")],
        prompt="mirror it",
        true_cfg_scale=1.0,
        num_inference_steps=2,
        height=128,
        width=96,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    assert np.array_equal(trained, np.asarray(expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_with_a_quantised_transformer_the_image_is_nearly_the_same(
    image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    """Settings of qwen.yaml for training hold here, so that what fits there fits here."""
    options = ("--prompt", "x", "--image", image_files[0])
    plain = predict(tiny_model("edit-plus"), tmp_path / "plain.png", *options).astype(int)
    eight = ("--set", "model.quantization=int8")
    found = predict(tiny_model("edit-plus"), tmp_path / "eight.png", *options, *eight).astype(int)
    assert 0 < np.abs(found - plain).mean() < 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--image", "nowhere.png"], "nowhere.png: cannot be read: No such file or directory"),
        (["--image", "{image}", "--lora", "nowhere"], "nowhere: no LoRA here"),
        (["--image", "{image}", "--lora", "{pickle}"], "a .safetensors file"),
        (["--image", "{image}", "--transformer-device", "cuda:3"], "--transformer-device: no such device"),
        (["--image", "{image}", "--num-inference-steps", "1"], "one step is too few for this model's scheduler"),
        (["--image", "{image}", "--set", "predict.colour=3"], "known here: dtype, guidance_scale, height"),
        (["--image", "{image}", "--sigmas", "0.5,1"], "the last sigma must be below 1 (found --sigmas 1)"),
        (["--image", "{image}", "--sigmas", "1,half"], "--sigmas: not a valid value (expected a number"),
        (["--image", "{image}", "--true-cfg-scale", "2"], "nothing to guide away from (found --true-cfg-scale 2)"),
        (["--image", "{image}", "--targets", "after"], "--targets and --controls go with --source"),
        (["--from-cache", "shards", "--text-encoder", "{image}"], "a cached sample has its prompt's embeddings"),
        (["--image", "{image}", "--guidance-scale", "2"], "the guidance scale would be ignored"),
        (["--image", "{image}", "--device", "cuda:3"], "--device: no such device on this machine (expected cpu"),
        (["--image", "{image}", "--offload", "model"], "predict.offload=model is for an accelerator"),
        (
            ["--image", "{image}", "--offload", "all"],
            "--offload: not a valid value (expected none, model or sequential, found all)",
        ),
        (["--image", "{image}", "--merge"], "there is nothing to merge"),
        (["--prompt", "caf\udce9"], r"--prompt: the prompt 'caf\udce9' is not UTF-8 text"),
        (["--prompt", "x" * (MAX_TEXT + 1)], "--prompt: the prompt has 131073 bytes, expected at most 131072"),
        (["--image", "{image}", "--out", "{image}.gguf"], "expected .png, .jpg or .webp"),
    ],
)
def test_what_cannot_be_done_says_so(
    options: list[str], message: str, image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    (tmp_path / "pytorch_lora_weights.bin").write_bytes(b"a pickle, as far as anybody knows")
    names = {"image": image_files[0], "pickle": tmp_path / "pytorch_lora_weights.bin"}
    given = [option.format(**names) for option in options]
    out = tmp_path / "out.png"
    result = run("qwen-train", "predict", "--prompt", "x", "--model", tiny_model("edit-plus"), "--out", out, *given)
    assert result.code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_an_image_too_many_for_the_pipeline(image_files: list[Path], tmp_path: Path, tiny_model: TinyModel) -> None:
    two = [option for path in image_files for option in ("--image", path)]
    out = tmp_path / "out.png"
    result = run("qwen-train", "predict", "--prompt", "x", "--model", tiny_model("edit"), "--out", out, *two)
    assert result.code == 2
    assert "QwenImageEditPipeline takes 1 image (found 2)" in result.stderr


# ---- options ---------------------------------------------------------------------------------------------------------


def test_every_option_is_an_argument_of_the_stock_pipeline(tmp_path: Path, tiny_model: TinyModel) -> None:
    model = tiny_model("t2i")
    expected = stock_pipeline(model, "t2i")(
        prompt="a fox in the snow, and a hare",
        negative_prompt="",
        true_cfg_scale=2.5,
        sigmas=[1.0, 0.6, 0.3],
        num_images_per_prompt=2,
        generator=torch.Generator().manual_seed(7),
        height=48,
        width=80,
        max_sequence_length=4,
    ).images
    options = ["--prompt", "a fox in the snow, and a hare", "--negative-prompt", "", "--true-cfg-scale", "2.5"]
    options += [
        "--sigmas",
        "1,0.6,0.3",
        "--num-images-per-prompt",
        "2",
        "--seed",
        "7",
        "--height",
        "48",
        "--width",
        "80",
    ]
    options += ["--max-sequence-length", "4", "--device", "cpu", "--set", "predict.dtype=float32"]
    result = run("qwen-train", "predict", "--model", model, "--out", tmp_path / "new" / "out.png", *options)
    assert result.code == 0, result.stderr
    assert "generating" in result.stderr
    assert "3/3" in result.stderr
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["out-1.png", "out-2.png"]
    for number, image in enumerate(expected, 1):
        found = np.asarray(Image.open(tmp_path / "new" / f"out-{number}.png"))
        assert np.array_equal(found, np.asarray(image))


def draw(model: Path, out: Path, *options: str | Path) -> Result:
    """A small image of a text-to-image model: its content does not matter here."""
    size = ("--height", "64", "--width", "48", "--prompt", "a fox", "--set", "predict.dtype=float32")
    return run("qwen-train", "predict", "--model", model, "--out", out, *size, *options)


def test_an_image_is_whole_under_its_name_or_not_there(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jpg"
    assert draw(tiny_model("t2i"), out, "--num-inference-steps", "2").code == 0
    before = out.read_bytes()
    assert before.startswith(b"\xff\xd8")  # JPEG
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
    assert draw(tiny_model("t2i"), out, "--num-inference-steps", "3").code == 130
    assert out.read_bytes() == before


def test_a_guidance_distilled_model_needs_its_scale(tmp_path: Path, tiny_model: TinyModel) -> None:
    model = shutil.copytree(tiny_model("t2i"), tmp_path / "distilled")
    config = model / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"guidance_embeds": True}))
    result = draw(model, tmp_path / "out.png")
    assert result.code == 2
    assert "this model is guidance-distilled: it needs predict.guidance_scale" in result.stderr


# ---- LoRAs -----------------------------------------------------------------------------------------------------------

LAYER = "transformer.transformer_blocks.0.attn.to_q"


def write_lora(path: Path, seed: int, rank: int = 4) -> Path:
    """A LoRA of every to_q of the tiny model, strong enough to be seen."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for block in (0, 1):
        name = LAYER.replace("0", str(block))
        weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn(rank, 64, generator=generator)
        weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn(64, rank, generator=generator)
    save_file(weights, path)
    return path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # of the stock pipeline
def test_several_loras_count_by_their_weights(tmp_path: Path, tiny_model: TinyModel) -> None:
    model = tiny_model("t2i")
    one, two = write_lora(tmp_path / "one.safetensors", 1), write_lora(tmp_path / "two.safetensors", 2, rank=2)
    pipeline = stock_pipeline.__wrapped__(model, "t2i")
    for name, path in (("one", one), ("two", two)):
        pipeline.load_lora_weights(str(tmp_path), weight_name=path.name, adapter_name=name)
    pipeline.set_adapters(["one", "two"], [0.5, -1.5])
    generator = torch.Generator().manual_seed(0)
    expected = pipeline(prompt="a fox", num_inference_steps=2, height=64, width=48, generator=generator).images[0]
    options = ["--num-inference-steps", "2", "--lora", f"{one}:0.5", "--lora", f"{two}:-1.5"]
    generated = {}
    for name, more in (("unmerged", options), ("merged", [*options, "--merge"]), ("plain", options[:2])):
        result = draw(model, tmp_path / f"{name}.png", *more)
        assert result.code == 0, result.stderr
        generated[name] = np.asarray(Image.open(tmp_path / f"{name}.png")).astype(int)
    assert np.array_equal(generated["unmerged"], np.asarray(expected))
    assert np.abs(generated["merged"] - generated["unmerged"]).max() <= 1
    assert np.abs(generated["plain"] - generated["unmerged"]).max() > 8


def test_a_lora_of_another_pipeline_is_said(tmp_path: Path, tiny_model: TinyModel) -> None:
    """Its shapes fit, and somebody may mean it."""
    path = write_lora(tmp_path / "one.safetensors", 1)
    settings = LoraConfig(r=4, lora_alpha=4, target_modules=["to_q"]).to_dict() | {"target_modules": ["to_q"]}
    header = {f"transformer.{name}": value for name, value in settings.items()}
    header["trained_on"] = {"model": "Qwen/Qwen-Image-Edit", "pipeline": "QwenImageEditPipeline"}
    save_file(load_file(path), path, {"lora_adapter_metadata": json.dumps(header)})
    result = draw(tiny_model("t2i"), tmp_path / "generated.png", "--num-inference-steps", "2", "--lora", path)
    assert result.code == 0, result.stderr
    said = "trained on Qwen/Qwen-Image-Edit (QwenImageEditPipeline), but used with QwenImagePipeline"
    assert f"warning: {path}: {said}: expect images that differ from those in training\n" in result.stderr


def test_merged_the_loras_are_in_the_weights(tmp_path: Path, tiny_model: TinyModel) -> None:
    files = [write_lora(tmp_path / f"{seed}.safetensors", seed) for seed in (1, 2)]
    model, loras = opened(tiny_model("t2i")), [WeightedLora(files[0], 0.5), WeightedLora(files[1], -2.0)]
    merged = load_pipeline(model, FLOAT32, Devices(CPU, CPU, CPU), loras=loras, merge=True).transformer
    plain = load_pipeline(model, FLOAT32, Devices(CPU, CPU, CPU)).transformer
    assert [name for name, _ in merged.named_parameters()] == [name for name, _ in plain.named_parameters()]
    expected = plain.transformer_blocks[0].attn.to_q.weight
    for lora in loras:
        weights = load_file(lora.file)
        expected = expected + lora.weight * weights[f"{LAYER}.lora_B.weight"] @ weights[f"{LAYER}.lora_A.weight"]
    torch.testing.assert_close(merged.transformer_blocks[0].attn.to_q.weight, expected)


def test_only_a_number_behind_the_last_colon_is_a_weight(tmp_path: Path) -> None:
    odd, plain = write_lora(tmp_path / "a:b.safetensors", 1), write_lora(tmp_path / "c.safetensors", 1)
    assert parse_lora(str(plain)) == WeightedLora(plain, 1.0)
    assert parse_lora(f"{plain}:0.25") == WeightedLora(plain, 0.25)
    assert parse_lora(f"{plain}:-1") == WeightedLora(plain, -1.0)
    assert parse_lora(str(odd)) == WeightedLora(odd, 1.0)
    assert parse_lora(f"{odd}:1e-1") == WeightedLora(odd, 0.1)


def test_a_path_that_exists_is_that_path_with_its_colon(tmp_path: Path) -> None:
    """In --lora, --grid and train.assistant_lora."""
    for name in ("run", "run:2", "run:0"):
        (tmp_path / name).mkdir()
        write_lora(tmp_path / name / WEIGHTS_NAME, 1)
    run, second = tmp_path / "run", tmp_path / "run:2"
    of_second = WeightedLora(second / WEIGHTS_NAME, 1.0)
    assert parse_lora(str(second)) == of_second
    assert parse_lora(f"{second}:0.5") == WeightedLora(second / WEIGHTS_NAME, 0.5)
    assert parse_lora(f"{run}:3") == WeightedLora(run / WEIGHTS_NAME, 3.0)
    assert parse_lora(f"{second / WEIGHTS_NAME}") == of_second
    assert find_assistant(load_config(None, [f"train.assistant_lora={second}"]).train) == of_second
    config = PredictConfig()
    assert grid_cells(parse_axes(["seed=1"], config), config, [str(second)])[0].loras == (of_second,)
    (cell,) = grid_cells(parse_axes(["lora_weight=2"], config), config, [str(second)])
    assert cell.loras == (WeightedLora(second / WEIGHTS_NAME, 2.0),)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"unet.mid.to_q.lora_A.weight": (4, 8), "unet.mid.to_q.lora_B.weight": (8, 4)},
            "unet.mid.to_q: the LoRA does not fit this model (expected a layer of 8 inputs and 8 outputs, found no",
        ),
        (
            {f"{LAYER.replace('0', '2')}.lora_A.weight": (4, 64), f"{LAYER.replace('0', '2')}.lora_B.weight": (64, 4)},
            "transformer_blocks.2.attn.to_q: the LoRA does not fit this model",
        ),
        (
            {f"{LAYER}.lora_A.weight": (4, 3072), f"{LAYER}.lora_B.weight": (3072, 4)},
            "transformer_blocks.0.attn.to_q: the LoRA does not fit this model (expected a layer of 3072 inputs",
        ),
        (
            {f"{LAYER}.lora_A.weight": (4, 64), f"{LAYER}.lora_B.weight": (3072, 4)},
            "(expected a layer of 64 inputs and 3072 outputs, found weights (64, 64))",
        ),
        ({f"{LAYER}.lora_A.weight": (4, 64)}, "lora_A.weight: a matrix has no partner of its rank (found none)"),
        ({"proj_out.weight": (64, 64)}, "not a LoRA of a Qwen-Image transformer"),
    ],
)
def test_a_lora_of_another_base_is_refused_by_its_first_key(
    tensors: dict[str, tuple[int, int]],
    message: str,
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a weight is loaded."""
    monkeypatch.setattr(generator, "encode_prompts", None)
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, tmp_path / "other.safetensors")
    result = draw(tiny_model("t2i"), tmp_path / "out.png", "--lora", tmp_path / "other.safetensors")
    assert result.code == 2
    assert message in result.stderr


def test_a_lora_is_not_merged_into_quantised_weights(tmp_path: Path, tiny_model: TinyModel) -> None:
    lora = write_lora(tmp_path / "one.safetensors", 1)
    options = ("--lora", lora, "--merge", "--set", "model.quantization=int8")
    result = draw(tiny_model("t2i"), tmp_path / "out.png", *options)
    assert result.code == 2
    assert "a LoRA merged into quantised weights would be rounded away" in result.stderr


# ---- memory ----------------------------------------------------------------------------------------------------------


def opened(folder: Path) -> ModelFolder:
    return open_model(str(folder), PARTS)


def no_memory(*arguments: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total of 24 GiB")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("owner", "method", "doing", "fix"),
    [
        (TextEncoder, "encode_whole", "encoding the prompt", "--text-device"),
        (QwenImageTransformer2DModel, "to", "loading the transformer", "model.quantization=int8"),
        (QwenImageTransformer2DModel, "forward", "denoising", "--offload sequential"),
        (AutoencoderKLQwenImage, "_apply", "loading the VAE", "--vae-device"),
        (AutoencoderKLQwenImage, "encode", "encoding an image", "--vae-device"),
        (AutoencoderKLQwenImage, "decode", "decoding the image", "--height, --width"),
    ],
)
def test_without_memory_it_says_for_which_part_and_what_helps(
    owner: Any,
    method: str,
    doing: str,
    fix: str,
    image_files: list[Path],
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, method, no_memory)
    for name in ("encode_in_tiles", "decode_in_tiles"):  # which would have helped
        monkeypatch.setattr(vae, name, no_memory)
    out = tmp_path / "out.png"
    result = draw(tiny_model("edit-plus"), out, "--image", image_files[0], "--num-inference-steps", "2")
    assert result.code == 2, result.stderr
    assert f"error: cpu has too little memory for {doing} (found CUDA out of memory)" in result.stderr
    assert fix in result.stderr.split("→")[1]
    assert not out.exists()


def test_the_text_encoder_is_freed_before_the_transformer_is_loaded(
    tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders: list[weakref.ref[torch.nn.Module]] = []
    alive: list[bool] = []
    make, load = TextEncoder.__init__, pipelines.load_whole

    def init(self: TextEncoder, *arguments: Any) -> None:
        make(self, *arguments)
        encoders.append(weakref.ref(self.model))

    def load_whole(*arguments: Any, **named: Any) -> Any:
        alive.extend(encoder() is not None for encoder in encoders)
        return load(*arguments, **named)

    monkeypatch.setattr(TextEncoder, "__init__", init)
    for module in (pipelines, vae):
        monkeypatch.setattr(module, "load_whole", load_whole)
    assert draw(tiny_model("t2i"), tmp_path / "out.png", "--num-inference-steps", "2").code == 0
    assert alive == [False, False]  # when the VAE and when the transformer came


# ---- interruption ----------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_after_the_step_in_hand(
    number: signal.Signals, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, handlers = tiny_model("t2i"), [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def stop(pipeline: Any, step: int, timestep: Any, tensors: Any) -> dict[str, Any]:
        pipeline._interrupt = step == 1
        return {}

    size = {"height": 64, "width": 48, "num_inference_steps": 5}
    generator = torch.Generator().manual_seed(0)
    stock = stock_pipeline(model, "t2i")
    expected = stock(prompt="a fox", generator=generator, callback_on_step_end=stop, **size).images[0]
    forward = QwenImageTransformer2DModel.forward
    calls = 0

    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            os.kill(os.getpid(), number)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(QwenImageTransformer2DModel, "forward", interrupted)
    out = tmp_path / "out.png"
    result = draw(model, out, "--num-inference-steps", "5")
    assert (result.code, calls) == (130, 2)
    assert not out.exists()
    calls = 0
    result = draw(model, out, "--num-inference-steps", "5", "--save-interrupted")
    assert (result.code, calls) == (130, 2)
    assert f"interrupted after 2 steps: {out}, 48×64" in result.stderr
    assert np.array_equal(np.asarray(Image.open(out)), np.asarray(expected))
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
