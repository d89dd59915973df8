"""A table of another trainer's names, and what a file of its settings becomes here.

A table has for each key of theirs our setting, a function that gives several, or the reason why there is none. Nothing
is dropped silently: a value that cannot be had here is kept in `Reading.left` with its name and the reason, a key that
no table knows too. What our own settings refuse is left as well. Paths count from the working directory, as there.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.settings.load import overridden, parse_yaml
from qwen_cache.text import plain

# ---- tables ----------------------------------------------------------------------------------------------------------


class NoCounterpartError(Exception):
    """The reason why a value of theirs has no counterpart here."""


@dataclass(frozen=True)
class To:
    """Our setting for a key; `value` turns theirs into ours, or raises NoCounterpartError."""

    key: str
    value: Callable[[Any], Any] = lambda value: value


Entry = To | str | Callable[[Any], Mapping[str, Any]]
"""The meaning of a key: one setting, the reason why there is none, or a function that gives the settings. Without any,
their value is what happens here anyway."""
Table = Mapping[str, Entry]

UNKNOWN = "no table here knows this name"
ALWAYS_CACHED = "latents and embeddings are always cached, and the encoders never loaded for training"
PUSH = "`qwen-train push` uploads the result"


@dataclass(frozen=True)
class Epochs:
    """A number of steps that is given in epochs."""

    count: float


@dataclass(frozen=True)
class Share:
    """A number of steps that is given as a part of all of them."""

    part: float


# ---- values ----------------------------------------------------------------------------------------------------------


def is_on(value: Any) -> bool:
    """A truth value, also as text."""
    return value.strip().lower() in ("true", "1", "yes", "on", "y", "t") if isinstance(value, str) else bool(value)


def number(value: Any) -> float:
    """A finite number, also as text: YAML reads 1e-4 as text."""
    with suppress(TypeError, ValueError, OverflowError):
        found = float(value)
        if math.isfinite(found):
            return int(found) if found.is_integer() and not re.search("[e.]", str(value).lower()) else found
    raise NoCounterpartError("this is not a number")


def whole(value: Any) -> int:
    return int(number(value))


def one_of(names: Mapping[str, Any], why: str) -> Callable[[Any], Any]:
    """Our value for each of theirs, without regard to case; `why` for the others."""

    def value(theirs: Any) -> Any:
        if (name := str(theirs).strip().lower()) in names:
            return names[name]
        raise NoCounterpartError(why)

    return value


def only(*same: Any, why: str) -> Callable[[Any], Mapping[str, Any]]:
    """Nothing to set for values that are the same here anyway; `why` for the others."""
    names = {str(each).lower() for each in same}

    def settings(theirs: Any) -> Mapping[str, Any]:
        if str(theirs).strip().lower() in names:
            return {}
        raise NoCounterpartError(why)

    return settings


def if_on(settings: Mapping[str, Any]) -> Callable[[Any], Mapping[str, Any]]:
    """Settings for a switch that is on; off is what happens here anyway."""
    return lambda theirs: settings if is_on(theirs) else {}


def file_here(value: Any) -> str:
    """A path that exists."""
    if not Path(str(value)).exists():
        raise NoCounterpartError("this file is not there")
    return str(value)


STEP = 32  # of the sides of an image


def sides(width: float, height: float) -> list[int]:
    """The nearest sides that `data.resolution` takes."""
    return [max(STEP, round(side / STEP) * STEP) for side in (width, height)]


def epochs(value: Any) -> Epochs:
    return Epochs(number(value))


def warmup(value: Any) -> Any:
    """Steps, or below 1 a part of all steps."""
    steps = number(value)
    return Share(steps) if 0 < steps < 1 else int(steps)


OPTIMIZERS = {each: each for each in ("adamw", "adamw8bit", "adafactor", "prodigy")}
SCHEDULERS = one_of(
    {
        each: each
        for each in ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")
    },
    "lr_scheduler.name has no such schedule",
)
TRACKERS = one_of({each: each for each in ("tensorboard", "wandb", "none")}, "logging.report_to takes one tracker")


def optimizer(names: Mapping[str, str]) -> Callable[[Any], str]:
    """Our name of an optimizer; the import path of a class stays as it is."""

    def value(theirs: Any) -> str:
        name = str(theirs).strip()
        if name.lower() in names:
            return names[name.lower()]
        if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name):
            return name
        raise NoCounterpartError("optimizer.name takes adamw, adamw8bit, adafactor, prodigy or an import path")

    return value


def optimizer_arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings for an optimizer's own arguments; those without a setting are `optimizer.arguments`."""
    rest, settings = dict[str, Any](), dict[str, Any]()
    for name, value in given.items():
        if name in ("betas", "weight_decay", "eps"):
            settings[f"optimizer.{name}"] = [number(each) for each in value] if name == "betas" else number(value)
        else:
            rest[name] = value
    return settings | ({"optimizer.arguments": rest} if rest else {})


def pairs(given: Any) -> dict[str, Any]:
    """The values of `key=value`: a list of them, or one text with commas between."""
    found = {}
    for each in given.split(",") if isinstance(given, str) else given:
        name, _, text = str(each).partition("=")
        parts = text.strip("()[] ").split(",")
        found[name.strip()] = [number(part) for part in parts] if len(parts) > 1 else parse_yaml(text.strip())
    return found


# ---- the reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """A value of ours, and where it is from: `dataset.toml: general.resolution = 1024`."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Left:
    """A value of theirs that is not taken, and why."""

    name: str
    value: Any
    why: str

    @property
    def text(self) -> str:
        """The value as a file has it, shortened; of a secret nothing."""
        return "…" if SECRET.search(self.name) else shown(self.value)

    def __str__(self) -> str:
        return f"{plain(self.name)} = {self.text}: {self.why}"


SECRET = re.compile(r"token$|api_key|secret|password|access_key", re.IGNORECASE)
"""Names whose values are not shown."""


@dataclass
class Dataset:
    """A data set of the file: its folders, as the file names them, and what its samples count."""

    name: str
    targets: str
    """The folder of the targets, or a table that names them."""
    controls: list[str] = field(default_factory=list)
    mask: str | None = None
    settings: dict[str, Taken] = field(default_factory=dict)
    """Settings of `data`."""
    weight: float = 1.0
    teacher: bool = False
    loss_weight: float = 1.0
    of_weight: tuple[str, Any] | None = None
    """The name and value that the weight is from."""

    def __post_init__(self) -> None:
        if other := next((each for each in self.folders if not isinstance(each, str)), None):
            raise TypeError(f"{self.name}: a path is text, not {shown(other)}")

    @property
    def folders(self) -> list[str]:
        return [each for each in (self.targets, *self.controls, self.mask) if each]

    def source(self) -> dict[str, Any]:
        """`data.source` and the folders in it: the folder that all of them are in."""
        if len(self.folders) == 1:
            return {"data.source": self.targets}
        is_mixed = len({os.path.isabs(each) for each in self.folders}) > 1
        paths = [os.path.abspath(each) if is_mixed else os.path.normpath(each) for each in self.folders]
        above = os.path.commonpath(paths) or "."
        inside = [Path(os.path.relpath(each, above)).as_posix() for each in paths]
        controls = inside[1 : 1 + len(self.controls)]
        columns: dict[str, Any] = {"data.columns.target": inside[0], "data.columns.control": controls}
        if self.mask:
            columns["data.columns.mask"] = inside[-1]
        return {"data.source": above, **columns}

    def entry(self, path: str) -> dict[str, Any]:
        """Its entry in `train.caches`."""
        given = {"weight": self.weight, "teacher": self.teacher, "loss_weight": self.loss_weight}
        defaults = {"weight": 1.0, "teacher": False, "loss_weight": 1.0}
        return {"path": path} | {name: value for name, value in given.items() if value != defaults[name]}


OF_FOLDERS = ("data.allow_no_control", "data.columns.target", "data.columns.prompt")
"""Settings of `data` that say what is in the folders of a data set."""
OF_A_CACHE = "train.caches."
"""The beginning of the keys by which a table sets `weight`, `teacher` and `loss_weight` of its data set."""


@dataclass
class Reading:
    """The content of a file of settings, as ours."""

    trainer: str
    file: Path
    settings: dict[str, Taken] = field(default_factory=dict)
    later: dict[str, Taken] = field(default_factory=dict)
    """Numbers of steps that are known when the samples are counted: `Epochs` and `Share`."""
    left: list[Left] = field(default_factory=list)
    same: list[str] = field(default_factory=list)
    """Names whose values are what happens here anyway."""
    datasets: list[Dataset] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Data sets that cannot be read here, of videos or in another place."""
    within: Path | None = None
    """The file that is being read, where `file` names another."""

    def take(self, table: Table, given: Mapping[str, Any], start: str = "", dataset: Dataset | None = None) -> None:
        """Take what the table knows of `given`, whose names begin with `start` in the file; leave the rest."""
        for name, value in given.items():
            if value is None:
                continue
            entry = table.get(name, UNKNOWN)
            if isinstance(entry, str):
                if entry != UNKNOWN and str(value).lower() == "false":
                    self.same.append(start + name)
                else:
                    self.left.append(Left(start + name, value, entry))
                continue
            try:
                found = {entry.key: entry.value(value)} if isinstance(entry, To) else entry(value)
            except NoCounterpartError as error:
                self.left.append(Left(start + name, value, str(error)))
                continue
            except (TypeError, ValueError, AttributeError, LookupError):
                self.left.append(Left(start + name, value, "this is not what that trainer takes"))
                continue
            if not found:
                self.same.append(start + name)
            for key, ours in found.items():
                self.set(key, ours, start + name, value, dataset)

    def set(self, key: str, ours: Any, name: str, theirs: Any, dataset: Dataset | None = None) -> None:
        """Set one of ours from `name` of theirs; what is no setting of a data set is that of the first."""
        taken = Taken(ours, f"{(self.within or self.file).name}: {name} = {shown(theirs)}")
        if dataset is not None and key.startswith(OF_A_CACHE):
            setattr(dataset, key.removeprefix(OF_A_CACHE), ours)
            if key == f"{OF_A_CACHE}weight":
                dataset.of_weight = name, theirs
            return
        if isinstance(ours, (Epochs, Share)):
            self.settings.pop(key, None)
            self.later[key] = taken
            return
        values = dataset.settings if dataset is not None and key.startswith("data.") else self.settings
        known = values.get(key)
        if dataset is not None and values is self.settings and known is not None and known.value != ours:
            self.left.append(Left(name, theirs, f"{key} is one for all data sets: {known.origin}"))
            return
        values[key] = taken
        self.later.pop(key, None)

    def default(self, key: str, ours: Any, name: str) -> None:
        """Set what that trainer does if its file does not say, where we do something else."""
        if key not in self.settings and key not in self.later:
            self.settings[key] = Taken(ours, f"The default of {self.trainer}'s {name}")

    def leave(self, name: str, value: Any, why: str) -> None:
        self.left.append(Left(name, value, why))

    def skip(self, name: str, value: Any, why: str) -> None:
        """Leave a data set."""
        self.leave(name, value, why)
        self.skipped.append(name)

    def drop_data(self) -> None:
        """Leave the folders of all data sets, for another source; how the first is read stays."""
        for dataset in self.datasets:
            self.leave(dataset.name, dataset.targets, "the source is given on the command line")
        if self.datasets:
            self.settings |= {key: each for key, each in self.datasets[0].settings.items() if key not in OF_FOLDERS}
        self.datasets = []

    def check(self) -> None:
        """Leave what our own settings refuse, each or together with those before it, and the weight of all there is."""
        if len(self.datasets) == 1 and self.datasets[0].weight != 1 and self.datasets[0].of_weight:
            name, value = self.datasets[0].of_weight
            self.left.append(Left(name, value, "of one data set, it only makes an epoch longer; steps count here"))
        self.settings = self._valid(self.settings)
        for dataset in self.datasets:
            if any(each.controls for each in self.datasets) and not dataset.controls and Path(dataset.targets).is_dir():
                taken = Taken(True, f"{self.file.name}: {dataset.name} has no controls")
                dataset.settings["data.allow_no_control"] = taken
            dataset.settings = self._valid(dataset.settings)

    def _valid(self, settings: Mapping[str, Taken]) -> dict[str, Taken]:
        valid = dict[str, Taken]()
        for key, taken in settings.items():
            try:
                overridden(nested({**valid, key: taken}), str(self.file))
            except ConfigError as error:
                name, _, value = taken.origin.partition(": ")[2].partition(" = ")
                why = error.fault.removeprefix(f"{key}: ")
                self.left.append(Left(name, value, f"{key} does not take it: {why}"))
                continue
            valid[key] = taken
        return valid

    def check_folders(self) -> None:
        """SourceError for a folder or table of a data set that does not exist, and if no data set can be read."""
        if self.skipped and not self.datasets:
            what, do = (
                "no data set of this file can be read here",
                "name the data: `qwen-cache init SOURCE --from FILE`",
            )
            raise SourceError(what, where=self.file, found="; ".join(map(str, self.left[:3])), do=do)
        for dataset in self.datasets:
            for path in dataset.folders:
                if "://" not in path and not Path(path).exists():
                    above = next((each for each in self.file.absolute().parents if (each / path).exists()), None)
                    do = f"run this command where {self.trainer} runs"
                    do += f": `cd {above}`" if above else ", or name the data: `qwen-cache init SOURCE --from FILE`"
                    what = f"{dataset.name} names a path that does not exist from here"
                    raise SourceError(what, where=self.file, found=path, do=do)


def nested(settings: Mapping[str, Taken]) -> dict[str, Any]:
    """Settings by their dotted names, as a settings file has them."""
    found = dict[str, Any]()
    for key, taken in settings.items():
        section = found
        *around, last = key.split(".")
        for part in around:
            section = section.setdefault(part, {})
        section[last] = copy.deepcopy(taken.value)
    return found


MOST_SHOWN = 60  # characters of a value


def shown(value: Any) -> str:
    """A value as a file has it, shortened."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return plain(text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…")


def flat(value: Mapping[str, Any], start: str = "", stop: Sequence[str] = ()) -> dict[str, Any]:
    """Nested keys by their dotted names; those of `stop` keep their values whole."""
    found = dict[str, Any]()
    for name, inner in value.items():
        key = f"{start}{name}"
        if isinstance(inner, Mapping) and key not in stop:
            found |= flat(inner, f"{key}.", stop)
        else:
            found[key] = inner
    return found


# ---- prompts ---------------------------------------------------------------------------------------------------------

FIELDS = {"w": "width", "h": "height", "d": "seed", "seed": "seed", "ci": "control", "ctrl_img": "control"}
"""The flags behind a prompt that kohya's trainers and those after them read, and ours."""
OF_ALL = {
    **dict.fromkeys(("s", "steps"), "validation.num_inference_steps is one for all prompts"),
    **dict.fromkeys(("l", "cfg"), "validation.true_cfg_scale is one for all prompts"),
    **dict.fromkeys(("n", "neg"), "images are guided against the sample's own empty prompt"),
}


def prompt_of(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """A prompt with flags as an entry of `validation.prompts`, and the flags that it does not take."""
    prompt, *flags = re.split(r"(?:^|\s)--(?=[a-zA-Z_])", text)
    entry: dict[str, Any] = {"prompt": prompt.strip()}
    others = dict[str, str]()
    for each in flags:
        name, _, value = each.strip().partition(" ")
        field_name, value = FIELDS.get(name.lower()), value.strip()
        if field_name == "control":
            entry.setdefault("control", []).append(value)
        elif field_name and value.isdecimal():
            entry[field_name] = int(value)
        else:
            others[name] = value
    return entry, others


def take_prompts(reading: Reading, name: str, entries: Iterable[tuple[dict[str, Any], dict[str, str]]]) -> None:
    """Set `validation.prompts`, without those that `build` could not read, and leave their flags."""
    kept, flags = list[dict[str, Any]](), dict[str, str]()
    for entry, others in entries:
        flags |= others
        missing = [each for each in entry.get("control", []) if "://" not in each and not Path(each).is_file()]
        if missing:
            reading.leave(name, entry["prompt"], f"its control image does not exist: {missing[0]}")
        elif not entry["prompt"]:
            reading.leave(name, entry, "it has no prompt")
        else:
            if ("width" in entry) != ("height" in entry):
                flags |= {side: str(entry.pop(side)) for side in ("width", "height") if side in entry}
            kept.append(entry)
    for flag, value in flags.items():
        reading.leave(f"{name} --{flag}", value, OF_ALL.get(flag, "validation.prompts has no such setting"))
    if kept:
        reading.set("validation.prompts", kept, name, f"{len(kept)} prompt{'s' * (len(kept) != 1)}")
