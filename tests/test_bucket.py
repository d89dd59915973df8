"""A cache is built into a bucket as into a folder: equal samples, one builder at a time commits, nothing is lost.

The server is real: moto speaks S3. The judge is the same build into a folder.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from errno import EINVAL
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import s3fs
from botocore.exceptions import ClientError

from qwen_cache import open_cache
from qwen_cache.errors import ConflictError, QwenCacheError
from qwen_cache.format import directory
from qwen_cache.format import remote as format_remote
from qwen_cache.format.cache import RemoteShards
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest, Shard
from qwen_cache.format.remote import UPLOADS, WAITING, Uploads
from qwen_cache.storage import remote, stores
from qwen_cache.storage.remote import Url
from qwen_cache.storage.stores import Listing, S3Store

from .support import fake_lanes
from .support.caches import SMALL
from .support.commands import Result, refused, run
from .support.fake_lanes import FakeLanes
from .support.marks import slow
from .support.processes import popen
from .support.server import BUCKET, Proxy, fresh_clients, serving
from .support.sources import write_pairs
from .support.waiting import wait_until

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
    return f"s3://{BUCKET}/{re.sub('[^a-z]', '-', request.node.name)}/shards"


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


def written_in_order(requests: list[str], url: str) -> None:
    """Each shard after its part, the index after all shards, then cache.json, then the copy of the index."""
    top = f"put_object {url.removeprefix(f's3://{BUCKET}/')}/"
    put = [name.removeprefix(top) for name in requests if name.startswith(top) and "qwen.yaml" not in name]
    shards = {name.removesuffix(".tar"): place for place, name in enumerate(put) if name.endswith(".tar")}
    parts = {Path(name).stem: place for place, name in enumerate(put) if name.startswith(".staging/")}
    assert parts.keys() == shards.keys() > set()
    assert all(parts[shard] < place for shard, place in shards.items())
    index = f"index-{open_cache(url).manifest.index.xxh3_128}.parquet"
    assert put[-3:] == [index, MANIFEST_NAME, "index.parquet"]


def valid(url: str) -> None:
    checked = run("qwen-cache", "verify", url)
    assert checked.code == 0, checked.stdout + checked.stderr


def test_a_build_into_a_bucket(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path, home: Path, requests: Requests
) -> None:
    """Equal to one into a folder, byte for byte; the second one does nothing; a changed source adds what is new."""
    model = tiny_model("edit-plus")
    result = build(pairs, url, model)
    assert result.code == 0, result.stderr
    written_in_order(requests.names, url)
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


# ---- what may happen in between --------------------------------------------------------------------------------------

WRITES = {"put_object", "upload_part", "create_multipart_upload", "complete_multipart_upload", "delete_objects"}


class Requests:
    """The requests of this process that change a bucket; from the one with the number `last`, the network is dead.

    With `arrives`, that one still reaches the server, but its answer is lost. A `fault` is raised in place of every
    first attempt of a request, of every third, and so on; or after it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.last: float = float("inf")
        self.arrives = False
        self.fault: tuple[Exception, bool] | None = None
        call = s3fs.S3FileSystem._call_s3

        async def counted(files: Any, method: str, *arguments: Any, **options: Any) -> Any:
            if method in WRITES:
                name = f"{method} {options.get('Key', '')} {options.get('PartNumber', '')}".rstrip()
                self.names.append(name)
                if len(self.names) > self.last:
                    if self.arrives and len(self.names) == self.last + 1:
                        await call(files, method, *arguments, **options)
                    raise PermissionError("the network is dead")
                if self.fault and self.names.count(name) % 2:
                    error, arrives = self.fault
                    if arrives:
                        await call(files, method, *arguments, **options)
                    raise error
            return await call(files, method, *arguments, **options)

        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
        monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", fsspec.asyn.sync_wrapper(counted))

    def reset(self) -> None:
        self.names, self.last, self.arrives = [], float("inf"), False


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


def change(pairs: Path, *names: str) -> None:
    for name in names:
        (pairs / "target_images" / f"{name}.txt").write_text(f"another prompt for {name}", encoding="utf-8")


@pytest.fixture
def changed(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path
) -> tuple[str, Callable[[], Result], Path]:
    """A cache in a bucket; the build of its source, in which three prompts have changed; that build in a folder."""
    model = tiny_model("edit-plus")
    assert build(pairs, url, model).code == 0
    change(pairs, "cat", "china", "flower")
    assert build(pairs, tmp_path / "expected", model).code == 0
    fast.clear()
    return url, lambda: build(pairs, url, model), tmp_path / "expected"


def every_step(requests: Requests, again: Callable[[], Result]) -> int:
    """The number of requests of a build."""
    requests.reset()
    result = again()
    assert result.code == 0, result.stderr
    return len(requests.names)


@pytest.mark.parametrize(("machine", "arrives"), [("another", False), slow("same", True)])
def test_a_build_that_dies_at_any_request_continues(
    arrives: bool,
    machine: str,
    changed: tuple[str, Callable[[], Result], Path],
    requests: Requests,
    fast: list[FakeLanes],
    home: Path,
    request: pytest.FixtureRequest,
) -> None:
    """The old dataset or the new one is valid; the same command encodes nothing again that was uploaded."""
    url, again, expected = changed
    old, bucket = open_cache(url).identity, fsspec.filesystem("s3")
    before = {name: bucket.cat_file(f"{url}/{name}") for name in files(url)}
    steps = every_step(requests, again)
    assert steps > 12
    assert open_cache(url).identity == open_cache(expected).identity != old
    is_slow = request.node.get_closest_marker("slow") is not None
    for last in range(steps) if is_slow else (steps - 4,):
        bucket.rm(url, recursive=True)
        for name, data in before.items():
            bucket.pipe_file(f"{url}/{name}", data)
        bucket.invalidate_cache()
        shutil.rmtree(home, ignore_errors=True)
        requests.reset()
        requests.last, requests.arrives = last, arrives
        fast.clear()
        assert again().code == 2, last
        first = {name for lanes in fast for name in lanes.encoded}
        requests.reset()
        valid(url)
        assert open_cache(url).identity in (old, open_cache(expected).identity)
        there = {name for name in files(url) if name.endswith(".tar")} - before.keys()
        parts = {Path(name).stem for name in files(url) if name.startswith(".staging/")}
        uploaded = len([name for name in there if Path(name).stem in parts])
        if machine == "another":
            shutil.rmtree(home, ignore_errors=True)
        fast.clear()
        result = again()
        assert result.code == 0, result.stderr
        encoded = [name for lanes in fast for name in lanes.encoded]
        assert len(encoded) <= 3 - uploaded
        assert machine == "another" or not first.intersection(encoded)
        valid(url)
        assert open_cache(url).identity == open_cache(expected).identity
        assert content(url) == content(expected)
        assert "nothing to do" in result.stderr or not [name for name in files(url) if name.startswith(".staging/")]
        kept = f"index-{open_cache(url).manifest.index.xxh3_128}.parquet"
        assert bucket.cat_file(f"{url}/index.parquet") == bucket.cat_file(f"{url}/{kept}")


FAULTS = {
    "reset": ConnectionResetError("connection reset by peer"),
    "time-out": TimeoutError(),
    "internal error": OSError(121, "We encountered an internal error"),
    "slow down": OSError(16, "SlowDown"),
}


@pytest.mark.parametrize("arrives", [slow(False), True])
@pytest.mark.parametrize("fault", ["reset", slow("time-out"), slow("internal error"), slow("slow down")])
def test_a_fault_at_every_request_is_not_noticed(
    fault: str,
    arrives: bool,
    changed: tuple[str, Callable[[], Result], Path],
    requests: Requests,
    fast: list[FakeLanes],
) -> None:
    """Also when the request did its work and only the answer was lost."""
    url, again, expected = changed

    requests.fault = FAULTS[fault], arrives
    result = again()
    assert result.code == 0, result.stderr
    assert sorted(fast[-1].encoded) == ["cat", "china", "flower"]
    requests.fault = None
    valid(url)
    assert content(url) == content(expected)


def bad_digest() -> Exception:
    """s3fs's error for a body that did not arrive whole."""
    error = OSError(EINVAL, "The Content-MD5 you specified did not match what we received.")
    error.__cause__ = ClientError({"Error": {"Code": "BadDigest"}}, "PutObject")
    return error


@pytest.mark.parametrize("fault", [(FAULTS["reset"], True), (bad_digest(), False)], ids=["reset", "bad digest"])
def test_a_fault_at_every_request_of_an_upload_by_parts_is_not_noticed(
    fault: tuple[Exception, bool],
    url: str,
    s3: object,
    requests: Requests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "PART_BYTES", 5 << 20)
    large, data = Url(url) / "large.tar", bytes(range(256)) * 22_000
    (tmp_path / "large.tar").write_bytes(data)
    requests.fault = fault
    S3Store().put_file(large, tmp_path / "large.tar", {Url(url) / "part": b"first"}, Event())
    requests.fault = None
    calls = {"put_object": 2, "create_multipart_upload": 2, "upload_part": 4, "complete_multipart_upload": 2}
    assert Counter(name.partition(" ")[0] for name in requests.names) == calls
    assert large.read_bytes() == data


def test_a_lost_answer_to_the_end_of_an_upload_is_told_from_a_lost_upload(
    url: str, s3: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another attempt finds no upload in both cases, but the file only in one."""

    def no_such_upload(*_: Any, **options: Any) -> None:
        raise FileNotFoundError

    S3Store().put(file := Url(url) / "large.tar", b"12345")
    monkeypatch.setattr(stores, "_call", no_such_upload)
    stores._complete(file, "upload", [], 5)
    for other, size in ((file, 6), (Url(url) / "none.tar", 5)):
        with pytest.raises(FileNotFoundError):
            stores._complete(other, "upload", [], size)


def test_an_upload_by_parts_that_fails_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the bucket would keep its parts, unseen and paid for."""
    methods: list[str] = []

    def call(url: Url, what: str, method: str, *_: Any, **options: Any) -> dict[str, str]:
        methods.append(method)
        if method == "upload_part":
            raise QwenCacheError("writing is refused")
        return {"UploadId": "1"}

    (tmp_path / "large.tar").write_bytes(b"12345")
    monkeypatch.setattr(stores, "_call", call)
    with pytest.raises(QwenCacheError, match="writing is refused"):
        stores._put_parts(Url("s3://bucket/large.tar"), tmp_path / "large.tar", 5, Event())
    assert methods == ["create_multipart_upload", "upload_part", "abort_multipart_upload"]


@pytest.mark.parametrize("later", ["add", "wait"])
def test_an_upload_that_fails_ends_the_build(later: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the next shards are sealed, or at the end."""

    def put_shard(*_: Any) -> None:
        raise QwenCacheError("writing is refused")

    monkeypatch.setattr(format_remote, "put_shard", put_shard)
    uploads, stored = Uploads(Url("s3://bucket/shards"), "build", 2, Listing({}, 0)), (Shard("0.tar", 0, 0), [])

    def add_all() -> None:
        for _ in range(UPLOADS + WAITING + 1):
            uploads.add(None, stored)

    uploads.add(None, stored)
    with pytest.raises(QwenCacheError, match="writing is refused"):
        (uploads.wait if later == "wait" else add_all)()
    uploads.stop()


def test_parts_of_samples_that_are_not_committed_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit in between has some shards alone; another machine continues from the parts of the others."""
    folder, removed = Url("s3://bucket/shards"), list[str]()
    monkeypatch.setattr(format_remote, "store_of", lambda _: SimpleNamespace(delete=removed.extend))
    uploads = Uploads(folder, "build", 2, Listing({}, 0))
    shards = [Shard(f"{number:032x}.tar", 2, 1) for number in range(3)]
    keys = (("a", "b"), ("b", "c"), ("d", "e"))
    entries: list[list[Any]] = [[SimpleNamespace(meta=SimpleNamespace(key=key)) for key in each] for each in keys]
    uploads.parts = list(zip(shards, entries, strict=True))
    uploads.remove_parts({"a", "b", "d"})
    assert removed == [folder / f".staging/build/{0:032x}.parquet"]
    uploads.stop()


# ---- two builders ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", [slow("while it encodes"), "at the last moment"])
def test_of_two_builders_one_commits(
    when: str,
    url: str,
    pairs: Path,
    tiny_model: Any,
    fast: list[FakeLanes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other is told so, and its next run reuses its shards: nothing is encoded twice."""
    model, other, commits = tiny_model("edit-plus"), write_pairs(tmp_path / "other"), []
    change(other, "cat")
    module, name = (directory, "commit") if when == "while it encodes" else (stores, "_s3_write_over")
    original = getattr(module, name)

    def overtaken(*arguments: Any, **options: Any) -> Any:
        if not commits and (when == "while it encodes" or str(arguments[0]).endswith(MANIFEST_NAME)):
            commits.append("")
            commits.append(open_at(other))
        return original(*arguments, **options)

    def open_at(source: Path) -> str:
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
            result = build(source, url, model)
            assert result.code == 0, result.stderr
        return open_cache(url).identity

    monkeypatch.setattr(module, name, overtaken)
    result = build(pairs, url, model)
    assert result.code == 2
    assert f"{url}: another build has committed to this cache since this one read it" in result.stderr
    assert (
        "→ run the same command again: its shards are reused. Builds of different sources replace each other"
        in result.stderr
    )
    assert open_cache(url).identity == commits[1]
    valid(url)
    encoded = len(fast)
    assert build(pairs, url, model).code == 0
    assert len(fast) == encoded, "the shards of the first run are there"
    assert build(pairs, tmp_path / "expected", model).code == 0
    assert content(url) == content(tmp_path / "expected")
    valid(url)


def test_a_commit_after_another_is_refused_and_a_killed_one_is_finished(
    url: str, s3: object, built: Callable[[str], Path]
) -> None:
    """Samples that the other has committed stay; the copy of its index follows."""
    here, there, store = built("edit-plus"), Url(url), S3Store()
    manifest, index = open_cache(here).manifest, (here / "index.parquet").read_bytes()
    other = replace(manifest, written_by={"qwen-cache": "of the other"}).to_bytes()
    store.put(there / MANIFEST_NAME, other)
    with pytest.raises(ConflictError, match="another build has committed to this cache since this one read it"):
        format_remote.commit(there, manifest, index, Manifest.empty(2))
    assert (there / MANIFEST_NAME).read_bytes() == other
    store.put(there / format_remote.index_name(manifest), index)
    for before in (None, b"of the commit before"):
        store.delete([there / "index.parquet"])
        if before:
            store.put(there / "index.parquet", before)
        format_remote.finish_commit(there)
        assert (there / "index.parquet").read_bytes() == index


# ---- other commands --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_move_to_other_shards_without_being_encoded(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path
) -> None:
    """A shard that loses a sample is written again; a build that returns to earlier settings finds replaced shards."""
    model, one_shard = tiny_model("edit-plus"), ("--set", "cache.shard_size=1GB")
    assert build(pairs, url, model, *one_shard).code == 0
    old = content(url)
    change(pairs, "cat")
    result = build(pairs, url, model, *one_shard, "--json")
    assert json.loads(result.stdout)["encoded"] == 1, result.stderr
    assert fast[-1].encoded == ["cat"]
    assert build(pairs, tmp_path / "expected", model, *one_shard).code == 0
    assert content(url) == content(tmp_path / "expected")
    valid(url)
    loaded = len(fast)
    (pairs / "target_images" / "cat.txt").write_text("mirror the cat, 然后 keep the second image's light", "utf-8")
    back = build(pairs, url, model, *one_shard, "--json")
    assert (json.loads(back.stdout)["copied"], len(fast)) == (1, loaded), back.stderr
    assert content(url) == old
    valid(url)


@pytest.mark.slow
def test_merge_into_a_bucket(
    url: str,
    pairs: Path,
    tiny_model: Any,
    fast: list[FakeLanes],
    tmp_path: Path,
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shards of the same store are copied there, local ones uploaded; a second merge does nothing."""
    model = tiny_model("edit-plus")
    assert build(pairs, tmp_path / "all", model).code == 0
    assert build(pairs, f"{url}-1", model, "--slice", "1/2").code == 0
    assert build(pairs, tmp_path / "2", model, "--slice", "2/2").code == 0
    monkeypatch.setattr(RemoteShards, "bytes_of", None)  # no sample is downloaded
    requests.reset()
    merged = run("qwen-cache", "merge", f"{url}-1", tmp_path / "2", "--out", url)
    assert merged.code == 0, merged.stderr
    shards = [name for name in requests.names if name.startswith("put_object") and name.endswith(".tar")]
    assert len(shards) == 2, "those of the local slice"
    assert open_cache(url).identity == open_cache(tmp_path / "all").identity
    assert content(url) == content(tmp_path / "all")
    valid(url)
    again = run("qwen-cache", "merge", f"{url}-1", tmp_path / "2", "--out", url)
    assert "nothing to do" in again.stderr
    assert run("qwen-cache", "merge", url, "--out", url).code == 2


@pytest.mark.slow
def test_migrate_a_cache_in_a_bucket(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path
) -> None:
    model = tiny_model("edit-plus")
    for place in (url, tmp_path / "shards"):
        assert build(pairs, place, model, "--format", "v1").code == 0
        migrated = run("qwen-cache", "migrate", "v1", "v2", place, *SHARDS)
        assert migrated.code == 0, migrated.stderr
    assert [shard.name for shard in open_cache(url).manifest.shards] == [
        shard.name for shard in open_cache(tmp_path / "shards").manifest.shards
    ]
    valid(url)


@pytest.mark.slow
def test_a_validation_cache_goes_beside_the_cache(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path
) -> None:
    prompts = ("--set", "validation.prompts=[{prompt: a cat, control: " + str(pairs / "control_images/cat.png") + "}]")
    result = build(pairs, url, tiny_model("edit-plus"), *prompts)
    assert result.code == 0, result.stderr
    assert [sample.prompt for sample in open_cache(f"{url}/validation")] == ["a cat"]
    assert len(open_cache(url)) == 4
    valid(url)
    valid(f"{url}/validation")
    assert run("qwen-cache", "gc", url, "--grace-hours", "0").code == 0
    valid(f"{url}/validation")


def test_gc_spares_what_a_build_may_be_at_work_on(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However old a shard of an unfinished build is, it stays as long as the build has written anything since."""
    requests.last = 11  # before the index
    assert build(pairs, url, tiny_model("edit-plus")).code == 2
    requests.reset()
    listing = stores.S3Store.listing
    old: dict[str, float] = {}

    def aged(self: Any, folder: Any) -> Listing:
        found = listing(self, folder)
        days_ago = {path: replace(file, modified=found.now - old.get(path, 0)) for path, file in found.files.items()}
        return Listing(days_ago, found.now)

    monkeypatch.setattr(stores.S3Store, "listing", aged)
    shards = [name for name in files(url) if name.endswith(".tar")]
    parts = [name for name in files(url) if name.startswith(".staging/")]
    assert len(shards) == len(parts) == 4
    stray = "0" * 32 + ".tar"
    fsspec.filesystem("s3").pipe_file(f"{url}/{stray}", b"of an earlier build")
    day = 24 * 3600
    old |= dict.fromkeys([stray, *shards, *parts[1:]], 10 * day)
    result = json.loads(run("qwen-cache", "gc", url, "--json").stdout)
    assert result["files"] == {f"{url}/{stray}": 19}
    assert result["removed"]
    assert sorted(files(url)) == sorted([*shards, *parts])
    old |= dict.fromkeys(parts, 2 * day)
    assert run("qwen-cache", "gc", url, "--grace-hours", "49").code == 0
    assert len(files(url)) == len([*shards, *parts])
    assert "spared" not in run("qwen-cache", "gc", url).stderr
    assert files(url) == {}


def test_gc_during_a_commit_is_noticed(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grace period it may remove shards between the last look of a builder and its swap: that build fails.

    The next one encodes what is missing.
    """
    model, write, removed = tiny_model("edit-plus"), stores._s3_write_over, []

    def late(target: Url, *arguments: Any) -> bool:
        if not removed and str(target).endswith(MANIFEST_NAME):
            removed.append(json.loads(run("qwen-cache", "gc", url, "--grace-hours", "0", "--json").stdout))
        return write(target, *arguments)

    monkeypatch.setattr(stores, "_s3_write_over", late)
    result = build(pairs, url, model)
    assert len([name for name in removed[0]["files"] if name.endswith(".tar")]) == 4
    refused(
        result,
        "4 shards were removed while this build committed them (found no such file)",
        "→ run the same command again: it encodes their samples again. `gc --grace-hours 0` is for a cache that nobody "
        "writes to",
    )
    assert json.loads(build(pairs, url, model, "--json").stdout)["encoded"] == 4
    assert build(pairs, tmp_path / "expected", model).code == 0
    assert content(url) == content(tmp_path / "expected")
    assert f"index-{open_cache(url).manifest.index.xxh3_128}.parquet" in files(url)
    valid(url)


@pytest.mark.parametrize("moment", ["before it looks again", "after"])
def test_gc_spares_what_is_committed_meanwhile(
    moment: str,
    url: str,
    pairs: Path,
    tiny_model: Any,
    fast: list[FakeLanes],
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or says so, if it is too late: one of the two is told of every loss."""
    model, committed = tiny_model("edit-plus"), []
    requests.last = 11  # before the index
    assert build(pairs, url, model).code == 2
    requests.reset()
    place = (format_remote, "remove_garbage") if moment == "before it looks again" else (stores.S3Store, "delete")
    original = getattr(*place)

    def overtaken(*arguments: Any) -> Any:
        if not committed:
            committed.append(None)
            committed[0] = build(pairs, url, model)
        return original(*arguments)

    monkeypatch.setattr(*place, overtaken)
    result = run("qwen-cache", "gc", url, "--grace-hours", "0")
    assert committed[0].code == 0, committed[0].stderr
    if moment == "before it looks again":
        assert result.code == 0, result.stderr
    else:
        refused(
            result,
            "files were removed that a build has committed meanwhile (found 4, such as ",
            "→ run that build again: it encodes their samples again. `gc --grace-hours 0` is for a cache that nobody "
            "writes to",
        )
        assert json.loads(build(pairs, url, model, "--json").stdout)["encoded"] == 4
    valid(url)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_the_grace_period_is_for_object_storage(tmp_path: Path) -> None:
    refused(run("qwen-cache", "gc", tmp_path, "--grace-hours", "0"), f"{tmp_path}: --grace-hours is for object storage")


def test_where_nothing_can_be_built(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is encoded."""
    model = tiny_model("edit-plus")
    refused(build(pairs, "s3://no-such-bucket/shards", model), "there is no such bucket", "→ create it, or check")
    refused(build(pairs, url, model, "--repair"), "--repair works on a local folder", "without --repair")
    call = s3fs.S3FileSystem._call_s3

    async def careless(files: Any, method: str, *arguments: Any, **options: Any) -> Any:
        return await call(files, method, *arguments, **{k: v for k, v in options.items() if k != "IfNoneMatch"})

    monkeypatch.setattr(s3fs.S3FileSystem, "call_s3", fsspec.asyn.sync_wrapper(careless))
    refused(
        build(pairs, url, model),
        f"{url}: this server ignores the condition of a write, so two builders could commit over each other",
        "→ update the server, or build into a local folder and copy that, cache.json last",
    )
    assert (fast, files(url)) == ([], {})


def test_a_shard_that_is_missing(
    url: str, pairs: Path, tiny_model: Any, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples are encoded again; one that is removed at the last moment stops the commit."""
    model = tiny_model("edit-plus")
    assert build(pairs, url, model).code == 0
    lost, *_ = [name for name in files(url) if name.endswith(".tar")]
    fsspec.filesystem("s3").rm_file(f"{url}/{lost}")
    result = build(pairs, url, model, "--json")
    assert json.loads(result.stdout)["encoded"] == 1, result.stderr
    valid(url)
    change(pairs, "cat")
    before, commit = fsspec.filesystem("s3").cat_file(f"{url}/cache.json"), format_remote.commit

    def too_late(folder: Url, manifest: Manifest, *rest: Any) -> None:
        fsspec.filesystem("s3").rm_file(f"{url}/{manifest.shards[0].name}")
        commit(folder, manifest, *rest)

    monkeypatch.setattr(format_remote, "commit", too_late)
    refused(build(pairs, url, model), "a shard of this build is missing", "found no such file")
    assert fsspec.filesystem("s3").cat_file(f"{url}/cache.json") == before


# ---- a real network, and real processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_connections_that_break_in_the_middle_of_an_upload(
    url: str,
    s3: tuple[str, int],
    pairs: Path,
    tiny_model: Any,
    fast: list[FakeLanes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A large shard goes by parts, so a connection that breaks costs one of them."""
    monkeypatch.setattr(stores, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(fake_lanes, "PROMPT_ROWS", 40_000)
    model, one_shard = tiny_model("edit-plus"), ("--set", "cache.shard_size=1GB")
    with serving(Proxy(s3, cuts=4, after=3_000_000, of="requests")) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        fresh_clients()
        result = build(pairs, url, model, *one_shard)
        assert result.code == 0, result.stderr
        assert proxy.cut == 4
    fresh_clients()
    size = open_cache(url).manifest.shards[0].bytes
    assert size > 4 * (5 << 20)
    valid(url)


@pytest.mark.slow
def test_killed_processes(
    url: str, pairs: Path, tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real encoders, two machines: one is killed when its first shard is there, the other encodes the rest."""
    arguments = ["build", pairs, "--out", url, "--model", tiny_model("edit-plus"), *SMALL, *SHARDS]
    program = Path(sys.executable).parent / "qwen-cache"
    with popen([program, *arguments], stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: [name for name in files(url) if name.endswith(".tar")] or process.poll() is not None)
        process.kill()
    first = {name for name in files(url) if name.endswith(".tar")}
    assert first
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another-machine"))
    done = run("qwen-cache", *arguments, "--json")
    assert done.code == 0, done.stderr
    assert json.loads(done.stdout)["encoded"] <= 4 - len(first) or "nothing to do" in done.stderr
    assert first <= {shard.name for shard in open_cache(url).manifest.shards}
    valid(url)


def test_a_full_disk_for_shards_that_wait_for_their_upload_names_their_folder(
    url: str, pairs: Path, tiny_model: Any, home: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=10_000_000, used=0, free=10_000))
    result = build(pairs, url, tiny_model("edit-plus"), "--set", "cache.shard_size=1MB")
    refused(result, f"error: {home}: the disk has too little space for this build (expected about ", "found 10.0 kB)\n")
    assert "→ make room, choose a smaller cache.shard_size, or set XDG_CACHE_HOME to a folder of" in result.stderr
    assert not fast
