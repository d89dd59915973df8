"""Samples that a server encodes while the run trains."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDoneError
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import pyarrow as pa

from qwen_cache.batching import IntArray, MixturePart
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.format.identity import dataset_identity
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Recipe
from qwen_cache.format.sample import token_count
from qwen_cache.service.client import Client
from qwen_cache.service.encoding import THREADS, encoded, plan_at, text_tokens
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import WeightedCache
from qwen_train.run import ToEncode

# ---- own server ------------------------------------------------------------------------------------------------------
# The server of one run: a process that encodes, and ends with this one.

COMMAND = "from qwen_cache.cli import main; main()"
TO_END = 60  # seconds: it ends after its current sample


class OwnServer:
    """Starts the process; `client` waits until it listens. TrainError if it has ended."""

    def __init__(self, config: Config, source: str) -> None:
        self._source, self._token = source, secrets.token_hex()
        # In a session of its own: Ctrl-C reaches only the trainer, which stops it later.
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "encode-worker", json.dumps(config.model_dump(mode="json"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )

    def client(self) -> Client:
        """A client of this server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it has ended: `readline` returns nothing
            print(self._token, file=self._process.stdin, flush=True)
        if not (url := self._process.stdout.readline().strip()):
            self.check(wait=True)
        return Client(url, self._token, known=True)

    def check(self, *, wait: bool = False) -> None:
        """TrainError if the process has ended."""
        code = self._process.wait() if wait else self._process.poll()
        if code is not None:
            self._close_pipes()
            what = "the encoding process has ended; its message is above"
            raise TrainError(what, where=self._source, found=f"exit code {code}")

    def stop(self) -> None:
        """End it: it stops when its input is closed."""
        self._close_pipes()
        try:
            self._process.wait(TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unwritten data of a process that has ended
                if pipe:
                    pipe.close()


# ---- served ----------------------------------------------------------------------------------------------------------
# Training without a cache: a server encodes each sample shortly before it is trained.
#
# The server is one of a team (`--encode-at`), or a process that this run starts (`--encode-on-the-fly`). Samples,
# batches and bytes equal those of a cache of the same source, so the losses are equal too, and a run can be resumed
# with either. This process still loads only the transformer.

LOOK = 1.0  # seconds between looks at whether the server of this run has ended
Answer = TypeVar("Answer")


class ServedSamples:
    """The samples of a source, encoded by a server."""

    has_index = False

    def __init__(self, config: Config, to_encode: ToEncode) -> None:
        self.folder = Path(to_encode.source)
        self._lock = Lock()
        self._requested: dict[int, deque[Future[Sample]]] = {}
        with ExitStack() as opened:
            self._own: OwnServer | None = None
            if to_encode.at is not None:
                client = Client(to_encode.at)
            else:
                self._own = OwnServer(config, to_encode.source)
                opened.callback(self._own.stop)
                client = self._own.client()
            self._client = opened.enter_context(client)
            self._threads = ThreadPoolExecutor(THREADS, "encode-at")
            opened.callback(self._threads.shutdown, wait=False, cancel_futures=True)

            planning = self._threads.submit(plan_at, config, to_encode.source, self._client)
            self._job, self._planned = self._waited(planning)
            tokens = self._waited(self._threads.submit(text_tokens, self._client, self._planned))
            shapes = [sample.img_shapes for sample in self._planned]
            self.format_version: int = self._job.format_version
            self.prompt_embeds_width: int = self._job.model.text_width
            self._token_counts = np.array([[token_count(each) for each in shapes], tokens], dtype=np.int64)
            self._target_tokens = np.array([token_count(each[:1]) for each in shapes], dtype=np.int64)
            identity = dataset_identity(sample.key for sample in self._planned)
            self.recipe = Recipe(self._job.recipe, len(shapes), identity)
            self.pipelines: tuple[str, ...] = (str(self._job.recipe["pipeline"]),)
            self._opened = opened.pop_all()

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

    def rejected_tokens(self) -> IntArray:
        raise self._no_index()

    def without_direction(self) -> int:
        raise self._no_index()

    def edit_masks(self) -> int:
        raise self._no_index()

    def name(self, position: int) -> str:
        return self._planned[position].row.name

    def of_cache(self, position: int) -> WeightedCache:
        return WeightedCache(path=str(self.folder))

    def token_counts(self) -> IntArray:
        """`[2, N]`: image tokens (of target and controls) and text tokens."""
        return self._token_counts

    def parts(self, training: IntArray, *, one_caption: bool = False) -> list[MixturePart]:
        """All of them: `samples.py` refuses `one_caption` where there is no index."""
        return [MixturePart(training)]

    def __len__(self) -> int:
        return self.recipe.samples

    def __getitem__(self, position: int) -> Sample:
        """Wait for a sample; each `prefetch` of it is consumed by one read."""
        with self._lock:
            if not self._requested.get(position):
                self._request(position)
            requested = self._requested[position].popleft()
        return self._waited(requested)

    def prefetch(self, positions: Iterable[int]) -> None:
        """Request samples from the server, and return at once."""
        with self._lock:
            for position in positions:
                self._request(position)

    def stop_prefetch(self) -> None:
        """Request nothing more; end a server of this run, after its current sample."""
        self._opened.close()

    def _request(self, position: int) -> None:
        work = self._threads.submit(self._fetch, position)
        self._requested.setdefault(position, deque()).append(work)

    def _fetch(self, position: int) -> Sample:
        return encoded(self._client, self._job, self._planned[position])

    def _waited(self, work: Future[Answer]) -> Answer:
        """The result, unless the server of this run ends."""
        while True:
            try:
                return work.result(LOOK)
            except NotDoneError:
                if self._own is not None:
                    self._own.check()

    def _no_index(self) -> ConfigError:
        what = "this needs the index of a cache, which a run that encodes does not have"
        return ConfigError(what, where=self.folder, do="build a cache: `qwen-cache build`")
