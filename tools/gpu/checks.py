"""The tests that need a GPU: those that are skipped without CUDA, and tests/models on the device.

Which tests are skipped without CUDA is read from their decorators, so a new one is found. Failures are counted and the
first is quoted; they do not end the report.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from .measure import ROOT, SIMULATED, Card, Cases, Row, UnavailableError

SKIPPED_WITHOUT = "skipif(not torch.cuda.is_available()"
QUOTED = 300  # characters of a failure's message


def cases(part: str, card: Card) -> Cases:
    yield "tests that are skipped without CUDA", lambda: run_gpu_tests(card)
    for dtype in ("float32", "bfloat16"):
        yield f"tests/models, {dtype}", lambda d=dtype: run_model_tests(card, d)


def run_gpu_tests(card: Card) -> Row:
    check(card)
    if card.device.type != "cuda":
        raise UnavailableError(f"these tests are for CUDA, not for {card.device.type}")
    return run_pytest(gpu_tests())


def run_model_tests(card: Card, dtype: str) -> Row:
    check(card)
    return run_pytest(["tests/models", "--device", str(card.device), "--dtype", dtype])


def check(card: Card) -> None:
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError("pytest is not installed: make setup")
    if card.device.type == SIMULATED:
        raise UnavailableError("a process of pytest has no simulated device")


def gpu_tests() -> list[str]:
    """The tests with the decorator, as arguments of pytest."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    return [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path, text in texts.items()
        if "torch.cuda" in text
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        and any(SKIPPED_WITHOUT in ast.unparse(decorator) for decorator in node.decorator_list)
    ]


def run_pytest(arguments: Sequence[str]) -> Row:
    """Numbers of tests by outcome, and the message of the first failure."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={results}", *arguments]
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if not results.exists():
            raise UnavailableError(f"pytest ended with code {process.returncode}: {process.stderr.strip()[-QUOTED:]}")
        return count(results)


def count(results: Path) -> Row:
    outcomes, first = Counter({"passed": 0, "failed": 0, "skipped": 0}), ""
    for test in ElementTree.parse(results).iter("testcase"):
        found = {child.tag: child for child in test}
        failed = found.get("failure", found.get("error"))
        outcomes["failed" if failed is not None else "skipped" if "skipped" in found else "passed"] += 1
        if failed is not None and not first:
            first = f"{test.get('name')}: {failed.get('message', '')}"[:QUOTED]
    return {**outcomes, "first_failure": first}
