"""A damaged or hostile folder cannot touch files outside of it, hang a reader, or pass for a dataset.

`test_fuzz` changes bytes; here are the things that chance does not find.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from qwen_cache import FormatError, QwenCacheError, open_cache, webdataset
from qwen_cache.errors import RULES, ModelError
from qwen_cache.format import directory
from qwen_cache.format.identity import content_hash
from qwen_cache.format.shard import ShardWriter
from qwen_cache.format.verify import verify_cache

from .support.commands import run
from .support.paths import load_tool

examples: Any = load_tool("make_examples")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of EDIT and PLAIN."""
    examples.write_cache(tmp_path / "shards", 2, [examples.EDIT, examples.PLAIN], 1)
    return tmp_path / "shards"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of the user, outside of the cache."""
    path = tmp_path / "home" / "thesis.txt"
    path.parent.mkdir()
    path.write_text("years of work")
    return path


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """A call that blocks forever fails here."""

    def interrupt(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(300)  # also on a busy machine
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def rules(folder: Path) -> set[str]:
    return {fault.rule for fault in verify_cache(folder)}


# ---- links and pipes: the user's files -------------------------------------------------------------------------------


def test_gc_deletes_nothing_behind_a_link(cache: Path, victim: Path) -> None:
    (cache / ".replaced").symlink_to(victim.parent)
    with pytest.raises(QwenCacheError, match="symbolic link"):
        directory.collect_garbage(cache, dry_run=False)
    assert victim.exists()


@pytest.mark.parametrize("name", [".lock", ".cache.json.tmp"])
def test_nothing_is_written_through_a_link(name: str, cache: Path, victim: Path) -> None:
    (cache / name).symlink_to(victim)
    with pytest.raises(QwenCacheError, match="symbolic link"), directory.writing(cache):
        directory.write_durably(cache / "cache.json", (cache / "cache.json").read_bytes())
    assert victim.read_text() == "years of work"


@pytest.mark.parametrize("name", ["cache.json", "index.parquet"])
def test_a_pipe_in_place_of_a_file_is_refused(name: str, cache: Path) -> None:
    (cache / name).unlink()
    os.mkfifo(cache / name)
    with pytest.raises(FormatError):
        open_cache(cache)


@pytest.mark.parametrize("name", ["cache.json", "index.parquet"])
def test_a_folder_in_place_of_a_file_is_refused(name: str, cache: Path) -> None:
    (cache / name).unlink()
    (cache / name).mkdir()
    with pytest.raises(FormatError):
        open_cache(cache)
    with pytest.raises(FormatError):
        raise verify_cache(cache)[0]


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, link_to_a_device], ids=["a pipe", "a folder", "a device"])
def test_a_shard_that_is_no_file_is_refused(
    make: Callable[[Path], None], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are opened before they are judged, so that none is exchanged in between; and opening never waits."""
    shard = cache / examples.first_shard(cache)
    shard.unlink()
    make(shard)
    with pytest.raises(FormatError) as refused:
        open_cache(cache)[0].buffer("image_latents")
    assert str(refused.value).startswith(f"{shard}: not a regular file [F6]\n  → restore the shard")
    assert [str(fault) for fault in verify_cache(cache)] == [str(refused.value)]
    with pytest.raises(FormatError, match="not a regular file"):
        list(webdataset.open(cache))
    merged = run("qwen-cache", "merge", cache, "--out", tmp_path / "out")
    assert (merged.code, "not a regular file [F6]" in merged.stderr) == (2, True)


def test_a_shard_that_the_manifest_does_not_name_is_not_read(cache: Path) -> None:
    """Even if the index names it, and it is there (F17)."""
    other = cache / f"{'0' * 32}.tar"
    shutil.copy(cache / examples.first_shard(cache), other)
    examples.forge(cache, rows=lambda rows: rows[0].update(shard=other.name))
    with pytest.raises(FormatError) as refused:
        open_cache(cache)[0].buffer("image_latents")
    assert refused.value.fault == "the index names a shard that is not in the manifest [F6]"


def test_a_manifest_larger_than_any_is_not_parsed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open(cache / "cache.json", "r+b") as file:
        file.truncate(directory.MAX_MANIFEST + 1)
    with pytest.raises(FormatError) as refused:
        open_cache(cache)
    assert str(refused.value).startswith(f"{cache}/cache.json: the manifest is too large (expected at most 67108864")
    monkeypatch.setattr(directory, "MAX_MANIFEST", 100)
    with pytest.raises(QwenCacheError) as full:  # so none is written
        examples.write_cache(cache.parent / "many", 2, [examples.EDIT, examples.PLAIN], 1)
    many = f"{cache.parent}/many: too many shards for one cache (found 2)\n  → set a larger cache.shard_size"
    assert str(full.value) == many
    assert not (cache.parent / "many" / "cache.json").exists()


def test_metadata_of_more_than_a_megabyte_is_neither_read_nor_written(cache: Path) -> None:
    """A prompt has at most four bytes for each position of the encoder with the longest context."""
    examples.forge(cache, shard=examples.with_metadata(lambda text: text[:-1] + b" " * (1 << 20) + b"}"))
    [fault] = [fault for fault in verify_cache(cache) if fault.rule == "F9"]
    assert fault.what == "the metadata is too large"
    writer = ShardWriter(cache.parent / "open.tar", 2)
    long = examples.make("long", "x" * (1 << 20), (1, 1))
    with pytest.raises(FormatError) as refused:
        writer.add(long.meta, {})
    writer.close()
    assert "the metadata of a sample is too large (expected at most 1048576 bytes, found 104" in str(refused.value)
    assert refused.value.do == "shorten its prompt"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_a_file_that_only_has_the_name_of_a_shard_is_not_adopted(make: Callable[[Path], None], tmp_path: Path) -> None:
    make_folder = tmp_path / "shards"
    make_folder.mkdir()
    make(make_folder / f"{'0' * 32}.tar")
    examples.write_cache(make_folder, 2, [examples.EDIT], 1)
    assert len(open_cache(make_folder)) == 1


# ---- empty, and counts that lie --------------------------------------------------------------------------------------


def test_a_shard_of_no_bytes_is_refused_when_it_is_read(cache: Path) -> None:
    (cache / examples.first_shard(cache)).write_bytes(b"")
    with pytest.raises(FormatError):
        open_cache(cache)[0].buffer("image_latents")


def test_an_empty_shard_that_the_manifest_names_is_found(cache: Path) -> None:
    name = f"{content_hash(b'')}.tar"
    (cache / name).write_bytes(b"")
    shard = {"name": name, "samples": 0, "bytes": 0, "xxh3_128": content_hash(b"")}
    examples.forge(cache, manifest=lambda value: value["shards"].append(shard))
    assert rules(cache) == {"F8"}


def test_the_samples_of_each_shard_are_counted(cache: Path) -> None:
    def lie(value: dict[str, Any]) -> None:
        value["shards"][0]["samples"], value["shards"][1]["samples"] = 2, 0

    examples.forge(cache, manifest=lie)
    assert rules(cache) == {"F4"}


def test_the_bytes_of_the_index_are_checked(cache: Path) -> None:
    examples.forge(cache, manifest=lambda value: value["index"].update(bytes=value["index"]["bytes"] + 1))
    assert rules(cache) == {"F7"}
    with pytest.raises(FormatError, match="F7"):
        open_cache(cache)


def test_two_names_for_one_recipe_count_twice(cache: Path) -> None:
    def lie(value: dict[str, Any]) -> None:
        value["recipes"]["again"] = value["recipes"]["default"]
        value["index"]["samples"] = 4
        value["shards"][0]["samples"] = 3

    examples.forge(cache, manifest=lie)
    assert rules(cache) == {"F7"}


def test_a_row_of_another_recipe_is_refused_by_readers(cache: Path) -> None:
    """A mixture of two recipes must not be trained on, whatever the manifest counts."""
    other = replace(examples.PLAIN.meta, recipe=examples.digest("another recipe"))
    examples.forge(cache, rows=lambda rows: rows[1].update(recipe=other.recipe, key=other.key))
    with pytest.raises(FormatError, match="samples of recipe"):
        open_cache(cache)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_a_negative_prefix_is_refused_by_readers(cache: Path) -> None:
    """Such a length would silently cut rows off the empty prompt."""
    examples.forge(cache, rows=lambda rows: rows[0].update(prefix_length=-1))
    with pytest.raises(FormatError):
        open_cache(cache)[0]["empty_prompt_embeds"]


@pytest.mark.parametrize("shapes", [[[1, -1, -1], [1, 1, 2]], [[-1, 1, -1], [1, 1, 2]], [[1, 1, 1], [1, -1, -2]]])
def test_sizes_of_images_that_multiply_to_the_right_count_are_not_enough(shapes: list[Any], cache: Path) -> None:
    examples.forge(cache, rows=lambda rows: rows[0].update(img_shapes=shapes))
    with pytest.raises(FormatError):
        open_cache(cache)[0]


@pytest.mark.parametrize("shape", [[-7, -8], [0, 8]])
def test_a_shape_that_no_tensor_has_is_refused_by_readers(shape: list[int], cache: Path) -> None:
    def lie(rows: list[dict[str, Any]]) -> None:
        rows[0]["prompt_embeds"]["shape"], rows[0]["text_length"] = shape, shape[0]

    examples.forge(cache, rows=lie)
    with pytest.raises(FormatError):
        open_cache(cache)[0]["prompt_embeds"]


@pytest.mark.parametrize("value", [-0.5, 1.5, 1e30])
def test_an_edit_mask_beyond_0_to_1_is_found(value: float, tmp_path: Path) -> None:
    examples.write_cache(tmp_path / "shards", 2, [examples.with_number("edit_mask", value)], 1)
    assert rules(tmp_path / "shards") == {"F15"}


def test_numbers_of_thousands_of_digits_are_refused(cache: Path) -> None:
    from qwen_cache.format.sample import parse_sample

    value = json.loads(examples.EDIT.meta.to_bytes(2))
    value["img_shapes"][0] = [1, 10**4000, 10**4000]
    with pytest.raises(FormatError):
        parse_sample(json.dumps(value).encode(), "a sample")


# ---- safetensors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b'{"a":' * 100_000,
        lambda text: text.replace(b"{", b'{"image_latents":1,', 1),
        lambda text: text.replace(b"[1,64]", b"[true,64.0]"),
        lambda text: text + b" " * 8,
        lambda text: text.decode().encode("utf-16"),
    ],
    ids=["a tower", "a key twice", "numbers that are none", "data on 8 bytes", "utf-16"],
)
def test_a_safetensors_header_that_stock_readers_read_differently_is_found(
    change: Callable[[bytes], bytes], cache: Path
) -> None:
    examples.forge(cache, shard=examples.with_header(change))
    assert rules(cache) <= {"F9"}
    assert rules(cache)


# ---- fixes and stray files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_fix_of_every_rule_is_a_command(name: str) -> None:
    assert "`qwen-cache " in RULES[name].fix or "pip install" in RULES[name].fix


def test_a_tar_that_the_manifest_does_not_name_is_found_whatever_it_is_called(cache: Path) -> None:
    """Stock webdataset would read it with `shards/*.tar`."""
    shutil.copy(cache / examples.first_shard(cache), cache / "more.tar")
    assert rules(cache) == {"F17"}


# ---- a model's folder ------------------------------------------------------------------------------------------------

OWN_CODE = """
from pathlib import Path
Path({mark!r}).touch()
class Own:
    pass
"""


def change(file: Path, **settings: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **settings}), encoding="utf-8")


def test_a_models_folder_runs_no_code_and_asks_nobody(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks on the terminal whether to run a tokenizer's own code, and takes attention from config.json."""
    from qwen_cache.models.encoders import load_processor, load_text_encoder
    from qwen_cache.models.folder import open_model

    mark = tmp_path / "executed"
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("edit-plus"), folder)
    for name in ("processor", "text_encoder"):
        (folder / name / "own.py").write_text(OWN_CODE.format(mark=str(mark)), encoding="utf-8")
    model = open_model(str(folder), ["text_encoder", "tokenizer", "processor"])
    images = {"auto_map": {"AutoImageProcessor": "own.Own", "AutoProcessor": "own.Own"}, "processor_class": "Own"}
    change(folder / "processor" / "preprocessor_config.json", **images)
    load_processor(model)
    own = {"auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}, "tokenizer_class": "Own"}
    change(folder / "processor" / "tokenizer_config.json", **own)
    with pytest.raises(ModelError) as caught:
        load_processor(model)
    assert str(caught.value).startswith(f"{folder / 'processor'}: processor cannot be loaded: ")
    config: dict[str, Any] = {"auto_map": {"AutoModel": "own.Own"}, "architectures": ["Own"]}
    inside = json.loads((folder / "text_encoder" / "config.json").read_text())["vision_config"]
    inside |= {"_attn_implementation": "own/kernel", "to_dict": 3}
    config |= {"attn_implementation": "own/kernel", "vision_config": inside, "transformers_weights": "x.safetensors"}
    change(folder / "text_encoder" / "config.json", **config)
    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", lambda *_, **__: ({}, {}))  # what it does after EIO
    encoder = load_text_encoder(model.component("text_encoder"), torch.float32)
    assert encoder.config.text_config.hidden_size < 1000  # not the 7B model with random weights
    assert encoder.config._attn_implementation == encoder.config.vision_config._attn_implementation == "sdpa"
    assert not mark.exists()


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The settings with another value at a dotted name."""
    first, _, rest = path.partition(".")
    return settings | {first: changed(settings[first], rest, value) if rest else value}


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_the_memory_plan_follows_no_code_that_a_configuration_names(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    """transformers would ask the hub for the kernel, and import it."""
    from qwen_cache.encode.components import TextWork
    from qwen_cache.encode.simulated import text_lane

    settings = json.loads((tiny_model("edit-plus") / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    work = TextWork(((28, 28),), 5)
    for kernel in ("own/kernel", "flash_attention_2", 3):
        inner = {part: settings[part] | {name: kernel} for part in ("text_config", "vision_config")}
        named = settings | inner | {name: kernel}
        found = text_lane(json.dumps(named), work, torch.float32)
        assert found == text_lane(json.dumps(settings), work, torch.float32)


def linked(folder: Path) -> Path:
    """The folder as the hub's cache has it: every file is a link to one with another name."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    return folder


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))  # its whole path may be too long for a socket


PARTS = ["vae", "text_encoder", "tokenizer", "processor", "transformer", "scheduler"]
KINDS_OF_FILES = {"a pipe": os.mkfifo, "a device": link_to_a_device, "a socket": make_socket}


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
def test_a_file_of_a_model_that_is_no_file_is_refused(
    kind: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it would be hashed or loaded. Links to files are followed."""
    from qwen_cache.models.folder import check_files, fingerprint, open_model, read_config
    from qwen_cache.models.loading import load_whole

    monkeypatch.chdir(tmp_path)
    original = tiny_model("edit-plus")
    folder = linked(Path(shutil.copytree(original, tmp_path / "model")))
    open_model(str(folder), PARTS)
    assert fingerprint([folder / "vae"]) == fingerprint([original / "vae"])
    for path in sorted(path for part in PARTS for path in (folder / part).iterdir()):
        file = os.readlink(path)
        path.unlink()
        KINDS_OF_FILES[kind](path)
        told = f"{path}: this file cannot be read: not a regular file\n  → download this component again"
        reading: list[Callable[[], object]] = [
            lambda: open_model(str(folder), PARTS),
            lambda path=path: check_files(path.parent),
            lambda path=path: fingerprint([path.parent], (path.name,)),
            lambda path=path: load_whole(object, path.parent),
            *([lambda path=path: read_config(path)] if path.suffix == ".json" else []),
        ]
        for read in reading:
            with pytest.raises(ModelError) as refused:
                read()
            assert str(refused.value) == told
        path.unlink()
        path.symlink_to(file)
    (folder / "vae" / "config.json").unlink()
    KINDS_OF_FILES[kind](folder / "vae" / "config.json")
    for program, command in (("qwen-cache", "build"), ("qwen-train", "predict")):
        result = run(program, command, *(["--prompt", "x"] if command == "predict" else [folder]), "--model", folder)
        assert (result.code, "vae/config.json: this file cannot be read: not a regular file" in result.stderr) == (
            2,
            True,
        )


def test_texts_of_a_size_that_no_model_has_are_not_read(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    from qwen_cache.models.folder import MAX_TEXT, check_files, read_config

    folder = Path(shutil.copytree(tiny_model("edit-plus") / "vae", tmp_path / "vae"))
    with open(folder / "config.json", "r+b") as file:
        file.truncate(1 << 40)
    for read in (lambda: read_config(folder / "config.json"), lambda: check_files(folder)):
        with pytest.raises(ModelError) as refused:
            read()
        assert f"config.json: no file of this kind is so long (expected at most {MAX_TEXT} bytes" in str(refused.value)


def test_an_adapter_beside_the_weights_is_not_loaded_with_them(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers imports a module that its settings name."""
    from qwen_cache.models.encoders import load_text_encoder

    folder = Path(shutil.copytree(tiny_model("edit-plus") / "text_encoder", tmp_path / "text_encoder"))
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        load_text_encoder(folder, torch.float32)
    told = "adapter_config.json: an adapter is beside the weights, and would be loaded with them\n  → merge it into"
    assert told in str(refused.value)


INDEXES = {
    "a list": ("[]", "list indices must be integers"),
    "nothing": ("{}", "no 'weight_map'"),
    "no metadata": ('{"weight_map": {}}', "no 'metadata'"),
    "another map": ('{"metadata": {}, "weight_map": []}', "weight_map and metadata are objects"),
    "lists of files": ('{"metadata": {}, "weight_map": {"a": ["b"]}}', "['b'] is no .safetensors file of its folder"),
    "a file elsewhere": ('{"metadata": {}, "weight_map": {"a": "../b.safetensors"}}', "'../b.safetensors' is no"),
    "a pickle": ('{"metadata": {}, "weight_map": {"a": "b.bin"}}', "'b.bin' is no .safetensors file of its folder"),
    "a tensor twice": ('{"metadata": {}, "weight_map": {"a": "1", "a": "2"}}', 'the key "a" is there twice'),
    "a tower": ("[" * 100_000, "it is nested more than 100 deep"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_an_index_of_shards_that_is_none_is_refused(
    case: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from qwen_cache.models.folder import open_model

    text, found = INDEXES[case]
    folder = Path(shutil.copytree(tiny_model("edit-plus"), tmp_path / "model"))
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    index = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(text, encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        open_model(str(folder), ["transformer"])
    assert str(refused.value).startswith(f"{index}: this is no index of shards (expected an object with metadata and")
    assert f"found {found}" in str(refused.value)


TRANSFORMER, VAE, TEXT = "transformer/config.json", "vae/config.json", "text_encoder/config.json"
SCHEDULER = "scheduler/scheduler_config.json"
IMPOSSIBLE: list[tuple[str, str, Any, str]] = [
    (
        TRANSFORMER,
        "num_attention_heads",
        "3",
        "num_attention_heads has a value that no model has (expected an int",
    ),
    (
        TRANSFORMER,
        "num_layers",
        None,
        "num_layers has a value that no model has (expected an integer, found None)",
    ),
    (TRANSFORMER, "num_layers", -1, "num_layers has a value that no model has (expected greater than or equal to 1"),
    (TRANSFORMER, "num_layers", 10**6, "(expected less than or equal to 1000, found 1000000)"),
    (TRANSFORMER, "num_attention_heads", True, "(expected an integer, found True)"),
    (TRANSFORMER, "attention_head_dim", 1 << 30, "(expected less than or equal to 1024, found 1073741824)"),
    (TRANSFORMER, "axes_dims_rope", [1 << 20] * 3, "axes_dims_rope.0 has a value that no model has"),
    (TRANSFORMER, "axes_dims_rope", [4, 14, 12], "axes_dims_rope: must add up to attention_head_dim, 32"),
    (
        TRANSFORMER,
        "in_channels",
        0,
        "in_channels has a value that no model has (expected greater than or equal to 1, found 0)",
    ),
    (TRANSFORMER, "patch_size", 0, "patch_size has a value that no model has"),
    (TRANSFORMER, "patch_size", 4, "out_channels: times patch_size² must be 64"),
    (TRANSFORMER, "to_dict", 3, "the key to_dict would take the place of a method"),
    (VAE, "__class__", "x", "the key __class__ would take the place of a method"),
    (TRANSFORMER, "use_additional_t_cond", True, "use_additional_t_cond: must be false"),
    (TRANSFORMER, "quantization_config", [], "quantization_config has a value that no model has (expected an object"),
    (TRANSFORMER, "quantization_config", {"bytes_per_weight": "x"}, "quantization_config.bytes_per_weight has a value"),
    (VAE, "temperal_downsample", None, "temperal_downsample has a value that no model has (expected a list"),
    (VAE, "temperal_downsample", [True], "temperal_downsample: must have 3 values, one less than dim_mult"),
    (VAE, "num_res_blocks", 10**6, "num_res_blocks has a value that no model has"),
    (VAE, "latents_mean", [1.0], "latents_mean has a value that no model has (expected List should have at least 16"),
    (VAE, "latents_mean", [math.nan] * 16, "latents_mean.0 has a value that no model has (expected a finite number"),
    (VAE, "latents_std", [0.0] * 16, "latents_std.0 has a value that no model has (expected greater than 0"),
    (TEXT, "text_config", {"num_hidden_layers": 4}, "text_config.hidden_size is missing"),
    (TEXT, "text_config.num_hidden_layers", 10**6, "text_config.num_hidden_layers has a value that no model has"),
    (TEXT, "text_config.hidden_size", 1 << 30, "text_config.hidden_size has a value that no model has"),
    (TEXT, "text_config.hidden_size", 66, "text_config.hidden_size: must be a multiple of num_attention_heads, 4"),
    (TEXT, "text_config.rope_parameters.mrope_section", [2, 3, 4], "mrope_section: must add up to 8, half of a head"),
    (TEXT, "text_config.rope_parameters", None, "text_config.mrope_section: must add up to 8, half of a head"),
    (TEXT, "vision_config.depth", 10**6, "vision_config.depth has a value that no model has"),
    (TEXT, "vision_config.out_hidden_size", 32, "vision_config.out_hidden_size: must be the width of the language"),
    (SCHEDULER, "max_image_seq_len", 256, "max_image_seq_len: must be above base_image_seq_len, 256"),
    (SCHEDULER, "max_shift", 1e5, "max_shift: is too far from base_shift for the lengths between them"),
    (SCHEDULER, "shift_terminal", "low", "shift_terminal has a value that no model has"),
]


@pytest.mark.parametrize(
    ("file", "key", "value", "told"), IMPOSSIBLE, ids=[f"{it[1]}={it[2]}"[:40] for it in IMPOSSIBLE]
)
def test_a_value_that_no_model_has_is_refused_before_one_is_made(
    file: str, key: str, value: Any, told: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Some were a traceback, some minutes of silence, and some changed every latent without a word."""
    from qwen_cache.models.folder import read_config

    settings = json.loads((tiny_model("edit-plus") / file).read_text(encoding="utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert read_config(path) == settings
    path.write_text(json.dumps(changed(settings, key, value)), encoding="utf-8")
    with pytest.raises(ModelError) as refused:
        read_config(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert told in str(refused.value)
    assert str(refused.value).endswith("\n  → restore the file from the model's repository")


def test_a_key_twice_in_a_configuration_counts_where_it_is_read(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    from qwen_cache.models.folder import read_config

    text = (tiny_model("edit-plus") / TEXT).read_text(encoding="utf-8")
    path = tmp_path / "config.json"
    path.write_text(text.replace('"architectures"', '"architectures": ["Other"], "architectures"'), encoding="utf-8")
    assert read_config(path) == json.loads(text)
    path.write_text(
        text.replace('"num_hidden_layers"', '"num_hidden_layers": 2, "num_hidden_layers"'), encoding="utf-8"
    )
    with pytest.raises(
        ModelError, match=r"config.json: the key num_hidden_layers is there twice\n  → restore the file"
    ):
        read_config(path)


def test_every_way_to_the_values_goes_through_the_check(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The scheduler is refused whatever class it names; the image processor when their processor is made."""
    from qwen_cache.models.encoders import load_processor
    from qwen_cache.models.folder import open_model

    folder = Path(shutil.copytree(tiny_model("edit-plus"), tmp_path / "model"))
    model = open_model(str(folder), PARTS)
    change(folder / SCHEDULER, _class_name="Other", base_shift=None)
    with pytest.raises(ModelError, match=r"scheduler_config.json: base_shift has a value that no model has"):
        _ = model.scheduler_config
    images = folder / "processor" / "preprocessor_config.json"
    for patch_size, told in (
        (0, "patch_size has a value that no model has"),
        (16, "patch_size is not the text encoder's"),
    ):
        change(images, patch_size=patch_size)
        with pytest.raises(ModelError) as refused:
            load_processor(model)
        assert str(refused.value).startswith(f"{folder / 'processor'}: {told}")
    (folder / "processor" / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": 3}}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"processor cannot be loaded: "):
        load_processor(model)
