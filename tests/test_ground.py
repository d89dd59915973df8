"""`qwen-cache ground`: its outputs equal those of FrozenQwen and the head, and its errors come before any work.

The reference is the same work by hand: resize, one pass, the head, and a resize to the image.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from qwen_cache.experimental.attention import FrozenQwen, load_sam, refine
from qwen_cache.experimental.masks import HeadMetadata, MaskHead, load_head, predict_mask, save_head
from qwen_cache.models.encoders import load_processor, load_text_encoder
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import open_model
from qwen_cache.sources.sizes import calculate_dimensions

from .support.commands import Result, run
from .support.photographs import photograph
from .support.sam import tiny_sam

CHANNELS = 16  # of the tiny encoder: 4 layers of 4 heads
PROMPT = "make the cat blue, 然后 keep the eyes"
CONDITION, CELLS = (128, 96), (56, 74)
"""The cat: width and height for the text encoder at 112², rows and columns of 16 pixels at 1024²."""
OUTPUTS = ("mask.png", "mask-overlay.png")

Ground = Callable[..., Result]


@pytest.fixture
def cat(tmp_path: Path) -> Path:
    """Not square, with sides that no encoder takes."""
    path = tmp_path / "cat.png"
    photograph("chelsea.png").resize((151, 113)).save(path)
    return path


@pytest.fixture
def head(tiny_model: Callable[[str], Path], cat: Path) -> Path:
    """An untrained head with a bias that masks a fifth of the cat."""
    torch.manual_seed(0)
    made = MaskHead(CHANNELS, base=4, size=16).requires_grad_(False)
    torch.nn.init.normal_(made.logits.weight, std=5)
    made.logits.bias -= made(by_hand(tiny_model("edit"), [scaled_cat(cat)], "the cat", None)[None]).quantile(0.8)
    path = cat.with_name("head.safetensors")
    save_head(made, path, HeadMetadata(encoder="the tiny one"))
    return path


@pytest.fixture
def ground(tiny_model: Callable[[str], Path], tmp_path: Path) -> Ground:
    """The command, with small images for the encoder."""

    def call(*arguments: str | Path, variant: str = "edit") -> Result:
        given = ["--model", tiny_model(variant), "--set", "data.condition_image_size=12544", "--dtype", "float32"]
        return run("qwen-cache", "ground", "--out", tmp_path / "mask.png", *given, *arguments)

    return call


def by_hand(model: Path, images: list[Image.Image], text: str, phrase: str | None) -> torch.Tensor:
    """The attention on the first image."""
    folder = open_model(str(model), ("text_encoder", "processor"))
    whole = load_text_encoder(folder.component("text_encoder"), torch.float32)
    encoder = FrozenQwen(whole, load_processor(folder), template=PIPELINES[folder.pipeline].template)
    return encoder.ground(images, text, phrase).attention[0][0]


def grey(mask: torch.Tensor, size: tuple[int, int]) -> np.ndarray:
    """The mask at the image's size, in 0..255."""
    scaled = interpolate(mask[None, None], size[::-1], mode="bilinear", antialias=True)[0, 0]
    return scaled.mul(255).numpy()


def scaled_cat(cat: Path) -> Image.Image:
    return Image.open(cat).resize(CONDITION, Image.Resampling.LANCZOS)


def assert_mask(path: Path, expected: np.ndarray) -> None:
    """Within one grey value."""
    with Image.open(path) as image:
        assert image.mode == "L"
        mask = np.asarray(image, dtype=np.float32)
    assert mask.shape == expected.shape
    assert np.abs(mask - expected).max() <= 1
    assert mask.max() - mask.min() > 100, "nothing to see"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("words", "text", "phrase"),
    [
        (["--phrase", "the cat"], "the cat", None),
        (["--phrase", "the cat", "--prompt", PROMPT], PROMPT, "the cat"),
        (["--prompt", PROMPT.replace("the cat", "[[the cat]]")], PROMPT, "the cat"),
        (["--prompt", PROMPT], PROMPT, None),
    ],
)
def test_a_mask_is_the_output_of_the_head_for_the_phrase(
    ground: Ground, tiny_model: Callable[[str], Path], cat: Path, head: Path, words: list[str], text: str, phrase: str
) -> None:
    result = ground("--image", cat, "--head", head, *words)
    assert result.code == 0, result.stderr
    attention = by_hand(tiny_model("edit"), [scaled_cat(cat)], text, phrase)
    mask = predict_mask(load_head(head)[0], attention, CELLS)
    assert_mask(cat.parent / "mask.png", grey(mask, (151, 113)))


def test_the_mask_is_for_the_first_of_several_images(
    ground: Ground, tiny_model: Callable[[str], Path], cat: Path, head: Path
) -> None:
    china = cat.with_name("china.png")
    photograph("china.jpg").resize((90, 140)).save(china)
    assert ground("--image", cat, "--image", china, "--prompt", PROMPT, "--head", head, variant="edit-plus").code == 0
    images = [scaled_cat(cat), Image.open(china).resize((96, 128), Image.Resampling.LANCZOS)]
    attention = by_hand(tiny_model("edit-plus"), images, PROMPT, None)
    assert_mask(cat.parent / "mask.png", grey(predict_mask(load_head(head)[0], attention, CELLS), (151, 113)))


def test_without_a_head_the_result_is_reported_as_a_heat_map(
    ground: Ground, tiny_model: Callable[[str], Path], cat: Path, head: Path
) -> None:
    result = ground("--image", cat, "--phrase", "the cat")
    assert "a heat map of the attention, not a mask" in result.stderr
    attention = by_hand(tiny_model("edit"), [scaled_cat(cat)], "the cat", None)
    mean = torch.stack([channel / channel.sum() for channel in attention]).mean(0)
    mean = (mean - mean.min()) / (mean.max() - mean.min())
    assert_mask(cat.parent / "mask.png", grey(mean, (151, 113)))
    assert "heat map" not in ground("--image", cat, "--phrase", "the cat", "--head", head).stderr


def test_sam_refines_the_mask_of_the_head(
    ground: Ground, tiny_model: Callable[[str], Path], cat: Path, head: Path
) -> None:
    sam = cat.parent / "sam"
    tiny_sam().save_pretrained(sam)
    assert ground("--image", cat, "--phrase", "the cat", "--head", head, "--sam", sam).code == 0
    attention = by_hand(tiny_model("edit"), [scaled_cat(cat)], "the cat", None)
    mask = predict_mask(load_head(head)[0], attention, CELLS)
    refined = refine(load_sam(sam), Image.open(cat).convert("RGB"), (mask / (1 - mask)).log())
    assert_mask(cat.parent / "mask.png", refined.mul(255).numpy())


def test_the_text_encoder_of_qwen_image_21_sees_the_images_at_the_size_of_the_vae(
    tiny_model: Callable[[str], Path], cat: Path
) -> None:
    model = tiny_model("qwen-image-21")
    width, height = calculate_dimensions(128 * 128, (151, 113))
    resized = Image.open(cat).convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    attention = by_hand(model, [resized], "the cat", None)
    assert attention.shape == (16, height // 32, width // 32)
    head = MaskHead(16, base=4, size=16).requires_grad_(False)
    torch.nn.init.normal_(head.logits.weight, std=5)
    head.logits.bias -= head(attention[None]).quantile(0.8)
    save_head(head, cat.with_name("head.safetensors"), HeadMetadata(encoder="the tiny one"))
    words = ["--image", cat, "--phrase", "the cat", "--head", cat.with_name("head.safetensors"), "--model", model]
    options = ["--set", "data.vae_image_size=16384", "--dtype", "float32", "--out", cat.with_name("mask.png")]
    result = run("qwen-cache", "ground", *words, *options)
    assert result.code == 0, result.stderr
    assert_mask(cat.with_name("mask.png"), grey(predict_mask(head, attention, CELLS), (151, 113)))


def test_the_overlay_is_red_where_the_mask_is_and_nowhere_else(ground: Ground, cat: Path, head: Path) -> None:
    assert ground("--image", cat, "--phrase", "the cat", "--head", head).code == 0
    mask, shown, image = (
        np.asarray(Image.open(cat.with_name(name))).astype(int) for name in ("mask.png", "mask-overlay.png", "cat.png")
    )
    assert (shown == image).all(2)[mask == 0].all()
    redder = (shown[..., 0] >= image[..., 0]) & (shown[..., 1:] < image[..., 1:]).any(2)
    assert redder[mask > 127].all()
    red = (shown == (255, 0, 0)).all(2)
    inside = np.pad(mask > 127, 1, mode="edge")
    beside = ~(inside[:-2, 1:-1] & inside[2:, 1:-1] & inside[1:-1, :-2] & inside[1:-1, 2:])
    assert red[(mask > 127) & beside].all(), "the outline is within the mask, and closed"
    assert 0 < red.sum() < (mask > 127).sum() / 2, "the inside of the outline can be seen"


def test_the_summary_has_the_masked_fraction_and_box(ground: Ground, cat: Path, head: Path) -> None:
    outputs = [cat.with_name(name) for name in ("[bold].png", "[bold]-overlay.png")]
    result = ground("--image", cat, "--phrase", "the cat", "--head", head, "--out", outputs[0])
    mask = np.asarray(Image.open(outputs[0])) / 255
    rows, columns = np.nonzero(mask > 0.5)
    box = f"from ({columns.min()}, {rows.min()}) to ({columns.max() + 1}, {rows.max() + 1}) of 151×113"
    undecided = f"undecided (0.1 to 0.9): {((mask > 0.1) & (mask < 0.9)).mean():.1%}"
    assert f"masked: {(mask > 0.5).mean():.1%}, {box}; {undecided}" in result.stderr
    assert f"{outputs[0]}, {outputs[1]}: " in result.stderr


def test_only_the_text_encoder_is_needed(
    tiny_model: Callable[[str], Path], cat: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has no other component; without --out, outputs go to the current folder."""
    model = cat.parent / "model"
    for part in ("text_encoder", "processor"):
        shutil.copytree(tiny_model("edit") / part, model / part)
    shutil.copy(tiny_model("edit") / "model_index.json", model)
    monkeypatch.chdir(cat.parent)
    small = ["--set", "data.condition_image_size=12544", "--text-device", "cpu"]
    result = run("qwen-cache", "ground", "--image", "cat.png", "--phrase", "cat", "--model", "model", *small)
    assert result.code == 0, result.stderr
    assert {path.name for path in cat.parent.glob("*.png")} == {"cat.png", *OUTPUTS}


def refused(result: Result, folder: Path, *messages: str) -> None:
    assert result.code == 2
    assert "Traceback" not in result.stderr
    for message in messages:
        assert message in result.stderr
    assert not [name for name in OUTPUTS if (folder / name).exists()]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([], ["no phrase to ground", '--phrase "the red car"']),
        (["--phrase", " "], ["no phrase to ground"]),
        (["--phrase", "the dog", "--prompt", PROMPT], ["the phrase 'the dog' is not in the prompt", PROMPT]),
        (["--phrase", "the", "--prompt", PROMPT], ["is in the prompt 2 times", "[[the]]"]),
        (["--phrase", "a", "--prompt", "make [[the cat]] blue"], ["are marked in the text and given beside it"]),
        (["--phrase", "cat", "--out", "mask.jpg"], ["a mask is a PNG", "mask.jpg"]),
        (["--phrase", "cat", "--sam", "sam"], ["--sam refines the mask of a head", "give --head"]),
        (["--phrase", "cat", "--head", "none.safetensors"], ["not a mask head that can be used", "none.safetensors"]),
        (["--phrase", "cat", "--text-device", "cuda:77"], ["--text-device: no such device", "cuda:77"]),
        (["--phrase", "cat", "--image", "none.png"], ["none.png", "cannot be read: No such file"]),
    ],
)
def test_refuses_wrong_arguments(ground: Ground, cat: Path, arguments: list[str], messages: list[str]) -> None:
    refused(ground("--image", cat, *arguments), cat.parent, *messages)


def test_refuses_another_model(ground: Ground, cat: Path) -> None:
    words = ["--image", cat, "--phrase", "cat"]
    refused(ground(*words, variant="t2i"), cat.parent, "takes no images", "name an Edit model with --model")
    refused(ground(*words, "--image", cat), cat.parent, "takes 1 image", "found 2", "leave out some --image")


def test_refuses_a_head_of_another_encoder(ground: Ground, cat: Path) -> None:
    path = cat.parent / "head.safetensors"
    save_head(MaskHead(CHANNELS + 4, base=4), path, HeadMetadata(encoder="another"))
    result = ground("--image", cat, "--phrase", "cat", "--head", path)
    refused(result, cat.parent, "trained on another encoder", "expected 20 attention heads", "found 16")


def test_refuses_files_of_something_else(
    ground: Ground, tiny_model: Callable[[str], Path], cat: Path, head: Path
) -> None:
    weights = tiny_model("edit") / "vae" / "diffusion_pytorch_model.safetensors"
    result = ground("--image", cat, "--phrase", "cat", "--head", weights)
    refused(result, cat.parent, "not a mask head that can be used", str(weights), "something else")
    encoder = tiny_model("edit") / "text_encoder"
    result = ground("--image", cat, "--phrase", "cat", "--head", head, "--sam", encoder)
    refused(result, cat.parent, "this is not SAM", str(encoder), "qwen2_5_vl")
    result = ground("--image", cat, "--phrase", "cat", "--head", head, "--sam", cat.parent)
    refused(result, cat.parent, "there is no model here", str(cat.parent))
    result = ground("--image", head, "--phrase", "cat")
    refused(result, cat.parent, "not an image in a supported format", str(head))


@pytest.mark.parametrize("out", ["cat.png", "other.png"])
def test_never_overwrites_an_input_image(ground: Ground, cat: Path, out: str) -> None:
    given = shutil.copy(cat, cat.with_name("other-overlay.png")) if out == "other.png" else cat
    before = given.read_bytes()
    result = ground("--image", given, "--phrase", "cat", "--out", cat.with_name(out))
    refused(result, cat.parent, "the output would overwrite an input image", str(given))
    assert given.read_bytes() == before
