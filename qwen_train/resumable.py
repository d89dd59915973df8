"""Whether a checkpoint can be resumed with these settings, without torch.

A checkpoint is resumed only with the cache, the transformer and the settings that decide what has been trained so far.
One message names all differences, and the command that continues the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen_cache.batching import sequence_settings
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.settings.sections import LoraConfig
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.storage.remembered import file_digest
from qwen_cache.text import parse_json
from qwen_train.data.commits import TakenIn
from qwen_train.run_folder import STATE
from qwen_train.run_settings import resume_command
from qwen_train.start import Start

TRANSFORMER = "transformer"
"""The entry of a checkpoint with the hash of the frozen weights."""
CACHE = "cache"
"""The entry with the identity of the cache."""
ASSISTANT_LORA = "assistant LoRA"
"""The entry with the hash and the weight of `train.assistant_lora`; absent without one."""
DERIVED = ("train.layout", "train.drop_last", "train.bucketing_window")
"""Batch settings that have no effect, and are None, if batches are single samples or packed."""
NEW_RUN = "start a new run with another --out"
CONTENT = {
    CACHE: ("cache.path", "cache.recipe", "train.caches"),
    TRANSFORMER: ("model.path", "model.revision", "model.transformer"),
    ASSISTANT_LORA: ("train.assistant_lora",),
}
"""The settings that name what is compared by content."""
BELONGING = {"optimizer.name": "optimizer.", "train.method": "train.lora.", TRANSFORMER: "model."}
"""The prefix of the settings that make sense only with the same value of this one."""


# ---- the settings in a checkpoint ------------------------------------------------------------------------------------


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint, under the checkpoint's names."""
    t = config.train
    fixed: dict[str, Any] = {"model.quantization": config.model.quantization, "seed": t.seed, "train.method": t.method}
    if t.method == "lora":
        fixed["lora"] = _lora_settings(t.lora)
    if t.stochastic_rounding:
        fixed["train.stochastic_rounding"] = True
    if t.follow:
        fixed["train.follow"] = True
    return fixed | {
        "optimizer.name": config.optimizer.name,
        "train.ema_decay": t.ema_decay,
        **sequence_settings(t),
    }


def check_fixed(
    path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], do: str, models: tuple[str, str]
) -> None:
    """TrainError that names every difference between the checkpoint at `path` and this run.

    `models`: the names of both models, to show beside the hash of the transformer.
    """
    names = differences(saved, current)
    if not names:
        return
    was, now = by_setting(saved), by_setting(current)
    if TRANSFORMER in names:
        for side, model in ((was, models[0]), (now, models[1])):
            side[TRANSFORMER] = f"{model}, xxh3-128 {side.get(TRANSFORMER)}"
    raise TrainError(
        f"this checkpoint was trained with another {', '.join(names)}, so it cannot be resumed",
        where=path / STATE,
        expected=_listed(was, names),
        found=_listed(now, names),
        do=do,
    )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The settings that differ, without those that differ only because of another one.

    The settings of a LoRA follow from train.method, what is compared of a cache from train.follow; a setting without
    effect on one side follows from another one.
    """
    was, now = by_setting(saved), by_setting(current)
    names = [name for name in was | now if was.get(name) != now.get(name)]
    names = [name for name in names if not (name.startswith("train.lora.") and "train.method" in names)]
    names = [name for name in names if not (name == CACHE and "train.follow" in names)]
    both = [name for name in names if not (name in DERIVED and None in (was.get(name), now.get(name)))]
    return both or names


def by_setting(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint, under the names of settings; one that was written without a setting of
    `train.lora` was trained with its default."""
    names = {"seed": "train.seed"}
    values = {names.get(name, name): value for name, value in fixed.items() if name != "lora"}
    lora = fixed.get("lora")
    if not isinstance(lora, dict):
        return values
    return values | {f"train.lora.{name}": value for name, value in (_lora_settings(LoraConfig()) | lora).items()}


def _lora_settings(lora: LoraConfig) -> dict[str, Any]:
    return lora.model_dump(mode="json", exclude={"weights"})


def _listed(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """The values of these settings as text; a single one without its name."""
    shown = {name: "none, or without effect" if (v := values.get(name)) is None else str(v) for name in names}
    return ", ".join(f"{name} {text}" for name, text in shown.items()) if len(names) > 1 else shown[names[0]]


# ---- the checkpoint of a run that starts -----------------------------------------------------------------------------


def check_resumable(start: Start) -> None:
    """TrainError if the checkpoint belongs to another cache, transformer or settings.

    A damaged checkpoint passes: `load_checkpoint`, which compares all its files with their checksums, refuses it.
    """
    if start.newest is None or (state := _whole_state(start.newest)) is None:
        return
    saved, current = state["fixed"], fixed_settings(start.config)
    current |= {CACHE: start.cache_identity} if start.cache_identity else {}
    current |= {TRANSFORMER: start.weights} if start.weights else {}
    current |= {ASSISTANT_LORA: start.assistant_hash} if start.assistant_hash else {}
    unknown = {CACHE, TRANSFORMER} if start.weights else {CACHE, TRANSFORMER, ASSISTANT_LORA}
    for name in unknown - current.keys():  # not known yet
        saved.pop(name, None)
    if start.config.train.layout == "auto":  # that of the checkpoint
        current["train.layout"] = saved.get("train.layout")
    if differences(saved, current):
        file = start.model.transformer
        models = state["model"], " with ".join(filter(None, (start.model.public_name, file and Path(file).name)))
        check_fixed(start.newest, saved, current, _advice(start, saved, current), models)


def _whole_state(checkpoint: Path) -> dict[str, Any] | None:
    """The compared entries of state.json; None if its checksum is wrong or they are missing."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = parse_json(read_file(checkpoint / CHECKSUMS))["files"][STATE]["xxh3_128"]
        state = parse_json(read_file(checkpoint / STATE))
        if listed == file_digest(checkpoint / STATE):
            origin = state["origin"]
            named = filter(None, (origin["model"], origin.get("transformer")))
            taken = tuple(map(TakenIn.of, state.get("commits", ())))
            return {"fixed": dict(state["fixed"]), "model": " with ".join(named), "taken": taken}
    return None


def taken_of(checkpoint: Path) -> tuple[TakenIn, ...]:
    """The commits that a run with `train.follow` had taken in; none of a damaged checkpoint."""
    state = _whole_state(checkpoint)
    return tuple(state["taken"]) if state else ()


def _advice(start: Start, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What to do about these differences: the command that continues, with the changes that are possible."""
    refused = differences(saved, current)
    now, own = start.config.flat(), _own_settings(start.out)
    was = own.flat() if own else {}
    for name, settings in CONTENT.items():
        if name in refused and all(was.get(each) == now[each] for each in settings):
            return f"restore the {name}, whose content has changed, or {NEW_RUN}"
    dropped = {"train.output_dir", "train.layout", *refused, *(each for n in refused for each in CONTENT.get(n, ()))}
    beginnings = tuple(BELONGING[name] for name in refused if name in BELONGING)
    changes = {
        name: value
        for name, value in now.items()
        if was.get(name) != value and name not in dropped and not (beginnings and name.startswith(beginnings))
    }
    before = differences(saved, fixed_settings(own)) if own else refused
    expected = by_setting(saved)
    changes |= {name: expected.get(name) for name in refused if name in before and name in now}
    command = resume_command(start.out, start.launch, changes, start.to_encode)
    return f"`{command}` continues the run; or {NEW_RUN}"


def _own_settings(out: Path) -> Config | None:
    with suppress(ConfigError):
        return load_config(out / CONFIG_NAME)
    return None
