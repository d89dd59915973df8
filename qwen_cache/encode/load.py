"""Both encoders, loaded on the devices that the settings name.

Importing this imports no torch: a build with nothing to do loads none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_cache.encode.builder import BuildJob
from qwen_cache.settings.load import Config
from qwen_cache.terminal import console

if TYPE_CHECKING:
    from qwen_cache.encode.lanes import Lanes

VAE_BATCH_PIXELS, TEXT_BATCH_TOKENS = 2 * 1024 * 1024, 2048  # on a GPU


def check_devices(config: Config) -> None:
    """DeviceError if a named device does not exist, or cannot compute with the quantised weights that the settings ask
    for; ConfigError if a package for them is missing. Before anything is read."""
    devices = {"--vae-device": config.cache.vae_device, "--text-device": config.cache.text_device}
    named = {option: name for option, name in devices.items() if name != "auto"}
    if named:
        from qwen_cache.models.devices import choose_devices

        for option, name in named.items():
            choose_devices(name, option)
    if (quantization := config.cache.text_quantization) != "none":
        from qwen_cache.models.devices import SETTING, check_quantization, choose_devices

        for device in choose_devices(config.cache.text_device, "--text-device", preferred=1):
            check_quantization(quantization, SETTING, device)


def load_lanes(job: BuildJob) -> Lanes:
    """Both encoders, each on its devices.

    The batches of a GPU are large enough to hide launch overhead: 2048 tokens are 30 TFLOP of a 7B model. A CPU gains
    nothing from batches.
    """

    from qwen_cache.encode.edit_mask import EditMasks
    from qwen_cache.encode.lanes import Lanes
    from qwen_cache.encode.text import TextEncoder
    from qwen_cache.encode.vae import VaeEncoder
    from qwen_cache.format.identity import recipe_id
    from qwen_cache.models.devices import Placement, choose_devices, is_accelerator, torch_dtype

    cache = job.config.cache
    vae_devices = choose_devices(cache.vae_device, "--vae-device", preferred=0)
    text_devices = choose_devices(cache.text_device, "--text-device", preferred=1)
    dtype = torch_dtype(cache.dtype)
    pixels = cache.vae_batch_pixels or (VAE_BATCH_PIXELS if is_accelerator(vae_devices[0]) else 1)
    tokens = cache.text_batch_tokens or (TEXT_BATCH_TOKENS if is_accelerator(text_devices[0]) else 1)
    vae = [VaeEncoder(job.model, device, dtype, pixels) for device in vae_devices]
    masks = EditMasks.of(job.config)
    placement = Placement(cache.text_quantization, cache.text_offload)
    if cache.text_offload and not any(map(is_accelerator, text_devices)):
        console().print("warning: cache.text_offload has no effect on the CPU", style="yellow")
    text = [
        TextEncoder(job.model, device, dtype, tokens, attend=masks.attend, placement=placement)
        for device in text_devices
    ]
    recipe, crop = recipe_id(job.recipe), job.resolution.crop
    return Lanes(
        vae,
        text,
        recipe,
        job.condition_image_size,
        job.format_version,
        crop,
        masks,
        job.keeps_thumbnails,
        job.model.family,
    )
