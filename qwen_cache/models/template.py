"""The text encoder's input: the text around images and prompt, as diffusers' pipelines write it.

The first `drop_idx` tokens (the system prompt, and in the 20B family the beginning of the user's message) are encoded
but not kept. A test compares everything, as token ids, with the installed pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass

VISION_END = "<|vision_end|>"
PIXEL_TOKENS = ("<|image_pad|>", "<|video_pad|>")
IMAGE = f"<|vision_start|><|image_pad|>{VISION_END}"


@dataclass(frozen=True)
class Template:
    """The text around images and prompt."""

    system: str
    image: str = ""
    """The text of an image; `{}` is its number, from 1."""
    separator: str = ""
    """The text between two images."""
    drop_idx: int | None = None
    """The number of first tokens that are not kept; None: those of the system message, by the processor's template."""
    condition_image_size: int = 0
    """Pixels of an image for the text encoder; 0 if it gets no images, or the same images as the VAE."""
    max_length: int | None = None
    """Tokens kept after `drop_idx`; None keeps all."""
    empty_prompt: str = ""
    """The prompt that replaces an empty one."""

    @property
    def frame(self) -> str:
        """The whole text; `{}` stands for images and prompt."""
        return f"<|im_start|>system\n{self.system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"

    def text(self, prompt: str, images: int) -> str:
        """The whole input text for `prompt` and this number of images."""
        before = self.separator.join(self.image.format(i + 1) for i in range(images))
        return self.frame.format(before + (prompt or self.empty_prompt))
