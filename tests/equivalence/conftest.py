"""The start of every comparison with the stock models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jaxtyping
import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters


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
    counters.clear()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def real_aot_eager() -> Callable[..., Any]:
    """The backend "aot_eager", for graphs without complex numbers: inductor has no code for them."""

    def compile_(graph: Any, inputs: Any) -> Any:
        values = [node.meta.get("example_value") for node in graph.graph.nodes]
        assert not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values)
        return lookup_backend("aot_eager")(graph, inputs)

    return compile_
