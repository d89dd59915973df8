"""Terminal front end of `qwen-cache verify`."""

from __future__ import annotations

from qwen_cache.console import FAULTS, console, counting, plural, print_json
from qwen_cache.format.verify import verify_cache


def run_verify(cache: str, *, as_json: bool) -> int:
    """Print every fault of a cache; return the exit code."""
    with counting("verifying", in_bytes=True) as on_bytes:
        findings = verify_cache(cache, on_bytes)
    if as_json:
        print_json({"cache": cache, "ok": not findings, "findings": [finding.to_json() for finding in findings]})
        return FAULTS if findings else 0
    for finding in findings:
        console().print(str(finding), markup=False)
    console().print(
        f"{cache}: {plural(len(findings), 'fault')}" if findings else f"{cache}: every byte is as it was written"
    )
    return FAULTS if findings else 0
