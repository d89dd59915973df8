"""Tests share what was loaded, and nothing else: each has a model of its own, which is that of its files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file

from qwen_cache.models.loading import load_whole

NAME = "decoder.conv_in.weight"


def weight(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The first weight of the decoder as it is loaded; to be changed at will."""
    return load_whole(AutoencoderKLQwenImage, folder, torch_dtype=dtype).state_dict()[NAME]  # type: ignore[no-any-return]


def test_what_a_test_does_to_a_model_and_to_its_files_is_seen_where_it_should(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny_model("edit-plus") / "vae", tmp_path / "vae")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weight(folder).zero_()
    with monkeypatch.context() as patch:
        patch.setattr(AutoencoderKLQwenImage, "__init__", None)  # the second time, none is made
        again = weight(folder)
    assert torch.equal(again, weights[NAME])
    again.zero_()
    assert torch.equal(weight(folder), weights[NAME])
    assert torch.equal(weight(folder, torch.bfloat16), weights[NAME].bfloat16())
    save_file(weights | {NAME: weights[NAME] + 1}, file)
    assert torch.equal(weight(folder), weights[NAME] + 1)
