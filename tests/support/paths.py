"""The root of the project, and scripts of tools/ as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parents[2]


def load_tool(name: str) -> object:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):  # as when it runs: scripts import each other
        spec.loader.exec_module(module)
    return module
