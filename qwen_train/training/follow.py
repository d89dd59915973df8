"""Following caches that are still being built: at the end of an epoch a run takes in what was committed meanwhile.

All processes train the same commit: the first process looks and decides, the others open exactly what it names. What it
decides is written down before it is trained, and a resumed run decides the same. Refused: a commit of another recipe or
format version, and one that a process can neither find in the output folder nor in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from qwen_cache.batching import BEGIN, Begin
from qwen_cache.errors import FormatError, QwenCacheError
from qwen_cache.terminal import console
from qwen_cache.text import plain
from qwen_train.data.checks import check_empty_prompts
from qwen_train.data.commits import (
    CommitSequence,
    LostCommitError,
    TakenIn,
    check_same_recipe,
    describe,
    ids_of,
    keep_commits,
    newest_commits,
    open_commits,
    read_sequence,
    remove_commits,
    write_sequence,
)
from qwen_train.data.samples import Mixture
from qwen_train.run import checkpoints
from qwen_train.training.processes import all_gather_object, together
from qwen_train.training.start import Start, taken_of

T = TypeVar("T")
TRIES = 5
"""Tries of processes that do not share the output folder, and find another commit each; a commit takes minutes."""


class Follower:
    """The commits that a run has taken in, the last of which it trains."""

    def __init__(self, start: Start, *, is_main: bool) -> None:
        """`start` has the commit of its checkpoint, or for a new run the newest of this process."""
        assert isinstance(start.samples, Mixture)
        self.config, self.out, self.is_main = start.config, start.out, is_main
        self.samples: Mixture = start.samples
        self.taken = list(start.taken)
        self._seen = ids_of(start.samples)
        self._recorded = CommitSequence()
        if is_main and self.taken:
            recorded = read_sequence(self.out)
            self._recorded = recorded if recorded.taken[: len(self.taken)] == start.taken else self._recorded

    @classmethod
    def beginning(cls, start: Start, *, is_main: bool) -> Follower:
        """At the commit of the checkpoint, or for a new run at one that all processes agree on; each takes part."""
        follower = cls(start, is_main=is_main)
        if not follower.taken:
            follower._begin()
        return follower

    def begins(self, step: int) -> bool:
        """True if a commit is trained from this step on."""
        return self.taken[-1].step == step

    def _begin(self) -> None:
        if self.is_main:
            remove_commits(self.out)  # of a run that ended before its first checkpoint
        samples = self._agree(lambda: keep_commits(self.config, self.out))
        assert samples is not None
        with together():
            check_same_recipe(self.samples, samples)
            check_empty_prompts(samples, self.config.train.caption_dropout)
        self._take(samples, BEGIN, 1)
        with together():
            self._record(0)

    def look(self, begin: Begin, step: int, prepare: Callable[[Mixture, Begin], T]) -> T | None:
        """Look for commits to train from `begin` and `step` on; what `prepare` makes of them, or None without any.

        Every process takes part. What `prepare` or the commit itself refuses is not recorded, so a later commit can be
        taken in its place. A cache that cannot be reached has nothing new.
        """
        found, made = self._agree(lambda: self._choose(begin)), None
        with together():
            is_new = found is not None and found.identity != self.samples.identity
            if found is not None and is_new:
                check_same_recipe(self.samples, found)
                check_empty_prompts(found, self.config.train.caption_dropout)
                made = prepare(found, begin)
        if found is not None:
            self._seen = ids_of(found)
        if found is not None and is_new:
            self._take(found, begin, step)
        with together():
            self._record(begin.samples)
        return made

    def _agree(self, choose: Callable[[], tuple[str, ...] | None]) -> Mixture | None:
        """The commits that the first process chooses, opened by every process; None if it chooses none."""
        recipes = tuple(cache.recipe_name for cache in self.samples.caches)
        for _ in range(TRIES):
            with together():
                mine = choose() if self.is_main else None
            chosen = all_gather_object(mine)[0]
            if chosen is None:
                return None
            lost, found = None, None
            with together():
                try:
                    found = open_commits(self.config, chosen, recipes, self.out)
                except LostCommitError as error:
                    lost = error
            if not any(all_gather_object(lost is not None)):
                return found
        with together():
            if lost is not None:
                raise lost
        return None

    def _choose(self, begin: Begin) -> tuple[str, ...] | None:
        """The commits that the run took in here before it was interrupted; beyond, the newest that it has not seen."""
        coming = self._recorded.taken[len(self.taken) :]
        if begin.samples <= self._recorded.looked:
            if coming and coming[0].begin == begin:
                return coming[0].commits
            if not coming or coming[0].begin.samples > begin.samples:
                return None
        try:
            newest = newest_commits(self.config)
            return None if newest is None or newest == self._seen else keep_commits(self.config, self.out)
        except FormatError:
            raise
        except QwenCacheError as error:
            text = f"warning: no new commit could be looked for: {plain(error)}"
            console().print(text, style="yellow", markup=False)
            return None

    def _take(self, samples: Mixture, begin: Begin, step: int) -> None:
        names = tuple(cache.recipe_name for cache in samples.caches)
        taken = TakenIn(step, begin, ids_of(samples), names, samples.identity, len(samples))
        if self.is_main and self.taken:
            console().print(f"new commit: {describe(taken, self.taken[-1])}", highlight=False)
        self.taken.append(taken)
        self.samples, self._seen = samples, taken.commits

    def _record(self, looked: int) -> None:
        """Write the sequence, unless this was a repetition, and remove what no checkpoint needs."""
        is_recorded = self._recorded.taken[: len(self.taken)] == tuple(self.taken)
        if not self.is_main or (looked and looked <= self._recorded.looked and is_recorded):
            return
        grown = len(self.taken) > len(self._recorded.taken)
        self._recorded = CommitSequence(tuple(self.taken), looked)
        write_sequence(self.out, self._recorded)
        if grown:
            kept = [len(taken_of(path)) for _, path in checkpoints(self.out)]
            remove_commits(self.out, self.taken[max(0, min(kept, default=len(self.taken)) - 1) :])
