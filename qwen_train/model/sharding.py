"""Tensors that several processes hold in parts (FSDP2): wrap the model, gather what it holds, deal it out again.

Without FSDP2 every process has the whole model, and nothing is gathered. `fully_shard` is called here and not by
accelerate, which knows FSDP2 on accelerators only: so the same code runs in tests on CPUs.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from qwen_cache.errors import ConfigError
from qwen_cache.settings.train import TrainConfig

T = TypeVar("T")


def wrap(accelerator: Any, transformer: Any, settings: TrainConfig) -> Any:
    """The transformer on this process's device and under autocast; in DDP or FSDP2 if there are more processes.

    Weights that are trained whole become float32.
    """

    def as_trained(module: Any) -> Any:
        return module.to(torch.float32) if settings.method == "full" else module

    if not settings.fsdp or accelerator.num_processes == 1:
        as_trained(transformer)
        frozen = [name for name, parameter in transformer.named_parameters() if not parameter.requires_grad]
        transformer._ddp_params_and_buffers_to_ignore = frozen  # not sent to processes that have read them
        return accelerator.prepare_model(transformer, device_placement=not settings.offload_blocks)
    if getattr(transformer, "hf_quantizer", None) is not None:
        raise ConfigError("train.fsdp cannot share out quantised weights", do="set one of them back to its default")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # nothing here changes an output in place
    transformer = accelerator.prepare_model(transformer, device_placement=False, evaluation_mode=True)
    compute = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    for block in transformer.transformer_blocks:  # each moves to the device alone: the whole may not fit there
        fully_shard(as_trained(block), mesh=mesh, mp_policy=precision)
    return fully_shard(as_trained(transformer), mesh=mesh, mp_policy=precision)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, of which this process may hold a part; every process has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_all(value: T) -> list[T]:
    """What each process has, by rank; every process has to take part."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def alike(value: Tensor, target: Tensor) -> Tensor:
    """`value`, which is whole, in the parts in which `target` is held; on every process if it is of another shape."""
    if not isinstance(target, DTensor):
        return value
    mesh = target.device_mesh
    placements = target.placements if value.shape == target.shape else [Replicate()] * mesh.ndim
    return distribute_tensor(value.to(target.device), mesh, placements, src_data_rank=None)  # each has the whole


@torch.no_grad()
def assign(target: Tensor, value: Tensor) -> None:
    """Overwrite `target` by `value`, which is whole."""
    target.copy_(alike(value.to(target.dtype), target))
