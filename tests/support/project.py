"""The files of this project."""

from __future__ import annotations

import subprocess

import pytest

from .paths import ROOT


def tracked() -> set[str]:
    """The files that git tracks; skips the test outside of a repository."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git repository: unpacked from an sdist")
    return {name for name in process.stdout.split("\0") if (ROOT / name).is_file()}


def project_files() -> list[str]:
    """The files of this project: those that git tracks, or those of an unpacked sdist."""
    if (ROOT / ".git").exists():
        return sorted(tracked())
    (sources,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return [name for name in sources.read_text(encoding="utf-8").splitlines() if ".egg-info/" not in name]
