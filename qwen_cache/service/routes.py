"""The routes: description, forms, uploads, results."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import FormatError, QwenCacheError, ServerFaultError
from qwen_cache.extras import __version__
from qwen_cache.format.cache import sample_file
from qwen_cache.format.identity import HASH_PATTERN, Phrase, Slider, recipe_id
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN
from qwen_cache.format.sample import parse_phrase
from qwen_cache.service.engine import LATER, Engine, State, Status
from qwen_cache.service.http import RefusedError, as_json
from qwen_cache.settings.sections import SIZES, ServeConfig
from qwen_cache.sources.images import upright_size
from qwen_cache.sources.places import allowed_file, read_bytes
from qwen_cache.sources.rows import MAX_CONTROLS, MAX_TEXT, SLIDER, Row, limits_exceeded, one_alone
from qwen_cache.storage.remote import is_remote
from qwen_cache.text import RepeatedKeyError, parse_json

# ---- description -----------------------------------------------------------------------------------------------------
# What a server says of itself: everything that a client needs to compute keys.


def describe(engine: Engine) -> dict[str, Any]:
    """The description of a service, as JSON."""
    job, settings = engine.job, engine.settings
    data = job.config.data.model_dump(mode="json")
    cache = None
    if engine.store.stores:
        cache = str(job.folder) if is_remote(job.folder) else "/v1/cache"
    return {
        "qwen_cache": __version__,
        "format_version": job.format_version,
        "pipeline": job.model.pipeline,
        "model": job.model.public_name,
        "recipe_name": job.recipe_name,
        "recipe_id": recipe_id(job.recipe),
        "recipe": job.recipe,
        "vae_encoders": dict(job.vae_encoders),
        "data": {name: data[name] for name in SIZES},
        "thumbnails": job.keeps_thumbnails,
        "prompt_embeds_width": job.model.text_width,
        "samples": len(engine.store),
        "cache": cache,
        "limits": {
            "max_body": int(settings.max_body),
            "max_pixels": settings.max_pixels,
            "queue_samples": settings.queue_samples,
        },
    }


# ---- form ------------------------------------------------------------------------------------------------------------
# A row in the multipart form of a request.

MAX_IMAGES = MAX_CONTROLS + 3  # with a target, a mask and a rejected image
TEXTS = ("prompt", "name", "generate", "seed", "width", "height", "phrase", *SLIDER)
IMAGES = ("target", "control", "mask", "rejected")
LIMITS = {"max_files": MAX_IMAGES, "max_fields": len(TEXTS) + MAX_IMAGES, "max_part_size": MAX_TEXT}
"""The limits of a form, whose images may be files, or text that says where they are."""
BYTES = "latin-1"
"""The charset in which a form is read, so that no byte of it is changed before it is decoded here."""


@dataclass(frozen=True)
class Uploaded:
    """An image that a client sent."""

    data: bytes
    label: str

    def read(self) -> bytes:
        return self.data

    def __str__(self) -> str:
        return self.label


Fetched = Callable[[str, str, int], Awaitable[Uploaded]]
"""Reads the image of a field at an address, of at most this many bytes."""


def content_type_for_bytes(content_type: str) -> str:
    """The header for reading a form as `BYTES`; RefusedError unless it is a form in UTF-8.

    The client must not choose the codec: Python has some that take minutes, and some that raise.
    """
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise RefusedError(415, "the body is no multipart form", "send multipart/form-data, as `curl -F` does")
    charset = options.get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in ("utf-8", "utf8"):
        raise RefusedError(415, f"the charset of the form is {charset[:100]!r}", "send UTF-8")
    return f"{content_type}; charset={BYTES}"


async def read_row(form: FormData, fetch: Fetched, most: int) -> tuple[Row, int]:
    """The row in a form that was read as `BYTES`, and the bytes of its images; RefusedError unless it is one row.

    Images that the form names by their addresses have at most `most` bytes together.
    """
    if unknown := sorted(set(form) - {*TEXTS, *IMAGES}):
        raise RefusedError(422, f"there is no field {unknown[0]!r}", f"send {', '.join((*TEXTS, *IMAGES))}")
    images: dict[str, list[Uploaded]] = {name: [] for name in IMAGES}
    for name, value in form.multi_items():
        if name in images and isinstance(value, str):
            images[name].append(fetched := await fetch(name, _decoded(name, value), most))
            most -= len(fetched.data)
        elif name in images:
            images[name].append(Uploaded(await value.read(), name))  # type: ignore[union-attr]
    for name in (name for name in IMAGES if name != "control"):
        if len(images[name]) > 1:
            raise RefusedError(422, f"the form has {len(images[name])} images named {name}", "send one")
    texts = {name: _text(name, form.getlist(name)) for name in TEXTS}
    target, mask, rejected = (next(iter(images[name]), None) for name in ("target", "mask", "rejected"))
    prompt = texts["prompt"]
    if prompt is None:
        raise RefusedError(422, "the form has no prompt", "send the field prompt")
    slider = [texts[name] or "" for name in SLIDER]
    if told := one_alone(*slider):
        raise RefusedError(422, *told)
    row = Row(
        texts["name"] or "",
        "the request",
        target,
        tuple(images["control"]),
        mask,
        prompt,
        _phrase(texts["phrase"]),
        _number("seed", texts["seed"]),
        _size(texts["width"], texts["height"]),
        rejected,
        Slider(*slider) if any(slider) else None,
    )
    generates = texts["generate"] not in (None, "0")
    if generates == (target is not None) or (generates and mask is not None):
        what = "an image to generate has no target and no mask" if generates else "the form has no target"
        raise RefusedError(422, what, "send a target, or for an image to generate the field generate=1")
    for what, do in limits_exceeded(row).values():
        raise RefusedError(422, what, do)
    return row, sum(len(image.data) for some in images.values() for image in some)


def check_pixels(row: Row, most: int) -> None:
    """RefusedError for an image of more pixels; SourceError for one whose header cannot be read."""
    for image in (*row.images, *([row.mask] if row.mask else [])):
        width, height = upright_size(image.read(), str(image))
        if width * height > most:
            raise RefusedError(413, f"{image} has {width}×{height} pixels", f"send images of at most {most} pixels")


def _text(name: str, values: list[Any]) -> str | None:
    if len(values) > 1 or not all(isinstance(value, str) for value in values):
        raise RefusedError(422, f"{name} is not one text", "send it once, as text")
    return _decoded(name, values[0]) if values else None


def _decoded(name: str, text: str) -> str:
    try:
        return text.encode(BYTES).decode("utf-8")
    except UnicodeDecodeError:
        raise RefusedError(422, f"{name} is not UTF-8 text", "send UTF-8") from None


def _number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise RefusedError(422, f"{name} is no number", "send digits alone")
    return int(text)


def _size(width: str | None, height: str | None) -> tuple[int, int] | None:
    sides = _number("width", width), _number("height", height)
    if sides == (None, None):
        return None
    if None in sides or 0 in sides:
        raise RefusedError(422, "width and height belong together", "send both, or neither")
    return sides  # type: ignore[return-value]


def _phrase(text: str | None) -> Phrase:
    """The spans in JSON, which may lie outside of the prompt."""
    try:
        spans = [] if text is None else parse_json(text)
        if isinstance(spans, list):
            return parse_phrase(spans, "phrase")
        raise ValueError
    except (ValueError, FormatError):
        do = "send spans of characters, such as [[5, 12]]"
        raise RefusedError(422, "phrase is no list of spans", do) from None


# ---- fetch -----------------------------------------------------------------------------------------------------------
# Images at addresses that clients name: read only below `serve.allow_urls`, and within the limits of a body.
#
# They are read with the rights and from the network of the server. A server that is allowed may redirect to another
# one.

AT_A_TIME = 8  # a slow server holds up other addresses, and not the threads that all requests share


class Fetch:
    """Reads the image of a field at an address; RefusedError for one that is not allowed or cannot be read."""

    def __init__(self, settings: ServeConfig) -> None:
        self._allowed, self._free = tuple(settings.allow_urls), asyncio.Semaphore(AT_A_TIME)

    async def __call__(self, name: str, url: str, most: int) -> Uploaded:
        """`most`: its bytes at most."""
        place = allowed_file(url, self._allowed)
        if place is None:
            what = f"{name} is text, and no address that this server reads"
            raise RefusedError(422, what, "send the image as a file, or have its address allowed by serve.allow_urls")
        async with self._free:
            try:
                return Uploaded(await run_in_threadpool(read_bytes, place, most), name)
            except QwenCacheError as error:
                raise RefusedError(422, f"{name}: {error.fault}", error.do or "send the image as a file") from None


# ---- messages --------------------------------------------------------------------------------------------------------
# The JSON of requests and answers.

MOST = 10_000  # keys in a request, or names in an answer
MOST_PROMPTS = 1000  # in a request
MOST_ROWS = 100  # in a request: their images are read before it is answered
LAST_ROW = 1 << 40  # of the server's own source; no source has as many
LONGEST_WAIT = 60.0  # seconds

Key = Annotated[str, Field(pattern=f"^{HASH_PATTERN.pattern}$")]
Side = Annotated[int, Field(ge=1, le=1 << 20)]


class SampleState(BaseModel):
    """The state of a sample; `problem` if it failed, and a `code` if that was a fault of the server."""

    key: str
    state: State
    problem: str | None = None
    code: str | None = None


class RowsRequest(BaseModel):
    """Rows of the server's own source to encode, by their names."""

    model_config = ConfigDict(extra="forbid")
    names: Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)]


class Rows(BaseModel):
    """Names of rows of the server's own source, and how many it has."""

    names: list[str]
    total: int


class Samples(BaseModel):
    """The samples of a row: several if the server stores an image at several sizes."""

    samples: list[SampleState]


class StatesRequest(BaseModel):
    """Keys to ask for. With `wait`, the answer comes once all have got that far or failed, or after `seconds`."""

    model_config = ConfigDict(extra="forbid")
    keys: Annotated[list[Key], Field(max_length=MOST)]
    wait: Literal["encoded", "stored"] | None = None
    seconds: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] = 30.0


class States(BaseModel):
    """The states, in the order of the keys."""

    states: list[SampleState]


class Prompt(BaseModel):
    """A prompt, and the width and height of each control in its file."""

    model_config = ConfigDict(extra="forbid")
    prompt: Annotated[str, Field(max_length=MAX_TEXT)]
    controls: Annotated[list[tuple[Side, Side]], Field(max_length=MAX_CONTROLS)] = []


class LengthsRequest(BaseModel):
    """Prompts to measure."""

    model_config = ConfigDict(extra="forbid")
    prompts: Annotated[list[Prompt], Field(max_length=MOST_PROMPTS)]


class Lengths(BaseModel):
    """The rows of `prompt_embeds` for each prompt."""

    lengths: list[int]


class Failure(BaseModel):
    """The answer to a request that is refused, with a `code` for a fault of the server."""

    error: str
    do: str
    code: str | None = None


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text}
    for status, text in {
        401: "the token is missing or wrong",
        413: "too large",
        422: "this cannot be encoded",
        429: "too much at a time; send it again after Retry-After seconds",
        503: "a fault of the server, such as a full disk; send it again after Retry-After seconds",
    }.items()
}
_BINARY = {"type": "string", "format": "binary"}
_FIELDS = {name: {"type": "string"} for name in TEXTS} | dict.fromkeys(IMAGES, _BINARY)
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["prompt"],
                    "properties": _FIELDS | {"control": {"type": "array", "items": _BINARY}},
                }
            }
        },
    }
}
"""The form of a row, for /openapi.json."""

# ---- routes ----------------------------------------------------------------------------------------------------------
# The routes under /v1: rows in, keys, states and samples out.

Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="how long to wait until the sample is encoded")]
SAFETENSORS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "a safetensors file"}
}


class JsonRequest(Request):
    """A request whose JSON has each key once."""

    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except RepeatedKeyError as error:
            raise RefusedError(422, str(error), "keep one of them") from None


class JsonRoute(APIRoute):
    """A route that gets a `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


def routes_of(engine: Engine) -> APIRouter:
    """The routes of this engine."""
    routes = APIRouter(prefix="/v1", route_class=JsonRoute)
    planning = asyncio.Semaphore(os.cpu_count() or 1)  # decoding takes memory
    fetch = Fetch(engine.settings)

    @routes.get("", summary="The model, the recipe and the limits of this server")
    def description() -> dict[str, object]:
        return describe(engine)

    @routes.post(
        "/samples",
        status_code=202,
        response_model_exclude_none=True,
        responses=FAILURES,
        openapi_extra=FORM,
        summary="Send a row",
    )
    async def send(request: Request) -> Samples:
        row, size = await _received(request, fetch, int(engine.settings.max_body))
        async with planning:
            samples = await run_in_threadpool(_planned, engine, row)
        return Samples(samples=_states(await run_in_threadpool(engine.submit, samples, size)))

    @routes.get("/rows", summary="The names of rows of the server's own source")
    def rows(begin: Annotated[int, Query(ge=0, le=LAST_ROW)] = 0) -> Rows:
        return Rows(names=list(islice(engine.rows, begin, begin + MOST)), total=len(engine.rows))

    @routes.post(
        "/rows",
        status_code=202,
        response_model_exclude_none=True,
        responses=FAILURES,
        summary="Encode rows of the server's own source",
    )
    async def named(wanted: RowsRequest) -> Samples:
        async with planning:
            samples = await run_in_threadpool(_planned_by_name, engine, wanted.names)
        return Samples(samples=_states(await run_in_threadpool(engine.submit, samples, 0)))

    @routes.post("/states", response_model_exclude_none=True, summary="Ask for the states of samples, or wait for them")
    async def states(wanted: StatesRequest) -> States:
        if wanted.wait:
            await _wait(engine, wanted.keys, State(wanted.wait), wanted.seconds)
        return States(states=_states(await run_in_threadpool(engine.status, wanted.keys)))

    @routes.get("/samples/{key}", response_class=Response, responses={**SAFETENSORS, **FAILURES}, summary="A sample")
    async def sample(key: Key, seconds: Wait = 0) -> Response:
        if seconds:
            await _wait(engine, [key], State.ENCODED, seconds)
        return await run_in_threadpool(_sample, engine, key)

    @routes.post("/lengths", summary="The number of rows that prompts take, without encoding them")
    async def lengths(wanted: LengthsRequest) -> Lengths:
        prompts = [(each.prompt, each.controls) for each in wanted.prompts]
        async with planning:
            return Lengths(lengths=await run_in_threadpool(engine.lengths, prompts))

    @routes.get("/cache/{name}", response_class=FileResponse, summary="A file of the cache, or a range of its bytes")
    def file(name: str) -> FileResponse:
        path, stat = _file(engine, name)
        return FileResponse(path, media_type="application/octet-stream", stat_result=stat)

    return routes


async def _received(request: Request, fetch: Fetch, most: int) -> tuple[Row, int]:
    """The row in the body of a request, and the bytes of its images."""
    headers = request.headers.mutablecopy()
    headers["content-type"] = content_type_for_bytes(headers.get("content-type", ""))
    async with Request({**request.scope, "headers": headers.raw}, request.receive).form(**LIMITS) as form:
        return await read_row(form, fetch, most)


def _planned(engine: Engine, row: Row) -> list[PlannedSample]:
    check_pixels(row, engine.settings.max_pixels)
    return engine.plan(row)


def _planned_by_name(engine: Engine, names: Sequence[str]) -> list[PlannedSample]:
    if unknown := [name for name in names if name not in engine.rows]:
        do = "see GET /v1/rows" if engine.rows else "send the row, or start the server with --source"
        raise RefusedError(404, f"this server's source has no row {unknown[0]!r}", do)
    return [sample for name in names for sample in engine.plan(engine.rows[name])]


def _states(statuses: Sequence[Status]) -> list[SampleState]:
    return [SampleState(key=each.key, state=each.state, problem=each.problem, code=each.code) for each in statuses]


async def _wait(engine: Engine, keys: Sequence[str], state: State, seconds: float) -> None:
    """Wait until all of the samples are in `state`, or have failed, for at most this long."""
    until = time.monotonic() + seconds
    for key in keys:
        reached = asyncio.wrap_future(engine.reached(key, state))
        await asyncio.wait([reached], timeout=max(0, until - time.monotonic()))
        if not reached.done():
            reached.cancel()
            return


def _sample(engine: Engine, key: str) -> Response:
    found = engine.sample(key)
    if found is None:
        return _not_there(engine, engine.status([key])[0])
    pieces = sample_file(*found, engine.job.format_version)
    return Response(b"".join(pieces), media_type="application/octet-stream")


def _not_there(engine: Engine, status: Status) -> Response:
    """The answer about a sample that cannot be fetched."""
    fault = engine.fault
    if status.state is State.FAILED:
        if status.code and engine.failed_lately(status.key):
            raise ServerFaultError(status.code, status.problem or "", do=LATER)
        if status.code:
            raise RefusedError(404, f"sample {status.key} has failed: {status.problem}", "send its row again")
        raise RefusedError(422, status.problem or "it cannot be encoded", "correct the row, and send it again")
    if status.state is State.ACCEPTED:
        if fault:
            raise ServerFaultError(fault.code, fault.problem, do=LATER)
        return as_json({"key": status.key, "state": status.state}, 202)
    raise RefusedError(404, f"this server has no sample {status.key}", "send its row")


def _file(engine: Engine, name: str) -> tuple[Path, os.stat_result]:
    """The path of a file of the dataset, and what the system says of it."""
    folder = engine.job.folder
    if not engine.store.stores or is_remote(folder):
        do = f"read {folder}" if engine.store.stores else "fetch samples by their keys"
        raise RefusedError(404, "this server has no local cache", do)
    if name in (MANIFEST_NAME, INDEX_NAME) or SHARD_PATTERN.fullmatch(name):
        for path in (folder / name, folder / ".replaced" / name):
            with suppress(FileNotFoundError):
                return path, path.stat()
    raise HTTPException(404)
