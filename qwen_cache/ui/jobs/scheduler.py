"""Which queued jobs start now.

Two jobs with a common device never run together. A job that waits reserves its devices from those behind it, so none
waits for ever. A device whose number is not known, such as `auto`, may be any. Jobs without devices are short checks: a
few of them run at any time. One that fails holds up no other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qwen_cache.ui.jobs.job import Job

MAX_CHECKS = 2
_KNOWN = re.compile(r"cpu|mps|[a-z]+:[0-9]+", re.ASCII)


def to_start(jobs: Sequence[Job]) -> list[Job]:
    """Those of the queued jobs, in this order, that may run beside the active ones."""
    taken = [job.devices for job in jobs if job.is_active and job.devices]
    checks = sum(job.is_active and not job.devices for job in jobs)
    chosen = []
    for job in jobs:
        if job.state != "queued":
            continue
        if not job.devices:
            is_free = checks < MAX_CHECKS
            checks += is_free
        else:
            is_free = not any(have_common(job.devices, devices) for devices in taken)
            taken.append(job.devices)
        if is_free:
            chosen.append(job)
    return chosen


def have_common(some: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two jobs on these devices may use the same one."""
    return any(not _KNOWN.fullmatch(each) for each in (*some, *others)) or not set(some).isdisjoint(others)
