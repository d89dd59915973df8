"""Terminal front end of `qwen-cache merge`."""

from __future__ import annotations

from qwen_cache.cli.migrate import OnSample, write_update
from qwen_cache.errors import ConfigError
from qwen_cache.extras import __version__
from qwen_cache.format import directory
from qwen_cache.format.convert import Selection, merge, plan_merge, read_sources
from qwen_cache.format.manifest import Manifest
from qwen_cache.settings.load import Config
from qwen_cache.storage.remote import LocalCopies, location
from qwen_cache.storage.stores import destination


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
