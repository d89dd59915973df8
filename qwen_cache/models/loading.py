"""Loading a frozen part: from safetensors, and only when every weight of it is there.

transformers and diffusers fill in what a file lacks with random numbers and a warning; here that is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from qwen_cache.errors import ModelError


def load_whole(kind: type[Any], folder: Path, **options: Any) -> Any:
    """A frozen `kind` in eval mode from `folder`; ModelError when weights are missing or are of another shape."""
    transformers_logging.disable_progress_bar()
    try:
        part, info = kind.from_pretrained(folder, use_safetensors=True, output_loading_info=True, **options)
    except torch.OutOfMemoryError:
        raise  # which says nothing of the files
    except (OSError, ValueError, RuntimeError) as error:
        do = "set model.quantization=none" if "quantization_config" in options else "download this part again"
        raise ModelError(f"{kind.__name__} cannot be loaded: {error}", where=folder, do=do) from None
    for fault in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(fault, []))):
            raise ModelError(
                f"{fault.replace('_', ' ')} in the weights of {kind.__name__}",
                where=folder,
                found=", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
                do="download this part again",
            )
    return part.requires_grad_(False).eval()
