"""The parts of a tiny Qwen-Image-2.1; make_tiny_model.py writes them to a folder.

Real are: the classes, special tokens, templates, chat template, interleaved M-RoPE, deepstack, patches and slots of the
vision tower, channels, mean and standard deviation of latents, 16×16 pixels to a latent, the order and rotation of the
transformer's sequence. Every output depends on every input at the scale of the trained networks. The final norm of the
text encoder changes directions, not only lengths, so that hidden states before and after it differ clearly. The VAE
returns the 16×16 block averages of its input image, alpha included.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Pipeline, QwenImage21Transformer2DModel
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21RMS_norm
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21ZeroCenterRMSNorm
from tiny_model_parts import (
    CONSTANT,
    TEXT_WIDTH,
    TRACE,
    fill,
    set_diagonal,
    train_tokenizer,
    vision_token_ids,
    write_json,
)
from torch import nn
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

# Messages of text and images as in Qwen3-VL's template, without its tools and videos.
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

COLOURS = 4  # red, green, blue, alpha

Channels = Sequence[tuple[int, ...]]
"""The place of each colour, and last of the constant, in a layer's output: one channel, or several that are equal."""

# The VAE's shortcuts around its blocks only move and average channels, so they carry the image and decide where it is.
# In the encoder, one that doubles the channels moves channel c to 2c + 1. In the decoder, one that halves them takes
# channel 2c + 1 to c, the last one channels 2c and 2c + 1 to the upper and the lower row of c.
ENCODER_CHANNELS: list[Channels] = [[(step * c + step - 1,) for c in range(COLOURS + 1)] for step in (1, 1, 2, 4, 8, 8)]
DECODER_CHANNELS: list[Channels] = [
    *[[(4 * c + 1, 4 * c + 3) for c in range(COLOURS + 1)]] * 3,
    [(2 * c, 2 * c + 1) for c in range(COLOURS + 1)],
    *[[(c,) for c in range(COLOURS + 1)]] * 2,
]


class NoProcessor:
    """Lets the pipeline begin without a processor, for its templates."""

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, messages: object, **options: object) -> list[list[int]]:
        return [[]]

    def encode(self, text: str) -> list[int]:
        return [0]


def make_tokenizer() -> Qwen2Tokenizer:
    pipeline = QwenImage21Pipeline(None, None, None, NoProcessor(), None)
    tokenizer = train_tokenizer([pipeline.prompt_template_t2i, pipeline.prompt_template_ti2i])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_text_encoder(tokenizer: Qwen2Tokenizer, generator: torch.Generator) -> Qwen3VLForConditionalGeneration:
    text_config = {
        "vocab_size": len(tokenizer),
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 2 * TEXT_WIDTH,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            # The real 5e6 is for heads of 128; with it, most of these 16 pairs would hardly rotate.
            "rope_theta": 100.0,
            "mrope_section": [6, 5, 5],  # in the ratio of the real [24, 20, 20]
            "mrope_interleaved": True,
        },
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision_config = {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": TEXT_WIDTH,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "deepstack_visual_indexes": [0, 1, 2],  # as in the real 8, 16, 24 of 27, the last block is not among them
    }
    model: Any = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text_config, vision_config=vision_config, dtype="float32", **vision_token_ids(tokenizer)
        )
    )
    fill(model, generator)
    text_model = model.model.language_model
    for layer in text_model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data *= 1.5  # sharp attention, or the order of words and patches hardly matters
    text_model.norm.weight.data = torch.exp(torch.randn(TEXT_WIDTH, generator=generator))
    return model


def make_transformer(generator: torch.Generator) -> QwenImage21Transformer2DModel:
    model: Any = QwenImage21Transformer2DModel(
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=32,
        axes_dims_rope=(4, 14, 14),  # in the ratio of the real (16, 56, 56)
        context_in_dim=TEXT_WIDTH,
    )
    fill(model, generator)
    for module in model.modules():
        if isinstance(module, QwenImage21ZeroCenterRMSNorm):
            module.weight.data -= 1  # the scale is the weight + 1
    for block in model.transformer_blocks:
        for norm in (block.attn.norm_q, block.attn.norm_k):
            norm.weight.data *= 2  # sharp attention: with 1 it nearly averages, and text and images hardly matter
    # Two activations have made its input small; gates are to be about ±0.5, which tanh does not saturate.
    model.modulation[1].weight.data *= 3
    model.norm_out.linear.weight.data *= 3
    return model


def make_vae(generator: torch.Generator) -> AutoencoderKLQwenImage21:
    """A random VAE that preserves the image's 16×16 block averages, in latents with the real mean and deviation.

    The decoder is wider than the encoder, as the real one is.
    """
    vae: Any = fill(AutoencoderKLQwenImage21(base_dim=6, decoder_base_dim=8, num_res_blocks=1), generator)
    colours: Channels = [(c,) for c in range(COLOURS)]
    for half, blocks, channels in (
        (vae.encoder, vae.encoder.down_blocks, ENCODER_CHANNELS),
        (vae.decoder, vae.decoder.up_blocks, DECODER_CHANNELS),
    ):
        first, last = channels[0], channels[-1]
        carry(half.conv_in, colours, first)
        for channel in first[COLOURS]:
            half.conv_in.weight.data[channel] = 0
            half.conv_in.bias.data[channel] = CONSTANT
        for block, (before, after) in zip(blocks, pairwise(channels), strict=True):
            carry_through(block, before, after)
        middle = last if half is vae.encoder else first
        carry_through(half.mid_block, middle, middle)
        preserve_lengths(half.norm_out, last)
        carry(half.conv_out, last, colours)
        # Near zero, SiLU is half its input, so that the last activation preserves the colours.
        half.norm_out.gamma.data /= 20
        half.conv_out.weight.data *= 40
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    log_variance = torch.full_like(mean, -4.0)  # samples are near the mode, but differ from it
    set_diagonal(vae.quant_conv, torch.cat([std, torch.zeros_like(std)]), torch.cat([mean, log_variance]))
    set_diagonal(vae.post_quant_conv, 1 / std, -mean / std)
    return vae


def carry_through(block: nn.Module, before: Channels, after: Channels) -> None:
    """Let the ends of the block's branches add a trace to the colours, and its inside see them beside the constant."""
    for name, module in block.named_modules():
        inputs = before if name in ("resnets.0.norm1", "resnets.0.conv1", "resnets.0.conv_shortcut") else after
        if isinstance(module, QwenImage21RMS_norm):
            preserve_lengths(module, inputs)
        elif not isinstance(module, nn.Conv2d):
            continue
        elif name.endswith((".conv1", ".conv_shortcut")):
            carry(module, inputs, after)
        elif name.endswith((".conv2", ".proj", "sampler.resample.1")):
            carry(module, inputs, after, only_trace=True)
        elif name.endswith((".to_qkv", ".time_conv")):  # the latter is for videos: it never runs on images
            ignore_constant(module, inputs)


def preserve_lengths(norm: QwenImage21RMS_norm, channels: Channels) -> None:
    """Undo the division by the length, which is nearly that of the constant."""
    norm.gamma.data *= CONSTANT * len(channels[COLOURS]) ** 0.5 / norm.scale


def carry(conv: nn.Conv2d, inputs: Channels, outputs: Channels, *, only_trace: bool = False) -> None:
    """Pass the colours on, and the constant where both sides have it, with a trace of the other channels."""
    weight, bias = conv.weight.data, conv.bias
    assert bias is not None
    ignore_constant(conv, inputs)
    for sources, targets in zip(inputs, outputs, strict=False):
        for target in targets:
            weight[target] *= TRACE
            bias.data[target] *= TRACE
            if not only_trace:
                weight[target, sources[0], weight.shape[2] // 2, weight.shape[3] // 2] += 1


def ignore_constant(conv: nn.Conv2d, inputs: Channels) -> None:
    """Only norms use the constant."""
    for channels in inputs[COLOURS:]:
        conv.weight.data[:, channels] = 0


def save_processor(folder: Path, tokenizer: Qwen2Tokenizer) -> None:
    """Tokenizer, chat template, and files for images and videos that name the torchvision backends, as published.

    The published smallest image has 65536 pixels (256×256), and smaller ones are enlarged to it. Here it is 32×32, one
    slot, so that tests can use images of 128×128 as the real model uses those of 1024×1024, without enlarging.
    """
    tokenizer.save_pretrained(folder)
    settings = {
        "size": {"longest_edge": 16777216, "shortest_edge": 32 * 32},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    image = settings | {"image_processor_type": "Qwen2VLImageProcessorFast"}
    video = settings | {"video_processor_type": "Qwen3VLVideoProcessor"}
    write_json(folder / "preprocessor_config.json", image)
    write_json(folder / "video_preprocessor_config.json", video)


def index_entries(sample_sigmas: Sequence[float] | None) -> dict[str, object]:
    """Entries of model_index.json beside the parts that are saved by themselves; null if the model is not distilled."""
    return {
        "_class_name": "QwenImage21Pipeline",
        "processor": ["transformers", "Qwen3VLProcessor"],
        "sample_sigmas": None if sample_sigmas is None else list(sample_sigmas),
    }
