"""`predict --grid`: each cell is the image of `predict` with its values, bit for bit, with one loading of the model."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from qwen_cache.settings.sections import LoraConfig, PredictConfig
from qwen_train.inference import generator, images
from qwen_train.inference.images import grid_cells, parse_axes
from qwen_train.inference.pipeline import PromptEncoder
from qwen_train.lora.adapter import add_lora, lora_weights, write_lora
from qwen_train.model.loading import stock_class

from .support.commands import Result, refused, run
from .support.grids import box_of
from .support.photographs import photograph

TinyModel = Callable[[str], Path]
Predict = Callable[..., Result]
pytestmark = pytest.mark.usefixtures("small_areas")
SETTINGS = {"true_cfg_scale": ("1", "2.5"), "seed": ("0", "7"), "num_inference_steps": ("2", "3")}
PROMPT = "make it night"
LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture
def predict(tiny_model: TinyModel) -> Predict:
    def draw(*options: str | Path, variant: str = "t2i", prompt: str = PROMPT) -> Result:
        small = ("--height", "64", "--width", "64", "--set", "predict.dtype=float32", "--set")
        steps = "predict.num_inference_steps=2"
        return run("qwen-train", "predict", "--model", tiny_model(variant), *small, steps, "--prompt", prompt, *options)

    return draw


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints and the finished LoRA, each strong enough to be seen."""
    for seed, name in enumerate(("checkpoint-100", "checkpoint-20", ".")):
        path = tmp_path / "run" / name
        path.mkdir(parents=True, exist_ok=True)
        write_strong_lora(path / LORA, seed)
    return tmp_path / "run"


def write_strong_lora(path: Path, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    name = "transformer.transformer_blocks.0.attn.to_out.0"
    shapes = {f"{name}.lora_A.weight": (4, 64), f"{name}.lora_B.weight": (64, 4)}
    save_file({key: torch.randn(shape, generator=noise) for key, shape in shapes.items()}, path)


def pixels(path: Path | str) -> Any:
    return np.asarray(Image.open(path).convert("RGB"))


def cell_of(document: dict[str, Any], **values: Any) -> Path:
    """The image of the cell with these values."""
    (image,) = [cell["image"] for cell in document["cells"] if cell["values"] == values]
    return Path(image)


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_cells_are_the_images_of_predict_alone_with_one_loading(
    predict: Predict, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At several strengths and training steps; and a second run adds what is new."""
    photograph("chelsea.png").resize((64, 64)).save(tmp_path / "cat.png")
    out, loaded, called = tmp_path / "out.png", [], []
    load, call = generator.load_pipeline, generator.Generator.call_pipeline
    with monkeypatch.context() as patch:
        patch.setattr(generator, "load_pipeline", lambda *a, **n: loaded.append(a) or load(*a, **n))
        patch.setattr(generator.Generator, "call_pipeline", lambda *a, **n: called.append(a) or call(*a, **n))
        image, strengths = ("--image", tmp_path / "cat.png"), ("--grid", "lora_weight=0,.5,-1")
        options = (*image, "--lora", folder, "--out", out, "--json", *strengths)
        result = predict(*options, "--grid", "checkpoint=20,final", variant="edit-plus")
        assert result.code == 0, result.stderr
        assert (len(loaded), len(called)) == (1, 5)  # without the LoRA, one image is that of both steps
    document = json.loads(result.stdout)
    assert document["axes"] == [
        {"name": "lora_weight", "values": [0, 0.5, -1]},
        {"name": "checkpoint", "values": [20, "final"]},
    ]
    combinations = [*itertools.product((20, "final"), (0, 0.5, -1))]
    names = [f"out-lora_weight={weight}-checkpoint={step}.png" for step, weight in combinations]
    assert document["images"] == [str(tmp_path / name) for name in names]
    assert document["grid"] == str(tmp_path / "out-grid.png")

    images: dict[str, Any] = {}
    for step, weight in combinations:
        path = folder / {20: "checkpoint-20", "final": ""}[step]
        lora = f"{path}:{weight}" if weight else ""
        if lora not in images:
            named = ("--lora", lora) if weight else ()
            assert predict(*image, *named, "--out", tmp_path / "alone.png", variant="edit-plus").code == 0
            images[lora] = pixels(tmp_path / "alone.png")
        assert np.array_equal(pixels(cell_of(document, lora_weight=weight, checkpoint=step)), images[lora])
    assert all(np.abs(a.astype(int) - b).max() > 8 for a, b in itertools.combinations(images.values(), 2))

    whole = Image.open(tmp_path / "out-grid.png")
    boxes = {}
    for values in combinations[1:3] + combinations[4:5]:
        shown = Image.open(cell_of(document, checkpoint=values[0], lora_weight=values[1]))
        boxes[values] = box_of(shown.resize((128, 128), Image.Resampling.LANCZOS), whole)
    assert boxes[20, 0.5][2] < boxes[20, -1][0]
    assert boxes[20, 0.5][::2] == boxes["final", 0.5][::2]
    assert boxes[20, 0.5][3] < boxes["final", 0.5][1]

    with monkeypatch.context() as patch:
        patch.setattr(generator, "load_pipeline", None)
        patch.setattr(PromptEncoder, "_load", None)
        again = predict(*options, "--grid", "checkpoint=20,final", variant="edit-plus")
    assert again.code == 0, again.stderr
    assert "0 new images in" in again.stderr
    assert json.loads(again.stdout)["already_there"] == document["images"]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("names", [*itertools.combinations(SETTINGS, 2)], ids="-".join)
def test_steps_guidance_and_noise_are_those_of_predict(
    names: tuple[str, str], predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative prompt is given where the guidance is on."""
    call, given_negative = generator.Generator.call_pipeline, set()

    def seen(self: Any, images: Any, embeds: Any, *, config: Any = None, **named: Any) -> Any:
        given_negative.add((config and config.true_cfg_scale, "negative_prompt_embeds" in embeds))
        return call(self, images, embeds, config=config, **named)

    grid = [option for name in names for option in ("--grid", f"{name}={','.join(SETTINGS[name])}")]
    with monkeypatch.context() as patch:
        patch.setattr(generator.Generator, "call_pipeline", seen)
        result = predict("--negative-prompt", "blurry", *grid, "--out", tmp_path / "out.png", "--json")
    assert result.code == 0, result.stderr
    assert given_negative == ({(1.0, False), (2.5, True)} if "true_cfg_scale" in names else {(None, True)})
    document, shown = json.loads(result.stdout), set()
    for values in itertools.product(*(SETTINGS[name] for name in names)):
        cell = dict(zip(names, values, strict=True))
        found = pixels(cell_of(document, **{name: float(value) for name, value in cell.items()}))
        shown.add(found.tobytes())
        if len(shown) in (2, 3):  # each value of each axis once
            given = [option for name, value in cell.items() for option in (f"--{name.replace('_', '-')}", value)]
            assert predict("--negative-prompt", "blurry", *given, "--out", tmp_path / "alone.png").code == 0
            assert np.array_equal(found, pixels(tmp_path / "alone.png"))
    assert len(shown) == 4


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["t2i", "qwen-image-21"])
def test_adapters_of_other_types_replace_each_other(
    variant: str, predict: Predict, tiny_model: TinyModel, tmp_path: Path
) -> None:
    run_of, transformer_of = tmp_path / "run", tiny_model(variant) / "transformer"
    types = {"checkpoint-1": "lokr", "checkpoint-2": "oft", "checkpoint-3": "loha"}
    for name, kind in types.items():
        transformer = stock_class(transformer_of).from_pretrained(transformer_of)
        add_lora(transformer, LoraConfig(type=kind, **({"oft_block_size": 16} if kind == "oft" else {"rank": 2})))
        noise = torch.Generator().manual_seed(1)
        for tensor in lora_weights(transformer).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=noise))
        (run_of / name).mkdir(parents=True)
        write_lora(transformer, lora_weights(transformer), run_of / name / LORA, {})
    steps, options = ("--grid", "checkpoint=1,2,3", "--lora", run_of), ("--out", tmp_path / "out.png", "--json")
    result = predict("--grid", "lora_weight=1,0", *steps, *options, variant=variant)
    assert result.code == 0, result.stderr
    document = json.loads(result.stdout)
    for step, path in enumerate(types, 1):
        assert predict("--lora", run_of / path, "--out", tmp_path / "alone.png", variant=variant).code == 0
        found = pixels(cell_of(document, lora_weight=1, checkpoint=step))
        assert np.array_equal(found, pixels(tmp_path / "alone.png"))
        assert not np.array_equal(found, pixels(cell_of(document, lora_weight=0, checkpoint=step)))
    refused(
        predict("--grid", "lora_weight=0,0.5,1", *steps, *options), "an OFT has no scale (expected weight 1, found 0.5)"
    )


def test_finished_cells_are_listed_and_kept_after_an_interruption(
    predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--grid", "seed=3,4", "--out", tmp_path / "out.png", "--json")
    call, calls = generator.Generator.call_pipeline, itertools.count()

    def interrupted(*arguments: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return call(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(generator.Generator, "call_pipeline", interrupted)
        result = predict(*options)
    first, second = (str(tmp_path / f"out-seed={seed}.png") for seed in (3, 4))
    assert result.code == 130
    document = json.loads(result.stdout)
    assert [cell["image"] for cell in document["cells"]] == [first, None]
    assert (document["images"], document["grid"]) == ([first], None)
    before = Path(first).stat().st_mtime_ns
    document = json.loads(predict(*options).stdout)
    assert (document["images"], document["already_there"]) == ([second], [first])
    assert Path(first).stat().st_mtime_ns == before
    assert "2 new images in" in predict(*options, "--num-inference-steps", "3").stderr


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["seeds=1,2"], ["unknown axis", "lora_weight or checkpoint or num_inference_steps", "did you mean seed?"]),
        (["strength=0,1"], ["unknown axis"]),
        (["steps=2,4"], ["did you mean num_inference_steps?"]),
        (["seed"], ["--grid takes AXIS=V1,V2,… (expected such as seed=0,1,2, found seed)"]),
        (["seed=1,x"], ["--grid seed: not a valid value (expected an integer", "found x"]),
        (["seed="], ["--grid seed: not a valid value"]),
        (["seed=-1"], ["--grid seed: not a valid value (expected greater than or equal to 0, found -1)"]),
        (["num_inference_steps=0"], ["--grid num_inference_steps", "greater than 0"]),
        (["seed=1,2,01"], ["--grid seed: a value is given twice (found 1)"]),
        ([f"seed={','.join(map(str, range(21)))}"], ["--grid seed: too many values (expected at most 20, found 21)"]),
        (["seed=1", "seed=2"], ["this axis is given twice (found seed)"]),
        (["seed=1", "true_cfg_scale=2", "lora_weight=1"], ["one or two axes, found 3"]),
        (["true_cfg_scale=1,2"], ["without a negative prompt there is nothing to guide away from"]),
        (["num_inference_steps=4", "--sigmas", "1,0.5"], ["predict.sigmas are the noise levels"]),
        (
            ["lora_weight=0,1"],
            ["--grid lora_weight: this axis is about one LoRA (expected --lora PATH, found no --lora)"],
        ),
        (["lora_weight=1", "--lora", "a", "--lora", "b"], ["found 2 of them"]),
        (
            ["lora_weight=1", "--lora", "{run}:0.5"],
            ["the weight is given twice", "--lora …:0.5 and --grid lora_weight"],
        ),
        (
            ["lora_weight=nan", "--lora", "{run}"],
            ["--grid lora_weight: not a valid value (expected a number, found nan)"],
        ),
        (["lora_weight=1", "--lora", "nowhere"], ["nowhere: no LoRA here"]),
        (
            ["lora_weight=1", "--lora", "{run}", "--merge"],
            ["--merge and --grid lora_weight", "cannot be changed again"],
        ),
        (["checkpoint=20,30", "--lora", "{run}"], ["has no such checkpoint (expected 20, 100, final, found 30)"]),
        (["checkpoint=last", "--lora", "{run}"], ["expected a training step, or final, found last"]),
        (["checkpoint=20", "--lora", "{run}/checkpoint-20"], ["expected final, found 20"]),
        (["checkpoint=20", "--lora", "{run}/checkpoint-20/" + LORA], ["checkpoints are in the folder of a run"]),
        (["seed=1", "--compare"], ["--grid and --compare exclude each other", "lora_weight=0,1"]),
        (["seed=1", "--save-interrupted"], ["--grid and --save-interrupted exclude each other"]),
        (["seed=1", "--num-images-per-prompt", "2"], ["--grid and --num-images-per-prompt 2 exclude each other"]),
        (["seed=1", "--prompt", "another"], ["--grid and a second --prompt exclude each other"]),
        (["seed=1", "--source", "data"], ["--grid and --source exclude each other"]),
        (["seed=1", "--out", "a.jpg"], ["resumable output must be .png"]),
    ],
)
def test_what_cannot_be_a_grid_is_refused_before_a_model_is_opened(
    options: list[str], parts: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [option.format(run=folder) for option in options]
    axes = list(itertools.takewhile(lambda option: not option.startswith("--"), given))
    grids = [option for axis in axes for option in ("--grid", axis)]
    result = run("qwen-train", "predict", "--prompt", "x", "--model", "nothing-here", *grids, *given[len(axes) :])
    refused(result, *parts)


def test_a_file_in_the_way_and_settings_of_a_cell_are_refused_before_loading(
    predict: Predict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "_load", None)
    mine = tmp_path / "out-grid.png"
    Image.new("RGB", (8, 8)).save(mine)
    refused(
        predict("--grid", "seed=0,1", "--out", tmp_path / "out.png"), str(mine), "was not generated by `qwen-train`"
    )
    refused(predict("--grid", "num_inference_steps=2,1", "--out", tmp_path / "b.png"), "one step is too few")
    assert pixels(mine).shape == (8, 8, 3)


def test_values_are_written_in_one_way(folder: Path) -> None:
    config = PredictConfig()
    axes = parse_axes(["lora_weight=-0.50, 1.0,-0,1e-7", "checkpoint=final,0100"], config)
    assert [axis.values for axis in axes] == [(-0.5, 1, 0, 1e-07), ("final", 100)]
    found = grid_cells(axes, config, [str(folder)])
    assert found[0].name("out") == "out-lora_weight=-0.5-checkpoint=final"
    assert [[lora.weight for lora in cell.loras] for cell in found[:4]] == [[-0.5], [1.0], [], [1e-07]]
    assert found[4].loras[0].file == folder / "checkpoint-100" / LORA


def test_a_large_grid_has_small_cells() -> None:
    assert images.thumbnail_height(3, 1, 1.0) == 384
    for ratio in (0.5, 1.0, 2.0):
        height = images.thumbnail_height(20, 20, ratio)
        assert 400 * height * height * ratio <= images.MOST_PIXELS
