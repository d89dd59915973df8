"""The base class of the sections of qwen.yaml, and the types of their values."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
Areas = Annotated[list[Positive], Field(min_length=1), BeforeValidator(lambda v: v if isinstance(v, list) else [v])]
Side = Annotated[int, Field(ge=16)]
Sigmas = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]],
    Field(min_length=1),
    BeforeValidator(lambda v: v.split(",") if isinstance(v, str) else v),
]
Names = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]
Scales = Annotated[
    list[Annotated[float, Field(ge=1, allow_inf_nan=False)]],
    Field(min_length=1),
    BeforeValidator(lambda v: v if isinstance(v, list) else [v]),
]
UrlPrefix = Annotated[str, Field(pattern="^[a-z][a-z0-9+.-]*://")]
Resolutions = Annotated[
    list[tuple[Positive, Positive]],
    Field(min_length=1),
    BeforeValidator(lambda v: [v] if isinstance(v, list) and all(isinstance(side, int) for side in v) else v),
]


class Section(BaseModel):
    """A section of qwen.yaml: frozen; unknown names are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def flat(self, prefix: str = "") -> dict[str, Any]:
        """Every setting by its dotted name, with JSON values."""
        settings: dict[str, Any] = {}
        for name, value in self.model_dump(mode="json").items():
            section = getattr(self, name)
            settings |= section.flat(f"{prefix}{name}.") if isinstance(section, Section) else {prefix + name: value}
        return settings
