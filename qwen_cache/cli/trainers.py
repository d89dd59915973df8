"""`import` and `export`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.cache import open_configured
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.format.update import Update, read_existing
from qwen_cache.settings.load import Config
from qwen_cache.terminal import FAILED, console, counting, human_bytes, plural, print_json, print_problems, verbatim
from qwen_cache.text import plain, shell_line
from qwen_cache.trainers.convert import (
    FORMAT_VERSION,
    Dtype,
    ExportPlan,
    ImportedTool,
    ImportJob,
    ImportPlan,
    ToolName,
    check_folder,
    claimed_model,
    make_plan,
    make_update,
    plan_export,
    prepare,
    run,
    write_export,
)
from qwen_cache.trainers.files import Options

# ---- import ----------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache import`: a plan before anything is written, progress, a summary after.

MAX_PROBLEMS = 20  # that are listed


def run_import(
    config: Config,
    tool: ImportedTool,
    source: Path,
    *,
    model: str,
    pipeline: str | None,
    dtype: Dtype | None,
    image_sizes: list[str],
    captions: Path | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Read, print the plan, write, print a summary; return the exit code."""
    options = Options(tuple(parse_size(text) for text in image_sizes), captions)
    job = prepare(config, tool, source, claimed_model(model, pipeline), options, dtype)
    with counting("reading", in_bytes=True) as on_bytes:
        plan = make_plan(job, on_bytes)
    if dry_run:
        update = make_update(job, plan, read_existing(job.folder, FORMAT_VERSION))
        _print_import(job, plan, update, as_json)
        return 0
    if plan.problems and config.data.on_error == "stop":
        _print_problems(plan)
        console().print("nothing was imported; fix these samples, or skip them with --on-error skip")
        return FAILED
    if not plan.samples:
        _print_problems(plan)
        console().print("[bold red]error:[/] no usable sample is left, so there is nothing to import")
        return FAILED
    with directory.writing(job.folder):
        return _write(job, plan, make_update(job, plan, read_existing(job.folder, FORMAT_VERSION)), as_json)


def parse_size(text: str) -> tuple[int, int]:
    """`832x576`, width and height in pixels, as (height, width) in tokens."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or width % PIXELS_PER_TOKEN or height % PIXELS_PER_TOKEN:
        expected = f"WIDTHxHEIGHT, both multiples of {PIXELS_PER_TOKEN}"
        raise ConfigError("not a size", where="--image-size", expected=expected, found=text)
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def _write(job: ImportJob, plan: ImportPlan, update: Update, as_json: bool) -> int:
    _print_import(job, plan, update, as_json=False)
    if up_to_date := update.is_nothing:
        console().print(f"nothing to do: {plain(job.folder)} already holds this source", markup=False)
    else:
        with counting("writing", total=len(update.order)) as on_samples:
            manifest = run(job, plan, update, on_samples)
        size = human_bytes(sum(shard.bytes for shard in manifest.shards))
        shards, samples = plural(len(manifest.shards), "shard"), plural(len(plan.samples), "sample")
        console().print(f"[bold green]done[/]: {verbatim(job.folder)} holds {samples} in {shards}, {size}")
    console().print(f"train on it with: {plain(_training_command(job, plan, update))}", markup=False)
    if as_json:
        imported = 0 if up_to_date else len(update.order)
        print_json({"imported": imported, "samples": len(plan.samples), "up_to_date": up_to_date})
    return 0


def _training_command(job: ImportJob, plan: ImportPlan, update: Update) -> str:
    """The command line that trains on the imported samples."""
    words = ["qwen-train", "run", str(job.folder), "--model", job.model.name]
    if len(update.existing.recipes.keys() | {job.recipe_name}) > 1:
        words += ["--set", f"cache.recipe={job.recipe_name}"]
    has_every_empty_prompt = all(sample.has_empty_prompt for sample in plan.samples.values())
    if job.config.train.caption_dropout and not has_every_empty_prompt:
        words += ["--set", "train.caption_dropout=0"]
    return shell_line(words)


def _print_import(job: ImportJob, plan: ImportPlan, update: Update, as_json: bool) -> None:
    facts = _import_json(plan, update)
    if as_json:
        print_json(facts)
        return
    out = console()
    out.print(f"[bold]source[/]  {verbatim(job.source)}  ({job.tool})")
    out.print(
        f"[bold]claimed[/] {verbatim(job.model.name)}  ({job.model.pipeline}); the source does not name its model"
    )
    size = human_bytes(facts["bytes"])
    counts = f"{facts['to_import']} to import, {facts['cached']} already cached"
    out.print(f"[bold]plan[/]    {counts}; {size} in {plan.recipe['dtype']}")
    if facts["repeated"]:
        out.print(f"        {plural(facts['repeated'], 'sample')} with the same content as another, stored once")
    if facts["removed"]:
        out.print(f"        {plural(facts['removed'], 'sample')} removed from the source, and now from the dataset")
    if facts["without_empty_prompt"]:
        samples = plural(facts["without_empty_prompt"], "sample")
        out.print(f"        {samples} without the empty prompt: they cannot be trained with caption dropout")
    if facts["without_prompt"]:
        out.print(f"        {plural(facts['without_prompt'], 'sample')} without the text of the prompt")
    _print_problems(plan)


def _print_problems(plan: ImportPlan) -> None:
    out = console()
    if plan.problems:
        out.print(f"[bold red]{plural(len(plan.problems), 'problem')}[/] in the source:")
    for problem in plan.problems[:MAX_PROBLEMS]:
        out.print(f"  {problem}".replace("\n", "\n  "), markup=False)
    if len(plan.problems) > MAX_PROBLEMS:
        out.print(f"  and {len(plan.problems) - MAX_PROBLEMS} more; --dry-run --json lists all")


def _import_json(plan: ImportPlan, update: Update) -> dict[str, Any]:
    here = set(update.existing.rows)
    wanted = {row.key for row in update.rows}
    new = [sample for key, sample in plan.samples.items() if key not in here]
    return {
        "to_import": len(new),
        "cached": len(plan.samples) - len(new),
        "samples": [{"name": sample.source.name, "key": sample.key} for sample in new],
        "repeated": sum(sample.source_rows - 1 for sample in plan.samples.values()),
        "removed": len(here - wanted),
        "without_empty_prompt": sum(not sample.has_empty_prompt for sample in plan.samples.values()),
        "without_prompt": sum(not sample.prompt for sample in plan.samples.values()),
        "problems": [{"where": str(p.where), "what": p.fault, "do": p.do} for p in plan.problems],
        "recipe": plan.recipe,
        "bytes": sum(sample.bytes for sample in new),
    }


# ---- export ----------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-cache export`: a plan before anything is written, progress, the next command.


def run_export(
    config: Config,
    tool: ToolName,
    out: Path,
    *,
    leave_out: list[str],
    zero_cond_t: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Read the index, print the plan, write, print a summary; return the exit code."""
    check_folder(out)
    plan = plan_export(open_configured(config.cache), tool, leave_out)
    _print_export(plan, as_json=as_json and dry_run)
    has_refused = bool(plan.problems) and config.data.on_error == "stop"
    if has_refused:
        console().print("nothing is exported: fix these samples, or skip them with --on-error skip")
    if plan.refusal:
        raise plan.refusal
    if has_refused:
        return FAILED
    if not plan.stems:
        console().print("[bold red]error:[/] no sample is left that can be exported")
        return FAILED
    if dry_run:
        return 0
    with counting("writing", total=len(plan.stems)) as on_samples:
        write_export(plan, out, zero_cond_t=zero_cond_t, on_sample=lambda: on_samples(1))
    console().print(f"[bold green]done[/]: {verbatim(out)} holds {plural(len(plan.stems), 'sample')}")
    console().print(f"train on it with: {plain(plan.tool.command.format(folder=out))}", markup=False)
    if as_json:
        print_json(_export_json(plan))
    return 0


def _print_export(plan: ExportPlan, *, as_json: bool) -> None:
    if as_json:
        print_json(_export_json(plan))
        return
    out = console()
    out.print(f"[bold]cache[/]  {verbatim(plan.cache.folder)}")
    out.print(f"[bold]plan[/]   {plural(len(plan.stems), 'sample')} for {plan.tool.title}, {human_bytes(plan.bytes)}")
    for name, count in sorted(plan.left_out.items()):
        out.print(f"       without {name}, which {plural(count, 'sample')} {'has' if count == 1 else 'have'}")
    print_problems(plan.problems, "the cache")


def _export_json(plan: ExportPlan) -> dict[str, Any]:
    return {
        "samples": len(plan.stems),
        "bytes": plan.bytes,
        "left_out": dict(sorted(plan.left_out.items())),
        "problems": [{"where": each.where, "what": each.what, "do": each.do} for each in plan.problems],
    }
