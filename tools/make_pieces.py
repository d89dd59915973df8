"""Write the measurements of the published models, with which `qwen-train plan` needs no torch from the first time on.

    python tools/make_pieces.py [--out FILE]

By default qwen_train/memory/published.json. They are those of the default settings, and of the settings that `plan`
proposes, for the installed versions of torch, diffusers and peft; with others, each is measured once by whoever asks.
Run it after changes of these versions or of what a training step computes: tests/test_pieces.py compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21
from qwen_cache.settings.load import load_config
from qwen_cache.storage.measured import versions
from qwen_train.memory import pieces
from qwen_train.memory.sizes import BatchKind
from qwen_train.model.combinations import with_layout

MODELS: dict[str, dict[str, Any]] = {
    "Qwen-Image, Edit and Edit-2509": {"_class_name": QWEN_IMAGE.transformer, "num_layers": 60},
    "Edit-2511": {"_class_name": QWEN_IMAGE.transformer, "num_layers": 60, "zero_cond_t": True},
    "Qwen-Image-2.1": {"_class_name": QWEN_IMAGE_21.transformer, "num_layers": 32},
}
"""The transformers, as far as they differ from diffusers' defaults."""
SETTINGS: tuple[list[str], ...] = (
    [],
    ["train.gradient_checkpointing=false"],
    ["train.tabulated_modulation=true"],
    ["model.quantization=int8_convrot"],
    ["model.quantization=nf4"],
)
"""The default, which recomputes all blocks, and what a run that chooses by itself and `plan` compare it with. The
others of `plan --fit` are measured once."""


def questions() -> Iterator[tuple[dict[str, Any], str, BatchKind | None]]:
    """The key of each measurement, what is measured, and the kind of batches."""
    for transformer, assignments in product(MODELS.values(), SETTINGS):
        if transformer["_class_name"] == QWEN_IMAGE_21.transformer and "tabulated" in "".join(assignments):
            continue
        settings = with_layout(load_config(None, assignments), "cuda")
        key = pieces.key_of(transformer, settings, "accelerator")
        yield key, "block", None
        aligned = (True, False) if settings.model.quantization in pieces.PRODUCTS_IN_8_BITS else (True,)
        for rows in product(aligned, aligned):
            yield key, "step", BatchKind(False, False, *rows)
            yield key, "step", BatchKind(True, True, *rows)
            yield key, "image", BatchKind(False, False, *rows)


def entry(key: dict[str, Any], what: str, kind: BatchKind | None) -> tuple[str, Any]:
    """The name of an entry, and its value."""
    if kind is None:
        return pieces.digest_of({**key, "what": what}), pieces.measure_block(key)
    whole = {**key, "what": what, "kind": asdict(kind)}
    return pieces.digest_of(whole), pieces.measure(key, what, kind)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=pieces.PUBLISHED, help="the file to write")
    options = parser.parse_args()
    entries = dict(entry(*question) for question in questions())
    lines = (
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in sorted(entries.items())
    )
    text = ",\n".join(lines)
    options.out.write_text(
        f'{{"versions": {json.dumps(versions(pieces.LIBRARIES))},\n"entries": {{\n{text}\n}}}}\n', encoding="utf-8"
    )
    print(f"{options.out}: {len(entries)} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
