"""A transformer in a single file means the weights that ComfyUI and llama.cpp's tools wrote, and nothing else is read.

The judges: the stock class with the weights computed from the formats' definitions; `gguf`'s own unpacking, which is
not diffusers'; runs on a folder with the same weights.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.errors import ModelError, QwenCacheError
from qwen_cache.models.folder import open_model
from qwen_cache.models.tensor_headers import GGML_TYPES, StoredTensor
from qwen_cache.models.weights_file import WeightsFile, open_weights_file
from qwen_train.model.frozen_layers import UnpackedLinear, replace_layers
from qwen_train.model.single_file import load_single_file
from qwen_train.model.stock import trained_class

from .support.commands import refused, run
from .support.full_size import REAL
from .support.marks import slow
from .support.outputs import output
from .support.runs import LORA, Trainer, column
from .support.single_files import LAYOUTS, gguf_header, gguf_string, weights_of, write_gguf, write_safetensors

Q = "transformer_blocks.0.attn.to_q.weight"


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


def plain(parameter: Any) -> Tensor:
    """The numbers of a parameter, quantised or not."""
    if hasattr(parameter, "quant_type"):
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        return dequantize_gguf_tensor(parameter).float()
    value: Tensor = parameter.dequantize() if hasattr(parameter, "qdata") else parameter.detach()
    return value


# ---- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_safetensors_file_means_exactly_its_weights(
    model: Path, tmp_path: Path, built: Callable[..., Path], layout: str
) -> None:
    meant = write(tmp_path / "a.safetensors", model, layout)
    transformer = loaded(tmp_path / "a.safetensors", model)
    found = dict(transformer.named_parameters())
    assert found.keys() == meant.keys()
    assert all(torch.equal(plain(found[name]), meant[name]) for name in meant)
    assert hasattr(found[Q], "qdata") == ("fp8" in layout or layout in LAYOUTS[3:])
    stock = QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    stock.load_state_dict(meant)
    sample = open_cache(built("edit-plus"))[0]
    assert torch.equal(output(transformer, sample), output(stock.eval(), sample))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_a_gguf_file_means_its_weights_within_the_float16_of_diffusers(model: Path, tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path / "a.gguf", model, kind)
    found = dict(loaded(tmp_path / "a.gguf", model).named_parameters())
    assert found.keys() == meant.keys()
    for name, weight in meant.items():
        # a product of two numbers in float16, one rounding; subnormal ones have a fixed spacing
        assert torch.allclose(plain(found[name]), weight, rtol=2**-11, atol=2**-25), name
    assert hasattr(found[Q], "quant_type")
    assert not hasattr(found["img_in.weight"], "quant_type")


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
    assert torch.equal(found, expected)
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
    found = dict(load_single_file(kind, folder, torch.float32).named_parameters())
    for name, joined in meant.items():
        parts = [name.replace("gate_up", part) for part in ("gate_layer", "proj")] if "gate_up" in name else [name]
        assert torch.equal(torch.cat([plain(found.pop(part)) for part in parts]), joined), name
    assert not found


def test_the_sizes_of_ggml_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for number, (name, weights, size) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (weights, size))


# ---- refusals, without torch -----------------------------------------------------------------------------------------


def refusal(name: object, config: dict[str, Any]) -> str:
    with pytest.raises(QwenCacheError) as error:
        open_weights_file(str(name), config)
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
    for content in (b"", archive, no_object, struct.pack("<Q", len(no_entry)) + no_entry):
        (tmp_path / "a.safetensors").write_bytes(content)
        assert "neither a safetensors nor a GGUF file, or damaged" in refusal(tmp_path / "a.safetensors", config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lora_unet_a.lora_down.weight", "not a transformer's file but a LoRA\n  → name the base here"),
        ("transformer.transformer_blocks.0.attn.to_q.lora_A.weight", "not a transformer's file but a LoRA"),
        ("model.layers.0.self_attn.q_proj.weight", "but a text encoder\n  → text encoder and VAE are those of"),
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


def test_other_quantisations_are_refused(tmp_path: Path, model: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "a.safetensors"
    layer = Q.removesuffix(".weight")
    write(path, model, "comfy_quant")
    stored = load_file(path)
    entry = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    for changes, message in (
        (
            {f"{layer}.comfy_quant": entry},
            "of ComfyUI is not read (expected float8_e4m3fn or float8_e5m2, found nvfp4)",
        ),
        ({f"{layer}.comfy_quant": entry[:5]}, "ComfyUI's quantisation entries cannot be read"),
        ({f"{layer}.weight_scale": torch.ones(64, 2)}, "F8_E4M3 (64, 64), a scale of (64, 2)"),
        ({Q: stored[Q].bfloat16()}, "not of an fp8 weight, with one number for all or one for each row (found BF16"),
        ({"a.weight_scale": torch.ones(1)}, "a.weight: this scale is not of an fp8 weight"),
        ({"img_in.bias": torch.zeros(64, dtype=torch.int8)}, "img_in.bias: weights of this dtype are not read"),
    ):
        save_file({**stored, **changes}, path)
        assert message in refusal(path, config)
    save_file({**stored, "model.diffusion_model.a": torch.ones(1)}, path)
    assert "some tensors have ComfyUI's prefix, others have not" in refusal(path, config)


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
    write(tmp_path / "a.safetensors", model, "fp8")
    monkeypatch.setattr("qwen_cache.models.weights_file.installed", lambda name: None)
    with pytest.raises(QwenCacheError, match=r"fp8 weights need a package that is not installed \(expected torchao\)"):
        open_model(str(model), ("transformer",), transformer=str(tmp_path / "a.safetensors"))
    open_model(str(model), ("vae",), transformer=str(tmp_path / "a.safetensors"))


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_plan_counts_what_the_file_stores() -> None:
    from qwen_cache.settings.load import load_config
    from qwen_train.memory.predict import frozen_bytes, on_meta, quantization_of

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
        file = WeightsFile(Path("a"), "gguf", stored)
        assert file.bytes_per_weight == pytest.approx(size)
        found = frozen_bytes(blocks, quantization_of(file.config(REAL), settings))[0]
        assert found == pytest.approx(frozen_bytes(blocks, None)[0] - (2 - size) * weights, abs=1)


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
    assert "another transformer" in result.stderr or "the transformer" in result.stderr
    folder_of(train, train.folder / "model", meant)
    assert column(again, "loss") == column(train(out="folder", train__max_steps=3), "loss")


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
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
    assert column(offloaded, "loss") == losses
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
    result = run("qwen-train", "export", out, "--to", "merged", "--out", train.folder / "merged")
    refused(result, f"{file}: these weights are quantised: merging would round the LoRA away", "unquantised model")
    write(file, train.model, "bf16")
    refused(train.try_(model__quantization="nf4", out="b", **at), "nf4 is for folders", "int8 or fp8, or use a GGUF")
    assert run("qwen-train", "export", out, "--to", "merged", "--out", train.folder / "merged").code == 0
