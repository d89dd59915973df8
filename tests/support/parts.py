"""Steps of an optimizer on weights in parts (FSDP2), in several processes over gloo: a program that tests start."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from qwen_cache.settings.load import Config
from qwen_train.model.placement import wrap
from qwen_train.training import checkpoint
from qwen_train.training.optimizers import evaluation_weights, has_two_modes, make_optimizer
from qwen_train.weights import gather_weights


class Layers(nn.Module):
    """Layers of odd widths, which processes cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([nn.Linear(24, 37), nn.Linear(37, 11)])
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = torch.tanh(block(x))
        return x


def few_steps(name: str, processes: int = 1) -> dict[str, Tensor]:
    """The weights after steps on the same batch in every process, those to evaluate, and the optimizer's state."""
    model: Any = Layers()
    if processes > 1:
        accelerator: Any = SimpleNamespace(
            num_processes=processes,
            device=torch.device("cpu"),
            mixed_precision="no",
            prepare_model=lambda model, **_: model,
        )
        model = wrap(accelerator, model, Config.model_validate({"train": {"fsdp": True, "method": "full"}}).train)
    settings = {"name": name, "learning_rate": 1 if "Prodigy" in name else 0.01}
    optimizer, _ = make_optimizer(Config.model_validate({"optimizer": settings}), list(model.parameters()))
    if has_two_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    x = torch.randn(8, 24, generator=torch.Generator().manual_seed(1))
    for _ in range(8):  # RAdam begins with none
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    found = {f"weight.{key}": value for key, value in gather_weights(model, keep=True).items()}
    with evaluation_weights(optimizer):
        found |= {f"evaluated.{key}": value for key, value in gather_weights(model, keep=True).items()}
    checkpoint._flatten(optimizer.state_dict(), "optimizer", found)
    return found


def main(folder: str, *names: str) -> None:
    dist.init_process_group("gloo")
    for name in names:
        found = few_steps(name, dist.get_world_size())
        if not dist.get_rank():
            save_file({key: value.clone() for key, value in found.items()}, Path(folder) / f"{name}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
