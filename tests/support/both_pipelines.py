"""Our pipeline and the stock one, called with the same arguments, and all that goes from part to part in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from PIL import Image

from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import PredictConfig
from qwen_train.inference.pipeline import Devices, load_pipeline

CPU = Devices(*[torch.device("cpu")] * 3)
PARTS = ("vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler")


@cache
def our_pipeline(folder: Path, dtype: torch.dtype) -> Any:
    pipeline = load_pipeline(
        open_model(str(folder), PARTS), PredictConfig(dtype=str(dtype).removeprefix("torch.")), CPU
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@dataclass(frozen=True)
class Both:
    """Our pipeline and the stock one."""

    ours: Any
    stock: Any
    images: list[Image.Image] = field(default_factory=list)

    def call(self, **arguments: Any) -> tuple[Any, Any]:
        """The images of both, two steps at 96×64 when nothing else is said."""
        return self.call_one(self.ours, **arguments), self.call_one(self.stock, **arguments)

    def call_one(self, pipeline: Any, *, seeds: Sequence[int] = (3,), **arguments: Any) -> Any:
        """The images of one of them."""
        if self.images and "image" not in arguments:
            arguments["image"] = self.images if len(self.images) > 1 else self.images[0]
        arguments = {"num_inference_steps": 2, "height": 64, "width": 96} | arguments
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return pipeline(generator=generators if seeds[1:] else generators[0], **arguments)

    def trace(self, **arguments: Any) -> tuple[list[Any], list[Any]]:
        """All that goes from part to part in both, and last what they return."""
        with spies(self.ours, self.ours.vae.vae) as ours, spies(self.stock, self.stock.vae) as stock:
            results = self.call(**arguments)
        return [*ours, dict(results[0])], [*stock, dict(results[1])]


@contextmanager
def spies(pipeline: Any, vae: Any) -> Iterator[list[Any]]:
    """Every call of what is watched: its name, what it was given, and what it returned."""
    calls: list[Any] = []
    watched = [(vae, "encode"), (vae, "decode"), (pipeline.transformer, "forward"), (pipeline, "prepare_latents")]
    watched += [(pipeline.scheduler, "set_timesteps"), (pipeline.scheduler, "step")]
    with ExitStack() as stack:
        for owner, name in watched:
            stack.enter_context(patch.object(owner, name, spy(name, getattr(owner, name), calls, pipeline.scheduler)))
        yield calls


def spy(name: str, method: Callable[..., Any], calls: list[Any], scheduler: Any) -> Callable[..., Any]:
    @wraps(method)  # the pipelines look at the signature of set_timesteps
    def call(*args: Any, **kwargs: Any) -> Any:
        given = copied({"args": args, **kwargs})
        result = method(*args, **kwargs)
        returned = (scheduler.sigmas, scheduler.timesteps) if name == "set_timesteps" else result
        if name == "encode":
            returned = result.latent_dist.parameters
        calls.append((name, given, copied(returned)))
        return result

    return call


def copied(value: Any) -> Any:
    """A copy: a recorded tensor may be changed in place later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, QwenImage21KVCache):
        return [copied([layer.k, layer.v]) for layer in value.layer_caches]
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    return None if isinstance(value, torch.Generator) else value


def assert_equal(ours: Any, stock: Any, where: str = "") -> None:
    """Bit for bit, of one dtype, through lists and dictionaries."""
    assert type(ours) is type(stock), where
    if isinstance(stock, dict):
        assert ours.keys() == stock.keys(), where
        for key in stock:
            assert_equal(ours[key], stock[key], f"{where}.{key}")
    elif isinstance(stock, list | tuple):
        assert len(ours) == len(stock), where
        for i, (one, other) in enumerate(zip(ours, stock, strict=True)):
            assert_equal(one, other, f"{where}[{i}]{other[0] if is_call(other) else ''}")
    elif isinstance(stock, torch.Tensor):
        assert (ours.dtype, ours.shape) == (stock.dtype, stock.shape), where
        assert torch.equal(ours, stock), where
    elif isinstance(stock, np.ndarray | Image.Image):
        assert np.array_equal(np.asarray(ours), np.asarray(stock)), where
    else:
        assert ours == stock, where


def is_call(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str)
