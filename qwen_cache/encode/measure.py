"""Findings in the images of a plan and in a cache: enlarged targets, and controls that are misaligned.

`build` stores what it measures with each sample. `build --dry-run --check` measures the samples that have none, without
an encoder; files that cannot be read are problems of the plan, and not measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import Notice, SourceError
from qwen_cache.format.measured import Findings, Measured, findings, table_of_measured, times
from qwen_cache.format.rows import KeyedRows, taken
from qwen_cache.sources.alignment import measure_files

THREADS = min(32, os.cpu_count() or 1)
LISTED = 20  # controls and targets of a plan, each on a line


@dataclass(frozen=True)
class Found:
    """The findings of some samples, and the names of these."""

    findings: Findings
    names: pa.ChunkedArray

    @property
    def notices(self) -> list[Notice]:
        return self.findings.notices(self._named)

    def to_json(self) -> dict[str, Any]:
        return self.findings.to_json(self._named)

    def line(self) -> str:
        """One line for the end of a build, and lines of what to do; empty where nothing was found."""
        if not (notices := self.notices):
            return ""
        what = "; ".join(str(notice).partition("\n")[0] for notice in notices)
        advice = "".join(f"\n  → {notice.do}" for notice in notices)
        return f"{what}{advice}\n  → `qwen-cache inspect --html FILE` shows them"

    def lines(self) -> list[str]:
        """A line for each misaligned control and each enlarged target, `LISTED` of each."""
        found = self.findings
        lines = [
            f"{name}: control {number} is {found.alignment(i)}"
            for i, (name, number) in enumerate(
                zip(self._named(found.misaligned[:LISTED]), found.controls[:LISTED].tolist(), strict=True)
            )
        ]
        lines += [f"and {len(found.misaligned) - LISTED} more controls"] if len(found.misaligned) > LISTED else []
        factors = zip(self._named(found.enlarged[:LISTED]), found.factors[:LISTED].tolist(), strict=True)
        lines += [f"{name}: the target is scaled up {times(factor)}" for name, factor in factors]
        return lines + ([f"and {len(found.enlarged) - LISTED} more targets"] if len(found.enlarged) > LISTED else [])

    def _named(self, positions: Any) -> Sequence[str]:
        names: list[str] = self.names.take(pa.array(positions)).to_pylist()
        return names


def found_in(rows: KeyedRows) -> Found:
    """The findings that the index of a cache has of these rows."""
    table = taken(rows.table, rows.positions)
    return Found(findings(table), table["name"])


def found_in_plan(
    samples: Sequence[PlannedSample], cached: KeyedRows, crop: bool, on_sample: Callable[[], None]
) -> Found:
    """The findings of the samples of a plan: what `cached` has of them, and the others measured."""
    samples = [sample for sample in samples if sample.row.target is not None]

    def measured(sample: PlannedSample) -> Measured | None:
        row = cached.get(sample.key)
        value = row.meta.measured if row else None
        if value is None:
            try:
                files = [file for file, _, _ in sample.images[: len(sample.sizes)]]
                value = measure_files(files, sample.sizes, crop=crop)
            except SourceError:
                value = None
        on_sample()
        return value

    with ThreadPoolExecutor(THREADS, "measure") as pool:
        values = list(pool.map(measured, samples))
    table = table_of_measured(zip(values, (sample.img_shapes for sample in samples), strict=True))
    return Found(findings(table), pa.chunked_array([[sample.row.name for sample in samples]], pa.string()))
