"""A build from the plan to the summary: what it prints, its progress, and watching a source."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.encode import builder, preflight, write
from qwen_cache.encode.builder import (
    BuildJob,
    Encoders,
    LaneState,
    Look,
    bytes_to_write,
    disk_bytes,
    estimate,
    free_bytes,
    settled,
)
from qwen_cache.encode.check import plan_repair
from qwen_cache.encode.known_latents import KnownLatents
from qwen_cache.encode.measure import Found, found_in, found_in_plan
from qwen_cache.encode.plan import BuildPlan
from qwen_cache.encode.preflight import (
    DevicePlan,
    changed_recipe,
    empty_source,
    full_disk,
    has_accelerator,
    little_memory,
    memory_lines,
    plan_devices,
    unusable_rows,
)
from qwen_cache.encode.recipe import EditMasks, ReusableSamples, reusable_samples, save_settings
from qwen_cache.encode.write import Progress
from qwen_cache.errors import (
    ConfigError,
    DeviceError,
    FormatError,
    ModelError,
    Notice,
    Problem,
    QwenCacheError,
    ShardError,
)
from qwen_cache.format import directory
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.update import Existing, Update, read_existing, record_vae_encoders
from qwen_cache.options import fail
from qwen_cache.storage.remote import is_remote
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import (
    FAILED,
    FAULTS,
    console,
    counting,
    human_bytes,
    human_time,
    message_of,
    plural,
    print_json,
    print_next,
    print_problems,
    progress,
    typed_again,
    verbatim,
)
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.terminal import PlainConsole

# ---- build progress --------------------------------------------------------------------------------------------------
# The progress line of `qwen-cache build`: samples, samples per second, bytes written, and the time that is left.
#
# A second line has the work of each lane of this machine, or the speed of each worker.

MAX_RATES = 3  # workers that the line names


@contextmanager
def progress_line(
    what: str, total: int, lanes: Callable[[], Sequence[LaneState]] = lambda: ()
) -> Iterator[Callable[[Progress], None]]:
    """A progress line, with a second one for lanes or workers; yields the function that updates it."""
    begin, before, rates = time.monotonic(), None, dict[str, float]()

    def below() -> str:
        return _worker_rates(rates) if rates else ", ".join(map(_lane_work, lanes()))

    def for_programs() -> list[dict[str, Any]]:
        workers = [{"name": name, "samples_per_second": round(rate, 3)} for name, rate in rates.items()]
        return workers + [
            {"name": each.name, "device": each.device, "done": each.done, "busy": round(each.busy, 2)}
            for each in lanes()
        ]

    with progress(below=below, lanes=for_programs) as bar:
        task = bar.add_task(what, total=total, count="")

        def show(now: Progress) -> None:
            nonlocal before, rates
            done = now.finished + now.running
            before = done if before is None else before  # finished by an earlier run
            speed = (done - before) / max(time.monotonic() - begin, 1e-6)
            rates = dict(now.rates) or rates
            count = f"{done}/{total}, {speed:.2f} samples/s, {human_bytes(now.bytes)}"
            bar.update(task, completed=done, count=count)

        yield show


def _lane_work(lane: LaneState) -> str:
    """`vae-0 on cuda:0: 24 images, 83 % busy`."""
    work = plural(lane.done, "image" if lane.name.startswith("vae") else "prompt")
    return f"{lane.name} on {lane.device}: {work}, {100 * lane.busy:.0f} % busy"


def _worker_rates(rates: Mapping[str, float]) -> str:
    """The samples per second of each worker, or the lowest and the highest."""
    if len(rates) <= MAX_RATES:
        return ", ".join(f"{plain(name)}: {rate:.2f} samples/s" for name, rate in rates.items())
    return f"{len(rates)} workers: {min(rates.values()):.2f} to {max(rates.values()):.2f} samples/s each"


# ---- build -----------------------------------------------------------------------------------------------------------
# A plan before the work, a progress line, a summary after.
#
# A dry run prints the same plan and every reason why `build` would refuse to start. Its exit code is then 2; otherwise
# it is 0, or with `--check` 1 if there is work.

MAX_SIZES = 6  # target sizes in the plan
FEW_CHANGED = 3  # changed samples: up to this many are listed even if all have the same reason
MAX_CHANGED = 20  # changed samples that are listed
INDENT = " " * 9  # of the lines below a label of the plan
WORK = ("encoded", "copied", "kept", "new_masks")  # how missing samples were made, in --json
MEASURED = 4  # samples that --measure times: seconds of work with the real encoders on a GPU


@dataclass(frozen=True)
class Task:
    """A planned build or repair."""

    job: BuildJob
    plan: BuildPlan
    update: Update
    reusable: ReusableSamples
    """Cached samples of which only the mask is new."""
    obstacles: list[QwenCacheError]
    """Why it cannot start."""
    is_repair: bool = False
    elsewhere: Mapping[str, list[str]] = field(default_factory=dict)
    """Damaged shards that hold only samples of other recipes, each with the names of these recipes."""
    known: KnownLatents = field(default_factory=KnownLatents)
    """Latents of images that need not be encoded."""
    devices: list[DevicePlan] | None = None
    """The memory that the build needs on each device; None if nothing is encoded, or if it is not known."""
    measured: Found | None = None
    """The findings in the images; None if they were not measured."""

    @property
    def has_work(self) -> bool:
        """True if the cache is out of date or damaged, or the source has faults."""
        plan = self.plan
        is_fault = any(notice.is_fault for notice in self.notices)
        return bool(plan.problems or is_fault) or not self.update.is_nothing

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Facts about samples that are used all the same."""
        of_images = self.measured.notices if self.measured else ()
        return () if self.is_repair else (*self.job.notices, *self.plan.notices, *of_images)


def build_locked(jobs: Sequence[BuildJob], make: Callable[[BuildJob], Task], encoders: Encoders, as_json: bool) -> int:
    """Plan and build with no other writer in any of the folders."""
    with ExitStack() as locks:
        for job in jobs:
            locks.enter_context(directory.writing(job.folder))
        tasks = list(map(make, jobs))
        with encoders:
            code, results = build(tasks, encoders)
        if as_json and results:
            _print_results(tasks, results)
        return code


def is_main(job: BuildJob) -> bool:
    """True if the job builds the cache itself, not its validation cache."""
    return job.folder == destination(job.config.cache.path)


def build_task(job: BuildJob, *, replace_recipe: bool, takes_latents: bool) -> Task:
    """Plan a build; without `replace_recipe` it may not replace most of the cache because of another recipe.

    `takes_latents`: whether the encoders can use known latents.
    """
    existing = builder.load_existing(job)
    with counting(f"reading {_rows_of(job)}", total=len(job.rows)) as on_rows:
        plan = builder.plan_build(job, existing, lambda: on_rows(1))
    reusable = reusable_samples(job.config, job.recipe, existing, job.recipe_name, plan.missing)
    plan = builder.without_encoder(job, existing, plan, reusable)
    update = builder.make_update(job, existing, plan)
    may_replace = replace_recipe or not is_main(job)  # a validation cache is small
    obstacles = [
        unusable_rows(job, plan) or empty_source(job, existing, plan),
        None if may_replace else changed_recipe(job, existing, plan, sys.argv[1:]),
        full_disk(job, plan, update),
    ]
    to_encode = plan.to_encode if takes_latents else []
    known = KnownLatents.of(job, existing, to_encode)
    return Task(job, plan, update, reusable, [error for error in obstacles if error], known=known)


def repair_task(job: BuildJob) -> Task:
    """Plan a repair."""
    with counting("verifying", in_bytes=True) as on_bytes:
        repair = plan_repair(job, on_bytes)
    plan, update = repair.plan, repair.update
    obstacles = [unusable_rows(job, plan), full_disk(job, plan, update)]
    nothing = ReusableSamples.none(EditMasks.of(job.config))
    return Task(job, plan, update, nothing, [error for error in obstacles if error], True, repair.elsewhere)


def with_devices(task: Task, *, always: bool) -> Task:
    """With what the build needs of its devices; without `always` only where there is an accelerator, which may be too
    small."""
    if not task.plan.to_encode or not (always or has_accelerator()):
        return task
    devices = plan_devices(task.job, task.plan.to_encode)
    error = little_memory(devices or [])
    return replace(task, devices=devices, obstacles=[*task.obstacles, *([error] if error else [])])


def show_plans(tasks: Sequence[Task], *, check: bool, measure: bool, as_json: bool, can_measure: bool = True) -> int:
    """Print the plans and write nothing; return the exit code. With `check`, the images are measured."""
    tasks = list(map(_with_measured, tasks)) if check else tasks
    seconds = [_measure(task.job, task.plan) if measure and task.plan.to_encode else None for task in tasks]
    if as_json:
        _print_results(tasks, [_plan_json(task, each) for task, each in zip(tasks, seconds, strict=True)])
    else:
        _print_plans(tasks, seconds, always=True)
        obstacles = [error for task in tasks for error in task.obstacles]
        if any(task.plan.to_encode for task in tasks) and can_measure and not measure and not obstacles:
            console().print(f"{INDENT}add --measure to learn how long that takes")
    if (refused := _refused(tasks)) is not None:
        return refused
    has_work = any(task.has_work for task in tasks)
    if has_work and not as_json:
        print_next(typed_again("qwen-cache", without=("--dry-run", "--check", "--measure")))
    return _left_damaged(tasks) or (FAULTS if check and has_work else 0)


def _with_measured(task: Task) -> Task:
    """With what is found in the images of a cache to train on."""
    if task.is_repair or not is_main(task.job):
        return task
    cached = task.update.existing.of_recipe(task.job.recipe_name)
    with counting("measuring the images", total=len(task.plan.samples)) as on_sample:
        crop = task.job.resolution.crop
        return replace(task, measured=found_in_plan(task.plan.samples, cached, crop, lambda: on_sample(1)))


def _refused(tasks: Sequence[Task]) -> int | None:
    """Print every obstacle once; the exit code, None if there is no obstacle."""
    obstacles = dict.fromkeys(str(error) for task in tasks for error in task.obstacles)
    for error in obstacles:
        fail(error)
    return FAILED if obstacles else None


def _print_results(tasks: Sequence[Task], results: Sequence[dict[str, Any]]) -> None:
    """Print the JSON of each task: that of the cache, and that of its validation cache inside it."""
    value: dict[str, Any] = {}
    for task, result in zip(tasks, results, strict=True):
        value |= result if is_main(task.job) else {"validation": result}
    print_json(value)


def build(tasks: Sequence[Task], encoders: Encoders) -> tuple[int, list[dict[str, Any]]]:
    """Print the plans, and carry them out unless there are obstacles; the exit code, and the result of each as JSON."""
    _print_plans(tasks, [None] * len(tasks))
    if (refused := _refused(tasks)) is not None:
        return refused, []
    results = [_carry_out(task, encoders) for task in tasks]
    return _left_damaged(tasks), results


def _carry_out(task: Task, encoders: Encoders) -> dict[str, Any]:
    """Build what the task plans, and print the result; it is returned as JSON."""
    if task.update.is_nothing:
        return _nothing_to_do(task)
    begin = time.monotonic()
    report = _run(task, encoders)
    if not task.is_repair:  # which encodes no row that the settings add
        save_settings(task.job.folder, task.job.config)
    counts = _counts(task, report)
    _print_report(task, report, counts, time.monotonic() - begin)
    return {**counts, "samples": report.samples, "up_to_date": False}


def _nothing_to_do(task: Task) -> dict[str, Any]:
    job = task.job
    if task.is_repair:
        why = f"no sample of recipe {job.recipe_name!r} in {job.folder} is damaged"
    elif not task.plan.samples:
        why = f"slice {job.slice} of this source has no rows"
    else:
        why = f"{job.folder} already holds this source"
        save_settings(job.folder, job.config)  # those of a build that was killed before it could
        record_vae_encoders(task.update)  # of a cache that an older version wrote
    console().print(f"nothing to do: {plain(why)}", markup=False)
    samples = len(task.update.existing.rows.where_in(recipe=[recipe_id(job.recipe)]))
    return {**dict.fromkeys(WORK, 0), "samples": samples, "up_to_date": True}


def _left_damaged(tasks: Sequence[Task]) -> int:
    """Report the damaged shards that only other recipes can repair; return the exit code."""
    damaged = [(task, shard, recipes) for task in tasks for shard, recipes in task.elsewhere.items()]
    for task, shard, recipes in damaged:
        names, settings = ", ".join(recipes), " or ".join(f"cache.recipe={name}" for name in recipes)
        error = ShardError(
            "this shard is damaged and holds only samples of other recipes",
            where=task.update.folder / shard,
            found=names,
            do=f"run `qwen-cache build --repair` with the settings of that recipe and --set {settings}",
        )
        fail(str(error))
    return FAULTS if damaged else 0


def _run(task: Task, encoders: Encoders) -> write.Report:
    """Encode with a progress line; when interrupted, print how many samples are kept."""
    now, plan = Progress(0), task.plan
    missing = plan.missing
    what = "encoding" if plan.to_encode else "making masks" if plan.new_masks else "copying"

    try:
        with progress_line(what, len(missing), encoders.states if plan.to_encode else list) as show:

            def update(progress: Progress) -> None:
                nonlocal now
                now = progress
                show(progress)

            again = partial(builder.update_of_slice, task.job, plan) if task.job.slice and not task.is_repair else None
            known, reusable = task.known.find, task.reusable
            return write.run(task.job, task.update, missing, encoders, update, again, known=known, reusable=reusable)
    except BaseException:
        if now.finished:
            total = plural(len(missing), "sample")
            console().print(f"{now.finished} of {total} finished and kept; run the same command to continue")
        raise


def _counts(task: Task, report: write.Report) -> dict[str, int]:
    """The number of missing samples by how they were made; a sample whose copy was damaged counts as encoded."""
    plan, made = task.plan, [sample for sample in task.plan.missing if sample.key in report.made]
    masks, kept = sum(task.reusable.row_for(sample) is not None for sample in made), len(plan.kept - report.made)
    copied = len(plan.missing) - len(made) - kept
    return dict(zip(WORK, (len(made) - masks, copied, kept, masks), strict=True))


def _print_report(task: Task, report: write.Report, counts: dict[str, int], seconds: float) -> None:
    out, shards = console(), f"{plural(report.shards, 'shard')}, {human_bytes(report.bytes)}"
    parts = [f"{counts['encoded']} encoded"]
    where = "" if task.plan.reused else " from replaced shards"
    parts += [f"{counts['copied']} copied{where}"] if counts["copied"] else []
    parts += [f"{counts['kept']} kept from an interrupted build"] if counts["kept"] else []
    parts += [plural(counts["new_masks"], "new mask")] if counts["new_masks"] else []
    out.print(f"[bold green]done[/] in {human_time(seconds)}: {', '.join(parts)}")
    out.print(f"{plain(task.job.folder)} holds {plural(report.samples, 'sample')} in {shards}", markup=False)
    if report.replaced and is_remote(task.job.folder):
        out.print(f"{plural(report.replaced, 'replaced shard')} kept for runs that read them, until `qwen-cache gc`")
    elif report.replaced and task.is_repair:
        out.print(f"{plural(report.replaced, 'damaged shard')} moved to .replaced; `qwen-cache gc` removes them")
    elif report.replaced:
        replaced = plural(report.replaced, "replaced shard")
        out.print(f"{replaced} kept for runs that read them: switching back costs nothing until `qwen-cache gc`")
    if is_main(task.job) and not task.is_repair:
        rows = read_existing(task.job.folder, task.job.format_version).of_recipe(task.job.recipe_name)
        if line := found_in(rows).line():
            out.print(line, markup=False)


def _measure(job: BuildJob, plan: BuildPlan) -> float:
    """Estimated seconds for all samples to encode, from a few that are encoded and not stored.

    Loading the encoders is not timed, nor is the first sample, which warms up, unless it is the only one.
    """
    to_encode = plan.to_encode
    by_key = {sample.key: sample for sample in to_encode}
    few = [by_key[key] for key in plan.grouped(by_key)[: MEASURED + 1]]
    with preflight.load_lanes(job) as lanes:
        begin = time.monotonic()
        for number, work in enumerate([lanes.submit(sample) for sample in few]):
            lanes.result(work)
            if number == 0 and len(few) > 1:
                begin = time.monotonic()
        seconds = time.monotonic() - begin
    return seconds * estimate(to_encode, job).tokens / estimate(few[1:] or few, job).tokens


def _print_plans(tasks: Sequence[Task], seconds: Sequence[float | None], *, always: bool = False) -> None:
    """Print the plans to stderr, with `always` under --quiet too; `seconds` are the measured times."""
    job = tasks[0].job
    file, quantised = job.model.text_encoder, job.recipe.get("text_quantization")
    of_text = f" {verbatim(Path(file).name)}" if file else ""
    of_text += f" in {quantised}" if quantised else ""
    kind = f"{job.model.pipeline}, {job.recipe['dtype']}{f', text encoder{of_text}' if of_text else ''}"
    model = f"{verbatim(job.model.name)}  ({kind})"
    console(always=always).print(f"[bold]model[/]    {model}")
    for task, each in zip(tasks, seconds, strict=True):
        _print_plan(task, each, always=always)


def _print_plan(task: Task, seconds: float | None, *, always: bool) -> None:
    out, job, plan = console(always=always), task.job, task.plan
    if not is_main(job):
        out.print(f"[bold]cache[/]    {verbatim(job.folder)}: images to generate, for validation")
    if task.is_repair:
        _print_repair(task, out)
    else:
        out.print(f"[bold]plan[/]     {verbatim(plan.summary())}")
    _print_cost(task, seconds, out)
    if sizes := plan.target_sizes():
        shown = [f"{width}×{height}: {count}" for (width, height), count in sizes.items()]
        more = f", and {plural(len(shown) - MAX_SIZES, 'size')} more" if len(shown) > MAX_SIZES else ""
        out.print(f"[bold]{'targets' if is_main(job) else 'images '}[/]  {', '.join(shown[:MAX_SIZES])}{more}")
    without = sum(not sample.row.controls for sample in plan.samples)
    if without and job.model.takes_controls:
        of_all = f"{without} of {plural(len(plan.samples), 'sample')}"
        out.print(f"{INDENT}{of_all} without a control image, encoded as text to image")
    if job.masks_left_out:
        out.print(f"{INDENT}{plural(job.masks_left_out, 'edit mask')} skipped: format v1 has none")
    if job.rows_left_out and not task.is_repair:
        out.print(f"{INDENT}{plural(job.rows_left_out, 'row')} of the source left out")
    for notice in task.notices:
        for line in str(notice).splitlines():
            out.print(f"{INDENT}{line}", markup=False)
    for line in task.measured.lines() if task.measured else ():
        out.print(f"{INDENT}{plain(line)}", markup=False)
    if plan.repeated:
        out.print(f"{INDENT}{plural(plan.repeated, 'row')} with the same content as another, stored once")
    if plan.removed and not task.is_repair:
        out.print(f"{INDENT}{plural(len(plan.removed), 'sample')} removed from the source, and now from the dataset")
    if not (plan.missing or plan.removed or task.update.is_nothing or task.is_repair):
        out.print(f"{INDENT}names or their order have changed: the list of samples is written again")
    changed = [sample for sample in plan.missing if sample.reasons != ("new",)]
    if len(changed) > FEW_CHANGED and len({sample.reasons for sample in changed}) == 1:
        changed = []  # the summary has the reason
    for sample in changed[:MAX_CHANGED]:
        out.print(f"{INDENT}{plain(sample.row.name)}: {plain(', '.join(sample.reasons))}", markup=False)
    if len(changed) > MAX_CHANGED:
        out.print(f"{INDENT}and {len(changed) - MAX_CHANGED} more")
    print_problems(plan.problems, "the damaged samples" if task.is_repair else _rows_of(job))


def _rows_of(job: BuildJob) -> str:
    return "the source" if is_main(job) else "the source for validation"


def _print_repair(task: Task, out: PlainConsole) -> None:
    plan = task.plan
    lost = len(plan.samples) + len(plan.removed)
    samples = f"{plural(lost, 'damaged sample')} in {plural(len(task.update.damaged), 'damaged shard')}"
    out.print(f"[bold]repair[/]   {samples}, {len(plan.to_encode)} to encode; all other samples stay")
    if plan.removed:
        out.print(f"{INDENT}{plural(len(plan.removed), 'sample')} cannot be encoded again: see the problems")


def _print_cost(task: Task, seconds: float | None, out: PlainConsole) -> None:
    """Print what the missing samples cost in time and space, and which of them need no encoder."""
    job, plan = task.job, task.plan
    if plan.to_encode:
        time_taken = f", {human_time(seconds)}" if seconds else ""
        out.print(f"[bold]estimate[/] {estimate(plan.to_encode, job)}{time_taken}")
    if needed := bytes_to_write(job, plan, task.update):
        free = free_bytes(job.folder)
        left = "unknown free space" if free is None else f"{human_bytes(free)} free"
        if is_remote(job.folder):
            needed_here = human_bytes(disk_bytes(job, plan, task.update))
            out.print(f"[bold]upload[/]   {human_bytes(needed)}; {needed_here} of it on this disk at a time, {left}")
        else:
            out.print(f"[bold]disk[/]     {human_bytes(needed)} to write, {left}")
    for number, line in enumerate(memory_lines(task.devices or ())):
        out.print(f"{INDENT if number else '[bold]memory[/]   '}{line}")
    if text_only := sum(map(task.known.covers, plan.to_encode)):
        out.print(f"{INDENT}{plural(text_only, 'sample')} of which only the text is encoded: the images are cached")
    if plan.kept:
        out.print(f"{INDENT}{plural(len(plan.kept), 'sample')} kept from an interrupted build")
    for name, copies in plan.reused.items():
        out.print(f"{INDENT}{plural(copies.samples, 'sample')} copied from {plain(name)}", markup=False)
    if replaced := len(plan.to_copy) - sum(copies.samples for copies in plan.reused.values()):
        samples = plural(replaced, "sample")
        out.print(f"{INDENT}{samples} from replaced shards: switching back costs nothing until `qwen-cache gc`")
    if plan.new_masks:
        out.print(f"{INDENT}{plural(len(plan.new_masks), 'sample')} with only a new mask: everything else is cached")


def _plan_json(task: Task, seconds: float | None) -> dict[str, Any]:
    job, plan, size = task.job, task.plan, estimate(task.plan.to_encode, task.job)
    controls = Counter(len(sample.row.controls) for sample in plan.samples)
    return {
        "to_encode": len(plan.to_encode),
        "to_copy": len(plan.to_copy),
        "reused": {name: copies.samples for name, copies in plan.reused.items()},
        "kept": len(plan.kept),
        "new_masks": len(plan.new_masks),
        "text_only": sum(map(task.known.covers, plan.to_encode)),
        "cached": plan.cached,
        "reasons": plan.reason_counts(),
        "samples": [
            {"name": s.row.name, "key": s.key, "work": plan.work(s.key), "reasons": list(s.reasons)}
            for s in plan.missing
        ],
        "target_sizes": [{"width": w, "height": h, "samples": n} for (w, h), n in plan.target_sizes().items()],
        "controls": [{"controls": n, "samples": of_n} for n, of_n in sorted(controls.items())],
        "repeated": plan.repeated,
        "left_out": job.rows_left_out,
        "notices": [
            {"what": each.what, "count": each.count, "names": list(each.names), "do": each.do} for each in task.notices
        ],
        "removed": list(plan.removed),
        "measured": task.measured and task.measured.to_json(),
        "problems": [{"where": p.where, "what": p.what, "do": p.do} for p in plan.problems],
        "damaged_shards": sorted([*task.update.damaged, *task.elsewhere]),
        "refused": [
            {"what": error.fault, "do": error.do, "commands": list(getattr(error, "commands", ()))}
            for error in task.obstacles
        ],
        "image_tokens": size.image_tokens,
        "text_tokens": size.text_tokens,
        "bytes": size.bytes,
        "bytes_to_write": bytes_to_write(job, plan, task.update),
        "bytes_free": free_bytes(job.folder),
        "memory": None if task.devices is None else [planned.as_json() for planned in task.devices],
        "seconds": seconds,
    }


# ---- watch -----------------------------------------------------------------------------------------------------------
# `build --watch`: a build whenever the source has changed, by encoders that stay loaded.
#
# What another look may see otherwise (a source that cannot be read, another process that writes) is printed once, and
# tried again at the next look. Other errors end it.

FINAL = (ConfigError, DeviceError, FormatError, ModelError)


def watch_source(source: str, prepare: Callable[[], BuildJob], encoders: Encoders, seconds: float) -> int:
    """Look at the source every `seconds` until Ctrl-C; return the exit code."""
    with encoders:
        watch = Watch(prepare, encoders)
        console().print(f"watching {verbatim(source)}; Ctrl-C ends it")
        while True:
            if code := watch.look():
                return code
            try:
                time.sleep(seconds)
            except KeyboardInterrupt:
                console().print("stopped: nothing was being encoded")
                return 0


class Watch:
    """The state of a watch: what was seen and said until now."""

    def __init__(self, prepare: Callable[[], BuildJob], encoders: Encoders) -> None:
        self._prepare, self._encoders = prepare, encoders
        self._before, self._problems = Look({}), frozenset[Problem]()
        self._said = set[object]()

    def look(self) -> int:
        """Build the rows at rest that the cache lacks; the exit code of a build that is refused, else 0."""
        try:
            return self._look()
        except FINAL:
            raise
        except (QwenCacheError, OSError) as error:
            self._say(str(error) if isinstance(error, QwenCacheError) else message_of(error) or repr(error))
            return 0

    def _look(self) -> int:
        job = self._prepare()
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        before, self._before = self._before, Look.of(job, plan)
        self._print_problems(plan.problems)
        job = settled(job, self._before, before)
        new = {sample.row.name for sample in plan.missing} | _renamed(job, existing, plan)
        wanted = new.intersection(row.name for row in job.rows)
        if not job.rows or not (wanted or any(not job.keeps(name) for name in plan.removed)):
            return 0
        with directory.writing(job.folder):
            task = build_task(job, replace_recipe=False, takes_latents=self._encoders.takes_latents)
            return build([task], self._encoders)[0]

    def _print_problems(self, problems: Sequence[Problem]) -> None:
        """Print those that two looks found, once."""
        lasting = [problem for problem in problems if problem in self._problems and problem not in self._said]
        print_problems(lasting)
        self._said.update(lasting)
        self._problems = frozenset(problems)

    def _say(self, text: str) -> None:
        if text not in self._said:
            console().print(f"waiting: {text}", markup=False)
            self._said.add(text)


def _renamed(job: BuildJob, existing: Existing, plan: BuildPlan) -> set[str]:
    """The names of rows that the cache has under another name."""
    cached = existing.of_recipe(job.recipe_name)
    names = dict(zip(cached.each("key"), cached.each("name"), strict=True))
    return {each.row.name for each in plan.samples if not each.reasons and names.get(each.key) != each.row.name}
