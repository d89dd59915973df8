"""Promises of a build: only what is new is encoded, and it says why; a stop at any moment loses nothing that is
done."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.encode import preflight
from qwen_cache.encode.builder import BuildJob
from qwen_cache.format import directory
from qwen_cache.format.shard import ShardWriter, recover

from .support.caches import SMALL, build, contents, plan
from .support.commands import Result, command, run
from .support.crash import Crash, crash_after
from .support.fake_lanes import FakeLanes
from .support.marks import slow
from .support.processes import popen
from .support.sources import add_control, change_control, change_mask, change_prompt, change_target, remove_mask
from .support.waiting import HANG

TinyModel = Callable[[str], Path]


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("edit-plus")


# ---- incremental -----------------------------------------------------------------------------------------------------


def test_two_builds_of_one_source_are_byte_identical(pairs: Path, tmp_path: Path, model: Path) -> None:
    """With the real encoders: the mode of the posterior, not a sample of it."""
    for name in ("one", "two"):
        assert build(pairs, tmp_path / name, model).code == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_second_build_does_nothing_and_says_so(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    before = {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"}
    result = build(pairs, out, model)
    assert result.code == 0
    assert "4 samples, 4 cached, 0 to encode" in result.stderr
    assert "nothing to do" in result.stderr
    assert {path: path.stat().st_mtime_ns for path in out.iterdir() if path.name != ".lock"} == before
    assert len(fast) == 1
    settings = (out / "qwen.yaml").read_bytes()
    (out / "qwen.yaml").unlink()  # as a kill after the commit leaves it
    assert build(pairs, out, model).code == 0
    assert (out / "qwen.yaml").read_bytes() == settings


def change_both(pairs: Path) -> None:
    change_target(pairs)
    (pairs / "target_images" / "china.txt").write_text("make it grey")


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("change", "name", "reasons"),
    [
        (change_target, "china", ["target"]),
        (change_control, "cat", ["control 2"]),
        (add_control, "flower", ["number of controls"]),
        (change_mask, "cup", ["mask"]),
        (remove_mask, "cup", ["mask"]),
        (change_prompt, "flower", ["prompt"]),
        (change_both, "china", ["target", "prompt"]),
    ],
)
def test_one_change_encodes_one_sample_and_says_why(
    change: Callable[[Path], None],
    name: str,
    reasons: list[str],
    pairs: Path,
    tmp_path: Path,
    model: Path,
    fast: list[FakeLanes],
) -> None:
    out = tmp_path / "shards"
    build(pairs, out, model)
    change(pairs)
    expected = plan(pairs, out, model)
    mask_only = reasons == ["mask"]
    assert (expected["to_encode"], expected["new_masks"], expected["cached"]) == (not mask_only, mask_only, 3)
    assert [(sample["name"], sample["reasons"]) for sample in expected["samples"]] == [(name, reasons)]
    loaded = len(fast)
    result = build(pairs, out, model)
    assert result.code == 0
    assert f"{name}: {', '.join(reasons)}" in result.stderr
    assert [lanes.encoded for lanes in fast[loaded:]] == ([] if mask_only else [[name]])
    assert build(pairs, tmp_path / "fresh", model).code == 0
    ours, fresh = open_cache(out), open_cache(tmp_path / "fresh")
    assert [sample.key for sample in ours] == [sample.key for sample in fresh]
    assert run("qwen-cache", "verify", out).code == 0


def test_what_makes_no_difference_encodes_nothing(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """Names, folders and dates are not part of a key; the dataset takes the new names."""
    out = tmp_path / "shards"
    build(pairs, out, model)
    moved = tmp_path / "elsewhere"
    shutil.copytree(pairs, moved)
    for folder in ("control_images", "target_images"):
        for path in (moved / folder).glob("china.*"):
            path.rename(path.with_name("shanghai" + path.suffix))
            os.utime(path.with_name("shanghai" + path.suffix), (0, 0))
    assert plan(moved, out, model)["to_encode"] == 0
    assert build(moved, out, model).code == 0
    assert [sample.name for sample in open_cache(out)] == ["cat", "cup", "flower", "shanghai"]
    assert len(fast) == 1


def test_another_recipe_under_the_same_name_replaces_all_and_says_what_changed(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    build(pairs, out, model)
    size = ("--set", "data.vae_image_size=9216")
    assert plan(pairs, out, model, *size)["reasons"] == {"recipe: vae_image_size 16384 → 9216": 4}
    assert build(pairs, out, model, *size, "--replace").code == 0
    assert len(open_cache(out)) == 4
    assert [plan(pairs, out, model)[name] for name in ("to_encode", "to_copy", "cached")] == [0, 4, 0]


def test_two_recipes_live_in_one_directory(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    out = tmp_path / "shards"
    build(pairs, out, model)
    small = ("--set", "data.vae_image_size=9216", "--set", "cache.recipe=small")
    assert build(pairs, out, model, *small).code == 0
    assert plan(pairs, out, model)["to_encode"] == plan(pairs, out, model, *small)["to_encode"] == 0
    default, other = open_cache(out, recipe="default"), open_cache(out, recipe="small")
    assert not {sample.key for sample in default} & {sample.key for sample in other}
    with pytest.raises(Exception, match="holds several recipes; name one of them"):
        open_cache(out)
    again = build(pairs, out, model, "--set", "cache.recipe=third")
    assert again.code == 2
    assert "this cache has the same recipe under the name 'default'" in again.stderr
    alone = command("qwen-cache", "inspect", out, "--json")  # with nothing imported but what it needs
    assert set(json.loads(alone.stdout)["recipes"]) == {"default", "small"}


def test_a_removed_sample_leaves_the_dataset_and_its_shard(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """Stock readers take every sample of every shard, so none may hold what the dataset no longer has."""
    out = tmp_path / "shards"
    build(pairs, out, model)
    reader = open_cache(out)
    removed = {sample.name: sample.key for sample in reader}["cup"]
    for path in [*pairs.rglob("cup*")]:
        path.unlink()
    result = build(pairs, out, model)
    assert "1 sample removed from the source" in result.stderr
    assert len(fast) == 1, "nothing had to be encoded"
    assert all(removed.encode() not in path.read_bytes() for path in out.glob("*.tar"))
    assert torch.isfinite(reader[removed]["image_latents"]).all(), "a run that had opened the old dataset continues"
    assert build(pairs, tmp_path / "fresh", model).code == 0
    assert contents(out) == contents(tmp_path / "fresh")


def test_equal_rows_are_kept_once(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    for folder in ("control_images", "target_images"):
        for path in list((pairs / folder).glob("china.*")):
            shutil.copy(path, path.with_name("china_again" + path.suffix))
    result = build(pairs, tmp_path / "shards", model)
    assert "1 row with the same content as another, stored once" in result.stderr
    assert len(open_cache(tmp_path / "shards")) == 4


def test_shards_are_closed_at_their_size_and_only_those_that_change_are_written_again(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out, size = tmp_path / "shards", ("--set", "cache.shard_size=1")
    build(pairs, out, model, *size)
    before = {path.name for path in out.glob("*.tar")}
    assert len(before) == 4
    change_target(pairs)
    build(pairs, out, model, *size)
    after = {path.name for path in out.glob("*.tar")}
    assert len(before & after) == 3
    assert {path.name for path in (out / ".replaced").iterdir()} == before - after


# ---- stopping --------------------------------------------------------------------------------------------------------


def crashing_build(source: Path, out: Path, model: Path, count: int, *options: str, of_shards: bool = False) -> bool:
    """True if the build died."""
    with pytest.MonkeyPatch.context() as patch:
        crash_after(count, patch, of_shards=of_shards)
        try:
            result = build(source, out, model, *options)
        except Crash:
            return True
    assert result.code == 0
    return False


def everything(folder: Path) -> frozenset[tuple[str, bytes]]:
    """The files that a process that dies leaves to the next one."""
    return frozenset((str(path), path.read_bytes()) for path in folder.rglob("*") if path.is_file())


def tear(out: Path, chance: random.Random) -> None:
    """A kill does more than that: the last writes of the open shard never reached the disk."""
    for path in out.rglob("open.tar"):
        with open(path, "r+b") as file:
            file.truncate(chance.randint(0, path.stat().st_size))


@pytest.mark.parametrize("size", [slow("1"), "300000", slow("1GB")])
def test_a_first_build_that_dies_anywhere_is_resumed_to_the_same_bytes(
    size: str, pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """If deaths at two places leave the same files, it is resumed once."""
    options, out = ("--set", f"cache.shard_size={size}"), tmp_path / "out"
    build(pairs, tmp_path / "whole", model, *options)
    assert run("qwen-cache", "verify", tmp_path / "whole").code == 0
    whole, chance = contents(tmp_path / "whole"), random.Random(0)
    count, died, seen = 0, True, set[frozenset[tuple[str, bytes]]]()
    while died:
        died = crashing_build(pairs, out, model, count, *options)
        if (left := everything(out)) not in seen:
            seen.add(left)
            tear(out, chance)
            if (out / "cache.json").exists():
                assert [sample.name for sample in open_cache(out)] == ["cat", "china", "cup", "flower"]
            assert build(pairs, out, model, *options).code == 0
            assert contents(out) == whole, f"died at operation {count}"
        shutil.rmtree(out, ignore_errors=True)  # the first made none
        count += 1
    assert count > 20


@pytest.mark.slow
def test_a_later_build_that_dies_anywhere_leaves_the_old_dataset_or_the_new(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    options = ("--set", "cache.shard_size=300000")
    build(pairs, tmp_path / "base", model, *options)
    old = [sample.key for sample in open_cache(tmp_path / "base")]
    change_target(pairs)
    shutil.copytree(tmp_path / "base", tmp_path / "whole")
    build(pairs, tmp_path / "whole", model, *options)
    whole = contents(tmp_path / "whole")
    new = [sample.key for sample in open_cache(tmp_path / "whole")]
    count, died = 0, True
    while died:
        out = tmp_path / f"out-{count}"
        shutil.copytree(tmp_path / "base", out)
        died = crashing_build(pairs, out, model, count, *options)
        found = open_cache(out)
        assert [sample.key for sample in found] in (old, new)
        for sample in found:
            sample.tensors()
        assert build(pairs, out, model, *options).code == 0
        assert contents(out) == whole, f"died at operation {count}"
        shutil.rmtree(out)
        count += 1
    assert count > 20


def places_in(shard: Path) -> dict[str, int]:
    """A byte of each region of what a kill left, outside of the values that have a hash of their own."""
    data = memoryview(shard.read_bytes())
    first, *_ = entries = recover(data, 2)
    second_member = first.offset + 512 + -(-len(first.meta.to_bytes(2)) // 512) * 512
    end = entries[-1].offset + entries[-1].length
    stored = sum(spec.stored_bytes for spec in first.meta.tensors.values())
    return {
        "the name in a tar header": first.offset + 3,
        "the end of the checksum in a tar header": first.offset + 155,
        "the space of a tar header": first.offset + 511,
        "the metadata": first.offset + 512 + first.meta.to_bytes(2).index(b"prompt") + 12,
        "the padding after the metadata": second_member - 1,
        "the checksum of the second tar header": second_member + 155,
        "the length of the safetensors header": second_member + 512,
        "the safetensors header": second_member + 520,
        "the spaces after the safetensors header": first.data - 1,
        "a tensor": first.data,
        "the padding after the tensors": first.data + stored,
        "the padding of the last whole sample": end - 1,
        "the torn end": end + 155,
    }


def test_a_bit_that_flips_in_what_a_kill_left_changes_nothing(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """Wherever it is: the shards are, byte for byte, those of an undisturbed build."""
    assert crashing_build(pairs, tmp_path / "killed", model, 7, of_shards=True)  # two are whole, the third is torn
    assert build(pairs, tmp_path / "whole", model).code == 0
    (left,) = (tmp_path / "killed").rglob("open.tar")
    data, whole = left.read_bytes(), contents(tmp_path / "whole")
    for place, position in places_in(left).items():
        out = tmp_path / place
        shutil.copytree(tmp_path / "killed", out)
        flipped = bytearray(data)
        flipped[position] ^= 1
        (out / left.relative_to(tmp_path / "killed")).write_bytes(flipped)
        assert build(pairs, out, model).code == 0
        assert contents(out) == whole, place


def test_damage_between_tensors_is_not_copied_into_a_new_shard(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """A shard that loses a sample is written again: from the metadata and the tensors, which have hashes."""
    for name in ("sound", "damaged"):
        assert build(pairs, tmp_path / name, model).code == 0
    (shard,) = (tmp_path / "damaged").glob("*.tar")
    last = open_cache(tmp_path / "damaged")[-1].row.entry
    with open(shard, "r+b") as file:
        file.seek(last.offset + 155)  # after the checksum of a tar header, which does not cover itself
        file.write(b"!")
    change_target(pairs)
    for name in ("sound", "damaged"):
        assert build(pairs, tmp_path / name, model).code == 0
    assert contents(tmp_path / "damaged") == contents(tmp_path / "sound")


def test_work_that_is_done_is_not_done_again(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    out = tmp_path / "shards"
    assert crashing_build(pairs, out, model, 7, of_shards=True)  # two samples are whole, the third is torn
    assert "partial" in run("qwen-cache", "inspect", out).stdout
    assert build(pairs, out, model).code == 0
    assert fast[-1].encoded == ["cup", "flower"]


def test_a_build_that_continues_with_another_source_reuses_what_it_can(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    assert crashing_build(pairs, out, model, 10, of_shards=True)
    shutil.copy(pairs / "control_images" / "cat.png", pairs / "control_images" / "ant.png")
    shutil.copy(pairs / "target_images" / "cat.png", pairs / "target_images" / "ant.png")
    (pairs / "target_images" / "ant.txt").write_text("comes first")
    assert build(pairs, out, model).code == 0
    assert sorted(fast[-1].encoded) == ["ant", "flower"]
    assert build(pairs, tmp_path / "fresh", model).code == 0
    assert contents(out) == contents(tmp_path / "fresh")


def durable_before_named(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record whatever gets a name at the top of `out` without having reached the disk; names of the rest go before."""
    synced: set[int] = set()
    wrong: list[str] = []
    fsync, replace_ = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def rename(source: Path, target: Path) -> None:
        top = Path(target).parent == out
        if top and os.stat(source).st_ino not in synced and Path(target).name != "index.parquet":
            wrong.append(f"{Path(target).name} had not reached the disk")
        if top and Path(target).name == "cache.json" and out.stat().st_ino not in synced:
            wrong.append("names in the folder had not reached the disk before the manifest")
        replace_(source, target)
        if top:
            synced.discard(out.stat().st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    return wrong


def test_what_a_power_loss_may_not_reorder(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is on the disk before it has its name, and all names before the manifest that speaks of them."""
    shards = tmp_path / "shards"
    with monkeypatch.context() as patch:
        wrong = durable_before_named(shards, patch)
        assert build(pairs, shards, model, "--set", "cache.shard_size=300000").code == 0
    assert wrong == []

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        wrong = durable_before_named(tmp_path / "copy", patch)
        patch.setattr(os, "link", refuse)  # another disk, so that shards are copied
        assert run("qwen-cache", "merge", shards, "--out", tmp_path / "copy").code == 0
    assert wrong == []
    assert contents(tmp_path / "copy").keys() == contents(shards).keys()


WAITING = """
import signal, time
from qwen_cache.cli import main
from qwen_cache.format.staging import Staging

add, written = Staging.add, []

def add_or_wait(self, *arguments):
    if written:
        print("written", flush=True)
        while True:
            time.sleep(1)
    written.append(add(self, *arguments))

Staging.add = add_or_wait
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
main()
"""
"""`qwen-cache` that has written one sample and waits to be stopped."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_process_is_resumed_to_the_same_bytes(number: int, pairs: Path, tmp_path: Path, model: Path) -> None:
    """The real encoders in a real process, stopped once it has written something."""
    assert build(pairs, tmp_path / "whole", model).code == 0
    out = tmp_path / "shards"
    arguments = ["build", pairs, "--out", out, "--model", model, *SMALL]
    process = popen(
        [sys.executable, "-c", WAITING, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    assert process.stdout.readline() == "written\n"
    process.send_signal(number)
    _, message = process.communicate()
    assert not (out / "cache.json").exists()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "samples finished and kept; run the same command to continue" in message
        assert "Traceback" not in message
    assert build(pairs, out, model).code == 0
    assert contents(out) == contents(tmp_path / "whole")


def test_a_full_disk_says_so_and_loses_nothing(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = ShardWriter._write, 0

    def full(self: ShardWriter, *pieces: bytes | memoryview) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        write(self, *pieces)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "_write", full)
        result = build(pairs, tmp_path / "shards", model)
    assert result.code == 2
    assert "No space left on device" in result.stderr
    assert "1 of 4 samples finished and kept" in result.stderr
    assert build(pairs, tmp_path / "shards", model).code == 0
    assert fast[-1].encoded == ["china", "cup", "flower"]


def test_a_second_writer_is_refused(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    out = tmp_path / "shards"
    with directory.writing(out):
        result = build(pairs, out, model)
    assert result.code == 2
    assert f"another process is writing to this cache (found process {os.getpid()}" in result.stderr


def test_settings_that_come_back_find_what_was_replaced(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model, "--dtype", "float32").code == 0
    before = contents(out)
    assert build(pairs, out, model, "--dtype", "bfloat16", "--replace").code == 0
    assert build(pairs, out, model, "--dtype", "float32").code == 0
    assert len(fast) == 2, "no encoder was loaded to go back"
    assert contents(out) == before
    assert run("qwen-cache", "gc", out).code == 0
    (pairs / "target_images" / "cat.txt").write_text("another prompt")
    assert build(pairs, out, model, "--dtype", "bfloat16", "--replace").code == 0
    assert len(fast) == 3, "gc removed what was replaced"


def test_a_damaged_shard_that_was_replaced_is_encoded_again(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    for dtype in ("float32", "bfloat16"):
        assert build(pairs, out, model, "--dtype", dtype, "--replace").code == 0
    (replaced,) = (out / ".replaced").glob("*.tar")
    data = bytearray(replaced.read_bytes())
    data[len(data) // 2] ^= 1
    replaced.write_bytes(data)
    assert build(pairs, out, model, "--dtype", "float32").code == 0
    assert len(fast) == 3
    assert run("qwen-cache", "verify", out).code == 0


@pytest.mark.slow
def test_gc_keeps_the_last_copy_of_a_shard(pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """Two copies may lie there of a sample that was replaced and came back; one that is lost leaves the other."""
    out = tmp_path / "shards"
    for dtype in ("float32", "bfloat16", "float32"):
        assert build(pairs, out, tiny_model("edit-plus"), "--dtype", dtype, "--replace").code == 0
    (shard,) = out.glob("*.tar")
    assert (out / ".replaced" / shard.name).is_file()
    shard.unlink()
    assert str(shard.name) not in run("qwen-cache", "gc", out, "--dry-run").stderr
    assert run("qwen-cache", "gc", out).code == 0
    assert shard.is_file()
    assert run("qwen-cache", "verify", out).code == 0
    assert list((out / ".replaced").glob("*.tar")) == []


def test_gc_removes_what_the_dataset_does_not_name(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    build(pairs, out, model)
    change_target(pairs)
    build(pairs, out, model)
    stray = out / ("0" * 32 + ".tar")
    stray.write_bytes(b"not ours")
    before = contents(out)
    assert "this file is not in the manifest [F17]" in run("qwen-cache", "verify", out).stderr
    listed = json.loads(run("qwen-cache", "gc", out, "--dry-run", "--json").stdout)
    assert len(listed["files"]) == 2
    assert contents(out) == before
    assert run("qwen-cache", "gc", out).code == 0
    assert contents(out) == {name: data for name, data in before.items() if name != stray.name}
    assert not list((out / ".replaced").iterdir())
    assert run("qwen-cache", "verify", out).code == 0


def test_a_deleted_shard_is_built_again(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model, "--set", "cache.shard_size=1").code == 0
    before = contents(out)
    (out / open_cache(out).manifest.shards[0].name).unlink()
    assert build(pairs, out, model, "--set", "cache.shard_size=1").code == 0
    assert contents(out) == before


def test_a_deleted_manifest_is_written_again_and_nothing_is_encoded(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """The fix that F21 names, and F7: a damaged index comes back too."""
    out, manifest = tmp_path / "shards", tmp_path / "shards" / "cache.json"
    assert build(pairs, out, model).code == 0
    before, loaded = contents(out), len(fast)
    for name, fault in (
        ("default", r"the file was changed after it was written \(expected \w{32}, found \w{32}\) \[F21\]"),
        ("checksum", r'the key "checksum" is missing \[F1\]'),
    ):
        manifest.write_bytes(before["cache.json"].replace(f'"{name}"'.encode(), f'"{name.title()}"'.encode()))
        fix = (
            "restore cache.json and index.parquet from a copy, or delete cache.json and run the same `qwen-cache build`"
        )
        for refused in (run("qwen-cache", "verify", out), build(pairs, out, model)):
            assert re.search(f"cache.json: {fault}\n  → {fix} again: it keeps the whole shards of its", refused.stderr)
    manifest.write_bytes(before["cache.json"])
    (out / "index.parquet").write_bytes(before["index.parquet"][:-1] + b"?")
    for refused in (run("qwen-cache", "verify", out), build(pairs, out, model)):
        assert re.search(
            rf"the index is not the one that the manifest names .* \[F7\]\n  → {fix} again", refused.stderr
        )
    manifest.unlink()
    assert build(pairs, out, model).code == 0
    assert contents(out) == before
    assert len(fast) == loaded


# ---- lanes -----------------------------------------------------------------------------------------------------------


def test_both_encoders_work_at_the_same_time(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for the other to have begun: one after the other, they would wait for ever."""
    from qwen_cache.encode.text import TextEncoder
    from qwen_cache.encode.vae import VaeEncoder

    meeting = threading.Barrier(2, timeout=HANG)
    vae, text, met = VaeEncoder.encode, TextEncoder.read, threading.Event()

    def meet(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if not met.is_set():
                meeting.wait()
                met.set()
            return function(*arguments)

        return call

    monkeypatch.setattr(VaeEncoder, "encode", meet(vae))
    monkeypatch.setattr(TextEncoder, "read", meet(text))
    assert build(pairs, tmp_path / "shards", model).code == 0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("vae", "text"), [("cpu,cpu", "cpu"), ("cpu", "cpu,cpu"), ("cpu,cpu,cpu", "cpu, cpu")])
def test_several_devices_give_the_same_bytes(vae: str, text: str, pairs: Path, tmp_path: Path, model: Path) -> None:
    """And each copy of an encoder gets work."""
    from qwen_cache.encode.lanes import Lane

    used: set[int] = set()
    send = Lane.send

    def count(self: Lane[Any, Any], batch: Any) -> None:
        used.add(id(self))
        send(self, batch)

    assert build(pairs, tmp_path / "one", model).code == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "send", count)
        assert build(pairs, tmp_path / "more", model, "--vae-device", vae, "--text-device", text).code == 0
    assert contents(tmp_path / "more") == contents(tmp_path / "one")
    assert len(used) == len(vae.split(",")) + len(text.split(","))


def test_a_device_without_memory_says_so_and_keeps_what_is_done(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_cache.encode.vae import VaeEncoder

    encode, left = VaeEncoder.encode, iter([True] * 4)

    def full(self: VaeEncoder, pixels: torch.Tensor) -> torch.Tensor:
        if not next(left, False):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return encode(self, pixels)

    with monkeypatch.context() as patch:
        patch.setattr(VaeEncoder, "encode", full)
        result = build(pairs, tmp_path / "shards", model)
    message = "a device has too little memory for one sample (found CUDA out of memory. Tried to allocate 2.00 GiB)"
    failing(result, message, "name another with --vae-device or --text-device")
    assert "2 of 4 samples finished and kept" in result.stderr
    assert build(pairs, tmp_path / "shards", model).code == 0


# ---- what cannot be done ---------------------------------------------------------------------------------------------


def failing(result: Result, *messages: str) -> None:
    """Exit code 2, every message, and no traceback."""
    assert result.code == 2, result.stderr
    assert "Traceback" not in result.stderr
    for message in messages:
        assert message in result.stderr


def test_every_problem_is_listed_before_anything_is_encoded(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    (pairs / "control_images" / "china.png").unlink()
    (pairs / "target_images" / "flower.txt").write_text("  \n")
    damaged = pairs / "target_images" / "cup.png"
    damaged.write_bytes(damaged.read_bytes()[:-500])
    result = build(pairs, out, model)
    told = "error: nothing will be encoded until these are fixed (found 3 problems)\n  → fix them; if folders or"
    failing(result, "china", "flower", "empty", "cup.png: the image is damaged", told)
    for options in ((), ("--check",)):  # a dry run ends as the build would
        dry = build(pairs, out, model, "--dry-run", *options)
        failing(dry, "china", "flower", "empty", "cup.png: the image is damaged", told)
    assert build(pairs, out, model, "--dry-run", "--on-error", "skip").code == 0
    assert build(pairs, out, model, "--dry-run", "--check", "--on-error", "skip").code == 1
    assert not fast
    assert not (out / "cache.json").exists()
    assert build(pairs, out, model, "--on-error", "skip").code == 0
    assert [sample.name for sample in open_cache(out)] == ["cat"]
    problems = plan(pairs, out, model)["problems"]
    assert len(problems) == 3
    assert all(problem.keys() == {"where", "what", "do"} for problem in problems)


def test_no_usable_sample_is_an_error(pairs: Path, tmp_path: Path, model: Path) -> None:
    for path in (pairs / "target_images").glob("*.txt"):
        path.write_text("")
    failing(build(pairs, tmp_path / "shards", model, "--on-error", "skip"), "no usable sample is left")


@pytest.mark.parametrize("name", ["a file", "a file/below"])
def test_out_must_be_a_folder(name: str, pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    (tmp_path / "a file").touch()
    assert build(pairs, tmp_path / "shards", model).code == 0
    for result in (
        build(pairs, tmp_path / name, model),
        run("qwen-cache", "merge", tmp_path / "shards", "--out", tmp_path / name),
        run("qwen-cache", "migrate", "v2", "v1", tmp_path / "shards", "--out", tmp_path / name),
    ):
        failing(result, f"{tmp_path / name}: ", "not a folder")


def test_check_goes_with_a_dry_run(pairs: Path, tmp_path: Path, model: Path) -> None:
    failing(build(pairs, tmp_path / "shards", model, "--check"), "--check goes with --dry-run")
    assert not (tmp_path / "shards").exists()


def test_a_wrong_path_names_it(tmp_path: Path, model: Path) -> None:
    failing(build(tmp_path / "nowhere", tmp_path / "shards", model), "nowhere", "→")


def test_a_model_without_a_part_names_it(pairs: Path, tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    shutil.rmtree(broken / "vae")
    failing(build(pairs, tmp_path / "shards", broken), "the model has no vae", str(broken))
    (broken / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    failing(build(pairs, tmp_path / "shards", broken), "this pipeline is not supported", "found FluxPipeline")
    (broken / "model_index.json").write_text("{")
    told = "model_index.json: this file cannot be read: Expecting property name"
    failing(build(pairs, tmp_path / "shards", broken), told, "download this component again")
    (broken / "model_index.json").unlink()
    failing(build(pairs, tmp_path / "shards", broken), "it has no model_index.json")
    failing(build(pairs, tmp_path / "shards", tmp_path / "none"), "no such folder", "none")


def test_weights_that_lack_tensors_are_refused(pairs: Path, tmp_path: Path, model: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    path = broken / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["encoder.conv_in.weight"]
    save_file(weights, path)
    failing(build(pairs, tmp_path / "shards", broken), "missing keys", "encoder.conv_in.weight")


def test_a_tokenizer_without_its_vocabulary_is_refused(pairs: Path, tmp_path: Path, model: Path) -> None:
    """transformers would make one that is empty, so that every prompt is encoded as if it had no words."""
    broken = Path(shutil.copytree(model, tmp_path / "model"))
    (broken / "processor" / "tokenizer.json").unlink()
    message = "the tokenizer loses text (expected 'a prompt, 提示', found '')\n  → download this component again"
    failing(build(pairs, tmp_path / "shards", broken), f"error: {broken / 'processor'}: {message}")


def test_a_device_that_is_not_there_lists_those_that_are(pairs: Path, tmp_path: Path, model: Path) -> None:
    result = build(pairs, tmp_path / "shards", model, "--vae-device", "cuda:7")
    failing(result, "--vae-device: no such device", "found cuda:7", "cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "data.vae_image_sise=7"], "did you mean data.vae_image_size?"),
        (["--set", "dat.source=x"], "did you mean data?"),
        (["--set", "data.source"], "--set takes section.key=value"),
        (["--dtype", "float16"], "--dtype"),
        (["--format", "v3"], "--format"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such file"),
    ],
)
def test_a_wrong_setting_names_it(options: list[str], message: str, pairs: Path, tmp_path: Path, model: Path) -> None:
    failing(build(pairs, tmp_path / "shards", model, *options), message)


def test_a_cache_of_the_other_version_is_not_overwritten(
    pairs: Path, tmp_path: Path, model: Path, built: Callable[..., Path]
) -> None:
    out = shutil.copytree(built("edit-plus", ("--format", "v1")), tmp_path / "shards")
    before = contents(out)
    failing(build(pairs, out, model), "another format version", "expected v2, found v1", "--format v1")
    assert contents(out) == before


def test_a_prompt_that_stands_for_pixels_is_refused(pairs: Path, tmp_path: Path, model: Path) -> None:
    (pairs / "target_images" / "cup.txt").write_text("paint <|image_pad|> blue")
    failing(build(pairs, tmp_path / "shards", model), "1 problem", "cup: the prompt contains <|image_pad|>")


def test_too_many_controls_for_the_pipeline(pairs: Path, tmp_path: Path, tiny_model: TinyModel) -> None:
    result = build(pairs, tmp_path / "shards", tiny_model("edit"))
    failing(result, "cat: QwenImageEditPipeline takes 1 control image, found 2")


def test_check_turns_a_stale_cache_into_an_exit_code(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model, "--dry-run", "--check").code == 1
    assert not out.exists(), "a dry run writes nothing"
    build(pairs, out, model)
    assert build(pairs, out, model, "--dry-run", "--check").code == 0
    change_prompt(pairs)
    assert build(pairs, out, model, "--dry-run", "--check").code == 1


def test_a_file_that_changes_during_the_build_is_noticed(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = preflight.load_lanes

    def change_then_load(job: BuildJob) -> Any:
        change_target(pairs)
        return load(job)

    monkeypatch.setattr(preflight, "load_lanes", change_then_load)
    failing(build(pairs, tmp_path / "shards", model), "the file changed while the cache was being built")
