"""Compare predicted memory with measured peaks: a training step with random weights, by layout and checkpointing.

    python tools/bench_memory.py [--device cuda|cpu] [--layers N] [--heads N] [--side N] [--samples N] [--json FILE]

The reference is torch.cuda.max_memory_allocated on CUDA, and the allocator events of torch's profiler on the CPU. By
default, six blocks of the real width; on the CPU, of a small width. Exit code 1 if a prediction is off by over 10 %.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from qwen_cache.settings.load import Config, load_config
from qwen_train.data.batches import Batch
from qwen_train.memory.predict import Memory, SampleSize, predict_memory
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.optimizers import make_optimizer
from qwen_train.train import compute_loss
from qwen_train.weights import compute_dtype, prepare_for_training, trainable

CASES = {
    f"{layout}, {name}": [f"train.layout={layout}", *settings]
    for layout in ("padded", "packed")
    for name, settings in {
        "checkpointing": [],
        "every second block": ["train.gradient_checkpointing=2"],
        "no checkpointing": ["train.gradient_checkpointing=false"],
        "float32": ["train.gradient_checkpointing=false", "train.mixed_precision='no'"],
    }.items()
}
TOLERANCE = 0.1


def transformer_config(layers: int, heads: int, head_dim: int, width: int, **others: Any) -> dict[str, Any]:
    """The config of a transformer, as in config.json."""
    axes = {128: (16, 56, 56), 32: (4, 14, 14)}[head_dim]
    sizes = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head_dim}
    return {**sizes, "axes_dims_rope": axes, "joint_attention_dim": width, "in_channels": 64, **others}


def make_model(config: dict[str, Any], settings: Config, device: str) -> Any:
    """The transformer with random weights, prepared as for training."""
    train = settings.train
    dtype = torch.float32 if train.method == "full" else compute_dtype(train)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = QwenImageMultiResTransformer2DModel.from_config(config)
    torch.set_default_dtype(before)
    return prepare_for_training(model, train)


def random_batch(config: dict[str, Any], shapes: Sequence[SampleSize]) -> Batch:
    """A random batch of these sizes, padded as `collate` pads."""
    images = [sum(h * w for _, h, w in sample) for sample, _ in shapes]
    targets = [sample[0][1] * sample[0][2] for sample, _ in shapes]
    texts = [text for _, text in shapes]
    size = (len(shapes), max(images), 64)
    is_target = torch.arange(max(images)) < torch.tensor(targets)[:, None]
    mask = torch.arange(max(texts)) < torch.tensor(texts)[:, None]
    return Batch(
        keys=tuple(map(str, range(len(shapes)))),
        img_shapes=tuple(tuple(sample) for sample, _ in shapes),
        clean=torch.randn(size),
        noise=torch.randn(size),
        is_target=is_target,
        weight=is_target.float(),
        sigma=torch.rand(len(shapes)),
        sample_weight=torch.ones(len(shapes)),
        prompt_embeds=torch.randn(len(shapes), max(texts), config["joint_attention_dim"]),
        prompt_embeds_mask=None if min(texts) == max(texts) else mask,
    )


def step(model: Any, settings: Config, config: dict[str, Any], shapes: Sequence[SampleSize], device: str) -> None:
    """Forward and backward as in training: under autocast where it computes in bfloat16."""
    dtype = compute_dtype(settings.train)
    batch = random_batch(config, shapes).to(torch.device(device), dtype)

    @torch.autocast(device, dtype, enabled=dtype == torch.bfloat16)
    def transformer(**arguments: Any) -> Any:
        return model(**arguments)

    compute_loss(transformer, batch).backward()


def peak_on_cpu(run: Callable[[], None]) -> int:
    """Peak bytes that `run` allocates, by the events of torch's CPU allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def peak_on_cuda(run: Callable[[], None]) -> int:
    """Peak bytes that `run` allocates, by the counter of torch's CUDA allocator."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def compare(
    config: dict[str, Any], settings: Config, shapes: Sequence[SampleSize], device: str
) -> tuple[Memory, Memory]:
    """Predicted and measured memory of the second step of a run: with optimizer state, before gradients."""
    predicted = predict_memory(config, settings, shapes, "cuda" if device == "cuda" else "cpu")
    model = make_model(config, settings, device)
    parameters = trainable(model)
    optimizer, _ = make_optimizer(settings, parameters)

    def whole_step() -> None:
        for _ in range(settings.train.gradient_accumulation_steps):
            step(model, settings, config, shapes, device)
        optimizer.step()
        optimizer.zero_grad()

    whole_step()
    peak = (peak_on_cuda if device == "cuda" else peak_on_cpu)(whole_step)
    size = {p: p.numel() * p.element_size() for p in model.parameters()}
    trained = sum(size[p] for p in parameters)
    state = [value for values in optimizer.state.values() for value in values.values()]
    measured = Memory(
        weights=sum(size.values()) - trained,
        trained=trained,
        gradients=trained,
        optimizer=sum(value.numel() * value.element_size() for value in state if isinstance(value, torch.Tensor)),
        average=0,
        activations=peak - trained,
    )
    return predicted, measured


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare predicted memory with measured peaks.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, help="default: 24 on CUDA, as in the real model; 4 on the CPU")
    parser.add_argument("--side", type=int, help="side of the target in tokens (default: 64 on CUDA; 24 on the CPU)")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    real = options.device == "cuda"
    heads, side = options.heads or (24 if real else 4), options.side or (64 if real else 24)
    config = transformer_config(options.layers, heads, 128 if real else 32, 3584 if real else 64)
    shapes = [([(1, side - i, side), (1, side // 2, side)], 40 * (i + 1)) for i in range(options.samples)]
    rows = []
    for name, assignments in CASES.items():
        predicted, measured = compare(config, load_config(None, assignments), shapes, options.device)
        total = predicted.total - predicted.reserved
        row = {"case": name, "predicted": total, "measured": measured.total, "off": total / measured.total - 1}
        sizes = "  ".join(f"{kind} {row[kind] / 1e6:10,.1f} MB" for kind in ("predicted", "measured"))
        print(f"{name:32} {sizes}  {row['off']:+.1%}")
        rows.append(row)
    if options.json:
        options.json.write_text(json.dumps({"device": options.device, "cases": rows}, indent=1) + "\n")
    return int(any(abs(row["off"]) > TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
