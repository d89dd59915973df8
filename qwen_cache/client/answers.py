"""The JSON of a server: read within bounds, and only what has a place in one of these models.

Keys that they do not name are ignored, so a newer server may send more; no value of such a key is used.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import HASH_PATTERN
from qwen_cache.text import parse_json

MAX_SAMPLES = 1000  # of one row
UPGRADE = "install the same version of qwen-cache here and there"

Key = Annotated[str, Field(pattern=f"^{HASH_PATTERN.pattern}$")]
Rows = Annotated[int, Field(ge=1, lt=1 << 31)]


class AnswerModel(BaseModel):
    """The base class: no value is converted to another type."""

    model_config = ConfigDict(strict=True)


class Sent(AnswerModel):
    """The sample of a row that was sent."""

    key: Key


class SentSamples(AnswerModel):
    """The samples of a row that was sent."""

    samples: Annotated[list[Sent], Field(min_length=1, max_length=MAX_SAMPLES)]


class Lengths(AnswerModel):
    """The rows of `prompt_embeds` for each prompt."""

    lengths: list[Rows]


class Refusal(AnswerModel):
    """A fault and what to do; `code` is for programs."""

    error: str
    do: str = ""
    code: str = ""


Model = TypeVar("Model", bound=BaseModel)


def parse_answer(model: type[Model], body: bytes | bytearray, where: str) -> Model:
    """The answer as `model`; ConfigError for one that is not JSON, or not as `model` has it."""
    try:
        value = parse_json(bytes(body))
    except ValueError:
        what, do = "this is no server of qwen-cache", "correct the address"
        raise ConfigError(what, where=where, found="an answer that is not JSON", do=do) from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        what = "this is no server of qwen-cache, or of another version"
        raise ConfigError(what, where=where, found=first_fault(error), do=UPGRADE) from None


def first_fault(error: ValidationError) -> str:
    """The first fault of an answer, with its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    return ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))


def parse_refusal(body: bytes | bytearray, status: int) -> Refusal:
    """The reason that a server gives for a refusal; the status alone if it gives none in our form."""
    try:
        return Refusal.model_validate(parse_json(bytes(body)))
    except ValueError:  # ValidationError is one
        return Refusal(error=f"status {status}")
