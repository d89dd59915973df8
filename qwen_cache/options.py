"""Declaring and running a command line: options, --help, errors, the command `config`."""

from __future__ import annotations

import difflib
import faulthandler
import inspect
import io
import logging
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn, cast

import typer
import typer.main
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
    print_json,
    print_text,
    results,
    set_verbosity,
)
from qwen_cache.text import INPUT as EXPECTED_INPUT

# ---- options ---------------------------------------------------------------------------------------------------------
# Declaring commands and their options, for both programs: what `--help` shows, and which setting an option overrides.
#
# A command is a function under `@command`, in a module that `Commands` imports when it is needed. The default of a
# parameter is its option: a `flag`, another `option`, an `argument`, or a setting of qwen.yaml (`setting`,
# `setting_argument`). A setting arrives as a `Given` for `load_config`, and its choices and default are looked up when
# help is shown or completed, so that no other command imports the settings for them.

DOCUMENTATION = "https://github.com/qwen-cache/qwen-cache/blob/main/docs/"
HELP_NAMES = {"help_option_names": ["--help", "-h"]}

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


def flag(name: str, panel: str, help: str) -> Any:
    """An option without a value, which is False unless it is given."""
    return typer.Option(False, name, help=help, rich_help_panel=panel)


def option(
    panel: str, help: str, metavar: str | None = None, *, default: Any = None, shown: str | None = None, **more: Any
) -> Any:
    """An option with the name of its parameter. `shown`: the default as help shows it; `more`: others of typer's."""
    shows = True if shown is None else shown
    return typer.Option(default, help=help, metavar=metavar, rich_help_panel=panel, show_default=shows, **more)


def argument(metavar: str, help: str, *, default: Any = None, shown: str | bool = True) -> Any:
    """An argument. `shown`: the default as help shows it."""
    return typer.Argument(default, metavar=metavar, help=help, show_default=shown)


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
    key: str,
    panel: str,
    help: str,
    metavar: str | None = None,
    *,
    name: str | None = None,
    default: str | None = None,
    required: bool = False,
) -> Any:
    """An option that overrides the setting `key`, by default with the name of its last part.

    `default`: what help shows where the setting has none.
    """
    name = name or "--" + key.rpartition(".")[2].replace("_", "-")
    parse = SettingOption(name, key, default)
    return typer.Option(
        ... if required else None,
        name,
        help=help,
        parser=parse,
        autocompletion=parse.complete,
        metavar=metavar,
        rich_help_panel=panel,
    )


def setting_argument(key: str, metavar: str, help: str, *, default: str | None = None) -> Any:
    """An argument that overrides the setting `key`."""
    return typer.Argument(None, parser=SettingOption(metavar, key, default), metavar=metavar, help=help)


CACHE = setting_argument("cache.path", "CACHE", "The folder of the cache.")
READ_CACHE = setting_argument("cache.path", "CACHE", "The folder or URL of the cache.")
OUT_CACHE = setting("cache.path", OUTPUT, "The folder or URL of the cache.", "FOLDER", name="--out")
NEW_CACHE = setting("cache.path", OUTPUT, "The cache to create or extend.", "FOLDER", name="--out", required=True)
ON_ERROR = setting("data.on_error", INPUT, "How to handle unusable samples.")
MODEL_PATH = setting("model.path", MODEL, "A diffusers folder, or a repository on the hub.", "MODEL", name="--model")
TRANSFORMER = setting(
    "model.transformer", MODEL, "A .safetensors or .gguf file in place of the transformer's weights in --model.", "FILE"
)
TEXT_ENCODER = setting(
    "model.text_encoder", MODEL, "A .safetensors file in place of the text encoder's weights in --model.", "FILE"
)
VAE = setting("model.vae", MODEL, "A VAE whose decoder makes the images, in place of that of --model.", "MODEL")
TEXT_DTYPE = setting("cache.dtype", MODEL, "The dtype in which the text encoder computes.")
DTYPE = setting("cache.dtype", MODEL, "The dtype in which to compute and store.")
VAE_DEVICE = setting(
    "cache.vae_device", DEVICES, "The device of the VAE, such as cuda:0, or several: cuda:0,cuda:1.", "DEVICE"
)
TEXT_DEVICE = setting(
    "cache.text_device", DEVICES, "The device of the text encoder, such as cuda:1, or several: cuda:1,cuda:2.", "DEVICE"
)
TARGETS = setting(
    "data.columns.target",
    INPUT,
    "The folder, column or tar part with the targets, such as after.",
    "NAME",
    name="--targets",
)
FROM = typer.Option(
    None,
    "--from",
    help="The settings file of another trainer: musubi-tuner, ai-toolkit or SimpleTuner.",
    metavar="FILE",
    rich_help_panel=INPUT,
)
CONTROLS = option(INPUT, "The folder, column or tar part with the controls; repeat it for more.", "NAME")
JSON = flag("--json", OUTPUT, "Print one JSON document on stdout and nothing else.")
CONFIG = option(SETTINGS, "The settings file.", "FILE", shown="qwen.yaml")
SET = typer.Option(
    None,
    "--set",
    help="Override a setting; repeat it for more. `config` lists all settings.",
    metavar="SECTION.KEY=VALUE",
    rich_help_panel=SETTINGS,
)
"""Options that several commands have."""


def given_controls(names: Sequence[str] | None) -> Given | None:
    """The names of `CONTROLS` as the value of their setting."""
    return Given("--controls", "data.columns.control", names) if names else None


_COMMON = typer.Typer(add_completion=False)


@_COMMON.command()
def _common(
    quiet: bool = typer.Option(False, "--quiet", "-q", help="Print only errors and results.", rich_help_panel=GENERAL),
    verbose: bool = typer.Option(
        False,
        "--verbose",
        "-v",
        help="Also print tracebacks, logs of libraries and the time taken.",
        rich_help_panel=GENERAL,
    ),
) -> None:
    """The options of every command."""


def command(
    name: str | None = None, *, page: str, examples: Sequence[str], renamed: Mapping[str, str] | None = None
) -> Callable[[Callable[..., int]], Command]:
    """Make a command of a function that returns the exit code.

    `page` is a path in docs/; `renamed` has the old names of options, which are refused with the new ones.
    """

    def declare(work: Callable[..., int]) -> Command:
        app = typer.Typer(add_completion=False)
        app.command(name, cls=Command, context_settings=HELP_NAMES)(work)
        made = cast(Command, typer.main.get_command(app))
        made.params += typer.main.get_command(_COMMON).params
        defaults = {each.name: each.default for each in inspect.signature(work).parameters.values()}
        parsers = {each: getattr(default, "parser", None) for each, default in defaults.items()}
        made.settings = {each: parser for each, parser in parsers.items() if isinstance(parser, SettingOption)}
        made.page, made.examples, made.renamed = page, tuple(examples), renamed or {}
        return made

    return declare


class Commands(Mapping[str, "Command"]):
    """The commands of a program by name. Each is imported when it is asked for, from its place `module:name`.

    They are declared under the headings of `--help`. `meant` has other words for a command, with what to type.
    """

    def __init__(self, groups: Mapping[str, Mapping[str, str]], meant: Mapping[str, str]) -> None:
        self.meant = meant
        self._places = {name: place for group in groups.values() for name, place in group.items()}
        self._panels = {name: heading for heading, group in groups.items() for name in group}

    def __getitem__(self, name: str) -> Command:
        command = cast(Command, resolve_name(self._places[name]))
        command.rich_help_panel = self._panels[name]
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def program(name: str, help: str, commands: Commands) -> Group:
    """A program with these commands."""
    app = typer.Typer(name=name, help=help, cls=Group, no_args_is_help=True, context_settings=HELP_NAMES)
    app.callback()(version_option)
    made = cast(Group, typer.main.get_command(app))
    made.commands = commands  # type: ignore[assignment]  # typer only reads them
    return made


# ---- help ------------------------------------------------------------------------------------------------------------


class Group(TyperGroup):
    """A program: its options and commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, without importing the commands."""
        return list(self.commands)

    def get_params(self, ctx: Any) -> list[Any]:
        return [_without_types(each) for each in super().get_params(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        typed = [*args]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if (refusal := None if ctx.resilient_parsing else usage_error(error, ctx, typed)) is None:
                raise
            raise refusal from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        commands = cast(Commands, self.commands)
        if args and args[0] not in commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], commands, n=1)
            meant = commands.meant.get(args[0]) or (f"{self.name} {near[0]}" if near else None)
            do = f"did you mean `{meant}`?" if meant else f"`{self.name} --help` lists the commands"
            raise ConfigError(f"{self.name} has no such command", found=args[0], do=do)
        return super().resolve_command(ctx, args)


class Command(TyperCommand):
    """A command with `-q` and `-v`, whose help ends with examples and a page of the documentation."""

    settings: Mapping[str, SettingOption]
    """The parameters that override a setting."""
    examples: Sequence[str]
    page: str
    renamed: Mapping[str, str]

    def typed(self, key: str, value: str) -> list[str]:
        """A value of the setting `key` as this command takes it: an argument, or an option with its value."""
        name = next(each.name for each in self.settings.values() if each.key == key)
        if not name.startswith("-"):
            return [value]
        return [f"{name}={value}"] if value.startswith("-") else [name, value]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for name in (each.partition("=")[0] for each in args):
            if name in self.renamed and not ctx.resilient_parsing:
                raise ConfigError(f"{name} is called {self.renamed[name]} now")
        typed = [*args]  # click empties it
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            if (refusal := None if ctx.resilient_parsing else usage_error(error, ctx, typed, self._meant)) is None:
                raise
            raise refusal from None

    def _meant(self, name: str) -> str | None:
        """The option, or the setting, that another name stands for; None if it is unknown."""
        from qwen_cache.settings.load import setting_named

        if (key := setting_named(name.lstrip("-").replace("-", "_"))) is None:
            return None
        return next((each.name for each in self.settings.values() if each.key == key), f"--set {key}=…")

    def invoke(self, ctx: Any) -> Any:
        quiet, verbose = ctx.params.pop("quiet"), ctx.params.pop("verbose")
        set_verbosity(quiet=quiet, verbose=verbose)
        if verbose:  # of libraries imported from now on, and all that use Python's logging
            os.environ |= {"DIFFUSERS_VERBOSITY": "info", "TRANSFORMERS_VERBOSITY": "info"}
            logging.basicConfig(level=logging.INFO)
        begin, begin_cpu = time.monotonic(), time.process_time()
        try:
            return super().invoke(ctx)
        finally:
            if verbose:
                elapsed, cpu = time.monotonic() - begin, time.process_time() - begin_cpu
                console().print(f"took {human_time(elapsed)}, {human_time(cpu)} of CPU time")

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


# ---- usage -----------------------------------------------------------------------------------------------------------
# What click refuses of a command line, in the words of this project. typer has its own copy of click: its errors are
# told apart by their attributes.

EXTRA, NO_VALUE = re.compile(r"Got unexpected extra argument\S* \((.*)\)", re.DOTALL), "requires an argument"
NOT_A_CHOICE = re.compile(r"'(.*)' is not one of (.*)\.", re.DOTALL)
HELP = "IsHelpError"
"""The end of the name of click's error that shows the help."""


def usage_error(
    error: Exception, ctx: Any, typed: Sequence[str], meant: Callable[[str], str | None] = lambda _: None
) -> ConfigError | None:
    """The error for a usage error of click; None for any other.

    `typed` are the arguments of the command of `ctx`; `meant` gives what another name of an option stands for.
    """
    if not hasattr(error, "ctx") or not hasattr(error, "format_message") or type(error).__name__.endswith(HELP):
        return None
    path, message = ctx.command_path, str(getattr(error, "message", None) or error.format_message())
    see = f"`{path} --help`"
    option, parameter = str(getattr(error, "option_name", "")), getattr(error, "param", None)
    if hasattr(error, "possibilities"):
        nearest = {each.lstrip("-"): each for each in error.possibilities or ()}  # dashes make --gpu similar to --out
        near = difflib.get_close_matches(option.lstrip("-"), nearest, n=1)
        other = meant(option) or (nearest[near[0]] if near else None)
        do = f"did you mean {other}?" if other else f"{see} lists the options"
        return ConfigError(f"{path} has no such option", found=option, do=do)
    if option and NO_VALUE in message:
        return ConfigError(f"{option} needs a value", where=path, do=f"write it behind {option}; {see} says what it is")
    if parameter is not None and hasattr(error, "param_type"):
        choices = ", ".join(map(str, parameter.type_descriptor.choices or ())) or None
        return ConfigError(f"{path} needs {_named(parameter)}", expected=choices, do=f"give it; {see} says what it is")
    if parameter is not None:
        return _wrong_value(message.removeprefix("Value error, "), parameter, typed, see)
    if extra := EXTRA.fullmatch(message):
        arguments = " ".join(_named(each) for each in ctx.command.params if each.param_type_name == "argument")
        takes = f"{arguments} and options" if arguments else "options alone"
        do = f"leave it out, or put quotes around what has spaces; {see} lists the options"
        return ConfigError(f"{path} takes {takes}", found=extra[1], do=do)
    message = re.sub(r"^Option '(.*?)'", r"\1", message.rstrip("."))
    return ConfigError(message, where=path, do=f"{see} lists the options")


def _named(parameter: Any) -> str:
    """The name of an option, or of an argument as the help shows it."""
    return str(parameter.opts[-1] if parameter.param_type_name == "option" else parameter.metavar or parameter.name)


def _wrong_value(message: str, parameter: Any, typed: Sequence[str], see: str) -> ConfigError:
    """The error for a value that a parameter does not take; of an option the value is found among what was `typed`."""
    name, what, expected, found = _named(parameter), "not a valid value", None, None
    for option, following in zip(typed, [*typed[1:], None], strict=True):
        given, has_value, value = option.partition("=")
        if given in parameter.opts:
            found = value if has_value else following
    do = f"{see} says what it is"
    if choice := NOT_A_CHOICE.fullmatch(message):
        found, expected = choice[1], choice[2].replace("'", "")
        near = difflib.get_close_matches(found, expected.split(", "), n=1)
        do = f"did you mean {near[0]}?" if near else do
    elif message.startswith(EXPECTED_INPUT):
        expected = message.removeprefix(EXPECTED_INPUT).partition(", unable to parse")[0]
    else:
        what = message.rstrip(".")
    return ConfigError(what, where=name, expected=expected, found=found, do=do)


# ---- command line ----------------------------------------------------------------------------------------------------
# Running a command line: what both programs share around their commands.
#
# Errors that a user can cause become a message and an exit code; `--version`.

IN_BUG_REPORTS = ("torch", "diffusers", "transformers", "peft", "accelerate")


def run_app(app: Group | Command) -> NoReturn:
    """Run a command line; errors that a user can cause become a message and an exit code."""
    from qwen_cache.terminal import install_plain_streams

    write_utf8()
    install_plain_streams()
    quiet_libraries()
    explain_crashes()
    set_verbosity()
    try:
        code = app(sys.argv[1:], prog_name=app.name, standalone_mode=False)
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
        if (message := _missing(error, str(app.name))) is None:
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
        show()
        code = int(getattr(error, "exit_code", FAILED))
    if code == INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
        console(always=True).print("[yellow]interrupted[/]")
    sys.exit(code if isinstance(code, int) else 0)


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
        logger = logging.getLogger(name)
        if logger.level != logging.ERROR:  # setting it goes through all loggers there are
            logger.setLevel(logging.ERROR)


def version_lines(program: str) -> str:
    """The output of `--version`: the program, and below it the versions that a bug report needs."""
    versions = [f"{name} {installed(name) or 'missing'}" for name in IN_BUG_REPORTS]
    return f"{program} {__version__}\n" + ", ".join([f"python {platform.python_version()}", *versions])


def _print_version(context: typer.Context, value: bool) -> None:
    if value:
        print_text(version_lines(str(context.command.name)))
        raise typer.Exit


def version_option(
    version: bool = typer.Option(False, "--version", help="Print the version.", callback=_print_version, is_eager=True),
) -> None:
    """The options of a program itself, for `app.callback()`."""


# ---- config command --------------------------------------------------------------------------------------------------
# The command `config` of both programs: the settings of qwen.yaml with their values, searched by words.


def config_command(program: str) -> Command:
    """The command `config` of a program."""

    @command(
        page="howto/choose-what-is-trained.md",
        examples=[f"{program} config --search lr", f"{program} config --config out/qwen.yaml"],
    )
    def config(
        search: str | None = option(
            INPUT, "Only settings with these words in their name, name in other trainers, or description.", "WORDS"
        ),
        json: bool = JSON,
        config: Path | None = CONFIG,
        set_: list[str] | None = SET,
    ) -> int:
        """Print all settings of qwen.yaml with their values and descriptions, as a settings file."""
        from qwen_cache.settings.describe import all_settings, found_by, to_json, to_yaml
        from qwen_cache.settings.load import load_config

        settings = list(all_settings()) if search is None else found_by(search)
        if not settings:
            raise ConfigError("no setting matches these words", where="--search", found=search, do="try a single word")
        values = load_config(config, set_)
        if json:
            print_json(to_json(settings, values))
        else:
            print_text(to_yaml(settings, values))
        return 0

    return config
