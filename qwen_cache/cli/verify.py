"""`verify`: every byte against the hashes, or with --re-encode some samples against their images."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    JSON,
    READ_CACHE,
    SET,
    TEXT_DEVICE,
    VAE_DEVICE,
    command,
    option,
    setting,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import FAULTS, console, counting, plural, print_json, print_next, results, verbatim
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.encode.check import Chosen, Compared, Difference
    from qwen_cache.format.cache import Cache
    from qwen_cache.settings.load import Config

SPOT_CHECK = "Encode some samples again (with --re-encode)"
SHOWN = 20
"""Findings and changed samples that are listed; --json has all."""


@command(
    page="howto/store-and-share.md",
    examples=["qwen-cache verify s3://bucket/shards --json", "qwen-cache verify shards --re-encode 20 --source data"],
)
def verify(
    cache: Given | None = READ_CACHE,
    re_encode: int | None = option(
        SPOT_CHECK,
        "Instead of checking every byte, encode N random samples again from their images and compare.",
        "N",
        min=1,
    ),
    source: str | None = option(
        SPOT_CHECK,
        "The images and prompts of the cache.",
        "SOURCE",
        shown="data.source of the qwen.yaml in the cache",
    ),
    seed: int | None = option(
        SPOT_CHECK,
        "Choose the same samples as an earlier check with this seed.",
        "INT",
        shown="another one each time",
        min=0,
    ),
    model: Given | None = setting(
        "model.path",
        SPOT_CHECK,
        "The model of the cache: a diffusers folder, or a repository on the hub.",
        "MODEL",
        name="--model",
        default="model.path of the qwen.yaml in the cache",
    ),
    vae_device: Given | None = VAE_DEVICE,
    text_device: Given | None = TEXT_DEVICE,
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Check every byte of a cache against its hashes, or some samples against their images."""
    from qwen_cache.format.verify import verify_cache
    from qwen_cache.settings.load import load_config

    path = load_config(config, set_, [cache]).cache.path
    if re_encode is not None:
        given = (model, vae_device, text_device, Given("CACHE", "cache.path", path))
        return spot_check(path, re_encode, source, seed, config, set_ or (), given, as_json=json)
    options = {"--source": source, "--seed": seed, "--model": model}
    options |= {"--vae-device": vae_device, "--text-device": text_device}
    if unused := [name for name, value in options.items() if value is not None]:
        raise ConfigError("these options go with --re-encode", found=", ".join(unused), do="give --re-encode N too")
    with counting("verifying", in_bytes=True) as on_bytes:
        findings = verify_cache(path, on_bytes)
    if json:
        print_json({"cache": path, "ok": not findings, "findings": [finding.to_json() for finding in findings]})
        return FAULTS if findings else 0
    for finding in findings:
        console(always=True).print(str(finding), markup=False)
    summary = plural(len(findings), "fault") if findings else "OK: all checksums match"
    console(always=bool(findings)).print(f"{plain(path)}: {summary}", markup=False)
    if not findings:
        print_next(*(["qwen-train", command, path] for command in ("plan", "run")))
    return FAULTS if findings else 0


# ---- --re-encode -----------------------------------------------------------------------------------------------------


def spot_check(
    path: str,
    count: int,
    source: str | None,
    seed: int | None,
    config: Path | None,
    assignments: Sequence[str],
    given: Sequence[Given | None],
    *,
    as_json: bool,
) -> int:
    """Encode some samples of the cache at `path` again and compare them; return the exit code."""
    require("torch")
    from qwen_cache.encode.check import check_origin, choose, compare_samples, prepare
    from qwen_cache.encode.preflight import check_devices, load_lanes
    from qwen_cache.encode.recipe import settings_of_build
    from qwen_cache.storage.remote import location

    settings = settings_of_build(location(path), config, assignments, given)
    cache = _open(path, settings)
    check_origin(cache)
    check_devices(settings)
    if source is None:
        of_build = config is not None or any("data.source" in each for each in assignments)
        source = _source_of_build(cache, settings, is_named=of_build)
    seed = secrets.randbits(32) if seed is None else seed
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = prepare(cache, settings, source, on_bytes)
    chosen = choose(cache, job, count, seed)
    compared = []
    with counting("encoding", total=len(chosen.samples)) as advance, load_lanes(job) as lanes:
        for each in compare_samples(cache, job, chosen.samples, lanes):
            compared.append(each)
            advance(1)
    report = _report(cache, job.source, seed, chosen, compared)
    (print_json if as_json else _print)(report)
    return 0 if report["ok"] else FAULTS


def _open(path: str, settings: Config) -> Cache:
    """The cache; of several recipes the one named, else `default`."""
    from qwen_cache.format.cache import open_configured, open_recipes
    from qwen_cache.format.manifest import DEFAULT_RECIPE
    from qwen_cache.storage.remote import LocalCopies

    if settings.cache.recipe is None:
        found = open_recipes(path, LocalCopies.of_settings(settings.cache))
        if DEFAULT_RECIPE in found:
            return found[DEFAULT_RECIPE]
    return open_configured(settings.cache, path)


def _source_of_build(cache: Cache, settings: Config, *, is_named: bool) -> str:
    """The source in the settings of the build; ConfigError if there is none. `is_named`: the user gave them."""
    from qwen_cache.encode.recipe import HUB_DATASETS
    from qwen_cache.settings.load import CONFIG_NAME
    from qwen_cache.storage.remote import is_remote, location

    own = cache.folder / CONFIG_NAME
    if is_remote(cache.folder) and not is_named and not settings.data.source.startswith(HUB_DATASETS):
        what = "a remote cache names no source on the hub, and no other source that it names is read"
        raise ConfigError(what, where=own, do="give --source SOURCE")
    if not is_named and not is_remote(own) and not own.is_file():
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
