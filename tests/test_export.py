"""A LoRA in other forms does what it did: the judges are diffusers' own converter, its stock loader and its model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_qwen_lora_to_diffusers
from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.sections import LoraConfig
from qwen_train.inference.pipeline import check_loras, load_loras
from qwen_train.lora.adapter import add_lora, lora_weights, start_from, write_lora
from qwen_train.lora.export import attach, merge
from qwen_train.lora.files import WeightedLora
from qwen_train.lora.names import dotted
from qwen_train.lora.reader import read_lora
from qwen_train.model.loading import stock_class

from .support.commands import run
from .support.judge import TOLERANCE
from .support.outputs import relative_error

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
EVERYWHERE = [*ATTENTION, "add_q_proj", "to_add_out", "img_mlp.net.0.proj", "txt_mlp.net.2", "img_mod.1", "proj_out"]
SETTINGS = {
    "alpha is the rank": {},
    "alpha is not the rank": {"lora_alpha": 10},
    "rank-stabilised": {"lora_alpha": 3, "use_rslora": True},
    "every layer": {"target_modules": EVERYWHERE, "lora_alpha": 3.3},
    "ranks of their own": {"rank_pattern": {"to_q": 2, r"1\.attn\.to_v": 7}, "alpha_pattern": {"to_k": 9}},
}


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def stock(model: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(model / "transformer").eval()


def random_lora(model: Path, folder: Path, **settings: Any) -> tuple[Path, Tensor]:
    """A random LoRA as training writes it, and what the model computes with it."""
    transformer = stock(model)
    torch.manual_seed(1)
    defaults = {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION, "init_lora_weights": False}
    transformer.add_adapter(peft.LoraConfig(**{**defaults, **settings}))
    file = folder / "pytorch_lora_weights.safetensors"
    folder.mkdir(exist_ok=True)
    write_lora(transformer, lora_weights(transformer), file, {})
    return file, output(transformer)


@torch.no_grad()
def output(transformer: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    velocity: Tensor = transformer(
        hidden_states=torch.randn(1, 24, 64, generator=generator).to(transformer.dtype),
        encoder_hidden_states=torch.randn(1, 5, 64, generator=generator).to(transformer.dtype),
        timestep=torch.tensor([0.6]),
        img_shapes=[[(1, 4, 6)]],
        return_dict=False,
    )[0]
    return velocity


def stock_with(file: Path, model: Path) -> QwenImageTransformer2DModel:
    """The stock transformer with the adapter as the stock pipeline loads it."""
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipeline = diffusers.QwenImageEditPlusPipeline(transformer=stock(model), **parts)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    return pipeline.transformer


def export(source: Path, form: str, out: Path, *options: str | Path) -> Path:
    result = run("qwen-train", "export", source, "--to", form, "--out", out, "--json", *options)
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout) == {"format": form, "out": str(out)}
    return out


def assert_same(found: Tensor, expected: Tensor, model: Path) -> None:
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(output(stock(model)), expected) > 0.01, "the LoRA changes nothing"


def test_a_changed_lora_is_refused_wherever_it_is_read(model: Path, tmp_path: Path) -> None:
    """In each form that this project writes; diffusers' loader, which ignores the checksum, takes them all."""
    file, _ = random_lora(model, tmp_path / "run")
    forms = {form: export(file, form, tmp_path / form / "style.safetensors") for form in ("diffusers", "comfyui")}
    transformer = stock(model)
    add_lora(transformer, LoraConfig(rank=4, target_modules=ATTENTION))
    for path in (file, *forms.values()):
        stock_with(path, model)
        path.write_bytes(path.read_bytes()[:-2] + b"\1\1")
        message = f"{path}: this file was changed after it was written (expected xxh3-128 "
        result = run("qwen-train", "export", path, "--to", "diffusers", "--out", tmp_path / "again.safetensors")
        assert result.code == 2
        assert message in result.stderr
        assert "delete qwen_cache.xxh3_128 from its metadata" in result.stderr
        for read in (
            lambda path: start_from(transformer, path),
            lambda path: check_loras(open_model(str(model), ("transformer",)), [WeightedLora(path)], False, "none"),
        ):
            with pytest.raises(TrainError, match=re.escape(message)):
                read(path)
        stock_with(path, model)


# ---- ComfyUI ---------------------------------------------------------------------------------------------------------


def test_comfyui_names_are_those_of_the_model_and_convert_back_to_the_same_bits(model: Path, tmp_path: Path) -> None:
    file, _ = random_lora(model, tmp_path / "run", target_modules=EVERYWHERE)
    tensors = load_file(export(file, "comfyui", tmp_path / "comfyui.safetensors"))
    layers = {f"diffusion_model.{name}" for name, _ in stock(model).named_modules()}
    for name, tensor in tensors.items():
        module, kind = name.removesuffix(".weight").rsplit(".", 1)
        assert module in layers
        assert (kind, tensor.ndim) in {("lora_down", 2), ("lora_up", 2), ("alpha", 0)}
    back = _convert_non_diffusers_qwen_lora_to_diffusers(tensors)
    original = load_file(file)
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_the_stock_loader_takes_the_comfyui_file(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    file, expected = random_lora(model, tmp_path / "run", **settings)
    converted = export(tmp_path / "run", "comfyui", tmp_path / "comfyui" / "style.safetensors")
    assert_same(output(stock_with(converted, model)), expected, model)
    assert_same(output(stock_with(file, model)), expected, model)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_to_comfyui_and_back_is_the_same_file(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """To the byte: weights, rank, alpha and whether it is rank-stabilised."""
    file, _ = random_lora(model, tmp_path / "run", **settings)
    converted = export(file, "comfyui", tmp_path / "comfyui.safetensors")
    assert export(converted, "diffusers", tmp_path / "back.safetensors").read_bytes() == file.read_bytes()


def test_rank_and_alpha_stand_in_the_header_as_tools_read_them(model: Path, tmp_path: Path) -> None:
    file, _ = random_lora(model, tmp_path / "run", lora_alpha=10, use_rslora=True)
    with safe_open(export(file, "comfyui", tmp_path / "comfyui.safetensors"), framework="pt") as opened:
        header = opened.metadata()
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "10")
    assert json.loads(header["peft_config"])["use_rslora"] is True


@pytest.mark.parametrize("named", ["lora_down", "lora_A"])
@pytest.mark.parametrize("with_alpha", [True, False])
def test_what_other_trainers_wrote_for_comfyui(named: str, with_alpha: bool, model: Path, tmp_path: Path) -> None:
    """No settings in the header, ranks that differ, alphas or none."""
    generator = torch.Generator().manual_seed(0)
    up = {"lora_down": "lora_up", "lora_A": "lora_B"}[named]
    tensors = {}
    for module, rank, alpha in (("0.attn.to_q", 4, 2.0), ("1.attn.to_k", 3, 6.0), ("1.attn.to_v", 4, 4.0)):
        name = f"diffusion_model.transformer_blocks.{module}"
        tensors[f"{name}.{named}.weight"] = torch.randn(rank, 64, generator=generator)
        tensors[f"{name}.{up}.weight"] = torch.randn(64, rank, generator=generator)
        tensors |= {f"{name}.alpha": torch.tensor(alpha)} if with_alpha else {}
    save_file(tensors, tmp_path / "theirs.safetensors")
    expected = output(stock_with(tmp_path / "theirs.safetensors", model))
    converted = export(tmp_path / "theirs.safetensors", "diffusers", tmp_path / "ours.safetensors")
    assert_same(output(stock_with(converted, model)), expected, model)


# ---- names of other trainers -----------------------------------------------------------------------------------------

OTHERS = {
    "musubi-tuner": ("lora_unet_", "_", "lora_down", "lora_up"),
    "peft": ("base_model.model.", ".", "lora_A", "lora_B"),
    "DiffSynth-Studio": ("", ".", "lora_A.default", "lora_B.default"),
    "SimpleTuner": ("lycoris_", "_", "lora_down", "lora_up"),
    "ai-toolkit": ("diffusion_model.", ".", "lora_A", "lora_B"),
    "ComfyUI": ("diffusion_model.", ".", "lora_down", "lora_up"),
    "peft inside of a program": ("base_model.model.", ".", "lora_A.default", "lora_B.default"),
}
"""The prefix of a module, its separator, and the names of its matrices."""


def write_as(trainer: str, file: Path, folder: Path, alpha: int) -> Path:
    """The LoRA of `file` as this trainer writes it, with its alpha among the tensors, or in peft's settings."""
    prefix, dot, down, up = OTHERS[trainer]
    tensors, folder = {}, folder / trainer
    folder.mkdir()
    for name, tensor in load_file(file).items():
        module, _, side = name.removeprefix("transformer.").partition(".lora_")
        module = prefix + module.replace(".", dot)
        tensors[f"{module}.{down if side.startswith('A') else up}.weight"] = tensor
        if "peft" not in trainer:
            tensors[f"{module}.alpha"] = torch.tensor(alpha)  # a whole number
    if "peft" in trainer:
        settings = {"peft_type": "LORA", "r": 4, "lora_alpha": alpha, "target_modules": ATTENTION, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder / "adapter_model.safetensors"


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("trainer", OTHERS)
def test_every_reader_knows_the_names_of_other_trainers(trainer: str, model: Path, tmp_path: Path) -> None:
    """export, predict and train.lora.weights; a run with another scale says both."""
    file, expected = random_lora(model, tmp_path / "run", lora_alpha=10)
    theirs = write_as(trainer, file, tmp_path, alpha=10)
    assert_same(output(stock_with(export(theirs, "diffusers", tmp_path / "ours.safetensors"), model)), expected, model)
    assert_same(output(predicted(theirs, model)), expected, model)
    assert torch.equal(output(started(theirs, model, lora_alpha=10)), expected)
    message = r"to_k: the LoRA has another lora_alpha \(expected 5.0, found 10.0\)\n  → use the train.lora"
    with pytest.raises(TrainError, match=message):
        started(theirs, model, lora_alpha=5)


def predicted(file: Path, model: Path) -> Any:
    """The transformer with the adapter as `predict` loads it."""
    check_loras(open_model(str(model), ("transformer",)), [WeightedLora(file)], False, "none")
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    pipeline = diffusers.QwenImageEditPlusPipeline(transformer=stock(model), **parts)
    load_loras(pipeline, [WeightedLora(file)])
    return pipeline.transformer


def started(file: Path, model: Path, **settings: Any) -> Any:
    """The transformer of a run that starts from the file."""
    transformer = stock(model)
    add_lora(transformer, LoraConfig(rank=4, target_modules=ATTENTION, **settings))
    start_from(transformer, file)
    return transformer


def test_without_an_alpha_the_rank_is_the_alpha(model: Path, tmp_path: Path) -> None:
    """To every reader; a run with another alpha or rank-stabilised one would begin with another update."""
    file, expected = random_lora(model, tmp_path / "run")
    bare = tmp_path / "bare.safetensors"
    save_file(load_file(file), bare)
    assert read_lora(bare).settings["lora_alpha"] == 4
    assert torch.equal(output(started(bare, model)), expected)
    assert relative_error(output(predicted(bare, model)), expected) < TOLERANCE
    for settings, found in (
        (
            {"lora_alpha": 8},
            r"another lora_alpha \(expected 8.0, found 4.0\)\n.*without an alpha has its rank as alpha",
        ),
        ({"use_rslora": True}, r"another use_rslora \(expected True, found False\)"),
    ):
        with pytest.raises(TrainError, match=found):
            started(bare, model, **settings)


def test_names_that_no_reader_knows_are_refused_by_all(model: Path, tmp_path: Path) -> None:
    layer = "transformer_blocks.0.attn.to_q.lora_"
    pair = {f"transformer.{layer}{side}.weight": torch.ones(shape) for side, shape in (("A", (2, 64)), ("B", (64, 2)))}
    cases = [
        (
            {**pair, "lora_te_layers_0_mlp_fc1.alpha": torch.ones(())},
            "text encoder, too",
            "lora_te_layers_0_mlp_fc1.alpha",
        ),
        (
            {**pair, f"transformer.{layer}B.bias": torch.ones(64)},
            "not a LoRA of a Qwen-Image transformer",
            f"{layer}B.bias",
        ),
        ({**pair, f"{layer}A.weight": torch.ones(2, 64)}, "have the same place", f"found {layer}A.weight"),
        (
            {name.replace("transformer.", "base_model.model."): tensor for name, tensor in pair.items()},
            "has its alpha in adapter_config.json, and there is none beside it",
            "put the adapter_config.json that was written with it into its folder",
        ),
    ]
    file = tmp_path / "theirs.safetensors"
    for tensors, message, found in cases:
        save_file(tensors, file)
        for read in (read_lora, lambda file: predicted(file, model), lambda file: started(file, model)):
            with pytest.raises(TrainError) as error:
                read(file)
            assert message in str(error.value)
            assert found in str(error.value)
    (tmp_path / "adapter_config.json").write_text("[" * 200 + "]" * 200, encoding="utf-8")
    with pytest.raises(TrainError, match=r"adapter_config.json: these are not peft's settings: it is nested more than"):
        read_lora(file)
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(TrainError, match=r"lack one without which the scale is unknown \(expected r\)"):
        read_lora(file)


# ---- merged ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("settings", [*SETTINGS.values(), {"use_dora": True}], ids=[*SETTINGS, "DoRA"])
def test_merged_weights_compute_what_the_model_computes_with_the_lora(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    file, expected = random_lora(model, tmp_path / "run", **settings)
    out = export(file, "merged", tmp_path / "merged", "--model", model)
    merged = QwenImageTransformer2DModel.from_pretrained(out)
    assert_same(output(merged), expected, model)
    config = json.loads((out / "config.json").read_text())
    assert config["_class_name"] == "QwenImageTransformer2DModel"
    base, touched = stock(model).state_dict(), {name.rsplit(".lora_", 1)[0] for name in load_file(file)}
    assert merged.state_dict().keys() == base.keys(), "an adapter is left"
    for name, tensor in merged.state_dict().items():
        assert torch.equal(tensor, base[name]) != (f"transformer.{name.removesuffix('.weight')}" in touched), name


def test_merged_in_the_precision_of_the_model(model: Path, tmp_path: Path) -> None:
    """bfloat16 stays bfloat16, and each weight is the rounded sum."""
    file, _ = random_lora(model, tmp_path / "run")
    half = tmp_path / "half"
    stock(model).bfloat16().save_pretrained(half / "transformer")
    (half / "model_index.json").write_bytes((model / "model_index.json").read_bytes())
    out = export(file, "merged", tmp_path / "merged", "--model", half)
    name, weights = "transformer_blocks.1.attn.to_k", load_file(file)
    up, down = (weights[f"transformer.{name}.lora_{side}.weight"] for side in "BA")
    merged = load_file(out / "diffusion_pytorch_model.safetensors")
    base = load_file(half / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert torch.equal(merged[f"{name}.weight"], (base[f"{name}.weight"] + up @ down).bfloat16())


def test_merged_is_written_in_shards(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained = QwenImageTransformer2DModel.save_pretrained
    monkeypatch.setattr(
        QwenImageTransformer2DModel, "save_pretrained", lambda *a: save_pretrained(*a, max_shard_size="500KB")
    )
    file, expected = random_lora(model, tmp_path / "run")
    out = export(file, "merged", tmp_path / "merged", "--model", model)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert relative_error(output(QwenImageTransformer2DModel.from_pretrained(out)), expected) < TOLERANCE


def test_the_model_of_a_run_is_that_of_its_settings(model: Path, tmp_path: Path) -> None:
    """From the folder of the run, and from one of its checkpoints."""
    _, expected = random_lora(model, tmp_path / "run")
    random_lora(model, tmp_path / "run" / "checkpoint-1")
    (tmp_path / "run" / "qwen.yaml").write_text(f"model:\n  path: {model}\n")
    for source in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        out = export(source, "merged", tmp_path / f"merged-{source.name}")
        assert relative_error(output(QwenImageTransformer2DModel.from_pretrained(out)), expected) < TOLERANCE


# ---- Qwen-Image-2.1 --------------------------------------------------------------------------------------------------

MLP_21 = ["img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"]
OUTSIDE_21 = ["modulation.1", "txt_in.in_layer", "txt_in.out_layer", "img_in", "norm_out.linear", "proj_out"]
SETTINGS_21 = {
    "attention": {},
    "one half of the fused layer": {"target_modules": ["to_q", "img_mlp.proj"], "lora_alpha": 10},
    "every layer": {"target_modules": [*ATTENTION, *MLP_21, *OUTSIDE_21], "lora_alpha": 3, "use_rslora": True},
    "ranks of their own": {"target_modules": MLP_21, "rank_pattern": {"proj": 2}, "alpha_pattern": {"gate_layer": 9}},
}
AS_21 = pytest.mark.parametrize("settings", SETTINGS_21.values(), ids=SETTINGS_21)


@pytest.fixture(scope="module")
def base_21(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The transformer's folder of a tiny Qwen-Image-2.1."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "context_in_dim": 48}
    transformer = QwenImage21Transformer2DModel(in_channels=16, out_channels=16, axes_dims_rope=(4, 14, 14), **sizes)
    folder = tmp_path_factory.mktemp("qwen-image-21") / "transformer"
    transformer.save_pretrained(folder)
    return folder


def stock_21(base: Path) -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel.from_pretrained(base).eval()


def random_lora_21(base: Path, folder: Path, **settings: Any) -> tuple[Path, Tensor]:
    transformer = stock_21(base)
    torch.manual_seed(1)
    defaults = {"r": 4, "lora_alpha": 4, "target_modules": ATTENTION, "init_lora_weights": False}
    transformer.add_adapter(peft.LoraConfig(**{**defaults, **settings}))
    folder.mkdir(exist_ok=True)
    write_lora(transformer, lora_weights(transformer), folder / "pytorch_lora_weights.safetensors", {})
    return folder / "pytorch_lora_weights.safetensors", output_21(transformer)


@torch.no_grad()
def output_21(transformer: Any) -> Tensor:
    """The output of a transformer for a prompt with one condition image, which stands at the third text row."""
    generator = torch.Generator().manual_seed(0)
    slots = torch.zeros(1, 5 + 6, dtype=torch.bool)
    slots[0, [2, *range(5, 11)]] = True
    velocity: Tensor = transformer(
        hidden_states=torch.randn(1, 4 + 24, 16, generator=generator),
        encoder_hidden_states=torch.randn(1, 5, 48, generator=generator),
        timestep=torch.tensor([0.6]),
        img_shapes=[[(1, 2, 2), (1, 4, 6)]],
        img_mask=slots,
        return_dict=False,
    )[0]
    return velocity


def loaded_by_diffusers_21(file: Path, base: Path) -> Tensor:
    """The output of the stock transformer with the adapter as the stock pipeline loads it."""
    transformer = stock_21(base)
    options = {"weight_name": file.name, "return_lora_metadata": True}
    state, metadata = QwenImage21Pipeline.lora_state_dict(str(file.parent), **options)
    QwenImage21Pipeline.load_lora_into_transformer(state, transformer, metadata=metadata)
    return output_21(transformer)


def loaded_by_comfyui_21(file: Path, base: Path, *, fused: bool) -> Tensor:
    """The output of the model with the LoRA added as ComfyUI's loader does, by the facts that `names.py` cites.

    It looks up every name that it knows, and leaves out tensors with other names; here those are an error.
    """
    weights = stock_21(base).state_dict()
    if fused:
        for name in [name for name in weights if name.endswith("gate_layer.weight")]:
            pair = (weights.pop(name), weights.pop(name.replace("gate_layer", "proj")))
            weights[name.replace("gate_layer", "gate_up")] = torch.cat(pair)
    places: dict[str, tuple[str, slice]] = {}
    for name in weights:
        module = name.removesuffix(".weight")
        places[f"diffusion_model.{module}"] = (name, slice(None))
        half = len(weights[name]) // 2
        targets = {module: slice(None)}
        if module.endswith("gate_up"):
            targets = {module.replace("gate_up", "gate_layer"): slice(0, half)}
            targets[module.replace("gate_up", "proj")] = slice(half, None)
        places |= {f"{prefix}{each}": (name, rows) for each, rows in targets.items() for prefix in ("", "transformer.")}
    tensors = load_file(file)
    for place, (name, rows) in places.items():
        if f"{place}.lora_up.weight" in tensors:
            up, down = tensors.pop(f"{place}.lora_up.weight"), tensors.pop(f"{place}.lora_down.weight")
            weights[name][rows] += tensors.pop(f"{place}.alpha") / len(down) * up @ down
    assert not tensors, "ComfyUI leaves these out"
    transformer = stock_21(base)
    transformer.load_state_dict(convert_qwen_image21_transformer_checkpoint_to_diffusers(weights))
    return output_21(transformer)


@AS_21
def test_21_loads_in_diffusers_and_in_comfyui_and_comes_back_to_the_byte(
    settings: dict[str, Any], base_21: Path, tmp_path: Path
) -> None:
    file, expected = random_lora_21(base_21, tmp_path / "run", **settings)
    assert relative_error(output_21(stock_21(base_21)), expected) > 0.01, "the LoRA changes nothing"
    converted = export(file, "comfyui", tmp_path / "comfyui.safetensors")
    for found in (
        loaded_by_diffusers_21(file, base_21),
        loaded_by_diffusers_21(converted, base_21),
        loaded_by_comfyui_21(converted, base_21, fused=True),
        loaded_by_comfyui_21(converted, base_21, fused=False),
    ):
        assert relative_error(found, expected) < TOLERANCE
    assert export(converted, "diffusers", tmp_path / "back.safetensors").read_bytes() == file.read_bytes()
    check_loras(folder_21(base_21), [WeightedLora(file), WeightedLora(converted)], False, "none")


def test_21_has_a_prefix_only_where_comfyui_finds_it(base_21: Path, tmp_path: Path) -> None:
    for modules, prefix in ((ATTENTION, "diffusion_model."), ([*ATTENTION, *MLP_21], "")):
        file, _ = random_lora_21(base_21, tmp_path / "run", target_modules=modules)
        tensors = load_file(export(file, "comfyui", tmp_path / "comfyui.safetensors"))
        assert all(name.startswith(f"{prefix}transformer_blocks.") for name in tensors)


@AS_21
def test_21_merged_weights_compute_what_the_model_computes_with_the_lora(
    settings: dict[str, Any], base_21: Path, tmp_path: Path
) -> None:
    file, expected = random_lora_21(base_21, tmp_path / "run", **settings)
    out = merge(read_lora(file), tmp_path / "merged", folder_21(base_21))
    assert relative_error(output_21(stock_21(out)), expected) < TOLERANCE
    assert json.loads((out / "config.json").read_text())["_class_name"] == "QwenImage21Transformer2DModel"


def test_21_of_ai_toolkit_has_the_fused_layer(base_21: Path, tmp_path: Path) -> None:
    """Read as the two layers of diffusers; its expected effect is that on the fused weights, the gate first."""
    generator = torch.Generator().manual_seed(0)
    name, weights = "transformer_blocks.1.img_mlp", stock_21(base_21)
    hidden = weights.transformer_blocks[1].img_mlp.proj.out_features
    down, up = torch.randn(3, 64, generator=generator), torch.randn(2 * hidden, 3, generator=generator)
    tensors = {f"diffusion_model.{name}.gate_up.lora_{side}.weight": each for side, each in (("A", down), ("B", up))}
    save_file(tensors, tmp_path / "theirs.safetensors")
    with torch.no_grad():
        for layer, rows in (("gate_layer", slice(0, hidden)), ("proj", slice(hidden, None))):
            weights.get_submodule(f"{name}.{layer}").weight += up[rows] @ down
    expected = output_21(weights)
    for form in ("diffusers", "comfyui"):
        (tmp_path / form).mkdir()
        converted = export(tmp_path / "theirs.safetensors", form, tmp_path / form / "ours.safetensors")
        assert relative_error(loaded_by_diffusers_21(converted, base_21), expected) < TOLERANCE
    assert relative_error(predicted_21(tmp_path / "theirs.safetensors", base_21), expected) < TOLERANCE
    save_file(
        {name: each[:-1] if "B" in name else each for name, each in tensors.items()}, tmp_path / "odd.safetensors"
    )
    with pytest.raises(TrainError, match=r"gate_up.lora_B.weight: a fused layer has 2 halves of equal height \(found"):
        read_lora(tmp_path / "odd.safetensors")


def test_names_of_musubi_tuner_get_the_dots_of_their_modules(model: Path, base_21: Path, tmp_path: Path) -> None:
    for transformer in (stock(model), stock_21(base_21)):
        layers = [name for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)]
        flat = [f"lora_unet_{name.replace('.', '_')}.lora_down.weight" for name in layers]
        assert list(map(dotted, flat)) == [f"{name}.lora_down.weight" for name in layers]
    file, expected = random_lora_21(base_21, tmp_path / "run", target_modules=MLP_21, lora_alpha=7)
    theirs = {
        f"lora_unet_{module.replace('.', '_')}.{rest}": tensor
        for name, tensor in load_file(export(file, "comfyui", tmp_path / "comfyui.safetensors")).items()
        for module, _, rest in [name.partition(".alpha") if name.endswith(".alpha") else name.partition(".lora_")]
        for rest in ["alpha" if name.endswith(".alpha") else f"lora_{rest}"]
    }
    save_file(theirs, tmp_path / "theirs.safetensors")
    (tmp_path / "ours").mkdir()
    converted = export(tmp_path / "theirs.safetensors", "diffusers", tmp_path / "ours" / "ours.safetensors")
    assert relative_error(loaded_by_diffusers_21(converted, base_21), expected) < TOLERANCE
    assert relative_error(predicted_21(tmp_path / "theirs.safetensors", base_21), expected) < TOLERANCE


def predicted_21(file: Path, base: Path) -> Tensor:
    """The output of the transformer with the adapter as `predict` reads it."""
    check_loras(folder_21(base), [WeightedLora(file)], False, "none")
    transformer = stock_21(base)
    attach(read_lora(file), transformer, "default")
    return output_21(transformer)


def folder_21(base: Path) -> ModelFolder:
    return ModelFolder("tiny", base.parent, "QwenImage21Pipeline")  # type: ignore[arg-type]


def test_a_lora_of_the_other_model_is_refused(model: Path, base_21: Path, tmp_path: Path) -> None:
    file, _ = random_lora(model, tmp_path / "20b", target_modules=["to_q", "img_mlp.net.2"])
    with pytest.raises(TrainError, match=r"img_mlp.net.2: the LoRA does not fit this model"):
        check_loras(folder_21(base_21), [WeightedLora(file)], False, "none")
    with pytest.raises(TrainError, match="the LoRA does not fit this model"):
        merge(read_lora(file), tmp_path / "merged", folder_21(base_21))
    file, _ = random_lora_21(base_21, tmp_path / "21", target_modules=["img_mlp.out"])
    with pytest.raises(TrainError, match="no such layer"):
        check_loras(ModelFolder("tiny", model, "QwenImageEditPlusPipeline"), [WeightedLora(file)], False, "none")


def test_another_transformer_is_refused_with_those_that_are_supported(base_21: Path, tmp_path: Path) -> None:
    assert stock_class(base_21) is QwenImage21Transformer2DModel
    config = tmp_path / "config.json"
    expected = r"expected QwenImageTransformer2DModel or QwenImage21Transformer2DModel, found FluxTransformer2DModel"
    for text, message in (('{"_class_name": "FluxTransformer2DModel"}', expected), ("[", "cannot be read")):
        config.write_text(text)
        with pytest.raises(ModelError, match=message):
            stock_class(tmp_path)


# ---- refused ---------------------------------------------------------------------------------------------------------


def refused(*arguments: str | Path) -> str:
    result = run("qwen-train", "export", *arguments)
    assert result.code == 2
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_what_is_no_lora_is_refused(model: Path, tmp_path: Path) -> None:
    out = ("--to", "comfyui", "--out", tmp_path / "out.safetensors")
    assert "no LoRA here (expected pytorch_lora_weights.safetensors" in refused(tmp_path, *out)
    for module in ("transformer_blocks.0.attn.to_z", "transformer_blocks.60.attn.to_q", "transformer_blocks.0.norm"):
        pair = {f"{module}.lora_A.weight": torch.ones(2, 64), f"{module}.lora_B.weight": torch.ones(64, 2)}
        save_file(pair, tmp_path / "unknown.safetensors")
        for form in ("diffusers", "comfyui", "peft"):
            name = "unknown-peft" if form == "peft" else "out.safetensors"
            message = refused(tmp_path / "unknown.safetensors", "--to", form, "--out", tmp_path / name)
            assert f"{module}: no linear layer of a Qwen-Image transformer has this name (expected" in message
            assert not (tmp_path / name).exists()
    (tmp_path / "full" / "transformer").mkdir(parents=True)
    message = refused(tmp_path / "full", *out)
    assert f"this run trained all weights → they are in {tmp_path}/full/transformer" in message
    file = tmp_path / "text.safetensors"
    file.write_text("not a safetensors file")
    assert f"{file}: this is not a LoRA file" in refused(file, *out)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    assert "not a LoRA of a Qwen-Image transformer" in refused(weights, *out)
    save_file({"transformer.proj_out.lora_A.weight": torch.zeros(2, 64)}, tmp_path / "half.safetensors")
    message = refused(tmp_path / "half.safetensors", *out)
    assert "proj_out.lora_A.weight: a matrix has no partner of its rank (found none)" in message
    assert not (tmp_path / "out.safetensors").exists()


def test_wrong_options_are_refused(model: Path, tmp_path: Path) -> None:
    file, _ = random_lora(model, tmp_path / "run")
    message = refused(file, "--to", "kohya", "--out", tmp_path / "x.safetensors")
    assert "--to: not a valid value (expected diffusers, comfyui, peft, merged, found kohya)" in message
    assert "a LoRA is one file (expected a name that ends in .safetensors" in refused(
        file, "--to", "comfyui", "--out", tmp_path / "folder"
    )
    assert "no model is named" in refused(file, "--to", "merged", "--out", tmp_path / "merged")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep me")
    message = refused(file, "--to", "merged", "--out", tmp_path / "full", "--model", model)
    assert "merged weights go into a new folder" in message
    assert (tmp_path / "full" / "mine.txt").read_text() == "keep me"


def test_dora_has_no_comfyui_form(model: Path, tmp_path: Path) -> None:
    file, _ = random_lora(model, tmp_path / "run", use_dora=True)
    message = refused(file, "--to", "comfyui", "--out", tmp_path / "x.safetensors")
    assert "lora_magnitude_vector: ComfyUI has no counterpart of this tensor → export it with --to merged" in message


def test_a_lora_of_another_model_and_a_quantised_one_are_refused(model: Path, tmp_path: Path) -> None:
    options = ("--to", "merged", "--out", tmp_path / "merged", "--model", model)
    tensors = {"transformer.proj_out.lora_A.weight": torch.zeros(2, 99)}
    save_file(tensors | {"transformer.proj_out.lora_B.weight": torch.zeros(64, 2)}, tmp_path / "other.safetensors")
    message = refused(tmp_path / "other.safetensors", *options)
    assert "the LoRA does not fit this model (expected a layer of 99 inputs and 64 outputs, found weights (" in message
    file, _ = random_lora(model, tmp_path / "run")
    quantised = tmp_path / "quantised"
    stock(model).save_pretrained(quantised / "transformer")
    (quantised / "model_index.json").write_bytes((model / "model_index.json").read_bytes())
    config = quantised / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {}}))
    message = refused(file, "--to", "merged", "--out", tmp_path / "merged", "--model", quantised)
    assert "these weights are quantised" in message
    weights = load_file(file)
    save_file({name: 1e30 * tensor for name, tensor in weights.items()}, tmp_path / "broken.safetensors")
    assert "the LoRA cannot be merged" in refused(tmp_path / "broken.safetensors", *options)
    assert not (tmp_path / "merged").exists()
