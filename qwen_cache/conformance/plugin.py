"""A plugin of pytest, which finds it by its entry point: the suite's options, and the table at its end."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import pytest

SUITE = "test_promises.py::test_the_"  # however the folder is called from where pytest runs
ADAPTERS = {
    "--model-adapter": "the forward of a trainer",
    "--step-adapter": "the training step of a trainer",
    "--loader-adapter": "the batches of a trainer",
    "--cache-adapter": "the embedding cache of a trainer",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "qwen_cache.conformance")
    for option, what in ADAPTERS.items():
        group.addoption(option, metavar="MODULE:FUNCTION", help=what)
    group.addoption("--encoders", metavar="FOLDER", help="the model, in diffusers' format, of the cache adapter")


def pytest_configure(config: pytest.Config) -> None:
    """Load the adapters; UsageError for one that cannot be loaded."""
    for option in filter(config.getoption, ADAPTERS):
        _load(option, str(config.getoption(option)))
    if config.getoption("--encoders") and not config.getoption("--cache-adapter"):
        raise pytest.UsageError("--encoders: these are compared with what a --cache-adapter returns")


def adapter(config: pytest.Config, option: str) -> Any:
    """The function that an option names; skips without the option."""
    value = config.getoption(option)
    if value is None:
        pytest.skip(f"no {option}")
    return _load(option, str(value))


def _load(option: str, value: str) -> Any:
    module, _, function = value.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # the working directory, as for `python -m pytest`
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"{option} {value}: {error}") from None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which promises hold."""
    lines, is_here = list[str](), False
    outcomes = (("passed", "holds"), ("failed", "BROKEN"), ("error", "error"), ("skipped", "not checked"))
    for outcome, word in outcomes:
        for report in terminalreporter.stats.get(outcome, ()):
            if SUITE not in report.nodeid:
                continue
            is_here, reason = True, _reason(report)
            if not reason.startswith("no --"):
                lines.append(f"{report.nodeid.rpartition('[')[2].rstrip(']'):24}{word:12}{reason}".rstrip())
    if is_here:
        terminalreporter.section("conformance")
        for line in lines or [f"nothing was checked: give one of {', '.join(ADAPTERS)}"]:
            terminalreporter.line(line)


def _reason(report: Any) -> str:
    """In one line, why a test failed or was skipped."""
    if report.skipped:
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    kind, _, rest = (crash.message if crash else "").partition("\n")
    if kind.endswith((":", ": ")):  # the text of the error begins in the next line
        kind = f"{kind.strip()} {rest.strip().partition(chr(10))[0]}"
    return str(kind).removeprefix("AssertionError: ")
