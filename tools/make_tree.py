"""Write the tree of docs/explanation/architecture.md: every module with the first sentence of its docstring.

    python tools/make_tree.py

tests/test_architecture.py refuses a page with another tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BLOCK = re.compile(r"(?<=```text\n)qwen_cache/.*?(?=```)", flags=re.DOTALL)
COLUMN = 28
"""The column in which the sentences begin."""


def tree() -> str:
    """The lines of the tree: both packages, their folders and modules; empty modules have none."""
    return "".join(f"{line}\n" for package in ("qwen_cache", "qwen_train") for line in _lines(ROOT / package, 0))


def renewed(page: str) -> str:
    """The text of the page with the tree of the modules as they are."""
    return BLOCK.sub(lambda _: tree(), page)


def _lines(folder: Path, depth: int) -> Iterator[str]:
    yield _line(f"{folder.name}/", folder / "__init__.py", depth)
    modules = sorted(folder.glob("[!_]*.py"))
    folders = sorted(path.parent for path in folder.glob("*/__init__.py"))
    for module in modules:
        yield _line(module.name, module, depth + 1)
    for inner in folders:
        yield from _lines(inner, depth + 1)


def _line(name: str, module: Path, depth: int) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return f"{'  ' * depth + name:<{COLUMN}}{docstring.partition(chr(10))[0]}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
