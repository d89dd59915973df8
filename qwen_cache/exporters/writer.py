"""Plan an export from the index alone, then write it as one folder that appears when it is whole."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_cache.errors import ConfigError, Problem
from qwen_cache.exporters import diffsynth, diffusion_pipe, musubi, qflux
from qwen_cache.exporters.target import FOR_PEOPLE, Export, NamedSample, Refusal, Tool
from qwen_cache.format.cache import Cache
from qwen_cache.format.index import IndexRow
from qwen_cache.models.family import QWEN_IMAGE
from qwen_cache.storage.files import whole_folder
from qwen_cache.terminal import plural

ToolName = Literal["musubi", "diffusion-pipe", "diffsynth", "qflux"]
TOOLS: dict[ToolName, Tool] = {
    "musubi": musubi.TOOL,
    "diffusion-pipe": diffusion_pipe.TOOL,
    "diffsynth": diffsynth.TOOL,
    "qflux": qflux.TOOL,
}
NO_TARGET = Refusal("it has no target: an image to generate cannot be trained", "leave it out")
MAX_STEM = 150  # bytes: with a key and what tools append, below the 255 of a file name
OF_OTHERS = re.compile(r"(control_\d+|_mask)$", re.IGNORECASE)
"""The ends of names that qwen-image-finetune takes for further images of another sample."""


@dataclass(frozen=True)
class ExportPlan:
    """What an export writes."""

    cache: Cache
    tool: Tool
    stems: dict[int, str]
    """The stem of the files of each sample, by its position."""
    problems: list[Problem]
    """Samples that the tool cannot hold."""
    left_out: Counter[str]
    """In how many of its samples each tensor is left out."""
    bytes: int
    refusal: ConfigError | None
    """For tensors that the tool cannot hold and that are not to be left out."""


def plan_export(cache: Cache, name: ToolName, leave_out: Sequence[str]) -> ExportPlan:
    """Read the index. ConfigError for a cache that the tool's models cannot read, and for an unknown `leave_out`."""
    tool = TOOLS[name]
    _check_family(cache, tool)
    _check_names(leave_out)
    rows, problems, left_out, size = dict[int, IndexRow](), list[Problem](), Counter[str](), 0
    refusal_of = tool.refusing(row.meta for row in cache.rows() if "image_latents" in row.meta.tensors)
    for i, row in enumerate(cache.rows()):
        if refusal := refusal_of(row.meta) if "image_latents" in row.meta.tensors else NO_TARGET:
            problems.append(Problem(row.label, refusal.what, refusal.do))
            continue
        rows[i] = row
        left_out.update(row.meta.tensors.keys() - tool.holds - FOR_PEOPLE)
        size += sum(spec.nbytes for name, spec in row.meta.tensors.items() if name in tool.holds)
    return ExportPlan(cache, tool, _stems(rows), problems, left_out, size, _left_out(tool, left_out, leave_out))


def write_export(
    plan: ExportPlan, out: Path, *, zero_cond_t: bool = False, on_sample: Callable[[], None] = lambda: None
) -> None:
    """Write the folder `out`, which appears when it is whole. ConfigError if it exists and is not empty."""
    check_folder(out)
    recipe = plan.cache.recipe.recipe
    with whole_folder(out) as folder:
        samples = _Samples(plan)
        takes_controls = recipe["pipeline"] != "QwenImagePipeline"
        plan.tool.write(Export(samples, folder, out.resolve(), takes_controls, zero_cond_t, on_sample))


def check_folder(out: Path) -> None:
    """ConfigError unless `out` is new, or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists():
        raise ConfigError("this folder is not empty", where=out, do="choose another one with --out, or delete it")


class _Samples(Sequence[NamedSample]):
    """The samples of a plan, read when they are used."""

    def __init__(self, plan: ExportPlan) -> None:
        self._cache, self._stems = plan.cache, list(plan.stems.items())

    def __len__(self) -> int:
        return len(self._stems)

    def __getitem__(self, index: int) -> NamedSample:  # type: ignore[override]
        position, stem = self._stems[index]
        return NamedSample(stem, self._cache[position])


def _check_family(cache: Cache, tool: Tool) -> None:
    pipelines = {pipeline.name for pipeline in QWEN_IMAGE.pipelines}
    if (found := cache.recipe.recipe.get("pipeline")) not in pipelines:
        what = f"{tool.title} has no trainer for caches of this model"
        raise ConfigError(what, where=cache.folder, expected=" or ".join(sorted(pipelines)), found=found)


def _check_names(named: Sequence[str]) -> None:
    known = {"empty_prompt_embeds", "edit_mask"}
    if unknown := [name for name in named if name not in known]:
        raise ConfigError(
            "this tensor cannot be left out", where="--leave-out", expected=" or ".join(sorted(known)), found=unknown[0]
        )


def _left_out(tool: Tool, left_out: Counter[str], named: Sequence[str]) -> ConfigError | None:
    missing = sorted(left_out.keys() - set(named))
    if not missing:
        return None
    counts = " and ".join(f"{name} of {plural(left_out[name], 'sample')}" for name in missing)
    options = " ".join(f"--leave-out {name}" for name in missing)
    return ConfigError(f"{tool.title} cannot hold {counts}", do=f"export without them: add {options}")


def _stems(rows: dict[int, IndexRow]) -> dict[int, str]:
    """Names that are safe in any file system, and unique there, also where it ignores case.

    The key is added to equal names, and to those that could be the name of another sample's file.
    """
    names, keys = {i: _safe(row.name) for i, row in rows.items()}, {row.meta.key for row in rows.values()}
    often = Counter(map(_folded, names.values()))

    def stem(i: int, name: str) -> str:
        is_free = often[_folded(name)] == 1 and not OF_OTHERS.search(name)
        return name if is_free and name.rpartition("-")[2].casefold() not in keys else f"{name}-{rows[i].meta.key}"

    return {i: stem(i, name) for i, name in names.items()}


def _folded(name: str) -> str:
    """Equal for names that are one file to some file system: without case, in Unicode's composed form."""
    return unicodedata.normalize("NFC", name.casefold())


def _safe(name: str) -> str:
    safe = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", name))
    return safe.encode()[:MAX_STEM].decode(errors="ignore").strip(".-") or "sample"
