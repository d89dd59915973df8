"""Files of musubi-tuner, read and written."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from qwen_cache.errors import SourceError
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta
from qwen_cache.format.shard import MAX_HEADER
from qwen_cache.storage.remembered import check_safetensors
from qwen_cache.trainers.files import (
    ALWAYS,
    Export,
    FoundSample,
    ImportedSample,
    NamedSample,
    Options,
    Refusal,
    Tool,
    check_tensor,
    images_of,
    pack_latents,
)

# ---- musubi ----------------------------------------------------------------------------------------------------------
# Caches of musubi-tuner for Qwen-Image and Qwen-Image-Edit, in all its editions.
#
# Read in kohya-ss/musubi-tuner, dataset/cache_io.py and dataset/architectures.py (07f78ab, 6247ca9),
# qwen_image_cache_*.py (1852ad3) and qwen_image_autoencoder_kl.py (2b7e279). A sample is two safetensors files in one
# folder; ARCH is `qie` for every edit model and `qi` for text to image:
#
#     <stem>_<width>x<height>_<ARCH>.safetensors   latents_1x<H>x<W>_<dtype>, latents_control_<i>_1x<H>x<W>_<dtype>
#     <stem>_<ARCH>_te.safetensors                 varlen_vl_embed_<dtype> [L, D]; metadata: caption1
#
# Latents are `[16, 1, H, W]`, the mode of the posterior, normalised by the VAE's mean and standard deviation. They only
# need packing; embeddings are unpadded. There are no embeddings of the empty prompt. Text files are named without the
# size, so two images with one stem share a file that is right for at most one of them; both are refused.

LATENT_FILE = re.compile(r"(?P<stem>.+)_\d{4,}x\d{4,}_(?P<arch>qie?)\.safetensors")
TEXT_FILE = re.compile(r"(?P<stem>.+)_(?P<arch>qie?)_te\.safetensors")
TARGET = re.compile(r"latents_\d+x\d+x\d+_\w+")
CONTROL = re.compile(r"latents_control_(\d{1,3})_\d+x\d+x\d+_\w+")
EMBEDS = re.compile(r"varlen_vl_embed_\w+")
ARCHITECTURES = ("qwen_image", "qwen_image_edit")


def find(folder: Path, options: Options) -> Iterator[FoundSample | SourceError]:
    """The samples in `folder`, sorted by name."""
    text: dict[tuple[str, str], Path] = {}
    latents: dict[tuple[str, str], list[Path]] = defaultdict(list)
    for path in _files(folder):
        if match := TEXT_FILE.fullmatch(path.name):
            text[match["stem"], match["arch"]] = path
        elif match := LATENT_FILE.fullmatch(path.name):
            latents[match["stem"], match["arch"]].append(path)
    for stem, arch in sorted(latents.keys() | text.keys()):
        yield _pair(stem, latents[stem, arch], text.get((stem, arch)))


def locate(folder: Path) -> Path:
    """The cache: this folder, or else the one folder in it that is one, as in a data set or an export.

    SourceError if there is none, or more than one.
    """
    if _files(folder):
        return folder
    inner = [each for each in sorted(folder.iterdir()) if each.is_dir() and _files(each)]
    if len(inner) == 1:
        return inner[0]
    if inner:
        do = "name one of them, and import each into a cache of its own"
        found = ", ".join(each.name for each in inner[:10])
        raise SourceError("this folder has several caches", where=folder, expected="one", found=found, do=do)
    raise SourceError(
        "not a cache of musubi-tuner for Qwen-Image",
        where=folder,
        expected="files *_qie.safetensors and *_qie_te.safetensors, or *_qi.safetensors and *_qi_te.safetensors, "
        "in it or in one folder in it",
        found=f"{len(list(folder.glob('*')))} other files",
    )


def _files(folder: Path) -> list[Path]:
    """The files of a cache, by their names."""
    paths = sorted(folder.glob("*.safetensors"))
    return [each for each in paths if TEXT_FILE.fullmatch(each.name) or LATENT_FILE.fullmatch(each.name)]


def _pair(stem: str, latents: list[Path], text: Path | None) -> FoundSample | SourceError:
    if not latents:
        return SourceError(
            "its latents are missing", where=text, do="run qwen_image_cache_latents.py, or delete this file"
        )
    if text is None:
        return SourceError(
            "its text file is missing",
            where=latents[0],
            do="run qwen_image_cache_text_encoder_outputs.py, or delete this file",
        )
    if len(latents) > 1:
        return SourceError(
            "two images of one name share this text file; it is not known which of them it belongs to",
            where=text,
            found=", ".join(path.name for path in latents),
            do="delete the latents of the image that no longer exists, or make both caches again under two names",
        )
    return FoundSample(stem, str(latents[0]), lambda: _read(latents[0], text))


def _read(latents: Path, text: Path) -> ImportedSample:
    images, _ = _load(latents)
    embeds, metadata = _load(text)
    controls = {int(match[1]): name for name in images if (match := CONTROL.fullmatch(name))}
    target = _only(TARGET, set(images) - set(controls.values()), latents)
    if sorted(controls) != list(range(len(controls))):
        raise SourceError("a control is missing", where=latents, expected="0, 1, …", found=sorted(controls))
    packed = [
        pack_latents(check_tensor(images[name], "[C, F, H, W]", f"{latents}: {name}"), f"{latents}: {name}")
        for name in [target, *(controls[i] for i in range(len(controls)))]
    ]
    embedding = _only(EMBEDS, set(embeds), text)
    tensors = {"image_latents": packed[0][0]}
    if controls:
        tensors["control_latents"] = torch.cat([tokens for tokens, _ in packed[1:]])
    tensors["prompt_embeds"] = check_tensor(embeds[embedding], "[L, D]", f"{text}: {embedding}")
    return ImportedSample(metadata.get("caption1", ""), tuple(shape for _, shape in packed), tensors)


def _load(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors and the metadata of a file; SourceError for another model."""
    try:
        check_safetensors(path, SourceError)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: torch cannot open it
        raise SourceError(f"not a safetensors file: {error}", where=path, do="make it again") from None
    if metadata.get("architecture") not in ARCHITECTURES:
        raise SourceError(
            "a cache of another model",
            where=path,
            expected=" or ".join(ARCHITECTURES),
            found=metadata.get("architecture"),
        )
    return tensors, metadata


def _only(pattern: re.Pattern[str], names: set[str], path: Path) -> str:
    """The one name of `names`, which must match `pattern`; SourceError for others, which would be lost silently."""
    if len(names) != 1 or not pattern.fullmatch(next(iter(names))):
        raise SourceError(
            "not the tensors that musubi-tuner writes for Qwen-Image",
            where=path,
            expected=f"one {pattern.pattern}",
            found=", ".join(sorted(names)) or "none",
        )
    return next(iter(names))


# ---- musubi ----------------------------------------------------------------------------------------------------------
# Caches for musubi-tuner: the mirror of `qwen_cache.trainers.musubi`, which describes the files.
#
# Read in kohya-ss/musubi-tuner 30c658c: dataset/image_video_dataset.py, bucket.py and cache_io.py. Its training reads
# the folder of the cache alone. It sorts samples into buckets by the size in the name of the latents file and the
# settings in the dataset's TOML file, and stacks the latents of a batch: `bucket_no_upscale` with a `resolution` that
# no sample exceeds makes each size its own bucket.

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
    "musubi-tuner",
    ALWAYS,
    refusing,
    write,
    "qwen_image_train_network.py --dataset_config {folder}/dataset.toml",
    {"empty_prompt_embeds": "it has no caption dropout"},
)
