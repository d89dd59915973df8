"""The routes of the Queue page, and of every page that shows a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from threading import Lock
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from qwen_cache.errors import JobError
from qwen_cache.service.http import RefusedError
from qwen_cache.ui.jobs.job import Job, NoJobError, State
from qwen_cache.ui.jobs.queue import Queue


class Move(BaseModel, extra="forbid"):
    """How many places a queued job moves to the back; to the front if it is negative."""

    by: int


class Stop(BaseModel, extra="forbid"):
    """What the page showed: who saw a job run wants it to save, though another window has stopped it meanwhile."""

    seen: State = "stopping"


def routes_of(queue: Queue) -> APIRouter:
    """The routes for a queue that is entered elsewhere."""
    router = APIRouter(prefix="/api")
    _add_views(router, queue)
    _add_actions(router, queue)
    return router


def _add_views(router: APIRouter, queue: Queue) -> None:
    @router.get("/jobs")
    def jobs() -> dict[str, Any]:
        return {"paused": queue.paused, "jobs": [job.to_json() for job in queue.list()]}

    @router.get("/jobs/{id}")
    def job(id: str) -> dict[str, Any]:
        with refusals():
            return queue.get(id).to_json()

    @router.get("/jobs/{id}/output")
    def output(id: str, since: int = 0) -> dict[str, Any]:
        with refusals():
            return asdict(queue.output(id, since))

    @router.get("/jobs/{id}/result")
    def result(id: str) -> dict[str, Any]:
        with refusals():
            value = queue.result(id)
        is_text = isinstance(value, str)
        return {"document": None if is_text else value, "text": value if is_text else None}


def _add_actions(router: APIRouter, queue: Queue) -> None:
    actions: dict[str, Callable[[str], Job]] = {
        "kill": queue.kill,
        "save": queue.save_now,
        "again": queue.again,
    }
    for name, action in actions.items():
        router.add_api_route(f"/jobs/{{id}}/{name}", _acting(action), methods=["POST"])

    stopping = Lock()

    @router.post("/jobs/{id}/stop")
    def stop(id: str, stop: Stop | None = None) -> dict[str, Any]:
        with refusals(), stopping:
            job = queue.get(id)
            is_repeated = stop is not None and stop.seen == "running" and job.state == "stopping"
            return (job if is_repeated else queue.stop(id)).to_json()

    @router.post("/jobs/{id}/remove")
    def remove(id: str) -> dict[str, Any]:
        with refusals():
            queue.remove(id)
        return {}

    @router.post("/jobs/{id}/move")
    def move(id: str, move: Move) -> dict[str, Any]:
        with refusals():
            queue.move(id, move.by)
        return {}

    @router.post("/queue/pause")
    def pause() -> dict[str, bool]:
        queue.pause()
        return {"paused": True}

    @router.post("/queue/resume")
    def resume() -> dict[str, bool]:
        queue.resume()
        return {"paused": False}


def _acting(action: Callable[[str], Job]) -> Callable[[str], dict[str, Any]]:
    def act(id: str) -> dict[str, Any]:
        with refusals():
            return action(id).to_json()

    return act


@contextmanager
def refusals() -> Iterator[None]:
    """The errors of jobs as answers: 404, or 409 for what a job does not allow now."""
    try:
        yield
    except JobError as error:
        status = 404 if isinstance(error, NoJobError) else 409
        raise RefusedError(status, error.fault, error.do or "reload the page") from None
