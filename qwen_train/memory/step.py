"""A training step on tensors without data, whose live bytes are counted; `pieces.py` remembers what it shows.

The real transformer runs on torch's device "meta", with the adapter and the kernels of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qwen_cache.format.sample import token_count
from qwen_cache.models.devices import Course, LiveBytes, flash_attention, without_collections
from qwen_cache.models.family import Family, family_of_transformer
from qwen_cache.models.loading import from_config
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.batches import TokenPlaces, in_order
from qwen_train.flow import flow_loss, interpolate
from qwen_train.memory.sizes import ROWS, BatchKind, Parts, SampleSize
from qwen_train.model.combinations import check_tabulation, kind_of
from qwen_train.model.joint_row import JointRow
from qwen_train.model.loading import TabulatedTransformer2DModel, TimestepRows, trained_class
from qwen_train.model.mixed_sizes import prefix_mask
from qwen_train.model.placement import InputDtypeLayerNorm
from qwen_train.model.qwen_image_21 import QwenImage21MultiResAttnProcessor, varlen_attention
from qwen_train.weights import compute_dtype, prepare_for_training, quantize_blocks

META = torch.device("meta")
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


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def frozen_bytes(model: nn.Module, transformer: Mapping[str, Any]) -> tuple[int, int]:
    """The bytes of the frozen weights of a model, or of its blocks alone; and of a single file, those of its largest
    quantised one when unpacked."""
    frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
    total, unpacked = float(sum(map(_bytes, frozen))), 0
    of_file = transformer.get("quantization_config") or {}
    if "bytes_per_weight" not in of_file:
        return int(total), 0
    blocks: Any = getattr(model, "transformer_blocks", model)
    for module in blocks.modules():
        if isinstance(module, nn.Linear) and module.weight in frozen:
            scale = module.scale if isinstance(module, QuantizedLinear) else None
            total += of_file["bytes_per_weight"] * module.weight.numel() - _bytes(module.weight)
            total -= 0 if scale is None else _bytes(scale)
            unpacked = max(unpacked, of_file["unpacked_tensors"] * _bytes(module.weight))
    return int(total), 0 if of_file["quant_method"] == "int8_convrot" else unpacked


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
        with nullcontext() if self.kernels.depth else self.kernels:  # a mode within itself sees every call twice
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
        check_tabulation(train, transformer)
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


def training_model(model: Any, settings: Config, device: str) -> Any:
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
    with LiveBytes(list(model.parameters())) as live:
        run_step(model, batch, settings, family)
    peak: int = live.peak
    return peak


def run_step(model: Any, batch: Sequence[SampleSize], settings: TrainConfig, family: Family) -> None:
    """A forward and a backward pass."""
    draws, texts, config = settings.noise_draws, [sample.text_tokens for sample in batch], model.config
    places = [TokenPlaces.of(sample.img_shapes, draws, target_last=family.target_last) for sample in batch]
    rows = len(batch), max(place.length for place in places)
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


@torch.no_grad()
def run_image(model: Any, sample: SampleSize, settings: TrainConfig, family: Family) -> None:
    """A step of denoising.

    With guidance its two halves run one after the other.
    """
    config, dtype = model.config, compute_dtype(settings)
    arguments = {"image_positions": [sample.image_positions]} if family.text_rows_only else {}
    with model.kernels:
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


def held_between_steps(model: Any, sample: SampleSize, settings: Config, family: Family) -> int:
    """The bytes of the loop of denoising, and what Qwen-Image-2.1 keeps of its first step; with guidance each half
    keeps its own."""
    config, itemsize, tokens = model.config, compute_dtype(settings.train).itemsize, token_count(sample.img_shapes)
    held = LOOP_TENSORS * tokens * config.in_channels * itemsize
    if family.joint_sequence and config.causal_condition:
        rows = tokens - token_count(sample.img_shapes[:1]) + sample.text_tokens
        kept = 2 * rows * config.num_attention_heads * config.attention_head_dim * len(model.transformer_blocks)
        held += kept * itemsize * (2 if max(settings.validation.true_cfg_scale) > 1 else 1)
    return int(held)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def measure_depth(
    transformer: dict[str, Any],
    settings: Config,
    layers: int,
    device: str,
    what: str,
    of: BatchKind | Sequence[SampleSize],
) -> dict[str, Any]:
    """The pieces of a step, or of generating an image, with this many blocks; and the bytes of every batch.

    Of one batch there is one piece, a constant. The pieces of a kind are None if its batches differ in their tensors.
    """
    with torch.random.fork_rng(devices=[]):  # a LoRA samples its initial weights on meta too
        model = training_model(on_meta({**transformer, "num_layers": layers}, settings), settings, device)
    family = family_of_transformer(transformer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen, unpacked = frozen_bytes(model, transformer)
    if (
        settings.train.gradient_accumulation_steps > 1
    ):  # gradients persist, so a new one is freed as soon as it is added
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)

    def course(batch: Sequence[SampleSize]) -> list[int]:
        with without_collections(), Course(list(model.parameters())) as live:
            if what == "step":
                run_step(model, batch, settings.train, family)
            else:
                run_image(model, batch[0], settings.train, family)
        for parameter in trained:
            parameter.grad = None
        held = 0 if what == "step" else held_between_steps(model, batch[0], settings, family)
        return [each + held + unpacked for each in live.after]

    if isinstance(of, BatchKind):
        draws = settings.train.noise_draws if what == "step" else 1
        pieces = pieces_of(course, of, settings.train.layout != "packed", draws, family)
    else:
        pieces = [[*[0.0] * len(Parts._fields), float(max(course(of)))]]
    numbers: dict[str, Any] = {
        "frozen": frozen,
        "trained": sum(map(_bytes, trained)),
        "largest": max(map(_bytes, trained), default=0),
        "states": {name: int(sum(map(state, trained))) for name, state in OPTIMIZER_STATE.items()},
        "rounded_states": {name: int(sum(map(state, trained))) for name, state in ROUNDED_STATE.items()},
    }
    return {"pieces": pieces, "bytes": numbers}


UNALIGNED = 5
"""Tokens more than a multiple of ROWS."""
FURTHER = 2 * ROWS
"""Tokens by which two measured batches differ, so that both are aligned or neither is."""
TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
TEXT = (1, 32, 128, 512, 2048, 8192)
"""The numbers of tokens for which pieces are kept, in all combinations; between them the peak is convex, so a piece
that is missing there is hardly above its neighbours."""


def pieces_of(
    course: Callable[[Sequence[SampleSize]], list[int]], kind: BatchKind, padded: bool, draws: int, family: Family
) -> list[list[float]] | None:
    """The pieces of the peak, from as many batches as there are parts; None if their courses differ in length."""
    batches = probes(kind, padded, draws, family)
    courses = [course(batch) for batch in batches]
    if len(courses[0]) != len(courses[1]):  # the first step of a process makes what later ones find, such as tables
        courses[0] = course(batches[0])
    if len(set(map(len, courses))) > 1:
        return None
    parts = np.array([Parts.of(batch, draws, family) for batch in batches], float)[:, :-1]
    varying = np.flatnonzero(parts.any(axis=0))
    matrix = np.column_stack([parts[:, varying], np.ones(len(parts))])
    moments = np.linalg.solve(matrix, np.array(courses, float)).round(3)  # [parts + 1, moments]
    of_peak = sorted({int(i) for i in (_grid(len(varying), kind.ragged) @ moments).argmax(axis=1)})
    pieces = np.zeros((len(of_peak), len(Parts._fields) + 1))
    pieces[:, varying], pieces[:, -1] = moments[:-1, of_peak].T, moments[-1, of_peak]
    pieces = np.unique(pieces, axis=0)
    if kind.several:
        further = [*batches[0], batches[0][-1]]
        numbers = np.array([*Parts.of(further, draws, family)[:-1], 0, 1], float)
        each = max(course(further)) - (pieces @ numbers).max()
        pieces[:, -2] += each
        pieces[:, -1] -= len(batches[0]) * each
    return [[int(number) if number.is_integer() else float(number) for number in piece] for piece in pieces]


def _grid(varying: int, ragged: bool) -> Any:
    """`[points, varying + 1]`: parts of many sizes, and a 1."""
    points = [
        [controls, targets, text, *[padding] * (varying - 3), 1]
        for controls in TOKENS
        for targets in TOKENS[1:]
        for text in TEXT
        for padding in ((0, max(controls, targets) // 2) if ragged else (0,))
    ]
    return np.array(points, float)


def probes(kind: BatchKind, padded: bool, draws: int, family: Family) -> list[list[SampleSize]]:
    """Batches of a kind: one, and one for each of the parts that may vary, which have independent `Parts`."""
    image = 0 if kind.image_aligned else UNALIGNED
    text = 0 if kind.text_aligned else UNALIGNED
    if family.joint_sequence:  # text so that the whole row is aligned or not
        text = -draws * image % ROWS + text

    def sample(controls: int, targets: int, tokens: int, *, shifted: bool = True) -> SampleSize:
        targets, tokens = targets + image * shifted, tokens + text * shifted
        positions = (min(9, tokens),) if family.text_rows_only else ()
        return SampleSize(((1, 1, targets), (1, 1, controls)), tokens, positions)

    first = [(1024, 1024, 96)]
    longer = [(1024 + FURTHER, 1024, 96), (1024, 1024 + FURTHER, 96), (1024, 1024, 96 + FURTHER)]
    if not kind.ragged:
        count = 2 if kind.several else 1
        return [[sample(*sizes)] * count for sizes in (*first, *longer)]
    shorter, other = (512, 768, 64), padded  # a padded row is a multiple of the longest
    others = [(512 + FURTHER, 768, 64), (512, 768, 64 + FURTHER)]
    if family.joint_sequence:
        others.append((512, 768, 1536))  # has the longest row, and not the most image tokens
    return [
        *([sample(*sizes), sample(*shorter, shifted=other)] for sizes in (*first, *longer)),
        *([sample(*first[0]), sample(*sizes, shifted=other)] for sizes in others),
    ]


def block_bytes(transformer: dict[str, Any], settings: Config) -> int:
    """The bytes of one block's frozen weights."""
    model = on_meta({**transformer, "num_layers": 1}, settings).requires_grad_(False)
    return frozen_bytes(model.transformer_blocks, transformer)[0]
