"""Training without a cache: another process encodes each sample when it is about to be trained.

The samples, their batches and their bytes are those of a cache of the same source, so the losses are, too, and a run
can be resumed from one or the other. This process still loads nothing but the transformer.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pyarrow as pa

from qwen_cache.batching.epoch import IntArray, Part
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.format.shard import recover
from qwen_cache.settings.load import Config

COMMAND = "from qwen_cache.cli import main; main()"


@dataclass(frozen=True)
class OneSample:
    """In place of the shards of a cache: the bytes of a single sample."""

    folder: Path
    data: memoryview

    def bytes_of(self, row: IndexRow) -> memoryview:
        return self.data

    def renew(self, row: IndexRow) -> bool:
        return False


class OnTheFlySamples:
    """The samples of a source, from a process that encodes them."""

    has_index = False

    def __init__(self, config: Config, source: str) -> None:
        self.folder = Path(source)
        self._process = _start(config, source)
        self._lock = Lock()
        self._asked: deque[int] = deque()
        self._ready: dict[int, deque[Sample]] = {}
        self._promised: Counter[int] = Counter()
        about = self._reply()
        self.format_version: int = about["format_version"]
        self.prompt_embeds_width: int = about["prompt_embeds_width"]
        self.names: list[str] = about["names"]
        self._token_counts = np.array([about["image_tokens"], about["text_tokens"]], dtype=np.int64)
        self.recipe = Recipe(about["recipe"], about["samples"], about["identity"])

    @property
    def identity(self) -> str:
        return self.recipe.identity

    def column(self, name: str) -> pa.ChunkedArray:
        raise self._no_index()

    def row(self, position: int) -> IndexRow:
        raise self._no_index()

    def target_tokens(self) -> IntArray:
        raise self._no_index()

    def edit_masks(self) -> int:
        raise self._no_index()

    def name(self, position: int) -> str:
        return self.names[position]

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""
        return self._token_counts

    def parts(self, training: IntArray) -> list[Part]:
        return [Part(training)]

    def __len__(self) -> int:
        return self.recipe.samples

    def __getitem__(self, position: int) -> Sample:
        """A sample, when it is encoded; each time that it was asked for by `prefetch` it can be had once."""
        with self._lock:
            if not self._promised[position]:
                self._ask(position)
            self._promised[position] -= 1
            while not self._ready.get(position):
                self._ready.setdefault(self._asked.popleft(), deque()).append(self._receive())
            return self._ready[position].popleft()

    def prefetch(self, positions: Iterable[int]) -> None:
        """Ask for samples that will be wanted."""
        with self._lock:
            for position in positions:
                self._ask(position)

    def stop_prefetch(self) -> None:
        """End the other process: it ends by itself with its input, once it is done with what it is at."""
        self._close_pipes()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _no_index(self) -> ConfigError:
        what = "this goes by the index of a cache, which --encode-on-the-fly does not have"
        return ConfigError(what, where=self.folder, do="build a cache: `qwen-cache build`")

    def _ask(self, position: int) -> None:
        assert self._process.stdin is not None
        try:
            print(position, file=self._process.stdin, flush=True)
        except OSError:
            raise self._ended() from None
        self._asked.append(position)
        self._promised[position] += 1

    def _receive(self) -> Sample:
        path = Path(self._reply()["file"])
        data = memoryview(bytearray(path.read_bytes()))  # not mapped: Windows removes no mapped file
        path.unlink()
        (entry,) = recover(data, self.format_version)
        return Sample(IndexRow(entry.meta.key, path.name, entry), OneSample(self.folder, data))

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise self._ended()
        return dict(json.loads(line))

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of what could not be written any more
                if pipe:
                    pipe.close()

    def _ended(self) -> TrainError:
        self._close_pipes()
        return TrainError(
            "the process that encodes has ended; its message is above",
            where=self.folder,
            found=f"exit code {self._process.wait()}",
        )


def _start(config: Config, source: str) -> subprocess.Popen[str]:
    """`qwen-cache encode-worker` in its own session: Ctrl-C reaches the trainer alone, which ends it later."""
    settings = json.dumps(config.model_dump(mode="json"))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "encode-worker", source, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # as Windows has it
    )
