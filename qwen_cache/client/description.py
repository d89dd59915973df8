"""What a server says of itself, and the settings and the model that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from qwen_cache.client.answers import UPGRADE, AnswerModel, Key, first_fault, parse_answer
from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import recipe_id
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import CacheConfig, DataConfig
from qwen_cache.sources.rows import MAX_SIDE

Area = Annotated[int, Field(gt=0, le=1 << 30)]
Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Text = Annotated[str, Field(max_length=1000)]
Resolution = Annotated[list[Side], Field(min_length=2, max_length=2)]
CHOICES = 100  # areas or resolutions


class Sizes(AnswerModel):
    """The settings of `data` that a server decides: those of `SIZES`. It never names a place, or what may be read."""

    model_config = ConfigDict(extra="forbid")

    vae_image_size: Annotated[list[Area], Field(max_length=CHOICES)] | None = None
    resolution: Annotated[list[Resolution], Field(max_length=CHOICES)] | None = None
    resolutions_per_sample: Text = ""
    resize_mode: Text | None = None
    upscale: bool = True
    condition_image_size: Area | None = None
    edit_mask: Text = ""


class Description(AnswerModel):
    """The part of the answer to `GET /v1` that is used."""

    format_version: Literal[1, 2]
    pipeline: Text
    model: Text
    recipe_id: Key
    recipe: dict[str, Any]
    data: Sizes
    thumbnails: bool
    prompt_embeds_width: Annotated[int, Field(gt=0, le=1 << 16)]


@dataclass(frozen=True)
class ServedModel(ModelFolder):
    """A model that only the server has: what planning needs to know of it. It has no folder; its name is only shown."""

    width: int = 0
    is_here = False

    @property
    def text_width(self) -> int:
        return self.width

    @property
    def public_name(self) -> str:
        return self.name


def parse_description(body: bytes | bytearray, where: str) -> Description:
    """The description in an answer; ConfigError if it is not one that this version understands."""
    description = parse_answer(Description, body, where)
    recipe = description.recipe
    try:
        is_known = recipe_id(recipe) == description.recipe_id and recipe.get("pipeline") == description.pipeline
    except ValueError:  # it cannot be written
        is_known = False
    if description.pipeline not in PIPELINES or not is_known:
        raise ConfigError("this server has a model that this version does not know", where=where, do=UPGRADE)
    return description


def served_model(description: Description) -> ServedModel:
    """The model of the server."""
    return ServedModel(description.model, Path(), description.pipeline, width=description.prompt_embeds_width)  # type: ignore[arg-type]


def served_settings(config: Config, description: Description, where: str, *, all_given: bool = False) -> Config:
    """The settings with those of the server; ConfigError for one that was given here and differs there.

    A default value counts as given with `all_given` alone: the settings that a run has saved name all.
    """
    recipe = description.recipe
    served_cache = {
        "format": f"v{description.format_version}",
        "dtype": recipe.get("dtype"),
        "text_quantization": recipe.get("text_quantization", "none"),
        "thumbnails": description.thumbnails,
        "store_attention": bool(recipe.get("attention", False)),
    }
    given = {name: getattr(config, name).model_fields_set if all_given else set() for name in ("data", "cache")}
    served_data = description.data.model_dump(exclude_unset=True)
    data = _merged("data", config.data.model_dump(mode="json"), served_data, where, given["data"])
    cache = _merged("cache", config.cache.model_dump(mode="json"), served_cache, where, given["cache"])
    try:
        sections = {"data": DataConfig.model_validate(data), "cache": CacheConfig.model_validate(cache)}
    except ValidationError as error:
        found = first_fault(error)
        what = "this version does not know a setting of the server"
        raise ConfigError(what, where=where, found=found, do=UPGRADE) from None
    return config.model_copy(update=sections)


def _merged(section: str, own: dict[str, Any], served: dict[str, Any], where: str, given: set[str]) -> dict[str, Any]:
    standard = Config().model_dump(mode="json")[section]
    for name, value in served.items():
        accepted = (value, None) if name in given else (value, standard.get(name))
        if own.get(name) not in accepted:
            raise ConfigError(
                f"the server has another {section}.{name}",
                where=where,
                expected=value,
                found=own[name],
                do=f"leave {section}.{name} out here, or start a server with it",
            )
    return {**own, **served}
