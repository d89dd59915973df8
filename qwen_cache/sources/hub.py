"""Datasets on the Hugging Face hub by name: the files of one split, as `datasets` finds them.

`hf://datasets/OWNER/NAME`, or with `@REVISION`. Configurations and splits are those of the dataset's page. Files are
read from the commit that is found, by ranges, and none is downloaded first. `datasets` runs no code of a dataset, and
refuses one that is a script; files outside the dataset's repository are refused here.
"""

from __future__ import annotations

import re
import tempfile
from typing import Any

import yaml

from qwen_cache.errors import QwenCacheError, SourceError
from qwen_cache.extras import install_command
from qwen_cache.sources.places import Location, file_at
from qwen_cache.storage.remote import Url
from qwen_cache.text import one_line

DATASET = re.compile(r"hf://datasets/((?:[\w.-]+/)?[\w.-]+)(?:@([^/]+))?/*")


def is_dataset(url: Url) -> bool:
    """Whether an address names a dataset, and not a folder or a file in it."""
    return DATASET.fullmatch(str(url)) is not None


def dataset_files(url: Url, config_name: str | None) -> dict[str, list[Location]]:
    """The files of each split, in order; SourceError if there is no such dataset or configuration."""
    match = DATASET.fullmatch(str(url))
    assert match is not None
    by_split = _resolved(url, match[1], match[2], config_name)
    own = re.compile(rf"hf://datasets/{re.escape(match[1])}@[^/]+/(?!(.*/)?\.\.(/|$)).+")
    for name in (name for names in by_split.values() for name in names if not own.fullmatch(name)):
        do = "name the files that you want to read"
        raise SourceError("the dataset names a file outside its repository", where=url, found=name, do=do)
    return {split: [file_at(Url(name)) for name in names] for split, names in by_split.items()}


def _resolved(url: Url, name: str, revision: str | None, config_name: str | None) -> dict[str, list[str]]:
    """Addresses by split. The folder that `datasets` makes for its tables is not needed afterwards."""
    try:
        from datasets import load_dataset_builder
    except ImportError as error:
        what = "a dataset on the hub needs a package that is missing"
        raise QwenCacheError(what, where=url, found=error, do=install_command("hf")) from error
    remote = f"hf://datasets/{name}"  # so written, it is never a local folder of that name
    try:
        with tempfile.TemporaryDirectory() as folder:
            builder: Any = load_dataset_builder(remote, config_name, revision=revision, cache_dir=folder)
            return {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
    except (ConnectionError, TimeoutError) as error:
        what, do = "asking the hub for the dataset failed", "check the connection, and run the same command again"
        raise QwenCacheError(what, where=url, found=_said(error), do=do) from error
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        do = "check the name; another configuration: --set data.config_name=NAME"
        raise SourceError("the dataset cannot be read", where=url, found=_said(error), do=do) from error


def _said(error: Exception) -> str:
    return one_line(str(error))[:300]
