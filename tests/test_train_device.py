"""Choices that depend on a run's device: layout, kernel of attention, and advice when memory runs out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_cache.errors import DeviceError
from qwen_cache.settings.load import load_config
from qwen_cache.terminal import plural
from qwen_train import train as training
from qwen_train.memory.exhausted import memory_for_training
from qwen_train.model.combinations import with_layout
from qwen_train.model.kernels import SAMPLES_PER_LENGTH
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.training import prepare

from .support.commands import refused
from .support.runs import Trainer


@pytest.mark.parametrize(
    ("setting", "where"),
    [
        (None, (training, "compute_loss")),
        ("expandable_segments:True", (prepare, "wrap")),
        (None, (QwenImageMultiResTransformer2DModel, "from_pretrained")),
    ],
)
def test_running_out_of_memory_says_what_to_do(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, setting: str | None, where: tuple[Any, str]
) -> None:
    """Loading, moving and training, with torch's own figures; batches of many sizes leave fragments, unless the
    allocator is told to reuse them."""
    reason = "CUDA out of memory. Tried to allocate 2.00 GiB."

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError(reason)

    monkeypatch.setattr(*where, out_of_memory)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting) if setting else monkeypatch.delenv("PYTORCH_ALLOC_CONF", False)
    result = train.try_()
    refused(result, "cpu has too little memory for this run", reason, "qwen-train plan", "--resume")
    with pytest.raises(DeviceError) as error, memory_for_training(torch.device("cuda", 0)):
        out_of_memory()
    assert ("PYTORCH_ALLOC_CONF=expandable_segments:True" in str(error.value)) == (setting is None)


def test_the_layout_follows_from_the_device(train: Trainer) -> None:
    """A saved run names what it used, so that it continues like that anywhere."""
    chosen = {kind: with_layout(train.config(), torch.device(kind)).train.layout for kind in ("cpu", "cuda", "mps")}
    assert chosen == {"cpu": "padded", "cuda": "packed", "mps": "packed"}
    given = train.config(train__layout="padded")
    assert with_layout(given, torch.device("cuda")) == given
    out = train(train__max_steps=1)
    assert load_config(out / "qwen.yaml").train.layout == "padded"
    assert with_layout(train.config(), torch.device("cuda"), out).train.layout == "padded", (
        "a run continues as it began"
    )


def test_a_kernel_that_the_device_lacks_is_refused_before_loading(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "load_transformer", lambda *_, **__: pytest.fail("loaded"))
    result = train.try_(train__attention="cudnn", train__layout="packed")
    parts = "train.attention=cudnn cannot run", "compute capability 8.0 or newer", "found no CUDA GPU"
    refused(result, *parts, "set train.attention=auto")


def test_the_kernel_is_chosen_at_every_start_and_said_once(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which pretends to be an H100 until it computes. It is no part of a checkpoint."""
    monkeypatch.setattr(prepare, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(prepare, "checked", lambda choice, *_: choice)
    settings = {"train__layout": "packed", "train__mixed_precision": "bf16", "train__caption_dropout": 0.0}
    samples = train.batches().plan.tokens
    lengths = len(set(samples.sum(0).tolist()))
    steps, enough = 1, SAMPLES_PER_LENGTH * lengths
    few = train.try_(train__max_steps=steps, **settings)
    why = f"{plural(steps, 'sample')} of {plural(lengths, 'length')} are too few for cuDNN, which prepares each length"
    assert few.stderr.count("attention ") == few.stderr.count(f"attention flash: {why}\n") == 1
    monkeypatch.setattr(training, "take_steps", lambda p, *_: chosen.append(p.run.transformer.attention_kernel))
    chosen: list[str] = []
    many = train.try_("--resume", train__max_steps=enough, **settings)
    assert f"attention cuDNN: {plural(enough, 'sample')} of {plural(lengths, 'length')}\n" in many.stderr
    train.try_("--resume", train__max_steps=enough, train__attention="flash", **settings)
    assert chosen == ["cudnn", "flash"]
    assert load_config(train.folder / "out" / "qwen.yaml").train.attention == "flash"
    padded = train.prepared(out="padded", train__layout="padded", train__mixed_precision="bf16")
    assert padded.run.transformer.attention_kernel == "flash", "scaled_dot_product_attention chooses for itself"
