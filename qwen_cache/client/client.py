"""A client of `qwen-cache serve`: rows in, samples out.

    from qwen_cache.client import Client

    with Client("http://host:8077", token="…") as client:
        sample = client.encode("make it red", target="after.png", controls=["before.png"])
        print(sample.key, sample["image_latents"].shape, sample["prompt_embeds"].shape)

Requests that a busy or restarting server refuses are sent again, for `patience` seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from qwen_cache.client.description import Description, parse_description
from qwen_cache.errors import ConfigError, QwenCacheError, ServerSilentError, SourceError
from qwen_cache.format.cache import Sample
from qwen_cache.format.index import IndexRow
from qwen_cache.format.one_sample import OneSample, parse_sample_file
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import tensor_bytes

TOKEN = "QWEN_CACHE_TOKEN"
PATIENCE = 300.0  # seconds: a server with the real encoders is back within minutes
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0  # seconds between attempts
WAIT = 30  # seconds that the server waits for a sample before it answers that there is none yet
SENT_AT_MOST = 10  # times that a sample is sent: a server without a store may drop it before it is fetched
PROMPTS = 1000  # in a request for lengths
BUSY = (429, 502, 503, 504)

Image = str | os.PathLike[str] | bytes
"""A path, or the bytes of an image file."""


class Client:
    """A connection to the server at `url`; safe to use from many threads. Raises ConfigError for a useless address.

    `token` is that of the server's --token-file; by default the environment variable QWEN_CACHE_TOKEN.
    """

    def __init__(self, url: str, token: str | None = None, patience: float = PATIENCE) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError("no address of a server", found=url, do="write http://HOST:PORT")
        self.url, self.patience = url.rstrip("/"), patience
        token = os.environ.get(TOKEN) if token is None else token
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx2.Timeout(WAIT + 60, connect=20)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx2.Client(headers=headers, timeout=timeout, limits=limits)
        self._description: Description | None = None
        self._answered = False
        """Whether the server has answered a request."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    @property
    def description(self) -> Description:
        """What the server says of itself; ConfigError if it is none of ours, or refuses the token.

        A server that has never answered is not waited for: the address may be wrong.
        """
        if self._description is None:
            try:
                response = self._request("GET", "/v1", patience=self.patience if self._answered else 0)
            except ServerSilentError as error:
                do = "start `qwen-cache serve` there, or correct the address"
                raise ConfigError("the server does not answer", where=self.url, found=error.found, do=do) from None
            self._description = parse_description(_json(response), self.url)
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
        return self.fetch(keys[0], lambda: (fields, files))

    def send(self, fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> list[str]:
        """Send a row as text fields and images by their names, `target`, `control` or `mask`; the keys of its samples.

        SourceError if the row cannot be used.
        """
        parts = [(name, (None, value.encode())) for name, value in fields.items()]
        images = [(name, (name, data)) for name, data in files]
        answer = _json(self._request("POST", "/v1/samples", files=[*parts, *images]))
        return [str(each["key"]) for each in answer["samples"]]

    def fetch(self, key: str, row: Any = None) -> Sample:
        """Wait for a sample. What the server does not know is sent: `row` returns its fields and files.

        SourceError if it cannot be encoded; QwenCacheError if the server does not know it and there is no row.
        """
        for _ in range(SENT_AT_MOST):
            response = self._request("GET", f"/v1/samples/{key}", accepted=(404,), params={"seconds": WAIT})
            while response.status_code == 202:
                response = self._request("GET", f"/v1/samples/{key}", accepted=(404,), params={"seconds": WAIT})
            if response.status_code != 404:
                return self._parsed(response.content)
            if row is None:
                break
            keys = self.send(*row())
            if key not in keys:
                what, do = "the server computes another key for this row", "install the same version here and there"
                raise QwenCacheError(what, where=self.url, expected=key, found=", ".join(keys), do=do)
        raise QwenCacheError("the server does not have this sample", where=self.url, found=key, do="send its row")

    def lengths(self, prompts: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> list[int]:
        """The rows of `prompt_embeds` for each prompt about controls of these sizes in pixels, without encoding."""
        found: list[int] = []
        for begin in range(0, len(prompts), PROMPTS):
            part = [{"prompt": text, "controls": list(sizes)} for text, sizes in prompts[begin : begin + PROMPTS]]
            found += _json(self._request("POST", "/v1/lengths", json={"prompts": part}))["lengths"]
        return found

    def _parsed(self, content: bytes) -> Sample:
        data = memoryview(bytearray(content))  # writable, as torch wants it
        entry = parse_sample_file(data, self.url, self.description.format_version)
        return Sample(IndexRow("", "", entry), OneSample(Path(), data))

    def _request(
        self, method: str, path: str, accepted: Sequence[int] = (), patience: float | None = None, **options: Any
    ) -> httpx2.Response:
        """The answer to a request; it is sent again while the server is busy or does not answer."""
        patience = self.patience if patience is None else patience
        until, pause = time.monotonic() + patience, FIRST_PAUSE
        while True:
            try:
                response = self._http.request(method, self.url + path, **options)
                self._answered = True
                if response.status_code not in BUSY:
                    return self._checked(response, accepted)
                found, asked = _error(response)[0], response.headers.get("Retry-After", "")
            except httpx2.TransportError as error:
                found, asked = str(error) or type(error).__name__, ""
            pause = min(2 * pause, LONGEST_PAUSE)
            wait = max(pause, min(float(asked), LONGEST_PAUSE) if asked.isdecimal() else 0.0)
            if time.monotonic() + wait > until:
                what = f"the server did not answer within {patience:g} seconds"
                do = "look at its log, and run the same command again"
                raise ServerSilentError(what, where=self.url, found=found, do=do)
            time.sleep(wait)

    def _checked(self, response: httpx2.Response, accepted: Sequence[int] = ()) -> httpx2.Response:
        """The answer; an error if it refuses the request."""
        status = response.status_code
        if status < 300 or status in accepted:
            return response
        what, do = _error(response)
        if status == 401:
            raise ConfigError("the server refuses the token", where=self.url, do=f"set {TOKEN} to the server's token")
        if status in (413, 422):
            raise SourceError(what, where=self.url, do=do)
        found = f"status {status}: {what}"
        raise QwenCacheError("the server refuses a request", where=self.url, found=found, do=do or None)


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


def _json(response: httpx2.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        what, do = "this is no server of qwen-cache", "correct the address"
        raise ConfigError(what, where=response.url, found="an answer that is not JSON", do=do) from None


def _error(response: httpx2.Response) -> tuple[str, str]:
    """What is wrong and what to do, as the server says."""
    try:
        value = response.json()
        return str(value["error"]), str(value["do"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}", ""
