"""The text lane: images and prompts in, prompt embeddings out, through the stock Qwen2.5-VL or Qwen3-VL.

The model is causal and the images come before the instruction, so all prompts about the same images share everything
up to the last image. This prefix runs once (`read`); of each prompt only the suffix runs, on the kept keys and values
(`embed`). With `batch_tokens` of 1 each pass has one set of images, and on one machine the embeddings are the same,
bit for bit, whatever else is encoded. Passes with several, padded on the right, agree within the rounding of the dtype:
matrix products of other shapes are added up in another order.

Refuses to run with 1-D positions: transformers 5 silently falls back to them if `mm_token_type_ids` is missing, and
diffusers 0.42's Edit pipelines do not pass it (huggingface/diffusers issue 14194). The pipelines' `lm_head` does not
run: they use the last hidden state, after the final norm in the 20B family and before it in Qwen-Image-2.1. There the
rows of image tokens are left out, since the transformer never reads them. With `attend`, the same pass also gives the
attention of the prompt on the first image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from threading import Lock
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from qwen_cache.errors import ModelError, SourceError
from qwen_cache.experimental.attention import AttentionRows, ImageTokens, attention_rows, image_tokens
from qwen_cache.format.identity import Phrase
from qwen_cache.models.devices import has_streams, is_accelerator, join_on_device, place, to_device
from qwen_cache.models.encoders import batch_windows, load_processor, load_text_encoder, load_tokenizer
from qwen_cache.models.family import VISION_END, Template, pixel_token, pixel_token_told
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.hardware import WHOLE, Placement
from qwen_cache.models.quantization import check_quantization
from qwen_cache.sources.captions import token_positions
from qwen_cache.sources.rows import MAX_TEXT, text_exceeded
from qwen_cache.sources.sizes import Size

KEPT_TOKENS = 8  # keys and values of this many times batch_tokens fit a pass: 1 GB of a 7B model for 2048

Inputs = dict[str, torch.Tensor]
"""The model's inputs for a set of images, before any prompt."""


@dataclass(frozen=True)
class EncodedText:
    """The embeddings of a prompt are `prefix` and `prompt`; those of the empty prompt are `prefix` and `empty`."""

    prefix: Float[torch.Tensor, "P D"]
    prompt: Float[torch.Tensor, "L D"]
    empty: Float[torch.Tensor, "L0 D"]
    attention: Float[torch.Tensor, "C h w"] | None = None
    """Attention of the prompt's phrase on the first image, in float16; C is layers × heads."""
    image_positions: tuple[int, ...] = ()
    """The places of rows of image tokens that are left out: for each image the number of rows before it."""
    further: tuple[Float[torch.Tensor, "_ D"], ...] = ()
    """The embeddings of each further prompt, after `prefix`."""


class TextRequest(NamedTuple):
    """A prompt about the images of `inputs`, and further ones; an empty phrase stands for the whole prompt."""

    inputs: Inputs
    prompt: str
    phrase: Phrase
    further: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suffix:
    """The embeddings that follow a prefix."""

    embeds: Float[torch.Tensor, "L D"]
    attention: Float[torch.Tensor, "C h w"] | None = None


@dataclass(frozen=True)
class Prefixes:
    """The shared prefixes of some sets of images, one row for each, and the keys and values to continue from.

    `embeds` are the kept embeddings (`[P, D]`, on the CPU); `next_positions` are those of the next tokens, on all three
    axes. Without images nothing is shared: `past` is None.
    """

    images: list[int]
    lengths: list[int]
    """The lengths in tokens. In `past` every row is as long as the longest."""
    embeds: list[Float[torch.Tensor, "_ D"]]
    next_positions: list[int]
    past: DynamicCache | None
    first_images: list[ImageTokens]
    image_positions: list[tuple[int, ...]]


@dataclass(frozen=True)
class LastRead:
    """The prefixes of the last `read` for requests, and the empty prompt's suffix for each of their rows."""

    inputs: Inputs
    """The inputs of the last row."""
    prefixes: Prefixes
    empties: list[Float[torch.Tensor, "_ D"]]

    def encoded(
        self, rows: Sequence[int], requests: Sequence[TextRequest], suffixes: Sequence[Suffix]
    ) -> list[EncodedText]:
        """The text of each request; `suffixes` are those of `_prompts`."""
        prefixes, following = self.prefixes, iter(suffixes)
        return [
            EncodedText(
                prefixes.embeds[row],
                (own := next(following)).embeds,
                self.empties[row],
                own.attention,
                prefixes.image_positions[row],
                tuple(next(following).embeds for _ in request.further),
            )
            for row, request in zip(rows, requests, strict=True)
        ]


@dataclass(frozen=True)
class Frame:
    """The text around a prompt, with or without images, and its tokens."""

    template: Template
    tokenizer: Any
    drop_idx: int
    """The number of first tokens that are encoded but not kept."""

    @classmethod
    def of(cls, model: ModelFolder, processor: Any, has_controls: bool) -> Frame:
        """The frame of the pipelines: text to image has its own template, and the tokenizer beside the processor."""
        template = model.facts.template_for(has_controls)
        of_processor = processor is not None and template is model.template
        tokenizer = processor.tokenizer if of_processor else load_tokenizer(model)
        return cls(template, tokenizer, dropped_tokens(template, processor))


def kept_tokens(model: ModelFolder, prompts: Sequence[tuple[str, Sequence[Size]]]) -> list[int]:
    """The length L of the stored embeddings of each prompt with images of those sizes, without encoding it."""
    count = token_counter(model)
    return [count(prompt, sizes) for prompt, sizes in prompts]


def token_counter(model: ModelFolder) -> Callable[[str, Sequence[Size]], int]:
    """A function that gives the length L of the stored embeddings of a prompt with images of some sizes.

    Sizes are those for the text encoder: the placeholder of an image, one token in the text, becomes its image tokens.
    """
    processor = load_processor(model) if model.takes_controls else None
    frame_for = cache(lambda has_controls: Frame.of(model, processor, has_controls))

    @cache
    def added_tokens(size: Size) -> int:
        if model.family.text_rows_only:
            return -1
        assert processor is not None
        patches = processor.image_processor.get_number_of_image_patches(size[1], size[0], {})
        return int(patches // processor.image_processor.merge_size**2) - 1

    def kept(prompt: str, sizes: Sequence[Size]) -> int:
        frame = frame_for(bool(sizes))
        tokens = frame.tokenizer(frame.template.text(prompt, len(sizes)))["input_ids"]
        return len(tokens) - frame.drop_idx + sum(map(added_tokens, sizes))

    return kept


def dropped_tokens(template: Template, processor: Any) -> int:
    """The number of first tokens that are encoded but not kept, as the pipelines have it."""
    if template.dropped_message is None:
        return template.drop_idx
    if not processor.chat_template:
        do = "download the component again, with chat_template.jinja"
        raise ModelError("the processor has no chat template, so its system message cannot be counted", do=do)
    message = {"role": "system", "content": [{"type": "text", "text": template.dropped_message}]}
    return len(processor.apply_chat_template([message], tokenize=True, return_dict=False)[0])


def skip_final_norm(model: Any) -> None:
    """Let `last_hidden_state` be the output of the last decoder layer; ModelError if this transformers does otherwise.

    Qwen-Image-2.1's transformer was trained on it. From transformers 5.0 on, `hidden_states[-1]` is the normalised
    state too, and the pipeline takes the norm out in the same way, for each call.
    """
    decoder = model.language_model
    decoder.norm = nn.Identity()
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    handle = decoder.layers[-1].register_forward_hook(keep)
    with torch.inference_mode():
        state = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device)).last_hidden_state
    handle.remove()
    if len(outputs) != 1 or not torch.equal(state, outputs[0]):
        raise ModelError(
            "the hidden state before the final norm cannot be taken from this version of transformers",
            found=f"transformers {transformers.__version__}",
            do="install a version that qwen-cache was tested with, such as 5.23",
        )


class TextEncoder:
    """The text encoder without its `lm_head`, on its own device. `batch_tokens` bounds a pass with several requests."""

    def __init__(
        self,
        model: ModelFolder,
        device: torch.device,
        dtype: torch.dtype,
        batch_tokens: int = 1,
        *,
        attend: bool = False,
        placement: Placement = WHOLE,
    ) -> None:
        family, self.folder = model.family, model
        self.processor = load_processor(model) if model.takes_controls else None
        self._frame = Frame.of(model, self.processor, model.takes_controls)
        self.text_rows_only = family.text_rows_only
        file = model.text_encoder_file
        if file is not None and file.quantization:
            check_quantization("fp8" if file.quantization == "fp8" else "int8", "model.text_encoder", device)
        loaded = load_text_encoder(model.component("text_encoder"), dtype, file)
        self.model = place(loaded.model, device, placement)
        if not family.final_norm:
            skip_final_norm(self.model)
        self.batch_tokens, self.attend = batch_tokens, attend
        self.run_on(device)
        self._tokenizing = Lock()  # fast tokenizers may not be used by two threads at once
        self._last: LastRead | None = None

    def run_on(self, device: torch.device) -> None:
        """Send inputs to `device`, where the weights are or will come."""
        self.device = device
        if is_accelerator(device):
            batch_windows(self.model.visual)

    @cached_property
    def _frame_without_images(self) -> Frame:
        """Loaded for the first such prompt: few caches of an Edit model have any."""
        return Frame.of(self.folder, self.processor, has_controls=False)

    def frame(self, images: int) -> Frame:
        """The frame of a prompt about this number of images."""
        return self._frame if images or self.folder.facts.without_controls is None else self._frame_without_images

    @torch.inference_mode()
    def encode_whole(
        self, images: Sequence[Image.Image], prompt: str
    ) -> tuple[Float[torch.Tensor, "L D"], Bool[torch.Tensor, " L"]]:
        """The embeddings of `prompt` about `images` in one pass, and which rows are image tokens.

        The modules and shapes are those of the pipelines; no row is left out. SourceError for a prompt that no cache
        could hold, or that contains a token of an image's pixels.
        """
        token = pixel_token(prompt)
        if told := text_exceeded("prompt", prompt, MAX_TEXT) or (pixel_token_told(token) if token else None):
            what, do = told
            raise SourceError(what, do=do)
        if not images:
            embeds = self.embed(self.read([{}]), [(0, prompt, None)])[0].embeds
            return embeds, torch.zeros(len(embeds), dtype=torch.bool)
        inputs = self._process(self._frame.template.text(prompt, len(images)), images)
        tokens = {name: tensor for name, tensor in inputs.items() if name != "pixel_values"}
        positions, _ = self.model.get_rope_index(**tokens)
        output = self.model(**self._sent({**inputs, "position_ids": positions}))
        drop_idx = self._frame.drop_idx
        is_image = inputs["input_ids"][0, drop_idx:] == self.model.config.image_token_id
        return output.last_hidden_state[0, drop_idx:].cpu(), is_image

    def inputs(self, images: Sequence[Image.Image]) -> Inputs:
        """The model's inputs for `images` (RGB, already resized for the encoder) before any prompt, on the CPU.

        Any one thread at a time may call it. Empty without images: then prompts share nothing.
        """
        return self._process(self._split("", len(images))[0], images) if images else {}

    def _process(self, text: str, images: Sequence[Image.Image]) -> Inputs:
        assert self.processor is not None
        with self._tokenizing:
            inputs = self.processor(text=[text], images=list(images), return_tensors="pt")
        if "mm_token_type_ids" not in inputs:
            raise ModelError(
                "the processor returned no mm_token_type_ids: positions would silently be one-dimensional",
                do="install the version of transformers that qwen-cache asks for",
            )
        if self.text_rows_only:
            self._check_grids(inputs["image_grid_thw"], images)
        if has_streams(self.device):
            inputs["pixel_values"] = inputs["pixel_values"].pin_memory()
        return dict(inputs)

    def _check_grids(self, grids: Int[torch.Tensor, "images 3"], images: Sequence[Image.Image]) -> None:
        """SourceError where the processor resized an image: its tokens would no longer fit those of the VAE."""
        assert self.processor is not None
        patch = self.processor.image_processor.patch_size
        for (_, h, w), image in zip(grids.tolist(), images, strict=True):
            if (w * patch, h * patch) != image.size:
                raise SourceError(
                    "the text encoder's processor would resize the image, so its tokens would not fit the latents",
                    expected=f"{image.width}×{image.height}",
                    found=f"{w * patch}×{h * patch}",
                    do=f"{'raise' if h * w * patch**2 > image.width * image.height else 'lower'} data.vae_image_size, "
                    "or predict.output_resolution",
                )

    def encode(self, requests: Sequence[TextRequest]) -> list[EncodedText]:
        """The embeddings of each prompt about its images, and of the empty and further ones about the same images.

        Requests whose inputs are one object share one prefix; the prefix of the last call is reused.
        """
        numbers: dict[int, int] = {}  # of each object
        rows = [numbers.setdefault(id(request.inputs), len(numbers)) for request in requests]
        inputs = [requests[rows.index(number)].inputs for number in range(len(numbers))]
        if self._last is not None and len(inputs) == 1 and inputs[0] is self._last.inputs:
            rows = [len(self._last.empties) - 1] * len(requests)
            return self._last.encoded(rows, requests, self.embed(self._last.prefixes, _prompts(rows, requests)))
        self._last = None  # frees its keys and values
        prefixes = self.read(inputs)
        empty = [(row, "", None) for row in range(len(inputs))]
        suffixes = self.embed(prefixes, [*empty, *_prompts(rows, requests)])
        self._last = LastRead(inputs[-1], prefixes, [suffix.embeds for suffix in suffixes[: len(inputs)]])
        return self._last.encoded(rows, requests, suffixes[len(inputs) :])

    def encode_beside(self, requests: Sequence[TextRequest]) -> list[EncodedText]:
        """The same beside another lane on the device."""
        return self.encode(requests)

    @torch.inference_mode()
    def read(self, inputs: Sequence[Inputs]) -> Prefixes:
        """Run everything up to the end of the last image, in one pass with one row for each of `inputs`."""
        if not inputs[0]:
            nothing = torch.empty(0, self.model.config.text_config.hidden_size, dtype=self.model.dtype)
            count = len(inputs)
            return Prefixes([0] * count, [0] * count, [nothing] * count, [0] * count, None, [], [()] * count)
        ids, types = ([each[name][0] for each in inputs] for name in ("input_ids", "mm_token_type_ids"))
        lengths = [len(row) for row in ids]
        grids = torch.cat([each["image_grid_thw"] for each in inputs])
        valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tokens = {"input_ids": _padded(ids), "mm_token_type_ids": _padded(types), "image_grid_thw": grids}
        row_images = image_tokens(self.model.config, tokens["input_ids"], grids) if self.attend else []
        positions, deltas = self.model.get_rope_index(**tokens, attention_mask=valid)
        pixels = join_on_device([each["pixel_values"] for each in inputs], self.device)
        tokens = self._sent(tokens | {"position_ids": positions})
        # The padding is on the right, where no token looks.
        output = self.model(**tokens, pixel_values=pixels, use_cache=True)
        kept = [self._kept_rows(each) for each in ids]
        return Prefixes(
            images=[len(each["image_grid_thw"]) for each in inputs],
            lengths=lengths,
            embeds=[row[rows] for row, rows in zip(output.last_hidden_state.cpu(), kept, strict=True)],
            next_positions=[n + int(delta) for n, delta in zip(lengths, deltas, strict=True)],
            past=output.past_key_values,
            first_images=[images[0] for images in row_images],
            image_positions=[self._image_positions(*each) for each in zip(ids, kept, strict=True)],
        )

    def _sent(self, tensors: Inputs) -> Inputs:
        """The model's inputs on its device; the sizes of images stay on the host, which alone reads them."""
        return {n: tensor if n == "image_grid_thw" else to_device(tensor, self.device) for n, tensor in tensors.items()}

    def _kept_rows(self, ids: Int[torch.Tensor, " N"]) -> Int[torch.Tensor, " P"]:
        """The positions of the tokens about images whose embeddings are stored."""
        positions = torch.arange(self._frame.drop_idx, len(ids))
        return positions[ids[positions] != self.model.config.image_token_id] if self.text_rows_only else positions

    def _image_positions(self, ids: Int[torch.Tensor, " N"], kept: Int[torch.Tensor, " P"]) -> tuple[int, ...]:
        """For each image the number of stored rows before it; empty if its own rows are stored."""
        if not self.text_rows_only:
            return ()
        is_image = ids == self.model.config.image_token_id
        begins = (is_image & ~is_image.roll(1)).nonzero()[:, 0]
        return tuple(int((kept < begin).sum()) for begin in begins)

    @torch.inference_mode()
    def embed(self, prefixes: Prefixes, prompts: Sequence[tuple[int, str, Phrase | None]]) -> list[Suffix]:
        """The suffix that follows `prefixes.embeds[row]` for each prompt, on the CPU.

        `prompts` are rows, prompts and the phrases whose attention is wanted; None gives no attention.
        """
        texts = [self._split(prompt, prefixes.images[row])[1] for row, prompt, _ in prompts]
        ids = [self._ids(text, prefixes.images[row]) for text, (row, *_) in zip(texts, prompts, strict=True)]
        chosen = [
            self._phrase_tokens(text, prompt, phrase) if prefixes.images[row] else []
            for text, (row, prompt, phrase) in zip(texts, prompts, strict=True)
        ]
        costs = [max(prefixes.lengths) + len(each) for each in ids]
        return [
            suffix
            for run in _runs(costs, KEPT_TOKENS * self.batch_tokens)
            for suffix in self._embed_pass(prefixes, [row for row, *_ in prompts[run]], ids[run], chosen[run])
        ]

    def _embed_pass(
        self, prefixes: Prefixes, rows: list[int], ids: list[torch.Tensor], chosen: list[list[int]]
    ) -> list[Suffix]:
        """The suffixes of these rows of `prefixes`, in one pass."""
        tokens = {"input_ids": _padded(ids)}
        drop_idx, past = 0, None
        if prefixes.past is None:
            drop_idx = self.frame(0).drop_idx
        else:
            begins = torch.tensor([prefixes.next_positions[row] for row in rows])
            tokens["position_ids"] = (begins[:, None] + torch.arange(max(map(len, ids)))).repeat(3, 1, 1)
            lengths = torch.tensor([prefixes.lengths[row] for row in rows])
            if len(set(prefixes.lengths)) > 1:  # there is padding between a shorter prefix and its suffix
                before = torch.arange(max(prefixes.lengths)) < lengths[:, None]
                tokens["attention_mask"] = torch.cat(
                    [before, torch.ones_like(tokens["input_ids"], dtype=torch.bool)], 1
                )
            past = select_rows(prefixes.past, rows)
        tokens = self._sent(tokens)
        capturing: AbstractContextManager[AttentionRows | None] = nullcontext()
        if any(chosen):  # attention of the chosen tokens on the first image; in a row without any, that of token 0
            first = [[prefixes.first_images[row]] for row in rows]
            capturing = attention_rows(self.model, [[positions or [0]] for positions in chosen], first)
        with capturing as captured:
            hidden = self.model(**tokens, past_key_values=past, use_cache=past is not None).last_hidden_state.cpu()
        embeds = [row[drop_idx : len(each)].clone() for row, each in zip(hidden, ids, strict=True)]
        if captured is None:
            return [Suffix(each) for each in embeds]
        attention = [
            images[0][0].half().cpu() if positions else None
            for images, positions in zip(captured.attention, chosen, strict=True)
        ]
        return [Suffix(*each) for each in zip(embeds, attention, strict=True)]

    def _phrase_tokens(self, text: str, prompt: str, phrase: Phrase | None) -> list[int]:
        """The positions of the phrase's tokens in `text`, which begins with the prompt; none if not wanted."""
        if not self.attend or phrase is None or not prompt.strip():
            return []
        with self._tokenizing:
            return token_positions(self._frame.tokenizer, text, phrase or ((0, len(prompt)),))

    def _split(self, prompt: str, images: int) -> tuple[str, str]:
        """The whole input, cut into prefix and suffix after the last image; without images it is all suffix.

        A special token ends the prefix, so both parts become the same tokens as in the whole.
        """
        *before, after = self.frame(images).template.text(prompt, images).split(VISION_END, images)
        return "".join(part + VISION_END for part in before), after

    def _ids(self, text: str, images: int) -> torch.Tensor:
        with self._tokenizing:
            ids: torch.Tensor = self.frame(images).tokenizer(text, return_tensors="pt")["input_ids"]
        return ids[0]


def _prompts(rows: Sequence[int], requests: Sequence[TextRequest]) -> list[tuple[int, str, Phrase | None]]:
    """The prompt of each request, followed by its further ones."""
    return [
        (row, prompt, phrase)
        for row, request in zip(rows, requests, strict=True)
        for prompt, phrase in [(request.prompt, request.phrase), *((each, None) for each in request.further)]
    ]


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


def select_rows(past: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """These rows as a cache of their own, so that a pass does not extend `past`."""
    whole = list(rows) == list(range(len(past.layers[0].keys)))
    index = slice(None) if whole else torch.tensor(rows, device=past.layers[0].keys.device)
    return DynamicCache([(layer.keys[index], layer.values[index]) for layer in past.layers])


def _runs(costs: Sequence[int], limit: int) -> Iterator[slice]:
    """Cut `costs` into runs whose length times their highest cost is at most `limit`; a run has at least one item."""
    begin = 0
    for end in range(1, len(costs) + 1):
        if end == len(costs) or (end + 1 - begin) * max(costs[begin : end + 1]) > limit:
            yield slice(begin, end)
            begin = end
