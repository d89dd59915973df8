"""LoKr, LoHa and OFT: what was trained is what peft, diffusers, ComfyUI and the merged weights compute.

The judges are peft's and diffusers' own loading on the stock transformer, and the formulas of the papers and of
ComfyUI's loader (comfy/weight_adapter) on the tensors of a file, in float64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import peft
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import LoraConfig
from qwen_train.inference.pipeline import check_loras, load_loras
from qwen_train.lora.adapter import METADATA_KEY, add_lora, lora_weights, read_assistant, start_from, write_lora
from qwen_train.lora.export import export as export_file
from qwen_train.lora.files import WeightedLora, parse_lora
from qwen_train.lora.reader import read_lora
from qwen_train.training.start import differences as setting_differences
from qwen_train.training.start import fixed_settings

from .support.commands import refused, run
from .support.judge import TOLERANCE
from .support.marks import slow
from .support.outputs import relative_error
from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, differences, written
from .support.single_files import weights_of, write_gguf

TYPES: dict[str, dict[str, Any]] = {
    "LoHa": {"type": "loha", "rank": 3, "lora_alpha": 5, "rank_pattern": {"to_q": 2}},
    "OFT": {"type": "oft", "oft_block_size": 16},
    "LoKr": {"type": "lokr", "rank": 100, "lora_alpha": 30},
    "LoKr of four matrices": {"type": "lokr", "rank": 2, "lora_alpha": 3, "decompose_both": True},
    "OFT by the exact inverse": {"type": "oft", "oft_block_size": 8, "use_cayley_neumann": False},
    "COFT": {"type": "oft", "oft_block_size": 32, "coft": True, "eps": 0.3, "use_cayley_neumann": False},
}
QUERY = "transformer_blocks.1.attn.to_q"
NONE: tuple[bool, str] = (False, "none")
"""Neither merged nor quantised."""
EPSILON = float(torch.finfo(torch.float32).eps)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def stock(model: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(model / "transformer").eval()


def adapted(model: Path, **settings: Any) -> QwenImageTransformer2DModel:
    """The stock transformer with a random adapter of `train.lora`."""
    transformer = stock(model)
    add_lora(transformer, LoraConfig(**settings))
    generator = torch.Generator().manual_seed(1)
    for tensor in lora_weights(transformer).values():
        tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return transformer


def random_adapter(model: Path, folder: Path, **settings: Any) -> tuple[Path, Tensor]:
    """A file as training writes it, and what the model computes with the adapter."""
    transformer = adapted(model, **settings)
    expected = output(transformer)  # before writing: COFT projects its weights in a forward pass
    folder.mkdir()
    write_lora(transformer, lora_weights(transformer), folder / LORA, {})
    return folder / LORA, expected


@torch.no_grad()
def output(transformer: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    velocity: Tensor = transformer(
        hidden_states=torch.randn(1, 24, 64, generator=generator),
        encoder_hidden_states=torch.randn(1, 5, 64, generator=generator),
        timestep=torch.tensor([0.6]),
        img_shapes=[[(1, 4, 6)]],
        return_dict=False,
    )[0]
    return velocity


def export(source: Path, form: str, out: Path, *options: str | Path) -> Path:
    result = run("qwen-train", "export", source, "--to", form, "--out", out, *options)
    assert result.code == 0, result.stderr
    return out


def merged_weights(source: Path, model: Path, out: Path) -> dict[str, Tensor]:
    folder = export(source, "merged", out, "--model", model)
    return QwenImageTransformer2DModel.from_pretrained(folder).state_dict()


def pipeline_with(loras: Sequence[WeightedLora], model: Path, *, merge: bool = False) -> Any:
    """A stock pipeline with adapters as `predict` loads them."""
    check_loras(open_model(str(model), ("transformer",)), loras, merge, "none")
    pipeline = stock_pipeline(model)
    load_loras(pipeline, loras, merge)
    return pipeline


def stock_pipeline(model: Path) -> Any:
    parts = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "processor"))
    return diffusers.QwenImageEditPlusPipeline(transformer=stock(model), **parts)


# ---- the formulas ----------------------------------------------------------------------------------------------------


def factor(own: dict[str, Tensor], name: str) -> Tensor:
    return own[name] if name in own else own[f"{name}_a"] @ own[f"{name}_b"]


def rotation(rows: Tensor, settings: dict[str, Any]) -> Tensor:
    """Cayley's transform (I - Q)(I + Q)⁻¹ of each block (arXiv 2306.07280), or the first terms of its series."""
    size = settings["oft_block_size"]
    above = torch.triu_indices(size, size, 1)
    q = rows.new_zeros(len(rows), size, size)
    q[:, above[0], above[1]] = rows
    q = q - q.mT
    one = torch.eye(size, dtype=q.dtype)
    if settings.get("use_cayley_neumann", True):
        return torch.block_diag(*(one + 2 * b + 2 * b @ b + 2 * b @ b @ b + b @ b @ b @ b for b in q))
    return torch.block_diag(*(torch.linalg.inv(one + b) @ (one - b) for b in q))


def by_the_formula(own: dict[str, Tensor], base: Tensor, settings: dict[str, Any]) -> Tensor:
    """The weight of a layer with the adapter."""
    own = {name: tensor.double() for name, tensor in own.items()}
    if settings["type"] == "oft":
        return base @ rotation(own["oft_R.weight"], settings).T
    scale = settings["lora_alpha"] / settings.get("rank_pattern", {}).get("to_q", settings["rank"])
    if settings["type"] == "loha":
        update = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    else:
        update = torch.kron(factor(own, "lokr_w1"), factor(own, "lokr_w2"))
    return base + scale * update


def by_comfyui(own: dict[str, Tensor], base: Tensor, *, earlier: bool) -> Tensor:
    """ComfyUI's `calculate_weight` at strength 1; versions differ in the alpha of two whole factors (`names.py`)."""
    own = {name: tensor.double() for name, tensor in own.items()}
    alpha = float(own["alpha"]) if "alpha" in own else None
    if "hada_w1_a" in own:
        dim = len(own["hada_w1_b"])
        update = (own["hada_w1_a"] @ own["hada_w1_b"]) * (own["hada_w2_a"] @ own["hada_w2_b"])
    else:
        w1, w2 = factor(own, "lokr_w1"), factor(own, "lokr_w2")
        ranks = [len(own[name]) for name in ("lokr_w2_b", "lokr_w1_b") if name in own]
        dim = ranks[0] if ranks else 0 if earlier else len(w2) // len(w1)
        update = torch.kron(w1, w2)
    return base + update * (alpha / dim if alpha is not None and dim else 1.0)


def of_query(file: Path, prefix: str) -> dict[str, Tensor]:
    """The tensors of one module."""
    begin = f"{prefix}{QUERY}."
    return {name.removeprefix(begin): tensor for name, tensor in load_file(file).items() if name.startswith(begin)}


def assert_equal_weights(found: Tensor, expected: Tensor, base: Tensor) -> None:
    """In float32: sums of at most 64 products, in at most four factors after each other."""
    assert float((found - expected).abs().max() / expected.abs().max()) < 4 * 64 * EPSILON
    assert float((expected - base).abs().max() / base.abs().max()) > 0.05, "the adapter changes nothing"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("settings", TYPES.values(), ids=TYPES)
def test_merged_weights_are_the_formula_and_the_adapter(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    file, expected = random_adapter(model, tmp_path / "run", **settings)
    folder = export(tmp_path / "run", "merged", tmp_path / "merged", "--model", model)
    merged, base = QwenImageTransformer2DModel.from_pretrained(folder), stock(model)
    assert relative_error(output(merged), expected) < TOLERANCE
    assert relative_error(output(base), expected) > 0.01, "the adapter changes nothing"
    before, after = (each.get_parameter(f"{QUERY}.weight").detach().double() for each in (base, merged))
    if not settings.get("coft"):
        assert_equal_weights(after, by_the_formula(of_query(file, "transformer."), before, settings), before)
    if settings["type"] == "oft" and not settings.get("use_cayley_neumann", True):
        gram = 4 * 64 * EPSILON * float((before @ before.T).abs().max())
        assert torch.allclose(after @ after.T, before @ before.T, rtol=0, atol=gram), "a rotation keeps all angles"


# ---- other programs --------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("settings", TYPES.values(), ids=TYPES)
def test_peft_loads_what_training_writes(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    file, expected = random_adapter(model, tmp_path / "run", **settings)
    folder = export(file, "peft", tmp_path / "peft")
    loaded = peft.PeftModel.from_pretrained(stock(model), str(folder))
    assert relative_error(output(loaded), expected) < TOLERANCE


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["LoKr", "LoKr of four matrices"])
def test_diffusers_transformer_loads_a_lokr(name: str, model: Path, tmp_path: Path) -> None:
    file, expected = random_adapter(model, tmp_path / "run", **TYPES[name])
    for path in (file, export(file, "diffusers", tmp_path / "diffusers.safetensors")):
        transformer = stock(model)
        transformer.load_lora_adapter(str(path.parent), weight_name=path.name, prefix="transformer")
        assert relative_error(output(transformer), expected) < TOLERANCE
        pipeline = stock_pipeline(model)
        with pytest.raises(ValueError, match="Make sure all LoRA param names contain `'lora'`"):
            pipeline.load_lora_weights(str(path.parent), weight_name=path.name)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["LoKr", "LoKr of four matrices", "LoHa"])
def test_comfyui_computes_the_merged_weights(name: str, model: Path, tmp_path: Path) -> None:
    """In the versions that divide the alpha of two whole factors, and in those that ignore it."""
    file, expected = random_adapter(model, tmp_path / "run", **TYPES[name])
    converted = export(file, "comfyui", tmp_path / "comfyui.safetensors")
    base = stock(model).get_parameter(f"{QUERY}.weight").detach().double()
    merged = merged_weights(file, model, tmp_path / "merged")[f"{QUERY}.weight"].double()
    for earlier in (True, False):
        found = by_comfyui(of_query(converted, "diffusion_model."), base, earlier=earlier)
        assert_equal_weights(found, merged, base)
    pipeline = pipeline_with([WeightedLora(converted)], model)
    assert relative_error(output(pipeline.transformer), expected) < TOLERANCE
    if name == "LoHa":  # nothing is rounded
        ours, theirs = of_query(file, "transformer."), of_query(converted, "diffusion_model.")
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


READ_BACK: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "LoRA": ({"lora_alpha": 10, "rank_pattern": {"to_q": 2}}, ("peft", "diffusers", "comfyui")),
    "LoKr": (TYPES["LoKr"], ("peft", "diffusers", "comfyui")),
    "OFT": (TYPES["OFT"], ("peft",)),
    "LoHa": (TYPES["LoHa"], ("peft", "comfyui")),
    "DoRA": ({"use_dora": True, "lora_alpha": 3}, ("peft", "diffusers")),
}
"""Settings, and the forms of `export` beside merged weights."""


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", READ_BACK)
def test_what_export_writes_is_the_same_adapter_to_every_reader(name: str, model: Path, tmp_path: Path) -> None:
    """To predict, to train.lora.weights and to export; of peft's folder and of the file in it."""
    settings, forms = READ_BACK[name]
    file, expected = random_adapter(model, tmp_path / "run", **settings)
    original = read_lora(file)
    for form in forms:
        out = export(file, form, tmp_path / (form if form == "peft" else f"{form}.safetensors"))
        for path in (out, out / "adapter_model.safetensors") if form == "peft" else (out,):
            lora = parse_lora(str(path))
            assert relative_error(output(pipeline_with([lora], model).transformer), expected) < TOLERANCE
            same = stock(model)
            add_lora(same, LoraConfig(**settings))
            if (name, form) == ("LoKr", "comfyui"):  # the scale is in its weights
                with pytest.raises(TrainError, match=r"the LoKr has another alpha \(expected 30.0, found 100.0\)"):
                    start_from(same, path)
                continue
            start_from(same, path)
            assert torch.equal(output(same), expected)
            again = read_lora(lora.file)
            assert (again.settings, again.weights.keys()) == (original.settings, original.weights.keys())
            assert all(torch.equal(again.weights[key], tensor) for key, tensor in original.weights.items())
    loaded = peft.PeftModel.from_pretrained(stock(model), str(tmp_path / "peft"))
    assert relative_error(output(loaded), expected) < TOLERANCE


def test_a_form_that_its_program_cannot_load_is_refused(model: Path, tmp_path: Path) -> None:
    def message(settings: dict[str, Any], form: str) -> str:
        folder = tmp_path / settings["type"]
        if not folder.exists():
            random_adapter(model, folder, **settings)
        result = run("qwen-train", "export", folder, "--to", form, "--out", tmp_path / "x.safetensors")
        assert result.code == 2
        assert not (tmp_path / "x.safetensors").exists()
        return " ".join(result.stderr.split())

    assert "rotates the outputs of a layer, and this one rotates its inputs → export it with --to merged" in message(
        TYPES["OFT"], "comfyui"
    )
    for name in ("LoHa", "OFT"):
        text = f"diffusers loads no {name} (expected a LoRA or a LoKr) → export it with --to peft, or with --to merged"
        assert text in message(TYPES[name], "diffusers")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("theirs", ["a LoKr of ai-toolkit", "a LoKr of SimpleTuner", "a LoHa"])
def test_files_of_other_trainers_are_read(theirs: str, model: Path, tmp_path: Path) -> None:
    """ai-toolkit has two whole factors, whose alpha LyCORIS ignores; SimpleTuner writes _ for a dot."""
    generator, base = torch.Generator().manual_seed(0), stock(model).get_parameter(f"{QUERY}.weight").detach().double()
    factors = {f"hada_w{n}_{side}": shape for n in "12" for side, shape in (("a", (64, 2)), ("b", (2, 64)))}
    whole = {"lokr_w1": (4, 4), "lokr_w2": (16, 16)}
    product = {"lokr_w1": (8, 8), "lokr_w2_a": (8, 2), "lokr_w2_b": (2, 8)}
    prefix, alpha, shapes = {
        "a LoKr of ai-toolkit": (f"diffusion_model.{QUERY}", 1e10, whole),
        "a LoKr of SimpleTuner": (f"lycoris_{QUERY.replace('.', '_')}", 1.0, product),
        "a LoHa": (QUERY, 4.0, factors),
    }[theirs]
    own = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    own["alpha"] = torch.tensor(alpha)
    file = tmp_path / "theirs.safetensors"
    save_file({f"{prefix}.{name}": tensor for name, tensor in own.items()}, file)
    merged = merged_weights(file, model, tmp_path / "merged")
    assert_equal_weights(merged[f"{QUERY}.weight"].double(), by_comfyui(own, base, earlier=True), base)
    changed = stock(model)
    changed.load_state_dict(merged)
    converted = export(file, "comfyui", tmp_path / "comfyui.safetensors")
    for path in (file, converted):
        assert (
            relative_error(output(pipeline_with([WeightedLora(path)], model).transformer), output(changed)) < TOLERANCE
        )
    for earlier in (True, False):
        found = by_comfyui(of_query(converted, "diffusion_model."), base, earlier=earlier)
        assert_equal_weights(found, merged[f"{QUERY}.weight"].double(), base)


def test_a_scale_that_trainers_disagree_on_is_refused(model: Path, tmp_path: Path) -> None:
    prefix, file = f"lora_unet_{QUERY.replace('.', '_')}", tmp_path / "theirs.safetensors"
    shapes = {"lokr_w1": (8, 8), "lokr_w2": (8, 8), "alpha": ()}
    save_file({f"{prefix}.{name}": torch.ones(shape) for name, shape in shapes.items()}, file)
    with pytest.raises(TrainError, match="a LoKr of whole factors, of which trainers with these names differ"):
        check_loras(open_model(str(model), ("transformer",)), [WeightedLora(file)], False, "none")


def test_damaged_files_are_refused(model: Path, tmp_path: Path) -> None:
    start = f"transformer.{QUERY}."
    cases: list[tuple[dict[str, tuple[int, ...]], str]] = [
        ({"lokr_w1": (8, 8)}, "a module lacks a matrix (expected lokr_w2_a, found none)"),
        ({"lokr_w1": (8, 8), "lokr_w2_a": (8, 2), "lokr_w2_b": (3, 8)}, "a matrix has no partner of its rank"),
        ({"lokr_w1": (8, 8), "lokr_w2": (8, 9)}, "a layer of 72 inputs and 64 outputs, found weights (64, 64)"),
        (
            {"lokr_w1": (8, 8), "lora_A.weight": (2, 64)},
            f"a LoKr has only tensors named lokr_… (found {QUERY}.lora_A.weight)",
        ),
        ({"hada_w1_a": (64, 2), "hada_w1_b": (2, 64)}, "a module lacks a matrix (expected hada_w2_a, found none)"),
        ({"oft_R.weight": (4, 119)}, "not the triangle of a block (found 119 elements in a row)"),
        ({"oft_R.weight": (4, 120)}, "an OFT without peft's settings"),
    ]
    for number, (shapes, message) in enumerate(cases):
        file = tmp_path / f"{number}.safetensors"
        save_file({start + name: torch.ones(shape) for name, shape in shapes.items()}, file)
        with pytest.raises(TrainError) as error:
            check_loras(open_model(str(model), ("transformer",)), [WeightedLora(file)], False, "none")
        assert message in " ".join(str(error.value).split()), (number, str(error.value))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("lora", {"rank_pattern": {"(([a-z_.0-9])+)+x": 2}}, "rank_pattern (found {'(([a-z_.0-9])+)+x': 2})"),
        ("lora", {"alpha_pattern": {"a?" * 30 + "a" * 30: 2}}, "alpha_pattern (found {'a?a?a?"),
        ("lora", {"alpha_pattern": {"(": 2}}, "alpha_pattern (found {'(': 2})"),
        ("lora", {"rank_pattern": [1]}, "rank_pattern (found [1])"),
        ("lora", {"alpha_pattern": {"to_q": "x"}}, "alpha_pattern (found {'to_q': 'x'})"),
        ("lora", {"r": 2.5}, "r (found 2.5)"),
        ("lora", {"r": 10**9}, f"{QUERY} (expected r 1000000000, found 2)"),
        ("lora", {"lora_alpha": None}, "lack one without which the scale is unknown (expected lora_alpha)"),
        ("lora", {"lora_alpha": math.inf}, "lora_alpha (found inf)"),
        ("lora", {"init_lora_weights": "pissa"}, "init_lora_weights (found pissa)"),
        ("lora", {"modules_to_save": ["norm_out"]}, "modules_to_save (found ['norm_out'])"),
        ("lora", {"of_a_later_peft": 1}, "of_a_later_peft (found 1)"),
        ("lora", {"use_dora": True}, "does not belong to the tensors of this LoRA (found use_dora=True)"),
        ("lora", {"peft_type": "LOHA"}, "a LoRA with the settings of another type (found LOHA)"),
        ("loha", {"alpha": "x"}, "alpha (found x)"),
        ("loha", {"r": 3}, f"{QUERY} (expected r 3, found 2)"),
        ("oft", {"oft_block_size": 32}, f"{QUERY} (expected oft_block_size 32, found 16)"),
        ("oft", {"eps": "a"}, "eps (found a)"),
    ],
)
def test_settings_in_a_file_are_checked_before_peft_gets_them(
    kind: str, settings: dict[str, Any], message: str, model: Path, tmp_path: Path
) -> None:
    """Each of these made peft hang, take all memory, change the base weights, or end in a traceback."""
    file = small_adapter(tmp_path, kind, settings)
    for read in (
        read_lora,
        lambda it: check_loras(open_model(str(model), ("transformer",)), [WeightedLora(it)], *NONE),
    ):
        with pytest.raises(TrainError) as error:
            read(file)
        what, _, values = message.partition(" (")
        for part in (str(file), what, values):
            assert part in str(error.value)


def small_adapter(folder: Path, kind: str, settings: dict[str, Any]) -> Path:
    """An adapter of one layer, with these settings in its header."""
    shapes = {
        "lora": {"lora_A.weight": (2, 64), "lora_B.weight": (64, 2)},
        "loha": {f"hada_w{i}_{side}": shape for i in (1, 2) for side, shape in (("a", (64, 2)), ("b", (2, 64)))},
        "oft": {"oft_R.weight": (4, 120)},
    }[kind]
    own = {"lora": {"r": 2, "lora_alpha": 1}, "loha": {"r": 2, "alpha": 1}, "oft": {"oft_block_size": 16}}[kind]
    header = {"peft_type": kind.upper(), "target_modules": [QUERY], **own, **settings}
    text = json.dumps({f"transformer.{name}": value for name, value in header.items()})
    file, generator = folder / f"{kind}.safetensors", torch.Generator().manual_seed(0)
    tensors = {f"transformer.{QUERY}.{name}": torch.randn(it, generator=generator) for name, it in shapes.items()}
    save_file(tensors, file, {METADATA_KEY: text})
    return file


NO_LORA: dict[str, tuple[Tensor, str]] = {
    "I64": (torch.ones(2, 64, dtype=torch.int64), "or float64, found int64)"),
    "BOOL": (torch.ones(2, 64, dtype=torch.bool), "or float64, found bool)"),
    "F8": (torch.ones(2, 64).to(torch.float8_e4m3fn), "or float64, found float8_e4m3fn)"),
    "C64": (torch.ones(2, 64, dtype=torch.complex64), "or float64, found complex64)"),
    "NaN": (torch.full((2, 64), math.nan), "(expected finite numbers, found 128 of 128 numbers NaN or infinite)"),
    "Inf": (torch.ones(2, 64).index_fill(1, torch.tensor([5]), -math.inf), "found 2 of 128 numbers NaN or infinite)"),
    "rank 0": (torch.ones(0, 64), "a LoRA of rank 0 changes nothing (found shape (0, 64))"),
}


@pytest.mark.parametrize("name", NO_LORA)
def test_numbers_that_no_adapter_has_are_refused_by_name(name: str, model: Path, tmp_path: Path) -> None:
    """Wherever a file enters: export, predict, train.lora.weights and train.assistant_lora."""
    file, (tensor, message) = tmp_path / "theirs.safetensors", NO_LORA[name]
    start, partner = f"transformer.{QUERY}.lora_", torch.ones(64, len(tensor))
    save_file({f"{start}A.weight": tensor, f"{start}B.weight": partner}, file)
    for read in (
        lambda: export_file(file, "comfyui", tmp_path / "out.safetensors"),
        lambda: check_loras(open_model(str(model), ("transformer",)), [WeightedLora(file)], *NONE),
        lambda: start_from(None, file),
        lambda: read_assistant(WeightedLora(file), load_config(None, []).train, model / "transformer"),
    ):
        with pytest.raises(TrainError) as error:
            read()
        assert str(error.value).startswith(f"{file}: {start}A.weight: ")
        assert message in str(error.value)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_files_expressions_mean_what_they_mean_to_peft_and_its_targets_follow_from_its_tensors(
    model: Path, tmp_path: Path
) -> None:
    endless = "(([a-z_.0-9])+)+x"
    patterns = {r"transformer_blocks\.\d+\.attn\.to_q": 4.0}
    settings = {"r": 8, "rank_pattern": {"attn.to_[qk]": 2}, "alpha_pattern": patterns}
    file = small_adapter(tmp_path, "lora", {**settings, "target_modules": endless, "exclude_modules": endless})
    tensors = load_file(file)
    weight = stock(model).get_parameter(f"{QUERY}.weight") + 4.0 / 2 * (
        tensors[f"transformer.{QUERY}.lora_B.weight"] @ tensors[f"transformer.{QUERY}.lora_A.weight"]
    )
    assert torch.allclose(merged_weights(file, model, tmp_path / "merged")[f"{QUERY}.weight"], weight)
    expected = stock(model)
    expected.get_parameter(f"{QUERY}.weight").data.copy_(weight)
    found = output(pipeline_with([WeightedLora(file)], model).transformer)
    assert relative_error(found, output(expected)) < TOLERANCE


# ---- predict ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("settings", TYPES.values(), ids=TYPES)
def test_predict_loads_weighs_and_merges(settings: dict[str, Any], model: Path, tmp_path: Path) -> None:
    file, expected = random_adapter(model, tmp_path / "run", **settings)
    for merge in (False, True):
        pipeline = pipeline_with([WeightedLora(file)], model, merge=merge)
        assert relative_error(output(pipeline.transformer), expected) < TOLERANCE
        pipeline.disable_lora() if not merge else None
        assert merge or torch.equal(output(pipeline.transformer), output(stock(model)))
    if settings["type"] == "oft":
        with pytest.raises(ConfigError, match=r"an OFT has no scale \(expected weight 1, found 0.5\)"):
            pipeline_with([parse_lora(f"{file}:0.5")], model)
        return
    halved, _ = random_adapter(model, tmp_path / "halved", **{**settings, "lora_alpha": settings["lora_alpha"] / 2})
    expected = output(pipeline_with([WeightedLora(halved)], model).transformer)
    for merge in (False, True):
        pipeline = pipeline_with([WeightedLora(file, 0.5)], model, merge=merge)
        assert relative_error(output(pipeline.transformer), expected) < TOLERANCE


def test_several_types_are_merged_one_after_the_other(model: Path, tmp_path: Path) -> None:
    files = [random_adapter(model, tmp_path / name, **TYPES[name])[0] for name in ("LoKr", "OFT", "LoHa")]
    loras = [WeightedLora(file) for file in files]
    with pytest.raises(ConfigError) as error:
        pipeline_with(loras, model)
    assert "adapters of several types need --merge (found LoHa, LoKr, OFT)" in str(error.value)
    found = pipeline_with(loras, model, merge=True).transformer.get_parameter(f"{QUERY}.weight").detach().double()
    weight = base = stock(model).get_parameter(f"{QUERY}.weight").detach().double()
    for name, file in zip(("LoKr", "OFT", "LoHa"), files, strict=True):
        weight = by_the_formula(of_query(file, "transformer."), weight, TYPES[name])
    assert_equal_weights(found, weight, base)


# ---- training --------------------------------------------------------------------------------------------------------

RESUMED = {
    "LoKr": {"type": "lokr", "rank": 4, "rank_dropout": 0.3, "module_dropout": 0.2, "init_weights": "lycoris"},
    "LoHa": {"type": "loha", "rank": 4, "rank_dropout": 0.3},
    "COFT": {"type": "oft", "module_dropout": 0.3, "coft": True},
    "ranks of their own": {"rank_pattern": {"to_q": 3, "0.attn.to_k": 7}, "alpha_pattern": {"to_v": 2}},
}


@pytest.mark.parametrize("name", ["LoKr", *map(slow, list(RESUMED)[1:])])
def test_a_resumed_run_equals_an_uninterrupted_one(train: Trainer, name: str) -> None:
    """With everything random, an EMA, and gradients of checkpointed blocks; and the adapter has learned something."""
    lora = {f"train.lora.{key}": value for key, value in RESUMED[name].items()}
    settings = {**EVERYTHING_RANDOM, "train.lora.lora_dropout": 0.0, "train.ema_decay": 0.9, **lora}
    settings |= {"train.max_steps": 2, "train.checkpointing_steps": 1, "lr_scheduler.name": "constant"}
    whole = written(train(settings=settings, out="whole"))
    train(settings={**settings, "train.max_steps": 1})
    assert differences(written(train("--resume", settings=settings)), whole) == []
    learned = load_file(train.folder / "out" / LORA)
    first = load_file(train.folder / "out" / "checkpoint-1" / LORA)
    changed = {key.split(".attn.")[1] for key, tensor in learned.items() if not torch.equal(first[key], tensor)}
    assert changed == {key.split(".attn.")[1] for key in learned}


def test_a_run_of_the_earlier_settings_is_resumed() -> None:
    """A checkpoint that says nothing of the type is a LoRA's; of another type it says so."""
    assignments = ["train.lora.rank=8"]
    earlier = fixed_settings(load_config(None, assignments))
    earlier["lora"] = {
        name: earlier["lora"][name] for name in ("rank", "lora_alpha", "lora_dropout", "target_modules")
    } | {"use_rslora": False, "use_dora": False, "init_lora_weights": "gaussian"}
    assert setting_differences(earlier, fixed_settings(load_config(None, assignments))) == []
    lokr = fixed_settings(load_config(None, [*assignments, "train.lora.type=lokr"]))
    assert setting_differences(earlier, lokr) == ["train.lora.type"]


def test_starting_from_another_type_or_scale_is_refused(model: Path, tmp_path: Path) -> None:
    file, expected = random_adapter(model, tmp_path / "run", **TYPES["LoHa"])
    same = stock(model)
    add_lora(same, LoraConfig(**TYPES["LoHa"]))
    start_from(same, file.parent)
    assert torch.equal(output(same), expected)
    changes: list[tuple[dict[str, Any], str]] = [
        (TYPES["LoKr"], "not a LoKr (found a LoHa)\n  → set train.lora.type=loha"),
        ({**TYPES["LoHa"], "lora_alpha": 4}, "the LoHa has another alpha (expected 4.0, found 5.0)"),
        ({**TYPES["LoHa"], "rank_pattern": {}}, "attn.to_q: the LoHa has another r (expected 3, found 2)"),
    ]
    for change, message in changes:
        other = stock(model)
        add_lora(other, LoraConfig(**change))
        with pytest.raises(TrainError) as error:
            start_from(other, file)
        assert message in str(error.value)


# ---- patterns --------------------------------------------------------------------------------------------------------


def test_patterns_give_the_ranks_and_scales_that_they_say(model: Path, tmp_path: Path) -> None:
    """The first of overlapping patterns counts, also for diffusers, whose files sort them."""
    patterns = {"transformer_blocks.0.attn.to_q": 6, "to_q": 2, r"1\.attn\.to_[kv]": 5}
    settings = {"rank": 4, "rank_pattern": patterns, "alpha_pattern": {"to_q": 3, "to_k": 7}}
    file, expected = random_adapter(model, tmp_path / "run", **settings)
    ranks = {name: len(tensor) for name, tensor in load_file(file).items() if "lora_A" in name}
    assert ranks == {
        f"transformer.transformer_blocks.{block}.attn.{module}.lora_A.weight": rank
        for block, own in enumerate(((6, 4, 4, 4), (2, 5, 5, 4)))
        for module, rank in zip(("to_q", "to_k", "to_v", "to_out.0"), own, strict=True)
    }
    pipeline = stock_pipeline(model)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    assert relative_error(output(pipeline.transformer), expected) < TOLERANCE
    own, base = of_query(file, "transformer."), stock(model).get_parameter(f"{QUERY}.weight").detach().double()
    update = 3 / 2 * own["lora_B.weight"].double() @ own["lora_A.weight"].double()
    merged = merged_weights(file, model, tmp_path / "merged")[f"{QUERY}.weight"].double()
    assert_equal_weights(merged, base + update, base)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"type": "lokr", "use_dora": True},
            "train.lora.use_dora is not a setting of this type of adapter (expected train.lora.type=lora, found "
            "train.lora.type=lokr and use_dora=True)\n  → leave train.lora.use_dora out, or set another "
            "train.lora.type",
        ),
        ({"type": "oft", "rank": 8}, "train.lora.rank is not a setting of this type of adapter (expected "),
        (
            {"rank_dropout": 0.1},
            "(expected train.lora.type=lokr or loha, found train.lora.type=lora and rank_dropout=0.1)",
        ),
        ({"rank_pattern": {"to_(q": 2}}, "not a regular expression: missing ), unterminated subpattern at position 3"),
        ({"type": "boft"}, "expected lora, lokr, loha or oft, found boft"),
    ],
)
def test_settings_that_the_type_does_not_take_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, [f"train.lora.{name}={json.dumps(value)}" for name, value in settings.items()])
    assert message in str(error.value)


def test_what_the_transformer_cannot_have_is_refused(model: Path) -> None:
    for settings, message in (
        (
            {"type": "oft", "oft_block_size": 24},
            "oft_block_size must divide the inputs of every target module (found 24)",
        ),
        ({"rank_pattern": {"to_z": 2}}, "train.lora.rank_pattern matches no module that has the adapter (found to_z)"),
        ({"alpha_pattern": {"img_mlp.*": 2}}, "train.lora.alpha_pattern matches no module that has the adapter"),
    ):
        with pytest.raises(ConfigError) as error:
            add_lora(stock(model), LoraConfig(**settings))
        assert message in str(error.value)


def test_bases_that_a_type_cannot_have_are_refused(train: Trainer) -> None:
    result = train.try_(settings={"train.lora.type": "loha", "model.quantization": "nf4"})
    refused(result, "train.lora.type", "a LoHa needs the shape of each weight, which packed weights have lost")
    refused(result, "(found model.quantization=nf4)", "or model.quantization to int8 or fp8")
    pytest.importorskip("gguf")
    packed = train.folder / "a.gguf"
    write_gguf(packed, weights_of(train.model), "Q8_0")
    result = train.try_(settings={"train.lora.type": "lokr", "model.transformer": str(packed)})
    refused(result, "train.lora.type", "a LoKr needs the shape of each weight", "(found GGUF weights)")
    file = random_adapter(train.model, train.folder / "run", **TYPES["LoHa"])[0]
    with pytest.raises(ConfigError) as error:
        check_loras(
            open_model(str(train.model), ("transformer",), transformer=str(packed)), [WeightedLora(file)], *NONE
        )
    assert f"{file}: a LoHa needs the shape of each weight, which packed weights have lost" in str(error.value)
    assert "(found GGUF weights)\n  → generate with the unquantised model" in str(error.value)
    result = train.try_(settings={"train.lora.type": "oft", "train.fsdp": True})
    refused(result, "OFT rotates in float32, and train.fsdp gathers its weights in bfloat16", "set train.fsdp=false")
