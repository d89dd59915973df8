"""cache.json: what a cache holds, its files and their digests, field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from qwen_cache.errors import (
    REBUILD_MANIFEST,
    CountError,
    FormatError,
    ManifestChecksumError,
    ManifestError,
    RecipeError,
    ShardError,
    UnknownKeyError,
    VersionError,
)
from qwen_cache.format.identity import HASH_PATTERN, canonical_json, recipe_id
from qwen_cache.storage.remembered import ZEROS, own_hash, with_own_hash
from qwen_cache.text import each_key_once

# ---- fields ----------------------------------------------------------------------------------------------------------
# Strict reading of JSON: every key is taken by name and type, and unknown keys are refused.
#
# A key whose value has `"must_understand": false` may be ignored; repeated keys, NaN and Infinity are not valid JSON.
# JSON that is not of the format is read by `qwen_cache.text`.


class Fields:
    """A JSON object, read key by key; `finish` refuses keys that were not read."""

    def __init__(self, value: Any, where: str, error: type[FormatError] = ManifestError) -> None:
        if not isinstance(value, dict):
            raise error("a JSON object is expected here", where=where, found=type(value).__name__)
        self.left, self.where, self.error = dict(value), where, error

    @classmethod
    def of_json(cls, data: bytes | memoryview, where: str, error: type[FormatError]) -> Fields:
        try:
            text = bytes(data).decode("utf-8")  # json.loads would accept UTF-16 and lone surrogates
            value = json.loads(text, object_pairs_hook=each_key_once, parse_constant=_refuse_constant)
            canonical_json(value)  # "\ud800", 1e999 and deep nesting can be read, but not written or hashed
        except (ValueError, RecursionError) as fault:  # UnicodeError is a ValueError
            raise error(f"this is not valid JSON: {fault}", where=where) from None
        return cls(value, where, error)

    def take(self, key: str, kind: type) -> Any:
        if key not in self.left:
            raise self.error(f'the key "{key}" is missing', where=self.where)
        value = self.left.pop(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(
                f'"{key}" is of the wrong type', where=self.where, expected=kind.__name__, found=type(value).__name__
            )
        return value

    def count(self, key: str) -> int:
        value = self.take(key, int)
        if not 0 <= value < 1 << 63:
            raise self.error(f'"{key}" must be from 0 to 2⁶³ - 1', where=self.where, found=value)
        return int(value)

    def hash(self, key: str) -> str:
        return self._check_hash(key, self.take(key, str))

    def hashes(self, key: str) -> list[str]:
        return [self._check_hash(key, value) for value in self.take(key, list)]

    def hash_or_null(self, key: str) -> str | None:
        value = self.take(key, object)
        return None if value is None else self._check_hash(key, value)

    def _check_hash(self, key: str, value: Any) -> str:
        if not (isinstance(value, str) and HASH_PATTERN.fullmatch(value)):
            expected = "32 lower-case hexadecimal digits"
            raise self.error(f'"{key}" is not an xxh3-128', where=self.where, expected=expected, found=value)
        return value

    def finish(self) -> dict[str, Any]:
        """The remaining keys, all ignorable; UnknownKeyError for any other."""
        for key, value in self.left.items():
            if not (isinstance(value, Mapping) and value.get("must_understand") is False):
                raise UnknownKeyError(
                    f'unknown key "{key}", which is not marked as ignorable',
                    where=self.where,
                )
        return self.left


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


# ---- manifest --------------------------------------------------------------------------------------------------------
# cache.json: the contents of a cache, and the one place that sets the format version.
#
# Parsing refuses unknown format versions, unknown keys whose value does not have `"must_understand": false`, and a file
# whose checksum does not match its bytes. It never fills in missing values.

FORMAT = "qwen-cache"
VERSIONS = (1, 2)
MANIFEST_NAME = "cache.json"
CHECKSUM = "checksum"
VAE_ENCODERS = "vae_encoders"
HASH_KEY = "xxh3_128"
DEFAULT_RECIPE = "default"  # the name of a recipe that the user did not name
SHARD_PATTERN = re.compile(HASH_PATTERN.pattern + r"\.tar")


@dataclass(frozen=True)
class Shard:
    """One tar: its name is the xxh3-128 of its bytes."""

    name: str
    samples: int
    bytes: int

    @property
    def xxh3_128(self) -> str:
        return self.name.removesuffix(".tar")

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "samples": self.samples, "bytes": self.bytes, "xxh3_128": self.xxh3_128}


@dataclass(frozen=True)
class Recipe:
    """How one set of samples was made; `identity` is the hash of their keys in order."""

    recipe: dict[str, Any]
    samples: int
    identity: str

    @property
    def id(self) -> str:
        return recipe_id(self.recipe)

    def to_json(self) -> dict[str, Any]:
        return {"id": self.id, "identity": self.identity, "samples": self.samples, "recipe": self.recipe}


@dataclass(frozen=True)
class IndexFile:
    """The index that belongs to this manifest."""

    samples: int
    bytes: int
    xxh3_128: str

    def to_json(self) -> dict[str, Any]:
        return {"samples": self.samples, "bytes": self.bytes, "xxh3_128": self.xxh3_128}


@dataclass(frozen=True)
class Manifest:
    """The parsed cache.json."""

    format_version: int
    recipes: dict[str, Recipe]
    index: IndexFile
    shards: tuple[Shard, ...]
    written_by: dict[str, str] = field(default_factory=dict)
    ignorable: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, format_version: int) -> Manifest:
        """The manifest of a cache that does not exist yet."""
        return cls(format_version, {}, IndexFile(0, 0, ""), ())

    @property
    def vae_encoders(self) -> dict[str, str]:
        """The hash of what decides the latents of a VAE, by the hash of its folder, as a recipe has it."""
        found = self.ignorable.get(VAE_ENCODERS, {})
        return {vae: encoder for vae, encoder in found.items() if isinstance(encoder, str)}

    def with_vae_encoders(self, more: Mapping[str, str]) -> Manifest:
        """The manifest with the hashes that it has and `more`, of the VAEs of its recipes."""
        known, vaes = {**self.vae_encoders, **more}, [recipe.recipe.get("vae") for recipe in self.recipes.values()]
        of_recipes = {vae: known[vae] for vae in sorted(known) if vae in vaes}
        others = {name: value for name, value in self.ignorable.items() if name != VAE_ENCODERS}
        entry = {VAE_ENCODERS: {"must_understand": False, **of_recipes}} if of_recipes else {}
        return replace(self, ignorable=others | entry)

    def to_bytes(self) -> bytes:
        """The bytes of the file: readable; equal manifests give equal bytes."""
        value = {
            "format": FORMAT,
            "format_version": self.format_version,
            "recipes": {name: recipe.to_json() for name, recipe in sorted(self.recipes.items())},
            "index": self.index.to_json(),
            "shards": [shard.to_json() for shard in self.shards],
            "written_by": dict(sorted(self.written_by.items())),
            **self.ignorable,
        }
        return with_checksum(value)


def with_checksum(value: dict[str, Any]) -> bytes:
    """The bytes of cache.json for the JSON object `value`, with the checksum of these bytes at the end."""
    checksum = {"must_understand": False, HASH_KEY: ZEROS}
    return with_own_hash(json.dumps({**value, CHECKSUM: checksum}, indent=1, ensure_ascii=False) + "\n")


def parse_manifest(data: bytes, where: str = MANIFEST_NAME) -> Manifest:
    """Parse and check the bytes of a manifest; FormatError if they are invalid."""
    fields = Fields.of_json(data, where, error=ManifestError)
    if fields.take("format", str) != FORMAT:
        raise ManifestError("not a qwen-cache manifest", where=where, expected=f'"format": "{FORMAT}"')
    version = check_version(fields.take("format_version", int), where)
    _check_checksum(data, fields, version)

    recipes = {}
    for name, value in fields.take("recipes", dict).items():
        each = Fields(value, f"{where}: recipes.{name}")
        claimed = each.hash("id")
        recipe = recipes[name] = Recipe(each.take("recipe", dict), each.count("samples"), each.hash("identity"))
        each.finish()
        if recipe.id != claimed:
            what = "the recipe's id is not the hash of the recipe"
            raise RecipeError(what, where=each.where, expected=recipe.id, found=claimed)

    each = Fields(fields.take("index", dict), f"{where}: index")
    index = IndexFile(each.count("samples"), each.count("bytes"), each.hash("xxh3_128"))
    each.finish()

    shards = []
    for i, value in enumerate(fields.take("shards", list)):
        each = Fields(value, f"{where}: shards[{i}]")
        name = each.take("name", str)
        shards.append(Shard(name, each.count("samples"), each.count("bytes")))
        claimed = each.hash("xxh3_128")
        each.finish()
        if not SHARD_PATTERN.fullmatch(name) or shards[-1].xxh3_128 != claimed:
            expected = f"{claimed}.tar"
            raise ShardError("a shard's name is not its hash", where=each.where, expected=expected, found=name)

    writers = Fields(fields.take("written_by", dict), f"{where}: written_by")
    written_by = {name: writers.take(name, str) for name in list(writers.left)}
    others = fields.finish()

    in_recipes, in_shards = sum(recipe.samples for recipe in recipes.values()), sum(shard.samples for shard in shards)
    if not in_recipes == in_shards == index.samples:
        found = f"{index.samples} in the index, {in_recipes} in the recipes, {in_shards} in the shards"
        raise CountError("the numbers of samples disagree", where=where, found=found)
    if len({shard.name for shard in shards}) != len(shards):
        raise CountError("a shard is listed twice", where=where)
    return Manifest(version, recipes, index, tuple(shards), written_by, others)


def check_version(version: int, where: str) -> int:
    if version not in VERSIONS:
        raise VersionError(
            "this program does not know this format version",
            where=where,
            expected=" or ".join(map(str, VERSIONS)),
            found=version,
        )
    return version


def _check_checksum(data: bytes, fields: Fields, version: int) -> None:
    """Take the checksum, and compare it with the bytes. Version 1 may lack one, but not have one under another name."""
    named = [name for name, value in fields.left.items() if isinstance(value, dict) and HASH_KEY in value]
    if version == 1 and CHECKSUM not in fields.left and named == ["index"]:
        return
    if CHECKSUM not in fields.left:
        raise ManifestError(f'the key "{CHECKSUM}" is missing', where=fields.where, do=REBUILD_MANIFEST)
    checksum = Fields(fields.take(CHECKSUM, dict), f"{fields.where}: {CHECKSUM}", ManifestChecksumError)
    claimed = checksum.hash(HASH_KEY)
    if checksum.take("must_understand", bool):
        raise ManifestChecksumError('"must_understand" must be false', where=checksum.where)
    checksum.finish()
    if (found := own_hash(data, claimed)) != claimed:
        what = "the file was changed after it was written"
        raise ManifestChecksumError(what, where=fields.where, expected=claimed, found=found)
