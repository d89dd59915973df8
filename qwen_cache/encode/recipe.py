"""The recipe: everything besides the content that decides the stored tensors, so that a key can never be stale.

Weights are identified by the hash of their files, never by name or date. ENCODER_VERSION goes up with any change of
the encoding code that changes its output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.family import QWEN_IMAGE, Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.remembered import remembered

ENCODER_VERSION = 2
_CHUNK = 1 << 24
_CONFIGURATION = (".json", ".txt", ".jinja")


def make_recipe(model: ModelFolder, config: Config, on_bytes: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """The recipe of a build; `on_bytes` gets the number of bytes of weights just hashed."""
    family, template = model.family, model.template
    processor = [model.component(each) for each in model.facts.encoder_parts if each in ("tokenizer", "processor")]
    recipe: dict[str, Any] = {
        "encoder_version": ENCODER_VERSION,
        "pipeline": model.pipeline,
        "dtype": config.cache.dtype,
        "vae": _fingerprint([model.component("vae")], (".safetensors", "config.json"), on_bytes),
        **Resolution.of(config.data).recipe(),
        "text_encoder": _fingerprint([model.component("text_encoder")], (".safetensors", "config.json"), on_bytes),
        "processor": _fingerprint(processor, _CONFIGURATION, on_bytes),
        "template": template.frame,
        "picture_template": template.image,
    }
    recipe |= {"drop_idx": template.drop_idx} if template.dropped_message is None else {}
    if not family.one_condition_image and model.takes_controls:
        recipe["condition_image_size"] = config.data.condition_image_size or template.condition_image_size
    if model.takes_controls:
        recipe |= {
            "image_backend": "pil",  # torchvision's resize gives slightly other pixels
            "positions": "mrope-3d",  # transformers 5 falls back to 1-D positions without mm_token_type_ids
        }
    return recipe | _family(family) | EditMasks.of(config).recipe(recipe)


def _family(family: Family) -> dict[str, Any]:
    """What a recipe says of the family. The first family's recipes are older than these entries, and stay as they are.

    The licence is no input of the encoders; it is here because it holds for everything that they return.
    """
    if family is QWEN_IMAGE:
        return {}
    return {
        "family": family.name,
        "license": family.licence,
        "image_mode": family.image_mode,
        "final_norm": family.final_norm,
        "text_rows_only": family.text_rows_only,
    }


def _fingerprint(folders: list[Path], endings: tuple[str, ...], on_bytes: Callable[[int], None]) -> str:
    """One hash over the names and contents of the files with these endings."""
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name.endswith(endings)]
    return content_hash(
        canonical_json([[f"{path.parent.name}/{path.name}", _digest(path, on_bytes)] for path in files])
    )


def _digest(path: Path, on_bytes: Callable[[int], None]) -> str:
    """The hash of a file's content; weights are read again only when the file has changed."""
    return remembered("xxh3-128", [path], lambda: _hash_file(path, on_bytes))


def _hash_file(path: Path, on_bytes: Callable[[int], None]) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()
