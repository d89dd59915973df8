"""The processors of Qwen2.5-VL and Qwen3-VL for images alone: without video, they do not need torchvision."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.errors import ModelError
from qwen_cache.models.config_values import Images, check_values
from qwen_cache.models.files import AGAIN
from qwen_cache.models.folder import ModelFolder, read_config
from qwen_cache.models.loading import explained
from qwen_cache.models.text_encoder import model_config

PROBE = "a prompt, 提示"  # a tokenizer on bytes loses no text


class _ImageOnly:
    """A processor without video, which needs torchvision.

    transformers derives the components of a processor from this signature. Images are processed by PIL, whether
    torchvision is installed or not.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)  # type: ignore[call-arg]


class ImageOnlyQwen2VLProcessor(_ImageOnly, Qwen2VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen2VLProcessor without video."""


class ImageOnlyQwen3VLProcessor(_ImageOnly, Qwen3VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen3VLProcessor without video."""


PROCESSORS: dict[str, type[Any]] = {"qwen2_5_vl": ImageOnlyQwen2VLProcessor, "qwen3_vl": ImageOnlyQwen3VLProcessor}
"""Processor classes by the `model_type` of the text encoder."""


def make_processor(model_type: str, name: str | PathLike[str]) -> Any:
    """The processor of a text encoder of that type, with the patch size and limits in a folder or repository.

    Raises ModelError for values that no such processor has.
    """
    kind = PROCESSORS[model_type]
    images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(name), _tokenizer(name)
    check_values(Images, json.loads(json.dumps(images.to_dict())), name)
    return kind(images, tokenizer, chat_template=kind.get_processor_dict(name)[0].get("chat_template"))


def load_processor(model: ModelFolder) -> Any:
    """The processor of a model that takes images, on PIL; ModelError if it cannot be read."""
    folder, config = model.component("processor"), model.component("text_encoder") / "config.json"
    settings = model_config(read_config(config), config)
    with explained(folder.name, folder):
        processor = make_processor(settings.model_type, folder)
    _check_patches(processor.image_processor, settings.vision_config, folder)
    _check_tokenizer(processor.tokenizer, folder)
    return processor


def load_tokenizer(model: ModelFolder) -> Any:
    """The tokenizer of a model that takes no images; ModelError if it cannot be read."""
    with explained(model.tokenizer.name, model.tokenizer):
        tokenizer = _tokenizer(model.tokenizer)
    _check_tokenizer(tokenizer, model.tokenizer)
    return tokenizer


def _tokenizer(name: str | PathLike[str]) -> Any:
    """A tokenizer of transformers. By default, it would ask on the terminal whether to run the code that a folder
    brings."""
    return AutoTokenizer.from_pretrained(name, trust_remote_code=False)


def _check_patches(images: Any, vision: Any, folder: Path) -> None:
    """ModelError unless images are cut as the vision tower takes them."""
    sides = {
        "patch_size": (vision.patch_size, images.patch_size),
        "merge_size": (vision.spatial_merge_size, images.merge_size),
        "temporal_patch_size": (vision.temporal_patch_size, images.temporal_patch_size),
    }
    for name, (expected, found) in sides.items():
        if expected != found:
            raise ModelError(
                f"{name} is not the text encoder's", where=folder, expected=expected, found=found, do=AGAIN
            )


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """ModelError for a tokenizer that loses text: without its file, transformers makes one with an empty vocabulary."""
    if (found := tokenizer.decode(tokenizer(PROBE).input_ids)) != PROBE:
        raise ModelError("the tokenizer loses text", where=folder, expected=repr(PROBE), found=repr(found), do=AGAIN)
