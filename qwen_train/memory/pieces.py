"""The pieces of a step's peak, remembered: its live bytes as linear functions of the tokens.

They are those of a step on tensors without data (`step.py`). On one kind of batches (`BatchKind`) every tensor is
linear in `Parts`, so the live bytes at each moment are too, and the peak is the largest of a few such functions. They
are measured once for all that they depend on (`key_of`) and kept in the user's cache folder; those of the published
models come with the package. A step that is not linear has no pieces: then each batch is measured, once. Imports torch
only to measure.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from qwen_cache import models
from qwen_cache.models.family import QWEN_IMAGE_21, Family, family_of_transformer
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import TAKES, LoraConfig
from qwen_cache.storage.measured import digest_of_code, measured, versions
from qwen_train.memory.sizes import BatchKind, Parts, SampleSize
from qwen_train.model.combinations import check_tabulation, class_name, kind_of

Device = Literal["accelerator", "cpu"]
Piece = list[float]
"""Bytes for each of `Parts`, and a constant."""

LIBRARIES = ("torch", "diffusers", "peft")
CODE = (
    *("flow.py", "weights.py", "data/batches.py", "memory/sizes.py", "memory/step.py"),
    *("lora/*.py", "model/*.py"),
)
"""Our own modules that a measured step runs; and those of `qwen_cache.models` in `CODE_OF_MODELS`."""
CODE_OF_MODELS = ("devices.py", "hardware.py", "loading.py", "quantization.py", "single_file.py", "stored.py")
PUBLISHED = Path(__file__).parent / "published.json"
"""Entries of the published models, written by tools/make_pieces.py."""
PRODUCTS_IN_8_BITS = ("int8_convrot", "fp8_w8a8")
LARGE_IN_8_BITS = 2048
"""Tokens from which the rows that 8-bit products add, up to 31, are less than 2 %; smaller batches are measured."""
IN_EVERY_BLOCK = re.compile(r"all-linear|(?!transformer_blocks)[a-z_]\w*(\.\w+)*")
"""A target module, or a pattern of ranks, that is the same in every block: the end of a name, such as attn.to_q."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "QwenImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 64,
        "out_channels": 16,
        "num_layers": 60,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 3584,
        "guidance_embeds": False,
        "axes_dims_rope": [16, 56, 56],
        "zero_cond_t": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    },
    QWEN_IMAGE_21.transformer: {
        "patch_size": 1,
        "in_channels": 64,
        "out_channels": 64,
        "num_layers": 32,
        "attention_head_dim": 128,
        "num_attention_heads": 32,
        "context_in_dim": 4096,
        "mlp_ratio": 3,
        "axes_dims_rope": [16, 56, 56],
        "eps": 1e-6,
        "causal_condition": True,
    },
}
"""The entries of config.json that diffusers reads, and its defaults; other entries change nothing."""


@dataclass(frozen=True)
class Measured:
    """Bytes of a transformer with some of its blocks."""

    frozen: int
    """Frozen weights."""
    trained: int
    largest: int
    """The largest trained tensor."""
    states: dict[str, int]
    """The optimizer's state, by its name; and with `train.stochastic_rounding`."""
    rounded_states: dict[str, int]
    step: int
    """The peak of a step, without the weights."""
    image: int = 0
    """The peak of generating the image; 0 without one."""


def names_blocks(lora: LoraConfig) -> bool:
    """True if the blocks may differ in their adapter."""
    targets = [lora.target_modules] if isinstance(lora.target_modules, str) else lora.target_modules
    return not all(IN_EVERY_BLOCK.fullmatch(name) for name in (*targets, *lora.rank_pattern))


def depths(transformer: dict[str, Any], settings: Config) -> list[int]:
    """The numbers of blocks to run: two, from which all are extrapolated; or one, all of them."""
    layers, every = int(transformer["num_layers"]), int(settings.train.gradient_checkpointing) or 1
    few, more = layers % every + 3 * every, layers % every + 4 * every  # the first and the last block are different
    return [layers] if more >= layers or names_blocks(settings.train.lora) else [few, more]


def step(
    transformer: dict[str, Any],
    settings: Config,
    batch: Sequence[SampleSize],
    device: Device,
    image: SampleSize | None = None,
) -> list[Measured]:
    """The bytes of a step on `batch`, and of generating `image`, at each of `depths`.

    Raises ConfigError or ModelError for settings that cannot be combined.
    """
    family = _checked(transformer, settings)
    key = key_of(transformer, settings, device)
    found = _peaks(key, "step", transformer, batch, family)
    images = _peaks(key, "image", transformer, [image], family) if image else [(0, {})] * len(found)
    return [
        Measured(**bytes_, step=peak, image=of_image)
        for (peak, bytes_), (of_image, _) in zip(found, images, strict=True)
    ]


def block(transformer: dict[str, Any], settings: Config) -> int:
    """The bytes of one block's frozen weights."""
    _checked(transformer, settings)
    key = key_of(transformer, settings, "accelerator")

    return int(_recall({**key, "what": "block"}, lambda: measure_block(key)))


def _checked(transformer: dict[str, Any], settings: Config) -> Family:
    """The family; ConfigError or ModelError for settings that the transformer cannot take."""
    class_name(transformer)
    if settings.train.tabulated_modulation:
        check_tabulation(settings.train, transformer)
    return family_of_transformer(transformer)


# ---- keys ------------------------------------------------------------------------------------------------------------

OF_TRAINING = (
    *("method", "mixed_precision", "layout", "gradient_checkpointing", "noise_draws"),
    *("tabulated_modulation", "quantized_backward", "stochastic_rounding"),
)
"""The settings of `train` that a step depends on, beside those of the adapter."""


def key_of(transformer: dict[str, Any], settings: Config, device: Device) -> dict[str, Any]:
    """Everything that a measurement is made from: `_restored` makes settings with these values and no others."""
    train, defaults = settings.train, DEFAULTS[class_name(transformer)]
    lora = train.lora.model_dump(mode="json", include={"type", "target_modules", *TAKES[train.lora.type]})
    read = {**transformer, "axes_dims_rope": list(transformer.get("axes_dims_rope", defaults["axes_dims_rope"]))}
    return {
        "transformer": {
            "_class_name": transformer["_class_name"],
            **{name: value for name, value in read.items() if name in defaults and value != defaults[name]},
            **{name: transformer[name] for name in ("quantization_config",) if transformer.get(name) is not None},
        },
        "depths": depths(transformer, settings),
        "device": device,
        "quantization": settings.model.quantization,
        "train": {name: getattr(train, name) for name in OF_TRAINING}
        | ({"offload_activations": True} if train.offload_activations else {}),
        "accumulated": train.gradient_accumulation_steps > 1,
        "lora": lora if train.method == "lora" else None,
        "guided": max(settings.validation.true_cfg_scale) > 1,
    }


def _restored(key: dict[str, Any]) -> tuple[dict[str, Any], Config]:
    """The transformer and the settings of a key."""
    config, train = Config(), dict(key["train"])
    train["gradient_accumulation_steps"] = 2 if key["accumulated"] else 1
    if key["lora"] is not None:
        train["lora"] = LoraConfig(**key["lora"])
    settings = config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "model": config.model.model_copy(update={"quantization": key["quantization"]}),
            "validation": config.validation.model_copy(update={"true_cfg_scale": [4.0 if key["guided"] else 1.0]}),
        }
    )
    return {**DEFAULTS[key["transformer"]["_class_name"]], **key["transformer"]}, settings


# ---- entries ---------------------------------------------------------------------------------------------------------


def _peaks(
    key: dict[str, Any],
    what: Literal["step", "image"],
    transformer: dict[str, Any],
    batch: Sequence[SampleSize],
    family: Family,
) -> list[tuple[int, dict[str, Any]]]:
    """The peak at each depth, and the bytes that every batch takes."""
    _, settings = _restored(key)
    train, found = settings.train, None
    parts = Parts.of(batch, train.noise_draws if what == "step" else 1, family)
    in_8_bits = train.method == "lora" and kind_of(transformer, settings) in PRODUCTS_IN_8_BITS
    is_small = in_8_bits and sum(parts[:3]) < LARGE_IN_8_BITS
    if is_linear(family, key) and not is_small:
        kind = BatchKind.of(batch, train, family, in_8_bits=in_8_bits)
        found = _recall({**key, "what": what, "kind": asdict(kind)}, lambda: measure(key, what, kind))
    if found is None or any(each["pieces"] is None for each in found):
        sizes = [[each.img_shapes, each.text_tokens, each.image_positions] for each in batch]
        found = _recall({**key, "what": what, "batch": sizes}, lambda: measure(key, what, batch))
    return [(peak_of(each["pieces"], parts), each["bytes"]) for each in found]


def is_linear(family: Family, key: dict[str, Any]) -> bool:
    """True if every tensor is linear in `Parts`. In a joint sequence, attention segment by segment is not: there are
    masks for text after an image, as large as the text times what is before it."""
    return not family.joint_sequence or (key["device"] == "accelerator" and key["train"]["mixed_precision"] == "bf16")


def peak_of(pieces: Sequence[Piece], parts: Parts) -> int:
    """The largest of the pieces."""
    return round(max(sum(a * b for a, b in zip(piece, (*parts, 1), strict=True)) for piece in pieces))


def measure(key: dict[str, Any], what: str, of: BatchKind | Sequence[SampleSize]) -> list[dict[str, Any]]:
    """The entry of a kind of batches, or of one batch: at each depth the pieces, and the bytes of every batch."""
    from qwen_train.memory.step import measure_depth

    return [measure_depth(*_restored(key), each, key["device"], what, of) for each in key["depths"]]


def measure_block(key: dict[str, Any]) -> int:
    """The entry of a block's frozen weights."""
    from qwen_train.memory.step import block_bytes

    return block_bytes(*_restored(key))


_known: dict[str, Any] = {}
"""The entries that this process has used, by their key."""


def _recall(key: dict[str, Any], measure: Callable[[], Any]) -> Any:
    """The entry of a key: of the published models, remembered, or measured now."""
    text = json.dumps(key, sort_keys=True)
    if text not in _known:
        published = _published()
        _known[text] = published["entries"].get(digest_of(key)) if published["versions"] == _versions() else None
        if _known[text] is None:
            _known[text] = measured({**key, "versions": _versions(), "code": _code()}, measure)
    return _known[text]


def digest_of(key: dict[str, Any]) -> str:
    """The name of a published entry: the hash of its key in JSON."""
    return xxhash.xxh3_64_hexdigest(json.dumps(key, sort_keys=True).encode())


@functools.cache
def _published() -> dict[str, Any]:
    try:
        return dict(json.loads(PUBLISHED.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {"versions": {}, "entries": {}}


@functools.cache
def _versions() -> dict[str, str | None]:
    return versions(LIBRARIES)


@functools.cache
def _code() -> str:
    """The hash of our own modules that a step runs."""
    own, of_models = Path(__file__).parents[1], Path(models.__path__[0])
    files = [path for pattern in CODE for path in sorted(own.glob(pattern))]
    return digest_of_code([*files, *(of_models / name for name in CODE_OF_MODELS)])
