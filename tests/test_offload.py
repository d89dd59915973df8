"""Blocks and activations that wait in host memory: training is the same bit for bit, and those of two blocks are on
the device at most.

On the CPU "the device" is the same memory, but copies are made as for a GPU, and these are what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_cache.cli import doctor
from qwen_cache.models.devices import ALIGNMENT, OffloadedBlocks, frozen_slots
from qwen_cache.models.hardware import piece_sizes
from qwen_cache.settings.load import load_config
from qwen_train.memory.prediction import host_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model import placement
from qwen_train.model.saved_tensors import OffloadedInputs
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.training import prepare
from qwen_train.weights import prepare_for_training

from .support.commands import refused
from .support.full_size import EDIT, REAL
from .support.marks import slow
from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, column
from .support.transformer_judge import TINY

CPU = torch.device("cpu")


@pytest.fixture
def plain(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A run that offloads nothing.

    It gets copies of the weights as well: those of a file are mapped, and by the addresses at which they lie then, the
    kernels of a CPU choose in which order they add up.
    """

    def copied(transformer: Any, *_: Any) -> None:
        for parameter in transformer.transformer_blocks.parameters():
            parameter.data = parameter.data.clone()

    def run(*options: str, **changes: Any) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "offload_blocks", copied)
            return train(*options, **{"out": "plain", "train__offload_blocks": 2, **changes})

    return run


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train.gradient_checkpointing": 2, "train.offload_activations": True},
        slow({"train.gradient_checkpointing": False, "train.layout": "packed"}),
        slow({"train.offload_activations": True, "train.layout": "packed"}),
        slow({"train.layout": "packed", "train.gradient_accumulation_steps": 2, "train.batch_size": 2}),
        slow({"train.mixed_precision": "bf16", "train.tabulated_modulation": True}),
        slow({"train.lora.use_dora": True, "train.ema_decay": 0.9}),
    ],
)
def test_what_is_trained_is_the_same(train: Trainer, plain: Callable[..., Path], settings: dict[str, Any]) -> None:
    settings = {**EVERYTHING_RANDOM, **settings}
    judge = plain(settings={**settings, "train.offload_activations": False})
    found = train(settings=settings, train__offload_blocks=2)
    assert column(found, "loss") == column(judge, "loss")
    expected, weights = load_file(judge / LORA), load_file(found / LORA)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("kind", ["int8_convrot", "nf4", slow("int8"), slow("fp8"), slow("fp8_w8a8")])
def test_quantised_weights_too(train: Trainer, plain: Callable[..., Path], kind: str) -> None:
    """A block that is recomputed, and one that is not."""
    settings = {"model__quantization": kind, "train__gradient_checkpointing": 2, "train__max_steps": 2}
    judge = plain(**settings)
    assert column(train(**settings, train__offload_blocks=2), "loss") == column(judge, "loss")


@pytest.mark.slow
def test_validation_and_going_on(train: Trainer, plain: Callable[..., Path]) -> None:
    """A forward pass without a backward pass, an image, and the checkpoint of a run that offloaded nothing."""
    settings = {**EVERYTHING_RANDOM, "train.validation_split": 0.4, "validation.validation_steps": 1}
    settings |= {
        "lr_scheduler.name": "constant",
        "validation.num_images": 1,
        "validation.images_every_steps": 2,
        "validation.num_inference_steps": 2,
    }
    judge = plain(settings=settings, train__max_steps=4)
    plain(settings=settings, out="out", train__max_steps=2)
    out = train("--resume", settings=settings, train__max_steps=4, train__offload_blocks=2)
    assert column(out, "validation_loss") == column(judge, "validation_loss")
    for path in (judge / "validation").rglob("*.safetensors"):
        other = out / path.relative_to(judge)
        assert torch.equal(load_file(path)["latents"], load_file(other)["latents"])


# ---- where the weights are -------------------------------------------------------------------------------------------


def transformer(layers: int, offloaded: int, *settings: str) -> Any:
    torch.manual_seed(0)
    model = QwenImageMultiResTransformer2DModel(**{**TINY, "num_layers": layers})
    prepare_for_training(model.requires_grad_(False), load_config(None, settings).train)
    return placement.offload_blocks(model, offloaded, CPU) if offloaded else model


def loss_of(model: Any, height: int = 4) -> torch.Tensor:
    torch.manual_seed(1)
    image, text = torch.randn(2, 6 * height, TINY["in_channels"]), torch.randn(2, 7, TINY["joint_attention_dim"])
    output: torch.Tensor = model(image, text, None, torch.tensor([0.3, 0.9]), [(1, height, 6)], return_dict=False)[0]
    return output.square().mean()


def step(model: Any) -> torch.Tensor:
    loss = loss_of(model)
    loss.backward()
    return loss.detach()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(model: Any, judge: Any) -> None:
    found, expected = gradients_of(model), gradients_of(judge)
    assert found.keys() == expected.keys()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items())


@pytest.mark.parametrize("offloaded", [slow(1), slow(2), 3, slow(7)])
def test_at_most_two_blocks_are_on_the_device(offloaded: int) -> None:
    """Every weight that a block computes with is in the same memory, which has room for two blocks."""
    model, plain = transformer(7, offloaded), transformer(7, 0)
    places: set[tuple[int, int]] = set()
    for block in (model.transformer_blocks[i] for i in placement.offloaded_indices(7, offloaded)):
        slots = list(frozen_slots(block))
        block.attn.register_forward_pre_hook(
            lambda *_, slots=slots: places.update(
                (storage.data_ptr(), storage.nbytes())
                for module, name in slots
                for storage in [module._parameters[name].untyped_storage()]
            )
        )
    for _ in range(3):
        assert torch.equal(step(model), step(plain))
    largest = max(
        sum(p.numel() * p.element_size() for p in block.parameters() if not p.requires_grad)
        for block in plain.transformer_blocks
    )
    assert len(places) == min(offloaded, 2)
    assert sum(size for _, size in places) <= 2 * (largest + ALIGNMENT * len(slots))
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 679_600_128, 2**30, 2**30 + 1])
def test_host_memory_is_what_the_weights_take(size: int) -> None:
    """torch pins powers of two; in these pieces at most a 64th is lost."""
    pieces = piece_sizes(size)
    assert all(piece & (piece - 1) == 0 for piece in pieces)
    assert size <= sum(pieces) <= size + max(size // 64, 1)


def test_a_copy_is_under_way_before_its_block_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both directions, so that a GPU need not wait for it: but for the first block of all."""
    events: list[str] = []
    copy = OffloadedBlocks._copy
    monkeypatch.setattr(
        OffloadedBlocks, "_copy", lambda host, i, buffer: events.append(f"copy {i}") or copy(host, i, buffer)
    )
    model = transformer(3, 3)
    for i, block in enumerate(model.transformer_blocks):
        block.img_norm1.register_forward_hook(lambda *_, i=i: events.append(f"run {i}"))
    step(model)
    there, back = ["copy 0", "copy 1", "run 0", "copy 2", "run 1", "run 2"], ["run 2", "copy 0", "run 1", "run 0"]
    assert events == [*there, *back]
    kept = transformer(3, 3, "train.gradient_checkpointing=false")
    for i, block in enumerate(kept.transformer_blocks):
        block.img_norm2.register_full_backward_hook(lambda *_, i=i: events.append(f"back {i}"))
    events.clear()
    step(kept)
    assert events == ["copy 0", "copy 1", "copy 2", "back 2", "copy 0", "back 1", "back 0"]


def test_what_waits_is_frozen_and_in_blocks_spread_evenly() -> None:
    """Outside of its block's pass such a weight has no data; everything else is on the device."""
    for name, parameter in transformer(6, 3).named_parameters():
        waits = name.startswith(("transformer_blocks.0.", "transformer_blocks.2.", "transformer_blocks.4."))
        assert parameter.device.type == ("meta" if waits and not parameter.requires_grad else "cpu"), name


# ---- activations -----------------------------------------------------------------------------------------------------


def test_activations_come_back_from_as_much_host_memory_as_is_predicted() -> None:
    """Host memory is kept, and serves smaller batches; those of the last block stay on the device."""
    settings = ["train.offload_activations=true", "train.mixed_precision='no'", "train.layout=padded"]
    model, plain = transformer(5, 0, *settings), transformer(5, 0)
    for height in (4, 2, 4):
        for each in (model, plain):
            loss_of(each, height).backward()
    assert_same_gradients(model, plain)
    host = [memory for memory, _ in model.offloaded_inputs.memory]
    config = {**model.config, "_class_name": "QwenImageTransformer2DModel"}
    predicted = host_bytes(config, load_config(None, settings), [SampleSize(((1, 4, 6),), 7)] * 2)
    assert len(host) == 4
    assert sum(len(piece) for memory in host for piece in memory.pieces) == pytest.approx(predicted, rel=0.02)


def test_activations_of_several_passes_at_once() -> None:
    """Two forward passes before their backward passes; and one without a backward pass."""
    model, plain = transformer(4, 4, "train.offload_activations=true"), transformer(4, 0)
    for each in (model, plain):
        loss_of(each, 2)
        first, second = loss_of(each), loss_of(each, 3)
        first.backward()
        second.backward()
    assert_same_gradients(model, plain)


def test_the_device_has_the_activations_of_two_blocks() -> None:
    """While a block is recomputed, its own and those of the block before; in the forward pass its own."""
    model, here = transformer(6, 0, "train.offload_activations=true"), list[int]()
    passes: list[Any] = []
    enter = OffloadedInputs.enter

    def entered(inputs: OffloadedInputs, *arguments: Any, **named: Any) -> Any:
        passes.append(enter(inputs, *arguments, **named))
        return passes[-1]

    def count(*_: Any) -> None:
        here.append(sum(row is not None for each in passes for row in each.rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OffloadedInputs, "enter", entered)
        for block in model.transformer_blocks:
            block.attn.register_forward_pre_hook(count)
        step(model)
    assert here == [2] * 11 + [0], "image and text of one block, beside those that the recomputed block has taken"


# ---- what it saves, and what is refused ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_planner_counts_what_stays() -> None:
    """All but two of the offloaded blocks, 339.8 M weights each in bfloat16; nothing else changes."""
    settings = ["train.mixed_precision=bf16"]
    plain = predict_memory(REAL, load_config(None, settings), EDIT, "accelerator")
    found = predict_memory(REAL, load_config(None, [*settings, "train.offload_blocks=60"]), EDIT, "accelerator")
    assert plain.weights - found.weights == pytest.approx(58 * 2 * 339.8e6, rel=1e-3)
    assert found.activations == plain.activations


@pytest.mark.slow
def test_host_memory_is_predicted() -> None:
    """In pinned pieces; the doctor counts with the same block."""
    settings = load_config(None, ["train.mixed_precision=bf16", "train.offload_blocks=60"])
    assert host_bytes(REAL, settings) == pytest.approx(60 * 2 * 339.8e6, rel=2e-2)
    assert host_bytes(REAL, settings) / 60 == pytest.approx(doctor.OFFLOADED_BLOCK_BYTES, rel=2e-2)
    assert host_bytes(REAL, load_config(None, [])) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__method": "full"}, "train.method=full"),
        ({"train__fsdp": True}, "train.fsdp=true"),
        (
            {"train__gradient_checkpointing": False, "train__offload_activations": True},
            "train.offload_activations and train.gradient_checkpointing=false exclude each other",
        ),
        (
            {"train__offload_blocks": 3},
            "train.offload_blocks exceeds the number of blocks (expected at most 2, found 3)",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(train: Trainer, changes: dict[str, Any], message: str) -> None:
    refused(train.try_(**{"train__offload_blocks": 2, **changes}), message)
