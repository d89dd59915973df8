"""The settings by which a source is read, made in one place from `data` and the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Required, TypedDict, Unpack

from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import ColumnsConfig, DataConfig
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.rows import Needs, NoControl


class SourceSettings(TypedDict, total=False):
    """How a source is read."""

    needs_control: Required[bool]
    """Whether the source must have controls, as for an editing model."""
    takes_control: bool | None
    """Without, for text to image, there must be no control; by default `needs_control` decides."""
    no_control: NoControl | None
    """Which rows may lack a control: by default none where controls are needed, else those of which a table states it.
    Where any may, so may all."""
    needs_target: bool
    """Without, to generate, rows may lack the target, and the folder may hold only controls."""
    needs_prompt: bool
    to_generate: bool
    """Whether the rows are images to generate, which may have a seed and a size, and no target."""
    allow_empty_prompt: bool
    allow_urls: Sequence[str]
    columns: ColumnsConfig | None
    split: str | None
    config_name: str | None
    """The settings of `data`."""
    marked_phrases: bool | None
    """Whether `[[ ]]` in prompts mark words; None: no, and a notice counts the prompts that have them."""
    captions: Captions | None
    """What changes the prompts."""


def reading(data: DataConfig, model: ModelFolder | None = None) -> SourceSettings:
    """How `build` reads a source for a model, without what changes its prompts; None: for either kind of model."""
    return {
        "needs_control": model is not None and model.needs_controls and not data.allow_no_control,
        "takes_control": model is None or model.takes_controls,
        "no_control": "allowed" if data.allow_no_control else "stated",
        "allow_empty_prompt": data.allow_empty_prompt,
        "allow_urls": data.allow_urls,
        "columns": data.columns,
        "split": data.split,
        "config_name": data.config_name,
        "marked_phrases": data.marked_phrases,
    }


def needs_of(**settings: Unpack[SourceSettings]) -> Needs:
    """What these settings require of a source."""
    needs_control, to_generate = settings["needs_control"], settings.get("to_generate", False)
    takes_control = settings.get("takes_control")
    return Needs(
        control=needs_control,
        no_control=settings.get("no_control") or ("refused" if needs_control else "stated"),
        target=settings.get("needs_target", True) and not to_generate,
        prompt=settings.get("needs_prompt", True),
        to_generate=to_generate,
        takes_control=needs_control if takes_control is None else takes_control,
        marked_phrases=settings.get("marked_phrases"),
        allow_urls=tuple(settings.get("allow_urls", ())),
        columns=settings.get("columns") or ColumnsConfig(),
        split=settings.get("split"),
        config_name=settings.get("config_name"),
    )
