"""`predict` in qwen.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qwen_cache.settings.section import Positive, Section, Side, Sigmas


class PredictConfig(Section):
    """Where the model family decides about a default, it is None here; `models/family.py` has the values."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which all components compute."""
    num_inference_steps: Positive | None = None
    """Denoising steps; by default 50, for Qwen-Image-2.1 40, or as many as the noise levels saved with the model."""
    sigmas: Sigmas | None = None
    """Noise levels in place of num_inference_steps, descending from 1, before the shift; also as text with commas."""
    true_cfg_scale: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Classifier-free guidance, where a negative prompt is given; by default 4, for Qwen-Image-2.1 1 (none)."""
    negative_prompt: str | None = None
    """The prompt to guide away from; may be empty."""
    guidance_scale: float | None = None
    """For guidance-distilled models only."""
    num_images_per_prompt: Positive = 1
    """Images of one prompt, each from its own noise."""
    max_sequence_length: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Tokens kept of a prompt without images, by default 512; not for Qwen-Image-2.1."""
    height: Side | None = None
    """A multiple of 16 pixels (Qwen-Image-2.1: 32), as the width; when not given, about 1024² (Qwen-Image-2.1:
    output_resolution²) in the shape of the last image."""
    width: Side | None = None
    """Width of the image, with the same limits and default as the height."""
    output_resolution: Annotated[int, Field(gt=0, multiple_of=32)] | None = None
    """Qwen-Image-2.1: about the square of it are the pixels of control images, and of the result; by default 1024."""
    use_kv_cache: bool | None = None
    """Qwen-Image-2.1: keep keys and values of text and control images after the first step; by default true."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the noise."""
    tabulated_modulation: bool = False
    """Read the modulation from a table instead of loading its weights (a third of the model); bfloat16 only."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Weights that stay in host memory until they compute: none, whole components (model), or layers (sequential)."""
