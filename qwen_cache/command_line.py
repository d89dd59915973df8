"""Running a command line: what both programs share around their commands.

Errors that a user can cause become a message and an exit code; options by an old name still work; `--version`.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import platform
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from qwen_cache.console import FAILED, INTERRUPTED, console, is_verbose, print_text, set_verbosity
from qwen_cache.errors import QwenCacheError
from qwen_cache.extras import advice, installed
from qwen_cache.plain_text import plain
from qwen_cache.system_errors import message_of
from qwen_cache.version import __version__

IN_BUG_REPORTS = ("torch", "diffusers", "transformers", "peft", "accelerate")


def run_app(app: typer.Typer, renamed: Mapping[str, Mapping[str, str]]) -> NoReturn:
    """Run a command line; errors that a user can cause become a message and an exit code.

    `renamed` maps each command to its renamed options: old name to new name.
    """
    from qwen_cache.plain_output import install_plain_streams

    write_utf8()
    install_plain_streams()
    quiet_libraries()
    explain_crashes()
    set_verbosity()
    try:
        arguments = _with_new_names(sys.argv[1:], renamed)
        code = app(arguments, prog_name=app.info.name, standalone_mode=False)
    except QwenCacheError as error:
        if is_verbose():
            console(always=True).print(traceback.format_exc(), markup=False)
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
    except (OSError, MemoryError) as error:
        if (message := message_of(error)) is None:
            raise
        code = fail(message)
    except Exception as error:
        show = getattr(error, "show", None)  # a usage error of click; typer has its own copy of click
        if show is None:
            raise
        if possibilities := getattr(error, "possibilities", None):
            error.possibilities = possibilities[:1]  # type: ignore[attr-defined]  # only the nearest option
        show()
        code = int(getattr(error, "exit_code", FAILED))
    if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
        console(always=True).print("[yellow]interrupted[/]")
    sys.exit(code if isinstance(code, int) else 0)


def _with_new_names(arguments: list[str], renamed: Mapping[str, Mapping[str, str]]) -> list[str]:
    """The arguments with old option names replaced by new ones; each replacement is reported."""
    options = renamed.get(arguments[0], {}) if arguments else {}
    updated = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if new := options.get(name):
            console().print(f"{plain(name)} is called {new} now", markup=False)
        updated.append((new or name) + equals + value)
    return updated


def _missing(error: ModuleNotFoundError, program: str) -> str | None:
    """The message for a missing module that an extra installs; None for any other module: that is our bug."""
    module = error.name or ""
    do = advice(module, program)
    command = " ".join([program, *sys.argv[1:2]])
    return do and f"{command} needs {module}, which is not installed\n  → {do}"


def fail(message: str) -> int:
    """Print an error message; return the exit code."""
    out = console(always=True)
    out.print("[bold red]error:[/]", end=" ")
    out.print(message, markup=False)
    return FAILED


def write_utf8() -> None:
    """Write UTF-8 to files and pipes: Windows would use its code page, which lacks the letters of most prompts."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.isatty():
            stream.reconfigure(encoding="utf-8", errors=stream.errors)


def explain_crashes() -> None:
    """Print where each thread is when SIGBUS, SIGSEGV or SIGABRT ends the process, which would end without a word."""
    if sys.__stderr__ is not None and not faulthandler.is_enabled():  # pytest has its own
        with suppress(OSError, ValueError):  # stderr is closed, or no file
            faulthandler.enable(sys.__stderr__)


def quiet_libraries() -> None:
    """Turn off the libraries' progress bars and advice; we report their errors ourselves."""
    for name, value in {
        "DIFFUSERS_VERBOSITY": "error",
        "PYTHON_COLORS": "0",  # of Python's tracebacks, which would be escaped
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }.items():
        os.environ.setdefault(name, value)
    for name in ("bitsandbytes", "torchao", "torch.utils._pytree"):  # they warn of kernels that this machine lacks
        logging.getLogger(name).setLevel(logging.ERROR)


def version_lines(program: str) -> str:
    """The output of `--version`: the program, and below it the versions that a bug report needs."""
    versions = [f"{name} {installed(name) or 'missing'}" for name in IN_BUG_REPORTS]
    return f"{program} {__version__}\n" + ", ".join([f"python {platform.python_version()}", *versions])


def _print_version(context: typer.Context, value: bool) -> None:
    if value:
        print_text(version_lines(str(context.command.name)))
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """The options of a program itself, for `app.callback()`."""
