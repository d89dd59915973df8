"""The modulation of a frozen transformer from a table: a third of its weights is never loaded.

What `img_mod` and `txt_mod` of every block and `norm_out.linear` give depends on the timestep alone, and bfloat16 has
733 timesteps from 0.02 to 1. So it is computed once, block by block from the checkpoint's files, for all that can
occur; each step then reads its rows from a file that is mapped, not loaded. The sums are in float32 and rounded once:
a row may be one rounding away from what a device computes. A quantised base has the rows of the weights before that.
Refused: float32, whose timesteps have no end; a LoRA on these layers; folders saved quantised; unknown timesteps.
"""

from __future__ import annotations

import functools
import json
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from accelerate import PartialState
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel, QwenTimestepProjEmbeddings
from diffusers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from jaxtyping import BFloat16
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from qwen_cache.console import console
from qwen_cache.errors import ConfigError, ModelError, TrainError
from qwen_cache.settings.train import TrainConfig
from qwen_cache.storage.durable import allocate, cache_home, sync, whole_file
from qwen_train.flow import NoiseSchedule
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

VERSION = 1  # goes up with any change that changes a row
EMBEDDER = tuple(f"time_text_embed.timestep_embedder.linear_{i}" for i in (1, 2))
OFF = "set train.tabulated_modulation=false"
DIGEST = 16  # bytes of xxh3-128


# ---- what is tabulated -----------------------------------------------------------------------------------------------


def columns(config: Mapping[str, Any]) -> dict[str, slice]:
    """The linear layers whose outputs make up a row, in their order, and which part of it each of them is."""
    width = config["num_attention_heads"] * config["attention_head_dim"]
    layers = [f"transformer_blocks.{i}.{kind}_mod.1" for i in range(config["num_layers"]) for kind in ("img", "txt")]
    parts = {name: slice(6 * width * i, 6 * width * (i + 1)) for i, name in enumerate(layers)}
    end = 6 * width * len(layers)
    return {**parts, "norm_out.linear": slice(end, end + 2 * width)}


def timesteps_from(lowest: float) -> BFloat16[Tensor, " T"]:
    """Every bfloat16 from `lowest`, rounded, to 1; and zero, by which `zero_cond_t` modulates control images."""
    up_to_one = torch.arange(0x3F80 + 1, dtype=torch.int16).view(torch.bfloat16)
    rounded = torch.tensor(lowest, dtype=torch.float32).bfloat16()
    return up_to_one[(up_to_one >= rounded) | (up_to_one == 0)]


def check_settings(settings: TrainConfig, config: Mapping[str, Any]) -> None:
    """Refuse what a table cannot do, for a transformer of that config.json."""
    if settings.method == "full":
        raise ConfigError("train.tabulated_modulation is for frozen weights", found="train.method=full", do=OFF)
    if settings.mixed_precision != "bf16":
        raise ConfigError(
            "train.tabulated_modulation needs bfloat16: in float32 there are too many timesteps for a table",
            found=f"train.mixed_precision={settings.mixed_precision}",
            do=f"set train.mixed_precision=bf16, or {OFF}",
        )
    targets = settings.lora.target_modules
    if trained := [name for name in (*columns(config), *EMBEDDER) if _targeted(name, targets)]:
        raise ConfigError(
            "train.tabulated_modulation is for frozen weights, and the LoRA is on some of them",
            where="train.lora.target_modules",
            found=trained[0],
            do=f"name other modules, or {OFF}",
        )
    check_model(config)


def check_model(config: Mapping[str, Any]) -> None:
    """ModelError where a table cannot be made of a transformer of that config.json."""
    if "quantization_config" in config:
        do = "name the unquantised model, with model.quantization; or set tabulated_modulation=false"
        raise ModelError("a table is made of unquantised weights, and this transformer was saved quantised", do=do)
    if config.get("use_additional_t_cond"):
        do = "set tabulated_modulation=false"
        raise ModelError("this transformer's modulation depends on more than the timestep", do=do)


def _targeted(name: str, targets: list[str] | str) -> bool:
    """As peft reads them; what is no regular expression it refuses itself."""
    if not isinstance(targets, str):
        return any(name == target or name.endswith(f".{target}") for target in targets)
    with suppress(re.error):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return False


# ---- the table on disk -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """The rows of some timesteps, mapped."""

    rows: Any
    """`[T, W]`, the bits of bfloat16 as uint16."""
    place: dict[int, int]
    """The row of each timestep, by its bits."""


class Checkpoint:
    """The tensors of a transformer's folder, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, index = folder, folder / SAFE_WEIGHTS_INDEX_NAME
        self.files: dict[str, str] = {}
        if index.is_file():
            self.files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]

    def __getitem__(self, name: str) -> Tensor:
        path = self.folder / self.files.get(name, SAFETENSORS_WEIGHTS_NAME)
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"weights cannot be read: {error}", where=path, found=name, do="download this part again"
            ) from None

    def fingerprint(self, layers: Iterable[str]) -> str:
        """One hash over the contents of these layers."""
        digest = xxhash.xxh3_128(f"modulation {VERSION}".encode())
        for name in (f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")):
            tensor = self[name]
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            raw: Any = tensor.contiguous().view(torch.uint8).numpy()
            digest.update(raw)
        return digest.hexdigest()


def open_table(checkpoint: Checkpoint, fingerprint: str, config: Mapping[str, Any], timesteps: Tensor) -> Table:
    """The table of these weights and timesteps; it is made where there is none, or a damaged one."""
    bits = timesteps.view(torch.int16).tolist()
    name = xxhash.xxh3_128_hexdigest(f"{fingerprint} {bits}".encode())
    path = cache_home() / "modulation" / f"{name}.npy"
    if not _is_whole(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _make(path, checkpoint, columns(config), timesteps)
        except OSError as error:
            do = f"make room there, or let XDG_CACHE_HOME name another folder; or {OFF}"
            raise TrainError("the table cannot be kept", where=path, found=error.strerror, do=do) from None
    return Table(np.load(path, mmap_mode="r"), {value: i for i, value in enumerate(bits)})


def _make(path: Path, checkpoint: Checkpoint, parts: Mapping[str, slice], timesteps: Tensor) -> None:
    """Write it: on disk before it gets its name, with its digest behind the array. Two that do so do no harm."""
    shape = len(timesteps), max(part.stop for part in parts.values())
    console().print(f"tabulating the modulation of {shape[0]} timesteps, once for these weights")
    with whole_file(path, shared=True) as temporary:
        rows = np.lib.format.open_memmap(temporary, "w+", np.uint16, shape)
        allocate(temporary)
        embedding = embed(checkpoint, timesteps)
        for layer, part in parts.items():
            rows[:, part] = _outputs(checkpoint, layer, embedding).view(torch.uint16).numpy()
        rows.flush()
        del rows  # Windows renames no mapped file
        with open(temporary, "ab") as file:
            file.write(_digest(path, np.memmap(temporary, mode="r")))
            file.flush()
            sync(file)


@torch.no_grad()
def embed(checkpoint: Checkpoint, timesteps: Tensor) -> BFloat16[Tensor, "T D"]:
    """What all the layers take: the timesteps' embedding, by the stock module, and SiLU of it."""
    names = [f"{layer}.{kind}" for layer in EMBEDDER for kind in ("weight", "bias")]
    weights = {name.removeprefix("time_text_embed."): checkpoint[name] for name in names}
    with torch.device("meta"):
        module = QwenTimestepProjEmbeddings(len(weights["timestep_embedder.linear_1.bias"]))
    module.load_state_dict(weights, assign=True)
    return F.silu(module.to(torch.bfloat16)(timesteps, timesteps))


def _outputs(checkpoint: Checkpoint, layer: str, embedding: Tensor) -> BFloat16[Tensor, "T W"]:
    """Of one linear layer in bfloat16, summed in float32, which every CPU does well."""
    weight, bias = (checkpoint[f"{layer}.{kind}"].bfloat16().float() for kind in ("weight", "bias"))
    return F.linear(embedding.float(), weight, bias).bfloat16()


def _digest(path: Path, data: Any) -> bytes:
    """Of the content and the name, so that no other table passes under it."""
    digest = xxhash.xxh3_128(path.name.encode())
    digest.update(data)
    return digest.digest()


def _is_whole(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return _digest(path, data[:-DIGEST]) == data[-DIGEST:]
    except (OSError, ValueError):  # an empty file cannot be mapped
        return False


# ---- the model without those weights ---------------------------------------------------------------------------------


class Columns(nn.Module):
    """In place of a layer: its part of the rows."""

    def __init__(self, part: slice) -> None:
        super().__init__()
        self.part = part

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, rows: Tensor) -> Tensor:
        """Not compiled: the part is another in each block, which would each be compiled for itself."""
        return rows[:, self.part]


class TimestepRows(nn.Module):
    """In place of the timestep's embedding: for each timestep its row, on the device of the hidden states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.tables: Sequence[Table] = ()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, timestep: Tensor, hidden_states: Tensor, addition_t_cond: None = None) -> BFloat16[Tensor, "B W"]:
        if timestep.dtype != torch.bfloat16:
            raise TrainError(
                "the table of the modulation is for bfloat16", where="timestep", found=timestep.dtype, do=OFF
            )
        rows = [self._row(bits, t) for bits, t in zip(timestep.view(torch.int16).tolist(), timestep, strict=True)]
        return torch.from_numpy(np.stack(rows)).view(torch.bfloat16).to(hidden_states.device)

    def _row(self, bits: int, timestep: Tensor) -> Any:
        for table in self.tables:
            if bits in table.place:
                return table.rows[table.place[bits]]
        raise TrainError(
            "the table of the modulation has no such timestep", where="timestep", found=f"{float(timestep):.6g}", do=OFF
        )


class TabulatedTransformer2DModel(QwenImageMultiResTransformer2DModel):
    """The transformer with `Columns` and `TimestepRows` for its modulation; `tabulate` gives it the rows."""

    _keys_to_ignore_on_load_unexpected: ClassVar = [
        r"^time_text_embed\.",
        r"^norm_out\.linear\.",
        r"^transformer_blocks\.\d+\.(img|txt)_mod\.",
    ]

    @functools.wraps(QwenImageTransformer2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parts = columns(self.config)
        for i, block in enumerate(self.transformer_blocks):
            block.img_mod = Columns(parts[f"transformer_blocks.{i}.img_mod.1"])
            block.txt_mod = Columns(parts[f"transformer_blocks.{i}.txt_mod.1"])
        self.norm_out.silu, self.norm_out.linear = nn.Identity(), Columns(parts["norm_out.linear"])
        self.time_text_embed = TimestepRows(parts["norm_out.linear"].stop)

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise ModelError("this transformer lacks the weights of its modulation, and is not saved as a whole", do=OFF)


def tabulate(transformer: Any, folder: Path, schedule: NoiseSchedule, sigmas: Sequence[float] = ()) -> None:
    """Give a transformer that was loaded from `folder` the rows of the schedule's noise levels, and of these others.

    Of the processes of a machine, one makes what is missing while the others wait.
    """
    if not schedule.shift_terminal:
        raise ModelError(
            "noise levels have no lower bound, so there are too many for a table",
            where="scheduler_config.json",
            expected="shift_terminal above 0",
            found=schedule.shift_terminal,
            do=OFF,
        )
    scheduled, others = timesteps_from(schedule.shift_terminal), torch.tensor(sigmas, dtype=torch.float32).bfloat16()
    others = torch.tensor(sorted(set(others.tolist()) - set(scheduled.tolist())), dtype=torch.bfloat16)
    checkpoint = Checkpoint(folder)
    with PartialState().local_main_process_first():
        fingerprint = checkpoint.fingerprint([*EMBEDDER, *columns(transformer.config)])
        transformer.time_text_embed.tables = [
            open_table(checkpoint, fingerprint, transformer.config, each) for each in (scheduled, others) if len(each)
        ]
