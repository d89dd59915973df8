"""Load a frozen component from safetensors; a missing weight is an error.

transformers and diffusers initialise missing weights at random, with a warning, and raise whatever they like about
files of others. From the first component in float32 on, this process computes float32 without TF32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from qwen_cache.errors import ModelError, QwenCacheError
from qwen_cache.models.devices import full_float32
from qwen_cache.models.folder import AGAIN, check_files


@contextmanager
def explained(what: str, where: object, do: str | None = AGAIN) -> Iterator[None]:
    """ModelError for whatever a library raises while it loads the files of others."""
    try:
        yield
    except (QwenCacheError, MemoryError, torch.OutOfMemoryError):
        raise  # the files are not the reason, or the reason is given
    except Exception as error:  # noqa: BLE001 (libraries raise what they like)
        reason = error if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {error}"
        raise ModelError(f"{what} cannot be loaded: {reason}", where=where, do=do) from None


def from_config(kind: type[Any], config: Mapping[str, Any], where: object = "config.json") -> Any:
    """A `kind` of diffusers with this configuration, without weights; ModelError if there can be none."""
    with explained(kind.__name__, where):
        return kind.from_config(dict(config))


def load_whole(kind: type[Any], folder: Path, **options: Any) -> Any:
    """A frozen `kind` in eval mode from `folder`; ModelError for missing weights or other shapes."""
    transformers_logging.disable_progress_bar()
    check_files(folder)
    with explained(kind.__name__, folder, "set model.quantization=none" if "quantization_config" in options else AGAIN):
        component, info = kind.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
        )
    for fault in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(fault, []))):
            raise ModelError(
                f"{fault.replace('_', ' ')} in the weights of {kind.__name__}",
                where=folder,
                found=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                do=AGAIN,
            )
    if component.dtype == torch.float32:
        full_float32()
    return component.requires_grad_(False).eval()
