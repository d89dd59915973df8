"""A client of `qwen-cache serve`: rows in, samples out. It trusts nothing that the server says: see SECURITY.md.

    from qwen_cache.client import Client

    with Client("http://host:8077", token="…") as client:
        sample = client.encode("make it red", target="after.png", controls=["before.png"])
        print(sample.key, sample["image_latents"].shape, sample["prompt_embeds"].shape)

Requests that a busy or restarting server refuses are sent again, for `patience` seconds. As long as the server says
that its disk is full, they are sent again without end, with a message each minute.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Any, Self

from qwen_cache.client.answers import (
    UPGRADE,
    Lengths,
    Model,
    Refusal,
    SentSamples,
    parse_answer,
    parse_refusal,
)
from qwen_cache.client.connection import MAX_JSON, NO_ANSWER, WAIT, Answer, Connection, Form, silence
from qwen_cache.client.description import Description, parse_description
from qwen_cache.errors import ConfigError, QwenCacheError, ServerSilentError, SourceError
from qwen_cache.format.cache import OneSample, Sample, parse_sample_file
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import tensor_bytes
from qwen_cache.storage import bounds
from qwen_cache.terminal import console, human_time
from qwen_cache.text import one_line, plain

TOKEN = "QWEN_CACHE_TOKEN"
PATIENCE = 300.0  # seconds: a server with the real encoders is back within minutes
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between attempts
SENT_AT_MOST = 10  # times that a sample is sent: a server without a store may drop it before it is fetched
PROMPTS = 1000  # in a request for lengths
PROMPT_BYTES = 1 << 20  # of JSON in one; the server takes twice as many
BUSY = (429, 502, 503, 504)
FULL = "storage_full"  # the code of a refusal: the server waits for room on its disk
EVERY = 60.0  # seconds between messages about it
MAX_SAMPLE = bounds.WHOLE_FILE

Image = str | os.PathLike[str] | bytes
"""A path, or the bytes of an image file."""
Row = Callable[[], tuple[Mapping[str, str], Sequence[tuple[str, bytes]]]]
"""Returns the text fields and the images of a row, as `Client.send` takes them."""


class Client:
    """A connection to the server at `url`; safe to use from many threads. Raises ConfigError for a useless address.

    `token` is that of the server's --token-file; by default the environment variable QWEN_CACHE_TOKEN.
    """

    def __init__(self, url: str, token: str | None = None, patience: float = PATIENCE) -> None:
        self._connection = Connection(url, os.environ.get(TOKEN) if token is None else token)
        self.url, self.patience = self._connection.url, patience
        self._description: Description | None = None
        self._answered = False
        """Whether the server has answered a request."""
        self._closed = Event()
        self._telling, self._told = Lock(), -EVERY

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; requests of other threads end with a QwenCacheError."""
        self._closed.set()
        self._connection.close()

    @property
    def description(self) -> Description:
        """What the server says of itself; ConfigError if it is none of ours, or refuses the token.

        A server that has never answered is not waited for: the address may be wrong.
        """
        if self._description is None:
            try:
                answer = self._request("GET", "/v1", patience=self.patience if self._answered else 0)
            except ServerSilentError as error:
                do = "start `qwen-cache serve` there, or correct the address"
                raise ConfigError("the server does not answer", where=self.url, found=error.found, do=do) from None
            self._description = parse_description(answer.body, self.url)
        return self._description

    def encode(
        self,
        prompt: str,
        target: Image | None = None,
        controls: Sequence[Image] = (),
        mask: Image | None = None,
        name: str = "",
    ) -> Sample:
        """The sample of a row, encoded by the server or known to it. Every tensor is checked by its hash.

        SourceError if the row cannot be used, ConfigError if the server stores an image at several sizes.
        """
        files = _files(target, controls, mask)
        fields = {"prompt": prompt, **({"name": name} if name else {})}
        keys = self.send(fields, files)
        if len(keys) > 1:
            what = "the server makes several samples of this row"
            raise ConfigError(what, where=self.url, found=", ".join(keys), do="use `send` and `fetch`")
        sample = self.fetch(keys[0], lambda: (fields, files))
        self._check_content(sample.row.meta, prompt, files)
        return sample

    def send(self, fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> list[str]:
        """Send a row as text fields and images by their names, `target`, `control` or `mask`; the keys of its samples.

        SourceError if the row cannot be used.
        """
        sent = self.ask(SentSamples, "POST", "/v1/samples", form=Form(fields, files))
        return [each.key for each in sent.samples]

    def fetch(self, key: str, row: Row | None = None, most: int = MAX_SAMPLE) -> Sample:
        """Wait for a sample of at most this many bytes. What the server does not know is sent: `row` returns its fields
        and files.

        SourceError if it cannot be encoded; QwenCacheError if the server does not know it and there is no row, or if it
        sends another sample.
        """
        for _ in range(SENT_AT_MOST):
            answer = self._sample(key, most)
            while answer.status == 202:
                self._pause(FIRST_PAUSE)  # though it should have waited
                answer = self._sample(key, most)
            if answer.status != 404:
                return self._parsed(answer.body, key)
            if row is None:
                break
            keys = self.send(*row())
            if key not in keys:
                what = "the server computes another key for this row"
                raise QwenCacheError(what, where=self.url, expected=key, found=", ".join(keys), do=UPGRADE)
        raise QwenCacheError("the server does not have this sample", where=self.url, found=key, do="send its row")

    def lengths(self, prompts: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> list[int]:
        """The rows of `prompt_embeds` for each prompt about controls of these sizes in pixels, without encoding."""
        found: list[int] = []
        for part in _in_parts([{"prompt": text, "controls": list(sizes)} for text, sizes in prompts]):
            lengths = self.ask(Lengths, "POST", "/v1/lengths", value={"prompts": part}).lengths
            if len(lengths) != len(part):
                what = "the server answers another number of prompts"
                raise QwenCacheError(what, where=self.url, expected=len(part), found=len(lengths), do=UPGRADE)
            found += lengths
        return found

    def ask(self, model: type[Model], method: str, path: str, **options: Any) -> Model:
        """The answer to a request, which is JSON; errors as for `send`, ConfigError for one that is not as `model`."""
        return parse_answer(model, self._request(method, path, **options).body, self.url)

    def _sample(self, key: str, most: int) -> Answer:
        return self._request("GET", f"/v1/samples/{key}", most, accepted=(404,), params={"seconds": WAIT})

    def _parsed(self, body: bytearray, key: str) -> Sample:
        data = memoryview(body)  # writable, as torch wants it
        entry = parse_sample_file(data, self.url, self.description.format_version)
        if entry.meta.key != key:
            what, do = "the server sent another sample than the one that was asked for", "look for a proxy that caches"
            raise QwenCacheError(what, where=self.url, expected=key, found=entry.meta.key, do=do)
        return Sample(IndexRow("", "", entry), OneSample(Path(), data))

    def _check_content(self, meta: SampleMeta, prompt: str, files: Sequence[tuple[str, bytes]]) -> None:
        """QwenCacheError for the sample of another row than this one, which the key alone does not show."""
        hashes = [(name, content_hash(data)) for name, data in files if name != "mask"]  # not each server keeps it
        named = [("target", meta.inputs.target)] if meta.inputs.target else []
        found = meta.recipe, meta.prompt, [*named, *(("control", each) for each in meta.inputs.controls)]
        if found != (self.description.recipe_id, prompt, hashes):
            raise QwenCacheError("the server sent the sample of another row", where=self.url, found=meta.key)

    def _request(
        self,
        method: str,
        path: str,
        most: int = MAX_JSON,
        *,
        accepted: Sequence[int] = (),
        patience: float | None = None,
        **options: Any,
    ) -> Answer:
        """The answer to a request; it is sent again while the server is busy or does not answer."""
        patience = self.patience if patience is None else patience
        begin = time.monotonic()
        until, pause = begin + patience, FIRST_PAUSE
        while True:
            asked = 0.0
            try:
                answer = self._connection.ask(method, path, most, **options)
                self._answered = True
                if answer.status not in BUSY:
                    return self._checked(answer, accepted)
                refusal = parse_refusal(answer.body, answer.status)
                found, asked = refusal.error, min(answer.retry_after, LONGEST_PAUSE)
                if refusal.code == FULL:
                    self._tell(refusal, time.monotonic() - begin)
                    until = time.monotonic() + max(patience, 2 * LONGEST_PAUSE)
            except NO_ANSWER as error:
                self._pause(0)
                found = silence(error)
            pause = min(2 * pause, LONGEST_PAUSE)
            wait = max(pause, asked)
            if time.monotonic() + wait > until:
                what = f"the server did not answer within {patience:g} seconds"
                do = "look at its log, and run the same command again"
                raise ServerSilentError(what, where=self.url, found=found, do=do)
            self._pause(wait)

    def _pause(self, seconds: float) -> None:
        """QwenCacheError once the client is closed."""
        if self._closed.wait(seconds):
            raise QwenCacheError("the client was closed while it waited", where=self.url)

    def _tell(self, refusal: Refusal, waited: float) -> None:
        """Print that the server's disk is full: for all threads together once in `EVERY` seconds."""
        with self._telling:
            if time.monotonic() - self._told < EVERY:
                return
            self._told = time.monotonic()
        text = f"{self.url} has no room on its disk: {refusal.error}; waiting ({human_time(waited)})"
        console(always=True).print(plain(one_line(text)), markup=False)

    def _checked(self, answer: Answer, accepted: Sequence[int] = ()) -> Answer:
        """The answer; an error if it refuses the request."""
        status = answer.status
        if status < 300 or status in accepted:
            return answer
        refusal = parse_refusal(answer.body, status)
        if status == 401:
            raise ConfigError("the server refuses the token", where=self.url, do=f"set {TOKEN} to the server's token")
        if status in (413, 422):
            raise SourceError(refusal.error, where=self.url, do=refusal.do)
        found = f"status {status}: {refusal.error}"
        raise QwenCacheError("the server refuses a request", where=self.url, found=found, do=refusal.do or None)


def _in_parts(prompts: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The prompts in parts that a server takes at once."""
    part, size = list[dict[str, Any]](), 0
    for prompt in prompts:
        own = len(json.dumps(prompt))
        if part and (len(part) == PROMPTS or size + own > PROMPT_BYTES):
            yield part
            part, size = [], 0
        part.append(prompt)
        size += own
    if part:
        yield part


def sample_parts(sample: Sample) -> tuple[SampleMeta, dict[str, memoryview]]:
    """The metadata of a fetched sample, and the bytes of its tensors as a shard stores them."""
    assert isinstance(sample._shards, OneSample)
    return sample.row.meta, dict(tensor_bytes(sample.row.entry, sample._shards.data))


def _files(target: Image | None, controls: Sequence[Image], mask: Image | None) -> list[tuple[str, bytes]]:
    named = [("target", target), *(("control", each) for each in controls), ("mask", mask)]
    return [(name, each if isinstance(each, bytes) else _read(each)) for name, each in named if each is not None]


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError("the image cannot be read", where=path, found=error.strerror, do="correct the path") from None
