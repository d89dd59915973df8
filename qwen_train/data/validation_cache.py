"""The cache whose samples are generated during training: opened and checked by its index alone, without torch.

Refused: a cache of another pipeline, VAE or text encoder than the cache in training, guidance where its samples lack
the empty prompt, and a device for decoding where no images are generated.
"""

from __future__ import annotations

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import open_configured
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.settings.load import Config
from qwen_cache.settings.train import NO_CACHE, ValidationConfig
from qwen_cache.storage.url import location
from qwen_train.data.mixture import Mixture, entries_to_match
from qwen_train.data.planning import no_empty_prompt
from qwen_train.data.samples import Samples
from qwen_train.latents import GENERATE


def open_validation_cache(config: Config, *, on_the_fly: bool = False) -> Mixture | None:
    """The cache of `validation.cache`, or the one inside `cache.path` if that is what the run trains on; None without.

    Raises ConfigError for `validation.vae_device` if no images are generated, and the errors of `open_cache`.
    """
    settings, path = config.validation, config.validation_cache
    is_given, has_default = settings.cache is not None, not on_the_fly and not config.train.caches
    if path != NO_CACHE and (is_given or (has_default and (location(path) / MANIFEST_NAME).is_file())):
        return Mixture.of(open_configured(config.cache, path))
    if settings.vae_device and not settings.num_images:
        raise ConfigError(
            "validation.vae_device decodes images, and this run generates none",
            found=f"validation.vae_device={settings.vae_device}",
            do=f"{GENERATE}; or remove validation.vae_device",
        )
    return None


def check_validation_cache(cache: Mixture, samples: Samples, settings: ValidationConfig) -> None:
    """ConfigError or TrainError for a cache that was encoded differently than `samples`, or that lacks something."""
    ours, theirs = cache.recipe.recipe, samples.recipe.recipe
    for entry in entries_to_match(ours, theirs):
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
