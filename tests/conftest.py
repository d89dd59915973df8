"""What many tests need: a tiny model of each variant, real photographs as an edit dataset, and a cache of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet
from hypothesis import settings
from PIL import Image, ImageOps

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the last bit of a sum depends on it; tiny products gain nothing
ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft")
"""What neither a command line nor a reader imports."""
HANG = 1800.0
"""Seconds after which a test that waits for something has hung, however busy the machine is."""
settings.register_profile("project", deadline=None, derandomize=True, database=None)  # the same examples every time
settings.load_profile("project")
SMALL = ["--set", "data.vae_image_size=16384", "--set", "data.condition_image_size=12544", "--dtype", "float32"]
"""Settings under which a build takes seconds: pictures of about 128² pixels for the VAE, 112² for the text encoder."""


# ---- the CPU time of the tests --------------------------------------------------------------------------------------

CPU_SECONDS = pytest.StashKey[float]()


def cpu_seconds() -> float:
    """User and system time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[CPU_SECONDS] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Each phase of a test reports its own CPU time; xdist carries `user_properties` to the main process."""
    report = yield
    before, item.stash[CPU_SECONDS] = item.stash[CPU_SECONDS], cpu_seconds()
    report.user_properties = [("cpu_seconds", item.stash[CPU_SECONDS] - before)]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The ten tests with the most CPU time, fixtures included: a session fixture counts for its first user."""
    total = Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in filter(lambda report: isinstance(report, pytest.TestReport), reports):
            total[report.nodeid] += sum(seconds for _, seconds in report.user_properties)
    terminalreporter.section("ten slowest tests, in seconds of CPU time")
    for nodeid, seconds in total.most_common(10):
        terminalreporter.line(f"{seconds:8.1f}  {nodeid}")


# ---- what is fast ----------------------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.fast_cases(2)`: of a parametrised test, all cases but the first two are slow."""
    fast = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("fast_cases")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            fast[test] += 1
            if fast[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


# ---- what tests share ------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """What tests/models runs on; the defaults need nothing but a CPU."""
    group = parser.getgroup("models")
    group.addoption("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the transformer")
    group.addoption("--device", default="cpu", help="of the transformer, such as cuda:0")
    group.addoption("--model", metavar="PATH", type=Path, help="a transformer's folder, or its pipeline's; else random")


def slow(*values: object, id: str | None = None) -> ParameterSet:
    """A case of a parametrised test that `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait, however busy the machine is, but not for ever."""
    last = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < last, "this never comes"
        time.sleep(0.02)


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    stdout: str
    stderr: str


def load_tool(name: str) -> object:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def photograph(name: str) -> Image.Image:
    """A real photograph that ships with scikit-learn or scikit-image, in RGB."""
    folder = files("sklearn.datasets") / "images" if name in ("china.jpg", "flower.jpg") else files("skimage") / "data"
    with (folder / name).open("rb") as file:
        return Image.open(file).convert("RGB")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model: `tiny_model("edit-plus")`."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            tool = load_tool("make_tiny_model")
            made[variant] = tool.make_tiny_model(tmp_path_factory.mktemp("models") / variant, variant)  # type: ignore[attr-defined]
        return made[variant]

    return make


def write_pairs(folder: Path) -> Path:
    """Four edit pairs of mixed sizes: two share a prompt, one has two controls, one a mask."""
    controls, targets = folder / "control_images", folder / "target_images"
    controls.mkdir(parents=True)
    targets.mkdir()
    china = photograph("china.jpg").resize((160, 107))
    flower = photograph("flower.jpg").resize((107, 160))
    cat = photograph("chelsea.png").resize((120, 120))
    cup = photograph("coffee.png").resize((150, 100))
    for name, control, target, prompt in (
        ("china", china, ImageOps.grayscale(china), "make it black and white"),
        ("flower", flower, ImageOps.grayscale(flower), "make it black and white"),
        ("cat", cat, ImageOps.mirror(cat), "mirror the cat, 然后 keep the second picture's light"),
        ("cup", cup, ImageOps.invert(cup), "invert the colours"),
    ):
        control.save(controls / f"{name}.png")
        target.save(targets / f"{name}.png")
        (targets / f"{name}.txt").write_text(prompt, encoding="utf-8")
    china.save(controls / "cat_control_1.png")
    mask = Image.new("L", cup.size)
    mask.paste(255, (0, 0, cup.width // 2, cup.height))
    mask.save(controls / "cup_mask.png")
    return folder


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A fresh copy of the edit pairs, to be changed by the test."""
    return write_pairs(tmp_path / "data")


@pytest.fixture
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pipelines and `predict` work at the sizes of SMALL, by their own formula."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    from qwen_train.drawing import prompts

    from .equivalence.judge import SMALL_AREA

    ours = prompts.calculate_dimensions
    monkeypatch.setattr(prompts, "calculate_dimensions", lambda area, size: ours(SMALL_AREA[area], size))
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        stock = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, f=stock: f(SMALL_AREA[area], ratio))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset by name, but for the lock and the folders of ours that are not part of it."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "qwen.yaml"}


class Crash(BaseException):
    """Raised where a process might die; nothing in the program may catch it."""


def crash_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die at the `count`-th of the operations that change what is on disk."""
    from qwen_cache.format.shard import ShardWriter

    left = count

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return function(*arguments)

        return call

    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(Path, "replace", dying(Path.replace))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))
    monkeypatch.setattr(ShardWriter, "_write", dying(ShardWriter._write))


def command(program: str, *arguments: str | Path, cwd: Path | None = None, timeout: float = HANG) -> Result:
    """Run `qwen-cache` or `qwen-train` as a user does, in a process of its own."""
    done = subprocess.run(
        [Path(sys.executable).parent / program, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200"},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def imported_by(statement: str) -> set[str]:
    """Every word that `statement` prints in a fresh process, and every module that is loaded then."""
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def build(source: Path, out: Path, model: Path, *options: str) -> Result:
    """`qwen-cache build` with the small settings."""
    return run("qwen-cache", "build", source, "--out", out, "--model", model, *SMALL, *options)


def run(program: str, *arguments: str | Path) -> Result:
    """The same as `command`, in this process: the heavy imports are paid once for the whole suite."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from qwen_cache import cli as cache_cli
    from qwen_train import cli as train_cli

    main = {"qwen-cache": cache_cli.main, "qwen-train": train_cli.main}[program]
    out, err, argv = StringIO(), StringIO(), sys.argv
    sys.argv = [program, *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_:
            main()
    finally:
        sys.argv = argv
    code = exit_.value.code
    return Result(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def built(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]
) -> Callable[[str, Sequence[str]], Path]:
    """A cache of the edit pairs, never to be changed: `built("edit-plus")`, built once per session."""
    made: dict[tuple[str, ...], Path] = {}
    source = write_pairs(tmp_path_factory.mktemp("source") / "data")

    def make(variant: str, options: Sequence[str] = ()) -> Path:
        key = (variant, *options)
        if key not in made:
            out = tmp_path_factory.mktemp("caches") / "shards"
            result = build(source, out, tiny_model(variant), *options)
            assert result.code == 0, result.stderr
            made[key] = out
        return made[key]

    return make
