"""Compare predicted memory with measured peaks: a training step with random weights, by layout and checkpointing.

    python tools/bench_memory.py [--family 20b|2.1] [--draws N] [--device cuda|cpu] [--layers N] [--heads N] [--side N]
                                 [--samples N] [--json FILE]

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

from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21, Family, family_of_transformer
from qwen_cache.settings.load import Config, load_config
from qwen_train.data.batches import Batch, TokenPlaces, in_order
from qwen_train.memory.prediction import Memory, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.loading import trained_class
from qwen_train.training.loss import compute_loss
from qwen_train.training.optimizers import make_optimizer
from qwen_train.weights import compute_dtype, prepare_for_training, quantize_blocks, trainable

FAMILIES = {"20b": QWEN_IMAGE, "2.1": QWEN_IMAGE_21}
REAL_HEADS = {"20b": 24, "2.1": 32}
REAL_WIDTH = {"20b": 3584, "2.1": 4096}
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


def transformer_config(
    layers: int, heads: int, head_dim: int, width: int, *, family: Family = QWEN_IMAGE, **others: Any
) -> dict[str, Any]:
    """The config of a transformer, as in config.json."""
    axes = {128: (16, 56, 56), 32: (4, 14, 14)}[head_dim]
    sizes = {"num_layers": layers, "num_attention_heads": heads, "attention_head_dim": head_dim}
    sizes |= {"axes_dims_rope": axes, family.text_width_key: width, "in_channels": 64}
    return {"_class_name": family.transformer, **sizes, **others}


def make_model(config: dict[str, Any], settings: Config, device: str, *, later: bool = False) -> Any:
    """The transformer with random weights, prepared as for training; `later` leaves quantisation to `wrap`."""
    train = settings.train
    dtype = torch.float32 if train.method == "full" else compute_dtype(train)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = trained_class(config).from_config(config)
    torch.set_default_dtype(before)
    kind, where = settings.model.quantization, torch.device(device)
    quantize_blocks(model, kind, where, train.quantized_backward, offloaded=False, later=later)
    return prepare_for_training(model, train)


def random_batch(config: dict[str, Any], settings: Config, samples: Sequence[SampleSize]) -> Batch:
    """A random batch of these sizes, padded as `collate` pads."""
    family, draws = family_of_transformer(config), settings.train.noise_draws
    places = [TokenPlaces.of(sample.img_shapes, draws, target_last=family.target_last) for sample in samples]
    texts = [sample.text_tokens for sample in samples]
    size = (len(samples), max(place.length for place in places), 64)
    tokens = torch.arange(size[1])
    targets = torch.tensor([[place.targets.start, place.targets.stop] for place in places])
    is_target = (tokens >= targets[:, :1]) & (tokens < targets[:, 1:])
    mask = torch.arange(max(texts)) < torch.tensor(texts)[:, None]
    return Batch(
        keys=tuple(map(str, range(len(samples)))),
        labels=tuple(map(str, range(len(samples)))),
        img_shapes=tuple(in_order(sample.img_shapes, family) for sample in samples),
        clean=torch.randn(size),
        noise=torch.randn(size),
        is_target=is_target,
        weight=is_target.float(),
        sigma=torch.rand(len(samples), draws) if draws > 1 else torch.rand(len(samples)),
        token_sigma=torch.rand(size[:2]) if draws > 1 else None,
        sample_weight=torch.ones(len(samples)),
        prompt_embeds=torch.randn(len(samples), max(texts), config[family.text_width_key]),
        prompt_embeds_mask=None if min(texts) == max(texts) else mask,
        image_positions=tuple(sample.image_positions for sample in samples) if family.text_rows_only else None,
    )


def step(model: Any, settings: Config, config: dict[str, Any], samples: Sequence[SampleSize], device: str) -> None:
    """Forward and backward as in training: under autocast where it computes in bfloat16."""
    dtype = compute_dtype(settings.train)
    batch = random_batch(config, settings, samples).to(torch.device(device), dtype)

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
    config: dict[str, Any], settings: Config, samples: Sequence[SampleSize], device: str
) -> tuple[Memory, Memory]:
    """Predicted and measured memory of the second step of a run: with optimizer state, before gradients."""
    predicted = predict_memory(config, settings, samples, "cpu" if device == "cpu" else "accelerator")
    model = make_model(config, settings, device)
    parameters = trainable(model)
    optimizer, _ = make_optimizer(settings, parameters)

    def whole_step() -> None:
        for _ in range(settings.train.gradient_accumulation_steps):
            step(model, settings, config, samples, device)
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


def sample_sizes(count: int, side: int, family: Family) -> list[SampleSize]:
    """Edits of different sizes; for a model of both, the second is text to image."""
    controls = [() if family.joint_sequence and i == 1 else ((1, side // 2, side),) for i in range(count)]
    positions = [tuple(7 for _ in each) if family.text_rows_only else () for each in controls]
    return [
        SampleSize(((1, side - i, side), *each), 40 * (i + 1), at)
        for i, (each, at) in enumerate(zip(controls, positions, strict=True))
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare predicted memory with measured peaks.")
    parser.add_argument("--family", choices=FAMILIES, default="20b", help="the 20B models, or Qwen-Image-2.1")
    parser.add_argument("--draws", type=int, default=1, help="train.noise_draws, for Qwen-Image-2.1")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, help="default: as the real model has on CUDA; 4 on the CPU")
    parser.add_argument("--side", type=int, help="side of the target in tokens (default: 64 on CUDA; 24 on the CPU)")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    real, family = options.device == "cuda", FAMILIES[options.family]
    heads, side = options.heads or (REAL_HEADS[options.family] if real else 4), options.side or (64 if real else 24)
    width = REAL_WIDTH[options.family] if real else 64
    config = transformer_config(options.layers, heads, 128 if real else 32, width, family=family)
    samples = sample_sizes(options.samples, side, family)
    rows = []
    for name, assignments in CASES.items():
        settings = load_config(None, [*assignments, f"train.noise_draws={options.draws}"])
        predicted, measured = compare(config, settings, samples, options.device)
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
