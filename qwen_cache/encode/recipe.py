"""The recipe: everything besides the content that decides the stored tensors, so that a key can never be stale.

Weights are identified by the hash of their files, never by name or date. ENCODER_VERSION goes up with any change of
the encoding code that changes its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.models.family import QWEN_IMAGE, Family
from qwen_cache.models.folder import ModelFolder, fingerprint
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import Resolution

ENCODER_VERSION = 2
_CONFIGURATION = (".json", ".txt", ".jinja")


def make_recipe(model: ModelFolder, config: Config, on_bytes: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """The recipe of a build; `on_bytes` gets the number of bytes of weights just hashed."""
    family, template = model.family, model.template
    processor = [model.component(each) for each in model.facts.encoder_parts if each in ("tokenizer", "processor")]
    recipe: dict[str, Any] = {
        "encoder_version": ENCODER_VERSION,
        "pipeline": model.pipeline,
        "dtype": config.cache.dtype,
        "vae": fingerprint([model.component("vae")], on_bytes=on_bytes),
        **Resolution.of(config.data).recipe(),
        "text_encoder": fingerprint([model.component("text_encoder")], on_bytes=on_bytes),
        "processor": fingerprint(processor, _CONFIGURATION, on_bytes),
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
