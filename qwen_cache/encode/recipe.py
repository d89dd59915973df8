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
_LONGEST = 28  # characters of a value that a message shows: every number and pipeline, no hash
_VERSION, _PROMPT = "version of qwen-cache, which encodes differently", "prompt template"
_PARTS = {"vae": "VAE", "text_encoder": "text encoder", "processor": "tokenizer or processor"}
_INTERNAL = {
    **dict.fromkeys(("encoder_version", "edit_mask_version", "image_backend", "positions"), _VERSION),
    **dict.fromkeys(("family", "license", "image_mode", "final_norm", "text_rows_only"), _VERSION),
    **dict.fromkeys(("template", "picture_template", "drop_idx"), _PROMPT),
    "mask_head": "mask head",
}
"""What messages call an entry that is not a setting. If only one of two recipes has it, other entries differ too."""


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
    if config.cache.text_quantization != "none":
        recipe["text_quantization"] = config.cache.text_quantization
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


def recipe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of two recipes for a message: `dtype bfloat16 → float32`, `another VAE`."""
    if (tool := old.get("imported_from")) != new.get("imported_from"):
        return [f"imported from {tool}" if tool else "built, not imported"]
    changes: dict[str, None] = {}  # a set in this order
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after or (
            name in _INTERNAL and (None in (before, after) or old.get("pipeline") != new.get("pipeline"))
        ):
            continue
        changes[_change(name, before, after)] = None
    return list(changes) or ([f"another {_VERSION}"] if old != new else [])


def _change(name: str, before: object, after: object) -> str:
    sides = [_setting_value(value) for value in (before, after)]
    if name in _PARTS or name in _INTERNAL:
        return f"another {_PARTS.get(name) or _INTERNAL[name]}"
    setting = {"attention": "store_attention"}.get(name, name)
    return f"{setting} {sides[0]} → {sides[1]}" if max(map(len, sides)) <= _LONGEST else f"another {setting}"


def _setting_value(value: object) -> str:
    """A setting as qwen.yaml has it; a recipe has no entry for one that is not set."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
