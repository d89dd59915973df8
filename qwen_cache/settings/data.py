"""`data` in qwen.yaml."""

from __future__ import annotations

from typing import Literal

from qwen_cache.settings.section import Areas, Positive, Resolutions, Section


class DataConfig(Section):
    source: str = "data"
    """What `build` reads when no SOURCE is given: a folder, a table, tars, or a URL of them."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a sample that cannot be used does to a build."""
    part: str | None = None
    """Which rows of the source to build: 3/16 is the third of sixteen runs of equal length."""
    edit_mask: Literal["none", "file", "diff", "head", "auto"] = "file"
    """Where the source has none: diff of target and control, head, auto: diff, else head. none: no masks at all."""
    mask_head: str | None = None
    """What `qwen-train mask-head` made, for head and auto."""
    allow_empty_prompt: bool = False
    """Whether a sample may have no instruction."""
    vae_image_size: Areas | None = None
    """Pixels of a picture for the VAE, or several such budgets; the model's own (1024²) when not given."""
    resolution: Resolutions | None = None
    """In place of that, a fixed [width, height], or several, of which a picture gets the one of the nearest shape."""
    resolutions_per_sample: Literal["nearest", "all"] = "nearest"
    """Of several: the largest that a target fills, else the smallest; or a sample for each."""
    resize_mode: Literal["crop", "stretch"] | None = None
    """How a picture gets a fixed resolution of another shape; when not given it is refused. crop: cut to the middle."""
    upscale: bool = True
    """Whether a picture may be enlarged, as the pipelines do; else its own size is used, rounded down to 32 pixels."""
    condition_image_size: Positive | None = None
    """Pixels of a picture for the text encoder; the model's own (1024² for Edit, 384² for Edit-Plus) when not given."""
