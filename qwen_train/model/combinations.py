"""Settings that go together, and with which transformer: what is refused or chosen before torch is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.models.family import FAMILIES, QWEN_IMAGE_21
from qwen_cache.models.hardware import Kind, is_accelerator_name
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.settings.sections import TrainConfig

# ---- all of them -----------------------------------------------------------------------------------------------------


def check_combination(config: Config, transformer: Mapping[str, Any], processes: int = 1) -> None:
    """Raise ConfigError or ModelError for settings that cannot be combined in a run of `processes` processes, or that a
    transformer with this config.json cannot take."""
    check_offload(config, transformer)
    if config.train.tabulated_modulation:
        check_tabulation(config.train, transformer)
    check_sharding(config, transformer, processes)


# ---- classes ---------------------------------------------------------------------------------------------------------

STOCK_CLASSES = tuple(family.transformer for family in FAMILIES)


def class_name(config: Mapping[str, Any], where: object = "config.json") -> str:
    """The class in diffusers of a transformer with this config.json; ModelError for one that is not supported."""
    name = config.get("_class_name")
    if name not in STOCK_CLASSES:
        raise ModelError(
            "not a Qwen-Image transformer",
            where=where,
            expected=" or ".join(STOCK_CLASSES),
            found=name,
            do="name another model, with --model",
        )
    return str(name)


# ---- tabulated modulation --------------------------------------------------------------------------------------------

EMBEDDER = tuple(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2))
NO_TABLE = "set train.tabulated_modulation=false"


def columns(config: Mapping[str, Any]) -> dict[str, slice]:
    """The linear layers whose outputs form a row, in order, each with its columns."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    layers = [f"transformer_blocks.{i}.{kind}_mod.1" for i in range(config["num_layers"]) for kind in ("img", "txt")]
    parts = {name: slice(6 * width * i, 6 * width * (i + 1)) for i, name in enumerate(layers)}
    end = 6 * width * len(layers)
    return {**parts, "norm_out.linear": slice(end, end + 2 * width)}


def check_tabulation(settings: TrainConfig, config: Mapping[str, Any]) -> None:
    """Raise ConfigError or ModelError if a table cannot serve these settings and this config.json."""
    if settings.method == "full":
        raise ConfigError("train.tabulated_modulation is for frozen weights", found="train.method=full", do=NO_TABLE)
    if settings.mixed_precision != "bf16":
        raise ConfigError(
            "train.tabulated_modulation needs bfloat16: in float32 there are too many timesteps for a table",
            found=f"train.mixed_precision={settings.mixed_precision}",
            do=f"set train.mixed_precision=bf16, or {NO_TABLE}",
        )
    check_model(config)
    targets = settings.lora.target_modules
    if trained := [name for name in (*columns(config), *EMBEDDER) if _targeted(name, targets)]:
        raise ConfigError(
            "train.tabulated_modulation is for frozen weights, and the LoRA trains some of them",
            where="train.lora.target_modules",
            found=trained[0],
            do=f"name other modules, or {NO_TABLE}",
        )


def check_model(config: Mapping[str, Any]) -> None:
    """Raise ModelError if no table can be computed for a transformer with this config.json."""
    if config.get("_class_name") == QWEN_IMAGE_21.transformer:
        raise ModelError(
            f"{QWEN_IMAGE_21.name} has one modulation for all blocks, so a table would save nothing",
            do="set tabulated_modulation=false",
        )
    saved = config.get("quantization_config")
    if saved is not None and "bytes_per_weight" not in saved:  # of a folder
        do = "use the unquantised model, with model.quantization; or set tabulated_modulation=false"
        raise ModelError("the table needs unquantised weights, and this transformer was saved quantised", do=do)
    if config.get("use_additional_t_cond"):
        do = "set tabulated_modulation=false"
        raise ModelError("this transformer's modulation depends on more than the timestep", do=do)


def _targeted(name: str, targets: list[str] | str) -> bool:
    """True if peft would target this layer; peft itself refuses an invalid regular expression."""
    if not isinstance(targets, str):
        return any(name == target or name.endswith(f".{target}") for target in targets)
    with suppress(re.error):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return False


# ---- offloading ------------------------------------------------------------------------------------------------------

ALL_ON_DEVICE = "set train.offload_blocks=0"


def chooses_blocks(settings: TrainConfig) -> bool:
    """True if train.gradient_checkpointing=auto chooses the blocks; with offloading it recomputes all."""
    offloads = settings.offload_blocks or settings.offload_activations
    return settings.gradient_checkpointing == "auto" and not offloads


def check_offload(config: Config, transformer: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings, or a config.json, that offloading cannot be combined with."""
    settings, layers, name = config.train, transformer["num_layers"], "train.offload_blocks"
    if settings.offload_activations and not settings.gradient_checkpointing:
        raise ConfigError(
            "train.offload_activations and train.gradient_checkpointing=false exclude each other: the inputs of "
            "recomputed blocks are what is offloaded",
            do="set train.gradient_checkpointing=true, or train.offload_activations=false",
        )
    if not settings.offload_blocks:
        return
    quantised = (transformer.get("quantization_config") or {}).get("quant_method")
    if settings.offload_blocks > layers:
        raise ConfigError(
            f"{name} exceeds the number of blocks", expected=f"at most {layers}", found=settings.offload_blocks
        )
    excluded = {
        "train.method=full": (settings.method == "full", "trained weights stay on the device"),
        "train.fsdp=true": (settings.fsdp, "FSDP2 moves the weights itself"),
        f"{quantised} weights": (quantised == "bitsandbytes", "weights saved by bitsandbytes cannot be moved"),
    }
    for setting, (given, reason) in excluded.items():
        if given:
            raise ConfigError(
                f"{name} and {setting} exclude each other: {reason}", do=f"{ALL_ON_DEVICE}, or change the other"
            )


# ---- sharding --------------------------------------------------------------------------------------------------------


NOT_SHARDED = "train the unquantised model, with model.quantization; or set train.fsdp=false"


def check_sharding(config: Config, transformer: Mapping[str, Any], processes: int) -> None:
    """Raise ConfigError for FSDP2 with weights whose storage belongs to another library, and with an optimizer that it
    would change."""
    saved = (transformer.get("quantization_config") or {}).get("quant_method")
    if config.train.fsdp and processes > 1 and saved == "bitsandbytes":
        raise ConfigError("train.fsdp cannot shard weights saved by bitsandbytes", do=NOT_SHARDED)
    if config.train.fsdp and processes > 1 and import_path(config) not in SHARDABLE:
        what = f"{config.optimizer.name} cannot be used with train.fsdp: it is not known to train weights in parts"
        names = "adamw" if config.train.stochastic_rounding else f"adamw, {', '.join(SHARDABLE[2:])}"
        raise ConfigError(what, expected=names, do="set optimizer.name to one of these, or train.fsdp=false")


# ---- optimizer names -------------------------------------------------------------------------------------------------
# The optimizers by name, and those that train weights in parts. Refused: a name that is no import path.

CLASSES = {
    "adamw": "torch.optim.AdamW",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "adafactor": "torch.optim.Adafactor",
    "prodigy": "prodigyopt.Prodigy",
}
ROUNDING = {"adamw": "torchao.optim._AdamW", "adamw8bit": "torchao.optim.AdamW8bit"}
"""The classes for train.stochastic_rounding."""
SHARDABLE = (
    *(CLASSES["adamw"], ROUNDING["adamw"]),
    *(f"torch.optim.{name}" for name in ("Adam", "NAdam", "RMSprop", "SGD")),
    *(f"pytorch_optimizer.{name}" for name in ("AdEMAMix", "Lion")),
    *(f"schedulefree.{name}ScheduleFree" for name in ("AdamW", "RAdam", "SGD")),
)
"""The classes that train weights in parts (FSDP2) as whole ones, each tested. Of the others some have kernels that take
no parts (bitsandbytes), and some need more of a weight than a process has (Adafactor, CAME, Muon, Prodigy)."""


def import_path(config: Config) -> str:
    """The import path of the optimizer's class; ConfigError for a name that is none."""
    name = config.optimizer.name
    path = (ROUNDING if config.train.stochastic_rounding else CLASSES).get(name, name)
    if "." not in path.strip("."):
        names = ", ".join(CLASSES)
        raise ConfigError("optimizer.name: no such optimizer", expected=f"{names} or an import path", found=name)
    return path


# ---- compiled blocks -------------------------------------------------------------------------------------------------

FEWEST_STEPS = 200
"""From here on a run gains more than the minutes that compiling takes."""


def has_dropout(settings: TrainConfig) -> bool:
    """True if an adapter drops some of its values at random."""
    lora = settings.lora
    return settings.method == "lora" and any((lora.lora_dropout, lora.rank_dropout, lora.module_dropout))


def may_compile(settings: TrainConfig) -> bool:
    """True if a run with these settings compiles its blocks where the device can."""
    return settings.mixed_precision == "bf16" and settings.max_steps >= FEWEST_STEPS and not has_dropout(settings)


# ---- quantisation -------------------------------------------------------------------------------------------------


def kind_of(transformer: dict[str, Any], settings: Config) -> Kind:
    """How the frozen weights are quantised: by the settings, or by the config.json of a quantised folder; none for a
    single file, whose own sizes count."""
    saved = transformer.get("quantization_config")
    if saved is None:
        return settings.model.quantization
    if "bytes_per_weight" in saved:
        return "int8_convrot" if saved["quant_method"] == "int8_convrot" else "none"
    text = json.dumps(saved).lower()
    kinds: dict[str, Kind] = {
        '"load_in_4bit": true': "nf4",
        '"load_in_8bit": true': "int8",
        "int8": "int8",
        "float8": "fp8",
    }
    for pattern, kind in kinds.items():
        if pattern in text:
            return kind
    raise ModelError(
        "unknown quantisation: its memory cannot be predicted", where="config.json", found=saved.get("quant_method")
    )


# ---- by device -------------------------------------------------------------------------------------------------------


def with_layout(config: Config, device: object, run: Path | None = None) -> Config:
    """The configuration with a layout in place of "auto": that of the `run` to continue, else by the device.

    `device` is one of torch's, or its name.
    """
    if config.train.layout != "auto":
        return config
    chosen = "packed" if is_accelerator_name(str(device)) else "padded"
    with suppress(ConfigError):
        saved = load_saved(run / CONFIG_NAME).train.layout if run else "auto"
        chosen = chosen if saved == "auto" else saved
    return config.model_copy(update={"train": config.train.model_copy(update={"layout": chosen})})


def is_update_fused(config: Config, device: object) -> bool:
    """True if AdamW updates all weights in one kernel that needs no further memory, as it does on accelerators.

    torch's own choice is a kernel for each operation, whose results take as much memory as the weights; and for the
    weights of FSDP2 one for each operation and tensor. `optimizer.arguments` can choose these: `foreach`, `fused`.
    """
    chosen = {"foreach", "fused"} & config.optimizer.arguments.keys()
    by_torch = config.optimizer.name == "adamw" and not config.train.stochastic_rounding
    return by_torch and not chosen and is_accelerator_name(str(device))
