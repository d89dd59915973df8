"""Caches for a mask head, with attention on known boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_cache.format.identity import Inputs, content_hash, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update

RECIPE = {"encoder_version": 2, "pipeline": "QwenImageEditPlusPipeline", "dtype": "float32", "text_encoder": "ab12"}
QUICK = {"steps": 60, "base_channels": 4, "mask_size": 16, "learning_rate": 0.02, "validation_split": 0.3}
CELLS = (16, 12)
CHANNELS = 6


@dataclass(frozen=True)
class Scene:
    """A sample to write, with or without attention and mask."""

    name: str
    attention: torch.Tensor | None
    mask: torch.Tensor | None
    origin: str = "difference"

    def tensors(self) -> dict[str, torch.Tensor]:
        rows, columns = CELLS
        made = {"image_latents": torch.zeros(rows * columns, 64), "control_latents": torch.zeros(rows * columns, 64)}
        made |= {"prompt_embeds": torch.zeros(3, 4)}
        made |= {} if self.mask is None else {"edit_mask": self.mask.float().flatten()}
        return made | ({} if self.attention is None else {"attention": self.attention.half()})


def scene(seed: int, *, looks_elsewhere: bool = False, origin: str = "difference") -> Scene:
    """A masked box on which two channels attend, or another box with `looks_elsewhere`; other channels are random."""
    random = torch.Generator().manual_seed(seed)
    mask, other = (torch.zeros(CELLS) for _ in range(2))
    for box, left in ((mask, 0), (other, 6)):
        row, column = torch.randint(0, 10, (), generator=random), torch.randint(left, left + 3, (), generator=random)
        box[row : row + 5, column : column + 3] = 1
    if seed % 2:
        mask, other = other, mask
    attention = 0.1 * torch.rand(CHANNELS, *CELLS, generator=random)
    attention[:2] += 0.8 * (other if looks_elsewhere else mask)
    return Scene(f"after/{seed}.png", attention, mask, origin)


def write_scenes(folder: Path, scenes: Mapping[str, Sequence[Scene]], recipes: Mapping[str, Any]) -> Path:
    """A cache of these samples under each recipe."""
    written = {}
    for name, recipe in recipes.items():
        for each in scenes[name]:
            data = {tensor: value.numpy().tobytes() for tensor, value in each.tensors().items()}
            specs = {
                tensor: TensorSpec(
                    {2: "F16", 4: "F32"}[value.element_size()], tuple(value.shape), content_hash(data[tensor])
                )
                for tensor, value in each.tensors().items()
            }
            inputs = Inputs(content_hash(each.name.encode()), (content_hash(b"before"),), None)
            shapes = ((1, *CELLS), (1, *CELLS))
            origin = None if each.mask is None else each.origin
            meta = SampleMeta(recipe_id(recipe), inputs, "edit it", shapes, 0, specs, (), origin)
            written[meta.key] = (each.name, meta, data)
    listed = [ListedSample(name, key) for key, (name, _, _) in written.items()]
    update = plan_update(folder, Existing.empty(2), 2, listed)
    staging = open_staging(update, "scenes", 1 << 20)
    for _, meta, data in written.values():
        staging.add(meta, {name: memoryview(data[name]) for name in meta.tensors})
    commit_update(update, staging, dict(recipes), {"qwen-cache": "0.1.0"})
    return folder
