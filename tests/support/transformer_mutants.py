"""Mistakes in the positions and masks of the transformer, each with a batch that reveals it."""

from __future__ import annotations

from typing import Any

import torch

from qwen_train.model import transformer

from .transformer_judge import CASES, COUNTS, MIXED, SWAPPED, TEXTS, padded

ROTARY = transformer.rotary_embeddings
JOINT_MASK = transformer.joint_attention_mask
MODULATION = transformer.modulation_index


def text_start_shared(pos_embed: Any, samples: Any, text_lengths: Any, *rest: Any) -> Any:
    """Text RoPE of the whole batch from its largest image."""
    widest = max(samples, key=lambda images: max(max(height, width) for _, height, width in images))
    image_freqs, _ = ROTARY(pos_embed, samples, text_lengths, *rest)
    _, text_length, device = rest
    text = pos_embed([list(widest)], device=device, max_txt_seq_len=text_length)[1]
    return image_freqs, text.expand(len(samples), -1, -1)


def text_start_from_target(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    """Text RoPE that starts behind the target, whatever the control images' sizes are."""
    return ROTARY(pos_embed, samples, *rest)[0], ROTARY(pos_embed, [images[:1] for images in samples], *rest)[1]


def no_frame_index(pos_embed: Any, samples: Any, text_lengths: Any, image_length: int, *rest: Any) -> Any:
    """Every image counted as the first of its sample."""
    singles = [[pos_embed([[image]], device=None, max_txt_seq_len=1)[0] for image in images] for images in samples]
    image_freqs = padded([torch.cat(rows) for rows in singles], 0)
    return image_freqs, ROTARY(pos_embed, samples, text_lengths, image_length, *rest)[1]


def sides_swapped(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    return ROTARY(pos_embed, [tuple((t, w, h) for t, h, w in images) for images in samples], *rest)


def first_sample_for_all(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    return ROTARY(pos_embed, [samples[0]] * len(samples), *rest)


def real_text_offset(pos_embed: Any, samples: Any, text_lengths: Any, *rest: Any) -> Any:
    """Image RoPE after the real text, while the image tokens come after the padded text."""
    image_freqs, text_freqs = ROTARY(pos_embed, samples, text_lengths, *rest)
    rows = zip(text_freqs, image_freqs, text_lengths, strict=True)
    joint = torch.stack([torch.cat([text[:n], image, text[n:]]) for text, image, n in rows])
    return joint.split([text_freqs.shape[1], image_freqs.shape[1]], dim=1)[::-1]


ROPE_MUTANTS = {
    "text start shared": (MIXED, text_start_shared),
    "text start from the target": (CASES["a control larger than its target"], text_start_from_target),
    "no frame index": (COUNTS, no_frame_index),
    "height and width swapped": (SWAPPED, sides_swapped),
    "RoPE of the first sample": (SWAPPED, first_sample_for_all),
    "real text offset": (TEXTS, real_text_offset),
}
MASK_MUTANTS = {
    "image padding attended": (
        COUNTS,
        "joint_attention_mask",
        lambda text, image, *rest, **options: JOINT_MASK(text, torch.ones_like(image), *rest, **options),
    ),
    "text padding attended": (
        TEXTS,
        "joint_attention_mask",
        lambda text, image, *rest, **options: JOINT_MASK(torch.ones_like(text), image, *rest, **options),
    ),
    "control images modulated as targets": (
        COUNTS,
        "modulation_index",
        lambda samples, *rest: torch.zeros_like(MODULATION(samples, *rest)),
    ),
    "neighbour's target length": (
        COUNTS,
        "modulation_index",
        lambda samples, *rest: MODULATION(samples, *rest).roll(1, dims=0),
    ),
}
