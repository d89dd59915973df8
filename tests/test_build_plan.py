"""Promises of the plan of a build: what needs an encoder and what does not, and every reason not to begin."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image, ImageCms

from qwen_cache import open_cache
from qwen_cache.encode import recipe as recipe_module
from qwen_cache.encode import text
from qwen_cache.encode.recipe import recipe_changes
from qwen_cache.format.staging import Staging
from qwen_cache.models import family

from .support.caches import SMALL, build, contents, plan
from .support.commands import Result, refused, run
from .support.fake_lanes import FakeLanes
from .support.sources import change_mask, change_prompt, change_target

WORK = ("to_encode", "to_copy", "kept", "new_masks", "cached")
DONE = ("encoded", "copied", "kept", "new_masks")
BFLOAT16 = ("--dtype", "bfloat16")


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture
def out(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> Path:
    """A cache of the pairs."""
    assert build(pairs, tmp_path / "shards", model).code == 0
    return tmp_path / "shards"


def counts(found: dict[str, Any]) -> dict[str, int]:
    """The numbers of a plan that are not 0."""
    return {name: found[name] for name in WORK if found[name]}


def done(result: Result) -> dict[str, int]:
    """The numbers of the summary that are not 0."""
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    return {name: found[name] for name in DONE if found[name]}


# ---- what no transformer could take ----------------------------------------------------------------------------------


def test_a_text_longer_than_the_rope_table_is_refused_and_left_out_of_a_cache(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the build, by the numbers that the encoder gives; in a cache of before, by the run and its plan."""
    out, prompt = tmp_path / "shards", pairs / "target_images" / "cat.txt"
    prompt.write_text("make it as blue as the sea " * 215)
    with monkeypatch.context() as patch:
        patch.setattr(family.Family, "longest_text", lambda *_: 10**6)
        assert build(pairs, out, model).code == 0
    cache = open_cache(out)
    meta = next(row.meta for row in cache.rows() if row.name == "cat")
    limit = 4096 - max(max(height, width) for _, height, width in meta.img_shapes) // 2
    assert meta.text_length > limit
    [problem] = plan(pairs, out, model)["problems"]
    expected = (
        f"cat: the text has {meta.text_length} tokens, the transformer takes {limit} beside images of these sizes"
    )
    assert problem["what"] == expected
    for command in (("qwen-train", "plan", out), ("qwen-train", "run", out, "--out", tmp_path / "run")):
        result = run(*command, "--model", model)
        message = " ".join(result.stderr.split())
        found = f"found tokens of cat ({meta.text_length}, at most {limit})"
        assert f"1 text longer than the RoPE table beside the images ({found})" in message
        assert "run the same `qwen-cache build` with --on-error skip" in message
    skipped = build(pairs, out, model, "--on-error", "skip")
    assert (skipped.code, "0 encoded" in skipped.stderr) == (0, True), skipped.stderr
    assert [row.name for row in open_cache(out).rows()] == ["china", "cup", "flower"]
    assert run("qwen-train", "plan", out, "--model", model).code == 0
    prompt.write_text("make it blue " * 90)
    monkeypatch.setattr(text, "token_counter", None)
    assert plan(pairs, out, model)["problems"] == [], "a prompt of a thousand bytes is not tokenized"


# ---- what is worth knowing -------------------------------------------------------------------------------------------


def test_images_with_a_profile_that_is_not_srgb_are_counted(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time, though images that have not changed are not decoded again."""
    monkeypatch.setattr("qwen_cache.storage.remembered.SETTLED_NS", -(10**13))  # as after two seconds
    for name, space in (("target_images/cat", "XYZ"), ("control_images/cup", "LAB"), ("target_images/flower", "sRGB")):
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile(space)).tobytes()  # type: ignore[arg-type]
        with Image.open(pairs / f"{name}.png") as image:
            image.save(pairs / f"{name}.png", icc_profile=profile)
    for _ in range(2):
        [notice] = plan(pairs, tmp_path / "shards", model)["notices"]
        assert notice["what"] == "images have a colour profile that is not sRGB; it is ignored, as by the pipelines"
        paths = (pairs / "target_images" / "cat.png", pairs / "control_images" / "cup.png")
        assert (notice["count"], sorted(notice["names"])) == (2, sorted(map(str, paths)))
        assert build(pairs, tmp_path / "shards", model).code == 0


# ---- what needs no encoder -------------------------------------------------------------------------------------------


def test_settings_that_come_back_are_copied_and_the_plan_says_so(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    first = contents(out)
    there = build(pairs, out, model, *BFLOAT16, "--replace")
    line = "1 replaced shard kept for runs that read them: switching back costs nothing until `qwen-cache gc`"
    assert line in there.stderr
    assert counts(plan(pairs, out, model)) == {"to_copy": 4}
    dry = build(pairs, out, model, "--dry-run", "--check")
    assert dry.code == 1, "there is work, if not for an encoder"
    assert "plan     4 samples, 0 cached, 0 to encode, 4 to copy: 4 changed (recipe: dtype bfloat16 → float32: 4)" in (
        dry.stderr
    )
    assert "         4 samples from replaced shards: switching back costs nothing until `qwen-cache gc`" in dry.stderr
    assert not [line for line in dry.stderr.splitlines() if line.startswith(("estimate", "disk"))]
    back = build(pairs, out, model)
    assert back.code == 0
    assert "0 encoded, 4 copied from replaced shards\n" in back.stderr
    assert len(fast) == 2, "no encoder was loaded to come back"
    assert contents(out) == first
    for options in (BFLOAT16, ()):
        assert done(build(pairs, out, model, *options, "--json")) == {"copied": 4}
        listed = {shard.name for shard in open_cache(out).manifest.shards}
        assert {path.name for path in out.glob("*.tar")} == listed, "a shard that is replaced again leaves the folder"
    assert run("qwen-cache", "gc", out).code == 0
    result = build(pairs, out, model, *BFLOAT16, "--dry-run", "--json")
    assert counts(json.loads(result.stdout)) == {"to_encode": 4}


def test_an_interrupted_build_says_what_it_kept(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "shards"
    encode = FakeLanes.result

    def interrupt(lanes: FakeLanes, sample: Any) -> Any:
        if len(lanes.encoded) == 2:
            (staging,) = (out / ".staging").iterdir()
            assert len(Staging.finished(staging, 2)) == 2, "what a kill would leave"
            raise KeyboardInterrupt
        return encode(lanes, sample)

    with monkeypatch.context() as patch:
        patch.setattr(FakeLanes, "result", interrupt)
        stopped = build(pairs, out, model)
    assert stopped.code == 130
    assert "2 of 4 samples finished and kept; run the same command to continue\n" in stopped.stderr
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    dry = build(pairs, out, model, "--dry-run")
    assert "plan     4 samples, 0 cached, 2 to encode, 2 kept: 4 new" in dry.stderr
    assert "         2 samples kept from an interrupted build\n" in dry.stderr
    assert counts(plan(pairs, out, model)) == {"to_encode": 2, "kept": 2}
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before, "a plan writes nothing"
    result = build(pairs, out, model)
    assert result.code == 0
    assert ": 2 encoded, 2 kept from an interrupted build\n" in result.stderr
    assert fast[-1].encoded == ["cup", "flower"]


def test_new_masks_load_no_encoder(pairs: Path, out: Path, model: Path, fast: list[FakeLanes]) -> None:
    change_mask(pairs)
    dry = build(pairs, out, model, "--dry-run", "--measure")
    assert dry.code == 0
    assert "plan     4 samples, 3 cached, 0 to encode, 1 new mask: 1 changed (mask: 1)" in dry.stderr
    assert "         1 sample with only a new mask: everything else is cached" in dry.stderr
    change_prompt(pairs)
    assert counts(plan(pairs, out, model)) == {"to_encode": 1, "new_masks": 1, "cached": 2}
    work = {each["name"]: each["work"] for each in plan(pairs, out, model)["samples"]}
    assert work == {"cup": "new_masks", "flower": "to_encode"}
    assert done(build(pairs, out, model, "--json")) == {"encoded": 1, "new_masks": 1}
    result = build(pairs, out, model, "--edit-mask", "diff")
    assert result.code == 0, "the recipe has changed, but nothing is encoded"
    assert ": 0 encoded, 4 new masks\n" in result.stderr
    assert [lanes.encoded for lanes in fast[1:]] == [["flower"]]


def test_a_replaced_shard_that_is_damaged_is_encoded_and_counted_so(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    assert build(pairs, out, model, *BFLOAT16, "--replace").code == 0
    (replaced,) = (out / ".replaced").glob("*.tar")
    data = bytearray(replaced.read_bytes())
    data[len(data) // 2] ^= 1
    replaced.write_bytes(data)
    assert done(build(pairs, out, model, "--json")) == {"encoded": 4}
    assert run("qwen-cache", "verify", out).code == 0


# ---- another recipe by accident --------------------------------------------------------------------------------------


def test_another_recipe_asks_before_it_replaces_the_cache(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    before = contents(out)
    refusal = build(pairs, out, model, *BFLOAT16)
    typed = ["qwen-cache", "build", str(pairs), "--out", str(out), "--model", str(model), *SMALL, *BFLOAT16]
    elsewhere = [*typed[:3], *typed[5:], "--out", f"{out}-2"]
    commands = [elsewhere, [*typed, "--set", "cache.recipe=default-2"], [*typed, "--replace"]]
    error = (
        f"error: {out}: 4 of 4 cached samples would be encoded again, because the recipe changed: "
        "dtype float32 → bfloat16\n"
        "  → keep these samples too, in another folder or as another recipe, or replace them\n"
    )
    refused(refusal, error + "".join(f"    {shlex.join(command)}\n" for command in commands))
    assert contents(out) == before
    assert len(fast) == 1
    refused(build(pairs, out, model, *BFLOAT16, "--dry-run"), error)
    (found,) = plan(pairs, out, model, *BFLOAT16)["refused"]
    assert found["commands"][2] == shlex.join([*typed[:-2], "--dry-run", "--json", *BFLOAT16, "--replace"])
    shutil.copytree(out, out.with_name("copy"))
    assert [run(*command).code for command in commands[:2]] == [0, 0]
    sizes = {
        folder: len(json.loads(run("qwen-cache", "inspect", folder, "--json").stdout)["recipes"])
        for folder in (out, f"{out}-2")
    }
    assert list(sizes.values()) == [2, 1]
    shutil.rmtree(out)
    out.with_name("copy").rename(out)
    assert run(*commands[2]).code == 0
    assert len(open_cache(out)) == 4


def test_a_build_of_at_most_half_of_the_cache_does_not_ask(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    for path in [*pairs.rglob("c*")]:
        path.unlink() if not path.name.startswith("cup") and path.is_file() else None
    assert len(list((pairs / "target_images").glob("*.png"))) == 2
    assert done(build(pairs, out, model, *BFLOAT16, "--json")) == {"encoded": 2}


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ({"edit_mask": "diff", "edit_mask_version": 1}, {}, ["edit_mask diff → unset"]),
        ({}, {"attention": True, "edit_mask_version": 1}, ["store_attention unset → true"]),
        ({"encoder_version": 1}, {"encoder_version": 2}, ["another version of qwen-cache, which encodes differently"]),
        (
            {"vae": "a", "processor": "a"},
            {"vae": "b", "processor": "b"},
            ["another tokenizer or processor", "another VAE"],
        ),
        (
            {"pipeline": "QwenImageEditPlusPipeline", "template": "a", "drop_idx": 64, "positions": "mrope-3d"},
            {"pipeline": "QwenImagePipeline", "template": "b"},
            ["pipeline QwenImageEditPlusPipeline → QwenImagePipeline"],
        ),
        (
            {"template": "a", "picture_template": "a"},
            {"template": "b", "picture_template": "b"},
            ["another prompt template"],
        ),
        ({"resolution": [[1024, 1024], [1216, 832], [832, 1216]]}, {}, ["another resolution"]),
        (
            {"upscale": False, "vae_image_size": 16384},
            {"vae_image_size": 9216},
            ["upscale false → unset", "vae_image_size 16384 → 9216"],
        ),
        ({"imported_from": "musubi", "importer_version": 1}, {"vae": "a"}, ["imported from musubi"]),
        ({"final_norm": 1}, {"final_norm": 2}, ["another version of qwen-cache, which encodes differently"]),
        ({"dtype": "float32"}, {"dtype": "float32"}, []),
    ],
)
def test_changes_of_a_recipe_are_told_in_the_words_of_users(
    old: dict[str, Any], new: dict[str, Any], changes: list[str]
) -> None:
    assert recipe_changes(old, new) == changes


def test_an_upgrade_that_encodes_differently_says_so(
    pairs: Path, out: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "ENCODER_VERSION", recipe_module.ENCODER_VERSION + 1)
    why = "because the recipe changed: another version of qwen-cache, which encodes differently\n"
    refused(build(pairs, out, model), f"error: {out}: 4 of 4 cached samples would be encoded again, {why}")


# ---- disk space ------------------------------------------------------------------------------------------------------


def disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=total, used=total - free, free=free))


def test_a_disk_that_is_too_small_is_noticed_before_anything_is_encoded(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "new" / "shards"
    assert "disk     229 kB to write, " in build(pairs, out, model, "--dry-run").stderr
    disk(monkeypatch, 10_000_000, 200_000)
    told = (
        f"error: {out}: the disk has too little space for this build (expected about 229 kB, found 200 kB)\n"
        "  → make room (`qwen-cache gc` removes replaced shards), or name a folder on another disk with --out\n"
    )
    dry = build(pairs, out, model, "--dry-run")
    refused(dry, "disk     229 kB to write, 200 kB free\n", told)
    found = plan(pairs, out, model)
    assert (found["bytes_to_write"], found["bytes_free"]) == (found["bytes"], 200_000)
    refused(build(pairs, out, model), told)
    assert not fast
    assert build(pairs, out, model, "--set", "cache.compression=zstd").code == 0


@pytest.mark.parametrize("total", [0, -1])
def test_a_disk_that_does_not_say_is_no_reason_to_stop(
    total: int, pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    if total == 0:
        disk(monkeypatch, 0, 0)
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: (_ for _ in ()).throw(OSError("not here")))
    assert plan(pairs, tmp_path / "shards", model)["bytes_free"] is None
    result = build(pairs, tmp_path / "shards", model)
    assert result.code == 0
    assert "disk     229 kB to write, unknown free space\n" in result.stderr


def test_a_shard_that_is_written_again_takes_space_too(pairs: Path, out: Path, model: Path) -> None:
    change_target(pairs)
    found = plan(pairs, out, model)
    kept = [sample.row.entry.length for sample in open_cache(out) if sample.name != "china"]
    assert found["bytes_to_write"] == found["bytes"] + sum(kept)
