"""What a server says of itself, and the settings and the model that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import recipe_id
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.cache import CacheConfig
from qwen_cache.settings.data import DataConfig
from qwen_cache.settings.load import Config

UPGRADE = "install the same version of qwen-cache here and there"


class Limits(BaseModel):
    """The largest body in bytes, the most pixels of an image, and the samples that may wait."""

    max_body: int
    max_pixels: int
    queue_samples: int


class Description(BaseModel):
    """The answer to `GET /v1`."""

    qwen_cache: str
    format_version: Literal[1, 2]
    pipeline: str
    model: str
    recipe_id: str
    recipe: dict[str, Any]
    data: dict[str, Any]
    thumbnails: bool
    prompt_embeds_width: int
    samples: int
    cache: str | None
    limits: Limits


@dataclass(frozen=True)
class ServedModel(ModelFolder):
    """A model that only the server has: what planning needs to know of it. Its folder is never opened."""

    width: int = 0

    @property
    def text_width(self) -> int:
        return self.width


def parse_description(value: object, where: str) -> Description:
    """The description in an answer; ConfigError if it is not one that this version understands."""
    try:
        description = Description.model_validate(value)
    except ValidationError as error:
        what = "this is no server of qwen-cache, or of another version"
        raise ConfigError(what, where=where, found=error.errors()[0]["msg"], do=UPGRADE) from None
    if description.pipeline not in PIPELINES or recipe_id(description.recipe) != description.recipe_id:
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
    data = _merged("data", config.data.model_dump(mode="json"), description.data, where, given["data"])
    cache = _merged("cache", config.cache.model_dump(mode="json"), served_cache, where, given["cache"])
    try:
        sections = {"data": DataConfig.model_validate(data), "cache": CacheConfig.model_validate(cache)}
    except ValidationError as error:
        found = error.errors()[0]["msg"]
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
