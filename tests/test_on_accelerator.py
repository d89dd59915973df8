"""Both programs on a simulated accelerator: nothing mixes devices or races, and the host waits as often as it may.

The device (tests/simulated_device) has CUDA's autocast, streams and allocator, and the CPU's arithmetic. Losses are
compared with a run on the CPU.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from qwen_cache import open_cache

from .support.caches import SMALL as SMALL_BUILD
from .support.caches import SMALL_ONE_IMAGE
from .support.commands import run
from .support.judge import assert_same
from .support.runs import Trainer, column
from .support.simulated import (
    ACTIVATIONS,
    SETTINGS,
    TABLE,
    TWO_DEVICES,
    Job,
    Report,
    done,
    faults,
    run_jobs,
    sources_in,
    training,
    waits,
    with_transformer,
)

pytestmark = pytest.mark.slow

LOSS = 1e-2
"""Relative, bfloat16: a loss is a mean over thousands of values that err by 2^-8 or so."""
LAYERS = 4
OFFLOAD = {"train.offload_blocks": LAYERS}
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    **{kind: {"model.quantization": kind} for kind in ("int8_convrot", "fp8", "nf4")},
    "full": {"train.method": "full"},
    "float32": {"train.mixed_precision": "no"},
}
WAITS = {"item": 2}
"""In a step: the loss, and the norm of the gradient, both needed to notice what is not a number."""
WAITS_WITH_TABLE = {"item": 2, "download": 1}
"""The noise levels too, to find their rows."""

OUTSIDE = {"edit-plus packed": (70, 16), "edit-plus padded": (74, 11), "qwen-image-21 packed": (80, 29)}
"""The kernels and the copies from the host of a step outside the blocks, at most."""
COPY, UPDATE = "a copy from the host", "aten::_fused_adamw_"


def matrix() -> dict[str, dict[str, Any]]:
    """Every combination of layout, kind of weights, table and offloading that is not refused.

    Of padded rows, which no accelerator has by default, all pairs: table and offloading with plain weights and
    int8_convrot.
    """
    cases = {}
    for layout, (kind, changes), table, offload in itertools.product(
        ("padded", "packed"), KINDS.items(), ({}, TABLE), ({}, OFFLOAD)
    ):
        if (offload and kind == "full") or (table and kind in ("full", "float32")):
            continue
        if layout == "padded" and (table or offload) and kind not in ("none", "int8_convrot"):
            continue
        name = f"{layout} {kind}{' table' * bool(table)}{' offload' * bool(offload)}"
        cases[name] = {"train.layout": layout, **changes, **table, **offload}
    return cases


MATRIX = matrix()


# ---- models and jobs -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerator")


@pytest.fixture(scope="module")
def deep(folder: Path, tiny_model: Callable[[str], Path]) -> Path:
    """A model with as many blocks as offloading needs to show what it does."""
    return with_transformer(tiny_model("edit-plus"), folder / "deep", num_layers=LAYERS)


@pytest.fixture(scope="module")
def matrix_reports(folder: Path, deep: Path, built: Callable[..., Path]) -> dict[str, Report]:
    cache = built("edit-plus")
    return run_jobs(
        folder / "matrix",
        {name: training(cache, deep, folder / "runs" / name, settings) for name, settings in MATRIX.items()},
    )


# ---- building a cache ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(folder: Path) -> Callable[[str], list[str]]:
    return sources_in(folder)


def building(source: list[str], out: Path, model: Path, *options: str, **job: Any) -> Job:
    small = SMALL_ONE_IMAGE if "qwen-image-21" in model.name else SMALL_BUILD
    arguments = ["build", *source, "--out", str(out), "--model", str(model), *small, *options]
    return {"program": "qwen-cache", "arguments": arguments, **job}


@pytest.fixture(scope="module")
def cpu_caches(
    folder: Path, sources: Callable[[str], list[str]], tiny_model: Callable[[str], Path]
) -> Callable[[str], Path]:
    """A cache that was built on the CPU, by variant."""
    made: dict[str, Path] = {}

    def cache(variant: str) -> Path:
        if variant not in made:
            job = building(sources(variant), folder / "cpu caches" / variant, tiny_model(variant))
            result = run(job["program"], *job["arguments"])
            assert result.code == 0, result.stderr
            made[variant] = folder / "cpu caches" / variant
        return made[variant]

    return cache


ONE_DEVICE = ("--vae-device", "simu:0", "--text-device", "simu:0")
TEXT_ALONE = ("--vae-device", "cpu", "--text-device", "simu:0")
BUILDS = {
    "two devices": ("edit-plus", TWO_DEVICES),
    "one device": ("edit-plus", ONE_DEVICE),
    "one condition image": ("edit", TWO_DEVICES),
    "text to image": ("t2i", TWO_DEVICES),
    "qwen-image-21": ("qwen-image-21", ONE_DEVICE),
    "text encoder alone": ("edit-plus", TEXT_ALONE),
    "text encoder of qwen-image-21 alone": ("qwen-image-21", TEXT_ALONE),
}


@pytest.fixture(scope="module")
def builds(folder: Path, sources: Callable[[str], list[str]], tiny_model: Callable[[str], Path]) -> dict[str, Report]:
    jobs = {
        name: building(sources(variant), folder / "caches" / name, tiny_model(variant), *devices)
        for name, (variant, devices) in BUILDS.items()
    }
    return run_jobs(folder / "builds", jobs)


def assert_same_cache(found: Path, expected: Path) -> None:
    """Tensors of the same samples; the tolerance of tests/support/judge.py for float32."""
    ours, judge = open_cache(found), open_cache(expected)
    assert sorted(sample.key for sample in ours) == sorted(sample.key for sample in judge)
    for sample in judge:
        other = ours[sample.key]
        for name in sample.row.meta.tensors.keys() - {"thumbnails"}:
            assert_same(other[name], sample[name])


@pytest.mark.parametrize("name", BUILDS)
def test_a_cache_is_that_of_the_cpu(
    name: str, builds: dict[str, Report], folder: Path, cpu_caches: Callable[[str], Path]
) -> None:
    done(builds[name])
    assert_same_cache(folder / "caches" / name, cpu_caches(BUILDS[name][0]))


@pytest.mark.parametrize("name", BUILDS)
def test_patches_are_multiplied_on_the_device(name: str, builds: dict[str, Report]) -> None:
    """The VAE has all convolutions."""
    assert (builds[name]["convolutions"] == 0) == (BUILDS[name][1] == TEXT_ALONE)


@pytest.mark.parametrize(("name", "device"), [("two devices", "0"), ("two devices", "1"), ("one device", "0")])
def test_a_build_without_memory_for_a_batch_makes_it_smaller(
    name: str,
    device: str,
    builds: dict[str, Report],
    folder: Path,
    sources: Callable[[str], list[str]],
    tiny_model: Callable[[str], Path],
) -> None:
    """In either lane, also where both share a device. The cache is the same."""
    variant, devices = BUILDS[name]
    capacity = {device: int(0.9 * builds[name]["peaks"][device]["active"])}
    out = folder / "little memory" / f"{name} {device}"
    job = building(sources(variant), out, tiny_model(variant), *devices, capacity=capacity)
    done(run_jobs(folder / "little memory jobs" / f"{name} {device}", {"build": job})["build"])
    assert_same_cache(out, folder / "caches" / name)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_the_cpu() -> dict[str, list[float]]:
    """The losses of runs on the CPU, by their settings."""
    return {}


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
@pytest.mark.parametrize("name", MATRIX)
def test_two_steps_are_those_of_the_cpu(
    name: str,
    matrix_reports: dict[str, Report],
    of_the_cpu: dict[str, list[float]],
    deep: Path,
    built: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Offloading changes nothing."""
    report, settings = done(matrix_reports[name]), {**SETTINGS, **MATRIX[name]}
    settings.pop("train.offload_blocks", None)
    if (key := json.dumps(settings)) not in of_the_cpu:
        of_the_cpu[key] = column(Trainer(built("edit-plus"), deep, tmp_path)(settings=settings), "loss")
    cpu = of_the_cpu[key]
    bound = 1e-5 if "float32" in name else LOSS
    assert report["losses"] == pytest.approx(cpu, rel=bound)


@pytest.mark.parametrize("name", MATRIX)
def test_the_host_waits_for_the_loss_and_the_gradient_alone(name: str, matrix_reports: dict[str, Report]) -> None:
    assert waits(matrix_reports[name]["waits"][1]) == (WAITS_WITH_TABLE if "table" in name else WAITS)


@pytest.fixture(scope="module")
def depths(
    folder: Path, cpu_caches: Callable[[str], Path], tiny_model: Callable[[str], Path]
) -> dict[tuple[str, int], Report]:
    """Three steps of models with 2 and with 4 blocks."""
    jobs = {}
    for name in OUTSIDE:
        variant, _, layout = name.partition(" ")
        for layers in (2, 4):
            model = folder / f"{variant} {layers}"
            if not model.exists():
                with_transformer(tiny_model(variant), model, num_layers=layers)
            settings = {"train.layout": layout, "train.max_steps": 3, "train.ema_decay": 0.9}
            out = folder / "depths" / f"{name} {layers}"
            jobs[name, layers] = training(cpu_caches(variant), model, out, settings)
    return run_jobs(folder / "depths", jobs)


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_step_does_little_outside_the_blocks(name: str, depths: dict[tuple[str, int], Report]) -> None:
    """Few kernels, and few copies from the host, which are asynchronous: those that do not grow with the blocks.

    All weights are updated by one kernel, and averaged by one on CUDA.
    """
    two, four = (Counter(done(depths[name, layers])["launches"][2]) for layers in (2, 4))
    fixed = {operator: 2 * count - four[operator] for operator, count in two.items()}
    copies, kernels = fixed.pop(COPY), sum(max(0, count) for count in fixed.values())
    at_most = OUTSIDE[name]
    assert two[COPY] == four[COPY]
    assert kernels <= at_most[0]
    assert copies <= at_most[1]
    assert two[UPDATE] == four[UPDATE] == 1


@pytest.mark.parametrize("name", [name for name in MATRIX if name.startswith("packed")])
def test_packed_rows_in_half_precision_go_through_the_variable_length_kernel(
    name: str, matrix_reports: dict[str, Report]
) -> None:
    """Also with quantised and with trained weights. Once per block and pass; recomputation is a second pass."""
    expected = 0 if "float32" in name else 2 * 2 * LAYERS
    assert matrix_reports[name]["varlen_calls"] == expected


@pytest.mark.parametrize("name", [name for name in MATRIX if name.endswith(" offload")])
def test_offloading_holds_two_blocks_and_pins_what_the_weights_take(
    name: str, matrix_reports: dict[str, Report]
) -> None:
    """Two of all blocks stay. Without offloading, small tensors take up more: each allocation is 512 bytes or more."""
    plain, offloaded = matrix_reports[name.removesuffix(" offload")]["peaks"], matrix_reports[name]["peaks"]
    pinned = offloaded["pinned"] - plain["pinned"]
    saved = plain["0"]["active"] - offloaded["0"]["active"]
    assert saved >= 0.97 * pinned * (LAYERS - 2) / LAYERS
    assert offloaded["pinned_rounded"] - plain["pinned_rounded"] <= 1.05 * pinned


def test_equal_settings_give_equal_losses(matrix_reports: dict[str, Report]) -> None:
    """Offloading changes nothing."""
    for name in (name for name in MATRIX if name.endswith(" offload")):
        assert matrix_reports[name]["losses"] == matrix_reports[name.removesuffix(" offload")]["losses"], name


KEPT = {"train.gradient_checkpointing": 2}
HOST: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "every second block": (KEPT, {"blocks": OFFLOAD, "both": {**OFFLOAD, **ACTIVATIONS}}),
    "every block kept, padded, int8_convrot": (
        {"train.gradient_checkpointing": False, "train.layout": "padded", "model.quantization": "int8_convrot"},
        {"blocks": OFFLOAD},
    ),
    "every block recomputed": ({}, {"activations": ACTIVATIONS, "both": {"train.offload_blocks": 3, **ACTIVATIONS}}),
    "padded, full, accumulated": (
        {"train.layout": "padded", "train.method": "full", "train.gradient_accumulation_steps": 2},
        {"activations": ACTIVATIONS},
    ),
    "compiled": ({"train.compile": True}, {"blocks": OFFLOAD, "both": {**OFFLOAD, **ACTIVATIONS}}),
}
"""Settings, and what may be in host memory with them."""


@pytest.fixture(scope="module")
def host_reports(folder: Path, deep: Path, built: Callable[..., Path]) -> dict[str, Report]:
    cases = {name: settings for name, (settings, _) in HOST.items()}
    cases |= {f"{name}: {host}": {**HOST[name][0], **HOST[name][1][host]} for name in HOST for host in HOST[name][1]}
    cache = built("edit-plus")
    jobs = {name: training(cache, deep, folder / "host" / name, settings) for name, settings in cases.items()}
    return run_jobs(folder / "host jobs", jobs)


@pytest.mark.parametrize("name", HOST)
def test_nothing_depends_on_what_is_in_host_memory(name: str, host_reports: dict[str, Report]) -> None:
    """Blocks that are compiled, or whose activations are kept, and activations: no race, no further wait."""
    plain = done(host_reports[name])
    for host in HOST[name][1]:
        report = done(host_reports[f"{name}: {host}"])
        assert report["losses"] == plain["losses"], host
        assert waits(report["waits"][1]) == waits(plain["waits"][1]), host


@pytest.fixture(scope="module")
def other_runs(folder: Path, cpu_caches: Callable[[str], Path], tiny_model: Callable[[str], Path]) -> dict[str, Report]:
    """Everything else that a step or a run can do."""
    everything = {
        "train.ema_decay": 0.9,
        "train.gradient_accumulation_steps": 2,
        "train.caption_dropout": 0.5,
        "train.edit_mask_weight": 3.0,
        "train.validation_split": 0.4,
        "validation.validation_steps": 1,
        "validation.num_images": 1,
        "validation.images_every_steps": 1,
        "validation.num_inference_steps": 2,
    }
    cases = {
        "edit-plus": {**everything},
        "edit-plus table offload": {**everything, **TABLE, "train.offload_blocks": 2},
        "edit-2511 padded": {"train.layout": "padded"},
        "edit-2511 packed table": {**TABLE},
        "t2i full": {"train.method": "full", "train.ema_decay": 0.9},
        "qwen-image-21": {**everything, "train.edit_mask_weight": 1.0},
        "qwen-image-21 draws": {"train.noise_draws": 3, "train.offload_blocks": 2},
        "qwen-image-21 padded int8": {"train.layout": "padded", "model.quantization": "int8"},
    }
    jobs = {
        name: training(cpu_caches(name.split()[0]), tiny_model(name.split()[0]), folder / "others" / name, settings)
        for name, settings in cases.items()
    }
    return run_jobs(folder / "others", jobs)


def test_everything_else_that_training_does(other_runs: dict[str, Report], folder: Path) -> None:
    for name, report in other_runs.items():
        done(report)
        assert len(report["losses"]) == 2, name
    images = list((folder / "others" / "edit-plus" / "validation").rglob("*.safetensors"))
    assert images
    assert all(load_file(path)["latents"].isfinite().all() for path in images)


def test_faults_are_reported(folder: Path, deep: Path, built: Callable[..., Path]) -> None:
    """The same runs with one fault each."""
    broken = {
        "weights used before they arrive": ("race", OFFLOAD),
        "weights replaced while they are used": ("race", OFFLOAD),
        "memory of a batch reused at once": ("race", {}),
        "activations used before they arrive, and freed before they left": ("race", ACTIVATIONS),
        "activations copied before they are computed": ("race", ACTIVATIONS),
        "noise left on the CPU": ("mixed", {}),
        "noise on the other device": ("mixed", {}),
    }
    cache = built("edit-plus")
    jobs = {
        name: training(cache, deep, folder / "broken" / name, settings, broken=name)
        for name, (_, settings) in broken.items()
    }
    for name, report in run_jobs(folder / "broken", jobs).items():
        assert {event["kind"] for event in faults(report)} == {broken[name][0]}, name


def test_too_little_memory_says_what_to_do(folder: Path, deep: Path, built: Callable[..., Path]) -> None:
    job = training(built("edit-plus"), deep, folder / "small", {}, capacity={"0": 3_000_000})
    report = run_jobs(folder / "small", {"run": job})["run"]
    assert report["exit_code"] == 2
    assert "simu has too little memory for this run" in report["stderr"]


# ---- generating images -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def predictions(folder: Path, tiny_model: Callable[[str], Path]) -> dict[str, tuple[Path, Report]]:
    """The same image with everything on the device, component by component, and layer by layer."""
    jobs, paths = {}, {}
    for variant, offload in itertools.product(("t2i", "qwen-image-21"), ("none", "model", "sequential")):
        name = f"{variant} {offload}"
        paths[name] = folder / "images" / f"{name}.png"
        size = "predict.height=128 predict.width=96 predict.dtype=float32 predict.num_inference_steps=2"
        jobs[name] = {
            "program": "qwen-train",
            "arguments": [
                *("predict", "--model", str(tiny_model(variant)), "--prompt", "a red bridge"),
                *("--negative-prompt", "fog", "--true-cfg-scale", "4"),
                *("--device", "simu:0", "--offload", offload, "--out", str(paths[name])),
                *itertools.chain(*(["--set", setting] for setting in size.split())),
            ],
        }
    reports = run_jobs(folder / "predictions", jobs)
    return {name: (paths[name], report) for name, report in reports.items()}


@pytest.mark.parametrize("variant", ["t2i", "qwen-image-21"])
def test_an_image_does_not_depend_on_offloading(variant: str, predictions: dict[str, tuple[Path, Report]]) -> None:
    images = {}
    for offload in ("none", "model", "sequential"):
        path, report = predictions[f"{variant} {offload}"]
        done(report)
        images[offload] = np.asarray(Image.open(path))
    assert (images["model"] == images["none"]).all()
    assert (images["sequential"] == images["none"]).all()
