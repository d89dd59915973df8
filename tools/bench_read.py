"""Compare how fast one process reads the same samples from different formats into padded batches.

    python tools/bench_read.py [--total 2000] [--folder DIR] [--repeats 3] [--json]

A sample has the size of a Qwen-Image-Edit sample at a megapixel: two [4096, 64] latents and about 700 rows of prompt
embeddings in bfloat16, 6 MB. Every reader feeds the same collation, which copies into reused batch buffers; only ours,
and the second `memcpy`, hash what they read. The `DataLoader` rows are `qwen_cache.torch.CacheDataset` with its
`collate`, whose batches are new without workers: their CPU time is that of all processes, and workers are kept between
passes, as with `persistent_workers=True`. Where there is an accelerator, one row copies into pinned buffers. Each
measurement is a process of its own: time to the first batch, one pass that warms up and checks every byte, one timed
pass. Files are in the page cache.

`pip install webdataset litdata` for two of the others. mosaicml-streaming 0.13 requires old versions of numpy and
transformers: `pip install --no-deps mosaicml-streaming`, and the packages that it imports. Missing readers are skipped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from qwen_cache.format import directory
from qwen_cache.format.cache import Sample, open_cache
from qwen_cache.format.identity import Inputs, content_hash, copy_hashed, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.format.update import commit_update, open_staging, plan_update, read_existing
from qwen_cache.torch import CacheDataset
from qwen_cache.torch import collate as collate_items

BATCH = 4
CHUNK = 1 << 26  # bytes per shard or chunk, in formats with shards
WIDTH = {"image_latents": 64, "control_latents": 64, "prompt_embeds": 3584}
ORDERS = ("sequential", "shuffled")
Tensors = dict[str, torch.Tensor]
Batch = list[Tensors]
"""The samples of a batch, as views of it without padding."""
Epoch = Callable[[], Iterator[Any]]
"""Begins a pass over an opened dataset."""


@dataclass(frozen=True)
class Samples:
    """`count` samples of random numbers, the same in every format."""

    count: int
    side: int
    text: int

    def __getitem__(self, i: int) -> Tensors:
        rows = {"image_latents": self.side**2, "control_latents": self.side**2, "prompt_embeds": self.text_length(i)}
        generator = torch.Generator().manual_seed(i)
        return {n: torch.randn(rows[n], width, generator=generator).bfloat16() for n, width in WIDTH.items()}

    def text_length(self, i: int) -> int:
        """Lengths that differ by up to a sixteenth of `text`, so that batches need padding."""
        return self.text + i * 37 % (self.text // 8 + 1) - self.text // 16

    def longest(self) -> dict[str, int]:
        text = max(self.text_length(i) for i in range(self.count))
        return {"image_latents": self.side**2, "control_latents": self.side**2, "prompt_embeds": text}

    def __iter__(self) -> Iterator[Tensors]:
        return (self[i] for i in range(self.count))


# ---- formats: how to write and open each -----------------------------------------------------------------------------


def as_bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def as_tensors(parts: dict[str, Any]) -> Tensors:
    return {n: torch.frombuffer(parts[n], dtype=torch.bfloat16).view(-1, width) for n, width in WIDTH.items()}


def order(count: int, shuffled: bool) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randperm(count, generator=generator).tolist() if shuffled else list(range(count))


def write_cache(samples: Samples, folder: Path, recipe: Mapping[str, Any] | None = None) -> None:
    recipe = {"what": "random numbers", **(recipe or {})}
    grid = (1, samples.side, samples.side)

    def describe(i: int, tensors: Tensors) -> SampleMeta:
        source = content_hash(str(i).encode())
        specs = {n: TensorSpec("BF16", tuple(t.shape), content_hash(as_bytes(t))) for n, t in tensors.items()}
        return SampleMeta(recipe_id(recipe), Inputs(source, (source,), None), f"edit {i}", (grid, grid), 0, specs)

    with directory.writing(folder):
        listed = [ListedSample(str(i), describe(i, {}).key) for i in range(samples.count)]
        update = plan_update(folder, read_existing(folder, 2), 2, listed)
        staging = open_staging(update, "bench", CHUNK)
        for i, tensors in enumerate(samples):
            staging.add(describe(i, tensors), {n: as_bytes(t) for n, t in tensors.items()})
        commit_update(update, staging, {"default": recipe}, {"program": "bench_read"})


def open_ours(folder: Path, shuffled: bool) -> Epoch:
    cache = open_cache(folder)
    return lambda: (cache[i] for i in order(len(cache), shuffled))


def open_mapped(folder: Path, shuffled: bool) -> Epoch:
    """Tensors that are already mapped and touched, so that only the copy is measured."""
    samples = [sample.tensors() for sample in open_ours(folder, shuffled)()]
    return lambda: iter(samples)


def open_loader(workers: int) -> Callable[[Path, bool], Epoch]:
    def open_(folder: Path, shuffled: bool) -> Epoch:
        data = CacheDataset(folder)
        sampler, kept = order(len(data), shuffled), workers > 0
        loader = DataLoader(data, BATCH, False, sampler, None, workers, collate_items, persistent_workers=kept)
        return lambda: iter(loader)

    return open_


def open_webdataset(folder: Path, shuffled: bool) -> Epoch:
    """Our shards, read by webdataset."""
    import safetensors.torch
    import webdataset

    names = [shard["name"] for shard in json.loads((folder / "cache.json").read_text())["shards"]]
    shards = [str(folder / name) for name in names]
    data = webdataset.WebDataset(shards, shardshuffle=len(shards) if shuffled else False, empty_check=False)
    data = data.shuffle(100) if shuffled else data
    return lambda: (safetensors.torch.load(item["safetensors"]) for item in data)


def write_pt(samples: Samples, folder: Path) -> None:
    for i, tensors in enumerate(samples):
        torch.save(tensors, folder / f"{i:06}.pt")


def open_pt(folder: Path, shuffled: bool) -> Epoch:
    paths = sorted(folder.iterdir())
    return lambda: (torch.load(paths[i], weights_only=True) for i in order(len(paths), shuffled))


def write_safetensors(samples: Samples, folder: Path) -> None:
    import safetensors.torch

    for i, tensors in enumerate(samples):
        safetensors.torch.save_file(tensors, folder / f"{i:06}.safetensors")


def open_safetensors(folder: Path, shuffled: bool) -> Epoch:
    import safetensors.torch

    paths = sorted(folder.iterdir())
    return lambda: (safetensors.torch.load_file(paths[i]) for i in order(len(paths), shuffled))


def write_mds(samples: Samples, folder: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns=dict.fromkeys(WIDTH, "bytes"), size_limit=CHUNK) as writer:
        for tensors in samples:
            writer.write({name: bytes(as_bytes(tensor)) for name, tensor in tensors.items()})


def open_mds(folder: Path, shuffled: bool) -> Epoch:
    from streaming import StreamingDataset

    data = StreamingDataset(local=str(folder), shuffle=shuffled, batch_size=BATCH, num_canonical_nodes=1)
    return lambda: (as_tensors(item) for item in data)


def write_litdata(samples: Samples, folder: Path) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes=CHUNK)
    for i, tensors in enumerate(samples):
        cache[i] = {name: tensor.view(torch.int16) for name, tensor in tensors.items()}  # no bfloat16 in LitData
    cache.done()
    cache.merge()


def open_litdata(folder: Path, shuffled: bool) -> Epoch:
    from litdata import StreamingDataset

    data = StreamingDataset(str(folder), shuffle=shuffled)
    return lambda: ({name: tensor.view(torch.bfloat16) for name, tensor in item.items()} for item in data)


@dataclass(frozen=True)
class Format:
    """A format and its reader. `module` must be installed. Formats with the same `files` share them.

    An epoch has samples, or with `batched` what our `collate` returns.
    """

    files: str
    write: Callable[[Samples, Path], None]
    open: Callable[[Path, bool], Epoch]
    module: str = "torch"
    hashed: bool = False
    batched: bool = False
    pinned: bool = False

    def missing(self) -> str:
        """The packages that it needs and this machine lacks."""
        if not find_spec(self.module):
            return f"{self.module} is not installed"
        return "there is no accelerator" if self.pinned and not torch.accelerator.is_available() else ""


FORMATS = {
    "memcpy": Format("qwen-cache", write_cache, open_mapped),
    "memcpy + xxh3": Format("qwen-cache", write_cache, open_mapped, hashed=True),
    "qwen-cache": Format("qwen-cache", write_cache, open_ours),
    "qwen-cache, pinned": Format("qwen-cache", write_cache, open_ours, pinned=True),
    **{
        f"DataLoader, {workers} workers": Format("qwen-cache", write_cache, open_loader(workers), batched=True)
        for workers in (0, 2, 4)
    },
    ".safetensors": Format("safetensors", write_safetensors, open_safetensors),
    ".pt": Format("pt", write_pt, open_pt),
    "webdataset": Format("qwen-cache", write_cache, open_webdataset, "webdataset"),
    "MosaicML Streaming": Format("mds", write_mds, open_mds, "streaming"),
    "LitData": Format("litdata", write_litdata, open_litdata, "litdata"),
}


# ---- one measurement -------------------------------------------------------------------------------------------------


def batches(kind: Format, items: Iterator[Any], buffers: Tensors) -> Iterator[Batch]:
    """The batches of an epoch."""
    return map(views_of, items) if kind.batched else collate(items, buffers, kind.hashed)


def collate(items: Iterator[Any], buffers: Tensors, hashed: bool) -> Iterator[Batch]:
    """Fill `buffers` with one padded batch after the other."""
    while batch := list(itertools.islice(items, BATCH)):
        rows = [count_rows(item) for item in batch]
        for name, buffer in buffers.items():
            padded = max(each[name] for each in rows)
            for i, item in enumerate(batch):
                target = buffer[i, : rows[i][name]]
                buffer[i, rows[i][name] : padded] = 0
                if isinstance(item, Sample):
                    item.copy_into(name, target)
                elif hashed:
                    copy_hashed(as_bytes(item[name]), as_bytes(target))
                else:
                    target.copy_(item[name])
        yield [{name: buffers[name][i, :count] for name, count in each.items()} for i, each in enumerate(rows)]


def count_rows(item: Sample | Tensors) -> dict[str, int]:
    tensors = item.row.meta.tensors if isinstance(item, Sample) else item
    return {name: tensors[name].shape[0] for name in WIDTH}


def views_of(batch: dict[str, Any]) -> Batch:
    views = []
    for i, shapes in enumerate(batch["img_shapes"]):
        (_, h, w), *_ = shapes
        images, text = (int(batch[name][i].sum()) for name in ("latents_mask", "prompt_embeds_mask"))
        latents = batch["latents"][i]
        named = {"image_latents": latents[: h * w], "control_latents": latents[h * w : images]}
        views.append({**named, "prompt_embeds": batch["prompt_embeds"][i, :text]})
    return views


def digest(sample: Tensors) -> str:
    """One hash for all tensors of a sample."""
    return content_hash("".join(content_hash(as_bytes(sample[name])) for name in WIDTH).encode())


def cpu_seconds() -> float:
    """The memory of this process and its workers."""
    workers = [psutil.Process(process.pid).cpu_times() for process in multiprocessing.active_children()]
    return time.process_time() + sum(times.user + times.system for times in workers)


def measure(name: str, shuffled: bool, samples: Samples, root: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    kind, longest = FORMATS[name], samples.longest()
    buffers = {
        n: torch.zeros(BATCH, longest[n], width, dtype=torch.bfloat16, pin_memory=kind.pinned)
        for n, width in WIDTH.items()
    }
    begin = time.perf_counter()
    epoch = kind.open(root / kind.files, shuffled)
    next(batches(kind, epoch(), buffers))
    first = time.perf_counter() - begin
    hashes = [digest(sample) for batch in batches(kind, epoch(), buffers) for sample in batch]
    cpu, wall, copied = cpu_seconds(), time.perf_counter(), 0
    for batch in batches(kind, epoch(), buffers):
        copied += sum(tensor.nbytes for sample in batch for tensor in sample.values())
    cpu, wall = cpu_seconds() - cpu, time.perf_counter() - wall
    return {
        "samples": len(hashes),
        "digest": content_hash("".join(sorted(hashes) if shuffled else hashes).encode()),
        "cpu_seconds_per_gb": cpu / copied * 1e9,
        "gb_per_second": copied / wall / 1e9,
        "first_batch_seconds": first,
    }


# ---- comparison ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=float, default=2000, help="MB per format")
    parser.add_argument("--folder", type=Path, help="where to write; existing files are reused (default: temporary)")
    parser.add_argument("--repeats", type=int, default=3, help="runs; the median is reported")
    parser.add_argument("--side", type=int, default=64, help="side of an image, in tokens")
    parser.add_argument("--text", type=int, default=700, help="tokens of prompt embeddings")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "FORMAT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = 2 * (2 * options.side**2 * WIDTH["image_latents"] + options.text * WIDTH["prompt_embeds"])
    samples = Samples(max(BATCH + 1, round(options.total * 1e6 / size)), options.side, options.text)
    if options.worker:
        task, name = options.worker
        print(json.dumps(work(task, name, samples, options.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        arguments = [f"--{n}={getattr(options, n)}" for n in ("total", "side", "text")]
        results, skipped = compare([*arguments, f"--folder={options.folder or temporary}"], options.repeats)
    equal = all(len({result["digest"] for result in results[order].values()}) == 1 for order in ORDERS)
    report = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "samples": samples.count,
        "bytes_per_sample": size,
        "equal": equal,
        "skipped": skipped,
        "results": results,
    }
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    sys.exit(0 if equal else 1)


def work(task: str, name: str, samples: Samples, root: Path) -> Any:
    """In a process of its own: write a format, or measure a reader."""
    if task in ORDERS:
        return measure(name, task == "shuffled", samples, root)
    folder = root / FORMATS[name].files
    if not folder.exists():
        partial_folder = root / f"{FORMATS[name].files}.partial"
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
        FORMATS[name].write(samples, partial_folder)
        partial_folder.rename(folder)
    return samples.count


def run_worker(task: str, name: str, arguments: list[str]) -> Any:
    """Run this script in a process of its own; returns the JSON of its last line."""
    command = [sys.executable, "-W", "ignore", __file__, *arguments, "--worker", task, name]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{name}, {task}: {process.stderr}")
    return json.loads(process.stdout.splitlines()[-1])


def compare(arguments: list[str], repeats: int) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Medians by order and reader, and why readers are skipped. The order of processes alternates."""
    skipped = {name: missing for name, kind in FORMATS.items() if (missing := kind.missing())}
    names = [name for name in FORMATS if name not in skipped]
    for name in names:
        run_worker("write", name, arguments)
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {order: {name: [] for name in names} for order in ORDERS}
    for repeat in range(repeats):
        tasks = [(order, name) for order in ORDERS for name in names]
        for order, name in reversed(tasks) if repeat % 2 else tasks:
            print(f"{repeat + 1} of {repeats}: {name}, {order}", file=sys.stderr)
            runs[order][name].append(run_worker(order, name, arguments))
    return {order: {name: median(results) for name, results in each.items()} for order, each in runs.items()}, skipped


def median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of every number. The digest must be the same in all runs: readers are deterministic."""
    assert len({run["digest"] for run in runs}) == 1, "passes differ"
    return {n: statistics.median(run[n] for run in runs) if n != "digest" else v for n, v in runs[0].items()}


def show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    size = report["samples"] * report["bytes_per_sample"] / 1e9
    title = f"{report['samples']} samples, {size:.2f} GB, batches of {BATCH}; {report['machine']}"
    table = Table("", title=title, box=SIMPLE, caption="sequential, then shuffled; CPU-seconds per GB of batches")
    for column in ("CPU-s/GB", "", "× memcpy", "", "GB/s", "", "first batch", ""):
        table.add_column(column, justify="right", no_wrap=True)
    columns = [report["results"][order] for order in ORDERS]
    for name in columns[0]:
        cpu = [results[name]["cpu_seconds_per_gb"] for results in columns]
        ratios = [each / results["memcpy"]["cpu_seconds_per_gb"] for each, results in zip(cpu, columns, strict=True)]
        speeds = [results[name]["gb_per_second"] for results in columns]
        firsts = ["" if name.startswith("memcpy") else f"{f[name]['first_batch_seconds']:.2f} s" for f in columns]
        cells = [f"{x:.3f}" for x in cpu] + [f"{x:.2f}" for x in ratios] + [f"{x:.1f}" for x in speeds]
        table.add_row(name, *cells, *firsts)
    console = Console(width=110)
    console.print(table)
    for name, reason in report["skipped"].items():
        console.print(f"{name} was skipped: {reason}")
    if not report["equal"]:
        console.print("[bold]The readers did not give the same batches.[/bold]")


if __name__ == "__main__":
    main()
