"""`merge` and `migrate`."""

from __future__ import annotations

from collections.abc import Callable

from qwen_cache.errors import ConfigError
from qwen_cache.extras import __version__
from qwen_cache.format import directory
from qwen_cache.format.convert import Selection, merge, migrate, plan_merge, plan_migration, read_sources
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.update import Update
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import check_compression
from qwen_cache.storage.remote import LocalCopies, location
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import console, counting, human_bytes, plural, print_json
from qwen_cache.text import plain

# ---- migrate ---------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache migrate`: progress, a summary after.

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


# ---- merge -----------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache merge`.


def run_merge(config: Config, caches: list[str], select: list[str], *, as_json: bool) -> int:
    """Merge `caches` into `config.cache.path`; return the exit code.

    Samples keep their compression unless `cache.compression` is set.
    """
    sources, target = [location(cache) for cache in caches], destination(config.cache.path)
    if any(directory.is_same(source, target) for source in sources):
        raise ConfigError("a cache cannot be merged into itself", where=target, do="choose another folder with --out")
    copies = LocalCopies.of_settings(config.cache)
    given = read_sources(sources, Selection.of(select), copies)  # before the lock creates a folder
    with directory.writing(target):
        plan = plan_merge(given, target)

        def write(on_sample: OnSample) -> Manifest:
            compression = config.cache.compression if "compression" in config.cache.model_fields_set else None
            return merge(plan, int(config.cache.shard_size), compression, __version__, copies, on_sample)

        return write_update(plan.update, write, "merging", as_json)
