"""Caches for qwen-image-finetune ("qflux"), its v2.0: the mirror of `qwen_cache.importers.qflux`.

Read in tsiendragon/qwen-image-finetune 460ba1a: data/cache_manager.py, data/dataset.py, data/preprocess.py. Its dataset
opens the images of a sample also when it is cached: their MD5 names the sample's JSON, and their sizes after its
preprocessing are `img_shapes`. So the export has an image for each: the thumbnail if the cache has one, else grey, in
the size of the latents, which its settings keep. All samples have the same sizes, since its preprocessing knows only
one. Embeddings are stored under the prompt's MD5 there; here under the sample's key where samples with other images
have the same prompt.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qwen_cache.exporters.target import ALWAYS, Export, NamedSample, Refusal, Tool
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta
from qwen_cache.inspect.images import stored_thumbnails

GREY = (128, 128, 128)
DROPPED = ["empty_prompt_embeds", "empty_prompt_embeds_mask"]


def refusing(samples: Iterable[SampleMeta]) -> Callable[[SampleMeta], Refusal | None]:
    """One size for all targets, one for each control: those of most samples; at least one control."""
    sizes = Counter(tuple(meta.img_shapes) for meta in samples if len(meta.img_shapes) > 1).most_common(1)

    def refusal(meta: SampleMeta) -> Refusal | None:
        if len(meta.img_shapes) < 2:
            return Refusal("it has no control image, which qwen-image-finetune needs", "leave it out")
        if tuple(meta.img_shapes) != sizes[0][0]:
            what = "its images have other sizes than those of most samples; qwen-image-finetune has one for all"
            return Refusal(what, "build a cache of images that were cropped to one size")
        return None

    return refusal


def write(export: Export) -> None:
    """The images and prompts in `data/`, the tensors in `cache/`, and the settings that belong to both."""
    prompts = Counter(_prompt(sample) for _, sample in export.samples)
    for kind in ("images", "control_images"):
        (export.folder / "data" / kind).mkdir(parents=True)
    for named in export.samples:
        hashes = _write_images(export.folder / "data", named)
        prompt = _prompt(named.sample)
        digest = hashlib.md5(prompt.encode(), usedforsecurity=False).hexdigest()
        name = digest if prompts[prompt] == 1 else named.sample.key
        _write_tensors(export.folder / "cache", named.sample, "".join([*hashes, digest]), name)
        export.on_sample()
    (export.folder / "qflux.yaml").write_text(_settings(export), encoding="utf-8")


def _prompt(sample: Sample) -> str:
    """The prompt as it is read from a text file there."""
    return io.StringIO(sample.prompt, newline=None).read().strip()


def _write_images(folder: Path, named: NamedSample) -> list[str]:
    """Images of the latents' sizes, and the prompt; the MD5 of the target and of the first control."""
    stem, sample = named
    names = [f"images/{stem}.png", f"control_images/{stem}.png"]
    names += [f"control_images/{stem}_control_{i}.png" for i in range(1, len(sample.img_shapes) - 1)]
    digests = []
    for i, (name, image) in enumerate(zip(names, _images(sample), strict=True)):
        about = PngInfo()
        about.add_text("sample", f"{sample.key} {i}")  # no two files are equal
        image.save(folder / name, pnginfo=about)
        digests.append(hashlib.md5((folder / name).read_bytes(), usedforsecurity=False).hexdigest())
    (folder / "images" / f"{stem}.txt").write_text(sample.prompt, encoding="utf-8", newline="")
    return digests[:2]


def _images(sample: Sample) -> list[Image.Image]:
    sizes = [(PIXELS_PER_TOKEN * w, PIXELS_PER_TOKEN * h) for _, h, w in sample.img_shapes]
    if "thumbnails" not in sample:
        return [Image.new("RGB", size, GREY) for size in sizes]
    return [image.convert("RGB").resize(size) for image, size in zip(stored_thumbnails(sample), sizes, strict=True)]


def _write_tensors(folder: Path, sample: Sample, json_name: str, text_name: str) -> None:
    """A file for each tensor, and the JSON that names them."""
    tensors = {name: sample[name].clone() for name in TOOL.holds if name in sample}  # a view would save its shard
    entry: dict[str, object] = {"version": "2.0"}
    for name, tensor in tensors.items():
        stored = {name: tensor}
        if name.endswith("prompt_embeds"):
            stored[f"{name}_mask"] = torch.ones(len(tensor), dtype=torch.float16)  # as it stores them
        for kind, value in stored.items():
            entry[kind] = text_name if "prompt" in kind else sample.key
            path = folder / kind / f"{entry[kind]}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, path)
    entry["img_shapes"] = [[3, PIXELS_PER_TOKEN * h, PIXELS_PER_TOKEN * w] for _, h, w in sample.img_shapes]
    (folder / "metadata").mkdir(parents=True, exist_ok=True)
    (folder / "metadata" / f"{json_name}.json").write_text(json.dumps(entry, indent=2), encoding="utf-8")


def _settings(export: Export) -> str:
    sizes = [[PIXELS_PER_TOKEN * h, PIXELS_PER_TOKEN * w] for _, h, w in export.samples[0].sample.img_shapes]
    has_empty = all("empty_prompt_embeds" in sample for _, sample in export.samples)
    settings = {
        "data": {
            "class_path": "qflux.data.dataset.ImageDataset",
            "init_args": {
                "dataset_path": [str(export.final / "data")],
                "caption_dropout_rate": 0.1 if has_empty else 0.0,
                "prompt_empty_drop_keys": DROPPED if has_empty else [],
                "processor": {
                    "class_path": "qflux.data.preprocess.ImageProcessor",
                    "init_args": {"process_type": "resize", "target_size": sizes[0], "controls_size": sizes[1:]},
                },
            },
        },
        "cache": {"use_cache": True, "cache_dir": str(export.final / "cache")},
    }
    return yaml.safe_dump(settings, sort_keys=False)


TOOL = Tool(
    "qwen-image-finetune",
    ALWAYS | {"empty_prompt_embeds"},
    refusing,
    write,
    "python -m qflux.main --config CONFIG, with the sections of {folder}/qflux.yaml",
)
