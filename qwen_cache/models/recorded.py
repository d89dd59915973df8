"""The model that a cache or a run was made with, for a command that is given none; and its encoders, compared.

Of the qwen.yaml beside a cache or a run, which somebody else may have written, `model.path` alone is taken: only if
that model is on this machine, and neither its pipeline nor an encoder of it is known to differ from the recipe's.
Nothing is downloaded, and no other setting is taken: where one decides which weights these are, the error names all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from qwen_cache.errors import ModelError, QwenCacheError
from qwen_cache.models.family import same_inputs
from qwen_cache.models.folder import (
    ENCODERS,
    ModelFolder,
    encoder_fingerprint,
    encoder_folders,
    find_here,
    is_whole,
    open_model,
    vae_encoder_fingerprint,
)
from qwen_cache.settings.load import CONFIG_NAME, MAX_BYTES, Config, assignment, parse_yaml
from qwen_cache.settings.sections import ModelConfig
from qwen_cache.storage.files import read_file
from qwen_cache.storage.remote import Location, is_remote
from qwen_cache.terminal import console
from qwen_cache.text import plain, shell_line

PARTS = {"vae": "VAE", "text_encoder": "text encoder", "processor": "tokenizer or processor"}
"""The entries of a recipe in words."""


FILES = ("transformer", "text_encoder", "vae")
"""The settings of `model` that have an option."""


SHARES = ("//", "\\\\")
"""How the paths of other machines begin on Windows, which would connect to them."""


def recorded_model(folder: Location) -> dict[str, str]:
    """The settings `model` of the qwen.yaml in a folder that are text; none if it cannot be read."""
    path = folder / CONFIG_NAME
    with suppress(QwenCacheError, OSError, UnicodeDecodeError):
        if not is_remote(path) and not path.is_file():  # a pipe is not waited for
            return {}
        data = path.read_bytes(MAX_BYTES) if is_remote(path) else read_file(path, MAX_BYTES + 1)  # which is too long
        value = parse_yaml(data.decode("utf-8"), path)
        section = value.get("model") if isinstance(value, dict) else None
        texts = {k: v for k, v in section.items() if isinstance(v, str)} if isinstance(section, dict) else {}
        return {} if texts.get("path", "").startswith(SHARES) else texts
    return {}


def model_words(name: str, others: Mapping[str, str]) -> list[str]:
    """The options of a command that name a model, and these other settings of `model`."""
    typed = ([f"--{key.replace('_', '-')}", value] for key, value in others.items() if key in FILES)
    assigned = (["--set", assignment(f"model.{key}", value)] for key, value in others.items() if key not in FILES)
    return ["--model", name, *chain.from_iterable([*assigned, *typed])]


def words_not_recorded(model: ModelConfig, deciding: Sequence[str]) -> list[str]:
    """The options that name a model to a command that would not take the recorded one; none if it takes it."""
    others = {key: value for key in deciding if (value := getattr(model, key)) is not None}
    return model_words(model.path, others) if model.path is not None and others else []


def same_model(name: str, other: str) -> bool:
    """True for one repository, or for two paths of one folder."""
    return name == other or (os.path.isdir(name) and os.path.isdir(other) and os.path.samefile(name, other))


def with_recorded_model(
    config: Config,
    folder: Location,
    components: Sequence[str],
    recipe: Mapping[str, Any] | None = None,
    vae_encoders: Mapping[str, str] | None = None,
    *,
    deciding: Sequence[str] = ("revision",),
) -> Config:
    """`config` with the model that `folder` was made with, unless it names one; a line says which.

    `deciding` are the settings of `model` that say, beside its path, which weights of `components` are used: if one is
    recorded and not given, nothing is taken. `recipe` and `vae_encoders` are those of the cache, if there is one.
    Raises ModelError, with what is recorded, if it is not taken; unchanged if nothing is recorded.
    """
    recorded = recorded_model(folder)
    if config.model.path is not None or "path" not in recorded:
        return config
    name, file = recorded["path"], plain(folder / CONFIG_NAME)
    others = {key: recorded[key] for key in deciding if key in recorded and getattr(config.model, key) is None}
    do = f"give {shell_line(model_words(name, others))}, as in {file}, or another model"
    if others:
        raise ModelError("no model is named", do=do)
    here = find_here(name, components, config.model.revision)
    if here is None:
        raise ModelError("no model is named, and the recorded one is not here", do=do)
    model = open_model(str(here), ())
    if recipe is not None:
        pipeline = recipe.get("pipeline")
        if "text_encoder" in recorded:  # whose single file encoded the cache, not the folder's
            recipe = {entry: value for entry, value in recipe.items() if entry != "text_encoder"}
        differs = None if same_inputs(pipeline, model.pipeline) else f"pipeline {model.pipeline}, not {pipeline}"
        if differs or (part := differing_encoder(model, recipe, vae_encoders or {}, read=False)):
            found = differs or f"another {PARTS[str(part)]} than that of the cache"
            raise ModelError("no model is named, and the recorded one has changed", found=found, do=do)
    console().print(f"model.path is {plain(name)}, as in {file}", markup=False, highlight=False)
    return config.model_copy(update={"model": config.model.found_here(name)})


def differing_encoder(
    model: ModelFolder,
    recipe: Mapping[str, Any],
    vae_encoders: Mapping[str, str],
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    read: bool = True,
) -> str | None:
    """The entry of `recipe` whose encoder is here in another version; None if none is, or if it cannot be known.

    Only components that are here as a whole count. `vae_encoders` are those of the cache's manifest: another decoder
    makes no difference. Tokenizers are compared within a pipeline. Unless `read` is true, no text encoder is read.
    """
    for part in ENCODERS:
        folders = encoder_folders(model, part)
        is_file = part == "text_encoder" and model.text_encoder is not None
        if part not in recipe or not (is_file or all(map(is_whole, folders))):
            continue
        if part == "processor" and model.pipeline != recipe.get("pipeline"):
            continue
        found = encoder_fingerprint(model, part, on_bytes, read=read)
        if found in ("", recipe[part]):
            continue
        if part == "vae" and vae_encoders.get(recipe[part]) in (None, vae_encoder_fingerprint(*folders)):
            continue
        return part
    return None
