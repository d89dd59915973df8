"""One sample as a safetensors file: stock `safetensors` reads it, and every fault is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
from safetensors import safe_open

from qwen_cache import open_cache
from qwen_cache.errors import FormatError
from qwen_cache.format import directory
from qwen_cache.format.cache import parse_sample_file, sample_file
from qwen_cache.format.shard import compress, tensor_bytes

Built = Callable[..., Path]


def as_file(folder: Path, compression: str = "none") -> bytes:
    """The first sample of a cache as a file, as a server sends it that stores with this compression."""
    row = open_cache(folder)[0].row
    stored = dict(tensor_bytes(row.entry, directory.map_shard(folder, row.shard)))
    return b"".join(sample_file(*compress(row.meta, stored, compression), 2))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_stock_safetensors_reads_it(built: Built, tmp_path: Path, compression: str) -> None:
    folder, path = built("edit-plus"), tmp_path / "a.safetensors"
    sample = open_cache(folder)[0]
    path.write_bytes(data := as_file(folder, compression))
    with safe_open(path, "np") as file:
        assert json.loads(file.metadata()["sample"])["key"] == sample.key
    read = safetensors.torch.load(data)
    assert read.keys() == sample.row.meta.tensors.keys()
    stored = [name for name in read if name != "empty_prompt_embeds"]  # which a cache returns with its prefix
    assert all((read[name] == sample[name]).all() for name in stored)
    assert parse_sample_file(memoryview(data), "a", 2).meta == sample.row.meta


@pytest.mark.parametrize("fault", ["cut", "longer", "a bit", "no metadata", "another dtype", "header", "nothing"])
def test_a_fault_is_an_error(built: Built, fault: str) -> None:
    data = bytearray(as_file(built("edit-plus")))
    if fault == "cut":
        del data[-1]
    elif fault == "longer":
        data += b"\0"
    elif fault == "a bit":
        data[-1] ^= 1
    elif fault == "no metadata":
        data = bytearray(safetensors.torch.save(safetensors.torch.load(bytes(data))))
    elif fault == "another dtype":
        data = data.replace(b'"F32"', b'"I32"', 1)
    elif fault == "header":
        data[0:8] = (1 << 40).to_bytes(8, "little")
    elif fault == "nothing":
        data.clear()
    with pytest.raises(FormatError, match="here"):
        parse_sample_file(memoryview(data), "here", 2)
