"""Caches of musubi-tuner for Qwen-Image and Qwen-Image-Edit, in all its editions.

Read in kohya-ss/musubi-tuner, dataset/cache_io.py and dataset/architectures.py (07f78ab, 6247ca9),
qwen_image_cache_*.py (1852ad3) and qwen_image_autoencoder_kl.py (2b7e279). A sample is two safetensors files in one
folder; ARCH is `qie` for every edit model and `qi` for text to image:

    <stem>_<width>x<height>_<ARCH>.safetensors   latents_1x<H>x<W>_<dtype>, latents_control_<i>_1x<H>x<W>_<dtype>
    <stem>_<ARCH>_te.safetensors                 varlen_vl_embed_<dtype> [L, D]; metadata: caption1

Latents are `[16, 1, H, W]`, the mode of the posterior, normalised by the VAE's mean and standard deviation. They only
need packing; embeddings are unpadded. There are no embeddings of the empty prompt. Text files are named without the
size, so two images with one stem share a file that is right for at most one of them; both are refused.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from qwen_cache.errors import SourceError
from qwen_cache.importers.source import FoundSample, ImportedSample, Options, check_tensor, pack_latents
from qwen_cache.storage.remembered import check_safetensors

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
    for path in sorted(folder.glob("*.safetensors")):
        if match := TEXT_FILE.fullmatch(path.name):
            text[match["stem"], match["arch"]] = path
        elif match := LATENT_FILE.fullmatch(path.name):
            latents[match["stem"], match["arch"]].append(path)
    if not text and not latents:
        raise SourceError(
            "not a cache of musubi-tuner for Qwen-Image",
            where=folder,
            expected="files *_qie.safetensors and *_qie_te.safetensors, or *_qi.safetensors and *_qi_te.safetensors",
            found=f"{len(list(folder.glob('*')))} other files",
        )
    for stem, arch in sorted(latents.keys() | text.keys()):
        yield _pair(stem, latents[stem, arch], text.get((stem, arch)))


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
