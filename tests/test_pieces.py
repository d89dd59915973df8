"""Planning remembers: the pieces of a step's peak against the step itself, and commands that import no torch."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from qwen_cache.encode.memory import text_memory, vae_memory
from qwen_cache.models.devices import LiveBytes
from qwen_cache.settings.load import Config, load_config
from qwen_cache.storage.measured import versions
from qwen_train.memory import pieces, step
from qwen_train.memory.plan import SAVINGS
from qwen_train.memory.prediction import changed, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import with_layout

from .support.caches import SMALL as SMALL_BUILD
from .support.commands import HEAVY, run
from .support.full_size import EDIT, EDIT_21, REAL, REAL_21
from .support.marks import slow
from .support.paths import load_tool
from .test_memory import MIXED_21, RAGGED, SETTINGS, SMALL, SMALL_21, forget

TINY = SampleSize(((1, 3, 5), (1, 2, 7)), 21)
LONG_TEXT = SampleSize(((1, 16, 16),), 1900)
TO_IMAGE = SampleSize(((1, 72, 56),), 150)
TWO_CONTROLS = SampleSize(((1, 48, 80), (1, 64, 64), (1, 31, 17)), 733)

# ---- against the step ------------------------------------------------------------------------------------------------


def extrapolated(peaks: Sequence[float], transformer: dict[str, Any], settings: Config) -> float:
    """The peak with all blocks, from those with some."""
    if len(peaks) == 1:
        return peaks[0]
    every = int(settings.train.gradient_checkpointing) or 1
    left = (transformer["num_layers"] - pieces.depths(transformer, settings)[-1]) // every
    return peaks[1] + (peaks[1] - peaks[0]) * left


def peaks(
    transformer: dict[str, Any], settings: Config, batches: Sequence[list[SampleSize]]
) -> Iterator[tuple[float, float]]:
    """The peak by its pieces, and that of a step on this very batch, for each batch."""
    models, family = [], pieces.family_of_transformer(transformer)
    for layers in pieces.depths(transformer, settings):
        model = step.on_meta({**transformer, "num_layers": layers}, settings)
        models.append(step.training_model(model, settings, "accelerator"))
        if settings.train.gradient_accumulation_steps > 1:
            for parameter in models[-1].parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", None))
    for batch in batches:
        judge = []
        for model in models:
            judge.append(step.peak_of_step(model, batch, settings.train, family))
            model.zero_grad()
        found = [measured.step for measured in pieces.step(transformer, settings, batch, "accelerator")]
        yield extrapolated(found, transformer, settings), extrapolated(judge, transformer, settings)


REAL_BATCHES = [EDIT, [TO_IMAGE, TWO_CONTROLS, LONG_TEXT], [LONG_TEXT] * 2]
CASES = [
    pytest.param(REAL, ["train.gradient_checkpointing=true"], REAL_BATCHES, id="20B"),
    slow(REAL, ["train.gradient_checkpointing=false"], REAL_BATCHES, id="20B, no checkpointing"),
    slow(REAL, ["train.layout=padded"], REAL_BATCHES, id="20B, padded"),
    slow(REAL, ["model.quantization=int8_convrot"], REAL_BATCHES, id="20B, products in 8 bits"),
    slow({**REAL, "zero_cond_t": True}, [], REAL_BATCHES, id="2511"),
    slow(REAL, ["train.method=full"], REAL_BATCHES, id="20B, all weights"),
    slow(REAL_21, [], [EDIT_21, MIXED_21, [EDIT_21[0], MIXED_21[1]]], id="2.1"),
    slow(REAL_21, ["train.noise_draws=3"], [EDIT_21, MIXED_21], id="2.1, draws"),
]


@pytest.mark.parametrize(("transformer", "assignments", "batches"), CASES)
def test_pieces_are_within_two_percent_of_a_step_at_real_sizes(
    transformer: dict[str, Any], assignments: list[str], batches: list[list[SampleSize]]
) -> None:
    settings = with_layout(load_config(None, assignments), "cuda")
    for found, judge in peaks(transformer, settings, batches):
        assert found == pytest.approx(judge, rel=0.02)


@pytest.mark.parametrize(
    "name", [name if name == "no checkpointing" else slow(name) for name in SETTINGS if name != "LoRA in some blocks"]
)
def test_pieces_of_a_small_model_are_near_a_step_of_any_size(name: str) -> None:
    """Single samples, mixed ones, and some of a few tokens, where other tensors make the peak; at one depth, for the
    pieces of each are measured alone. A row of one sample is the same in both layouts."""
    several = [TINY] * 3, RAGGED, [*RAGGED, TINY]
    for layout, batches in (("packed", ([TINY], [RAGGED[0]], *several)), ("padded", several)):
        settings = load_config(None, [*SETTINGS[name], f"train.layout={layout}"])
        transformer = {**SMALL, "num_layers": pieces.depths(SMALL, settings)[0]}
        for batch, (found, judge) in zip(batches, peaks(transformer, settings, batches), strict=True):
            assert found == pytest.approx(judge, rel=0.02), (layout, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["as it is by default", "no checkpointing", "in float32"])
def test_pieces_of_a_joint_sequence(name: str) -> None:
    """With any number of controls; attention segment by segment, in float32, has none, and is measured for each."""
    for layout in ("packed", "padded"):
        settings = load_config(None, [*SETTINGS[name], f"train.layout={layout}"])
        batches = [MIXED_21, *([each] for each in MIXED_21)]
        for batch, (found, judge) in zip(batches, peaks(SMALL_21, settings, batches), strict=True):
            assert found == pytest.approx(judge, rel=0.02 if name != "in float32" else 1e-6), (layout, batch)


# ---- the published models --------------------------------------------------------------------------------------------


def published_here() -> bool:
    """True if the installed libraries are those of the published entries."""
    of_file: dict[str, Any] = json.loads(pieces.PUBLISHED.read_text(encoding="utf-8"))
    return bool(of_file["versions"] == versions(pieces.LIBRARIES))


def test_published_pieces_are_those_of_a_new_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails after a change of what a step computes: `python tools/make_pieces.py`.

    A step of the first model at the first depth, one of the last at the last.
    """
    if not published_here():
        pytest.skip("other versions of the libraries are measured once by whoever asks")
    tool: Any = load_tool("make_pieces")
    entries = json.loads(pieces.PUBLISHED.read_text(encoding="utf-8"))["entries"]
    questions = list(tool.questions())
    assert len(entries) == len(questions)
    asked = [each for each in questions if each[1] == "step" and each[0]["train"]["gradient_checkpointing"]]
    depth, real = 0, pieces.measure
    monkeypatch.setattr(pieces, "measure", lambda key, *rest: real({**key, "depths": [key["depths"][depth]]}, *rest))
    for question, depth in ((asked[0], 0), (asked[-1], -1)):
        name, value = tool.entry(*question)
        assert json.loads(json.dumps(value)) == [entries[name][depth]]
    name, value = tool.entry(*questions[0])
    assert value == entries[name]


@pytest.mark.parametrize("transformer", [REAL, {**REAL, "zero_cond_t": True, "_diffusers_version": "0"}, REAL_21])
def test_the_settings_that_a_plan_compares_are_published(
    transformer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the batch; other settings of the run, such as steps and rates, change nothing."""
    if not published_here():
        pytest.skip("other versions of the libraries are measured once by whoever asks")

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(pieces, "_known", {})
    monkeypatch.setattr(pieces, "measured", refuse)
    settings = load_config(None, ["train.max_steps=7", "optimizer.learning_rate=1", "train.ema_decay=0.9"])
    batch, image = (EDIT, EDIT[0]) if transformer is not REAL_21 else (EDIT_21, EDIT_21[0])
    of_20b = transformer is not REAL_21
    for changes in ({}, {"train.gradient_checkpointing": False}, *SAVINGS):
        if "train.tabulated_modulation" in changes and not of_20b:
            continue
        changes = {name: 30 if value == -1 else value for name, value in changes.items()}
        for samples in (batch, batch * 3):
            assert predict_memory(transformer, changed(settings, changes), samples, image=image).total > 0


def test_defaults_are_those_of_diffusers() -> None:
    """An entry of config.json that is a default, or that no model reads, changes no key."""
    for name, defaults in pieces.DEFAULTS.items():
        parameters = inspect.signature(getattr(diffusers, name)).parameters
        assert {each: _plain(it.default) for each, it in parameters.items() if each in defaults} == defaults
        assert parameters.keys() == defaults.keys()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# ---- remembering -----------------------------------------------------------------------------------------------------


def test_every_setting_that_changes_the_bytes_is_in_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model that is measured is made from the key alone, so equal keys have equal values."""
    forget(monkeypatch, tmp_path)
    asked: list[str] = []
    real = pieces.measure_block
    monkeypatch.setattr(pieces, "measure_block", lambda key: asked.append(json.dumps(key)) or real(key))
    settings = load_config(None, [])
    of = [
        pieces.block(SMALL, each)
        for each in (
            settings,
            changed(settings, {"train.max_steps": 3, "train.seed": 9}),
            changed(settings, {"model.quantization": "nf4"}),
            changed(settings, {"train.mixed_precision": "no"}),
        )
    ]
    assert len(asked) == 3
    assert of[0] == of[1] > of[2]
    assert of[3] == 2 * of[0]
    monkeypatch.setattr(pieces, "_known", {})  # as in another process
    assert pieces.block(SMALL, settings) == of[0]
    assert len(asked) == 3
    monkeypatch.setattr(pieces, "_known", {})
    monkeypatch.setattr(pieces, "_code", lambda: "another version of our own modules")
    assert pieces.block(SMALL, settings) == of[0]
    assert len(asked) == 4


def test_what_a_repeated_call_gives_is_counted_again_and_a_view_never() -> None:
    """One or several tensors, some of which are not asked for; the second call is not computed."""
    x, weight = torch.empty(8, 16, device="meta"), torch.empty(16, dtype=torch.bfloat16, device="meta")
    aten, kept = torch.ops.aten, []
    with LiveBytes([x, weight]) as live:
        for times in (1, 2):
            views = x.view(-1), x.t(), aten._unsafe_view(x, [16, 8])
            assert all(view.untyped_storage()._cdata == x.untyped_storage()._cdata for view in views)
            new = [x * 2, weight.float(), weight.double(), *aten.native_layer_norm(x, [16], None, None, 1e-5)]
            asked = [True, False, False]
            new += aten.native_layer_norm_backward(x, x, [16], *new[-2:], None, None, asked)
            kept += [each for each in new if each is not None]
            assert [None if each is None else (tuple(each.shape), each.dtype) for each in new] == [
                ((8, 16), torch.float32),
                ((16,), torch.float32),
                ((16,), torch.float64),
                *[((8, 16), torch.float32), ((8, 1), torch.float32), ((8, 1), torch.float32)],
                *[((8, 16), torch.float32), None, None],
            ]
            assert live.now == live.peak == 4 * times * (3 * 8 * 16 + 16 + 2 * 16 + 2 * 8)
        del kept[:], new
        assert live.now == 0


# ---- commands --------------------------------------------------------------------------------------------------------

COUNTED = """
import contextlib, io, json, sys
from qwen_cache.cli import main as cache
from qwen_train.cli import main as train
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv[:] = [program, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            (cache if program == "qwen-cache" else train)()
        except SystemExit as end:
            code = end.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue(), sorted(sys.modules)]))
"""


def test_commands_that_one_repeats_import_no_torch(
    built: Callable[[str], Path], tiny_model: Callable[[str], Path], pairs: Path, tmp_path: Path
) -> None:
    """After the first time: a dry run without and with something to encode, a plan, and a run that is refused."""
    pieces._known.clear()  # what other tests measured may be remembered in folders of their own
    text_memory.cache_clear()
    vae_memory.cache_clear()
    cache, model = built("edit-plus"), tiny_model("edit-plus")
    dry_run = ("build", pairs, "--model", model, *SMALL_BUILD, "--dry-run", "--json", "--out")
    commands: list[tuple[str, int, tuple[str | Path, ...]]] = [
        ("qwen-cache", 0, (*dry_run, tmp_path / "new")),
        ("qwen-cache", 0, (*dry_run, tmp_path / "new", "--vae-device", "cuda:0", "--text-device", "cuda:0")),
        ("qwen-train", 0, ("plan", cache, "--model", model, "--json")),
        ("qwen-train", 1, ("plan", cache, "--model", model, "--gpu-memory", "0.5GB")),
        ("qwen-train", 2, ("run", cache, "--model", model, "--out", tmp_path / "out", "--set", "train.max_tokens=8")),
    ]
    firsts = [run(program, *words) if code < 2 else None for program, code, words in commands]
    asked = json.dumps([[program, *map(str, words)] for program, _, words in commands])
    done = subprocess.run([sys.executable, "-c", COUNTED, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (program, code, arguments), first, line in zip(commands, firsts, done.stdout.splitlines(), strict=True):
        found, stdout, stderr, loaded = json.loads(line)
        assert found == code, stderr
        if first and program == "qwen-train":
            assert stdout == first.stdout
        elif first:
            assert json.loads(stdout)["memory"] == json.loads(first.stdout)["memory"]
        assert sorted({*HEAVY, "pandas"} & {*loaded}) == [], arguments
