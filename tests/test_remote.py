"""A remote cache reads like the folder it was copied from, whatever happens to servers, connections and local copies.

The servers are real: moto speaks S3, a small HTTP server here counts what it is asked and fails as told. The judge is
the same cache, opened as a folder.
"""

from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from accelerate.state import AcceleratorState

from qwen_cache import FormatError, QwenCacheError, open_cache
from qwen_cache.format import cache as shards
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import write_index
from qwen_cache.format.manifest import with_checksum
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.storage import remote
from qwen_cache.storage import remote as local_copies
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Mixture
from qwen_train.flow import NoiseSchedule

from .support.commands import command, run
from .support.marks import slow
from .support.processes import popen
from .support.server import BUCKET, Proxy, Server, fresh_clients, serving
from .support.waiting import HANG

SHARDS = ("--set", "cache.shard_size=1")
"""A shard for each of the four samples."""


# ---- servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(local: Path, tmp_path: Path) -> Iterator[Server]:
    """The cache by HTTP, from a copy that may be damaged."""
    with serving(Server(Path(shutil.copytree(local, tmp_path / "served")))) as server:
        yield server


def upload(folder: Path, name: str, protocol: str = "s3") -> str:
    """Copy a cache into the bucket, readable for everybody; its URL."""
    files, options = fsspec.filesystem(protocol), {"ACL": "public-read"} if protocol == "s3" else {}
    for path in folder.iterdir():
        if path.is_file():
            files.pipe_file(f"{BUCKET}/{name}/{path.name}", path.read_bytes(), **options)
    return f"{protocol}://{BUCKET}/{name}"


# ---- the cache, and its copies ---------------------------------------------------------------------------------------


@pytest.fixture
def local(built: Callable[..., Path]) -> Path:
    return built("edit-plus", SHARDS)


@pytest.fixture(autouse=True)
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for local copies of this test; retries do not wait."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    return tmp_path / "home" / "qwen-cache" / "shards"


def contents(cache: Cache) -> dict[str, dict[str, bytes]]:
    return {sample.key: tensors(sample) for sample in cache}


def tensors(sample: Sample) -> dict[str, bytes]:
    return {name: bytes(sample.buffer(name)) for name in sample.row.meta.tensors}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("*.part"))


def ranges(cache: Cache) -> set[tuple[str, int, int]]:
    """The positions of the samples."""
    return {(row.shard, row.entry.offset, row.entry.offset + row.entry.length) for row in cache.rows()}


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def place(cache: Cache, which: int, name: str = "prompt_embeds") -> tuple[str, int]:
    """A shard, and a byte in the middle of a tensor in it."""
    row = cache.row(which)
    return row.shard, row.entry.tensor_offsets()[name] + row.meta.tensors[name].stored_bytes // 2


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["s3", "http", "memory", "file"])
@pytest.mark.parametrize("options", [SHARDS, ("--format", "v1")], ids=["shards", "v1"])
def test_every_address_reads_what_the_folder_reads(
    protocol: str, options: tuple[str, ...], built: Callable[..., Path], s3: tuple[str, int], copies: Path
) -> None:
    folder = built("edit-plus", options)
    url = {
        "s3": lambda: upload(folder, "read") + "/",
        "http": lambda: upload(folder, "read").replace("s3://", f"http://{s3[0]}:{s3[1]}/"),
        "memory": lambda: upload(folder, "read", "memory"),
        "file": lambda: f"file://{folder}",
    }[protocol]()
    expected, found = open_cache(folder), open_cache(url)
    assert found.identity == expected.identity
    assert contents(found) == contents(expected)
    assert list(found.rows()) == list(expected.rows())
    again = pickle.loads(pickle.dumps(found))
    assert contents(again) == contents(expected)
    assert copies.exists() is (protocol != "file"), "local files need no copy"


def test_tensors_of_a_copy_are_mapped_and_aligned_as_those_of_a_folder(local: Path, served: Server) -> None:
    for ours, theirs in zip(open_cache(served.url), open_cache(local), strict=True):
        for name, tensor in theirs.tensors().items():
            assert ours[name].equal(tensor)
            assert ours.stored(name).data_ptr() % 64 == theirs.stored(name).data_ptr() % 64


def test_only_requested_samples_are_fetched_and_only_once(built: Callable[..., Path], tmp_path: Path) -> None:
    """One shard, four samples: a sample is one range, whatever reads it later."""
    with serving(Server(built("edit-plus"))) as server:
        cache = open_cache(server.url)
        assert server.requests == []
        tensors(cache[2])
        row = cache.row(2)
        assert server.requests == [(row.shard, row.entry.offset, row.entry.offset + row.entry.length)]
        for sample in [*cache, *cache, *open_cache(server.url)]:
            tensors(sample)
        assert sorted(server.requests) == sorted(ranges(cache))


def test_an_index_of_many_blocks(served: Server, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK", 1000)
    assert list(open_cache(served.url).rows()) == list(open_cache(local).rows())
    (served.folder / "index.parquet").write_bytes(bytes(3000))
    with pytest.raises(FormatError, match=r"the index is not the one that the manifest names .*another hash\) \[F7\]"):
        open_cache(served.url)


def test_local_reading_knows_nothing_of_it(local: Path) -> None:
    code = (
        "import sys; from qwen_cache import open_cache; [s.buffer(n) for s in open_cache(sys.argv[1]) "
        "for n in s.row.meta.tensors]; print({'fsspec', 'torch', 's3fs', 'aiohttp'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code, local], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_an_index_that_waits_for_its_manifest_is_found(served: Server, local: Path) -> None:
    index = open_cache(local).manifest.index.xxh3_128
    (served.folder / "index.parquet").rename(served.folder / f"index-{index}.parquet")
    assert len(open_cache(served.url)) == 4


def test_a_replaced_shard_is_found(served: Server, local: Path) -> None:
    (served.folder / ".replaced").mkdir()
    for path in served.folder.glob("*.tar"):
        path.rename(served.folder / ".replaced" / path.name)
    assert contents(open_cache(served.url)) == contents(open_cache(local))


# ---- many at once ----------------------------------------------------------------------------------------------------


def test_prefetched_samples_are_fetched_together_and_only_once(served: Server) -> None:
    """No request is answered before all four are there."""
    served.before_answer = threading.Barrier(4, timeout=HANG).wait
    cache = open_cache(served.url)
    cache.prefetch(range(4))
    contents(cache)
    assert sorted(served.requests) == sorted(ranges(cache))


def test_the_trainer_asks_for_the_batches_ahead(served: Server, local: Path) -> None:
    """With batches of one, the first batch comes only when the samples of three others are on their way."""
    served.before_answer = threading.Barrier(4, timeout=HANG).wait
    config = TrainConfig(batch_size=1)
    ours, theirs = (
        Batches(Mixture.of(open_cache(where)), config, NoiseSchedule()).starting_at(0)
        for where in (served.url, str(local))
    )
    for a, b in itertools.islice(zip(ours, theirs, strict=True), 8):
        assert a.keys == b.keys
        assert a.clean.equal(b.clean)
        assert a.prompt_embeds.equal(b.prompt_embeds)
    ours.close()
    theirs.close()
    assert len(served.requests) == 4


def test_prefetching_can_be_cancelled(served: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FETCHERS", 1)
    asked, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert go_on.wait(10)

    served.before_answer = wait
    cache = open_cache(served.url)
    cache.prefetch(range(4))
    assert asked.wait(10)
    cache.stop_prefetch()
    go_on.set()
    tensors(cache[3])
    assert [name for name, _, _ in served.requests] == [cache.row(0).shard, cache.row(3).shard]
    contents(cache)
    assert len(served.requests) == 4


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_reads_on(served: Server, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "FETCHERS", 1)  # the parent's only thread is not in the child
    cache = open_cache(served.url)
    tensors(cache[0])
    arguments = cache, contents(open_cache(local))
    child = multiprocessing.get_context("fork").Process(target=exit_with, args=arguments, daemon=True)
    child.start()
    child.join(HANG)
    assert child.exitcode == 0


def exit_with(cache: Cache, expected: dict[str, dict[str, bytes]]) -> None:
    cache.prefetch(range(4))
    sys.exit(contents(cache) != expected)


READER = """
import random, sys
from qwen_cache import open_cache

seed, url, folder, copies, size = sys.argv[1:]
ours, theirs = open_cache(url, local_copies=copies, local_copies_size=int(size)), open_cache(folder)
expected = [{n: bytes(s.buffer(n)) for n in s.row.meta.tensors} for s in theirs]
chance = random.Random(seed)
for _ in range(100):
    ours.prefetch([chance.randrange(4)])
    i = chance.randrange(4)
    assert {n: bytes(ours[i].buffer(n)) for n in ours[i].row.meta.tensors} == expected[i]
"""


@pytest.mark.slow
def test_processes_that_share_too_little_space_read_correctly(served: Server, local: Path, copies: Path) -> None:
    """Three processes fill and remove the same copies at the same time, and one of them is killed."""
    arguments = [served.url, str(local), str(copies), "150000"]
    readers: list[subprocess.Popen[bytes]] = []

    def kill_one() -> None:
        if len(served.requests) == 20:
            readers[0].kill()

    served.before_answer = kill_one
    readers += [subprocess.Popen([sys.executable, "-c", READER, str(seed), *arguments]) for seed in range(4)]
    assert [reader.wait(HANG) for reader in readers] == [-9, 0, 0, 0]
    assert len(served.requests) > 100, "nothing was removed, so nothing was shown"


# ---- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["cut", "short", 503, 429])
def test_a_broken_connection_costs_one_block(
    failure: str | int, served: Server, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failures in a row: three requests more than blocks."""
    monkeypatch.setattr(remote, "BLOCK", 20_000)
    cache = open_cache(served.url)
    expected, length = tensors(open_cache(local)[0]), cache.row(0).entry.length
    served.failures = itertools.chain([""], [failure] * 3)  # the first block comes
    assert tensors(cache[0]) == expected
    blocks = -(-length // 20_000)
    assert blocks > 2
    assert len(served.requests) == blocks + 3


@pytest.mark.parametrize(
    ("failure", "reason"), [("cut", "ClientPayloadError"), ("short", r"EOFError: \d+ of \d+ bytes came"), (500, "500")]
)
def test_a_connection_that_always_breaks_is_an_error_that_says_all(
    failure: str | int, reason: str, served: Server, local: Path
) -> None:
    served.failures = itertools.repeat(failure)
    cache = open_cache(served.url)
    row = cache.row(0)
    place = re.escape(f"{served.url}/{row.shard}: reading the bytes {row.entry.offset} to ")
    with pytest.raises(QwenCacheError, match=rf"{place}\d+ failed 5 times \(found .*{reason}(.|\n)*→ check the conn"):
        tensors(cache[0])
    assert len(served.requests) == 5
    served.fail()
    assert tensors(cache[0]) == tensors(open_cache(local)[0]), "the same cache continues when the server does"


def test_an_s3_connection_that_breaks_in_the_middle(
    s3: tuple[str, int], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = upload(local, "broken")
    with serving(Proxy(s3, cuts=4)) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        fresh_clients()
        assert contents(open_cache(url)) == contents(open_cache(local))
        assert proxy.cut == 4
    fresh_clients()


def test_an_s3_connection_that_always_breaks(s3: tuple[str, int], local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = upload(local, "broken")
    monkeypatch.setattr(remote, "ATTEMPTS", 2)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)
    with serving(Proxy(s3, cuts=float("inf"))) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        fresh_clients()
        cache = open_cache(url)
        with pytest.raises(QwenCacheError, match=rf"{url}/\w+\.tar: reading the bytes 0 to \d+ failed 2 times \(found"):
            contents(cache)
    fresh_clients()


def refuse_to_wait(seconds: float) -> None:
    raise AssertionError("a second attempt")


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionResetError("cut")], ids=repr)
def test_the_last_of_all_attempts_is_an_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ended the one before, reading or writing: nothing that did not arrive passes for done."""

    def fail(*_: object) -> None:
        attempts.append(error)
        raise error

    attempts: list[Exception] = []
    monkeypatch.setattr(remote, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(remote, "ATTEMPTS", 3)
    with pytest.raises(QwenCacheError, match="writing failed 3 times"):
        remote.Url("memory://folder/file").call(fail, "writing")
    assert len(attempts) == 3


def test_permanent_errors_are_not_retried(served: Server) -> None:
    cache = open_cache(served.url)
    shard = cache.row(0).shard
    served.failures = itertools.repeat(403)
    with pytest.raises(QwenCacheError, match=r"is refused \(found .*403(.|\n)*→ check credentials and address"):
        tensors(cache[0])
    assert len(served.requests) == 1
    (served.folder / shard).unlink()
    with pytest.raises(FormatError, match=rf"{served.url}/{shard}: a shard of the manifest is missing \[F6\]"):
        tensors(cache[0])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/nothing", r"s3://bucket/nothing: no cache.json here: not a cache\n  → check the address"),
        ("s3://no-such-bucket/x", r"s3://no-such-bucket/x: no cache.json here(.|\n)*→ check the address"),
        ("gopher://x/y", r"gopher://x/y: this protocol is not supported \(.*found gopher\)\n  → copy the files"),
        ("s3:/bucket/x", r"s3:/bucket/x: nearly a URL\n  → write s3://bucket/x; a local folder .* \./s3:/b"),
        ("S3://bucket/x", r"S3://bucket/x: nearly a URL\n  → write s3://bucket/x; a local folder .* \./S3://"),
        ("reference::https://x/y", r"this protocol is not supported \(expected https, s3, .* found reference\)"),
        ("zip://y::dask::https://x", r"this protocol is not supported \(.*found dask\)"),
        ("simplecache::memory://x", r"this protocol is not supported \(.*found simplecache\)"),
        (
            "https://x/y",
            r"https:// needs a package that is missing \(found ModuleNotFoundError.*\n  → pip install .*\[http\]",
        ),
        ("gs://x/y", r"gs:// needs a package that is missing \(found ImportError(.|\n)*→ pip install .*\[gs\]"),
    ],
)
def test_addresses_that_lead_nowhere(
    url: str, message: str, s3: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "qwen_cache.storage.http_client", None)  # as without aiohttp
    monkeypatch.setattr("tenacity.nap.time.sleep", refuse_to_wait)
    with pytest.raises(QwenCacheError, match=message):
        open_cache(url)


def test_missing_credentials_are_reported_without_retries(s3: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("tenacity.nap.time.sleep", refuse_to_wait)
    fresh_clients()
    with pytest.raises(QwenCacheError, match="NoCredentialsError: Unable to locate credentials"):
        open_cache("s3://bucket/nothing")
    fresh_clients()


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_server_that_does_not_answer_is_not_one_without_the_file(command: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = run("qwen-cache", command, f"http://127.0.0.1:{port}/shards")
    assert result.code == 2
    assert f"http://127.0.0.1:{port}/shards/cache.json" in result.stderr
    assert "failed 5 times (found ClientConnectorError" in result.stderr
    assert "check the connection" in result.stderr


def test_a_server_without_ranges_is_refused_before_it_sends_a_shard(local: Path) -> None:
    """Python's own http.server is one."""
    asked: list[str] = []

    class Plain(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(local))

        def log_message(self, *_: Any) -> None:
            asked.append(self.path)

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Plain)) as server:
        cache = open_cache(f"http://127.0.0.1:{server.server_port}")
        message = (
            r"cache.json: the server does not answer requests for a range of bytes \(expected 1 bytes, found more\)"
        )
        with pytest.raises(QwenCacheError, match=message):
            tensors(cache[0])
        result = run("qwen-cache", "verify", f"http://127.0.0.1:{server.server_port}")
        assert result.code == 2
        assert "does not answer requests for a range" in result.stderr
    assert not any(path.endswith(".tar") for path in asked)


# ---- bytes that are not what they should be --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [(), ("--set", "cache.compression=zstd")], ids=["plain", "compressed"])
def test_flipped_bytes_on_the_server_are_refused_and_not_kept(
    codec: tuple[str, ...], built: Callable[..., Path], tmp_path: Path
) -> None:
    local = built("edit-plus", (*SHARDS, *codec))
    with serving(Server(Path(shutil.copytree(local, tmp_path / "damaged")))) as server:
        cache = open_cache(server.url)
        shard, offset = place(cache, 1)
        flip(server.folder / shard, offset)
        for name in cache.row(1).meta.tensors:  # of whatever tensor: a sample comes whole
            with pytest.raises(FormatError, match=rf"^{server.url}/{shard}.*prompt_embeds of.*(\[F14\]|\[F18\])"):
                cache[1].buffer(name)
        flip(server.folder / shard, offset)
        assert contents(cache) == contents(open_cache(local))


@pytest.mark.parametrize("codec", [(), ("--set", "cache.compression=zstd")], ids=["plain", "compressed"])
@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("damage", ["flipped", slow("zeros"), "truncated", slow("longer")])
def test_a_damaged_copy_is_fetched_again(
    damage: str, opened: str, codec: tuple[str, ...], built: Callable[..., Path], copies: Path
) -> None:
    local = built("edit-plus", (*SHARDS, *codec))
    with serving(Server(local)) as server:
        cache = open_cache(server.url)
        shard, offset = place(cache, 1)
        tensors(cache[1])
        [copy] = copies.glob(f"{shard}.*.part")
        assert copy.read_bytes()[offset] == (local / shard).read_bytes()[offset]
        if damage == "flipped":
            flip(copy, offset)
        elif damage == "zeros":
            with open(copy, "r+b") as file:
                file.write(bytes(copy.stat().st_size))
        elif opened == "after":
            os.truncate(copy, offset if damage == "truncated" else 2 * copy.stat().st_size)
        reader = cache if opened == "before" else open_cache(server.url)
        assert tensors(reader[1]) == tensors(open_cache(local)[1])
        again = damage != "longer" and (opened == "after" or damage != "truncated")
        assert len(server.requests) == 1 + again


def test_a_good_copy_outlives_damage_on_the_server(served: Server, local: Path) -> None:
    before = contents(open_cache(served.url))
    for path in served.folder.glob("*.tar"):
        path.write_bytes(bytes(path.stat().st_size))
    assert contents(open_cache(served.url)) == before == contents(open_cache(local))


def test_a_copy_is_never_outside_its_folder(served: Server, local: Path, tmp_path: Path, copies: Path) -> None:
    """An index that names files outside the folder."""
    path, name = served.folder / "cache.json", "../../../elsewhere"
    rows = [replace(row, shard=name) for row in open_cache(local).rows()]
    index = write_index(rows, 2)
    (served.folder / "index.parquet").write_bytes(index)
    value = json.loads(path.read_text())
    value["index"] |= {"bytes": len(index), "xxh3_128": content_hash(index)}
    path.write_bytes(with_checksum(value))
    with pytest.raises(FormatError, match=r"not the name of a shard .*found \.\./\.\./\.\./elsewhere\) \[F6\]"):
        tensors(open_cache(served.url)[0])
    assert not list(tmp_path.rglob("elsewhere*"))


def test_a_sample_beyond_its_shard_is_refused(served: Server) -> None:
    """If the manifest says a shard is smaller than the index says, nothing is requested."""
    path = served.folder / "cache.json"
    value = json.loads(path.read_text())
    for shard in value["shards"]:
        shard["bytes"] = 1000
    path.write_bytes(with_checksum(value))
    with pytest.raises(FormatError, match=r"reaches beyond its shard \(expected at most 1000 bytes\) \[F16\]"):
        tensors(open_cache(served.url)[0])
    assert served.requests == []


# ---- the disk --------------------------------------------------------------------------------------------------------


def test_copies_stay_within_their_bound_and_views_of_removed_ones_hold(
    served: Server, local: Path, copies: Path
) -> None:
    expected = contents(open_cache(local))
    sizes = [row.entry.length for row in open_cache(local).rows()]
    bound = 2 * max(sizes) + 20_000
    cache = open_cache(served.url, local_copies_size=bound)
    views = {}
    chance = random.Random(0)
    for _ in range(40):
        sample = cache[chance.randrange(4)]
        views[sample.key] = {name: sample.buffer(name) for name in sample.row.meta.tensors}
        assert 0 < disk_bytes(copies) <= bound
    assert len(served.requests) > 8, "nothing was removed"
    assert {key: {name: bytes(view) for name, view in found.items()} for key, found in views.items()} == expected


def test_a_copy_takes_the_space_of_the_samples_read_and_not_of_its_shard(
    built: Callable[..., Path], copies: Path
) -> None:
    with serving(Server(built("edit-plus"))) as server:
        for _ in range(3):
            cache = open_cache(server.url, local_copies_size=100_000)
            assert cache.manifest.shards[0].bytes > 200_000
            tensors(cache[1])
        assert len(server.requests) == 1


def test_the_least_recently_used_is_removed_first(
    served: Server, local: Path, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_copies, "TOUCH_AFTER", 0)
    rows = list(open_cache(local).rows())
    cache = open_cache(served.url)
    for i in (0, 1, 2, 3, 0, 2):
        tensors(cache[i])
    assert len(served.requests) == 4
    smaller = int((disk_bytes(copies) - 5000) / 0.9)  # one must go
    local_copies.LocalCopies(copies, smaller).evict()
    assert {path.name.split(".tar.")[0] + ".tar" for path in copies.glob("*.part")} == {
        rows[i].shard for i in (0, 2, 3)
    }


def test_the_disk_gets_the_bytes_of_removed_copies_back(served: Server, copies: Path) -> None:
    cache = open_cache(served.url, local_copies_size=1)
    for _ in range(3):
        for sample in cache:
            tensors(sample)
    held = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert [path for path in held if path.startswith(str(copies)) and path.endswith("(deleted)")] == []
    assert disk_bytes(copies) == 0


def test_a_copy_that_vanishes_is_made_again(served: Server, local: Path, copies: Path) -> None:
    cache = open_cache(served.url)
    contents(cache)
    shutil.rmtree(copies)
    assert contents(cache) == contents(open_cache(local))
    assert len(served.requests) == 8


def test_a_full_disk_names_the_settings(served: Server, monkeypatch: pytest.MonkeyPatch, copies: Path) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(QwenCacheError, match=r"\(found No space left on device\)\n  → set cache.local_copies to a"):
        tensors(open_cache(served.url)[0])


def test_copies_go_where_the_settings_say(served: Server, copies: Path, tmp_path: Path) -> None:
    settings = load_config(None, ["cache.local_copies_size=3GB", f"cache.local_copies={tmp_path / 'mine'}"])
    assert settings.cache.local_copies_size == 3_000_000_000
    cache = open_cache(served.url, local_copies=settings.cache.local_copies)
    tensors(cache[0])
    tensors(pickle.loads(pickle.dumps(cache))[1])
    assert len(list((tmp_path / "mine").glob("*.part"))) == 2
    assert not copies.exists()


HOLDER = """
import sys
from qwen_cache import open_cache

cache = open_cache(sys.argv[1])
views = [sample.buffer(name) for sample in cache for name in sample.row.meta.tensors]
print("mapped", flush=True)
sys.stdin.readline()
print(sum(sum(view[:: 64]) for view in views), flush=True)
"""


def test_a_false_size_in_a_manifest_disturbs_no_other_reader(built: Callable[..., Path], tmp_path: Path) -> None:
    """Half the size of a shard that another process has mapped from the same folder: its pages stay."""
    served = Path(shutil.copytree(built("edit-plus"), tmp_path / "served"))
    with serving(Server(served)) as server:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        holder = popen([sys.executable, "-c", HOLDER, server.url], **pipes)
        assert holder.stdout
        assert holder.stdout.readline() == "mapped\n"
        manifest = json.loads((served / "cache.json").read_text(encoding="utf-8"))
        manifest["shards"][0]["bytes"] //= 2
        (served / "cache.json").write_bytes(with_checksum(manifest))
        cache = open_cache(server.url)
        first = min(range(4), key=lambda i: cache.row(i).entry.offset)
        tensors(cache[first])
        found, _ = holder.communicate("\n", HANG)
        assert holder.returncode == 0
    views = [sample.buffer(name) for sample in open_cache(built("edit-plus")) for name in sample.row.meta.tensors]
    assert int(found) == sum(sum(view[::64]) for view in views)


@pytest.mark.parametrize("size", [1 << 62, (1 << 63) - 1])
def test_a_size_that_no_disk_has_names_the_settings(size: int, served: Server) -> None:
    manifest = json.loads((served.folder / "cache.json").read_text(encoding="utf-8"))
    for shard in manifest["shards"]:
        shard["bytes"] = size
    (served.folder / "cache.json").write_bytes(with_checksum(manifest))
    with pytest.raises(
        QwenCacheError, match=r"local copy of a shard cannot be stored \(found .*\)\n  → set cache.local"
    ):
        tensors(open_cache(served.url)[0])


HOLE = """
import sys
from qwen_cache.storage.remote import Copy

copy = Copy(sys.argv[1], 10_000_000)
try:
    copy.write(0, memoryview(b"x" * 9_000_000))
except Exception as error:
    print(error)
print(copy.has(5_000_000), copy.has(9_999_999))
"""


@pytest.mark.slow
def test_a_copy_in_memory_that_is_full_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    """Reading where nothing was written would need a page of the tmpfs."""
    script = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1/copy.part"'
    arguments = [str(tmp_path), sys.executable, HOLE]
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script, "sh", *arguments], capture_output=True, text=True)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("this user may not mount a tmpfs")
    assert done.returncode == 0, done.stderr
    assert "the local copy of a shard cannot be stored (found No space left on device)" in done.stdout
    assert done.stdout.endswith("False False\n")


# ---- commands --------------------------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda path: None,
    "flipped": lambda path: flip(path, path.stat().st_size // 2),
    "truncated": lambda path: os.truncate(path, 5000),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 512),
    "missing": lambda path: path.unlink(),
    "stray": lambda path: shutil.copyfile(path, path.with_name(f"{'0' * 32}.tar")),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("damage", DAMAGE)
def test_verify_finds_the_same_in_a_remote_cache_as_in_the_folder(
    damage: str, local: Path, s3: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with complete local copies: the server's bytes are verified."""
    monkeypatch.setattr(remote, "BLOCK", 20_000)
    contents(open_cache(upload(local, f"verify-{damage}")))
    shards = Path(shutil.copytree(local, tmp_path / "shards"))
    first = sorted(shards.glob("*.tar"))[0]
    DAMAGE[damage](first)
    fsspec.filesystem("s3").rm_file(f"{BUCKET}/verify-{damage}/{first.name}")
    url = upload(shards, f"verify-{damage}")
    theirs, ours = (run("qwen-cache", "verify", where, "--json") for where in (shards, url))
    assert theirs.code == (damage != "nothing"), theirs.stderr
    assert ours.code == (damage not in ("nothing", "stray")), ours.stderr
    expected = [{**finding, "where": finding["where"].replace(str(shards), url)} for finding in faults(theirs)]
    if damage == "stray":  # in object storage, replaced shards and those of unfinished builds stay beside the others
        expected = []
    assert faults(ours) == expected


def faults(result: Any) -> list[dict[str, str]]:
    return list(json.loads(result.stdout)["findings"])


def test_verify_by_http_needs_no_listing(served: Server) -> None:
    assert run("qwen-cache", "verify", served.url).code == 0
    path = sorted(served.folder.glob("*.tar"))[0]
    flip(path, 3000)
    assert {finding["rule"] for finding in faults(run("qwen-cache", "verify", served.url, "--json"))} >= {"F6"}
    assert run("qwen-cache", "verify", f"{served.url}/nothing").code == 2


def test_inspect_says_the_same_and_opens_no_shard(served: Server, local: Path) -> None:
    theirs, ours = (json.loads(run("qwen-cache", "inspect", w, "--json").stdout) for w in (local, served.url))
    assert ours == {**{k: v for k, v in theirs.items() if k != "garbage_bytes"}, "cache": served.url}
    assert served.requests == []
    assert "4, 1 with an edit mask" in run("qwen-cache", "inspect", served.url).stdout


def test_commands_of_a_user_on_s3(s3: tuple[str, int], local: Path) -> None:
    url = upload(local, "commands")
    done = command("qwen-cache", "verify", url, fresh=False)
    assert (done.code, done.stdout) == (0, "")
    assert f"{url}: OK: all checksums match" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Unclosed" not in done.stderr


@pytest.mark.parametrize("url", ["s3://", "s3:///", "gs://"])
def test_a_destination_has_a_bucket(url: str) -> None:
    result = run("qwen-cache", "gc", url)
    assert (result.code, result.stdout) == (2, "")
    assert "no bucket is named (expected such as s3://BUCKET/NAME)" in result.stderr


@pytest.mark.parametrize("arguments", [("gc",), ("build", "data", "--model", "model", "--out"), ("gc", "--dry-run")])
@pytest.mark.parametrize("url", ["https://host/shards", "hf://models/a/b/shards", "zip://shards::s3://bucket/a.zip"])
def test_nothing_is_written_where_no_write_is_conditional(
    arguments: tuple[str, ...], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("qwen-cache", *arguments, url)
    assert result.code == 2
    assert f"{url}: caches are not written there (expected a local folder, s3://, gs:// or hf://da" in result.stderr
    assert "→ build into a local folder and copy that: shards and index first, cache.json last" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_training_from_s3_is_training_from_the_folder(
    s3: tuple[str, int], local: Path, tiny_model: Callable[[str], Path], tmp_path: Path, copies: Path
) -> None:
    """The same losses and the same LoRA, bit for bit; the copies stay where the settings say."""
    outcomes = []
    for where in (str(local), upload(local, "train")):
        AcceleratorState._reset_state(reset_partial_state=True)
        out = tmp_path / f"out-{len(outcomes)}"
        settings = {
            "train.output_dir": out,
            "train.mixed_precision": "no",
            "train.max_steps": 4,
            "train.batch_size": 2,
            "logging.report_to": "none",
            "cache.local_copies": tmp_path / "mine",
            "cache.local_copies_size": "1MB",
        }
        options = itertools.chain(*(("--set", f"{name}={value}") for name, value in settings.items()))
        result = run("qwen-train", "run", where, "--model", tiny_model("edit-plus"), *options)
        assert result.code == 0, result.stderr
        lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        outcomes.append(([json.loads(line)["loss"] for line in lines], (out / "pytorch_lora_weights.safetensors")))
    AcceleratorState._reset_state(reset_partial_state=True)
    (losses, lora), (other_losses, other_lora) = outcomes
    assert losses == other_losses
    assert lora.read_bytes() == other_lora.read_bytes()
    assert list((tmp_path / "mine").glob("*.part"))
    assert not copies.exists()
