"""`--help` as people read it: panels, choices, defaults, examples that work, a page that exists, in 80 columns.

Every command of both programs is walked, so that a new option or command keeps the same manner.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import Any

import pytest

from qwen_cache.cli import COMMANDS as CACHE_COMMANDS
from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21
from qwen_cache.options import DOCUMENTATION
from qwen_cache.settings.describe import describe
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import load_config
from qwen_train.cli import COMMANDS as TRAIN_COMMANDS

from .support.commands import refused, run
from .support.paths import ROOT

PROGRAMS = {"qwen-cache": CACHE_COMMANDS, "qwen-train": TRAIN_COMMANDS}
COMMANDS: dict[str, Any] = {
    f"{program} {name}": command
    for program, commands in PROGRAMS.items()
    for name, command in commands.items()
    if not command.hidden
}
EXAMPLE_WIDTH = 77
TYPES = re.compile(r"<|(?<![\w-])(?:bool|str|int|float|list|path|None|Given|Path)\b(?=\s{2,}|$)", re.MULTILINE)
"""The names of Python's types where help shows what a value is."""


def shown(name: str, width: int, monkeypatch: pytest.MonkeyPatch, option: str = "--help") -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    result = run(*name.split(), option)
    assert result.code == 0
    assert result.stderr == ""
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_the_terminal_and_shows_no_types(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for width, option in ((80, "--help"), (120, "-h")):
        text = shown(name, width, monkeypatch, option)
        panels, examples = text.split(" Examples\n")
        assert max(map(len, panels.splitlines())) <= width
        assert not TYPES.findall(panels)
        assert "[default: ]" not in panels
        assert "\x1b" not in text
        assert panels.count("╭") == panels.count("╰") >= 3
        assert examples.splitlines()[-2].strip() == DOCUMENTATION + COMMANDS[name].page


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_help_a_panel_and_its_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = COMMANDS[name].described()
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", shown(name, 300, monkeypatch)).split())
    for each in command.params:
        assert each.help, each.name
        assert each.help[0].isupper() or each.help.startswith("qflux"), each.help
        assert each.help.endswith((".", "…")), each.help
        if each.param_type_name == "argument":
            assert re.fullmatch("[A-Z]+", each.metavar), each.metavar
        else:
            assert each.rich_help_panel, each.name
            assert each.is_flag or each.metavar or each.type_descriptor.choices, each.name
            assert any(option.startswith("--") for option in each.opts)
        if (option := COMMANDS[name].settings.get(each.name)) is not None and not each.required:
            default = option.default or describe(option.key).default_text
            assert not default or f"{each.help} [default: {default}]" in text, each.name
    settings = set() if name == "qwen-cache ui" else {"--set"}  # which its pages have
    assert {"--json", *settings} <= {option for each in command.params for option in each.opts}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_accepted_and_the_page_exists(name: str) -> None:
    command = COMMANDS[name]
    nav = re.findall(r"([\w/.-]+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert command.page in nav
    assert (ROOT / "docs" / command.page).is_file()
    assert len(command.examples) == 2
    for example in command.examples:
        assert max(map(len, example.splitlines())) <= EXAMPLE_WIDTH
        words = shlex.split(example.replace("\\\n", " "))
        assert words[:2] == name.split()
        given = command.make_context(name, words[2:]).params
        load_config(None, given.get("set_"), [each for each in given.values() if isinstance(each, Given)])


def test_the_documentation_is_that_of_the_repository() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Repository"] + "/blob/main/docs/" == DOCUMENTATION


def test_defaults_that_a_model_decides_are_the_models() -> None:
    settings = COMMANDS["qwen-train predict"].settings
    ours, newer = QWEN_IMAGE.predict_defaults, QWEN_IMAGE_21.predict_defaults
    assert settings["num_inference_steps"].default == (
        f"{ours['num_inference_steps']}; Qwen-Image-2.1: {newer['num_inference_steps']}"
    )
    assert settings["true_cfg_scale"].default == (
        f"{ours['true_cfg_scale']:g} with --negative-prompt; Qwen-Image-2.1: {newer['true_cfg_scale']:g}"
    )
    assert settings["output_resolution"].default == str(newer["output_resolution"])
    assert settings["max_sequence_length"].default == str(ours["max_sequence_length"])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("qwen-cache build --dryrun", "did you mean --dry-run?"),
        ("qwen-train run --lr 1e-4", "did you mean --learning-rate?"),
        ("qwen-train run --gpu 1", "`qwen-train run --help` lists the options"),
        ("qwen-cache serve --port 80", "`qwen-cache serve --help` lists the options"),
        ("qwen-train run --lora-rank=8", "did you mean --rank?"),
        ("qwen-train run --blocks-to-swap 9", "did you mean --set train.offload_blocks=…?"),
        ("qwen-train run --max-tokens 9", "did you mean --set train.max_tokens=…?"),
        ("qwen-train run --frobnicate", "`qwen-train run --help` lists the options"),
        ("qwen-train train", "did you mean `qwen-train run`?"),
        ("qwen-train resume out", "did you mean `qwen-train run --resume`?"),
        ("qwen-cache run", "did you mean `qwen-train run`?"),
        ("qwen-cache verifyy", "did you mean `qwen-cache verify`?"),
        ("qwen-cache frob", "`qwen-cache --help` lists the commands"),
    ],
)
def test_what_is_typed_in_other_words_is_answered_by_what_it_means(typed: str, meant: str) -> None:
    program, command, *options = typed.split()
    result = run(program, command, *options)
    option = options[0].partition("=")[0] if options and options[0].startswith("--") else None
    what = f"{program} {command} has no such option (found {option})"
    what = what if option else f"{program} has no such command (found {command})"
    assert (result.code, result.stderr) == (2, f"error: {what}\n  → {meant}\n")


LEFT = "leave it out, or put quotes around what has spaces; `qwen-cache verify --help` lists the options"


@pytest.mark.parametrize(
    ("typed", "what", "do"),
    [
        ("qwen-cache verify a b c", "qwen-cache verify takes CACHE and options (found b c)", LEFT),
        ("qwen-cache doctor a", "qwen-cache doctor takes options alone (found a)", "doctor --help` lists"),
        (
            "qwen-train export out",
            "qwen-train export needs --to (expected diffusers, comfyui, peft, merged)",
            "give it;",
        ),
        ("qwen-train export", "qwen-train export needs LORA", "give it; `qwen-train export --help` says what it is"),
        (
            "qwen-train export o --to peff --out x",
            "--to: not a valid value (expected diffusers, comfyui, peft, merged, found peff)",
            "did you mean peft?",
        ),
        (
            "qwen-cache gc --grace-hours many",
            "--grace-hours: not a valid value (expected a valid number, found many)",
            "",
        ),
        ("qwen-cache verify --re-encode=0", "(expected greater than or equal to 1, found 0)", "says what it is"),
        ("qwen-cache inspect --sample", "qwen-cache inspect: --sample needs a value", "write it behind --sample"),
        ("qwen-cache verify --json=3", "qwen-cache verify: --json does not take a value", "lists the options"),
        ("qwen-cache --nope", "qwen-cache has no such option (found --nope)", "`qwen-cache --help` lists the options"),
        ("qwen-train best hf://a/b", "FOLDER: a run is written and read in a folder of this machine", "found hf://a/b"),
        ("qwen-train export hf://a/b --to peft --out x", "a LoRA is a file of this machine, not behind", "download it"),
    ],
)
def test_what_cannot_be_a_command_line_is_an_error_of_ours(typed: str, what: str, do: str) -> None:
    program, *words = typed.split()
    result = run(program, *words)
    refused(result, what, do)
    assert "Usage:" not in result.stderr
    assert result.stderr.startswith("error: ")


@pytest.mark.parametrize("program", ["qwen-cache", "qwen-train"])
def test_other_words_for_commands_stand_for_commands(program: str) -> None:
    commands = PROGRAMS[program]
    for meant in commands.meant.values():
        named, name, *arguments = meant.split()
        options = {option for parameter in PROGRAMS[named][name].params for option in parameter.opts}
        assert {each for each in arguments if each.startswith("--")} <= options
    assert not commands.meant.keys() & commands.keys()
