"""Files for DiffSynth-Studio."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import SampleMeta
from qwen_cache.trainers.files import ALWAYS, Export, Refusal, Tool, images_of


def refusing(_: Iterable[SampleMeta]) -> Callable[[SampleMeta], Refusal | None]:
    """Every size and any number of controls fits: a batch is one sample."""
    return lambda meta: None


def write(export: Export) -> None:
    """A file for each sample in `0/`, as its first process writes them."""
    (export.folder / "0").mkdir()
    for i, (_, sample) in enumerate(export.samples):
        torch.save(inputs_of(sample, zero_cond_t=export.zero_cond_t), export.folder / "0" / f"{i}.pth")
        export.on_sample()


def inputs_of(sample: Sample, *, zero_cond_t: bool) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The inputs of the pipeline for a sample."""
    target, *controls = (latents.squeeze(1)[None] for latents in images_of(sample))
    embeds = sample["prompt_embeds"].clone()[None]  # a view of the shard would save all of it
    shared: dict[str, Any] = {
        "cfg_scale": 1,
        "rand_device": "cpu",
        "use_gradient_checkpointing": True,
        "use_gradient_checkpointing_offload": False,
        "edit_image_auto_resize": True,
        "zero_cond_t": zero_cond_t,
        "height": 8 * target.shape[2],
        "width": 8 * target.shape[3],
        "input_latents": target,
    }
    if controls:
        shared["edit_latents"] = controls if len(controls) > 1 else controls[0]
    positive = {"prompt_emb": embeds, "prompt_emb_mask": torch.ones(embeds.shape[:2], dtype=torch.int64)}
    return shared, positive, {}


TOOL = Tool("DiffSynth-Studio", ALWAYS, refusing, write, "train.py --task sft:train --dataset_base_path {folder}")
