"""The text encoder's input per pipeline: constants of diffusers' Qwen-Image pipelines.

The first `drop_idx` tokens (the system prompt and the beginning of the user's message) are encoded but not kept. A test
compares everything, as token ids, with the installed pipelines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_cache.models.folder import PipelineName

PIXELS_PER_TOKEN = 28 * 28  # of an image in Qwen2.5-VL: patches of 14×14, merged 2×2
BYTES_PER_TOKEN = 4  # of English
VISION_END = "<|vision_end|>"
PIXEL_TOKENS = ("<|image_pad|>", "<|video_pad|>")
_IMAGE = f"<|vision_start|><|image_pad|>{VISION_END}"
_FRAME = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n<|im_start|>assistant\n"
_EDIT = _FRAME.format(
    system="Describe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate."
)
_TEXT_TO_IMAGE = _FRAME.format(
    system="Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:"
)


@dataclass(frozen=True)
class Template:
    """The text around images and instruction."""

    frame: str
    image: str
    drop_idx: int
    condition_image_size: int
    """Pixels of an image for the text encoder; 0 if it gets no images."""
    max_length: int | None = None
    """Tokens kept after `drop_idx`; None keeps all."""

    def text(self, prompt: str, images: int) -> str:
        """The whole input text for `prompt` and this number of images."""
        return self.frame.format("".join(self.image.format(i + 1) for i in range(images)) + prompt)


TEMPLATES: dict[PipelineName, Template] = {
    "QwenImageEditPipeline": Template(_EDIT, _IMAGE, 64, 1024 * 1024),
    "QwenImageEditPlusPipeline": Template(_EDIT, f"Picture {{}}: {_IMAGE}", 64, 384 * 384),
    "QwenImagePipeline": Template(_TEXT_TO_IMAGE, "", 34, 0, max_length=512),
}


def estimate_tokens(prompt: str, images: int, condition_image_size: int) -> int:
    """An estimate of the tokens kept for a prompt and its images, without a tokenizer."""
    return images * math.ceil(condition_image_size / PIXELS_PER_TOKEN) + len(prompt.encode()) // BYTES_PER_TOKEN + 10


VAE_IMAGE_SIZE = 1024 * 1024
"""Pixels of an image for the VAE, in all pipelines."""
