"""Loading a transformer: from a single file, with tabulated modulation, as the class that trains it."""

from __future__ import annotations

import functools
import mmap
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from accelerate import PartialState, init_empty_weights
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel, QwenTimestepProjEmbeddings
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from jaxtyping import BFloat16
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError, first_line
from qwen_cache.models.devices import to_device
from qwen_cache.models.folder import ModelFolder, read_config, shards_of
from qwen_cache.models.loading import from_config
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.models.single_file import INT8, SingleFile
from qwen_cache.models.stored import check_shapes, map_file, packed, row_scales, stored, unpacked
from qwen_cache.storage.files import allocate, cache_home, sync, whole_file
from qwen_cache.storage.remembered import remembered
from qwen_cache.terminal import console
from qwen_train.flow import NoiseSchedule
from qwen_train.model.combinations import EMBEDDER, NO_TABLE, class_name, columns
from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

# ---- modulation ------------------------------------------------------------------------------------------------------
# Tabulated modulation of a frozen transformer: a third of its weights is never loaded.
#
# The outputs of `img_mod` and `txt_mod` of every block and of `norm_out.linear` depend only on the timestep, and
# bfloat16 has 733 timesteps from 0.02 to 1. They are computed once for all timesteps, layer by layer from the
# checkpoint's files; each step then reads its rows from a memory-mapped file. Sums are in float32 and rounded once, so
# a row may differ by one rounding from a device's result. With quantisation on loading, the rows are those of the
# unquantised weights. Of a single file in fp8 or GGUF the rows are those of its unpacked weights. Refused: float32,
# which has too many timesteps; a LoRA on these layers; folders saved quantised; unknown timesteps.

VERSION = 1  # increase it with every change that affects a row
DIGEST = 16  # bytes of xxh3-128


# ---- what is tabulated -----------------------------------------------------------------------------------------------


def timesteps_from(lowest: float) -> BFloat16[Tensor, " T"]:
    """`[T]`: every bfloat16 from `lowest` (rounded) to 1, and 0, with which `zero_cond_t` modulates control images."""
    up_to_one = torch.arange(0x3F80 + 1, dtype=torch.int16).view(torch.bfloat16)
    rounded = torch.tensor(lowest, dtype=torch.float32).bfloat16()
    return up_to_one[(up_to_one >= rounded) | (up_to_one == 0)]


# ---- the table on disk -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Memory-mapped rows of some timesteps."""

    rows: Any
    """`[T, W]`: the bits of bfloat16 as uint16."""
    row_of: dict[int, int]
    """The row of each timestep, by the timestep's bits."""


class Checkpoint:
    """The tensors of a transformer's folder, each read on access."""

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / SAFE_WEIGHTS_INDEX_NAME
        self.files: dict[str, str] = {}
        if index.is_file():
            self.files = shards_of(index)

    def __getitem__(self, name: str) -> Tensor:
        path = self.folder / self.files.get(name, SAFETENSORS_WEIGHTS_NAME)
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"weights cannot be read: {error}", where=path, found=name, do="download this component again"
            ) from None

    def fingerprint(self, layers: Sequence[str]) -> str:
        """One hash over the weights and biases of these layers, read again only when a file has changed."""
        paths = self.paths(layers)
        if not all(path.is_file() for path in paths):
            return self._hash(layers)  # which says what is missing
        return remembered(f"modulation {VERSION} {list(layers)}", paths, lambda: self._hash(layers))

    def paths(self, layers: Sequence[str]) -> list[Path]:
        """The files with these layers."""
        files = sorted({self.files.get(f"{layer}.weight", SAFETENSORS_WEIGHTS_NAME) for layer in layers})
        return [self.folder / name for name in files]

    def _hash(self, layers: Sequence[str]) -> str:
        digest = xxhash.xxh3_128(f"modulation {VERSION}".encode())
        for name in (f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")):
            tensor = self[name]
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            raw: Any = tensor.contiguous().view(torch.uint8).numpy()
            digest.update(raw)
        return digest.hexdigest()


class FileCheckpoint(Checkpoint):
    """The same of a single file; fp8 and packed weights are unpacked."""

    def __init__(self, file: SingleFile) -> None:
        self.file, self.whole = file, map_file(file)

    def __getitem__(self, name: str) -> Tensor:
        return unpacked(self.whole, self.file.tensors[name])

    def paths(self, layers: Sequence[str]) -> list[Path]:
        return [self.file.path]


def open_table(checkpoint: Checkpoint, fingerprint: str, config: Mapping[str, Any], timesteps: Tensor) -> Table:
    """The table of these weights and timesteps; written first if it is missing or damaged."""
    bits = timesteps.view(torch.int16).tolist()
    name = xxhash.xxh3_128_hexdigest(f"{fingerprint} {bits}".encode())
    path = cache_home() / "modulation" / f"{name}.npy"
    if not _is_intact(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, checkpoint, columns(config), timesteps)
        except OSError as error:
            do = f"free disk space, or set XDG_CACHE_HOME to another folder; or {NO_TABLE}"
            raise TrainError("the table cannot be written", where=path, found=error.strerror, do=do) from None
    return Table(np.load(path, mmap_mode="r"), {value: i for i, value in enumerate(bits)})


def _make(path: Path, checkpoint: Checkpoint, parts: Mapping[str, slice], timesteps: Tensor) -> None:
    """Write the table atomically, with its digest after the array; two processes may do so at once."""
    shape = len(timesteps), max(part.stop for part in parts.values())
    console().print(f"tabulating the modulation of {shape[0]} timesteps, once for these weights")
    with whole_file(path, shared=True) as temporary:
        rows = np.lib.format.open_memmap(temporary, "w+", np.uint16, shape)
        allocate(temporary)
        embedding = embed(checkpoint, timesteps)
        for layer, part in parts.items():
            rows[:, part] = _outputs(checkpoint, layer, embedding).view(torch.uint16).numpy()
        rows.flush()
        del rows  # Windows cannot rename a mapped file
        with open(temporary, "ab") as file:
            file.write(_digest(path, np.memmap(temporary, mode="r")))
            file.flush()
            sync(file)


@torch.no_grad()
def embed(checkpoint: Checkpoint, timesteps: Tensor) -> BFloat16[Tensor, "T D"]:
    """The input of all the layers: SiLU of the timesteps' embedding, by the stock module."""
    names = [f"{layer}.{kind}" for layer in EMBEDDER for kind in ("weight", "bias")]
    weights = {name.removeprefix("time_text_embed."): checkpoint[name] for name in names}
    with torch.device("meta"):
        module = QwenTimestepProjEmbeddings(len(weights["timestep_embedder.linear_1.bias"]))
    module.load_state_dict(weights, assign=True)
    return F.silu(module.to(torch.bfloat16)(timesteps, timesteps))


def _outputs(checkpoint: Checkpoint, layer: str, embedding: Tensor) -> BFloat16[Tensor, "T W"]:
    """The outputs of one linear layer in bfloat16, summed in float32, which every CPU does fast."""
    weight, bias = (checkpoint[f"{layer}.{kind}"].bfloat16().float() for kind in ("weight", "bias"))
    return F.linear(embedding.float(), weight, bias).bfloat16()


def _digest(path: Path, data: Any) -> bytes:
    """The digest of content and name, so that no other table passes under this name."""
    digest = xxhash.xxh3_128(path.name.encode())
    digest.update(data)
    return digest.digest()


def _is_intact(path: Path) -> bool:
    """True if the digest at the end of the file is that of its content; read again only when the file has changed."""
    try:
        return bool(remembered("modulation table", [path], lambda: _intact_digest(path)))
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


def _intact_digest(path: Path) -> str:
    """The digest of an intact table; nothing for another file."""
    with open(path, "rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    digest = _digest(path, data[:-DIGEST])
    return digest.hex() if digest == data[-DIGEST:] else ""


# ---- the model without those weights ---------------------------------------------------------------------------------


class Columns(nn.Module):
    """Replaces a layer by its columns of the rows."""

    def __init__(self, columns: slice) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, rows: Tensor) -> Tensor:
        return rows[:, self.columns]


class TimestepRows(nn.Module):
    """Replaces the timestep's embedding by its row, on the device of the hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.tables: Sequence[Table] = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, timestep: Tensor, hidden_states: Tensor, addition_t_cond: None = None) -> BFloat16[Tensor, "B W"]:
        if timestep.dtype != torch.bfloat16:
            raise TrainError(
                "the modulation table is for bfloat16", where="timestep", found=timestep.dtype, do=NO_TABLE
            )
        rows = [self._row(bits, t) for bits, t in zip(timestep.view(torch.int16).tolist(), timestep, strict=True)]
        return to_device(torch.from_numpy(np.stack(rows)).view(torch.bfloat16), hidden_states.device)

    def _row(self, bits: int, timestep: Tensor) -> Any:
        for table in self.tables:
            if bits in table.row_of:
                return table.rows[table.row_of[bits]]
        raise TrainError(
            "the modulation table does not have this timestep",
            where="timestep",
            found=f"{float(timestep):.6g}",
            do=NO_TABLE,
        )


class TabulatedTransformer2DModel(QwenImageMultiResTransformer2DModel):
    """The transformer with `Columns` and `TimestepRows` in place of its modulation layers; `tabulate` sets the rows."""

    _keys_to_ignore_on_load_unexpected: ClassVar = [
        r"^time_text_embed\.",
        r"^norm_out\.linear\.",
        r"^transformer_blocks\.\d+\.(img|txt)_mod\.",
    ]

    @functools.wraps(QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parts, width = columns(self.config), 6 * self.inner_dim
        for block in self.transformer_blocks:
            block.img_mod, block.txt_mod = Columns(slice(0, width)), Columns(slice(width, 2 * width))
        self.norm_out.silu, self.norm_out.linear = nn.Identity(), Columns(parts["norm_out.linear"])
        self.time_text_embed = TimestepRows(parts["norm_out.linear"].stop)

    def _embeddings_of_blocks(self, temb: Tensor) -> Iterable[Tensor]:
        return torch.split(temb, 12 * self.inner_dim, dim=1)[: len(self.transformer_blocks)]

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise ModelError("this transformer lacks its modulation weights, so it cannot be saved whole", do=NO_TABLE)


def tabulate(
    transformer: Any, weights: Path | SingleFile, schedule: NoiseSchedule, sigmas: Sequence[float] = ()
) -> None:
    """Set the rows for the schedule's noise levels and for `sigmas`, in a transformer loaded from `weights`, a folder
    or a single file.

    On each machine one process writes missing tables while the others wait.
    """
    if not schedule.shift_terminal:
        raise ModelError(
            "noise levels have no lower bound, so there are too many for a table",
            where="scheduler_config.json",
            expected="shift_terminal above 0",
            found=schedule.shift_terminal,
            do=NO_TABLE,
        )
    scheduled, others = timesteps_from(schedule.shift_terminal), torch.tensor(sigmas, dtype=torch.float32).bfloat16()
    others = torch.tensor(sorted(set(others.tolist()) - set(scheduled.tolist())), dtype=torch.bfloat16)
    checkpoint = Checkpoint(weights) if isinstance(weights, Path) else FileCheckpoint(weights)
    with PartialState().local_main_process_first():
        fingerprint = checkpoint.fingerprint([*EMBEDDER, *columns(transformer.config)])
        transformer.time_text_embed.tables = [
            open_table(checkpoint, fingerprint, transformer.config, each) for each in (scheduled, others) if len(each)
        ]


# ---- single file -----------------------------------------------------------------------------------------------------
# Load a transformer from a single file (`qwen_cache/models/single_file.py`) by diffusers' single-file loader.
#
# The file is mapped, not read into memory; processes of one machine share its bytes. bf16, f16 and f32 weights are
# converted to the wanted dtype. The matrices of the blocks stay quantised: fp8 with the file's own scale, one per row;
# int8 with its rotation, multiplied in 8 bits; GGUF as in diffusers, unpacked for each product. What else is quantised
# is unpacked. No weight is rounded except by the conversion to the wanted dtype. Refused: names or shapes that are not
# the model's.


def load_single_file(
    kind: type[Any],
    model: ModelFolder,
    dtype: torch.dtype,
    *,
    few_rows: Collection[str] = (),
    backward_in_8_bits: bool = True,
    unpack: bool = False,
) -> Any:
    """The transformer of class `kind` from the model's single file, on the CPU; ModelError if it does not fit.

    Layers with a part of `few_rows` in their name never multiply in 8 bits. `unpack` leaves none quantised.
    """
    file = model.transformer_file
    assert file is not None
    folder = model.component("transformer")
    check_parameters(kind, file, kind.load_config(folder))
    unread = [re.compile(pattern) for pattern in kind._keys_to_ignore_on_load_unexpected or ()]
    names = [name for name in file.tensors if not any(pattern.search(name) for pattern in unread)]
    try:
        whole = map_file(file)
        quantised = set() if unpack else file.quantised.intersection(names)
        state = {name: unpacked(whole, file.tensors[name]).to(dtype) for name in names if name not in quantised}
        if file.quantization == "gguf":
            state |= {name: packed(stored(whole, file.tensors[name]), file.tensors[name]) for name in quantised}
            transformer = kind.from_single_file(
                state,
                config=str(folder),
                torch_dtype=dtype,
                quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=dtype),
                local_files_only=True,
            )
        else:
            with init_empty_weights():
                transformer = from_config(kind, kind.load_config(folder)).eval()
            transformer.load_state_dict(state, strict=False, assign=True)
            for name in quantised:
                layer, tensor = transformer.get_submodule(name.removesuffix(".weight")), file.tensors[name]
                products = tensor.dtype == INT8 and not set(name.split(".")) & set(few_rows)
                options = {"products": products, "backward": backward_in_8_bits}
                QuantizedLinear.make(
                    layer, stored(whole, tensor), row_scales(whole, tensor), group=tensor.group, **options
                )
    except torch.OutOfMemoryError:
        raise  # the file is not the reason
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the transformer cannot be loaded: {first_line(error)}", where=file.path) from None
    return transformer


def check_parameters(kind: type[Any], file: SingleFile, config: Mapping[str, Any]) -> None:
    """ModelError unless the file has the parameters of the class with this config.json, in their shapes."""
    with torch.device("meta"):
        stock = from_config(getattr(kind, "_stock_class", kind), config)
    check_shapes(file, stock)


# ---- stock -----------------------------------------------------------------------------------------------------------
# The classes of a transformer by `_class_name` in its config.json: diffusers' own, and ours for training.
#
# Other classes are refused.

TRAINED_CLASSES = (QwenImageMultiResTransformer2DModel, QwenImage21MultiResTransformer2DModel)


def stock_class(folder: Path) -> Any:
    """The class in diffusers of the transformer in `folder`; ModelError for another one, or without a config.json."""
    import diffusers

    return getattr(diffusers, class_name(read_config(folder / "config.json"), folder))


def trained_class(config: Mapping[str, Any], where: object = "config.json") -> type[Any]:
    """Our class for a transformer with this config.json; ModelError for another one."""
    name = class_name(config, where)
    kinds: dict[str, type[Any]] = {each._stock_class.__name__: each for each in TRAINED_CLASSES}
    return kinds[name]
