"""A sample's key changes with whatever its tensors depend on, and with nothing else: the functions over all inputs,
then a plan over files and settings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qwen_cache.encode import builder, recipe
from qwen_cache.encode.plan import BuildPlan
from qwen_cache.format.identity import Inputs, Phrase, Slider, canonical_json, dataset_identity, recipe_id, sample_key
from qwen_cache.format.update import read_existing
from qwen_cache.models.family import PIPELINES
from qwen_cache.settings.load import load_config

# ---- the functions ---------------------------------------------------------------------------------------------------

hashes = st.sampled_from(["0" * 32, "1" * 32, "2" * 32])  # few, so that equal ones meet in other places
prompts = (
    st.sampled_from(["", "é", "e\u0301", "0" * 32, "null", '","recipe":"', "a cat", "a cat ", "A cat"]) | st.text()
)
shapes = st.lists(st.sampled_from([(1, 2, 4), (1, 4, 2), (1, 12, 4)]), min_size=1, max_size=2).map(tuple)
phrases = st.sampled_from([(), ((0, 1),), ((0, 2),), ((0, 1), (2, 3))])
seeds = st.none() | st.sampled_from([0, 1])
rejected_images = st.none() | st.tuples(hashes, st.sampled_from([(1, 2, 4), (1, 4, 2)]))
controls_of = st.lists(hashes, max_size=3).map(tuple)
sliders = st.none() | st.builds(Slider, prompts, prompts)
identities = st.tuples(
    *(hashes, hashes, controls_of, st.none() | hashes, prompts, shapes, phrases, seeds, rejected_images, sliders)
)
Shape = tuple[int, int, int]
Rejected = tuple[str, Shape] | None
Content = tuple[str, str, tuple[str, ...], str | None, str]
Identity = tuple[*Content, tuple[Shape, ...], Phrase, int | None, Rejected, Slider | None]
ONE = ((1, 2, 4),), (), None, None, None


def key_of(identity: Identity) -> str:
    recipe, target, controls, mask, prompt, img_shapes, phrase, seed, rejected, slider = identity
    digest, shape = rejected or (None, None)
    return sample_key(recipe, Inputs(target, controls, mask, seed, digest), prompt, img_shapes, phrase, shape, slider)


@given(identities, identities)
@example(  # a control is no mask
    ("0" * 32, "1" * 32, ("2" * 32,), None, "a", *ONE), ("0" * 32, "1" * 32, (), "2" * 32, "a", *ONE)
)
@example(("0" * 32, "1" * 32, (), None, "é", *ONE), ("0" * 32, "1" * 32, (), None, "e\u0301", *ONE))  # other tokens
@example(  # lying, standing
    ("0" * 32, "1" * 32, (), None, "a", *ONE), ("0" * 32, "1" * 32, (), None, "a", ((1, 4, 2),), *ONE[1:])
)
def test_keys_are_equal_exactly_where_everything_is(one: Identity, two: Identity) -> None:
    assert (key_of(one) == key_of(two)) == (one == two)


@given(identities, st.data())
def test_a_change_in_one_place_is_another_key(one: Identity, data: st.DataObject) -> None:
    """Two independent examples would seldom differ in only one place."""
    place = data.draw(st.integers(0, 9))
    other = data.draw(identities)
    two = (*one[:place], other[place], *one[place + 1 :])
    assert (key_of(one) == key_of(two)) == (one[place] == other[place])  # type: ignore[arg-type]


@given(st.permutations(["0" * 32, "1" * 32, "2" * 32]))
def test_the_order_of_controls_is_part_of_the_key(controls: list[str]) -> None:
    first = ("0" * 32, "0" * 32, ("0" * 32, "1" * 32, "2" * 32), None, "a cat", *ONE)
    assert (key_of((*first[:2], tuple(controls), *first[3:])) == key_of(first)) == (controls == sorted(controls))


scalars = st.sampled_from([None, True, False, 0, 1, 0.0, 1.0, -0.0, "", "0", "1", "1.0", "true", "null"])
values = st.recursive(
    scalars | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
recipes = st.dictionaries(st.text(max_size=3), values, max_size=4)


def exactly(value: Any) -> Any:
    """Equal for two values only if all of their types are equal too, unlike `==` of Python."""
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [exactly(inner) for inner in value]
    return type(value), repr(value)


@given(recipes, recipes)
@example({"a": 1}, {"a": True})
@example({"a": 1}, {"a": 1.0})
@example({"a": 1}, {"a": "1"})
@example({"a": {"b": 1}}, {"a": ["b", 1]})
@example({"a": {}, "b": 1}, {"a": {"b": 1}})
@example({"a": "é"}, {"a": "e\u0301"})
@example({"a": None}, {})
def test_recipe_ids_are_equal_exactly_where_every_value_and_type_is(one: Any, two: Any) -> None:
    assert (recipe_id(one) == recipe_id(two)) == (exactly(one) == exactly(two))


@given(recipes, st.randoms(use_true_random=False))
def test_the_order_of_a_recipe_s_keys_is_not_part_of_it(recipe: dict[str, Any], chance: Any) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in chance.sample(list(value), len(value))}
        return [shuffled(inner) for inner in value] if isinstance(value, list) else value

    assert recipe_id(shuffled(recipe)) == recipe_id(recipe)
    assert recipe_id(json.loads(canonical_json(recipe))) == recipe_id(recipe)  # as a reader of cache.json finds it


keys = st.lists(st.sampled_from([f"{i:032x}" for i in range(4)]), max_size=4)


@given(keys, keys)
def test_datasets_are_the_same_exactly_where_their_keys_are_in_order(one: list[str], two: list[str]) -> None:
    assert (dataset_identity(one) == dataset_identity(two)) == (one == two)


# ---- files and settings ----------------------------------------------------------------------------------------------

Change = Callable[[Path, Path], Any]  # of the source and the model


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model that may be changed."""
    return Path(shutil.copytree(tiny_model("edit-plus"), tmp_path / "model"))


def plan(source: Path, model: Path, *settings: str) -> BuildPlan:
    out = source.parent / "shards"
    config = load_config(None, ["data.vae_image_size=16384", *settings], model__path=str(model), cache__path=str(out))
    job = builder.prepare_build(config, str(source))
    assert not job.problems
    return builder.plan_build(job, read_existing(out, job.format_version))


def keys_of(source: Path, model: Path, *settings: str) -> dict[str, str]:
    """The key of each sample by its name."""
    return {sample.row.name: sample.key for sample in plan(source, model, *settings).samples}


def flip_last_bit(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def append(path: Path, data: bytes = b"\0") -> None:
    """A byte after the end of an image or of a table of tokens: readers ignore it, the hash does not."""
    path.write_bytes(path.read_bytes() + data)


def rename(pairs: Path) -> None:
    for path in list(pairs.rglob("cup*")):
        path.rename(path.with_name(path.name.replace("cup", "mug")))


def touch(pairs: Path, model: Path) -> None:
    for path in (*pairs.rglob("*"), *model.rglob("*")):
        os.utime(path, (1, 1))


def add_files(pairs: Path, model: Path) -> None:
    (model / "README.md").write_text("a model")
    (model / "vae" / "README.md").write_text("a part")
    (model / "tokenizer" / ".gitattributes").write_text("*.json text")
    (pairs / "LICENSE").write_text("free")


def change_what_is_not_asked(_: Path, model: Path) -> None:
    flip_last_bit(model / "transformer" / "diffusion_pytorch_model.safetensors")
    append(model / "scheduler" / "scheduler_config.json", b"\n")


@pytest.mark.parametrize("change", [touch, add_files, change_what_is_not_asked], ids=lambda change: change.__name__)
def test_what_makes_no_difference_to_a_tensor_makes_none_to_a_key(change: Change, pairs: Path, model: Path) -> None:
    before = keys_of(pairs, model)
    change(pairs, model)
    assert keys_of(pairs, model) == before


def test_names_and_folders_make_no_difference(pairs: Path, model: Path, tmp_path: Path) -> None:
    before = keys_of(pairs, model)
    rename(pairs)
    pairs.rename(tmp_path / "elsewhere")
    model.rename(tmp_path / "another")
    after = keys_of(tmp_path / "elsewhere", tmp_path / "another")
    assert {("cup" if name == "mug" else name): key for name, key in after.items()} == before


@pytest.mark.parametrize(
    "setting",
    [
        *("train.batch_size=4", "cache.shard_size=1", "cache.compression=zstd", "cache.vae_device=cpu"),
        *("cache.recipe=another", "train.seed=7", "data.on_error=skip"),
    ],
)
def test_settings_that_make_no_difference_to_a_tensor_make_none_to_a_key(
    setting: str, pairs: Path, model: Path
) -> None:
    assert keys_of(pairs, model, setting) == keys_of(pairs, model)


def test_in_float32_the_device_makes_no_difference_to_a_key(pairs: Path, model: Path) -> None:
    """In bfloat16 it does where it is a CPU (`tests/test_recipe.py`)."""
    settings = ("cache.text_device=cpu", "cache.text_device=cuda:0")
    assert len({str(keys_of(pairs, model, "cache.dtype=float32", setting)) for setting in settings}) == 1


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("target_images/china.png", {"china"}),
        ("control_images/cat.png", {"cat"}),
        ("control_images/cat_control_1.png", {"cat"}),
        ("control_images/cup_mask.png", {"cup"}),
        ("target_images/flower.txt", {"flower"}),
    ],
)
def test_any_byte_of_a_sample_s_files_changes_its_key_and_no_other(
    file: str, names: set[str], pairs: Path, model: Path
) -> None:
    before = keys_of(pairs, model)
    append(pairs / file, b"!" if file.endswith(".txt") else b"\0")
    after = keys_of(pairs, model)
    assert {name for name in before if before[name] != after[name]} == names


def test_swapped_controls_are_another_sample(pairs: Path, model: Path) -> None:
    before, folder = keys_of(pairs, model), pairs / "control_images"
    (folder / "cat.png").rename(folder / "x.png")
    (folder / "cat_control_1.png").rename(folder / "cat.png")
    (folder / "x.png").rename(folder / "cat_control_1.png")
    after = keys_of(pairs, model)
    assert {name for name in before if before[name] != after[name]} == {"cat"}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "file",
    [
        *("vae/diffusion_pytorch_model.safetensors", "vae/config.json"),
        *("text_encoder/model.safetensors", "text_encoder/config.json"),
        *("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "processor/preprocessor_config.json"),
    ],
)
def test_any_byte_of_the_encoders_changes_every_key(file: str, pairs: Path, model: Path) -> None:
    before = keys_of(pairs, model)
    append(model / file, b"\n") if file.endswith(".json") else flip_last_bit(model / file)
    after = keys_of(pairs, model)
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())


@pytest.mark.parametrize(
    "setting", ["cache.dtype=float32", "data.vae_image_size=20000", "data.condition_image_size=12544"]
)
def test_settings_that_change_tensors_change_every_key(setting: str, pairs: Path, model: Path) -> None:
    assert not set(keys_of(pairs, model).values()) & set(keys_of(pairs, model, setting).values())


@pytest.mark.parametrize("part", ["frame", "image", "drop_idx"])
def test_the_template_changes_every_key(part: str, pairs: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys_of(pairs, model)
    template = PIPELINES["QwenImageEditPlusPipeline"].template
    other = replace(template, **{part: template.drop_idx + 1 if part == "drop_idx" else getattr(template, part) + " "})
    pipeline = PIPELINES["QwenImageEditPlusPipeline"]
    monkeypatch.setitem(PIPELINES, pipeline.name, replace(pipeline, template=other))
    assert not set(before.values()) & set(keys_of(pairs, model).values())


def test_another_version_of_the_encoding_code_changes_every_key(
    pairs: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = keys_of(pairs, model)
    monkeypatch.setattr(recipe, "ENCODER_VERSION", recipe.ENCODER_VERSION + 1)
    assert not set(before.values()) & set(keys_of(pairs, model).values())


def test_a_source_with_everything_twice_is_planned_once(pairs: Path, model: Path, tmp_path: Path) -> None:
    """Under other names, in another folder."""
    before = keys_of(pairs, model)
    for folder in ("target_images", "control_images"):
        shutil.copytree(pairs / folder, pairs / folder / "again")
    samples = plan(pairs, model).samples
    assert {sample.key for sample in samples} == set(before.values())
    assert [sample.source_rows for sample in samples] == [2] * len(before)
