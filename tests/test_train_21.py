"""Qwen-Image-2.1 is trained as its stock model would be, one sample and one noise draw at a time.

The judges: the stock transformer on its own inputs with the loss written out (`support/training_21.py`); the same run
without the setting in question; the run that was not interrupted, bit for bit. The cache has samples of none, one and
two control images.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import QwenImage21Transformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.models.quantization import QuantizedLinear
from qwen_train import train as training
from qwen_train.data.batches import Batch, Batches, NoisedSample, collate
from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
from qwen_train.training import checkpoint, validation
from qwen_train.training.loss import compute_loss

from .support.commands import Result, refused, run
from .support.crash import Crash
from .support.marks import slow
from .support.runs import (
    EVERYTHING_RANDOM,
    LORA,
    SMALL,
    Trainer,
    average_of,
    column,
    differences,
    relative_error,
    run_training,
    train_compiled,
    written,
)
from .support.training_21 import draw_loss, reference_loss

ALL = {**SMALL, "train.batch_size": 6}
"""One batch of all samples."""
WEIGHTED = {**ALL, "train.caption_dropout": 0.5, "train.edit_mask_weight": 3.0, "train.weighting": "cosmap"}
BY_SNR = {"train.weighting": "min_snr", "train.loss_type": "huber", "train.huber_c": 0.3, "train.timestep_shift": 3.0}
BOUNDED = {"train.weighting": "debiased", "train.loss_type": "l1", "train.min_timestep": 200, "train.max_timestep": 700}
RANDOM = {**EVERYTHING_RANDOM, "train.noise_draws": 2}
AVERAGE = "pytorch_lora_weights_ema.safetensors"


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def train(train_21: Trainer) -> Trainer:
    return train_21


@pytest.fixture
def prepared(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The result of `prepare` for each run."""
    runs: list[Any] = []
    prepare = training.prepare
    monkeypatch.setattr(training, "prepare", lambda *a: runs.append(prepare(*a)) or runs[-1])
    return runs


def stock(train: Trainer, folder: Path | None = None) -> Any:
    return QwenImage21Transformer2DModel.from_pretrained(folder or train.model / "transformer")


def ours(train: Trainer, layout: str = "padded") -> Any:
    model = QwenImage21MultiResTransformer2DModel.from_pretrained(train.model / "transformer")
    model.layout = layout
    return model


def first_batch(batches: Batches) -> tuple[Batch, list[NoisedSample]]:
    return batches.batch(0), [batches.sample_noise(position) for position in batches.plan.batch(0)]


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# ---- the loss and its gradient ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draws", "layout", "reduction", "changes"),
    [
        (3, "padded", "per_token", {}),
        (1, "packed", "per_sample", {}),
        (2, "packed", "per_token", BY_SNR),
        slow(3, "packed", "per_sample", {}),
        slow(1, "padded", "per_token", {}),
        slow(3, "padded", "per_sample", {}),
        slow(1, "packed", "per_token", {}),
        slow(1, "padded", "per_sample", BY_SNR | {"train.huber_schedule": "constant"}),
        slow(2, "padded", "per_token", BOUNDED),
    ],
)
def test_loss_and_gradient_are_those_of_the_stock_model_one_draw_at_a_time(
    train: Trainer, draws: int, layout: str, reduction: str, changes: dict[str, Any]
) -> None:
    settings = {**WEIGHTED, "train.noise_draws": draws, "train.layout": layout, "train.loss_reduction": reduction}
    settings |= changes
    batches = train.batches(settings=settings)
    batch, noised = first_batch(batches)
    assert {len(shapes) for shapes in batch.img_shapes} == {1, 2, 3}
    assert {item.without_caption for item in noised} == {False, True}
    assert [item.sample.name for item in noised if "edit_mask" in item.sample] == ["target_images/cup"]
    model, judge = ours(train, layout), stock(train)
    loss, expected = compute_loss(model, batch, batches.config), reference_loss(judge, noised, batches.config)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(gradients(model), gradients(judge)) < 1e-5
    with torch.no_grad():
        each = [draw_loss(judge, item, draw, batches.config).item() for item in noised for draw in item.draws]
    assert max(each) > 1.05 * min(each), "losses so similar would hide a mistake in their mean"


def test_several_draws_are_the_mean_of_as_many_passes(train: Trainer) -> None:
    _, noised = first_batch(train.batches(settings=WEIGHTED, train__noise_draws=4))
    model = ours(train)
    passes = [[replace(item, draws=(item.draws[k],)) for item in noised] for k in range(4)]
    family = train.batches().family

    def loss_and_gradient(*batches: list[NoisedSample]) -> tuple[float, dict[str, Tensor]]:
        model.zero_grad()
        losses = [compute_loss(model, collate(each, 3.0, "per_token", family=family)) for each in batches]
        mean = torch.stack(losses).mean()
        mean.backward()
        return mean.item(), gradients(model)

    together, gradient = loss_and_gradient(noised)
    gradient = {name: tensor.clone() for name, tensor in gradient.items()}
    separate, expected = loss_and_gradient(*passes)
    assert together == pytest.approx(separate, rel=1e-5)
    assert relative_error(gradient, expected) < 1e-5
    one, _ = loss_and_gradient(passes[0])
    assert one != pytest.approx(separate, rel=1e-3), "draws so similar would hide a mistake"


def test_a_run_equals_a_plain_loop_over_the_stock_transformer(train: Trainer) -> None:
    """A large eps, because AdamW with a small one makes whole steps of gradients that are nothing but rounding."""
    settings = {**WEIGHTED, "train.batch_size": 3, "train.noise_draws": 2, "optimizer.eps": 1e-3}
    settings |= {"train.lora.rank": 4, "train.lora.lora_alpha": 12, "optimizer.learning_rate": 0.1}
    settings |= {"train.max_steps": 2}
    out = train(settings=settings)
    start = get_peft_model_state_dict(train.prepared(settings=settings, out="start").transformer)
    judge = stock(train).requires_grad_(False)
    judge.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    set_peft_model_state_dict(judge, start)
    parameters = [p for p in judge.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, eps=1e-3, weight_decay=0.01)
    batches, losses, consumed = train.batches(settings=settings), [], 0
    for _ in range(2):
        positions = batches.plan.batch(consumed)
        consumed += len(positions)
        loss = reference_loss(judge, [batches.sample_noise(position) for position in positions], batches.config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, batches.config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    trained = {name.removeprefix("transformer."): tensor for name, tensor in load_file(out / LORA).items()}
    expected = get_peft_model_state_dict(judge)
    assert column(out, "loss") == pytest.approx(losses, rel=1e-4)
    assert relative_error(trained, expected) < 1e-3
    assert relative_error(start, expected) > 0.01, "nothing was learnt"


# ---- draws and data --------------------------------------------------------------------------------------------------


def test_one_draw_is_training_without_the_setting(train: Trainer) -> None:
    """Two draws are another run."""
    settings = {**EVERYTHING_RANDOM, "train.max_steps": 1}
    assert train.config(settings=settings, train__noise_draws=1) == train.config(settings=settings)
    one, two = (train(settings=settings, train__noise_draws=draws, out=f"{draws}") for draws in (1, 2))
    assert column(one, "loss") != column(two, "loss")


def test_the_first_draw_and_the_order_do_not_depend_on_their_number(train: Trainer) -> None:
    settings = {**SMALL, "train.caption_dropout": 0.5}
    one, three = (train.batches(settings=settings, train__noise_draws=draws) for draws in (1, 3))
    for consumed in range(12):
        a, b = one.batch(consumed), three.batch(consumed)
        controls = sum(math.prod(shape) for shape in a.img_shapes[0][:-1])
        target = math.prod(a.img_shapes[0][-1])
        assert (a.keys, a.img_shapes, a.consumed_samples) == (b.keys, b.img_shapes, b.consumed_samples)
        assert torch.equal(a.prompt_embeds, b.prompt_embeds)
        assert torch.equal(a.sigma, b.sigma[:, 0])
        assert torch.equal(a.clean, b.clean[:, : controls + target])
        assert torch.equal(a.noise, b.noise[:, : controls + target])
        draws = b.noise[0, controls:].view(3, target, 64)
        assert not torch.equal(draws[0], draws[1])
        assert len({float(sigma) for sigma in b.sigma[0]}) == 3


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_budget_counts_what_a_batch_computes(train: Trainer, layout: str) -> None:
    """A target once for each draw, text and images of a sample in one row."""
    sizes = {}
    for draws in (1, 3):
        settings = {**SMALL, "train.layout": layout, "train.max_tokens": 700, "train.bucketing_window": 1}
        settings |= {"train.caption_dropout": 0.0}
        batches, consumed, totals = train.batches(settings=settings, train__noise_draws=draws), 0, []
        while consumed < 2 * batches.plan.in_epoch:
            batch, positions = batches.batch(consumed), batches.plan.batch(consumed)
            consumed = batch.consumed_samples
            mask = batch.prompt_embeds_mask
            texts = [batch.prompt_embeds.shape[1]] * len(positions) if mask is None else mask.sum(1).tolist()
            images = (batch.clean != 0).any(-1).sum(1).tolist()
            rows = [text + image for text, image in zip(texts, images, strict=True)]
            assert sum(images) == batch.image_tokens
            total = len(rows) * max(rows) if layout == "padded" else sum(rows)
            assert batches.plan._cost(positions) == total <= 700
            totals.append(total)
        sizes[draws] = len(totals)
    assert sizes[3] > sizes[1], "more draws did not make batches smaller"


def test_a_sample_that_exceeds_the_budget_is_named(train: Trainer) -> None:
    """The largest sample, cat: 8×8 tokens of the target for each draw, 8×8 and 6×10 of the controls, and its text."""
    (text,) = [sample.row.meta.text_length for sample in open_cache(train.cache) if sample.name.endswith("cat")]
    tokens = text + 64 + 60 + 3 * 64
    result = train.try_(train__noise_draws=3, train__max_tokens=tokens - 1)
    refused(result, "sample target_images/cat alone exceeds train.max_tokens", f"found {tokens})")
    refused(result, f"set train.max_tokens={tokens} or more, lower train.noise_draws, or build")
    train(train__noise_draws=3, train__max_tokens=tokens, train__max_steps=1)


def test_draws_are_refused_where_nothing_is_shared(
    built: Callable[[str], Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = Trainer(built("edit-plus"), tiny_model("edit-plus"), tmp_path)
    reason = "in Qwen-Image text and control images attend to the noisy target"
    refused(trainer.try_(train__noise_draws=2), "train.noise_draws is for Qwen-Image-2.1", reason, "noise_draws=1")
    result = run("qwen-train", "plan", trainer.cache, "--model", trainer.model, "--set", "train.noise_draws=2")
    refused(result, "train.noise_draws is for Qwen-Image-2.1")
    assert not (tmp_path / "out").exists()


# ---- stopped and resumed ---------------------------------------------------------------------------------------------


def die_in(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die while it works on that batch, counted from 0."""
    batches, compute = itertools.count(), training.compute_loss

    def die(*arguments: Any) -> Tensor:
        if next(batches) == batch:
            raise Crash
        return compute(*arguments)

    patch.setattr(training, "compute_loss", die)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"train.method": "full"}, {"train.max_tokens": 900}], ids=str)
def test_dead_and_resumed_equals_uninterrupted(train: Trainer, changes: dict[str, Any]) -> None:
    settings = {**RANDOM, "train.checkpointing_steps": 1, "train.ema_decay": 0.9, **changes}
    if "train.max_tokens" in changes:
        del settings["train.batch_size"]
    with pytest.MonkeyPatch.context() as patch:
        die_in(3, patch)
        with pytest.raises(Crash):
            train.try_(settings=settings)
    assert [number for number, _ in checkpoint.checkpoints(train.folder / "out")] == [1]
    expected = written(train(settings=settings, out="expected"))
    assert differences(written(train("--resume", settings=settings)), expected) == []


def test_resuming_with_another_number_of_draws_is_refused(train: Trainer) -> None:
    train(settings=RANDOM, train__max_steps=1)
    for draws, found in ((3, "found 3"), (1, "found none, or without effect")):
        result = train.try_("--resume", settings=RANDOM, train__noise_draws=draws)
        refused(result, "checkpoint-1", "another train.noise_draws", "expected 2", found)


# ---- ways to train ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "judge"),
    [
        ({"train.gradient_checkpointing": 2}, {"train.gradient_checkpointing": False}),
        slow({"train.offload_blocks": 2}, {}),
        slow({"train.gradient_checkpointing": True}, {"train.gradient_checkpointing": False}),
        slow({"train.layout": "packed"}, {}),
        slow({"train.layout": "packed", "train.offload_blocks": 1}, {}),
    ],
    ids=str,
)
def test_memory_is_saved_and_the_result_is_the_same(
    train: Trainer, changes: dict[str, Any], judge: dict[str, Any]
) -> None:
    settings = {**RANDOM, "train.lora.lora_dropout": 0.0} if "train.layout" in changes else RANDOM
    plain, found = train(settings=settings | judge, out="plain"), train(settings=settings | changes)
    assert column(found, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
    assert relative_error(load_file(found / LORA), load_file(plain / LORA)) < 1e-3


def test_the_average_of_the_steps_is_saved(train: Trainer) -> None:
    out = train(settings=RANDOM, train__ema_decay=0.4, train__checkpointing_steps=1)
    steps = [load_file(out / f"checkpoint-{step}" / LORA) for step in (1, 2, 3)]
    expected = average_of(steps, decay=0.4)
    assert relative_error(load_file(out / AVERAGE), expected) < 1e-6
    assert relative_error(steps[-1], expected) > 1e-3, "the average is the last step"


def test_full_training_leaves_a_transformer_that_the_stock_class_loads(train: Trainer, prepared: list[Any]) -> None:
    """Every weight is trained: there is none that no gradient reaches."""
    settings = {**SMALL, "train.method": "full", "optimizer.learning_rate": 0.01, "train.noise_draws": 2}
    out = train(settings=settings, train__batch_size=6, train__max_steps=1)
    config = json.loads((out / "transformer" / "config.json").read_text(encoding="utf-8"))
    assert config["_class_name"] == "QwenImage21Transformer2DModel"
    before, after = stock(train).state_dict(), stock(train, out / "transformer").state_dict()
    assert before.keys() == after.keys()
    assert [name for name, weight in before.items() if torch.equal(weight, after[name])] == []
    trained = prepared[0].run.transformer.state_dict()
    assert all(torch.equal(weight, trained[name]) for name, weight in after.items())


@pytest.mark.parametrize("kind", ["int8_convrot", slow("int8"), slow("fp8")])
def test_a_lora_on_quantised_weights_learns_from_their_values(train: Trainer, prepared: list[Any], kind: str) -> None:
    plain = train(out="plain", optimizer__learning_rate=0.02)
    out = train(model__quantization=kind, optimizer__learning_rate=0.02)
    modules = prepared[-1].run.transformer.named_modules()
    quantised = Counter(name.split(".")[0] for name, module in modules if isinstance(module, QuantizedLinear))
    assert quantised.keys() == {"transformer_blocks"}
    assert column(out, "loss") == pytest.approx(column(plain, "loss"), rel=0.05)
    assert column(out, "loss") != pytest.approx(column(plain, "loss"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_compiled_blocks_learn_the_same(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**RANDOM, "train.lora.lora_dropout": 0.0}
    plain = train(settings=settings, out="plain")
    compiled = train_compiled(train, monkeypatch, settings)
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


def test_a_modulation_table_is_refused_by_name(train: Trainer) -> None:
    result = train.try_(train__tabulated_modulation=True, train__mixed_precision="bf16")
    refused(result, "Qwen-Image-2.1 has one modulation for all blocks", "tabulated_modulation=false")


# ---- validation ------------------------------------------------------------------------------------------------------


def test_the_validation_loss_is_that_of_the_stock_transformer(train: Trainer) -> None:
    """Under so small a learning rate, with a LoRA that begins as nothing, the model stays the stock one."""
    settings = {**SMALL, "optimizer.learning_rate": 1e-12, "train.max_steps": 1, "train.noise_draws": 2}
    settings |= {"train.validation_split": 0.6, "validation.validation_steps": 1}
    out, cache, judge = train(settings=settings), open_cache(train.cache), stock(train)
    batches = train.batches(settings=settings)
    held_out = [cache[int(i)] for i in batches.validation]
    assert len({len(sample.img_shapes) for sample in held_out}) > 1
    with torch.no_grad():
        losses = [
            [float(draw_loss(judge, item, item.draws[0], batches.config)) for item in validation.noised_samples(sample)]
            for sample in held_out
        ]
    assert column(out, "validation_loss") == pytest.approx([float(torch.tensor(losses).mean())] * 2, rel=1e-5)


# ---- other caches ----------------------------------------------------------------------------------------------------


def test_a_cache_of_the_other_family_is_refused(
    built: Callable[[str], Path], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    names = {"qwen-image-21": "QwenImage21Pipeline", "edit-plus": "QwenImageEditPlusPipeline"}
    for cache, model in itertools.permutations(names):
        result = Trainer(built(cache), tiny_model(model), tmp_path).try_()
        expected = f"expected {names[model]}, found {names[cache]}"
        refused(result, "the cache was built for another pipeline", expected)
        result = run("qwen-train", "plan", built(cache), "--model", tiny_model(model))
        refused(result, "the cache was built for another model")


def mixed(train: Trainer, *caches: Path) -> Result:
    """Train on several caches; those of qwen.yaml, in place of the first argument."""
    config = train.folder / "qwen.yaml"
    config.write_text(json.dumps({"train": {"caches": [{"path": str(cache)} for cache in caches]}}), encoding="utf-8")
    settings = {**SMALL, "train.noise_draws": 2, "train.batch_size": 4, "train.max_steps": 2}
    _, _, *rest = train.arguments(settings=settings)
    return run_training("--config", config, *rest)


def test_two_caches_are_trained_together_and_those_of_two_families_are_not(
    train: Trainer, built: Callable[..., Path]
) -> None:
    smaller = built("qwen-image-21", ("--set", "data.vae_image_size=9216"))
    result = mixed(train, train.cache, built("edit-plus"))
    refused(result, "these caches cannot be trained together: they differ in pipeline")
    result = mixed(train, train.cache, smaller)
    assert result.code == 0, result.stderr
    assert "12 samples" in result.stderr
    assert column(train.folder / "out", "step") == [1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_encoder")
def test_training_without_a_cache_equals_training_from_one(train: Trainer, tmp_path: Path) -> None:
    """Also by tokens: the number of tokens of targets is known before anything is encoded."""
    from .support.caches import SMALL_ONE_IMAGE, build
    from .support.sources import write_mixed

    source = write_mixed(tmp_path / "data")
    assert build(source, tmp_path / "shards", train.model).code == 0
    settings = {**RANDOM, "train.loss_reduction": "per_token", "train.caption_dropout": 0.3, "cache.dtype": "float32"}
    train.cache = tmp_path / "shards"
    from_cache = train(settings=settings, out="cached")
    train.cache = source
    fly = train("--encode-on-the-fly", *SMALL_ONE_IMAGE[:2], settings=settings, out="fly")
    assert column(fly, "loss") == column(from_cache, "loss")
    assert (fly / LORA).read_bytes() == (from_cache / LORA).read_bytes()
