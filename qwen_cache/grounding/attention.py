"""Experimental: never run on the real encoder's attention. Attention of chosen tokens on the images.

Rows of the attention of a Qwen2.5-VL or Qwen3-VL, from a pass that runs anyway:

    with attention_rows(model, tokens=[[[412, 413]]], images=image_tokens(model.config, ids, grids)) as rows:
        model(**inputs)
    rows.attention[0][0]  # [phrases, layers * heads, h, w] of the first row of the batch and its first image

Hooks take the queries of the chosen tokens and all keys of a layer, and compute only those rows of the softmax, in
float32: the pass keeps its kernel (SDPA, flash attention), no [L, L] matrix is made, and the model is unchanged. With a
prefix of cached keys and values, token positions count within the pass and columns from the beginning of the prefix.
Refuses sliding windows, caches other than DynamicCache, masks other than [B, L], and an empty result:
`output_attentions=True` silently returns an empty tuple under SDPA.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel, rotate_half
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

from qwen_cache.errors import ModelError

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
        _check(tokens, images)
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
    decoder = _decoder(model)
    rows = AttentionRows(tokens, images, merge)
    handles = _hooks(decoder, rows)
    try:
        yield rows
        rows.finish()
    finally:
        for handle in handles:
            handle.remove()


def _hooks(decoder: Any, rows: AttentionRows) -> list[Any]:
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
    return handles


def _decoder(model: nn.Module) -> Any:
    """The language model of a Qwen2.5-VL or Qwen3-VL."""
    decoder: Any = next((module for module in model.modules() if isinstance(module, tuple(QUERIES_AND_KEYS))), None)
    if decoder is None:
        raise ModelError("not a Qwen2.5-VL or Qwen3-VL", found=type(model).__name__)
    if any(getattr(layer.self_attn, "sliding_window", None) for layer in decoder.layers):
        raise ModelError("a layer has a sliding window", expected="full attention in every layer")
    return decoder


def _check(tokens: Sequence[Phrases], images: Sequence[Sequence[ImageTokens]]) -> None:
    if len(tokens) != len(images) or not tokens:
        raise ModelError("phrases and images are not of one batch", expected=len(images), found=len(tokens))
    for number, (phrases, row_images) in enumerate(zip(tokens, images, strict=True)):
        if not row_images:
            raise ModelError("no image tokens", where=f"row {number}")
        if not phrases or not all(phrases):
            raise ModelError("a phrase has no token", where=f"row {number}")


def _heads(tensor: Float[Tensor, "B L *width"], head_dim: int) -> Float[Tensor, "B heads L head_dim"]:
    """The heads of a projection's output, or of a norm's, where they are already separate."""
    return tensor.view(*tensor.shape[:2], -1, head_dim).transpose(1, 2)


def _rotate(
    heads: Float[Tensor, "B heads L D"], cos: Float[Tensor, "B L D"], sin: Float[Tensor, "B L D"]
) -> Float[Tensor, "B heads L D"]:
    rotated: Tensor = heads * cos[:, None] + rotate_half(heads) * sin[:, None]
    return rotated
