"""Edits and text to image in one cache, one run and one model of the 20B family.

What is stored is compared with the stock pipelines in tests/equivalence/test_encode.py, what is generated from it in
tests/test_inference_cached.py; here the losses and gradients of mixed batches are those of the stock transformer on one
sample at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import QwenImageTransformer2DModel

from qwen_cache import open_cache
from qwen_cache.encode.text import kept_tokens
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.settings.sections import WeightedCache
from qwen_train.data.batches import NoisedSample
from qwen_train.data.samples import Mixture
from qwen_train.training.loss import compute_loss

from .support.caches import build, contents, plan
from .support.commands import refused, run
from .support.judge import TOLERANCE, relative
from .support.marks import slow
from .support.runs import SMALL as SMALL_RUN
from .support.runs import Trainer, relative_error, run_training
from .support.sources import write_mixed
from .support.transformer_judge import trainable_gradients

Built = Callable[..., Path]
TinyModel = Callable[[str], Path]
NO_CONTROLS = ("--set", "data.columns.control=[]")
"""The mixed source as text to image alone."""


@pytest.fixture(autouse=True)
def fresh_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_rows_without_controls_join_a_cache_and_nothing_is_encoded_again(
    built: Built, tiny_model: TinyModel, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert run("qwen-cache", "merge", built("edit-plus"), "--out", out).code == 0
    before, shards = open_cache(out), {name: data for name, data in contents(out).items() if name.endswith(".tar")}
    table = write_mixed(tmp_path / "mixed")
    result = build(table, out, tiny_model("edit-plus"))
    assert result.code == 0, result.stderr
    assert "6 samples, 4 cached, 2 to encode: 2 new" in result.stderr
    assert "2 of 6 samples without a control image, encoded as text to image" in result.stderr
    after = open_cache(out)
    assert after.recipe.recipe == before.recipe.recipe
    assert {sample.key for sample in before} < {sample.key for sample in after}
    assert shards.items() <= contents(out).items()
    of_text = {sample.prompt: sample for sample in open_cache(built("t2i", NO_CONTROLS, mixed=True))}
    for sample in after:
        if len(sample.img_shapes) == 1:
            assert sample.row.meta.prefix_length == 0
            assert "control_latents" not in sample
            for name, tensor in of_text.pop(sample.prompt).tensors().items():
                assert name in ("image_latents", "thumbnails") or relative(sample[name], tensor) < TOLERANCE
    assert len(of_text) == 3, "two of the five prompts"
    assert run("qwen-cache", "verify", out).code == 0


def test_a_prompt_that_text_to_image_would_cut_is_refused_where_it_is_without_a_control(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    table = write_mixed(tmp_path / "mixed")
    rows = [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]
    for row in rows[-2:]:
        row["prompt"] = "7" * 600  # a digit is a token
    rows[-1]["control"] = [rows[-1]["target"]]
    table.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = plan(table, tmp_path / "shards", tiny_model("edit-plus"))
    [problem] = found["problems"]
    assert problem["where"] == f"{table}:5"
    assert problem["what"] == "target_images/rocket: the prompt has 605 tokens, the pipeline uses 512"


def test_the_lengths_that_training_without_a_cache_counts_on_are_those_of_the_cache(
    built: Built, tiny_model: TinyModel
) -> None:
    stored = [sample for sample in open_cache(built("edit-plus", mixed=True)) if len(sample.img_shapes) == 1]
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    assert kept_tokens(model, [(sample.prompt, ()) for sample in stored]) == [
        len(sample["prompt_embeds"]) for sample in stored
    ]
    assert len(stored) == 2


@pytest.mark.slow
def test_edit_masks_and_attention_are_those_of_the_edits_alone(tiny_model: TinyModel, tmp_path: Path) -> None:
    out, options = tmp_path / "shards", ("--edit-mask", "diff", "--set", "cache.store_attention=true")
    assert build(write_mixed(tmp_path / "mixed"), out, tiny_model("edit-plus"), *options).code == 0
    for sample in open_cache(out):
        is_edit = len(sample.img_shapes) > 1
        assert ("attention" in sample) == is_edit
        assert is_edit or "edit_mask" not in sample
    again = plan(tmp_path / "mixed" / "metadata.jsonl", out, tiny_model("edit-plus"), *options[:2])
    assert (again["cached"], again["to_encode"], again["new_masks"]) == (0, 0, 6)


@pytest.mark.slow
def test_there_and_back_through_the_first_version_is_the_same(
    built: Built, tiny_model: TinyModel, tmp_path: Path
) -> None:
    no_others = ("--set", "data.edit_mask=none", "--set", "cache.thumbnails=false")
    mixed, first = built("edit-plus", no_others, mixed=True), tmp_path / "v1"
    assert run("qwen-cache", "migrate", "v2", "v1", mixed, "--out", first).code == 0
    direct = tmp_path / "direct"
    options = ("--set", "data.edit_mask=none", "--format", "v1")
    assert build(write_mixed(tmp_path / "mixed"), direct, tiny_model("edit-plus"), *options).code == 0
    stored = {sample.key: sample for sample in open_cache(direct)}
    for sample in open_cache(first):
        assert all(torch.equal(tensor, stored[sample.key][name]) for name, tensor in sample.tensors().items())
    assert run("qwen-cache", "migrate", "v1", "v2", first).code == 0
    assert open_cache(first).identity == open_cache(mixed).identity
    metas = {sample.key: replace(sample.row.meta, measured=None) for sample in open_cache(mixed)}  # v1 has no place
    assert {sample.key: sample.row.meta for sample in open_cache(first)} == metas


# ---- training --------------------------------------------------------------------------------------------------------


def single_loss(stock: QwenImageTransformer2DModel, noised: NoisedSample, edit_mask_weight: float) -> torch.Tensor:
    """Flow matching on one sample, whose stock call is that of its own pipeline."""
    sample, sigma, noise = noised.sample, noised.draws[0].sigma, noised.draws[0].noise
    clean = sample["image_latents"]
    controls = [sample["control_latents"]] if len(sample.img_shapes) > 1 else []
    velocity = stock(
        hidden_states=torch.cat([(1 - sigma) * clean + sigma * noise, *controls])[None],
        encoder_hidden_states=sample["empty_prompt_embeds" if noised.without_caption else "prompt_embeds"][None],
        timestep=torch.tensor([sigma]),
        img_shapes=[list(sample.img_shapes)],
        return_dict=False,
    )[0][0, : len(clean)]
    mask = sample["edit_mask"] if "edit_mask" in sample else torch.ones(len(clean))
    weight = 1 + (edit_mask_weight - 1) * mask
    return ((velocity - (noise - clean)).square().mean(-1) * weight).sum() / weight.sum()


@pytest.mark.parametrize(
    ("variant", "layout"),
    [
        ("edit-2511", "packed"),
        slow("edit-plus", "padded"),
        slow("edit-plus", "packed"),
        slow("edit-2511", "padded"),
        slow("t2i", "padded"),
    ],
)
def test_a_mixed_batch_has_the_loss_and_the_gradients_of_single_stock_calls(
    variant: str, layout: str, built: Built, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """No, one and two controls, an edit mask, and samples without their captions."""
    train = Trainer(built("edit-plus", mixed=True), tiny_model(variant), tmp_path)
    settings = {**SMALL_RUN, "train.method": "full", "train.batch_size": 6, "train.layout": layout}
    settings |= {"train.caption_dropout": 0.5, "train.seed": 2, "train.edit_mask_weight": 3}
    prepared = train.prepared(settings=settings)
    batch, noised = prepared.batches.batch(0), [prepared.batches.sample_noise(i) for i in range(6)]
    assert sorted(len(shapes) - 1 for shapes in batch.img_shapes) == [0, 0, 1, 1, 1, 2]
    assert {item.without_caption for item in noised if len(item.sample.img_shapes) == 1} == {True, False}
    loss = compute_loss(prepared.transformer, batch)
    loss.backward()
    stock = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer")
    expected = torch.stack([single_loss(stock, item, 3) for item in noised]).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    ours, singly = trainable_gradients(prepared.transformer), trainable_gradients(stock)
    assert not any(singly.pop(name).any() for name in singly.keys() - ours.keys()), "without influence, not trained"
    assert relative_error(ours, singly) < TOLERANCE


@pytest.mark.parametrize(
    ("model", "note"),
    [
        ("t2i", "note: there are control images in 4 of 12 samples, but QwenImagePipeline is for text to image alone"),
        slow("edit-plus", None),
    ],
)
def test_text_to_image_and_edits_are_trained_together_on_either_model(
    model: str, note: str | None, built: Built, tiny_model: TinyModel, tmp_path: Path
) -> None:
    caches = [built("t2i", NO_CONTROLS, mixed=True), built("edit-plus", mixed=True)]
    weighted = [{"path": str(path), "weight": weight} for path, weight in zip(caches, (0.5, 2), strict=True)]
    settings = {**SMALL_RUN, "train.caches": weighted, "train.max_steps": 2, "train.batch_size": 4}
    train = Trainer(caches[0], tiny_model(model), tmp_path)
    _, _, *arguments = train.arguments(settings=settings | {"train.validation_split": 0.4, "validation.num_images": 0})
    result = run_training(*arguments)
    assert result.code == 0, result.stderr
    words = " ".join(result.stderr.split())
    assert "12 samples, QwenImagePipeline and QwenImageEditPlusPipeline" in words
    assert note in words if note else "control image" not in words


def test_what_is_not_what_a_model_was_made_for_is_said_in_one_line(
    built: Built, tiny_model: TinyModel, tmp_path: Path
) -> None:
    cache = built("t2i", NO_CONTROLS, mixed=True)
    result = Trainer(cache, tiny_model("edit-plus"), tmp_path).try_(train__max_steps=1)
    assert result.code == 0, result.stderr
    line = "note: no sample has a control image, but QwenImageEditPlusPipeline is for editing"
    assert line in result.stderr.splitlines()
    options = ("--from-cache", built("edit-plus"), "--key", "cat", "--out", tmp_path / "out.png")
    result = run("qwen-train", "predict", "--model", tiny_model("t2i"), *options, "--num-inference-steps", "2")
    line = "note: there are control images in 1 of 1 sample, but QwenImagePipeline is for text to image alone"
    assert line in result.stderr.splitlines()
    assert (tmp_path / "out.png").is_file()


def test_what_cannot_work_together_is_refused(built: Built, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Another VAE or text encoder, two editing pipelines even beside text to image, another family."""
    text, edits = (open_cache(built(*each, mixed=True)) for each in (("t2i", NO_CONTROLS), ("edit-plus",)))
    other = open_cache(built("edit", ("--on-error", "skip")))
    entries = [WeightedCache(path="")] * 3
    assert Mixture([text, edits], entries[:2]).pipelines == ("QwenImagePipeline", "QwenImageEditPlusPipeline")
    message = r"differ in pipeline \(expected QwenImageEditPlusPipeline, as in .*, found QwenImageEditPipeline in "
    with pytest.raises(ConfigError, match=message):
        Mixture([text, edits, other], entries)
    for part in ("vae", "text_encoder"):
        with pytest.raises(ConfigError, match=rf"differ in {part} \(expected \w+, as in .*, found other in "):
            Mixture([text, with_recipe(edits, **{part: "other"})], entries[:2])
    caches = [{"path": str(cache.folder)} for cache in (text, edits)]
    for model, family in (("edit", "QwenImageEditPipeline"), ("qwen-image-21", "QwenImage21Pipeline")):
        train = Trainer(Path(), tiny_model(model), tmp_path)
        _, _, *arguments = train.arguments(settings={**SMALL_RUN, "train.caches": caches})
        found = "QwenImagePipeline" if model == "qwen-image-21" else "QwenImageEditPlusPipeline"
        refused(run("qwen-train", "run", *arguments), f"another pipeline (expected {family}, found {found})")


def with_recipe(cache: Cache, **changes: str) -> Cache:
    """The cache with another recipe, in memory."""
    changed = open_cache(cache.folder)
    recipe = replace(cache.recipe, recipe=cache.recipe.recipe | changes)
    changed.manifest = replace(cache.manifest, recipes={cache.recipe_name: recipe})
    return changed
