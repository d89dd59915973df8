"""A padded batch of mixed sizes gives what the stock model gives for each sample alone: outputs and gradients.

The judge calls stock diffusers on one unpadded sample at a time and sums the gradients of a loss that weights every
valid token at random. Padding is filled with large numbers or NaN, and its outputs are weighted in the loss too: they
have to be zero. Mutants of the code under test show that the judge would notice each mistake that it is there for.
"""

from __future__ import annotations

import doctest
import inspect
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qwen_cache.format.errors import ModelError, TrainError
from qwen_train import transformer
from qwen_train.transformer import QwenImageMultiResTransformer2DModel, QwenMultiResAttnProcessor

TINY = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 14, 14),
}
TOLERANCE = 1e-5  # relative, float32
CAUGHT = 1e-3  # a mutant has to err by this much at least, a hundred times what passes
LORA = LoraConfig(
    r=4,
    lora_alpha=4,
    init_lora_weights=False,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"],
)


# ---- models and batches ----------------------------------------------------------------------------------------------


def stock_model(**config: Any) -> QwenImageTransformer2DModel:
    """Random weights, with queries and keys long enough for sharp attention: errors in it shall show in the output."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**TINY, **config)
    for name, parameter in model.named_parameters():
        if "norm_" in name:
            torch.nn.init.constant_(parameter, 1.5)
        elif parameter.ndim == 1:
            torch.nn.init.normal_(parameter, std=0.2)
        else:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return model


def multi_res_model(stock: QwenImageTransformer2DModel) -> QwenImageMultiResTransformer2DModel:
    model = QwenImageMultiResTransformer2DModel.from_config(stock.config)
    model.load_state_dict(stock.state_dict())
    return model


@dataclass(frozen=True)
class Sample:
    images: list[tuple[int, int, int]]
    image: Tensor
    text: Tensor
    sigma: Tensor
    loss_weight: Tensor


@dataclass(frozen=True)
class Run:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def random_samples(
    *specification: tuple[list[tuple[int, int]], int], dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """From (height and width of the target and of each control, text length) per sample."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for sides, text_length in specification:
        tokens = sum(height * width for height, width in sides)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        samples.append(
            Sample(
                images=[(1, height, width) for height, width in sides],
                image=draw(tokens, 16),
                text=draw(text_length, 48),
                sigma=torch.rand((), generator=generator),
                loss_weight=draw(tokens, 16),
            )
        )
    return samples


def padded(rows: list[Tensor], fill: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def batch_of(samples: list[Sample], fill: float = 1e3) -> dict[str, Any]:
    lengths = torch.tensor([len(sample.text) for sample in samples])
    return {
        "hidden_states": padded([sample.image for sample in samples], fill),
        "encoder_hidden_states": padded([sample.text for sample in samples], fill),
        "encoder_hidden_states_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        "timestep": torch.stack([sample.sigma for sample in samples]),
        "img_shapes": [sample.images for sample in samples],
    }


# ---- the judge -------------------------------------------------------------------------------------------------------


def trainable_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Float64, and zero where the loss does not reach: the last block's text stream leads nowhere."""
    return {
        name: torch.zeros_like(parameter, dtype=torch.float64) if parameter.grad is None else parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def run_singly(stock: QwenImageTransformer2DModel, samples: list[Sample], **arguments: Any) -> Run:
    outputs, totals = [], {}
    for sample in samples:
        stock.zero_grad()
        output = stock(
            hidden_states=sample.image[None],
            encoder_hidden_states=sample.text[None],
            timestep=sample.sigma[None],
            img_shapes=[sample.images],
            return_dict=False,
            **arguments,
        )[0][0]
        (output * sample.loss_weight).sum().backward()
        outputs.append(output.detach())
        for name, gradient in trainable_gradients(stock).items():
            totals[name] = totals.get(name, 0) + gradient
    return Run(outputs, totals)


def run_batched(
    model: QwenImageMultiResTransformer2DModel, samples: list[Sample], fill: float = 1e3, **arguments: Any
) -> Run:
    model.zero_grad()
    batch = {**batch_of(samples, fill), **arguments}
    output = model(**batch).sample
    (output * padded([sample.loss_weight for sample in samples], 1.0)).sum().backward()
    for sample, row in zip(samples, output, strict=True):
        assert not row[len(sample.image) :].any(), "padded outputs are not zero"
    rows = [row[: len(sample.image)].detach() for sample, row in zip(samples, output, strict=True)]
    return Run(rows, trainable_gradients(model))


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def output_error(found: Run, expected: Run) -> float:
    """Of the worst sample."""
    return max(distance(a, b) for a, b in zip(found.outputs, expected.outputs, strict=True))


def gradient_error(found: Run, expected: Run) -> float:
    """Of the worst parameter."""
    assert found.gradients.keys() == expected.gradients.keys()
    reached = [name for name, gradient in expected.gradients.items() if gradient.any()]
    unreached = expected.gradients.keys() - set(reached)
    assert not any(found.gradients[name].any() for name in unreached), "a gradient where the stock model has none"
    return max(distance(found.gradients[name], expected.gradients[name]) for name in reached)


def assert_equal(found: Run, expected: Run, tolerance: float = TOLERANCE) -> None:
    assert output_error(found, expected) < tolerance
    assert gradient_error(found, expected) < tolerance


CASES = {
    "mixed sizes": [([(6, 4), (4, 4)], 5), ([(8, 10), (6, 6)], 9), ([(3, 7), (5, 2)], 7)],
    "equal token counts, swapped sides": [([(8, 12), (8, 12)], 6), ([(12, 8), (12, 8)], 6)],
    "one, two, three and no control images": [
        ([(4, 6), (6, 4)], 5),
        ([(4, 4), (2, 6), (5, 5)], 8),
        ([(4, 4), (2, 3), (5, 5), (3, 6)], 3),
        ([(6, 6)], 7),
    ],
    "text lengths differ, image sizes do not": [([(6, 4), (4, 6)], 3), ([(6, 4), (4, 6)], 11), ([(6, 4), (4, 6)], 1)],
    "nothing to pad": [([(6, 4), (4, 6)], 5), ([(4, 6), (6, 4)], 5)],
    "a control larger than its target": [([(2, 2), (13, 3)], 4), ([(9, 4), (2, 2)], 6)],
}
MIXED = CASES["mixed sizes"]


# ---- equal to the stock model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
@pytest.mark.parametrize("case", CASES)
def test_batch_equals_stock_singles(case: str, zero_cond_t: bool) -> None:
    stock, samples = stock_model(zero_cond_t=zero_cond_t), random_samples(*CASES[case])
    assert_equal(run_batched(multi_res_model(stock), samples), run_singly(stock, samples))


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
def test_nan_in_the_padding_reaches_nothing(zero_cond_t: bool) -> None:
    stock, samples = stock_model(zero_cond_t=zero_cond_t), random_samples(*MIXED)
    assert_equal(run_batched(multi_res_model(stock), samples, fill=math.nan), run_singly(stock, samples))


@pytest.mark.parametrize("attention_mask", ["none", "all true"])
def test_without_padding_attention_gets_no_mask(attention_mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    dispatch = transformer.dispatch_attention_fn
    monkeypatch.setattr(
        transformer, "dispatch_attention_fn", lambda *a, **k: seen.append(k["attn_mask"]) or dispatch(*a, **k)
    )
    stock, samples = stock_model(), random_samples(*CASES["nothing to pad"])
    overridden = {"encoder_hidden_states_mask": None} if attention_mask == "none" else {}
    assert_equal(run_batched(multi_res_model(stock), samples, **overridden), run_singly(stock, samples))
    assert seen == [None] * TINY["num_layers"]


@pytest.mark.parametrize(
    "shapes", [[(1, 6, 4), (1, 4, 6)], [[1, 6, 4], [1, 4, 6]]], ids=["tuples", "lists, as in JSON"]
)
def test_one_list_of_images_serves_the_whole_batch(shapes: list[Any]) -> None:
    stock, samples = stock_model(), random_samples(*CASES["text lengths differ, image sizes do not"])
    assert_equal(run_batched(multi_res_model(stock), samples, img_shapes=shapes), run_singly(stock, samples))


def test_text_mask_with_holes_equals_stock_with_that_mask() -> None:
    stock, samples = stock_model(), random_samples(([(6, 4)], 6), ([(4, 3), (3, 2)], 6))
    masks = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        found = multi_res_model(stock)(**{**batch_of(samples), "encoder_hidden_states_mask": masks}).sample
        for sample, mask, row in zip(samples, masks, found, strict=True):
            alone = stock(**{**batch_of([sample]), "encoder_hidden_states_mask": mask[None]}).sample[0]
            assert distance(row[: len(sample.image)], alone) < TOLERANCE


def test_additional_t_cond_belongs_to_its_sample() -> None:
    stock, samples = stock_model(use_additional_t_cond=True), random_samples(*MIXED)
    conditions = torch.tensor([0, 1, 1])
    found = run_batched(multi_res_model(stock), samples, additional_t_cond=conditions)
    for i, sample in enumerate(samples):
        alone = run_singly(stock, [sample], additional_t_cond=conditions[i : i + 1])
        assert distance(found.outputs[i], alone.outputs[0]) < TOLERANCE


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
def test_gradient_checkpointing_keeps_the_mask(zero_cond_t: bool) -> None:
    stock, samples = stock_model(zero_cond_t=zero_cond_t), random_samples(*MIXED)
    model = multi_res_model(stock).train()
    model.enable_gradient_checkpointing()
    assert_equal(run_batched(model, samples), run_singly(stock, samples))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients(checkpointing: bool) -> None:
    stock, samples = stock_model(), random_samples(*MIXED)
    model = multi_res_model(stock)
    stock.add_adapter(LORA)
    model.add_adapter(LORA)
    model.load_state_dict(stock.state_dict())
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    found, expected = run_batched(model, samples), run_singly(stock, samples)
    assert_equal(found, expected)
    assert found.gradients["transformer_blocks.0.attn.add_k_proj.lora_A.default.weight"].any()
    assert all("lora_" in name for name in found.gradients)


def test_lora_scale_is_that_of_the_stock_model() -> None:
    stock, samples = stock_model(), random_samples(*MIXED)
    model = multi_res_model(stock)
    stock.add_adapter(LORA)
    model.add_adapter(LORA)
    model.load_state_dict(stock.state_dict())
    scaled = run_singly(stock, samples, attention_kwargs={"scale": 0.25})
    assert_equal(run_batched(model, samples, attention_kwargs={"scale": 0.25}), scaled)
    assert output_error(run_batched(model, samples), scaled) > CAUGHT


def test_bfloat16_is_as_near_to_float32_as_the_stock_model() -> None:
    """Rounding differs with the shape of every product, so the measure is float32: not more than half as far again."""
    samples = random_samples(*MIXED, dtype=torch.bfloat16)
    in_float32 = [
        Sample(s.images, s.image.float(), s.text.float(), s.sigma.bfloat16().float(), s.loss_weight.float())
        for s in samples
    ]
    stock = stock_model().bfloat16()
    exact = run_singly(stock_model().bfloat16().float(), in_float32)
    singly, batched = run_singly(stock, samples), run_batched(multi_res_model(stock).bfloat16(), samples)
    assert batched.outputs[0].dtype == torch.bfloat16
    assert output_error(batched, exact) < 1.5 * output_error(singly, exact) < 0.1
    assert gradient_error(batched, exact) < 1.5 * gradient_error(singly, exact)


# ---- the judge notices -----------------------------------------------------------------------------------------------


def text_start_shared(pos_embed: Any, samples: Any, text_lengths: Any, *rest: Any) -> Any:
    """Text RoPE of the whole batch from its largest image."""
    widest = max(samples, key=lambda images: max(max(height, width) for _, height, width in images))
    image_freqs, _ = ROTARY(pos_embed, samples, text_lengths, *rest)
    _, text_length, device = rest
    text = pos_embed([widest], device=device, max_txt_seq_len=text_length)[1]
    return image_freqs, text.expand(len(samples), -1, -1)


def text_start_from_target(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    """Text RoPE that starts behind the target, whatever the control images' sizes are."""
    return ROTARY(pos_embed, samples, *rest)[0], ROTARY(pos_embed, [images[:1] for images in samples], *rest)[1]


def no_frame_index(pos_embed: Any, samples: Any, text_lengths: Any, image_length: int, *rest: Any) -> Any:
    """Every image counted as the first of its sample."""
    singles = [[pos_embed([[image]], device=None, max_txt_seq_len=1)[0] for image in images] for images in samples]
    image_freqs = padded([torch.cat(rows) for rows in singles], 0)
    return image_freqs, ROTARY(pos_embed, samples, text_lengths, image_length, *rest)[1]


def sides_swapped(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    return ROTARY(pos_embed, [[(t, w, h) for t, h, w in images] for images in samples], *rest)


def first_sample_for_all(pos_embed: Any, samples: Any, *rest: Any) -> Any:
    return ROTARY(pos_embed, [samples[0]] * len(samples), *rest)


def real_text_offset(pos_embed: Any, samples: Any, text_lengths: Any, *rest: Any) -> Any:
    """Image RoPE laid behind the real text, while the image tokens lie behind the padded text."""
    image_freqs, text_freqs = ROTARY(pos_embed, samples, text_lengths, *rest)
    rows = zip(text_freqs, image_freqs, text_lengths, strict=True)
    joint = torch.stack([torch.cat([text[:n], image, text[n:]]) for text, image, n in rows])
    return joint.split([text_freqs.shape[1], image_freqs.shape[1]], dim=1)[::-1]


def neighbours_modulation(model: QwenImageMultiResTransformer2DModel) -> None:
    forward = model.time_text_embed.forward
    model.time_text_embed.forward = lambda *arguments: forward(*arguments).roll(1, dims=0)


def checkpoint_without_mask(model: QwenImageMultiResTransformer2DModel) -> None:
    model.enable_gradient_checkpointing()
    model._gradient_checkpointing_func = lambda block, *inputs: checkpoint(
        block, *inputs[:5], {"attention_mask": None}, inputs[6], use_reentrant=False
    )


ROTARY = transformer.rotary_embeddings
JOINT_MASK = transformer.joint_attention_mask
MODULATION = transformer.modulation_index

SWAPPED = CASES["equal token counts, swapped sides"]
TEXTS = CASES["text lengths differ, image sizes do not"]
COUNTS = CASES["one, two, three and no control images"]

FUNCTION_MUTANTS = {
    "text start shared": (MIXED, "rotary_embeddings", text_start_shared),
    "text start from the target": (
        CASES["a control larger than its target"],
        "rotary_embeddings",
        text_start_from_target,
    ),
    "no frame index": (COUNTS, "rotary_embeddings", no_frame_index),
    "height and width swapped": (SWAPPED, "rotary_embeddings", sides_swapped),
    "RoPE of the first sample": (SWAPPED, "rotary_embeddings", first_sample_for_all),
    "real text offset": (TEXTS, "rotary_embeddings", real_text_offset),
    "image padding attended": (
        COUNTS,
        "joint_attention_mask",
        lambda text, image, device: JOINT_MASK(text, torch.ones_like(image), device),
    ),
    "text padding attended": (
        TEXTS,
        "joint_attention_mask",
        lambda text, image, device: JOINT_MASK(torch.ones_like(text), image, device),
    ),
    "control images modulated as targets": (
        COUNTS,
        "modulation_index",
        lambda samples, *rest: torch.zeros_like(MODULATION(samples, *rest)),
    ),
    "neighbour's target length": (
        COUNTS,
        "modulation_index",
        lambda samples, *rest: MODULATION(samples, *rest).roll(1, dims=0),
    ),
}
MODEL_MUTANTS = {"neighbour's modulation": neighbours_modulation, "checkpoint without mask": checkpoint_without_mask}


@pytest.mark.parametrize("mutant", FUNCTION_MUTANTS)
def test_judge_notices_a_wrong_function(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification, name, replacement = FUNCTION_MUTANTS[mutant]
    monkeypatch.setattr(transformer, name, replacement)
    stock, samples = stock_model(zero_cond_t=True), random_samples(*specification)
    found, expected = run_batched(multi_res_model(stock), samples, fill=0.0), run_singly(stock, samples)
    assert output_error(found, expected) > CAUGHT
    assert gradient_error(found, expected) > CAUGHT


@pytest.mark.parametrize("mutant", MODEL_MUTANTS)
def test_judge_notices_a_wrong_model(mutant: str) -> None:
    stock, samples = stock_model(), random_samples(*MIXED)
    model = multi_res_model(stock)
    MODEL_MUTANTS[mutant](model)
    found, expected = run_batched(model, samples), run_singly(stock, samples)
    assert output_error(found, expected) > CAUGHT
    assert gradient_error(found, expected) > CAUGHT


def test_judge_notices_padding_that_is_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "zero_padding", lambda x, valid: x)
    model, samples = multi_res_model(stock_model()), random_samples(*MIXED)
    with pytest.raises(AssertionError, match="padded outputs are not zero"):
        run_batched(model, samples)
    expected = run_singly(stock_model(), samples)
    output = model(**batch_of(samples, fill=math.nan)).sample
    rows = [row[: len(sample.image)] for sample, row in zip(samples, output, strict=True)]
    assert output_error(Run(rows, {}), expected) == math.inf


# ---- what surrounds the forward pass ---------------------------------------------------------------------------------


def test_signatures_are_those_of_the_stock_model() -> None:
    for method in ("__init__", "forward"):
        ours, stock = (
            inspect.signature(getattr(cls, method)).parameters
            for cls in (QwenImageMultiResTransformer2DModel, QwenImageTransformer2DModel)
        )
        assert [(p.name, p.default, p.kind) for p in ours.values()] == [
            (p.name, p.default, p.kind) for p in stock.values()
        ]


def test_saved_model_is_a_stock_model(tmp_path: Path) -> None:
    original, samples = stock_model(zero_cond_t=True), random_samples(*MIXED)
    original.save_pretrained(tmp_path / "stock")
    model = QwenImageMultiResTransformer2DModel.from_pretrained(tmp_path / "stock")
    assert all(isinstance(processor, QwenMultiResAttnProcessor) for processor in model.attn_processors.values())
    model.save_pretrained(tmp_path / "ours")

    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "ours")]
    assert configs[1]["_class_name"] == "QwenImageTransformer2DModel"
    assert {**configs[1], "_name_or_path": None} == {**configs[0], "_name_or_path": None}
    weights = [(tmp_path / folder / "diffusion_pytorch_model.safetensors").read_bytes() for folder in ("stock", "ours")]
    assert weights[0] == weights[1]

    reloaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "ours")
    assert_equal(run_batched(model, samples), run_singly(reloaded, samples))


def test_import_loads_no_pipeline_and_no_autoencoder() -> None:
    program = "import sys, qwen_train.transformer; print(*sys.modules, sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "diffusers.models.transformers.transformer_qwenimage" in modules
    unwanted = ("diffusers.pipelines", "diffusers.models.autoencoders", "transformers.models.qwen2_5_vl")
    assert [name for name in modules if name.startswith((*unwanted, "qwen_cache.encode"))] == []


def test_example_in_the_docstring() -> None:
    results = doctest.testmod(transformer)
    assert results.attempted > 0
    assert results.failed == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

TWO = [([(6, 4), (4, 6)], 5), ([(4, 4)], 3)]  # 48 and 16 image tokens


@pytest.mark.parametrize(
    ("overridden", "message"),
    [
        (
            {"img_shapes": [[(1, 6, 4), (1, 4, 6)]]},
            "img_shapes: one list of images per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"img_shapes": [[(1, 6, 4)], [(1, 4, 4)]]},
            "hidden_states: img_shapes and hidden_states disagree: the longest sample has the images [(1, 6, 4)] "
            "(expected 24 image tokens, found 48)\n"
            "  → give the target and every control image of each sample: img_shapes=[[(1, h, w), ...], ...]",
        ),
        (
            {"img_shapes": [(1, 6, 4), (1, 4, 4)]},
            "the longest sample has the images [(1, 6, 4), (1, 4, 4)] (expected 40 image tokens, found 48)",
        ),
        (
            {"img_shapes": [[(1, 6, 4), (1, 4, 6)], []]},
            "img_shapes: a sample's images cannot be read (expected [(1, h, w), ...] for the whole batch, or one such "
            "list per sample, found [])",
        ),
        ({"img_shapes": [(6, 4), (4, 6)]}, "a sample's images cannot be read"),
        ({"img_shapes": [[(1, 6, 4), (1, 4, 6)], (1, 4, 4)]}, "found (1, 4, 4))"),
        ({"img_shapes": [[(1, 6, 4), (1, 4, 6)], [(1, 4, 0)]]}, "found [(1, 4, 0)])"),
        ({"img_shapes": []}, "(expected 2 samples, as in hidden_states, found 0)"),
        (
            {"encoder_hidden_states_mask": torch.ones(2, 4)},
            "encoder_hidden_states_mask: the text mask does not fit the text (expected shape (2, 5), found (2, 4))",
        ),
        (
            {"timestep": torch.rand(1)},
            "timestep: one row per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"encoder_hidden_states": torch.rand(3, 5, 48)},
            "encoder_hidden_states: one row per sample is needed (expected 2 samples, as in hidden_states, found 3)",
        ),
        ({"img_shapes": None}, "forward needs encoder_hidden_states, timestep and img_shapes (found None)"),
        ({"guidance": torch.ones(2)}, "forward: guidance is not supported (expected None, found Tensor)"),
        (
            {"controlnet_block_samples": [torch.zeros(2, 48, 64)]},
            "forward: controlnet_block_samples is not supported (expected None, found list)",
        ),
        (
            {"attention_kwargs": {"attention_mask": torch.ones(2, 53)}},
            "attention_kwargs: the attention mask follows from img_shapes and encoder_hidden_states_mask "
            "(expected no attention_mask)",
        ),
    ],
)
def test_contradictory_batch_is_refused(overridden: dict[str, Any], message: str) -> None:
    model = multi_res_model(stock_model())
    with pytest.raises(TrainError) as refusal:
        model(**{**batch_of(random_samples(*TWO)), **overridden})
    assert message in str(refusal.value)


def test_text_beyond_the_rope_table_is_refused() -> None:
    """The table has 4096 rows; beside an image 10 tokens high, text starts at row 5."""
    model = multi_res_model(stock_model())
    [fits] = random_samples(([(10, 2)], 4091))
    with torch.no_grad():
        model(**batch_of([fits]))
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(([(2, 2)], 3), ([(10, 2)], 4092))))
    assert str(refusal.value) == (
        "encoder_hidden_states: the text is longer than the RoPE table beside images of [(1, 10, 2)] "
        "(expected at most 4091 text tokens, found 4092)\n  → shorten the text or the images"
    )


@pytest.mark.parametrize("backend", ["flash_varlen", "_flash_varlen_3", "sage_varlen"])
def test_attention_backend_that_would_misread_the_mask_is_refused(backend: str) -> None:
    model = multi_res_model(stock_model())
    for processor in model.attn_processors.values():
        processor._attention_backend = backend  # set_attention_backend asks for the package first
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(*TWO)))
    assert str(refusal.value) == (
        "attention backend: this attention backend misreads padding between text and image (expected one that takes a "
        f'mask, such as native, found {backend})\n  → call set_attention_backend("native") or make batches of one size'
    )


def test_layered_checkpoint_is_refused() -> None:
    with pytest.raises(ModelError) as refusal:
        QwenImageMultiResTransformer2DModel(**TINY, use_layer3d_rope=True)
    assert str(refusal.value) == (
        "config.json: layered checkpoints place their images on other positions (expected use_layer3d_rope false, "
        "found true)\n  → load a Qwen-Image or Qwen-Image-Edit transformer"
    )


def test_processor_refuses_the_stock_model() -> None:
    stock, [sample] = stock_model(), random_samples(([(4, 4)], 3))
    stock.set_attn_processor(QwenMultiResAttnProcessor())
    with pytest.raises(ModelError, match="works inside QwenImageMultiResTransformer2DModel only"):
        stock(**batch_of([sample]))
