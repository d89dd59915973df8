"""How long training steps wait for data: `qwen-train run` itself, on a cache of random tensors on this machine's disk.

The run is the real one, from the planner to the LoRA file; only the weights are made here instead of read. Its log says
what part of each step it waited for a batch.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bench_read import Samples, write_cache

from qwen_cache.settings.load import Config, load_config
from qwen_train.memory.prediction import block_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import with_layout
from qwen_train.train import train

from . import models
from .measure import Card, Cases, Row, UnavailableError, forget, need_host_memory
from .steps import fits

COUNT = 32  # samples in the cache
WARM_UP, STEPS = 3, 7
CHOICES = ((), ("train.offload_blocks=30",), ("train.offload_blocks=60",))
"""Settings, the first of which that fits is taken."""


def cases(part: str, card: Card) -> Cases:
    with tempfile.TemporaryDirectory() as folder:
        for batch_size in (1, 4):
            name = f"batches of {batch_size}"
            yield name, lambda b=batch_size, n=name: run(Path(folder), b, Path(folder) / n, card)


def run(folder: Path, batch_size: int, out: Path, card: Card) -> Row:
    """The steps of a run in `out` after the first few: medians of the time, and of the fraction that is waiting."""
    forget(card)
    side, text = (4, 32) if card.small else (64, models.TEXT["20b"])
    cache, config = folder / "shards", transformer_config(card)
    if not cache.exists():
        write_cache(Samples(COUNT, side, text), cache, {"pipeline": models.PIPELINE})
    model = models.write_folder(folder / "model", {"transformer": config})
    chosen = choose(config, batch_size, side, text, card)
    names = {"train.output_dir": str(out), "train.batch_size": batch_size, "train.max_steps": WARM_UP + STEPS}
    names |= {"train.caption_dropout": 0.0, "logging.report_to": "none", "train.checkpointing_steps": 10**6}
    values = [*chosen, *(f"{name}={value}" for name, value in names.items())]
    settings = load_config(None, values, model__path=str(model.path), cache__path=str(cache))

    def load(_: Any, given: Config, __: Any, **___: Any) -> Any:
        return models.random_weights(config, given, card)

    with patch("qwen_train.training.prepare.load_transformer", load):
        train(settings)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    timed = lines[WARM_UP:]
    waits = [line["data_wait"] for line in timed]
    return {
        "settings": list(chosen),
        "seconds": statistics.median(batch_size / line["samples_per_second"] for line in timed),
        "waiting": statistics.median(waits),
        "most_waiting": max(waits),
        "repeats": len(timed),
    }


def transformer_config(card: Card) -> dict[str, Any]:
    """With the text width of the samples, also for a small model."""
    return {**models.config_of("20b", card), "joint_attention_dim": models.REAL["20b"]["joint_attention_dim"]}


def choose(config: dict[str, Any], batch_size: int, side: int, text: int, card: Card) -> tuple[str, ...]:
    """The first of CHOICES whose predicted memory fits; UnavailableError if none does."""
    sample = SampleSize(((1, side, side), (1, side, side)), text + text // 16)
    for chosen in CHOICES if not card.small else CHOICES[:1]:
        settings = with_layout(load_config(None, list(chosen)), card.device)
        predicted = predict_memory(config, settings, [sample] * batch_size)
        if fits(predicted, card):
            if settings.train.offload_blocks:
                need_host_memory(settings.train.offload_blocks * block_bytes(config, settings), "offloading")
            return chosen
    raise UnavailableError(f"a step takes {predicted.total / 1e9:.1f} GB with all blocks offloaded (predicted)")
