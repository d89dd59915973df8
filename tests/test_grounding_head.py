"""The mask head learns from attention where a phrase points, and nothing where there is nothing to learn."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import interpolate

from qwen_cache.errors import ModelError
from qwen_cache.experimental.masks import (
    METADATA_KEY,
    HeadMetadata,
    MaskHead,
    Sample,
    TrainSettings,
    iou,
    load_head,
    mask_loss,
    mean_iou,
    predict_mask,
    save_head,
    train_head,
)

CHANNELS, GRID = 32, (8, 12)
NAMED, OTHER, SINKS = slice(0, 4), slice(4, 10), slice(10, 16)
"""Channels that attend to the object that the phrase names, to another one, to the first cell; the rest is noise."""
SETTINGS = TrainSettings(steps=150, batch_size=16, lr=3e-3, base=8, size=32)
METADATA = HeadMetadata(encoder="Qwen2.5-VL with weights 0123")


def attention(objects: torch.Tensor, named: int, random: torch.Generator) -> torch.Tensor:
    """The attention of a phrase in a scene of `objects`, `[K, h, w]`; no channel sees all of its object."""
    rows, columns = GRID
    stack = -torch.rand(CHANNELS, rows, columns, generator=random).clamp(min=1e-6).log()
    other = (named + 1 + int(torch.randint(len(objects) - 1, (), generator=random))) % len(objects)
    for channels, seen in ((NAMED, objects[named]), (OTHER, objects[other])):
        found = torch.rand(stack[channels].shape, generator=random) < 0.6
        stack[channels] += 4 * seen * found
    stack[SINKS, 0, 0] += 200
    return stack / stack.sum((-2, -1), keepdim=True)


def scenes(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The stack of a phrase, the stack of another object's phrase, and the mask of the first one's object."""
    random = torch.Generator().manual_seed(seed)
    made = []
    corners = [(row, column) for row in (0, 4) for column in (0, 4, 8)]
    for _ in range(count):
        objects = torch.zeros(3, *GRID)
        for shape, place in zip(objects, torch.randperm(len(corners), generator=random).tolist(), strict=False):
            (row, column), (height, width) = corners[place], torch.randint(2, 5, (2,), generator=random).tolist()
            shape[row : row + height, column : column + width] = 1
        made.append((attention(objects, 0, random), attention(objects, 1, random), objects[0]))
    return made


def quietly(step: int, loss: float) -> None:
    pass


@cache
def trained(seed: int) -> tuple[MaskHead, float]:
    right = [(stack, mask) for stack, _, mask in scenes(256, seed)]
    return train_head(right, [(stack, mask) for stack, _, mask in scenes(64, 100 + seed)], SETTINGS, seed, quietly)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_which_heads_to_listen_to(seed: int) -> None:
    head, found = trained(seed)
    assert found >= 0.45
    assert mean_iou(head, [(other, mask) for _, other, mask in scenes(64, 100 + seed)]) <= 0.15


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_nothing_from_masks_of_other_scenes(seed: int) -> None:
    made = scenes(256, seed)
    permuted = [(stack, made[index - 1][2]) for index, (stack, _, _) in enumerate(made)]
    assert train_head(permuted, [(s, m) for s, _, m in scenes(64, 100 + seed)], SETTINGS, seed, quietly)[1] <= 0.10


def test_the_size_of_the_published_head() -> None:
    weights = sum(weight.numel() for weight in MaskHead(784).parameters())
    assert weights == pytest.approx(7.63e6, rel=0.03)
    assert sum(weight.numel() for weight in MaskHead(576).parameters()) == pytest.approx(7.51e6, rel=0.03)


@pytest.mark.parametrize(
    ("grid", "expected"),
    [((8, 12), (43, 64)), ((12, 8), (64, 43)), ((14, 14), (64, 64)), ((70, 30), (70, 30)), ((1, 64), (1, 64))],
)
def test_the_longer_side_becomes_the_size_and_is_never_reduced(
    grid: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert MaskHead(4, base=2)(torch.rand(2, 4, *grid)).shape == (2, 1, *expected)


def test_how_much_a_head_attends_makes_no_difference() -> None:
    """Channels are compared by where they attend: each may be scaled, and an empty one is no division by zero."""
    torch.manual_seed(0)
    head, stack = MaskHead(CHANNELS, base=4), torch.rand(1, CHANNELS, *GRID) * 1e-3
    scales = torch.logspace(-3, 3, CHANNELS)[:, None, None]
    torch.testing.assert_close(head(stack * scales), head(stack), rtol=1e-4, atol=1e-4)
    assert head(stack * (scales > 1)).isfinite().all()


def test_begins_near_the_prior() -> None:
    torch.manual_seed(0)
    mask = MaskHead(CHANNELS)(torch.rand(4, CHANNELS, *GRID)).sigmoid()
    assert 0.02 < mask.mean().item() < 0.2


def test_loss_by_hand() -> None:
    """Four pixels, one of them edited: binary cross-entropy and dice as their definitions give them."""
    p = torch.tensor([0.8, 0.4, 0.1, 0.1])
    cross_entropy = -(p[0].log() + (1 - p[1:]).log().sum()) / 4
    dice = 1 - (2 * 0.8 + 1) / (1.4 + 1 + 1)
    target = torch.zeros(1, 1, 4, 4)
    target[..., :2, :2] = 1  # averaged over 2×2, it is one pixel
    torch.testing.assert_close(mask_loss(torch.logit(p).view(1, 1, 2, 2), target), cross_entropy + dice)


def test_dice_weighs_every_sample_equally() -> None:
    logits, target = torch.randn(2, 1, 4, 4), torch.zeros(2, 1, 4, 4)
    target[0, :, 0, 0], target[1] = 1, 1
    singly = (mask_loss(logits[:1], target[:1]) + mask_loss(logits[1:], target[1:])) / 2
    torch.testing.assert_close(mask_loss(logits, target), singly)


def test_iou() -> None:
    one = torch.tensor([[0.9, 0.6, 0.1, 0.0]])
    assert iou(one, torch.tensor([[1.0, 0.0, 1.0, 0.0]])) == pytest.approx(1 / 3)
    assert iou(one * 0, one * 0) == 1
    assert iou(one, one * 0) == 0


def test_the_prediction_is_the_head_on_the_cells_that_are_asked_for() -> None:
    torch.manual_seed(0)
    head, stack = MaskHead(CHANNELS, base=4, size=48), torch.rand(CHANNELS, *GRID)
    at_its_own_size = head(stack[None]).sigmoid().detach()
    torch.testing.assert_close(predict_mask(head, stack, (32, 48)), at_its_own_size[0, 0])
    coarse = predict_mask(head, stack, (8, 12))
    assert coarse.shape == (8, 12)
    assert not coarse.requires_grad
    torch.testing.assert_close(coarse, interpolate(at_its_own_size, (8, 12), mode="area")[0, 0], atol=0.05, rtol=0)


@pytest.mark.slow
def test_half_precision_stacks_of_several_grids_train_and_every_step_is_reported() -> None:
    random = torch.Generator().manual_seed(0)
    grids = [(8, 12), (12, 8), (8, 8), (8, 12), (12, 8)]
    samples: list[Sample] = [
        (torch.rand(4, *grid, generator=random).half(), torch.ones(2 * grid[0], 2 * grid[1])) for grid in grids
    ]
    losses: list[float] = []
    settings = replace(SETTINGS, steps=60, batch_size=2, base=4, lr=2e-2)
    _, found = train_head(samples, samples, settings, 0, lambda step, loss: losses.append(loss))
    assert len(losses) == 60
    assert losses[-1] < losses[0] / 2
    assert found > 0.9


@pytest.mark.slow
def test_draws_single_cells() -> None:
    """Masks without any shape: only the connections around the narrow part of the U-Net see where each cell is."""
    random = torch.Generator().manual_seed(0)
    masks = (torch.rand(64, 16, 16, generator=random) < 0.3).float()
    samples: list[Sample] = [(torch.stack([mask, torch.ones_like(mask)]), mask) for mask in masks]
    settings = replace(SETTINGS, steps=60, base=4, size=16, lr=2e-2)
    assert train_head(samples[16:], samples[:16], settings, 0, quietly)[1] > 0.8


@pytest.mark.slow
def test_the_seed_alone_decides() -> None:
    samples: list[Sample] = [(stack, mask) for stack, _, mask in scenes(24, 0)]
    settings = replace(SETTINGS, steps=4)

    def weights(seed: int, noise: int) -> list[torch.Tensor]:
        torch.manual_seed(noise)
        return list(train_head(samples, samples[:2], settings, seed, quietly)[0].state_dict().values())

    assert all(torch.equal(one, same) for one, same in zip(weights(1, 5), weights(1, 6), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights(1, 5), weights(2, 5), strict=True))
    state = torch.random.get_rng_state()
    train_head(samples, samples[:2], settings, 1, quietly)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's random numbers are the caller's


def test_a_saved_head_is_the_same_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = MaskHead(CHANNELS, base=8, size=32)
    save_head(head, tmp_path / "head.safetensors", METADATA)
    again, about = load_head(tmp_path / "head.safetensors")
    stack = scenes(1, 9)[0][0]
    assert about == METADATA
    assert (again.channels, again.base, again.size) == (CHANNELS, 8, 32)
    assert torch.equal(predict_mask(again, stack, GRID), predict_mask(head, stack, GRID))
    assert [path.name for path in tmp_path.iterdir()] == ["head.safetensors"]


def test_a_killed_save_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head.safetensors"
    save_head(MaskHead(4, base=2), path, METADATA)

    def killed(*paths: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_head(MaskHead(4, base=4), path, METADATA)
    assert load_head(path)[0].base == 2


def test_refuses_what_is_no_head(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    save_head(MaskHead(4, base=2), path, METADATA)
    weights, whole = load_file(path), path.read_bytes()
    text = json.dumps({"version": 1, "channels": 4, "base": 2, "size": 64, "encoder": ""})

    def refused(found: str) -> None:
        with pytest.raises(ModelError, match=f"head.safetensors: this is not a mask head.*{found}"):
            load_head(path)

    path.unlink()
    refused("No such file")
    path.write_bytes(pickle.dumps(weights))
    refused("found")
    path.write_bytes(whole[:-1])
    with pytest.raises(ModelError, match="this file was changed after it was written"):
        load_head(path)
    save_file(weights, path)
    refused("a safetensors file of something else")
    for broken, found in (
        (text.replace('"version": 1', '"version": 2'), "another version"),
        (text.replace('"base": 2', '"base": 3'), "size mismatch"),
        (text.replace('"base": 2', '"base": "2"'), "does not fit"),
        (text.replace(', "encoder": ""', ""), "encoder"),
        ("[]", "does not fit"),
        ("{", "does not fit"),
        (100_000 * "[", "it is nested more than 100 deep"),
    ):
        save_file(weights, path, {METADATA_KEY: broken})
        with pytest.raises(ModelError) as refusal:
            load_head(path)
        assert found in str(refusal.value)
    save_file(weights, path, {METADATA_KEY: text})
    load_head(path)


def test_refuses_the_stack_of_another_encoder() -> None:
    with pytest.raises(ModelError, match="expected 4 attention heads, found 6"):
        predict_mask(MaskHead(4, base=2), torch.rand(6, 8, 8), (8, 8))
