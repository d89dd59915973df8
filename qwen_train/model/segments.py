"""Attention within segments of a row, as one operation that torch.compile leaves whole.

A compiled block must not know the lengths of a batch: each mixture of sizes would be another graph. So they are data:
`spans` on the CPU, which the operation reads without a wait for the device, and `bounds` on the device, which the
variable-length kernel reads. The operation has a backward of its own, and gradient checkpointing can keep its output.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qwen_cache.models.devices import to_device
from qwen_train.model import kernels
from qwen_train.model.kernels import FLASH, KERNELS, Extent, Kernel

# ---- the segments of a batch -----------------------------------------------------------------------------------------


Span = tuple[int, int]
"""Begin and end of consecutive tokens of a row."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens that see the same keys; of its own keys, a text row sees those up to itself."""

    span: Span
    is_text: bool
    keys: tuple[Span, ...]
    """One or two; none for padding."""

    @property
    def length(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def key_length(self) -> int:
        return _length(self.keys)

    @property
    def queries(self) -> slice:
        return slice(*self.span)

    def moved(self, by: int) -> Segment:
        """The segment in a row where its sample begins at `by`."""
        return Segment(_moved(self.span, by), self.is_text, tuple(_moved(keys, by) for keys in self.keys))


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


class Segments(NamedTuple):
    """The segments of a batch as tensors."""

    spans: Tensor
    """`[n, 9]` on the CPU: the call, then begin and end of the queries, of the keys and of further keys; 1 for text;
    the kernel's place in `KERNELS`."""
    bounds: Tensor
    """`[2, n + calls]`, int32 on the device: for each call the n + 1 bounds of its queries, and of its keys."""

    @classmethod
    def of(cls, calls: Sequence[Sequence[Segment]], device: torch.device, kernel: Kernel = FLASH) -> Segments:
        """From the segments that each call of the variable-length kernel takes together: all of text, or none.

        With the kernel "cudnn", each of those that suit it is a call of its own. A single one gets an empty one beside
        it: for the compiler a dimension of 1 is another graph.
        """
        if sum(map(len, calls)) == 1:
            (((only,),),) = (calls,)
            end = only.span[1], only.span[1]
            calls = [[only, Segment(end, only.is_text, ((only.keys[-1][1],) * 2,))]]
        by_kernel: list[tuple[Sequence[Segment], Kernel]] = []
        for members in calls:
            if kernel == "cudnn" and suits_cudnn(members):
                by_kernel += [([segment], kernel) for segment in members]
            else:
                by_kernel.append((members, FLASH if kernel == "cudnn" else kernel))
        spans, bounds = [], []
        for number, (members, chosen) in enumerate(by_kernel):
            for segment in members:
                first, further = (*segment.keys, (0, 0))[:2]
                spans.append([number, *segment.span, *first, *further, int(segment.is_text), KERNELS.index(chosen)])
            lengths = [[segment.length for segment in members], [segment.key_length for segment in members]]
            bounds.append(F.pad(torch.tensor(lengths).cumsum(1), (1, 0)))
        return cls(torch.tensor(spans), to_device(torch.cat(bounds, dim=1).int(), device))


LONG = 1024
"""Tokens from which segments are worth a call each: chosen so that a call fills the GPU, not measured."""
SHORTEST = 64
"""Tokens below which a single segment is left to flash attention: there is nothing to gain, and cuDNN takes no single
key."""


def suits_cudnn(members: Sequence[Segment]) -> bool:
    """True for segments that cuDNN computes one after the other: long ones, or a single one that is not of text.

    Text has as many lengths as there are captions; and cuDNN's causal mask is aligned to the first key, so with fewer
    queries than keys it would be wrong.
    """
    present = [segment for segment in members if segment.length]
    shortest = min((segment.length for segment in present), default=0)
    if any(segment.is_text and segment.length != segment.key_length for segment in present):
        return False
    return shortest >= LONG or (len(present) == 1 and not present[0].is_text and shortest >= SHORTEST)


def _length(spans: Sequence[Span]) -> int:
    return sum(end - begin for begin, end in spans)


def in_segments(query: Tensor, key: Tensor, value: Tensor, of: Segments) -> Tensor:
    """Attention of `[1, Q, heads, dim]` to `[1, K, heads, dim]`, under autocast in autocast's dtype."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    # An index in place of squeeze would have a backward pass that copies: zeros, and the row put into them.
    output: Tensor = segments(query.squeeze(0), key.squeeze(0), value.squeeze(0), *of)[0]
    return output.unsqueeze(0)


# ---- the operation ---------------------------------------------------------------------------------------------------
# On CUDA in half precision: torch's variable-length kernel, a call for each group of segments, or another kernel by the
# choice of the run (`kernels.py`). On the CPU: the kernel of scaled_dot_product_attention, a call for each segment.


@torch.library.custom_op("qwen_train::segments", mutates_args=())
def segments(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """The output `[Q, heads, dim]`, zero for queries in no segment, and the log-sum-exp `[heads, Q]`."""
    calls = _calls(spans, bounds, together=runs_flash(query.device))
    results = [_forward(query, key, value, call) for call in calls]
    if calls[0].is_whole(query, key):
        return results[0]
    output = torch.zeros_like(query)
    lse = torch.zeros_like(_sums_like(query))
    for call, (of_call, lse_of_call) in zip(calls, results, strict=True):
        pieces = torch.split(of_call, call.lengths), torch.split(lse_of_call, call.lengths, dim=1)
        for segment, piece, lse_of_piece in zip(call.members, *pieces, strict=True):
            output[segment.queries] = piece
            lse[:, segment.queries] = lse_of_piece
    return output, lse


@torch.library.custom_op("qwen_train::segments_backward", mutates_args=())
def segments_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    spans: Tensor,
    bounds: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. Those of keys in several segments are added, the last segment first."""
    totals = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for call in reversed(_calls(spans, bounds, together=runs_flash(query.device))):
        gradients = _backward(gradient, query, key, value, output, lse, call)
        if call.is_whole(query, key):
            return gradients
        lengths = call.lengths, call.key_lengths, call.key_lengths
        pieces = [torch.split(x, each) for x, each in zip(gradients, lengths, strict=True)]
        for segment, *of_segment in reversed(list(zip(call.members, *pieces, strict=True))):
            _add(totals, segment, of_segment)
    return totals


def _add(totals: Sequence[Tensor], segment: Segment, gradients: Sequence[Tensor]) -> None:
    """Add a segment's gradients of query, key and value to those of the row."""
    totals[0][segment.queries] += gradients[0]
    lengths = [end - begin for begin, end in segment.keys]
    for total, gradient in zip(totals[1:], gradients[1:], strict=True):
        for (begin, end), piece in zip(segment.keys, torch.split(gradient, lengths), strict=True):
            total[begin:end] += piece


@segments.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), _sums_like(query)


@segments_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _sums_like(query: Tensor) -> Tensor:
    """An empty tensor for the log-sum-exp of these queries."""
    return query.new_empty(query.shape[1], query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:])


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*segments_backward(gradient, *ctx.saved_tensors), None, None)


segments.register_autograd(_differentiate, setup_context=_keep)


# ---- a call of a kernel ----------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The segments that one call of the kernel takes."""

    members: list[Segment]
    bounds: Tensor
    """`[2, n + 1]`: of their queries and of their keys, on the device."""
    kernel: Kernel = FLASH

    @property
    def lengths(self) -> list[int]:
        return [segment.length for segment in self.members]

    @property
    def key_lengths(self) -> list[int]:
        return [segment.key_length for segment in self.members]

    @property
    def is_text(self) -> bool:
        return self.members[0].is_text

    @property
    def queries(self) -> list[Span]:
        return [segment.span for segment in self.members]

    @property
    def keys(self) -> list[Span]:
        return [span for segment in self.members for span in segment.keys]

    def is_whole(self, query: Tensor, key: Tensor) -> bool:
        """True if the segments are all queries and all keys of the row, in order."""
        spans = self.queries, self.keys
        return all(_is_whole(each, len(x)) for each, x in zip(spans, (query, key), strict=True))

    @property
    def longest(self) -> tuple[int, int]:
        return max(self.lengths), max(self.key_lengths)

    @property
    def extent(self) -> Extent:
        return Extent(self.bounds, self.longest, self.is_text)


def _is_whole(spans: Sequence[Span], length: int) -> bool:
    bounds = [0, *(end for _, end in spans)]
    return bounds[-1] == length and all(span[0] == begin for span, begin in zip(spans, bounds, strict=False))


def _calls(spans: Tensor, bounds: Tensor, *, together: bool) -> list[Call]:
    """The calls: one for each group of segments, or one for each segment."""
    calls, begin = [], 0
    for _, group in itertools.groupby(spans.tolist(), key=lambda row: row[0]):
        rows = list(group)
        members, kernel = [_segment(row) for row in rows], KERNELS[rows[0][-1]]
        of_members = bounds[:, begin : (begin := begin + len(members) + 1)]
        alone = [Call([member], of_members) for member in members if member.length]
        calls += [Call(members, of_members, kernel)] if together and alone else alone
    return calls


def _segment(numbers: Sequence[int]) -> Segment:
    """The segment of a row of `Segments.spans`."""
    _, *ends, is_text, _ = numbers
    span, first, further = ((ends[i], ends[i + 1]) for i in (0, 2, 4))
    return Segment(span, bool(is_text), (first, further) if further[1] > further[0] else (first,))


def _joined(x: Tensor, spans: Sequence[Span]) -> Tensor:
    """The tokens of several spans; those of one, or of neighbours, are not copied."""
    if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
        return x[spans[0][0] : spans[-1][1]]
    return torch.cat([x[begin:end] for begin, end in spans])


def _forward(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """The output `[n, heads, dim]` of a call, and the log-sum-exp `[heads, n]`."""
    query, key, value = _joined(query, call.queries), _joined(key, call.keys), _joined(value, call.keys)
    if runs_flash(query.device):
        return kernels.forward(call.kernel, query, key, value, call.extent)
    return kernels.forward_on_cpu(query, key, value, call.extent)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a call's queries, keys and values, each `[n, heads, dim]`."""
    gradient, query, output = (_joined(x, call.queries).contiguous() for x in (gradient, query, output))
    key, value, lse = _joined(key, call.keys), _joined(value, call.keys), _joined(lse.t(), call.queries).t()
    if runs_flash(query.device):
        return kernels.backward(call.kernel, (gradient, query, key, value, output, lse.contiguous()), call.extent)
    return kernels.backward_on_cpu((gradient, query, key, value, output, lse), call.extent)


def flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if the variable-length kernel can run: half precision, head size a multiple of 8 and at most 256, and the
    device."""
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and head_dim % 8 == 0
        and head_dim <= 256
        and runs_flash(query.device)
    )


def runs_flash(device: torch.device) -> bool:
    """True if torch brings flash attention for this device: CUDA on Ampere or newer."""
    return (kernels.capability_of(device) or (0, 0)) >= (8, 0)
