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

Runs = list[tuple[int, int]]
"""The consecutive runs of a row: the number of tokens, and the row i of the embedding that modulates them."""


@dataclass(frozen=True)
class Packing:
    """The positions of a batch's tokens in its two packed rows."""

    image_index: Int[Tensor, " N"]  # valid tokens in the flattened `[B * S]`
    text_index: Int[Tensor, " M"]  # valid tokens in the flattened `[B * L]`
    image_runs: Runs
    text_runs: Runs
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
            image_index=image_valid.flatten().nonzero()[:, 0].to(device),
            text_index=text_valid.flatten().nonzero()[:, 0].to(device),
            image_runs=image_runs,
            text_runs=[(length, row) for row, length in enumerate(text_lengths)],
            image_lengths=image_lengths,
            text_lengths=text_lengths,
            cu_seqlens=joint_lengths.cumsum(0).to(device, torch.int32),
        )

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


# Modulation is applied run by run, not as one row per token: autograd would keep those rows for the backward pass and
# sum their gradients in the precision of the weights. Every mixture of lengths is another graph to torch.compile, so
# these functions are not compiled, only the code between them.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def modulate(
    block: Any, x: Float[Tensor, "1 N D"], mod_params: Float[Tensor, "R E"], runs: Runs
) -> tuple[Float[Tensor, "1 N D"], list[Tensor]]:
    """`x` as `block._modulate` scales it (and shifts it, for Qwen-Image), and the gate of each run."""
    pieces = torch.split(x, [length for length, _ in runs], dim=1)
    results = [block._modulate(piece, mod_params[i : i + 1]) for piece, (_, i) in zip(pieces, runs, strict=True)]
    return torch.cat([modulated for modulated, _ in results], dim=1), [gate for _, gate in results]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def add_gated(
    x: Float[Tensor, "1 N D"], gates: Sequence[Tensor], update: Float[Tensor, "1 N D"], runs: Runs
) -> Float[Tensor, "1 N D"]:
    """`x + gate * update`, each run with its own gate."""
    lengths = [length for length, _ in runs]
    pieces = zip(torch.split(x, lengths, dim=1), gates, torch.split(update, lengths, dim=1), strict=True)
    return torch.cat([piece + gate * change for piece, gate, change in pieces], dim=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_out(
    module: Any, x: Float[Tensor, "1 N D"], temb: Float[Tensor, "B E"], lengths: Sequence[int]
) -> Float[Tensor, "1 N D"]:
    """The final modulated norm, sample by sample."""
    samples = zip(torch.split(x, list(lengths), dim=1), temb[:, None], strict=True)
    return torch.cat([module(sample, embedding) for sample, embedding in samples], dim=1)


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
        image_runs, text_runs = packing.image_runs, packing.text_runs
        img_mod1, img_mod2 = self.img_mod(temb).chunk(2, dim=-1)
        txt_mod1, txt_mod2 = self.txt_mod(temb[: len(text_runs)]).chunk(2, dim=-1)

        img_modulated, img_gates = modulate(self, self.img_norm1(image), img_mod1, image_runs)
        txt_modulated, txt_gates = modulate(self, self.txt_norm1(text), txt_mod1, text_runs)
        img_update, txt_update = self.attn(
            hidden_states=img_modulated,
            encoder_hidden_states=txt_modulated,
            image_rotary_emb=image_rotary_emb,
            **(joint_attention_kwargs or {}),
        )
        image = add_gated(image, img_gates, img_update, image_runs)
        text = add_gated(text, txt_gates, txt_update, text_runs)

        img_modulated, img_gates = modulate(self, self.img_norm2(image), img_mod2, image_runs)
        txt_modulated, txt_gates = modulate(self, self.txt_norm2(text), txt_mod2, text_runs)
        image = add_gated(image, img_gates, self.img_mlp(img_modulated), image_runs)
        text = add_gated(text, txt_gates, self.txt_mlp(txt_modulated), text_runs)
        if image.dtype == torch.float16:  # as the stock block does
            image, text = image.clip(-65504, 65504), text.clip(-65504, 65504)
        return text, image
