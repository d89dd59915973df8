"""What a run checks before it loads torch: a refusal takes less than a second of CPU time.

In this order: the cache and that of validation, that no other run writes to the output folder, what the folder holds
already, the tracker, the optimizer's package, the model, whether they fit together, the timesteps, and whether the
newest checkpoint can be resumed with these settings. With `train.follow` the caches come after the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.extras import installed, require
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.folder import NUNCHAKU, WEIGHTS, ModelFolder, fingerprint, open_model
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.storage.remembered import file_digest, remembered_digest
from qwen_cache.terminal import counting
from qwen_train.data.commits import TakenIn, check_followable, followed, open_commits, wait_for_commits
from qwen_train.data.mixture import Mixture, open_mixture
from qwen_train.data.planning import Planned, check_cache, check_empty_prompts, check_text_lengths
from qwen_train.data.samples import Samples, open_samples
from qwen_train.data.validation_cache import check_validation_cache, open_validation_cache
from qwen_train.launch import Launch
from qwen_train.lora.files import WeightedLora, find_assistant, find_start
from qwen_train.lora.types import check_adapter
from qwen_train.optimizer_names import check_optimizer
from qwen_train.resumable import NEW_RUN, check_resumable, taken_of
from qwen_train.run_folder import checkpoints, only_run
from qwen_train.run_settings import ToEncode, resume_command
from qwen_train.start import Start

TRANSFORMER_PARTS = ("transformer", "scheduler")
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow-skinny")}
"""The packages of the trackers that several install; the others have their own name."""


@contextmanager
def starting(
    config: Config, launch: Launch, *, resume: bool = False, to_encode: ToEncode | None = None
) -> Iterator[Start]:
    """Check the run, and keep other runs out of its folder until the end of the block."""
    out = Path(config.train.output_dir)
    check_encoding(to_encode, launch)
    check_followable(config, to_encode)
    samples, validation_cache, taken = None, None, tuple[TakenIn, ...]()
    if not config.train.follow:
        samples = open_samples(config) if to_encode is None else None
        validation_cache = open_validation_cache(config, to_encode)
    with only_run(out, launch):
        earlier = checkpoints(out)
        if earlier and not resume:
            command = resume_command(out, launch, to_encode=to_encode)
            raise ConfigError(
                "this folder already holds a run",
                where=out,
                found=earlier[-1][1].name,
                do=f"continue it with `{command}`, or {NEW_RUN}",
            )
        check_tracker(config.logging.report_to)
        check_optimizer(config, launch.world_size)
        model = open_trainable(config)
        check_adapter(config, model.transformer_config)
        newest = earlier[-1][1] if earlier else None
        if config.train.follow:  # last of all, since it may wait for hours
            taken = taken_of(newest) if newest else ()
            samples = open_followed(config, taken)
            validation_cache = open_validation_cache(config)
        check_samples(config, model, samples, validation_cache)
        check_timesteps(config.train, float(model.scheduler_config.get("shift_terminal") or 0))
        if config.train.method == "lora" and config.train.lora.weights is not None and newest is None:
            find_start(Path(config.train.lora.weights))
        assistant = find_assistant(config.train)
        if config.validation.assistant_lora and assistant is None:
            do = "set train.assistant_lora, or leave it out"
            raise ConfigError("validation.assistant_lora is about train.assistant_lora, which is not set", do=do)
        weights = hash_transformer(model) if launch.is_main else ""
        assistant_hash = hash_assistant(assistant) if launch.is_main and assistant else ""
        hashes = weights, assistant, assistant_hash
        start = Start(config, launch, model, samples, to_encode, validation_cache, newest, *hashes, taken)
        check_resumable(start)
        yield start


def check_encoding(to_encode: ToEncode | None, launch: Launch) -> None:
    """ConfigError if a run that encodes lacks packages, or is several processes without a server for all."""
    if to_encode is None:
        return
    require("aiohttp" if to_encode.at is not None else "fastapi")
    if to_encode.at is None and launch.world_size > 1:
        do = "start `qwen-cache serve --no-store`, and give --encode-at its address"
        raise ConfigError("--encode-on-the-fly is for one training process", found=launch.world_size, do=do)


def open_followed(config: Config, taken: Sequence[TakenIn]) -> Mixture:
    """The caches of a run with `train.follow`, at the last commit of its checkpoint, or as they are now.

    Waits for the first commit.
    """
    if taken:
        return open_commits(config, taken[-1].commits, taken[-1].recipes, Path(config.train.output_dir))
    wait_for_commits(config)
    return open_mixture(followed(config), config.cache)


def open_trainable(config: Config) -> ModelFolder:
    """The model, with the VAE if the run decodes its images; ModelError if it cannot be trained."""
    parts = (*TRANSFORMER_PARTS, "vae") if config.validation.vae_device else TRANSFORMER_PARTS
    model = open_model(config.model.path, parts, config.model.revision, transformer=config.model.transformer)
    if model.needs_nunchaku:
        raise ModelError(
            "nunchaku's kernels cannot train: they have no gradients",
            where=model.component("transformer"),
            found=f"quant_method {NUNCHAKU} in config.json",
            do="train the unquantised model, or a single file in fp8 or GGUF with --transformer",
        )
    return model


def check_samples(
    config: Config, model: ModelFolder, samples: Samples | None, validation_cache: Mixture | None
) -> None:
    """ConfigError or TrainError unless model, settings, samples and the validation cache fit together."""
    if validation_cache is not None:
        check_cache(validation_cache, model, model.transformer_config)
        check_text_lengths(validation_cache)
    if samples is None:
        return
    check_cache(samples, model, model.transformer_config)
    check_empty_prompts(samples, config.train.caption_dropout)
    Planned.of(samples, config.train)
    if validation_cache is not None:
        check_validation_cache(validation_cache, samples, config.validation)


def check_tracker(name: str) -> None:
    """ConfigError if the package of the tracker is not installed."""
    packages = PACKAGES.get(name, (name.replace("_", "-"),))
    if name == "none" or any(map(installed, packages)):
        return
    raise ConfigError(
        f"logging.report_to={name} needs a package that is not installed",
        expected=packages[0],
        do=f"pip install {packages[0]}, or set logging.report_to="
        + ("none" if name == "tensorboard" else "tensorboard"),
    )


def check_timesteps(settings: TrainConfig, shift_terminal: float) -> None:
    """ConfigError if the bounds leave no noise level of a model whose lowest is `shift_terminal`."""
    lowest = max(settings.min_timestep, 1000 * shift_terminal)
    if settings.max_timestep > lowest:
        return
    raise ConfigError(
        "train.max_timestep leaves no timestep",
        expected=f"above {lowest:g}, "
        + ("train.min_timestep" if lowest == settings.min_timestep else "the lowest of this model, on a scale of 1000"),
        found=f"{settings.max_timestep:g}",
        do="raise train.max_timestep",
    )


def hash_transformer(model: ModelFolder) -> str:
    """The hash of the transformer's files, which are read if they have changed since the last run."""
    folder = model.component("transformer")
    paths = [path for path in folder.iterdir() if path.name.endswith(WEIGHTS) and path.exists()]
    if model.transformer is not None:
        paths = [folder / "config.json", Path(model.transformer)]
    total = sum(path.stat().st_size for path in paths)
    with counting("hashing the transformer", total, in_bytes=True, transient=True) as advance:
        if model.transformer is None:
            return fingerprint([folder], on_bytes=advance)
        return content_hash(canonical_json([remembered_digest(path, advance) for path in paths]))


def hash_assistant(assistant: WeightedLora) -> str:
    """The hash of the LoRA's file, and its weight: what decides the function that is trained."""
    return f"xxh3-128 {file_digest(assistant.file)}, weight {assistant.weight:g}"
