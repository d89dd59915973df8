"""Terminal front end of `build --watch`: a build whenever the source has changed, by encoders that stay loaded.

What another look may see otherwise (a source that cannot be read, another process that writes) is printed once, and
tried again at the next look. Other errors end it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from qwen_cache.cli.build import build, open_at, plan_build
from qwen_cache.encode import builder
from qwen_cache.encode.builder import BuildJob, Encoders
from qwen_cache.encode.load import check_devices, load_lanes
from qwen_cache.encode.plan import BuildPlan
from qwen_cache.encode.settled import Look, settled
from qwen_cache.encode.validation import is_wanted, loaded_once
from qwen_cache.errors import ConfigError, DeviceError, FormatError, ModelError, Problem, QwenCacheError
from qwen_cache.extras import require
from qwen_cache.format import directory
from qwen_cache.format.update import Existing
from qwen_cache.settings.load import Config
from qwen_cache.terminal import console, message_of, print_problems, verbatim

FINAL = (ConfigError, DeviceError, FormatError, ModelError)


def run_watch(config: Config, at: str | None, seconds: float, given: Sequence[str]) -> int:
    """Look at the source every `seconds` until Ctrl-C; return the exit code.

    `given` are the options of `build` that need a single build.
    """
    _check(config, given)
    config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": "skip"})})
    with _preparing(config, at) as (prepare, encoders), loaded_once(encoders) as shared:
        watch = Watch(prepare, shared)
        console().print(f"watching {verbatim(config.data.source)}; Ctrl-C ends it")
        while True:
            if code := watch.look():
                return code
            try:
                time.sleep(seconds)
            except KeyboardInterrupt:
                console().print("stopped: nothing was being encoded")
                return 0


def _check(config: Config, given: Sequence[str]) -> None:
    others = [*given, *(["data.slice"] if config.data.slice else [])]
    if others:
        raise ConfigError(f"--watch does not go with {others[0]}", do="leave one of them out")
    if is_wanted(config):
        do = "build it with --only-validation first, and set validation.cache=none here, without prompts"
        raise ConfigError("--watch builds no validation cache", do=do)


@contextmanager
def _preparing(config: Config, at: str | None) -> Iterator[tuple[Callable[[], BuildJob], Encoders]]:
    """A function that reads the source, and the encoders: of the server `at`, or of this machine."""
    if at is not None:
        with open_at(at) as (client, encoders):
            from qwen_cache.client.encoding import prepare_all_at

            yield lambda: prepare_all_at(config, client, alone=False)[0], encoders
        return
    require("torch")
    check_devices(config)
    model = builder.fitting_model(config)
    yield partial(builder.prepare_build, config, None, model=model), Encoders(load_lanes, takes_latents=True)


class Watch:
    """What was seen and said until now."""

    def __init__(self, prepare: Callable[[], BuildJob], encoders: Encoders) -> None:
        self._prepare, self._encoders = prepare, encoders
        self._before, self._problems = Look({}), frozenset[Problem]()
        self._said = set[object]()

    def look(self) -> int:
        """Build the rows at rest that the cache lacks; the exit code of a build that is refused, else 0."""
        try:
            return self._look()
        except FINAL:
            raise
        except (QwenCacheError, OSError) as error:
            self._say(str(error) if isinstance(error, QwenCacheError) else message_of(error) or repr(error))
            return 0

    def _look(self) -> int:
        job = self._prepare()
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        before, self._before = self._before, Look.of(job, plan)
        self._print_problems(plan.problems)
        job = settled(job, self._before, before)
        new = {sample.row.name for sample in plan.missing} | _renamed(job, existing, plan)
        wanted = new.intersection(row.name for row in job.rows)
        if not job.rows or not (wanted or any(not job.keeps(name) for name in plan.removed)):
            return 0
        with directory.writing(job.folder):
            task = plan_build(job, replace_recipe=False, takes_latents=self._encoders.takes_latents)
            return build([task], self._encoders, as_json=False)

    def _print_problems(self, problems: Sequence[Problem]) -> None:
        """Print those that two looks found, once."""
        lasting = [problem for problem in problems if problem in self._problems and problem not in self._said]
        print_problems(lasting)
        self._said.update(lasting)
        self._problems = frozenset(problems)

    def _say(self, text: str) -> None:
        if text not in self._said:
            console().print(f"waiting: {text}", markup=False)
            self._said.add(text)


def _renamed(job: BuildJob, existing: Existing, plan: BuildPlan) -> set[str]:
    """The names of rows that the cache has under another name."""
    cached = existing.of_recipe(job.recipe_name)
    names = dict(zip(cached.each("key"), cached.each("name"), strict=True))
    return {each.row.name for each in plan.samples if not each.reasons and names.get(each.key) != each.row.name}
