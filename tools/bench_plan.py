"""Measure what `qwen-cache build --dry-run` costs: at first, when nothing has changed, and after one change.

    python tools/bench_plan.py [--pairs 50000] [--side 64] [--bucket] [--folder DIR] [--json]

Edit pairs of small JPEGs, every file with different bytes, and a cache of them whose tensors are zeros, so that no
encoder runs. Every plan runs in a new process, the first one with no images remembered; its CPU time includes starting
Python. The bytes of images are counted where the program reads them. With --bucket, the same pairs on moto's S3 server,
which counts its requests; then the CPU time is that of the client alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from qwen_cache.cli.build import run_build
from qwen_cache.encode import builder, write
from qwen_cache.encode.builder import BuildJob, Encoders, RunningEncoders
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.format import directory
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.sample import SampleMeta, TensorSpec, token_count
from qwen_cache.settings.load import Config, load_config
from qwen_cache.sources import places
from qwen_cache.storage import remembered
from qwen_cache.terminal import plural

ROOT = Path(__file__).parents[1]
BUCKET = "bench"
PLANS = ("first", "unchanged", "one change")


# ---- pairs, and a cache of them --------------------------------------------------------------------------------------


def write_pairs(folder: Path, pairs: int, side: int) -> None:
    """Pairs as JPEGs; a number after the end of each JPEG makes its bytes unique."""
    pixels = np.random.default_rng(0).integers(0, 256, (side // 8, side // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(file, "JPEG", quality=90)
    for name in ("target_images", "control_images"):
        (folder / name).mkdir(parents=True)
    for i in range(pairs):
        for kind, name in enumerate(("target_images", "control_images")):
            (folder / name / f"{i:06}.jpg").write_bytes(file.getvalue() + f"{2 * i + kind:08}".encode())
        (folder / "target_images" / f"{i:06}.txt").write_text(f"change number {i}")


class Zeros(RunningEncoders):
    """In place of the encoders."""

    def __init__(self, job: BuildJob) -> None:
        self.recipe, self.width = recipe_id(job.recipe), job.model.text_width

    def close(self) -> None:
        pass

    def submit(self, sample: PlannedSample, known: object = None) -> PlannedSample:
        return sample

    def result(self, sample: PlannedSample) -> tuple[SampleMeta, dict[str, memoryview]]:
        shapes = sample.img_shapes
        wanted = {"image_latents": (token_count(shapes[:1]), 64), "control_latents": (token_count(shapes[1:]), 64)}
        wanted |= {"prompt_embeds": (2, self.width), "empty_prompt_embeds": (1, self.width)}
        data = {name: memoryview(bytes(2 * rows * columns)) for name, (rows, columns) in wanted.items()}
        tensors = {name: TensorSpec("BF16", shape, content_hash(data[name])) for name, shape in wanted.items()}
        return SampleMeta(self.recipe, sample.inputs, sample.row.prompt, shapes, 1, tensors), data


def fill(config: Config, source: str) -> None:
    """Build the cache without encoders."""
    job = builder.prepare_build(config, source)
    with directory.writing(job.folder):
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        assert not plan.problems, plan.problems[:3]
        with Encoders(Zeros) as encoders:
            write.run(job, builder.make_update(job, existing, plan), plan.to_encode, encoders)


# ---- one plan --------------------------------------------------------------------------------------------------------


def settings(model: str, out: str) -> Config:
    small = ["data.vae_image_size=1024", "data.condition_image_size=1024"]
    return load_config(None, small, model__path=model, cache__path=out)


def plan_once(model: str, out: str, source: str) -> dict[str, Any]:
    """One dry run in this process: its CPU time, the images and bytes it read, and what it printed."""
    sizes: list[int] = []

    def counted(path: places.Location, limit: int = places.MAX_FILE) -> bytes:
        data = read(path, limit)
        sizes.append(len(data))
        return data

    read, printed = places.read_bytes, io.StringIO()
    with patch.object(places, "read_bytes", counted), contextlib.redirect_stdout(printed):
        run_build(
            settings(model, out),
            source,
            ray=None,
            dry_run=True,
            check=False,
            measure=False,
            replace_recipe=False,
            repair=False,
            only_validation=False,
            as_json=True,
        )
    plan = json.loads(printed.getvalue())
    counts = {name: plan[name] for name in ("to_encode", "cached")}
    return {"cpu_seconds": time.process_time(), "images": len(sizes), "bytes": sum(sizes), **counts}


def plan_alone(*arguments: str) -> dict[str, Any]:
    """`plan_once` in a new process."""
    command = [sys.executable, __file__, "--once", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return dict(json.loads(done.stdout))


# ---- three plans -----------------------------------------------------------------------------------------------------


class Requests(logging.Handler):
    """Counts the requests in the log of moto's server."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if match := re.search(r"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP", record.getMessage()):
            self.counts["LIST" if match[1] == "GET" and "list-type=" in match[2] else match[1]] += 1


@contextlib.contextmanager
def bucket() -> Iterator[Requests]:
    """An S3 server that every client of this process and its children uses."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server, requests, log = (
        ThreadedMotoServer("127.0.0.1", port=0, verbose=False),
        Requests(),
        logging.getLogger("werkzeug"),
    )
    log.handlers, log.propagate = [requests], False
    log.setLevel(logging.INFO)
    server.start()
    host, port = server.get_host_and_port()
    here = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with patch.dict(os.environ, here):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").call_s3("create_bucket", Bucket=BUCKET)
        yield requests
    server.stop()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def measure(folder: Path, pairs: Path, model: str, requests: Requests | None) -> dict[str, Any]:
    """The three plans of local pairs, or of their copy in the bucket of `requests`."""
    source, out = str(pairs), str(folder / ("remote" if requests else "local"))
    changed = sorted((pairs / "target_images").glob("*.jpg"))[0]
    if requests is not None:
        import fsspec

        files = fsspec.filesystem("s3")
        files.put(f"{pairs}/", f"{BUCKET}/pairs/", recursive=True)
        source = f"s3://{BUCKET}/pairs"
    found: dict[str, Any] = {}
    for name in PLANS:
        if name == "unchanged":
            fill(settings(model, out), source)
        if name == "one change":
            changed.write_bytes(changed.read_bytes()[:-8] + (b"anywhere" if requests else b"here now"))
            if requests is not None:
                files.put(str(changed), f"{BUCKET}/pairs/target_images/{changed.name}")
        if requests is not None:
            requests.counts.clear()
        found[name] = plan_alone(model, out, source)
        if requests is not None:
            found[name]["requests"] = dict(requests.counts)
    return found


def show(report: dict[str, Any]) -> None:
    print(f"{plural(report['pairs'], 'pair')} of {report['side']}×{report['side']}")
    for place, plans in report["results"].items():
        print(
            f"\n| {place} | CPU seconds | images read | bytes read | to encode |" + " requests |" * (place == "bucket")
        )
        print("|---|---:|---:|---:|---:|" + "---|" * (place == "bucket"))
        for name, each in plans.items():
            counts = ", ".join(f"{kind} {count:,}" for kind, count in each.get("requests", {}).items())
            cells = [f"{each['cpu_seconds']:.1f}", *(f"{each[key]:,}" for key in ("images", "bytes", "to_encode"))]
            print(f"| {name} | " + " | ".join(cells + ([counts] if counts else [])) + " |")
        ratio = plans["first"]["cpu_seconds"] / plans["unchanged"]["cpu_seconds"]
        print(f"an unchanged plan costs {1 / ratio:.2f} of the first")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=50_000)
    parser.add_argument("--side", type=int, default=64, help="pixels of a side of every image")
    parser.add_argument("--bucket", action="store_true", help="also measure the pairs in a bucket")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", nargs=3, metavar=("MODEL", "OUT", "SOURCE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(plan_once(*arguments.once)))
        return
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        patch.dict(os.environ, {"XDG_CACHE_HOME": f"{name}/home", "PYTHONPATH": str(ROOT)}),
    ):
        from make_tiny_model import make_tiny_model  # imports torch, which a plan does not

        folder = Path(name)
        model = str(make_tiny_model(folder / "model", "edit"))
        write_pairs(folder / "pairs", arguments.pairs, arguments.side)
        time.sleep(max(0, remembered.SETTLED_NS) / 1e9)  # a file that was just written is not remembered
        results = {"local": measure(folder, folder / "pairs", model, None)}
        if arguments.bucket:
            with bucket() as requests:
                results["bucket"] = measure(folder, folder / "pairs", model, requests)
    report = {"pairs": arguments.pairs, "side": arguments.side, "results": results}
    print(json.dumps(report)) if arguments.json else show(report)


if __name__ == "__main__":
    main()
