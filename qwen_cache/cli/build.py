"""`build`: its options, which of them exclude each other, and where the encoders run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.options import (
    CONFIG,
    CONTROLS,
    DEVICES,
    DTYPE,
    INPUT,
    JSON,
    MODEL_PATH,
    ON_ERROR,
    OUT_CACHE,
    OUTPUT,
    SET,
    TARGETS,
    TEXT_DEVICE,
    TEXT_ENCODER,
    VAE_DEVICE,
    command,
    flag,
    given_controls,
    option,
    setting,
    setting_argument,
)
from qwen_cache.settings.given import Given
from qwen_cache.terminal import counting, print_next

if TYPE_CHECKING:
    from qwen_cache.encode.build import Task
    from qwen_cache.encode.builder import BuildJob, Encoders
    from qwen_cache.service.client import Client
    from qwen_cache.settings.load import Config

SOURCE = setting_argument(
    "data.source",
    "SOURCE",
    "A folder, table or tars of images, or a URL.",
    default="data.source of qwen.yaml, else data",
)
EDIT_MASK = setting(
    "data.edit_mask", INPUT, "How to make edit masks for rows without one; head and auto are experimental."
)
MASK_HEAD = setting("data.mask_head", INPUT, "Experimental: the mask head of --edit-mask head or auto.", "FILE")
SLICE = setting("data.slice", INPUT, "Build one slice of the rows, such as 3/16, for job arrays.", "K/N")
VALIDATION = setting(
    "validation.source",
    INPUT,
    "Prompts, with controls or without, to generate images from while training.",
    "SOURCE",
    name="--validation",
)
ONLY_VALIDATION = flag("--only-validation", INPUT, "Build the validation cache and nothing else.")
REHASH = flag("--rehash", INPUT, "Read every image and the weights again, changed or not.")
WATCH = option(
    INPUT,
    "Keep the encoders loaded, look for new rows every SECONDS, and encode them, until Ctrl-C.",
    "SECONDS",
    min=0.1,
)
RAY = option(DEVICES, "Encode on a Ray cluster: auto, its address, or local.", "ADDRESS")
AT = option(DEVICES, "Encode on a server that runs `qwen-cache serve`; QWEN_CACHE_TOKEN has its token.", "URL")
REUSE = option(OUTPUT, "Copy samples that this cache has, in place of encoding them; repeat it for more.", "CACHE")
FORMAT = setting("cache.format", OUTPUT, "The format version to write.")
DRY_RUN = flag("--dry-run", OUTPUT, "Report what would be encoded and why; write nothing.")
CHECK = flag(
    "--check", OUTPUT, "With --dry-run: exit with 1 if there is work, and measure the images for what may hurt."
)
MEASURE = flag("--measure", OUTPUT, "With --dry-run: encode a few samples without storing them, and estimate the time.")
REPLACE = flag("--replace", OUTPUT, "Encode all samples again if model or settings differ from the cache's.")
REPAIR = flag("--repair", OUTPUT, "Encode the damaged samples of the cache again, and nothing else.")


@command(
    page="data.md",
    examples=[
        "qwen-cache build data --model Qwen/Qwen-Image-Edit-2509",
        "qwen-cache build data --vae-device cuda:0 --text-device cuda:1 --dry-run",
    ],
    renamed={"--part": "--slice"},
)
def build(
    source: Given | None = SOURCE,
    model: Given | None = MODEL_PATH,
    text_encoder: Given | None = TEXT_ENCODER,
    dtype: Given | None = DTYPE,
    targets: Given | None = TARGETS,
    controls: list[str] | None = CONTROLS,
    on_error: Given | None = ON_ERROR,
    edit_mask: Given | None = EDIT_MASK,
    mask_head: Given | None = MASK_HEAD,
    slice: Given | None = SLICE,
    validation: Given | None = VALIDATION,
    only_validation: bool = ONLY_VALIDATION,
    rehash: bool = REHASH,
    watch: float | None = WATCH,
    vae_device: Given | None = VAE_DEVICE,
    text_device: Given | None = TEXT_DEVICE,
    ray: str | None = RAY,
    at: str | None = AT,
    out: Given | None = OUT_CACHE,
    reuse: list[str] | None = REUSE,
    format: Given | None = FORMAT,
    dry_run: bool = DRY_RUN,
    check: bool = CHECK,
    measure: bool = MEASURE,
    replace: bool = REPLACE,
    repair: bool = REPAIR,
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Encode new and changed samples from SOURCE into the cache."""
    from qwen_cache.settings.load import load_config
    from qwen_cache.storage.remembered import rehashing
    from qwen_cache.storage.stores import destination

    columns = (targets, given_controls(controls))
    caches = Given("--reuse", "cache.reuse", reuse) if reuse else None
    places = (vae_device, text_device, out, caches, format)
    given = (source, model, text_encoder, dtype, *columns, on_error, edit_mask, mask_head, slice, validation, *places)
    settings = load_config(config, set_, given)
    destination(settings.cache.path)  # before anything slow
    if at is not None:
        own = {
            "--model": model,
            "--text-encoder": text_encoder,
            "--vae-device": vae_device,
            "--text-device": text_device,
        }
        _check_at(own | {"--ray": ray, "--measure": measure, "--repair": repair})
    if watch is not None:
        single = {"--ray": ray, "--dry-run": dry_run, "--repair": repair, "--replace": replace}
        single |= {"--only-validation": only_validation, "--rehash": rehash, "--json": json}
        return run_watch(settings, at, watch, [name for name, value in single.items() if value])
    work = {"dry_run": dry_run, "check": check, "replace_recipe": replace, "only_validation": only_validation}
    with rehashing(rehash):
        code = run_build(settings, None, ray=ray, at=at, measure=measure, repair=repair, as_json=json, **work)
    if code == 0 and not (json or dry_run or slice) and (trained := _to_train(settings)) is not None:
        file = ["--config", str(config)] if config else []
        print_next(*(["qwen-train", command, *trained, *file] for command in ("plan", "run")))
    return code


def _to_train(settings: Config) -> list[str] | None:
    """The words behind `qwen-train run` that name the cache, or none if it is one of `train.caches`, and the model.

    None as long as one of these caches is not here: validation alone was built, or another one is still to be built.
    """
    from qwen_cache.format.manifest import MANIFEST_NAME
    from qwen_cache.models.recorded import words_not_recorded
    from qwen_cache.storage.remote import is_remote, location

    cache, listed = location(settings.cache.path), [location(each.path) for each in settings.train.caches]
    caches = listed if cache in listed else [cache]
    if not all(is_remote(each) or (each / MANIFEST_NAME).is_file() for each in caches):
        return None
    model = words_not_recorded(settings.model, ("revision", "transformer"))
    if settings.model.path is None:  # built with --at
        model = ["--model", "FOLDER_OR_REPOSITORY"]
    return [*([] if cache in listed else [settings.cache.path]), *model]


def run_build(
    config: Config,
    source: str | None,
    *,
    ray: str | None,
    at: str | None = None,
    dry_run: bool,
    check: bool,
    measure: bool,
    replace_recipe: bool,
    repair: bool,
    only_validation: bool,
    as_json: bool,
) -> int:
    """Plan, print the plan, encode, print a summary; return the exit code. `ray` is the address of a cluster, `at` that
    of a server which encodes.

    If the settings have rows for a validation cache, it is built too, by the same encoders.
    """
    from qwen_cache.encode import preflight
    from qwen_cache.encode.build import build_locked, build_task, is_main, repair_task, show_plans, with_devices
    from qwen_cache.encode.builder import Encoders
    from qwen_cache.encode.cluster import on_cluster
    from qwen_cache.encode.validation import prepare_with_validation
    from qwen_cache.format.arrow import convert_without_pandas
    from qwen_cache.format.manifest import MANIFEST_NAME

    convert_without_pandas()
    _check_options(ray=ray, dry_run=dry_run, check=check, measure=measure)
    if repair and replace_recipe:
        raise ConfigError("--repair keeps the recipe, and --replace replaces it", do="give only one of them")
    if at is not None:
        planned = partial(build_task, replace_recipe=replace_recipe, takes_latents=False)
        return _build_at(config, at, planned, dry_run=dry_run, check=check, alone=only_validation, as_json=as_json)
    if not dry_run:
        require("torch")
    encoders = (
        Encoders(preflight.load_lanes, takes_latents=True) if ray is None else on_cluster(ray, preflight.load_lanes)
    )
    if not dry_run and ray is None:
        preflight.check_devices(config)
    with counting("fingerprinting the weights", in_bytes=True) as on_bytes:
        jobs = prepare_with_validation(config, source, on_bytes, alone=only_validation, here=ray is None)
    if repair:
        jobs = [job for job in jobs if only_validation or is_main(job) or (job.folder / MANIFEST_NAME).is_file()]
    make = repair_task if repair else partial(build_task, replace_recipe=replace_recipe, takes_latents=ray is None)

    def plan(job: BuildJob) -> Task:
        return make(job) if ray is not None else with_devices(make(job), always=dry_run)

    if dry_run:
        return show_plans([plan(job) for job in jobs], check=check, measure=measure, as_json=as_json)
    return build_locked(jobs, plan, encoders, as_json)


def _check_options(*, ray: str | None, dry_run: bool, check: bool, measure: bool) -> None:
    """Raise ConfigError for options that exclude each other."""
    if check and not dry_run:
        raise ConfigError("--check goes with --dry-run", do="add --dry-run, or leave --check out")
    if measure and (ray is not None or not dry_run):
        found = "--measure with --ray" if ray is not None else "--measure alone"
        raise ConfigError("--measure goes with --dry-run, and measures this machine", found=found)


def _check_at(given: Mapping[str, object]) -> None:
    """ConfigError for options that are about encoders on this machine."""
    if name := next((name for name, value in given.items() if value), None):
        raise ConfigError(f"--at does not go with {name}", do="leave one of them out")


@contextmanager
def open_at(at: str) -> Iterator[tuple[Client, Encoders]]:
    """A client of the server `at`, and its encoders; without any on this machine."""
    require("aiohttp")
    from qwen_cache.encode.builder import Encoders
    from qwen_cache.service.client import Client
    from qwen_cache.service.encoding import IN_FLIGHT, ServerEncoders

    with Client(at) as client:
        yield client, Encoders(lambda job: ServerEncoders(client, job), IN_FLIGHT)


def _build_at(
    config: Config,
    at: str,
    make: Callable[[BuildJob], Task],
    *,
    dry_run: bool,
    check: bool,
    alone: bool,
    as_json: bool,
) -> int:
    """`run_build` with the encoders of the server `at`."""
    from qwen_cache.encode.build import build_locked, show_plans

    with open_at(at) as (client, encoders):
        from qwen_cache.service.encoding import prepare_all_at

        jobs = prepare_all_at(config, client, alone=alone)
        if dry_run:
            return show_plans(list(map(make, jobs)), check=check, measure=False, as_json=as_json, can_measure=False)
        return build_locked(jobs, make, encoders, as_json)


# ---- --watch ---------------------------------------------------------------------------------------------------------


def run_watch(config: Config, at: str | None, seconds: float, given: Sequence[str]) -> int:
    """Look at the source every `seconds` until Ctrl-C; return the exit code.

    `given` are the options of `build` that need a single build.
    """
    from qwen_cache.encode.build import watch_source

    _check_watch(config, given)
    config = config.model_copy(update={"data": config.data.model_copy(update={"on_error": "skip"})})
    with _preparing(config, at) as (prepare, encoders):
        return watch_source(config.data.source, prepare, encoders, seconds)


def _check_watch(config: Config, given: Sequence[str]) -> None:
    """ConfigError for options and settings that need a single build."""
    from qwen_cache.encode.validation import is_wanted

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
            from qwen_cache.service.encoding import prepare_all_at

            yield lambda: prepare_all_at(config, client, alone=False)[0], encoders
        return
    require("torch")
    from qwen_cache.encode import builder, preflight

    preflight.check_devices(config)
    model = builder.fitting_model(config)
    yield (
        partial(builder.prepare_build, config, None, model=model),
        builder.Encoders(preflight.load_lanes, takes_latents=True),
    )
