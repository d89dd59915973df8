"""The text lane: images and prompts in, prompt embeddings out, through the stock Qwen2.5-VL.

The model is causal and the images come before the instruction, so everything up to the last image is the same for
every prompt about them: it is run once (`read`), and of each prompt only what follows, on the kept keys and values
(`embed`). With `batch_tokens` of 1 each pass is about one thing, and on one machine what comes out is the same, bit for
bit, whatever else is encoded. Passes about several, padded on the right, give the same within the rounding of the
dtype: matrix products of other shapes are added up in another order.

Refuses to run with 1-D positions: transformers 5 silently falls back to them when `mm_token_type_ids` is missing, and
diffusers 0.42's Edit pipelines do not pass it (huggingface/diffusers issue 14194). The pipelines' `lm_head` is not
run; the last hidden state after the final norm is what they use. With `attend`, the same pass also tells where the
prompt looks in the first image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock

import torch
from jaxtyping import Float
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, DynamicCache, Qwen2_5_VLForConditionalGeneration

from qwen_cache.errors import ModelError
from qwen_cache.format.identity import Phrase
from qwen_cache.grounding.attention import AttentionRows, ImageTokens, attention_rows, image_tokens
from qwen_cache.grounding.phrase import token_positions
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import load_whole
from qwen_cache.models.processor import load_processor
from qwen_cache.models.template import TEMPLATES, VISION_END
from qwen_cache.sources.sizes import Size

KEPT_TOKENS = 8  # times batch_tokens may stand in the keys and values of one pass: 1 GB of a 7B model for 2048


@dataclass(frozen=True)
class EncodedText:
    """`prefix` (`[P, D]`) begins the embeddings of both prompts, of which the others are the rest."""

    prefix: Float[torch.Tensor, "P D"]
    prompt: Float[torch.Tensor, "L D"]
    empty: Float[torch.Tensor, "L0 D"]
    attention: Float[torch.Tensor, "C h w"] | None = None
    """Of the prompt's phrase on the first image, in float16; layers times heads."""


Asked = tuple[dict[str, torch.Tensor], str, Phrase]
"""What the model takes for some images, a prompt about them, and its phrase; without one it is the whole prompt."""


@dataclass(frozen=True)
class Rest:
    """What follows a prefix."""

    embeds: Float[torch.Tensor, "L D"]
    attention: Float[torch.Tensor, "C h w"] | None = None


@dataclass(frozen=True)
class Prefixes:
    """What every prompt about each of some sets of images begins with, and the keys and values to go on from.

    `embeds` is what is kept of each (`[P, D]`, on the CPU); `next_positions` are those of the next tokens, in all three
    axes. Without images nothing is shared: `past` is None.
    """

    pictures: list[int]
    lengths: list[int]
    """In tokens, of which `past` has as many for each as the longest has."""
    embeds: list[Float[torch.Tensor, "_ D"]]
    next_positions: list[int]
    past: DynamicCache | None
    first_images: list[ImageTokens]


def kept_tokens(model: ModelFolder, asked: Sequence[tuple[str, Sequence[Size]]]) -> list[int]:
    """How many tokens each prompt about images of those sizes has after `drop_idx`: what the encoder will return.

    Sizes are those for the text encoder; an image's placeholder, one token in the text, becomes as many as it needs.
    """
    template = TEMPLATES[model.pipeline]
    processor = load_processor(model) if model.takes_controls else None
    tokenizer = processor.tokenizer if processor else AutoTokenizer.from_pretrained(model.part("tokenizer"))

    @cache
    def more(size: Size) -> int:
        assert processor is not None
        patches = processor.image_processor.get_number_of_image_patches(size[1], size[0], {})
        return int(patches // processor.image_processor.merge_size**2) - 1

    return [
        len(tokenizer(template.text(prompt, len(sizes)))["input_ids"]) - template.drop_idx + sum(map(more, sizes))
        for prompt, sizes in asked
    ]


class TextEncoder:
    """Qwen2.5-VL without its `lm_head`, on its own device. `batch_tokens` bounds a pass about more than one thing."""

    def __init__(
        self,
        model: ModelFolder,
        device: torch.device,
        dtype: torch.dtype,
        batch_tokens: int = 1,
        *,
        attend: bool = False,
    ) -> None:
        self.template = TEMPLATES[model.pipeline]
        self.processor = load_processor(model) if model.takes_controls else None
        self.tokenizer = (
            self.processor.tokenizer if self.processor else AutoTokenizer.from_pretrained(model.part("tokenizer"))
        )
        whole = load_whole(Qwen2_5_VLForConditionalGeneration, model.part("text_encoder"), dtype=dtype)
        self.model = whole.model.to(device)
        self.device, self.batch_tokens, self.attend = device, batch_tokens, attend
        self._tokenizing = Lock()  # fast tokenizers may not be used by two threads at once
        self._last: tuple[list[dict[str, torch.Tensor]], Prefixes, list[torch.Tensor]] | None = None

    @torch.inference_mode()
    def encode_whole(self, pictures: Sequence[Image.Image], prompt: str) -> Float[torch.Tensor, "L D"]:
        """The embeddings of `prompt` about `images` in one pass: the modules and shapes of the pipelines."""
        if not pictures:
            return self.embed(self.read([{}]), [(0, prompt, None)])[0].embeds
        inputs = self._process(self.template.text(prompt, len(pictures)), pictures)
        output = self.model(**{name: tensor.to(self.device) for name, tensor in inputs.items()})
        embeds: torch.Tensor = output.last_hidden_state[0, self.template.drop_idx :].cpu()
        return embeds

    def inputs(self, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """What the model takes for `images` (RGB, already resized for the encoder) before any prompt, on the CPU.

        For any thread, one at a time. Without images nothing is shared by prompts, and it is empty.
        """
        return self._process(self._split("", len(pictures))[0], pictures) if pictures else {}

    def _process(self, text: str, pictures: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        assert self.processor is not None
        with self._tokenizing:
            inputs = self.processor(text=[text], images=list(pictures), return_tensors="pt")
        if "mm_token_type_ids" not in inputs:
            raise ModelError(
                "the processor returned no mm_token_type_ids: positions would silently be one-dimensional",
                do="install the version of transformers that qwen-cache asks for",
            )
        pin = self.device.type == "cuda"
        return {name: tensor.pin_memory() if pin else tensor for name, tensor in inputs.items()}

    def encode(self, asked: Sequence[Asked]) -> list[EncodedText]:
        """The embeddings of each prompt about each `inputs`, and of the empty one about the same images.

        Inputs that are one object are read once; those of the last call are not read again.
        """
        about: list[dict[str, torch.Tensor]] = []
        for inputs, *_ in asked:
            if not any(inputs is other for other in about):
                about.append(inputs)
        rows = [next(i for i, other in enumerate(about) if other is inputs) for inputs, *_ in asked]
        prompts = [(row, prompt, phrase) for row, (_, prompt, phrase) in zip(rows, asked, strict=True)]
        if self._last is None or len(about) > 1 or self._last[0][-1] is not about[0]:
            self._last = None  # its keys and values make room
            prefixes = self.read(about)
            rests = self.embed(prefixes, [*((row, "", None) for row in range(len(about))), *prompts])
            empties, rests = [rest.embeds for rest in rests[: len(about)]], rests[len(about) :]
            self._last = about, prefixes, empties
        else:
            about, prefixes, empties = self._last
            rows = [len(about) - 1] * len(asked)
            rests = self.embed(prefixes, [(rows[-1], prompt, phrase) for _, prompt, phrase in prompts])
        return [
            EncodedText(prefixes.embeds[row], rest.embeds, empties[row], rest.attention)
            for row, rest in zip(rows, rests, strict=True)
        ]

    @torch.inference_mode()
    def read(self, about: Sequence[dict[str, torch.Tensor]]) -> Prefixes:
        """Run everything up to the end of the last image, in one pass for all of `about`."""
        if not about[0]:
            nothing = torch.empty(0, self.model.config.text_config.hidden_size, dtype=self.model.dtype)
            return Prefixes([0] * len(about), [0] * len(about), [nothing] * len(about), [0] * len(about), None, [])
        ids, types = ([inputs[name][0] for inputs in about] for name in ("input_ids", "mm_token_type_ids"))
        lengths = [len(row) for row in ids]
        grids = torch.cat([inputs["image_grid_thw"] for inputs in about])
        valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tokens = {"input_ids": _padded(ids), "mm_token_type_ids": _padded(types), "image_grid_thw": grids}
        shown = image_tokens(self.model.config, tokens["input_ids"], grids) if self.attend else []
        positions, deltas = self.model.get_rope_index(**tokens, attention_mask=valid)
        tokens |= {"pixel_values": torch.cat([inputs["pixel_values"] for inputs in about]), "position_ids": positions}
        tokens = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tokens.items()}
        output = self.model(**tokens, use_cache=True)  # the padding is on the right, where no token looks
        hidden = output.last_hidden_state.cpu()
        return Prefixes(
            pictures=[len(inputs["image_grid_thw"]) for inputs in about],
            lengths=lengths,
            embeds=[row[self.template.drop_idx : n].clone() for row, n in zip(hidden, lengths, strict=True)],
            next_positions=[n + int(delta) for n, delta in zip(lengths, deltas, strict=True)],
            past=output.past_key_values,
            first_images=[pictures[0] for pictures in shown],
        )

    @torch.inference_mode()
    def embed(self, prefixes: Prefixes, asked: Sequence[tuple[int, str, Phrase | None]]) -> list[Rest]:
        """What follows `prefixes.embeds[row]` for each prompt, on the CPU.

        `asked` are rows, prompts and the phrases whose attention is wanted: None for none.
        """
        ids = [self._ids(prompt, prefixes.pictures[row]) for row, prompt, _ in asked]
        chosen = [self._chosen(prompt, phrase, prefixes.pictures[row]) for row, prompt, phrase in asked]
        costs = [max(prefixes.lengths) + len(each) for each in ids]
        return [
            rest
            for part in _runs(costs, KEPT_TOKENS * self.batch_tokens)
            for rest in self._go_on(prefixes, [row for row, *_ in asked[part]], ids[part], chosen[part])
        ]

    def _go_on(
        self, prefixes: Prefixes, rows: list[int], ids: list[torch.Tensor], chosen: list[list[int]]
    ) -> list[Rest]:
        """What follows these rows of `prefixes`, in one pass."""
        tokens = {"input_ids": _padded(ids)}
        drop_idx = self.template.drop_idx
        past = None
        if prefixes.past is not None:
            drop_idx = 0
            begins = torch.tensor([prefixes.next_positions[row] for row in rows])
            tokens["position_ids"] = (begins[:, None] + torch.arange(max(map(len, ids)))).expand(3, -1, -1)
            lengths = torch.tensor([prefixes.lengths[row] for row in rows])
            if len(set(prefixes.lengths)) > 1:  # between a shorter prefix and its prompt there is padding
                before = torch.arange(max(prefixes.lengths)) < lengths[:, None]
                tokens["attention_mask"] = torch.cat(
                    [before, torch.ones_like(tokens["input_ids"], dtype=torch.bool)], 1
                )
            past = _of_rows(prefixes.past, rows)
        tokens = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tokens.items()}
        with self._watching(prefixes, rows, chosen) as seen:
            hidden = self.model(**tokens, past_key_values=past, use_cache=past is not None).last_hidden_state.cpu()
        embeds = [row[drop_idx : len(each)].clone() for row, each in zip(hidden, ids, strict=True)]
        if seen is None:
            return [Rest(each) for each in embeds]
        attention = [
            pictures[0][0].half().cpu() if c else None for pictures, c in zip(seen.attention, chosen, strict=True)
        ]
        return [Rest(*each) for each in zip(embeds, attention, strict=True)]

    def _watching(
        self, prefixes: Prefixes, rows: list[int], chosen: list[list[int]]
    ) -> AbstractContextManager[AttentionRows | None]:
        """Take the attention of the chosen tokens on the first image; of a row that has none, any token's."""
        if not any(chosen):
            return nullcontext()
        pictures = [[prefixes.first_images[row]] for row in rows]
        return attention_rows(self.model, [[positions or [0]] for positions in chosen], pictures)

    def _chosen(self, prompt: str, phrase: Phrase | None, pictures: int) -> list[int]:
        """The tokens of the phrase in what follows the images, which begins with the prompt."""
        if not (self.attend and pictures) or phrase is None or not prompt.strip():
            return []
        with self._tokenizing:
            return token_positions(self.tokenizer, self._split(prompt, pictures)[1], phrase or ((0, len(prompt)),))

    def _split(self, prompt: str, pictures: int) -> tuple[str, str]:
        """The whole input up to the end of the last image, and what follows.

        A special token stands between them, so both are cut into the same tokens as the whole.
        """
        *before, after = self.template.text(prompt, pictures).split(VISION_END, pictures)
        return "".join(part + VISION_END for part in before), after

    def _ids(self, prompt: str, pictures: int) -> torch.Tensor:
        """The tokens of a prompt after its images; all of them where there are none."""
        text = self._split(prompt, pictures)[1] if pictures else self.template.text(prompt, 0)
        with self._tokenizing:
            ids: torch.Tensor = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return ids[0]


def _padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(rows, batch_first=True)


def _of_rows(past: DynamicCache, rows: Sequence[int]) -> DynamicCache:
    """Keys and values to go on from, apart from `past`, which keeps its own."""
    whole = list(rows) == list(range(len(past.layers[0].keys)))
    index = slice(None) if whole else torch.tensor(rows, device=past.layers[0].keys.device)
    return DynamicCache([(layer.keys[index], layer.values[index]) for layer in past.layers])


def _runs(costs: Sequence[int], most: int) -> Iterator[slice]:
    """Cut into runs of at most `most` when all of a run cost as much as its dearest, or of a single one."""
    begin = 0
    for end in range(1, len(costs) + 1):
        if end == len(costs) or (end + 1 - begin) * max(costs[begin : end + 1]) > most:
            yield slice(begin, end)
            begin = end
