"""Many clients and a server that is killed: `tools/bench_serve.py`, small; it checks every answer itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .support.paths import load_tool


@pytest.mark.slow
def test_nothing_is_lost_or_wrong(
    tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool: Any = load_tool("bench_serve")
    counts = ("--samples", "20", "--requests", "200", "--kills", "2", "--repeats", "0", "--json")
    monkeypatch.setattr(sys, "argv", ["bench_serve", str(tiny_model("edit-plus")), *counts])
    tool.main()
    report = json.loads(capsys.readouterr().out)
    assert report["load"]["distinct"] == report["kills"]["distinct"] == 20
