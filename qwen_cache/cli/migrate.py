"""Terminal front end of `qwen-cache migrate`: progress, a summary after."""

from __future__ import annotations

from collections.abc import Callable

from qwen_cache.extras import __version__
from qwen_cache.format import directory
from qwen_cache.format.convert import migrate, plan_migration
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.update import Update
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import check_compression
from qwen_cache.storage.remote import LocalCopies, location
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import console, counting, human_bytes, plural, print_json
from qwen_cache.text import plain

OnSample = Callable[[int], None]


def run_migrate(config: Config, cache: str, old: int, new: int, *, as_json: bool) -> int:
    """Migrate `cache` into `config.cache.path`; return the exit code."""
    source, target = location(cache), destination(config.cache.path)
    copies = LocalCopies.of_settings(config.cache)
    check_compression(f"v{new}", config.cache.compression)
    directory.load(source)  # before the lock creates a folder
    with directory.writing(target):
        update = plan_migration(source, target, old, new)

        def write(on_sample: OnSample) -> Manifest:
            return migrate(
                source, update, int(config.cache.shard_size), config.cache.compression, __version__, copies, on_sample
            )

        return write_update(update, write, f"migrating to v{new}", as_json)


def write_update(update: Update, write: Callable[[OnSample], Manifest], what: str, as_json: bool) -> int:
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
    return 0
