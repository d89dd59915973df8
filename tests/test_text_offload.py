"""A text encoder whose layers wait in host memory: the same embeddings bit for bit, and two layers on the device.

On the CPU "the device" is the same memory, but copies are made as for a GPU, and these are what is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.models.devices import ALIGNMENT, HostEmbedding, OffloadedBlocks
from qwen_cache.models.folder import ENCODER_PARTS, ModelFolder, open_model
from qwen_cache.models.hardware import Kind, Placement

from .support.caches import build
from .support.marks import slow
from .support.text_encoder import images

CPU = torch.device("cpu")
PROMPTS = ("make it blue", "remove the tower")


@pytest.fixture
def as_accelerator() -> Iterator[None]:
    """The CPU as a device that has a memory of its own."""
    with patch.object(Placement, "is_partial", lambda self, device: self.offload or self.quantization != "none"):
        yield


def encoder(model: ModelFolder, kind: Kind = "none", *, offload: bool) -> TextEncoder:
    found = TextEncoder(model, CPU, torch.bfloat16, 10_000, attend=True, placement=Placement(kind, offload))
    if not offload:  # weights of a file are mapped, and by their addresses a CPU's kernels choose the order of sums
        for parameter in found.model.parameters():
            parameter.data = parameter.data.clone()
    return found


def requests(of: TextEncoder, count: int = 2) -> list[TextRequest]:
    photographs = [each.resize((128, 96)) for each in images(count)]
    return [TextRequest(of.inputs([image]), prompt, ()) for image, prompt in zip(photographs, PROMPTS, strict=False)]


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("edit-plus", "none"),
        ("qwen-image-21", "none"),
        ("edit-plus", "nf4"),
        slow("edit-plus", "int8"),
        slow("edit-plus", "fp8"),
        slow("qwen-image-21", "int8"),
    ],
)
def test_embeddings_and_attention_are_the_same(
    variant: str, kind: Kind, tiny_model: Callable[[str], Path], as_accelerator: None
) -> None:
    """Two passes about images, so that the first layers are fetched twice."""
    model = open_model(str(tiny_model(variant)), ENCODER_PARTS)
    with patch.object(Placement, "is_partial", lambda self, device: False):
        plain = encoder(model, kind, offload=False)
    offloaded = encoder(model, kind, offload=True)
    for some in (requests(plain), requests(plain, 1)):
        for found, expected in zip(offloaded.encode(some), plain.encode(some), strict=True):
            for name in ("prefix", "prompt", "empty", "attention"):
                assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("variant", ["edit-plus", slow("qwen-image-21")])
def test_two_layers_of_each_stack_are_on_the_device(
    variant: str, tiny_model: Callable[[str], Path], as_accelerator: None
) -> None:
    """Every weight that a layer computes with is in the same memory, which has room for two layers."""
    offloaded = encoder(open_model(str(tiny_model(variant)), ENCODER_PARTS), offload=True)
    model = offloaded.model
    for stack, first in ((model.visual.blocks, "norm1"), (model.language_model.layers, "input_layernorm")):
        sizes = [sum(p.numel() * p.element_size() for p in layer.parameters()) for layer in stack]
        count = sum(1 for _ in stack[0].parameters())
        places = watch(stack, first)
        offloaded.encode(requests(offloaded))
        assert len(places) == 2
        assert sum(size for _, size in places) <= 2 * (max(sizes) + ALIGNMENT * count)
        assert all(p.device.type == "meta" for layer in stack for p in layer.parameters()), "no data between passes"
    on_meta = {name.split(".")[1] for name, p in model.named_parameters() if p.device.type == "meta"}
    assert on_meta == {"blocks", "layers"}
    assert type(model.language_model.embed_tokens) is HostEmbedding


def watch(stack: Sequence[Any], first: str) -> set[tuple[int, int]]:
    """The places and sizes of the memory in which layers have their weights when they compute."""
    places: set[tuple[int, int]] = set()

    def note(layer: nn.Module) -> None:
        storages = [p.untyped_storage() for p in layer.parameters()]
        places.update((storage.data_ptr(), storage.nbytes()) for storage in storages)

    for layer in stack:
        getattr(layer, first).register_forward_pre_hook(lambda *_, layer=layer: note(layer))
    return places


def test_a_copy_is_under_way_before_its_layer_computes(
    tiny_model: Callable[[str], Path], as_accelerator: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last layer the first one is fetched, for the next pass."""
    offloaded = encoder(open_model(str(tiny_model("edit-plus")), ENCODER_PARTS), offload=True)
    layers = offloaded.model.language_model.layers
    events: list[str] = []
    copy = OffloadedBlocks._copy
    monkeypatch.setattr(
        OffloadedBlocks, "_copy", lambda host, i, buffer: events.append(f"copy {i}") or copy(host, i, buffer)
    )
    for i, layer in enumerate(layers):
        layer.input_layernorm.register_forward_hook(lambda *_, i=i: events.append(f"run {i}"))
    for prompt in PROMPTS:  # without images, so without the vision tower
        offloaded.embed(offloaded.read([{}]), [(0, prompt, None)])
    assert len(layers) == 4
    ahead = ["copy 1", "run 0", "copy 2", "run 1", "copy 3", "run 2", "copy 0", "run 3"]
    assert events == ["copy 0", *ahead, *ahead]


def test_rows_of_the_table_are_those_of_the_device(tiny_model: Callable[[str], Path], as_accelerator: None) -> None:
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    table = encoder(model, offload=True).model.language_model.embed_tokens
    ids = torch.tensor([[3, 1, 3]])
    found: Tensor = table(ids)
    assert torch.equal(found, table.weight[ids])


def test_on_the_cpu_it_has_no_effect_and_plan_and_build_say_so(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    model = tiny_model("edit-plus")
    offload = ("--set", "cache.text_offload=true", "--text-device", "cpu")
    result = build(pairs, tmp_path / "shards", model, "--dry-run", *offload)
    assert "         cache.text_offload has no effect on the CPU\n" in result.stderr
    result = build(pairs, tmp_path / "shards", model, *offload)
    assert (result.code, result.stderr.count("warning: cache.text_offload has no effect on the CPU\n")) == (0, 1)
    found = encoder(open_model(str(model), ENCODER_PARTS), offload=True)
    assert not any(p.device.type == "meta" for p in found.model.parameters())
