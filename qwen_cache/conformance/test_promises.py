"""One test for each promise of a model, of a training step, of a loader, of a cache and of its values."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_cache.conformance import cache, loader, model, step, values
from qwen_cache.conformance.plugin import adapter


@pytest.mark.parametrize("promise", model.PROMISES)
def test_the_model(promise: str, pytestconfig: pytest.Config) -> None:
    model.PROMISES[promise](adapter(pytestconfig, "--model-adapter"))


@pytest.mark.parametrize("promise", step.PROMISES)
def test_the_step(promise: str, pytestconfig: pytest.Config) -> None:
    step.PROMISES[promise](adapter(pytestconfig, "--step-adapter"))


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader.write_cache(tmp_path_factory.mktemp("conformance") / "shards")


@pytest.mark.parametrize("promise", loader.PROMISES)
def test_the_loader(promise: str, pytestconfig: pytest.Config, shards: Path) -> None:
    loader.PROMISES[promise](adapter(pytestconfig, "--loader-adapter"), shards)


@pytest.mark.parametrize("promise", cache.PROMISES)
def test_the_cache(promise: str, pytestconfig: pytest.Config, tmp_path: Path) -> None:
    place = cache.Workplace(tmp_path / "work", adapter(pytestconfig, "--cache-adapter"))
    cache.PROMISES[promise](place)


@pytest.fixture(scope="session")
def compared(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> values.Compared:
    function, encoders = adapter(pytestconfig, "--cache-adapter"), pytestconfig.getoption("--encoders")
    if encoders is None:
        pytest.skip("no --encoders")
    place = cache.Workplace(tmp_path_factory.mktemp("conformance") / "work", function)
    return values.compare(place, Path(encoders))


@pytest.mark.parametrize("promise", values.PROMISES)
def test_the_values(promise: str, compared: values.Compared) -> None:
    values.PROMISES[promise](compared)
