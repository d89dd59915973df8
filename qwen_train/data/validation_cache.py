"""The cache whose samples are generated during training: opened and checked by its index alone, without torch.

Refused: a cache of another pipeline, VAE or text encoder than the cache in training, one of other prompts than the
settings have, prompts that are in no cache, guidance where its samples lack the empty prompt, strengths of what has
none, and a device for decoding where no images are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import open_configured
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.settings.load import CONFIG_NAME, MAX_BYTES, Config, parse_yaml
from qwen_cache.settings.sections import (
    NO_CACHE,
    ValidationConfig,
    ValidationPrompt,
)
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.terminal import plural
from qwen_train.data.checks import no_empty_prompt
from qwen_train.data.samples import Mixture, Samples, entries_to_match, have_equal_latents
from qwen_train.run import GENERATE, ToEncode


def open_validation_cache(config: Config, to_encode: ToEncode | None = None) -> Mixture | None:
    """The cache of `validation.cache`, or the one inside `cache.path` if that is what the run trains on; None without.

    Raises ConfigError if its prompts are not those of the settings or were never encoded, and for
    `validation.vae_device` if no images are generated; and the errors of `open_cache` and of `validation_strengths`.
    """
    settings, path = config.validation, config.validation_cache
    at = f" --at {to_encode.at}" if to_encode and to_encode.at else ""
    build = f"`qwen-cache build --only-validation{at}`"
    is_given, may_be_inside = settings.cache is not None, to_encode is None and not config.train.caches
    if path != NO_CACHE and (is_given or (may_be_inside and (location(path) / MANIFEST_NAME).is_file())):
        cache = Mixture.of(open_configured(config.cache, path))
        _check_prompts(settings, path, build)
        validation_strengths(config)
        return cache
    if not is_given and (settings.prompts or settings.source):
        set_cache = "" if may_be_inside else f", and set validation.cache={path}"
        raise ConfigError(
            "the images to generate are not in a cache",
            where=path if may_be_inside else None,
            found="validation.prompts" if settings.prompts else f"validation.source={settings.source}",
            do=f"encode them with {build}{set_cache}; or set validation.cache=none",
        )
    if settings.vae_device and not settings.num_images:
        raise ConfigError(
            "validation.vae_device decodes images, and this run generates none",
            found=f"validation.vae_device={settings.vae_device}",
            do=f"{GENERATE}; or remove validation.vae_device",
        )
    if settings.num_images:
        validation_strengths(config)
    return None


def validation_strengths(config: Config) -> tuple[float, ...]:
    """The strengths of the LoRA in validation images; ConfigError beside several scales, or of what has none."""
    settings, train = config.validation, config.train
    usual = (-2.0, -1.0, 0.0, 1.0, 2.0) if train.slider.direction else (1.0,)
    strengths = tuple(settings.lora_weight or usual)
    if len(strengths) > 1 and len(settings.true_cfg_scale) > 1:
        raise ConfigError(
            "validation images vary over scales or over strengths",
            found=f"validation.true_cfg_scale={settings.true_cfg_scale} and lora_weight {list(strengths)}",
            do="give one value of one of them, such as validation.lora_weight=1",
        )
    kind = train.lora.type
    reasons = {
        "train.method=full": train.method == "full",
        "train.lora.type=oft": kind == "oft",
        "train.lora.use_dora": kind == "lora" and train.lora.use_dora,
    }
    for setting, given in reasons.items():
        if given and strengths != (1.0,):
            raise ConfigError(
                f"validation.lora_weight and {setting} exclude each other: it can only be switched on and off",
                found=setting,
                do="leave validation.lora_weight out",
            )
    return strengths


def _check_prompts(settings: ValidationConfig, path: str, build: str) -> None:
    """ConfigError if the settings that the cache was built with, as far as it has them, name other images to generate.

    A cache that `validation.cache` names, without prompts beside it, is taken as it is; so is a source that was given
    to `build` alone.
    """
    file = location(path) / CONFIG_NAME
    if not file.is_file():
        return
    data = file.read_bytes(MAX_BYTES) if is_remote(file) else read_file(file, MAX_BYTES)
    saved = parse_yaml(data.decode("utf-8", "replace"), file)
    built = saved.get("validation") if isinstance(saved, dict) else None
    if not isinstance(built, dict):
        return
    if (settings.prompts or settings.cache is None) and (was := _prompts(built.get("prompts"))) != settings.prompts:
        name, expected, found = "prompts", _counted(settings.prompts), _counted(was)
    elif settings.source is not None and built.get("source") != settings.source:
        name, expected, found = "source", settings.source, str(built.get("source"))
    else:
        return
    empty = "[]" if name == "prompts" else "null"
    also = f" and validation.{name}={empty}" if getattr(settings, name) else ""
    first = f"run {build}, or " if settings.prompts or settings.source else ""
    raise ConfigError(
        f"the validation cache was built from another validation.{name}",
        where=file,
        expected=expected,
        found=found,
        do=f"{first}set validation.cache={path}{also} to generate what it has, or validation.cache=none",
    )


def _prompts(written: object) -> list[ValidationPrompt]:
    """The prompts that a settings file has; without those that this version cannot read."""
    prompts = []
    for each in written if isinstance(written, list) else []:
        with suppress(ValueError):
            prompts.append(ValidationPrompt.model_validate(each))
    return prompts


def _counted(prompts: Sequence[ValidationPrompt]) -> str:
    """How many prompts, and what they are."""
    return ": ".join(filter(None, (plural(len(prompts), "prompt"), "; ".join(it.prompt for it in prompts))))


def check_validation_cache(cache: Mixture, samples: Samples, settings: ValidationConfig) -> None:
    """ConfigError or TrainError for a cache that was encoded differently than `samples`, or that lacks something."""
    ours, theirs = cache.recipe.recipe, samples.recipe.recipe
    caches = (*cache.caches, *(samples.caches if isinstance(samples, Mixture) else ()))
    equal = {"vae"} if have_equal_latents(ours, theirs, *caches) else set[str]()
    for entry in (name for name in entries_to_match(ours, theirs) if name not in equal):
        if entry in ours and entry in theirs and ours[entry] != theirs[entry]:
            raise ConfigError(
                f"the validation cache does not fit the cache in training: they differ in {entry}",
                where=cache.folder,
                expected=f"{theirs[entry]}, as in {samples.folder}",
                found=ours[entry],
                do="build both with the same model, or name another one in validation.cache",
            )
    missing, scale = cache.column("empty_prompt_embeds").null_count, max(settings.true_cfg_scale)
    if missing and scale > 1:
        found = f"{missing} of {len(cache)} samples without them, validation.true_cfg_scale={scale}"
        raise no_empty_prompt("guidance", cache.folder, found, "validation.true_cfg_scale=1")
