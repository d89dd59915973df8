"""`verify --re-encode`: a table of tensors, unexplained differences, a verdict."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from qwen_cache.encode.check import Chosen, Compared, Difference, check_origin, choose, compare_samples, prepare
from qwen_cache.encode.preflight import check_devices, load_lanes
from qwen_cache.encode.recipe import HUB_DATASETS, settings_of_build
from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.format.cache import Cache, open_configured
from qwen_cache.format.manifest import DEFAULT_RECIPE
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.terminal import FAULTS, console, counting, plural, print_json, results, verbatim
from qwen_cache.text import plain

SHOWN = 20
"""Findings and changed samples that are listed; --json has all."""


@dataclass(frozen=True)
class SpotCheck:
    """The options of the command."""

    count: int
    source: str | None
    seed: int | None
    config: Path | None
    assignments: Sequence[str]
    given: Sequence[Given | None]
    """The cache, the model and the devices, if they were given."""
    as_json: bool


def run_spot_check(path: str, options: SpotCheck) -> int:
    """Encode some samples of the cache at `path` again and compare them; return the exit code."""
    require("torch")
    settings = settings_of_build(location(path), options.config, options.assignments, options.given)
    cache = _open(path, settings)
    check_origin(cache)
    check_devices(settings)
    source = _source(cache, settings, options)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = prepare(cache, settings, source, on_bytes)
    chosen = choose(cache, job, options.count, seed)
    compared = []
    with counting("encoding", total=len(chosen.samples)) as advance, load_lanes(job) as lanes:
        for each in compare_samples(cache, job, chosen.samples, lanes):
            compared.append(each)
            advance(1)
    report = _report(cache, job.source, seed, chosen, compared)
    (print_json if options.as_json else _print)(report)
    return 0 if report["ok"] else FAULTS


def _open(path: str, settings: Config) -> Cache:
    """The cache; of several recipes the one named, else `default`."""
    if settings.cache.recipe is None:
        from qwen_cache.format.cache import open_recipes
        from qwen_cache.storage.remote import LocalCopies

        found = open_recipes(path, LocalCopies.of_settings(settings.cache))
        if DEFAULT_RECIPE in found:
            return found[DEFAULT_RECIPE]
    return open_configured(settings.cache, path)


def _source(cache: Cache, settings: Config, options: SpotCheck) -> str:
    """The source that was given, or that the settings of the build name; ConfigError if there is none."""
    if options.source is not None:
        return options.source
    own = cache.folder / CONFIG_NAME
    of_build = options.config is not None or any("data.source" in each for each in options.assignments)
    if is_remote(cache.folder) and not of_build and not settings.data.source.startswith(HUB_DATASETS):
        what = "a remote cache names no source on the hub, and no other source that it names is read"
        raise ConfigError(what, where=own, do="give --source SOURCE")
    if not of_build and not is_remote(own) and not own.is_file():
        what = "no source is given, and the cache has no settings that name one"
        raise ConfigError(what, where=own, do="give --source SOURCE")
    path = location(settings.data.source)
    if not is_remote(path) and not path.exists():
        what = "the source that the settings of this cache name is not here"
        raise ConfigError(what, where=own, found=settings.data.source, do="give --source SOURCE")
    return settings.data.source


# ---- the report ------------------------------------------------------------------------------------------------------


def _report(cache: Cache, source: str, seed: int, chosen: Chosen, compared: Sequence[Compared]) -> dict[str, Any]:
    """The document of --json."""
    names = dict.fromkeys(name for each in compared for name in each.differences)
    findings = [finding for each in compared for finding in each.findings]
    return {
        "cache": str(cache.folder),
        "recipe": cache.recipe_name,
        "source": str(source),
        "seed": seed,
        "samples": len(cache),
        "in_source": chosen.in_source,
        "compared": len(compared),
        "changed": [{"name": name, "what": what} for name, what in chosen.changed.items()],
        "tensors": {
            name: _of_tensor([each.differences[name] for each in compared if name in each.differences])
            for name in names
        },
        "findings": [{"sample": each.sample, "tensor": each.tensor, "what": each.what} for each in findings],
        "ok": bool(compared) and not findings and not chosen.changed,
    }


def _of_tensor(found: Sequence[Difference]) -> dict[str, Any]:
    """The largest differences of one tensor over all samples."""
    return {
        "compared": len(found),
        "equal": sum(each.is_equal for each in found),
        "rms": _finite(max(each.rms for each in found)),
        "rms_bound": found[0].rms_bound,
        "max": _finite(max(each.largest for each in found)),
        "max_bound": max(each.largest_bound for each in found),
        "ok": all(each.is_within for each in found),
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity; what is not finite has no measure."""
    return number if number < float("inf") else None


def _print(report: dict[str, Any]) -> None:
    table = Table("tensor", "compared", "equal", "RMS", "allowed", "largest", "allowed", "", box=None)
    for name, each in report["tensors"].items():
        numbers = [each["rms"], each["rms_bound"], each["max"], each["max_bound"]]
        shown = ["none" if number is None else f"{number:.2g}" for number in numbers]
        verdict = "[green]ok[/]" if each["ok"] else "[bold red]differs[/]"
        table.add_row(name, str(each["compared"]), str(each["equal"]), *shown, verdict)
    results().print(table)
    out = console(always=True)
    for finding in report["findings"][:SHOWN]:
        out.print(f"{plain(finding['sample'])}: {finding['tensor']} {plain(finding['what'])}", markup=False)
    for change in report["changed"][:SHOWN]:
        out.print(f"{plain(change['name'])}: the source has other content now: {plain(change['what'])}", markup=False)
    if (left := max(len(report[name]) for name in ("findings", "changed")) - SHOWN) > 0:
        out.print(f"and {left} more; --json lists all")
    _print_verdict(report)


def _print_verdict(report: dict[str, Any]) -> None:
    compared, out = plural(report["compared"], "sample"), console(always=True)
    verdict = "[bold green]OK[/]: rounding explains every difference" if report["ok"] else "[bold red]not confirmed[/]"
    out.print(f"{verbatim(report['cache'])}: {compared} of {report['samples']} encoded again. {verdict}")
    if (absent := report["samples"] - report["in_source"]) > 0:
        out.print(f"{plural(absent, 'sample')} of the cache not in this source; none of them was checked")
    out.print(f"the same samples again: --seed {report['seed']}")
