"""Edit masks and attention in a cache: those of the source, by difference, or by a head; the phrase in the key.

The judges: the difference of the very images, and one pass of FrozenQwen over them, which is held to eager attention
elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import Qwen2_5_VLForConditionalGeneration

from qwen_cache import open_cache
from qwen_cache.encode import preflight
from qwen_cache.encode.masks import MaskMaker
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.encode.recipe import EditMasks, token_coverage
from qwen_cache.experimental.attention import FrozenQwen
from qwen_cache.experimental.masks import (
    HeadMetadata,
    MaskHead,
    difference_mask,
    encoder_of,
    load_head,
    predict_mask,
    save_head,
)
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import Inputs
from qwen_cache.models.encoders import load_processor
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import load_config
from qwen_cache.sources.places import File
from qwen_cache.sources.rows import Row
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.data.served import ServedSamples
from qwen_train.run import ToEncode

from .support.caches import SMALL, contents
from .support.commands import Result, run
from .support.photographs import photograph
from .support.serving import running, service_job

TinyModel = Callable[[str], Path]
SIZE = (128, 128)  # of images, as the VAE sees them; the text encoder makes 5×5 tokens of one


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An edited place, an edit with a mask elsewhere, two equal images, and a global change."""
    folder = tmp_path / "data"
    rows = []
    for name, photo in (
        ("spot", "chelsea.png"),
        ("said", "china.jpg"),
        ("same", "coffee.png"),
        ("tone", "rocket.jpg"),
    ):
        control = photograph(photo).resize(SIZE)
        target = control.copy()
        if name in ("spot", "said"):
            ImageDraw.Draw(target).rectangle((32, 48, 79, 111), fill=(255, 0, 255))
        if name == "tone":
            target = control.point(lambda v: 255 - v)
        for role, image in (("after", target), ("before", control)):
            (folder / role).mkdir(parents=True, exist_ok=True)
            image.save(folder / role / f"{name}.png")
        rows.append({"target": f"after/{name}.png", "control": f"before/{name}.png", "prompt": f"edit the {name}"})
    mask = Image.new("L", SIZE)
    mask.paste(255, (64, 0, 128, 64))
    mask.save(folder / "mask.png")
    rows[1]["mask"] = "mask.png"
    write(folder, rows)
    return folder


def write(folder: Path, rows: list[dict[str, str]]) -> None:
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def edit_rows(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    for row in rows:
        change(row)
    write(folder, rows)


@pytest.fixture
def build(source: Path, tiny_model: TinyModel, tmp_path: Path) -> Callable[..., Result]:
    def make(*options: str | Path, out: str = "shards", model: str = "edit-plus") -> Result:
        named = ("--out", tmp_path / out, "--model", tiny_model(model))
        return run("qwen-cache", "build", source, *named, *SMALL, *options)

    return make


@pytest.fixture
def cache(build: Callable[..., Result], tmp_path: Path) -> Callable[..., Cache]:
    """The cache of a build that succeeds, and verifies."""

    def make(*options: str | Path, out: str = "shards") -> Cache:
        result = build(*options, out=out)
        assert result.code == 0, result.stderr
        assert run("qwen-cache", "verify", tmp_path / out).code == 0
        return open_cache(tmp_path / out)

    return make


def by_name(cache: Cache) -> dict[str, Sample]:
    return {sample.name: sample for sample in cache}


def origins(cache: Cache) -> dict[str, str | None]:
    return dict(zip(cache.table["name"].to_pylist(), cache.table["edit_mask_from"].to_pylist(), strict=True))


NAMES = ("after/spot", "after/said", "after/same", "after/tone")


# ---- where masks come from -------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("none", (None, None, None, None)),
        ("file", (None, "file", None, None)),
        ("diff", ("difference", "file", None, None)),
        ("auto", ("difference", "file", None, None)),
    ],
)
def test_a_mask_of_the_source_wins_and_what_has_no_place_has_no_mask(
    cache: Callable[..., Cache], option: str, expected: tuple[str | None, ...]
) -> None:
    made = cache("--edit-mask", option)
    assert origins(made) == dict(zip(NAMES, expected, strict=True))
    assert {name for name, sample in by_name(made).items() if "edit_mask" in sample.tensors()} == {
        name for name, origin in origins(made).items() if origin
    }


def test_the_difference_is_that_of_the_images_the_vae_sees(cache: Callable[..., Cache], source: Path) -> None:
    sample = by_name(cache("--edit-mask", "diff"))["after/spot"]
    target, control = (Image.open(source / role / "spot.png") for role in ("after", "before"))
    expected = difference_mask(target, control).mask
    assert expected is not None
    assert np.array_equal(sample["edit_mask"].numpy().reshape(expected.shape), expected)
    true = np.zeros((8, 8))
    true[3:7, 2:5] = 1
    assert np.array_equal(expected > 0.5, true > 0.5)


def test_large_images_are_compared_smaller_on_the_same_cells(tmp_path: Path) -> None:
    control = photograph("coffee.png").resize((1024, 768))
    target = control.copy()
    ImageDraw.Draw(target).rectangle((256, 320, 511, 639), fill=(0, 255, 255))
    maker = MaskMaker(EditMasks("diff", None, keep_attention=False), crop=False, device=torch.device("cpu"))
    row = Row("a", "a", File(tmp_path), (File(tmp_path),), None, "")
    planned = PlannedSample(row, Inputs("", ("",), None), "", ((1024, 768),), ((1024, 768),))
    mask = maker.of_images(planned, lambda: [target, control])
    assert mask is not None
    expected = torch.zeros(48, 64)
    expected[20:40, 16:32] = 1
    assert ((mask.coverage.view(48, 64) > 0.5) != (expected > 0.5)).sum() <= 8


@pytest.mark.parametrize(
    ("mask", "crop", "seen"),
    [
        ((80, 48), False, (slice(None), slice(None))),
        ((160, 96), False, (slice(None), slice(None))),
        ((160, 48), True, (slice(None), slice(40, 120))),
        ((80, 96), True, (slice(24, 72), slice(None))),
    ],
    ids=["its own size", "twice as large", "wider", "higher"],
)
def test_coverage_is_the_mean_of_each_cell(mask: tuple[int, int], crop: bool, seen: tuple[slice, slice]) -> None:
    """Coverage of a random mask; the pixels that it has beyond the target's is cut off evenly."""
    pixels = 255 * np.random.default_rng(0).integers(0, 2, mask[::-1], dtype=np.uint8)
    cells = pixels[seen] / 255
    height, width = cells.shape[0] // 3, cells.shape[1] // 5
    expected = cells.reshape(3, height, 5, width).mean((1, 3))
    found = token_coverage(Image.fromarray(pixels), (80, 48), crop)
    assert (found.dtype, found.shape) == (np.float32, (15,))
    assert np.abs(found.reshape(3, 5) - expected).max() < 1.1 / 255, "rounded once in each direction"


def test_by_default_nothing_of_this_is_in_the_recipe(cache: Callable[..., Cache]) -> None:
    """So that what was built before is found again."""
    assert not {"edit_mask", "mask_head", "attention"} & cache().recipe.recipe.keys()


def test_another_origin_is_another_recipe(cache: Callable[..., Cache], build: Callable[..., Result]) -> None:
    cache()
    result = build("--edit-mask", "diff", "--dry-run", "--json")
    found = json.loads(result.stdout)
    assert (found["to_encode"], found["new_masks"]) == (0, 4)
    assert found["reasons"] == {"recipe: edit_mask unset → diff": 4}


# ---- attention -------------------------------------------------------------------------------------------------------


def looked(model: Path, source: Path, name: str, text: str) -> torch.Tensor:
    """One pass over image and prompt."""
    folder = open_model(str(model), ("text_encoder", "tokenizer", "processor"))
    whole = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder.component("text_encoder"), dtype=torch.float32)
    qwen = FrozenQwen(whole, load_processor(folder), template=PIPELINES[folder.pipeline].template)
    control = Image.open(source / "before" / f"{name}.png")
    control = control.resize(calculate_dimensions(12544, control.size), Image.Resampling.LANCZOS)
    return qwen.ground(control, text).attention[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("batched", [(), ("--set", "cache.text_batch_tokens=4096")])
def test_attention_is_what_one_pass_over_image_and_prompt_has(
    cache: Callable[..., Cache], source: Path, tiny_model: TinyModel, batched: tuple[str, ...]
) -> None:
    edit_rows(source, lambda row: row.update(prompt=row["prompt"].replace("the ", "the [[") + "]]"))
    made = cache("--set", "cache.store_attention=true", "--set", "data.marked_phrases=true", *batched)
    for name, sample in by_name(made).items():
        name = name.removeprefix("after/")
        expected = looked(tiny_model("edit-plus"), source, name, f"edit the [[{name}]]")
        found = sample["attention"]
        assert found.dtype == torch.float16
        assert found.shape == expected.shape == (found.shape[0], 5, 5)
        assert (found - expected).abs().max() < 1e-3 * expected.max()
        whole = looked(tiny_model("edit-plus"), source, name, f"edit the {name}")
        assert (found - whole).abs().max() > 1e-3 * expected.max()
        assert sample.row.meta.phrase == ((9, 9 + len(name)),)


@pytest.mark.slow
def test_marks_are_no_part_of_the_prompt_and_count_where_attention_is_asked_for(
    cache: Callable[..., Cache], source: Path
) -> None:
    plain, seen = (cache(*options, out=f"a{len(options)}") for options in ((), ("--set", "cache.store_attention=true")))
    edit_rows(source, lambda row: row.update(phrase="edit"))
    marked, looking = (
        cache(*options, out=f"b{len(options)}") for options in ((), ("--set", "cache.store_attention=true"))
    )
    assert [sample.key for sample in marked] == [sample.key for sample in plain]
    assert not {sample.key for sample in looking} & {sample.key for sample in seen}
    for one, other in zip(plain, looking, strict=True):
        assert one.prompt == other.prompt
        assert all(torch.equal(one[name], other[name]) for name in one.tensors())


# ---- a head ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def head(cache: Callable[..., Cache], tmp_path: Path) -> Path:
    """A head with random weights, for the attention of this cache."""
    made = cache("--set", "cache.store_attention=true", out="attention")
    torch.manual_seed(0)
    model = MaskHead(made[0]["attention"].shape[0], base=4, size=16)
    torch.nn.init.normal_(model.logits.weight, std=3.0)
    save_head(model, tmp_path / "head.safetensors", HeadMetadata(encoder_of(made.recipe.recipe)))
    return tmp_path / "head.safetensors"


def test_a_head_draws_where_the_source_has_no_mask(cache: Callable[..., Cache], head: Path, tmp_path: Path) -> None:
    made, seen = cache("--edit-mask", "head", "--mask-head", str(head)), by_name(open_cache(tmp_path / "attention"))
    assert origins(made) == dict(zip(NAMES, ("head", "file", "head", "head"), strict=True))
    for name, sample in by_name(made).items():
        if name != "after/said":
            expected = predict_mask(load_head(head)[0], seen[name]["attention"], (8, 8)).flatten()
            assert torch.equal(sample["edit_mask"], expected)
            assert sample["edit_mask"].std() > 0.01
    assert "attention" not in by_name(made)["after/spot"].tensors()


@pytest.mark.slow
def test_auto_asks_the_head_only_where_the_difference_says_nothing(
    cache: Callable[..., Cache], head: Path, source: Path, tiny_model: TinyModel
) -> None:
    """A run that encodes through a server has the same masks."""
    made = cache("--edit-mask", "auto", "--mask-head", str(head))
    assert origins(made) == dict(zip(NAMES, ("difference", "file", "head", "head"), strict=True))
    asked = ("serve.store=false", "data.edit_mask=auto", f"data.mask_head={head}")
    with running(service_job(tiny_model("edit-plus"), "unused", *asked), load_lanes) as url:
        served = ServedSamples(load_config(None), ToEncode(str(source), url))
        for position, sample in enumerate(made):
            assert torch.equal(served[position]["edit_mask"], sample["edit_mask"])
        served.stop_prefetch()


@pytest.mark.slow
def test_a_head_that_changed_is_another_recipe(
    cache: Callable[..., Cache], build: Callable[..., Result], head: Path
) -> None:
    cache("--edit-mask", "head", "--mask-head", str(head))
    assert "already holds this source" in build("--edit-mask", "head", "--mask-head", str(head)).stderr
    save_head(MaskHead(8, base=4, size=16), head, HeadMetadata(_about(head)))
    changed = json.loads(build("--edit-mask", "head", "--mask-head", str(head), "--dry-run", "--json").stdout)
    assert (changed["to_encode"], changed["new_masks"]) == (3, 1), "one has a mask of its own"
    assert changed["reasons"] == {"recipe: another mask head": 4}


def _about(head: Path) -> str:
    return load_head(head)[1].encoder


# ---- other masks for what is cached ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_masks_need_no_encoder(
    cache: Callable[..., Cache], head: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step gives, byte for byte, what a build from nothing gives."""
    keep = ("--set", "cache.store_attention=true")
    wanted: list[tuple[str | Path, ...]] = [
        ("--edit-mask", "diff", *keep),
        ("--edit-mask", "head", "--mask-head", str(head), *keep),
        ("--edit-mask", "auto", "--mask-head", str(head)),
        ("--edit-mask", "none"),
        ("--edit-mask", "diff"),
        (),
    ]
    for i, options in enumerate(wanted):
        cache(*options, out=f"new-{i}")
    cache(*keep)
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "load_lanes", None)
        for i, options in enumerate(wanted):
            cache(*options)
            assert contents(tmp_path / "shards") == contents(tmp_path / f"new-{i}")
        other = Image.new("L", SIZE)
        other.paste(255, (0, 0, 32, 32))
        other.save(source / "mask.png")
        (said,) = (sample for sample in cache() if sample.name == "after/said")
        assert said["edit_mask"].sum() == 4


@pytest.mark.slow
def test_what_is_not_cached_is_encoded_beside_it(cache: Callable[..., Cache], source: Path, tmp_path: Path) -> None:
    cache()
    edit_rows(source, lambda row: row.update(prompt="another") if row["prompt"] == "edit the same" else None)
    cache("--edit-mask", "diff")
    cache("--edit-mask", "diff", out="new")
    assert contents(tmp_path / "shards") == contents(tmp_path / "new")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["nothing is there", "masks alone are there", "other words"])
def test_without_its_attention_a_sample_is_encoded_again(
    cache: Callable[..., Cache], head: Path, source: Path, tmp_path: Path, changed: str
) -> None:
    if changed == "other words":
        cache("--set", "cache.store_attention=true")
        edit_rows(source, lambda row: row.update(phrase="edit"))
    else:
        cache("--edit-mask", "file" if changed == "nothing is there" else "diff")
    cache("--edit-mask", "head", "--mask-head", str(head), "--replace")
    cache("--edit-mask", "head", "--mask-head", str(head), out="new")
    assert contents(tmp_path / "shards") == contents(tmp_path / "new")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        (("--edit-mask", "head"), "edit-plus", "no mask head is named"),
        (
            ("--edit-mask", "head", "--mask-head", "nowhere"),
            "edit-plus",
            "nowhere: this is not a mask head that can be used",
        ),
        (("--edit-mask", "guess"), "edit-plus", "--edit-mask: not a valid value"),
        (("--edit-mask", "diff"), "t2i", "data.edit_mask=diff needs control images, and QwenImagePipeline has none"),
        (("--set", "cache.store_attention=true"), "t2i", "cache.store_attention needs control images"),
        (("--edit-mask", "diff", "--format", "v1"), "edit-plus", "format v1 cannot store what data.edit_mask=diff"),
    ],
)
def test_what_cannot_be_done_says_so(
    build: Callable[..., Result], options: tuple[str, ...], model: str, message: str
) -> None:
    result = build(*options, model=model)
    assert result.code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_a_head_of_another_encoder_is_refused(build: Callable[..., Result], head: Path) -> None:
    save_head(MaskHead(8, base=4), head, HeadMetadata("another"))
    assert (
        "trained on the attention of another encoder" in build("--edit-mask", "head", "--mask-head", str(head)).stderr
    )


@pytest.mark.slow
@pytest.mark.parametrize("out", ["shards", "attention"])
def test_a_head_that_gives_no_numbers_is_refused(build: Callable[..., Result], head: Path, out: str) -> None:
    """Also where nothing but the mask is made."""
    made, about = load_head(head)
    made.logits.weight.data.fill_(float("nan"))
    save_head(made, head, about)
    result = build("--edit-mask", "head", "--mask-head", str(head), out=out)
    assert result.code == 2
    assert "not finite" in result.stderr


@pytest.mark.slow
def test_a_lost_shard_of_the_recipe_that_is_replaced_is_encoded_again(
    cache: Callable[..., Cache], head: Path, tmp_path: Path
) -> None:
    for shard in (tmp_path / "attention").glob("*.tar"):
        shard.unlink()
    cache("--edit-mask", "head", "--mask-head", str(head), out="attention")
    cache("--edit-mask", "head", "--mask-head", str(head), out="new")
    assert contents(tmp_path / "attention") == contents(tmp_path / "new")


def test_a_plan_says_of_what_only_the_mask_is_made(
    build: Callable[..., Result], cache: Callable[..., Cache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache()
    monkeypatch.setattr(preflight, "load_lanes", None)
    result = build("--edit-mask", "diff", "--dry-run", "--measure")
    assert result.code == 0, result.stderr
    assert "4 samples with only a new mask" in result.stderr


def test_v1_refuses_attention(cache: Callable[..., Cache], tmp_path: Path) -> None:
    cache("--set", "cache.store_attention=true")
    result = run("qwen-cache", "migrate", "v2", "v1", tmp_path / "shards", "--out", tmp_path / "old")
    assert "format v1 has no edit masks, attention, seeds, rejected images, directions of sliders" in result.stderr
