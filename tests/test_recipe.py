"""Recipes stay what they were, so that no cache is encoded again; a cache keeps its own where both give the same.

The ids below are those of caches that exist: equal files and settings gave them at commit 2cd11aa.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.encode.builder import recipe_of_build
from qwen_cache.encode.recipe import PATCH_EMBEDDING, as_cached, for_any_device, make_recipe
from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe, parse_manifest
from qwen_cache.models import folder as model_folder
from qwen_cache.models.family import PipelineName
from qwen_cache.models.folder import ENCODER_PARTS, ModelFolder, fingerprint, vae_encoder_fingerprint
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import ValidationConfig, WeightedCache
from qwen_cache.storage import remembered
from qwen_train.data.samples import Mixture
from qwen_train.data.validation_cache import check_validation_cache

from .support.caches import build, contents, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes

Configuration = tuple[PipelineName, list[str]]
ON_CPU, ON_GPU = "cache.text_device=cpu", "cache.text_device=cuda:1"
MORE = ["cache.text_quantization=int8", "data.condition_image_size=147456", "data.edit_mask=diff"]
IDS: dict[str, tuple[Configuration, str]] = {
    "a GPU": (("QwenImageEditPipeline", [ON_GPU]), "fee56b68620540fa91d946a91cb8a999"),
    "float32 on a CPU": (
        ("QwenImageEditPlusPipeline", [ON_CPU, "cache.dtype=float32"]),
        "8ac4657bb4955c3b78999bd64e2e7945",
    ),
    "a model without images on a CPU": (("QwenImagePipeline", [ON_CPU]), "b55ba16a98f5c164cfa2641bd495c492"),
    "Qwen-Image-2.1 on two GPUs": (
        ("QwenImage21Pipeline", ["cache.text_device=cuda:0,cuda:1"]),
        "438e087273e66a01dd05c432fe788e87",
    ),
    "many settings": (
        ("QwenImageEditPlusPipeline", ["cache.text_device=cuda", "data.vae_image_size=262144", *MORE]),
        "de068a3581e09f4604f3904f861246d4",
    ),
}
ON_A_CPU: dict[str, Configuration] = {
    "an edit": ("QwenImageEditPipeline", [ON_CPU]),
    "an edit, by default": ("QwenImageEditPlusPipeline", []),
    "a CPU beside a GPU": ("QwenImageEditPlusPipeline", ["cache.text_device=cuda:0, cpu"]),
    "Qwen-Image-2.1": ("QwenImage21Pipeline", [ON_CPU]),
}


@pytest.fixture
def recipe_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The recipe of a configuration with equal files, on a machine without an accelerator."""
    monkeypatch.setattr("qwen_cache.encode.recipe.device_names", lambda: ["cpu"])
    for part in ENCODER_PARTS:
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text("{}", encoding="utf-8")

    def make(configuration: Configuration, **options: bool) -> dict[str, Any]:
        pipeline, settings = configuration
        return make_recipe(ModelFolder("model", tmp_path, pipeline), load_config(None, settings), **options)

    return make


# ---- patch embedding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IDS)
def test_the_recipes_of_existing_caches_keep_their_ids(name: str, recipe_of: Callable[..., dict[str, Any]]) -> None:
    configuration, expected = IDS[name]
    assert recipe_id(recipe_of(configuration)) == expected


@pytest.mark.parametrize("name", ON_A_CPU)
def test_images_in_bfloat16_on_a_cpu_have_another_recipe_than_before(
    name: str, recipe_of: Callable[..., dict[str, Any]]
) -> None:
    pipeline, settings = ON_A_CPU[name]
    found, before = recipe_of((pipeline, settings)), recipe_of((pipeline, [ON_GPU]))
    assert found == {**before, "patch_embedding": "product"}
    assert recipe_id(found) != recipe_id(before)


def test_an_accelerator_and_a_cluster_keep_the_recipe(
    recipe_of: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is the accelerator that is here; a cluster has those of its nodes, and this process may have none."""
    configuration = ON_A_CPU["an edit, by default"]
    elsewhere = recipe_of(configuration, here=False)
    monkeypatch.setattr("qwen_cache.encode.recipe.device_names", lambda: ["cuda:0", "cpu"])
    assert recipe_of(configuration) == elsewhere == for_any_device(recipe_of(ON_A_CPU["a CPU beside a GPU"]))


def test_an_accelerator_adds_to_the_cache_of_a_cpu_and_a_cpu_not_to_one_that_may_be_wrong(
    recipe_of: Callable[..., dict[str, Any]],
) -> None:
    cpu, gpu = recipe_of(ON_A_CPU["an edit"]), recipe_of(IDS["a GPU"][0])
    assert as_cached(gpu, cpu, {}) == cpu
    assert as_cached(cpu, gpu, {}) == cpu != gpu
    others = recipe_of(IDS["float32 on a CPU"][0]), recipe_of(IDS["many settings"][0])
    assert [as_cached(it, cpu, {}) for it in others] == list(others)


def test_a_build_says_why_images_are_encoded_again_and_another_device_does_not_do_it(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes], monkeypatch: Any
) -> None:
    """A cache of a GPU, built again on a CPU; and one of a CPU on a machine with a GPU."""
    out, model, bfloat16 = tmp_path / "shards", tiny_model("edit-plus"), ("--dtype", "bfloat16")
    with monkeypatch.context() as machine:
        machine.setattr("qwen_cache.encode.recipe.device_names", lambda: ["cuda:0", "cpu"])
        assert build(pairs, out, model, *bfloat16).code == 0
    result = build(pairs, out, model, *bfloat16)
    why = "images encoded in bfloat16 on a CPU, which earlier versions may have done wrongly"
    assert (result.code, f"because the recipe changed: {why}\n" in result.stderr) == (2, True)
    assert build(pairs, out, model, *bfloat16, "--replace").code == 0
    assert PATCH_EMBEDDING in json.loads((out / "cache.json").read_bytes())["recipes"]["default"]["recipe"]
    monkeypatch.setattr("qwen_cache.encode.recipe.device_names", lambda: ["cuda:0", "cpu"])
    assert plan(pairs, out, model, *bfloat16)["to_encode"] == 0


# ---- the encoder of the VAE ------------------------------------------------------------------------------------------

WEIGHTS = "diffusion_pytorch_model.safetensors"
OLD_RECIPE = {
    "encoder_version": 2,
    "pipeline": "QwenImageEditPipeline",
    "dtype": "bfloat16",
    "vae": "1317c33a60b311671f74e011632274a2",
    "vae_image_size": 1048576,
    "condition_image_size": 1048576,
    "text_encoder": "4fd6b42cd08806a7a636efd7dda5b1ba",
    "processor": "eab563408c3fbbb4fe0fd404579a6f65",
    "picture_template": "<|vision_start|><|image_pad|><|vision_end|>",
    "drop_idx": 64,
    "image_backend": "pil",
    "positions": "mrope-3d",
}
"""The recipe of a cache that commit 2cd11aa made of the model of `old_model`, without its long template."""
OLD_ID = "a5dc6ec1b2423fe6f44eb859dd209ad2"


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model that may be changed."""
    return Path(shutil.copytree(tiny_model("edit-plus"), tmp_path / "model"))


@pytest.fixture
def vae(model: Path) -> Path:
    return model / "vae"


def write_weights(path: Path, decoder: bytes) -> None:
    """Four tensors, of which two are the decoder's."""
    names = ("decoder.weight", "encoder.weight", "post_quant_conv.bias", "quant_conv.bias")
    places = [{"dtype": "BF16", "shape": [2], "data_offsets": [4 * i, 4 * i + 4]} for i in range(4)]
    header = json.dumps(dict(zip(names, places, strict=True))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + decoder + bytes(range(4, 16)))


def old_model(path: Path) -> ModelFolder:
    for part in ENCODER_PARTS:
        (path / part).mkdir(parents=True)
        (path / part / "config.json").write_text("{}", encoding="utf-8")
    write_weights(path / "vae" / WEIGHTS, bytes(range(4)))
    return ModelFolder("model", path, "QwenImageEditPipeline")


def change(vae: Path, changes: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a VAE."""
    tensors = load_file(vae / WEIGHTS)
    changes(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, vae / WEIGHTS)


def swap_decoder(vae: Path) -> None:
    change(vae, lambda tensors: tensors["decoder.conv_in.weight"].mul_(2))


def change_encoder(vae: Path) -> None:
    change(vae, lambda tensors: tensors["encoder.conv_in.weight"].mul_(2))


def change_post_quant_conv(vae: Path) -> None:
    change(vae, lambda tensors: tensors["post_quant_conv.bias"].add_(1))


def drop_the_decoder(vae: Path) -> None:
    change(vae, lambda them: [them.pop(name) for name in list(them) if name.startswith("decoder.")])


def write_two_files(vae: Path) -> None:
    """With their index, and names in another order."""
    tensors = load_file(vae / WEIGHTS)
    (vae / WEIGHTS).unlink()
    names = sorted(tensors, reverse=True)
    files = {"diffusion_pytorch_model-b.safetensors": names[::2], "diffusion_pytorch_model-a.safetensors": names[1::2]}
    for file, of_file in files.items():
        save_file({name: tensors[name] for name in of_file}, vae / file)
    places = {name: file for file, of_file in files.items() for name in of_file}
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (vae / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")


def configure(vae: Path, **values: Any) -> None:
    config = json.loads((vae / "config.json").read_text(encoding="utf-8"))
    (vae / "config.json").write_text(json.dumps({**config, **values}), encoding="utf-8")


def save_by_another_version(vae: Path) -> None:
    configure(vae, _diffusers_version="9.9", _name_or_path="elsewhere")


def add_weights_that_nobody_reads(vae: Path) -> None:
    save_file({"encoder.conv_in.weight": torch.zeros(1)}, vae / "diffusion_pytorch_model.fp16.safetensors")


def change_a_dtype(vae: Path) -> None:
    change(vae, lambda them: them.update({"encoder.conv_in.bias": them["encoder.conv_in.bias"].double()}))


def change_a_shape(vae: Path) -> None:
    change(vae, lambda them: them.update({"encoder.conv_in.bias": them["encoder.conv_in.bias"][None]}))


def rename_a_tensor(vae: Path) -> None:
    change(vae, lambda tensors: tensors.update({"encoder.conv_in.bios": tensors.pop("encoder.conv_in.bias")}))


def change_the_quantization(vae: Path) -> None:
    change(vae, lambda tensors: tensors["quant_conv.bias"].add_(1))


def change_a_value(vae: Path) -> None:
    configure(vae, latents_mean=[0.5] * 16)


def recomputed(vae: Path) -> str:
    """The hash of a VAE in one file, as FORMAT.md describes it, by libraries alone."""
    tensors = {}
    for name, tensor in load_file(vae / WEIGHTS).items():
        if not name.startswith(("decoder.", "post_quant_conv.")):
            dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
            digest = xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            tensors[name] = [dtype, list(tensor.shape), digest]
    config = json.loads((vae / "config.json").read_text(encoding="utf-8"))
    value = {"config": {name: it for name, it in config.items() if name[0] != "_"}, "tensors": tensors}
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())


def test_the_hash_of_an_encoder_is_that_of_the_specification(vae: Path) -> None:
    assert vae_encoder_fingerprint(vae) == recomputed(vae)


SAME = [swap_decoder, change_post_quant_conv, drop_the_decoder, write_two_files, save_by_another_version]
SAME += [add_weights_that_nobody_reads]
OTHER = [change_encoder, change_a_dtype, change_a_shape, rename_a_tensor, change_the_quantization, change_a_value]


@pytest.mark.parametrize("changes", [*SAME, *OTHER], ids=lambda it: it.__name__)
def test_the_encoder_and_nothing_else_decides_its_hash(changes: Callable[[Path], None], vae: Path) -> None:
    whole, encoder = fingerprint([vae]), vae_encoder_fingerprint(vae)
    changes(vae)
    assert fingerprint([vae]) != whole
    assert (vae_encoder_fingerprint(vae) == encoder) == (changes in SAME)


def test_a_vae_that_cannot_be_read_is_refused_and_a_missing_one_has_no_hash(
    vae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its hash it would be another VAE, in silence."""
    for failing in ("_hash_tensor", "read_header"):
        with monkeypatch.context() as patch:
            patch.setattr(model_folder, failing, Mock(side_effect=OSError(errno.EIO, "Input/output error")))
            with pytest.raises(OSError, match=f"Input/output error: '{vae / WEIGHTS}'"):
                vae_encoder_fingerprint(vae)
    (vae / WEIGHTS).write_bytes(b"neither weights")
    with pytest.raises(ModelError, match=WEIGHTS):
        vae_encoder_fingerprint(vae)
    (vae / WEIGHTS).unlink()
    assert vae_encoder_fingerprint(vae) == ""


def test_an_unchanged_vae_is_read_once(vae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remembered, "SETTLED_NS", -(10**13))
    reads, read = [], model_folder.read_header
    monkeypatch.setattr(model_folder, "read_header", lambda path: reads.append(path) or read(path))
    first = vae_encoder_fingerprint(vae)
    assert [vae_encoder_fingerprint(vae) for _ in range(2)] == [first] * 2
    assert len(reads) == 1
    change_encoder(vae)
    assert vae_encoder_fingerprint(vae) != first
    assert len(reads) == 2


# ---- caches and another decoder --------------------------------------------------------------------------------------


def forget(cache: Path) -> None:
    """The cache as a version wrote it that did not know the hash of the encoder."""
    path = cache / "cache.json"
    manifest = parse_manifest(path.read_bytes())
    ignorable = {name: value for name, value in manifest.ignorable.items() if name != "vae_encoders"}
    path.write_bytes(Manifest(2, manifest.recipes, manifest.index, manifest.shards, {}, ignorable).to_bytes())


def is_cached(pairs: Path, out: Path, model: Path, *options: str) -> bool:
    found = plan(pairs, out, model, *options)
    assert (found["to_encode"] == 0) == (not found["refused"])
    return bool(found["to_encode"] == 0)


def test_the_cache_of_an_older_version_keeps_its_recipe(tmp_path: Path) -> None:
    """Its VAE's hash is that of the folder; of another decoder nothing is known."""
    model, out = old_model(tmp_path / "model"), tmp_path / "shards"
    config = load_config(None, ["cache.text_device=cuda"], cache__path=str(out))
    recipe = {**OLD_RECIPE, "template": model.template.frame}
    assert recipe_id(recipe) == OLD_ID
    out.mkdir()
    (out / "cache.json").write_bytes(
        Manifest(2, {"default": Recipe(recipe, 0, "0" * 32)}, IndexFile(0, 0, "0" * 32), ()).to_bytes()
    )
    assert recipe_of_build(config, model)[0] == recipe
    write_weights(model.component("vae") / WEIGHTS, bytes(4))
    found, encoders = recipe_of_build(config, model)
    assert found == {**recipe, "vae": fingerprint([model.component("vae")])} != recipe
    known = Manifest(2, {"default": Recipe(recipe, 0, "0" * 32)}, IndexFile(0, 0, "0" * 32), ())
    known = known.with_vae_encoders({recipe["vae"]: encoders[found["vae"]], "f" * 32: "0" * 32})
    assert known.vae_encoders == {recipe["vae"]: encoders[found["vae"]]}  # of its own recipes
    (out / "cache.json").write_bytes(known.to_bytes())
    assert recipe_of_build(config, model) == (recipe, known.vae_encoders)


def test_a_cache_stays_with_another_decoder_and_is_built_again_with_another_encoder(
    pairs: Path, tmp_path: Path, model: Path, vae: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    before, whole = contents(out), fingerprint([vae])
    manifest = json.loads(before["cache.json"])
    assert manifest["recipes"]["default"]["recipe"]["vae"] == whole
    assert manifest["vae_encoders"] == {"must_understand": False, whole: recomputed(vae)}
    swap_decoder(vae)
    assert is_cached(pairs, out, model)
    assert build(pairs, out, model).code == 0
    assert contents(out) == before
    caption = next(iter(sorted(pairs.rglob("*.txt"))))
    caption.write_text("another prompt", encoding="utf-8")
    assert build(pairs, out, model).code == 0
    assert [len(lanes.encoded) for lanes in fast] == [4, 1]
    assert json.loads((out / "cache.json").read_bytes())["vae_encoders"] == manifest["vae_encoders"]
    assert run("qwen-cache", "verify", out).code == 0
    change_encoder(vae)
    result = build(pairs, out, model)
    assert (result.code, "because the recipe changed: another VAE\n" in result.stderr) == (2, True)


def test_a_build_adds_the_hash_to_the_cache_of_an_older_version(
    pairs: Path, tmp_path: Path, model: Path, vae: Path, fast: list[FakeLanes]
) -> None:
    """Also one with nothing to encode."""
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    expected = json.loads((out / "cache.json").read_bytes())["vae_encoders"]
    forget(out)
    shutil.copytree(out, tmp_path / "older")
    assert is_cached(pairs, out, model)
    result = build(pairs, out, model)
    assert (result.code, "nothing to do" in result.stderr) == (0, True)
    assert json.loads((out / "cache.json").read_bytes())["vae_encoders"] == expected
    assert run("qwen-cache", "verify", out).code == 0
    swap_decoder(vae)
    assert is_cached(pairs, out, model)
    assert not is_cached(pairs, tmp_path / "older", model)


def test_other_commands_keep_the_hash_and_use_it(
    pairs: Path, tmp_path: Path, model: Path, vae: Path, fast: list[FakeLanes]
) -> None:
    """Copying from another cache, merging, migrating there and back."""
    first, second, v1 = (tmp_path / name for name in ("first", "second", "v1"))
    assert build(pairs, first, model, "--set", "cache.thumbnails=false").code == 0
    expected = parse_manifest((first / "cache.json").read_bytes()).vae_encoders
    swap_decoder(vae)
    assert plan(pairs, second, model, "--reuse", str(first))["to_encode"] == 0
    assert build(pairs, second, model, "--reuse", str(first)).code == 0
    assert len(fast) == 1
    assert run("qwen-cache", "merge", first, second, "--out", tmp_path / "merged").code == 0
    for mask in pairs.rglob("*_mask.png"):  # which v1 cannot hold
        mask.unlink()
    assert build(pairs, tmp_path / "unmasked", model, "--reuse", str(first)).code == 0
    assert run("qwen-cache", "migrate", "v2", "v1", tmp_path / "unmasked", "--out", v1).code == 0
    for it in (second, tmp_path / "merged", tmp_path / "unmasked", v1):
        assert parse_manifest((it / "cache.json").read_bytes()).vae_encoders == expected


def test_caches_of_two_decoders_are_trained_together(
    pairs: Path, tmp_path: Path, model: Path, vae: Path, fast: list[FakeLanes]
) -> None:
    """And one is the validation cache of the other; not where it is not known that only the decoders differ."""
    folders = tmp_path / "first", tmp_path / "second"
    for out in folders:
        assert build(pairs, out, model).code == 0
        swap_decoder(vae)
    first, second = map(open_cache, folders)
    assert first.recipe.recipe["vae"] != second.recipe.recipe["vae"]
    entries = [WeightedCache(path=str(out)) for out in folders]
    assert len(Mixture([first, second], entries)) == len(first) + len(second)
    check_validation_cache(Mixture.of(first), Mixture.of(second), ValidationConfig())
    forget(folders[1])
    second = open_cache(folders[1])
    with pytest.raises(ConfigError, match="these caches cannot be trained together: they differ in vae"):
        Mixture([first, second], entries)
    with pytest.raises(
        ConfigError, match="the validation cache does not fit the cache in training: they differ in vae"
    ):
        check_validation_cache(Mixture.of(first), Mixture.of(second), ValidationConfig())


def test_a_spot_check_takes_another_decoder(built: Callable[..., Path], pairs: Path, model: Path, vae: Path) -> None:
    arguments = ("verify", built("edit-plus"), "--source", pairs, "--model", model, "--re-encode", "1")
    swap_decoder(vae)
    result = run("qwen-cache", *arguments)
    assert result.code == 0, result.stderr
    change_encoder(vae)
    refused(run("qwen-cache", *arguments), "do not give the recipe of the cache (found another VAE)")
