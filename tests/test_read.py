"""Reading a cache: by position, by key, in order; without copying; with stock readers; and the same in v1 and v2."""

from __future__ import annotations

import gc
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import webdataset

from qwen_cache import FormatError, QwenCacheError, open_cache

from .support.paths import ROOT

Built = Callable[..., Path]
EXAMPLES = ROOT / "schemas" / "examples" / "valid"


@pytest.fixture(params=["v2", "v1"])
def shards(request: pytest.FixtureRequest, built: Built) -> Path:
    return built("edit-plus", ("--format", request.param))


def test_position_key_and_order_agree(shards: Path) -> None:
    cache = open_cache(shards)
    assert len(cache) == 4
    assert [sample.name for sample in cache] == ["cat", "china", "cup", "flower"]
    for i, sample in enumerate(cache):
        assert cache[sample.key].name == cache[i].name == cache[i - len(cache)].name == sample.name
    with pytest.raises(IndexError, match="sample 4 of 4"):
        cache[4]
    with pytest.raises(KeyError, match="no sample with the key"):
        cache["0" * 32]
    with pytest.raises(KeyError, match="has no 'depth'; it has image_latents"):
        cache[0]["depth"]


def test_shapes_follow_from_img_shapes(shards: Path) -> None:
    for sample in open_cache(shards):
        tokens = [t * h * w for t, h, w in sample.img_shapes]
        assert sample["image_latents"].shape == (tokens[0], 64)
        assert sample["control_latents"].shape == (sum(tokens[1:]), 64)
        assert len(tokens) == (3 if sample.name == "cat" else 2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_stock_webdataset_and_safetensors_read_the_same_bytes(shards: Path) -> None:
    """The independent reference: stock libraries, without the index."""
    cache = open_cache(shards)
    urls = [str(path) for path in sorted(shards.glob("*.tar"))]
    found = {item["__key__"]: item for item in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)}
    gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored
    assert found.keys() == {sample.key for sample in cache}
    for sample in cache:
        item = found[sample.key]
        metadata = json.loads(item["json"])
        assert (metadata["key"], metadata["prompt"]) == (sample.key, sample.prompt)
        stored = safetensors.torch.load(item["safetensors"])
        assert stored.keys() == sample.row.meta.tensors.keys()
        for name, tensor in stored.items():
            assert torch.equal(tensor, sample.stored(name)), name


def test_tensors_are_views_of_the_shard_on_64_byte_boundaries(shards: Path) -> None:
    cache = open_cache(shards)
    for sample in cache:
        assert sample["image_latents"].data_ptr() == sample["image_latents"].data_ptr()
        assert sample.row.entry.data % 64 == 0
        assert sample["image_latents"].data_ptr() % 64 == 0


def test_v1_and_v2_have_the_same_values(built: Built) -> None:
    """The empty prompt is stored whole in v1, without its shared prefix in v2; pixels against 16-pixel units.

    v1 has no edit masks, so there the sample with one is the sample without, which is another.
    """
    one, two = open_cache(built("edit-plus", ("--format", "v1"))), open_cache(built("edit-plus", ("--format", "v2")))
    same = {sample.name: sample.key == two[i].key for i, sample in enumerate(one)}
    assert same == {"cat": True, "china": True, "cup": False, "flower": True}
    for a, b in zip(one, two, strict=True):
        assert (a.name, a.prompt, a.img_shapes) == (b.name, b.prompt, b.img_shapes)
        for name in a.tensors():
            assert torch.equal(a[name], b[name]), name
        assert b.row.meta.prefix_length > 0
        assert a.stored("empty_prompt_embeds").shape[0] == b["empty_prompt_embeds"].shape[0]
        assert b.stored("empty_prompt_embeds").shape[0] == a["empty_prompt_embeds"].shape[0] - b.row.meta.prefix_length


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_numpy_arrays_have_the_bits_of_the_torch_tensors(version: str) -> None:
    """Every dtype of the format, compressed or not, and the empty prompt with the prefix that v2 stores once."""
    seen = set()
    for sample in open_cache(EXAMPLES / f"cache.{version}"):
        for name, tensor in sample.tensors().items():
            array = sample.numpy(name)
            seen.add(str(array.dtype))
            assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{array.dtype}", array.shape), name
            assert array.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes(), name
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
    assert seen == {"bfloat16"} | ({"float16", "float32", "uint8"} if version == "v2" else set())


def test_numpy_arrays_are_views_of_the_shard(shards: Path) -> None:
    sample = open_cache(shards)[0]
    assert sample.numpy("image_latents").ctypes.data == sample["image_latents"].data_ptr()
    with pytest.raises(KeyError, match="has no 'depth'; it has image_latents"):
        sample.numpy("depth")


def test_edit_mask_is_the_edited_fraction_of_each_token(built: Built) -> None:
    """The mask covers the left half of the cup; one column of tokens may be cut by its border."""
    cup = next(sample for sample in open_cache(built("edit-plus")) if sample.name == "cup")
    _, h, w = cup.img_shapes[0]
    mask = cup["edit_mask"].view(h, w)
    assert torch.equal(mask[:, : w // 2 - 1], torch.ones(h, w // 2 - 1))
    assert torch.equal(mask[:, w // 2 + 1 :], torch.zeros(h, w - w // 2 - 1))
    assert mask.mean() == pytest.approx(0.5, abs=0.01)


def test_a_cache_pickles_without_its_open_files(built: Built) -> None:
    cache = open_cache(built("edit-plus"))
    before = cache[0]["image_latents"]
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(again[0]["image_latents"], before)


def test_changed_bytes_are_refused_when_they_are_read(built: Built, tmp_path: Path) -> None:
    shards = copy(built("edit-plus"), tmp_path)
    sample = open_cache(shards)[0]
    offset = sample.row.entry.tensor_offsets()["prompt_embeds"] + 5
    flip(shards / sample.row.shard, offset)
    damaged = open_cache(shards)[0]
    damaged["image_latents"]
    for read in (damaged.__getitem__, damaged.numpy):
        with pytest.raises(
            FormatError, match=r"prompt_embeds of sample .* does not have the bytes that were written .*\[F14\]"
        ):
            read("prompt_embeds")


def test_without_torch_a_tensor_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = open_cache(EXAMPLES / "cache.v2")[0]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(QwenCacheError) as refused:
        sample["image_latents"]
    assert str(refused.value) == (
        "sample['image_latents'] is a torch tensor, and torch is not installed\n"
        "  → use sample.numpy('image_latents'), or pip install 'qwen-cache[build]'"
    )
    assert sample.numpy("image_latents").shape == (6, 64)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_shard_cut_off_between_samples_is_refused_where_stock_webdataset_sees_fewer(
    built: Built, tmp_path: Path
) -> None:
    shards = copy(built("edit-plus"), tmp_path)
    last = max((sample.row for sample in open_cache(shards)), key=lambda row: row.entry.offset)
    with open(shards / last.shard, "r+b") as file:
        file.truncate(last.entry.offset)
    found = list(webdataset.WebDataset([str(shards / last.shard)], shardshuffle=False))
    gc.collect()  # webdataset leaves its files to the garbage collector, which warns: here, where it is ignored
    assert len(found) == 3
    with pytest.raises(FormatError, match="reaches beyond its shard"):
        [sample.tensors() for sample in open_cache(shards)]


def test_not_a_cache(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"no cache.json here.*\[F1\]"):
        open_cache(tmp_path)


def test_an_unknown_recipe_names_the_known_ones(built: Built) -> None:
    with pytest.raises(QwenCacheError, match=r"no recipe 'other' here \(expected default\)"):
        open_cache(built("edit-plus"), recipe="other")


def copy(cache: Path, folder: Path) -> Path:
    """A copy that may be damaged."""
    import shutil

    return Path(shutil.copytree(cache, folder / "copy"))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
