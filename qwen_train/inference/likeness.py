"""Likeness of a run's validation images to its targets, by a vision model that the user names.

The model is a folder on this machine that transformers loads, such as a CLIP, a SigLIP or a DINOv2. Likeness is the
cosine similarity of two embeddings: of an image and its held-out target, or where it has none, of an image and the mean
of the training targets. Refused: a folder without such a model, pickles, code from the folder, and a run whose images
are not decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoImageProcessor, AutoModel

from qwen_cache.errors import ModelError, QwenCacheError, TrainError
from qwen_cache.format.cache import Cache, open_configured
from qwen_cache.models.loading import explained, load_whole
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.sources.images import cut_thumbnails, open_rgb
from qwen_cache.storage.files import read_file, write_durably
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.terminal import counting
from qwen_train.data.planned import training_and_validation
from qwen_train.data.samples import Mixture
from qwen_train.inference.decode import latents_in
from qwen_train.run import LIKENESS_NAME, TRAINED, VALIDATION, found_latents, step_of

MOST_TARGETS = 256
"""Training targets in the mean; of more, evenly spaced ones."""
FIXES = "name a folder with a vision model for transformers: config.json, preprocessor_config.json, *.safetensors"


@dataclass(frozen=True)
class VisionModel:
    """A model that embeds images."""

    folder: Path
    model: Any
    processor: Any
    device: torch.device

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> VisionModel:
        """The model in `folder`, in float32; ModelError if there is none, or if it embeds no images."""
        for name in ("config.json", "preprocessor_config.json"):
            if not (folder / name).is_file():
                found = "no such folder" if not folder.is_dir() else f"no {name}"
                raise ModelError("no vision model here", where=folder, expected=name, found=found, do=FIXES)
        with explained("the image processor", folder, FIXES):  # Pillow's, which needs no torchvision
            processor = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
        model = load_whole(AutoModel, folder, dtype=torch.float32, trust_remote_code=False)
        loaded = cls(folder, model.to(device), processor, device)
        with explained("this model", folder, FIXES):
            loaded.embed([Image.new("RGB", (64, 64))])
        return loaded

    @torch.no_grad()
    def embed(self, images: Sequence[Image.Image]) -> Float[Tensor, "n D"]:
        """Their embeddings, of length 1."""
        inputs = self.processor(images=list(images), return_tensors="pt").to(self.device)
        embedded = getattr(self.model, "get_image_features", self.model)(**inputs)
        found = embedded if isinstance(embedded, Tensor) else embedded.pooler_output
        if found is None or found.shape[:-1] != (len(images),):
            raise ValueError(f"{type(self.model).__name__} has no embedding of a whole image")
        return normalize(found.float().cpu(), dim=-1)


def write_likeness(folder: Path, vision: VisionModel) -> int:
    """Measure all decoded images of the run in `folder`, write them to `LIKENESS_NAME`, and return their number.

    TrainError if no image is decoded.
    """
    files = [file for file in found_latents(folder) if step_of(file) is not None]
    decoded = {file: pngs for file in files if (pngs := [it.png for it in latents_in(file) if it.png.is_file()])}
    if not decoded:
        what = "no validation image of this run is decoded" if files else "this run generated no images"
        raise TrainError(what, where=folder, do=f"decode them: qwen-train decode {folder}" if files else None)
    targets = dict(_held_out_targets(folder / VALIDATION / "target", vision))
    training = [vision.embed([image]) for image in _training_targets(folder)]
    mean = normalize(torch.cat(training).mean(dim=0), dim=-1) if training else None
    images = {}
    with counting("likeness", len(decoded)) as advance:
        for file, pngs in decoded.items():
            embedded = vision.embed([open_rgb(read_file(png), str(png)) for png in pngs])
            entry: dict[str, Any] = {"latents": xxhash.xxh3_64_hexdigest(read_file(file))}
            if (target := targets.get(file.stem)) is not None:
                entry["target"] = float((embedded @ target).mean())
            elif mean is not None:
                entry["training"] = float((embedded @ mean).mean())
            images[f"{file.parent.name}/{file.stem}"] = entry
            advance(1)
    about = {"model": type(vision.model).__name__, "training_targets": len(training), "images": images}
    write_durably(folder / VALIDATION / LIKENESS_NAME, (json.dumps(about, indent=1) + "\n").encode())
    return sum(map(len, decoded.values()))


def _held_out_targets(folder: Path, vision: VisionModel) -> Iterator[tuple[str, Tensor]]:
    """The embedding of each decoded target that is not trained, by the key of its sample."""
    for file in sorted(folder.glob("*.safetensors")):
        (target, *_) = latents_in(file)
        if target.png.is_file() and not _is_trained(file):
            yield file.stem, vision.embed([open_rgb(read_file(target.png), str(target.png))])[0]


def _is_trained(file: Path) -> bool:
    data = read_file(file)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return TRAINED in header["__metadata__"]


def _training_targets(folder: Path) -> Iterator[Image.Image]:
    """Thumbnails of the training targets in the caches of the run, as far as they are on this machine."""
    with suppress(QwenCacheError, OSError):
        config = load_saved(folder / CONFIG_NAME)
        for cache in _caches(config):
            training, _ = training_and_validation(Mixture.of(cache), config.train)
            for i in np.unique(np.linspace(0, len(training) - 1, MOST_TARGETS).round().astype(int)):
                sample = cache[int(training[i])]
                if "thumbnails" in sample and "image_latents" in sample:
                    shapes = sample.row.meta.stored_shapes
                    yield cut_thumbnails(sample.buffer("thumbnails"), shapes, sample.key)[0].convert("RGB")


def _caches(config: Config) -> Iterator[Cache]:
    paths = [entry.path for entry in config.train.caches if not entry.teacher] or [config.cache.path]
    for path in paths:
        if not is_remote(location(path)):  # what a run's folder names is not fetched
            yield open_configured(config.cache, path)
