"""Each system call on files fails once: the command says so or does without, and the same command completes the work.

`python -m tests.faults calls` fails every call; here is a share of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .faults.shim import obstacle, preloaded
from .support.paths import ROOT
from .support.waiting import HANG

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
EVERY = 41  # cases of each command: each with another call and error
SEEN = """
import errno, sys
from pathlib import Path
import numpy, pyarrow.parquet, safetensors.numpy
from tests.faults.shim import Shim
folder, shim = Path(sys.argv[1]), Shim()
calls = open(folder.with_name("calls"), "wb", buffering=0)
shim.watch([folder])
shim.list_calls(calls.fileno())
(folder / "python").write_bytes(b"1")
safetensors.numpy.save_file({"a": numpy.zeros(9)}, folder / "rust")
pyarrow.parquet.write_table(pyarrow.table({"a": [1]}), folder / "c++")
for error in (errno.EIO, errno.ENOSPC):
    for write in (
        lambda: (folder / "python").write_bytes(b"2"),
        lambda: safetensors.numpy.save_file({"a": numpy.ones(9)}, folder / "rust"),
        lambda: pyarrow.parquet.write_table(pyarrow.table({"a": [2]}), folder / "c++"),
    ):
        shim.fail(1, error)
        try:
            write()
        except Exception as raised:
            print(shim.failed().replace(str(folder), ""), "->", raised)
"""


def test_the_shim_sees_python_rust_and_cpp_and_fails_them(tmp_path: Path) -> None:
    folder = tmp_path / "watched"
    folder.mkdir()
    done = preloaded("-c", SEEN, str(folder))
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    written = {Path(call.split()[-1]).name[:4] for call in calls if call.startswith("write ")}
    assert {"pyth", ".tmp", "c++"} <= written  # Rust's file is `.tmp…` until it is complete
    failed = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in failed] == ["create"] * 6, failed
    assert all("Input/output error" in line for line in failed[:3]), failed
    assert all("No space left on device" in line for line in failed[3:]), failed


@pytest.mark.slow
def test_a_command_whose_call_fails_says_so_or_does_without_and_can_be_repeated() -> None:
    command = [sys.executable, "-m", "tests.faults", "calls", "--every", str(EVERY), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * HANG)
    reports: list[dict[str, Any]] = json.loads(done.stdout or "[]")
    assert len(reports) > 12, done.stderr
    for report in reports:
        print(report["name"], report["calls"], report["counts"])
    assert {report["name"]: report["bad"] for report in reports if report["bad"]} == {}
