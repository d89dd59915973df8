"""The files of a model's folder, checked before a library opens them.

Links are followed, since the hub's cache consists of them. Refused by ModelError: pipes, sockets and devices, which
would be waited for or read for ever; texts of a size that no model has; indexes of shards that name anything but files
of their folder; and adapters, which transformers would load with the weights.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from qwen_cache.errors import ModelError
from qwen_cache.storage.files import read_file
from qwen_cache.text import parse_json

AGAIN = "download this component again"
INDEX = ".safetensors.index.json"
TEXTS = (".json", ".txt", ".jinja", ".model", ".tiktoken")
MAX_TEXT = 1 << 26  # bytes; the largest published tokenizer.json has 33 MB
ADAPTER = "adapter_config.json"
MORE_TEMPLATES = "additional_chat_templates"
"""The only folder in a component's that transformers looks into."""


def check_files(folder: Path) -> None:
    """ModelError unless libraries can be handed the folder of a component."""
    try:
        for path in _files(folder):
            _check_file(path)
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=error.filename, do=AGAIN) from None


def read_text(path: Path) -> str:
    """A text of a model; OSError or ValueError if it cannot be read, ModelError if it is too long for one."""
    data = read_file(path, MAX_TEXT + 1)
    if len(data) > MAX_TEXT:
        raise _too_long(path, f"more than {MAX_TEXT}")
    return data.decode("utf-8")


def shards_of(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of shards; ModelError if it is none."""
    try:
        value = parse_json(read_text(index))
        files = value["weight_map"]
        if not isinstance(value["metadata"], dict) or not isinstance(files, dict):
            raise TypeError("weight_map and metadata are objects")
        for file in files.values():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ValueError(f"{file!r} is no .safetensors file of its folder")
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=index, do=AGAIN) from None
    except (ValueError, LookupError, TypeError) as error:
        found = f"no {error}" if isinstance(error, KeyError) else error
        expected = "an object with metadata and weight_map, which names a file of this folder for each tensor"
        raise ModelError("this is no index of shards", where=index, expected=expected, found=found, do=AGAIN) from None
    return files


def _files(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.iterdir())
    if (folder / MORE_TEMPLATES).is_dir():
        yield from sorted((folder / MORE_TEMPLATES).iterdir())


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:  # a link of a broken download: whoever needs the file says so
        return
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):
        raise ModelError("this file cannot be read: not a regular file", where=path, do=AGAIN)
    if path.suffix in TEXTS and found.st_size > MAX_TEXT:
        raise _too_long(path, found.st_size)
    if path.name.endswith(INDEX):
        shards_of(path)
    if path.name == ADAPTER:
        what = "an adapter is beside the weights, and would be loaded with them"
        raise ModelError(what, where=path, do="merge it into the weights, or remove it")


def _too_long(path: Path, found: object) -> ModelError:
    return ModelError("no file of this kind is so long", where=path, expected=f"at most {MAX_TEXT} bytes", found=found)
