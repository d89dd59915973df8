"""The tree of both packages: every module with the first sentence of its docstring.

    python tools/make_tree.py

tools/make_reference.py puts it on a page of the reference.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMN = 28
"""The column in which the sentences begin."""


def tree() -> str:
    """The lines of the tree: both packages, their folders and modules; empty modules have none."""
    return "".join(f"{line}\n" for package in ("qwen_cache", "qwen_train") for line in _lines(ROOT / package, 0))


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
    print(tree(), end="")
