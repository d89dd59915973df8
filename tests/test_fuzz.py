"""Whatever happens to the bytes of a cache, a reader returns the written values or raises FormatError. It never returns
another value, raises another exception, or takes unbounded memory or time. `verify` finds the damage.

First random damage; then deliberate damage, with every hash changed to agree with it.
"""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from qwen_cache import FormatError, open_cache
from qwen_cache.errors import CodecError, ManifestError, MemberError
from qwen_cache.format.index import index_row, index_schema, read_index
from qwen_cache.format.manifest import parse_manifest, with_checksum
from qwen_cache.format.sample import PLANES_ZSTD, TensorSpec, decode, encode, parse_sample
from qwen_cache.format.shard import Entry, check_tensors, compress, safetensors_header, scan_shard
from qwen_cache.format.verify import verify_cache

from .support import bombs
from .support.marks import slow
from .support.paths import load_tool
from .support.schemas import schema_of
from .support.waiting import HANG

examples: Any = load_tool("make_examples")
Damage = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module", params=[slow("v1"), "v2", slow("compressed")])
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of a few kilobytes. Tests change a file of it in place, and change it back."""
    folder = tmp_path_factory.mktemp("caches") / str(request.param)
    version, made = examples.VALID_CACHES["cache.v1" if request.param == "v1" else "cache.v2"]
    if request.param == "compressed":
        made = [compress_really(each) for each in made]
        assert any(spec.codec for each in made for spec in each.meta.tensors.values())
    examples.write_cache(folder, version, made, examples.SHARD_SIZE)
    return folder


def compress_really(made: Any) -> Any:
    """The sample with its tensors in planes-zstd, as `build` with compression would write it."""
    plain = examples.with_arrays(made, made.arrays)
    meta, stored = compress(plain.meta, {name: memoryview(data) for name, data in plain.stored.items()}, "zstd")
    return examples.ExampleSample(made.name, meta, made.arrays, {name: bytes(data) for name, data in stored.items()})


@contextmanager
def restored(path: Path) -> Iterator[bytes]:
    """The bytes of a file, restored afterwards."""
    data = path.read_bytes()
    try:
        yield data
    finally:
        path.write_bytes(data)


def everything(folder: Path) -> dict[str, Any]:
    """The metadata of every sample, and the bytes of every tensor, by key."""
    return {
        sample.key: (sample.row, {name: bytes(sample.buffer(name)) for name in sample.row.meta.tensors})
        for sample in open_cache(folder)
    }


def flip(data: bytes, at: int) -> bytes:
    """Another bit for each position in turn."""
    return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]


def flip_anywhere(data: bytes, chance: random.Random) -> bytes:
    return flip(data, chance.randrange(len(data)))


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def append(data: bytes, chance: random.Random) -> bytes:
    return data + chance.choice([bytes(512), bytes(1024), chance.randbytes(chance.randrange(1, 2000)), data])


def overwrite(data: bytes, chance: random.Random) -> bytes:
    """A block, or a few bytes, of zeros, ones, noise, or bytes from elsewhere in the file."""
    size = chance.choice([1, 4, 16, 512, 1024, 4096])
    begin = chance.randrange(0, len(data), size)
    size = min(size, len(data) - begin)
    other = chance.randrange(len(data) - size + 1)
    new = chance.choice([bytes(size), b"\xff" * size, chance.randbytes(size), data[other : other + size]])
    return data[:begin] + new + data[begin + size :]


def cut_out(data: bytes, chance: random.Random) -> bytes:
    size = chance.choice([1, 16, 512, 1024, 4096])
    begin = chance.randrange(0, len(data), min(size, 512))
    return data[:begin] + data[begin + size :]


ALL_KINDS: list[Damage] = [flip_anywhere, truncate, append, overwrite, cut_out]


# ---- random damage ---------------------------------------------------------------------------------------------------


def test_no_flipped_bit_of_a_shard_reaches_a_reader(cache: Path) -> None:
    """Every byte of every shard but most that only fill it up, while the shard is mapped: of the sample that the byte
    is in, and now and then of all."""
    written, opened = everything(cache), open_cache(cache)
    refused, rules = Counter[tuple[str, str]](), set[str]()
    for path in cache.glob("*.tar"):
        samples = [sample for sample in opened if sample.row.shard == path.name]
        owners = {at: [sample] for sample in samples for at in members(sample)}
        stored = {at for sample in samples for at in tensor_bytes(sample)}
        with restored(path) as data, open(path, "r+b", buffering=0) as file:
            for at in range(len(data)):
                if not (data[at] or at in stored or at % 64 == 0):
                    continue
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << at % 8]), at)
                for sample in samples if at % 64 == 0 else owners[at]:
                    for name, expected in written[sample.key][1].items():
                        try:
                            assert bytes(sample.buffer(name)) == expected
                        except FormatError as error:
                            refused[sample.key, name] += 1
                            rules.add(error.rule)
                os.pwrite(file.fileno(), data[at : at + 1], at)
    for key, (row, _) in written.items():
        for name, spec in row.meta.tensors.items():
            unused = 8 if spec.codec else 0  # a zstandard frame has bits that mean nothing
            assert spec.stored_bytes - unused <= refused[key, name] <= spec.stored_bytes
    assert rules <= {"F14", "F18"}


def members(sample: Any) -> range:
    """The bytes of a sample in its shard."""
    return range(sample.row.entry.offset, sample.row.entry.offset + sample.row.entry.length)


def tensor_bytes(sample: Any) -> set[int]:
    """The bytes of its tensors."""
    begins, specs = sample.row.entry.tensor_offsets(), sample.row.meta.tensors
    return {at for name, spec in specs.items() for at in range(begins[name], begins[name] + spec.stored_bytes)}


def test_a_shard_with_a_flipped_bit_is_refused_or_means_the_same(cache: Path) -> None:
    """More than a thousand of them, without the hash of the shard, which would notice them all."""
    version, chance = open_cache(cache).format_version, random.Random("scan")
    for path in cache.glob("*.tar"):
        data = path.read_bytes()
        expected = scan(data, version)
        for at in chance.sample(range(len(data)), 700):
            with suppress(FormatError):
                assert scan(flip(data, at), version) == expected, at


def scan(data: bytes, version: int) -> list[Entry]:
    entries = list(scan_shard(memoryview(data), "a shard", version))
    for entry in entries:
        check_tensors(entry, memoryview(data), "a shard")
    return entries


@pytest.mark.parametrize("damage", [flip_anywhere, *map(slow, ALL_KINDS[1:])], ids=lambda damage: damage.__name__)
def test_verify_finds_every_damage_to_a_shard(damage: Damage, cache: Path) -> None:
    written, chance = everything(cache), random.Random(damage.__name__)
    for path in sorted(cache.glob("*.tar")):
        with restored(path) as data:
            for _ in range(25):
                if (changed := damage(data, chance)) == data:
                    continue
                path.write_bytes(changed)
                assert "F6" in {fault.rule for fault in verify_cache(cache)}
                assert reads_as(written, cache)


def reads_as(written: dict[str, Any], cache: Path) -> bool:
    """True if a reader gives what was written, or refuses."""
    try:
        return everything(cache) == written
    except FormatError:
        return True


@pytest.mark.parametrize("name", ["cache.json", "index.parquet"])
def test_verify_finds_every_flip_and_every_cut_of_manifest_and_index(name: str, cache: Path) -> None:
    written = everything(cache)
    path, chance = cache / name, random.Random(name)
    with restored(path) as data:
        for at in (0, len(data) - 1, *chance.sample(range(len(data)), 100)):
            for changed in (flip(data, at), data[:at]):
                path.write_bytes(changed)
                assert verify_cache(cache), (at, changed)
                assert reads_as(written, cache)


@given(st.data())
@settings(max_examples=500)
def test_any_other_byte_anywhere_in_a_manifest_is_refused(data: st.DataObject) -> None:
    """White space, the names of keys and recipes, and the checksum itself, in both versions."""
    manifest = with_checksum(data.draw(st.sampled_from([value for value in manifests if "checksum" in value])))
    at, byte = data.draw(st.integers(0, len(manifest) - 1)), data.draw(st.binary(min_size=1, max_size=1))
    inserted = data.draw(st.booleans())
    changed = manifest[:at] + byte + manifest[at + (not inserted) :]
    with suppress(FormatError):
        parse_manifest(changed)
        assert changed == manifest


@pytest.mark.parametrize("damage", ALL_KINDS, ids=lambda damage: damage.__name__)
def test_an_index_that_is_damaged_and_signed_again_gives_rows_or_is_refused(damage: Damage, cache: Path) -> None:
    version = open_cache(cache).format_version
    data, chance = (cache / "index.parquet").read_bytes(), random.Random(damage.__name__)
    samples = len(open_cache(cache))
    for _ in range(40):
        with suppress(FormatError):
            table = read_index(damage(data, chance), version, "an index", samples)
            for record in table.to_pylist():
                index_row(record, version, "an index")


# ---- damage by intent: JSON ------------------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 16, 2**31, 2**63, 2**64, 10**30, -1, 10**4000])
    | st.floats(allow_nan=False)
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["\ud800", "\0", "0" * 32, "BF16", "F16", "planes-zstd", "../x.tar"])
)
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ignorable = st.builds(lambda: {"must_understand": False})  # a new one each time: documents are changed in place


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value in a document."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


@st.composite
def changed_documents(draw: st.DrawFn, documents: list[Any]) -> Any:
    """A valid document with values replaced, removed, added, or moved from elsewhere in it."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(sorted(places(document), key=repr)))
        holder = document
        for key in parents:
            holder = holder[key]
        kind = draw(st.sampled_from(["replace", "replace", "remove", "add", "copy"]))
        if kind == "remove":
            del holder[last]
        elif kind == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=5) | st.sampled_from(["codec", "edit_mask", "height_control"]))] = draw(
                json_values | ignorable
            )
        elif kind == "copy":
            other: Any = document
            for key in draw(st.sampled_from(sorted(places(document), key=repr))):
                other = other[key]
            holder[last] = copy.deepcopy(other)
        else:
            holder[last] = draw(json_values)
        if not list(places(document)):
            break
    return document


manifests = [value for name, value in examples.VALID.items() if ".cache." in name]
samples = [value for name, value in examples.VALID.items() if ".sample." in name]
many = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def signed(document: Any) -> bytes:
    """The document with the right checksum, if it has one; surrogates can only be written escaped."""
    if isinstance(document, dict) and "checksum" in document:
        with suppress(UnicodeEncodeError):
            return with_checksum(document)
    return json.dumps(document).encode()


@given(changed_documents(manifests))
@many
def test_a_manifest_with_any_json_in_any_place_is_refused_by_a_rule_or_valid(document: Any) -> None:
    data = signed(document)
    try:
        manifest = parse_manifest(data)
    except FormatError:
        return
    schema_of(Path(f"x.cache.v{document['format_version']}.json")).validate(json.loads(data))
    assert parse_manifest(manifest.to_bytes()) == manifest


@given(changed_documents(samples))
@many
def test_metadata_with_any_json_in_any_place_is_refused_by_a_rule_or_valid(document: Any) -> None:
    try:
        meta = parse_sample(json.dumps(document).encode(), "a sample")
    except FormatError:
        return
    version = document["format_version"]
    schema_of(Path(f"x.sample.v{version}.json")).validate(document)
    assert parse_sample(meta.to_bytes(version), "a sample") == meta


ODD_JSON = {
    "a number beyond every float": '{"a": 1e999}',
    "half a surrogate pair": '{"a": "\\ud800"}',
    "half a surrogate pair in a key": '{"\\udfff": 1}',
    "a number of 5000 digits": '{"a": ' + "9" * 5000 + "}",
    "a tower of lists": '{"a": ' + "[" * 500_000 + "]" * 500_000 + "}",
}


@pytest.mark.parametrize("text", ODD_JSON.values(), ids=ODD_JSON.keys())
def test_json_that_python_reads_but_nothing_can_hash_is_refused(text: str) -> None:
    manifest = json.dumps(manifests[1]).replace('"recipe": {', f'"recipe": {text[:-1]}, ')
    assert manifest != json.dumps(manifests[1])
    with pytest.raises(ManifestError):
        parse_manifest(manifest.encode())
    for document in (
        text,
        json.dumps(samples[0]).replace('"prompt": "', f'"notes": {text[:-1]}, "must_understand": false}}, "prompt": "'),
    ):
        with pytest.raises(FormatError):
            parse_sample(document.encode(), "a sample")


def test_no_nesting_of_lists_is_too_deep() -> None:
    """Also where Python's limit is reached after reading."""
    for height in range(10, 1100, 10):
        tower = "[" * height + "]" * height
        manifest = json.dumps(manifests[1]).replace('"recipe": {', f'"recipe": {{"a": {tower}, ')
        with pytest.raises(FormatError):
            parse_manifest(manifest.encode())


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_json_is_utf_8(encoding: str) -> None:
    with pytest.raises(FormatError):
        parse_manifest(json.dumps(manifests[1]).encode(encoding))


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a shard that holds EDIT."""
    folder = tmp_path_factory.mktemp("caches") / "small"
    examples.write_cache(folder, 2, [examples.EDIT], 1)
    return (folder / examples.first_shard(folder)).read_bytes()


header_documents = changed_documents(
    [json.loads(safetensors_header(examples.EDIT.meta.tensors)[8:])]  # as the writer writes it
)


@given(document=header_documents | json_values)
@many
def test_a_safetensors_header_of_any_json_is_refused_or_agrees(shard: bytes, document: Any) -> None:
    changed = examples.with_header(lambda _: pad(json.dumps(document).encode()))(shard)
    try:
        [entry] = scan_shard(memoryview(changed), "a shard", 2)
    except MemberError:
        return
    assert entry.meta == examples.EDIT.meta
    assert entry.data % 64 == 0


def pad(text: bytes) -> bytes:
    return text + b" " * (-(8 + len(text)) % 64)


# ---- damage by intent: the index -------------------------------------------------------------------------------------

numbers = st.sampled_from([0, 1, -1, 16, 17, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1)
offsets = numbers | st.sampled_from([512, 2**63 - 1, -(2**63), 2**40])
texts = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(["0" * 32, "BF16", "F32", PLANES_ZSTD, ""])


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Any value that a column of this type can hold."""
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    if pa.types.is_list(kind):
        return st.none() | st.lists(values(kind.value_type), max_size=4)
    return st.none() | (texts if pa.types.is_string(kind) else offsets if pa.types.is_int64(kind) else numbers)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """By format version: a cache, and the rows of its index."""
    found = {}
    for version, made in examples.VALID_CACHES.values():
        folder = tmp_path_factory.mktemp("caches") / f"v{version}"
        examples.write_cache(folder, version, made, examples.SHARD_SIZE)
        found[version] = folder, open_cache(folder).table.to_pylist()
    return found


@given(data=st.data())
@many
def test_a_row_of_any_values_is_refused_or_can_be_used(
    records: dict[int, tuple[Path, list[dict[str, Any]]]], data: st.DataObject
) -> None:
    """An accepted row has sizes that a trainer can rely on."""
    version = data.draw(st.sampled_from((1, 2)))
    record = copy.deepcopy(data.draw(st.sampled_from(records[version][1])))
    schema = index_schema(version)
    for name in data.draw(st.lists(st.sampled_from(schema.names), min_size=1, max_size=3)):
        inside = data.draw(st.sampled_from([None, *record[name]])) if isinstance(record[name], dict) else None
        if inside:
            record[name][inside] = data.draw(values(schema.field(name).type.field(inside).type))
        else:
            record[name] = data.draw(values(schema.field(name).type))
    try:
        row = index_row(record, version, "an index")
    except FormatError:
        return
    meta = row.meta
    assert all(t == 1 and h > 0 and w > 0 for t, h, w in meta.img_shapes)
    assert 0 <= meta.prefix_length <= meta.text_length
    assert all(size > 0 for spec in meta.tensors.values() for size in spec.shape)
    assert parse_sample(meta.to_bytes(version), "a sample") == meta  # what verify would say of it


# ---- damage by intent: compression -----------------------------------------------------------------------------------


@given(st.sampled_from(["BF16", "F32"]), st.binary(min_size=4, max_size=200), st.integers(1, 50))
def test_compression_loses_nothing(dtype: str, data: bytes, times: int) -> None:
    data = data * times
    spec = TensorSpec(dtype, (len(data) // 4 * 4 // (2 if dtype == "BF16" else 4),), "", PLANES_ZSTD, 0)
    plain = data[: spec.nbytes]
    assert bytes(decode(memoryview(encode(memoryview(plain), spec.element_size)), spec, "a tensor")) == plain


@given(st.binary(max_size=200), st.integers(1, 300), st.sampled_from(["BF16", "F32"]))
def test_bytes_that_are_no_compressed_tensor_are_refused(data: bytes, size: int, dtype: str) -> None:
    spec = TensorSpec(dtype, (size,), "", PLANES_ZSTD, len(data))
    with suppress(CodecError):
        assert decode(memoryview(data), spec, "a tensor").nbytes == spec.nbytes


@given(data=st.data())
def test_a_compressed_tensor_with_other_bytes_is_refused_or_has_its_length(data: st.DataObject) -> None:
    plain = bytes(range(16)) * 20
    spec = TensorSpec(data.draw(st.sampled_from(["BF16", "F32"])), (320,), "", PLANES_ZSTD, 0)
    plain = plain * (spec.element_size)
    stored = bytearray(encode(memoryview(plain), spec.element_size))
    for _ in range(data.draw(st.integers(1, 4))):
        stored[data.draw(st.integers(0, len(stored) - 1))] = data.draw(st.integers(0, 255))
    with suppress(CodecError):
        assert decode(memoryview(bytes(stored)), spec, "a tensor").nbytes == spec.nbytes


# ---- bombs -----------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from pathlib import Path
from qwen_cache.format.cache import open_cache
from qwen_cache.errors import FormatError
from qwen_cache.format.verify import verify_cache

verify_cache(Path(sys.argv[1]))  # what is imported late is there
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
for folder in sys.argv[1:]:
    rules = {fault.rule for fault in verify_cache(Path(folder))}
    try:
        for sample in open_cache(folder):
            for name in sample.row.meta.tensors:
                sample.buffer(name)
    except FormatError as error:
        rules.add(error.rule)
    print(",".join(sorted(rules)))
"""


def test_no_bomb_takes_memory(tmp_path: Path) -> None:
    """With 512 MB to spend: what claims 2^40 and 2^60 bytes, a frame of 32 kB that holds a gigabyte, and indexes of
    three gigabytes: one prompt in a dictionary, and one codec in a dictionary of a struct."""
    names = ["F18-frame-claims-a-terabyte", "F18-plane-of-2-to-63-bytes", "F9-header-claims-2-to-60-bytes"]
    for name in names:
        examples.write_invalid_cache(tmp_path / name, name)
    big = examples.make("big", "a cat", (25, 25))
    size = big.arrays["image_latents"].size
    data = examples.planes(bytes(size), examples.frame(size, [(1 << 17, 0)] * (1 << 13)))
    big = examples.with_stored(big, "image_latents", data, codec=PLANES_ZSTD, compressed_bytes=len(data))
    examples.write_cache(tmp_path / "F18-gigabyte", 2, [big], 1)
    for column in ("prompt", "image_latents.codec"):
        examples.write_cache(tmp_path / column, 2, [examples.EDIT], 1)
        data = bombs.dictionary(tmp_path / column / "index.parquet", 3000, 1_000_000, column)
        examples.forge(tmp_path / column, manifest=of_3000_samples)
        examples.sign_index(tmp_path / column, data)
        names.append(column)
    folders = [tmp_path / "F18-gigabyte", *(tmp_path / name for name in names)]
    done = subprocess.run([sys.executable, "-c", LIMITED, *folders], capture_output=True, text=True, timeout=HANG)
    assert done.stdout.split() == ["F18", "F18", "F18", "F9", "F7", "F7"], done.stderr


def of_3000_samples(manifest: dict[str, Any]) -> None:
    for counted in (manifest["index"], manifest["recipes"]["default"], manifest["shards"][0]):
        counted["samples"] = 3000
