"""Memory on a simulated accelerator (tests/simulated_device), whose allocator is CUDA's: what the plan says."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.models.encoders import MODELS, text_encoder_type
from qwen_cache.models.hardware import FRAGMENTATION, RESERVED
from qwen_cache.settings.load import load_config
from qwen_train.inference.components import Components
from qwen_train.inference.memory import generating, memory_beside_training
from qwen_train.memory.plan import Workload, plan
from qwen_train.memory.prediction import SAFE, block_bytes
from qwen_train.memory.sizes import SampleSize

from .support.simulated import (
    ACTIVATIONS,
    TABLE,
    TWO_DEVICES,
    Job,
    Report,
    done,
    run_jobs,
    sources_in,
    training,
    with_transformer,
)
from .support.single_files import is_text_matrix, text_weights_of, write_safetensors

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerator")


@pytest.fixture(scope="module")
def sources(folder: Path) -> Callable[[str], list[str]]:
    return sources_in(folder)


# ---- training --------------------------------------------------------------------------------------------------------

WIDE: dict[str, dict[str, Any]] = {
    "padded": {"train.layout": "padded"},
    "packed": {},
    "int8_convrot": {"model.quantization": "int8_convrot"},
    "fp8, all activations": {"model.quantization": "fp8", "train.gradient_checkpointing": False},
    "table, nf4": {**TABLE, "model.quantization": "nf4"},
    "half offloaded": {"train.offload_blocks": 4},
    "table, int8_convrot, all offloaded": {
        **TABLE,
        "model.quantization": "int8_convrot",
        "train.offload_blocks": 8,
    },
    "every second block": {"train.gradient_checkpointing": 2, "train.layout": "padded"},
    "every second block, all offloaded": {"train.gradient_checkpointing": 2, "train.offload_blocks": 8},
    "activations offloaded": ACTIVATIONS,
    "activations of every second block offloaded, padded, fp8": {
        **ACTIVATIONS,
        "train.gradient_checkpointing": 2,
        "train.layout": "padded",
        "model.quantization": "fp8",
    },
    "full, EMA, accumulation": {"train.method": "full", "train.ema_decay": 0.9, "train.gradient_accumulation_steps": 2},
}


@pytest.fixture(scope="module")
def wide(folder: Path, built: Callable[..., Path], tiny_model: Callable[[str], Path]) -> dict[str, tuple[Job, Report]]:
    """Steps whose memory is that of weights and activations, not of what every run has."""
    model = with_transformer(tiny_model("edit-plus"), folder / "wide", num_layers=8, num_attention_heads=8)
    cache = built("edit-plus", ("--set", "data.vae_image_size=65536"))
    jobs = {name: training(cache, model, folder / "wide runs" / name, settings) for name, settings in WIDE.items()}
    return {name: (jobs[name], report) for name, report in run_jobs(folder / "wide jobs", jobs).items()}


@pytest.mark.parametrize("name", WIDE)
def test_the_plan_is_within_8_percent_of_the_active_memory(name: str, wide: dict[str, tuple[Job, Report]]) -> None:
    job, report = wide[name]
    _, cache, _, model, *assignments = job["arguments"]
    config = load_config(None, assignments[1::2], cache__path=cache, model__path=model)
    planned = plan(config, Workload.of(config), None)
    predicted, found = planned["memory"]["total"] - planned["memory"]["reserved"], done(report)["peaks"]["0"]["active"]
    assert predicted == pytest.approx(found, rel=0.08)
    assert found <= 1.1 * predicted
    pinned = report["peaks"]["pinned"] - wide["packed"][1]["peaks"]["pinned"]
    assert planned["host_memory"] == pytest.approx(pinned, rel=0.08, abs=100_000), "beside what every run pins"


LARGE = (
    "--set",
    "data.vae_image_size=147456",
    "--set",
    "cache.vae_batch_pixels=1",
    "--set",
    "cache.text_batch_tokens=1",
)


@pytest.mark.parametrize("variant", ["edit-plus", "qwen-image-21"])
def test_what_a_build_needs_for_its_largest_sample(
    variant: str, folder: Path, sources: Callable[[str], list[str]], tiny_model: Callable[[str], Path]
) -> None:
    model, out = tiny_model(variant), folder / "large caches" / variant
    arguments = ["build", *sources(variant), "--out", str(out), "--model", str(model), *LARGE, *TWO_DEVICES]
    job = {"program": "qwen-cache", "arguments": arguments}
    peaks = done(run_jobs(folder / "large" / variant, {"build": job})["build"])["peaks"]
    config = load_config(None, [], cache__path=str(out), model__path=str(model))
    lanes = memory_beside_training(config, Workload.of(config))["build"]
    for lane, device in (("vae", "0"), ("text_encoder", "1")):
        needed = (lanes[lane] - RESERVED) / (1 + FRAGMENTATION)
        assert needed == pytest.approx(peaks[device]["active"], rel=0.08), lane


# ---- text encoders in less memory ------------------------------------------------------------------------------------


def with_text_encoder(source: Path, folder: Path) -> Path:
    """A copy of a model with a deeper and wider text encoder, whose weights take more than a pass."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("text_encoder"))
    config = json.loads((source / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    kind = MODELS[config["model_type"]]
    text, vision = config["text_config"], config["vision_config"]
    text.pop("layer_types", None)
    text |= {"num_hidden_layers": 8, "intermediate_size": 6144}
    vision |= {"depth": 6, "intermediate_size": 1024}
    vision |= {"fullatt_block_indexes": [2, 5]} if "fullatt_block_indexes" in vision else {}
    torch.manual_seed(0)
    kind(kind.config_class.from_dict(config)).bfloat16().save_pretrained(folder / "text_encoder")
    return folder


PLACEMENTS: dict[str, tuple[str, ...]] = {
    "none": (),
    **{kind: ("--set", f"cache.text_quantization={kind}") for kind in ("int8", "fp8", "nf4")},
    "offload": ("--set", "cache.text_offload=true"),
    "int8 offload": ("--set", "cache.text_quantization=int8", "--set", "cache.text_offload=true"),
    "file": ("--text-encoder", "FILE"),
}
"""FILE: one of ComfyUI in int8, with its rotation."""


@pytest.fixture(scope="module", params=["edit-plus", "qwen-image-21"])
def in_less_memory(
    request: pytest.FixtureRequest,
    folder: Path,
    sources: Callable[[str], list[str]],
    tiny_model: Callable[[str], Path],
) -> tuple[Path, dict[str, Report]]:
    """A folder of caches, and the reports of their builds and plans, by placement."""
    variant = request.param
    model, caches = with_text_encoder(tiny_model(variant), folder / f"deep {variant}"), folder / f"placed {variant}"
    jobs: dict[str, Job] = {}
    file, kind = folder / f"{variant}.safetensors", MODELS[text_encoder_type(model / "text_encoder")]
    weights = text_weights_of(kind.from_pretrained(model / "text_encoder", dtype=torch.float32))
    write_safetensors(file, weights, "convrot", is_text_matrix)
    for name, given in PLACEMENTS.items():
        options = [str(file) if word == "FILE" else word for word in given]
        arguments = ["build", *sources(variant), "--out", str(caches / name), "--model", str(model), *LARGE]
        arguments += [*TWO_DEVICES, "--dtype", "bfloat16", *options]
        jobs[f"{name}, plan"] = {"program": "qwen-cache", "arguments": [*arguments, "--dry-run", "--json"]}
        jobs[name] = {"program": "qwen-cache", "arguments": arguments}
    return caches, run_jobs(folder / f"placed jobs {variant}", jobs)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_less_memory_as_planned(name: str, in_less_memory: tuple[Path, dict[str, Report]]) -> None:
    """Each encoder has a device of its own. The plan is for one pass of the largest sample."""
    _, reports = in_less_memory
    plans = {
        each["device"]: each["encoders"] for each in json.loads(done(reports[f"{name}, plan"])["stdout"])["memory"]
    }
    peaks = done(reports[name])["peaks"]
    text = plans["simu:1"]["text_encoder"]
    assert text["weights"] + text["activations"] == pytest.approx(peaks["1"]["active"], rel=0.08)
    whole = json.loads(reports["none, plan"]["stdout"])["memory"][1]["encoders"]["text_encoder"]["weights"]
    assert (text["weights"] < 0.8 * whole) == (name != "none")


@pytest.mark.parametrize(("name", "same"), [("offload", "none"), ("int8 offload", "int8")])
def test_offloaded_layers_give_the_same_embeddings(
    name: str, same: str, in_less_memory: tuple[Path, dict[str, Report]]
) -> None:
    caches, reports = in_less_memory
    done(reports[name])
    found, expected = (open_cache(caches / each) for each in (name, same))
    assert [sample.key for sample in found] == [sample.key for sample in expected], "it is no part of the recipe"
    for sample in expected:
        for tensor in ("prompt_embeds", "empty_prompt_embeds"):
            assert torch.equal(found[sample.key][tensor], sample[tensor]), tensor


@pytest.mark.parametrize("variant", ["t2i", "qwen-image-21"])
def test_what_an_image_needs(variant: str, folder: Path, tiny_model: Callable[[str], Path]) -> None:
    """Without control images, as the sample of which it is predicted."""
    model = tiny_model(variant)
    configs = {
        part: json.loads((model / part / "config.json").read_text(encoding="utf-8"))
        for part in ("vae", "text_encoder", "transformer")
    }
    predicted = generating(Components(configs, SampleSize(((1, 24, 24),), 20), None))
    jobs = {}
    for offload in predicted:
        out = folder / "large images" / f"{variant} {offload}.png"
        arguments = ["predict", "--model", str(model), "--prompt", "a red bridge", "--num-inference-steps", "2"]
        arguments += ["--device", "simu:0", "--offload", offload, "--out", str(out)]
        jobs[offload] = {
            "program": "qwen-train",
            "arguments": [*arguments, "--set", "predict.height=384", "--set", "predict.width=384"],
        }
    for offload, report in run_jobs(folder / "large predictions" / variant, jobs).items():
        assert predicted[offload] == pytest.approx(done(report)["peaks"]["0"]["active"], rel=0.08), offload


# ---- train.memory=auto -----------------------------------------------------------------------------------------------


def test_what_a_run_chooses_equals_the_settings_written_out(
    folder: Path, built: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    """On a device where the model does not fit whole, by the plan: it offloads some of it."""
    model = with_transformer(tiny_model("edit-plus"), folder / "chosen model", num_layers=8, num_attention_heads=8)
    cache = built("edit-plus")
    config = load_config(None, cache__path=str(cache), model__path=str(model), train__batch_size=2)
    workload = Workload.of(config)
    whole = plan(config, workload, None)["memory"]["total"]
    capacity = {"0": int((whole - 3 * block_bytes(workload.transformer, config)) / SAFE)}

    def report(name: str, settings: dict[str, Any]) -> Report:
        job = training(cache, model, folder / "runs that choose" / name, settings, capacity=capacity)
        return done(run_jobs(folder / "jobs that choose" / name, {name: job})[name])

    chosen = report("chosen", {"train.memory": "auto"})
    words = re.search(r"train\.memory=auto: (.*)", chosen["stderr"])
    assert words
    named = dict(each.split("=") for each in words[1].split())
    assert {"train.offload_blocks", "train.offload_activations"} & named.keys()
    settings = {name: value if value == "auto" else json.loads(value) for name, value in named.items()}
    written = report("written", settings)
    assert chosen["losses"] == written["losses"]
    assert chosen["peaks"]["0"]["active"] == pytest.approx(written["peaks"]["0"]["active"], rel=0.02)
