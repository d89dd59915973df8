"""Recipes stay what they were, so that no cache is encoded again; a cache keeps its own where both give the same.

The ids below are those of caches that exist: equal files and settings gave them at commit 2cd11aa.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache.encode.recipe import PATCH_EMBEDDING, as_cached, for_any_device, make_recipe
from qwen_cache.format.identity import recipe_id
from qwen_cache.models import devices
from qwen_cache.models.family import PipelineName
from qwen_cache.models.folder import ENCODER_PARTS, ModelFolder
from qwen_cache.settings.load import load_config

from .support.caches import build, plan
from .support.fake_lanes import FakeLanes

Configuration = tuple[PipelineName, list[str]]
ON_CPU, ON_GPU = "cache.text_device=cpu", "cache.text_device=cuda:1"
MORE = ["cache.text_quantization=int8", "data.condition_image_size=147456", "data.edit_mask=diff"]
IDS: dict[str, tuple[Configuration, str]] = {
    "a GPU": (("QwenImageEditPipeline", [ON_GPU]), "fee56b68620540fa91d946a91cb8a999"),
    "float32 on a CPU": (
        ("QwenImageEditPlusPipeline", [ON_CPU, "cache.dtype=float32"]),
        "8ac4657bb4955c3b78999bd64e2e7945",
    ),
    "a model without images on a CPU": (("QwenImagePipeline", [ON_CPU]), "b55ba16a98f5c164cfa2641bd495c492"),
    "Qwen-Image-2.1 on two GPUs": (
        ("QwenImage21Pipeline", ["cache.text_device=cuda:0,cuda:1"]),
        "438e087273e66a01dd05c432fe788e87",
    ),
    "many settings": (
        ("QwenImageEditPlusPipeline", ["cache.text_device=cuda", "data.vae_image_size=262144", *MORE]),
        "de068a3581e09f4604f3904f861246d4",
    ),
}
ON_A_CPU: dict[str, Configuration] = {
    "an edit": ("QwenImageEditPipeline", [ON_CPU]),
    "an edit, by default": ("QwenImageEditPlusPipeline", []),
    "a CPU beside a GPU": ("QwenImageEditPlusPipeline", ["cache.text_device=cuda:0, cpu"]),
    "Qwen-Image-2.1": ("QwenImage21Pipeline", [ON_CPU]),
}


@pytest.fixture
def recipe_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The recipe of a configuration with equal files, on a machine without an accelerator."""
    monkeypatch.setattr(devices, "accelerator", lambda: None)
    for part in ENCODER_PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}", encoding="utf-8")

    def make(configuration: Configuration, **options: bool) -> dict[str, Any]:
        pipeline, settings = configuration
        return make_recipe(ModelFolder("model", tmp_path, pipeline), load_config(None, settings), **options)

    return make


# ---- patch embedding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_the_recipes_of_existing_caches_keep_their_ids(name: str, recipe_of: Callable[..., dict[str, Any]]) -> None:
    configuration, expected = IDS[name]
    assert recipe_id(recipe_of(configuration)) == expected


@pytest.mark.parametrize("name", ON_A_CPU)
def test_images_in_bfloat16_on_a_cpu_have_another_recipe_than_before(
    name: str, recipe_of: Callable[..., dict[str, Any]]
) -> None:
    pipeline, settings = ON_A_CPU[name]
    found, before = recipe_of((pipeline, settings)), recipe_of((pipeline, [ON_GPU]))
    assert found == {**before, "patch_embedding": "product"}
    assert recipe_id(found) != recipe_id(before)


def test_an_accelerator_and_a_cluster_keep_the_recipe(
    recipe_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is the accelerator that is here; a cluster has those of its nodes, and this process may have none."""
    configuration = ON_A_CPU["an edit, by default"]
    elsewhere = recipe_of(configuration, here=False)
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("cuda"))
    assert recipe_of(configuration) == elsewhere == for_any_device(recipe_of(ON_A_CPU["a CPU beside a GPU"]))


def test_an_accelerator_adds_to_the_cache_of_a_cpu_and_a_cpu_not_to_one_that_may_be_wrong(
    recipe_of: Callable[..., dict[str, Any]],
) -> None:
    cpu, gpu = recipe_of(ON_A_CPU["an edit"]), recipe_of(IDS["a GPU"][0])
    assert as_cached(gpu, cpu) == cpu
    assert as_cached(cpu, gpu) == cpu != gpu
    others = recipe_of(IDS["float32 on a CPU"][0]), recipe_of(IDS["many settings"][0])
    assert [as_cached(it, cpu) for it in others] == list(others)


def test_a_build_says_why_images_are_encoded_again_and_another_device_does_not_do_it(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes], monkeypatch: Any
) -> None:
    """A cache of a GPU, built again on a CPU; and one of a CPU on a machine with a GPU."""
    out, model, bfloat16 = tmp_path / "shards", tiny_model("edit-plus"), ("--dtype", "bfloat16")
    with monkeypatch.context() as machine:
        machine.setattr(devices, "accelerator", lambda: torch.device("cuda"))
        assert build(pairs, out, model, *bfloat16).code == 0
    result = build(pairs, out, model, *bfloat16)
    why = "images encoded in bfloat16 on a CPU, which earlier versions may have done wrongly"
    assert (result.code, f"because the recipe changed: {why}\n" in result.stderr) == (2, True)
    assert build(pairs, out, model, *bfloat16, "--replace").code == 0
    assert PATCH_EMBEDDING in json.loads((out / "cache.json").read_bytes())["recipes"]["default"]["recipe"]
    monkeypatch.setattr(devices, "accelerator", lambda: torch.device("cuda"))
    assert plan(pairs, out, model, *bfloat16)["to_encode"] == 0
