"""The packed layout: a batch as one row of its valid tokens, and the transformer block that runs on such a row.

Linear layers, norms and modulation see valid tokens only, each sample's tokens are consecutive, and a token is
modulated by its own sample's noise level. A row is `[1, N, C]`, with N the valid tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from jaxtyping import Bool, Float, Int
from torch import Tensor

from qwen_cache.models.devices import to_device

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

    @classmethod
    def of(
        cls,
        image_valid: Bool[Tensor, "B S"],
        text_valid: Bool[Tensor, "B L"],
        target_lengths: Sequence[int] | None,
        device: torch.device,
    ) -> Packing:
        """From masks on the CPU; with `target_lengths` (`zero_cond_t`), rows B.. modulate tokens after the target."""
        image_lengths, text_lengths = image_valid.sum(dim=1).tolist(), text_valid.sum(dim=1).tolist()
        image_runs = [(length, row) for row, length in enumerate(image_lengths)]
        if target_lengths is not None:
            pairs = zip(target_lengths, image_runs, strict=True)
            image_runs = [
                run
                for target, (length, row) in pairs
                for run in ((target, row), (length - target, row + len(image_lengths)))
                if run[0]
            ]
        joint_lengths = torch.tensor([0, *(n + m for n, m in zip(image_lengths, text_lengths, strict=True))])
        return cls(
            image_index=to_device(image_valid.flatten().nonzero()[:, 0], device),
            text_index=to_device(text_valid.flatten().nonzero()[:, 0], device),
            image_rows=ModulationRows.of(image_runs, device),
            text_rows=ModulationRows.of([(length, row) for row, length in enumerate(text_lengths)], device),
            image_lengths=image_lengths,
            text_lengths=text_lengths,
            cu_seqlens=to_device(joint_lengths.cumsum(0).int(), device),
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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def scaled(
    x: Float[Tensor, "1 N D"], factor: Float[Tensor, "R D"], offset: Float[Tensor, "R D"] | None, rows: ModulationRows
) -> Float[Tensor, "1 N D"]:
    """`x * factor + offset`, each token with its own row. Not compiled: each number of runs would be another graph."""
    if len(rows.runs) > 1:
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
        txt_mod = self.txt_mod(temb[: len(text_rows.runs)])
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
