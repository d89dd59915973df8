"""Promises that all stores share: conditional writes, whole files, listings. Each against a server of its kind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import pytest

from qwen_cache import open_cache
from qwen_cache.errors import QwenCacheError
from qwen_cache.storage import remote, stores
from qwen_cache.storage.remote import Url
from qwen_cache.storage.stores import Store, destination, store_of

from .support.caches import SMALL
from .support.commands import run
from .support.dataset_hub import DatasetHub
from .support.fake_lanes import FakeLanes
from .support.google import Google
from .support.server import BUCKET, serving

DATASET = "me/cache"
pytestmark = [  # gcsfs and huggingface_hub hand bytes to their clients
    pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


async def no_lookup(*_: Any) -> None:
    """In place of a request by gRPC, to a second server."""


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcsfs")
    with serving(Google()) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setattr("gcsfs.extended_gcsfs.ExtendedGcsFileSystem._lookup_bucket_type", no_lookup)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
        yield "gs://bucket"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, not LFS
    monkeypatch.setenv("HF_TOKEN", "hf_a_token")
    with serving(DatasetHub(DATASET)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setitem(fsspec.config.conf, "hf", {"endpoint": server.url})
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        yield f"hf://datasets/{DATASET}"
    fsspec.get_filesystem_class("hf").clear_instance_cache()


@pytest.fixture(params=["s3", "google", "hub"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder in a store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    top = request.getfixturevalue(request.param)
    return f"s3://{BUCKET}/{tmp_path.name}" if request.param == "s3" else f"{top}/shards"


def swap(store: Store, url: Url, old: bytes | None, new: bytes) -> bool:
    return store.swap(url, old, new, {}, {})


WRITE = {"s3": (stores, "_s3_write_over"), "gs": (stores, "_gcs_write_over"), "hf": (stores, "_commit")}
"""The function of each store that writes under the condition."""


def test_every_store_writes_under_a_condition(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = destination(folder + "/")
    assert isinstance(place, Url)
    store, file = store_of(place), place / "cache.json"
    assert store.listing(place).files == {}
    store.check(place)
    assert store.listing(place).files == {}, "the check leaves nothing behind"
    assert not swap(store, file, b"1", b"2"), "there is none"
    assert store.swap(file, None, b"1", {place / "before": b"b"}, {place / "after": b"a"})
    assert swap(store, file, None, b"1"), "an answer may be lost: what is there already was written"
    assert not swap(store, file, None, b"2"), "there is one"
    assert not swap(store, file, b"0", b"2"), "there is another"
    assert swap(store, file, b"1", b"2")
    assert file.read_bytes() == b"2"
    module, name = WRITE[folder.partition(":")[0]]
    write, faster = getattr(module, name), [b"3"]

    def overtaken(*arguments: Any) -> bool:
        if faster:
            store.put(file, faster.pop())
        return bool(write(*arguments))

    with monkeypatch.context() as patch:
        patch.setattr(module, name, overtaken)
        assert not swap(store, file, b"2", b"4"), "another was faster, after this one had read the file"
    assert file.read_bytes() == b"3"
    large = tmp_path / "large.tar"
    large.write_bytes(os.urandom(11_000_000))
    store.put_file(place / large.name, large, {place / "part": b"p"}, Event())
    assert (place / large.name).read_bytes() == large.read_bytes()
    copied = store.copy(place / large.name, place / "copy")
    assert copied == (not folder.startswith("hf"))
    sizes = {path: found.size for path, found in store.listing(place).files.items()}
    expected = {"before": 1, "cache.json": 1, "after": 1, "part": 1, large.name: 11_000_000}
    assert sizes == expected | ({"copy": 11_000_000} if copied else {})
    store.delete([place / large.name, place / "no such file"])
    assert large.name not in store.listing(place).files


@pytest.mark.slow
def test_a_build_into_every_store(
    folder: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path
) -> None:
    """Twice, the second time with a changed source; then gc."""
    for place in (folder, str(tmp_path / "shards")):
        command = ("qwen-cache", "build", pairs, "--out", place, "--model", tiny_model("edit-plus"), *SMALL)
        for prompt in ("one", "two"):
            (pairs / "target_images" / "cat.txt").write_text(prompt, encoding="utf-8")
            result = run(*command, "--set", "cache.shard_size=1")
            assert result.code == 0, result.stderr
    assert open_cache(folder).identity == open_cache(tmp_path / "shards").identity
    assert run("qwen-cache", "verify", folder).code == 0
    assert run("qwen-cache", "gc", folder, "--grace-hours", "0").code == 0
    assert run("qwen-cache", "verify", folder).code == 0
    shards = [path for path in store_of(Url(folder)).listing(Url(folder)).files if path.endswith(".tar")]
    assert len(shards) == 4


def test_a_dataset_on_the_hub_must_exist(hub: str) -> None:
    other = Url("hf://datasets/me/other/shards")
    with pytest.raises(QwenCacheError, match=r"there is no such dataset on the hub\n  → create it with `hf repo cr"):
        store_of(other).check(other)
