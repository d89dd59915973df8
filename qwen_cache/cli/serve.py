"""`serve`, and the worker of `run --encode-on-the-fly`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from qwen_cache.encode import builder
from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.preflight import check_devices, load_lanes
from qwen_cache.extras import require
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.terminal import console, counting, plural, print_json, print_problems, print_text, verbatim

# ---- serve -----------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache serve`.


def run_serve(config: Config, *, as_json: bool) -> int:
    """Listen, load the encoders, and answer until a signal ends it; return the exit code."""
    require_serve()
    from qwen_cache.service.app import log, serve, token_for
    from qwen_cache.service.engine import Engine
    from qwen_cache.service.http import address_of, open_socket

    token = token_for(config.serve)
    check_devices(config)
    with open_socket(config.serve.listen) as listener:
        with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
            job = prepare(config, on_bytes)
        out = console()
        out.print(f"[bold]model[/]    {verbatim(job.model.name)}  ({job.model.pipeline}, {job.recipe['dtype']})")
        place = verbatim(job.folder) if config.serve.store else "nowhere: the newest samples are in memory"
        out.print(f"[bold]stores[/]   {place}")
        if job.rows:
            out.print(f"[bold]source[/]   {verbatim(job.source)}: {plural(len(job.rows), 'row')} to name")
        if token is not None:
            out.print("[bold]token[/]    required; nothing is encrypted: put a proxy with TLS in front")
        url = address_of(listener)
        print_json({"url": url}) if as_json else print_text(f"listening on {url}")
        serve(Engine(job, load_lanes, config.serve), listener, token, log)
    return 0


def prepare(config: Config, on_bytes: Callable[[int], None]) -> BuildJob:
    """The job of the server, with the usable rows of its own source; prints the problems of the others."""
    if config.serve.source is None:
        return builder.prepare_service(config, on_bytes)
    job = builder.prepare_build(config, config.serve.source, on_bytes)
    print_problems(job.problems)
    return job


def require_serve() -> None:
    """ConfigError if a package of the extra `serve` is missing."""
    for module in ("torch", "fastapi", "uvicorn", "python_multipart", "prometheus_client"):
        require(module)


# ---- encode worker ---------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache encode-worker`, which `qwen-train run --encode-on-the-fly` starts.

LARGEST = 1 << 40  # bytes of a row's images: they are those of the trainer on this machine


def run_encode_worker(config: Config) -> int:
    """Serve one trainer on this machine until stdin ends; return the exit code.

    The first line of stdin is the token that the trainer will send; the first line of stdout is the address.
    """
    require_serve()
    from qwen_cache.service.app import serve
    from qwen_cache.service.engine import Engine
    from qwen_cache.service.http import address_of, open_socket

    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not be read as the address
    token = sys.stdin.readline().strip().encode()
    check_devices(config)
    job = _job(config)
    with open_socket("127.0.0.1:0") as listener:
        print(address_of(listener), file=answer, flush=True)
        serve(Engine(job, load_lanes, job.config.serve), listener, token, ends_with=sys.stdin)
    return 0


def _job(config: Config) -> builder.BuildJob:
    cache = config.cache.model_copy(update={"thumbnails": False})
    limits = {"store": False, "max_body": LARGEST, "queue_bytes": LARGEST, "max_pixels": LARGEST}
    own = ServeConfig.model_validate({"memory": config.serve.memory, **limits})
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        return builder.prepare_service(config.model_copy(update={"cache": cache, "serve": own}), on_bytes)
