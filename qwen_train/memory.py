"""How much GPU memory a run takes, which settings would fit, and what to do when it was too little."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qwen_cache.batching import SUMMARISED, padded_tokens, row_tokens
from qwen_cache.errors import ConfigError, DeviceError, ModelError, TrainError
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_cache.models.devices import ON_DEVICE, LiveBytes, flash_attention, piece_sizes
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.folder import check_name, read_config
from qwen_cache.models.loading import from_config
from qwen_cache.models.quantization import Kind, QuantizedLinear
from qwen_cache.models.single_file import open_single_file
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import LoraConfig, ModelConfig, TrainConfig
from qwen_cache.terminal import human_bytes
from qwen_train.data.batches import Batches, TokenPlaces, in_order
from qwen_train.data.samples import Samples, open_samples, open_validation_cache
from qwen_train.flow import NoiseSchedule, flow_loss, interpolate
from qwen_train.lora.adapter import assistant_bytes
from qwen_train.lora.files import check_adapter
from qwen_train.model.joint_row import JointRow
from qwen_train.model.loading import TabulatedTransformer2DModel, TimestepRows, check_settings, trained_class
from qwen_train.model.mixed_sizes import prefix_mask
from qwen_train.model.placement import InputDtypeLayerNorm
from qwen_train.model.placement import check_settings as check_offload
from qwen_train.model.qwen_image_21 import QwenImage21MultiResAttnProcessor, varlen_attention
from qwen_train.weights import compute_dtype, is_update_fused, prepare_for_training, quantize_blocks, with_layout

# ---- exhausted -------------------------------------------------------------------------------------------------------
# Running out of a device's memory while training, as an error that says what to do.

EXPANDABLE = "expandable_segments:True"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the name since torch 2.9, and before


@contextmanager
def memory_for_training(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a DeviceError with torch's own figures and the ways out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fragments = device.type == "cuda" and not any(
            EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS
        )
        # batches of many sizes leave pieces of memory that no other size fits into
        setting = f"set {ALLOCATOR_SETTINGS[0]}={EXPANDABLE} if batches differ in size; " if fragments else ""
        raise DeviceError(
            f"{device} has too little memory for this run",
            found=" ".join(str(error).split()),
            do=f"{setting}`qwen-train plan --gpu-memory SIZE` names settings that fit; checkpoints are kept, continue "
            "with --resume",
        ) from None


# ---- predict ---------------------------------------------------------------------------------------------------------
# The memory of training, predicted by part without training.
#
# A training step of the real configuration runs on tensors without data (torch's device "meta"), and the live bytes are
# counted: parameters, activations saved by autograd, recomputed blocks, gradients. Blocks are equal, so only a few are
# run and the rest is extrapolated. Quantised weights, the optimizer's state and the device's own memory are computed.
# Refused: another class of transformer than ours. Not predicted: several processes (DDP's buckets, FSDP2), and
# `train.compile`. Compiled blocks save a quarter less if they are not recomputed (docs/gpu/); if they are, a run lets
# them keep the output of attention where that fits (`attention_bytes`).

Device = Literal["accelerator", "cpu"]
ACCELERATOR = torch.device("cuda")  # or any other: predictions are the same


class SampleSize(NamedTuple):
    """The size of a sample, as the index of a cache has it."""

    img_shapes: ImgShapes
    """The target, then the controls."""
    text_tokens: int
    image_positions: tuple[int, ...] = ()
    """For each control the text tokens before it; none for the 20B family."""


RESERVED = 1_300_000_000  # CUDA context and libraries, 0.5 GB, and what the caching allocator holds of small tensors
FRAGMENTATION = 0.04  # of the tensors is unusable in it
"""In docs/gpu/, 23 of 24 training steps took no more than tensors and both; the one with four noise draws 3 % more."""
LOOP_TENSORS = 5  # of denoising, as large as the latents of all images: noise, controls, both, and two predictions
OPTIMIZER_STATE: dict[str, Callable[[Tensor], float]] = {
    "adamw": lambda p: 8 * p.numel(),
    # two bytes per element and two float32 scales per 256; small tensors stay in float32
    "adamw8bit": lambda p: (2 + 8 / 256) * p.numel() if p.numel() >= 4096 else 8 * p.numel(),
    "adafactor": lambda p: 4 * (p.numel() // p.shape[-1] + p.numel() // p.shape[-2] if p.ndim > 1 else p.numel()),
    "prodigy": lambda p: 16 * p.numel(),
}
ROUNDED_STATE: dict[str, Callable[[Tensor], float]] = {
    "adamw": lambda p: 4 * p.numel(),
    # torchao quantises a tensor that has at least 4096 elements, in whole blocks of 256
    "adamw8bit": lambda p: (2 + 8 / 256) * p.numel() if p.numel() >= 4096 and p.numel() % 256 == 0 else 4 * p.numel(),
}
"""With train.stochastic_rounding, by torchao."""


IN_EVERY_BLOCK = re.compile(r"all-linear|(?!transformer_blocks)[a-z_]\w*(\.\w+)*")
"""A target module, or a pattern of ranks, that is the same in every block: the end of a name, such as attn.to_q."""
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
    """A batch's tensors, the activations saved for the backward pass, and temporary tensors."""
    reserved: int = 0
    """The device's own memory, estimated; not part of what torch says is allocated."""

    @property
    def total(self) -> int:
        return sum(astuple(self))


def predict_memory(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    device: Device = "accelerator",
    image: SampleSize | None = None,
) -> Memory:
    """The memory of a training step on `batch`, for a transformer with this config.json and the settings `model`,
    `train`, `optimizer` and `validation`; `image` is the largest to generate between steps, if there is any.

    Raises ConfigError or ModelError for settings that cannot be combined.
    """
    check_adapter(settings, transformer)
    settings = settings if device == "cpu" else with_layout(settings, ACCELERATOR)
    layers = int(transformer["num_layers"])
    if settings.train.gradient_checkpointing == "auto":
        settings = _changed(settings, {"train.gradient_checkpointing": True})
    every = int(settings.train.gradient_checkpointing) or 1
    few, more = layers % every + 3 * every, layers % every + 4 * every  # the first and the last block are different
    with torch.random.fork_rng(devices=[]):  # a LoRA samples its initial weights on meta too
        if more >= layers or _names_blocks(settings.train.lora):
            values = _of_layers(layers, transformer, settings, batch, device, image)
        else:
            a, b = (_of_layers(n, transformer, settings, batch, device, image) for n in (few, more))
            values = tuple(y + (y - x) * (layers - more) // every for x, y in zip(a, b, strict=True))
    *parts, update, generating = values
    memory = Memory(*parts)
    generating -= memory.gradients  # there are none between steps
    frozen = memory.weights + assistant_bytes(settings.train, compute_dtype(settings.train))
    memory = replace(memory, weights=frozen, activations=max(memory.activations, update, generating))
    if settings.train.offload_blocks:
        check_offload(settings, transformer)
        on_host = max(0, settings.train.offload_blocks - ON_DEVICE)
        memory = replace(memory, weights=memory.weights - on_host * block_bytes(transformer, settings))
    if device == "cpu":
        return memory
    return replace(memory, reserved=RESERVED + int(FRAGMENTATION * memory.total))


def _names_blocks(lora: LoraConfig) -> bool:
    """True if the blocks may differ in their adapter."""
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    return not all(IN_EVERY_BLOCK.fullmatch(name) for name in (*targets, *lora.rank_pattern))


def _of_layers(
    layers: int,
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    device: Device,
    image: SampleSize | None,
) -> tuple[int, ...]:
    """The values of `Memory`, and what the optimizer's update and the image take: each is linear in the layers, their
    maximum is not. They take a second, so they are remembered: a plan asks for the same more than once."""
    key = repr((layers, transformer, settings, batch, device, image))
    if key in _predicted:
        return _predicted[key]
    model = training_model(on_meta({**transformer, "num_layers": layers}, settings), settings, device)
    family = family_of_transformer(transformer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen, unpacked = frozen_bytes(model, transformer)
    gradients = sum(map(_bytes, trained))
    rounded = settings.train.stochastic_rounding
    states = ROUNDED_STATE if rounded else OPTIMIZER_STATE
    state = states.get(settings.optimizer.name, states["adamw"])
    # the update of all trained weights at once on an accelerator (foreach), in place by AdamW (fused), one after the
    # other on the CPU and by torchao, which computes in float32
    largest = max(map(_bytes, trained), default=0)
    at_once = 0 if is_update_fused(settings, ACCELERATOR) else gradients
    update = 2 * largest if rounded else at_once if device == "accelerator" else largest
    accumulated = settings.train.gradient_accumulation_steps > 1
    if accumulated:  # gradients persist, so a new one is freed as soon as it is added
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    generating = peak_of_image(model, image, settings, family) + unpacked if image else 0
    step = peak_of_step(model, batch, settings.train, family) + unpacked
    memory = Memory(
        weights=frozen,
        trained=gradients,
        gradients=gradients,
        optimizer=int(sum(map(state, trained))),
        average=gradients if settings.train.ema_decay else 0,
        activations=step if accumulated else step - gradients,
    )
    _predicted[key] = *astuple(memory), update, generating
    return _predicted[key]


_predicted: dict[str, tuple[int, ...]] = {}


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def kind_of(transformer: dict[str, Any], settings: Config) -> Kind:
    """How the frozen weights are quantised: by the settings, or by the config.json of a quantised folder; none for a
    single file, whose own sizes count."""
    saved = transformer.get("quantization_config")
    if saved is None:
        return settings.model.quantization
    if "bytes_per_weight" in saved:
        return "int8_convrot" if saved["quant_method"] == "int8_convrot" else "none"
    text = json.dumps(saved).lower()
    kinds: dict[str, Kind] = {
        '"load_in_4bit": true': "nf4",
        '"load_in_8bit": true': "int8",
        "int8": "int8",
        "float8": "fp8",
    }
    for pattern, kind in kinds.items():
        if pattern in text:
            return kind
    raise ModelError(
        "unknown quantisation: its memory cannot be predicted", where="config.json", found=saved.get("quant_method")
    )


def frozen_bytes(model: nn.Module, transformer: Mapping[str, Any]) -> tuple[int, int]:
    """The bytes of the frozen weights; and of a single file, those of its largest quantised one when unpacked."""
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    total, unpacked = float(sum(map(_bytes, frozen))), 0
    of_file = transformer.get("quantization_config") or {}
    if "bytes_per_weight" not in of_file:
        return int(total), 0
    blocks: Any = model.transformer_blocks
    for module in blocks.modules():
        if isinstance(module, nn.Linear) and module.weight in frozen:
            scale = module.scale if isinstance(module, QuantizedLinear) else None
            total += of_file["bytes_per_weight"] * module.weight.numel() - _bytes(module.weight)
            total -= 0 if scale is None else _bytes(scale)
            unpacked = max(unpacked, of_file["unpacked_tensors"] * _bytes(module.weight))
    return int(total), 0 if of_file["quant_method"] == "int8_convrot" else unpacked


def block_bytes(transformer: dict[str, Any], settings: Config) -> int:
    """The bytes of one block's frozen weights."""
    models = (on_meta({**transformer, "num_layers": n}, settings).requires_grad_(False) for n in (1, 2))
    one, two = (frozen_bytes(model, transformer)[0] for model in models)
    assistant = assistant_bytes(settings.train, compute_dtype(settings.train), "transformer_blocks")
    return two - one + assistant // int(transformer["num_layers"])


def host_bytes(transformer: dict[str, Any], settings: Config) -> int:
    """The bytes of the offloaded blocks in host memory, which is pinned: it cannot be swapped."""
    count = settings.train.offload_blocks
    return count * sum(piece_sizes(block_bytes(transformer, settings))) if count else 0


META = torch.device("meta")

# ---- a step on the meta device ---------------------------------------------------------------------------------------


AUTOCAST = (F.linear, F.scaled_dot_product_attention, torch.bmm, torch.einsum)
"""The functions of a training step that autocast computes in its dtype; the last two are those of an OFT."""


class KernelMemory(TorchFunctionMode):
    """Makes "meta" save the tensors that the device's kernels save: attention without its logits, and autocast's casts.

    Autocast keeps the cast of a trained weight until its outermost context ends.
    """

    def __init__(self, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.autocast, self.depth = autocast, 0
        self.copies: dict[Tensor, Tensor] = {}

    def __enter__(self) -> Self:
        self.depth += 1
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.depth -= 1
        if not self.depth:
            self.copies.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.autocast and function in AUTOCAST:
            args = [self._cast(value, self.autocast) for value in args]
            kwargs = {name: self._cast(value, self.autocast) for name, value in kwargs.items()}
        return (
            flash_attention(*args, **kwargs)
            if function is F.scaled_dot_product_attention
            else function(*args, **kwargs)
        )

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or value.dtype == dtype or not value.is_floating_point():
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if value not in self.copies:
            self.copies[value] = value.to(dtype)
        return self.copies[value]


class MetaBlock(nn.Module):
    """A block under `KernelMemory`, also in the backward pass, which torch runs outside every mode."""

    kernels: KernelMemory

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.kernels:
            return super().forward(*args, **kwargs)


class VarlenOnMeta(QwenImage21MultiResAttnProcessor):
    """The calls of the variable-length kernel, which copy keys and queries: taken in half precision."""

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: JointRow) -> Tensor:
        if query.dtype == torch.float32:
            return super()._attend(query, key, value, row)
        output: Tensor = varlen_attention(query, key, value, row, _varlen_kernel)
        return output


def _varlen_kernel(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Saves the same tensors for backward as `flash_attention`."""
    output = flash_attention(*(x[None].transpose(1, 2) for x in (query, key, value)))
    return output.transpose(1, 2)[0]


class MetaRows(TimestepRows):
    """Rows without data."""

    def forward(self, timestep: Tensor, hidden_states: Tensor, addition_t_cond: None = None) -> Tensor:
        return hidden_states.new_empty(len(timestep), self.width)


def on_meta(transformer: dict[str, Any], settings: Config) -> Any:
    """The transformer as loaded, on "meta"."""
    train, model_class = settings.train, trained_class(transformer)
    if train.tabulated_modulation:
        check_settings(train, transformer)
        model_class = TabulatedTransformer2DModel
    with torch.device("meta"):
        model = from_config(model_class, transformer)
    if train.tabulated_modulation:
        model.time_text_embed.__class__ = MetaRows
    in_float32 = train.method == "full" and not train.stochastic_rounding
    stored = torch.float32 if in_float32 else compute_dtype(train)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(stored)
    if train.method == "lora":
        kind, of_file = kind_of(transformer, settings), transformer.get("quantization_config") or {}
        whole = of_file.get("modules_to_not_convert") or ()  # null in a folder that torchao or bitsandbytes saved
        quantize_blocks(model, kind, META, train.quantized_backward, offloaded=False, skip=whole)
    return model


def training_model(model: Any, settings: Config, device: Device) -> Any:
    """The transformer of `on_meta`, prepared for training."""
    prepare_for_training(model, settings.train)
    model.kernels = KernelMemory(torch.bfloat16 if settings.train.mixed_precision == "bf16" else None)
    for module in model.modules():
        if isinstance(module, InputDtypeLayerNorm):  # it leaves autocast, of which "meta" has none
            cast(Any, module).__class__ = nn.LayerNorm
    for block in model.transformer_blocks:
        block.__class__ = type("MetaBlock", (MetaBlock, type(block)), {})
        block.kernels = model.kernels
        if device == "accelerator" and isinstance(block.attn.processor, QwenImage21MultiResAttnProcessor):
            block.attn.set_processor(VarlenOnMeta())
    return model


def peak_of_step(model: Any, batch: Sequence[SampleSize], settings: TrainConfig, family: Family) -> int:
    """The peak bytes of a forward and a backward pass, without the parameters."""
    draws, texts, config = settings.noise_draws, [sample.text_tokens for sample in batch], model.config
    places = [TokenPlaces.of(sample.img_shapes, draws, target_last=family.target_last) for sample in batch]
    rows = len(batch), max(place.length for place in places)
    with LiveBytes(list(model.parameters())) as live:
        clean, noise = (torch.empty(*rows, config.in_channels, device="meta") for _ in range(2))
        sigma, weight = torch.empty(len(batch), draws, device="meta"), torch.empty(rows, device="meta")
        width, dtype = config[family.text_width_key], compute_dtype(settings)
        prompt = torch.empty(len(batch), max(texts), width, device="meta", dtype=dtype)
        noisy = interpolate(clean, noise, weight, weight > 0)
        arguments = {"image_positions": [sample.image_positions for sample in batch]} if family.text_rows_only else {}
        with model.kernels:
            velocity = model(
                hidden_states=noisy.to(dtype),
                encoder_hidden_states=prompt,
                encoder_hidden_states_mask=prefix_mask(texts, max(texts)) if min(texts) < max(texts) else None,
                timestep=sigma if draws > 1 else sigma[:, 0],
                img_shapes=[in_order(sample.img_shapes, family) for sample in batch],
                return_dict=False,
                **arguments,
            )[0]
        torch.autograd.backward(flow_loss(velocity, clean, noise, weight, torch.ones(len(batch), device="meta")))
    peak: int = live.peak
    return peak


@torch.no_grad()
def peak_of_image(model: Any, sample: SampleSize, settings: Config, family: Family) -> int:
    """The peak bytes of generating an image, without the parameters; with what Qwen-Image-2.1 keeps of its first step.

    With guidance its two halves run one after the other, and each keeps its own.
    """
    config, dtype = model.config, compute_dtype(settings.train)
    arguments = {"image_positions": [sample.image_positions]} if family.text_rows_only else {}
    with LiveBytes(list(model.parameters())) as live, model.kernels:
        model(
            hidden_states=torch.empty(
                1, token_count(sample.img_shapes), config.in_channels, device="meta", dtype=dtype
            ),
            encoder_hidden_states=torch.empty(
                1, sample.text_tokens, config[family.text_width_key], device="meta", dtype=dtype
            ),
            timestep=torch.empty(1, device="meta"),
            img_shapes=[in_order(sample.img_shapes, family)],
            return_dict=False,
            **arguments,
        )
    tokens = token_count(sample.img_shapes)
    peak = live.peak + LOOP_TENSORS * tokens * config.in_channels * dtype.itemsize
    if family.joint_sequence and config.causal_condition:
        rows, scales = (
            tokens - token_count(sample.img_shapes[:1]) + sample.text_tokens,
            settings.validation.true_cfg_scale,
        )
        kept = 2 * rows * config.num_attention_heads * config.attention_head_dim * len(model.transformer_blocks)
        peak += kept * dtype.itemsize * (2 if max(scales) > 1 else 1)
    return int(peak)


# ---- the batches of a run -------------------------------------------------------------------------------------------


def largest_batch(batches: Batches) -> tuple[list[SampleSize], SampleSize]:
    """The batch and the sample with the most tokens in the first epoch."""
    cache = batches.cache
    if not len(cache):
        raise TrainError("the cache has no samples", where=cache.folder, do="run `qwen-cache build`")

    def sizes(positions: Sequence[int]) -> list[SampleSize]:
        rows = [cache.row(batches.plan.sample(position)).meta for position in positions]
        return [SampleSize(row.img_shapes, row.text_length, row.image_positions) for row in rows]

    def tokens(batch: Sequence[SampleSize]) -> int:
        return tokens_of(batch, batches.config, batches.family)

    consumed, most, largest = 0, sizes([0]), sizes([0])[0]
    while consumed < min(batches.plan.in_epoch, SUMMARISED):
        positions = batches.plan.batch(consumed)
        consumed += len(positions)
        batch = sizes(positions)
        most = max(most, batch, key=tokens)
        largest = max(largest, *batch, key=lambda sample: tokens([sample]))
    return most, largest


def largest_image(cache: Samples | None) -> SampleSize | None:
    """The sample of a validation cache with the most tokens; None without a cache.

    Held-out samples, which are generated alone and without gradients, take less than a batch of such samples.
    """
    rows = [cache.row(i).meta for i in range(len(cache))] if cache is not None else []
    sizes = [SampleSize(row.img_shapes, row.text_length, row.image_positions) for row in rows]
    return max(sizes, key=lambda size: token_count(size.img_shapes) + size.text_tokens, default=None)


def tokens_of(batch: Sequence[SampleSize], settings: TrainConfig, family: Family) -> int:
    """The tokens of a batch, as `train.max_tokens` counts them."""
    counts = [(token_count(sample.img_shapes), sample.text_tokens) for sample in batch]
    tokens = row_tokens(
        np.array(counts).T,
        joint=family.joint_sequence,
        noise_draws=settings.noise_draws,
        target_tokens=np.array([token_count(sample.img_shapes[:1]) for sample in batch]),
    )
    return int(padded_tokens(tokens, np.array([0, len(batch)]))[0] if settings.layout != "packed" else tokens.sum())


# ---- plan ------------------------------------------------------------------------------------------------------------
# The memory of the largest batch by part, whether it fits, and which settings would make it fit.
#
# Only the model's config.json is read, locally or from the hub. What a setting saves is predicted in the same way.

FEWEST = -1
"""Placeholder for the smallest number of blocks that fits."""
SAVINGS: tuple[dict[str, Any], ...] = (
    {"train.gradient_checkpointing": True},
    {"train.gradient_checkpointing": True, "train.tabulated_modulation": True},
    {"train.gradient_checkpointing": True, "model.quantization": "int8_convrot"},
    {"train.gradient_checkpointing": True, "train.offload_blocks": FEWEST},
    {"train.gradient_checkpointing": True, "model.quantization": "nf4"},
)
"""Settings that save memory, those that cost the least time and precision first."""
LINEAR_FROM = 2048  # tokens: from here on a batch takes more memory than any optimizer's update of a LoRA


@dataclass(frozen=True)
class Workload:
    """The subject of a plan: a transformer, and the largest batch and sample of the cache that it is trained on."""

    transformer: dict[str, Any]
    """Its config.json."""
    recipe: dict[str, Any]
    """The recipe of the cache."""
    batch: list[SampleSize]
    sample: SampleSize
    image: SampleSize | None = None
    """The largest sample of the validation cache, if there is one."""

    @classmethod
    def of(cls, settings: Config, samples: Samples | None = None) -> Workload:
        """The workload of `samples`, or of the cache in the settings; ModelError for a cache of another family."""
        settings = with_layout(settings, ACCELERATOR)
        transformer = transformer_config(settings.model)
        batches = Batches(samples or open_samples(settings), settings.train, NoiseSchedule())
        check_family(batches, transformer)
        image = largest_image(open_validation_cache(settings))
        return cls(transformer, batches.cache.recipe.recipe, *largest_batch(batches), image)


def plan(settings: Config, workload: Workload, capacity: int | None) -> dict[str, Any]:
    """The report of `qwen-train plan`, as a JSON value: the largest batch, its memory by part, what fits."""
    settings = with_layout(settings, ACCELERATOR)
    transformer, batch, largest = workload.transformer, workload.batch, workload.sample
    family, image = family_of_transformer(transformer), workload.image
    choices = []
    if settings.train.gradient_checkpointing == "auto" and not settings.train.offload_blocks:
        totals, layers = memory_by_blocks(transformer, settings, batch, image), int(transformer["num_layers"])
        counts = {layers * quarter // 4 for quarter in range(5)}
        counts |= {fewest_recomputed(totals, SAFE * capacity)} if capacity else set()
        choices = [
            {"blocks": count, "memory": totals[count], "time": round(step_time(transformer, settings, batch, count), 3)}
            for count in sorted(counts)
        ]
    memory = predict_memory(transformer, settings, batch, image=image)
    report: dict[str, Any] = {
        "largest_batch": {"samples": len(batch), "tokens": tokens_of(batch, settings.train, family)},
        "largest_sample": tokens_of([largest], settings.train, family),
        "memory": {**asdict(memory), "total": memory.total},
        "host_memory": host_bytes(transformer, settings),
    } | ({"recomputed_blocks": choices} if choices else {})
    if capacity is None:
        return report
    most = most_tokens(transformer, settings, largest, capacity)
    report |= {"gpu_memory": capacity, "fits": memory.total <= capacity, "max_tokens": most}
    return report if report["fits"] else {**report, "do": savings(transformer, settings, batch, most, capacity, image)}


def most_tokens(transformer: dict[str, Any], settings: Config, largest: SampleSize, capacity: int) -> int | None:
    """The largest train.max_tokens that fits, for copies of the largest sample; None if that sample alone does not fit.

    Memory is linear in tokens, except in the smallest batches, where the optimizer's update takes more.
    """
    if predict_memory(transformer, settings, [largest]).total > capacity:
        return None
    tokens = tokens_of([largest], settings.train, family_of_transformer(transformer))
    count = math.ceil(LINEAR_FROM / tokens)
    one, two = (predict_memory(transformer, settings, [largest] * n).total for n in (count, 2 * count))
    return max(tokens, math.floor(count * tokens * (1 + (capacity - one) / (two - one))))


def savings(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    most: int | None,
    capacity: int,
    image: SampleSize | None = None,
) -> list[str]:
    """Alternative settings under which the batch fits, as text; a smaller batch comes first, if that is possible."""
    fitting = [f"train.max_tokens={most}"] if most and len(batch) > 1 else []
    for changes in SAVINGS:
        lossy = "model.quantization" in changes
        if lossy and (settings.train.method == "full" or "quantization_config" in transformer):
            continue
        with suppress(ConfigError, ModelError):  # not possible with these settings or this model
            if changes.get("train.offload_blocks") == FEWEST:
                changes = {**changes, "train.offload_blocks": fewest_blocks(transformer, settings, batch, capacity)}
            changed = _changed(settings, changes)
            if changed == settings:
                continue
            total = predict_memory(transformer, changed, batch, image=image).total
            if total > capacity:
                continue
            words = " ".join(f"{name}={json.dumps(value)}" for name, value in changes.items())
            fitting.append(f"{words} ({human_bytes(total)})".replace('"', ""))
    return fitting


def fewest_blocks(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], capacity: int) -> int:
    """The smallest train.offload_blocks under which the batch fits; all blocks if it never does."""
    changes = {"train.gradient_checkpointing": True, "train.offload_blocks": transformer["num_layers"]}
    every = _changed(settings, changes)
    left = capacity - predict_memory(transformer, every, batch).total
    stay = max(0, left) / (1 + FRAGMENTATION) // block_bytes(transformer, every)
    return int(max(transformer["num_layers"] - stay, 1))


# ---- blocks to recompute ---------------------------------------------------------------------------------------------

SAFE = 0.92
"""The share of the device's memory that a choice by itself may take: predictions were up to 6 % too low."""


def memory_by_blocks(
    transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], image: SampleSize | None = None
) -> list[int]:
    """The total memory if 0, 1, … or all blocks are recomputed; linear in those that are not."""
    totals = [
        predict_memory(
            transformer, _changed(settings, {"train.gradient_checkpointing": each}), batch, image=image
        ).total
        for each in (True, False)
    ]
    layers, (least, most) = int(transformer["num_layers"]), totals
    further = max(1, layers - 1)  # beside the one that is being recomputed
    return [most, *(least + (most - least) * (layers - count) // further for count in range(1, layers + 1))]


def attention_bytes(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> int:
    """The output of a block's attention and its log-sum-exp, in float32."""
    tokens = tokens_of(batch, settings.train, family_of_transformer(transformer))
    heads, size = int(transformer["num_attention_heads"]), int(transformer["attention_head_dim"])
    return tokens * heads * (size * compute_dtype(settings.train).itemsize + 4)


def fewest_recomputed(memory: Sequence[int], capacity: float) -> int:
    """The smallest number of recomputed blocks that fits; all if none does."""
    return next((count for count, total in enumerate(memory) if total <= capacity), len(memory) - 1)


def spread(count: int, layers: int) -> list[int]:
    """The indices of as many blocks, evenly."""
    return [layers * i // count for i in range(count)]


def step_time(transformer: dict[str, Any], settings: Config, batch: Sequence[SampleSize], count: int) -> float:
    """The time of a step in which `count` blocks are recomputed, relative to one in which all are.

    By floating-point operations of the blocks: a forward pass, its repetition, and the backward pass, which takes as
    many for the linear layers as the forward pass (twice as many where they are trained) and 2.5 times as many for
    attention (Dao, FlashAttention-2, arXiv 2307.08691, section 4.1). Attention counts as if each token saw all of its
    sample.
    """
    family, layers = family_of_transformer(transformer), int(transformer["num_layers"])
    tokens = [tokens_of([sample], settings.train, family) for sample in batch]
    width = int(transformer["num_attention_heads"] * transformer["attention_head_dim"])
    of_linears = 2 * (13 if family.joint_sequence else 12) * width * width * sum(tokens)
    of_attention = 4 * width * sum(n * n for n in tokens)
    forward = of_linears + of_attention
    backward = (2 if settings.train.method == "full" else 1) * of_linears + 2.5 * of_attention
    return (forward * (1 + count / layers) + backward) / (2 * forward + backward)


def _changed(settings: Config, changes: dict[str, Any]) -> Config:
    for name, value in changes.items():
        section, key = name.split(".")
        settings = settings.model_copy(update={section: getattr(settings, section).model_copy(update={key: value})})
    return settings


def transformer_config(model: ModelConfig) -> dict[str, Any]:
    """config.json of the model's transformer, with the quantisation of a single file; ModelError if it is not one that
    is trained."""
    path = config_path(model, "transformer")
    config = read_config(path)
    trained_class(config, path)
    return config if model.transformer is None else open_single_file(model.transformer, config).config(config)


def config_path(model: ModelConfig, component: str) -> Path:
    """config.json of a component; from the hub, only that file is downloaded."""
    name = check_name(model.path)
    if Path(name).is_dir():
        return Path(name) / component / "config.json"

    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(name, "config.json", subfolder=component, revision=model.revision))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        what, do = "no such folder here, and none on the hub", str(error).splitlines()[0]
        raise ModelError(what, where=name, do=do) from None


def check_family(batches: Batches, transformer: dict[str, Any]) -> None:
    """ModelError for a cache of another family of models."""
    if batches.family.transformer != transformer["_class_name"]:
        raise ModelError(
            "the cache was built for another model",
            where=batches.cache.folder,
            expected=family_of_transformer(transformer).name,
            found=batches.family.name,
            do="name the model that it was built for, with --model",
        )
