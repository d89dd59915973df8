"""The commits of caches that a run follows (`train.follow`): which were taken in when, and what reads them again.

    out/commits/sequence.json     which commits were taken in, at which step, and where new ones were looked for last
    out/commits/ID/               cache.json and index of a commit, while a checkpoint may need it; the shards stay

ID is the hash of the manifest. A run that is resumed repeats the sequence, so it equals one that was not interrupted
whenever the builder has committed. Refused: a commit that is neither here nor the newest of its cache, one of another
recipe or format version, and a damaged sequence.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from qwen_cache.batching import Begin
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_configured
from qwen_cache.format.identity import HASH_PATTERN, content_hash
from qwen_cache.format.index import KEY_DIGITS
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import WeightedCache
from qwen_cache.storage.files import make_folder, read_file, remove_folder, write_durably
from qwen_cache.storage.remembered import ZEROS, own_hash, with_own_hash
from qwen_cache.storage.remote import location
from qwen_cache.terminal import console, plural
from qwen_cache.text import parse_json, plain
from qwen_train.data.samples import Mixture
from qwen_train.run import COMMITS, SEQUENCE, ToEncode

POLL_SECONDS = 10.0
"""A first commit takes minutes of encoding; a look at a URL is one small request."""


class LostCommitError(TrainError):
    """Neither the run folder nor the cache has a commit any more."""


@dataclass(frozen=True)
class TakenIn:
    """A commit of each cache of a run, and where the run began to train it."""

    step: int
    """The first step that trains it."""
    begin: Begin
    commits: tuple[str, ...]
    """The id of each cache's commit."""
    recipes: tuple[str, ...]
    """The name of each cache's recipe."""
    identity: str
    samples: int

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> TakenIn:
        """The entry as `to_json` wrote it; ValueError, LookupError or TypeError for another value."""
        begin = Begin(*(_count(value["begin"][field.name]) for field in fields(Begin)))
        commits, recipes = tuple(map(str, value["commits"])), tuple(map(str, value["recipes"]))
        if not all(map(HASH_PATTERN.fullmatch, commits)) or not 0 < len(commits) == len(recipes):
            raise ValueError("not the ids of commits")
        return cls(_count(value["step"]), begin, commits, recipes, str(value["identity"]), _count(value["samples"]))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CommitSequence:
    """The commit that a run has taken in, and how many samples it had trained when it looked for a commit last."""

    taken: tuple[TakenIn, ...] = ()
    looked: int = 0


# ---- commits of caches -----------------------------------------------------------------------------------------------


def followed(config: Config) -> list[WeightedCache]:
    """The caches of a run, as entries of `train.caches`."""
    return config.train.caches or [WeightedCache(path=config.cache.path, recipe=config.cache.recipe)]


def commit_id(manifest: Manifest) -> str:
    """The hash of a manifest: equal manifests are one commit."""
    return content_hash(manifest.to_bytes())


def ids_of(samples: Mixture) -> tuple[str, ...]:
    """The id of each cache's commit."""
    return tuple(commit_id(cache.manifest) for cache in samples.caches)


def newest_commits(config: Config) -> tuple[str, ...] | None:
    """The id of each cache's newest commit, by one small read each; None if a cache has none with samples."""
    ids = []
    for entry in followed(config):
        manifest = directory.read_manifest(location(entry.path))
        if manifest is None or not manifest.index.samples:
            return None
        ids.append(commit_id(manifest))
    return tuple(ids)


def wait_for_commits(config: Config) -> None:
    """Return as soon as every cache has a commit with samples; says once what it waits for."""
    waited = False
    while newest_commits(config) is None:
        if not waited:
            names = " and ".join(plain(location(entry.path)) for entry in followed(config))
            text = f"waiting for the first commit of {names}; looking every {POLL_SECONDS:g} seconds, Ctrl-C stops"
            console().print(text, markup=False)
        waited = True
        time.sleep(POLL_SECONDS)


def keep_commits(config: Config, out: Path) -> tuple[str, ...]:
    """Write manifest and index of each cache's newest commit to the output folder; their ids."""
    ids = []
    for entry in followed(config):
        manifest, index = directory.load(location(entry.path))
        ids.append(commit_id(manifest))
        folder = _folder(out, ids[-1])
        if not (folder / MANIFEST_NAME).is_file():
            make_folder(folder)
            write_durably(directory.pending_index(folder, manifest), index)
            write_durably(folder / MANIFEST_NAME, manifest.to_bytes())
    return tuple(ids)


def open_commits(config: Config, ids: Sequence[str], recipes: Sequence[str | None], out: Path) -> Mixture:
    """The caches at these commits, as the output folder or they themselves have them; LostCommitError otherwise."""
    entries, caches = followed(config), list[Cache]()
    for entry, wanted, recipe in zip(entries, ids, recipes, strict=True):
        settings, kept = config.cache.model_copy(update={"recipe": recipe}), _folder(out, wanted)
        listed = kept if (kept / MANIFEST_NAME).is_file() else None
        cache = open_configured(settings, entry.path, commit=listed)
        if (found := commit_id(cache.manifest)) != wanted:
            raise LostCommitError(
                "the commit that is to be trained is not kept here, and the cache has another one by now",
                where=kept if listed else cache.folder,
                expected=f"commit {wanted}",
                found=found,
                do=f"restore the folder {COMMITS} of the run, or start a new run with another --out",
            )
        caches.append(cache)
    return Mixture(caches, entries)


def check_same_recipe(before: Mixture, after: Mixture) -> None:
    """TrainError for commits of another recipe or format version than those in training."""
    for old, new in zip(before.caches, after.caches, strict=True):
        for what, was, now in (
            ("format version", old.format_version, new.format_version),
            ("recipe", old.recipe.id, new.recipe.id),
        ):
            if was != now:
                raise TrainError(
                    f"a new commit of this cache has another {what}, and a run trains samples of one",
                    where=new.folder,
                    expected=f"{what} {was}",
                    found=now,
                    do="build the cache with the settings that it was begun with and resume, or start a new run with "
                    "another --out",
                )


# ---- the sequence ----------------------------------------------------------------------------------------------------


def read_sequence(out: Path) -> CommitSequence:
    """The sequence of the run in `out`, empty without one; TrainError if the file is damaged."""
    path = out / COMMITS / SEQUENCE
    try:
        data = read_file(path)
    except FileNotFoundError:
        return CommitSequence()
    with suppress(ValueError, LookupError, TypeError, AttributeError):
        value = parse_json(data)
        if own_hash(data, str(value["xxh3_128"])) == value["xxh3_128"]:
            return CommitSequence(tuple(map(TakenIn.of, value["commits"])), _count(value["looked"]))
    do = "remove it: the run then goes by its checkpoint, and takes in the newest commit at the next end of an epoch"
    raise TrainError("this file was changed after it was written", where=path, do=do)


def write_sequence(out: Path, sequence: CommitSequence) -> None:
    make_folder(out / COMMITS)
    value = {"commits": [each.to_json() for each in sequence.taken], "looked": sequence.looked, "xxh3_128": ZEROS}
    write_durably(out / COMMITS / SEQUENCE, with_own_hash(json.dumps(value, indent=1) + "\n"))


def remove_commits(out: Path, needed: Iterable[TakenIn] = ()) -> None:
    """Remove the manifests and indexes of all other commits than these; what is in use stays for a later call."""
    names = {SEQUENCE, *(commit for each in needed for commit in each.commits)}
    for path in (out / COMMITS).glob("*"):
        with suppress(OSError):
            if path.name not in names and path.is_dir():
                remove_folder(path)


def describe(taken: TakenIn, before: TakenIn | None = None) -> str:
    """A commit in words, for one line."""
    was = f" ({before.samples} before)" if before else ""
    return f"{plural(taken.samples, 'sample')}{was}, identity {taken.identity[:KEY_DIGITS]}, from step {taken.step} on"


def check_followable(config: Config, to_encode: ToEncode | None) -> None:
    """ConfigError for settings that need all samples before the first step."""
    if not config.train.follow:
        return
    if to_encode is not None:
        do = "build a cache, and train that while it is built"
        raise ConfigError("train.follow is for caches, and a run that encodes has none", found=to_encode.source, do=do)
    if config.train.tabulated_modulation and config.validation.validation_steps:
        raise ConfigError(
            "train.tabulated_modulation makes its table before training, and later commits hold out other samples, at "
            "other noise levels",
            found=f"train.follow=true and validation.validation_steps={config.validation.validation_steps}",
            do="set train.tabulated_modulation=false, or remove validation.validation_steps",
        )


def _folder(out: Path, commit: str) -> Path:
    return out / COMMITS / commit


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of samples")
    return value
