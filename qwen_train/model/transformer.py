"""The stock Qwen-Image transformer on batches of mixed sizes, exactly.

Every sample of a batch gets the output and gradients that it would get alone, unpadded, in the stock model, whatever
the other samples and the padding contain; padded outputs are zero. The model takes and returns padded batches; with
`layout = "packed"` it computes on the valid tokens only, with equal results. It calls the stock model's own modules.
Refused: a batch that contradicts its `img_shapes`, text beyond the RoPE table, layered checkpoints, ControlNet
residuals, and attention backends that misread the mask.

>>> model = QwenImageMultiResTransformer2DModel(  # or .from_pretrained(folder, subfolder="transformer")
...     num_layers=1, num_attention_heads=2, attention_head_dim=32, joint_attention_dim=48, axes_dims_rope=(4, 14, 14)
... )
>>> img_shapes = [[(1, 4, 6)], [(1, 6, 4), (1, 2, 3)]]  # a target, and a target with one control image
>>> image, text = torch.randn(2, 30, 64), torch.randn(2, 7, 48)  # 24 and 24 + 6 image tokens, padded to 30
>>> text_mask = torch.arange(7) < torch.tensor([[7], [5]])  # 7 and 5 text tokens, padded to 7
>>> sigma = torch.tensor([0.3, 0.9])
>>> velocity = model(image, text, text_mask, sigma, img_shapes, return_dict=False)[0]
>>> velocity.shape, velocity[0, 24:].abs().max().item()
(torch.Size([2, 30, 64]), 0.0)
>>> model.layout = "packed"
>>> torch.allclose(model(image, text, text_mask, sigma, img_shapes, return_dict=False)[0], velocity, atol=1e-5)
True
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope, QwenImageTransformer2DModel
from diffusers.utils import apply_lora_scale
from jaxtyping import Bool, Complex, Int, Shaped
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_cache.models.devices import to_device
from qwen_train.model.attention import (
    Packing,
    QwenImageMultiResTransformerBlock,
    QwenMultiResAttnProcessor,
    active_backend,
    gather,
    norm_out,
    refuse_backend_for_mask,
    scatter,
)
from qwen_train.model.mixed_sizes import (
    MixedSizes,
    image_shapes_per_sample,
    prefix_mask,
    refuse_other_batch_size,
    refuse_unsupported,
    text_validity,
)

# ---- the contents of a batch -----------------------------------------------------------------------------------------


def image_token_counts(samples: Sequence[ImgShapes], image_length: int) -> list[int]:
    """The image tokens of each sample; the longest must fill the row, or an image is missing from `img_shapes`."""
    counts = [token_count(images) for images in samples]
    if max(counts) != image_length:
        longest = counts.index(max(counts))
        raise TrainError(
            f"img_shapes and hidden_states disagree: the longest sample has the images {list(samples[longest])}",
            where="hidden_states",
            expected=f"{max(counts)} image tokens",
            found=f"{image_length}",
            do="give the target and every control image of each sample: img_shapes=[[(1, h, w), ...], ...]",
        )
    return counts


def extents(valid: Bool[Tensor, "B N"]) -> list[int]:
    """For each row the position after its last valid token: its length, if padding is on the right."""
    positions = torch.arange(1, valid.shape[1] + 1)
    return [int(length) for length in (valid * positions).amax(dim=1)]


def padding_of(valid: Bool[Tensor, "B N"], device: torch.device) -> Bool[Tensor, "B N 1"] | None:
    """True for padding, on the device; None without padding."""
    return None if valid.all() else to_device(~valid[..., None], device)


def zero_padding(x: Shaped[Tensor, "B N C"], padding: Bool[Tensor, "B N 1"] | None) -> Shaped[Tensor, "B N C"]:
    """`x` with padding set to zero, by a fill because a product would keep NaN."""
    return x if padding is None else x.masked_fill(padding, 0)


# ---- the inputs of the blocks ----------------------------------------------------------------------------------------


def joint_attention_mask(
    text_valid: Bool[Tensor, "B L"], image_valid: Bool[Tensor, "B S"], device: torch.device, *, always: bool = False
) -> Bool[Tensor, "B 1 1 L+S"] | None:
    """The valid keys, text first; None if all are valid unless `always`: any mask rules out SDPA's flash kernel."""
    valid = torch.cat([text_valid, image_valid], dim=1)
    return None if valid.all() and not always else to_device(valid[:, None, None, :], device)


class RopeWithoutCache(QwenEmbedRope):  # type: ignore[misc]
    """The stock tables, computed for each batch: stock keeps 128 on the device, 270 MB at a megapixel."""

    def _compute_video_freqs(self, *arguments: Any) -> Tensor:
        table: Tensor = QwenEmbedRope._compute_video_freqs.__wrapped__(self, *arguments)
        return table


def rotary_embeddings(
    pos_embed: nn.Module,
    samples: Sequence[ImgShapes],
    text_lengths: Sequence[int],
    image_length: int,
    text_length: int,
    device: torch.device,
) -> tuple[Complex[Tensor, "B S half"], Complex[Tensor, "B L half"]]:
    """RoPE of image and text: each row from the stock `pos_embed` for that sample alone, padded with zeros."""
    image_rows, text_rows = [], []
    for images, length in zip(samples, text_lengths, strict=True):
        image_row, text_row = pos_embed([list(images)], device=device, max_txt_seq_len=length)
        if len(text_row) < length:  # the stock model silently uses a shorter table
            raise TrainError(
                f"the text is longer than the RoPE table beside images of {list(images)}",
                where="encoder_hidden_states",
                expected=f"at most {len(text_row)} text tokens",
                found=f"{length}",
                do="shorten the text or the images",
            )
        image_rows.append(F.pad(image_row, (0, 0, 0, image_length - len(image_row))))
        text_rows.append(F.pad(text_row, (0, 0, 0, text_length - len(text_row))))
    return torch.stack(image_rows), torch.stack(text_rows)


def modulation_index(samples: Sequence[ImgShapes], image_length: int, device: torch.device) -> Int[Tensor, "B S"]:
    """For `zero_cond_t`: 0 where the timestep modulates (target), 1 where timestep 0 does (controls, padding)."""
    target = prefix_mask([math.prod(images[0]) for images in samples], image_length)
    return to_device((~target).int(), device)


def refuse_other_rotary(given: tuple[Tensor, Tensor], *shapes: tuple[int, ...]) -> None:
    """Raise TrainError unless precomputed RoPE is complex, per sample, and of the batch's lengths."""
    tables = [(tuple(table.shape), table.dtype) for table in given]
    if tables != [(shape, torch.complex64) for shape in shapes]:
        raise TrainError(
            "the precomputed RoPE does not fit the batch",
            where="image_rotary_emb",
            expected=f"(image, text) of shapes {shapes[0]} and {shapes[1]} in complex64",
            found=", ".join(f"{shape} in {str(dtype).removeprefix('torch.')}" for shape, dtype in tables),
        )


@dataclass(frozen=True)
class BatchLayout:
    """The valid tokens, their RoPE, and the blocks' other inputs: mask and index if padded, the packing if packed."""

    image_size: tuple[int, int]
    """B and S."""
    image_padding: Bool[Tensor, "B S 1"] | None
    text_padding: Bool[Tensor, "B L 1"] | None
    rotary: tuple[Tensor, Tensor]
    """The rotations of image and text, as `apply_rotary_embedding` takes them."""
    attention_mask: Bool[Tensor, "B 1 1 N"] | None = None
    modulate_index: Int[Tensor, "B S"] | None = None
    packing: Packing | None = None
    embeddings: int = -1
    """The rows of the timestep's embedding, if they are not B."""

    def rows(self, image: Shaped[Tensor, "B S C"], text: Shaped[Tensor, "B L D"]) -> tuple[Tensor, Tensor]:
        """Image and text as the blocks take them: with zeros for padding, or packed."""
        if self.packing is None:
            return zero_padding(image, self.image_padding), zero_padding(text, self.text_padding)
        return gather(image, self.packing.image_index), gather(text, self.packing.text_index)

    def padded(self, image: Tensor) -> Shaped[Tensor, "B S C"]:
        """The image's packed row or padded rows as `[B, S, C]`, with zeros for padding."""
        if self.packing is None:
            return zero_padding(image, self.image_padding)
        return scatter(image, self.packing.image_index, *self.image_size)


# ---- the model -------------------------------------------------------------------------------------------------------


class QwenImageMultiResTransformer2DModel(MixedSizes, QwenImageTransformer2DModel):  # type: ignore[misc]
    """`QwenImageTransformer2DModel` for batches of mixed sizes: same parameters, same checkpoints, same arguments.

    Raises ModelError for a layered checkpoint (`use_layer3d_rope`), whose images have other positions.
    """

    # Context parallelism splits the rows that `pos_embed` returns before they are padded here.
    _cp_plan = None
    # The modules that device maps keep whole, FSDP wraps, and `compile_repeated_blocks` compiles.
    _no_split_modules: ClassVar = [QwenImageMultiResTransformerBlock.__name__]
    _repeated_blocks: ClassVar = [QwenImageMultiResTransformerBlock.__name__]
    _stock_class = QwenImageTransformer2DModel
    _block_class = QwenImageMultiResTransformerBlock
    _processor_class = QwenMultiResAttnProcessor
    ROW_ARGUMENTS: ClassVar = 2
    # Nothing uses the text that the last block computes.
    UNREACHED: ClassVar = ("attn.add_q_proj.", "attn.norm_added_q.", "attn.to_add_out.", "txt_mlp.")

    # diffusers reads the expected keys of config.json from this signature.
    @functools.wraps(QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._adopt_blocks()

    @classmethod
    def _refuse_checkpoint(cls, config: Any) -> None:
        refuse_layered(config)

    def _adopt_blocks(self) -> None:
        super()._adopt_blocks()
        self.pos_embed.__class__ = RopeWithoutCache

    @apply_lora_scale("attention_kwargs")  # type: ignore[untyped-decorator]
    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        img_shapes: Sequence[Any] | None = None,
        guidance: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: Any = None,
        additional_t_cond: Tensor | None = None,
        return_dict: bool = True,
        *,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the velocity of every image token; it is meaningless for control images, and zero for padding.

        Args:
            hidden_states: `[B, S, in_channels]`, packed latents: target, then each control image, then padding.
            encoder_hidden_states: `[B, L, joint_attention_dim]`, prompt embeddings, then padding.
            encoder_hidden_states_mask: `[B, L]`, true for text; None if all is text. A mask on the CPU is faster: one
                on the device must be copied to the CPU first.
            timestep: `[B]`, the noise level sigma in 0..1.
            img_shapes: `[(1, h, w), ...]` in tokens for the whole batch, or one such list per sample: the target, then
                each control image. Required, since it defines the valid tokens.
            guidance: not supported, must be None; the same for `controlnet_block_samples`.
            attention_kwargs: `scale` sets the strength of LoRA layers.
            additional_t_cond: as in the stock model.
            return_dict: False returns a tuple with the tensor.
            image_rotary_emb: complex64 RoPE of image `[B, S, dim/2]` and text `[B, L, dim/2]`, `dim` the size of a
                head; None computes it from `img_shapes`.

        Returns:
            The velocity `noise - x_0` as `sample`, of shape `[B, S, patch_size² · out_channels]` (64 channels).

        Raises:
            TrainError: arguments that contradict each other, are missing or not supported; text longer than the RoPE
                table; an attention backend that misreads the mask.
        """
        if encoder_hidden_states is None or timestep is None or img_shapes is None:
            raise TrainError("forward needs encoder_hidden_states, timestep and img_shapes", found="None")
        refuse_unsupported(guidance=guidance, controlnet_block_samples=controlnet_block_samples)
        refuse_other_batch_size(
            len(hidden_states), encoder_hidden_states=encoder_hidden_states, timestep=timestep.reshape(-1)
        )
        batch = self._read_batch(
            hidden_states, encoder_hidden_states, encoder_hidden_states_mask, img_shapes, image_rotary_emb
        )
        image, text = batch.rows(hidden_states, encoder_hidden_states)
        attention_kwargs = self._attention_arguments(attention_kwargs, batch)

        image, text = self._inputs_of_blocks(self.img_in(image), self.txt_in(self.txt_norm(text)))
        timestep = timestep.to(image.dtype).expand(batch.embeddings)
        if self.zero_cond_t:
            timestep = torch.cat([timestep, timestep * 0])
        temb = self.time_text_embed(timestep, image, additional_t_cond)

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        for block, embedding in zip(self.transformer_blocks, self._embeddings_of_blocks(temb), strict=False):
            run = functools.partial(self._gradient_checkpointing_func, block) if checkpointing else block
            text, image = run(image, text, None, embedding, batch.rotary, attention_kwargs, batch.modulate_index)

        temb = temb.chunk(2)[0] if self.zero_cond_t else temb
        if batch.packing is None:
            image = self.norm_out(image, temb)
        else:
            image = norm_out(self.norm_out, image, temb, batch.packing.image_runs)
        sample = batch.padded(self.proj_out(image))
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _embeddings_of_blocks(self, temb: Tensor) -> Iterable[Tensor]:
        """The embedding of the timestep that each block takes."""
        return itertools.repeat(temb)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _read_batch(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None,
        img_shapes: Sequence[Any],
        rotary: tuple[Tensor, Tensor] | None,
    ) -> BatchLayout:
        """Check the batch against its shapes and masks, and prepare the inputs of the blocks."""
        (batch_size, image_length), device = hidden_states.shape[:2], hidden_states.device
        text_length = encoder_hidden_states.shape[1]
        size = (batch_size, image_length)
        samples = image_shapes_per_sample(img_shapes, batch_size)
        image_valid = prefix_mask(image_token_counts(samples, image_length), image_length)
        text_valid = text_validity(encoder_hidden_states_mask, batch_size, text_length)
        if rotary is None:
            lengths = extents(text_valid)
            rotary = rotary_embeddings(self.pos_embed, samples, lengths, image_length, text_length, device)
        else:
            half = self.config.attention_head_dim // 2
            refuse_other_rotary(rotary, (batch_size, image_length, half), (batch_size, text_length, half))
        if self.layout == "padded":
            always = self.is_compiled and batch_size > 1  # with and without a mask are two graphs
            mask = joint_attention_mask(text_valid, image_valid, device, always=always)
            index = modulation_index(samples, image_length, device) if self.zero_cond_t else None
            image_padding, text_padding = padding_of(image_valid, device), padding_of(text_valid, device)
            batch = BatchLayout(size, image_padding, text_padding, rotary, mask, index)
        else:
            targets = [math.prod(images[0]) for images in samples] if self.zero_cond_t else None
            rows = max(2, batch_size) if self.is_compiled else batch_size  # a dimension of 1 is another graph
            packing = Packing.of(image_valid, text_valid, targets, device, rows, self.attention_kernel)
            batch = BatchLayout(size, None, None, rotary, packing=packing, embeddings=rows)
        image_rotary, text_rotary = batch.rows(*rotary)
        return replace(batch, rotary=(torch.view_as_real(image_rotary), torch.view_as_real(text_rotary)))

    def _attention_arguments(self, given: dict[str, Any] | None, batch: BatchLayout) -> dict[str, Any]:
        """The arguments that every block passes to its attention processor."""
        if reserved := {"attention_mask", "packing"} & set(given or {}):
            raise TrainError(
                "the attention mask follows from img_shapes and encoder_hidden_states_mask",
                where="attention_kwargs",
                expected=f"no {min(reserved)}",
            )
        if batch.attention_mask is not None:
            refuse_backend_for_mask(active_backend(self.transformer_blocks[0].attn.processor))
        return {**(given or {}), "attention_mask": batch.attention_mask, "packing": batch.packing}


def refuse_layered(config: Any) -> None:
    if config.use_layer3d_rope:
        raise ModelError(
            "layered checkpoints use other image positions",
            where="config.json",
            expected="use_layer3d_rope false",
            found="true",
            do="load a Qwen-Image or Qwen-Image-Edit transformer",
        )
