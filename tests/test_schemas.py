"""FORMAT.md, the JSON Schemas and the parser agree: on every example, and on whatever the writer can produce."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_cache.format.errors import RULES, FormatError
from qwen_cache.format.identity import Inputs, dataset_identity
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe, Shard, parse_manifest
from qwen_cache.format.sample import SampleMeta, TensorSpec, parse_sample

SCHEMAS = Path(__file__).parents[1] / "schemas"
VALID = sorted((SCHEMAS / "examples" / "valid").glob("*.json"))
INVALID = sorted((SCHEMAS / "examples" / "invalid").glob("*.json"))
ONLY_THE_PARSER = {"F4", "F5", "F6-name", "F10", "F11-no-control", "F12-sides", "F12-prefix", "F13-mixed"}
"""What relates two places of a document, or a hash to its content, is beyond JSON Schema."""


def schema_of(path: Path) -> jsonschema.Draft202012Validator:
    """The validator for `name.cache.v2.json` or `name.sample.v1.json`."""
    kind, version = path.name.split(".")[-3:-1]
    schema = json.loads((SCHEMAS / f"{kind}.{version}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


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


def test_every_rule_that_json_can_break_has_an_example() -> None:
    assert {path.name.split("-")[0] for path in INVALID} == {f"F{n}" for n in (1, 2, 3, 4, 5, 6, 9, 10, 11, 12, 13)}


def test_the_code_and_format_md_have_the_same_rules() -> None:
    text = (SCHEMAS / "FORMAT.md").read_text(encoding="utf-8")
    written = set(re.findall(r"^\*\*(F\d+)\*\*", text, flags=re.MULTILINE))
    assert set(RULES) == written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 1, "format": 2}', "a key is given twice"),
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
    wanted: dict[str, Any] = {"image_latents": (dtype, (tokens[0], 64))}
    if len(shapes) > 1:
        wanted["control_latents"] = (dtype, (sum(tokens[1:]), 64))
    wanted |= {"prompt_embeds": (dtype, (text, width)), "empty_prompt_embeds": (dtype, (draw(sides), width))}
    if version == 2 and draw(st.booleans()):
        wanted["edit_mask"] = ("F32", (tokens[0],))
    tensors = {name: TensorSpec(kind, shape, draw(hashes)) for name, (kind, shape) in wanted.items()}
    inputs = Inputs(draw(hashes), tuple(draw(st.lists(hashes, max_size=3))), draw(st.none() | hashes))
    prefix = draw(st.integers(0, text)) if version == 2 else 0
    return version, SampleMeta(draw(hashes), inputs, draw(st.text(max_size=30)), shapes, prefix, tensors)


@given(samples())
def test_what_the_writer_makes_of_a_sample_validates_and_parses_back(made: tuple[int, SampleMeta]) -> None:
    version, meta = made
    data = meta.to_bytes(version)
    schema_of(Path(f"x.sample.v{version}.json")).validate(json.loads(data))
    assert parse_sample(data, "x") == meta
