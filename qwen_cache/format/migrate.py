"""Migrate: the same samples in another format version, without the encoders.

Both versions describe a sample equally, so keys and recipes stay the same. Every tensor is checked before it is
rewritten, one sample at a time; the old dataset stays valid until the commit, and an interrupted run continues where it
stopped. The migration of a v1 build is, byte for byte, what a v2 build writes. Samples with an edit mask, and images to
generate, cannot become v1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.cache import Sample, open_recipes
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import SEED
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.rows import KeyedRows
from qwen_cache.format.sample import TENSORS, SampleMeta, shared_rows
from qwen_cache.format.shard import compress
from qwen_cache.format.update import Update, by_position, carry_out, open_staging, plan_update, read_existing
from qwen_cache.storage.remote import LocalCopies, Url

AFTER_PROMPT = 5
"""Tokens of every template after the prompt (`<|im_end|>\\n<|im_start|>assistant\\n`); they are never shared rows."""
SHOWN = 10  # samples that an error lists


def plan_migration(source: Path | Url, target: Path | Url, old: int, new: int) -> Update:
    """Plan to write the dataset in `source`, of format version `old`, as version `new` to `target` (may be `source`).

    Raises ConfigError if `source` has another version, `target` holds another dataset, or `new` cannot hold it.
    """
    given = read_existing(source, new)
    if given.manifest.format_version not in (old, new):
        version = f"v{given.manifest.format_version}"
        raise ConfigError("this cache has another format version", where=source, expected=f"v{old}", found=version)
    if new == 1 and (other := [name for name, it in given.manifest.recipes.items() if "family" in it.recipe]):
        family = given.manifest.recipes[other[0]].recipe["family"]
        raise ConfigError(f"format v1 cannot hold a cache of {family}", where=source, do="stay with v2")
    if unfit := _unfit(given.rows, new):
        more = f" and {len(unfit) - SHOWN} more" if len(unfit) > SHOWN else ""
        raise ConfigError(
            f"format v{new} has no edit masks, attention, seeds or images to generate, but this cache does",
            where=source,
            found=", ".join(unfit[:SHOWN]) + more,
            do=f"stay with v{given.manifest.format_version}, or build without them",
        )
    in_place = directory.is_same(source, target)
    existing = given if in_place else read_existing(target, new)
    update = plan_update(target, existing, new, given.listed, by_position(given.manifest, given.rows))
    if not in_place and len(existing) and not update.is_nothing:
        raise ConfigError("this folder holds another dataset", where=target, do="choose an empty folder with --out")
    return update


def _unfit(rows: KeyedRows, format_version: int) -> list[str]:
    """The names of the samples that would lose something other than thumbnails, which are for people only."""
    if format_version > 1:
        return []
    table = rows.table
    only_v2 = {name: table[name].is_valid() for name in (*TENSORS[2], SEED) if name in table.column_names}
    lost = [only_v2[name] for name in only_v2 if name not in (*TENSORS[1], "thumbnails")]
    lost += [table["target"].is_null()]
    lost += [pc.greater(pc.list_value_length(table["phrase"]), 0)] if "phrase" in table.column_names else []
    unfit = np.logical_or.reduce([each.to_numpy() for each in lost])
    names: list[str] = rows.at(rows.positions[unfit[rows.positions]]).column("name").to_pylist()
    return names


def migrate(
    source: Path | Url,
    update: Update,
    shard_size: int,
    compression: str,
    version: str,
    copies: LocalCopies,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write and commit `update` as qwen-cache `version`; the caller holds `directory.writing(update.folder)`."""
    manifest, _ = directory.load(source)
    caches = list(open_recipes(source, copies).values())
    staging = open_staging(update, "migrate", shard_size, copies=copies)

    def write(key: str) -> None:
        cache = next(cache for cache in caches if key in cache.keys)
        staging.add(*compress(*converted(cache[key], update.format_version), compression))

    recipes = {name: recipe.recipe for name, recipe in manifest.recipes.items()}
    return carry_out(update, staging, write, recipes, {**manifest.written_by, "qwen-cache": version}, on_sample)


def converted(sample: Sample, format_version: int) -> tuple[SampleMeta, dict[str, memoryview]]:
    """A sample as `format_version` stores it: the empty prompt whole (1), or without its shared rows (2)."""
    specs = {name: spec for name, spec in sample.row.meta.tensors.items() if name in TENSORS[format_version]}
    meta = replace(sample.row.meta, tensors=specs)
    tensors = {name: sample.buffer(name) for name in specs}
    if "empty_prompt_embeds" not in tensors:
        return meta, tensors
    row_bytes, width = _row_bytes(meta), meta.tensors["prompt_embeds"].shape[1]
    shared = tensors["prompt_embeds"][: meta.prefix_length * row_bytes]
    whole = memoryview(bytes(shared) + bytes(tensors["empty_prompt_embeds"]))
    prefix = shared_rows(tensors["prompt_embeds"], whole, row_bytes, least=AFTER_PROMPT) if format_version > 1 else 0
    stored = whole[prefix * row_bytes :]
    shape = (stored.nbytes // row_bytes, width)
    spec = replace(meta.tensors["empty_prompt_embeds"], shape=shape, xxh3_128=content_hash(stored))
    return (
        replace(meta, prefix_length=prefix, tensors={**meta.tensors, "empty_prompt_embeds": spec}),
        {**tensors, "empty_prompt_embeds": stored},
    )


def _row_bytes(meta: SampleMeta) -> int:
    spec = meta.tensors["prompt_embeds"]
    return spec.element_size * spec.shape[1]
