"""What every comparison with the stock models starts from."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def active_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_attention_backend` changes the backend of the whole process: here from "native" and back."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.NATIVE)
