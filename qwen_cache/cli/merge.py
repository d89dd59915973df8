"""`merge` and `migrate`: caches rewritten without the encoders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qwen_cache.errors import ConfigError
from qwen_cache.extras import __version__
from qwen_cache.options import (
    CACHE,
    CONFIG,
    INPUT,
    JSON,
    NEW_CACHE,
    OUTPUT,
    SET,
    argument,
    command,
    option,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, counting, human_bytes, plural, print_json, print_next
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.format.manifest import Manifest
    from qwen_cache.format.update import Update

OnSample = Callable[[int], None]
Version = Literal["v1", "v2"]


@command(
    page="howto/look-after-a-cache.md",
    examples=["qwen-cache migrate v1 v2", "qwen-cache migrate v2 v1 shards --out shards-v1"],
)
def migrate(
    old: Version = argument("FROM", "Format version of the cache.", default=...),
    new: Version = argument("TO", "Target format version.", default=...),
    cache: Given | None = CACHE,
    out: str | None = option(OUTPUT, "The folder to write.", "FOLDER", shown="CACHE itself"),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Convert a cache to another format version, without the encoders."""
    from qwen_cache.format import convert, directory
    from qwen_cache.settings.load import load_config
    from qwen_cache.settings.sections import check_compression
    from qwen_cache.storage.remote import LocalCopies, location
    from qwen_cache.storage.stores import destination

    source = location(load_config(config, set_, [cache]).cache.path)
    settings = load_config(config, set_, [cache, Given("--out", "cache.path", out) if out else None]).cache
    target, copies = destination(settings.path), LocalCopies.of_settings(settings)
    check_compression(new, settings.compression)
    directory.load(source)  # before the lock creates a folder
    with directory.writing(target):
        update = convert.plan_migration(source, target, int(old[1:]), int(new[1:]))

        def write(on_sample: OnSample) -> Manifest:
            size = int(settings.shard_size)
            return convert.migrate(source, update, size, settings.compression, __version__, copies, on_sample)

        return write_update(update, write, f"migrating to {new}", as_json=json)


@command(
    page="howto/look-after-a-cache.md",
    examples=[
        "qwen-cache merge shards-a shards-b --out shards",
        "qwen-cache merge shards --select 'cats/*' --out cats",
    ],
)
def merge(
    caches: list[str] = argument("CACHE", "The caches to merge.", default=...),
    select: list[str] | None = option(
        INPUT, "Only samples with these names: 'cats/*', or @FILE with a name per line.", "NAMES"
    ),
    out: Given = NEW_CACHE,
    compression: Given | None = setting(
        "cache.compression", OUTPUT, "Compression of the merged cache.", default="unchanged"
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Merge caches into one, or copy selected samples of one."""
    from qwen_cache.format import convert, directory
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.remote import LocalCopies, location
    from qwen_cache.storage.stores import destination

    settings = load_config(config, set_, [out, compression]).cache
    sources, target = [location(cache) for cache in caches], destination(settings.path)
    if any(directory.is_same(source, target) for source in sources):
        raise ConfigError("a cache cannot be merged into itself", where=target, do="choose another folder with --out")
    copies = LocalCopies.of_settings(settings)
    given = convert.read_sources(sources, convert.Selection.of(select or []), copies)  # before the lock makes a folder
    with directory.writing(target):
        plan = convert.plan_merge(given, target)

        def write(on_sample: OnSample) -> Manifest:
            packed = settings.compression if "compression" in settings.model_fields_set else None
            return convert.merge(plan, int(settings.shard_size), packed, __version__, copies, on_sample)

        return write_update(plan.update, write, "merging", as_json=json)


def write_update(update: Update, write: Callable[[OnSample], Manifest], what: str, *, as_json: bool) -> int:
    """Write the update and print what the folder holds; return the exit code."""
    if not update.is_nothing:
        with counting(what, total=len(update.order)) as on_sample:
            manifest = write(on_sample)
    else:
        manifest = update.existing.manifest
    size, samples = sum(shard.bytes for shard in manifest.shards), manifest.index.samples
    if as_json:
        print_json({"cache": str(update.folder), "written": len(update.order), "samples": samples, "bytes": size})
        return 0
    out = console()
    out.print("nothing to do" if update.is_nothing else "[bold green]done[/]", end=": ")
    version, shards = f"v{manifest.format_version}", plural(len(manifest.shards), "shard")
    out.print(
        f"{plain(update.folder)} holds {plural(samples, 'sample')} in {shards}, {human_bytes(size)}, {version}",
        markup=False,
    )
    if {shard.name for shard in update.existing.manifest.shards} - {shard.name for shard in manifest.shards}:
        out.print("replaced shards are kept for runs that read them; `qwen-cache gc` removes them")
    print_next(*(["qwen-train", command, str(update.folder)] for command in ("plan", "run")))
    return 0
