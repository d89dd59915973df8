"""`qwen-cache build` as people see it: a plan before the work, a progress line, a summary after."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)
from qwen_cache.encode import builder
from qwen_cache.encode.builder import Encoders, Encoding, Job
from qwen_cache.encode.cluster import on_cluster
from qwen_cache.encode.edit_mask import Cached, with_all_but_masks
from qwen_cache.encode.load import check_devices, load_lanes
from qwen_cache.encode.plan import Plan, Planned
from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.format import directory
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.format.update import Existing
from qwen_cache.models.template import estimate_tokens
from qwen_cache.settings.load import CONFIG_NAME, Config
from qwen_cache.storage.durable import write_durably

SIZES_SHOWN = 6  # of targets, in the line below the plan
FEW = 3  # changed samples that are listed even if all are for one reason
SHOWN = 20  # problems and changed samples that are listed before "and so many more"
MEASURED = 4  # samples that say how long the others will take: seconds of work with the real encoders on a GPU


@dataclass(frozen=True)
class Estimate:
    """What encoding will take: tokens of latents and of prompt embeddings, and bytes of both."""

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
    """Plan, say what will be done, do it, say what was done; the exit code. `ray` is the address of a cluster."""
    if check and not dry_run:
        raise ConfigError("--check goes with --dry-run", do="add --dry-run, or leave --check out")
    if measure and (ray is not None or not dry_run):
        found = "--measure with --ray" if ray is not None else "--measure alone"
        raise ConfigError("--measure goes with --dry-run, and measures this machine", found=found)
    if not dry_run:
        require("torch")
    encoders = Encoders(load_lanes) if ray is None else on_cluster(ray, load_lanes)
    if not dry_run and ray is None:
        check_devices(config)
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        job = builder.prepare(config, source, on_bytes)
    if dry_run:
        existing = builder.load_existing(job)
        plan = _plan(job, existing)
        encoded = _to_be_encoded(plan, _cached(job, existing))
        _print_plan(job, plan, as_json, _measure(job, plan, encoded) if measure and encoded else None)
        if encoded and not (measure or as_json):
            console().print("        add --measure to learn how long that takes")
        return FAULTS if check and (plan.to_encode or plan.removed or plan.problems) else 0
    with directory.writing(job.folder):
        existing = builder.load_existing(job)
        plan = _plan(job, existing)
        _print_plan(job, plan, as_json=False)
        if plan.problems and config.data.on_error == "stop":
            console().print("nothing was encoded; mend these rows, or leave them out with --on-error skip")
            return FAILED
        return _encode(job, existing, plan, encoders, as_json)


def _plan(job: Job, existing: Existing) -> Plan:
    with counting("reading the source", total=len(job.rows)) as on_rows:
        return builder.plan_build(job, existing, lambda: on_rows(1))


def _encode(job: Job, existing: Existing, plan: Plan, encoders: Encoders, as_json: bool) -> int:
    if job.part and not plan.samples and not existing.rows:
        console().print(f"nothing to do: part {job.part} of this source has no rows")
        if as_json:
            print_json({"encoded": 0, "samples": 0, "up_to_date": True})
        return 0
    if not plan.samples:
        console().print("[bold red]error:[/] no usable sample is left, so there is nothing to build")
        return FAILED
    update = builder.make_update(job, existing, plan)
    if update.is_nothing:
        console().print(f"nothing to do: {job.folder} already holds this source")
        if as_json:
            print_json({"encoded": 0, "samples": len(plan.samples), "up_to_date": True})
        return 0
    load = _loading(job, plan, _cached(job, existing), encoders)
    begin = time.monotonic()
    done = 0
    try:
        with counting("encoding", total=len(plan.to_encode)) as on_samples:

            def count(samples: int) -> None:
                nonlocal done
                done += samples
                on_samples(samples)

            report = builder.run(job, update, plan.to_encode, load, count, encoders.in_flight)
    except BaseException:
        if done:
            console().print(
                f"{done} of {plural(len(plan.to_encode), 'sample')} encoded and kept; the same command goes on"
            )
        raise
    took = time.monotonic() - begin
    write_durably(job.folder / CONFIG_NAME, job.config.to_yaml().encode("utf-8"))
    shards = f"{plural(report.shards, 'shard')}, {human_bytes(report.bytes)}"
    out = console()
    out.print(f"[bold green]done[/] in {human_time(took)}: {report.encoded} encoded")
    out.print(f"{job.folder} holds {plural(report.samples, 'sample')} in {shards}", markup=False)
    if report.replaced:
        out.print(
            f"{plural(report.replaced, 'replaced shard')} kept for runs that read them; `qwen-cache gc` removes them"
        )
    if as_json:
        print_json({"encoded": report.encoded, "samples": report.samples, "up_to_date": False})
    return 0


def _cached(job: Job, existing: Existing) -> Cached:
    return with_all_but_masks(job.config, job.recipe, existing, job.recipe_name)


def _to_be_encoded(plan: Plan, cached: Cached) -> list[Planned]:
    """All that an encoder is needed for; says of how many samples only the mask is made."""
    encoded = [sample for sample in plan.to_encode if cached.row_for(sample) is None]
    if masks_alone := len(plan.to_encode) - len(encoded):
        console().print(f"        of {plural(masks_alone, 'sample')} only the mask is made: all else is cached")
    return encoded


def _loading(job: Job, plan: Plan, cached: Cached, encoders: Encoders) -> Callable[[Job], Encoding]:
    """How to load the encoders; where all but the mask of a sample is cached, they are not asked."""
    if len(_to_be_encoded(plan, cached)) == len(plan.to_encode):
        return encoders.load

    def load(job: Job) -> Encoding:
        from qwen_cache.encode.masks import WithOtherMasks

        return WithOtherMasks(job, cached, encoders.load)

    return load


def _measure(job: Job, plan: Plan, encoded: Sequence[Planned]) -> float:
    """Seconds to encode all of `encoded`, from a few of them that are encoded and not kept.

    The first warms up and is not counted, unless it is the only one; nor is the time to load the encoders.
    """
    waiting = {sample.key: sample for sample in encoded}
    few = list(itertools.islice((waiting[key] for key in plan.order if key in waiting), MEASURED + 1))
    with load_lanes(job) as lanes:
        begin = time.monotonic()
        for number, work in enumerate([lanes.submit(sample) for sample in few]):
            lanes.result(work)
            if number == 0 and len(few) > 1:
                begin = time.monotonic()
        took = time.monotonic() - begin
    return took * _estimate(encoded, job).tokens / _estimate(few[1:] or few, job).tokens


def _print_plan(job: Job, plan: Plan, as_json: bool, seconds: float | None = None) -> None:
    if as_json:
        print_json(_plan_json(job, plan, seconds))
        return
    out = console()
    out.print(f"[bold]model[/]   {job.model.name}  ({job.model.pipeline}, {job.recipe['dtype']})")
    out.print(f"[bold]plan[/]    {plan.summary()}")
    if plan.to_encode:
        time_taken = f", {human_time(seconds)}" if seconds else ""
        out.print(f"[bold]about[/]   {_estimate(plan.to_encode, job)}{time_taken}")
    if sizes := plan.target_sizes():
        shown = [f"{width}×{height}: {count}" for (width, height), count in sizes.items()]
        more = f", and {plural(len(shown) - SIZES_SHOWN, 'size')} more" if len(shown) > SIZES_SHOWN else ""
        out.print(f"[bold]targets[/] {', '.join(shown[:SIZES_SHOWN])}{more}")
    if job.masks_left_out:
        out.print(f"        {plural(job.masks_left_out, 'edit mask')} left out: format v1 has none")
    if plan.repeated:
        out.print(f"        {plural(plan.repeated, 'row')} repeated what another has, and kept once")
    if plan.removed:
        out.print(f"        {plural(len(plan.removed), 'sample')} gone from the source, and from the dataset")
    changed = [sample for sample in plan.to_encode if sample.reasons != ("new",)]
    if len(changed) > FEW and len({sample.reasons for sample in changed}) == 1:
        changed = []  # the summary has said it
    for sample in changed[:SHOWN]:
        out.print(f"        {sample.row.name}: {', '.join(sample.reasons)}", markup=False)
    if len(changed) > SHOWN:
        out.print(f"        and {len(changed) - SHOWN} more")
    print_problems(plan.problems)


def _plan_json(job: Job, plan: Plan, seconds: float | None) -> dict[str, Any]:
    about = _estimate(plan.to_encode, job)
    return {
        "to_encode": len(plan.to_encode),
        "cached": plan.cached,
        "reasons": plan.reason_counts(),
        "samples": [{"name": s.row.name, "key": s.key, "reasons": list(s.reasons)} for s in plan.to_encode],
        "target_sizes": [{"width": w, "height": h, "samples": n} for (w, h), n in plan.target_sizes().items()],
        "repeated": plan.repeated,
        "removed": list(plan.removed),
        "problems": [{"where": p.where, "what": p.what, "do": p.do} for p in plan.problems],
        "image_tokens": about.image_tokens,
        "text_tokens": about.text_tokens,
        "bytes": about.bytes,
        "seconds": seconds,
    }


def _estimate(samples: Sequence[Planned], job: Job) -> Estimate:
    """About what samples will take."""
    image = sum(token_count(sample.img_shapes) for sample in samples)
    text = sum(
        estimate_tokens(sample.row.prompt, len(sample.row.controls), job.condition_image_size) for sample in samples
    )
    elements = image * LATENT_CHANNELS + text * job.model.text_width
    return Estimate(image, text, elements * (2 if job.recipe["dtype"] == "bfloat16" else 4))
