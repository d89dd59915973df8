"""Work that many tests repeat, done once per process.

It is reading an index, comparing two images, and loading a model that nothing changes. Nothing is kept of what fails.
An index and an image are known by their bytes, and what is found cannot be changed. A model is known by its class, its
files and all that is asked of it; each test gets a copy of its own. It is unpickled, except for its tensors: in half
the time that `copy.deepcopy` takes.
"""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

MODELS, INDEX = 24, 1 << 20
"""The number of models that are kept, of a few megabytes each, and the most bytes of an index that is."""
BASES = {"diffusers.models.modeling_utils": "ModelMixin", "transformers.modeling_utils": "PreTrainedModel"}


@contextmanager
def once() -> Iterator[None]:
    """Do these once inside the block; models only of the libraries that tests have imported by now."""
    from qwen_cache.format import directory
    from qwen_cache.sources import alignment

    read, models = directory.read_index, dict[str, Any]()
    read_once = lru_cache(64)(read)

    def read_index(data: Any, *rest: Any) -> Any:
        return read_once(bytes(data), *rest) if len(data) < INDEX else read(data, *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(directory, "read_index", read_index))
        stack.enter_context(patch.object(alignment, "alignment", _comparing_once(alignment.alignment)))
        for base in [getattr(sys.modules[module], name) for module, name in BASES.items() if module in sys.modules]:
            stack.enter_context(patch.object(base, "from_pretrained", _remembering(base, models)))
        yield


def _comparing_once(compare: Callable[..., Any]) -> Callable[..., Any]:
    """The alignment of the same two images: most builds of the tests are of the same four pairs."""
    from xxhash import xxh3_128_digest

    known = dict[tuple[Any, ...], Any]()

    def alignment(target: Any, control: Any, size: Any) -> Any:
        images = [(image.mode, image.size, xxh3_128_digest(image.tobytes())) for image in (target, control)]
        key = (*images, size)
        if key not in known:
            known[key] = compare(target, control, size)
        return known[key]

    return alignment


def copies_of(value: Any) -> Callable[[], Any]:
    """A function that gives a new copy of `value` as it is now; by `copy.deepcopy` where that cannot be pickled."""
    import torch

    tensors, pickled, kept = list[Any](), io.BytesIO(), dict[int, Any]()

    class Pickler(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, torch.Tensor):
                return None
            tensors.append(copy.deepcopy(part, kept))
            return len(tensors) - 1

    class Unpickler(pickle.Unpickler):
        def __init__(self) -> None:
            super().__init__(io.BytesIO(pickled.getvalue()))
            self.copies: dict[int, Any] = {}

        def persistent_load(self, number: int) -> Any:
            return copy.deepcopy(tensors[number], self.copies)  # a tensor with two names stays one

    try:
        Pickler(pickled, pickle.HIGHEST_PROTOCOL).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return partial(copy.deepcopy, copy.deepcopy(value))
    return lambda: Unpickler().load()


def _remembering(base: Any, models: dict[str, Any]) -> Any:
    """`from_pretrained` of unquantised models for `qwen_cache.models.loading`, which alone asks what was loaded."""
    import torch

    load = base.from_pretrained.__func__

    def from_pretrained(kind: type[Any], folder: Any, *rest: Any, **options: Any) -> Any:
        if not options.get("output_loading_info") or "quantization_config" in options:
            return load(kind, folder, *rest, **options)
        stats = [(path.name, path.stat()) for path in sorted(Path(folder).iterdir())]
        files = [(name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        asked = {name: value.to_dict() if hasattr(value, "to_dict") else value for name, value in options.items()}
        key = repr((kind, str(folder), rest, asked, files, torch.get_default_dtype(), torch.get_default_device()))
        if key not in models:
            loaded = load(kind, folder, *rest, **options)
            if getattr(loaded[0], "hf_quantizer", None):
                return loaded
            if len(models) == MODELS:
                del models[next(iter(models))]
            models[key] = copies_of(loaded)
            return loaded
        return models[key]()

    return classmethod(from_pretrained)
