"""`qwen-train mask-head`: what it learns from a cache, how good it says that is, and what it cannot learn from.

The caches are made here, with attention of which it is known where it looks; one is built, for what comes after.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import xxhash
from PIL import ImageDraw

from qwen_cache import open_cache
from qwen_cache.experimental.masks import encoder_of, iou, load_head, predict_mask
from qwen_train.training import mask_head
from qwen_train.training.mask_head import constant_mask_iou

from .support.caches import SMALL
from .support.commands import Result, refused, run
from .support.photographs import photograph
from .support.scenes import CELLS, QUICK, RECIPE, Scene, scene, write_scenes

TinyModel = Callable[[str], Path]


def share_of(target: str) -> float:
    """The place of a target among all: below the share that is held out, or not."""
    return xxhash.xxh3_64_intdigest(target.encode()) / 2**64


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Sequence[Scene]], Path]:
    return lambda scenes: write_scenes(tmp_path / "shards", {"default": scenes}, {"default": RECIPE})


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Result]:
    def make(cache: Path, *options: str | Path, out: str = "head.safetensors", **settings: Any) -> Result:
        named = [f"--set=mask_head.{name}={value}" for name, value in (QUICK | settings).items()]
        return run("qwen-train", "mask-head", cache, "--out", tmp_path / out, "--device", "cpu", *named, *options)

    return make


# ---- what it learns --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_learns_where_attention_is_on_the_mask(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path
) -> None:
    cache = write([scene(i) for i in range(60)])
    assert run("qwen-cache", "verify", cache).code == 0
    result = train(cache, "--json")
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["head"] == str(tmp_path / "head.safetensors")
    assert (found["trained"] + found["held_out"], found["trained"] > found["held_out"] > 5) == (60, True)
    assert found["iou"] > 0.8
    assert 0 < found["constant_mask_iou"] < 0.4
    head, about = load_head(tmp_path / "head.safetensors")
    assert about.encoder == encoder_of(RECIPE)
    unseen = [scene(i) for i in range(100, 120)]
    assert fmean(iou(predict_mask(head, each.attention.half(), CELLS), each.mask) for each in unseen) > 0.8


@pytest.mark.slow
def test_is_judged_by_what_it_has_not_seen(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path
) -> None:
    """Some masks are wrong, and not as many on one side as on the other."""
    cache = write([scene(i, looks_elsewhere=i % 5 == 0) for i in range(40)])
    found = json.loads(train(cache, "--json").stdout)
    head, ious = load_head(tmp_path / "head.safetensors")[0], ([], [])
    for sample in open_cache(cache):
        mask = predict_mask(head, sample["attention"], CELLS)
        is_trained = share_of(sample.row.meta.inputs.target) >= QUICK["validation_split"]
        ious[is_trained].append(iou(mask, sample["edit_mask"].view(CELLS)))
    assert [len(side) for side in ious] == [found["held_out"], found["trained"]]
    assert found["iou"] == pytest.approx(fmean(ious[0]))
    assert found["iou"] != pytest.approx(fmean(ious[1]))


@pytest.mark.slow
def test_says_in_words_how_good_it_is_and_where_it_is_stored(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path
) -> None:
    cache = write([scene(i) for i in range(20)])
    found = json.loads(train(cache, "--json", steps=3).stdout)
    result = train(cache, steps=3)
    assert result.stdout == ""
    assert f"training on {found['trained']} masks, {found['held_out']} held out, on cpu" in result.stderr
    assert (
        f"{tmp_path / 'head.safetensors'}: IoU {found['iou']:.2f} on {found['held_out']} held-out masks"
        in result.stderr
    )
    assert f"one mask for all images would have {found['constant_mask_iou']:.2f}" in result.stderr
    assert found["iou"] < found["constant_mask_iou"]
    assert "→ train on more masks, or set mask_head.steps" in result.stderr
    assert "→" not in train(cache).stderr


@pytest.mark.slow
def test_masks_that_are_always_in_one_place_need_no_head(
    write: Callable[..., Path], train: Callable[..., Result]
) -> None:
    """Then the number to compare with is as high: that of the place."""
    place = torch.zeros(CELLS)
    place[4:12, 3:9] = 1
    found = json.loads(train(write([Scene(str(i), torch.rand(2, 8, 6), place) for i in range(20)]), "--json").stdout)
    assert found["constant_mask_iou"] > 0.9


def test_the_constant_mask_is_the_best_cut_of_the_mean(write: Callable[..., Path]) -> None:
    """By hand: of 3 masks 2 have the left half, 1 has all; the left half has an IoU of 5/6, all has 2/3."""
    left, whole = torch.zeros(CELLS), torch.ones(CELLS)
    left[:, :6] = 1
    cache = open_cache(write([Scene(str(i), torch.rand(2, 8, 6), m) for i, m in enumerate((left, left, whole))]))
    masks = mask_head.MaskedSamples(cache, [0, 1, 2])
    assert constant_mask_iou(masks, masks, 48) == pytest.approx((1 + 1 + 1 / 2) / 3)
    assert constant_mask_iou(masks, mask_head.MaskedSamples(cache, [2]), 48) == pytest.approx(1 / 2)


def test_the_seed_decides_and_an_existing_head_is_replaced(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path
) -> None:
    cache, path = write([scene(i) for i in range(20)]), tmp_path / "new" / "head.safetensors"
    made = []
    for seed in (1, 1, 2):
        assert train(cache, out="new/head.safetensors", seed=seed, steps=4).code == 0
        made.append(path.read_bytes())
    assert made[0] == made[1] != made[2]


def test_masks_predicted_by_a_head_are_not_learned(write: Callable[..., Path], train: Callable[..., Result]) -> None:
    mixed = [scene(i, origin=("difference", "file", "head")[i % 3]) for i in range(30)]
    found = json.loads(train(write(mixed), "--json", steps=1).stdout)
    assert found["trained"] + found["held_out"] == 20


@pytest.mark.slow
def test_no_part_of_a_model_is_imported(write: Callable[..., Path], tmp_path: Path) -> None:
    """Neither for training a head, nor for finding where it disagrees."""
    cache, head = write([scene(i) for i in range(20)]), tmp_path / "head.safetensors"
    named = [f"--set=mask_head.{name}={value}" for name, value in (QUICK | {"steps": 1}).items()]
    commands = [
        ("qwen_train", ["mask-head", str(cache), "--out", str(head), "--device", "cpu", *named]),
        ("qwen_cache", ["inspect", str(cache), "--mask-head", str(head), "--vae-device", "cpu"]),
    ]
    code = "import sys\n"
    for program, arguments in commands:
        code += f"sys.argv[1:] = {arguments}\ntry: __import__('{program}.cli').cli.main()\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert "20 masks compared" in done.stdout
    heavy = ("transformers.models", "diffusers", "peft", "accelerate")
    assert not [name for name in done.stdout.splitlines()[-1].split() if name.startswith(heavy)]


# ---- what it is for --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_build_of_the_same_source_takes_the_head(
    tiny_model: TinyModel, train: Callable[..., Result], tmp_path: Path
) -> None:
    source = tmp_path / "data"
    for role in ("control_images", "target_images"):
        (source / role).mkdir(parents=True)
    for i, name in enumerate(("chelsea.png", "china.jpg", "coffee.png", "rocket.jpg")):
        image = photograph(name).resize((128, 128))
        image.save(source / "control_images" / f"{i}.png")
        if i:  # the first is as it was, and so nothing can be learned from it
            ImageDraw.Draw(image).rectangle((16 * i, 48, 16 * i + 47, 111), fill=(255, 0, 255))
        image.save(source / "target_images" / f"{i}.png")
        (source / "target_images" / f"{i}.txt").write_text(f"paint box {i}", encoding="utf-8")
    build = ("qwen-cache", "build", source, "--model", tiny_model("edit-plus"), *SMALL)
    keep = ("--edit-mask", "diff", "--set", "cache.store_attention=true")
    assert run(*build, "--out", tmp_path / "shards", *keep).code == 0
    targets = open_cache(tmp_path / "shards").table["target"].to_pylist()[1:]
    one_held_out = fmean(sorted(map(share_of, targets))[:2])
    found = train(tmp_path / "shards", "--json", steps=3, validation_split=one_held_out)
    assert (json.loads(found.stdout)["trained"], json.loads(found.stdout)["held_out"]) == (2, 1)
    result = run(
        *build, "--out", tmp_path / "by-head", "--edit-mask", "head", "--mask-head", tmp_path / "head.safetensors"
    )
    assert result.code == 0, result.stderr
    assert open_cache(tmp_path / "by-head").table["edit_mask_from"].to_pylist() == ["head"] * 4


# ---- what it cannot do -----------------------------------------------------------------------------------------------


def without(what: str) -> list[Scene]:
    return [
        Scene(each.name, None if what != "mask" else each.attention, None if what == "mask" else each.mask)
        for each in map(scene, range(12))
    ]


@pytest.mark.parametrize(
    ("scenes", "message"),
    [
        (without("attention"), "no sample of this cache has attention"),
        (without("mask"), "no sample of this cache has a mask"),
        (
            [*without("attention")[:6], *without("mask")[6:]],
            "no sample of this cache has both attention and a mask that is not from a head",
        ),
        (
            [scene(i, origin="head") for i in range(12)],
            "no sample of this cache has both attention and a mask that is not from a head",
        ),
        ([], "no sample of this cache has attention"),
    ],
)
def test_a_cache_that_teaches_nothing_is_named(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path, scenes: list[Scene], message: str
) -> None:
    refused(train(write(scenes)), f"{tmp_path / 'shards'}: {message}", "→ run `qwen-cache build` again with")
    assert not (tmp_path / "head.safetensors").exists()


def test_the_old_format_has_nothing_to_learn_from(built: Callable[..., Path], train: Callable[..., Result]) -> None:
    refused(train(built("edit-plus", ("--format", "v1"))), "format v1 has neither attention nor masks", "--format v2")


@pytest.mark.parametrize(("share", "side"), [(1e-9, "validate"), (1 - 1e-9, "train")])
def test_too_few_targets_to_hold_any_out(
    write: Callable[..., Path], train: Callable[..., Result], share: float, side: str
) -> None:
    scenes = [scene(i) for i in range(12)]
    refused(
        train(write(scenes), validation_split=share), f"mask_head.validation_split leaves nothing to {side}", "of 12"
    )


def test_a_loss_that_is_no_number_ends_it(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path
) -> None:
    result = train(write([scene(i) for i in range(12)]), learning_rate=1e20)
    refused(result, "the loss of step", "is not a number (found", "→ lower mask_head.learning_rate")
    assert not (tmp_path / "head.safetensors").exists()


def test_when_interrupted_nothing_is_written(
    write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write([scene(i) for i in range(12)])
    path = tmp_path / "head.safetensors"
    path.write_bytes(b"mine")
    with monkeypatch.context() as patch:
        stock, calls = torch.optim.AdamW.step, iter(range(100))

        def step(*arguments: Any) -> None:
            if next(calls) == 3:
                raise KeyboardInterrupt
            stock(*arguments)

        patch.setattr(torch.optim.AdamW, "step", step)
        result = train(cache)
    assert result.code == 130
    assert path.read_bytes() == b"mine"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["head.safetensors", "shards"]


def test_a_folder_is_no_file(write: Callable[..., Path], train: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "head.safetensors").mkdir()
    refused(
        train(write([])), f"{tmp_path / 'head.safetensors'}: a folder has this name", "→ give another name with --out"
    )
