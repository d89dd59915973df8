"""The types of adapters, without torch: their names in files and messages, and what they cannot be combined with.

    lora   ΔW = alpha / r · B A (arXiv 2106.09685)
    lokr   ΔW = alpha / r · W1 ⊗ W2, either of them a product of two matrices (LyCORIS, arXiv 2309.14859)
    loha   ΔW = alpha / r · (W1a W1b) ⊙ (W2a W2b) (FedPara, arXiv 2108.06098)
    oft    W' = W Rᵀ, with R block-diagonal and orthogonal (arXiv 2306.07280); no rank and no scale

All are peft's. Refused: a quantised base whose packed weights have lost their shape, and OFT under FSDP2.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import LoraConfig


@dataclass(frozen=True)
class AdapterType:
    title: str
    """The name in messages."""
    prefix: str
    """What the names of its tensors begin with, after the module and a dot."""
    function: tuple[str, ...]
    """peft's settings that decide, beside the shapes of the tensors, which function they are."""

    @property
    def name(self) -> str:
        """In `train.lora.type`."""
        return self.title.lower()

    @property
    def peft_type(self) -> str:
        return self.title.upper()


PATTERNS = ("rank_pattern", "alpha_pattern")
LORA = AdapterType("LoRA", "lora_", ("r", "lora_alpha", "use_rslora", "use_dora", *PATTERNS))
LOKR = AdapterType("LoKr", "lokr_", ("r", "alpha", *PATTERNS))
LOHA = AdapterType("LoHa", "hada_", ("r", "alpha", *PATTERNS))
OFT = AdapterType("OFT", "oft_", ("oft_block_size", "coft", "eps", "use_cayley_neumann"))
TYPES = {each.name: each for each in (LORA, LOKR, LOHA, OFT)}
"""By their name in `train.lora.type`."""


def adapter_title(lora: LoraConfig) -> str:
    """The adapter in words, as `LoRA of rank 16`; an article fits before it."""
    title, others = TYPES[lora.type].title, sorted(set(lora.rank_pattern.values()) - {lora.rank})
    if lora.type == OFT.name:
        return f"block-diagonal {title} of {lora.oft_block_size} inputs"
    return f"{title} of rank {lora.rank}" + "".join(f", {rank}" for rank in others)


def type_of(settings: Mapping[str, Any]) -> AdapterType:
    """The type by peft's settings; LoRA where they have none, and ValueError for another of peft's types."""
    name = settings.get("peft_type", LORA.peft_type)
    found = [each for each in TYPES.values() if each.peft_type == name]  # peft's own value is an enum of strings
    if not found:
        raise ValueError(f"an adapter of type {name} is none of {', '.join(each.title for each in TYPES.values())}")
    return found[0]


def type_of_names(names: Iterable[str]) -> AdapterType:
    """The type by the names of its tensors; LoRA where no other type is recognised."""
    for name in names:
        for each in TYPES.values():
            if f".{each.prefix}" in name:
                return each
    return LORA


def check_adapter(config: Config, transformer: Mapping[str, Any]) -> None:
    """Raise ConfigError if the adapter of `train.lora` cannot be trained with these settings on this config.json."""
    settings = config.train
    if settings.method != "lora":
        return
    title = TYPES[settings.lora.type].title
    do = "set train.lora.type=lora, or model.quantization to int8 or fp8 with the unquantised model"
    check_base(TYPES[settings.lora.type], config.model.quantization, transformer, "train.lora.type", do)
    if settings.lora.type == "oft" and settings.fsdp:
        raise ConfigError(
            f"{title} rotates in float32, and train.fsdp gathers its weights in bfloat16",
            where="train.lora.type",
            do="set train.fsdp=false, or another train.lora.type",
        )


def check_base(
    kind: AdapterType, quantization: str, transformer: Mapping[str, Any], where: Path | str, do: str
) -> None:
    """Raise ConfigError if an adapter of this type cannot be added to weights with this quantisation."""
    if kind in (LOKR, LOHA) and (packed := _packed(quantization, transformer)):
        what = f"a {kind.title} needs the shape of each weight, which packed weights have lost"
        raise ConfigError(what, where=where, found=packed, do=do)


def _packed(quantization: str, transformer: Mapping[str, Any]) -> str | None:
    """Which weights are packed, in words; None if none are."""
    saved = transformer.get("quantization_config") or {}
    if quantization == "nf4":
        return "model.quantization=nf4"
    if saved.get("quant_method") == "gguf":
        return "GGUF weights"
    return "4-bit weights in config.json" if '"load_in_4bit": true' in json.dumps(saved) else None
