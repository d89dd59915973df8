"""The memory of training, predicted by part without training.

A training step of the real configuration runs once on tensors without data (`step.py`), and what it shows is remembered
(`pieces.py`): parameters, activations saved by autograd, recomputed blocks, gradients. Blocks are equal, so only a few
are run and the rest is extrapolated. Quantised weights, the optimizer's state and the device's own memory are computed.
Refused: another class of transformer than ours. Not predicted: the buckets of DDP, and
`train.compile`. Compiled blocks save a quarter less if they are not recomputed (docs/gpu/); if they are, a run lets
them keep the output of attention where that fits (`attention_bytes`). Imports torch only for what is not remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from qwen_cache.format.sample import token_count
from qwen_cache.models.family import family_of_transformer
from qwen_cache.models.hardware import ON_DEVICE, piece_sizes
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.lora.files import assistant_bytes, check_adapter
from qwen_train.memory import pieces
from qwen_train.memory.pieces import Device, Measured
from qwen_train.memory.sizes import SampleSize, tokens_of
from qwen_train.model.combinations import check_offload, check_sharding, is_update_fused, kind_of, with_layout

ACCELERATOR = "cuda"
"""Or any other: predictions are the same."""
RESERVED = 1_300_000_000  # CUDA context and libraries, 0.5 GB, and what the caching allocator holds of small tensors
FRAGMENTATION = 0.04  # of the tensors is unusable in it
"""In docs/gpu/, 23 of 24 training steps took no more than tensors and both; the one with four noise draws 3 % more."""
PARTS = {
    "weights": "frozen weights",
    "trained": "trained weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "average": "average (EMA)",
    "activations": "activations",
    "reserved": "driver and context, estimated",
}
"""The fields of `Memory` in words."""


HOST_PARTS = {
    "program": "program, estimated",
    "offloaded": "offloaded",
    "batches": "batches",
    "loading": "while loading",
    "saving": "while saving",
}
"""The fields of `HostMemory` in words."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at the peak of a training step."""

    weights: int
    """Frozen weights."""
    trained: int
    """Trained weights: a LoRA, or all."""
    gradients: int
    optimizer: int
    """The optimizer's state; for one by import path, that of AdamW."""
    average: int
    """The EMA of the trained weights."""
    activations: int
    """A batch's tensors, the activations saved for the backward pass, and temporary tensors; with FSDP2 also what is
    gathered."""
    reserved: int = 0
    """The device's own memory, estimated; not part of what torch says is allocated."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def predict_memory(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    device: Device = "accelerator",
    image: SampleSize | None = None,
    processes: int = 1,
) -> Memory:
    """The memory of a training step on `batch`, for a transformer with this config.json and the settings `model`,
    `train`, `optimizer` and `validation`; `image` is the largest to generate between steps, if there is any. With
    train.fsdp that of each of the `processes`.

    Raises ConfigError or ModelError for settings that cannot be combined.
    """
    check_adapter(settings, transformer)
    settings = settings if device == "cpu" else with_layout(settings, ACCELERATOR)
    if settings.train.gradient_checkpointing == "auto":
        settings = changed(settings, {"train.gradient_checkpointing": True})
    layers, every = int(transformer["num_layers"]), int(settings.train.gradient_checkpointing) or 1
    depths = pieces.depths(transformer, settings)
    few, *more = (
        _of_depth(each, settings, device) for each in pieces.step(transformer, settings, batch, device, image)
    )
    values = few
    if more:
        left = (layers - depths[-1]) // every
        values = tuple(y + (y - x) * left for x, y in zip(few, more[0], strict=True))
    *parts, update, generating = values
    memory = Memory(*parts)
    generating -= memory.gradients  # there are none between steps
    frozen = memory.weights + assistant_bytes(settings.train, product_bytes(settings.train))
    memory = replace(memory, weights=frozen, activations=max(memory.activations, update, generating))
    check_offload(settings, transformer)
    check_sharding(settings, transformer, processes)
    if settings.train.offload_blocks:
        on_host = max(0, settings.train.offload_blocks - ON_DEVICE)
        memory = replace(memory, weights=memory.weights - on_host * block_bytes(transformer, settings))
    if settings.train.fsdp and processes > 1:
        memory = in_parts(memory, transformer, settings, batch, processes)
    if device == "cpu":
        return memory
    return replace(memory, reserved=RESERVED + int(FRAGMENTATION * memory.total))


def in_parts(
    memory: Memory, transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], processes: int
) -> Memory:
    """The memory of each process if FSDP2 shards the weights, from that of one process without `reserved`.

    FSDP2 gathers what is outside the blocks once for a step, and a block at a time, into a buffer and from there to its
    weights, while the next one's buffer fills: two blocks beside what a block computes, three between blocks.
    """
    layers, block = int(transformer["num_layers"]), block_bytes(transformer, settings)
    own = {name: getattr(memory, name) for name in ("weights", "trained", "gradients", "optimizer", "average")}
    outside = memory.weights + (memory.trained if settings.train.method == "full" else 0) - layers * block
    inside = max(0, memory.activations - layers * input_bytes(transformer, settings, batch))  # of one block
    gathered = outside + 2 * block + max(0, block - inside)
    divided = {name: -(-size // processes) for name, size in own.items()}
    return replace(memory, **divided, activations=memory.activations + gathered)


def _of_depth(measured: Measured, settings: Config, device: Device) -> tuple[int, ...]:
    """The values of `Memory`, and what the optimizer's update and the image take: each is linear in the layers, their
    maximum is not."""
    gradients, rounded = measured.trained, settings.train.stochastic_rounding
    states = measured.rounded_states if rounded else measured.states
    # the update of all trained weights at once on an accelerator (foreach), in place by AdamW (fused), one after the
    # other on the CPU and by torchao, which computes in float32
    at_once = 0 if is_update_fused(settings, ACCELERATOR) else gradients
    update = 2 * measured.largest if rounded else at_once if device == "accelerator" else measured.largest
    accumulated = settings.train.gradient_accumulation_steps > 1
    memory = Memory(
        weights=measured.frozen,
        trained=gradients,
        gradients=gradients,
        optimizer=states.get(settings.optimizer.name, states["adamw"]),
        average=gradients if settings.train.ema_decay else 0,
        activations=measured.step if accumulated else measured.step - gradients,
    )
    return *astuple(memory)[:-1], update, measured.image


def block_bytes(transformer: dict[str, Any], settings: Config) -> int:
    """The bytes of one block's frozen weights."""
    assistant = assistant_bytes(settings.train, product_bytes(settings.train), "transformer_blocks")
    return pieces.block(transformer, settings) + assistant // int(transformer["num_layers"])


def host_bytes(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize] = ()) -> int:
    """The bytes in host memory of the offloaded blocks, and of the offloaded activations of a step on `batch`.

    They are pinned: they cannot be swapped.
    """
    train, total = settings.train, 0
    if train.offload_blocks:
        total += train.offload_blocks * sum(piece_sizes(block_bytes(transformer, settings)))
    if train.offload_activations and batch:
        every = 1 if train.gradient_checkpointing == "auto" else int(train.gradient_checkpointing)
        stay = 1  # those of the last block
        recomputed = -(-int(transformer["num_layers"]) // every)
        total += (recomputed - stay) * sum(piece_sizes(input_bytes(transformer, settings, batch)))
    return total


PROGRAM = 2_500_000_000
"""Python, torch and the libraries and the context of CUDA; on a CPU, whose torch has none, 0.4 GB was measured."""
IN_PREPARATION = 3
"""Batches whose memory is reused: one is trained, and two are made (`qwen_train/data/batches.py`)."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory of a process that trains on an accelerator.

    Frozen weights are mapped from their files until they are on the device: the page cache holds them, once for all
    processes of a machine, and gives them up where memory is short. Neither a VAE nor a text encoder is loaded, and
    no process reads data for another.
    """

    program: int
    """Estimated."""
    offloaded: int
    """Pinned: blocks, and the inputs of recomputed blocks."""
    batches: int
    """Pinned."""
    loading: int
    """Taken by loading alone: a block that is copied to pinned memory; of quantised weights also the
    blocks that go to the device afterwards."""
    saving: int
    """The copies of a checkpoint: trained weights, their average, and the optimizer's state; in the main process."""

    @property
    def total(self) -> int:
        """The peak: nothing is saved while a model is loaded."""
        return self.program + self.offloaded + self.batches + max(self.loading, self.saving)


def predict_host_memory(
    transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], memory: Memory
) -> HostMemory:
    """The host memory of a run whose largest batch is `batch`, and whose device memory is `memory`."""
    family, blocks = family_of_transformer(transformer), settings.train.offload_blocks
    block = block_bytes(transformer, settings) if blocks else 0
    is_quantised = kind_of(transformer, settings) != "none"
    waiting = int(transformer["num_layers"]) - blocks if is_quantised else 0
    latents = max(token_count(sample.img_shapes) for sample in batch) * len(batch) * settings.train.noise_draws
    texts = max(sample.text_tokens for sample in batch) * len(batch)
    width = int(transformer.get(family.text_width_key, 0))
    return HostMemory(
        program=PROGRAM,
        offloaded=host_bytes(transformer, settings, batch),
        batches=IN_PREPARATION * (2 * 4 * latents * int(transformer.get("in_channels", 64)) + 2 * texts * width),
        loading=(1 + waiting) * block,
        saving=memory.trained + memory.average + memory.optimizer,
    )


def input_bytes(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> int:
    """The bytes of a block's inputs: a row for each token."""
    width = int(transformer["num_attention_heads"] * transformer["attention_head_dim"])
    family = family_of_transformer(transformer)
    return tokens_of(batch, settings.train, family) * width * product_bytes(settings.train)


def product_bytes(settings: TrainConfig) -> int:
    """The bytes of a number in matrix products."""
    return 2 if settings.mixed_precision == "bf16" else 4


def changed(settings: Config, changes: dict[str, Any]) -> Config:
    """The settings with other values, by name."""
    for name, value in changes.items():
        section, key = name.split(".")
        settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update={key: value})})
    return settings


# ---- blocks to recompute ---------------------------------------------------------------------------------------------

SAFE = 0.92
"""The share of the device's memory that a choice by itself may take: predictions were up to 6 % too low."""


def attention_bytes(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> int:
    """The output of a block's attention and its log-sum-exp, in float32."""
    tokens = tokens_of(batch, settings.train, family_of_transformer(transformer))
    heads, size = int(transformer["num_attention_heads"]), int(transformer["attention_head_dim"])
    return tokens * heads * (size * product_bytes(settings.train) + 4)


def spread(count: int, layers: int) -> list[int]:
    """The indices of as many blocks, evenly."""
    return [layers * i // count for i in range(count)]
