"""An HTTP server can neither fill a reader's memory nor keep it waiting, whatever it sends.

`qwen_cache/storage/bounds.py` has the limits; `support/server.py` the servers that break them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from qwen_cache import FormatError, QwenCacheError, open_cache
from qwen_cache.errors import SourceError, TooLargeError
from qwen_cache.sources.places import read_bytes
from qwen_cache.storage import bounds
from qwen_cache.storage import url as remote
from qwen_cache.storage.http_client import bounded_client

from .support.marks import slow
from .support.paths import ROOT
from .support.server import Server, serving

BUFFERS = 20_000_000
"""More than the buffers of both systems between two programs on one machine."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A cache by HTTP; retries do not wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    cache = ROOT / "schemas" / "examples" / "valid" / "cache.v2"
    with serving(Server(Path(shutil.copytree(cache, tmp_path / "served")))) as server:
        yield server


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short time limits, in clients of their own; a request for a block may take 8 seconds in all, a slow one less."""
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr(bounds, "SILENCE", 0.3)
    monkeypatch.setattr(bounds, "PATIENCE", 5.0)
    monkeypatch.setattr(bounds, "SLOWEST", 1_000_000)
    monkeypatch.setattr(bounds, "PAGE_SECONDS", 0.6)
    files = fsspec.get_filesystem_class("http")
    files.clear_instance_cache()
    yield
    files.clear_instance_cache()


READS: dict[str, Callable[[remote.Url], object]] = {
    "reading": remote.Url.read_bytes,
    "asking for its size": remote.Url.size,
    "listing": remote.Url.find,
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("trick", ["silent", "drip", slow("slow header")])
def test_a_server_that_does_not_answer_in_time_is_an_error(trick: str, what: str, served: Server) -> None:
    served.trick = trick
    if (trick, what) == ("drip", "asking for its size"):
        assert remote.Url(served.url, "cache.json").size() is None  # the header came
        return
    with pytest.raises(QwenCacheError) as refusal:
        READS[what](remote.Url(served.url, "cache.json"))
    found = "no answer, or less than 1000000 bytes a second, for 0.3 seconds"
    times = "(once|2 times)" if trick == "slow header" else "2 times"
    message = rf"{served.url}/cache.json: {what} failed {times} \(found {found}\)\n  → check the connection and"
    assert re.match(message, str(refusal.value))


@pytest.mark.parametrize("trick", ["endless", "huge"])
def test_an_answer_without_end_is_read_up_to_what_was_asked_for(trick: str, served: Server) -> None:
    served.trick = trick
    url = remote.Url(served.url, "cache.json")
    for read in (url.read_bytes, url.require_ranges):
        with pytest.raises(
            QwenCacheError, match=r"does not answer requests for a range of bytes \(expected \d+ bytes, f"
        ):
            read()
    assert served.sent < remote.BLOCK + BUFFERS


@pytest.mark.parametrize("trick", ["endless", "folders"])
def test_a_listing_without_end_is_refused(trick: str, served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page, or a folder in every folder."""
    monkeypatch.setattr(bounds, "LISTING", 20_000)
    served.trick = trick
    with pytest.raises(
        TooLargeError, match=r"the listing of this folder is too large \(expected at most 20000 bytes\)\n  → name"
    ):
        remote.Url(served.url).find()
    assert served.sent < BUFFERS
    assert remote.Url(served.url).glob("*.tar") == []


def test_a_compressed_answer_is_refused_and_never_unpacked(served: Server) -> None:
    served.trick = "gzip"
    with pytest.raises(
        QwenCacheError, match=r"compresses a file that must be sent as it is \(found Content-Encoding: gzip\)"
    ):
        remote.Url(served.url, "cache.json").read_bytes()


def test_files_that_are_read_whole_have_a_largest_size(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index has that of its manifest."""
    monkeypatch.setattr(remote, "BLOCK", 1000)
    index = served.folder / "index.parquet"
    index.write_bytes(index.read_bytes() + bytes(5_000))
    with pytest.raises(FormatError, match=r"not the one that the manifest names \(.*found a larger file\) \[F7\]"):
        open_cache(served.url)
    url, size = remote.Url(served.url, "index.parquet"), index.stat().st_size
    assert url.read_bytes(size) == index.read_bytes()
    message = rf"index.parquet: the file is too large \(expected at most {size - 1} bytes, found {size}\)"
    with pytest.raises(TooLargeError, match=message):
        url.read_bytes(size - 1)
    with pytest.raises(SourceError, match=message):
        read_bytes(url, size - 1)


def test_a_shard_whose_size_is_a_lie_costs_one_request(served: Server) -> None:
    """Of a manifest that says more than the server has: no disk space, no list of a million requests."""
    path = sorted(served.folder.glob("*.tar"))[0]
    with pytest.raises(QwenCacheError, match=r"\.tar: reading the bytes 1099511627775 to 1099511627776 "):
        remote.Url(served.url, path.name).download(1 << 40)
    assert len(served.requests) <= remote.ATTEMPTS


def test_other_users_of_fsspec_keep_their_client(served: Server) -> None:
    """Neither do they get our bounds, nor we their session."""
    theirs = fsspec.filesystem("http")
    open_cache(served.url)
    assert fsspec.filesystem("http") is theirs
    assert theirs.get_client is not bounded_client
    assert len(theirs.cat_file(f"{served.url}/cache.json")) == (served.folder / "cache.json").stat().st_size
