"""Terminal front end of `qwen-train mask-head` (experimental)."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.format.cache import open_configured
from qwen_cache.settings.load import Config
from qwen_cache.terminal import print_done, print_json
from qwen_train.run import in_one_process


def run_mask_head(settings: Config, out: Path, *, as_json: bool) -> int:
    """Train a mask head on a cache; the exit code."""
    require("torch")
    in_one_process("mask-head")
    cache = open_configured(settings.cache)
    from qwen_cache.models.devices import choose_device
    from qwen_train.training.mask_head import train_mask_head

    device = choose_device(settings.mask_head.device, "--device")
    trained = train_mask_head(cache, settings.mask_head, device, out)
    if as_json:
        print_json(trained.to_json())
    else:
        print_done(trained)
    return 0
