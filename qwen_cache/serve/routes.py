"""The routes under /v1: rows in, keys, states and samples out."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import ServerFaultError
from qwen_cache.format.cache import sample_file
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN
from qwen_cache.serve.description import describe
from qwen_cache.serve.engine import LATER, Engine
from qwen_cache.serve.fetch import Fetch
from qwen_cache.serve.form import LIMITS, check_pixels, content_type_for_bytes, read_row
from qwen_cache.serve.messages import (
    FAILURES,
    FORM,
    LONGEST_WAIT,
    MOST,
    Key,
    Lengths,
    LengthsRequest,
    Rows,
    RowsRequest,
    Samples,
    SampleState,
    States,
    StatesRequest,
)
from qwen_cache.serve.states import State, Status
from qwen_cache.sources.rows import Row
from qwen_cache.web import RefusedError, as_json

Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT, description="how long to wait until the sample is encoded")]
SAFETENSORS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {}}, "description": "a safetensors file"}
}


def routes_of(engine: Engine) -> APIRouter:
    """The routes of this engine."""
    routes = APIRouter(prefix="/v1")
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
    def rows(begin: Annotated[int, Query(ge=0)] = 0) -> Rows:
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
    if not engine.store.stores or not isinstance(folder, Path):
        do = f"read {folder}" if engine.store.stores else "fetch samples by their keys"
        raise RefusedError(404, "this server has no local cache", do)
    if name in (MANIFEST_NAME, INDEX_NAME) or SHARD_PATTERN.fullmatch(name):
        for path in (folder / name, folder / ".replaced" / name):
            with suppress(FileNotFoundError):
                return path, path.stat()
    raise HTTPException(404)
