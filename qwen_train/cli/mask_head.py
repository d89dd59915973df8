"""`mask-head` (experimental): a mask head, trained on a cache."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.options import CONFIG, DEVICES, JSON, OUTPUT, READ_CACHE, SET, command, option, setting
from qwen_cache.settings.given import Given
from qwen_cache.terminal import print_done, print_json


@command(
    page="howto/train-with-edit-masks.md",
    examples=[
        "qwen-train mask-head shards --out mask_head.safetensors",
        "qwen-train mask-head --set mask_head.steps=5000 --json",
    ],
)
def mask_head(
    cache: Given | None = READ_CACHE,
    device: Given | None = setting("mask_head.device", DEVICES, "The device for training.", "DEVICE"),
    out: Path = option(OUTPUT, "The path of the head.", "FILE", default=Path("mask_head.safetensors")),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Experimental: train a mask head on a cache with masks and attention. No part of the model is loaded."""
    from qwen_cache.format.cache import open_configured
    from qwen_cache.settings.load import load_config
    from qwen_train.run import in_one_process

    settings = load_config(config, set_, [cache, device])
    require("torch")
    in_one_process("mask-head")
    samples = open_configured(settings.cache)
    from qwen_cache.models.devices import choose_device
    from qwen_train.training.mask_head import train_mask_head

    trained = train_mask_head(samples, settings.mask_head, choose_device(settings.mask_head.device, "--device"), out)
    print_json(trained.to_json()) if json else print_done(trained)
    return 0
