"""The result of training: a LoRA file that the stock pipelines load, and that then does what was trained.

The judge is the stock loader and the stock transformer, on a single sample, against the transformer that was trained,
as it stood in memory when training ended.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen_cache import open_cache
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.settings.load import load_config
from qwen_train import train as training
from qwen_train.lora.adapter import lora_weights, start_from, write_lora
from qwen_train.lora.files import METADATA_KEY, origin_of
from qwen_train.lora.reader import read_lora
from qwen_train.training import prepare as prepare_module

from .support.caches import build
from .support.judge import TOLERANCE
from .support.marks import slow
from .support.outputs import output, relative_error
from .support.photographs import photograph

Built = Callable[[str, Sequence[str]], Path]
PIPELINES = {
    "edit": "QwenImageEditPipeline",
    "edit-plus": "QwenImageEditPlusPipeline",
    "edit-2511": "QwenImageEditPlusPipeline",
    "t2i": "QwenImagePipeline",
}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]


@dataclass(frozen=True)
class Trained:
    """The file, the transformer that it was written from, and a sample to compare them on."""

    file: Path
    model: Path
    transformer: Any
    sample: Sample


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Path:
    """A cache of two images with captions, for text-to-image."""
    folder = tmp_path_factory.mktemp("text-to-image")
    targets = folder / "data" / "target_images"
    targets.mkdir(parents=True)
    for name, size, prompt in (("china.jpg", (128, 96), "a temple"), ("chelsea.png", (96, 128), "a cat, close up")):
        photograph(name).resize(size).save(targets / f"{name}.png")
        (targets / f"{name}.txt").write_text(prompt, encoding="utf-8")
    result = build(folder / "data", folder / "shards", tiny_model("t2i"))
    assert result.code == 0, result.stderr
    return folder / "shards"


@pytest.fixture
def fit(
    built: Built, images: Path, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Trained]]:
    """Train a few steps, fast enough that the outputs change by a tenth and more."""
    prepare = training.prepare
    monkeypatch.setattr(prepare_module, "print_memory", Mock())  # it and the page take longer than the steps
    monkeypatch.setattr(training, "renew_report", Mock())

    def train(variant: str = "edit-plus", folder: str = "out", learning_rate: float = 0.02, **settings: Any) -> Trained:
        AcceleratorState._reset_state(reset_partial_state=True)
        options = ("--on-error", "skip") if variant == "edit" else ()
        cache, model = images if variant == "t2i" else built(variant, options), tiny_model(variant)
        prepared = []
        monkeypatch.setattr(training, "prepare", lambda *a: prepared.append(prepare(*a)) or prepared[-1])
        settings = {"rank": 4, **settings}
        config = load_config(
            None,
            [
                *("train.mixed_precision='no'", "train.max_steps=4", "train.batch_size=2", "logging.report_to=none"),
                *(f"optimizer.learning_rate={learning_rate}", f"train.output_dir={json.dumps(str(tmp_path / folder))}"),
                *(f"train.lora.{name}={json.dumps(value)}" for name, value in settings.items()),
            ],
            cache__path=str(cache),
            model__path=str(model),
        )
        file = training.train(config)
        return Trained(file, model, prepared[0].transformer.eval(), open_cache(cache)[0])

    yield train
    AcceleratorState._reset_state(reset_partial_state=True)


def stock_with(file: Path, variant: str, model: Path) -> QwenImageTransformer2DModel:
    """The stock transformer, with the adapter as the stock pipeline loads it."""
    pipeline_class = getattr(diffusers, PIPELINES[variant])
    transformer = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    parts = {"scheduler", "vae", "text_encoder", "tokenizer"} | (set() if variant == "t2i" else {"processor"})
    pipeline = pipeline_class(transformer=transformer, **dict.fromkeys(parts))
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    return pipeline.transformer.eval()


@pytest.mark.parametrize("variant", [name if name == "edit-plus" else slow(name) for name in PIPELINES])
def test_stock_pipeline_with_the_file_equals_what_was_trained(fit: Callable[..., Trained], variant: str) -> None:
    trained = fit(variant)
    expected = output(trained.transformer, trained.sample)
    found = output(stock_with(trained.file, variant, trained.model), trained.sample)
    assert relative_error(found, expected) < TOLERANCE
    untrained = QwenImageTransformer2DModel.from_pretrained(trained.model / "transformer")
    assert relative_error(output(untrained, trained.sample), expected) > 0.01, "the LoRA changes nothing"


@pytest.mark.parametrize("lora_alpha", [slow(2), 6.0, slow(16)])
def test_an_alpha_that_is_not_the_rank_reaches_the_stock_loader(fit: Callable[..., Trained], lora_alpha: float) -> None:
    """The alpha stands in the metadata of the file; without that the stock loader takes the rank for it."""
    trained = fit(lora_alpha=lora_alpha, target_modules=[*ATTENTION, "add_q_proj", "img_mlp.net.2"])
    expected = output(trained.transformer, trained.sample)
    found = output(stock_with(trained.file, "edit-plus", trained.model), trained.sample)
    assert relative_error(found, expected) < TOLERANCE

    bare = trained.file.with_name("bare.safetensors")
    save_file(load_file(trained.file), bare)
    found = output(stock_with(bare, "edit-plus", trained.model), trained.sample)
    assert relative_error(found, expected) > 1e-3, "the metadata makes no difference"


def test_the_file_has_diffusers_names_and_says_rank_alpha_and_modules(fit: Callable[..., Trained]) -> None:
    trained = fit(lora_alpha=10)
    assert trained.file.name == diffusers.loaders.lora_pipeline.LORA_WEIGHT_NAME_SAFE
    weights = load_file(trained.file)
    assert set(weights) == {
        f"transformer.transformer_blocks.{block}.attn.{module}.lora_{side}.weight"
        for block in range(2)
        for module in ATTENTION
        for side in "AB"
    }
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert tensor.shape == ((4, 64) if "lora_A" in name else (64, 4))
    with safe_open(trained.file, framework="pt") as file:
        metadata = json.loads(file.metadata()["lora_adapter_metadata"])
    assert metadata["transformer.r"] == 4
    assert metadata["transformer.lora_alpha"] == 10
    assert metadata["transformer.target_modules"] == sorted(ATTENTION)


def test_modules_may_be_named_by_a_regular_expression(fit: Callable[..., Trained]) -> None:
    trained = fit(target_modules=r".*\.1\.attn\.to_[qk]")
    assert {name.split(".lora_")[0] for name in load_file(trained.file)} == {
        f"transformer.transformer_blocks.1.attn.to_{letter}" for letter in "qk"
    }
    expected = output(trained.transformer, trained.sample)
    found = output(stock_with(trained.file, "edit-plus", trained.model), trained.sample)
    assert relative_error(found, expected) < TOLERANCE


def test_the_file_says_what_it_was_trained_on(fit: Callable[..., Trained]) -> None:
    """By the last part of the model's name: where it lay is nobody's business."""
    trained = fit()
    assert origin_of(trained.file) == {
        "model": trained.model.resolve().name,
        "pipeline": "QwenImageEditPlusPipeline",
        "cache": json.loads((trained.file.parent / "about.json").read_text())["identity"],
    }


def test_equal_weights_are_equal_files(fit: Callable[..., Trained]) -> None:
    """To the byte, so that a hash of the file tells whether anything changed."""
    trained = fit()
    again = trained.file.with_name("again.safetensors")
    for _ in range(8):
        write_lora(trained.transformer, lora_weights(trained.transformer), again, origin_of(trained.file))
        assert again.read_bytes() == trained.file.read_bytes()


# ---- variants, and starting from a file ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        slow({"use_rslora": True, "lora_alpha": 6}),
        slow({"use_dora": True, "lora_alpha": 6}),
        {"use_rslora": True, "use_dora": True},
        slow({"init_lora_weights": True}),
    ],
    ids=["rslora", "dora", "both", "kaiming"],
)
def test_variants_reach_the_stock_loader(fit: Callable[..., Trained], settings: dict[str, Any]) -> None:
    trained, plain = fit(**settings), fit(folder="plain", lora_alpha=settings.get("lora_alpha"))
    expected = output(trained.transformer, trained.sample)
    found = output(stock_with(trained.file, "edit-plus", trained.model), trained.sample)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(output(plain.transformer, trained.sample), expected) > 1e-3, "the setting changes nothing"


@pytest.mark.slow
def test_training_starts_from_a_file_or_its_folder(fit: Callable[..., Trained]) -> None:
    first = fit(lora_alpha=6)
    for place in (first.file, first.file.parent):
        after = fit(folder="after", lora_alpha=6, weights=str(place), learning_rate=1e-12)
        before, now = load_file(first.file), load_file(after.file)
        assert before.keys() == now.keys()
        assert all(torch.allclose(now[name], before[name], atol=1e-9) for name in before)
        shutil.rmtree(after.file.parent)


def test_starting_from_another_kind_of_lora_is_refused(fit: Callable[..., Trained]) -> None:
    first = fit(lora_alpha=6)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"rank": 8}, "the LoRA has another r (expected 8, found 4)"),
        ({"lora_alpha": 5}, "the LoRA has another lora_alpha (expected 5.0, found 6.0)"),
        ({"use_rslora": True}, "the LoRA has another use_rslora (expected True, found False)"),
        ({"target_modules": ["to_q"]}, "(found transformer_blocks.0.attn.to_k.lora_A.weight)"),
    ]
    for change, message in changes:
        with pytest.raises(TrainError) as refusal:
            fit(**{"folder": "after", "lora_alpha": 6, "weights": str(first.file), **change})
        assert message in str(refusal.value)
        assert str(first.file) in str(refusal.value)


def test_starting_from_what_is_no_lora_is_refused(fit: Callable[..., Trained], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train.lora.weights: no LoRA here"):
        fit(weights=str(tmp_path / "nowhere"))
    (tmp_path / "text.safetensors").write_text("not one", encoding="utf-8")
    with pytest.raises(TrainError, match="this is not a LoRA file"):
        fit(weights=str(tmp_path / "text.safetensors"))
    for metadata, message in (
        ("[" * 100_000, "it is nested more than 100 deep"),
        ("9" * 5000, "Exceeds the limit (4300 digits)"),
        ('{"r": 4, "r": 8}', 'the key "r" is there twice'),
        ("[]", "lora_adapter_metadata in its metadata is not a JSON object"),
    ):
        file = tmp_path / "metadata.safetensors"
        save_file({"x": torch.zeros(1)}, file, {METADATA_KEY: metadata})
        for read in (read_lora, lambda file: start_from(None, file)):
            with pytest.raises(TrainError) as caught:
                read(file)
            assert str(caught.value).startswith(f"{file}: this is not a LoRA file: {message}")
        assert origin_of(file) == {}
