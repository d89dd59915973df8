"""The output folder of a run: its lock, settings and checkpoints, without torch.

A second run in the folder is refused while the first one trains. A checkpoint is resumed only with the settings that
decide what has been trained so far; one message names all differences, and the command that continues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from qwen_cache.batching.batch_plan import sequence_settings
from qwen_cache.console import console
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, RENAMED, Config, load_config
from qwen_cache.settings.train import LoraConfig
from qwen_cache.settings.yaml_text import assignment, parse_yaml, read_yaml
from qwen_cache.storage.durable import LockHeldError, NoLocksError, locked, make_folder
from qwen_train.launch import Launch, copies_advice

LOCK = ".lock"
METRICS_NAME = "metrics.jsonl"
TIMES = ("time", "elapsed_seconds")
"""The entries of a line that are not metrics."""
LOSS = "validation_loss"
LEVELS = 4
"""Noise levels of a sample in validation: one in each quarter of 0..1."""
LOSSES = tuple(f"{LOSS}_q{i + 1}" for i in range(LEVELS))
"""The loss in each quarter, from little noise to much, as metrics.jsonl has it."""
NAME = re.compile(r"checkpoint-(\d+)")
STATE = "state.json"
TRANSFORMER = "transformer"
"""The entry of a checkpoint with the hash of the frozen weights."""
CACHE = "cache"
"""The entry with the identity of the cache."""
ASSISTANT_LORA = "assistant LoRA"
"""The entry with the hash and the weight of `train.assistant_lora`; absent without one."""
DERIVED = ("train.layout", "train.drop_last", "train.bucketing_window")
"""Batch settings that have no effect, and are None, if batches are single samples or packed."""
NEW_RUN = "start a new run with another --out"


# ---- the lock --------------------------------------------------------------------------------------------------------


@contextmanager
def only_run(out: Path, launch: Launch) -> Iterator[None]:
    """Keep other runs out of the output folder until the end of the block, by a lock that the main process holds.

    Raises TrainError in that process if another run has the lock, OSError if the folder cannot be made. Where files
    cannot be locked the run goes ahead, with a warning: all its files are written whole and checked when read, so a
    second run costs time but cannot mix up a checkpoint. A new folder that is still empty at the end is removed.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError("not a folder", where=out, do="name another with --out")
    if (out / MANIFEST_NAME).exists():
        raise ConfigError("this folder is a cache", where=out, do="name another with --out")
    with ExitStack() as held:
        if launch.is_main:
            _lock(out, held)
        yield


def _lock(out: Path, held: ExitStack) -> None:
    is_new = not out.exists()
    make_folder(out)
    if is_new:
        held.callback(_remove_empty, out)
    try:
        held.enter_context(locked(out / LOCK, remove=True))
    except LockHeldError as error:
        do = copies_advice() or "wait for it, or stop it first; or name another folder with --out"
        raise TrainError("another run is writing to this folder", where=out, found=error.holder, do=do) from None
    except NoLocksError as error:
        (out / LOCK).unlink(missing_ok=True)
        text = f"warning: {out}: files cannot be locked here ({error.strerror}): start no second run in it"
        console().print(text, style="yellow", markup=False)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


# ---- settings --------------------------------------------------------------------------------------------------------


def run_settings(
    path: Path | None, assignments: Sequence[str] | None, given: Iterable[Given | None], *, resume: bool
) -> tuple[Config, Config]:
    """The settings of a run, and those that the command would have without `resume`.

    A resumed run takes the qwen.yaml of its own folder, overridden by what `path`, `assignments` and `given` set. The
    qwen.yaml of the working directory is ignored. Raises ConfigError.
    """
    named = [each for each in given if each is not None]
    fresh = load_config(path, assignments, named)
    own = Path(fresh.train.output_dir) / CONFIG_NAME
    if not resume or not own.is_file():
        return fresh, fresh
    try:
        load_config(own)
    except ConfigError as error:
        do = "correct it; or remove it, and give the run's settings again"
        raise ConfigError(error.what, where=own, expected=error.expected, found=error.found, do=do) from None
    names = {"train.output_dir"} | {each.key for each in named}
    names |= _names(read_yaml(path)) if path else set()
    for name, _, text in (each.partition("=") for each in assignments or ()):
        names |= {name.strip(), *_names(parse_yaml(text), f"{name.strip()}.")}
    values = fresh.flat()
    return load_config(own, [assignment(name, values[name]) for name in _among(values, names)]), fresh


def named_in(path: Path, settings: Iterable[str]) -> list[str]:
    """Those of the dotted names of settings that a settings file has. ConfigError if it is not YAML."""
    return _among(settings, _names(read_yaml(path)))


def _among(settings: Iterable[str], names: Iterable[str]) -> list[str]:
    """The settings that are named; a name inside one, as in optimizer.arguments, names the whole."""
    new = {RENAMED.get(name, name) for name in names}
    return [name for name in settings if any(f"{each}.".startswith(f"{name}.") for each in new)]


def _names(value: object, prefix: str = "") -> set[str]:
    """The dotted names in nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {f"{prefix}{name}" for name in value}.union(*(_names(v, f"{prefix}{n}.") for n, v in value.items()))


def resume_command(
    out: Path, launch: Launch, changes: Mapping[str, Any] | None = None, source: str | None = None
) -> str:
    """The command line that continues the run in `out` with its own settings and these `changes`."""
    arguments = ["run", *(["--encode-on-the-fly", source] if source else []), "--resume", "--out", str(out)]
    for name, value in (changes or {}).items():
        arguments += ["--set", assignment(name, value)]
    return launch.command(arguments)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete checkpoint, oldest first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint, under the checkpoint's names."""
    t = config.train
    fixed: dict[str, Any] = {"model.quantization": config.model.quantization, "seed": t.seed, "train.method": t.method}
    if t.method == "lora":
        fixed["lora"] = _lora_settings(t.lora)
    if t.stochastic_rounding:
        fixed["train.stochastic_rounding"] = True
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

    The settings of a LoRA follow from train.method; a setting without effect on one side follows from another one.
    """
    was, now = by_setting(saved), by_setting(current)
    names = [name for name in was | now if was.get(name) != now.get(name)]
    names = [name for name in names if not (name.startswith("train.lora.") and "train.method" in names)]
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
