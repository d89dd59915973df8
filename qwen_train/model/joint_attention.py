"""Joint attention over text and image, each sample within itself: padded rows with a mask, or packed rows without one.

Projections, norms and rotation are the stock model's, with one RoPE table per sample. Attention backends that misread a
mask are refused. Packed rows take one call per sample without a mask, which allows flash kernels; on CUDA in half
precision they take one call of torch's variable-length kernel, unless another backend is chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from jaxtyping import Float
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError
from qwen_train.model.packed import Packing

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
    kernel = varlen_kernel() if use_varlen and flash_takes(query, key, value) else None
    if kernel is not None:
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


def flash_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether flash attention can run: half precision, head size a multiple of 8 and at most 256, and the device."""
    head_dim = query.shape[-1]
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and head_dim % 8 == 0
        and head_dim <= 256
        and runs_flash(query.device)
    )


@functools.cache
def runs_flash(device: torch.device) -> bool:
    """Whether torch brings flash attention for this device: CUDA on Ampere or newer."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


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

        def heads(x: Tensor, projection: nn.Module, norm: nn.Module | None = None) -> Tensor:
            x = projection(x).unflatten(-1, (-1, head_dim))
            return x if norm is None else norm(x).to(x.dtype)  # trained norms have float32 weights

        image, text = hidden_states, encoder_hidden_states
        image_freqs, text_freqs = image_rotary_emb
        image_query = apply_rotary_embedding(heads(image, attn.to_q, attn.norm_q), image_freqs)
        image_key = apply_rotary_embedding(heads(image, attn.to_k, attn.norm_k), image_freqs)
        text_query = apply_rotary_embedding(heads(text, attn.add_q_proj, attn.norm_added_q), text_freqs)
        text_key = apply_rotary_embedding(heads(text, attn.add_k_proj, attn.norm_added_k), text_freqs)
        text_qkv = (text_query, text_key, heads(text, attn.add_v_proj))
        image_qkv = (image_query, image_key, heads(image, attn.to_v))

        attend = functools.partial(
            dispatch_attention_fn, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        if packing is None:
            text_output, image_output = padded_attention(text_qkv, image_qkv, attention_mask, attend)
        else:
            use_varlen = active_backend(self) is AttentionBackendName.NATIVE  # any other backend was chosen explicitly
            text_output, image_output = packed_attention(text_qkv, image_qkv, packing, attend, use_varlen)

        text_output = attn.to_add_out(text_output.flatten(2, 3).to(image_query.dtype).contiguous())
        image_output = image_output.flatten(2, 3).to(image_query.dtype).contiguous()
        for layer in attn.to_out:  # the projection, then its dropout
            image_output = layer(image_output)
        return image_output, text_output
