"""A model's folder in diffusers' layout: its files, configurations and identity."""

from __future__ import annotations

import json
import math
import stat
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Annotated, Any, ClassVar, Literal, Self

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from qwen_cache.errors import ModelError, first_line
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.format.sample import LATENT_CHANNELS
from qwen_cache.models.family import NOT_YET, PIPELINES, SUPPORTED, Family, Pipeline, PipelineName, Template, family_of
from qwen_cache.models.single_file import (
    SingleFile,
    StoredTensor,
    check_packages,
    open_single_file,
    open_text_encoder,
    read_header,
)
from qwen_cache.storage.files import open_file, read_file
from qwen_cache.storage.remembered import BLOCK, find_fault, known_digest, remembered, remembered_digest
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.terminal import naming
from qwen_cache.text import expected_value, parse_json, repeated

# ---- files -----------------------------------------------------------------------------------------------------------
# The files of a model's folder, checked before a library opens them.
#
# Links are followed, since the hub's cache consists of them. Refused by ModelError: pipes, sockets and devices, which
# would be waited for or read for ever; texts of a size that no model has; indexes of shards that name anything but
# files of their folder; and adapters, which transformers would load with the weights.

AGAIN = "download this component again"
INDEX = ".safetensors.index.json"
PIPELINE_INDEX = "model_index.json"
TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken")
MAX_TEXT = 1 << 26  # bytes; the largest published tokenizer.json has 33 MB
ADAPTER = "adapter_config.json"
MORE_TEMPLATES = "additional_chat_templates"
"""The only folder in a component's that transformers looks into."""


def check_files(folder: Path) -> None:
    """ModelError unless libraries can be handed the folder of a component."""
    try:
        for path in _files(folder):
            _check_file(path)
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None


def read_text(path: Path) -> str:
    """A text of a model; OSError or ValueError if it cannot be read, ModelError if it is too long for one."""
    data = read_file(path, MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise _too_long(path, f"more than {MAX_TEXT}")
    return data.decode("utf-8")


def shards_of(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of shards; ModelError if it is none."""
    try:
        value = parse_json(read_text(index))
        files = value["weight_map"]
        if not isinstance(value["metadata"], dict) or not isinstance(files, dict):
            raise TypeError("weight_map and metadata are objects")
        for file in files.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{file!r} is no .safetensors file of its folder")
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=index, do=AGAIN) from None
    except (ValueError, LookupError, TypeError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else error
        expected = "an object with metadata and weight_map, which names a file of this folder for each tensor"
        raise ModelError("this is no index of shards", where=index, expected=expected, found=found, do=AGAIN) from None
    return files


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())
    if (folder / MORE_TEMPLATES).is_dir():
        yield from sorted((folder / MORE_TEMPLATES).iterdir())


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:  # a link of a broken download: whoever needs the file says so
        return
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):
        raise ModelError("this file cannot be read: not a regular file", where=path, do=AGAIN)
    if path.suffix in TEXTS and found.st_size > MAX_TEXT:
        raise _too_long(path, found.st_size)
    if path.name.endswith(INDEX):
        shards_of(path)
    if path.name == ADAPTER:
        what = "an adapter is beside the weights, and would be loaded with them"
        raise ModelError(what, where=path, do="merge it into the weights, or remove it")


def _too_long(path: Path, found: object) -> ModelError:
    return ModelError("no file of this kind is so long", where=path, expected=f"at most {MAX_TEXT} bytes", found=found)


# ---- config values ---------------------------------------------------------------------------------------------------
# The values in a model's configurations that are read here, checked before a model is made of them.
#
# One table for each class: type, range and length of every value, and how they fit together. A missing value is the
# library's default; values that nothing here reads are ignored. Bounds are several times what published models have:
# with a million layers a library would work for minutes before it fails. Refused by ModelError, with the key.

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


# ---- folder ----------------------------------------------------------------------------------------------------------
# A diffusers folder of Qwen-Image(-Edit), on disk or on the hub: its pipeline, and a check of its components.
#
# Only the requested components are downloaded and checked: `build` never touches the transformer, a training run never
# the encoders. Imports neither torch nor diffusers.

ENCODERS = ("vae", "text_encoder", "processor")
"""The entries of a recipe that say which encoders made it; the last one is of tokenizer and processor."""
ENCODER_PARTS = ("vae", "text_encoder", "tokenizer", "processor")
"""The folders of the frozen encoders; a model has those of its pipeline."""
NUNCHAKU = "nunchaku_lite"
"""The quant_method in config.json of a transformer that diffusers runs by nunchaku's kernels: it can only generate."""
WEIGHTS = (".safetensors", "config.json")
"""Endings of the files that decide what a component computes."""
CONFIGURATION = (".json", ".txt", ".jinja")
"""Endings of the files that decide what a tokenizer or processor does."""
VAE_WEIGHTS = "diffusion_pytorch_model"
"""The name of a VAE's weights, without the ending: diffusers reads no others."""
VAE_DECODER = ("decoder.", "post_quant_conv.")
"""The beginnings of the names of tensors that latents do not depend on."""
NO_VALUES = ("_", "diffusers_version")
"""The beginnings of the keys of a config.json that say who wrote it."""


@dataclass(frozen=True)
class ModelFolder:
    """A local folder with `model_index.json`; `name` is what the user typed."""

    name: str
    path: Path
    pipeline: PipelineName
    transformer: str | None = None
    """A single file whose weights are used in place of those of the transformer's folder."""
    text_encoder: str | None = None
    """The same for the text encoder's."""
    other_vae: Path | None = None
    """The folder of a VAE whose decoder is used in place of that of the model's."""
    is_here: ClassVar[bool] = True
    """False for a model that only a server has."""

    def component(self, name: str) -> Path:
        """The folder of a component, such as `vae`."""
        return self.path / name

    @property
    def decoding_vae(self) -> Path:
        """The folder of the VAE that makes images of latents."""
        return self.other_vae or self.component("vae")

    @cached_property
    def transformer_file(self) -> SingleFile | None:
        """The single file in place of the transformer's weights; ModelError if it is not of this model."""
        config = self.component("transformer") / "config.json"
        return None if self.transformer is None else open_single_file(self.transformer, read_config(config))

    @cached_property
    def text_encoder_file(self) -> SingleFile | None:
        """The single file in place of the text encoder's weights; ModelError if it is not of this model."""
        config = self.component("text_encoder") / "config.json"
        return None if self.text_encoder is None else open_text_encoder(self.text_encoder, read_config(config))

    @property
    def transformer_weights(self) -> Path | SingleFile:
        """The place of the transformer's weights: the single file, or the component's folder."""
        return self.transformer_file or self.component("transformer")

    @property
    def transformer_config(self) -> dict[str, Any]:
        """The transformer's config.json; with a single file, its `quantization_config` is that of the file."""
        config = read_config(self.component("transformer") / "config.json")
        return config if self.transformer_file is None else self.transformer_file.config(config)

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """scheduler_config.json; ModelError if it is not one of FlowMatchEulerDiscreteScheduler."""
        path = self.component("scheduler") / "scheduler_config.json"
        config = read_config(path)
        check_values(Scheduler, config, path)  # whatever class it names
        return config

    @property
    def needs_nunchaku(self) -> bool:
        """True if the transformer's weights are for nunchaku's kernels."""
        saved = self.transformer_config.get("quantization_config") or {}
        return bool(saved.get("quant_method") == NUNCHAKU)

    @property
    def public_name(self) -> str:
        """The name in files that users share: of a local path, only the last part."""
        return self.name if not Path(self.name).exists() else Path(self.name).resolve().name

    @property
    def family(self) -> Family:
        return family_of(self.pipeline)

    @property
    def facts(self) -> Pipeline:
        """The facts about the pipeline."""
        return PIPELINES[self.pipeline]

    @property
    def template(self) -> Template:
        """The template of samples with controls, if the model takes any."""
        return self.facts.template

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer."""
        return self.component(self.facts.tokenizer)

    @property
    def needs_controls(self) -> bool:
        return self.facts.min_controls > 0

    @property
    def takes_controls(self) -> bool:
        return self.facts.max_controls != 0

    @property
    def text_width(self) -> int:
        """The width of the text encoder's embeddings."""
        config = read_config(self.component("text_encoder") / "config.json")
        return int((config.get("text_config") or config)["hidden_size"])

    @property
    def sample_sigmas(self) -> tuple[float, ...] | None:
        """The noise levels that a distilled model samples with, from model_index.json; None for other models.

        Raises ModelError unless they are numbers above 0 and up to 1.
        """
        index = self.path / PIPELINE_INDEX
        sigmas = read_config(index).get("sample_sigmas")
        if sigmas is None:
            return None
        if not isinstance(sigmas, list) or not sigmas or not all(map(_is_sigma, sigmas)):
            raise ModelError(
                "sample_sigmas are no noise levels",
                where=index,
                expected="a list of numbers above 0 and up to 1, or null",
                found=json.dumps(sigmas),
                do="restore the file from the model's repository",
            )
        return tuple(map(float, sigmas))

    @property
    def max_controls(self) -> int | None:
        """The most control images that the pipeline takes; None: any number."""
        return self.facts.max_controls


def read_config(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model, such as config.json, with the values that its class can have; else
    ModelError."""
    twice: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice.extend(repeated(pairs))
        return dict(pairs)

    try:
        value = json.loads(read_text(path), object_pairs_hook=noted)
        if not isinstance(value, dict):
            raise TypeError("it is not a JSON object")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else first_line(error)
        raise ModelError(f"this file cannot be read: {reason}", where=path, do=AGAIN) from None
    check_config(value, path, twice)
    return value


def _is_sigma(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1


def open_model(
    name: str | None,
    components: Sequence[str],
    revision: str | None = None,
    transformer: str | None = None,
    vae: str | None = None,
    text_encoder: str | None = None,
    *,
    only_here: bool = False,
) -> ModelFolder:
    """Find a model, download missing `components`, and check that all of them exist; ModelError otherwise.

    With `only_here` nothing is downloaded, nor the hub asked for a newer version.

    With a single file as its `transformer` or `text_encoder`, of that folder only config.json is needed. `vae` names
    another VAE to decode with, if the model's is among the components.
    """
    name, files = check_name(name), {"transformer": transformer, "text_encoder": text_encoder}
    needs_all = {each: files.get(each) is None for each in components}
    patterns = [PIPELINE_INDEX, *(f"{each}/{'*' if whole else 'config.json'}" for each, whole in needs_all.items())]
    path = Path(name) if Path(name).is_dir() else _download(name, patterns, revision, only_here=only_here)
    index = path / PIPELINE_INDEX
    if not index.is_file():
        do = "name the folder that contains vae/, text_encoder/ and transformer/, or a repository on the hub"
        raise ModelError("not a diffusers model folder: it has no model_index.json", where=path, do=do)
    pipeline = read_config(index).get("_class_name")
    facts = PIPELINES.get(str(pipeline))
    if facts is None:
        model = NOT_YET.get(str(pipeline))
        what = f"{model} is not supported yet" if model else "this pipeline is not supported"
        do = f"use one of {SUPPORTED}"
        raise ModelError(what, where=index, expected=" or ".join(PIPELINES), found=pipeline, do=do)
    needed = _components_of(facts, components)
    if missing := [each for each in needed if not (path / each).is_dir()]:
        folders = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir())) or "no folders"
        raise ModelError(
            f"the model has no {' and no '.join(missing)}",
            where=path,
            expected=", ".join(needed),
            found=folders,
            do="download the whole model, or name another with --model",
        )
    for each in needed:
        check_files(path / each)
    other_vae = open_vae(vae) if vae is not None and "vae" in components else None
    text_encoder = text_encoder if "text_encoder" in components else None
    opened = ModelFolder(name, path, facts.name, transformer, text_encoder, other_vae)
    if "transformer" in components:
        check_packages(opened.transformer_file)  # and with it the file
    _ = opened.text_encoder_file  # checks it
    return opened


def _components_of(facts: Pipeline, components: Sequence[str]) -> list[str]:
    """The components that a model of this pipeline has: not all have both a tokenizer and a processor."""
    return [each for each in components if each not in ENCODER_PARTS or each in facts.encoder_parts]


def find_here(name: str, components: Sequence[str], revision: str | None = None) -> Path | None:
    """The folder of a model of whose `components` all that its pipeline has are on this machine; None if one is not.
    Nothing is downloaded."""
    path = Path(name)
    if not path.is_dir():
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            path = Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            return None
    index = path / PIPELINE_INDEX
    if not index.is_file():
        return None
    facts = None
    with suppress(ModelError):  # which opening the model raises again
        facts = PIPELINES.get(str(read_config(index).get("_class_name")))
    needed = components if facts is None else _components_of(facts, components)
    return path if all(is_whole(path / each) for each in needed) else None


def is_whole(folder: Path) -> bool:
    """True if a component is here, with its weights, if it has any, in all files that an index of shards names."""
    if not folder.is_dir() or ((folder / "config.json").exists() and not any(folder.glob("*.safetensors"))):
        return False
    return all((folder / name).is_file() for index in folder.glob(f"*{INDEX}") for name in shards_of(index).values())


def open_vae(name: str) -> Path:
    """The folder of a VAE as diffusers stores it, alone or in a model, downloaded if there is none; ModelError if it
    cannot be."""
    check_name(name)
    files = ["config.json", f"{VAE_WEIGHTS}*.safetensors", f"*{INDEX}"]
    patterns = [*files, *(f"vae/{each}" for each in files)]
    folder = Path(name) if Path(name).is_dir() else _download(name, patterns, None)
    found = folder / "vae" if (folder / "vae").is_dir() else folder
    if not (found / "config.json").is_file():
        do = "name the folder of a VAE as diffusers saves it, or that of a model with one"
        raise ModelError("there is no VAE here", where=name, expected="config.json", do=do)
    check_files(found)
    return found


def fingerprint(
    folders: Sequence[Path],
    endings: tuple[str, ...] = WEIGHTS,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    read: bool = True,
) -> str:
    """One hash over the names and contents of the files in these folders with these endings, wherever they are.

    Files are read again only when they have changed; `on_bytes` gets the number of bytes just read. Unless `read` is
    true, none is read: empty if one is not remembered. ModelError for one that cannot be read, such as the link of a
    broken download.
    """
    files = [path for folder in folders for path in sorted(folder.iterdir()) if path.name.endswith(endings)]
    try:
        digests = [
            [f"{path.parent.name}/{path.name}", remembered_digest(path, on_bytes) if read else known_digest(path)]
            for path in files
        ]
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None
    return content_hash(canonical_json(digests)) if all(digest for _, digest in digests) else ""


def encoder_folders(model: ModelFolder, entry: str) -> Sequence[Path]:
    """The folders of the files whose hash a recipe has under this entry, one of `ENCODERS`."""
    parts = ("tokenizer", "processor") if entry == "processor" else (entry,)
    return [model.component(each) for each in model.facts.encoder_parts if each in parts]


def encoder_fingerprint(
    model: ModelFolder, entry: str, on_bytes: Callable[[int], None] = lambda _: None, *, read: bool = True
) -> str:
    """The hash that a recipe has under this entry, one of `ENCODERS`; arguments as in `fingerprint`."""
    if entry == "processor":
        return fingerprint(encoder_folders(model, entry), CONFIGURATION, on_bytes, read=read)
    file = model.text_encoder if entry == "text_encoder" else None
    return component_fingerprint(model.component(entry), file, on_bytes, read=read)


def component_fingerprint(
    folder: Path, file: str | None, on_bytes: Callable[[int], None] = lambda _: None, *, read: bool = True
) -> str:
    """The `fingerprint` of a component; with a single `file` in place of its weights, one of config.json and the file,
    whatever its name."""
    if file is None:
        return fingerprint([folder], on_bytes=on_bytes, read=read)
    paths = (folder / "config.json", Path(file))
    try:
        digests = [remembered_digest(path, on_bytes) if read else known_digest(path) for path in paths]
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename) from None
    return content_hash(canonical_json(digests)) if all(digests) else ""


def vae_encoder_fingerprint(folder: Path) -> str:
    """One hash over what decides a VAE's latents: its tensors but those of the decoder, and its config.

    Names of files, the order of tensors and the version of the library that saved them make no difference. Empty for a
    folder without its files, which loading refuses. Files are read again only when they have changed. ModelError or
    OSError if one cannot be read.
    """
    index = folder / f"{VAE_WEIGHTS}{INDEX}"
    indexes = [index] if index.is_file() else []
    names = sorted(set(shards_of(index).values())) if indexes else [f"{VAE_WEIGHTS}.safetensors"]
    config, files = folder / "config.json", [folder / name for name in names]
    if not all(file.is_file() for file in (config, *files)):
        return ""
    return remembered("VAE encoder", [config, *indexes, *files], lambda: _hash_vae_encoder(config, files))


def _hash_vae_encoder(config: Path, files: Sequence[Path]) -> str:
    tensors = {}
    for path in files:
        with naming(path), open(open_file(path), "rb") as file:
            for name, tensor in read_header(path).tensors.items():
                if not name.startswith(VAE_DECODER):
                    tensors[name] = [tensor.dtype, list(tensor.shape), _hash_tensor(file, tensor)]
    values = {name: value for name, value in read_config(config).items() if not name.startswith(NO_VALUES)}
    return content_hash(canonical_json({"config": values, "tensors": tensors}))


def _hash_tensor(file: IO[bytes], tensor: StoredTensor) -> str:
    digest = xxhash.xxh3_128()
    file.seek(tensor.begin)
    for begin in range(tensor.begin, tensor.end, BLOCK):
        digest.update(file.read(min(BLOCK, tensor.end - begin)))
    return digest.hexdigest()


def check_component(folder: Path) -> None:
    """Raise ModelError if a component that this project wrote has changed since; another one cannot be checked."""
    if (folder / CHECKSUMS).is_file() and (fault := find_fault(folder, remembered_digest)):
        do = f"restore the folder from a copy; if it was changed on purpose, remove its {CHECKSUMS}"
        raise fault.error(ModelError, do)


def check_name(name: str | None) -> str:
    """The name of a model that is a folder here, or can be a repository on the hub; ModelError otherwise."""
    if name is None:
        raise ModelError("no model is named", do="give --model FOLDER_OR_REPOSITORY, or model.path in qwen.yaml")
    if Path(name).is_dir():
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "~")) or Path(name).is_file():
        raise ModelError(
            "this is a file, not a folder" if Path(name).is_file() else "no such folder",
            where=name,
            do="give the folder of a model, or a repository such as Qwen/Qwen-Image-Edit-2509",
        )
    return name


def open_language_model(name: str) -> Path:
    """The folder of a vision-language model as transformers stores it, downloaded if there is none; ModelError if it
    cannot be."""
    check_name(name)
    patterns = ["*.json", "*.txt", "*.jinja", "*.safetensors"]
    folder = Path(name) if Path(name).is_dir() else _download(name, patterns, None)
    check_files(folder)
    return folder


def _download(name: str, patterns: list[str], revision: str | None, *, only_here: bool = False) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, local_files_only=only_here))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelError("neither a folder here nor a repository on the hub", where=name, do=str(error)) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        what = f"no such folder here, and the hub could not be reached: {first_line(error)}"
        raise ModelError(what, where=name) from None
