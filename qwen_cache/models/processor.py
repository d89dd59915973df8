"""The processors of Qwen2.5-VL and Qwen3-VL for images alone: without video, they do not need torchvision."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, Qwen2VLProcessor, Qwen3VLProcessor
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


class ImageOnlyQwen3VLProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """Qwen3VLProcessor without video, as above."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


PROCESSORS: dict[str, type[Any]] = {
    "Qwen2_5_VLForConditionalGeneration": ImageOnlyQwen2VLProcessor,
    "Qwen3VLForConditionalGeneration": ImageOnlyQwen3VLProcessor,
}
"""The processor of each text encoder."""


def load_processor(model: ModelFolder) -> Any:
    """The processor of a model that takes images, on PIL."""
    folder, kind = model.component("processor"), PROCESSORS[model.family.text_encoder]
    images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    return kind(images, tokenizer, chat_template=kind.get_processor_dict(folder)[0].get("chat_template"))
