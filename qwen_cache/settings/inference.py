"""`predict` in qwen.yaml."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qwen_cache.settings.section import Positive, Section, Side, Sigmas


class PredictConfig(Section):
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which all components compute."""
    num_inference_steps: Positive = 50
    sigmas: Sigmas | None = None
    """Noise levels in place of num_inference_steps, descending from 1, before the shift; also as text with commas."""
    true_cfg_scale: Annotated[float, Field(allow_inf_nan=False)] = 4.0
    """Classifier-free guidance, where a negative prompt is given."""
    negative_prompt: str | None = None
    guidance_scale: float | None = None
    """For guidance-distilled models only."""
    num_images_per_prompt: Positive = 1
    max_sequence_length: Annotated[int, Field(gt=0, le=1024)] = 512
    """Tokens kept of a prompt without images."""
    height: Side | None = None
    """Rounded down to 16 pixels, as the width; about 1024² in the shape of the last image when not given."""
    width: Side | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    tabulated_modulation: bool = False
    """Read the modulation from a table instead of loading its weights (a third of the model); bfloat16 only."""
    offload: Literal["none", "model", "sequential"] = "none"
    """Weights that stay in host memory until they compute: none, whole components (model), or layers (sequential)."""
