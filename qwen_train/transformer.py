"""The stock Qwen-Image transformer on padded batches of mixed sizes, exactly.

Promises: every sample of a batch gets the output and the gradients that it would get alone, unpadded, in the stock
model, whatever its neighbours' sizes and number of images are and whatever fills the padding; padded outputs are zero.
Refuses: a batch that contradicts its `img_shapes`, text beyond the RoPE table, layered checkpoints, ControlNet
residuals, and attention backends that misread the mask. Nothing of the stock model is copied: its modules are called.

>>> model = QwenImageMultiResTransformer2DModel(  # or .from_pretrained(folder, subfolder="transformer")
...     num_layers=1, num_attention_heads=2, attention_head_dim=32, joint_attention_dim=48, axes_dims_rope=(4, 14, 14)
... )
>>> img_shapes = [[(1, 4, 6)], [(1, 6, 4), (1, 2, 3)]]  # a target alone beside a target with one control image
>>> image, text = torch.randn(2, 30, 64), torch.randn(2, 7, 48)  # 24 and 24 + 6 image tokens, padded to 30
>>> text_mask = torch.arange(7) < torch.tensor([[7], [5]])  # 7 and 5 text tokens, padded to 7
>>> sigma = torch.tensor([0.3, 0.9])
>>> velocity = model(image, text, text_mask, sigma, img_shapes, return_dict=False)[0]
>>> velocity.shape, velocity[0, 24:].abs().max().item()
(torch.Size([2, 30, 64]), 0.0)
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.utils import apply_lora_scale
from jaxtyping import Bool, Complex, Float, Int
from torch import Tensor, nn

from qwen_cache.format.errors import ModelError, TrainError

ImageShape = tuple[int, int, int]  # frames, height and width in tokens
ImageShapes = list[ImageShape]  # of one sample: the target, then each control image

# Of a row with n valid keys these keep the first n, which is wrong when padding lies between text and image.
BACKENDS_THAT_MISREAD_MASKS = frozenset(
    {AttentionBackendName.FLASH_VARLEN, AttentionBackendName._FLASH_VARLEN_3, AttentionBackendName.SAGE_VARLEN}
)


# ---- what a batch consists of ----------------------------------------------------------------------------------------


def refuse_unsupported(**arguments: object) -> None:
    """Arguments of the stock model that nothing here has made right under padding."""
    for name, value in arguments.items():
        if value is not None:
            raise TrainError(f"{name} is not supported", where="forward", expected="None", found=type(value).__name__)


def refuse_other_batch_size(batch_size: int, **arguments: Tensor) -> None:
    """One row would be broadcast over the batch without a word."""
    for name, rows in arguments.items():
        if len(rows) != batch_size:
            raise TrainError(
                "one row per sample is needed",
                where=name,
                expected=f"{batch_size} samples, as in hidden_states",
                found=f"{len(rows)}",
            )


def image_shapes_per_sample(img_shapes: Sequence[Any], batch_size: int) -> list[ImageShapes]:
    """One list of images per sample, from either form: `[(1, h, w), ...]` for all or `[[(1, h, w), ...], ...]`."""
    shared = bool(img_shapes) and all(_is_image_shape(entry) for entry in img_shapes)
    samples = [img_shapes] * batch_size if shared else img_shapes
    for sample in samples:
        if not isinstance(sample, list | tuple) or not sample or not all(_is_image_shape(image) for image in sample):
            raise TrainError(
                "a sample's images cannot be read",
                where="img_shapes",
                expected="[(1, h, w), ...] for the whole batch, or one such list per sample",
                found=repr(sample),
            )
    if len(samples) != batch_size:
        raise TrainError(
            "one list of images per sample is needed",
            where="img_shapes",
            expected=f"{batch_size} samples, as in hidden_states",
            found=f"{len(samples)}",
        )
    return [[(t, h, w) for t, h, w in sample] for sample in samples]


def _is_image_shape(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 3 and all(isinstance(n, int) and n > 0 for n in entry)


def image_token_counts(samples: Sequence[ImageShapes], image_length: int) -> list[int]:
    """The image tokens of each sample; the longest must fill the row, or an image is missing from `img_shapes`."""
    counts = [sum(math.prod(image) for image in images) for images in samples]
    if max(counts) != image_length:
        longest = counts.index(max(counts))
        raise TrainError(
            f"img_shapes and hidden_states disagree: the longest sample has the images {samples[longest]}",
            where="hidden_states",
            expected=f"{max(counts)} image tokens",
            found=f"{image_length}",
            do="give the target and every control image of each sample: img_shapes=[[(1, h, w), ...], ...]",
        )
    return counts


def text_validity(encoder_hidden_states_mask: Tensor | None, batch_size: int, text_length: int) -> Bool[Tensor, "B L"]:
    """The text mask as booleans on the CPU: the one wait for the device, and none if the mask is there already."""
    if encoder_hidden_states_mask is None:
        return torch.ones(batch_size, text_length, dtype=torch.bool)
    if encoder_hidden_states_mask.shape != (batch_size, text_length):
        raise TrainError(
            "the text mask does not fit the text",
            where="encoder_hidden_states_mask",
            expected=f"shape {(batch_size, text_length)}",
            found=f"{tuple(encoder_hidden_states_mask.shape)}",
        )
    return encoder_hidden_states_mask.to("cpu", torch.bool)


def prefix_mask(lengths: Sequence[int], row_length: int) -> Bool[Tensor, "B N"]:
    """True for the first `lengths[i]` tokens of row i."""
    return torch.arange(row_length) < torch.tensor(lengths)[:, None]


def extents(valid: Bool[Tensor, "B N"]) -> list[int]:
    """For each row the position behind its last valid token (its length, when the padding is on the right)."""
    positions = torch.arange(1, valid.shape[1] + 1)
    return [int(length) for length in (valid * positions).amax(dim=1)]


def zero_padding(x: Float[Tensor, "B N C"], valid: Bool[Tensor, "B N"]) -> Float[Tensor, "B N C"]:
    """`x` with zeros for padding, NaN included, which a product would keep."""
    return x if valid.all() else x.masked_fill(~valid.to(x.device)[..., None], 0)


# ---- what the blocks need to know of it ------------------------------------------------------------------------------


def joint_attention_mask(
    text_valid: Bool[Tensor, "B L"], image_valid: Bool[Tensor, "B S"], device: torch.device
) -> Bool[Tensor, "B 1 1 L+S"] | None:
    """The keys that may be attended to, text first; None if all may, since any mask keeps SDPA off its flash kernel."""
    valid = torch.cat([text_valid, image_valid], dim=1)
    return None if valid.all() else valid[:, None, None, :].to(device)


def rotary_embeddings(
    pos_embed: nn.Module,
    samples: Sequence[ImageShapes],
    text_lengths: Sequence[int],
    image_length: int,
    text_length: int,
    device: torch.device,
) -> tuple[Complex[Tensor, "B S half"], Complex[Tensor, "B L half"]]:
    """RoPE of image and text, each row as the stock `pos_embed` gives it for that sample alone, padded with zeros."""
    image_rows, text_rows = [], []
    for images, wanted in zip(samples, text_lengths, strict=True):
        image_row, text_row = pos_embed([images], device=device, max_txt_seq_len=wanted)
        if len(text_row) < wanted:  # the stock model cuts the table and goes on
            raise TrainError(
                f"the text is longer than the RoPE table beside images of {images}",
                where="encoder_hidden_states",
                expected=f"at most {len(text_row)} text tokens",
                found=f"{wanted}",
                do="shorten the text or the images",
            )
        image_rows.append(F.pad(image_row, (0, 0, 0, image_length - len(image_row))))
        text_rows.append(F.pad(text_row, (0, 0, 0, text_length - len(text_row))))
    return torch.stack(image_rows), torch.stack(text_rows)


def modulation_index(samples: Sequence[ImageShapes], image_length: int, device: torch.device) -> Int[Tensor, "B S"]:
    """For `zero_cond_t`: 0 where the timestep modulates (the target), 1 where zero does (control images, padding)."""
    target = prefix_mask([math.prod(images[0]) for images in samples], image_length)
    return (~target).to(device, torch.int)


# ---- attention -------------------------------------------------------------------------------------------------------


def apply_rotary_embedding(
    x: Float[Tensor, "B N heads dim"], freqs: Complex[Tensor, "B N dim//2"]
) -> Float[Tensor, "B N heads dim"]:
    """Rotate `x`, in float32 as the stock model does; its own function takes one table for the whole batch."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[:, :, None]).flatten(-2).type_as(x)


class QwenMultiResAttnProcessor:
    """Joint attention over [text | image] with a mask `[B, 1, 1, L + S]` over the keys of both.

    `image_rotary_emb` is one table per sample: `[B, S, head_dim / 2]` for the image, `[B, L, head_dim / 2]` for the
    text.
    """

    # `set_attention_backend` and the parallel hooks of diffusers write to these names.
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
    ) -> tuple[Tensor, Tensor]:
        if image_rotary_emb is None or encoder_hidden_states_mask is not None:
            raise ModelError(
                "this attention processor works inside QwenImageMultiResTransformer2DModel only",
                expected="`image_rotary_emb` per sample, and one `attention_mask` over [text | image]",
            )
        head_dim = attn.inner_dim // attn.heads  # a tensor-parallel rank holds fewer heads, of the same size

        def heads(x: Tensor, projection: nn.Module, norm: nn.Module | None = None) -> Tensor:
            x = projection(x).unflatten(-1, (-1, head_dim))
            return x if norm is None else norm(x)

        image, text = hidden_states, encoder_hidden_states
        image_freqs, text_freqs = image_rotary_emb
        image_query = apply_rotary_embedding(heads(image, attn.to_q, attn.norm_q), image_freqs)
        image_key = apply_rotary_embedding(heads(image, attn.to_k, attn.norm_k), image_freqs)
        text_query = apply_rotary_embedding(heads(text, attn.add_q_proj, attn.norm_added_q), text_freqs)
        text_key = apply_rotary_embedding(heads(text, attn.add_k_proj, attn.norm_added_k), text_freqs)

        joint = dispatch_attention_fn(
            torch.cat([text_query, image_query], dim=1),
            torch.cat([text_key, image_key], dim=1),
            torch.cat([heads(text, attn.add_v_proj), heads(image, attn.to_v)], dim=1),
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        joint = joint.flatten(2, 3).to(image_query.dtype)
        text_output = attn.to_add_out(joint[:, : text.shape[1]].contiguous())
        image_output = joint[:, text.shape[1] :].contiguous()
        for layer in attn.to_out:  # the projection, then its dropout
            image_output = layer(image_output)
        return image_output, text_output


# ---- the model -------------------------------------------------------------------------------------------------------


class QwenImageMultiResTransformer2DModel(QwenImageTransformer2DModel):  # type: ignore[misc]
    """`QwenImageTransformer2DModel` for batches of mixed sizes: same parameters, same checkpoints, same arguments."""

    # Context parallelism splits the rows that `pos_embed` returns, before they could be padded here.
    _cp_plan = None

    # diffusers reads the names that it expects in config.json off this signature.
    @functools.wraps(QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.use_layer3d_rope:
            raise ModelError(
                "layered checkpoints place their images on other positions",
                where="config.json",
                expected="use_layer3d_rope false",
                found="true",
                do="load a Qwen-Image or Qwen-Image-Edit transformer",
            )
        for block in self.transformer_blocks:
            block.attn.set_processor(QwenMultiResAttnProcessor())

    def to_json_string(self) -> str:
        """The configuration under the stock class's name, so that pipelines and other trainers load what is saved."""
        config = {**json.loads(super().to_json_string()), "_class_name": QwenImageTransformer2DModel.__name__}
        return json.dumps(config, indent=2, sort_keys=True) + "\n"

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
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """Predict the velocity of every image token; of control images and padding too, where it means nothing.

        Args:
            hidden_states: `[B, S, in_channels]`, packed latents: target, then each control image, then padding.
            encoder_hidden_states: `[B, L, joint_attention_dim]`, prompt embeddings, then padding.
            encoder_hidden_states_mask: `[B, L]`, true for text; None if all is. On the CPU it costs no wait.
            timestep: `[B]`, the noise level sigma in 0..1.
            img_shapes: `[(1, h, w), ...]` in tokens for the whole batch, or one such list per sample.
            attention_kwargs: `scale` sets the strength of LoRA layers.
        """
        if encoder_hidden_states is None or timestep is None or img_shapes is None:
            raise TrainError("forward needs encoder_hidden_states, timestep and img_shapes", found="None")
        refuse_unsupported(guidance=guidance, controlnet_block_samples=controlnet_block_samples)
        refuse_other_batch_size(
            len(hidden_states), encoder_hidden_states=encoder_hidden_states, timestep=timestep.reshape(-1)
        )

        (batch_size, image_length), device = hidden_states.shape[:2], hidden_states.device
        text_length = encoder_hidden_states.shape[1]
        samples = image_shapes_per_sample(img_shapes, batch_size)
        image_valid = prefix_mask(image_token_counts(samples, image_length), image_length)
        text_valid = text_validity(encoder_hidden_states_mask, batch_size, text_length)
        attention_mask = joint_attention_mask(text_valid, image_valid, device)
        image_rotary_emb = rotary_embeddings(
            self.pos_embed, samples, extents(text_valid), image_length, text_length, device
        )
        attention_kwargs = self._attention_arguments(attention_kwargs, attention_mask)

        hidden_states = self.img_in(zero_padding(hidden_states, image_valid))
        encoder_hidden_states = self.txt_in(self.txt_norm(zero_padding(encoder_hidden_states, text_valid)))
        timestep = timestep.to(hidden_states.dtype)
        modulate_index = None
        if self.zero_cond_t:
            timestep = torch.cat([timestep, timestep * 0])
            modulate_index = modulation_index(samples, image_length, device)
        temb = self.time_text_embed(timestep, hidden_states, additional_t_cond)

        checkpointing = torch.is_grad_enabled() and self.gradient_checkpointing
        for block in self.transformer_blocks:
            run = functools.partial(self._gradient_checkpointing_func, block) if checkpointing else block
            encoder_hidden_states, hidden_states = run(
                hidden_states, encoder_hidden_states, None, temb, image_rotary_emb, attention_kwargs, modulate_index
            )

        temb = temb.chunk(2)[0] if self.zero_cond_t else temb
        sample = zero_padding(self.proj_out(self.norm_out(hidden_states, temb)), image_valid)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    def _attention_arguments(self, given: dict[str, Any] | None, attention_mask: Tensor | None) -> dict[str, Any]:
        """What every block hands to its attention processor."""
        if given and "attention_mask" in given:
            raise TrainError(
                "the attention mask follows from img_shapes and encoder_hidden_states_mask",
                where="attention_kwargs",
                expected="no attention_mask",
            )
        backend = self.transformer_blocks[0].attn.processor._attention_backend
        backend = AttentionBackendName(backend or _AttentionBackendRegistry.get_active_backend()[0])
        if attention_mask is not None and backend in BACKENDS_THAT_MISREAD_MASKS:
            raise TrainError(
                "this attention backend misreads padding between text and image",
                where="attention backend",
                expected="one that takes a mask, such as native",
                found=backend.value,
                do='call set_attention_backend("native") or make batches of one size',
            )
        return {**(given or {}), "attention_mask": attention_mask}
