"""`caption` in qwen.yaml."""

from __future__ import annotations

from qwen_cache.settings.section import Positive, Section


class CaptionConfig(Section):
    model: str | None = None
    """The Qwen2.5-VL or Qwen3-VL that writes the captions, a folder or a repository on the hub; by default the model's
    own text encoder."""
    instruction: str = (
        "Describe this image for somebody who has to paint it: subject, surroundings, style and light. Write one short "
        "paragraph, without an introduction."
    )
    """What the language model is asked about an image without controls."""
    edit_instruction: str = (
        "The last image was made from what comes before it. Write the instruction that makes this edit, as a short "
        "command such as: make the sky orange. Write the instruction alone."
    )
    """What it is asked about control images, in their order, and their target, which comes last."""
    image_size: Positive = 589824
    """The most pixels of an image that it sees; larger images are made smaller."""
    max_new_tokens: Positive = 256
    """The most tokens of a caption."""
