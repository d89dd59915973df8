"""The step of a run to keep: the earliest of those that lie within noise of the best.

Steps are compared by paired differences: each on the same samples, with the same noise. A step is worse only if some
other step is better by more than chance would make it (`within_noise`). The first of `JUDGES` that can tell training
from no LoRA decides; where the other disagrees, that is said. Refused is a choice that the scores do not support: too
few samples, only trained ones, or steps that are no better than no LoRA. Works on a run that trains, was stopped, or
lost checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.html.page import number
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.terminal import plural
from qwen_train.run import METRICS_NAME, REPORT_NAME, checkpoints
from qwen_train.training.scores import HIGHER, JUDGES, UNREADABLE, Score, Scores, read_scores

BEST = "best"
"""The value of `--step` that stands for the proposed one."""
LEAST_UNITS = 5
"""With four samples, even a step that is better on all of them has a chance of 2 in 16."""
CHANCE = 0.1
"""A step is worse if it would look so with at most this chance were it as good. Not less: to leave out a good early
step costs a little training, to keep a bad one costs the LoRA."""
ALL_SIGNS = 12  # units up to which all 4096 combinations of signs are looked at; of more, as many random ones
SET = (
    "set train.validation_split, such as 0.05, with validation.validation_steps for the losses of held-out samples, or "
    f"with validation.num_images={LEAST_UNITS} or more for their images"
)


@dataclass(frozen=True)
class Verdict:
    """A score's judgement of its steps."""

    score: Score
    within: tuple[int, ...]
    """The steps within noise of the best."""

    @classmethod
    def of(cls, score: Score) -> Verdict:
        within = zip(score.steps, within_noise(score.losses), strict=True)
        return cls(score, tuple(step for step, is_within in within if is_within))

    @property
    def tells(self) -> bool:
        """True if it can tell training from no LoRA."""
        return 0 not in self.within


@dataclass(frozen=True)
class Best:
    """The proposed step, and why."""

    folder: Path
    scores: Scores
    step: int | None
    """None if the scores support none."""
    within: tuple[int, ...]
    """The steps that lie within noise of the best, by the score that decides; empty without one."""
    judges: tuple[str, ...]
    """The names of the scores that say how good a step is; the first one decides."""
    reasons: tuple[str, ...]
    """Sentences."""
    kept: frozenset[int]
    """The steps that have a checkpoint."""

    @property
    def checkpoint(self) -> Path | None:
        return None if self.step is None else self.folder / f"checkpoint-{self.step}"

    @property
    def steps(self) -> list[int]:
        """All that were measured."""
        return sorted({step for score in self.scores.scores for step in score.steps})

    @property
    def headline(self) -> str:
        return "no step can be proposed" if self.step is None else f"keep step {self.step:,}"

    def note(self, step: int) -> str:
        """A step's place in the choice, in words; maybe empty."""
        if step == self.step:
            return "proposed"
        if step in self.within:
            place = "best" if len(self.within) == 1 else "within noise"
            return place if step in self.kept else f"{place}, no checkpoint" if step else f"{place}, no LoRA"
        return "no LoRA" if step == 0 else ""

    def document(self) -> dict[str, Any]:
        """All of it as JSON; differences are paired, to the step with the best mean of a score."""
        return {
            "step": self.step,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "within_noise": list(self.within),
            "reasons": list(self.reasons),
            "scores": [
                {
                    "name": score.name,
                    "of": score.of,
                    "units": score.units,
                    "judges": score.name in self.judges,
                    "higher_is_better": score.name in HIGHER,
                    "steps": [
                        {"step": step, "mean": mean, "more_than_best": more, "standard_error": error}
                        for (step, mean), (more, error) in zip(score.means.items(), differences(score), strict=True)
                    ],
                }
                for score in self.scores.scores
            ],
            "likeness": self.scores.likeness or None,
            "unread": [str(path) for path in self.scores.unread],
        }


def best_of(folder: Path) -> Best:
    """The best step of the run in `folder`, as far as its files tell."""
    scores, kept = read_scores(folder), [step for step, _ in checkpoints(folder)]
    judges = [score for score in scores.scores if score.name in JUDGES and len(score.steps) > 1]
    verdicts = [Verdict.of(score) for score in judges if score.units >= LEAST_UNITS]
    verdicts.sort(key=lambda verdict: not verdict.tells)
    within = verdicts[0].within if verdicts else ()

    def made(step: int | None, *reasons: str) -> Best:
        sentences = [_sentence(verdict, step if verdict is not verdicts[0] else None) for verdict in verdicts]
        too_few = [_too_few(score) for score in judges if verdicts and score.units < LEAST_UNITS]
        said = [*reasons, *sentences, *too_few, *_progress(folder, verdicts)]
        names = tuple(verdict.score.name for verdict in verdicts)
        return Best(folder, scores, step, within, names, tuple(said), frozenset(kept))

    if not judges and (measured := sorted({s for each in scores.scores if each.name in JUDGES for s in each.steps})):
        return made(None, f"Of held-out samples only step {measured[0]:,} was measured yet: a choice takes two steps.")
    if not judges:
        trained = ["All images with targets are of trained samples, which cannot show that a LoRA overfits."]
        return made(
            None, *(trained if scores.trained else []), f"Nothing says how good a step is: {SET}.", *_by_eye(folder)
        )
    if not verdicts:
        return made(None, *map(_too_few, judges), f"For more, {SET}.")
    if not verdicts[0].tells:
        what = "Training cannot be told from no LoRA: the model before the first step is within noise of the best."
        return made(None, what)
    there = [step for step in within if step in kept]
    if there:
        earlier = [step for step in within if step < there[0]]
        return made(there[0], _earliest(within, there[0]), *_without_checkpoint(earlier, "earlier"))
    rest = verdicts[0].score.among(kept)
    if not rest.steps:
        do = "set train.checkpointing_steps to the steps that are measured, and train.checkpoints_total_limit=0"
        return made(None, f"No step that was measured has a checkpoint; best is {_listed('step', within)}: {do}.")
    step = Verdict.of(rest).within[0]
    least = f"Of the steps with a checkpoint, {step:,} is the earliest within noise of the best of them."
    return made(step, *_without_checkpoint(within, "better"), least)


def within_noise(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """`[K]` of `[K, n]`, less being better: True for each of K steps that none of the others is better than by more
    than noise.

    A step is tested against all others at once, so that the luckiest of many equal steps leaves out none. The statistic
    is the greatest of its paired t statistics over the other steps. If it were as good, each unit's differences could
    as well have the other sign: the chance of the statistic is its place among those of all combinations of signs (a
    sign-flip test). That is exact for any number of units, and needs no normal distribution.
    """
    count, units = values.shape
    if count == 1:
        return np.ones(1, bool)
    if units <= ALL_SIGNS:
        signs = np.array(list(product((1.0, -1.0), repeat=units)))
    else:
        sampled = np.random.default_rng(0).choice((1.0, -1.0), size=(2**ALL_SIGNS - 1, units))
        signs = np.concatenate([np.ones((1, units)), sampled])
    within = np.zeros(count, bool)
    for k in range(count):
        worse_by = values[k] - np.delete(values, k, axis=0)
        squares = np.square(worse_by).mean(axis=1, keepdims=True)
        means = worse_by @ signs.T / units
        errors = np.sqrt(np.maximum(squares - np.square(means), 1e-12 * squares) / (units - 1))
        greatest = np.divide(means, errors, out=np.zeros_like(means), where=errors > 0).max(axis=0)
        within[k] = (greatest >= greatest[0] - 1e-9 * abs(greatest[0])).mean() > CHANCE
    within[values.mean(axis=1).argmin()] = True
    return within


def differences(score: Score) -> list[tuple[float, float | None]]:
    """By how much each step's mean is more than the best, and the standard error of that paired difference."""
    paired = score.values - score.values[score.losses.mean(axis=1).argmin()]
    if score.units == 1:
        return [(float(row[0]), None) for row in paired]
    return [(float(row.mean()), float(row.std(ddof=1) / np.sqrt(score.units))) for row in paired]


# ---- sentences -------------------------------------------------------------------------------------------------------


def _earliest(within: Sequence[int], step: int) -> str:
    if len(within) == 1:
        return f"Step {step:,} is better than all other steps by more than noise."
    return f"{_listed('Step', within)} are the best, within noise; {step:,} is the earliest of them."


def _sentence(verdict: Verdict, proposed: int | None) -> str:
    """The steps that a score prefers, and how much worse the last one is; and whether it disagrees with a proposal that
    another score made."""
    score, best = verdict.score, verdict.score.best
    means, last = score.means, score.steps[-1]
    near = sorted({*verdict.within} - {best})
    text = f"By the {score.name}, over {plural(score.units, score.of)}, step {best:,} is the best"
    text += f", and {_listed('step', near)} within noise of it" if near else ", by more than noise"
    if last not in verdict.within and score.name in HIGHER:
        text += f"; after step {last:,} it is {number(means[last])} in place of {number(means[best])}"
    elif last not in verdict.within and means[best] > 0:
        text += f"; after step {last:,} it is {number(100 * (means[last] / means[best] - 1))} % higher"
    if proposed in means and proposed not in verdict.within:
        text += f". It disagrees with the proposal, step {proposed:,}: look at the images"
    return f"{text}."


def _listed(word: str, steps: Sequence[int]) -> str:
    """`step 1`, `steps 1, 2`."""
    return f"{word}{'s'[: len(steps) > 1]} {', '.join(f'{step:,}' for step in steps)}"


def _too_few(score: Score) -> str:
    """The score, whose units are too few, without a claim."""
    extreme = "highest" if score.name in HIGHER else "lowest"
    return (
        f"{plural(score.units, score.of)} cannot tell one step from another; that takes {LEAST_UNITS}. "
        f"The {score.name} is {extreme} after step {score.best:,}, which may be chance."
    )


def _without_checkpoint(steps: Sequence[int], how: str) -> list[str]:
    if not steps:
        return []
    verb, what = ("is", "its checkpoint is") if len(steps) == 1 else ("are", "their checkpoints are")
    return [f"{_listed('Step', steps)} {verb} {how}, but {what} missing: removed, or not saved."]


def _progress(folder: Path, verdicts: Sequence[Verdict]) -> list[str]:
    """How far the run is, if it has steps to go."""
    config, last = _settings(folder), verdicts[0].score.steps[-1] if verdicts else 0
    if config is None or not last or last >= config.train.max_steps:
        return []
    return [f"The last step that was measured is {last:,} of {config.train.max_steps:,}: later ones may be better."]


def _by_eye(folder: Path) -> list[str]:
    """The advice for a slider that may have no targets to hold out."""
    config = _settings(folder)
    if config is None or config.train.slider.direction != "prompts":
        return []
    return [f"A slider without targets has no held-out samples: compare its images at each strength in {REPORT_NAME}."]


def _settings(folder: Path) -> Config | None:
    with suppress(ConfigError, OSError, ValueError, RecursionError):
        return load_saved(folder / CONFIG_NAME)
    return None


# ---- folders ---------------------------------------------------------------------------------------------------------


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the proposed step; None without one, or if the folder cannot be read."""
    with suppress(*UNREADABLE):
        return best_of(folder).checkpoint
    return None


def checkpoint_of(folder: Path, step: str) -> Path:
    """The folder of `--step`: a number, or `best`; TrainError or ConfigError if there is none."""
    if folder.is_file():
        instead = "name the output folder of the run in place of the file, or leave out --step"
        raise TrainError("--step chooses among the checkpoints of a run, and this is a file", where=folder, do=instead)
    if not (folder / METRICS_NAME).is_file():
        raise TrainError("no run here", where=folder, expected=METRICS_NAME, do="name the output folder of a run")
    there = {str(number): path for number, path in checkpoints(folder)}
    if step == BEST:
        best = best_of(folder)
        if best.checkpoint is None:
            known = ", ".join(there) or "none"
            do = f"name a step of {known}: --step N" if there else None
            raise TrainError(" ".join(best.reasons), where=f"{folder}: --step {BEST}", do=do)
        return best.checkpoint
    if step not in there:
        expected, do = ", ".join([BEST, *there]), "name one of these, or leave out --step for the end of the run"
        raise ConfigError("--step names no checkpoint of the run", where=folder, expected=expected, found=step, do=do)
    return there[step]
