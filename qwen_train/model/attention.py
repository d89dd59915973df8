"""Attention over packed rows, and its backends."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.models.devices import to_device
from qwen_train.model.kernels import FLASH, Kernel
from qwen_train.model.segments import Segment, Segments, flash_takes, in_segments

# ---- packed ----------------------------------------------------------------------------------------------------------
# The packed layout: a batch as one row of its valid tokens, and the transformer block that runs on such a row.
#
# Linear layers, norms and modulation see valid tokens only, each sample's tokens are consecutive, and a token is
# modulated by its own sample's noise level. A row is `[1, N, C]`, with N the valid tokens of the whole batch.

Runs = list[tuple[int, int]]
"""The consecutive runs of a row: the number of tokens, and the row i of the embedding that modulates them."""


@dataclass(frozen=True)
class Packing:
    """The positions of a batch's tokens in its two packed rows."""

    image_index: Int[Tensor, " N"]  # valid tokens in the flattened `[B * S]`
    text_index: Int[Tensor, " M"]  # valid tokens in the flattened `[B * L]`
    image_rows: ModulationRows
    text_rows: ModulationRows
    image_lengths: list[int]
    text_lengths: list[int]
    cu_seqlens: Int[Tensor, " bounds"]  # bounds of the samples in the joint row [text 0 | image 0 | text 1 | ...]
    joint_index: Int[Tensor, " N+M"]  # for each token of the joint row its position in [all text | all images]
    joint_places: Int[Tensor, " N+M"]  # the inverse: for each token of [all text | all images] its place in that row
    segments: Segments  # of the joint row; like both indices for compiled blocks, and for another kernel than flash
    kernel: Kernel = FLASH

    @classmethod
    def of(
        cls,
        image_valid: Bool[Tensor, "B S"],
        text_valid: Bool[Tensor, "B L"],
        target_lengths: Sequence[int] | None,
        device: torch.device,
        rows: int | None = None,
        kernel: Kernel = FLASH,
    ) -> Packing:
        """From masks on the CPU, for `rows` of the embedding, by default one for each of the B samples; with
        `target_lengths` (`zero_cond_t`), as many further rows modulate the tokens after the target."""
        image_lengths, text_lengths = image_valid.sum(dim=1).tolist(), text_valid.sum(dim=1).tolist()
        image_runs = [(length, row) for row, length in enumerate(image_lengths)]
        if target_lengths is not None:
            pairs = zip(target_lengths, image_runs, strict=True)
            image_runs = [
                run
                for target, (length, row) in pairs
                for run in ((target, row), (length - target, row + (rows or len(image_lengths))))
                if run[0]
            ]
        lengths = torch.tensor([text_lengths, image_lengths])  # of the pieces of the joint row
        ends = lengths.sum(dim=0).cumsum(0)
        is_text = torch.tensor([True, False]).repeat(len(ends)).repeat_interleave(lengths.t().flatten())
        places = torch.cat([is_text.nonzero()[:, 0], (~is_text).nonzero()[:, 0]])
        bounds = [0, *ends.tolist()]
        segments = [Segment(span, False, (span,)) for span in itertools.pairwise(bounds)]
        return cls(
            image_index=to_device(image_valid.flatten().nonzero()[:, 0], device),
            text_index=to_device(text_valid.flatten().nonzero()[:, 0], device),
            image_rows=ModulationRows.of(image_runs, device),
            text_rows=ModulationRows.of([(length, row) for row, length in enumerate(text_lengths)], device),
            image_lengths=image_lengths,
            text_lengths=text_lengths,
            cu_seqlens=to_device(torch.tensor(bounds, dtype=torch.int32), device),
            joint_index=to_device(places.argsort(), device),
            joint_places=to_device(places, device),
            segments=Segments.of([segments], device, kernel),
            kernel=kernel,
        )

    @property
    def image_runs(self) -> Runs:
        """Each sample's image tokens, with its own row."""
        return [(length, row) for row, length in enumerate(self.image_lengths)]

    @property
    def joint_lengths(self) -> list[int]:
        return [text + image for text, image in zip(self.text_lengths, self.image_lengths, strict=True)]


def gather(x: Tensor, index: Int[Tensor, " N"]) -> Tensor:
    """The tokens at `index` of the padded `[B, S, C]`, as `[1, N, C]`."""
    return x.flatten(0, 1).index_select(0, index)[None]


def scatter(
    row: Float[Tensor, "1 N C"], index: Int[Tensor, " N"], batch_size: int, length: int
) -> Float[Tensor, "B S C"]:
    """The inverse of `gather`, with zeros for padding."""
    rows = row.new_zeros(batch_size * length, row.shape[-1]).index_copy(0, index, row[0])
    return rows.reshape(batch_size, length, -1)


# ---- modulation by rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModulationRows:
    """The row of the modulation that each token of a packed row takes."""

    runs: Runs
    index: Int[Tensor, " N"]

    @classmethod
    def of(cls, runs: Runs, device: torch.device) -> ModulationRows:
        """`runs` made on the CPU; the index goes to the device."""
        lengths, rows = (torch.tensor(numbers) for numbers in zip(*runs, strict=True))
        return cls(runs, to_device(rows.repeat_interleave(lengths), device))


def scaled(
    x: Float[Tensor, "1 N D"], factor: Float[Tensor, "R D"], offset: Float[Tensor, "R D"] | None, rows: ModulationRows
) -> Float[Tensor, "1 N D"]:
    """`x * factor + offset`, each token with its own row."""
    if torch.compiler.is_compiling() and not any(r is not None and r.requires_grad for r in (factor, offset)):
        x = x * factor.index_select(0, rows.index)  # read from a small table, in the kernel of the product
        return x if offset is None else x + offset.index_select(0, rows.index)
    if torch.compiler.is_compiling() or len(rows.runs) > 1:  # each number of runs would be another graph
        result: Tensor = _ScaledByRow.apply(x, factor, offset, rows.index)  # type: ignore[no-untyped-call]
        return result
    ((_, row),) = rows.runs
    return x * factor[row] if offset is None else x * factor[row] + offset[row]


class _ScaledByRow(torch.autograd.Function):
    """`x * factor[index] + offset[index]`, without keeping the rows of all tokens for the backward pass.

    The gradient of a row is the sum over its tokens, by a matrix product, which sums in float32. Autograd's own for an
    index would sum in the dtype of the rows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, offset: Tensor | None, index: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factor, index)
        result = x * factor.index_select(0, index)
        return result if offset is None else result.add_(offset.index_select(0, index))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        (gradient,), (x, factor, index) = gradients, ctx.saved_tensors
        of_x = gradient * factor.index_select(0, index)
        if not any(ctx.needs_input_grad[1:]):  # a frozen modulation
            return of_x, None, None, None
        of_rows = (index == torch.arange(len(factor), device=index.device)[:, None]).to(gradient.dtype)
        of_factor = of_rows @ (gradient * x)[0] if ctx.needs_input_grad[1] else None
        of_offset = of_rows @ gradient[0] if ctx.needs_input_grad[2] else None
        return of_x, of_factor, of_offset, None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_out(module: Any, x: Float[Tensor, "1 N D"], temb: Float[Tensor, "B E"], runs: Runs) -> Float[Tensor, "1 N D"]:
    """The final modulated norm, run by run."""
    pieces = zip(torch.split(x, [length for length, _ in runs], dim=1), runs, strict=True)
    return torch.cat([module(piece, temb[i : i + 1]) for piece, (_, i) in pieces], dim=1)


# ---- the block -------------------------------------------------------------------------------------------------------


class QwenImageMultiResTransformerBlock(QwenImageTransformerBlock):  # type: ignore[misc]
    """The stock block, which also accepts packed rows if `joint_attention_kwargs` has their `packing`."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
        modulate_index: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        packing = (joint_attention_kwargs or {}).get("packing")
        if packing is None:
            return super().forward(  # type: ignore[no-any-return]
                hidden_states,
                encoder_hidden_states,
                encoder_hidden_states_mask,
                temb,
                image_rotary_emb,
                joint_attention_kwargs,
                modulate_index,
            )
        image, text = hidden_states, encoder_hidden_states
        image_rows, text_rows = packing.image_rows, packing.text_rows
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(temb).chunk(6, dim=-1)
        txt_mod = self.txt_mod(temb.chunk(2)[0] if self.zero_cond_t else temb)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = txt_mod.chunk(6, dim=-1)

        img_modulated = scaled(self.img_norm1(image), 1 + img_scale1, img_shift1, image_rows)
        txt_modulated = scaled(self.txt_norm1(text), 1 + txt_scale1, txt_shift1, text_rows)
        img_update, txt_update = self.attn(
            hidden_states=img_modulated,
            encoder_hidden_states=txt_modulated,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = image + scaled(img_update, img_gate1, None, image_rows)
        text = text + scaled(txt_update, txt_gate1, None, text_rows)

        img_modulated = scaled(self.img_norm2(image), 1 + img_scale2, img_shift2, image_rows)
        txt_modulated = scaled(self.txt_norm2(text), 1 + txt_scale2, txt_shift2, text_rows)
        image = image + scaled(self.img_mlp(img_modulated), img_gate2, None, image_rows)
        text = text + scaled(self.txt_mlp(txt_modulated), txt_gate2, None, text_rows)
        if image.dtype == torch.float16:  # as the stock block does
            image, text = image.clip(-65504, 65504), text.clip(-65504, 65504)
        return text, image


# ---- joint attention -------------------------------------------------------------------------------------------------
# Joint attention over text and image, each sample within itself: padded rows with a mask, or packed rows without one.
#
# Projections, norms and rotation are the stock model's, with one RoPE table per sample. Attention backends that misread
# a mask are refused. Packed rows take one call per sample without a mask, which allows flash kernels; on CUDA in half
# precision they take one call of torch's variable-length kernel, unless another backend is chosen.

# In a row with n valid keys these keep the first n, which is wrong when padding is between text and image.
BACKENDS_THAT_MISREAD_MASKS = frozenset(
    {AttentionBackendName.FLASH_VARLEN, AttentionBackendName._FLASH_VARLEN_3, AttentionBackendName.SAGE_VARLEN}
)
QueryKeyValue = Sequence[Float[Tensor, "B _ heads dim"]]


def active_backend(processor: QwenMultiResAttnProcessor) -> AttentionBackendName:
    """The backend chosen by `set_attention_backend`, else diffusers' active one."""
    return AttentionBackendName(processor._attention_backend or _AttentionBackendRegistry.get_active_backend()[0])


def refuse_backend_for_mask(backend: AttentionBackendName) -> None:
    """Raise TrainError for a backend that misreads a mask over padding between text and image."""
    if backend in BACKENDS_THAT_MISREAD_MASKS:
        raise TrainError(
            "this attention backend misreads padding between text and image",
            where="attention backend",
            expected="one that takes a mask, such as native",
            found=backend.value,
            do='call set_attention_backend("native"), set the layout to "packed", or make batches of one size',
        )


def in_heads(x: Tensor, projection: nn.Module, head_dim: int, norm: nn.Module | None = None) -> Tensor:
    """The projection `[B, N, heads, head_dim]`, with its norm."""
    x = projection(x).unflatten(-1, (-1, head_dim))
    return x if norm is None else norm(x).to(x.dtype)  # trained norms have float32 weights


def apply_rotary_embedding(
    x: Float[Tensor, "B N heads dim"], rotary: Float[Tensor, "B N dim//2 2"]
) -> Float[Tensor, "B N heads dim"]:
    """Rotate `x` in float32, like the stock model, whose function takes only one table for the whole batch.

    `rotary` are the cosine and the sine for each pair of channels. torch's compiler has no code for complex numbers.
    """
    pairs, rotary = x.float().reshape(*x.shape[:-1], -1, 2), rotary[:, :, None]
    if torch.compiler.is_compiling():
        (real, imaginary), (cosine, sine) = pairs.unbind(-1), rotary.unbind(-1)
        turned = torch.stack([real * cosine - imaginary * sine, real * sine + imaginary * cosine], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rotary))
    return turned.flatten(-2).type_as(x)


# ---- padded ----------------------------------------------------------------------------------------------------------


def padded_attention(
    text: QueryKeyValue, image: QueryKeyValue, attention_mask: Tensor | None, attend: Callable[..., Tensor]
) -> tuple[Tensor, Tensor]:
    """Text and image of each row attend to each other, under the mask over their keys."""
    joint = attend(*(torch.cat(pair, dim=1) for pair in zip(text, image, strict=True)), attn_mask=attention_mask)
    text_length = text[0].shape[1]
    return joint[:, :text_length], joint[:, text_length:]


# ---- packed ----------------------------------------------------------------------------------------------------------


@torch.compiler.disable  # type: ignore[untyped-decorator]
def packed_attention(
    text: QueryKeyValue, image: QueryKeyValue, packing: Packing, attend: Callable[..., Tensor], use_varlen: bool
) -> tuple[Tensor, Tensor]:
    """Text and image of each sample attend to each other and to nothing else."""
    query, key, value = (joint_row(*pair, packing) for pair in zip(text, image, strict=True))
    on_flash = use_varlen and flash_takes(query, key, value)
    if on_flash and packing.kernel != FLASH:
        samples = torch.split(in_segments(query, key, value, packing.segments), packing.joint_lengths, dim=1)
    elif on_flash and (kernel := varlen_kernel()):
        longest, bounds = max(packing.joint_lengths), packing.cu_seqlens.to(query.device)
        row = kernel(query[0], key[0], value[0], bounds, bounds, longest, longest)[None]
        samples = torch.split(row, packing.joint_lengths, dim=1)
    else:
        rows = (torch.split(row, packing.joint_lengths, dim=1) for row in (query, key, value))
        samples = tuple(attend(*sample) for sample in zip(*rows, strict=True))
    text_pieces = [sample[:, :length] for sample, length in zip(samples, packing.text_lengths, strict=True)]
    image_pieces = [sample[:, length:] for sample, length in zip(samples, packing.text_lengths, strict=True)]
    return torch.cat(text_pieces, dim=1), torch.cat(image_pieces, dim=1)


def joint_row(text: Tensor, image: Tensor, packing: Packing) -> Tensor:
    """Interleave two packed rows: `[text 0 | image 0 | text 1 | image 1 | ...]`."""
    texts, images = torch.split(text, packing.text_lengths, dim=1), torch.split(image, packing.image_lengths, dim=1)
    return torch.cat([piece for sample in zip(texts, images, strict=True) for piece in sample], dim=1)


def compiled_attention(text: QueryKeyValue, image: QueryKeyValue, packing: Packing) -> tuple[Tensor, Tensor]:
    """`packed_attention` of a compiled block: gathers in place of splits, and one operation."""
    order = packing.joint_index, packing.joint_places
    query, key, value = (_permuted(torch.cat(pair, dim=1), *order) for pair in zip(text, image, strict=True))
    joint = _permuted(in_segments(query, key, value, packing.segments), *reversed(order))
    text_length = text[0].shape[1]
    return joint[:, :text_length], joint[:, text_length:]


def _permuted(x: Tensor, index: Int[Tensor, " N"], inverse: Int[Tensor, " N"]) -> Tensor:
    """The tokens of `[1, N, heads, dim]` at `index`, all of them once; `inverse` leads back."""
    result: Tensor = _Permuted.apply(x, index, inverse)  # type: ignore[no-untyped-call]
    return result


class _Permuted(torch.autograd.Function):
    """`x[:, index]`, whose gradient is read in the inverse order.

    Autograd's own is added into zeros: by atomic operations, or in bfloat16 before Hopper by a sort.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(1, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0].index_select(1, *ctx.saved_tensors), None, None


@functools.cache
def varlen_kernel() -> Callable[..., Tensor] | None:
    """torch's variable-length attention, None if this torch lacks it; imported late, since it imports the compiler."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn  # type: ignore[return-value]


# ---- the processor ---------------------------------------------------------------------------------------------------


class QwenMultiResAttnProcessor:
    """Joint attention with one RoPE table per row: `image_rotary_emb` is `[B, S, dim/2, 2]` for the image and
    `[B, L, dim/2, 2]` for the text, the cosine and the sine of each pair of channels.

    Padded rows need a mask `[B, 1, 1, L + S]` over the keys of [text | image]; packed rows need their packing.
    """

    # diffusers' `set_attention_backend` and parallel hooks write to these names.
    _attention_backend: AttentionBackendName | None = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor]:
        if image_rotary_emb is None or encoder_hidden_states_mask is not None:
            raise ModelError(
                "this attention processor works only inside QwenImageMultiResTransformer2DModel",
                expected="`image_rotary_emb` per sample, and one `attention_mask` over [text | image]",
            )
        head_dim = attn.inner_dim // attn.heads  # a tensor-parallel rank holds fewer heads, of the same size
        image, text = hidden_states, encoder_hidden_states
        image_freqs, text_freqs = image_rotary_emb
        image_query = apply_rotary_embedding(in_heads(image, attn.to_q, head_dim, attn.norm_q), image_freqs)
        image_key = apply_rotary_embedding(in_heads(image, attn.to_k, head_dim, attn.norm_k), image_freqs)
        text_query = apply_rotary_embedding(in_heads(text, attn.add_q_proj, head_dim, attn.norm_added_q), text_freqs)
        text_key = apply_rotary_embedding(in_heads(text, attn.add_k_proj, head_dim, attn.norm_added_k), text_freqs)
        text_qkv = (text_query, text_key, in_heads(text, attn.add_v_proj, head_dim))
        image_qkv = (image_query, image_key, in_heads(image, attn.to_v, head_dim))

        attend = functools.partial(
            dispatch_attention_fn, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        if packing is None:
            text_output, image_output = padded_attention(text_qkv, image_qkv, attention_mask, attend)
        elif torch.compiler.is_compiling() and self._attention_backend is None:
            text_output, image_output = compiled_attention(text_qkv, image_qkv, packing)
        else:
            use_varlen = active_backend(self) is AttentionBackendName.NATIVE  # any other backend was chosen explicitly
            text_output, image_output = packed_attention(text_qkv, image_qkv, packing, attend, use_varlen)

        text_output = attn.to_add_out(text_output.flatten(2, 3).to(image_query.dtype).contiguous())
        image_output = image_output.flatten(2, 3).to(image_query.dtype).contiguous()
        for layer in attn.to_out:  # the projection, then its dropout
            image_output = layer(image_output)
        return image_output, text_output
