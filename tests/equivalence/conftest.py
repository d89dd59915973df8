"""What every comparison with the stock models starts from."""

from __future__ import annotations

from collections.abc import Iterator

import jaxtyping
import pytest
import torch


@pytest.fixture(autouse=True)
def active_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_attention_backend` changes the backend of the whole process: here from "native" and back."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)


@pytest.fixture(params=["padded", "packed"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Without the shape checks of the test runner, which the compiler cannot see through."""
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
