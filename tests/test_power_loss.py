"""A power loss leaves the old or the new state, and the tests would notice a missing sync.

The model of a disk, with its source, is in `tests/faults/record.py`. `python -m tests.faults power` prints the numbers.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .faults.power_loss import states
from .faults.record import Disk
from .faults.shim import obstacle, preloaded
from .support.paths import ROOT
from .support.waiting import HANG

pytestmark = pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))
OLD, NEW = b"old " * 2000, b"new, " * 2500
REPLACE = """
import sys
from pathlib import Path
from qwen_cache.storage.files import make_folder, write_durably
from tests.faults.shim import Shim
work, shim = Path(sys.argv[1]), Shim()
record = open(work.with_name("record"), "wb", buffering=0)
shim.watch([work])
shim.record(record.fileno())
write_durably(work / "file", b"new, " * 2500)
make_folder(work / "a" / "b")
write_durably(work / "a" / "b" / "file", b"new, " * 2500)
"""


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The record of two files that are written, one of them in place of another, and the folder before."""
    folder = tmp_path_factory.mktemp("power")
    for name in ("work", "before"):
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(OLD)
    done = preloaded("-c", REPLACE, str(folder / "work"))
    assert done.returncode == 0, done.stderr
    return folder / "work", folder / "before", folder / "record"


@pytest.mark.parametrize(
    ("without", "partial", "lost"), [("", False, False), ("file", True, False), ("folder", False, True)]
)
def test_a_file_is_old_or_new_and_each_sync_is_needed_for_it(
    without: str, partial: bool, lost: bool, replaced: tuple[Path, Path, Path]
) -> None:
    disk = Disk(*replaced, without)
    found = list(states(disk, random.Random(0)))
    contents = {data for _, _, tree in found for path, data in tree.items() if Path(path).name == "file"}
    assert {OLD, NEW} <= contents
    assert bool(contents - {OLD, NEW}) is partial
    after = [tree for at, _, tree in found if at == disk.events]
    assert any(tree.get("file") != NEW or "a/b/file" not in tree for tree in after) is (lost or partial)
    assert any("a/b/file" not in tree for tree in after) is lost


def power(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults", "power", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * HANG)
    assert done.stdout, done.stderr
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_after_a_power_loss_old_or_new_data_are_whole_and_the_same_command_completes_them() -> None:
    reports = power("--complete-every", "60")
    assert len(reports) > 10
    for report in reports:
        print(report["name"], report["events"], report["states"], report["completed"])
    assert {report["name"]: report["bad"] for report in reports if report["bad"]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("without", ["file", "folder"])
def test_without_a_sync_a_dataset_or_a_checkpoint_is_damaged_or_lost(without: str) -> None:
    reports = power("--complete-every", "0", "--without", without, "--only", "build changed,migrate,train")
    assert {report["name"]: bool(report["bad"]) for report in reports} == {
        "build changed": True,
        "migrate in place": True,
        "train": True,
    }
