"""`best` proposes the earliest step within noise of the best, claims nothing that its samples do not show, and needs no
model: runs whose answer is known, an independent test of significance and distance, and a run that overfits."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save
from torch.nn.functional import avg_pool2d
from transformers import BertConfig, BertModel, CLIPConfig, CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from qwen_cache import open_cache
from qwen_cache.inspect.flags import stored_thumbnails
from qwen_cache.storage.remembered import sealed
from qwen_train.training import checkpoint
from qwen_train.training.best import CHANCE, best_of, within_noise
from qwen_train.training.report import write_report

from .support.caches import build
from .support.commands import refused, run
from .support.paths import load_tool
from .support.photographs import photograph
from .support.runs import IMAGES, LORA, SMALL, Trainer, run_training
from .support.written_runs import write_image, write_run

H, W = 6, 5
"""The sides of all images in tokens."""
UNITS = 6
IMPROVES = {0: 1.0, 100: 0.5, 200: 0.1, 300: 0.1, 400: 0.1, 500: 0.6}
"""How far each step is from the targets: it improves until 200, and degrades after 400."""


def tokens(seed: int) -> torch.Tensor:
    return torch.randn(H * W, 64, generator=torch.Generator().manual_seed(seed))


def write_latents(place: Path, key: int, latents: torch.Tensor, mask: torch.Tensor | None = None, **words: str) -> None:
    place.mkdir(parents=True, exist_ok=True)
    words = {"img_shapes": json.dumps([[1, H, W]]), "name": str(key), "prompt": "p", **words}
    tensors = {"latents": latents} | ({} if mask is None else {"edit_mask": mask})
    (place / f"{key}.safetensors").write_bytes(b"".join(sealed(save(tensors, words))))


def write_images(
    run: Path, distances: Mapping[int, float], noise: float = 0.02, units: int = UNITS, **words: str
) -> Path:
    """A run whose images are about as far from their targets after each step as `distances` says."""
    for unit in range(units):
        write_latents(run / "validation" / "target", unit, tokens(unit), **words)
        for step, distance in distances.items():
            off = distance * tokens(100 + unit) + noise * tokens(1000 * (step + 1) + unit)
            write_latents(run / "validation" / f"step-{step}", unit, tokens(unit) + off, prompt=f"prompt {unit}")
    return written(run, distances)


def write_losses(
    run: Path, losses: Mapping[int, float], noise: float = 0.02, units: int = UNITS, name: str = "losses"
) -> Path:
    """A run whose samples have such losses, of unlike sizes."""
    random = np.random.default_rng(3)
    folder = run / "validation" / name
    folder.mkdir(parents=True, exist_ok=True)
    for step, loss in losses.items():
        values = 1 + np.arange(units) + loss + noise * random.normal(size=units)
        each = {str(unit): [value] * 4 for unit, value in enumerate(values.tolist())}
        (folder / f"step-{step}.json").write_text(json.dumps(each), encoding="utf-8")
    return written(run, losses)


def written(run: Path, steps: Mapping[int, float]) -> Path:
    """The rest of a run with checkpoints of these steps."""
    write_run(run, f"train:\n  max_steps: {max(steps)}\n")
    for step in filter(None, steps):
        (run / f"checkpoint-{step}").mkdir(exist_ok=True)
    return run


WAYS: tuple[Callable[..., Path], ...] = (write_images, write_losses)


# ---- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WAYS)
def test_the_earliest_of_the_best_steps_is_proposed(write: Callable[..., Path], tmp_path: Path) -> None:
    best = best_of(write(tmp_path, IMPROVES))
    assert (best.step, best.within, best.checkpoint) == (200, (200, 300, 400), tmp_path / "checkpoint-200")
    assert best.reasons[0] == "Steps 200, 300, 400 are the best, within noise; 200 is the earliest of them."
    assert "after step 500 it is" in best.reasons[1]


@pytest.mark.parametrize("noise", [0.02, 0.0])
@pytest.mark.parametrize("write", WAYS)
def test_steps_that_are_no_better_than_no_lora_are_not_proposed(
    write: Callable[..., Path], noise: float, tmp_path: Path
) -> None:
    """Noise alone, and images that are identical after every step."""
    best = best_of(write(tmp_path, dict.fromkeys(IMPROVES, 0.5), noise))
    assert (best.step, best.within) == (None, tuple(IMPROVES))
    assert best.reasons[0].startswith("Training cannot be told from no LoRA")


@pytest.mark.parametrize("write", WAYS)
def test_of_equal_steps_the_first_is_proposed(write: Callable[..., Path], tmp_path: Path) -> None:
    best = best_of(write(tmp_path, {0: 1.0, 100: 0.3, 200: 0.3, 300: 0.3}, 0.0))
    assert (best.step, best.within) == (100, (100, 200, 300))


@pytest.mark.parametrize("write", WAYS)
def test_few_samples_are_said_to_be_too_few(write: Callable[..., Path], tmp_path: Path) -> None:
    best = best_of(write(tmp_path, IMPROVES, units=4))
    assert (best.step, best.within) == (None, ())
    assert "4 " in best.reasons[0]
    assert "cannot tell one step from another; that takes 5" in best.reasons[0]
    assert "which may be chance" in best.reasons[0]
    assert "validation.num_images=5" in best.reasons[-1]


def test_images_of_trained_samples_and_runs_without_scores_propose_nothing(tmp_path: Path) -> None:
    trained = best_of(write_images(tmp_path / "trained", IMPROVES, trained="true"))
    assert trained.step is None
    assert "of trained samples" in trained.reasons[0]
    plain = run("qwen-train", "best", written(tmp_path / "plain", IMPROVES))
    assert plain.code == 0, plain.stderr
    said = "no step can be proposed\nNothing says how good a step is: set train.validation_split"
    assert plain.stdout.startswith(said)
    assert "slider" not in plain.stdout
    (tmp_path / "plain" / "qwen.yaml").write_text("train:\n  slider:\n    direction: prompts\n", encoding="utf-8")
    said = "A slider without targets has no held-out samples: compare its images at each strength in report.html."
    assert best_of(tmp_path / "plain").reasons[1] == said
    refused(run("qwen-train", "best", tmp_path), f"{tmp_path}: no run here", "metrics.jsonl")


def test_one_step_that_was_measured_is_no_choice(tmp_path: Path) -> None:
    best = best_of(write_losses(tmp_path, {100: 0.5}))
    only = "Of held-out samples only step 100 was measured yet: a choice takes two steps."
    assert (best.step, best.reasons) == (None, (only,))


def test_pairs_decide_where_preferences_are_learnt(tmp_path: Path) -> None:
    write_losses(tmp_path, {step: step / 100 for step in IMPROVES})
    best = best_of(write_losses(tmp_path, IMPROVES, name="preference_losses"))
    assert (best.step, best.judges) == (200, ("preference loss", "validation loss"))
    assert "over 6 held-out pairs, step" in best.reasons[1]
    assert best.reasons[2].startswith("By the validation loss, over 6 held-out samples, step 0 is the best")


def test_the_loss_decides_and_what_disagrees_is_said(tmp_path: Path) -> None:
    """Losses that cannot tell training from no LoRA leave the choice to the images."""
    write_images(tmp_path, IMPROVES | {200: 0.3})
    assert best_of(write_losses(tmp_path, IMPROVES)).step == 200
    assert "disagrees with the proposal, step 200: look at the images" in best_of(tmp_path).reasons[2]
    best = best_of(write_losses(tmp_path, dict.fromkeys(IMPROVES, 0.5)))
    assert (best.step, best.judges[0]) == (300, "distance to target")


def test_only_steps_with_a_checkpoint_are_proposed(tmp_path: Path) -> None:
    write_losses(tmp_path, IMPROVES)
    for removed, step, said in (
        ((200,), 300, "Step 200 is earlier, but its checkpoint is missing: removed, or not saved."),
        ((300, 400), 100, "Steps 200, 300, 400 are better, but their checkpoints are missing: removed, or not saved."),
        ((100, 500), None, "No step that was measured has a checkpoint; best is steps 200, 300, 400"),
    ):
        for each in removed:
            (tmp_path / f"checkpoint-{each}").rmdir()
        best = best_of(tmp_path)
        assert best.step == step
        assert any(reason.startswith(said) for reason in best.reasons)


def test_a_run_that_still_trains_may_become_better(tmp_path: Path) -> None:
    write_losses(tmp_path, IMPROVES)
    (tmp_path / "qwen.yaml").write_text("train:\n  max_steps: 2000\n", encoding="utf-8")
    best = best_of(tmp_path)
    assert best.step == 200
    assert best.reasons[-1] == "The last step that was measured is 500 of 2,000: later ones may be better."


def test_damaged_files_are_left_out_and_named(tmp_path: Path) -> None:
    write_losses(write_images(tmp_path, IMPROVES), IMPROVES)
    folder = tmp_path / "validation"
    damaged = {folder / "losses" / "step-600.json": b"[1]", folder / "losses" / "step-700.json": b'{"0": [1]}'}
    damaged[folder / "likeness.json"] = b'{"model": "", "training_targets": 1, "images": {"x": {"target": 3}}}'
    damaged |= {folder / "step-500" / "1.safetensors": b"12345678", folder / "target" / "x.safetensors": b""}
    infinite = json.dumps({str(unit): [math.inf] * 4 for unit in range(UNITS)})
    (folder / "losses" / "step-800.json").write_text(infinite, encoding="utf-8")
    for step, level in enumerate(("true", "-1", '"1"', "1" + "0" * 400), 900):  # the last one is no float
        damaged[folder / "losses" / f"step-{step}.json"] = f'{{"0": [{level}, 1, 1, 1]}}'.encode()
    damaged[folder / "losses" / "step-950.json"] = b'{"0": "1234"}'
    (folder / "losses" / "step-٣.json").write_text("{}", encoding="utf-8")  # no step of a run
    write_latents(folder / "step-400", 2, tokens(1) * math.nan)
    for path, data in damaged.items():
        path.write_bytes(data)
    result = run("qwen-train", "best", tmp_path, "--json")
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["step"] == 200
    assert {*found["unread"]} == {*map(str, damaged)}
    units = {score["name"]: (score["units"], len(score["steps"])) for score in found["scores"]}
    assert (units["validation loss"], units["distance to target"]) == ((UNITS, 6), (UNITS - 2, 6))


# ---- noise -----------------------------------------------------------------------------------------------------------


def t_statistic(differences: Sequence[float]) -> float:
    return statistics.mean(differences) / (statistics.stdev(differences) / math.sqrt(len(differences)))


def test_noise_is_that_of_all_combinations_of_signs() -> None:
    """By their definition, one by one."""
    for seed in range(6):
        values = np.random.default_rng(seed).normal([[0.0], [0.4], [0.9], [1.4]], 1, (4, 6))
        for k, found in enumerate(within_noise(values)):
            worse = [values[k] - values[j] for j in range(4) if j != k]
            greatest = [
                max(t_statistic(each * signs) for each in worse) for signs in itertools.product((1, -1), repeat=6)
            ]
            chance = sum(it >= greatest[0] - 1e-9 for it in greatest) / len(greatest)
            assert found == (chance > CHANCE or k == values.mean(axis=1).argmin())


def test_noise_alone_leaves_out_a_step_as_often_as_it_says() -> None:
    """Though one of many steps is always the luckiest."""
    random = np.random.default_rng(0)
    for units in (5, 16):
        within = [within_noise(random.normal(size=(10, units))) for _ in range(30)]
        assert 1 - np.mean(within) < 2 * CHANCE


# ---- distances -------------------------------------------------------------------------------------------------------


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpacked as diffusers' pipelines unpack latents."""
    return packed.view(H, W, 16, 2, 2).permute(2, 0, 3, 1, 4).reshape(16, 2 * H, 2 * W).double()


def reference(a: torch.Tensor, b: torch.Tensor, images: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Colour and edges by torch's pooling, with the differences and the images that give the unit both pooled."""
    colours, edges = [], []
    for scale in (1, 2, 4):
        pooled = [avg_pool2d(it, scale) for it in images]
        pair = [avg_pool2d(it, scale) for it in (a, b)]
        unit = torch.stack([it.var(dim=(1, 2), correction=0) for it in pooled]).mean(0)
        colours.append(float(((pair[0] - pair[1]).square().mean(dim=(1, 2)) / unit).mean()))
        for axis in (1, 2):
            square = [it.diff(dim=axis).square().mean(dim=(1, 2)) for it in pooled]
            both = [it.diff(dim=other).square().mean(dim=(1, 2)) for it in pooled for other in (1, 2)]
            assert len(square) == len(images)
            each = (pair[0].diff(dim=axis) - pair[1].diff(dim=axis)).square().mean(dim=(1, 2))
            edges.append(float((each / torch.stack(both).mean(0)).mean()))
    return math.sqrt(statistics.mean(colours)), math.sqrt(statistics.mean(edges))


def means(run: Path, step: int) -> dict[str, float]:
    return {score.name: score.means[step] for score in best_of(run).scores.scores if step in score.steps}


def test_distances_are_those_of_their_definition_whatever_the_dtype(tmp_path: Path) -> None:
    target, image = tokens(1) * torch.linspace(0.5, 3, 64), tokens(2).bfloat16()
    write_latents(tmp_path / "validation" / "target", 1, target)
    write_latents(tmp_path / "validation" / "step-5", 1, image)
    colour, edges = reference(unpacked(image), unpacked(target), [unpacked(target)])
    found = means(written(tmp_path, {5: 0}), 5)
    assert found["colour, to target"] == pytest.approx(colour, rel=1e-4)
    assert found["edges, to target"] == pytest.approx(edges, rel=1e-4)
    assert found["distance to target"] == pytest.approx((colour + edges) / 2, rel=1e-4)


def test_a_tone_has_no_edges_and_a_change_belongs_to_its_side_of_the_mask(tmp_path: Path) -> None:
    target, control, mask = tokens(1), tokens(1), torch.zeros(H, W)
    mask[:, :2] = 1
    mask = mask.flatten()
    control[mask == 1] += 1
    outside = target + torch.where(mask == 0, 0.7, 0.0)[:, None]
    folder = tmp_path / "validation"
    write_latents(folder / "target", 1, target, mask)
    write_latents(folder / "controls", 1, control)
    for step, image in ((0, target), (1, target + 0.5), (2, outside), (3, control)):
        write_latents(folder / f"step-{step}", 1, image)
    written(tmp_path, {3: 0})
    inside, left = "colour inside the mask, to target", "colour outside the mask, to control"
    assert {name for name, value in means(tmp_path, 0).items() if abs(value) > 1e-6} == set()
    tone, beyond, as_before = (means(tmp_path, step) for step in (1, 2, 3))
    assert (tone["colour, to target"] > 0.4, tone["edges, to target"] < 1e-5) == (True, True)
    assert (beyond[inside] < 1e-6, beyond[left] > 0.4) == (True, True)
    assert (as_before[inside] > 0.4, as_before[left] < 1e-6) == (True, True)
    assert beyond["difference from no LoRA"] > 0.1


def test_seeds_are_compared_within_their_prompt_and_controls(tmp_path: Path) -> None:
    """Two of four images have one prompt and one control; after step 9 they are the same."""
    folder = tmp_path / "validation"
    for key, prompt in enumerate(("a", "a", "a", "b")):
        write_latents(folder / "controls", key, tokens(7 if key < 2 else 8))
        write_latents(folder / "step-0", key, tokens(20 + key), prompt=prompt)
        write_latents(folder / "step-9", key, tokens(20 if key < 2 else 30 + key), prompt=prompt)
    written(tmp_path, {9: 0})
    (score,) = (score for score in best_of(tmp_path).scores.scores if score.name == "difference between seeds")
    assert (score.units, score.means[9]) == (1, 0)
    assert score.means[0] > 0.5


# ---- likeness --------------------------------------------------------------------------------------------------------

SIDE = 32
"""Pixels of an image for the tiny CLIP."""


def write_clip(folder: Path) -> Path:
    """A tiny random CLIP."""
    torch.manual_seed(0)
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision, text = {**tower, "image_size": SIDE, "patch_size": 8}, {**tower, "vocab_size": 99}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).save_pretrained(folder)
    size = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPImageProcessorPil(**size).save_pretrained(folder)
    return folder


@torch.no_grad()
def embedding(clip: CLIPModel, image: Image.Image) -> torch.Tensor:
    """By CLIP's definition: the shortest side resized, the middle cropped, normalised, embedded."""
    image = image.convert("RGB")
    short = min(image.size)
    size = tuple(int(SIDE * side / short) for side in image.size)
    left, top = (size[0] - SIDE) // 2, (size[1] - SIDE) // 2
    cut = image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + SIDE, top + SIDE))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    pixels = torch.tensor((np.asarray(cut) / 255 - mean) / std).permute(2, 0, 1)[None].float()
    pooled = clip.vision_model(pixel_values=pixels).pooler_output
    return torch.nn.functional.normalize(clip.visual_projection(pooled)[0], dim=0)


@pytest.fixture
def decoded(train: Trainer, tmp_path: Path) -> Path:
    """A run whose images are decoded, the last of which has no target. Its losses tell nothing."""
    out = write_images(tmp_path / "run", IMPROVES)
    write_losses(out, dict.fromkeys(IMPROVES, 0.5))
    folder, names = out / "validation", ("china.jpg", "coffee.png", "chelsea.png", "flower.jpg", "astronaut.png")
    (folder / "target" / f"{UNITS - 1}.safetensors").unlink()
    for unit in range(UNITS):
        target, other = (photograph(names[(unit + i) % len(names)]).resize((80, 64)) for i in range(2))
        target.save(folder / "target" / f"{unit}.png")
        for step, distance in IMPROVES.items():
            blended = Image.blend(target, other, distance if step > 100 else 1.0)  # for a random model to tell
            blended.save(folder / f"step-{step}" / f"{unit}.png")
    (out / "qwen.yaml").write_text(f"cache: {{path: {json.dumps(str(train.cache))}}}", encoding="utf-8")
    return out


def test_likeness_is_the_cosine_of_embeddings(decoded: Path, train: Trainer, tmp_path: Path) -> None:
    """To the held-out target, else to the mean of the training targets; shown by the command and on the page, and
    forgotten for an image that is generated again."""
    folder, clip = decoded / "validation", CLIPModel.from_pretrained(write_clip(tmp_path / "clip")).eval()
    result = run("qwen-train", "best", decoded, "--likeness", tmp_path / "clip", "--json")
    assert result.code == 0, result.stderr
    scores = {score["name"]: score for score in json.loads(result.stdout)["scores"]}
    mean = torch.stack([embedding(clip, stored_thumbnails(it)[0]) for it in open_cache(train.cache)]).mean(dim=0)
    expected: dict[str, list[float]] = {"likeness to target": [], "likeness to the mean of the training targets": []}
    for step in IMPROVES:
        of_step = [embedding(clip, Image.open(folder / f"step-{step}" / f"{unit}.png")) for unit in range(UNITS)]
        targets = [embedding(clip, Image.open(folder / "target" / f"{unit}.png")) for unit in range(UNITS - 1)]
        pairs = zip(of_step, targets, strict=False)
        expected["likeness to target"].append(statistics.mean(float(a @ b) for a, b in pairs))
        to_all = torch.nn.functional.cosine_similarity(of_step[-1], mean, dim=0)
        expected["likeness to the mean of the training targets"].append(float(to_all))
    for name, values in expected.items():
        assert [row["mean"] for row in scores[name]["steps"]] == pytest.approx(values, abs=1e-4)
        assert scores[name]["higher_is_better"]
    assert scores["likeness to target"]["judges"]
    assert not scores["likeness to the mean of the training targets"]["judges"]
    said = (
        f"embedded by CLIPModel, to its held-out target or else to the mean of {len(open_cache(train.cache))} training"
    )
    best, page = best_of(decoded), (decoded / "report.html").read_text(encoding="utf-8")
    assert said in run("qwen-train", "best", decoded).stdout
    assert said in page
    assert '<th scope="col">likeness to target <small>5 × image</small></th>' in page
    verdict = next(reason for reason in best.reasons if "By the likeness to target" in reason)
    assert "step 200 is the best, and steps 300, 400 within noise of it; after step 500 it is" in verdict
    write_latents(folder / "step-400", 0, tokens(9))
    (score,) = (score for score in best_of(decoded).scores.scores if score.name == "likeness to target")
    assert score.units == UNITS - 2


def test_likeness_decides_where_the_others_cannot_tell(decoded: Path, tmp_path: Path) -> None:
    """Images that have all the same latents, but not the same pixels."""
    for step, unit in itertools.product(IMPROVES, range(UNITS)):
        write_latents(decoded / "validation" / f"step-{step}", unit, tokens(50))
    assert best_of(decoded).step is None
    assert run("qwen-train", "best", decoded, "--likeness", write_clip(tmp_path / "clip")).code == 0
    best = best_of(decoded)
    assert (best.step, best.judges[0]) == (200, "likeness to target")


def test_what_is_no_vision_model_or_has_no_images_is_refused(decoded: Path, tmp_path: Path) -> None:
    """Nothing is run or unpickled, and the scores stay as they are."""
    clip = write_clip(tmp_path / "clip")

    def changed(name: str, change: Callable[[Path], object]) -> Path:
        copy = tmp_path / name
        shutil.copytree(clip, copy)
        change(copy)
        return copy

    def drop(copy: Path) -> None:
        weights = load_file(copy / "model.safetensors")
        del weights["visual_projection.weight"]
        (copy / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))

    def pickle(copy: Path) -> None:
        torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
        (copy / "model.safetensors").unlink()

    def code(copy: Path) -> None:
        config = {"model_type": "other", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
        (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (copy / "own.py").write_text(f"open({str(copy / 'ran')!r}, 'w')\n", encoding="utf-8")

    def text(copy: Path) -> None:
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        BertModel(BertConfig(**tower, vocab_size=99)).save_pretrained(copy)

    for folder, said in {
        tmp_path / "none": "no vision model here (expected config.json, found no such folder)",
        changed(
            "empty", lambda copy: (copy / "preprocessor_config.json").unlink()
        ): "found no preprocessor_config.json",
        changed("half", drop): "missing keys in the weights of AutoModel (found visual_projection.weight)",
        changed("pickle", pickle): "AutoModel cannot be loaded",
        changed("code", code): "cannot be loaded",
        changed("text", text): "this model cannot be loaded",
    }.items():
        refused(run("qwen-train", "best", decoded, "--likeness", folder), str(folder), said)
    assert not (tmp_path / "code" / "ran").exists()
    assert not (decoded / "validation" / "likeness.json").exists()
    for png in (decoded / "validation").glob("step-*/*.png"):
        png.unlink()
    do = f"decode them: qwen-train decode {decoded}"
    refused(run("qwen-train", "best", decoded, "--likeness", clip), "no validation image of this run is decoded", do)


# ---- where it is shown and used --------------------------------------------------------------------------------------


def test_the_command_and_the_page_say_the_same(tmp_path: Path) -> None:
    write_losses(write_images(tmp_path, IMPROVES), IMPROVES)
    for step in IMPROVES:
        write_image(tmp_path, f"step-{step}", "0", number=2).rename(tmp_path / "validation" / f"step-{step}" / "0.png")
    result = run("qwen-train", "best", tmp_path)
    assert result.code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"keep step 200: {tmp_path / 'checkpoint-200'}"
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in rows] == list(map(str, IMPROVES))
    assert [" ".join(row[4:]) for row in rows] == ["no LoRA", "", "proposed", "within noise", "within noise", ""]
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert '<p class="proposal">Keep step 200.</p>' in html
    for reason in best_of(tmp_path).reasons:
        assert f'<p class="reason">{reason}</p>' in html
    assert html.count('<tr class="proposed">') == html.count(">after step 200, proposed<") == 1
    assert html.index("Which step to keep") < html.index("<h2>Images</h2>")


@pytest.fixture
def scored(train: Trainer) -> Path:
    """A run of three steps with the losses of another one, by which step 2 is the best."""
    out = train.once(settings=SMALL, train__checkpointing_steps=1)
    write_losses_of = {0: 1.0, 1: 0.6, 2: 0.1, 3: 0.6}
    folder = train.folder / "scored"
    folder.mkdir()
    for path in out.iterdir():
        (folder / path.name).symlink_to(path)
    losses = folder / "validation" / "losses"
    losses.mkdir(parents=True)
    for step, loss in write_losses_of.items():
        each = {str(unit): [loss + unit / 100] * 4 for unit in range(UNITS)}
        (losses / f"step-{step}.json").write_text(json.dumps(each), encoding="utf-8")
    return folder


def test_export_and_push_take_the_step(scored: Path, tmp_path: Path) -> None:
    for step, name in (("best", "checkpoint-2"), ("3", "checkpoint-3")):
        result = run("qwen-train", "export", scored, "--to", "peft", "--step", step, "--out", tmp_path / step)
        assert result.code == 0, result.stderr
        assert f"the weights of {scored / name}" in result.stderr
        both = tmp_path / step / "adapter_model.safetensors", scored / name / LORA
        exported, weights = (sorted(float(tensor.sum()) for tensor in load_file(file).values()) for file in both)
        assert exported == weights
    base = ("--base-model", "Qwen/Qwen-Image-Edit-2509", "--dry-run", "--json")
    pushed = run("qwen-train", "push", scored, "me/cats", "--step", "best", *base)
    assert pushed.code == 0, pushed.stderr
    assert f"the weights of {scored / 'checkpoint-2'}" in pushed.stderr
    for step in "7", "9" * 5000:  # more digits than Python reads as a number
        refused(
            run("qwen-train", "push", scored, "me/cats", "--step", step, *base),
            f"--step names no checkpoint of the run (expected best, 1, 2, 3, found {step[:20]}",
        )
    export = ("--to", "peft", "--out", tmp_path / "none")
    refused(
        run("qwen-train", "export", scored, "--step", "", *export),
        "--step names no checkpoint of the run (expected best, 1, 2, 3, found nothing)\n  → name one of these",
    )
    refused(
        run("qwen-train", "export", scored / "checkpoint-3" / LORA, "--step", "3", *export),
        "--step chooses among the checkpoints of a run, and this is a file",
        "name the output folder of the run in place of the file",
    )
    for file in (scored / "validation" / "losses").iterdir():
        file.write_text(json.dumps({"0": [1.0] * 4}), encoding="utf-8")
    refused(
        run("qwen-train", "push", scored, "me/cats", "--step", "best", *base),
        "1 held-out sample cannot tell one step from another",
        "name a step of 1, 2, 3: --step N",
    )


def test_the_best_checkpoint_is_not_removed(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "best_checkpoint", lambda folder: folder / "checkpoint-1")
    out = train(train__max_steps=4, train__checkpointing_steps=1, train__checkpoints_total_limit=1)
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-4"]


def test_runs_write_what_it_needs(train: Trainer) -> None:
    """Losses of each sample; of the targets, masks and whether they are trained."""
    settings = {**IMAGES, "validation.cache": str(train.cache), "validation.validation_steps": 1}
    out = train(settings=settings, validation__num_images=1, train__max_steps=1)
    held_out = {open_cache(train.cache).row(int(i)).meta.key for i in train.batches(settings=settings).validation}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        losses = json.loads((out / "validation" / "losses" / f"step-{line['step']}.json").read_text(encoding="utf-8"))
        assert losses.keys() == held_out
        assert np.mean(list(losses.values())) == pytest.approx(line["validation_loss"])
    masked = {sample.key for sample in open_cache(train.cache) if "edit_mask" in sample}
    assert masked
    found = best_of(out)
    for sample in open_cache(train.cache):
        target = out / "validation" / "target" / f"{sample.key}.safetensors"
        tensors = load_file(target)
        assert ("edit_mask" in tensors) == (sample.key in masked)
        assert "edit_mask" not in tensors or torch.equal(tensors["edit_mask"], sample["edit_mask"])
        assert (b'"trained":"true"' in target.read_bytes()) == (sample.key not in held_out)
    (score,) = (score for score in found.scores.scores if score.name == "distance to target")
    assert score.units == len(held_out)


# ---- a run that overfits ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["edit-plus", "qwen-image-21"])
@pytest.mark.parametrize("kind", ["overfits", "improves"])
def test_an_earlier_step_is_proposed_where_a_run_overfits_and_the_last_is_among_the_best_where_not(
    kind: str, family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """On the demo's photographs; judged by losses of the held-out pairs with the stock transformer and other noise.

    Which steps are best depends on the last bits of a processor, so noise is allowed: the table of tools/bench_best.py
    has what was proposed.
    """
    bench: Any = load_tool("bench_best")
    model, cache, out = tiny_model(family), tmp_path / "shards", tmp_path / "out"
    data = load_tool("make_demo_data").make_demo_data(tmp_path / "data")
    assert build(data, cache, model, "--set", f"data.vae_image_size={bench.AREA}").code == 0
    _, *arguments = bench.arguments(family, cache, model, kind, out, seed=0)
    trained = run_training(*arguments, page=True)
    assert trained.code == 0, trained.stderr
    judged = bench.judge(out, cache, model)
    gain, error = judged.gain(judged.best.step)
    assert judged.best.step is not None
    assert gain >= -bench.ENOUGH * error, judged.best.reasons
    assert judged.best.step < judged.last or kind == "improves"
    assert (f"best:   step {judged.best.step}" in trained.stderr) == (judged.best.step != judged.last)
    assert f"Keep step {judged.best.step}." in (out / "report.html").read_text(encoding="utf-8")
