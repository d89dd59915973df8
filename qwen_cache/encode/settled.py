"""Which rows of a source that changes are at rest, for `build --watch`.

A row that is being written cannot be read yet, or differs from one look to the next. So a build takes the rows of which
two looks saw the same content, leaves the samples of all other rows as they are, and removes what two looks did not
see. While rows cannot be told apart, because their prompt or control is missing, it removes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.plan import BuildPlan
from qwen_cache.encode.slices import SlicedSource


@dataclass(frozen=True)
class Look:
    """What a look saw of a source: the keys of each row's samples, none if another row has the same content."""

    keys: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, job: BuildJob, plan: BuildPlan) -> Look:
        """What this plan says; a row with a problem has been written in part."""
        unusable = {problem.where for problem in plan.problems}
        keys: dict[str, tuple[str, ...]] = {row.name: () for row in job.rows if row.where not in unusable}
        for sample in plan.samples:
            keys[sample.row.name] += (sample.key,)
        return cls(keys)


def settled(job: BuildJob, now: Look, before: Look) -> BuildJob:
    """The job with the rows at rest alone, which keeps the samples of the others."""
    at_rest = frozenset(name for name, keys in now.keys.items() if before.keys.get(name) == keys)
    names = dict.fromkeys([*(row.name for row in job.rows), *before.keys])
    positions = {name: position for position, name in enumerate(names)}
    rows = [row for row in job.rows if row.name in at_rest]
    source = SlicedSource(positions, at_rest, is_complete=not job.problems)
    return replace(job, rows=rows, problems=[], sliced=source)
