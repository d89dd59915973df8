"""Terminal front end of `qwen-cache build`: a plan before the work, a progress line, a summary after."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen_cache.console import (
    FAILED,
    FAULTS,
    console,
    counting,
    human_bytes,
    human_time,
    plural,
    print_json,
    print_problems,
    verbatim,
)
from qwen_cache.encode import builder
from qwen_cache.encode.builder import BuildJob, Encoders, Encoding
from qwen_cache.encode.cluster import on_cluster
from qwen_cache.encode.edit_mask import ReusableSamples, reusable_samples
from qwen_cache.encode.load import check_devices, load_lanes
from qwen_cache.encode.plan import BuildPlan, PlannedSample
from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.format import directory
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.format.update import Existing, Update
from qwen_cache.models.family import estimate_tokens
from qwen_cache.plain_text import plain
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.storage.durable import write_durably
from qwen_cache.storage.mapped import read_file

MAX_SIZES = 6  # target sizes in the plan
FEW_CHANGED = 3  # changed samples: up to this many are listed even if all have the same reason
MAX_CHANGED = 20  # changed samples that are listed
INDENT = " " * 9  # of the lines below a label of the plan
MEASURED = 4  # samples that --measure times: seconds of work with the real encoders on a GPU


@dataclass(frozen=True)
class Estimate:
    """The size of the encoded samples: tokens of latents and of prompt embeddings, and their bytes."""

    image_tokens: int
    text_tokens: int
    bytes: int

    @property
    def tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    def __str__(self) -> str:
        tokens = f"{self.image_tokens:,} image tokens, {self.text_tokens:,} text tokens"
        return f"{tokens}, {human_bytes(self.bytes)}"


def run_build(
    config: Config, source: str | None, *, ray: str | None, dry_run: bool, check: bool, measure: bool, as_json: bool
) -> int:
    """Plan, print the plan, encode, print a summary; return the exit code. `ray` is the address of a cluster."""
    _check_options(ray=ray, dry_run=dry_run, check=check, measure=measure)
    if not dry_run:
        require("torch")
    encoders = Encoders(load_lanes) if ray is None else on_cluster(ray, load_lanes)
    if not dry_run and ray is None:
        check_devices(config)
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = builder.prepare_build(config, source, on_bytes)
    if dry_run:
        return _dry_run(job, check=check, measure=measure, as_json=as_json)
    with directory.writing(job.folder):
        return _build(job, encoders, as_json)


def _check_options(*, ray: str | None, dry_run: bool, check: bool, measure: bool) -> None:
    """Raise ConfigError for options that exclude each other."""
    if check and not dry_run:
        raise ConfigError("--check goes with --dry-run", do="add --dry-run, or leave --check out")
    if measure and (ray is not None or not dry_run):
        found = "--measure with --ray" if ray is not None else "--measure alone"
        raise ConfigError("--measure goes with --dry-run, and measures this machine", found=found)


def _dry_run(job: BuildJob, *, check: bool, measure: bool, as_json: bool) -> int:
    """Print the plan and write nothing; with `check`, the exit code says whether there is work."""
    existing = builder.load_existing(job)
    plan = _plan(job, existing)
    to_encode = _needs_encoder(plan, _cached(job, existing))
    seconds = _measure(job, plan, to_encode) if measure and to_encode else None
    if as_json:
        print_json(_plan_json(job, plan, seconds))
    else:
        _print_plan(job, plan, seconds)
        if to_encode and not measure:
            console().print(f"{INDENT}add --measure to learn how long that takes")
    return FAULTS if check and (plan.to_encode or plan.removed or plan.problems) else 0


def _build(job: BuildJob, encoders: Encoders, as_json: bool) -> int:
    """Plan, print the plan, encode unless there are problems; return the exit code."""
    existing = builder.load_existing(job)
    plan = _plan(job, existing)
    _print_plan(job, plan)
    if plan.problems and job.config.data.on_error == "stop":
        console().print("nothing was encoded; fix these rows, or skip them with --on-error skip")
        return FAILED
    return _encode(job, existing, plan, encoders, as_json)


def _plan(job: BuildJob, existing: Existing) -> BuildPlan:
    with counting("reading the source", total=len(job.rows)) as on_rows:
        return builder.plan_build(job, existing, lambda: on_rows(1))


def _encode(job: BuildJob, existing: Existing, plan: BuildPlan, encoders: Encoders, as_json: bool) -> int:
    """Encode what the plan says; return the exit code."""
    if job.slice and not plan.samples and not existing.rows:
        return _nothing_to_do(f"slice {job.slice} of this source has no rows", 0, as_json)
    if not plan.samples:
        console().print("[bold red]error:[/] no usable sample is left, so there is nothing to build")
        return FAILED
    update = builder.make_update(job, existing, plan)
    if update.is_nothing:
        _save_settings(job)  # those of a build that was killed before it could
        return _nothing_to_do(f"{job.folder} already holds this source", len(plan.samples), as_json)
    begin = time.monotonic()
    encoders = replace(encoders, load=_loader(job, plan, _cached(job, existing), encoders))
    report = _run(job, update, plan, encoders)
    seconds = time.monotonic() - begin
    _save_settings(job)
    _print_report(job, report, seconds)
    if as_json:
        print_json({"encoded": report.encoded, "samples": report.samples, "up_to_date": False})
    return 0


def _save_settings(job: BuildJob) -> None:
    """Save the settings beside the dataset, unless they are there."""
    path, settings = job.folder / CONFIG_NAME, job.config.to_yaml().encode("utf-8")
    if not path.is_file() or read_file(path) != settings:
        write_durably(path, settings)


def _nothing_to_do(why: str, samples: int, as_json: bool) -> int:
    console().print(f"nothing to do: {plain(why)}", markup=False)
    if as_json:
        print_json({"encoded": 0, "samples": samples, "up_to_date": True})
    return 0


def _run(job: BuildJob, update: Update, plan: BuildPlan, encoders: Encoders) -> builder.Report:
    """Encode with a progress line; when interrupted, print how many samples are kept."""
    encoded = 0
    try:
        with counting("encoding", total=len(plan.to_encode)) as advance:

            def count(samples: int) -> None:
                nonlocal encoded
                encoded += samples
                advance(samples)

            return builder.run(job, update, plan.to_encode, encoders, count)
    except BaseException:
        if encoded:
            total = plural(len(plan.to_encode), "sample")
            console().print(f"{encoded} of {total} encoded and kept; run the same command to continue")
        raise


def _print_report(job: BuildJob, report: builder.Report, seconds: float) -> None:
    out, shards = console(), f"{plural(report.shards, 'shard')}, {human_bytes(report.bytes)}"
    out.print(f"[bold green]done[/] in {human_time(seconds)}: {report.encoded} encoded")
    out.print(f"{plain(job.folder)} holds {plural(report.samples, 'sample')} in {shards}", markup=False)
    if report.replaced:
        replaced = plural(report.replaced, "replaced shard")
        out.print(f"{replaced} kept for runs that read them; `qwen-cache gc` removes them")


def _cached(job: BuildJob, existing: Existing) -> ReusableSamples:
    return reusable_samples(job.config, job.recipe, existing, job.recipe_name)


def _needs_encoder(plan: BuildPlan, cached: ReusableSamples) -> list[PlannedSample]:
    """The samples that need an encoder; prints how many need a new mask only."""
    to_encode = [sample for sample in plan.to_encode if cached.row_for(sample) is None]
    if masks_only := len(plan.to_encode) - len(to_encode):
        console().print(f"{INDENT}{plural(masks_only, 'sample')} with only a new mask: all else is cached")
    return to_encode


def _loader(
    job: BuildJob, plan: BuildPlan, cached: ReusableSamples, encoders: Encoders
) -> Callable[[BuildJob], Encoding]:
    """Loads the encoders; samples that only get a new mask are not encoded again."""
    if len(_needs_encoder(plan, cached)) == len(plan.to_encode):
        return encoders.load

    def load(job: BuildJob) -> Encoding:
        from qwen_cache.encode.masks import MaskUpdateLanes

        return MaskUpdateLanes(job, cached, encoders.load)

    return load


def _measure(job: BuildJob, plan: BuildPlan, to_encode: Sequence[PlannedSample]) -> float:
    """Estimated seconds for all of `to_encode`, from a few samples that are encoded and not stored.

    Loading the encoders is not timed, nor is the first sample, which warms up, unless it is the only one.
    """
    by_key = {sample.key: sample for sample in to_encode}
    few = list(itertools.islice((by_key[key] for key in plan.order if key in by_key), MEASURED + 1))
    with load_lanes(job) as lanes:
        begin = time.monotonic()
        for number, work in enumerate([lanes.submit(sample) for sample in few]):
            lanes.result(work)
            if number == 0 and len(few) > 1:
                begin = time.monotonic()
        seconds = time.monotonic() - begin
    return seconds * _estimate(to_encode, job).tokens / _estimate(few[1:] or few, job).tokens


def _print_plan(job: BuildJob, plan: BuildPlan, seconds: float | None = None) -> None:
    """The plan as lines on stderr; `seconds` is the measured time."""
    out = console()
    out.print(f"[bold]model[/]    {verbatim(job.model.name)}  ({job.model.pipeline}, {job.recipe['dtype']})")
    out.print(f"[bold]plan[/]     {verbatim(plan.summary())}")
    if plan.to_encode:
        time_taken = f", {human_time(seconds)}" if seconds else ""
        out.print(f"[bold]estimate[/] {_estimate(plan.to_encode, job)}{time_taken}")
    if sizes := plan.target_sizes():
        shown = [f"{width}×{height}: {count}" for (width, height), count in sizes.items()]
        more = f", and {plural(len(shown) - MAX_SIZES, 'size')} more" if len(shown) > MAX_SIZES else ""
        out.print(f"[bold]targets[/]  {', '.join(shown[:MAX_SIZES])}{more}")
    if job.masks_left_out:
        out.print(f"{INDENT}{plural(job.masks_left_out, 'edit mask')} skipped: format v1 has none")
    if plan.repeated:
        out.print(f"{INDENT}{plural(plan.repeated, 'row')} with the same content as another, stored once")
    if plan.removed:
        out.print(f"{INDENT}{plural(len(plan.removed), 'sample')} removed from the source, and now from the dataset")
    changed = [sample for sample in plan.to_encode if sample.reasons != ("new",)]
    if len(changed) > FEW_CHANGED and len({sample.reasons for sample in changed}) == 1:
        changed = []  # the summary has the reason
    for sample in changed[:MAX_CHANGED]:
        out.print(f"{INDENT}{plain(sample.row.name)}: {plain(', '.join(sample.reasons))}", markup=False)
    if len(changed) > MAX_CHANGED:
        out.print(f"{INDENT}and {len(changed) - MAX_CHANGED} more")
    print_problems(plan.problems)


def _plan_json(job: BuildJob, plan: BuildPlan, seconds: float | None) -> dict[str, Any]:
    estimate = _estimate(plan.to_encode, job)
    return {
        "to_encode": len(plan.to_encode),
        "cached": plan.cached,
        "reasons": plan.reason_counts(),
        "samples": [{"name": s.row.name, "key": s.key, "reasons": list(s.reasons)} for s in plan.to_encode],
        "target_sizes": [{"width": w, "height": h, "samples": n} for (w, h), n in plan.target_sizes().items()],
        "repeated": plan.repeated,
        "removed": list(plan.removed),
        "problems": [{"where": p.where, "what": p.what, "do": p.do} for p in plan.problems],
        "image_tokens": estimate.image_tokens,
        "text_tokens": estimate.text_tokens,
        "bytes": estimate.bytes,
        "seconds": seconds,
    }


def _estimate(samples: Sequence[PlannedSample], job: BuildJob) -> Estimate:
    """An estimate of the size of the encoded samples."""
    image = sum(token_count(sample.img_shapes) for sample in samples)
    family = job.model.family
    text = sum(estimate_tokens(family, s.row.prompt, job.encoder_pixels(s))[1] for s in samples)
    elements = image * LATENT_CHANNELS + text * job.model.text_width
    return Estimate(image, text, elements * (2 if job.recipe["dtype"] == "bfloat16" else 4))
