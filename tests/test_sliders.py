"""Sliders (`train.slider`): a LoRA whose strength moves one attribute, learnt from prompts or from pairs of images.

The judge is the stock transformer with peft's adapter, one sample at a time: its own switch for the model without the
LoRA, diffusers' `set_adapters` for the strength, and the stock scheduler for generated latents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters

from qwen_cache import open_cache
from qwen_cache.errors import ConfigError
from qwen_cache.models.family import family_of_transformer
from qwen_cache.settings.load import load_config
from qwen_train import train as training
from qwen_train.data.batches import Batch, NoisedSample
from qwen_train.data.checks import check_objective, unused_parts
from qwen_train.data.samples import Mixture
from qwen_train.flow import NoiseSchedule
from qwen_train.lora.adapter import TRAINED, at_strength
from qwen_train.memory.cost import CARDS, Way, Work, step_seconds
from qwen_train.memory.plan import Workload
from qwen_train.memory.sizes import tokens_of
from qwen_train.model.combinations import with_layout
from qwen_train.model.compilation import TORCH
from qwen_train.run import image_titles
from qwen_train.training import loss as loss_module

from .support.caches import build
from .support.commands import run
from .support.marks import slow
from .support.preferences import write_brightness, write_directions, write_preferences
from .support.runs import (
    EVERYTHING_RANDOM,
    LORA,
    SMALL,
    Trainer,
    by_two,
    column,
    differences,
    outcome,
    relative_error,
    train_compiled,
)
from .support.teacher import gradients, prepared, stock_of, velocity_20b, with_fault
from .support.training_21 import stock_velocity

Sliding = Callable[..., Trainer]
STRENGTH = 2.5
PROMPTS = {"train__slider__direction": "prompts", "train__slider__guidance_strength": STRENGTH}
IMAGES = {"train__slider__direction": "images"}
GENERATED = {**PROMPTS, "train__slider__num_inference_steps": 5}
SEVERAL_SCALES = {"validation__num_images": 1, "validation__true_cfg_scale": [1, 4]}
AT_0 = {"validation__num_images": 1, "validation__lora_weight": 0}
EXACT = 1e-5
"""Tolerance in float32: two orders of the same sums."""


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Sliding:
    """`qwen-train run` on a cache of "targets", "generated" images or "pairs", built once."""
    root, caches = tmp_path_factory.mktemp("sliders"), dict[Any, Path]()

    def make(variant: str, kind: str, folder: Path) -> Trainer:
        if (variant, kind) not in caches:
            source = root / f"{variant} {kind}"
            if kind == "pairs":
                write_preferences(source, 6)
            else:
                write_directions(source, 6, target=kind == "targets")
            caches[variant, kind] = root / f"{variant} {kind} shards"
            result = build(source, caches[variant, kind], tiny_model(variant))
            assert result.code == 0, result.stderr
        return Trainer(caches[variant, kind], tiny_model(variant), folder)

    return make


# ---- the loss --------------------------------------------------------------------------------------------------------


def reference_loss(stock: Any, item: NoisedSample, velocity: Any, strength: float, schedule: Any) -> Tensor:
    """The objective of Concept Sliders for one sample: `strength` is 1 or -1."""
    sample, (draw,) = item.sample, item.draws
    own = sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"]
    stock.disable_adapters()
    with torch.no_grad():
        if "image_latents" in sample:
            noisy, sigma = (1 - draw.sigma) * sample["image_latents"] + draw.sigma * draw.noise, draw.sigma
        else:
            noisy, sigma = draw.noise, 1.0
            for t in schedule.timesteps[: len(item.path) - 1]:
                noisy = schedule.step(velocity(stock, sample, own, noisy, float(t) / 1000), t, noisy).prev_sample
            sigma = float(schedule.timesteps[len(item.path) - 1]) / 1000
        positive, negative = (sample[f"slider_{which}_embeds"] for which in ("positive", "negative"))
        there, back = (velocity(stock, sample, text, noisy, sigma) for text in (positive, negative))
        learnt = velocity(stock, sample, own, noisy, sigma) + strength * STRENGTH * (there - back)
    stock.enable_adapters()
    stock.set_adapters(["default"], [strength])
    error: Tensor = (velocity(stock, sample, own, noisy, sigma) - learnt).square().mean()
    return error


def of_images(stock: Any, item: NoisedSample, velocity: Any, strength: float) -> Tensor:
    """The usual loss of the one image of a pair that is learnt at this strength."""
    sample, (draw,) = item.sample, item.draws
    clean = sample["image_latents" if strength > 0 else "rejected_latents"]
    shapes = sample.img_shapes if strength > 0 else (sample.rejected_shape, *sample.img_shapes[1:])
    noisy = (1 - draw.sigma) * clean + draw.sigma * draw.noise
    stock.set_adapters(["default"], [strength])
    controls = [sample["control_latents"]] if "control_latents" in sample else []
    text = sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"]
    output = stock(
        hidden_states=torch.cat([noisy, *controls])[None],
        encoder_hidden_states=text[None],
        timestep=torch.tensor([draw.sigma]),
        img_shapes=[list(shapes)],
        return_dict=False,
    )[0][0, : len(noisy)]
    error: Tensor = (output - (draw.noise - clean)).square().mean()
    return error


def batches_of_both_strengths(p: training.Prepared) -> dict[float, tuple[Batch, list[NoisedSample]]]:
    """A batch of strength 1 and one of -1, with their samples."""
    found, consumed = dict[float, tuple[Batch, list[NoisedSample]]](), 0
    while len(found) < 2:
        positions = p.batches.plan.batch(consumed)
        batch = p.batches.batch(consumed)
        items = [p.batches.rows(position)[0 if batch.strength > 0 else -1] for position in positions]
        if batch.path is not None:
            stop = batch.path.shape[1] - 1
            items = [p.batches._on_the_way(item, stop) for item in items]
        if batch.path is None or 1 < batch.path.shape[1] < 5:
            found.setdefault(batch.strength, (batch, items))
        consumed += len(positions)
    return found


def found(p: training.Prepared, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a batch, as training has them."""
    p.run.optimizer.zero_grad()
    directed = loss_module.with_direction(p.run.transformer, batch, p.config.train, p.accelerator)
    with training.at_strength(p.run.transformer, TRAINED, batch.strength):
        loss = loss_module.compute_loss(p.transformer, directed, p.config.train)
        loss.backward()
    return loss, gradients(p.run.transformer)


def judged(p: training.Prepared, stock: Any, variant: str, batch: Batch, items: list[NoisedSample]) -> Any:
    velocity = velocity_20b if variant == "edit-plus" else stock_velocity
    losses = []
    for item in items:
        if batch.direction is None:
            losses.append(of_images(stock, item, velocity, batch.strength))
            continue
        tokens = len(item.draws[0].noise)
        schedule = FlowMatchEulerDiscreteScheduler.from_pretrained(p.start.model.path / "scheduler")
        schedule.set_timesteps(sigmas=np.linspace(1, 1 / 5, 5), mu=p.batches.schedule.mu(tokens))
        losses.append(reference_loss(stock, item, velocity, batch.strength, schedule))
    expected = torch.stack(losses).mean()
    stock.zero_grad()
    expected.backward()
    return expected, {name: each.clone() for name, each in gradients(stock).items()}


@pytest.mark.parametrize(
    ("variant", "kind", "changes"),
    [
        ("edit-plus", "targets", {"train__layout": "padded", "train__caption_dropout": 0.5}),
        ("qwen-image-21", "targets", {"train__layout": "packed"}),
        slow("edit-plus", "targets", {"train__offload_blocks": 2, "train__gradient_checkpointing": True}),
        ("edit-plus", "generated", {"train__layout": "packed"}),
        slow("qwen-image-21", "generated", {"train__layout": "padded"}),
        ("edit-plus", "pairs", {"train__layout": "padded"}),
    ],
)
def test_loss_and_gradient_are_those_of_the_stock_model_sample_by_sample(
    sliding: Sliding,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    variant: str,
    kind: str,
    changes: dict[str, Any],
) -> None:
    of_kind = {"targets": PROMPTS, "generated": GENERATED, "pairs": IMAGES}[kind]
    usual = {"train__batch_size": 3, "train__caption_dropout": 0.0, "train__gradient_checkpointing": True}
    p = prepared(sliding(variant, kind, tmp_path), **(usual | of_kind | changes))
    model = QwenImageTransformer2DModel if variant == "edit-plus" else QwenImage21Transformer2DModel
    stock = stock_of(p, tiny_model(variant) / "transformer", model)
    exact = 5 * EXACT if kind == "generated" else EXACT  # up to four passes, one after the other
    for batch, items in batches_of_both_strengths(p).values():
        expected, expected_gradients = judged(p, stock, variant, batch, items)
        loss, loss_gradients = found(p, batch)
        assert loss.item() == pytest.approx(expected.item(), rel=exact)
        assert relative_error(loss_gradients, expected_gradients) < exact


FAULTS = {
    "the sign": (loss_module, "with_direction", "positive - negative", "negative - positive"),
    "the prompts": (loss_module, "with_direction", "*(replace(batch, **text", "*(replace(batch, **texts[0]"),
    "other noise": (loss_module, "with_direction", "*(replace(batch, **", "*(replace(batch, noise=-batch.noise, **"),
    "the direction at another level": (
        loss_module,
        "with_direction",
        "*(replace(batch, **",
        "*(replace(batch, sigma=batch.sigma / 2, **",
    ),
    "a generation from another noise": (loss_module, "denoised", "latents = batch.noise", "latents = -batch.noise"),
    "a generation without the last step": (
        loss_module,
        "denoised",
        "path[:, i + 1] - path[:, i]",
        "path[:, i + 1] - path[:, 0]",
    ),
    "the model has the LoRA": (loss_module, "with_direction", ", without(transformer, TRAINED)", ""),
    "its strength is 1": (training, "at_strength", "strength * scaling", "scaling"),
    "the strength of the guidance": (loss_module, "with_direction", "settings.slider.guidance_strength * ", ""),
    "steps of generation": (loss_module, "denoised", "range(passes)", "range(passes - 1)"),
}


def test_each_fault_would_be_seen(
    sliding: Sliding, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared(sliding("edit-plus", "generated", tmp_path), **GENERATED, train__caption_dropout=0.0)
    stock = stock_of(p, tiny_model("edit-plus") / "transformer", QwenImageTransformer2DModel)
    batch, items = batches_of_both_strengths(p)[-1.0]
    _, expected = judged(p, stock, "edit-plus", batch, items)
    assert relative_error(found(p, batch)[1], expected) < 5 * EXACT
    for name, (owner, function, old, new) in FAULTS.items():
        with monkeypatch.context() as patch:
            faulty = with_fault(at_strength if owner is training else getattr(owner, function), old, new)
            patch.setattr(owner, function, faulty)
            assert relative_error(found(p, batch)[1], expected) > 100 * EXACT, name


@pytest.mark.parametrize("steps", [2, 20])
def test_levels_of_a_generation_are_the_stock_scheduler_s(steps: int, tiny_model: Callable[[str], Path]) -> None:
    for variant in ("edit-plus", "qwen-image-21"):
        stock = FlowMatchEulerDiscreteScheduler.from_pretrained(tiny_model(variant) / "scheduler")
        schedule = NoiseSchedule.of_config(dict(stock.config))
        stock.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps), mu=schedule.mu(1024))
        np.testing.assert_allclose(schedule.levels(steps, 1024), stock.sigmas[:-1].numpy(), rtol=1e-5)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["targets", "generated", "pairs"])
def test_a_run_is_resumed_exactly_and_with_these_settings_alone(sliding: Sliding, tmp_path: Path, kind: str) -> None:
    train = sliding("edit-plus", kind, tmp_path)
    of_kind = {"targets": PROMPTS, "generated": GENERATED, "pairs": IMAGES}[kind]
    direction = {f.replace("__", "."): v for f, v in of_kind.items()}
    settings = {**EVERYTHING_RANDOM, **direction, "train.max_steps": 4}
    whole = train(settings=settings, out="whole")
    assert train.try_(settings=settings, train__max_steps=1).code == 0
    other = train.try_("--resume", settings=settings, train__slider__guidance_strength=7.0)
    if kind != "pairs":
        assert other.code == 2
        assert "this checkpoint was trained with another train.slider.guidance_strength" in other.stderr
    assert differences(outcome(train("--resume", settings=settings)), outcome(whole)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(sliding: Sliding, tmp_path: Path, fsdp: bool) -> None:
    train = sliding("edit-plus", "generated", tmp_path)
    direction = {f.replace("__", "."): v for f, v in GENERATED.items()}
    settings = {**SMALL, **direction, "train.batch_size": 1, "optimizer.eps": 1e-2, "train.max_steps": 3}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings, train__fsdp=fsdp)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-4)
    assert relative_error(load_file(out / LORA), load_file(one / LORA)) < 1e-4


@pytest.mark.slow
@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < TORCH, reason="an older torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_have_graphs_for_each_strength_once(
    sliding: Sliding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most two with gradients for each strength, of the last block and of the others, and those without the LoRA."""
    train = sliding("edit-plus", "targets", tmp_path)
    direction = {f.replace("__", "."): v for f, v in PROMPTS.items()}
    settings = {**SMALL, **direction, "train.layout": "packed", "train.batch_size": 2, "train.max_steps": 8}
    batches = train.batches(settings=settings)
    assert {batches.batch(consumed).strength for consumed in range(0, 16, 2)} == {-1.0, 1.0}
    plain = train(settings=settings, out="plain")
    compiled = train_compiled(train, monkeypatch, settings)
    assert counters["stats"]["unique_graphs"] <= 6
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["targets", "pairs"])
def test_the_loss_falls_on_held_out_samples_at_both_strengths(sliding: Sliding, tmp_path: Path, kind: str) -> None:
    """The measured loss is the mean of both strengths: before training that of the model without the LoRA."""
    train = sliding("edit-plus", kind, tmp_path)
    direction = {f.replace("__", "."): v for f, v in (IMAGES if kind == "pairs" else PROMPTS).items()}
    settings = {**SMALL, **direction, "train.validation_split": 0.4, "validation.validation_steps": 30}
    settings |= {"train.max_steps": 30, "train.batch_size": 3, "optimizer.learning_rate": 0.01}
    settings |= {"validation.num_images": 1, "validation.images_every_steps": 30, "validation.num_inference_steps": 2}
    result = train.try_(settings=settings)
    assert result.code == 0, result.stderr
    first, last = column(tmp_path / "out", "validation_loss")
    assert last < first
    images = []
    for step in (0, 30):
        (file,) = (tmp_path / "out" / "validation" / f"step-{step}").glob("*.safetensors")
        with safe_open(file, framework="pt") as opened:
            assert image_titles(opened.metadata()) == [f"lora_weight {each}" for each in (-2, -1, 0, 1, 2)]
            images.append(opened.get_tensor("latents").chunk(5))
    assert torch.equal(images[1][2], images[0][2]), "at 0 it is the model without the LoRA"
    assert len({tuple(each.flatten().tolist()) for each in images[1]}) == 5
    assert f"slider   {'strength 1 learns' if kind == 'pairs' else '2.5 times the difference'}" in result.stderr


@pytest.mark.slow
def test_brightness_rises_with_the_strength(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """On a model that has learnt what bright and dark mean, of photographs and of what it generates from noise."""
    model, size = tiny_model("t2i"), ("--height", "64", "--width", "64", "--set", "predict.dtype=float32")
    settings = {**SMALL, "train.caption_dropout": 0.0, "train.gradient_checkpointing": False, "train.logit_mean": 2.0}
    settings |= {"lr_scheduler.name": "cosine", "optimizer.weight_decay": 0.0, "optimizer.learning_rate": 4e-3}

    def trained(kind: str, *options: str | Path, **changes: Any) -> Path:
        cache = tmp_path / f"{kind} shards"
        result = build(write_brightness(tmp_path / kind, kind), cache, model, "--set", "data.allow_no_control=true")
        assert result.code == 0, result.stderr
        return Trainer(cache, model, tmp_path)(*options, settings=settings, out=f"{kind} run", **changes)

    base = trained("base", train__method="full", train__batch_size=12, train__max_steps=90)
    of_base = "--model", model, "--transformer", base / "transformer" / "diffusion_pytorch_model.safetensors"
    for kind, direction in (("targets", PROMPTS), ("generated", GENERATED), ("pairs", IMAGES)):
        guidance = {} if kind == "pairs" else {"train__slider__guidance_strength": 1.0}
        steps = {"train__batch_size": 4, "train__max_steps": 30}
        lora = trained(kind, *of_base[2:], **(direction | guidance | steps))
        grid = "--grid", "lora_weight=-2,-1,0,1,2", "--set", "predict.num_inference_steps=4"
        result = run(
            "qwen-train",
            "predict",
            *of_base,
            "--lora",
            lora,
            "--prompt",
            "photo",
            *size,
            *grid,
            "--out",
            lora / "a.png",
        )
        assert result.code == 0, result.stderr
        files = (lora / f"a-lora_weight={strength}.png" for strength in (-2, -1, 0, 1, 2))
        means = [float(np.asarray(Image.open(file).convert("L")).mean()) / 255 for file in files]
        assert all(darker + 0.02 < brighter for darker, brighter in itertools.pairwise(means)), (kind, means)


# ---- what is counted, said and refused -------------------------------------------------------------------------------


def test_plan_counts_the_larger_image_of_a_pair_the_image_to_generate_and_the_passes(
    sliding: Sliding, tmp_path: Path
) -> None:
    def planned(kind: str, **changes: Any) -> tuple[int, float]:
        """The tokens of the largest batch of one sample, and the seconds of its step."""
        config = with_layout(sliding("edit-plus", kind, tmp_path).config(**changes), "cuda")
        workload = Workload.of(config)
        work = Work.of(workload.transformer, config, workload.batch)
        seconds = step_seconds(workload.transformer, config, work, Way(0), CARDS["RTX 4090"], "none", 0)
        return tokens_of(workload.batch, config.train, family_of_transformer(workload.transformer)), seconds

    def most(kind: str) -> int:
        """The most tokens of a row: with the larger of its two images."""
        rows = [sample.row.meta for sample in open_cache(sliding("edit-plus", kind, tmp_path).cache)]
        sizes = (max(meta.img_shapes[0], meta.rejected_shape or (0, 0, 0), key=math.prod) for meta in rows)
        shapes = ((size, *meta.img_shapes[1:]) for size, meta in zip(sizes, rows, strict=True))
        images = (sum(map(math.prod, each)) for each in shapes)
        return max(tokens + meta.text_length for tokens, meta in zip(images, rows, strict=True))

    kinds = {"pairs": IMAGES, "targets": PROMPTS, "generated": GENERATED}
    tokens, seconds = zip(*(planned(kind, **changes) for kind, changes in kinds.items()), strict=True)
    assert tokens == tuple(map(most, kinds))
    # Launches decide, as many in a forward pass as in a backward; 2 passes on average are those of a generation.
    assert [each / seconds[0] for each in seconds] == pytest.approx([1, 5 / 2, 7 / 2], rel=0.1)


def test_several_caches_have_targets_or_have_none(sliding: Sliding, tmp_path: Path) -> None:
    for kinds, message in (
        (("generated", "generated"), None),
        (("targets", "generated"), "a slider is trained on targets or on generated images"),
    ):
        caches = [{"path": str(sliding("edit-plus", kind, tmp_path).cache)} for kind in kinds]
        train = sliding("edit-plus", "generated", tmp_path)
        _, _, *options = train.arguments(train__caches=caches, **GENERATED)
        config = load_config(None, list(map(str, options[3::2])), model__path=str(train.model))
        with pytest.raises(ConfigError, match=message) if message else nullcontext():
            Workload.of(config)


def test_what_cannot_work_is_refused(sliding: Sliding, tmp_path: Path) -> None:
    targets, generated, pairs = (sliding("edit-plus", kind, tmp_path) for kind in ("targets", "generated", "pairs"))
    for train, changes, message in (
        (pairs, PROMPTS, "6 of 6 samples without positive and negative prompt"),
        (targets, IMAGES, "6 of 6 samples without rejected image"),
        (targets, GENERATED, "train.slider.num_inference_steps is for samples without target, and all have one"),
        (generated, {}, "samples without target cannot be trained: they are images to generate"),
        (generated, {**GENERATED, "train__validation_split": 0.5}, "train.validation_split holds out targets"),
        (generated, {**GENERATED, "train__min_timestep": 900}, "train.min_timestep bounds sampled noise levels, and"),
        (targets, {**PROMPTS, **SEVERAL_SCALES}, "validation images vary over scales or over strengths"),
        (targets, AT_0 | {"train__method": "full"}, "validation.lora_weight and train.method=full exclude each other"),
        (targets, AT_0 | {"train__lora__type": "oft"}, "validation.lora_weight and train.lora.type=oft exclude"),
    ):
        for command in ("run", "plan"):
            result = run("qwen-train", command, *train.arguments(**changes)[1:])
            assert result.code == 2
            assert message in result.stderr
    for change, value, setting in (
        ("train__method", "full", "train.method=full"),
        ("train__follow", True, "train.follow=true"),
        ("train__noise_draws", 2, "train.noise_draws=2"),
        ("train__dpo__beta", 5.0, "train.slider"),
        ("train__lora__type", "oft", "train.lora.type=oft"),
        ("train__lora__use_dora", True, "train.lora.use_dora"),
    ):
        with pytest.raises(ConfigError, match=f"train.(slider|dpo) and {setting} exclude each other"):
            check_objective(targets.config(**PROMPTS, **{change: value}).train)
    for change, value in (("edit_mask_weight", 3.0), ("loss_reduction", "per_token")):
        with pytest.raises(ConfigError, match=f"train.slider and train.{change}=(3|per_token) exclude each other"):
            check_objective(pairs.config(**IMAGES, **{f"train__{change}": value}).train)
    for given, name in ((IMAGES, "guidance_strength"), ({}, "num_inference_steps")):
        with pytest.raises(ConfigError, match=f"train.slider.{name} is for sliders from prompts"):
            targets.config(**given, **{f"train__slider__{name}": 7})
    assert not [*unused_parts(Mixture.of(open_cache(pairs.cache)), pairs.config(**IMAGES).train)]
    directions = Mixture.of(open_cache(targets.cache))
    (note,) = unused_parts(directions, targets.config().train)
    assert note.startswith("note: 6 of 6 samples have the direction of a slider, which is not trained")
    assert not [*unused_parts(directions, targets.config(**PROMPTS).train)]
