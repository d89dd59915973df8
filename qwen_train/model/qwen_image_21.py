"""The stock transformer of Qwen-Image-2.1 on batches of mixed sizes, exactly, and on several noise draws at once.

Every sample of a batch gets the outputs and gradients that it would get alone in the stock model, whatever the other
samples and the padding contain. K noise draws of a target stand behind one prefix of text and condition images, which
does not depend on the timestep: they give the outputs and gradients of K passes. With `img_mask` a call is a stock
call, so that a model in training also generates. Refused: checkpoints whose prefix depends on the timestep
(`causal_condition` false), a batch that contradicts its shapes or positions, positions beyond the RoPE table.

>>> model = QwenImage21MultiResTransformer2DModel(  # or .from_pretrained(folder, subfolder="transformer")
...     num_layers=1, num_attention_heads=2, attention_head_dim=32, context_in_dim=48, axes_dims_rope=(4, 14, 14)
... )
>>> img_shapes = [[(1, 4, 6)], [(1, 2, 3), (1, 3, 4)]]  # a target, and a condition image with a target
>>> image_positions = [[], [4]]  # that image is after 4 text rows
>>> image, text = torch.randn(2, 48, 64), torch.randn(2, 7, 48)  # two draws: 2 * 24 and 6 + 2 * 12 tokens
>>> text_mask = torch.arange(7) < torch.tensor([[7], [5]])
>>> sigma = torch.tensor([[0.3, 0.9], [0.1, 0.4]])  # a timestep per draw
>>> batch = (image, text, text_mask, sigma, img_shapes, image_positions)
>>> velocity = model(*batch, return_dict=False)[0]
>>> velocity.shape, velocity[1, :6].any().item(), velocity[1, 30:].any().item()
(torch.Size([2, 48, 64]), False, False)
>>> model.layout = "packed"
>>> torch.allclose(model(*batch, return_dict=False)[0], velocity, atol=1e-5)
True
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage21 import (
    QwenImage21Attention,
    QwenImage21AttnProcessor,
    QwenImage21KVCache,
    QwenImage21Transformer2DModel,
    QwenImage21TransformerBlock,
)
from diffusers.utils import apply_lora_scale
from jaxtyping import Float
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.format.sample import ImgShapes
from qwen_cache.models.devices import to_device
from qwen_cache.models.family import QWEN_IMAGE_21
from qwen_train.model.attention import (
    BACKENDS_THAT_MISREAD_MASKS,
    active_backend,
    apply_rotary_embedding,
    gather,
    in_heads,
    norm_out,
    scaled,
    scatter,
    varlen_kernel,
)
from qwen_train.model.joint_row import (
    JointRow,
    JointSample,
    interleaved,
    offsets,
    positions_per_sample,
    refuse_other_tokens,
)
from qwen_train.model.kernels import FLASH
from qwen_train.model.mixed_sizes import MixedSizes, image_shapes_per_sample, refuse_other_batch_size, text_validity
from qwen_train.model.segments import Segment, flash_takes, in_segments

# ---- attention -------------------------------------------------------------------------------------------------------
# Block-causal attention over the row of `joint_row`, for several samples and noise draws at once.
#
# No mask of all tokens by all tokens is made, unless by choice. By default each segment is one call of the active
# backend, on slices of its sample. On CUDA in half precision torch's variable-length kernel takes all first texts in
# one call, all draws in another, and each segment between them on its slice: it needs no compilation, and no new one
# for another mixture of sizes. `set_attention_backend("flex")` calls flex_attention, with a block mask made once per
# forward pass and a second one for the last block's draws. It skips empty blocks only when the model is compiled;
# uncompiled it fills a matrix of all scores, so it is not the default. Backends that misread the mask of text after an
# image are refused.

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

        value = in_heads(hidden_states, attn.to_v, head_dim)
        key = rotated(in_heads(hidden_states, attn.to_k, head_dim, attn.norm_k), rotary_emb)
        if row.only_draws:
            hidden_states = hidden_states.index_select(1, row.draws_to)
            rotary_emb = None if rotary_emb is None else rotary_emb.index_select(0, row.draws_to)
        query = rotated(in_heads(hidden_states, attn.to_q, head_dim, attn.norm_q), rotary_emb)

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
        if torch.compiler.is_compiling() and self._attention_backend is None and row.attention is not None:
            return in_segments(query, key, value, row.attention)
        chosen = active_backend(self) is not AttentionBackendName.NATIVE  # any other backend was chosen explicitly
        on_flash = not chosen and flash_takes(query, key, value)
        if on_flash and row.kernel != FLASH and row.attention is not None:
            return in_segments(query, key, value, row.attention)
        if on_flash and (kernel := varlen_kernel()):
            return varlen_attention(query, key, value, row, kernel)  # type: ignore[no-any-return]
        return segmented_attention(query, key, value, row, attend)  # type: ignore[no-any-return]


def rotated(x: Tensor, rotary: Tensor | None) -> Tensor:
    return x if rotary is None else apply_rotary_embedding(x, rotary[None])


# ---- transformer -----------------------------------------------------------------------------------------------------

ROPE_POSITIONS = QWEN_IMAGE_21.rope_positions
"""The rows of the stock table for positions from 0; behind them are the negative ones, which it would read silently."""
LONGEST_SIDE = 2 * 1024
"""Tokens of an image's side, whose positions are centred on zero: the table has 1024 negative ones."""


# ---- the inputs of the blocks ----------------------------------------------------------------------------------------


def refuse_far_positions(samples: Sequence[ImgShapes], text_lengths: Sequence[int]) -> None:
    """Raise TrainError if an image's side, or a target's position, the last of its sample, is beyond the RoPE table."""
    for images, text in zip(samples, text_lengths, strict=True):
        if (side := max(max(height, width) for _, height, width in images)) > LONGEST_SIDE:
            raise TrainError(
                "an image is larger than the RoPE table",
                where="img_shapes",
                expected=f"sides of at most {LONGEST_SIDE} tokens",
                found=side,
                do="build the cache at a smaller data.vae_image_size",
            )
        before = sum(max(height, width) for _, height, width in images[:-1])
        if text + before >= ROPE_POSITIONS:
            raise TrainError(
                f"the text is longer than the RoPE table beside condition images of {list(images[:-1])}",
                where="encoder_hidden_states",
                expected=f"at most {max(0, ROPE_POSITIONS - 1 - before)} text rows",
                found=f"{text}",
                do="shorten the text or the images",
            )


def rotary_embedding(pos_embed: nn.Module, images: ImgShapes, sample: JointSample) -> Float[Tensor, "N half 2"]:
    """RoPE of a sample's part of the row: stock's for it alone, the target's for every draw, zero for padding.

    On the CPU: stock's table takes several copies to a device, and waits for each.
    """
    runs = (*sample.prefix, (sample.target, False))
    is_image = torch.cat([torch.full((length,), not is_text) for length, is_text in runs])
    device = torch.device("meta" if pos_embed.freqs[0].is_meta else "cpu")  # type: ignore[index]
    alone = torch.view_as_real(pos_embed(list(images), is_image, device=device))
    prefix, target = alone[: sample.prefix_length], alone[sample.prefix_length :]
    return F.pad(torch.cat([prefix, target.repeat(sample.draws, 1, 1)]), (0, 0, 0, 0, 0, sample.padding))


# ---- the model -------------------------------------------------------------------------------------------------------


class QwenImage21MultiResTransformerBlock(QwenImage21TransformerBlock):  # type: ignore[misc]
    """The stock block, which also takes the row of a batch: a `JointRow` as the attention mask."""

    def forward(
        self,
        hidden_states: Tensor,
        modulation: Tensor,
        rotary_emb: Tensor | None = None,
        attention_mask: Any = None,
        *stock: Any,
        **stock_options: Any,
    ) -> Tensor:
        if not isinstance(attention_mask, JointRow):
            output: Tensor = super().forward(
                hidden_states, modulation, rotary_emb, attention_mask, *stock, **stock_options
            )
            return output
        row, x = attention_mask, hidden_states
        scale1, gate1, scale2, gate2 = modulation.chunk(4, dim=-1)
        modulated = scaled(self.img_norm1(x), 1 + scale1, None, row.rows)
        update = self.attn(hidden_states=modulated, attention_mask=row, rotary_emb=rotary_emb)
        rows = row.rows
        if row.only_draws:
            x, rows = x.index_select(1, row.draws_to), row.draw_rows
        x = x + scaled(update, gate1.tanh(), None, rows)
        modulated = scaled(self.img_norm2(x), 1 + scale2, None, rows)
        x = x + scaled(self.img_mlp(modulated), gate2.tanh(), None, rows)
        result: Tensor = x.clip(-65504, 65504) if x.dtype == torch.float16 else x  # as the stock block does
        return result


class QwenImage21MultiResTransformer2DModel(MixedSizes, QwenImage21Transformer2DModel):  # type: ignore[misc]
    """`QwenImage21Transformer2DModel` for batches of mixed sizes: same parameters, same checkpoints.

    Raises ModelError for a checkpoint with `causal_condition` false, whose prefix depends on the timestep.
    """

    # The modules that device maps keep whole, FSDP wraps, and `compile_repeated_blocks` compiles.
    _no_split_modules: ClassVar = [QwenImage21MultiResTransformerBlock.__name__]
    _repeated_blocks: ClassVar = [QwenImage21MultiResTransformerBlock.__name__]
    _stock_class = QwenImage21Transformer2DModel
    _block_class = QwenImage21MultiResTransformerBlock
    _processor_class = QwenImage21MultiResAttnProcessor
    ROW_ARGUMENTS: ClassVar = 1
    UNREACHED: ClassVar = ()

    # diffusers reads the expected keys of config.json from this signature.
    @functools.wraps(QwenImage21Transformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adopt_blocks()

    @classmethod
    def _refuse_checkpoint(cls, config: Any) -> None:
        if not config.causal_condition:
            raise ModelError(
                "the prefix of this checkpoint depends on the timestep, so noise draws cannot share it",
                where="config.json",
                expected="causal_condition true",
                found="false",
                do="load a Qwen-Image-2.1 transformer",
            )

    @apply_lora_scale("attention_kwargs")  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        img_shapes: Sequence[Any] | None = None,
        image_positions: Sequence[Sequence[int]] | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
        *,
        img_mask: Tensor | None = None,
        kv_cache: QwenImage21KVCache | None = None,
        kv_cache_mode: str | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the velocity of every token of the draws; zero for condition images and padding.

        Args:
            hidden_states: `[B, S, in_channels]`: the condition images in order, then the target's K noise draws one
                after another, then padding.
            encoder_hidden_states: `[B, L, context_in_dim]`: the text rows without the rows at image slots, then
                padding.
            encoder_hidden_states_mask: `[B, L]`, true for text; None if all is text. A mask on the CPU is faster.
            timestep: `[B]`, or `[B, K]` for K noise draws: the noise level sigma in 0..1.
            img_shapes: `[(1, h, w), ...]` in tokens for the whole batch, or one such list per sample: each condition
                image, then the target.
            image_positions: per sample, for each condition image the number of text rows before it; None if there
                are no condition images.
            attention_kwargs: `scale` sets the strength of LoRA layers.
            return_dict: False returns a tuple with the tensor.
            img_mask: with it this is a call of the stock model, with that model's arguments and results.
            kv_cache: of a stock call, and `kv_cache_mode` too.

        Returns:
            The velocity `noise - x_0` as `sample`, of shape `[B, S, out_channels]`.

        Raises:
            TrainError: arguments that contradict each other or are missing; positions beyond the RoPE table; an
                attention backend that misreads the mask of text.
        """
        if timestep is None or img_shapes is None:
            raise TrainError("forward needs timestep and img_shapes", found="None")
        if img_mask is not None:
            return super().forward(
                hidden_states,
                encoder_hidden_states,
                timestep,
                img_shapes,
                img_mask,
                encoder_hidden_states_mask=encoder_hidden_states_mask,
                attention_kwargs=attention_kwargs,
                kv_cache=kv_cache,
                kv_cache_mode=kv_cache_mode,
                return_dict=return_dict,
            )
        refuse_without_img_mask(kv_cache=kv_cache, kv_cache_mode=kv_cache_mode)
        row, rotary = self._read_batch(
            hidden_states, encoder_hidden_states, encoder_hidden_states_mask, timestep, img_shapes, image_positions
        )
        sample = self._velocity(hidden_states, encoder_hidden_states, timestep, row, rotary)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _velocity(
        self, hidden_states: Tensor, encoder_hidden_states: Tensor, timestep: Tensor, row: JointRow, rotary: Tensor
    ) -> Float[Tensor, "B S out"]:
        """The stock model's modules on the row; the last block, norm and projection on the draws alone."""
        image, text = gather(hidden_states, row.image_from), gather(encoder_hidden_states, row.text_from)
        image, text = self.img_in(image), self.txt_in(text)
        x = image.new_zeros(1, row.length, image.shape[-1])
        x = x.index_copy(1, row.text_to, text.to(x.dtype)).index_copy(1, row.image_to, image)
        (x,) = self._inputs_of_blocks(x)

        timestep = timestep.flatten().to(x.dtype)
        temb = self.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), x)
        modulation = self.modulation(temb)

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        last = replace(row, only_draws=True, block_mask=row.draws_block_mask, attention=row.draws_attention)
        for block in self.transformer_blocks:
            run = functools.partial(self._gradient_checkpointing_func, block) if checkpointing else block
            x = run(x, modulation, rotary, last if block is self.transformer_blocks[-1] else row)

        velocity = self.proj_out(norm_out(self.norm_out, x, temb, row.draw_rows.runs))
        return scatter(velocity, row.draws_from, *hidden_states.shape[:2])

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read_batch(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        timestep: Tensor,
        img_shapes: Sequence[Any],
        image_positions: Sequence[Sequence[int]] | None,
    ) -> tuple[JointRow, Float[Tensor, "M half 2"]]:
        """Check the batch against its shapes and masks; its row, and the RoPE of every token."""
        (batch_size, image_length), device = hidden_states.shape[:2], hidden_states.device
        draws = draws_of(timestep)
        refuse_other_batch_size(batch_size, encoder_hidden_states=encoder_hidden_states, timestep=timestep)
        images = image_shapes_per_sample(img_shapes, batch_size)
        refuse_other_tokens(images, draws, image_length)
        text_valid = text_validity(encoder_hidden_states_mask, batch_size, encoder_hidden_states.shape[1])
        texts: list[int] = text_valid.sum(dim=1).tolist()
        positions = positions_per_sample(image_positions, images, texts)
        refuse_far_positions(images, texts)

        prefixes = [interleaved(*sample) for sample in zip(images, positions, texts, strict=True)]
        targets = [math.prod(sample[-1]) for sample in images]
        padded = self.layout == "padded"
        kernel = self.attention_kernel
        row = JointRow.of(prefixes, targets, draws, text_valid, image_length, device, padded=padded, kernel=kernel)
        backend = active_backend(self.transformer_blocks[0].attn.processor)
        refuse_backend_for_text(backend, row)
        if backend is AttentionBackendName.FLEX:
            whole, of_draws = block_masks(row, device)
            row = replace(row, block_mask=whole, draws_block_mask=of_draws)
        pairs = zip(images, row.samples, strict=True)
        return row, to_device(torch.cat([rotary_embedding(self.pos_embed, *pair) for pair in pairs]), device)


def refuse_without_img_mask(**stock_arguments: object) -> None:
    """Raise TrainError for arguments that only a stock call takes."""
    for name, value in stock_arguments.items():
        if value is not None:
            raise TrainError(
                f"{name} is for calls with img_mask", where="forward", expected="None", found=type(value).__name__
            )


def draws_of(timestep: Tensor) -> int:
    """The noise draws of each sample: the columns of `timestep`, one if it has none."""
    if timestep.ndim not in (1, 2) or not timestep.numel():
        raise TrainError(
            "the timesteps cannot be read",
            where="timestep",
            expected="[B], or [B, K] for K noise draws",
            found=f"shape {tuple(timestep.shape)}",
        )
    return 1 if timestep.ndim == 1 else timestep.shape[1]
