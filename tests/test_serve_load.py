"""Many clients, a server that is killed, and strangers: `tools/bench_serve.py` and `tools/fuzz_serve.py`, small.

Both check every answer themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support.paths import load_tool

pytestmark = pytest.mark.slow


def test_nothing_is_lost_or_wrong(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool: Any = load_tool("bench_serve")
    counts = ("--samples", "20", "--requests", "200", "--kills", "2", "--repeats", "0", "--json")
    monkeypatch.setattr(sys, "argv", ["bench_serve", str(tiny_model("edit-plus")), *counts])
    tool.main()
    report = json.loads(capsys.readouterr().out)
    assert report["load"]["distinct"] == report["kills"]["distinct"] == 20


def test_random_requests_disturb_nobody(
    tiny_model: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """No answer is an error of the server, and the rows of four clients are stored with the bytes of a build."""
    tool: Any = load_tool("fuzz_serve")
    counts = ("--requests", "150", "--seed", "4", "--samples", "12", "--save", str(tmp_path), "--json")
    monkeypatch.setattr(sys, "argv", ["fuzz_serve", str(tiny_model("edit-plus")), *counts])
    code = tool.main()
    report = json.loads(capsys.readouterr().out)
    assert report["violations"] == []
    assert (code, report["rows"]) == (0, 12)
    assert report["answers"]["2xx"] > 10
    assert report["answers"]["4xx"] > 50
