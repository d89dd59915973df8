"""Small torch programs for the simulated device: correct ones, and the same with a fault.

`python -m tests.simulated_device.programs` runs them all, and prints for each what the device reported and what the
program returned, as JSON. A name that ends with a fault, such as `two_fixed_buffers_read_too_early`, is the broken
twin of a program before it.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backend, simu

ROOT = Path(__file__).parents[2]
SIZE = 4096
PROGRAMS: dict[str, Callable[[], Any]] = {}


def program(function: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[function.__name__] = function
    return function


def pinned(value: float = 1.0) -> Tensor:
    return torch.full((SIZE,), value).pin_memory()


def up(tensor: Tensor) -> Tensor:
    return tensor.to("simu", non_blocking=True)


# ---- the order of streams --------------------------------------------------------------------------------------------


def prefetch(*, wait: bool = True, record: bool = True, keep: bool = False) -> float:
    """A copy into fresh memory on a stream of its own, used on the default one."""
    stream, source = simu.Stream(), pinned()
    with simu.stream(stream):
        copy = up(source)
        arrived = stream.record_event()
    if wait:
        simu.current_stream().wait_event(arrived)
    total = copy.sum()
    if record:
        copy.record_stream(simu.current_stream())
    if keep:  # the same as recording: freed when the copy stream has waited for its last use
        stream.wait_stream(simu.current_stream())
    del copy
    return float(total)


@program
def a_prefetch() -> float:
    return prefetch()


@program
def a_prefetch_whose_stream_waits_before_it_frees() -> float:
    return prefetch(record=False, keep=True)


@program
def a_prefetch_used_without_waiting() -> float:
    return prefetch(wait=False)


@program
def a_prefetch_freed_without_recording() -> float:
    return prefetch(record=False)


def two_buffers(*, wait_for_reader: bool = True, wait_for_copy: bool = True, first_wait: bool = True) -> list[float]:
    """Two fixed buffers, filled in turn on a copy stream while the other one is read."""
    stream, buffers = simu.Stream(), [torch.empty(SIZE, device="simu") for _ in range(2)]
    if first_wait:
        stream.wait_stream(simu.current_stream())  # their memory may have had another user
    sources = [pinned(float(i)) for i in range(6)]
    read: list[Any] = [None, None]
    totals = []
    for i, source in enumerate(sources):
        with simu.stream(stream):
            if wait_for_reader and read[i % 2]:
                stream.wait_event(read[i % 2])
            buffers[i % 2].copy_(source, non_blocking=True)
            arrived = stream.record_event()
        if wait_for_copy:
            simu.current_stream().wait_event(arrived)
        totals.append(buffers[i % 2].sum())
        read[i % 2] = simu.current_stream().record_event()
    results = [float(total) for total in totals]
    simu.synchronize()
    return results


@program
def two_fixed_buffers() -> list[float]:
    return two_buffers()


@program
def two_fixed_buffers_refilled_too_early() -> list[float]:
    return two_buffers(wait_for_reader=False)


@program
def two_fixed_buffers_read_too_early() -> list[float]:
    return two_buffers(wait_for_copy=False)


@program
def two_fixed_buffers_whose_memory_was_in_use() -> list[float]:
    torch.ones(SIZE, device="simu").sum()  # work of the default stream, which may have had the buffers' memory
    return two_buffers(first_wait=False)


@program
def order_through_a_third_stream() -> float:
    """An event that orders two streams which never meet."""
    first, second, third = simu.Stream(), simu.Stream(), simu.Stream()
    x = torch.empty(SIZE, device="simu")
    simu.synchronize()
    with simu.stream(first):
        x.fill_(1)
        one = first.record_event()
    second.wait_event(one)
    with simu.stream(third):
        third.wait_event(second.record_event())
        total = x.sum()
    third.synchronize()
    with simu.stream(first):  # the host knows that the third stream has read it
        x.fill_(2)
    first.synchronize()
    return float(total)


@program
def an_event_recorded_too_early() -> None:
    stream, x = simu.Stream(), torch.empty(SIZE, device="simu")
    simu.synchronize()
    with simu.stream(stream):
        early = stream.record_event()
        x.fill_(1)
    simu.current_stream().wait_event(early)
    x.sum()
    simu.synchronize()


@program
def host_waits_for_the_wrong_stream() -> None:
    stream, x = simu.Stream(), torch.empty(SIZE, device="simu")
    simu.synchronize()
    with simu.stream(stream):
        x.fill_(1)
    simu.current_stream().synchronize()
    x.sum()
    simu.synchronize()


@program
def gradients_on_a_stream() -> float:
    """Autograd's thread issues the backward pass on the streams of the forward pass."""
    weight = torch.ones(SIZE, device="simu", requires_grad=True)
    stream = simu.Stream()
    stream.wait_stream(simu.current_stream())
    with simu.stream(stream):
        loss = (weight * 3).sum()
        loss.backward()
    simu.current_stream().wait_stream(stream)
    assert weight.grad is not None
    weight.grad.record_stream(simu.current_stream())
    result = float(weight.grad.sum())
    simu.synchronize()
    return result


@program
def two_devices() -> float:
    x = torch.ones(SIZE, device="simu:0") * 2
    y = x.to("simu:1", non_blocking=True)
    return float((y + 1).sum())


# ---- pinned memory ---------------------------------------------------------------------------------------------------


def refill(wait: bool) -> list[float]:
    source, totals = pinned(0.0), []
    copied = None
    for i in range(3):
        if wait and copied:
            copied.synchronize()
        source.fill_(float(i))
        totals.append(up(source).sum())
        copied = simu.current_stream().record_event()
    return [float(total) for total in totals]


@program
def pinned_memory_refilled() -> list[float]:
    return refill(wait=True)


@program
def pinned_memory_refilled_too_early() -> list[float]:
    return refill(wait=False)


def used_by_two_streams(wait: bool) -> list[float]:
    """Each value comes down on one stream and goes up again on another, through the same memory."""
    stream, memory, totals = simu.Stream(), pinned(), []
    for i in range(3):
        value = torch.full((SIZE,), float(i), device="simu")
        memory.copy_(value, non_blocking=True)
        if wait:
            stream.wait_stream(simu.current_stream())
        with simu.stream(stream):
            totals.append(up(memory).sum())
        if wait:
            simu.current_stream().wait_stream(stream)
    simu.synchronize()
    return [float(total) for total in totals]


@program
def pinned_memory_used_by_two_streams() -> list[float]:
    return used_by_two_streams(wait=True)


@program
def pinned_memory_used_by_two_streams_too_early() -> list[float]:
    return used_by_two_streams(wait=False)


@program
def pinned_memory_freed_at_once() -> float:
    copy = up(pinned(3.0))
    return float(copy.sum())


@program
def one_part_of_pinned_memory_refilled() -> float:
    """Copies of one part are no concern of the other."""
    memory = torch.zeros(2 * SIZE).pin_memory()
    copy = up(memory[:SIZE])
    memory[SIZE:] = 5
    total = float(copy.sum())
    memory[:SIZE] = 7
    return total


@program
def a_download_read_too_early() -> bool:
    x = torch.ones(SIZE, device="simu")
    down = x.to("cpu", non_blocking=True)
    early = bool(down.isnan().all())
    simu.synchronize()
    return early and bool((down == 1).all())


# ---- devices ---------------------------------------------------------------------------------------------------------


def refused(function: Callable[[], Any]) -> str:
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


@program
def scalars_and_indices_of_the_cpu() -> list[float]:
    x = torch.arange(4.0, device="simu")
    picked = x[torch.tensor([1, 2])]
    x[torch.tensor([0])] = 9.0
    return (picked * torch.tensor(2.0)).tolist() + x.tolist()  # type: ignore[no-any-return]


@program
def tensors_of_two_devices() -> list[str]:
    x, here, other = torch.ones(4, 4, device="simu"), torch.ones(4, 4), torch.ones(4, 4, device="simu:1")
    query = torch.ones(1, 1, 8, 8, device="simu")
    return [
        refused(lambda: x + here),
        refused(lambda: x @ other),
        refused(lambda: torch.cat([here, x])),
        refused(lambda: F.linear(x, here)),
        refused(lambda: torch.tensor(1.0).add_(x.sum())),
        refused(lambda: F.embedding(torch.tensor([1]), x)),
        refused(lambda: x.index_select(0, torch.tensor([1]))),
        refused(lambda: F.conv1d(x[None], here[..., None])),
        refused(lambda: F.scaled_dot_product_attention(query, query, query, attn_mask=torch.ones(8, 8))),
        refused(lambda: x.normal_(generator=torch.Generator())),
    ]


# ---- waits -----------------------------------------------------------------------------------------------------------


@program
def every_wait() -> None:
    x = torch.ones(8).to("simu")
    x.sum().item()
    x.cpu()
    x.nonzero()
    x[x > 0]
    bool(x.any())
    x.tolist()
    torch.repeat_interleave(x, torch.ones(8, dtype=torch.long, device="simu"))
    simu.synchronize()
    simu.current_stream().synchronize()
    simu.current_stream().record_event().synchronize()
    torch.ones(8).to("simu", non_blocking=True)


@program
def no_waits() -> None:
    x = torch.ones(8, device="simu")
    x[x > 0] = 0.0
    x[1:3] = 5
    x.masked_fill_(x > 2, 1.0)
    torch.where(x > 0, x, 0.0).sum()
    torch.repeat_interleave(x, torch.ones(8, dtype=torch.long, device="simu"), output_size=8)
    up(pinned())
    x.to(torch.bfloat16).float().add_(1)
    simu.current_stream().query()


# ---- memory ----------------------------------------------------------------------------------------------------------

MB = 1 << 20


def active() -> int:
    return simu.memory_stats()["active_bytes.all.current"] // MB


@program
def memory_of_a_recorded_stream() -> list[list[int]]:
    """Freed memory stays active until the host knows that the recorded stream has passed."""
    stream, x = simu.Stream(), torch.empty(MB, dtype=torch.uint8, device="simu")
    stream.wait_stream(simu.current_stream())
    with simu.stream(stream):
        x.sum()
    x.record_stream(stream)
    del x
    before = [simu.memory_allocated() // MB, active()]
    stream.synchronize()
    return [before, [simu.memory_allocated() // MB, active()]]


@program
def fresh_memory_is_nan() -> bool:
    return bool(torch.empty(SIZE, device="simu").isnan().all())


def more(count: int) -> list[Tensor]:
    return [torch.empty(MB, dtype=torch.uint8, device="simu") for _ in range(count)]


@program
def out_of_memory_and_recovery() -> list[Any]:
    backend.set_capacity(0, simu.memory_allocated() + 4 * MB)
    try:
        more(5)
    except torch.OutOfMemoryError as error:
        message = str(error)
    simu.empty_cache()
    return [message, len(more(4)), simu.memory_stats()["num_ooms"]]


@program
def the_allocator_waits_for_other_streams() -> int:
    backend.set_capacity(0, simu.memory_allocated() + 2 * MB)
    stream = simu.Stream()
    x = more(1)[0]
    stream.wait_stream(simu.current_stream())
    with simu.stream(stream):
        x.sum()
    x.record_stream(stream)
    del x
    return len(more(2))


@program
def operators_in_place_do_not_allocate() -> int:
    x, y = torch.ones(MB, device="simu"), torch.empty(MB, device="simu")
    simu.reset_peak_memory_stats()
    before = simu.memory_allocated()
    x.add_(1).mul_(x)
    torch.add(x, 1, out=y)
    y.copy_(x)
    return simu.max_memory_allocated() - before


@program
def pinned_bytes() -> list[int]:
    before = backend.extension().pinned()
    memory = torch.empty(3 * MB, dtype=torch.uint8, pin_memory=True)
    now = backend.extension().pinned()
    del memory
    return [(now[name] - before[name]) // MB for name in ("pinned", "pinned_rounded")]


# ---- results ---------------------------------------------------------------------------------------------------------


def difference(function: Callable[..., Tensor], *inputs: Tensor) -> float:
    """The largest difference between the device's output and gradients and the CPU's."""

    def results(device: str) -> list[Tensor]:
        leaves = [x.detach().to(device).requires_grad_(x.is_floating_point()) for x in inputs]
        output = function(*leaves)
        output.float().square().mean().backward()
        return [output.detach().cpu(), *(x.grad.cpu() for x in leaves if x.grad is not None)]

    pairs = list(zip(results("simu"), results("cpu"), strict=True))
    assert all(a.isfinite().all() for a, _ in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs)


@program
def results_of_the_cpu() -> dict[str, float]:
    torch.manual_seed(0)
    x, w, b = torch.randn(2, 16, 32), torch.randn(48, 32), torch.randn(48)
    image, kernel = torch.randn(2, 4, 9, 9), torch.randn(8, 4, 3, 3)
    q, k, v = torch.randn(3, 2, 4, 64, 16)
    mask = torch.rand(2, 1, 1, 64) > 0.3

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(2, 16, 16, 2))
        return torch.view_as_real(pairs * torch.polar(torch.ones(16), torch.arange(16.0)).to(x.device)).flatten(2)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device))

    return {
        "linear": difference(lambda x, w, b: F.gelu(F.linear(x, w, b)), x, w, b),
        "layer norm": difference(lambda x: F.layer_norm(x, (32,)), x),
        "group norm": difference(lambda x: F.group_norm(x, 2), image),
        "convolution": difference(lambda x, w: F.conv2d(x, w, stride=2, padding=1), image, kernel),
        "transposed convolution": difference(lambda x, w: F.conv_transpose2d(x, w), image, kernel.transpose(0, 1)),
        "interpolation": difference(lambda x: F.interpolate(x, scale_factor=2.0), image),
        "complex numbers": difference(rotate, x),
        "attention": difference(F.scaled_dot_product_attention, q, k, v),
        "attention, bfloat16": difference(F.scaled_dot_product_attention, q.bfloat16(), k.bfloat16(), v.bfloat16()),
        "attention with a mask": difference(masked, q, k, v),
        "indices": difference(lambda x: x[:, [3, 1, 1]].cumsum(1), x),
    }


@program
def random_numbers() -> list[bool]:
    torch.manual_seed(3)
    state, first = simu.get_rng_state(), torch.randn(8, device="simu")
    here = torch.randn(8)
    simu.set_rng_state(state)
    own = torch.Generator("simu").manual_seed(3)
    again = [torch.randn(8, device="simu"), torch.randn(8, device="simu", generator=own)]
    return [bool((first == other).all()) for other in again] + [bool((first.cpu() == here).all())]


@program
def autocast() -> dict[str, str]:
    x, layer = torch.randn(4, 8, device="simu"), torch.nn.Linear(8, 8, device="simu")
    with torch.autocast("simu", torch.bfloat16):
        y = layer(x)
        results = {
            "linear": y,
            "layer_norm": F.layer_norm(y, (8,)),
            "softmax": y.softmax(-1),
            "sum": y.sum(),
            "norm": y.norm(),
            "gelu": F.gelu(y),
            "addcmul": torch.addcmul(x, y, y),
        }
    return {name: str(result.dtype) for name, result in results.items()}


def attention_memory(masked: bool) -> float:
    """The allocations of attention, in sizes of its output."""
    q, k, v = (torch.randn(1, 2, 1024, 16, device="simu", requires_grad=True) for _ in range(3))
    mask = torch.ones(1, 1, 1, 1024, dtype=torch.bool, device="simu") if masked else None
    simu.reset_peak_memory_stats()
    before = simu.memory_allocated()
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return (simu.max_memory_allocated() - before) / output.nbytes


@program
def attention_makes_no_logits() -> list[float]:
    return [attention_memory(False), attention_memory(True)]


@program
def variable_length_attention() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    torch.manual_seed(0)
    q, k, v = torch.randn(3, 50, 2, 16, dtype=torch.bfloat16, device="simu")
    q = q[:30]
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    bounds = [torch.tensor(it, dtype=torch.int32, device="simu") for it in ([0, 10, 30], [0, 25, 50])]
    worst: dict[str, Any] = {}
    for window in ((-1, -1), (-1, 0)):
        output = varlen_attn(*leaves, *bounds, 20, 25, window_size=window)
        output.float().square().mean().backward()
        found = [output.detach().cpu(), *(x.grad.cpu() for x in leaves if x.grad is not None)]
        pure = [x.detach().cpu().float().requires_grad_() for x in (q, k, v)]
        pieces = []
        for rows, columns in ((slice(0, 10), slice(0, 25)), (slice(10, 30), slice(25, 50))):
            logits = torch.einsum("qhd,khd->hqk", pure[0][rows], pure[1][columns]) / math.sqrt(16)
            if window == (-1, 0):
                size = logits.shape[-2:]
                logits = logits.masked_fill(torch.ones(size).tril(size[1] - size[0]) == 0, -math.inf)
            pieces.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1), pure[2][columns]))
        expected = torch.cat(pieces)
        expected.square().mean().backward()
        grads = [expected.detach(), *(x.grad for x in pure if x.grad is not None)]
        worst[str(window)] = max(float((a.float() - b).norm() / b.norm()) for a, b in zip(found, grads, strict=True))
        for leaf in leaves:
            leaf.grad = None
    here = [it.cpu() for it in bounds]
    worst["refused"] = [
        refused(lambda: varlen_attn(*(x.float() for x in leaves), *bounds, 20, 25)),
        refused(lambda: varlen_attn(*leaves, *here, 20, 25)),
        refused(lambda: varlen_attn(*leaves, *(it.long() for it in bounds), 20, 25)),
        refused(lambda: varlen_attn(*leaves, *bounds, 19, 25)),
        refused(lambda: varlen_attn(leaves[0].float(), *leaves[1:], *bounds, 20, 25)),
    ]
    worst["calls"] = backend.calls("aten::_flash_attention_forward")
    return worst


# ---- all of them -----------------------------------------------------------------------------------------------------


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    backend.events.clear()
    returned = function()
    reported = list(backend.events)
    for device in range(simu.device_count()):
        simu.synchronize(device)
        backend.set_capacity(device, None)
    gc.collect()
    late = [event for event in backend.events if event.kind in backend.FAULTS and event not in reported]
    return {"events": backend.counted(reported + late), "returned": returned}


def main() -> None:
    backend.install(ROOT, [str(Path(__file__).relative_to(ROOT))])
    print(json.dumps({name: outcome(function) for name, function in PROGRAMS.items()}))


if __name__ == "__main__":
    main()
