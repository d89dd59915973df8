"""`data` in qwen.yaml."""

from __future__ import annotations

from typing import Literal

from qwen_cache.settings.section import Areas, Names, NotNegative, Positive, Resolutions, Section, UrlPrefix


class ColumnsConfig(Section):
    """Which columns of a table, parts of a tar or folders of images hold what; others are recognised by name."""

    target: str | None = None
    """The column, part or folder of the targets."""
    control: Names | None = None
    """The name of the controls, or a list of names in their order. An empty list ignores all controls."""
    mask: str | None = None
    """The column, part or folder of the edit masks."""
    prompt: str | None = None
    """The column, part or folder of the prompts, or of lists of captions; in a tar also a key of KEY.json."""
    phrase: str | None = None
    """The column of the words that say where the edit is. Experimental."""


class DataConfig(Section):
    source: str = "data"
    """The source that `build` reads by default: a folder, a table or tars, local or by URL."""
    columns: ColumnsConfig = ColumnsConfig()
    """The names that the source gives to its columns, parts or folders, where they are not recognised."""
    split: str | None = None
    """The split to read where a source has several, such as train."""
    config_name: str | None = None
    """The configuration of a dataset on the Hugging Face hub; by default the dataset's own default."""
    on_error: Literal["stop", "skip"] = "stop"
    """How `build` handles an unusable sample: stop, or skip it."""
    slice: str | None = None
    """The rows of the source to build: 3/16 is the third of sixteen slices of equal length."""
    edit_mask: Literal["none", "file", "diff", "head", "auto"] = "file"
    """Edit masks for rows without one. diff: the difference of target and control. head (experimental): a mask head.
    auto (experimental): diff, else head. none: no masks at all."""
    mask_head: str | None = None
    """The file that `qwen-train mask-head` wrote, for head and auto. Experimental."""
    marked_phrases: bool | None = None
    """true: [[ ]] in a prompt mark the words that say where the edit is, and are not encoded. false: every character is
    part of the prompt. When not given the same, and `build` says how many prompts have them. Experimental."""
    allow_urls: list[UrlPrefix] = []
    """What a remote table may name besides files of its own server: the first parts of URLs, such as
    https://images.example.com/ or https://. A local table may name anything."""
    allow_empty_prompt: bool = False
    """Accept samples without an instruction."""
    allow_no_control: bool = False
    """Accept targets without a control image in a folder or a tar that may have some, and, for an editing model, a
    source without any: they are trained as text to image. In a table an empty cell is enough."""
    trigger_word: str | None = None
    """The word that stands for the subject or style. It replaces [trigger] in prompts, and is put before a prompt that
    has neither."""
    prompt_prefix: str = ""
    """A text before every prompt, trigger word included, with a space between."""
    prompt_suffix: str = ""
    """A text after every prompt, with a space between unless it begins with a punctuation mark."""
    shuffle_tags: NotNegative = 0
    """How many orders of a caption's tags, which commas separate, become samples; 0: only its own order."""
    keep_tags: NotNegative = 0
    """How many of the first tags stay first when tags are shuffled."""
    shuffle_seed: int = 0
    """Another number gives other orders of tags."""
    vae_image_size: Areas | None = None
    """Pixels of an image for the VAE, or several such areas; the model's own (1024²) when not given."""
    resolution: Resolutions | None = None
    """A fixed [width, height] in place of an area, or several: an image gets the one nearest in shape."""
    resolutions_per_sample: Literal["nearest", "all"] = "nearest"
    """With several areas or resolutions. nearest: the largest that the target fills, else the smallest. all: one sample
    for each."""
    resize_mode: Literal["crop", "stretch"] | None = None
    """How an image gets a fixed resolution of another shape; refused when not given. crop: keep the centre."""
    upscale: bool = True
    """Enlarge small images, as the pipelines do. false: keep their own size, rounded down to 32 pixels."""
    condition_image_size: Positive | None = None
    """Pixels of an image for the text encoder; the model's own (1024² for Edit, 384² for Edit-Plus) when not given.
    Qwen-Image-2.1 has none: its text encoder gets the image of the VAE."""


SIZES = (
    "vae_image_size",
    "resolution",
    "resolutions_per_sample",
    "resize_mode",
    "upscale",
    "condition_image_size",
    "edit_mask",
)
"""The settings that decide what is stored: a server of encoders has them, and its clients take them from it."""
