"""The optimizer, by name or import path, and the learning rate schedule.

A known optimizer gets the settings of the section `optimizer` that it takes; setting another one is refused. An
optimizer by import path gets the learning rate, and everything else from `optimizer.arguments`.

Schedule-free optimizers have two modes: gradients are computed at other weights than those to evaluate and to save.
`evaluation_weights` switches between them, and restores the training weights bit for bit. Refused: what such an
optimizer does itself (train.ema_decay); and, in `combinations.py`, optimizers that FSDP2 would change.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import OptimizerConfig
from qwen_train.model.combinations import import_path, is_update_fused
from qwen_train.training.rounding import with_rounding
from qwen_train.training.start import not_importable

ADAM = ("betas", "weight_decay", "eps")
SETTINGS = {"adamw": ADAM, "adamw8bit": ADAM, "adafactor": ("weight_decay",), "prodigy": ADAM}
TORCH = "2.13"
"""The oldest torch whose operations on lists of tensors all take weights in parts: an older one lacks `lerp`."""
DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
"""Learning rate schedules that fall towards the last step."""


def make_optimizer(config: Config, parameters: Sequence[torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and its learning rate schedule; ConfigError for settings that it does not take."""
    o, s = config.optimizer, config.lr_scheduler
    cls = optimizer_class(config)
    arguments = {"lr": o.learning_rate, **_settings(o), **o.arguments}
    if is_update_fused(config, parameters[0].device):
        arguments["fused"] = True
    if config.train.stochastic_rounding:
        cls = with_rounding(cls, config.train.seed)
    is_old = TorchVersion(torch.__version__) < TORCH and not cls.__module__.startswith("torch.")
    if is_old and isinstance(parameters[0], DTensor) and "foreach" in inspect.signature(cls).parameters:
        arguments.setdefault("foreach", False)
    try:
        with redirect_stdout(sys.stderr):  # some print what they chose
            optimizer = cls(parameters, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
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
    if any(map(has_tensor_rate, optimizer.param_groups)):
        apply_settings(config, optimizer, lr_scheduler)  # so that the schedule computes with numbers, as after a resume
    return optimizer, lr_scheduler


def apply_settings(config: Config, optimizer: Any, lr_scheduler: Any) -> None:
    """Apply the current settings to an optimizer and a schedule loaded from a checkpoint, at their step."""
    o = config.optimizer
    settings = {**_settings(o), **o.arguments}
    lr_scheduler.base_lrs = [o.learning_rate] * len(optimizer.param_groups)
    factors = [factor(lr_scheduler.last_epoch) for factor in lr_scheduler.lr_lambdas]
    for group, factor in zip(optimizer.param_groups, factors, strict=True):
        group.update({name: value for name, value in settings.items() if name in group})
        rate = o.learning_rate * factor
        group |= {"initial_lr": o.learning_rate, "lr": group["lr"].fill_(rate) if has_tensor_rate(group) else rate}
    lr_scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def has_tensor_rate(group: dict[str, Any]) -> bool:
    """True if the learning rate is a tensor, as torchao's optimizers need it."""
    return isinstance(group["lr"], Tensor)


def optimizer_class(config: Config) -> type[torch.optim.Optimizer]:
    """The optimizer class of the settings; ConfigError if there is none, or if it cannot be combined with others."""
    name, path = config.optimizer.name, import_path(config)
    module, _, attribute = path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise not_importable(name, path, error) from None
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            "optimizer.name: not an optimizer",
            where=path,
            expected="a subclass of torch.optim.Optimizer",
            found=type(cls).__name__ if cls is not None else f"no {attribute} in {module}",
        )
    if config.train.ema_decay and has_two_modes(cls):
        raise ConfigError(
            f"{name} averages the weights itself",
            found=f"train.ema_decay={config.train.ema_decay}",
            do="set train.ema_decay=0",
        )
    return cls


# ---- optimizers with two modes ---------------------------------------------------------------------------------------


def has_two_modes(optimizer: Any) -> bool:
    """True if an optimizer, or its class, has `train` and `eval`: schedule-free ones do."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper always has them
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def trained_parameters(optimizer: Any) -> list[Tensor]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def evaluation_weights(optimizer: Any) -> Iterator[None]:
    """The weights to evaluate and to save, while entered; those to compute gradients at on exit, bit for bit.

    The optimizer computes one from the other, which rounds. So the training weights are kept, in host memory: a run is
    then the same however often it is evaluated or saved.
    """
    if not has_two_modes(optimizer):
        yield
        return
    local = [each.to_local() if isinstance(each, DTensor) else each for each in trained_parameters(optimizer)]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in local]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for tensor, value in zip(local, kept, strict=True):
                tensor.copy_(value)


def schedule_warning(config: Config, optimizer: Any) -> str | None:
    """That a decaying learning rate is not meant for this optimizer, in one line; None if all is well."""
    if config.lr_scheduler.name not in DECAYING or not has_two_modes(optimizer):
        return None
    return (
        f"warning: {config.optimizer.name} is made for a constant learning rate, because it averages the weights: "
        f"set lr_scheduler.name=constant (it is {config.lr_scheduler.name})"
    )


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
