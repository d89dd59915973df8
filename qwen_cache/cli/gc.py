"""Terminal front end of `qwen-cache gc`."""

from __future__ import annotations

from qwen_cache.console import console, human_bytes, plural, print_json
from qwen_cache.format.directory import collect_garbage
from qwen_cache.plain_text import plain
from qwen_cache.storage.url import local_folder


def run_gc(cache: str, *, dry_run: bool, as_json: bool) -> int:
    """Remove the files that the dataset does not name, or with `dry_run` list them; return the exit code."""
    sizes = collect_garbage(local_folder(cache), dry_run=dry_run)
    total = sum(sizes.values())
    if as_json:
        files = {str(path): size for path, size in sizes.items()}
        print_json({"cache": cache, "removed": not dry_run, "files": files, "bytes": total})
        return 0
    out = console(always=dry_run)
    for path, size in sizes.items():
        out.print(f"{plain(path)}  {human_bytes(size)}", markup=False)
    out.print(f"{plural(len(sizes), 'file')}, {human_bytes(total)} {'to remove' if dry_run else 'removed'}")
    return 0
