"""Seconds per denoising step of `qwen-train predict` with guidance, from given embeddings, for each kind of offloading.

The stock pipeline with random weights of the real size, at 1024² with one control: two passes of the transformer per
step. The first step is not counted, nor are the VAE and the text encoder.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import diffusers
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from PIL import Image

from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import PredictConfig
from qwen_train.inference.pipeline import Devices, Offload, load_pipeline

from . import flops, models
from .measure import Card, Cases, Row, UnavailableError, forget, need_host_memory, peaks, summary

STEPS = 5
ROOM = 6e9  # bytes for the VAE and activations; a step at 1024² with a control has 4.5 GB when training
SMALL_VAE = {"base_dim": 8, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1}
SMALL_SIDE = 64


def cases(part: str, card: Card) -> Cases:
    with tempfile.TemporaryDirectory() as folder:
        for offload in get_args(Offload):
            yield f"offload {offload}", lambda o=offload: measure(o, Path(folder), card)


def measure(offload: Offload, folder: Path, card: Card) -> Row:
    forget(card)
    config = models.config_of("20b", card)
    pipeline = make_pipeline(config, offload, folder, card)
    pipeline.set_progress_bar_config(disable=True)
    side = SMALL_SIDE if card.small else 1024
    seconds = denoise(pipeline, config["joint_attention_dim"], side, card)
    row = {**summary(seconds[1:]), **peaks(card)}
    sample = models.edit("20b", card, (1024, 1024), (1024, 1024))
    needed = 2 * flops.of_forward(config, load_config(None, []), sample)
    return {"tflop": needed / 1e12, **row, "tflops": needed / row["seconds"] / 1e12}


def make_pipeline(config: dict[str, Any], offload: Offload, folder: Path, card: Card) -> Any:
    """That of `qwen-train predict`; only the weights are made here instead of read."""
    weights = models.meta_bytes(config)
    on_device = weights if offload != "sequential" else 0
    if on_device + (0 if card.small else ROOM) > card.memory:
        raise UnavailableError(f"the weights take {weights / 1e9:.1f} GB, and {card.memory / 1e9:.1f} GB are free")
    if offload != "none":
        need_host_memory(weights, "offloading")
    vae = {"_class_name": diffusers.AutoencoderKLQwenImage.__name__, **(SMALL_VAE if card.small else {})}
    model = models.write_folder(folder, {"transformer": config, "vae": vae})

    def load(kind: Any, path: Path, **_: Any) -> Any:
        if path.name == "vae":
            return kind.from_config(vae).to(torch.bfloat16).requires_grad_(False).eval()
        defaults = load_config(None, [])
        return models.random_weights(config, defaults, card, kind=kind, on_host=offload != "none").eval()

    with patch("qwen_train.inference.pipeline.load_whole", load), patch("qwen_cache.encode.vae.load_whole", load):
        settings = PredictConfig(offload=offload)
        return load_pipeline(model, settings, Devices(card.device, card.device, card.device))


def denoise(pipeline: Any, width: int, side: int, card: Card) -> list[float]:
    """Seconds of each step."""
    times: list[float] = []

    def at_end(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        card.synchronize()
        times.append(time.perf_counter())
        return {}

    length = models.TEXT["20b"] // (16 if card.small else 1)
    prompts = {}
    for kind in ("", "negative_"):
        prompts[f"{kind}prompt_embeds"] = torch.randn(1, length, width, device=card.device).bfloat16()
        prompts[f"{kind}prompt_embeds_mask"] = torch.ones(1, length, dtype=torch.long, device=card.device)
    with ExitStack() as stack:
        if card.small:
            stack.enter_context(patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", side**2))
        pipeline(
            image=Image.new("RGB", (side, side), "grey"),
            **prompts,
            height=side,
            width=side,
            num_inference_steps=STEPS if not card.small else 3,
            true_cfg_scale=4.0,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=at_end,
        )
    return [end - begin for begin, end in itertools.pairwise(times)]
