"""Declaring and running a command line: options, --help, errors, the command `config`."""

from __future__ import annotations

import faulthandler
import inspect
import io
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.extras import __version__, advice, installed
from qwen_cache.settings.given import Given
from qwen_cache.terminal import (
    FAILED,
    INTERRUPTED,
    console,
    human_time,
    is_verbose,
    message_of,
    print_text,
    results,
    set_verbosity,
)

# ---- options ---------------------------------------------------------------------------------------------------------
# Declaring commands and their options, for both programs: what `--help` shows, and which setting an option overrides.
#
# A command is a function under `@command`, which adds `-q`, `-v` and `-h`, two examples and a page of the
# documentation. An option is either typer's, or a setting of qwen.yaml (`setting`, `setting_argument`): it arrives as a
# `Given` for `load_config`, and its choices and default are those of the setting. They are looked up when help is shown
# or completed, so that no other command imports the settings for them.

DOCUMENTATION = "https://github.com/qwen-cache/qwen-cache/blob/main/docs/"

INPUT = "What to read"
GENERATE = "What to generate"
MODEL = "Model"
TRAINING = "Training"
SAMPLING = "Sampling"
DEVICES = "Devices and memory"
OUTPUT = "Output"
SETTINGS = "Settings"
GENERAL = "General"
"""The panels of `--help`, in the order in which a command declares its options."""


class SettingOption:
    """Turns the text of an option into a `Given`: the parser of an option that overrides a setting."""

    def __init__(self, name: str, key: str, default: str | None) -> None:
        self.name, self.key, self.default = name, key, default

    def __call__(self, text: str) -> Given:
        return Given(self.name, self.key, text)

    def complete(self, incomplete: str) -> list[str]:
        """The choices that start with `incomplete`."""
        from qwen_cache.settings.describe import describe

        return [each for each in describe(self.key).choices if each.startswith(incomplete)]


def setting(
    key: str, name: str, *, panel: str, help: str, metavar: str | None = None, default: str | None = None
) -> Any:
    """An option `name` that overrides the setting `key`. `default`: what help shows where the setting has none."""
    parse = SettingOption(name, key, default)
    return typer.Option(
        name, help=help, parser=parse, autocompletion=parse.complete, metavar=metavar, rich_help_panel=panel
    )


def setting_argument(key: str, metavar: str, *, help: str, default: str | None = None) -> Any:
    """An argument that overrides the setting `key`."""
    return typer.Argument(parser=SettingOption(metavar, key, default), metavar=metavar, help=help)


CachePath = Annotated[Given | None, setting_argument("cache.path", "CACHE", help="The folder of the cache.")]
ReadPath = Annotated[Given | None, setting_argument("cache.path", "CACHE", help="The folder or URL of the cache.")]
Model = Annotated[
    Given | None,
    setting(
        "model.path", "--model", panel=MODEL, metavar="MODEL", help="A diffusers folder, or a repository on the hub."
    ),
]
Transformer = Annotated[
    Given | None,
    setting(
        "model.transformer",
        "--transformer",
        panel=MODEL,
        metavar="FILE",
        help="A .safetensors or .gguf file in place of the transformer's weights in --model.",
    ),
]
Vae = Annotated[
    Given | None,
    setting(
        "model.vae",
        "--vae",
        panel=MODEL,
        metavar="MODEL",
        help="A VAE whose decoder makes the images, in place of that of --model.",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", help="The settings file.", metavar="FILE", show_default="qwen.yaml", rich_help_panel=SETTINGS
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a setting; repeat it for more. `config` lists all settings.",
        metavar="SECTION.KEY=VALUE",
        rich_help_panel=SETTINGS,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.", rich_help_panel=OUTPUT)
]

_COMMON = (
    (
        "quiet",
        typer.Option("--quiet", "-q", help="Print only errors and results.", rich_help_panel=GENERAL),
    ),
    (
        "verbose",
        typer.Option(
            "--verbose",
            "-v",
            help="Also print tracebacks, logs of libraries and the time taken.",
            rich_help_panel=GENERAL,
        ),
    ),
)


def command(
    app: typer.Typer, name: str | None = None, *, examples: Sequence[str], page: str
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add a function to a program as a command. `page` is a path in docs/."""

    def register(handler: Callable[..., int]) -> Callable[..., int]:
        signature = inspect.signature(handler, eval_str=True)
        common = [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info])
            for each, info in _COMMON
        ]

        @wraps(handler)
        def run(quiet: bool, verbose: bool, **given: Any) -> int:
            set_verbosity(quiet=quiet, verbose=verbose)
            if verbose:
                _show_library_logs()
            begin, begin_cpu = time.monotonic(), time.process_time()
            try:
                return handler(**given)
            finally:
                if verbose:
                    elapsed, cpu = time.monotonic() - begin, time.process_time() - begin_cpu
                    console().print(f"took {human_time(elapsed)}, {human_time(cpu)} of CPU time")

        whole = signature.replace(parameters=[*signature.parameters.values(), *common])
        run.__signature__ = whole  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in whole.parameters.values()}

        attributes = {"settings": _settings_of(signature), "examples": tuple(examples), "page": page}
        app.command(
            name, cls=type("Command", (Command,), attributes), context_settings={"help_option_names": ["--help", "-h"]}
        )(run)
        return handler

    return register


def _show_library_logs() -> None:
    """Show what libraries log: those imported from now on, and all that use Python's logging."""
    os.environ |= {"DIFFUSERS_VERBOSITY": "info", "TRANSFORMERS_VERBOSITY": "info"}
    logging.basicConfig(level=logging.INFO)


def _settings_of(signature: inspect.Signature) -> dict[str, SettingOption]:
    """The parameters that override a setting."""
    infos = {name: info for name, each in signature.parameters.items() for info in get_args(each.annotation)[1:]}
    return {name: info.parser for name, info in infos.items() if isinstance(info.parser, SettingOption)}


# ---- help ------------------------------------------------------------------------------------------------------------


class Group(TyperGroup):
    """A program: its options and commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_types(each) for each in super().get_params(ctx)]


class Command(TyperCommand):
    """A command whose help ends with examples and a page of the documentation."""

    settings: Mapping[str, SettingOption]
    examples: Sequence[str]
    page: str

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_types(each) for each in super().get_params(ctx)]

    def get_help_option(self, ctx: Any) -> Any:
        option: Any = super().get_help_option(ctx)
        option.rich_help_panel = GENERAL
        return option

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Required arguments without typer's braces: `SOURCE`, `[CACHE]`."""
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def described(self) -> Command:
        """This command, where options that override a setting show its values and default."""
        from qwen_cache.settings.describe import describe

        described = copy(self)
        described.params = [copy(each) for each in self.params]
        for each in described.params:
            if (option := self.settings.get(str(each.name))) is not None:
                found, shown = describe(option.key), cast(Any, each)
                shown.metavar = shown.metavar or found.metavar
                shown.show_default = (not shown.required and (option.default or found.default_text)) or False
        return described

    def format_help(self, ctx: Any, formatter: Any) -> None:
        described = self.described()
        for each in cast("list[Any]", described.params):
            if isinstance(each.show_default, str):  # typer shows it in parentheses
                each.help, each.show_default = f"{each.help} [dim]\\[default: {each.show_default}][/dim]", False
        super(Command, described).format_help(ctx, formatter)
        out = results(soft_wrap=True)  # so that a line can be copied
        out.print(" [bold]Examples[/]", *(f"   {escape(each)}" for each in self.examples), sep="\n")
        out.print(f"\n [bold]Documentation[/]\n   {DOCUMENTATION}{self.page}")


def _without_types(parameter: Any) -> Any:
    """A parameter whose help shows its choices or metavar, never its Python type."""
    choices = "|".join(map(str, parameter.type_descriptor.choices or ()))
    if parameter.param_type_name == "argument":
        parameter.display_type_rich = lambda ctx: choices
    elif parameter.metavar is None:
        parameter.metavar = choices
    return parameter


# ---- command line ----------------------------------------------------------------------------------------------------
# Running a command line: what both programs share around their commands.
#
# Errors that a user can cause become a message and an exit code; `--version`.

IN_BUG_REPORTS = ("torch", "diffusers", "transformers", "peft", "accelerate")


def run_app(app: typer.Typer, renamed: Mapping[str, Mapping[str, str]]) -> NoReturn:
    """Run a command line; errors that a user can cause become a message and an exit code.

    `renamed` has the old names of options, which are refused with the new ones, by command.
    """
    from qwen_cache.terminal import install_plain_streams

    write_utf8()
    install_plain_streams()
    quiet_libraries()
    explain_crashes()
    set_verbosity()
    try:
        _refuse_old_names(sys.argv[1:], renamed)
        code = app(sys.argv[1:], prog_name=app.info.name, standalone_mode=False)
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


def _refuse_old_names(arguments: Sequence[str], renamed: Mapping[str, Mapping[str, str]]) -> None:
    """ConfigError for an option by its old name."""
    options = renamed.get(arguments[0], {}) if arguments else {}
    for name in (argument.partition("=")[0] for argument in arguments):
        if name in options:
            raise ConfigError(f"{name} is called {options[name]} now")


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


# ---- config command --------------------------------------------------------------------------------------------------
# The command `config` of both programs: the settings of qwen.yaml with their values, searched by words.


def add_config_command(app: typer.Typer) -> None:
    program = app.info.name

    @command(
        app,
        page="howto/choose-what-is-trained.md",
        examples=[f"{program} config --search lr", f"{program} config --config out/qwen.yaml"],
    )
    def config(
        search: Annotated[
            str | None,
            typer.Option(
                help="Only settings with these words in their name, name in other trainers, or description.",
                metavar="WORDS",
                rich_help_panel=INPUT,
            ),
        ] = None,
        json: Json = False,
        config: ConfigFile = None,
        set_: Assignments = None,
    ) -> int:
        """Print all settings of qwen.yaml with their values and descriptions, as a settings file."""
        from qwen_cache.settings.describe import all_settings, found_by, to_json, to_yaml
        from qwen_cache.settings.load import load_config
        from qwen_cache.terminal import print_json, print_text

        settings = list(all_settings()) if search is None else found_by(search)
        if not settings:
            raise ConfigError("no setting matches these words", where="--search", found=search, do="try a single word")
        values = load_config(config, set_)
        if json:
            print_json(to_json(settings, values))
        else:
            print_text(to_yaml(settings, values))
        return 0
