"""The output folder of a run: the names of its files, its lock and its checkpoints, without torch.

A second run in the folder is refused while the first one trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.storage.files import LockHeldError, NoLocksError, locked, make_folder
from qwen_cache.terminal import console
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


def run_of(folder: Path) -> Path:
    """The folder of the run that a checkpoint belongs to; another folder itself."""
    return folder.parent if NAME.fullmatch(folder.resolve().name) else folder


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete checkpoint, oldest first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match)
