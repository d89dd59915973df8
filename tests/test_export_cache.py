"""`qwen-cache export`: what other trainers read, judged by our importers and by diffusers' packing.

`tools/check_exports.py` runs the code of those trainers on it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from safetensors.torch import load_file

from qwen_cache import open_cache
from qwen_cache.trainers import convert

from .support.commands import Result, refused, run
from .support.imports import TrainerSample, import_, imported, make, write_diffusion_pipe, write_musubi, write_qflux

NO_EMPTY = ("--leave-out", "empty_prompt_embeds")


def export(cache: Path, tool: str, out: Path, *options: str) -> Result:
    return run("qwen-cache", "export", cache, "--to", tool, "--out", out, *options)


def exported(cache: Path, tool: str, out: Path, *options: str) -> Path:
    result = export(cache, tool, out, *options)
    assert result.code == 0, result.stderr
    return out


@pytest.fixture
def made() -> list[TrainerSample]:
    """Samples of one size, each with a control of that size: every tool can hold them."""
    names = ("a_cat", "b dog", "c")
    return [make(name, f"{name} is blue", [(4, 6), (4, 6)], 5 + i, seed=i) for i, name in enumerate(names)]


# ---- and back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["musubi", "qflux", "diffusion-pipe"])
def test_an_exported_cache_is_imported_as_the_same_samples(
    tool: str, made: list[TrainerSample], tmp_path: Path
) -> None:
    """Keys and tensors of a cache that came from the tool."""
    write = {"musubi": write_musubi, "qflux": write_qflux, "diffusion-pipe": write_diffusion_pipe}[tool]
    theirs, options = write(tmp_path / "theirs", made), list[str | Path]()
    if tool == "qflux":
        options = ["--captions", _captions(tmp_path / "captions", made)]
    first = imported(tool, theirs, tmp_path / "first", *options)
    out = exported(first, tool, tmp_path / "out")
    if tool == "qflux":
        options = ["--captions", out / "data" / "images"]
    again = imported(tool, out / "cache" if tool == "qflux" else out, tmp_path / "again", *options)
    expected, found = open_cache(first), open_cache(again)
    assert {sample.key for sample in found} == {sample.key for sample in expected}
    for sample in expected:
        other = found[sample.key]
        assert (other.prompt, other.img_shapes) == (sample.prompt, sample.img_shapes)
        assert {name: tensor.tolist() for name, tensor in other.tensors().items()} == {
            name: tensor.tolist() for name, tensor in sample.tensors().items()
        }


def _captions(folder: Path, made: Sequence[TrainerSample]) -> Path:
    folder.mkdir()
    for sample in made:
        (folder / f"{sample.name}.txt").write_text(sample.prompt, encoding="utf-8")
    return folder


# ---- what is in the files --------------------------------------------------------------------------------------------


def packed(latents: torch.Tensor) -> torch.Tensor:
    """Latents `[1, 16, H, W]` as diffusers packs them."""
    _, channels, height, width = latents.shape
    tokens: torch.Tensor = QwenImageEditPlusPipeline._pack_latents(latents, 1, channels, height, width)[0]
    return tokens


def test_musubi_holds_every_size_and_number_of_controls(built: Callable[..., Path], tmp_path: Path) -> None:
    """Each size is a bucket of its own by the settings of the export."""
    cache, out = built("edit-plus"), tmp_path / "out"
    result = export(cache, "musubi", out, "--leave-out", "edit_mask")
    assert (result.code, "without edit_mask, which 1 sample has\n" in result.stderr) == (0, True)
    assert "without empty_prompt_embeds, which 4 samples have: it has no caption dropout\n" in result.stderr
    samples = list(open_cache(cache))
    largest = 0
    for path in (out / "cache").glob("*_te.safetensors"):
        (embeds,) = load_file(path).items()
        (other,) = (p for p in (out / "cache").glob(f"{path.name[:-19]}_*x*_qie.safetensors"))
        latents = load_file(other)
        (sample,) = (s for s in samples if torch.equal(s["prompt_embeds"], embeds[1]))
        target = next(name for name in latents if not name.startswith("latents_control"))
        assert torch.equal(packed(latents[target][None, :, 0]), sample["image_latents"])
        controls = [packed(latents[name][None, :, 0]) for name in sorted(latents) if name != target]
        assert torch.equal(torch.cat(controls), sample["control_latents"])
        width, height = map(int, other.name.split("_")[-2].split("x"))
        assert (1, height // 16, width // 16) == sample.img_shapes[0]
        largest = max(largest, width * height)
    assert len(list((out / "cache").iterdir())) == 2 * len(samples)
    settings = (out / "dataset.toml").read_text(encoding="utf-8")
    side = int(settings.partition("resolution = [")[2].partition(",")[0])
    assert side % 16 == 0
    assert (side - 16) ** 2 < largest <= side**2
    assert json.dumps(str(out / "cache")) in settings


def test_diffsynth_has_the_inputs_of_its_pipeline(built: Callable[..., Path], tmp_path: Path) -> None:
    cache = built("edit-plus")
    out = exported(cache, "diffsynth", tmp_path / "out", *NO_EMPTY, "--leave-out", "edit_mask", "--zero-cond-t")
    for i, sample in enumerate(open_cache(cache)):
        shared, positive, negative = torch.load(out / "0" / f"{i}.pth", weights_only=True)
        _, h, w = sample.img_shapes[0]
        assert (shared["height"], shared["width"], shared["zero_cond_t"], negative) == (16 * h, 16 * w, True, {})
        assert torch.equal(packed(shared["input_latents"]), sample["image_latents"])
        edit = shared["edit_latents"]
        controls = edit if isinstance(edit, list) else [edit]
        assert isinstance(edit, list) == (len(sample.img_shapes) > 2)
        assert torch.equal(torch.cat([packed(each) for each in controls]), sample["control_latents"])
        assert torch.equal(positive["prompt_emb"][0], sample["prompt_embeds"])
        assert int(positive["prompt_emb_mask"].sum()) == len(sample["prompt_embeds"])
        assert (out / "0" / f"{i}.pth").stat().st_size < 1.2 * sum(t.nbytes for t in sample.tensors().values())


def test_qflux_finds_each_sample_by_its_images(made: list[TrainerSample], tmp_path: Path) -> None:
    """In the sizes that its settings ask for; also where samples with other images have the same prompt."""
    same = [made[0], make("other", made[0].prompt, [(4, 6), (4, 6)], 9, seed=7)]
    cache = imported("musubi", write_musubi(tmp_path / "theirs", same), tmp_path / "cache")
    out = exported(cache, "qflux", tmp_path / "out")
    settings = yaml.safe_load((out / "qflux.yaml").read_text(encoding="utf-8"))
    processor = settings["data"]["init_args"]["processor"]["init_args"]
    assert (processor["target_size"], processor["controls_size"]) == ([64, 96], [[64, 96]])
    images = sorted((out / "data").rglob("*.png"))
    for path in images:
        with Image.open(path) as image:
            assert image.size == (96, 64)
    assert len({path.read_bytes() for path in images}) == len(images) == 4
    again = imported("qflux", out / "cache", tmp_path / "again", "--captions", out / "data" / "images")
    found = {(sample.prompt, *sample["prompt_embeds"].shape) for sample in open_cache(again)}
    assert found == {(sample.prompt, *sample.embeds.shape) for sample in same}


def test_diffusion_pipe_finds_its_pieces(made: list[TrainerSample], tmp_path: Path) -> None:
    """In the order of its own shuffle: of a dataset that is read from the export, by its seed for this size."""
    cache = imported("musubi", write_musubi(tmp_path / "theirs", made), tmp_path / "cache")
    out = exported(cache, "diffusion-pipe", tmp_path / "out")
    root = out / "cache" / "qwen_image"
    assert json.loads((root / "metadata" / "grouping_keys.json").read_text(encoding="utf-8")) == [[1.5, 1]]
    metadata = datasets.load_from_disk(str(root / "metadata" / "grouped_metadata_1.500_1"))
    assert sorted(caption[0] for caption in metadata["caption"]) == sorted(sample.prompt for sample in made)
    assert sorted(path.name for path in root.iterdir()) == ["ar_frames_1.500_1", "cache_1.500x96x64x1", "metadata"]


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("qflux", "its images have other sizes than those of most samples"),
        ("diffusion-pipe", "it has 2 controls, and diffusion-pipe has at most one"),
    ],
)
def test_what_a_tool_cannot_hold_is_refused_by_name(
    tool: str, message: str, built: Callable[..., Path], tmp_path: Path
) -> None:
    cache, out = built("edit-plus"), tmp_path / "out"
    without = "DiffSynth-Studio cannot hold edit_mask of 1 sample and empty_prompt_embeds of 4 samples"
    refused(export(cache, "diffsynth", out), without, "add --leave-out edit_mask --leave-out empty_prompt_embeds")
    refused(export(cache, "musubi", out), "musubi-tuner cannot hold edit_mask of 1 sample", "add --leave-out edit_mask")
    options = ("--leave-out", "edit_mask", *NO_EMPTY)
    result = export(cache, tool, out, *options)
    assert (result.code, out.exists()) == (2, False)
    assert message in result.stderr
    planned = export(cache, tool, out, *options, "--dry-run", "--json")
    facts = json.loads(planned.stdout)
    assert planned.code == 2
    assert facts["samples"] + len(facts["problems"]) == len(open_cache(cache))
    both = export(cache, tool, out, "--dry-run")
    assert (both.code, message in both.stderr, "cannot hold" in both.stderr) == (2, True, True)
    result = export(cache, tool, out, *options, "--on-error", "skip")
    assert (result.code == 0) == (facts["samples"] > 0)


@pytest.mark.parametrize("tool", ["qflux", "diffusion-pipe"])
def test_most_samples_decide_which_size_is_the_one(tool: str, tmp_path: Path) -> None:
    samples = [make(name, name, [(side, side)] * 2, 4, seed=side) for name, side in (("a", 2), ("b", 4), ("c", 4))]
    cache = imported("musubi", write_musubi(tmp_path / "theirs", samples), tmp_path / "cache")
    facts = json.loads(export(cache, tool, tmp_path / "out", "--dry-run", "--json", "--on-error", "skip").stdout)
    assert (facts["samples"], [each["where"].partition(" ")[0] for each in facts["problems"]]) == (2, ["a"])


def test_folders_and_models_are_checked_first(
    built: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = built("edit-plus")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    refused(export(cache, "musubi", tmp_path / "full"), "this folder is not empty")
    refused(export(cache, "musubi", tmp_path / "out", "--leave-out", "image_latents"), "cannot be left out")
    refused(export(built("qwen-image-21"), "musubi", tmp_path / "out"), "has no trainer for caches of this model")

    def full_disk(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(convert.TOOLS["musubi"].write.__globals__, "save_file", full_disk)
    result = export(cache, "musubi", tmp_path / "out", *NO_EMPTY, "--leave-out", "edit_mask")
    assert (result.code, list(tmp_path.iterdir())) == (2, [tmp_path / "full"])


def test_names_are_safe_and_unique(tmp_path: Path) -> None:
    samples = [
        make(name, name, [(2, 2), (2, 2)], 4, seed=i) for i, name in enumerate(["x y", "x-y", "[a]*?", "猫" * 70])
    ]
    cache = imported("musubi", write_musubi(tmp_path / "theirs", samples), tmp_path / "cache")
    out = exported(cache, "musubi", tmp_path / "out")
    assert len(list((out / "cache").iterdir())) == 8
    assert import_("musubi", out / "cache", tmp_path / "again").code == 0
    assert {s.prompt for s in open_cache(tmp_path / "again")} == {sample.name for sample in samples}


@pytest.fixture(scope="module")
def clashing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A cache of samples with this many controls. Their names are equal, equal without case, or those of another
    sample's files, as the tools name them."""

    @functools.cache
    def both(controls: int) -> Path:
        folder = tmp_path_factory.mktemp("clashing")

        def cache(name: str, *names: str) -> Path:
            made = [
                make(each, f"{name} {each}", [(2, 2)] * (1 + controls), 4, seed=i + len(names))
                for i, each in enumerate(names)
            ]
            return imported("musubi", write_musubi(folder / f"{name}-files", made), folder / name)

        first = cache("first", "cat", "dog")
        cat, dog = (sample.key for sample in open_cache(first))
        names = ("cat", "CAT", f"cat-{cat}", "dog", f"dog-{dog.upper()}", "a", "a_control_1", "a_mask")
        assert run("qwen-cache", "merge", first, cache("second", *names), "--out", folder / "both").code == 0
        return folder / "both"

    return both


@pytest.mark.parametrize("tool", ["musubi", "diffsynth", "diffusion-pipe", "qflux"])
def test_no_two_samples_share_a_file(tool: str, clashing: Callable[[int], Path], tmp_path: Path) -> None:
    cache = clashing(1 if tool == "diffusion-pipe" else 2)
    out = exported(cache, tool, tmp_path / "out")
    paths = [str(path.relative_to(out)).casefold() for path in out.rglob("*")]
    assert len(set(paths)) == len(paths)
    if tool == "diffsynth":
        assert len(paths) == 1 + len(open_cache(cache))
        return
    options = ("--captions", out / "data" / "images") if tool == "qflux" else ()
    again = imported(tool, out if tool == "diffusion-pipe" else out / "cache", tmp_path / "again", *options)
    found, expected = (
        {
            sample.prompt: (sample["image_latents"].tolist(), sample["prompt_embeds"].tolist())
            for sample in open_cache(each)
        }
        for each in (again, cache)
    )
    assert found == expected
    if tool == "qflux":  # its own rules for what is an image, a control and a mask
        stems = [path.stem for path in (out / "data" / "images").glob("*.png")]
        assert not [stem for stem in stems if re.search(r"control_\d+$", stem) or stem.endswith("_mask")]
        controls = {f"{stem}{end}.png" for stem in stems for end in ("", "_control_1")}
        assert {path.name for path in (out / "data" / "control_images").iterdir()} == controls
