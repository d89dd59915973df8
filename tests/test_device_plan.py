"""A build's need of each device, before anything is loaded: the real encoders on a card of 8 GB, and messages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache.encode import build as encode_build
from qwen_cache.encode import preflight
from qwen_cache.encode.components import Component, DeviceMemory, TextWork
from qwen_cache.encode.memory import text_memory
from qwen_cache.encode.simulated import text_lane, vae_lane
from qwen_cache.models.hardware import FRAGMENTATION, RESERVED, Placement, piece_sizes
from qwen_cache.terminal import human_bytes

from .support.caches import build, plan
from .support.commands import refused
from .support.fake_lanes import FakeLanes
from .support.full_size import SEVEN_B, VAE
from .support.marks import slow
from .support.paths import ROOT

CARD = 8 * 2**30
"""The memory of a card of 8 GB."""
USABLE = 8_000_000_000
"""The part that is left for tensors: less the 0.4 to 0.8 GB that a driver takes."""
EDIT = TextWork(((1024, 1024),), 80)
"""Edit, whose text encoder sees a megapixel: 1369 tokens. Of all models it needs the most memory."""
LAYER = 2 * 3584 * (3584 + 512) + 3 * 3584 * 18944
"""The matrices of a layer of the language model: queries and outputs, keys and values, and the MLP."""
BIASES_AND_NORMS = 3584 + 2 * 512 + 2 * 3584
VISION = 32 * (4 * 1280**2 + 3 * 1280 * 3420)
"""The matrices of the vision tower's blocks."""
TABLE = 152064 * 3584


def with_blocks(count: int) -> str:
    """The text encoder with this number of blocks in both stacks, whose kinds of attention are all there."""
    config = json.loads(SEVEN_B)
    config["text_config"] |= {"num_hidden_layers": count, "layer_types": None}
    config["vision_config"] |= {"depth": count, "fullatt_block_indexes": [count // 2]}
    return json.dumps(config)


@cache
def of_the_vae() -> Component:
    """The VAE's part with images of a megapixel."""
    return vae_lane(VAE, (1024, 1024), torch.bfloat16)


def needed(placement: Placement) -> DeviceMemory:
    """Both encoders of Qwen-Image-Edit on one device, with images of a megapixel."""
    partial = placement != Placement()
    text = text_lane(SEVEN_B, EDIT, torch.bfloat16, placement, partial=partial)
    return DeviceMemory({"vae": of_the_vae(), "text_encoder": text}, has_reserve=True)


@pytest.mark.parametrize(
    "placement",
    [
        Placement("int8"),
        slow(Placement("fp8")),
        slow(Placement("nf4")),
        Placement(offload=True),
        slow(Placement("int8", offload=True)),
    ],
)
def test_each_setting_alone_is_enough_for_8_gb(placement: Placement) -> None:
    memory = needed(placement)
    assert memory.least < CARD
    assert (1 + FRAGMENTATION) * memory.tensors < USABLE


def test_without_them_it_takes_17_gb() -> None:
    memory = needed(Placement())
    assert memory.least == pytest.approx(17e9, rel=0.03)
    assert memory.encoders["text_encoder"].host == 0
    assert memory.least == RESERVED + int((1 + FRAGMENTATION) * memory.tensors)
    assert memory.at_once > memory.least + 1e9, "the VAE on a whole image"


@pytest.mark.parametrize(("kind", "per_weight"), [("int8", 1), slow("fp8", 1), slow("nf4", 0.5 + 4 / 64)])
def test_weights_are_those_of_the_published_sizes(kind: Any, per_weight: float) -> None:
    """The language model's matrices on the device, quantised; table and vision tower on the host."""
    whole = text_lane(SEVEN_B, EDIT, torch.bfloat16)
    found = text_lane(SEVEN_B, EDIT, torch.bfloat16, Placement(kind), partial=True)
    two_blocks = VISION // 32 * 2 * 2
    rest = whole.weights - 2 * (28 * LAYER + VISION + TABLE)
    assert found.weights == pytest.approx(28 * LAYER * per_weight + two_blocks + rest, rel=2e-3)
    assert found.host == pytest.approx(2 * (VISION + TABLE), rel=0.01)
    offloaded = text_lane(SEVEN_B, EDIT, torch.bfloat16, Placement(offload=True), partial=True)
    assert offloaded.weights == pytest.approx(2 * 2 * LAYER + two_blocks + rest, rel=2e-3)
    each = 28 * sum(piece_sizes(2 * (LAYER + BIASES_AND_NORMS)))
    assert offloaded.host == pytest.approx(each + 2 * (VISION + TABLE), rel=0.01)
    assert offloaded.activations == whole.activations


TWO_IMAGES = (384, 384), (320, 448)


@pytest.mark.parametrize(
    ("encoder", "images", "placement"),
    [
        (with_blocks(4), TWO_IMAGES, Placement("int8")),
        slow(SEVEN_B, TWO_IMAGES, Placement("int8")),
        slow(SEVEN_B, (), Placement(offload=True)),
    ],
    ids=["4 blocks", "all blocks", "offloaded"],
)
def test_one_measurement_is_for_prompts_of_any_length(
    encoder: str, images: Any, placement: Placement, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real text encoder, against a pass of that length; only other images are measured again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text_memory.cache_clear()
    for tokens in (3, 90, 1200):
        work = TextWork(images, tokens)
        found = text_memory(encoder, work, "bfloat16", placement, partial=True)
        assert found == text_lane(encoder, work, torch.bfloat16, placement, partial=True)
    assert len(list(tmp_path.rglob("*.json"))) == 1
    text_memory(encoder, TextWork(((448, 448),), 90), "bfloat16", placement, partial=True)
    assert len(list(tmp_path.rglob("*.json"))) == 2
    text_memory.cache_clear()


# ---- what a build says -----------------------------------------------------------------------------------------------

BOTH_ON = ("--vae-device", "cuda:0", "--text-device", "cuda:0")


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def on_a_card(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """From now on this machine has cuda:0 with so much memory."""
    monkeypatch.setattr(preflight, "_capacity", lambda name: capacity if name == "cuda:0" else None)


def test_the_plan_of_a_device_that_is_not_here(pairs: Path, tmp_path: Path, model: Path) -> None:
    """For the largest image and the longest prompt of the source."""
    (found,) = plan(pairs, tmp_path / "shards", model, *BOTH_ON, "--set", "cache.text_offload=true")["memory"]
    config = (model / "text_encoder" / "config.json").read_text(encoding="utf-8")
    assert (found["device"], found["capacity"], found["fits"], found["savings"]) == ("cuda:0", None, None, [])
    tensors = sum(each["weights"] for each in found["encoders"].values())
    tensors += max(each["least_activations"] for each in found["encoders"].values())
    assert found["needed"] == RESERVED + int((1 + FRAGMENTATION) * tensors) < found["at_once"]
    text = text_lane(config, EDIT, torch.float32, Placement(offload=True), partial=True)
    assert found["encoders"]["text_encoder"]["weights"] == text.weights
    assert found["host"] == text.host > 0
    printed = build(pairs, tmp_path / "shards", model, "--dry-run", *BOTH_ON).stderr
    lines = [line for line in printed.splitlines() if line.startswith("memory")]
    assert len(lines) == 1
    assert lines[0].startswith(f"memory   cuda:0: {human_bytes(RESERVED)[:2]}")
    assert " for VAE and text encoder, weights " in lines[0]
    assert lines[0].endswith(" without tiles and turns")


def test_each_device_has_its_encoders(pairs: Path, tmp_path: Path, model: Path) -> None:
    devices = ("--vae-device", "cuda:0,cuda:1", "--text-device", "cuda:1,cpu")
    found = plan(pairs, tmp_path / "shards", model, *devices)["memory"]
    assert {each["device"]: [*each["encoders"]] for each in found} == {
        "cuda:0": ["vae"],
        "cuda:1": ["vae", "text_encoder"],
        "cpu": ["text_encoder"],
    }
    on_cpu = found[2]
    assert on_cpu["needed"] == sum(sum(e[k] for k in ("weights", "activations")) for e in on_cpu["encoders"].values())


def test_nothing_to_encode_needs_no_memory(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    assert build(pairs, tmp_path / "shards", model).code == 0
    assert plan(pairs, tmp_path / "shards", model)["memory"] is None


def test_a_name_that_no_device_has(pairs: Path, tmp_path: Path, model: Path) -> None:
    result = build(pairs, tmp_path / "shards", model, "--dry-run", "--text-device", "gpu7")
    refused(result, "--text-device: no device has this name (found gpu7)")


@pytest.mark.slow
def test_a_card_that_is_too_small_is_refused_with_what_would_fit(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """Encoders of the real sizes; nothing is loaded."""
    on_a_card(monkeypatch, CARD)
    real = preflight.read_config
    monkeypatch.setattr(preflight, "read_config", lambda path: read_full_size(path) or real(path))
    result = build(pairs, tmp_path / "shards", model, "--dry-run", *BOTH_ON, "--dtype", "bfloat16")
    what = r"cuda:0 has too little memory for the encoders \(expected about 1[67]\.\d GB, found 8\.6 GB\)"
    settings = ("text_offload=true", "text_quantization=int8", "text_quantization=fp8", "text_quantization=nf4")
    advice = " or ".join(rf"cache\.{setting} \(([2-8]\.\d) GB\)" for setting in settings)
    refused(result)
    assert re.search(rf"error: {what}\n  → set {advice}\n", result.stderr), result.stderr
    assert re.search(rf"\n         this may not fit: set {advice}\n", result.stderr), result.stderr


def test_a_card_that_no_setting_helps_is_refused(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, fast: list[FakeLanes]
) -> None:
    """In the plan, and before a build loads anything."""
    on_a_card(monkeypatch, 1000)
    monkeypatch.setattr(encode_build, "has_accelerator", lambda: True)
    monkeypatch.setattr(preflight, "check_devices", lambda config: None)
    for options in ((), ("--dry-run",)):
        result = build(pairs, tmp_path / "shards", model, *BOTH_ON, *options)
        what = "cuda:0 has too little memory for the encoders (expected about 8"
        refused(result, what, "found 1.0 kB)", "→ name another device with --vae-device or --text-device")
    assert not fast


def read_full_size(path: Path) -> dict[str, Any] | None:
    configs = {"vae": VAE, "text_encoder": SEVEN_B}
    return dict(json.loads(configs[path.parent.name])) if path.parent.name in configs else None


def test_a_card_that_may_be_too_small_is_tried(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path, fast: list[FakeLanes]
) -> None:
    """The memory that its driver takes is only estimated."""
    on_a_card(monkeypatch, RESERVED // 2)
    result = build(pairs, tmp_path / "shards", model, "--dry-run", *BOTH_ON)
    assert result.code == 0
    assert "this may not fit: name another device with --vae-device or --text-device\n" in result.stderr


@pytest.mark.slow
def test_the_table_of_the_page_is_computed() -> None:
    text = (ROOT / "docs" / "howto" / "fit-your-gpu.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (none|`cache[^|]*) \| ([\d.]+) GB \| ([\d.]+|–)(?: GB)? \|", text, re.MULTILINE)
    assert len(rows) == 5
    for settings, device, host in rows:
        quantization = re.search(r"text_quantization=(\w+)", settings)
        found = needed(Placement(quantization[1] if quantization else "none", "text_offload=true" in settings))
        assert f"{found.least / 1e9:.1f}" == device, settings
        waiting = sum(each.host for each in found.encoders.values())
        assert (f"{waiting / 1e9:.1f}" if waiting else "–") == host, settings
    whole = needed(Placement("int8"))
    assert f"with {(whole.at_once - whole.least) / 1e9:.1f} GB more" in " ".join(text.split())
