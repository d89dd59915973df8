"""The text encoder's input: the text around images and prompt, as diffusers' pipelines write it.

The first `drop_idx` tokens (the system prompt, and in the 20B family the beginning of the user's message) are encoded
but not kept. A test compares everything, as token ids, with the installed pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass

VISION_END = "<|vision_end|>"
PIXEL_TOKENS = ("<|image_pad|>", "<|video_pad|>")
"""Tokens that stand for pixels, which no prompt may contain."""
IMAGE = f"<|vision_start|><|image_pad|>{VISION_END}"


def chat(system: str) -> str:
    """The frame of a chat with this system message."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"


def pixel_token(prompt: str) -> str | None:
    """The first token in a prompt that stands for pixels; None if it has none."""
    return next((token for token in PIXEL_TOKENS if token in prompt), None)


def pixel_token_told(token: str) -> tuple[str, str]:
    """What is wrong with a prompt that contains the token, and what to do."""
    return f"the prompt contains {token}, which stands for an image's pixels", "remove it"


@dataclass(frozen=True)
class Template:
    """The text around images and prompt."""

    frame: str
    """The whole text; `{}` stands for images and prompt."""
    image: str = ""
    """The text of an image; `{}` is its number, from 1."""
    drop_idx: int = 0
    """The number of first tokens that are not kept."""
    dropped_message: str | None = None
    """In place of `drop_idx`: the system message, which the processor's chat template turns into those tokens."""
    condition_image_size: int = 0
    """Pixels of an image for the text encoder; 0 if it gets no images, or the same images as the VAE."""
    separator: str = ""
    """The text between two images."""
    empty_prompt: str = ""
    """The prompt that replaces an empty one."""
    max_length: int | None = None
    """Tokens kept after the dropped ones; None keeps all."""

    def text(self, prompt: str, images: int) -> str:
        """The whole input text for `prompt` and this number of images."""
        before = self.separator.join(self.image.format(i + 1) for i in range(images))
        return self.frame.format(before + (prompt or self.empty_prompt))
