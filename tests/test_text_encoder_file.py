"""A text encoder in one of ComfyUI's files encodes as the stock class with the weights that the file means.

The judge: folders whose text encoder is the stock class with the weights computed from the formats' definitions.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

from qwen_cache import open_cache
from qwen_cache.encode import preflight
from qwen_cache.encode.builder import BuildJob, prepare_service
from qwen_cache.encode.cluster import Worker
from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.errors import DeviceError, ModelError, QwenCacheError
from qwen_cache.models import quantization
from qwen_cache.models.devices import HostEmbedding, Placement, bytes_of
from qwen_cache.models.encoders import MODELS, load_text_encoder
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.models.quantization import QuantizedLinear
from qwen_cache.models.single_file import open_text_encoder
from qwen_cache.settings.load import load_config
from qwen_train.inference.generator import fingerprint
from qwen_train.inference.images import COMPONENTS

from .support.caches import build, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes
from .support.judge import assert_same
from .support.photographs import photograph
from .support.single_files import gguf_header, is_text_matrix, text_weights_of, write_safetensors
from .support.text_encoder import images

CPU = torch.device("cpu")
LAYOUTS = ("bf16", "scale_weight", "comfy_quant", "convrot")
"""bf16; fp8 with scales in ComfyUI's first layout and in its present one; int8, rotated by 16 columns."""
Q = "model.layers.0.self_attn.q_proj"
INSIDE = "language_model.layers.0.self_attn.q_proj"
"""The same layer in transformers, without the `lm_head`."""


def stock_of(model: Path) -> Any:
    """The text encoder of a folder, as transformers loads it."""
    folder = model / "text_encoder"
    kind = MODELS[json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]]
    return kind.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture(scope="module")
def config(model: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((model / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    return value


@pytest.fixture
def bare(model: Path, tmp_path: Path) -> Path:
    """The model without the weights of its text encoder, as a download for a file leaves it."""
    return without_text_encoder(model, tmp_path / "bare")


def without_text_encoder(model: Path, folder: Path) -> Path:
    """A copy of the model that has of its text encoder the config.json alone."""
    kept = {"config.json"}
    shutil.copytree(
        model, folder, ignore=lambda at, names: set(names) - kept if Path(at).name == "text_encoder" else set()
    )
    return folder


class Saved:
    """The text encoder of a model, with the weights that a layout of ComfyUI's files keeps of it; made once."""

    def __init__(self, model: Path, layout: str, folder: Path) -> None:
        self.model, self.folder, self.stock = model, folder, stock_of(model)
        self.file = folder / f"{layout}.safetensors"
        self.weights = write_safetensors(self.file, text_weights_of(self.stock), layout, is_text_matrix, prefix="")

    @cached_property
    def meant(self) -> Path:
        """The model with the weights that the file means in its text encoder, saved by transformers."""
        parameters = dict(zip(text_weights_of(self.stock), self.stock.parameters(), strict=True))
        with torch.no_grad():
            for name, weight in self.weights.items():
                parameters[name].copy_(weight)
        meant = without_text_encoder(self.model, self.folder / "meant")
        self.stock.save_pretrained(meant / "text_encoder")
        return meant


Saving = Callable[..., Saved]


@pytest.fixture(scope="module")
def saved(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Saving:
    """`saved("bf16")`, which tests only read: a file, and the folder that the judge loads."""

    def save(layout: str, variant: str = "edit-plus") -> Saved:
        return Saved(tiny_model(variant), layout, tmp_path_factory.mktemp(f"{variant}-{layout}"))

    return cache(save)


def two(encoder: TextEncoder) -> list[TextRequest]:
    """Two prompts about the same images."""
    inputs = encoder.inputs([image.resize((128, 96)) for image in images(2)])
    return [TextRequest(inputs, prompt, ()) for prompt in ("make it blue", "a b c d")]


# ---- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["edit-plus", "qwen-image-21"])
def test_embeddings_are_those_of_the_stock_class_with_the_weights_of_the_file(
    tmp_path: Path, saved: Saving, variant: str, layout: str
) -> None:
    of_layout = saved(layout, variant)
    ours = without_text_encoder(of_layout.model, tmp_path / "bare")
    embeds, encoders = [], []
    for folder, name in ((ours, str(of_layout.file)), (of_layout.meant, None)):
        encoders.append(TextEncoder(open_model(str(folder), ENCODER_PARTS, text_encoder=name), CPU, torch.float32))
        encoded = encoders[-1].encode(two(encoders[-1]))
        embeds.append([torch.cat([it.prefix, it.prompt, it.empty]) for it in encoded])
    for found, expected in zip(*embeds, strict=True):
        assert_same(found, expected)
    one, other = (encoder.model for encoder in encoders)
    is_quantised = layout != "bf16"
    quantised = {name for name, module in one.named_modules() if isinstance(module, QuantizedLinear)}
    matrices = {name for name, module in other.language_model.layers.named_modules() if type(module) is nn.Linear}
    assert quantised == {f"language_model.layers.{name}" for name in matrices if is_quantised}
    assert not any(module.products for module in one.modules() if isinstance(module, QuantizedLinear))
    found, expected = (dict([*it.named_parameters(), *it.named_buffers()]) for it in (one, other))
    for name in expected.keys() - {f"{name}.weight" for name in quantised}:
        turned = layout == "convrot" and found[name].ndim == 2  # a sum of 16 numbers
        at_most = float(found[name].abs().max()) * 2**-20 * turned
        assert torch.allclose(found[name], expected[name], rtol=0, atol=at_most), name
        assert not found[name].requires_grad


def test_a_prompt_does_not_depend_on_its_batch(model: Path, saved: Saving) -> None:
    opened = open_model(str(model), ENCODER_PARTS, text_encoder=str(saved("convrot").file))
    alone, together = (TextEncoder(opened, CPU, torch.float32, tokens) for tokens in (1, 10_000))
    requests = [TextRequest(alone.inputs(images(i + 1)), "make it blue", ()) for i in range(2)]
    for request, found in zip(requests, together.encode(requests), strict=True):
        (expected,) = alone.encode([request])
        for name in ("prefix", "prompt", "empty"):
            assert_same(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize(("variant", "layout"), [("edit-plus", "bf16"), ("qwen-image-21", "convrot")])
def test_a_build_needs_no_other_weights(tmp_path: Path, pairs: Path, saved: Saving, variant: str, layout: str) -> None:
    """Two pairs: one with two controls, and one with a mask."""
    for path in [*pairs.rglob("china.*"), *pairs.rglob("flower.*")]:
        path.unlink()
    of_layout, caches = saved(layout, variant), []
    ours = without_text_encoder(of_layout.model, tmp_path / "bare")
    for folder, options in ((ours, ("--text-encoder", str(of_layout.file))), (of_layout.meant, ())):
        built = build(pairs, tmp_path / f"shards-{folder.name}", folder, *options)
        assert built.code == 0, built.stderr
        caches.append(open_cache(tmp_path / f"shards-{folder.name}"))
    for found, expected in zip(*caches, strict=True):
        for name in ("image_latents", "control_latents"):
            assert torch.equal(found[name], expected[name])
        for name in ("prompt_embeds", "empty_prompt_embeds"):
            assert_same(found[name], expected[name])
    recipes = [cache.recipe.recipe for cache in caches]
    assert {name for name in recipes[0] if recipes[0][name] != recipes[1][name]} == {"text_encoder"}
    checked = run("qwen-cache", "verify", tmp_path / "shards-bare", "--re-encode", 2)
    assert checked.code == 0, checked.stderr


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_a_cache_belongs_to_the_content_of_the_file(
    tmp_path: Path, pairs: Path, bare: Path, model: Path, fast: list[FakeLanes], saved: Saving
) -> None:
    """And of config.json, not to their names."""
    out, file, other = tmp_path / "shards", tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    shutil.copy(saved("bf16").file, file)
    shutil.copy(saved("scale_weight").file, other)
    assert build(pairs, out, bare, "--text-encoder", str(file)).code == 0
    moved = file.rename(tmp_path / "moved.safetensors")
    assert plan(pairs, out, bare, "--text-encoder", str(moved))["cached"] == 4
    for options in (("--text-encoder", str(other)), ()):
        folder = bare if options else model
        assert plan(pairs, out, folder, *options)["reasons"] == {"recipe: another text encoder": 4}
        refused(build(pairs, out, folder, *options), "because the recipe changed: another text encoder")
    changed = {**json.loads((bare / "text_encoder" / "config.json").read_text(encoding="utf-8")), "note": "x"}
    (bare / "text_encoder" / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    assert plan(pairs, out, bare, "--text-encoder", str(moved))["to_encode"] == 4


def test_memory_is_planned_for_8_bits(
    tmp_path: Path, pairs: Path, bare: Path, monkeypatch: pytest.MonkeyPatch, saved: Saving
) -> None:
    """The memory of weights that are quantised on loading, also if some wait in host memory."""

    def planned(layout: str, *options: str) -> dict[str, Any]:
        options = ("--text-encoder", str(saved(layout).file), *options)
        return dict(plan(pairs, tmp_path / "shards", bare, *options)["memory"][0])

    int8, on_gpu = ("--set", "cache.text_quantization=int8"), ("--vae-device", "cuda:0", "--text-device", "cuda:0")
    needed = planned("scale_weight")
    assert needed == planned("convrot") == planned("bf16", *int8)
    assert needed["needed"] < planned("bf16")["needed"]
    opened = open_model(str(bare), ENCODER_PARTS, text_encoder=str(saved("scale_weight").file))
    loaded = bytes_of(TextEncoder(opened, CPU, torch.float32).model)
    assert loaded <= needed["encoders"]["text_encoder"]["weights"] < 1.01 * loaded  # whose parameters are aligned
    partly = planned("scale_weight", *on_gpu)
    assert partly == planned("bf16", *int8, *on_gpu)
    assert partly["host"] > 0
    monkeypatch.setattr(preflight, "_capacity", lambda _: partly["needed"] - 1)
    settings = [saving["set"] for saving in planned("scale_weight", *on_gpu)["savings"]]
    assert settings == ["cache.text_offload=true"], "nothing is advised that is refused"


def test_plan_counts_8_bits_beside_training(bare: Path, built: Callable[..., Path], saved: Saving) -> None:
    def planned(*options: str) -> dict[str, Any]:
        result = run("qwen-train", "plan", built("edit-plus"), "--model", bare, "--json", *options)
        assert result.code == 0, result.stderr
        return dict(json.loads(result.stdout))

    whole, small = planned(), planned("--text-encoder", str(saved("convrot").file))
    assert small["build"]["text_encoder"] < whole["build"]["text_encoder"]
    assert small["build"]["vae"] == whole["build"]["vae"]
    assert small["predict"]["sequential"] <= whole["predict"]["sequential"]


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(name: object, config: dict[str, Any]) -> str:
    with pytest.raises(QwenCacheError) as error:
        open_text_encoder(str(name), config)
    return str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "but a LoRA\n  → leave model.text_encoder out"),
        ("transformer_blocks.0.attn.to_q.weight", "but a transformer\n  → name it as model.transformer"),
        ("decoder.conv_in.weight", "not a text encoder's file but a VAE"),
        ("model.layers.0.self_attn.q_proj.qweight", "but quantised by nunchaku or another program"),
        (
            "text_encoders.qwen25_7b.transformer.model.norm.weight",
            "but a whole checkpoint\n  → use a bf16, fp8",
        ),
        ("model.language_model.layers.0.linear_attn.a.weight", "but a Qwen3.5, such as the prompt enhancer of Qwen-Im"),
        ("encoder.block.0.weight", "not the text encoder of the model in model.path: vocabulary (expected"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, config: dict[str, Any], name: str, message: str) -> None:
    save_file({name: torch.zeros(2, 2)}, tmp_path / "a.safetensors")
    assert message in refusal(tmp_path / "a.safetensors", config)


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "a.gguf"
    assert "model.text_encoder is a file (expected a .safetensors file, found no such file)" in refusal(path, config)
    assert "found a folder)" in refusal(tmp_path, config)
    path.write_bytes(gguf_header(0, b"", 0) + bytes(8))
    assert "text encoders in GGUF are not read (expected a .safetensors file, found gguf)" in refusal(path, config)
    (tmp_path / "a.bin").write_bytes(b"\x80\x04.")
    assert "this is a pickle" in refusal(tmp_path / "a.bin", config)


def test_another_size_is_refused_before_it_is_loaded(config: dict[str, Any], saved: Saving) -> None:
    path = saved("bf16").file
    open_text_encoder(str(path), config)
    text, vision = config["text_config"], config["vision_config"]
    for changes, message in (
        ({"text_config": {**text, "vocab_size": 9}}, f"vocabulary (expected 9, found {text['vocab_size']})"),
        ({"text_config": {**text, "hidden_size": 9}}, f"width (expected 9, found {text['hidden_size']})"),
        ({"text_config": {**text, "num_hidden_layers": 9}}, "layers (expected 9, found 4)"),
        ({"vision_config": {**vision, "hidden_size": 9}}, "width of the vision tower (expected 9, found 32)"),
        ({"vision_config": {**vision, "depth": 9}}, "layers of the vision tower (expected 9, found 4)"),
    ):
        found = refusal(path, {**config, **changes})
        assert f"this is not the text encoder of the model in model.path: {message}" in found
        assert "→ name a file of this model's text encoder, qwen2_5_vl, or its own model with --model" in found


def test_what_is_missing_left_over_or_of_another_shape_is_named(tmp_path: Path, model: Path, saved: Saving) -> None:
    path, stored = tmp_path / "a.safetensors", load_file(saved("bf16").file)
    assert "lm_head.weight" in stored
    for changes, message in (
        ({f"{Q}.weight": None}, f"{INSIDE}.weight (expected (64, 64), found no such tensor)"),
        (
            {"model.a": torch.zeros(2)},
            "language_model.a (expected no such parameter, found (2,))",
        ),
        ({"logit_scale": torch.zeros(1)}, "logit_scale (expected no such parameter, found (1,))"),
        ({"visual.merger.ln_q.weight": torch.zeros(9)}, "visual.merger.ln_q.weight (expected (32,), found (9,))"),
    ):
        changed = {name: tensor for name, tensor in (stored | changes).items() if tensor is not None}
        save_file(changed, path)
        opened = open_model(str(model), ENCODER_PARTS, text_encoder=str(path))
        with pytest.raises(ModelError) as error:
            load_text_encoder(model / "text_encoder", torch.float32, opened.text_encoder_file)
        assert f"the file does not have the parameters of the model in model.path: {message}" in str(error.value)


def test_other_quantisations_are_refused(tmp_path: Path, config: dict[str, Any], saved: Saving) -> None:
    path, stored = tmp_path / "a.safetensors", load_file(saved("convrot").file)
    nvfp4 = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    for changes, message in (
        (
            {f"{Q}.comfy_quant": nvfp4},
            "this quantisation of ComfyUI is not read (expected float8_e4m3fn or",
        ),
        ({f"{Q}.comfy_quant": None}, f"{INSIDE}.weight: an int8 weight without ComfyUI's entry about its format"),
        ({f"{Q}.weight_scale": None}, f"{INSIDE}.weight: an int8 weight without its scale"),
        ({"model.norm.weight": torch.zeros(64, dtype=torch.int16)}, "weights of this dtype are not read"),
        ({f"model.{INSIDE}.weight": torch.zeros(1)}, "two tensors are the same param"),
    ):
        save_file({name: tensor for name, tensor in (stored | changes).items() if tensor is not None}, path)
        assert message in refusal(path, config)
    whole = saved("bf16").file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:begin])
    header["model.norm.weight"]["dtype"] = "F4"  # a dtype of safetensors that torch does not load
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(whole[:8] + text.ljust(begin - 8) + whole[begin:])
    assert "language_model.norm.weight: weights of this dtype are not read (expected F32" in refusal(path, config)


def test_a_quantised_file_is_not_quantised_again(tmp_path: Path, pairs: Path, bare: Path, saved: Saving) -> None:
    options = ("--text-encoder", str(saved("convrot").file), "--set", "cache.text_quantization=fp8")
    result = build(pairs, tmp_path / "shards", bare, *options)
    what = "cache.text_quantization=fp8 is for weights that are not quantised yet (found int8_convrot weights)"
    refused(result, what, "→ set cache.text_quantization=none: the file is loaded as it was saved")


def test_a_device_that_cannot_compute_with_it_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, saved: Saving
) -> None:
    """Such as fp8 on MPS."""

    def convert(*_: object, **__: object) -> None:
        raise TypeError("Trying to convert Float8_e4m3fn to the MPS backend")

    monkeypatch.setattr(quantization, "quantize", convert)
    opened = open_model(str(model), ENCODER_PARTS, text_encoder=str(saved("scale_weight").file))
    with pytest.raises(DeviceError, match=r"model\.text_encoder=fp8: cpu cannot compute with such weights"):
        TextEncoder(opened, CPU, torch.float32)


# ---- whatever else runs the text encoder -----------------------------------------------------------------------------


def test_of_the_hub_only_the_configuration_is_downloaded(
    bare: Path, monkeypatch: pytest.MonkeyPatch, saved: Saving
) -> None:
    asked: list[Any] = []

    def download(name: str, allow_patterns: list[str], **_: object) -> Path:
        asked.extend(allow_patterns)
        return bare

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    open_model("Qwen/Qwen-Image-Edit-2509", ENCODER_PARTS, text_encoder=str(saved("bf16").file))
    assert asked == ["model_index.json", "vae/*", "text_encoder/config.json", "tokenizer/*", "processor/*"]


@pytest.mark.parametrize("offload", [False, True])
def test_weights_may_wait_in_host_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, offload: bool, saved: Saving
) -> None:
    """Parts as with `cache.text_quantization`: table and vision tower always, the layers with `cache.text_offload`."""
    opened = open_model(str(model), ENCODER_PARTS, text_encoder=str(saved("convrot").file))
    whole = TextEncoder(opened, CPU, torch.float32)
    monkeypatch.setattr(Placement, "is_partial", lambda self, _: self.offload or self.loaded_quantised)
    parts = TextEncoder(opened, CPU, torch.float32, placement=Placement("none", offload, loaded_quantised=True))
    on_meta = {name.split(".")[1] for name, weight in parts.model.named_parameters() if weight.is_meta}
    assert on_meta == ({"blocks", "layers"} if offload else {"blocks"})
    assert type(parts.model.language_model.embed_tokens) is HostEmbedding
    for found, expected in zip(parts.encode(two(parts)), whole.encode(two(whole)), strict=True):
        assert_same(found.prefix, expected.prefix)
        assert_same(found.prompt, expected.prompt)


def test_a_worker_of_a_cluster_needs_the_same_file(tmp_path: Path, bare: Path, saved: Saving) -> None:
    file = tmp_path / "a.safetensors"
    shutil.copy(saved("bf16").file, file)
    settings = [f"model.path={bare}", f"model.text_encoder={file}", f"cache.path={tmp_path / 'shards'}"]
    job = prepare_service(load_config(None, settings))
    on_another_machine = replace(job, model=replace(job.model, path=tmp_path / "not here"))
    loaded: list[BuildJob] = []
    for each in (job, on_another_machine):
        worker = Worker(each, lambda job: loaded.append(job), str(tmp_path))  # type: ignore[func-returns-value, arg-type]
        worker.load()
    assert [job.model.text_encoder for job in loaded] == [str(file)] * 2
    shutil.copy(saved("scale_weight").file, file)
    with pytest.raises(ModelError, match=r"another recipe \(found another text encoder\)"):
        worker.load()


@pytest.mark.usefixtures("small_areas")
def test_an_image_is_generated_from_its_embeddings(tmp_path: Path, bare: Path, saved: Saving) -> None:
    of_layout, photo = saved("convrot"), tmp_path / "photo.png"
    photograph("chelsea.png").resize((64, 64)).save(photo)
    command = ("--image", photo, "--prompt", "make it blue", "--num-inference-steps", 2, "--set", "predict.height=64")
    command += ("--set", "predict.width=64", "--set", "predict.dtype=float32")
    generated = []
    for folder, options in ((bare, ("--text-encoder", of_layout.file)), (of_layout.meant, ())):
        out = tmp_path / f"{folder.name}.png"
        result = run("qwen-train", "predict", "--model", folder, "--out", out, *command, *options)
        assert result.code == 0, result.stderr
        generated.append(np.asarray(Image.open(out).convert("RGB")).astype(int))
    assert abs(generated[0] - generated[1]).max() <= 1


def test_an_image_of_another_file_is_generated_again(model: Path, saved: Saving) -> None:
    found = set()
    for layout in ("bf16", "convrot"):
        found.add(fingerprint(open_model(str(model), COMPONENTS, text_encoder=str(saved(layout).file))))
    assert len({*found, fingerprint(open_model(str(model), COMPONENTS))}) == 3


def test_a_phrase_is_grounded_by_its_attention(tmp_path: Path, bare: Path, saved: Saving) -> None:
    of_layout, photo = saved("scale_weight"), tmp_path / "photo.png"
    photograph("chelsea.png").resize((96, 64)).save(photo)
    small = ("--set", "data.condition_image_size=12544", "--dtype", "float32", "--phrase", "the cat")
    masks = []
    for folder, options in ((bare, ("--text-encoder", of_layout.file)), (of_layout.meant, ())):
        out = tmp_path / f"{folder.name}.png"
        result = run("qwen-cache", "ground", "--image", photo, "--model", folder, "--out", out, *small, *options)
        assert result.code == 0, result.stderr
        masks.append(np.asarray(Image.open(out)).astype(int))
    assert abs(masks[0] - masks[1]).max() <= 1


def test_captions_need_another_model(tmp_path: Path, bare: Path, model: Path, saved: Saving) -> None:
    """No `lm_head` is read from the file."""
    Image.new("RGB", (64, 64)).save(tmp_path / "photo.png")
    options = ("--model", bare, "--set", f"model.text_encoder={saved('bf16').file}")
    options += ("--set", "data.allow_no_control=true")
    result = run("qwen-cache", "caption", tmp_path, *options)
    refused(result, "the single file of a text encoder writes no captions", "→ name another model with --captioner")
    assert run("qwen-cache", "caption", tmp_path, *options, "--captioner", model, "--dry-run").code == 0


def test_a_server_has_its_own(tmp_path: Path, pairs: Path) -> None:
    options = ("--at", "http://127.0.0.1:9", "--text-encoder", tmp_path / "a.safetensors")
    refused(run("qwen-cache", "build", pairs, *options), "--at does not go with --text-encoder")
