"""One sample as a safetensors file, as the server sends it: uncompressed tensors that stock `safetensors` reads.

The metadata of the sample (the member `<key>.json` of a shard) is in the file's `__metadata__`, under "sample".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_cache.errors import ChecksumError, MemberError
from qwen_cache.format.codec import decode
from qwen_cache.format.fields import Fields
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta, parse_sample
from qwen_cache.format.shard import ALIGNMENT, MAX_HEADER, Entry, check_tensors, safetensors_header, tensor_data

METADATA = "sample"


@dataclass(frozen=True)
class OneSample:
    """The bytes of a sample that did not come from the shards of a cache, in place of these."""

    folder: Path
    data: memoryview

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        return self.data[begin:end]

    def renew(self, row: IndexRow) -> bool:
        return False


def sample_file(meta: SampleMeta, tensors: Mapping[str, memoryview], format_version: int) -> list[bytes | memoryview]:
    """The pieces of the file: its header, then the bytes of each tensor; `tensors` are as they are stored."""
    plain = {name: decode(tensors[name], spec, meta.key) for name, spec in meta.tensors.items()}
    meta = uncompressed(meta)
    header = json.loads(safetensors_header(meta.tensors)[8:])
    header = {"__metadata__": {METADATA: meta.to_bytes(format_version).decode()}, **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *plain.values()]


def uncompressed(meta: SampleMeta) -> SampleMeta:
    """The metadata of the sample with its tensors stored as they are."""
    specs = {name: replace(spec, codec=None, compressed_bytes=None) for name, spec in meta.tensors.items()}
    return replace(meta, tensors=specs)


def parse_sample_file(data: memoryview, where: str, format_version: int) -> Entry:
    """The sample in such a file, as an entry whose offsets are those of the file; every hash is checked.

    FormatError if the file is cut short, contradicts itself, or is of another format version.
    """
    length = int.from_bytes(data[:8], "little") if data.nbytes >= 8 else data.nbytes
    if length > min(2 * MAX_HEADER, data.nbytes - 8):
        raise MemberError("the safetensors header reaches beyond the file", where=where, found=length)
    claimed = Fields.of_json(data[8 : 8 + length], where, MemberError).left
    metadata = claimed.pop("__metadata__", None)
    text = metadata.get(METADATA) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise MemberError("the file has no metadata of a sample", where=where)
    meta = parse_sample(text.encode(), where, format_version)
    expected = json.loads(safetensors_header(meta.tensors)[8:])
    if json.dumps(claimed, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise MemberError("the safetensors header and the metadata disagree", where=where, expected=expected)
    begin, stored = 8 + length, sum(spec.stored_bytes for spec in meta.tensors.values())
    if data.nbytes - begin != stored:
        what = "the file has another length than its tensors"
        raise ChecksumError(what, where=where, expected=begin + stored, found=data.nbytes)
    entry = Entry(meta, 0, data.nbytes, begin)
    check_tensors(entry, data, where)
    return entry


def parse_members(metadata: memoryview, tensors: memoryview, where: str, format_version: int) -> Entry:
    """A sample from the bytes of its two members, as an entry whose offsets are those of the second; FormatError."""
    meta = parse_sample(metadata, where, format_version)
    return Entry(meta, 0, tensors.nbytes, tensor_data(tensors, meta, where))
