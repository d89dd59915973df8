"""FORMAT.md, the JSON Schemas, the parser, `verify` and readers agree: on every example, and on whatever the writer can
produce. The examples are golden: the tool that wrote them writes them again, and stock libraries read them."""

from __future__ import annotations

import gc
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import webdataset
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_cache import open_cache
from qwen_cache.errors import RULES, FormatError
from qwen_cache.format.identity import Inputs, Slider, dataset_identity
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe, Shard, parse_manifest
from qwen_cache.format.measured import Alignment, Measured
from qwen_cache.format.sample import MASK_FROM, SLIDER_EMBEDS, SampleMeta, TensorSpec, parse_sample
from qwen_cache.format.verify import verify_cache

from .support.commands import run
from .support.paths import load_tool
from .support.schemas import SCHEMAS, schema_of

examples: Any = load_tool("make_examples")
VALID = sorted((SCHEMAS / "examples" / "valid").glob("*.json"))
INVALID = sorted((SCHEMAS / "examples" / "invalid").glob("*.json"))
ONLY_THE_PARSER = {
    *(
        "F4",
        "F5",
        "F6-name",
        "F10",
        "F11-no-control",
        "F12-sides",
        "F12-prefix",
        "F12-position",
        "F12-measured",
        "F12-rejected-of-another-size",
        "F12-slider",
        "F13-mixed",
        "F13-rejected",
        "F13-slider",
    ),
    *("F19", "F21"),
}
"""JSON Schema cannot relate two places of a document, or a hash to its content."""
VALID_CACHES = sorted(path for path in (SCHEMAS / "examples" / "valid").iterdir() if path.is_dir())
INVALID_CACHES = sorted(path for path in (SCHEMAS / "examples" / "invalid").iterdir() if path.is_dir())
ONLY_VERIFY = {
    *("F5-another-order", "F15", "F16-another-prefix", "F17", "F20"),
    *("F6-bytes-appended", "F6-flipped-bit-in-padding", "F6+F8-flipped-bit-in-a-tar-header"),
    *("F8-member", "F8-symbolic", "F8-hard", "F8-no-end", "F8-bytes"),
    *("F9-metadata", "F9-key", "F9-header-claims", "F9-header-of", "F9-header-is"),
}
"""Parts that readers do not use: they find a tensor through the index and check its bytes."""


def parse(path: Path) -> object:
    parser = parse_manifest if ".cache." in path.name else parse_sample
    return parser(path.read_bytes(), path.name)


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.name)
def test_valid_examples_pass_schema_and_parser(path: Path) -> None:
    schema_of(path).validate(json.loads(path.read_text(encoding="utf-8")))
    parse(path)


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.name)
def test_invalid_examples_are_refused_by_the_rule_they_are_named_after(path: Path) -> None:
    rule = path.name.split("-")[0]
    with pytest.raises(FormatError) as error:
        parse(path)
    assert error.value.rule == rule
    assert f"[{rule}]" in str(error.value)
    if not any(path.name.startswith(prefix) for prefix in ONLY_THE_PARSER):
        assert not schema_of(path).is_valid(json.loads(path.read_text(encoding="utf-8")))


def test_every_rule_has_an_example_that_breaks_it() -> None:
    assert {rule for path in (*INVALID, *INVALID_CACHES) for rule in rules_of(path)} == set(RULES)


def test_the_code_and_format_md_have_the_same_rules() -> None:
    text = (SCHEMAS / "FORMAT.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^\*\*(F\d+)\*\*", text, flags=re.MULTILINE))
    assert set(RULES) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "format": 2}', 'the key "format" is there twice'),
        ('{"format": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "a JSON object is expected"),
        ("\xff", "not valid JSON"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        parse_manifest(text.encode("latin-1"))
    assert error.value.rule == "F1"


# ---- whole caches ----------------------------------------------------------------------------------------------------


def rules_of(path: Path) -> set[str]:
    """`F6+F14-flipped-bit` breaks F6, and thereby F14."""
    return set(path.name.split("-")[0].split("+"))


def read_all(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every tensor as stored, by the key of its sample and its name; samples are also looked up by key."""
    cache = open_cache(folder)
    return {sample.key: {name: cache[sample.key].stored(name) for name in sample.row.meta.tensors} for sample in cache}


def assert_is(tensor: torch.Tensor, array: Any) -> None:
    """The tensor is what the tool wrote; its bfloat16 are 16 bits in numpy."""
    found = tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()


def test_the_tool_writes_the_examples_again(tmp_path: Path) -> None:
    """Byte for byte, except what depends on pyarrow's version: the index, and its hash in the manifest."""
    examples.write_examples(tmp_path)
    again = {path.relative_to(tmp_path) for path in tmp_path.rglob("*")}
    assert again == {path.relative_to(SCHEMAS / "examples") for path in (SCHEMAS / "examples").rglob("*")}
    for path in again:
        old, new = SCHEMAS / "examples" / path, tmp_path / path
        if new.is_symlink():  # to a manifest; an sdist has a copy in its place
            assert not old.is_symlink() or old.readlink() == new.readlink(), path
        elif path.name == "cache.json":
            assert without_index(new) == without_index(old), path
        elif path.name == "index.parquet" and path.parts[0] == "valid":
            assert pq.read_table(new).equals(pq.read_table(old)), path
        elif path.name != "index.parquet" and old.is_file():
            assert new.read_bytes() == old.read_bytes(), path


def without_index(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text(encoding="utf-8"))
    return {**value, "index": value["index"]["samples"], "checksum": None}


@pytest.mark.parametrize("path", VALID_CACHES, ids=lambda path: path.name)
def test_valid_caches_are_clean_and_hold_what_the_tool_wrote(path: Path) -> None:
    assert verify_cache(path) == []
    found = read_all(path)
    _, made = examples.VALID_CACHES[path.name]
    assert list(found) == [each.meta.key for each in made]
    for each in made:
        assert found[each.meta.key].keys() == each.arrays.keys()
        for name, array in each.arrays.items():
            assert_is(found[each.meta.key][name], array)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", VALID_CACHES, ids=lambda path: path.name)
def test_stock_libraries_read_the_valid_caches(path: Path) -> None:
    """webdataset, safetensors, pyarrow and zstandard, which know nothing of us, find what the tool wrote."""
    version, made = examples.VALID_CACHES[path.name]
    urls = [str(shard) for shard in sorted(path.glob("*.tar"))]
    items = {item["__key__"]: item for item in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)}
    gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored
    rows = pq.read_table(path / "index.parquet").to_pylist()
    assert [row["key"] for row in rows] == [each.meta.key for each in made]
    assert items.keys() == {row["key"] for row in rows}
    assert len({row["shard"] for row in rows}) > 1
    for row, each in zip(rows, made, strict=True):
        metadata = json.loads(items[row["key"]]["json"])
        schema_of(Path(f"x.sample.v{version}.json")).validate(metadata)
        assert (row["name"], row["prompt"], metadata["prompt"]) == (each.name, each.meta.prompt, each.meta.prompt)
        stored = safetensors.torch.load(items[row["key"]]["safetensors"])
        assert stored.keys() == each.arrays.keys()
        for name, array in each.arrays.items():
            spec = row[name]
            data = (path / row["shard"]).read_bytes()[spec["offset"] : spec["offset"] + spec["length"]]
            assert data == bytes(stored[name].view(torch.uint8).numpy())
            assert_is(decompressed(stored[name], array.shape) if spec["codec"] else stored[name], array)


def decompressed(stored: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """F18 by hand, for the tensor with a raw first and a compressed second plane."""
    data = bytes(stored.numpy())
    first, second = np.frombuffer(data[:16], "<u8")
    assert len(data) == 16 + first + second
    low = np.frombuffer(data[16 : 16 + first], np.uint8)
    high = np.frombuffer(zstandard.ZstdDecompressor().decompress(data[16 + first :]), np.uint8)
    return torch.from_numpy(np.stack([low, high], 1)).view(torch.bfloat16).view(shape)


def test_the_valid_caches_hold_every_kind_of_sample() -> None:
    v1, v2, measured, rejected, slider, to_generate = (
        pq.read_table(path / "index.parquet").to_pylist() for path in VALID_CACHES
    )
    for rows in (v1, v2):
        assert {len(row["controls"]) for row in rows} >= {1, 3}
        assert any(row["empty_prompt_embeds"] is None for row in rows)
        assert not {"seed", "measured", "rejected", "rejected_shape", "rejected_latents"} & rows[0].keys()
        assert not any(name.startswith("slider") for name in rows[0])
    assert [row["rejected_shape"] for row in rejected] == [[1, 3, 2], [1, 1, 3], [1, 2, 2], None]
    assert [bool(row["rejected"] and row["rejected_latents"]) for row in rejected] == [True, True, True, False]
    assert [row["slider_positive"] and row["slider_negative"] for row in slider] == [*["a young face"] * 3, None]
    assert [bool(row["slider_positive_embeds"]) for row in slider] == [True, True, True, False]
    lengths = [row["measured"] and len(row["measured"]["controls"]) for row in measured]
    assert lengths == [1, 2, None, 0]
    assert {len(row["controls"]) for row in to_generate} == {0, 1, 3}
    assert {row["target"] for row in to_generate} == {None} == {row["image_latents"] for row in to_generate}
    assert [row["seed"] for row in to_generate] == [7, 8, None, 0]
    assert {len(row["controls"]) for row in rows} == {0, 1, 2, 3}  # of v2, the last
    assert any(row["image_positions"] for row in rows)
    assert any(row["edit_mask"] for row in rows)
    assert any(row["image_latents"]["codec"] for row in rows)
    assert any(row["prefix_length"] for row in rows)


@pytest.mark.parametrize("path", INVALID_CACHES, ids=lambda path: path.name)
def test_verify_names_the_rules_that_an_invalid_cache_breaks_and_the_fix(path: Path) -> None:
    """No other rule: everything that the fault does not concern is signed again."""
    result = run("qwen-cache", "verify", path, "--json")
    assert result.code == 1
    findings = json.loads(result.stdout)["findings"]
    assert {finding["rule"] for finding in findings} == rules_of(path)
    for finding in findings:
        assert finding["where"].startswith(str(path))
        assert finding["do"]


@pytest.mark.parametrize("path", INVALID_CACHES, ids=lambda path: path.name)
def test_readers_refuse_an_invalid_cache_or_give_what_was_written(path: Path) -> None:
    if any(path.name.startswith(prefix) for prefix in ONLY_VERIFY):
        written = {
            each.meta.key: each for each in (examples.INVALID_SAMPLES.get(path.name, examples.EDIT), examples.PLAIN)
        }
        found = read_all(path)
        assert found.keys() == written.keys()
        for key, tensors in found.items():
            for name, tensor in tensors.items():
                assert_is(tensor, written[key].arrays[name])
    else:
        with pytest.raises(FormatError) as error:
            read_all(path)
        assert error.value.rule in rules_of(path) | {
            "F14"
        }  # a tensor that is not where the index says has another hash


# ---- whatever the writer can produce ---------------------------------------------------------------------------------

hashes = st.text("0123456789abcdef", min_size=32, max_size=32)
counts = st.integers(0, 2**40)
names = st.text(min_size=1, max_size=20)
recipes = st.dictionaries(names, st.integers() | st.text(max_size=20), max_size=4)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    shards = draw(
        st.lists(st.builds(Shard, hashes.map("{}.tar".format), counts, counts), max_size=4, unique_by=lambda s: s.name)
    )
    samples = sum(shard.samples for shard in shards)
    recipe = Recipe(draw(recipes), samples, dataset_identity(draw(st.lists(hashes, max_size=3))))
    index = IndexFile(samples, draw(counts), draw(hashes))
    written_by = draw(st.dictionaries(names, names, max_size=2))
    return Manifest(draw(st.sampled_from((1, 2))), {draw(names): recipe}, index, tuple(shards), written_by)


@given(manifests())
@settings(max_examples=30)
def test_what_the_writer_makes_of_a_manifest_validates_and_parses_back(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    schema_of(Path(f"x.cache.v{manifest.format_version}.json")).validate(json.loads(data))
    assert parse_manifest(data) == manifest


sides = st.integers(1, 9)


@st.composite
def samples(draw: st.DrawFn) -> tuple[int, SampleMeta]:
    version = draw(st.sampled_from((1, 2)))
    shapes = tuple((1, h, w) for h, w in draw(st.lists(st.tuples(sides, sides), min_size=1, max_size=5)))
    tokens = [h * w for _, h, w in shapes]
    text, width, dtype = draw(sides), draw(sides), draw(st.sampled_from(("BF16", "F32")))
    has_target = version == 1 or draw(st.booleans())
    wanted: dict[str, Any] = {"image_latents": (dtype, (tokens[0], 64))} if has_target else {}
    worse = (1, draw(sides), draw(sides)) if version == 2 and has_target and draw(st.booleans()) else None
    if worse:
        wanted["rejected_latents"] = (dtype, (worse[1] * worse[2], 64))
    if len(shapes) > 1:
        wanted["control_latents"] = (dtype, (sum(tokens[1:]), 64))
    wanted |= {"prompt_embeds": (dtype, (text, width)), "empty_prompt_embeds": (dtype, (draw(sides), width))}
    prompts = st.text(max_size=9)
    slider = draw(st.none() | st.builds(Slider, prompts, prompts)) if version == 2 else None
    wanted |= {name: (dtype, (draw(sides), width)) for name in SLIDER_EMBEDS} if slider else {}
    mask_from = draw(st.sampled_from((None, *MASK_FROM))) if version == 2 and has_target else None
    if mask_from:
        wanted["edit_mask"] = ("F32", (tokens[0],))
    if version == 2 and draw(st.booleans()):
        wanted["attention"] = ("F16", (draw(sides), draw(sides), draw(sides)))
    tensors = {name: TensorSpec(kind, shape, draw(hashes)) for name, (kind, shape) in wanted.items()}
    controls = tuple(draw(hashes) for _ in shapes[1:])
    target, mask = (draw(hashes), draw(st.none() | hashes)) if has_target else (None, None)
    seed = draw(st.none() | st.integers(0, 2**63 - 1)) if version == 2 else None
    inputs = Inputs(target, controls, mask, seed, draw(hashes) if worse else None)
    prefix = draw(st.integers(0, text)) if version == 2 else 0
    prompt = draw(st.text(max_size=30))
    bounds = sorted(draw(st.sets(st.integers(0, len(prompt)), max_size=6))) if version == 2 else []
    phrase = tuple(pairwise(bounds))
    measured = None
    if version == 2 and has_target and draw(st.booleans()):
        pairs = st.tuples(st.floats(-99, 99), st.floats(-99, 99))
        alignments = st.none() | st.builds(Alignment, pairs, pairs)
        measured = Measured(draw(st.floats(0.01, 99)), tuple(draw(alignments) for _ in shapes[1:]))
    of_text = prefix, tensors, phrase, mask_from, ()
    return version, SampleMeta(draw(hashes), inputs, prompt, shapes, *of_text, measured, worse, slider)


@given(samples())
@settings(max_examples=30)
def test_what_the_writer_makes_of_a_sample_validates_and_parses_back(made: tuple[int, SampleMeta]) -> None:
    version, meta = made
    data = meta.to_bytes(version)
    schema_of(Path(f"x.sample.v{version}.json")).validate(json.loads(data))
    assert parse_sample(data, "x") == meta
