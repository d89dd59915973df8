"""The stock Qwen-Image-2.1 pipeline without torchvision: a processor without its video half, and a loader with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImage21Pipeline
from transformers import Qwen3VLProcessor


class ImageOnlyQwen3VLProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """The stock processor without its video half, which needs torchvision.

    `from_pretrained` finds the tokenizer, the chat template and the image processor, Qwen2VLImageProcessorPil.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def stock_qwen_image_21(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The stock pipeline of a Qwen-Image-2.1 folder, loaded again at each call."""
    processor = ImageOnlyQwen3VLProcessor.from_pretrained(folder / "processor")
    pipeline = QwenImage21Pipeline.from_pretrained(folder, dtype=dtype, processor=processor)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
