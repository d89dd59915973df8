"""The text lane: pictures and prompts in, prompt embeddings out, through the stock Qwen2.5-VL.

The model is causal and the pictures come before the instruction, so everything up to the last picture is the same for
every prompt about them: it is run once (`read`), and of each prompt only what follows, on the kept keys and values
(`embed`). What comes out depends on the pictures and that prompt alone, whichever other prompts there are.

Refuses to run with 1-D positions: transformers 5 silently falls back to them when `mm_token_type_ids` is missing, and
diffusers 0.42's Edit pipelines do not pass it (huggingface/diffusers issue 14194). The pipelines' `lm_head` is not
run; the last hidden state after the final norm is what they use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
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
class Prefix:
    """What every prompt about some pictures begins with, and the keys and values to go on from.

    `embeds` is what is kept of it (`[P, D]`, on the CPU); `next_position` is that of the next token, in all three axes.
    Without pictures nothing is shared: `past` is None.
    """

    pictures: int
    embeds: Float[torch.Tensor, "P D"]
    past: Any
    next_position: int


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
        self._tokenizing = Lock()  # fast tokenizers may not be used by two threads at once

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """What the model takes for `pictures` (RGB, already resized for the encoder) before any prompt, on the CPU.

        For any thread, one at a time. Without pictures nothing is shared by prompts, and it is empty.
        """
        if not pictures:
            return {}
        assert self.processor is not None
        with self._tokenizing:
            inputs = self.processor(
                text=[self._split("", len(pictures))[0]], images=list(pictures), return_tensors="pt"
            )
        if "mm_token_type_ids" not in inputs:
            raise ModelError(
                "the processor returned no mm_token_type_ids: positions would silently be one-dimensional",
                do="install the version of transformers that qwen-cache asks for",
            )
        pin = self.device.type == "cuda"
        return {name: tensor.pin_memory() if pin else tensor for name, tensor in inputs.items()}

    @torch.inference_mode()
    def read(self, inputs: dict[str, torch.Tensor]) -> Prefix:
        """Run everything up to the end of the last picture."""
        if not inputs:
            return Prefix(0, torch.empty(0, self.model.config.text_config.hidden_size, dtype=self.model.dtype), None, 0)
        pictures = len(inputs["image_grid_thw"])
        inputs = {name: tensor.to(self.device, non_blocking=True) for name, tensor in inputs.items()}
        output = self.model(**inputs, use_cache=True)
        past, hidden = output.past_key_values, output.last_hidden_state[0]
        next_position = past.get_seq_length() + int(self.model.rope_deltas)
        return Prefix(pictures, hidden[self.template.drop_idx :].cpu(), past, next_position)

    @torch.inference_mode()
    def embed(self, prefix: Prefix, prompt: str) -> Float[torch.Tensor, "_ D"]:
        """The embeddings of `prompt` after `prefix.embeds`, on the CPU."""
        if prefix.past is None:
            ids = self._ids(self.template.text(prompt, 0))
            return self.model(input_ids=ids).last_hidden_state[0, self.template.drop_idx :].cpu()  # type: ignore[no-any-return]
        ids = self._ids(self._split(prompt, prefix.pictures)[1])
        positions = torch.arange(prefix.next_position, prefix.next_position + ids.shape[1], device=self.device)
        length = prefix.past.get_seq_length()
        output = self.model(
            input_ids=ids,
            position_ids=positions.expand(3, 1, -1),
            past_key_values=prefix.past,
            use_cache=True,
        )
        prefix.past.crop(length - prefix.past.get_seq_length())
        embeds: torch.Tensor = output.last_hidden_state[0].cpu()
        return embeds

    def _split(self, prompt: str, pictures: int) -> tuple[str, str]:
        """The whole input up to the end of the last picture, and what follows.

        A special token stands between them, so both are cut into the same tokens as the whole.
        """
        *before, after = self.template.text(prompt, pictures).split(VISION_END, pictures)
        return "".join(part + VISION_END for part in before), after

    def _ids(self, text: str) -> torch.Tensor:
        with self._tokenizing:
            ids: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return ids.to(self.device)
