"""Compare time and memory of training from a cache and in the usual way, on the same machine, model and samples.

    python tools/bench_train.py [--size tiny|medium|real] [--layers N] [--samples 8] [--steps 6] [--device cuda]
        [--mixed-precision bf16] [--ways usual,padded,packed,...] [--peak-tflops 989] [--repeats 3] [--json]

    usual            the loop of other trainers: one file per tensor, batch size 1, the stock transformer with peft,
                     and resident encoders
    padded           qwen-train with its defaults, batches of --batch-size
    packed           the packed layout
    no checkpointing activations kept
    int8, fp8        quantised base weights
    compiled         torch.compile, block by block

All train a LoRA of rank 16 on edits of --side² pixels with one control; each way is a process of its own, the ways
alternate, and medians are compared. Weights are random. `real` has the real width (24 heads of 128) and --layers of the
60 layers; its text embeddings are as narrow as the tiny encoder's, which makes one matrix smaller; instead of encoders,
the usual way holds as many bytes (16.8 GB in bfloat16). Memory is torch's peak allocation on a GPU, and the peak
resident set on a CPU. --peak-tflops adds the utilisation: FLOPs of forward and backward without recomputation, as torch
counts them, relative to the peak.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.utils import logging
from peft import LoraConfig
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLForConditionalGeneration

from qwen_cache import open_cache
from qwen_cache.settings.load import load_config

TOOLS = Path(__file__).parent
ENCODER_BYTES = 16_800_000_000  # of Qwen2.5-VL-7B and the VAE in bfloat16
WARM_UP = 2  # steps that are not timed
LORA = ["to_q", "to_k", "to_v", "to_out.0"]
WAYS: dict[str, list[str]] = {
    "padded": [],
    "packed": ["train.layout=packed"],
    "no checkpointing": ["train.gradient_checkpointing=false"],
    "int8": ["model.quantization=int8"],
    "fp8": ["model.quantization=fp8"],
    "compiled": ["train.compile=true"],
}
"""Settings of `qwen-train run`, by the name of the way."""


@dataclass(frozen=True)
class Size:
    heads: int
    head_dim: int
    layers: int
    axes: tuple[int, int, int]
    side: int
    """Side of the images, in pixels."""


SIZES = {
    "tiny": Size(2, 32, 2, (4, 14, 14), 128),
    "medium": Size(8, 64, 4, (8, 28, 28), 256),
    "real": Size(24, 128, 60, (16, 56, 56), 1024),
}


# ---- model and samples -----------------------------------------------------------------------------------------------


def make_everything(folder: Path, options: argparse.Namespace) -> None:
    """Write `model` (tiny encoders, a transformer of the size), the cache `shards`, and `files`, one per tensor."""
    size, model = SIZES[options.size], folder / "model"
    python = [sys.executable, str(TOOLS / "make_tiny_model.py"), str(model), "--variant", "edit-plus"]
    subprocess.run(python, check=True, stdout=subprocess.DEVNULL)
    width = json.loads((model / "transformer" / "config.json").read_text())["joint_attention_dim"]
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    make_transformer(size, options.layers or size.layers, width, dtype).save_pretrained(model / "transformer")
    random = np.random.default_rng(0)
    for name in ("target_images", "control_images"):
        (folder / "data" / name).mkdir(parents=True)
        for i in range(options.samples):
            pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            path = folder / "data" / name / f"{i}.png"
            Image.fromarray(pixels).resize((size.side, size.side)).save(path)
    for i in range(options.samples):
        text = folder / "data" / "target_images" / f"{i}.txt"
        text.write_text(f"number {i}: " + "make the sky a little brighter, " * 4)
    settings = ["--set", f"data.vae_image_size={size.side**2}"]
    command = ["build", str(folder / "data"), "--out", str(folder / "shards"), "--model", str(model), *settings]
    subprocess.run([sys.executable, "-c", "from qwen_cache.cli import main; main()", *command], check=True)
    (folder / "files").mkdir()
    for i, sample in enumerate(open_cache(folder / "shards")):
        for name, tensor in sample.tensors().items():
            torch.save(tensor.clone(), folder / "files" / f"{i}.{name}.pt")
        (folder / "files" / f"{i}.json").write_text(json.dumps(sample.img_shapes))


def make_transformer(size: Size, layers: int, text_width: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return QwenImageTransformer2DModel(
            num_layers=layers,
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            joint_attention_dim=text_width,
            axes_dims_rope=size.axes,
        )
    finally:
        torch.set_default_dtype(before)


# ---- the ways, each in a process of its own --------------------------------------------------------------------------


def train_usually(folder: Path, options: argparse.Namespace) -> float:
    """Median seconds per sample."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    encoders = load_encoders(folder, options, device, dtype)
    model = QwenImageTransformer2DModel.from_pretrained(folder / "model" / "transformer", torch_dtype=dtype).to(device)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=LORA))
    model.enable_gradient_checkpointing()
    parameters = [p for p in model.train().parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    seconds = []
    for step in range((WARM_UP + options.steps) * options.batch_size):
        begin = time.perf_counter()
        train_on_file(model, folder / "files", step % options.samples, device, dtype)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    assert encoders
    return statistics.median(seconds[WARM_UP * options.batch_size :])


def load_encoders(folder: Path, options: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[Any]:
    if options.size == "real":
        return [torch.empty(ENCODER_BYTES, dtype=torch.uint8, device=device)]
    vae = AutoencoderKLQwenImage.from_pretrained(folder / "model" / "vae", torch_dtype=dtype)
    text = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "model" / "text_encoder", dtype=dtype)
    return [vae.to(device), text.to(device)]


def train_on_file(model: Any, files: Path, i: int, device: torch.device, dtype: torch.dtype) -> None:
    names = ("image_latents", "control_latents", "prompt_embeds")
    clean, control, prompt = (torch.load(files / f"{i}.{name}.pt").to(device, dtype)[None] for name in names)
    shapes = [tuple(shape) for shape in json.loads((files / f"{i}.json").read_text())]
    noise, sigma = torch.randn_like(clean), torch.rand(1, device=device, dtype=dtype)
    noisy = (1 - sigma) * clean + sigma * noise
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        velocity = model(
            hidden_states=torch.cat([noisy, control], dim=1),
            encoder_hidden_states=prompt,
            encoder_hidden_states_mask=None,
            timestep=sigma,
            img_shapes=[shapes],
            return_dict=False,
        )[0][:, : clean.shape[1]]
    (velocity.float() - (noise - clean).float()).square().mean().backward()


def train_ours(folder: Path, options: argparse.Namespace, way: str) -> float:
    """Median seconds per sample."""
    from qwen_train.train import train

    out = folder / "out" / way.replace(" ", "-") / str(os.getpid())
    settings = [
        f"train.output_dir={out}",
        f"train.max_steps={WARM_UP + options.steps}",
        f"train.batch_size={options.batch_size}",
        f"train.mixed_precision={options.mixed_precision}",
        "train.checkpointing_steps=1000000",
        "logging.report_to=none",
        *WAYS[way],
    ]
    train(load_config(None, settings, model__path=str(folder / "model"), cache__path=str(folder / "shards")))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(1 / line["samples_per_second"] for line in lines[WARM_UP:])


def run_way(options: argparse.Namespace) -> dict[str, float]:
    """Seconds per sample and peak bytes of one way, in this process."""
    logging.set_verbosity_error()
    folder = Path(options.folder)
    seconds = train_usually(folder, options) if options.way == "usual" else train_ours(folder, options, options.way)
    on_gpu = options.device.startswith("cuda")
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": torch.cuda.max_memory_allocated() if on_gpu else resident}


# ---- comparing -------------------------------------------------------------------------------------------------------


def count_flops(options: argparse.Namespace, tokens: tuple[int, int]) -> int:
    """FLOPs of forward and backward of one sample, with a LoRA on frozen weights."""
    size, (image, text) = SIZES[options.size], tokens
    with torch.device("meta"):
        model = make_transformer(size, options.layers or size.layers, 64, torch.float32).requires_grad_(False)
    model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=LORA))
    tables = [torch.empty(n, size.head_dim // 2, dtype=torch.complex64, device="meta") for n in (image, text)]
    model.pos_embed.forward = lambda *_, **__: tables
    x, y = torch.empty(1, image, 64, device="meta"), torch.empty(1, text, 64, device="meta")
    with FlopCounterMode(display=False) as counter:
        t = torch.empty(1, device="meta")
        model(x, y, None, t, [[(1, 1, image)]], return_dict=False)[0].sum().backward()
    return int(counter.get_total_flops())


def compare(options: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in options.ways}
    with tempfile.TemporaryDirectory() as folder:
        make_everything(Path(folder), options)
        sample = open_cache(Path(folder) / "shards")[0]
        image = len(sample["image_latents"]) + len(sample["control_latents"])
        tokens = image, len(sample["prompt_embeds"])
        for repeat in range(options.repeats):
            for way in options.ways if repeat % 2 else list(reversed(options.ways)):
                command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder", folder]
                result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                runs[way].append(json.loads(result.stdout.splitlines()[-1]))
                print(f"{repeat + 1} of {options.repeats}: {way}", file=sys.stderr)
    medians = {way: {k: statistics.median(r[k] for r in each) for k in each[0]} for way, each in runs.items()}
    flops = count_flops(options, tokens) if options.peak_tflops else 0
    on_gpu = options.device.startswith("cuda")
    chip = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "machine": f"{chip}, torch {torch.__version__}, mixed precision {options.mixed_precision}",
        "size": options.size,
        "tokens": sum(tokens),
        "ways": {
            way: {
                "seconds_per_sample": m["seconds"],
                "times_usual": m["seconds"] / medians.get("usual", m)["seconds"],
                "tokens_per_second": sum(tokens) / m["seconds"],
                "peak_gigabytes": m["bytes"] / 1e9,
            }
            | ({"utilisation": flops / m["seconds"] / options.peak_tflops / 1e12} if flops else {})
            for way, m in medians.items()
        },
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"model of size {report['size']}, {report['tokens']} tokens a sample; {report['machine']}")
    columns = list(next(iter(report["ways"].values())))
    for column in ("", *columns):
        table.add_column(column.replace("_", " "), justify="right" if column else "left")
    for way, numbers in report["ways"].items():
        table.add_row(way, *(f"{numbers[column]:.4g}" for column in columns))
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the layers of the size")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="timed steps per process")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mixed-precision", choices=["bf16", "no"], default="no")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=["usual", "padded", "packed"])
    parser.add_argument("--peak-tflops", type=float, default=0, help="peak TFLOP/s of the device, for the utilisation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    jobs: dict[bool, Callable[[argparse.Namespace], dict[str, Any]]] = {True: run_way, False: compare}
    result = jobs[options.way is not None](options)
    if options.json or options.way:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
