"""Caches for musubi-tuner: the mirror of `qwen_cache.importers.musubi`, which describes the files.

Read in kohya-ss/musubi-tuner 30c658c: dataset/image_video_dataset.py, bucket.py and cache_io.py. Its training reads the
folder of the cache alone. It sorts samples into buckets by the size in the name of the latents file and the settings
in the dataset's TOML file, and stacks the latents of a batch: `bucket_no_upscale` with a `resolution` that no sample
exceeds makes each size its own bucket.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import torch
from safetensors.torch import save_file

from qwen_cache.exporters.target import ALWAYS, Export, NamedSample, Refusal, Tool, images_of
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta
from qwen_cache.format.shard import MAX_HEADER

ARCHITECTURE, FORMAT = "qwen_image", "1.0.1"


def refusing(_: Iterable[SampleMeta]) -> Callable[[SampleMeta], Refusal | None]:
    """Every size and any number of controls fits."""

    def refusal(meta: SampleMeta) -> Refusal | None:
        if len(meta.prompt.encode()) > MAX_HEADER // 2:
            return Refusal("its prompt is too long for the metadata of a safetensors file", "shorten the prompt")
        return None

    return refusal


def write(export: Export) -> None:
    """The files of all samples in `cache/`, a dataset.toml for the training, and the images.jsonl that it names."""
    arch, largest = "qie" if export.takes_controls else "qi", 0
    (export.folder / "cache").mkdir()
    with open(export.folder / "images.jsonl", "w", encoding="utf-8") as listing:
        for named in export.samples:
            largest = max(largest, _write_sample(export, named, arch))
            line = {"image_path": f"{named.stem}.png", "caption": named.sample.prompt}
            listing.write(json.dumps(line, ensure_ascii=False) + "\n")
            export.on_sample()
    side = PIXELS_PER_TOKEN * math.ceil(math.sqrt(largest) / PIXELS_PER_TOKEN)
    (export.folder / "dataset.toml").write_text(_toml(export, side), encoding="utf-8")


def _write_sample(export: Export, named: NamedSample, arch: str) -> int:
    """Both files; the pixels of the target."""
    stem, sample = named
    target, *controls = images_of(sample)
    height, width = (8 * side for side in target.shape[-2:])
    common = {"architecture": ARCHITECTURE, "format_version": FORMAT}
    latents = {f"latents_{_described(target)}": target}
    latents |= {f"latents_control_{i}_{_described(each)}": each for i, each in enumerate(controls)}
    path = export.folder / "cache" / f"{stem}_{width:04d}x{height:04d}_{arch}.safetensors"
    save_file(latents, path, {**common, "width": str(width), "height": str(height)})
    embeds = sample["prompt_embeds"]
    text = {f"varlen_vl_embed_{_dtype(embeds)}": embeds}
    path = export.folder / "cache" / f"{stem}_{arch}_te.safetensors"
    save_file(text, path, {**common, "caption1": sample.prompt})
    return height * width


def _described(latents: torch.Tensor) -> str:
    """Frames, height, width and dtype, as in the names of its tensors."""
    _, frames, height, width = latents.shape
    return f"{frames}x{height}x{width}_{_dtype(latents)}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _toml(export: Export, side: int) -> str:
    lines = [
        "[general]",
        f"resolution = [{side}, {side}] # no sample has more pixels, so each size is its own bucket",
        "batch_size = 1",
        "enable_bucket = true",
        "bucket_no_upscale = true",
        "",
        "[[datasets]]",
        f"image_jsonl_file = {json.dumps(str(export.final / 'images.jsonl'))} # its images are not opened",
        f"cache_directory = {json.dumps(str(export.final / 'cache'))}",
    ]
    return "\n".join(lines) + "\n"


TOOL = Tool(
    "musubi-tuner", ALWAYS, refusing, write, "qwen_image_train_network.py --dataset_config {folder}/dataset.toml"
)
