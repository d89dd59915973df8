"""Terminal front end of `qwen-train plan`."""

from __future__ import annotations

from typing import Any

from qwen_cache.console import FAULTS, human_bytes, plural, print_json
from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_train.memory.plan import plan

LEAST_MEMORY = 1 << 20  # bytes: with fewer, a unit was forgotten


def run_plan(settings: Config, gpu_memory: str | None, *, as_json: bool) -> int:
    """Report what training takes, and whether it fits; the exit code."""
    report = plan(settings, capacity_of(gpu_memory) if gpu_memory else None)
    (print_json if as_json else print_plan)(report)
    return 0 if report.get("fits", True) else FAULTS


def capacity_of(text: str) -> int:
    """Bytes from `24GB` or `22.5 GiB`."""
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        size = int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        size = 0
    if size < LEAST_MEMORY:
        raise ConfigError("not the size of a GPU", where="--gpu-memory", expected="such as 24GB or 80GiB", found=text)
    return size


PARTS = {
    "weights": "frozen weights",
    "trained": "trained weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "average": "average (EMA)",
    "activations": "activations",
    "reserved": "CUDA itself, estimated",
}


def print_plan(found: dict[str, Any]) -> None:
    """The same for people, on stdout."""
    from rich.console import Console
    from rich.table import Table

    out, table = Console(highlight=False, soft_wrap=True), Table(box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, words in (PARTS | {"total": "[bold]together[/]"}).items():
        if found["memory"][name]:
            table.add_row(words, human_bytes(found["memory"][name]))
    batch = found["largest_batch"]
    out.print(f"[bold]largest batch[/]  {plural(batch['samples'], 'sample')}, {batch['tokens']:,} tokens")
    out.print(table)
    if "fits" not in found:
        return
    verdict = "[bold green]fits[/]" if found["fits"] else "[bold red]does not fit[/]"
    out.print(f"{verdict} in {human_bytes(found['gpu_memory'])}")
    if found["max_tokens"]:
        out.print(f"largest batches that fit: train.max_tokens={found['max_tokens']}")
    for cure in found.get("do", []):
        out.print(f"would fit with {cure}")
