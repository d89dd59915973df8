"""The optimizers by name, their packages, and what they cannot be combined with, without torch.

Refused: a name that is no import path, and a package that is not installed. That the class exists, and is an optimizer,
is checked once it is imported (`optimizers`).
"""

from __future__ import annotations

from importlib.util import find_spec

from qwen_cache.errors import ConfigError
from qwen_cache.extras import install_command
from qwen_cache.settings.load import Config

CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
}
ROUNDING = {"adamw": "torchao.optim._AdamW", "adamw8bit": "torchao.optim.AdamW8bit"}
"""The classes for train.stochastic_rounding."""
EXTRAS = {
    "bitsandbytes": "quantization",
    "torchao": "quantization",
    "prodigyopt": "prodigy",
    "prodigyplus": "optimizers",
    "pytorch_optimizer": "optimizers",
    "schedulefree": "optimizers",
}
"""Extras of this package, by the module that they install."""


def check_optimizer(config: Config, processes: int) -> None:
    """ConfigError for an optimizer whose package is missing, and for stochastic rounding where it cannot work."""
    if config.train.stochastic_rounding:
        _check_rounding(config, processes)
    path = import_path(config)
    package = path.partition(".")[0]
    if find_spec(package) is None:
        raise not_importable(config.optimizer.name, path, f"No module named {package!r}")


def import_path(config: Config) -> str:
    """The import path of the optimizer's class; ConfigError for a name that is none."""
    name = config.optimizer.name
    path = (ROUNDING if config.train.stochastic_rounding else CLASSES).get(name, name)
    if "." not in path.strip("."):
        names = ", ".join(CLASSES)
        raise ConfigError("optimizer.name: no such optimizer", expected=f"{names} or an import path", found=name)
    return path


def not_importable(name: str, path: str, reason: object) -> ConfigError:
    """The error for a class that cannot be imported, with the command that installs its package."""
    extra = EXTRAS.get(path.partition(".")[0])
    do = install_command(extra) if extra else "install its package, or correct optimizer.name"
    return ConfigError(f"the optimizer {name} cannot be imported: {reason}", do=do)


def _check_rounding(config: Config, processes: int) -> None:
    t, name = config.train, config.optimizer.name
    refused = {
        "train.method=lora": (t.method == "lora", "a LoRA is small: its weights stay in float32"),
        f"train.mixed_precision={t.mixed_precision}": (t.mixed_precision != "bf16", "the weights are in bfloat16"),
        f"optimizer.name={name}": (name not in ROUNDING, f"only {' and '.join(ROUNDING)} round so, by torchao"),
        f"train.ema_decay={t.ema_decay}": (t.ema_decay > 0, "an average in bfloat16 would round its updates away"),
        f"{processes} processes": (processes > 1, "each would round its copy of the weights differently"),
    }
    for found, (applies, reason) in refused.items():
        if applies:
            raise ConfigError(
                f"train.stochastic_rounding cannot be combined with {found}: {reason}",
                do="set train.stochastic_rounding=false, or change that",
            )
