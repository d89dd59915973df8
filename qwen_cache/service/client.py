"""A client of `qwen-cache serve`: plans here, encodes there. It trusts nothing that the server says: see SECURITY.md.

    from qwen_cache.client import Client

    with Client("http://host:8077", token="…") as client:
        sample = client.encode("make it red", target="after.png", controls=["before.png"])
        print(sample.key, sample["image_latents"].shape, sample["prompt_embeds"].shape)

Requests that a busy or restarting server refuses are sent again, for `patience` seconds. As long as the server says
that its disk is full, they are sent again without end, with a message each minute.

Imports no torch.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeVar, cast
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from fsspec.asyn import get_loop, sync
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_cache.errors import ConfigError, QwenCacheError, ServerSilentError, SourceError, TooLargeError
from qwen_cache.format.cache import OneSample, Sample, parse_sample_file
from qwen_cache.format.identity import HASH_PATTERN, content_hash, recipe_id
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import tensor_bytes
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import CacheConfig, DataConfig
from qwen_cache.sources.rows import MAX_SIDE
from qwen_cache.storage import bounds
from qwen_cache.storage.http_client import BoundedResponse, bounded_client
from qwen_cache.terminal import console, human_time
from qwen_cache.text import expected_value, one_line, parse_json, plain

# ---- answers ---------------------------------------------------------------------------------------------------------
# The JSON of a server: read within bounds, and only what has a place in one of these models.
#
# Keys that they do not name are ignored, so a newer server may send more; no value of such a key is used.

MAX_SAMPLES = 1000  # of one row
UPGRADE = "install the same version of qwen-cache here and there"

Key = Annotated[str, Field(pattern=f"^{HASH_PATTERN.pattern}$")]
Rows = Annotated[int, Field(ge=1, lt=1 << 31)]


class AnswerModel(BaseModel):
    """The base class: no value is converted to another type."""

    model_config = ConfigDict(strict=True)


class Sent(AnswerModel):
    """The sample of a row that was sent."""

    key: Key


class SentSamples(AnswerModel):
    """The samples of a row that was sent."""

    samples: Annotated[list[Sent], Field(min_length=1, max_length=MAX_SAMPLES)]


class Lengths(AnswerModel):
    """The rows of `prompt_embeds` for each prompt."""

    lengths: list[Rows]


class Refusal(AnswerModel):
    """A fault and what to do; `code` is for programs."""

    error: str
    do: str = ""
    code: str = ""


Model = TypeVar("Model", bound=BaseModel)


def parse_answer(model: type[Model], body: bytes | bytearray, where: str) -> Model:
    """The answer as `model`; ConfigError for one that is not JSON, or not as `model` has it."""
    try:
        value = parse_json(bytes(body))
    except ValueError:
        what, do = "this is no server of qwen-cache", "correct the address"
        raise ConfigError(what, where=where, found="an answer that is not JSON", do=do) from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        what = "this is no server of qwen-cache, or of another version"
        raise ConfigError(what, where=where, found=first_fault(error), do=UPGRADE) from None


def first_fault(error: ValidationError) -> str:
    """The first fault of an answer, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    expected = expected_value(first)
    what = first["msg"] if expected is None else f"expected {expected}"
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), what]))


def parse_refusal(body: bytes | bytearray, status: int) -> Refusal:
    """The reason that a server gives for a refusal; the status alone if it gives none in our form."""
    try:
        return Refusal.model_validate(parse_json(bytes(body)))
    except ValueError:  # ValidationError is one
        return Refusal(error=f"status {status}")


# ---- connection ------------------------------------------------------------------------------------------------------
# Requests to one server, for code without asyncio: an answer is bounded in bytes and time, and never unpacked.
#
# They run in the event loop of fsspec. A redirect is an answer like any other: rows and token go to no other address.

MAX_JSON = 1 << 20  # bytes: ours have a few kB, and parsing takes up to 30 times as much memory
NO_ANSWER = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError
WAIT = 30  # seconds that the server waits for a sample before it answers that there is none yet


@dataclass(frozen=True)
class Answer:
    """An answer; `retry_after` is the seconds after which the server wants the request again, 0 if it does not say."""

    status: int
    body: bytearray
    retry_after: float


@dataclass(frozen=True)
class Form:
    """The text fields and the images of a row, by their names."""

    fields: Mapping[str, str]
    files: Sequence[tuple[str, bytes]]

    def writer(self) -> aiohttp.MultipartWriter:
        form = aiohttp.MultipartWriter("form-data")
        for name, text in self.fields.items():
            form.append(text).set_content_disposition("form-data", name=name)
        for name, data in self.files:
            form.append(io.BytesIO(data)).set_content_disposition("form-data", name=name, filename=name)
        return form


class Connection:
    """A connection to the server at `url`, for many threads. ConfigError if that is no address of a server."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        parts = _split(url, token)
        self._proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._running = set[asyncio.Task[Answer]]()
        self._is_closed = False

    def ask(
        self,
        method: str,
        path: str,
        most: int,
        *,
        form: Form | None = None,
        value: Any = None,
        params: Mapping[str, int] | None = None,
    ) -> Answer:
        """The answer to a request with a row's form or with JSON.

        One of NO_ANSWER if there is none in time; QwenCacheError for a compressed one; TooLargeError for one beyond
        `most` bytes, or beyond MAX_JSON if its status is not 200.
        """
        answer: Answer = sync(get_loop(), self._until_closed, method, path, most, form, value, params)
        return answer

    async def _until_closed(self, *arguments: Any) -> Answer:
        if self._is_closed:
            raise ConnectionAbortedError("the connection was closed")
        self._running.add(task := asyncio.create_task(self._ask(*arguments)))
        await asyncio.wait([task])
        self._running.remove(task)
        if task.cancelled():
            raise ConnectionAbortedError("the connection was closed")
        return task.result()

    async def _ask(
        self,
        method: str,
        path: str,
        most: int,
        form: Form | None,
        value: Any,
        params: Mapping[str, int] | None,
    ) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # a request does not wait for another thread's
            cookies = aiohttp.DummyCookieJar()
            self._session = await bounded_client(headers=self._headers, connector=connector, cookie_jar=cookies)
        headers = {} if value is None else {"Content-Type": "application/json"}
        data: Any = form.writer() if form else None if value is None else io.BytesIO(json.dumps(value).encode())
        async with self._session.request(
            method,
            self.url + path,
            params=params,
            data=data,
            headers=headers,
            proxy=self._proxy,
            allow_redirects=False,
            trace_request_ctx=WAIT + bounds.SILENCE,
        ) as response:
            body = await _body(response, most if response.status == 200 else MAX_JSON)
            asked = response.headers.get("Retry-After", "")
            return Answer(response.status, body, float(asked) if asked.isascii() and asked.isdecimal() else 0.0)

    def close(self) -> None:
        """End all requests; ConnectionAbortedError for those of other threads."""
        sync(get_loop(), self._close)

    async def _close(self) -> None:
        self._is_closed = True
        for task in self._running:  # aiohttp would leave one that reads a body waiting
            task.cancel()
        if self._session is not None:
            await self._session.close()


def silence(error: BaseException) -> str:
    """Why there is no answer: one of NO_ANSWER in words."""
    if isinstance(error, TimeoutError):
        return bounds.silence(WAIT + bounds.SILENCE)
    return str(error) or type(error).__name__


async def _body(response: aiohttp.ClientResponse, most: int) -> bytearray:
    """The body; TooLargeError for one of more than `most` bytes, before it is read if the server says so."""
    announced = response.content_length or 0
    body = bytearray() if announced > most else await cast(BoundedResponse, response).read_up_to(most + 1)
    if (found := max(announced, len(body))) > most:
        what, do = "the answer of the server is too large", "install the same version of qwen-cache here and there"
        size = found if announced else "more"
        raise TooLargeError(what, where=response.url, expected=f"at most {most} bytes", found=size, do=do)
    return body


def _split(url: str, token: str | None) -> SplitResult:
    """The parts of an address; ConfigError if it is none, or names a user besides a token."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("no address of a server", found=url, do="write http://HOST:PORT")
    if token and parts.username is not None:
        what, do = "a token and a user for one server", "leave the user out of the address, or give no token"
        raise ConfigError(what, where=parts.hostname, do=do)
    return parts


# ---- description -----------------------------------------------------------------------------------------------------
# What a server says of itself, and the settings and the model that follow from it.

Area = Annotated[int, Field(gt=0, le=1 << 30)]
Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Text = Annotated[str, Field(max_length=1000)]
Resolution = Annotated[list[Side], Field(min_length=2, max_length=2)]
CHOICES = 100  # areas or resolutions


class Sizes(AnswerModel):
    """The settings of `data` that a server decides: those of `SIZES`. It never names a place, or what may be read."""

    model_config = ConfigDict(extra="forbid")

    vae_image_size: Annotated[list[Area], Field(max_length=CHOICES)] | None = None
    resolution: Annotated[list[Resolution], Field(max_length=CHOICES)] | None = None
    resolutions_per_sample: Text = ""
    resize_mode: Text | None = None
    upscale: bool = True
    condition_image_size: Area | None = None
    edit_mask: Text = ""


class Description(AnswerModel):
    """The part of the answer to `GET /v1` that is used."""

    format_version: Literal[1, 2]
    pipeline: Text
    model: Text
    recipe_id: Key
    recipe: dict[str, Any]
    data: Sizes
    thumbnails: bool
    prompt_embeds_width: Annotated[int, Field(gt=0, le=1 << 16)]
    vae_encoders: Annotated[dict[Key, Key], Field(max_length=1)] = {}
    """For the manifest (`Manifest.vae_encoders`)."""


@dataclass(frozen=True)
class ServedModel(ModelFolder):
    """A model that only the server has: what planning needs to know of it. It has no folder; its name is only shown."""

    width: int = 0
    is_here = False

    @property
    def text_width(self) -> int:
        return self.width

    @property
    def public_name(self) -> str:
        return self.name


def parse_description(body: bytes | bytearray, where: str) -> Description:
    """The description in an answer; ConfigError if it is not one that this version understands."""
    description = parse_answer(Description, body, where)
    recipe = description.recipe
    try:
        is_known = recipe_id(recipe) == description.recipe_id and recipe.get("pipeline") == description.pipeline
    except ValueError:  # it cannot be written
        is_known = False
    if description.pipeline not in PIPELINES or not is_known:
        raise ConfigError("this server has a model that this version does not know", where=where, do=UPGRADE)
    return description


def served_model(description: Description) -> ServedModel:
    """The model of the server."""
    return ServedModel(description.model, Path(), description.pipeline, width=description.prompt_embeds_width)  # type: ignore[arg-type]


def served_settings(config: Config, description: Description, where: str, *, all_given: bool = False) -> Config:
    """The settings with those of the server; ConfigError for one that was given here and differs there.

    A default value counts as given with `all_given` alone: the settings that a run has saved name all.
    """
    recipe = description.recipe
    served_cache = {
        "format": f"v{description.format_version}",
        "dtype": recipe.get("dtype"),
        "text_quantization": recipe.get("text_quantization", "none"),
        "thumbnails": description.thumbnails,
        "store_attention": bool(recipe.get("attention", False)),
    }
    given = {name: getattr(config, name).model_fields_set if all_given else set() for name in ("data", "cache")}
    served_data = description.data.model_dump(exclude_unset=True)
    data = _merged("data", config.data.model_dump(mode="json"), served_data, where, given["data"])
    cache = _merged("cache", config.cache.model_dump(mode="json"), served_cache, where, given["cache"])
    try:
        sections = {"data": DataConfig.model_validate(data), "cache": CacheConfig.model_validate(cache)}
    except ValidationError as error:
        found = first_fault(error)
        what = "this version does not know a setting of the server"
        raise ConfigError(what, where=where, found=found, do=UPGRADE) from None
    return config.model_copy(update=sections)


def _merged(section: str, own: dict[str, Any], served: dict[str, Any], where: str, given: set[str]) -> dict[str, Any]:
    standard = Config().model_dump(mode="json")[section]
    for name, value in served.items():
        accepted = (value, None) if name in given else (value, standard.get(name))
        if own.get(name) not in accepted:
            raise ConfigError(
                f"the server has another {section}.{name}",
                where=where,
                expected=value,
                found=own[name],
                do=f"leave {section}.{name} out here, or start a server with it",
            )
    return {**own, **served}


# ---- client ----------------------------------------------------------------------------------------------------------

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

    `token` is that of the server's --token-file; by default the environment variable QWEN_CACHE_TOKEN. A `known` server
    is waited for from the first request on; of another the address may be wrong.
    """

    def __init__(self, url: str, token: str | None = None, patience: float = PATIENCE, *, known: bool = False) -> None:
        self._connection = Connection(url, os.environ.get(TOKEN) if token is None else token)
        self.url, self.patience = self._connection.url, patience
        self._description: Description | None = None
        self._answered = known
        """True if there is a server: it has answered a request."""
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
        """The server's description of itself; ConfigError if it is none of ours, or refuses the token.

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
        rejected: Image | None = None,
        slider: tuple[str, str] | None = None,
    ) -> Sample:
        """The sample of a row, encoded by the server or known to it. Every tensor is checked by its hash.

        `slider` has the positive and the negative prompt of a slider's direction. SourceError if the row cannot be
        used, ConfigError if the server stores an image at several sizes.
        """
        files = _files(target, controls, mask, rejected)
        fields = {"prompt": prompt, **({"name": name} if name else {})}
        fields |= {"positive_prompt": slider[0], "negative_prompt": slider[1]} if slider else {}
        keys = self.send(fields, files)
        if len(keys) > 1:
            what = "the server makes several samples of this row"
            raise ConfigError(what, where=self.url, found=", ".join(keys), do="use `send` and `fetch`")
        sample = self.fetch(keys[0], lambda: (fields, files))
        # Its key alone does not show whether it is of this row.
        meta = sample.row.meta
        hashes = [(name, content_hash(data)) for name, data in files if name != "mask"]  # not each server keeps it
        named = [("target", meta.inputs.target)] if meta.inputs.target else []
        named += [("control", each) for each in meta.inputs.controls]
        named += [("rejected", meta.inputs.rejected)] if meta.inputs.rejected else []
        found = meta.recipe, meta.prompt, meta.slider, named
        if found != (self.description.recipe_id, prompt, slider and tuple(slider), hashes):
            raise QwenCacheError("the server sent the sample of another row", where=self.url, found=meta.key)
        return sample

    def send(self, fields: Mapping[str, str], files: Sequence[tuple[str, bytes]]) -> list[str]:
        """Send a row as text fields and images by their names (`target`, `control`, `mask`, `rejected`); the keys of
        its samples.

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


def _files(
    target: Image | None, controls: Sequence[Image], mask: Image | None, rejected: Image | None
) -> list[tuple[str, bytes]]:
    named = [("target", target), *(("control", each) for each in controls), ("mask", mask), ("rejected", rejected)]
    return [(name, each if isinstance(each, bytes) else _read(each)) for name, each in named if each is not None]


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SourceError("the image cannot be read", where=path, found=error.strerror, do="correct the path") from None
