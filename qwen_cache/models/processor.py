"""The processor of Qwen2.5-VL for images alone: without video, it does not need torchvision."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.models.folder import ModelFolder


class ImageOnlyQwen2VLProcessor(Qwen2VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen2VLProcessor without video, which needs torchvision.

    transformers derives the components of a processor from this signature. Images are processed by PIL, whether
    torchvision is installed or not.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def load_processor(model: ModelFolder) -> ImageOnlyQwen2VLProcessor:
    """The processor of an Edit model, on PIL."""
    folder = model.component("processor")
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return ImageOnlyQwen2VLProcessor(images, AutoTokenizer.from_pretrained(folder))
