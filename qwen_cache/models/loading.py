"""Load a frozen component from safetensors; a missing weight is an error.

transformers and diffusers initialise missing weights at random, with a warning. From the first component in float32 on,
this process computes float32 without TF32.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from qwen_cache.errors import ModelError
from qwen_cache.models.devices import full_float32


def load_whole(kind: type[Any], folder: Path, **options: Any) -> Any:
    """A frozen `kind` in eval mode from `folder`; ModelError for missing weights or other shapes."""
    transformers_logging.disable_progress_bar()
    try:
        component, info = kind.from_pretrained(
            folder, use_safetensors=True, local_files_only=True, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise  # the files are not the reason
    except (OSError, ValueError, RuntimeError) as error:
        do = "set model.quantization=none" if "quantization_config" in options else "download this component again"
        raise ModelError(f"{kind.__name__} cannot be loaded: {error}", where=folder, do=do) from None
    for fault in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(fault, []))):
            raise ModelError(
                f"{fault.replace('_', ' ')} in the weights of {kind.__name__}",
                where=folder,
                found=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                do="download this component again",
            )
    if component.dtype == torch.float32:
        full_float32()
    return component.requires_grad_(False).eval()
