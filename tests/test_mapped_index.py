"""A large index is mapped from a file of its own, with the same answers as in memory, whatever happens to that file."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_cache import Cache, open_cache
from qwen_cache.errors import IndexFileError
from qwen_cache.format import directory, index, rows, update
from qwen_cache.format import directory as mapped_index
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import index_schema, write_index
from qwen_cache.format.rows import Keys, ListedSample, ListedSamples, first_of_each, hash_words, taken
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update, read_existing
from qwen_cache.format.verify import verify_cache
from qwen_cache.storage.remote import Url

from .support.paths import ROOT

EXAMPLE = ROOT / "schemas" / "examples" / "valid" / "cache.v2"
GROUP = 4  # rows; the example has 6


@pytest.fixture
def is_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The example counts as a large index; the folder of its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(mapped_index, "ROWS_IN_MEMORY", GROUP)
    for module in (index, rows, update):
        monkeypatch.setattr(module, "ROW_GROUP", GROUP)
    return tmp_path / "qwen-cache" / "indexes"


def answers(cache: Cache) -> list[object]:
    each = [[row, cache[row.meta.key].name] for row in (cache.row(i) for i in range(len(cache)))]
    return [each, list(cache.rows()), cache.table.to_pylist(), dict(cache.keyed_rows), list(cache.keyed_rows)]


IN_MEMORY = answers(open_cache(EXAMPLE))


def test_a_mapped_index_gives_the_same_answers(is_large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert answers(open_cache(EXAMPLE)) == IN_MEMORY
    (file,) = is_large.iterdir()
    monkeypatch.delattr(mapped_index, "read_batches")  # the second time, the file is enough
    cache = open_cache(EXAMPLE)
    assert cache.table["key"].num_chunks == 2
    assert answers(cache) == IN_MEMORY
    assert file.name == f"{cache.manifest.index.xxh3_128}-v2.arrow"
    assert not verify_cache(EXAMPLE)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_one_bit_changed(data: bytes) -> bytes:
    at = random.Random(0).randrange(len(data) // 4, len(data) - 100)
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def of_other_columns(data: bytes) -> bytes:
    """Whole, but from a version of this program with other columns."""
    sink, table = pa.BufferOutputStream(), pa.ipc.open_file(pa.py_buffer(data[:-16])).read_all().drop(["prompt"])
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    whole: bytes = sink.getvalue().to_pybytes()
    return whole + bytes.fromhex(content_hash(whole))


def without_rows(data: bytes) -> bytes:
    return bytes.fromhex(content_hash(b""))


def of_something_else(data: bytes) -> bytes:
    return b"something" + bytes.fromhex(content_hash(b"something"))


DAMAGE = [cut, with_one_bit_changed, of_other_columns, without_rows, of_something_else, lambda _: b""]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_made_again(damage: Callable[[bytes], bytes], is_large: Path) -> None:
    open_cache(EXAMPLE)
    (file,) = is_large.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert file.read_bytes() != good
    assert answers(open_cache(EXAMPLE)) == IN_MEMORY
    assert file.read_bytes() == good


def test_where_the_file_cannot_be_written_the_index_is_read(is_large: Path) -> None:
    is_large.parent.write_text("a file where the folder would be")
    assert answers(open_cache(EXAMPLE)) == IN_MEMORY


def test_a_link_is_not_followed(is_large: Path, tmp_path: Path) -> None:
    open_cache(EXAMPLE)
    (file,) = is_large.iterdir()
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert answers(open_cache(EXAMPLE)) == IN_MEMORY
    assert not file.is_symlink()


def test_an_index_that_the_manifest_does_not_name_is_refused_although_its_file_is_there(
    is_large: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "cache"))
    open_cache(folder)
    data = (folder / "index.parquet").read_bytes()
    (folder / "index.parquet").write_bytes(data[:-1] + b"2")
    with pytest.raises(IndexFileError, match=r"the index is not the one that the manifest names .*another hash"):
        open_cache(folder)
    (folder / "index.parquet").write_bytes(data + b"2")
    with pytest.raises(IndexFileError, match="a larger file"):
        open_cache(folder)


def test_the_least_recently_used_files_are_removed(is_large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_large.mkdir(parents=True)
    for age, name in enumerate(("newer.arrow", "older.arrow", f".left.arrow.{1 << 30}.tmp", "new.tmp", "other"), 1):
        (is_large / name).write_bytes(bytes(1000))
        time = 1_700_000_000 - age if name != "new.tmp" else 2_000_000_000
        os.utime(is_large / name, (time, time))
    open_cache(EXAMPLE)
    (file,) = set(is_large.glob("*-v2.arrow"))
    assert {path.name for path in is_large.iterdir()} == {file.name, "newer.arrow", "older.arrow", "new.tmp", "other"}
    size = file.stat().st_size
    file.unlink()
    monkeypatch.setattr(mapped_index, "LIMIT", size + 3000)  # of new.tmp, other and one more
    open_cache(EXAMPLE)
    assert {path.name for path in is_large.iterdir()} == {file.name, "newer.arrow", "new.tmp", "other"}
    file.unlink()
    monkeypatch.setattr(mapped_index, "LIMIT", 1)
    open_cache(EXAMPLE)
    assert {path.name for path in is_large.iterdir()} == {file.name, "new.tmp", "other"}


# ---- the next index --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 0, 5), (2, 4, 1, 0)])
def test_an_updated_index_is_the_one_of_its_rows(order: tuple[int, ...], is_large: Path, tmp_path: Path) -> None:
    """Byte for byte, for rows that stay, move or change their names, although rows that stay are never parsed."""
    folder = Path(shutil.copytree(EXAMPLE, tmp_path / "cache"))
    existing = read_existing(folder, 2)
    before = [existing.rows.row(i) for i in range(6)]
    listed = [ListedSample(f"new {i}", before[i].meta.key, i + 1) for i in order]
    changed = plan_update(folder, existing, 2, listed)
    staging = open_staging(changed, "test", 1 << 30)
    for key in changed.order:
        assert update.copy_if_there(changed, staging, key)
    manifest = commit_update(changed, staging, existing.recipes, {})
    after = list(open_cache(folder).rows())
    assert [(row.name, row.meta, row.source_rows) for row in after] == [
        (f"new {i}", before[i].meta, i + 1) for i in order
    ]
    data = (folder / "index.parquet").read_bytes()
    assert data == write_index(after, 2)
    assert (manifest.index.samples, manifest.index.xxh3_128) == (len(order), content_hash(data))
    assert not verify_cache(folder)
    kept = {before[i].meta.key for i in order} - set(changed.order)
    shards = {row.shard for row in before if row.meta.key in kept}
    assert shards == {s.name for s in manifest.shards} & {s.name for s in existing.manifest.shards}


def test_equal_rows_give_equal_bytes_however_they_are_cut(is_large: Path) -> None:
    rows_ = list(open_cache(EXAMPLE).rows()) * 2
    schema = index_schema(2)
    whole = index.table_of(rows_, 2, schema)
    cuts = [whole[0:4], pa.concat_tables([whole[4:5], whole[5:8]]), whole[8:12]]
    assert index.write_tables(lambda: cuts, schema) == write_index(rows_, 2)


# ---- columns ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 29), max_size=40), st.sampled_from([1, 7, 30]))
def test_taken_rows_are_those_of_pyarrow(positions: list[int], chunk: int) -> None:
    table = pa.table({"a": [str(i) for i in range(30)], "b": [[i, i] if i % 3 else None for i in range(30)]})
    table = pa.Table.from_batches(table.to_batches(chunk))
    assert taken(table, np.array(positions, np.int64)).to_pylist() == [table.to_pylist()[i] for i in positions]


def test_many_single_rows_are_taken_at_once() -> None:
    table = pa.table({"a": list(range(9000))})
    table = pa.Table.from_batches(table.to_batches(1000))
    positions = np.random.default_rng(0).permutation(9000)
    assert taken(table, positions)["a"].to_numpy().tolist() == positions.tolist()
    assert taken(table, positions)["a"].num_chunks == 1


halves = st.sampled_from(["0" * 16, "0" * 15 + "1", "f" * 16, "8" + "0" * 15])
hashes = st.lists(st.builds(str.__add__, halves, halves), max_size=12)


@given(hashes, hashes)
def test_keys_are_found_where_they_are(keys: list[str], wanted: list[str]) -> None:
    """Also where the first halves are the same."""
    words = hash_words(pa.chunked_array([pa.array(keys[:3], pa.string()), pa.array(keys[3:], pa.string())]), "")
    found = Keys(words)
    expected = [keys.index(key) if key in keys else -1 for key in wanted]
    assert [found.find(key) for key in wanted] == expected
    of_wanted = hash_words(pa.chunked_array([pa.array(wanted, pa.string())]), "")
    assert [keys[i] if i >= 0 else None for i in found.find_all(of_wanted)] == [
        k if k in keys else None for k in wanted
    ]
    assert [key in found for key in wanted] == [key in keys for key in wanted]
    firsts = [i for i, key in enumerate(keys) if keys.index(key) == i]
    assert np.flatnonzero(first_of_each(words)).tolist() == firsts
    assert sorted(found.repeated().tolist() + firsts) == list(range(len(keys)))
    assert (found.find("no key"), 7 in found, len(found)) == (-1, False, len(keys))


@pytest.mark.parametrize("key", [None, "", "0" * 31, "0" * 33, "A" * 32, "g" + "0" * 31, "é" + "0" * 30])
def test_what_is_no_hash_is_refused(key: str | None) -> None:
    column = pa.chunked_array([pa.array(["0" * 32, key], pa.string())])
    with pytest.raises(IndexFileError, match=r"an index: a key is not an xxh3-128 \[F7\]"):
        hash_words(column, "an index")


def test_a_listing_is_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP", 2)
    some = [ListedSample(f"{i}", f"{i:032x}", i) for i in range(5)]
    listing = ListedSamples.of(iter(some))
    assert list(listing) == some
    assert listing == ListedSamples.of(some[:3]) + ListedSamples.of(some[3:])
    assert listing != ListedSamples.of(some[:4])
    assert (len(listing), some[2] in listing, ListedSample("", "") in listing) == (5, True, False)
    assert len(Existing.empty(2).listed) == 0


def test_a_large_index_of_a_server_is_downloaded_to_a_file(is_large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, files = "memory://mapped-index", fsspec.filesystem("memory")
    files.put(f"{EXAMPLE}/", "/mapped-index/", recursive=True)
    monkeypatch.setattr(directory, "LARGEST_IN_MEMORY", 0)
    size = open_cache(EXAMPLE).manifest.index.bytes
    asked: list[int] = []
    download = Url.download
    monkeypatch.setattr(Url, "download", lambda url, size: asked.append(size) or download(url, size))
    assert open_cache(address).table.to_pylist() == open_cache(EXAMPLE).table.to_pylist()
    assert asked == [size]
    files.pipe("/mapped-index/index.parquet", b"PAR1")
    with pytest.raises(IndexFileError, match=r"the index is not the one that the manifest names .*another hash"):
        open_cache(address)
    files.rm("/mapped-index/index.parquet")
    with pytest.raises(IndexFileError, match="no file"):
        open_cache(address)
