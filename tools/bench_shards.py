"""Measure how readers scale with the number of shards: CPU time and memory of opening, reading and verifying.

    python tools/bench_shards.py [--shards 1000 10000 100000] [--folder DIR]

Each shard holds one sample of about 3 kB, so nothing is measured but the work per shard. Files are in the page cache.
Every measurement is a process of its own, with 64 file descriptors.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from qwen_cache.format.cache import open_cache
from qwen_cache.format.identity import Inputs, content_hash, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update
from qwen_cache.format.verify import verify_cache

RECIPE = {"what": "zeros"}
SHAPES = {"image_latents": (1, 64), "prompt_embeds": (1, 64)}
DESCRIPTORS = 64


def write(folder: Path, count: int) -> None:
    """A cache of `count` shards, not synced to the disk."""
    data = {name: memoryview(bytes(128)) for name in SHAPES}
    specs = {name: TensorSpec("BF16", shape, content_hash(data[name])) for name, shape in SHAPES.items()}
    inputs = [Inputs(content_hash(str(i).encode()), (), None) for i in range(count)]
    metas = [SampleMeta(recipe_id(RECIPE), each, "a cat", ((1, 1, 1),), 0, specs) for each in inputs]
    listed = [ListedSample(str(i), meta.key) for i, meta in enumerate(metas)]
    with patch("qwen_cache.format.shard.sync"):
        update = plan_update(folder, Existing.empty(2), 2, listed)
        staging = open_staging(update, "bench", 1)
        for meta in metas:
            staging.add(meta, data)
        commit_update(update, staging, {"default": RECIPE}, {"program": "bench_shards"})


def first(folder: Path) -> None:
    open_cache(folder)[0].buffer("image_latents")


def kept(folder: Path) -> None:
    """Every sample, with a view of each shard kept; at most as many as Linux maps by default."""
    cache = open_cache(folder)
    views = [cache[i].buffer("image_latents") for i in range(min(len(cache), 60_000))]
    assert len(views[-1]) == 128


def read(folder: Path) -> None:
    assert sum(len(sample.buffer("image_latents")) for sample in open_cache(folder)) > 0


def verify(folder: Path) -> None:
    assert verify_cache(folder) == []


TASKS: dict[str, Callable[[Path], None]] = {
    "open_cache, first sample": first,
    "every sample": read,
    "every sample, views kept": kept,
    "verify": verify,
}


def work(task: str, folder: Path) -> dict[str, float]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS,) * 2)
    before, begin = peak_megabytes(), time.process_time()
    TASKS[task](folder)
    return {"seconds": time.process_time() - begin, "MB": peak_megabytes() - before}


def peak_megabytes() -> float:
    """The most memory of this process so far, mapped files included; Linux only."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--folder", type=Path, help="where to write; existing caches are reused (default: temporary)")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(options.worker[0], Path(options.worker[1]))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        for count in options.shards:
            folder = (options.folder or Path(temporary)) / str(count)
            if not (folder / "cache.json").exists():
                write(folder, count)
            for task in TASKS:
                command = [sys.executable, __file__, "--worker", task, str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(f"{task} of {count} shards: {done.stderr}")
                found = json.loads(done.stdout)
                print(f"{count:>8} shards  {task:<26} {found['seconds']:8.2f} s  {found['MB']:7.0f} MB", flush=True)


if __name__ == "__main__":
    main()
