"""Reading a cache: by position, by key, in order; without copying; with stock readers; and the same in v1 and v2.

Also beside a writer: readers take no lock, and no moment of a commit or of `gc` may be seen by them.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import safetensors.torch
import torch
import webdataset

from qwen_cache import FormatError, QwenCacheError, open_cache
from qwen_cache.extras import install_command
from qwen_cache.format import directory
from qwen_cache.format.cache import OPEN_SHARDS
from qwen_cache.format.verify import verify_cache
from qwen_cache.options import explain_crashes
from qwen_cache.storage import files as mapped
from qwen_cache.storage.remote import Url

from .support.commands import run
from .support.paths import ROOT, load_tool

examples: Any = load_tool("make_examples")
Built = Callable[..., Path]
EXAMPLES = ROOT / "schemas" / "examples" / "valid"


@pytest.fixture(params=["v2", "v1"])
def shards(request: pytest.FixtureRequest, built: Built) -> Path:
    return built("edit-plus", ("--format", request.param))


def test_position_key_and_order_agree(shards: Path) -> None:
    cache = open_cache(shards)
    assert len(cache) == 4
    assert [sample.name for sample in cache] == ["cat", "china", "cup", "flower"]
    for i, sample in enumerate(cache):
        assert cache[sample.key].name == cache[i].name == cache[i - len(cache)].name == sample.name
    with pytest.raises(IndexError, match="sample 4 of 4"):
        cache[4]
    with pytest.raises(KeyError, match="no sample with the key"):
        cache["0" * 32]
    with pytest.raises(KeyError, match="has no 'depth'; it has image_latents"):
        cache[0]["depth"]


def test_shapes_follow_from_img_shapes(shards: Path) -> None:
    for sample in open_cache(shards):
        tokens = [t * h * w for t, h, w in sample.img_shapes]
        assert sample["image_latents"].shape == (tokens[0], 64)
        assert sample["control_latents"].shape == (sum(tokens[1:]), 64)
        assert len(tokens) == (3 if sample.name == "cat" else 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_and_safetensors_read_the_same_bytes(shards: Path) -> None:
    """The independent reference: stock libraries, without the index."""
    cache = open_cache(shards)
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    found = {item["__key__"]: item for item in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)}
    gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored
    assert found.keys() == {sample.key for sample in cache}
    for sample in cache:
        item = found[sample.key]
        metadata = json.loads(item["json"])
        assert (metadata["key"], metadata["prompt"]) == (sample.key, sample.prompt)
        stored = safetensors.torch.load(item["safetensors"])
        assert stored.keys() == sample.row.meta.tensors.keys()
        for name, tensor in stored.items():
            assert torch.equal(tensor, sample.stored(name)), name


def test_tensors_are_views_of_the_shard_on_64_byte_boundaries(shards: Path) -> None:
    cache = open_cache(shards)
    for sample in cache:
        assert sample["image_latents"].data_ptr() == sample["image_latents"].data_ptr()
        assert sample.row.entry.data % 64 == 0
        assert sample["image_latents"].data_ptr() % 64 == 0


def test_v1_and_v2_have_the_same_values(built: Built) -> None:
    """The empty prompt is stored whole in v1, without its shared prefix in v2; pixels against 16-pixel units.

    v1 has no edit masks, so there the sample with one is the sample without, which is another.
    """
    one, two = open_cache(built("edit-plus", ("--format", "v1"))), open_cache(built("edit-plus", ("--format", "v2")))
    same = {sample.name: sample.key == two[i].key for i, sample in enumerate(one)}
    assert same == {"cat": True, "china": True, "cup": False, "flower": True}
    for a, b in zip(one, two, strict=True):
        assert (a.name, a.prompt, a.img_shapes) == (b.name, b.prompt, b.img_shapes)
        for name in a.tensors():
            assert torch.equal(a[name], b[name]), name
        assert b.row.meta.prefix_length > 0
        assert a.stored("empty_prompt_embeds").shape[0] == b["empty_prompt_embeds"].shape[0]
        assert b.stored("empty_prompt_embeds").shape[0] == a["empty_prompt_embeds"].shape[0] - b.row.meta.prefix_length


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_numpy_arrays_have_the_bits_of_the_torch_tensors(version: str) -> None:
    """Every dtype of the format, compressed or not, and the empty prompt with the prefix that v2 stores once."""
    seen = set()
    for sample in open_cache(EXAMPLES / f"cache.{version}"):
        for name, tensor in sample.tensors().items():
            array = sample.numpy(name)
            seen.add(str(array.dtype))
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{array.dtype}", array.shape), name
            assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    assert seen == {"bfloat16"} | ({"float16", "float32", "uint8"} if version == "v2" else set())


def test_numpy_arrays_are_views_of_the_shard(shards: Path) -> None:
    sample = open_cache(shards)[0]
    assert sample.numpy("image_latents").ctypes.data == sample["image_latents"].data_ptr()
    with pytest.raises(KeyError, match="has no 'depth'; it has image_latents"):
        sample.numpy("depth")


def test_edit_mask_is_the_edited_fraction_of_each_token(built: Built) -> None:
    """The mask covers the left half of the cup; one column of tokens may be cut by its border."""
    cup = next(sample for sample in open_cache(built("edit-plus")) if sample.name == "cup")
    _, h, w = cup.img_shapes[0]
    mask = cup["edit_mask"].view(h, w)
    assert torch.equal(mask[:, : w // 2 - 1], torch.ones(h, w // 2 - 1))
    assert torch.equal(mask[:, w // 2 + 1 :], torch.zeros(h, w - w // 2 - 1))
    assert mask.mean() == pytest.approx(0.5, abs=0.01)


def test_a_cache_pickles_without_its_open_files(built: Built) -> None:
    cache = open_cache(built("edit-plus"))
    before = cache[0]["image_latents"]
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(again[0]["image_latents"], before)


def test_changed_bytes_are_refused_when_they_are_read(built: Built, tmp_path: Path) -> None:
    shards = copy(built("edit-plus"), tmp_path)
    sample = open_cache(shards)[0]
    offset = sample.row.entry.tensor_offsets()["prompt_embeds"] + 5
    flip(shards / sample.row.shard, offset)
    damaged = open_cache(shards)[0]
    damaged["image_latents"]
    for read in (damaged.__getitem__, damaged.numpy):
        with pytest.raises(
            FormatError, match=r"prompt_embeds of sample .* does not have the bytes that were written .*\[F14\]"
        ):
            read("prompt_embeds")


def test_without_torch_a_tensor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = open_cache(EXAMPLES / "cache.v2")[0]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(QwenCacheError) as refused:
        sample["image_latents"]
    assert str(refused.value) == (
        "sample['image_latents'] is a torch tensor, and torch is not installed\n"
        f"  → use sample.numpy('image_latents'), or {install_command('build')}"
    )
    assert sample.numpy("image_latents").shape == (6, 64)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_shard_cut_off_between_samples_is_refused_where_stock_webdataset_sees_fewer(
    built: Built, tmp_path: Path
) -> None:
    shards = copy(built("edit-plus"), tmp_path)
    last = max((sample.row for sample in open_cache(shards)), key=lambda row: row.entry.offset)
    with open(shards / last.shard, "r+b") as file:
        file.truncate(last.entry.offset)
    found = list(webdataset.WebDataset([str(shards / last.shard)], shardshuffle=False))
    gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored
    assert len(found) == 3
    with pytest.raises(FormatError, match="reaches beyond its shard"):
        [sample.tensors() for sample in open_cache(shards)]


def test_not_a_cache(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no cache.json here: not a cache\n"):
        open_cache(tmp_path)


def test_an_unknown_recipe_names_the_known_ones(built: Built) -> None:
    with pytest.raises(QwenCacheError, match=r"no recipe 'other' here \(expected default\)"):
        open_cache(built("edit-plus"), recipe="other")


def copy(cache: Path, folder: Path) -> Path:
    """A copy that may be damaged."""
    import shutil

    return Path(shutil.copytree(cache, folder / "copy"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


# ---- beside a writer -------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Path, Path], Any]] = {
    "open_cache": lambda cache, _: [sample.tensors() for sample in open_cache(cache)],
    "verify": lambda cache, _: run("qwen-cache", "verify", cache).code,
    "inspect": lambda cache, _: run("qwen-cache", "inspect", cache, "--scan").code,
    "merge": lambda cache, out: run("qwen-cache", "merge", cache, "--out", out).code,
    "merge, recompressed": lambda cache, out: (
        run("qwen-cache", "merge", cache, "--out", out, "--set", "cache.compression=zstd").code
    ),
    "migrate": lambda cache, out: run("qwen-cache", "migrate", "v1", "v2", cache, "--out", out).code,
}


def move_when_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Move each shard between a look at it and its opening: to `.replaced/`, or back if it is there.

    Returns the names of moved shards.
    """
    opening, moved = os.open, list[str]()

    def racing(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        path = Path(os.fsdecode(path)) if not isinstance(path, int) else Path()
        if path.suffix == ".tar" and path.parent in (folder, folder / ".replaced") and path.name not in moved:
            here, there = folder / path.name, folder / ".replaced" / path.name
            if here.exists():
                moved.append(path.name)
                os.replace(here, there)
            elif path == there:  # the other place was looked at already
                moved.append(path.name)
                os.replace(there, here)
        return opening(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", racing)
    return moved


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("replaced", [False, True], ids=["it is replaced", "it comes back"])
@pytest.mark.parametrize("reader", READERS)
def test_a_shard_that_is_moved_as_it_is_opened_is_found(
    reader: str, replaced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit moves it to `.replaced/`, and `gc` or another commit back."""
    version = "v1" if reader == "migrate" else "v2"
    cache = Path(shutil.copytree(EXAMPLES / f"cache.{version}", tmp_path / "cache"))
    names = sorted(path.name for path in cache.glob("*.tar"))
    (cache / ".replaced").mkdir()
    for name in names if replaced else ():
        os.replace(cache / name, cache / ".replaced" / name)
    with monkeypatch.context() as patch:
        moved = move_when_opened(cache, patch)
        result = READERS[reader](cache, tmp_path / "out")
    assert result == 0 or reader == "open_cache"
    assert sorted(moved) == names
    if (tmp_path / "out").exists():
        assert verify_cache(tmp_path / "out") == []


def test_a_remote_shard_that_is_moved_between_two_requests_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    files.put(str(EXAMPLES / "cache.v1"), "/moved", recursive=True)
    names = [path.name for path in (EXAMPLES / "cache.v1").glob("*.tar")]
    for name in names:
        files.mv(f"/moved/{name}", f"/moved/.replaced/{name}")
    reading = Url.read_range

    def racing(url: Url, begin: int, end: int) -> bytes:
        if ".replaced" in url.path and files.exists(f"/moved/.replaced/{url.name}"):
            files.mv(f"/moved/.replaced/{url.name}", f"/moved/{url.name}")
        return reading(url, begin, end)

    monkeypatch.setattr(Url, "read_range", racing)
    remote = open_cache("memory://moved", local_copies=tmp_path / "copies")
    for sample, expected in zip(remote, open_cache(EXAMPLES / "cache.v1"), strict=True):
        assert all(torch.equal(sample[name], tensor) for name, tensor in expected.tensors().items())
    assert not any(files.exists(f"/moved/.replaced/{name}") for name in names)
    files.rm("/moved", recursive=True)


def test_a_shard_that_gc_removed_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    """The reader holds the manifest of before a build and a `gc`."""
    cache = tmp_path / "cache"
    examples.write_cache(cache, 2, [examples.EDIT, examples.PLAIN], 1)
    reader, old = open_cache(cache), examples.first_shard(cache)
    missing = cache / old
    missing.rename(tmp_path / "elsewhere")
    with pytest.raises(FormatError) as lost:
        reader[0].buffer("image_latents")
    assert lost.value.fault == "a shard of the manifest is missing [F6]"
    shutil.rmtree(cache)
    examples.write_cache(cache, 2, [examples.PLAIN], 1)
    with pytest.raises(FormatError) as changed:
        reader[0].buffer("image_latents")
    assert str(changed.value) == (
        f"{missing}: the cache was changed while it was read: its manifest no longer names this shard, and it is "
        "removed [F6]\n  → run the command again: it reads the cache as it is now"
    )


@pytest.fixture
def one_and_two(tmp_path: Path) -> tuple[Path, Path]:
    """Two datasets of six and three samples, without a common shard."""
    made = [examples.make(f"sample {i}", f"edit {i}", (1, 1), (1, 2)) for i in range(6)]
    examples.write_cache(tmp_path / "one", 2, made, 1)
    examples.write_cache(tmp_path / "two", 2, made[3:], 1 << 20)
    return tmp_path / "one", tmp_path / "two"


def commit_all_of(source: Path, cache: Path) -> None:
    """Commit the dataset of `source` to `cache`, in place of what is there."""
    manifest, index = directory.load(source)
    with directory.writing(cache):
        staged = cache / directory.STAGING / "build"
        staged.mkdir(parents=True, exist_ok=True)
        for shard in manifest.shards:
            shutil.copy(source / shard.name, staged)
        directory.commit(cache, manifest, index, [staged / shard.name for shard in manifest.shards])


def test_after_each_step_of_a_commit_one_dataset_is_whole(
    one_and_two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When cache.json is written, all that it names is there: three samples in place of six."""
    one, two = one_and_two
    cache, seen = Path(shutil.copytree(one, tmp_path / "cache")), []
    expected = {len(open_cache(folder)): values(folder) for folder in one_and_two}

    def watched(step: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            step(*arguments)
            found = values(cache)
            assert found == expected[len(found)]
            seen.append((step.__name__, len(found)))

        return call

    for step in (directory.move, directory.write_durably, directory.replace):
        monkeypatch.setattr(directory, step.__name__, watched(step))
    commit_all_of(two, cache)
    assert seen == [("move", 6), ("write_durably", 6), ("write_durably", 3), ("replace", 3)]


@pytest.mark.slow
def test_a_reader_beside_a_loop_of_commits_never_sees_an_error(one_and_two: tuple[Path, Path], tmp_path: Path) -> None:
    """Two datasets in turn: every pass reads one of them, whole. `verify` may list shards that a commit moves in."""
    one, two = one_and_two
    cache = Path(shutil.copytree(one, tmp_path / "cache"))
    expected = {len(open_cache(folder)): values(folder) for folder in one_and_two}
    stop, passes = threading.Event(), 0

    def write() -> None:
        while not stop.is_set():
            for source in (two, one):
                commit_all_of(source, cache)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for passes in range(300):
            found = values(cache)
            assert found == expected[len(found)], passes
            if not passes % 20:
                with suppress(QwenCacheError):
                    assert {fault.rule for fault in verify_cache(cache)} <= {"F17"}
    finally:
        stop.set()
        writer.join()


def values(folder: Path) -> list[dict[str, bytes]]:
    return [{name: bytes(s.buffer(name)) for name in s.row.meta.tensors} for s in open_cache(folder)]


# ---- descriptors, mappings, and files that become shorter ------------------------------------------------------------

FEW_DESCRIPTORS = """
import resource, sys
from qwen_cache import open_cache

cache = open_cache(sys.argv[1])
views = [cache[0].buffer("image_latents")]  # what is imported late is there
used = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2,) * 2)
views += [sample.buffer("image_latents") for sample in cache]
assert views[0] == views[1]
print(len(views) - 1, len({bytes(view) for view in views}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_views_of_any_number_of_shards_hold_no_descriptor(tmp_path: Path) -> None:
    """`ulimit -n` says nothing about how many shards may be mapped and their tensors kept."""
    count = OPEN_SHARDS + 6
    made = [examples.make(f"sample {i}", f"edit {i}", (1, 1)) for i in range(count)]
    examples.write_cache(tmp_path / "cache", 2, made, 1)
    done = subprocess.run(
        [sys.executable, "-c", FEW_DESCRIPTORS, str(tmp_path / "cache")], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [str(count), str(count)], done.stderr


@pytest.mark.parametrize("windows", [False, True])
def test_a_mapping_ends_with_its_last_view(windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "WINDOWS", windows)
    path = tmp_path / "a file"
    path.write_bytes(bytes(range(256)) * 100)

    def is_mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    data = mapped.map_file(path)
    view = data[256:512]
    assert (data.nbytes, data.format, data.readonly, bytes(view)) == (25600, "B", False, bytes(range(256)))
    view[0] = 7  # a copy of the reader's own
    assert path.read_bytes()[256] == 0
    del data
    assert is_mapped()
    del view
    assert not is_mapped()


def test_a_system_that_maps_no_more_shards_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """First, the mappings that only wait for another sample are given up."""
    cache, calls = open_cache(EXAMPLES / "cache.v2"), 0

    def full(path: Path) -> memoryview:
        nonlocal calls
        calls += 1
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path))

    cache[0].buffer("image_latents")
    monkeypatch.setattr(directory, "map_file", full)
    with pytest.raises(QwenCacheError) as refused:
        cache[-1].buffer("image_latents")
    assert calls == 2
    assert str(refused.value) == (
        f"{cache.folder / cache[-1].row.shard}: the system maps no more shards: tensors that are views of them keep "
        "too many mapped (found Cannot allocate memory)\n  → keep copies of tensors (`tensor.clone()`), or raise "
        "vm.max_map_count or `ulimit -v`"
    )


def can_tell(tmp_path: Path) -> bool:
    """True if this system says that a mapped file became shorter."""
    path = tmp_path / "short"
    path.write_bytes(bytes(8192))
    data = mapped.map_file(path)
    os.truncate(path, 0)
    return mapped.is_cut_short(data)


def test_a_shard_cut_short_under_a_reader_is_named(tmp_path: Path) -> None:
    """An error where the system can tell; otherwise such a read ends the process with SIGBUS, and a traceback."""
    if not can_tell(tmp_path):
        pytest.skip("Linux 5.14 and later can tell")
    examples.write_cache(tmp_path / "cache", 2, [examples.make("large", "a cat", (16, 16))], 1)
    cache = open_cache(tmp_path / "cache")
    path = tmp_path / "cache" / cache[0].row.shard
    before = bytes(cache[0].buffer("image_latents"))
    size = path.stat().st_size
    os.truncate(path, 4096)
    with pytest.raises(FormatError) as refused:
        cache[0].buffer("image_latents")
    assert str(refused.value).startswith(
        f"{path}: image_latents of sample {cache[0].row.label} cannot be read: its shard became shorter "
        "[F14]\n  → restore the shard from a copy"
    )
    os.truncate(path, size)  # longer again, with other bytes
    with pytest.raises(FormatError, match="does not have the bytes that were written"):
        cache[0].buffer("image_latents")
    assert before != bytes(len(before))


def test_a_crash_by_a_signal_says_where() -> None:
    code = f"from qwen_cache.options import {explain_crashes.__name__} as f; f(); import os; os.kill(os.getpid(), 7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Fatal Python error: Bus error" in done.stderr
    assert 'File "<string>", line 1' in done.stderr
