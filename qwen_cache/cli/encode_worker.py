"""Terminal front end of `qwen-cache encode-worker`, which `qwen-train run --encode-on-the-fly` starts."""

from __future__ import annotations

import os
import sys

from qwen_cache.cli.serve import require_serve
from qwen_cache.encode import builder
from qwen_cache.encode.load import check_devices, load_lanes
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.terminal import counting

LARGEST = 1 << 40  # bytes of a row's images: they are those of the trainer on this machine


def run_encode_worker(config: Config) -> int:
    """Serve one trainer on this machine until stdin ends; return the exit code.

    The first line of stdin is the token that the trainer will send; the first line of stdout is the address.
    """
    require_serve()
    from qwen_cache.serve.engine import Engine
    from qwen_cache.serve.run import serve
    from qwen_cache.web import address_of, open_socket

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
