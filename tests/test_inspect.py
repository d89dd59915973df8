"""`inspect`: padding, checked against the batches of training; and the state of a cache compared with its source.

`build --dry-run`, which loads the model, is the reference for the comparison with the source.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.batching import round_budget
from qwen_cache.format.identity import Inputs, content_hash, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec, token_count
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update
from qwen_cache.inspect.terminal import describe, print_sample
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Mixture
from qwen_train.flow import NoiseSchedule

from .support.caches import build, plan
from .support.commands import HEAVY, Result, imported_by, run
from .support.imports import imported, make, write_musubi
from .support.marks import slow
from .support.pages import page_of
from .support.server import Server, serving
from .support.sources import add_control, change_control, change_mask, change_prompt, change_target, remove_mask

Built = Callable[..., Path]
Size = tuple[int, int, int]
"""Rows and columns of a target's image tokens, and the tokens of its text."""

RECIPE = {"encoder_version": 2, "pipeline": "QwenImagePipeline", "dtype": "float32"}


def report(cache: Path | str, *options: str | Path) -> dict[str, Any]:
    """The report of `inspect --json`."""
    result = run("qwen-cache", "inspect", cache, "--json", *options)
    assert result.code == 0, result.stderr
    return dict(json.loads(result.stdout))


def refused(cache: Path | str, *options: str | Path) -> str:
    result = run("qwen-cache", "inspect", cache, *options)
    assert (result.code, result.stdout) == (2, "")
    return result.stderr


# ---- batches ---------------------------------------------------------------------------------------------------------


def write(folder: Path, sizes: Sequence[Size]) -> Path:
    """A cache of samples with these sizes, without controls."""
    samples = {}
    for i, (h, w, text) in enumerate(sizes):
        tensors = {"image_latents": torch.ones(h * w, 64), "prompt_embeds": torch.ones(text, 8)}
        data = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        specs = {name: TensorSpec("F32", tuple(t.shape), content_hash(data[name])) for name, t in tensors.items()}
        inputs = Inputs(content_hash(f"{i}".encode()), (), None)
        meta = SampleMeta(recipe_id(RECIPE), inputs, "edit it", ((1, h, w),), 0, specs)
        samples[meta.key] = f"{i}", meta, data
    update = plan_update(folder, Existing.empty(2), 2, [ListedSample(samples[key][0], key) for key in samples])
    staging = open_staging(update, "sizes", 1 << 24)
    for _, meta, data in samples.values():
        staging.add(meta, {name: memoryview(data[name]) for name in meta.tensors})
    commit_update(update, staging, {"default": RECIPE}, {"qwen-cache": "0.1.0"})
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """37 samples of many sizes; the largest has 40·40 + 90 tokens."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(8, 40, (36, 3), generator=random).tolist()
    samples = [(40, 40, 90), *((h, w, 2 * text) for h, w, text in sizes)]
    return write(tmp_path_factory.mktemp("mixed") / "shards", samples)


def batches(cache: Path, **settings: Any) -> tuple[float, float]:
    """Mean samples per batch and the fraction of padding in the first epoch of the trainer."""
    samples = open_cache(cache)
    stream = Batches(Mixture.of(samples), TrainConfig(caption_dropout=0, **settings), NoiseSchedule())
    count = valid = computed = done = 0
    while done < len(samples):
        batch = stream.batch(done)
        rows, text, _ = batch.prompt_embeds.shape
        computed += rows * (batch.clean.shape[1] + text)
        texts = batch.prompt_embeds_mask.sum() if batch.prompt_embeds_mask is not None else rows * text
        valid += sum(map(token_count, batch.img_shapes)) + int(texts)
        count, done = count + 1, batch.consumed_samples
    return len(samples) / count, 1 - valid / computed


def test_padding_is_that_of_the_batches_that_are_trained(mixed: Path) -> None:
    budgets = report(mixed)["recipes"]["default"]["batches"]
    assert [budget["max_tokens"] for budget in budgets] == [1792, 3456, 6784, 13568]
    for budget in budgets:
        samples, padding = batches(mixed, max_tokens=budget["max_tokens"])
        _, at_random = batches(mixed, max_tokens=budget["max_tokens"], bucketing_window=1)
        assert budget["samples_per_batch"] == pytest.approx(samples)
        assert budget["padding"] == pytest.approx(padding)
        assert budget["padding_by_chance"] == pytest.approx(at_random)
    assert budgets[-1]["padding_by_chance"] > budgets[-1]["padding"] > 0


def test_equal_sizes_pad_nothing_and_fill_each_budget(tmp_path: Path) -> None:
    cache = write(tmp_path / "shards", [(20, 20, 30)] * 16)
    budgets = report(cache)["recipes"]["default"]["batches"]
    assert [budget["samples_per_batch"] for budget in budgets] == [1, 2, 4, 8]
    assert {budget[name] for budget in budgets for name in ("padding", "padding_by_chance")} == {0}
    assert "packed" not in run("qwen-cache", "inspect", cache).stdout


def test_a_budget_that_the_samples_do_not_fill_is_not_listed(tmp_path: Path) -> None:
    budgets = report(write(tmp_path / "shards", [(20, 20, 30)] * 5))["recipes"]["default"]["batches"]
    assert [budget["samples_per_batch"] for budget in budgets] == [1, 5 / 3, 2.5]
    alone = report(write(tmp_path / "one", [(20, 20, 30)]))["recipes"]["default"]["batches"]
    assert [(budget["max_tokens"], budget["samples_per_batch"]) for budget in alone] == [(448, 1)]


def test_a_budget_is_round_and_has_no_room_for_another() -> None:
    for largest, samples in itertools.product([*range(1, 40), 1000, 4095, 4096, 8191, 8192, 8592, 12345], (1, 2, 4, 8)):
        budget = round_budget(largest, samples)
        assert largest * samples <= budget < largest * (samples + 1)
        assert largest < 8192 or budget % 1024 == 0


def test_terminal_and_page_agree_with_json(mixed: Path, tmp_path: Path) -> None:
    budgets = report(mixed)["recipes"]["default"]["batches"]
    text = run("qwen-cache", "inspect", mixed).stdout
    page_of(mixed, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    for document, between in ((text, r"\s+"), (html, "</td><td>")):
        lines = re.findall(between.join([r"([\d,]+)", r"([\d.]+)", r"([\d.]+) %", r"([\d.]+) %"]), document)
        assert [int(line[0].replace(",", "")) for line in lines] == [budget["max_tokens"] for budget in budgets]
        for line, budget in zip(lines, budgets, strict=True):
            assert float(line[1]) == pytest.approx(budget["samples_per_batch"], abs=0.051)
            percentages = [100 * budget[name] for name in ("padding", "padding_by_chance")]
            assert [float(cell) for cell in line[2:]] == pytest.approx(percentages, abs=0.051)
    for document in (" ".join(text.split()), html):
        assert "train.layout=packed pads nothing" in document


def test_beside_a_page_only_the_flags_are_printed(mixed: Path, tmp_path: Path) -> None:
    lines = run("qwen-cache", "inspect", mixed, "--html", tmp_path / "page.html").stdout.splitlines()
    assert lines[-1] == "default: no flags"
    assert len(lines) <= 3, "and one line about the cache, which may be wrapped"


def test_a_terminal_with_colours_shows_the_images_of_a_sample(
    built: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two pixels in each character, those of the thumbnail made smaller."""
    described, images = describe(built("edit-plus"), "cat")
    assert [image.size for image in images] == [(128, 128), (128, 128), (160, 96)]
    for name, value in {
        "FORCE_COLOR": "1",
        "COLORTERM": "truecolor",
        "TERM": "xterm-256color",
        "COLUMNS": "120",
    }.items():
        monkeypatch.setenv(name, value)
    print_sample(described, images)
    first = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", capsys.readouterr().out)
    small = np.asarray(images[0].convert("RGB").resize((32, 32), Image.Resampling.LANCZOS))
    assert [int(each) for each in first[0]] == [*small[0, 0], *small[1, 0]]
    print_sample(described)
    assert "▀" not in capsys.readouterr().out


def test_no_samples_make_no_batches(tmp_path: Path) -> None:
    cache = write(tmp_path / "shards", [])
    assert report(cache)["recipes"]["default"]["batches"] == []
    assert "train.max_tokens" not in run("qwen-cache", "inspect", cache).stdout
    page_of(cache, tmp_path / "page.html")


# ---- the source ------------------------------------------------------------------------------------------------------


def nothing(pairs: Path) -> None:
    pass


def add_pair(pairs: Path) -> None:
    shutil.copy(pairs / "control_images" / "cat.png", pairs / "control_images" / "new.png")
    shutil.copy(pairs / "target_images" / "cup.png", pairs / "target_images" / "new.png")
    (pairs / "target_images" / "new.txt").write_text("make it coffee")


def remove_pair(pairs: Path) -> None:
    for path in pairs.rglob("china.*"):
        path.unlink()


def rename_pair(pairs: Path) -> None:
    for path in pairs.rglob("china.*"):
        path.rename(path.with_name(f"shanghai{path.suffix}"))


def repeat_pair(pairs: Path) -> None:
    for path in list(pairs.rglob("china.*")):
        shutil.copy(path, path.with_name(f"shanghai{path.suffix}"))


def break_image(pairs: Path) -> None:
    (pairs / "control_images" / "flower.png").write_bytes(b"broken")


def elongate(pairs: Path) -> None:
    """Too long for the text encoder at 112², not for the VAE at 128²."""
    Image.new("RGB", (1120, 20)).save(pairs / "control_images" / "flower.png")


def remove_control(pairs: Path) -> None:
    (pairs / "control_images" / "flower.png").unlink()


def empty_prompt(pairs: Path) -> None:
    (pairs / "target_images" / "flower.txt").write_text(" ")


def smuggle(pairs: Path) -> None:
    (pairs / "target_images" / "flower.txt").write_text("<|image_pad|> and <|video_pad|>")


def mark(pairs: Path) -> None:
    (pairs / "target_images" / "cup.txt").write_text("invert the [[colours]]")


def much(pairs: Path) -> None:
    for change in (change_target, add_pair, mark, break_image):
        change(pairs)
    (pairs / "target_images" / "cup.txt").write_text("invert all")
    for path in pairs.rglob("cat*"):
        path.unlink()


V1 = ("--format", "v1")
ATTENTION, UNMASKED = ("--set", "cache.store_attention=true"), ("--edit-mask", "none")
EMPTY = ("--set", "data.allow_empty_prompt=true")
MARKED = ("--set", "data.marked_phrases=true")


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize(
    ("change", "counts", "options"),
    [
        (nothing, (0, 0, 0, 0), ()),
        (change_target, (0, 1, 0, 0), ()),
        (rename_pair, (0, 0, 0, 0), ()),
        slow(change_control, (0, 1, 0, 0), ()),
        slow(add_control, (0, 1, 0, 0), ()),
        slow(change_mask, (0, 1, 0, 0), ()),
        slow(remove_mask, (0, 1, 0, 0), ()),
        (change_prompt, (0, 1, 0, 0), ()),
        (add_pair, (1, 0, 0, 0), ()),
        (remove_pair, (0, 0, 1, 0), ()),
        slow(repeat_pair, (0, 0, 0, 0), ()),
        (break_image, (0, 0, 0, 1), ()),
        slow(remove_control, (0, 0, 1, 1), ()),
        (empty_prompt, (0, 0, 1, 1), ()),
        slow(smuggle, (0, 0, 1, 1), ()),
        (mark, (0, 0, 0, 0), MARKED),
        (much, (1, 2, 1, 1), ()),
        slow(nothing, (0, 0, 0, 0), UNMASKED),
        slow(change_mask, (0, 0, 0, 0), UNMASKED),
        (change_mask, (0, 1, 0, 0), ("--edit-mask", "diff")),
        slow(change_mask, (0, 0, 0, 0), V1),
        (change_prompt, (0, 1, 0, 0), V1),
        slow(elongate, (0, 0, 0, 1), ()),
        slow(mark, (0, 1, 0, 0), (*ATTENTION, *MARKED)),
        (mark, (0, 1, 0, 0), ()),
        slow(empty_prompt, (0, 1, 0, 0), EMPTY),
    ],
)
def test_the_source_is_read_as_a_build_reads_it(
    change: Callable[[Path], None],
    counts: tuple[int, int, int, int],
    options: tuple[str, ...],
    built: Built,
    tiny_model: Built,
    pairs: Path,
) -> None:
    cache = built("edit-plus", options)
    change(pairs)
    source = report(cache, "--source", pairs)
    expected = plan(pairs, cache, tiny_model("edit-plus"), *options)
    new = sum(sample["reasons"] == ["new"] for sample in expected["samples"])
    judged = (new, len(expected["samples"]) - new, len(expected["removed"]), len(expected["problems"]))
    assert tuple(source["source"][name] for name in ("new", "changed", "removed", "problems")) == judged == counts
    checked = build(pairs, cache, tiny_model("edit-plus"), "--dry-run", "--check", *options)
    assert source["state"] == ("stale" if checked.code else "complete")
    assert (source["source"]["path"], source["source"]["recipe"]) == (str(pairs), "default")


def test_every_kind_of_source_can_be_compared(built: Built, pairs: Path) -> None:
    rows = ["target,control,control_1,mask,prompt"]
    for name, second, mask in (("cat", 1, 0), ("china", 0, 0), ("cup", 0, 1), ("flower", 0, 0)):
        prompt = (pairs / "target_images" / f"{name}.txt").read_text(encoding="utf-8")
        controls = f"control_images/{name}.png,{f'control_images/{name}_control_1.png' * second}"
        rows.append(f'target_images/{name}.png,{controls},{f"control_images/{name}_mask.png" * mask},"{prompt}"')
    table = pairs / "rows.csv"
    table.write_text("\n".join(rows), encoding="utf-8")
    found = report(built("edit-plus"), "--source", table)
    assert (found["state"], found["source"]["renamed_or_moved"]) == ("stale", 4)  # target_images/cat, not cat
    assert not any(found["source"][what] for what in ("new", "changed", "removed", "problems"))
    table.write_text("\n".join(rows[:-1]), encoding="utf-8")
    assert report(built("edit-plus"), "--source", table)["source"]["removed"] == 1


def test_text_to_image_has_no_controls(pairs: Path, tiny_model: Built, tmp_path: Path) -> None:
    cache, source = tmp_path / "shards", pairs / "target_images"
    assert build(source, cache, tiny_model("t2i")).code == 0
    assert report(cache, "--source", source)["state"] == "complete"
    change_prompt(pairs)
    assert report(cache, "--source", source)["source"]["changed"] == 1


def test_a_slice_is_compared_with_its_slice(pairs: Path, tiny_model: Built, tmp_path: Path) -> None:
    cache = tmp_path / "shards"
    assert build(pairs, cache, tiny_model("edit-plus"), "--slice", "2/2").code == 0
    assert report(cache, "--source", pairs)["state"] == "complete"
    assert report(cache, "--source", pairs, "--set", "data.slice=null")["source"]["new"] == 2


def test_no_model_no_torch_and_nothing_written(built: Built, pairs: Path, tmp_path: Path) -> None:
    cache = tmp_path / "shards"
    shutil.copytree(built("edit-plus"), cache)
    settings = (cache / "qwen.yaml").read_text(encoding="utf-8")
    nowhere = re.sub(r"(?m)^  path: .*$", "  path: nowhere", settings, count=1)
    (cache / "qwen.yaml").write_text(nowhere, encoding="utf-8")
    add_pair(pairs)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    arguments = ["qwen-cache", "inspect", str(cache), "--source", str(pairs)]
    loaded = imported_by(f"sys.argv = {arguments}; from qwen_cache.cli import app; app(standalone_mode=False)")
    assert "stale" in loaded  # the word that it printed
    assert not loaded & set(HEAVY)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.slow
def test_the_recipe_that_the_settings_name_is_compared(pairs: Path, tiny_model: Built, tmp_path: Path) -> None:
    cache, model = tmp_path / "shards", tiny_model("edit-plus")
    assert build(pairs, cache, model).code == 0
    change_prompt(pairs)
    small = ("--set", "data.vae_image_size=9216", "--set", "cache.recipe=small")
    assert build(pairs, cache, model, *small).code == 0
    assert report(cache, "--source", pairs)["source"]["recipe"] == "small"
    assert report(cache, "--source", pairs)["state"] == "complete"
    default = ("--source", pairs, "--set", "cache.recipe=default")
    result = report(cache, *default, "--set", "data.vae_image_size=16384")
    assert (result["source"]["recipe"], result["source"]["changed"], result["state"]) == ("default", 1, "stale")
    message = refused(cache, *default)
    assert "these settings give other sizes than recipe 'default'" in message
    assert 'expected {"vae_image_size": 16384}' in " ".join(message.split())
    assert 'found {"vae_image_size": 9216}' in " ".join(message.split())
    assert build(pairs, cache, model).code == 0
    assert report(cache, "--source", pairs)["source"]["recipe"] == "default"
    assert "no recipe 'third' here" in refused(cache, "--source", pairs, "--set", "cache.recipe=third")


def test_without_the_settings_of_the_build_they_are_given(built: Built, pairs: Path, tmp_path: Path) -> None:
    cache = tmp_path / "shards"
    shutil.copytree(built("edit-plus"), cache)
    (cache / "qwen.yaml").rename(tmp_path / "settings.yaml")
    assert "give other sizes" in refused(cache, "--source", pairs)
    for options in (("--config", tmp_path / "settings.yaml"), ("--set", "data.vae_image_size=16384")):
        assert report(cache, "--source", pairs, *options)["state"] == "complete"
    with serving(Server(built("edit-plus"))) as server:
        assert report(server.url, "--source", pairs, *options)["state"] == "complete"


def test_an_imported_cache_has_no_source(pairs: Path, tmp_path: Path) -> None:
    theirs = write_musubi(tmp_path / "theirs", [make("a", "make it blue", [(4, 6), (4, 6)], 9, seed=1)])
    cache = imported("musubi", theirs, tmp_path / "out")
    what = "recipe 'default' was imported from musubi, so there is no source to compare it with"
    assert what in refused(cache, "--source", pairs)
    assert report(cache)["recipes"]["default"]["batches"]


def test_a_build_that_is_not_done_stays_partial(pairs: Path, tmp_path: Path) -> None:
    staging = tmp_path / "shards" / ".staging" / "x"
    staging.mkdir(parents=True)
    (staging / "a.tar").write_bytes(bytes(1000))
    result = report(tmp_path / "shards", "--source", pairs)
    assert result["state"] == "partial"
    assert result["source"] == {"path": str(pairs)}  # no counts: nothing was compared
    shown = run("qwen-cache", "inspect", tmp_path / "shards", "--source", pairs).stdout
    assert "then compare it with" in " ".join(shown.split())
    assert "there is no such source" in refused(tmp_path / "shards", "--source", pairs / "elsewhere")
    assert "source" not in report(tmp_path / "shards")


def test_samples_of_a_missing_shard_are_new(built: Built, tiny_model: Built, pairs: Path, tmp_path: Path) -> None:
    cache = tmp_path / "shards"
    shutil.copytree(built("edit-plus"), cache)
    (shard,) = cache.glob("*.tar")
    replaced = cache / ".replaced" / shard.name
    replaced.parent.mkdir(exist_ok=True)
    shard.rename(replaced)  # where readers find it
    assert report(cache, "--source", pairs)["state"] == "complete"
    replaced.unlink()
    result = report(cache, "--source", pairs)
    expected = plan(pairs, cache, tiny_model("edit-plus"))["to_encode"]
    assert (result["state"], result["source"]["new"]) == ("stale", expected) == ("stale", 4)


def test_options_that_do_not_go_together(built: Built, pairs: Path) -> None:
    cache = built("edit-plus")
    assert "--sample shows one sample" in refused(cache, "--sample", "ab", "--source", pairs)
    assert "there is no such source" in refused(cache, "--source", pairs / "elsewhere")


def test_terminal_and_page_show_the_state(built: Built, pairs: Path, tmp_path: Path) -> None:
    def words(result: Result) -> str:
        return " ".join(result.stdout.split())

    cache = built("edit-plus")
    whole = f"complete: it holds all of {pairs}, by recipe default"
    assert whole in words(run("qwen-cache", "inspect", cache, "--source", pairs))
    odd = pairs.rename(tmp_path / "[bold]<b>")
    much(odd)
    stale = f"stale against {odd}, by recipe default: 1 new, 2 changed, 1 removed, 1 problem; `qwen-cache build"
    assert stale.replace(" ", "") in words(run("qwen-cache", "inspect", cache, "--source", odd)).replace(" ", "")
    page = page_of(cache, tmp_path / "page.html", "--source", odd)
    assert page.overview["state"] == "stale"
    assert "1 new, 2 changed, 1 removed, 1 problem" in (tmp_path / "page.html").read_text(encoding="utf-8")
