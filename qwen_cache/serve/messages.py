"""The JSON of requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from qwen_cache.format.identity import HASH_PATTERN
from qwen_cache.serve.form import IMAGES, TEXTS
from qwen_cache.serve.states import State
from qwen_cache.sources.rows import MAX_CONTROLS, MAX_TEXT

MOST = 10_000  # keys in a request, or names in an answer
MOST_PROMPTS = 1000  # in a request
MOST_ROWS = 100  # in a request: their images are read before it is answered
LONGEST_WAIT = 60.0  # seconds

Key = Annotated[str, Field(pattern=f"^{HASH_PATTERN.pattern}$")]
Side = Annotated[int, Field(ge=1, le=1 << 20)]


class SampleState(BaseModel):
    """The state of a sample; `problem` if it failed, and a `code` if that was a fault of the server."""

    key: str
    state: State
    problem: str | None = None
    code: str | None = None


class RowsRequest(BaseModel):
    """Rows of the server's own source to encode, by their names."""

    model_config = ConfigDict(extra="forbid")
    names: Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)]


class Rows(BaseModel):
    """Names of rows of the server's own source, and how many it has."""

    names: list[str]
    total: int


class Samples(BaseModel):
    """The samples of a row: several if the server stores an image at several sizes."""

    samples: list[SampleState]


class StatesRequest(BaseModel):
    """Keys to ask for. With `wait`, the answer comes once all have got that far or failed, or after `seconds`."""

    model_config = ConfigDict(extra="forbid")
    keys: Annotated[list[Key], Field(max_length=MOST)]
    wait: Literal["encoded", "stored"] | None = None
    seconds: Annotated[float, Field(ge=0, le=LONGEST_WAIT)] = 30.0


class States(BaseModel):
    """The states, in the order of the keys."""

    states: list[SampleState]


class Prompt(BaseModel):
    """A prompt, and the width and height of each control in its file."""

    model_config = ConfigDict(extra="forbid")
    prompt: Annotated[str, Field(max_length=MAX_TEXT)]
    controls: Annotated[list[tuple[Side, Side]], Field(max_length=MAX_CONTROLS)] = []


class LengthsRequest(BaseModel):
    """Prompts to measure."""

    model_config = ConfigDict(extra="forbid")
    prompts: Annotated[list[Prompt], Field(max_length=MOST_PROMPTS)]


class Lengths(BaseModel):
    """The rows of `prompt_embeds` for each prompt."""

    lengths: list[int]


class Failure(BaseModel):
    """The answer to a request that is refused, with a `code` for a fault of the server."""

    error: str
    do: str
    code: str | None = None


FAILURES: dict[int | str, dict[str, Any]] = {
    status: {"model": Failure, "description": text}
    for status, text in {
        401: "the token is missing or wrong",
        413: "too large",
        422: "this cannot be encoded",
        429: "too much at a time; send it again after Retry-After seconds",
        503: "a fault of the server, such as a full disk; send it again after Retry-After seconds",
    }.items()
}
_BINARY = {"type": "string", "format": "binary"}
_FIELDS = {name: {"type": "string"} for name in TEXTS} | dict.fromkeys(IMAGES, _BINARY)
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["prompt"],
                    "properties": _FIELDS | {"control": {"type": "array", "items": _BINARY}},
                }
            }
        },
    }
}
"""The form of a row, for /openapi.json."""
