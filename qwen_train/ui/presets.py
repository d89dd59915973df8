"""Presets of the Train page: named settings to begin with, and nothing but settings.

Those for a GPU's memory hold for one sample of 1024² with one control, by `qwen-train plan`; the memory bar says what
holds for a cache. Those for a purpose are what the examples of other trainers have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21, Family
from qwen_cache.settings.describe import describe

MEMORY = "Memory of the GPU"
PURPOSE = "Purpose"


@dataclass(frozen=True)
class Preset:
    """Settings by dotted name, under a name that says what they are for."""

    name: str
    group: str
    about: str
    settings: dict[str, Any]
    family: Family | None = None
    """The models that it is for; None: all."""
    memory: int | None = None
    """The GPU that it is for, in GB."""


def _offload(memory: int, blocks: int, of: int, host: float, family: Family) -> Preset:
    about = f"Keeps {blocks} of {of} blocks in host memory: {host:g} GB of it are pinned."
    return Preset(f"{memory} GB", MEMORY, about, {"train.offload_blocks": blocks}, family, memory)


PRESETS = (
    Preset(
        "Chosen by the run",
        MEMORY,
        "The fastest of offloaded blocks and activations, gradient checkpointing and compile that fits the GPU. It "
        "changes no result, and the plan names it.",
        {"train.memory": "auto"},
    ),
    _offload(24, 40, 60, 27.5, QWEN_IMAGE),
    _offload(16, 52, 60, 35.8, QWEN_IMAGE),
    _offload(8, 60, 60, 41.3, QWEN_IMAGE),
    _offload(16, 20, 32, 8.8, QWEN_IMAGE_21),
    _offload(8, 32, 32, 14.1, QWEN_IMAGE_21),
    Preset(
        "Style",
        PURPOSE,
        "The steps and the caption dropout of ai-toolkit's example for Qwen-Image, which calls 500 to 4,000 steps a "
        "good range. Every checkpoint is kept: the images show which is enough.",
        {
            "train.max_steps": 2000,
            "train.caption_dropout": 0.05,
            "train.checkpointing_steps": 250,
            "train.checkpoints_total_limit": 0,
        },
    ),
    Preset(
        "Object or person",
        PURPOSE,
        "For few images of one subject, as in diffusers' DreamBooth example for Qwen-Image: 500 steps of 4 samples.",
        {
            "train.max_steps": 500,
            "train.gradient_accumulation_steps": 4,
            "optimizer.learning_rate": 2e-4,
            "train.checkpointing_steps": 100,
            "train.checkpoints_total_limit": 0,
        },
    ),
    Preset(
        "Edit",
        PURPOSE,
        "For pairs: the steps of ai-toolkit's example for Edit-2509, and the rank of DiffSynth-Studio's. Every "
        "checkpoint is kept: the images show which is enough.",
        {
            "train.max_steps": 3000,
            "train.caption_dropout": 0.05,
            "train.lora.rank": 32,
            "train.checkpointing_steps": 250,
            "train.checkpoints_total_limit": 0,
        },
    ),
)
"""The figures of host memory are those of `qwen-train plan`. The examples: ai-toolkit
config/examples/train_lora_qwen_image_24gb.yaml and train_lora_qwen_image_edit_2509_32gb.yaml, diffusers
examples/dreambooth/README_qwen.md, DiffSynth-Studio examples/qwen_image/model_training/lora/Qwen-Image-Edit-2509.sh."""


def presets(family: Family | None) -> list[dict[str, Any]]:
    """The presets for models of this family, or for all: each setting with its title."""
    return [
        {
            "name": each.name if family or not each.family else f"{each.name}, {each.family.name}",
            "group": each.group,
            "about": each.about,
            "settings": [
                {"key": key, "title": describe(key).title, "value": value} for key, value in each.settings.items()
            ],
        }
        for each in PRESETS
        if family is None or each.family in (None, family)
    ]
