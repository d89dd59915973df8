"""`gc`: the files that no manifest names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from qwen_cache.errors import ConfigError
from qwen_cache.options import CONFIG, JSON, OUTPUT, READ_CACHE, SET, command, flag, option
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, human_bytes, plural, print_json, print_next, typed_again
from qwen_cache.text import plain

GRACE_HOURS = 24.0  # longer than the upload of a shard, or of one step of a build


@command(page="howto/look-after-a-cache.md", examples=["qwen-cache gc --dry-run", "qwen-cache gc s3://bucket/shards"])
def gc(
    cache: Given | None = READ_CACHE,
    dry_run: bool = flag("--dry-run", OUTPUT, "List what would be deleted; delete nothing."),
    grace_hours: float | None = option(
        OUTPUT,
        "In object storage, spare files younger than this, and all of a build that wrote one as young.",
        "HOURS",
        shown=f"{GRACE_HOURS:g}",
        min=0,
    ),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Delete unreferenced shards and leftovers of aborted builds."""
    from qwen_cache.format.directory import collect_garbage
    from qwen_cache.format.remote import find_garbage, remove_garbage
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.remote import is_remote
    from qwen_cache.storage.stores import destination

    path = load_config(config, set_, [cache]).cache.path
    folder = destination(path)
    if grace_hours is not None and not is_remote(folder):
        what = "--grace-hours is for object storage: a local folder is locked while a build is running"
        raise ConfigError(what, where=folder, do="leave it out")
    hours = GRACE_HOURS if grace_hours is None else grace_hours  # object storage has no lock
    spared: Mapping[str, int] = {}
    if is_remote(folder):
        found = find_garbage(folder, hours * 3600)
        paths, spared = found.files if dry_run else remove_garbage(folder, found.files), found.spared
        sizes = {str(folder / each): found.files[each] for each in paths}
    else:
        sizes = {str(each): size for each, size in collect_garbage(folder, dry_run=dry_run).items()}
    total = sum(sizes.values())
    if json:
        facts = {"cache": path, "removed": not dry_run, "files": sizes, "bytes": total}
        print_json(facts | ({"spared_bytes": sum(spared.values())} if is_remote(folder) else {}))
        return 0
    out = console(always=dry_run)
    for name, size in sizes.items():
        out.print(f"{plain(name)}  {human_bytes(size)}", markup=False)
    out.print(f"{plural(len(sizes), 'file')}, {human_bytes(total)} {'to remove' if dry_run else 'removed'}")
    if spared:
        files, kept = plural(len(spared), "file"), human_bytes(sum(spared.values()))
        out.print(f"{files}, {kept} spared: a running build may need them (--grace-hours {hours:g})")
    if dry_run and sizes:
        print_next(typed_again("qwen-cache", without=["--dry-run"]))
    return 0
