"""Sharded tensors (FSDP2): wrap the model, gather its tensors, and distribute full tensors.

Without FSDP2 every process has the full model, and nothing is gathered. `fully_shard` is called here, not by
accelerate, which supports FSDP2 on accelerators only; so the same code runs in tests on CPUs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qwen_cache.errors import ConfigError
from qwen_cache.settings.sections import TrainConfig


def wrap(accelerator: Any, transformer: Any, settings: TrainConfig) -> Any:
    """The transformer on this process's device under autocast; in DDP or FSDP2 with several processes.

    Full training converts the weights to float32, unless stochastic rounding keeps them in bfloat16.
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
        fully_shard(in_trained_dtype(block), mesh=mesh, mp_policy=precision)
    return fully_shard(in_trained_dtype(transformer), mesh=mesh, mp_policy=precision)


def check_shardable(transformer: Any, settings: TrainConfig, processes: int) -> None:
    """Raise ConfigError for FSDP2 with quantised weights."""
    if settings.fsdp and processes > 1 and getattr(transformer, "hf_quantizer", None) is not None:
        do = "set train.fsdp=false, or train unquantised weights"
        raise ConfigError("train.fsdp cannot shard quantised weights", do=do)


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
