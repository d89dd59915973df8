"""The text lane: pictures and prompts in, prompt embeddings out, through the stock Qwen2.5-VL.

The model is causal and the pictures come before the instruction, so everything up to the last picture is the same for
every prompt about them. The first prompt is encoded whole; of every further one (the empty prompt, for caption
dropout) only the tokens after the pictures are run, on the kept keys and values.

Refuses to run with 1-D positions: transformers 5 silently falls back to them when `mm_token_type_ids` is missing, and
diffusers 0.42's Edit pipelines do not pass it (huggingface/diffusers issue 14194). The pipelines' `lm_head` is not
run; the last hidden state after the final norm is what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.encode.loading import load_whole
from qwen_cache.encode.template import TEMPLATES, VISION_END
from qwen_cache.format.errors import ModelError
from qwen_cache.model_folder import ModelFolder


class ImageOnlyQwen2VLProcessor(Qwen2VLProcessor):  # type: ignore[misc]  # transformers is not typed for mypy
    """Qwen2VLProcessor without its video half, which needs torchvision.

    transformers derives the parts of a processor from this signature. Pictures go through PIL, with torchvision or
    without.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


@dataclass(frozen=True)
class EncodedText:
    """Embeddings of several prompts about the same pictures.

    `first` is that of the first prompt, whole (`[L, D]`); its first `prefix_length` rows begin those of every other
    prompt, of which `others` hold the rest (`[L', D]`).
    """

    first: Float[torch.Tensor, "L D"]
    prefix_length: int
    others: tuple[Float[torch.Tensor, "_ D"], ...]

    def whole(self, i: int) -> Float[torch.Tensor, "_ D"]:
        """The embeddings of prompt `i` with the shared prefix."""
        return self.first if i == 0 else torch.cat([self.first[: self.prefix_length], self.others[i - 1]])


def load_processor(model: ModelFolder) -> ImageOnlyQwen2VLProcessor:
    """The processor of an Edit model, on PIL."""
    folder = model.part("processor")
    pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return ImageOnlyQwen2VLProcessor(pictures, AutoTokenizer.from_pretrained(folder))


def kept_tokens(model: ModelFolder, prompts: Sequence[str]) -> list[int]:
    """How many tokens each prompt has after `drop_idx`, without pictures."""
    template, tokenizer = TEMPLATES[model.pipeline], AutoTokenizer.from_pretrained(model.part("tokenizer"))
    return [len(tokenizer(template.text(prompt, 0))["input_ids"]) - template.drop_idx for prompt in prompts]


class TextEncoder:
    """Qwen2.5-VL without its `lm_head`, on its own device."""

    def __init__(self, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
        self.template = TEMPLATES[model.pipeline]
        self.processor = load_processor(model) if model.takes_controls else None
        self.tokenizer = (
            self.processor.tokenizer if self.processor else AutoTokenizer.from_pretrained(model.part("tokenizer"))
        )
        whole = load_whole(Qwen2_5_VLForConditionalGeneration, model.part("text_encoder"), dtype=dtype)
        self.model = whole.model.to(device)
        self.device = device

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image], prompts: Sequence[str]) -> EncodedText:
        """The embeddings of `prompts` about `pictures` (RGB, already resized for the encoder), on the CPU."""
        inputs = self._inputs(pictures, prompts[0])
        shared = self._shared_length(inputs["input_ids"][0], len(pictures))
        output = self.model(**inputs, use_cache=True)
        past, first = output.past_key_values, output.last_hidden_state[0]
        others = []
        for prompt in prompts[1:]:
            past.crop(shared - past.get_seq_length())
            suffix = self._inputs_after_pictures(prompt, len(pictures))
            output = self.model(input_ids=suffix, past_key_values=past, use_cache=True)
            others.append(output.last_hidden_state[0].cpu())
        drop = self.template.drop_idx
        return EncodedText(first[drop:].cpu(), shared - drop, tuple(others))

    def _inputs(self, pictures: Sequence[Image.Image], prompt: str) -> dict[str, torch.Tensor]:
        text = self.template.text(prompt, len(pictures))
        if self.processor is None:
            inputs = self.tokenizer(text, return_tensors="pt")
        else:
            inputs = self.processor(text=[text], images=list(pictures), return_tensors="pt")
            if "mm_token_type_ids" not in inputs:
                raise ModelError(
                    "the processor returned no mm_token_type_ids: positions would silently be one-dimensional",
                    do="install the version of transformers that qwen-cache asks for",
                )
        return dict(inputs.to(self.device))

    def _inputs_after_pictures(self, prompt: str, pictures: int) -> torch.Tensor:
        """Token ids of what follows the last picture, or the dropped part of the template where there is none."""
        text = self.template.text(prompt, pictures)
        after = text.split(VISION_END, pictures)[pictures]
        ids: torch.Tensor = self.tokenizer(after, return_tensors="pt")["input_ids"]
        return ids[:, 0 if pictures else self.template.drop_idx :].to(self.device)

    def _shared_length(self, input_ids: torch.Tensor, pictures: int) -> int:
        """How many tokens do not depend on the prompt (which may name the end of a picture, too)."""
        ends = (input_ids == self.tokenizer.convert_tokens_to_ids(VISION_END)).nonzero()
        return int(ends[pictures - 1]) + 1 if pictures else self.template.drop_idx
