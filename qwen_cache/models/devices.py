"""Devices: placing modules, offloading, and the bytes that a module needs."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, transform_subclass

from qwen_cache.models.hardware import ON_DEVICE, WHOLE, Placement, choose_name, piece_sizes
from qwen_cache.models.quantization import quantize

# ---- devices ---------------------------------------------------------------------------------------------------------
# Devices and dtypes by the names that users give, and what a device can do.
#
# Nothing else asks for a type of device, except for what exists on CUDA alone: so CUDA, ROCm, XPU and MPS take the same
# path. Importing changes no setting of torch; a model in float32 does (`full_float32`).


def choose_devices(names: str, option: str, preferred: int = 0) -> list[torch.device]:
    """The devices in `names`, separated by commas; DeviceError names `option`."""
    return [choose_device(name.strip(), option, preferred) for name in names.split(",")]


def choose_device(name: str, option: str, preferred: int = 0) -> torch.device:
    """`choose_name` as torch's device."""
    return torch.device(choose_name(name, option, preferred))


def accelerator() -> torch.device | None:
    """This process's current accelerator, None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_accelerator(device: torch.device) -> bool:
    """True if it is a real device other than the CPU."""
    return device.type not in ("cpu", "meta")


def device_module(device: torch.device) -> Any:
    """torch's module for this type of device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def has_streams(device: torch.device) -> bool:
    """True if it can copy from pinned host memory while it computes; MPS has no streams, and shares the memory."""
    return is_accelerator(device) and hasattr(device_module(device), "Stream")


def reports_memory(device: torch.device) -> bool:
    """True if torch can say how much of its memory is used and free: not for MPS, nor for some Intel GPUs."""
    if not is_accelerator(device) or not hasattr(device_module(device), "mem_get_info"):
        return False
    with suppress(RuntimeError):
        device_module(device).mem_get_info(device)
        return True
    return False


def total_memory(device: torch.device) -> int | None:
    """The bytes of the device's memory; None where torch cannot say."""
    return int(device_module(device).mem_get_info(device)[1]) if reports_memory(device) else None


def new_stream(device: torch.device) -> Any | None:
    """A stream of `device` that begins after all that was issued so far, such as weights; None without streams."""
    if not has_streams(device):
        return None
    module = device_module(device)
    stream = module.Stream(device)
    stream.wait_stream(module.current_stream(device))
    return stream


@contextmanager
def on_stream(stream: Any | None) -> Iterator[None]:
    """Let this thread issue its work to `stream`; its results must be copied to the host inside, or waited for."""
    if stream is None:
        yield
    else:
        with device_module(stream.device).stream(stream):
            yield


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from host memory. On devices with streams through pinned memory: then the host does not wait.

    torch keeps pinned memory until what was sent from it has arrived. Without streams nothing says when that is. An
    expanded tensor cannot be pinned.
    """
    if not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def join_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """`to_device` of each, one after the other; a single one is not copied again."""
    sent = [to_device(tensor, device) for tensor in tensors]
    return sent[0] if len(sent) == 1 else torch.cat(sent)


def full_float32() -> None:
    """Compute float32 in float32, everywhere in this process and until it ends.

    torch lets cuDNN compute convolutions in TF32, whose 10 bits give errors of 1e-3, and an environment may ask for the
    same in matrix products. These switches belong to the process, and its threads share them. torch has an
    older and a newer API for them, and refuses to read the older one where they disagree.
    """
    backends: Any = torch.backends  # the stubs lack the new switches
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for switch in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        switch.fp32_precision = "ieee"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a setting: `bfloat16` or `float32`."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]


# ---- offload ---------------------------------------------------------------------------------------------------------
# Blocks of frozen weights in host memory, which are on the device only while they compute.
#
# The device has two buffers for a block, allocated once: while one block computes, the next is copied into the other
# one on its own stream. The host's memory is pinned, so that copies are asynchronous. Weights that are trained stay on
# the device. Results are the same.

ALIGNMENT = 256  # bytes; as CUDA's allocator aligns tensors at least, so that kernels load them as vectors
ParameterSlot = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""
Order = Callable[[int, int, int], int]
"""The block that runs after block `i`, given the one before (-1: none yet) and the number of blocks."""


def there_and_back(i: int, last: int, count: int) -> int:
    """Forwards, then backwards, as in training; at the turn, the same block again."""
    backwards = i < last or (i == last and i > 0)
    return max(i - 1, 0) if backwards else min(i + 1, count - 1)


def in_a_circle(i: int, last: int, count: int) -> int:
    """Forwards, again and again: after the last block the first one is fetched for the next pass."""
    return (i + 1) % count


class WaitingBlocks:
    """Blocks whose frozen weights are in host memory; `attach` connects them to a device.

    Between the two, the modules have no such parameters, so `model.to(device)` moves everything else.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self.device = device
        self.blocks: list[nn.Module] = []
        self.slots: list[list[ParameterSlot]] = []
        self.in_host_memory: list[HostBlock] = []
        for block in blocks:  # one by one, so that the loaded weights are freed in between
            slots = list(frozen_slots(block))
            weights = [module._parameters[name].detach() for module, name in slots]  # type: ignore[union-attr]
            set_parameters(slots, [None] * len(weights))
            self.blocks.append(block)
            self.slots.append(slots)
            self.in_host_memory.append(HostBlock(weights, pinned=has_streams(device)))

    def attach(self, order: Order) -> OffloadedBlocks:
        """Let each block take its weights when it computes. Outside of its pass a weight has no data: on "meta"."""
        offloaded = OffloadedBlocks(self.in_host_memory, self.device, order)
        for i, (block, slots) in enumerate(zip(self.blocks, self.slots, strict=True)):
            set_parameters(slots, self.in_host_memory[i].without_data)
            block.register_forward_pre_hook(functools.partial(_enter, offloaded, i, slots))
            block.register_forward_hook(functools.partial(_leave, offloaded, i, slots), always_call=True)
        return offloaded


def frozen_slots(block: nn.Module) -> Iterator[ParameterSlot]:
    """The slots of all frozen parameters in a block."""
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                yield module, name


def set_parameters(slots: Sequence[ParameterSlot], weights: Sequence[Any]) -> None:
    """Replace the parameters themselves, not their data: autograd keeps those of the forward pass."""
    for (module, name), weight in zip(slots, weights, strict=True):
        module._parameters[name] = weight


def _enter(offloaded: OffloadedBlocks, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    set_parameters(slots, offloaded.take(i))


def _leave(offloaded: OffloadedBlocks, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    """Called after an exception too: recomputation raises one as soon as it has what it needs."""
    set_parameters(slots, offloaded.blocks[i].without_data)


# ---- a block in host memory ------------------------------------------------------------------------------------------


class HostMemory:
    """Consecutive bytes in host memory, in pieces that are pinned without much loss."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.size = size
        self.pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for piece in piece_sizes(size)]

    def copy_from(self, memory: Tensor, begin: int = 0) -> None:
        """Begin to copy the bytes of `memory` to those from `begin` on."""
        for piece, values in self._pairs(memory, begin):
            piece.copy_(values, non_blocking=True)

    def copy_to(self, memory: Tensor, begin: int = 0) -> None:
        """Begin to copy the bytes from `begin` on into `memory`, as many as it has."""
        for piece, values in self._pairs(memory, begin):
            values.copy_(piece, non_blocking=True)

    def _pairs(self, memory: Tensor, begin: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The parts of pieces and of `memory` that belong together."""
        end, of_piece = begin + len(memory), 0
        for piece in self.pieces:
            first, last = max(begin, of_piece), min(end, of_piece + len(piece))
            if first < last:
                yield piece[first - of_piece : last - of_piece], memory[first - begin : last - begin]
            of_piece += len(piece)


class HostBlock:
    """The frozen weights of a block as consecutive bytes in host memory."""

    def __init__(self, weights: Sequence[Tensor], *, pinned: bool) -> None:
        self.without_data = [_frozen(map_tensors(weight, _on_meta)) for weight in weights]
        """The weights on "meta": their shapes and dtypes."""
        flat = torch.empty(self.size, dtype=torch.uint8)
        for copy, weight in zip(self.weights_in(flat), weights, strict=True):
            for to, tensor in zip(inner_tensors(copy), inner_tensors(weight), strict=True):
                to.copy_(tensor)
        self.memory = HostMemory(self.size, pinned=pinned)
        self.memory.copy_from(flat)

    @cached_property
    def begins(self) -> list[int]:
        """The offset of each tensor; after the last one, the end."""
        begins = [0]
        for tensor in (tensor for weight in self.without_data for tensor in inner_tensors(weight)):
            end = begins[-1] + tensor.numel() * tensor.element_size()
            begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return begins

    @property
    def size(self) -> int:
        """Bytes."""
        return self.begins[-1]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """The weights as views of `memory`, whose first bytes are those of this block.

        They are parameters, as those of other blocks are: a compiled block would need another graph for plain tensors.
        """
        begins = iter(self.begins)

        def view(tensor: Tensor) -> Tensor:
            begin = next(begins)
            data = memory[begin : begin + tensor.numel() * tensor.element_size()]
            return data.view(tensor.dtype).view(tensor.shape)

        return [_frozen(map_tensors(weight.data, view)) for weight in self.without_data]

    def copy_to(self, memory: Tensor) -> None:
        """Begin to copy the bytes into the first ones of `memory`."""
        self.memory.copy_to(memory[: self.size])


def inner_tensors(weight: Tensor) -> list[Tensor]:
    """The plain tensors of which a quantised weight is made; of another weight, itself."""
    tensors: list[Tensor] = []
    map_tensors(weight, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def map_tensors(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to a tensor, or to each of the tensors inside a quantised one."""
    if is_traceable_wrapper_subclass(weight):
        return transform_subclass(weight, lambda _, inner: map_tensors(inner, change))
    return change(weight)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _strided_on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


# ---- two blocks on the device ----------------------------------------------------------------------------------------


@dataclass
class Buffer:
    """Memory of the device for one block, and the block whose bytes are in it, or on their way."""

    memory: Tensor
    block: int = -1
    arrived: Any = None
    """The event of the copy; None without streams."""

    def place_of(self, tensor: Tensor) -> int | None:
        """The offset of a tensor in this memory, in bytes; None for a tensor elsewhere."""
        storage = tensor.untyped_storage()
        if storage.device != self.memory.device or storage.data_ptr() != self.memory.data_ptr():
            return None
        return int(tensor.storage_offset()) * tensor.element_size()


@dataclass(frozen=True)
class SavedWeight:
    """A weight, or a view of one, that autograd saves in the forward pass of an offloaded block: where it is in it."""

    blocks: OffloadedBlocks
    block: int
    layout: Tensor
    """On "meta"."""
    places: tuple[int, ...]
    """The offset of each of its tensors in the block, in bytes."""

    def unpack(self) -> Tensor:
        """The weight on the device, valid like those of `OffloadedBlocks.take`."""
        memory, places = self.blocks.fetch(self.block).memory, iter(self.places)

        def view(tensor: Tensor) -> Tensor:
            data, begin = memory.view(tensor.dtype), next(places) // tensor.element_size()
            return data.as_strided(tensor.shape, tensor.stride(), begin)

        return map_tensors(self.layout, view)


class OffloadedBlocks:
    """The offloaded blocks: all of them in host memory, and two, which alternate, on the device."""

    def __init__(self, blocks: list[HostBlock], device: torch.device, order: Order) -> None:
        self.blocks, self.device, self.order = blocks, device, order
        self.stream = device_module(device).Stream(device) if has_streams(device) else None
        size = max(block.size for block in blocks)
        self.buffers = [
            Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(ON_DEVICE, len(blocks)))
        ]
        if self.stream is not None:
            for buffer in self.buffers:  # the last copy may be under way when nobody needs the blocks any more
                buffer.memory.record_stream(self.stream)
        self.last = -1

    def take(self, i: int) -> list[Tensor]:
        """The weights of block `i` on the device, valid until the block after the next; begins to copy the next one.

        A buffer is free by then, in training too: autograd finishes the backward pass of a block before it begins that
        of the one before, or recomputes it.
        """
        return self.blocks[i].weights_in(self.fetch(i).memory)

    def saved(self, tensor: Tensor) -> SavedWeight | None:
        """The substitute that is saved for the backward pass; None for a tensor that is no weight in a buffer."""
        for buffer in self.buffers:
            places = [buffer.place_of(inner) for inner in inner_tensors(tensor)]
            if None not in places:
                layout = map_tensors(tensor.detach(), _strided_on_meta)
                return SavedWeight(self, buffer.block, layout, tuple(places))  # type: ignore[arg-type]
        return None

    def fetch(self, i: int) -> Buffer:
        """The buffer with block `i`; begins to copy the next one into the other. It may be fetched again."""
        buffer = self._buffer_of(i) or self._copy(i, self.buffers[0])
        if buffer.arrived is not None:
            self._computing().wait_event(buffer.arrived)
        following = self.order(i, self.last, len(self.blocks))
        if self._buffer_of(following) is None:
            self._copy(following, next(other for other in self.buffers if other is not buffer))
        self.last = i
        return buffer

    def _buffer_of(self, i: int) -> Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.block == i), None)

    def _copy(self, i: int, buffer: Buffer) -> Buffer:
        """Begin to copy block `i`, once the device has computed everything that it was given so far."""
        buffer.block = i
        if self.stream is None:
            self.blocks[i].copy_to(buffer.memory)
            return buffer
        self.stream.wait_stream(self._computing())
        with device_module(self.device).stream(self.stream):
            self.blocks[i].copy_to(buffer.memory)
            buffer.arrived = self.stream.record_event()
        return buffer

    def _computing(self) -> Any:
        """The stream of the pass that calls."""
        return device_module(self.device).current_stream(self.device)


# ---- placement -------------------------------------------------------------------------------------------------------
# Where the weights of a text encoder are, and in how many bits: all on its device, quantised, or offloaded.
#
# Quantised are the linear layers of the language model, which hold nine tenths of the weights. The vision tower, norms
# and biases are not: they are small, and errors in an image's features reach every token. With either setting, an
# accelerator holds no table of token embeddings, whose rows are looked up on the host, and only two blocks of the
# vision tower at a time; with `offload` also only two layers of the language model. Where weights wait changes no
# result: the same kernels compute with the same numbers. On the CPU all weights are in host memory anyway.

SETTING = "cache.text_quantization"


def place(model: Any, device: torch.device, placement: Placement = WHOLE) -> Any:
    """Move a loaded Qwen2.5-VL or Qwen3-VL, without its `lm_head`, to its device, in place."""
    layers = _quantized_layers(model, device, placement)
    if not placement.is_partial(device):
        for _ in layers:
            pass
        return model.to(device)
    waiting = [WaitingBlocks(model.visual.blocks, device)]
    if placement.offload:
        waiting.append(WaitingBlocks(layers, device))
    else:
        for layer in layers:
            layer.to(device)
    table = model.language_model.embed_tokens
    weight = table.weight
    set_parameters([(table, "weight")], [None])  # so that model.to does not move it
    model.to(device)
    set_parameters([(table, "weight")], [weight])
    table.__class__, table.sent_to = HostEmbedding, device
    for stack in waiting:
        stack.attach(in_a_circle)
    return model


def _quantized_layers(model: Any, device: torch.device, placement: Placement) -> Iterator[nn.Module]:
    """The layers of the language model; each is quantised when it is asked for."""
    for layer in model.language_model.layers:
        if placement.quantization != "none":
            quantize(layer, placement.quantization, device)
        yield layer


class HostEmbedding(nn.Embedding):
    """A table of embeddings in host memory; the rows are sent to the device of the model."""

    sent_to: torch.device

    def forward(self, ids: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        return to_device(embedding(ids.cpu(), self.weight), self.sent_to)


# ---- live bytes ------------------------------------------------------------------------------------------------------
# Memory without data: the live bytes of tensors on torch's device "meta", counted while real modules run on it.
#
# Attention counts as a kernel that keeps no logits, which every device chooses for these sizes. What a device needs for
# itself is estimated.


def bytes_of(module: nn.Module) -> int:
    """The bytes of a module's parameters and buffers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))


def peak_of(run: Callable[[], object], *known: nn.Module) -> int:
    """The peak bytes that `run` allocates on "meta", without gradients, besides the weights of the modules `known`."""
    weights = [tensor for module in known for tensor in (*module.parameters(), *module.buffers())]
    with torch.inference_mode(), LiveBytes(weights) as live, FlashAttention():
        run()
    return int(live.peak)


_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]
_LAYOUTS: dict[torch.dtype, dict[Any, _Layout | list[_Layout | None]]] = {}
"""The layout of the new tensor, or of each of several, by function and arguments, by the default dtype, which is that
of some calls."""


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of tensors created on "meta" while entered, and their peak.

    torch computes layouts on "meta" in Python, and the blocks of a model make the same calls: one that gave a new
    tensor gives another of the same layout again.
    """

    repeats = True
    """False where every call has to run, since it is counted."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: torch would set its compiler aside for every call, and no code on "meta" is compiled."""
        return False

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now, self.peak = 0, 0
        self.sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}
        self.ends: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.layouts = _LAYOUTS.setdefault(torch.get_default_dtype(), {})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types or not self.repeats or _gives_views(function):
            return self._counted(function(*args, **kwargs))
        call = function, _without_data(args), *kwargs, _without_data(tuple(kwargs.values())) if kwargs else ()
        if (known := self.layouts.get(call)) is not None:
            return self._counted(tuple(map(_new, known)) if isinstance(known, list) else _new(known))
        result = function(*args, **kwargs)
        if _are_new(result, (*args, *kwargs.values())):
            self.layouts[call] = list(map(_layout, result)) if isinstance(result, tuple) else _layout(result)
        return self._counted(result)

    def _counted(self, result: Any) -> Any:
        for tensor in (result,) if isinstance(result, Tensor) else _tensors(result):
            if tensor.is_meta:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        number = storage._cdata
        if number in self.sizes:
            return
        self.sizes[number] = size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self.ends[number] = weakref.ref(storage, lambda _: self._free(number))

    def _free(self, storage: int) -> None:
        del self.ends[storage]
        self.now -= self.sizes.pop(storage)


class Course(LiveBytes):  # type: ignore[no-untyped-call]
    """The live bytes after every change."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.after: list[int] = [0]

    def _add(self, storage: torch.UntypedStorage) -> None:
        super()._add(storage)
        self.after.append(self.now)

    def _free(self, storage: int) -> None:
        super()._free(storage)
        self.after.append(self.now)


@contextmanager
def without_collections() -> Iterator[None]:
    """Free tensors only where their last reference ends: the moment of a collection is not that of the program."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def course_of(run: Callable[[], object], *known: nn.Module) -> list[int]:
    """The bytes that `run` holds on "meta" after every change, counted like `peak_of`."""
    weights = [tensor for module in known for tensor in (*module.parameters(), *module.buffers())]
    with without_collections(), torch.inference_mode(), Course(weights) as live, FlashAttention():
        run()
    after: list[int] = live.after
    return after


@functools.cache
def _gives_views(function: Any) -> bool:
    """True if results of a function of torch may share the memory of its arguments."""
    return any(each.alias_info is not None for each in function._schema.returns)


def _are_new(result: Any, arguments: tuple[Any, ...]) -> bool:
    """True if a call on "meta" gave a tensor of its own, or several, some of which may be None."""
    new = list(_tensors(result))
    others = len(result) - len(new) - result.count(None) if isinstance(result, tuple) else 1 - len(new)
    if not new or others or not all(tensor.is_meta and not tensor.storage_offset() for tensor in new):
        return False
    inputs = list(_tensors(arguments))
    storages = {tensor.untyped_storage()._cdata for tensor in (*inputs, *new)}
    own = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.is_meta for tensor in inputs) and len(storages) == len(own) + len(new)


def _layout(tensor: Tensor | None) -> Any:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype)


def _new(layout: _Layout | None) -> Tensor | None:
    if layout is None:
        return None
    shape, strides, dtype = layout
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among arguments or results of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _without_data(value: Any) -> Any:
    """An argument of a call, as far as the layout of the result depends on it."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple([_without_data(each) for each in value]) if isinstance(value, (tuple, list)) else (type(value), value)


class FlashAttention(TorchFunctionMode):
    """`flash_attention` in place of torch's function, which would choose no kernel on "meta"."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        chosen = flash_attention if function is F.scaled_dot_product_attention else function
        return chosen(*args, **(kwargs or {}))


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """Attention that saves queries, keys, values, the output and one number per row, like every kernel that SDPA
    chooses for these sizes; on "meta" SDPA would choose none of them."""
    mask = None if attn_mask is None else torch.zeros_like(attn_mask, dtype=query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, attn_mask=mask)[0]
    return output
