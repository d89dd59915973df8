"""A crash at a chosen moment, without a process of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Crash(BaseException):
    """Raised where a process might die; the program must not catch it."""


def crash_after(count: int, monkeypatch: pytest.MonkeyPatch, *, of_shards: bool = False) -> None:
    """Crash at the operation that changes files after `count` of them; `of_shards`: writes into shards alone, of which
    each sample takes three."""
    from qwen_cache.format.shard import ShardWriter

    left = count

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(ShardWriter, "_write", dying(ShardWriter._write))
    if of_shards:
        return
    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(os, "fsync", dying(os.fsync))
    monkeypatch.setattr(Path, "replace", dying(Path.replace))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))
