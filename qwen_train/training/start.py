"""Before torch is loaded: all checks, also that the settings fit the checkpoint that is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qwen_cache.batching import sequence_settings
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.extras import install_command, installed, require
from qwen_cache.models.folder import NUNCHAKU, WEIGHTS, ModelFolder, component_fingerprint, open_model
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.settings.sections import LoraConfig, TrainConfig
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.storage.remembered import file_digest
from qwen_cache.terminal import counting
from qwen_cache.text import parse_json
from qwen_train.data.checks import check_cache, check_empty_prompts, check_encoders, check_objective, check_text_lengths
from qwen_train.data.commits import TakenIn, check_followable, followed, open_commits, wait_for_commits
from qwen_train.data.planned import Planned, with_model_of_caches
from qwen_train.data.samples import Mixture, Samples, open_mixture, open_samples
from qwen_train.data.validation_cache import check_validation_cache, open_validation_cache
from qwen_train.lora.files import WeightedLora, check_adapter, find_assistant, find_start, pinned, with_assistant
from qwen_train.model.combinations import ROUNDING, check_combination, import_path
from qwen_train.run import STATE, Launch, Requests, ToEncode, checkpoints, only_run, resume_command

# ---- start -----------------------------------------------------------------------------------------------------------
# A run that has passed the checks and has not loaded torch yet.


@dataclass(frozen=True)
class Start:
    """A run that has passed these checks and holds the lock of its output folder."""

    config: Config
    launch: Launch
    model: ModelFolder
    samples: Samples | None
    """None for a run that encodes, which reads its source later."""
    to_encode: ToEncode | None
    """The source of a run that encodes."""
    validation_cache: Mixture | None
    """Whose samples are generated during training."""
    newest: Path | None
    """The checkpoint to continue from."""
    weights: str
    """The hash of the transformer's files; empty except in the main process, which is the only one to read them."""
    assistant: WeightedLora | None = None
    """The LoRA of `train.assistant_lora`."""
    assistant_hash: str = ""
    """The hash of its file, and its weight; empty as `weights` is, and without an assistant."""
    taken: tuple[TakenIn, ...] = ()
    """The commits that the run has taken in until its newest checkpoint, with `train.follow`."""
    requests: Requests = field(default_factory=Requests)
    """The signals that ask for a checkpoint or images."""

    @property
    def out(self) -> Path:
        """The output folder."""
        return Path(self.config.train.output_dir)

    @property
    def cache_identity(self) -> str | None:
        """The facts about its samples that a resumed run must share; None where they are not known yet."""
        if self.config.train.follow and isinstance(self.samples, Mixture):
            return self.samples.lasting_identity
        return self.samples.identity if self.samples else None

    @property
    def resume_command(self) -> str:
        """The command line that continues this run."""
        return resume_command(self.out, self.launch, to_encode=self.to_encode)


# ---- resumable -------------------------------------------------------------------------------------------------------
# Whether a checkpoint can be resumed with these settings, without torch.
#
# A checkpoint is resumed only with the cache, the transformer and the settings that decide what has been trained so
# far. One message names all differences, and the command that continues the run.

TRANSFORMER = "transformer"
"""The entry of a checkpoint with the hash of the frozen weights."""
CACHE = "cache"
"""The entry with the identity of the cache."""
ASSISTANT_LORA = "assistant LoRA"
"""The entry with the hash and the weight of `train.assistant_lora`; absent without one."""
DERIVED = ("train.layout", "train.drop_last", "train.bucketing_window")
"""Batch settings that have no effect, and are None, if batches are single samples or packed."""
NEW_RUN = "start a new run with another --out"
CONTENT = {
    CACHE: ("cache.path", "cache.recipe", "train.caches"),
    TRANSFORMER: ("model.path", "model.revision", "model.transformer"),
    ASSISTANT_LORA: ("train.assistant_lora",),
}
"""The settings that name what is compared by content."""
BELONGING = {"optimizer.name": "optimizer.", "train.method": "train.lora.", TRANSFORMER: "model."}
"""The prefix of the settings that make sense only with the same value of this one."""


# ---- the settings in a checkpoint ------------------------------------------------------------------------------------


def fixed_settings(config: Config) -> dict[str, Any]:
    """The settings that a resumed run must share with its checkpoint, under the checkpoint's names."""
    t = config.train
    fixed: dict[str, Any] = {"model.quantization": config.model.quantization, "seed": t.seed, "train.method": t.method}
    if t.method == "lora":
        fixed["lora"] = _lora_settings(t.lora)
    if t.stochastic_rounding:
        fixed["train.stochastic_rounding"] = True
    if t.follow:
        fixed["train.follow"] = True
    if t.dpo.beta is not None:
        fixed |= {f"train.dpo.{name}": value for name, value in t.dpo.model_dump().items() if value}
    if t.slider.direction:
        fixed |= {f"train.slider.{name}": value for name, value in t.slider.model_dump().items()}
    return fixed | {
        "optimizer.name": config.optimizer.name,
        "train.ema_decay": t.ema_decay,
        **sequence_settings(t),
    }


def check_fixed(
    path: Path, saved: Mapping[str, Any], current: Mapping[str, Any], do: str, models: tuple[str, str]
) -> None:
    """TrainError that names every difference between the checkpoint at `path` and this run.

    `models`: the names of both models, to show beside the hash of the transformer.
    """
    names = differences(saved, current)
    if not names:
        return
    was, now = by_setting(saved), by_setting(current)
    if TRANSFORMER in names:
        for side, model in ((was, models[0]), (now, models[1])):
            side[TRANSFORMER] = f"{model}, xxh3-128 {side.get(TRANSFORMER)}"
    raise TrainError(
        f"this checkpoint was trained with another {', '.join(names)}, so it cannot be resumed",
        where=path / STATE,
        expected=_listed(was, names),
        found=_listed(now, names),
        do=do,
    )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The settings that differ, without those that differ only because of another one.

    The settings of a LoRA follow from train.method, what is compared of a cache from train.follow; a setting without
    effect on one side follows from another one.
    """
    was, now = by_setting(saved), by_setting(current)
    names = [name for name in was | now if was.get(name) != now.get(name)]
    names = [name for name in names if not (name.startswith("train.lora.") and "train.method" in names)]
    names = [name for name in names if not (name == CACHE and "train.follow" in names)]
    both = [name for name in names if not (name in DERIVED and None in (was.get(name), now.get(name)))]
    return both or names


def by_setting(fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a checkpoint, under the names of settings; one that was written without a setting of
    `train.lora` was trained with its default."""
    names = {"seed": "train.seed"}
    values = {names.get(name, name): value for name, value in fixed.items() if name != "lora"}
    lora = fixed.get("lora")
    if not isinstance(lora, dict):
        return values
    return values | {f"train.lora.{name}": value for name, value in (_lora_settings(LoraConfig()) | lora).items()}


def _lora_settings(lora: LoraConfig) -> dict[str, Any]:
    return lora.model_dump(mode="json", exclude={"weights"})


def _listed(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """The values of these settings as text; a single one without its name."""
    shown = {name: "none, or without effect" if (v := values.get(name)) is None else str(v) for name in names}
    return ", ".join(f"{name} {text}" for name, text in shown.items()) if len(names) > 1 else shown[names[0]]


# ---- the checkpoint of a run that starts -----------------------------------------------------------------------------


def check_resumable(start: Start) -> None:
    """TrainError if the checkpoint belongs to another cache, transformer or settings.

    A damaged checkpoint passes: `load_checkpoint`, which compares all its files with their checksums, refuses it.
    """
    if start.newest is None or (state := _whole_state(start.newest)) is None:
        return
    saved, current = state["fixed"], fixed_settings(start.config)
    current |= {CACHE: start.cache_identity} if start.cache_identity else {}
    current |= {TRANSFORMER: start.weights} if start.weights else {}
    current |= {ASSISTANT_LORA: start.assistant_hash} if start.assistant_hash else {}
    unknown = {CACHE, TRANSFORMER} if start.weights else {CACHE, TRANSFORMER, ASSISTANT_LORA}
    for name in unknown - current.keys():  # not known yet
        saved.pop(name, None)
    if start.config.train.layout == "auto":  # that of the checkpoint
        current["train.layout"] = saved.get("train.layout")
    if differences(saved, current):
        file = start.model.transformer
        models = state["model"], " with ".join(filter(None, (start.model.public_name, file and Path(file).name)))
        check_fixed(start.newest, saved, current, _advice(start, saved, current), models)


def _whole_state(checkpoint: Path) -> dict[str, Any] | None:
    """The compared entries of state.json; None if its checksum is wrong or they are missing."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        listed = parse_json(read_file(checkpoint / CHECKSUMS))["files"][STATE]["xxh3_128"]
        state = parse_json(read_file(checkpoint / STATE))
        if listed == file_digest(checkpoint / STATE):
            origin = state["origin"]
            named = filter(None, (origin["model"], origin.get("transformer")))
            taken = tuple(map(TakenIn.of, state.get("commits", ())))
            return {"fixed": dict(state["fixed"]), "model": " with ".join(named), "taken": taken}
    return None


def taken_of(checkpoint: Path) -> tuple[TakenIn, ...]:
    """The commits that a run with `train.follow` had taken in; none of a damaged checkpoint."""
    state = _whole_state(checkpoint)
    return tuple(state["taken"]) if state else ()


def _advice(start: Start, saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Advice about these differences: the command that continues, with the changes that are possible."""
    refused = differences(saved, current)
    now = start.config.flat()
    own: Config | None = None
    with suppress(ConfigError):
        own = load_saved(start.out / CONFIG_NAME)
    was = own.flat() if own else {}
    for name, settings in CONTENT.items():
        if name in refused and all(was.get(each) == now[each] for each in settings):
            return f"restore the {name}, whose content has changed, or {NEW_RUN}"
    dropped = {"train.output_dir", "train.layout", *refused, *(each for n in refused for each in CONTENT.get(n, ()))}
    beginnings = tuple(BELONGING[name] for name in refused if name in BELONGING)
    changes = {
        name: value
        for name, value in now.items()
        if was.get(name) != value and name not in dropped and not (beginnings and name.startswith(beginnings))
    }
    before = differences(saved, fixed_settings(own)) if own else refused
    expected = by_setting(saved)
    changes |= {name: expected.get(name) for name in refused if name in before and name in now}
    command = resume_command(start.out, start.launch, changes, start.to_encode)
    return f"`{command}` continues the run; or {NEW_RUN}"


# ---- preflight -------------------------------------------------------------------------------------------------------
# What a run checks before it loads torch: a refusal takes less than a second of CPU time.
#
# In this order: the cache and that of validation, that no other run writes to the output folder, what the folder holds
# already, the tracker, the optimizer's package, the model, whether they fit together, the timesteps, and whether the
# newest checkpoint can be resumed with these settings. With `train.follow` the caches come after the model.

TRANSFORMER_PARTS = ("transformer", "scheduler")
PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "mlflow": ("mlflow", "mlflow-skinny")}
"""The packages of the trackers that several install; the others have their own name."""


@contextmanager
def starting(
    config: Config, launch: Launch, *, resume: bool = False, to_encode: ToEncode | None = None
) -> Iterator[Start]:
    """Check the run, and keep other runs out of its folder until the end of the block."""
    out = Path(config.train.output_dir)
    check_encoding(config, to_encode, launch)
    check_followable(config, to_encode)
    check_objective(config.train)
    samples, validation_cache, taken = None, None, tuple[TakenIn, ...]()
    if not config.train.follow:
        samples = open_samples(config) if to_encode is None else None
        validation_cache = open_validation_cache(config, to_encode)
    with Requests() as requests, only_run(out, launch):
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
        check_optimizer(config)
        config = with_assistant(with_model_of_caches(config, samples, TRANSFORMER_PARTS))
        model = open_trainable(config)
        check_adapter(config, model.transformer_config)
        check_combination(config, model.transformer_config, launch.world_size)
        newest = earlier[-1][1] if earlier else None
        if config.train.follow:  # last of all, since it may wait for hours
            taken = taken_of(newest) if newest else ()
            samples = open_followed(config, taken)
            validation_cache = open_validation_cache(config)
        check_samples(config, model, samples, validation_cache)
        if launch.is_main:
            with counting("hashing the encoders", None, in_bytes=True, transient=True) as advance:
                check_encoders(samples, replace(model, text_encoder=config.model.text_encoder), advance)
        check_timesteps(config.train, float(model.scheduler_config.get("shift_terminal") or 0))
        if config.train.method == "lora" and config.train.lora.weights is not None and newest is None:
            find_start(Path(config.train.lora.weights))
        assistant = find_assistant(config.train)
        config = pinned(config, assistant)
        if config.validation.assistant_lora and assistant is None:
            do = "set train.assistant_lora, or leave it out"
            raise ConfigError("validation.assistant_lora is about train.assistant_lora, which is not set", do=do)
        weights = hash_transformer(model) if launch.is_main else ""
        assistant_hash = hash_assistant(assistant) if launch.is_main and assistant else ""
        hashes = weights, assistant, assistant_hash
        start = Start(config, launch, model, samples, to_encode, validation_cache, newest, *hashes, taken, requests)
        check_resumable(start)
        yield start


def check_encoding(config: Config, to_encode: ToEncode | None, launch: Launch) -> None:
    """ConfigError if a run that encodes lacks packages, shows samples, or is several processes without a server."""
    if to_encode is None:
        return
    if count := config.validation.num_images:
        what, do = "a run that encodes shows no samples of its source", "set validation.prompts, or train from a cache"
        raise ConfigError(what, where="validation.num_images", found=count, do=do)
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
    named = config.model
    files = {"transformer": named.transformer, "vae": named.vae}
    model = open_model(named.path, parts, named.revision, **files, only_here=named.only_here)
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
        return component_fingerprint(folder, model.transformer, advance)


def hash_assistant(assistant: WeightedLora) -> str:
    """The hash of the LoRA's file, and its weight: what decides the function that is trained."""
    return f"xxh3-128 {file_digest(assistant.file)}, weight {assistant.weight:g}"


# ---- optimizer names -------------------------------------------------------------------------------------------------
# The packages of optimizers, and what they cannot be combined with, without torch.
#
# Refused: a package that is not installed. That the class exists, and is an optimizer, is checked once it is imported
# (`optimizers`).

EXTRAS = {
    "bitsandbytes": "quantization",
    "torchao": "quantization",
    "prodigyopt": "prodigy",
    "prodigyplus": "optimizers",
    "pytorch_optimizer": "optimizers",
    "schedulefree": "optimizers",
}
"""Extras of this package, by the module that they install."""


def check_optimizer(config: Config) -> None:
    """ConfigError for an optimizer whose package is missing, and for stochastic rounding where it cannot work."""
    if config.train.stochastic_rounding:
        t, name = config.train, config.optimizer.name
        refused = {
            "train.method=lora": (t.method == "lora", "a LoRA is small: its weights stay in float32"),
            f"train.mixed_precision={t.mixed_precision}": (t.mixed_precision != "bf16", "the weights are in bfloat16"),
            f"optimizer.name={name}": (name not in ROUNDING, f"only {' and '.join(ROUNDING)} round so, by torchao"),
            f"train.ema_decay={t.ema_decay}": (t.ema_decay > 0, "an average in bfloat16 would round its updates away"),
        }
        for found, (applies, reason) in refused.items():
            if applies:
                raise ConfigError(
                    f"train.stochastic_rounding cannot be combined with {found}: {reason}",
                    do="set train.stochastic_rounding=false, or change that",
                )
    path = import_path(config)
    package = path.partition(".")[0]
    if find_spec(package) is None:
        raise not_importable(config.optimizer.name, path, f"No module named {package!r}")


def not_importable(name: str, path: str, reason: object) -> ConfigError:
    """The error for a class that cannot be imported, with the command that installs its package."""
    extra = EXTRAS.get(path.partition(".")[0])
    do = install_command(extra) if extra else "install its package, or correct optimizer.name"
    return ConfigError(f"the optimizer {name} cannot be imported: {reason}", do=do)
