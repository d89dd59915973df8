"""Refinement talks to SAM as SAM's own processor does, in the right frame, for images of any proportions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Sam2Config, Sam2Model
from transformers.models.sam.image_processing_pil_sam import SamImageProcessorPil

from qwen_cache.errors import ModelError
from qwen_cache.experimental.attention import load_sam, refine

from .support.photographs import photograph
from .support.sam import PATCH, SIDE, shaken, tiny_sam

SIZES = [(120, 80), (80, 120), (96, 96), (45, 31)]
"""Width and height: landscape, portrait, square, and one that is smaller than the model's frame."""


def tiny_sam2() -> Any:
    torch.manual_seed(0)
    config = Sam2Config(
        vision_config={
            "backbone_config": {
                "model_type": "sam2_hiera_det_model",
                "hidden_size": 8,
                "image_size": [SIDE, SIDE],
                "blocks_per_stage": [1, 1, 2, 1],
                "embed_dim_per_stage": [8, 16, 32, 64],
                "num_attention_heads_per_stage": [1, 1, 1, 1],
                "window_size_per_stage": [4, 4, 4, 4],
                "global_attention_blocks": [3],
            },
            "backbone_channel_list": [64, 32, 16, 8],
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            "fpn_hidden_size": 32,
        },
        prompt_encoder_config={"hidden_size": 32, "image_size": SIDE, "patch_size": PATCH},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )
    return shaken(Sam2Model(config))


class Echo:
    """A SAM that gives its mask prompt back, and remembers what else it was told."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, model_type: str) -> None:
        prompt_encoder = SimpleNamespace(image_size=1024, patch_size=16)
        self.config = SimpleNamespace(model_type=model_type, prompt_encoder_config=prompt_encoder)

    def __call__(self, *, input_masks: torch.Tensor, **told: Any) -> Any:
        self.told = told
        return SimpleNamespace(pred_masks=input_masks[:, None])


def logits(rows: int, columns: int, box: tuple[int, int, int, int]) -> torch.Tensor:
    """5 inside of `box` = (x0, y0, x1, y1), -5 outside."""
    x0, y0, x1, y1 = box
    made = torch.full((rows, columns), -5.0)
    made[y0:y1, x0:x1] = 5
    return made


@pytest.mark.parametrize("model_type", ["sam", "sam2"])
@pytest.mark.parametrize("size", SIZES)
def test_the_mask_comes_back_where_it_was(size: tuple[int, int], model_type: str) -> None:
    """Through the model's frame and out of it again: the coarse mask at the image's size."""
    width, height = size
    box = (width // 8, height // 2, width // 3, height - height // 10)
    coarse = logits(height, width, box)
    mask = refine(Echo(model_type), Image.new("RGB", size), coarse)
    assert mask.shape == (height, width)
    away_from_the_edge = torch.nn.functional.avg_pool2d(coarse[None], 5, 1, 2, count_include_pad=False)[0].abs() == 5
    assert torch.equal((mask > 0.5)[away_from_the_edge], (coarse > 0)[away_from_the_edge])
    assert ((mask > 0.5) ^ (coarse > 0)).float().mean() < 0.01


@pytest.mark.parametrize("size", SIZES)
def test_the_box_and_the_pixels_are_those_of_sams_own_processor(size: tuple[int, int]) -> None:
    width, height = size
    image, box = photograph("coffee.png").resize(size), (width // 8, height // 2, width // 3, height - 3)
    echo = Echo("sam")
    refine(echo, image, logits(height, width, box))
    expected = SamImageProcessorPil()(image, return_tensors="pt")
    torch.testing.assert_close(echo.told["pixel_values"], expected["pixel_values"], atol=1e-5, rtol=0)
    scaled_height, scaled_width = expected["reshaped_input_sizes"][0].tolist()
    scale = torch.tensor([scaled_width / width, scaled_height / height] * 2)
    torch.testing.assert_close(echo.told["input_boxes"], (torch.tensor(box) * scale)[None, None])
    assert echo.told["multimask_output"] is False


def test_an_empty_mask_asks_about_the_whole_image() -> None:
    echo = Echo("sam")
    refine(echo, Image.new("RGB", (100, 50)), torch.full((8, 16), -3.0))
    assert echo.told["input_boxes"].tolist() == [[[0, 0, 1024, 512]]]


def test_sam2_sees_the_image_stretched() -> None:
    echo = Echo("sam2")
    refine(echo, Image.new("RGB", (100, 50), "white"), logits(50, 100, (20, 10, 60, 30)))
    torch.testing.assert_close(
        echo.told["input_boxes"].flatten(), torch.tensor([20, 10, 60, 30]) * 1024 / torch.tensor([100, 50, 100, 50])
    )
    assert echo.told["pixel_values"].amin() > 2


@pytest.mark.parametrize("outside", [-5.0, 0.5])
def test_beside_the_image_there_is_no_mask(outside: float) -> None:
    """Padding says "no" at least as clearly as the surest no of the mask itself."""

    class Listening(Echo):
        def __call__(self, *, input_masks: torch.Tensor, **told: Any) -> Any:
            self.prompt = input_masks
            return super().__call__(input_masks=input_masks, **told)

    sam = Listening("sam")
    refine(sam, Image.new("RGB", (100, 50)), torch.full((8, 16), outside))
    assert sam.prompt.shape == (1, 1, 256, 256)
    assert sam.prompt[..., :127, :].unique().tolist() == [outside]
    assert sam.prompt[..., 129:, :].unique().tolist() == [min(-1, outside)]


@pytest.mark.parametrize("make", [tiny_sam, tiny_sam2])
def test_a_real_model_listens_to_image_box_and_mask(make: Any) -> None:
    model, image = make(), photograph("coffee.png").resize((90, 60))
    coarse = logits(20, 30, (4, 4, 12, 14)).requires_grad_()
    mask = refine(model, image, coarse)
    assert mask.shape == (60, 90)
    assert not mask.requires_grad
    assert 0 <= mask.min() < mask.max() <= 1
    assert torch.equal(mask, refine(model, image, coarse))
    surer = refine(model, image, 2 * coarse)  # the same box
    elsewhere = refine(model, image, logits(20, 30, (14, 4, 22, 14)))
    other = refine(model, photograph("chelsea.png").resize((90, 60)), coarse)
    for changed in (surer, elsewhere, other):
        assert (changed - mask).abs().max() > 1e-3


@pytest.mark.parametrize("make", [tiny_sam, tiny_sam2])
def test_the_box_itself_is_heard(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, image, coarse = make(), photograph("coffee.png").resize((90, 60)), logits(20, 30, (4, 4, 12, 14))
    mask = refine(model, image, coarse)
    monkeypatch.setattr("qwen_cache.experimental.attention._box", lambda *_: torch.tensor([[[0.0, 0.0, 64.0, 42.0]]]))
    assert (refine(model, image, coarse) - mask).abs().max() > 1e-3


@pytest.mark.parametrize("make", [tiny_sam, tiny_sam2])
def test_loads_what_was_saved(make: Any, tmp_path: Path) -> None:
    model, image, coarse = make(), photograph("coffee.png").resize((90, 60)), logits(20, 30, (4, 4, 12, 14))
    model.save_pretrained(tmp_path)
    loaded = load_sam(tmp_path)
    assert not any(weight.requires_grad for weight in loaded.parameters())
    torch.testing.assert_close(refine(loaded, image, coarse), refine(model, image, coarse), atol=1e-4, rtol=0)


def test_loads_sam2_as_it_is_published(tmp_path: Path) -> None:
    """The image half of a model for videos."""
    tiny_sam2().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "sam2_video"}))
    loaded, image = load_sam(tmp_path), Image.new("RGB", (90, 60))
    assert isinstance(loaded, Sam2Model)
    assert refine(loaded, image, logits(20, 30, (4, 4, 12, 14))).shape == (60, 90)


def test_refuses_another_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no model here"):
        load_sam(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ModelError, match=r"this is not SAM \(expected sam, sam2, sam2_video, found clip\)"):
        load_sam(tmp_path)
    tiny_sam().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="SamModel cannot be loaded"):
        load_sam(tmp_path)
