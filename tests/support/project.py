"""The files of this project."""

from __future__ import annotations

import subprocess

import pytest

from .paths import ROOT


def tracked() -> set[str]:
    """What git knows of; a test that compares with it is skipped where the sources are no repository."""
    asked = ["git", "-C", str(ROOT), "ls-files", "-z"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git repository: unpacked from an sdist")
    return {name for name in done.stdout.split("\0") if (ROOT / name).is_file()}


def project_files() -> list[str]:
    """The files that make this project: what git tracks, or, unpacked from an sdist, what was in it."""
    if (ROOT / ".git").exists():
        return sorted(tracked())
    (sources,) = ROOT.glob("*.egg-info/SOURCES.txt")
    return [name for name in sources.read_text(encoding="utf-8").splitlines() if ".egg-info/" not in name]
