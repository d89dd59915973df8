"""A run that follows a cache trains each epoch on one commit, and resumed equals uninterrupted whatever came meanwhile.

The judge of the order is what the commits have in them, that of a resumed run the run that was not interrupted. Builds
use encoders that give noise, and their commits are replayed by copying files as a commit moves them.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.batching import BEGIN, Begin
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format import directory
from qwen_cache.format.manifest import MANIFEST_NAME, IndexFile, Manifest
from qwen_cache.storage.remembered import write_checksums
from qwen_train import train as training
from qwen_train.data import commits
from qwen_train.data.commits import TakenIn
from qwen_train.data.samples import Mixture
from qwen_train.training.follow import Follower

from .support.caches import build
from .support.commands import refused
from .support.crash import Crash
from .support.runs import EVERYTHING_RANDOM, SMALL, Trainer, column, differences, run_training, two, written
from .support.sources import write_pairs

COUNTS = (4, 7, 9)
"""Samples of the commits."""
FOLLOW = {**EVERYTHING_RANDOM, "train.follow": True, "train.max_steps": 8, "train.checkpointing_steps": 1}
FOLLOW |= {"train.gradient_accumulation_steps": 1, "train.checkpoints_total_limit": 0}


def add_pairs(data: Path, count: int) -> None:
    """Pairs of noise that sort behind those that are there."""
    for i in range(count):
        name = f"z{len(list((data / 'target_images').glob('*.png'))):02}"
        for folder, shade in (("control_images", 3 * i), ("target_images", 200 - i)):
            Image.effect_noise((128, 96 + 32 * (i % 2)), 40 + shade % 50).convert("RGB").save(
                data / folder / f"{name}.png"
            )
        (data / "target_images" / f"{name}.txt").write_text(f"noise {name}", encoding="utf-8")


class Growing:
    """A cache, and its commits one after the other."""

    def __init__(self, folder: Path, after: Sequence[Path]) -> None:
        self.folder, self.commits, self.keys = folder, after, [keys(each) for each in after]

    def commit(self, number: int) -> None:
        """Make the cache what it was after that commit, in the order in which a builder writes."""
        source = self.commits[number]
        self.folder.mkdir(exist_ok=True)
        for shard in source.glob("*.tar"):
            if not (self.folder / shard.name).exists():
                shutil.copy(shard, self.folder)
        for name in ("index.parquet", "cache.json"):
            shutil.copy(source / name, self.folder / f".{name}.new")
        manifest = json.loads((source / "cache.json").read_text(encoding="utf-8"))
        pending = self.folder / f"index-{manifest['index']['xxh3_128']}.parquet"
        shutil.copy(source / "index.parquet", pending)
        os.replace(self.folder / ".cache.json.new", self.folder / "cache.json")
        os.replace(self.folder / ".index.parquet.new", self.folder / "index.parquet")
        pending.unlink()


def keys(cache: Path) -> list[str]:
    return [str(key) for key in open_cache(cache).table["key"].to_pylist()]


@pytest.fixture
def growing(fast: list[Any], tiny_model: Callable[[str], Path], tmp_path: Path) -> Growing:
    """A cache without a commit yet, and three commits that each add samples."""
    data, out, after = write_pairs(tmp_path / "source"), tmp_path / "building", list[Path]()
    for count in COUNTS:
        add_pairs(data, count - len(list((data / "target_images").glob("*.png"))))
        assert build(data, out, tiny_model("edit-plus")).code == 0
        after.append(shutil.copytree(out, tmp_path / f"commit-{count}"))
    return Growing(tmp_path / "shards", after)


@pytest.fixture
def follow(growing: Growing, tiny_model: Callable[[str], Path], tmp_path: Path) -> Trainer:
    return Trainer(growing.folder, tiny_model("edit-plus"), tmp_path)


def at_batches(patch: pytest.MonkeyPatch, actions: dict[int, Callable[[], None]]) -> list[tuple[str, ...]]:
    """Do something while the run computes these batches, counted from 0; the keys of all batches, as they come."""
    batches, compute_loss, seen = itertools.count(), training.compute_loss, list[tuple[str, ...]]()

    def watched(model: Any, batch: Any, *rest: Any) -> torch.Tensor:
        seen.append(batch.keys)
        actions.get(next(batches), lambda: None)()
        return compute_loss(model, batch, *rest)

    patch.setattr(training, "compute_loss", watched)
    return seen


# ---- the follower alone ----------------------------------------------------------------------------------------------


def followed(train: Trainer, taken: Sequence[TakenIn] = ()) -> Follower:
    """The follower of a new run, or of one that is resumed when it had taken in these commits."""
    config, out = train.config(settings=FOLLOW), train.folder / "out"
    if taken:
        samples = commits.open_commits(config, taken[-1].commits, taken[-1].recipes, out)
    else:
        samples = Mixture([open_cache(train.cache)], commits.followed(config))
    start: Any = SimpleNamespace(config=config, out=out, samples=samples, taken=tuple(taken))
    return Follower.beginning(start, is_main=True)


def count(samples: Mixture, begin: Begin) -> int:
    return len(samples)


def test_a_resumed_follower_decides_what_was_decided_and_has_what_that_takes(growing: Growing, follow: Trainer) -> None:
    """An end of an epoch without a new commit, and two with; a checkpoint is at the first commit."""
    ends = [Begin(1, 4, 4, 2), Begin(2, 8, 8, 4), Begin(3, 15, 15, 8)]
    growing.commit(0)
    first, out = followed(follow), follow.folder / "out"
    (out / "checkpoint-1").mkdir()
    state = {"fixed": {}, "origin": {"model": "a model"}, "commits": [first.taken[0].to_json()]}
    (out / "checkpoint-1" / "state.json").write_text(json.dumps(state), encoding="utf-8")
    write_checksums(out / "checkpoint-1")
    found = [first.look(ends[0], 3, count)]
    for number in (1, 2):
        growing.commit(number)
        found.append(first.look(ends[number], 4 * number + 1, count))
    assert found == [None, 7, 9]
    again = followed(follow, first.taken[:1])
    assert [again.look(end, step, count) for end, step in zip(ends, (3, 5, 9), strict=True)] == found
    assert again.taken == first.taken


def test_only_a_commit_with_other_samples_that_is_accepted_is_taken_in(
    growing: Growing, follow: Trainer, tiny_model: Callable[[str], Path]
) -> None:
    growing.commit(0)
    follower, out = followed(follow), follow.folder / "out"
    manifest = directory.read_manifest(growing.folder)
    assert manifest
    rewritten = replace(manifest, written_by={"qwen-cache": "another version"})
    (growing.folder / MANIFEST_NAME).write_bytes(rewritten.to_bytes())
    assert follower.look(Begin(1, 4, 4, 2), 3, count) is None

    def refuse(*_: object) -> int:
        raise ConfigError("it does not fit")

    growing.commit(1)
    with pytest.raises(ConfigError, match="it does not fit"):
        follower.look(Begin(2, 8, 8, 4), 5, refuse)
    options = ("--set", "data.vae_image_size=9216", "--replace")
    assert build(follow.folder / "source", growing.folder, tiny_model("edit-plus"), *options).code == 0
    with pytest.raises(TrainError, match="another recipe"):
        follower.look(Begin(2, 8, 8, 4), 5, count)
    assert len(follower.taken) == len(commits.read_sequence(out).taken) == 1
    growing.commit(2)
    assert follower.look(Begin(2, 8, 8, 4), 5, count) == 9


def test_a_commit_is_kept_whole_or_once_more(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies between the two files of a commit keeps it again, and reads it when the cache has another."""
    growing.commit(0)
    write, written, config, out = commits.write_durably, list[str](), follow.config(settings=FOLLOW), follow.folder

    def die(path: Path, *data: Any) -> None:
        if written:
            raise Crash
        written.append(path.name)
        write(path, *data)

    with monkeypatch.context() as patch:
        patch.setattr(commits, "write_durably", die)
        with pytest.raises(Crash):
            commits.keep_commits(config, out)
    kept = commits.keep_commits(config, out)
    growing.commit(1)
    assert len(commits.open_commits(config, kept, [None], out)) == COUNTS[0]


def test_what_was_trained_is_saved_before_a_refused_commit_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise TrainError("another recipe")

    saved, plan = list[object](), SimpleNamespace(enters_an_epoch=lambda *_: True, next_begin=lambda _: BEGIN)
    monkeypatch.setattr(training, "save", saved.append)
    p: Any = SimpleNamespace(start=None, config=SimpleNamespace(train=SimpleNamespace(gradient_accumulation_steps=1)))
    p.run, p.saved, p.accelerator = SimpleNamespace(step=2, consumed_samples=4), 1, None
    p.batches, p.follower = SimpleNamespace(plan=plan, world_size=1), SimpleNamespace(look=refuse)
    with pytest.raises(TrainError, match="another recipe"):
        training.take_in_commit(p)
    assert saved == [p]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def test_without_new_commits_it_is_the_run_without_following(growing: Growing, follow: Trainer) -> None:
    growing.commit(1)
    settings = {**FOLLOW, "train.max_steps": 3, "train.gradient_accumulation_steps": 2}
    settings |= {"train.checkpointing_steps": 100}
    plain = follow(settings=settings | {"train.follow": False}, out="plain")
    out = follow("--follow", settings=settings | {"train.follow": False})
    for name in ("loss", "grad_norm", "learning_rate"):
        assert column(out, name) == column(plain, name)
    weights = "pytorch_lora_weights.safetensors"
    assert (out / weights).read_bytes() == (plain / weights).read_bytes()
    assert column(out, "cache_samples") == [7] * 3


def epochs_of(seen: Sequence[tuple[str, ...]], sizes: Sequence[int]) -> list[list[str]]:
    """The keys of the batches, cut into epochs of these sizes; the last may be incomplete."""
    flat, ends = list(itertools.chain(*seen)), list(itertools.accumulate(sizes))
    return [sorted(flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def test_each_epoch_is_one_commit_and_new_ones_are_taken_in_at_its_end(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples a step: the first epoch takes 2 steps, one of 7 samples 4. The second commit comes in the first
    epoch, the third in the last step of the second: it counts, as the next epoch has not begun."""
    growing.commit(0)
    with monkeypatch.context() as patch:
        seen = at_batches(patch, {0: lambda: growing.commit(1), 5: lambda: growing.commit(2)})
        follow.page = True
        result = follow.try_("--follow", settings=FOLLOW | {"train.max_steps": 11})
    assert result.code == 0, result.stderr
    out, said = follow.folder / "out", " ".join(result.stderr.split())
    assert epochs_of(seen, COUNTS) == [sorted(each) for each in growing.keys]
    names = [open_cache(each).identity[:12] for each in growing.commits]
    assert f"new commit: 7 samples (4 before), identity {names[1]}, from step 3 on" in said
    assert f"new commit: 9 samples (7 before), identity {names[2]}, from step 7 on" in said
    assert column(out, "cache_samples") == [4] * 2 + [7] * 4 + [9] * 5
    page = (out / "report.html").read_text(encoding="utf-8")
    listed = zip(COUNTS, names, (1, 3, 7), strict=True)
    assert "; ".join(f"{count} samples, identity {name}, from step {step} on" for count, name, step in listed) in page
    state = json.loads((out / "checkpoint-11" / "state.json").read_text(encoding="utf-8"))
    assert [(each["step"], each["samples"], each["begin"]["epoch"]) for each in state["commits"]] == [
        (1, 4, 0),
        (3, 7, 1),
        (7, 9, 2),
    ]
    positions = [each["begin"]["position"] for each in state["commits"]]
    assert positions == [0, 4, 11]  # none is used twice, so no noise is
    assert state["origin"]["cache"] == open_cache(growing.folder).identity


@pytest.mark.fast_cases(0)
@pytest.mark.parametrize("step", range(1, 8))
def test_dead_in_any_step_and_resumed_equals_uninterrupted(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """The builder continues while the run is dead: what comes then is taken in when it would have been."""
    coming = {0: lambda: growing.commit(1), 4: lambda: growing.commit(2)}
    growing.commit(0)
    with monkeypatch.context() as patch:
        at_batches(patch, coming)
        whole = written(follow(settings=FOLLOW, out="whole"))
    shutil.rmtree(growing.folder)
    growing.commit(0)

    def die() -> None:
        raise Crash

    with monkeypatch.context() as patch:
        at_batches(patch, coming | {step: lambda: (coming.get(step, lambda: None)(), die())})
        with pytest.raises(Crash):
            follow.try_(settings=FOLLOW)
    with monkeypatch.context() as patch:
        at_batches(patch, {at - step: act for at, act in coming.items() if at > step})
        assert differences(written(follow("--resume", settings=FOLLOW)), whole) == []


@pytest.mark.slow
def test_what_the_run_decided_before_it_died_is_decided_again(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checkpoints far apart: an end of an epoch without a new commit, and one with; by the time of resuming the
    cache has a newer one, which is taken in only where the run had not been."""
    settings = FOLLOW | {"train.checkpointing_steps": 3, "train.max_steps": 12}
    growing.commit(0)
    with monkeypatch.context() as patch:
        seen = at_batches(patch, {3: lambda: growing.commit(1), 7: lambda: growing.commit(2)})
        whole = written(follow(settings=settings, out="whole"))
    assert epochs_of(seen, (4, 4, 7, 7))[3] != epochs_of(seen, (4, 4, 7, 7))[2]
    shutil.rmtree(growing.folder)
    growing.commit(0)

    def die() -> None:
        growing.commit(2)
        raise Crash

    with monkeypatch.context() as patch:
        at_batches(patch, {3: lambda: growing.commit(1), 5: die})
        with pytest.raises(Crash):
            follow.try_(settings=settings)
    assert [path.name for path in (follow.folder / "out").glob("checkpoint-*")] == ["checkpoint-3"]
    assert differences(written(follow("--resume", settings=settings)), whole) == []


@pytest.mark.slow
def test_a_step_that_would_reach_beyond_the_epoch_begins_with_the_new_commit(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of three batches of two: the first trains an epoch of 4 and half of the next. Then a commit has come, which
    begins with a whole epoch, and another; each takes more than a step, and its rest fills none."""
    growing.commit(0)
    settings = FOLLOW | {"train.gradient_accumulation_steps": 3, "train.max_steps": 3}
    with monkeypatch.context() as patch:
        seen = at_batches(patch, {1: lambda: growing.commit(1), 4: lambda: growing.commit(2)})
        out = follow(settings=settings)
    assert column(out, "cache_samples") == [4, 7, 9]
    first, second, third = (list(itertools.chain(*seen[i : i + 3])) for i in (0, 3, 6))
    assert sorted(first[:4]) == sorted(growing.keys[0])
    assert [len(first), len(second), len(third)] == [6, len({*second}), len({*third})]
    assert {*second} <= {*growing.keys[1]}
    assert {*third} <= {*growing.keys[2]}
    state = json.loads((out / "checkpoint-3" / "state.json").read_text(encoding="utf-8"))
    assert [each["begin"]["epoch"] for each in state["commits"]] == [0, 2, 3]
    assert [each["begin"]["samples"] for each in state["commits"]] == [0, 6, 6 + len(second)]


@pytest.mark.slow
def test_a_commit_of_another_recipe_is_refused_and_what_was_trained_is_saved(
    growing: Growing, follow: Trainer, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.commit(0)
    settings, before = FOLLOW | {"train.checkpointing_steps": 100}, growing.folder / "cache.json"

    def rebuild() -> None:
        data = follow.folder / "source"
        assert (
            build(data, growing.folder, tiny_model("edit-plus"), "--set", "data.vae_image_size=9216", "--replace").code
            == 0
        )

    recipe = json.loads(before.read_text(encoding="utf-8"))["recipes"]["default"]["id"]
    with monkeypatch.context() as patch:
        at_batches(patch, {1: rebuild})
        result = follow.try_(settings=settings)
    said = "a new commit of this cache has another recipe, and a run trains samples of one (expected recipe "
    refused(result, str(growing.folder), said + recipe, "build the cache with the settings that it was begun with")
    assert [path.name for path in (follow.folder / "out").glob("checkpoint-*")] == ["checkpoint-2"]
    growing.commit(1)
    assert column(follow("--resume", settings=settings), "cache_samples") == [4] * 2 + [7] * 4 + [7] * 2


@pytest.mark.slow
def test_the_builder_itself_adds_and_removes_rows_meanwhile(
    growing: Growing, follow: Trainer, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit in training is read to the end of its epoch, from `.replaced` too; what was removed is then no longer
    trained. Once `gc` has removed it, a run cannot be resumed in the middle of that epoch."""
    data = follow.folder / "source"
    follow.cache = follow.folder / "building"

    def rebuild() -> None:
        for name in ("cat", "z04", "z05"):
            for path in data.rglob(f"{name}*"):
                path.unlink()
        assert build(data, follow.cache, tiny_model("edit-plus")).code == 0

    settings, before = FOLLOW | {"train.checkpointing_steps": 1}, keys(follow.cache)
    with monkeypatch.context() as patch:
        seen = at_batches(patch, {2: rebuild})
        out = follow(settings=settings)
    after = keys(follow.cache)
    assert (len(before), len(after)) == (9, 6)
    assert epochs_of(seen, (9, 6)) == [sorted(before), sorted(after)]
    for step in range(4, 9):
        shutil.rmtree(out / f"checkpoint-{step}")
    follow("--resume", settings=settings)
    for step in range(4, 9):
        shutil.rmtree(out / f"checkpoint-{step}")
    shutil.rmtree(follow.cache / ".replaced")
    what = "the cache was changed while it was read: its manifest no longer names this shard, and it is removed"
    refused(follow.try_("--resume", settings=settings), what)


def test_it_waits_for_the_first_commit(growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        """A commit without samples comes first."""
        waited.append(seconds)
        if len(waited) == 1:
            growing.folder.mkdir()
            empty = replace(Manifest.empty(2), index=IndexFile(0, 1, 32 * "0"))
            (growing.folder / MANIFEST_NAME).write_bytes(empty.to_bytes())
        if len(waited) == 3:
            growing.commit(0)

    monkeypatch.setattr(commits.time, "sleep", sleep)
    result = follow.try_("--follow", settings=SMALL | {"train.max_steps": 1})
    assert result.code == 0, result.stderr
    text = f"waiting for the first commit of {growing.folder}; looking every 10 seconds, Ctrl-C stops"
    assert " ".join(result.stderr.split()).count(text) == 1
    assert waited == [10] * 3


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_and_leaves_nothing(follow: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commits.time, "sleep", sleep)
    result = follow.try_("--follow", settings=SMALL)
    assert result.code == 130, result.stderr
    assert not (follow.folder / "out").exists()


@pytest.mark.slow
def test_a_commit_that_is_nowhere_any_more_is_named(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.commit(0)
    with monkeypatch.context() as patch:
        at_batches(patch, {0: lambda: growing.commit(1)})
        out = follow(settings=FOLLOW | {"train.max_steps": 3})
    file = out / "commits" / "sequence.json"
    sequence = file.read_bytes()
    file.write_bytes(sequence.replace(b'"looked": 4', b'"looked": 5'))
    refused(
        follow.try_("--resume", settings=FOLLOW), str(file), "this file was changed after it was written", "remove it"
    )
    file.unlink()
    growing.commit(2)
    result = follow.try_("--resume", settings=FOLLOW | {"train.max_steps": 4})
    assert result.code == 0, result.stderr
    for folder in (out / "commits").iterdir():
        if folder.is_dir():
            shutil.rmtree(folder)
    what = "the commit that is to be trained is not kept here, and the cache has another one by now"
    refused(follow.try_("--resume", settings=FOLLOW), what, "restore the folder commits of the run")


@pytest.mark.slow
@pytest.mark.parametrize("begun", [True, False])
def test_following_is_not_changed_in_the_middle_of_a_run(growing: Growing, follow: Trainer, begun: bool) -> None:
    growing.commit(0)
    settings = FOLLOW | {"train.max_steps": 1, "train.follow": begun}
    out = follow(settings=settings)
    result = follow.try_("--resume", settings=settings | {"train.follow": not begun, "train.max_steps": 2})
    said = "expected True, found none, or without effect" if begun else "expected none, or without effect, found True"
    refused(
        result, f"another train.follow, so it cannot be resumed ({said})", f"run --resume --out {out} --set train.max"
    )


def test_settings_that_need_all_samples_are_refused(growing: Growing, follow: Trainer) -> None:
    source = str(follow.folder / "source")
    refused(
        follow.try_("--follow", "--encode-on-the-fly", "--set", f"data.source={source}"),
        "train.follow is for caches, and a run that encodes has none",
        "build a cache, and train that while it is built",
    )
    table = {"train.tabulated_modulation": True, "train.validation_split": 0.3, "validation.validation_steps": 1}
    refused(
        follow.try_("--follow", settings=SMALL | table),
        "train.tabulated_modulation makes its table before training",
        "set train.tabulated_modulation=false, or remove validation.validation_steps",
    )


@pytest.mark.slow
def test_what_is_held_out_is_never_trained_whatever_comes(
    growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing.commit(0)
    compute_loss, trained, measured = training.compute_loss, list[str](), list[set[str]]()

    def watched(model: Any, batch: Any, *rest: Any) -> torch.Tensor:
        if model.training:
            trained.extend(batch.keys)
            measured.append(set())
            if len(measured) in (1, 3):
                growing.commit(1 + len(measured) // 3)
        elif measured:  # not the measure before training
            measured[-1] |= {*batch.keys}
        return compute_loss(model, batch, *rest)

    settings = FOLLOW | {"train.validation_split": 0.6, "validation.validation_steps": 1}
    with monkeypatch.context() as patch:
        patch.setattr(training, "compute_loss", watched)
        out = follow(settings=settings | {"train.checkpointing_steps": 100})
    assert {*column(out, "cache_samples")} == {4, 7, 9}
    assert not {*trained} & set[str]().union(*measured)
    assert measured[0] < measured[-1]
    assert {*trained} | measured[-1] == {*growing.keys[2]}


@pytest.mark.slow
def test_of_several_caches_each_may_grow(growing: Growing, follow: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second has its own commits, half of which come in an epoch."""
    growing.commit(0)
    other = Growing(follow.folder / "other", growing.commits)
    other.commit(1)
    caches = [{"path": str(growing.folder)}, {"path": str(other.folder), "weight": 2.0}]
    settings = FOLLOW | {"train.caches": caches, "train.max_steps": 34, "train.checkpointing_steps": 100}
    follow.cache = Path("unused")
    arguments = [each for each in follow.arguments(settings=settings) if each != follow.cache][1:]
    with monkeypatch.context() as patch:
        seen = at_batches(patch, {3: lambda: growing.commit(1), 12: lambda: other.commit(2)})
        result = run_training(*arguments)
    assert result.code == 0, result.stderr
    assert list(dict.fromkeys(column(follow.folder / "out", "cache_samples"))) == [11, 14, 16]
    sizes = (4 + 14, 7 + 14, 7 + 18)
    expected = [growing.keys[0] + 2 * growing.keys[1], 3 * growing.keys[1], growing.keys[1] + 2 * growing.keys[2]]
    assert epochs_of(seen, sizes) == [sorted(each) for each in expected]


GROWS = """
import os, shutil, sys
from pathlib import Path
from qwen_train import train as training
where, commits = Path(sys.argv.pop(1)), [Path(each) for each in sys.argv.pop(1).split(os.pathsep)]
if sys.argv.pop(1) == "apart" and os.environ["RANK"] == "1":
    sys.argv += ["--set", "train.output_dir=" + str(where.parent / "elsewhere")]
compute, batches = training.compute_loss, []

def growing(*arguments):
    batches.append(None)
    if os.environ["RANK"] == "1" and len(batches) in (1, 4):
        source = commits[len(batches) // 4]
        for path in sorted(source.glob("*.tar")):
            if not (where / path.name).exists():  # the other process may be reading it
                shutil.copy(path, where)
        for name in ("index.parquet", "cache.json"):
            shutil.copy(source / name, where / f".{name}.new")
        os.replace(where / ".index.parquet.new", where / "index.parquet")
        os.replace(where / ".cache.json.new", where / "cache.json")
    return compute(*arguments)

training.compute_loss = growing
from qwen_train.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("folders", ["one", "apart"])
def test_two_processes_take_in_the_same_commits_and_one_continues(
    growing: Growing, follow: Trainer, folders: str
) -> None:
    """The second process commits while the first may be looking: both train what the first has seen, also without a
    common output folder, where the second opens the cache itself."""
    program = follow.folder / "grows.py"
    program.write_text(GROWS, encoding="utf-8")
    later = os.pathsep.join(map(str, growing.commits[1:]))
    settings = {**FOLLOW, "train.batch_size": 1, "train.lora.lora_dropout": 0, "train.max_steps": 9}
    growing.commit(0)
    done = two(follow, settings=settings, program=[program, growing.folder, later, folders])
    assert done.returncode == 0, done.stderr
    out = follow.folder / "out"
    sizes = column(out, "cache_samples")
    assert (sizes[0], sizes[-1]) == (4, 9)
    assert done.stderr.count("new commit: ") == len({*sizes}) - 1
    for step in range(5, 10):
        shutil.rmtree(out / f"checkpoint-{step}")
    losses = column(out, "loss")
    follow("--resume", settings=settings | {"train.gradient_accumulation_steps": 2})
    assert column(out, "cache_samples") == sizes
    assert column(out, "loss") == pytest.approx(losses, rel=1e-4)
