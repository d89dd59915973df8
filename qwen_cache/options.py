"""Declaring commands and their options, for both programs: what `--help` shows, and which setting an option overrides.

A command is a function under `@command`, which adds `-q`, `-v` and `-h`, two examples and a page of the documentation.
An option is either typer's, or a setting of qwen.yaml (`setting`, `setting_argument`): it arrives as a `Given` for
`load_config`, and its choices and default are those of the setting. They are looked up when help is shown or completed,
so that no other command imports the settings for them.
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from qwen_cache.console import console, human_time, results, set_verbosity
from qwen_cache.settings.given import Given

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
