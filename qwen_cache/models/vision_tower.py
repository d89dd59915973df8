"""The vision tower of the text encoder on an accelerator: the host never waits for it, and windows go together.

Without flash-attn, transformers asks the device for the lengths of the windows three times in each layer, and makes a
call for each window: 100 in a layer for a megapixel. Here all that follows from the sizes of the images is computed on
the host, once for a pass, and windows of equal length share a call. The result agrees within the rounding of the dtype:
kernels choose by shape. So the CPU keeps the stock path, and its caches their bytes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from qwen_cache.models.devices import to_device

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
