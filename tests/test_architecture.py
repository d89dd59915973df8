"""The architecture holds: who imports whom, what is public, and the tree that the README draws."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

import qwen_cache
import qwen_cache.batching
import qwen_cache.format
import qwen_cache.settings
import qwen_cache.sources
import qwen_cache.storage
import qwen_train

from .support.commands import HEAVY, command
from .support.paths import ROOT
from .support.project import project_files

LIGHT = ("qwen_cache", "qwen_cache.cli", "qwen_train", "qwen_train.cli", "qwen_cache.importers", "qwen_cache.html.page")
"""`--help` answers in less than half a second because these load nothing large."""
TORCHLESS = (
    *(
        f"qwen_cache.{room.__name__.split('.')[-1]}.{module.name}"
        for room in (
            qwen_cache.batching,
            qwen_cache.format,
            qwen_cache.settings,
            qwen_cache.sources,
            qwen_cache.storage,
        )
        for module in pkgutil.iter_modules(room.__path__)
    ),
    "qwen_cache.inspect.summary",
    "qwen_cache.inspect.compare",
    "qwen_cache.inspect.page",
    "qwen_cache.models.folder",
    "qwen_cache.encode.builder",
    "qwen_cache.encode.plan",
)
"""What reads, checks and plans."""


def test_imports_stay_light() -> None:
    """`--help` and a build with nothing to do answer at once. What a module loads is there for all after it."""
    code = (
        "import importlib, json, sys\n"
        "stages = json.loads(sys.argv[1])\n"
        "for modules, forbidden in stages:\n"
        "    for module in modules:\n"
        "        importlib.import_module(module)\n"
        "        loaded = sorted(sys.modules.keys() & set(forbidden))\n"
        "        assert not loaded, f'{module} loads {loaded}'\n"
    )
    stages = [(LIGHT, (*HEAVY, "jinja2", "pyarrow", "numpy", "pydantic")), (TORCHLESS, HEAVY)]
    done = subprocess.run([sys.executable, "-c", code, json.dumps(stages)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_imports_go_one_way() -> None:
    """`make check` runs the contracts of pyproject.toml: layers that name every room, and no exemption from them.

    The trainer's contract with the cache has one rule with a condition: inference alone uses sources and encoders.
    """
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = [each for each in contracts if each["type"] == "layers" and "containers" in each]
    assert {name for each in layers for name in each["containers"]} == {"qwen_cache", "qwen_train"}
    assert all(each["exhaustive"] for each in layers)
    ignored = [edge for each in contracts for edge in each.get("ignore_imports", ())]
    assert all(edge.startswith("qwen_train.inference.** -> qwen_cache.") for edge in ignored)
    assert any(each["type"] == "acyclic_siblings" for each in contracts)
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ncheck:")[2].partition("\n\n")[0]
    assert "lint-imports" in recipe


def test_what_systems_do_differently_about_files_is_in_one_module() -> None:
    """Modules that one system lacks, and the calls whose order decides what a crash leaves."""
    lacking = re.compile(r"^\s*(?:import|from) (?:fcntl|msvcrt|filelock|platformdirs|resource|pwd)\b", re.MULTILINE)
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path != ROOT / "qwen_cache" / "storage" / "durable.py":
            assert not lacking.search(text), path
            assert 'XDG_CACHE_HOME"' not in text, path
            assert not re.search(r"os\.(?:fsync|link|rename)\(", text), path


@pytest.mark.parametrize("package", [qwen_cache, qwen_train])
def test_public_names(package: ModuleType) -> None:
    assert list(package.__all__) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name)
    with pytest.raises(AttributeError, match="has no attribute 'open_shards'"):
        _ = package.open_shards


def test_the_readme_draws_the_tree_that_is_there() -> None:
    """Every folder, and every module of the two packages, has a line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    drawn = re.search(r"```\n(schemas/.*?)```", text, flags=re.DOTALL)
    assert drawn, "the README has no tree"
    names = {re.split(r"\s+", line.strip())[0] for line in drawn[1].splitlines() if line.strip()}
    packages = [
        ROOT / "qwen_cache",
        ROOT / "qwen_cache" / "storage",
        ROOT / "qwen_cache" / "format",
        ROOT / "qwen_cache" / "encode",
        ROOT / "qwen_cache" / "encode" / "sources",
        ROOT / "qwen_cache" / "grounding",
        ROOT / "qwen_cache" / "html",
        ROOT / "qwen_cache" / "page",
        ROOT / "qwen_cache" / "sampling",
        ROOT / "qwen_cache" / "importers",
        ROOT / "qwen_train",
        ROOT / "qwen_train" / "data",
        ROOT / "qwen_train" / "drawing",
        ROOT / "qwen_train" / "model",
    ]
    modules = {path.name for package in packages for path in package.glob("*.py") if path.stat().st_size}
    assert modules - {"__init__.py"} <= names, f"not drawn: {modules - names}"
    listed = project_files()
    present = {Path(name).name for name in listed} | {f"{part}/" for name in listed for part in Path(name).parts[:-1]}
    present |= modules
    assert {name for name in names if re.fullmatch(r"[\w./]+", name)} <= present, f"drawn, but gone: {names - present}"


@pytest.mark.parametrize("program", ["qwen-cache", "qwen-train"])
def test_help_and_version(program: str) -> None:
    assert command(program, "--version").stdout.splitlines()[0] == f"{program} {qwen_cache.__version__}"
    result = command(program, "--help")
    assert result.code == 0
    assert "Usage" in result.stdout
    assert command(program, "no-such-command").code == 2


def test_a_silent_broadcast_is_an_error_in_the_tests() -> None:
    """jaxtyping's hook is on (pyproject.toml): three noise levels against a batch of one would broadcast to three."""
    from qwen_train.flow import interpolate

    with pytest.raises(Exception, match=r"(?i)type-check error"):
        interpolate(torch.zeros(1, 3, 4), torch.zeros(1, 3, 4), torch.zeros(3), torch.ones(1, 3, dtype=torch.bool))
