"""The place of the blocks: offloaded, sharded, frozen in few bits; the average of weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qwen_cache.errors import ConfigError
from qwen_cache.models.devices import WaitingBlocks, there_and_back
from qwen_cache.models.quantization import QuantizedLinear, quantize_pending
from qwen_cache.settings.sections import TrainConfig
from qwen_train.model.combinations import NOT_SHARDED

# ---- offload ---------------------------------------------------------------------------------------------------------
# Block offloading in training (`qwen_cache/models/devices.py`): frozen weights wait in host memory.
#
# The trained LoRA is always on the device. `check_settings` refuses settings that would keep the weights of more blocks
# on the device, or that move weights themselves.
#
# diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference, so it is not used. It moves every
# parameter of a block, the LoRA included. It prefetches in the order of the first forward pass, but gradient
# checkpointing recomputes the blocks in reverse. It offloads after a forward that returns, but recomputation ends a
# block's forward by an exception. And it offloads all blocks, not a chosen number.


def offloaded_indices(layers: int, count: int) -> list[int]:
    """The offloaded blocks, spread evenly: while one is copied, those in between compute."""
    return [layers * i // count for i in range(count)]


def offload_blocks(transformer: Any, count: int, device: torch.device) -> Any:
    """Move the transformer to `device`, except for the frozen weights of `count` of its blocks."""
    blocks = list(transformer.transformer_blocks)
    waiting = WaitingBlocks([blocks[i] for i in offloaded_indices(len(blocks), count)], device)
    transformer.to(device)
    transformer.offloaded_blocks = waiting.attach(there_and_back)
    return transformer


# ---- sharding --------------------------------------------------------------------------------------------------------
# Sharded tensors (FSDP2): wrap the model, gather its tensors, and distribute full tensors.
#
# Without FSDP2 every process has the full model, and nothing is gathered. `fully_shard` is called here, not by
# accelerate, which supports FSDP2 on accelerators only; so the same code runs in tests on CPUs.


def wrap(accelerator: Any, transformer: Any, settings: TrainConfig) -> Any:
    """The transformer on this process's device under autocast; in DDP or FSDP2 with several processes.

    Full training converts the weights to float32, unless stochastic rounding keeps them in bfloat16. FSDP2 shards
    quantised weights too: they are plain numbers beside scales whose bits are integers, which it gathers as they are.
    """
    in_float32 = settings.method == "full" and not settings.stochastic_rounding

    def in_trained_dtype(module: Any) -> Any:
        return module.to(torch.float32) if in_float32 else module

    if not settings.fsdp or accelerator.num_processes == 1:
        if not settings.offload_blocks:
            transformer.to(accelerator.device)
        in_trained_dtype(transformer)
        frozen = [name for name, parameter in transformer.named_parameters() if not parameter.requires_grad]
        transformer._ddp_params_and_buffers_to_ignore = frozen  # every process has read them itself
        return accelerator.prepare_model(transformer, device_placement=not settings.offload_blocks)
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # no output is changed in place here
    transformer = accelerator.prepare_model(transformer, device_placement=False, evaluation_mode=True)
    compute = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in transformer.transformer_blocks:  # block by block: the full model may not fit on the device
        quantize_pending(block, accelerator.device)
        fully_shard(in_trained_dtype(block), mesh=mesh, mp_policy=precision)
    return fully_shard(in_trained_dtype(transformer), mesh=mesh, mp_policy=precision)


def check_plain(transformer: nn.Module) -> None:
    """Raise ConfigError if a weight is another library's tensor, whose storage FSDP2 cannot divide."""
    for name, parameter in transformer.named_parameters():
        if type(parameter.data) is not Tensor or type(parameter) is not nn.Parameter:
            raise ConfigError(
                "train.fsdp cannot shard these quantised weights",
                where=name,
                found=f"{type(parameter.data).__name__} of {type(parameter.data).__module__.partition('.')[0]}",
                do=NOT_SHARDED,
            )


def held_bytes(transformer: nn.Module) -> tuple[int, int]:
    """The bytes of the weights in this process, and of all weights."""
    tensors = [parameter.data for parameter in transformer.parameters()]
    held = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(each.nbytes for each in held), sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, or the tensor itself; every process takes part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(value: Tensor, target: Tensor) -> Tensor:
    """The full tensor `value`, sharded like `target`; replicated if the shapes differ."""
    if not isinstance(target, DTensor):
        return value
    mesh = target.device_mesh
    placements = target.placements if value.shape == target.shape else [Replicate()] * mesh.ndim
    # no source rank: every process has the full value
    return distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Copy the full tensor `value` into `target`."""
    target.copy_(distribute_like(value.to(target.dtype), target))


# ---- frozen layers ---------------------------------------------------------------------------------------------------
# Layers of a frozen transformer that keep less memory for the backward pass and keep the dtype of their input.
#
# Results are those of the layers they replace, within the rounding of the dtype.
#
# - `QuantizedLinear` (`qwen_cache/models/quantization.py`) in place of torchao's layer in a folder that was saved so:
#   that one keeps its unpacked weight.
# - `UnpackedLinear`: the same for diffusers' linear layer of a GGUF file. Its weight becomes a plain tensor of bytes,
#   which can be offloaded.
# - `InputDtypeLayerNorm`: under CUDA's autocast a LayerNorm returns float32, and so would every later tensor of a
#   quantised or fully trained model.


def replace_layers(transformer: nn.Module) -> None:
    """Replace the classes of LayerNorms and of frozen quantised linear layers in place; parameters stay the same."""
    for module in transformer.modules():
        if type(module) is nn.LayerNorm and not module.elementwise_affine:
            module.__class__ = InputDtypeLayerNorm
        elif type(module) is nn.Linear and has_weight_only_rows(module.weight):
            weight: Any = module.weight
            QuantizedLinear.make(module, weight.qdata, weight.scale)
        elif type(module).__name__ == "GGUFLinear":
            as_unpacked_linear(module)


def has_weight_only_rows(weight: Any) -> bool:
    """True if it is torchao's int8 or fp8 weight with a scale per row, used without quantising the activations."""
    if not {"qdata", "scale", "block_size"} <= getattr(weight, "__dict__", {}).keys() or weight.requires_grad:
        return False
    of_activations = (getattr(weight, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    return list(weight.block_size) == [1, weight.shape[1]] and all(setting is None for setting in of_activations)


class InputDtypeLayerNorm(nn.LayerNorm):
    """A LayerNorm without weights that runs with autocast disabled; the kernels still sum in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def as_unpacked_linear(layer: Any) -> None:
    """Make diffusers' GGUFLinear an `UnpackedLinear` in place."""
    layer.quant_type = layer.weight.quant_type
    layer.weight = nn.Parameter(layer.weight.as_tensor(), requires_grad=False)
    layer.__class__ = UnpackedLinear


class UnpackedLinear(nn.Linear):
    """A linear layer whose frozen weight is in GGML's blocks: `weight` has the bytes of each row.

    Like QuantizedLinear it computes in autocast's dtype, to which the unpacked weight is rounded, as in GGUFLinear.
    """

    quant_type: Any
    """gguf.GGMLQuantizationType of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        product: Any = _UnpackedProduct.apply
        output: Tensor = product(x.to(dtype), self.weight, self.quant_type, self.bias)
        return output


def _unpack(weight: Tensor, quant_type: Any, dtype: torch.dtype) -> Tensor:
    """`[N, K]` in `dtype` by diffusers' functions, which return float16 or float32."""
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    numbers: Tensor = dequantize_gguf_tensor(GGUFParameter(weight, quant_type=quant_type))
    return numbers.to(dtype)


class _UnpackedProduct(torch.autograd.Function):
    """`x @ weight.T + bias` of a packed weight, with gradients for `x` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quant_type: Any, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.quant_type = quant_type
        return nn.functional.linear(x, _unpack(weight, quant_type, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight,) = gradients, ctx.saved_tensors
        return gradient @ _unpack(weight, ctx.quant_type, gradient.dtype), None, None, None


# ---- ema -------------------------------------------------------------------------------------------------------------
# The exponential moving average (EMA) of the trained weights; it often generates better images than the last step.
#
#     average <- decay · average + (1 - decay) · weights        after each optimizer step n = 1, 2, …
#
# with decay = min(train.ema_decay, n / (9 + n)), and 0 for n = 1, so that the first steps are soon forgotten. These are
# the values of diffusers' EMAModel, which is not used itself because its module imports the pipelines.


class Ema:
    """The average of `parameters`; `swapped` puts it in their place."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.average = [parameter.detach().clone() for parameter in parameters]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an optimizer step to the average."""
        self.updates += 1
        decay = min(self.decay, self.updates / (9 + self.updates)) if self.updates > 1 else 0.0
        torch._foreach_lerp_(self.average, list(self.parameters), 1 - decay)  # in a few kernels for all

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap parameters and average while entered."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self.average, self.parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
