"""Compare the cost of encoding: the loop of other trainers, `qwen-cache build`, and ablations of it.

    python tools/bench_build.py [--size tiny|medium|real] [--variant edit|edit-plus] [--device cuda] [--json]
    python tools/bench_build.py flops     # forward FLOPs of one sample at real size; computes nothing, takes a minute
    python tools/bench_build.py lanes     # wall time relative to the slower lane alone, with encoders that sleep

The usual way: one sample after the other, stock VAE, the stock pipeline's `encode_prompt` for the prompt and again for
the empty prompt, a .pt file for each tensor. Ours: plan, lanes, shards and commit. Neither includes loading the model
or hashing its weights. The ways alternate in one process on the same modules; one run of each warms up; medians are
reported. The tensors of both are compared, with 3-D positions for the stock pipeline.

A sample is a target and one control, both square. Weights are random. `tiny` is the model of make_tiny_model.py and
measures little but overhead. `medium` is for a CPU: widths and depths of the text encoder divided by 4, of the VAE by
4, with images small enough to keep the real ratio of work between VAE and text encoder. `real` is for a GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPipeline, QwenImageEditPlusPipeline
from make_tiny_model import make_tiny_model
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from qwen_cache import open_cache
from qwen_cache.encode import builder, write
from qwen_cache.encode.builder import BuildJob, Encoders
from qwen_cache.encode.lanes import Encoder, Lanes
from qwen_cache.encode.preflight import TEXT_BATCH_TOKENS, VAE_BATCH_PIXELS
from qwen_cache.encode.text import EncodedText, TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format import directory
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.encoders import load_processor
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import load_whole
from qwen_cache.settings.load import load_config
from qwen_cache.sources.detect import Row
from qwen_cache.sources.sizes import calculate_dimensions

VARIANTS = {"edit": QwenImageEditPipeline, "edit-plus": QwenImageEditPlusPipeline}
TOLERANCE = 0.05  # relative; the noise of bfloat16 over the real depth is below it, mistakes are above
PROMPT = (  # 33 tokens, the length of real instructions
    "Generate a new image that meets the user's requirements while maintaining consistency with the original input "
    "where appropriate, then explain how the user's text instruction should alter the objects"
)
Modules = dict[type[Any], Any]
Way = Callable[[Path], None]
"""Encodes all samples into a new folder."""


# ---- the models ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """Sizes of the model (None: as in the folder), and pixels for the VAE and the text encoder by variant."""

    vae: dict[str, Any] | None
    text: dict[str, Any]
    vision: dict[str, Any]
    pixels: dict[str, tuple[int, int]]


SIZES = {
    "tiny": Scale(None, {}, {}, {"edit": (128**2, 112**2), "edit-plus": (128**2, 112**2)}),
    "medium": Scale(
        {"base_dim": 24},
        {
            "vocab_size": 38016,
            "hidden_size": 896,
            "intermediate_size": 4736,
            "num_hidden_layers": 7,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
        },
        {
            "depth": 8,
            "hidden_size": 320,
            "intermediate_size": 856,
            "num_heads": 4,
            "out_hidden_size": 896,
            "fullatt_block_indexes": [1, 3, 5, 7],
        },
        {"edit": (256**2, 640**2), "edit-plus": (448**2, 384**2)},
    ),
    "real": Scale(
        {},
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        {"edit": (1024**2, 1024**2), "edit-plus": (1024**2, 384**2)},
    ),
}


def make_modules(scale: Scale, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> Modules:
    """The stock VAE and text encoder, by class."""
    if scale.vae is None:
        parts = ((AutoencoderKLQwenImage, "vae"), (Qwen2_5_VLForConditionalGeneration, "text_encoder"))
        return {kind: load_whole(kind, model.component(name), torch_dtype=dtype).to(device) for kind, name in parts}
    tokens = json.loads((model.component("text_encoder") / "config.json").read_text())
    ids = {name: tokens[name] for name in tokens if name.endswith("_token_id")}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = scale.text | {"max_position_embeddings": 128000, "rope_parameters": rope}
    vision = scale.vision | {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with device:
            text_encoder = Qwen2_5_VLForConditionalGeneration(
                Qwen2_5_VLConfig(text_config=text, vision_config=vision, dtype=dtype, **ids)
            )
            vae = AutoencoderKLQwenImage(**scale.vae)
    finally:
        torch.set_default_dtype(before)
    return {type(part): part.requires_grad_(False).eval() for part in (vae, text_encoder)}


@contextmanager
def loaded_from(modules: Modules, *, single_frame: bool = True) -> Iterator[None]:
    """While entered, new encoders use copies of `modules`, whatever their folder holds."""

    def load(kind: type[Any], _: Path, **__: Any) -> Any:
        return copy.deepcopy(modules[kind]) if kind is AutoencoderKLQwenImage else modules[kind]

    with ExitStack() as stack:
        for module in ("encode.vae", "models.encoders"):
            stack.enter_context(patch(f"qwen_cache.{module}.load_whole", load))
        if not single_frame:
            stack.enter_context(patch("qwen_cache.encode.vae.for_single_frames", lambda vae: vae))
        yield


@dataclass(frozen=True)
class Networks:
    """The pipeline and encoders of all ways."""

    usual: Any
    """The stock pipeline."""
    vae: VaeEncoder
    vae_3d: VaeEncoder
    vae_batched: VaeEncoder
    text: TextEncoder
    text_batched: TextEncoder
    text_attending: TextEncoder


def make_encoders(modules: Modules, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> Networks:
    vae, text_encoder = modules[AutoencoderKLQwenImage], modules[Qwen2_5_VLForConditionalGeneration]
    with loaded_from(modules):
        ours, text = VaeEncoder(model, device, dtype), TextEncoder(model, device, dtype)
        vae_batched = VaeEncoder(model, device, dtype, VAE_BATCH_PIXELS)
        text_batched = TextEncoder(model, device, dtype, TEXT_BATCH_TOKENS)
        text_attending = TextEncoder(model, device, dtype, attend=True)
    with loaded_from(modules, single_frame=False):
        vae_3d = VaeEncoder(model, device, dtype)
    kind = {pipeline.__name__: pipeline for pipeline in VARIANTS.values()}[model.pipeline]
    processor = load_processor(model)
    pipeline = kind(None, vae, text_encoder, processor.tokenizer, processor, None)
    text_encoder.register_forward_pre_hook(pass_token_types, with_kwargs=True)
    return Networks(pipeline, ours, vae_3d, vae_batched, text, text_batched, text_attending)


def pass_token_types(text_encoder: Any, args: Any, kwargs: Any) -> Any:
    """Pass the token types that 3-D positions need and stock pipelines omit (huggingface/diffusers issue 14194)."""
    return args, kwargs | {"mm_token_type_ids": (kwargs["input_ids"] == text_encoder.config.image_token_id).int()}


# ---- the ways --------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def encode_usually(pipeline: Any, job: BuildJob, row: Row) -> dict[str, torch.Tensor]:
    """Every tensor of one sample, as the usual trainers compute them."""
    device, processor = pipeline.text_encoder.device, pipeline.image_processor
    latents = []
    images = open_images(row)
    for image in images:
        width, height = calculate_dimensions(job.recipe["vae_image_size"], image.size)
        pixels = processor.preprocess(image, height, width).unsqueeze(2).to(device, pipeline.vae.dtype)
        encoded = pipeline._encode_vae_image(pixels, generator=None)
        latents.append(pipeline._pack_latents(encoded, 1, encoded.shape[1], *encoded.shape[3:])[0])
    sizes = [calculate_dimensions(job.condition_image_size, image.size) for image in images[1:]]
    resized = [processor.resize(p, height, width) for p, (width, height) in zip(images[1:], sizes, strict=True)]
    condition = resized if isinstance(pipeline, QwenImageEditPlusPipeline) else resized[0]
    prompt, empty = (pipeline.encode_prompt([text], condition, device)[0][0] for text in (row.prompt, ""))
    return {
        "image_latents": latents[0],
        "control_latents": torch.cat(latents[1:]),
        "prompt_embeds": prompt,
        "empty_prompt_embeds": empty,
    }


def open_images(row: Row) -> list[Image.Image]:
    """Target and control."""
    return [Image.open(str(path)).convert("RGB") for path in (row.target, *row.controls)]


def build_usually(pipeline: Any, job: BuildJob, out: Path) -> None:
    out.mkdir()
    for row in job.rows:
        for name, tensor in encode_usually(pipeline, job, row).items():
            torch.save(tensor.cpu(), out / f"{row.name}.{name}.pt")


def build_ours(vae: Any, text: Any, job: BuildJob, out: Path) -> None:
    """From the plan to the commit; `vae` and `text` are encoders, or stand-ins."""
    job = replace(job, folder=out)
    out.mkdir()
    with directory.writing(out):
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        assert not plan.problems, plan.problems
        update = builder.make_update(job, existing, plan)
        with Encoders(lambda job: make_lanes(vae, text, job)) as encoders:
            write.run(job, update, plan.missing, encoders)


def make_lanes(vae: Any, text: Any, job: BuildJob) -> Lanes:
    return Lanes([vae], [text], recipe_id(job.recipe), job.condition_image_size, job.format_version)


class UnsharedPrefix(Encoder[TextRequest, EncodedText]):
    """A text encoder without a shared prefix: it encodes the images once for each of the two prompts."""

    def __init__(self, text: TextEncoder) -> None:
        self.text, self.inputs = text, text.inputs
        self.device, self.batch_tokens = text.device, 1

    def encode(self, requests: Sequence[TextRequest]) -> list[EncodedText]:
        ((inputs, prompt, *_),) = requests
        prefix_of_empty, prefix_of_prompt = (self.text.read([inputs]) for _ in range(2))
        (empty,) = self.text.embed(prefix_of_empty, [(0, "", None)])
        (rest,) = self.text.embed(prefix_of_prompt, [(0, prompt, None)])
        return [EncodedText(prefix_of_prompt.embeds[0], rest.embeds, empty.embeds)]


class ExclusiveEncoder:
    """An encoder that never runs at the same time as another with the same lock."""

    def __init__(self, encoder: Any, lock: threading.Lock) -> None:
        self.encoder, self.lock = encoder, lock

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.encoder, name)

        def call(*arguments: Any) -> Any:
            with self.lock:
                return method(*arguments)

        return call if name in ("encode", "encode_beside") else method


def make_ways(encoders: Networks, job: BuildJob) -> dict[str, Way]:
    vae, text, lock = encoders.vae, encoders.text, threading.Lock()

    def in_turn(encoder: Any) -> ExclusiveEncoder:
        return ExclusiveEncoder(encoder, lock)

    return {
        "usual": lambda out: build_usually(encoders.usual, job, out),
        "ours": lambda out: build_ours(vae, text, job, out),
        "ours, in batches": lambda out: build_ours(encoders.vae_batched, encoders.text_batched, job, out),
        "ours, lanes in turn": lambda out: build_ours(in_turn(vae), in_turn(text), job, out),
        "ours, 3-D VAE": lambda out: build_ours(encoders.vae_3d, text, job, out),
        "ours, no shared prefix": lambda out: build_ours(vae, UnsharedPrefix(text), job, out),
        "ours, with attention": lambda out: build_ours(vae, encoders.text_attending, job, out),
    }


# ---- counting --------------------------------------------------------------------------------------------------------


def attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products of every query with every key, masked or not, as FlopCounterMode counts elsewhere."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (width + value[3]))


ATTENTION = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kind}"): attention_flops
    for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
}
PARTS = {"vision tower": ".visual", "language model": ".language_model", "lm_head": ".lm_head"}


class ShapesOnly(TorchDispatchMode):
    """Skips float computations: every result is zeros of the right shape, which take no memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        everything = (args, kwargs or {})
        floats = any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in tree_leaves(everything))
        if not floats or func is torch.ops.aten.index.Tensor:  # a mask's values give the number of rows
            return func(*args, **(kwargs or {}))
        if func._schema.is_mutable:
            return args[0]
        args, kwargs = tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device="meta"), everything)
        kwargs |= {"device": torch.device("meta")} if "device" in kwargs else {}
        return tree_map_only(torch.Tensor, free_zeros, func(*args, **kwargs))


def free_zeros(tensor: torch.Tensor) -> torch.Tensor:
    """One zero, expanded to the shape."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def count_flops(work: Callable[[], object]) -> dict[str, int]:
    """Forward FLOPs by part of the model."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        work()
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    parts = {part: sum(n for name, n in counts.items() if name.endswith(end)) for part, end in PARTS.items()}
    return {"VAE": counts["Global"] - sum(parts.values()), **parts, "all": counts["Global"]}


def count_ways(encoders: Networks, job: BuildJob) -> dict[str, dict[str, int]]:
    """FLOPs of one sample by way; overlapping lanes does not change them."""
    row = job.rows[0]

    def ours(vae: Any, text: Any) -> None:
        images = open_images(row)
        for image in images:
            vae.encode([vae.pixels(image, calculate_dimensions(job.recipe["vae_image_size"], image.size))])
        condition = [p.resize(calculate_dimensions(job.condition_image_size, p.size)) for p in images[1:]]
        text.encode([TextRequest(text.inputs(condition), row.prompt, ())])

    return {
        "usual": count_flops(lambda: encode_usually(encoders.usual, job, row)),
        "ours": count_flops(lambda: ours(encoders.vae, encoders.text)),
        "ours, 3-D VAE": count_flops(lambda: ours(encoders.vae_3d, encoders.text)),
        "ours, no shared prefix": count_flops(lambda: ours(encoders.vae, UnsharedPrefix(encoders.text))),
        "ours, with attention": count_flops(lambda: ours(encoders.vae, encoders.text_attending)),
    }


@contextmanager
def counting_tokens(encoders: Networks) -> Iterator[list[int]]:
    """Collects the number of tokens that pass through the language model."""
    counted: list[int] = []
    layer = encoders.text.model.language_model.layers[0]
    handle = layer.register_forward_pre_hook(lambda _, args: counted.append(args[0].shape[0] * args[0].shape[1]))
    try:
        yield counted
    finally:
        handle.remove()


# ---- the tasks -------------------------------------------------------------------------------------------------------


def prepare(root: Path, variant: str, pixels: tuple[int, int], samples: int, dtype: str) -> BuildJob:
    """A model folder (only size tiny uses its weights) and a source."""
    model, source = make_tiny_model(root / "model", variant), root / "data"
    side = round(max(pixels) ** 0.5)
    for folder in ("target_images", "control_images"):
        (source / folder).mkdir(parents=True)
        for i in range(samples):
            make_image(side, seed=2 * i + (folder == "control_images")).save(source / folder / f"{i:04}.png")
    for i in range(samples):
        (source / "target_images" / f"{i:04}.txt").write_text(PROMPT)
    settings = [f"data.vae_image_size={pixels[0]}", f"data.condition_image_size={pixels[1]}", f"cache.dtype={dtype}"]
    config = load_config(None, settings, model__path=str(model), cache__path=str(root / "shards"))
    job = builder.prepare_build(config, str(source))
    assert len(job.rows) == samples, job.problems
    return job


def make_image(side: int, seed: int) -> Image.Image:
    """A random image between flat and noise."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (16, 16, 3), dtype=np.uint8))
    return coarse.resize((side, side), Image.Resampling.BICUBIC)


def compare_time(options: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Median time of each way; their order alternates."""
    scale, device, dtype = SIZES[options.size], torch.device(options.device), getattr(torch, options.dtype)
    job = prepare(root, options.variant, scale.pixels[options.variant], options.samples, options.dtype)
    encoders = make_encoders(make_modules(scale, job.model, device, dtype), job.model, device, dtype)
    ways, flops = make_ways(encoders, job), count_ways(encoders, job)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 1):
        for name in reversed(ways) if repeat % 2 else ways:
            print(f"{repeat} of {options.repeats}: {name}", file=sys.stderr)
            runs[name].append(measure(ways[name], encoders, root / f"{name} {repeat}", options.samples))
    results = {
        name: {key: statistics.median(r[key] for r in each[1:]) for key in each[0]} for name, each in runs.items()
    }
    for name, each in results.items():
        counted = flops.get(name, flops["ours"])
        each |= {"tflop": counted["all"] / 1e12, "fewer_flops": flops["usual"]["all"] / counted["all"]}
        each["faster"] = results["usual"]["seconds"] / each["seconds"]
    return {
        "samples": options.samples,
        "pixels": dict(zip(("vae", "condition"), scale.pixels[options.variant], strict=True)),
        "difference": difference(job, root / "usual 0", root / "ours 0"),
        "results": results,
    }


def measure(way: Way, encoders: Networks, out: Path, samples: int) -> dict[str, float]:
    """Seconds, CPU seconds and tokens per sample."""
    with counting_tokens(encoders) as tokens:
        wall, cpu = time.perf_counter(), time.process_time()
        way(out)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": wall / samples, "cpu_seconds": cpu / samples, "tokens": sum(tokens) / samples}


def difference(job: BuildJob, usual: Path, ours: Path) -> float:
    """The largest relative distance between a tensor of one way and the same tensor of the other."""
    worst = 0.0
    for sample in open_cache(ours):
        for name, tensor in sample.tensors().items():
            other = torch.load(usual / f"{sample.name}.{name}.pt", weights_only=True).double()
            worst = max(worst, float((tensor.double() - other).norm() / other.norm()))
    assert len(open_cache(ours)) == len(job.rows)
    return worst


@torch.inference_mode()
def compare_flops(size: str, root: Path) -> dict[str, Any]:
    """FLOPs of one sample of each variant, by part of the model."""
    results = {}
    for variant, pixels in SIZES[size].pixels.items():
        job = prepare(root / variant, variant, pixels, 1, "float32")
        modules = make_modules(SIZES[size], job.model, torch.device("cpu" if size == "tiny" else "meta"), torch.float32)
        for module in modules.values():
            forget_weights(module)
        encoders = make_encoders(modules, job.model, torch.device("cpu"), torch.float32)
        with ShapesOnly(), counting_tokens(encoders) as tokens:
            counts = count_ways(encoders, job)
        prompt = len(load_processor(job.model).tokenizer(PROMPT).input_ids)
        results[variant] = {"pixels": pixels, "prompt_tokens": prompt, "longest_input": max(tokens), "flops": counts}
    return results


def forget_weights(module: torch.nn.Module) -> None:
    """Replace every weight by zeros that take no memory."""
    for part in module.modules():
        for name, tensor in [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]:
            zeros = free_zeros(tensor)
            is_weight = isinstance(tensor, torch.nn.Parameter)
            setattr(part, name, torch.nn.Parameter(zeros, requires_grad=False) if is_weight else zeros)


@dataclass(frozen=True)
class SleepingEncoder:
    """Stands in for either encoder: sleeps `seconds` for each item."""

    seconds: float
    device, batch_pixels, batch_tokens = torch.device("cpu"), 1, 1

    def pixels(self, image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(size[0] * size[1] // PIXELS_PER_TOKEN**2, 64)

    def inputs(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        return {}

    def encode(self, items: Sequence[Any]) -> list[Any]:
        time.sleep(self.seconds * len(items))
        text = EncodedText(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 4))
        return [item if isinstance(item, torch.Tensor) else text for item in items]


LANES = {
    "VAE slower": (SleepingEncoder(0.040), SleepingEncoder(0.040)),
    "text slower": (SleepingEncoder(0.020), SleepingEncoder(0.080)),
    "equal": (SleepingEncoder(0.040), SleepingEncoder(0.080)),
}
"""VAE and text encoder."""


def compare_lanes(samples: int, root: Path) -> dict[str, Any]:
    """Wall time of the whole build relative to that of the slower lane alone."""
    job = prepare(root, "edit-plus", SIZES["tiny"].pixels["edit-plus"], samples, "float32")
    results = {}
    build_ours(SleepingEncoder(0), SleepingEncoder(0), job, root / "warm up")
    for name, (vae, text) in LANES.items():
        begin = time.perf_counter()
        build_ours(vae, text, job, root / name)
        wall, slower = time.perf_counter() - begin, samples * max(2 * vae.seconds, text.seconds)
        results[name] = {"wall_seconds": wall, "slower_lane_seconds": slower, "ratio": wall / slower}
    return results


# ---- the command -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=["time", "flops", "lanes"], default="time")
    parser.add_argument("--size", choices=list(SIZES), help="size of the model (default: tiny; real for flops)")
    parser.add_argument("--variant", choices=list(VARIANTS), default="edit-plus")
    parser.add_argument("--samples", type=int, help="samples in the source (default: 8; 40 for lanes)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way; the median is reported")
    parser.add_argument("--device", default="cpu", help="device of both encoders")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options.size = options.size or ("real" if options.task == "flops" else "tiny")
    options.samples = options.samples or (40 if options.task == "lanes" else 8)
    tasks: dict[str, Callable[[Path], dict[str, Any]]] = {
        "time": lambda root: compare_time(options, root),
        "flops": lambda root: compare_flops(options.size, root),
        "lanes": lambda root: compare_lanes(options.samples, root),
    }
    with tempfile.TemporaryDirectory() as temporary:
        report = {"task": options.task, "size": options.size, "machine": machine(options)}
        report |= {options.task: tasks[options.task](Path(temporary))}
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    sys.exit(0 if options.task != "time" or report["time"]["difference"] <= TOLERANCE else 1)


def machine(options: argparse.Namespace) -> str:
    cuda = options.device.startswith("cuda")
    chip = torch.cuda.get_device_name(options.device) if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    return f"{chip}, torch {torch.__version__}, {options.dtype}"


def show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(width=110)
    result = report[report["task"]]
    for table in {"time": time_tables, "flops": flops_tables, "lanes": lanes_tables}[report["task"]](result, report):
        console.print(table)
    if report["task"] == "time":
        pixels = result["pixels"]
        console.print(
            f"images of {pixels['vae']} pixels for the VAE and {pixels['condition']} for the text encoder; the two "
            f"ways differ by {result['difference']:.1e} at most"
        )
    if report["task"] == "time" and result["difference"] > TOLERANCE:
        console.print("[bold]The ways did not compute the same tensors.[/bold]")


def make_table(title: str, *columns: str) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table("", title=title, box=SIMPLE)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def time_tables(result: dict[str, Any], report: dict[str, Any]) -> Iterator[Any]:
    title = f"{result['samples']} samples, model of size {report['size']}; {report['machine']}"
    columns = ("samples/s", "× usual", "CPU-s/sample", "GFLOP", "usual / this", "tokens")
    table = make_table(title, *columns)
    for name, each in result["results"].items():
        cells = [f"{1 / each['seconds']:.3g}", f"{each['faster']:.2f}", f"{each['cpu_seconds']:.3g}"]
        table.add_row(name, *cells, f"{each['tflop'] * 1e3:.4g}", f"{each['fewer_flops']:.2f}", f"{each['tokens']:.0f}")
    yield table


def flops_tables(results: dict[str, Any], report: dict[str, Any]) -> Iterator[Any]:
    for variant, each in results.items():
        vae, condition = (round(pixels**0.5) for pixels in each["pixels"])
        title = f"{variant}: TFLOP of a sample; VAE at {vae}², text encoder at {condition}² and {each['longest_input']}"
        ways = each["flops"]
        table = make_table(f"{title} tokens", *ways)
        for part in ("VAE", *PARTS, "all"):
            table.add_row(part, *(f"{counts[part] / 1e12:.3g}" for counts in ways.values()))
        table.add_row("usual / this", *(f"{ways['usual']['all'] / counts['all']:.2f}" for counts in ways.values()))
        yield table


def lanes_tables(results: dict[str, Any], report: dict[str, Any]) -> Iterator[Any]:
    table = make_table("encoders that sleep", "slower lane alone", "wall", "ratio")
    for name, each in results.items():
        table.add_row(
            name, f"{each['slower_lane_seconds']:.2f} s", f"{each['wall_seconds']:.2f} s", f"{each['ratio']:.3f}"
        )
    yield table


if __name__ == "__main__":
    main()
