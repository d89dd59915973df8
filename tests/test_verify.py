"""`verify` finds every kind of damage, by the rule that it breaks; readers never accept damaged data."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_cache import FormatError, open_cache
from qwen_cache.conformance.loader import write_cache
from qwen_cache.format import directory
from qwen_cache.format import manifest as manifest_module
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import IndexRow, write_index
from qwen_cache.format.manifest import Manifest, parse_manifest, with_checksum
from qwen_cache.format.shard import ShardWriter, tensor_bytes
from qwen_cache.format.verify import verify_cache

from .support.commands import refused, run
from .support.paths import ROOT, load_tool

examples: Any = load_tool("make_examples")


@pytest.fixture
def shards(built: Callable[..., Path], tmp_path: Path) -> Path:
    """A cache that may be damaged."""
    return Path(shutil.copytree(built("edit-plus", ("--set", "cache.shard_size=1")), tmp_path / "shards"))


def findings(shards: Path) -> set[str]:
    """The rules that `verify --json` finds broken; the exit code agrees."""
    result = run("qwen-cache", "verify", shards, "--json")
    document = json.loads(result.stdout)
    assert result.code == (1 if document["findings"] else 0)
    assert document["ok"] is (result.code == 0)
    assert all(finding.keys() == {"rule", "where", "what", "do"} for finding in document["findings"])
    return {finding["rule"] for finding in document["findings"]}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << (offset % 8)
    path.write_bytes(data)


def rewrite(shards: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Change the manifest as JSON, with a new checksum."""
    path = shards / "cache.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(with_checksum(value))


def test_a_fresh_cache_is_clean(shards: Path) -> None:
    assert findings(shards) == set()


def test_no_cache_is_not_a_finding_but_an_error(tmp_path: Path) -> None:
    result = run("qwen-cache", "verify", tmp_path)
    assert result.code == 2
    assert "not a cache" in result.stderr
    staging = tmp_path / ".staging" / "default-v2"
    staging.mkdir(parents=True)
    (staging / "open.tar").touch()
    refused(run("qwen-cache", "verify", tmp_path), "this cache is not finished", "run the same")


class Counted(tuple):  # type: ignore[type-arg]
    """A tuple that counts how often it is walked through."""

    walks = 0

    def __iter__(self) -> Iterator[Any]:
        Counted.walks += 1
        return super().__iter__()


def test_time_grows_with_shards_rows_and_strays_not_with_their_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of shards is walked through a fixed number of times, and a recipe hashed, whatever the cache holds."""
    load, hashed, counts = directory.load, manifest_module.recipe_id, Counter[str]()

    def loaded(folder: Path) -> tuple[Manifest, bytes]:
        manifest, index = load(folder)
        return replace(manifest, shards=Counted(manifest.shards)), index

    def hashing(recipe: dict[str, Any]) -> str:
        counts["recipe"] += 1
        return hashed(recipe)

    monkeypatch.setattr(directory, "load", loaded)
    monkeypatch.setattr(manifest_module, "recipe_id", hashing)
    found = []
    for count in (2, 7):
        cache = tmp_path / str(count)
        examples.write_cache(cache, 2, [examples.make(f"{i}", f"edit {i}", (1, 1)) for i in range(count)], 1)
        for i in range(count):
            shutil.copy(cache / examples.first_shard(cache), cache / f"stray {i}.tar")
        Counted.walks = 0
        counts.clear()
        assert [fault.rule for fault in verify_cache(cache)] == ["F17"] * count
        found.append((Counted.walks, dict(counts)))
    assert found[0] == found[1]


def test_a_cache_that_changed_meanwhile_is_not_called_damaged(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build and `gc` after the manifest was read: its shards are removed, and others are there."""
    load = directory.load

    def racing(folder: Path) -> tuple[Manifest, bytes]:
        read = load(folder)
        monkeypatch.setattr(directory, "load", load)
        shutil.rmtree(folder)
        examples.write_cache(folder, 2, [examples.EDIT], 1)
        return read

    monkeypatch.setattr(directory, "load", racing)
    result = run("qwen-cache", "verify", shards)
    assert result.code == 2
    expected = f"error: {shards}: the cache was changed while it was checked\n  → run this command again"
    assert expected in result.stderr


@pytest.mark.parametrize("seed", range(4))
def test_every_flipped_bit_of_a_shard_is_found(seed: int, shards: Path) -> None:
    path = sorted(shards.glob("*.tar"))[0]
    flip(path, random.Random(seed).randrange(path.stat().st_size))
    assert "F6" in findings(shards)


def test_every_flipped_bit_of_the_index_is_found(shards: Path) -> None:
    path = shards / "index.parquet"
    flip(path, random.Random(0).randrange(path.stat().st_size))
    assert findings(shards) == {"F7"}
    with pytest.raises(FormatError, match="the index is not the one that the manifest names"):
        open_cache(shards)


@pytest.mark.parametrize("kept", [0, 1, 511, 512, 5000, -1, -1024])
def test_a_truncated_shard_is_found(kept: int, shards: Path) -> None:
    """Cut anywhere, at a sample's boundary too, where stock readers see a shorter dataset and no error."""
    path = sorted(shards.glob("*.tar"))[0]
    with open(path, "r+b") as file:
        file.truncate(kept if kept >= 0 else path.stat().st_size + kept)
    assert findings(shards) == {"F6"}


def test_swapped_shards_are_found(shards: Path) -> None:
    one, two = sorted(shards.glob("*.tar"))[:2]
    one.rename(shards / "x")
    two.rename(one)
    (shards / "x").rename(two)
    assert findings(shards) == {"F6"}


def test_a_missing_shard_is_found(shards: Path) -> None:
    sorted(shards.glob("*.tar"))[0].unlink()
    assert findings(shards) == {"F6"}


def test_a_manifest_from_the_future_is_refused(shards: Path) -> None:
    rewrite(shards, lambda value: value.update(format_version=3))
    assert findings(shards) == {"F2"}
    with pytest.raises(
        FormatError, match=r"this program does not know this format version \(expected 1 or 2, found 3\) \[F2\]"
    ):
        open_cache(shards)


def test_a_name_that_leads_out_of_the_directory_is_refused(shards: Path) -> None:
    rewrite(shards, lambda value: value["shards"][0].update(name="../../etc/passwd"))
    assert findings(shards) == {"F6"}


def test_an_index_that_names_another_file_is_refused(shards: Path, tmp_path: Path) -> None:
    """An index row may point nowhere but into a shard of the directory."""
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    reindex(shards, lambda row: IndexRow(row.name, "../secret", row.entry))
    assert "F6" in findings(shards)
    with pytest.raises(FormatError, match="not the name of a shard"):
        open_cache(shards)[0]["image_latents"]


def test_an_index_that_disagrees_with_its_shard_is_found(shards: Path) -> None:
    reindex(shards, lambda row: IndexRow(row.name, row.shard, row.entry.moved(row.entry.offset + 512)))
    assert "F16" in findings(shards)
    with pytest.raises(FormatError, match="F14"):
        open_cache(shards)[0]["image_latents"]


def test_a_key_that_occurs_twice_is_found(shards: Path) -> None:
    rows = list(open_cache(shards).rows())
    replace_index(shards, [rows[0], rows[0], *rows[2:]])
    assert "F10" in findings(shards)
    with pytest.raises(FormatError, match="a key occurs twice"):
        open_cache(shards)[rows[0].meta.key]


def test_a_sample_of_an_unknown_recipe_is_found(shards: Path) -> None:
    rewrite(shards, lambda value: value["recipes"]["default"]["recipe"].update(dtype="other"))
    assert findings(shards) == {"F5"}


def test_samples_in_another_order_are_found(shards: Path) -> None:
    replace_index(shards, list(open_cache(shards).rows())[::-1])
    assert findings(shards) == {"F5"}


def test_a_tensor_that_is_not_finite_is_found(shards: Path) -> None:
    """Even when every hash agrees."""
    cache = open_cache(shards)
    row, data = cache.row(0), cache.shard(cache.row(0).shard)
    tensors = {name: bytearray(piece) for name, piece in tensor_bytes(row.entry, data)}
    tensors["prompt_embeds"][40:44] = np.float32("inf").tobytes()
    specs = {
        name: type(spec)(spec.dtype, spec.shape, content_hash(tensors[name])) for name, spec in row.meta.tensors.items()
    }
    meta = type(row.meta)(
        row.meta.recipe, row.meta.inputs, row.meta.prompt, row.meta.img_shapes, row.meta.prefix_length, specs
    )
    writer = ShardWriter(shards / "open", 2)
    writer.add(meta, {name: memoryview(piece) for name, piece in tensors.items()})
    shard, entries = writer.seal(shards)
    (shards / row.shard).unlink()
    replace_index(shards, [IndexRow(row.name, shard.name, entries[0]), *list(cache.rows())[1:]])
    rewrite(shards, lambda value: value["shards"].__setitem__(_listed(value, row.shard), shard.to_json()))
    assert findings(shards) == {"F15"}
    named = f"prompt_embeds of {row.name} ({row.meta.key[:12]}) has NaN or Inf [F15]"
    assert named in run("qwen-cache", "verify", shards).stderr


def test_a_symbolic_link_in_a_shard_is_refused(shards: Path) -> None:
    import tarfile

    path = sorted(shards.glob("*.tar"))[0]
    link = tarfile.TarInfo("0" * 32 + ".json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    data = link.tobuf(tarfile.USTAR_FORMAT) + path.read_bytes()
    replace_shard(shards, path, data)
    assert "F8" in findings(shards)


def test_a_header_that_claims_too_much_is_refused_without_allocating_it(shards: Path) -> None:
    path = sorted(shards.glob("*.tar"))[0]
    cache = open_cache(shards)
    entry = next(row.entry for row in cache.rows() if row.shard == path.name)
    data = bytearray(path.read_bytes())
    start = data.index(b".safetensors\0", entry.offset) // 512 * 512 + 512
    data[start : start + 8] = (1 << 60).to_bytes(8, "little")
    replace_shard(shards, path, bytes(data))
    assert "F9" in findings(shards)


def replace_index(shards: Path, rows: list[IndexRow]) -> None:
    """Write an index that the manifest agrees with."""
    data = write_index(rows, 2)
    (shards / "index.parquet").write_bytes(data)
    rewrite(shards, lambda value: value["index"].update(bytes=len(data), xxh3_128=content_hash(data)))


def reindex(shards: Path, change: Callable[[IndexRow], IndexRow]) -> None:
    """Change the first row."""
    first, *others = open_cache(shards).rows()
    replace_index(shards, [change(first), *others])


def replace_shard(shards: Path, path: Path, data: bytes) -> None:
    """Put other bytes in a shard's place, with a name, a manifest and an index that agree with them."""
    name = f"{content_hash(data)}.tar"
    rows = [row if row.shard != path.name else IndexRow(row.name, name, row.entry) for row in open_cache(shards).rows()]
    replace_index(shards, rows)
    path.unlink()
    (shards / name).write_bytes(data)
    new = {"name": name, "bytes": len(data), "xxh3_128": content_hash(data)}
    rewrite(shards, lambda value: value["shards"][_listed(value, path.name)].update(new))


def _listed(value: dict, name: str) -> int:  # type: ignore[type-arg]
    return next(i for i, shard in enumerate(value["shards"]) if shard["name"] == name)


# ---- while a writer commits ------------------------------------------------------------------------------------------


def test_an_index_that_still_waits_for_its_name_is_found(shards: Path) -> None:
    manifest = parse_manifest((shards / "cache.json").read_bytes())
    (shards / "index.parquet").rename(shards / f"index-{manifest.index.xxh3_128}.parquet")
    assert len(open_cache(shards)) == 4
    (shards / "index.parquet").write_bytes(b"an older one")
    assert len(open_cache(shards)) == 4


def test_a_commit_between_two_reads_is_noticed(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has the old manifest in hand when both files are replaced."""
    newer = tmp_path / "newer"
    shutil.copytree(shards, newer)
    replace_index(newer, list(open_cache(newer).rows())[::-1])
    rewrite(newer, lambda value: value["written_by"].update(later="yes"))
    read_file, calls = directory.read_file, 0

    def racing(path: Path, size: int) -> bytes:
        nonlocal calls
        calls += 1
        data = read_file(path, size)
        if calls == 1:
            for name in ("cache.json", "index.parquet"):
                os.replace(newer / name, shards / name)
        return data

    monkeypatch.setattr(directory, "read_file", racing)
    assert open_cache(shards).manifest.written_by["later"] == "yes"


def test_an_index_that_gets_its_name_between_two_looks_is_found(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest stays the same: the reader looked for the index where it was not yet, and where it no longer was."""
    manifest, read_file = parse_manifest((shards / "cache.json").read_bytes()), directory.read_file
    pending = shards / f"index-{manifest.index.xxh3_128}.parquet"
    (shards / "index.parquet").rename(pending)

    def racing(path: Path, size: int) -> bytes:
        if path == pending and pending.exists():
            pending.rename(shards / "index.parquet")
        return read_file(path, size)

    monkeypatch.setattr(directory, "read_file", racing)
    assert len(open_cache(shards)) == 4


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_lines_of_the_specification_read_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pyarrow and torch, and from a shard alone with NumPy."""
    import torch

    write_cache(tmp_path / "shards")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "schemas" / "FORMAT.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for code in blocks:
        names: dict[str, Any] = {}
        exec(code, names)
        found = torch.as_tensor(names["image_latents"]).float()
        assert any(torch.equal(found, s["image_latents"].float()) for s in open_cache("shards"))
        names.clear()
        gc.collect()  # the lines leave their files to it


@pytest.mark.parametrize("positions", [(), (2,)])
def test_embeddings_of_text_alone_need_the_positions_of_the_images(positions: tuple[int, ...], tmp_path: Path) -> None:
    recipe = examples.TEXT_ALONE_RECIPE
    edit = examples.make("edit", "make it night", (1, 1), (1, 2), prefix=4, positions=positions, recipe=recipe)
    examples.write_cache(tmp_path / "shards", 2, [edit], examples.SHARD_SIZE, recipe)
    assert findings(tmp_path / "shards") == (set() if positions else {"F12"})
