"""Count the graphs of compiled blocks, and a block's element-wise kernels and their traffic.

    python tools/bench_graph.py [--batches 8] [--json]

A block of Qwen-Image with 20 billion parameters, packed, in bfloat16, with a LoRA of rank 16 on the image's four linear
layers of attention. It has two samples and an eighth of the real width, on which the numbers hardly depend. Kernels are
all but products of matrices, attention and views. Traffic is what they read and write, in units of
tokens x width x 2 bytes: one unit reads a row once, or writes it once.

    eager        the operations that torch runs
    compiled     the kernels that torch's inductor schedules for the graphs of `compile_blocks`
    recomputed   the same of a block with gradient checkpointing, whose backward pass computes most of forward again

inductor is stopped before it builds the kernels, and plans them for a CPU; for a GPU it may fuse a little more or less.
Nothing is timed.

Graphs are those of two blocks over a ragged run of batches, one of which is a single sample, with a LoRA on the text's
linear layers too: without it the last block, whose text nothing uses, is like the others. A graph break would be an
error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from diffusers.utils import logging
from peft import LoraConfig
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen_train.model.compilation import ATTENTION, compile_blocks
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.weights import checkpoint_blocks, freeze_unreached

LORA = ["to_q", "to_k", "to_v", "to_out.0"]
LORA_OF_TEXT = ["add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
HEADS = 3
WIDTH = 128 * HEADS
TEXT_WIDTH = 48
COUNTED = [((1, 15, 20), 38), ((1, 11, 19), 23)]
"""Image and text tokens of the samples whose block is counted; no number is one of the model's sizes, which the
compiler would take for the same."""
ELSEWHERE = {
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward,
    *(operation.overloadpacket for operation in ATTENTION),
}
"""Products and attention."""
WITHOUT_KERNEL = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten._unsafe_view}
Sample = tuple[tuple[int, int, int], int]


class Counts(NamedTuple):
    """The element-wise kernels of a pass, and their traffic in units."""

    kernels: int
    units: float


Passes = dict[str, Counts]
"""By "forward" and "backward"."""


# ---- a block and its inputs ------------------------------------------------------------------------------------------


def make_model(targets: list[str], *, recomputed: bool = False) -> Any:
    """Two blocks, frozen but for the LoRA."""
    torch.manual_seed(0)
    model = QwenImageMultiResTransformer2DModel(
        num_layers=2, num_attention_heads=HEADS, attention_head_dim=128, joint_attention_dim=TEXT_WIDTH
    )
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    freeze_unreached(model)
    model.layout = "packed"
    if recomputed:
        checkpoint_blocks(model, range(len(model.transformer_blocks)))
    return model.bfloat16().train()


def batch_of(samples: list[Sample]) -> dict[str, Any]:
    """Random numbers for samples of an image and a text."""
    generator = torch.Generator().manual_seed(len(samples))

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    texts = torch.tensor([[text] for _, text in samples])
    longest = int(texts.max())
    return {
        "hidden_states": numbers(len(samples), max(math.prod(image) for image, _ in samples), 64),
        "encoder_hidden_states": numbers(len(samples), longest, TEXT_WIDTH),
        "encoder_hidden_states_mask": torch.arange(longest) < texts,
        "timestep": torch.linspace(0.1, 0.9, len(samples)).bfloat16(),
        "img_shapes": [[image] for image, _ in samples],
    }


class _ReachedError(Exception):
    """The point at which a count is complete."""


def arguments_of_block(model: Any, call: Callable[[], object], rows: int = 2) -> list[Any]:
    """The arguments that the model, in `call`, gives to its first block; the first `rows` with gradients, as behind
    another block."""
    found: list[Any] = []

    def stop(*arguments: Any) -> None:
        found.extend(arguments)
        raise _ReachedError

    with (
        patch.object(model, "gradient_checkpointing", False),
        patch.object(model.transformer_blocks[0], "forward", stop),
        contextlib.suppress(_ReachedError),
    ):
        call()
    return [*(row.detach().clone().requires_grad_() for row in found[:rows]), *found[rows:]]


UNIT = sum(math.prod(image) + text for image, text in COUNTED) * WIDTH * 2


# ---- eager -----------------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """The kernels and bytes of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        if not is_view and func.overloadpacket not in ELSEWHERE | WITHOUT_KERNEL:
            self.kernels += 1
            self.bytes += sum(map(_bytes_of, tree_leaves((args, kwargs, result))))
        return result

    @property
    def counts(self) -> Counts:
        return Counts(self.kernels, self.bytes / UNIT)


def _bytes_of(leaf: Any) -> int:
    """In memory, where a value that is broadcast stands once."""
    return min(leaf.nbytes, leaf.untyped_storage().nbytes()) if isinstance(leaf, Tensor) else 0


def count_eager() -> Passes:
    model = make_model(LORA)
    block, arguments = model.transformer_blocks[0], arguments_of_block(model, lambda: model(**batch_of(COUNTED)))
    with _Operations() as forward:
        outputs = block(*arguments)
    gradients = [torch.randn_like(output) for output in outputs]
    with _Operations() as backward:
        torch.autograd.backward(outputs, gradients)
    return {"forward": forward.counts, "backward": backward.counts}


# ---- compiled --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _scheduled() -> Iterator[list[Counts]]:
    """The kernels that inductor schedules for each graph; a call of its code raises `_ReachedError`."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    found: list[Counts] = []

    class Unbuilt:
        __file__ = "unbuilt"

        @staticmethod
        def call(*_: Any) -> None:
            raise _ReachedError

    def count(graph: Any) -> type[Unbuilt]:
        graph.codegen()
        others = (ExternKernelSchedulerNode, NopKernelSchedulerNode)
        kernels = [node for node in graph.scheduler.nodes if not isinstance(node, others)]
        found.append(Counts(len(kernels), sum(node.get_read_write_buffers_sizes() for node in kernels) / UNIT))
        return Unbuilt

    # Nothing unbuilt may enter a cache; the backward graph is lowered with the forward one, not at its first call; the
    # processor's instructions are not tried out, which needs a compiler.
    with (
        config.patch({"fx_graph_cache": False, "cpp.vec_isa_ok": True}),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
        patch.object(GraphLowering, "compile_to_module", count),
    ):
        yield found


def count_compiled(*, recomputed: bool) -> Passes:
    torch._dynamo.reset()
    model = make_model(LORA, recomputed=recomputed)
    arguments = arguments_of_block(model, lambda: model(**batch_of(COUNTED)))
    compile_blocks(model)
    with _scheduled() as found, contextlib.suppress(_ReachedError):
        model.transformer_blocks[0].forward(*arguments)
    torch._dynamo.reset()
    forward, backward = found
    return {"forward": forward, "backward": backward}


# ---- graphs ----------------------------------------------------------------------------------------------------------


def count_graphs(batches: int) -> dict[str, int]:
    """The graphs of two blocks over a ragged run of batches, the third of them a single sample."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(LORA + LORA_OF_TEXT, recomputed=True)
    compile_blocks(model, backend="eager")
    generator = torch.Generator().manual_seed(0)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for number in range(batches):
        size = 1 if number == 2 else between(2, 5)
        samples = [((1, between(2, 9), between(2, 9)), between(3, 20)) for _ in range(size)]
        model(**batch_of(samples)).sample.float().square().mean().backward()
    counters = torch._dynamo.utils.counters
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return {"batches": batches, "graphs": graphs, "breaks": breaks}


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=8, help="of the run whose graphs are counted")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    logging.set_verbosity_error()
    ways = {
        "eager": count_eager(),
        "compiled": count_compiled(recomputed=False),
        "recomputed": count_compiled(recomputed=True),
    }
    counted = {way: {name: counts._asdict() for name, counts in passes.items()} for way, passes in ways.items()}
    report = {"block": counted, "graphs": count_graphs(options.batches)}
    print(json.dumps(report, indent=1)) if options.json else show(report)


def show(report: dict[str, Any]) -> None:
    graphs = report["graphs"]
    print("| a block | kernels forward | backward | units forward | backward |")
    print("| --- | --- | --- | --- | --- |")
    for way, passes in report["block"].items():
        kernels, units = ([passes[name][of] for name in ("forward", "backward")] for of in ("kernels", "units"))
        print(f"| {way} | {kernels[0]} | {kernels[1]} | {units[0]:.1f} | {units[1]:.1f} |")
    print(f"\n{graphs['graphs']} graphs, {graphs['breaks']} graph breaks in {graphs['batches']} batches")


if __name__ == "__main__":
    main()
