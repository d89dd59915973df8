"""A run before its first step, with an update in its LoRA, and the stock transformer with a copy of it as the judge."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import set_peft_model_state_dict
from torch import Tensor

from qwen_train import train as training
from qwen_train.lora.adapter import lora_weights

from .runs import Trainer

TARGETS = ["to_q", "to_v"]


def prepared(train: Trainer, **changes: Any) -> training.Prepared:
    """A run before its first step, with an update in its LoRA."""
    p = train.prepared(train__lora__target_modules=TARGETS, **changes)
    torch.manual_seed(2)
    for tensor in lora_weights(p.run.transformer).values():
        tensor.data.copy_(torch.randn_like(tensor) / 8)
    return p


def stock_of(p: training.Prepared, folder: Path, kind: Any) -> Any:
    """The stock transformer with a copy of the LoRA."""
    stock = kind.from_pretrained(folder)
    stock.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=TARGETS))
    set_peft_model_state_dict(stock, {n: t.detach().clone() for n, t in lora_weights(p.run.transformer).items()})
    return stock


def velocity_20b(stock: Any, sample: Any, text: Tensor, target: Tensor, sigma: float) -> Tensor:
    controls = [sample["control_latents"]] if "control_latents" in sample else []
    output: Tensor = stock(
        hidden_states=torch.cat([target, *controls])[None],
        encoder_hidden_states=text[None],
        timestep=torch.tensor([sigma]),
        img_shapes=[list(sample.img_shapes)],
        return_dict=False,
    )[0][0, : len(target)]
    return output


def with_fault(function: Any, old: str, new: str) -> Any:
    """The function with `new` in place of `old` in its source."""
    source = inspect.getsource(function)
    assert source.count(old) == 1
    names = dict(vars(sys.modules[function.__module__]))
    exec(dedent(source.replace(old, new)), names)
    return names[function.__name__]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
