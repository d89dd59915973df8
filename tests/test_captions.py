"""Captions as they are encoded: trigger word, prefix, suffix and orders of tags are those of the settings, marked words
stay marked, and a cache says why its samples changed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen_cache import open_cache
from qwen_cache.batching import sequence_settings
from qwen_cache.errors import ConfigError
from qwen_cache.settings.sections import CacheConfig, DataConfig, TrainConfig, WeightedCache
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.detect import read_source
from qwen_cache.sources.rows import Row
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Mixture, open_mixture
from qwen_train.flow import NoiseSchedule
from qwen_train.inference.images import typed_prompts
from qwen_train.run import as_trained

from .support.caches import build, plan
from .support.commands import run
from .support.fake_lanes import fake_lanes

TinyModel = Callable[[str], Path]


def rows(folder: Path, prompts: Sequence[str], **settings: Any) -> list[Row]:
    """The rows of a folder of images with these prompts, `0`, `1`, … in their order."""
    for number, prompt in enumerate(prompts):
        (folder / f"{number}.png").write_bytes(b"")
        (folder / f"{number}.txt").write_text(prompt, encoding="utf-8")
    captions = Captions.of(DataConfig(**settings))
    reading = {"captions": captions, "allow_empty_prompt": True, "marked_phrases": True}
    found, problems = read_source(folder, needs_control=False, **reading)  # type: ignore[arg-type]
    assert not problems
    return found


def prompts_of(cache: Path) -> dict[str, str]:
    opened = open_cache(cache)
    return {opened.row(i).name: opened.row(i).meta.prompt for i in range(len(opened))}


@pytest.mark.parametrize(
    ("prompt", "settings", "expected"),
    [
        ("a cat", {}, "a cat"),
        ("a [trigger] cat", {}, "a [trigger] cat"),
        ("a [trigger] cat, [trigger]", {"trigger_word": "sks"}, "a sks cat, sks"),
        ("a sks cat", {"trigger_word": "sks"}, "a sks cat"),
        ("she asks", {"trigger_word": "sks"}, "sks she asks"),
        ("", {"trigger_word": " sks "}, "sks"),
        ("a cat", {"trigger_word": "s+s (x)", "prompt_prefix": "photo:"}, "photo: s+s (x) a cat"),
        ("a cat", {"prompt_prefix": " a photo, ", "prompt_suffix": "at night"}, "a photo, a cat at night"),
        ("a cat", {"prompt_suffix": ", at night "}, "a cat, at night"),
        ("[[a [trigger] cat]] runs", {"trigger_word": "sks"}, "[[a sks cat]] runs"),
        ("a [[[trigger]]] cat", {"trigger_word": "sks"}, "a [[sks]] cat"),
        ("[[cat]], dog", {"trigger_word": "cat", "prompt_prefix": "a cat and"}, "a cat and [[cat]], dog"),
    ],
)
def test_a_prompt_is_completed_as_the_settings_say(
    prompt: str, settings: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    [row] = rows(tmp_path, [prompt], **settings)
    marked = row.prompt
    for begin, end in reversed(row.phrase):
        marked = f"{marked[:begin]}[[{marked[begin:end]}]]{marked[end:]}"
    assert marked == expected


def test_tags_are_shuffled_by_seed_and_caption_and_the_first_ones_kept(tmp_path: Path) -> None:
    prompts = ["hat, red , [[cat, old]],tree", "red, cat", "a cat", "hat, red , [[cat, old]],tree"]
    found = rows(tmp_path, prompts, shuffle_tags=5, keep_tags=1, trigger_word="sks")
    first = [row for row in found if row.where.endswith("0.png")]
    possible = {", ".join(["sks hat", *order]) for order in permutations(["red", "cat", "old", "tree"])}
    assert len({row.prompt for row in first} & possible) == 5
    assert [row.name for row in first] == ["0", "0#2", "0#3", "0#4", "0#5"]
    for row in first:
        assert {row.prompt[slice(*span)].strip(", ") for span in row.phrase} <= {"cat", "old", "cat, old", "old, cat"}
        assert sum(end - begin for begin, end in row.phrase) == len("catold")
    assert [row.prompt for row in found if row.where.endswith(("1.png", "2.png"))] == ["sks red, cat", "sks a cat"]
    assert [row.prompt for row in found if row.where.endswith("3.png")] == [row.prompt for row in first]
    again = rows(tmp_path, prompts, shuffle_tags=5, keep_tags=1, trigger_word="sks", shuffle_seed=1)
    assert [row.prompt for row in again] != [row.prompt for row in found]
    every = rows(tmp_path, ["red, cat, red"], shuffle_tags=9)[:3]
    assert {row.prompt for row in every} == {"red, cat, red", "cat, red, red", "red, red, cat"}


def test_names_of_orders_are_those_that_no_other_row_has(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"")
    table = tmp_path / "t.jsonl"
    table.write_text('{"image": "0.png", "prompts": ["a, b", "c, d"]}', encoding="utf-8")
    found, _ = read_source(table, needs_control=False, captions=Captions(orders=2))
    assert [(row.name, sorted(row.prompt)) for row in found] == [
        (name, sorted(prompt)) for name, prompt in [("0", "a, b"), ("0#3", "a, b"), ("0#2", "c, d"), ("0#2#2", "c, d")]
    ]


def test_a_cache_stores_the_changed_prompts_and_says_why(
    pairs: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_lanes(monkeypatch)
    model, out = tiny_model("edit-plus"), tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    before = prompts_of(out)
    trigger = ("--set", "data.trigger_word=sks")
    assert plan(pairs, out, model, *trigger)["reasons"] == {"prompt": 4}
    assert build(pairs, out, model, *trigger).code == 0
    assert prompts_of(out) == {name: f"sks {prompt}" for name, prompt in before.items()}


def test_brackets_are_part_of_the_prompt_unless_they_are_said_to_mark_words(
    pairs: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the words between them would be used, `build` asks; a cache of before says why its samples change."""
    fake_lanes(monkeypatch)
    model, out, marked = tiny_model("edit-plus"), tmp_path / "shards", "data.marked_phrases"
    text = r"write [[HELLO]], \[[ and ]]"
    (pairs / "target_images" / "cat.txt").write_text(r"invert [[all]], \[[ too", encoding="utf-8")
    assert build(pairs, out, model, "--set", f"{marked}=true").code == 0
    assert prompts_of(out)["cat"] == "invert all, [[ too"
    later = plan(pairs, out, model)
    assert later["reasons"] == {"prompt: [[ ]] are kept now": 1}
    [notice] = later["notices"]
    assert (notice["what"], notice["names"]) == ("prompts have [[ ]], which are part of the prompt", ["cat"])
    assert f"{marked}: true" in notice["do"]
    (pairs / "target_images" / "cat.txt").write_text(text, encoding="utf-8")
    assert plan(pairs, out, model, "--set", f"{marked}=false")["notices"] == []
    assert build(pairs, out, model).code == 0
    assert prompts_of(out)["cat"] == text
    attention = ("--set", "cache.store_attention=true")
    result = build(pairs, out, model, *attention, "--dry-run")
    assert result.code == 2
    message = " ".join(result.stderr.split())
    assert "1 prompt with [[ ]], which may mark the words that say where the edit is" in message
    assert f"set {marked}=true if they do, or =false if they are part of the prompt" in message
    assert plan(pairs, out, model, *attention, "--set", f"{marked}=false")["notices"] == []
    [problem] = plan(pairs, out, model, *attention, "--set", f"{marked}=true")["problems"]
    assert "]] without [[" in problem["what"]


def test_predict_takes_prompts_as_the_run_of_its_lora_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the settings, else from those of the run or of its caches; where they say nothing, a line does."""
    write_settings(tmp_path / "cache", {"data": {"trigger_word": "sks", "marked_phrases": True}})
    for name, data in (("run", {}), ("other", {"trigger_word": "tok"})):
        write_settings(tmp_path / name, {"data": data, "cache": {"path": str(tmp_path / "cache")}})
    typed = ["a [trigger] in [[red]]", "a cat"]
    run_folder, other = tmp_path / "run", tmp_path / "other"
    for given, folders, expected in (
        (DataConfig(), [], typed),
        (DataConfig(), [tmp_path / "no run"], typed),
        (DataConfig(), [run_folder], ["a sks in red", "a cat"]),
        (DataConfig(trigger_word="ohwx", marked_phrases=False), [run_folder], ["a ohwx in [[red]]", "a cat"]),
        (DataConfig(), [run_folder, other], ["a [trigger] in red", "a cat"]),
    ):
        assert typed_prompts(typed, as_trained(given, folders)) == expected
        assert "note: [trigger] " in capsys.readouterr().err


def write_settings(folder: Path, values: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "qwen.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def test_an_epoch_may_have_each_image_once_with_its_captions_in_turn(
    pairs: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caption that the source lists twice comes twice as often; other sizes of an image are no alternatives."""
    fake_lanes(monkeypatch)
    lines = {"cat": ["a", "b", "a"], "cup": ["c"]}
    table = pairs / "t.jsonl"
    rows = (
        {"target": f"target_images/{name}.png", "control": f"control_images/{name}.png", "prompts": prompts}
        for name, prompts in lines.items()
    )
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model, out = tiny_model("edit-plus"), tmp_path / "shards"
    sizes = ("--set", "data.vae_image_size=[9216,4096]", "--set", "data.resolutions_per_sample=all")
    result = run("qwen-cache", "build", table, "--out", out, "--model", model, *sizes)
    assert result.code == 0, result.stderr
    settings = TrainConfig(captions="one")
    twice = open_mixture([WeightedCache(path=str(out)), WeightedCache(path=str(out), weight=2)], CacheConfig())
    for samples, times in ((Mixture.of(open_cache(out)), 1), (twice, 3)):
        epochs = Batches(samples, settings, NoiseSchedule()).plan.epochs
        found = Counter[str]()
        for epoch in range(3):
            prompts = [samples.row(i).meta.prompt for i in epochs.order(epoch).tolist()]
            assert len(prompts) == 4 * times
            assert prompts.count("c") == 2 * times
            found.update(prompts)
        assert found == {"a": 4 * times, "b": 2 * times, "c": 6 * times}
    fixed, default = sequence_settings(settings), sequence_settings(TrainConfig())
    assert {name for name, value in default.items() if value != fixed[name]} == {"train.captions"}
    twice.has_index = False
    with pytest.raises(ConfigError, match=r"train\.captions=one needs the index of a cache"):
        Batches(twice, settings, NoiseSchedule())
