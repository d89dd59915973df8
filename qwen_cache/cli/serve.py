"""`serve`, and the worker of `run --encode-on-the-fly`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
import typer.main

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    CONTROLS,
    DTYPE,
    INPUT,
    JSON,
    MODEL_PATH,
    OUT_CACHE,
    OUTPUT,
    SET,
    TARGETS,
    TEXT_DEVICE,
    TEXT_ENCODER,
    VAE_DEVICE,
    command,
    flag,
    given_controls,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, counting, plural, print_json, print_problems, print_text, verbatim

if TYPE_CHECKING:
    from qwen_cache.encode.builder import BuildJob
    from qwen_cache.settings.load import Config

TOKEN_FILE = "A file with the token that requests must have; required unless only this machine can connect."
SOURCE = "A source whose rows clients name in place of sending them; read when the server starts."


@command(
    page="howto/use-more-machines.md",
    examples=[
        "qwen-cache serve --vae-device cuda:0 --text-device cuda:1",
        "qwen-cache serve --out s3://team/shards --listen 0.0.0.0:8077 --token-file t",
    ],
)
def serve(
    listen: Given | None = setting("serve.listen", INPUT, "Where to listen.", "HOST:PORT"),
    token_file: Given | None = setting("serve.token_file", INPUT, TOKEN_FILE, "FILE"),
    source: Given | None = setting("serve.source", INPUT, SOURCE, "SOURCE"),
    targets: Given | None = TARGETS,
    controls: list[str] | None = CONTROLS,
    model: Given | None = MODEL_PATH,
    text_encoder: Given | None = TEXT_ENCODER,
    dtype: Given | None = DTYPE,
    vae_device: Given | None = VAE_DEVICE,
    text_device: Given | None = TEXT_DEVICE,
    out: Given | None = OUT_CACHE,
    no_store: bool = flag("--no-store", OUTPUT, "Keep the newest samples in memory, and write no cache."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Keep the encoders loaded, and encode over HTTP what clients send."""
    from qwen_cache.settings.load import load_config

    unstored = Given("--no-store", "serve.store", False) if no_store else None
    given = (listen, token_file, source, model, text_encoder, dtype, vae_device, text_device, out, unstored)
    columns = [each for each in (targets, given_controls(controls)) if each is not None]
    settings = load_config(config, set_, [*given, *columns])
    if columns and settings.serve.source is None:
        raise ConfigError(f"{columns[0].option} goes with --source", do="leave it out")
    require_serve()
    from qwen_cache.encode.preflight import check_devices, load_lanes
    from qwen_cache.service.app import log, token_for
    from qwen_cache.service.app import serve as answer
    from qwen_cache.service.engine import Engine
    from qwen_cache.service.http import address_of, open_socket

    token = token_for(settings.serve)
    check_devices(settings)
    with open_socket(settings.serve.listen) as listener:
        with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
            job = prepare(settings, on_bytes)
        shown = console()
        shown.print(f"[bold]model[/]    {verbatim(job.model.name)}  ({job.model.pipeline}, {job.recipe['dtype']})")
        place = verbatim(job.folder) if settings.serve.store else "nowhere: the newest samples are in memory"
        shown.print(f"[bold]stores[/]   {place}")
        if job.rows:
            shown.print(f"[bold]source[/]   {verbatim(job.source)}: {plural(len(job.rows), 'row')} to name")
        if token is not None:
            shown.print("[bold]token[/]    required; nothing is encrypted: put a proxy with TLS in front")
        url = address_of(listener)
        print_json({"url": url}) if json else print_text(f"listening on {url}")
        answer(Engine(job, load_lanes, settings.serve), listener, token, log)
    return 0


def prepare(config: Config, on_bytes: Callable[[int], None]) -> BuildJob:
    """The job of the server, with the usable rows of its own source; prints the problems of the others."""
    from qwen_cache.encode import builder

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
# `qwen-cache encode-worker`, which `qwen-train run --encode-on-the-fly` starts; nobody types it.

LARGEST = 1 << 40  # bytes of a row's images: they are those of the trainer on this machine
_worker = typer.Typer(add_completion=False)


@_worker.command("encode-worker", hidden=True)
def _serve_trainer(settings: str) -> int:
    """A server for one trainer, `qwen-train run --encode-on-the-fly`; it ends with stdin."""
    require_serve()
    from qwen_cache.encode.builder import prepare_service
    from qwen_cache.encode.preflight import check_devices, load_lanes
    from qwen_cache.service.app import serve
    from qwen_cache.service.engine import Engine
    from qwen_cache.service.http import address_of, open_socket
    from qwen_cache.settings.load import parse_config
    from qwen_cache.settings.sections import ServeConfig

    config = parse_config(settings)
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not be read as the address
    token = sys.stdin.readline().strip().encode()  # which the trainer will send
    check_devices(config)
    limits = {"store": False, "max_body": LARGEST, "queue_bytes": LARGEST, "max_pixels": LARGEST}
    own = ServeConfig.model_validate({"memory": config.serve.memory, **limits})
    cache = config.cache.model_copy(update={"thumbnails": False})
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = prepare_service(config.model_copy(update={"cache": cache, "serve": own}), on_bytes)
    with open_socket("127.0.0.1:0") as listener:
        print(address_of(listener), file=answer, flush=True)
        serve(Engine(job, load_lanes, job.config.serve), listener, token, ends_with=sys.stdin)
    return 0


encode_worker = typer.main.get_command(_worker)
