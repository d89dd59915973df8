"""Loading weights: the text encoder with its vision tower and processor, and errors that say which file."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from qwen_cache.errors import ModelError
from qwen_cache.models.config import Images, check_values
from qwen_cache.models.devices import full_float32, to_device
from qwen_cache.models.folder import AGAIN, ModelFolder, read_config
from qwen_cache.models.loading import explained, load_whole
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.models.single_file import SingleFile
from qwen_cache.models.stored import check_shapes, map_file, row_scales, stored, unpacked

# ---- text encoder ----------------------------------------------------------------------------------------------------
# The text encoder in a folder or a single file: Qwen2.5-VL or Qwen3-VL, by the `model_type` of its config.
#
# Any other type, and a config that cannot be read, is a ModelError that names both.

MODELS: dict[str, type[Any]] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
"""Model classes by `model_type`."""
OLD_NAMES = {"rope_scaling", "rope_theta", "torch_dtype"}
"""The names of some values in files of earlier versions of transformers."""
NOT_VALUES = {"auto_map", "attn_implementation", "experts_implementation", "fusion_config", "transformers_weights"}
"""Settings by which transformers runs other code, or loads another file than `fingerprint` hashes."""


def text_encoder_type(name: str | PathLike[str]) -> str:
    """The `model_type` in the `config.json` of a folder; ModelError if it is not one of `MODELS`."""
    return known_type(read_config(Path(name) / "config.json").get("model_type"), name)


def known_type(model_type: object, where: object | None = None) -> str:
    """`model_type` if it is one of `MODELS`; else ModelError."""
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ModelError(
            "not a Qwen2.5-VL or Qwen3-VL",
            where=where,
            expected=f"model_type {' or '.join(MODELS)}",
            found=model_type or "no model_type",
        )
    return model_type


def model_config(settings: Mapping[str, Any], where: object) -> Any:
    """The configuration of a text encoder with this config.json, without what would run code or load other files.

    Attention is torch's: a config.json may name another one, such as a kernel that would be downloaded from the hub.
    """
    kind = MODELS[known_type(settings.get("model_type"), where)]
    with explained(kind.config_class.__name__, where):
        return copy.deepcopy(_config(kind.config_class, json.dumps(settings)))


@lru_cache(8)
def _config(kind: Any, settings: str) -> Any:
    """Made once: transformers takes ten times as long for one as a copy does."""
    config = kind.from_dict(_values(json.loads(settings), kind))
    config._attn_implementation = "sdpa"
    return config


def _values(settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The settings that are values of this class or of those in it, and no names of code or files."""
    own = {field.name for field in dataclasses.fields(kind)} | OLD_NAMES
    kept = {
        name: value
        for name, value in settings.items()
        if name in own or not (name.startswith("_") or name in NOT_VALUES or hasattr(kind, name))
    }
    inside = {name: each for name, each in kind.sub_configs.items() if isinstance(kept.get(name), dict)}
    return kept | {name: _values(kept[name], each) for name, each in inside.items()}


def load_text_encoder(folder: Path, dtype: torch.dtype, file: SingleFile | None = None) -> Any:
    """The frozen text encoder in `folder`, with its `lm_head`; ModelError if it is another model or incomplete.

    With a `file` the weights are those of the file, and there is no `lm_head`. The config is read here: for one that it
    cannot read, transformers would make random weights of the 7B model's size.
    """
    config = model_config(read_config(folder / "config.json"), folder)
    kind = MODELS[config.model_type]
    if file is None:
        model = load_whole(kind, folder, config=config, dtype=dtype, attn_implementation=config._attn_implementation)
    else:
        model = _load_file(kind, config, dtype, file)
    model.model.visual.patch_embed.proj.__class__ = PatchEmbedding
    return model


def _load_file(kind: type[Any], config: Any, dtype: torch.dtype, file: SingleFile) -> Any:
    """The text encoder of a single file, on the CPU.

    Matrices of the language model that the file has in 8 bits stay so, and are unpacked for each product: then a row of
    the result depends on no other row. Everything else is converted to `dtype`.
    """
    with init_empty_weights(), explained(kind.__name__, file.path):
        model = kind(config)
        model.lm_head = nn.Identity()
    check_shapes(file, model.model)
    with explained(kind.__name__, file.path, do=None):
        whole, quantised = map_file(file), file.quantised
        state = {name: unpacked(whole, it).to(dtype) for name, it in file.tensors.items() if name not in quantised}
        model.model.load_state_dict(state, strict=False, assign=True)
        for name in quantised:
            layer, tensor = model.model.get_submodule(name.removesuffix(".weight")), file.tensors[name]
            QuantizedLinear.make(layer, stored(whole, tensor), row_scales(whole, tensor), group=tensor.group)
    if dtype == torch.float32:
        full_float32()
    return model.requires_grad_(False).eval()


# ---- patch embedding -------------------------------------------------------------------------------------------------
# The first layer of the vision tower as a matrix product: a convolution whose windows do not overlap is one.
#
# In bfloat16 torch's Conv3d takes four to five times as long on a CPU, and is wrong on one with AMX (pytorch #169688).
# Both are the same function, and differ by rounding. In float32 a CPU keeps Conv3d, and caches keep their bytes.
# `fusion_config` of transformers does the same to Qwen3-VL, but leaves Qwen2.5-VL without the weights of this layer.


class PatchEmbedding(nn.Conv3d):
    """A Conv3d of single patches, with the same parameters; they and their device decide how it computes."""

    def forward(self, patches: Float[Tensor, "N C T P P"]) -> Float[Tensor, "N D 1 1 1"]:
        if self.weight.device.type == "cpu" and self.weight.dtype != torch.bfloat16:
            return super().forward(patches)
        return self.product(patches)

    def product(self, patches: Float[Tensor, "N C T P P"]) -> Float[Tensor, "N D 1 1 1"]:
        return linear(patches.flatten(1), self.weight.flatten(1), self.bias)[..., None, None, None]


# ---- processor -------------------------------------------------------------------------------------------------------
# The processors of Qwen2.5-VL and Qwen3-VL for images alone: without video, they do not need torchvision.

PROBE = "a prompt, 提示"  # a tokenizer on bytes loses no text


class _ImageOnly:
    """A processor without video, which needs torchvision.

    transformers derives the components of a processor from this signature. Images are processed by PIL, whether
    torchvision is installed or not.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)  # type: ignore[call-arg]


class ImageOnlyQwen2VLProcessor(_ImageOnly, Qwen2VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen2VLProcessor without video."""


class ImageOnlyQwen3VLProcessor(_ImageOnly, Qwen3VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen3VLProcessor without video."""


PROCESSORS: dict[str, type[Any]] = {"qwen2_5_vl": ImageOnlyQwen2VLProcessor, "qwen3_vl": ImageOnlyQwen3VLProcessor}
"""Processor classes by the `model_type` of the text encoder."""


def make_processor(model_type: str, name: str | PathLike[str]) -> Any:
    """The processor of a text encoder of that type, with the patch size and limits in a folder or repository.

    Raises ModelError for values that no such processor has.
    """
    kind = PROCESSORS[model_type]
    images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(name), _tokenizer(name)
    check_values(Images, json.loads(json.dumps(images.to_dict())), name)
    return kind(images, tokenizer, chat_template=kind.get_processor_dict(name)[0].get("chat_template"))


def load_processor(model: ModelFolder) -> Any:
    """The processor of a model that takes images, on PIL; ModelError if it cannot be read."""
    folder, config = model.component("processor"), model.component("text_encoder") / "config.json"
    settings = model_config(read_config(config), config)
    with explained(folder.name, folder):
        processor = make_processor(settings.model_type, folder)
    images, vision = processor.image_processor, settings.vision_config
    sides = {
        "patch_size": (vision.patch_size, images.patch_size),
        "merge_size": (vision.spatial_merge_size, images.merge_size),
        "temporal_patch_size": (vision.temporal_patch_size, images.temporal_patch_size),
    }
    for name, (expected, found) in sides.items():
        if expected != found:
            what = f"{name} is not the text encoder's"
            raise ModelError(what, where=folder, expected=expected, found=found, do=AGAIN)
    _check_tokenizer(processor.tokenizer, folder)
    return processor


def load_tokenizer(model: ModelFolder) -> Any:
    """The tokenizer of a model that takes no images; ModelError if it cannot be read."""
    with explained(model.tokenizer.name, model.tokenizer):
        tokenizer = _tokenizer(model.tokenizer)
    _check_tokenizer(tokenizer, model.tokenizer)
    return tokenizer


def _tokenizer(name: str | PathLike[str]) -> Any:
    """A tokenizer of transformers. By default, it would ask on the terminal whether to run the code that a folder
    brings."""
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """ModelError for a tokenizer that loses text: without its file, transformers makes one with an empty vocabulary."""
    if (found := tokenizer.decode(tokenizer(PROBE).input_ids)) != PROBE:
        raise ModelError("the tokenizer loses text", where=folder, expected=repr(PROBE), found=repr(found), do=AGAIN)


# ---- vision tower ----------------------------------------------------------------------------------------------------
# The vision tower of the text encoder on an accelerator: the host never waits for it, and windows go together.
#
# Without flash-attn, transformers asks the device for the lengths of the windows three times in each layer, and makes a
# call for each window: 100 in a layer for a megapixel. Here all that follows from the sizes of the images is computed
# on the host, once for a pass, and windows of equal length share a call. The result agrees within the rounding of the
# dtype: kernels choose by shape. So the CPU keeps the stock path, and its caches their bytes.

ATTENTION = "qwen_cache_flash_windows"
"""The name of `attend_windows` in transformers. With `flash` in it, a layer passes all windows and their bounds."""


def batch_windows(tower: Any) -> None:
    """Change the stock vision tower of Qwen2.5-VL or Qwen3-VL, in place."""
    AttentionInterface.register(ATTENTION, attend_windows)
    tower.config._attn_implementation = ATTENTION
    tower.register_forward_pre_hook(_add_what_follows_from_sizes, with_kwargs=True)


def attend_windows(
    module: Any,
    query: Float[Tensor, "1 heads N dim"],
    key: Float[Tensor, "1 heads N dim"],
    value: Float[Tensor, "1 heads N dim"],
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: Int[Tensor, " bounds"],
    **_: Any,
) -> tuple[Float[Tensor, "1 N heads dim"], None]:
    """Attention within each window, in one call for each length. The bounds of the windows are on the host."""
    lengths = cu_seq_lens_q.diff().tolist()
    windows = [torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)]
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, length in enumerate(lengths):
        numbers[length].append(number)
    outputs: dict[int, Tensor] = {}
    for chosen in numbers.values():
        q, k, v = (torch.cat([each[number] for number in chosen]) for each in windows)
        attended = scaled_dot_product_attention(q, k, v, scale=scaling).transpose(1, 2)
        outputs |= zip(chosen, torch.split(attended, 1), strict=True)
    return torch.cat([outputs[number] for number in range(len(lengths))], dim=1), None


def _add_what_follows_from_sizes(
    tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a pass: the sizes on the host, so that bounds are computed there; positions and indices on the device."""
    grids, device, merge_size = kwargs["grid_thw"].cpu(), args[0].device, tower.spatial_merge_size
    indices = {"position_ids": get_vision_position_ids(grids, merge_size)}
    bounds = {}
    if isinstance(tower, Qwen2_5_VisionTransformerPretrainedModel):
        indices["window_index"], bounds["cu_window_seqlens"] = get_vision_window_index(
            grids, spatial_merge_size=merge_size, window_size=tower.window_size, patch_size=tower.patch_size
        )
    else:
        indices["interp_indices"], indices["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merge_size,
        )
    on_device = {name: to_device(tensor, device) for name, tensor in indices.items()}
    return args, {**kwargs, "grid_thw": grids, **bounds, **on_device}
