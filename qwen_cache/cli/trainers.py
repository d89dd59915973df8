"""`import` and `export`: a plan before anything is written, progress, the next command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qwen_cache.errors import ConfigError
from qwen_cache.options import (
    CONFIG,
    INPUT,
    JSON,
    MODEL,
    NEW_CACHE,
    ON_ERROR,
    OUTPUT,
    READ_CACHE,
    SET,
    argument,
    command,
    flag,
    option,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import (
    FAILED,
    console,
    counting,
    human_bytes,
    plural,
    print_json,
    print_next,
    print_problems,
    typed_again,
    verbatim,
)
from qwen_cache.text import plain, shell_line

if TYPE_CHECKING:
    from qwen_cache.format.update import Update
    from qwen_cache.trainers.convert import ExportPlan, ImportJob, ImportPlan

# ---- import ----------------------------------------------------------------------------------------------------------

MAX_PROBLEMS = 20  # that are listed


@command(
    "import",
    page="howto/store-and-share.md",
    examples=[
        "qwen-cache import musubi cache --out shards --model Qwen/Qwen-Image-Edit-2509",
        "qwen-cache import qflux cache --out shards --model Qwen/Qwen-Image-Edit \\\n"
        "     --image-size 832x480 --captions data/control_images",
    ],
)
def import_(
    tool: Literal["qflux", "musubi", "diffusion-pipe"] = argument(
        "TOOL", "The trainer that wrote the cache.", default=...
    ),
    source: Path = argument("SOURCE", "The folder of that cache.", default=...),
    model: str = option(
        MODEL, "The model that wrote it, such as Qwen/Qwen-Image-Edit-2509. Recorded as claimed.", "MODEL", default=...
    ),
    pipeline: str | None = option(MODEL, "Its diffusers pipeline, if --model does not determine it.", "CLASS"),
    image_size: list[str] | None = option(
        INPUT, "qflux: the size of the resized images; repeat it for each.", "WIDTHxHEIGHT"
    ),
    captions: Path | None = option(INPUT, "qflux: the folder with the .txt files of the prompts.", "FOLDER"),
    on_error: Given | None = ON_ERROR,
    out: Given = NEW_CACHE,
    dtype: Literal["bfloat16", "float32"] | None = option(OUTPUT, "The dtype to store.", shown="the one that is exact"),
    dry_run: bool = flag("--dry-run", OUTPUT, "Read everything and report what would be imported; write nothing."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Import the cache of another trainer, without the encoders."""
    from qwen_cache.format import directory
    from qwen_cache.format.update import read_existing
    from qwen_cache.settings.load import load_config
    from qwen_cache.trainers.convert import FORMAT_VERSION, claimed_model, make_plan, make_update, prepare
    from qwen_cache.trainers.files import Options

    settings = load_config(config, set_, [out, on_error])
    options = Options(tuple(parse_size(text) for text in image_size or ()), captions)
    job = prepare(settings, tool, source, claimed_model(model, pipeline), options, dtype)
    if job.source != source:
        console().print(f"{plain(job.source)} is the one cache in {plain(source)}", markup=False)
    with counting("reading", in_bytes=True) as on_bytes:
        plan = make_plan(job, on_bytes)
    if dry_run:
        update = make_update(job, plan, read_existing(job.folder, FORMAT_VERSION))
        _print_import(job, plan, update, json)
        return 0
    if plan.problems and settings.data.on_error == "stop":
        _print_problems(plan)
        console().print("nothing was imported; fix these samples, or skip them with --on-error skip")
        return FAILED
    if not plan.samples:
        _print_problems(plan)
        console().print("[bold red]error:[/] no usable sample is left, so there is nothing to import")
        return FAILED
    with directory.writing(job.folder):
        return _write(job, plan, make_update(job, plan, read_existing(job.folder, FORMAT_VERSION)), json)


def parse_size(text: str) -> tuple[int, int]:
    """`832x576`, width and height in pixels, as (height, width) in tokens."""
    from qwen_cache.format.sample import PIXELS_PER_TOKEN

    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    width, height = (int(match[1]), int(match[2])) if match else (0, 0)
    if not match or width % PIXELS_PER_TOKEN or height % PIXELS_PER_TOKEN:
        expected = f"WIDTHxHEIGHT, both multiples of {PIXELS_PER_TOKEN}"
        raise ConfigError("not a size", where="--image-size", expected=expected, found=text)
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def _write(job: ImportJob, plan: ImportPlan, update: Update, as_json: bool) -> int:
    from qwen_cache.trainers.convert import run

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


@command(
    page="howto/store-and-share.md",
    examples=[
        "qwen-cache export shards --to qflux --out qflux --on-error skip",
        "qwen-cache export s3://team/a --to musubi --out musubi --leave-out edit_mask",
    ],
)
def export(
    cache: Given | None = READ_CACHE,
    on_error: Given | None = ON_ERROR,
    to: Literal["musubi", "diffusion-pipe", "diffsynth", "qflux"] = option(
        OUTPUT, "The trainer to export for.", default=...
    ),
    out: Path = option(OUTPUT, "A new folder.", "FOLDER", default=...),
    leave_out: list[str] | None = option(
        OUTPUT, "Export without a tensor that the trainer cannot hold; repeat it for each.", "TENSOR"
    ),
    zero_cond_t: bool = flag(
        "--zero-cond-t", OUTPUT, "The transformer is that of Qwen-Image-Edit-2511, which diffsynth stores."
    ),
    dry_run: bool = flag("--dry-run", OUTPUT, "Report what would be exported; write nothing."),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Write a cache as the files of another trainer, without the encoders."""
    from qwen_cache.format.cache import open_configured
    from qwen_cache.settings.load import load_config
    from qwen_cache.trainers.convert import check_folder, plan_export, write_export

    settings = load_config(config, set_, [cache, on_error])
    check_folder(out)
    plan = plan_export(open_configured(settings.cache), to, leave_out or [])
    _print_export(plan, as_json=json and dry_run)
    has_refused = bool(plan.problems) and settings.data.on_error == "stop"
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
        if not json:
            print_next(typed_again("qwen-cache", without=["--dry-run"]))
        return 0
    with counting("writing", total=len(plan.stems)) as on_samples:
        write_export(plan, out, zero_cond_t=zero_cond_t, on_sample=lambda: on_samples(1))
    console().print(f"[bold green]done[/]: {verbatim(out)} holds {plural(len(plan.stems), 'sample')}")
    console().print(f"train on it with: {plain(plan.tool.command.format(folder=out))}", markup=False)
    if json:
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
        why = plan.tool.unused.get(name)
        has = f"which {plural(count, 'sample')} {'has' if count == 1 else 'have'}"
        out.print(f"       without {name}, {has}{f': {why}' if why else ''}")
    print_problems(plan.problems, "the cache")


def _export_json(plan: ExportPlan) -> dict[str, Any]:
    return {
        "samples": len(plan.stems),
        "bytes": plan.bytes,
        "left_out": dict(sorted(plan.left_out.items())),
        "problems": [{"where": each.where, "what": each.what, "do": each.do} for each in plan.problems],
    }
