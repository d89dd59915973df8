"""The part that the transformers for batches of mixed sizes share: reading a batch, and being a stock model in place.

The readers run on the CPU and refuse, by TrainError, whatever contradicts itself. `MixedSizes` comes before the stock
class among a model's bases: it adds the `layout`, changes a stock model in place, and saves under the stock class's
name. It refuses, by ModelError, models that are hooked, sharded or not supported.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Literal, Self, cast, get_args

import torch
from jaxtyping import Bool
from torch import Tensor

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.format.sample import ImgShapes
from qwen_cache.models.devices import OffloadedBlocks
from qwen_train.model.kernels import FLASH, Kernel
from qwen_train.model.saved_tensors import OffloadedInputs

Layout = Literal["padded", "packed"]


# ---- the contents of a batch -----------------------------------------------------------------------------------------


def refuse_unsupported(**arguments: object) -> None:
    """Raise TrainError for arguments of the stock model that this one does not implement."""
    for name, value in arguments.items():
        if value is not None:
            raise TrainError(f"{name} is not supported", where="forward", expected="None", found=type(value).__name__)


def refuse_other_batch_size(batch_size: int, **arguments: Tensor) -> None:
    """Raise TrainError for another batch size; a single row would be broadcast silently."""
    for name, rows in arguments.items():
        if len(rows) != batch_size:
            raise TrainError(
                "one row per sample is needed",
                where=name,
                expected=f"{batch_size} samples, as in hidden_states",
                found=f"{len(rows)}",
            )


def image_shapes_per_sample(img_shapes: Sequence[Any], batch_size: int) -> list[ImgShapes]:
    """The image shapes of each sample, from either form: `[(1, h, w), ...]` for all, or one such list per sample."""
    shared = bool(img_shapes) and all(_is_image_shape(entry) for entry in img_shapes)
    samples = [img_shapes] * batch_size if shared else img_shapes
    for sample in samples:
        if not isinstance(sample, list | tuple) or not sample or not all(_is_image_shape(image) for image in sample):
            raise TrainError(
                "a sample's images cannot be read",
                where="img_shapes",
                expected="[(1, h, w), ...] for the whole batch, or one such list per sample",
                found=repr(sample),
            )
    if len(samples) != batch_size:
        raise TrainError(
            "one list of images per sample is needed",
            where="img_shapes",
            expected=f"{batch_size} samples, as in hidden_states",
            found=f"{len(samples)}",
        )
    return [tuple((t, h, w) for t, h, w in sample) for sample in samples]


def _is_image_shape(entry: object) -> bool:
    return isinstance(entry, list | tuple) and len(entry) == 3 and all(isinstance(n, int) and n > 0 for n in entry)


def text_validity(encoder_hidden_states_mask: Tensor | None, batch_size: int, text_length: int) -> Bool[Tensor, "B L"]:
    """The text mask as booleans on the CPU. Copying it there, if necessary, is the only wait for the device."""
    if encoder_hidden_states_mask is None:
        return torch.ones(batch_size, text_length, dtype=torch.bool)
    if encoder_hidden_states_mask.shape != (batch_size, text_length):
        raise TrainError(
            "the text mask does not fit the text",
            where="encoder_hidden_states_mask",
            expected=f"shape {(batch_size, text_length)}",
            found=f"{tuple(encoder_hidden_states_mask.shape)}",
        )
    return encoder_hidden_states_mask.to("cpu", torch.bool)


def prefix_mask(lengths: Sequence[int], row_length: int) -> Bool[Tensor, "B N"]:
    """True for the first `lengths[i]` tokens of row i."""
    return torch.arange(row_length) < torch.tensor(lengths)[:, None]


# ---- the model -------------------------------------------------------------------------------------------------------


class MixedSizes:
    """The part of a transformer for mixed sizes that does not depend on the family of models."""

    _stock_class: ClassVar[Any]
    _block_class: ClassVar[type[Any]]
    """Takes the place of the stock blocks' class: same modules and parameters."""
    _processor_class: ClassVar[type[Any]]
    """Its attention processor."""
    UNREACHED: ClassVar[tuple[str, ...]]
    """Parameters of the last block that get no gradient."""
    ROW_ARGUMENTS: ClassVar[int]
    """The first arguments of a block, which are what the block before returns."""
    offloaded_blocks: OffloadedBlocks | None = None
    """The blocks of train.offload_blocks."""
    offloaded_inputs: OffloadedInputs | None = None
    """With train.offload_activations."""
    recomputed_blocks: Collection[torch.nn.Module] = ()
    """The blocks that gradient checkpointing recomputes."""
    keeps_attention: bool = True
    """Compiled blocks that are recomputed keep the output of their attention."""
    attention_kernel: Kernel = FLASH
    """The kernel of rows in segments, on CUDA in half precision; a chosen attention backend comes before it."""
    is_compiled: bool = False
    """True after `compile_blocks`: batches are then read so that few graphs serve all."""
    _layout: Layout = "padded"

    @classmethod
    def from_stock(cls, model: Any) -> Self:
        """Change the class of `model` in place and return it: same parameters, adapters and quantised weights.

        Optimizers and wrappers keep their references. Hooks that replace the instance's `forward` (offloading, context
        parallelism, FSDP) must be added afterwards.

        Raises:
            ModelError: a model with such a hook, of another class, or not supported.
        """
        replaced = [name or "the model" for name, module in model.named_modules() if "forward" in vars(module)]
        if type(model) is not cls._stock_class or replaced or model._parallel_config is not None:
            raise ModelError(
                f"only a plain {cls._stock_class.__name__} can become one for mixed sizes",
                expected="no offloading hooks, context parallelism or FSDP on it yet",
                found=f"a hook on {replaced[0]}" if replaced else type(model).__name__,
                do="call from_stock right after from_pretrained",
            )
        cls._refuse_checkpoint(model.config)  # before the model is changed
        model.__class__ = cls
        model._adopt_blocks()
        return cast(Self, model)

    @classmethod
    def _refuse_checkpoint(cls, config: Any) -> None:
        """Raise ModelError for a configuration that is not supported."""

    def _adopt_blocks(self: Any) -> None:
        """Let the stock blocks take mixed sizes too; their modules and parameters stay the same."""
        self._refuse_checkpoint(self.config)
        for block in self.transformer_blocks:
            block.__class__ = self._block_class
            processor = self._processor_class()
            processor._attention_backend = block.attn.processor._attention_backend
            block.attn.set_processor(processor)

    def _inputs_of_blocks(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """The rows; for compiled blocks like the output of a block, or the first one would need graphs of its own: no
        view, and with a gradient."""
        if not self.is_compiled:
            return rows
        rows = tuple(row.clone() for row in rows)
        return tuple(row if row.requires_grad else row.requires_grad_(torch.is_grad_enabled()) for row in rows)

    @property
    def layout(self) -> Layout:
        """The layout: "padded" (the default: rows of equal length with a mask) or "packed" (one row of valid tokens).

        It is not part of the configuration and may change between calls; ModelError for another value.
        """
        return self._layout

    @layout.setter
    def layout(self, layout: str) -> None:
        if layout not in get_args(Layout):
            raise ModelError("no such layout", where="layout", expected=" or ".join(get_args(Layout)), found=layout)
        self._layout = cast(Layout, layout)

    def to_json_string(self) -> str:
        """The configuration under the stock class's name, so that pipelines and other trainers load saved models."""
        stock = json.loads(super().to_json_string())  # type: ignore[misc]
        config = {**stock, "_class_name": self._stock_class.__name__}
        return json.dumps(config, indent=2, sort_keys=True) + "\n"
