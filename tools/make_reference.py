"""Write the reference pages of the documentation from the code: `make docs` runs it before it builds the site.

    python tools/make_reference.py [FOLDER]

Commands come from the programs, settings from the models of qwen.yaml, errors from their classes, the format from
schemas/FORMAT.md, the tree of modules from their first sentences; mkdocstrings adds the docstrings of the Python API.
Nothing in FOLDER (docs/reference) is written by hand, and git ignores it.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from make_tree import tree

from qwen_cache import cli as cache_cli
from qwen_cache.errors import RULES, NoCacheError, QwenCacheError
from qwen_cache.settings.load import Config
from qwen_cache.settings.titles import TITLES
from qwen_train import cli as train_cli

ROOT = Path(__file__).parents[1]
APPS: dict[str, Any] = {"qwen-cache": cache_cli.app, "qwen-train": train_cli.app}
API = {
    "Reading a cache": ["qwen_cache.open_cache", "qwen_cache.Cache", "qwen_cache.Sample", "qwen_cache.verify_cache"],
    "Loaders": [
        "qwen_cache.torch.CacheDataset",
        "qwen_cache.torch.CacheBatches",
        "qwen_cache.torch.collate",
        "qwen_cache.webdataset.open",
    ],
    "Errors": ["qwen_cache.QwenCacheError", "qwen_cache.FormatError"],
    "Edit masks": ["qwen_cache.difference_mask", "qwen_cache.FrozenQwen"],
    "The transformer": [
        "qwen_train.QwenImageMultiResTransformer2DModel",
        "qwen_train.QwenImage21MultiResTransformer2DModel",
    ],
    "Flow matching": ["qwen_train.NoiseSchedule", "qwen_train.interpolate", "qwen_train.flow_loss"],
    "Generating images": ["qwen_train.Generator", "qwen_train.GeneratedImages"],
}
"""The public API by heading: all names in `__all__` of the packages and of the loaders (tests/test_docs.py)."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
"""Keywords of JSON Schema as signs."""


def table(heads: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    """A Markdown table; bars within cells are escaped."""
    lines = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in rows]
    return "\n".join(f"| {line} |" for line in (" | ".join(heads), " | ".join("---" for _ in heads), *lines))


def code(text: str) -> str:
    return f"`{text}`" if text else ""


# ---- the programs ----------------------------------------------------------------------------------------------------


def commands(program: str) -> dict[str, Any]:
    """The commands of a program, without hidden ones."""
    return {name: command for name, command in APPS[program].commands.items() if not command.hidden}


BOTH = """\
Both programs read `qwen.yaml` in the current folder, or the file that `--config` names; `--set section.key=value`
overrides a key, and `config` lists all. An unknown key is an error that names the nearest known one. With `--json`, a
command prints one JSON document on stdout and everything else on stderr. Exit codes: 0 done, 1 the check found faults,
2 could not do it, 130 interrupted. `--install-completion` teaches the shell commands and options.

### Progress in a script

```sh
QWEN_CACHE_PROGRESS=progress.json qwen-cache build data/
```

While a command shows a progress line, it replaces the file with one JSON document, at most four times a second, even if
stderr is no terminal. A file that cannot be written gives one warning. Of the processes of a run, the main one writes.

| key | value |
| --- | --- |
| `what` | What it does, such as `encoding`; a command may have several lines, one after the other. |
| `done`, `total` | How much is done, in samples, steps or bytes; `total` is null if it is not known. |
| `text` | The text beside the bar; a run of `qwen-train` has three lines. |
| `elapsed`, `left` | Seconds; `left` is null if it is not known. |
| `lanes` | Of `build`: `name`, `device`, `done` (images or prompts) and `busy` (a share of the time) of each copy of \
an encoder, or with Ray `name` and `samples_per_second` of each worker. |"""
"""On both pages, above the commands."""


def commands_page(program: str) -> str:
    parts = [f"# {program}", APPS[program].help, BOTH]
    for name, command in commands(program).items():
        shown = command.described()
        parts += [f"## {name}", shown.help, f"```text\n{usage(program, name, shown)}\n```"]
        rows = ((code(_name(p)), _value(p), code(_default(p)), p.help or "") for p in shown.params)
        parts.append(table(("name", "value", "default", "description"), rows))
        parts.append("```sh\n" + "\n".join(inspect.cleandoc(each) for each in shown.examples) + "\n```")
    return "\n\n".join(parts)


def usage(program: str, name: str, command: Any) -> str:
    """The usage line: arguments, then required options."""
    words = [_name(p) if p.required else f"[{_name(p)}]" for p in command.params if p.param_type_name == "argument"]
    words += [f"{p.opts[0]} …" for p in command.params if p.param_type_name == "option" and p.required]
    return " ".join([program, name, *words, "[OPTIONS]"])


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return ", ".join([*parameter.opts, *parameter.secondary_opts])
    return f"{parameter.metavar} …" if parameter.nargs != 1 else str(parameter.metavar)


def _value(parameter: Any) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    choices = "|".join(map(str, parameter.type_descriptor.choices or ()))
    value = choices or ("" if parameter.param_type_name == "argument" else parameter.metavar)
    return code(value) + (" (may be repeated)" if parameter.multiple else "")


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    return "" if parameter.default in (None, False) else str(parameter.default)


# ---- qwen.yaml -------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    schema = Config.model_json_schema()
    parts = ["# qwen.yaml", "Both programs read it. `--set section.key=value` overrides a key."]
    for section, reference in schema["properties"].items():
        parts += _section(section, reference, schema["$defs"])
    return "\n\n".join(parts)


def _section(name: str, reference: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """A table of the keys of a section, then the sections within it."""
    keys, inner, rows = sections[reference["$ref"].rpartition("/")[2]]["properties"], [], []
    for key, value in keys.items():
        within = value if "$ref" in value else value.get("items", {})
        if "$ref" in within:
            inner += _section(f"{name}.{key}" if within is value else f"{name}.{key}[]", within, sections)
        if "$ref" not in value:
            default = json.dumps(value["default"], ensure_ascii=False) if "default" in value else "required"
            title = TITLES.get(f"{name}.{key}", "")
            text = value.get("description", "").replace("][", "]\\[")  # no link
            rows.append((code(key), title, kind(value), code(default), text))
    return [f"## {name}", table(("key", "title", "value", "default", "description"), iter(rows)), *inner]


def kind(schema: dict[str, Any]) -> str:
    """The type and bounds of a value, as text."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(kind(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(code(str(value)) for value in schema["enum"])
    if "prefixItems" in schema:
        return f"[{', '.join(kind(each) for each in schema['prefixItems'])}]"
    if "$ref" in schema:
        return "section"
    words = {"array": "list", "object": "mapping", "string": "text", "boolean": "true or false"}
    word = words.get(schema["type"], schema["type"])
    if "items" in schema:
        return f"{word} of {kind(schema['items'])}"
    bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUNDS.items() if bound in schema]
    return " ".join([word, ", ".join(bounds)]).strip()


# ---- errors, the format, the API, the tree --------------------------------------------------------------------------


def errors_page() -> str:
    intro = (
        "Every error that a user can cause is a `QwenCacheError`. Its message says what is wrong, where, what was "
        "expected, what was found, and after `→` what to do. The programs print it without a traceback and exit with "
        "2; `qwen-cache verify` lists all faults of a cache and exits with 1."
    )
    classes = (*QwenCacheError.__subclasses__(), NoCacheError)
    public = (error for error in classes if not error.__name__.startswith("_"))
    kinds = ((code(error.__name__), inspect.getdoc(error) or "") for error in public)
    rules = ((rule, code(error.__name__), inspect.getdoc(error) or "", error.fix) for rule, error in _by_rule())
    broken = "The rules are those of [the format](format.md); `verify` names the rule with each fault."
    parts = ["# Errors", intro, table(("class", "when"), kinds), "## Rules of the format", broken]
    return "\n\n".join([*parts, table(("rule", "class", "when", "what to do, if the message does not say"), rules)])


def _by_rule() -> list[tuple[str, Any]]:
    return sorted(RULES.items(), key=lambda item: int(item[0].removeprefix("F")))


def format_page() -> str:
    return (ROOT / "schemas" / "FORMAT.md").read_text(encoding="utf-8")


def api_page() -> str:
    intro = (
        "These names are the public API. Everything else is internal and may change without notice: "
        "[what may change](../explanation/status.md#what-may-change)."
    )
    parts = ["# Python", intro]
    for heading, names in API.items():
        parts += [f"## {heading}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts)


def tree_page() -> str:
    intro = "By the first sentences of their docstrings. [Find your way in the code](../explanation/architecture.md)."
    return f"# Every module\n\n{intro}\n\n```text\n{tree()}```"


PAGES: dict[str, Callable[[], str]] = {
    "qwen-cache.md": lambda: commands_page("qwen-cache"),
    "qwen-train.md": lambda: commands_page("qwen-train"),
    "qwen-yaml.md": settings_page,
    "format.md": format_page,
    "python.md": api_page,
    "errors.md": errors_page,
    "tree.md": tree_page,
}


def write_reference(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page().rstrip() + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the reference pages of the documentation.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "reference")
    write_reference(parser.parse_args().folder)


if __name__ == "__main__":
    main()
