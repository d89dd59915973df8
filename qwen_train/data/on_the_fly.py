"""Training without a cache: a worker process encodes each sample shortly before it is trained.

Samples, batches and bytes equal those of a cache of the same source, so the losses are equal too, and a run can be
resumed with either. This process still loads only the transformer.
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

from qwen_cache.batching.epoch import IntArray, MixturePart
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.format.shard import recover
from qwen_cache.settings.load import Config
from qwen_cache.settings.train import WeightedCache
from qwen_cache.storage.mapped import read_file

COMMAND = "from qwen_cache.cli import main; main()"


@dataclass(frozen=True)
class OneSample:
    """The bytes of a single sample, in place of a cache's shards."""

    folder: Path
    data: memoryview

    def bytes_of(self, row: IndexRow) -> memoryview:
        return self.data

    def renew(self, row: IndexRow) -> bool:
        return False


class OnTheFlySamples:
    """The samples of a source, encoded by a worker process."""

    has_index = False

    def __init__(self, config: Config, source: str) -> None:
        self.folder = Path(source)
        self._process = _start(config, source)
        self._lock = Lock()
        self._requested: deque[int] = deque()
        self._ready: dict[int, deque[Sample]] = {}
        self._outstanding: Counter[int] = Counter()
        header = self._reply()
        self.format_version: int = header["format_version"]
        self.prompt_embeds_width: int = header["prompt_embeds_width"]
        self.names: list[str] = header["names"]
        self._token_counts = np.array([header["image_tokens"], header["text_tokens"]], dtype=np.int64)
        self._target_tokens = np.array(header["target_tokens"], dtype=np.int64)
        self.recipe = Recipe(header["recipe"], header["samples"], header["identity"])
        self.pipelines: tuple[str, ...] = (str(header["recipe"]["pipeline"]),)

    @property
    def identity(self) -> str:
        return self.recipe.identity

    def column(self, name: str) -> pa.ChunkedArray:
        raise self._no_index()

    def row(self, position: int) -> IndexRow:
        raise self._no_index()

    def target_tokens(self) -> IntArray:
        """`[N]`: image tokens of the target."""
        return self._target_tokens

    def edit_masks(self) -> int:
        raise self._no_index()

    def name(self, position: int) -> str:
        return self.names[position]

    def of_cache(self, position: int) -> WeightedCache:
        return WeightedCache(path=str(self.folder))

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""
        return self._token_counts

    def parts(self, training: IntArray, *, one_caption: bool = False) -> list[MixturePart]:
        """All of them: `planning.py` refuses `one_caption` where there is no index."""
        return [MixturePart(training)]

    def __len__(self) -> int:
        return self.recipe.samples

    def __getitem__(self, position: int) -> Sample:
        """Wait for a sample; each `prefetch` of it is consumed by one read."""
        with self._lock:
            if not self._outstanding[position]:
                self._request(position)
            self._outstanding[position] -= 1
            while not self._ready.get(position):
                self._ready.setdefault(self._requested.popleft(), deque()).append(self._receive())
            return self._ready[position].popleft()

    def prefetch(self, positions: Iterable[int]) -> None:
        """Request samples from the worker, and return at once."""
        with self._lock:
            for position in positions:
                self._request(position)

    def stop_prefetch(self) -> None:
        """Stop the worker: it ends when its input is closed, after its current sample."""
        self._close_pipes()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _no_index(self) -> ConfigError:
        what = "this needs the index of a cache, which --encode-on-the-fly does not have"
        return ConfigError(what, where=self.folder, do="build a cache: `qwen-cache build`")

    def _request(self, position: int) -> None:
        assert self._process.stdin is not None
        try:
            print(position, file=self._process.stdin, flush=True)
        except OSError:
            raise self._ended() from None
        self._requested.append(position)
        self._outstanding[position] += 1

    def _receive(self) -> Sample:
        path = Path(self._reply()["file"])
        data = memoryview(bytearray(read_file(path)))  # not mapped: Windows cannot remove a mapped file
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
            with suppress(OSError):  # unwritten data of a worker that has ended
                if pipe:
                    pipe.close()

    def _ended(self) -> TrainError:
        self._close_pipes()
        return TrainError(
            "the encoding process has ended; its message is above",
            where=self.folder,
            found=f"exit code {self._process.wait()}",
        )


def _start(config: Config, source: str) -> subprocess.Popen[str]:
    """Start `qwen-cache encode-worker` in its own session: Ctrl-C reaches only the trainer, which stops it later."""
    settings = json.dumps(config.model_dump(mode="json"))
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "encode-worker", source, settings],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
    )
