"""Terminal front end of `qwen-cache gc`."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_cache.errors import ConfigError
from qwen_cache.format.directory import collect_garbage
from qwen_cache.format.remote import find_garbage, remove_garbage
from qwen_cache.storage.remote import is_remote
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import console, human_bytes, plural, print_json
from qwen_cache.text import plain

GRACE_HOURS = 24.0  # longer than the upload of a shard, or of one step of a build


def run_gc(cache: str, *, grace_hours: float | None, dry_run: bool, as_json: bool) -> int:
    """Remove the files that the dataset does not name, or with `dry_run` list them; return the exit code.

    In object storage, where no lock tells that a build is running, the files of the last `grace_hours` are spared.
    ConfigError if they are given for a local folder, which has a lock.
    """
    folder = destination(cache)
    if grace_hours is not None and not is_remote(folder):
        what, do = (
            "--grace-hours is for object storage: a local folder is locked while a build is running",
            "leave it out",
        )
        raise ConfigError(what, where=folder, do=do)
    hours = GRACE_HOURS if grace_hours is None else grace_hours
    spared: Mapping[str, int] = {}
    if is_remote(folder):
        found = find_garbage(folder, hours * 3600)
        paths, spared = found.files if dry_run else remove_garbage(folder, found.files), found.spared
        sizes = {str(folder / path): found.files[path] for path in paths}
    else:
        sizes = {str(path): size for path, size in collect_garbage(folder, dry_run=dry_run).items()}
    total = sum(sizes.values())
    if as_json:
        facts = {"cache": cache, "removed": not dry_run, "files": sizes, "bytes": total}
        print_json(facts | ({"spared_bytes": sum(spared.values())} if is_remote(folder) else {}))
        return 0
    out = console(always=dry_run)
    for path, size in sizes.items():
        out.print(f"{plain(path)}  {human_bytes(size)}", markup=False)
    out.print(f"{plural(len(sizes), 'file')}, {human_bytes(total)} {'to remove' if dry_run else 'removed'}")
    if spared:
        files, kept = plural(len(spared), "file"), human_bytes(sum(spared.values()))
        out.print(f"{files}, {kept} spared: a running build may need them (--grace-hours {hours:g})")
    return 0
