"""`cache.local_copies` in qwen.yaml is honoured by every command that reads tensors of a remote cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from qwen_cache import open_cache

from .support.commands import run
from .support.server import Server, serving

FRESH = ("--out", "new")
COMMANDS = {
    "inspect --scan": ("qwen-cache", "inspect", "{url}", "--scan"),
    "inspect --sample": ("qwen-cache", "inspect", "{url}", "--sample", "{key}"),
    "merge": ("qwen-cache", "merge", "{url}", *FRESH),
    "migrate": ("qwen-cache", "migrate", "v2", "v1", "{url}", *FRESH, "--set", "cache.thumbnails=false"),
    "predict": ("qwen-train", "predict", "--from-cache", "{url}", "--key", "{key}", "--model", "{model}"),
}


@pytest.fixture
def served(built: Callable[..., Path], tmp_path: Path) -> Iterator[Server]:
    with serving(Server(built("edit-plus", ("--edit-mask", "none")))) as server:
        yield server


@pytest.mark.parametrize("command", COMMANDS)
def test_copies_are_where_qwen_yaml_says(
    command: str,
    served: Server,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "qwen.yaml").write_text("cache:\n  local_copies: mine\npredict:\n  num_inference_steps: 2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    values = {"url": served.url, "key": open_cache(served.folder)[0].key, "model": tiny_model("edit-plus")}
    program, *arguments = (part.format(**values) for part in COMMANDS[command])
    result = run(program, *arguments)
    assert result.code == 0, result.stderr
    assert list((tmp_path / "mine").glob("*.part"))
    assert not (tmp_path / "home" / "qwen-cache" / "shards").exists()
