"""Terminal output of both programs: messages on stderr, results on stdout, and exit codes.

Values from outside, such as names and prompts, enter a message through `plain`, or `verbatim` where rich reads markup.
0: done. 1: the check found faults. 2: failed. 130: interrupted, as shells report it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import Problem
from qwen_cache.plain_text import json_without_controls, plain
from qwen_cache.progress_file import progress_file

if TYPE_CHECKING:
    from rich.progress import Progress

    from qwen_cache.plain_output import PlainConsole

FAULTS = 1
FAILED = 2
INTERRUPTED = 130
PROBLEMS_SHOWN = 20


@dataclass
class _Verbosity:
    quiet: bool = False
    verbose: bool = False


_verbosity = _Verbosity()


def set_verbosity(*, quiet: bool = False, verbose: bool = False) -> None:
    """Set what this process prints from now on; with `quiet`, only errors and results."""
    _verbosity.quiet, _verbosity.verbose = quiet, verbose


def is_verbose() -> bool:
    return _verbosity.verbose


def console(*, always: bool = False) -> PlainConsole:
    """The console for messages, on stderr; under `--quiet` it prints only with `always`: errors and results."""
    from qwen_cache.plain_output import PlainConsole

    return PlainConsole(stderr=True, soft_wrap=True, quiet=_verbosity.quiet and not always)


def results(*, soft_wrap: bool = False) -> PlainConsole:
    """The console for results, on stdout. Lines that are too long are wrapped, or with `soft_wrap` left as they are."""
    from qwen_cache.plain_output import PlainConsole

    return PlainConsole(stderr=False, soft_wrap=soft_wrap)


def verbatim(value: object) -> str:
    """A value for text with rich's markup: plain, with its brackets as brackets."""
    from rich.markup import escape

    return escape(plain(value))


def progress(
    *,
    remaining: bool = True,
    transient: bool = False,
    below: Callable[[], str] = lambda: "",
    lanes: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
) -> Progress:
    """A progress line on stderr, with the time elapsed. `remaining` also shows the time left, for work of known size;
    `transient` removes the line at the end; `below` has the text of a second line. Other programs get the line and its
    `lanes` from a file (`progress_file`)."""
    from rich.console import RenderableType
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Times(ProgressColumn):
        def render(self, task: Task) -> Text:
            text = f"{clock(task.finished_time if task.finished else task.elapsed)} elapsed"
            return Text(text if task.finished or not remaining else f"{text}, {clock(task.time_remaining)} left")

    class Lines(Progress):
        def start(self) -> None:
            super().start()
            if file:
                file.start()

        def stop(self) -> None:
            super().stop()
            if file:
                file.stop()

        def get_renderables(self) -> Iterable[RenderableType]:
            yield from super().get_renderables()
            if text := below():
                yield Text(text, no_wrap=True, overflow="ellipsis")

    description = TextColumn("{task.description}", markup=False)
    count = TextColumn("{task.fields[count]}", markup=False, table_column=Column(no_wrap=True))
    columns = [description, BarColumn(bar_width=24), count, Times(table_column=Column(no_wrap=True))]
    out = console()
    file = progress_file(lambda: _state(bar, lanes()), lambda text: out.print(f"warning: {text}", markup=False))
    bar = Lines(*columns, console=out, transient=transient, disable=out.quiet or (transient and not out.is_terminal))
    return bar


def _state(bar: Progress, lanes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The progress line for other programs; times in whole seconds, so that it changes once a second at least."""
    if not bar.tasks:
        return None
    task = bar.tasks[0]
    elapsed, left = task.finished_time if task.finished else task.elapsed, task.time_remaining
    return {
        "what": task.description,
        "done": task.completed,
        "total": task.total,
        "text": task.fields["count"],
        "elapsed": None if elapsed is None else round(elapsed),
        "left": None if left is None else round(left),
        "lanes": list(lanes),
    }


@contextmanager
def counting(
    what: str, total: int | None = None, *, in_bytes: bool = False, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """A progress line; yields a function that adds to the work done. `transient` removes the line at the end."""
    begin, done = time.monotonic(), 0
    with progress(remaining=total is not None, transient=transient) as bar:
        task = bar.add_task(plain(what), total=total, count="")

        def advance(count: int) -> None:
            nonlocal done
            done += count
            speed = done / max(time.monotonic() - begin, 1e-6)
            text = f"{human_bytes(done)}, {human_bytes(speed)}/s" if in_bytes else f"{done}/{total}, {speed:.2f}/s"
            bar.update(task, completed=done, count=text)

        yield advance
        bar.update(task, total=done)


def print_problems(problems: Sequence[Problem], of: str = "the source") -> None:
    """Print the first problems, each with its fix."""
    if not problems:
        return
    out = console(always=True)
    out.print(f"[bold red]{plural(len(problems), 'problem')}[/] in {of}:")
    for problem in problems[:PROBLEMS_SHOWN]:
        out.print(f"  {problem}".replace("\n", "\n  "), markup=False)
    if len(problems) > PROBLEMS_SHOWN:
        out.print(f"  and {len(problems) - PROBLEMS_SHOWN} more; --dry-run --json lists all")


def print_json(value: Any) -> None:
    """Print the one document of `--json` on stdout."""
    print_text(json_without_controls(json.dumps(value, indent=1, ensure_ascii=False)))


def print_text(text: str) -> None:
    """Print lines for other programs on stdout, exactly as they are."""
    print(text)


def plural(count: float, noun: str) -> str:
    """`1 shard`, `2 shards`, `1.5 shards`."""
    number = f"{count:,g}" if isinstance(count, float) else f"{count}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def human_bytes(count: float) -> str:
    """`1.9 GB`, in powers of ten as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def clock(seconds: float | None) -> str:
    """`4:05`, `1:04:05`, and `-:--` where it is not known."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"


def human_time(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def print_done(what: object) -> None:
    """The last line of a command that made something."""
    console().print(f"[bold green]done[/]: {verbatim(what)}")
