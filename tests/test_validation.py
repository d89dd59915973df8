"""Validation measures what it says, and leaves the training alone.

The judges: the stock transformer on one sample at a time; the stock pipeline from the same noise and embeddings; the
run without validation, bit for bit.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from safetensors import safe_open

from qwen_cache import open_cache
from qwen_train.data.batches import NoisedSample
from qwen_train.training import validation

from .support.commands import refused
from .support.judge import stock_pipeline
from .support.paths import ROOT
from .support.photographs import photograph
from .support.runs import EVERYTHING_RANDOM, SMALL, Trainer, by_two, column, differences, metrics, outcome

FROZEN = {**SMALL, "optimizer.learning_rate": 1e-12, "train.max_steps": 2, "train.validation_split": 0.6}
"""Under so small a learning rate, with a LoRA that begins as nothing, the model stays the stock one."""
MEASURED = {**FROZEN, "validation.validation_steps": 1}


def held_out_keys(train: Trainer, **changes: Any) -> list[str]:
    """The keys of the samples that are not trained."""
    return sorted(open_cache(train.cache).row(int(i)).meta.key for i in train.batches(**changes).validation)


@torch.no_grad()
def stock_loss(stock: QwenImageTransformer2DModel, noised: NoisedSample) -> float:
    sample, sigma = noised.sample, noised.draws[0].sigma
    clean = sample["image_latents"]
    velocity = stock(
        hidden_states=torch.cat([(1 - sigma) * clean + sigma * noised.draws[0].noise, sample["control_latents"]])[None],
        encoder_hidden_states=sample["prompt_embeds"][None],
        timestep=torch.tensor([sigma]),
        img_shapes=[list(sample.img_shapes)],
        return_dict=False,
    )[0][0, : len(clean)]
    return float(torch.nn.functional.mse_loss(velocity, noised.draws[0].noise - clean))


# ---- the loss --------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_stock_transformer_on_samples_outside_training(train: Trainer) -> None:
    cache, keys = open_cache(train.cache), held_out_keys(train, settings=MEASURED)
    assert 1 < len(keys) < len(cache)
    stock = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer")
    losses = torch.tensor(
        [[stock_loss(stock, noised) for noised in validation.noised_samples(cache[key])] for key in keys]
    )
    out = train(settings=MEASURED, train__loss_type="huber", train__timestep_shift=3.0)
    assert column(out, "validation_loss") == pytest.approx([float(losses.mean())] * 3, rel=1e-5)
    for i, expected in enumerate(losses.mean(dim=0).tolist()):
        assert column(out, f"validation_loss_q{i + 1}") == pytest.approx([expected] * 3, rel=1e-5)
    first = train(settings=MEASURED, validation__num_samples=1, train__max_steps=1, out="first")
    assert column(first, "validation_loss") == pytest.approx([float(losses[0].mean())] * 2, rel=1e-5)


@pytest.mark.slow
def test_noise_and_levels_belong_to_the_sample_alone(train: Trainer) -> None:
    """Runs of other seeds, batches and timesteps are measured by the same."""
    one = train(settings=MEASURED)
    settings = {**MEASURED, "train.seed": 5, "train.timestep_sampling": "uniform", "train.loss_reduction": "per_token"}
    other = train(settings=settings, train__weighting="cosmap", out="other")
    assert column(other, "validation_loss") == pytest.approx(column(one, "validation_loss"), rel=1e-6)
    assert column(other, "loss") != pytest.approx(column(one, "loss"), rel=1e-2)


def test_each_sample_has_a_level_in_each_quarter_and_noise_of_its_own(train: Trainer) -> None:
    noised = [list(validation.noised_samples(sample)) for sample in open_cache(train.cache)]
    for levels in noised:
        assert [int(4 * item.draws[0].sigma) for item in levels] == [0, 1, 2, 3]
    assert len({item.draws[0].sigma for levels in noised for item in levels}) == 4 * len(noised)
    noises = [item.draws[0].noise[:4] for levels in noised for item in levels]
    assert all(not torch.equal(a, b) for i, a in enumerate(noises) for b in noises[:i])
    assert 0.9 < float(torch.cat([item.draws[0].noise for levels in noised for item in levels]).std()) < 1.1


def test_a_sample_has_the_levels_and_noise_that_it_always_had() -> None:
    """Or losses could not be compared with those of earlier versions, nor images."""
    sample = open_cache(ROOT / "schemas" / "examples" / "valid" / "cache.v2")[0]
    draws = [noised.draws[0] for noised in validation.noised_samples(sample)]
    assert [draw.sigma for draw in draws] == pytest.approx([0.04407, 0.29407, 0.54407, 0.79407], abs=1e-6)
    image = validation.noise(sample, validation.torch_generator(sample, "image"))
    noise = [0.24393, 0.06613, -1.16073, 0.29183, -1.77157]
    assert [float(each[0, 0]) for each in (*(draw.noise for draw in draws), image)] == pytest.approx(noise, abs=1e-4)


def test_training_is_the_same_with_and_without(train: Trainer) -> None:
    """After a step that was measured, too."""
    settings = {**EVERYTHING_RANDOM, "train.max_steps": 2, "train.validation_split": 0.6}
    expected = train(settings=settings, out="without")
    out = train(
        settings=settings,
        validation__validation_steps=1,
        validation__num_images=1,
        validation__images_every_steps=1,
        validation__num_inference_steps=2,
    )
    assert differences(outcome(out), outcome(expected)) == []
    assert len(column(out, "validation_loss")) == 3


@pytest.mark.slow
def test_dropout_is_off_while_validating(train: Trainer) -> None:
    """Else the second measure of the same weights would be another."""
    settings = {**MEASURED, "train.lora.lora_dropout": 0.9, "optimizer.learning_rate": 0.01}
    train(settings=settings, train__max_steps=1)
    first = train("--resume", settings=settings, train__max_steps=2)
    again = train(settings=settings, train__max_steps=2, out="again", train__gradient_checkpointing=False)
    assert column(again, "validation_loss") == pytest.approx(column(first, "validation_loss"), rel=1e-5)


def test_measures_are_logged_between_the_steps_that_are(train: Trainer) -> None:
    out = train(settings=FROZEN, train__max_steps=5, logging__logging_steps=4, validation__validation_steps=3)
    measured = [(line["step"], "validation_loss" in line) for line in metrics(out)]
    assert measured == [(0, True), (3, True), (4, False), (5, True)], "a baseline, and the result"


def test_held_out_samples_are_reported_before_training(train: Trainer) -> None:
    settings = {**FROZEN, "validation.validation_steps": 100, "validation.num_images": 99}
    settings |= {"validation.num_inference_steps": 2, "train.max_steps": 1}
    result = train.try_(settings=settings)
    count = len(held_out_keys(train, settings=settings))
    assert f"held out {count} samples for validation: their loss every 100 steps\n" in result.stderr
    assert f"images   {count} images, before training, every 500 steps and after the last\n" in result.stderr
    assert "for validation" not in train.try_(out="other", train__max_steps=1).stderr


def test_without_held_out_samples_their_loss_is_refused(train: Trainer) -> None:
    result = train.try_("--set", "validation.validation_steps=10")
    refused(result, "validation needs held-out samples", "found train.validation_split=0.0", "such as 0.05")
    assert not (train.folder / "out").exists()


# ---- images --------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_images_are_those_of_the_stock_pipeline(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, guidance: float
) -> None:
    """From the cached embeddings and the same noise; it encodes the control images again, at the cache's size."""
    images = {"validation__num_images": 9, "validation__images_every_steps": 2, "validation__num_inference_steps": 3}
    changes = {"settings": FROZEN, "train__validation_split": 0.7}
    out = train(**changes, **images, validation__true_cfg_scale=guidance)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 16384)
    china, cat = photograph("china.jpg").resize((160, 107)), photograph("chelsea.png").resize((120, 120))
    controls = {"china": [china], "cat": [cat, china], "cup": [photograph("coffee.png").resize((150, 100))]}
    pipeline = stock_pipeline(train.model, "edit-plus")
    samples = [open_cache(train.cache)[key] for key in held_out_keys(train, **changes)]
    assert {sample.name for sample in samples} == controls.keys()
    for sample in samples:
        _, h, w = sample.img_shapes[0]
        prompts = {"prompt_embeds": "prompt_embeds"}
        prompts |= {"negative_prompt_embeds": "empty_prompt_embeds"} if guidance > 1 else {}
        embeds = {name: sample[stored][None].clone() for name, stored in prompts.items()}
        masks = {f"{name}_mask": torch.ones(rows.shape[:2], dtype=torch.long) for name, rows in embeds.items()}
        expected = pipeline(
            image=controls[sample.name],
            **embeds,
            **masks,
            latents=validation.noise(sample, validation.torch_generator(sample, "image"))[None],
            true_cfg_scale=guidance,
            num_inference_steps=3,
            height=16 * h,
            width=16 * w,
            output_type="latent",
        ).images[0]
        with safe_open(out / "validation" / "step-2" / f"{sample.key}.safetensors", framework="pt") as file:
            found = file.get_tensor("latents")
            assert json.loads(file.metadata()["img_shapes"]) == [[1, h, w]]
            assert file.metadata()["name"] == sample.name
        assert float((found - expected).norm() / expected.norm()) < 1e-4


def test_the_first_images_are_of_the_untrained_model_and_a_resume_leaves_them_alone(train: Trainer) -> None:
    """A step of a large learning rate changes the images; without one they stay those of the base model."""
    images = {"validation__num_images": 1, "validation__images_every_steps": 1, "validation__num_inference_steps": 2}
    base = train(settings=FROZEN, train__max_steps=1, **images, out="base") / "validation"
    changes = {"settings": FROZEN, "optimizer__learning_rate": 1.0, **images}
    out = train(**changes, train__max_steps=1)
    before, after, expected = (
        next((folder / step).iterdir()).read_bytes()
        for folder, step in ((out / "validation", "step-0"), (out / "validation", "step-1"), (base, "step-0"))
    )
    assert before == expected != after
    shutil.rmtree(out / "validation" / "step-0")
    train("--resume", **changes, train__max_steps=2)
    assert {path.name for path in (out / "validation").iterdir()} == {"step-1", "step-2", "target", "controls"}
    first, second = metrics(out)
    assert 0 < first["elapsed_seconds"] < second["elapsed_seconds"]
    assert first["time"] <= second["time"]


@pytest.mark.slow
def test_cached_targets_and_controls_are_stored_beside_the_images(train: Trainer) -> None:
    out = train(settings=FROZEN, train__max_steps=4, validation__num_images=2, validation__images_every_steps=2)
    keys = held_out_keys(train, settings=FROZEN)[:2]
    folders = {path.name: sorted(file.stem for file in path.iterdir()) for path in (out / "validation").iterdir()}
    assert folders == {"step-0": keys, "step-2": keys, "step-4": keys, "target": keys, "controls": keys}
    cache = open_cache(train.cache)
    for key in keys:
        for folder, tensor, shapes in (
            ("target", "image_latents", cache[key].img_shapes[:1]),
            ("controls", "control_latents", cache[key].img_shapes[1:]),
        ):
            with safe_open(out / "validation" / folder / f"{key}.safetensors", framework="pt") as file:
                assert torch.equal(file.get_tensor("latents"), cache[key][tensor])
                assert json.loads(file.metadata()["img_shapes"]) == [list(shape) for shape in shapes]


# ---- several processes -----------------------------------------------------------------------------------------------


def test_processes_share_the_samples_and_measure_as_many(train: Trainer) -> None:
    """With an odd number, one is measured twice and counted once."""
    batches = train.batches(settings=MEASURED)
    measured = validation.make_validation(train.config(settings=MEASURED), batches)
    assert measured is not None
    measured = replace(measured, samples=tuple(open_cache(train.cache))[:3])
    counts = []

    def losses(rank: int, processes: int) -> torch.Tensor:
        accelerator = SimpleNamespace(
            num_processes=processes, process_index=rank, device="cpu", reduce=lambda sums: sums
        )
        levels = list[float]()
        found = measured.losses(lambda batch: levels.append(float(batch.sigma[0])) or batch.sigma[0], accelerator)
        counts.append(len(levels))
        return found

    one, first, second = losses(0, 1), losses(0, 2), losses(1, 2)
    assert counts == [12, 8, 8]
    assert torch.allclose(first + second, one)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_measure_and_generate_the_same_as_one(train: Trainer, fsdp: bool) -> None:
    """The same for an odd number of samples."""
    settings = {**MEASURED, "validation.num_samples": 1, "validation.num_images": 1, "validation.images_every_steps": 2}
    settings |= {
        "validation.cache": str(train.cache),
        "validation.true_cfg_scale": [1, 3],
        "validation.vae_device": "cpu",
    }
    settings |= {"predict.dtype": "float32"}
    one = train(settings=settings, validation__num_inference_steps=2, out="one")
    two = by_two(train, settings=settings, validation__num_inference_steps=2, train__fsdp=fsdp, out="two")
    assert column(two, "validation_loss") == pytest.approx(column(one, "validation_loss"), rel=1e-5)
    files = sorted(path.relative_to(one) for path in (one / "validation").rglob("*"))
    assert files == sorted(path.relative_to(two) for path in (two / "validation").rglob("*"))
    for path in (one / "validation" / "step-2").glob("*.safetensors"):
        with safe_open(path, "pt") as a, safe_open(two / path.relative_to(one), "pt") as b:
            torch.testing.assert_close(a.get_tensor("latents"), b.get_tensor("latents"), rtol=1e-4, atol=1e-4)
