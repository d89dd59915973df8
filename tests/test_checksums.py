"""Our files are read as they were written, or refused: folders with checksums.json, and safetensors files.

The judge of a safetensors file is its content: a changed byte that changes none is no damage.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.models.folder import check_component
from qwen_cache.storage import remembered
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remembered import (
    KEY,
    NAME,
    RESTORE,
    ZEROS,
    check_safetensors,
    find_fault,
    sealed,
    write_checksums,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tmp_path / "transformer"
    (out / "below").mkdir(parents=True)
    (out / "config.json").write_text("{}", encoding="utf-8")
    (out / "below" / "a.safetensors").write_bytes(bytes(100))
    write_checksums(out)
    return out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lora.safetensors"
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1, 2], dtype=torch.uint8)}
    write_durably(path, *sealed(save(tensors, {"prompt": 'ein "Haus", größer\n', "format": "pt", "z": ""})))
    return path


def single_bits(data: bytes) -> Iterator[bytes]:
    """The data with each of its bytes changed in one bit, another one each time."""
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1 << i % 8
        yield bytes(changed)


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_every_byte_of_every_file_counts(folder: Path) -> None:
    assert find_fault(folder) is None
    listed = json.loads((folder / NAME).read_bytes())["files"]
    assert listed == {
        name: {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
        for name, data in (("config.json", b"{}"), ("below/a.safetensors", bytes(100)))
    }
    for path in filter(Path.is_file, folder.rglob("*")):
        whole = path.read_bytes()
        for changed in [*single_bits(whole), whole + b"\n", whole[:-1], b"", b"[]", b"{}{", 100_000 * b"["]:
            if changed != whole:
                path.write_bytes(changed)
                fault = find_fault(folder)
                assert fault is not None, changed
                assert fault.where == path
        path.write_bytes(whole)
    assert find_fault(folder) is None


def test_a_changed_file_is_told_with_both_values(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text("[]", encoding="utf-8")
    before, after = map(xxhash.xxh3_128_hexdigest, (b"{}", b"[]"))
    with pytest.raises(ModelError) as error:
        check_component(folder)
    assert str(error.value) == (
        f"{path}: this file was changed after it was written (expected xxh3-128 {before}, found {after})\n"
        f"  → restore the folder from a copy; if it was changed on purpose, remove its {NAME}"
    )
    path.write_text("{ }", encoding="utf-8")
    with pytest.raises(ModelError, match=r"\(expected 2 bytes, found 3\)"):
        check_component(folder)
    (folder / NAME).unlink()
    check_component(folder)  # any other model


def test_a_list_with_a_key_twice_is_none(folder: Path) -> None:
    text = (folder / NAME).read_text(encoding="utf-8").replace('"files": {', '"files": {}, "files": {')
    (folder / NAME).write_bytes(
        remembered.with_own_hash(text.rpartition('"xxh3_128"')[0] + f'"xxh3_128": "{ZEROS}"}}\n')
    )
    fault = find_fault(folder)
    assert fault
    assert (fault.what, fault.where) == ("this is not a list of checksums", folder / NAME)


def test_missing_and_additional_files_are_named(folder: Path) -> None:
    (folder / "notes.txt").write_text("no loader reads this", encoding="utf-8")
    assert find_fault(folder) is None
    (folder / "below" / "b.safetensors").touch()
    fault = find_fault(folder)
    assert fault
    assert (fault.where, fault.what) == (folder / "below" / "b.safetensors", remembered.UNLISTED)
    for name in ("below/a.safetensors", NAME):
        (folder / name).unlink()
        fault = find_fault(folder)
        assert fault
        assert (fault.where, fault.what) == (folder / name, "a file is missing")


def test_a_file_that_cannot_be_read_is_a_fault(folder: Path) -> None:
    def bad_sector(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    fault = find_fault(folder, bad_sector)
    assert fault
    assert str(fault.error(TrainError, "")).endswith("a.safetensors: this file cannot be read: Input/output error")


# ---- safetensors files -----------------------------------------------------------------------------------------------


def content(path: Path) -> tuple[object, ...] | None:
    """The content of a file without its checksum under any name; None if the library refuses it."""
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = {name: text for name, text in opened.metadata().items() if len(text) != len(remembered.ZEROS)}
            return metadata, {name: opened.get_tensor(name).tolist() for name in opened.keys()}  # noqa: SIM118 (no dict)
    except SafetensorError:
        return None


def refusal(path: Path) -> TrainError | None:
    try:
        check_safetensors(path, TrainError)
    except TrainError as error:
        return error
    return None


def test_no_changed_byte_gives_other_content(file: Path) -> None:
    check_safetensors(file, TrainError)
    whole, original, renamed = file.read_bytes(), content(file), 0
    for changed in [*single_bits(whole), whole + b"\0", whole[:-1], whole[:4], b""]:
        file.write_bytes(changed)
        if error := refusal(file):
            assert (error.what, error.where, error.do) == (remembered.CHANGED, file, RESTORE)
            continue
        found = content(file)
        assert found in (None, original), changed
        renamed += found is not None
    assert 0 < renamed <= len(KEY)  # under another name it is no checksum


def test_the_library_reads_it_and_equal_content_gives_equal_files(file: Path) -> None:
    assert load_file(file)["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    assert {**metadata, KEY: ""} == {"prompt": 'ein "Haus", größer\n', "format": "pt", "z": "", KEY: ""}
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    tensors = load_file(file)
    del metadata[KEY]
    for _ in range(20):  # the library writes metadata in any order
        assert b"".join(sealed(save(tensors, metadata))) == file.read_bytes()
    assert b"".join(sealed(file.read_bytes())) == file.read_bytes()


@pytest.mark.parametrize(
    "write",
    [
        lambda tensors: save(tensors),
        lambda tensors: save(tensors, {"format": "pt"}),
        lambda tensors: b"\x80\x04pickle",
        lambda tensors: (1 << 62).to_bytes(8, "little"),
        lambda tensors: (100_000).to_bytes(8, "little") + 100_000 * b"[",
    ],
)
def test_what_has_no_checksum_cannot_be_checked(write: Callable[[dict[str, torch.Tensor]], bytes], file: Path) -> None:
    file.write_bytes(write({"a": torch.zeros(2)}))
    check_safetensors(file, TrainError)


def test_a_header_with_a_key_twice_is_refused(file: Path) -> None:
    """The library takes the last of two values in the metadata, as of a LoRA's alpha."""
    text = b'{"__metadata__":{"alpha":"8","alpha":"1"},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}} '
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"alpha": "1"}
    with pytest.raises(TrainError) as caught:
        check_safetensors(file, TrainError)
    told = f'{file}: its header cannot be read: the key "alpha" is there twice\n  → save it again, or get it again from'
    assert str(caught.value).startswith(told)


def test_a_pipe_or_a_device_is_never_read(folder: Path, file: Path) -> None:
    (folder / NAME).unlink()
    os.mkfifo(folder / NAME)
    fault = find_fault(folder)
    assert fault
    assert fault.what == "this file cannot be read: not a regular file"
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        check_safetensors(file, TrainError)
