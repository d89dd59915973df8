"""One test for each promise of a model and of a loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_cache.conformance import loader, model
from qwen_cache.conformance.plugin import adapter


@pytest.mark.parametrize("promise", model.PROMISES)
def test_the_model(promise: str, pytestconfig: pytest.Config) -> None:
    model.PROMISES[promise](adapter(pytestconfig, "--model-adapter"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loader.write_cache(tmp_path_factory.mktemp("conformance") / "shards")


@pytest.mark.parametrize("promise", loader.PROMISES)
def test_the_loader(promise: str, pytestconfig: pytest.Config, cache: Path) -> None:
    loader.PROMISES[promise](adapter(pytestconfig, "--loader-adapter"), cache)
