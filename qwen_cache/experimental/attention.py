"""Never run on the real encoder: Qwen2.5-VL's attention to image patches as a mask, and its refinement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, Sam2Model, SamModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel, rotate_half
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from qwen_cache.errors import ModelError, SourceError
from qwen_cache.models.encoders import known_type, load_text_encoder, make_processor, text_encoder_type
from qwen_cache.models.family import VISION_END, Template, pixel_token
from qwen_cache.models.folder import read_config
from qwen_cache.models.loading import load_whole
from qwen_cache.sources.captions import Span, find, parse, token_positions

# ---- processor -------------------------------------------------------------------------------------------------------
# Experimental. Images as inputs of Qwen2.5-VL or Qwen3-VL, without torchvision, and the transformation of each.
#
# For code with its own image processor: the values are those of `Qwen2VLImageProcessorPil`, and `meta_data` maps a mask
# back to the original. Each side is scaled separately to a multiple of two patches (28 pixels for Qwen2.5-VL, 32 for
# Qwen3-VL), without padding. Refuses arrays other than H×W×3 of uint8.

ImageLike = Image.Image | NDArray[Any]


class QwenImageProcessor:
    """`preprocess` for one image or several; without an `image_processor` for Qwen2.5-VL, with stock size limits."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil | None = None) -> None:
        self.image_processor = image_processor or Qwen2VLImageProcessorPil()

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str]) -> QwenImageProcessor:
        """A processor with the patch size, size limits and normalisation of a folder or repository."""
        return cls(Qwen2VLImageProcessorPil.from_pretrained(name))

    def preprocess(self, image: ImageLike | Sequence[ImageLike]) -> dict[str, Any]:
        """`pixel_values` `[patches, D]`, `image_grid_thw` `[images, 3]`, `image_sizes` and `meta_data`.

        D is 3 · 2 · `patch_size`²: 1176 for Qwen2.5-VL, 1536 for Qwen3-VL. `image_sizes` has the original `(h, w)` of
        each image; `meta_data` is a dict for a single image, and a list of dicts for a list.
        """
        is_single = isinstance(image, Image.Image | np.ndarray)
        images = to_pil(image)
        sizes = [(each.height, each.width) for each in images]
        inputs = self.image_processor.preprocess(images, return_tensors="pt")
        patch_size = self.image_processor.patch_size
        resized = [(h * patch_size, w * patch_size) for _, h, w in inputs["image_grid_thw"].tolist()]
        transformations = [meta_data(size, shape) for size, shape in zip(sizes, resized, strict=True)]
        return {**inputs, "image_sizes": sizes, "meta_data": transformations[0] if is_single else transformations}


def to_pil(images: ImageLike | Sequence[ImageLike]) -> list[Image.Image]:
    """One image or several, in RGB."""
    if isinstance(images, Image.Image | np.ndarray):
        return [_to_pil(images)]
    return [_to_pil(each) for each in images]


def _to_pil(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise SourceError(
            "an array is not an image",
            expected="uint8 of shape (height, width, 3)",
            found=f"{image.dtype} of shape {image.shape}",
        )
    return Image.fromarray(image)


def meta_data(original: tuple[int, int], resized: tuple[int, int]) -> dict[str, Any]:
    """The transformation of an image, in the keys that other image processors use."""
    shape = {"height": resized[0], "width": resized[1]}
    return {
        "original_shape": {"height": original[0], "width": original[1]},
        "image_shape": shape,
        "scale_factor": (resized[0] / original[0], resized[1] / original[1]),
        "padding": dict.fromkeys(("before_height", "after_height", "before_width", "after_width"), 0),
        "padded_shape": dict(shape),
    }


# ---- attention -------------------------------------------------------------------------------------------------------
# Experimental: never run on the real encoder's attention. Attention of chosen tokens on the images.
#
# Rows of the attention of a Qwen2.5-VL or Qwen3-VL, from a pass that runs anyway:
#
#     with attention_rows(model, tokens=[[[412, 413]]], images=image_tokens(model.config, ids, grids)) as rows:
#         model(**inputs)
#     rows.attention[0][0]  # [phrases, layers * heads, h, w] of the first row of the batch and its first image
#
# Hooks take the queries of the chosen tokens and all keys of a layer, and compute only those rows of the softmax, in
# float32: the pass keeps its kernel (SDPA, flash attention), no [L, L] matrix is made, and the model is unchanged. With
# a prefix of cached keys and values, token positions count within the pass and columns from the beginning of the
# prefix. Refuses sliding windows, caches other than DynamicCache, masks other than [B, L], and an empty result:
# `output_attentions=True` silently returns an empty tuple under SDPA.

Merge = Literal["mean", "max"]
Phrases = Sequence[Sequence[int]]
"""The token positions of each phrase."""

QUERIES_AND_KEYS: dict[type[Any], tuple[str, str]] = {
    Qwen2_5_VLTextModel: ("q_proj", "k_proj"),
    Qwen3VLTextModel: ("q_norm", "k_norm"),
}
"""The language models that can be read, and the modules of an attention layer whose outputs RoPE rotates."""


@dataclass(frozen=True)
class ImageTokens:
    """The tokens of one image in a row of the batch, in raster order on a grid `(h, w)`."""

    columns: Int[Tensor, " n"]
    grid: tuple[int, int]


def image_tokens(
    config: Any, input_ids: Int[Tensor, "B L"], image_grid_thw: Int[Tensor, "images 3"]
) -> list[list[ImageTokens]]:
    """The images of each row of `input_ids`; `image_grid_thw` are their grids. ModelError if they disagree."""
    merge_size = config.vision_config.spatial_merge_size
    grids = [(t * h // merge_size, w // merge_size) for t, h, w in image_grid_thw.tolist()]
    rows: list[list[ImageTokens]] = []
    used = 0
    for number, row in enumerate(input_ids):
        columns = (row == config.image_token_id).nonzero()[:, 0]
        if not len(columns):
            raise ModelError("no image tokens", where=f"row {number}", do="put the images into the same input")
        images = []
        while len(columns):
            size = grids[used][0] * grids[used][1] if used < len(grids) else 0
            if not 0 < size <= len(columns):
                raise ModelError(
                    "the image tokens do not fit the grids",
                    where=f"row {number}, image {used + 1}",
                    expected=size or f"{len(grids)} images",
                    found=f"{len(columns)} tokens",
                )
            images.append(ImageTokens(columns[:size], grids[used]))
            columns, used = columns[size:], used + 1
        rows.append(images)
    if used < len(grids):
        raise ModelError("there are more grids than images", expected=used, found=len(grids))
    return rows


class AttentionRows:
    """Attention and hidden states of the chosen tokens in one pass; complete after the context of `attention_rows`."""

    attention: list[list[Float[Tensor, "K C h w"]]]
    """For each row of the batch and each of its images; K phrases, C is layers × heads."""
    hidden_states: list[list[Float[Tensor, "layers P D"]]]
    """For each row and phrase: the output of each layer at its tokens, the last one after `norm`."""

    def __init__(self, tokens: Sequence[Phrases], images: Sequence[Sequence[ImageTokens]], merge: Merge) -> None:
        if len(tokens) != len(images) or not tokens:
            raise ModelError("phrases and images are not of one batch", expected=len(images), found=len(tokens))
        for number, (phrases, row_images) in enumerate(zip(tokens, images, strict=True)):
            if not row_images:
                raise ModelError("no image tokens", where=f"row {number}")
            if not phrases or not all(phrases):
                raise ModelError("a phrase has no token", where=f"row {number}")
        self._ends = [torch.tensor([len(phrase) for phrase in row]).cumsum(0).tolist() for row in tokens]
        self._positions = pad_sequence([torch.tensor([*chain(*row)]) for row in tokens], batch_first=True)
        self._chosen, self._last = self._positions, int(self._positions.max())
        self._images = images
        self._columns = [torch.cat([image.columns for image in row]) for row in images]
        self._merge = torch.mean if merge == "mean" else torch.amax
        self._mask: Tensor | None = None
        self._visible: Tensor | None = None
        self._queries: Tensor | None = None
        self._keys: Tensor | None = None
        self._attention: list[list[Float[Tensor, "K heads columns"]]] = []
        self._hidden: list[Float[Tensor, "B P D"]] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._attention:
            raise ModelError("the model was run twice", expected="one pass", do="use one attention_rows for each pass")
        self._mask = kwargs.get("attention_mask")
        if self._mask is not None and getattr(self._mask, "ndim", 0) != 2:
            raise ModelError("the attention mask is not one of tokens", expected="[B, L]", found=type(self._mask))
        device = next(module.parameters()).device  # once: a copy from the host waits for all earlier work
        self._chosen = self._positions.to(device)
        self._columns = [columns.to(device) for columns in self._columns]

    def on_queries(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        batch, length = output.shape[:2]
        if batch != len(self._positions) or length <= self._last:
            raise ModelError(
                "the chosen tokens are not in this pass",
                expected=f"{len(self._positions)} rows of more than {self._last} tokens",
                found=f"{batch} of {length}",
            )
        self._queries = self._of_chosen(output)

    def on_keys(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._keys = output

    @torch.no_grad()
    def on_attention(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The chosen rows of one layer, over the columns of the images, merged over the tokens of each phrase."""
        assert self._queries is not None
        assert self._keys is not None
        cos, sin = kwargs["position_embeddings"]
        queries = _heads(self._queries, module.head_dim)
        queries = _rotate(queries, self._of_chosen(cos), self._of_chosen(sin)).float()
        length, past = self._keys.shape[1], kwargs.get("past_key_values")
        if past is None:
            keys = _rotate(_heads(self._keys, module.head_dim), cos, sin)
        elif isinstance(past, DynamicCache):
            keys = past.layers[module.layer_idx].keys
        else:
            raise ModelError("rows cannot be read from this cache", expected="DynamicCache", found=type(past).__name__)
        self._queries = self._keys = None
        if self._visible is None:
            self._visible = self._visible_columns(length, keys.shape[2]).to(keys.device)

        # The queries of the heads that share keys become rows of one product: keys are never repeated.
        grouped = queries.reshape(*keys.shape[:2], -1, module.head_dim)
        scores = (grouped @ keys.float().transpose(2, 3) * module.scaling).view(*queries.shape[:3], -1)
        rows = scores.masked_fill(~self._visible[:, None], -torch.inf).softmax(-1)
        self._attention.append(
            [
                torch.stack([self._merge(values, 1) for values in self._by_phrase(row[..., columns.to(row.device)], i)])
                for i, (row, columns) in enumerate(zip(rows, self._columns, strict=True))
            ]
        )

    def on_hidden(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._hidden.append(self._of_chosen(output.detach()))

    def finish(self) -> None:
        """Put the layers together."""
        if not self._attention:
            raise ModelError(
                "no attention was captured: the model was not run", do="run the given model inside the context"
            )
        self.attention = []
        for layers, images in zip(zip(*self._attention, strict=True), self._images, strict=True):
            stack = torch.stack(layers, 1).flatten(1, 2)
            parts = torch.split(stack, [len(image.columns) for image in images], -1)
            grids = [image.grid for image in images]
            self.attention.append([p.reshape(*p.shape[:2], *g) for p, g in zip(parts, grids, strict=True)])
        hidden = torch.stack(self._hidden, 1)
        self.hidden_states = [self._by_phrase(row, i) for i, row in enumerate(hidden)]

    def _of_chosen(self, tensor: Float[Tensor, "B L ..."]) -> Float[Tensor, "B P ..."]:
        positions = self._chosen.to(tensor.device)
        return tensor[torch.arange(len(positions), device=tensor.device)[:, None], positions]

    def _by_phrase(self, tensor: Float[Tensor, "_ P _"], row: int) -> list[Tensor]:
        """The values of the chosen tokens of `row`, split by phrase, without the padding after them."""
        return list(tensor.tensor_split(self._ends[row], 1))[: len(self._ends[row])]

    def _visible_columns(self, length: int, columns: int) -> Bool[Tensor, "B P columns"]:
        """The columns that each chosen token attends to: those up to its own, without padding."""
        own = self._positions + columns - length
        visible = torch.arange(columns) <= own[..., None]
        if self._mask is not None:
            valid = self._mask.bool().cpu()
            for row, ends in enumerate(self._ends):
                if not valid[row, own[row, : ends[-1]]].all():
                    raise ModelError("a chosen token is padding", where=f"row {row}")
            visible &= valid[:, None]
        return visible


@contextmanager
def attention_rows(
    model: nn.Module, tokens: Sequence[Phrases], images: Sequence[Sequence[ImageTokens]], merge: Merge = "mean"
) -> Iterator[AttentionRows]:
    """Capture the attention of `tokens` in the one pass of `model` inside the context.

    For each row of the batch, `tokens` has the positions of each phrase's tokens in this pass, and `images` the images
    (`image_tokens`), with columns counted from the beginning of cached keys. `merge` reduces a phrase's tokens to one.
    """
    decoder: Any = next((module for module in model.modules() if isinstance(module, tuple(QUERIES_AND_KEYS))), None)
    if decoder is None:
        raise ModelError("not a Qwen2.5-VL or Qwen3-VL", found=type(model).__name__)
    if any(getattr(layer.self_attn, "sliding_window", None) for layer in decoder.layers):
        raise ModelError("a layer has a sliding window", expected="full attention in every layer")
    rows = AttentionRows(tokens, images, merge)
    queries, keys = next(names for kind, names in QUERIES_AND_KEYS.items() if isinstance(decoder, kind))
    handles = [decoder.register_forward_pre_hook(rows.begin, with_kwargs=True)]
    for layer in decoder.layers:
        handles += [
            layer.self_attn.get_submodule(queries).register_forward_hook(rows.on_queries),
            layer.self_attn.get_submodule(keys).register_forward_hook(rows.on_keys),
            layer.self_attn.register_forward_hook(rows.on_attention, with_kwargs=True),
        ]
    for module in (*decoder.layers[:-1], decoder.norm):
        handles.append(module.register_forward_hook(rows.on_hidden))
    try:
        yield rows
        rows.finish()
    finally:
        for handle in handles:
            handle.remove()


def _heads(tensor: Float[Tensor, "B L *width"], head_dim: int) -> Float[Tensor, "B heads L head_dim"]:
    """The heads of a projection's output, or of a norm's, where they are already separate."""
    return tensor.view(*tensor.shape[:2], -1, head_dim).transpose(1, 2)


def _rotate(
    heads: Float[Tensor, "B heads L D"], cos: Float[Tensor, "B L D"], sin: Float[Tensor, "B L D"]
) -> Float[Tensor, "B heads L D"]:
    rotated: Tensor = heads * cos[:, None] + rotate_half(heads) * sin[:, None]
    return rotated


# ---- frozen qwen -----------------------------------------------------------------------------------------------------
# Experimental: never run on the real encoder's attention. A Qwen2.5-VL or Qwen3-VL as a frozen source of it.
#
#     qwen = FrozenQwen.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", device="cuda", dtype=torch.bfloat16)
#     qwen.ground(image, "make [[the red car]] blue").attention[0]  # [1, 784, h, w] of the first image
#
# It shows where in the images some words attend, in one pass without `lm_head` and without eager attention. The weights
# take no gradient and the model stays in eval mode, whatever mode its owner is set to. Positions are always
# three-dimensional: `mm_token_type_ids` is made here. Any other model is a ModelError.

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

        qwen = FrozenQwen.from_pretrained("Qwen/Qwen2.5-VL-7B-Instruct", device="cuda")
        maps = qwen.ground(image, "make [[the red car]] blue").attention[0]  # [1, layers × heads, h, w]
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


# ---- refine ----------------------------------------------------------------------------------------------------------
# Experimental: never run on the real encoder's attention. Sharpen a mask with SAM or SAM 2.
#
# Segment Anything gets the coarse mask of a mask head twice, as a box and as a mask prompt, but not the words. Loads
# only safetensors; refuses a folder of any other model.

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet statistics in RGB, with which SAM and SAM 2 were trained."""
KINDS: dict[str, type[Any]] = {"sam": SamModel, "sam2": Sam2Model, "sam2_video": Sam2Model}
"""Model classes by `model_type`; published SAM 2 models are sam2_video; an image needs only their image half."""


@dataclass(frozen=True)
class Frame:
    """The square input of the model, with the image scaled to `height` × `width` in its upper left corner."""

    side: int
    height: int
    width: int


def load_sam(folder: Path) -> Any:
    """The frozen model in `folder`; ModelError if it is not SAM."""
    try:
        model_type = read_config(folder / "config.json").get("model_type")
    except ModelError as error:
        raise ModelError("there is no model here", where=folder, found=error.fault, do="name a folder of SAM") from None
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise ModelError("this is not SAM", where=folder, expected=", ".join(KINDS), found=model_type)
    return load_whole(KINDS[model_type], folder, attn_implementation="sdpa")  # not what its config.json names


@torch.no_grad()
def refine(sam: Any, image: Image.Image, coarse_logits: torch.Tensor) -> torch.Tensor:
    """The sharpened mask of `image`, `[H, W]` in 0..1, from logits `[h, w]` of the whole image at any resolution."""
    frame = _frame(sam, image)
    around = 0, frame.side - frame.width, 0, frame.side - frame.height
    coarse = coarse_logits.to(sam.device, torch.float32)[None, None]
    scaled = image.convert("RGB").resize((frame.width, frame.height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy((np.asarray(scaled) / 255 - MEAN) / STD).float().permute(2, 0, 1)
    # The logits in the frame, `[1, 1, S, S]` with S four times the embedding's grid; negative around the image.
    prompt = interpolate(coarse, (frame.height, frame.width), mode="bilinear")
    prompt = pad(prompt, around, value=min(-1.0, coarse.min().item()))
    size = 4 * frame.side // sam.config.prompt_encoder_config.patch_size
    prompt = interpolate(prompt, (size, size), mode="bilinear")
    output = sam(
        pixel_values=pad(pixels, around)[None].to(sam.device, sam.dtype),
        input_boxes=_box(coarse, image, frame).to(sam.dtype),
        input_masks=prompt.to(sam.dtype),
        multimask_output=False,
    )
    square = interpolate(output.pred_masks[:, 0].float(), (frame.side, frame.side), mode="bilinear")
    unpadded = square[..., : frame.height, : frame.width]
    return interpolate(unpadded, (image.height, image.width), mode="bilinear")[0, 0].sigmoid()


def _frame(sam: Any, image: Image.Image) -> Frame:
    """SAM keeps the aspect ratio of an image, SAM 2 stretches it to the square."""
    side = sam.config.prompt_encoder_config.image_size
    if sam.config.model_type != "sam":
        return Frame(side, side, side)
    scale = side / max(image.size)
    return Frame(side, int(image.height * scale + 0.5), int(image.width * scale + 0.5))


def _box(coarse: torch.Tensor, image: Image.Image, frame: Frame) -> torch.Tensor:
    """The bounding box of the mask, or else of the whole image, in the frame: `[1, 1, 4]`."""
    inside = interpolate(coarse, (image.height, image.width), mode="bilinear")[0, 0] > 0
    rows, columns = inside.any(1).nonzero().flatten(), inside.any(0).nonzero().flatten()
    x0, y0, x1, y1 = 0, 0, image.width, image.height
    if len(rows):
        x0, y0, x1, y1 = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    across, down = frame.width / image.width, frame.height / image.height
    return torch.tensor([[[x0 * across, y0 * down, x1 * across, y1 * down]]], device=coarse.device)
