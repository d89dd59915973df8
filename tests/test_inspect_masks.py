"""`inspect --mask-head`: masks that differ most from the attention come first, as text, JSON and PNG."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.encode.vae import decode_latents, load_vae
from qwen_cache.experimental.masks import HeadMetadata, MaskHead, encoder_of, load_head, predict_mask, save_head
from qwen_cache.html.grid import thumbnail
from qwen_cache.inspect.doubtful_masks import TITLES
from qwen_cache.inspect.flags import overlaid
from qwen_cache.models.folder import open_model

from .support.caches import build as build_cache
from .support.commands import refused, run
from .support.grids import box_of
from .support.scenes import CELLS, CHANNELS, QUICK, RECIPE, Scene, scene, write_scenes
from .support.sources import write_pairs

WRONG = (4, 9)
NAMES = {f"after/{i}.png" for i in WRONG}
ELSEWHERE = RECIPE | {"text_encoder": "another"}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head trained on correct masks."""
    folder = tmp_path_factory.mktemp("head")
    write_scenes(folder / "shards", {"default": [scene(i) for i in range(100, 160)]}, {"default": RECIPE})
    settings = [f"--set=mask_head.{name}={value}" for name, value in QUICK.items()]
    path = folder / "head.safetensors"
    assert run("qwen-train", "mask-head", folder / "shards", "--out", path, "--device", "cpu", *settings).code == 0
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Two masks are not where the attention is; two more samples cannot be compared."""
    scenes = [scene(i, looks_elsewhere=i in WRONG, origin="file" if i == 9 else "difference") for i in range(12)]
    scenes += [Scene("no mask", scenes[0].attention, None), Scene("no attention", None, scenes[0].mask)]
    scenes += [scene(20, looks_elsewhere=True, origin="head")]
    other = [scene(i, looks_elsewhere=True) for i in range(30, 34)]
    names = {"default": RECIPE, "elsewhere": ELSEWHERE}
    return write_scenes(tmp_path / "shards", {"default": scenes, "elsewhere": other}, names)


@pytest.mark.slow
def test_masks_that_differ_from_the_attention_come_first(cache: Path, head: Path) -> None:
    result = run("qwen-cache", "inspect", cache, "--mask-head", head, "--top", "3", "--json", "--vae-device", "cpu")
    assert result.code == 0, result.stderr
    report = json.loads(result.stdout)
    first, second, third = report["disagreements"]
    assert {first["name"], second["name"]} == NAMES
    assert {first["edit_mask_from"], second["edit_mask_from"]} == {"difference", "file"}
    assert max(first["iou"], second["iou"]) < 0.2 < 0.6 < third["iou"]
    assert report["masks_compared"] == 12
    model, samples = load_head(head)[0], {sample.key: sample for sample in open_cache(cache, recipe="default")}
    for each in report["disagreements"]:
        sample = samples[each["key"]]
        assert (sample.name, sample.prompt) == (each["name"], each["prompt"])
        mask = sample["edit_mask"].view(CELLS).numpy() > 0.5
        seen = predict_mask(model, sample["attention"], CELLS).numpy() > 0.5
        assert each["iou"] == pytest.approx((mask & seen).sum() / (mask | seen).sum())
        assert (each["area"], each["head_area"]) == pytest.approx((mask.mean(), seen.mean()))


def test_the_mean_is_over_all_that_were_compared(cache: Path, head: Path) -> None:
    report = json.loads(run("qwen-cache", "inspect", cache, "--mask-head", head, "--top", "99", "--json").stdout)
    ious = [each["iou"] for each in report["disagreements"]]
    assert len(ious) == 12
    assert ious == sorted(ious)
    assert report["mean_iou"] == pytest.approx(sum(ious) / 12)


def test_the_table_has_the_numbers_of_the_json_below_the_overview(
    cache: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    command = ("qwen-cache", "inspect", cache, "--mask-head", head, "--top", "3")
    report, text = json.loads(run(*command, "--json").stdout), run(*command).stdout
    overview, listed = text.split("doubtful masks")
    assert "12 masks compared" in listed
    assert f"mean IoU {report['mean_iou']:.2f}" in listed
    lines, plain = overview.strip().splitlines(), run("qwen-cache", "inspect", cache).stdout.strip().splitlines()
    names = ", ".join(each["name"] for each in report["disagreements"] if each["iou"] < 0.2)
    assert [line.split() for line in lines if line.rstrip() not in map(str.rstrip, plain)] == [
        ["flags", "doubtful", "mask", str(1 + names.count(","))],
        names.split(),
    ]
    rows = [line.split() for line in listed.strip().splitlines()[-3:]]
    for row, each in zip(rows, report["disagreements"], strict=True):
        numbers = [f"{each['iou']:.2f}", f"{each['area']:.1%}", f"{each['head_area']:.1%}"]
        assert row[:4] == [*numbers, each["edit_mask_from"]]
        assert (each["key"].startswith(row[4]), row[5]) == (True, each["name"])


def test_masks_that_hardly_overlap_the_heads_are_flagged(cache: Path, head: Path, tmp_path: Path) -> None:
    command = ("qwen-cache", "inspect", cache, "--mask-head", head, "--top", "11", "--html", tmp_path / "page.html")
    report = json.loads(run(*command, "--json").stdout)
    shared = {each["key"]: each["iou"] for each in report["disagreements"]}
    flagged = [key for key, iou in shared.items() if iou < 0.2]
    assert 0 < len(flagged) < 11
    assert report["recipes"]["default"]["flags"]["doubtful_mask"] == flagged
    assert "doubtful_mask" not in report["recipes"]["elsewhere"]["flags"]  # the head cannot read its attention
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f'href="#{key}"' in page for key in flagged)
    assert f"doubtful mask {len(flagged)}" in run(*command).stdout


def test_a_name_is_shown_as_it_is(tmp_path: Path, head: Path) -> None:
    named = Scene("[bold]cat[/]", scene(0).attention, scene(0).mask)
    cache = write_scenes(tmp_path / "shards", {"default": [named]}, {"default": RECIPE})
    assert "[bold]cat[/]" in run("qwen-cache", "inspect", cache, "--mask-head", head).stdout


# ---- the image -----------------------------------------------------------------------------------------------------


def test_a_mask_overlays_an_image_cell_by_cell() -> None:
    mask = torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 1.0]])
    image = Image.new("RGB", (48, 32), (255, 0, 41))  # as bright as (81, 81, 81): the mask shows on red things too
    shown = np.asarray(overlaid(image, mask.numpy())).astype(int)
    for row in range(2):
        for column in range(3):
            cell = shown[16 * row : 16 * row + 16, 16 * column : 16 * column + 16].reshape(-1, 3)
            assert (cell == cell[0]).all()
            opacity = 0.5 * float(mask[row, column])
            assert cell[0] == pytest.approx((81 + 174 * opacity, 81 - 81 * opacity, 81 - 81 * opacity), abs=2)


@pytest.mark.slow
def test_the_image_shows_what_is_cached(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """From a real build: control and target as the VAE decodes them, and the target under either mask."""
    source, keep = write_pairs(tmp_path / "data"), ("--edit-mask", "file", "--set", "cache.store_attention=true")
    mask = Image.new("L", (120, 120))
    mask.paste(255, (0, 0, 120, 40))
    mask.save(source / "control_images" / "cat_mask.png")  # a pair with a second control
    assert build_cache(source, tmp_path / "shards", tiny_model("edit-plus"), *keep).code == 0
    cache = open_cache(tmp_path / "shards")
    torch.manual_seed(0)
    head = MaskHead(cache[0]["attention"].shape[0], base=4, size=16)
    torch.nn.init.normal_(head.logits.weight, std=3.0)
    save_head(head, tmp_path / "head.safetensors", HeadMetadata(encoder_of(cache.recipe.recipe)))
    (tmp_path / "qwen.yaml").write_text("predict: {dtype: float32}\n")
    named = ("--mask-head", tmp_path / "head.safetensors", "--model", tiny_model("edit-plus"), "--vae-device", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        result = run("qwen-cache", "inspect", tmp_path / "shards", *named, "--save-images", "new/masks.png", "--json")
    assert result.code == 0, result.stderr
    whole = Image.open(tmp_path / "new" / "masks.png")
    vae = load_vae(open_model(str(tiny_model("edit-plus")), ("vae",)), torch.device("cpu"), torch.float32)
    below = 0
    samples = [cache[each["key"]] for each in json.loads(result.stdout)["disagreements"]]
    assert {sample.name for sample in samples} == {"cat", "cup"}
    for sample in samples:
        (_, h, w), (_, hc, wc) = sample.img_shapes[:2]
        control = decode_latents(vae, sample["control_latents"][None, : hc * wc], (16 * wc, 16 * hc))
        target = decode_latents(vae, sample["image_latents"][None], (16 * w, 16 * h))
        masks = sample["edit_mask"].view(h, w), predict_mask(head.eval(), sample["attention"], (h, w))
        images = [control, target, *(overlaid(target, mask.numpy()) for mask in masks)]
        assert len(TITLES) == len(images)
        boxes = [box_of(thumbnail(image, 384), whole) for image in images]
        assert boxes == sorted(boxes)
        assert all(box[1] == boxes[0][1] > below for box in boxes)
        below = boxes[0][3]


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_compared_says_why(cache: Path, head: Path, tmp_path: Path) -> None:
    inspect = ("qwen-cache", "inspect", cache)
    refused(run(*inspect, "--mask-head", tmp_path / "none"), f"{tmp_path / 'none'}: this is not a mask head")
    save_head(MaskHead(CHANNELS, base=4), tmp_path / "other", HeadMetadata("another encoder"))
    refused(run(*inspect, "--mask-head", tmp_path / "other"), "trained on the attention of another encoder")
    without = write_scenes(tmp_path / "without", {"default": [Scene("x", None, scene(0).mask)]}, {"default": RECIPE})
    refused(
        run("qwen-cache", "inspect", without, "--mask-head", head), f"{without}: no sample of this cache has attention"
    )


def test_an_image_needs_a_head_a_name_and_a_model(
    cache: Path, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inspect = ("qwen-cache", "inspect", cache)
    refused(run(*inspect, "--save-images", "a.png"), "--top and --save-images go with --mask-head")
    refused(run(*inspect, "--top", "3"), "--top and --save-images go with --mask-head")
    inspect = (*inspect, "--mask-head", head)
    refused(
        run(*inspect, "--save-images", "a.jpg"), "--save-images: this names no PNG (expected a file such as masks.png"
    )
    refused(run(*inspect, "--save-images", "a.png"), "no model is named", "--model")
    assert not list(tmp_path.glob("a.*"))
