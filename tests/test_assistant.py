"""The assistant LoRA: what is trained is base + assistant + ours, and what is written is ours alone.

The judge is the stock transformer with both files, loaded by diffusers' own loader, on one sample at a time in float32.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from huggingface_hub import DryRunFileInfo
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache.errors import ConfigError
from qwen_cache.models import assistants
from qwen_cache.models.assistants import PUBLISHED, VERIFIED, Assistant, Verified
from qwen_cache.models.family import PIPELINES
from qwen_cache.settings.load import load_config
from qwen_cache.terminal import human_bytes
from qwen_train import train as training
from qwen_train.data.batches import Batch
from qwen_train.lora.adapter import ASSISTANT, TRAINED, lora_weights, tuned_layers, without
from qwen_train.lora.files import WeightedLora, find_assistant, origin_of, with_assistant
from qwen_train.lora.reader import read_lora
from qwen_train.memory.prediction import block_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.training.checkpoint import save_checkpoint, save_result
from qwen_train.training.loss import predict_velocity

from .support.commands import run
from .support.marks import slow
from .support.outputs import relative_error as tensor_error
from .support.runs import IMAGES, LORA, SMALL, Trainer, column, differences, relative_error, run_training, written

LAYER = "transformer_blocks.{}.{}"
ATTENTION = ("attn.to_q", "attn.to_out.0")
RANK, ALPHA, WEIGHT = 3, 2.0, 0.7
EXACT = 1e-5
"""Tolerance in float32: two orders of the same sums."""


def assistant_file(
    train: Trainer, name: str = "assistant.safetensors", modules: Any = ATTENTION, seed: int = 1
) -> Path:
    """A LoRA of every block with ComfyUI's names and an alpha, as large as the weights it is added to."""
    kind = {"QwenImage21Transformer2DModel": QwenImage21Transformer2DModel}
    folder, generator = train.model / "transformer", torch.Generator().manual_seed(seed)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        shapes = dict(
            kind.get(config["_class_name"], QwenImageTransformer2DModel).from_config(config).named_parameters()
        )
    tensors = {}
    for module in (LAYER.format(i, each) for i in range(config["num_layers"]) for each in modules):
        outputs, inputs = shapes[f"{module}.weight"].shape
        tensors[f"diffusion_model.{module}.lora_down.weight"] = torch.randn(RANK, inputs, generator=generator) / 4
        tensors[f"diffusion_model.{module}.lora_up.weight"] = torch.randn(outputs, RANK, generator=generator) / 4
        tensors[f"diffusion_model.{module}.alpha"] = torch.tensor(ALPHA)
    save_file(tensors, train.folder / name)
    return train.folder / name


def randomise(p: training.Prepared) -> None:
    """Give our LoRA an update: its B is zero at first."""
    torch.manual_seed(2)
    for tensor in lora_weights(p.run.transformer).values():
        tensor.data.copy_(torch.randn_like(tensor) / 8)


def stock_with(train: Trainer, files: dict[str, Path], weights: list[float]) -> Any:
    """The stock transformer with these LoRAs, ours with gradients."""
    stock = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer")
    for name, file in files.items():
        lora = read_lora(file)
        metadata = {f"transformer.{key}": value for key, value in lora.settings.items()}
        prefixed = {f"transformer.{key}": value for key, value in lora.weights.items()}
        stock.load_lora_adapter(prefixed, prefix="transformer", metadata=metadata, adapter_name=name)
    if files:
        stock.set_adapters(list(files), weights)
    return stock


def velocity(model: Any, batch: Batch) -> Tensor:
    """The velocity of a batch of one sample."""
    noisy = batch.clean + 0.3 * batch.noise
    output: Tensor = model(
        hidden_states=noisy,
        encoder_hidden_states=batch.prompt_embeds,
        timestep=batch.sigma,
        img_shapes=[list(shapes) for shapes in batch.img_shapes],
        return_dict=False,
    )[0]
    return output


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
@pytest.mark.parametrize("use_dora", [False, slow(True)], ids=["lora", "dora"])
def test_a_run_trains_base_assistant_and_ours_and_its_file_is_ours(train: Trainer, use_dora: bool) -> None:
    """Outputs and gradients; what is written, loaded with the assistant by the stock loader, is what was trained."""
    file = assistant_file(train)
    settings = {**SMALL, "train.assistant_lora": f"{file}:{WEIGHT}", "train.lora.use_dora": use_dora}
    settings |= {"train.lora.target_modules": ["to_q", "to_k"], "train.ema_decay": 0.5}
    p = train.prepared(settings=settings)
    randomise(p)
    batch = p.batches.batch(0)
    ours, folder = p.run.transformer, train.folder / "out"
    save_checkpoint(folder, p.run, 0)
    save_result(folder, p.run, torch.float32)
    names = load_file(folder / LORA).keys()
    assert names == {f"transformer.{name}" for name in lora_weights(ours)}
    assert not any(ASSISTANT in name for name in names)
    for other in ("pytorch_lora_weights_ema.safetensors", f"checkpoint-0/{LORA}"):
        assert load_file(folder / other).keys() == names
    # ours first: to peft, a DoRA scales what was added before it
    both = stock_with(train, {"default": folder / LORA, "other": file}, [1.0, WEIGHT])
    found, expected = velocity(ours, batch), velocity(both, batch)
    assert tensor_error(found.detach(), expected.detach()) < EXACT
    found.square().mean().backward()
    expected.square().mean().backward()
    gradients = {name: p.grad for name, p in both.named_parameters() if f".{TRAINED}." in name and p.grad is not None}
    assert relative_error({n: p.grad for n, p in ours.named_parameters() if p.grad is not None}, gradients) < EXACT
    # each is off where it is left out, and on again afterwards
    with torch.no_grad():
        for left_out, files, weights in (
            (ASSISTANT, {"default": folder / LORA}, [1.0]),
            (TRAINED, {"other": file}, [WEIGHT]),
        ):
            with without(ours, left_out):
                assert tensor_error(velocity(ours, batch), velocity(stock_with(train, files, weights), batch)) < EXACT
        assert torch.equal(velocity(ours, batch), found.detach())
        base = velocity(stock_with(train, {}, []), batch)
        assert tensor_error(base, found.detach()) > 0.1, "adapters too small to be seen"
    assert origin_of(folder / LORA)["assistant_lora"].startswith("assistant.safetensors, xxh3-128 ")
    assert origin_of(folder / LORA)["assistant_lora"].endswith(", weight 0.7")


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_resumed_run_has_the_same_assistant_and_goes_on_as_if_never_stopped(train: Trainer) -> None:
    """With offloaded blocks it is the same run, up to rounding: the assistant waits in host memory with them."""
    file, other = assistant_file(train), assistant_file(train, "other.safetensors", seed=2)
    settings = {**SMALL, "train.assistant_lora": str(file), "train.checkpointing_steps": 1, "train.max_steps": 2}
    whole = train(settings=settings, out="whole")
    offloaded = train(settings=settings, out="offloaded", train__offload_blocks=2)
    assert column(offloaded, "loss") == pytest.approx(column(whole, "loss"), rel=1e-5)
    assert column(offloaded, "grad_norm") == pytest.approx(column(whole, "grad_norm"), rel=1e-4)
    begun = train(settings=settings, train__max_steps=1)
    state = json.loads((begun / "checkpoint-1" / "state.json").read_text())
    digest = state["fixed"]["assistant LoRA"].removesuffix(", weight 1")
    refused = {
        f"train.assistant_lora={file}:0.5": f"expected {digest}, weight 1, found {digest}, weight 0.5",
        f"train.assistant_lora={other}": f"expected {digest}, weight 1, found xxh3-128 ",
        "train.assistant_lora=null": f"expected {digest}, weight 1, found none, or without effect",
    }
    for change, message in refused.items():
        result = train.try_("--resume", "--set", change, settings={"train.max_steps": 2})
        assert result.code == 2
        assert "another assistant LoRA, so it cannot be resumed" in result.stderr
        assert message in result.stderr
        assert "run --resume --out" in result.stderr
    kept = file.read_bytes()
    file.write_bytes(other.read_bytes())
    result = train.try_("--resume", settings={"train.max_steps": 2})
    assert (result.code, "restore the assistant LoRA, whose content has changed" in result.stderr) == (2, True)
    file.write_bytes(kept)
    out = train("--resume", settings={"train.max_steps": 2})
    without_times = [written(each) for each in (out, whole)]
    assert {name.split("/")[0] for name in differences(*without_times)} <= {"run.json"}
    assert column(out, "loss") != column(train(settings=SMALL, out="plain", train__max_steps=2), "loss")


@pytest.mark.slow
def test_images_are_those_of_the_result_or_with_the_assistant_and_losses_are_with_it(train: Trainer) -> None:
    settings = {**IMAGES, "validation.validation_steps": 1, "validation.num_images": 1, "train.max_steps": 1}
    settings |= {"train.checkpointing_steps": 9, "validation.images_every_steps": 9}
    file = assistant_file(train)
    plain = train(settings=settings, out="plain")
    off = train(settings=settings, out="off", train__assistant_lora=str(file))
    on = train(settings=settings, out="on", train__assistant_lora=str(file), validation__assistant_lora=True)

    def image(out: Path) -> Tensor:
        (latents,) = (out / "validation" / "step-0").glob("*.safetensors")
        return load_file(latents)["latents"]

    assert torch.equal(image(off), image(plain)), "before the first step our LoRA changes nothing"
    assert tensor_error(image(on), image(plain)) > 0.01
    assert column(on, "validation_loss") == column(off, "validation_loss")
    assert column(off, "validation_loss") != pytest.approx(column(plain, "validation_loss"), rel=1e-4)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_what_cannot_be_an_assistant_is_refused_by_name(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    file, generator = assistant_file(train), torch.Generator().manual_seed(1)
    down, up = torch.randn(2, 64, generator=generator), torch.randn(64, 2, generator=generator)
    layer = "transformer.transformer_blocks.0.attn.to_q"

    def saved(name: str, tensors: dict[str, Tensor]) -> Path:
        save_file(tensors, train.folder / name)
        return train.folder / name

    pair = {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}
    dora = saved("dora.safetensors", pair | {f"{layer}.lora_magnitude_vector": up[:, 0].clone()})
    wide = saved("wide.safetensors", {f"{layer}.lora_A.weight": torch.randn(2, 3072), f"{layer}.lora_B.weight": up})
    far = saved("far.safetensors", {n.replace("blocks.0", "blocks.9"): t for n, t in pair.items()})
    modulation = assistant_file(train, "modulation.safetensors", ("img_mod.1",))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for value, changes, *messages in (
        (train.folder / "none.safetensors", {}, "none.safetensors: train.assistant_lora: no LoRA here"),
        (train.folder, {}, "expected pytorch_lora_weights.safetensors or a .safetensors file"),
        ("someone/lora:0.5", {}, "someone/lora/pytorch_lora_weights.safetensors: train.assistant_lora: no such file"),
        (file, {"train__method": "full"}, "left out of the result, which full training cannot do"),
        (dora, {}, f"{dora}: transformer_blocks.0.attn.to_q.lora_magnitude_vector", "takes a plain LoRA"),
        (wide, {}, "does not fit this model (expected a layer of 3072 inputs and 64 outputs, found 64 inputs and 64"),
        (
            far,
            {},
            "far.safetensors: transformer_blocks.9.attn.to_q: train.assistant_lora does not fit",
            "no such layer",
        ),
        (
            modulation,
            {"train__tabulated_modulation": True, "train__mixed_precision": "bf16"},
            "train.tabulated_modulation has a table of the base alone",
            "found transformer_blocks.0.img_mod.1",
        ),
    ):
        result = train.try_(train__assistant_lora=str(value), **changes)
        assert result.code == 2
        assert all(message in result.stderr for message in messages), result.stderr
    result = train.try_(validation__assistant_lora=True)
    assert (result.code, "about train.assistant_lora, which is not set" in result.stderr) == (2, True)
    assert not (train.folder / "out").exists()


# ---- from the hub, and auto ------------------------------------------------------------------------------------------

COMMIT = "0123456789" * 4


class Hub:
    """A hub that has one file under every name, in place of `hf_hub_download`; older ones at their commits."""

    def __init__(self, file: Path) -> None:
        self.file, self.newest, self.older = file, COMMIT, dict[str, Path]()
        self.asked = list[tuple[str, str, str | None]]()

    def push(self, file: Path) -> None:
        self.older[self.newest] = self.file
        self.file, self.newest = file, self.newest[1:] + self.newest[0]

    def __call__(self, repository: str, name: str, *, revision: str | None, dry_run: bool = False) -> Any:
        file = self.older.get(str(revision), self.file)
        if dry_run:
            commit = str(revision) if file is not self.file else self.newest
            here = {"filename": name, "local_path": str(file), "is_cached": False, "will_download": True}
            return DryRunFileInfo(commit_hash=commit, file_size=file.stat().st_size, **here)
        self.asked.append((repository, name, revision))
        return str(file)


@pytest.fixture
def hub(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub(assistant_file(train))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", found)
    return found


@pytest.fixture
def verified(train: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> Verified:
    """The file of the hub in the table of `auto`, for the model of the runs."""
    digest = hashlib.sha256(hub.file.read_bytes()).hexdigest()
    entry = Verified(Assistant((str(train.model),), "someone/adapter", "a.safetensors", "apache-2.0"), COMMIT, digest)
    monkeypatch.setattr(assistants, "VERIFIED", (entry,))
    return entry


@pytest.mark.parametrize(
    ("value", "repository", "file", "weight"),
    [
        ("someone/qwen-assistant", "someone/qwen-assistant", LORA, 1.0),
        ("someone/v2.1/8-steps/a.safetensors:0.5", "someone/v2.1", "8-steps/a.safetensors", 0.5),
        ("someone/v2.1@v0.1/a.safetensors:2", "someone/v2.1", "a.safetensors", 2.0),
        ("someone/v2.1@v0.1", "someone/v2.1", LORA, 1.0),
    ],
)
def test_from_the_hub(
    hub: Hub, capsys: pytest.CaptureFixture[str], value: str, repository: str, file: str, weight: float
) -> None:
    """At the revision that is named, or the newest, with its commit; a message says what is downloaded before it is."""
    found = find_assistant(load_config(None, [f"train.assistant_lora={value}"]).train)
    assert found == WeightedLora(hub.file, weight, f"{repository}@{COMMIT}/{file}")
    assert hub.asked == [(repository, file, COMMIT)]
    size = human_bytes(hub.file.stat().st_size)
    told = f"downloading the assistant LoRA {repository}/{file} from the hub: {size}, revision {COMMIT}\n"
    assert capsys.readouterr().err == told


def test_auto_is_the_verified_adapter_of_the_model_and_no_other_bytes(
    train: Trainer, verified: Verified, hub: Hub
) -> None:
    """The first line of the run says what is downloaded; what was taken is in its settings and its result."""
    result = train.try_(train__assistant_lora="auto:0.5", train__max_steps=1)
    assert result.code == 0, result.stderr
    assert result.stderr.startswith("downloading the assistant LoRA someone/adapter/a.safetensors from the hub: ")
    out = train.folder / "out"
    assert load_config(out / "qwen.yaml").train.assistant_lora == f"someone/adapter@{COMMIT}/a.safetensors:0.5"
    origin = origin_of(out / LORA)
    assert origin["assistant_lora_from"] == f"someone/adapter@{COMMIT}/a.safetensors"
    assert origin["assistant_lora_sha256"] == verified.sha256
    assert not any(ASSISTANT in name for name in load_file(out / LORA))

    hub.file.write_bytes(assistant_file(train, "other.safetensors", seed=2).read_bytes())
    other = hashlib.sha256(hub.file.read_bytes()).hexdigest()
    for value in ("auto", f"someone/adapter@{COMMIT}/a.safetensors"):
        result = train.try_("--resume", train__assistant_lora=value, train__max_steps=2)
        assert result.code == 2
        assert f"not the file that was verified (expected sha256 {verified.sha256}, found {other})" in result.stderr


def test_a_resumed_run_has_the_commit_that_it_began_with(train: Trainer, hub: Hub) -> None:
    """Whatever is the newest by then; and that one is refused."""
    settings = {"settings": SMALL, "train__assistant_lora": "someone/adapter/a.safetensors:0.5"}
    out = train(**settings, train__max_steps=1)
    hub.push(assistant_file(train, "other.safetensors", seed=2))
    result = train.try_("--resume", **settings, train__max_steps=2)
    assert (result.code, "trained with another assistant LoRA, so it cannot be resumed" in result.stderr) == (2, True)
    command = f"run --resume --out {out} --set train.max_steps=2"
    assert command in result.stderr
    result = run_training(*command.split()[1:])
    assert result.code == 0, result.stderr
    assert f"someone/adapter@{COMMIT}/a.safetensors:0.5: frozen, left out of the result" in result.stderr


def test_plan_counts_the_adapter_that_auto_takes(train: Trainer, verified: Verified, hub: Hub) -> None:
    options = ["--model", train.model, "--json", "--set"]
    with_it, without_it = (
        json.loads(run("qwen-train", "plan", train.cache, *options, f"train.assistant_lora={value}").stdout)["memory"]
        for value in ("auto", "null")
    )
    values = sum(tensor.numel() for tensor in load_file(hub.file).values())
    assert with_it["weights"] - without_it["weights"] == 2 * values, "bfloat16"


def test_auto_without_a_verified_adapter_names_those_that_are_published(
    train: Trainer, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assistants, "VERIFIED", ())
    base = "Qwen/Qwen-Image-2.1"
    with pytest.raises(ConfigError) as error:
        with_assistant(load_config(None, ["train.assistant_lora=auto"], model__path=base))
    message = str(error.value)
    assert f"{base}: train.assistant_lora=auto: no training adapter of this model was verified" in message
    named = re.findall(r"(train\.assistant_lora=\S+) \((licence \S+|without a stated licence)\)", message)
    assert named == [
        ("train.assistant_lora=SimpleTuner/Qwen-Image-2.1-training-assistant-v3", "licence qwen-research"),
        (
            "train.assistant_lora=ShootTheSound/Fizgig-Qwen-Image-2.1-Training-Adapter/"
            "fizgig_qwen_image_2.1_training_adapter.safetensors",
            "without a stated licence",
        ),
    ]
    for assignment, _ in named:  # each can be typed as it is shown
        assert find_assistant(load_config(None, [assignment]).train)
    assert [name for _, name, _ in hub.asked] == [LORA, "fizgig_qwen_image_2.1_training_adapter.safetensors"]
    for unknown in ("Qwen/Qwen-Image-2.1-Turbo", "someone/model", str(train.model)):
        with pytest.raises(ConfigError, match="auto: no training adapter of this model is known"):
            with_assistant(load_config(None, ["train.assistant_lora=auto"], model__path=unknown))
    result = train.try_(train__assistant_lora="auto")
    assert (result.code, f"{train.model}: train.assistant_lora=auto: no training" in result.stderr) == (2, True)
    assert not (train.folder / "out").exists()


def test_auto_without_a_network_says_how_to_get_the_file(
    train: Trainer, verified: Verified, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the hub is huggingface_hub's own again, which is offline in tests
    monkeypatch.setattr(assistants, "VERIFIED", (verified,))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = train.try_(train__assistant_lora="auto")
    assert result.code == 2
    assert (
        f"someone/adapter@{COMMIT}/a.safetensors: train.assistant_lora: no such file here, and the hub cannot be "
        in (result.stderr)
    )
    assert f"with `hf download someone/adapter a.safetensors --revision {COMMIT}`, or name a file" in result.stderr


def test_the_table_of_auto() -> None:
    """Entries have a whole commit and hash, one for each model, and are for models that this project knows."""
    known = {model for pipeline in PIPELINES.values() for model in pipeline.models}
    bases = [base for each in VERIFIED for base in each.assistant.bases]
    assert len(bases) == len(set(bases))
    for each in VERIFIED:
        assert re.fullmatch("[0-9a-f]{40}", each.revision)
        assert re.fullmatch("[0-9a-f]{64}", each.sha256)
        assert each.assistant in PUBLISHED
    for published in PUBLISHED:
        assert set(published.bases) <= known


# ---- with other settings ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_counts_it_in_the_dtype_of_products(train: Trainer) -> None:
    file = assistant_file(train)
    transformer = json.loads((train.model / "transformer" / "config.json").read_text())
    batch, sizes = [SampleSize(((1, 6, 8),), 9)], []
    for assistant in (None, str(file)):
        config = train.config(train__assistant_lora=assistant, settings={"train.offload_blocks": 1})
        sizes.append((predict_memory(transformer, config, batch, "cpu").weights, block_bytes(transformer, config)))
    values = sum(t.numel() for t in load_file(file).values())
    assert sizes[1][0] - sizes[0][0] == 2 * values, "bfloat16"
    assert sizes[1][1] - sizes[0][1] == 2 * values // transformer["num_layers"]


@pytest.mark.parametrize(
    "changes",
    [
        {"model__quantization": "int8"},
        {"train__tabulated_modulation": True, "train__mixed_precision": "bf16"},
        {"train__layout": "packed", "train__batch_size": 3},
    ],
    ids=lambda changes: next(iter(changes)).split("__")[1],
)
@pytest.mark.slow
def test_with_other_settings(train: Trainer, changes: dict[str, Any]) -> None:
    """The assistant acts, and what it adds is what it adds without them."""
    file = assistant_file(train)
    AcceleratorState._reset_state(reset_partial_state=True)
    p = train.prepared(train__assistant_lora=f"{file}:{WEIGHT}", **changes)
    randomise(p)
    batch = p.batches.batch(0).to(torch.device("cpu"), p.dtype)
    with torch.no_grad():
        found = predict_velocity(p.transformer, batch).float()
        with without(p.transformer, ASSISTANT):
            alone = predict_velocity(p.transformer, batch).float()
    AcceleratorState._reset_state(reset_partial_state=True)  # the judge is in float32
    judge = {"train__assistant_lora": f"{file}:{WEIGHT}", "train__batch_size": changes.get("train__batch_size")}
    q = train.prepared(out="judge", **judge)
    randomise(q)
    with torch.no_grad():
        expected = predict_velocity(q.transformer, q.batches.batch(0))
    effect = tensor_error(alone, expected)
    assert effect > 0.1, "an assistant too small to be seen"
    assert tensor_error(found, expected) < (EXACT if "train__layout" in changes else effect / 4)
    assert {
        parameter.requires_grad
        for layer in tuned_layers(p.run.transformer)
        for n, parameter in layer.named_parameters()
        if ASSISTANT in n
    } == {False}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "lokr", "loha", "oft"])
def test_beside_every_type_of_adapter(train: Trainer, kind: str) -> None:
    """Ours keeps its names, and either alone does what it does without the other."""
    file = assistant_file(train)
    settings = {**SMALL, "train.lora.type": kind, "train.lora.target_modules": ["to_q", "to_k"]}
    settings |= {"train.lora.oft_block_size": 16} if kind == "oft" else {}
    p = train.prepared(settings=settings, train__assistant_lora=str(file))
    q = train.prepared(settings=settings, out="alone")
    both, alone = p.run.transformer, q.run.transformer
    assert lora_weights(both).keys() == lora_weights(alone).keys()
    randomise(p)
    randomise(q)
    batch = p.batches.batch(0)
    with torch.no_grad():
        with without(both, TRAINED):
            expected = velocity(stock_with(train, {"other": file}, [1.0]), batch)
            assert tensor_error(velocity(both, batch), expected) < EXACT
        with without(both, ASSISTANT):
            assert tensor_error(velocity(both, batch), velocity(alone, batch)) < EXACT
