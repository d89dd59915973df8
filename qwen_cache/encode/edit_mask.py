"""Where edit masks come from (`data.edit_mask`), and how they become coverage of the target's tokens.

The source's own mask always wins. Else `diff` compares target and first control, `head` predicts the edit from the
prompt's attention, and `auto` uses `head` where `diff` locates no edit. Without a result a sample has no mask. Refuses
comparison and attention for models without controls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import Size, crop_box
from qwen_cache.storage.remembered import file_digest

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
        """Whether target and control are compared."""
        return self.source in ("diff", "auto")

    @property
    def attend(self) -> bool:
        """Whether the prompt's attention is needed."""
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
        """The recipe's entries on masks, none if they come from the source alone; `encoder` are its other entries."""
        made: dict[str, Any] = {"edit_mask": self.source} if self.differ or self.head else {}
        made |= {"mask_head": self._head_hash(encoder)} if self.head else {}
        made |= {"attention": True} if self.keep_attention else {}
        return made | ({"edit_mask_version": VERSION} if made else {})

    def _head_hash(self, encoder: dict[str, Any]) -> str:
        """The hash of the mask head's file; ConfigError if it was trained on another encoder."""
        from qwen_cache.grounding.head import encoder_of

        assert self.head is not None
        if _head_metadata(self.head).encoder != encoder_of(encoder):
            raise ConfigError(
                "this mask head was trained on the attention of another encoder, template or image size",
                where=self.head,
                do="train one on a cache of this model: `qwen-train mask-head`",
            )
        return file_digest(self.head)


def _head_metadata(head: Path) -> Any:
    from qwen_cache.grounding.head import load_head

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
    """Whether cached attention equals what this version would make."""

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
    return sample_key("", replace(sample.inputs, mask=None), text.prompt, sample.img_shapes, text.phrase)


def _without_masks(recipe: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in IN_RECIPE}


# ---- masks on the grid of tokens -------------------------------------------------------------------------------------


def token_coverage(mask: Image.Image, size: Size, crop: bool = False) -> Any:
    """`[S]` float32 in 0..1: the edited fraction of each 16×16-pixel token of a target of `size`."""
    tokens = size[0] // PIXELS_PER_TOKEN, size[1] // PIXELS_PER_TOKEN
    cells = mask.resize(tokens, Image.Resampling.BOX, crop_box(mask.size, size) if crop else None)
    return np.asarray(cells, dtype=np.float32).reshape(-1) / 255.0
