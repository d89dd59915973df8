"""A plugin of pytest, which finds it by its entry point: the suite's options, and the table at its end."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

SUITE = "test_promises.py::test_the_"  # however the folder is called from where pytest runs


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "qwen_cache.conformance")
    group.addoption("--model-adapter", metavar="MODULE:FUNCTION", help="the forward of a trainer")
    group.addoption("--step-adapter", metavar="MODULE:FUNCTION", help="the training step of a trainer")
    group.addoption("--loader-adapter", metavar="MODULE:FUNCTION", help="the batches of a trainer")
    group.addoption("--cache-adapter", metavar="MODULE:FUNCTION", help="the embedding cache of a trainer")
    group.addoption("--encoders", metavar="FOLDER", help="the model, in diffusers' format, of the cache adapter")


def adapter(config: pytest.Config, option: str) -> Any:
    """The function that an option names; skips without the option."""
    value = config.getoption(option)
    if value is None:
        pytest.skip(f"no {option}")
    module, _, function = str(value).partition(":")
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"{option} {value}: {error}") from None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Which promises hold."""
    lines = []
    for outcome, word in (("passed", "holds"), ("failed", "BROKEN"), ("error", "error")):
        for report in terminalreporter.stats.get(outcome, ()):
            if SUITE in report.nodeid:
                crash = getattr(report.longrepr, "reprcrash", None)
                reason = crash.message.partition("\n")[0].removeprefix("AssertionError: ") if crash else ""
                lines.append(f"{report.nodeid.rpartition('[')[2].rstrip(']'):24}{word:8}{reason}".rstrip())
    if lines:
        terminalreporter.section("conformance")
        for line in lines:
            terminalreporter.line(line)
