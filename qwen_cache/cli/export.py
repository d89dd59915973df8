"""Terminal front end of `qwen-cache export`: a plan before anything is written, progress, the next command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen_cache.exporters.writer import ExportPlan, ToolName, check_folder, plan_export, write_export
from qwen_cache.format.cache import open_configured
from qwen_cache.settings.load import Config
from qwen_cache.terminal import FAILED, console, counting, human_bytes, plural, print_json, print_problems, verbatim
from qwen_cache.text import plain


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
    _print_plan(plan, as_json=as_json and dry_run)
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
        print_json(_plan_json(plan))
    return 0


def _print_plan(plan: ExportPlan, *, as_json: bool) -> None:
    if as_json:
        print_json(_plan_json(plan))
        return
    out = console()
    out.print(f"[bold]cache[/]  {verbatim(plan.cache.folder)}")
    out.print(f"[bold]plan[/]   {plural(len(plan.stems), 'sample')} for {plan.tool.title}, {human_bytes(plan.bytes)}")
    for name, count in sorted(plan.left_out.items()):
        out.print(f"       without {name}, which {plural(count, 'sample')} {'has' if count == 1 else 'have'}")
    print_problems(plan.problems, "the cache")


def _plan_json(plan: ExportPlan) -> dict[str, Any]:
    return {
        "samples": len(plan.stems),
        "bytes": plan.bytes,
        "left_out": dict(sorted(plan.left_out.items())),
        "problems": [{"where": each.where, "what": each.what, "do": each.do} for each in plan.problems],
    }
