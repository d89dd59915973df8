"""A shard: a plain, uncompressed POSIX tar whose name is the xxh3-128 of its bytes.

Each sample is two members, `<key>.json` and then `<key>.safetensors`, written so that stock `webdataset` and
`safetensors` read them and so that tensor data begins on a 64-byte boundary of the file. The same samples in the same
order give the same bytes. `verify`, and a build that continues after a kill, read a shard from its tar instead of
through the index; this trusts nothing that it reads.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from qwen_cache.errors import ArchiveError, ChecksumError, FormatError, MemberError
from qwen_cache.format.identity import HASH_PATTERN, canonical_json, content_hash
from qwen_cache.format.manifest import Fields, Shard
from qwen_cache.format.sample import MAX_RATIO, PLANES_ZSTD, SampleMeta, TensorSpec, decode, encode, parse_sample
from qwen_cache.storage.files import is_cut_short, sync
from qwen_cache.storage.files import replace as replace_file
from qwen_cache.terminal import naming

BLOCK = 512
END_OF_ARCHIVE = bytes(2 * BLOCK)
ALIGNMENT = 64  # a cache line, and the largest alignment that vector loads need
MEMBER_PATTERN = re.compile(rf"({HASH_PATTERN.pattern})\.(json|safetensors)")
MAX_HEADER = 1 << 20  # bytes of a JSON member or a safetensors header; ours take a few kB (F9 says why)


@dataclass(frozen=True)
class Entry:
    """A sample and its position in a shard: `offset` and `length` of both members; `data`: offset of its tensors."""

    meta: SampleMeta
    offset: int
    length: int
    data: int

    def tensor_offsets(self) -> dict[str, int]:
        offsets, position = {}, self.data
        for name, spec in self.meta.tensors.items():
            offsets[name] = position
            position += spec.stored_bytes
        return offsets

    def moved(self, offset: int) -> Entry:
        return Entry(self.meta, offset, self.length, self.data + offset - self.offset)


class ShardWriter:
    """Appends samples to a tar; `seal` makes it a shard.

    If `path` exists, the writer continues after the complete `entries` that `recover` read from it.
    """

    def __init__(self, path: Path, format_version: int, entries: list[Entry] | None = None) -> None:
        self.path, self.format_version = path, format_version
        self.entries = list(entries or [])
        self.size = self.entries[-1].offset + self.entries[-1].length if self.entries else 0
        self.hash = xxhash.xxh3_128()
        with naming(path):
            self.file: BinaryIO = open(path, "r+b" if self.entries else "w+b")  # noqa: SIM115 (closed by seal or close)
            while block := self.file.read(min(1 << 20, self.size - self.file.tell())):
                self.hash.update(block)
            self.file.truncate(self.size)

    def add(self, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> None:
        """Append a sample; `tensors` are the stored bytes of each of `meta.tensors`, by name.

        Raises MemberError, and appends nothing, for metadata that readers refuse: too long a prompt.
        """
        start = self.size
        first_member, header, end = _around_tensors(meta, self.format_version)
        self._write(first_member)
        self._write(header)
        begin = self.size
        self._write(*(tensors[name] for name in meta.tensors), end)
        with naming(self.path):
            self.file.flush()  # so that the sample survives a full disk or a kill
        self.entries.append(Entry(meta, start, self.size - start, begin))

    def seal(self, folder: Path) -> tuple[Shard, list[Entry]]:
        """End the archive, make it durable, and give it its name in `folder`."""
        self._write(END_OF_ARCHIVE)
        with naming(self.path):
            self.file.flush()
            sync(self.file)
            self.file.close()
        shard = Shard(f"{self.hash.hexdigest()}.tar", len(self.entries), self.size)
        replace_file(self.path, folder / shard.name)
        return shard, self.entries

    def close(self) -> None:
        """Leave the file as it is, for a later run to continue."""
        with naming(self.path):
            self.file.close()

    def _write(self, *pieces: bytes | memoryview) -> None:
        for piece in pieces:
            with naming(self.path):
                self.file.write(piece)
            self.hash.update(piece)
            self.size += len(piece) if isinstance(piece, bytes) else piece.nbytes


def _around_tensors(meta: SampleMeta, format_version: int) -> tuple[bytes, bytes, bytes]:
    """All bytes of a sample in a shard but those of its tensors: the first member, what is before them, and after.

    Raises MemberError for metadata that readers refuse: too long a prompt.
    """
    metadata, header = meta.to_bytes(format_version), safetensors_header(meta.tensors)
    if len(metadata) > MAX_HEADER:
        what, expected = "the metadata of a sample is too large", f"at most {MAX_HEADER} bytes"
        raise MemberError(what, where=meta.key, expected=expected, found=len(metadata), do="shorten its prompt")
    size = len(header) + sum(spec.stored_bytes for spec in meta.tensors.values())
    first_member = _tar_header(f"{meta.key}.json", len(metadata)) + metadata + _padding(len(metadata))
    return first_member, _tar_header(f"{meta.key}.safetensors", size) + header, _padding(size)


def is_as_written(entry: Entry, data: memoryview, format_version: int) -> bool:
    """True if a sample of this mapped shard has the bytes that `ShardWriter` gives it, apart from its tensors."""
    first_member, header, end = _around_tensors(entry.meta, format_version)
    before = data[entry.offset : entry.data]
    after = data[entry.offset + entry.length - len(end) : entry.offset + entry.length]
    return before == first_member + header and after == end


def compress(
    meta: SampleMeta, tensors: Mapping[str, memoryview], compression: str
) -> tuple[SampleMeta, dict[str, memoryview]]:
    """The sample as stored with `compression` (`none` or `zstd`); zstd is used for tensors that get 5 % smaller.

    `tensors` are uncompressed bytes, whatever codec `meta` has.
    """
    specs = {name: replace(spec, codec=None, compressed_bytes=None) for name, spec in meta.tensors.items()}
    stored = dict(tensors)
    for name, spec in specs.items() if compression == "zstd" else ():
        smaller = encode(tensors[name], spec.element_size)
        if spec.nbytes / MAX_RATIO < len(smaller) < 0.95 * spec.nbytes:
            specs[name] = replace(spec, codec=PLANES_ZSTD, compressed_bytes=len(smaller))
            stored[name] = memoryview(smaller)
    return replace(meta, tensors=specs), stored


def safetensors_header(tensors: Mapping[str, TensorSpec]) -> bytes:
    """The length and the JSON that begin a safetensors file, padded so that data begins on a 64-byte boundary.

    Layout: https://github.com/huggingface/safetensors#format (N as u64 little-endian, N bytes of JSON, data).
    """
    value: dict[str, Any] = {}
    position = 0
    for name, spec in tensors.items():
        kind = {"dtype": spec.dtype, "shape": list(spec.shape)}
        if spec.codec is not None:
            kind = {"dtype": "U8", "shape": [spec.stored_bytes]}
        value[name] = {**kind, "data_offsets": [position, position + spec.stored_bytes]}
        position += spec.stored_bytes
    text = json.dumps(value, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def scan_shard(data: memoryview, where: str, format_version: int) -> Iterator[Entry]:
    """Every sample of a mapped shard, from the tar alone; FormatError (F8, F9) at the first fault."""
    position = 0
    while not is_end(data, position):
        start = position
        key, kind, begin, size = _member(data, position, where)
        if kind != "json":
            raise ArchiveError("a sample begins with its .json member", where=where, found=f"{key}.{kind}")
        if size > MAX_HEADER:
            expected = f"at most {MAX_HEADER} bytes"
            raise MemberError("the metadata is too large", where=f"{where}: {key}.json", expected=expected, found=size)
        meta = parse_sample(data[begin : begin + size], f"{where}: {key}.json", format_version)
        position = _after(begin, size)
        other, kind, begin, size = _member(data, position, where)
        if (other, kind) != (key, "safetensors") or meta.key != key:
            expected = f"{meta.key}.json, then {meta.key}.safetensors"
            raise ArchiveError(
                "a sample is two members of one key",
                where=where,
                expected=expected,
                found=f"{key}.json, {other}.{kind}",
            )
        position = _after(begin, size)
        entry = Entry(meta, start, position - start, tensor_data(data[begin : begin + size], meta, where) + begin)
        yield entry
    if data.nbytes - position != len(END_OF_ARCHIVE):
        raise ArchiveError("bytes after the end of the archive", where=where)


def recover(data: memoryview, format_version: int) -> list[Entry]:
    """The complete samples at the beginning of an unsealed tar: parsed, and all tensors match their hashes."""
    entries: list[Entry] = []
    try:
        for entry in scan_shard(data, "unsealed shard", format_version):
            check_tensors(entry, data, "unsealed shard")
            entries.append(entry)
    except FormatError:
        pass  # a kill leaves a torn tail; everything before it is complete
    return entries


def check_tensors(entry: Entry, data: memoryview, where: str, label: str | None = None) -> None:
    """ChecksumError or CodecError for a tensor in this mapped shard that does not match its hash.

    Messages call the sample `label`, by default its key.
    """
    for name, stored in tensor_bytes(entry, data):
        spec, what = entry.meta.tensors[name], f"{name} of sample {label or entry.meta.key}"
        if is_cut_short(stored):
            raise ChecksumError(f"{what} cannot be read: its shard became shorter", where=where)
        if (digest := content_hash(decode(stored, spec, f"{where}: {what}"))) != spec.xxh3_128:
            what += " does not have the bytes that were written"
            raise ChecksumError(what, where=where, expected=spec.xxh3_128, found=digest)


def tensor_bytes(entry: Entry, data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """The stored bytes of each tensor of `entry` in its mapped shard."""
    for name, offset in entry.tensor_offsets().items():
        yield name, data[offset : offset + entry.meta.tensors[name].stored_bytes]


def is_end(data: memoryview, position: int) -> bool:
    return data[position : position + len(END_OF_ARCHIVE)] == END_OF_ARCHIVE


def _member(data: memoryview, position: int, where: str) -> tuple[str, str, int, int]:
    """Key, kind, start and size of the member with its header at `position`."""
    try:
        info = tarfile.TarInfo.frombuf(bytes(data[position : position + BLOCK]), "ascii", "strict")
    except (tarfile.HeaderError, UnicodeError) as error:
        raise ArchiveError(f"no tar header at byte {position}: {error}", where=where) from None
    match = MEMBER_PATTERN.fullmatch(info.name)
    if info.type != tarfile.REGTYPE or not match:
        expected = "a regular file named <key>.json or <key>.safetensors"
        raise ArchiveError(f"unexpected member at byte {position}", where=where, expected=expected, found=info.name)
    begin = position + BLOCK
    if not 0 <= info.size <= data.nbytes - begin - len(_padding(info.size)):
        raise ArchiveError(
            f"{info.name} reaches beyond the shard",
            where=where,
            expected=f"at most {data.nbytes - begin}",
            found=info.size,
        )
    return match[1], match[2], begin, info.size


def tensor_data(member: memoryview, meta: SampleMeta, where: str) -> int:
    """The start of the tensor data in a .safetensors member; MemberError unless its header agrees with the metadata."""
    length = int.from_bytes(member[:8], "little") if member.nbytes >= 8 else MAX_HEADER + 1
    if length > min(MAX_HEADER, member.nbytes - 8):
        raise MemberError(
            "the safetensors header reaches beyond its member", where=f"{where}: {meta.key}", found=length
        )
    begin = 8 + length
    path = f"{where}: {meta.key}.safetensors"
    claimed = Fields.of_json(member[8:begin], path, MemberError).left
    if begin % ALIGNMENT:  # members begin on 512 bytes
        raise MemberError(f"tensor data does not begin on {ALIGNMENT} bytes", where=path, found=begin)
    expected = json.loads(safetensors_header(meta.tensors)[8:])
    # as text: 1, 1.0 and true are equal in Python
    differs = canonical_json(claimed) != canonical_json(expected)
    if differs or member.nbytes - begin != sum(spec.stored_bytes for spec in meta.tensors.values()):
        raise MemberError(
            "the safetensors header and the metadata disagree",
            where=f"{where}: {meta.key}",
            expected=expected,
            found=claimed,
        )
    return begin


def _tar_header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def _after(begin: int, size: int) -> int:
    return begin + size + len(_padding(size))
