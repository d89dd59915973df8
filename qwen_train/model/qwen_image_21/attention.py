"""Block-causal attention over the row of `joint_row`, for several samples and noise draws at once.

No mask of all tokens by all tokens is made, unless by choice. By default each segment is one call of the active
backend, on slices of its sample. On CUDA in half precision torch's variable-length kernel takes all first texts in
one call, all draws in another, and each segment between them on its slice: it needs no compilation, and no new one for
another mixture of sizes. `set_attention_backend("flex")` calls flex_attention, with a block mask made once per forward
pass and a second one for the last block's draws. It skips empty blocks only when the model is compiled; uncompiled it
fills a matrix of all scores, so it is not the default. Backends that misread the mask of text after an image are
refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21Attention,
    QwenImage21AttnProcessor,
)
from jaxtyping import Float
from torch import Tensor, nn

from qwen_cache.errors import TrainError
from qwen_train.model.joint_attention import (
    BACKENDS_THAT_MISREAD_MASKS,
    active_backend,
    apply_rotary_embedding,
    flash_takes,
    varlen_kernel,
)
from qwen_train.model.qwen_image_21.joint_row import JointRow, JointSample, Segment, offsets

Row = Float[Tensor, "1 M heads dim"]
Asked = Float[Tensor, "1 Q heads dim"]
Attend = Callable[..., Tensor]


def refuse_backend_for_text(backend: AttentionBackendName, row: JointRow) -> None:
    """Raise TrainError for a backend that misreads the causal mask of text after an image."""
    if backend in BACKENDS_THAT_MISREAD_MASKS and row.text_masks:
        raise TrainError(
            "this attention backend misreads the causal mask of text after an image",
            where="attention backend",
            expected="one that takes a mask, such as native",
            found=backend.value,
            do='call set_attention_backend("native")',
        )


# ---- segment by segment ----------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def segmented_attention(query: Asked, key: Row, value: Row, row: JointRow, attend: Attend) -> Asked:
    """One call for each text and condition image, and one for the draws of a sample, as a batch of K."""
    queries = torch.split(query, row.query_lengths, dim=1)
    keys, values = torch.split(key, row.lengths, dim=1), torch.split(value, row.lengths, dim=1)
    outputs = []
    for sample, query, key, value in zip(row.samples, queries, keys, values, strict=True):
        if row.only_draws:
            outputs.append(draws_attention(query, key, value, sample, attend))
            continue
        prefix = sample.segments[: len(sample.prefix)]
        lengths = [*(segment.length for segment in prefix), sample.draw_tokens, sample.padding]
        *asked, of_draws, padding = torch.split(query, lengths, dim=1)
        for segment, piece in zip(prefix, asked, strict=True):
            outputs.append(prefix_attention(piece, key, value, segment, row, attend))
        outputs += [draws_attention(of_draws, key, value, sample, attend), torch.zeros_like(padding)]
    return torch.cat(outputs, dim=1)


def prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, segment: Segment, row: JointRow, attend: Attend
) -> Tensor:
    """A text or a condition image of the prefix, on slices of its sample."""
    key, value = key[:, : segment.span[1]], value[:, : segment.span[1]]
    if not segment.is_text:
        return attend(query, key, value)
    if not segment.span[0]:
        return attend(query, key, value, is_causal=True)
    return attend(query, key, value, attn_mask=row.text_masks[segment.span])


def draws_attention(query: Tensor, key: Tensor, value: Tensor, sample: JointSample, attend: Attend) -> Tensor:
    """All draws of a sample, each with the prefix and itself as keys."""

    def seen(x: Tensor) -> Tensor:
        prefix, of_draws, _ = torch.split(x, [sample.prefix_length, sample.draw_tokens, sample.padding], dim=1)
        if sample.draws == 1:
            return x[:, : sample.prefix_length + sample.draw_tokens]
        return torch.cat([prefix.expand(sample.draws, -1, -1, -1), by_draw(of_draws)], dim=1)

    def by_draw(x: Tensor) -> Tensor:
        return x.reshape(sample.draws, sample.target, *x.shape[2:])

    return attend(by_draw(query), seen(key), seen(value)).reshape(query.shape)


# ---- the variable-length kernel --------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def varlen_attention(query: Asked, key: Row, value: Row, row: JointRow, kernel: Attend) -> Asked:
    """The calls of `row.varlen_calls`; padding sees nothing and gets zero."""
    queries = torch.split(query, row.segment_lengths, dim=1)
    outputs = [torch.zeros_like(piece) for piece in queries]
    keys, values = torch.split(key, row.lengths, dim=1), torch.split(value, row.lengths, dim=1)
    for call in row.varlen_calls:
        asked = joined([queries[place] for place in call.places])
        seen = [key, value]
        if not call.all_keys:
            seen = [joined([x[i][:, begin:end] for i, (begin, end) in call.keys]) for x in (keys, values)]
        # "causal" is aligned to the bottom right, the last query with the last key, where queries are fewer than keys:
        # flash-attention does so since 2.1 (its README, "Change behavior of causal flag"), and torch relies on it for
        # `CausalVariant.LOWER_RIGHT` (torch/nn/attention/bias.py).
        window = (-1, 0) if call.is_text else (-1, -1)
        result = kernel(asked[0], seen[0][0], seen[1][0], *call.bounds, *call.longest, window_size=window)
        for place, piece in zip(call.places, torch.split(result[None], call.lengths, dim=1), strict=True):
            outputs[place] = piece
    return joined(outputs)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Rows one after the other; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), dim=1)


# ---- flex attention --------------------------------------------------------------------------------------------------


def block_masks(row: JointRow, device: torch.device) -> tuple[Any, Any]:
    """flex_attention's masks for the whole row and for the draws alone, from the keys that each token sees.

    They are two spans: of the prefix, and of the draw itself.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    sees = torch.zeros(4, row.length, dtype=torch.int32)
    for begin, sample in zip(offsets(row.samples), row.samples, strict=True):
        for segment in sample.segments:
            span = slice(begin + segment.span[0], begin + segment.span[1])
            keys = segment.keys or (segment.span,)  # padding sees itself: a row of nothing would have no softmax
            bounds = [begin + bound for key_span in keys for bound in key_span]
            sees[: len(bounds), span] = torch.tensor(bounds, dtype=torch.int32)[:, None]
            if segment.is_text:
                sees[1, span] = torch.arange(span.start + 1, span.stop + 1, dtype=torch.int32)
    draws = sees.to(device).index_select(1, row.draws_to)

    def mask(seen: Tensor) -> Any:
        begin, end, own_begin, own_end = seen.unbind()

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            before = (key >= begin[query]) & (key < end[query])
            return before | ((key >= own_begin[query]) & (key < own_end[query]))

        return create_block_mask(visible, None, None, seen.shape[1], row.length, device=str(device))

    return mask(sees.to(device)), mask(draws)


# ---- the processor ---------------------------------------------------------------------------------------------------


class QwenImage21MultiResAttnProcessor(QwenImage21AttnProcessor):  # type: ignore[misc]
    """The stock processor, which also takes the row of a batch: a `JointRow` as the attention mask."""

    # diffusers' `set_attention_backend` and parallel hooks write to these names.
    _attention_backend: AttentionBackendName | None = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: QwenImage21Attention,
        hidden_states: Tensor,
        attention_mask: Any = None,
        rotary_emb: Tensor | None = None,
        *stock: Any,
        **stock_options: Any,
    ) -> Tensor:
        if not isinstance(attention_mask, JointRow):
            output: Tensor = super().__call__(attn, hidden_states, attention_mask, rotary_emb, *stock, **stock_options)
            return output
        row, head_dim = attention_mask, attn.inner_dim // attn.heads  # a tensor-parallel rank holds fewer heads

        def heads(x: Tensor, projection: nn.Module) -> Tensor:
            return projection(x).unflatten(-1, (-1, head_dim))  # type: ignore[no-any-return]

        value = heads(hidden_states, attn.to_v)
        key = rotated(attn.norm_k(heads(hidden_states, attn.to_k)).to(value.dtype), rotary_emb)
        if row.only_draws:
            hidden_states = hidden_states.index_select(1, row.draws_to)
            rotary_emb = None if rotary_emb is None else rotary_emb.index_select(0, row.draws_to)
        query = rotated(attn.norm_q(heads(hidden_states, attn.to_q)).to(value.dtype), rotary_emb)

        output = self._attend(query, key, value, row).flatten(2, 3).type_as(query)
        for layer in attn.to_out:  # the projection, then its dropout
            output = layer(output)
        return output

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: JointRow) -> Tensor:
        attend = functools.partial(
            dispatch_attention_fn, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        if row.block_mask is not None:
            return attend(query, key, value, attn_mask=row.block_mask)  # type: ignore[no-any-return]
        chosen = active_backend(self) is not AttentionBackendName.NATIVE  # any other backend was chosen explicitly
        kernel = None if chosen or not flash_takes(query, key, value) else varlen_kernel()
        if kernel is not None:
            return varlen_attention(query, key, value, row, kernel)  # type: ignore[no-any-return]
        return segmented_attention(query, key, value, row, attend)  # type: ignore[no-any-return]


def rotated(x: Tensor, rotary: Tensor | None) -> Tensor:
    return x if rotary is None else apply_rotary_embedding(x, rotary[None])
