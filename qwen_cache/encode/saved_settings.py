"""The settings of a build: the qwen.yaml that `build` saves in the cache, and what of it others may see.

A cache that is published carries only what is needed to read its source in the same way: no path and no address of a
machine, but datasets and models by their names on the hub. Of the qwen.yaml of a remote cache, which a stranger wrote,
only the same is used: it names no file of this machine and no server.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, MAX_BYTES, Config, load_config, overridden, parse_yaml
from qwen_cache.storage.files import read_file, write_durably
from qwen_cache.storage.remote import Url
from qwen_cache.storage.stores import store_of

HUB_DATASETS = "hf://datasets/"
_PRIVATE = ("source", "mask_head", "allow_urls", "slice", "on_error")
_OF_A_MACHINE = ("vae_device", "text_device", "vae_batch_pixels", "text_batch_tokens")
_HUB_MODEL = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def save_settings(folder: Path | Url, config: Config) -> None:
    """Save the settings beside the dataset, unless they are there."""
    path, settings = folder / CONFIG_NAME, config.to_yaml().encode("utf-8")
    if isinstance(path, Url):
        with suppress(FileNotFoundError):
            if path.read_bytes() == settings:
                return
        store_of(path).put(path, settings)
    elif not path.is_file() or read_file(path) != settings:
        write_durably(path, settings)


def settings_of_build(
    folder: Path | Url,
    config: Path | None = None,
    assignments: Sequence[str] = (),
    given: Sequence[Given | None] = (),
) -> Config:
    """Settings of `config`, else of the qwen.yaml in the cache, else of ./qwen.yaml; the others override.

    Of the qwen.yaml in the cache without the devices: they are those of the machine that built it.
    """
    own = folder / CONFIG_NAME
    if config is None and isinstance(own, Url):
        saved = _remote(own)
        if saved is not None:
            return overridden(saved, str(own), assignments, given)
    elif config is None and isinstance(own, Path) and own.is_file():
        value = load_config(own).model_dump(mode="json")
        value["cache"] = {name: each for name, each in value["cache"].items() if name not in _OF_A_MACHINE}
        return overridden(value, str(own), assignments, given)
    return load_config(config, assignments, given)


def public_settings(config: Config) -> dict[str, Any]:
    """The settings that a published cache carries, as qwen.yaml has them: those of the source that are not the
    defaults, the dataset and the model if they are on the hub."""
    defaults = Config()
    data = config.data.model_dump(mode="json")
    standard = defaults.data.model_dump(mode="json")
    shown: dict[str, Any] = {
        name: value for name, value in data.items() if name not in _PRIVATE and value != standard[name]
    }
    named = [each for column in data["columns"].values() for each in (column if isinstance(column, list) else [column])]
    if any(each and Path(each).is_absolute() for each in named):
        shown.pop("columns")
    if config.data.source.startswith(HUB_DATASETS):
        shown["source"] = config.data.source
    value = {"data": shown} if shown else {}
    if name := public_model(config):
        value["model"] = {"path": name, **({"revision": config.model.revision} if config.model.revision else {})}
    return value


def public_model(config: Config) -> str | None:
    """The model's repository on the hub; None for a folder of this machine."""
    name = config.model.path or ""
    return name if _HUB_MODEL.fullmatch(name) and not Path(name).exists() else None


def _remote(path: Url) -> dict[str, Any] | None:
    """The public settings of a remote qwen.yaml; None if there is none."""
    try:
        value = parse_yaml(path.read_bytes(MAX_BYTES).decode("utf-8"), path)
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"this is not YAML: {error}", where=path) from None
    if not isinstance(value, dict):
        raise ConfigError("a mapping of sections is expected", where=path, found=type(value).__name__)
    return public_settings(overridden(value, str(path)))
