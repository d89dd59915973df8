"""Everything that the numbers of a sample depend on: model, settings, edit masks; the settings saved with a cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import sample_key
from qwen_cache.format.index import IndexRow
from qwen_cache.format.rows import KeyedRows
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta
from qwen_cache.format.update import Existing
from qwen_cache.models.family import QWEN_IMAGE
from qwen_cache.models.folder import ENCODERS, ModelFolder, encoder_fingerprint, vae_encoder_fingerprint
from qwen_cache.models.hardware import device_names
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import (
    CONFIG_NAME,
    MAX_BYTES,
    Config,
    load_config,
    load_saved,
    overridden,
    parse_yaml,
    saved_settings,
)
from qwen_cache.sources.sizes import Resolution, Size, crop_box
from qwen_cache.storage.files import read_file, write_durably
from qwen_cache.storage.remembered import file_digest
from qwen_cache.storage.remote import Location, Url, is_remote
from qwen_cache.storage.stores import store_of

# ---- edit mask -------------------------------------------------------------------------------------------------------
# Where edit masks come from (`data.edit_mask`), and how they become coverage of the target's tokens.
#
# The source's own mask always wins. Else `diff` compares target and first control, `head` predicts the edit from the
# prompt's attention, and `auto` uses `head` where `diff` locates no edit. Without a result a sample has no mask.
# Refuses comparison and attention for models without controls.

VERSION = 1  # goes up with any change that changes a mask or attention
IN_RECIPE = ("edit_mask", "mask_head", "attention", "edit_mask_version")


@dataclass(frozen=True)
class EditMasks:
    """The settings of edit masks."""

    source: str
    """`data.edit_mask`."""
    head: Path | None
    keep_attention: bool

    @classmethod
    def of(cls, config: Config) -> EditMasks:
        head = config.data.mask_head
        if config.data.edit_mask == "head" and head is None:
            do = "give --mask-head PATH; `qwen-train mask-head` trains one"
            raise ConfigError("no mask head is named", found="data.edit_mask=head", do=do)
        uses_head = config.data.edit_mask in ("head", "auto")
        return cls(config.data.edit_mask, Path(head) if head and uses_head else None, config.cache.store_attention)

    @property
    def differ(self) -> bool:
        """True if target and control are compared."""
        return self.source in ("diff", "auto")

    @property
    def attend(self) -> bool:
        """True if the prompt's attention is needed."""
        return self.keep_attention or self.head is not None

    def check(self, model: ModelFolder, format_version: str) -> None:
        """ConfigError if the model or the format cannot have such masks, ModelError if the file is not a mask head."""
        edit_mask = f"data.edit_mask={self.source}"
        enabled = {"cache.store_attention": self.keep_attention, edit_mask: self.differ or self.head}
        for setting, given in enabled.items():
            if given and not model.takes_controls:
                raise ConfigError(f"{setting} needs control images, and {model.pipeline} has none")
            if given and format_version == "v1":
                raise ConfigError(f"format v1 cannot store what {setting} makes", do="build with --format v2")
        if self.head is not None:
            _head_metadata(self.head)

    def recipe(self, encoder: dict[str, Any]) -> dict[str, Any]:
        """The recipe's entries on masks, none if they come from the source alone; `encoder` are its other entries.

        ConfigError if the mask head was trained on another encoder.
        """
        made: dict[str, Any] = {"edit_mask": self.source} if self.differ or self.head else {}
        if self.head:
            from qwen_cache.experimental.masks import encoder_of

            if _head_metadata(self.head).encoder != encoder_of(encoder):
                raise ConfigError(
                    "this mask head was trained on the attention of another encoder, template or image size",
                    where=self.head,
                    do="train one on a cache of this model: `qwen-train mask-head`",
                )
            made["mask_head"] = file_digest(self.head)
        made |= {"attention": True} if self.keep_attention else {}
        return made | ({"edit_mask_version": VERSION} if made else {})


def _head_metadata(head: Path) -> Any:
    from qwen_cache.experimental.masks import load_head

    return load_head(head)[1]


# ---- cached samples that need only another mask ----------------------------------------------------------------------


@dataclass(frozen=True)
class ReusableSamples:
    """Cached samples that agree with a recipe in everything but their masks."""

    rows: KeyedRows
    positions: dict[str, int]
    """The positions of the samples in `rows`, by `bare_key`."""
    masks: EditMasks
    attention_is_readable: bool
    """True if cached attention equals what this version would make."""

    @classmethod
    def none(cls, masks: EditMasks) -> ReusableSamples:
        """No sample."""
        return cls(Existing.empty(2).rows, {}, masks, attention_is_readable=False)

    def row_for(self, sample: PlannedSample) -> IndexRow | None:
        """The row from which the sample can be made without an encoder, if there is one."""
        position = self.positions.get(bare_key(sample))
        row = None if position is None else self.rows.row(position)
        unattended = not self.masks.attend or not sample.row.controls or not sample.row.prompt.strip()
        if row is None or unattended or self.has_attention(row):
            return row
        return row if sample.row.mask is not None and not self.masks.keep_attention else None

    def has_attention(self, row: IndexRow) -> bool:
        return self.attention_is_readable and "attention" in row.meta.tensors


def reusable_samples(
    config: Config, new: dict[str, Any], existing: Existing, name: str, missing: Iterable[PlannedSample]
) -> ReusableSamples:
    """The samples of the recipe called `name` that `missing` ones may be made from.

    None if the recipe differs from `new` in more than masks.
    """
    masks, old = EditMasks.of(config), existing.recipes.get(name)
    if old is None or config.cache.format == "v1" or _without_masks(old) != _without_masks(new):
        return ReusableSamples.none(masks)
    rows, targets = existing.of_recipe(name), {sample.inputs.target for sample in missing}
    rows = rows.where_in(target=targets)
    metas = (row.meta for row in rows.in_order())
    keys = (bare_key(meta if masks.attend else replace(meta, phrase=())) for meta in metas)
    positions = {key: int(position) for key, position in zip(keys, rows.positions, strict=True)}
    return ReusableSamples(rows, positions, masks, old.get("edit_mask_version") == VERSION)


def bare_key(sample: SampleMeta | PlannedSample) -> str:
    """The key of a sample's content without recipe and mask."""
    text = sample if isinstance(sample, SampleMeta) else sample.row
    inputs = replace(sample.inputs, mask=None)
    return sample_key("", inputs, text.prompt, sample.img_shapes, text.phrase, sample.rejected_shape, text.slider)


def _without_masks(recipe: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in IN_RECIPE}


# ---- masks on the grid of tokens -------------------------------------------------------------------------------------


def token_coverage(mask: Image.Image, size: Size, crop: bool = False) -> Any:
    """`[S]` float32 in 0..1: the edited fraction of each 16×16-pixel token of a target of `size`."""
    tokens = size[0] // PIXELS_PER_TOKEN, size[1] // PIXELS_PER_TOKEN
    cells = mask.resize(tokens, Image.Resampling.BOX, crop_box(mask.size, size) if crop else None)
    return np.asarray(cells, dtype=np.float32).reshape(-1) / 255.0


# ---- recipe ----------------------------------------------------------------------------------------------------------
# The recipe: everything besides the content that decides the stored tensors, so that a key can never be stale.
#
# Weights are identified by the hash of their files, never by name or date. ENCODER_VERSION goes up with any change of
# the encoding code that changes its output. `patch_embedding` is there only where images were encoded in bfloat16 on a
# CPU: samples of earlier versions, which may be wrong there, lack it, and accelerators always gave right ones. `vae` is
# the hash of the whole folder; where another one has the same encoder, a cache keeps its recipe (`as_cached`).

ENCODER_VERSION = 2
PATCH_EMBEDDING = "patch_embedding"
_LONGEST = 28  # characters of a value that a message shows: every number and pipeline, no hash
_VERSION, _PROMPT = "version of qwen-cache, which encodes differently", "prompt template"
_PARTS = {"vae": "VAE", "text_encoder": "text encoder", "processor": "tokenizer or processor"}
_PATCHES = "images encoded in bfloat16 on a CPU, which earlier versions may have done wrongly"
_INTERNAL = {
    **dict.fromkeys(("encoder_version", "edit_mask_version", "image_backend", "positions"), _VERSION),
    **dict.fromkeys(("family", "license", "image_mode", "final_norm", "text_rows_only"), _VERSION),
    **dict.fromkeys(("template", "picture_template", "drop_idx"), _PROMPT),
    "mask_head": "mask head",
}
"""The names in messages of entries that are no settings. If only one of two recipes has one, others differ too."""


def make_recipe(
    model: ModelFolder, config: Config, on_bytes: Callable[[int], None] = lambda _: None, *, here: bool = True
) -> dict[str, Any]:
    """The recipe of a build; `on_bytes` gets the number of bytes of weights just hashed.

    `here` is False where another machine encodes: then the device `auto` counts as an accelerator.
    """
    family, template = model.family, model.template
    recipe: dict[str, Any] = {
        "encoder_version": ENCODER_VERSION,
        "pipeline": model.pipeline,
        "dtype": config.cache.dtype,
        **Resolution.of(config.data).recipe(),
        **{name: encoder_fingerprint(model, name, on_bytes) for name in ENCODERS},
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
        if config.cache.dtype == "bfloat16" and _encodes_on_cpu(config.cache.text_device, here=here):
            recipe[PATCH_EMBEDDING] = "product"
    # Recipes of the first family are older than these entries, and stay as they are. The licence is no input of the
    # encoders; it is here because it holds for everything that they return.
    of_family = {
        "family": family.name,
        "license": family.licence,
        "image_mode": family.image_mode,
        "final_norm": family.final_norm,
        "text_rows_only": family.text_rows_only,
    }
    return recipe | ({} if family is QWEN_IMAGE else of_family) | EditMasks.of(config).recipe(recipe)


def _encodes_on_cpu(text_device: str, *, here: bool) -> bool:
    """True if the CPU encodes images for any of the text encoders."""
    names = {name.strip() for name in text_device.split(",")}
    if "cpu" in names or "auto" not in names or not here or find_spec("torch") is None:
        return "cpu" in names
    return device_names() == ["cpu"]


def vae_encoders(model: ModelFolder, recipe: dict[str, Any]) -> dict[str, str]:
    """The hash of what decides the latents of the model's VAE, by the hash of its folder; none if it is not known."""
    found = vae_encoder_fingerprint(model.component("vae"))
    return {recipe["vae"]: found} if found else {}


def as_cached(made: dict[str, Any], cached: dict[str, Any], encoders: Mapping[str, str]) -> dict[str, Any]:
    """The recipe `made` with the entries of `cached` under which a cache has the same already.

    A VAE with another decoder gives the same latents: `encoders` are the `vae_encoders` of both. An accelerator adds to
    what a CPU has encoded in bfloat16, since both are right.
    """
    if encoders.get(made["vae"], made["vae"]) == encoders.get(str(cached.get("vae"))):
        made = made | {"vae": cached["vae"]}
    is_alike = _is_alike(made, cached)
    return made | ({PATCH_EMBEDDING: cached[PATCH_EMBEDDING]} if is_alike and PATCH_EMBEDDING in cached else {})


def _is_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """True if both have the same pipeline and dtype, so that a missing PATCH_EMBEDDING means another device."""
    return all(one.get(name) == other.get(name) for name in ("pipeline", "dtype"))


def for_any_device(made: dict[str, Any]) -> dict[str, Any]:
    """The recipe `made` on one machine, to compare with that of another: what is encoded now is right on both."""
    return {name: value for name, value in made.items() if name != PATCH_EMBEDDING}


def recipe_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The differences of two recipes for a message: `dtype bfloat16 → float32`, `another VAE`."""
    if (tool := old.get("imported_from")) != new.get("imported_from"):
        return [f"imported from {tool}" if tool else "built, not imported"]
    changes: dict[str, None] = {}  # a set in this order
    is_alike = _is_alike(old, new)
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before == after or (name == PATCH_EMBEDDING and not is_alike):
            continue
        if name in _INTERNAL and (None in (before, after) or old.get("pipeline") != new.get("pipeline")):
            continue
        changes[_change(name, before, after)] = None
    return list(changes) or ([f"another {_VERSION}"] if old != new else [])


def _change(name: str, before: object, after: object) -> str:
    sides = [_setting_value(value) for value in (before, after)]
    if name == PATCH_EMBEDDING:
        return _PATCHES
    if name in _PARTS or name in _INTERNAL:
        return f"another {_PARTS.get(name) or _INTERNAL[name]}"
    setting = {"attention": "store_attention"}.get(name, name)
    return f"{setting} {sides[0]} → {sides[1]}" if max(map(len, sides)) <= _LONGEST else f"another {setting}"


def _setting_value(value: object) -> str:
    """A setting as qwen.yaml has it; a recipe has no entry for one that is not set."""
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# ---- saved settings --------------------------------------------------------------------------------------------------
# The settings of a build: the qwen.yaml that `build` saves in the cache, and what of it others may see.
#
# A cache that is published carries only what is needed to read its source in the same way: no path and no address of a
# machine, but datasets and models by their names on the hub. Of the qwen.yaml of a remote cache, which a stranger
# wrote, only the same is used: it names no file of this machine and no server.

HUB_DATASETS = "hf://datasets/"
_PRIVATE = ("source", "mask_head", "allow_urls", "slice", "on_error")
_OF_A_MACHINE = ("vae_device", "text_device", "vae_batch_pixels", "text_batch_tokens")
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def save_settings(folder: Location, config: Config) -> None:
    """Save the settings beside the dataset, unless they are there."""
    path, settings = folder / CONFIG_NAME, config.to_yaml().encode("utf-8")
    if is_remote(path):
        with suppress(FileNotFoundError):
            if path.read_bytes() == settings:
                return
        store_of(path).put(path, settings)
    elif not path.is_file() or read_file(path) != settings:
        write_durably(path, settings)


def settings_of_build(
    folder: Location,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    given: Sequence[Given | None] = (),
) -> Config:
    """Settings of `config`, else of the qwen.yaml in the cache, else of ./qwen.yaml; the others override.

    Of the qwen.yaml in the cache without the devices: they are those of the machine that built it.
    """
    own = folder / CONFIG_NAME
    if config is None and is_remote(own):
        saved = _remote(own)
        if saved is not None:
            return overridden(saved, str(own), assignments, given)
    elif config is None and not is_remote(own) and own.is_file():
        value = load_saved(own).model_dump(mode="json")
        value["cache"] = {name: each for name, each in value["cache"].items() if name not in _OF_A_MACHINE}
        return overridden(value, str(own), assignments, given)
    return load_config(config, assignments, given)


def public_settings(config: Config) -> dict[str, Any]:
    """The settings that a published cache carries, as qwen.yaml has them: those of the source that are not the
    defaults, the dataset and the model if they are on the hub."""
    defaults = Config()
    data = config.data.model_dump(mode="json")
    standard = defaults.data.model_dump(mode="json")
    shown: dict[str, Any] = {
        name: value for name, value in data.items() if name not in _PRIVATE and value != standard[name]
    }
    named = [each for column in data["columns"].values() for each in (column if isinstance(column, list) else [column])]
    if any(each and Path(each).is_absolute() for each in named):
        shown.pop("columns")
    if config.data.source.startswith(HUB_DATASETS):
        shown["source"] = config.data.source
    value = {"data": shown} if shown else {}
    if name := public_model(config):
        value["model"] = {"path": name, **({"revision": config.model.revision} if config.model.revision else {})}
    return value


def public_model(config: Config) -> str | None:
    """The model's repository on the hub; None for a folder of this machine."""
    name = config.model.path or ""
    return name if _HUB_MODEL.fullmatch(name) and not Path(name).exists() else None


def _remote(path: Url) -> dict[str, Any] | None:
    """The public settings of a remote qwen.yaml; None if there is none."""
    try:
        value = parse_yaml(path.read_bytes(MAX_BYTES).decode("utf-8"), path)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not YAML: {error}", where=path) from None
    if not isinstance(value, dict):
        raise ConfigError("a mapping of sections is expected", where=path, found=type(value).__name__)
    return public_settings(saved_settings(value, str(path)))
