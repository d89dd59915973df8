"""The identity of a sample: xxh3-128 over content and recipe.

A key covers everything that the tensors of the sample depend on, so stale tensors have another key, and equal work is
never done twice. It covers nothing else: not a file's name, folder or date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

HASH_PATTERN = re.compile(r"[0-9a-f]{32}")
HASHED_BLOCK = 1 << 19  # bytes; source and copy fit a second-level cache of 1 MiB, where hashing is nearly free
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def content_hash(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 of `data`, as 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def copy_hashed(source: memoryview, target: memoryview) -> str:
    """Copy bytes and return the xxh3-128 of the copy; it costs little more than the copy, as memory is read once."""
    if source.nbytes != target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not fit {target.nbytes}")
    state = xxhash.xxh3_128()
    for begin in range(0, source.nbytes, HASHED_BLOCK):
        block = target[begin : begin + HASHED_BLOCK]
        block[:] = source[begin : begin + HASHED_BLOCK]
        state.update(block)
    return state.hexdigest()


def canonical_json(value: Any) -> bytes:
    """The canonical bytes of a JSON value: sorted keys, no spaces, UTF-8, no NaN."""
    return _canonical.encode(value).encode("utf-8")


def recipe_id(recipe: dict[str, Any]) -> str:
    """The hash of a recipe: everything except the content that the tensors depend on."""
    return content_hash(canonical_json(recipe))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The content hashes of the files that a sample was made from, and a seed to generate with."""

    target: str | None
    """None for an image to generate."""
    controls: tuple[str, ...]
    mask: str | None
    seed: int | None = None
    """The seed of the noise to generate the image from, if the source has one."""
    rejected: str | None = None
    """The image that is worse than the target, if the source has one."""

    def to_json(self) -> dict[str, Any]:
        optional = {"seed": self.seed, "rejected": self.rejected}
        given = {name: value for name, value in optional.items() if value is not None}
        return {"target": self.target, "controls": list(self.controls), "mask": self.mask, **given}


Phrase = tuple[tuple[int, int], ...]
"""The characters of a prompt that say where the edit is: spans `[from, to)`, in order."""


class Slider(NamedTuple):
    """The direction of a slider: a prompt with more of its attribute than the sample's own, and one with less."""

    positive: str
    negative: str


def sample_key(
    recipe: str,
    inputs: Inputs,
    prompt: str,
    img_shapes: Sequence[Sequence[int]],
    phrase: Phrase = (),
    rejected_shape: Sequence[int] | None = None,
    slider: Slider | None = None,
) -> str:
    """The key of a sample: content (target, controls in order, mask, prompt), sizes in tokens, and recipe id.

    The sizes are part of it because a recipe may make several samples of one content. A phrase, a seed, a rejected
    image and the direction of a slider are part of it if they are given.
    """
    value = {"recipe": recipe, "prompt": prompt, "img_shapes": [list(shape) for shape in img_shapes]}
    marked: dict[str, Any] = {"phrase": [list(span) for span in phrase]} if phrase else {}
    marked |= {"slider": slider._asdict()} if slider else {}
    rejected = {"rejected_shape": list(rejected_shape)} if rejected_shape else {}
    return content_hash(canonical_json({**value, **marked, **rejected, **inputs.to_json()}))


def dataset_identity(keys: Iterable[str]) -> str:
    """The hash of the keys in their order; a resumed run checks it."""
    return content_hash("\n".join(keys).encode("ascii"))


def differences(old: Inputs, old_prompt: str, new: Inputs, new_prompt: str) -> list[str]:
    """The names of the inputs that differ, for people: `target`, `control 1`, `mask`, `seed`, `prompt`, …"""
    changed = ["target"] if old.target != new.target else []
    if old.rejected != new.rejected:
        changed.append("rejected")
    if len(old.controls) != len(new.controls):
        changed.append("number of controls")
    else:
        changed += [
            f"control {i}" for i, (a, b) in enumerate(zip(old.controls, new.controls, strict=True), 1) if a != b
        ]
    if old.mask != new.mask:
        changed.append("mask")
    if old.seed != new.seed:
        changed.append("seed")
    if old_prompt != new_prompt:
        changed.append("prompt")
    return changed
