"""`model` in qwen.yaml."""

from __future__ import annotations

from typing import Literal

from qwen_cache.settings.section import Section


class ModelConfig(Section):
    path: str | None = None
    """A diffusers folder, or a repository on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    transformer: str | None = None
    """A single file in place of the transformer's weights: .safetensors as ComfyUI has it (bf16, fp8, scaled fp8), or
    .gguf. Its config.json and all other components are those of model.path."""
    quantization: Literal["none", "int8", "fp8", "nf4"] = "none"
    """Quantise the frozen transformer to 8 bits (torchao) or 4 (bitsandbytes, needs a GPU). none: as the folder or file
    is."""
