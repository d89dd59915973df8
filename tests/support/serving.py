"""A server of the service in this process, with noise in place of the encoders."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import numpy as np
from PIL import Image

from qwen_cache.encode.builder import BuildJob, RunningEncoders, prepare_service
from qwen_cache.service.app import log, serve
from qwen_cache.service.engine import Engine
from qwen_cache.service.http import open_socket
from qwen_cache.service.routes import Uploaded
from qwen_cache.settings.load import load_config
from qwen_cache.sources.rows import Row

from .caches import SMALL
from .fake_lanes import FakeLanes


def png(number: int, size: tuple[int, int] = (96, 64)) -> bytes:
    """The image with this number."""
    pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def row(number: int, prompt: str = "make it red") -> Row:
    """The row with this number: a target and a control."""
    images = [Uploaded(png(2 * number + i), name) for i, name in enumerate(("target", "control"))]
    return Row(f"row {number}", "the test", images[0], (images[1],), None, prompt)


def service_job(model: Path, out: Path | str, *settings: str) -> BuildJob:
    """The job of a server with the small settings."""
    small = [*SMALL[1::2][:2], "cache.dtype=float32"]
    return prepare_service(load_config(None, [*small, f"model.path={model}", f"cache.path={out}", *settings]))


@contextmanager
def running(
    job: BuildJob,
    load: Callable[[BuildJob], RunningEncoders] = FakeLanes,
    token: bytes | None = None,
    address: str = "127.0.0.1:0",
) -> Iterator[str]:
    """The address of a server that runs inside the block, and ends with it."""
    engine, listener = Engine(job, load, job.config.serve), open_socket(address)
    thread = Thread(target=serve, args=(engine, listener, token, log))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        engine.begin_stop()
        thread.join()
        listener.close()
