"""`predict` with Qwen-Image-2.1: one image, many, from a cache; its defaults, its transparency, and what it refuses.

The judge is the stock pipeline; what goes from part to part is compared in equivalence/test_predict_steps_21.py.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from qwen_cache import open_cache
from qwen_cache.encode.text import token_counter
from qwen_cache.models.family import Family
from qwen_cache.models.folder import open_model
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.settings.sections import PredictConfig
from qwen_train.inference import generator
from qwen_train.inference import generator as many
from qwen_train.inference import images as comparison
from qwen_train.inference.generator import Generator, settings_that_matter
from qwen_train.inference.images import COMPONENTS, COMPONENTS_FOR_A_CACHE, save_images
from qwen_train.inference.pipeline import PromptEncoder, load_pipeline

from .support.both_pipelines import CPU
from .support.commands import Result, run
from .support.judge import TinyModel, image, stock_pipeline
from .support.paths import load_tool
from .support.qwen_image_21 import stock_pipeline_21, stock_qwen_image_21, transparent

RESOLUTION = 96
SIZE = ("--output-resolution", str(RESOLUTION))
FAST = ("--set", "predict.dtype=float32", "--num-inference-steps", "2")
Predict = Callable[..., Result]


@pytest.fixture
def predict(tiny_model: TinyModel) -> Predict:
    def generate(*options: str | Path, size: tuple[str, ...] = SIZE, model: Path | None = None) -> Result:
        folder = model or tiny_model("qwen-image-21")
        return run("qwen-train", "predict", "--model", folder, *size, *FAST, *options)

    return generate


@pytest.fixture
def image_files(tmp_path: Path) -> list[Path]:
    """Transparent, and not."""
    images = {"cut.png": transparent("china.jpg", (130, 90)), "cat.png": image("chelsea.png", (60, 80))}
    for name, each in images.items():
        each.save(tmp_path / name)
    return [tmp_path / name for name in images]


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    """A strong one."""
    torch.manual_seed(0)
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    weights = {f"{name}.lora_A.weight": torch.randn(4, 64), f"{name}.lora_B.weight": torch.randn(64, 4)}
    save_file(weights, tmp_path / "lora.safetensors")
    return tmp_path / "lora.safetensors"


def stock_image(pipeline: Any, prompt: str, images: list[Image.Image], **arguments: Any) -> Any:
    return pipeline(
        prompt=prompt,
        **({"image": images} if images else {}),
        **{"num_inference_steps": 2, "output_resolution": RESOLUTION, **arguments},
        generator=torch.Generator().manual_seed(arguments.pop("seed", 0)),
    ).images[0]


def pixels(path: Path) -> Any:
    with Image.open(path) as opened:
        assert opened.mode == "RGBA"
        return np.asarray(opened)


# ---- one image -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_image_is_the_stock_pipelines_bit_for_bit_with_its_transparency(
    count: int, predict: Predict, image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    files = image_files[:count]
    guided = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}
    opened = [Image.open(path) for path in files]
    expected = stock_image(stock_pipeline_21(tiny_model("qwen-image-21")), "make it 黑白", opened, **guided)
    options = [option for path in files for option in ("--image", path)]
    guidance = ("--negative-prompt", "blurry", "--true-cfg-scale", "3")
    out = tmp_path / "out.png"
    result = predict("--prompt", "make it 黑白", *options, *guidance, "--out", out)
    assert result.code == 0, result.stderr
    assert np.array_equal(pixels(out), np.asarray(expected))
    assert len(np.unique(pixels(out)[..., 3])) > 1
    assert "has no transparency" not in result.stderr
    assert f"{expected.width}×{expected.height}" in result.stderr


def test_a_lora_changes_the_image_as_in_the_stock_pipeline(
    predict: Predict, image_files: list[Path], lora: Path, tmp_path: Path, tiny_model: TinyModel
) -> None:
    pipeline = stock_qwen_image_21(tiny_model("qwen-image-21"))
    pipeline.load_lora_weights(str(lora.parent), weight_name=lora.name)
    expected = stock_image(pipeline, "x", [Image.open(image_files[0])])
    options = ("--prompt", "x", "--image", image_files[0], "--lora", lora)
    assert predict(*options, "--out", tmp_path / "out.png").code == 0
    assert np.array_equal(pixels(tmp_path / "out.png"), np.asarray(expected))
    assert predict(*options, "--merge", "--out", tmp_path / "merged.png").code == 0
    difference = np.abs(pixels(tmp_path / "merged.png").astype(int) - pixels(tmp_path / "out.png"))
    assert difference.max() <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_with_a_quantised_transformer_the_image_is_nearly_the_same(
    predict: Predict, image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    """Layers that training leaves unquantised, such as the modulation that all blocks share, is left here too."""
    options = ("--prompt", "x", "--image", image_files[0], "--out", tmp_path / "out.png")
    assert predict(*options).code == 0
    plain = pixels(tmp_path / "out.png").astype(int)
    assert predict(*options, "--set", "model.quantization=int8").code == 0
    assert 0 < np.abs(pixels(tmp_path / "out.png") - plain).mean() < 5
    model = open_model(str(tiny_model("qwen-image-21")), COMPONENTS)
    transformer = load_pipeline(model, PredictConfig(dtype="float32"), CPU, quantization="int8").transformer
    quantised = {name for name, layer in transformer.named_modules() if isinstance(layer, QuantizedLinear)}
    assert quantised
    assert all(name.startswith("transformer_blocks.") for name in quantised), quantised


@pytest.mark.parametrize("kind", [".webp", ".tiff", ".jpg", ".bmp"])
def test_other_formats_keep_transparency_or_get_white(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clear = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 8, 4))
    (path,) = save_images([clear], tmp_path / f"it{kind}")
    said = " ".join(capsys.readouterr().err.split())
    with Image.open(path) as found:
        below = found.convert("RGBA").getpixel((4, 7))
        above = found.convert("RGB").getpixel((4, 0))
    assert max(above) < 8
    if kind in (".webp", ".tiff"):
        assert (below[3], said) == (0, "")
    else:
        assert min(below) > 247
        assert "has no transparency, so it is over white; a .png keeps it" in said
    clear.putalpha(255)
    save_images([clear, clear.convert("RGB")], tmp_path / f"it{kind}")
    assert capsys.readouterr().err == ""


# ---- settings --------------------------------------------------------------------------------------------------------


def made(model: Path, **settings: Any) -> Generator:
    return Generator(open_model(str(model), COMPONENTS), PredictConfig(**settings), CPU)


def test_what_is_not_given_is_the_pipelines_own_default(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments that reach the pipeline of each family, beside its own defaults."""
    calls: list[dict[str, Any]] = []

    class Pipeline:
        devices, interrupt = CPU, False

        without_images = property(lambda self: self)

        def set_progress_bar_config(self, **options: Any) -> None: ...

        def __call__(self, **arguments: Any) -> Any:
            calls.append(arguments)
            return type("Output", (), {"images": []})

    monkeypatch.setattr(generator, "load_pipeline", lambda *arguments, **options: Pipeline())
    for variant, settings in (("qwen-image-21", {}), ("t2i", {}), ("t2i", {"negative_prompt": ""})):
        made(tiny_model(variant), **settings).call_pipeline([], {})
    given = {"output_resolution": 96, "use_kv_cache": False, "num_inference_steps": 7, "height": 64}
    made(tiny_model("qwen-image-21"), **given).call_pipeline([], {})
    common = {"generator", "callback_on_step_end", "num_images_per_prompt"}
    new, old, guided, all_given = ({k: v for k, v in call.items() if k not in common} for call in calls)
    assert new == {"num_inference_steps": 40, "true_cfg_scale": 1.0}
    assert old == {"num_inference_steps": 50, "true_cfg_scale": 1.0}
    assert guided == {"num_inference_steps": 50, "true_cfg_scale": 4.0}
    assert all_given == {**given, "true_cfg_scale": 1.0}


def recorded(generator: Generator) -> dict[str, Any]:
    return settings_that_matter(generator.model, generator.config)


def test_images_of_the_20b_family_are_recorded_as_before(tiny_model: TinyModel) -> None:
    """Or they would all be generated again; of Qwen-Image-2.1, all that affects an image is recorded."""
    old = made(tiny_model("t2i"), negative_prompt="")
    assert recorded(old) == {
        "dtype": "bfloat16",
        "num_inference_steps": 50,
        "sigmas": None,
        "true_cfg_scale": 4.0,
        "negative_prompt": "",
        "guidance_scale": None,
        "num_images_per_prompt": 1,
        "max_sequence_length": 512,
        "height": None,
        "width": None,
        "seed": 0,
        "tabulated_modulation": False,
    }
    settings: list[dict[str, Any]] = [{}, {"output_resolution": 96}, {"use_kv_cache": False}, {"height": 64}]
    all_recorded = [recorded(made(tiny_model("qwen-image-21"), **each)) for each in settings]
    assert all(all_recorded.count(each) == 1 for each in all_recorded)
    explicit = {"output_resolution": 1024, "use_kv_cache": True, "num_inference_steps": 40}
    assert recorded(made(tiny_model("qwen-image-21"), **explicit)) == all_recorded[0]


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tool: Any = load_tool("make_tiny_model")
    folder = tmp_path_factory.mktemp("distilled") / "model"
    made: Path = tool.make_tiny_model(folder, "qwen-image-21", sample_sigmas=[1.0, 0.6, 0.3])
    return made


def test_a_distilled_model_is_sampled_at_its_saved_levels(distilled: Path, tmp_path: Path) -> None:
    options = ("predict", "--model", distilled, *SIZE, "--set", "predict.dtype=float32", "--prompt", "a fox")
    expected = stock_image(stock_qwen_image_21(distilled), "a fox", [])
    result = run("qwen-train", *options, "--out", tmp_path / "out.png")
    assert result.code == 0, result.stderr
    assert "3/3" in result.stderr
    assert np.array_equal(pixels(tmp_path / "out.png"), np.asarray(expected))
    assert made(distilled).steps == 3
    assert made(distilled, sigmas=[1.0, 0.5]).steps == 2
    assert recorded(made(distilled)) == recorded(made(distilled, sigmas=[1.0, 0.6, 0.3]))
    refused = run("qwen-train", *options, "--out", tmp_path / "no.png", "--num-inference-steps", "8")
    assert refused.code == 2
    said = " ".join(refused.stderr.split())
    assert "the number of steps would be ignored (expected sample_sigmas of its model_index.json: 1, 0.6, 0.3" in said
    assert "give other noise levels with --sigmas" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--guidance-scale", "2"), "Qwen-Image-2.1 has no predict.guidance_scale: its transformer takes no guidance"),
        (("--max-sequence-length", "512"), "Qwen-Image-2.1 has no predict.max_sequence_length: its prompts are never"),
        (("--set", "predict.tabulated_modulation=true"), "has no predict.tabulated_modulation: all its blocks share"),
        (("--negative-prompt", "blurry"), "without guidance by default, which would ignore the negative prompt"),
        (("--true-cfg-scale", "4"), "without a negative prompt there is nothing to guide away from"),
        (("--width", "100"), "the sides of Qwen-Image-2.1 are multiples of 32 pixels (expected 96 or 128, found"),
        (("--height", "16"), "the sides of Qwen-Image-2.1 are multiples of 32 pixels (expected 32 or more, found"),
        (
            ("--output-resolution", "100"),
            "--output-resolution: not a valid value (expected a multiple of 32, found 100)",
        ),
        (("--offload", "model"), "predict.offload=model is for an accelerator"),
        (("--from-cache", "x", "--key", "y"), "a cached sample has a fixed size"),
    ],
)
def test_what_it_does_not_have_is_refused_by_name(
    options: tuple[str, ...], message: str, predict: Predict, tmp_path: Path
) -> None:
    prompt = () if "--from-cache" in options else ("--prompt", "x")
    result = predict(*prompt, *options, "--out", tmp_path / "out.png")
    assert result.code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out.png").exists()


def test_a_resolution_below_that_of_the_processor_is_refused(
    predict: Predict, image_files: list[Path], tmp_path: Path, tiny_model: TinyModel
) -> None:
    """The published one enlarges images below 65536 pixels; stock then fails on the number of slots."""
    folder = shutil.copytree(tiny_model("qwen-image-21"), tmp_path / "model")
    file = folder / "processor" / "preprocessor_config.json"
    file.write_text(file.read_text(encoding="utf-8").replace("1024", "65536"), encoding="utf-8")
    options = ("--prompt", "x", "--image", image_files[0], "--out", tmp_path / "out.png")
    result = predict(*options, model=folder)
    assert result.code == 2
    assert "raise data.vae_image_size, or predict.output_resolution" in " ".join(result.stderr.split())


@pytest.mark.parametrize("setting", ["output_resolution=1024", "use_kv_cache=true", "use_kv_cache=false"])
def test_the_20b_family_has_none_of_its_settings(setting: str, tmp_path: Path, tiny_model: TinyModel) -> None:
    options = ("--prompt", "x", "--set", f"predict.{setting}", "--out", tmp_path / "out.png")
    result = run("qwen-train", "predict", "--model", tiny_model("t2i"), *options)
    assert result.code == 2
    assert f"Qwen-Image has no predict.{setting.partition('=')[0]}" in " ".join(result.stderr.split())


def test_guidance_may_be_turned_off_by_name(predict: Predict, tmp_path: Path) -> None:
    plain, off = tmp_path / "plain.png", tmp_path / "off.png"
    assert predict("--prompt", "x", "--out", plain).code == 0
    assert predict("--prompt", "x", "--negative-prompt", "y", "--true-cfg-scale", "1", "--out", off).code == 0
    assert np.array_equal(pixels(plain), pixels(off))


# ---- many ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path, image_files: list[Path]) -> Path:
    """An edit with two controls, one with a target, and text to image."""
    rows = [
        {"target": "cat.png", "control": ["cut.png", "cat.png"], "prompt": "put it there"},
        {"target": "cut.png", "control": "cat.png", "prompt": "cut it out"},
        {"target": "cat.png", "prompt": "a cat"},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return tmp_path / "rows.jsonl"


def test_rows_with_and_without_controls_are_compared_with_and_without_a_lora(
    predict: Predict,
    source: Path,
    lora: Path,
    image_files: list[Path],
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, pages = tmp_path / "generated", []
    grid = comparison.compare_grid
    monkeypatch.setattr(comparison, "compare_grid", lambda *page: pages.append(page) or grid(*page))
    options = ("--source", source, "--out", out)
    result = predict(*options, "--lora", lora, "--compare")
    assert result.code == 0, result.stderr
    cut, cat = (Image.open(path) for path in image_files)
    pipeline = stock_pipeline_21(tiny_model("qwen-image-21"))
    expected = {
        "cat": stock_image(pipeline, "put it there", [cut, cat]),
        "cut": stock_image(pipeline, "cut it out", [cat]),
        "cat#2": stock_image(pipeline, "a cat", []),
    }
    rows = dict(zip(expected, pages[0][0], strict=True))
    for name, without in expected.items():
        assert np.array_equal(pixels(out / f"{name}-without-lora.png"), np.asarray(without)), name
        trained = pixels(out / f"{name}.png")
        assert np.abs(trained.astype(int) - np.asarray(without)).max() > 8
        assert np.array_equal(np.asarray(rows[name].with_lora), trained)
        assert [each.mode for each in (*rows[name].controls, rows[name].target)] == ["RGBA"] * (
            len(rows[name].controls) + 1
        )
    assert [len(row.controls) for row in rows.values()] == [2, 1, 0]
    assert np.array_equal(np.asarray(rows["cut"].target), np.asarray(cut))
    assert (out / "compare.png").is_file()
    monkeypatch.setattr(generator, "load_pipeline", None)
    monkeypatch.setattr(PromptEncoder, "_load", None)
    assert "0 new images" in predict(*options, "--lora", lora, "--compare").stderr


@pytest.mark.slow
def test_a_folder_is_edited_with_one_prompt(predict: Predict, tmp_path: Path, tiny_model: TinyModel) -> None:
    (tmp_path / "photos").mkdir()
    transparent("china.jpg", (130, 90)).save(tmp_path / "photos" / "cut.png")
    options = ("--source", tmp_path / "photos", "--prompt", "mirror it", "--out", tmp_path / "out")
    assert predict(*options).code == 0
    (tmp_path / "photos" / "cut.png").replace(tmp_path / "cut.png")
    opened = [Image.open(tmp_path / "cut.png")]
    expected = stock_image(stock_pipeline_21(tiny_model("qwen-image-21")), "mirror it", opened)
    assert np.array_equal(pixels(tmp_path / "out" / "cut.png"), np.asarray(expected))


def test_an_image_that_cannot_be_encoded_is_reported_and_the_others_generated(predict: Predict, tmp_path: Path) -> None:
    """The image can be read, so that only its size for the text encoder refuses it."""
    (tmp_path / "photos").mkdir()
    for name, size in {"sliver": (4000, 20), "cat": (64, 64)}.items():
        image("chelsea.png", size).save(tmp_path / "photos" / f"{name}.png")
    result = predict("--source", tmp_path / "photos", "--prompt", "x", "--out", tmp_path / "out")
    assert result.code == 1, result.stderr
    assert "sliver: the image is too elongated" in " ".join(result.stderr.split())
    assert "1 new image" in result.stderr


def test_a_text_longer_than_the_rope_table_is_refused(
    predict: Predict, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rows of text alone, as `build` counts them, and beside the sizes that the pipeline makes."""
    transparent("china.jpg", (192, 64)).save(tmp_path / "a.png")
    beside: list[list[tuple[int, int, int]]] = []
    monkeypatch.setattr(Family, "longest_text", lambda _, sizes: beside.append([*sizes]) or 10)  # type: ignore[func-returns-value]
    size = (*SIZE, "--height", "64", "--width", "96")
    result = predict("--image", tmp_path / "a.png", "--prompt", "x", "--out", tmp_path / "out.png", size=size)
    rows = token_counter(open_model(str(tiny_model("qwen-image-21")), COMPONENTS))("x", [(192, 64)])
    assert result.code == 2
    assert f"the text has {rows} tokens, the transformer takes 10 beside images of these sizes" in result.stderr
    [[target, control]] = beside
    assert target == (1, 4, 6)
    assert control[1] < control[2]


# ---- from a cache ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shards(source: Path, tmp_path: Path, tiny_model: TinyModel) -> Path:
    """The rows of the source, at the size that `predict` gets here."""
    model = ("--model", tiny_model("qwen-image-21"))
    small = ("--set", f"data.vae_image_size={RESOLUTION**2}", "--dtype", "float32")
    assert run("qwen-cache", "build", source, "--out", tmp_path / "shards", *model, *small).code == 0
    return tmp_path / "shards"


def test_cached_samples_are_generated_without_the_text_encoder(
    predict: Predict,
    shards: Path,
    lora: Path,
    image_files: list[Path],
    tmp_path: Path,
    tiny_model: TinyModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With only the folders that it names, so that nothing else is downloaded."""
    model = tiny_model("qwen-image-21")
    lean = tmp_path / "lean"
    lean.mkdir()
    for name in ("model_index.json", *COMPONENTS_FOR_A_CACHE):
        (lean / name).symlink_to(model / name)
    monkeypatch.setattr(PromptEncoder, "_load", None)
    names = [sample.name for sample in open_cache(shards)]
    keys = [option for name in sorted(names) for option in ("--key", name)]
    options = ("--from-cache", shards, *keys, "--out", tmp_path / "out.png")
    guidance = ("--negative-prompt", "", "--true-cfg-scale", "2")
    result = predict(*options, *guidance, "--lora", lora, "--compare", size=(), model=lean)
    assert result.code == 0, result.stderr
    assert (tmp_path / "out-compare.png").is_file()
    trained = [pixels(tmp_path / f"out-{i}.png") for i in (1, 2, 3)]
    assert predict(*options, *guidance, size=(), model=lean).code == 0
    cut, cat = (Image.open(path) for path in image_files)
    pipeline = stock_pipeline_21(model)
    guided = {"negative_prompt": "", "true_cfg_scale": 2.0}
    by_name = {sample.name: sample for sample in open_cache(shards)}
    inputs = {"cat": ("put it there", [cut, cat]), "cut": ("cut it out", [cat]), "cat#2": ("a cat", [])}
    for i, name in enumerate(sorted(names)):
        _, h, w = by_name[name].img_shapes[0]
        expected = stock_image(pipeline, *inputs[name], **guided, height=16 * h, width=16 * w)
        found = pixels(tmp_path / f"out-{i + 1}.png").astype(int)
        assert np.abs(found - np.asarray(expected)).max() <= 1, name
        assert np.abs(found - trained[i]).max() > 8


def test_cached_samples_are_sampled_like_others(
    shards: Path, distilled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the levels that are given or saved with the model, with keys and values kept unless told otherwise."""
    calls: list[dict[str, Any]] = []

    def record(*arguments: Any, **named: Any) -> Any:
        calls.append({name: named[name] for name in ("num_inference_steps", "sigmas", "use_kv_cache")})
        raise KeyboardInterrupt

    monkeypatch.setattr(many, "generate_cached", record)
    given = ("--sigmas", "1,0.5", "--set", "predict.use_kv_cache=false")
    for options in ((), given):
        command = ("--from-cache", shards, "--key", "cut", "--out", tmp_path / "out.png")
        assert run("qwen-train", "predict", "--model", distilled, *command, *options).code == 130
    assert calls == [
        {"num_inference_steps": 3, "sigmas": (1.0, 0.6, 0.3), "use_kv_cache": True},
        {"num_inference_steps": 2, "sigmas": (1.0, 0.5), "use_kv_cache": False},
    ]


def test_the_page_of_a_cache_shows_its_images_with_their_transparency(
    shards: Path, tmp_path: Path, tiny_model: TinyModel
) -> None:
    decoded = ("--html", tmp_path / "page.html", "--decode", "--model", tiny_model("qwen-image-21"))
    result = run("qwen-cache", "inspect", shards, *decoded, "--set", "predict.dtype=float32")
    assert result.code == 0, result.stderr
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = [base64.b64decode(text) for text in re.findall(r"data:image/webp;base64,([^\"')]+)", page)]
    assert data
    assert any(Image.open(BytesIO(each)).convert("RGBA").getextrema()[3][0] < 128 for each in data)


def test_the_20b_family_has_no_transparency(tiny_model: TinyModel, tmp_path: Path, small_areas: None) -> None:
    """Its control images are over white, its results are RGB."""
    cut = tmp_path / "cut.png"
    Image.new("RGBA", (64, 64), (200, 0, 0, 0)).save(cut)
    options = ("--image", cut, "--prompt", "x", "--height", "64", "--width", "64", "--out", tmp_path / "out.png")
    result = run("qwen-train", "predict", "--model", tiny_model("edit"), *FAST, *options)
    assert result.code == 0, result.stderr
    expected = stock_pipeline(tiny_model("edit"), "edit")(
        image=Image.new("RGB", (64, 64), "white"),
        prompt="x",
        num_inference_steps=2,
        height=64,
        width=64,
        generator=torch.Generator().manual_seed(0),
    ).images[0]
    with Image.open(tmp_path / "out.png") as found:
        assert found.mode == "RGB"
        assert np.array_equal(np.asarray(found), np.asarray(expected))
