"""The architecture holds: who imports whom, what is public, and the tree that the README draws."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qwen_cache
import qwen_cache.format

from .support.commands import HEAVY, command
from .support.paths import ROOT
from .support.project import project_files

LIGHT = ("qwen_cache", "qwen_cache.cli", "qwen_train.cli", "qwen_cache.importers")
"""Without these and what a command line is made of, `--help` does not answer at once."""
TORCHLESS = (
    *(f"qwen_cache.format.{module.name}" for module in pkgutil.iter_modules(qwen_cache.format.__path__)),
    "qwen_cache.inspect",
    "qwen_cache.settings.load",
    "qwen_cache.models.folder",
    "qwen_cache.encode.builder",
    "qwen_cache.encode.plan",
    "qwen_cache.inspect.compare",
    "qwen_cache.batching.budgets",
    "qwen_cache.inspect.page",
)
"""What reads, checks and plans."""
FOUNDATIONS = (
    ("html", {"qwen_cache.html"}),
    ("storage", set()),
    ("format", {"qwen_cache.format", "qwen_cache.storage"}),
)
"""Packages of the cache, with all that they import of the project."""


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
    """schemas, qwen_cache.storage <- qwen_cache.format <- {qwen_cache.encode, qwen_cache.importers, qwen_train}; only
    what draws knows the encoders and the VAE; the cache knows no trainer, and what is sampled when, no picture; the
    pages' markup, in qwen_cache.html, knows nothing else."""
    for folder, known in FOUNDATIONS:
        for path in (ROOT / "qwen_cache" / folder).glob("*.py"):
            others = set(re.findall(r"(?:from|import) (qwen_\w+(?:\.\w+)?)", path.read_text(encoding="utf-8")))
            assert others <= known, path
    for path in (ROOT / "qwen_train").rglob("*.py"):
        if path.stem not in ("predict", "predict_command", "decode", "cli") and path.parent.name != "drawing":
            assert "qwen_cache.encode" not in path.read_text(encoding="utf-8"), path
        assert "qwen_cache.importers" not in path.read_text(encoding="utf-8"), path
    for path in (ROOT / "qwen_cache").rglob("*.py"):
        assert not re.search(r"(?:from|import) qwen_train", path.read_text(encoding="utf-8")), path
    for path in (ROOT / "qwen_cache" / "sampling").glob("*.py"):
        assert "qwen_cache.encode" not in path.read_text(encoding="utf-8"), path
    for path in (ROOT / "qwen_cache" / "importers").glob("*.py"):
        assert "qwen_cache.encode" not in path.read_text(encoding="utf-8"), path


def test_what_systems_do_differently_about_files_is_in_one_module() -> None:
    """Modules that one system lacks, and the calls whose order decides what a crash leaves."""
    lacking = re.compile(r"^\s*(?:import|from) (?:fcntl|msvcrt|filelock|platformdirs|resource|pwd)\b", re.MULTILINE)
    for path in [*(ROOT / "qwen_cache").rglob("*.py"), *(ROOT / "qwen_train").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if path != ROOT / "qwen_cache" / "storage" / "durable.py":
            assert not lacking.search(text), path
            assert 'XDG_CACHE_HOME"' not in text, path
            assert not re.search(r"os\.(?:fsync|link|rename)\(", text), path


def test_public_names() -> None:
    assert qwen_cache.__all__ == ["Cache", "FormatError", "QwenCacheError", "Sample", "open_cache"]
    for name in qwen_cache.__all__:
        assert getattr(qwen_cache, name)
    with pytest.raises(AttributeError, match="has no attribute 'open_shards'"):
        _ = qwen_cache.open_shards


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
