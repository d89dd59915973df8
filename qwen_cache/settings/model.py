"""`model` in qwen.yaml."""

from __future__ import annotations

from typing import Literal

from qwen_cache.settings.section import Section


class ModelConfig(Section):
    path: str | None = None
    """A diffusers folder, or a repository on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantize the frozen transformer to 8 bits (torchao) or 4 (bitsandbytes, needs a GPU). none: as the folder is."""
