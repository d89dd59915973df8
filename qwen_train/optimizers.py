"""The optimizer, by name or import path, and the learning rate schedule.

A known optimizer gets the settings of the section `optimizer` that it takes; setting another one is refused. An
optimizer by import path gets the learning rate, and everything else from `optimizer.arguments`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch.distributed.tensor import DTensor

from qwen_cache.errors import ConfigError
from qwen_cache.extras import install_command
from qwen_cache.settings.load import Config
from qwen_cache.settings.train import OptimizerConfig

CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
}
ADAM = ("betas", "weight_decay", "eps")
SETTINGS = {"adamw": ADAM, "adamw8bit": ADAM, "adafactor": ("weight_decay",), "prodigy": ADAM}
EXTRAS = {"bitsandbytes": "quantization", "prodigyopt": "prodigy"}
"""Extras of this package, by the module that they install."""

NOT_SHARDABLE = ("adamw8bit", "adafactor", "prodigy")
"""Optimizers whose update depends on more of a weight than the FSDP2 shard of one process."""


def make_optimizer(config: Config, parameters: Sequence[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and its learning rate schedule; ConfigError for settings that it does not take."""
    o, s = config.optimizer, config.lr_scheduler
    cls = optimizer_class(o.name)
    if o.name in NOT_SHARDABLE and isinstance(parameters[0], DTensor):
        raise ConfigError(
            f"{o.name} cannot be used with train.fsdp", expected="adamw", found=o.name, do="set optimizer.name=adamw"
        )
    arguments = {"lr": o.learning_rate, **_settings(o), **o.arguments}
    try:
        optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{o.name} does not take these settings: {error}", do="see optimizer.arguments") from None
    try:
        lr_scheduler = get_scheduler(
            s.name,
            optimizer,
            num_warmup_steps=s.warmup_steps,
            num_training_steps=config.train.max_steps,
            num_cycles=s.num_cycles,
            power=s.power,
        )
    except ValueError as error:
        raise ConfigError(f"lr_scheduler: {error}") from None
    return optimizer, lr_scheduler


def apply_settings(config: Config, optimizer: Any, lr_scheduler: Any) -> None:
    """Apply the current settings to an optimizer and a schedule loaded from a checkpoint, at their step."""
    o = config.optimizer
    settings = {**_settings(o), **o.arguments}
    lr_scheduler.base_lrs = [o.learning_rate] * len(optimizer.param_groups)
    factors = [factor(lr_scheduler.last_epoch) for factor in lr_scheduler.lr_lambdas]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group.update({name: value for name, value in settings.items() if name in group})
        group |= {"initial_lr": o.learning_rate, "lr": o.learning_rate * factor}
    lr_scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer class of a name or import path; ConfigError if there is none."""
    path = CLASSES.get(name, name)
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ConfigError(
            "optimizer.name: no such optimizer", expected=f"{', '.join(CLASSES)} or an import path", found=name
        )
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        extra = EXTRAS.get(module.split(".")[0])
        do = install_command(extra) if extra else "install its package, or correct optimizer.name"
        raise ConfigError(f"the optimizer {name} cannot be imported: {error}", do=do) from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            "optimizer.name: not an optimizer",
            where=path,
            expected="a subclass of torch.optim.Optimizer",
            found=type(cls).__name__ if cls is not None else f"no {attribute} in {module}",
        )
    return cls


def _settings(config: OptimizerConfig) -> dict[str, Any]:
    """The settings among `betas`, `weight_decay` and `eps` that this optimizer takes."""
    taken = SETTINGS.get(config.name, ())
    for name in ADAM:
        if name not in taken and getattr(config, name) != OptimizerConfig.model_fields[name].default:
            raise ConfigError(
                f"optimizer.{name} is not a setting of {config.name}",
                found=getattr(config, name),
                do="leave it out, or set it in optimizer.arguments under this optimizer's own name",
            )
    return {name: getattr(config, name) for name in taken}
