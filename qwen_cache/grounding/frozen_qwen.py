"""Experimental: never run on the real encoder's attention. A Qwen2.5-VL or Qwen3-VL as a frozen source of it.

    qwen = FrozenQwen.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", device="cuda", dtype=torch.bfloat16)
    qwen.ground(image, "make [[the red car]] blue").attention[0]  # [1, 784, h, w] of the first image

It shows where in the images some words attend, in one pass without `lm_head` and without eager attention. The weights
take no gradient and the model stays in eval mode, whatever mode its owner is set to. Positions are always
three-dimensional: `mm_token_type_ids` is made here. Any other model is a ModelError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from qwen_cache.errors import SourceError
from qwen_cache.grounding.attention import Merge, attention_rows, image_tokens
from qwen_cache.grounding.processor import ImageLike, to_pil
from qwen_cache.models.encoders import known_type, load_text_encoder, make_processor, text_encoder_type
from qwen_cache.models.family import VISION_END, Template, pixel_token
from qwen_cache.sources.captions import Span, find, parse, token_positions

_USER = "<|im_start|>user\n{}<|im_end|>\n"
_IMAGE = f"<|vision_start|><|image_pad|>{VISION_END}"
CHAT = {
    "qwen2_5_vl": Template(
        f"<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{_USER}", _IMAGE, 0, condition_image_size=0
    ),
    "qwen3_vl": Template(_USER, _IMAGE, 0, condition_image_size=0),
}
"""A user's turn in the model's chat format, by `model_type`: Qwen3-VL has no default system prompt."""


@dataclass(frozen=True)
class Grounding:
    """The attention of K phrases on each image."""

    attention: list[Float[Tensor, "K C _h _w"]]
    """One per image, float32; C is layers × heads, h×w the grid of the image's tokens."""
    hidden_states: list[Float[Tensor, "layers _P D"]]
    """One per phrase: the output of each layer at its P tokens, the last one after the language model's `norm`."""
    image_grid: list[tuple[int, int]]
    """The height and width of each image in tokens."""


class FrozenQwen(nn.Module):
    """Experimental. A frozen Qwen2.5-VL or Qwen3-VL with or without its `lm_head`, and a processor.

    `merge` reduces the attention of a phrase's tokens to one map: "mean" or "max". `template` is the text around the
    instruction; None: a user's turn in the model's chat format. With one of
    `qwen_cache.models.family.TEMPLATES`, and images resized as for that pipeline, the attention is that of a cache's
    `prompt_embeds`. Raises ModelError for any other model.
    """

    def __init__(
        self, model: nn.Module, processor: Any, merge: Merge = "mean", template: Template | None = None
    ) -> None:
        super().__init__()
        kind = known_type(getattr(getattr(model, "config", None), "model_type", None), where=type(model).__name__)
        self.model: Any = model.base_model  # without the lm_head
        self.model.requires_grad_(False)
        self.processor, self.merge, self.template = processor, merge, template or CHAT[kind]
        self.eval()

    @classmethod
    def from_pretrained(
        cls,
        name: str | PathLike[str],
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        merge: Merge = "mean",
    ) -> FrozenQwen:
        """Load `name`, a folder or repository of Qwen2.5-VL or Qwen3-VL, onto `device` in `dtype`.

        Raises ModelError for any other model, if the weights cannot be loaded, or some are missing.
        """
        model = load_text_encoder(Path(name), dtype)
        return cls(model.to(device), make_processor(text_encoder_type(name), name), merge)

    def train(self, mode: bool = True) -> FrozenQwen:
        """Stay in eval mode, whatever `mode` is."""
        super().train(False)
        return self

    @property
    def in_channels(self) -> int:
        """Channels of the attention: layers × heads of the language model."""
        config = self.model.config.text_config
        return int(config.num_attention_heads * config.num_hidden_layers)

    @property
    def patch_size(self) -> int:
        """Pixels per side of a patch."""
        return int(self.model.config.vision_config.patch_size)

    @property
    def merge_size(self) -> int:
        """Patches per side of a token."""
        return int(self.model.config.vision_config.spatial_merge_size)

    @torch.no_grad()
    def ground(
        self, images: ImageLike | Sequence[ImageLike], text: str, phrase: str | Sequence[str] | None = None
    ) -> Grounding:
        """The attention of the phrases of `text`: `phrase`, else the words marked with `[[ ]]`, else the whole text.

        Images are PIL images or uint8 arrays `[H, W, 3]`. With K phrases the result has attention `[K, C, h, w]` for
        each image: C is `in_channels`; h and w are in tokens of `patch_size` · `merge_size` pixels per side.
        Raises SourceError without images, for an array of another kind, for a token of pixels in `text`, for invalid
        marks, for marks beside `phrase`, and for a phrase that does not occur exactly once.
        """
        pil_images = to_pil(images)
        if not pil_images:
            raise SourceError("there is no image to look at")
        prompt, phrases = spans_of_phrases(text, phrase)
        if token := pixel_token(prompt):
            raise SourceError("the text has a token that stands for pixels", found=token)
        inputs = self.inputs(pil_images, prompt)
        tokens = [self._positions(inputs["input_ids"], prompt, spans, len(pil_images)) for spans in phrases]
        placed = image_tokens(self.model.config, inputs["input_ids"], inputs["image_grid_thw"])
        with attention_rows(self.model, [tokens], placed, self.merge) as rows:
            self.model(**inputs, use_cache=False)
        return Grounding(rows.attention[0], rows.hidden_states[0], [image.grid for image in placed[0]])

    def inputs(self, images: Sequence[Any], prompt: str) -> dict[str, Tensor]:
        """The model's inputs for `prompt` about `images`, on its device, with `mm_token_type_ids` `[1, L]`."""
        text = self.template.text(prompt, len(images))
        inputs = dict(self.processor(text=[text], images=list(images), return_tensors="pt"))
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == self.model.config.image_token_id).int()
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def _positions(self, input_ids: Tensor, prompt: str, spans: Sequence[Span], images: int) -> list[int]:
        """The positions of the tokens of `spans`, found in the text after the images: it begins with the prompt, and
        the special token before it ensures the same tokens as in the whole."""
        tail = self.template.text(prompt, images).split(VISION_END, images)[-1]
        before = input_ids.shape[1] - len(self.processor.tokenizer(tail)["input_ids"])
        return [before + position for position in token_positions(self.processor.tokenizer, tail, spans)]


def spans_of_phrases(text: str, phrase: str | Sequence[str] | None) -> tuple[str, list[list[Span]]]:
    """The prompt without marks, and the spans of each phrase: the given phrases, else the marked words, else all."""
    prompt, marked = parse(text)
    if phrase is None:
        return prompt, [marked or [(0, len(prompt))]]
    if marked:
        raise SourceError("phrases are marked in the text and given beside it", found=text, do="use one of the two")
    return prompt, [[find(prompt, each)] for each in ([phrase] if isinstance(phrase, str) else phrase)]
