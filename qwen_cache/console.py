"""Terminal output of both programs: messages on stderr, one document on stdout, and exit codes.

0: done. 1: the check found faults. 2: failed. 130: interrupted, as shells report it.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from qwen_cache.errors import Problem, QwenCacheError

if TYPE_CHECKING:
    import typer
    from rich.console import Console
    from rich.progress import Progress

FAULTS = 1
FAILED = 2
INTERRUPTED = 130
PROBLEMS_SHOWN = 20
IN_BUG_REPORTS = ("torch", "diffusers", "transformers", "peft", "accelerate")
USERS_ERRNO = (
    errno.ENOSPC,
    errno.EEXIST,
    errno.EFBIG,
    errno.EDQUOT,
    errno.EACCES,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
)


def run_app(app: typer.Typer, renamed: Mapping[str, Mapping[str, str]]) -> NoReturn:
    """Run a command line; errors that a user can cause become a message and an exit code.

    `renamed` maps each command to its renamed options: old name to new name.
    """
    import typer

    write_utf8()
    quiet_libraries()
    try:
        code = app(_with_new_names(sys.argv[1:], renamed), standalone_mode=False)
    except QwenCacheError as error:
        code = fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as leaving:  # typer's exit when the reader closes the pipe, as in `inspect | head`
        if not isinstance(leaving.__context__, BrokenPipeError):
            raise
        code = 0
    except ModuleNotFoundError as error:
        if (message := _missing(error, str(app.info.name))) is None:
            raise
        code = fail(message)
    except OSError as error:
        if error.errno not in USERS_ERRNO:
            raise
        code = fail(f"{error.filename or 'writing'}: {error.strerror}")
    except Exception as error:
        show = getattr(error, "show", None)  # a usage error of click; typer has its own copy of click
        if show is None:
            raise
        show()
        code = int(getattr(error, "exit_code", FAILED))
    if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
        console().print("[yellow]interrupted[/]")
    sys.exit(code if isinstance(code, int) else 0)


def _with_new_names(arguments: list[str], renamed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The arguments with old option names replaced by new ones; each replacement is reported."""
    options = renamed.get(arguments[0], {}) if arguments else {}
    updated = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if new := options.get(name):
            console().print(f"{name} is called {new} now", markup=False)
        updated.append((new or name) + equals + value)
    return updated


def _missing(error: ModuleNotFoundError, program: str) -> str | None:
    """The message for a missing module that an extra installs; None for any other module: that is our bug."""
    from qwen_cache.extras import advice

    module = error.name or ""
    do = advice(module, program)
    command = " ".join([program, *sys.argv[1:2]])
    return do and f"{command} needs {module}, which is not installed\n  → {do}"


def fail(message: str) -> int:
    """Print an error message; return the exit code."""
    console().print("[bold red]error:[/]", end=" ")
    console().print(message, markup=False)
    return FAILED


def console() -> Console:
    """The console for messages, on stderr; stdout is for results."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def progress(*, remaining: bool = True, transient: bool = False) -> Progress:
    """A progress line on stderr. `remaining` shows the time left, for work of known size; `transient` removes the line
    at the end."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.fields[count]}")]
    columns += [TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()] if remaining else []
    return Progress(*columns, console=console(), transient=transient)


@contextmanager
def counting(
    what: str, total: int | None = None, *, in_bytes: bool = False, transient: bool = False
) -> Iterator[Callable[[int], None]]:
    """A progress line; yields a function that adds to the work done. `transient` removes the line at the end."""
    begin, done = time.monotonic(), 0
    with progress(remaining=total is not None, transient=transient) as bar:
        task = bar.add_task(what, total=total, count="")

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
    out = console()
    out.print(f"[bold red]{plural(len(problems), 'problem')}[/] in {of}:")
    for problem in problems[:PROBLEMS_SHOWN]:
        out.print(f"  {problem.where}: {problem.what}\n    → {problem.do}", markup=False)
    if len(problems) > PROBLEMS_SHOWN:
        out.print(f"  and {len(problems) - PROBLEMS_SHOWN} more; --dry-run --json lists all")


def print_json(value: Any) -> None:
    """Print the one document of `--json` on stdout."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def write_utf8() -> None:
    """Write UTF-8 to files and pipes: Windows would use its code page, which lacks the letters of most prompts."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and advice; we report their errors ourselves."""
    for name, value in {
        "DIFFUSERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # they warn of kernels that this machine lacks
        logging.getLogger(name).setLevel(logging.ERROR)


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


def human_time(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def version_lines(program: str) -> str:
    """The output of `--version`: the program, then the other versions that a bug report needs."""
    import platform

    from qwen_cache.extras import installed
    from qwen_cache.version import __version__

    versions = [f"{name} {installed(name) or 'missing'}" for name in IN_BUG_REPORTS]
    return f"{program} {__version__}\n" + ", ".join([f"python {platform.python_version()}", *versions])


def print_done(what: object) -> None:
    """The last line of a command that made something."""
    from rich.markup import escape

    console().print(f"[bold green]done[/]: {escape(str(what))}", highlight=False)
