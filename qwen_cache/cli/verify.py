"""`verify`."""

from __future__ import annotations

from qwen_cache.format.verify import verify_cache
from qwen_cache.terminal import FAULTS, console, counting, plural, print_json
from qwen_cache.text import plain


def run_verify(cache: str, *, as_json: bool) -> int:
    """Print every fault of a cache; return the exit code."""
    with counting("verifying", in_bytes=True) as on_bytes:
        findings = verify_cache(cache, on_bytes)
    if as_json:
        print_json({"cache": cache, "ok": not findings, "findings": [finding.to_json() for finding in findings]})
        return FAULTS if findings else 0
    for finding in findings:
        console(always=True).print(str(finding), markup=False)
    summary = plural(len(findings), "fault") if findings else "OK: all checksums match"
    console(always=bool(findings)).print(f"{plain(cache)}: {summary}", markup=False)
    return FAULTS if findings else 0
