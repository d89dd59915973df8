"""Many images in one go: several prompts, a whole source, samples of a cache, with and without the LoRA.

The judge is `qwen-train predict` for one image, which is held to the stock pipeline elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from qwen_cache import open_cache
from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.places import File
from qwen_train.inference import generator
from qwen_train.inference import generator as many
from qwen_train.inference import images as comparison
from qwen_train.inference.images import COMPONENTS, Cell, GenerateJob, control_images
from qwen_train.inference.pipeline import Devices, PromptEncoder

from .support.commands import Result, run
from .support.judge import stock_pipeline
from .support.marks import slow
from .support.photographs import photograph
from .support.sources import write_mixed, write_pairs

TinyModel = Callable[[str], Path]
Predict = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("small_areas")
SIZE = ("--set", "predict.height=64", "--set", "predict.width=64")


@pytest.fixture
def predict(tiny_model: TinyModel) -> Predict:
    def draw(*options: str | Path, variant: str = "edit-plus", size: tuple[str, ...] = SIZE) -> Result:
        small = (*size, "--set", "predict.dtype=float32", "--num-inference-steps", "2")
        return run("qwen-train", "predict", "--model", tiny_model(variant), *small, *options)

    return draw


@pytest.fixture
def image(tmp_path: Path) -> Path:
    photograph("chelsea.png").resize((64, 64)).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


@pytest.fixture
def lora(tmp_path: Path, tiny_model: TinyModel) -> Path:
    """A strong one."""
    torch.manual_seed(0)
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    width = 64
    weights = {f"{name}.lora_A.weight": torch.randn(4, width), f"{name}.lora_B.weight": torch.randn(width, 4)}
    save_file(weights, tmp_path / "lora.safetensors")
    return tmp_path / "lora.safetensors"


def pixels(path: Path) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def two_pairs(folder: Path) -> Path:
    """The edit with two controls, and the one with a mask."""
    write_pairs(folder)
    for name in ("china", "flower"):
        for path in folder.glob(f"*_images/{name}.*"):
            path.unlink()
    return folder


# ---- several prompts, a whole source ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_of_several_prompts_gets_the_image_it_gets_alone(predict: Predict, image: Path, tmp_path: Path) -> None:
    prompts = ["make it red", "make it 黑白"]
    result = predict("--image", image, *(o for p in prompts for o in ("--prompt", p)), "--out", tmp_path / "all.png")
    assert result.code == 0, result.stderr
    assert "2 new images" in result.stderr
    for i, prompt in enumerate(prompts, 1):
        alone = tmp_path / "alone.png"
        assert predict("--image", image, "--prompt", prompt, "--out", alone).code == 0
        assert np.array_equal(pixels(tmp_path / f"all-{i}.png"), pixels(alone))


def test_only_what_changed_is_generated_again(
    predict: Predict, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = two_pairs(tmp_path / "data")
    options = ("--source", source, "--out", tmp_path / "generated")
    assert predict(*options).code == 0
    names = {"cat", "cup"}
    assert {path.name for path in (tmp_path / "generated").iterdir()} == {f"{name}.png" for name in names}
    before = {name: pixels(tmp_path / "generated" / f"{name}.png") for name in names}

    with monkeypatch.context() as patch:
        patch.setattr(generator, "load_pipeline", None)
        patch.setattr(PromptEncoder, "_load", None)
        assert "0 new images in" in predict(*options).stderr
    (source / "target_images" / "cat.txt").write_text("make it blue", encoding="utf-8")
    again = predict(*options)
    assert "1 new image in" in again.stderr
    assert "classifier-free" not in again.stderr
    assert not np.array_equal(pixels(tmp_path / "generated" / "cat.png"), before["cat"])
    for path in source.glob("*_images/cup*"):
        path.unlink()
    for changed in ((), ("--lora", lora), ("--lora", f"{lora}:0.5")):
        assert "1 new image in" in predict(*options, "--seed", "1", *changed).stderr


def test_the_encoder_goes_to_its_device_once_for_all_prompts(
    tiny_model: TinyModel, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 16.6 GB, for two jobs with a prompt and a negative prompt each. The CPU takes the accelerator's place."""
    monkeypatch.setattr("qwen_train.inference.pipeline.check_offload", lambda *_: None)
    monkeypatch.setattr(PromptEncoder, "_offloads", True)
    moves, move = [], Qwen2_5_VLModel.to
    monkeypatch.setattr(Qwen2_5_VLModel, "to", lambda model, *to: moves.append(to) or move(model, *to))
    cpu = torch.device("cpu")
    settings = PredictConfig(dtype="float32", offload="model", negative_prompt="blurry", true_cfg_scale=4)
    folder = open_model(str(tiny_model("edit-plus")), COMPONENTS)
    offloading = generator.Generator(folder, settings, Devices(cpu, cpu, cpu))
    prompts, cell = ("make it red", "make it 黑白"), Cell(config=settings)
    jobs = [GenerateJob(prompt, (File(image),), prompt, cell=cell) for prompt in prompts]
    embeds = many.encode(offloading, jobs)
    assert moves[0] == (cpu,)
    assert ("cpu",) not in moves  # it is on the device until it is freed, and `to` moves nothing that is there
    one_by_one = PromptEncoder(folder, cpu, torch.float32)
    for job in jobs:
        images = control_images(job, folder.family)
        for name, tensor in one_by_one.arguments(images, job.prompt, "blurry", offloading.condition_area).items():
            assert torch.equal(embeds[job.controls, job.prompt][name], tensor)


def test_a_row_that_cannot_be_encoded_is_left_out(predict: Predict, tmp_path: Path) -> None:
    """An image that cannot be read, a prompt with a token that stands for pixels, and a text beyond the RoPE table."""
    source = write_pairs(tmp_path / "data")
    (source / "target_images" / "china.txt").write_text("blue as the sea " * 450)
    (source / "target_images" / "flower.txt").write_text("a <|image_pad|> b")
    (source / "control_images" / "cup.png").write_bytes(b"no image")
    result = predict("--source", source, "--out", tmp_path / "generated", "--compare")
    assert result.code == 1
    assert "cup" in result.stderr
    assert "the prompt contains <|image_pad|>, which stands for an image's pixels" in result.stderr
    assert re.search(r"china: the text has \d+ tokens, the transformer takes 40\d\d beside images", result.stderr)
    assert "1 new image in" in result.stderr
    assert {path.name for path in (tmp_path / "generated").iterdir()} == {"cat.png", "compare.png"}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder of nothing but images, two of which belong together."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for name, photo in {"cat": "chelsea.png", "cup": "coffee.png", "cup_control_1": "china.jpg"}.items():
        photograph(photo).resize((64, 64)).save(folder / f"{name}.png")
    photograph("flower.jpg").resize((64, 64)).save(folder / "more" / "flower.jpg")
    return folder


@pytest.mark.slow
def test_a_folder_of_images_is_edited_with_one_prompt(predict: Predict, photos: Path, tmp_path: Path) -> None:
    (photos / "cat.txt").write_text("its own, which --prompt replaces", encoding="utf-8")
    generated = tmp_path / "generated"
    result = predict("--source", photos, "--prompt", "make it red", "--out", generated)
    assert result.code == 0, result.stderr
    assert {str(path.relative_to(generated)) for path in generated.rglob("*.png")} == {
        "cat.png",
        "cup.png",
        "more/flower.png",
    }
    assert [result.stderr.count(what) for what in ("generating", "images ━")] == [0, 1], "one line for all"
    named = {"cat": ["cat.png"], "cup": ["cup.png", "cup_control_1.png"]}
    for name, files in named.items():
        images = [option for file in files for option in ("--image", photos / file)]
        assert predict(*images, "--prompt", "make it red", "--out", tmp_path / "alone.png").code == 0
        assert np.array_equal(pixels(generated / f"{name}.png"), pixels(tmp_path / "alone.png"))
    assert "0 new images" in predict("--source", photos, "--prompt", "make it red", "--out", generated).stderr
    both = predict("--source", photos, "--prompt", "make it red", "--prompt", "and blue", "--out", tmp_path / "two")
    assert "6 new images" in both.stderr
    assert np.array_equal(pixels(tmp_path / "two" / "cat-1.png"), pixels(generated / "cat.png"))


@pytest.mark.slow
def test_prompts_may_be_beside_the_images_or_in_a_table(predict: Predict, photos: Path, tmp_path: Path) -> None:
    for name, text in {"cat": "make it red", "cup": "mirror it", "more/flower": "make it night"}.items():
        (photos / f"{name}.txt").write_text(text, encoding="utf-8")
    rows = [
        "control,control_1,prompt",
        "photos/cat.png,,make it red",
        "photos/cup.png,photos/cup_control_1.png,mirror it",
    ]
    (tmp_path / "table.csv").write_text("\n".join(rows), encoding="utf-8")
    assert predict("--source", photos, "--out", tmp_path / "beside", "--compare").code == 0
    assert predict("--source", tmp_path / "table.csv", "--out", tmp_path / "listed").code == 0
    for name in ("cat", "cup"):
        listed = pixels(tmp_path / "listed" / "photos" / f"{name}.png")
        assert np.array_equal(pixels(tmp_path / "beside" / f"{name}.png"), listed)
    missing = predict("--source", photos.parent / "photos" / "more", "--out", tmp_path / "generated")
    assert missing.code == 0
    (photos / "more" / "flower.txt").unlink()
    missing = predict("--source", photos, "--out", tmp_path / "other")
    assert missing.code == 2
    assert "flower.txt is missing" in missing.stderr


# ---- side by side ----------------------------------------------------------------------------------------------------


def test_control_without_with_and_target_are_side_by_side(
    predict: Predict, lora: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of edits and of text to image, which is as the stock pipeline has it."""
    table, out, grids = write_mixed(tmp_path / "data"), tmp_path / "generated", []
    source, model, names = (
        table.parent,
        tiny_model("edit-plus"),
        ["cat", "china", "cup", "flower", "rocket", "astronaut"],
    )
    grid = comparison.compare_grid
    monkeypatch.setattr(comparison, "compare_grid", lambda *shown: grids.append(shown) or grid(*shown))
    result = predict("--source", table, "--out", out, "--lora", lora, "--compare")
    assert result.code == 0, result.stderr
    note = "note: for 2 of 6 rows, without control images, QwenImageEditPlusPipeline generates from text alone"
    assert note in result.stderr.splitlines()
    assert f"side by side: {out / 'compare.png'}\n" in result.stderr
    ((rows, captions),) = grids
    assert [caption.partition(": ")[0] for caption in captions] == [f"target_images/{name}" for name in names]
    assert captions[2] == "target_images/cup: invert the colours"
    trained = stock_pipeline.__wrapped__(model, "t2i")  # not the one that other tests share
    trained.load_lora_weights(lora)
    for name, row in zip(names, rows, strict=True):
        target = out / "target_images" / name
        assert np.array_equal(row.with_lora, pixels(target.with_suffix(".png")))
        assert np.array_equal(row.without_lora, pixels(target.with_name(f"{name}-without-lora.png")))
        assert np.array_equal(row.target, pixels(source / "target_images" / f"{name}.png"))
        assert np.abs(np.asarray(row.with_lora).astype(int) - np.asarray(row.without_lora)).max() > 8
        assert [np.asarray(image).tolist() for image in row.controls[:1]] == [
            pixels(path).tolist() for path in [source / "control_images" / f"{name}.png"] if path.exists()
        ]
    for pipeline, shown in ((trained, rows[4].with_lora), (stock_pipeline(model, "t2i"), rows[4].without_lora)):
        arguments = {"prompt": "a rocket", "height": 64, "width": 64, "num_inference_steps": 2}
        expected = pipeline(**arguments, true_cfg_scale=1.0, generator=torch.Generator().manual_seed(0)).images[0]
        assert np.array_equal(shown, np.asarray(expected))
    plain = tmp_path / "plain"
    assert predict("--source", table, "--out", plain).code == 0
    for name in ("cat", "rocket"):
        found = pixels(plain / "target_images" / f"{name}.png")
        assert np.array_equal(found, pixels(out / "target_images" / f"{name}-without-lora.png"))


# ---- from a cache ----------------------------------------------------------------------------------------------------


def test_a_cached_sample_is_generated_without_the_text_encoder(
    predict: Predict, built: Callable[..., Path], lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = open_cache(built("edit-plus"))
    monkeypatch.setattr(PromptEncoder, "_load", None)
    out = tmp_path / "out.png"
    keys = ("--key", "cat", "--key", cache[1].key[:4])
    options = ("--from-cache", built("edit-plus"), *keys, "--out", out)
    result = predict(*options, "--lora", lora, "--compare", size=())
    assert result.code == 0, result.stderr
    by_name = {sample.name: sample for sample in cache}
    _, h, w = by_name["cat"].img_shapes[0]
    assert pixels(tmp_path / "out-1.png").shape == (16 * h, 16 * w, 3)
    assert (tmp_path / "out-compare.png").is_file()
    trained = pixels(tmp_path / "out-1.png")
    folder = tmp_path / "folder"
    result = predict(*options[:-1], folder, "--json", size=())
    names = [f"{name}.png" for name in ("cat", cache[1].name)]
    assert json.loads(result.stdout)["images"] == [str(folder / name) for name in names]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert not np.array_equal(pixels(folder / "cat.png"), trained)
    (tmp_path / "out-compare.png").write_bytes(b"mine")
    assert "was not generated by `qwen-train`" in predict(*options, "--compare", size=()).stderr
    assert (tmp_path / "out-compare.png").read_bytes() == b"mine"


@pytest.mark.slow
def test_an_image_generated_alone_is_generated_again(predict: Predict, image: Path, lora: Path, tmp_path: Path) -> None:
    """First without a thought of it, then side by side."""
    options = ("--image", image, "--prompt", "x", "--lora", lora, "--out", tmp_path / "out.png")
    assert predict(*options).code == 0
    alone = pixels(tmp_path / "out.png")
    for _ in range(2):
        result = predict(*options, "--compare")
        assert result.code == 0, result.stderr
        assert np.array_equal(pixels(tmp_path / "out.png"), alone)
    foreign = tmp_path / "out-compare.png"
    Image.new("RGB", (8, 8)).save(foreign)
    assert "was not generated by" in predict(*options, "--compare").stderr
    assert pixels(foreign).shape == (8, 8, 3)


def test_images_from_a_cache_are_kept_when_the_next_fails(
    predict: Predict, built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = many.generate_cached

    def fails(sample: Any, *rest: Any, **named: Any) -> Any:
        if sample.name == "cup":
            raise KeyboardInterrupt
        return real(sample, *rest, **named)

    monkeypatch.setattr(many, "generate_cached", fails)
    keys = ("--key", "cat", "--key", "cup")
    result = predict("--from-cache", built("edit-plus"), *keys, "--out", tmp_path / "out.png", size=())
    assert result.code == 130
    assert "interrupted" in result.stderr
    assert [path.name for path in tmp_path.glob("out*")] == ["out-1.png"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "nothing to generate (expected --prompt; or --image and --prompt; or --source;"),
        (("--prompt", "x", "--from-cache", "data"), "found --prompt and --from-cache"),
        (("--source", "data", "--image", "a.png"), "--from-cache, found --image and --source)"),
        (
            ("--source", ".", "--out", "generated"),
            "--out: the output folder is inside --source: the next run would read its own results",
        ),
        (("--from-cache", "shards"), "--from-cache CACHE goes with --key KEY"),
        (("--prompt", "x", "--compare", "--merge", "--lora", "{lora}"), "a merged LoRA cannot be turned off again"),
        (
            ("--prompt", "x", "--prompt", "y", "--num-images-per-prompt", "2"),
            "several images per prompt need a single prompt",
        ),
        (("--prompt", "x", "--prompt", "y", "--save-interrupted"), "--save-interrupted is for one image"),
        (("--source", "data", "--out", "a.png"), "--source generates into a folder"),
        (("--prompt", "x", "--prompt", "y", "--image", "no.png"), "no.png: cannot be read: No such file"),
        (("--prompt", "x", "--prompt", "y", "--out", "a.jpg"), "resumable output must be .png"),
        (("--from-cache", "{cache}", "--key", "cat", "--width", "64"), "a cached sample has a fixed size"),
        (
            ("--from-cache", "{cache}", "--key", "nobody"),
            "no sample has this name, key or start of a key (found",
        ),
        (("--from-cache", "{cache}", "--key", "cat", "--negative-prompt", "x"), "only negative prompt in a cache"),
    ],
)
def test_what_does_not_go_together_is_refused(
    predict: Predict, built: Callable[..., Path], lora: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    given = [option.format(lora=lora, cache=built("edit-plus")) for option in options]
    out = ("--out", tmp_path / ("out" if "--source" in options else "out.png"))
    result = predict(*given, *(() if "--out" in options else out), size=())
    assert result.code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_cache_of_another_kind_of_model_is_refused(
    predict: Predict, built: Callable[..., Path], tmp_path: Path
) -> None:
    options = ("--from-cache", built("edit-plus"), "--key", "cat", "--out", tmp_path / "out.png")
    result = predict(*options, variant="edit", size=())
    assert result.code == 2
    expected = "another pipeline (expected QwenImageEditPipeline, found QwenImageEditPlusPipeline)"
    assert expected in " ".join(result.stderr.split())


def test_a_control_image_is_not_overwritten(predict: Predict, image: Path, tmp_path: Path) -> None:
    before = image.read_bytes()
    image.rename(tmp_path / "cat-1.png")
    for prompts in (("--prompt", "x"), ("--prompt", "x", "--prompt", "y")):
        out = tmp_path / ("cat-1.png" if len(prompts) == 2 else "cat.png")
        result = predict("--image", tmp_path / "cat-1.png", *prompts, "--out", out)
        assert result.code == 2
        assert "would replace" in result.stderr
    assert (tmp_path / "cat-1.png").read_bytes() == before


@pytest.mark.parametrize("name", ["compare", "cat-without-lora"])
def test_a_row_called_like_what_is_made_beside_it_is_refused(
    predict: Predict, lora: Path, tmp_path: Path, name: str
) -> None:
    source = write_pairs(tmp_path / "data")
    for folder in ("control_images", "target_images"):
        for path in (source / folder).glob("china.*"):
            path.rename(path.with_stem(name))
    result = predict("--source", source, "--out", tmp_path / "generated", "--lora", lora, "--compare")
    assert result.code == 2
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "generated").exists()


@pytest.mark.slow
def test_weights_behind_a_link_count(predict: Predict, image: Path, tmp_path: Path, tiny_model: TinyModel) -> None:
    linked, other = tmp_path / "linked", tmp_path / "other"
    shutil.copytree(tiny_model("edit-plus"), linked)
    shutil.move(linked / "transformer", tmp_path / "one")
    shutil.copytree(tmp_path / "one", other)
    weights = next(other.glob("*.safetensors"))
    os.utime(weights, (1, 1))
    options = ("--model", linked, "--image", image, "--prompt", "x", "--prompt", "y", "--out", tmp_path / "a.png")
    for folder, count in ((tmp_path / "one", 2), (tmp_path / "one", 0), (other, 2)):
        (linked / "transformer").unlink(missing_ok=True)
        (linked / "transformer").symlink_to(folder)
        assert f"{count} new image" in predict(*options).stderr


def test_a_file_that_was_not_generated_here_stays(predict: Predict, image: Path, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a-1.png")
    result = predict("--image", image, "--prompt", "x", "--prompt", "y", "--out", tmp_path / "a.png")
    assert result.code == 2
    assert "was not generated by" in result.stderr
    assert pixels(tmp_path / "a-1.png").shape == (8, 8, 3)


# ---- a table in place of the modulation ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["edit-plus", slow("edit-2511")])
def test_tabulated_modulation_generates_nearly_the_same(
    predict: Predict, image: Path, lora: Path, tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "tables"))
    options = ("--image", image, "--prompt", "x", "--lora", lora, "--set", "predict.dtype=bfloat16")
    plain, found = tmp_path / "plain.png", tmp_path / "found.png"
    assert predict(*options, "--out", plain, variant=variant).code == 0
    tabulated = ("--set", "predict.tabulated_modulation=true")
    result = predict(*options, *tabulated, "--out", found, variant=variant)
    assert result.code == 0, result.stderr
    difference = np.abs(pixels(plain).astype(int) - pixels(found))
    assert difference.mean() < 2
    assert list((tmp_path / "tables").rglob("*.npy"))
    refused = predict(*options, *tabulated, "--set", "predict.dtype=float32", "--out", found, variant=variant)
    assert "predict.tabulated_modulation needs bfloat16" in refused.stderr


def test_a_lora_on_what_is_tabulated_is_refused(predict: Predict, image: Path, tmp_path: Path) -> None:
    import torch

    name = "transformer.transformer_blocks.0.img_mod.1"
    weights = {f"{name}.lora_A.weight": torch.randn(4, 64), f"{name}.lora_B.weight": torch.randn(384, 4)}
    save_file(weights, tmp_path / "other.safetensors")
    options = (
        "--image",
        image,
        "--prompt",
        "x",
        "--lora",
        tmp_path / "other.safetensors",
        "--out",
        tmp_path / "o.png",
    )
    tabulated = ("--set", "predict.tabulated_modulation=true", "--set", "predict.dtype=bfloat16")
    result = predict(*options, *tabulated)
    assert result.code == 2
    assert "img_mod" in result.stderr
