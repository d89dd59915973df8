"""The values in a model's configurations that are read here, checked before a model is made of them.

One table for each class: type, range and length of every value, and how they fit together. A missing value is the
library's default; values that nothing here reads are ignored. Bounds are several times what published models have:
with a million layers a library would work for minutes before it fails. Refused by ModelError, with the key.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from qwen_cache.errors import ModelError
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.text import expected_value

RESTORE = "restore the file from the model's repository"
MAX_WIDTH = 1 << 16
Few = Annotated[int, Field(ge=1, le=64)]
Layers = Annotated[int, Field(ge=1, le=1000)]
Heads = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=MAX_WIDTH)]
Many = Annotated[int, Field(ge=1, le=1 << 24)]
Id = Annotated[int, Field(ge=0, le=1 << 24)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, lt=1)]
Three = Field(min_length=3, max_length=3)
LONGEST_TARGET = 1 << 20  # tokens; 4 megapixels have 16,384
LARGEST_EXPONENT = 600.0  # of e; a double overflows at 709


class Values(BaseModel):
    """The values of one configuration; NaN and infinities are none."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


def _refuse(key: str, what: str) -> PydanticCustomError:
    """A fault of several values; `key` names the one to look at."""
    return PydanticCustomError("unfit", "{key}: {what}", {"key": key, "what": what})


# ---- transformers ----------------------------------------------------------------------------------------------------


class Quantization(Values):
    """How saved weights are quantised."""

    quant_method: str | None = None
    bytes_per_weight: None = None
    """For a single file alone, which this project measures."""


class Transformer(Values):
    num_layers: Layers
    num_attention_heads: Heads
    attention_head_dim: Heads
    in_channels: Width
    """Other numbers than those of the latents are refused with a reason of their own."""
    out_channels: Width | None
    patch_size: Few
    axes_dims_rope: Annotated[list[Annotated[int, Field(ge=2, le=1024, multiple_of=2)]], Three] = [16, 56, 56]
    quantization_config: Quantization | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_attention_heads * self.attention_head_dim > MAX_WIDTH:
            raise _refuse("num_attention_heads", f"times attention_head_dim must be at most {MAX_WIDTH}")
        if sum(self.axes_dims_rope) != self.attention_head_dim:
            raise _refuse("axes_dims_rope", f"must add up to attention_head_dim, {self.attention_head_dim}")
        if (self.out_channels or self.in_channels) * self.patch_size**2 != self.in_channels == LATENT_CHANNELS:
            raise _refuse("out_channels", f"times patch_size² must be {LATENT_CHANNELS}")
        return self


class QwenImageTransformer(Transformer):
    joint_attention_dim: Width
    out_channels: Width | None = 16
    patch_size: Few = 2
    guidance_embeds: bool = False
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False

    @model_validator(mode="after")
    def _has_one_condition(self) -> Self:
        if self.use_additional_t_cond and not self.use_layer3d_rope:  # both are refused with the right reason
            raise _refuse("use_additional_t_cond", "must be false: nothing here gives this model its second condition")
        return self


class QwenImage21Transformer(Transformer):
    context_in_dim: Width
    out_channels: Width | None = 64
    patch_size: Few = 1
    mlp_ratio: Few = 3
    eps: Share = 1e-6
    causal_condition: bool = True


# ---- VAEs ------------------------------------------------------------------------------------------------------------


class Vae(Values):
    base_dim: Annotated[int, Field(ge=1, le=4096)] = 96
    dim_mult: list[Few]
    num_res_blocks: Few = 2
    attn_scales: Annotated[list[Number], Field(max_length=16)] = []
    temperal_downsample: list[bool]
    dropout: Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise _refuse("temperal_downsample", f"must have {len(self.dim_mult) - 1} values, one less than dim_mult")
        return self


class QwenImageVae(Vae):
    z_dim: Literal[16] = 16
    dim_mult: Annotated[list[Few], Field(min_length=4, max_length=4)] = [1, 2, 4, 4]
    temperal_downsample: list[bool] = [False, True, True]
    input_channels: Literal[3] = 3
    latents_mean: Annotated[list[Number], Field(min_length=16, max_length=16)] = [0.0] * 16
    latents_std: Annotated[list[Positive], Field(min_length=16, max_length=16)] = [1.0] * 16


class QwenImage21Vae(Vae):
    z_dim: Literal[64] = 64
    dim_mult: Annotated[list[Few], Field(min_length=5, max_length=5)] = [1, 2, 4, 8, 8]
    temperal_downsample: list[bool] = [False, True, True, True]
    decoder_base_dim: Annotated[int, Field(ge=1, le=4096)] | None = 144
    in_channels: Literal[4] = 4
    out_channels: Literal[4] = 4
    is_residual: bool = True
    patch_size: Literal[1] | None = None
    scale_factor_spatial: Literal[16] = 16
    scale_factor_temporal: Few | None = 8
    latents_mean: Annotated[list[Number], Field(min_length=64, max_length=64)] = [0.0] * 64
    latents_std: Annotated[list[Positive], Field(min_length=64, max_length=64)] = [1.0] * 64


# ---- text encoders ---------------------------------------------------------------------------------------------------


class Rope(Values):
    mrope_section: Annotated[list[Heads], Three] = [16, 24, 24]
    rope_theta: Positive | None = None


class Language(Values):
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    intermediate_size: Many = 22016
    vocab_size: Many = 151936
    max_position_embeddings: Many = 32768
    rms_norm_eps: Share = 1e-6
    attention_dropout: Share = 0.0
    rope_parameters: Rope | None = None
    rope_scaling: Rope | None = None
    rope_theta: Positive | None = None

    @property
    def width_of_a_head(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _fits(self) -> Self:
        groups = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % groups:
            raise _refuse("num_attention_heads", f"must be a multiple of num_key_value_heads, {groups}")
        if self.width_of_a_head % 2 or self.width_of_a_head * self.num_attention_heads > MAX_WIDTH:
            raise _refuse("num_attention_heads", "must leave each head an even width")
        for rope in [each for each in (self.rope_scaling, self.rope_parameters) if each] or [Rope()]:
            if 2 * sum(rope.mrope_section) != self.width_of_a_head:
                raise _refuse("mrope_section", f"must add up to {self.width_of_a_head // 2}, half of a head")
        return self


class Language25(Language):
    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.hidden_size % self.num_attention_heads:
            raise _refuse("hidden_size", f"must be a multiple of num_attention_heads, {self.num_attention_heads}")
        return self


class Language3(Language):
    head_dim: Heads = 128

    @property
    def width_of_a_head(self) -> int:
        return self.head_dim


class Vision(Values):
    depth: Layers = 32
    hidden_size: Width
    num_heads: Heads = 16
    intermediate_size: Many = 3420
    in_channels: Literal[3] = 3
    out_hidden_size: Width = 3584
    patch_size: Few
    spatial_merge_size: Few = 2
    temporal_patch_size: Few = 2

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.hidden_size % (4 * self.num_heads):
            raise _refuse("hidden_size", f"must be a multiple of 4 × num_heads, {4 * self.num_heads}")
        return self


class Vision25(Vision):
    hidden_size: Width = 3584
    patch_size: Few = 14
    window_size: Width = 112
    fullatt_block_indexes: Annotated[list[Id], Field(max_length=1000)] = [7, 15, 23, 31]

    @model_validator(mode="after")
    def _has_windows(self) -> Self:
        side = self.patch_size * self.spatial_merge_size
        if self.window_size < side:
            raise _refuse("window_size", f"must be at least {side}, the side of a token")
        return self


class Vision3(Vision):
    depth: Layers = 27
    hidden_size: Width = 1152
    patch_size: Few = 16
    num_position_embeddings: Many = 2304
    deepstack_visual_indexes: Annotated[list[Id], Field(max_length=1000)] = [8, 16, 24]

    @model_validator(mode="after")
    def _has_its_layers(self) -> Self:
        if max(self.deepstack_visual_indexes, default=0) >= self.depth:
            raise _refuse("deepstack_visual_indexes", f"must be below depth, {self.depth}")
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise _refuse("num_position_embeddings", "must be a square")
        return self


class TextEncoder(Values):
    image_token_id: Id = 151655
    video_token_id: Id = 151656
    vision_start_token_id: Id = 151652
    vision_end_token_id: Id = 151653
    tie_word_embeddings: bool = False
    quantization_config: Quantization | None = None

    @model_validator(mode="after")
    def _fits(self: Any) -> Any:
        vision, width = self.vision_config, self.text_config.hidden_size
        if vision and vision.out_hidden_size != width:
            raise _refuse("vision_config.out_hidden_size", f"must be the width of the language model, {width}")
        return self


class Qwen25VL(TextEncoder):
    text_config: Language25
    vision_config: Vision25 | None = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, values: Any) -> Any:
        """Older files have the values of the language model beside those of all."""
        return values if values.get("text_config") is not None else {**values, "text_config": values}


class Qwen3VL(TextEncoder):
    text_config: Language3
    vision_config: Vision3 | None = None


class Size(Values):
    """Pixels of the smallest and the largest image, whatever the names say."""

    shortest_edge: Many
    longest_edge: Annotated[int, Field(ge=1, le=1 << 30)]


class Images(Values):
    """The processor of a text encoder's images, once it is made."""

    patch_size: Few
    merge_size: Few
    temporal_patch_size: Few
    image_mean: Annotated[list[Number], Three]
    image_std: Annotated[list[Positive], Three]
    rescale_factor: Positive
    resample: Annotated[int, Field(ge=0, le=5)]
    size: Size


# ---- schedulers ------------------------------------------------------------------------------------------------------


class Scheduler(Values):
    base_image_seq_len: Many = 256
    max_image_seq_len: Many = 4096
    base_shift: Number = 0.5
    max_shift: Number = 1.15
    shift_terminal: Share | None = None
    shift: Positive = 1.0
    num_train_timesteps: Annotated[int, Field(ge=1, le=1_000_000)] = 1000

    @model_validator(mode="after")
    def _fits(self) -> Self:
        lengths = self.max_image_seq_len - self.base_image_seq_len
        if lengths <= 0:
            raise _refuse("max_image_seq_len", f"must be above base_image_seq_len, {self.base_image_seq_len}")
        steepest = abs(self.max_shift - self.base_shift) / lengths * LONGEST_TARGET
        if max(abs(self.base_shift), abs(self.max_shift)) + steepest > LARGEST_EXPONENT:
            raise _refuse("max_shift", "is too far from base_shift for the lengths between them")
        return self


# ---- all of them -----------------------------------------------------------------------------------------------------

CLASSES: dict[str, type[Values]] = {
    "QwenImageTransformer2DModel": QwenImageTransformer,
    "QwenImage21Transformer2DModel": QwenImage21Transformer,
    "AutoencoderKLQwenImage": QwenImageVae,
    "AutoencoderKLQwenImage21": QwenImage21Vae,
    "FlowMatchEulerDiscreteScheduler": Scheduler,
}
"""By `_class_name`, of diffusers."""
MODEL_TYPES: dict[str, type[Values]] = {"qwen2_5_vl": Qwen25VL, "qwen3_vl": Qwen3VL}
"""By `model_type`, of transformers."""
OTHERS = ("_class_name", "model_type", "sample_sigmas")
"""Keys that are read besides."""
METHODS = {*dir(OrderedDict), "to_dict"}
"""Methods that libraries call on a configuration: diffusers makes an attribute of every key."""


def check_config(config: Mapping[str, Any], where: object, repeated: Collection[str] = ()) -> None:
    """ModelError for a value that the class of this configuration cannot have, a key that is read and `repeated`, and
    one that would take the place of a method.

    Of a class without a table only `OTHERS` are read.
    """
    if method := next((name for name in config if name in METHODS), None):
        raise ModelError(f"the key {method} would take the place of a method", where=where, do=RESTORE)
    tables = ((config.get(key), known) for key, known in (("_class_name", CLASSES), ("model_type", MODEL_TYPES)))
    table = next((known[name] for name, known in tables if isinstance(name, str) and name in known), None)
    names = {*OTHERS, *(_names(table) if table else ())}
    if twice := next((name for name in repeated if name in names), None):
        raise ModelError(f"the key {twice} is there twice", where=where, do=RESTORE)
    if table:
        check_values(table, config, where)


def check_values(table: type[Values], values: Mapping[str, Any], where: object) -> None:
    """ModelError for the first value that is not as the table has it."""
    try:
        table.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
    else:
        return
    key = ".".join(map(str, first["loc"]))
    if first["type"] == "unfit":
        raise ModelError(f"{key}.{first['msg']}".lstrip("."), where=where, do=RESTORE)
    if first["type"] == "missing":
        raise ModelError(f"{key} is missing", where=where, do=RESTORE)
    expected = "an object" if first["type"] == "model_type" else expected_value(first) or first["msg"]
    what, found = f"{key} has a value that no model has", repr(first["input"])
    raise ModelError(what, where=where, expected=expected, found=found, do=RESTORE)


def _names(table: type[Values]) -> set[str]:
    """All keys of a table and of those inside it."""
    inner = (value.annotation for value in table.model_fields.values())
    kinds = {each for kind in inner for each in (kind, *getattr(kind, "__args__", ())) if isinstance(each, type)}
    nested = (_names(each) for each in kinds if issubclass(each, Values))
    return set(table.model_fields).union(*nested)
