"""Attention rows: those of the eager model, from a pass that never makes its matrix, on whatever path it runs.

The judge is `output_attentions=True` and `output_hidden_states=True` of an eager copy of the model: a Qwen2.5-VL, and a
Qwen3-VL, whose queries and keys are normalised, and whose heads and image tokens have other sizes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import StaticCache

from qwen_cache.encode.text import TextEncoder
from qwen_cache.errors import ModelError, SourceError
from qwen_cache.experimental.attention import (
    CHAT,
    AttentionRows,
    FrozenQwen,
    ImageTokens,
    QwenImageProcessor,
    attention_rows,
    image_tokens,
)
from qwen_cache.experimental.masks import MaskHead, predict_mask
from qwen_cache.models.encoders import (
    MODELS,
    ImageOnlyQwen2VLProcessor,
    ImageOnlyQwen3VLProcessor,
    load_processor,
    load_text_encoder,
    make_processor,
)
from qwen_cache.models.family import PIPELINES
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.sources.captions import find, token_positions

from .support.photographs import photograph
from .support.text_encoder import save_tiny_qwen3_vl

TEMPLATE = PIPELINES["QwenImageEditPlusPipeline"].template
PROMPT = "make the red car blue, 然后 keep the sky"
NAMES = ("china.jpg", "flower.jpg")
WIDE, TALL, SQUARE = (6, 4), (3, 5), (4, 4)
"""Width and height of images in tokens."""
CELLS = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels per side of an image token, by `model_type`."""
ACROSS_KERNELS = 3e-5
"""Another kernel, or the rows of a few tokens in place of all, adds up in another order. A sum of k = 16 products in
float32 is off by sqrt(k)·2^-24 of its size, and after n = 50 such layers by sqrt(k·n)·2^-24: a score of up to 16 by
16·sqrt(16·50)·2^-24 = 3e-5, and so is the weight, at most 1, that follows from it. Measured: 1e-5 with AVX2."""


@dataclass(frozen=True)
class Encoder:
    """A tiny encoder as it is published, model and processor in one folder, and an eager copy: the judge.

    Its attention is peaked, so that a row that looks at the wrong place is far away.
    """

    kind: str
    folder: Path
    model: Any
    eager: Any
    processor: Any

    @property
    def cell(self) -> int:
        return CELLS[self.kind]

    def image(self, size: tuple[int, int], name: str = "china.jpg") -> Image.Image:
        return image((size[0] * self.cell, size[1] * self.cell), name)


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> ModelFolder:
    return open_model(str(tiny_model("edit-plus")), ["text_encoder", "processor"])


def peak(model: Any) -> None:
    """Peaked attention, for a Qwen2.5-VL."""
    for layer in model.language_model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            projection.weight.data *= 2
            projection.bias.data *= 2


@pytest.fixture(scope="module", params=CELLS)
def encoder(request: pytest.FixtureRequest, folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    path = tmp_path_factory.mktemp("qwen")
    if request.param == "qwen3_vl":
        save_tiny_qwen3_vl(path, path, folder.component("processor"))
    else:
        shutil.copytree(folder.component("processor"), path, dirs_exist_ok=True)
        whole = load_text_encoder(folder.component("text_encoder"), torch.float32)
        peak(whole.model)
        whole.save_pretrained(path)
    model = load_text_encoder(path, torch.float32).model
    eager = deepcopy(model)
    eager.set_attn_implementation("eager")
    return Encoder(request.param, path, model, eager, make_processor(request.param, path))


@pytest.fixture(scope="module")
def text_encoder(folder: ModelFolder) -> TextEncoder:
    """The encoder of builds, also peaked."""
    encoder = TextEncoder(folder, torch.device("cpu"), torch.float32, batch_tokens=1000)
    peak(encoder.model)
    return encoder


def image(size: tuple[int, int], name: str = "china.jpg") -> Image.Image:
    return photograph(name).resize(size)


@dataclass(frozen=True)
class Batch:
    """Rows of images and one prompt each, and which tokens are the phrases."""

    inputs: dict[str, Tensor]
    tokens: list[list[list[int]]]
    sizes: list[list[tuple[int, int]]]


def batch(
    encoder: Encoder, sizes: Sequence[Sequence[tuple[int, int]]], prompts: Sequence[str], padding_side: str = "right"
) -> Batch:
    encoder.processor.tokenizer.padding_side = padding_side
    inputs = encoder.processor(
        text=[TEMPLATE.text(prompt, len(row)) for prompt, row in zip(prompts, sizes, strict=True)],
        images=[encoder.image(size, name) for row in sizes for size, name in zip(row, NAMES, strict=False)],
        padding=True,
        return_tensors="pt",
    )
    tokens = []
    for mask in inputs["attention_mask"]:
        *_, a, b, c, d, e, f, _ = mask.nonzero()[:, 0].tolist()
        tokens.append([[a, b, c], [d], [c, f, e]])
    return Batch(dict(inputs), tokens, [list(row) for row in sizes])


CASES: dict[str, tuple[Any, ...]] = {
    "one image": ([[WIDE]], [PROMPT]),
    "two images": ([[WIDE, TALL]], [PROMPT]),
    "padding on the right": ([[TALL], [WIDE, TALL], [SQUARE]], [PROMPT, "mirror it", "make it a painting by Klee"]),
    "padding on the left": ([[TALL], [WIDE, TALL], [SQUARE]], [PROMPT, "mirror it", "make it a painting"], "left"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, encoder: Encoder) -> Batch:
    return batch(encoder, *CASES[request.param])


def taken(model: Any, case: Batch, merge: Any = "mean", **options: Any) -> tuple[AttentionRows, Any]:
    shown = image_tokens(model.config, case.inputs["input_ids"], case.inputs["image_grid_thw"])
    with attention_rows(model, case.tokens, shown, merge) as rows, torch.no_grad():
        output = model(**case.inputs, **options)
    return rows, output


@torch.no_grad()
def judged(eager: Any, inputs: dict[str, Tensor]) -> Any:
    return eager(**inputs, output_attentions=True, output_hidden_states=True)


def expected(output: Any, ids: Tensor, row: int, phrase: list[int], size: tuple[int, int], n: int, pad: int) -> Tensor:
    """`[layers * heads, h, w]` of a phrase and the image of that size, the `n` tokens before which are others'."""
    width, height = size
    columns = (ids[row] == pad).nonzero()[n : n + height * width, 0]
    maps = [layer[row][:, phrase][..., columns].mean(1) for layer in output.attentions]
    return torch.cat(maps).reshape(-1, height, width)


def assert_rows(rows: AttentionRows, output: Any, case: Batch, pad: int, atol: float) -> None:
    for row, (phrases, sizes) in enumerate(zip(case.tokens, case.sizes, strict=True)):
        assert len(rows.attention[row]) == len(sizes)
        for k, phrase in enumerate(phrases):
            before = 0
            for size, maps in zip(sizes, rows.attention[row], strict=True):
                wanted = expected(output, case.inputs["input_ids"], row, phrase, size, before, pad)
                torch.testing.assert_close(maps[k], wanted, atol=atol, rtol=0)
                before += wanted[0].numel()
            hidden = torch.stack([layer[row, phrase] for layer in output.hidden_states[1:]])
            torch.testing.assert_close(rows.hidden_states[row][k], hidden, atol=10 * atol, rtol=0)


def test_the_judge_has_peaked_rows(encoder: Encoder) -> None:
    attentions = judged(encoder.eager, batch(encoder, [[WIDE]], [PROMPT]).inputs).attentions
    assert max(float(layer[0, :, 60:].max()) for layer in attentions) > 0.9


def test_rows_are_those_of_the_eager_pass_they_are_taken_from(encoder: Encoder, case: Batch) -> None:
    rows, output = taken(encoder.eager, case, output_attentions=True, output_hidden_states=True)
    assert_rows(rows, output, case, encoder.eager.config.image_token_id, ACROSS_KERNELS)


@pytest.mark.parametrize("use_cache", [False, True])
def test_rows_of_sdpa_are_those_of_the_eager_model(encoder: Encoder, case: Batch, use_cache: bool) -> None:
    assert encoder.model.config.text_config._attn_implementation == "sdpa"
    rows, _ = taken(encoder.model, case, use_cache=use_cache)
    assert_rows(rows, judged(encoder.eager, case.inputs), case, encoder.eager.config.image_token_id, ACROSS_KERNELS)


def test_without_a_final_norm_the_last_hidden_state_is_that_of_the_last_layer(encoder: Encoder) -> None:
    """The hidden states of a build for a transformer that takes embeddings from before the norm."""
    case = batch(encoder, [[WIDE, TALL]], [PROMPT])
    model, eager = deepcopy(encoder.model), deepcopy(encoder.eager)
    model.language_model.norm, eager.language_model.norm = nn.Identity(), nn.Identity()
    rows, _ = taken(model, case)
    assert_rows(rows, judged(eager, case.inputs), case, eager.config.image_token_id, ACROSS_KERNELS)
    assert not torch.equal(rows.hidden_states[0][0][-1], taken(encoder.model, case)[0].hidden_states[0][0][-1])


@pytest.mark.parametrize("name", ["one image", "two images", "padding on the left"])
def test_rows_on_cached_keys_are_those_of_the_whole_input(encoder: Encoder, name: str) -> None:
    """Up to the last image of any row the pass runs alone; positions then count within the second pass."""
    case = batch(encoder, *CASES[name])
    rope = ("input_ids", "image_grid_thw", "attention_mask", "mm_token_type_ids")
    positions, _ = encoder.model.get_rope_index(**{each: case.inputs[each] for each in rope})
    ids, mask, pad = case.inputs["input_ids"], case.inputs["attention_mask"], encoder.model.config.image_token_id
    cut = int((ids == pad).nonzero()[:, 1].max()) + 1
    pixels = {each: case.inputs[each] for each in ("pixel_values", "image_grid_thw")}
    with torch.no_grad():
        before = encoder.model(
            input_ids=ids[:, :cut], attention_mask=mask[:, :cut], position_ids=positions[..., :cut], **pixels
        )
    shown = image_tokens(encoder.model.config, ids, case.inputs["image_grid_thw"])
    tokens = [[[position - cut for position in phrase] for phrase in row] for row in case.tokens]
    with attention_rows(encoder.model, tokens, shown) as rows, torch.no_grad():
        encoder.model(
            input_ids=ids[:, cut:],
            attention_mask=mask,
            position_ids=positions[..., cut:],
            past_key_values=before.past_key_values,
        )
    assert_rows(rows, judged(encoder.eager, case.inputs), case, pad, ACROSS_KERNELS)


def test_the_pass_and_the_model_are_left_as_they_were(encoder: Encoder) -> None:
    case = batch(encoder, [[WIDE, TALL]], [PROMPT])
    with torch.no_grad():
        alone = encoder.model(**case.inputs).last_hidden_state
    _, output = taken(encoder.model, case)
    assert torch.equal(output.last_hidden_state, alone)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in encoder.model.modules())


def test_max_keeps_the_largest_of_a_phrase(encoder: Encoder) -> None:
    case = batch(encoder, [[WIDE]], [PROMPT])
    rows, output = taken(encoder.eager, case, "max", output_attentions=True)
    columns = (case.inputs["input_ids"][0] == encoder.eager.config.image_token_id).nonzero()[:, 0]
    wanted = torch.cat([layer[0][:, case.tokens[0][0]][..., columns].amax(1) for layer in output.attentions])
    torch.testing.assert_close(rows.attention[0][0][0].flatten(1), wanted, atol=ACROSS_KERNELS, rtol=0)


@pytest.mark.parametrize(
    ("sizes", "prompts"),
    [
        ([[WIDE]], [PROMPT]),
        ([[WIDE, TALL]], [PROMPT]),
        ([[TALL], [WIDE, TALL]], [PROMPT, "mirror the red car"]),  # the shorter prefix has padding behind it
    ],
)
def test_rows_after_a_shared_prefix_are_those_of_the_whole_input(
    text_encoder: TextEncoder, sizes: Any, prompts: list[str]
) -> None:
    eager = deepcopy(text_encoder.model)
    eager.set_attn_implementation("eager")
    about = [text_encoder.inputs([image((width * 28, height * 28)) for width, height in row]) for row in sizes]
    prefixes = text_encoder.read(about)
    tails = [text_encoder._split(prompt, len(row))[1] for prompt, row in zip(prompts, sizes, strict=True)]
    tokens = [token_positions(text_encoder.processor.tokenizer, tail, [find(tail, "the red car")]) for tail in tails]
    shown = [image_tokens(eager.config, each["input_ids"], each["image_grid_thw"])[0] for each in about]
    with attention_rows(text_encoder.model, [[each] for each in tokens], shown) as rows:
        text_encoder.embed(prefixes, [(row, prompt, None) for row, prompt in enumerate(prompts)])
    for row, (inputs, tail) in enumerate(zip(about, tails, strict=True)):
        ids = text_encoder.processor.tokenizer(tail, return_tensors="pt")["input_ids"]
        whole = inputs | {"input_ids": torch.cat([inputs["input_ids"], ids], 1), "attention_mask": None}
        whole["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(ids)], 1)
        moved = [position + inputs["input_ids"].shape[1] for position in tokens[row]]
        case = Batch(whole, [[moved]], [sizes[row]])
        of_row = AttentionRows([[moved]], [shown[row]], "mean")
        of_row.attention, of_row.hidden_states = [rows.attention[row]], [rows.hidden_states[row]]
        assert_rows(of_row, judged(eager, whole), case, eager.config.image_token_id, ACROSS_KERNELS)


def test_an_image_is_laid_out_as_the_model_places_it(encoder: Encoder) -> None:
    case = batch(encoder, [[WIDE, TALL]], [PROMPT])
    names = ("input_ids", "image_grid_thw", "attention_mask", "mm_token_type_ids")
    positions, _ = encoder.model.get_rope_index(**{name: case.inputs[name] for name in names})
    (placed,) = image_tokens(encoder.model.config, case.inputs["input_ids"], case.inputs["image_grid_thw"])
    for shown, (width, height) in zip(placed, case.sizes[0], strict=True):
        assert shown.grid == (height, width)
        rows, columns = (positions[axis, 0, shown.columns].view(shown.grid) for axis in (1, 2))
        assert torch.equal(rows - rows[0, 0], torch.arange(height)[:, None].expand(shown.grid))
        assert torch.equal(columns - columns[0, 0], torch.arange(width).expand(shown.grid))


def test_attention_is_kept_in_float32(encoder: Encoder) -> None:
    case = batch(encoder, [[WIDE]], [PROMPT])
    rows, _ = taken(deepcopy(encoder.model).bfloat16(), case)
    assert rows.attention[0][0].dtype == torch.float32
    assert rows.hidden_states[0][0].dtype == torch.bfloat16


ONE = [ImageTokens(torch.arange(70, 94), (4, 6))]


@pytest.mark.parametrize(
    ("tokens", "images", "message"),
    [
        ([[[120]], [[120]]], [ONE], "phrases and images are not of one batch"),
        ([[[120]]], [[]], "row 0: no image tokens"),
        ([[[120], []]], [ONE], "row 0: a phrase has no token"),
        ([], [], "phrases and images are not of one batch"),
        ([[[120]], [[120]]], [ONE, ONE], r"not in this pass \(expected 2 rows of more than 120 tokens, found 1 of"),
        ([[[12000]]], [ONE], r"not in this pass \(expected 1 rows of more than 12000 tokens, found 1 of"),
    ],
)
def test_what_does_not_fit_the_pass_is_refused(encoder: Encoder, tokens: Any, images: Any, message: str) -> None:
    inputs = batch(encoder, [[WIDE]], [PROMPT]).inputs
    with pytest.raises(ModelError, match=message), attention_rows(encoder.model, tokens, images):
        encoder.model(**inputs)
    assert not any(module._forward_hooks for module in encoder.model.modules())


def test_no_row_captured_is_an_error(encoder: Encoder) -> None:
    """Under SDPA `output_attentions` gives an empty tuple: a loop over it would do nothing, without a word."""
    case = batch(encoder, [[WIDE]], [PROMPT])
    with pytest.raises(ModelError, match="no attention was captured"), attention_rows(encoder.eager, [[[120]]], [ONE]):
        encoder.model(**case.inputs)


def test_two_passes_are_an_error(encoder: Encoder) -> None:
    inputs = batch(encoder, [[WIDE]], [PROMPT]).inputs
    with attention_rows(encoder.model, [[[120]]], [ONE]):
        encoder.model(**inputs)
        with pytest.raises(ModelError, match="the model was run twice"):
            encoder.model(**inputs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_token_of_padding_is_refused(encoder: Encoder, side: str) -> None:
    case = batch(encoder, [[SQUARE], [WIDE]], [PROMPT, PROMPT], side)
    case.tokens[0][1] = (case.inputs["attention_mask"][0] == 0).nonzero()[0].tolist()
    with pytest.raises(ModelError, match="row 0: a chosen token is padding"):
        taken(encoder.model, case)


def test_caches_windows_and_masks_that_cannot_be_read_are_refused(encoder: Encoder) -> None:
    case = batch(encoder, [[WIDE]], [PROMPT])
    static = StaticCache(encoder.model.config.text_config, max_cache_len=400)
    with pytest.raises(ModelError, match=r"cannot be read from this cache \(expected DynamicCache, found StaticCache"):
        taken(encoder.model, case, past_key_values=static)
    square = case.inputs | {"attention_mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)}
    with pytest.raises(ModelError, match=r"the attention mask is not one of tokens \(expected \[B, L\]"):
        taken(encoder.model, Batch(square, case.tokens, case.sizes), position_ids=torch.zeros(3, 1, 9))
    window = deepcopy(encoder.model)
    window.language_model.layers[2].self_attn.sliding_window = 4
    with pytest.raises(ModelError, match="sliding window"):
        taken(window, case)
    refused = pytest.raises(ModelError, match=r"not a Qwen2.5-VL or Qwen3-VL \(found Linear\)")
    with refused, attention_rows(nn.Linear(1, 1), [], []):
        pass


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([[1, 8, 10]], r"row 0, image 2: .*expected 1 images, found 4 tokens"),
        ([[1, 8, 14]], r"row 0, image 1: .*expected 28, found 24 tokens"),
        ([[1, 8, 12], [1, 8, 12]], r"more grids than images \(expected 1, found 2\)"),
    ],
)
def test_counts_that_do_not_match_the_grids_are_refused(encoder: Encoder, grids: Any, message: str) -> None:
    ids = batch(encoder, [[WIDE]], [PROMPT]).inputs["input_ids"]
    with pytest.raises(ModelError, match=message):
        image_tokens(encoder.model.config, ids, torch.tensor(grids))
    with pytest.raises(ModelError, match="row 0: no image tokens"):
        image_tokens(encoder.model.config, ids[:, :60], torch.tensor(grids))


@pytest.fixture(scope="module")
def frozen(encoder: Encoder) -> FrozenQwen:
    return FrozenQwen.from_pretrained(encoder.folder, dtype=torch.float32)


def test_frozen_qwen_grounds_what_the_whole_model_attends_to(encoder: Encoder, frozen: FrozenQwen) -> None:
    images = [encoder.image(WIDE), encoder.image(TALL, "flower.jpg")]
    found = frozen.ground(images, PROMPT, ["the red car", "然后"])
    assert found.image_grid == [(4, 6), (5, 3)]
    assert [maps.shape for maps in found.attention] == [(2, frozen.in_channels, 4, 6), (2, frozen.in_channels, 5, 3)]
    stock = MODELS[encoder.kind].from_pretrained(encoder.folder, dtype=torch.float32, attn_implementation="eager")
    inputs = dict(encoder.processor(text=[CHAT[encoder.kind].text(PROMPT, 2)], images=images, return_tensors="pt"))
    output = judged(stock.eval(), inputs)
    ids = inputs["input_ids"]
    words = [frozen.processor.tokenizer.decode(token) for token in ids[0]]
    begin = "".join(words).index("the red car")
    ends = np.cumsum([len(word) for word in words])
    inside = (ends > begin) & (ends - [len(word) for word in words] < begin + len("the red car"))
    phrase = [i for i, word in enumerate(words) if inside[i] and word.strip()]
    wanted = expected(output, ids, 0, phrase, TALL, 24, stock.config.image_token_id)
    torch.testing.assert_close(found.attention[1][0], wanted, atol=ACROSS_KERNELS, rtol=0)
    hidden = torch.stack([layer[0, phrase] for layer in output.hidden_states[1:]])
    torch.testing.assert_close(found.hidden_states[0], hidden, atol=10 * ACROSS_KERNELS, rtol=0)


def letters(tokenizer: Any) -> list[int]:
    """The tokens of PROMPT that are more than a space."""
    return [i for i, token in enumerate(tokenizer(PROMPT)["input_ids"]) if tokenizer.decode(token).strip()]


def test_frozen_qwen_grounds_what_is_marked_or_else_everything(encoder: Encoder, frozen: FrozenQwen) -> None:
    wide = encoder.image(WIDE)
    marked = frozen.ground(wide, "make [[the red car]] blue, 然后 keep the sky").attention[0]
    assert torch.equal(marked, frozen.ground(np.asarray(wide), PROMPT, "the red car").attention[0])
    everything = frozen.ground([wide], PROMPT)
    assert torch.equal(everything.attention[0], frozen.ground(wide, PROMPT, PROMPT).attention[0])
    assert everything.hidden_states[0].shape[1] == len(letters(frozen.processor.tokenizer))
    with pytest.raises(SourceError, match="marked in the text and given beside it"):
        frozen.ground(wide, "make [[the car]] blue", "the car")
    with pytest.raises(SourceError, match="stands for pixels"):
        frozen.ground(wide, "make <|image_pad|> blue")
    with pytest.raises(SourceError, match="no image to look at"):
        frozen.ground([], PROMPT)


def test_frozen_qwen_with_the_encoders_template_sees_what_a_cache_is_made_from(
    text_encoder: TextEncoder, folder: ModelFolder
) -> None:
    images = [image((112, 112)), image((84, 140), "flower.jpg")]
    qwen = FrozenQwen(deepcopy(text_encoder.model), load_processor(folder), merge="max", template=TEMPLATE)
    hidden = qwen.ground(images, PROMPT).hidden_states[0][-1]
    kept, _ = text_encoder.encode_whole(images, PROMPT)
    tokenizer = text_encoder.processor.tokenizer
    after = len(tokenizer(TEMPLATE.text("", 0).rpartition("user\n")[2])["input_ids"])  # what closes the turn
    begin = len(kept) - after - len(tokenizer(PROMPT)["input_ids"])
    torch.testing.assert_close(hidden, kept[[begin + i for i in letters(tokenizer)]])


def test_frozen_qwen_passes_three_dimensional_positions(
    encoder: Encoder, frozen: FrozenQwen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `mm_token_type_ids` transformers 5 falls back to one dimension, without a word."""
    seen = []
    rotary = frozen.model.language_model.rotary_emb
    handle = rotary.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    processor = frozen.processor
    inputs = frozen.inputs([encoder.image(WIDE)], PROMPT)

    def forgetful(**arguments: Any) -> dict[str, Tensor]:
        return {name: each for name, each in processor(**arguments).items() if name != "mm_token_type_ids"}

    forgetful.tokenizer = processor.tokenizer  # type: ignore[attr-defined]
    monkeypatch.setattr(frozen, "processor", forgetful)
    frozen.ground(encoder.image(WIDE), PROMPT)
    handle.remove()
    columns = (inputs["input_ids"][0] == frozen.model.config.image_token_id).nonzero()[:, 0]
    time, height, width = seen[0][:, 0, columns]
    assert [len(axis.unique()) for axis in (time, height, width)] == [1, 4, 6]
    stock = processor(text=[CHAT[encoder.kind].text(PROMPT, 1)], images=[encoder.image(WIDE)], return_tensors="pt")
    assert torch.equal(inputs["mm_token_type_ids"], stock["mm_token_type_ids"].int())


def test_frozen_qwen_is_frozen_for_ever(encoder: Encoder, frozen: FrozenQwen) -> None:
    owner = nn.ModuleList([frozen, nn.Dropout()]).train()
    assert owner[1].training
    assert not any(module.training for module in frozen.modules())
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert not frozen.ground(encoder.image(WIDE), PROMPT).attention[0].requires_grad
    assert not any("lm_head" in name for name, _ in frozen.named_parameters())
    learns = deepcopy(frozen.model).requires_grad_(True).train()
    assert not any(parameter.requires_grad for parameter in FrozenQwen(learns, frozen.processor).parameters())
    assert not learns.training


def test_frozen_qwen_has_the_sizes_and_the_chat_format_of_its_model(encoder: Encoder, frozen: FrozenQwen) -> None:
    system, channels, patch = {
        "qwen2_5_vl": ("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", 4 * 4, 14),
        "qwen3_vl": ("", 5 * 6, 16),
    }[encoder.kind]
    assert (frozen.in_channels, frozen.patch_size, frozen.merge_size) == (channels, patch, 2)
    shown = "<|vision_start|><|image_pad|><|vision_end|>" * 2
    assert frozen.template.text("mirror it", 2) == f"{system}<|im_start|>user\n{shown}mirror it<|im_end|>\n"
    wide = encoder.image(WIDE)
    attention = frozen.ground(wide, PROMPT).attention[0][0]
    assert predict_mask(MaskHead(frozen.in_channels, base=4), attention, (8, 12)).shape == (8, 12)
    bare = FrozenQwen(deepcopy(encoder.model), frozen.processor)  # without lm_head
    assert torch.equal(bare.ground(wide, PROMPT).attention[0][0], attention)


def test_frozen_qwen_refuses_other_models(tmp_path: Path) -> None:
    for content, message in (
        ("", "config.json: this file cannot be read"),
        ("{}", r"not a Qwen2.5-VL or Qwen3-VL \(expected model_type qwen2_5_vl or qwen3_vl, found no model_type"),
        ('{"model_type": "qwen2_vl"}', r"not a Qwen2.5-VL or Qwen3-VL .*found qwen2_vl"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelError, match=message) as error:
            FrozenQwen.from_pretrained(tmp_path)
        assert str(tmp_path) in str(error.value)
    with pytest.raises(ModelError, match=r"Linear: not a Qwen2.5-VL or Qwen3-VL"):
        FrozenQwen(nn.Linear(1, 1), None)


def test_frozen_qwen_merges_as_it_is_told(encoder: Encoder, frozen: FrozenQwen) -> None:
    wide = encoder.image(WIDE)
    largest = FrozenQwen(frozen.model, frozen.processor, merge="max").ground(wide, PROMPT).attention[0]
    mean = frozen.ground(wide, PROMPT).attention[0]
    assert (largest >= mean).all()
    assert not torch.equal(largest, mean)


@pytest.mark.parametrize("size", [(150, 97), (640, 31)])
def test_images_are_processed_as_for_the_encoder(encoder: Encoder, size: tuple[int, int]) -> None:
    processor = QwenImageProcessor.from_pretrained(encoder.folder)
    images = [image(size), encoder.image(TALL, "flower.jpg")]
    stock = encoder.processor(images=images, return_tensors="pt")
    ours = processor.preprocess([np.asarray(images[0]), images[1].convert("RGBA")])
    assert torch.equal(ours["pixel_values"], stock["pixel_values"])
    assert torch.equal(ours["image_grid_thw"], stock["image_grid_thw"])
    assert ours["pixel_values"].shape[1] == {"qwen2_5_vl": 1176, "qwen3_vl": 1536}[encoder.kind]
    assert ours["image_sizes"] == [(size[1], size[0]), (5 * encoder.cell, 3 * encoder.cell)]
    alone = processor.preprocess(images[0])
    assert alone["meta_data"] == ours["meta_data"][0]
    assert len(alone["pixel_values"]) == alone["image_grid_thw"].prod()


def test_meta_data_says_how_to_find_back(encoder: Encoder) -> None:
    meta = QwenImageProcessor.from_pretrained(encoder.folder).preprocess(image((150, 97)))["meta_data"]
    height, width = {"qwen2_5_vl": (84, 140), "qwen3_vl": (96, 160)}[encoder.kind]
    assert meta == {
        "original_shape": {"height": 97, "width": 150},
        "image_shape": {"height": height, "width": width},
        "padded_shape": {"height": height, "width": width},
        "scale_factor": (height / 97, width / 150),
        "padding": {"before_height": 0, "after_height": 0, "before_width": 0, "after_width": 0},
    }


def test_the_processor_of_an_edit_model_is_that_of_its_text_encoder(folder: ModelFolder, tmp_path: Path) -> None:
    save_tiny_qwen3_vl(tmp_path / "text_encoder", tmp_path / "processor", folder.component("processor"))
    assert isinstance(load_processor(replace(folder, path=tmp_path)), ImageOnlyQwen3VLProcessor)
    assert isinstance(load_processor(folder), ImageOnlyQwen2VLProcessor)


@pytest.mark.parametrize("array", [np.zeros((8, 8, 3)), np.zeros((8, 8), np.uint8), np.zeros((3, 8, 8), np.uint8)])
def test_arrays_that_are_no_images_are_refused(array: np.ndarray) -> None:
    with pytest.raises(SourceError, match=r"expected uint8 of shape \(height, width, 3\), found \w+ of shape"):
        QwenImageProcessor().preprocess(array)
