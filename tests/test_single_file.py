"""A transformer in a single file means the weights that ComfyUI and llama.cpp's tools wrote, and nothing else is read.

The judges: the stock class with the weights computed from the formats' definitions; `gguf`'s own unpacking, which is
not diffusers'; runs on a folder with the same weights.
"""

from __future__ import annotations

import io
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.errors import ModelError, QwenCacheError
from qwen_cache.models.devices import LiveBytes
from qwen_cache.models.folder import open_model
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.models.single_file import (
    GGML_TYPES,
    UNPACKED_OTHERS,
    UNPACKED_TENSORS,
    SingleFile,
    StoredTensor,
    open_single_file,
)
from qwen_cache.settings.load import load_config
from qwen_train.memory.step import frozen_bytes, on_meta
from qwen_train.model.loading import load_single_file, trained_class
from qwen_train.model.placement import UnpackedLinear, replace_layers
from qwen_train.weights import load_transformer

from .support.commands import refused, run
from .support.full_size import REAL
from .support.marks import slow
from .support.outputs import output
from .support.runs import LORA, Trainer, column
from .support.single_files import INT8, LAYOUTS, gguf_header, gguf_string, weights_of, write_gguf, write_safetensors

Q = "transformer_blocks.0.attn.to_q.weight"
ROUNDING = 1e-4
"""Tolerance of a loss after a few steps in float32 on equal weights in other memory, relative: a thousand roundings."""


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture(scope="module")
def config(model: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    return value


def write(path: Path, model: Path, layout: str) -> dict[str, Tensor]:
    weights = weights_of(model)
    if path.suffix == ".gguf":
        pytest.importorskip("gguf")
        return write_gguf(path, weights, layout)
    return write_safetensors(path, weights, layout)


def loaded(path: Path, model: Path, kind: Any = QwenImageTransformer2DModel) -> Any:
    folder = open_model(str(model), ("transformer",), transformer=str(path))
    return load_single_file(kind, folder, torch.float32).eval()


def plain(transformer: Any) -> dict[str, Tensor]:
    """The numbers of its parameters, quantised or not."""
    numbers = {name: parameter.detach() for name, parameter in transformer.named_parameters()}
    for name, parameter in transformer.named_parameters():
        if hasattr(parameter, "quant_type"):
            from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

            numbers[name] = dequantize_gguf_tensor(parameter).float()
    for name, module in transformer.named_modules():
        if isinstance(module, QuantizedLinear):
            numbers[f"{name}.weight"] = module.dequantize()
            del numbers[f"{name}.scale"]
    return numbers


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_safetensors_file_means_exactly_its_weights(
    model: Path, tmp_path: Path, built: Callable[..., Path], layout: str
) -> None:
    meant = write(tmp_path / "a.safetensors", model, layout)
    transformer = loaded(tmp_path / "a.safetensors", model)
    found = plain(transformer)
    assert found.keys() == meant.keys()
    is_int8 = layout in INT8
    for name, weight in meant.items():  # a sum of 16 numbers, rotated in float32
        assert torch.allclose(found[name], weight, rtol=0, atol=float(weight.abs().max()) * 2**-20 * is_int8), name
    stays = isinstance(transformer.get_submodule(Q.removesuffix(".weight")), QuantizedLinear)
    assert stays == (layout not in ("bf16", "prefixed"))
    stock = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    stock.load_state_dict(meant)
    sample = open_cache(built("edit-plus"))[0]
    expected = output(stock.eval(), sample)
    # equal weights in other memory: a product may take its terms in another order; inputs of int8 are rounded
    error = (output(transformer, sample) - expected).norm() / expected.norm()
    assert error < (0.05 if is_int8 else 1e-5)
    assert error > 1e-3 or not is_int8


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_means_its_weights_within_the_float16_of_diffusers(model: Path, tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path / "a.gguf", model, kind)
    transformer = loaded(tmp_path / "a.gguf", model)
    found, parameters = plain(transformer), dict(transformer.named_parameters())
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        # a product of two numbers in float16, one rounding; subnormal ones have a fixed spacing
        assert torch.allclose(found[name], weight, rtol=2**-11, atol=2**-25), name
    assert hasattr(parameters[Q], "quant_type")
    assert not hasattr(parameters["img_in.weight"], "quant_type")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_training_unpacks_the_same_weights_and_passes_their_gradient(model: Path, tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a.gguf", model, kind)
    stock = loaded(tmp_path / "a.gguf", model).transformer_blocks[0].attn.to_q
    ours = loaded(tmp_path / "a.gguf", model, trained_class({"_class_name": "QwenImageTransformer2DModel"}))
    replace_layers(ours)
    layer = ours.transformer_blocks[0].attn.to_q
    assert type(layer) is UnpackedLinear
    x = torch.randn(1, 5, 64, requires_grad=True)
    expected, found = stock(x), layer(x)
    assert torch.allclose(found, expected, rtol=64 * torch.finfo(torch.float32).eps, atol=1e-5)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (expected, found)]
    assert torch.allclose(*gradients, rtol=64 * torch.finfo(torch.float32).eps, atol=1e-5)


def test_both_halves_of_a_joined_matrix_are_read(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """ComfyUI stores the gate and the projection of Qwen-Image-2.1 as one matrix."""
    model = tiny_model("qwen-image-21")
    weights = weights_of(model)
    for name in [name for name in weights if "gate_layer" in name]:
        other = name.replace("gate_layer", "proj")
        weights[name.replace("gate_layer", "gate_up")] = torch.cat([weights.pop(name), weights.pop(other)])
    meant = write_safetensors(tmp_path / "a.safetensors", weights, "rows")
    folder = open_model(str(model), ("transformer",), transformer=str(tmp_path / "a.safetensors"))
    kind = trained_class(folder.transformer_config)
    found = plain(load_single_file(kind, folder, torch.float32))
    for name, joined in meant.items():
        parts = [name.replace("gate_up", part) for part in ("gate_layer", "proj")] if "gate_up" in name else [name]
        assert torch.equal(torch.cat([found.pop(part) for part in parts]), joined), name
    assert not found


def test_the_sizes_of_ggml_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for number, (name, weights, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (weights, size))


# ---- refusals, without torch -----------------------------------------------------------------------------------------


def refusal(name: object, config: dict[str, Any]) -> str:
    with pytest.raises(QwenCacheError) as error:
        open_single_file(str(name), config)
    return str(error.value)


def test_what_is_not_a_file_of_weights_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    url = "https://host/a.safetensors"
    assert refusal(url, config).startswith(f"{url}: model.transformer is a file (expected a .safetensors or .gguf file")
    assert "found a URL)\n  → download it first" in refusal(url, config)
    assert "found a folder)\n  → name a folder with --model" in refusal(tmp_path, config)
    assert "found no such file)" in refusal(tmp_path / "a.gguf", config)
    for ending in (".ckpt", ".pt", ".pth", ".bin"):
        (tmp_path / f"a{ending}").write_bytes(b"\x80\x04.")
        assert "this is a pickle, which can run any program" in refusal(tmp_path / f"a{ending}", config)
    archive, no_object, no_entry = b"PK\x03\x04" + bytes(100), struct.pack("<Q", 2) + b"[]", b'{"a":{}} '
    entry = b'"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    twice = b"{" + entry + b"," + entry + b"}"
    for content in (
        b"",
        archive,
        no_object,
        struct.pack("<Q", len(twice)) + twice,
        struct.pack("<Q", len(no_entry)) + no_entry,
    ):
        (tmp_path / "a.safetensors").write_bytes(content)
        assert "neither a safetensors nor a GGUF file, or damaged" in refusal(tmp_path / "a.safetensors", config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora_unet_a.lora_down.weight", "not a transformer's file but a LoRA\n  → name the base here"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "not a transformer's file but a LoRA"),
        (
            "model.layers.0.self_attn.q_proj.weight",
            "but a text encoder\n  → name it as model.text_encoder, or with --",
        ),
        ("model.language_model.norm.weight", "but a text encoder\n  → name it as model.text_encoder, or with --"),
        ("decoder.conv_in.weight", "not a transformer's file but a VAE"),
        ("transformer_blocks.0.attn.to_qkv.qweight", "but quantised by nunchaku or another program"),
        ("double_blocks.0.img_attn.qkv.weight", "the model in model.path: img_in.weight (expected (64, 64), found no"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, config: dict[str, Any], name: str, message: str) -> None:
    save_file({name: torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    assert message in refusal(tmp_path / "a.safetensors", config)


def test_another_model_is_refused_by_name(
    tmp_path: Path, model: Path, config: dict[str, Any], tiny_model: Callable[[str], Path]
) -> None:
    path = tmp_path / "a.safetensors"
    write(path, model, "bf16")
    assert "model.path: img_in.weight (expected (96, 64), found (64, 64))" in refusal(
        path, {**config, "num_attention_heads": 3}
    )
    assert "model.path: blocks (expected 3, found 2)" in refusal(path, {**config, "num_layers": 3})
    assert "txt_norm.weight (expected (99,), found (64,))" in refusal(path, {**config, "joint_attention_dim": 99})
    write(path, tiny_model("qwen-image-21"), "bf16")
    assert "txt_norm.weight (expected (64,), found no such tensor)" in refusal(path, config)
    weights = weights_of(model)
    write_safetensors(path, {name: it for name, it in weights.items() if name != Q}, "bf16")
    with pytest.raises(ModelError, match=r"does not have the parameters of the model in model.path: transformer_bl"):
        loaded(path, model)
    write_safetensors(path, {**weights, "txt_in.bias": torch.zeros(9)}, "bf16")
    with pytest.raises(ModelError, match=r"txt_in.bias \(expected \(64,\), found \(9,\)\)"):
        loaded(path, model)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_file_of_2511_is_only_for_2511(tmp_path: Path, model: Path, config: dict[str, Any], prefix: str) -> None:
    """Its parameters have the names and shapes of 2509; ComfyUI's marker tells them apart."""
    path, marker = tmp_path / "a.safetensors", {f"{prefix}__index_timestep_zero__": torch.zeros(0)}
    save_file({**{prefix + name: weight for name, weight in weights_of(model).items()}, **marker}, path)
    found = open_single_file(str(path), {**config, "zero_cond_t": True}).tensors
    assert found.keys() == weights_of(model).keys()
    message = refusal(path, config)
    assert "it is of Qwen-Image-Edit-2511 (expected zero_cond_t true in config.json, found false)" in message
    assert "→ set model.path, or --model, to Qwen/Qwen-Image-Edit-2511" in message


def test_other_quantisations_are_refused(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "a.safetensors"
    layer = Q.removesuffix(".weight")
    write(path, model, "comfy_quant")
    stored = load_file(path)
    entry = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    for changes, message in (
        (
            {f"{layer}.comfy_quant": entry},
            "of ComfyUI is not read (expected float8_e4m3fn or float8_e5m2 or int8_tensorwise, found nvfp4)",
        ),
        ({f"{layer}.comfy_quant": entry[:5]}, "ComfyUI's quantisation entries cannot be read"),
        ({f"{layer}.weight_scale": torch.ones(64, 2)}, "F8_E4M3 (64, 64), a scale of F32 (64, 2)"),
        ({Q: stored[Q].bfloat16()}, "with one number for all or one for each row (found BF16"),
        ({"a.weight_scale": torch.ones(1)}, "a.weight: this scale is not of an fp8 or int8 matrix"),
        ({"img_in.bias": torch.zeros(64, dtype=torch.int8)}, "img_in.bias: an int8 weight without its scale"),
        ({"img_in.bias": torch.zeros(64, dtype=torch.int16)}, "img_in.bias: weights of this dtype are not read"),
    ):
        save_file({**stored, **changes}, path)
        assert message in refusal(path, config)
    save_file({**stored, "model.diffusion_model.a": torch.ones(1)}, path)
    assert "some tensors have ComfyUI's prefix, others have not" in refusal(path, config)


def comfy_entry(**values: Any) -> Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


def test_other_int8_files_are_refused(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    path, layer = tmp_path / "a.safetensors", Q.removesuffix(".weight")
    write(path, model, "convrot")
    stored = load_file(path)
    int8 = {"format": "int8_tensorwise", "convrot": True}
    for changes, message in (
        ({f"{layer}.comfy_quant": comfy_entry(convrot=True, per_row=True)}, "found no format, as in files of older"),
        ({f"{layer}.comfy_quant": None}, f"{Q}: an int8 weight without ComfyUI's entry about its format"),
        ({f"{layer}.weight_scale": None}, f"{Q}: an int8 weight without its scale"),
        ({f"{layer}.weight_scale": torch.ones(1).double()}, "found I8 (64, 64), a scale of F64 (1,)"),
        ({f"{layer}.weight_scale": torch.ones(1).char()}, "found I8 (64, 64), a scale of I8 (1,)"),
        ({Q: torch.ones(64).char()}, f"{Q}: this scale is not of an fp8 or int8 matrix"),
        ({f"{layer}.comfy_quant": comfy_entry(format="float8_e4m3fn")}, "(expected float8_e4m3fn, found I8)"),
        ({f"{layer}.comfy_quant": comfy_entry(format=["int8_tensorwise"])}, "this quantisation of ComfyUI is not read"),
        *(
            ({f"{layer}.comfy_quant": comfy_entry(**int8 | other)}, "this rotation is not ConvRot's (expected")
            for other in ({"convrot": 1}, *({"convrot_groupsize": size} for size in (32, 0, None, "16", 16.0, True)))
        ),
        ({f"{layer}.comfy_quant": comfy_entry(**int8)}, "rotated group (found (64, 64), rotated by 256"),
    ):
        changed = {name: changes.get(name, tensor) for name, tensor in stored.items()}
        save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path)
        assert message in refusal(path, config)


def test_the_entries_of_the_header_count_first(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    path, layer = tmp_path / "a.safetensors", Q.removesuffix(".weight")
    write(path, model, "convrot")
    layers = {"layers": {layer: {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}}}
    save_file(load_file(path), path, {"_quantization_metadata": json.dumps(layers)})
    groups = {name: tensor.group for name, tensor in open_single_file(str(path), config).tensors.items()}
    assert (groups.pop(Q), set(groups.values())) == (64, {16, 0})


def test_truncated_files_are_refused(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    for path, layout in ((tmp_path / "a.safetensors", "bf16"), (tmp_path / "a.gguf", "Q8_0")):
        write(path, model, layout)
        whole = path.read_bytes()
        path.write_bytes(whole[:-40])
        found = refusal(path, config)
        assert "the file is truncated (expected " in found
        assert f"found {len(whole) - 40})\n  → download the file again" in found


def test_a_hostile_gguf_header_costs_nothing(tmp_path: Path, config: dict[str, Any]) -> None:
    """The `gguf` package's reader counts an array of 2^60 numbers, one by one, beyond the end of the file."""
    path, key = tmp_path / "a.gguf", gguf_string("a")
    array = key + struct.pack("<IIQ", 9, 0, 2**60)
    strings = key + struct.pack("<IIQ", 9, 8, 2**60)
    nested = key + struct.pack("<IIQ", 9, 9, 2)
    long_name = struct.pack("<Q", 2**62)
    huge = gguf_string("img_in.weight") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)
    dimensions = gguf_string("img_in.weight") + struct.pack("<I", 2**31)
    for content, message in (
        (gguf_header(2**60, b"", 0), "or damaged"),
        (gguf_header(1, b"", 2**60), "or damaged"),
        (gguf_header(0, array, 1), "truncated"),
        (gguf_header(0, strings, 1), "or damaged"),
        (gguf_header(0, nested, 1), "or damaged"),
        (gguf_header(0, long_name, 1), "truncated"),
        (gguf_header(1, b"", 0, long_name), "truncated"),
        (gguf_header(1, b"", 0, huge), "truncated"),
        (gguf_header(1, b"", 0, dimensions), "or damaged"),
        (gguf_header(2, b"", 0, 2 * (gguf_string("a") + struct.pack("<IQIQ", 1, 1, 0, 0))), "or damaged"),
        (gguf_header(1, b"", 0, gguf_string("a") + struct.pack("<IQIQ", 1, 256, 21, 0)), "found GGML type 21)"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "or damaged"),
    ):
        path.write_bytes(content)
        assert message in refusal(path, config)


def test_a_missing_package_is_named_before_torch_is_loaded(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.gguf", model, "Q8_0")
    monkeypatch.setattr("qwen_cache.models.single_file.installed", lambda name: None)
    with pytest.raises(QwenCacheError, match=r"gguf weights need a package that is not installed \(expected gguf\)"):
        open_model(str(model), ("transformer",), transformer=str(tmp_path / "a.gguf"))
    open_model(str(model), ("vae",), transformer=str(tmp_path / "a.gguf"))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_plan_counts_what_the_file_stores() -> None:
    settings = load_config(None, [])
    blocks = on_meta({**REAL, "num_layers": 1}, settings).requires_grad_(False)
    matrices = [tuple(it.shape) for name, it in blocks.named_parameters() if name.startswith("transformer_blocks")]
    weights = sum(shape[0] * shape[1] for shape in matrices if len(shape) == 2)
    rows = sum(shape[0] for shape in matrices if len(shape) == 2)
    for dtype, size in (("Q4_K", 144 / 256), ("F8_E4M3", 1 + 4 * rows / weights), ("BF16", 2.0)):
        stored = {
            f"transformer_blocks.0.{i}": StoredTensor(dtype, shape, 0, int(shape[0] * shape[1] * 144 / 256))
            for i, shape in enumerate(matrices)
            if len(shape) == 2
        }
        file = SingleFile(Path("a"), "gguf", stored)
        assert file.bytes_per_weight == pytest.approx(size)
        found = frozen_bytes(blocks, file.config(REAL))[0]
        assert found == pytest.approx(frozen_bytes(blocks, REAL)[0] - (2 - size) * weights, abs=1)


@pytest.mark.parametrize("kept", ["transformer_blocks.1.", ".to_q."])
def test_the_memory_plan_counts_int8_files_that_are_quantised_in_part(
    tmp_path: Path, model: Path, config: dict[str, Any], kept: str
) -> None:
    """One of two blocks is not quantised, or a layer of both."""
    path = tmp_path / "a.safetensors"
    write(path, model, "convrot")
    stored, plain = load_file(path), load_file(next((model / "transformer").glob("*.safetensors")))
    for name in [name for name in stored if kept in name and stored[name].dtype == torch.int8]:
        layer = name.removesuffix(".weight")
        del stored[f"{layer}.weight_scale"], stored[f"{layer}.comfy_quant"]
        stored[name] = plain[name].bfloat16()
    save_file(stored, path)
    opened = open_model(str(model), ("transformer",), transformer=str(path))
    settings = load_config(None, ["train.mixed_precision=bf16"])
    loaded = load_transformer(opened, settings).requires_grad_(False)
    planned = on_meta(opened.transformer_config, settings).requires_grad_(False)
    assert frozen_bytes(planned, opened.transformer_config) == (
        pytest.approx(sum(it.numel() * it.element_size() for it in loaded.parameters()), abs=1),
        0,
    )


def test_unpacking_takes_no_more_than_is_planned() -> None:
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    for name, weights, size in GGML_TYPES.values():
        if name in ("F32", "F16", "BF16"):
            continue
        packed = torch.empty(64, 1024 // weights * size, dtype=torch.uint8, device="meta")
        with LiveBytes([packed]) as live:
            dequantize_gguf_tensor(GGUFParameter(packed, quant_type=gguf.GGMLQuantizationType[name])).bfloat16()
        assert 1.5 < live.peak / (64 * 1024 * 2) < UNPACKED_TENSORS.get(name, UNPACKED_OTHERS), name


# ---- runs ------------------------------------------------------------------------------------------------------------


def folder_of(train: Trainer, path: Path, meant: dict[str, Tensor]) -> None:
    """Make the trainer's model one whose folder holds these weights."""
    shutil.copytree(train.model, path)
    (file,) = (path / "transformer").glob("*.safetensors")
    save_file(meant, file)
    train.model = path


def test_a_run_on_a_file_is_the_run_on_a_folder_with_its_weights(train: Trainer) -> None:
    file, moved = train.folder / "a.safetensors", train.folder / "b.safetensors"
    meant = write(file, train.model, "prefixed")
    out = train(model__transformer=str(file), train__max_steps=2)
    with safe_open(out / LORA, framework="np") as opened:
        assert '"transformer": "a.safetensors"' in opened.metadata()["lora_adapter_metadata"]
    file.rename(moved)
    again = train("--resume", model__transformer=str(moved), train__max_steps=3)
    write(file, train.model, "bf16")
    result = train.try_("--resume", model__transformer=str(file), train__max_steps=4)
    what = "this checkpoint was trained with another transformer, so it cannot be resumed (expected edit-plus with "
    refused(result, what, "b.safetensors, xxh3-128 ", "found edit-plus with a.safetensors, xxh3-128 ")
    folder_of(train, train.folder / "model", meant)
    assert column(again, "loss") == pytest.approx(column(train(out="folder", train__max_steps=3), "loss"), rel=ROUNDING)


def _rounding(options: dict[str, Any]) -> float:
    """The same with these options: autocast rounds to 8 bits."""
    return 0.02 if options.get("train__mixed_precision") == "bf16" else ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"model__quantization": "int8"},
        {"train__method": "full"},
        {"train__tabulated_modulation": True, "train__mixed_precision": "bf16"},
    ],
)
def test_every_way_to_train_is_the_same_on_a_file(train: Trainer, options: dict[str, Any]) -> None:
    file = train.folder / "a.safetensors"
    meant = write(file, train.model, "prefixed")
    losses = column(train(model__transformer=str(file), **options), "loss")
    folder_of(train, train.folder / "model", {name: weight.bfloat16() for name, weight in meant.items()})
    assert column(train(out="folder", **options), "loss") == pytest.approx(losses, rel=_rounding(options))


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("a.safetensors", "convrot", {}),
        slow("a.safetensors", "scale_weight", {}),
        slow("a.gguf", "Q8_0", {}),
        slow("a.gguf", "Q8_0", {"train__tabulated_modulation": True, "train__mixed_precision": "bf16"}),
        slow("a.safetensors", "fp8", {"train__tabulated_modulation": True, "train__mixed_precision": "bf16"}),
    ],
)
def test_a_quantised_file_trains_like_its_weights(
    train: Trainer, name: str, layout: str, options: dict[str, Any]
) -> None:
    """Offloading changes nothing; the rest differs from the run on unquantised weights by rounding alone."""
    meant = write(train.folder / name, train.model, layout)
    settings = {"optimizer__learning_rate": 0.02, **options}
    losses = column(train(model__transformer=str(train.folder / name), **settings), "loss")
    offloaded = train(model__transformer=str(train.folder / name), train__offload_blocks=2, out="offloaded", **settings)
    assert column(offloaded, "loss") == pytest.approx(losses, rel=_rounding(options))
    folder_of(train, train.folder / "model", meant)
    assert losses == pytest.approx(column(train(out="folder", **settings), "loss"), rel=0.02)


def test_settings_that_a_quantised_file_cannot_take_are_refused(train: Trainer) -> None:
    file = train.folder / "a.safetensors"
    write(file, train.model, "fp8")
    at = {"model__transformer": str(file)}
    do = "set model.quantization=none: the file is loaded as it was saved"
    what = f"{file}: model.quantization=int8 is for weights that are not quantised yet (found fp8 weights)"
    refused(train.try_(model__quantization="int8", **at), what, do)
    what = f"{file}: train.method=full cannot train quantised weights (found quant_method fp8"
    refused(train.try_(train__method="full", **at), what, "set train.method=lora")
    refused(train.try_(train__lora__use_dora=True, **at), "use_dora is for unquantised weights", "use_dora=false")
    out = train(train__max_steps=1, out="out", **at)
    merged = ("export", out, "--to", "merged", "--out", train.folder / "merged")
    base = ("--model", train.model, "--transformer", file)
    refused(run("qwen-train", *merged), f"give --model {train.model} --transformer {file}, as in {out / 'qwen.yaml'}")
    refused(
        run("qwen-train", *merged, *base),
        f"{file}: these weights are quantised: merging would round the LoRA away",
        "unquantised model",
    )
    write(file, train.model, "bf16")
    assert run("qwen-train", *merged, *base).code == 0


def test_the_backward_pass_of_an_int8_file_is_by_the_setting(train: Trainer) -> None:
    file = train.folder / "a.safetensors"
    write(file, train.model, "convrot")
    for backward in (True, False):
        config = load_config(None, [f"train.quantized_backward={backward}".lower()])
        model = open_model(str(train.model), ("transformer",), None, transformer=str(file))
        modules = load_transformer(model, config).modules()
        assert {it.backward_in_8_bits for it in modules if isinstance(it, QuantizedLinear)} == {backward}


@pytest.mark.slow
def test_a_lora_is_merged_into_the_unpacked_weights_of_int8(train: Trainer) -> None:
    """Also where the output projection, whose dtype the others take, is quantised."""
    file = train.folder / "a.safetensors"
    meant = write(file, train.model, "convrot")
    stored = load_file(file)
    stored["proj_out.weight"] = torch.ones(stored["proj_out.weight"].shape).char()
    stored |= {"proj_out.weight_scale": torch.tensor(0.5)}
    stored |= {"proj_out.comfy_quant": comfy_entry(format="int8_tensorwise")}
    save_file(stored, file)
    out = train(model__transformer=str(file))
    base = ("--model", train.model, "--transformer", file)  # a run's record of a file is not taken unasked
    result = run("qwen-train", "export", out, "--to", "merged", "--out", train.folder / "merged", *base)
    assert result.code == 0, result.stderr
    (merged,) = (load_file(path) for path in (train.folder / "merged").glob("*.safetensors"))
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    lora = load_file(out / "pytorch_lora_weights.safetensors")
    up, down = (lora[f"transformer.{Q.replace('.weight', f'.lora_{side}.weight')}"] for side in "BA")
    assert torch.allclose(merged[Q].float(), meant[Q] + up @ down, rtol=2**-7, atol=2**-12)
    assert torch.allclose(merged["img_in.weight"].float(), meant["img_in.weight"])
    assert (merged["proj_out.weight"] == 0.5).all()


# ---- images ----------------------------------------------------------------------------------------------------------

IMAGE = ("--set", "predict.height=64", "--set", "predict.width=64", "--num-inference-steps", "2")


def predicted(model: Path, out: Path, *options: str | Path, code: int = 0) -> bytes:
    arguments = ("--model", model, "--prompt", "a", "--out", out, *IMAGE, *options)
    result = run("qwen-train", "predict", *arguments)
    assert result.code == code, result.stderr
    return out.read_bytes()


def _difference(one: bytes, other: bytes) -> int:
    """The largest difference of a pixel of two images."""
    arrays = [np.asarray(Image.open(io.BytesIO(data)), np.int16) for data in (one, other)]
    return int(np.abs(arrays[0] - arrays[1]).max())


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["t2i", "edit-plus"])
def test_predict_generates_with_the_weights_of_the_file(
    variant: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, file, folder = tiny_model(variant), tmp_path / "a.safetensors", tmp_path / "model"
    others = {name: 1.25 * weight for name, weight in weights_of(model).items()}
    meant = write_safetensors(file, others, "prefixed")
    shutil.copytree(model, folder)
    (weights,) = (folder / "transformer").glob("*.safetensors")
    save_file(meant, weights)
    expected = predicted(folder, tmp_path / "expected.png")
    weights.unlink()
    found = predicted(folder, tmp_path / "found.png", "--transformer", file)
    assert _difference(found, expected) <= 1
    assert _difference(predicted(model, tmp_path / "other.png"), expected) > 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("a.gguf", "Q8_0"), ("a.safetensors", "comfy_quant")])
def test_predict_adds_a_lora_to_quantised_weights(
    train: Trainer, tiny_model: Callable[[str], Path], name: str, layout: str
) -> None:
    file = train.folder / name
    write(file, train.model, layout)
    out = train(model__transformer=str(file), optimizer__learning_rate=0.05)
    cached = ("--from-cache", train.cache, "--key", open_cache(train.cache)[0].key, "--transformer", file)
    images = []
    for number, options in enumerate(((), ("--lora", out), ("--lora", f"{out}:0"))):
        png = train.folder / f"{number}.png"
        arguments = ("--model", train.model, *cached, "--out", png, "--num-inference-steps", "2", *options)
        assert run("qwen-train", "predict", *arguments).code == 0
        images.append(png.read_bytes())
    assert _difference(images[0], images[1]) > 1
    assert _difference(images[0], images[2]) <= 1
    result = run("qwen-train", "predict", "--model", train.model, *cached, "--lora", out, "--merge")
    refused(result, "a LoRA merged into quantised weights would be rounded away", "without --merge")


def test_images_of_another_file_are_not_taken_for_present_ones(model: Path, tmp_path: Path) -> None:
    from qwen_train.inference.generator import fingerprint

    found = []
    for layout in ("bf16", "fp8"):
        write(tmp_path / "a.safetensors", model, layout)
        found.append(fingerprint(open_model(str(model), ("transformer",), transformer=str(tmp_path / "a.safetensors"))))
    assert len({*found, fingerprint(open_model(str(model), ("transformer",)))}) == 3


# ---- nunchaku --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nunchaku(train: Trainer) -> Path:
    """A model whose transformer's config.json is that of a folder for nunchaku's kernels."""
    folder = train.folder / "nunchaku"
    shutil.copytree(train.model, folder)
    config = folder / "transformer" / "config.json"
    layers = {"precision": "int4", "group_size": 64, "rank": 16, "targets": [Q.removesuffix(".weight")]}
    saved = {"quant_method": "nunchaku_lite", "compute_dtype": "bfloat16", "svdq_w4a4": layers}
    text = json.loads(config.read_text(encoding="utf-8")) | {"quantization_config": saved}
    config.write_text(json.dumps(text), encoding="utf-8")
    return folder


def test_what_nunchakus_kernels_cannot_do_is_refused(
    train: Trainer, nunchaku: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train.model, where = nunchaku, nunchaku / "transformer"
    found = f"{where}: nunchaku's kernels cannot train: they have no gradients (found quant_method nunchaku_lite"
    refused(train.try_(), found, "train the unquantised model, or a single file in fp8 or GGUF with --transformer")
    cached = ("predict", "--model", nunchaku, "--from-cache", train.cache, "--key", open_cache(train.cache)[0].key)
    found = f"{where}: this transformer needs a package that is not installed (expected kernels)"
    refused(run("qwen-train", *cached), found, "pip install kernels, on a machine with an NVIDIA GPU")
    monkeypatch.setattr("qwen_train.inference.predict.installed", lambda name: "1")
    monkeypatch.setattr("qwen_train.inference.images.parse_lora", lambda text: text)
    found = "a: a LoRA cannot be added to weights for nunchaku's kernels"
    refused(run("qwen-train", *cached, "--lora", "a"), found, "or with a single file in fp8 or GGUF")


def test_a_nunchaku_folder_is_loaded_by_diffusers_with_its_layers(
    nunchaku: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels need CUDA, so a stand-in takes the place of diffusers' module with them."""
    import sys
    from types import ModuleType

    from diffusers.quantizers.nunchaku import nunchaku_quantizer

    from qwen_cache.settings.sections import PredictConfig
    from qwen_train.inference.pipeline import choose, load_pipeline

    class StandIn(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.qweight = torch.nn.Parameter(torch.empty(width, width // 2, dtype=torch.int8), requires_grad=False)

    def replace(transformer: Any, config: dict[str, Any], dtype: torch.dtype) -> int:
        for target in config["svdq_w4a4"]["targets"]:
            transformer.set_submodule(target, StandIn(64))
        return 1

    stand_in: Any = ModuleType("utils")
    stand_in.replace_with_nunchaku_linear, stand_in.check_strict_state_dict_match = replace, lambda model, state: None
    monkeypatch.setitem(sys.modules, "diffusers.quantizers.nunchaku.utils", stand_in)
    monkeypatch.setattr(nunchaku_quantizer.NunchakuLiteQuantizer, "validate_environment", lambda *a, **k: None)
    (file,) = (nunchaku / "transformer").glob("*.safetensors")
    weights, layer = load_file(file), Q.removesuffix(".weight")
    del weights[Q], weights[f"{layer}.bias"]
    qweight = torch.randint(-128, 128, (64, 32), dtype=torch.int8)
    save_file(weights | {f"{layer}.qweight": qweight}, file)
    opened = open_model(str(nunchaku), ("transformer", "vae", "scheduler"))
    pipeline = load_pipeline(opened, PredictConfig(), choose("cpu", None, None, None))
    found = pipeline.transformer.get_submodule(layer)
    assert isinstance(found, StandIn)
    assert torch.equal(found.qweight, qweight)
