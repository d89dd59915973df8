"""Measure what a cache of many samples costs: time and peak memory of each command, next to pyarrow reading the index.

    python tools/bench_scale.py [--rows 10000 100000 1000000] [--only COMMAND …] [--quick] [--folder DIR] [--json]

The source is a table of prompts about a hundred small images, so that ten million samples need no ten million files.
The cache has their index and manifest; its shards are empty files, since no measured command reads them. Every command
runs in a new process; the facts that it remembers are in the folder of this tool. Memory per row is what the command
takes more than the same command on a cache of 1,000 rows, divided by the rows: `anonymous` is the peak of RssAnon,
asked for every 5 ms, and `resident` that of VmHWM, which counts mapped files too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qwen_cache.format.identity import content_hash

ROOT = Path(__file__).parents[1]
LEAST = 1000  # rows of the cache whose memory is subtracted
PER_SHARD = 200  # samples: those of a gigabyte at 1024²
ROWS = (10_000, 100_000, 1_000_000)
QUICK = (2_000,)
POLL = 0.005  # seconds
IMAGES = 100  # different files, so that a validation split has some
MODEL, SOURCE, LONGER, CACHE, HOME = "model", "source.parquet", "longer.parquet", "cache", "home"
PROMPT = "make the sky of photo number {} look like an evening in late summer, and keep the people as they are"


# ---- a source and its cache ------------------------------------------------------------------------------------------


def write_source(path: Path, rows: int) -> None:
    schema = pa.schema([("target", pa.string()), ("control", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(path, schema) as writer:
        for some in _in_groups(range(rows)):
            files = [f"{i % IMAGES}.png" for i in some]
            writer.write_table(pa.table([files, files, [PROMPT.format(i) for i in some]], schema=schema))


def settings(folder: Path) -> Any:
    from qwen_cache.settings.load import load_config

    small = ["data.vae_image_size=1024", "data.condition_image_size=1024"]
    return load_config(None, small, model__path=str(folder / MODEL), cache__path=str(folder / CACHE))


def write_cache(folder: Path, rows: int) -> None:
    """The index and the manifest of what a build of the source would make, and empty shards."""
    from qwen_cache.encode import builder
    from qwen_cache.format.identity import recipe_id
    from qwen_cache.format.index import index_schema, write_tables
    from qwen_cache.format.manifest import IndexFile, Manifest, Shard
    from qwen_cache.format.update import Existing, RecipeKeys
    from qwen_cache.storage import remembered

    write_source(folder / "first.parquet", IMAGES)
    job = builder.prepare_build(settings(folder), str(folder / "first.parquet"))
    time.sleep(max(0, remembered.SETTLED_NS) / 1e9)  # a file that was just written is not remembered
    for name in (SOURCE, LONGER):  # so that their images are remembered
        samples = builder.plan_build(replace(job, source=str(folder / name)), Existing.empty(2)).samples
    shards = [f"{content_hash(b'shard %d' % i)}.tar" for i in range(-(-rows // PER_SHARD))]
    keys, recipe = RecipeKeys(), recipe_id(job.recipe)

    def groups() -> Iterator[pa.Table]:
        keys.clear()
        for some in _in_groups(range(rows)):
            group = _index_rows(some, samples, recipe, shards)
            keys.add(group)
            yield group

    index = write_tables(groups, index_schema(2))
    counts = [min(PER_SHARD, rows - i * PER_SHARD) for i in range(len(shards))]
    listed = tuple(Shard(name, count, 1 << 30) for name, count in zip(shards, counts, strict=True))
    manifest = replace(
        Manifest.empty(2),
        recipes={"default": keys.described(job.recipe)},
        index=IndexFile(rows, len(index), content_hash(index)),
        shards=listed,
    )
    job.folder.mkdir()
    for name in shards:
        (job.folder / name).touch()
    (job.folder / "index.parquet").write_bytes(index)
    (job.folder / "cache.json").write_bytes(manifest.to_bytes())


def _index_rows(numbers: range, samples: Sequence[Any], recipe: str, shards: Sequence[str]) -> pa.Table:
    """Rows as for real samples: hashes are all different, and every tensor is at its offset."""
    from qwen_cache.format.identity import sample_key
    from qwen_cache.format.index import IndexRow, index_schema, table_of
    from qwen_cache.format.sample import SampleMeta, TensorSpec, token_count
    from qwen_cache.format.shard import Entry

    shapes = samples[0].img_shapes
    sizes = {"image_latents": (token_count(shapes[:1]), 64), "control_latents": (token_count(shapes[1:]), 64)}
    sizes |= {"prompt_embeds": (20, 64), "empty_prompt_embeds": (5, 64)}
    tensors = {name: TensorSpec("BF16", shape, "0" * 32) for name, shape in sizes.items()}
    length = 4096 + sum(spec.nbytes for spec in tensors.values())
    meta = SampleMeta(recipe, samples[0].inputs, "", shapes, 15, tensors)
    row = IndexRow("", "", Entry(meta, 0, length, 2048))
    table = table_of([row], 2, index_schema(2)).take(pa.array([0] * len(numbers)))
    begins = np.array([i % PER_SHARD for i in numbers]) * length
    columns: dict[str, Any] = {
        "key": [sample_key(recipe, samples[i % IMAGES].inputs, PROMPT.format(i), shapes) for i in numbers],
        "name": [f"{i % IMAGES}#{i // IMAGES + 1}" if i >= IMAGES else f"{i}" for i in numbers],
        "target": [samples[i % IMAGES].inputs.target for i in numbers],
        "controls": [list(samples[i % IMAGES].inputs.controls) for i in numbers],
        "prompt": [PROMPT.format(i) for i in numbers],
        "shard": [shards[i // PER_SHARD] for i in numbers],
        "offset": begins,
    }
    for name in tensors:
        tensor = table[name].combine_chunks()
        hashes = pa.array([content_hash(f"{name} {i}".encode()) for i in numbers])
        offsets = pc.add(tensor.field("offset"), pa.array(begins))
        fields = {each.name: tensor.field(each.name) for each in tensor.type} | {"offset": offsets, "xxh3_128": hashes}
        columns[name] = pa.StructArray.from_arrays([*fields.values()], [*fields])
    for name, values in columns.items():
        field = table.schema.field(name)
        table = table.set_column(table.schema.get_field_index(name), field, pa.array(values, field.type))
    return table


def _in_groups(numbers: range) -> Iterator[range]:
    return (numbers[begin : begin + (1 << 16)] for begin in range(0, len(numbers), 1 << 16))


# ---- the commands, each in a process of its own ----------------------------------------------------------------------


def read_with_pyarrow(folder: Path) -> None:
    pq.read_table(folder / CACHE / "index.parquet", use_threads=False)


def open_it(folder: Path) -> Any:
    from qwen_cache import open_cache

    cache = open_cache(folder / CACHE)
    assert cache[len(cache) - 1].prompt
    return cache


def plan_epoch(folder: Path) -> None:
    """The first batches of an epoch."""
    from qwen_cache.batching import BatchPlan, index_token_counts
    from qwen_cache.settings.sections import TrainConfig

    cache = open_it(folder)
    plan = BatchPlan(index_token_counts(cache.table, cache.folder), TrainConfig(max_tokens=1000))
    list(itertools.islice(plan.rank_batches(0, 0, 1, 1), 10))


def start_training(folder: Path) -> None:
    """A trainer's work on its cache until the first batch: checks, the validation split, the plan, its summary."""
    from qwen_train.data.batches import Batches
    from qwen_train.data.checks import check_empty_prompts
    from qwen_train.data.samples import open_samples
    from qwen_train.flow import NoiseSchedule

    config = settings(folder)
    train = config.train.model_copy(update={"max_tokens": 1000, "validation_split": 0.05})
    samples = open_samples(config)
    check_empty_prompts(samples, 0.1)
    batches = Batches(samples, train, NoiseSchedule())
    batches.plan.summary()
    samples.edit_masks()
    next(batches.plan.rank_batches(0, 0, 1, 1))
    samples.row(0)


def check_index(folder: Path) -> None:
    """The work of `verify` on the index, without the shards."""
    from qwen_cache.format.update import read_existing
    from qwen_cache.format.verify import index_faults

    existing = read_existing(folder / CACHE, 2)
    faults, _ = index_faults(existing.rows, existing.manifest, folder / CACHE)
    assert not faults, faults[:3]


def build_one_more(folder: Path) -> None:
    """Add one sample: the whole of `build`, with zeros in place of encoders."""
    from bench_plan import Zeros

    from qwen_cache.encode import builder, write
    from qwen_cache.encode.builder import Encoders
    from qwen_cache.format import directory

    job = builder.prepare_build(settings(folder), str(folder / LONGER))
    with directory.writing(job.folder):
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        with Encoders(Zeros) as encoders:
            report = write.run(job, builder.make_update(job, existing, plan), plan.missing, encoders)
    assert len(report.made) == 1, report


def command_line(*words: str) -> Callable[[Path], None]:
    def run(folder: Path) -> None:
        from qwen_cache.cli import main

        places = {"SOURCE": folder / SOURCE, "CACHE": folder / CACHE, "MODEL": folder / MODEL, "PAGE": folder / "page"}
        sys.argv = ["qwen-cache", *(str(places.get(word, word)) for word in words)]
        main()

    return run


SIZES = ("--set", "data.vae_image_size=1024", "--set", "data.condition_image_size=1024")
COMMANDS: dict[str, Callable[[Path], Any]] = {
    "pyarrow reads the index": read_with_pyarrow,
    "open for the first time": open_it,
    "open": open_it,
    "plan an epoch": plan_epoch,
    "start training": start_training,
    "verify the index": check_index,
    "build --dry-run": command_line(
        "build", "SOURCE", "--dry-run", "--check", "--out", "CACHE", "--model", "MODEL", *SIZES
    ),
    "inspect": command_line("inspect", "CACHE", "--json"),
    "inspect --html": command_line("inspect", "CACHE", "--html", "PAGE"),
    "add one sample": build_one_more,
}
FIRST, ALONE = "open for the first time", "pyarrow reads the index"


def measured(folder: Path, name: str) -> dict[str, float]:
    """Run a command in a new process; its seconds, and the peaks of its memory in bytes."""
    command = [sys.executable, __file__, "--once", name, "--folder", str(folder)]
    begin, anonymous = time.monotonic(), 0
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while True:
            anonymous = max(anonymous, _memory(child.pid, "RssAnon"))
            try:
                child.wait(POLL)
                break
            except subprocess.TimeoutExpired:
                continue
        log.seek(0)
        printed = log.read().decode("utf-8", "replace")
    if child.returncode:
        raise SystemExit(f"{name}: {printed[-3000:]}")
    usage = json.loads(printed.splitlines()[-1])
    return {"seconds": time.monotonic() - begin, "anonymous": anonymous, **usage}


def _memory(process: int, name: str) -> int:
    """Bytes of a process; not from `ru_maxrss`, which begins with that of the process that started it."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(name)), 0)


def run_once(folder: Path, name: str) -> None:
    try:
        COMMANDS[name](folder)
    except SystemExit as exit_:
        if exit_.code:
            raise
    print("\n" + json.dumps({"resident": _memory(os.getpid(), "VmHWM"), "cpu": time.process_time()}))


# ---- the table -------------------------------------------------------------------------------------------------------


def measure(folder: Path, model: Path, rows: int, names: Sequence[str]) -> dict[str, Any]:
    """Every command on a cache of `rows` samples."""
    from PIL import Image

    folder.mkdir()
    (folder / MODEL).symlink_to(model)
    for i in range(IMAGES):
        Image.new("RGB", (32, 32), (i, i, 99)).save(folder / f"{i}.png")
    write_source(folder / SOURCE, rows)
    write_source(folder / LONGER, rows + 1)
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder / HOME)}):
        write_cache(folder, rows)
        size = (folder / CACHE / "index.parquet").stat().st_size
        found: dict[str, Any] = {}
        for name in names:
            if name == FIRST:
                shutil.rmtree(folder / HOME / "qwen-cache" / "indexes", ignore_errors=True)
            found[name] = measured(folder, name)
            print(f"{rows:,} rows: {name}: {found[name]}", file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return {"rows": rows, "index bytes": size, "commands": found}


def show(report: dict[str, Any]) -> None:
    least, *sizes = report["sizes"]
    for each in sizes:
        rows, alone = each["rows"], each["commands"].get(ALONE, {}).get("cpu")
        print(f"\n{rows:,} rows, an index of {each['index bytes'] / rows:.0f} bytes a row\n")
        print("| command | seconds | CPU seconds | of pyarrow's | anonymous bytes a row | resident bytes a row |")
        print("|---|---:|---:|---:|---:|---:|")
        for name, found in each["commands"].items():
            base = least["commands"][name]
            per_row = [max(0, found[kind] - base[kind]) / (rows - LEAST) for kind in ("anonymous", "resident")]
            ratio = f"{found['cpu'] / alone:.2f}" if alone else ""
            took = f"{found['seconds']:.1f} | {found['cpu']:.1f}"
            print(f"| {name} | {took} | {ratio} | {per_row[0]:,.0f} | {per_row[1]:,.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="COMMAND")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK[0]:,} rows only")
    parser.add_argument("--model", type=Path, help="a model folder; by default a tiny one is made")
    parser.add_argument("--folder", type=Path, help="for temporary files")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--once", choices=COMMANDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        run_once(arguments.folder, arguments.once)
        return
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        patch.dict(os.environ, {"PYTHONPATH": str(ROOT)}),
    ):
        model = arguments.model
        if model is None:
            from make_tiny_model import make_tiny_model

            model = make_tiny_model(Path(name) / MODEL, "edit")
        rows = (LEAST, *(QUICK if arguments.quick else arguments.rows))
        sizes = [measure(Path(name) / str(count), model.resolve(), count, arguments.only) for count in rows]
    report = {"sizes": sizes}
    print(json.dumps(report)) if arguments.json else show(report)


if __name__ == "__main__":
    main()
