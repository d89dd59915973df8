"""A cache is built into a bucket as into a folder: equal samples, one builder at a time commits, nothing is lost.

The server is real: moto speaks S3. The judge is the same build into a folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from qwen_cache import open_cache
from qwen_cache.storage import url as remote

from .support.caches import SMALL
from .support.commands import Result, run
from .support.fake_lanes import FakeLanes
from .support.server import BUCKET

SHARDS = ("--set", "cache.shard_size=1")
"""A shard for each sample."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of this test; retries do not wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    return tmp_path / "home" / "qwen-cache"


@pytest.fixture
def url(s3: tuple[str, int], request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}/shards"


def build(source: Path, out: object, model: Path, *options: str) -> Result:
    return run("qwen-cache", "build", source, "--out", str(out), "--model", model, *SMALL, *SHARDS, *options)


def files(url: str) -> dict[str, int]:
    """The files below a URL, with their sizes."""
    bucket = fsspec.filesystem("s3")
    bucket.invalidate_cache()
    top = url.removeprefix("s3://")
    return {name.removeprefix(f"{top}/"): each["size"] for name, each in bucket.find(top, detail=True).items()}


def content(place: object) -> dict[str, dict[str, str]]:
    """The hash of every tensor, by sample and tensor."""
    rows = [sample.row for sample in open_cache(str(place))]
    return {row.meta.key: {name: spec.xxh3_128 for name, spec in row.meta.tensors.items()} for row in rows}


def valid(url: str) -> None:
    checked = run("qwen-cache", "verify", url)
    assert checked.code == 0, checked.stdout + checked.stderr


def test_a_build_into_a_bucket(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path, home: Path
) -> None:
    """Equal to one into a folder, byte for byte; the second one does nothing; a changed source adds what is new."""
    model = tiny_model("edit-plus")
    result = build(pairs, url, model)
    assert result.code == 0, result.stderr
    assert build(pairs, tmp_path / "shards", model).code == 0
    theirs = {path.name: path.stat().st_size for path in (tmp_path / "shards").iterdir() if path.is_file()}
    index = open_cache(url).manifest.index.xxh3_128
    del theirs[".lock"]
    ours = files(url)
    assert ours.pop(f"index-{index}.parquet") == theirs["index.parquet"]
    assert ours.keys() == theirs.keys()
    assert {name: size for name, size in ours.items() if name != "qwen.yaml"} == {
        name: size for name, size in theirs.items() if name != "qwen.yaml"
    }
    assert open_cache(url).identity == open_cache(tmp_path / "shards").identity
    assert content(url) == content(tmp_path / "shards")
    valid(url)
    assert not list(home.rglob("*.tar"))
    again = build(pairs, url, model)
    assert (again.code, len(fast)) == (0, 2)
    assert "nothing to do" in again.stderr
    (pairs / "target_images" / "cat.txt").write_text("another prompt", encoding="utf-8")
    changed = build(pairs, url, model, "--json")
    assert json.loads(changed.stdout)["encoded"] == 1, changed.stderr
    assert fast[-1].encoded == ["cat"]
    valid(url)
    found = json.loads(run("qwen-cache", "gc", url, "--dry-run", "--json").stdout)
    assert found["files"] == {}
    assert found["spared_bytes"] > 0
    assert run("qwen-cache", "gc", url, "--grace-hours", "0").code == 0
    assert len(files(url)) == 4 + 4
    valid(url)
