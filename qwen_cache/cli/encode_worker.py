"""Terminal front end of `qwen-cache encode-worker`, which `qwen-train run --encode-on-the-fly` starts."""

from __future__ import annotations

import os
import sys

from qwen_cache.console import FAILED, console, counting, print_problems
from qwen_cache.encode import builder
from qwen_cache.encode.load import load_lanes
from qwen_cache.encode.worker import serve
from qwen_cache.format.update import Existing
from qwen_cache.settings.load import Config


def run_encode_worker(config: Config, source: str) -> int:
    """Plan as `build` does into an empty folder, then encode samples on request; return the exit code."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output must not be read as a reply
    config = config.model_copy(update={"cache": config.cache.model_copy(update={"thumbnails": False})})
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = builder.prepare_build(config, source, on_bytes)
    with counting("reading the source", total=len(job.rows)) as on_rows:
        plan = builder.plan_build(job, Existing.empty(job.format_version), lambda: on_rows(1))
    print_problems(plan.problems)
    if not plan.samples or (plan.problems and config.data.on_error == "stop"):
        console(always=True).print("nothing can be trained; fix these rows, or skip them with data.on_error=skip")
        return FAILED
    serve(job, plan.samples, load_lanes, sys.stdin, replies)
    return 0
