"""Compiled blocks: each block as one graph, for every mixture of sizes."""

from __future__ import annotations

import functools
import logging
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.models.devices import is_accelerator
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.settings.sections import TrainConfig
from qwen_train.model.attention import active_backend
from qwen_train.model.combinations import FEWEST_STEPS, has_dropout
from qwen_train.model.saved_tensors import saving
from qwen_train.model.segments import runs_flash

GRAPHS = 32
"""The graphs of one block's code, for all kinds of passes: training, validation, with and without an adapter. Each has
two, of the last block and of the others; twice as many in the padded layout if a batch may be one sample. torch's own
limit is 8, at which it would stop compiling."""
TORCH = "2.13"
"""The oldest torch that makes few graphs: with 2.10 each batch of Qwen-Image-2.1 makes two."""
ATTENTION = {
    torch.ops.qwen_train.segments.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
"""The operations whose outputs a recomputed block keeps if there is room: they take long, and each is one tensor."""


# ---- train.compile ---------------------------------------------------------------------------------------------------


def with_compile(config: Config, device: torch.device, steps: int, run: Path | None = None) -> tuple[Config, str]:
    """The configuration with true or false in place of "auto", that of the `run` to continue or for as many `steps`;
    and why blocks are not compiled, "" without a reason to tell.

    Raises ConfigError for train.compile=true on a device that cannot.
    """
    settings, saved = config.train, None
    obstacle = _obstacle(settings, device)
    if settings.compile == "auto" and run is not None:
        with suppress(ConfigError):
            saved = load_saved(run / CONFIG_NAME).train.compile
    if isinstance(saved, bool):
        chosen, reason = saved and not obstacle, obstacle if saved else ""
    elif settings.compile == "auto":
        reason = obstacle or _reason_against(settings, device, steps)
        chosen = not reason
    else:
        chosen, reason = settings.compile, ""
    if chosen and obstacle:
        raise ConfigError(f"train.compile=true: {obstacle}", do="set train.compile=false")
    if chosen and has_dropout(settings):
        chosen, reason = False, "the adapter has dropout"
    shown = reason if is_accelerator(device) or settings.compile is True else ""
    return config.model_copy(update={"train": settings.model_copy(update={"compile": chosen})}), shown


def _obstacle(settings: TrainConfig, device: torch.device) -> str:
    """Why blocks cannot be compiled with this torch, or on this device; "" if they can."""
    if torch.torch_version.TorchVersion(torch.__version__) < TORCH:
        return f"compiled blocks need torch {TORCH}; older ones make a graph for each batch"
    in_half = settings.mixed_precision == "bf16"
    if is_accelerator(device) and not (runs_flash(device) and in_half):
        return "compiled blocks need a CUDA device from Ampere on, and train.mixed_precision=bf16"
    return ""


def _reason_against(settings: TrainConfig, device: torch.device, steps: int) -> str:
    """Why "auto" does not compile."""
    if not is_accelerator(device):
        return "the CPU gains little"
    if settings.offload_blocks:
        return "train.offload_blocks moves the weights"
    if steps < FEWEST_STEPS:
        return f"fewer than {FEWEST_STEPS} steps are left"
    if not has_compiler():
        return "there is no Triton, or no C compiler"
    return ""


def has_compiler() -> bool:
    """True if torch can compile for CUDA: by Triton, which calls a C compiler."""
    from torch.utils._triton import has_triton

    return has_triton() and any(map(shutil.which, ("cc", "gcc", "clang")))


# ---- the blocks ------------------------------------------------------------------------------------------------------


def compile_blocks(transformer: Any, **options: Any) -> None:
    """Compile each block, in place, with its gradient checkpointing inside; `options` are those of torch.compile.

    A block that does not become one graph, and more graphs than `GRAPHS`, are errors, not a slower run. Raises
    ModelError for a chosen attention backend.
    """
    if active_backend(transformer.transformer_blocks[0].attn.processor) is not AttentionBackendName.NATIVE:
        do = 'call set_attention_backend("native"), or do not compile'
        raise ModelError("compiled blocks compute attention themselves", do=do)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    # A number like a LoRA's scale is a constant; as an input it would be a tensor on the CPU, with kernels of its own.
    torch._dynamo.config.specialize_float = True
    # The compiler looks at every attribute of its inputs, and makes an object of an autograd function.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=".*autograd.function.Function.* should not be instantiated")
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # it advises on `context_fn`
    run = torch.compile(_run, fullgraph=True, dynamic=True, **options)
    for block in transformer.transformer_blocks:
        block.forward = functools.partial(_forward, transformer, run, block)
    transformer.disable_gradient_checkpointing()
    transformer.is_compiled = True


def uncompile_blocks(transformer: Any) -> None:
    """Undo `compile_blocks`, but for its gradient checkpointing."""
    for block in transformer.transformer_blocks:
        del block.forward
    transformer.is_compiled = False


def _forward(transformer: Any, run: Any, block: nn.Module, *arguments: Any, **stock: Any) -> Any:
    """The compiled block. A call of the stock model, which names its arguments, is not compiled: it has caches."""
    if stock:
        return type(block).forward(block, *arguments, **stock)
    with saving(transformer, block, arguments):
        return run(block, block in transformer.recomputed_blocks, transformer.keeps_attention, *arguments)


def is_of_compiler(error: RuntimeError) -> bool:
    """True for an error of torch.compile itself."""
    from torch._dynamo.exc import TorchDynamoException  # imported late: it takes as long as much of torch

    return isinstance(error, TorchDynamoException)


def _run(block: nn.Module, is_recomputed: bool, keeps_attention: bool, *arguments: Any) -> Any:
    """The block's own forward; its class is looked at, since FSDP2 changes it."""
    forward = functools.partial(type(block).forward, block)
    if not (is_recomputed and torch.is_grad_enabled()):
        return forward(*arguments)
    if not keeps_attention:
        return checkpoint(forward, *arguments, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_attention)
    return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts)


def _keep_attention(_: Any, operation: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE
