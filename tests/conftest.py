"""Shared fixtures, hooks and options: a tiny model of each variant, edit pairs of real photographs, a cache of them.

Functions and classes are in tests/support/. Fixtures import our packages inside, because pytest reads this file before
jaxtyping's import hook (pyproject.toml) is installed.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import settings

from .support.caches import build
from .support.paths import load_tool
from .support.processes import cpu_seconds, forking, popen
from .support.sources import write_mixed, write_pairs

if TYPE_CHECKING:
    from .support.fake_lanes import FakeLanes
    from .support.processes import ForkServer
    from .support.runs import Trainer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # the last bit of a sum depends on it; small matrix products gain nothing
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started this with `&`
settings.register_profile("project", deadline=None, derandomize=True, database=None)  # the same examples every time
settings.load_profile("project")


# ---- the CPU time of the tests --------------------------------------------------------------------------------------

CPU_SECONDS = pytest.StashKey[float]()
SHARED = pytest.StashKey[list[tuple[str, float]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[CPU_SECONDS] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, object, object]:
    """The CPU time of fixtures that several tests share, with those that they ask for."""
    before = cpu_seconds()
    try:
        return (yield)
    finally:
        if fixturedef.scope != "function":
            shared = request.session.stash.setdefault(SHARED, [])
            shared.append((f"{fixturedef.argname} of {fixturedef.baseid or 'conftest.py'}", cpu_seconds() - before))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Each phase of a test reports its own CPU time; xdist carries `user_properties` to the main process."""
    report = yield
    before, item.stash[CPU_SECONDS] = item.stash[CPU_SECONDS], cpu_seconds()
    report.user_properties = [("", item.stash[CPU_SECONDS] - before), *item.session.stash.get(SHARED, [])]
    item.session.stash[SHARED] = []
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The files, shared fixtures and tests with the most CPU time; a shared fixture counts for its first user too."""
    files, fixtures, tests = Counter[str](), Counter[str](), Counter[str]()
    for reports in terminalreporter.stats.values():
        for report in filter(lambda report: isinstance(report, pytest.TestReport), reports):
            for fixture, seconds in report.user_properties:
                if fixture:
                    fixtures[fixture] += seconds
                else:
                    files[report.nodeid.partition("::")[0]] += seconds
                    tests[report.nodeid] += seconds
    for what, total, shown in (("files", files, 40), ("shared fixtures", fixtures, 10), ("tests", tests, 20)):
        terminalreporter.section(f"{what} with the most CPU time, in seconds (all: {total.total():.0f})")
        for name, seconds in total.most_common(shown):
            terminalreporter.line(f"{seconds:8.1f}  {name}")


MANY = 500
"""Tests for which it pays to import everything at once."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collection skips objects that stay until the end: they took a quarter of the fast tests' time."""
    if len(session.items) > MANY:
        from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
        from transformers import Qwen2_5_VLForConditionalGeneration

        del AutoencoderKLQwenImage, QwenImageTransformer2DModel, Qwen2_5_VLForConditionalGeneration
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # in place of 700: most of what it would look through is freed by its reference counts


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor is what a file leaves: our programs look through all there is whenever they free a model."""
    if nextitem and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


# ---- slow tests, and those for other libraries and systems -----------------------------------------------------------

MARKED = {
    "libraries": "adapters build caption_command decode doctor ema encode encode_21 encode_text encode_vae export help "
    "images index latents lora_file optimizers package page predict predict_steps read remote serve settings "
    "source_kinds sources terminal text_encoder_file torch train train_21 transformer ui validation weights",
    "core": "batch_plan html identity index left_out mapped_index one_sample remembered settings source_editing "
    "source_kinds source_listing sources system_errors thumbnails verify",
}
"""By mark, the files with the tests that concern other versions of libraries, or other operating systems."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.fast_cases(2)`: all cases of a parametrised test except the first two are slow."""
    fast = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("fast_cases")
        if mark and not item.get_closest_marker("slow"):
            test = item.nodeid.partition("[")[0]
            fast[test] += 1
            if fast[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)
    share, shares = map(int, config.getoption("--slow-share").split("/"))
    files = sorted({item.path for item in items if is_slow(item)})[share - 1 :: shares]
    config.hook.pytest_deselected(items=[item for item in items if is_slow(item) and item.path not in files])
    items[:] = [item for item in items if not is_slow(item) or item.path in files]
    for item in items:
        for mark, names in MARKED.items():
            if item.path.stem.removeprefix("test_") in names.split():
                item.add_marker(mark)


def is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


# ---- options and fixtures --------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests/models; the defaults need only a CPU."""
    group = parser.getgroup("models")
    group.addoption("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the transformer")
    group.addoption("--device", default="cpu", help="of the transformer, such as cuda:0")
    group.addoption("--slow-share", metavar="K/N", default="1/1", help="of the files with slow tests, every Nth from K")
    group.addoption("--model", metavar="PATH", type=Path, help="a transformer's folder, or its pipeline's; else random")


@pytest.fixture(scope="session", autouse=True)
def users_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of this run of pytest in place of the user's, where digests and memory are remembered."""
    folder = for_all_workers(tmp_path_factory) / "home"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def fork_server(users_cache_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """A starter of programs with this environment, without their imports."""
    with forking(for_all_workers(tmp_path_factory)) as server:
        yield server


@pytest.fixture(scope="session", autouse=True)
def done_once() -> Iterator[None]:
    """Indexes are read, and models loaded, once in this process."""
    from .support.once import once

    with once():
        yield


def for_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this run of pytest, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """The folder, written by the first worker that asks for it; the others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder.with_name(f"{folder.name}.done")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not done.exists():
            write(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model, made once for all workers: `tiny_model("edit-plus")`."""
    root = for_all_workers(tmp_path_factory) / "models"

    def write(folder: Path, variant: str) -> None:
        load_tool("make_tiny_model").make_tiny_model(folder, variant)  # type: ignore[attr-defined]

    return cache(lambda variant: made_once(root / variant, partial(write, variant=variant)))


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A fresh copy of the edit pairs, which the test may change."""
    return write_pairs(tmp_path / "data")


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[FakeLanes]:
    """Builds without encoders; every set of lanes that was loaded."""
    from .support.fake_lanes import fake_lanes

    return fake_lanes(monkeypatch)


@pytest.fixture
def forked_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoding process of `--encode-on-the-fly` need not import what it computes with."""
    from qwen_train.data import served

    monkeypatch.setattr(served, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))


@pytest.fixture
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the pipelines and `predict` use the sizes of SMALL, by their own formula."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
    from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21

    from qwen_train.inference import pipeline

    from .support.judge import SMALL_AREA

    ours = pipeline.calculate_dimensions
    monkeypatch.setattr(pipeline, "calculate_dimensions", lambda area, size: ours(SMALL_AREA.get(area, area), size))
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage21):
        stock = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, f=stock: f(SMALL_AREA.get(area, area), ratio)
        )


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Callable[..., Path]:
    """A read-only cache of the edit pairs, built once for all workers: `built("edit-plus")`.

    With `mixed`, as for "qwen-image-21", there are samples of text to image among them.
    """
    root = for_all_workers(tmp_path_factory)
    pairs = made_once(root / "source" / "data", write_pairs)
    table = made_once(root / "source" / "mixed", write_mixed) / "metadata.jsonl"

    def make(variant: str, options: Sequence[str] = (), *, mixed: bool = False) -> Path:
        source = table if mixed or variant == "qwen-image-21" else pairs

        def write(folder: Path) -> None:
            result = build(source, folder, tiny_model(variant), *options)
            assert result.code == 0, result.stderr

        name = sha256(repr((variant, mixed, *options)).encode()).hexdigest()[:8]
        return made_once(root / "caches" / name / "shards", write)

    return make


@pytest.fixture
def train(built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path) -> Trainer:
    """`qwen-train run` on the small cache."""
    from .support.runs import Trainer

    return Trainer(built("edit-plus"), tiny_model("edit-plus"), tmp_path)


@pytest.fixture
def train_21(built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path) -> Trainer:
    """`qwen-train run` on the small cache of Qwen-Image-2.1."""
    from .support.runs import Trainer

    return Trainer(built("qwen-image-21"), tiny_model("qwen-image-21"), tmp_path)


@pytest.fixture
def train_mixed(built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path: Path) -> Trainer:
    """`qwen-train run` on the small cache, and on smaller images with the base as teacher."""
    from .support.runs import MixedTrainer

    smaller = built("edit-plus", ("--set", "data.vae_image_size=9216"))
    return MixedTrainer(built("edit-plus"), smaller, tiny_model("edit-plus"), tmp_path)


@pytest.fixture(scope="module")
def s3() -> Iterator[tuple[str, int]]:
    """moto's server, which every S3 client of this process and its children uses."""
    import fsspec
    from moto import backends
    from moto.server import ThreadedMotoServer

    from .support.server import BUCKET, fresh_clients

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    address = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        services = frozenset(backends.list_of_moto_modules())  # by itself it reads its folders twice for each request
        patch.setattr(backends, "list_of_moto_modules", lambda: services)
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{address[0]}:{address[1]}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            patch.setenv(name, value)
        fresh_clients()
        fsspec.filesystem("s3").call_s3("create_bucket", Bucket=BUCKET)
        yield address
    fresh_clients()
    server.stop()
