"""A run's folder: the names of its files and checkpoints, its lock and settings; its launch. Imports no torch."""

from __future__ import annotations

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from qwen_cache.errors import ConfigError, QwenCacheError, TrainError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config, assignment, load_config, load_saved, parse_yaml, read_yaml
from qwen_cache.settings.sections import DataConfig
from qwen_cache.storage.files import LockHeldError, NoLocksError, locked, make_folder
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.terminal import VARIABLE, console, is_verbose, set_verbosity
from qwen_cache.text import parse_json, plain, shell_line

# ---- signals ---------------------------------------------------------------------------------------------------------
# Signals: SIGINT and SIGTERM finish the step, save and stop. SIGUSR1 saves, SIGUSR2 generates the validation images;
# training continues after both.
#
# On Windows, SIGBREAK (Ctrl-Break) takes the place of SIGTERM, which no process can send there; the other two do not
# exist.

SAVE, SAMPLE = "SIGUSR1", "SIGUSR2"


class Handlers(ABC):
    """Handlers of signals while entered. Signals that the system lacks are ignored."""

    NAMES: tuple[str, ...]

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    @abstractmethod
    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Take one of the signals."""

    def __enter__(self) -> Self:
        for name in self.NAMES:
            if (number := getattr(signal, name, None)) is not None:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Signals(Handlers):
    """The first SIGINT or SIGTERM sets `stop`, a second raises KeyboardInterrupt."""

    NAMES = ("SIGINT", "SIGTERM", "SIGBREAK")

    def __init__(self) -> None:
        super().__init__()
        self.stop = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True


class Requests(Handlers):
    """SIGUSR1 asks a run to save, SIGUSR2 for images: also one that has not begun to train, which does it then."""

    NAMES = (SAVE, SAMPLE)

    def __init__(self) -> None:
        super().__init__()
        self._asked = set[int]()

    def take(self, name: str) -> bool:
        """True if this signal, by its name, has arrived since the last call."""
        number = getattr(signal, name, None)
        was_asked = number in self._asked
        self._asked.discard(number)
        return was_asked

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._asked.add(number)


# ---- launch ----------------------------------------------------------------------------------------------------------
# The processes of a run, as their launcher describes them in the environment; known before torch is loaded.
#
# torchrun and `accelerate launch` give each process its rank. Refused: a WORLD_SIZE without a launcher, since every
# process would train alone and write the same files; and a launcher for a command that runs in one process.

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COPIES = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables in which these programs give the number of independent copies of a command that they started."""


@dataclass(frozen=True)
class Launch:
    """This process among those of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Processes on this machine."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """The launch that the environment describes; ConfigError if WORLD_SIZE is set without the rest."""
        world_size = _number(environment, "WORLD_SIZE", 1)
        if world_size <= 1:
            return cls()
        if missing := [name for name in OF_A_LAUNCHER if name not in environment]:
            raise ConfigError(
                f"WORLD_SIZE={world_size} says that this is one of {world_size} processes, but nothing connects them",
                expected=f"{', '.join(OF_A_LAUNCHER)}, as torchrun sets them",
                found=f"no {' and no '.join(missing)}",
                do="start the run with torchrun, or unset WORLD_SIZE",
            )
        rank, local_rank = _number(environment, "RANK"), _number(environment, "LOCAL_RANK")
        return cls(rank, world_size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", world_size))

    @property
    def is_main(self) -> bool:
        """True if this process writes the files, and prints."""
        return self.rank == 0

    @property
    def decides_alone(self) -> bool:
        """True if this process can simply fail: the launcher then ends all others."""
        return self.is_main and self.local_world_size == self.world_size

    def command(self, arguments: Sequence[str]) -> str:
        """The command line that starts `qwen-train` with these arguments in as many processes, quoted for the shell."""
        start = "qwen-train "
        if self.world_size > 1:  # on several machines each has its own options
            options = f"--nproc-per-node {self.world_size}" if self.local_world_size == self.world_size else "…"
            start = f"torchrun {options} -m qwen_train "
        return start + shell_line(arguments)


def silence_others(launch: Launch) -> None:
    """Unless this is the main process, print nothing but errors, and leave the file of the progress to that one."""
    if not launch.is_main:
        set_verbosity(quiet=True, verbose=is_verbose())
        os.environ.pop(VARIABLE, None)


def in_one_process(command: str) -> None:
    """ConfigError if a launcher started this command several times; only the first process of a machine prints it."""
    launch = Launch.of_environment() if "LOCAL_RANK" in os.environ else Launch()
    if launch.world_size == 1:
        return
    if launch.local_rank:
        raise SystemExit(0)  # after a failure the launcher would end the one that prints
    found, do = f"{launch.world_size} processes", "start it without a launcher such as torchrun"
    raise ConfigError(f"`qwen-train {command}` runs in one process", found=found, do=do)


def copies_advice() -> str | None:
    """Advice if a program has started independent copies of this command; else None."""
    for name, program in COPIES.items():
        if "RANK" not in os.environ and (count := _number(os.environ, name, 1)) > 1:
            return f"{program} has started this command {count} times: let it start torchrun once on each machine"
    return None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise TrainError(f"the environment variable {name} is not a number", found=text or "nothing")
    return int(text)


# ---- run folder ------------------------------------------------------------------------------------------------------
# The output folder of a run: the names of its files, its lock and its checkpoints, without torch.
#
# A second run in the folder is refused while the first one trains.

LOCK = ".lock"
METRICS_NAME = "metrics.jsonl"
REPORT_NAME = "report.html"
RUN_FACTS_NAME = "about.json"
"""The file with facts about the data and the run, for its report."""
VALIDATION_IMAGES = "validation_images"
"""The fact that says how many images a run generates at a time."""
TIMES = ("time", "elapsed_seconds")
"""The entries of a line that are not metrics."""
LOSS = "validation_loss"
LEVELS = 4
"""Noise levels of a sample in validation: one in each quarter of 0..1."""
LOSSES = tuple(f"{LOSS}_q{i + 1}" for i in range(LEVELS))
"""The loss in each quarter, from little noise to much, as metrics.jsonl has it."""
PREFERENCE_ACCURACY, PREFERENCE_MARGIN = "preference_accuracy", "preference_margin"
"""Metrics of validation with `train.dpo`."""
CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")
STATE = "state.json"
COMMITS = "commits"
"""The folder of the commits that a run with train.follow has taken in."""
SEQUENCE = "sequence.json"


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
            is_new = not out.exists()
            make_folder(out)
            if is_new:
                held.callback(_remove_empty, out)
            try:
                held.enter_context(locked(out / LOCK, remove=True))
            except LockHeldError as error:
                do = copies_advice() or "wait for it, or stop it first; or name another folder with --out"
                what = "another run is writing to this folder"
                raise TrainError(what, where=out, found=error.holder, do=do) from None
            except NoLocksError as error:
                (out / LOCK).unlink(missing_ok=True)
                text = f"warning: {out}: files cannot be locked here ({error.strerror}): start no second run in it"
                console().print(text, style="yellow", markup=False)
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; another folder itself."""
    return folder.parent if CHECKPOINT.fullmatch(folder.resolve().name) else folder


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete checkpoint, oldest first."""
    matches = [(CHECKPOINT.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match and path.is_dir())


# ---- run settings ----------------------------------------------------------------------------------------------------
# The settings of a run, and the command that continues it: a resumed run takes the settings of its own folder.


@dataclass(frozen=True)
class ToEncode:
    """The source of a run without a cache."""

    source: str
    at: str | None = None
    """The server that encodes; None for one that the run starts."""

    @property
    def arguments(self) -> list[str]:
        """The arguments of `qwen-train run` that mean this source."""
        return ["--encode-on-the-fly" if self.at is None else f"--encode-at={self.at}", self.source]


def only_cache(cache: Given | None) -> list[Given]:
    """The settings for a cache from the command line, which replaces all caches in qwen.yaml."""
    return [cache, Given("CACHE", "train.caches", [])] if cache else []


def cache_of_run(folder: Path) -> str | None:
    """The first cache that the run in a folder was trained on, if it is on this machine; a line says so."""
    with suppress(QwenCacheError, OSError):
        if (folder / CONFIG_NAME).is_file() and not (folder / MANIFEST_NAME).exists():
            run = load_saved(folder / CONFIG_NAME)
            caches = [entry.path for entry in run.train.caches if not entry.teacher] or [run.cache.path]
            if not is_remote(location(caches[0])) and (Path(caches[0]) / MANIFEST_NAME).is_file():
                text = f"the cache is {plain(caches[0])}, as in {plain(folder / CONFIG_NAME)}"
                console().print(text, markup=False, highlight=False)
                return caches[0]
    return None


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
        load_saved(own)
    except ConfigError as error:
        do = "correct it; or remove it, and give the run's settings again"
        raise ConfigError(error.what, where=own, expected=error.expected, found=error.found, do=do) from None
    names = {"train.output_dir"} | {each.key for each in named}
    names |= _names(read_yaml(path)) if path else set()
    for name, _, text in (each.partition("=") for each in assignments or ()):
        names |= {name.strip(), *_names(parse_yaml(text), f"{name.strip()}.")}
    values = fresh.flat()
    return load_saved(own, [assignment(name, values[name]) for name in _among(values, names)]), fresh


def named_in(path: Path, settings: Iterable[str]) -> list[str]:
    """The dotted names of settings that a settings file has. ConfigError if it is not YAML."""
    return _among(settings, _names(read_yaml(path)))


def _among(settings: Iterable[str], names: Iterable[str]) -> list[str]:
    """The settings that are named; a name inside one, as in optimizer.arguments, names the whole."""
    return [name for name in settings if any(f"{each}.".startswith(f"{name}.") for each in names)]


def _names(value: object, prefix: str = "") -> set[str]:
    """The dotted names in nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {f"{prefix}{name}" for name in value}.union(*(_names(v, f"{prefix}{n}.") for n, v in value.items()))


def recorded(config: Config, name: str) -> Any:
    """A setting of `data` that a run has, or that all its caches were built with, except the teacher's.

    None if neither has it, and for caches that differ.
    """
    if (own := _set(config.data, name)) is not None:
        return own
    caches = [entry.path for entry in config.train.caches if not entry.teacher] or [config.cache.path]
    first, *others = [_of_cache(cache, name) for cache in caches]
    return first if all(other == first for other in others) else None


def _of_cache(cache: str, name: str) -> Any:
    """A setting of `data` that a cache on this machine was built with."""
    with suppress(QwenCacheError, OSError):
        if not is_remote(location(cache)) and (settings := Path(cache) / CONFIG_NAME).is_file():
            return _set(load_saved(settings).data, name)
    return None


def _set(data: DataConfig, name: str) -> Any:
    """A setting; None for a text of white space too, which is none."""
    value = getattr(data, name)
    return (value.strip() or None) if isinstance(value, str) else value


def as_trained(data: DataConfig, folders: Iterable[Path]) -> DataConfig:
    """`data` with what the runs in these folders recorded on prompts, where it is not set and they agree."""
    runs = []
    for settings in {folder / CONFIG_NAME for folder in folders}:
        with suppress(QwenCacheError, OSError):
            runs += [load_saved(settings)] if settings.is_file() else []
    found: dict[str, Any] = {}
    for name in ("trigger_word", "marked_phrases"):
        values = {recorded(run, name) for run in runs} if _set(data, name) is None else set()
        found |= {name: values.pop()} if len(values) == 1 else {}
    return data.model_copy(update=found)


def resume_command(
    out: Path, launch: Launch, changes: Mapping[str, Any] | None = None, to_encode: ToEncode | None = None
) -> str:
    """The command line that continues the run in `out` with its own settings and these `changes`."""
    arguments = ["run", *(to_encode.arguments if to_encode else ()), "--resume", "--out", str(out)]
    for name, value in (changes or {}).items():
        arguments += ["--set", assignment(name, value)]
    return launch.command(arguments)


# ---- latents ---------------------------------------------------------------------------------------------------------
# The latents of validation images in the output folder of a run, and their PNGs: where they are, without torch.
#
# A folder without any is refused.
#
#     validation/
#       step-500/KEY.safetensors, KEY.png   generated after step 500
#       target/, controls/                  the cached images that belong to them; controls also as KEY-2.png, …
#       losses/step-500.json                the losses of held-out samples after step 500
#       preference_losses/step-500.json     those of held-out pairs, by train.dpo
#       likeness.json                       how much the images resemble the targets, by a model of `best --likeness`

VALIDATION = "validation"
"""The folder for the latents of validation images."""
SAMPLE_LOSSES, PAIR_LOSSES = "losses", "preference_losses"
"""Its folders for the losses of held-out samples and pairs: {KEY: [the loss in each quarter of the noise levels]}."""
LIKENESS_NAME = "likeness.json"
"""Its file for `best --likeness`: {model, training_targets, images: {step-N/KEY: {latents: the hash of the file, and
target or training: a cosine similarity}}}."""
STEP = re.compile(r"step-(0|[1-9][0-9]*)")
"""The name of the folder with the images of a step."""
VARIED = ("true_cfg_scale", "lora_weight")
"""The entries of a file's metadata with what differs between its images, as a JSON list; one of them, of several."""

TRAINED = "trained"
"""The entry of the metadata of a target that is trained."""
EDIT_MASK = "edit_mask"
"""The tensor `[S]` beside the latents of a target with one."""

GENERATE = "set validation.prompts and build the cache, or set validation.num_images"


def varied(metadata: Mapping[str, str]) -> tuple[str, list[float]]:
    """The entry of `VARIED` that a file of validation images has, and the value of each of its images; "" and none for
    a single image. ValueError for a list that is none."""
    for name in VARIED:
        if name in metadata:
            values = parse_json(metadata[name])
            if not isinstance(values, list) or not all(type(each) in (int, float) for each in values):
                raise ValueError(f"{name} is no list of numbers")
            return name, [float(each) for each in values]
    return "", []


def image_titles(metadata: Mapping[str, str]) -> list[str]:
    """A title for each image of a file, such as `true_cfg_scale 4`; empty for a single one. ValueError as `varied`."""
    name, values = varied(metadata)
    return [f"{name} {value:g}" for value in values] or [""]


def latents_files(folder: Path) -> list[Path]:
    """The latents files: of a run, only its validation; of another folder, all; or the file itself."""
    if folder.is_file():
        return [folder]
    is_run, files = latents_folder(folder) != folder, found_latents(folder)
    if is_run and not files:
        raise TrainError("this run generated no images", where=folder, do=GENERATE)
    if not files:
        raise TrainError(
            "no latents here",
            where=folder,
            expected=f"the output folder of a run that generated images, or a folder in its {VALIDATION}/",
            do=f"name another folder; or {GENERATE}, and train",
        )
    return files


def found_latents(folder: Path) -> list[Path]:
    """The latents files in the folder of a run or another one, in the order of their steps; maybe none."""
    files = latents_folder(folder).rglob("*.safetensors")
    return sorted(files, key=lambda file: (step_of(file) if step_of(file) is not None else -1, file))


def step_of(path: Path) -> int | None:
    """The step that a file was generated after, None for a target or controls."""
    match = STEP.fullmatch(path.parent.name)
    return int(match[1]) if match else None


def png_of(latents: Path, number: int = 0) -> Path:
    """The PNG of an image of a file, counted from 0: the first has the file's name, the others also a number."""
    return latents.with_name(f"{latents.stem}-{number + 1}.png" if number else f"{latents.stem}.png")


def latents_folder(path: Path) -> Path:
    """The folder with the latents and their PNGs: the validation folder of a run, or the folder of a file."""
    if path.is_file():
        return path.parent
    is_run = (path / METRICS_NAME).is_file() or (path / VALIDATION).is_dir()
    return path / VALIDATION if is_run else path
