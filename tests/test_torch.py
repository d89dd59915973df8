"""The loaders for other trainers: `qwen_cache.torch`, `qwen_cache.webdataset`.

The judges are `open_cache`, padding by torch, an uninterrupted loader, and a plain diffusers training loop.
"""

from __future__ import annotations

import gc
import itertools
import json
import pickle
import shutil
from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest
import torch
import webdataset as wds
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from qwen_cache import open_cache, webdataset
from qwen_cache import torch as shared_batches
from qwen_cache.errors import ChecksumError, ConfigError, QwenCacheError, ShardError
from qwen_cache.torch import TENSORS, CacheBatches, CacheDataset, collate

from .support.caches import build
from .support.server import BUCKET
from .support.sources import write_pairs

Item = dict[str, Any]


@pytest.fixture(scope="module")
def cache(built: Callable[..., Path]) -> Path:
    return built("edit-plus")


def assert_equal(found: Item, expected: Item) -> None:
    """All values; `DataLoader` makes lists of tuples."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
        else:
            assert json.dumps(found[name]) == json.dumps(value)


def judged(cache: Path) -> list[Item]:
    """The items that `open_cache` gives."""
    items = []
    for sample in open_cache(cache):
        tensors = {name: sample[name] for name in TENSORS if name in sample}
        described = {"key": sample.key, "name": sample.name, "prompt": sample.prompt}
        items.append({**described, "img_shapes": sample.img_shapes, **tensors})
    return items


# ---- map-style -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_each_process_loads_its_part_by_any_number_of_workers(cache: Path, workers: int) -> None:
    expected = {item["key"]: item for item in judged(cache)}
    dataset, found = CacheDataset(cache), []
    for rank in range(2):
        sampler = DistributedSampler(dataset, 2, rank)
        loader = DataLoader(dataset, 2, sampler=sampler, num_workers=workers, collate_fn=list)
        found += [item for items in loader for item in items]
    assert {item["key"] for item in found} == expected.keys()
    for item in found:
        assert_equal(item, expected[item["key"]])
    assert_equal(pickle.loads(pickle.dumps(dataset))[1], dataset[1])


def test_a_batch_is_the_padded_items(cache: Path) -> None:
    items = judged(cache)
    batch = collate(items)
    images = [torch.cat([item[name] for name in TENSORS[:2] if name in item]) for item in items]
    assert torch.equal(batch["latents"], pad_sequence(images, batch_first=True))
    assert torch.equal(batch["prompt_embeds"], pad_sequence([i["prompt_embeds"] for i in items], batch_first=True))
    assert batch["latents_mask"].sum(1).tolist() == [len(image) for image in images]
    assert batch["is_target"].sum(1).tolist() == [len(item["image_latents"]) for item in items]
    assert batch["prompt_embeds_mask"].sum(1).tolist() == [len(item["prompt_embeds"]) for item in items]
    assert batch["img_shapes"] == [[list(shape) for shape in item["img_shapes"]] for item in items]
    masks = [item.get("edit_mask", torch.ones(len(item["image_latents"]))) for item in items]
    assert any("edit_mask" in item for item in items)
    assert torch.equal(batch["edit_mask"][:, : max(map(len, masks))], pad_sequence(masks, batch_first=True))
    with pytest.raises(ConfigError, match="without image_latents cannot be trained"):
        collate([{name: value for name, value in items[0].items() if name != "image_latents"}])


def test_a_hugging_face_dataset_reads_tensors_when_they_are_used(cache: Path) -> None:
    dataset = CacheDataset(cache).to_hf_dataset()
    assert isinstance(dataset, datasets.Dataset)
    expected = judged(cache)
    assert len(dataset) == len(expected)
    for item, row in zip(expected, dataset.select(range(len(expected))), strict=True):
        assert_equal({name: value for name, value in row.items() if value is not None}, item)
    shuffled = dataset.shuffle(seed=1).filter(lambda name: name != expected[0]["name"], input_columns="name")
    assert {row["key"] for row in shuffled} == {item["key"] for item in expected[1:]}


# ---- batches ---------------------------------------------------------------------------------------------------------


def batches(cache: Path, count: int, workers: int = 0, **options: Any) -> list[Item]:
    loader = DataLoader(CacheBatches(cache, **options), batch_size=None, num_workers=workers)
    return list(itertools.islice(loader, count))


def test_an_epoch_has_each_sample_once_and_workers_change_nothing(cache: Path) -> None:
    items = {item["key"]: item for item in judged(cache)}
    options: dict[str, Any] = {"batch_size": 2, "epochs": 2, "seed": 3}
    found = batches(cache, 1000, **options)
    keys = [key for batch in found for key in batch["keys"]]
    assert sorted(keys[: len(items)]) == sorted(keys[len(items) :]) == sorted(items)
    assert keys[: len(items)] != keys[len(items) :]
    for batch in found:
        expected = collate([items[key] for key in batch["keys"]])
        assert_equal({name: batch[name] for name in expected}, expected)
    for batch, expected in zip(batches(cache, 1000, workers=2, **options), found, strict=True):
        assert_equal(batch, expected)


def test_processes_train_different_samples(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = len(open_cache(cache))
    monkeypatch.setenv("WORLD_SIZE", "2")
    keys = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        found = batches(cache, 1000, epochs=2)
        keys.append([key for batch in found for key in batch["keys"]])
        assert [batch["consumed_samples"] for batch in found] == list(range(2, 2 * samples + 1, 2))
    assert len(keys[0]) == len(keys[1]) == samples
    assert sorted(keys[0] + keys[1]) == sorted(2 * [item["key"] for item in judged(cache)])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # in torchdata
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_continues_where_another_stopped(cache: Path, workers: int) -> None:
    """By torchdata's loader, and by the position in a batch."""
    options: dict[str, Any] = {"batch_size": 2, "caption_dropout": 0.5}
    expected = batches(cache, 8, **options)

    def loader() -> Any:
        return StatefulDataLoader(CacheBatches(cache, **options), batch_size=None, num_workers=workers)

    first = loader()
    seen = list(itertools.islice(first, 3))
    second = loader()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())) if not workers else first.state_dict())
    for batch, other in zip(itertools.islice(second, 5), expected[len(seen) :], strict=True):
        assert_equal(batch, other)
    third = CacheBatches(cache, **options)
    third.load_state_dict({"consumed_samples": expected[2]["consumed_samples"]})
    continued = DataLoader(third, batch_size=None, num_workers=workers)
    for batch, other in zip(itertools.islice(continued, 5), expected[3:], strict=True):
        assert_equal(batch, other)


def test_dropped_captions_are_the_empty_prompt_of_the_same_images(cache: Path) -> None:
    items = {item["key"]: item for item in judged(cache)}
    found = batches(cache, len(items), caption_dropout=1.0)
    for batch in found:
        assert torch.equal(batch["prompt_embeds"][0], items[batch["keys"][0]]["empty_prompt_embeds"])
    half = CacheBatches(cache, caption_dropout=0.5, seed=5, epochs=6)
    empty = {batch["keys"][0]: batch["prompt_embeds"].shape for batch in found}
    dropped = [batch["prompt_embeds"].shape == empty[batch["keys"][0]] for batch in half]
    positions = [half.plan.batch(number)[0] for number in range(24)]
    always = [1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 14, 15, 17, 18]  # so that a loader of an earlier version is continued
    assert sorted(position for position, each in zip(positions, dropped, strict=True) if each) == always


class Numbered(Dataset[Item]):
    """Batches as they are, of growing sizes or of one, written by `collate`'s memory."""

    def __init__(self, count: int, *, growing: bool = False) -> None:
        self.count, self.growing = count, growing

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Item:
        rows = 1000 * (1 + number * self.growing)
        batch = shared_batches.empty_batch({"values": ((rows, 8), torch.float32), "mask": ((rows,), torch.bool)})
        batch["values"].fill_(number)
        batch["mask"].fill_(number % 2)
        batch["number"], batch["own"] = number, torch.tensor([number])
        return batch


def numbered(dataset: Numbered, workers: int = 1, **options: Any) -> Any:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def assert_numbered(batch: Item, number: int) -> None:
    assert (batch["number"], batch["own"].tolist()) == (number, [number])
    assert bool((batch["values"] == number).all())
    assert bool((batch["mask"] == bool(number % 2)).all())


@pytest.mark.parametrize("growing", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_use_the_memory_of_batches_that_are_gone(workers: int, growing: bool) -> None:
    """And of no other: a batch, or a view of it, stays as it is while it is kept."""
    kept = {}
    loader = numbered(Numbered(25, growing=growing), workers)
    for number, batch in enumerate(loader):
        assert_numbered(batch, number)
        assert type(batch) is dict
        if number % 5 == 0:
            kept[number] = batch["values"][3:5, 1:]
    addresses = {view.data_ptr() for view in kept.values()}
    assert len(addresses) == len(kept) == 5
    for number, view in kept.items():
        assert bool((view == number).all())
    del batch, loader
    gc.collect()
    assert shared_batches._blocks == {}, "blocks end with their worker"
    assert all(bool((view == number).all()) for number, view in kept.items())


def every_second(batch: Item) -> Item | None:
    return batch if batch["number"] % 2 else None


@pytest.mark.parametrize("change", [None, every_second])
def test_as_many_blocks_are_made_as_are_used_at_once(change: Callable[[Item], Item | None] | None) -> None:
    """Also if a worker drops batches."""
    found = [batch["values"].data_ptr() for batch in numbered(Numbered(60), collate_fn=change) if batch]
    assert len(set(found)) <= 6, "two prefetched, one in use, and those before and after them"


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_a_batch_that_a_worker_sends_again_arrives_again(order: tuple[int, ...]) -> None:
    """And the others stay, when the memory of the first is used again; whichever is sent first."""

    def sent(batch: Item) -> list[Item]:
        each = [batch, copy(batch), dict(batch)]
        return [each[i] for i in order]

    others = []
    for number, (first, *rest) in enumerate(numbered(Numbered(12), collate_fn=sent)):
        assert_numbered(first, number)
        others.append(rest)
    for number, rest in enumerate(others):
        for each in rest:
            assert_numbered(each, number)


@pytest.mark.slow
def test_memory_is_used_again_between_spawned_processes() -> None:
    loader = numbered(Numbered(20), multiprocessing_context="spawn")
    kept = list(loader)
    for number, batch in enumerate(kept):
        assert_numbered(batch, number)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "no such rank"),
        ({"caption_dropout": 2}, "caption_dropout is a fraction"),
        ({"max_tokens": 10}, "alone exceeds train.max_tokens"),
        ({"recipe": "other"}, "no recipe 'other' here"),
    ],
)
def test_useless_settings_are_refused(cache: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(QwenCacheError, match=message):
        next(iter(CacheBatches(cache, **options)))


# ---- webdataset ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, built: Any, tiny_model: Callable[[str], Path]) -> Path:
    """A cache of several compressed shards with two recipes, of which the default one is read."""
    folder = tmp_path_factory.mktemp("webdataset")
    source, options = (
        write_pairs(folder / "data"),
        ("--set", "cache.shard_size=80kB", "--set", "cache.compression=zstd"),
    )
    assert build(source, folder / "shards", tiny_model("edit-plus"), *options).code == 0
    other = ("--set", "cache.recipe=small", "--set", "data.vae_image_size=9216")
    assert build(source, folder / "shards", tiny_model("edit-plus"), *options, *other).code == 0
    return folder / "shards"


def streamed(dataset: Iterable[Item]) -> dict[str, Item]:
    items = [{name: value for name, value in item.items() if not name.startswith("__")} for item in dataset]
    found = {item["key"]: item for item in items}
    assert len(found) == len(items)
    return found


def expected_of(cache: Path) -> dict[str, Item]:
    expected = {}
    for sample in open_cache(cache, recipe="default"):
        tensors = {name: sample[name] for name in TENSORS if name in sample}
        expected[sample.key] = {
            "key": sample.key,
            "prompt": sample.prompt,
            "img_shapes": sample.img_shapes,
            **tensors,
        }
    return expected


def test_webdataset_streams_the_samples_of_a_recipe(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decompressed, with the empty prompt's prefix, each by one worker; shuffled by the seed and the epoch."""
    expected = expected_of(shards)
    dataset = webdataset.open(shards, recipe="default")
    assert isinstance(dataset, wds.WebDataset)
    found = streamed(wds.WebLoader(dataset, batch_size=None, num_workers=2))
    assert found.keys() == expected.keys()
    for key, item in expected.items():
        assert_equal(found[key], item)
    (batch,) = dataset.batched(100, collation_fn=collate)
    assert batch["latents"].shape[0] == len(expected)

    def order(seed: int, epochs: int = 1) -> list[list[str]]:
        shuffled = webdataset.open(shards, recipe="default", shuffle=10, seed=seed)
        return [[item["key"] for item in shuffled] for _ in range(epochs)]

    first, second = order(1, 2)
    assert sorted(first) == sorted(second) == sorted(expected)
    assert (order(1), first != second) == ([first], True)
    assert order(2) != order(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    parts = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(list(streamed(webdataset.open(shards, recipe="default"))))
    assert all(parts)
    assert sorted(parts[0] + parts[1]) == sorted(expected), "each by one process"


@pytest.mark.slow
def test_webdataset_streams_from_a_bucket(shards: Path, s3: tuple[str, int]) -> None:
    url = f"s3://{BUCKET}/webdataset"
    fsspec.filesystem("s3").put(str(shards), url, recursive=True)
    expected = expected_of(shards)
    found = streamed(wds.WebLoader(webdataset.open(url, recipe="default"), batch_size=None, num_workers=2))
    assert found.keys() == expected.keys()
    for key, item in expected.items():
        assert_equal(found[key], item)


def test_a_damaged_shard_ends_the_stream(cache: Path, tmp_path: Path) -> None:
    """A changed bit of a tensor or a header, and an end that is missing: tar files may end anywhere."""
    copy = Path(shutil.copytree(cache, tmp_path / "shards"))
    (shard,) = copy.glob("*.tar")
    whole, row = shard.read_bytes(), open_cache(cache)[0].row
    place = row.entry.data
    shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ChecksumError, match="does not have the bytes that were written"):
        list(webdataset.open(copy))
    place = open_cache(cache)[1].row.entry.offset + 3
    shard.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(ShardError, match="the shard ends early"):
        list(webdataset.open(copy))
    shard.write_bytes(whole[: row.entry.offset + row.entry.length])
    with pytest.raises(ShardError, match="the shard has another size"):
        list(webdataset.open(copy))


# ---- a plain training loop -------------------------------------------------------------------------------------------


class PlainTrainer:
    """LoRA training as in diffusers' example for Qwen-Image: the stock transformer, batch 1."""

    def __init__(self, model: Path) -> None:
        torch.manual_seed(0)
        self.transformer = QwenImageTransformer2DModel.from_pretrained(model / "transformer", torch_dtype=torch.float32)
        self.transformer.requires_grad_(False)
        self.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_k", "to_q", "to_v", "to_out.0"]))
        trained = [parameter for parameter in self.transformer.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model / "scheduler")

    def step(self, batch: Item) -> float:
        latents, prompt_embeds = batch["latents"].float(), batch["prompt_embeds"].float()
        is_target = batch["is_target"][0]
        torch.manual_seed(int(batch["keys"][0][:8], 16))
        noise = torch.randn_like(latents)
        sigma = self.scheduler.sigmas[int(torch.randint(1000, ()))]
        noisy = torch.where(is_target[:, None], (1 - sigma) * latents + sigma * noise, latents)
        predicted = self.transformer(
            hidden_states=noisy,
            timestep=sigma.expand(1),
            encoder_hidden_states=prompt_embeds,
            encoder_hidden_states_mask=batch["prompt_embeds_mask"],
            img_shapes=batch["img_shapes"],
            return_dict=False,
        )[0]
        loss = (predicted - (noise - latents))[:, is_target].square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def test_a_plain_training_loop_trains_from_each_loader(cache: Path, tiny_model: Callable[[str], Path]) -> None:
    """In the same order, so that losses and weights are the same."""
    items = [item for item in judged(cache) if len(item["img_shapes"]) > 1][:3]
    keys = [item["key"] for item in items]
    dataset = CacheDataset(cache)
    positions = [[item["key"] for item in judged(cache)].index(key) for key in keys]
    hub = dataset.to_hf_dataset().select(positions)
    loaders: dict[str, Iterable[Item]] = {
        "items": [collate([item]) for item in items],
        "DataLoader": DataLoader(dataset, 1, sampler=positions, collate_fn=collate),
        "datasets": DataLoader(hub, 1, collate_fn=collate),
        "webdataset": sorted(
            (b for b in webdataset.open(cache).batched(1, collation_fn=collate) if b["keys"][0] in keys),
            key=lambda batch: keys.index(batch["keys"][0]),
        ),
        "CacheBatches": sorted(
            (b for b in CacheBatches(cache, epochs=1) if b["keys"][0] in keys),
            key=lambda batch: keys.index(batch["keys"][0]),
        ),
    }
    losses = {}
    for name, loader in loaders.items():
        trainer = PlainTrainer(tiny_model("edit-plus"))
        losses[name] = [trainer.step(batch) for batch in loader]
    for name, found in losses.items():
        assert found == pytest.approx(losses["items"], rel=1e-5), name
    assert len(losses["items"]) == 3
