"""`verify --re-encode`: an honest cache passes on every kind of processor, a forged one does not, and where nothing is
compared nothing is confirmed."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.encode.check import ONE_ROW, RMS_BOUND, difference, positions_in, settings_of_recipe
from qwen_cache.encode.recipe import settings_of_build
from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config, load_config

from .support.caches import build
from .support.commands import Result, command, refused, run
from .support.forged import Tensors, forge
from .support.imports import make, write_musubi
from .support.marks import slow
from .support.server import Server, serving
from .support.sources import change_prompt, change_target

Built = Callable[..., Path]


def check(cache: Path | str, *options: str | Path) -> Result:
    return run("qwen-cache", "verify", cache, "--re-encode", "4", *options)


def report(cache: Path | str, *options: str | Path) -> dict[str, Any]:
    """The document of --json; the exit code agrees."""
    result = check(cache, "--json", *options)
    found = dict(json.loads(result.stdout))
    assert result.code == (0 if found["ok"] else 1), result.stderr
    return found


# ---- what is compared ------------------------------------------------------------------------------------------------


def test_an_honest_cache_is_confirmed_by_the_source_that_its_settings_name(built: Built) -> None:
    cache = built("edit-plus")
    found = report(cache)
    source = load_config(cache / "qwen.yaml").data.source
    assert (found["ok"], found["compared"], found["samples"], found["in_source"]) == (True, 4, 4, 4)
    assert found["source"] == source
    assert found["changed"] == found["findings"] == []
    names = {"image_latents", "control_latents", "prompt_embeds", "empty_prompt_embeds", "edit_mask"}
    assert found["tensors"].keys() == names
    for name, each in found["tensors"].items():
        assert each["ok"]
        assert each["rms"] <= each["rms_bound"], name
        assert each["max"] <= each["max_bound"], name
    assert found["tensors"]["edit_mask"]["compared"] == 1
    assert found["tensors"]["prompt_embeds"]["rms_bound"] == RMS_BOUND["float32"]


def test_the_samples_are_found_by_content_where_the_source_has_other_names(
    built: Built, pairs: Path, tmp_path: Path
) -> None:
    """And in a remote cache, whose settings are those of its recipe; the same seed chooses the same samples."""
    for path in sorted(pairs.rglob("*.*"), reverse=True):
        path.rename(path.with_name(f"new_{path.name}"))
    table = [
        {"target": f"target_images/new_{name}.png", "control": f"control_images/new_{name}.png", "prompt": prompt}
        for name, prompt in (("china", "make it black and white"), ("flower", "another prompt"))
    ]
    (pairs / "metadata.jsonl").write_text("\n".join(map(json.dumps, table)))
    cache = Path(shutil.copytree(built("edit-plus"), tmp_path / "served"))
    (cache / "qwen.yaml").unlink()
    model = load_config(built("edit-plus") / "qwen.yaml").model.path
    with serving(Server(cache)) as server:
        source = ("--source", pairs / "metadata.jsonl", "--model", str(model))
        found = report(server.url, *source, "--set", f"cache.local_copies={tmp_path / 'copies'}", "--seed", "5")
    assert (found["ok"], found["compared"], found["in_source"], found["seed"]) == (True, 1, 1, 5)
    shown = check(cache, *source)
    assert shown.code == 0
    assert "1 sample of 4 encoded again. OK: rounding explains every difference" in shown.stderr
    assert "3 samples of the cache not in this source; none of them was checked" in shown.stderr
    assert "image_latents" in shown.stdout


def test_the_seed_decides_which_samples_are_chosen(built: Built) -> None:
    cache = open_cache(built("edit-plus"))
    named = positions_in(cache, "name", ["cat", "cup", "nothing"])
    assert [cache[int(position)].name for position in named] == ["cat", "cup"]
    one, same = (report(built("edit-plus"), "--re-encode", "1", "--seed", "2") for _ in range(2))
    assert one["tensors"] == same["tensors"]
    assert one["compared"] == 1


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_what_the_images_and_prompts_do_not_give_is_found(built: Built, tmp_path: Path) -> None:
    """A fault in each of the four samples: noise of 1 %, a missing VAE mean, another image's latents, the embedding of
    another token."""
    random = np.random.default_rng(0)

    def one_row_off(embeds: Any) -> Any:
        """So little that it is lost in the RMS of all rows."""
        longest = np.linalg.norm(embeds, axis=1).argmax()
        embeds[longest] *= np.float32(1.005)
        return embeds

    def change(name: str, tensors: Tensors) -> Tensors:
        latents, controls = tensors["image_latents"], tensors["control_latents"]
        embeds = tensors["prompt_embeds"].copy()
        if name == "china":
            noise = random.standard_normal(latents.shape).astype(np.float32)
            return tensors | {"image_latents": latents + 0.01 * latents.std() * noise}
        if name == "cat":
            return tensors | {"control_latents": controls + np.float32(0.3)}
        if name == "cup":
            swapped = {"image_latents": controls, "control_latents": latents}
            return tensors | swapped | {"prompt_embeds": one_row_off(embeds)}
        embeds[-7] = embeds[-8]  # one token of the prompt
        return tensors | {"prompt_embeds": embeds}

    forged = forge(built("edit-plus"), tmp_path / "forged", change)
    assert run("qwen-cache", "verify", forged).code == 0
    found = report(forged)
    assert {(each["sample"].split()[0], each["tensor"]) for each in found["findings"]} == {
        ("china", "image_latents"),
        ("cat", "control_latents"),
        ("cup", "image_latents"),
        ("cup", "control_latents"),
        ("cup", "prompt_embeds"),
        ("flower", "prompt_embeds"),
    }
    assert {name for name, each in found["tensors"].items() if not each["ok"]} == {
        "image_latents",
        "control_latents",
        "prompt_embeds",
    }
    shown = check(forged)
    assert shown.code == 1
    assert "image_latents differs by 0.01 (RMS; rounding explains 0.00098)" in shown.stderr
    assert "prompt_embeds differs by 0.005 in one row (rounding explains 0.0039)" in shown.stderr
    assert "4 samples of 4 encoded again. not confirmed" in shown.stderr


def test_tensors_that_are_missing_or_of_another_shape_are_found(built: Built, tmp_path: Path) -> None:
    def change(name: str, tensors: Tensors) -> Tensors:
        if name == "cup":
            return {each: array for each, array in tensors.items() if each != "empty_prompt_embeds"}
        return tensors | {"prompt_embeds": tensors["prompt_embeds"][:-1]} if name == "cat" else tensors

    found = report(forge(built("edit-plus"), tmp_path / "forged", change))
    findings = {(each["sample"].split()[0], each["tensor"]): each["what"] for each in found["findings"]}
    assert findings["cup", "empty_prompt_embeds"] == "is missing in the cache"
    assert findings["cat", "prompt_embeds"].startswith("is float32 [")
    assert len(findings) == 2


def test_a_source_that_has_changed_does_not_confirm_the_cache(built: Built, pairs: Path) -> None:
    change_target(pairs)
    change_prompt(pairs)
    found = report(built("edit-plus"), "--source", pairs)
    assert found["compared"] == 2
    assert {each["name"]: each["what"] for each in found["changed"]} == {"china": "target", "flower": "prompt"}
    assert not found["ok"]
    assert "china: the source has other content now: target" in check(built("edit-plus"), "--source", pairs).stderr


def test_a_name_that_two_samples_have_is_found_in_either(
    built: Built, pairs: Path, tmp_path: Path, tiny_model: Any
) -> None:
    """A merged cache has such rows; a row that can no longer be used is none of them."""
    change_target(pairs)
    reuse = "--reuse", str(built("edit-plus"))
    assert build(pairs, tmp_path / "other", tiny_model("edit-plus"), *reuse).code == 0
    merged = run("qwen-cache", "merge", built("edit-plus"), tmp_path / "other", "--out", tmp_path / "merged")
    assert merged.code == 0, merged.stderr
    found = report(tmp_path / "merged", "--source", pairs, "--re-encode", "9", "--model", tiny_model("edit-plus"))
    assert (found["samples"], found["compared"], found["changed"], found["ok"]) == (5, 4, [], True)
    (pairs / "target_images" / "cat.png").write_bytes(b"no image")
    found = report(built("edit-plus"), "--source", pairs)
    assert {each["name"]: each["what"] for each in found["changed"]} == {"china": "target", "cat": "cannot be used"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_bounds_are_wider_than_rounding_and_narrower_than_a_fault(dtype: str) -> None:
    """64 residual additions of sums of many products, in two orders: the model of `encode/check.py`."""
    kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    random = torch.Generator().manual_seed(0)
    x = torch.randn(200, 96, generator=random, dtype=torch.float64)
    weights = torch.randn(64, 96, 96, generator=random, dtype=torch.float64) / 96**0.5

    def computed(order: torch.Tensor) -> np.ndarray[Any, Any]:
        state = x.to(kind)
        for weight in weights:
            ordered = state[:, order].float() @ weight[order].to(kind).float()  # bfloat16 accumulates in float32
            state = state + ordered.to(kind)
        return np.asarray(state.double().numpy())

    one, other = computed(torch.arange(96)), computed(torch.randperm(96, generator=random))
    found = difference("prompt_embeds", one, other, dtype)
    assert 0 < found.rms < found.rms_bound
    assert found.is_within
    noise = np.random.default_rng(0).standard_normal(one.shape) * one.std()
    for share, is_within in ((0.01, dtype == "bfloat16"), (0.1, False)):
        assert difference("prompt_embeds", one + share * noise, one, dtype).is_within is is_within
    replaced = one.copy()
    replaced[3] = one[4]
    assert difference("prompt_embeds", replaced, one, dtype).largest > ONE_ROW * RMS_BOUND[dtype]
    nothing = np.full_like(one, np.nan)
    assert difference("prompt_embeds", nothing, one, dtype).rms == math.inf
    assert not difference("prompt_embeds", nothing, one, dtype).is_within


def test_a_mask_may_differ_by_a_level_and_a_made_one_at_its_edge() -> None:
    mask = np.linspace(0, 1, 64, dtype=np.float32)
    for origin, error, is_within in (
        ("file", 1 / 255, True),
        ("file", 3 / 255, False),
        ("difference", 0.1, True),
        ("difference", 0.3, False),
    ):
        assert difference("edit_mask", mask, mask + np.float32(error), "bfloat16", origin).is_within is is_within


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["edit-plus", "qwen-image-21"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("isa", ["AVX2", "DEFAULT"])
def test_other_processors_confirm_an_honest_cache(
    variant: str, dtype: str, isa: str, built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = built(variant, ("--dtype", dtype, "--set", "cache.compression=zstd"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", isa)
    monkeypatch.setenv("OMP_NUM_THREADS", str(os.cpu_count()))
    result = command("qwen-cache", "verify", cache, "--re-encode", "9", "--json")
    assert result.code == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_a_quantised_text_encoder_is_that_of_the_recipe(built: Built, tmp_path: Path) -> None:
    """The cache's saved settings need not say so."""
    cache = shutil.copytree(built("edit-plus", ("--set", "cache.text_quantization=int8")), tmp_path / "shards")
    (cache / "qwen.yaml").write_text((cache / "qwen.yaml").read_text().replace("text_quantization: int8", ""))
    result = command("qwen-cache", "verify", cache, "--re-encode", "2", "--json", fresh=False)
    assert result.code == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_faults_of_a_bfloat16_cache_are_found(built: Built, pairs: Path, tmp_path: Path, tiny_model: Any) -> None:
    """Noise of 10 %, an image of before its change, a prompt with another word; noise of 1 % is what rounding makes."""
    in_bfloat16 = ("--dtype", "bfloat16")
    change_target(pairs)
    (pairs / "target_images" / "flower.txt").write_text("make it black and green")
    assert build(pairs, tmp_path / "other", tiny_model("edit-plus"), *in_bfloat16).code == 0
    others = {sample.name: sample for sample in open_cache(tmp_path / "other")}
    random = np.random.default_rng(0)

    def noisy(latents: Any, share: float) -> Any:
        values = latents.astype(np.float32)
        return (values + share * values.std() * random.standard_normal(values.shape)).astype(latents.dtype)

    def change(name: str, tensors: Tensors) -> Tensors:
        if name in ("cat", "cup"):
            return tensors | {"control_latents": noisy(tensors["control_latents"], 0.1 if name == "cat" else 0.01)}
        tensor = "image_latents" if name == "china" else "prompt_embeds"
        return tensors | {tensor: others[name].stored_numpy(tensor)}

    found = report(forge(built("edit-plus", in_bfloat16), tmp_path / "forged", change))
    findings = {(each["sample"].split()[0], each["tensor"]) for each in found["findings"]}
    assert {("cat", "control_latents"), ("china", "image_latents"), ("flower", "prompt_embeds")} <= findings
    assert not [each for each in findings if each[0] == "cup"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--format", "v1"),
        ("--set", "data.resolution=[[128,96],[96,128]]", "--set", "data.resize_mode=stretch"),
        ("--set", "data.vae_image_size=[9216,16384]", "--set", "data.resolutions_per_sample=all"),
        ("--set", "data.edit_mask=none", "--set", "data.upscale=false"),
        ("--set", "data.edit_mask=diff", "--set", "cache.store_attention=true"),
    ],
    ids=["v1", "stretch", "all", "no masks", "made masks"],
)
def test_the_settings_are_those_of_the_recipe(
    options: tuple[str, ...], pairs: Path, tiny_model: Any, tmp_path: Path
) -> None:
    out, model = tmp_path / "out", tiny_model("edit-plus")
    if "data.resolution=[[128,96],[96,128]]" in options:
        small = ("--set", "data.condition_image_size=12544", "--dtype", "float32")
        result = run("qwen-cache", "build", pairs, "--out", out, "--model", model, *small, *options)
    else:
        result = build(pairs, out, model, *options)
    assert result.code == 0, result.stderr
    (out / "qwen.yaml").unlink()
    found = report(out, "--source", pairs, "--model", model, "--re-encode", "20")
    assert found["compared"] == found["samples"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_nothing_to_compare_is_an_error(built: Built, pairs: Path, tmp_path: Path) -> None:
    cache = built("edit-plus")
    prefix = check(cache, "--source", pairs, "--set", "data.prompt_prefix=sks")
    refused(prefix, "none of the chosen samples as they are in the cache", "4 with other content: 4× prompt")
    other = Path(shutil.copytree(pairs, tmp_path / "other"))
    for path in sorted(other.rglob("*.*"), reverse=True):
        path.rename(path.with_name(path.name.replace("c", "k").replace("flower", "f")))
    for path in (other / "target_images").glob("*.txt"):
        path.write_text("another prompt")
    refused(check(cache, "--source", other), "the source has no sample of this cache", "none with its name or content")


def test_another_model_is_refused_with_what_differs(built: Built, tiny_model: Any, pairs: Path) -> None:
    result = check(built("edit-plus"), "--source", pairs, "--model", tiny_model("edit"))
    refused(result, "do not give the recipe of the cache", "pipeline", "name the model of the cache with --model")


def test_a_source_is_needed(built: Built, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Path(shutil.copytree(built("edit-plus"), tmp_path / "copy"))
    settings = (cache / "qwen.yaml").read_text()
    monkeypatch.chdir(tmp_path)
    source = load_config(cache / "qwen.yaml").data.source
    (cache / "qwen.yaml").write_text(settings.replace(source, str(tmp_path / "moved")))
    refused(check(cache), "the source that the settings of this cache name is not here", "moved", "give --source")
    refused(check(cache, "--source", tmp_path / "moved"), "there is no such source", "give --source SOURCE")
    with serving(Server(cache)) as server:
        refused(check(server.url), "a remote cache names no source on the hub", "give --source SOURCE")
        (cache / "qwen.yaml").write_text("data: {source: hf://datasets/me/nothing}")
        model = str(load_config(built("edit-plus") / "qwen.yaml").model.path)
        refused(check(server.url, "--model", model), "hf://datasets/me/nothing: ")
    (cache / "qwen.yaml").unlink()
    refused(check(cache), "no source is given, and the cache has no settings that name one", "give --source SOURCE")


def test_what_cannot_be_encoded_again_is_refused(tmp_path: Path, fast: Any, tiny_model: Any) -> None:
    samples = [make("a", "red", [(2, 2), (2, 2)], 9, 0)]
    model = tiny_model("edit-plus")
    write_musubi(tmp_path / "musubi", samples)
    made = run("qwen-cache", "import", "musubi", tmp_path / "musubi", "--out", tmp_path / "out", "--model", model)
    assert made.code == 0, made.stderr
    refused(check(tmp_path / "out"), "was imported from musubi", "its encoder is not known, only claimed")
    prompts = ("--set", "validation.prompts=[{prompt: a cat}]", "--only-validation")
    assert build(tmp_path, tmp_path / "shards", tiny_model("t2i"), *prompts).code == 0
    refused(check(tmp_path / "shards" / "validation"), "a cache of images to generate", "leave --re-encode out")


@pytest.mark.parametrize("entry", [{"dtype": "float99"}, {"vae_image_size": "large"}, {"edit_mask": ["x"]}, {}])
def test_a_recipe_that_nobody_writes_is_refused(entry: dict[str, Any], built: Built) -> None:
    cache = open_cache(built("edit-plus"))
    recipe = replace(cache.recipe, recipe=entry)
    cache.manifest = replace(cache.manifest, recipes={cache.recipe_name: recipe})
    with pytest.raises(ConfigError, match="the recipe of this cache is none that this version writes"):
        settings_of_recipe(cache, Config())


def test_the_devices_are_not_those_of_the_machine_that_built_the_cache(built: Built, tmp_path: Path) -> None:
    settings = load_config(built("edit-plus") / "qwen.yaml", ["cache.vae_device=cuda:7", "cache.vae_batch_pixels=5"])
    (tmp_path / "qwen.yaml").write_text(settings.to_yaml())
    read = settings_of_build(tmp_path, assignments=["cache.text_device=cpu"])
    assert (read.cache.vae_device, read.cache.text_device, read.cache.vae_batch_pixels) == ("auto", "cpu", None)
    assert read.data == settings.data
    assert settings_of_build(tmp_path, tmp_path / "qwen.yaml").cache.vae_device == "cuda:7"


def test_options_of_the_spot_check_need_it(tmp_path: Path) -> None:
    result = run("qwen-cache", "verify", tmp_path, "--source", "data", "--seed", "1", "--text-device", "cpu")
    refused(result, "these options go with --re-encode", "found --source, --seed, --text-device")


@pytest.mark.parametrize("kind", [slow(ml_dtypes.bfloat16), np.float32])
def test_equal_bytes_are_counted(kind: Any) -> None:
    values = np.ones((3, 4), kind)
    assert difference("image_latents", values, values.copy(), "bfloat16").is_equal
    assert not difference("image_latents", values, values * 2, "bfloat16").is_equal
